//! `pageleap status --page-tables` as text and as JSON.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use anyhow::Context;
use pageleap::NodeId;
use pageleap::process::ProcessPageTables;
use pageleap::topology::NodePageTables;
use pageleap_measure::figures::human_bytes;
use serde::Serialize;

use crate::kernel_memory::{Folder, KernelMemory, LEVELS, Reason, Symbols, TablesOfProcess};
use crate::output;

/// The most folders of `/proc` that are open together.
const FOLDERS_AT_ONCE: usize = 256;

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
    /// Whether the kernel counted the same before and after the walk.
    pub(super) is_steady: bool,
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
    /// page aside for each transparent huge page. Null unless `is_complete` is true.
    not_linked_bytes: Option<u64>,
    /// Whether `by_node` has all of them: false if page tables changed while they were read, or if
    /// they were too many. Null if `by_node` is.
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
    /// Looks at processes. The second part has the errors of those that could not be read.
    pub(super) fn all(
        pids: &[u32],
        nodes: &[NodePageTables],
        symbols: &OnceCell<Symbols>,
    ) -> (Vec<OfProcess>, Vec<pageleap::Error>) {
        let nodes: Vec<NodeId> = nodes.iter().map(|node| node.node).collect();
        let kernel = KernelMemory::open(&nodes, symbols);
        let (mut all, mut failures) = (Vec::new(), Vec::new());
        for some in pids.chunks(FOLDERS_AT_ONCE) {
            // Before the numbers are looked for in the memory of the kernel.
            let folders: Vec<Folder> = some.iter().map(|pid| Folder::open(*pid)).collect();
            let found = kernel.as_ref().map_err(Reason::clone);
            let found = found.and_then(|kernel| Ok((kernel, kernel.find(some)?)));
            let of = |pid: u32| {
                let folder = some.iter().position(|one| *one == pid).map(|at| &folders[at]);
                OfProcess::look(pid, |pid| {
                    let (kernel, tasks) = found.as_ref().map_err(Reason::clone)?;
                    let walked = kernel.page_tables(pid, tasks.get(&pid))?;
                    folder.map_or(Ok(()), Folder::is_alive)?;
                    Ok(walked)
                })
            };
            let (some, failed) = super::each(some, pids.len() > 1, of);
            all.extend(some);
            failures.extend(failed);
        }
        (all, failures)
    }

    /// Looks at one process: what the kernel counts, and what `walk` finds, for a process that has
    /// memory of its own. Without it, `walk` would find that of another one: threads of the kernel
    /// borrow memory.
    fn look(
        pid: u32,
        walk: impl Fn(u32) -> Result<TablesOfProcess, Reason>,
    ) -> Result<OfProcess, pageleap::Error> {
        let counted = ProcessPageTables::read(pid)?;
        if counted.bytes.is_none() {
            let walked = Err(Reason::new("it has no memory of its own".to_owned()));
            return Ok(OfProcess { counted, walked, is_steady: true });
        }
        let walked = walk(pid);
        // A process that has ended meanwhile was there when it was counted.
        let is_steady =
            ProcessPageTables::read(pid).is_ok_and(|after| after.bytes == counted.bytes);
        Ok(OfProcess { counted, walked, is_steady })
    }

    fn json(&self) -> JsonProcess<'_> {
        let walked = self.walked.as_ref().ok();
        let levels = |(node, levels): (&Option<NodeId>, &[u64; 5])| {
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
            not_linked_bytes: walked
                .filter(|walked| self.is_complete(walked))
                .map(|walked| self.not_linked(walked)),
            is_complete: walked.map(|walked| self.is_complete(walked)),
        }
    }

    fn is_complete(&self, walked: &TablesOfProcess) -> bool {
        let is_less = walked.counted_bytes() <= self.counted.bytes.unwrap_or(0);
        self.is_steady && is_less && walked.changed == 0 && !walked.is_cut_off
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
        let name =
            |node: &Option<NodeId>| node.map_or("node unknown".to_owned(), |node| node.to_string());
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
        if not_linked > 0 && self.is_complete(walked) {
            note(&format!(
                "{} more are in VmPTE and in none of these: the kernel sets a page aside for each \
                 transparent huge page",
                human(not_linked)
            ));
        }
        if walked.changed > 0 {
            note(&format!(
                "left out, because they changed while they were read: {} parts",
                walked.changed
            ));
        } else if !self.is_complete(walked) && !walked.is_cut_off {
            note("the page tables changed while they were read: some may be missing or be gone");
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
    use pageleap::process;
    use pageleap::topology::{SysFiles, page_tables};

    use super::*;

    /// The page tables of this process, and of one without memory.
    fn tables(walked: Result<TablesOfProcess, Reason>) -> Tables {
        let counted = ProcessPageTables::read(process::own_pid().unwrap()).unwrap();
        let mut none = counted.clone();
        (none.name, none.bytes) = ("kthreadd".to_owned(), None);
        let walk = Err(Reason::from("no memory"));
        let without = OfProcess { counted: none, walked: walk, is_steady: true };
        let processes = vec![OfProcess { counted, walked, is_steady: true }, without];
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
                .contains(r#""levels":5,"not_linked_bytes":null,"is_complete":false"#)
        );
    }

    #[test]
    fn a_process_without_memory_is_not_walked() {
        let walked = TablesOfProcess::default();
        let look = |pid| OfProcess::look(pid, |_| Ok(walked.clone())).unwrap();
        assert!(look(process::own_pid().unwrap()).walked.is_ok());
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        while ProcessPageTables::read(ended.id()).unwrap().bytes.is_some() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert!(look(ended.id()).walked.is_err());
        ended.wait().unwrap();
    }

    #[test]
    fn page_tables_that_change_are_told() {
        let by_node = BTreeMap::from([(Some(NodeId(0)), [7, 2, 1, 0, 1])]);
        let mut all = tables(Ok(TablesOfProcess { by_node, ..Default::default() }));
        let is_told = |all: &Tables| all.text(None).contains("changed while they were read");
        all.processes[0].counted.bytes = Some(10 << 12);
        assert!(!is_told(&all));
        // More are found than the kernel counts.
        all.processes[0].counted.bytes = Some(9 << 12);
        assert!(is_told(&all) && all.json().unwrap().contains(r#""is_complete":false"#));
        all.processes[0].counted.bytes = Some(12 << 12);
        all.processes[0].is_steady = false;
        assert!(is_told(&all) && !all.text(None).contains("transparent"));
    }
}
