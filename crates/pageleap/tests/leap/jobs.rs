//! The handle of a running job: cancelling, time-outs, dropping, polling, progress.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::common::{
    check_stamp, for_page_sizes, in_lab, leap, migration, pool_mappings, pools, rest, soon, stamp,
    turn,
};
use pageleap::{
    BASE_PAGE, CopyMethod, CopyUse, Ended, Job, Migration, PageSize, Phase, Pool, Region, audit,
};

/// Bytes of a region whose job, page by page, takes long enough for a test to act meanwhile.
fn long() -> usize {
    if in_lab() { 4 << 20 } else { 32 << 20 }
}

/// A migration, page by page, that takes ten minutes on any machine: tests stop it.
fn endless_job<'a>(region: &'a Region, to: &Pool) -> Migration<'a> {
    let job = Migration::new().range(region, 0..region.len(), to);
    job.rate_limit(region.len() as u64 / 600).area_bytes(region.page_size().bytes()).threads(1)
}

/// A migration, page by page, that waits for guards as long as it takes.
fn patient_job<'a>(region: &'a Region, to: &Pool) -> Migration<'a> {
    let job = Migration::new().range(region, 0..region.len(), to);
    job.pin_patience(Duration::MAX).area_bytes(region.page_size().bytes()).threads(1)
}

fn wait_until_something_moved(job: &Job) {
    assert!(soon(|| job.progress().bytes_migrated > 0));
}

/// Free bytes of both pools.
fn free(pools: &[Pool; 2]) -> u64 {
    pools[0].free_bytes() + pools[1].free_bytes()
}

#[test]
fn a_cancelled_job_leaves_whole_pages_and_can_be_finished() {
    let _turn = turn();
    let pools = pools(PageSize::Base, long() as u64).unwrap();
    let [near, far] = &pools;
    let region = Region::new(near, long()).unwrap();
    stamp(&region, 0..long(), 1);
    let pages = (long() / 4096) as u64;

    // Cancelled at once, whatever the job has done by then.
    let job = endless_job(&region, far).start().unwrap();
    job.cancel();
    let report = job.wait();
    assert!(matches!(report.ended, Ended::Cancelled), "{report}");
    assert_eq!(report.pages.total(), pages);
    let moved_first = report.pages.migrated;
    check_stamp(&region, 0..long(), 1);

    // Cancelled in the middle.
    let job = endless_job(&region, far).start().unwrap();
    wait_until_something_moved(&job);
    job.cancel();
    let report = job.wait();
    assert!(matches!(report.ended, Ended::Cancelled), "{report}");
    assert!(report.pages.migrated > 0 && report.pages.not_attempted > 0, "{report}");
    assert_eq!(report.pages.unchanged, moved_first);
    let moved = report.pages.migrated + report.pages.unchanged;
    assert_eq!(far.free_bytes(), (pages - moved) * 4096);
    assert_eq!(free(&pools), long() as u64, "frames leaked");
    check_stamp(&region, 0..long(), 1);
    audit(&[near, far], &[&region]).unwrap();

    // The rest completes. A cancellation after the end has no effect.
    let job = migration(&region, 0..long(), far).area_bytes(1 << 20).start().unwrap();
    assert!(soon(|| job.is_finished()));
    job.cancel();
    let report = job.wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated, pages - moved);
    check_stamp(&region, 0..long(), 1);
    audit(&[near, far], &[&region]).unwrap();
}

#[test]
fn a_timeout_stops_a_job_between_areas() {
    let _turn = turn();
    for_page_sizes("a_timeout_stops_a_job_between_areas", 8, |pools| {
        let [near, far] = &pools;
        let page = near.page_size().bytes();
        let region = Region::new(near, 8 * page).unwrap();
        stamp(&region, 0..8 * page, 1);
        let mappings = pool_mappings().len();
        let start =
            |time| migration(&region, 0..8 * page, far).timeout(time).start().unwrap().wait();
        let report = start(Duration::from_nanos(1));
        assert!(matches!(report.ended, Ended::TimedOut), "{report}");
        assert_eq!((report.pages.not_attempted, report.bytes_copied), (8, 0), "{report}");
        assert_eq!(free(&pools), 8 * page as u64, "frames leaked");
        assert!(pool_mappings().len() <= mappings + 1);
        check_stamp(&region, 0..8 * page, 1);
        let report = start(Duration::from_secs(3600));
        assert_eq!((report.ended.is_completed(), report.pages.migrated), (true, 8), "{report}");
        check_stamp(&region, 0..8 * page, 1);
        audit(&[near, far], &[&region]).unwrap();
    });
}

#[test]
fn dropping_a_job_cancels_it_and_waits() {
    let _turn = turn();
    let pools = pools(PageSize::Base, long() as u64).unwrap();
    let [near, far] = &pools;
    let region = Region::new(near, long()).unwrap();
    stamp(&region, 0..long(), 1);
    let job = endless_job(&region, far).start().unwrap();
    wait_until_something_moved(&job);
    drop(job);
    // The job has ended: its frames are back, and other jobs may move the range.
    assert_eq!(free(&pools), long() as u64);
    let here = near.free_bytes();
    assert!(here > 0 && here < long() as u64, "the job was not stopped in the middle");
    audit(&[near, far], &[&region]).unwrap();
    leap(&region, 0..long(), near);
    check_stamp(&region, 0..long(), 1);
}

#[test]
fn dropping_a_region_ends_its_job_and_frees_its_frames() {
    let _turn = turn();
    let pools = pools(PageSize::Base, long() as u64 + (64 << 10)).unwrap();
    let [near, far] = &pools;
    let other = Region::new(near, 64 << 10).unwrap();
    stamp(&other, 0..64 << 10, 2);
    for together in [false, true] {
        let region = Region::new(near, long()).unwrap();
        let mut job = endless_job(&region, far);
        if together {
            job = job.range(&other, 0..64 << 10, far);
        }
        let job = job.start().unwrap();
        wait_until_something_moved(&job);
        drop(region);
        assert!(job.is_finished(), "the drop returned before the job had ended");
        let report = job.wait();
        assert!(matches!(report.ended, Ended::RegionDropped), "{report}");
        assert_eq!(free(&pools), 2 * long() as u64 + (64 << 10), "frames leaked");
        audit(&[near, far], &[&other]).unwrap();
        check_stamp(&other, 0..64 << 10, 2);
    }
    leap(&other, 0..64 << 10, far);
    check_stamp(&other, 0..64 << 10, 2);
}

/// Whether a descriptor becomes readable in time. With a timeout of -1 the wait has no limit.
fn readable(fd: BorrowedFd<'_>, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the call reads and writes one entry, which lives in this frame.
    let ready = unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    assert!(ready >= 0 && poll.revents & !libc::POLLIN == 0, "{ready} {:#x}", poll.revents);
    ready == 1
}

#[test]
fn a_job_becomes_readable_when_it_has_ended() {
    let _turn = turn();
    let [near, far] = pools(PageSize::Base, long() as u64).unwrap();
    let region = Region::new(&near, long()).unwrap();
    // The guard keeps the job from ending before it has been seen running.
    let mut guard = Some(region.pin(0..1).unwrap());
    let job = patient_job(&region, &far).start().unwrap();
    let fd = job.as_fd().try_clone_to_owned().unwrap();
    let mut before = 0;
    loop {
        let (ended, ready) = (job.is_finished(), readable(job.as_fd(), 0));
        assert!(!ready || job.is_finished(), "readable before the end");
        if ended {
            break;
        }
        before += u64::from(!ready);
        if before > 10 {
            guard = None;
        }
        rest();
    }
    assert!(guard.is_none(), "the job ended although a page was guarded");
    assert!(readable(job.as_fd(), -1) && readable(job.as_fd(), 0), "it does not stay readable");
    assert!(job.wait().ended.is_completed());
    assert!(readable(fd.as_fd(), 0));

    // poll(2) sleeps until the end of the job.
    let guard = region.pin(0..1).unwrap();
    let job = patient_job(&region, &near).start().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            drop(guard);
        });
        assert!(readable(job.as_fd(), -1) && job.is_finished());
    });
    assert_eq!(job.wait().pages.migrated, (long() / 4096) as u64);
}

#[test]
fn progress_only_grows() {
    let _turn = turn();
    let [near, far] = pools(PageSize::Base, long() as u64).unwrap();
    let region = Region::new(&near, long()).unwrap();
    // Each guard holds back one page, so that there are steps to be seen.
    let pages = [3, 2, 1].map(|number| number * BASE_PAGE);
    let mut guards = Vec::from(pages.map(|at| region.pin(at..at + BASE_PAGE).unwrap()));
    let job = patient_job(&region, &far).start().unwrap();
    let rank = |phase| match phase {
        Phase::Migrating => 0,
        Phase::Recycling => 1,
        Phase::Finished => 2,
    };
    let mut last = job.progress();
    let mut steps = 0;
    while last.phase != Phase::Finished {
        let now = job.progress();
        assert!(rank(now.phase) >= rank(last.phase), "{last:?} then {now:?}");
        assert!(now.bytes_migrated >= last.bytes_migrated && now.bytes_copied >= last.bytes_copied);
        assert_eq!(now.bytes_total, long() as u64);
        assert!(now.bytes_migrated <= now.bytes_total, "{now:?}");
        steps += usize::from(now.bytes_migrated > last.bytes_migrated);
        last = now;
        if last.bytes_migrated == (long() - guards.len() * BASE_PAGE) as u64 {
            guards.pop();
        }
        rest();
    }
    assert!(steps >= pages.len(), "{steps} steps");
    assert_eq!(job.progress().bytes_migrated, long() as u64);
    assert_eq!(job.wait().bytes_copied, long() as u64);
}

/// Jobs that move enough together make one trial of each pair of nodes. Its winner stays, and the
/// trial changes no page.
#[test]
fn the_fastest_copy_is_found_once_and_the_report_names_it() {
    let _turn = turn();
    /// Enough for a trial's pieces. Seven such jobs are worth a trial.
    const LEN: usize = 40 << 20;
    let [near, far] = pools(PageSize::Base, LEN as u64).unwrap();
    let region = Region::new(&near, LEN).unwrap();
    let mut found: Vec<CopyUse> = Vec::new();
    let mut tried = 0;
    let go = |to, limit| {
        let mut job = Migration::new().range(&region, 0..LEN, to);
        if let Some(limit) = limit {
            job = job.rate_limit(limit);
        }
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        report
    };
    for (round, to) in (1..=16).zip([&far, &near].into_iter().cycle()) {
        // Frames that the region has left have what it had there, so it has something else now.
        stamp(&region, 0..LEN, round);
        let report = go(to, None);
        check_stamp(&region, 0..LEN, round);
        let [copies] = report.copies[..] else { panic!("one pair of nodes: {report}") };
        assert!(report.to_string().contains(&format!("copied by {copies}")), "{report}");
        assert_eq!(copies.to, to.nodes()[0], "{report}");
        if !copies.tried {
            assert_eq!(copies.method, CopyMethod::DEFAULT, "{report}");
            assert_eq!(tried, 0, "what was found is forgotten: {report}");
            continue;
        }
        tried += usize::from(copies.from == near.nodes()[0]);
        match found.iter().find(|of| (of.from, of.to) == (copies.from, copies.to)) {
            Some(before) => assert_eq!(*before, copies, "a second trial: {report}"),
            None => found.push(copies),
        }
    }
    assert!(tried > 0, "no trial was made");
    // Others may have made the trial, so that a limited job uses its winner too.
    let report = go(&far, Some(1 << 40));
    assert_eq!(report.copies, found[..1], "{report}");
}
