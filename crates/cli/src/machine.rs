//! Facts about the machine for the commands that leap: nodes with their free memory, and the
//! kernel's release.

use anyhow::Context;
use pageleap::topology::{Node, SysFiles, Topology};
use pageleap::{NodeId, PageSize};
use pageleap_launch::cores_of;
use pageleap_measure::matrix::Initiator;

use crate::stop::{Refusal, Stop};

/// The memory of a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeMemory {
    /// The kernel's number of the node.
    pub id: u32,
    /// Bytes of all its memory; 0 for a node with CPUs only.
    pub total_bytes: u64,
    /// Bytes of it that are free.
    pub free_bytes: u64,
    /// Free huge pages of the size that the pools use.
    pub free_huge_pages: u64,
}

/// Chooses the node to start from and the node to move to.
pub fn choose_nodes(
    nodes: &[NodeMemory],
    from: Option<u32>,
    to: Option<u32>,
) -> Result<(u32, u32), Refusal> {
    let with_memory: Vec<u32> =
        nodes.iter().filter(|node| node.total_bytes > 0).map(|node| node.id).collect();
    for (flag, id) in [("--from", from), ("--to", to)] {
        let Some(id) = id else { continue };
        if with_memory.contains(&id) {
            continue;
        }
        let what =
            if nodes.iter().any(|node| node.id == id) { "has no memory" } else { "does not exist" };
        let known: Vec<String> = with_memory.iter().map(u32::to_string).collect();
        return Err(Refusal::new(format!(
            "{flag} {id}: node {id} {what}; nodes with memory: {}",
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        )));
    }
    let other_than = |id: u32| with_memory.iter().copied().find(|other| *other != id).unwrap_or(id);
    let first = *with_memory
        .first()
        .ok_or_else(|| Refusal::new("the kernel reports no node with memory".to_owned()))?;
    Ok(match (from, to) {
        (Some(from), Some(to)) => (from, to),
        (Some(from), None) => (from, other_than(from)),
        (None, Some(to)) => (other_than(to), to),
        (None, None) => (first, other_than(first)),
    })
}

/// The CPUs of a node that this process may use, by core. Empty if there are none.
pub fn cores(topology: &Topology, node: NodeId) -> Vec<Vec<usize>> {
    let Ok(node) = topology.node(node) else { return Vec::new() };
    let allowed = topology.allowed_cpus();
    let cpus: Vec<usize> = node.cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
    cores_of(&cpus, &SysFiles::host())
}

/// The node with its CPUs that this process may use, if it has any: one of each core first.
pub fn initiator(topology: &Topology, node: &Node) -> Option<Initiator> {
    let cores = cores(topology, node.id);
    let most = cores.iter().map(Vec::len).max().unwrap_or(0);
    let of_each = |nth: usize| cores.iter().filter_map(move |core| core.get(nth).copied());
    let cpus: Vec<usize> = (0..most).flat_map(of_each).collect();
    let first = cores.iter().find(|core| core.first() == cpus.first())?;
    let injectors = cpus.iter().copied().filter(|cpu| !first.contains(cpu)).collect();
    let has_memory = node.total_bytes > 0 && topology.is_allowed(node.id);
    Some(Initiator { node: node.id, cpus, injectors, has_memory })
}

/// The nodes of this machine, with free huge pages of the size of `page`.
pub fn nodes(page: PageSize) -> Result<Vec<NodeMemory>, Stop> {
    let memory = |node: &Node| NodeMemory {
        id: node.id.0,
        total_bytes: node.total_bytes,
        free_bytes: node.free_bytes,
        free_huge_pages: node.free_huge(page.bytes() as u64),
    };
    Ok(Topology::read()?.nodes().iter().map(memory).collect())
}

/// The kernel's release as `uname -r` prints it.
pub fn kernel_release() -> Result<String, Stop> {
    const FILE: &str = "/proc/sys/kernel/osrelease";
    let release = std::fs::read_to_string(FILE).context(FILE)?;
    Ok(release.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, total_gib: u64, free_gib: u64) -> NodeMemory {
        NodeMemory {
            id,
            total_bytes: total_gib << 30,
            free_bytes: free_gib << 30,
            free_huge_pages: 0,
        }
    }

    #[test]
    fn nodes_default_to_two_different_ones_where_there_are_two() {
        let two = [node(0, 8, 8), node(1, 0, 0), node(4, 8, 8)];
        assert_eq!(choose_nodes(&two, None, None), Ok((0, 4)));
        assert_eq!(choose_nodes(&two, Some(4), None), Ok((4, 0)));
        assert_eq!(choose_nodes(&two, None, Some(0)), Ok((4, 0)));
        assert_eq!(choose_nodes(&two, Some(4), Some(4)), Ok((4, 4)));
        let one = [node(0, 8, 8)];
        assert_eq!(choose_nodes(&one, None, None), Ok((0, 0)));
        assert_eq!(choose_nodes(&one, None, Some(0)), Ok((0, 0)));
    }

    #[test]
    fn unknown_nodes_and_nodes_without_memory_are_named() {
        let nodes = [node(0, 8, 8), node(1, 0, 0), node(4, 8, 8)];
        let refusal = |from, to| choose_nodes(&nodes, from, to).unwrap_err().to_string();
        assert_eq!(
            refusal(Some(2), None),
            "--from 2: node 2 does not exist; nodes with memory: 0, 4"
        );
        assert_eq!(refusal(None, Some(1)), "--to 1: node 1 has no memory; nodes with memory: 0, 4");
        assert!(choose_nodes(&[], None, None).is_err());
    }
}
