//! A region that leaps while something else happens, and cases that each need a process of their
//! own.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::common::{
    End, StopOnDrop, case, engines, migration, no_core_dump, pools, run_case, soon, surprises,
};
use pageleap::{PageSize, Pool, Region};

/// Bytes of the regions here.
pub const BYTES: usize = 256 << 10;
pub const FINE: End = End::Exited(0);
pub const SEGV: End = End::Killed(libc::SIGSEGV);

/// A name, what the child does, and how it must end.
pub type Case = (&'static str, fn(), End);

/// Runs each case in a child and checks how the child ends.
pub fn cases(test: &str, table: &[Case]) {
    if let Some(name) = case() {
        no_core_dump();
        let (_, body, _) = table.iter().find(|(n, ..)| *n == name).unwrap();
        return body();
    }
    for (name, _, expected) in table {
        let (end, output) = run_case(test, name);
        assert_eq!(end, *expected, "case `{name}`:\n{output}");
    }
}

/// Two pools, and a region with frames of the first one.
pub fn scene() -> ([Pool; 2], Region) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    (pools, region)
}

/// Leap number `leap` of a region that goes back and forth: each engine in turn, once each way.
pub fn leap_by_turns(region: &Region, pools: &[Pool; 2], leap: usize) {
    let engine = engines()[leap / 2 % engines().len()];
    let job = migration(region, 0..BYTES, &pools[(leap + 1) % 2]).engine(engine);
    let report = job.start().unwrap().wait();
    assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
}

/// Calls `leap` with 0, 1, 2 and so on in another thread while `body` runs in this one. `body` gets
/// a function that waits for a few more leaps; it fails if the other thread has ended.
pub fn while_leaping(leap: impl Fn(usize) + Sync, body: impl FnOnce(&dyn Fn())) {
    let (stop, leaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            while !stop.load(Relaxed) {
                leap(leaps.load(Relaxed) as usize);
                leaps.fetch_add(1, Relaxed);
            }
        });
        let _stop = StopOnDrop(&stop);
        let wait_for_leaps = || {
            // The first of them may have begun earlier: the others have not.
            let now = leaps.load(Relaxed);
            assert!(soon(|| leaps.load(Relaxed) > now + 2 || mover.is_finished()));
            assert!(!mover.is_finished(), "the leaps have ended");
        };
        wait_for_leaps();
        body(&wait_for_leaps);
        wait_for_leaps();
    });
}

/// Runs `body` while a region of [`BYTES`] bytes leaps back and forth by all engines.
pub fn while_migrating(body: impl FnOnce(&Region)) {
    let (pools, region) = scene();
    while_leaping(|leap| leap_by_turns(&region, &pools, leap), |_| body(&region));
}

/// Writes rising values all over the region and checks them, `rounds` times.
pub fn write_rounds(region: &Region, rounds: u64) {
    let words = region.atomics_u64(0..BYTES).unwrap();
    for round in 1..=rounds {
        words.iter().step_by(64).for_each(|word| word.store(round, Relaxed));
        assert!(words.iter().step_by(64).all(|word| word.load(Relaxed) == round), "LOST a write");
    }
}
