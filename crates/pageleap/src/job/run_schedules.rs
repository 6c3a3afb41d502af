//! Workers of a job that wait for one another, under each schedule that matters. The mover touches
//! no memory: it reports each page as moved.

use std::sync::Arc;
use std::time::Duration;

use super::area::{Area, AreaOutcome, By, Reason, Verdict};
use super::books::Books;
use super::outcomes::Item;
use super::pace::{Pace, Unit};
use super::plan::RetryPolicy;
use super::run::{Running, Settings};
use super::source::Source;
use super::threads::ThreadCount;
use super::{Mover, Terms};
use crate::engine::Engine;
use crate::engine::choice::Why;
use crate::engine::effort::Counters;
use crate::error::Error;
use crate::schedules::bounded::each_schedule;
use crate::sync::{Instant, lock};
use crate::units::RegionId;

const PAGE_BYTES: usize = 64;
const WORKERS: usize = 2;

/// A mover that reports each area as moved at once.
struct AtOnce;

impl Mover for AtOnce {
    type Worker = ();

    fn worker(&self, _number: usize, _books: Books<'_>) {}

    fn attempt(&self, _worker: &mut (), area: &Area, _terms: &Terms<'_>) -> AreaOutcome {
        let runs = vec![(area.pages.clone(), Verdict::Moved)];
        let by = By { engine: Engine::ALL[0].into(), why: Why::AsChosen };
        AreaOutcome { runs, by, counters: Counters::default(), seen: None, disturbed: None }
    }

    fn error(&self, _area: &Area, _why: Reason) -> Error {
        unreachable!("each area moves")
    }

    fn finish(self, _books: Books<'_>, moved: &mut dyn FnMut()) {
        moved();
    }
}

/// A job of two workers that has one page to move.
fn one_page() -> Running<AtOnce> {
    let source = Source::Region(RegionId(7));
    let item = Item { source, pages: 0..1, page_bytes: PAGE_BYTES, left: Vec::new() };
    let unit = Unit { pages: 1, base_pages: 1 };
    let settings = Settings {
        policy: RetryPolicy { reduction_factor: 2, max_disturbed: 3, max_refused: 4 },
        pace: Pace::budgeted(1, 1, 1, unit, Duration::from_millis(1)),
        low_contention_pace: None,
        rate_limit: None,
        patience: Duration::ZERO,
        most_pieces: usize::MAX,
        page_bytes: PAGE_BYTES,
        threads: WORKERS,
        most_held_early: 0,
        deadline: None,
        engine: Engine::ALL[0].into(),
        engine_reason: "asked for".into(),
    };
    let areas = vec![Area::new(0, 0, 0..1)];
    Running::new(AtOnce, vec![item], areas, settings, Vec::new(), Instant::now())
}

/// A count of threads in the middle of a trial, so that the last thread does not copy.
fn with_the_last_one_parked() -> ThreadCount {
    let mut threads = ThreadCount::new(WORKERS);
    for ms in 0.. {
        if threads.active() < WORKERS {
            break;
        }
        threads.observe(Duration::from_millis(ms), 0);
    }
    threads
}

#[test]
fn shuttle_directed_who_waits_for_the_last_area_learns_that_it_is_done() {
    each_schedule(1, "a worker waits for an area that is done", || {
        assert!(one_page().start(None).unwrap().wait().ended.is_completed());
    });
}

#[test]
fn shuttle_directed_a_parked_worker_learns_that_the_job_is_over() {
    each_schedule(1, "a parked worker sleeps although its job is over", || {
        let job = one_page();
        lock(&job.state).threads = with_the_last_one_parked();
        let shared = Arc::clone(job.shared());
        assert!(job.start(None).unwrap().wait().ended.is_completed());
        assert_eq!(shared.bytes_migrated(), PAGE_BYTES as u64);
    });
}
