//! `pageleap run`: starts a program with a memory policy, on CPUs, and with settings of its own.
//!
//! 1. The words of the command line become numactl's ([`spelling`]), and then [`args`].
//! 2. A [`Plan`] turns them into settings, with the machine's nodes and CPUs.
//! 3. The settings are applied to this thread, and read back (`pageleap_launch::apply`).
//! 4. Threads get places among the CPUs that are left ([`place`]).
//! 5. This process becomes the program, or a parent of it stays behind ([`watch`]).
//!
//! Nothing is changed but this process, so nothing has to be put back; with `--system` the machine
//! is, and the ledger of settings sees to it ([`system`]).

mod alloc;
mod args;
mod dry;
mod home;
mod place;
mod spelling;
mod system;
mod watch;
mod words;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use clap::{CommandFactory, Parser};
use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology, escaped};
use pageleap_launch::{
    Applied, Error, Home, MemoryPolicy, Mode, Program, Settings, ThisThread, apply,
    ask_for_huge_pages, balance, node_of_device, preloaded_first,
};

pub use args::RunArgs;
use args::Switch;
use place::Placed;
use words::Words;

use crate::output;
use crate::stop::{Refusal, Stop};

/// The exit code if the program was not started, as of env(1), nice(1) and timeout(1): codes below
/// it may be the program's.
const NOT_STARTED: u8 = 125;

/// Parses the words of the command line. Those of `pageleap run` are spelled for clap first, and a
/// mistake in them has the exit code of a program that was not started.
pub fn parse<P: Parser + CommandFactory>() -> P {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if words.get(1).is_none_or(|word| word != "run") {
        return P::parse();
    }
    let mut command = P::command();
    command.build();
    if let Some(run) = command.find_subcommand("run") {
        let rest = words.split_off(2);
        words.extend(spelling::for_clap(rest, run));
    }
    P::try_parse_from(words).unwrap_or_else(|error| {
        let code = if error.use_stderr() { NOT_STARTED.into() } else { 0 };
        let _ = error.print();
        std::process::exit(code)
    })
}

/// Starts the program. Returns only if it was not started, or if this process has stayed behind.
pub fn run(args: &RunArgs) -> ExitCode {
    start(args).unwrap_or_else(|stop| {
        let (code, error) = match stop {
            Unstarted::Launch(error) => (error.exit_code(), error.into()),
            Unstarted::Request(Stop::Refused(error) | Stop::Failed(error)) => (NOT_STARTED, error),
            Unstarted::Request(Stop::Interrupted { found, .. }) => (NOT_STARTED, anyhow!(found)),
        };
        output::note(&format!("error: {error:#}"));
        ExitCode::from(code)
    })
}

/// Why the program was not started.
enum Unstarted {
    /// The kernel's reasons.
    Launch(Error),
    /// A request that makes no sense, or this command's own failure.
    Request(Stop),
}

impl<E: Into<Stop>> From<E> for Unstarted {
    fn from(error: E) -> Unstarted {
        Unstarted::Request(error.into())
    }
}

fn launch(error: Error) -> Unstarted {
    Unstarted::Launch(error)
}

/// The settings that the options ask for, before the kernel has been asked.
pub struct Plan {
    settings: Settings,
    /// Changes of the program's environment.
    environment: Vec<(OsString, Option<OsString>)>,
    /// A sentence for each setting that will have no effect, or not all of it.
    notes: Vec<String>,
    /// How the program asks for huge pages, if it has to.
    told: Option<String>,
    /// How its threads come to CPUs.
    placed: Placed,
    /// The library of the allocator that was asked for.
    library: Option<PathBuf>,
    /// The node on which it starts, and those over which it grows.
    home: Option<Home>,
    /// Settings of the whole machine, with their values.
    system: Vec<(&'static str, &'static str)>,
    command: Vec<OsString>,
}

fn start(args: &RunArgs) -> Result<ExitCode, Unstarted> {
    if let Some(why) = &args.of_numactl.0 {
        return Err(Refusal::new(why.clone()).into());
    }
    let Some((name, arguments)) = args.command.split_first() else {
        return Err(Refusal::new("no command; `pageleap run --help` has examples".into()).into());
    };
    let files = SysFiles::host();
    // Settings without nodes and CPUs do without it, such as in a container without /sys.
    let topology = args.names_nodes_or_cpus().then(|| Topology::read_from(&files)).transpose()?;
    let mut plan = Plan::of(args, topology.as_ref(), &files)?;
    if args.no_fallback
        && let Some(note) = plan.notes.first()
    {
        return Err(Refusal::new(format!("{note} (--no-fallback)")).into());
    }
    // Looked for before anything is set, but a trial needs no program.
    let program = Program::find(name.clone(), arguments.to_vec());
    let program = if args.dry_run { program.ok() } else { Some(program.map_err(launch)?) };
    let words = Words::open(args.report_file.as_deref())?;
    let name = escaped(&name.to_string_lossy());
    let wishes = if args.dry_run { &[] } else { &plan.system[..] };
    let mut borrowed = system::borrow(wishes, &name, &words)?;
    let topology = topology.as_ref();
    let applied =
        apply(&plan.settings, topology, &mut ThisThread, args.no_fallback).map_err(launch)?;
    plan.preload(args, program.as_ref())?;
    let placed = Placed::of(&plan, args, topology, &files, program.as_ref())?;
    plan.place(placed);
    let said = plan.told.iter().chain(&plan.notes).chain(&applied.notes);
    said.for_each(|line| words.say(line));
    match program {
        Some(program) if !args.dry_run => {
            let poller = plan.placed.poller.take();
            if !args.verbose && poller.is_none() && borrowed.is_none() {
                return Err(launch(program.exec(&plan.environment)));
            }
            if args.verbose {
                told(&applied, &plan).iter().for_each(|line| words.say(line));
            }
            let watch = watch::Watch::new(&words, args.verbose, poller, plan.library.as_deref());
            let share = |child| {
                if let Some(borrowed) = &mut borrowed {
                    system::share(borrowed, child, &name, &words);
                }
            };
            let outcome = watch.run(&program, &plan.environment, share).map_err(launch)?;
            // Before this process ends, perhaps by the program's signal.
            drop(borrowed);
            Ok(ExitCode::from(outcome.repeat()))
        }
        _ => {
            output::write(&match args.json {
                true => dry::json(&applied, &plan)?,
                false => dry::text(&applied, &plan),
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The settings in force, as lines for `--verbose`.
fn told(applied: &Applied, plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let Settings { memory, cpus, is_thp_disabled, .. } = &applied.settings;
    lines.extend(memory.as_ref().map(|policy| format!("memory policy: {policy}")));
    let list = |cpus: &Vec<usize>| pageleap::topology::id_list(cpus.iter().copied());
    lines.extend(cpus.as_ref().map(|cpus| format!("CPUs: {}", list(cpus))));
    lines.extend(is_thp_disabled.map(|disabled| match disabled {
        true => "transparent huge pages: off".to_owned(),
        false => "transparent huge pages: as the system's setting is".to_owned(),
    }));
    if let Some(home) = &plan.home {
        lines.extend(home.passed_over.iter().cloned());
        lines.push(home.reason.clone());
    }
    lines.extend(plan.placed.told());
    lines
}

impl Plan {
    fn of(
        args: &RunArgs,
        topology: Option<&Topology>,
        files: &SysFiles,
    ) -> Result<Plan, Unstarted> {
        let mut plan = Plan {
            settings: Settings::default(),
            environment: Vec::new(),
            notes: Vec::new(),
            told: None,
            placed: Placed::default(),
            library: None,
            home: None,
            system: system::wishes(args)?,
            command: args.command.clone(),
        };
        if let Some(topology) = topology {
            let named = Named { args, topology, files };
            plan.settings.memory = named.policy()?;
            plan.settings.cpus = named.cpus()?;
            plan.home = home::of(args, topology, files)?;
            let on_home = plan.home.as_ref().map(|home| home::cpus(home, topology));
            plan.settings.cpus = plan.settings.cpus.or(on_home);
        }
        if args.localalloc {
            plan.settings.memory = Some(MemoryPolicy::new(Mode::Local, Vec::new()));
        }
        // A setting that is off for the whole machine need not be off for the program, too.
        let is_off = |switch| args.system && switch == Switch::Off;
        if let Some(switch) = args.balancing.filter(|switch| !is_off(*switch)) {
            let asked = plan.settings.memory.take();
            let (policy, note) = balance(asked, switch == Switch::On, files).map_err(launch)?;
            plan.settings.memory = Some(policy);
            plan.notes.extend(note.filter(|_| !args.system));
        }
        if let Some(switch) = args.thp.filter(|switch| !is_off(*switch)) {
            plan.settings.is_thp_disabled = Some(switch == Switch::Off);
        }
        if args.thp == Some(Switch::On) && !args.system {
            let asked = ask_for_huge_pages(files, |name| std::env::var_os(name));
            plan.environment.extend(asked.environment);
            plan.told = asked.told;
            plan.notes.extend(asked.without_effect);
        }
        Ok(plan)
    }

    /// Preloads the allocator that was asked for.
    fn preload(&mut self, args: &RunArgs, program: Option<&Program>) -> Result<(), Unstarted> {
        let Some(alloc) = &args.alloc else { return Ok(()) };
        let before = self.inherited()(alloc::PRELOAD);
        if let Some(library) = alloc::library(alloc, before.clone(), program)? {
            self.notes.extend(alloc::replaced(&library, before.as_deref()));
            let value = preloaded_first(&library, before);
            self.environment.push((alloc::PRELOAD.into(), Some(value)));
            self.library = Some(library);
        }
        Ok(())
    }

    /// The environment of the program so far, by name.
    fn inherited(&self) -> impl Fn(&str) -> Option<OsString> {
        let changes = self.environment.clone();
        move |name| match changes.iter().rev().find(|(changed, _)| changed == name) {
            Some((_, value)) => value.clone(),
            None => std::env::var_os(name),
        }
    }

    fn place(&mut self, mut placed: Placed) {
        // A later change of a variable counts.
        let is_changed = |name: &OsString| placed.environment.iter().any(|(new, _)| new == name);
        self.environment.retain(|(name, _)| !is_changed(name));
        self.environment.append(&mut placed.environment);
        self.notes.append(&mut placed.notes);
        self.placed = placed;
    }
}

/// The nodes and CPUs that the options name.
struct Named<'a> {
    args: &'a RunArgs,
    topology: &'a Topology,
    files: &'a SysFiles,
}

/// Options that name nodes to take memory from, by their id, with their policies.
const OF_MEMORY: [(&str, Mode); 5] = [
    ("interleave", Mode::Interleave),
    ("weighted_interleave", Mode::WeightedInterleave),
    ("membind", Mode::Bind),
    ("preferred", Mode::Preferred),
    ("preferred_many", Mode::PreferredMany),
];

impl Named<'_> {
    /// The memory policy that was asked for.
    fn policy(&self) -> Result<Option<MemoryPolicy>, Unstarted> {
        for (option, mode) in OF_MEMORY {
            let Some(text) = self.text(option) else { continue };
            let nodes = self.nodes(option, text)?;
            if mode == Mode::Preferred && nodes.len() > 1 {
                let why =
                    format!("{} {text}: one node; --preferred-many takes several", flag(option));
                return Err(Refusal::new(why).into());
            }
            return Ok(Some(MemoryPolicy::new(mode, nodes)));
        }
        Ok(None)
    }

    /// The CPUs that were asked for, by number or by node.
    fn cpus(&self) -> Result<Option<Vec<usize>>, Unstarted> {
        if let Some(text) = &self.args.physcpubind {
            let cpus = match self.args.all {
                true => self.topology.parse_online_cpus(text),
                false => self.topology.parse_cpus(text),
            };
            return Ok(Some(parsed("--physcpubind", cpus)?));
        }
        let option = "cpunodebind";
        let Some(text) = self.text(option) else { return Ok(None) };
        let nodes = self.nodes(option, text)?;
        let of_nodes = self.topology.nodes().iter().filter(|node| nodes.contains(&node.id));
        let mut cpus: Vec<usize> = of_nodes.flat_map(|node| node.cpus.iter().copied()).collect();
        cpus.sort_unstable();
        // Emulated nodes may share CPUs.
        cpus.dedup();
        if cpus.is_empty() {
            let why = format!("{} {text}: the nodes have no CPUs", flag(option));
            return Err(Refusal::new(why).into());
        }
        Ok(Some(cpus))
    }

    /// The text of an option that names nodes.
    fn text(&self, option: &str) -> Option<&str> {
        let args = self.args;
        let text = match option {
            "interleave" => &args.interleave,
            "weighted_interleave" => &args.weighted_interleave,
            "membind" => &args.membind,
            "preferred" => &args.preferred,
            "preferred_many" => &args.preferred_many,
            "cpunodebind" => &args.cpunodebind,
            _ => &None,
        };
        text.as_deref()
    }

    /// The nodes that an option names.
    fn nodes(&self, option: &str, text: &str) -> Result<Vec<NodeId>, Unstarted> {
        let flag = flag(option);
        let same = match text.strip_prefix(spelling::SAME) {
            Some(other) => {
                let named = self.text(other).filter(|text| !text.starts_with(spelling::SAME));
                named.map(|text| self.nodes(other, text)).transpose()?
            }
            None => None,
        };
        let text = if same.is_some() { "same" } else { text };
        let text = &node_of_device(text, self.files).map_err(launch)?;
        let (topology, same) = (self.topology, same.as_deref());
        if self.args.all {
            let nodes = parsed(&flag, topology.parse_online_nodes(text, same))?;
            return if option == "cpunodebind" {
                Ok(nodes)
            } else {
                self.with_memory(&flag, text, nodes)
            };
        }
        Ok(match option {
            "cpunodebind" => parsed(&flag, topology.parse_nodes_with_cpus(text, same)),
            _ => parsed(&flag, topology.parse_nodes(text, same)),
        }?)
    }

    /// Of all online nodes that a text names, those with memory.
    fn with_memory(
        &self,
        flag: &str,
        text: &str,
        nodes: Vec<NodeId>,
    ) -> Result<Vec<NodeId>, Unstarted> {
        let has_memory = |node: &NodeId| self.topology.node(*node).is_ok();
        match nodes.iter().find(|node| !has_memory(node)) {
            // `all` and `!1` are about the nodes that can have a part in it.
            Some(_) if text.contains("all") || text.starts_with('!') => {
                Ok(nodes.into_iter().filter(has_memory).collect())
            }
            Some(node) => Err(Refusal::new(format!("{flag} {text}: {node} has no memory")).into()),
            None => Ok(nodes),
        }
    }
}

/// The flag of an option.
fn flag(option: &str) -> String {
    format!("--{}", option.replace('_', "-"))
}

/// Names the flag of an argument that makes no sense.
fn parsed<T>(flag: &str, result: Result<T, pageleap::Error>) -> Result<T, Stop> {
    result.map_err(|error| match error.is_usage() {
        true => Stop::Refused(anyhow!("{flag}: {error}")),
        false => error.into(),
    })
}
