//! `pageleap move`: moves memory of running processes to other nodes.

mod plan;
mod summary;

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use pageleap::process::{MappingKind, ProcessMemory};
use pageleap::topology::Topology;
use pageleap::{BASE_PAGE, Job, KernelMigration, Mode, PageOutcome, Placement, Reason, Report};

use crate::export::Exports;
use crate::selection::Selection;
use crate::stop::Stop;
use crate::times::{timeout, wait_budget};
use crate::{bytes, export, interrupt, output, progress};
use plan::Plan;

/// Interval at which progress is read.
const TICK: Duration = Duration::from_millis(20);
/// Interval at which progress is reported where no terminal shows a bar.
const REPORT_EVERY: Duration = Duration::from_secs(5);
/// A shorter move shows no progress.
const QUIET_FOR: Duration = Duration::from_secs(2);

/// Move memory of running processes to other nodes, while they run.
///
/// The kernel moves the pages (move_pages): their addresses and contents stay, and a thread that
/// touches a page while it moves waits for it. No page stays because another one did, calls are
/// short, memory of others is left alone, and pages that stay are listed with their reason.
///
/// Several target nodes are interleaved page by page, or get shares by --weights. Memory that may
/// have transparent huge pages, files and shared memory go by 2 MB.
///
/// The policy of the memory stays as it is: pages that the process touches for the first time later
/// go where the policy says. The kernel's NUMA balancing may move pages again.
///
/// Examples: `pageleap move 1234 --to 1`; `pageleap move redis-server --from 0 --to 1 --rate 500m`;
/// `pageleap move 1234 --to 0,1 --mapping heap,anonymous`; `pageleap move --unit postgresql --to 1
/// --shared`; `pageleap move 1234 --to 0-1 --weights 3,1 --dry-run`.
///
/// Exit code: 0 all has moved that could; 1 something stays that was to move (pages that are
/// absent, swapped out, shared without --shared, or the kernel's page of zeros are not), a part of
/// --range is not mapped or cannot move, or the process ended (the only one that is moved) or may
/// not be changed; 2 no such process, node or range. Ctrl-C: 130, after the summary.
#[derive(Args, Clone, Debug)]
pub struct MoveArgs {
    #[command(flatten)]
    pub selection: Selection,

    /// Nodes to move to, as for numactl: 1 or 0,2-3 or all
    #[arg(long, value_name = "NODES")]
    pub to: String,

    /// Move only pages that lie on these nodes
    #[arg(long, value_name = "NODES")]
    pub from: Option<String>,

    /// Take all processes of that name; without it, several matches are listed and nothing moves
    #[arg(long, requires = "process")]
    pub all: bool,

    /// Move only these addresses, hexadecimal as in /proc/PID/maps: 7f00a000-7f00c000; several
    /// times for several ranges. A transparent huge page of which a part is named moves as a whole,
    /// up to 2 MB beyond the range
    #[arg(long, value_name = "A-B", value_parser = addresses)]
    pub range: Vec<Range<usize>>,

    /// Move only mappings of these kinds
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub mapping: Vec<MappingKind>,

    /// Interleave over the target nodes (the default if there are several)
    #[arg(long, conflicts_with = "weights")]
    pub interleave: bool,

    /// Shares of the target nodes, in ascending order of their numbers: 3,1
    #[arg(long, value_name = "W,W", value_delimiter = ',')]
    pub weights: Vec<u32>,

    /// Most bytes per second, such as 500m
    #[arg(long, value_name = "BYTES", value_parser = rate)]
    pub rate: Option<u64>,

    /// How long a call to the kernel may take: threads may have to wait as long
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = wait_budget)]
    pub max_call: Duration,

    /// How hard to try pages that the kernel does not move: light (once), retry (four times),
    /// insist (until none has moved for ten seconds)
    #[arg(long, default_value = "retry", value_parser = mode)]
    pub mode: Mode,

    /// Pages of 4 KB in a call, whatever --max-call says; by default it follows from what calls
    /// cost, and from --max-call
    #[arg(long, value_name = "PAGES", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub batch: Option<u32>,

    /// Move pages as well that are mapped more than once (needs CAP_SYS_NICE)
    #[arg(long)]
    pub shared: bool,

    /// Fill the target nodes, even if the kernel then has to drop page cache, to swap, to split huge
    /// pages, and to make reserved huge pages of free memory
    #[arg(long)]
    pub fill: bool,

    /// Begin no new call after this time, such as 30 or 500ms
    #[arg(long, value_name = "TIME", value_parser = timeout)]
    pub timeout: Option<Duration>,

    /// Show what would move, and move nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

/// Parses `7f00a000-7f00c000`.
fn addresses(text: &str) -> Result<Range<usize>, String> {
    let number = |text: &str| usize::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let range = text.split_once('-').and_then(|(from, to)| Some(number(from)?..number(to)?));
    let whole = |range: &Range<usize>| {
        range.start < range.end && (range.start | range.end).is_multiple_of(pageleap::BASE_PAGE)
    };
    range.filter(whole).ok_or_else(|| {
        "expected two hexadecimal addresses of pages such as 7f00a000-7f00c000".to_owned()
    })
}

fn kind(text: &str) -> Result<MappingKind, String> {
    let kinds = || MappingKind::ALL.into_iter().filter(|kind| *kind != MappingKind::Special);
    kinds().find(|kind| kind.name() == text).ok_or_else(|| {
        let names: Vec<&str> = kinds().map(MappingKind::name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn mode(text: &str) -> Result<Mode, String> {
    text.parse().map_err(|error: pageleap::Error| error.to_string())
}

fn rate(text: &str) -> Result<u64, String> {
    match bytes::parse(text)? {
        0 => Err("a rate is at least one byte per second".to_owned()),
        rate => Ok(rate),
    }
}

/// Moves the memory and prints a summary.
pub fn run(args: &MoveArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    let (to, from) = nodes(args)?;
    let pids = args.selection.pids()?;
    refuse_several(args)?;
    if !args.range.is_empty() && pids.len() > 1 {
        return Err(Stop::Refused(anyhow!(
            "--range has addresses of one process, and {} are selected; name one",
            pids.len()
        )));
    }
    let (memories, left_out) = read(&pids)?;
    let plans: Vec<Plan> = memories.iter().map(|memory| Plan::of(memory, args)).collect();
    if plans.iter().all(|plan| plan.ranges.is_empty()) {
        return Err(Stop::Refused(anyhow!(
            "nothing is selected: no mapping with memory is of these kinds and addresses; `pageleap \
             status` shows the mappings"
        )));
    }
    let mut migration = KernelMigration::new()
        .shared(args.shared)
        .fill(args.fill)
        .mode(args.mode)
        .max_call(args.max_call);
    if let Some(from) = &from {
        migration = migration.from_nodes(from.iter().copied());
    }
    if let Some(batch) = args.batch {
        migration = migration.batch_pages(batch as usize);
    }
    if let Some(rate) = args.rate {
        migration = migration.rate_limit(rate);
    }
    if let Some(timeout) = args.timeout {
        migration = migration.timeout(timeout);
    }
    for plan in &plans {
        let mapped = plan.ranges.iter().map(|(_, range)| range);
        for range in mapped.chain(&plan.unmapped) {
            migration = migration.range(plan.memory, range.clone(), to.clone());
        }
    }
    allow_descriptors(plans.len());
    if args.dry_run {
        let warnings = migration.check()?.into_iter().map(|warning| warning.text);
        let warnings: Vec<String> = warnings.collect();
        let show =
            |format| plan::show(&plans, &to, from.as_deref(), &warnings, args.shared, format);
        let printed = printed(output::write(&show(output::format(args.json))?));
        exports.write(printed, show)?;
        return all_read(&left_out);
    }
    interrupt::install();
    let shares = plan::shares(&to);
    let most = plans.iter().map(|plan| plan.most_bytes(&shares, from.as_deref())).sum();
    let report = follow(migration.start()?, most);
    let show = |format, columns| summary::show(&report, &plans, &to, format, columns);
    let shown = output::write(&show(output::format(args.json), output::terminal_columns())?);
    let written = exports.write(printed(shown), |format| show(format, None));
    export::conclude(conclude(&report, args), written)?;
    all_read(&left_out)
}

/// Raises the soft limit of open files (RLIMIT_NOFILE) of this command, as far as it may, if this
/// number of processes needs more. Each process has two descriptors for as long as its memory may
/// move; the usual limit is 1,024, which a database with a process for each connection exceeds.
fn allow_descriptors(processes: usize) {
    /// An upper bound of all other open files.
    const OTHERS: usize = 64;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a structure of ours.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0
            && limit.rlim_cur < (2 * processes + OTHERS) as libc::rlim_t
        {
            limit.rlim_cur = limit.rlim_max;
            // If this call fails, the error of the process that cannot be opened says so.
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Takes EPIPE for success: a reader of standard output that has gone has seen enough.
fn printed(written: anyhow::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if output::is_broken_pipe(&error) => Ok(()),
        other => other,
    }
}

/// The placement to move to, and the nodes to move from; `None` for all nodes.
fn nodes(args: &MoveArgs) -> Result<(Placement, Option<Vec<pageleap::NodeId>>), Stop> {
    let topology = Topology::read()?;
    let to = topology.parse_nodes(&args.to, None)?;
    let from = match &args.from {
        // The job takes no memory from these nodes, so the cpuset of this process need not allow
        // them.
        Some(text) => Some(topology.parse_online_nodes(text, Some(&to))?),
        None => None,
    };
    if to.len() == 1 && (args.interleave || args.weights.len() == 1) {
        return Err(Stop::Refused(anyhow!(
            "--interleave and --weights spread memory over several nodes, and --to names one"
        )));
    }
    let placement = match (&to[..], &args.weights[..]) {
        (nodes, weights) if !weights.is_empty() && nodes.len() != weights.len() => {
            return Err(Stop::Refused(anyhow!(
                "--weights has {} shares for {} nodes; give each node of --to one",
                weights.len(),
                nodes.len()
            )));
        }
        ([node], _) => Placement::on(*node),
        (nodes, []) => Placement::interleave(nodes.iter().copied()),
        (nodes, weights) => Placement::weighted(nodes.iter().copied().zip(weights.iter().copied())),
    };
    Ok((placement, from))
}

/// Refuses a name that several processes have, unless `--all` is given, because such a name is an
/// accident more often than a wish.
fn refuse_several(args: &MoveArgs) -> Result<(), Stop> {
    let named = args.selection.named()?;
    if named.len() <= 1 || args.all {
        return Ok(());
    }
    let line = |pid: &u32| {
        let resident = ProcessMemory::read(*pid).map(|memory| memory.resident_bytes());
        let resident = resident.map_or_else(|_| "not readable".to_owned(), plan::human);
        format!("  {pid}  {resident}")
    };
    let lines: Vec<String> = named.iter().map(line).collect();
    Err(Stop::Refused(anyhow!(
        "several processes have this name; name one by its number, or move all with --all:\n{}",
        lines.join("\n")
    )))
}

/// Reads the memory of the processes. The second part has the errors of processes that could not be
/// read. Of several processes, those that have ended or have no memory are left out, and a note
/// says so.
fn read(pids: &[u32]) -> Result<(Vec<ProcessMemory>, Vec<pageleap::Error>), Stop> {
    let (mut memories, mut left_out) = (Vec::new(), Vec::new());
    // Processes without memory, by the reason. A cgroup may have hundreds of kernel threads, so
    // they are only counted.
    let mut without_memory: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for pid in pids {
        let spinner = progress::moving_spinner("reading /proc");
        let memory = ProcessMemory::read(*pid);
        spinner.finish_and_clear();
        match memory {
            Ok(memory) if memory.mappings.is_empty() && pids.len() > 1 => {
                without_memory.entry(memory.warnings.join("; ")).or_default().push(*pid);
            }
            Ok(memory) if memory.mappings.is_empty() => {
                let why = memory.warnings.join("; ");
                return Err(Stop::Refused(anyhow!("process {pid} has nothing to move: {why}")));
            }
            Ok(memory) => memories.push(memory),
            Err(error) if error.is_usage() && pids.len() > 1 => {
                without_memory.entry("it has ended".to_owned()).or_default().push(*pid);
            }
            Err(error) if pids.len() == 1 => return Err(error.into()),
            Err(error) => left_out.push(error),
        }
    }
    for (why, pids) in &without_memory {
        let which = match &pids[..] {
            [pid] => format!("process {pid}"),
            [first, ..] => format!("{} processes such as {first}", pids.len()),
            [] => unreachable!("each reason has a process"),
        };
        output::note(&format!("nothing to move in {which}: {why}"));
    }
    for error in &left_out {
        output::note(&format!("left out: {error}"));
    }
    if memories.is_empty() {
        return Err(Stop::Failed(anyhow!("no process is left that can be moved")));
    }
    Ok((memories, left_out))
}

/// Waits for the job and shows its progress. The first Ctrl-C cancels the job, which ends after the
/// call that it is in. `most` is an upper bound of the bytes that the job moves.
fn follow(job: Job, most: u64) -> Report {
    let (began, mut told) = (Instant::now(), Instant::now());
    let terminal = std::io::stderr().is_terminal();
    let mut bar = None;
    while !job.is_finished() {
        if interrupt::received().is_some() {
            job.cancel();
        }
        let now = job.progress();
        // The job finds out which pages are present as it goes, so its total changes.
        let total = now.bytes_total.min(most).max(now.bytes_migrated);
        let so_far = || progress::transferred(now.bytes_migrated, total, began.elapsed());
        if began.elapsed() >= QUIET_FOR && terminal {
            let bar = bar.get_or_insert_with(|| progress::transfer(total));
            bar.set_length(total);
            bar.set_message(so_far());
            bar.set_position(now.bytes_migrated);
        } else if told.elapsed() >= REPORT_EVERY && !terminal {
            told = Instant::now();
            output::note(&format!("moved {}", so_far()));
        }
        std::thread::sleep(TICK);
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    job.wait()
}

/// Turns a report that has been printed into the exit code.
fn conclude(report: &Report, args: &MoveArgs) -> Result<(), Stop> {
    let pages = &report.pages;
    // With `--range`, pages that are not mapped or cannot move count as staying, because the user
    // has named them.
    let named = report.runs.iter().filter(|run| {
        !args.range.is_empty()
            && matches!(run.reason, Some(Reason::Unmapped | Reason::Unmovable))
            && run.outcome == PageOutcome::Unchanged
    });
    let named: u64 = named.map(|run| (run.range.len() / BASE_PAGE) as u64).sum();
    let staying = pages.busy + pages.failed + pages.not_attempted + named;
    interrupt::stop_if_received(|| match staying {
        0 => "all had been dealt with".to_owned(),
        _ => format!("{} were not dealt with", summary::pages(staying)),
    })?;
    match staying {
        0 => Ok(()),
        _ => Err(Stop::Failed(anyhow!(
            "{} that were to move have not moved; the reasons are above",
            summary::pages(staying)
        ))),
    }
}

fn all_read(left_out: &[pageleap::Error]) -> Result<(), Stop> {
    match left_out.len() {
        0 => Ok(()),
        count => Err(Stop::Failed(anyhow!("processes that are left out: {count}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_hexadecimal_and_of_whole_pages() {
        assert_eq!(addresses("1000-3000"), Ok(0x1000..0x3000));
        assert_eq!(addresses("0x7f0000-0x7f1000"), Ok(0x7f_0000..0x7f_1000));
        for text in ["", "1000", "1000-", "3000-1000", "1000-1001", "x-y", "1000-1000"] {
            assert!(addresses(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_process_may_end_after_it_was_selected() {
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        child.wait().unwrap();
        let own = pageleap::process::own_pid().unwrap();
        let (memories, left_out) =
            read(&[child.id(), own]).unwrap_or_else(|stop| panic!("{stop:?}"));
        assert_eq!((memories.len(), left_out.len()), (1, 0));
        assert_eq!(memories[0].pid, own);
        let Err(Stop::Refused(why)) = read(&[child.id()]) else { panic!("it has ended") };
        assert!(why.to_string().contains("there is no process"), "{why}");
    }

    #[test]
    fn kinds_are_those_of_status_that_can_move() {
        assert_eq!(kind("heap"), Ok(MappingKind::Heap));
        assert!(kind("special").unwrap_err().contains("hugetlb"));
    }
}
