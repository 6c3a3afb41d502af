//! Page tables go to the node of lowest latency: as the paper has printed it, and for the threads
//! that walk.

use std::collections::BTreeMap;

use super::auto_ptm::{TableMove, TablePage, moves};
use crate::latency::Latencies;
use crate::topology::Topology;
use crate::units::NodeId;

/// The moves of Algorithm 1 of *Latency-aware page-table migration* as printed (section 4.1.2; the
/// paper's `-w`). As with [`auto_ptm`](super::auto_ptm), the most entries name a node (`to_node`); but
/// the page goes to the node whose memory has the lowest latency *from there*. The levels follow each
/// other from the lowest.
///
/// A page whose `to_node` has no known latency, because it has no CPUs, stays. The paper does not say.
/// Its algorithm also scans PGDs, which stay here ([`TablePage`]).
///
/// [`LatencyAware`] is the default, and `docs/adr/0037` says why.
///
/// ```
/// use std::collections::BTreeMap;
/// use pageleap::{NodeId, PageTableLevel};
/// use pageleap::decisions::{TablePage, algorithm_1};
/// use pageleap::latency::Latencies;
///
/// let page = TablePage {
///     level: PageTableLevel::Pte,
///     address: 0,
///     node: NodeId(3),
///     data: BTreeMap::from([(NodeId(0), 512)]),
///     tables: Vec::new(),
/// };
/// let mut latencies = Latencies::default();
/// for (to, ns) in [(0, 370.0), (1, 120.0), (2, 230.0), (3, 260.0)] {
///     latencies.set(NodeId(0), NodeId(to), ns); // others use up the bandwidth of node 0
/// }
/// let moves = algorithm_1(&[page], &latencies);
/// assert_eq!(moves[0].to, NodeId(1));
/// ```
pub fn algorithm_1(pages: &[TablePage], latencies: &Latencies) -> Vec<TableMove> {
    moves(pages, &|_, most| {
        let (to, ns) = latencies.lowest(most.node)?;
        Some((to, format!("{most}, from which {to} has the lowest latency ({ns:.0} ns)")))
    })
}

/// A node, as far as decisions need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeFacts {
    /// The nearest node with CPUs: the node itself if it has some.
    pub nearest_with_cpus: NodeId,
    /// Whether it has memory that the process may use.
    pub is_allowed: bool,
}

impl NodeFacts {
    /// All nodes of a machine.
    ///
    /// ```
    /// use pageleap::decisions::NodeFacts;
    /// use pageleap::topology::Topology;
    ///
    /// # fn main() -> Result<(), pageleap::Error> {
    /// let nodes = NodeFacts::of(&Topology::read()?);
    /// assert!(nodes.values().any(|node| node.is_allowed));
    /// # Ok(()) }
    /// ```
    pub fn of(topology: &Topology) -> BTreeMap<NodeId, NodeFacts> {
        let facts = |id: NodeId| NodeFacts {
            nearest_with_cpus: topology.nearest_with_cpus(id),
            is_allowed: topology.node(id).is_ok() && topology.is_allowed(id),
        };
        topology.nodes().iter().map(|node| (node.id, facts(node.id))).collect()
    }
}

/// The samples from which [`LatencyAware`] decides about one group of pages of page table.
#[derive(Clone, Copy, Debug)]
pub struct TableSample<'a> {
    /// The node on which the page tables lie; `None` if that is not known.
    pub tables: Option<NodeId>,
    /// The threads that walk them, by the node of their CPU. Empty if they are not known.
    pub threads: &'a BTreeMap<NodeId, u64>,
    /// The pages of data that they map, by node.
    pub data: &'a BTreeMap<NodeId, u64>,
    /// The nodes of the machine.
    pub nodes: &'a BTreeMap<NodeId, NodeFacts>,
    /// The latency from node to node.
    pub latencies: &'a Latencies,
}

/// Whether page tables are to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableDecision {
    /// The node to which they are to move; `None` if they are to stay.
    pub to: Option<NodeId>,
    /// Why, in one line.
    pub reason: String,
}

/// The default rule (ours, in place of the paper's `to_node`): page tables go to the node whose memory
/// has the lowest latency for the threads that walk them.
///
/// * The latency is seen from the nodes on whose CPUs the threads run. Without threads it is seen
///   from the nodes of the data, and from the nearest node with CPUs where one of these has none. Of
///   several nodes each counts by its threads, or by its pages of data.
/// * Page tables move only if that lowers the latency by more than a margin.
/// * They go to nodes with CPUs only, unless others are allowed.
///
/// ```
/// use std::collections::BTreeMap;
/// use pageleap::NodeId;
/// use pageleap::decisions::{LatencyAware, NodeFacts, TableSample};
/// use pageleap::latency::Latencies;
///
/// let [zero, one] = [NodeId(0), NodeId(1)];
/// let mut latencies = Latencies::default();
/// latencies.set(zero, zero, 370.0); // others use up the bandwidth of node 0
/// latencies.set(zero, one, 130.0);
/// let facts = |node| (node, NodeFacts { nearest_with_cpus: node, is_allowed: true });
/// let decision = LatencyAware::new().decide(&TableSample {
///     tables: Some(zero),
///     threads: &BTreeMap::from([(zero, 4)]),
///     data: &BTreeMap::from([(zero, 512)]),
///     nodes: &BTreeMap::from([facts(zero), facts(one)]),
///     latencies: &latencies,
/// });
/// assert_eq!(decision.to, Some(one));
/// assert_eq!(
///     decision.reason,
///     "from node 0, whose threads walk, a load from node 1 takes 130 ns, and 370 ns from node 0"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyAware {
    margin: f64,
    nodes_without_cpus: bool,
}

impl LatencyAware {
    /// The margin of [`LatencyAware::new`], as a part of the latency where the page tables lie. Probes of
    /// a quiet node were up to 13 % off a long measurement (`docs/latency.md`); a remote load that
    /// takes 1.2 times as long as a local one (*Phoenix*, section 3.2) exceeds the margin.
    pub const MARGIN: f64 = 0.15;

    /// The rule with its usual margin, for nodes with CPUs.
    pub fn new() -> LatencyAware {
        LatencyAware { margin: LatencyAware::MARGIN, nodes_without_cpus: false }
    }

    /// Sets by which part of the present latency a move must lower it. 0.15 stands for 15 %; 0 makes
    /// page tables follow each difference, noise included.
    pub fn margin(mut self, part: f64) -> LatencyAware {
        self.margin = part;
        self
    }

    /// Allows nodes that have memory and no CPUs. All walks would be remote there.
    pub fn allow_nodes_without_cpus(mut self) -> LatencyAware {
        self.nodes_without_cpus = true;
        self
    }

    /// Whether nodes without CPUs are allowed.
    pub fn allows_nodes_without_cpus(&self) -> bool {
        self.nodes_without_cpus
    }

    /// Decides whether page tables are to move, and where to.
    pub fn decide(&self, sample: &TableSample<'_>) -> TableDecision {
        let stay = |reason: String| TableDecision { to: None, reason };
        let Some(view) = View::of(sample) else {
            return stay("no thread is known to walk, and no data to be there".to_owned());
        };
        let Some((best, best_ns)) = self.lowest(sample, &view) else {
            return stay(format!("no latency {view} is known"));
        };
        let Some(tables) = sample.tables else {
            let reason = format!(
                "{view}, a load from {best} takes {best_ns:.0} ns, and nobody has asked for a node"
            );
            return TableDecision { to: Some(best), reason };
        };
        if tables == best {
            return stay(format!(
                "{view}, a load from {best} takes the least time, {best_ns:.0} ns"
            ));
        }
        let Some(now_ns) = view.latency(sample.latencies, tables) else {
            return stay(format!("the latency {view} to {tables} is not known"));
        };
        let compared = format!(
            "{view}, a load from {best} takes {best_ns:.0} ns, and {now_ns:.0} ns from {tables}"
        );
        if best_ns < now_ns * (1.0 - self.margin) {
            return TableDecision { to: Some(best), reason: compared };
        }
        stay(format!("{compared}: not {:.0} % less", self.margin * 100.0))
    }

    /// The node of lowest latency. Of several, the one from which most is seen comes first, then the
    /// one where the page tables lie, then the lowest number.
    fn lowest(&self, sample: &TableSample<'_>, view: &View) -> Option<(NodeId, f64)> {
        let may_hold = |(node, facts): &(&NodeId, &NodeFacts)| {
            facts.is_allowed && (self.nodes_without_cpus || facts.nearest_with_cpus == **node)
        };
        let of_node = |(node, _): (&NodeId, &NodeFacts)| {
            Some((*node, view.latency(sample.latencies, *node)?))
        };
        let rank = |node: NodeId| {
            let seen_from = view.weights.get(&node).copied().unwrap_or(0);
            (std::cmp::Reverse(seen_from), Some(node) != sample.tables, node)
        };
        let candidates = sample.nodes.iter().filter(may_hold).filter_map(of_node);
        candidates.min_by(|(one, its_ns), (other, others_ns)| {
            its_ns.total_cmp(others_ns).then_with(|| rank(*one).cmp(&rank(*other)))
        })
    }
}

impl Default for LatencyAware {
    fn default() -> Self {
        LatencyAware::new()
    }
}

/// The nodes from which latencies are seen.
struct View {
    weights: BTreeMap<NodeId, u64>,
    why: &'static str,
}

impl View {
    fn of(sample: &TableSample<'_>) -> Option<View> {
        let some = |counts: &BTreeMap<NodeId, u64>| -> BTreeMap<NodeId, u64> {
            let counts = counts.iter().filter(|(_, count)| **count > 0);
            counts.map(|(node, count)| (*node, *count)).collect()
        };
        let threads = some(sample.threads);
        if !threads.is_empty() {
            return Some(View { weights: threads, why: "whose threads walk" });
        }
        let data = some(sample.data);
        let (mut weights, mut why) = (BTreeMap::new(), "where the data lies");
        for (node, pages) in data {
            let near = sample.nodes.get(&node).map_or(node, |facts| facts.nearest_with_cpus);
            *weights.entry(near).or_default() += pages;
            if near != node {
                why = "whose CPUs are the nearest to the data";
            }
        }
        (!weights.is_empty()).then_some(View { weights, why })
    }

    /// Nanoseconds of a load from a node: the mean over all nodes of the view. `None` if one of them
    /// is not known.
    fn latency(&self, latencies: &Latencies, to: NodeId) -> Option<f64> {
        let (mut sum, mut all) = (0.0, 0.0);
        for (from, weight) in &self.weights {
            let weight = *weight as f64;
            sum += weight * latencies.get(*from, to)?;
            all += weight;
        }
        Some(sum / all)
    }
}

impl std::fmt::Display for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nodes: Vec<String> = self.weights.keys().map(NodeId::to_string).collect();
        write!(f, "from {}, {}", nodes.join(" and "), self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PageTableLevel;

    /// A matrix with the rows of nodes 0, 1, ...; 0 stands for a latency that is not known.
    fn matrix(rows: &[&[f64]]) -> Latencies {
        let mut latencies = Latencies::default();
        for (from, row) in rows.iter().enumerate() {
            for (to, ns) in row.iter().enumerate().filter(|(_, ns)| **ns > 0.0) {
                latencies.set(NodeId(from as u32), NodeId(to as u32), *ns);
            }
        }
        latencies
    }

    fn counts(of: Counts<'_>) -> BTreeMap<NodeId, u64> {
        of.iter().map(|(node, count)| (NodeId(*node), *count)).collect()
    }

    /// Nodes by their nearest with CPUs, all allowed.
    fn nodes(near: &[u32]) -> BTreeMap<NodeId, NodeFacts> {
        let facts = |near: &u32| NodeFacts { nearest_with_cpus: NodeId(*near), is_allowed: true };
        near.iter().enumerate().map(|(node, near)| (NodeId(node as u32), facts(near))).collect()
    }

    /// Counts by node.
    type Counts<'a> = &'a [(u32, u64)];
    /// Threads, and pages of data.
    type Seen<'a> = (Counts<'a>, Counts<'a>);

    fn decide_with(
        rule: LatencyAware,
        tables: Option<u32>,
        (threads, data): Seen<'_>,
        near: &[u32],
        rows: &[&[f64]],
    ) -> TableDecision {
        rule.decide(&TableSample {
            tables: tables.map(NodeId),
            threads: &counts(threads),
            data: &counts(data),
            nodes: &nodes(near),
            latencies: &matrix(rows),
        })
    }

    fn decide(tables: Option<u32>, seen: Seen<'_>, near: &[u32], rows: &[&[f64]]) -> TableDecision {
        decide_with(LatencyAware::new(), tables, seen, near, rows)
    }

    const QUIET: &[&[f64]] = &[&[100.0, 130.0], &[130.0, 100.0]];
    const BOTH: &[u32] = &[0, 1];

    #[test]
    fn threads_come_before_data() {
        let decision = decide(Some(1), (&[(0, 1)], &[(1, 512)]), BOTH, QUIET);
        assert_eq!(decision.to, Some(NodeId(0)), "{decision:?}");
        assert!(decision.reason.contains("node 0, whose threads walk"), "{decision:?}");
        let decision = decide(Some(0), (&[(0, 0)], &[(1, 512)]), BOTH, QUIET);
        assert_eq!(decision.to, Some(NodeId(1)), "{decision:?}");
        assert!(decision.reason.contains("node 1, where the data lies"), "{decision:?}");
        let decision = decide(Some(0), (&[], &[]), BOTH, QUIET);
        assert_eq!(decision.to, None, "{decision:?}");
    }

    #[test]
    fn data_without_cpus_is_seen_from_the_nearest_node_with_some() {
        // Node 2 is memory alone, near node 1. It would be the fastest of all.
        let rows: &[&[f64]] = &[&[100.0, 130.0, 90.0], &[130.0, 100.0, 50.0]];
        let seen: Seen<'_> = (&[], &[(2, 512)]);
        let decision = decide(Some(0), seen, &[0, 1, 1], rows);
        assert_eq!(decision.to, Some(NodeId(1)), "{decision:?}");
        assert!(decision.reason.contains("nearest to the data"), "{decision:?}");
        let any = LatencyAware::new().allow_nodes_without_cpus();
        assert_eq!(decide_with(any, Some(0), seen, &[0, 1, 1], rows).to, Some(NodeId(2)));
    }

    #[test]
    fn nodes_that_are_not_allowed_are_left_out() {
        let mut nodes = nodes(BOTH);
        nodes.insert(NodeId(0), NodeFacts { nearest_with_cpus: NodeId(0), is_allowed: false });
        let sample = TableSample {
            tables: None,
            threads: &counts(&[(0, 1)]),
            data: &counts(&[]),
            nodes: &nodes,
            latencies: &matrix(QUIET),
        };
        assert_eq!(LatencyAware::new().decide(&sample).to, Some(NodeId(1)));
    }

    #[test]
    fn a_difference_within_the_margin_moves_nothing() {
        let seen: Seen<'_> = (&[(0, 1)], &[]);
        let rows = |local: f64| decide(Some(1), seen, BOTH, &[&[local, 100.0]]);
        assert_eq!(rows(84.0).to, Some(NodeId(0)));
        let near = rows(86.0);
        assert_eq!(near.to, None);
        assert!(near.reason.ends_with("100 ns from node 1: not 15 % less"), "{near:?}");
        // The least remote access of the paper on Phoenix.
        assert_eq!(decide(Some(1), seen, BOTH, &[&[100.0, 120.0]]).to, Some(NodeId(0)));
        let each = LatencyAware::new().margin(0.0);
        assert_eq!(decide_with(each, Some(1), seen, BOTH, &[&[99.0, 100.0]]).to, Some(NodeId(0)));
    }

    #[test]
    fn of_equal_nodes_the_walkers_own_comes_first_and_then_the_present_one() {
        let seen: Seen<'_> = (&[(1, 1)], &[]);
        let rows: &[&[f64]] = &[&[], &[100.0, 100.0, 100.0]];
        assert_eq!(decide(None, seen, &[0, 1, 2], rows).to, Some(NodeId(1)));
        let rows: &[&[f64]] = &[&[], &[100.0, 190.0, 100.0]];
        assert_eq!(decide(Some(2), seen, &[0, 1, 2], rows).to, None);
        assert_eq!(decide(None, seen, &[0, 1, 2], rows).to, Some(NodeId(0)));
    }

    #[test]
    fn several_nodes_count_by_their_threads() {
        let rows: &[&[f64]] = &[&[100.0, 130.0, 160.0], &[130.0, 100.0, 160.0]];
        let at = |threads: &[(u32, u64)]| decide(Some(2), (threads, &[]), &[0, 1, 2], rows).to;
        assert_eq!(at(&[(0, 3), (1, 1)]), Some(NodeId(0)));
        assert_eq!(at(&[(0, 1), (1, 3)]), Some(NodeId(1)));
    }

    #[test]
    fn unknown_latencies_and_unknown_tables() {
        let seen: Seen<'_> = (&[(0, 1)], &[]);
        let none = decide(Some(0), seen, BOTH, &[]);
        assert_eq!(none.to, None);
        assert_eq!(none.reason, "no latency from node 0, whose threads walk is known");
        // Where the page tables lie might be the best of all.
        let present = decide(Some(1), seen, BOTH, &[&[100.0]]);
        assert_eq!(present.to, None, "{present:?}");
        assert!(present.reason.contains("to node 1 is not known"), "{present:?}");
        assert_eq!(decide(None, seen, BOTH, &[&[100.0]]).to, Some(NodeId(0)));
    }

    #[test]
    fn algorithm_1_looks_from_the_most_entries_at_each_level() {
        // From node 0 the best is node 1, and from node 1 it is node 2: others are busy on both.
        let rows: &[&[f64]] = &[&[370.0, 200.0, 230.0], &[400.0, 300.0, 250.0], &[1.0, 1.0, 1.0]];
        let page = |level, data: &[(u32, u64)], tables| TablePage {
            level,
            address: 0,
            node: NodeId(0),
            data: counts(data),
            tables,
        };
        let pte = page(PageTableLevel::Pte, &[(0, 512)], Vec::new());
        let pmd = page(PageTableLevel::Pmd, &[], vec![pte]);
        let moves = algorithm_1(&[pmd], &matrix(rows));
        let to: Vec<u32> = moves.iter().map(|one| one.to.0).collect();
        // The threads are still on node 0: each level is one node farther.
        assert_eq!(to, [1, 2]);
        assert_eq!(
            moves[0].reason,
            "512 of 512 entries point to node 0, from which node 1 has the lowest latency (200 ns)"
        );
        let memory_alone = page(PageTableLevel::Pte, &[(3, 512)], Vec::new());
        assert_eq!(algorithm_1(&[memory_alone], &matrix(rows)), []);
    }

    #[cfg(not(miri))] // it reads files of the kernel
    #[test]
    fn facts_come_from_the_topology() {
        let topology = Topology::read().unwrap();
        let nodes = NodeFacts::of(&topology);
        assert_eq!(nodes.len(), topology.nodes().len());
        for (node, facts) in nodes {
            assert_eq!(facts.nearest_with_cpus, topology.nearest_with_cpus(node));
            assert_eq!(facts.is_allowed, topology.allowed_nodes().contains(&node));
        }
    }
}
