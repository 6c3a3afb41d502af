//! The measured part of one page size and one load: memcpys, the load beside a memcpy, and leaps,
//! in turns.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use pageleap::Job;
use pageleap_measure::leap::{self, Wish};
use pageleap_measure::load::{Load, Log, Work, run_beside};
use pageleap_measure::memcpy::{BaseLine, Copies};
use pageleap_measure::method;
use pageleap_measure::phase::Phase;
use pageleap_measure::sample::Sample;

use super::args::{EngineRow, EnginesArgs};
use super::place::{Leap, Place};
use crate::interrupt;
use crate::stop::Stop;

/// The load runs beside memcpys for at least this time, however small the region is. A memcpy of a
/// large region takes about as long as a leap, so the load has as much time for a long gap beside
/// one as beside the other.
const BESIDE_TIME: Duration = Duration::from_millis(50);

/// The runs of one page size and one load.
#[derive(Debug, Default)]
pub struct Runs {
    /// The memcpys, by run.
    pub copies: Vec<Copies>,
    /// The load beside memcpys of each run; `None` without a load.
    pub beside: Vec<Option<BesideMemcpy>>,
    /// For each engine, its leap of each run.
    pub samples: Vec<Vec<Sample>>,
}

/// The rate and the gaps of the load beside memcpys.
#[derive(Debug)]
pub struct BesideMemcpy {
    /// Writes, or rounds, per second.
    pub per_s: f64,
    /// Gaps, in the phase [`Phase::Memcpy`].
    pub log: Log,
}

/// Measures all `engines` beside one load, one run after the other. Calls `measured` after each
/// leap.
pub fn measure(
    args: &EnginesArgs,
    place: &mut Place,
    work: Work,
    engines: &[EngineRow],
    measured: &dyn Fn(),
) -> Result<Runs, Stop> {
    let mut runs = Runs::default();
    runs.samples.resize_with(engines.len(), Vec::new);
    for run in 0..args.runs() {
        // All loads of one run change in the same way.
        let load = Load { work, seed: args.seed.wrapping_add(run as u64) };
        // The memcpy comes first in one run and last in the next, as the orders of engines mirror
        // each other.
        if run % 2 == 0 {
            copy(place, &load, run, &mut runs)?;
        }
        for at in method::order(args.seed, run, engines.len()) {
            let sample = leap(args, place, &load, &engines[at])?;
            runs.samples[at].push(sample);
            back(place)?;
            measured();
        }
        if run % 2 == 1 {
            copy(place, &load, run, &mut runs)?;
        }
    }
    Ok(runs)
}

/// Adds memcpys of a run, alone and with the load beside them.
fn copy(place: &mut Place, load: &Load, run: usize, runs: &mut Runs) -> Result<(), Stop> {
    runs.copies.push(memcpys(place, run)?);
    runs.beside.push(beside_memcpy(place, load, &runs.copies)?);
    Ok(())
}

/// Times memcpys of the region, without load.
fn memcpys(place: &Place, run: usize) -> Result<Copies, Stop> {
    stop_if_received(place)?;
    let target = place.memory.target()?;
    let copies = target.copy_by_all_methods(run, &|| interrupt::received().is_some());
    stop_if_received(place)?;
    // The copies are missing only after a signal, and then the line above has returned.
    copies.ok_or_else(|| anyhow!("the memcpy was interrupted").into())
}

/// Runs the load beside memcpys; `None` without a load.
fn beside_memcpy(
    place: &mut Place,
    load: &Load,
    copies: &[Copies],
) -> Result<Option<BesideMemcpy>, Stop> {
    let method = match (load.work, BaseLine::of(copies)) {
        (Work::Rest, _) | (_, None) => return Ok(None),
        (_, Some(base_line)) => base_line.method(),
    };
    let Place { memory, shadow } = &mut *place;
    let (target, words) = (memory.target()?, memory.words()?);
    let (per_s, log) = run_beside(load, words, shadow, |beside| {
        beside.stage.enter(Phase::Memcpy);
        let (start, before) = (Instant::now(), beside.completed());
        while start.elapsed() < BESIDE_TIME && interrupt::received().is_none() {
            target.copy(method);
        }
        let writes = beside.completed() - before;
        Ok::<_, Stop>(writes as f64 / start.elapsed().as_secs_f64())
    })?;
    drop(target);
    stop_if_received(place)?;
    Ok(Some(BesideMemcpy { per_s, log }))
}

/// One leap to the destination.
fn leap(
    args: &EnginesArgs,
    place: &mut Place,
    load: &Load,
    engine: &EngineRow,
) -> Result<Sample, Stop> {
    stop_if_received(place)?;
    let Place { memory, shadow } = &mut *place;
    let Leap { start, populate_ns } = memory.leap(args, engine)?;
    let sample = Sample::take(memory.words()?, start, load, shadow, cancel_if_interrupted)?;
    let sample = Sample { populate_ns, ..sample };
    stop_if_received(place)?;
    if sample.lost > 0 {
        // Accepts the wrong words, so that the next leap is not blamed for them.
        let Place { memory, shadow } = place;
        shadow.accept(memory.words()?);
    } else {
        leap::check_complete(&sample.leap.report, place.memory.pages())?;
    }
    Ok(sample)
}

/// Moves the memory to where it started, unmeasured.
fn back(place: &Place) -> Result<(), Stop> {
    let job = place.memory.back()?;
    leap::finish(&job, cancel_if_interrupted);
    let report = job.wait();
    stop_if_received(place)?;
    if !report.ended.is_completed() {
        return Err(anyhow!("the way back did not complete: {report}").into());
    }
    Ok(())
}

fn cancel_if_interrupted(_: &Job) -> Wish {
    if interrupt::received().is_some() { Wish::Cancel } else { Wish::GoOn }
}

/// The message about lost writes.
pub fn mismatch(lost: u64) -> String {
    format!("mismatch: {lost} words do not contain the last value written to them")
}

/// Ends the run if a signal has arrived. The message tells only whether writes were lost.
fn stop_if_received(place: &Place) -> Result<(), Stop> {
    if interrupt::received().is_none() {
        return Ok(());
    }
    match place.shadow.lost(place.memory.words()?) {
        0 => {
            interrupt::stop_if_received(|| "the region is whole, and no write was lost".to_owned())
        }
        lost => Err(anyhow!("{}", mismatch(lost)).into()),
    }
}
