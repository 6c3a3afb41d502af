//! A region that is being moved while something else happens, and cases that each need a process of
//! their own.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::common::{End, StopOnDrop, case, engines, migration, pools, run_case, soon, surprises};
use pageleap::{PageSize, Pool, Region};

/// Bytes of the regions here.
pub const BYTES: usize = 256 << 10;
pub const FINE: End = End::Exited(0);
pub const SEGV: End = End::Killed(libc::SIGSEGV);

/// Runs each case in a child and compares how it ends.
pub fn cases(test: &str, table: &[(&str, fn(), End)]) {
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

pub fn scene() -> ([Pool; 2], Region) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    (pools, region)
}

/// Leaps back and forth until stopped, by each engine in turns. Returns how often.
pub fn leap_until(stop: &AtomicBool, region: &Region, pools: &[Pool; 2], leaps: &AtomicU64) {
    while !stop.load(Relaxed) {
        let leap = leaps.load(Relaxed) as usize;
        let engine = engines()[leap / 2 % engines().len()];
        let report = migration(region, 0..BYTES, &pools[(leap + 1) % 2])
            .engine(engine)
            .start()
            .unwrap()
            .wait();
        assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
        leaps.fetch_add(1, Relaxed);
    }
}

/// Runs `body` in this thread while another one moves the region.
pub fn while_migrating(body: impl FnOnce(&Region)) {
    let (pools, region) = scene();
    let (stop, leaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| leap_until(&stop, &region, &pools, &leaps));
        let _stop = StopOnDrop(&stop);
        let goes_on = || {
            let now = leaps.load(Relaxed);
            assert!(soon(|| leaps.load(Relaxed) > now + 4 || mover.is_finished()));
            assert!(!mover.is_finished(), "the migrations have ended");
        };
        goes_on();
        body(&region);
        goes_on();
    });
}

/// Writes and checks rising values all over the region, for so many rounds.
pub fn write_rounds(region: &Region, rounds: u64) {
    let words = region.atomics_u64(0..BYTES).unwrap();
    for round in 1..=rounds {
        words.iter().step_by(64).for_each(|word| word.store(round, Relaxed));
        assert!(words.iter().step_by(64).all(|word| word.load(Relaxed) == round), "LOST a write");
    }
}

pub fn address(region: &Region) -> usize {
    region.as_ptr().as_ptr() as usize
}

/// For processes that are meant to die.
pub fn no_core_dump() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads one structure.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
}
