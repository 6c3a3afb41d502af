//! The result as a document: machine and setting, base line, rows, gaps, and the figures of each
//! run.

use pageleap_measure::document::{Body, Document, Section, Table, Value, fact};
use pageleap_measure::figures::{percent, plural};
use pageleap_measure::memcpy::BaseLine;

use super::columns::{copy_columns, line_columns, row_columns, run_columns};
use super::gaps;
use super::job_rows;
use super::rows::{Bench, Group, Line, OneCopy, Row, Run, Setting};

impl Bench {
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

    fn sharing(&self) -> String {
        let busy = self.threads + self.load_threads;
        if self.cpus >= busy {
            return String::new();
        }
        let cpus = plural(self.cpus, "CPU");
        format!("{busy} threads share {cpus}: times and gaps include waiting for a CPU")
    }
}

/// How many windows the thread that kept the area closed ran with SCHED_FIFO, by engine.
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
    use std::time::Duration;

    use clap::Parser;
    use pageleap::{CopyLoop, CopyMethod, PageSize};
    use pageleap_measure::export::Format;
    use pageleap_measure::figures::{human_bytes, human_ns, three_digits};
    use pageleap_measure::memcpy::METHODS;
    use serde_json::Value as Json;

    use super::super::args::{EngineRow, EnginesArgs, Kind};
    use super::super::place::Place;
    use super::super::rows::Case;
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
            let runs = run::measure(&args, &mut place, load.work, &engines, &|| ());
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
        // The lines of the table begin with the name of the requested engine.
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
