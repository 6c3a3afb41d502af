//! How fast a job copies, and how long other threads wait for it: the settings, and what the report
//! says of them.

mod common;

use std::time::{Duration, Instant};

use common::{check_stamp, engines, pools, soon, stamp, turn};
use pageleap::{Ended, Error, Migration, PageSize, Pool, Region};

const BYTES: usize = 8 << 20;

fn scene() -> ([Pool; 2], Region) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    (pools, region)
}

/// A limit is a shortest time, and no machine is too slow to keep it.
#[test]
fn a_rate_limit_is_kept() {
    const PER_SECOND: u64 = 40 << 20;
    let _turn = turn();
    for engine in engines() {
        let (pools, region) = scene();
        let job = Migration::new().range(&region, 0..BYTES, &pools[1]).engine(engine);
        let report = job.rate_limit(PER_SECOND).threads(2).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        // There is no pause after the last area of each thread, and up to 10 ms may be caught up.
        let paid = report.bytes_copied - 2 * report.area_bytes as u64 - PER_SECOND / 100;
        assert!(report.migrate_ns as f64 >= paid as f64 / PER_SECOND as f64 * 1e9, "{report}");
        assert!(report.area_bytes <= 2 << 20, "{report}");
        check_stamp(&region, 0..BYTES, 1);
    }
}

#[test]
fn time_without_copies_is_not_caught_up() {
    const PER_SECOND: u64 = 40 << 20;
    let _turn = turn();
    let (pools, region) = scene();
    let guard = region.pin(0..BYTES).unwrap();
    let job = Migration::new().range(&region, 0..BYTES, &pools[1]).rate_limit(PER_SECOND);
    let job = job.pin_patience(Duration::from_secs(600)).start().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(job.progress().bytes_copied, 0);
    let begin = Instant::now();
    drop(guard);
    let report = job.wait();
    assert!(report.ended.is_completed(), "{report}");
    let paid = BYTES as u64 - report.area_bytes as u64 - PER_SECOND / 100;
    assert!(begin.elapsed().as_secs_f64() >= paid as f64 / PER_SECOND as f64, "{report}");
}

/// There is no pause after the last area. At this rate it would last weeks.
#[test]
fn a_job_ends_with_its_last_area() {
    /// The most that an area has that is closed before it is copied, at first.
    const AREA: usize = pageleap::DEFAULT_AREA_BYTES;
    let _turn = turn();
    for engine in engines() {
        let (pools, region) = scene();
        let job =
            Migration::new().range(&region, 0..AREA, &pools[1]).engine(engine).area_bytes(AREA);
        let report = job.rate_limit(1).threads(2).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
    }
}

#[test]
fn a_job_that_pauses_can_be_cancelled_and_times_out() {
    let _turn = turn();
    let (pools, region) = scene();
    // The whole job would take hours.
    let job = || Migration::new().range(&region, 0..BYTES, &pools[1]).rate_limit(100);
    let cancelled = job().start().unwrap();
    assert!(soon(|| cancelled.progress().bytes_migrated > 0));
    cancelled.cancel();
    let report = cancelled.wait();
    assert!(matches!(report.ended, Ended::Cancelled) && report.pages.not_attempted > 0, "{report}");
    let report = job().timeout(Duration::from_millis(20)).start().unwrap().wait();
    assert!(matches!(report.ended, Ended::TimedOut), "{report}");
    let refused = job().rate_limit(0).start().map(drop).unwrap_err();
    assert!(matches!(refused, Error::BadArgument { .. }), "{refused}");
    check_stamp(&region, 0..BYTES, 1);
}

#[test]
fn windows_are_compared_with_the_budget() {
    let _turn = turn();
    for engine in engines() {
        let (pools, region) = scene();
        let leap = |to: &Pool, budget| {
            let job = Migration::new().range(&region, 0..BYTES, to).engine(engine);
            let report = job.wait_budget(budget).start().unwrap().wait();
            assert!(report.ended.is_completed() && report.windows.count > 0, "{report}");
            report
        };
        let impossible = leap(&pools[1], Duration::from_nanos(1));
        assert_eq!(impossible.counts.windows_over_budget, impossible.windows.count, "{impossible}");
        let generous = leap(&pools[0], Duration::MAX);
        assert_eq!(generous.counts.windows_over_budget, 0, "{generous}");
        // If windows exceed the budget, areas shrink. With `mprotect` areas keep their size,
        // because smaller ones would not help.
        let smaller = impossible.windows.count > generous.windows.count;
        assert_eq!(
            smaller,
            impossible.engine != pageleap::Engine::Mprotect,
            "{impossible}\n{generous}"
        );
        check_stamp(&region, 0..BYTES, 1);
    }
}
