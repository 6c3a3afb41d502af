//! Mappings of hugetlb pages, which the kernel does not join by itself; page tables that such
//! mappings share; threads that copy such a page together; and what a report says of the engines
//! that a job has used.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::collections::BTreeSet;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Duration;

use common::{
    address, check_stamp, in_lab, own_files, pool_mappings, region_flags, skip, skip_page_size,
    soon, stamp, turn, works, works_for,
};
use pageleap::backend::{Advice, Backend, Call, Linux, Model, Prot};
use pageleap::{
    BASE_PAGE, Engine, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, audit,
};
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

/// Mappings of 1 GB of one file, aligned to 1 GB, share a page of page tables if their attributes
/// are equal when they are touched for the first time. A mapping that is split shares nothing any
/// more, so the first area empties all of the 1 GB. Who touches that outside of the area has nothing
/// to wait for: a registration that reached further would have it wait for ever.
#[test]
fn nobody_waits_outside_of_the_area_whose_shared_page_tables_are_split() {
    const NAME: &str = "nobody_waits_outside_of_the_area_whose_shared_page_tables_are_split";
    let _turn = turn();
    if !works_for(Engine::StopCopy.into(), PAGE) {
        return skip(NAME, &"stop-copy does not work here for hugetlb pages");
    }
    for is_shared in [false, true] {
        match touch_all_in_windows(is_shared) {
            // Four that the test itself has dropped, outside of the first area.
            Ok(absent) => assert_eq!(absent > 4, is_shared, "{absent} pages without an entry"),
            Err(error) => return skip_page_size(NAME, PAGE, error),
        }
    }
}

/// Moves pages on both sides of a border between two times 1 GB. In each window a thread reads all
/// pages of the region that lie outside of the area. Returns how many had no entry then.
fn touch_all_in_windows(is_shared: bool) -> Result<usize, Error> {
    const GIGABYTE: usize = 1 << 30;
    const BYTES: usize = 2 * GIGABYTE;
    const MOVES: Range<usize> = GIGABYTE - (16 << 20)..GIGABYTE + (16 << 20);
    let reader = Arc::new(Reader::default());
    let (dropped, asked) = (AtomicUsize::new(0), reader.clone());
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        if request.advice == Some(Advice::DropTables) {
            dropped.store(request.addr, Relaxed);
        } else if request.call == Call::Map && dropped.swap(0, Relaxed) == request.addr {
            // All has been copied, and the new frames are about to come.
            asked.read_outside_of(request.addr);
        }
        None
    }));
    let build = |bytes: usize| {
        let pool = Pool::builder(NodeId(0), bytes as u64).page_size(PAGE);
        pool.backend(backend.clone()).build()
    };
    let (from, to) = (build(BYTES)?, build(MOVES.len())?);
    let region = Region::new(&from, BYTES)?;
    let start = address(&region);
    stamp(&region, MOVES, 1);
    if is_shared {
        share_page_tables(&region);
    }
    (0..BYTES).step_by(PAGE.bytes()).for_each(|at| reader.touch(start + at));
    for gone in [0, 40 << 20, MOVES.start, MOVES.end - PAGE.bytes(), BYTES - PAGE.bytes()] {
        advise(start + gone, PAGE.bytes(), libc::MADV_DONTNEED);
    }
    let flags = region_flags(&region);
    std::thread::scope(|scope| {
        scope.spawn(|| reader.read(start..start + BYTES));
        let job = Migration::new().range(&region, MOVES, &to).engine(Engine::StopCopy);
        let job = job.area_bytes(2 * PAGE.bytes()).threads(1);
        let report = job.start().map(|job| job.wait());
        reader.over.store(1, Relaxed);
        let report = report.unwrap();
        assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
        assert_eq!(report.pages.migrated, (MOVES.len() / PAGE.bytes()) as u64, "{report}");
    });
    check_stamp(&region, MOVES, 1);
    let [before, after] = [flags, region_flags(&region)].map(|flags| {
        let kinds: BTreeSet<String> = flags.into_iter().map(|(_, flags)| flags).collect();
        kinds
    });
    assert_eq!(before, after);
    assert_eq!(reader.windows.load(Relaxed), MOVES.len() / (2 * PAGE.bytes()));
    audit(&[&from, &to], &[&region]).unwrap();
    Ok(reader.absent.load(Relaxed))
}

/// Maps a region again that maps the beginning of its file, with all attributes of the pool's alias
/// before it has any page tables.
fn share_page_tables(region: &Region) {
    let (start, len) = (address(region), region.len());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{start:x}-"))).unwrap();
    let inode: u64 = line.split_ascii_whitespace().nth(4).unwrap().parse().unwrap();
    let files = own_files().into_iter().map(|(fd, _)| {
        // SAFETY: an open descriptor; the file is not closed, since it is another's.
        ManuallyDrop::new(unsafe { File::from_raw_fd(fd) })
    });
    let file = files.into_iter().find(|file| file.metadata().unwrap().ino() == inode).unwrap();
    // SAFETY: the same frames are mapped as before, and nobody else uses the region.
    let at = unsafe {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        libc::mmap(start as *mut libc::c_void, len, prot, flags, file.as_raw_fd(), 0)
    };
    assert_eq!(at as usize, start);
    advise(start, len, libc::MADV_DONTFORK);
    advise(start, len, libc::MADV_DONTDUMP);
}

fn advise(addr: usize, len: usize, advice: libc::c_int) {
    // SAFETY: the range is a region's, and the advice changes no contents of a file.
    assert_eq!(unsafe { libc::madvise(addr as *mut libc::c_void, len, advice) }, 0);
}

/// A thread that reads a region when it is asked to.
#[derive(Default)]
struct Reader {
    /// The area that is left out; 0: nothing to do.
    closed: AtomicUsize,
    windows: AtomicUsize,
    /// Pages that had no entry when they were read.
    absent: AtomicUsize,
    over: AtomicUsize,
}

impl Reader {
    /// Has all pages read outside of the area, and returns when that is done.
    fn read_outside_of(&self, area: usize) {
        self.windows.fetch_add(1, Relaxed);
        self.closed.store(area, Release);
        let done = soon(|| self.closed.load(Acquire) == 0);
        // A panic here would leave the thread asleep, and the test with it.
        if !done {
            eprintln!("a thread waits outside of the area at {area:#x}");
            std::process::abort();
        }
    }

    fn read(&self, region: Range<usize>) {
        while self.over.load(Relaxed) == 0 {
            let closed = self.closed.load(Acquire);
            if closed == 0 {
                std::hint::spin_loop();
                continue;
            }
            let area = closed..closed + 2 * PAGE.bytes();
            let pages = region.clone().step_by(PAGE.bytes());
            for page in pages.filter(|page| !area.contains(page)) {
                self.absent.fetch_add(usize::from(!is_present(page)), Relaxed);
                self.touch(page);
            }
            self.closed.store(0, Release);
        }
    }

    fn touch(&self, page: usize) {
        // SAFETY: an address of a region that outlives the call.
        unsafe { (page as *const u8).read_volatile() };
    }
}

/// Whether a page has an entry in the page tables.
fn is_present(addr: usize) -> bool {
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entry, (addr / BASE_PAGE * 8) as u64).unwrap();
    u64::from_ne_bytes(entry) >> 63 == 1
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
        (EngineChoice::Only(Engine::StopCopy), 1),
        (EngineChoice::Only(Engine::Mprotect), 2),
    ];
    let ways = ways.into_iter().filter(|(engine, _)| works_for(*engine, PAGE));
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
        // closed for long, and takes none. Windows that contain the copy have one for half of the
        // time at most: on a slow machine the rest of them has none.
        let first = match engine {
            _ if !may_go_first() => 0..=0,
            EngineChoice::Only(Engine::WpSync) => 2..=2,
            EngineChoice::Only(Engine::PrecopyProtect) => pages + 2..=pages + 2,
            EngineChoice::Only(Engine::StopCopy) => 3..=pages + 2,
            _ => 0..=0,
        };
        assert!(first.contains(&report.counts.windows_first), "{report}");
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
    let wanted = [(Engine::StopCopy.into(), PAGES as u64 - 8), (Engine::Mprotect.into(), 4)];
    assert_eq!((report.engine, &engines[..]), (Engine::Precopy.into(), &wanted[..]), "{report}");
    for part in &report.engines {
        assert_eq!(part.source.region(), Some(region.id()));
        assert_eq!(part.range, range);
        assert!(report.to_string().contains(&part.why) && !part.why.is_empty(), "{report}");
    }
    assert!(report.engines[0].why.contains("few threads"), "{report}");
    let asked = Migration::new().range(&region, 8 * 4096..12 * 4096, &pools[0]);
    let asked = asked.engine(Engine::Precopy).start().unwrap().wait();
    let [all] = &asked.engines[..] else { panic!("{asked}") };
    assert_eq!((all.engine, all.pages, &*all.why), (Engine::Precopy.into(), 4, "asked for"));

    let held = Migration::new().range(&region, 12 * 4096..PAGES * 4096, &pools[0]);
    let held = held.engine(Engine::Mprotect).max_disturbed_copies(0).start().unwrap().wait();
    let [all] = &held.engines[..] else { panic!("{held}") };
    assert_eq!((all.engine, all.pages), (Engine::Mprotect.into(), PAGES as u64 - 12));
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
