//! The order in which a program's threads come to CPUs.
//!
//! A *place* is a CPU. Threads come to the place with the fewest living threads, the first of several,
//! so the order of places decides how a program with fewer threads than CPUs is spread. Sibling
//! hyper-threads share a core's caches and units. On two nodes with two cores of two hyper-threads
//! each, where CPU *n* + 4 is the sibling of CPU *n*:
//!
//! ```text
//! node 0: 0 1 4 5      sparse: 0 2 1 3 4 6 5 7   one core of each node in turn, then siblings
//! node 1: 2 3 6 7      dense:  0 1 4 5 2 3 6 7   a node is filled, its siblings last, then the next
//! ```
//!
//! Sparse placement gives few threads all memory controllers, and dense placement gives them a
//! common cache and the shortest way to each other's memory. With as many threads as CPUs both are
//! the same.

use std::collections::BTreeSet;

use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology};

use crate::cores::siblings;

/// The environment variable with the places of a program.
pub(crate) const PLACES: &str = "PAGELEAP_PLACES";
/// The environment variable with the CPUs on which a program with a home starts.
pub(crate) const HOME: &str = "PAGELEAP_HOME";

/// How threads come to CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// One node after the other.
    Sparse,
    /// A node is filled before the next one.
    Dense,
}

/// The order of places on a machine, for a program that may run on `cpus`.
pub fn places(
    placement: Placement,
    topology: &Topology,
    files: &SysFiles,
    cpus: &[usize],
) -> Vec<usize> {
    let nodes = nodes(topology, cpus);
    // CPUs by node, and within a node by rank: 0 for the first thread of a core, 1 for the second.
    let ranked: Vec<Vec<(usize, usize)>> =
        nodes.iter().map(|cpus| ranked(cpus, |cpu| siblings(files, cpu))).collect();
    match placement {
        Placement::Dense => ranked.into_iter().flatten().map(|(_, cpu)| cpu).collect(),
        Placement::Sparse => in_turn(&ranked),
    }
}

/// The order of places for a program with a home: the cores of these nodes in order, and after all of
/// them the sibling hyper-threads in the same order. CPUs of other nodes are no places.
pub fn places_by_growth(
    nodes: &[NodeId],
    topology: &Topology,
    files: &SysFiles,
    cpus: &[usize],
) -> Vec<usize> {
    let mut left: BTreeSet<usize> = cpus.iter().copied().collect();
    let mut places: Vec<(usize, usize)> = Vec::new();
    for node in nodes {
        let known = topology.nodes().iter().find(|known| known.id == *node);
        let of_node = known.into_iter().flat_map(|node| node.cpus.iter().copied());
        let own: Vec<usize> = of_node.filter(|cpu| left.remove(cpu)).collect();
        places.extend(ranked(&own, |cpu| siblings(files, cpu)));
    }
    // A stable sort by the rank alone keeps the order of nodes.
    places.sort_by_key(|(rank, _)| *rank);
    places.into_iter().map(|(_, cpu)| cpu).collect()
}

/// CPUs of each node that has some of these, in the order of nodes: the first one, and then by the
/// distance from it. Each CPU is in one of them, because emulated nodes may share CPUs. CPUs of no
/// node come last.
fn nodes(topology: &Topology, cpus: &[usize]) -> Vec<Vec<usize>> {
    let mut left: BTreeSet<usize> = cpus.iter().copied().collect();
    let mut nodes: Vec<(NodeId, Vec<usize>)> = Vec::new();
    for node in topology.nodes() {
        let own: BTreeSet<usize> =
            node.cpus.iter().copied().filter(|cpu| left.remove(cpu)).collect();
        if !own.is_empty() {
            nodes.push((node.id, own.into_iter().collect()));
        }
    }
    if let Some(first) = nodes.first().map(|(id, _)| *id) {
        let distance = |to| topology.distance(first, to).unwrap_or(u32::MAX);
        nodes.sort_by_key(|(id, _)| (*id != first, distance(*id), *id));
    }
    let known = nodes.into_iter().map(|(_, cpus)| cpus);
    let unknown = Some(left.into_iter().collect::<Vec<_>>()).filter(|cpus| !cpus.is_empty());
    known.chain(unknown).collect()
}

/// CPUs of a node with their rank in their core, the first threads of all cores before the second
/// ones.
fn ranked(cpus: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<(usize, usize)> {
    let rank = |cpu: usize| {
        let siblings = siblings(cpu);
        siblings.iter().filter(|other| **other < cpu && cpus.contains(other)).count()
    };
    let mut ranked: Vec<(usize, usize)> = cpus.iter().map(|cpu| (rank(*cpu), *cpu)).collect();
    ranked.sort_unstable();
    ranked
}

/// One CPU of each node in turn: all first threads of cores, and then the second ones.
fn in_turn(nodes: &[Vec<(usize, usize)>]) -> Vec<usize> {
    let mut turns: Vec<(usize, usize, usize, usize)> = Vec::new();
    for (node, cpus) in nodes.iter().enumerate() {
        for (rank, cpu) in cpus {
            let nth = cpus.iter().filter(|(other, before)| other == rank && before < cpu).count();
            turns.push((*rank, nth, node, *cpu));
        }
    }
    turns.sort_unstable();
    turns.into_iter().map(|(.., cpu)| cpu).collect()
}

/// The value of [`PLACES`].
pub(crate) fn list(places: &[usize]) -> String {
    places.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    /// A machine: CPUs by node, distances by node, and the siblings of each CPU.
    fn order(
        placement: Placement,
        nodes: &[(u32, &str, &str)],
        siblings: &[(usize, &str)],
        cpus: &[usize],
    ) -> Vec<usize> {
        let ids: Vec<String> = nodes.iter().map(|(id, ..)| id.to_string()).collect();
        let ids = ids.join(",");
        let folder = "sys/devices/system/node";
        let mut files: Vec<(String, String)> = vec![
            (format!("{folder}/online"), ids.clone()),
            (format!("{folder}/possible"), ids.clone()),
            (format!("{folder}/has_memory"), ids.clone()),
        ];
        for (id, cpus, distances) in nodes {
            let at = |name: &str| format!("{folder}/node{id}/{name}");
            files.push((at("cpulist"), (*cpus).to_owned()));
            files.push((at("distance"), (*distances).to_owned()));
            let meminfo = format!("Node {id} MemTotal: 1024 kB\nNode {id} MemFree: 512 kB\n");
            files.push((at("meminfo"), meminfo));
        }
        for (cpu, list) in siblings {
            let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            files.push((path, format!("{list}\n")));
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (&**p, &**t)).collect();
        let tree = Tree::new(&files);
        let topology = Topology::read_from(&tree.files()).unwrap();
        places(placement, &topology, &tree.files(), cpus)
    }

    /// Two sockets of two nodes each, whose numbers alternate between the sockets, as some firmware
    /// has them; two cores on each node, and a sibling of CPU n is n + 8.
    const NODES: [(u32, &str, &str); 4] = [
        (0, "0-1,8-9", "10 21 12 21"),
        (1, "2-3,10-11", "21 10 21 12"),
        (2, "4-5,12-13", "12 21 10 21"),
        (3, "6-7,14-15", "21 12 21 10"),
    ];

    fn two_sockets(placement: Placement, cpus: &[usize]) -> Vec<usize> {
        let pairs: Vec<(usize, String)> =
            (0..16).map(|cpu| (cpu, format!("{},{}", cpu % 8, cpu % 8 + 8))).collect();
        let pairs: Vec<(usize, &str)> = pairs.iter().map(|(cpu, list)| (*cpu, &**list)).collect();
        order(placement, &NODES, &pairs, cpus)
    }

    #[test]
    fn sparse_goes_from_node_to_node_and_comes_to_siblings_last() {
        let all: Vec<usize> = (0..16).collect();
        // Node 2 is nearer to node 0 than node 1 is.
        let order = two_sockets(Placement::Sparse, &all);
        assert_eq!(order, [0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15]);
        // Nodes that have no more cores are passed over.
        let order = two_sockets(Placement::Sparse, &[0, 1, 2, 8, 10, 14]);
        assert_eq!(order, [0, 2, 14, 1, 8, 10], "CPU 14 is the only one of its core");
    }

    #[test]
    fn dense_fills_a_node_and_goes_to_the_nearest_one() {
        let all: Vec<usize> = (0..16).collect();
        let order = two_sockets(Placement::Dense, &all);
        assert_eq!(order, [0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15]);
        // From node 1 on, the nearest one is node 3.
        let order = two_sockets(Placement::Dense, &[2, 10, 3, 4, 5, 6, 7]);
        assert_eq!(order, [2, 3, 10, 6, 7, 4, 5]);
    }

    #[test]
    fn odd_machines_have_an_order_with_each_cpu_once() {
        // Adjacent numbers are siblings; a node without CPUs; numbers with gaps.
        let nodes = [(0, "0-3", "10 20 17"), (2, "4-7", "20 10 28"), (5, "", "17 28 10")];
        let adjacent: Vec<(usize, String)> =
            (0..8).map(|cpu| (cpu, format!("{}-{}", cpu & !1, cpu | 1))).collect();
        let adjacent: Vec<(usize, &str)> = adjacent.iter().map(|(c, l)| (*c, &**l)).collect();
        let all: Vec<usize> = (0..8).collect();
        let of = |placement, siblings: &[_]| order(placement, &nodes, siblings, &all);
        assert_eq!(of(Placement::Sparse, &adjacent), [0, 4, 2, 6, 1, 5, 3, 7]);
        assert_eq!(of(Placement::Dense, &adjacent), [0, 2, 1, 3, 4, 6, 5, 7]);
        // A kernel that tells no siblings, or nonsense.
        let odd: Vec<(usize, &str)> = (0..8).map(|cpu| (cpu, ["x", "", "9-"][cpu % 3])).collect();
        for siblings in [&[], &odd[..]] {
            assert_eq!(of(Placement::Sparse, siblings), [0, 4, 1, 5, 2, 6, 3, 7]);
            assert_eq!(of(Placement::Dense, siblings), all);
        }
        // Emulated nodes share CPUs, and CPU 9 is on no node.
        let shared = [(0, "0-1", "10 10"), (1, "0-1", "10 10")];
        let order = order(Placement::Sparse, &shared, &[], &[0, 1, 9]);
        assert_eq!(order, [0, 9, 1]);
    }
}
