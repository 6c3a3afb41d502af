//! The measured part: memcpys and leaps without load, then queries and writes before, during and
//! after a leap, and beside a memcpy.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use pageleap_measure::leap::{self, Watched, Wish};
use pageleap_measure::load::{Beside, Log, Shadow, run_beside};
use pageleap_measure::memcpy::{BaseLine, Copies, Copy, METHODS, Target};
use pageleap_measure::phase::{Phase, StopOnDrop};
use pageleap_measure::timeline::{self, Moment};

use super::Observed;
use super::args::DemoArgs;
use super::build::Built;
use super::home::{Home, Way, Wishes};
use crate::stop::Stop;
use crate::{interrupt, progress};
use pageleap_measure::tpch::queries::{self, QueryCounts, QueryLog};

/// Shortest time that queries and writer run before the leap, and again after the leap.
const PHASE_TIME: Duration = Duration::from_secs(1);
/// The first part of the first phase, which does not count for the writer's rate, because the
/// writer faults in its shadow there.
const WRITER_WARM_UP: Duration = Duration::from_millis(300);
/// The main thread checks the clock and the signals at this interval.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Runs of the memcpy. Each run copies the table once by each method.
const MEMCPY_RUNS: usize = 3;
/// Leaps without load, to the destination and back.
const QUIET_ROUND_TRIPS: usize = 2;

/// The measurements of a run.
pub struct Measured {
    /// Memcpys of the table without load.
    pub copies: Vec<Copies>,
    /// Leaps without load, alternately to the destination and back.
    pub quiet: Vec<Watched>,
    /// The times to populate the memory that each of these leaps copied into, in nanoseconds;
    /// `None` without such memory.
    pub quiet_reserve_ns: Vec<Option<u64>>,
    /// The time to populate memory for the leap under load, in nanoseconds; `None` without such
    /// memory.
    pub reserve_ns: Option<u64>,
    /// The table before the leap under load. A page that has leapt several times may be in its
    /// first frame again.
    pub before: Observed,
    /// The log of the query thread.
    pub query_log: QueryLog,
    /// The log of the writer.
    pub write_log: Log,
    /// The values that the writer's column must contain.
    pub shadow: Shadow,
    /// Measurements beside queries and writes.
    pub under_load: UnderLoad,
}

/// Measures everything. All threads have ended when the function returns.
pub fn measure(args: &DemoArgs, built: &Built) -> Result<Measured, Stop> {
    let copies = memcpys(&*built.home)?;
    let (quiet, quiet_reserve_ns) = quiet_leaps(args, built)?.into_iter().unzip();
    let slots = built.order_keys()?;
    let mut shadow = Shadow::of(slots);
    // Populated before the load starts, so that the first phase shows the load alone.
    let reserve_ns = populate(&*built.home)?;
    let before = Observed::of(built)?;
    let target = built.home.memcpy_target()?;
    super::stop_if_interrupted()?;
    let ((under_load, query_log), write_log) =
        run_beside(&args.load(), slots, &mut shadow, |beside| {
            beside_queries(args, built, base_line(&copies), target, beside)
        })?;
    Ok(Measured {
        copies,
        quiet,
        quiet_reserve_ns,
        reserve_ns,
        before,
        query_log,
        write_log,
        shadow,
        under_load,
    })
}

/// Populates the memory that the leap under load copies into.
fn populate(home: &dyn Home) -> Result<Option<u64>, Stop> {
    let bar = progress::spinner("filling reserve");
    bar.tick();
    let took = home.prepare(Way::There);
    bar.finish_and_clear();
    took
}

/// The step size that was fastest without load.
pub fn base_line(copies: &[Copies]) -> BaseLine {
    BaseLine::of(copies).expect("memcpys were timed")
}

/// Measurements beside queries and writes.
pub struct UnderLoad {
    /// The writer's rate before the leap, per second.
    pub rate_before: f64,
    /// A memcpy beside queries and writes; `None` if a signal came before it.
    pub memcpy: Option<Copy>,
    /// The leap; `None` if a signal came before it.
    pub leap: Option<Watched>,
    /// Writer and leap over time.
    pub timeline: Vec<Moment>,
}

/// Starts the query thread and goes through the phases while it runs.
fn beside_queries(
    args: &DemoArgs,
    built: &Built,
    base_line: BaseLine,
    target: Target,
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
        let looks = thread::Builder::new()
            .name("timeline".to_owned())
            .spawn_scoped(scope, || timeline::record(beside))
            .context("cannot start the thread that records the timeline")?;
        let mut under_load = before(beside, &counts);
        if interrupt::received().is_none() {
            under_load.memcpy = Some(memcpy(base_line, &target, beside));
        }
        // Dropped before the leap: a region needs these frames, because the pool has no others.
        drop(target);
        if interrupt::received().is_none() {
            under_load.leap = Some(leap(args, built, beside)?);
            after(&counts);
        }
        drop(stop);
        let log = queries.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        under_load.timeline = looks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((under_load, log))
    })
}

/// Lets queries and writer run, and measures the writer's rate.
fn before(beside: &Beside, counts: &QueryCounts) -> UnderLoad {
    let bar = progress::spinner("queries before");
    let start = Instant::now();
    stay(&bar, || start.elapsed() >= WRITER_WARM_UP);
    let (warm, warm_writes) = (Instant::now(), beside.completed());
    stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::Before) > 0);
    bar.finish_and_clear();
    let rate_before = (beside.completed() - warm_writes) as f64 / warm.elapsed().as_secs_f64();
    UnderLoad { rate_before, memcpy: None, leap: None, timeline: Vec::new() }
}

/// Times one memcpy beside queries and writer. There is only one, because there is only one leap
/// under load.
fn memcpy(base_line: BaseLine, target: &Target, beside: &Beside) -> Copy {
    let bar = progress::spinner("memcpy beside queries");
    beside.stage.enter(Phase::Memcpy);
    let copy = target.copy(base_line.method());
    beside.stage.enter(Phase::Before);
    bar.finish_and_clear();
    copy
}

/// Lets queries and writer run after the leap.
fn after(counts: &QueryCounts) {
    let bar = progress::spinner("queries after");
    let start = Instant::now();
    stay(&bar, || start.elapsed() >= PHASE_TIME && counts.get(Phase::After) > 0);
    bar.finish_and_clear();
}

/// Waits until `done` returns true or a signal arrives.
fn stay(bar: &indicatif::ProgressBar, done: impl Fn() -> bool) {
    while !done() && interrupt::received().is_none() {
        thread::sleep(LOOK_EVERY);
        bar.tick();
    }
}

/// Leaps without load, each with the time to populate memory before it. At the end the table lies
/// where it began.
fn quiet_leaps(args: &DemoArgs, built: &Built) -> Result<Vec<(Watched, Option<u64>)>, Stop> {
    let bar = progress::spinner("timing leaps without load");
    let mut leaps = Vec::with_capacity(2 * QUIET_ROUND_TRIPS);
    for way in [Way::There, Way::Back].into_iter().cycle().take(2 * QUIET_ROUND_TRIPS) {
        super::stop_if_interrupted()?;
        bar.tick();
        let reserve_ns = built.home.prepare(way)?;
        super::stop_if_interrupted()?;
        let leap = leap::watch_counting(
            || built.home.mapping_count(),
            || built.home.leap(args, Wishes { way, may_time_out: false }),
            &Beside::new(),
            |_| {
                bar.tick();
                if interrupt::received().is_some() { Wish::Cancel } else { Wish::GoOn }
            },
        )?;
        super::stop_if_interrupted()?;
        let pages = built.bytes()? / built.home.page_bytes();
        leap::check_complete(&leap.report, pages as u64)?;
        leaps.push((leap, reserve_ns));
    }
    bar.finish_and_clear();
    Ok(leaps)
}

/// Moves the table under load and watches the move.
fn leap(args: &DemoArgs, built: &Built, beside: &Beside) -> Result<Watched, Stop> {
    let bar = progress::bytes("leaping", built.bytes()? as u64);
    let mut cancelled = false;
    let watched = leap::watch_counting(
        || built.home.mapping_count(),
        || built.home.leap(args, Wishes { way: Way::There, may_time_out: true }),
        beside,
        |job| {
            bar.set_position(job.progress().bytes_migrated);
            if interrupt::received().is_none() || cancelled {
                return Wish::GoOn;
            }
            cancelled = true;
            bar.suspend(|| {
                crate::output::note("cancelling the leap, then waiting until the table is whole")
            });
            Wish::Cancel
        },
    )?;
    bar.set_position(watched.report.pages.migrated * built.home.page_bytes() as u64);
    bar.abandon();
    Ok(watched)
}

/// Copies the table into memory of the destination, which is faulted already.
fn memcpys(home: &dyn Home) -> Result<Vec<Copies>, Stop> {
    // The target is dropped at the end of the function: the leaps may need its memory.
    let target = home.memcpy_target()?;
    let bytes_per_run = (size_of_val(home.words()?) * (METHODS.len() + 1)) as u64;
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use pageleap::{NodeId, Pool, Region};

    use super::*;
    use crate::machine;

    #[test]
    fn the_memcpy_beside_the_load_has_a_phase_of_its_own() {
        let nodes = machine::nodes(pageleap::PageSize::Base).ok().unwrap();
        let (node, _) = machine::choose_nodes(&nodes, None, None).unwrap();
        let pool = Pool::builder(NodeId(node), 8 << 20).build().unwrap();
        let region = Region::new(&pool, 4 << 20).unwrap();
        let target = Target::new(&region, &pool).unwrap();
        let base_line = base_line(&[[Copy { ns: 1, cpu_ns: None }; METHODS.len()]]);
        let (beside, seen) = (Beside::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            let stop = StopOnDrop(&beside.stage);
            scope.spawn(|| {
                while !beside.stage.stopped() {
                    seen.fetch_or(beside.stage.phase() == Phase::Memcpy, Ordering::Relaxed);
                }
            });
            // The other thread may have no CPU during the first copies.
            for _ in 0..10_000 {
                memcpy(base_line, &target, &beside);
                if seen.load(Ordering::Relaxed) {
                    break;
                }
            }
            drop(stop);
        });
        assert!(seen.load(Ordering::Relaxed));
        assert_eq!(beside.stage.phase(), Phase::Before);
    }
}
