//! Jobs that move page tables alone, while the program changes the region in the middle of them: it
//! discards pages, sets attributes and forks. A gate in the backend makes each happen where it
//! matters.

#[path = "common/children.rs"]
mod children;
mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use children::mapped_in_a_child;
use common::{
    End, Kept, address, become_nobody, case, check_stamp, is_root, nodes, pool_mappings,
    region_flags, run_case, skip, stamp, status_kb, surprises, turn,
};
use pageleap::backend::{Call, Errno, Linux, Prot};
use pageleap::{
    Ended, Error, PageOutcome, PageSize, PageTableLevel, PageTableMigration, Pool, Reason, Region,
    Report, audit,
};
use refusing::{Refusing, Request};

const MB: usize = 1 << 20;
/// Three areas.
const BYTES: usize = 48 * MB;

/// Decides about a call, which is given with the number of exchanges so far, this one included.
type Rule = dyn Fn(&Region, &Request, usize) -> Option<Errno> + Send + Sync;

/// A region whose jobs meet a rule.
struct Scene {
    /// Boxed, because the rule knows its address.
    region: Box<Region>,
    pool: Pool,
    /// The address of the region while the rule holds, else 0.
    armed: Arc<AtomicUsize>,
    /// The target of each exchange.
    targets: Arc<Mutex<Vec<usize>>>,
}

impl Scene {
    fn new(
        rule: impl Fn(&Region, &Request, usize) -> Option<Errno> + Send + Sync + 'static,
    ) -> Scene {
        let rule: Box<Rule> = Box::new(rule);
        let armed = Arc::new(AtomicUsize::new(0));
        let targets = Arc::new(Mutex::new(Vec::new()));
        let (at, log) = (armed.clone(), targets.clone());
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            let region = at.load(SeqCst);
            if region == 0 {
                return None;
            }
            // Calls that the rule makes itself are let through.
            at.store(0, SeqCst);
            let number = {
                let mut log = log.lock().unwrap();
                log.extend((request.call == Call::Exchange).then_some(request.addr));
                log.len()
            };
            // SAFETY: the region lives until the rule no longer holds.
            let refused = rule(unsafe { &*(region as *const Region) }, request, number);
            at.store(region, SeqCst);
            refused
        }));
        let pool = Pool::builder(nodes()[0], BYTES as u64).backend(backend).build().unwrap();
        let region = Box::new(Region::new(&pool, BYTES).unwrap());
        stamp(&region, 0..BYTES, 1);
        Scene { region, pool, armed, targets }
    }

    fn addresses(&self, mb: Range<usize>) -> Range<usize> {
        address(&self.region) + mb.start * MB..address(&self.region) + mb.end * MB
    }

    /// Moves the page tables of a part under the rule, and checks that no page has another frame.
    fn moves(&self, mb: Range<usize>) -> Report {
        let kept = Kept::of(&self.region);
        self.armed.store(&raw const *self.region as usize, SeqCst);
        let range = mb.start * MB..mb.end * MB;
        let migration = PageTableMigration::new(&self.region, range, nodes()[1]);
        let report = migration.anew().allow_node_without_cpus().run().unwrap();
        self.armed.store(0, SeqCst);
        kept.check(&self.region);
        audit(&[&self.pool], &[&self.region]).unwrap();
        report
    }
}

fn protect(range: &Range<usize>, prot: Prot) {
    // SAFETY: a part of the test's region, which nobody accesses meanwhile.
    assert_eq!(unsafe { libc::mprotect(range.start as *mut _, range.len(), prot.0) }, 0);
}

fn advise(range: &Range<usize>, advice: i32) {
    // SAFETY: a part of the test's region; the advice changes no contents.
    assert_eq!(unsafe { libc::madvise(range.start as *mut _, range.len(), advice) }, 0);
}

/// The bytes of a report with an outcome and a reason, in MB.
fn mb_of(report: &Report, outcome: PageOutcome, reason: Option<Reason>) -> f64 {
    let same = report.runs.iter().filter(|run| (run.outcome, run.reason) == (outcome, reason));
    same.map(|run| run.range.len()).sum::<usize>() as f64 / MB as f64
}

/// Calls never reach beyond the pages that are still the job's, wherever others have left it, and
/// whichever calls are refused because of several mappings.
#[test]
fn a_job_moves_whole_blocks_of_its_own_pages_only() {
    let _turn = turn();
    for errno in [None, Some(Errno(libc::EFAULT))] {
        let scene = Scene::new(move |region, request, number| {
            if request.call != Call::Exchange {
                return None;
            }
            if number == 1 {
                // Half of a block at the beginning of the second area, and one page.
                for part in [16 * MB..17 * MB, 20 * MB..20 * MB + 4096] {
                    // SAFETY: nobody accesses the parts any more.
                    unsafe { region.discard_shared(part).unwrap() };
                }
            }
            // The first call for the rest of the second area, which is several blocks.
            errno.filter(|_| number == 5)
        });
        let report = scene.moves(0..47);
        assert!(report.ended.is_completed(), "{report}");
        let region = scene.addresses(0..48);
        for target in scene.targets.lock().unwrap().iter().filter(|at| region.contains(at)) {
            assert!((target - region.start).is_multiple_of(2 * MB), "{target:#x}, {region:#x?}");
        }
        // 0 to 16, 18 to 20 and 22 to 46 MB.
        assert_eq!(mb_of(&report, PageOutcome::Migrated, None), 42.0, "{errno:?}: {report}");
        // 17 to 18, 20 to 22 but for a page, and 46 to 47 MB.
        let page = 4096.0 / MB as f64;
        let shared = mb_of(&report, PageOutcome::Unchanged, Some(Reason::SharedTable));
        assert_eq!(shared, 4.0 - page, "{errno:?}: {report}");
        let discarded = mb_of(&report, PageOutcome::Unchanged, Some(Reason::Discarded));
        assert_eq!(discarded, 1.0 + page, "{errno:?}: {report}");
        let tables = scene.region.page_tables();
        assert_eq!(tables.asked_on(PageTableLevel::Pte, nodes()[1]), 21, "{errno:?}: {tables}");
        check_stamp(&scene.region, 0..16 * MB, 1);
        check_stamp(&scene.region, 21 * MB..BYTES, 1);
        check_stamp(&scene.region, 17 * MB..20 * MB, 1);
    }
}

/// A lock moves with a mapping, and the kernel would take it off the pages around an area.
#[test]
fn locks_stay_and_are_counted_once() {
    let _turn = turn();
    let before = status_kb("VmLck");
    for refuse in [0, 1, 2, 3] {
        let scene = Scene::new(move |_, request, number| {
            (request.call == Call::Exchange && number == refuse).then_some(Errno(libc::ENOMEM))
        });
        let part = scene.addresses(6..40);
        // SAFETY: a part of the test's region.
        if unsafe { libc::mlock(part.start as *const _, part.len()) } != 0 {
            return skip("locks_stay_and_are_counted_once", &"the limit of locked memory");
        }
        let (flags, locked) = (region_flags(&scene.region), status_kb("VmLck"));
        for _ in 0..2 {
            let report = scene.moves(0..48);
            assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
            assert_eq!(region_flags(&scene.region), flags, "call {refuse} refused");
            assert_eq!(status_kb("VmLck"), locked, "call {refuse} refused");
        }
        check_stamp(&scene.region, 0..BYTES, 1);
        drop(scene);
        assert_eq!(status_kb("VmLck"), before, "call {refuse} refused");
        assert_eq!(pool_mappings(), Vec::<String>::new(), "call {refuse} refused");
    }
}

/// A program that has locked pages and then given its privilege away could not lock them again.
#[test]
fn locks_that_cannot_be_set_again_are_not_taken_off() {
    const NAME: &str = "locks_that_cannot_be_set_again_are_not_taken_off";
    let _turn = turn();
    if case().is_none() {
        if !is_root() {
            return skip(NAME, &"only root can lock so much, and give its privilege away");
        }
        let (end, text) = run_case(NAME, "in a process of its own");
        assert_eq!(end, End::Exited(0), "{text}");
        return;
    }
    let scene = Scene::new(|_, _, _| None);
    let part = scene.addresses(16..48);
    // SAFETY: a part of the test's region; the limit is plain data.
    unsafe {
        if libc::mlock(part.start as *const _, part.len()) != 0 {
            return skip(NAME, &"the limit of locked memory");
        }
        let limit = libc::rlimit { rlim_cur: 8 << 20, rlim_max: 8 << 20 };
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
    }
    become_nobody();
    let (flags, locked) = (region_flags(&scene.region), status_kb("VmLck"));
    let migration = PageTableMigration::new(&scene.region, 0..BYTES, nodes()[1]);
    let report = migration.anew().allow_node_without_cpus().run().unwrap();
    assert!(
        matches!(report.ended, Ended::Failed(Error::Call { call: Call::Lock, .. })),
        "{report}"
    );
    let pages = (report.pages.migrated, report.pages.failed);
    assert_eq!(pages, (16 * MB as u64 / 4096, 32 * MB as u64 / 4096), "{report}");
    assert_eq!((region_flags(&scene.region), status_kb("VmLck")), (flags, locked));
    check_stamp(&scene.region, 0..BYTES, 1);
}

/// Attributes that the program sets in the last moment before an area moves stay, also where the
/// span has to be mapped anew.
#[test]
fn attributes_that_are_set_in_the_last_moment_stay() {
    let _turn = turn();
    for refuse in [0, 2, 4] {
        let scene = Scene::new(move |region, request, number| {
            if request.call != Call::Exchange {
                return None;
            }
            let start = address(region);
            if number == 1 {
                // Before the entries of the first area are taken out: the region becomes writable,
                // and a part of the area gets advice.
                protect(&(start..start + BYTES), Prot::READ_WRITE);
                advise(&(start + 4 * MB..start + 6 * MB), libc::MADV_DONTDUMP);
            }
            (number == refuse).then_some(Errno(libc::ENOMEM))
        });
        let all = scene.addresses(0..48);
        protect(&all, Prot::READ);
        advise(&all, libc::MADV_DOFORK);
        let report = scene.moves(0..48);
        assert!(report.ended.is_completed(), "{report}");
        let flags = region_flags(&scene.region);
        let writable = flags.iter().all(|(_, flags)| flags.starts_with("rw"));
        assert!(writable, "call {refuse} refused: {flags:#x?}");
        let with = |flag: &str| -> Vec<Range<usize>> {
            let has = flags.iter().filter(|(_, flags)| flags.split(' ').any(|one| one == flag));
            has.map(|(range, _)| range.clone()).collect()
        };
        assert_eq!(with("dd"), [scene.addresses(4..6)], "call {refuse} refused");
        assert_eq!(with("dc"), [], "call {refuse} refused: children no longer get the region");
        stamp(&scene.region, 0..BYTES, 2);
        check_stamp(&scene.region, 0..BYTES, 2);
    }
}

#[test]
fn children_get_no_second_copy_of_a_region_that_they_may_have() {
    let _turn = turn();
    let seen = Arc::new(AtomicUsize::new(0));
    let (count, staging) = (seen.clone(), AtomicUsize::new(0));
    let scene = Scene::new(move |region, request, number| {
        if request.call == Call::Exchange && number == 1 {
            staging.store(request.addr, SeqCst);
        }
        // At the end, when the job releases it. No thread can fork while entries wait there.
        let staging = staging.load(SeqCst);
        if request.call == Call::Release && (request.addr..request.addr + MB).contains(&staging) {
            let mapped = [staging, staging + 15 * MB, address(region)];
            count.store(mapped_in_a_child(&mapped) as usize, SeqCst);
        }
        None
    });
    advise(&scene.addresses(0..48), libc::MADV_DOFORK);
    let report = scene.moves(0..48);
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(seen.load(SeqCst), 1, "a child gets the staging, or not the region");
}

#[test]
fn calls_that_are_refused_again_and_again_leave_nothing_behind() {
    let _turn = turn();
    // From this call on each call that maps or exchanges is refused, so many times.
    for (first, times) in [(1, 1), (1, 3), (2, 2), (2, 4), (3, 2), (4, 3)] {
        let refused = AtomicUsize::new(0);
        let scene = Scene::new(move |_, request, number| {
            let maps = matches!(request.call, Call::Exchange | Call::Map);
            let is_next = maps && number >= first && refused.load(SeqCst) < times;
            is_next.then(|| {
                refused.fetch_add(1, SeqCst);
                Errno(libc::ENOMEM)
            })
        });
        let flags = region_flags(&scene.region);
        let report = scene.moves(0..48);
        assert!(report.ended.is_completed(), "{first}, {times}: {report}");
        assert_eq!(region_flags(&scene.region), flags, "{first}, {times}: {report}");
        check_stamp(&scene.region, 0..BYTES, 1);
        drop(scene);
        assert_eq!(pool_mappings(), Vec::<String>::new(), "{first}, {times}: a mapping is left");
    }
}

#[test]
fn impossible_requests_are_refused() {
    let _turn = turn();
    let scene = Scene::new(|_, _, _| None);
    let refused = |range: Range<usize>, node| {
        let result = scene.region.move_page_tables(range, node);
        result.map(|job| job.wait()).expect_err("it was not refused")
    };
    let unknown = pageleap::NodeId(1023);
    assert!(matches!(refused(0..BYTES, unknown), Error::UnknownNode { .. }));
    assert!(matches!(refused(0..BYTES + 4096, nodes()[0]), Error::BadRange { .. }));
    assert!(matches!(refused(1..4096, nodes()[0]), Error::BadRange { .. }));
    if let Ok([pool, _]) = common::pools(PageSize::Huge2M, 2 * MB as u64) {
        let region = Region::new(&pool, 2 * MB).unwrap();
        let error = region.move_page_tables(0..2 * MB, nodes()[0]).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("page_tables name the node"), "{error}");
    }
}
