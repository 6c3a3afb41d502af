//! A job with a mover of its own kind: plain memory that several views show, without regions,
//! pools, frames or system calls. It shows that a job needs none of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::area::{Area, AreaOutcome, By, Reason, Verdict};
use super::books::Books;
use super::handle::Stop;
use super::outcomes::{Item, PageOutcome};
use super::pace::{Pace, Seen, Unit};
use super::plan::RetryPolicy;
use super::report::{Ended, Report, Warning, WarningKind};
use super::run::{Running, Settings};
use super::source::Source;
use super::{Mover, Terms};
use crate::backend::{Call, Errno};
use crate::engine::Engine;
use crate::engine::choice::Why;
use crate::engine::effort::Counters;
use crate::error::Error;
use crate::sync::Instant;
use crate::units::RegionId;

const PAGES: u64 = 256;
const PAGE_BYTES: usize = 64;
/// Duration of a call for each of its pages.
const PAGE_NS: u64 = 10_000;
/// The most pages of a call that keep to the wait budget.
const BUDGET_PAGES: u64 = 16;

/// Memory of pages that two views show. Moving a page changes both views.
struct Memory {
    /// Contents by frame: the old frames, then the new ones.
    frames: Vec<AtomicU64>,
    /// The frame that each view shows, by page.
    views: [Vec<AtomicU64>; 2],
    /// How often the entries of the page tables have moved, by page.
    tables: Vec<AtomicU32>,
    /// How many more times a page is refused with EBUSY.
    busy: Vec<AtomicU32>,
    /// Pages that can never be moved.
    gone: BTreeSet<u64>,
    /// Pages that are kept in place until the mover has been asked this often.
    kept: Vec<AtomicU32>,
    /// Pages that threads touch all the time: one thread waits while such a page is closed.
    busy_from: u64,
    /// Sizes of untried areas, in the order of their attempts.
    sizes: std::sync::Mutex<Vec<u64>>,
    recycled: AtomicU32,
}

impl Memory {
    fn new() -> Memory {
        let numbers = |from: u64| (0..PAGES).map(|page| AtomicU64::new(from + page)).collect();
        let zeros = || (0..PAGES).map(|_| AtomicU32::new(0)).collect();
        let old = (0..PAGES).map(|page| AtomicU64::new(page * 3 + 1));
        Memory {
            frames: old.chain((0..PAGES).map(|_| AtomicU64::new(0))).collect(),
            views: [numbers(0), numbers(0)],
            tables: zeros(),
            busy: zeros(),
            gone: BTreeSet::new(),
            kept: zeros(),
            busy_from: PAGES,
            sizes: std::sync::Mutex::default(),
            recycled: AtomicU32::new(0),
        }
    }

    /// A page as one view shows it: whether it has moved, and its contents.
    fn seen(&self, view: usize, page: u64) -> (bool, u64) {
        let frame = self.views[view][page as usize].load(Relaxed);
        (frame >= PAGES, self.frames[frame as usize].load(Relaxed))
    }

    fn shows_all(&self, moved: impl Fn(u64) -> bool) {
        for page in 0..PAGES {
            for view in [0, 1] {
                assert_eq!(self.seen(view, page), (moved(page), page * 3 + 1), "page {page}");
            }
        }
    }
}

/// Moves pages of [`Memory`] one by one within a call, as `move_pages` does: some of them move, and
/// each of the others has a reason.
struct PageMover {
    memory: Arc<Memory>,
    /// Pages keep their frames, and only the entries of the page tables move.
    tables_only: bool,
    /// How many attempts are left until the mover stops the job.
    attempts_left: AtomicU32,
    /// The reason that it gives for areas that it does not close first.
    why: Why,
}

impl PageMover {
    fn move_page(&self, page: u64) -> Verdict {
        let Memory { frames, views, tables, busy, gone, .. } = &*self.memory;
        let refused = |errno| Reason::Refused(Call::QueryNodes, Errno(errno));
        if gone.contains(&page) {
            return Verdict::GivenUp(refused(libc::ENOENT));
        }
        let count_down = |left: u32| left.checked_sub(1);
        if busy[page as usize].fetch_update(Relaxed, Relaxed, count_down).is_ok() {
            return Verdict::Refused(refused(libc::EBUSY));
        }
        tables[page as usize].fetch_add(1, Relaxed);
        if self.tables_only {
            return Verdict::Moved;
        }
        let new = PAGES + page;
        frames[new as usize].store(frames[page as usize].load(Relaxed), Relaxed);
        views.iter().for_each(|view| view[page as usize].store(new, Relaxed));
        Verdict::Moved
    }
}

impl Mover for PageMover {
    type Worker = u64;

    fn worker(&self, number: usize, _books: Books<'_>) -> u64 {
        number as u64
    }

    fn may_go_on(&self, books: Books<'_>) -> Result<(), Stop> {
        let left = self.attempts_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| {
            books.warn_once(Warning::new(WarningKind::Cpuset, "stopped by the mover"));
            Stop::CpusetChanged
        })
    }

    fn attempt(&self, _worker: &mut u64, area: &Area, terms: &Terms<'_>) -> AreaOutcome {
        if area.is_new() {
            self.memory.sizes.lock().unwrap().push(area.len());
        }
        // Each area is moved by an engine of its own.
        let engine = Engine::ALL[(area.pages.start / BUDGET_PAGES) as usize % Engine::ALL.len()];
        let why = if terms.low_contention { Why::LowContention } else { self.why };
        let by = By { engine: engine.into(), why };
        if let Some(page) = area.pages.clone().find(|page| self.is_page_kept(*page)) {
            return AreaOutcome::kept(by, page..page + 1, Reason::Guarded);
        }
        let runs: Vec<_> =
            area.pages.clone().map(|page| (page..page + 1, self.move_page(page))).collect();
        let mut counters = Counters::default();
        if !self.tables_only {
            counters.copied = area.len() * PAGE_BYTES as u64;
        }
        // Other threads wait for the whole call.
        let window_ns = area.len() * PAGE_NS;
        terms.books.count(Call::QueryNodes, 1);
        counters.window_ns = window_ns;
        let touched = area.pages.end > self.memory.busy_from;
        counters.waiters = u64::from(touched && terms.low_contention);
        let written = if touched && !terms.low_contention { area.len() } else { 0 };
        let left = if terms.low_contention { area.len() } else { 0 };
        let seen = Some(Seen { written, left, window_ns, copy_ns: window_ns });
        AreaOutcome { runs, by, counters, seen, disturbed: None }
    }

    fn is_kept(&self, area: &Area) -> bool {
        area.pages.clone().any(|page| {
            let count_down = |left: u32| left.checked_sub(1);
            let kept = &self.memory.kept[page as usize];
            let _ = kept.fetch_update(Relaxed, Relaxed, count_down);
            self.is_page_kept(page)
        })
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        let (what, remedy) = ("page", String::new());
        Error::BadArgument { what, reason: format!("{:?}: {why}", area.pages), remedy }
    }

    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        moved();
        self.memory.recycled.fetch_add(1, Relaxed);
        books.warn(Warning::new(WarningKind::Recycling, "recycled"));
    }
}

impl PageMover {
    fn is_page_kept(&self, page: u64) -> bool {
        self.memory.kept[page as usize].load(Relaxed) > 0
    }
}

/// Moves the memory by two workers, and waits for it.
fn run(memory: &Arc<Memory>, tables_only: bool, attempts: u32, patience: Duration) -> Report {
    run_by(2, memory, tables_only, attempts, patience)
}

/// Moves the memory by some workers, and waits for it.
fn run_by(
    threads: usize,
    memory: &Arc<Memory>,
    tables_only: bool,
    attempts: u32,
    patience: Duration,
) -> Report {
    let attempts_left = AtomicU32::new(attempts);
    let memory = memory.clone();
    let mover = PageMover { memory, tables_only, attempts_left, why: Why::AsChosen };
    run_mover(mover, threads, patience, None)
}

/// Runs a job with this mover, and waits for it.
fn run_mover(
    mover: PageMover,
    threads: usize,
    patience: Duration,
    low_contention_pace: Option<Pace>,
) -> Report {
    let item = Item {
        source: Source::Region(RegionId(7)),
        pages: 0..PAGES,
        page_bytes: PAGE_BYTES,
        left: Vec::new(),
    };
    let budget = Duration::from_nanos(BUDGET_PAGES * PAGE_NS);
    let settings = Settings {
        policy: RetryPolicy { reduction_factor: 2, max_disturbed: 3, max_refused: 4 },
        pace: Pace::adaptive(64, 1, 128, 24, budget),
        low_contention_pace,
        rate_limit: None,
        patience,
        most_pieces: usize::MAX,
        page_bytes: PAGE_BYTES,
        threads,
        most_held_early: 0,
        deadline: None,
        engine: Engine::ALL[0].into(),
        engine_reason: "asked for".into(),
    };
    let areas = vec![Area::new(0, 0, 0..PAGES)];
    let run = Running::new(mover, vec![item], areas, settings, Vec::new(), Instant::now());
    run.start(None).unwrap().wait()
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn each_run_of_pages_has_its_outcome_and_its_reason() {
    let mut memory = Memory::new();
    memory.gone = [5, 6, 100].into();
    memory.busy[40].store(2, Relaxed);
    memory.busy[41].store(1000, Relaxed);
    let memory = Arc::new(memory);
    // The areas of one worker are the same in each run.
    let report = run_by(1, &memory, false, u32::MAX, LONG);
    let stays = [5, 6, 41, 100];
    memory.shows_all(|page| !stays.contains(&page));
    let refused = |errno| Some(Reason::Refused(Call::QueryNodes, Errno(errno)));
    let failed: Vec<_> = report
        .runs
        .iter()
        .filter(|run| run.outcome != PageOutcome::Migrated)
        .map(|run| (run.source, run.range.clone(), run.outcome, run.reason))
        .collect();
    let run = |pages: std::ops::Range<usize>, errno| {
        let bytes = pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
        (Source::Region(RegionId(7)), bytes, PageOutcome::Failed, refused(errno))
    };
    let wanted = [run(5..7, libc::ENOENT), run(41..42, libc::EBUSY), run(100..101, libc::ENOENT)];
    assert_eq!(failed, wanted);
    assert_eq!((report.pages.migrated, report.pages.failed), (PAGES - 4, 4), "{report}");
    assert!(matches!(report.ended, Ended::Failed(_)), "{report}");
    assert!(report.to_string().contains("region 7, bytes 320..448: "), "{report}");
    // Each area was moved by an engine of its own.
    assert_eq!(report.engines.len(), Engine::ALL.len(), "{report}");
    assert_eq!(report.engines.iter().map(|part| part.pages).sum::<u64>(), PAGES - 4);
    assert_eq!(memory.recycled.load(Relaxed), 1);
    assert_eq!(report.warnings, ["recycled"]);
}

#[test]
fn areas_are_paced_by_how_long_a_call_takes() {
    let memory = Arc::new(Memory::new());
    // With one worker each area is over before the size of the next one is chosen.
    let report = run_by(1, &memory, false, u32::MAX, LONG);
    assert!(report.ended.is_completed(), "{report}");
    let sizes = memory.sizes.lock().unwrap();
    assert_eq!(sizes[0], 64);
    assert_eq!(sizes[1], 32);
    assert!(sizes[2..].iter().all(|pages| *pages == BUDGET_PAGES), "{sizes:?}");
    assert_eq!((report.counts.windows_over_budget, report.windows.count), (2, sizes.len() as u64));
    assert_eq!(report.calls.values().sum::<u64>(), sizes.len() as u64);
}

#[test]
fn areas_are_closed_first_while_few_threads_come_to_wait() {
    let mut memory = Memory::new();
    memory.busy_from = PAGES / 2;
    let memory = Arc::new(memory);
    let attempts_left = AtomicU32::new(u32::MAX);
    let why = Why::Contended;
    let mover = PageMover { memory: memory.clone(), tables_only: false, attempts_left, why };
    let unit = Unit { pages: 1, base_pages: 1 };
    let closing = Pace::budgeted(4, 1, 4, unit, Duration::from_nanos(14 * PAGE_NS));
    let report = run_mover(mover, 1, LONG, Some(closing));
    memory.shows_all(|_| true);
    let few: u64 = report
        .engines
        .iter()
        .filter(|part| part.why.contains("closed before"))
        .map(|part| part.pages)
        .sum();
    // The quiet half, and the areas after which the job noticed that threads wait.
    assert_eq!(few, PAGES / 2 + 11 * 4, "{report}");
    assert_eq!(report.pages.migrated, PAGES, "{report}");
    let sizes = memory.sizes.lock().unwrap();
    assert!(sizes[..few as usize / 4].iter().all(|pages| *pages == 4), "{sizes:?}");
    assert!(sizes[few as usize / 4..].iter().all(|pages| *pages > 4), "{sizes:?}");
}

#[test]
fn page_tables_alone_move_without_a_copy() {
    let memory = Arc::new(Memory::new());
    let report = run(&memory, true, u32::MAX, LONG);
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated, PAGES, "{report}");
    assert!(memory.tables.iter().all(|moved| moved.load(Relaxed) == 1));
    memory.shows_all(|_| false);
    let Report { bytes, bytes_copied, bytes_recopied, .. } = report;
    assert_eq!((bytes, bytes_copied, bytes_recopied), (PAGES * PAGE_BYTES as u64, 0, 0));
}

#[test]
fn kept_pages_are_waited_for_and_left_when_the_time_is_over() {
    let memory = Memory::new();
    memory.kept[10].store(3, Relaxed);
    let memory = Arc::new(memory);
    let report = run(&memory, false, u32::MAX, LONG);
    assert!(report.ended.is_completed(), "{report}");
    memory.shows_all(|_| true);

    let memory = Memory::new();
    for page in [10, 200] {
        memory.kept[page].store(u32::MAX, Relaxed);
    }
    let memory = Arc::new(memory);
    let report = run(&memory, false, u32::MAX, Duration::from_millis(5));
    memory.shows_all(|page| page != 10 && page != 200);
    assert!(matches!(report.ended, Ended::Failed(_)), "{report}");
    let kept = report.runs.iter().filter(|run| run.reason == Some(Reason::Guarded));
    assert_eq!((kept.count(), report.pages.busy), (2, 2), "{report}");
}

#[test]
fn a_mover_can_stop_its_job() {
    let memory = Arc::new(Memory::new());
    let report = run(&memory, false, 2, LONG);
    assert!(matches!(report.ended, Ended::CpusetChanged), "{report}");
    let rest = report.runs.iter().find(|run| run.outcome == PageOutcome::NotAttempted).unwrap();
    assert_eq!(rest.reason, Some(Reason::Stopped));
    assert!(report.pages.migrated >= 64 && report.pages.not_attempted > 0, "{report}");
    assert!(report.warnings.iter().any(|warning| warning.kind == WarningKind::Cpuset));
}
