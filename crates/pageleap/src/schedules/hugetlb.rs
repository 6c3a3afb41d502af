//! Jobs that move hugetlb pages while threads store to them, and while one call is refused. The
//! engine `stop-copy` drops their page tables and maps the new frames: it has no exchange to undo.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shuttle::thread;

use super::below;
use super::explore::{at_random_seldom, expect, explore};
use crate::backend::{Backend, Errno, FailAt, FailMode, Model};
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::processor::Processor;
use crate::{BASE_PAGE, Engine, EngineChoice, Migration, NodeId, PageSize, Pool, Region, audit};

const PAGES: usize = 2;
const PAGE: usize = PageSize::Huge2M.bytes();
/// Where in a page threads store: each place is copied in another step.
const PLACES: [usize; 3] = [0, PAGE / 2, PAGE - BASE_PAGE];
const WRITERS: usize = 2;
/// The latest call that may be refused.
const LATEST: usize = 30;

#[derive(Default)]
struct Seen {
    /// Pages that moved by `stop-copy`, and by another engine.
    stopped: AtomicU64,
    other: AtomicU64,
    struck: AtomicU64,
}

fn any_engine() -> EngineChoice {
    match below(4) {
        0 => EngineChoice::Auto,
        1 => Engine::WpSync.into(),
        _ => Engine::StopCopy.into(),
    }
}

/// The pages move to the other pool and back. `refuse`: one call of these jobs fails.
fn leap_under_writers(seen: &Seen, refuse: bool) {
    let model = Arc::new(Model::with_hugetlb());
    let failing = Arc::new(if refuse {
        let mode = [FailMode::Before, FailMode::After, FailMode::Partial][below(3)];
        FailAt::new(model.clone(), 1 + below(LATEST) as u64, mode, Errno(libc::ENOMEM))
    } else {
        FailAt::never(model.clone())
    });
    let backend: Arc<dyn Backend> = failing.clone();
    let pools = [0, 1].map(|node| {
        let pool = Pool::builder(NodeId(node), (PAGES * PAGE) as u64).page_size(PageSize::Huge2M);
        pool.threads(1).backend(backend.clone()).build().unwrap()
    });
    let region = Region::reserve_with(backend, PAGES * PAGE, PageSize::Huge2M).unwrap();
    region.grow(PAGES * PAGE, &pools[0]).unwrap();
    let start = region.as_ptr().as_ptr() as usize;
    let place = move |at: usize| start + at / PLACES.len() * PAGE + PLACES[at % PLACES.len()];
    let writers = [0; WRITERS].map(|_| model.clone());
    let mut number = 0;
    let writers = writers.map(|machine| {
        let word = number * 8;
        number += 1;
        thread::spawn(move || {
            let processor: Processor<'_, MAX_THREADS> =
                Processor { model: &machine, table: &SLOTS, view: None };
            let mut last = [0; PAGES * PLACES.len()];
            for value in 1..20 {
                let at = below(last.len());
                assert_eq!(processor.load(place(at) + word), last[at], "LOST: place {at}");
                processor.store(place(at) + word, value);
                last[at] = value;
            }
            last
        })
    });
    failing.arm();
    let leap = |to: &Pool, engine: EngineChoice| {
        let job = Migration::new().range(&region, 0..PAGES * PAGE, to).engine(engine);
        let report = job.area_bytes((1 + below(2)) * PAGE).threads(1 + below(2)).start()?.wait();
        for part in &report.engines {
            let count = if part.engine == Engine::StopCopy { &seen.stopped } else { &seen.other };
            count.fetch_add(part.pages, Relaxed);
        }
        Ok::<_, crate::Error>(report)
    };
    for to in [1, 0] {
        match leap(&pools[to], any_engine()) {
            Ok(report) if report.ended.is_completed() => {}
            Ok(report) => assert!(failing.struck().is_some(), "{report}"),
            Err(error) => assert!(failing.struck().is_some(), "{error}"),
        }
    }
    let last = writers.map(|writer| writer.join().unwrap());
    seen.struck.fetch_add(u64::from(failing.struck().is_some()), Relaxed);
    failing.disarm();
    let check = || {
        for (word, last) in last.iter().enumerate() {
            for (at, value) in last.iter().enumerate() {
                let found = model.load(place(at) + word * 8);
                assert_eq!(found, Ok(*value), "LOST: place {at} of writer {word}");
            }
        }
        assert!(!model.holds(start, PAGES * PAGE), "who touches a page would wait for ever");
        assert_eq!(model.trackers_open(), 0);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    };
    check();
    // After a refusal the next job works.
    let free: Vec<u64> = pools.iter().map(Pool::free_bytes).collect();
    let to = usize::from(free[1] == pools[1].bytes());
    if free[to] == pools[to].bytes() {
        let report = leap(&pools[to], Engine::StopCopy.into()).unwrap();
        assert!(report.ended.is_completed(), "{report}");
        check();
    }
}

#[test]
fn shuttle_hugetlb_pages_move_under_writers() {
    let seen = Arc::new(Seen::default());
    for refuse in [false, true] {
        let counts = seen.clone();
        // A page has 512 page table entries: a schedule takes as long as many of base pages.
        explore(at_random_seldom(10), move || leap_under_writers(&counts, refuse));
    }
    expect(&[
        ("pages moved by stop-copy", &seen.stopped),
        ("pages moved otherwise", &seen.other),
        ("refused calls", &seen.struck),
    ]);
}
