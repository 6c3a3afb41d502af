//! The result as a document: machine and setting, base line, rows, and the figures of each run.

use std::time::Duration;

use pageleap::{CopyMethod, Waits};
use pageleap_measure::document::{Body, Document, Section, Table, Value, fact};
use pageleap_measure::figures::{human_bytes, percent, short, three_digits};
use pageleap_measure::jobs::KernelSample;
use pageleap_measure::load::{Noticing, Pattern, Rate, Tally, Work, Writing};
use pageleap_measure::memcpy::{BaseLine, Copies, Copy, METHODS};
use pageleap_measure::phase::{Phase, Times};
use pageleap_measure::sample::Sample;
use pageleap_measure::statistics::{extremes, median, median_if_all_known};

use super::args::{EngineRow, Kind, NamedLoad};
use super::columns::{copy_columns, line_columns, row_columns, run_columns};
use super::gaps;
use super::job_rows;
use super::jobs::JobGroup;
use super::run::{BesideMemcpy, Runs};

/// What tells a row from others.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What was asked of the library.
    pub engine: EngineRow,
    /// What leaps.
    pub kind: Kind,
    /// What ran beside it.
    pub load: NamedLoad,
}

/// All engines with pages of one size and beside one load.
#[derive(Debug)]
pub struct Group {
    /// The rows.
    pub cases: Vec<Case>,
    /// Their runs.
    pub runs: Runs,
}

/// What all rows share.
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
    /// For how long a thread should wait at most; `None` if the library decides.
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

/// What was measured, where, and what was left out.
#[derive(Debug)]
pub struct Bench {
    /// Machine and region.
    pub setting: Setting,
    /// The measurements that are complete.
    pub groups: Vec<Group>,
    /// The measurements of short jobs that are complete.
    pub jobs: Vec<JobGroup>,
    /// What was skipped, each with its reason.
    pub skipped: Vec<String>,
}

/// One row: an engine with pages of one size beside one load.
pub struct Row<'a> {
    /// Its number.
    pub number: usize,
    /// What it is of.
    pub case: &'a Case,
    /// The memcpy that leaps are compared with.
    pub base_line: BaseLine,
    /// The memcpys of each run.
    pub copies: &'a [Copies],
    /// The load beside memcpys of each run; `None` without a load.
    pub beside: &'a [Option<BesideMemcpy>],
    /// Its leaps.
    pub samples: &'a [Sample],
}

/// One run of a row.
pub struct Run<'a> {
    /// Its row.
    pub row: &'a Row<'a>,
    /// Its number.
    pub number: usize,
    /// The memcpy of this run that it is compared with.
    pub memcpy: Copy,
    /// The load beside memcpys; `None` without a load.
    pub beside: Option<&'a BesideMemcpy>,
    /// Its leap.
    pub sample: &'a Sample,
}

/// The memcpys of one group.
pub struct Line<'a> {
    /// What it is of.
    pub case: &'a Case,
    /// The memcpy that leaps are compared with.
    pub base_line: BaseLine,
    /// The memcpys of each run.
    pub copies: &'a [Copies],
}

/// One memcpy.
pub struct OneCopy<'a> {
    /// What it is of.
    pub case: &'a Case,
    /// Its run.
    pub run: usize,
    /// How it copied.
    pub method: CopyMethod,
    /// What it took.
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

    /// The result.
    pub fn document(&self) -> Document {
        let groups: Vec<(&Group, BaseLine)> = self
            .groups
            .iter()
            .filter_map(|group| Some((group, BaseLine::of(&group.runs.copies)?)))
            .collect();
        let mut rows: Vec<Row> =
            groups.iter().flat_map(|(group, line)| group.rows(*line)).collect();
        rows.iter_mut().zip(0..).for_each(|(row, number)| row.number = number);
        let runs: Vec<Run> = rows.iter().flat_map(Row::runs).collect();
        let lines: Vec<Line> =
            groups.iter().filter_map(|(group, line)| group.line(*line)).collect();
        let copies: Vec<OneCopy> = lines.iter().flat_map(Line::each).collect();

        let no_group = |_: &Line| String::new();
        let titled = |title: String| if rows.is_empty() { String::new() } else { title };
        let mut sections = vec![
            self.setting.section(),
            Section::new(
                "",
                titled(
                    "Copy of the same bytes by one thread: memcpy by the size of its steps, and \
                     the library's loop (medians)"
                        .to_owned(),
                ),
                Body::Table(Table::of(&line_columns(), &lines, no_group)),
            ),
            Section::new(
                "rows",
                titled(format!(
                    "Leaps, compared with the fastest copy (medians of {})",
                    self.runs_text()
                )),
                Body::Table(Table::of(&row_columns(), &rows, |row| row.case.heading())),
            ),
        ];
        sections.push(gaps::section(&rows));
        sections.extend(first_windows(&rows));
        sections.push(Section::data(
            "samples",
            Body::Table(Table::of(&run_columns(), &runs, |_| String::new())),
        ));
        sections.push(Section::data(
            "memcpy_samples",
            Body::Table(Table::of(&copy_columns(), &copies, |_| String::new())),
        ));
        sections.push(gaps::samples(&rows));
        sections.extend(job_rows::sections(&self.jobs, &plural(self.setting.job_runs, "run")));
        let title = if self.skipped.is_empty() { "" } else { "Skipped" };
        sections.push(Section::new("skipped", title, Body::Notes(self.skipped.clone())));
        Document { sections }
    }

    fn runs_text(&self) -> String {
        plural(self.setting.runs, "run")
    }
}

impl Setting {
    fn section(&self) -> Section {
        let same_node = self.from == self.to;
        let mut facts = vec![
            fact("kernel", "Linux", self.kernel.as_str()),
            fact("cpus", "CPUs", Value::count(self.cpus)).remark(self.sharing()),
            fact("nodes", "nodes with memory", Value::count(self.nodes)),
            fact("from", "from node", Value::count(self.from)),
            fact("to", "to node", Value::count(self.to)).remark(if same_node {
                "between two pools of one node: new frames, same node; no NUMA speed-up"
            } else {
                ""
            }),
            fact(
                "bytes",
                if self.size.is_some() { "bytes that leap" } else { "" },
                Value::bytes(self.size),
            ),
            fact("copy_threads", "threads that copy", Value::count(self.threads)),
            fact(
                "wait_budget_ns",
                "wait budget",
                Value::ns(self.wait_budget.and_then(|budget| budget.as_nanos().try_into().ok())),
            )
            .remark(if self.wait_budget.is_none() {
                "the library's default"
            } else {
                ""
            }),
        ];
        facts.extend([
            fact("load_threads", "", Value::count(self.load_threads)),
            fact("runs", "", Value::count(self.runs)),
            fact("job_runs", "", Value::count(self.job_runs)),
            fact("seed", "", Value::count(self.seed)),
            fact("uid", "", Value::count(self.uid)),
        ]);
        Section::new("setting", "Machine and leap", Body::Facts(facts))
    }

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

    fn sharing(&self) -> String {
        let busy = self.threads + self.load_threads;
        if self.cpus >= busy {
            return String::new();
        }
        let cpus = plural(self.cpus, "CPU");
        format!("{busy} threads share {cpus}: times and gaps include waiting for a CPU")
    }
}

fn plural(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
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

    /// Writes per second that were asked for: 0 without a writer, unknown for as many as possible,
    /// for a changing load, and for rounds of the bystander.
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
    fn rows(&self, base_line: BaseLine) -> impl Iterator<Item = Row<'_>> {
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

    fn line(&self, base_line: BaseLine) -> Option<Line<'_>> {
        Some(Line { case: self.cases.first()?, base_line, copies: &self.runs.copies })
    }
}

impl<'a> Line<'a> {
    fn each(&'a self) -> impl Iterator<Item = OneCopy<'a>> {
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

    /// The median if the figure is known of all runs.
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

    /// The gap of all runs that the given share of them does not exceed.
    pub fn gap_ns(&self, share: f64) -> Value {
        let mut gaps = Times::new();
        self.samples.iter().for_each(|sample| gaps.join(&sample.load.gaps));
        Value::ns(gaps.quantile_ns(Phase::During, share))
    }

    /// Writes per second during the leap / writes per second beside a memcpy, as the median of the
    /// runs. Of a changing load what was written at full speed counts, in all runs together: a
    /// single leap may meet no such spell.
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

    fn windows(&self) -> Waits {
        let mut windows = Waits::default();
        self.samples.iter().for_each(|sample| windows.join(&sample.leap.report.windows));
        windows
    }

    /// The window of all runs that the given share of them does not exceed.
    pub fn window_ns(&self, share: f64) -> Value {
        let windows = self.windows();
        Value::ns((windows.count > 0).then(|| windows.quantile(share)))
    }

    pub fn windows_first(&self) -> Option<f64> {
        let windows = self.windows().count;
        let first: u64 = self.samples.iter().map(|sample| sample.leap.report.windows_first).sum();
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

    /// Writes per second during the leap / writes per second beside a memcpy; of a changing load at
    /// full speed.
    pub fn kept(&self) -> Option<f64> {
        if self.row.case.changes() {
            return quotient(self.full_speed().per_s(), self.full_speed_beside().per_s());
        }
        quotient(self.during_per_s(), self.beside_per_s())
    }

    /// What a changing load wrote at full speed during the leap.
    fn full_speed(&self) -> Tally {
        self.sample.load.full_speed[Phase::During as usize]
    }

    /// The same beside memcpys.
    fn full_speed_beside(&self) -> Tally {
        self.beside.map_or(Tally::default(), |beside| beside.log.full_speed[Phase::Memcpy as usize])
    }

    /// The longest gap during the leap, less the longest beside memcpys of the same run.
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

/// How many windows the closing thread entered before other threads, by engine.
fn first_windows(rows: &[Row]) -> Option<Section> {
    let mut lowest: Vec<(String, f64)> = Vec::new();
    for row in rows {
        let engine = row.samples[0].leap.report.engine.to_string();
        let Some(share) = row.windows_first() else { continue };
        match lowest.iter_mut().find(|(known, _)| *known == engine) {
            Some((_, least)) => *least = least.min(share),
            None => lowest.push((engine, share)),
        }
    }
    if lowest.is_empty() {
        return None;
    }
    let shares: Vec<String> =
        lowest.iter().map(|(engine, share)| format!("{engine} {}", percent(*share))).collect();
    let title = "Windows in which the copying thread had priority (SCHED_FIFO), at least";
    Some(Section::new("", title, Body::Notes(vec![shares.join(", ")])))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use pageleap::{CopyLoop, PageSize};
    use pageleap_measure::export::Format;
    use pageleap_measure::figures::human_ns;
    use serde_json::Value as Json;

    use super::super::args::EnginesArgs;
    use super::super::place::Place;
    use super::super::run;
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EnginesArgs,
    }

    /// A small benchmark, done for real.
    fn bench(from: u32, to: u32) -> Bench {
        let flags = "engines --size 1m --engine auto,mprotect --runs 2 --page-size 4k";
        let args = Line::parse_from(flags.split(' ')).args;
        let kind = Kind::from(PageSize::Base);
        let mut place = Place::build(args.size, kind, 0, 0).ok().unwrap();
        let engines = args.rows();
        let groups = args.loads(args.size).into_iter().map(|load| {
            let runs = run::measure(&args, &mut place, load.work, &engines, &mut |_, _| ());
            let case = |engine: &EngineRow| Case { engine: *engine, kind, load };
            Group { cases: engines.iter().map(case).collect(), runs: runs.ok().unwrap() }
        });
        Bench {
            groups: groups.collect(),
            setting: Setting {
                kernel: "6.12.117+deb12-cloud-amd64".to_owned(),
                cpus: 2,
                nodes: 1,
                uid: 1000,
                from,
                to,
                size: Some(args.size),
                threads: 1,
                wait_budget: Some(Duration::from_millis(1)),
                load_threads: 1,
                runs: 2,
                job_runs: 2,
                seed: 1,
            },
            jobs: Vec::new(),
            skipped: vec!["--page-size 2m: none free".to_owned()],
        }
    }

    #[test]
    fn text_and_json_have_the_same_figures() {
        let document = bench(0, 0).document();
        let json: Json = serde_json::from_str(&Format::Json.write(&document)).unwrap();
        let text = Format::WIDE.write(&document);
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 6);
        // The lines of the table begin with the name of the engine that was asked for.
        let table = text.split("Leaps, compared").nth(1).unwrap();
        let (table, gaps) = table.split_once("Gaps: ").unwrap();
        let lines: Vec<&str> = table
            .lines()
            .filter(|line| line.starts_with("  auto ") || line.starts_with("  mp"))
            .collect();
        assert_eq!(lines.len(), rows.len(), "{text}");
        for (row, line) in rows.iter().zip(lines) {
            let time = human_ns(row["migrate_ns"].as_u64().unwrap()).replace(' ', "");
            let ratios = ["ratio_to_memcpy", "cpu_to_memcpy_ratio"]
                .map(|key| three_digits(row[key].as_f64().unwrap()));
            for shown in [time, ratios[0].clone(), ratios[1].clone()] {
                assert!(line.split_whitespace().any(|cell| cell == shown), "{shown}: {line}");
            }
        }
        // Two loads, two kinds of threads, and the memcpy beside two engines.
        let spreads = json["gaps"].as_array().unwrap();
        let lines: Vec<&str> = gaps.lines().filter(|line| line.contains(" writers ")).collect();
        let of_writers = spreads.iter().filter(|spread| spread["threads"] == "writers");
        assert_eq!((spreads.len(), lines.len()), (12, 6), "{gaps}");
        for (spread, line) in of_writers.zip(lines) {
            for key in ["p50_ns", "p99_ns", "p999_ns", "max_ns"] {
                let shown = spread[key].as_u64().map_or("-".to_owned(), human_ns).replace(' ', "");
                assert!(line.split_whitespace().any(|cell| cell == shown), "{key}: {line}");
            }
        }
        assert_eq!(json["samples"].as_array().unwrap().len(), 2 * rows.len());
        assert_eq!(json["skipped"][0], "--page-size 2m: none free");
    }

    #[test]
    fn text_fits_explains_its_heads_and_says_what_one_node_means() {
        let text = Format::WIDE.write(&bench(0, 0).document());
        for line in text.lines() {
            assert!(line.chars().count() <= 160, "{}: {line}", line.chars().count());
        }
        let explained =
            ["leap", "ratio", "CPU", "kept", "gap", "beyond", "window", "touch", "memory", "lost"];
        for head in explained {
            assert!(text.contains(&format!("\n  {head:10}")), "{head}: {text}");
        }
        assert!(text.contains("no NUMA speed-up") && text.contains("none free"), "{text}");
        let mut two = bench(0, 1);
        assert!(!Format::WIDE.write(&two.document()).contains("NUMA"));
        assert_eq!((two.rows(), two.lost()), (6, 0));
        two.groups.clear();
        assert_eq!(two.rows(), 0);
    }

    #[test]
    fn text_says_when_threads_must_share_cpus() {
        let mut setting = bench(0, 0).setting;
        assert_eq!(setting.sharing(), "");
        setting.threads = 2;
        assert!(setting.sharing().contains("3 threads share 2 CPUs"));
        setting.load_threads = 0;
        assert_eq!(setting.sharing(), "");
    }

    #[test]
    fn the_heads_of_the_copies_are_their_steps_and_loops() {
        let head = |method: &CopyMethod| match method.by {
            CopyLoop::Memcpy => human_bytes(method.step_bytes as f64).replace(' ', ""),
            other => other.to_string(),
        };
        let heads: Vec<String> = METHODS.iter().map(head).collect();
        let columns = line_columns();
        let shown: Vec<&str> = columns[1..=METHODS.len()].iter().map(|of| of.head).collect();
        assert_eq!(shown, heads);
    }
}
