//! Jobs that another process traces, on the model: which engine moves which area, and what stays.

mod common;
#[path = "common/refusing.rs"]
mod refusing;
#[path = "common/tracing.rs"]
mod tracing;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use common::address;
use pageleap::backend::{Call, Errno, Model};
use pageleap::{BASE_PAGE, Engine, EngineChoice, Migration, NodeId, Pool, Region, Report, audit};
use refusing::{Refusing, Request};
use tracing::{LOOK, check_stayed, moved_for_tracer, warns_of};

/// A modelled machine, a region of it, and a pool to which it leaps.
struct Scene {
    model: Arc<Model>,
    pools: [Pool; 2],
    region: Region,
}

impl Scene {
    /// `rule` decides about each call.
    fn new(
        pages: usize,
        rule: impl Fn(&Model, &Request) -> Option<Errno> + Send + Sync + 'static,
    ) -> Scene {
        let model = Arc::new(Model::new());
        let rules = model.clone();
        let backend = Refusing::new(model.clone(), move |request| rule(&rules, request));
        let backend = Arc::new(backend);
        let bytes = pages * BASE_PAGE;
        let pools = [0, 1].map(|node| {
            let pool = Pool::builder(NodeId(node), bytes as u64).backend(backend.clone());
            pool.build().unwrap()
        });
        let region = Region::new(&pools[0], bytes).unwrap();
        let scene = Scene { model, pools, region };
        (0..pages).for_each(|page| scene.model.store(scene.addr(page), page as u64 + 1).unwrap());
        scene
    }

    fn addr(&self, page: usize) -> usize {
        address(&self.region) + page * BASE_PAGE
    }

    fn leap(&self, engine: impl Into<EngineChoice>, area_pages: usize) -> Report {
        let range = 0..self.region.len();
        let migration = Migration::new().range(&self.region, range, &self.pools[1]);
        let migration = migration.engine(engine).area_bytes(area_pages * BASE_PAGE).threads(1);
        let report = migration.start().unwrap().wait();
        for page in 0..self.region.len() / BASE_PAGE {
            assert_eq!(self.model.load(self.addr(page)), Ok(page as u64 + 1), "page {page}");
        }
        assert_eq!(self.model.trackers_open(), 0, "{report}");
        audit(&[&self.pools[0], &self.pools[1]], &[&self.region]).unwrap();
        report
    }
}

/// Refuses one of the trackers that are opened: that with this number.
fn refuse_tracker(number: usize, errno: i32) -> impl Fn(&Model, &Request) -> Option<Errno> {
    let opened = AtomicUsize::new(0);
    move |_, request| {
        let opens = request.call == Call::OpenTracker;
        (opens && opened.fetch_add(1, SeqCst) == number).then_some(Errno(errno))
    }
}

#[test]
fn auto_moves_areas_of_a_traced_job_by_an_engine_whose_readers_go_on() {
    let scene = Scene::new(16, |_, _| None);
    scene.model.set_tracer(Some(7));
    let report = scene.leap(EngineChoice::Auto, 4);
    assert!(report.ended.is_completed() && report.engine == Engine::Precopy, "{report}");
    assert_eq!(moved_for_tracer(&report, Engine::WpSync), 16, "{report}");
    assert!(warns_of(&report, "16 pages were moved by the engine wp-sync"), "{report}");
}

/// `wp-sync` takes areas of 4096 pages at most, and `precopy` takes larger ones. (`stop-copy`, which
/// does not, is refused.)
#[test]
fn an_area_is_cut_to_what_the_other_engine_takes() {
    const PAGES: usize = 2 * 4096 + 5;
    let scene = Scene::new(PAGES, refuse_tracker(1, libc::EMFILE));
    scene.model.set_tracer(Some(7));
    let report = scene.leap(EngineChoice::Auto, PAGES);
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(moved_for_tracer(&report, Engine::WpSync), PAGES as u64, "{report}");
}

#[test]
fn a_forced_engine_whose_readers_wait_leaves_the_pages_of_a_traced_job() {
    for engine in Engine::ALL {
        let scene = Scene::new(8, |_, _| None);
        scene.model.set_tracer(Some(7));
        let report = scene.leap(engine, 4);
        if engine.readers_wait() {
            check_stayed(&report, "let the engine be chosen (auto)");
        } else {
            assert!(report.ended.is_completed(), "{report}");
            assert_eq!(moved_for_tracer(&report, engine), 0, "{report}");
        }
    }
}

/// A job whose engine keeps system calls whole does not take one that fails them.
#[test]
fn without_an_engine_whose_readers_go_on_the_pages_of_a_traced_job_stay() {
    // The third tracker is the one that the tracer makes necessary.
    let scene = Scene::new(8, refuse_tracker(2, libc::EPERM));
    scene.model.set_tracer(Some(7));
    let report = scene.leap(EngineChoice::Auto, 4);
    check_stayed(&report, "end the tracer");
    assert!(warns_of(&report, "process 7") && warns_of(&report, "EPERM"), "{report}");
    scene.model.set_tracer(None);
    let report = scene.leap(EngineChoice::Auto, 4);
    assert!(report.ended.is_completed(), "the next one moves them: {report}");
}

/// A descriptor that was missing for the first area may be there for the second one.
#[test]
fn a_shortage_keeps_one_area_of_a_traced_job_and_not_the_next() {
    let scene = Scene::new(8, refuse_tracker(2, libc::EMFILE));
    scene.model.set_tracer(Some(7));
    let report = scene.leap(EngineChoice::Auto, 4);
    assert_eq!(moved_for_tracer(&report, Engine::WpSync), 4, "{report}");
    assert!(warns_of(&report, "process 7") && warns_of(&report, "EMFILE"), "{report}");
}

/// The tracer comes while page 1 moves, so that it is seen before page 2, and goes while page 3
/// moves.
#[test]
fn the_own_engine_goes_on_when_the_tracer_has_gone() {
    const PAGES: usize = 6;
    let first = Arc::new(AtomicUsize::new(0));
    let start = first.clone();
    let scene = Scene::new(PAGES, move |model, request| {
        let page = request.addr.wrapping_sub(start.load(SeqCst)) / BASE_PAGE;
        match (request.call, page) {
            (Call::Track, 1) => {
                model.set_tracer(Some(7));
                // At least that long: then the next look is due.
                std::thread::sleep(LOOK);
            }
            (Call::Track, 3) => model.set_tracer(None),
            _ => {}
        }
        None
    });
    first.store(scene.addr(0), SeqCst);
    let report = scene.leap(EngineChoice::Auto, 1);
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(moved_for_tracer(&report, Engine::WpSync), 2, "{report}");
    let own: u64 = report
        .engines
        .iter()
        .filter(|e| e.engine.engine().is_some_and(Engine::readers_wait))
        .map(|e| e.pages)
        .sum();
    assert_eq!(own, PAGES as u64 - 2, "{report}");
    assert!(warns_of(&report, "2 pages were moved by the engine wp-sync"), "{report}");
}
