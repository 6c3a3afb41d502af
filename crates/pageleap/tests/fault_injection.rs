//! Each call of a whole job fails once: before its effect, after it, and half-way. Some calls fail
//! each time. Whatever fails, the job ends, every page has its latest contents, every frame has one
//! owner, and the next job succeeds.

mod common;
#[path = "fault_injection/each_time.rs"]
mod each_time;
#[path = "fault_injection/load.rs"]
mod load;
#[path = "fault_injection/page_tables.rs"]
mod page_tables;
#[path = "common/refusing.rs"]
mod refusing;
#[path = "fault_injection/sabotage.rs"]
mod sabotage;
#[path = "fault_injection/views.rs"]
mod views;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::{
    Kept, PAGE_SIZES, Random, address, check_engine, engines, engines_for, in_lab, ladder, nodes,
    own_descriptors, pool_mappings, region_flags, repeated, skip_page_size, soon, surprises, turn,
};
use load::{check_all, touch_all, with_load};
use pageleap::backend::{Advice, Backend, Call, Errno, FailAt, Linux, Model, Prot};
use pageleap::{
    Ended, Engine, EngineChoice, Error, Job, Migration, MigrationContext, PageOutcome, PageSize,
    Pool, Reason, Region, Report, WarningKind, audit,
};
use refusing::{Refusing, Request};
use sabotage::{ENOMEM, MODES, Sabotage, sweep};

const PAGES: usize = 8;

/// Starts a job of one thread and small areas.
fn start_forced(engine: impl Into<EngineChoice>, region: &Region, to: &Pool) -> Result<Job, Error> {
    start_with(engine.into(), region, to, 2 * region.page_size().bytes(), 1)
}

/// Starts a job. If its engine is refused, because a call of the check for it failed, the job is
/// started once more.
fn start_with(
    engine: EngineChoice,
    region: &Region,
    to: &Pool,
    area: usize,
    threads: usize,
) -> Result<Job, Error> {
    let job = || Migration::new().engine(engine).range(region, 0..region.len(), to);
    let start = || job().area_bytes(area).threads(threads).start();
    start().or_else(|error| match error {
        Error::EngineRefused { .. } if engine != EngineChoice::Auto => start(),
        error => Err(error),
    })
}

fn build(backend: Arc<dyn Backend>, page: PageSize, pages: usize) -> Result<Pool, Error> {
    let bytes = (pages * page.bytes()) as u64;
    Pool::builder(nodes()[0], bytes).page_size(page).threads(1).backend(backend).build()
}

/// Checks that all pages have migrated: a single failure must not keep any page from it.
fn check_report(report: &Report, pages: usize, what: &str) {
    assert!(report.ended.is_completed(), "{what}: {report}");
    assert_eq!(report.pages.migrated, pages as u64, "{what}: {report}");
}

// The model
// ------------------------------------------------------------------------------------------------

/// Two pools and a region on the model, with a backend on which a call fails.
struct OnModel {
    model: Arc<Model>,
    failing: Arc<FailAt>,
    pools: [Pool; 2],
    region: Region,
}

impl OnModel {
    fn new(sabotage: Sabotage) -> OnModel {
        let model = Arc::new(Model::new());
        let failing = sabotage.of(model.clone());
        let pools = [(); 2].map(|()| build(failing.clone(), PageSize::Base, PAGES).unwrap());
        let region = Region::new(&pools[0], PAGES * 4096).unwrap();
        let scene = OnModel { model, failing, pools, region };
        (0..PAGES).for_each(|page| scene.model.store(scene.page(page), page as u64 + 100).unwrap());
        scene
    }

    /// The address of a page.
    fn page(&self, page: usize) -> usize {
        address(&self.region) + page * 4096
    }

    fn attributes(&self) -> Vec<(Prot, bool, bool, bool)> {
        (0..PAGES).map(|page| self.model.attributes_at(self.page(page)).unwrap()).collect()
    }

    fn check(&self, what: &str) {
        for page in 0..PAGES {
            let (prot, ..) = self.model.attributes_at(self.page(page)).unwrap();
            assert_eq!(
                self.model.load(self.page(page)),
                Ok(page as u64 + 100),
                "{what}: page {page}"
            );
            let stored = self.model.store(self.page(page), page as u64 + 100);
            assert_eq!(stored.is_ok(), prot.writable(), "{what}: page {page}");
        }
        let frames: u64 = self.pools.iter().map(Pool::free_bytes).sum();
        assert_eq!(frames, (PAGES * 4096) as u64, "{what}: frames leaked");
        audit(&[&self.pools[0], &self.pools[1]], &[&self.region])
            .unwrap_or_else(|e| panic!("{what}: {e}"));
    }
}

#[test]
fn on_the_model_any_call_may_fail() {
    let _turn = turn();
    let mut calls = std::collections::BTreeSet::new();
    let errors =
        [(libc::ENOMEM, &MODES[..]), (libc::EINVAL, &MODES[..2]), (libc::EPERM, &MODES[..])];
    for ((errno, modes), engine) in
        errors.iter().flat_map(|errors| repeated().into_iter().map(|engine| (*errors, engine)))
    {
        let reached = sweep(Errno(errno), modes, |sabotage| {
            let scene = OnModel::new(sabotage());
            let what = format!("{engine}: {:?}", sabotage());
            // SAFETY: pages of a region of the model that nothing else uses.
            unsafe {
                scene.model.advise(scene.page(2), 3 * 4096, Advice::DontDump).unwrap();
                scene.model.advise(scene.page(4), 2 * 4096, Advice::DoFork).unwrap();
                scene.model.protect(scene.page(5), 4096, Prot::READ).unwrap();
                scene.model.lock(scene.page(6), 4096, false).unwrap();
            }
            let before = scene.attributes();
            scene.failing.arm();
            let report = start_forced(engine, &scene.region, &scene.pools[1]).unwrap().wait();
            scene.failing.disarm();
            let call = scene.failing.struck();
            check_engine(engine, &report, call, &Engine::ALL[..Engine::ALL.len() - 1]);
            calls.extend(call);
            let what = format!("{what}: {call:?}");
            check_report(&report, PAGES, &what);
            scene.check(&what);
            if scene.attributes() != before {
                assert!(
                    report.warnings.iter().any(|w| w.kind == WarningKind::Attributes),
                    "{what}: {report}"
                );
            }
            for to in [&scene.pools[0], &scene.pools[1]] {
                check_report(
                    &start_forced(engine, &scene.region, to).unwrap().wait(),
                    PAGES,
                    &what,
                );
                scene.check(&what);
            }
            let OnModel { model, pools, region, .. } = scene;
            drop(region);
            assert!(
                pools.iter().all(|pool| pool.free_bytes() == pool.bytes()),
                "{what}: frames leaked"
            );
            drop(pools);
            assert_eq!(model.pages_in_use(), 0, "{what}: address space leaked");
            assert_eq!(model.trackers_open(), 0, "{what}: a tracker was left open");
            call
        });
        assert!(reached >= 20 * modes.len() as u64, "only {reached} calls were made to fail");
    }
    let followed =
        [Call::Track, Call::Untrack, Call::MarkClean, Call::Scan, Call::Wake, Call::OpenTracker];
    for call in
        [Call::Protect, Call::Exchange, Call::Advise, Call::Lock].into_iter().chain(followed)
    {
        assert!(calls.contains(&call), "{call:?} never failed: {calls:?}");
    }
}

/// Pages without read access are copied by way of the pool's alias. Runs in a child, because an
/// access to such a page would end the process.
#[test]
fn on_the_model_pages_without_access_move_again_and_again() {
    const NAME: &str = "on_the_model_pages_without_access_move_again_and_again";
    // Starting a process maps memory. No other test may have made a hole in a region meanwhile: the
    // kernel could place that memory there.
    let _turn = turn();
    if common::case().is_none() {
        let (end, output) = common::run_case(NAME, "none");
        assert_eq!(end, common::End::Exited(0), "{output}");
        return;
    }
    sweep(ENOMEM, &MODES, |sabotage| {
        let scene = OnModel::new(sabotage());
        let all = PAGES * 4096;
        // SAFETY: pages of a region of the model that nothing else uses.
        unsafe { scene.model.protect(scene.page(0), all, Prot::NONE) }.unwrap();
        scene.failing.arm();
        let mut report =
            start_forced(EngineChoice::Auto, &scene.region, &scene.pools[1]).unwrap().wait();
        scene.failing.disarm();
        for to in [&scene.pools[0], &scene.pools[1]] {
            check_report(&report, PAGES, &format!("{:?}", sabotage()));
            report = start_forced(EngineChoice::Auto, &scene.region, to).unwrap().wait();
        }
        // SAFETY: the same pages.
        unsafe { scene.model.protect(scene.page(0), all, Prot::READ_WRITE) }.unwrap();
        scene.check("readable again");
        scene.failing.struck()
    });
}

#[test]
fn on_the_model_a_pool_is_built_or_nothing_is_left() {
    let _turn = turn();
    let reached = sweep(ENOMEM, &MODES, |sabotage| {
        let model = Arc::new(Model::new());
        let failing = sabotage().of(model.clone());
        failing.arm();
        let pool = build(failing.clone(), PageSize::Base, PAGES);
        failing.disarm();
        let what = format!("{:?}: {:?}", sabotage(), failing.struck());
        match pool {
            Ok(pool) => {
                let region = Region::new(&pool, PAGES * 4096).unwrap();
                audit(&[&pool], &[&region]).unwrap();
            }
            Err(Error::Call { call, errno, .. }) => {
                assert_eq!((Some(call), errno), (failing.struck(), ENOMEM), "{what}");
            }
            Err(error) => panic!("{what}: {error}"),
        }
        assert_eq!(model.pages_in_use(), 0, "{what}: address space leaked");
        failing.struck()
    });
    assert!(reached >= 12, "{reached}");
}

#[test]
fn on_the_model_a_region_grows_or_stays_as_it_was() {
    let _turn = turn();
    let reached = sweep(ENOMEM, &MODES, |sabotage| {
        let model = Arc::new(Model::new());
        let failing = sabotage().of(model.clone());
        let pool = build(failing.clone(), PageSize::Base, PAGES).unwrap();
        let empty = model.pages_in_use();
        // The free frames have held data and lie in two runs, so that growing takes several steps.
        let used = [3, 1, 4].map(|pages| Region::new(&pool, pages * 4096).unwrap());
        used.iter().for_each(|r| model.store(address(r), 7).unwrap());
        let [first, middle, last] = used;
        drop((first, last));
        let what = || format!("{:?}: {:?}", sabotage(), failing.struck());

        failing.arm();
        let region = Region::reserve_with(failing.clone(), 7 * 4096, PageSize::Base);
        let grown = region
            .as_ref()
            .map(|region| (region.grow(2 * 4096, &pool), region.grow(7 * 4096, &pool)));
        failing.disarm();
        if let Ok((two, seven)) = grown {
            let region = region.as_ref().unwrap();
            let expected = if seven.is_ok() { 7 } else { 2 * usize::from(two.is_ok()) };
            assert_eq!(region.len(), expected * 4096, "{}", what());
            region.grow(7 * 4096, &pool).unwrap();
            for page in 0..7 {
                let at = address(region) + page * 4096;
                assert_eq!(
                    (model.load(at), model.store(at, 8)),
                    (Ok(0), Ok(())),
                    "{}: page {page}",
                    what()
                );
                assert_eq!(
                    model.attributes_at(at),
                    Some((Prot::READ_WRITE, true, false, false)),
                    "{}",
                    what()
                );
            }
            audit(&[&pool], &[region, &middle]).unwrap_or_else(|e| panic!("{}: {e}", what()));
        }
        drop((region, middle));
        assert_eq!(pool.free_bytes(), pool.bytes(), "{}: frames leaked", what());
        assert_eq!(model.pages_in_use(), empty, "{}: address space leaked", what());
        failing.struck()
    });
    assert!(reached >= 12, "{reached}");
}

#[test]
fn on_the_model_discarded_frames_come_back() {
    let _turn = turn();
    let reached = sweep(ENOMEM, &MODES, |sabotage| {
        let OnModel { model, failing, pools, mut region } = OnModel::new(sabotage());
        failing.arm();
        let discarded = region.discard(2 * 4096..5 * 4096);
        failing.disarm();
        let what = format!("{:?}: {:?}: {discarded:?}", sabotage(), failing.struck());
        audit(&[&pools[0]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
        if discarded.is_ok() {
            region.back(2 * 4096..5 * 4096, &pools[0]).unwrap_or_else(|e| panic!("{what}: {e}"));
            (2..5).for_each(|p| assert_eq!(model.load(address(&region) + p * 4096), Ok(0)));
        }
        drop(region);
        assert_eq!(pools[0].free_bytes(), pools[0].bytes(), "{what}: frames leaked");
        failing.struck()
    });
    assert!(reached > 0);
}

// The kernel
// ------------------------------------------------------------------------------------------------

/// One run on the kernel. Returns which call has failed, or the error if there is no memory for the
/// pools.
fn on_the_kernel(
    engine: EngineChoice,
    sabotage: Sabotage,
    page: PageSize,
) -> Result<Option<Call>, Error> {
    let leap = |region: &Region, to: &Pool| start_forced(engine, region, to).unwrap().wait();
    let (struck, reports) = run_on_the_kernel(sabotage, None, page, PAGES, leap)?;
    check_engine(engine, &reports[0], struck, &ladder(page));
    Ok(struck)
}

/// One run on the kernel: a job with failing calls, then one more job each way. `second` is another
/// failing call of the first job. Returns which call has failed and the reports, or the error if
/// there is no memory for the pools. Each job moves as many pages as its report has.
fn run_on_the_kernel(
    sabotage: Sabotage,
    second: Option<Sabotage>,
    page: PageSize,
    pages: usize,
    leap: impl Fn(&Region, &Pool) -> Report,
) -> Result<(Option<Call>, Vec<Report>), Error> {
    let linux: Arc<dyn Backend> = Arc::new(Linux);
    let second = second.map(|sabotage| sabotage.of(linux.clone()));
    let failing = sabotage.of(second.clone().map_or(linux, |second| second));
    let arm = || second.iter().chain([&failing]).for_each(|failing| failing.arm());
    let disarm = || second.iter().chain([&failing]).for_each(|failing| failing.disarm());
    let pools = [build(failing.clone(), page, pages)?, build(failing.clone(), page, pages)?];
    let region = Region::new(&pools[0], pages * page.bytes()).unwrap();
    let mut reports = Vec::new();
    let part = region.as_ptr().as_ptr().wrapping_add(3 * page.bytes());
    // SAFETY: two pages of the region. The advice changes no contents.
    assert_eq!(unsafe { libc::madvise(part.cast(), 2 * page.bytes(), libc::MADV_DONTDUMP) }, 0);
    let before = region_flags(&region);
    touch_all(&region, 1);
    with_load(&region, || {
        arm();
        let report = leap(&region, &pools[1]);
        disarm();
        let what = format!("{}: {sabotage:?}: {:?}", report.engine, failing.struck());
        let moving = report.pages.total() as usize;
        check_report(&report, moving, &what);
        check_all(&region, 1, &what);
        touch_all(&region, 2);
        if region_flags(&region) != before {
            assert!(
                report.warnings.iter().any(|w| w.kind == WarningKind::Attributes),
                "{what}: {report}"
            );
        }
        let free: u64 = pools.iter().map(Pool::free_bytes).sum();
        assert_eq!(free, (pages * page.bytes()) as u64, "{what}: frames leaked");
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
        reports.push(report);
        for to in [&pools[0], &pools[1]] {
            let report = leap(&region, to);
            check_report(&report, moving, &what);
            check_all(&region, 2, &what);
            reports.push(report);
        }
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
    });
    drop(region);
    assert!(
        pools.iter().all(|pool| pool.free_bytes() == pool.bytes()),
        "{sabotage:?}: frames leaked"
    );
    drop((pools, leap));
    assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]), "{sabotage:?}");
    Ok((failing.struck(), reports))
}

#[test]
fn on_the_kernel_any_call_may_fail_under_load() {
    let _turn = turn();
    let errors =
        [(libc::ENOMEM, &MODES[..]), (libc::EINVAL, &MODES[..1]), (libc::EPERM, &MODES[..1])];
    for ((errno, modes), engine) in
        errors.iter().flat_map(|errors| engines().into_iter().map(move |engine| (*errors, engine)))
    {
        let reached = sweep(Errno(errno), modes, |sabotage| {
            on_the_kernel(engine, sabotage(), PageSize::Base).unwrap()
        });
        assert!(reached >= 10 * modes.len() as u64, "only {reached} calls were made to fail");
    }
}

#[test]
fn on_the_kernel_any_call_may_fail_under_load_with_huge_pages() {
    const NAME: &str = "on_the_kernel_any_call_may_fail_under_load_with_huge_pages";
    let _turn = turn();
    for page in [PageSize::Thp, PageSize::Huge2M] {
        if let Err(error) = on_the_kernel(EngineChoice::Auto, Sabotage::NONE, page) {
            skip_page_size(NAME, page, error);
            continue;
        }
        for engine in engines_for(page) {
            if page.is_hugetlb() && engine.forced() == ladder(page).first().copied() {
                continue; // `auto` chooses this engine
            }
            // For the other engines only the worst mode, half-way. Base pages have all modes.
            let modes = if engine == EngineChoice::Auto { &MODES[..] } else { &MODES[2..] };
            let errors = [libc::EINVAL, libc::EPERM].map(|errno| (errno, &MODES[..1]));
            for (errno, modes) in [(libc::ENOMEM, modes)].into_iter().chain(errors) {
                let reached = sweep(Errno(errno), modes, |sabotage| {
                    on_the_kernel(engine, sabotage(), page).unwrap()
                });
                assert!(
                    reached >= 8 * modes.len() as u64,
                    "only {reached} calls were made to fail"
                );
            }
        }
    }
}

/// Ranges that lie near each other share calls. The job runs in a thread of its own, or in the
/// calling one with descriptors that are kept.
#[test]
fn on_the_kernel_any_call_may_fail_under_load_in_scattered_jobs() {
    const APART: usize = 6;
    let _turn = turn();
    for (keeps, modes) in [(false, &MODES[2..]), (true, &MODES[..])] {
        let reached = sweep(ENOMEM, modes, |sabotage| {
            let context = MigrationContext::new();
            let leap = move |region: &Region, to: &Pool| {
                let mut job = Migration::new().threads(1);
                for page in [0, 2, 3, 5, 7, 9] {
                    job = job.range(region, page * 4096..(page + 1) * 4096, to);
                }
                let report = match keeps {
                    false => job.start().unwrap().wait(),
                    true => job.context(&context).run().unwrap(),
                };
                assert_eq!(report.pages.total(), APART as u64);
                report
            };
            let (struck, _) =
                run_on_the_kernel(sabotage(), None, PageSize::Base, 10, leap).unwrap();
            struck
        });
        assert!(reached >= 20 * modes.len() as u64, "only {reached} calls were made to fail");
    }
}

/// The call that repairs a failure may fail too. So two calls fail, in a row or nearly.
#[test]
fn on_the_kernel_any_call_may_fail_under_load_and_the_next_one_too() {
    const NAME: &str = "on_the_kernel_any_call_may_fail_under_load_and_the_next_one_too";
    let _turn = turn();
    for page in [PageSize::Base, PageSize::Thp, PageSize::Huge2M] {
        let start = |region: &Region, to: &Pool| start_forced(EngineChoice::Auto, region, to);
        let leap = |region: &Region, to: &Pool| start(region, to).unwrap().wait();
        let run = |first, second| run_on_the_kernel(first, second, page, PAGES, leap);
        let at = |at, mode| Sabotage { at, mode, errno: ENOMEM };
        let harmless = match run(Sabotage::NONE, None) {
            Ok((_, reports)) => reports,
            Err(error) => {
                skip_page_size(NAME, page, error);
                continue;
            }
        };
        let calls: u64 = harmless[0].calls.values().sum();
        let mut random = Random::new(page.bytes() as u64);
        for first in 1..=calls + 10 {
            // The second backend lies below the first one. It does not see, and does not count, the
            // call that the first one has refused.
            let [mode, next] = [0, 1].map(|_| MODES[random.below(3) as usize]);
            let distance = [0, 0, 1, 2, 3, 5][random.below(6) as usize];
            run(at(first, mode), Some(at(first + distance, next))).unwrap();
        }
    }
}

/// One of hundreds of calls fails in a job with several workers.
#[test]
fn on_the_kernel_any_call_may_fail_under_load_in_large_jobs() {
    const RUNS: usize = 20;
    const PAGES: usize = 2048;
    let _turn = turn();
    for engine in engines() {
        let start = |region: &Region, to: &Pool| start_with(engine, region, to, 64 << 10, 2);
        let leap = |region: &Region, to: &Pool| start(region, to).unwrap().wait();
        let run =
            |sabotage| run_on_the_kernel(sabotage, None, PageSize::Base, PAGES, leap).unwrap();
        let made = |reports: &[Report]| reports[0].calls.values().sum::<u64>();
        // The number of calls depends on how often the writer disturbs a copy.
        let mut calls = (0..3).map(|_| made(&run(Sabotage::NONE).1)).min().unwrap();
        assert!(calls > 300, "{calls}");
        let mut random = Random::new(engine.forced().map_or(0, Engine::number).into());
        let mut struck = 0;
        for number in 0..10 * RUNS {
            if number >= RUNS && struck > RUNS / 2 {
                break;
            }
            // The first calls are made by `start`, and the last ones while frames are recycled.
            let at = 1 + random.below(calls + 20);
            match run(Sabotage { at, mode: MODES[number % 3], errno: ENOMEM }) {
                (Some(_), _) => struck += 1,
                (None, reports) => calls = calls.min(made(&reports)),
            }
        }
        assert!(struck > RUNS / 2, "hardly any call was made to fail");
    }
}

#[test]
fn on_the_kernel_a_pool_and_a_region_are_made_or_nothing_is_left() {
    let _turn = turn();
    for page in PAGE_SIZES {
        if let Err(error) = build(Arc::new(Linux), page, PAGES) {
            skip_page_size(
                "on_the_kernel_a_pool_and_a_region_are_made_or_nothing_is_left",
                page,
                error,
            );
            continue;
        }
        let reached = sweep(ENOMEM, &MODES, |sabotage| {
            let failing = sabotage().of(Arc::new(Linux));
            failing.arm();
            let pool = build(failing.clone(), page, PAGES);
            let region = pool.clone().map(|pool| Region::new(&pool, PAGES * page.bytes()));
            failing.disarm();
            let what = format!("{:?}: {:?}", sabotage(), failing.struck());
            if let Ok(Ok(region)) = &region {
                touch_all(region, 3);
                check_all(region, 3, &what);
                audit(&[pool.as_ref().unwrap()], &[region]).unwrap();
            }
            if let (Ok(pool), Ok(Err(_))) = (&pool, &region) {
                assert_eq!(pool.free_bytes(), pool.bytes(), "{what}: frames leaked");
                touch_all(&Region::new(pool, PAGES * page.bytes()).unwrap(), 4);
            }
            drop((region, pool));
            assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]), "{what}");
            failing.struck()
        });
        assert!(reached >= 12, "{reached}");
    }
}
