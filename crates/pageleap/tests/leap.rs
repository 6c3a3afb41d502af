//! What a leap does, seen from outside: contents, frames, placement, outcomes and mappings, and
//! what is left when pools and regions are dropped.

mod common;
#[path = "leap/discarding.rs"]
mod discarding;
#[path = "leap/jobs.rs"]
mod jobs;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use common::{
    Place, StopOnDrop, address, check_stamp, each_place_once, for_page_sizes, is_zero, leap,
    migration, own_descriptors, places, pool_mappings, pools, region_flags, skip, soon, stamp,
    turn,
};
use pageleap::pool::HugePageReservation;
use pageleap::{
    BASE_PAGE, Error, Job, Migration, PageOutcome, PageSize, Pool, Region, Source, audit,
};

/// The number of mappings that a region consists of.
fn region_mappings(region: &Region) -> usize {
    let start = address(region);
    let inside = |line: &String| {
        let from = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        (start..start + region.len()).contains(&from)
    };
    pool_mappings().into_iter().filter(inside).count()
}

/// Checks that exactly the pages for which `moved` is true have other frames than `before`.
fn check_places(region: &Region, before: &[Option<Place>], moved: impl Fn(usize) -> bool) {
    let now = places(region);
    assert_eq!(before.len(), now.len());
    for (page, (then, now)) in before.iter().zip(&now).enumerate() {
        assert_eq!(then != now, moved(page), "page {page}: {then:?} before, {now:?} now");
    }
    each_place_once(&now);
}

#[test]
fn contents_stay_and_frames_change() {
    let _turn = turn();
    for_page_sizes("contents_stay_and_frames_change", 8, |pools| {
        let [near, far] = &pools;
        let page = near.page_size().bytes();
        let region = Region::new(near, 8 * page).unwrap();
        assert_eq!((region.len(), region.page_size()), (8 * page, near.page_size()));
        stamp(&region, 0..8 * page, 1);
        let (address, before) = (region.as_ptr(), places(&region));
        let (mappings, flags) = (pool_mappings().len(), region_flags(&region));

        let report = leap(&region, 0..8 * page, far);

        check_stamp(&region, 0..8 * page, 1);
        check_places(&region, &before, |_| true);
        assert!(places(&region).iter().all(Option::is_some), "a page has no frame");
        assert_eq!(region.as_ptr(), address);
        assert_eq!((report.pages.migrated, report.pages.total()), (8, 8));
        assert_eq!(
            (report.bytes, report.bytes_copied, report.bytes_recopied),
            (report.bytes, report.bytes, 0)
        );
        let [run] = &report.runs[..] else { panic!("{:?}", report.runs) };
        assert_eq!((run.source, run.range.clone()), (Source::Region(region.id()), 0..8 * page));
        assert_eq!(run.reason, None);
        assert_eq!(run.outcome, PageOutcome::Migrated);
        // A page that the kernel is migrating by itself has no node for a moment.
        let placed = || {
            let counts = region.placement().unwrap();
            (counts.on(far.nodes()[0]), counts.absent()) == (8, 0)
        };
        assert!(soon(placed), "{}", region.placement().unwrap());
        assert_eq!(region_mappings(&region), 1);
        assert!(pool_mappings().len() <= mappings, "{}", pool_mappings().join("\n"));
        assert_eq!(region_flags(&region), flags);
        assert_eq!((near.free_bytes(), far.free_bytes()), (near.bytes(), 0));
        let mapped = region.mapped_pages().unwrap();
        assert_eq!(
            mapped.kernel_page_size,
            if near.page_size().is_hugetlb() { page } else { BASE_PAGE }
        );
        assert_eq!(mapped.huge_mapped_ratio, if page > BASE_PAGE { 1.0 } else { 0.0 });
        audit(&[near, far], &[&region]).unwrap();
    });
}

/// The pools are larger than the region. So the aliases of moved frames have neighbours whose
/// frames never moved, and must be joined with them again.
#[test]
fn a_round_trip_leaves_as_many_mappings_as_before() {
    let _turn = turn();
    for_page_sizes("a_round_trip_leaves_as_many_mappings_as_before", 12, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, 8 * page).unwrap();
        let before = pool_mappings();
        for _ in 0..3 {
            leap(&region, 0..8 * page, &far);
            leap(&region, 0..8 * page, &near);
        }
        let now = pool_mappings();
        assert_eq!(
            now.len(),
            before.len(),
            "before:\n{}\nnow:\n{}",
            before.join("\n"),
            now.join("\n")
        );
    });
}

#[test]
fn a_report_says_how_many_mappings_pages_have_added_that_left_their_neighbours() {
    let _turn = turn();
    let pools = pools(PageSize::Base, 64 << 12).unwrap();
    let region = Region::new(&pools[0], 64 << 12).unwrap();
    let leap = |pages: &[Range<usize>], to: usize| {
        let before = region_mappings(&region) as i64;
        let mut job = Migration::new();
        for page in pages {
            job = job.range(&region, page.start * BASE_PAGE..page.end * BASE_PAGE, &pools[to]);
        }
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(
            report.counts.mappings_added,
            region_mappings(&region) as i64 - before,
            "{report}"
        );
        let named = report.to_string().contains("more mapping(s)");
        assert_eq!(named, report.counts.mappings_added > 0, "{report}");
        report.counts.mappings_added
    };
    let isolated: Vec<_> = (0..20).map(|at| 3 * at + 1..3 * at + 2).collect();
    assert_eq!(leap(&isolated, 1), 40);
    assert_eq!(leap(&isolated[..10], 0), -20);
    assert_eq!(leap(std::slice::from_ref(&(8..16)), 1), 2);
    assert_eq!(leap(std::slice::from_ref(&(0..64)), 0), -22);
}

#[test]
fn leaping_back_and_forth_ends_where_it_should() {
    let _turn = turn();
    for_page_sizes("leaping_back_and_forth_ends_where_it_should", 8, |pools| {
        let page = pools[0].page_size().bytes();
        let region = Region::new(&pools[0], 8 * page).unwrap();
        for round in 0..24 {
            stamp(&region, 0..8 * page, round);
            let to = &pools[(round as usize + 1) % 2];
            let report = Migration::new()
                .range(&region, 0..8 * page, to)
                .area_bytes(page << (round % 5))
                .threads(1 + round as usize % 3)
                .start()
                .unwrap()
                .wait();
            assert_eq!((report.ended.is_completed(), report.pages.migrated), (true, 8), "{report}");
            check_stamp(&region, 0..8 * page, round);
            assert_eq!(to.free_bytes(), 0);
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
        }
    });
}

/// For example, a buffer pool has addresses for more pages than it has memory.
#[test]
fn a_region_may_have_memory_here_and_there() {
    let _turn = turn();
    for_page_sizes("a_region_may_have_memory_here_and_there", 4, |[near, far]| {
        let page = near.page_size().bytes();
        let mut region = Region::reserve(16 * page, near.page_size()).unwrap();
        region.extend(12 * page).unwrap();
        region.extend(3 * page).unwrap();
        assert_eq!(region.len(), 12 * page);
        assert!(region.atomics_u64(0..8).is_err(), "it has no memory yet");
        let resident = |region: &Region| {
            (0..12).filter(|i| region.atomics_u64(i * page..i * page + 8).is_ok()).count()
        };
        for at in [11, 0, 5] {
            region.back(at * page..(at + 1) * page, &near).unwrap();
            stamp(&region, at * page..(at + 1) * page, 3);
        }
        let report = Migration::new().range(&region, 0..12 * page, &far).start().unwrap().wait();
        assert_eq!((report.pages.migrated, report.pages.unchanged), (3, 9), "{report}");
        check_stamp(&region, 5 * page..6 * page, 3);
        assert_eq!((resident(&region), near.free_bytes()), (3, 4 * page as u64));
        region.discard(5 * page..6 * page).unwrap();
        region.grow(13 * page, &near).unwrap();
        check_stamp(&region, 11 * page..12 * page, 3);
        assert_eq!((resident(&region), region.len()), (2, 13 * page));
        audit(&[&near, &far], &[&region]).unwrap();
    });
}

#[test]
fn threads_that_make_a_region_longer_do_so_one_after_the_other() {
    let _turn = turn();
    let [near, _] = pools(PageSize::Base, 64 * BASE_PAGE as u64).unwrap();
    for _ in 0..50 {
        let region = Region::reserve(64 * BASE_PAGE, PageSize::Base).unwrap();
        std::thread::scope(|scope| {
            for part in 1..=8 {
                let (region, near) = (&region, &near);
                scope.spawn(move || region.grow(part * 8 * BASE_PAGE, near).unwrap());
            }
        });
        assert_eq!((region.len(), near.free_bytes()), (64 * BASE_PAGE, 0));
        assert!(is_zero(&region, 0..region.len()));
    }
}

#[test]
fn scattered_ranges_of_one_job_have_their_own_outcomes() {
    let _turn = turn();
    for_page_sizes("scattered_ranges_of_one_job_have_their_own_outcomes", 12, |[near, far]| {
        let page = near.page_size().bytes();
        let bytes = |pages: Range<usize>| pages.start * page..pages.end * page;
        let mut region = Region::new(&near, 12 * page).unwrap();
        region.discard(bytes(9..10)).unwrap();
        leap(&region, bytes(4..5), &far);
        let parts = [0..9, 10..12];
        parts.iter().for_each(|part| stamp(&region, bytes(part.clone()), 5));
        let before = places(&region);

        // The order of the ranges is not the order of their addresses.
        let ranges = [10..11, 1..2, 3..6, 8..10];
        let mut job = Migration::new().area_bytes(2 * page);
        for range in ranges {
            job = job.range(&region, bytes(range), &far);
        }
        let report = job.start().unwrap().wait();

        use PageOutcome::{Migrated, Unchanged};
        let outcomes: Vec<_> =
            report.runs.iter().map(|run| (run.range.clone(), run.outcome)).collect();
        let expected = [
            (bytes(10..11), Migrated),
            (bytes(1..2), Migrated),
            (bytes(3..4), Migrated),
            (bytes(4..5), Unchanged), // at its destination already
            (bytes(5..6), Migrated),
            (bytes(8..9), Migrated),
            (bytes(9..10), Unchanged), // unbacked
        ];
        assert_eq!(outcomes, expected);
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!((report.pages.migrated, report.pages.unchanged), (5, 2));
        assert_eq!(report.bytes_copied, 5 * page as u64);
        let moved = |p: usize| [1, 3, 5, 8, 10].contains(&p);
        check_places(&region, &before, moved);
        parts.iter().for_each(|part| check_stamp(&region, bytes(part.clone()), 5));
        assert_eq!(near.free_bytes(), (near.bytes() / page as u64 - 5) * page as u64);
        audit(&[&near, &far], &[&region]).unwrap();
    });
}

#[test]
fn pages_that_are_there_already_are_not_touched() {
    let _turn = turn();
    for_page_sizes("pages_that_are_there_already_are_not_touched", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, 8 * page).unwrap();
        leap(&region, 0..8 * page, &far);
        stamp(&region, 0..8 * page, 2);
        let before = places(&region);
        let job = migration(&region, 0..8 * page, &far).start().unwrap();
        assert_eq!(job.progress().bytes_total, 0);
        let report = job.wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!((report.pages.unchanged, report.pages.total(), report.bytes_copied), (8, 8, 0));
        check_places(&region, &before, |_| false);
        check_stamp(&region, 0..8 * page, 2);
    });
}

#[test]
fn unbacked_parts_stay_unbacked() {
    let _turn = turn();
    for_page_sizes("unbacked_parts_stay_unbacked", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let mut region = Region::new(&near, 8 * page).unwrap();
        stamp(&region, 0..8 * page, 3);
        region.discard(2 * page..5 * page).unwrap();
        assert_eq!(near.free_bytes(), 3 * page as u64);
        let report = leap(&region, 0..8 * page, &far);
        assert_eq!((report.pages.migrated, report.pages.unchanged), (5, 3));
        assert_eq!(far.free_bytes(), 3 * page as u64, "an unbacked page took a frame");
        let error = region.atomics_u64(page..3 * page).unwrap_err();
        assert!(
            matches!(error, Error::BadRange { reason, .. } if reason.contains("unbacked")),
            "{error}"
        );
        let flags = region_flags(&region);
        assert_eq!(flags.len(), 3, "{flags:?}");
        assert!(flags[1].1.starts_with("---p"), "{flags:?}");
        check_stamp(&region, 0..2 * page, 3);
        check_stamp(&region, 5 * page..8 * page, 3);

        // A range of unbacked pages alone is a valid job.
        let report = leap(&region, 2 * page..5 * page, &near);
        assert_eq!((report.pages.unchanged, report.pages.total()), (3, 3));
        audit(&[&near, &far], &[&region]).unwrap();
    });
}

#[test]
fn frames_come_back_zeroed() {
    let _turn = turn();
    for_page_sizes("frames_come_back_zeroed", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let all = 0..8 * page;
        let mut region = Region::new(&near, 8 * page).unwrap();
        assert!(is_zero(&region, all.clone()));
        stamp(&region, all.clone(), 7);

        // Frames that a leap has vacated.
        leap(&region, all.clone(), &far);
        let second = Region::new(&near, 8 * page).unwrap();
        assert!(is_zero(&second, all.clone()), "a vacated frame kept its contents");
        stamp(&second, all.clone(), 8);
        drop(second);

        // Frames of a dropped region.
        let third = Region::new(&near, 8 * page).unwrap();
        assert!(is_zero(&third, all.clone()), "a frame of a dropped region kept its contents");
        drop(third);

        // Frames of discarded pages, which an exchange of page tables had brought in.
        region.discard(all.clone()).unwrap();
        assert_eq!(far.free_bytes(), far.bytes());
        region.back(all.clone(), &far).unwrap();
        assert!(is_zero(&region, all.clone()), "a discarded frame kept its contents");

        // Frames of a job that has moved nothing into them.
        stamp(&region, all.clone(), 9);
        let report = migration(&region, all.clone(), &near)
            .timeout(Duration::from_nanos(1))
            .start()
            .unwrap()
            .wait();
        assert_eq!(report.pages.not_attempted, 8, "{report}");
        let fourth = Region::new(&near, 8 * page).unwrap();
        assert!(is_zero(&fourth, all.clone()), "a frame of a stopped job is not zero");
        audit(&[&near, &far], &[&region, &fourth]).unwrap();
    });
}

#[test]
fn a_region_grows_at_its_address_from_several_pools() {
    let _turn = turn();
    for_page_sizes("a_region_grows_at_its_address_from_several_pools", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let mut region = Region::reserve(10 * page, near.page_size()).unwrap();
        assert!(region.is_empty());
        let address = region.as_ptr();
        region.grow(3 * page - 1, &near).unwrap();
        assert_eq!(region.len(), 3 * page, "rounded up to whole pages");
        stamp(&region, 0..3 * page, 1);
        region.grow(page, &near).unwrap();
        assert_eq!(region.len(), 3 * page, "never shrinks");
        region.grow(10 * page, &far).unwrap();
        assert!(is_zero(&region, 3 * page..10 * page));
        check_stamp(&region, 0..3 * page, 1);
        stamp(&region, 3 * page..10 * page, 2);
        let backed = || region.placement().unwrap().iter().map(|(_, pages)| pages).sum::<u64>();
        assert!(soon(|| backed() == 10), "{} pages have a node", backed());

        let error = region.back(page..2 * page, &near).unwrap_err();
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
        region.discard(page..4 * page).unwrap();
        region.back(2 * page..4 * page, &near).unwrap();
        region.back(page..2 * page, &far).unwrap();
        assert!(is_zero(&region, page..4 * page));
        check_stamp(&region, 4 * page..10 * page, 2);
        assert_eq!(region.as_ptr(), address);

        let report = leap(&region, 0..8 * page, &near);
        assert_eq!((report.pages.migrated, report.pages.unchanged), (5, 3), "{report}");
        check_stamp(&region, 4 * page..10 * page, 2);
        audit(&[&near, &far], &[&region]).unwrap();
    });
}

#[test]
fn jobs_on_disjoint_ranges_run_at_the_same_time() {
    let _turn = turn();
    const PART: usize = 2 << 20;
    let pools = pools(PageSize::Base, 4 * PART as u64).unwrap();
    let region = Region::new(&pools[0], 4 * PART).unwrap();
    let stop = AtomicBool::new(false);
    let ready = Barrier::new(3);
    let words = region.atomics_u64(0..4 * PART).unwrap();
    std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for owner in 0..2 {
            let (stop, ready) = (&stop, &ready);
            writers.push(scope.spawn(move || {
                ready.wait();
                let mut round = 0;
                while !stop.load(Relaxed) {
                    round += 1;
                    words.iter().skip(owner).step_by(512).for_each(|w| w.store(round, Relaxed));
                }
                round
            }));
        }
        let _stop = StopOnDrop(&stop);
        ready.wait();
        for round in 0..6 {
            let to = &pools[(round + 1) % 2];
            let jobs: Vec<Job> = (0..4)
                .map(|part| long_part(&region, part * PART..(part + 1) * PART, to).start().unwrap())
                .collect();
            for job in jobs {
                let report = job.wait();
                assert!(report.ended.is_completed(), "{report}");
                assert_eq!(report.pages.migrated, (PART / 4096) as u64, "{report}");
            }
            assert_eq!(to.free_bytes(), 0);
        }
        stop.store(true, Relaxed);
        for (owner, writer) in writers.into_iter().enumerate() {
            let last = writer.join().unwrap();
            let lost =
                words.iter().skip(owner).step_by(512).filter(|w| w.load(Relaxed) != last).count();
            assert_eq!(lost, 0, "LOST {lost} writes of writer {owner}");
        }
    });
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

fn long_part<'a>(region: &'a Region, range: Range<usize>, to: &Pool) -> Migration<'a> {
    Migration::new().range(region, range, to).area_bytes(64 << 10)
}

#[test]
fn one_job_moves_several_regions_to_several_pools() {
    let _turn = turn();
    for_page_sizes("one_job_moves_several_regions_to_several_pools", 12, |[near, far]| {
        let page = near.page_size().bytes();
        let first = Region::new(&near, 4 * page).unwrap();
        let second = Region::new(&near, 3 * page).unwrap();
        let third = Region::new(&far, 4 * page).unwrap();
        for (region, seed) in [(&first, 1), (&second, 2), (&third, 3)] {
            stamp(region, 0..region.len(), seed);
        }
        let report = Migration::new()
            .range(&first, 0..4 * page, &far)
            .range(&third, page..4 * page, &near)
            .range(&second, 2 * page..3 * page, &far)
            .threads(2)
            .area_bytes(page)
            .start()
            .unwrap()
            .wait();
        assert!(report.ended.is_completed(), "{report}");
        let runs: Vec<_> = report
            .runs
            .iter()
            .map(|r| (r.source.region().unwrap(), r.range.len(), r.outcome))
            .collect();
        let moved = PageOutcome::Migrated;
        let expected = [
            (first.id(), 4 * page, moved),
            (third.id(), 3 * page, moved),
            (second.id(), page, moved),
        ];
        assert_eq!(runs, expected);
        for (region, seed) in [(&first, 1), (&second, 2), (&third, 3)] {
            check_stamp(region, 0..region.len(), seed);
        }
        assert_eq!((near.free_bytes(), far.free_bytes()), (7 * page as u64, 6 * page as u64));
        audit(&[&near, &far], &[&first, &second, &third]).unwrap();
    });
}

#[test]
fn nothing_is_left_when_pools_and_regions_are_gone() {
    let _turn = turn();
    for_page_sizes("nothing_is_left_when_pools_and_regions_are_gone", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, 8 * page).unwrap();
        stamp(&region, 0..8 * page, 1);
        assert_eq!(own_descriptors().len(), 2, "{:?}", own_descriptors());
        let job = migration(&region, 0..8 * page, &far).start().unwrap();
        let open = own_descriptors();
        let of = |kind: &str| open.iter().filter(|name| name.contains(kind)).count();
        assert_eq!(of("memfd"), 2, "{open:?}");
        // One tracker follows writes, and one holds up who touches an area that is closed first.
        assert!((1..=2).contains(&of("pipe:")) && of("userfaultfd") <= 2, "{open:?}");
        drop(job.wait());
        assert_eq!(own_descriptors().len(), 2, "{:?}", own_descriptors());
        drop((near, far));
        // The region keeps its pool.
        check_stamp(&region, 0..8 * page, 1);
        assert_eq!(own_descriptors().len(), 1, "{:?}", own_descriptors());
        drop(region);
        assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]));
    });
    assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]));
}

/// The test reserves the pages that it needs, and gives them back. A machine that has run for a
/// while may have no free gigabyte in one piece: then the test is skipped.
#[test]
fn pages_of_a_gigabyte_leap_under_a_writer() {
    const NAME: &str = "pages_of_a_gigabyte_leap_under_a_writer";
    let _turn = turn();
    let page = PageSize::Huge1G;
    let nodes = pools(PageSize::Base, BASE_PAGE as u64).unwrap().map(|pool| pool.nodes()[0]);
    let mut reservations = Vec::new();
    let wanted = if nodes[0] == nodes[1] {
        vec![(nodes[0], 2)]
    } else {
        nodes.map(|node| (node, 1)).to_vec()
    };
    for (node, pages) in wanted {
        match HugePageReservation::reserve(node, page, pages) {
            Ok(reservation) => reservations.push(reservation),
            Err(error) => return skip(NAME, &error),
        }
    }
    let [near, far] = match pools(page, page.bytes() as u64) {
        Ok(pools) => pools,
        Err(error) => return common::skip_page_size(NAME, page, error),
    };
    let all = 0..page.bytes();
    let region = Region::new(&near, all.end).unwrap();
    let before = places(&region);
    let words = region.atomics_u64(all.clone()).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut value = 0;
            while !stop.load(Relaxed) {
                words[value as usize * 4099 % words.len()].store(value, Relaxed);
                value += 1;
                written.store(value, Relaxed);
            }
        });
        assert!(soon(|| written.load(Relaxed) > 0));
        for (to, frames_changed) in [(&far, true), (&near, false), (&far, true)] {
            let report = Migration::new().range(&region, all.clone(), to).start().unwrap().wait();
            assert!(report.ended.is_completed() && report.pages.migrated == 1, "{report}");
            assert!(region.verify().unwrap().is_right() && near.verify().unwrap().is_right());
            // The first pool has one frame, to which the page comes back.
            assert_eq!(places(&region) != before, frames_changed);
        }
    });
    let written = written.load(Relaxed);
    for value in written.saturating_sub(words.len() as u64)..written {
        assert_eq!(
            words[value as usize * 4099 % words.len()].load(Relaxed),
            value,
            "LOST: write {value}"
        );
    }
    let mapped = region.mapped_pages().unwrap();
    assert_eq!((mapped.kernel_page_size, mapped.huge_mapped_ratio), (page.bytes(), 1.0));
    audit(&[&near, &far], &[&region]).unwrap();
}
