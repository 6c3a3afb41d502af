//! Leaps between memory nodes under writers, with few mappings, and with refused system calls. Each
//! leap succeeds, or ends with an error that says what to do, and nothing is lost. On a machine
//! with one node each test is skipped; see `nodes.rs`.

mod common;
#[path = "common/filter.rs"]
mod filter;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/nodes.rs"]
mod on_nodes;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use common::{End, StopOnDrop, case, check_stamp, rest, run_case, soon, stamp, turn};
use filter::{Action, install_filter};
use machine_settings::MappingLimit;
use on_nodes::{check_on, for_page_sizes, go, lab_machine, several};
use pageleap::topology::Topology;
use pageleap::{Ended, Error, Migration, NodeId, Placement, Pool, Region, audit, observe};

const MB: usize = 1 << 20;

/// Bytes of most regions of these tests.
const BYTES: usize = 4 * MB;

/// Writes rising values to the words of one writer until stopped, and checks each value before it
/// replaces it. Writers share every 64th word of the region in turns: with `threads` writers, the
/// one with the number `first` has the words `64 * first`, `64 * (first + threads)` and so on.
fn write_until(
    stop: &AtomicBool,
    rounds: &AtomicU64,
    region: &Region,
    first: usize,
    threads: usize,
) {
    const STRIDE: usize = 64;
    let words = region.atomics_u64(0..region.len()).unwrap();
    let mine = || words.iter().step_by(STRIDE).skip(first).step_by(threads);
    while !stop.load(Relaxed) {
        let round = rounds.load(Relaxed);
        for word in mine() {
            assert_eq!(word.load(Relaxed), round, "LOST a write of round {round}");
            word.store(round + 1, Relaxed);
        }
        rounds.store(round + 1, Relaxed);
        rest();
    }
    let round = rounds.load(Relaxed);
    assert!(mine().all(|word| word.load(Relaxed) == round), "LOST a write of round {round}");
}

#[test]
fn writers_lose_nothing_between_any_two_nodes() {
    const NAME: &str = "writers_lose_nothing_between_any_two_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    for_page_sizes(NAME, &nodes, BYTES, |page, pools| {
        let region = Region::new(&pools[0], BYTES).unwrap();
        let (stop, rounds) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 2]);
        thread::scope(|scope| {
            let _stop = StopOnDrop(&stop);
            for (i, mine) in rounds.iter().enumerate() {
                let (stop, region, threads) = (&stop, &region, rounds.len());
                scope.spawn(move || write_until(stop, mine, region, i, threads));
            }
            for from in 0..nodes.len() {
                for to in (0..nodes.len()).filter(|to| *to != from) {
                    go(&region, &pools[from]);
                    let before = rounds.each_ref().map(|mine| mine.load(Relaxed));
                    let report = go(&region, &pools[to]);
                    assert_eq!(report.pages.migrated as usize, BYTES / page.bytes(), "{report}");
                    check_on(&region, nodes[to]);
                    for (mine, before) in rounds.iter().zip(before) {
                        assert!(soon(|| mine.load(Relaxed) > before), "a writer has stopped");
                    }
                }
            }
        });
        let all: Vec<&Pool> = pools.iter().collect();
        audit(&all, &[&region]).unwrap();
    });
}

#[test]
fn a_lower_limit_on_mappings_is_named_and_loses_nothing() {
    const NAME: &str = "a_lower_limit_on_mappings_is_named_and_loses_nothing";
    /// Mappings of a region whose stripes alternate between two files.
    const STRIPES: usize = BYTES / (16 << 10);
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if lab_machine(NAME).is_none() {
        return;
    }
    let ends = [nodes[0], *nodes.last().unwrap()];
    let both = Pool::builder(Placement::interleave(ends), 2 * BYTES as u64).build().unwrap();
    let region = Region::new(both.on(ends[0]), BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    let striped = || both.on(Placement::interleave(ends).stripe_bytes(BYTES / STRIPES));
    let check = || {
        check_stamp(&region, 0..BYTES, 1);
        audit(&[&both], &[&region]).unwrap();
    };
    let mut refused = 0;
    for spare in [0, 20, 100, STRIPES / 2] {
        let limit = MappingLimit::lower_to(observe::mapping_count().unwrap() + spare);
        let job = Migration::new().range(&region, 0..BYTES, striped()).start();
        let error = match job.map(|job| job.wait()) {
            Err(error) => error,
            Ok(report) => {
                assert_eq!(report.pages.total() as usize, BYTES / 4096, "{report}");
                assert_eq!((report.pages.busy, report.pages.not_attempted), (0, 0), "{report}");
                let Ended::Failed(error) = report.ended else {
                    panic!("{spare} mappings were enough")
                };
                error
            }
        };
        assert!(error.to_string().contains("max_map_count"), "{error}");
        refused += 1;
        check();
        drop(limit);
        // With the old limit a job moves the whole region, wherever the last one has stopped.
        go(&region, striped());
        assert!(region.verify().unwrap().is_right());
        check();
        go(&region, both.on(ends[0]));
        check_on(&region, ends[0]);
    }
    assert_eq!(refused, 4);
    // Without stripes few mappings are enough.
    let limit = MappingLimit::lower_to(observe::mapping_count().unwrap() + 20);
    go(&region, both.on(ends[1]));
    check_on(&region, ends[1]);
    drop(limit);
    check();
}

#[test]
fn calls_that_a_filter_refuses_are_done_without_or_named() {
    const NAME: &str = "calls_that_a_filter_refuses_are_done_without_or_named";
    const FILTERS: [(&str, &[libc::c_long]); 5] = [
        ("mbind", &[libc::SYS_mbind]),
        ("move_pages", &[libc::SYS_move_pages]),
        ("userfaultfd", &[libc::SYS_userfaultfd]),
        (
            "what Docker refuses",
            &[
                libc::SYS_mbind,
                libc::SYS_move_pages,
                libc::SYS_set_mempolicy,
                libc::SYS_userfaultfd,
            ],
        ),
        ("policies", &[libc::SYS_mbind, libc::SYS_set_mempolicy]),
    ];
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if let Some(wanted) = case() {
        let (filter, errno) = wanted.split_once('/').unwrap();
        let calls = FILTERS.iter().find(|(name, _)| *name == filter).unwrap().1;
        install_filter(Action::Errno(errno.parse().unwrap()), calls).unwrap();
        let topology = Topology::read().unwrap();
        // Threads on a node's CPUs get memory of that node, even if policies are refused. For a
        // node without CPUs a policy is needed, of the pool or of the threads that fill it.
        let policies =
            [libc::SYS_mbind, libc::SYS_set_mempolicy].iter().any(|call| !calls.contains(call));
        let reachable =
            |node: &&NodeId| policies || !topology.node(**node).unwrap().cpus.is_empty();
        let (near, beyond): (Vec<&NodeId>, Vec<&NodeId>) = nodes.iter().partition(reachable);
        for node in beyond {
            let error = Pool::builder(*node, BYTES as u64).build().unwrap_err();
            assert!(
                matches!(&error, Error::Misplaced { node: named, .. } if named == node),
                "{error}"
            );
            assert!(error.to_string().contains("mbind"), "a remedy: {error}");
        }
        let pools = near.iter().map(|node| Pool::builder(**node, BYTES as u64).build());
        let pools: Vec<Pool> = pools.collect::<Result<_, _>>().unwrap();
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        for (pool, node) in pools.iter().zip(&near).cycle().skip(1).take(2 * pools.len()) {
            go(&region, pool);
            check_on(&region, **node);
            check_stamp(&region, 0..BYTES, 1);
        }
        audit(&pools.iter().collect::<Vec<_>>(), &[&region]).unwrap();
        return;
    }
    for (filter, _) in FILTERS {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let (end, text) = run_case(NAME, &format!("{filter}/{errno}"));
            assert_eq!(end, End::Exited(0), "{filter}, {errno}: {text}");
        }
    }
}
