//! Impossible requests are refused with an error that says what was wrong and what to do. A refused
//! request changes nothing.

mod common;

use std::ops::Range;
use std::time::Duration;

use common::{
    address, check_stamp, for_page_sizes, is_zero, leap, migration, pool_mappings, pools, skip,
    stamp, turn,
};
use pageleap::topology::Topology;
use pageleap::{Engine, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, audit};

const PAGES: usize = 8;

/// A job with this patience for guards does not end by itself during a test.
const FOR_EVER: Duration = Duration::from_secs(600);

/// Two pools, and a region with known contents over the first one.
struct Scene {
    pools: [Pool; 2],
    region: Region,
    /// Free bytes of the pools at the start.
    free: [u64; 2],
    /// Mappings of pools at the start.
    mappings: Vec<String>,
}

impl Scene {
    fn new(pools: [Pool; 2]) -> Scene {
        let region = Region::new(&pools[0], PAGES * pools[0].page_size().bytes()).unwrap();
        stamp(&region, 0..region.len(), 1);
        let free = [pools[0].free_bytes(), pools[1].free_bytes()];
        Scene { pools, region, free, mappings: pool_mappings() }
    }

    /// A scene of base pages.
    fn base() -> Scene {
        Scene::new(pools(PageSize::Base, (PAGES * 4096) as u64).unwrap())
    }

    fn page(&self) -> usize {
        self.region.page_size().bytes()
    }

    /// A valid migration, for tests to make invalid.
    fn job(&self) -> Migration<'_> {
        migration(&self.region, 0..self.region.len(), &self.pools[1])
    }

    /// Checks that the error contains all of `words` and a remedy, and that nothing has changed.
    /// `usage` says whether the caller is at fault.
    fn refused<T>(&self, result: Result<T, Error>, usage: bool, words: &[&str]) -> Error {
        let Err(error) = result else { panic!("{words:?} was not refused") };
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
        assert_eq!(error.is_usage(), usage, "{text}");
        assert!(text.contains(';'), "no remedy: {text}");
        assert_eq!([self.pools[0].free_bytes(), self.pools[1].free_bytes()], self.free, "{text}");
        assert_eq!(pool_mappings().len(), self.mappings.len(), "{text}");
        audit(&[&self.pools[0], &self.pools[1]], &[&self.region]).unwrap();
        check_stamp(&self.region, 0..self.region.len(), 1);
        error
    }

    /// Checks that a valid job succeeds after the refusals.
    fn still_works(&self) {
        for to in [&self.pools[1], &self.pools[0]] {
            assert_eq!(leap(&self.region, 0..self.region.len(), to).pages.migrated, PAGES as u64);
        }
        check_stamp(&self.region, 0..self.region.len(), 1);
    }
}

#[test]
#[allow(clippy::reversed_empty_ranges)] // one of the invalid ranges
fn invalid_ranges_are_refused() {
    let _turn = turn();
    for_page_sizes("invalid_ranges_are_refused", PAGES, |pools| {
        let mut scene = Scene::new(pools);
        let (page, len) = (scene.page(), scene.region.len());
        let bad: [(Range<usize>, &str); 9] = [
            (0..0, "empty"),
            (2 * page..2 * page, "empty"),
            (3 * page..page, "empty"),
            (1..page, "aligned"),
            (0..page + 64, "aligned"),
            (0..len + page, "not inside"),
            (len..len + page, "not inside"),
            (0..usize::MAX & !(page - 1), "not inside"),
            (len - page..len + page, "not inside"),
        ];
        for (range, reason) in bad {
            let job = migration(&scene.region, range.clone(), &scene.pools[1]).start();
            let shown =
                [format!("{:#x}..{:#x}", range.start, range.end), format!("{len:#x} bytes")];
            let words = [reason, "bad range", &shown[0], &shown[1]];
            let error = scene.refused(job, true, &words);
            let Error::BadRange { start, end, region_start, region_len, .. } = error else {
                panic!("{error:?}")
            };
            assert_eq!((start..end, region_len), (range.clone(), len));
            assert_eq!(region_start, address(&scene.region));
            let backed = scene.region.back(range.clone(), &scene.pools[1]);
            scene.refused(backed, true, &["bad range"]);
            let discarded = scene.region.discard(range.clone());
            scene.refused(discarded, true, &[reason, "bad range"]);
            // The job has taken frames for its first, valid range. They must come back.
            if range.start != 0 {
                let job = scene.job().range(&scene.region, range, &scene.pools[1]);
                let Err(_) = job.start() else { panic!("not refused") };
                assert_eq!(scene.pools[1].free_bytes(), scene.free[1]);
            }
        }
        scene.still_works();
    });
}

#[test]
#[allow(clippy::reversed_empty_ranges)]
fn invalid_views_are_refused() {
    let _turn = turn();
    let mut scene = Scene::base();
    let len = scene.region.len();
    for range in [0..len + 8, len + 8..len + 8, 16..8, 0..usize::MAX] {
        scene.refused(
            scene.region.atomics_u64(range.clone()),
            true,
            &["not inside the region", "0 to its length"],
        );
        // SAFETY: no other thread accesses the region.
        let bytes = unsafe { scene.region.atomics_u8(range) };
        scene.refused(bytes, true, &["not inside"]);
    }
    for range in [0..4, 4..12, 8..13] {
        scene.refused(scene.region.atomics_u64(range), true, &["aligned to the element"]);
    }
    // SAFETY: no other thread accesses the region.
    assert_eq!(unsafe { scene.region.atomics_u32(4..12) }.unwrap().len(), 2);
    assert_eq!(scene.region.atomics_u64(len..len).unwrap().len(), 0);
    scene.region.discard(0..4096).unwrap();
    let error = scene.region.atomics_u64(0..8).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("unbacked"), "{error}");
    assert!(scene.region.atomics_u64(4096..len).is_ok());
}

#[test]
fn invalid_settings_are_refused() {
    let _turn = turn();
    let scene = Scene::base();
    scene.refused(Migration::new().start(), true, &["names no range", "at least one"]);
    scene.refused(scene.job().threads(0).start(), true, &["threads", "0", "1 to 64"]);
    scene.refused(scene.job().threads(65).start(), true, &["threads", "65", "1 to 64"]);
    scene.refused(scene.job().timeout(Duration::ZERO).start(), true, &["timeout", "0 s"]);
    scene.refused(scene.job().area_bytes(0).start(), true, &["area size", "0 bytes", "multiple"]);
    scene.refused(scene.job().area_bytes(4097).start(), true, &["area size", "4097", "multiple"]);
    scene.refused(scene.job().reduction_factor(0).start(), true, &["reduction factor", "1"]);
    let engine = "move_pages".parse::<EngineChoice>();
    let all = EngineChoice::ALL.map(|choice| choice.to_string()).join(", ");
    scene.refused(engine, true, &["engine", "`move_pages`", "use auto, precopy", &all]);
    scene.refused("3m".parse::<PageSize>(), true, &["page size", "`3m`", "use 4k, thp, 2m or 1g"]);
    scene.still_works();
}

#[test]
fn extreme_but_valid_settings_work() {
    let _turn = turn();
    let scene = Scene::base();
    let all = 0..scene.region.len();
    let back = |report: pageleap::Report| {
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
        leap(&scene.region, all.clone(), &scene.pools[0]);
    };
    back(scene.job().threads(64).start().unwrap().wait());
    back(scene.job().area_bytes(usize::MAX & !4095).start().unwrap().wait());
    back(
        scene
            .job()
            .reduction_factor(u64::MAX)
            .max_disturbed_copies(u32::MAX)
            .max_rounds(u32::MAX)
            .start()
            .unwrap()
            .wait(),
    );
    back(scene.job().engine(Engine::Mprotect).max_disturbed_copies(0).start().unwrap().wait());
    for copies in [0, u32::MAX] {
        back(scene.job().max_disturbed_copies(copies).max_rounds(copies).start().unwrap().wait());
    }
    back(scene.job().timeout(Duration::from_secs(u64::from(u32::MAX))).start().unwrap().wait());
    check_stamp(&scene.region, all, 1);
}

/// `Duration::MAX` is how many people write "no timeout".
#[test]
fn the_longest_timeout_never_expires() {
    let _turn = turn();
    let scene = Scene::base();
    let report = scene.job().timeout(Duration::MAX).start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
}

#[test]
fn overlapping_ranges_of_one_job_are_refused() {
    let _turn = turn();
    for_page_sizes("overlapping_ranges_of_one_job_are_refused", PAGES, |pools| {
        let scene = Scene::new(pools);
        let page = scene.page();
        let to = || &scene.pools[1];
        for (first, second) in [(0..4, 3..5), (2..3, 2..3), (4..6, 0..8), (0..8, 7..8)] {
            let bytes = |pages: &Range<usize>| pages.start * page..pages.end * page;
            let job = Migration::new().range(&scene.region, bytes(&first), to());
            let job = job.range(&scene.region, bytes(&second), to()).start();
            let shown = format!("{:#x}..{:#x}", second.start * page, second.end * page);
            let error = scene.refused(job, false, &[&shown]);
            assert!(matches!(error, Error::RangeBusy { .. }), "{error:?}");
        }
        // Adjacent ranges do not overlap.
        let job = Migration::new().range(&scene.region, 0..4 * page, to());
        let report = job.range(&scene.region, 4 * page..8 * page, to()).start().unwrap().wait();
        assert_eq!(report.pages.migrated, 8, "{report}");
    });
}

#[test]
fn ranges_of_a_running_job_are_refused() {
    let _turn = turn();
    const LONG: usize = 1 << 20;
    let [near, far] = pools(PageSize::Base, LONG as u64 + 4096).unwrap();
    let region = Region::reserve(LONG + 8192, PageSize::Base).unwrap();
    region.grow(LONG, &near).unwrap();
    let guard = region.pin(0..1).unwrap();
    let job = migration(&region, 0..LONG, &far).pin_patience(FOR_EVER).threads(1).start().unwrap();
    for range in [0..4096, LONG - 4096..LONG, 0..LONG, 8192..65536] {
        let error = migration(&region, range.clone(), &near).start().map(drop).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::RangeBusy { start, end } if (start..end) == range),
            "{text}"
        );
        assert!(text.contains(&format!("{:#x}..{:#x}", range.start, range.end)), "{text}");
        assert!(
            text.contains("running job") && text.contains("wait for the job or cancel it"),
            "{text}"
        );
    }
    // Pages outside the job's range are free.
    region.grow(LONG + 4096, &near).unwrap();
    assert!(!job.is_finished());
    drop(guard);
    assert!(job.wait().ended.is_completed());
    assert!(is_zero(&region, 0..LONG + 4096));
    leap(&region, 0..LONG, &near);
    audit(&[&near, &far], &[&region]).unwrap();
}

#[test]
fn more_threads_than_free_slots_are_refused() {
    let _turn = turn();
    const LONG: usize = 1 << 20;
    let [near, far] = pools(PageSize::Base, LONG as u64 + 4096).unwrap();
    let (long, short) = (Region::new(&near, LONG).unwrap(), Region::new(&near, 4096).unwrap());
    let guard = long.pin(0..1).unwrap();
    let first = migration(&long, 0..LONG, &far).area_bytes(4096).threads(40);
    let job = first.pin_patience(FOR_EVER).start().unwrap();
    let error = migration(&short, 0..4096, &far).threads(40).start().map(drop).unwrap_err();
    let free = far.free_bytes();
    assert!(matches!(error, Error::Limit { limit: 64, .. }), "{error:?}");
    assert!(!error.is_usage() && error.to_string().contains("threads"), "{error}");
    assert_eq!(free, 4096, "the refused job kept its frames");
    let report = migration(&short, 0..4096, &far).threads(24).start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    assert!(!job.is_finished());
    drop(guard);
    assert!(job.wait().ended.is_completed());
    audit(&[&near, &far], &[&long, &short]).unwrap();
}

#[test]
fn a_pool_that_is_too_small_is_refused() {
    let _turn = turn();
    for_page_sizes("a_pool_that_is_too_small_is_refused", PAGES, |pools| {
        let scene = Scene::new(pools);
        let page = scene.page();
        let small = Pool::builder(scene.pools[0].nodes()[0], 3 * page as u64);
        let small = match small.page_size(scene.region.page_size()).build() {
            Ok(pool) => pool,
            Err(error) => return skip("a_pool_that_is_too_small_is_refused (huge pages)", &error),
        };
        let scene = Scene { mappings: pool_mappings(), ..scene };
        let all = 0..scene.region.len();
        let job = migration(&scene.region, all.clone(), &small).start();
        let node = small.nodes()[0].to_string();
        let error = scene.refused(job, false, &["are needed", &node, "make the pool larger"]);
        let Error::PoolExhausted { free_bytes, pool_bytes, needed_bytes, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!(
            (free_bytes, pool_bytes, needed_bytes),
            (3 * page as u64, 3 * page as u64, all.len() as u64)
        );
        // Three pages fit. One more, in another range, does not.
        let job = migration(&scene.region, 0..3 * page, &small);
        let job = job.range(&scene.region, 4 * page..5 * page, &small).start();
        let error = scene.refused(job, false, &["are needed"]);
        let Error::PoolExhausted { free_bytes, needed_bytes, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!((free_bytes, needed_bytes), (3 * page as u64, 4 * page as u64));
        assert_eq!(small.free_bytes(), small.bytes());
        leap(&scene.region, 5 * page..8 * page, &small);
        leap(&scene.region, all, &scene.pools[0]);
        let scene = Scene { mappings: pool_mappings(), ..scene };

        let region = Region::new(&small, 4 * page);
        scene.refused(region, false, &["are needed"]);
        let region = Region::reserve(8 * page, scene.region.page_size()).unwrap();
        region.grow(2 * page, &small).unwrap();
        let scene = Scene { mappings: pool_mappings(), ..scene };
        let grown = region.grow(4 * page, &small);
        scene.refused(grown, false, &["are needed"]);
        assert_eq!(region.len(), 2 * page);
        assert!(is_zero(&region, 0..2 * page));
        region.grow(3 * page, &small).unwrap();
        audit(&[&small], &[&region]).unwrap();
    });
}

#[test]
fn unknown_nodes_are_refused() {
    let _turn = turn();
    let scene = Scene::base();
    let known = Topology::read().unwrap().nodes()[0].id.0.to_string();
    for node in [999, 1023, 1024, u32::MAX] {
        let pool = Pool::builder(NodeId(node), 4096).build().map(drop);
        let Err(error) = &pool else { panic!("node {node} exists") };
        let text = error.to_string();
        assert!(matches!(error, Error::UnknownNode { .. }) && error.is_usage(), "{text}");
        assert!(text.contains(&format!("node {node}")) && text.contains(&known), "{text}");
    }
    scene.still_works();
}

#[test]
fn impossible_sizes_are_refused() {
    let _turn = turn();
    let scene = Scene::base();
    let node = scene.pools[0].nodes()[0];
    for page in [PageSize::Base, PageSize::Huge2M] {
        let build = |bytes| Pool::builder(node, bytes).page_size(page).build();
        scene.refused(build(0), true, &["pool size", "0 bytes"]);
        scene.refused(build((1 << 46) + 1), true, &["pool size", "2^46"]);
        scene.refused(build(u64::MAX), true, &["pool size", "2^46"]);
        let error = scene.refused(build(1 << 45), false, &["32 TiB more are needed"]);
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
        for bytes in [0, 1 << 60, usize::MAX] {
            scene.refused(
                Region::reserve(bytes, page),
                true,
                &["region size", &bytes.to_string(), "2^46"],
            );
        }
    }
    scene.refused(Pool::builder(node, 4096).threads(0).build(), true, &["threads", "at least 1"]);
    scene.refused(Region::new(&scene.pools[1], 1 << 60), true, &["region size"]);
    scene.refused(Region::new(&scene.pools[1], 0), true, &["region size"]);
    scene.refused(Region::new(&scene.pools[1], 1 << 40), false, &["are needed"]);
    let capacity = scene.region.grow(scene.region.len() + 1, &scene.pools[1]);
    scene.refused(capacity, true, &["beyond the region's capacity", "larger region"]);
    scene.refused(scene.region.grow(usize::MAX, &scene.pools[1]), true, &["beyond"]);
    scene.refused(scene.region.extend(scene.region.len() + 1), true, &["beyond"]);
    // The library allows this size. The kernel refuses it if no process can address so much.
    match Region::reserve(1 << 46, PageSize::Base) {
        Ok(region) => assert!(region.is_empty()),
        Err(error) => drop(scene.refused(Err::<(), _>(error), false, &["mmap", "ENOMEM"])),
    }
    // Reserved address space takes no memory.
    drop(Region::reserve(1 << 40, PageSize::Base).unwrap());
    scene.still_works();
}

#[test]
fn more_huge_pages_than_are_free_are_refused() {
    let _turn = turn();
    let scene = Scene::base();
    let topology = Topology::read().unwrap();
    let node = topology.nodes().iter().find(|n| n.total_bytes > 0).unwrap();
    let pages = node.free_huge(2 << 20) + 100;
    let pool = Pool::builder(node.id, pages * (2 << 20)).page_size(PageSize::Huge2M).build();
    let error = scene.refused(
        pool,
        false,
        &["2 MiB huge pages", "echo ", "nr_hugepages", &node.id.to_string()],
    );
    let Error::OutOfMemory { needed_bytes, .. } = error else { panic!("{error:?}") };
    assert_eq!(needed_bytes, pages * (2 << 20));
}

#[test]
fn mixed_page_sizes_are_refused() {
    let _turn = turn();
    let scene = Scene::base();
    let node = scene.pools[0].nodes()[0];
    let huge = match Pool::builder(node, 2 << 20).page_size(PageSize::Huge2M).build() {
        Ok(pool) => pool,
        Err(error) => return skip("mixed_page_sizes_are_refused", &error),
    };
    let scene = Scene { mappings: pool_mappings(), ..scene };
    let all = 0..scene.region.len();
    let job = migration(&scene.region, all.clone(), &huge).start();
    scene.refused(job, true, &["mix page sizes", "4k", "2m"]);
    let job = scene.job().range(&scene.region, 0..4096, &huge).start();
    scene.refused(job, true, &["mix page sizes"]);
    let region = Region::reserve(4 << 20, PageSize::Huge2M).unwrap();
    scene.refused(region.grow(2 << 20, &scene.pools[1]), true, &["4k", "2m"]);
    region.grow(2 << 20, &huge).unwrap();
    let scene = Scene { mappings: pool_mappings(), ..scene };
    let job = scene.job().range(&region, 0..2 << 20, &huge).start();
    scene.refused(job, true, &["mix page sizes"]);
    let job = migration(&region, 0..2 << 20, &huge).area_bytes(4096).start();
    scene.refused(job, true, &["area size", "4096"]);
    scene.refused(migration(&region, 0..4096, &huge).start(), true, &["aligned"]);
    scene.still_works();
}
