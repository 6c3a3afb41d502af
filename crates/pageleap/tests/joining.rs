//! Mappings of hugetlb pages, which the kernel does not join by itself; threads that copy such a
//! page together; and what a report says of the engines that a job has used.

mod common;

use std::ops::RangeInclusive;
use std::sync::Arc;

use common::{address, check_stamp, pool_mappings, skip, stamp, turn, works};
use pageleap::backend::{Backend, Model, Prot};
use pageleap::pool::HugePageReservation;
use pageleap::{Engine, EngineChoice, Migration, NodeId, PageSize, Pool, Region, audit};

const PAGE: PageSize = PageSize::Huge2M;
/// A block of pages whose mappings are joined, and a part of a second block.
const PAGES: usize = 128 + 2;
const MAP: &str = "mmap(MAP_FIXED|MAP_SHARED)";

#[test]
fn mappings_of_huge_pages_are_joined_block_by_block() {
    const NAME: &str = "mappings_of_huge_pages_are_joined_block_by_block";
    let _turn = turn();
    let bytes = PAGES * PAGE.bytes();
    // Small machines have fewer pages free.
    let _reserved = match HugePageReservation::reserve(NodeId(0), PAGE, 2 * PAGES as u64) {
        Ok(reserved) => reserved,
        Err(error) => return skip(NAME, &error),
    };
    let pools =
        [(); 2].map(|()| Pool::builder(NodeId(0), bytes as u64).page_size(PAGE).build().unwrap());
    let region = Region::new(&pools[0], bytes).unwrap();
    stamp(&region, 0..bytes, 1);
    let ways = [
        (EngineChoice::Only(Engine::Mprotect), 1),
        (EngineChoice::Only(Engine::WpSync), 3),
        (EngineChoice::Only(Engine::PrecopyProtect), 3),
        (EngineChoice::Only(Engine::Mprotect), 2),
    ];
    let ways = ways.into_iter().filter(|(engine, _)| works(*engine));
    for (leap, (engine, threads)) in ways.enumerate() {
        let job = Migration::new().range(&region, 0..bytes, &pools[(leap + 1) % 2]).engine(engine);
        let report = job.area_bytes(PAGE.bytes()).threads(threads).start().unwrap().wait();
        assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
        assert_eq!((report.pages.migrated, report.threads), (PAGES as u64, threads), "{report}");
        // One call and one window for each page, for the block when its last page has moved, and
        // for the part of a block at the end.
        assert_eq!(
            (report.calls[MAP], report.windows.count),
            (PAGES as u64 + 2, PAGES as u64 + 2),
            "{report}"
        );
        assert_eq!(report.bytes_copied, bytes as u64);
        // In how many windows the worker runs with a real-time priority. With `wp-sync` the window
        // of a page that nobody writes to is one call, and needs none. `mprotect` keeps areas
        // closed for long, and takes none.
        let first = match engine {
            EngineChoice::Only(Engine::WpSync) => 2,
            EngineChoice::Only(Engine::PrecopyProtect) => PAGES as u64 + 2,
            _ => 0,
        };
        assert_eq!(report.windows_first, if may_go_first() { first } else { 0 }, "{report}");
        check_stamp(&region, 0..bytes, 1);
        let mappings = pool_mappings();
        assert_eq!(mappings.len(), 4, "two of the region and two aliases: {mappings:#?}");
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
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

/// Nearly all CPU time of a process that only waits for a job is the job's, and the job reports it.
#[test]
fn the_report_has_the_cpu_time_of_all_threads() {
    const BYTES: usize = 128 << 20;
    let _turn = turn();
    let pools = [(); 2].map(|()| Pool::builder(NodeId(0), BYTES as u64).build().unwrap());
    let region = Region::new(&pools[0], BYTES).unwrap();
    let engines = [
        EngineChoice::Only(Engine::Mprotect),
        EngineChoice::Only(Engine::Precopy),
        EngineChoice::Only(Engine::WpSync),
    ];
    for (leap, engine) in engines.into_iter().filter(|engine| works(*engine)).enumerate() {
        let migration = Migration::new().range(&region, 0..BYTES, &pools[(leap + 1) % 2]);
        let before = cpu_ns_of_others();
        let report = migration.engine(engine).threads(4).start().unwrap().wait();
        let after = cpu_ns_of_others();
        let (least, most) = (after.start() - before.end(), after.end() - before.start());
        let job = report.migrate_cpu_ns.unwrap() + report.recycle_cpu_ns.unwrap();
        assert!(job <= most, "{engine}: {job} of {most} ns");
        // The rest is what the threads do after they have looked at the clock for the last time.
        assert!(job as f64 >= 0.75 * least as f64, "{engine}: {job} of {least} ns");
    }
}
