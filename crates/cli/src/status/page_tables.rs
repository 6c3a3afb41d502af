//! `pageleap status --page-tables`: what the kernel tells of page tables, as text and as JSON.

use std::collections::BTreeMap;

use anyhow::Context;
use pageleap::process::ProcessPageTables;
use pageleap::topology::NodePageTables;
use pageleap_measure::figures::human_bytes;
use serde::Serialize;

use crate::output;

/// Why the page tables of a process are not shown by node and level.
const UNKNOWN: &str = "no file of the kernel tells on which node, or at which level, the page tables \
                       of a process lie; finding that out takes a walk through them in the memory \
                       of the kernel, which this command does not do";

/// The page tables of some processes, and of each node.
pub(super) struct Tables {
    pub(super) processes: Vec<ProcessPageTables>,
    pub(super) nodes: Vec<NodePageTables>,
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
    /// By node and level: null, because that is not known.
    by_node: Option<()>,
    /// Why it is not known.
    by_node_unknown: &'static str,
}

/// A node, with the page tables that the kernel counts there for all processes.
#[derive(Serialize)]
struct JsonNode {
    node: u32,
    page_table_bytes: u64,
    /// Of devices and virtual machines; null before Linux 6.1.
    secondary_page_table_bytes: Option<u64>,
}

impl JsonProcess<'_> {
    fn of(process: &ProcessPageTables) -> JsonProcess<'_> {
        JsonProcess {
            pid: process.pid,
            name: &process.name,
            page_table_bytes: process.bytes,
            by_node: None,
            by_node_unknown: UNKNOWN,
        }
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
            processes: self.processes.iter().map(JsonProcess::of).collect(),
            nodes: self.nodes.iter().map(node).collect(),
        };
        serde_json::to_string(&json).context("the result could not be written as JSON")
    }

    /// The text. `columns` is the width of the terminal, if there is one.
    pub(super) fn text(&self, columns: Option<usize>) -> String {
        let mut out = "Page tables by process, in pages of all levels (VmPTE)\n".to_owned();
        let heads = ["process", "bytes", "by node and level"].map(str::to_owned).to_vec();
        let rows = self.processes.iter().map(|process| {
            let name = format!("{} {}", process.pid, process.name);
            match process.bytes {
                Some(bytes) => vec![name, human(bytes), "unknown".to_owned()],
                None => vec![name, "none".to_owned(), "no memory of its own".to_owned()],
            }
        });
        out += &aligned(&std::iter::once(heads).chain(rows).collect::<Vec<_>>());
        out += "\nPage tables of all processes together, by node\n";
        out += &aligned(&self.node_rows());
        out += &output::hanging("\nnote: ", &format!("by node and level: {UNKNOWN}"), columns);
        out
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
    use pageleap::process;
    use pageleap::topology::{SysFiles, page_tables};

    use super::*;

    #[test]
    fn each_process_and_each_node_has_its_place() {
        let own = ProcessPageTables::read(process::own_pid().unwrap()).unwrap();
        let mut none = own.clone();
        (none.name, none.bytes) = ("kthreadd".to_owned(), None);
        let nodes = page_tables(&SysFiles::host()).unwrap();
        let tables = Tables { processes: vec![own, none], nodes };
        let text = tables.text(None);
        assert_eq!(text.matches("unknown").count(), 1, "{text}");
        for part in ["no memory of its own", "\n  PageTables ", "\n  SecPageTables ", "\nnote: by"]
        {
            assert!(text.contains(part), "no {part} in {text}");
        }
        let json = tables.json().unwrap();
        assert!(
            json.contains(r#""name":"kthreadd","page_table_bytes":null,"by_node":null"#),
            "{json}"
        );
    }
}
