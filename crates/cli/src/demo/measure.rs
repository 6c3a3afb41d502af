//! The measured part: memcpy without load, then queries and writes before, during and after the
//! leap.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use pageleap::{Migration, Pool, Region, Report, observe};

use super::args::DemoArgs;
use super::build::Built;
use super::queries::{self, QueryCounts, QueryLog};
use crate::leaping::{self, finished_within};
use crate::phase::{Phase, Stage, StopOnDrop};
use crate::stop::Stop;
use crate::writer::{self, Rate, Rows, WriteLog};
use crate::{interrupt, progress};

/// How long queries and writer run before the leap, and again after it, at least.
const PHASE_TIME: Duration = Duration::from_secs(1);
/// How much of the first phase does not count for the writer's rate: it touches its shadow for the
/// first time.
const WRITER_WARM_UP: Duration = Duration::from_millis(300);
/// How often the main thread looks at the clock, the signals, the mappings and the progress.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Timed memcpy runs, after one that is not.
const MEMCPY_RUNS: usize = 3;
/// Leaps without load, to the destination and back.
const QUIET_ROUND_TRIPS: usize = 2;

/// What was measured.
pub struct Measured {
    /// Time of a memcpy of the region without load.
    pub memcpy_ns: u64,
    /// Times of leaps without load, to the destination and back in turns.
    pub quiet_ns: Vec<u64>,
    /// What the query thread saw.
    pub query_log: QueryLog,
    /// What the writer did.
    pub write_log: WriteLog,
    /// The writer's rate before the leap, per second.
    pub rate_before: f64,
    /// The leap, unless a signal came first.
    pub leap: Option<Leap>,
}

/// One leap.
pub struct Leap {
    /// What the library reports.
    pub report: Report,
    /// From the start of the job to its end, as seen from here.
    pub elapsed: Duration,
    /// Writes that ended in this time.
    pub writes: u64,
    /// Mappings of region and pools before the leap, at most, and after it.
    pub mappings: [usize; 3],
}

/// Measures everything. The threads have ended when it returns.
pub fn measure(args: &DemoArgs, built: &Built) -> Result<Measured, Stop> {
    let memcpy_ns = memcpy(&built.region, &built.destination)?;
    let quiet_ns = quiet_leaps(args, built)?;
    let columns = built.columns()?;
    let slots = built.order_keys()?;
    let shadow: Vec<u64> = slots.iter().map(|slot| slot.load(Ordering::Relaxed)).collect();
    let (stage, counts, completed) = (Stage::new(), QueryCounts::default(), AtomicU64::new(0));

    thread::scope(|scope| {
        let stop = StopOnDrop(&stage);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let queries = named("queries")
            .spawn_scoped(scope, || queries::run(columns, &stage, &counts))
            .context("no thread for the queries")?;
        let writer = named("writer")
            .spawn_scoped(scope, || match args.writes_per_s {
                Rate::PerSecond(0) => WriteLog::none(shadow),
                rate => {
                    let load = writer::Load {
                        rate,
                        rows: Rows::Uniform,
                        seed: args.seed,
                        written: 0,
                        leaves_each: None,
                    };
                    writer::run(slots, shadow, load, &stage, &completed)
                }
            })
            .context("no thread for the writer")?;

        let bar = progress::spinner("queries before");
        let start = Instant::now();
        stay(&bar, || start.elapsed() >= WRITER_WARM_UP);
        let (warm, warm_writes) = (Instant::now(), completed.load(Ordering::Relaxed));
        stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::Before) > 0);
        bar.finish_and_clear();
        let rate_before =
            (completed.load(Ordering::Relaxed) - warm_writes) as f64 / warm.elapsed().as_secs_f64();

        let leap = match interrupt::received() {
            Some(_) => None,
            None => Some(leap(args, built, &stage, &completed)?),
        };
        if leap.is_some() {
            let bar = progress::spinner("queries after");
            let start = Instant::now();
            stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::After) > 0);
            bar.finish_and_clear();
        }
        drop(stop);
        Ok(Measured {
            memcpy_ns,
            quiet_ns,
            query_log: join(queries),
            write_log: join(writer),
            rate_before,
            leap,
        })
    })
}

fn join<T>(thread: ScopedJoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits until `done` or a signal.
fn stay(bar: &indicatif::ProgressBar, done: impl Fn() -> bool) {
    while !done() && interrupt::received().is_none() {
        thread::sleep(LOOK_EVERY);
        bar.tick();
    }
}

/// The whole region to `pool`, with what the arguments say about the method.
fn migration<'a>(args: &DemoArgs, region: &'a Region, pool: &Pool) -> Migration<'a> {
    let migration = Migration::new()
        .range(region, 0..region.len(), pool)
        .engine(args.engine)
        .threads(args.threads);
    match args.area {
        Some(area) => migration.area_bytes(area),
        None => migration,
    }
}

/// Times of leaps that nothing disturbs, to compare with the memcpy just timed. The region ends
/// where it was.
fn quiet_leaps(args: &DemoArgs, built: &Built) -> Result<Vec<u64>, Stop> {
    let bar = progress::spinner("timing leaps without load");
    let mut times = Vec::with_capacity(2 * QUIET_ROUND_TRIPS);
    for pool in [&built.destination, &built.source].into_iter().cycle().take(2 * QUIET_ROUND_TRIPS)
    {
        super::stop_if_interrupted()?;
        let job = migration(args, &built.region, pool).start()?;
        while !finished_within(&job, LOOK_EVERY) {
            bar.tick();
            if interrupt::received().is_some() {
                job.cancel();
            }
        }
        let report = job.wait();
        super::stop_if_interrupted()?;
        if !report.ended.is_completed() {
            return Err(anyhow!("a leap without load did not complete: {report}").into());
        }
        times.push(report.migrate_ns);
    }
    bar.finish_and_clear();
    times.sort_unstable();
    Ok(times)
}

/// Moves the region and watches it.
fn leap(
    args: &DemoArgs,
    built: &Built,
    stage: &Stage,
    completed: &AtomicU64,
) -> Result<Leap, Stop> {
    let region = &built.region;
    let mut migration = migration(args, region, &built.destination);
    if let Some(timeout) = args.timeout {
        migration = migration.timeout(timeout);
    }
    let mappings_before = observe::pool_mapping_count()?;
    let mut mappings_peak = mappings_before;
    let bar = progress::bytes("leaping", region.len() as u64);

    let writes_before = completed.load(Ordering::Relaxed);
    stage.enter(Phase::During);
    let start = Instant::now();
    let job = migration.start()?;
    let mut cancelled = false;
    while !finished_within(&job, LOOK_EVERY) {
        bar.set_position(job.progress().bytes_migrated);
        mappings_peak = mappings_peak.max(observe::pool_mapping_count()?);
        if interrupt::received().is_some() && !cancelled {
            job.cancel();
            cancelled = true;
            bar.suspend(|| {
                eprintln!("cancelling the leap, then waiting until the region is whole")
            });
        }
    }
    let elapsed = start.elapsed();
    stage.enter(Phase::After);
    let writes = completed.load(Ordering::Relaxed) - writes_before;
    let report = job.wait();
    bar.set_position(report.pages.migrated * args.page_size.bytes() as u64);
    bar.abandon();
    let mappings_after = observe::pool_mapping_count()?;
    let mappings = [mappings_before, mappings_peak.max(mappings_after), mappings_after];
    Ok(Leap { report, elapsed, writes, mappings })
}

/// Median time of a memcpy of the region's bytes into memory of the destination that is faulted
/// already.
fn memcpy(region: &Region, destination: &Pool) -> Result<u64, Stop> {
    // Drops its frames back into the pool, which has no others for the leap.
    let scratch = Region::new(destination, region.len())?;
    let bar = progress::bytes("timing memcpy", (region.len() * (MEMCPY_RUNS + 1)) as u64);
    let mut times = Vec::with_capacity(MEMCPY_RUNS);
    for run in 0..=MEMCPY_RUNS {
        super::stop_if_interrupted()?;
        let start = Instant::now();
        // SAFETY: both regions have so many bytes, they do not overlap, and no other thread uses
        // either yet.
        unsafe { leaping::memcpy(scratch.as_ptr(), region.as_ptr(), region.len()) };
        if run > 0 {
            times.push(start.elapsed());
        }
        bar.inc(region.len() as u64);
    }
    bar.finish_and_clear();
    times.sort_unstable();
    Ok(times[times.len() / 2].as_nanos() as u64)
}
