//! Views of a region: further mappings of its frames, whose page tables are made for the threads of
//! one node.

#[path = "common/children.rs"]
mod children;
mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::fs::File;
use std::iter::repeat_n;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use children::mapped_in_a_child;
use common::{
    End, PAGE_SIZES, Place, case, check_stamp, for_page_sizes, is_zero, leap, nodes, places,
    places_in, pool_mappings, pools, run_case, skip, skip_page_size, stamp, turn, vm_flags, works,
    works_for,
};
use pageleap::backend::{Call, Errno, Linux, Model};
use pageleap::{
    Engine, Error, Migration, NodeId, PageSize, PageTableLevel, PageTableMigration, Pool, Region,
    View, audit,
};
use refusing::Refusing;

const MB: usize = 1 << 20;

fn first_of(view: &View<'_>) -> usize {
    view.as_ptr().as_ptr() as usize
}

/// The place of each page of a view.
fn places_of(view: &View<'_>, region: &Region) -> Vec<Option<Place>> {
    let first = first_of(view);
    places_in(first..first + region.len(), region.page_size().bytes())
}

/// Checks that all views map the frames of the region, and that their contents and flags are right.
fn check_views(region: &Region, views: usize) {
    assert_eq!(region.views().len(), views);
    for view in region.views() {
        assert!(places_of(&view, region) == places(region), "{view:?} maps other frames");
        assert_eq!(view.len(), region.len());
        for (range, flags) in vm_flags(first_of(&view), region.len()) {
            let has = |flag: &str| flags.split(' ').any(|word| word == flag);
            // Address space without memory is not hidden.
            let is_backed = flags.starts_with("rw-s");
            assert!(!is_backed || has("dc") && has("dd"), "{range:#x?}: {flags}");
        }
    }
}

fn words_agree(region: &Region) {
    let words = region.atomics_u64(0..region.len()).unwrap();
    for view in region.views() {
        let of_view = view.atomics_u64(0..region.len()).unwrap();
        let differ =
            words.iter().zip(of_view).position(|(a, b)| a.load(Relaxed) != b.load(Relaxed));
        assert_eq!(differ, None, "{view:?}");
    }
}

/// The whole life of views: made, moved along with grow, back, discard and leaps, and dropped.
#[test]
fn views_show_the_region_whatever_happens_to_it() {
    let _turn = turn();
    for_page_sizes("views_show_the_region_whatever_happens_to_it", 8, |[near, far]| {
        let page = near.page_size();
        let bytes = page.bytes();
        let before = pool_mappings().len();
        let mut region = Region::reserve(8 * bytes, page).unwrap();
        region.grow(4 * bytes, &near).unwrap();
        stamp(&region, 0..4 * bytes, 1);
        let [one, other] = nodes();
        region.replicate([one, one, other]).unwrap();
        let views = 3;
        check_views(&region, views);
        words_agree(&region);
        // On demand: what is there is not made again.
        let addresses = |region: &Region| region.views().iter().map(first_of).collect::<Vec<_>>();
        let made = addresses(&region);
        region.replicate([one]).unwrap();
        assert_eq!(addresses(&region), made);

        region.grow(6 * bytes, &near).unwrap();
        check_views(&region, views);
        region.views()[0].atomics_u64(0..region.len()).unwrap()[5 * bytes / 8].store(77, Relaxed);
        assert_eq!(region.atomics_u64(0..region.len()).unwrap()[5 * bytes / 8].load(Relaxed), 77);
        region.discard(bytes..3 * bytes).unwrap();
        check_views(&region, views);
        assert!(region.views()[0].atomics_u64(bytes..2 * bytes).is_err());
        region.back(bytes..3 * bytes, &near).unwrap();
        check_views(&region, views);
        assert!(is_zero(&region, bytes..3 * bytes));
        stamp(&region, 0..6 * bytes, 2);
        if works_for(Engine::StopCopy.into(), page) {
            for to in [&far, &near, &far] {
                let report = leap(&region, 0..region.len(), to);
                assert!(report.engine == Engine::StopCopy, "{report}");
                check_views(&region, views);
                words_agree(&region);
            }
            check_stamp(&region, 0..6 * bytes, 2);
            region.verify().unwrap();
        }
        audit(&[&near, &far], &[&region]).unwrap();

        region.drop_views([one]).unwrap();
        check_views(&region, usize::from(one != other));
        assert!(region.view(one).is_none());
        check_stamp(&region, 0..6 * bytes, 2);
        // Without views any engine moves it again.
        region.drop_views([other]).unwrap();
        leap(&region, 0..region.len(), &near);
        region.replicate(repeat_n(one, 3)).unwrap();
        check_views(&region, 3);
        drop(region);
        for pool in [&near, &far] {
            assert_eq!(pool.free_bytes(), pool.bytes(), "frames leaked");
        }
        assert_eq!(pool_mappings().len(), before, "a mapping leaked");
    });
}

/// Each view has page tables of its own, asked for on its node.
#[test]
fn page_tables_of_a_view_are_counted() {
    let _turn = turn();
    let bytes = 8 * MB;
    for page in PAGE_SIZES {
        let Ok([near, far]) = pools(page, bytes as u64) else { continue };
        let region = Region::new(&near, bytes).unwrap();
        let node = nodes()[0];
        region.replicate([node, node]).unwrap();
        let check = |what: &str| {
            for view in region.views() {
                let tables = view.page_tables();
                let pages = if page == PageSize::Base { 4 } else { 0 };
                assert_eq!(tables.asked_on(PageTableLevel::Pte, node), pages, "{what}: {tables}");
                assert_eq!(tables.unasked(PageTableLevel::Pte), 0, "{what}: {tables}");
            }
        };
        check("made");
        if works_for(Engine::StopCopy.into(), page) {
            leap(&region, 0..bytes, &far);
            check("moved");
        }
        if page == PageSize::Thp {
            for view in region.views() {
                let mapped = view.mapped_pages().unwrap();
                assert_eq!(mapped, region.mapped_pages().unwrap(), "{view:?}");
            }
        }
    }
}

/// A read-only region may be written through a view, so its pages are closed as well.
#[test]
fn a_view_of_read_only_pages_is_writable_before_and_after_a_leap() {
    let _turn = turn();
    let name = "a_view_of_read_only_pages_is_writable_before_and_after_a_leap";
    if !works(Engine::StopCopy.into()) {
        return skip(name, &"the engine stop-copy does not work here");
    }
    let [near, far] = pools(PageSize::Base, 4 * MB as u64).unwrap();
    let region = Region::new(&near, 4 * MB).unwrap();
    region.replicate([nodes()[0]]).unwrap();
    stamp(&region, 0..4 * MB, 5);
    let protect = |prot| {
        // SAFETY: the test's region, to which nobody writes meanwhile but through the view.
        assert_eq!(unsafe { libc::mprotect(region.as_ptr().as_ptr().cast(), 4 * MB, prot) }, 0);
    };
    protect(libc::PROT_READ);
    let words = region.views()[0].atomics_u64(0..4 * MB).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut value = 0;
            while !stop.load(Relaxed) {
                value += 1;
                words[1000].store(value, Relaxed);
            }
            value
        });
        for to in [&far, &near, &far] {
            let job = Migration::new().range(&region, 0..4 * MB, to).start().unwrap();
            let report = job.wait();
            assert!(report.ended.is_completed() && report.engine == Engine::StopCopy, "{report}");
            let others = report.engines.iter().filter(|part| part.engine != Engine::StopCopy);
            assert_eq!(others.count(), 0, "{report}");
        }
        stop.store(true, Relaxed);
        let last = writer.join().unwrap();
        assert_eq!(words[1000].load(Relaxed), last, "LOST");
        let through_region = &region.atomics_u64(0..4 * MB).unwrap()[1000];
        assert_eq!(through_region.load(Relaxed), last, "LOST");
    });
    assert!(common::region_flags(&region).iter().all(|(_, flags)| flags.starts_with("r--s")));
    protect(libc::PROT_READ | libc::PROT_WRITE);
    words[1000].store(5 << 32, Relaxed);
}

/// What a job does with views, and while it does it.
#[test]
fn jobs_and_views_keep_out_of_each_others_way() {
    let _turn = turn();
    let name = "jobs_and_views_keep_out_of_each_others_way";
    if !works(Engine::StopCopy.into()) {
        return skip(name, &"the engine stop-copy does not work here");
    }
    let [near, far] = pools(PageSize::Base, 16 * MB as u64).unwrap();
    let region = Region::new(&near, 8 * MB).unwrap();
    let without = Region::new(&near, 4 * MB).unwrap();
    stamp(&region, 0..8 * MB, 1);
    stamp(&without, 0..4 * MB, 2);
    let node = nodes()[0];
    // Slow enough to be under way.
    let slow = || Migration::new().range(&region, 0..8 * MB, &far).rate_limit(1 << 20).start();
    let job = slow().unwrap();
    let refused = region.replicate([node]).unwrap_err();
    assert!(matches!(refused, Error::RangeBusy { .. }), "{refused}");
    job.cancel();
    job.wait();
    region.replicate([node]).unwrap();
    let job = slow().unwrap();
    // SAFETY: no thread uses the views.
    let refused = unsafe { region.drop_views_shared([node]) }.unwrap_err();
    assert!(matches!(refused, Error::RangeBusy { .. }), "{refused}");
    job.cancel();
    job.wait();
    check_views(&region, 1);
    check_stamp(&region, 0..8 * MB, 1);

    for engine in Engine::ALL.into_iter().filter(|engine| *engine != Engine::StopCopy) {
        let migration = Migration::new().range(&region, 0..8 * MB, &far).engine(engine);
        let refused = migration.start().unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("views") && text.contains("stop-copy"), "{text}");
    }
    // A job over two regions, of which one has views, and one that waits in its caller.
    let both = Migration::new().range(&region, 0..8 * MB, &far).range(&without, 0..4 * MB, &far);
    let report = both.run().unwrap();
    assert!(report.ended.is_completed() && report.engine == Engine::StopCopy, "{report}");
    check_views(&region, 1);
    // Page tables of the region move alone, and those of the views stay.
    let tables = region.views()[0].page_tables();
    let report = PageTableMigration::new(&region, 0..8 * MB, node).anew().run().unwrap();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(region.views()[0].page_tables(), tables);
    check_views(&region, 1);
    words_agree(&region);
    check_stamp(&region, 0..8 * MB, 1);
    check_stamp(&without, 0..4 * MB, 2);
}

/// Calls change parts of a region with views, while a job moves the rest.
#[test]
fn parts_are_discarded_and_backed_while_the_rest_leaps() {
    let _turn = turn();
    let name = "parts_are_discarded_and_backed_while_the_rest_leaps";
    if !works(Engine::StopCopy.into()) {
        return skip(name, &"the engine stop-copy does not work here");
    }
    let bytes = 16 * MB;
    let [near, far] = pools(PageSize::Base, bytes as u64 + MB as u64).unwrap();
    let region = Region::new(&near, bytes).unwrap();
    region.replicate(repeat_n(nodes()[1], 2)).unwrap();
    stamp(&region, 0..bytes, 1);
    let part = 15 * MB..16 * MB;
    let mut at = 1;
    for round in 0..10 {
        let pool = [&near, &far][at];
        let job = Migration::new().range(&region, 0..bytes, pool).area_bytes(64 << 10).start();
        let job = job.unwrap();
        // SAFETY: no thread accesses the part until it is backed again.
        let discarded =
            unsafe { region.discard_shared_within(part.clone(), Duration::from_secs(10)) };
        discarded.unwrap();
        let patience = Duration::from_secs(10);
        region.back_within(part.clone(), &near, patience).unwrap();
        assert!(is_zero(&region, part.clone()), "round {round}");
        let report = job.wait();
        assert!(report.ended.is_completed(), "{report}");
        check_views(&region, 2);
        words_agree(&region);
        check_stamp(&region, 0..part.start, 1);
        audit(&[&near, &far], &[&region]).unwrap();
        at = 1 - at;
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_and_change_nothing() {
    let _turn = turn();
    let [near, _] = pools(PageSize::Base, MB as u64).unwrap();
    let region = Region::new(&near, MB).unwrap();
    let mappings = pool_mappings().len();
    let node = nodes()[0];
    let text = |refused: Result<(), Error>| refused.unwrap_err().to_string();
    let unknown = text(region.replicate([node, NodeId(4000)]));
    assert!(unknown.contains("4000"), "{unknown}");
    let many = text(region.replicate(repeat_n(node, 65)));
    assert!(many.contains("65") && many.contains("64"), "{many}");
    assert_eq!((region.views().len(), pool_mappings().len()), (0, mappings));
    // A region without memory may have views, which grow with it.
    let empty = Region::reserve(4 * MB, PageSize::Base).unwrap();
    empty.replicate([node]).unwrap();
    empty.grow(MB / 2, &near).err();
    check_views(&empty, 1);
    let huge = Region::reserve(1 << 30, PageSize::Huge1G).unwrap();
    let refused = text(huge.replicate([node]));
    assert!(refused.contains("1 GB"), "{refused}");
    // Dropping views of a node that has none.
    let mut empty = empty;
    empty.drop_views([NodeId(4000)]).unwrap();
    check_views(&empty, 1);
}

/// A cpuset that excludes a node is told before anything is made.
#[test]
fn a_node_outside_of_the_cpuset_gets_no_view() {
    let model = Arc::new(Model::new());
    let pool = Pool::builder(NodeId(0), MB as u64).backend(model.clone()).build().unwrap();
    let region = Region::new(&pool, MB).unwrap();
    let in_use = model.pages_in_use();
    model.forbid_node(1);
    let refused = region.replicate([NodeId(0), NodeId(1)]).unwrap_err();
    assert!(matches!(refused, Error::NodeNotAllowed { node: NodeId(1) }), "{refused}");
    assert_eq!((region.views().len(), model.pages_in_use()), (0, in_use));
    region.replicate([NodeId(0)]).unwrap();
    assert_eq!(model.pages_in_use(), in_use + MB / 4096);
}

/// Two mappings of a hugetlb file share a page of page table where both cover one GB. When an entry
/// of such a page is dropped, the mapping loses all of its entries there.
#[test]
fn views_of_hugetlb_pages_share_no_page_tables() {
    const NAME: &str = "views_of_hugetlb_pages_share_no_page_tables";
    let _turn = turn();
    let (page, bytes) = (PageSize::Huge2M, 1 << 30);
    let pool = match Pool::builder(nodes()[0], bytes as u64).page_size(page).build() {
        Ok(pool) => pool,
        Err(error) => return skip_page_size(NAME, page, error),
    };
    let region = Region::new(&pool, bytes).unwrap();
    region.replicate(repeat_n(nodes()[0], 3)).unwrap();
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let absent = |view: &View<'_>| {
        let is_absent = |at: &usize| {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, (at / 4096 * 8) as u64).unwrap();
            u64::from_ne_bytes(entry) >> 63 == 0
        };
        let first = first_of(view);
        (first..first + bytes).step_by(page.bytes()).filter(is_absent).count()
    };
    for view in region.views() {
        assert_eq!(first_of(&view) % bytes, 0, "aligned so that it could share");
        assert_eq!(absent(&view), 0, "{view:?}");
        // SAFETY: a page of a view that nobody accesses; its contents are in the file.
        let dropped = unsafe {
            libc::madvise(view.as_ptr().as_ptr().cast(), page.bytes(), libc::MADV_DONTNEED)
        };
        assert_eq!((dropped, absent(&view)), (0, 1), "{view:?}");
    }
}

/// Children do not get views.
#[test]
fn a_child_does_not_inherit_views() {
    let _turn = turn();
    let [near, far] = pools(PageSize::Base, 4 * MB as u64).unwrap();
    let region = Region::new(&near, 4 * MB).unwrap();
    region.replicate(repeat_n(nodes()[0], 2)).unwrap();
    let firsts: Vec<usize> = region.views().iter().map(first_of).collect();
    assert_eq!(mapped_in_a_child(&firsts), 0);
    if works(Engine::StopCopy.into()) {
        leap(&region, 0..4 * MB, &far);
        assert_eq!(mapped_in_a_child(&firsts), 0);
    }
}

/// A call for a standby fails half-way, and another thread maps memory into the hole. That memory
/// is left alone, and the job takes other address space, also if there is none for a while.
#[test]
fn memory_in_a_hole_of_a_standby_is_left_alone() {
    let _turn = turn();
    let name = "memory_in_a_hole_of_a_standby_is_left_alone";
    if !works(Engine::StopCopy.into()) {
        return skip(name, &"the engine stop-copy does not work here");
    }
    const CANARY: u64 = 0x5eed;
    const AREA: usize = 256 << 10;
    // With 12, areas whose place in the standby is that of the hole find no other one either.
    for refusals in [0, 2, 12] {
        // 0: not yet; 1: the next mapping fails; else the canary's address.
        let (hole, reserves) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (at, refused) = (hole.clone(), reserves.clone());
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            let strikes = request.call == Call::Map
                && at.compare_exchange(1, request.addr, Relaxed, Relaxed).is_ok();
            if strikes {
                refused.store(refusals, Relaxed);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                // SAFETY: the call that is refused was about to replace this mapping, and its
                // caller takes what lies there for a hole. The second half stays one.
                unsafe {
                    let start = request.addr as *mut libc::c_void;
                    assert_eq!(libc::munmap(start, AREA), 0);
                    let canary = libc::mmap(start, AREA / 2, prot, flags, -1, 0);
                    assert_eq!(canary, start);
                    canary.cast::<u64>().write_volatile(CANARY);
                }
                return Some(Errno(libc::ENOMEM));
            }
            let less = |left: usize| left.checked_sub(1);
            (request.call == Call::Reserve && refused.fetch_update(Relaxed, Relaxed, less).is_ok())
                .then_some(Errno(libc::ENOMEM))
        }));
        let pool = || {
            let pool = Pool::builder(nodes()[0], 4 * MB as u64);
            pool.backend(backend.clone()).build().unwrap()
        };
        let (near, far) = (pool(), pool());
        let region = Region::new(&near, 4 * MB).unwrap();
        region.replicate([nodes()[0]]).unwrap();
        stamp(&region, 0..4 * MB, 1);
        let migration =
            Migration::new().range(&region, 0..4 * MB, &far).area_bytes(AREA).threads(1);
        hole.store(1, Relaxed);
        let report = migration.start().unwrap().wait();
        assert!(report.ended.is_completed() && report.pages.migrated == 1024, "{report}");
        leap(&region, 0..4 * MB, &near);
        check_views(&region, 1);
        words_agree(&region);
        check_stamp(&region, 0..4 * MB, 1);
        audit(&[&near, &far], &[&region]).unwrap();
        drop((region, near, far));
        let canary = hole.load(Relaxed) as *const u64;
        assert_eq!(reserves.load(Relaxed), 0, "no address space was refused");
        // SAFETY: the mapping that the rule has made, if nobody has unmapped it.
        assert_eq!(unsafe { canary.read_volatile() }, CANARY);
    }
}

/// Runs cases in processes of their own.
fn in_processes(test: &str, cases: &[(&str, fn())]) {
    if let Some(name) = case() {
        let (_, run) = cases.iter().find(|(other, _)| **other == name).expect("a case");
        return run();
    }
    let _turn = turn();
    for (name, _) in cases {
        let (end, output) = run_case(test, name);
        assert_eq!(end, End::Exited(0), "{name}: {output}");
    }
}

#[test]
fn limits_are_told_before_anything_is_changed() {
    in_processes(
        "limits_are_told_before_anything_is_changed",
        &[
            ("userfaultfd", without_userfaultfd),
            ("locked", all_memory_is_locked),
            ("little may be locked", little_may_be_locked),
            ("address space", too_little_address_space),
        ],
    );
}

/// Without the tracker a leap of a region with views is refused, and works again without views.
fn without_userfaultfd() {
    let refusing = Refusing::new(Arc::new(Linux), |request| {
        (request.call == Call::OpenTracker).then_some(Errno(libc::EPERM))
    });
    let backend: Arc<dyn pageleap::backend::Backend> = Arc::new(refusing);
    let pool = || Pool::builder(nodes()[0], 4 * MB as u64).backend(backend.clone()).build();
    let (near, far) = (pool().unwrap(), pool().unwrap());
    let mut region = Region::new(&near, 4 * MB).unwrap();
    stamp(&region, 0..4 * MB, 1);
    region.replicate([nodes()[0]]).unwrap();
    let refused = Migration::new().range(&region, 0..4 * MB, &far).start().unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("stop-copy") && text.contains("drop the views"), "{text}");
    check_views(&region, 1);
    check_stamp(&region, 0..4 * MB, 1);
    region.drop_views([nodes()[0]]).unwrap();
    let report = Migration::new().range(&region, 0..4 * MB, &far).run().unwrap();
    assert!(report.ended.is_completed(), "{report}");
    check_stamp(&region, 0..4 * MB, 1);
}

/// `mlockall` locks views too, and MADV_DONTNEED refuses locked memory.
fn all_memory_is_locked() {
    if !works(Engine::StopCopy.into()) {
        return;
    }
    let [near, far] = pools(PageSize::Base, 4 * MB as u64).unwrap();
    let region = Region::new(&near, 4 * MB).unwrap();
    stamp(&region, 0..4 * MB, 1);
    region.replicate([nodes()[0]]).unwrap();
    // SAFETY: the call takes a number.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        return skip("all_memory_is_locked", &"this user may not lock so much");
    }
    for to in [&far, &near] {
        let report = Migration::new().range(&region, 0..4 * MB, to).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(report.pages.migrated, 1024, "{report}");
        check_views(&region, 1);
        words_agree(&region);
        check_stamp(&region, 0..4 * MB, 1);
    }
}

/// Gives up the capability to lock any amount of memory, and lowers the limit for all others.
fn limit_locked_memory(bytes: u64) {
    const IPC_LOCK: u32 = 14;
    let (mut head, mut sets) = ([0x2008_0522u32, 0], [[0u32; 3]; 2]);
    // SAFETY: the calls read and write these arrays, whose layout is that of version 3.
    unsafe {
        let (head, sets) = (head.as_mut_ptr(), &raw mut sets);
        assert_eq!(libc::syscall(libc::SYS_capget, head, sets), 0);
        (*sets)[0][0] &= !(1 << IPC_LOCK);
        assert_eq!(libc::syscall(libc::SYS_capset, head, sets), 0);
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        assert_eq!(libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit), 0);
        limit.rlim_cur = bytes.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
    }
}

/// Once the region has its new frames, no limit of locked memory keeps the views from them.
fn little_may_be_locked() {
    if !works(Engine::StopCopy.into()) {
        return;
    }
    let bytes = 2 * MB;
    let [near, far] = pools(PageSize::Base, bytes as u64).unwrap();
    let region = Region::new(&near, bytes).unwrap();
    stamp(&region, 0..bytes, 1);
    region.replicate(repeat_n(nodes()[0], 3)).unwrap();
    limit_locked_memory(8 << 20);
    // SAFETY: the call takes a number.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return skip("little_may_be_locked", &"this user may lock nothing");
    }
    for to in [&far, &near, &far, &near] {
        let report = Migration::new()
            .range(&region, 0..bytes, to)
            .area_bytes(256 << 10)
            .start()
            .unwrap()
            .wait();
        assert!(report.ended.is_completed(), "{report}");
        check_views(&region, 3);
        words_agree(&region);
        check_stamp(&region, 0..bytes, 1);
    }
}

fn too_little_address_space() {
    let [near, _] = pools(PageSize::Base, 64 * MB as u64).unwrap();
    let region = Region::new(&near, 64 * MB).unwrap();
    let before = pool_mappings();
    common::limit_address_space(Some(100 << 20));
    let refused = region.replicate(repeat_n(nodes()[0], 3)).unwrap_err();
    common::limit_address_space(None);
    assert!(matches!(refused, Error::Call { call: Call::Reserve, .. }), "{refused}");
    assert!(region.views().is_empty());
    assert_eq!(pool_mappings(), before);
    region.replicate(repeat_n(nodes()[0], 3)).unwrap();
    check_views(&region, 3);
}
