//! The machine as the kernel describes it: memory nodes, their CPUs, memory and huge pages, the
//! distances between them, and the nodes that this process may use.
//!
//! All of it comes from files of sysfs and procfs ([`SysFiles`]). A leap needs the online nodes,
//! their CPUs and their memory, so those must be present and make sense. The rest (distances,
//! tiers, the firmware's access classes, the cpuset) may be missing or damaged.
//! [`Topology::warnings`] names the damaged parts with the reason. A file that older kernels do not
//! have causes no warning.

use std::path::{Path, PathBuf};

use pageleap_sys::MAX_NODES;

use self::cpuset::Allowed;
use crate::error::Error;
use crate::sync::{Fresh, monotonic_ns};
use crate::units::NodeId;

mod caches;
mod cpuset;
mod effort;
mod files;
mod formats;
mod nodestring;
mod read;
mod reading;
mod shown;
mod walk;

pub use caches::{Cache, data_caches};
pub use cpuset::file_of_nodes;
pub use files::SysFiles;
pub use formats::id_list;
pub(crate) use formats::{MountLine, available, parse_list, status_value, unescaped};
pub use shown::escaped;

/// The directory that describes the nodes.
const NODES: &str = "sys/devices/system/node";
/// The directory with the counts of huge pages of the whole machine.
const HUGE_PAGES: &str = "sys/kernel/mm/hugepages";

/// One memory node.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Node {
    /// The number of the node.
    pub id: NodeId,
    /// The online CPUs of the node. Empty for a node that has only memory.
    pub cpus: Vec<usize>,
    /// The memory of the node in bytes. 0 for a node that has only CPUs.
    pub total_bytes: u64,
    /// Bytes that can be allocated without swapping: free pages, clean file pages and reclaimable
    /// slab.
    pub free_bytes: u64,
    /// The huge pages of the node by size, the smallest size first. Empty if the kernel has no huge
    /// pages, and for nodes without memory.
    pub huge_pages: Vec<HugePages>,
    /// The memory tier of the node (Linux 6.1). A smaller number means faster memory. `None` if the
    /// kernel does not say.
    pub tier: Option<u32>,
    /// The speed of the node's memory for its nearest initiators, by access class, as the firmware
    /// says (HMAT). Empty if the firmware says nothing.
    pub access: Vec<Access>,
    /// The caches in front of the node's memory, as the firmware says (HMAT), the one nearest to
    /// the memory first. Empty if there are none.
    pub side_caches: Vec<SideCache>,
}

impl Node {
    /// The number of free huge pages of `page_bytes`; 0 if the node has no pages of this size, or
    /// their number is not known.
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
    /// Number of pages (`nr_hugepages`).
    pub total: u64,
    /// Number of free pages (`free_hugepages`).
    pub free: u64,
    /// Number of surplus pages (`surplus_hugepages`): pages beyond the reserved number, which go
    /// away when they are freed.
    pub surplus: u64,
}

/// The speed of a node's memory for its nearest initiators, as the firmware says
/// (Documentation/admin-guide/mm/numaperf.rst). These values are not measured. `None` stands for a
/// value that the firmware does not give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The access class: which initiators the values apply to. 0: any device that accesses memory,
    /// such as CPUs and network cards (Linux 5.2). 1: CPUs only (Linux 5.10).
    pub class: u32,
    /// The initiators: the nodes to which the values apply.
    pub initiators: Vec<NodeId>,
    /// Read bandwidth in megabytes per second.
    pub read_bandwidth_mb_per_s: Option<u64>,
    /// Write bandwidth in megabytes per second.
    pub write_bandwidth_mb_per_s: Option<u64>,
    /// Read latency in nanoseconds.
    pub read_latency_ns: Option<u64>,
    /// Write latency in nanoseconds.
    pub write_latency_ns: Option<u64>,
}

/// A cache in front of the memory of a node: accesses to this memory go through it
/// (Documentation/admin-guide/mm/numaperf.rst, Linux 5.2). `None` stands for a value that the
/// kernel does not give.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SideCache {
    /// 1 is nearest to the memory, larger numbers are nearer to the CPUs.
    pub level: u32,
    /// Bytes of the cache.
    pub bytes: u64,
    /// Bytes of one line.
    pub line_bytes: Option<u64>,
    /// Whether each address of the memory has one place in the cache.
    pub is_direct_mapped: Option<bool>,
    /// Whether the cache is write-back, and not write-through.
    pub writes_back: Option<bool>,
}

/// The machine as it was at the time of reading.
#[derive(Clone, Debug)]
pub struct Topology {
    nodes: Vec<Node>,
    possible: Vec<NodeId>,
    /// For each node of `nodes`, its distances to all of them in order. Empty if the kernel does
    /// not say.
    distances: Vec<Vec<u32>>,
    /// The nodes and CPUs that the process may use.
    allowed: Allowed,
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

    /// Reads the machine that `files` describe. The cpuset is that of `proc/self` in `files`.
    ///
    /// # Errors
    /// As for [`read`](Topology::read).
    pub fn read_from(files: &SysFiles) -> Result<Topology, Error> {
        read::topology(files)
    }

    /// Reads one node of this machine again, because its memory changes while it is allocated. The
    /// result is that of [`node`](Topology::node), without tier and access classes. Reading the
    /// whole machine would take longer.
    pub(crate) fn node_now(id: NodeId) -> Result<Node, Error> {
        let files = SysFiles::host();
        match read::node_now(&files, id)? {
            Some(node) if node.total_bytes > 0 => Ok(node),
            _ => Topology::read_from(&files)?.node(id).cloned(),
        }
    }

    /// The CPUs of one node of this machine at this moment ([`Node::cpus`]). Reads one file where the
    /// kernel shows nodes.
    ///
    /// # Errors
    /// As for [`node`](Topology::node).
    pub(crate) fn cpus_now(id: NodeId) -> Result<Vec<usize>, Error> {
        static LAST: Fresh<(NodeId, Vec<usize>)> = Fresh::new();
        let of_this = |(node, cpus): &(NodeId, Vec<usize>)| (*node == id).then(|| cpus.clone());
        if let Some(cpus) = LAST.get(of_this).flatten() {
            return Ok(cpus);
        }
        let now_ns = monotonic_ns();
        // A plain read takes a fiftieth of the time of `SysFiles`, which serves as fallback.
        let list = std::fs::read_to_string(format!("/{NODES}/node{}/cpulist", id.0));
        let cpus =
            match list.ok().and_then(|list| formats::parse_list(&list, formats::MAX_CPUS).ok()) {
                Some(cpus) => cpus,
                None => Topology::node_now(id)?.cpus,
            };
        LAST.put((id, cpus.clone()), now_ns);
        Ok(cpus)
    }

    /// The free bytes of one node of this machine at this moment ([`Node::free_bytes`]). Reads one
    /// file.
    pub(crate) fn free_now(id: NodeId) -> Result<u64, Error> {
        match read::free_now(&SysFiles::host(), id)? {
            Some(free_bytes) => Ok(free_bytes),
            // The node has gone, or the kernel has no nodes.
            None => Ok(Topology::node_now(id)?.free_bytes),
        }
    }

    /// All online nodes, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node with number `id`, if it is online and has memory.
    ///
    /// # Errors
    /// [`Error::UnknownNode`] if the node is offline, or has no memory.
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

    /// The nodes that can become online, by number.
    pub fn possible_nodes(&self) -> &[NodeId] {
        &self.possible
    }

    /// The nodes from which this process may take memory: online nodes with memory in its cpuset
    /// (`Mems_allowed_list`, which cgroups and `cpuset(7)` set). All online nodes with memory if
    /// its cpuset is not [known](Topology::knows_allowed_nodes).
    pub fn allowed_nodes(&self) -> Vec<NodeId> {
        let with_memory = self.nodes.iter().filter(|node| node.total_bytes > 0).map(|node| node.id);
        with_memory.filter(|node| self.is_allowed(*node)).collect()
    }

    /// Whether the cpuset of this process contains the node. Without cpusets in the kernel the
    /// answer is always `true`, and also if the cpuset is not
    /// [known](Topology::knows_allowed_nodes).
    pub fn is_allowed(&self, node: NodeId) -> bool {
        self.allowed.mems.as_ref().is_none_or(|allowed| allowed.binary_search(&node).is_ok())
    }

    /// Whether it is known which nodes this process may use: its status or the files of its cpuset
    /// say so, or the kernel has no cpusets.
    pub fn knows_allowed_nodes(&self) -> bool {
        self.allowed.mems.is_some() || self.allowed.has_no_cpusets
    }

    /// The CPUs on which this process may run (`Cpus_allowed_list`: its cpuset and its affinity).
    /// All online CPUs if that is not [known](Topology::knows_allowed_cpus).
    pub fn allowed_cpus(&self) -> Vec<usize> {
        let mut cpus = self.online_cpus();
        if let Some(allowed) = &self.allowed.cpus {
            cpus.retain(|cpu| allowed.binary_search(cpu).is_ok());
        }
        cpus
    }

    /// Whether it is known on which CPUs this process may run.
    pub fn knows_allowed_cpus(&self) -> bool {
        self.allowed.cpus.is_some()
    }

    /// The online CPUs of all nodes, each of them once. Several nodes may have the same CPUs
    /// (`numa=fake`).
    pub fn online_cpus(&self) -> Vec<usize> {
        let mut cpus: Vec<usize> =
            self.nodes.iter().flat_map(|node| node.cpus.iter().copied()).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// The firmware's relative cost of memory on `to` for CPUs of `from`: 10 on the same node, 20
    /// for twice that cost. Never a latency. `None` if one of the nodes is not online, or if the
    /// kernel does not say.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let index = |id| self.nodes.iter().position(|node| node.id == id);
        self.distances.get(index(from)?)?.get(index(to)?).copied()
    }

    /// The node whose CPUs are nearest to `node`: `node` itself if it has CPUs, otherwise the
    /// nearest node with CPUs. The nearest is the best initiator that the firmware names (HMAT), or
    /// without one the node at the shortest distance. Among several initiators the distance
    /// decides, and among equal distances the lower number. If no node has CPUs, it is `node`
    /// itself.
    pub fn nearest_with_cpus(&self, node: NodeId) -> NodeId {
        let access = self.nodes.iter().find(|known| known.id == node).map(|known| &known.access);
        // Class 1 (CPUs) comes before class 0 (all devices).
        let classes = access.into_iter().flatten().rev().map(|access| &access.initiators);
        let rank = |to: NodeId| {
            let named = classes.clone().position(|initiators| initiators.contains(&to));
            let distance = self.distance(node, to).unwrap_or(u32::MAX);
            (to != node, named.unwrap_or(usize::MAX), distance, to)
        };
        let with_cpus = self.nodes.iter().filter(|node| !node.cpus.is_empty()).map(|node| node.id);
        with_cpus.min_by_key(|to| rank(*to)).unwrap_or(node)
    }

    /// One sentence for each part that was left out because its file is damaged or cannot be read.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Whether the cpuset of the calling thread contains a node at this moment. If the cpuset cannot be
/// read, the answer is `true`.
pub(crate) fn allows_node(node: u32) -> bool {
    pageleap_sys::is_node_allowed(node).unwrap_or_else(|_| allows_node_by_status(node))
}

/// The same from `/proc/self/status`, where a seccomp filter refuses the call.
fn allows_node_by_status(node: u32) -> bool {
    let status = SysFiles::host().text("proc/self/status").unwrap_or_default();
    let allowed = formats::status_value(&status, "Mems_allowed_list")
        .and_then(|list| formats::parse_list(list, MAX_NODES).ok());
    allowed.is_none_or(|nodes| nodes.contains(&(node as usize)))
}

/// Whether the kernel has NUMA support, and so shows nodes.
pub fn has_nodes(files: &SysFiles) -> bool {
    read::has_nodes(files)
}

/// The directory of this machine that counts and reserves the huge pages of `page_bytes` on a node.
pub(crate) fn huge_page_directory(node: NodeId, page_bytes: u64) -> PathBuf {
    let root = Path::new("/");
    let directory = root.join(read::huge_page_directory(has_nodes(&SysFiles::host()), node));
    directory.join(format!("hugepages-{}kB", page_bytes >> 10))
}

/// How many huge pages of `page_bytes` are free on all nodes and not reserved by mappings that have
/// not touched them yet (`resv_hugepages`, Documentation/admin-guide/mm/hugetlbpage.rst). The kernel
/// counts reservations for the whole machine only. `None` if it does not say.
pub fn unreserved_huge_pages(files: &SysFiles, page_bytes: u64) -> Option<u64> {
    let folder = format!("{HUGE_PAGES}/hugepages-{}kB", page_bytes >> 10);
    let count = |name: &str| files.number(&format!("{folder}/{name}")).ok();
    Some(count("free_hugepages")?.saturating_sub(count("resv_hugepages")?))
}

/// The page tables that lie on a node, of all processes together, as the kernel counts them.
///
/// Each CPU counts for itself first, so the figures may be some pages per CPU behind for up to a
/// second, or until root reads `/proc/sys/vm/stat_refresh`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodePageTables {
    /// The node.
    pub node: NodeId,
    /// Bytes of page tables (`PageTables:` in its `meminfo`): pages of PTEs and PMDs on Linux 6.1,
    /// and of PUDs too on Linux 6.12.
    pub bytes: u64,
    /// Bytes of page tables of virtual machines, and of devices on later kernels (`SecPageTables:`,
    /// Linux 6.1); `None` if the kernel does not count them.
    pub secondary_bytes: Option<u64>,
}

/// The page tables on each online node, by number. A kernel without NUMA support counts as one node.
///
/// # Errors
/// [`Error::SystemFile`] if a file cannot be read, or lacks `PageTables`.
pub fn page_tables(files: &SysFiles) -> Result<Vec<NodePageTables>, Error> {
    read::page_tables(files)
}

/// Reads one number from a file in [`huge_page_directory`].
pub(crate) fn read_count(path: &Path) -> Result<u64, Error> {
    let path = path.to_string_lossy();
    SysFiles::host().number(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these nodes (number, CPUs, bytes). The cpuset contains the nodes of
    /// `allowed`.
    pub(super) fn machine(nodes: &[(u32, &[usize], u64)], allowed: Option<&[u32]>) -> Topology {
        let node = |(id, cpus, total_bytes): &(u32, &[usize], u64)| Node {
            id: NodeId(*id),
            cpus: cpus.to_vec(),
            total_bytes: *total_bytes,
            free_bytes: *total_bytes / 2,
            huge_pages: Vec::new(),
            tier: None,
            access: Vec::new(),
            side_caches: Vec::new(),
        };
        let mems: Option<Vec<NodeId>> =
            allowed.map(|allowed| allowed.iter().copied().map(NodeId).collect());
        Topology {
            nodes: nodes.iter().map(node).collect(),
            possible: nodes.iter().map(|(id, ..)| NodeId(*id)).collect(),
            distances: vec![Vec::new(); nodes.len()],
            allowed: Allowed { mems, ..Allowed::default() },
            warnings: Vec::new(),
        }
    }

    #[test]
    fn the_nearest_node_with_cpus_is_found_by_distance_then_number() {
        let mut machine = machine(&[(0, &[0], 1), (2, &[1], 1), (3, &[], 1), (4, &[2], 0)], None);
        let nearest = |machine: &Topology, node| machine.nearest_with_cpus(NodeId(node)).0;
        // Without distances the first node is nearest, but a node with CPUs is always nearest to
        // itself.
        assert_eq!([0, 2, 3, 4, 9].map(|node| nearest(&machine, node)), [0, 2, 0, 4, 0]);
        machine.distances[2] = vec![30, 20, 10, 20];
        assert_eq!(nearest(&machine, 3), 2, "ties go to the lower number");
        machine.distances[2] = vec![30, 30, 10, 20];
        assert_eq!(nearest(&machine, 3), 4);
        // Some firmware gives a node a distance above 10 to itself.
        machine.distances[1] = vec![10, 40, 10, 10];
        assert_eq!(nearest(&machine, 2), 2);
        machine.nodes.iter_mut().for_each(|node| node.cpus.clear());
        assert_eq!(nearest(&machine, 3), 3);
    }

    #[test]
    fn the_firmware_names_the_nearest_nodes_before_distances_do() {
        let mut machine = machine(&[(0, &[0], 1), (1, &[1], 1), (2, &[2], 1), (3, &[], 1)], None);
        machine.distances = vec![vec![20; 4]; 4];
        let access = |class, initiators: &[u32]| Access {
            class,
            initiators: initiators.iter().copied().map(NodeId).collect(),
            ..Access::default()
        };
        machine.nodes[3].access = vec![access(0, &[2])];
        assert_eq!(machine.nearest_with_cpus(NodeId(3)), NodeId(2));
        // The class of CPUs comes before that of all devices.
        machine.nodes[3].access = vec![access(0, &[2]), access(1, &[1])];
        assert_eq!(machine.nearest_with_cpus(NodeId(3)), NodeId(1));
        // Among several initiators the distance decides, and then the number.
        machine.nodes[3].access = vec![access(1, &[1, 2])];
        assert_eq!(machine.nearest_with_cpus(NodeId(3)), NodeId(1));
        machine.distances[3] = vec![15, 30, 20, 10];
        assert_eq!(machine.nearest_with_cpus(NodeId(3)), NodeId(2));
        // An initiator may be a device without CPUs, or a node that is offline.
        machine.nodes[3].access = vec![access(0, &[3]), access(1, &[7])];
        assert_eq!(machine.nearest_with_cpus(NodeId(3)), NodeId(0));
        // A node with CPUs is nearest to itself, even if the firmware names another one.
        machine.nodes[0].access = vec![access(1, &[2])];
        assert_eq!(machine.nearest_with_cpus(NodeId(0)), NodeId(0));
    }

    #[test]
    fn distances_belong_to_node_ids_and_not_to_positions() {
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
            error.is_usage()
                && error.to_string().ends_with("use one of the nodes with memory: 0, 4"),
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
        assert!((1..=then.total_bytes).contains(&Topology::free_now(first).unwrap()));
        assert!(Topology::free_now(NodeId(4242)).unwrap_err().is_usage());
    }
}
