//! Which nodes are the tiers of an example.

use std::error::Error;

use pageleap::NodeId;
use pageleap::topology::Topology;

/// A node with CPUs, and the node with memory that is farthest from it: the fast and the slow tier.
/// On a machine with one node both are that node.
pub fn tiers() -> Result<[NodeId; 2], Box<dyn Error>> {
    let topology = Topology::read()?;
    let nodes = topology.allowed_nodes();
    let has_cpus =
        |node: &&NodeId| topology.nodes().iter().any(|of| of.id == **node && !of.cpus.is_empty());
    let fast = *nodes.iter().find(has_cpus).ok_or("no node has both memory and CPUs")?;
    let far = |node: &&NodeId| topology.distance(fast, **node);
    let slow = nodes.iter().filter(|node| **node != fast).max_by_key(far);
    Ok([fast, slow.copied().unwrap_or(fast)])
}
