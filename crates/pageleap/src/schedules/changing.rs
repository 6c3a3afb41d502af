//! A program that gives advice on pages while they leap, under each schedule with one or two
//! departures. The kernel moves page tables of one mapping only, and advice on a part splits it.

use std::sync::Arc;

use shuttle::thread;

use super::bounded::each_schedule;
use crate::backend::{Advice, Backend, Model};
use crate::{BASE_PAGE, Engine, EngineChoice, Migration, NodeId, PageSize, Pool, Region, audit};

const ASLEEP: &str = "a job and a thread that gives advice wait for each other";
const PAGES: usize = 3;

fn advise_beside_a_leap(engine: EngineChoice) {
    let model = Arc::new(Model::new());
    let backend: Arc<dyn Backend> = model.clone();
    let bytes = PAGES * BASE_PAGE;
    let pools = [0, 1].map(|node| {
        let pool = Pool::builder(NodeId(node), bytes as u64).threads(1);
        pool.backend(backend.clone()).build().unwrap()
    });
    let region = Region::reserve_with(backend, bytes, PageSize::Base).unwrap();
    region.grow(bytes, &pools[0]).unwrap();
    let start = region.as_ptr().as_ptr() as usize;
    let page = move |page: usize| start + page * BASE_PAGE;
    (0..PAGES).for_each(|at| model.store(page(at), at as u64 + 1).unwrap());
    let job = Migration::new().range(&region, 0..bytes, &pools[1]).engine(engine).threads(1);
    let job = job.area_bytes(bytes).start().unwrap();
    let program = model.clone();
    let program = thread::spawn(move || {
        thread::yield_now();
        // SAFETY: a page of the region, whose contents stay.
        unsafe { program.advise(page(1), BASE_PAGE, Advice::DontDump) }.unwrap();
        program.store(page(2), 7).unwrap();
    });
    let report = job.wait();
    program.join().unwrap();
    let moved = report.pages.migrated == PAGES as u64;
    assert!(report.ended.is_completed() && moved, "advice on a part has kept pages: {report}");
    let whole =
        report.engines.iter().all(|part| !part.engine.engine().is_some_and(Engine::signals));
    assert!(whole, "system calls may fail because of advice on a part: {report}");
    for (at, word) in [1, 2, 7].into_iter().enumerate() {
        assert_eq!(model.load(page(at)), Ok(word), "a store is lost beside advice");
    }
    let kept = |at: usize| model.attributes_at(page(at)).unwrap().2;
    assert!(!kept(0) && !kept(2), "advice has reached other pages");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

#[test]
fn shuttle_directed_advice_on_a_part_keeps_no_page_from_moving() {
    for engine in [Engine::Precopy, Engine::StopCopy, Engine::WpSync] {
        each_schedule(1, ASLEEP, move || advise_beside_a_leap(engine.into()));
    }
    each_schedule(1, ASLEEP, || advise_beside_a_leap(EngineChoice::Auto));
}
