//! The tables of short jobs: their columns, with the figure that each of them shows.

use pageleap::MemoryEngine;
use pageleap_measure::document::{Body, Column, Section, Table, Value, column};
use pageleap_measure::figures::three_digits;
use pageleap_measure::jobs::{JobSample, Way};
use pageleap_measure::memcpy::BaseLine;
use pageleap_measure::statistics::Summary;

use super::args::LoadKind;
use super::columns::engine_name;
use super::rows::JobGroup;

/// Legends of columns that both tables have.
const RATIO: &str = "job / copy directly before it (median of all runs)";
const RUN: &str = "the whole job by Migration::run with a context";
const MEMCPY: &str = "fastest copy of the same bytes by one thread, with warm caches; reading the \
                      clock is part of it";
const KERNEL: &str =
    "the system call move_pages, with a list of as many pages of private memory; to the other node";

/// One row: an engine with jobs of one shape.
struct JobRow<'a> {
    group: &'a JobGroup,
    /// The index of the engine in the group.
    at: usize,
    /// The copy that jobs of the group are compared with.
    base_line: BaseLine,
    start: OfRuns,
    wait: OfRuns,
    run: OfRuns,
    memcpy: OfRuns,
    kernel: OfRuns,
    wait_ratio: OfRuns,
    run_ratio: OfRuns,
}

/// The lowest, median and highest value of all runs; `None` without runs.
#[derive(Clone, Copy, Debug, Default)]
struct OfRuns(Option<[f64; 3]>);

impl OfRuns {
    fn of(values: impl Iterator<Item = f64>) -> OfRuns {
        let summary = Summary::of(&values.collect::<Vec<_>>());
        OfRuns(summary.map(|summary| [summary.min, summary.median, summary.max]))
    }

    /// These figures divided by the number of equal parts of a job.
    fn of_each(self, parts: usize) -> OfRuns {
        OfRuns(self.0.map(|values| values.map(|value| value / parts as f64)))
    }

    fn least(self) -> Value {
        ns(self.0.map(|values| values[0]))
    }

    fn median(self) -> Value {
        ns(self.0.map(|values| values[1]))
    }

    fn most(self) -> Value {
        ns(self.0.map(|values| values[2]))
    }

    /// The lowest and the highest value in microseconds, for people.
    fn span(self) -> Value {
        self.0.map_or(Value::Unknown, |[least, _, most]| {
            let [least, most] = [least, most].map(|ns| three_digits(ns / 1e3));
            Value::Text(format!("{:>9}", format!("{least}-{most}")))
        })
    }

    /// One of three ratios: the lowest (0), the median (1) or the highest (2).
    fn ratio(self, which: usize) -> Value {
        Value::ratio(self.0.map(|values| values[which]))
    }
}

fn ns(ns: Option<f64>) -> Value {
    ns.map_or(Value::Unknown, |ns| Value::ShortNs(ns.round() as u64))
}

impl JobGroup {
    /// The copy with the lowest median of all jobs of the group.
    fn base_line(&self) -> Option<BaseLine> {
        let copies = self.samples.iter().flatten().map(|sample| sample.copies);
        BaseLine::of(&copies.collect::<Vec<_>>())
    }

    fn row(&self, at: usize) -> Option<JobRow<'_>> {
        let base_line = self.base_line()?;
        let of = |way| self.samples[at].iter().filter(move |sample| sample.way == way);
        let whole = |way| OfRuns::of(of(way).map(|sample| sample.whole_ns as f64));
        let ratio = |way| OfRuns::of(of(way).map(|sample| sample.ratio_to(base_line)));
        let copy_ns = |sample: &JobSample| base_line.copy_in(&sample.copies).ns as f64;
        Some(JobRow {
            group: self,
            at,
            base_line,
            start: OfRuns::of(
                of(Way::Start).flat_map(|sample| sample.start_ns).map(|ns| ns as f64),
            ),
            wait: whole(Way::Start),
            run: whole(Way::Run),
            memcpy: OfRuns::of(self.samples[at].iter().map(copy_ns)),
            kernel: OfRuns::of(self.kernel.iter().flatten().map(|sample| sample.ns as f64)),
            wait_ratio: ratio(Way::Start),
            run_ratio: ratio(Way::Run),
        })
    }
}

impl JobRow<'_> {
    fn samples(&self) -> &[JobSample] {
        &self.group.samples[self.at]
    }

    fn each_range(&self, times: OfRuns) -> OfRuns {
        times.of_each(self.group.shape.ranges)
    }

    fn each_page(&self, times: OfRuns) -> OfRuns {
        times.of_each(self.group.shape.pages())
    }
}

/// One job, or one list of pages that the kernel has moved.
struct JobRun<'a> {
    group: &'a JobGroup,
    run: usize,
    way: &'static str,
    engine: String,
    requested: Value,
    start_ns: Option<u64>,
    whole_ns: u64,
    memcpy_ns: Option<u64>,
    ratio: Option<f64>,
    lost: u64,
}

impl JobRow<'_> {
    /// The jobs, in the order of the runs. Each run has one job of each way.
    fn runs(&self) -> impl Iterator<Item = JobRun<'_>> {
        [Way::Start, Way::Run].into_iter().flat_map(move |way| {
            let samples = self.samples().iter().filter(move |sample| sample.way == way);
            samples.enumerate().map(move |(run, sample)| JobRun {
                group: self.group,
                run,
                way: way.name(),
                engine: sample.engine.to_string(),
                requested: self.group.choices[self.at].to_string().into(),
                start_ns: sample.start_ns,
                whole_ns: sample.whole_ns,
                memcpy_ns: Some(self.base_line.copy_in(&sample.copies).ns),
                ratio: Some(sample.ratio_to(self.base_line)),
                lost: sample.lost,
            })
        })
    }
}

impl JobGroup {
    fn kernel_runs(&self) -> impl Iterator<Item = JobRun<'_>> {
        let samples = self.kernel.iter().flatten();
        samples.enumerate().map(|(run, sample)| JobRun {
            group: self,
            run,
            way: "kernel",
            engine: MemoryEngine::Kernel.to_string(),
            requested: Value::Unknown,
            start_ns: None,
            whole_ns: sample.ns,
            memcpy_ns: None,
            ratio: None,
            lost: sample.lost,
        })
    }
}

/// All sections about short jobs: a table for each load, the reasons why the kernel was not
/// measured, and the figures of each job.
pub fn sections(groups: &[JobGroup], runs: &str) -> Vec<Section> {
    let of_load = |load| rows(groups.iter().filter(move |group| group.load == load));
    let [small, scattered] = [LoadKind::Small, LoadKind::Scattered].map(of_load);
    let each = rows(groups.iter());
    let by_kernel = groups.iter().flat_map(JobGroup::kernel_runs);
    let each: Vec<JobRun> = each.iter().flat_map(JobRow::runs).chain(by_kernel).collect();
    let mut why: Vec<String> =
        groups.iter().filter_map(|group| group.kernel.as_ref().err().cloned()).collect();
    why.dedup();
    let title = if why.is_empty() { "" } else { "Kernel (move_pages): no figures" };
    let medians = format!("at rest: microseconds, medians of {runs}");
    vec![
        table("small", format!("Jobs of one range, {medians}"), &small_columns(), &small),
        table(
            "scattered",
            format!("Jobs of ranges that do not touch each other, {medians}"),
            &scattered_columns(),
            &scattered,
        ),
        Section::new("kernel_missing", title, Body::Notes(why)),
        Section::data(
            "job_samples",
            Body::Table(Table::of(&run_columns(), &each, |_| String::new())),
        ),
    ]
}

fn rows<'a>(groups: impl Iterator<Item = &'a JobGroup>) -> Vec<JobRow<'a>> {
    groups.flat_map(|group| (0..group.samples.len()).flat_map(|at| group.row(at))).collect()
}

fn table<'a>(
    key: &'static str,
    title: String,
    columns: &[Column<JobRow<'a>>],
    rows: &[JobRow<'a>],
) -> Section {
    let title = if rows.is_empty() { String::new() } else { title };
    Section::new(key, title, Body::Table(Table::of(columns, rows, |row| row.group.heading())))
}

/// A complete row in a few words, for the progress on standard error.
pub fn in_short(group: &JobGroup, at: usize) -> String {
    let name = format!("{}: {}", group.heading(), group.choices[at]);
    let Some(row) = group.row(at) else { return name };
    let told = |ratio: OfRuns| ratio.0.map(|values| values.map(three_digits));
    match (told(row.wait_ratio), told(row.run_ratio)) {
        (Some([least, median, most]), Some([run_least, run_median, run_most])) => format!(
            "{name} took {median} times a memcpy ({least} to {most}) by start and wait, \
             {run_median} ({run_least} to {run_most}) by run"
        ),
        _ => name,
    }
}

/// The first columns of both tables.
fn case_columns<'a>() -> Vec<Column<JobRow<'a>>> {
    vec![
        column("", "engine", "", |row: &JobRow| {
            let moved = row.samples().iter().flat_map(|sample| sample.moved_by.iter().copied());
            engine_name(row.group.choices[row.at], moved).into()
        }),
        column("engine", "", "", |row: &JobRow| {
            row.samples().first().map_or(Value::Unknown, |sample| sample.engine.to_string().into())
        }),
        column("requested_engine", "", "", |row: &JobRow| {
            row.group.choices[row.at].to_string().into()
        }),
        column("ranges", "", "", |row: &JobRow| Value::count(row.group.shape.ranges)),
        column("range_pages", "", "", |row: &JobRow| Value::count(row.group.shape.range_pages)),
        column("bytes", "", "", |row: &JobRow| Value::count(row.group.shape.bytes())),
        column("runs", "", "", |row: &JobRow| {
            let of_run = |sample: &&JobSample| sample.way == Way::Run;
            Value::count(row.samples().iter().filter(of_run).count())
        }),
    ]
}

/// Columns of both tables that only programs get: figures of whole jobs.
fn figure_columns<'a>() -> Vec<Column<JobRow<'a>>> {
    vec![
        column("start_ns", "", "", |row: &JobRow| row.start.median()),
        column("start_min_ns", "", "", |row: &JobRow| row.start.least()),
        column("start_max_ns", "", "", |row: &JobRow| row.start.most()),
        column("start_wait_ns", "", "", |row: &JobRow| row.wait.median()),
        column("start_wait_min_ns", "", "", |row: &JobRow| row.wait.least()),
        column("start_wait_max_ns", "", "", |row: &JobRow| row.wait.most()),
        column("start_wait_ratio_to_memcpy", "", "", |row: &JobRow| row.wait_ratio.ratio(1)),
        column("start_wait_ratio_to_memcpy_min", "", "", |row: &JobRow| row.wait_ratio.ratio(0)),
        column("start_wait_ratio_to_memcpy_max", "", "", |row: &JobRow| row.wait_ratio.ratio(2)),
        column("run_ns", "", "", |row: &JobRow| row.run.median()),
        column("run_min_ns", "", "", |row: &JobRow| row.run.least()),
        column("run_max_ns", "", "", |row: &JobRow| row.run.most()),
        column("run_ratio_to_memcpy", "", "", |row: &JobRow| row.run_ratio.ratio(1)),
        column("run_ratio_to_memcpy_min", "", "", |row: &JobRow| row.run_ratio.ratio(0)),
        column("run_ratio_to_memcpy_max", "", "", |row: &JobRow| row.run_ratio.ratio(2)),
        column("memcpy_loop", "", "", |row: &JobRow| row.base_line.method().by.name().into()),
        column("memcpy_step_bytes", "", "", |row: &JobRow| {
            Value::count(row.base_line.method().step_bytes)
        }),
        column("memcpy_ns", "", "", |row: &JobRow| row.memcpy.median()),
        column("memcpy_min_ns", "", "", |row: &JobRow| row.memcpy.least()),
        column("memcpy_max_ns", "", "", |row: &JobRow| row.memcpy.most()),
        column("kernel_ns", "", "", |row: &JobRow| row.kernel.median()),
        column("kernel_min_ns", "", "", |row: &JobRow| row.kernel.least()),
        column("kernel_max_ns", "", "", |row: &JobRow| row.kernel.most()),
        column("lost", "", "", |row: &JobRow| {
            Value::Count(row.samples().iter().map(|sample| sample.lost).sum())
        }),
    ]
}

/// The columns of `small`.
fn small_columns<'a>() -> Vec<Column<JobRow<'a>>> {
    let mut columns = case_columns();
    columns.extend([
        column("", "start", "until Migration::start returned", |row: &JobRow| row.start.median()),
        column("", "min-max", "lowest and highest of all runs", |row: &JobRow| row.start.span()),
        column(
            "",
            "wait",
            "from the start until Job::wait returned; without a context",
            |row: &JobRow| row.wait.median(),
        ),
        column("", "min-max", "", |row: &JobRow| row.wait.span()),
        column("", "ratio", RATIO, |row: &JobRow| row.wait_ratio.ratio(1)),
        column("", "run", RUN, |row: &JobRow| row.run.median()),
        column("", "min-max", "", |row: &JobRow| row.run.span()),
        column("", "ratio", "", |row: &JobRow| row.run_ratio.ratio(1)),
        column("", "memcpy", MEMCPY, |row: &JobRow| row.memcpy.median()),
        column("", "min-max", "", |row: &JobRow| row.memcpy.span()),
        column("", "kernel", KERNEL, |row: &JobRow| row.kernel.median()),
    ]);
    columns.extend(figure_columns());
    columns
}

/// The columns of `scattered`.
fn scattered_columns<'a>() -> Vec<Column<JobRow<'a>>> {
    let mut columns = case_columns();
    columns.extend([
        column(
            "start_per_range_ns",
            "start/r",
            "until Migration::start returned, for each range",
            |row: &JobRow| row.each_range(row.start).median(),
        ),
        column("", "min-max", "lowest and highest of all runs", |row: &JobRow| {
            row.each_range(row.start).span()
        }),
        column(
            "start_wait_per_range_ns",
            "wait/r",
            "from the start until Job::wait returned, for each range; without a context",
            |row: &JobRow| row.each_range(row.wait).median(),
        ),
        column("", "min-max", "", |row: &JobRow| row.each_range(row.wait).span()),
        column("start_wait_per_page_ns", "wait/p", "the same for each page", |row: &JobRow| {
            row.each_page(row.wait).median()
        }),
        column("", "ratio", RATIO, |row: &JobRow| row.wait_ratio.ratio(1)),
        column("run_per_range_ns", "run/r", RUN, |row: &JobRow| row.each_range(row.run).median()),
        column("", "min-max", "", |row: &JobRow| row.each_range(row.run).span()),
        column("run_per_page_ns", "run/p", "", |row: &JobRow| row.each_page(row.run).median()),
        column("", "ratio", "", |row: &JobRow| row.run_ratio.ratio(1)),
        column("memcpy_per_page_ns", "memcpy/p", MEMCPY, |row: &JobRow| {
            row.each_page(row.memcpy).median()
        }),
        column("kernel_per_page_ns", "kernel/p", KERNEL, |row: &JobRow| {
            row.each_page(row.kernel).median()
        }),
    ]);
    columns.extend(figure_columns());
    columns
}

/// The figures of one job, for programs.
fn run_columns<'a>() -> Vec<Column<JobRun<'a>>> {
    vec![
        column("load", "", "", |job: &JobRun| job.group.load.to_string().into()),
        column("ranges", "", "", |job: &JobRun| Value::count(job.group.shape.ranges)),
        column("range_pages", "", "", |job: &JobRun| Value::count(job.group.shape.range_pages)),
        column("run", "", "", |job: &JobRun| Value::count(job.run)),
        column("way", "", "", |job: &JobRun| job.way.into()),
        column("engine", "", "", |job: &JobRun| job.engine.as_str().into()),
        column("requested_engine", "", "", |job: &JobRun| job.requested.clone()),
        column("start_ns", "", "", |job: &JobRun| Value::ns(job.start_ns)),
        column("whole_ns", "", "", |job: &JobRun| Value::Ns(job.whole_ns)),
        column("memcpy_ns", "", "", |job: &JobRun| Value::ns(job.memcpy_ns)),
        column("ratio_to_memcpy", "", "", |job: &JobRun| Value::ratio(job.ratio)),
        column("lost", "", "", |job: &JobRun| Value::Count(job.lost)),
    ]
}

#[cfg(test)]
mod tests {
    use pageleap::{Engine, EngineChoice};
    use pageleap_measure::document::Document;
    use pageleap_measure::export::Format;
    use pageleap_measure::jobs::{KernelSample, Shape};
    use pageleap_measure::memcpy::{Copy, METHODS};
    use serde_json::Value as Json;

    use super::*;

    fn sample(way: Way, whole_ns: u64, copy_ns: u64) -> JobSample {
        // All methods but the second take longer.
        let mut copies = [Copy { ns: 2 * copy_ns, cpu_ns: None }; METHODS.len()];
        copies[1].ns = copy_ns;
        let start_ns = (way == Way::Start).then_some(whole_ns / 4);
        let (engine, moved_by) = (Engine::Mprotect.into(), vec![(Engine::Mprotect.into(), 8)]);
        JobSample { way, start_ns, whole_ns, copies, engine, moved_by, lost: 0 }
    }

    /// Three runs of one engine: four ranges of two pages.
    fn group(load: LoadKind, kernel: Result<Vec<KernelSample>, String>) -> JobGroup {
        let samples = [(8_000, 100, 4_000), (24_000, 200, 2_000), (16_000, 400, 6_000)];
        let samples = samples.into_iter().flat_map(|(started, copy, ran)| {
            [sample(Way::Start, started, copy), sample(Way::Run, ran, 2 * copy)]
        });
        JobGroup {
            load,
            shape: Shape { ranges: 4, range_pages: 2 },
            choices: vec![EngineChoice::Auto],
            samples: vec![samples.collect()],
            kernel,
        }
    }

    fn written(groups: &[JobGroup]) -> (Json, String) {
        let document = Document { sections: sections(groups, "3 runs") };
        let json = serde_json::from_str(&Format::Json.write(&document)).unwrap();
        (json, Format::WIDE.write(&document))
    }

    fn cells(text: &str) -> Vec<&str> {
        text.lines().find(|line| line.starts_with("  auto ")).unwrap().split_whitespace().collect()
    }

    #[test]
    fn a_row_has_the_medians_of_its_jobs_and_of_the_ratios_of_its_pairs() {
        let (json, text) = written(&[group(LoadKind::Small, Err("one memory node".into()))]);
        let row = &json["small"][0];
        for (key, value) in [
            ("start_ns", 4_000),
            ("start_min_ns", 2_000),
            ("start_max_ns", 6_000),
            ("start_wait_ns", 16_000),
            ("start_wait_min_ns", 8_000),
            ("start_wait_max_ns", 24_000),
            ("run_ns", 4_000),
            ("run_min_ns", 2_000),
            ("run_max_ns", 6_000),
            // The copies of both ways took 100, 200, 200, 400, 400 and 800.
            ("memcpy_ns", 300),
            ("memcpy_min_ns", 100),
            ("memcpy_max_ns", 800),
            ("bytes", 8 << 12),
            ("runs", 3),
            ("lost", 0),
        ] {
            assert_eq!(row[key], value, "{key}: {row}");
        }
        // 80, 120 and 40; the ratio of the medians would be 53. By run 20, 5 and 7.5.
        for (key, value) in [
            ("start_wait_ratio_to_memcpy", 80.0),
            ("start_wait_ratio_to_memcpy_min", 40.0),
            ("start_wait_ratio_to_memcpy_max", 120.0),
            ("run_ratio_to_memcpy", 7.5),
            ("run_ratio_to_memcpy_min", 5.0),
            ("run_ratio_to_memcpy_max", 20.0),
        ] {
            assert_eq!(row[key], value, "{key}: {row}");
        }
        assert_eq!(
            (&row["engine"], &row["requested_engine"]),
            (&"mprotect".into(), &"auto".into())
        );
        let expected = "auto (mprotect) 4.00 2.00-6.00 16.0 8.00-24.0 80.0 4.00 2.00-6.00 7.50 0.30 \
                        0.10-0.80 -";
        assert_eq!(cells(&text).join(" "), expected, "{text}");
    }

    #[test]
    fn scattered_jobs_are_divided_by_ranges_and_pages() {
        let kernel = [3_200, 1_600, 8_000].map(|ns| KernelSample { ns, lost: 0 });
        let (json, text) = written(&[group(LoadKind::Scattered, Ok(kernel.to_vec()))]);
        let row = &json["scattered"][0];
        for (key, value) in [
            ("start_per_range_ns", 1_000),
            ("start_wait_per_range_ns", 4_000),
            ("start_wait_per_page_ns", 2_000),
            ("run_per_range_ns", 1_000),
            ("run_per_page_ns", 500),
            ("memcpy_per_page_ns", 38),
            ("kernel_per_page_ns", 400),
            ("kernel_ns", 3_200),
            ("kernel_min_ns", 1_600),
            ("kernel_max_ns", 8_000),
        ] {
            assert_eq!(row[key], value, "{key}: {row}");
        }
        let expected = "auto (mprotect) 1.00 0.50-1.50 4.00 2.00-6.00 2.00 80.0 1.00 0.50-1.50 0.50 \
                        7.50 0.04 0.40";
        assert_eq!(cells(&text).join(" "), expected, "{text}");
        assert!(text.contains(" scattered, 4 ranges of 2 pages (32 KiB)\n"), "{text}");
        assert!(!text.contains("no figures") && json["kernel_missing"].as_array() == Some(&vec![]));
        let samples = json["job_samples"].as_array().unwrap();
        let of = |way: &str| samples.iter().filter(|sample| sample["way"] == way).count();
        assert_eq!(["start", "run", "kernel"].map(of), [3; 3]);
    }

    #[test]
    fn text_says_once_why_the_kernel_has_no_figures() {
        let missing = || Err("one memory node: nowhere to go".to_owned());
        let groups = [LoadKind::Small, LoadKind::Scattered].map(|load| group(load, missing()));
        let (json, text) = written(&groups);
        assert_eq!(json["kernel_missing"], serde_json::json!(["one memory node: nowhere to go"]));
        assert_eq!(text.matches("one memory node").count(), 1, "{text}");
        assert!(["small", "scattered"].iter().all(|load| json[load][0]["kernel_ns"].is_null()));
        // Without short jobs there is no table.
        assert_eq!(written(&[]).1, "");
    }

    #[test]
    fn lost_words_of_jobs_and_of_the_kernel_are_counted() {
        let kernel = vec![KernelSample { ns: 1, lost: 2 }, KernelSample { ns: 1, lost: 3 }];
        let mut group = group(LoadKind::Small, Ok(kernel));
        group.samples[0][4].lost = 7;
        assert_eq!(group.lost(), 12);
        assert_eq!(written(&[group]).0["small"][0]["lost"], 7);
    }
}
