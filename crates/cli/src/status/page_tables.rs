//! `pageleap status --page-tables` as text and as JSON.

use std::collections::BTreeMap;

use anyhow::Context;
use pageleap::process::ProcessPageTables;
use pageleap::topology::NodePageTables;
use pageleap_measure::figures::human_bytes;
use serde::Serialize;

use crate::kernel_memory::{LEVELS, Reason, TablesOfProcess};
use crate::output;

/// The page tables of some processes, and of each node.
pub(super) struct Tables {
    pub(super) processes: Vec<OfProcess>,
    pub(super) nodes: Vec<NodePageTables>,
}

/// The page tables of one process.
pub(super) struct OfProcess {
    /// As the kernel counts them.
    pub(super) counted: ProcessPageTables,
    /// As a walk has found them, or why they are unknown.
    pub(super) walked: Result<TablesOfProcess, Reason>,
}

/// The object of `--json`. Sizes are in bytes.
#[derive(Serialize)]
struct Json<'a> {
    processes: Vec<JsonProcess<'a>>,
    nodes: Vec<JsonNode>,
}

#[derive(Serialize)]
struct JsonProcess<'a> {
    pid: u32,
    /// With control characters escaped.
    name: &'a str,
    /// Pages of all levels (`VmPTE`); null for a process without memory of its own.
    page_table_bytes: Option<u64>,
    /// Pages by node and level; null if that is not known.
    by_node: Option<Vec<JsonLevels>>,
    /// Why it is not known; null if it is.
    by_node_unknown: Option<String>,
    /// The levels of page tables: 4 or 5; null if `by_node` is.
    levels: Option<u32>,
    /// Pages that are counted in `page_table_bytes` and are in no page table: the kernel sets one
    /// page aside for each transparent huge page. Null if `by_node` is.
    not_linked_bytes: Option<u64>,
    /// Whether `by_node` has all of them: false if some changed while they were read, or if they
    /// were too many. Null if `by_node` is.
    is_complete: Option<bool>,
}

/// Pages of page table on one node.
#[derive(Serialize)]
struct JsonLevels {
    /// Null for memory whose node the kernel does not tell.
    node: Option<u32>,
    pte: u64,
    pmd: u64,
    pud: u64,
    /// Always 0 with four levels.
    p4d: u64,
    pgd: u64,
}

/// A node, with the page tables that the kernel counts there for all processes.
#[derive(Serialize)]
struct JsonNode {
    node: u32,
    page_table_bytes: u64,
    /// Of devices and virtual machines; null before Linux 6.1.
    secondary_page_table_bytes: Option<u64>,
}

impl OfProcess {
    fn json(&self) -> JsonProcess<'_> {
        let walked = self.walked.as_ref().ok();
        let levels = |(node, levels): (&Option<pageleap::NodeId>, &[u64; 5])| {
            let [pte, pmd, pud, p4d, pgd] = *levels;
            JsonLevels { node: node.map(|node| node.0), pte, pmd, pud, p4d, pgd }
        };
        JsonProcess {
            pid: self.counted.pid,
            name: &self.counted.name,
            page_table_bytes: self.counted.bytes,
            by_node: walked.map(|walked| walked.by_node.iter().map(levels).collect()),
            by_node_unknown: self.walked.as_ref().err().map(Reason::to_string),
            levels: walked.map(|walked| if walked.has_five_levels { 5 } else { 4 }),
            not_linked_bytes: walked.map(|walked| self.not_linked(walked)),
            is_complete: walked.map(|walked| walked.changed == 0 && !walked.is_cut_off),
        }
    }

    /// The bytes that the kernel counts and a walk does not find.
    fn not_linked(&self, walked: &TablesOfProcess) -> u64 {
        self.counted.bytes.unwrap_or(0).saturating_sub(walked.counted_bytes())
    }

    /// `1234 redis-server`.
    fn title(&self) -> String {
        format!("{} {}", self.counted.pid, self.counted.name)
    }

    fn row(&self) -> Vec<String> {
        let Some(bytes) = self.counted.bytes else {
            return vec![self.title(), "none".to_owned(), "no memory of its own".to_owned()];
        };
        let by_node = if self.walked.is_ok() { "below" } else { "unknown" };
        vec![self.title(), human(bytes), by_node.to_owned()]
    }

    /// The pages that a walk has found: a row for each level, and a column for each node.
    fn walked_text(&self, walked: &TablesOfProcess, columns: Option<usize>) -> String {
        let mut out =
            format!("\nPage tables of {} by node and level, in pages of 4 KB\n", self.title());
        let name = |node: &Option<pageleap::NodeId>| {
            node.map_or("node unknown".to_owned(), |node| node.to_string())
        };
        let heads = walked.by_node.keys().map(name);
        let mut rows = vec![["level".to_owned()].into_iter().chain(heads).collect::<Vec<_>>()];
        for (level, level_name) in LEVELS.iter().enumerate() {
            if *level_name == "P4D" && !walked.has_five_levels {
                continue;
            }
            let cells = walked.by_node.values().map(|levels| levels[level].to_string());
            rows.push([(*level_name).to_owned()].into_iter().chain(cells).collect());
        }
        out += &aligned(&rows);
        let mut note = |text: &str| out += &output::hanging("note: ", text, columns);
        let not_linked = self.not_linked(walked);
        if not_linked > 0 && walked.changed == 0 && !walked.is_cut_off {
            note(&format!(
                "{} more are in VmPTE and in no page table: the kernel sets a page aside for each \
                 transparent huge page",
                human(not_linked)
            ));
        }
        if walked.changed > 0 {
            note(&format!(
                "left out, because they changed while they were read: {} parts",
                walked.changed
            ));
        }
        if walked.is_cut_off {
            note("there are more than the command reads; these are the first ones by address");
        }
        out
    }
}

impl Tables {
    /// One JSON object.
    pub(super) fn json(&self) -> anyhow::Result<String> {
        let node = |node: &NodePageTables| JsonNode {
            node: node.node.0,
            page_table_bytes: node.bytes,
            secondary_page_table_bytes: node.secondary_bytes,
        };
        let json = Json {
            processes: self.processes.iter().map(OfProcess::json).collect(),
            nodes: self.nodes.iter().map(node).collect(),
        };
        serde_json::to_string(&json).context("the result could not be written as JSON")
    }

    /// The text. `columns` is the width of the terminal, if there is one.
    pub(super) fn text(&self, columns: Option<usize>) -> String {
        let mut out = "Page tables by process, in pages of all levels (VmPTE)\n".to_owned();
        let heads = ["process", "bytes", "by node and level"].map(str::to_owned).to_vec();
        let rows = self.processes.iter().map(OfProcess::row);
        out += &aligned(&std::iter::once(heads).chain(rows).collect::<Vec<_>>());
        for process in &self.processes {
            if let Ok(walked) = &process.walked {
                out += &process.walked_text(walked, columns);
            }
        }
        out += "\nPage tables of all processes together, by node\n";
        out += &aligned(&self.node_rows());
        for (reason, pids) in self.unknown() {
            let text = format!("by node and level, unknown for {}: {reason}", pids.join(", "));
            out += &output::hanging("\nnote: ", &text, columns);
        }
        out
    }

    /// The reasons why page tables are unknown, with the processes.
    fn unknown(&self) -> BTreeMap<String, Vec<String>> {
        let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for process in self.processes.iter().filter(|process| process.counted.bytes.is_some()) {
            if let Err(reason) = &process.walked {
                reasons
                    .entry(reason.to_string())
                    .or_default()
                    .push(process.counted.pid.to_string());
            }
        }
        reasons
    }

    /// A row for each counter, and a column for each node.
    fn node_rows(&self) -> Vec<Vec<String>> {
        let nodes = self.nodes.iter().map(|node| node.node.to_string());
        let mut rows = vec![["counter".to_owned()].into_iter().chain(nodes).collect::<Vec<_>>()];
        rows[0].push("all".to_owned());
        let counters: BTreeMap<&str, fn(&NodePageTables) -> Option<u64>> = BTreeMap::from([
            ("PageTables", (|node| Some(node.bytes)) as fn(&NodePageTables) -> Option<u64>),
            ("SecPageTables", |node| node.secondary_bytes),
        ]);
        for (name, counter) in counters {
            let cells = self.nodes.iter().map(counter);
            // An old kernel does not count the second ones.
            let sum: Option<u64> = cells.clone().sum();
            let texts = cells.chain([sum]).map(|bytes| bytes.map_or("not told".to_owned(), human));
            rows.push([name.to_owned()].into_iter().chain(texts).collect());
        }
        rows
    }
}

/// Aligns columns to the right, but for the first one.
fn aligned(rows: &[Vec<String>]) -> String {
    output::aligned(rows, "  ", |column, _| column == 0)
}

fn human(bytes: u64) -> String {
    human_bytes(bytes as f64)
}

#[cfg(test)]
mod tests {
    use pageleap::topology::{SysFiles, page_tables};
    use pageleap::{NodeId, process};

    use super::*;

    /// The page tables of this process, and of one without memory.
    fn tables(walked: Result<TablesOfProcess, Reason>) -> Tables {
        let counted = ProcessPageTables::read(process::own_pid().unwrap()).unwrap();
        let mut none = counted.clone();
        (none.name, none.bytes) = ("kthreadd".to_owned(), None);
        let without = OfProcess { counted: none, walked: Err(Reason::from("no memory")) };
        let processes = vec![OfProcess { counted, walked }, without];
        Tables { processes, nodes: page_tables(&SysFiles::host()).unwrap() }
    }

    #[test]
    fn each_process_and_each_node_has_its_place() {
        let tables = tables(Err(Reason::from("there is no /proc/kcore")));
        let text = tables.text(None);
        assert_eq!(text.matches("unknown").count(), 2, "{text}");
        for part in ["no memory of its own", "\n  PageTables ", "\n  SecPageTables "] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(text.ends_with(": there is no /proc/kcore\n"), "{text}");
        let json = tables.json().unwrap();
        assert!(
            json.contains(r#""name":"kthreadd","page_table_bytes":null,"by_node":null"#),
            "{json}"
        );
    }

    #[test]
    fn pages_are_shown_by_node_and_level() {
        let by_node = BTreeMap::from([
            (None, [1, 0, 0, 0, 0]),
            (Some(NodeId(0)), [7, 2, 1, 0, 1]),
            (Some(NodeId(3)), [5, 1, 0, 0, 0]),
        ]);
        let walked = TablesOfProcess { by_node, ..Default::default() };
        let mut all = tables(Ok(walked.clone()));
        all.processes[0].counted.bytes = Some(18 << 12);
        let text = all.text(None);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip_while(|line| !line.contains("by node and level, in pages"))
            .skip(1)
            .take(6)
            .map(|line| line.split_whitespace().collect())
            .collect();
        let expected =
            ["level node unknown n0 n3", "PTE 1 7 5", "PMD 0 2 1", "PUD 0 1 0", "PGD 0 1 0"];
        let is_row = |(row, expected): (&Vec<&str>, &str)| row.join(" ") == expected;
        assert!(rows.iter().zip(expected).skip(1).all(is_row), "{text}");
        assert!(
            text.contains("note: 4 KB more are") || text.contains("note: 4 KiB more are"),
            "{text}"
        );
        let json = all.json().unwrap();
        for part in [
            r#"{"node":null,"pte":1,"pmd":0,"pud":0,"p4d":0,"pgd":0}"#,
            r#""by_node_unknown":null,"levels":4,"not_linked_bytes":4096,"is_complete":true"#,
        ] {
            assert!(json.contains(part), "no {part} in {json}");
        }
        let changed =
            TablesOfProcess { changed: 2, is_cut_off: true, has_five_levels: true, ..walked };
        all.processes[0].walked = Ok(changed);
        let text = all.text(None);
        for part in ["P4D", "read: 2 parts", "more than the command reads"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(
            all.json()
                .unwrap()
                .contains(r#""levels":5,"not_linked_bytes":4096,"is_complete":false"#)
        );
    }
}
