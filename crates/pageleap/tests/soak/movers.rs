//! The actors that move pages: threads that start jobs and stop some of them, one with regions of
//! its own, and one that makes calls of the library fail.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use pageleap::{
    BASE_PAGE, Ended, EngineChoice, Error, Job, Migration, Pool, Region, Report, WarningKind,
};

use crate::actors::Part;
use crate::common::{Place, check_stamp, is_zero, places_in, rest, stamp, surprises};
use crate::round::Room;
use crate::scene::{Field, Scene};
use crate::watch::{Count, count};

/// A running job, and what the test knows of it.
struct Under<'a> {
    job: Job,
    engine: EngineChoice,
    ranges: Vec<(&'a Field, Range<usize>)>,
    /// The frames of its ranges before the start. `None` if another actor may move them.
    before: Option<Vec<Option<Place>>>,
    cancelled: bool,
}

/// Starts jobs over parts of all regions, and stops some of them.
pub fn start_jobs(mut part: Part, mover: usize) {
    let scene = part.scene;
    let mut recycling: Option<Under> = None;
    loop {
        let ranges = some_ranges(&mut part, mover);
        let before = frames_of(scene, &ranges);
        let to = &scene.pools[part.random.below(scene.pools.len() as u64) as usize];
        let (engine, job) = a_migration(&mut part, &ranges, to);
        match job.start() {
            Ok(job) => {
                let mut under = Under { job, engine, ranges, before, cancelled: false };
                match part.random.below(8) {
                    0 => {
                        part.pause(5000);
                        under.job.cancel();
                        under.cancelled = true;
                        conclude(scene, under);
                    }
                    1 => {
                        part.pause(2000);
                        count(Count::Dropped, 1);
                        // Its report, which is lost, may have said that attributes were lost.
                        scene.attributes_lost.fetch_or(scene.injected.is_some(), Relaxed);
                        drop(under);
                    }
                    // The next job begins while this one recycles frames.
                    2 => {
                        under.job.wait_until_moved();
                        // Before its report is read, another job may move the pages.
                        under.before = None;
                        recycling
                            .replace(under)
                            .into_iter()
                            .for_each(|under| conclude(scene, under));
                    }
                    _ => conclude(scene, under),
                }
            }
            Err(error) => {
                check_refusal(scene, &error);
                rest();
            }
        }
        if !part.goes_on() {
            break;
        }
    }
    recycling.into_iter().for_each(|under| conclude(scene, under));
}

/// Random parts of one or several regions. Unless movers roam, the parts are the mover's own.
fn some_ranges<'a>(part: &mut Part<'a>, mover: usize) -> Vec<(&'a Field, Range<usize>)> {
    let scene = part.scene;
    let (round, page) = (&scene.round, scene.round.kind.page.bytes());
    let pages = round.region_pages;
    let share = |number| pages * number / round.movers;
    let own = if round.roaming { 0..pages } else { share(mover)..share(mover + 1) };
    let mut ranges = Vec::new();
    for field in &scene.fields {
        if part.random.below(3) == 0 {
            continue;
        }
        let all = part.random.below(2) == 0;
        let below = |part: &mut Part, pages: usize| part.random.below(pages as u64) as usize;
        let first = if all { own.start } else { own.start + below(part, own.len()) };
        let last = if all { own.end } else { first + 1 + below(part, own.end - first) };
        ranges.push((field, first * page..last * page));
    }
    if ranges.is_empty() {
        ranges.push((part.field(), own.start * page..own.end * page));
    }
    ranges
}

/// A migration with random settings, and its engine.
fn a_migration<'a>(
    part: &mut Part<'a>,
    ranges: &[(&'a Field, Range<usize>)],
    to: &Pool,
) -> (EngineChoice, Migration<'a>) {
    let round = &part.scene.round;
    let (page, random) = (round.kind.page.bytes(), &mut part.random);
    let engine = round.kind.engines[random.below(round.kind.engines.len() as u64) as usize];
    let mut job = Migration::new()
        .engine(engine)
        .reduction_factor(1 + random.below(4))
        .max_disturbed_copies(random.below(5) as u32)
        .max_rounds(random.below(5) as u32)
        .threads(1 + random.below(2) as usize)
        .pin_patience(Duration::from_millis([0, 2, 50][random.below(3) as usize]));
    for (field, range) in ranges {
        job = job.range(&field.region, range.clone(), to);
    }
    if random.below(2) == 0 {
        job = job.area_bytes((BASE_PAGE << random.below(12)).next_multiple_of(page));
    }
    if random.below(6) == 0 {
        job = job.timeout(Duration::from_micros(1 + random.below(20_000)));
    }
    if random.below(4) == 0 {
        let budgets = [Duration::from_nanos(1), Duration::from_micros(100), Duration::MAX];
        job = job.wait_budget(budgets[random.below(3) as usize]);
    }
    if random.below(8) == 0 {
        job = job.rate_limit((100 << 20) << random.below(4));
    }
    (engine, job)
}

/// The frames of ranges. `None` if another actor may move them.
fn frames_of(scene: &Scene, ranges: &[(&Field, Range<usize>)]) -> Option<Vec<Option<Place>>> {
    if scene.round.roaming {
        return None;
    }
    let page = scene.round.kind.page.bytes();
    let of = |(field, range): &(&Field, Range<usize>)| {
        places_in(field.address() + range.start..field.address() + range.end, page)
    };
    Some(ranges.iter().flat_map(of).collect())
}

/// Waits for a job, and checks its report and its effects.
fn conclude(scene: &Scene, under: Under) {
    let Under { job, engine, ranges, before, cancelled } = under;
    let report = job.wait();
    let pages: usize =
        ranges.iter().map(|(_, range)| range.len() / scene.round.kind.page.bytes()).sum();
    let done = report.pages;
    assert_eq!(done.total(), pages as u64, "{report}");
    count(Count::Leaps, 1);
    count(Count::Megabytes, report.bytes_copied >> 20);
    assert!(engine.forced().is_none_or(|forced| report.engine == forced), "{report}");
    let faults = scene.injected.is_some();
    if report.warnings.iter().any(|warning| warning.kind == WarningKind::Attributes) {
        assert!(faults, "{report}");
        scene.attributes_lost.store(true, Relaxed);
    }
    match &report.ended {
        Ended::Completed => assert_eq!(done.migrated + done.unchanged, done.total(), "{report}"),
        Ended::Cancelled if cancelled => count(Count::Cancelled, 1),
        Ended::TimedOut => count(Count::TimedOut, 1),
        Ended::Failed(Error::Pinned { .. }) if scene.round.guards => count(Count::Kept, done.busy),
        Ended::Failed(_) if faults => count(Count::Failed, done.failed),
        _ => panic!("{report}"),
    }
    assert!(faults || done.failed == 0 && surprises(&report).is_empty(), "{report}");
    check_frames(scene, &ranges, before, &report);
}

/// Checks that all frames have changed if all pages have migrated.
fn check_frames(
    scene: &Scene,
    ranges: &[(&Field, Range<usize>)],
    before: Option<Vec<Option<Place>>>,
    report: &Report,
) {
    if report.pages.migrated < report.pages.total() {
        return;
    }
    if let (Some(before), Some(now)) = (before, frames_of(scene, ranges)) {
        let kept = before.iter().zip(&now).filter(|(then, now)| then == now).count();
        assert_eq!(kept, 0, "frames did not change: {report}");
    }
}

/// Checks that there was a reason to refuse a job or a region.
fn check_refusal(scene: &Scene, error: &Error) {
    count(Count::Refused, 1);
    let expected = match error {
        Error::PoolExhausted { .. } => scene.round.room != Room::Plenty,
        Error::RangeBusy { .. } => scene.round.roaming,
        _ => false,
    };
    assert!(expected || scene.injected.is_some(), "refused: {error}");
}

/// Makes regions of its own, applies all operations to them, and drops each during a job.
pub fn be_a_tenant(mut part: Part) {
    let scene = part.scene;
    while part.goes_on() {
        if let Err(error) = one_tenancy(&mut part) {
            check_refusal(scene, &error);
            rest();
        }
        count(Count::Tenants, 1);
        part.pause(2000);
    }
}

/// The life of one region. An error is a refusal.
fn one_tenancy(part: &mut Part) -> Result<(), Error> {
    let (scene, seed) = (part.scene, part.random.next());
    let (page, bytes) = (scene.round.kind.page, scene.round.tenant_bytes());
    let pages = bytes / page.bytes();
    let a_pool =
        |part: &mut Part| &scene.pools[part.random.below(scene.pools.len() as u64) as usize];
    let mut region = Region::reserve_with(scene.backend.clone(), bytes, page)?;
    region.grow(bytes / 2 / page.bytes() * page.bytes(), a_pool(part))?;
    stamp(&region, 0..region.len(), seed);
    let first = region.len();
    region.grow(bytes, a_pool(part))?;
    assert!(is_zero(&region, first..bytes), "a region has grown by the data of another owner");
    stamp(&region, 0..bytes, seed);
    let a_job = |part: &mut Part, region: &Region| {
        let engines = &scene.round.kind.engines;
        let engine = engines[part.random.below(engines.len() as u64) as usize];
        Migration::new().engine(engine).range(region, 0..bytes, a_pool(part)).start()
    };
    let job = a_job(part, &region)?;
    check_stamp(&region, 0..bytes, seed);
    job.wait_until_moved();

    // A part of the moved pages is discarded, while the job may still recycle frames.
    let cut = part.random.below(pages as u64) as usize;
    let gone = cut * page.bytes()
        ..(cut + 1 + part.random.below((pages - cut) as u64) as usize) * page.bytes();
    region.discard(gone.clone())?;
    check_stamp(&region, 0..gone.start, seed);
    check_stamp(&region, gone.end..bytes, seed);
    region.back(gone.clone(), a_pool(part))?;
    assert!(is_zero(&region, gone.clone()), "the data of another owner");
    stamp(&region, gone, seed);
    let report = job.wait();
    assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");

    let job = a_job(part, &region)?;
    part.pause(1000);
    if part.random.below(2) == 0 {
        check_stamp(&region, 0..bytes, seed);
    }
    drop(region);
    let report = job.wait();
    assert!(matches!(report.ended, Ended::Completed | Ended::RegionDropped), "{report}");
    Ok(())
}

/// Makes calls of the library fail, in bursts. The pauses between the bursts let the library finish
/// what it repeats until it succeeds.
pub fn falsify(mut part: Part) {
    const PAUSE: Duration = Duration::from_millis(20);
    let injected = part.scene.injected.as_ref().expect("there are faults in this round");
    let faults = part.scene.round.faults.expect("there are faults in this round");
    while part.goes_on() {
        // Only ENOMEM may come after an effect. The library relies on that: a call that the kernel
        // forbids or does not know has none.
        if faults.errno.0 == libc::ENOMEM && part.random.below(2) == 0 {
            injected.fail_late();
        } else {
            injected.refuse(1 + part.random.below(faults.burst));
        }
        std::thread::sleep(PAUSE);
        part.pause(20_000);
    }
    injected.stop();
}
