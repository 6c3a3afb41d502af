//! Several jobs, regions and pools at the same time. Ranges change places among pools under
//! writers, with cancellations and time-outs at any point. Pages of a region lie alternately in two
//! pools. Leaps begin before the previous one has recycled its frames.

mod common;
#[path = "common/counting.rs"]
mod counting;
#[path = "common/gate.rs"]
mod gate;
#[path = "common/load.rs"]
mod load;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::{
    Random, StopOnDrop, address, check_stamp, each_place_once, engines, engines_for,
    for_page_sizes, nodes, places, pool_mappings, pools, stamp, surprises, turn,
};
use counting::counting;
use gate::Gate;
use load::word_of;
use pageleap::backend::{Backend, Call, Model};
use pageleap::{BASE_PAGE, Ended, Engine, Migration, PageSize, Pool, Region, Report, audit};
use refusing::{Refusing, Request};

/// Writes rising values to random words of an owner, until stopped. Returns the last value of each
/// word.
fn write(region: &Region, owner: usize, writers: usize, stop: &AtomicBool) -> Vec<u64> {
    let words = region.atomics_u64(0..region.len()).unwrap();
    let mut random = Random::new(owner as u64 + 1);
    let mut last = vec![0; words.len()];
    let mut value = 0;
    while !stop.load(Relaxed) {
        let at = word_of(&mut random, words.len(), writers, owner, 0);
        value += 1;
        words[at].store(value, Relaxed);
        last[at] = value;
    }
    last
}

/// Checks that each word has the last value that its owner has written.
fn check_written(region: &Region, last: &[Vec<u64>]) {
    let words = region.atomics_u64(0..region.len()).unwrap();
    let lost =
        words.iter().enumerate().filter(|(i, word)| word.load(Relaxed) != last[i % last.len()][*i]);
    assert_eq!(lost.count(), 0, "LOST writes");
}

/// Runs `body` while two threads write to each region. Afterwards no write must be lost.
fn under_writers(regions: &[Region], body: impl FnOnce()) {
    const WRITERS: usize = 2;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop_all = StopOnDrop(&stop);
        let mut writers = Vec::new();
        for region in regions {
            let stop = &stop;
            let of_region =
                (0..WRITERS).map(|owner| scope.spawn(move || write(region, owner, WRITERS, stop)));
            writers.push(of_region.collect::<Vec<_>>());
        }
        body();
        drop(stop_all);
        for (region, writers) in regions.iter().zip(writers) {
            let last: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
            check_written(region, &last);
        }
    });
}

/// Runs a job with random settings. The job may be stopped at any point.
fn random_job(random: &mut Random, parts: &[(&Region, Range<usize>)], to: &Pool) -> Report {
    let mut job = Migration::new()
        .engine(engines()[random.below(engines().len() as u64) as usize])
        .area_bytes(4096 << random.below(8))
        .max_disturbed_copies(random.below(4) as u32)
        .max_rounds(random.below(4) as u32)
        .threads(1 + random.below(2) as usize);
    for (region, range) in parts {
        job = job.range(region, range.clone(), to);
    }
    if random.below(4) == 0 {
        job = job.timeout(Duration::from_micros(1 + random.below(3000)));
    }
    let job = job.start().unwrap();
    match random.below(4) {
        0 => {
            std::thread::sleep(Duration::from_micros(random.below(2000)));
            job.cancel();
        }
        1 => job.wait_until_moved(),
        _ => {}
    }
    let report = job.wait();
    assert!(surprises(&report).is_empty() && report.pages.failed == 0, "{report}");
    match report.ended {
        Ended::Completed => {
            assert_eq!(report.pages.busy + report.pages.not_attempted, 0, "{report}")
        }
        Ended::Cancelled | Ended::TimedOut => {}
        ref other => panic!("{other:?}"),
    }
    report
}

#[test]
fn parts_of_regions_change_places_under_writers() {
    const PART: usize = 512 << 10;
    const PARTS: usize = 3;
    let _turn = turn();
    let bytes = PART * PARTS;
    // The third pool lies on the same node as the first one. Pages still move between them.
    let [first, second] = pools(PageSize::Base, 2 * bytes as u64).unwrap();
    let third = Pool::builder(first.nodes()[0], 2 * bytes as u64).build().unwrap();
    let pools = [first, second, third];
    let regions = [0, 1].map(|pool: usize| Region::new(&pools[pool], bytes).unwrap());
    let moved = AtomicU64::new(0);
    under_writers(&regions, || {
        std::thread::scope(|scope| {
            for part in 0..PARTS {
                let (pools, regions, moved) = (&pools, &regions, &moved);
                scope.spawn(move || {
                    let mut random = Random::new(part as u64 + 77);
                    for _ in 0..8 * common::stress_seconds() {
                        let range = part * PART..(part + 1) * PART;
                        // The whole range, or every second piece of it.
                        let pieces = 1 + random.below(4) as usize;
                        let piece = |n: usize| range.start + n * PART / pieces / 4096 * 4096;
                        let mut ranges = Vec::new();
                        for n in (0..pieces).filter(|n| pieces == 1 || n % 2 == 0) {
                            ranges.extend(
                                regions.iter().map(|region| (region, piece(n)..piece(n + 1))),
                            );
                        }
                        let to = &pools[random.below(3) as usize];
                        moved.fetch_add(
                            random_job(&mut random, &ranges, to).pages.migrated,
                            Relaxed,
                        );
                    }
                });
            }
        });
    });
    assert!(moved.load(Relaxed) > 0);
    each_place_once(&regions.each_ref().map(places).concat());
    audit(&pools.each_ref(), &regions.each_ref()).unwrap();
    // The next job completes what the stopped ones have left.
    for region in &regions {
        let job = Migration::new().range(region, 0..bytes, &pools[2]).start().unwrap().wait();
        assert!(job.ended.is_completed(), "{job}");
    }
    assert_eq!(pools[2].free_bytes(), 0);
    audit(&pools.each_ref(), &regions.each_ref()).unwrap();
}

#[test]
fn a_checkered_region_leaps_whole() {
    const PAGES: usize = 12;
    let _turn = turn();
    for_page_sizes("a_checkered_region_leaps_whole", PAGES, |pools| {
        let page = pools[0].page_size().bytes();
        for (round, engine) in
            engines_for(pools[0].page_size()).into_iter().cycle().take(6).enumerate()
        {
            let region = Region::new(&pools[0], PAGES * page).unwrap();
            let mappings = pool_mappings().len();
            let to = |pool: usize| {
                let all =
                    Migration::new().engine(engine).range(&region, 0..PAGES * page, &pools[pool]);
                let report = all.start().unwrap().wait();
                assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
                report.pages
            };
            stamp(&region, 0..PAGES * page, 7);
            let mut checker = Migration::new().engine(engine).area_bytes(page);
            for at in (1..PAGES).step_by(2) {
                checker = checker.range(&region, at * page..(at + 1) * page, &pools[1]);
            }
            let report = checker.start().unwrap().wait();
            assert_eq!(report.pages.migrated, PAGES as u64 / 2, "{report}");
            // To one of the pools, where half of the pages are already; then all to the other one.
            let pages = to(round % 2);
            assert_eq!((pages.migrated, pages.unchanged), (PAGES as u64 / 2, PAGES as u64 / 2));
            assert_eq!(to(1 - round % 2).migrated, PAGES as u64);
            check_stamp(&region, 0..PAGES * page, 7);
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
            to(0);
            let huge = region.mapped_pages().unwrap().huge_mapped_ratio;
            assert_eq!(
                huge,
                if page > 4096 { 1.0 } else { 0.0 },
                "huge pages arrive huge, followed or not"
            );
            let now = pool_mappings();
            assert!(now.len() <= mappings, "{mappings} mappings before:\n{}", now.join("\n"));
            check_stamp(&region, 0..PAGES * page, 7);
        }
    });
}

#[test]
fn a_leap_back_begins_while_frames_are_recycled() {
    let _turn = turn();
    let bytes = 16 << 20;
    // Once with enough free frames, and once with no other frames than those being recycled. How
    // soon a thread runs is chance, and so is whether two leaps overlap. The next test forces it.
    for pool_bytes in [2 * bytes, bytes] {
        let pools = pools(PageSize::Base, pool_bytes as u64).unwrap();
        let regions = [Region::new(&pools[0], bytes).unwrap()];
        let region = &regions[0];
        under_writers(&regions, || {
            let mut last = None;
            for round in 1..=8 {
                let job = Migration::new().engine(engines()[round / 2 % engines().len()]);
                let job = job.range(region, 0..bytes, &pools[round % 2]).start().unwrap();
                let before: Option<pageleap::Job> = last.replace(job);
                // The previous job has moved all its pages, or this one could not have begun.
                if let Some(job) = before {
                    let report = job.wait();
                    assert!(report.ended.is_completed(), "{report}");
                    assert_eq!(report.pages.migrated, (bytes / 4096) as u64, "{report}");
                }
                last.as_ref().unwrap().wait_until_moved();
            }
            assert!(last.unwrap().wait().ended.is_completed());
        });
        audit(&[&pools[0], &pools[1]], &[region]).unwrap();
        assert_eq!(pools[0].free_bytes() + pools[1].free_bytes(), (2 * pool_bytes - bytes) as u64);
    }
}

/// While one job is held in its recycling, a second job moves the pages back and is done. On the
/// model, because every engine works there.
#[test]
fn a_leap_back_is_done_before_frames_are_recycled() {
    const PAGES: usize = 8;
    let _turn = turn();
    let bytes = PAGES * BASE_PAGE;
    let model = Arc::new(Model::new());
    let (gate, of_region) = (Arc::new(Gate::default()), Arc::new(OnceLock::<Range<usize>>::new()));
    let (held, addresses) = (gate.clone(), of_region.clone());
    let rule = move |request: &Request| {
        // An attempt ends the tracking of the region's pages, and recycling that of an alias.
        let of_alias = |region: &Range<usize>| !region.contains(&request.addr);
        if request.call == Call::Untrack && addresses.get().is_some_and(of_alias) {
            held.pass();
        }
        None
    };
    let backend: Arc<dyn Backend> = Arc::new(Refusing::new(model.clone(), rule));
    let build = |node| Pool::builder(node, 2 * bytes as u64).backend(backend.clone()).build();
    let pools = nodes().map(|node| build(node).unwrap());
    let region = Region::new(&pools[0], bytes).unwrap();
    of_region.get_or_init(|| address(&region)..address(&region) + bytes);
    let words: Vec<usize> = (0..PAGES).map(|page| address(&region) + page * BASE_PAGE).collect();
    words.iter().for_each(|word| model.store(*word, *word as u64).unwrap());
    let start = |to| {
        let job = Migration::new().engine(Engine::Precopy).range(&region, 0..bytes, to);
        job.start().unwrap()
    };
    let there = start(&pools[1]);
    there.wait_until_moved();
    gate.wait_until_reached();
    let back = start(&pools[0]);
    back.wait_until_moved();
    assert!(!there.is_finished(), "the leap back waited for frames to be recycled");
    gate.open();
    for report in [there.wait(), back.wait()] {
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
    }
    assert!(words.iter().all(|word| model.load(*word) == Ok(*word as u64)), "LOST a page");
    audit(&pools.each_ref(), &[&region]).unwrap();
    assert_eq!(pools.iter().map(Pool::free_bytes).sum::<u64>(), 3 * bytes as u64);
}

/// How many more mappings there are while a worker moves an area: it cuts the area out of the
/// region and of two aliases, and each cut has two ends.
const OF_AN_AREA: usize = 6;

/// The mappings of a job do not become more with its areas: each attempt leaves mappings that the
/// kernel joins with their neighbours.
#[test]
fn a_job_of_many_areas_takes_few_mappings() {
    const AREAS: usize = 256;
    let _turn = turn();
    let bytes = AREAS * (16 << 10);
    let (counting, backend) = counting();
    let build = |node| Pool::builder(node, bytes as u64).backend(backend.clone()).build().unwrap();
    let pools = nodes().map(build);
    let region = Region::new(&pools[0], bytes).unwrap();
    stamp(&region, 0..bytes, 3);
    let before = pool_mappings().len();
    let engines = Engine::ALL.into_iter().filter(|engine| common::works((*engine).into()));
    // With the attributes of a new region, with those that an alias has, and with one that keeps
    // page tables from being exchanged.
    let ways = [libc::MADV_DODUMP, libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE]
        .into_iter()
        .flat_map(|advice| engines.clone().map(move |engine| (advice, engine)));
    for (leap, (advice, engine)) in ways.enumerate() {
        // SAFETY: the region's own memory. The advice changes no contents.
        let advised = unsafe { libc::madvise(region.as_ptr().as_ptr().cast(), bytes, advice) };
        assert_eq!(advised, 0, "{}", std::io::Error::last_os_error());
        let to = &pools[(leap + 1) % 2];
        let job = Migration::new().engine(engine).area_bytes(bytes / AREAS).threads(1);
        counting.take_peak();
        let report = job.range(&region, 0..bytes, to).start().unwrap().wait();
        let most = counting.take_peak();
        assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
        assert_eq!(report.engine, engine);
        assert!(report.windows.count >= AREAS as u64, "{report}");
        assert!(
            most <= before + OF_AN_AREA,
            "{engine}: {before} mappings before, {most} at a time"
        );
        assert_eq!(pool_mappings().len(), before, "{engine}: mappings are left");
        check_stamp(&region, 0..bytes, 3);
    }
}

/// Writes to huge pages are tracked by base page. Otherwise each store would cost a copy of 2 MB.
#[test]
fn stores_to_huge_pages_cost_base_pages_and_no_mappings() {
    const NAME: &str = "stores_to_huge_pages_cost_base_pages_and_no_mappings";
    const WORKERS: usize = 2;
    let _turn = turn();
    let bytes = 128 << 20;
    let (counting, backend) = counting();
    let build = |node| {
        let pool = Pool::builder(node, bytes as u64).page_size(PageSize::Thp);
        pool.backend(backend.clone()).build()
    };
    let [near, far] = nodes();
    let pools = match build(near).and_then(|pool| Ok([pool, build(far)?])) {
        Ok(pools) => pools,
        Err(error) => return common::skip_page_size(NAME, PageSize::Thp, error),
    };
    if !common::can_follow() {
        return common::skip(NAME, &"the engine precopy does not work here");
    }
    let region = Region::new(&pools[0], bytes).unwrap();
    let before = pool_mappings().len();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            // One word in each huge page.
            let words = region.atomics_u64(0..bytes).unwrap();
            while !stop.load(Relaxed) {
                words.iter().step_by((2 << 20) / 8).for_each(|word| {
                    word.fetch_add(1, Relaxed);
                });
            }
        });
        for round in 0..1 + common::stress_seconds() as usize {
            let job = Migration::new().engine(Engine::Precopy).area_bytes(2 << 20);
            let job = job.range(&region, 0..bytes, &pools[(round + 1) % 2]).threads(WORKERS);
            counting.take_peak();
            let report = job.start().unwrap().wait();
            let most = counting.take_peak();
            assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
            // A page is copied again at most five times.
            let pages = (bytes / (2 << 20)) as u64;
            assert!(report.bytes_recopied <= 6 * 4096 * pages, "{report}");
            assert!(
                most <= before + WORKERS * OF_AN_AREA,
                "{before} mappings before, {most} at a time: those of areas do not join"
            );
            assert_eq!(pool_mappings().len(), before, "mappings are left");
        }
    });
}

/// A region can be made of frames that a job is about to give back: it waits for them.
#[test]
fn regions_are_made_of_frames_that_are_being_recycled() {
    let _turn = turn();
    let bytes = 16 << 20;
    let pools = pools(PageSize::Base, bytes as u64).unwrap();
    for round in 0..6 {
        let region = Region::new(&pools[0], bytes).unwrap();
        stamp(&region, 0..bytes, round);
        let job = Migration::new().engine(engines()[round as usize % engines().len()]).range(
            &region,
            0..bytes,
            &pools[1],
        );
        let job = job.start().unwrap();
        job.wait_until_moved();
        let fresh = Region::new(&pools[0], bytes).unwrap();
        assert!(common::is_zero(&fresh, 0..bytes), "a recycled frame kept its contents");
        check_stamp(&region, 0..bytes, round);
        assert!(job.wait().ended.is_completed());
        audit(&[&pools[0], &pools[1]], &[&region, &fresh]).unwrap();
    }
}
