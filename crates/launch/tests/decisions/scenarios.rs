//! The papers' scenarios: a machine, a program, the traffic of others, and where the page tables are.

use std::collections::{BTreeMap, BTreeSet};

use pageleap::decisions::{
    LatencyAware, Phoenix, PhoenixAction, PhoenixSample, TableMove, TablePage, TableSample,
    algorithm_1, auto_ptm,
};
use pageleap::{NodeId, PageTableLevel};

use crate::machine::{Kind, Machine, Program, Traffic};
use crate::parameters::Parameters;

/// A scenario, by places. Its name is for messages only.
pub struct Scenario {
    pub name: &'static str,
    pub kind: Kind,
    pub program: fn(&Parameters) -> Program,
    /// The places with a copy of the page tables.
    pub tables: &'static [usize],
    pub traffic: fn(&Machine) -> Traffic,
    /// Whether interference has withstood.
    pub interference_stays: bool,
    /// Whether a counter tells cycles in page walks.
    pub has_counter: bool,
    pub expected: Expected,
}

/// Decisions, by places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The place of the pages of PTEs, PMDs and PUDs after the moves of Auto-PTM.
    pub auto_ptm: [usize; 3],
    /// The same of Algorithm 1.
    pub algorithm_1: [usize; 3],
    /// The place of all page tables after the move of the default rule.
    pub latency_aware: usize,
    pub phoenix: Action,
}

/// An action of Phoenix, by places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    Resolve(&'static [usize]),
    Migrate(usize),
    Replicate(&'static [usize]),
    Drop(usize),
}

impl Scenario {
    pub fn machine(&self, parameters: Parameters, numbers: &[u32]) -> Machine {
        Machine::new(self.kind, parameters, numbers)
    }

    pub fn program(&self, machine: &Machine) -> Program {
        (self.program)(&machine.parameters)
    }

    /// The decisions on a machine with these parameters and numbers.
    pub fn decide(&self, parameters: Parameters, numbers: &[u32]) -> Expected {
        let machine = &self.machine(parameters, numbers);
        let (program, traffic) = (self.program(machine), (self.traffic)(machine));
        let latencies = machine.latencies(&traffic);
        let tree = self.tree(machine, &program);
        let levels = |moves: Vec<TableMove>| {
            [PageTableLevel::Pte, PageTableLevel::Pmd, PageTableLevel::Pud].map(|level| {
                let of_level = moves.iter().find(|one| one.level == level);
                of_level.map_or(self.tables[0], |one| machine.place(one.to))
            })
        };
        let aware = LatencyAware::new().decide(&TableSample {
            tables: Some(machine.node(self.tables[0])),
            threads: &machine.by_node(&program.threads),
            data: &machine.by_node(&program.data),
            nodes: &machine.facts(),
            latencies: &latencies,
        });
        assert!(!aware.reason.contains('\n') && !aware.reason.is_empty());
        Expected {
            auto_ptm: levels(auto_ptm(&tree)),
            algorithm_1: levels(algorithm_1(&tree, &latencies)),
            latency_aware: aware.to.map_or(self.tables[0], |to| machine.place(to)),
            phoenix: self.phoenix(machine, &program, &traffic),
        }
    }

    fn phoenix(&self, machine: &Machine, program: &Program, traffic: &Traffic) -> Action {
        let copies: BTreeSet<usize> = self.tables.iter().copied().collect();
        let time = machine.time(program, &copies, traffic);
        let threads =
            program.threads.iter().map(|(place, there)| (*place, *there as f64)).collect();
        let decision = Phoenix::new().decide(&PhoenixSample {
            walk_cycles: self.has_counter.then_some(time.walks),
            threads: &machine.by_node(&threads),
            tables: &copies.iter().map(|place| machine.node(*place)).collect(),
            bandwidth: &machine.bandwidth(program, traffic),
            interference_stays: self.interference_stays,
            mapping_calls_per_s: program.mapping_calls_per_s,
        });
        assert!(!decision.reason.contains('\n') && !decision.reason.is_empty());
        let places = |nodes: BTreeSet<NodeId>| -> &'static [usize] {
            let mut places: Vec<usize> = nodes.iter().map(|node| machine.place(*node)).collect();
            places.sort_unstable();
            places.leak()
        };
        match decision.action {
            PhoenixAction::Nothing => Action::Nothing,
            PhoenixAction::ResolveInterference(nodes) => Action::Resolve(places(nodes)),
            PhoenixAction::Migrate(node) => Action::Migrate(machine.place(node)),
            PhoenixAction::Replicate(nodes) => Action::Replicate(places(nodes)),
            PhoenixAction::DropReplicas(node) => Action::Drop(machine.place(node)),
        }
    }

    /// Two pages of PTEs below one page of PMDs and one of PUDs, all where the page tables are. Each
    /// page of PTEs maps the same mixture of data.
    fn tree(&self, machine: &Machine, program: &Program) -> Vec<TablePage> {
        let page = |level, address, data, tables| TablePage {
            level,
            address,
            node: machine.node(self.tables[0]),
            data,
            tables,
        };
        let pte = |number: usize| {
            page(PageTableLevel::Pte, number << 21, machine.by_node(&program.data), Vec::new())
        };
        let pmd = page(PageTableLevel::Pmd, 0, BTreeMap::new(), vec![pte(0), pte(1)]);
        vec![page(PageTableLevel::Pud, 0, BTreeMap::new(), vec![pmd])]
    }
}

const fn all(place: usize) -> [usize; 3] {
    [place; 3]
}

/// Threads and data on place 0.
fn at_home(parameters: &Parameters) -> Program {
    Program::thin(parameters, 0, 0)
}

fn quiet(_: &Machine) -> Traffic {
    Traffic::default()
}

/// A scenario of 003 on its ARM server (section 5), where a counter tells page walks.
const THIN: Scenario = Scenario {
    name: "LPLD",
    kind: Kind::FourNodes,
    program: at_home,
    tables: &[0],
    traffic: quiet,
    interference_stays: false,
    has_counter: true,
    expected: Expected {
        auto_ptm: all(0),
        algorithm_1: all(0),
        latency_aware: 0,
        phoenix: Action::Nothing,
    },
};

/// Table 3 and figures 5, 9, 10 and 11 of 003. Place 0 is the paper's A, place 3 its B.
pub const LATENCY: &[Scenario] = &[
    THIN,
    Scenario {
        // In table 3 its name is LPLDLI.
        name: "LPLDI",
        traffic: |machine| machine.stream_on(&[0]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: [1, 1, 1],
            latency_aware: 1,
            phoenix: Action::Resolve(&[0]),
        },
        ..THIN
    },
    Scenario {
        name: "RPLDLI",
        tables: &[3],
        traffic: |machine| machine.stream_on(&[0]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Resolve(&[0]),
        },
        ..THIN
    },
    Scenario {
        name: "RPLDLI, type 2 of figure 5",
        tables: &[1],
        traffic: |machine| machine.stream_on(&[0]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Resolve(&[0]),
        },
        ..THIN
    },
    Scenario {
        name: "RPLDRI",
        tables: &[3],
        traffic: |machine| machine.stream_on(&[3]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(0),
            latency_aware: 0,
            phoenix: Action::Migrate(0),
        },
        ..THIN
    },
    Scenario {
        name: "RPLDRILI",
        tables: &[3],
        traffic: |machine| machine.stream_on(&[0, 3]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Resolve(&[0]),
        },
        ..THIN
    },
    Scenario {
        name: "figure 10: threads and data have moved beside STREAM",
        program: |parameters| Program::thin(parameters, 3, 3),
        traffic: |machine| machine.stream_on(&[3]),
        expected: Expected {
            auto_ptm: all(3),
            algorithm_1: all(2),
            latency_aware: 2,
            phoenix: Action::Resolve(&[3]),
        },
        ..THIN
    },
    Scenario {
        name: "figure 11: the same with STREAM on both nodes",
        program: |parameters| Program::thin(parameters, 3, 3),
        traffic: |machine| machine.stream_on(&[0, 3]),
        expected: Expected {
            auto_ptm: all(3),
            algorithm_1: all(2),
            latency_aware: 2,
            phoenix: Action::Resolve(&[3]),
        },
        ..THIN
    },
];

/// A scenario of 002 on its server with two sockets.
const WIDE: Scenario = Scenario { kind: Kind::TwoSockets, ..THIN };

/// Threads on both sockets, and data on both.
fn on_both(parameters: &Parameters) -> Program {
    Program {
        threads: BTreeMap::from([(0, 16), (1, 16)]),
        data: BTreeMap::from([(0, 300), (1, 212)]),
        ..Program::thin(parameters, 0, 0)
    }
}

/// Sections 1, 2, 4 and 6 of 002.
pub const PHOENIX: &[Scenario] = &[
    Scenario {
        name: "the scheduler has moved the threads, and the kernel the data",
        program: |parameters| Program::thin(parameters, 1, 1),
        expected: Expected {
            auto_ptm: all(1),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Migrate(1),
        },
        ..WIDE
    },
    Scenario {
        name: "the same without a counter",
        program: |parameters| Program::thin(parameters, 1, 1),
        has_counter: false,
        expected: Expected {
            auto_ptm: all(1),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Nothing,
        },
        ..WIDE
    },
    Scenario {
        name: "interference on the node of the program",
        traffic: |machine| machine.stream_on(&[0]),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Resolve(&[0]),
        },
        ..WIDE
    },
    Scenario {
        name: "the same, and nothing can throttle it",
        traffic: |machine| machine.stream_on(&[0]),
        interference_stays: true,
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(1),
            latency_aware: 1,
            phoenix: Action::Nothing,
        },
        ..WIDE
    },
    Scenario {
        name: "throttled interference",
        traffic: |machine| machine.throttled(&machine.stream_on(&[0]), 0.1),
        ..WIDE
    },
    Scenario {
        name: "threads on both sockets",
        program: on_both,
        expected: Expected { phoenix: Action::Replicate(&[0, 1]), ..WIDE.expected },
        ..WIDE
    },
    Scenario {
        name: "threads on both sockets beside STREAM",
        program: on_both,
        traffic: |machine| machine.stream_on(&[0, 1]),
        expected: Expected { phoenix: Action::Resolve(&[0, 1]), ..WIDE.expected },
        ..WIDE
    },
    Scenario {
        name: "threads on both sockets that change mappings all the time",
        program: |parameters| Program {
            mapping_calls_per_s: parameters.many_calls,
            ..on_both(parameters)
        },
        ..WIDE
    },
    Scenario {
        name: "replicas of threads that have begun to change mappings all the time",
        program: |parameters| Program {
            mapping_calls_per_s: parameters.many_calls,
            ..on_both(parameters)
        },
        tables: &[0, 1],
        expected: Expected { phoenix: Action::Drop(0), ..WIDE.expected },
        ..WIDE
    },
    Scenario {
        name: "replicas of threads that have been consolidated",
        tables: &[0, 1],
        expected: Expected { phoenix: Action::Drop(0), ..WIDE.expected },
        ..WIDE
    },
    Scenario {
        name: "threads on both sockets whose translations are in the TLB",
        program: |parameters| Program {
            walk_loads: parameters.cached_walk_loads,
            ..on_both(parameters)
        },
        ..WIDE
    },
];

/// Threads and data apart: ours, for the difference between Algorithm 1 and the default rule.
pub const APART: &[Scenario] = &[
    Scenario {
        name: "threads have moved, and their data not yet",
        program: |parameters| Program::thin(parameters, 1, 0),
        expected: Expected {
            auto_ptm: all(0),
            algorithm_1: all(0),
            latency_aware: 1,
            phoenix: Action::Migrate(1),
        },
        ..WIDE
    },
    Scenario {
        name: "data on a node that is memory alone",
        kind: Kind::MemoryAlone,
        program: |parameters| Program::thin(parameters, 0, 2),
        tables: &[2],
        expected: Expected {
            auto_ptm: all(2),
            algorithm_1: all(2),
            latency_aware: 0,
            phoenix: Action::Migrate(0),
        },
        ..WIDE
    },
    Scenario {
        name: "data on a far node beside STREAM",
        program: |parameters| Program::thin(parameters, 0, 3),
        tables: &[0],
        traffic: |machine| machine.stream_on(&[3]),
        expected: Expected {
            auto_ptm: all(3),
            algorithm_1: all(2),
            latency_aware: 0,
            phoenix: Action::Nothing,
        },
        ..THIN
    },
];

pub fn all_scenarios() -> impl Iterator<Item = &'static Scenario> {
    LATENCY.iter().chain(PHOENIX).chain(APART)
}
