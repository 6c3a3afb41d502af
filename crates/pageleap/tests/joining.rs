//! Mappings of hugetlb pages, which the kernel does not join by itself; threads that copy such a
//! page together; and what a report says of the engines that a job has used.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use common::{
    address, check_stamp, in_lab, pool_mappings, skip, skip_page_size, soon, stamp, turn, works,
};
use pageleap::backend::{Backend, Call, Linux, Model, Prot};
use pageleap::{Engine, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, audit};
use refusing::Refusing;

const PAGE: PageSize = PageSize::Huge2M;
/// Pages of a block, whose mappings are joined by one call.
const BLOCK: usize = 128;
const MAP: &str = "mmap(MAP_FIXED|MAP_SHARED)";

/// Joining looks at blocks of a region, not at what is in them. So a few pages on both sides of the
/// border between two blocks are enough.
#[test]
fn mappings_of_huge_pages_are_joined_on_each_side_of_a_blocks_border() {
    const NAME: &str = "mappings_of_huge_pages_are_joined_on_each_side_of_a_blocks_border";
    const PAGES: usize = 2 + 3;
    let _turn = turn();
    let pools = match pools_of(PAGES) {
        Ok(pools) => pools,
        Err(error) => return skip_page_size(NAME, PAGE, error),
    };
    let first = (BLOCK - 2) * PAGE.bytes();
    let all = first..first + PAGES * PAGE.bytes();
    let region = Region::reserve(all.end, PAGE).unwrap();
    region.extend(all.end).unwrap();
    region.back(all.clone(), &pools[0]).unwrap();
    check_joining(&region, all, &pools);
}

/// It takes 520 MB of huge pages, which an ordinary machine may have or not: a machine of the lab
/// has them from its boot on.
#[test]
fn mappings_of_huge_pages_are_joined_block_by_block() {
    const NAME: &str = "mappings_of_huge_pages_are_joined_block_by_block";
    /// A block, and a part of a second one.
    const PAGES: usize = BLOCK + 2;
    let _turn = turn();
    if !in_lab() {
        return skip(NAME, &"it takes 520 MB of huge pages (see `cargo xtask lab`)");
    }
    let pools = match pools_of(PAGES) {
        Ok(pools) => pools,
        Err(error) => return skip_page_size(NAME, PAGE, error),
    };
    let bytes = PAGES * PAGE.bytes();
    check_joining(&Region::new(&pools[0], bytes).unwrap(), 0..bytes, &pools);
}

/// Two pools of huge pages on node 0.
fn pools_of(pages: usize) -> Result<[Pool; 2], Error> {
    let bytes = (pages * PAGE.bytes()) as u64;
    let build = || Pool::builder(NodeId(0), bytes).page_size(PAGE).build();
    Ok([build()?, build()?])
}

/// Moves the range, which has pages of two blocks, between the pools, and looks at the mappings.
fn check_joining(region: &Region, range: Range<usize>, pools: &[Pool; 2]) {
    let (bytes, pages) = (range.len() as u64, (range.len() / PAGE.bytes()) as u64);
    stamp(region, range.clone(), 1);
    let ways = [
        (EngineChoice::Only(Engine::Mprotect), 1),
        (EngineChoice::Only(Engine::WpSync), 3),
        (EngineChoice::Only(Engine::PrecopyProtect), 3),
        (EngineChoice::Only(Engine::Mprotect), 2),
    ];
    let ways = ways.into_iter().filter(|(engine, _)| works(*engine));
    for (leap, (engine, threads)) in ways.enumerate() {
        let job = Migration::new().range(region, range.clone(), &pools[(leap + 1) % 2]);
        let job = job.engine(engine).area_bytes(PAGE.bytes()).threads(threads);
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
        assert_eq!((report.pages.migrated, report.threads), (pages, threads), "{report}");
        // One call and one window for each page, and for the part of each block when the last page
        // of it has moved.
        assert_eq!((report.calls[MAP], report.windows.count), (pages + 2, pages + 2), "{report}");
        assert_eq!(report.bytes_copied, bytes);
        // In how many windows the worker runs with a real-time priority. With `wp-sync` the window
        // of a page that nobody writes to is one call, and needs none. `mprotect` keeps areas
        // closed for long, and takes none.
        let first = match engine {
            EngineChoice::Only(Engine::WpSync) => 2,
            EngineChoice::Only(Engine::PrecopyProtect) => pages + 2,
            _ => 0,
        };
        assert_eq!(report.windows_first, if may_go_first() { first } else { 0 }, "{report}");
        check_stamp(region, range.clone(), 1);
        let mappings = pool_mappings();
        assert_eq!(mappings.len(), 4, "two of the region and two aliases: {mappings:#?}");
        audit(&[&pools[0], &pools[1]], &[region]).unwrap();
    }
}

/// Whether a thread may take a real-time priority and give it back.
fn may_go_first() -> bool {
    let set = |policy, sched_priority| {
        // SAFETY: the call reads one structure and changes the calling thread only.
        unsafe { libc::sched_setscheduler(0, policy, &libc::sched_param { sched_priority }) == 0 }
    };
    set(libc::SCHED_FIFO, 1) && set(libc::SCHED_OTHER, 0)
}

#[test]
fn the_report_says_which_engine_moved_what_and_why() {
    const PAGES: usize = 64;
    let _turn = turn();
    let model = Arc::new(Model::new());
    let pools = [(); 2].map(|()| {
        Pool::builder(NodeId(0), (PAGES * 4096) as u64)
            .threads(1)
            .backend(model.clone())
            .build()
            .unwrap()
    });
    let region = Region::new(&pools[0], PAGES * 4096).unwrap();
    let start = address(&region);
    // SAFETY: pages of a region that no thread uses.
    unsafe { Backend::protect(&*model, start, 8 * 4096, Prot::READ) }.unwrap();
    let range = 4 * 4096..PAGES * 4096;
    let report = Migration::new().range(&region, range.clone(), &pools[1]).start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    let engines: Vec<_> = report.engines.iter().map(|part| (part.engine, part.pages)).collect();
    // Nobody uses the region, so areas are closed first.
    let wanted = [(Engine::StopCopy, PAGES as u64 - 8), (Engine::Mprotect, 4)];
    assert_eq!((report.engine, &engines[..]), (Engine::Precopy, &wanted[..]), "{report}");
    for part in &report.engines {
        assert_eq!(part.source.region(), Some(region.id()));
        assert_eq!(part.range, range);
        assert!(report.to_string().contains(&part.why) && !part.why.is_empty(), "{report}");
    }
    assert!(report.engines[0].why.contains("few threads"), "{report}");
    let asked = Migration::new().range(&region, 8 * 4096..12 * 4096, &pools[0]);
    let asked = asked.engine(Engine::Precopy).start().unwrap().wait();
    let [all] = &asked.engines[..] else { panic!("{asked}") };
    assert_eq!((all.engine, all.pages, &*all.why), (Engine::Precopy, 4, "asked for"));

    let held = Migration::new().range(&region, 12 * 4096..PAGES * 4096, &pools[0]);
    let held = held.engine(Engine::Mprotect).max_disturbed_copies(0).start().unwrap().wait();
    let [all] = &held.engines[..] else { panic!("{held}") };
    assert_eq!((all.engine, all.pages), (Engine::Mprotect, PAGES as u64 - 12));
    assert!(all.why.contains("held back"), "{held}");
}

/// CPU time of all threads of the process but the calling one: at least, and at most. The two
/// clocks are read one after the other, and the calling thread runs in between.
fn cpu_ns_of_others() -> RangeInclusive<u64> {
    let ns = |clock| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one structure.
        assert_eq!(unsafe { libc::clock_gettime(clock, &mut time) }, 0);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    let own = ns(libc::CLOCK_THREAD_CPUTIME_ID);
    let all = ns(libc::CLOCK_PROCESS_CPUTIME_ID);
    all - ns(libc::CLOCK_THREAD_CPUTIME_ID)..=all - own
}

/// The CPU time that the calling thread uses in a busy loop.
fn burn_cpu_ns() -> u64 {
    const ENOUGH: Duration = Duration::from_millis(20);
    let ns = || pageleap_sys::thread_cpu_time_ns().unwrap();
    let began = ns();
    while u128::from(ns() - began) < ENOUGH.as_nanos() {}
    ns() - began
}

/// How much of the CPU time of a process is a job's depends on what else the machine does. So each
/// thread of the job burns an amount that the test knows: the job reports that at least, and at
/// most what the whole process has used meanwhile.
#[test]
fn the_report_has_the_cpu_time_of_all_threads() {
    const BYTES: usize = 8 << 20;
    const THREADS: usize = 4;
    let _turn = turn();
    let engines = [
        EngineChoice::Only(Engine::Mprotect),
        EngineChoice::Only(Engine::Precopy),
        EngineChoice::Only(Engine::WpSync),
    ];
    for engine in engines.into_iter().filter(|engine| works(*engine)) {
        // A region takes its frames by the same call, so threads are counted from the start on.
        let came = Arc::new(AtomicUsize::new(THREADS));
        let burnt = Arc::new(AtomicU64::new(0));
        let (begin, sum) = (came.clone(), burnt.clone());
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            // A thread that has come waits for all others. So the first that come are all threads.
            if request.call == Call::Exchange && came.fetch_add(1, Relaxed) < THREADS {
                assert!(soon(|| came.load(Relaxed) >= THREADS), "a thread moves nothing");
                sum.fetch_add(burn_cpu_ns(), Relaxed);
            }
            None
        }));
        let pools = [(); 2].map(|()| {
            let pool = Pool::builder(NodeId(0), BYTES as u64).backend(backend.clone());
            pool.build().unwrap()
        });
        let region = Region::new(&pools[0], BYTES).unwrap();
        let job = Migration::new().range(&region, 0..BYTES, &pools[1]).engine(engine);
        let job = job.area_bytes(BYTES / 16).threads(THREADS);
        let before = cpu_ns_of_others();
        begin.store(0, Relaxed);
        let report = job.start().unwrap().wait();
        let after = cpu_ns_of_others();
        let (most, burnt) = (after.end() - before.start(), burnt.load(Relaxed));
        assert!(begin.load(Relaxed) >= THREADS && burnt > 0, "{engine}: {report}");
        let job = report.migrate_cpu_ns.unwrap() + report.recycle_cpu_ns.unwrap();
        assert!(burnt <= job, "{engine}: {job} ns, of which {burnt} were burnt");
        assert!(job <= most, "{engine}: {job} of {most} ns");
    }
}
