//! `pageleap run --place` and `--home`: how a program's threads come to the CPUs of several nodes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::hint::spin_loop;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;

use pageleap::topology::{Topology, id_list};
use pageleap::{NodeId, Pool};

use super::common::{StopOnDrop, skip, soon};
use super::grown::{Grown, PAGES_OF_THREAD, Pages};
use super::program::{PAGES, reachable};
use super::{Machine, Who, cpus_of, grown, numbers, pageleap, refused, stderr};

/// Nodes of which one has this much more free memory are told apart.
const CLEARLY: u64 = 64 << 20;
/// The most memory that a test takes from a node.
const TAKEN: u64 = 256 << 20;

/// The program with this many threads, started by `pageleap run FLAGS`, and what that has said.
#[track_caller]
fn grow(who: Who, flags: &[&str], threads: usize) -> (Grown, String) {
    let mut launcher = pageleap(who, flags);
    // What the environment of the tests says of threads is not theirs.
    for name in ["LD_PRELOAD", "PAGELEAP_PLACES", "PAGELEAP_HOME", "OMP_PLACES", "OMP_PROC_BIND"] {
        launcher.env_remove(name);
    }
    let output = grown::under(&mut launcher, threads).output().expect("the launcher starts");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{launcher:?}: {said}");
    (Grown::of(&output.stdout), said)
}

/// The nodes that have CPUs among these.
fn nodes_of(cpus: &BTreeSet<usize>) -> BTreeMap<NodeId, BTreeSet<usize>> {
    let with_cpus = fs::read_to_string("/sys/devices/system/node/has_cpu").unwrap();
    let nodes = numbers(&with_cpus).into_iter().map(|node| NodeId(node as u32));
    let nodes = nodes.map(|node| (node, &cpus_of(node) & cpus));
    nodes.filter(|(_, cpus)| !cpus.is_empty()).collect()
}

/// The distance between two nodes, as the kernel has it.
fn distance(from: NodeId, to: NodeId) -> usize {
    let row = fs::read_to_string(format!("/sys/devices/system/node/node{}/distance", from.0));
    // A column for each node that is online.
    let online = numbers(&fs::read_to_string("/sys/devices/system/node/online").unwrap());
    let column = online.iter().position(|node| *node == to.0 as usize).unwrap();
    row.unwrap().split_whitespace().nth(column).unwrap().parse().unwrap()
}

/// How many of these CPUs with lower numbers are on the same core.
fn rank(cpu: usize, cpus: &BTreeSet<usize>) -> usize {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let siblings = numbers(&fs::read_to_string(file).unwrap());
    siblings.iter().filter(|other| **other < cpu && cpus.contains(other)).count()
}

/// The order of these CPUs: one of each node in turn, or one node after the other.
fn order(place: &str, cpus: &BTreeSet<usize>) -> Vec<usize> {
    let nodes = nodes_of(cpus);
    let first = *nodes.keys().next().unwrap();
    // The sort is stable, so nodes of the same distance keep the order of their numbers.
    let mut nodes: Vec<(NodeId, BTreeSet<usize>)> = nodes.into_iter().collect();
    nodes.sort_by_key(|(node, _)| distance(first, *node));
    let by_rank = |of_node: &BTreeSet<usize>, wanted: usize| -> VecDeque<usize> {
        of_node.iter().copied().filter(|cpu| rank(*cpu, of_node) == wanted).collect()
    };
    let mut order = Vec::new();
    if place == "dense" {
        for (_, of_node) in &nodes {
            (0..of_node.len()).for_each(|wanted| order.extend(by_rank(of_node, wanted)));
        }
        return order;
    }
    for wanted in 0..cpus.len() {
        let mut left: Vec<_> = nodes.iter().map(|(_, node)| by_rank(node, wanted)).collect();
        while left.iter().any(|cpus| !cpus.is_empty()) {
            order.extend(left.iter_mut().filter_map(VecDeque::pop_front));
        }
    }
    order
}

fn node_with(cpu: usize) -> NodeId {
    *nodes_of(&[cpu].into()).keys().next().unwrap()
}

/// Checks that each thread has come to its CPU and touched memory near it, and that the program and
/// all of its children have started on `start`.
#[track_caller]
fn check(grown: &Grown, places: &[usize], start: &BTreeSet<usize>, machine: &Machine) {
    assert_eq!(&numbers(&grown.main), start, "{grown:?}");
    // There are twice as many threads as places.
    assert_eq!(grown.order(), [places, places].concat(), "{grown:?}");
    for (cpu, thread) in grown.order().into_iter().zip(&grown.threads) {
        let node = node_with(cpu);
        if machine.all.contains(&node) {
            assert_eq!(thread.pages, Pages::from([(node, PAGES_OF_THREAD)]), "{grown:?}");
        }
    }
    let last = places[places.len() - 1].to_string();
    assert_eq!(grown.after, last, "the pin is back: {grown:?}");
    assert_eq!(grown.children.len(), 3, "{grown:?}");
    for (way, told) in &grown.children {
        assert_eq!(&numbers(&told[0]), start, "{way}: {grown:?}");
        // The threads of a new program come to the places from the first one on.
        let first = told.get(1).map(String::as_str);
        let is_program = (way != "fork").then_some(places[0].to_string());
        assert_eq!(first, is_program.as_deref(), "{way}: {grown:?}");
    }
}

#[test]
fn sparse_goes_from_node_to_node_and_dense_fills_a_node() {
    const NAME: &str = "threads::sparse_goes_from_node_to_node_and_dense_fills_a_node";
    let Some(machine) = Machine::of(NAME) else { return };
    let (near, far) = (cpus_of(machine.near), cpus_of(machine.far));
    let [a, b] = [machine.near, machine.far].map(|node| node.0.to_string());
    // All CPUs but the first one of the first node, so that nodes have unequal numbers of them.
    let some = &machine.cpus() - &[*near.first().unwrap()].into();
    let [some_list, far_cpu] = [&some, &[*far.last().unwrap()].into()]
        .map(|cpus: &BTreeSet<usize>| id_list(cpus.iter().copied()));
    let two = format!("{a},{b}");
    for who in Who::users() {
        for (flags, cpus) in [
            (vec![], machine.cpus()),
            (vec!["-N", &b], far.clone()),
            (vec!["-N", &two], &near | &far),
            (vec!["-C", &some_list], some.clone()),
            (vec!["-C", &far_cpu], [*far.last().unwrap()].into()),
        ] {
            for place in ["sparse", "dense"] {
                let flags = [&["--place", place][..], &flags].concat();
                let (grown, said) = grow(who, &flags, 2 * cpus.len());
                assert_eq!(said, "", "{flags:?}");
                check(&grown, &order(place, &cpus), &cpus, &machine);
                assert_eq!(grown.pages.values().sum::<usize>(), PAGES, "{grown:?}");
            }
        }
    }
}

/// Checks a program with a home that may run on these CPUs, and has twice as many threads.
#[track_caller]
fn check_home(grown: &Grown, home: NodeId, cpus: &BTreeSet<usize>, machine: &Machine) {
    let places = grown.order()[..cpus.len()].to_vec();
    assert_eq!(&places.iter().copied().collect::<BTreeSet<_>>(), cpus, "{grown:?}");
    // The nodes from near to far, and the second hyper-threads of all cores after the first ones.
    // Nodes that are equally far may be in any order.
    let turn = |cpu: &usize| {
        let node = node_with(*cpu);
        (rank(*cpu, &(&cpus_of(node) & cpus)), node != home, distance(home, node))
    };
    assert!(places.is_sorted_by_key(turn), "the home is {home}: {grown:?}");
    // A node is filled before the next one: none comes twice.
    let mut turns: Vec<_> = places.iter().map(|cpu| (turn(cpu).0, node_with(*cpu))).collect();
    turns.dedup();
    let different: BTreeSet<_> = turns.iter().collect();
    assert_eq!(turns.len(), different.len(), "the home is {home}: {grown:?}");
    check(grown, &places, &(&cpus_of(home) & cpus), machine);
    assert_eq!(grown.pages, Pages::from([(home, PAGES)]), "{grown:?}");
}

/// The nodes with memory that have CPUs.
fn homes(machine: &Machine) -> Vec<NodeId> {
    machine.all.iter().copied().filter(|node| !cpus_of(*node).is_empty()).collect()
}

#[test]
fn a_program_starts_at_home_and_grows_to_the_nearest_nodes() {
    const NAME: &str = "threads::a_program_starts_at_home_and_grows_to_the_nearest_nodes";
    let Some(machine) = Machine::of(NAME) else { return };
    for who in Who::users() {
        for home in homes(&machine) {
            let threads = 2 * machine.cpus().len();
            let (grown, said) = grow(who, &["--home", &home.0.to_string()], threads);
            assert_eq!(said, "");
            check_home(&grown, home, &machine.cpus(), &machine);
        }
        for node in machine.without_cpus() {
            let error = refused(pageleap(who, &["--home", &node.0.to_string()]));
            assert!(error.contains(&format!("node {} has no CPUs", node.0)), "{error}");
        }
        // A shell that may not run on the first CPU of the first node.
        let cpus = &machine.cpus() - &[*cpus_of(machine.near).first().unwrap()].into();
        let pageleap_again = reachable(Path::new(env!("CARGO_BIN_EXE_pageleap")));
        let outer = ["-C", &id_list(cpus.iter().copied()), &pageleap_again, "run"];
        for home in homes(&machine) {
            let name = home.0.to_string();
            let flags = [&outer[..], &["--home", &name]].concat();
            if cpus_of(home).is_disjoint(&cpus) {
                let error = refused(pageleap(who, &flags));
                assert!(
                    error
                        .contains(&format!("node {name} has no CPU on which this process may run")),
                    "{error}"
                );
                continue;
            }
            let (grown, said) = grow(who, &flags, 2 * cpus.len());
            assert_eq!(said, "");
            check_home(&grown, home, &cpus, &machine);
        }
    }
}

/// Keeps these CPUs busy while `body` runs.
fn while_busy<T>(cpus: &BTreeSet<usize>, body: impl FnOnce() -> T) -> T {
    let (running, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        for cpu in cpus {
            let (running, stop) = (&running, &stop);
            scope.spawn(move || {
                // SAFETY: zeros are a set without CPUs, and the calls use only this set.
                let failed = unsafe {
                    let mut set: libc::cpu_set_t = std::mem::zeroed();
                    libc::CPU_SET(*cpu, &mut set);
                    libc::sched_setaffinity(0, size_of_val(&set), &set)
                };
                assert_eq!(failed, 0);
                running.fetch_add(1, Relaxed);
                while !stop.load(Relaxed) {
                    spin_loop();
                }
            });
        }
        assert!(soon(|| running.load(Relaxed) == cpus.len()));
        body()
    })
}

/// The home that was chosen, by what the launcher says.
#[track_caller]
fn chosen(said: &str, homes: &[NodeId]) -> NodeId {
    let is = |node: &&NodeId| said.contains(&format!("the home is {node}: "));
    let named: Vec<&NodeId> = homes.iter().filter(is).collect();
    assert_eq!(named.len(), 1, "{said}");
    *named[0]
}

#[test]
fn the_home_is_the_node_whose_cores_are_idle() {
    const NAME: &str = "threads::the_home_is_the_node_whose_cores_are_idle";
    let Some(machine) = Machine::of(NAME) else { return };
    let homes = homes(&machine);
    let threads = 2 * machine.cpus().len();
    for who in Who::users() {
        let auto = |busy: &BTreeSet<usize>| {
            let run = || grow(who, &["-v", "--home", "auto"], threads);
            let (grown, said) = while_busy(busy, run);
            let home = chosen(&said, &homes);
            assert!(said.contains(" of its cores are idle"), "{said}");
            check_home(&grown, home, &machine.cpus(), &machine);
            (home, said)
        };
        // One node is busy. Without that it would be the home, because it has the lowest number.
        let (home, said) = auto(&cpus_of(machine.near));
        assert_ne!(home, machine.near, "{said}");
        // All nodes but one are busy.
        for idle in [machine.near, machine.far] {
            let (home, said) = auto(&(&machine.cpus() - &cpus_of(idle)));
            assert_eq!(home, idle, "{said}");
        }
    }
}

#[test]
fn a_home_without_room_is_passed_over_by_name() {
    const NAME: &str = "threads::a_home_without_room_is_passed_over_by_name";
    let Some(machine) = Machine::of(NAME) else { return };
    let homes = homes(&machine);
    let free = || -> Vec<(u64, NodeId)> {
        let topology = Topology::read().unwrap();
        let free = |node: &NodeId| (topology.node(*node).unwrap().free_bytes, *node);
        let mut free: Vec<_> = homes.iter().map(free).collect();
        free.sort_unstable();
        free
    };
    // The node that has the least has even less then.
    let (least, fullest) = free()[0];
    let _taken = Pool::builder(fullest, TAKEN.min(least / 3)).build().unwrap();
    let free = free();
    let ((least, fullest), (most, emptiest)) = (free[0], free[free.len() - 1]);
    if most - least < CLEARLY {
        return skip(NAME, &"the nodes have equally much free memory");
    }
    let needed = (least + (most - least) / 2) >> 20;
    let threads = 2 * machine.cpus().len();
    let passed_over = |node: NodeId| format!("{node} is passed over: ");
    for who in Who::users() {
        let size = format!("{needed}m");
        let (grown, said) = grow(who, &["-v", "--home", "auto", "--size", &size], threads);
        let line = said.lines().find(|line| line.contains(&passed_over(fullest))).expect(&said);
        let reason = format!(" MiB of its memory are free, and {needed} are needed");
        assert!(line.ends_with(&reason), "{line}");
        assert!(!said.contains(&passed_over(emptiest)), "{said}");
        let home = chosen(&said, &homes);
        assert_ne!(home, fullest, "{said}");
        check_home(&grown, home, &machine.cpus(), &machine);
        // No node has room.
        let all = format!("{}m", (most >> 20) * 2);
        let error = refused(pageleap(who, &["--home", "auto", "--size", &all]));
        for node in &homes {
            assert!(error.contains(&passed_over(*node)), "{error}");
        }
    }
}
