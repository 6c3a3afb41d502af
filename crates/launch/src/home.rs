//! The home of a program: the node on which it starts, and the nodes over which it grows.
//!
//! The rule is that of Phoenix (sections 4.3 and 5.2 of the paper): a program starts on the node
//! that moves the fewest bytes, and among equals on the one with the most idle cores. Its threads
//! stay there until it is full, and then go to the nearest node. Sibling hyper-threads come last,
//! because threads on them share no translations but contend for the TLB (section 4.5).
//!
//! Two rules are added. A node without room for the program's memory is passed over, because memory
//! that does not fit lies on another node from the first. And loads are compared with a tolerance,
//! because two measurements of equal loads never agree.

use pageleap::NodeId;
use pageleap::topology::Topology;

use crate::error::Error;
use crate::load::NodeLoad;

/// Traffic counts as equal up to this part of the largest.
const EQUAL_TRAFFIC: f64 = 0.1;
/// Idle cores count as equal up to this difference.
const EQUAL_CORES: f64 = 0.5;
/// Without a size of the program's memory, a node needs this part of its memory free.
const LEAST_FREE: u64 = 32;

/// The home of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The nodes on whose CPUs it may run: its home first, then the others as it grows.
    pub nodes: Vec<NodeId>,
    /// A sentence with the reasons for the choice.
    pub reason: String,
    /// A sentence for each node that was passed over, with the reason.
    pub passed_over: Vec<String>,
}

/// Chooses the home of a program that needs `bytes` of memory; 0 if that is not known.
///
/// `loads` are those of the nodes on whose CPUs it may run ([`NodeLoad`]). Only nodes with memory
/// that the process may use can be a home.
///
/// # Errors
/// [`Error::Conflict`] if no node has room for the memory, or has both CPUs and memory that the
/// process may use.
pub fn choose_home(topology: &Topology, loads: &[NodeLoad], bytes: u64) -> Result<Home, Error> {
    let mut passed_over = Vec::new();
    let mut candidates: Vec<&NodeLoad> = Vec::new();
    let allowed = topology.allowed_nodes();
    for load in loads {
        match why_not(topology, load, bytes, &allowed) {
            None => candidates.push(load),
            Some(why) => passed_over.push(format!("{} is passed over: {why}", load.node)),
        }
    }
    let Some((best, reason)) = best_of(&candidates) else {
        let why = passed_over.join(", and ");
        return Err(Error::Conflict {
            reason: format!("no node can be the home of the program: {why}"),
            remedy: "free some memory, name a smaller size, or name the nodes with -N and -m",
        });
    };
    Ok(Home { nodes: growth(topology, loads, best.node), reason, passed_over })
}

/// The nodes over which a program with this home grows: by distance, and among equals as homes are
/// chosen.
pub fn growth(topology: &Topology, loads: &[NodeLoad], home: NodeId) -> Vec<NodeId> {
    let traffic = |load: &NodeLoad| load.bytes_per_s.unwrap_or(0);
    let mut order: Vec<&NodeLoad> = loads.iter().collect();
    order.sort_by(|a, b| {
        let far = |load: &NodeLoad| {
            (load.node != home, topology.distance(home, load.node).unwrap_or(u32::MAX))
        };
        far(a)
            .cmp(&far(b))
            .then(traffic(a).cmp(&traffic(b)))
            .then(b.idle_cores.total_cmp(&a.idle_cores))
            .then(a.node.cmp(&b.node))
    });
    order.into_iter().map(|load| load.node).collect()
}

/// Why a node cannot be the home.
fn why_not(topology: &Topology, load: &NodeLoad, bytes: u64, allowed: &[NodeId]) -> Option<String> {
    let mib = |bytes: u64| bytes >> 20;
    let Ok(node) = topology.node(load.node) else { return Some("it has no memory".to_owned()) };
    if !allowed.contains(&load.node) {
        return Some("the cpuset does not allow its memory".to_owned());
    }
    let needed = if bytes > 0 { bytes } else { node.total_bytes / LEAST_FREE };
    (load.free_bytes < needed).then(|| {
        format!(
            "{} MiB of its memory are free, and {} are needed",
            mib(load.free_bytes),
            mib(needed)
        )
    })
}

/// The node with the least traffic, then with the most idle cores, then with the lowest number, and
/// the sentence that says so.
fn best_of<'a>(candidates: &[&'a NodeLoad]) -> Option<(&'a NodeLoad, String)> {
    let mut left = candidates.to_vec();
    let mut reasons = Vec::new();
    // Traffic of some nodes only cannot be compared.
    let traffic: Option<Vec<u64>> = left.iter().map(|load| load.bytes_per_s).collect();
    match traffic.as_deref() {
        Some(traffic @ [_, _, ..]) => {
            let (least, most) = (*traffic.iter().min()?, *traffic.iter().max()?);
            let limit = least as f64 + EQUAL_TRAFFIC * most as f64;
            left.retain(|load| load.bytes_per_s.unwrap_or(u64::MAX) as f64 <= limit);
            reasons.push(format!("its CPUs move {} MB/s", least / 1_000_000));
        }
        None => {
            reasons.push("nothing tells the bandwidth in use (resctrl is not mounted)".to_owned())
        }
        Some(_) => {}
    }
    let most = left.iter().map(|load| load.idle_cores).fold(0.0, f64::max);
    left.retain(|load| load.idle_cores + EQUAL_CORES >= most);
    let best = *left.iter().min_by_key(|load| load.node)?;
    reasons.push(format!("{:.1} of its cores are idle", best.idle_cores));
    Some((best, format!("the home is {}: {}", best.node, reasons.join(", and "))))
}
