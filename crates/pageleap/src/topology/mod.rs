//! The memory nodes of the machine, their CPUs and their free memory, from sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::units::{NodeId, PageSize};

mod files;

pub use files::SysFiles;

const NODES: &str = "/sys/devices/system/node";
/// More than any Linux machine has (nodes: 1024, CPUs: 8192); caps what a damaged file can make us allocate.
const MAX_ID: usize = 65_535;

/// One memory node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Its CPUs; empty for memory without any.
    pub cpus: Vec<usize>,
    /// Its memory in bytes; 0 for CPUs without any.
    pub total_bytes: u64,
    /// What can be allocated without swapping: free pages, clean file pages and reclaimable slab, in bytes.
    pub free_bytes: u64,
    /// Free huge pages, by their size in bytes.
    pub free_huge: Vec<(u64, u64)>,
}

impl Node {
    /// Free huge pages of that size in bytes.
    pub fn free_huge(&self, page_bytes: u64) -> u64 {
        self.free_huge.iter().filter(|(size, _)| *size == page_bytes).map(|(_, free)| free).sum()
    }
}

/// Whether the cpuset of the calling thread lets it have memory of a node. A set that cannot be read allows everything.
pub(crate) fn allows_node(node: u32) -> bool {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    allowed.and_then(|list| parse_list(list).ok()).is_none_or(|nodes| nodes.contains(&(node as usize)))
}

/// The machine as it was when it was read.
#[derive(Clone, Debug)]
pub struct Topology {
    nodes: Vec<Node>,
}

impl Topology {
    /// Reads the online nodes. A kernel without NUMA support counts as one node with all CPUs.
    pub fn read() -> Result<Topology, Error> {
        let root = Path::new(NODES);
        let online = match fs::read_to_string(root.join("online")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(unreadable(&root.join("online"), &e));
            }
            other => other,
        };
        let Ok(online) = online else {
            let cpus = read_list(Path::new("/sys/devices/system/cpu/online"))?;
            let (total_bytes, free_bytes) = meminfo(&read(Path::new("/proc/meminfo"))?);
            return Ok(Topology {
                nodes: vec![Node { id: NodeId(0), cpus, total_bytes, free_bytes, free_huge: Vec::new() }],
            });
        };
        let ids = parse_list(&online).map_err(|reason| damaged(&root.join("online"), reason))?;
        let nodes = ids.into_iter().map(|id| read_node(root, id)).collect::<Result<_, _>>()?;
        Ok(Topology { nodes })
    }

    /// All online nodes, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node itself if it has CPUs, else another that has.
    pub fn nearest_with_cpus(&self, id: NodeId) -> NodeId {
        let with_cpus: Vec<NodeId> = self.nodes.iter().filter(|n| !n.cpus.is_empty()).map(|n| n.id).collect();
        if with_cpus.contains(&id) { id } else { with_cpus.first().copied().unwrap_or(id) }
    }

    /// The node with number `id`, if it is online and has memory.
    pub fn node(&self, id: NodeId) -> Result<&Node, Error> {
        self.nodes.iter().find(|n| n.id == id && n.total_bytes > 0).ok_or_else(|| {
            let known: Vec<String> =
                self.nodes.iter().filter(|n| n.total_bytes > 0).map(|n| n.id.0.to_string()).collect();
            Error::UnknownNode { node: id, known: known.join(", ") }
        })
    }
}

/// The folder in which a node's huge pages of 2 MB are counted and reserved.
pub(crate) fn huge_folder(node: NodeId, page_bytes: u64) -> PathBuf {
    Path::new(NODES).join(format!("node{}/hugepages/hugepages-{}kB", node.0, page_bytes >> 10))
}

/// Reads one number from a file of [`huge_folder`].
pub(crate) fn read_count(path: &Path) -> Result<u64, Error> {
    read(path)?.trim().parse().map_err(|_| damaged(path, "not a number".into()))
}

fn read_node(root: &Path, id: usize) -> Result<Node, Error> {
    let folder = root.join(format!("node{id}"));
    let node = NodeId(id as u32);
    let cpus = read_list(&folder.join("cpulist"))?;
    let (total_bytes, free_bytes) = meminfo(&read(&folder.join("meminfo"))?);
    let free_huge = [PageSize::Huge2M, PageSize::Huge1G].map(|page| {
        let bytes = page.bytes() as u64;
        (bytes, read_count(&huge_folder(node, bytes).join("free_hugepages")).unwrap_or(0))
    });
    Ok(Node { id: node, cpus, total_bytes, free_bytes, free_huge: free_huge.to_vec() })
}

/// What the kernel estimates can be allocated without swapping (`MemAvailable`, Linux 3.14), in bytes.
pub(crate) fn available(meminfo: &str) -> u64 {
    let kb = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok());
    kb.unwrap_or(0) << 10
}

/// Total and allocatable bytes from a meminfo text, the machine's or a node's (whose lines begin with `Node N`).
fn meminfo(text: &str) -> (u64, u64) {
    let kb = |name: &str| {
        text.lines()
            .find_map(|line| {
                let (head, value) = line.split_once(':')?;
                (head.split_whitespace().next_back()? == name)
                    .then(|| value.split_whitespace().next()?.parse::<u64>().ok())?
            })
            .unwrap_or(0)
    };
    let free = kb("MemFree") + kb("Active(file)") + kb("Inactive(file)") + kb("SReclaimable");
    (kb("MemTotal") << 10, free << 10)
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|e| unreadable(path, &e))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::system_file(&path.display().to_string(), error)
}

fn read_list(path: &Path) -> Result<Vec<usize>, Error> {
    parse_list(&read(path)?).map_err(|reason| damaged(path, reason))
}

fn damaged(path: &Path, reason: String) -> Error {
    Error::SystemFile {
        path: path.display().to_string(),
        reason,
        remedy: "report this with the kernel version",
    }
}

/// Parses the kernel's list format, such as `0,2-3` (Documentation/admin-guide/cputopology.rst). An empty text is an empty list.
fn parse_list(text: &str) -> Result<Vec<usize>, String> {
    let id = |s: &str| s.parse::<usize>().ok().filter(|n| *n <= MAX_ID).ok_or(format!("`{s}` is not an id"));
    let mut ids = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = match part.split_once('-') {
            Some((a, b)) => (id(a)?, id(b)?),
            None => (id(part)?, id(part)?),
        };
        if first > last {
            return Err(format!("`{part}` runs backwards"));
        }
        ids.extend(first..=last);
        if ids.len() > MAX_ID {
            return Err("too many ids".into());
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn kernel_lists() {
        assert_eq!(parse_list("0,2-3\n").unwrap(), [0, 2, 3]);
        assert_eq!(parse_list("\n").unwrap(), Vec::<usize>::new());
        for bad in ["x", "3-1", "-1", "0-99999999999", "1-2-3"] {
            assert!(parse_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn meminfo_of_a_node_and_of_the_machine() {
        let node = "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  300 kB\nNode 0 Active(file):  20 kB\nNode 0 SReclaimable: 1 kB\n";
        assert_eq!(meminfo(node), (1000 << 10, 321 << 10));
        assert_eq!(meminfo("MemTotal: 5 kB\nMemFree: 2 kB\n"), (5 << 10, 2 << 10));
        assert_eq!(meminfo("nonsense"), (0, 0));
    }

    #[test]
    #[cfg(not(miri))]
    fn this_machine_has_a_node_with_cpus_and_memory() {
        let topology = Topology::read().unwrap();
        let with_cpus = topology.nodes().iter().find(|n| !n.cpus.is_empty()).unwrap();
        assert!(with_cpus.total_bytes >= with_cpus.free_bytes && with_cpus.free_bytes > 0);
        let error = topology.node(NodeId(4242)).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("4242"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,40}") {
            let _ = parse_list(&text);
            let _ = meminfo(&text);
        }
    }
}
