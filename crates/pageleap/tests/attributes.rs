//! Access, locks and advice that a user has set on parts of a region survive a leap. They are read
//! from smaps.

#[path = "common/children.rs"]
mod children;
mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use children::mapped_in_a_child;

use common::{
    End, address, case, check_stamp, engines, engines_for, for_page_sizes, leap, migration, nodes,
    pool_ranges, pools, region_flags, run_case, skip, stamp, surprises, turn, vm_flags,
};
use pageleap::backend::{Advice, Call, Errno, Linux};
use pageleap::{
    BASE_PAGE, Ended, Engine, EngineChoice, Migration, PageSize, Pool, Region, WarningKind, audit,
    observe,
};
use refusing::{Refusing, Request};

/// Pages of each region. Few, because some of them are locked and RLIMIT_MEMLOCK may be 8 MB.
const PAGES: usize = 8;
const ALL: Range<usize> = 0..PAGES;

/// A call that sets an attribute of a range, with its name.
#[derive(Clone, Copy)]
struct Setting(&'static str, fn(*mut libc::c_void, usize) -> libc::c_int);

macro_rules! setting {
    ($name:ident, $words:literal, |$p:ident, $len:ident| $call:expr) => {
        const $name: Setting = Setting($words, |$p, $len| {
            // SAFETY: `apply` passes whole pages of a region that no other thread uses. The call
            // changes no contents.
            unsafe { $call }
        });
    };
}

setting!(LOCK, "mlock", |p, len| libc::mlock(p, len));
setting!(LOCK_ON_FAULT, "mlock2(MLOCK_ONFAULT)", |p, len| libc::mlock2(
    p,
    len,
    libc::MLOCK_ONFAULT
));
setting!(DONT_DUMP, "MADV_DONTDUMP", |p, len| libc::madvise(p, len, libc::MADV_DONTDUMP));
setting!(DO_DUMP, "MADV_DODUMP", |p, len| libc::madvise(p, len, libc::MADV_DODUMP));
setting!(DO_FORK, "MADV_DOFORK", |p, len| libc::madvise(p, len, libc::MADV_DOFORK));
setting!(RANDOM, "MADV_RANDOM", |p, len| libc::madvise(p, len, libc::MADV_RANDOM));
setting!(SEQUENTIAL, "MADV_SEQUENTIAL", |p, len| libc::madvise(p, len, libc::MADV_SEQUENTIAL));
setting!(NO_HUGE_PAGES, "MADV_NOHUGEPAGE", |p, len| libc::madvise(p, len, libc::MADV_NOHUGEPAGE));
setting!(HUGE_PAGES, "MADV_HUGEPAGE", |p, len| libc::madvise(p, len, libc::MADV_HUGEPAGE));
setting!(READ, "mprotect READ", |p, len| libc::mprotect(p, len, libc::PROT_READ));
setting!(NONE, "mprotect NONE", |p, len| libc::mprotect(p, len, libc::PROT_NONE));
setting!(WRITE, "mprotect WRITE", |p, len| libc::mprotect(p, len, libc::PROT_WRITE));
setting!(READ_EXEC, "mprotect READ|EXEC", |p, len| libc::mprotect(
    p,
    len,
    libc::PROT_READ | libc::PROT_EXEC
));
setting!(READ_WRITE, "mprotect READ|WRITE", |p, len| libc::mprotect(
    p,
    len,
    libc::PROT_READ | libc::PROT_WRITE
));

fn bytes(region: &Region, pages: &Range<usize>) -> Range<usize> {
    let page = region.page_size().bytes();
    pages.start * page..pages.end * page
}

/// Applies a setting. Returns false if the kernel does not know the setting for such memory.
fn apply(region: &Region, pages: &Range<usize>, setting: Setting) -> bool {
    let range = bytes(region, pages);
    let start = region.as_ptr().as_ptr().wrapping_add(range.start);
    if (setting.1)(start.cast(), range.len()) == 0 {
        return true;
    }
    let error = std::io::Error::last_os_error();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{}: {error}", setting.0);
    false
}

/// Applies the settings to a region, and lets it leap there and back with each engine. Attributes
/// and contents must stay the same.
fn survives([near, far]: &[Pool; 2], settings: &[(Range<usize>, Setting)]) {
    let words: Vec<_> =
        settings.iter().map(|(pages, setting)| format!("{} on {pages:?}", setting.0)).collect();
    let region = Region::new(near, PAGES * near.page_size().bytes()).unwrap();
    let all = bytes(&region, &ALL);
    stamp(&region, all.clone(), 11);
    if !settings.iter().all(|(pages, setting)| apply(&region, pages, *setting)) {
        return skip(
            &format!("{words:?} on {} pages", near.page_size()),
            &"the kernel answers EINVAL",
        );
    }
    let before = region_flags(&region);
    for engine in engines_for(near.page_size()) {
        for to in [far, near] {
            let report = migration(&region, all.clone(), to).engine(engine).start().unwrap().wait();
            assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
            assert_eq!(region_flags(&region), before, "{engine}: {words:?}");
            audit(&[near, far], &[&region]).unwrap();
        }
    }
    assert!(apply(&region, &ALL, READ_WRITE));
    check_stamp(&region, all.clone(), 11);
    stamp(&region, all.clone(), 12);
    leap(&region, all.clone(), far);
    check_stamp(&region, all, 12);
}

/// Checks [`survives`] for each list of settings and each page size.
fn each_survives(test: &str, settings: &[&[(Range<usize>, Setting)]]) {
    let _turn = turn();
    for_page_sizes(test, PAGES, |pools| {
        settings.iter().for_each(|settings| survives(&pools, settings))
    });
}

#[test]
fn a_new_region_is_kept_from_children_and_stays_so() {
    let _turn = turn();
    for_page_sizes("a_new_region_is_kept_from_children_and_stays_so", PAGES, |pools| {
        let region = Region::new(&pools[0], PAGES * pools[0].page_size().bytes()).unwrap();
        let flags = region_flags(&region);
        assert_eq!(flags.len(), 1, "{flags:?}");
        let has = |flag| flags[0].1.split(' ').any(|f| f == flag);
        assert!(
            flags[0].1.starts_with("rw-s ") && has("dc") && !has("dd") && !has("lo"),
            "{flags:?}"
        );
        drop(region);
        survives(&pools, &[]);
    });
}

/// A mapping of a pool's frames is made by one call, and hidden from children by another. A fork
/// that comes between the two waits for the second one.
#[test]
fn a_fork_waits_until_a_new_mapping_is_hidden() {
    const NAME: &str = "a_fork_waits_until_a_new_mapping_is_hidden";
    /// How long a fork may take that waits for nothing.
    const PATIENCE: Duration = Duration::from_millis(100);
    /// How long a fork waits for a mapping at most.
    const FORK_PATIENCE: Duration = Duration::from_secs(1);
    let _turn = turn();
    for page in common::PAGE_SIZES {
        let bytes = 4 * page.bytes();
        let children = Arc::new(Mutex::new(Vec::new()));
        // The region, which may be inherited where a leap maps it.
        let region_at: Arc<[AtomicUsize; 2]> = Arc::default();
        let anew = Arc::new(AtomicUsize::new(0));
        let (forked, left_out, mapped) = (children.clone(), region_at.clone(), anew.clone());
        let rule = move |request: &Request| {
            let [start, end] = [0, 1].map(|at| left_out[at].load(SeqCst));
            let addr = request.addr;
            let is_others = !(start..end).contains(&addr);
            if is_others && request.advice == Some(Advice::DontFork) {
                let began = Instant::now();
                let child = thread::spawn(move || {
                    let mapped = mapped_in_a_child(&[addr]);
                    (mapped, began.elapsed())
                });
                while !child.is_finished() && began.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(1));
                }
                // A child that is made later may find the next mapping at this address.
                let was_made = child.is_finished();
                forked.lock().unwrap().push((child, was_made));
            }
            let is_anew = is_others && start > 0 && request.call == Call::Map;
            mapped.fetch_add(usize::from(is_anew), SeqCst);
            None
        };
        let advised = region_at.clone();
        let backend = Refusing::new(Arc::new(Linux), rule).before_copy(move |_| {
            let [start, end] = [0, 1].map(|at| advised[at].load(SeqCst));
            if start > 0 {
                // SAFETY: the region, whose contents stay.
                unsafe { libc::madvise(start as *mut _, end - start, libc::MADV_NOHUGEPAGE) };
            }
        });
        let backend = Arc::new(backend);
        let build = |node| {
            let pool = Pool::builder(node, bytes as u64).page_size(page);
            pool.backend(backend.clone()).build()
        };
        let [near, far] = match nodes().map(build) {
            [Ok(near), Ok(far)] => [near, far],
            [Err(error), _] | [_, Err(error)] => {
                common::skip_page_size(NAME, page, error);
                continue;
            }
        };
        let region = Region::new(&near, bytes).unwrap();
        let made = children.lock().unwrap().len();
        assert!(made > 2, "{page}: two pools and a region were made beside {made} forks");
        region_at[1].store(address(&region) + bytes, SeqCst);
        region_at[0].store(address(&region), SeqCst);
        let job = migration(&region, 0..bytes, &far).engine(Engine::Mprotect).start().unwrap();
        let report = job.wait();
        assert!(report.ended.is_completed(), "{report}");
        // No call takes the advice back that page tables have brought to the alias of old frames.
        assert!(anew.load(SeqCst) > 0 || page.is_hugetlb(), "{page}: no alias was mapped anew");
        let children = std::mem::take(&mut *children.lock().unwrap());
        for (child, was_made) in children {
            let (mapped, took) = child.join().unwrap();
            let has_waited_in_vain = took >= FORK_PATIENCE;
            assert!(
                mapped == 0 || !was_made || has_waited_in_vain,
                "{page}: a child got what was being mapped"
            );
        }
    }
}

#[test]
fn locks_survive() {
    each_survives(
        "locks_survive",
        &[&[(ALL, LOCK)], &[(2..5, LOCK)], &[(0..1, LOCK), (7..8, LOCK)]],
    );
}

#[test]
fn locks_on_fault_survive() {
    each_survives(
        "locks_on_fault_survive",
        &[&[(ALL, LOCK_ON_FAULT)], &[(1..4, LOCK), (3..6, LOCK_ON_FAULT)]],
    );
}

#[test]
fn what_children_and_core_dumps_get_survives() {
    each_survives(
        "what_children_and_core_dumps_get_survives",
        &[
            &[(ALL, DONT_DUMP)],
            &[(3..6, DONT_DUMP)],
            &[(ALL, DONT_DUMP), (2..4, DO_DUMP)],
            &[(ALL, DO_FORK)],
            &[(0..3, DO_FORK)],
            &[(ALL, DO_FORK), (4..6, DONT_DUMP)],
        ],
    );
}

#[test]
fn access_patterns_survive() {
    each_survives(
        "access_patterns_survive",
        &[&[(ALL, RANDOM)], &[(ALL, SEQUENTIAL)], &[(1..2, RANDOM), (4..7, SEQUENTIAL)]],
    );
}

#[test]
fn advice_on_huge_pages_survives() {
    each_survives(
        "advice_on_huge_pages_survives",
        &[
            &[(ALL, NO_HUGE_PAGES)],
            &[(ALL, HUGE_PAGES)],
            &[(1..3, NO_HUGE_PAGES), (5..6, HUGE_PAGES)],
        ],
    );
}

#[test]
fn read_only_parts_survive() {
    each_survives(
        "read_only_parts_survive",
        &[&[(ALL, READ)], &[(3..5, READ)], &[(0..1, READ), (1..2, READ_EXEC), (6..8, READ)]],
    );
}

/// Runs in a child, because a migrating thread that reads a page without access ends the process.
#[test]
fn parts_without_access_survive() {
    const NAME: &str = "parts_without_access_survive";
    if case().is_none() {
        let (end, output) = run_case(NAME, "all");
        assert_eq!(end, End::Exited(0), "{output}");
        return;
    }
    each_survives(
        NAME,
        &[
            &[(ALL, NONE)],
            &[(2..5, NONE)],
            &[(0..1, NONE), (3..4, NONE), (6..8, READ)],
            &[(ALL, DO_FORK), (2..4, NONE), (2..3, DONT_DUMP)],
            &[(2..4, WRITE)],
        ],
    );
}

#[test]
fn combinations_survive() {
    each_survives(
        "combinations_survive",
        &[
            &[(ALL, LOCK), (ALL, DONT_DUMP), (ALL, DO_FORK), (ALL, RANDOM)],
            &[(0..5, LOCK), (2..7, DONT_DUMP), (3..4, READ), (6..8, RANDOM), (1..6, DO_FORK)],
            &[(4..8, READ), (4..6, LOCK), (5..7, SEQUENTIAL), (7..8, DONT_DUMP)],
        ],
    );
}

#[test]
fn attributes_survive_small_areas_and_several_threads() {
    let _turn = turn();
    for_page_sizes("attributes_survive_small_areas_and_several_threads", PAGES, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, PAGES * page).unwrap();
        for (pages, setting) in [(0..3, LOCK), (2..6, DONT_DUMP), (4..5, READ), (5..8, RANDOM)] {
            assert!(apply(&region, &pages, setting));
        }
        let before = region_flags(&region);
        // Out of order, so that consecutive pages get frames that are not consecutive.
        for pages in [6..7, 0..1, 3..6, 1..2, 7..8, 2..3] {
            let range = bytes(&region, &pages);
            let job = Migration::new().range(&region, range, &far);
            let report = job.area_bytes(page).threads(3).start().unwrap().wait();
            assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
            assert_eq!(region_flags(&region), before);
        }
        leap(&region, 0..PAGES * page, &near);
        assert_eq!(region_flags(&region), before);
    });
}

#[test]
fn attributes_survive_a_job_that_is_stopped() {
    let _turn = turn();
    for_page_sizes("attributes_survive_a_job_that_is_stopped", PAGES, |[near, far]| {
        let page = near.page_size().bytes();
        let settings =
            [(0..6, DONT_DUMP), (2..8, LOCK), (3..4, READ), (5..7, DO_FORK), (6..7, NONE)];
        // Cancelled at once, and then at any point.
        for waits in [0, 0, 100, 1_000, 10_000, 100_000] {
            let region = Region::new(&near, PAGES * page).unwrap();
            stamp(&region, 0..PAGES * page, 3);
            settings.iter().for_each(|(pages, setting)| assert!(apply(&region, pages, *setting)));
            let before = region_flags(&region);
            let job = migration(&region, 0..PAGES * page, &far).area_bytes(page).start().unwrap();
            (0..waits).for_each(|_| std::hint::spin_loop());
            job.cancel();
            let report = job.wait();
            assert!(matches!(report.ended, Ended::Cancelled | Ended::Completed), "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
            assert_eq!(region_flags(&region), before, "{report}");
            audit(&[&near, &far], &[&region]).unwrap();
            assert!(apply(&region, &ALL, READ_WRITE));
            check_stamp(&region, 0..PAGES * page, 3);
        }
    });
}

/// Two ranges of one mapping move at the same time. What one job does to its areas must not be
/// taken for an attribute of the other range.
#[test]
fn a_moving_neighbour_lends_no_attributes() {
    let _turn = turn();
    const LONG: usize = 32 << 20;
    const SHORT: usize = 64 << 10;
    let [near, far] = pools(PageSize::Base, (LONG + SHORT) as u64).unwrap();
    let region = Region::new(&near, LONG + SHORT).unwrap();
    let flags = || vm_flags(address(&region) + LONG, SHORT);
    let before = flags();
    for to in [&far, &near] {
        // The neighbour takes a second, and waits for the guard if it is done sooner.
        let guard = region.pin(LONG - 1..LONG).unwrap();
        let neighbour = migration(&region, 0..LONG, to).area_bytes(4096).threads(1);
        let neighbour = neighbour.rate_limit(LONG as u64).pin_patience(Duration::from_secs(3600));
        let neighbour = neighbour.start().unwrap();
        let mut guard = Some(guard);
        let mut tries = 0;
        while !neighbour.is_finished() {
            for to in [&far, &near] {
                leap(&region, LONG..LONG + SHORT, to);
                assert_eq!(flags(), before);
            }
            tries += 1;
            if tries == 3 {
                drop(guard.take());
            }
        }
        assert!(neighbour.wait().ended.is_completed());
    }
    stamp(&region, 0..LONG + SHORT, 1);
}

/// A sealed mapping can neither be protected nor replaced, whatever its access. Each case runs in a
/// child, because a sealed mapping cannot be unmapped either.
#[test]
fn a_sealed_part_fails_and_the_rest_moves() {
    const NAME: &str = "a_sealed_part_fails_and_the_rest_moves";
    const SEALED: usize = 2 * 4096;
    const ALL: usize = 8 * 4096;
    let accesses = [
        ("writable", libc::PROT_READ | libc::PROT_WRITE),
        ("readable", libc::PROT_READ),
        ("closed", libc::PROT_NONE),
    ];
    let Some(name) = case() else {
        for (name, _) in accesses {
            let (end, output) = run_case(NAME, name);
            assert_eq!(end, End::Exited(0), "{name}: {output}");
            if let Some((_, reason)) = output.split_once("SKIP ") {
                return skip(NAME, &reason.lines().next().unwrap_or_default());
            }
        }
        return;
    };
    let (_, access) = accesses.into_iter().find(|(n, _)| *n == name).unwrap();
    /// The number of mseal(2), which is new in Linux 6.10 and the same on all architectures.
    const SYS_MSEAL: libc::c_long = 462;
    let [near, far] = pools(PageSize::Base, ALL as u64).unwrap();
    let region = std::mem::ManuallyDrop::new(Region::new(&near, ALL).unwrap());
    stamp(&region, 0..ALL, 1);
    let start = region.as_ptr().as_ptr();
    // SAFETY: two pages of the region, whose contents stay. The checks below leave out what may not
    // be accessed, and the region is never dropped.
    unsafe {
        assert_eq!(libc::mprotect(start.cast(), SEALED, access), 0);
        if libc::syscall(SYS_MSEAL, start, SEALED, 0) != 0 {
            return println!("SKIP no mseal: {}", std::io::Error::last_os_error());
        }
    }
    for round in 0..2 {
        let report = migration(&region, 0..ALL, &far).start().unwrap().wait();
        assert!(matches!(report.ended, Ended::Failed(_)), "{report}");
        let (failed, migrated) = (report.pages.failed, report.pages.migrated);
        assert_eq!((failed, migrated), (2, if round == 0 { 6 } else { 0 }), "{report}");
    }
    let readable = if access == libc::PROT_NONE { SEALED..ALL } else { 0..ALL };
    check_stamp(&region, readable, 1);
    let writable = if access & libc::PROT_WRITE == 0 { SEALED..ALL } else { 0..ALL };
    stamp(&region, writable.clone(), 2);
    check_stamp(&region, writable, 2);
}

/// The kernel splits the mapping of a transparent huge page if a part of it gets attributes of its
/// own. A leap moves whole pages and cannot keep them.
#[test]
fn attributes_within_a_transparent_huge_page_are_refused_until_they_are_gone() {
    const NAME: &str = "attributes_within_a_transparent_huge_page_are_refused_until_they_are_gone";
    let _turn = turn();
    let page = PageSize::Thp;
    let [near, far] = match pools(page, 4 * page.bytes() as u64) {
        Ok(pools) => pools,
        Err(error) => return common::skip_page_size(NAME, page, error),
    };
    let all = 0..4 * page.bytes();
    let region = Region::new(&near, all.end).unwrap();
    stamp(&region, all.clone(), 1);
    let (first, inside) = (address(&region), 2 * page.bytes() + 3 * 4096);
    let access = |at: usize, access| {
        // SAFETY: a base page of the region. Nothing stores to it until it is writable again.
        assert_eq!(unsafe { libc::mprotect((first + at) as *mut _, 4096, access) }, 0);
    };
    access(inside, libc::PROT_READ);
    let job = Migration::new().range(&region, all.clone(), &far).start();
    let error = job.map(drop).unwrap_err();
    assert!(
        error.is_usage() && error.to_string().contains(&format!("{:#x}", first + inside)),
        "{error}"
    );
    leap(&region, 0..2 * page.bytes(), &far);
    leap(&region, 3 * page.bytes()..all.end, &far);
    check_stamp(&region, all.clone(), 1);
    access(inside, libc::PROT_READ | libc::PROT_WRITE);
    leap(&region, all.clone(), &far);
    check_stamp(&region, all, 1);
    assert_eq!(region.mapped_pages().unwrap().huge_mapped_ratio, 1.0);
    audit(&[&near, &far], &[&region]).unwrap();
}

/// Two pools of transparent huge pages with two pages each, whose calls `rule` may refuse, and a
/// region in the first one.
fn huge_scene(
    test: &str,
    rule: impl Fn(&Request) -> Option<Errno> + Send + Sync + 'static,
) -> Option<([Pool; 2], Region)> {
    let page = PageSize::Thp;
    let bytes = 2 * page.bytes();
    let backend = Arc::new(Refusing::new(Arc::new(Linux), rule));
    let build =
        |node| Pool::builder(node, bytes as u64).page_size(page).backend(backend.clone()).build();
    match nodes().map(build) {
        [Ok(near), Ok(far)] => {
            let region = Region::new(&near, bytes).unwrap();
            stamp(&region, 0..bytes, 1);
            Some(([near, far], region))
        }
        [Err(error), _] | [_, Err(error)] => {
            common::skip_page_size(test, page, error);
            None
        }
    }
}

/// While writes to transparent huge pages are followed, everybody maps base pages: else a store and
/// the marking hold each other up, for milliseconds. Pages that stay are mapped as before again.
#[test]
fn followed_huge_pages_are_split_and_those_that_stay_are_huge_again() {
    const NAME: &str = "followed_huge_pages_are_split_and_those_that_stay_are_huge_again";
    let _turn = turn();
    let follows = |choice: &EngineChoice| choice.forced().is_some_and(Engine::follows);
    let engines = engines_for(PageSize::Thp).into_iter().filter(follows);
    for (engine, locked) in engines.flat_map(|engine| [(engine, false), (engine, true)]) {
        let [split, refuses] = [false, true].map(|value| Arc::new(AtomicBool::new(value)));
        let (seen, refuse) = (split.clone(), refuses.clone());
        let scene = huge_scene(NAME, move |request| {
            if request.call != Call::MarkClean {
                return None;
            }
            let flags = vm_flags(request.addr, BASE_PAGE);
            let keeps_out = flags[0].1.split(' ').any(|flag| flag == "nh");
            // The page tables of locked memory cannot be emptied by a call.
            let mapped = observe::mapped_pages(request.addr, BASE_PAGE).unwrap();
            seen.store(keeps_out && (locked || mapped.huge_mapped_ratio == 0.0), SeqCst);
            refuse.load(SeqCst).then_some(Errno(libc::ENOMEM))
        });
        let Some(([near, far], region)) = scene else { return };
        assert!(apply(&region, &(0..2), DO_DUMP) && (!locked || apply(&region, &(0..2), LOCK)));
        let before = region_flags(&region);
        for refused in [true, false] {
            split.store(false, SeqCst);
            refuses.store(refused, SeqCst);
            let job = migration(&region, 0..region.len(), &far).engine(engine).start().unwrap();
            let report = job.wait();
            assert_eq!(report.pages.migrated, if refused { 0 } else { 2 }, "{report}");
            assert!(split.load(SeqCst), "{engine}: huge pages could be mapped while marked");
            assert_eq!(region_flags(&region), before, "{engine}, refused: {refused}");
            assert_eq!(region.mapped_pages().unwrap().huge_mapped_ratio, 1.0, "{engine}");
            audit(&[&near, &far], &[&region]).unwrap();
            check_stamp(&region, 0..region.len(), 1);
        }
    }
}

fn flags_of(region: &Region) -> Vec<String> {
    region_flags(region).into_iter().map(|(_, flags)| flags).collect()
}

/// Even if pages that stay cannot be mapped anew, the advice against huge pages must not reach the
/// alias of frames that are used again.
#[test]
fn advice_against_huge_pages_stays_with_nobody() {
    const NAME: &str = "advice_against_huge_pages_stays_with_nobody";
    let _turn = turn();
    if !engines_for(PageSize::Thp).contains(&Engine::Precopy.into()) {
        return skip(NAME, &"precopy does not work here");
    }
    for engine in [Engine::Precopy.into(), EngineChoice::Auto] {
        // `auto` begins with another engine, and ends with a third one.
        let tracks_left = AtomicBool::new(engine == EngineChoice::Auto);
        let marks_left =
            AtomicUsize::new(if engine == EngineChoice::Auto { 1 } else { usize::MAX });
        let addresses: Arc<[AtomicUsize; 2]> = Arc::default();
        let known = addresses.clone();
        let scene = huge_scene(NAME, move |request| {
            let [start, end] = [0, 1].map(|at| known[at].load(SeqCst));
            let refused = match request.call {
                Call::MarkClean if start > 0 => {
                    let left = marks_left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
                    return left.is_ok().then_some(Errno(libc::ENOMEM));
                }
                Call::Track if tracks_left.swap(false, SeqCst) => libc::ENOMEM,
                Call::Map if (start..end).contains(&request.addr) => libc::EAGAIN,
                _ => return None,
            };
            (start > 0).then_some(Errno(refused))
        });
        let Some(([near, far], region)) = scene else { return };
        let before = flags_of(&region);
        let range = address(&region)..address(&region) + region.len();
        addresses[1].store(range.end, SeqCst);
        addresses[0].store(range.start, SeqCst);
        let job = migration(&region, 0..region.len(), &far).engine(engine).start().unwrap();
        let report = job.wait();
        addresses.iter().for_each(|word| word.store(0, SeqCst));
        assert!(
            report.warnings.iter().any(|words| words.kind == WarningKind::Attributes),
            "{report}"
        );
        check_stamp(&region, 0..region.len(), 1);
        let is_marked = |flags: &String, mark| flags.split(' ').any(|flag| flag == mark);
        if engine == EngineChoice::Auto {
            assert_eq!(report.pages.migrated, 2, "{report}");
            assert_eq!(flags_of(&region), before, "{report}");
        } else {
            assert_eq!(report.pages.migrated, 0, "{report}");
            assert!(flags_of(&region).iter().all(|f| is_marked(f, "hg") && !is_marked(f, "nh")));
            leap(&region, 0..region.len(), &far);
            check_stamp(&region, 0..region.len(), 1);
        }
        drop(region);
        for range in pool_ranges() {
            let flags = vm_flags(range.start, range.len());
            let marked = |flags| ["nh", "hg"].iter().any(|mark| is_marked(flags, mark));
            assert!(!flags.iter().any(|(_, flags)| marked(flags)), "{engine}: {flags:?}");
        }
        // Another region gets the frames, and their page tables.
        let region = Region::new(&far, far.bytes() as usize).unwrap();
        stamp(&region, 0..region.len(), 2);
        leap(&region, 0..region.len(), &near);
        assert_eq!(flags_of(&region), before, "{engine}");
        assert_eq!(region.mapped_pages().unwrap().huge_mapped_ratio, 1.0, "{engine}");
        check_stamp(&region, 0..region.len(), 2);
    }
}

/// `mlockall` also locks the aliases of pools. Such a lock must neither reach a region with the
/// page tables nor stay on frames that a region has given back.
#[test]
fn locks_of_a_pool_do_not_reach_regions() {
    let _turn = turn();
    for engine in engines() {
        let [near, far] = pools(PageSize::Base, (PAGES * BASE_PAGE) as u64).unwrap();
        let is_locked = |range: &Range<usize>| {
            vm_flags(range.start, range.len())
                .iter()
                .any(|(_, flags)| flags.split(' ').any(|flag| flag == "lo"))
        };
        let lock_aliases = |region: Option<&Range<usize>>| {
            for range in pool_ranges().iter().filter(|range| Some(*range) != region) {
                // SAFETY: the range is an alias, which stays mapped. Locking changes no contents.
                let locked =
                    unsafe { libc::mlock(range.start as *const libc::c_void, range.len()) };
                assert_eq!(locked, 0);
            }
        };
        lock_aliases(None);
        let region = Region::new(&near, PAGES * BASE_PAGE).unwrap();
        let start = address(&region);
        let range = start..start + region.len();
        assert!(!is_locked(&range), "{engine}: a new region");
        for to in [&far, &near, &far] {
            lock_aliases(Some(&range));
            let job = Migration::new()
                .range(&region, 0..region.len(), to)
                .engine(engine)
                .start()
                .unwrap();
            assert!(job.wait().ended.is_completed());
            assert!(!is_locked(&range), "{engine}: after a leap");
        }
        drop(region);
        let locked = pool_ranges().iter().filter(|range| is_locked(range)).count();
        assert_eq!(locked, 0, "{engine}: what a job or a region has given back");
    }
}
