//! Placements: which pages go to which node, where page tables go, what verification notices, and
//! what a change of the cpuset does. Tests that need several nodes run on the model, the others on
//! the kernel.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use common::{
    End, become_nobody, case, check_stamp, is_root, leap, pools, run_case, skip, stamp, status_kb,
    surprises, turn,
};
use pageleap::backend::{Advice, Backend, Call, Errno, FailAt, FailMode, Linux, Model};
use pageleap::{
    Ended, EngineChoice, Error, Migration, NodeId, PageCounts, PageSize, PageTables, Placement,
    Pool, Region, Verification, WarningKind, audit,
};
use refusing::{Refusing, Request};

const PAGE: usize = 4096;
const PAGES: usize = 64;
const NODES: [NodeId; 3] = [NodeId(0), NodeId(3), NodeId(4)];

/// A pool over three nodes of a model, with `pages` pages on each.
fn model_pool(pages: usize) -> (Arc<Model>, Pool) {
    let model = Arc::new(Model::new());
    let bytes = (NODES.len() * pages * PAGE) as u64;
    let pages_in_turn = Placement::interleave(NODES).stripe_bytes(PAGE);
    let pool = Pool::builder(pages_in_turn, bytes).backend(model.clone()).build().unwrap();
    assert_eq!(pool.nodes(), NODES);
    assert!(NODES.iter().all(|node| pool.free_bytes_on(*node) == (pages * PAGE) as u64));
    (model, pool)
}

/// The address of a page of a region.
fn address(region: &Region, page: usize) -> usize {
    common::address(region) + page * PAGE
}

/// Writes its number into each page of a region of a model.
fn mark(model: &Model, region: &Region) {
    (0..region.len() / PAGE)
        .for_each(|page| model.store(address(region, page), page as u64 + 1).unwrap());
}

fn check_marks(model: &Model, region: &Region) {
    for page in 0..region.len() / PAGE {
        assert_eq!(model.load(address(region, page)), Ok(page as u64 + 1), "page {page}");
    }
}

fn go(region: &Region, to: impl Into<pageleap::Destination>) -> pageleap::Report {
    go_by(EngineChoice::Auto, region, to)
}

/// Moves a whole region by an engine.
fn go_by(
    engine: EngineChoice,
    region: &Region,
    to: impl Into<pageleap::Destination>,
) -> pageleap::Report {
    let job = Migration::new().range(region, 0..region.len(), to).area_bytes(4 * PAGE).threads(1);
    let report = job.engine(engine).start().unwrap().wait();
    assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
    report
}

/// How many pages of a region lie on each of [`NODES`]. Each must be where it belongs.
fn counts(region: &Region) -> [u64; 3] {
    let verified = region.verify().unwrap();
    assert!(verified.is_right(), "{verified}");
    NODES.map(|node| verified.found.on(node))
}

#[test]
fn a_region_is_spread_as_its_placement_says_and_leaps_to_another() {
    let (model, pool) = model_pool(2 * PAGES);
    let region = Region::new(&pool, PAGES * PAGE).unwrap();
    assert_eq!(counts(&region), [22, 21, 21], "a pool's own placement is the default");
    mark(&model, &region);

    assert_eq!(go(&region, pool.on(NODES[1])).pages.migrated, 43);
    assert_eq!(counts(&region), [0, 64, 0]);
    let weighted = Placement::weighted([(NODES[0], 3), (NODES[2], 1)]);
    assert_eq!(go(&region, pool.on(weighted.clone())).pages.migrated, 64);
    assert_eq!(counts(&region), [48, 0, 16]);
    assert_eq!(go(&region, pool.on(weighted)).pages.unchanged, 64, "what lies right stays");
    let stripes = Placement::interleave([NODES[0], NODES[2]]).stripe_bytes(8 * PAGE);
    go(&region, pool.on(stripes));
    assert_eq!(counts(&region), [32, 0, 32]);
    let file = |page| model.frame_at(address(&region, page)).unwrap().0;
    assert!(
        (0..PAGES).all(|page| file(page) == file(page / 8 % 2 * 8)),
        "stripes of eight pages alternate"
    );

    check_marks(&model, &region);
    audit(&[&pool], &[&region]).unwrap();
    drop(region);
    assert_eq!(pool.free_bytes(), pool.bytes());
}

#[test]
fn page_tables_follow_the_data_unless_told_otherwise() {
    EngineChoice::ALL.into_iter().for_each(check_that_page_tables_follow);
}

fn check_that_page_tables_follow(engine: EngineChoice) {
    let (model, pool) = model_pool(PAGES);
    let tables = |region: &Region| {
        let of_page = |page| model.tables_at(address(region, page)).expect("a node was preferred");
        let first = of_page(0);
        assert!((0..PAGES).all(|page| of_page(page) == first));
        NodeId(first)
    };
    let region = Region::new(pool.on(NODES[0]), PAGES * PAGE).unwrap();
    mark(&model, &region);
    assert_eq!(tables(&region), NODES[0]);
    go_by(engine, &region, pool.on(NODES[1]));
    assert_eq!(tables(&region), NODES[1]);

    let elsewhere = Placement::on(NODES[0]).page_tables(PageTables::Node(NODES[2]));
    let report = go_by(engine, &region, pool.on(elsewhere.clone()));
    assert_eq!(tables(&region), NODES[2]);
    assert!(report.calls.contains_key("set_mempolicy"), "{:?}", report.calls);
    go_by(engine, &region, pool.on(NODES[1]));
    assert_eq!(tables(&region), NODES[1]);

    // The frames of node 0 have kept the page tables on node 4. These must not be used as if they
    // were on node 0.
    go_by(engine, &region, pool.on(NODES[0]));
    assert_eq!(tables(&region), NODES[0]);
    check_marks(&model, &region);
    drop(region);
    let region = Region::new(pool.on(elsewhere), PAGES * PAGE).unwrap();
    assert_eq!(tables(&region), NODES[2], "a new region too");
    drop(region);
    let region = Region::new(pool.on(NODES[0]), PAGES * PAGE).unwrap();
    assert_eq!(tables(&region), NODES[0]);
    assert_eq!(pool.free_bytes_on(NODES[0]), 0);
    audit(&[&pool], &[&region]).unwrap();
    // When a region is dropped, this thread maps the alias of its frames again. The new page tables
    // lie on whatever node this thread's policy chooses.
    drop(Region::new(pool.on(NODES[1]), PAGES * PAGE).unwrap());
    let region = Region::new(pool.on(NODES[1]), PAGES * PAGE).unwrap();
    assert_eq!(tables(&region), NODES[1]);
}

#[test]
fn verification_notices_pages_that_the_kernel_has_moved() {
    let (model, pool) = model_pool(PAGES);
    let region = Region::new(&pool, PAGES * PAGE).unwrap();
    assert!(pool.verify().unwrap().is_right());
    model.displace(address(&region, 3), 77);
    model.displace(address(&region, 5), 77);
    for verified in [region.verify().unwrap(), pool.verify().unwrap()] {
        assert_eq!((verified.misplaced, verified.absent, verified.found.on(NodeId(77))), (2, 0, 2));
        assert!(!verified.is_right() && verified.to_string().contains("2 elsewhere"), "{verified}");
    }
    // Two pages that have changed places are both misplaced, though each node has as many pages as
    // before.
    let (model, pool) = model_pool(PAGES);
    let region = Region::new(&pool, PAGES * PAGE).unwrap();
    model.displace(address(&region, 0), NODES[1].0);
    model.displace(address(&region, 1), NODES[0].0);
    assert_eq!(region.verify().unwrap().misplaced, 2);
    assert_eq!(pool.verify().unwrap().misplaced, 2);
}

#[test]
fn destinations_that_the_pool_does_not_have_are_named() {
    let (_, pool) = model_pool(PAGES);
    let region = Region::new(pool.on(NODES[0]), PAGES * PAGE).unwrap();
    let refused = |placement: Placement, named: &str| {
        let migration =
            Migration::new().range(&region, 0..region.len(), pool.on(placement.clone()));
        let started = migration.start().map(drop);
        for result in [started, Region::new(pool.on(placement), PAGE).map(drop)] {
            let error = result.unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(named), "{error}");
        }
    };
    refused(
        NodeId(1).into(),
        "the pool has no memory on node 1; use nodes of the pool: node 0, node 3, node 4",
    );
    refused(Placement::interleave([NODES[0], NodeId(9)]), "no memory on node 9; use");
    refused(Placement::interleave([]), "names no node");
    assert!(matches!(
        Region::new(pool.on(NODES[1]), (PAGES + 1) * PAGE),
        Err(Error::PoolExhausted { node: NodeId(3), .. })
    ));
    // Frames of node 3 are taken before the shortage on node 0 is found.
    let last = Placement::interleave([NODES[1], NODES[0]]);
    let region = Region::new(pool.on(last.clone()), 3 * PAGE).map(drop);
    assert!(
        matches!(region, Err(Error::PoolExhausted { node: NodeId(0), .. })),
        "nothing is free on node 0"
    );
    assert_eq!(pool.free_bytes(), (2 * PAGES * PAGE) as u64, "what had been taken is back");
    let job = Migration::new()
        .range(&region_of_others(&pool), 0..3 * PAGE, pool.on(last))
        .start()
        .map(drop);
    assert!(matches!(job, Err(Error::PoolExhausted { node: NodeId(0), .. })));
    assert_eq!(pool.free_bytes(), (2 * PAGES * PAGE) as u64, "what had been taken is back");
}

/// A region with pages on node 4 only.
fn region_of_others(pool: &Pool) -> Region {
    Region::new(pool.on(NODES[2]), 3 * PAGE).unwrap()
}

#[test]
fn shares_follow_the_weights_and_a_region_of_the_pools_size_fits_in() {
    for pages in [1, 4, 770, 5000] {
        let model = Arc::new(Model::new());
        let placement = Placement::weighted([(NODES[0], 3), (NODES[1], 1)]);
        let bytes = pages * PAGE;
        let pool = Pool::builder(placement, bytes as u64).backend(model.clone()).build().unwrap();
        let share = |node: usize| pool.free_bytes_on(NODES[node]) as usize / PAGE;
        assert!(share(0) + share(1) >= pages && share(0) + share(1) <= pages + 1, "{pages}");
        assert!(share(0).abs_diff(3 * pages / 4) <= pages / 64 + 1, "{pages}: {}", share(0));
        let region = Region::new(&pool, bytes).unwrap();
        assert!(region.verify().unwrap().is_right());
        // Growing in steps, to the same size, takes the same frames.
        drop(region);
        let region = Region::reserve_with(model, bytes, PageSize::Base).unwrap();
        for step in 1..=4 {
            region.grow(bytes * step / 4, &pool).unwrap();
        }
        assert_eq!(region.len(), bytes);
        assert!(region.verify().unwrap().is_right());
        audit(&[&pool], &[&region]).unwrap();
    }
}

#[test]
fn verification_during_leaps_finds_nothing_wrong() {
    let (_, pool) = model_pool(4 * PAGES);
    let region = Region::new(&pool, 2 * PAGES * PAGE).unwrap();
    for round in 0..if cfg!(debug_assertions) { 30 } else { 300 } {
        let to = pool.on(NODES[round % 3]);
        let job = Migration::new()
            .range(&region, 0..region.len(), to)
            .area_bytes(PAGE)
            .threads(2)
            .start()
            .unwrap();
        while !job.is_finished() {
            let verified = region.verify().unwrap();
            assert!(verified.is_right() && verified.pages == 2 * PAGES as u64, "{verified}");
        }
        assert!(job.wait().ended.is_completed());
    }
}

/// The error tells what the whole call needs and what the share had free before it. It does not
/// tell of the part of the call at which the shortage was found.
#[test]
fn a_pool_that_is_too_small_says_what_was_free_before() {
    let pages = |pages: usize| (pages * PAGE) as u64;
    let says = |error: Error, node: NodeId, free: u64, needed: u64| {
        let Error::PoolExhausted { node: of, free_bytes, pool_bytes, needed_bytes } = error else {
            panic!("{error:?}")
        };
        assert_eq!((of, free_bytes, pool_bytes, needed_bytes), (node, free, pages(16), needed));
    };
    let (model, pool) = model_pool(16);
    let in_turn = Placement::interleave([NODES[0], NODES[2]]).stripe_bytes(4 * PAGE);
    let region = Region::new(pool.on(in_turn), 64 * PAGE).map(drop);
    says(region.unwrap_err(), NODES[0], pages(16), pages(32));

    let large = Pool::builder(NODES[0], pages(48)).backend(model.clone()).build().unwrap();
    let region = Region::new(&large, 48 * PAGE).unwrap();
    let move_to = |pools: [&Pool; 2]| {
        let job = Migration::new().range(&region, 0..12 * PAGE, pools[0].on(NODES[2]));
        job.range(&region, 12 * PAGE..24 * PAGE, pools[1].on(NODES[2]))
            .start()
            .map(|job| job.wait())
    };
    says(move_to([&pool, &pool]).unwrap_err(), NODES[2], pages(16), pages(24));
    let job = Migration::new().range(&region, 0..20 * PAGE, pool.on(NODES[2]));
    let job = job.range(&region, 20 * PAGE..28 * PAGE, pool.on(NODES[2])).start().map(drop);
    says(job.unwrap_err(), NODES[2], pages(16), pages(28));
    // Only the pool that is too small counts, not another pool of the same size on that node.
    let other = Pool::builder(NODES[2], pages(16)).backend(model).build().unwrap();
    let _rest = Region::new(&other, 8 * PAGE).unwrap();
    says(move_to([&pool, &other]).unwrap_err(), NODES[2], pages(8), pages(12));
    assert_eq!(pool.free_bytes(), pool.bytes());
}

/// A refused policy is reported once. Page tables that went to another node meanwhile come to the
/// right one when policies are allowed again. They belong to an alias that was filled again or, if
/// filling is refused too, mapped anew.
#[test]
fn page_tables_are_put_right_after_a_refused_policy() {
    let engines = EngineChoice::ALL;
    for (refill, engine) in [true, false].into_iter().flat_map(|how| engines.map(|e| (how, e))) {
        let model = Arc::new(Model::new());
        let refused = Arc::new(AtomicUsize::new(0));
        let asked = refused.clone();
        let (policy, filling) = (1, 2);
        let refuses = move |request: &Request| {
            let bit = match request.call {
                Call::PreferTables => policy,
                Call::Populate => filling,
                _ => 0,
            };
            (asked.load(Relaxed) & bit != 0).then_some(Errno(libc::EPERM))
        };
        let backend = Arc::new(Refusing::new(model.clone(), refuses));
        let bytes = (NODES.len() * PAGES * PAGE) as u64;
        let pool =
            Pool::builder(Placement::interleave(NODES), bytes).backend(backend).build().unwrap();
        let region = Region::new(pool.on(NODES[0]), PAGES * PAGE).unwrap();
        let tables = |region: &Region| {
            let all = (0..PAGES).map(|page| model.tables_at(address(region, page)));
            all.collect::<std::collections::BTreeSet<_>>()
        };
        go_by(engine, &region, pool.on(NODES[1]));
        refused.store(if refill { 0 } else { filling }, Relaxed);
        drop(region);
        refused.store(policy, Relaxed);
        // This thread has allocated the page tables of the alias.
        let region = Region::new(pool.on(NODES[1]), PAGES * PAGE).unwrap();
        assert_ne!(tables(&region), [Some(NODES[1].0)].into());
        let stripes = pool.on(Placement::interleave([NODES[0], NODES[2]]).stripe_bytes(PAGE));
        let report = Migration::new()
            .range(&region, 0..region.len(), stripes)
            .engine(engine)
            .threads(2)
            .start()
            .unwrap()
            .wait();
        assert!(report.ended.is_completed(), "{report}");
        let warned = report.warnings.iter().filter(|w| w.kind == WarningKind::PageTables).count();
        assert_eq!(warned, 1, "{report}");
        refused.store(0, Relaxed);
        go_by(engine, &region, pool.on(NODES[1]));
        assert_eq!(tables(&region), [Some(NODES[1].0)].into());
    }
}

/// Whichever call fails while aliases get their page tables, attributes of the user stay.
#[test]
fn a_failure_while_page_tables_are_seated_loses_no_attribute() {
    let mut struck = 0;
    for at in 1..60 {
        let model = Arc::new(Model::new());
        let failing =
            Arc::new(FailAt::new(model.clone(), at, FailMode::Before, Errno(libc::ENOMEM)));
        let bytes = (NODES.len() * PAGES * PAGE) as u64;
        let pool = Pool::builder(Placement::interleave(NODES), bytes)
            .backend(failing.clone())
            .build()
            .unwrap();
        let region = Region::new(pool.on(NODES[0]), 8 * PAGE).unwrap();
        mark(&model, &region);
        let first = address(&region, 0);
        // SAFETY: pages of a region of the model, which no thread uses.
        unsafe { model.advise(first, 4 * PAGE, Advice::DontDump) }.unwrap();
        let set: Vec<_> = (0..8).map(|page| model.attributes_at(address(&region, page))).collect();
        // Every second of the last eight frames of node 3 gets its page tables from this thread,
        // when a region is dropped. The others get theirs back from a leap.
        let rest = Region::new(pool.on(NODES[1]), (PAGES - 8) * PAGE).unwrap();
        let last = Region::new(pool.on(NODES[1]), 8 * PAGE).unwrap();
        for page in (0..8).step_by(2) {
            let part = page * PAGE..(page + 1) * PAGE;
            let job = Migration::new().range(&last, part, pool.on(NODES[2])).start().unwrap();
            assert!(job.wait().ended.is_completed());
        }
        drop(last);
        failing.arm();
        let migration =
            Migration::new().range(&region, 0..8 * PAGE, pool.on(NODES[1])).area_bytes(8 * PAGE);
        let report = migration.threads(1).start();
        // The failing call may come after the start.
        if let Ok(job) = report {
            let report = job.wait();
            assert!(report.ended.is_completed(), "{at}: {report}");
        }
        failing.disarm();
        struck += usize::from(failing.struck().is_some());
        let now: Vec<_> = (0..8).map(|page| model.attributes_at(address(&region, page))).collect();
        assert_eq!(now, set, "call {at}: {:?}", failing.struck());
        check_marks(&model, &region);
        audit(&[&pool], &[&region, &rest]).unwrap();
    }
    assert!(struck > 10, "{struck}");
}

#[test]
fn a_cpuset_that_changes_ends_the_job_whole() {
    let (model, pool) = model_pool(PAGES);
    let region = Region::new(pool.on(NODES[0]), PAGES * PAGE).unwrap();
    mark(&model, &region);
    let to = pool.on(Placement::interleave([NODES[0], NODES[1]]).stripe_bytes(2 * PAGE));
    let migration = Migration::new().range(&region, 0..region.len(), to);
    // At a byte per second the job moves what it may before its first pause, and then pauses for
    // more than an hour. It reads its cpuset during pauses too. The timeout ends a job that does
    // not.
    let migration = migration.area_bytes(PAGE).threads(2).rate_limit(1);
    let job = migration.timeout(Duration::from_secs(60)).start().unwrap();
    assert!(common::soon(|| job.progress().bytes_migrated > 0));
    model.forbid_node(NODES[1].0);
    let report = job.wait();
    assert!(matches!(report.ended, Ended::CpusetChanged), "{report}");
    assert!(
        report.warnings.iter().any(|w| w.kind == WarningKind::Cpuset && w.contains("node 3")),
        "{report}"
    );
    assert!(report.pages.migrated > 0 && report.pages.not_attempted > 0, "{report}");
    assert_eq!(report.pages.total(), PAGES as u64, "{report}");
    let PageCounts { migrated, unchanged, not_attempted, .. } = report.pages;
    assert_eq!(counts(&region), [unchanged + not_attempted, migrated, 0]);
    check_marks(&model, &region);
    audit(&[&pool], &[&region]).unwrap();

    let to = |node| Migration::new().range(&region, 0..region.len(), pool.on(node)).start();
    assert!(matches!(to(NODES[1]), Err(Error::NodeNotAllowed { node: NodeId(3) })));
    let pool_there = Pool::builder(NODES[1], 4096).backend(model.clone()).build();
    assert!(matches!(pool_there, Err(Error::NodeNotAllowed { node: NodeId(3) })));
    let report = to(NODES[2]).unwrap().wait();
    assert!(report.ended.is_completed(), "the next one works: {report}");
    check_marks(&model, &region);
}

// On the kernel
// ------------------------------------------------------------------------------------------------

const MB: usize = 1 << 20;

#[test]
fn page_tables_can_be_placed_on_the_kernel() {
    let _turn = turn();
    let [near, far] = pools(PageSize::Base, 8 * MB as u64).unwrap();
    let there = PageTables::Node(far.nodes()[0]);
    let to = |pool: &Pool| pool.on(Placement::on(pool.nodes()[0]).page_tables(there));
    let region = Region::new(to(&near), 8 * MB).unwrap();
    stamp(&region, 0..8 * MB, 1);
    for pool in [&far, &near, &far] {
        let report = Migration::new().range(&region, 0..8 * MB, to(pool)).start().unwrap().wait();
        assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
        assert_eq!(report.pages.migrated, (8 * MB / PAGE) as u64);
        assert!(report.calls.contains_key("set_mempolicy"), "{:?}", report.calls);
        check_stamp(&region, 0..8 * MB, 1);
        let verified: Verification = region.verify().unwrap();
        assert!(verified.is_right() && verified.pages == (8 * MB / PAGE) as u64, "{verified}");
    }
    leap(&region, 0..8 * MB, &near);
    check_stamp(&region, 0..8 * MB, 1);
    audit(&[&near, &far], &[&region]).unwrap();
    let error = Region::new(
        near.on(Placement::on(near.nodes()[0]).page_tables(PageTables::Node(NodeId(999)))),
        PAGE,
    );
    assert!(matches!(error, Err(Error::UnknownNode { .. })));
}

#[test]
fn pools_verify_frames_in_use_and_during_a_leap() {
    let _turn = turn();
    for page in common::PAGE_SIZES {
        let bytes = (8 * page.bytes()).max(16 * MB);
        let [near, far] = match pools(page, bytes as u64) {
            Ok(pools) => pools,
            Err(error) => {
                common::skip_page_size("pools_verify_frames_in_use_and_during_a_leap", page, error);
                continue;
            }
        };
        let region = Region::new(&near, bytes).unwrap();
        stamp(&region, 0..bytes, 3);
        let mappings = common::pool_mappings().len();
        for pool in [&far, &near, &far] {
            let job = Migration::new().range(&region, 0..bytes, pool).start().unwrap();
            for verified in [near.verify(), far.verify(), region.verify()] {
                let verified = verified.unwrap();
                assert!(
                    verified.is_right() && verified.pages == (bytes / page.bytes()) as u64,
                    "{verified}"
                );
            }
            assert!(job.wait().ended.is_completed());
        }
        check_stamp(&region, 0..bytes, 3);
        assert_eq!(common::pool_mappings().len(), mappings, "verification leaves no mapping");
    }
}

/// In a container, a seccomp filter may refuse `move_pages`.
#[test]
fn where_pages_lie_is_found_out_without_asking_about_pages() {
    let _turn = turn();
    let refuses =
        |request: &Request| (request.call == Call::QueryNodes).then_some(Errno(libc::EPERM));
    let backend: Arc<dyn Backend> = Arc::new(Refusing::new(Arc::new(Linux), refuses));
    let nodes = pools(PageSize::Base, PAGE as u64).unwrap().map(|pool| pool.nodes()[0]);
    for page in common::PAGE_SIZES {
        let bytes = 8 * page.bytes();
        let build = |node| {
            Pool::builder(node, bytes as u64).page_size(page).backend(backend.clone()).build()
        };
        let [near, far] = match nodes.map(build) {
            [Ok(near), Ok(far)] => [near, far],
            [Err(error), _] | [_, Err(error)] => {
                let name = "where_pages_lie_is_found_out_without_asking_about_pages";
                common::skip_page_size(name, page, error);
                continue;
            }
        };
        let region = Region::new(&near, bytes).unwrap();
        stamp(&region, 0..bytes, 4);
        for pool in [&far, &near] {
            leap(&region, 0..bytes, pool);
            assert_eq!(region.placement().unwrap().on(pool.nodes()[0]), 8);
            for verified in [region.verify(), near.verify(), far.verify()].map(Result::unwrap) {
                assert!(verified.is_right() && verified.pages == 8, "{page}: {verified}");
            }
        }
        check_stamp(&region, 0..bytes, 4);
    }
}

#[test]
fn locked_pools_are_locked_once_and_for_good() {
    const NAME: &str = "locked_pools_are_locked_once_and_for_good";
    let _turn = turn();
    let node = pools(PageSize::Base, PAGE as u64).unwrap()[0].nodes()[0];
    let locked = |bytes| Pool::builder(node, bytes).locked(true).build();
    if case().is_some() {
        let limit = libc::rlimit { rlim_cur: MB as u64, rlim_max: MB as u64 };
        // SAFETY: the call reads one structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
        become_nobody();
        let mappings = common::pool_mappings();
        let error = locked(4 * MB as u64).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("mlock") && text.contains("RLIMIT_MEMLOCK"), "{text}");
        assert_eq!(common::pool_mappings(), mappings, "nothing is left");
        drop(locked(MB as u64 / 2).unwrap());
        return;
    }
    let before = status_kb("VmLck");
    let pool = match locked(4 * MB as u64) {
        Ok(pool) => pool,
        Err(error) => return skip(NAME, &error),
    };
    assert_eq!(status_kb("VmLck") - before, 4 << 10);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut files = smaps
        .split("VmFlags:")
        .collect::<Vec<_>>()
        .windows(2)
        .filter(|w| w[0].contains("memfd:pageleap"))
        .map(|w| w[1].lines().next().unwrap().to_owned())
        .collect::<Vec<_>>();
    files.sort();
    assert!(
        files.len() == 2
            && files.iter().all(|flags| flags.contains(" dc") && flags.contains(" dd")),
        "{files:?}"
    );
    let far = Pool::builder(node, 4 * MB as u64).build().unwrap();
    let region = Region::new(&pool, 4 * MB).unwrap();
    stamp(&region, 0..4 * MB, 5);
    let flags = common::region_flags(&region);
    leap(&region, 0..4 * MB, &far);
    leap(&region, 0..4 * MB, &pool);
    check_stamp(&region, 0..4 * MB, 5);
    assert_eq!(common::region_flags(&region), flags, "regions are not locked by that");
    assert_eq!(status_kb("VmLck") - before, 4 << 10);
    drop(region);
    drop(pool);
    assert_eq!(status_kb("VmLck"), before);

    if !is_root() {
        return skip(
            &format!("{NAME} (a user without CAP_IPC_LOCK)"),
            &"only root can become another user",
        );
    }
    let (end, text) = run_case(NAME, "limit");
    assert_eq!(end, End::Exited(0), "{text}");
}

/// When the kernel is asked where the pages of a new pool lie, a page may have no entry for a
/// moment: the kernel has dropped it, or is moving the page.
#[test]
fn pages_without_an_entry_are_looked_for_again() {
    let _turn = turn();
    let (filled, dropped) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let drops = dropped.clone();
    let drop_one = move |request: &Request| {
        match request.call {
            Call::Populate => filled.store(request.addr, Relaxed),
            // Twice, so that a single further query is not enough.
            Call::QueryNodes if drops.fetch_add(1, Relaxed) < 2 => {
                let page = filled.load(Relaxed) as *mut libc::c_void;
                // SAFETY: a page of a shared mapping that no thread uses yet. Its contents stay in
                // the file.
                assert_eq!(unsafe { libc::madvise(page, PAGE, libc::MADV_DONTNEED) }, 0);
            }
            _ => {}
        }
        None
    };
    let backend: Arc<dyn Backend> = Arc::new(Refusing::new(Arc::new(Linux), drop_one));
    let node = pools(PageSize::Base, PAGE as u64).unwrap()[0].nodes()[0];
    let pool = Pool::builder(node, (PAGES * PAGE) as u64).backend(backend).build().unwrap();
    assert!(dropped.load(Relaxed) > 2);
    assert_eq!(pool.free_bytes(), (PAGES * PAGE) as u64);
}

/// Several threads verify a large pool, each some parts of it.
#[test]
fn each_part_of_a_large_pool_is_verified() {
    /// Parts of 8192 pages, and a rest.
    const LARGE: usize = 5 * 8192 + 100;
    /// Too many pages to be absent for a moment only.
    const ABSENT: usize = 70;
    let _turn = turn();
    let node = pools(PageSize::Base, PAGE as u64).unwrap()[0].nodes()[0];
    // `look` gets the number of each query, from 1 on, and the first address of the pool.
    type Look = Box<dyn Fn(usize, usize) -> Option<Errno> + Send + Sync>;
    let build = |look: Look| {
        let (first, asked) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0));
        let decide = move |request: &Request| match request.call {
            Call::Populate => {
                first.fetch_min(request.addr, Relaxed);
                None
            }
            Call::QueryNodes => look(asked.fetch_add(1, Relaxed) + 1, first.load(Relaxed)),
            _ => None,
        };
        let backend: Arc<dyn Backend> = Arc::new(Refusing::new(Arc::new(Linux), decide));
        Pool::builder(node, (LARGE * PAGE) as u64).threads(3).backend(backend).build()
    };
    for part in [0, 3, 5] {
        let gone = std::sync::Once::new();
        let error = build(Box::new(move |_, first| {
            // No query is answered before the pages are gone.
            gone.call_once(|| {
                let gone = (first + part * 8192 * PAGE) as *mut libc::c_void;
                // SAFETY: pages of a shared mapping that no thread uses yet. Their contents stay in
                // the file.
                let dropped = unsafe { libc::madvise(gone, ABSENT * PAGE, libc::MADV_DONTNEED) };
                assert_eq!(dropped, 0);
            });
            None
        }));
        let Err(Error::Misplaced { misplaced, pages, .. }) = error else {
            panic!("{ABSENT} pages of part {part} are missing: {error:?}")
        };
        // The kernel may be moving a few pages by itself, which have no entry at that moment either.
        let found = ABSENT as u64..2 * ABSENT as u64;
        assert!(found.contains(&misplaced), "part {part}: {misplaced} of {pages}");
        assert_eq!(pages, LARGE as u64, "part {part}");
    }
    // A thread whose query is refused leaves the question to a way that may need no query.
    for errno in [libc::EPERM, libc::ENOMEM] {
        let pool = build(Box::new(move |query, _| (query == 4).then_some(Errno(errno)))).unwrap();
        assert_eq!(pool.free_bytes(), (LARGE * PAGE) as u64);
    }
    let error = build(Box::new(|query, _| (query > 4).then_some(Errno(libc::EIO)))).unwrap_err();
    assert!(matches!(error, Error::Call { call: Call::QueryNodes, .. }), "{error:?}");
}
