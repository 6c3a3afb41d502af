//! The demo's result as unformatted figures, with a list of mismatches.
//!
//! Field names carry the units: `_ns` is nanoseconds, `_per_s` is per second. Sizes are bytes.

use std::thread::available_parallelism;

use pageleap::{BASE_PAGE, CopyMethod, CopyUse, Ended, PageCounts, PageOutcome, Report};
use pageleap_measure::leap::Watched;
use pageleap_measure::load::{Noticing, Rate};
use pageleap_measure::memcpy::Copies;
use pageleap_measure::phase::{PHASES, Spread};
use pageleap_measure::statistics::{self, median, median_if_all_known};
use pageleap_measure::timeline::Moment;

use super::Observed;
use super::args::{DemoArgs, Memory};
use super::build::Built;
use super::home::{NodePages, Way};
use super::measure::{self, Measured};
use super::verify::{self, Frames};
use crate::machine;
use crate::stop::Stop;
use pageleap_measure::tpch::queries::{self, Decimal, Series};

/// The result.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The table.
    pub table: Table,
    /// The machine.
    pub machine: Machine,
    /// The leap under load.
    pub leap: Leap,
    /// Memcpys of the table without load, with the base line chosen from them.
    pub memcpy: Memcpy,
    /// Leaps of the whole table without load, alternately to the destination and back.
    pub quiet: Quiet,
    /// A memcpy beside queries and writes; `None` if a signal came before it.
    pub memcpy_under_load_ns: Option<u64>,
    /// Rates, gaps and lost writes of the writer.
    pub writes: Writes,
    /// Latencies of Q1.
    pub q1: Query,
    /// Latencies of Q6.
    pub q6: Query,
    /// Where the pages are.
    pub pages: Pages,
    /// Whether both answers equal those published for scale factor 1, and the revenue of Q6. `None`
    /// at other scale factors.
    pub published: Option<(bool, Decimal)>,
    /// Writer and leap over time.
    pub timeline: Vec<Moment>,
    /// Warnings of the library's report.
    pub warnings: Vec<String>,
    /// Mismatches, one sentence each; empty if the run is a success.
    pub mismatches: Vec<String>,
}

/// The table, and the memory that holds it.
#[derive(Clone, Debug)]
pub struct Table {
    /// TPC-H scale factor.
    pub scale_factor: f64,
    /// Rows.
    pub rows: u64,
    /// The kind of memory that holds the table.
    pub memory: Memory,
    /// Bytes of this memory. The leap was to move all of them.
    pub bytes: u64,
    /// Requested page size.
    pub page_size: u64,
    /// Size of the pages that are counted.
    pub counted_page_size: u64,
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// Nodes with memory.
    pub nodes: usize,
    /// CPUs that the process may use.
    pub cpus: usize,
}

/// Leaps without load.
#[derive(Clone, Debug)]
pub struct Quiet {
    /// The times of the leaps, in order.
    pub samples_ns: Vec<u64>,
    /// Statistics of these times.
    pub ns: statistics::Summary,
    /// Median CPU time of leap and recycling; `None` if the kernel does not report it.
    pub cpu_ns: Option<u64>,
    /// Median time to populate the memory that a leap copied into; `None` if there was no such
    /// memory.
    pub reserve_ns: Option<u64>,
    /// Engine of the last leap.
    pub engine: String,
    /// Why the library chose this engine.
    pub engine_reason: String,
}

/// The leap under load.
#[derive(Clone, Debug)]
pub struct Leap {
    /// Node the table started on.
    pub from: u32,
    /// Node that the table was to move to.
    pub to: u32,
    /// Engine that moved the table.
    pub engine: String,
    /// Why the library chose this engine.
    pub engine_reason: String,
    /// Bytes that moved, by engine, the most first.
    pub moved_by: Vec<(&'static str, u64)>,
    /// Time to populate the memory that the leap copied into, before the leap; `None` if there was
    /// no such memory.
    pub reserve_ns: Option<u64>,
    /// Bytes of this memory that the leap did not take.
    pub reserve_left_bytes: Option<u64>,
    /// Most bytes that one migration step worked on.
    pub area_bytes: u64,
    /// Threads that copied.
    pub threads: usize,
    /// From the start of the job to the last commit.
    pub migrate_ns: u64,
    /// Time of the job after the last commit. In this time the job makes vacated frames ready for
    /// use again.
    pub recycle_ns: u64,
    /// The copy loop; `None` if nothing was to be copied.
    pub copies: Option<CopyUse>,
    /// CPU time of leap and recycling; `None` if the kernel does not report it.
    pub cpu_ns: Option<u64>,
    /// Whether the job ran to its end.
    pub completed: bool,
    /// Bytes that moved.
    pub moved_bytes: u64,
    /// Bytes copied again because a thread wrote them meanwhile / all bytes.
    pub extra_copied_ratio: f64,
    /// Longest time that the library held back a writer, as far as the library can measure it.
    pub max_wait_ns: u64,
    /// Why the job ended early; `None` if it completed.
    pub ended_early: Option<String>,
}

/// Copies of the same bytes by one thread, by several methods.
#[derive(Clone, Debug)]
pub struct Memcpy {
    /// The method of the base line.
    pub method: CopyMethod,
    /// Its median time.
    pub ns: u64,
    /// Its median CPU time; `None` if the kernel does not report it.
    pub cpu_ns: Option<u64>,
    /// All times.
    pub runs: Vec<Copies>,
}

/// Rates, gaps and lost writes of the writer.
#[derive(Clone, Debug)]
pub struct Writes {
    /// Requested rate.
    pub requested: Rate,
    /// Rate during the leap / requested rate. If the requested rate is unlimited, the divisor is
    /// the rate before the leap. `None` without a writer.
    pub achieved_ratio: Option<f64>,
    /// Rate before the leap.
    pub before_per_s: f64,
    /// Rate during the leap.
    pub during_per_s: f64,
    /// All writes of the run.
    pub count: u64,
    /// Writes that ended during the leap.
    pub landed_during: u64,
    /// Rows that do not contain the last value written to them.
    pub lost: u64,
    /// Times between two batches of writes, the writer's pauses included, by phase. `None` for a
    /// phase without writes.
    pub gaps: [Option<Spread>; PHASES.len()],
    /// The longest gap during the leap, minus the longest gap beside the memcpy.
    pub gap_beyond_memcpy_ns: Option<i64>,
}

impl Writes {
    /// Whether there was a writer.
    pub fn any(&self) -> bool {
        self.requested != Rate::PerSecond(0)
    }
}

/// Latencies of one query by phase: before the leap, beside a memcpy, during and after the leap. A
/// run that overlaps the leap counts as during the leap.
#[derive(Clone, Debug)]
pub struct Query {
    /// Medians; `None` for a phase without runs.
    pub median_ns: [Option<u64>; PHASES.len()],
    /// Runs.
    pub runs: [u64; PHASES.len()],
    /// Each latency that occurred, with its number of occurrences.
    pub counts: [Vec<(u64, u64)>; PHASES.len()],
    /// Whether all answers were the same.
    pub equal: bool,
}

/// Where the pages are.
#[derive(Clone, Debug)]
pub struct Pages {
    /// Pages by outcome.
    pub counts: PageCounts,
    /// Pages by node before the leap, as the kernel reports them.
    pub before: NodePages,
    /// Pages by node after the leap.
    pub after: NodePages,
    /// Page size that the kernel reports for the table's mapping after the leap.
    pub kernel_page_size: u64,
    /// Share of the table that huge pages map.
    pub huge_mapped_ratio: f64,
    /// Mappings of region and pools, or of the process: before the leap, the most during it, and
    /// after it.
    pub mappings: [usize; 3],
    /// Share of pages that have another physical frame now; `None` if the kernel hides frames.
    pub frames_changed_ratio: Option<f64>,
}

impl Summary {
    /// Time of the leap / time of the memcpy; `None` if the leap did not complete.
    pub fn ratio_to_memcpy(&self) -> Option<f64> {
        self.leap.completed.then(|| self.leap.migrate_ns as f64 / self.memcpy.ns as f64)
    }

    /// CPU time of leap and recycling / CPU time of the memcpy; `None` if the leap did not complete
    /// or one of the two is unknown.
    pub fn cpu_to_memcpy_ratio(&self) -> Option<f64> {
        let leap = self.leap.cpu_ns.filter(|_| self.leap.completed)?;
        Some(leap as f64 / self.memcpy.cpu_ns.filter(|ns| *ns > 0)? as f64)
    }

    /// Median of the leaps without load / time of the memcpy.
    pub fn quiet_ratio(&self) -> f64 {
        self.quiet.ns.median / self.memcpy.ns as f64
    }

    /// Median CPU time of a leap without load and of its recycling / CPU time of the memcpy; `None`
    /// if one of the two is unknown.
    pub fn quiet_cpu_ratio(&self) -> Option<f64> {
        Some(self.quiet.cpu_ns? as f64 / self.memcpy.cpu_ns.filter(|ns| *ns > 0)? as f64)
    }

    /// Time of the leap / time of a memcpy, both beside queries and writes; `None` if the leap did
    /// not complete.
    pub fn ratio_under_load(&self) -> Option<f64> {
        let memcpy = self.memcpy_under_load_ns.filter(|ns| *ns > 0)?;
        self.leap.completed.then(|| self.leap.migrate_ns as f64 / memcpy as f64)
    }

    /// How much longer the leap took beside queries and writes than without load; `None` if it did
    /// not complete.
    pub fn leap_load_cost_ns(&self) -> Option<i64> {
        let quiet = self.quiet.ns.median.round() as i64;
        self.leap.completed.then(|| self.leap.migrate_ns as i64 - quiet)
    }

    /// How much longer the memcpy took beside queries and writes than without load.
    pub fn memcpy_load_cost_ns(&self) -> Option<i64> {
        Some(self.memcpy_under_load_ns? as i64 - self.memcpy.ns as i64)
    }

    /// Combines the measurements with the observations before the first leap and after the last.
    pub fn of(
        args: &DemoArgs,
        built: &Built,
        measured: &Measured,
        watched: &Watched,
        [first, after]: [&Observed; 2],
        lost: u64,
    ) -> Result<Summary, Stop> {
        let before = &measured.before;
        let page = built.home.page_bytes();
        let frames = before.frames.as_ref().zip(after.frames.as_ref()).map(|(before, after)| {
            let runs = watched.report.runs.iter();
            let migrated = runs.filter(|run| run.outcome == PageOutcome::Migrated);
            verify::compare_frames(
                before,
                after,
                page,
                migrated.map(|run| built.home.bytes_of(run)),
            )
        });
        let log = &measured.query_log;
        let mut summary = Summary {
            table: Table {
                scale_factor: args.scale_factor,
                rows: built.layout.rows() as u64,
                memory: args.memory,
                bytes: built.bytes()? as u64,
                page_size: args.page_size.bytes() as u64,
                counted_page_size: page as u64,
            },
            machine: Machine {
                kernel: machine::kernel_release()?,
                nodes: built.nodes,
                cpus: available_parallelism().map_or(1, usize::from),
            },
            leap: Leap::of(args, built, measured.reserve_ns, watched),
            memcpy: Memcpy::of(&measured.copies),
            quiet: Quiet::of(&measured.quiet, &measured.quiet_reserve_ns),
            memcpy_under_load_ns: measured.under_load.memcpy.map(|copy| copy.ns),
            writes: Writes::of(args.writes_per_s, measured, watched, lost),
            q1: Query::of(&log.q1),
            q6: Query::of(&log.q6),
            pages: Pages::of(built, watched, [before, after], frames)?,
            published: (args.scale_factor == 1.0)
                .then(|| log.q1.first().zip(log.q6.first()))
                .flatten()
                .map(|(q1, q6)| (queries::is_published_sf1(q1, *q6), Decimal(*q6, 4))),
            timeline: measured.under_load.timeline.clone(),
            warnings: watched.report.warnings.iter().map(|warning| warning.text.clone()).collect(),
            mismatches: Vec::new(),
        };
        let unchanged =
            [before, after].iter().all(|seen| seen.other_columns == first.other_columns);
        summary.mismatches = mismatches(&summary, unchanged);
        summary.mismatches.extend(frames.and_then(kept_frames));
        Ok(summary)
    }
}

impl Quiet {
    fn of(leaps: &[Watched], reserve_ns: &[Option<u64>]) -> Quiet {
        let times: Vec<f64> = leaps.iter().map(|leap| leap.report.migrate_ns as f64).collect();
        let cpu: Vec<_> = leaps.iter().map(|leap| leap.cpu_ns().map(|ns| ns as f64)).collect();
        let reserve: Vec<_> = reserve_ns.iter().map(|ns| ns.map(|ns| ns as f64)).collect();
        let last = &leaps.last().expect("leaps without load were timed").report;
        Quiet {
            samples_ns: leaps.iter().map(|leap| leap.report.migrate_ns).collect(),
            ns: statistics::Summary::of(&times).expect("leaps without load were timed"),
            cpu_ns: median_if_all_known(&cpu).map(|ns| ns.round() as u64),
            reserve_ns: median_if_all_known(&reserve).map(|ns| ns.round() as u64),
            engine: moved_by(last).0,
            engine_reason: moved_by(last).1,
        }
    }
}

/// The engines that have moved something, the most first, and why the first one has.
fn moved_by(report: &Report) -> (String, String) {
    let shares = report.by_engine();
    let Some(most) = shares.first() else {
        return (report.engine.to_string(), report.engine_reason.clone());
    };
    let mut engines: Vec<String> = shares.iter().map(|share| share.engine.to_string()).collect();
    engines.dedup();
    (engines.join(", "), most.why.to_owned())
}

/// Bytes that have moved by each engine, the most first.
fn bytes_by_engine(report: &Report, page_bytes: u64) -> Vec<(&'static str, u64)> {
    let mut moved: Vec<(&'static str, u64)> = Vec::new();
    for share in report.by_engine() {
        let (name, bytes) = (share.engine.name(), share.pages * page_bytes);
        match moved.iter_mut().find(|(engine, _)| *engine == name) {
            Some((_, sum)) => *sum += bytes,
            None => moved.push((name, bytes)),
        }
    }
    moved
}

impl Leap {
    fn of(args: &DemoArgs, built: &Built, reserve_ns: Option<u64>, watched: &Watched) -> Leap {
        let report = &watched.report;
        let page = built.home.page_bytes() as u64;
        Leap {
            from: built.from,
            to: built.to,
            engine: moved_by(report).0,
            engine_reason: moved_by(report).1,
            moved_by: bytes_by_engine(report, page),
            reserve_ns,
            reserve_left_bytes: built.home.left_over(Way::There),
            area_bytes: report.area_bytes as u64,
            threads: args.threads,
            copies: report.copies.first().copied(),
            migrate_ns: report.migrate_ns,
            recycle_ns: report.recycle_ns,
            cpu_ns: watched.cpu_ns(),
            completed: report.ended.is_completed(),
            moved_bytes: report.pages.migrated * page,
            extra_copied_ratio: report.bytes_recopied as f64 / report.bytes as f64,
            max_wait_ns: report.waits.max_ns.max(report.windows.max_ns),
            ended_early: ended_early(&report.ended),
        }
    }
}

impl Memcpy {
    fn of(runs: &[Copies]) -> Memcpy {
        let base_line = measure::base_line(runs);
        let copies = runs.iter().map(|copies| base_line.copy_in(copies));
        let middle = |values: Vec<f64>| median(&values).map(|ns| ns.round() as u64);
        let cpu_ns: Option<Vec<f64>> =
            copies.clone().map(|copy| copy.cpu_ns.map(|ns| ns as f64)).collect();
        Memcpy {
            method: base_line.method(),
            ns: middle(copies.map(|copy| copy.ns as f64).collect()).unwrap_or(0),
            cpu_ns: cpu_ns.and_then(middle),
            runs: runs.to_vec(),
        }
    }
}

impl Writes {
    fn of(requested: Rate, measured: &Measured, watched: &Watched, lost: u64) -> Writes {
        let before_per_s = measured.under_load.rate_before;
        let during_per_s = watched.writes_per_s();
        let log = &measured.write_log;
        let expected = match requested {
            Rate::PerSecond(rate) => rate as f64,
            Rate::Max => before_per_s,
        };
        Writes {
            requested,
            achieved_ratio: (expected > 0.0).then(|| during_per_s / expected),
            before_per_s,
            during_per_s,
            count: log.writes,
            landed_during: watched.writes,
            lost,
            gaps: PHASES.map(|phase| log.gaps.spread(phase)),
            gap_beyond_memcpy_ns: log.beyond_memcpy_ns(log, Noticing::Writers),
        }
    }
}

impl Query {
    fn of<A: PartialEq>(series: &Series<A>) -> Query {
        Query {
            median_ns: PHASES.map(|phase| series.median_ns(phase)),
            runs: PHASES.map(|phase| series.runs(phase)),
            counts: PHASES.map(|phase| series.counts(phase).collect()),
            equal: series.equal,
        }
    }
}

impl Pages {
    fn of(
        built: &Built,
        watched: &Watched,
        [before, after]: [&Observed; 2],
        frames: Option<Frames>,
    ) -> Result<Pages, Stop> {
        let mapped = built.home.mapped_pages()?;
        Ok(Pages {
            counts: watched.report.pages,
            before: before.placement.clone(),
            after: after.placement.clone(),
            kernel_page_size: mapped.kernel_page_size as u64,
            huge_mapped_ratio: mapped.huge_mapped_ratio,
            mappings: [watched.mappings_before, watched.mappings_peak, watched.mappings_after],
            frames_changed_ratio: frames.map(|frames| frames.changed_ratio),
        })
    }
}

fn ended_early(ended: &Ended) -> Option<String> {
    match ended {
        Ended::Completed => None,
        Ended::Cancelled => Some("cancelled".to_owned()),
        Ended::TimedOut => Some("timed out".to_owned()),
        Ended::CpusetChanged => Some("the cpuset was changed".to_owned()),
        Ended::RegionDropped => Some("the region was dropped".to_owned()),
        Ended::Failed(error) => Some(format!("failed: {error}")),
    }
}

/// The mismatches of a run, one sentence each. Frames and incomplete leaps are checked elsewhere.
fn mismatches(summary: &Summary, other_columns_equal: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, query) in [("Q1", &summary.q1), ("Q6", &summary.q6)] {
        if !query.equal {
            wrong.push(format!("mismatch: {name} gave different results during the run"));
        }
    }
    if summary.writes.lost > 0 {
        wrong.push(format!(
            "mismatch: {} rows of L_ORDERKEY do not contain the last value written to them",
            summary.writes.lost
        ));
    }
    if !other_columns_equal {
        wrong.push("mismatch: columns that no thread wrote have changed".to_owned());
    }
    let Pages { counts, after, .. } = &summary.pages;
    let arrived = after.get(&summary.leap.to).copied().unwrap_or(0);
    let expected = counts.migrated + counts.unchanged;
    if arrived < expected {
        wrong.push(format!(
            "mismatch: {expected} pages should be on node {}, and the kernel reports {arrived} \
             there",
            summary.leap.to
        ));
    }
    if summary.table.page_size > BASE_PAGE as u64 && summary.pages.huge_mapped_ratio < 1.0 {
        wrong.push(format!(
            "mismatch: huge pages map only {} % of the table",
            (summary.pages.huge_mapped_ratio * 100.0).floor()
        ));
    }
    if matches!(summary.published, Some((false, _))) {
        let what = "mismatch: Q1 or Q6 differs from the answer published for scale factor 1";
        wrong.push(what.to_owned());
    }
    wrong
}

fn kept_frames(frames: Frames) -> Option<String> {
    let kept = frames.migrated_unchanged;
    (kept > 0).then(|| {
        format!("mismatch: {kept} pages are reported as migrated and still have their old frame")
    })
}

/// A sentence on a leap that did not move everything; `None` if it did. Only a signal excuses such
/// a leap.
pub fn incomplete(summary: &Summary) -> Option<String> {
    let counts = summary.pages.counts;
    let left = counts.busy + counts.failed + counts.not_attempted;
    if left == 0 && summary.leap.ended_early.is_none() {
        return None;
    }
    let why = summary.leap.ended_early.as_deref().unwrap_or("the job ended");
    let more_time = if why == "timed out" { "; give it more time with --timeout" } else { "" };
    Some(format!("the leap is not complete ({why}): {left} pages were not moved{more_time}"))
}
