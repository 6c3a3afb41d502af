//! Injects refusals of UFFDIO_MOVE, on the real kernel.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

use pageleap_sys::{self as sys, Errno};

use crate::units::BASE_PAGE;

/// Injects a call that takes pages and ends only when the place of its first page has been filled.
pub(super) const STUCK: Errno = Errno(libc::ETIME);

/// Injects a call that moves pages and reports that it was refused.
pub(super) const UNTOLD: Errno = Errno(libc::ENODATA);

/// Injects an mprotect of the second half of the pages in the range, just before the call.
pub(super) const SPLIT: Errno = Errno(libc::EXDEV);

/// Protects the second half of these pages against writes, so that they lie in two mappings.
pub(super) fn split(at: usize, len: usize) {
    let half = (len / 2).next_multiple_of(BASE_PAGE);
    // SAFETY: pages of the test.
    unsafe { sys::protect(at + half, len - half, libc::PROT_READ) }.unwrap();
}

/// Whether a page is present.
pub(super) fn is_present(page: usize) -> bool {
    let mut resident = 0;
    // SAFETY: the call writes one byte.
    let asked = unsafe { libc::mincore(page as *mut _, 1, &raw mut resident) };
    asked == 0 && resident & 1 == 1
}

/// Which calls of UFFDIO_MOVE are refused: `times` calls from number `first` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) first: u64,
    pub(super) times: u64,
    pub(super) errno: Errno,
}

/// A plan under way.
#[derive(Default)]
pub(super) struct Refuse {
    calls: AtomicU64,
    from: AtomicU64,
    to: AtomicU64,
    errno: AtomicI32,
}

impl Refuse {
    pub(super) fn set(&self, plan: Plan) {
        self.from.store(plan.first, Relaxed);
        self.to.store(plan.first + plan.times, Relaxed);
        self.errno.store(plan.errno.0, Relaxed);
    }

    /// Whether the next call is refused.
    pub(super) fn now(&self) -> Option<Errno> {
        let call = self.calls.fetch_add(1, Relaxed);
        let planned = (self.from.load(Relaxed)..self.to.load(Relaxed)).contains(&call);
        planned.then(|| Errno(self.errno.load(Relaxed)))
    }
}

#[cfg(not(any(miri, shuttle)))]
mod on_the_kernel {
    use super::super::mapped::Mapped;
    use super::super::ranges::RangeMemory;
    use super::super::{HUGE, MemoryMigration};
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use crate::anonymous::MemoryEngine;
    use crate::error::Error;
    use crate::job::area::Reason;
    use crate::job::outcomes::PageOutcome;
    use crate::job::report::{Ended, Report};
    use crate::observe;
    use crate::topology::Topology;
    use pageleap_sys::Advice;

    const BYTES: usize = 2 * HUGE;

    /// Leaps the memory; `None` if this kernel or user cannot.
    fn leap(memory: &Mapped, plan: Option<Plan>) -> Option<Report> {
        let node = Topology::read().unwrap().nodes()[0].id;
        let at = memory.start() as *mut u8;
        // SAFETY: nobody else knows the memory.
        let mut migration = unsafe { MemoryMigration::new().range(at, BYTES, node) }.renew(true);
        migration.refuse = plan;
        match migration.start() {
            Err(Error::EngineRefused { .. }) => None,
            job => Some(job.unwrap().wait()),
        }
    }

    /// Refuses each call with each error, once and several times: no page is lost, and the next
    /// leap moves all of them.
    #[test]
    fn any_move_may_be_refused_and_nothing_is_lost() {
        for huge in [false, true] {
            let memory = Mapped::new(BYTES, HUGE).unwrap();
            let advice = if huge { Advice::HugePage } else { Advice::NoHugePage };
            memory.advise(0..BYTES, advice).unwrap();
            let pages = || (memory.start()..memory.start() + BYTES).step_by(BASE_PAGE);
            for page in pages() {
                // SAFETY: a word of the memory.
                unsafe { (page as *mut usize).write_volatile(page) };
            }
            let check = |plan: &dyn std::fmt::Debug| {
                // SAFETY: as above.
                let kept =
                    |page: &usize| unsafe { (*page as *const usize).read_volatile() } == *page;
                assert!(pages().all(|page| kept(&page)), "LOST: {plan:?}");
            };
            let Some(report) = leap(&memory, None) else { return };
            let calls = report.calls["UFFDIO_MOVE(out)"] + report.calls["UFFDIO_MOVE(in)"];
            // Each copy is preceded by an mprotect, which waits for writes from outside.
            assert!(report.calls["mprotect"] > 0, "{report}");
            // The stuck call takes its time, so only two calls are tried.
            for first in [0, calls / 2] {
                let plan = Plan { first, times: 1, errno: STUCK };
                leap(&memory, Some(plan)).unwrap();
                check(&plan);
            }
            let errors = [libc::EBUSY, libc::EAGAIN, libc::ENOMEM, libc::EINVAL, libc::ENOENT];
            for errno in errors.map(Errno).into_iter().chain([UNTOLD, SPLIT]) {
                for (first, times) in (0..calls).flat_map(|n| [(n, 1), (n, 2), (n, 40)]) {
                    let plan = Plan { first, times, errno };
                    leap(&memory, Some(plan)).unwrap();
                    check(&plan);
                    let both = libc::PROT_READ | libc::PROT_WRITE;
                    // SAFETY: memory of the test.
                    unsafe { sys::protect(memory.start(), BYTES, both) }.unwrap();
                }
                let report = leap(&memory, None).unwrap();
                assert_eq!(report.pages.migrated, (BYTES / BASE_PAGE) as u64, "{report}");
                check(&errno);
            }
        }
    }

    /// The first look for a tracer finds none, the second one finds one.
    #[test]
    fn a_tracer_that_comes_ends_leaps_in_place() {
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        let memory = Mapped::new(BYTES, HUGE).unwrap();
        memory.advise(0..BYTES, Advice::NoHugePage).unwrap();
        memory.advise(0..BYTES, Advice::PopulateWrite).unwrap();
        let node = Topology::read().unwrap().nodes()[0].id;
        let at = memory.start() as *mut u8;
        // SAFETY: nobody else knows the memory.
        let migration = unsafe { MemoryMigration::new().range(at, BYTES, node) }.renew(true);
        let migration = migration.engine(MemoryEngine::UffdMove);
        // At this rate the pause after the first area is far longer than the time between two
        // looks.
        let mut migration = migration.rate_limit(BYTES as u64);
        migration.tracer = || (LOOKS.fetch_add(1, Relaxed) > 0).then_some(7);
        let report = match migration.start() {
            Err(Error::EngineRefused { .. }) => return,
            job => job.unwrap().wait(),
        };
        assert!(matches!(report.ended, Ended::Failed(Error::NotMoved { .. })), "{report}");
        let (first, last) = (&report.runs[0], &report.runs[report.runs.len() - 1]);
        assert_eq!((first.outcome, first.reason), (PageOutcome::Migrated, None), "{report}");
        let stayed = (PageOutcome::Failed, Some(Reason::Traced));
        assert_eq!((last.outcome, last.reason), stayed, "{report}");
        assert_eq!(report.pages.migrated + report.pages.failed, (BYTES / BASE_PAGE) as u64);
        assert_eq!(LOOKS.load(Relaxed), 2, "it was certain then");
    }

    /// A job that pauses to keep to its rate looks for a tracer as well, and unregisters the ranges
    /// in the pause. Otherwise a thread that reads a missing page would wait for a thread that the
    /// tracer has stopped.
    #[test]
    fn a_tracer_that_comes_in_a_pause_finds_nothing_registered() {
        static TRACED: AtomicBool = AtomicBool::new(false);
        let memory = Mapped::new(BYTES, HUGE).unwrap();
        memory.advise(0..BYTES, Advice::NoHugePage).unwrap();
        memory.advise(0..BYTES, Advice::PopulateWrite).unwrap();
        let node = Topology::read().unwrap().nodes()[0].id;
        let start = memory.start();
        let is_registered =
            || observe::smaps(start, BYTES).unwrap().iter().any(|m| m.has_flag("um"));
        let wait_until = |what: &str, is_so: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !is_so() {
                assert!(began.elapsed() < Duration::from_secs(60), "{what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        // SAFETY: nobody else knows the memory.
        let migration = unsafe { MemoryMigration::new().range(start as *mut u8, BYTES, node) };
        let migration = migration.renew(true).engine(MemoryEngine::UffdMove);
        // The pauses take an hour.
        let mut migration = migration.rate_limit((BYTES / 3600) as u64);
        migration.tracer = || TRACED.load(Relaxed).then_some(7);
        let job = match migration.start() {
            Err(Error::EngineRefused { .. }) => return,
            job => job.unwrap(),
        };
        wait_until("nothing has moved", &|| job.progress().bytes_migrated > 0);
        assert!(is_registered());
        TRACED.store(true, Relaxed);
        wait_until("registered while traced", &|| !is_registered());
        job.cancel();
        let report = job.wait();
        assert!(matches!(report.ended, Ended::Cancelled), "{report}");
        let last = &report.runs[report.runs.len() - 1];
        let left = (PageOutcome::NotAttempted, Some(Reason::Stopped));
        assert_eq!((last.outcome, last.reason), left, "the job was not in its pause: {report}");
    }

    /// The kernel's engine learns of huge pages on kernels without PAGEMAP_SCAN as well.
    #[test]
    fn smaps_tell_which_ranges_have_huge_pages() {
        for advice in [Advice::NoHugePage, Advice::HugePage] {
            let memory = Mapped::new(BYTES, HUGE).unwrap();
            memory.advise(0..BYTES, advice).unwrap();
            memory.advise(0..BYTES, Advice::PopulateWrite).unwrap();
            let start = memory.start();
            // A machine without free huge pages has given base pages.
            let expected = observe::mapped_pages(start, BYTES).unwrap().huge_mapped_ratio > 0.0;
            assert!(!expected || advice == Advice::HugePage);
            let range = start..start + BYTES;
            let mut ranges = RangeMemory::read(std::slice::from_ref(&range), true).unwrap();
            ranges.look_for_huge_in_smaps().unwrap();
            let has_huge = ranges.process.mappings.iter().any(|mapping| mapping.huge_bytes > 0);
            assert_eq!(has_huge, expected);
        }
    }
}
