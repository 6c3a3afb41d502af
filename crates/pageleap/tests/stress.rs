//! The stress oracle: many threads write, read and disturb a region that leaps back and forth, and
//! afterwards every write must be there.
//!
//! Each writer owns its words of the region, writes rising values to them in random order, and
//! keeps a shadow of each. One writer lets the kernel write for it (`read(2)`). Readers check that
//! no word ever falls back. A bystander maps and faults memory that has nothing to do with it.
//! After each leap the kernel's view is checked; in the end each word must equal its shadow.
//!
//! `PAGELEAP_STRESS_SECONDS` sets the duration of each case. A lost write is reported with the word
//! LOST.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/load.rs"]
mod load;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use calls::pipe;
use common::{
    Random, StopOnDrop, engines, in_lab, pool_mappings, pools, skip, skip_page_size,
    stress_seconds, surprises, works,
};
use load::{bystander, each_frame_once, word_of};
use pageleap::{Ended, Engine, EngineChoice, Migration, PageSize, Pool, Region, audit};

/// User-mode writers; one more thread lets the kernel write.
const WRITERS: usize = 3;
/// Owners of words: the writers and the kernel-mode writer.
const OWNERS: usize = WRITERS + 1;
const READERS: usize = 2;

struct Case {
    engine: EngineChoice,
    page: PageSize,
    bytes: usize,
    /// Pause of each writer between two writes, in spins: 0 is as fast as possible.
    pause: u32,
    /// Share of the writes that goes to the first 3.125 % of the region, in percent.
    skew: u64,
}

/// What the kernel-mode writer saw.
#[derive(Default)]
struct KernelWrites {
    done: AtomicU64,
    efaults: AtomicU64,
}

fn user_writer(region: &Region, owner: usize, case: &Case, stop: &AtomicBool) -> Vec<u64> {
    let words = region.atomics_u64(0..case.bytes).unwrap();
    let mut shadow = vec![0u64; words.len()];
    let mut random = Random::new(owner as u64 + 1);
    let mut value = 0;
    while !stop.load(Ordering::Relaxed) {
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

/// Writes through `read(2)` from a pipe. Returns its shadow.
fn kernel_writer(
    region: &Region,
    owner: usize,
    case: &Case,
    stop: &AtomicBool,
    seen: &KernelWrites,
) -> Vec<u64> {
    let words = region.atomics_u64(0..case.bytes).unwrap();
    let mut shadow = vec![0u64; words.len()];
    let mut random = Random::new(99);
    let (from, to) = pipe();
    let mut value = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let at = word_of(&mut random, words.len(), OWNERS, owner, case.skew);
        value += 1;
        // SAFETY: eight bytes from `value` into the pipe, and from there into an aligned word of
        // the region.
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
fn reader(region: &Region, seed: u64, case: &Case, stop: &AtomicBool) {
    let words = region.atomics_u64(0..case.bytes).unwrap();
    let mut seen = vec![0u64; words.len()];
    let mut random = Random::new(seed);
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..1000 {
            let at = random.below(words.len() as u64) as usize;
            if at % OWNERS == WRITERS {
                continue; // the kernel may write the bytes of a word one by one
            }
            let value = words[at].load(Ordering::Relaxed);
            assert!(value >= seen[at], "LOST: word {at} fell from {} to {value}", seen[at]);
            seen[at] = value;
        }
        std::thread::yield_now();
    }
}

fn check_kernels_view(
    region: &Region,
    before: Option<Vec<u64>>,
    moved_all: bool,
    mappings: usize,
) -> Option<Vec<u64>> {
    if moved_all {
        // Into one run of frames, so the region is one mapping again, and so is each alias.
        let now = pool_mappings();
        assert!(
            now.len() <= mappings,
            "{} mappings of pools, {mappings} before:\n{}",
            now.len(),
            now.join("\n")
        );
    }
    let frames = region.frame_numbers().unwrap()?;
    each_frame_once(&frames);
    if let Some(before) = before
        && moved_all
    {
        assert!(
            frames.iter().zip(&before).all(|(now, then)| now != then && *now != 0),
            "a frame did not change"
        );
    }
    Some(frames)
}

/// There are so many leaps, however long they take: where CPUs are emulated, some take longer than
/// a case should.
const LEAPS: u64 = 4;

fn run(case: Case, pools: [Pool; 2]) {
    let region = Region::new(&pools[0], case.bytes).unwrap();
    let total_free = pools[0].free_bytes() + pools[1].free_bytes();
    let stop = AtomicBool::new(false);
    let kernel = KernelWrites::default();
    let start = Barrier::new(WRITERS + READERS + 3);
    let (mut leaps, mut stopped, mut disturbed, mut holds, mut longest_wait) =
        (0u64, 0u64, 0u64, 0u64, 0u64);
    let (mut shadows, mut again, mut engine) = (Vec::<Vec<u64>>::new(), 0, Engine::Mprotect);

    std::thread::scope(|scope| {
        let (region, case, stop, kernel, start) = (&region, &case, &stop, &kernel, &start);
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
                reader(region, 1000 + seed as u64, case, stop);
            });
        }
        scope.spawn(move || {
            go();
            bystander(stop)
        });
        let mappings = pool_mappings().len();
        go();

        // A failed check must not leave the others running for ever.
        let _stop = StopOnDrop(stop);
        let mut random = Random::new(4711);
        let deadline = Instant::now() + Duration::from_secs(stress_seconds());
        let mut frames = region.frame_numbers().unwrap();
        let mut at = 0;
        while Instant::now() < deadline || leaps < LEAPS {
            let page = case.page.bytes();
            let area = page.max(4096 << random.below(9));
            let mut migration = Migration::new()
                .engine(case.engine)
                .range(region, 0..case.bytes, &pools[1 - at])
                .reduction_factor(1 + random.below(4))
                .max_disturbed_copies(random.below(5) as u32)
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
            let report = job.wait();
            assert_eq!(report.pages.total(), (case.bytes / page) as u64);
            assert_eq!(report.pages.failed, 0, "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
            let all = report.pages.migrated == report.pages.total();
            match report.ended {
                Ended::Completed => {
                    assert_eq!(report.pages.busy + report.pages.not_attempted, 0, "{report}")
                }
                Ended::Cancelled | Ended::TimedOut => stopped += 1,
                ref other => panic!("{other:?}"),
            }
            // Where it stands now: after a stop in the middle, finish the way.
            if report.ended.is_completed() {
                at = 1 - at;
            }
            leaps += 1;
            disturbed += report.disturbed_copies;
            holds += report.holds;
            longest_wait = longest_wait.max(report.waits.max_ns);
            again += report.bytes_recopied;
            engine = report.engine;
            assert_eq!(pools[0].free_bytes() + pools[1].free_bytes(), total_free, "frames leaked");
            audit(&[&pools[0], &pools[1]], &[region]).unwrap();
            let before = std::mem::take(&mut frames);
            frames = check_kernels_view(region, before, all, mappings);
        }
        stop.store(true, Ordering::Relaxed);
        shadows.extend(writers.into_iter().map(|w| w.join().unwrap()));
    });

    let words = region.atomics_u64(0..case.bytes).unwrap();
    let lost = words
        .iter()
        .enumerate()
        .filter(|(i, word)| word.load(Ordering::Relaxed) != shadows[i % OWNERS][*i])
        .count();
    let writes: u64 = shadows.iter().map(|s| s.iter().max().unwrap()).sum();
    eprintln!(
        "  {engine}, {} pages, pause {}, skew {} %: {leaps} leaps ({stopped} stopped), {writes} writes ({} by read(2), {} EFAULT), \
         {disturbed} disturbed copies, {} KB copied again, {holds} holds, longest wait {} us",
        case.page,
        case.pause,
        case.skew,
        kernel.done.load(Ordering::Relaxed),
        kernel.efaults.load(Ordering::Relaxed),
        again >> 10,
        longest_wait / 1000
    );
    if !engine.signals() {
        assert_eq!(
            kernel.efaults.load(Ordering::Relaxed),
            0,
            "a system call failed because of a leap"
        );
    }
    assert_eq!(lost, 0, "LOST {lost} of {writes} writes");
    assert!(writes > 1000, "the load did not run");
    drop(region);
    assert_eq!(
        pools[0].free_bytes() + pools[1].free_bytes(),
        total_free + case.bytes as u64,
        "frames leaked"
    );
}

/// Cases follow each other: they count the mappings of the process, and each wants all CPUs.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn no_write_is_lost() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = if in_lab() { 4 << 20 } else { 16 << 20 };
    for engine in EngineChoice::ALL.into_iter().filter(|engine| *engine != EngineChoice::Auto) {
        if !works(engine) {
            skip(&format!("no_write_is_lost ({engine})"), &"the engine does not work here");
            continue;
        }
        for (pause, skew) in [(0, 0), (200, 0), (0, 75)] {
            let case = Case { engine, page: PageSize::Base, bytes, pause, skew };
            run(case, pools(PageSize::Base, bytes as u64).unwrap());
        }
    }
}

#[test]
fn no_write_is_lost_on_huge_pages() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = 32 << 20;
    for (page, engine) in [PageSize::Thp, PageSize::Huge2M]
        .into_iter()
        .flat_map(|page| engines().into_iter().map(move |e| (page, e)))
    {
        match pools(page, bytes as u64) {
            Ok(pools) => run(Case { engine, page, bytes, pause: 0, skew: 0 }, pools),
            Err(error) => skip_page_size("no_write_is_lost_on_huge_pages", page, error),
        }
    }
}
