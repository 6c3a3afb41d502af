//! The kernel's own ways to move pages, as rivals of a leap.
//!
//! | rival | asked by | its time |
//! |---|---|---|
//! | [`calls`] | one call for a whole range: `move_pages(2)`, `mbind(2)` | of the call |
//! | [`balancing`] | accesses from the destination | until all pages are there |
//! | [`compaction`] | a write to a file of sysfs, on one node, too | of the write, with a search |
//!
//! All of them move a page by the same function of the kernel, `migrate_pages()` (Linux,
//! mm/migrate.c). They differ in the search for pages and in the number of pages in a batch.
//!
//! The first two time a change of nodes, so they need two nodes ([`can_move`]). [`Placement`] is
//! read by another call than the one that moves, and outside of its time.

pub mod balancing;
pub mod calls;
pub mod compaction;
mod placement;

use pageleap::NodeId;
use pageleap::topology::Topology;

pub use placement::Placement;

/// Whether pages can move from one node to another here. The reason why not is a sentence for
/// people.
///
/// # Errors
/// Both are the same node, one of them has no memory or is not allowed by the cpuset, or the kernel
/// does not tell where pages lie.
pub fn can_move(from: NodeId, to: NodeId) -> Result<(), String> {
    let topology = Topology::read().map_err(|error| error.to_string())?;
    for node in [from, to] {
        topology.node(node).map_err(|error| error.to_string())?;
        if !topology.is_allowed(node) {
            return Err(format!("the cpuset of this process does not allow {node}"));
        }
    }
    if from == to {
        let nodes = topology.nodes().iter().filter(|node| node.total_bytes > 0).count();
        let only = if nodes == 1 { ", the only node with memory," } else { "" };
        return Err(format!("{from}{only} is source and destination, so no page changes its node"));
    }
    // An empty list asks for nothing, but is refused where the call is.
    pageleap_sys::nodes_of_pages(0, &[], &mut [])
        .map_err(|errno| format!("move_pages fails with {errno}, so nobody tells where pages lie"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private::tests::node;

    #[test]
    fn pages_cannot_move_to_their_own_node_or_to_none() {
        let why = can_move(node(), node()).unwrap_err();
        assert!(why.contains("source and destination"), "{why}");
        let why = can_move(node(), NodeId(1023)).unwrap_err();
        assert!(why.contains("1023"), "{why}");
    }

    #[test]
    fn pages_can_move_between_allowed_nodes_with_memory() {
        let nodes = Topology::read().unwrap().allowed_nodes();
        let [from, to, ..] = nodes[..] else {
            return eprintln!(
                "SKIP pages_can_move_between_allowed_nodes_with_memory: needs two nodes"
            );
        };
        assert_eq!(can_move(from, to), Ok(()));
    }
}
