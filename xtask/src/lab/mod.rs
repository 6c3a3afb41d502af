//! `cargo xtask lab`: runs the tests that depend on the kernel or the machine on real kernels with
//! several memory nodes, in QEMU.
//!
//! Each chosen pair of topology and kernel is one guest, with many tests in it. At most two guests
//! run at a time. By default QEMU emulates everything in software. The lab tests correctness and
//! never speed: times of emulated machines mean nothing.

mod broken;
mod build;
mod command;
mod initramfs;
mod kernels;
mod machine;
mod policy;
#[cfg(test)]
mod recorded;
mod report;
mod setup;
mod topology;
mod transcript;

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, Subcommand};

use crate::commands::{STRESS_SECONDS_VAR, Workspace};
use crate::soak;
use crate::table::Table;
use build::Tests;
use kernels::{Kernel, SERIES};
use machine::{Job, Lab};
use report::Group;
use topology::Topology;
use transcript::{Event, Outcome, Row, TestId};

pub use report::Summary;
pub use setup::Missing;

/// QEMU's accelerator: software emulation, with one thread of the host for all CPUs of a guest,
/// which take turns.
///
/// With a thread for each CPU, the CPUs of a guest wait for each other's answers (to flush their
/// TLBs) until the scheduler of the host runs them. Tests took eight times as long on two CPUs of a
/// host.
const ACCEL: &str = "tcg,thread=single";

/// Number of guests that run at the same time.
const AT_A_TIME: usize = 2;

/// Time limit of a test in seconds. On an emulated machine the slowest test takes a seventh of it.
const TEST_SECONDS: u64 = 480;

/// Tests that take minutes when every instruction is emulated. They run with `--full` only, or when
/// they are chosen by `--filter`, and their time limit is [`SLOW_TEST_SECONDS`].
const SLOW: [&str; 15] = [
    "attributes::a_moving_neighbour_lends_no_attributes",
    "demo::an_interrupted_leap_leaves_memory_of_malloc_whole",
    "demo::an_interrupted_run_ends_cleanly",
    "demo::every_rate_and_engine_keeps_all_writes",
    "demo::memory_of_malloc_keeps_all_writes_at_every_rate",
    "demo::text_says_what_became_of_memory_of_malloc",
    "demo::text_says_what_was_verified",
    "doctor::its_verdict_is_what_a_leap_shows",
    "doctor::missing_and_read_only_mounts_are_named",
    "fault_injection::on_the_kernel_a_pool_and_a_region_are_made_or_nothing_is_left",
    "fault_injection::on_the_kernel_any_call_may_fail_under_load",
    "fault_injection::on_the_model_any_call_may_fail",
    "signal_threads::threads_that_block_the_signal_for_an_instant_are_no_obstacle",
    "contract::children_do_not_get_regions_and_disturb_no_leap",
    "contract::a_read_into_a_moving_area_succeeds_or_fails_and_keeps_what_it_wrote",
];
const SLOW_TEST_SECONDS: u64 = 1800;

/// Seconds for each case of the stress oracle in a guest.
const STRESS_SECONDS: &str = "1";

/// Number of random programs of a property test in a guest without slow tests.
const PROPTEST_CASES: &str = "15";

/// The topology and the kernel for everything that needs only one of each. This topology runs on
/// all kernels, and this kernel runs on all topologies.
const USUAL_TOPOLOGY: &str = "two-nodes";
const USUAL_SERIES: &str = SERIES[1];

/// Test binaries with tests that need several nodes.
const SEVERAL_NODES: [&str; 17] = [
    "bench_nodes",
    "kernel",
    "kernel_cases",
    "kernel_folios",
    "kernel_ltp",
    "kernel_manners",
    "kernel_memory",
    "memory",
    "memory_kinds",
    "memory_programs",
    "move",
    "nodes",
    "nodes_adverse",
    "page_tables",
    "placement",
    "process",
    "run_nodes",
];

/// Tests of these binaries that the step `nodes` leaves to the step `lab`, because each takes long
/// in a guest. Those of `memory` and the like run on a machine with one node too; of `page_tables`
/// and `run_nodes`, short tests stay.
const LEFT_TO_THE_LAB: [&str; 19] = [
    "bench_nodes::experiments_have_the_rivals_that_need_two_nodes",
    "bench_nodes::scenarios_have_page_tables_where_the_policies_say",
    "memory::memory_in_place_loses_nothing_under_load",
    "memory_kinds::limits_end_in_an_error_or_a_partial_result",
    "memory_programs::a_collector_that_protects_its_heap_loses_nothing",
    "memory_programs::a_table_leaps_while_threads_use_it_and_fork",
    "page_tables::the_account_agrees_with_the_kernel_for_base_pages",
    "run_nodes::a_parent_that_stays_tells_the_policy_and_the_nodes",
    "run_nodes::balancing_is_a_part_of_the_policy",
    "run_nodes::cpus_outside_of_the_cpuset_are_named",
    "run_nodes::each_letter_places_memory_and_threads_for_every_user",
    "run_nodes::nodes_outside_of_the_cpuset_are_named",
    "run_nodes::numactl_and_run_agree_on_every_letter",
    "run_nodes::threads::a_home_without_room_is_passed_over_by_name",
    "run_nodes::threads::a_program_starts_at_home_and_grows_to_the_nearest_nodes",
    "run_nodes::threads::sparse_goes_from_node_to_node_and_dense_fills_a_node",
    "run_nodes::threads::the_home_is_the_node_whose_cores_are_idle",
    "run_nodes::weighted_interleave_follows_the_weights_or_becomes_interleave",
    "run_nodes::where_a_container_refuses_policies_first_touch_takes_their_place",
];

/// The flags of `cargo xtask lab`.
#[derive(Debug, Clone, Args)]
pub struct Flags {
    #[command(subcommand)]
    action: Option<Action>,
    /// Use only these machines: names of files in lab/topologies
    #[arg(long, global = true, value_name = "NAME", value_delimiter = ',')]
    topology: Vec<String>,
    /// Use only these kernels: 6.1, 6.12
    #[arg(long, global = true, value_name = "SERIES", value_delimiter = ',')]
    kernel: Vec<String>,
    /// Accelerator of QEMU; kvm is faster, but its memory nodes are emulated too
    #[arg(long, global = true, default_value = ACCEL)]
    accel: String,
    /// Run only tests whose name (binary::test) contains this text
    #[arg(long, default_value = "")]
    filter: String,
    /// List the tests, and run none
    #[arg(long)]
    list: bool,
    /// Run all machines with all kernels, and slow tests too
    #[arg(long)]
    full: bool,
    /// Keep the files of all guests; the default is to keep those of failed guests
    #[arg(long)]
    keep: bool,
    /// Count skips that no topology expects as failures
    #[arg(long)]
    deny_skip: bool,
}

#[derive(Debug, Clone, Subcommand)]
enum Action {
    /// Install what is missing (as root on Debian), or print the commands
    Setup,
    /// Open a shell in a guest with the pageleap command; leave it with `exit`
    Shell,
    /// Run a command in a guest, and pass its output and exit code on
    Run {
        /// User of the command: root, nobody, or container, which is nobody under a seccomp filter
        /// that refuses what Docker's default profile refuses
        #[arg(long = "as", value_name = "WHO", default_value = command::WHO[0], value_parser = command::WHO)]
        who: String,
        /// Command and arguments, for example: pageleap demo
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Soak on each of the kernels (see `cargo xtask soak`)
    Soak(soak::Course),
    /// Run `pageleap doctor` on all kernels as several users, and write the tables of
    /// docs/kernel-policy.md
    Policy,
}

/// Carries out the flags. Returns the exit code.
pub fn command(workspace: &Workspace, flags: &Flags) -> Result<u8> {
    match &flags.action {
        Some(Action::Setup) => {
            setup::install(&kernel_folder(workspace), &chosen_series(flags)?).map(|()| 0)
        }
        Some(Action::Shell) => {
            ready()?;
            command::shell(workspace, flags)
        }
        Some(Action::Run { who, command }) => {
            ready()?;
            command::run(workspace, flags, who, command)
        }
        Some(Action::Soak(course)) => {
            ready()?;
            command::soak(workspace, flags, course)
        }
        Some(Action::Policy) => {
            ready()?;
            policy::write(workspace, flags).map(|()| 0)
        }
        None => {
            ready()?;
            let Some(summary) = test(workspace, flags, &[])? else { return Ok(0) };
            let denied = flags.deny_skip && !summary.skips.is_empty();
            Ok(u8::from(summary.counts.failed > 0 || denied))
        }
    }
}

/// How much a step of `cargo xtask test` runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// On the usual machine and kernel, the tests that need several nodes.
    SeveralNodes,
    /// On all machines, and on the usual one with all kernels, everything but the slow tests.
    Usual,
}

/// What a step lacks to run, after an attempt to fetch its kernels.
pub fn missing_for(workspace: &Workspace, extent: Extent) -> Option<Missing> {
    let series = match extent {
        Extent::SeveralNodes => &[USUAL_SERIES][..],
        Extent::Usual => &SERIES[..],
    };
    setup::missing().or_else(|| setup::missing_kernel(&kernel_folder(workspace), series))
}

/// Runs a part of the lab, as a step of `cargo xtask test`.
pub fn step(workspace: &Workspace, extent: Extent) -> Result<Summary> {
    let (topology, kernel, binaries) = match extent {
        Extent::SeveralNodes => {
            (vec![USUAL_TOPOLOGY.to_owned()], vec![USUAL_SERIES.to_owned()], &SEVERAL_NODES[..])
        }
        Extent::Usual => (Vec::new(), Vec::new(), &[][..]),
    };
    let flags = Flags {
        action: None,
        topology,
        kernel,
        accel: ACCEL.to_owned(),
        filter: String::new(),
        list: false,
        full: false,
        keep: false,
        deny_skip: false,
    };
    test(workspace, &flags, binaries)?.context("the lab has run no tests")
}

/// Skips that are right on a machine with one or two nodes, because another machine of the lab, or
/// all of the lab, is for these tests.
pub struct LeftToOthers(Topology);

impl LeftToOthers {
    /// Whether the skip is one of them; `name` lacks the name of the test binary.
    pub fn includes(&self, name: &str) -> bool {
        let elsewhere = build::TEST_BINARIES.iter().any(|binary| {
            self.0.expects_skip(USUAL_SERIES, &format!("{binary}::{name}")).is_some()
        });
        let is_left = |left: &&str| left.split_once("::").is_some_and(|(_, test)| test == name);
        elsewhere || build::REAL_TESTS.contains(&name) || LEFT_TO_THE_LAB.iter().any(is_left)
    }
}

/// Reads them from the file of the usual machine.
pub fn skips_left_to_other_machines(workspace: &Workspace) -> Result<LeftToOthers> {
    let all = Topology::read_all(&workspace.root.join("lab").join("topologies"))?;
    let usual = all.into_iter().find(|topology| topology.name == USUAL_TOPOLOGY);
    Ok(LeftToOthers(usual.with_context(|| format!("there is no topology {USUAL_TOPOLOGY}"))?))
}

/// The directory of the kernels.
fn kernel_folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("lab").join("kernels")
}

fn ready() -> Result<()> {
    match setup::missing() {
        Some(missing) => Err(anyhow!("{}; to fix that: {}", missing.what, missing.remedy)),
        None => Ok(()),
    }
}

/// A guest that will be booted: its machine, its kernel, its tests.
struct Planned<'a> {
    topology: &'a Topology,
    kernel: &'a Kernel,
    tests: Vec<TestId>,
}

/// Runs what the flags choose, of these test binaries, or of all if none is named.
fn test(workspace: &Workspace, flags: &Flags, binaries: &[&str]) -> Result<Option<Summary>> {
    let topologies = chosen_topologies(workspace, flags)?;
    let series = chosen_series(flags)?;
    let mut built = build::tests(workspace)?;
    let mut all_tests = build::list(&built.binaries)?;
    all_tests.retain(|test| test.to_string().contains(&flags.filter));
    if !binaries.is_empty() {
        let left =
            LEFT_TO_THE_LAB.map(|left| all_tests.iter().any(|test| test.to_string() == left));
        ensure!(!left.contains(&false), "the lab leaves out a test that does not exist: {left:?}");
        all_tests.retain(|test| {
            let is_left = LEFT_TO_THE_LAB.contains(&test.to_string().as_str());
            binaries.contains(&test.binary.as_str()) && !is_left
        });
    }
    if !flags.full {
        // A filter runs slow tests too, because its user has named them.
        let (slow, rest) =
            all_tests.into_iter().partition(|test| is_slow(test) && flags.filter.is_empty());
        let slow: Vec<TestId> = slow;
        all_tests = rest;
        slow.iter().for_each(|test| println!("lab: {test} is slow, and runs only with --full"));
    }

    let mut planned = Vec::new();
    for topology in &topologies {
        for &series in &series {
            let usual = series == USUAL_SERIES || topology.name == USUAL_TOPOLOGY;
            if !usual && !flags.full && flags.kernel.is_empty() {
                continue;
            }
            let wanted = |test: &&TestId| topology.wants(&test.to_string());
            let tests: Vec<TestId> = all_tests.iter().filter(wanted).cloned().collect();
            if !tests.is_empty() {
                planned.push((topology, series, tests));
            }
        }
    }
    let broken =
        flags.topology.is_empty() || flags.topology.iter().any(|name| name == broken::NAME);
    let broken: Vec<TestId> = broken::names()
        .into_iter()
        .filter(|test| broken && test.to_string().contains(&flags.filter))
        .collect();
    if flags.list {
        list(&planned, &broken);
        return Ok(None);
    }
    ensure!(!planned.is_empty() || !broken.is_empty(), "no test fits the flags; try --list");

    built.add_ordinary_memory(workspace, planned.iter().flat_map(|(_, _, tests)| tests))?;
    let mut kernels = Vec::new();
    let booted = planned.iter().map(|(_, series, _)| *series);
    let needed: BTreeSet<&'static str> =
        booted.chain((!broken.is_empty()).then_some(USUAL_SERIES)).collect();
    for series in needed {
        kernels.push(kernels::get(&kernel_folder(workspace), series)?);
    }
    let of = |series: &str| {
        kernels.iter().find(|kernel| kernel.series == series).context("unknown kernel")
    };
    let mut guests = VecDeque::new();
    for (topology, series, tests) in planned {
        guests.push_back(Planned { topology, kernel: of(series)?, tests });
    }
    // The longest guests run first, so that none of them runs alone at the end.
    guests.make_contiguous().sort_by_key(|guest| std::cmp::Reverse(guest.tests.len()));

    let lab = lab(workspace, flags)?;
    let mut groups = run_guests(&lab, guests, &built, flags.keep, |lab| {
        if broken.is_empty() {
            Ok(None)
        } else {
            run_broken(lab, of(USUAL_SERIES)?, flags.keep).map(Some)
        }
    })?;
    if flags.topology.is_empty() && flags.kernel.is_empty() && flags.filter.is_empty() {
        report::deny_what_nobody_has_run(&mut groups);
    }
    groups.sort_by(|a, b| (&a.topology, &a.kernel).cmp(&(&b.topology, &b.kernel)));
    print!("{}", report::text(&groups, flags.deny_skip));
    Ok(Some(report::summary(&groups)))
}

fn is_slow(test: &TestId) -> bool {
    SLOW.iter().any(|slow| test.to_string().starts_with(slow))
}

fn list(planned: &[(&Topology, &'static str, Vec<TestId>)], broken: &[TestId]) {
    let mut table = Table::new(&["topology", "kernel", "tests", "about"]);
    for (topology, series, tests) in planned {
        table.row(&[&topology.name, series, &tests.len().to_string(), &topology.about]);
    }
    if !broken.is_empty() {
        let about = "broken on purpose: the lab must notice each of them";
        table.row(&[broken::NAME, USUAL_SERIES, &broken.len().to_string(), about]);
    }
    let tests: BTreeSet<&TestId> =
        planned.iter().flat_map(|(_, _, tests)| tests).chain(broken).collect();
    tests.iter().for_each(|test| println!("{test}"));
    print!("\n{table}");
    let total: usize = planned.iter().map(|(_, _, tests)| tests.len()).sum();
    println!("{} tests in all", total + broken.len());
}

fn chosen_topologies(workspace: &Workspace, flags: &Flags) -> Result<Vec<Topology>> {
    let mut all = Topology::read_all(&workspace.root.join("lab").join("topologies"))?;
    for name in &flags.topology {
        let known: Vec<&str> = all.iter().map(|topology| topology.name.as_str()).collect();
        ensure!(
            known.contains(&name.as_str()) || name == broken::NAME,
            "unknown topology {name}; the topologies are {}, {}",
            known.join(", "),
            broken::NAME
        );
    }
    all.retain(|topology| flags.topology.is_empty() || flags.topology.contains(&topology.name));
    Ok(all)
}

fn chosen_series(flags: &Flags) -> Result<Vec<&'static str>> {
    if let Some(unknown) = flags.kernel.iter().find(|name| !SERIES.contains(&name.as_str())) {
        bail!("unknown kernel {unknown}; the kernels are {}", SERIES.join(", "));
    }
    let asked =
        |series: &&str| flags.kernel.is_empty() || flags.kernel.iter().any(|name| name == series);
    Ok(SERIES.into_iter().filter(asked).collect())
}

fn lab(workspace: &Workspace, flags: &Flags) -> Result<Lab> {
    let folder = workspace.target.join("lab").join("guests");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let guest = build::guest(workspace)?;
    Ok(Lab {
        folder: folder.canonicalize()?,
        guest,
        busybox: setup::busybox(),
        accel: flags.accel.clone(),
    })
}

/// Runs all guests, [`AT_A_TIME`] at a time. One of the workers runs `first` before its guests.
fn run_guests(
    lab: &Lab,
    guests: VecDeque<Planned<'_>>,
    built: &Tests,
    keep: bool,
    first: impl FnOnce(&Lab) -> Result<Option<Group>> + Send,
) -> Result<Vec<Group>> {
    let queue = Mutex::new(guests);
    let groups = Mutex::new(Vec::new());
    let done = |group| groups.lock().unwrap_or_else(PoisonError::into_inner).push(group);
    let work = || -> Result<()> {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(guest) = next else { return Ok(()) };
            // A guest that cannot run does not stop the others.
            done(
                run_guest(lab, &guest, built, keep).unwrap_or_else(|error| not_run(&guest, &error)),
            );
        }
    };
    thread::scope(|scope| {
        let mut workers: Vec<_> = (1..AT_A_TIME).map(|_| scope.spawn(work)).collect();
        workers.push(scope.spawn(|| {
            if let Some(group) = first(lab)? {
                done(group);
            }
            work()
        }));
        let results: Vec<Result<()>> = workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow!("a worker panicked"))?)
            .collect();
        results.into_iter().collect::<Result<()>>()
    })?;
    Ok(groups.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The results of a guest that could not be started or not be followed to its end.
fn not_run(guest: &Planned<'_>, error: &anyhow::Error) -> Group {
    let (topology, series) = (&guest.topology.name, guest.kernel.series);
    println!("lab: {topology}/{series}: {error:#}");
    let failed = |test: &TestId| Row {
        test: test.clone(),
        outcome: Outcome::Failed("the guest was not run".to_owned(), Vec::new()),
        parts: Vec::new(),
        ms: 0,
    };
    let rows = guest.tests.iter().map(failed).collect();
    Group { problems: vec![format!("{error:#}")], ..Group::new(topology, series, rows, |_| None) }
}

fn run_guest(lab: &Lab, guest: &Planned<'_>, built: &Tests, keep: bool) -> Result<Group> {
    let Planned { topology, kernel, tests } = guest;
    let mut job = Job::new(topology, kernel);
    job.plan.push(format!("env {STRESS_SECONDS_VAR}={STRESS_SECONDS}"));
    if !tests.iter().any(is_slow) {
        job.plan.push(format!("env PROPTEST_CASES={PROPTEST_CASES}"));
    }
    job.plan.push("env RUST_BACKTRACE=1".to_owned());
    job.plan.push(format!("env PATH=/bin:{}", machine::PROGRAMS));
    // With this variable tests may change settings of the whole machine. They also compare the
    // machine with the description in it.
    job.plan.push(format!("env PAGELEAP_LAB={}", topology.description()));
    for test in tests {
        let seconds = if is_slow(test) { SLOW_TEST_SECONDS } else { TEST_SECONDS };
        job.plan.push(format!("test {seconds} {} {}", test.binary, test.name));
        if is_slow(test) {
            job.limit += Duration::from_secs(SLOW_TEST_SECONDS);
        }
    }
    let used: BTreeSet<&String> = tests.iter().map(|test| &test.binary).collect();
    job.programs = built
        .binaries
        .iter()
        .filter(|(name, _)| used.contains(name))
        .map(|(a, b)| (a.clone(), b.clone()))
        .collect();
    for name in &used {
        job.programs.extend(built.others(name));
        let scratch = format!("pageleap-{}-{}", job.name, std::process::id());
        job.files.extend(Tests::files(name, &scratch)?);
    }
    if used.iter().any(|name| Tests::starts_command(name)) {
        job.programs.insert("pageleap".to_owned(), built.command.clone());
        job.plan.push(format!("link {}={}/pageleap", built.command.display(), machine::PROGRAMS));
    }
    job.tests = tests.clone();
    let name = format!("{}/{}", topology.name, kernel.series);
    println!("lab: {name}: {} tests on Linux {}", tests.len(), kernel.release);
    let begun = Instant::now();
    let run = || {
        lab.run(&job, |transcript, expected, event| match event {
            Event::Booted => {
                println!("lab: {name}: booted [{:.1} s]", begun.elapsed().as_secs_f64())
            }
            Event::Ended(number) if number < expected.tests.len() => {
                show(&name, &transcript.row(expected, number));
            }
            Event::Ended(_) | Event::Output(_) => {}
        })
    };
    let mut done = run()?;
    // The only repetition in the lab. It cannot hide a test that failed: a guest with a failed test
    // is not run again, nor one whose kernel had complained before. It is run again only if the
    // console proves that QEMU has erred, and then all its tests have to pass.
    if let Some(line) =
        done.judged.impossible.clone().filter(|_| !done.judged.has_failed_by_itself())
    {
        let kept = lab.folder.join(format!("{}-erred", job.name));
        let _ = fs::remove_dir_all(&kept);
        fs::rename(&done.folder, &kept)
            .with_context(|| format!("cannot keep {}", kept.display()))?;
        println!(
            "lab: {name}: QEMU HAS FAILED, because no kernel can cause this: {line}; the guest \
             runs once more; its files are in {}",
            kept.display()
        );
        done = run()?;
    }
    let series = kernel.series;
    let judged = done.judged;
    let expects = |skip: &str| topology.expects_skip(series, skip).map(str::to_owned);
    let group = Group::new(&topology.name, series, judged.rows, expects);
    let group = Group {
        problems: judged.problems,
        console: judged.console,
        elapsed: done.elapsed,
        ..group
    };
    println!("lab: {name}: {}", group.counts());
    if !keep && group.counts().failed == 0 {
        if let Err(error) = fs::remove_dir_all(&done.folder) {
            println!("lab: {name}: cannot remove {}: {error}", done.folder.display());
        }
    } else {
        println!("lab: {name}: its files are in {}", done.folder.display());
    }
    Ok(group)
}

fn show(guest: &str, row: &Row) {
    let result = match &row.outcome {
        Outcome::Passed => "ok".to_owned(),
        Outcome::Failed(reason, _) => format!("FAILED: {reason}"),
        Outcome::Skipped(reason) => format!("SKIP: {reason}"),
    };
    println!("lab: {guest} {} ... {result} [{:.1} s emulated]", row.test, row.ms as f64 / 1e3);
    row.parts.iter().for_each(|part| println!("lab: {guest} {} ... part SKIP {part}", row.test));
}

fn run_broken(lab: &Lab, kernel: &Kernel, keep: bool) -> Result<Group> {
    let begun = Instant::now();
    let name = format!("{}/{}", broken::NAME, kernel.series);
    let rows = broken::run(lab, kernel, |row| show(&name, row))?;
    let group = Group::new(broken::NAME, kernel.series, rows, |_| None);
    let group = Group { elapsed: begun.elapsed(), ..group };
    if !keep && group.counts().failed == 0 {
        for entry in fs::read_dir(&lab.folder)?.flatten() {
            if entry.path().is_dir()
                && entry.file_name().to_string_lossy().starts_with(broken::NAME)
            {
                fs::remove_dir_all(entry.path())?;
            }
        }
    }
    Ok(group)
}
