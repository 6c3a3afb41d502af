//! The machine as one JSON object.

use std::collections::BTreeMap;

use pageleap::NodeId;
use pageleap::topology::{Node, Topology};
use serde::Serialize;

use super::measure::Measured;
use super::measured::JsonMeasured;

/// The object of `--json`. Sizes are in bytes. Nodes and CPUs appear as their numbers.
#[derive(Serialize)]
pub struct Machine<'a> {
    /// The online nodes, or those of `--nodes`, by number.
    nodes: Vec<JsonNode<'a>>,
    /// Nodes that could become online.
    possible_nodes: Vec<u32>,
    /// Nodes that this process may take memory from: they have memory and are in its cpuset. null if
    /// its cpuset is not known.
    allowed_nodes: Option<Vec<u32>>,
    /// CPUs that the cpuset and the affinity of this process allow; null if that is not known.
    allowed_cpus: Option<Vec<usize>>,
    /// Sentences about facts that the output leaves out, because their file is damaged or cannot be
    /// read.
    warnings: &'a [String],
    /// Latency and bandwidth; only with `--measure`.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<JsonMeasured<'a>>,
}

/// One node.
#[derive(Serialize)]
struct JsonNode<'a> {
    /// Its number.
    id: u32,
    /// Its online CPUs. Emulated nodes (`numa=fake`) may share them.
    cpus: &'a [usize],
    /// Its memory; 0 for a node without memory.
    total_bytes: u64,
    /// Memory that can be allocated without swapping.
    free_bytes: u64,
    /// Reserved huge pages, the smallest size first.
    huge_pages: Vec<JsonHugePages>,
    /// Memory tier, smaller is faster; null if the kernel reports no tiers.
    tier: Option<u32>,
    /// Whether the node is in the cpuset of this process; null if its cpuset is not known.
    in_cpuset: Option<bool>,
    /// The node itself if it has CPUs, else the nearest node with CPUs: an initiator that the
    /// firmware names, or the one with the shortest distance.
    nearest_with_cpus: u32,
    /// Distance to each online node, by the number of that node. 10 is the same node; null if the
    /// kernel reports no distance.
    distances: BTreeMap<u32, Option<u32>>,
    /// The firmware's figures (HMAT) for the initiators that reach this memory fastest; empty if
    /// the firmware has no figures.
    access: Vec<JsonAccess>,
    /// Caches in front of this memory (HMAT), the one nearest to the memory first.
    side_caches: Vec<JsonSideCache>,
}

/// Huge pages of one size.
#[derive(Serialize)]
struct JsonHugePages {
    /// Bytes of one page.
    page_bytes: u64,
    /// Pages reserved.
    total: u64,
    /// Reserved pages that are free.
    free: u64,
    /// Reserved pages beyond the number asked for.
    surplus: u64,
}

/// The firmware's figures for an access class. A figure is null if the firmware does not give it.
#[derive(Serialize)]
struct JsonAccess {
    /// 0: the fastest initiators of any kind; 1: the fastest initiators with CPUs.
    class: u32,
    /// The nodes from which memory access has these figures.
    initiators: Vec<u32>,
    /// Megabytes per second.
    read_bandwidth_mb_per_s: Option<u64>,
    /// Megabytes per second.
    write_bandwidth_mb_per_s: Option<u64>,
    /// Nanoseconds.
    read_latency_ns: Option<u64>,
    /// Nanoseconds.
    write_latency_ns: Option<u64>,
}

/// A cache in front of memory. A value is null if the kernel does not give it.
#[derive(Serialize)]
struct JsonSideCache {
    /// 1 is nearest to the memory.
    level: u32,
    /// Its bytes.
    bytes: u64,
    /// Bytes of a line.
    line_bytes: Option<u64>,
    /// Whether the cache is direct-mapped: each address has one place in it.
    direct_mapped: Option<bool>,
    /// Whether the cache is write-back: it keeps writes, and does not pass each on to memory
    /// (write-through).
    write_back: Option<bool>,
}

impl<'a> Machine<'a> {
    /// The object for the nodes that are shown.
    pub fn of(
        topology: &'a Topology,
        shown: &[&'a Node],
        measured: Option<&'a Measured>,
    ) -> Machine<'a> {
        let numbers = |nodes: &[NodeId]| nodes.iter().map(|node| node.0).collect();
        let knows_nodes = topology.knows_allowed_nodes();
        Machine {
            nodes: shown.iter().map(|node| JsonNode::of(topology, node)).collect(),
            possible_nodes: numbers(topology.possible_nodes()),
            allowed_nodes: knows_nodes.then(|| numbers(&topology.allowed_nodes())),
            allowed_cpus: topology.knows_allowed_cpus().then(|| topology.allowed_cpus()),
            warnings: topology.warnings(),
            measured: measured.map(|measured| JsonMeasured::of(measured, topology)),
        }
    }
}

impl<'a> JsonNode<'a> {
    fn of(topology: &Topology, node: &'a Node) -> JsonNode<'a> {
        let huge_pages = node.huge_pages.iter().map(|pages| JsonHugePages {
            page_bytes: pages.page_bytes,
            total: pages.total,
            free: pages.free,
            surplus: pages.surplus,
        });
        let access = node.access.iter().map(|access| JsonAccess {
            class: access.class,
            initiators: access.initiators.iter().map(|node| node.0).collect(),
            read_bandwidth_mb_per_s: access.read_bandwidth_mb_per_s,
            write_bandwidth_mb_per_s: access.write_bandwidth_mb_per_s,
            read_latency_ns: access.read_latency_ns,
            write_latency_ns: access.write_latency_ns,
        });
        let side_caches = node.side_caches.iter().map(|cache| JsonSideCache {
            level: cache.level,
            bytes: cache.bytes,
            line_bytes: cache.line_bytes,
            direct_mapped: cache.is_direct_mapped,
            write_back: cache.writes_back,
        });
        JsonNode {
            id: node.id.0,
            cpus: &node.cpus,
            total_bytes: node.total_bytes,
            free_bytes: node.free_bytes,
            huge_pages: huge_pages.collect(),
            tier: node.tier,
            in_cpuset: topology.knows_allowed_nodes().then(|| topology.is_allowed(node.id)),
            nearest_with_cpus: topology.nearest_with_cpus(node.id).0,
            distances: topology
                .nodes()
                .iter()
                .map(|to| (to.id.0, topology.distance(node.id, to.id)))
                .collect(),
            access: access.collect(),
            side_caches: side_caches.collect(),
        }
    }
}
