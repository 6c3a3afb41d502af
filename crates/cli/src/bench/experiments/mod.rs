//! `pageleap bench access`, `copy` and `quiet`: experiments of *Taking the Leap*.
//!
//! A [`Plan`] is a list of scenes. The scenes are measured one after the other, the cases of each
//! in turns ([`pageleap_measure::method`]). Nothing is drawn or written while a case is measured.

mod args;

use std::any::Any;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use pageleap::topology::{SysFiles, Topology};
use pageleap::{Engine, EngineChoice, NodeId, PageSize};
use pageleap_measure::document::{Value, fact};
use pageleap_measure::experiments::access::{self, Access};
use pageleap_measure::experiments::tpch::Tables;
use pageleap_measure::experiments::ways::{self, Way, Ways};
use pageleap_measure::experiments::writes::{self, Loaded, Purpose, Switch, Writes};
use pageleap_measure::experiments::{
    About, Part, Results, Scene, copy, quiet, scale, sustained, tpch,
};
use pageleap_measure::figures::human_bytes;
use pageleap_measure::host::memory_limit;
use pageleap_measure::load::{Rate, Rows};
use pageleap_settings::{User, Wish};

pub use args::ExperimentCommand;
use args::{
    AccessArgs, CopyArgs, ExperimentArgs, OverheadArgs, QuietArgs, ScaleArgs, SustainedArgs,
    WritesArgs,
};

use super::memory::{USABLE_SHARE, missing_huge_pages, once_each, stop_between_leaps};
use crate::environment::Environment;
use crate::machine::{self, NodeMemory, choose_nodes};
use crate::progress::{self, Steps, clock};
use crate::stop::{Refusal, Stop};
use crate::{export, interrupt, settings};

/// A note on rivals.
const ONE_NODE: &str = "move_pages, mbind and automatic balancing need a second node: pages that \
                        are on the node already stay. On one node, `bench copy` of 1 GB or more \
                        times the kernel's own migration by compaction.";
/// Another one.
const SHORT: &str = "automatic balancing waits for a time-out of 10 s in most rounds, and is left \
                     out with --quick.";

/// Another one.
const NO_ACCESS: &str = "automatic balancing moves nothing while nothing accesses the memory.";
/// Another one.
const NO_WRITER: &str = "automatic balancing is left out: it moves pages towards the writer, for \
                         which the destination has no second CPU.";

/// Between two lines about progress where no terminal shows a bar.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Runs an experiment.
pub fn run(command: &ExperimentCommand) -> Result<(), Stop> {
    match command {
        ExperimentCommand::Access(args) => run_access(args),
        ExperimentCommand::Copy(CopyArgs { common }) => {
            run_ways(&copy::ABOUT, common, &|page, nodes| {
                let mut all = vec![(String::new(), copy::ways())];
                // Compaction takes 8 GB, however small the memory is.
                let is_large = common.bytes() >= 1 << 30;
                if page == PageSize::Base && nodes.from == nodes.to && is_large {
                    all.push((", the kernel's own migration".to_owned(), copy::by_compaction()));
                }
                all
            })
        }
        ExperimentCommand::Overhead(args) => run_overhead(args),
        ExperimentCommand::Quiet(args) => run_quiet(args),
        ExperimentCommand::Scale(args) => run_scale(args),
        ExperimentCommand::Sustained(args) => run_sustained(args),
        ExperimentCommand::Tpch(args) => run_tpch(&args.common),
        ExperimentCommand::Writes(args) => run_writes(args),
    }
}

/// The nodes of an experiment, and a CPU.
struct Nodes {
    all: Vec<NodeMemory>,
    from: NodeId,
    to: NodeId,
    /// Of the destination, or of all nodes if that has none for this process. Not empty.
    cpus: Vec<usize>,
    /// Another CPU than the first of these, of the destination if possible; the same one if there is
    /// no other.
    writer_cpu: usize,
    /// Whether that is a CPU of the destination.
    writer_is_there: bool,
}

impl Nodes {
    fn choose(args: &ExperimentArgs) -> Result<Nodes, Stop> {
        let all = machine::nodes(PageSize::Huge2M)?;
        let (from, to) = choose_nodes(&all, args.from, args.to)?;
        let topology = Topology::read()?;
        // Sibling hyper-threads last: a writer must not share the core of the thread that copies.
        let of_node = |id| {
            let node = topology.node(id).ok().and_then(|node| machine::initiator(&topology, node));
            node.map_or(Vec::new(), |node| [&node.cpus[..1], &node.injectors, &node.cpus].concat())
        };
        let (from, to) = (NodeId(from), NodeId(to));
        let mut cpus = once_each(&of_node(to));
        let of_destination = cpus.clone();
        cpus.extend(topology.nodes().iter().flat_map(|node| of_node(node.id)));
        let Some(cpu) = cpus.first().copied() else {
            return Err(Refusal::new("the kernel names no CPU for this process".to_owned()).into());
        };
        let writer_cpu = cpus.iter().copied().find(|other| *other != cpu).unwrap_or(cpu);
        let writer_is_there = of_destination.contains(&writer_cpu);
        let cpus = if of_destination.is_empty() { cpus } else { of_destination };
        Ok(Nodes { all, from, to, cpus, writer_cpu, writer_is_there })
    }

    /// The CPU of a thread that copies or calls the kernel.
    fn cpu(&self) -> usize {
        self.cpus[0]
    }

    /// Whether automatic balancing is measured. It waits for the time-out of 10 s in most rounds.
    fn is_balanced(&self, args: &ExperimentArgs) -> bool {
        self.from != self.to && self.writer_is_there && !args.quick
    }

    fn setting(&self, args: &ExperimentArgs, page: PageSize) -> ways::Setting {
        let Nodes { from, to, .. } = *self;
        let (cpu, cpus) = (self.cpu(), self.cpus.clone());
        ways::Setting { bytes: args.bytes(), page, from, to, cpu, cpus, seed: args.seed }
    }

    /// The most bytes whose needs take at most a share of the free memory of each node.
    fn fitting(&self, needs: &dyn Fn(u64) -> [u64; 2], share: f64) -> u64 {
        const UNIT: u64 = PageSize::Thp.bytes() as u64;
        let free = |node: NodeId| {
            let found = self.all.iter().find(|of| of.id == node.0);
            found.map_or(0, |of| of.free_bytes) as f64 * share
        };
        let [from, to] = needs(UNIT).map(|bytes| bytes as f64 / UNIT as f64);
        let fits = match self.from == self.to {
            true => free(self.from) / (from + to),
            false => (free(self.from) / from).min(free(self.to) / to),
        };
        (fits as u64 / UNIT * UNIT).max(UNIT)
    }

    /// Refuses memory that a node or the cgroup does not have. `needs`: bytes on the source and the
    /// destination.
    fn check(&self, args: &ExperimentArgs, needs: [u64; 2]) -> Result<(), Refusal> {
        let all = (needs[0] + needs[1]) as f64;
        let limit = memory_limit(&SysFiles::host()).map(|limit| limit as f64 * USABLE_SHARE);
        if let Some(limit) = limit.filter(|limit| all > *limit) {
            let fits = (limit * args.bytes() as f64 / all) as u64 >> 20;
            return Err(Refusal::new(format!(
                "--size {}: needs {}, and the memory cgroup of this process allows {}; use --size \
                 {fits}m or less",
                args.bytes(),
                human_bytes(all),
                human_bytes(limit),
            )));
        }
        let demands = match self.from == self.to {
            true => vec![(self.from, needs[0] + needs[1])],
            false => vec![(self.from, needs[0]), (self.to, needs[1])],
        };
        for (node, needed) in demands {
            let free = self.all.iter().find(|of| of.id == node.0).map_or(0, |of| of.free_bytes);
            let usable = free as f64 * USABLE_SHARE;
            if needed as f64 > usable {
                let fits = (usable * args.bytes() as f64 / needed as f64) as u64 >> 20;
                return Err(Refusal::new(format!(
                    "--size {}: needs {} on {node}, which has {} free; use --size {fits}m or less",
                    args.bytes(),
                    human_bytes(needed as f64),
                    human_bytes(free as f64),
                )));
            }
        }
        Ok(())
    }

    fn remark(&self) -> &'static str {
        match self.from == self.to {
            true => "the only node that takes part: no time here is a NUMA speed-up",
            false => "",
        }
    }
}

/// Makes a scene when its turn has come.
type Build<'a> = Box<dyn FnOnce() -> Result<Box<dyn Scene>, Stop> + 'a>;

/// A scene that is to be measured.
struct Planned<'a> {
    heading: String,
    /// Bytes that it needs on the source and on the destination.
    needs: [u64; 2],
    /// Whether the experiment goes on without it.
    may_lack: bool,
    build: Build<'a>,
}

/// An experiment on this machine.
struct Plan<'a> {
    about: &'static About,
    scenes: Vec<Planned<'a>>,
    nodes: &'a Nodes,
    notes: Vec<String>,
}

fn run_access(args: &AccessArgs) -> Result<(), Stop> {
    let common = &args.common;
    let exports = common.exports.open()?;
    interrupt::install();
    let nodes = Nodes::choose(common)?;
    let remote = (nodes.from != nodes.to).then_some(nodes.from);
    let mut notes = Vec::new();
    let pages = once_each(&common.page_size);
    let ordinary = pages.iter().filter(|page| !page.is_hugetlb()).count();
    let each = ordinary as u64 * common.bytes();
    let needs = if remote.is_some() { [each; 2] } else { [each, 0] };
    nodes.check(common, needs)?;
    if remote.is_none() {
        notes.push(
            "This needs a second node to compare local with remote memory. On one node it compares \
             page sizes."
                .to_owned(),
        );
    }
    let setting = access::Setting {
        bytes: common.bytes(),
        pages,
        remote,
        local: nodes.to,
        cpu: nodes.cpu(),
        seed: common.seed,
    };
    let build = move || Ok(Box::new(Access::new(setting, stop_between_leaps)?) as Box<dyn Scene>);
    let plan = Plan {
        about: &access::ABOUT,
        scenes: vec![Planned {
            heading: "all page sizes".to_owned(),
            needs,
            may_lack: false,
            build: Box::new(build),
        }],
        nodes: &nodes,
        notes,
    };
    plan.run(common, exports)
}

fn run_quiet(args: &QuietArgs) -> Result<(), Stop> {
    args.leaps.check(&args.common)?;
    let (engines, areas) = (args.leaps.engines(&args.common), args.leaps.areas(&args.common));
    let bytes = args.common.bytes();
    run_ways(&quiet::ABOUT, &args.common, &|page, _| {
        vec![(String::new(), quiet::ways(page, bytes, &engines, areas.as_deref()))]
    })
}

fn run_writes(args: &WritesArgs) -> Result<(), Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let (engines, areas) = (args.leaps.engines(common), args.leaps.areas(common));
    let bytes = common.bytes();
    run_loaded(&writes::ABOUT, common, Purpose::Migrations, &|page| {
        (args.loads(page), writes::ways(page, bytes, &engines, areas.as_deref()))
    })
}

fn run_scale(args: &ScaleArgs) -> Result<(), Stop> {
    let common = &args.common;
    let nodes = Nodes::choose(common)?;
    let threads = args.threads.as_deref().map_or(scale::threads(nodes.cpus.len()), once_each);
    let ways = scale::ways(&threads);
    // Without --size, a quarter of the free memory stays free.
    let fits = nodes.fitting(&|bytes| Ways::needs(bytes, &ways), 0.75);
    let is_given = common.size.is_some() || common.is_short();
    let largest = if is_given { common.bytes() } else { fits };
    let common = ExperimentArgs { size: Some(largest), ..common.clone() };
    run_pages(&scale::ABOUT, &common, &|page, nodes| {
        let scene = |bytes: u64| {
            let bytes = bytes.next_multiple_of(page.bytes() as u64);
            let setting = ways::Setting { bytes, ..nodes.setting(&common, page) };
            let (ways, needs) = (ways.clone(), ordinary(page, Ways::needs(bytes, &ways), 0));
            let heading = format!("pages of {page}, {}", human_bytes(bytes as f64));
            let build = move || {
                let scene = Ways::new(setting, &ways, stop_between_leaps)?;
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            Planned { heading, needs, may_lack: false, build: Box::new(build) }
        };
        scale::sizes(largest).into_iter().map(scene).collect()
    })
}

fn run_sustained(args: &SustainedArgs) -> Result<(), Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let few = [EngineChoice::Auto, Engine::Mprotect.into()];
    let engines = args.leaps.engine.as_deref().map_or(few.to_vec(), once_each);
    let areas = args.leaps.area.as_ref();
    let areas: Vec<usize> = areas
        .map_or(quiet::BEST.to_vec(), |areas| areas.iter().map(|area| *area as usize).collect());
    let uniform = |rate| Writes { rate, rows: Rows::Uniform };
    let loads: Vec<Writes> = args.rates().into_iter().map(uniform).collect();
    run_loaded(&sustained::ABOUT, common, Purpose::Window(args.window()), &|page| {
        (loads.clone(), writes::ways(page, common.bytes(), &engines, Some(&areas)))
    })
}

fn run_tpch(args: &ExperimentArgs) -> Result<(), Stop> {
    run_pages(&tpch::ABOUT, args, &|page, nodes| {
        let is_balanced = nodes.is_balanced(args);
        let setting = nodes.setting(args, page);
        let writer_cpu = nodes.writer_cpu;
        // The copies to compare with.
        let shadows = args.bytes() + args.bytes() / 4;
        let needs = ordinary(page, Tables::needs(args.bytes(), is_balanced), shadows);
        let build = move || {
            let spinner = progress::moving_spinner("making lineitem");
            let switch = is_balanced.then(|| Box::new(balancing_on) as Switch);
            let scene = Tables::new(setting, writer_cpu, switch, stop_between_leaps);
            spinner.finish_and_clear();
            Ok(Box::new(scene?) as Box<dyn Scene>)
        };
        let heading = format!("pages of {page}");
        vec![Planned { heading, needs, may_lack: false, build: Box::new(build) }]
    })
}

fn run_overhead(args: &OverheadArgs) -> Result<(), Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let paper = [EngineChoice::Auto, Engine::Mprotect.into()];
    let engines = args.leaps.engine.as_deref().map_or(paper.to_vec(), once_each);
    let areas = args.leaps.areas(common).unwrap_or(writes::TABLE_2.to_vec());
    let load = Writes { rate: Rate::PerSecond(100_000), rows: Rows::Uniform };
    run_loaded(&writes::OVERHEAD, common, Purpose::Migrations, &|page| {
        (vec![load], writes::ways(page, common.bytes(), &engines, Some(&areas)))
    })
}

/// Ways with the rest of the heading of their scene.
type Headed = (String, Vec<Way>);

/// Measures ways to move memory while nothing else runs. `scenes`: those of a page size.
fn run_ways(
    about: &'static About,
    args: &ExperimentArgs,
    scenes: &dyn Fn(PageSize, &Nodes) -> Vec<Headed>,
) -> Result<(), Stop> {
    run_pages(about, args, &|page, nodes| {
        let scene = |(heading, ways): Headed| {
            let setting = nodes.setting(args, page);
            let needs = ordinary(page, Ways::needs(setting.bytes, &ways), 0);
            let build = move || {
                let scene = Ways::new(setting, &ways, stop_between_leaps)?;
                // Without a compaction, a scene that is for it says nothing new.
                if ways.contains(&Way::Compaction) && !scene.left_out().is_empty() {
                    return Err(Refusal::new(scene.left_out().join("; ")).into());
                }
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            let may_lack = !heading.is_empty();
            let heading = format!("pages of {page}{heading}");
            Planned { heading, needs, may_lack, build: Box::new(build) }
        };
        scenes(page, nodes).into_iter().map(scene).collect()
    })
}

/// Measures ways to move memory while a thread writes to it, a scene for each load.
fn run_loaded(
    about: &'static About,
    args: &ExperimentArgs,
    purpose: Purpose,
    all: &dyn Fn(PageSize) -> (Vec<Writes>, Vec<Way>),
) -> Result<(), Stop> {
    run_pages(about, args, &|page, nodes| {
        let (loads, ways) = all(page);
        let scene = |writes: Writes| {
            let is_balanced = nodes.is_balanced(args);
            let shadows = Loaded::shadows(args.bytes(), &ways, is_balanced);
            let needs = Loaded::needs(args.bytes(), &ways, is_balanced);
            let (ways, needs) = (ways.clone(), ordinary(page, needs, shadows));
            let setting = writes::Setting {
                ways: nodes.setting(args, page),
                writes,
                writer_cpu: nodes.writer_cpu,
                purpose,
            };
            let build = move || {
                let switch = is_balanced.then(|| Box::new(balancing_on) as Switch);
                let scene = Loaded::new(setting, &ways, switch, stop_between_leaps)?;
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            let heading = format!("pages of {page}, {}", writes.name());
            Planned { heading, needs, may_lack: false, build: Box::new(build) }
        };
        loads.into_iter().map(scene).collect()
    })
}

/// The part of the needs that is not of the hugetlb pool: all of it for other pages, and shadow
/// copies on the destination otherwise.
fn ordinary(page: PageSize, needs: [u64; 2], shadows: u64) -> [u64; 2] {
    if page.is_hugetlb() { [0, shadows] } else { needs }
}

/// Borrows the setting that turns automatic NUMA balancing on. It is put back when the result is
/// dropped, and at the latest by its keeper when this process ends.
fn balancing_on() -> Result<Box<dyn Any>, String> {
    const WHY: &str = "pageleap bench";
    let user = User::this_process().map_err(|error| error.to_string())?;
    let wish = Wish::new("/proc/sys/kernel/numa_balancing", "1", WHY);
    let borrowed = settings::ledger(None).borrow(&user, &[wish]);
    Ok(Box::new(borrowed.map_err(|error| error.to_string())?))
}

/// Measures the scenes of all page sizes.
fn run_pages<'a>(
    about: &'static About,
    args: &ExperimentArgs,
    of_page: &dyn Fn(PageSize, &Nodes) -> Vec<Planned<'a>>,
) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let nodes = Nodes::choose(args)?;
    let mut notes = Vec::new();
    let has_load =
        [writes::ABOUT.name, writes::OVERHEAD.name, sustained::ABOUT.name, tpch::ABOUT.name];
    let note = match (nodes.from == nodes.to, has_load.contains(&about.name)) {
        (true, _) => Some(ONE_NODE),
        (false, false) => Some(NO_ACCESS),
        (false, true) if args.quick => Some(SHORT),
        (false, true) if !nodes.writer_is_there => Some(NO_WRITER),
        (false, true) => None,
    };
    notes.extend(note.map(str::to_owned));
    let mut scenes: Vec<Planned> = Vec::new();
    for page in once_each(&args.page_size) {
        let [from, to] = [nodes.from.0, nodes.to.0];
        if let Some(why) = missing_huge_pages(args.bytes(), page, &nodes.all, from, to) {
            notes.push(format!("left out: pages of {page}: {why}"));
            continue;
        }
        for scene in of_page(page, &nodes) {
            nodes.check(args, scene.needs)?;
            let may_lack = scene.may_lack || page != PageSize::Base;
            scenes.push(Planned { may_lack, ..scene });
        }
    }
    Plan { about, scenes, nodes: &nodes, notes }.run(args, exports)
}

impl Plan<'_> {
    /// Measures, prints and exports the whole rounds.
    fn run(self, args: &ExperimentArgs, exports: export::Opened) -> Result<(), Stop> {
        let Plan { about, scenes, nodes, notes } = self;
        let setting = vec![
            fact("bytes", "bytes", Value::Bytes(args.bytes())),
            fact("from", "from node", Value::count(nodes.from.0)),
            fact("to", "to node", Value::count(nodes.to.0)).remark(nodes.remark()),
            fact("cpu", "copies on CPU", Value::count(nodes.cpu())),
            fact("writer_cpu", "writer on CPU", Value::count(nodes.writer_cpu)),
        ];
        let method = args.method();
        let environment = Environment::start();
        let mut results = Results { about, setting, method, parts: Vec::new(), notes };
        let measured = measure_all(&mut results, scenes);
        let printed = match results.rounds() {
            0 => Ok(()),
            _ => exports.print(&environment.add_to(results.document()), args.json),
        };
        export::conclude(conclude(&results, measured), printed)
    }
}

/// Measures all scenes. One that fails keeps its whole rounds, and does not end the others; the
/// first failure is the result then.
fn measure_all(results: &mut Results, scenes: Vec<Planned>) -> Result<(), Stop> {
    let mut failed = Ok(());
    for scene in scenes {
        let heading = scene.heading.clone();
        match measure(results, scene) {
            Err(Stop::Failed(why)) => {
                results.notes.push(format!("ended early: {heading}: {why:#}"));
                failed = failed.and(Err(Stop::Failed(why.context(heading))));
            }
            ended => ended?,
        }
    }
    failed
}

/// Adds the rounds of a scene to the results: all of them, or those before a signal or an error.
fn measure(results: &mut Results, scene: Planned) -> Result<(), Stop> {
    let Planned { heading, may_lack, build, .. } = scene;
    let name = results.about.name;
    let mut scene = match build() {
        Ok(scene) => scene,
        Err(Stop::Failed(why) | Stop::Refused(why)) if may_lack => {
            results.notes.push(format!("left out: {heading}: {why:#}"));
            return Ok(());
        }
        Err(stop) => return Err(stop),
    };
    note_left_out(results, scene.as_ref());
    results.parts.push(Part::new(heading, scene.cases().to_vec(), results.method));
    let part = results.parts.last_mut().expect("it was added just now");
    let ended = measure_part(part, scene.as_mut(), name);
    if name == tpch::ABOUT.name && part.rounds.count() > 0 {
        results.notes.extend(tpch::pays(part));
    }
    note_left_out(results, scene.as_ref());
    interrupt::stop_if_received(|| format!("{} rounds were measured", results.rounds()))?;
    ended
}

/// Gives all cases their turns until there are enough rounds, or a signal arrives.
fn measure_part(part: &mut Part, scene: &mut dyn Scene, name: &str) -> Result<(), Stop> {
    let steps = Steps::new(name, 1, part.rounds.at_most());
    let mut told = Instant::now();
    while let Some(turn) = part.next_turn() {
        let left = part.rounds.left();
        let left = left.map_or(String::new(), |left| format!(", {} left at most", clock(left)));
        let round = turn.round.map_or("warm-up".to_owned(), |round| format!("round {}", round + 1));
        let now = format!("{}, {round}{left}", part.heading);
        if told.elapsed() >= LINE_EVERY {
            told = Instant::now();
            steps.line(&format!("{name}, {now}"));
        }
        steps.now(now);
        match scene.measure(turn.thing, &|| interrupt::received().is_some())? {
            Some(outcome) => part.add(turn, outcome),
            None => break,
        }
        steps.done();
        if interrupt::received().is_some() {
            break;
        }
    }
    steps.line(&format!("{name}, {}", part.in_short()));
    Ok(())
}

/// Notes what a scene has left out until now, once.
fn note_left_out(results: &mut Results, scene: &dyn Scene) {
    for what in scene.left_out() {
        let note = format!("left out: {what}");
        if !results.notes.contains(&note) {
            results.notes.push(note);
        }
    }
}

/// Turns a measurement that has been printed into its exit code.
fn conclude(results: &Results, ended: Result<(), Stop>) -> Result<(), Stop> {
    // Lost words decide the exit code, because they are worse than any other end.
    let lost = results.lost();
    if lost > 0 {
        return Err(anyhow!("mismatch: {lost} words had a wrong value after a migration").into());
    }
    ended?;
    if results.rounds() == 0 {
        let why = format!("nothing was measured: {}", results.notes.join("; "));
        return Err(Refusal::new(why).into());
    }
    Ok(())
}
