//! The columns of the tables: each has a name and a function that takes the figure from a row, a
//! run or a memcpy.

use std::collections::BTreeMap;

use pageleap::{COPY_METHODS, CopyUse, EngineName, EngineShare, Report};
use pageleap_measure::document::{Column, Value, column};
use pageleap_measure::figures::three_digits;
use pageleap_measure::load::Noticing;
use pageleap_measure::phase::Phase;
use pageleap_measure::sample::Sample;
use pageleap_measure::statistics::median;

use super::args::Starter;
use super::rows::{Case, Line, OneCopy, Row, Run};
use crate::engine::Asked;

/// Rows, runs and memcpys, which all belong to a case.
pub trait OfCase {
    /// The case.
    fn case(&self) -> &Case;
}

impl OfCase for Row<'_> {
    fn case(&self) -> &Case {
        self.case
    }
}

impl OfCase for Run<'_> {
    fn case(&self) -> &Case {
        self.row.case
    }
}

impl OfCase for Line<'_> {
    fn case(&self) -> &Case {
        self.case
    }
}

impl OfCase for OneCopy<'_> {
    fn case(&self) -> &Case {
        self.case
    }
}

/// Page size and load, for programs.
pub fn load_columns<R: OfCase>() -> Vec<Column<R>> {
    vec![
        column("page_size", "", "", |of: &R| of.case().kind.to_string().into()),
        column("load", "", "", |of: &R| of.case().load.kind.to_string().into()),
        column("writes_per_s", "", "", |of: &R| of.case().writes_per_s()),
        column("writers", "", "", |of: &R| {
            Value::count(of.case().writing().map_or(0, |writing| writing.writers))
        }),
        column("readers", "", "", |of: &R| {
            Value::count(of.case().writing().map_or(0, |writing| writing.readers))
        }),
    ]
}

/// The copy loop of a leap. There is one at most, because a leap goes from one node to one node.
fn copies(sample: &Sample) -> Option<CopyUse> {
    sample.leap.report.copies.first().copied()
}

fn copy_loop(sample: &Sample) -> Value {
    copies(sample).map_or(Value::Unknown, |of| of.method.by.name().into())
}

/// The memcpys of each group.
pub fn line_columns<'a>() -> Vec<Column<Line<'a>>> {
    vec![
        column("", "beside", "", |line: &Line| line.case.heading().into()),
        column("", "64KiB", "", |line: &Line| line.median_ns(0)),
        column("", "256KiB", "", |line: &Line| line.median_ns(1)),
        column("", "1MiB", "", |line: &Line| line.median_ns(2)),
        column("", "4MiB", "", |line: &Line| line.median_ns(3)),
        column("", "16MiB", "", |line: &Line| line.median_ns(4)),
        column("", COPY_METHODS[0].by.name(), "", |line: &Line| line.median_ns(5)),
        column(
            "",
            "fastest",
            "loop and steps with the lowest median; leaps are compared with this copy of their \
             own run, which runs without load",
            |line: &Line| line.base_line.method().to_string().into(),
        ),
    ]
}

/// The requested engine and, for `auto`, the engine that has moved most in all runs together.
/// `moved` has the pages of each engine.
pub fn engine_name(
    asked: impl Into<Asked>,
    moved: impl Iterator<Item = (EngineName, u64)>,
) -> String {
    let asked = asked.into();
    if asked != Asked::Auto {
        return asked.to_string();
    }
    let mut pages: BTreeMap<EngineName, u64> = BTreeMap::new();
    moved.for_each(|(engine, moved)| *pages.entry(engine).or_default() += moved);
    let all: u64 = pages.values().sum();
    let most = pages.into_iter().max_by_key(|(_, pages)| *pages);
    let Some((used, of_it)) = most.filter(|(_, pages)| *pages > 0) else {
        return asked.to_string();
    };
    match of_it * 100 / all {
        100 => format!("{asked} ({used})"),
        percent => format!("{asked} ({used} {percent}%)"),
    }
}

/// The same, and the priority of the thread that started the jobs, unless it is an ordinary thread.
pub fn asked_and_used(row: &Row) -> String {
    let parts: Vec<EngineShare<'_>> =
        row.samples.iter().flat_map(|sample| sample.leap.report.by_engine()).collect();
    let moved = parts.iter().map(|part| (part.engine, part.pages));
    let engine = engine_name(row.case.engine.choice, moved);
    match row.case.engine.starter {
        Starter::Ordinary => engine,
        starter => format!("{engine}, {starter}"),
    }
}

/// The share of pages that were moved by the job's own engine, which with `auto` is the one that
/// follows writes.
fn own_share(report: &Report) -> f64 {
    let parts = report.by_engine();
    let pages = |own: bool| {
        let parts = parts.iter().filter(|part| !own || part.engine == report.engine);
        parts.map(|part| part.pages).sum::<u64>()
    };
    pages(true) as f64 / pages(false).max(1) as f64
}

/// The columns of the table of rows.
pub fn row_columns<'a>() -> Vec<Column<Row<'a>>> {
    let mut columns = vec![
        column("row", "", "", |row: &Row| Value::count(row.number)),
        column("", "engine", "", |row: &Row| asked_and_used(row).into()),
        column("engine", "", "", |row: &Row| row.samples[0].leap.report.engine.to_string().into()),
        column("requested_engine", "", "", |row: &Row| row.case.engine.choice.to_string().into()),
        column("starter", "", "", |row: &Row| row.case.engine.starter.to_string().into()),
        column("engine_moved_ratio", "", "", |row: &Row| {
            let shares: Vec<f64> =
                row.samples.iter().map(|sample| own_share(&sample.leap.report)).collect();
            Value::ratio(median(&shares))
        }),
        column("area_bytes", "area", "most bytes that one step moves", |row: &Row| {
            Value::Bytes(row.samples[0].leap.report.area_bytes as u64)
        }),
        // The copy loop of the last run.
        column("copy_loop", "", "", |row: &Row| copy_loop(&row.samples[row.samples.len() - 1])),
    ];
    columns.extend(load_columns());
    columns.extend(time_columns());
    columns.extend(load_result_columns());
    columns.extend(price_columns());
    columns
}

/// Columns with the times, CPU times and repeated copies of leaps, compared with those of memcpys.
fn time_columns<'a>() -> Vec<Column<Row<'a>>> {
    vec![
        column("copy_threads", "", "", |row: &Row| {
            Value::count(row.samples[0].leap.report.threads)
        }),
        column("copy_threads_settled", "", "", |row: &Row| {
            let settled = row.samples.iter().map(|sample| sample.leap.report.threads_settled);
            Value::count(settled.min().unwrap_or(0))
        }),
        column("runs", "", "", |row: &Row| Value::count(row.samples.len())),
        column("memcpy_loop", "", "", |row: &Row| row.base_line.method().by.name().into()),
        column("memcpy_step_bytes", "", "", |row: &Row| {
            Value::count(row.base_line.method().step_bytes)
        }),
        column("memcpy_ns", "", "", |row: &Row| row.median_ns(|run| run.memcpy.ns)),
        column("memcpy_cpu_ns", "", "", |row: &Row| row.known_ns(|run| run.memcpy.cpu_ns)),
        column(
            "migrate_ns",
            "leap",
            "time from the start of the job until the last page had moved",
            |row: &Row| row.median_ns(|run| run.sample.leap.report.migrate_ns),
        ),
        column("ratio_to_memcpy", "ratio", "leap / memcpy of the same run", |row: &Row| {
            Value::ratio(row.median(|run| run.ratio()))
        }),
        column("", "min-max", "lowest and highest ratio of all runs", |row: &Row| {
            let (low, high) = row.ratios();
            Value::Text(format!("{:>9}", format!("{}-{}", three_digits(low), three_digits(high))))
        }),
        column("ratio_to_memcpy_min", "", "", |row: &Row| Value::Ratio(row.ratios().0)),
        column("ratio_to_memcpy_max", "", "", |row: &Row| Value::Ratio(row.ratios().1)),
        column(
            "cpu_to_memcpy_ratio",
            "CPU",
            "CPU time of leap and recycling (all threads of the job, and the thread that starts \
             it) / CPU time of the memcpy",
            |row: &Row| Value::ratio(row.known(|run| run.cpu_ratio())),
        ),
        column("migrate_cpu_ns", "", "", |row: &Row| {
            row.known_ns(|run| run.sample.leap.migrate_cpu_ns)
        }),
        column(
            "recycle_cpu_ns",
            "recycle",
            "the part of this CPU time that comes after the leap: vacated frames are made ready \
             for use again",
            |row: &Row| row.known_ns(|run| run.sample.leap.report.recycle_cpu_ns),
        ),
        column(
            "extra_copied_ratio",
            "again",
            "bytes copied again because they were written meanwhile / all bytes",
            |row: &Row| Value::share(row.median(|run| run.sample.extra_copied())),
        ),
    ]
}

/// Columns with the effect of a leap on the load: rates, gaps and windows.
fn load_result_columns<'a>() -> Vec<Column<Row<'a>>> {
    vec![
        column("writes_beside_memcpy_per_s", "", "", |row: &Row| {
            Value::per_second(row.known(|run| run.beside_per_s()))
        }),
        column(
            "writes_kept_ratio",
            "kept",
            "writes per second during leap and recycling / writes per second beside a memcpy; \
             above 100 % if the memcpy takes more from the writer, or the writer caught up; of a \
             changing load at full speed, in all runs together",
            |row: &Row| Value::share(row.kept()),
        ),
        column(
            "max_gap_ns",
            "gap",
            "longest time between two batches of writes, the writer's own pauses included",
            |row: &Row| row.gap_ns(1.0),
        ),
        column("p999_gap_ns", "", "", |row: &Row| row.gap_ns(0.999)),
        column(
            "gap_beyond_memcpy_ns",
            "beyond",
            "longest gap of a leap, less the longest beside memcpys of the same run (median of \
             the runs)",
            |row: &Row| {
                let beyond = row.beyond_memcpy_ns(Noticing::Writers);
                beyond.map_or(Value::Unknown, Value::SignedNs)
            },
        ),
        column("window_p50_ns", "", "", |row: &Row| row.window_ns(0.5)),
        column(
            "window_p99_ns",
            "window",
            "time for which an area was closed to its users: 99 of 100 windows were not longer",
            |row: &Row| row.window_ns(0.99),
        ),
        column("window_max_ns", "longest", "the longest window", |row: &Row| row.window_ns(1.0)),
        column("windows_first_ratio", "", "", |row: &Row| Value::share(row.windows_first())),
        column(
            "efault_count",
            "efault",
            "calls by which the kernel writes (preadv, every 5 ms) that failed or stopped short",
            |row: &Row| {
                let efaults: Option<u64> = row.samples.iter().map(|s| s.load.efaults).sum();
                efaults.map_or(Value::Unknown, Value::Count)
            },
        ),
    ]
}

/// Columns with costs that the ratio leaves out (first touch, populating, mappings, memory), and
/// with lost writes.
fn price_columns<'a>() -> Vec<Column<Row<'a>>> {
    vec![
        column(
            "first_touch_ns",
            "touch",
            "time to write a word of each 4 KiB after the leap, less the time to do so again: \
             paid later, not in the ratio",
            |row: &Row| {
                let touch = row.median(|run| run.sample.first_touch_ns as f64);
                touch.map_or(Value::Unknown, |ns| Value::SignedNs(ns.round() as i64))
            },
        ),
        column(
            "populate_ns",
            "fresh",
            "private memory: time to take and populate as much fresh memory before the leap, by \
             one thread; not in the ratio",
            |row: &Row| row.known_ns(|run| run.sample.populate_ns),
        ),
        column("mappings_before", "", "", |row: &Row| row.most(|s| s.leap.mappings_before)),
        column("mappings_peak", "", "", |row: &Row| row.most(|s| s.leap.mappings_peak)),
        column("mappings_after", "", "", |row: &Row| row.most(|s| s.leap.mappings_after)),
        column(
            "overhead_bytes",
            "memory",
            "most anonymous memory during the leap, less that before; - if the leap was over \
             before the first look",
            |row: &Row| {
                Value::bytes(row.samples.iter().filter_map(|s| s.leap.overhead_bytes).max())
            },
        ),
        column("lost", "lost", "words without the last value written to them", |row: &Row| {
            Value::Count(row.samples.iter().map(|sample| sample.lost).sum())
        }),
    ]
}

/// The figures of one run, for programs.
pub fn run_columns<'a>() -> Vec<Column<Run<'a>>> {
    let mut columns = vec![
        column("row", "", "", |run: &Run| Value::count(run.row.number)),
        column("run", "", "", |run: &Run| Value::count(run.number)),
        column("engine", "", "", |run: &Run| run.sample.leap.report.engine.to_string().into()),
        column("requested_engine", "", "", |run: &Run| {
            run.row.case.engine.choice.to_string().into()
        }),
        column("engine_moved_ratio", "", "", |run: &Run| {
            Value::ratio(Some(own_share(&run.sample.leap.report)))
        }),
        column("area_bytes", "", "", |run: &Run| Value::count(run.sample.leap.report.area_bytes)),
        column("copy_loop", "", "", |run: &Run| copy_loop(run.sample)),
        column("copy_step_bytes", "", "", |run: &Run| {
            copies(run.sample).map_or(Value::Unknown, |of| Value::count(of.method.step_bytes))
        }),
        column("copy_tried", "", "", |run: &Run| {
            copies(run.sample).map_or(Value::Unknown, |of| Value::Flag(of.tried))
        }),
    ];
    columns.extend(load_columns());
    columns.extend(run_time_columns());
    columns.extend(run_load_columns());
    columns
}

fn run_time_columns<'a>() -> Vec<Column<Run<'a>>> {
    vec![
        column("memcpy_ns", "", "", |run: &Run| Value::Ns(run.memcpy.ns)),
        column("memcpy_cpu_ns", "", "", |run: &Run| Value::ns(run.memcpy.cpu_ns)),
        column("migrate_ns", "", "", |run: &Run| Value::Ns(run.sample.leap.report.migrate_ns)),
        column("recycle_ns", "", "", |run: &Run| Value::Ns(run.sample.leap.report.recycle_ns)),
        column("migrate_cpu_ns", "", "", |run: &Run| Value::ns(run.sample.leap.migrate_cpu_ns)),
        column("recycle_cpu_ns", "", "", |run: &Run| {
            Value::ns(run.sample.leap.report.recycle_cpu_ns)
        }),
        column("ratio_to_memcpy", "", "", |run: &Run| Value::Ratio(run.ratio())),
        column("cpu_to_memcpy_ratio", "", "", |run: &Run| Value::ratio(run.cpu_ratio())),
        column("bytes", "", "", |run: &Run| Value::Bytes(run.sample.leap.report.bytes)),
        column("bytes_copied", "", "", |run: &Run| {
            Value::Bytes(run.sample.leap.report.bytes_copied)
        }),
        column("extra_copied_ratio", "", "", |run: &Run| Value::Share(run.sample.extra_copied())),
        column("first_touch_ns", "", "", |run: &Run| Value::SignedNs(run.sample.first_touch_ns)),
        column("populate_ns", "", "", |run: &Run| Value::ns(run.sample.populate_ns)),
        column("mappings_peak", "", "", |run: &Run| Value::count(run.sample.leap.mappings_peak)),
        column("overhead_bytes", "", "", |run: &Run| Value::bytes(run.sample.leap.overhead_bytes)),
        column("lost", "", "", |run: &Run| Value::Count(run.sample.lost)),
    ]
}

fn run_load_columns<'a>() -> Vec<Column<Run<'a>>> {
    vec![
        column("writes_beside_memcpy_per_s", "", "", |run: &Run| {
            Value::per_second(run.beside_per_s())
        }),
        column("writes_during_per_s", "", "", |run: &Run| Value::per_second(run.during_per_s())),
        column("writes_kept_ratio", "", "", |run: &Run| Value::share(run.kept())),
        column("gap_count", "", "", |run: &Run| {
            Value::Count(run.sample.load.gaps.count(Phase::During))
        }),
        column("gap_p50_ns", "", "", |run: &Run| Value::ns(run.sample.gap_ns(0.5))),
        column("gap_p99_ns", "", "", |run: &Run| Value::ns(run.sample.gap_ns(0.99))),
        column("gap_p999_ns", "", "", |run: &Run| Value::ns(run.sample.gap_ns(0.999))),
        column("gap_max_ns", "", "", |run: &Run| Value::ns(run.sample.gap_ns(1.0))),
        column("gap_beyond_memcpy_ns", "", "", |run: &Run| {
            run.beyond_memcpy_ns(Noticing::Writers).map_or(Value::Unknown, Value::SignedNs)
        }),
        column("window_count", "", "", |run: &Run| {
            Value::Count(run.sample.leap.report.windows.count)
        }),
        column("window_p50_ns", "", "", |run: &Run| Value::ns(run.sample.window_ns(0.5))),
        column("window_p99_ns", "", "", |run: &Run| Value::ns(run.sample.window_ns(0.99))),
        column("window_max_ns", "", "", |run: &Run| Value::ns(run.sample.window_ns(1.0))),
        column("windows_first", "", "", |run: &Run| {
            Value::Count(run.sample.leap.report.counts.windows_first)
        }),
        column("windows_over_budget", "", "", |run: &Run| {
            Value::Count(run.sample.leap.report.counts.windows_over_budget)
        }),
        column("efault_count", "", "", |run: &Run| {
            run.sample.load.efaults.map_or(Value::Unknown, Value::Count)
        }),
    ]
}

/// One memcpy, for programs.
pub fn copy_columns<'a>() -> Vec<Column<OneCopy<'a>>> {
    let mut columns: Vec<Column<OneCopy>> = load_columns();
    columns.extend([
        column("run", "", "", |copy: &OneCopy| Value::count(copy.run)),
        column("loop", "", "", |copy: &OneCopy| copy.method.by.name().into()),
        column("step_bytes", "", "", |copy: &OneCopy| Value::count(copy.method.step_bytes)),
        column("ns", "", "", |copy: &OneCopy| Value::Ns(copy.copy.ns)),
        column("cpu_ns", "", "", |copy: &OneCopy| Value::ns(copy.copy.cpu_ns)),
    ]);
    columns
}
