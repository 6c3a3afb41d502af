//! The stress oracle: many threads write and read a region that leaps back and forth. Afterwards
//! every write must be there.
//!
//! Each writer owns some words of the region, writes rising values to them in random order, and
//! keeps a shadow of each word. One writer lets the kernel write (`read(2)`). Readers check that no
//! word ever falls back. A bystander maps and faults memory outside the region. After each leap the
//! kernel's view is checked. At the end each word must equal its shadow. Where the region has
//! views, each thread uses all mappings in turn.
//!
//! `PAGELEAP_STRESS_SECONDS` sets the duration of each case. A lost write is reported with the word
//! LOST.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/load.rs"]
mod load;

use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use calls::pipe;
use common::{
    Kept, Place, Random, StopOnDrop, each_place_once, engines_for, in_lab, nodes, places,
    places_in, pool_mappings, pools, skip, skip_page_size, soon, stress_seconds, surprises, turn,
    works, works_for,
};
use load::{bystander, word_of};
use pageleap::topology::{Node, Topology};
use pageleap::{
    Ended, Engine, EngineChoice, EngineName, Migration, PageSize, PageTableMigration, Pool, Region,
    Report, audit,
};

/// Threads that write. One more thread lets the kernel write.
const WRITERS: usize = 3;
/// Owners of words: the writers and the kernel-mode writer.
const OWNERS: usize = WRITERS + 1;
/// Fewer writes than these tell nothing.
const LEAST_WRITES: u64 = 1000;
const READERS: usize = 2;

struct Case {
    engine: EngineChoice,
    page: PageSize,
    bytes: usize,
    /// Pause of each writer between two writes, in spins.
    pause: u32,
    /// Percentage of the writes that go to the first 3.125 % of the region.
    skew: u64,
    /// How many views the region has.
    views: usize,
}

/// The words of the region, through the region itself and each of its views.
fn mappings_of(region: &Region) -> Vec<&[AtomicU64]> {
    let views = region.views();
    let of_views = views.iter().map(|view| view.atomics_u64(0..region.len()).unwrap());
    [region.atomics_u64(0..region.len()).unwrap()].into_iter().chain(of_views).collect()
}

/// Results of the thread that lets the kernel write.
#[derive(Default)]
struct KernelWrites {
    done: AtomicU64,
    efaults: AtomicU64,
}

/// Writes rising values. Returns the shadow.
fn user_writer(region: &Region, owner: usize, case: &Case, stop: &AtomicBool) -> Vec<u64> {
    let mappings = mappings_of(region);
    let mut shadow = vec![0u64; mappings[0].len()];
    let mut random = Random::new(owner as u64 + 1);
    let mut value = 0;
    while !stop.load(Ordering::Relaxed) {
        let words = mappings[value as usize % mappings.len()];
        let at = word_of(&mut random, words.len(), OWNERS, owner, case.skew);
        value += 1;
        words[at].store(value, Ordering::Relaxed);
        shadow[at] = value;
        for _ in 0..case.pause {
            std::hint::spin_loop();
        }
    }
    shadow
}

/// Lets the kernel write rising values, by `read(2)` from a pipe. Returns the shadow.
fn kernel_writer(
    region: &Region,
    owner: usize,
    case: &Case,
    stop: &AtomicBool,
    seen: &KernelWrites,
) -> Vec<u64> {
    let mappings = mappings_of(region);
    let mut shadow = vec![0u64; mappings[0].len()];
    let mut random = Random::new(99);
    let (from, to) = pipe();
    let mut value = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let words = mappings[value as usize % mappings.len()];
        let at = word_of(&mut random, words.len(), OWNERS, owner, case.skew);
        value += 1;
        // SAFETY: the first call reads the eight bytes of `value`. The second writes an aligned
        // word of the region, which only atomic operations access.
        unsafe {
            assert_eq!(libc::write(to.as_raw_fd(), (&raw const value).cast(), 8), 8);
            loop {
                let got = libc::read(from.as_raw_fd(), words[at].as_ptr().cast(), 8);
                if got == 8 {
                    break;
                }
                assert_eq!(*libc::__errno_location(), libc::EFAULT, "read(2) returned {got}");
                seen.efaults.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        }
        shadow[at] = value;
        seen.done.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
    }
    shadow
}

/// Checks that words never fall back.
fn reader(region: &Region, seed: u64, stop: &AtomicBool) {
    let mut seen = vec![0u64; region.len() / 8];
    let mut random = Random::new(seed);
    let mappings = mappings_of(region);
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        // A value that one mapping has shown must not be older in the next.
        let words = mappings[turn % mappings.len()];
        for _ in 0..1000 {
            let at = random.below(words.len() as u64) as usize;
            if at % OWNERS == WRITERS {
                continue; // the kernel may write a word byte by byte
            }
            let value = words[at].load(Ordering::Relaxed);
            assert!(value >= seen[at], "LOST: word {at} fell from {} to {value}", seen[at]);
            seen[at] = value;
        }
        std::thread::yield_now();
    }
}

/// Checks mappings after a leap. Returns which frames the region has.
fn check_kernels_view(
    region: &Region,
    before: &[Option<Place>],
    moved_all: bool,
    mappings: usize,
) -> Vec<Option<Place>> {
    if moved_all {
        // The pages are in one run of frames again. So the region is one mapping, and so is each
        // alias.
        let now = pool_mappings();
        assert!(
            now.len() <= mappings,
            "{} mappings of pools, {mappings} before:\n{}",
            now.len(),
            now.join("\n")
        );
    }
    let places = places(region);
    for view in region.views() {
        let first = view.as_ptr().as_ptr() as usize;
        let of_view = places_in(first..first + region.len(), region.page_size().bytes());
        assert!(of_view == places, "{view:?} maps other frames");
    }
    each_place_once(&places);
    assert!(places.iter().all(Option::is_some), "a page has no frame");
    if moved_all {
        let changed = places.iter().zip(before).all(|(now, then)| now != then);
        assert!(changed, "a frame did not change");
    }
    places
}

/// The least number of leaps of a case. Where CPUs are emulated, fewer could fit into its time.
const LEAPS: u64 = 4;

/// What all jobs of a case have reported.
#[derive(Default)]
struct Total {
    leaps: u64,
    /// Jobs that were cancelled or timed out.
    stopped: u64,
    disturbed: u64,
    holds: u64,
    bytes_recopied: u64,
    longest_wait_ns: u64,
}

/// Runs `body` under the load of a case. Returns the shadows of the writers, and what `body`
/// returns.
fn under_load<T>(
    case: &Case,
    region: &Region,
    kernel: &KernelWrites,
    body: impl FnOnce() -> T,
) -> (Vec<Vec<u64>>, T) {
    let stop = AtomicBool::new(false);
    let start = Barrier::new(WRITERS + READERS + 3);
    std::thread::scope(|scope| {
        let (stop, start) = (&stop, &start);
        let go = move || {
            start.wait();
        };
        let mut writers = Vec::new();
        for owner in 0..WRITERS {
            writers.push(scope.spawn(move || {
                go();
                user_writer(region, owner, case, stop)
            }));
        }
        writers.push(scope.spawn(move || {
            go();
            kernel_writer(region, WRITERS, case, stop, kernel)
        }));
        for seed in 0..READERS {
            scope.spawn(move || {
                go();
                reader(region, 1000 + seed as u64, stop);
            });
        }
        scope.spawn(move || {
            go();
            bystander(stop)
        });
        go();
        // The other threads end even if a check fails.
        let stop_all = StopOnDrop(stop);
        let result = body();
        // On a busy machine the jobs may be over before the writers have had much time.
        assert!(soon(|| writes_in(region) > LEAST_WRITES), "the load did not run");
        drop(stop_all);
        (writers.into_iter().map(|w| w.join().unwrap()).collect(), result)
    })
}

/// Runs a case: leaps under load, and checks.
fn run(case: Case, pools: [Pool; 2]) {
    let region = Region::new(&pools[0], case.bytes).unwrap();
    let topology = Topology::read().unwrap();
    let usable = |node: &&Node| !node.cpus.is_empty() && node.total_bytes > 0;
    let with_cpus = topology.nodes().iter().filter(usable);
    let homes: Vec<_> = with_cpus.map(|node| node.id).collect();
    region.replicate(homes.into_iter().cycle().take(case.views)).unwrap();
    let total_free = pools[0].free_bytes() + pools[1].free_bytes();
    let kernel = KernelWrites::default();
    let mut total = Total::default();
    let mappings = pool_mappings().len();
    let leap = || leap_back_and_forth(&region, &case, &pools, mappings, &mut total);
    let (shadows, engine) = under_load(&case, &region, &kernel, leap);
    check_writes(&region, &case, &shadows, &kernel, engine.name(), &total);
    drop(region);
    assert_eq!(
        pools[0].free_bytes() + pools[1].free_bytes(),
        total_free + case.bytes as u64,
        "frames leaked"
    );
}

/// Moves page tables between two nodes under load, and leaves the data where it is.
fn run_page_tables(case: Case, pool: Pool) {
    let region = Region::new(&pool, case.bytes).unwrap();
    let kernel = KernelWrites::default();
    let mut total = Total::default();
    let (mappings, kept) = (pool_mappings().len(), Kept::of(&region));
    let mut random = Random::new(4712);
    let deadline = Instant::now() + Duration::from_secs(stress_seconds());
    let to = nodes();
    let move_tables = || {
        while Instant::now() < deadline || total.leaps < LEAPS {
            let mut migration =
                PageTableMigration::new(&region, 0..case.bytes, to[total.leaps as usize % 2]);
            migration = migration.anew();
            if random.below(8) == 0 {
                migration = migration.timeout(Duration::from_micros(1 + random.below(1000)));
            }
            let job = migration.start().unwrap();
            if random.below(8) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(1000)));
                job.cancel();
            }
            let report = job.wait();
            assert_eq!(report.pages.failed + report.pages.busy, 0, "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
            if report.ended.is_completed() {
                assert_eq!(report.pages.migrated, report.pages.total(), "{report}");
            } else {
                assert!(matches!(report.ended, Ended::Cancelled | Ended::TimedOut), "{report}");
                total.stopped += 1;
            }
            assert_eq!(report.bytes_copied, 0, "{report}");
            total.leaps += 1;
            total.longest_wait_ns = total.longest_wait_ns.max(report.waits.max_ns);
            let now = pool_mappings();
            assert!(now.len() <= mappings, "{mappings} mappings before:\n{}", now.join("\n"));
            kept.check(&region);
        }
        "page-tables"
    };
    let (shadows, engine) = under_load(&case, &region, &kernel, move_tables);
    check_writes(&region, &case, &shadows, &kernel, engine, &total);
    kept.check(&region);
    audit(&[&pool], &[&region]).unwrap();
}

/// How many writes the words of a region tell of: those of an owner rise.
fn writes_in(region: &Region) -> u64 {
    let words = region.atomics_u64(0..region.len()).unwrap();
    let mut last = [0; OWNERS];
    for (at, word) in words.iter().enumerate() {
        last[at % OWNERS] = last[at % OWNERS].max(word.load(Ordering::Relaxed));
    }
    last.iter().sum()
}

/// Leaps until the time of the case is over. Checks the kernel's view and the books after each
/// leap. Returns the engine of the last job.
fn leap_back_and_forth(
    region: &Region,
    case: &Case,
    pools: &[Pool; 2],
    mappings: usize,
    total: &mut Total,
) -> EngineName {
    let total_free = pools[0].free_bytes() + pools[1].free_bytes();
    let mut random = Random::new(4711);
    let deadline = Instant::now() + Duration::from_secs(stress_seconds());
    let mut frames = places(region);
    let (mut at, mut engine) = (0, Engine::Mprotect.into());
    while Instant::now() < deadline || total.leaps < LEAPS {
        let report = random_job(region, case, &pools[1 - at], &mut random);
        assert_eq!(report.pages.total(), (case.bytes / case.page.bytes()) as u64);
        assert_eq!(report.pages.failed, 0, "{report}");
        assert!(surprises(&report).is_empty(), "{report}");
        let all = report.pages.migrated == report.pages.total();
        match report.ended {
            Ended::Completed => {
                assert_eq!(report.pages.busy + report.pages.not_attempted, 0, "{report}")
            }
            Ended::Cancelled | Ended::TimedOut => total.stopped += 1,
            ref other => panic!("{other:?}"),
        }
        // After a stop in the middle, the next job has the same destination.
        if report.ended.is_completed() {
            at = 1 - at;
        }
        total.leaps += 1;
        total.disturbed += report.counts.disturbed_copies;
        total.holds += report.counts.holds;
        total.longest_wait_ns = total.longest_wait_ns.max(report.waits.max_ns);
        total.bytes_recopied += report.bytes_recopied;
        engine = report.engine;
        assert_eq!(pools[0].free_bytes() + pools[1].free_bytes(), total_free, "frames leaked");
        audit(&[&pools[0], &pools[1]], &[region]).unwrap();
        frames = check_kernels_view(region, &frames, all, mappings);
    }
    engine
}

/// One job with random settings, which may be cancelled or time out.
fn random_job(region: &Region, case: &Case, to: &Pool, random: &mut Random) -> Report {
    let page = case.page.bytes();
    let area = page.max(4096 << random.below(9));
    let mut migration = Migration::new()
        .engine(case.engine)
        .range(region, 0..case.bytes, to)
        .reduction_factor(1 + random.below(4))
        .max_disturbed_copies(random.below(5) as u32)
        .max_rounds(random.below(5) as u32)
        .threads(1 + random.below(2) as usize);
    if random.below(4) > 0 {
        migration = migration.area_bytes(area.next_multiple_of(page));
    }
    if random.below(8) == 0 {
        migration = migration.timeout(Duration::from_micros(1 + random.below(20_000)));
    }
    let job = migration.start().unwrap();
    if random.below(8) == 0 {
        std::thread::sleep(Duration::from_micros(random.below(10_000)));
        job.cancel();
    }
    job.wait()
}

/// Compares each word with its shadow, and prints what the case has done.
fn check_writes(
    region: &Region,
    case: &Case,
    shadows: &[Vec<u64>],
    kernel: &KernelWrites,
    engine: &str,
    total: &Total,
) {
    let words = region.atomics_u64(0..case.bytes).unwrap();
    let lost = words
        .iter()
        .enumerate()
        .filter(|(i, word)| word.load(Ordering::Relaxed) != shadows[i % OWNERS][*i])
        .count();
    let writes: u64 = shadows.iter().map(|s| s.iter().max().unwrap()).sum();
    let efaults = kernel.efaults.load(Ordering::Relaxed);
    let Total { leaps, stopped, disturbed, holds, bytes_recopied, longest_wait_ns } = total;
    eprintln!(
        "  {engine}, {} pages, {} views, pause {}, skew {} %: {leaps} leaps ({stopped} stopped), \
         {writes} writes ({} by read(2), {efaults} EFAULT), {disturbed} disturbed copies, \
         {} KB copied again, {holds} holds, longest wait {} us",
        case.page,
        case.views,
        case.pause,
        case.skew,
        kernel.done.load(Ordering::Relaxed),
        bytes_recopied >> 10,
        longest_wait_ns / 1000
    );
    let signals = engine.parse().ok().and_then(EngineChoice::forced).is_some_and(Engine::signals);
    if !signals {
        assert_eq!(efaults, 0, "a system call failed because of a leap");
    }
    assert_eq!(lost, 0, "LOST {lost} of {writes} writes");
    assert!(writes > LEAST_WRITES, "the load did not run");
}

#[test]
fn no_write_is_lost() {
    let _turn = turn();
    let bytes = if in_lab() { 4 << 20 } else { 16 << 20 };
    for engine in EngineChoice::ALL {
        if !works(engine) {
            skip(&format!("no_write_is_lost ({engine})"), &"the engine does not work here");
            continue;
        }
        for (pause, skew) in [(0, 0), (200, 0), (0, 75)] {
            let case = Case { engine, page: PageSize::Base, bytes, pause, skew, views: 0 };
            run(case, pools(PageSize::Base, bytes as u64).unwrap());
        }
    }
}

#[test]
fn no_write_is_lost_while_only_page_tables_move() {
    let _turn = turn();
    let bytes = if in_lab() { 4 << 20 } else { 34 << 20 };
    for (pause, skew) in [(0, 0), (200, 75)] {
        let case =
            Case { engine: EngineChoice::Auto, page: PageSize::Base, bytes, pause, skew, views: 0 };
        let [pool, _] = pools(PageSize::Base, bytes as u64).unwrap();
        run_page_tables(case, pool);
    }
}

#[test]
fn no_write_is_lost_on_huge_pages() {
    let _turn = turn();
    let bytes = 32 << 20;
    for (page, engine) in [PageSize::Thp, PageSize::Huge2M]
        .into_iter()
        .flat_map(|page| engines_for(page).into_iter().map(move |e| (page, e)))
    {
        match pools(page, bytes as u64) {
            Ok(pools) => run(Case { engine, page, bytes, pause: 0, skew: 0, views: 0 }, pools),
            Err(error) => skip_page_size("no_write_is_lost_on_huge_pages", page, error),
        }
    }
}

/// A leap closes all mappings of an area, so no write through any of them is lost, and no reader
/// sees an old value after a new one.
#[test]
fn no_write_through_a_view_is_lost() {
    let _turn = turn();
    let name = "no_write_through_a_view_is_lost";
    for (page, pause, views) in [
        (PageSize::Base, 0, 2),
        (PageSize::Base, 200, 1),
        (PageSize::Thp, 0, 2),
        (PageSize::Huge2M, 0, 2),
    ] {
        if !works_for(Engine::StopCopy.into(), page) {
            skip(&format!("{name} ({page})"), &"the engine stop-copy does not work here");
            continue;
        }
        let small = if in_lab() { 4 << 20 } else { 16 << 20 };
        let bytes = if page == PageSize::Base { small } else { 32 << 20 };
        let engine = EngineChoice::Auto;
        match pools(page, bytes as u64) {
            Ok(pools) => run(Case { engine, page, bytes, pause, skew: 0, views }, pools),
            Err(error) => skip_page_size(name, page, error),
        }
    }
}
