//! Followers move page tables to where a matrix of latencies says, and leave the data alone.
//!
//! The matrix is fed by the tests, so that nothing depends on how fast memory is. On a machine with
//! several nodes the kernel's counts of page tables (`PageTables:` in a node's `meminfo`) are the
//! witness; the library's own account is one everywhere.

mod common;
#[path = "common/nodes.rs"]
mod on_nodes;
#[path = "nodes/page_tables.rs"]
#[allow(dead_code)] // the test binary `nodes` uses the rest
mod page_tables;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{
    End, Kept, StopOnDrop, case, check_stamp, is_root, limit_address_space, rest, run_case, skip,
    soon, stamp, turn,
};
use page_tables::{WIDE, each_meminfo};
use pageleap::decisions::LatencyAware;
use pageleap::latency::Latencies;
use pageleap::topology::Topology;
use pageleap::{
    Error, FollowPolicy, LatencyFollower, Migration, NodeId, PageTableLevel, Pool, Region,
};

const MB: usize = 1 << 20;
/// Pages of PTEs of a region of [`WIDE`] bytes.
const TABLES: u64 = (WIDE / (2 * MB)) as u64;
const PATIENCE: Duration = Duration::from_secs(120);

/// Nanoseconds of a load from the nearest memory in the fed matrix, and from all other memory.
const NEAR: f64 = 100.0;
const FAR: f64 = 300.0;

/// Nodes with memory and CPUs that this process may use.
fn usual_nodes() -> Vec<NodeId> {
    let topology = Topology::read().unwrap();
    let allowed = topology.allowed_nodes();
    let has_cpus = |node: &NodeId| !topology.node(*node).unwrap().cpus.is_empty();
    allowed.into_iter().filter(has_cpus).collect()
}

/// The first of these nodes, where the data lies, and the last one.
fn first_and_last() -> [NodeId; 2] {
    let nodes = usual_nodes();
    [nodes[0], nodes[nodes.len() - 1]]
}

/// A matrix that tests change while a follower reads it.
#[derive(Clone, Default)]
struct Fed(Arc<Mutex<Latencies>>);

impl Fed {
    /// From each node, the memory of this one is the nearest now.
    fn nearest(&self, nearest: NodeId) {
        let mut latencies = Latencies::default();
        let topology = Topology::read().unwrap();
        for from in topology.nodes() {
            for to in topology.nodes() {
                latencies.set(from.id, to.id, if to.id == nearest { NEAR } else { FAR });
            }
        }
        *self.0.lock().unwrap() = latencies;
    }

    fn follow(&self, region: &Region, policy: FollowPolicy) -> LatencyFollower {
        let latencies = self.0.clone();
        region.follow_latency(move || latencies.lock().unwrap().clone(), policy).unwrap()
    }
}

/// A trigger each millisecond. After a scan that moved nothing, every second one is skipped.
fn often() -> FollowPolicy {
    FollowPolicy::new().every(Duration::from_millis(1)).longest_pause(0)
}

fn region_on(node: NodeId) -> (Pool, Region) {
    let pool = Pool::builder(node, WIDE as u64).build().unwrap();
    let region = Region::new(&pool, WIDE).unwrap();
    stamp(&region, 0..WIDE, 1);
    (pool, region)
}

fn asked(region: &Region, node: NodeId) -> u64 {
    region.page_tables().asked_on(PageTableLevel::Pte, node)
}

/// Waits for two scans that find nothing to move.
fn wait_for_rest(follower: &LatencyFollower) {
    let now = follower.status().scans;
    let status = follower.wait_for(now + 2, PATIENCE).unwrap();
    assert_eq!((status.failures, status.bytes_left), (0, 0), "{status:?}");
}

#[test]
fn page_tables_go_where_the_matrix_says_and_the_data_stays() {
    const NAME: &str = "page_tables_go_where_the_matrix_says_and_the_data_stays";
    let _turn = turn();
    let nodes = usual_nodes();
    let witness = is_root() && nodes.len() > 1;
    if nodes.len() < 2 {
        skip(&format!("{NAME} (several nodes)"), &"this machine has one node with memory and CPUs");
    } else if !is_root() {
        skip(&format!("{NAME} (by node)"), &"only root can make the kernel's counters exact");
    }
    let (_pool, region) = region_on(nodes[0]);
    let kept = Kept::of(&region);
    let counted = || if witness { each_meminfo(&nodes, "PageTables") } else { Vec::new() };
    let fed = Fed::default();
    // Of the first node's threads, whichever node the data is on.
    let follower = fed.follow(&region, often().walks_from([nodes[0]]));
    // An empty matrix moves nothing.
    wait_for_rest(&follower);
    assert_eq!(follower.status().moves, 0);

    let stop = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        // Writes values that are there already: a lost page would show them, or others.
        let words = region.atomics_u64(0..WIDE).unwrap();
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                for word in words.iter().step_by(512) {
                    word.store(word.load(Relaxed), Relaxed);
                }
                rounds.fetch_add(1, Relaxed);
                rest();
            }
        });
        let mut before: Option<(usize, Vec<usize>)> = None;
        // To each node, and back to the first one.
        for at in (0..nodes.len()).chain([0]) {
            fed.nearest(nodes[at]);
            let arrived = soon(|| asked(&region, nodes[at]) == TABLES);
            assert!(arrived, "{}: {:?}", region.page_tables(), follower.status());
            wait_for_rest(&follower);
            let now = counted();
            if let Some((from, before)) = before.take().filter(|_| witness) {
                check_moved(&nodes, (from, &before), (at, &now));
            }
            before = Some((at, now));
        }
        let written = rounds.load(Relaxed);
        assert!(soon(|| rounds.load(Relaxed) > written), "the writer stands still");
    });
    let status = follower.status();
    // On one node nobody has asked for it at first. On several they were on the first one.
    assert_eq!(status.bytes_moved, (nodes.len() * WIDE) as u64, "{status:?}");
    assert!(status.decisions.iter().all(|one| one.decision.to.is_none()), "{status:?}");
    assert!(status.decisions[0].decision.reason.contains("whose threads walk"), "{status:?}");
    drop(follower);
    check_stamp(&region, 0..WIDE, 1);
    kept.check(&region);
}

/// Compares the kernel's counts of page tables around a move from one node to another one.
fn check_moved(nodes: &[NodeId], (from, before): (usize, &[usize]), (to, now): (usize, &[usize])) {
    /// Bytes of page tables of others that may come or go meanwhile.
    const STRAY: isize = 24 << 10;
    let all = TABLES as isize * 4096;
    for (i, node) in nodes.iter().enumerate() {
        let wanted = all * (isize::from(i == to) - isize::from(i == from));
        let came = now[i] as isize - before[i] as isize;
        println!("{node}: {came} bytes of page tables came, {wanted} were to");
        assert!((came - wanted).abs() <= STRAY, "{node}: {came} instead of {wanted} bytes came");
    }
}

#[test]
fn without_threads_page_tables_go_with_their_data() {
    let _turn = turn();
    let nodes = usual_nodes();
    let (first, last) = (nodes[0], nodes[nodes.len() - 1]);
    let (_pool, region) = region_on(last);
    let mut latencies = Latencies::default();
    for from in &nodes {
        nodes.iter().for_each(|to| latencies.set(*from, *to, if from == to { NEAR } else { FAR }));
    }
    region.move_page_tables(0..WIDE, first).unwrap().wait();
    assert_eq!(asked(&region, first), TABLES);
    let follower = region.follow_latency(move || latencies.clone(), often()).unwrap();
    assert!(soon(|| asked(&region, last) == TABLES), "{:?}", follower.status());
    wait_for_rest(&follower);
    let status = follower.status();
    assert!(status.decisions[0].decision.reason.contains("where the data lies"), "{status:?}");
}

/// A node that is memory alone is passed over, even if it is the fastest, unless it is allowed.
#[test]
fn nodes_without_cpus_get_page_tables_only_if_asked() {
    const NAME: &str = "nodes_without_cpus_get_page_tables_only_if_asked";
    let _turn = turn();
    let nodes = usual_nodes();
    let allowed = Topology::read().unwrap().allowed_nodes();
    let Some(alone) = allowed.into_iter().find(|node| !nodes.contains(node)) else {
        return skip(NAME, &"no node of this machine is memory alone");
    };
    let (_pool, region) = region_on(nodes[0]);
    let fed = Fed::default();
    fed.nearest(alone);
    let follower = fed.follow(&region, often());
    assert!(follower.wait_for(3, PATIENCE).is_some());
    assert_eq!((asked(&region, alone), follower.status().failures), (0, 0));
    drop(follower);
    let rule = LatencyAware::new().allow_nodes_without_cpus();
    let follower = fed.follow(&region, often().rule(rule));
    assert!(soon(|| asked(&region, alone) == TABLES), "{:?}", follower.status());
    drop(follower);
    check_stamp(&region, 0..WIDE, 1);
}

#[test]
fn a_range_that_a_job_has_is_tried_again_and_is_no_failure() {
    let _turn = turn();
    let [node, away] = first_and_last();
    let (pool, region) = region_on(node);
    let there = Pool::builder(node, WIDE as u64).build().unwrap();
    // The job waits for the guard, and has the region meanwhile.
    let guard = region.pin(0..4096).unwrap();
    let migration = Migration::new().range(&region, 0..WIDE, &there);
    let job = migration.pin_patience(PATIENCE).start().unwrap();
    let fed = Fed::default();
    fed.nearest(away);
    let follower = fed.follow(&region, often());
    assert!(soon(|| follower.status().busy >= 3), "{:?}", follower.status());
    let status = follower.status();
    assert_eq!((status.failures, status.moves), (0, 0), "{status:?}");
    drop(guard);
    let report = job.wait();
    assert!(report.ended.is_completed(), "{report}");
    assert!(soon(|| asked(&region, away) == TABLES), "{:?}", follower.status());
    drop(follower);
    check_stamp(&region, 0..WIDE, 1);
    drop((region, pool, there));
}

#[test]
fn a_move_that_fails_is_told_and_succeeds_later() {
    const NAME: &str = "a_move_that_fails_is_told_and_succeeds_later";
    let _turn = turn();
    if case().is_none() {
        let (end, text) = run_case(NAME, "in a process of its own");
        assert_eq!(end, End::Exited(0), "{text}");
        return;
    }
    let [node, away] = first_and_last();
    let (_pool, region) = region_on(node);
    let fed = Fed::default();
    let follower = fed.follow(&region, often());
    assert!(follower.wait_for(1, PATIENCE).is_some());
    // No address space for the exchange.
    limit_address_space(Some(MB as i64));
    fed.nearest(away);
    let failed = soon(|| follower.status().failures >= 2);
    limit_address_space(None);
    let status = follower.status();
    assert!(failed, "{status:?}");
    let why = status.last_failure.as_ref().map(Error::to_string).unwrap_or_default();
    assert!(why.contains("RLIMIT_AS"), "{status:?}");
    assert!(soon(|| asked(&region, away) == TABLES), "{:?}", follower.status());
    drop(follower);
    check_stamp(&region, 0..WIDE, 1);
}

#[test]
fn a_follower_that_ends_while_page_tables_move_leaves_the_region_whole() {
    let _turn = turn();
    let [node, away] = first_and_last();
    let fed = Fed::default();
    fed.nearest(away);
    // Each time a part of the page tables has moved, or none, or all.
    for times in 0..12 {
        let (_pool, region) = region_on(node);
        let follower = fed.follow(&region, often());
        follower.wait_for(1, Duration::from_micros(300 * times));
        drop(follower);
        println!("{}", region.page_tables());
        check_stamp(&region, 0..WIDE, 1);
        assert!(region.verify().unwrap().is_right());
        // Nothing has the range any more.
        region.move_page_tables(0..WIDE, away).unwrap().wait();
        assert_eq!(asked(&region, away), TABLES);
    }
}
