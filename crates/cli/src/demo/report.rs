//! The result as one JSON object or as text.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use serde::Serialize;

use super::queries::Decimal;
use crate::figures::{grouped, human_bytes, human_ns, optional_ns, percent};

/// The result; serialises to the JSON object of `--json`. Field names carry the units: `_ns`
/// nanoseconds, `_per_s` per second; sizes are bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Bytes of the region, all of which were to move.
    pub bytes: u64,
    /// Page size that was asked for.
    pub page_size: u64,
    /// Page size that the kernel reports for the region's mapping after the leap.
    pub kernel_page_size: u64,
    /// Share of the region that is mapped by huge pages.
    pub huge_mapped_ratio: f64,
    /// Node the table started on.
    pub from: u32,
    /// Node it was to move to.
    pub to: u32,
    /// Engine that moved it.
    pub engine: String,
    /// Why this engine.
    pub engine_reason: String,
    /// Bytes that one migration step worked on.
    pub area_bytes: u64,
    /// From the start of the job to the last commit.
    pub migrate_ns: u64,
    /// Median of three copies of as many bytes into faulted memory of the destination, before any
    /// load, one thread.
    pub memcpy_ns: u64,
    /// `migrate_ns` / `memcpy_ns`; null if not everything moved.
    pub ratio_to_memcpy: Option<f64>,
    /// Leaps without load, before the one under load, in the same run.
    pub quiet: Quiet,
    /// Bytes copied again because they were written meanwhile / `bytes`.
    pub extra_copied_ratio: f64,
    /// Longest time that the library held back a writer; it counts those that it sees itself.
    pub max_wait_ns: u64,
    /// Pages by outcome.
    pub pages: Pages,
    /// What the writer reached.
    pub writes: Writes,
    /// Query latencies.
    pub queries: Queries,
    /// Share of pages whose physical frame is another one; null when the kernel hides frame
    /// numbers.
    pub frames_changed_ratio: Option<f64>,
    /// Pages by node.
    pub placement: Placements,
    /// Mappings of region and pools.
    pub mappings: Mappings,
    /// Kernel release.
    pub kernel: String,
    /// Nodes with memory.
    pub nodes: usize,
    /// What only the text shows.
    #[serde(skip)]
    pub text: TextOnly,
}

/// Leaps of the whole region that no query and no write disturbed, to the destination and back in
/// turns.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quiet {
    /// Median time.
    pub migrate_ns: u64,
    /// Shortest.
    pub migrate_ns_min: u64,
    /// Longest.
    pub migrate_ns_max: u64,
    /// Median / `memcpy_ns`.
    pub ratio_to_memcpy: f64,
}

/// Pages by outcome.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pages {
    /// At their new frame.
    pub migrated: u64,
    /// Were where they should be already.
    pub unchanged: u64,
    /// Could not be moved now.
    pub busy: u64,
    /// Could not be moved at all.
    pub failed: u64,
    /// Not reached before the job ended.
    pub not_attempted: u64,
}

/// What the writer reached. Without a writer everything but `requested_per_s`, `landed_during` and
/// `lost` is null.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Writes {
    /// Rate that was asked for; null for `max`.
    pub requested_per_s: Option<u64>,
    /// Rate during the leap / rate asked for; for `max`, / rate before the leap.
    pub achieved_ratio: Option<f64>,
    /// Writes that ended during the leap.
    pub landed_during: u64,
    /// Rows that do not contain the last value written to them.
    pub lost: u64,
    /// Longest time between two batches of writes during the leap; includes the writer's own
    /// pauses.
    pub max_gap_ns: Option<u64>,
    /// 999 of 1000 gaps during the leap are not longer.
    pub p999_gap_ns: Option<u64>,
}

/// Both queries.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Queries {
    /// Pricing summary report.
    pub q1: Latency,
    /// Forecasting revenue change.
    pub q6: Latency,
}

/// Median latency of a query. A run that overlaps the leap counts as during it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Before the leap.
    pub before_ns: Option<u64>,
    /// During it.
    pub during_ns: Option<u64>,
    /// After it; null if the run was interrupted.
    pub after_ns: Option<u64>,
    /// Whether every answer was the same.
    pub equal: bool,
}

/// Pages by node id.
pub type NodePages = BTreeMap<u32, u64>;

/// Where the kernel reports the region's pages.
#[derive(Clone, Debug, Serialize)]
pub struct Placements {
    /// Before the leap.
    pub before: NodePages,
    /// After it.
    pub after: NodePages,
}

/// Mappings of region and pools, as lines of `/proc/self/maps`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Mappings {
    /// Before the leap.
    pub before: usize,
    /// Most that were seen.
    pub peak: usize,
    /// After it.
    pub after: usize,
}

/// What only the text shows.
#[derive(Clone, Debug)]
pub struct TextOnly {
    /// TPC-H scale factor.
    pub scale_factor: f64,
    /// Rows of the table.
    pub rows: u64,
    /// Threads that copied.
    pub threads: usize,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// Both answers are those published for scale factor 1; `None` at other scale factors.
    pub published_answers: Option<bool>,
    /// Time that the job took after the last commit to make the vacated frames ready for use again.
    pub recycle_ns: u64,
    /// The revenue that Q6 finds.
    pub q6_revenue: Option<Decimal>,
    /// Runs of Q1 before, during, after.
    pub q1_runs: [u64; 3],
    /// Runs of Q6 before, during, after.
    pub q6_runs: [u64; 3],
    /// Writer's rate before the leap, per second.
    pub rate_before: f64,
    /// Writer's rate during the leap, per second.
    pub rate_during: f64,
    /// Longest gap before the leap.
    pub max_gap_before_ns: Option<u64>,
    /// All writes of the run.
    pub writes: u64,
    /// Why the job ended, if not because it was done.
    pub ended_early: Option<String>,
    /// What the library had to say.
    pub warnings: Vec<String>,
    /// What is wrong; nothing, if the run is a success.
    pub mismatches: Vec<String>,
}

impl Summary {
    /// The JSON object, on one line.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// The text, for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> fmt::Result {
        let text = &self.text;
        let one_node = self.from == self.to;
        writeln!(
            out,
            "table       TPC-H lineitem, scale factor {}: {} rows, 16 columns, {} in {} pages of {}",
            text.scale_factor,
            grouped(text.rows),
            human_bytes(self.bytes as f64),
            grouped(self.bytes / self.page_size),
            human_bytes(self.page_size as f64)
        )?;
        if one_node {
            let why = if self.nodes == 1 { "one node" } else { "same node asked for" };
            writeln!(
                out,
                "leap        {why}: same-node leap between two pools of node {}; new frames, same node",
                self.from
            )?;
        } else {
            writeln!(out, "leap        node {} -> node {}", self.from, self.to)?;
        }
        writeln!(
            out,
            "engine      {}, areas of up to {}, {} copy thread{}; kernel {}",
            self.engine,
            human_bytes(self.area_bytes as f64),
            text.threads,
            if text.threads == 1 { "" } else { "s" },
            self.kernel
        )?;
        writeln!(out, "            {}", self.engine_reason)?;
        let moved = self.pages.migrated * self.page_size;
        if let Some(why) = &text.ended_early {
            writeln!(
                out,
                "ended early {why}: {} of {} moved",
                human_bytes(moved as f64),
                human_bytes(self.bytes as f64)
            )?;
        }
        writeln!(out)?;

        writeln!(
            out,
            "migration   {}  ({}/s), under the load below; then {} to recycle the vacated frames",
            human_ns(self.migrate_ns),
            human_bytes(per_second(moved, self.migrate_ns)),
            human_ns(text.recycle_ns)
        )?;
        writeln!(
            out,
            "memcpy      {}  ({}/s), one thread, same bytes, faulted memory, same run, no load",
            human_ns(self.memcpy_ns),
            human_bytes(per_second(self.bytes, self.memcpy_ns))
        )?;
        match self.ratio_to_memcpy {
            Some(ratio) => write!(out, "ratio       {ratio:.2}")?,
            None => write!(out, "ratio       none, as not everything moved")?,
        }
        writeln!(
            out,
            "; copied again because written meanwhile: {}",
            percent(self.extra_copied_ratio)
        )?;
        writeln!(
            out,
            "no load     {}  ({} to {}), ratio {:.2}: leaps there and back before queries and writes began",
            human_ns(self.quiet.migrate_ns),
            human_ns(self.quiet.migrate_ns_min),
            human_ns(self.quiet.migrate_ns_max),
            self.quiet.ratio_to_memcpy
        )?;
        if one_node {
            writeln!(
                out,
                "            all on this machine and on one node: this is no NUMA speed-up"
            )?;
        } else {
            writeln!(out, "            all on this machine")?;
        }
        writeln!(out)?;

        writeln!(out, "queries     {:>12} {:>12} {:>12}   runs", "before", "during", "after")?;
        for (name, query, runs) in
            [("Q1", &self.queries.q1, text.q1_runs), ("Q6", &self.queries.q6, text.q6_runs)]
        {
            writeln!(
                out,
                "  {name}        {:>12} {:>12} {:>12}   {} / {} / {}   {}",
                optional_ns(query.before_ns),
                optional_ns(query.during_ns),
                optional_ns(query.after_ns),
                runs[0],
                runs[1],
                runs[2],
                if query.equal { "all results equal" } else { "RESULTS DIFFER" }
            )?;
        }
        self.write_writer(out)?;
        writeln!(out)?;

        writeln!(out, "placement   before: {}", placed(&self.placement.before))?;
        writeln!(out, "            after:  {}", placed(&self.placement.after))?;
        writeln!(
            out,
            "pages       {} migrated, {} unchanged, {} busy, {} failed, {} not attempted",
            grouped(self.pages.migrated),
            grouped(self.pages.unchanged),
            grouped(self.pages.busy),
            grouped(self.pages.failed),
            grouped(self.pages.not_attempted)
        )?;
        writeln!(
            out,
            "mapped      kernel page size {}, {} by huge pages; mappings of region and pools: {} before, {} at most, {} after",
            human_bytes(self.kernel_page_size as f64),
            percent(self.huge_mapped_ratio),
            self.mappings.before,
            self.mappings.peak,
            self.mappings.after
        )?;
        match self.frames_changed_ratio {
            Some(ratio) => {
                writeln!(out, "frames      {} changed (/proc/self/pagemap)", percent(ratio))?
            }
            None => writeln!(
                out,
                "frames      not checked: the kernel hides frame numbers from processes without CAP_SYS_ADMIN"
            )?,
        }
        // The query thread, the writer and the copy threads; the library's own waiting threads
        // hardly run.
        let busy = 1 + usize::from(self.writes.requested_per_s != Some(0)) + text.threads;
        if text.cpus < busy {
            writeln!(
                out,
                "note        {busy} threads share {} CPU{}: the leap, the queries and the gaps include waiting for a CPU",
                text.cpus,
                if text.cpus == 1 { "" } else { "s" }
            )?;
        }
        for warning in &text.warnings {
            writeln!(out, "note        {warning}")?;
        }
        writeln!(out)?;
        self.write_verdict(out)
    }

    fn write_writer(&self, out: &mut String) -> fmt::Result {
        let text = &self.text;
        let requested = match self.writes.requested_per_s {
            Some(0) => return writeln!(out, "writer      none (--writes-per-s 0)"),
            Some(rate) => format!("{} writes/s asked for", grouped(rate)),
            None => "as many writes as it can".to_owned(),
        };
        let of = if self.writes.requested_per_s.is_some() { "it" } else { "the rate before" };
        writeln!(
            out,
            "writer      {requested}; before {}/s, during {}/s{}",
            grouped(text.rate_before.round() as u64),
            grouped(text.rate_during.round() as u64),
            self.writes
                .achieved_ratio
                .map(|ratio| format!(" = {} of {of}", percent(ratio)))
                .unwrap_or_default()
        )?;
        writeln!(
            out,
            "            longest gap during {}, p99.9 {}; longest before {}; held back by the library at most {}",
            optional_ns(self.writes.max_gap_ns),
            optional_ns(self.writes.p999_gap_ns),
            optional_ns(text.max_gap_before_ns),
            human_ns(self.max_wait_ns)
        )?;
        writeln!(
            out,
            "            {} writes in all, {} during the leap; {} lost",
            grouped(text.writes),
            grouped(self.writes.landed_during),
            grouped(self.writes.lost)
        )
    }

    fn write_verdict(&self, out: &mut String) -> fmt::Result {
        let text = &self.text;
        if !text.mismatches.is_empty() {
            return writeln!(out, "FAILED      see the messages on standard error");
        }
        let frames = match self.frames_changed_ratio {
            Some(_) => "every migrated page has a new frame",
            None => "frames not checked",
        };
        let writes = match self.writes.requested_per_s {
            Some(0) => "no writes to check",
            _ => "every write present (shadow copy)",
        };
        writeln!(
            out,
            "verified    query results equal; {writes}; other columns unchanged; {frames}"
        )?;
        if text.published_answers == Some(true)
            && let Some(revenue) = text.q6_revenue
        {
            writeln!(
                out,
                "            Q6 revenue {revenue} and the counts of Q1 are as the TPC publishes them for this scale"
            )?;
        }
        Ok(())
    }
}

fn placed(pages: &NodePages) -> String {
    if pages.is_empty() {
        return "nowhere".to_owned();
    }
    let nodes: Vec<String> = pages
        .iter()
        .map(|(node, pages)| format!("node {node}: {} pages", grouped(*pages)))
        .collect();
    nodes.join(", ")
}

fn per_second(bytes: u64, ns: u64) -> f64 {
    bytes as f64 * 1e9 / ns.max(1) as f64
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn summary() -> Summary {
        let latency = Latency {
            before_ns: Some(61_200_000),
            during_ns: Some(72_000_000),
            after_ns: Some(60_900_000),
            equal: true,
        };
        Summary {
            bytes: 844_800_000,
            page_size: 4096,
            kernel_page_size: 4096,
            huge_mapped_ratio: 0.0,
            from: 0,
            to: 0,
            engine: "mprotect".to_owned(),
            engine_reason: "asked for".to_owned(),
            area_bytes: 512 << 10,
            migrate_ns: 212_000_000,
            memcpy_ns: 205_000_000,
            ratio_to_memcpy: Some(1.034),
            quiet: Quiet {
                migrate_ns: 200_000_000,
                migrate_ns_min: 190_000_000,
                migrate_ns_max: 230_000_000,
                ratio_to_memcpy: 1.01,
            },
            extra_copied_ratio: 0.004,
            max_wait_ns: 95_000,
            pages: Pages { migrated: 206_250, unchanged: 0, busy: 0, failed: 0, not_attempted: 0 },
            writes: Writes {
                requested_per_s: Some(100_000),
                achieved_ratio: Some(0.998),
                landed_during: 21_200,
                lost: 0,
                max_gap_ns: Some(140_000),
                p999_gap_ns: Some(100_000),
            },
            queries: Queries { q1: latency, q6: latency },
            frames_changed_ratio: Some(1.0),
            placement: Placements {
                before: [(0, 206_250)].into_iter().collect(),
                after: [(0, 206_250)].into_iter().collect(),
            },
            mappings: Mappings { before: 31, peak: 900, after: 33 },
            kernel: "6.18.0".to_owned(),
            nodes: 1,
            text: TextOnly {
                scale_factor: 1.0,
                rows: 6_001_215,
                threads: 1,
                cpus: 4,
                published_answers: Some(true),
                recycle_ns: 30_000_000,
                q6_revenue: Some(Decimal(1_231_410_782_283, 4)),
                q1_runs: [12, 3, 12],
                q6_runs: [12, 3, 12],
                rate_before: 100_000.0,
                rate_during: 99_800.0,
                max_gap_before_ns: Some(70_000),
                writes: 250_000,
                ended_early: None,
                warnings: Vec::new(),
                mismatches: Vec::new(),
            },
        }
    }

    #[test]
    fn json_has_the_documented_keys_and_nothing_of_the_text() {
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let value: Value = serde_json::from_str(&summary().json().unwrap()).unwrap();
        let mut expected = [
            "bytes",
            "page_size",
            "kernel_page_size",
            "huge_mapped_ratio",
            "from",
            "to",
            "engine",
            "engine_reason",
            "area_bytes",
            "migrate_ns",
            "memcpy_ns",
            "ratio_to_memcpy",
            "quiet",
            "extra_copied_ratio",
            "max_wait_ns",
            "pages",
            "writes",
            "queries",
            "frames_changed_ratio",
            "placement",
            "mappings",
            "kernel",
            "nodes",
        ];
        expected.sort_unstable();
        assert_eq!(keys(&value), expected);
        assert_eq!(
            keys(&value["pages"]),
            ["busy", "failed", "migrated", "not_attempted", "unchanged"]
        );
        assert_eq!(
            keys(&value["writes"]),
            [
                "achieved_ratio",
                "landed_during",
                "lost",
                "max_gap_ns",
                "p999_gap_ns",
                "requested_per_s"
            ]
        );
        assert_eq!(keys(&value["queries"]["q6"]), ["after_ns", "before_ns", "during_ns", "equal"]);
        assert_eq!(value["placement"]["after"]["0"], 206_250);
    }

    #[test]
    fn hidden_frames_and_unlimited_writes_are_null() {
        let mut summary = summary();
        summary.frames_changed_ratio = None;
        summary.writes.requested_per_s = None;
        let value: Value = serde_json::from_str(&summary.json().unwrap()).unwrap();
        assert!(
            value["frames_changed_ratio"].is_null() && value["writes"]["requested_per_s"].is_null()
        );
        assert!(summary.text().contains("frames not checked"));
    }

    #[test]
    fn text_says_plainly_what_one_node_means() {
        let one = summary().text();
        assert!(one.contains(
            "one node: same-node leap between two pools of node 0; new frames, same node"
        ));
        assert!(one.contains("this is no NUMA speed-up"));
        assert!(one.contains("\nverified "));
        let mut two = summary();
        (two.to, two.nodes) = (1, 2);
        assert!(two.text().contains("node 0 -> node 1") && !two.text().contains("NUMA"));
    }

    #[test]
    fn text_says_when_threads_must_share_cpus() {
        let mut summary = summary();
        assert!(!summary.text().contains("waiting for a CPU"));
        summary.text.cpus = 2;
        assert!(summary.text().contains("3 threads share 2 CPUs"));
        summary.writes.requested_per_s = Some(0);
        assert!(!summary.text().contains("waiting for a CPU"));
    }

    #[test]
    fn text_does_not_claim_what_failed() {
        let mut summary = summary();
        summary.text.mismatches.push("3 writes lost".to_owned());
        assert!(!summary.text().contains("\nverified "));
        let mut early = super::tests::summary();
        early.ratio_to_memcpy = None;
        early.text.ended_early = Some("timed out".to_owned());
        assert!(early.text().contains("ratio       none"));
    }
}
