//! The measured part: a memcpy, the writer beside a memcpy, and leaps, in turns.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use pageleap::{BASE_PAGE, Migration, Pool, Region, Report, observe};

use super::args::{EngineRow, EnginesArgs, Load, Work};
use super::beside::{self, KERNEL_EVERY, KernelLog};
use super::place::Place;
use crate::leaping::{self, finished_within};
use crate::phase::{Phase, Stage, StopOnDrop, Times};
use crate::stop::Stop;
use crate::writer::{self, WriteLog};
use crate::{interrupt, progress};

/// How often the main thread looks at the signals, the mappings and the memory while a leap is
/// under way. Rarely, because to look at mappings holds up those who change them.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The writer runs at least so long before anything is measured beside it.
const WARM_UP: Duration = Duration::from_millis(10);
/// A writer so slow that it has not written by then is not waited for.
const LONGEST_WARM_UP: Duration = Duration::from_millis(200);
/// The writer's rate beside a memcpy is taken over at least this time, however small the region.
const BESIDE_TIME: Duration = Duration::from_millis(50);

/// In the values that are written, a writer's number begins at this bit: below it a bench counts
/// its writes, above it are marks.
const WRITER_SHIFT: u32 = 54;

/// What one leap showed.
pub struct Leap {
    /// What the library reports.
    pub report: Report,
    /// A memcpy of the same run.
    pub memcpy_ns: u64,
    /// Writes, or rounds, per second beside a memcpy of the same run; `None` without a load.
    pub beside_per_s: Option<f64>,
    /// The same from the start of the job to its end.
    pub during_per_s: Option<f64>,
    /// Gaps between the writer's batches.
    pub gaps: Times,
    /// Calls by which the kernel writes that failed with EFAULT or stopped short; `None` if it
    /// writes nothing.
    pub efaults: Option<u64>,
    /// First touch of all pages less a second one.
    pub first_touch_ns: i64,
    /// Mappings of region and pools before the leap, at most, and after it.
    pub mappings: [usize; 3],
    /// Anonymous memory at most, less that before; `None` if the leap was over before anybody
    /// looked.
    pub overhead_bytes: Option<u64>,
    /// Words that do not contain what was written to them last.
    pub lost: u64,
}

/// Measures all `engines` under one load, `args.runs` times in turns: the leaps of each engine.
pub fn measure(
    args: &EnginesArgs,
    place: &mut Place,
    load: Load,
    engines: &[EngineRow],
    steps: &progress::Steps,
) -> Result<Vec<Vec<Leap>>, Stop> {
    let mut leaps: Vec<Vec<Leap>> = engines.iter().map(|_| Vec::with_capacity(args.runs)).collect();
    for run in 0..args.runs {
        let (memcpy_ns, beside_per_s) = memcpys(args, place, load)?;
        for turn in 0..engines.len() {
            // Another engine comes first in each run, so that none has always the state that the
            // memcpy leaves.
            let at = (run + turn) % engines.len();
            let leap = leap(args, place, load, &engines[at], (memcpy_ns, beside_per_s))?;
            leaps[at].push(leap);
            back(place)?;
            steps.done();
        }
    }
    Ok(leaps)
}

/// Time of a memcpy of the region without load, and the writer's rate beside others.
fn memcpys(args: &EnginesArgs, place: &mut Place, load: Load) -> Result<(u64, Option<f64>), Stop> {
    // Drops its frames back into the pool, which has no others for the leap.
    let scratch = Region::new(&place.destination, place.region.len())?;
    let copy = |region: &Region| {
        let start = Instant::now();
        // SAFETY: both regions have so many bytes and do not overlap; nobody else knows the copy,
        // and nobody looks at it.
        unsafe { leaping::memcpy(scratch.as_ptr(), region.as_ptr(), region.len()) };
        start.elapsed()
    };
    stop_if_received(place)?;
    // The first one finds a new mapping.
    copy(&place.region);
    let memcpy_ns = copy(&place.region).as_nanos() as u64;
    stop_if_received(place)?;
    let (rate, _, _) = under_load(args, place, load, |region, _, _, completed| {
        let (start, before) = (Instant::now(), completed.load(Ordering::Relaxed));
        while start.elapsed() < BESIDE_TIME && interrupt::received().is_none() {
            copy(region);
            if load.work == Work::Rest {
                break;
            }
        }
        Ok((completed.load(Ordering::Relaxed) - before) as f64 / start.elapsed().as_secs_f64())
    })?;
    stop_if_received(place)?;
    Ok((memcpy_ns, (load.work != Work::Rest).then_some(rate)))
}

/// Does something while the load's threads run. They have ended when it returns: their gaps, and
/// how many of the kernel's writes failed.
fn under_load<T>(
    args: &EnginesArgs,
    place: &mut Place,
    load: Load,
    body: impl FnOnce(&Region, &Pool, &Stage, &AtomicU64) -> Result<T, Stop>,
) -> Result<(T, Times, Option<u64>), Stop> {
    let Place { region, destination, shadow, written, kernel_calls, .. } = place;
    let (stage, completed) = (Stage::new(), AtomicU64::new(0));
    if load.work == Work::Rest {
        return Ok((body(region, destination, &stage, &completed)?, Times::new(), None));
    }
    let words = region.atomics_u64(0..region.len())?;
    let mine = std::mem::take(shadow);
    let (result, log, kernel) = thread::scope(|scope| {
        let stop = StopOnDrop(&stage);
        let (stage, completed) = (&stage, &completed);
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        let mut workers = Vec::new();
        match load.work {
            Work::Write(rate, rows) => {
                let writers = args.writers_of(region.len() as u64);
                let (mut first, mut rest) = (0, mine);
                for writer in 0..writers {
                    let end = words.len() / KERNEL_EVERY * (writer + 1) / writers * KERNEL_EVERY;
                    let next = rest.split_off(end - first);
                    let (part, mine) = (&words[first..end], std::mem::replace(&mut rest, next));
                    first = end;
                    // Another seed for each writer, and all of them follow from the one given.
                    let seed = args.seed.wrapping_add(*written).wrapping_add(writer as u64);
                    let leaves_each = Some(KERNEL_EVERY);
                    let rate = rate.part(writer, writers);
                    // No two store the same value.
                    let written = *written | (writer as u64) << WRITER_SHIFT;
                    let load = writer::Load { rate, rows, seed, written, leaves_each };
                    workers.push(thread("writer").spawn_scoped(scope, move || {
                        writer::run(part, mine, load, stage, completed)
                    }));
                }
                for _ in 0..args.readers {
                    thread("reader")
                        .spawn_scoped(scope, move || beside::reader(words, stage))
                        .context("no thread for the load")?;
                }
            }
            Work::Map | Work::Rest => workers.push(
                thread("bystander")
                    .spawn_scoped(scope, move || beside::bystander(mine, stage, completed)),
            ),
        }
        let workers: Vec<_> =
            workers.into_iter().collect::<Result<_, _>>().context("no thread for the load")?;
        let before = *kernel_calls;
        let by_kernel = matches!(load.work, Work::Write(..)).then(|| {
            thread("kernel-writer")
                .spawn_scoped(scope, move || beside::kernel_writer(words, before, stage))
        });
        let by_kernel = by_kernel.transpose().context("no thread for the load")?;
        let start = Instant::now();
        while start.elapsed() < WARM_UP
            || completed.load(Ordering::Relaxed) == 0 && start.elapsed() < LONGEST_WARM_UP
        {
            thread::sleep(WARM_UP / 10);
        }
        let result = body(region, destination, stage, completed);
        drop(stop);
        let mut log = WriteLog::none(Vec::new());
        for worker in workers {
            let part = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            log.shadow.extend(part.shadow);
            log.writes += part.writes;
            log.gaps.join(&part.gaps);
        }
        let kernel = by_kernel
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok::<_, Stop>((result, log, kernel.transpose()?))
    })?;
    *shadow = log.shadow;
    if let Some(KernelLog { last, calls, .. }) = &kernel {
        for (page, value) in last.iter().enumerate().filter(|(_, value)| **value != 0) {
            shadow[page * KERNEL_EVERY + KERNEL_EVERY - 1] = *value;
        }
        *kernel_calls += calls;
    }
    if load.work != Work::Map {
        *written += log.writes;
    }
    Ok((result?, log.gaps, kernel.map(|log| log.efaults)))
}

/// One leap to the destination, with what is seen of it from outside.
fn leap(
    args: &EnginesArgs,
    place: &mut Place,
    load: Load,
    engine: &EngineRow,
    (memcpy_ns, beside_per_s): (u64, Option<f64>),
) -> Result<Leap, Stop> {
    stop_if_received(place)?;
    let mappings_before = observe::pool_mapping_count()?;
    let (watched, gaps, efaults) =
        under_load(args, place, load, |region, destination, stage, completed| {
            let mut migration = Migration::new()
                .range(region, 0..region.len(), destination)
                .engine(engine.choice)
                .threads(args.threads);
            if let Some(area) = engine.area {
                migration = migration.area_bytes(area);
            }
            let (mut mappings_peak, mut anonymous_peak) = (0, None);
            let anonymous_before = anonymous_bytes();
            let writes_before = completed.load(Ordering::Relaxed);
            stage.enter(Phase::During);
            let start = Instant::now();
            let job = migration.start()?;
            while !finished_within(&job, LOOK_EVERY) {
                mappings_peak = mappings_peak.max(observe::pool_mapping_count()?);
                anonymous_peak = anonymous_peak.max(anonymous_bytes());
                if interrupt::received().is_some() {
                    job.cancel();
                }
            }
            let elapsed = start.elapsed().as_secs_f64();
            stage.enter(Phase::After);
            let writes = completed.load(Ordering::Relaxed) - writes_before;
            let overhead = anonymous_peak
                .zip(anonymous_before)
                .map(|(peak, before)| peak.saturating_sub(before));
            Ok((job.wait(), writes as f64 / elapsed, mappings_peak, overhead))
        })?;
    let (report, per_s, mappings_peak, overhead_bytes) = watched;
    let first = touch(place)?;
    let first_touch_ns = first.as_nanos() as i64 - touch(place)?.as_nanos() as i64;
    let mappings_after = observe::pool_mapping_count()?;
    let lost = writer::lost(place.words()?, &place.shadow);
    stop_if_received(place)?;
    if lost > 0 {
        // The next leap is not to be blamed for it.
        place.shadow = place.words()?.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    }
    let pages = (place.region.len() / place.region.page_size().bytes()) as u64;
    if lost == 0 && (!report.ended.is_completed() || report.pages.migrated != pages) {
        return Err(anyhow!(
            "a leap did not move all of its {pages} pages, so its time says nothing: {report}"
        )
        .into());
    }
    Ok(Leap {
        report,
        memcpy_ns,
        beside_per_s,
        during_per_s: (load.work != Work::Rest).then_some(per_s),
        gaps,
        efaults,
        first_touch_ns,
        mappings: [
            mappings_before,
            mappings_peak.max(mappings_before).max(mappings_after),
            mappings_after,
        ],
        overhead_bytes,
        lost,
    })
}

/// Moves the region to where it started, unmeasured.
fn back(place: &Place) -> Result<(), Stop> {
    let region = &place.region;
    let job = Migration::new().range(region, 0..region.len(), &place.source).start()?;
    while !finished_within(&job, LOOK_EVERY) {
        if interrupt::received().is_some() {
            job.cancel();
        }
    }
    let report = job.wait();
    stop_if_received(place)?;
    if !report.ended.is_completed() {
        return Err(anyhow!("the way back did not complete: {report}").into());
    }
    Ok(())
}

/// Writes the first word of each base page, whatever the size of the region's pages: a huge page
/// that is mapped in pieces shows. The word keeps its value, and nobody else writes now.
fn touch(place: &Place) -> Result<Duration, Stop> {
    let words = place.words()?;
    let start = Instant::now();
    for word in words.iter().step_by(BASE_PAGE / size_of::<u64>()) {
        word.store(std::hint::black_box(word.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
    Ok(start.elapsed())
}

/// Anonymous memory of the process (RssAnon), to which regions and pools do not count; `None` if
/// the kernel hides it.
fn anonymous_bytes() -> Option<u64> {
    rss_anon(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn rss_anon(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// What is wrong when writes are lost.
pub fn mismatch(lost: u64) -> String {
    format!("mismatch: {lost} words do not contain the last value written to them")
}

/// Ends the run if a signal has asked for it, and says only what the shadow copy shows.
fn stop_if_received(place: &Place) -> Result<(), Stop> {
    if interrupt::received().is_none() {
        return Ok(());
    }
    match writer::lost(place.words()?, &place.shadow) {
        0 => {
            interrupt::stop_if_received(|| "the region is whole, and no write was lost".to_owned())
        }
        lost => Err(anyhow!("{}", mismatch(lost)).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_one_line_of_many() {
        let status = "VmRSS:\t 2048 kB\nRssAnon:\t     132 kB\nRssFile:\t    1900 kB\n";
        assert_eq!(rss_anon(status), Some(132 << 10));
        for status in ["", "RssAnon:\n", "RssAnon: many kB", "RssAnon: 5", "VmRSS: 5 kB"] {
            assert_eq!(rss_anon(status), None, "{status}");
        }
        assert!(anonymous_bytes().unwrap() > 0);
    }
}
