//! Turns the demo's summary into a document of sections.

use pageleap::{CopyMethod, CopyUse};
use pageleap_measure::document::{Body, Document, Fact, Section, Table, Value, column, fact};
use pageleap_measure::figures::{grouped, human_bytes, human_ns};
use pageleap_measure::load::Rate;
use pageleap_measure::memcpy::{Copies, METHODS};
use pageleap_measure::phase::{Phase, Spread};

use super::summary::{NodePages, Query, Summary};

impl Summary {
    /// All sections.
    pub fn document(&self) -> Document {
        let mut sections = vec![
            self.table_section(),
            self.move_section(),
            self.quiet_section(),
            self.quiet_data(),
            self.under_load(),
            self.query_table(),
            self.query_data(),
            self.writer(),
            self.gaps(),
            Section::new("pages", "Pages", Body::Facts(self.page_counts())),
            self.placement(),
            self.mappings(),
            memcpy_samples(&self.memcpy.runs),
        ];
        let title = if self.warnings.is_empty() { "" } else { "Warnings" };
        sections.push(Section::new("notes", title, Body::Notes(self.warnings.clone())));
        sections.push(Section::new("", "Verdict", Body::Notes(self.verdict())));
        Document { sections }
    }

    fn table_section(&self) -> Section {
        let table = &self.table;
        let pages = format!(
            "{} pages of {}",
            grouped(table.bytes / table.page_size),
            human_bytes(table.page_size as f64)
        );
        let title = format!("Table: TPC-H lineitem, scale factor {}", table.scale_factor);
        let facts = vec![
            fact("rows", "rows", Value::Count(table.rows)).remark("16 columns"),
            fact("bytes", "size", Value::Bytes(table.bytes)).remark(pages),
            fact("page_size", "", Value::Bytes(table.page_size)),
            fact("kernel", "Linux", self.machine.kernel.as_str()),
            fact("cpus", "CPUs", Value::count(self.machine.cpus)),
            fact("nodes", "nodes with memory", Value::count(self.machine.nodes)),
        ];
        Section::new("", title, Body::Facts(facts))
    }

    /// What all leaps have in common.
    fn move_section(&self) -> Section {
        let leap = &self.leap;
        let mut facts = vec![
            fact("from", "from node", Value::count(leap.from)),
            fact("to", "to node", Value::count(leap.to)).remark(self.same_node()),
            fact("copy_threads", "threads that copy", Value::count(leap.threads)),
        ];
        if let Some(CopyUse { method, tried, .. }) = leap.copies {
            let how = if tried { "the fastest in a trial" } else { "by default" };
            facts.extend([
                fact("copy_loop", "copied by", method.by.name()).remark(format!("{method}, {how}")),
                fact("copy_step_bytes", "", Value::count(method.step_bytes)),
                fact("copy_tried", "", Value::Flag(tried)),
            ]);
        }
        Section::new("", "Leaps of the whole table", Body::Facts(facts))
    }

    /// The remark on a leap whose source and destination are the same node.
    fn same_node(&self) -> String {
        if self.leap.from != self.leap.to {
            return String::new();
        }
        let why = match self.machine.nodes {
            1 => "the machine has one node",
            _ => "the same node was asked for",
        };
        format!(
            "{why}: leaps between two pools of node {}; new frames, same node; this is no NUMA \
             speed-up",
            self.leap.from
        )
    }

    /// Leaps and memcpys without load, for people.
    fn quiet_section(&self) -> Section {
        let (quiet, memcpy) = (&self.quiet, &self.memcpy);
        let [median, min, max] =
            [quiet.ns.median, quiet.ns.min, quiet.ns.max].map(|ns| ns.round() as u64);
        let leap = format!(
            "{}; median of {}, there and back: {} to {}",
            throughput(self.table.bytes, median),
            quiet.ns.count,
            human_ns(min),
            human_ns(max)
        );
        let copy = format!(
            "{}; one thread, the same bytes, faulted memory, by {}, the fastest of {} methods",
            throughput(self.table.bytes, memcpy.ns),
            memcpy.method,
            METHODS.len()
        );
        let facts = vec![
            fact("", "engine", quiet.engine.as_str()).remark(&quiet.engine_reason),
            fact("", "leap", Value::Ns(median)).remark(leap),
            fact("memcpy_ns", "memcpy", Value::Ns(memcpy.ns)).remark(copy),
            fact("memcpy_loop", "", memcpy.method.by.name()),
            fact("memcpy_step_bytes", "", Value::count(memcpy.method.step_bytes)),
            fact("memcpy_cpu_ns", "", Value::ns(memcpy.cpu_ns)),
            fact("", "ratio", Value::Ratio(self.quiet_ratio())).remark("leap / memcpy"),
            fact("", "CPU ratio", Value::ratio(self.quiet_cpu_ratio()))
                .remark("CPU time of leap and recycling / CPU time of the memcpy"),
        ];
        Section::new("", "Without load: the leap and the fastest memcpy", Body::Facts(facts))
    }

    /// Leaps without load, for programs.
    fn quiet_data(&self) -> Section {
        let quiet = &self.quiet;
        let ns = |ns: f64| Value::Ns(ns.round() as u64);
        let times = quiet.samples_ns.iter().map(|ns| Value::Ns(*ns)).collect();
        let facts = vec![
            fact("migrate_ns", "", ns(quiet.ns.median)),
            fact("migrate_ns_min", "", ns(quiet.ns.min)),
            fact("migrate_ns_max", "", ns(quiet.ns.max)),
            fact("ratio_to_memcpy", "", Value::Ratio(self.quiet_ratio())),
            fact("cpu_to_memcpy_ratio", "", Value::ratio(self.quiet_cpu_ratio())),
            fact("cpu_ns", "", Value::ns(quiet.cpu_ns)),
            fact("engine", "", quiet.engine.as_str()),
            fact("engine_reason", "", quiet.engine_reason.as_str()),
            fact("samples_ns", "", Value::List(times)),
        ];
        Section::data("quiet", Body::Facts(facts))
    }

    /// The leap beside queries and writes, and what that load costs.
    fn under_load(&self) -> Section {
        let leap = &self.leap;
        let time = format!(
            "{}; then {} to recycle the vacated frames",
            throughput(leap.moved_bytes, leap.migrate_ns),
            human_ns(leap.recycle_ns)
        );
        let copy = self.memcpy_under_load_ns.map_or(String::new(), |ns| {
            format!("{}; one copy beside the same load", throughput(self.table.bytes, ns))
        });
        let ratio = self.ratio_to_memcpy();
        let none = |why: &'static str| if ratio.is_some() { why } else { "not everything moved" };
        let mut facts = vec![
            fact("engine", "engine", leap.engine.as_str()).remark(&leap.engine_reason),
            fact("engine_reason", "", leap.engine_reason.as_str()),
            fact("area_bytes", "areas of up to", Value::Bytes(leap.area_bytes)),
            fact("migrate_ns", "leap", Value::Ns(leap.migrate_ns)).remark(time),
            fact("recycle_ns", "", Value::Ns(leap.recycle_ns)),
            fact("memcpy_under_load_ns", "memcpy", Value::ns(self.memcpy_under_load_ns))
                .remark(copy),
            fact("ratio_to_memcpy_under_load", "ratio", Value::ratio(self.ratio_under_load()))
                .remark(none("leap / memcpy, both beside the load")),
            fact("ratio_to_memcpy", "ratio, quiet memcpy", Value::ratio(ratio))
                .remark(none("leap beside the load / memcpy without load")),
            fact("leap_load_cost_ns", "load costs the leap", signed_ns(self.leap_load_cost_ns()))
                .remark(format!("more than without load{}", self.sharing())),
            fact(
                "memcpy_load_cost_ns",
                "load costs the memcpy",
                signed_ns(self.memcpy_load_cost_ns()),
            )
            .remark("more than the fastest memcpy without load"),
            fact("cpu_to_memcpy_ratio", "CPU ratio", Value::ratio(self.cpu_to_memcpy_ratio()))
                .remark("CPU time of leap and recycling / CPU time of the memcpy without load"),
            fact("cpu_ns", "", Value::ns(leap.cpu_ns)),
            fact("extra_copied_ratio", "copied again", Value::Share(leap.extra_copied_ratio))
                .remark("threads wrote to it during its copy"),
            fact("max_wait_ns", "longest wait", Value::Ns(leap.max_wait_ns))
                .remark("longest time that the library held back a thread"),
        ];
        if let Some(why) = &leap.ended_early {
            let [moved, all] = [leap.moved_bytes, self.table.bytes].map(|b| human_bytes(b as f64));
            let remark = format!("{moved} of {all} moved");
            facts.push(fact("ended_early", "ended early", why.as_str()).remark(remark));
        }
        let title = match self.writes.any() {
            true => "Under load: queries read the table, and a thread writes it",
            false => "Under load: queries read the table",
        };
        Section::new("", title, Body::Facts(facts))
    }

    /// A reason why the load costs something. Busy are the query thread, the writer and the copy
    /// threads. The library's own waiting threads hardly run and do not count.
    fn sharing(&self) -> String {
        let busy = 1 + usize::from(self.writes.any()) + self.leap.threads;
        let cpus = self.machine.cpus;
        if cpus >= busy {
            return String::new();
        }
        let s = if cpus == 1 { "" } else { "s" };
        format!("; {busy} threads share {cpus} CPU{s}, and wait for a CPU")
    }

    fn query_table(&self) -> Section {
        let rows = [("Q1", &self.q1), ("Q6", &self.q6)];
        let columns = [
            column("", "query", "", |(name, _): &(&str, &Query)| (*name).into()),
            column("", "before", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::Before as usize])
            }),
            column("", "memcpy", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::Memcpy as usize])
            }),
            column("", "leap", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::During as usize])
            }),
            column("", "after", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::After as usize])
            }),
            column("", "runs", "", |(_, query): &(&str, &Query)| {
                Value::List(query.runs.iter().map(|runs| Value::Count(*runs)).collect())
            }),
            column("", "results", "", |(_, query): &(&str, &Query)| {
                if query.equal { "all equal" } else { "DIFFER" }.into()
            }),
        ];
        let table = Table::of(&columns, &rows, |_| String::new());
        Section::new(
            "",
            "Queries: median latency before, beside a memcpy, during the leap, and after it",
            Body::Table(table),
        )
    }

    fn query_data(&self) -> Section {
        let facts = vec![fact("q1", "", query_map(&self.q1)), fact("q6", "", query_map(&self.q6))];
        Section::data("queries", Body::Facts(facts))
    }

    fn writer(&self) -> Section {
        let writes = &self.writes;
        let asked = match writes.requested {
            Rate::PerSecond(0) => "no writer (--writes-per-s 0)",
            Rate::PerSecond(_) => "writes per second",
            Rate::Max => "as many writes as possible",
        };
        let requested = match writes.requested {
            Rate::PerSecond(rate) => Value::Count(rate),
            Rate::Max => Value::Unknown,
        };
        let compared = match writes.requested {
            Rate::PerSecond(_) => "of what was asked for",
            Rate::Max => "of the rate before the leap",
        };
        let [before, memcpy, during] =
            [Phase::Before, Phase::Memcpy, Phase::During].map(|phase| writes.gaps[phase as usize]);
        let mut facts = vec![
            fact("requested_per_s", "asked for", requested).remark(asked),
            fact("before_per_s", "before the leap", Value::PerSecond(writes.before_per_s)),
            fact("during_per_s", "during the leap", Value::PerSecond(writes.during_per_s)),
            fact("achieved_ratio", "reached", Value::share(writes.achieved_ratio)).remark(compared),
            fact("count", "writes", Value::Count(writes.count)),
            fact("landed_during", "of them in the leap", Value::Count(writes.landed_during)),
            fact("lost", "lost", Value::Count(writes.lost)),
            fact("max_gap_before_ns", "", spread_ns(before, |gaps| gaps.max_ns)),
            fact("max_gap_memcpy_ns", "", spread_ns(memcpy, |gaps| gaps.max_ns)),
            fact("max_gap_ns", "", spread_ns(during, |gaps| gaps.max_ns)),
            fact("p50_gap_ns", "", spread_ns(during, |gaps| gaps.p50_ns)),
            fact("p99_gap_ns", "", spread_ns(during, |gaps| gaps.p99_ns)),
            fact("p999_gap_ns", "", spread_ns(during, |gaps| gaps.p999_ns)),
            fact("memcpy_p50_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p50_ns)),
            fact("memcpy_p99_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p99_ns)),
            fact("memcpy_p999_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p999_ns)),
            fact(
                "gap_beyond_memcpy_ns",
                "gap beyond the memcpy",
                signed_ns(writes.gap_beyond_memcpy_ns),
            )
            .remark("longest gap during the leap, less the longest beside the memcpy"),
        ];
        if !writes.any() {
            facts.iter_mut().skip(1).for_each(|fact| fact.label = "");
        }
        Section::new("writes", "Writer", Body::Facts(facts))
    }

    /// The writer's gaps, for people.
    fn gaps(&self) -> Section {
        let phases = [
            ("before", Phase::Before),
            ("beside the memcpy", Phase::Memcpy),
            ("during the leap", Phase::During),
            ("after", Phase::After),
        ];
        let rows = phases.map(|(name, phase)| (name, self.writes.gaps[phase as usize]));
        type Row = (&'static str, Option<Spread>);
        let columns = [
            column("", "gaps", "", |row: &Row| row.0.into()),
            column("", "p50", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p50_ns)),
            column("", "p99", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p99_ns)),
            column("", "p99.9", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p999_ns)),
            column("", "longest", "", |row: &Row| spread_ns(row.1, |gaps| gaps.max_ns)),
        ];
        let title = match self.writes.any() {
            true => "Writer's gaps: from one batch of writes to the next, its own pauses included",
            false => "",
        };
        Section::new("", title, Body::Table(Table::of(&columns, &rows, |_| String::new())))
    }

    fn page_counts(&self) -> Vec<Fact> {
        let counts = self.pages.counts;
        vec![
            fact("migrated", "migrated", Value::Count(counts.migrated)),
            fact("unchanged", "unchanged", Value::Count(counts.unchanged)),
            fact("busy", "busy", Value::Count(counts.busy)),
            fact("failed", "failed", Value::Count(counts.failed)),
            fact("not_attempted", "not attempted", Value::Count(counts.not_attempted)),
        ]
    }

    fn placement(&self) -> Section {
        let facts = vec![
            fact("before", "before", by_node(&self.pages.before)),
            fact("after", "after", by_node(&self.pages.after)),
        ];
        Section::new("placement", "Pages by node, as the kernel reports them", Body::Facts(facts))
    }

    fn mappings(&self) -> Section {
        let pages = &self.pages;
        let [before, peak, after] = pages.mappings;
        let numbers = [("before", before), ("peak", peak), ("after", after)];
        let numbers = numbers.map(|(name, number)| (name.to_owned(), Value::count(number)));
        let frames =
            fact("frames_changed_ratio", "new frames", Value::share(pages.frames_changed_ratio));
        let facts = vec![
            fact("kernel_page_size", "kernel's page size", Value::Bytes(pages.kernel_page_size)),
            fact("huge_mapped_ratio", "by huge pages", Value::Share(pages.huge_mapped_ratio)),
            fact("mappings", "mappings", Value::Map(numbers.into())).remark("of region and pools"),
            match frames.value {
                Value::Unknown => frames.remark(
                    "frames not checked: the kernel hides frame numbers from processes without \
                     CAP_SYS_ADMIN",
                ),
                _ => frames.remark("pages in another frame (/proc/self/pagemap)"),
            },
        ];
        Section::new("", "Mapping", Body::Facts(facts))
    }

    fn verdict(&self) -> Vec<String> {
        if !self.mismatches.is_empty() {
            return vec!["FAILED: see the messages on standard error".to_owned()];
        }
        let frames = match self.pages.frames_changed_ratio {
            Some(_) => "every migrated page has a new frame",
            None => "frames not checked",
        };
        let writes = match self.writes.any() {
            true => "every write present (shadow copy)",
            false => "no writes to check",
        };
        let mut verdict = vec![format!(
            "verified: query results equal; {writes}; other columns unchanged; {frames}"
        )];
        if let Some((true, revenue)) = self.published {
            verdict.push(format!(
                "Q6's revenue {revenue} and the counts of Q1 are as the TPC publishes them for \
                 this scale"
            ));
        }
        verdict
    }
}

fn spread_ns(gaps: Option<Spread>, figure: fn(&Spread) -> u64) -> Value {
    Value::ns(gaps.as_ref().map(figure))
}

fn signed_ns(ns: Option<i64>) -> Value {
    ns.map_or(Value::Unknown, Value::SignedNs)
}

fn throughput(bytes: u64, ns: u64) -> String {
    format!("{}/s", human_bytes(bytes as f64 * 1e9 / ns.max(1) as f64))
}

fn by_node(pages: &NodePages) -> Value {
    let nodes = pages.iter().map(|(node, pages)| (node.to_string(), Value::Count(*pages)));
    Value::Map(nodes.collect())
}

fn query_map(query: &Query) -> Value {
    let entry = |name: &str, value| (name.to_owned(), value);
    let counts = |phase: Phase| {
        let pairs = query.counts[phase as usize].iter();
        Value::List(pairs.map(|(ns, times)| pair(Value::Ns(*ns), Value::Count(*times))).collect())
    };
    Value::Map(vec![
        entry("before_ns", Value::ns(query.median_ns[Phase::Before as usize])),
        entry("memcpy_ns", Value::ns(query.median_ns[Phase::Memcpy as usize])),
        entry("during_ns", Value::ns(query.median_ns[Phase::During as usize])),
        entry("after_ns", Value::ns(query.median_ns[Phase::After as usize])),
        entry("equal", Value::Flag(query.equal)),
        entry("before_ns_counts", counts(Phase::Before)),
        entry("memcpy_ns_counts", counts(Phase::Memcpy)),
        entry("during_ns_counts", counts(Phase::During)),
        entry("after_ns_counts", counts(Phase::After)),
    ])
}

fn pair(one: Value, other: Value) -> Value {
    Value::List(vec![one, other])
}

/// The time of each memcpy, for the JSON output only.
fn memcpy_samples(runs: &[Copies]) -> Section {
    let each = runs.iter().enumerate().flat_map(|(run, copies)| {
        METHODS.into_iter().zip(copies).map(move |(method, copy)| (run, method, *copy))
    });
    let rows: Vec<_> = each.collect();
    type Row = (usize, CopyMethod, pageleap_measure::memcpy::Copy);
    let columns = [
        column("run", "", "", |row: &Row| Value::count(row.0)),
        column("loop", "", "", |row: &Row| row.1.by.name().into()),
        column("step_bytes", "", "", |row: &Row| Value::count(row.1.step_bytes)),
        column("ns", "", "", |row: &Row| Value::Ns(row.2.ns)),
        column("cpu_ns", "", "", |row: &Row| Value::ns(row.2.cpu_ns)),
    ];
    Section::data("memcpy_samples", Body::Table(Table::of(&columns, &rows, |_| String::new())))
}

#[cfg(test)]
mod tests {
    use pageleap::{NodeId, PageCounts};
    use pageleap_measure::export::Format;
    use pageleap_measure::memcpy::Copy;
    use pageleap_measure::statistics;
    use serde_json::Value as Json;

    use super::super::queries::Decimal;
    use super::super::summary;
    use super::super::summary::{Leap, Machine, Memcpy, Pages, Quiet, Writes};
    use super::*;

    fn gaps(max_ns: u64) -> Spread {
        let p999_ns = max_ns - 10_000;
        Spread { count: 5, p50_ns: 55_000, p99_ns: 56_000, p999_ns, max_ns }
    }

    fn summary() -> Summary {
        let query = Query {
            median_ns: [Some(61_200_000), Some(63_000_000), Some(72_000_000), Some(60_900_000)],
            runs: [12, 2, 3, 12],
            counts: [
                vec![(61_200_000, 12)],
                vec![(63_000_000, 2)],
                vec![(72_000_000, 3)],
                vec![(60_900_000, 12)],
            ],
            equal: true,
        };
        let copy = Copy { ns: 200_000_000, cpu_ns: Some(190_000_000) };
        Summary {
            table: summary::Table {
                scale_factor: 1.0,
                rows: 6_001_215,
                bytes: 844_800_000,
                page_size: 4096,
            },
            machine: Machine { kernel: "6.18.0".to_owned(), nodes: 1, cpus: 4 },
            leap: Leap {
                from: 0,
                to: 0,
                engine: "precopy".to_owned(),
                engine_reason: "asked for".to_owned(),
                area_bytes: 16 << 20,
                threads: 1,
                copies: Some(CopyUse {
                    from: NodeId(0),
                    to: NodeId(0),
                    method: METHODS[1],
                    tried: true,
                }),
                migrate_ns: 212_000_000,
                recycle_ns: 30_000_000,
                cpu_ns: Some(228_000_000),
                completed: true,
                moved_bytes: 844_800_000,
                extra_copied_ratio: 0.0004,
                max_wait_ns: 120_000,
                ended_early: None,
            },
            memcpy: Memcpy {
                method: METHODS[1],
                ns: 200_000_000,
                cpu_ns: Some(190_000_000),
                runs: vec![[copy; METHODS.len()]; 3],
            },
            quiet: Quiet {
                samples_ns: vec![190_000_000, 210_000_000, 206_000_000],
                ns: statistics::Summary::of(&[190e6, 210e6, 206e6]).unwrap(),
                cpu_ns: Some(209_000_000),
                engine: "stop-copy".to_owned(),
                engine_reason: "few come to wait".to_owned(),
            },
            memcpy_under_load_ns: Some(208_000_000),
            writes: Writes {
                requested: Rate::PerSecond(100_000),
                achieved_ratio: Some(0.998),
                before_per_s: 100_000.0,
                during_per_s: 99_800.0,
                count: 250_000,
                landed_during: 21_200,
                lost: 0,
                gaps: [70_000, 90_000, 140_000, 70_000].map(|max_ns| Some(gaps(max_ns))),
                gap_beyond_memcpy_ns: Some(50_000),
            },
            q1: query.clone(),
            q6: query,
            pages: Pages {
                counts: PageCounts { migrated: 206_250, ..PageCounts::default() },
                before: [(0, 206_250)].into(),
                after: [(0, 206_250)].into(),
                kernel_page_size: 4096,
                huge_mapped_ratio: 0.0,
                mappings: [31, 900, 33],
                frames_changed_ratio: Some(1.0),
            },
            published: Some((true, Decimal(1_231_410_782_283, 4))),
            warnings: Vec::new(),
            mismatches: Vec::new(),
        }
    }

    fn json(summary: &Summary) -> Json {
        serde_json::from_str(&Format::Json.write(&summary.document())).unwrap()
    }

    fn text(summary: &Summary) -> String {
        // Joins the lines, so that line breaks do not matter to the tests.
        let text = Format::WIDE.write(&summary.document());
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn json_has_the_documented_keys() {
        let keys = |value: &Json| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let value = json(&summary());
        let mut expected = vec![
            "rows",
            "bytes",
            "page_size",
            "kernel",
            "cpus",
            "nodes",
            "from",
            "to",
            "engine",
            "engine_reason",
            "area_bytes",
            "copy_loop",
            "copy_step_bytes",
            "copy_threads",
            "copy_tried",
            "migrate_ns",
            "recycle_ns",
            "memcpy_ns",
            "memcpy_loop",
            "memcpy_step_bytes",
            "ratio_to_memcpy",
            "memcpy_under_load_ns",
            "ratio_to_memcpy_under_load",
            "leap_load_cost_ns",
            "memcpy_load_cost_ns",
            "cpu_to_memcpy_ratio",
            "cpu_ns",
            "memcpy_cpu_ns",
            "extra_copied_ratio",
            "max_wait_ns",
            "quiet",
            "queries",
            "writes",
            "pages",
            "placement",
            "kernel_page_size",
            "huge_mapped_ratio",
            "mappings",
            "frames_changed_ratio",
            "memcpy_samples",
            "notes",
        ];
        expected.sort_unstable();
        assert_eq!(keys(&value), expected);
        assert_eq!(
            keys(&value["pages"]),
            ["busy", "failed", "migrated", "not_attempted", "unchanged"]
        );
        for key in ["achieved_ratio", "landed_during", "lost"] {
            assert!(value["writes"][key].is_number(), "{key}");
        }
        for (key, ns) in [
            ("max_gap_before_ns", 70_000),
            ("max_gap_memcpy_ns", 90_000),
            ("max_gap_ns", 140_000),
            ("gap_beyond_memcpy_ns", 50_000),
            ("p99_gap_ns", 56_000),
            ("p999_gap_ns", 130_000),
            ("memcpy_p999_gap_ns", 80_000),
        ] {
            assert_eq!(value["writes"][key], ns, "{key}");
        }
        let q6 = &value["queries"]["q6"];
        assert_eq!(q6["during_ns_counts"], serde_json::json!([[72_000_000, 3]]));
        assert_eq!((&q6["memcpy_ns"], &q6["during_ns"]), (&63_000_000.into(), &72_000_000.into()));
        assert!(q6["after_ns"].is_number() && q6["equal"] == true);
        assert_eq!(value["placement"]["after"]["0"], 206_250);
        assert_eq!(value["quiet"]["samples_ns"].as_array().unwrap().len(), 3);
        assert_eq!(value["memcpy_samples"].as_array().unwrap().len(), 3 * METHODS.len());
        assert_eq!(value["ratio_to_memcpy"], 1.06);
        assert_eq!(value["cpu_to_memcpy_ratio"], 1.2);
        assert_eq!(value["quiet"]["ratio_to_memcpy"], 1.03);
        assert_eq!(value["quiet"]["cpu_to_memcpy_ratio"], 1.1);
        assert_eq!(value["leap_load_cost_ns"], 6_000_000);
        assert_eq!(value["memcpy_load_cost_ns"], 8_000_000);
        let ratio = value["ratio_to_memcpy_under_load"].as_f64().unwrap();
        assert!((ratio - 212.0 / 208.0).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn hidden_frames_and_unlimited_writes_are_null() {
        let mut summary = summary();
        summary.pages.frames_changed_ratio = None;
        summary.writes.requested = Rate::Max;
        let value = json(&summary);
        assert!(
            value["frames_changed_ratio"].is_null() && value["writes"]["requested_per_s"].is_null()
        );
        assert!(text(&summary).contains("frames not checked"));
    }

    #[test]
    fn text_says_plainly_what_one_node_means() {
        let one = text(&summary());
        assert!(one.contains(
            "the machine has one node: leaps between two pools of node 0; new frames, same node"
        ));
        assert!(one.contains("this is no NUMA speed-up"));
        assert!(one.contains("Verdict verified: "), "{one}");
        let mut two = summary();
        (two.leap.to, two.machine.nodes) = (1, 2);
        let two = text(&two);
        assert!(two.contains("from node 0 to node 1") && !two.contains("NUMA"), "{two}");
    }

    #[test]
    fn the_leap_without_load_comes_first() {
        let text = text(&summary());
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        let parts = [
            "Leaps of the whole table",
            "Without load: the leap and the fastest memcpy engine stop-copy",
            "ratio 1.03 leap / memcpy",
            "CPU ratio 1.10",
            "Under load: queries read the table, and a thread writes it engine precopy",
            "ratio 1.02 leap / memcpy, both beside the load",
            "ratio, quiet memcpy 1.06",
            "load costs the leap 6.00 ms more than without load load costs the memcpy 8.00 ms",
            "Queries: ",
            "gap beyond the memcpy 50.0 us",
            "during the leap 55.0us 56.0us 130us 140us",
            "Verdict",
        ];
        assert!(parts.map(at).is_sorted(), "{text}");
    }

    #[test]
    fn text_says_what_the_load_costs_and_when_threads_must_share_cpus() {
        let mut summary = summary();
        assert!(!text(&summary).contains("wait for a CPU"));
        summary.machine.cpus = 2;
        let shared = text(&summary);
        let (quiet, under_load) = shared.split_once("Under load: ").unwrap();
        assert!(under_load.contains("without load; 3 threads share 2 CPUs, and wait"), "{shared}");
        assert!(!quiet.contains("threads share"), "{shared}");
        summary.writes.requested = Rate::PerSecond(0);
        assert!(!text(&summary).contains("wait for a CPU") && !text(&summary).contains("gaps"));
        summary.memcpy_under_load_ns = Some(199_000_000);
        assert_eq!(json(&summary)["memcpy_load_cost_ns"], -1_000_000);
    }

    #[test]
    fn text_does_not_claim_what_failed() {
        let mut failed = summary();
        failed.mismatches.push("3 writes lost".to_owned());
        assert!(!text(&failed).contains("verified") && text(&failed).contains("FAILED"));
        let mut early = summary();
        early.leap.completed = false;
        early.leap.ended_early = Some("timed out".to_owned());
        assert!(text(&early).contains("ratio - not everything moved"), "{}", text(&early));
        assert!(text(&early).contains("load costs the leap - "), "{}", text(&early));
        let wrong = summary::incomplete(&early).unwrap();
        assert!(wrong.contains("(timed out)") && wrong.ends_with("--timeout"), "{wrong}");
        assert_eq!(summary::incomplete(&summary()), None);
    }
}
