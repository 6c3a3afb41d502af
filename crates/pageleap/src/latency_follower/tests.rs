use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::pool::Pool;
use crate::units::PageSize;

const MB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

fn often() -> FollowPolicy {
    FollowPolicy::new().every(Duration::from_millis(1)).longest_pause(0)
}

/// A node with CPUs and memory that this process may use.
fn node() -> NodeId {
    let nodes = NodeFacts::of(&Topology::read().unwrap());
    let usual = nodes.iter().find(|(id, of)| of.is_allowed && of.nearest_with_cpus == **id);
    *usual.unwrap().0
}

fn region(pool: &Pool) -> Region {
    Region::new(pool, 8 * MB).unwrap()
}

fn pool() -> Pool {
    Pool::builder(node(), 8 * MB as u64).build().unwrap()
}

fn one_latency() -> Latencies {
    let mut latencies = Latencies::default();
    latencies.set(node(), node(), 100.0);
    latencies
}

#[test]
fn a_follower_ends_with_its_region_and_frees_its_frames() {
    let pool = pool();
    // Dropped while it scans all the time: no job may be left that keeps frames.
    for _ in 0..20 {
        let region = region(&pool);
        let follower = region.follow_latency(one_latency, often()).unwrap();
        drop(region);
        assert!(follower.status().has_ended);
        assert!(follower.wait_for(u64::MAX, PATIENCE).is_none(), "it waits for nothing");
        assert!(Region::new(&pool, 8 * MB).is_ok(), "frames of a dropped region are free");
    }
}

#[test]
fn a_follower_that_is_dropped_leaves_the_region_alone() {
    let pool = pool();
    let region = region(&pool);
    for _ in 0..20 {
        drop(region.follow_latency(one_latency, often()).unwrap());
        // Nobody has a claim on it any more.
        region.move_page_tables(0..region.len(), node()).unwrap().wait();
    }
    assert!(region.verify().unwrap().is_right());
}

#[test]
fn a_long_pause_does_not_delay_the_end() {
    let pool = pool();
    let region = region(&pool);
    let slow = FollowPolicy::new().every(Duration::MAX);
    let follower = region.follow_latency(one_latency, slow).unwrap();
    assert!(follower.wait_for(1, PATIENCE).is_some());
    assert!(follower.wait_for(2, Duration::from_millis(10)).is_none());
    drop(follower);
}

/// The last owner of a region may be the source itself.
#[test]
fn a_source_may_drop_the_region() {
    let pool = pool();
    let region = Arc::new(region(&pool));
    let mut owned = Some(region.clone());
    let may_drop = Arc::new(AtomicBool::new(false));
    let may = may_drop.clone();
    let source = move || {
        if may.load(Ordering::Acquire) {
            drop(owned.take());
        }
        one_latency()
    };
    let follower = region.follow_latency(source, often()).unwrap();
    drop(region);
    may_drop.store(true, Ordering::Release);
    assert!(follower.wait_for(u64::MAX, PATIENCE).is_none());
    assert!(follower.status().has_ended);
    assert!(Region::new(&pool, 8 * MB).is_ok(), "its frames are free");
    // And it may own the region until the end.
    let region = Arc::new(self::region(&Pool::builder(node(), 8 * MB as u64).build().unwrap()));
    let owned = region.clone();
    let source = move || {
        let _ = owned.len();
        one_latency()
    };
    let follower = region.follow_latency(source, often()).unwrap();
    drop(region);
    drop(follower);
}

#[test]
fn threads_are_found_by_their_cpus() {
    let topology = Topology::read().unwrap();
    // SAFETY: the call takes nothing, and returns a number.
    let id = unsafe { libc::gettid() } as u32;
    let node = node_of_thread(&topology, id).unwrap();
    assert!(topology.nodes().iter().any(|known| known.id == node && !known.cpus.is_empty()));
    assert_eq!(node_of_thread(&topology, u32::MAX), None);
    let pool = pool();
    let region = region(&pool);
    let policy = often().threads([id]);
    let samples = samples(&region, &policy, Latencies::default()).unwrap();
    assert_eq!(samples.threads.values().sum::<u64>(), 1);
    let policy = often().walks_from([node, NodeId(900)]);
    assert_eq!(super::samples(&region, &policy, Latencies::default()).unwrap().threads.len(), 2);
}

#[test]
fn parts_are_whole_pages_of_page_table_with_their_nodes() {
    let pool = pool();
    let region = region(&pool);
    let all = || parts(region.inner()).0;
    let before = all();
    assert_eq!(before.iter().map(|part| part.range.len()).sum::<usize>(), 8 * MB, "{before:?}");
    region.move_page_tables(2 * MB..4 * MB, node()).unwrap().wait();
    let moved = all();
    let asked = moved.iter().find(|part| part.range.contains(&(2 * MB))).unwrap();
    assert_eq!((asked.tables, asked.data), (Some(node()), node()), "{moved:?}");
    assert_eq!(asked.pages as usize * 4096, asked.range.len());
    let empty = Region::reserve(4 * MB, PageSize::Base).unwrap();
    assert_eq!(parts(empty.inner()).0, []);
}

#[test]
fn dropping_it_in_a_child_waits_for_no_lock_that_was_held_at_the_fork() {
    let pool = pool();
    let region = region(&pool);
    let follower = region.follow_latency(one_latency, often()).unwrap();
    let shared = follower.shared.clone();
    let held = lock(&shared.state);
    // SAFETY: the child drops values that have no other owner there, and ends without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above. A child that waits for the lock is killed.
        unsafe {
            libc::alarm(20);
            drop((follower, region));
            libc::_exit(0);
        }
    }
    let mut status = -1;
    // SAFETY: the call writes one number.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child waits for a thread that it does not have");
    drop(held);
}
