//! Jobs whose threads are traced for some of the time: the other engine's tracker and thread come
//! when they are needed first, and go with the job.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shuttle::thread;

use super::below;
use super::explore::{at_random, expect, explore, with_few_switches};
use crate::backend::{Backend, Model};
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::processor::Processor;
use crate::{BASE_PAGE, Engine, Migration, NodeId, PageSize, Pool, Region, audit};

const PAGES: usize = 6;

#[derive(Default)]
struct Seen {
    /// Pages that moved by another engine because of the tracer, and by the job's own.
    traced: AtomicU64,
    own: AtomicU64,
    /// Jobs that have both.
    both: AtomicU64,
}

/// A thread stores to each page while jobs move them, and another one traces the program now and
/// then.
fn leap_while_a_tracer_comes_and_goes(seen: &Seen) {
    let model = Arc::new(Model::new());
    let backend: Arc<dyn Backend> = model.clone();
    let pools = [0, 1].map(|node| {
        let pool = Pool::builder(NodeId(node), (PAGES * BASE_PAGE) as u64).threads(1);
        pool.backend(backend.clone()).build().unwrap()
    });
    let region = Region::reserve_with(backend, PAGES * BASE_PAGE, PageSize::Base).unwrap();
    region.grow(PAGES * BASE_PAGE, &pools[0]).unwrap();
    let start = region.as_ptr().as_ptr() as usize;
    let machine = model.clone();
    let writer = thread::spawn(move || {
        let processor: Processor<'_, MAX_THREADS> =
            Processor { model: &machine, table: &SLOTS, view: None };
        let mut last = [0; PAGES];
        for value in 1..40 {
            let page = below(PAGES);
            let addr = start + page * BASE_PAGE;
            assert_eq!(processor.load(addr), last[page], "LOST: page {page}");
            processor.store(addr, value);
            last[page] = value;
        }
        last
    });
    let machine = model.clone();
    let tracer = thread::spawn(move || {
        for _ in 0..8 {
            machine.set_tracer((below(2) == 0).then_some(7));
            (0..below(60)).for_each(|_| thread::yield_now());
        }
    });
    for leap in 0..2 {
        let job = Migration::new().range(&region, 0..PAGES * BASE_PAGE, &pools[1 - leap]);
        let job = job.area_bytes((1 + below(2)) * BASE_PAGE).threads(1 + below(2)).start();
        let report = job.unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        let by = |is: &dyn Fn(Engine) -> bool| -> u64 {
            let parts = report.engines.iter();
            let parts = parts.filter(|part| part.engine.engine().is_some_and(is));
            parts.map(|part| part.pages).sum()
        };
        let (traced, own) = (by(&|engine| engine == Engine::WpSync), by(&Engine::readers_wait));
        assert_eq!(traced + own, PAGES as u64, "{report}");
        seen.traced.fetch_add(traced, Relaxed);
        seen.own.fetch_add(own, Relaxed);
        seen.both.fetch_add(u64::from(traced > 0 && own > 0), Relaxed);
    }
    let last = writer.join().unwrap();
    tracer.join().unwrap();
    for (page, value) in last.into_iter().enumerate() {
        assert_eq!(model.load(start + page * BASE_PAGE), Ok(value), "LOST: page {page}");
    }
    assert_eq!(model.trackers_open(), 0);
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

#[test]
fn shuttle_a_tracer_comes_and_goes() {
    let seen = Arc::new(Seen::default());
    let counts = seen.clone();
    explore(at_random(0), move || leap_while_a_tracer_comes_and_goes(&counts));
    let counts = seen.clone();
    explore(with_few_switches(4, 0), move || leap_while_a_tracer_comes_and_goes(&counts));
    expect(&[
        ("pages moved because of a tracer", &seen.traced),
        ("pages moved by the own engine", &seen.own),
        ("jobs with both", &seen.both),
    ]);
}
