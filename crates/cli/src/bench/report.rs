//! The result as a JSON array or as a table.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use pageleap::Waits;
use serde::Serialize;

use super::args::{EngineRow, EnginesArgs, Load, Work};
use super::measure::Leap;
use super::statistics::{extremes, median, median_if_all_known};
use crate::figures::{human_bytes, human_ns, optional_ns, percent};
use crate::phase::{Phase, Times};
use crate::writer::Rate;

/// One row: an engine under a load, with pages of one size. Medians over the runs, where nothing
/// else is said. Field names carry the units: `_ns` nanoseconds, `_per_s` per second; sizes are
/// bytes. Null is what is not known.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Engine that moved the pages.
    pub engine: String,
    /// Engine that was asked for: `auto`, or the name of one.
    pub requested_engine: String,
    /// Page size of region and pools: 4k, thp, 2m or 1g.
    pub page_size: String,
    /// Kind of the load. With `bystander`, what is said of writes is said of its rounds: 256 KiB
    /// mapped, faulted and unmapped.
    pub load: String,
    /// Writes per second asked for; 0 without a writer, null for as many as it can.
    pub writes_per_s: Option<u64>,
    /// Threads that copied, at most.
    pub copy_threads: usize,
    /// How many of them copied at the end of the leap, because it was hardly faster with more; the
    /// fewest of all runs.
    pub copy_threads_settled: usize,
    /// Threads that wrote beside it, and the next that read.
    pub writers: usize,
    /// The same.
    pub readers: usize,
    /// Bytes that one migration step works on, as long as nobody disturbs it.
    pub area_bytes: u64,
    /// User that the process ran as.
    pub uid: u32,
    /// From the start of the job until the last page had moved.
    pub migrate_ns: u64,
    /// `migrate_ns` / the time of a one-thread memcpy of the same bytes in the same run, without
    /// load.
    pub ratio_to_memcpy: f64,
    /// Lowest of all runs.
    pub ratio_to_memcpy_min: f64,
    /// Highest of all runs.
    pub ratio_to_memcpy_max: f64,
    /// Bytes copied again because they were written meanwhile / all bytes.
    pub extra_copied_ratio: f64,
    /// Writes per second from the start of the job to its end / `writes_beside_memcpy_per_s` of the
    /// same run.
    pub writes_kept_ratio: Option<f64>,
    /// The writer's rate beside a memcpy.
    pub writes_beside_memcpy_per_s: Option<f64>,
    /// Longest time between two batches of writes during the leaps of all runs; includes the
    /// writer's own pauses.
    pub max_gap_ns: Option<u64>,
    /// 999 of 1000 of those times in all runs are not longer.
    pub p999_gap_ns: Option<u64>,
    /// Time for which an area is closed to writers; the library counts the longest only.
    pub window_p50_ns: Option<u64>,
    /// The same.
    pub window_p99_ns: Option<u64>,
    /// Longest of all runs.
    pub window_max_ns: Option<u64>,
    /// In which share of the windows of all runs the thread that kept the area closed went before
    /// others (SCHED_FIFO).
    pub windows_first_ratio: Option<f64>,
    /// Calls (preadv into 64 pages all over the region, every 5 ms) that failed with EFAULT or
    /// stopped short, in all runs; null where nobody writes.
    pub efault_count: Option<u64>,
    /// Writing a word of each 4 KB after the leap, less doing so again: what the leap leaves for
    /// later. Below 0 where that is less than the noise.
    pub first_touch_ns: i64,
    /// CPU time that the library takes after the last page has moved, to make vacated frames ready
    /// for use again.
    pub recycle_cpu_ns: Option<u64>,
    /// Mappings of region and pools before the leaps; the most of all runs, as are the next two.
    pub mappings_before: usize,
    /// At most, as far as seen.
    pub mappings_peak: usize,
    /// After it.
    pub mappings_after: usize,
    /// Anonymous memory during a leap, less that before; the most that was seen in all runs.
    pub overhead_bytes: Option<u64>,
    /// Words that did not contain the last value written to them, in all runs.
    pub lost: u64,
}

impl Row {
    /// What the leaps of one row amount to; `None` of no leaps.
    pub fn of(
        args: &EnginesArgs,
        requested: &EngineRow,
        page: &str,
        load: Load,
        leaps: &[Leap],
    ) -> Option<Row> {
        let first = leaps.first()?;
        let writes = matches!(load.work, Work::Write(..));
        let middle =
            |value: &dyn Fn(&Leap) -> f64| median(&leaps.iter().map(value).collect::<Vec<_>>());
        let known = |value: &dyn Fn(&Leap) -> Option<f64>| {
            median_if_all_known(&leaps.iter().map(value).collect::<Vec<_>>())
        };
        let ratios: Vec<f64> = leaps
            .iter()
            .map(|leap| leap.report.migrate_ns as f64 / leap.memcpy_ns as f64)
            .collect();
        let (lowest, highest) = extremes(&ratios)?;
        let mut gaps = Times::new();
        leaps.iter().for_each(|leap| gaps.join(&leap.gaps));
        let mappings = |at: usize| leaps.iter().map(|leap| leap.mappings[at]).max();
        let mut windows = Waits::default();
        leaps.iter().for_each(|leap| windows.join(&leap.report.windows));
        let window = |share| (windows.count > 0).then(|| windows.quantile(share));
        Some(Row {
            engine: first.report.engine.to_string(),
            requested_engine: requested.choice.to_string(),
            page_size: page.to_owned(),
            load: load.kind.to_string(),
            writes_per_s: match load.work {
                Work::Rest => Some(0),
                Work::Write(Rate::PerSecond(rate), _) => Some(rate),
                Work::Write(Rate::Max, _) | Work::Map => None,
            },
            copy_threads: first.report.threads,
            copy_threads_settled: leaps.iter().map(|leap| leap.report.threads_settled).min()?,
            writers: if writes { args.writers_of(first.report.bytes) } else { 0 },
            readers: if writes { usize::from(args.readers) } else { 0 },
            area_bytes: first.report.area_bytes as u64,
            // SAFETY: the call takes nothing and cannot fail.
            uid: unsafe { libc::geteuid() },
            migrate_ns: middle(&|leap| leap.report.migrate_ns as f64)?.round() as u64,
            ratio_to_memcpy: median(&ratios)?,
            ratio_to_memcpy_min: lowest,
            ratio_to_memcpy_max: highest,
            extra_copied_ratio: middle(&|leap| {
                leap.report.bytes_recopied as f64 / leap.report.bytes as f64
            })?,
            writes_kept_ratio: known(&|leap| {
                let beside = leap.beside_per_s.filter(|rate| *rate > 0.0)?;
                Some(leap.during_per_s? / beside)
            }),
            writes_beside_memcpy_per_s: known(&|leap| leap.beside_per_s),
            max_gap_ns: gaps.quantile_ns(Phase::During, 1.0),
            p999_gap_ns: gaps.quantile_ns(Phase::During, 0.999),
            window_p50_ns: window(0.5),
            window_p99_ns: window(0.99),
            window_max_ns: window(1.0),
            windows_first_ratio: (windows.count > 0).then(|| {
                let first: u64 = leaps.iter().map(|leap| leap.report.windows_first).sum();
                first as f64 / windows.count as f64
            }),
            efault_count: leaps.iter().map(|leap| leap.efaults).sum(),
            first_touch_ns: middle(&|leap| leap.first_touch_ns as f64)?.round() as i64,
            recycle_cpu_ns: known(&|leap| leap.report.recycle_cpu_ns.map(|ns| ns as f64))
                .map(|ns| ns.round() as u64),
            mappings_before: mappings(0)?,
            mappings_peak: mappings(1)?,
            mappings_after: mappings(2)?,
            overhead_bytes: leaps.iter().filter_map(|leap| leap.overhead_bytes).max(),
            lost: leaps.iter().map(|leap| leap.lost).sum(),
        })
    }

    /// The cells of the table, in the order of [`COLUMNS`].
    fn cells(&self) -> [String; COLUMNS.len()] {
        let signed =
            |ns: i64| format!("{}{}", if ns < 0 { "-" } else { "" }, human_ns(ns.unsigned_abs()));
        let share = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), percent);
        [
            self.requested_engine.clone(),
            human_bytes(self.area_bytes as f64),
            self.page_size.clone(),
            self.load.clone(),
            match self.writes_per_s {
                Some(0) => "-".to_owned(),
                Some(rate) => short(rate as f64),
                None => "max".to_owned(),
            },
            human_ns(self.migrate_ns),
            three_digits(self.ratio_to_memcpy),
            format!(
                "{}-{}",
                three_digits(self.ratio_to_memcpy_min),
                three_digits(self.ratio_to_memcpy_max)
            ),
            percent(self.extra_copied_ratio),
            self.writes_beside_memcpy_per_s.map_or_else(|| "-".to_owned(), short),
            share(self.writes_kept_ratio),
            optional_ns(self.max_gap_ns),
            optional_ns(self.p999_gap_ns),
            optional_ns(self.window_p99_ns),
            optional_ns(self.window_max_ns),
            self.efault_count.map_or_else(|| "-".to_owned(), |count| count.to_string()),
            signed(self.first_touch_ns),
            optional_ns(self.recycle_cpu_ns),
            self.overhead_bytes.map_or_else(|| "-".to_owned(), |bytes| human_bytes(bytes as f64)),
            format!("{}/{}/{}", self.mappings_before, self.mappings_peak, self.mappings_after),
            self.lost.to_string(),
        ]
    }
}

/// Heads of the columns, one word each.
const COLUMNS: [&str; 21] = [
    "engine", "area", "page", "load", "asked/s", "leap", "ratio", "min-max", "again", "beside/s",
    "kept", "gap", "p99.9", "window", "longest", "efault", "touch", "recycle", "memory", "maps",
    "lost",
];
/// Columns of a terminal that the table shall fit.
const WIDTH: usize = 160;
/// The columns that are text, on the left.
const TEXT_COLUMNS: usize = 4;

/// What the heads mean.
const LEGEND: &str = "\
leap      from the start of the job until the last page had moved; ratio, min-max: to the memcpy of the same run, without load
again     bytes copied in vain because they were written meanwhile
beside/s  writes per second beside a memcpy; kept: the share of them during the leap and the recycling after it (above 100 %: a memcpy
          takes more from the writer, or it caught up)
gap       longest time between two batches of writes, the writer's pauses included; p99.9: of 1000, 999 were not longer
window    time for which an area was closed to its users: of 100, 99 were not longer; longest: the longest one
efault    calls by which the kernel writes into 64 pages (preadv, every 5 ms) that failed or stopped short; they are repeated
touch     writing a word of each 4 KiB after the leap, less doing so again: paid later, not in the ratio
recycle   CPU time after the last page has moved, to make vacated frames ready for use again: not in the ratio either
memory    anonymous memory at most, beyond that before the leap (-: over before it could be seen)
maps      mappings of region and pools before, at most, after
lost      words without the last value written to them
";

/// What was measured, where, and what was left out.
pub struct Bench {
    /// Machine and region, in words.
    pub setting: Setting,
    /// The rows.
    pub rows: Vec<Row>,
    /// What was skipped, each with its reason.
    pub skipped: Vec<String>,
}

/// What all rows share.
pub struct Setting {
    /// Kernel release.
    pub kernel: String,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// Nodes with memory.
    pub nodes: usize,
    /// Node the region starts on.
    pub from: u32,
    /// Node it leaps to.
    pub to: u32,
    /// Bytes asked for.
    pub size: u64,
    /// Threads that copy.
    pub threads: usize,
    /// Threads of the largest load.
    pub load_threads: usize,
    /// Runs.
    pub runs: usize,
    /// Seed of the writer.
    pub seed: u64,
}

impl Bench {
    /// The JSON array, on one line.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.rows)
    }

    /// The text, for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> fmt::Result {
        let setting = &self.setting;
        let plural = |number: usize, thing: &str| {
            format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
        };
        writeln!(
            out,
            "machine   Linux {}, {}, {} with memory; {}, {}, {}, seed {}",
            setting.kernel,
            plural(setting.cpus, "CPU"),
            plural(setting.nodes, "node"),
            human_bytes(setting.size as f64),
            plural(setting.threads, "copy thread"),
            plural(setting.runs, "run"),
            setting.seed
        )?;
        if setting.from == setting.to {
            writeln!(
                out,
                "leap      between two pools of node {}: new frames, same node; this is no NUMA speed-up",
                setting.from
            )?;
        } else {
            writeln!(out, "leap      node {} -> node {}", setting.from, setting.to)?;
        }
        let busy = setting.threads + setting.load_threads;
        if setting.cpus < busy {
            writeln!(
                out,
                "note      {busy} threads share {}: times and gaps include waiting for a CPU",
                plural(setting.cpus, "CPU")
            )?;
        }
        writeln!(out)?;
        self.write_table(out)?;
        writeln!(out)?;
        out.write_str(LEGEND)?;
        let mut first: BTreeMap<&str, f64> = BTreeMap::new();
        for row in &self.rows {
            if let Some(ratio) = row.windows_first_ratio {
                let lowest = first.entry(&row.engine).or_insert(ratio);
                *lowest = lowest.min(ratio);
            }
        }
        let first: Vec<_> = first
            .into_iter()
            .map(|(engine, ratio)| format!("{engine} {}", percent(ratio)))
            .collect();
        if !first.is_empty() {
            writeln!(
                out,
                "first     windows whose thread went before others (SCHED_FIFO), at least: {}",
                first.join(", ")
            )?;
        }
        for skipped in &self.skipped {
            writeln!(out, "skipped   {skipped}")?;
        }
        Ok(())
    }

    fn write_table(&self, out: &mut String) -> fmt::Result {
        let mut lines = vec![COLUMNS.map(str::to_owned)];
        lines.extend(self.rows.iter().map(|row| row.cells().map(|cell| tight(&cell))));
        let widths: Vec<usize> = (0..COLUMNS.len())
            .map(|at| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0))
            .collect();
        // Two spaces between columns where they fit.
        let wide = widths.iter().sum::<usize>() + 2 * (COLUMNS.len() - 1) <= WIDTH;
        let between = if wide { "  " } else { " " };
        for line in &lines {
            let mut text = String::new();
            for (at, (cell, width)) in line.iter().zip(&widths).enumerate() {
                let gap = if at == 0 { "" } else { between };
                if at < TEXT_COLUMNS {
                    write!(text, "{gap}{cell:<width$}")?;
                } else {
                    write!(text, "{gap}{cell:>width$}")?;
                }
            }
            writeln!(out, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// Without the spaces before units, for which the table has no room.
fn tight(cell: &str) -> String {
    cell.replace(' ', "")
}

/// Three significant digits, with k or m for thousands or millions.
fn short(number: f64) -> String {
    let (value, unit) = match number {
        number if number >= 999_500.0 => (number / 1e6, "m"),
        number if number >= 1e3 => (number / 1e3, "k"),
        number => (number, ""),
    };
    if value.fract() == 0.0 { format!("{value}{unit}") } else { three_digits(value) + unit }
}

/// With as many decimals as three significant digits leave; ratios of leaps far shorter than their
/// start are wide otherwise.
fn three_digits(value: f64) -> String {
    let digits = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn row() -> Row {
        Row {
            engine: "mprotect".to_owned(),
            requested_engine: "mprotect".to_owned(),
            page_size: "4k".to_owned(),
            load: "uniform".to_owned(),
            writes_per_s: Some(10_000_000),
            copy_threads: 1,
            copy_threads_settled: 1,
            writers: 1,
            readers: 0,
            area_bytes: 512 << 10,
            uid: 1000,
            migrate_ns: 1_234_567_890,
            ratio_to_memcpy: 12.345,
            ratio_to_memcpy_min: 10.04,
            ratio_to_memcpy_max: 1234.56,
            extra_copied_ratio: 0.0123,
            writes_kept_ratio: Some(0.999),
            writes_beside_memcpy_per_s: Some(9_876_543.2),
            max_gap_ns: Some(123_456_789),
            p999_gap_ns: Some(12_345_678),
            window_p50_ns: Some(12_345),
            window_p99_ns: Some(123_450),
            window_max_ns: Some(123_456),
            windows_first_ratio: Some(0.25),
            efault_count: Some(12_345),
            first_touch_ns: -12_345_678,
            recycle_cpu_ns: Some(123_456_789),
            mappings_before: 3,
            mappings_peak: 1234,
            mappings_after: 33,
            overhead_bytes: Some(123 << 20),
            lost: 0,
        }
    }

    fn bench(from: u32, to: u32) -> Bench {
        let quiet = Row {
            load: "quiet".to_owned(),
            writes_per_s: Some(0),
            writes_kept_ratio: None,
            writes_beside_memcpy_per_s: None,
            max_gap_ns: None,
            p999_gap_ns: None,
            efault_count: None,
            overhead_bytes: None,
            ..row()
        };
        let engines = ["mprotect", "precopy", "wp-sync", "precopy-protect"].map(|engine| Row {
            engine: engine.to_owned(),
            requested_engine: engine.to_owned(),
            windows_first_ratio: Some(0.999),
            ..row()
        });
        Bench {
            setting: Setting {
                kernel: "6.12.117+deb12-cloud-amd64".to_owned(),
                cpus: 2,
                nodes: 1,
                from,
                to,
                size: 1 << 30,
                threads: 1,
                load_threads: 1,
                runs: 5,
                seed: 1,
            },
            rows: [quiet].into_iter().chain(engines).collect(),
            skipped: vec!["--page-size 2m: none free".to_owned()],
        }
    }

    #[test]
    fn json_has_the_documented_keys() {
        let value: Value = serde_json::from_str(&bench(0, 0).json().unwrap()).unwrap();
        let rows = value.as_array().unwrap();
        assert_eq!(rows.len(), 5);
        assert_eq!(rows[1].as_object().unwrap().len(), 32);
        assert!(rows[0]["writes_kept_ratio"].is_null() && rows[0]["efault_count"].is_null());
    }

    #[test]
    fn text_fits_and_says_what_one_node_means() {
        let text = bench(0, 0).text();
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
        assert!(
            text.contains("no NUMA speed-up")
                && text.contains("skipped   --page-size 2m: none free")
        );
        assert!(!text.contains("share 2 CPUs"));
        let two = bench(0, 1).text();
        assert!(two.contains("node 0 -> node 1") && !two.contains("NUMA"));
    }

    #[test]
    fn text_says_when_threads_must_share_cpus() {
        let mut bench = bench(0, 0);
        bench.setting.threads = 2;
        assert!(bench.text().contains("3 threads share 2 CPUs"));
        bench.setting.load_threads = 0;
        assert!(!bench.text().contains("share 2 CPUs"));
    }

    #[test]
    fn every_head_is_explained() {
        for head in &COLUMNS[5..] {
            assert!(LEGEND.contains(head), "{head}");
        }
    }

    #[test]
    fn rates_are_short() {
        for (number, text) in [
            (5.0, "5"),
            (999.4, "999"),
            (99.97, "100"),
            (9.999, "10.0"),
            (1.5, "1.50"),
            (100_000.0, "100k"),
            (99_876.0, "99.9k"),
            (999_900.0, "1.00m"),
            (1e7, "10m"),
        ] {
            assert_eq!(short(number), text);
        }
    }
}
