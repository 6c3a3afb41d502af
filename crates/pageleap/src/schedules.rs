//! Tests of whole jobs under long random schedules, on the modelled machine: pools, regions,
//! workers, writers, and all calls that a user may make meanwhile.
//!
//! Shuttle runs all threads of a test on one thread. At each atomic, lock and modelled access it
//! chooses which thread goes on. Each test runs `PAGELEAP_SHUTTLE_ITERATIONS` schedules. The same
//! code meets the same schedules each time, and others with another `PAGELEAP_SHUTTLE_SEED`. A
//! schedule that fails is printed as a string, which `PAGELEAP_SHUTTLE_REPLAY` replays when the
//! test runs alone. A schedule includes all random numbers and all readings of the clock. Shuttle
//! does not check memory orderings; loom does.

pub(crate) mod bounded;
mod changing;
mod directed;
pub(crate) mod explore;
mod hugetlb;
mod traced;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::Scheduler;
use shuttle::sync::RwLock;
use shuttle::thread;

use explore::{Case, at_random, expect, explore, needs_more, with_few_switches};

use crate::backend::{Backend, Call, Errno, FailAt, FailMode, Model, Prot};
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::processor::Processor;
use crate::sync::lock;
use crate::{
    BASE_PAGE, Ended, Engine, Error, Job, Migration, NodeId, PageCounts, PageSize, Phase, Pool,
    Reason, Region, Report, audit,
};

const POOLS: usize = 3;
const POOL_PAGES: usize = 9;
const REGIONS: usize = 2;
/// Pages of a region that stay backed for the region's life. Writers write to these pages.
const STEADY: usize = 3;
/// Pages at the region's end that are discarded and backed again. Growing adds one more.
const VOLATILE: usize = 2;
const CAPACITY: usize = STEADY + VOLATILE + 1;
const WRITERS: usize = 2;
/// The word of a page that marks its contents. The writers' words come before it.
const MARK: usize = WRITERS;

fn below(bound: usize) -> usize {
    thread_rng().gen_range(0..bound)
}

// What is run
// -------------------------------------------------------------------------------------------------

/// What happened over all schedules of a test: the proof that they met the cases that they are for.
/// Plain statistics, outside the schedules.
#[derive(Default)]
struct Seen {
    completed: AtomicU64,
    cancelled: AtomicU64,
    timed_out: AtomicU64,
    region_dropped: AtomicU64,
    disturbed: AtomicU64,
    held: AtomicU64,
    followed: AtomicU64,
    guarded: AtomicU64,
    overlapping: AtomicU64,
    copied_again: AtomicU64,
    partly: AtomicU64,
    busy_ranges: AtomicU64,
    withdrawn: AtomicU64,
    short_of_frames: AtomicU64,
    short_of_slots: AtomicU64,
    refused_calls: AtomicU64,
    struck: AtomicU64,
}

/// The modelled machine with its pools, and regions that several threads use. A lock stands for the
/// rule that a thread that discards pages has the region alone.
struct Scene {
    model: Arc<Model>,
    backend: Arc<dyn Backend>,
    pools: Vec<Pool>,
    regions: Vec<RwLock<Region>>,
    starts: Vec<usize>,
    seen: Arc<Seen>,
    /// The backend that refuses one call, if the test wants that.
    failing: Option<Arc<FailAt>>,
}

impl Scene {
    fn new(failing: Option<FailAt>, model: Arc<Model>, seen: Arc<Seen>) -> Scene {
        let failing = failing.map(Arc::new);
        let backend: Arc<dyn Backend> = match &failing {
            Some(failing) => failing.clone(),
            None => model.clone(),
        };
        let pool = |node| {
            let bytes = (POOL_PAGES * BASE_PAGE) as u64;
            Pool::builder(NodeId(node as u32), bytes)
                .threads(1)
                .backend(backend.clone())
                .build()
                .unwrap()
        };
        let pools: Vec<Pool> = (0..POOLS).map(pool).collect();
        let region = |pool: &Pool| {
            let region =
                Region::reserve_with(backend.clone(), CAPACITY * BASE_PAGE, PageSize::Base)
                    .unwrap();
            region.grow((STEADY + VOLATILE) * BASE_PAGE, pool).unwrap();
            region
        };
        let regions: Vec<Region> = pools[..REGIONS].iter().map(region).collect();
        let starts = regions.iter().map(|region| region.as_ptr().as_ptr() as usize).collect();
        let regions = regions.into_iter().map(RwLock::new).collect();
        // The calls above always work; only later ones may fail.
        failing.iter().for_each(|failing| failing.arm());
        Scene { model, backend, pools, regions, starts, seen, failing }
    }

    fn processor(&self) -> Processor<'_, MAX_THREADS> {
        Processor { model: &self.model, table: &SLOTS, view: None }
    }

    fn addr(&self, region: usize, page: usize, word: usize) -> usize {
        self.starts[region] + page * BASE_PAGE + word * 8
    }

    fn any_pool(&self) -> &Pool {
        &self.pools[below(POOLS)]
    }

    /// Counts a refusal that is no defect, and panics at any other. It is no defect if another
    /// thread of the test uses the resource, or if a call was made to fail.
    fn expect_refusal(&self, error: &Error) {
        let count = match error {
            Error::RangeBusy { .. } => &self.seen.busy_ranges,
            Error::PoolExhausted { .. } => &self.seen.short_of_frames,
            Error::Limit { .. } => &self.seen.short_of_slots,
            Error::Call { .. } | Error::EngineRefused { .. } if self.failing.is_some() => {
                &self.seen.refused_calls
            }
            error => panic!("refused without reason: {error}"),
        };
        count.fetch_add(1, Relaxed);
    }

    /// A thread of the program that stores rising values to its own word of random steady pages.
    /// Returns the last value of each page.
    fn write(&self, writer: usize, stores: u64) -> [[u64; STEADY]; REGIONS] {
        let mut last = [[0; STEADY]; REGIONS];
        for value in 1..=stores {
            let (region, page) = (below(REGIONS), below(STEADY));
            let addr = self.addr(region, page, writer);
            assert_eq!(
                self.processor().load(addr),
                last[region][page],
                "LOST: page {page} of {region}"
            );
            self.processor().store(addr, value);
            last[region][page] = value;
        }
        last
    }

    /// A user who starts jobs on random parts of the regions, and ends them in random ways.
    fn migrate(&self, jobs: usize) {
        let mut running = Vec::new();
        for _ in 0..jobs {
            if let Some((job, pages)) = self.start() {
                let recycles = |job: &Job| job.progress().phase == Phase::Recycling;
                let overlaps = running.iter().any(|(job, _)| recycles(job));
                self.seen.overlapping.fetch_add(u64::from(overlaps), Relaxed);
                match below(7) {
                    0 => self.check_report(&job.wait(), pages),
                    1 => {
                        job.cancel();
                        self.check_report(&job.wait(), pages);
                    }
                    2 => drop(job),
                    3 => {
                        while !job.is_finished() {
                            let progress = job.progress();
                            assert!(progress.bytes_migrated <= progress.bytes_total);
                            if below(8) == 0 {
                                job.cancel();
                            }
                            thread::yield_now();
                        }
                        self.check_report(&job.wait(), pages);
                    }
                    4 | 5 => {
                        job.wait_until_moved();
                        running.push((job, pages));
                    }
                    _ => running.push((job, pages)),
                }
            }
        }
        for (job, pages) in running {
            self.check_report(&job.wait(), pages);
        }
    }

    /// Starts a job on one or two random ranges. Returns the job and the number of its pages.
    fn start(&self) -> Option<(Job, u64)> {
        let regions: Vec<_> = self.regions.iter().map(|region| region.read().unwrap()).collect();
        let mut migration = self.settings();
        let mut total = 0;
        for _ in 0..1 + below(2) {
            let region = &regions[below(REGIONS)];
            let pages = part_of(region.len() / BASE_PAGE);
            total += pages.len() as u64;
            let bytes = pages.start * BASE_PAGE..pages.end * BASE_PAGE;
            migration = migration.range(region, bytes, self.any_pool());
        }
        migration
            .start()
            .inspect_err(|error| self.expect_refusal(error))
            .ok()
            .map(|job| (job, total))
    }

    fn settings<'a>(&self) -> Migration<'a> {
        let migration = Migration::new()
            .engine(any_engine())
            .area_bytes((1 + below(3)) * BASE_PAGE)
            .reduction_factor(1 + below(2) as u64)
            .max_disturbed_copies(below(3) as u32)
            .max_rounds(below(3) as u32)
            .pin_patience(Duration::from_millis(below(30) as u64))
            .threads(1 + below(3));
        let migration = if below(2) == 0 { migration.most_vacated(below(3)) } else { migration };
        if below(4) == 0 {
            migration.timeout(Duration::from_millis(1 + below(20) as u64))
        } else {
            migration
        }
    }

    fn check_report(&self, report: &Report, pages: u64) {
        let PageCounts { migrated, busy, failed, not_attempted, .. } = report.pages;
        assert_eq!(report.pages.total(), pages, "{report}");
        assert_eq!(failed, 0, "one refusal is no failure: {report}");
        let count = match report.ended {
            Ended::Completed => {
                assert_eq!(busy + not_attempted, 0, "{report}");
                &self.seen.completed
            }
            Ended::Cancelled => &self.seen.cancelled,
            Ended::TimedOut => &self.seen.timed_out,
            Ended::RegionDropped => &self.seen.region_dropped,
            Ended::Failed(Error::Pinned { .. }) => {
                assert!(busy > 0, "{report}");
                &self.seen.guarded
            }
            Ended::CpusetChanged | Ended::Failed(_) => panic!("{report}"),
        };
        count.fetch_add(1, Relaxed);
        self.seen.disturbed.fetch_add(report.counts.disturbed_copies, Relaxed);
        self.seen.held.fetch_add(report.counts.holds, Relaxed);
        let followed = report.engine.engine().is_some_and(Engine::follows);
        self.seen.followed.fetch_add(u64::from(followed), Relaxed);
        let again = followed && report.bytes_recopied > 0;
        self.seen.copied_again.fetch_add(u64::from(again), Relaxed);
        let withdrawn = report.runs.iter().any(|run| run.reason == Some(Reason::Discarded));
        self.seen.withdrawn.fetch_add(u64::from(withdrawn), Relaxed);
        self.seen.partly.fetch_add(u64::from(migrated > 0 && not_attempted > 0), Relaxed);
    }

    /// A user who discards the volatile part of regions, backs it again, and grows them.
    fn rebuild(&self, rounds: usize) {
        /// The known state of a volatile page.
        #[derive(Clone, Copy, PartialEq)]
        enum Page {
            Unbacked,
            Marked(u64),
            /// A call on the page was refused: the page may be backed or not.
            Unknown,
        }
        let marked = Page::Marked(0);
        let mut known = [[marked, marked, Page::Unbacked]; REGIONS];
        for mark in 1..=rounds as u64 {
            let which = below(REGIONS);
            let known = &mut known[which];
            let backed = self.regions[which].read().unwrap().len() / BASE_PAGE - STEADY;
            let pages = part_of(backed);
            let bytes = (STEADY + pages.start) * BASE_PAGE..(STEADY + pages.end) * BASE_PAGE;
            let patience = Duration::from_secs(below(2) as u64);
            let (result, after, touched) = match below(3) {
                0 => {
                    for page in pages.clone() {
                        if let Page::Marked(mark) = known[page] {
                            let addr = self.addr(which, STEADY + page, MARK);
                            assert_eq!(
                                self.processor().load(addr),
                                mark,
                                "LOST: the mark of page {page}"
                            );
                        }
                    }
                    let mut region = self.regions[which].write().unwrap();
                    (region.discard_within(bytes, patience), Page::Unbacked, pages)
                }
                1 => {
                    let region = self.regions[which].read().unwrap();
                    let result = region.back_within(bytes, self.any_pool(), patience);
                    if known[pages.clone()].iter().any(|page| matches!(page, Page::Marked(_))) {
                        assert!(result.is_err(), "backed twice");
                        continue;
                    }
                    (result, Page::Marked(mark), pages)
                }
                _ => {
                    let grown = self.regions[which]
                        .read()
                        .unwrap()
                        .grow(CAPACITY * BASE_PAGE, self.any_pool());
                    (grown, Page::Marked(mark), backed..CAPACITY - STEADY)
                }
            };
            match result {
                Ok(()) => {
                    for page in touched {
                        if after == Page::Marked(mark) {
                            let first = self.addr(which, STEADY + page, 0);
                            for addr in [first, first + MARK * 8] {
                                assert_eq!(
                                    self.processor().load(addr),
                                    0,
                                    "a new page has old contents"
                                );
                            }
                            self.processor().store(first, !0);
                            self.processor().store(first + MARK * 8, mark);
                        }
                        known[page] = after;
                    }
                }
                Err(error @ Error::Call { .. }) => {
                    self.expect_refusal(&error);
                    known[touched].fill(Page::Unknown);
                }
                Err(Error::BadRange { .. }) if known[touched.clone()].contains(&Page::Unknown) => {}
                Err(error) => self.expect_refusal(&error),
            }
        }
    }

    /// A user who pins pages for a while, as for a device that accesses their frames.
    fn pin(&self, guards: usize) {
        for _ in 0..guards {
            let which = below(REGIONS);
            let pages = part_of(STEADY);
            let bytes = pages.start * BASE_PAGE..pages.end * BASE_PAGE;
            let guard = self.regions[which].read().unwrap().pin(bytes).unwrap();
            let frames = || {
                let addr = |page| self.addr(which, page, 0);
                pages.clone().map(|page| self.model.frame_at(addr(page))).collect::<Vec<_>>()
            };
            let first = frames();
            for _ in 0..below(12) {
                thread::yield_now();
                assert_eq!(frames(), first, "LOST: a device writes to the frame that was there");
            }
            drop(guard);
        }
    }

    /// A region that lives for a moment, and is dropped while a job works on it.
    fn come_and_go(&self) {
        const PAGES: usize = 2;
        let region = match Region::new(self.any_pool(), PAGES * BASE_PAGE) {
            Ok(region) => region,
            Err(error) => return self.expect_refusal(&error),
        };
        let start = region.as_ptr().as_ptr() as usize;
        let mark = |page: usize| (start + page * BASE_PAGE + MARK * 8, page as u64 + 77);
        (0..PAGES).map(mark).for_each(|(addr, value)| self.processor().store(addr, value));
        let job = self.settings().range(&region, 0..region.len(), self.any_pool()).start();
        for (addr, value) in (0..PAGES).map(mark) {
            assert_eq!(
                self.processor().load(addr),
                value,
                "LOST: the mark of a region that comes and goes"
            );
        }
        drop(region);
        match job {
            Ok(job) => {
                assert!(job.is_finished(), "a region went while a job was at work on it");
                self.check_report(&job.wait(), PAGES as u64);
            }
            Err(error) => self.expect_refusal(&error),
        }
    }

    /// Checks, after the last thread, everything that must hold for a machine at rest.
    fn check(self, written: &[[[u64; STEADY]; REGIONS]]) {
        let Scene { model, backend, pools, regions, starts, failing, seen, .. } = self;
        failing.iter().for_each(|failing| failing.disarm());
        let struck = failing.and_then(|failing| failing.struck());
        seen.struck.fetch_add(u64::from(struck.is_some()), Relaxed);
        let regions: Vec<Region> =
            regions.into_iter().map(|region| region.into_inner().unwrap()).collect();
        for (region, start) in starts.iter().enumerate() {
            for page in 0..STEADY {
                let addr = start + page * BASE_PAGE;
                for (writer, last) in written.iter().enumerate() {
                    assert_eq!(
                        model.load(addr + writer * 8),
                        Ok(last[region][page]),
                        "LOST: page {page} of {region}"
                    );
                }
                assert_eq!(model.attributes_at(addr), Some((Prot::READ_WRITE, true, false, false)));
            }
        }
        if struck == Some(Call::Release) {
            // A region that could not be unmapped keeps its frames, and the model refuses to
            // release files that are mapped.
            std::mem::forget(pools);
            return;
        }
        audit(&pools.iter().collect::<Vec<_>>(), &regions.iter().collect::<Vec<_>>()).unwrap();
        let slots: Vec<_> = std::iter::from_fn(|| SLOTS.claim()).collect();
        assert_eq!(slots.len(), MAX_THREADS, "a job has kept a slot");
        slots.into_iter().for_each(|slot| SLOTS.release(slot));

        drop(regions);
        for pool in &pools {
            assert_eq!(pool.free_bytes(), pool.bytes(), "frames leaked");
            // Also repairs frames that could not be mapped when they were given back.
            let [share] = pool.shares() else { panic!("a pool of one node has one share") };
            let frames = share.take_zeroed(POOL_PAGES as u64, 0).unwrap();
            let alias = (0..POOL_PAGES as u64).map(|frame| share.0.alias_of(frame));
            for (frame, addr) in alias.enumerate() {
                assert_eq!(
                    model.frame_at(addr),
                    Some((share.0.file, frame)),
                    "frame {frame} is not where its alias is"
                );
                assert_eq!(
                    model.attributes_at(addr),
                    Some((Prot::READ_WRITE, true, true, false)),
                    "frame {frame}"
                );
            }
            frames.into_iter().for_each(|run| share.give_back(run).unwrap());
        }
        drop((pools, backend));
        assert_eq!(model.pages_in_use(), 0, "address space leaked");
        assert_eq!(
            (model.trackers_open(), model.waiting()),
            (0, 0),
            "a job has left something behind"
        );
    }
}

/// A random part of `0..pages` that is not empty.
fn part_of(pages: usize) -> Range<usize> {
    let start = below(pages);
    start..start + 1 + below(pages - start)
}

fn any_engine() -> Engine {
    Engine::ALL[below(Engine::ALL.len())]
}

/// Runs all kinds of threads at once.
fn everything_at_once(scene: Scene) {
    let scene = Arc::new(scene);
    let run = |body: fn(&Scene)| {
        let scene = scene.clone();
        thread::spawn(move || body(&scene))
    };
    let users = [
        run(|scene| scene.migrate(6)),
        run(|scene| scene.migrate(4)),
        run(|scene| scene.rebuild(10)),
        run(|scene| scene.pin(4)),
        run(|scene| (0..3).for_each(|_| scene.come_and_go())),
    ];
    let writers = [0, 1].map(|writer| {
        let scene = scene.clone();
        thread::spawn(move || scene.write(writer, 60))
    });
    let written = writers.map(|writer| writer.join().unwrap());
    users.into_iter().for_each(|user| user.join().unwrap());
    let scene = Arc::into_inner(scene).expect("all threads have ended");
    scene.check(&written);
}

// The tests
// -------------------------------------------------------------------------------------------------

fn without_refusals<S: Scheduler + 'static>(scheduler: impl Fn(usize) -> S) {
    /// With few switches, thousands of schedules may miss a rare case. If each case must be met,
    /// more schedules run until that is so.
    const MOST_RUNS: usize = 40;
    let seen = Arc::new(Seen::default());
    let cases: [Case; 15] = [
        ("completed", &seen.completed),
        ("cancelled", &seen.cancelled),
        ("timed out", &seen.timed_out),
        ("region dropped", &seen.region_dropped),
        ("stopped half-way", &seen.partly),
        ("disturbed copies", &seen.disturbed),
        ("held areas", &seen.held),
        ("jobs that followed writes", &seen.followed),
        ("jobs that began while frames were recycled", &seen.overlapping),
        ("jobs that guards have kept from their end", &seen.guarded),
        ("written pages that were copied again", &seen.copied_again),
        ("busy ranges", &seen.busy_ranges),
        ("jobs whose pages were discarded", &seen.withdrawn),
        ("exhausted pools", &seen.short_of_frames),
        ("exhausted slots", &seen.short_of_slots),
    ];
    for run in 0..MOST_RUNS {
        let counts = seen.clone();
        explore(scheduler(run), move || {
            everything_at_once(Scene::new(None, Arc::new(Model::new()), counts.clone()));
        });
        if !needs_more(&cases) {
            break;
        }
    }
    expect(&cases);
}

#[test]
fn shuttle_everything_at_once_at_random() {
    without_refusals(at_random);
}

/// Threads run for long and are interrupted at three places. This finds defects for which one
/// thread must sleep through much work of others.
#[test]
fn shuttle_everything_at_once_with_few_switches() {
    without_refusals(|run| with_few_switches(4, run));
}

/// A caller that can claim the ranges that a job has moved also gets the frames that the job has
/// vacated, without luck.
#[test]
fn shuttle_a_leap_back_finds_its_frames() {
    const PAGES: usize = 4;
    let busy = Arc::new(AtomicU64::new(0));
    let counts = busy.clone();
    let body = move || {
        let backend: Arc<dyn Backend> = Arc::new(Model::new());
        let pools = [0, 1].map(|node| {
            let pool = Pool::builder(NodeId(node), (PAGES * BASE_PAGE) as u64).threads(1);
            pool.backend(backend.clone()).build().unwrap()
        });
        let region = Region::reserve_with(backend, PAGES * BASE_PAGE, PageSize::Base).unwrap();
        region.grow(PAGES * BASE_PAGE, &pools[0]).unwrap();
        let start = |to: &Pool| {
            let engine = any_engine();
            let job = Migration::new().range(&region, 0..PAGES * BASE_PAGE, to).engine(engine);
            job.area_bytes((1 + below(3)) * BASE_PAGE).threads(1 + below(2)).start()
        };
        let there = start(&pools[1]).unwrap();
        // A cancelled job also holds frames that it did not use.
        if below(3) == 0 {
            there.cancel();
        }
        let back = loop {
            match start(&pools[0]) {
                Ok(job) => break job,
                Err(Error::RangeBusy { .. }) => counts.fetch_add(1, Relaxed),
                Err(error) => panic!("LOST frames: {error}"),
            };
            thread::yield_now();
        };
        assert!(back.wait().ended.is_completed());
        drop(there.wait());
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
        assert_eq!(pools[1].free_bytes(), pools[1].bytes());
    };
    explore(at_random(0), body.clone());
    // The moment between giving back claims and frames is short: a thread must be held up just
    // there.
    explore(with_few_switches(3, 0), body);
    expect(&[("starts that came too early", &busy)]);
}

/// Several threads wait for frames of several jobs, and the jobs vacate enough frames for all of
/// them.
#[test]
fn shuttle_everybody_who_waits_for_frames_gets_some() {
    const JOBS: usize = 2;
    let waited = Arc::new(AtomicU64::new(0));
    let counts = waited.clone();
    explore(at_random(0), move || {
        let backend: Arc<dyn Backend> = Arc::new(Model::new());
        let pools = [0, 1].map(|node| {
            let pool = Pool::builder(NodeId(node), (JOBS * BASE_PAGE) as u64).threads(1);
            pool.backend(backend.clone()).build().unwrap()
        });
        let make = |backend: &Arc<dyn Backend>, pool: &Pool| {
            let region = Region::reserve_with(backend.clone(), BASE_PAGE, PageSize::Base).unwrap();
            region.grow(BASE_PAGE, pool).unwrap();
            region
        };
        let regions = [0; JOBS].map(|_| make(&backend, &pools[0]));
        let start = |region| {
            Migration::new().range(region, 0..BASE_PAGE, &pools[1]).threads(1).start().unwrap()
        };
        let jobs: Vec<Job> = regions.iter().map(start).collect();
        jobs.iter().for_each(Job::wait_until_moved);
        counts.fetch_add(u64::from(pools[0].free_bytes() == 0), Relaxed);
        let pool = Arc::new(pools);
        let threads = [0; JOBS].map(|_| {
            let (backend, pool) = (backend.clone(), pool.clone());
            thread::spawn(move || make(&backend, &pool[0]))
        });
        let fresh = threads.map(|thread| thread.join().unwrap());
        jobs.into_iter().for_each(|job| assert!(job.wait().ended.is_completed()));
        audit(&[&pool[0], &pool[1]], &regions.iter().chain(&fresh).collect::<Vec<_>>()).unwrap();
    });
    expect(&[("times when no frame was free yet", &waited)]);
}

/// Pages under a guard cannot be discarded, and discarded pages cannot get a guard.
#[test]
fn shuttle_guards_and_discards_exclude_each_other() {
    const PAGES: u64 = 4;
    let [given, discarded] = [0; 2].map(|_| Arc::new(AtomicU64::new(0)));
    let counts = [given.clone(), discarded.clone()];
    explore(at_random(0), move || {
        let backend: Arc<dyn Backend> = Arc::new(Model::new());
        let bytes = PAGES as usize * BASE_PAGE;
        let pool = Pool::builder(NodeId(0), bytes as u64)
            .threads(1)
            .backend(backend.clone())
            .build()
            .unwrap();
        let region = Arc::new(Region::reserve_with(backend, bytes, PageSize::Base).unwrap());
        region.grow(bytes, &pool).unwrap();
        let shared = region.clone();
        let other = thread::spawn(move || {
            // SAFETY: nobody accesses the memory of a model.
            unsafe { shared.discard_shared(0..2 * BASE_PAGE) }.is_ok()
        });
        let guard = region.pin(BASE_PAGE..3 * BASE_PAGE);
        let is_backed = || lock(&region.inner().extents).backs_all(1..3);
        assert!(guard.is_err() || is_backed(), "a guard was given on pages that are gone");
        let gone = other.join().unwrap();
        assert!(gone != guard.is_ok(), "both, or neither");
        assert!(guard.is_err() || is_backed(), "guarded pages were discarded");
        counts[0].fetch_add(u64::from(guard.is_ok()), Relaxed);
        counts[1].fetch_add(u64::from(gone), Relaxed);
    });
    expect(&[("guards", &given), ("discards", &discarded)]);
}

/// The same, while one random call is refused: before its effect, after it, or half-way.
#[test]
fn shuttle_everything_at_once_and_one_call_is_refused() {
    /// The latest call that may be refused. Most schedules make more calls than that.
    const LATEST: usize = 120;
    let seen = Arc::new(Seen::default());
    let counts = seen.clone();
    explore(at_random(0), move || {
        let model = Arc::new(Model::new());
        let mode = [FailMode::Before, FailMode::After, FailMode::Partial][below(3)];
        let failing =
            FailAt::new(model.clone(), 1 + below(LATEST) as u64, mode, Errno(libc::ENOMEM));
        everything_at_once(Scene::new(Some(failing), model, counts.clone()));
    });
    expect(&[
        ("completed", &seen.completed),
        ("refused calls that a user saw", &seen.refused_calls),
        ("refused calls", &seen.struck),
    ]);
}
