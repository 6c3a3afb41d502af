//! The tables of gaps: how long threads of a load were held up beside a memcpy, and beside each
//! leap.

use pageleap_measure::document::{Body, Column, Section, Table, Value, column};
use pageleap_measure::load::{Log, Noticing, Work};
use pageleap_measure::phase::{Phase, Spread, Times};

use super::columns::{OfCase, asked_and_used, load_columns};
use super::rows::{Case, Row, Run};

/// The gaps of some threads of a load beside memcpys, or beside the leaps of one row.
struct GapRow<'a> {
    case: &'a Case,
    /// The row of the leaps; `None` beside memcpys.
    row: Option<&'a Row<'a>>,
    /// The run; `None` for all runs together.
    run: Option<usize>,
    threads: Noticing,
    gaps: Option<Spread>,
    /// The longest gap, minus the longest gap beside memcpys of the same run; the median of the
    /// runs.
    beyond_ns: Option<i64>,
}

impl OfCase for GapRow<'_> {
    fn case(&self) -> &Case {
        self.case
    }
}

impl GapRow<'_> {
    /// The name of the threads, one word.
    fn threads(&self) -> &'static str {
        match (self.threads, self.case.load.work) {
            (Noticing::Writers, Work::Map) => "bystander",
            (Noticing::Writers, _) => "writers",
            (Noticing::Readers, _) => "readers",
            (Noticing::Kernel, _) => "kernel",
        }
    }

    fn ns(&self, figure: fn(&Spread) -> u64) -> Value {
        Value::ns(self.gaps.as_ref().map(figure))
    }
}

/// The gaps of all runs, for people and programs.
pub fn section(rows: &[Row]) -> Section {
    let mut gaps = Vec::new();
    // Rows of one group follow each other, and have the same memcpys.
    for group in rows.chunk_by(|one, other| std::ptr::eq(one.beside, other.beside)) {
        for threads in Noticing::ALL {
            if !has(&group[0], threads) {
                continue;
            }
            gaps.push(beside_memcpys(&group[0], threads));
            gaps.extend(group.iter().map(|row| beside_leaps(row, threads)));
        }
    }
    let title = match gaps.is_empty() {
        true => "",
        false => "Gaps: how long those who write and read were held up, by their own clocks",
    };
    let table = Table::of(&columns(), &gaps, |row| row.case.heading());
    Section::new("gaps", title, Body::Table(table))
}

/// The gaps of each run, for programs.
pub fn samples(rows: &[Row]) -> Section {
    let runs: Vec<Run> = rows.iter().flat_map(Row::runs).collect();
    let mut gaps = Vec::new();
    for run in &runs {
        let case = run.row.case;
        for threads in Noticing::ALL.into_iter().filter(|threads| has(run.row, *threads)) {
            let of = |log: &Log, phase| log.gaps_of(threads).and_then(|gaps| gaps.spread(phase));
            let number = Some(run.number);
            let beside =
                |row, gaps, beyond_ns| GapRow { case, row, run: number, threads, gaps, beyond_ns };
            // All rows of a group share the memcpys of a run, so only the first row shows them.
            if let Some(memcpy) = run.beside.filter(|_| is_first(run.row, rows)) {
                gaps.push(beside(None, of(&memcpy.log, Phase::Memcpy), None));
            }
            let leap = of(&run.sample.load, Phase::During);
            gaps.push(beside(Some(run.row), leap, run.beyond_memcpy_ns(threads)));
        }
    }
    let mut columns = columns();
    columns
        .push(column("run", "", "", |gap: &GapRow| gap.run.map_or(Value::Unknown, Value::count)));
    Section::data("gap_samples", Body::Table(Table::of(&columns, &gaps, |_| String::new())))
}

/// Whether the row is the first of its group.
fn is_first(row: &Row, rows: &[Row]) -> bool {
    rows.iter().find(|other| std::ptr::eq(other.beside, row.beside)).map(|row| row.number)
        == Some(row.number)
}

/// Whether the load of the row has such threads.
fn has(row: &Row, threads: Noticing) -> bool {
    row.beside.iter().flatten().any(|beside| beside.log.gaps_of(threads).is_some())
}

fn beside_memcpys<'a>(row: &Row<'a>, threads: Noticing) -> GapRow<'a> {
    let logs = row.beside.iter().flatten().map(|beside| &beside.log);
    let gaps = all(logs, threads).spread(Phase::Memcpy);
    GapRow { case: row.case, row: None, run: None, threads, gaps, beyond_ns: None }
}

fn beside_leaps<'a>(row: &'a Row<'a>, threads: Noticing) -> GapRow<'a> {
    let logs = row.samples.iter().map(|sample| &sample.load);
    let gaps = all(logs, threads).spread(Phase::During);
    let beyond_ns = row.beyond_memcpy_ns(threads);
    GapRow { case: row.case, row: Some(row), run: None, threads, gaps, beyond_ns }
}

fn all<'a>(logs: impl Iterator<Item = &'a Log>, threads: Noticing) -> Times {
    let mut sum = Times::new();
    logs.filter_map(|log| log.gaps_of(threads)).for_each(|gaps| sum.join(gaps));
    sum
}

fn columns<'a>() -> Vec<Column<GapRow<'a>>> {
    let mut columns = vec![
        column("", "beside", "", |gap: &GapRow| match gap.row {
            None => "memcpy".into(),
            Some(row) => asked_and_used(row).into(),
        }),
        column("beside", "", "", |gap: &GapRow| {
            if gap.row.is_some() { "leap" } else { "memcpy" }.into()
        }),
        column("row", "", "", |gap: &GapRow| {
            gap.row.map_or(Value::Unknown, |row| Value::count(row.number))
        }),
        column("requested_engine", "", "", |gap: &GapRow| {
            gap.row.map_or(Value::Unknown, |row| row.case.engine.choice.to_string().into())
        }),
        column("starter", "", "", |gap: &GapRow| {
            gap.row.map_or(Value::Unknown, |row| row.case.engine.starter.to_string().into())
        }),
        column(
            "threads",
            "threads",
            "writers: time from the end of one batch of writes to the end of the next, their own \
             pauses included; readers: the same for 32 KiB; kernel: time of a system call that \
             writes 64 words (preadv); bystander: time of a round",
            |gap: &GapRow| gap.threads().into(),
        ),
    ];
    columns.extend(load_columns());
    columns.extend([
        column("count", "gaps", "how many, in all runs", |gap: &GapRow| {
            gap.gaps.map_or(Value::Unknown, |gaps| Value::Count(gaps.count))
        }),
        column("p50_ns", "p50", "", |gap: &GapRow| gap.ns(|gaps| gaps.p50_ns)),
        column("p99_ns", "p99", "", |gap: &GapRow| gap.ns(|gaps| gaps.p99_ns)),
        column("p999_ns", "p99.9", "", |gap: &GapRow| gap.ns(|gaps| gaps.p999_ns)),
        column("max_ns", "longest", "", |gap: &GapRow| gap.ns(|gaps| gaps.max_ns)),
        column(
            "beyond_memcpy_ns",
            "beyond",
            "longest gap of a leap, less the longest beside memcpys of the same run (median of \
             the runs)",
            |gap: &GapRow| gap.beyond_ns.map_or(Value::Unknown, Value::SignedNs),
        ),
    ]);
    columns
}
