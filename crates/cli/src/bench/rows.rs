//! The results of the benchmark: rows, the setting that all rows share, and the figures of each row
//! and each run.

use std::time::Duration;

use pageleap::{CopyMethod, EngineChoice, Waits};
use pageleap_measure::document::Value;
use pageleap_measure::figures::{human_bytes, short, three_digits};
use pageleap_measure::jobs::{JobSample, KernelSample, Shape};
use pageleap_measure::load::{Noticing, Pattern, Rate, Tally, Work, Writing};
use pageleap_measure::memcpy::{BaseLine, Copies, Copy, METHODS};
use pageleap_measure::phase::{Phase, Times};
use pageleap_measure::sample::Sample;
use pageleap_measure::statistics::{extremes, median, median_if_all_known};

use super::args::{EngineRow, Kind, LoadKind, NamedLoad};
use super::run::{BesideMemcpy, Runs};

/// The key of a row: engine, memory and load.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The engine and its options.
    pub engine: EngineRow,
    /// The memory that leaps.
    pub kind: Kind,
    /// The load beside the leap.
    pub load: NamedLoad,
}

/// All engines with pages of one size and beside one load.
#[derive(Debug)]
pub struct Group {
    /// The rows.
    pub cases: Vec<Case>,
    /// The runs of all these rows.
    pub runs: Runs,
}

/// All engines with jobs of one shape.
#[derive(Debug)]
pub struct JobGroup {
    /// `small` or `scattered`.
    pub load: LoadKind,
    /// The shape of the jobs.
    pub shape: Shape,
    /// The engines.
    pub choices: Vec<EngineChoice>,
    /// For each engine, its jobs: two of each run.
    pub samples: Vec<Vec<JobSample>>,
    /// The times of `move_pages(2)`, by run. The error says why it was not measured.
    pub kernel: Result<Vec<KernelSample>, String>,
}

/// The setting that all rows share.
#[derive(Debug)]
pub struct Setting {
    /// Kernel release.
    pub kernel: String,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// Nodes with memory.
    pub nodes: usize,
    /// User that the process runs as.
    pub uid: u32,
    /// Node the region starts on.
    pub from: u32,
    /// Node it leaps to.
    pub to: u32,
    /// Bytes asked for; `None` if only short jobs are measured.
    pub size: Option<u64>,
    /// Threads that copy.
    pub threads: usize,
    /// The wait budget: how long a thread should wait at most; `None` if the library decides.
    pub wait_budget: Option<Duration>,
    /// Threads of the largest load.
    pub load_threads: usize,
    /// Runs of each row.
    pub runs: usize,
    /// Runs of each short job.
    pub job_runs: usize,
    /// Seed of the writer.
    pub seed: u64,
}

/// All complete measurements, with their setting, and a list of those that were left out.
#[derive(Debug)]
pub struct Bench {
    /// Machine and region.
    pub setting: Setting,
    /// The measurements that are complete.
    pub groups: Vec<Group>,
    /// The measurements of short jobs that are complete.
    pub jobs: Vec<JobGroup>,
    /// Rows and groups that were skipped, each with its reason.
    pub skipped: Vec<String>,
}

/// One row: an engine with pages of one size beside one load.
pub struct Row<'a> {
    /// The number of the row.
    pub number: usize,
    /// Engine, memory and load.
    pub case: &'a Case,
    /// The memcpy that leaps are compared with.
    pub base_line: BaseLine,
    /// The memcpys of each run.
    pub copies: &'a [Copies],
    /// The load beside memcpys of each run; `None` without a load.
    pub beside: &'a [Option<BesideMemcpy>],
    /// The leaps of the row, by run.
    pub samples: &'a [Sample],
}

/// One run of a row.
pub struct Run<'a> {
    /// The row of the run.
    pub row: &'a Row<'a>,
    /// The number of the run.
    pub number: usize,
    /// The memcpy of this run that it is compared with.
    pub memcpy: Copy,
    /// The load beside memcpys; `None` without a load.
    pub beside: Option<&'a BesideMemcpy>,
    /// The leap of this run.
    pub sample: &'a Sample,
}

/// The memcpys of one group.
pub struct Line<'a> {
    /// A case of the group, for its memory and load.
    pub case: &'a Case,
    /// The memcpy that leaps are compared with.
    pub base_line: BaseLine,
    /// The memcpys of each run.
    pub copies: &'a [Copies],
}

/// One memcpy.
pub struct OneCopy<'a> {
    /// A case of the group, for its memory and load.
    pub case: &'a Case,
    /// The number of the run.
    pub run: usize,
    /// The copy loop and its steps.
    pub method: CopyMethod,
    /// The time of the copy.
    pub copy: Copy,
}

impl Bench {
    /// Number of rows that are complete.
    pub fn rows(&self) -> usize {
        let of_jobs = self.jobs.iter().map(|group| group.choices.len());
        self.groups.iter().map(|group| group.cases.len()).chain(of_jobs).sum()
    }

    /// Words that did not contain the last value written to them, in all runs.
    pub fn lost(&self) -> u64 {
        let samples = self.groups.iter().flat_map(|group| group.runs.samples.iter().flatten());
        let of_jobs = self.jobs.iter().map(JobGroup::lost);
        samples.map(|sample| sample.lost).chain(of_jobs).sum()
    }
}

impl Setting {
    /// The kernel's times of short jobs: none yet, or the reason why there will be none.
    pub fn kernel_of_jobs(&self) -> Result<Vec<KernelSample>, String> {
        match (self.nodes, self.from == self.to) {
            (0 | 1, _) => Err("one memory node: the kernel moves pages to other nodes only".into()),
            (_, true) => {
                Err("--from and --to are one node: the kernel moves pages to other nodes only"
                    .into())
            }
            _ => Ok(Vec::new()),
        }
    }
}

impl Case {
    pub fn writing(&self) -> Option<Writing> {
        match self.load.work {
            Work::Write(writing) => Some(writing),
            Work::Rest | Work::Map => None,
        }
    }

    /// Whether the writers go through spells.
    fn changes(&self) -> bool {
        self.writing().is_some_and(|writing| writing.pattern == Pattern::Changing)
    }

    /// The rate of the writers, if they keep one.
    fn rate(&self) -> Option<Rate> {
        match self.writing()?.pattern {
            Pattern::Steady { rate, .. } => Some(rate),
            Pattern::Changing => None,
        }
    }

    /// The requested writes per second. 0 without a writer; unknown for as many as possible, for a
    /// changing load, and for the rounds of the bystander.
    pub fn writes_per_s(&self) -> Value {
        match (self.load.work, self.rate()) {
            (Work::Rest, _) => Value::Count(0),
            (_, Some(Rate::PerSecond(rate))) => Value::Count(rate),
            (_, Some(Rate::Max) | None) => Value::Unknown,
        }
    }

    /// Page size and load, in words.
    pub fn heading(&self) -> String {
        let rate = match self.rate() {
            None => String::new(),
            Some(Rate::Max) => ", as many writes as possible".into(),
            Some(Rate::PerSecond(rate)) => format!(", {} writes/s", short(rate as f64)),
        };
        format!("{}, {}{rate}", self.kind, self.load.kind)
    }
}

impl Group {
    /// The rows of the group, without their numbers.
    pub fn rows(&self, base_line: BaseLine) -> impl Iterator<Item = Row<'_>> {
        let cases = self.cases.iter().zip(&self.runs.samples);
        cases.filter(|(_, samples)| !samples.is_empty()).map(move |(case, samples)| Row {
            number: 0,
            case,
            base_line,
            copies: &self.runs.copies,
            beside: &self.runs.beside,
            samples,
        })
    }

    /// The memcpys of the group; `None` without rows.
    pub fn line(&self, base_line: BaseLine) -> Option<Line<'_>> {
        Some(Line { case: self.cases.first()?, base_line, copies: &self.runs.copies })
    }
}

impl JobGroup {
    /// The number of words that did not contain the last value written to them.
    pub fn lost(&self) -> u64 {
        let by_kernel = self.kernel.iter().flatten().map(|sample| sample.lost);
        self.samples.iter().flatten().map(|sample| sample.lost).chain(by_kernel).sum()
    }

    /// Load and shape, in words.
    pub fn heading(&self) -> String {
        let Shape { ranges, range_pages } = self.shape;
        let bytes = human_bytes(self.shape.bytes() as f64);
        match (ranges, range_pages) {
            (1, _) => format!("{}, {bytes}", self.load),
            (_, 1) => format!("{}, {ranges} ranges of a page ({bytes})", self.load),
            _ => format!("{}, {ranges} ranges of {range_pages} pages ({bytes})", self.load),
        }
    }
}

impl<'a> Line<'a> {
    /// The memcpys of all runs, one by one.
    pub fn each(&'a self) -> impl Iterator<Item = OneCopy<'a>> {
        self.copies.iter().enumerate().flat_map(move |(run, copies)| {
            let each = METHODS.into_iter().zip(*copies);
            each.map(move |(method, copy)| OneCopy { case: self.case, run, method, copy })
        })
    }

    pub fn median_ns(&self, method: usize) -> Value {
        let times: Vec<f64> = self.copies.iter().map(|copies| copies[method].ns as f64).collect();
        Value::ns(median(&times).map(|ns| ns.round() as u64))
    }
}

impl<'a> Row<'a> {
    pub fn runs(&'a self) -> impl Iterator<Item = Run<'a>> {
        self.samples.iter().enumerate().map(|(number, sample)| Run {
            row: self,
            number,
            memcpy: self.base_line.copy_in(&self.copies[number]),
            beside: self.beside[number].as_ref(),
            sample,
        })
    }

    fn figures(&self, figure: fn(&Run) -> f64) -> Vec<f64> {
        self.runs().map(|run| figure(&run)).collect()
    }

    pub fn median(&self, figure: fn(&Run) -> f64) -> Option<f64> {
        median(&self.figures(figure))
    }

    pub fn median_ns(&self, figure: fn(&Run) -> u64) -> Value {
        let figures: Vec<f64> = self.runs().map(|run| figure(&run) as f64).collect();
        Value::ns(median(&figures).map(|ns| ns.round() as u64))
    }

    /// The median of a figure over all runs; `None` if it is unknown in one of them.
    pub fn known(&self, figure: fn(&Run) -> Option<f64>) -> Option<f64> {
        median_if_all_known(&self.runs().map(|run| figure(&run)).collect::<Vec<_>>())
    }

    pub fn known_ns(&self, figure: fn(&Run) -> Option<u64>) -> Value {
        let figures: Vec<_> = self.runs().map(|run| figure(&run).map(|ns| ns as f64)).collect();
        Value::ns(median_if_all_known(&figures).map(|ns| ns.round() as u64))
    }

    pub fn ratios(&self) -> (f64, f64) {
        extremes(&self.figures(|run| run.ratio())).unwrap_or((f64::NAN, f64::NAN))
    }

    /// A quantile of the gaps of all runs: the given share of gaps is not longer.
    pub fn gap_ns(&self, share: f64) -> Value {
        let mut gaps = Times::new();
        self.samples.iter().for_each(|sample| gaps.join(&sample.load.gaps));
        Value::ns(gaps.quantile_ns(Phase::During, share))
    }

    /// Writes per second during the leap / writes per second beside a memcpy: the median of the
    /// runs. Of a changing load only the spells at full speed count, summed over all runs, because
    /// a single leap may meet no such spell.
    pub fn kept(&self) -> Option<f64> {
        if !self.case.changes() {
            return self.known(|run| run.kept());
        }
        let sum = |tally: fn(&Run) -> Tally| {
            self.runs().fold(Tally::default(), |mut sum, run| {
                sum.join(tally(&run));
                sum
            })
        };
        let [during, beside] = [sum(|run| run.full_speed()), sum(|run| run.full_speed_beside())];
        quotient(during.per_s(), beside.per_s())
    }

    /// The longest gap of a leap, minus the longest gap beside memcpys of the same run: the median
    /// of the runs, if it is known for all of them.
    pub fn beyond_memcpy_ns(&self, threads: Noticing) -> Option<i64> {
        let of_runs: Vec<Option<f64>> =
            self.runs().map(|run| run.beyond_memcpy_ns(threads).map(|ns| ns as f64)).collect();
        median_if_all_known(&of_runs).map(|ns| ns.round() as i64)
    }

    fn windows(&self) -> Waits {
        let mut windows = Waits::default();
        self.samples.iter().for_each(|sample| windows.join(&sample.leap.report.windows));
        windows
    }

    /// A quantile of the windows of all runs: the given share of windows is not longer.
    pub fn window_ns(&self, share: f64) -> Value {
        let windows = self.windows();
        Value::ns((windows.count > 0).then(|| windows.quantile(share)))
    }

    pub fn windows_first(&self) -> Option<f64> {
        let windows = self.windows().count;
        let first: u64 =
            self.samples.iter().map(|sample| sample.leap.report.counts.windows_first).sum();
        (windows > 0).then(|| first as f64 / windows as f64)
    }

    pub fn most(&self, figure: fn(&Sample) -> usize) -> Value {
        Value::count(self.samples.iter().map(figure).max().unwrap_or(0))
    }
}

impl Run<'_> {
    pub fn ratio(&self) -> f64 {
        self.sample.ratio_to(self.memcpy)
    }

    pub fn cpu_ratio(&self) -> Option<f64> {
        self.sample.cpu_ratio_to(self.memcpy)
    }

    pub fn during_per_s(&self) -> Option<f64> {
        let has_load = self.row.case.load.work != Work::Rest;
        has_load.then(|| self.sample.leap.writes_per_s())
    }

    /// Writes per second beside a memcpy.
    pub fn beside_per_s(&self) -> Option<f64> {
        Some(self.beside?.per_s)
    }

    /// Writes per second during the leap / writes per second beside a memcpy. Of a changing load
    /// only the spells at full speed count.
    pub fn kept(&self) -> Option<f64> {
        if self.row.case.changes() {
            return quotient(self.full_speed().per_s(), self.full_speed_beside().per_s());
        }
        quotient(self.during_per_s(), self.beside_per_s())
    }

    /// The writes of a changing load at full speed during the leap, with their time.
    fn full_speed(&self) -> Tally {
        self.sample.load.full_speed[Phase::During as usize]
    }

    /// The writes of a changing load at full speed beside memcpys, with their time.
    fn full_speed_beside(&self) -> Tally {
        self.beside.map_or(Tally::default(), |beside| beside.log.full_speed[Phase::Memcpy as usize])
    }

    /// The longest gap during the leap, minus the longest gap beside memcpys of the same run.
    pub fn beyond_memcpy_ns(&self, threads: Noticing) -> Option<i64> {
        self.sample.load.beyond_memcpy_ns(&self.beside?.log, threads)
    }
}

/// A quotient of two rates; `None` if one of them is unknown, or the second is 0.
fn quotient(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    Some(one? / other.filter(|rate| *rate > 0.0)?)
}

/// A complete row in a few words, for progress.
pub fn in_short(case: &Case, at: usize, runs: &Runs) -> String {
    let area = case.engine.area.map(|area| format!(" {}", human_bytes(area as f64)));
    let name = format!("{}: {}{}", case.heading(), case.engine.choice, area.unwrap_or_default());
    let Some(base_line) = BaseLine::of(&runs.copies) else { return name };
    let memcpys = runs.copies.iter().map(|copies| base_line.copy_in(copies));
    let ratios: Vec<f64> =
        runs.samples[at].iter().zip(memcpys).map(|(sample, copy)| sample.ratio_to(copy)).collect();
    match (median(&ratios), extremes(&ratios)) {
        (Some(middle), Some((low, high))) => {
            let [middle, low, high] = [middle, low, high].map(three_digits);
            format!("{name} took {middle} times a memcpy ({low} to {high})")
        }
        _ => name,
    }
}
