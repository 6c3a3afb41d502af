//! The measured part: memcpys and leaps without load, then queries and writes before, during and
//! after a leap.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use pageleap::{Migration, Pool, Region};
use pageleap_measure::leap::{self, Watched, Wish};
use pageleap_measure::load::{Beside, Log, Shadow, run_beside};
use pageleap_measure::memcpy::{Copies, METHODS, Target};
use pageleap_measure::phase::{Phase, StopOnDrop};

use super::args::DemoArgs;
use super::build::Built;
use super::queries::{self, QueryCounts, QueryLog};
use crate::stop::Stop;
use crate::{interrupt, progress};

/// Shortest time that queries and writer run before the leap, and again after the leap.
const PHASE_TIME: Duration = Duration::from_secs(1);
/// This first part of the first phase does not count for the writer's rate. In it, the writer
/// touches its shadow for the first time.
const WRITER_WARM_UP: Duration = Duration::from_millis(300);
/// The main thread checks the clock and the signals at this interval.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Runs of the memcpy. Each run copies the region once by each method.
const MEMCPY_RUNS: usize = 3;
/// Leaps without load, to the destination and back.
const QUIET_ROUND_TRIPS: usize = 2;

/// What was measured.
pub struct Measured {
    /// Memcpys of the region without load.
    pub copies: Vec<Copies>,
    /// Times of leaps without load, alternately to the destination and back.
    pub quiet_ns: Vec<u64>,
    /// What the query thread saw.
    pub query_log: QueryLog,
    /// What the writer did.
    pub write_log: Log,
    /// What the writer's column must contain.
    pub shadow: Shadow,
    /// The writer's rate before the leap, per second.
    pub rate_before: f64,
    /// The leap; `None` if a signal came before it.
    pub leap: Option<Watched>,
}

/// Measures everything. All threads have ended when the function returns.
pub fn measure(args: &DemoArgs, built: &Built) -> Result<Measured, Stop> {
    let copies = memcpys(&built.region, &built.destination)?;
    let quiet_ns = quiet_leaps(args, built)?;
    let slots = built.order_keys()?;
    let mut shadow = Shadow::of(slots);
    let ((under_load, query_log), write_log) =
        run_beside(&args.load(), slots, &mut shadow, |beside| beside_queries(args, built, beside))?;
    let UnderLoad { rate_before, leap } = under_load;
    Ok(Measured { copies, quiet_ns, query_log, write_log, shadow, rate_before, leap })
}

/// What was measured beside queries and writes.
struct UnderLoad {
    rate_before: f64,
    leap: Option<Watched>,
}

/// Starts the query thread and goes through the phases while it runs.
fn beside_queries(
    args: &DemoArgs,
    built: &Built,
    beside: &Beside,
) -> Result<(UnderLoad, QueryLog), Stop> {
    let columns = built.columns()?;
    let counts = QueryCounts::default();
    thread::scope(|scope| {
        let stop = StopOnDrop(&beside.stage);
        let queries = thread::Builder::new()
            .name("queries".to_owned())
            .spawn_scoped(scope, || queries::run(columns, &beside.stage, &counts))
            .context("cannot start the thread of the queries")?;
        let under_load = phases(args, built, beside, &counts)?;
        drop(stop);
        let log = queries.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((under_load, log))
    })
}

/// Waits, leaps, and waits again while queries and writer run.
fn phases(
    args: &DemoArgs,
    built: &Built,
    beside: &Beside,
    counts: &QueryCounts,
) -> Result<UnderLoad, Stop> {
    let bar = progress::spinner("queries before");
    let start = Instant::now();
    stay(&bar, || start.elapsed() >= WRITER_WARM_UP);
    let (warm, warm_writes) = (Instant::now(), beside.completed());
    stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::Before) > 0);
    bar.finish_and_clear();
    let rate_before = (beside.completed() - warm_writes) as f64 / warm.elapsed().as_secs_f64();
    if interrupt::received().is_some() {
        return Ok(UnderLoad { rate_before, leap: None });
    }
    let leap = leap(args, built, beside)?;
    let bar = progress::spinner("queries after");
    let start = Instant::now();
    stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::After) > 0);
    bar.finish_and_clear();
    Ok(UnderLoad { rate_before, leap: Some(leap) })
}

/// Waits until `done` returns true or a signal arrives.
fn stay(bar: &indicatif::ProgressBar, done: impl Fn() -> bool) {
    while !done() && interrupt::received().is_none() {
        thread::sleep(LOOK_EVERY);
        bar.tick();
    }
}

/// A migration of the whole region to `pool`, with the engine, threads and area of the arguments.
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

/// Leaps without load and returns the times in order. The region ends in the pool where it began.
fn quiet_leaps(args: &DemoArgs, built: &Built) -> Result<Vec<u64>, Stop> {
    let bar = progress::spinner("timing leaps without load");
    let mut times = Vec::with_capacity(2 * QUIET_ROUND_TRIPS);
    for pool in [&built.destination, &built.source].into_iter().cycle().take(2 * QUIET_ROUND_TRIPS)
    {
        super::stop_if_interrupted()?;
        let job = migration(args, &built.region, pool).start()?;
        leap::finish(&job, |_| {
            bar.tick();
            if interrupt::received().is_some() { Wish::Cancel } else { Wish::GoOn }
        });
        let report = job.wait();
        super::stop_if_interrupted()?;
        if !report.ended.is_completed() {
            return Err(anyhow!("a leap without load did not complete: {report}").into());
        }
        times.push(report.migrate_ns);
    }
    bar.finish_and_clear();
    Ok(times)
}

/// Moves the region under load and watches the move.
fn leap(args: &DemoArgs, built: &Built, beside: &Beside) -> Result<Watched, Stop> {
    let region = &built.region;
    let mut migration = migration(args, region, &built.destination);
    if let Some(timeout) = args.timeout {
        migration = migration.timeout(timeout);
    }
    let bar = progress::bytes("leaping", region.len() as u64);
    let mut cancelled = false;
    let watched = leap::watch(migration, beside, |job| {
        bar.set_position(job.progress().bytes_migrated);
        if interrupt::received().is_none() || cancelled {
            return Wish::GoOn;
        }
        cancelled = true;
        bar.suspend(|| eprintln!("cancelling the leap, then waiting until the region is whole"));
        Wish::Cancel
    })?;
    bar.set_position(watched.report.pages.migrated * args.page_size.bytes() as u64);
    bar.abandon();
    Ok(watched)
}

/// Copies the region into frames of the destination pool, which are faulted already.
fn memcpys(region: &Region, destination: &Pool) -> Result<Vec<Copies>, Stop> {
    // Dropping the target returns its frames to the pool. The leap needs them, because the pool has
    // no others.
    let target = Target::new(region, destination)?;
    let bytes_per_run = (region.len() * (METHODS.len() + 1)) as u64;
    let bar = progress::bytes("timing memcpy", MEMCPY_RUNS as u64 * bytes_per_run);
    let mut runs = Vec::with_capacity(MEMCPY_RUNS);
    for run in 0..MEMCPY_RUNS {
        let copies = target.copy_by_all_methods(run, &|| interrupt::received().is_some());
        super::stop_if_interrupted()?;
        runs.extend(copies);
        bar.inc(bytes_per_run);
    }
    bar.finish_and_clear();
    Ok(runs)
}
