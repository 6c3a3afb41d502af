//! A machine of nodes, links and controllers that saturate, and the time of a program on it. Each
//! value follows from the parameters; nothing is drawn at random and nothing is timed.

use std::collections::{BTreeMap, BTreeSet};

use pageleap::NodeId;
use pageleap::decisions::{BandwidthUse, NodeFacts};
use pageleap::latency::Latencies;

use crate::parameters::Parameters;

/// The machines of the papers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two nodes on two sockets (002, table 3; the x86 server of 003).
    TwoSockets,
    /// Four nodes on two sockets (003, section 5): nodes 0 and 1 on the first, 2 and 3 on the second.
    /// As seen from each node, the one at the same end of the other socket is the closer one there.
    FourNodes,
    /// Two nodes on two sockets, and a third with memory alone beside the second (002, section 3.2).
    MemoryAlone,
}

/// A machine. Nodes have *places* 0, 1, ... in the model, and numbers for the decisions.
#[derive(Clone, Debug)]
pub struct Machine {
    pub parameters: Parameters,
    kind: Kind,
    /// The number of each place.
    numbers: Vec<u32>,
}

/// The traffic of other programs: the use of each place's controller, and of the link between the
/// sockets.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    controllers: BTreeMap<usize, f64>,
    link: f64,
}

/// A program, by places.
#[derive(Clone, Debug)]
pub struct Program {
    pub threads: BTreeMap<usize, u64>,
    pub data: BTreeMap<usize, u64>,
    /// Loads of page-table entries for each load of data.
    pub walk_loads: f64,
    pub mapping_calls_per_s: f64,
}

impl Program {
    /// A program with threads and data on one place each, which walks much and maps little.
    pub fn thin(parameters: &Parameters, threads: usize, data: usize) -> Program {
        Program {
            threads: BTreeMap::from([(threads, 16)]),
            data: BTreeMap::from([(data, 512)]),
            walk_loads: parameters.walk_loads,
            mapping_calls_per_s: parameters.few_calls,
        }
    }
}

/// The time of a load of data together with its walk.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    pub ns: f64,
    /// The part that is walks.
    pub walks: f64,
}

impl Machine {
    /// A machine whose places have these numbers. There may be more numbers than places.
    pub fn new(kind: Kind, parameters: Parameters, numbers: &[u32]) -> Machine {
        let numbers = numbers[..kind.places()].to_vec();
        Machine { parameters, kind, numbers }
    }

    pub fn places(&self) -> std::ops::Range<usize> {
        0..self.kind.places()
    }

    /// The node at a place.
    pub fn node(&self, place: usize) -> NodeId {
        NodeId(self.numbers[place])
    }

    /// The place of a node.
    pub fn place(&self, node: NodeId) -> usize {
        self.numbers.iter().position(|number| *number == node.0).expect("a node of the machine")
    }

    /// Counts by place as counts by node.
    pub fn by_node<T: Copy>(&self, by_place: &BTreeMap<usize, T>) -> BTreeMap<NodeId, T> {
        by_place.iter().map(|(place, count)| (self.node(*place), *count)).collect()
    }

    pub fn facts(&self) -> BTreeMap<NodeId, NodeFacts> {
        let facts = |place: usize| {
            let near = if self.has_cpus(place) { place } else { 1 };
            NodeFacts { nearest_with_cpus: self.node(near), is_allowed: true }
        };
        self.places().map(|place| (self.node(place), facts(place))).collect()
    }

    pub fn has_cpus(&self, place: usize) -> bool {
        self.kind != Kind::MemoryAlone || place < 2
    }

    /// By how much longer a load takes than a local one, as a part of that.
    pub fn extra(&self, from: usize, to: usize) -> f64 {
        let Parameters { remote_extra, near_extra, far_extra, farthest_extra, .. } =
            self.parameters;
        if from == to {
            return 0.0;
        }
        match (self.kind, from ^ to) {
            (Kind::TwoSockets, _) => remote_extra,
            (Kind::FourNodes, 1) => near_extra,
            (Kind::FourNodes, 2) => far_extra,
            (Kind::FourNodes, _) => farthest_extra,
            // Slower memory that is beside the second socket.
            (Kind::MemoryAlone, _) if to == 2 => {
                far_extra + if from == 1 { 0.0 } else { remote_extra }
            }
            (Kind::MemoryAlone, _) => remote_extra,
        }
    }

    fn crosses(&self, from: usize, to: usize) -> bool {
        let socket = |place: usize| match self.kind {
            Kind::TwoSockets => place,
            Kind::FourNodes => place / 2,
            Kind::MemoryAlone => place.min(1),
        };
        socket(from) != socket(to)
    }

    /// STREAM on these places, each with memory of its own.
    pub fn stream_on(&self, places: &[usize]) -> Traffic {
        let busy = self.parameters.stream;
        Traffic { controllers: places.iter().map(|place| (*place, busy)).collect(), link: 0.0 }
    }

    /// STREAM on all places, with interleaved memory: the link saturates, and the controllers get what
    /// comes through it (002, 6.3).
    pub fn stream_interleaved(&self) -> Traffic {
        let Parameters { stream, most_used, .. } = self.parameters;
        let through = stream.min(most_used) / 2.0;
        let controllers = self.places().map(|place| (place, through)).collect();
        Traffic { controllers, link: stream }
    }

    /// The same traffic, throttled to a part of itself.
    pub fn throttled(&self, traffic: &Traffic, part: f64) -> Traffic {
        let controllers = traffic.controllers.iter().map(|(place, used)| (*place, used * part));
        Traffic { controllers: controllers.collect(), link: traffic.link * part }
    }

    /// Nanoseconds of a load.
    pub fn latency(&self, from: usize, to: usize, traffic: &Traffic) -> f64 {
        let Parameters { local_ns, controller_ns, link_ns, most_used, .. } = self.parameters;
        // Even controllers that are changed by 20 % need some time for refreshes.
        let waits = |service_ns: f64, used: f64| {
            let used = used.min(most_used).min(0.95);
            service_ns * used / (1.0 - used)
        };
        let others = traffic.controllers.get(&to).copied().unwrap_or(0.0);
        let link = if self.crosses(from, to) { waits(link_ns, traffic.link) } else { 0.0 };
        local_ns * (1.0 + self.extra(from, to)) + waits(controller_ns, others) + link
    }

    /// The latencies that a prober measures.
    pub fn latencies(&self, traffic: &Traffic) -> Latencies {
        let mut latencies = Latencies::default();
        for from in self.places().filter(|from| self.has_cpus(*from)) {
            for to in self.places() {
                latencies.set(self.node(from), self.node(to), self.latency(from, to, traffic));
            }
        }
        latencies
    }

    /// The use of each node's bandwidth, beside a program.
    pub fn bandwidth(
        &self,
        program: &Program,
        traffic: &Traffic,
    ) -> BTreeMap<NodeId, BandwidthUse> {
        let Parameters { own, most_used, .. } = self.parameters;
        let all: u64 = program.data.values().sum();
        let used = |place: usize| {
            let data = program.data.get(&place).copied().unwrap_or(0);
            let others = traffic.controllers.get(&place).copied().unwrap_or(0.0);
            BandwidthUse { own: own * data as f64 / all as f64, others: others.min(most_used) }
        };
        self.places().map(|place| (self.node(place), used(place))).collect()
    }

    /// The time of a load of a program with copies of its page tables on these places. Each thread
    /// walks the copy that is the nearest one to it, as the kernel of both papers chooses.
    pub fn time(&self, program: &Program, tables: &BTreeSet<usize>, traffic: &Traffic) -> Time {
        let distance = |from: usize, to: &usize| (self.extra(from, *to) * 1e6) as u64;
        let (mut data_ns, mut walk_ns) = (0.0, 0.0);
        let threads: u64 = program.threads.values().sum();
        let data: u64 = program.data.values().sum();
        for (from, there) in &program.threads {
            let share = *there as f64 / threads as f64;
            for (to, pages) in &program.data {
                let part = *pages as f64 / data as f64;
                data_ns += share * part * self.latency(*from, *to, traffic);
            }
            let copy = tables.iter().min_by_key(|to| distance(*from, to)).expect("one copy");
            walk_ns += share * program.walk_loads * self.latency(*from, *copy, traffic);
        }
        let busy_ns = self.parameters.compute_ns + data_ns + walk_ns;
        // Each call is longer by each replica. This time is taken from the program's.
        let extra_us = (tables.len() - 1) as f64 * self.parameters.replica_us;
        let lost = (program.mapping_calls_per_s * extra_us / 1e6).min(0.9);
        Time { ns: busy_ns / (1.0 - lost), walks: walk_ns / busy_ns }
    }

    /// The time with one copy of the page tables.
    pub fn time_at(&self, program: &Program, tables: usize, traffic: &Traffic) -> Time {
        self.time(program, &BTreeSet::from([tables]), traffic)
    }
}

impl Kind {
    pub fn places(self) -> usize {
        match self {
            Kind::TwoSockets => 2,
            Kind::FourNodes => 4,
            Kind::MemoryAlone => 3,
        }
    }
}
