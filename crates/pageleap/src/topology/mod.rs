//! The machine as the kernel describes it: memory nodes, their CPUs, memory and huge pages, how far
//! they are from each other, and which of it this process may use.
//!
//! Everything comes from files of sysfs and procfs, read by [`SysFiles`]. What a leap cannot do
//! without (which nodes are online, their CPUs and their memory) must be there and make sense. The
//! rest (distances, tiers, firmware's access classes, the cpuset) is left open where it is missing
//! or damaged, and [`Topology::warnings`] says what was left out and why; files that older kernels
//! do not have are no reason for a warning.

use std::path::{Path, PathBuf};

use pageleap_sys::MAX_NODES;

use crate::error::Error;
use crate::units::NodeId;

mod files;
mod formats;
mod nodestring;
mod read;

pub use files::SysFiles;
pub(crate) use files::escaped;
pub use formats::id_list;
pub(crate) use formats::{available, status_value};

/// Where the nodes are described.
const NODES: &str = "sys/devices/system/node";
/// Where huge pages are counted for all nodes together.
const HUGE_PAGES: &str = "sys/kernel/mm/hugepages";

/// One memory node.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Its online CPUs; empty for memory without any.
    pub cpus: Vec<usize>,
    /// Its memory in bytes; 0 for CPUs without any.
    pub total_bytes: u64,
    /// What can be allocated without swapping: free pages, clean file pages and reclaimable slab,
    /// in bytes.
    pub free_bytes: u64,
    /// Its huge pages, by size, the smallest first. Empty if the kernel has none, and for nodes
    /// without memory.
    pub huge_pages: Vec<HugePages>,
    /// Its memory tier (Linux 6.1): the smaller the number, the faster the memory. `None` if the
    /// kernel does not say.
    pub tier: Option<u32>,
    /// How fast its memory is from where it is fastest, as the firmware says (HMAT). Empty if it
    /// says nothing.
    pub access: Vec<Access>,
}

impl Node {
    /// How many huge pages of `page_bytes` are free; 0 if there are none of this size.
    pub fn free_huge(&self, page_bytes: u64) -> u64 {
        self.huge_pages
            .iter()
            .find(|pages| pages.page_bytes == page_bytes)
            .map_or(0, |pages| pages.free)
    }
}

/// The huge pages of one size that a node has reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Bytes of one page.
    pub page_bytes: u64,
    /// How many there are (`nr_hugepages`).
    pub total: u64,
    /// How many of them are free (`free_hugepages`).
    pub free: u64,
    /// How many of them go away when they are freed, because they exceed the number reserved
    /// (`surplus_hugepages`).
    pub surplus: u64,
}

/// How fast the memory of a node is for the nodes nearest to it, as the firmware says
/// (Documentation/admin-guide/mm/numaperf.rst). Not measured; `None` if it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// 0: for whatever can access memory, such as CPUs and network cards (Linux 5.2); 1: for CPUs
    /// (Linux 5.10).
    pub class: u32,
    /// The nodes from which it is so fast.
    pub initiators: Vec<NodeId>,
    /// Megabytes per second.
    pub read_bandwidth_mb_per_s: Option<u64>,
    /// Megabytes per second.
    pub write_bandwidth_mb_per_s: Option<u64>,
    /// Nanoseconds.
    pub read_latency_ns: Option<u64>,
    /// Nanoseconds.
    pub write_latency_ns: Option<u64>,
}

/// The machine as it was when it was read.
#[derive(Clone, Debug)]
pub struct Topology {
    nodes: Vec<Node>,
    possible: Vec<NodeId>,
    /// Per node of `nodes`, its distance to each of them; empty where the kernel does not say.
    distances: Vec<Vec<u32>>,
    /// What the process may use; `None` if the kernel does not say.
    mems_allowed: Option<Vec<NodeId>>,
    cpus_allowed: Option<Vec<usize>>,
    warnings: Vec<String>,
}

impl Topology {
    /// Reads this machine. A kernel without NUMA support counts as one node with all CPUs.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if nodes, CPUs or memory cannot be read or make no sense.
    pub fn read() -> Result<Topology, Error> {
        Topology::read_from(&SysFiles::host())
    }

    /// Reads the machine that `files` describe. The process whose cpuset counts is the `proc/self`
    /// there.
    ///
    /// # Errors
    /// As for [`read`](Topology::read).
    pub fn read_from(files: &SysFiles) -> Result<Topology, Error> {
        read::topology(files)
    }

    /// Reads one node of this machine anew, as [`node`](Topology::node) gives it, but without tier
    /// and access classes: what changes while memory is allocated, without reading everything else.
    pub(crate) fn node_now(id: NodeId) -> Result<Node, Error> {
        let files = SysFiles::host();
        match read::node_now(&files, id)? {
            Some(node) if node.total_bytes > 0 => Ok(node),
            _ => Topology::read_from(&files)?.node(id).cloned(),
        }
    }

    /// All online nodes, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node with number `id`, if it is online and has memory.
    ///
    /// # Errors
    /// [`Error::UnknownNode`] if not.
    pub fn node(&self, id: NodeId) -> Result<&Node, Error> {
        self.nodes.iter().find(|n| n.id == id && n.total_bytes > 0).ok_or_else(|| {
            let known: Vec<String> = self
                .nodes
                .iter()
                .filter(|n| n.total_bytes > 0)
                .map(|n| n.id.0.to_string())
                .collect();
            Error::UnknownNode { node: id, known: known.join(", ") }
        })
    }

    /// The nodes that could become online, by number.
    pub fn possible_nodes(&self) -> &[NodeId] {
        &self.possible
    }

    /// The nodes that this process may take memory from: online, with memory, and in its cpuset
    /// (`Mems_allowed_list`, which cgroups and `cpuset(7)` set).
    pub fn allowed_nodes(&self) -> Vec<NodeId> {
        let with_memory = self.nodes.iter().filter(|node| node.total_bytes > 0).map(|node| node.id);
        with_memory.filter(|node| self.is_allowed(*node)).collect()
    }

    /// Whether the node is in the cpuset of this process. A kernel without cpusets has all nodes in
    /// it.
    pub fn is_allowed(&self, node: NodeId) -> bool {
        self.mems_allowed.as_ref().is_none_or(|allowed| allowed.binary_search(&node).is_ok())
    }

    /// The CPUs that this process may run on (`Cpus_allowed_list`: its cpuset and its affinity).
    /// All that are online, if the kernel does not say.
    pub fn allowed_cpus(&self) -> Vec<usize> {
        let mut cpus: Vec<usize> =
            self.nodes.iter().flat_map(|node| node.cpus.iter().copied()).collect();
        if let Some(allowed) = &self.cpus_allowed {
            cpus.retain(|cpu| allowed.binary_search(cpu).is_ok());
        }
        cpus.sort_unstable();
        cpus
    }

    /// The firmware's relative cost of memory on `to` for CPUs of `from`: 10 on the same node, 20
    /// for twice that; never a latency. `None` if one of them is not online, or the kernel does not
    /// say.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let index = |id| self.nodes.iter().position(|node| node.id == id);
        self.distances.get(index(from)?)?.get(index(to)?).copied()
    }

    /// The node itself if it has CPUs, else the nearest that has, by distance and then by number.
    /// The node itself if there is none at all.
    pub fn nearest_with_cpus(&self, node: NodeId) -> NodeId {
        let cost =
            |to: NodeId| if to == node { 0 } else { self.distance(node, to).unwrap_or(u32::MAX) };
        let with_cpus = self.nodes.iter().filter(|node| !node.cpus.is_empty()).map(|node| node.id);
        with_cpus.min_by_key(|to| (cost(*to), *to)).unwrap_or(node)
    }

    /// What was left out because its file is damaged or cannot be read, in sentences.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Whether the cpuset of the calling thread lets it have memory of a node now. A set that cannot be
/// read allows everything.
pub(crate) fn allows_node(node: u32) -> bool {
    let status = SysFiles::host().text("proc/thread-self/status").unwrap_or_default();
    let allowed = formats::status_value(&status, "Mems_allowed_list")
        .and_then(|list| formats::parse_list(list, MAX_NODES).ok());
    allowed.is_none_or(|nodes| nodes.contains(&(node as usize)))
}

/// The folder in which this machine's huge pages of `page_bytes` of a node are counted and
/// reserved.
pub(crate) fn huge_folder(node: NodeId, page_bytes: u64) -> PathBuf {
    let root = Path::new("/");
    let folder = root.join(read::huge_folder(root.join(NODES).exists(), node));
    folder.join(format!("hugepages-{}kB", page_bytes >> 10))
}

/// Reads one number from a file of [`huge_folder`].
pub(crate) fn read_count(path: &Path) -> Result<u64, Error> {
    let path = path.to_string_lossy();
    SysFiles::host().number(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these nodes (number, CPUs, bytes), in a cpuset with the nodes of `allowed`.
    pub(super) fn machine(nodes: &[(u32, &[usize], u64)], allowed: Option<&[u32]>) -> Topology {
        let node = |(id, cpus, total_bytes): &(u32, &[usize], u64)| Node {
            id: NodeId(*id),
            cpus: cpus.to_vec(),
            total_bytes: *total_bytes,
            free_bytes: *total_bytes / 2,
            huge_pages: Vec::new(),
            tier: None,
            access: Vec::new(),
        };
        Topology {
            nodes: nodes.iter().map(node).collect(),
            possible: nodes.iter().map(|(id, ..)| NodeId(*id)).collect(),
            distances: vec![Vec::new(); nodes.len()],
            mems_allowed: allowed.map(|allowed| allowed.iter().copied().map(NodeId).collect()),
            cpus_allowed: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn the_nearest_node_with_cpus() {
        let mut machine = machine(&[(0, &[0], 1), (2, &[1], 1), (3, &[], 1), (4, &[2], 0)], None);
        let nearest = |machine: &Topology, node| machine.nearest_with_cpus(NodeId(node)).0;
        // Without distances the first one, but a node with CPUs is always nearest to itself.
        assert_eq!([0, 2, 3, 4, 9].map(|node| nearest(&machine, node)), [0, 2, 0, 4, 0]);
        machine.distances[2] = vec![30, 20, 10, 20];
        assert_eq!(nearest(&machine, 3), 2, "ties go to the lower number");
        machine.distances[2] = vec![30, 30, 10, 20];
        assert_eq!(nearest(&machine, 3), 4);
        // Firmware is known to give a node more than 10 to itself.
        machine.distances[1] = vec![10, 40, 10, 10];
        assert_eq!(nearest(&machine, 2), 2);
        machine.nodes.iter_mut().for_each(|node| node.cpus.clear());
        assert_eq!(nearest(&machine, 3), 3);
    }

    #[test]
    fn distances_belong_to_ids_and_not_to_places() {
        let mut machine = machine(&[(1, &[0], 1), (5, &[1], 1)], None);
        machine.distances = vec![vec![10, 21], Vec::new()];
        let distance = |from, to| machine.distance(NodeId(from), NodeId(to));
        assert_eq!(
            [distance(1, 1), distance(1, 5), distance(5, 1), distance(0, 1)],
            [Some(10), Some(21), None, None]
        );
    }

    #[test]
    fn a_node_is_known_if_it_has_memory() {
        let machine = machine(&[(0, &[0], 1), (1, &[1], 0), (4, &[], 1)], Some(&[1, 4]));
        assert!(machine.node(NodeId(4)).is_ok());
        let error = machine.node(NodeId(1)).unwrap_err();
        assert!(
            error.is_usage() && error.to_string().ends_with("the nodes with memory are 0, 4"),
            "{error}"
        );
        assert_eq!(machine.allowed_nodes(), [NodeId(4)]);
        assert_eq!(machine.allowed_cpus(), [0, 1]);
    }

    #[test]
    #[cfg(not(miri))]
    fn this_machine_has_a_node_with_cpus_and_memory() {
        let topology = Topology::read().unwrap();
        let with_cpus = topology.nodes().iter().find(|n| !n.cpus.is_empty()).unwrap();
        assert!(with_cpus.total_bytes >= with_cpus.free_bytes && with_cpus.free_bytes > 0);
        assert_eq!(topology.nearest_with_cpus(with_cpus.id), with_cpus.id);
        let error = topology.node(NodeId(4242)).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("4242"), "{error}");
        assert!(Topology::node_now(NodeId(4242)).unwrap_err().is_usage());
        let first = topology.allowed_nodes()[0];
        let now = Topology::node_now(first).unwrap();
        let then = topology.node(first).unwrap();
        assert_eq!((now.id, &now.cpus, now.total_bytes), (then.id, &then.cpus, then.total_bytes));
    }
}
