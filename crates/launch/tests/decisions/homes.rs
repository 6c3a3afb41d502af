//! Homes on the modelled machines: the loads that the launcher would measure, from the model.

use std::collections::BTreeMap;

use pageleap::topology::{SysFiles, Topology};
use pageleap_launch::{NodeLoad, choose_home, growth};

use crate::machine::{Kind, Machine, Program, Traffic};
use crate::tree::{NODE, Tree};

/// CPUs of each node, bytes of its memory, and bytes per second of its controller.
const CPUS: usize = 16;
const MEMORY: u64 = 64 << 30;
const BANDWIDTH: f64 = 60e9;

/// The machine as the kernel shows it. Distances are the latencies of the quiet machine.
fn topology(machine: &Machine) -> Topology {
    let tree = Tree::empty();
    let mut places: Vec<usize> = machine.places().collect();
    places.sort_by_key(|place| machine.node(*place));
    for (index, &from) in places.iter().enumerate() {
        let node = machine.node(from).0;
        let put = |file: &str, text: String| tree.put(&format!("{NODE}/node{node}/{file}"), text);
        let cpus = index * CPUS..(index + 1) * CPUS;
        put(
            "cpulist",
            match machine.has_cpus(from) {
                true => format!("{}-{}\n", cpus.start, cpus.end - 1),
                false => "\n".to_owned(),
            },
        );
        let kb = MEMORY >> 10;
        put("meminfo", format!("Node {node} MemTotal: {kb} kB\nNode {node} MemFree: {kb} kB\n"));
        let distance = |to: &usize| format!("{:.0}", 10.0 * (1.0 + machine.extra(from, *to)));
        put("distance", places.iter().map(distance).collect::<Vec<_>>().join(" ") + "\n");
    }
    let list = |of: &dyn Fn(usize) -> bool| {
        let nodes = places.iter().filter(|place| of(**place));
        nodes.map(|place| machine.node(*place).0.to_string()).collect::<Vec<_>>().join(",") + "\n"
    };
    for name in ["online", "possible", "has_memory"] {
        tree.put(&format!("{NODE}/{name}"), list(&|_| true));
    }
    tree.put(&format!("{NODE}/has_cpu"), list(&|place| machine.has_cpus(place)));
    Topology::read_from(&SysFiles::at(tree.root())).unwrap()
}

/// The loads of nodes with CPUs, beside programs at home there.
fn loads(machine: &Machine, programs: &[Program], traffic: &Traffic) -> Vec<NodeLoad> {
    let load = |place: usize| {
        let on = |counts: &BTreeMap<usize, u64>| counts.get(&place).copied().unwrap_or(0);
        let threads: u64 = programs.iter().map(|program| on(&program.threads)).sum();
        let used = programs.iter().map(|program| {
            machine.bandwidth(program, &Traffic::default())[&machine.node(place)].own
        });
        let others = used_by_others(machine, traffic, place);
        NodeLoad {
            node: machine.node(place),
            bytes_per_s: Some(((used.sum::<f64>() + others) * BANDWIDTH) as u64),
            idle_cores: CPUS as f64 - threads.min(CPUS as u64) as f64,
            free_bytes: MEMORY,
        }
    };
    machine.places().filter(|place| machine.has_cpus(*place)).map(load).collect()
}

/// The use of a place's controller by others.
fn used_by_others(machine: &Machine, traffic: &Traffic, place: usize) -> f64 {
    let idle = Program::thin(&machine.parameters, place, place);
    machine.bandwidth(&idle, traffic)[&machine.node(place)].others
}

/// Homes and their growth, by places.
pub fn decide(machine: &Machine) -> Vec<Vec<usize>> {
    let topology = topology(machine);
    let places = |nodes: Vec<pageleap::NodeId>| -> Vec<usize> {
        nodes.into_iter().map(|node| machine.place(node)).collect()
    };
    let home = |programs: &[Program], traffic: &Traffic| {
        let loads = loads(machine, programs, traffic);
        places(choose_home(&topology, &loads, 1 << 30).unwrap().nodes)
    };
    let quiet = Traffic::default();
    let at = |place| Program::thin(&machine.parameters, place, place);
    let last = machine.places().rfind(|place| machine.has_cpus(*place)).unwrap();
    // All nodes but one have a program: the free one is the home.
    let mut decided = Vec::new();
    for free in machine.places().filter(|place| machine.has_cpus(*place)) {
        let others = machine.places().filter(|place| machine.has_cpus(*place) && *place != free);
        decided.push(home(&others.map(at).collect::<Vec<_>>(), &quiet));
    }
    // STREAM on all nodes but the last one.
    let busy: Vec<usize> = (0..last).collect();
    decided.push(home(&[], &machine.stream_on(&busy)));
    // A program grows from its home to the nearest node first, whatever runs there.
    let grown = growth(&topology, &loads(machine, &[], &machine.stream_on(&[1])), machine.node(0));
    decided.push(places(grown));
    decided
}

/// The expected homes of each machine: in 002 (sections 4.3 and 5.2) a program is at home where the
/// least bandwidth is used, and grows over the fastest interconnection.
pub fn expected(kind: Kind) -> Vec<Vec<usize>> {
    match kind {
        Kind::TwoSockets | Kind::MemoryAlone => {
            vec![vec![0, 1], vec![1, 0], vec![1, 0], vec![0, 1]]
        }
        Kind::FourNodes => vec![
            vec![0, 1, 2, 3],
            vec![1, 0, 3, 2],
            vec![2, 3, 0, 1],
            vec![3, 2, 1, 0],
            vec![3, 2, 1, 0],
            vec![0, 1, 2, 3],
        ],
    }
}
