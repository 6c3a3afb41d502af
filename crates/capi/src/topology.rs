//! The machine: its memory nodes, their CPUs, huge pages, speeds and distances.

use std::ffi::{CString, c_char};

use pageleap::topology::{Node, Topology};
use pageleap::{Error, NodeId};

use crate::boundary::{bad, flag, free, give, handle, list, nothing_yet, string, value, write};
use crate::status::{pageleap_status, text};

/// The machine at the moment when it was read: its nodes, their CPUs, memory and huge pages,
/// their distances, and which of them this process may use. A topology never changes; read
/// another one to see what is free now.
pub struct pageleap_topology {
    topology: Topology,
    warnings: Vec<CString>,
}

/// One memory node.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_node {
    /// sizeof(pageleap_node).
    pub size: usize,
    /// The kernel's number of the node. Numbers are sparse: a machine may have the nodes 0 and
    /// 4.
    pub id: u32,
    /// The memory tier of the node: the smaller, the faster. -1 if the kernel does not say.
    pub tier: i32,
    /// Memory in bytes; 0 for a node that has only CPUs.
    pub total_bytes: u64,
    /// Bytes that can be allocated without swapping.
    pub free_bytes: u64,
    /// How many CPUs are online; 0 for a node that has only memory.
    pub cpu_count: usize,
    /// The node itself if it has CPUs, else the nearest node with CPUs: the one that the firmware
    /// names as initiator, or else the one at the shortest distance.
    pub nearest_with_cpus: u32,
    /// Whether the cpuset of this process allows memory of the node. Also true if the cpuset is
    /// not known: pageleap_topology_knows_allowed_nodes().
    pub is_allowed: flag,
    /// Set to 0.
    pub reserved: [u8; 3],
}
grows!(pageleap_node, 48, reserved);

/// The huge pages of one size that a node has reserved.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_huge_pages {
    /// sizeof(pageleap_huge_pages).
    pub size: usize,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// How many pages the node has reserved (nr_hugepages).
    pub total: u64,
    /// How many of these are free (free_hugepages).
    pub free: u64,
    /// How many of these the kernel takes back once they are free (surplus_hugepages).
    pub surplus: u64,
}
grows!(pageleap_huge_pages, 40, surplus);

/// Bandwidth and latency of the memory of a node for its initiators, the nodes nearest to it, as
/// the firmware states them (HMAT); nothing is measured. A figure is 0 where the firmware states
/// none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_access {
    /// sizeof(pageleap_access).
    pub size: usize,
    /// Which initiators the figures apply to. 0: all devices that access memory, such as CPUs and
    /// network cards; 1: CPUs only.
    pub access_class: u32,
    /// Megabytes per second.
    pub read_bandwidth_mb_per_s: u64,
    /// Megabytes per second.
    pub write_bandwidth_mb_per_s: u64,
    /// Nanoseconds.
    pub read_latency_ns: u64,
    /// Nanoseconds.
    pub write_latency_ns: u64,
}
grows!(pageleap_access, 48, write_latency_ns);

fn node_at(topology: &Topology, index: usize) -> Result<&Node, Error> {
    let nodes = topology.nodes();
    nodes.get(index).ok_or_else(|| {
        bad("index", format!("{index} of {} nodes", nodes.len()), "use a smaller one")
    })
}

fn online(topology: &Topology, id: u32) -> Result<&Node, Error> {
    let known = || {
        let ids: Vec<String> = topology.nodes().iter().map(|node| node.id.0.to_string()).collect();
        ids.join(", ")
    };
    let found = topology.nodes().iter().find(|node| node.id.0 == id);
    found.ok_or_else(|| Error::UnknownNode { node: NodeId(id), known: known() })
}

/// Reads the machine. Free the topology with pageleap_topology_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_read(
    topology: *mut *mut pageleap_topology,
) -> pageleap_status {
    let make = || {
        let topology = Topology::read()?;
        let warnings = topology.warnings().iter().map(|warning| text(warning.as_str())).collect();
        Ok(pageleap_topology { topology, warnings })
    };
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(topology) };
    // SAFETY: forwarded to the caller.
    boundary!({ unsafe { give(topology, "topology", make) } })
}

/// Frees a topology and its texts; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_free(topology: *mut pageleap_topology) {
    // SAFETY: forwarded to the caller.
    unsafe { free(topology) };
}

/// How many nodes are online; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_node_count(topology: *const pageleap_topology) -> usize {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(topology, "topology") }?.topology.nodes().len()))
}

/// Fills in `node` with the node at an index, 0 to pageleap_topology_node_count() - 1, in the
/// order of the nodes' numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_node(
    topology: *const pageleap_topology,
    index: usize,
    node: *mut pageleap_node,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let topology = &unsafe { handle(topology, "topology") }?.topology;
        let found = node_at(topology, index)?;
        let of = pageleap_node {
            size: 0,
            id: found.id.0,
            tier: found.tier.map_or(-1, |tier| tier as i32),
            total_bytes: found.total_bytes,
            free_bytes: found.free_bytes,
            cpu_count: found.cpus.len(),
            nearest_with_cpus: topology.nearest_with_cpus(found.id).0,
            is_allowed: topology.is_allowed(found.id).into(),
            reserved: [0; 3],
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(node, of) }
    })
}

/// The online CPUs of a node: writes the first `capacity` of them to `cpus`, and their number to
/// `count`, which may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_cpus(
    topology: *const pageleap_topology,
    node_id: u32,
    cpus: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let node = online(&unsafe { handle(topology, "topology") }?.topology, node_id)?;
        let all: Vec<u32> = node.cpus.iter().map(|cpu| *cpu as u32).collect();
        // SAFETY: forwarded to the caller.
        unsafe { list(&all, cpus, capacity, count, "cpus") }
    })
}

/// Fills in the huge pages of `page_bytes` that a node has reserved. All counts are 0 if the
/// node has none of that size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_huge_pages(
    topology: *const pageleap_topology,
    node_id: u32,
    page_bytes: u64,
    huge_pages: *mut pageleap_huge_pages,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let node = online(&unsafe { handle(topology, "topology") }?.topology, node_id)?;
        let of = node.huge_pages.iter().find(|pages| pages.page_bytes == page_bytes);
        let [total, free, surplus] = of.map_or([0; 3], |of| [of.total, of.free, of.surplus]);
        // SAFETY: forwarded to the caller.
        unsafe {
            write(huge_pages, pageleap_huge_pages { size: 0, page_bytes, total, free, surplus })
        }
    })
}

/// Fills in the bandwidth and latency of a node's memory for one access class, as the firmware
/// states them. All figures are 0 if it states none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_access(
    topology: *const pageleap_topology,
    node_id: u32,
    access_class: u32,
    access: *mut pageleap_access,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let node = online(&unsafe { handle(topology, "topology") }?.topology, node_id)?;
        let of = node
            .access
            .iter()
            .find(|access| access.class == access_class)
            .cloned()
            .unwrap_or_default();
        let figures = pageleap_access {
            size: 0,
            access_class,
            read_bandwidth_mb_per_s: of.read_bandwidth_mb_per_s.unwrap_or(0),
            write_bandwidth_mb_per_s: of.write_bandwidth_mb_per_s.unwrap_or(0),
            read_latency_ns: of.read_latency_ns.unwrap_or(0),
            write_latency_ns: of.write_latency_ns.unwrap_or(0),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(access, figures) }
    })
}

/// The initiators of a node's memory, to which the figures of pageleap_topology_access() apply:
/// writes the first `capacity` of them to `initiators`, and their number to `count`, which may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_initiators(
    topology: *const pageleap_topology,
    node_id: u32,
    access_class: u32,
    initiators: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let node = online(&unsafe { handle(topology, "topology") }?.topology, node_id)?;
        let of = node.access.iter().find(|access| access.class == access_class);
        let all: Vec<u32> = of.iter().flat_map(|of| &of.initiators).map(|node| node.0).collect();
        // SAFETY: forwarded to the caller.
        unsafe { list(&all, initiators, capacity, count, "initiators") }
    })
}

/// The distance of the firmware (SLIT): the relative cost of memory on node `to` for CPUs of node
/// `from`. 10 is that of the same node, 20 twice as much; it is never a latency. 0 if a node is not
/// online, if the kernel does not say, or if the topology is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_distance(
    topology: *const pageleap_topology,
    from: u32,
    to: u32,
) -> u32 {
    value(0, || {
        // SAFETY: forwarded to the caller.
        let topology = &unsafe { handle(topology, "topology") }?.topology;
        Ok(topology.distance(NodeId(from), NodeId(to)).unwrap_or(0))
    })
}

/// The nodes that a text in numactl's notation names, such as "0,2-3", "all", "!1" or "+0":
/// writes the numbers of the first `capacity` of them to `nodes`, and how many the text names to
/// `count`, which may be NULL. A text that names no node, or one that does not exist, gives
/// PAGELEAP_BAD_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_parse_nodes(
    topology: *const pageleap_topology,
    text: *const c_char,
    nodes: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let (topology, text) = unsafe { (handle(topology, "topology")?, string(text, "text")?) };
        let found: Vec<u32> =
            topology.topology.parse_nodes(text, None)?.iter().map(|node| node.0).collect();
        // SAFETY: forwarded to the caller.
        unsafe { list(&found, nodes, capacity, count, "nodes") }
    })
}

/// Whether the nodes that the cpuset of this process allows are known. If not, all nodes count as
/// allowed. False for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_knows_allowed_nodes(
    topology: *const pageleap_topology,
) -> bool {
    value(false, || {
        // SAFETY: forwarded to the caller.
        Ok(unsafe { handle(topology, "topology") }?.topology.knows_allowed_nodes())
    })
}

/// Whether the cpuset of this process allows memory of a node. False for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_is_allowed(
    topology: *const pageleap_topology,
    node_id: u32,
) -> bool {
    value(false, || {
        // SAFETY: forwarded to the caller.
        Ok(unsafe { handle(topology, "topology") }?.topology.is_allowed(NodeId(node_id)))
    })
}

/// One warning: a sentence about a file of the kernel that is damaged or cannot be read, and the
/// facts that are missing because of it. `index` counts from 0; NULL beyond the last. Valid until
/// the topology is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_topology_warning(
    topology: *const pageleap_topology,
    index: usize,
) -> *const c_char {
    value(std::ptr::null(), || {
        // SAFETY: forwarded to the caller.
        let warnings = &unsafe { handle(topology, "topology") }?.warnings;
        Ok(warnings.get(index).map_or(std::ptr::null(), |warning| warning.as_ptr()))
    })
}
