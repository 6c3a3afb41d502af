//! Whether page tables migrate, are replicated, or stay: the decision of Phoenix.

use std::collections::{BTreeMap, BTreeSet};

use crate::units::NodeId;

/// The bandwidth of a node's memory that is in use, as parts of all of it (0 to 1).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BandwidthUse {
    /// By the program.
    pub own: f64,
    /// By other programs.
    pub others: f64,
}

/// The samples from which [`Phoenix`] decides about one program, all of the same time.
#[derive(Clone, Copy, Debug)]
pub struct PhoenixSample<'a> {
    /// The part of its CPU cycles in which a page walk was under way (0 to 1); `None` if no counter
    /// says so.
    pub walk_cycles: Option<f64>,
    /// Its running threads, by the node of their CPU, in the mean.
    pub threads: &'a BTreeMap<NodeId, f64>,
    /// The nodes with a copy of its page tables: one, or several if they are replicated.
    pub tables: &'a BTreeSet<NodeId>,
    /// The bandwidth in use on each node. A node that is missing counts as quiet.
    pub bandwidth: &'a BTreeMap<NodeId, BandwidthUse>,
    /// Whether the interference has withstood: nothing could throttle or move the other programs.
    pub interference_stays: bool,
    /// System calls that change its mappings (`mmap`, `munmap`, `mremap`, `mprotect`, ...), per second.
    pub mapping_calls_per_s: f64,
}

/// The next step for a program's page tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PhoenixAction {
    /// Nothing.
    Nothing,
    /// Throttle other programs that use the bandwidth of these nodes, or move them away, and sample
    /// again.
    ResolveInterference(BTreeSet<NodeId>),
    /// Move the only copy to this node.
    Migrate(NodeId),
    /// Have a copy on each of these nodes.
    Replicate(BTreeSet<NodeId>),
    /// Keep the copy on this node alone.
    DropReplicas(NodeId),
}

/// A decision about a program's page tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhoenixDecision {
    /// The next step.
    pub action: PhoenixAction,
    /// Why, in one line.
    pub reason: String,
}

/// Decides between migration and replication of page tables.
///
/// In this order:
///
/// 1. Without a counter of cycles in page walks, nothing. Replicas that are there stay.
/// 2. A single copy stays where it is below 10 % of the cycles (section 5.1 of the paper).
/// 3. Interference on a node with threads is resolved before anything is replicated (section 4.2). If
///    it stays, a single copy stays, and [`LatencyAware`](super::LatencyAware) decides about its node.
/// 4. Page tables of threads on one node go to this node (sections 4.3 and 5.3).
/// 5. Threads on several nodes get a replica on each, but only while mapping calls are rare. The paper
///    shows what each such call costs (table 2) and has no bound on their rate; the bound is ours, and
///    so is its hysteresis: replicas are made below one rate, and dropped above a higher one.
///
/// ```
/// use std::collections::{BTreeMap, BTreeSet};
/// use pageleap::NodeId;
/// use pageleap::decisions::{Phoenix, PhoenixAction, PhoenixSample};
///
/// // The scheduler has moved the threads to node 1; the page tables have stayed on node 0.
/// let decision = Phoenix::new().decide(&PhoenixSample {
///     walk_cycles: Some(0.4),
///     threads: &BTreeMap::from([(NodeId(1), 16.0)]),
///     tables: &BTreeSet::from([NodeId(0)]),
///     bandwidth: &BTreeMap::new(),
///     interference_stays: false,
///     mapping_calls_per_s: 10.0,
/// });
/// assert_eq!(decision.action, PhoenixAction::Migrate(NodeId(1)));
/// assert_eq!(
///     decision.reason,
///     "40 % of the cycles are page walks, and all threads run on node 1"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phoenix {
    walk_cycles: f64,
    interference: f64,
    replicate_below: f64,
    drop_above: f64,
}

/// A node belongs to a program's nodes if this part of its threads runs there. Fewer are on their way:
/// the kernel's load balancer tolerates 25 % more threads on one node than on the other (*Phoenix*,
/// section 3.4).
const LEAST_THREADS: f64 = 0.1;

impl Phoenix {
    /// The part of cycles in page walks below which nothing happens (section 5.1).
    pub const WALK_CYCLES: f64 = 0.1;
    /// The part of a node's bandwidth from which on its use by others is interference (ours). In a
    /// queue with random arrivals (M/M/1) a load then waits as long as its transfer takes.
    pub const INTERFERENCE: f64 = 0.5;
    /// Mapping calls per second below which replicas are made (ours): each call took up to 8 us longer
    /// with one replica (table 2), so they cost at most 0.8 % of a CPU.
    pub const REPLICATE_BELOW: f64 = 1_000.0;
    /// Mapping calls per second above which replicas are dropped (ours).
    pub const DROP_ABOVE: f64 = 2_000.0;

    /// The usual thresholds.
    pub fn new() -> Phoenix {
        Phoenix {
            walk_cycles: Phoenix::WALK_CYCLES,
            interference: Phoenix::INTERFERENCE,
            replicate_below: Phoenix::REPLICATE_BELOW,
            drop_above: Phoenix::DROP_ABOVE,
        }
    }

    /// Sets the part of cycles in page walks (0 to 1) below which nothing happens.
    pub fn walk_cycles(mut self, part: f64) -> Phoenix {
        self.walk_cycles = part;
        self
    }

    /// Sets the part of a node's bandwidth (0 to 1) from which on its use by others is interference.
    pub fn interference(mut self, part: f64) -> Phoenix {
        self.interference = part;
        self
    }

    /// Sets the mapping calls per second below which replicas are made, and above which they are
    /// dropped. The second is raised to the first if it is lower.
    pub fn mapping_calls(mut self, replicate_below: f64, drop_above: f64) -> Phoenix {
        (self.replicate_below, self.drop_above) =
            (replicate_below, drop_above.max(replicate_below));
        self
    }

    /// Decides about a program's page tables.
    pub fn decide(&self, sample: &PhoenixSample<'_>) -> PhoenixDecision {
        let nothing = |reason| PhoenixDecision { action: PhoenixAction::Nothing, reason };
        let Some(walks) = sample.walk_cycles else {
            return nothing("no counter tells the cycles in page walks".to_owned());
        };
        let nodes = nodes_of(sample.threads);
        let Some(home) = most_threads(sample.threads) else {
            return nothing("no thread runs".to_owned());
        };
        let told = format!("{:.0} % of the cycles are page walks", walks * 100.0);
        // Replicas keep walks short, so a small part of walks is no reason to drop them.
        if sample.tables.len() > 1 {
            return self.replicas(sample, &nodes, home);
        }
        if walks < self.walk_cycles {
            return nothing(format!("{told}, below {:.0} %", self.walk_cycles * 100.0));
        }
        let crowded = self.crowded(sample, &nodes);
        if !crowded.is_empty() && !sample.interference_stays {
            let reason = format!("{told}, and others use the bandwidth of {}", listed(&crowded));
            return PhoenixDecision { action: PhoenixAction::ResolveInterference(crowded), reason };
        }
        if !crowded.is_empty() {
            return nothing(format!(
                "{told}, and others go on using the bandwidth of {}, so latency decides",
                listed(&crowded)
            ));
        }
        if nodes.len() == 1 {
            let reason = format!("{told}, and all threads run on {home}");
            let action = match sample.tables.contains(&home) {
                true => PhoenixAction::Nothing,
                false => PhoenixAction::Migrate(home),
            };
            return PhoenixDecision { action, reason };
        }
        let rate = sample.mapping_calls_per_s;
        let reason =
            format!("{told}, threads run on {}, and {rate:.0} mapping calls/s", listed(&nodes));
        if rate < self.replicate_below {
            return PhoenixDecision { action: PhoenixAction::Replicate(nodes), reason };
        }
        nothing(format!("{reason} are too many for replicas"))
    }

    /// Decides about replicas that are there.
    fn replicas(
        &self,
        sample: &PhoenixSample<'_>,
        nodes: &BTreeSet<NodeId>,
        home: NodeId,
    ) -> PhoenixDecision {
        let rate = sample.mapping_calls_per_s;
        let (action, reason) = if nodes.len() == 1 {
            (PhoenixAction::DropReplicas(home), format!("all threads run on {home}"))
        } else if rate > self.drop_above {
            let reason = format!("{rate:.0} mapping calls/s are too many for replicas");
            (PhoenixAction::DropReplicas(home), reason)
        } else if nodes.is_subset(sample.tables) {
            (PhoenixAction::Nothing, "each node with threads has its replica".to_owned())
        } else if rate < self.replicate_below {
            let reason = format!("threads run on {}", listed(nodes));
            (PhoenixAction::Replicate(nodes.clone()), reason)
        } else {
            let reason = format!("{rate:.0} mapping calls/s are too many for another replica");
            (PhoenixAction::Nothing, reason)
        };
        PhoenixDecision { action, reason }
    }

    /// The nodes with threads of the program whose bandwidth others use. Page tables of threads
    /// elsewhere leave such a node anyway.
    fn crowded(&self, sample: &PhoenixSample<'_>, nodes: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let is_crowded = |node: &&NodeId| {
            sample.bandwidth.get(*node).is_some_and(|used| used.others >= self.interference)
        };
        nodes.iter().filter(is_crowded).copied().collect()
    }
}

impl Default for Phoenix {
    fn default() -> Self {
        Phoenix::new()
    }
}

/// The nodes on which enough of the threads run.
fn nodes_of(threads: &BTreeMap<NodeId, f64>) -> BTreeSet<NodeId> {
    let all: f64 = threads.values().sum();
    let counts = |(_, there): &(&NodeId, &f64)| **there > 0.0 && **there >= all * LEAST_THREADS;
    threads.iter().filter(counts).map(|(node, _)| *node).collect()
}

/// The node of most threads, and of several the lowest number.
fn most_threads(threads: &BTreeMap<NodeId, f64>) -> Option<NodeId> {
    let running = threads.iter().filter(|(_, there)| **there > 0.0);
    let most = running.max_by(|one, other| one.1.total_cmp(other.1).then(other.0.cmp(one.0)));
    most.map(|(node, _)| *node)
}

fn listed(nodes: &BTreeSet<NodeId>) -> String {
    nodes.iter().map(NodeId::to_string).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program whose page walks matter, quiet unless a test changes that.
    #[derive(Clone)]
    struct Scene {
        walks: Option<f64>,
        threads: BTreeMap<NodeId, f64>,
        tables: BTreeSet<NodeId>,
        bandwidth: BTreeMap<NodeId, BandwidthUse>,
        stays: bool,
        rate: f64,
    }

    impl Scene {
        fn new(threads: &[(u32, f64)], tables: &[u32]) -> Scene {
            Scene {
                walks: Some(0.3),
                threads: threads.iter().map(|(node, count)| (NodeId(*node), *count)).collect(),
                tables: set(tables),
                bandwidth: BTreeMap::new(),
                stays: false,
                rate: 10.0,
            }
        }

        fn walks(self, walks: Option<f64>) -> Scene {
            Scene { walks, ..self }
        }

        fn rate(self, rate: f64) -> Scene {
            Scene { rate, ..self }
        }

        fn others(mut self, node: u32, others: f64) -> Scene {
            self.bandwidth.insert(NodeId(node), BandwidthUse { own: 0.2, others });
            self
        }

        fn decide(&self) -> PhoenixDecision {
            Phoenix::new().decide(&PhoenixSample {
                walk_cycles: self.walks,
                threads: &self.threads,
                tables: &self.tables,
                bandwidth: &self.bandwidth,
                interference_stays: self.stays,
                mapping_calls_per_s: self.rate,
            })
        }

        fn action(&self) -> PhoenixAction {
            self.decide().action
        }
    }

    fn set(nodes: &[u32]) -> BTreeSet<NodeId> {
        nodes.iter().copied().map(NodeId).collect()
    }

    use PhoenixAction::{DropReplicas, Migrate, Nothing, Replicate, ResolveInterference};

    #[test]
    fn nothing_below_a_tenth_of_the_cycles_or_without_a_counter() {
        let stayed = Scene::new(&[(1, 16.0)], &[0]);
        assert_eq!(stayed.action(), Migrate(NodeId(1)));
        for (walks, reason) in [
            (None, "no counter tells the cycles in page walks"),
            (Some(0.04), "4 % of the cycles are page walks, below 10 %"),
        ] {
            let decision = stayed.clone().walks(walks).decide();
            assert_eq!((decision.action, &*decision.reason), (Nothing, reason));
        }
        assert_eq!(stayed.clone().walks(Some(0.1)).action(), Migrate(NodeId(1)));
        let sample = |phoenix: Phoenix| {
            phoenix.decide(&PhoenixSample {
                walk_cycles: Some(0.04),
                threads: &stayed.threads,
                tables: &stayed.tables,
                bandwidth: &stayed.bandwidth,
                interference_stays: false,
                mapping_calls_per_s: 0.0,
            })
        };
        assert_eq!(sample(Phoenix::new().walk_cycles(0.03)).action, Migrate(NodeId(1)));
        assert_eq!(Scene::new(&[], &[0]).action(), Nothing);
    }

    #[test]
    fn interference_is_resolved_before_anything_is_replicated() {
        let wide = Scene::new(&[(0, 8.0), (1, 8.0)], &[0]);
        assert_eq!(wide.action(), Replicate(set(&[0, 1])));
        let crowded = wide.clone().others(1, 0.9);
        assert_eq!(crowded.action(), ResolveInterference(set(&[1])));
        let stays = Scene { stays: true, ..crowded };
        let decision = stays.decide();
        assert_eq!(decision.action, Nothing);
        assert!(decision.reason.ends_with("so latency decides"), "{decision:?}");
        // Others on a node where the program has nothing do not matter, nor does its own traffic.
        assert_eq!(wide.clone().others(2, 0.9).action(), Replicate(set(&[0, 1])));
        let away = Scene::new(&[(1, 8.0)], &[0]).others(0, 0.9);
        assert_eq!(away.action(), Migrate(NodeId(1)));
        let mut own = wide;
        own.bandwidth.insert(NodeId(0), BandwidthUse { own: 0.95, others: 0.05 });
        assert_eq!(own.action(), Replicate(set(&[0, 1])));
        // Neither does it without page walks.
        let cached = Scene::new(&[(0, 8.0)], &[0]).others(0, 0.9).walks(Some(0.01));
        assert_eq!(cached.action(), Nothing);
    }

    #[test]
    fn threads_on_one_node_migrate_and_stragglers_do_not_count() {
        assert_eq!(Scene::new(&[(1, 4.0)], &[1]).action(), Nothing);
        assert_eq!(Scene::new(&[(0, 0.5), (1, 15.5)], &[0]).action(), Migrate(NodeId(1)));
        assert_eq!(Scene::new(&[(0, 2.0), (1, 14.0)], &[0]).action(), Replicate(set(&[0, 1])));
    }

    #[test]
    fn replicas_are_made_at_a_low_rate_and_dropped_at_a_high_one() {
        let threads: &[(u32, f64)] = &[(0, 9.0), (1, 7.0)];
        let single = |rate| Scene::new(threads, &[0]).rate(rate).action();
        let replicated = |rate| Scene::new(threads, &[0, 1]).rate(rate).action();
        assert_eq!((single(999.0), replicated(999.0)), (Replicate(set(&[0, 1])), Nothing));
        // Between the rates all stays as it is.
        assert_eq!((single(1_500.0), replicated(1_500.0)), (Nothing, Nothing));
        assert_eq!((single(2_001.0), replicated(2_001.0)), (Nothing, DropReplicas(NodeId(0))));
    }

    #[test]
    fn replicas_stay_while_they_keep_walks_short() {
        let both = Scene::new(&[(0, 8.0), (1, 8.0)], &[0, 1]);
        assert_eq!(both.clone().walks(Some(0.05)).action(), Nothing);
        assert_eq!(both.clone().walks(None).action(), Nothing);
        assert_eq!(Scene::new(&[(1, 8.0)], &[0, 1]).action(), DropReplicas(NodeId(1)));
        let third = Scene::new(&[(0, 8.0), (2, 8.0)], &[0, 1]);
        assert_eq!(third.action(), Replicate(set(&[0, 2])));
        assert_eq!(third.rate(1_500.0).action(), Nothing);
    }

    #[test]
    fn thresholds_can_be_set() {
        let phoenix = Phoenix::new().interference(0.3).mapping_calls(50.0, 10.0);
        assert_eq!(phoenix.drop_above, 50.0);
        let scene = Scene::new(&[(0, 8.0), (1, 8.0)], &[0]).others(0, 0.4).rate(60.0);
        let sample = PhoenixSample {
            walk_cycles: scene.walks,
            threads: &scene.threads,
            tables: &scene.tables,
            bandwidth: &scene.bandwidth,
            interference_stays: false,
            mapping_calls_per_s: scene.rate,
        };
        assert_eq!(phoenix.decide(&sample).action, ResolveInterference(set(&[0])));
        let quiet = PhoenixSample { bandwidth: &BTreeMap::new(), ..sample };
        assert_eq!(phoenix.decide(&quiet).action, Nothing);
        assert_eq!(
            phoenix.mapping_calls(61.0, 70.0).decide(&quiet).action,
            Replicate(set(&[0, 1]))
        );
    }
}
