//! Tests of the engines that have a tracker, on a modelled machine. Under loom, the real attempt
//! runs while threads access the span, in all interleavings up to `LOOM_MAX_PREEMPTIONS` forced
//! switches. The other tests check single paths with plain threads, so that they run under Miri
//! too.

use std::sync::Arc;

use crate::backend::{
    Backend, CopyMethod, Errno, FailAt, FailMode, Mapping, MemoryFile, Model, Prot, Tracker,
};
use crate::engine::commit::AttemptResult;
#[cfg(not(loom))]
use crate::engine::effort::Counters;
use crate::engine::effort::NewAlias;
use crate::engine::processor::Processor;
use crate::engine::slot::{SlotTable, Span};
use crate::engine::views::{ViewSpan, Views};
use crate::engine::{
    AttemptEnd, Engine, Entries, Following, Frames, Messages, OldAlias, Tools, Work, attempt,
    choice,
};
use crate::units::{BASE_PAGE, NodeId, PageSize};
#[cfg(loom)]
use loom::thread;
#[cfg(not(loom))]
use std::thread;

const PAGES: usize = 2;
const LEN: usize = PAGES * BASE_PAGE;

/// A way to move an area: by which engine, and whether writers are held from the start.
#[derive(Clone, Copy, Debug)]
struct By {
    engine: Engine,
    hold: bool,
    /// The page size that is passed to the engine. The machine has base pages only; each stands for
    /// a hugetlb page where an engine treats those in another way.
    page: PageSize,
    /// Whether the span has a view, through which threads access its second page.
    view: bool,
}

impl By {
    /// Each engine that has a tracker; engines that can hold writers also with writers held; and
    /// `stop-copy` for hugetlb pages, which it unmaps by MADV_DONTNEED, and with a view.
    fn each() -> Vec<By> {
        let engines = Engine::ALL.into_iter().filter(|engine| engine.needs().is_some());
        let page = PageSize::Base;
        let ways = engines
            .flat_map(|engine| [false, true].map(|hold| By { engine, hold, page, view: false }));
        let closing = |page, view| By { engine: Engine::StopCopy, hold: false, page, view };
        let huge = PageSize::Huge2M;
        let others = [closing(huge, false), closing(page, true), closing(huge, true)];
        ways.filter(|by| !by.hold || by.can_hold()).chain(others).collect()
    }

    fn can_hold(self) -> bool {
        let situation = choice::Situation {
            engine: self.engine,
            may_fall_back: false,
            stand_in: None,
            has_tracker: true,
            exchange_unsupported: false,
            refused: 0,
            writable: true,
            page: PageSize::Base,
            hold: true,
            at_low_contention: None,
            low_contention: false,
        };
        choice::for_area(&situation).why == choice::Why::HELD
    }

    /// Whether a thread has to serve the tracker.
    fn is_served(self) -> bool {
        let tracker = self.engine.profile().tracker;
        tracker.is_some_and(|need| need.messages == Messages::Writers)
    }
}

/// A region of two pages over one file, the alias of another file, and the alias of the first file.
struct Fixture {
    model: Arc<Model>,
    table: SlotTable<1>,
    span: usize,
    /// A view of the span.
    view: Option<usize>,
    /// Its standby, or 0 for hugetlb pages.
    standby: usize,
    alias: usize,
    park: usize,
    files: [MemoryFile; 2],
    tracker: Tracker,
    by: By,
}

impl Fixture {
    fn new(by: By) -> Self {
        let model = Arc::new(Model::new());
        let files =
            ["source", "target"].map(|name| model.create_file(name, PageSize::Base, LEN).unwrap());
        let addresses = [(); 4].map(|()| model.reserve(LEN, BASE_PAGE).unwrap());
        let [span, alias, park, view] = addresses;
        let view = by.view.then_some(view);
        let has_standby = by.view && !by.page.is_hugetlb();
        let standby = if has_standby { model.reserve(LEN, BASE_PAGE).unwrap() } else { 0 };
        let all = [(span, files[0]), (alias, files[1]), (park, files[0])].into_iter();
        for (addr, file) in all.chain(view.map(|view| (view, files[0]))) {
            let prot = Prot::READ_WRITE;
            let mapping = Mapping { addr, len: LEN, file, offset: 0, prot, populate: true };
            // SAFETY: the range was reserved above.
            unsafe { model.map(&mapping) }.unwrap();
        }
        let table = SlotTable::new();
        assert_eq!(table.claim(), Some(0));
        let tracker = model.open_tracker(by.engine.needs_for(by.page).unwrap()).unwrap();
        Fixture { model, table, span, view, standby, alias, park, files, tracker, by }
    }

    /// An attempt on the view, from frames of one file to frames of another. Each file comes with
    /// its alias.
    fn attempt_to(
        &self,
        backend: &dyn Backend,
        from: (MemoryFile, usize),
        to: (MemoryFile, usize),
        freeze_at: u64,
        max_rounds: u32,
    ) -> AttemptEnd {
        let frames = |(file, alias)| Frames { alias, file, offset: 0 };
        let mut views = Views::NONE;
        self.view.iter().for_each(|addr| {
            views.push(ViewSpan { addr: *addr, node: NodeId(1), standby: self.standby });
        });
        let work = Work {
            span: Span { addr: self.span, len: LEN, prot: Prot::READ_WRITE },
            old: frames(from),
            new: frames(to),
            views,
            page: self.by.page,
            locked: false,
            may_exchange: !self.by.page.is_hugetlb(),
            hold: self.by.hold,
            maybe_split: false,
            method: CopyMethod::DEFAULT,
            following: Some(Following { tracker: self.tracker, freeze_at, max_rounds }),
            haste: None,
            copying: None,
        };
        let tools = Tools { slot: &self.table.slots[0], epoch: &self.table.epoch, backend };
        // SAFETY: only this migrator uses the fixture's span and frames. Each tracker of the model
        // that needs service is served.
        unsafe { attempt(self.by.engine, &tools, &work) }
    }

    fn attempt(&self, backend: &dyn Backend, freeze_at: u64, max_rounds: u32) -> AttemptEnd {
        let (from, to) = ((self.files[0], self.park), (self.files[1], self.alias));
        self.attempt_to(backend, from, to, freeze_at, max_rounds)
    }

    /// Runs `body`. If the tracker needs service, a thread serves it meanwhile.
    fn served<T>(self: &Arc<Self>, backend: Arc<dyn Backend>, body: impl FnOnce() -> T) -> T {
        if !self.by.is_served() {
            return body();
        }
        let f = self.clone();
        let server = thread::spawn(move || {
            f.model.serve_tracker(f.tracker, &mut |addr| {
                f.table.slots[0].notes.wanted(addr, |page, len| {
                    // SAFETY: a page of the fixture's own.
                    let _ = unsafe { backend.let_write(f.tracker, page, len) };
                });
            });
        });
        let result = body();
        self.model.end_tracker(self.tracker);
        server.join().unwrap();
        result
    }

    /// Repeats attempts until the area has moved, as a job does.
    fn migrate(self: &Arc<Self>, backend: Arc<dyn Backend>) -> Vec<AttemptResult> {
        self.served(backend.clone(), || self.migrate_served(&*backend))
    }

    fn migrate_served(&self, backend: &dyn Backend) -> Vec<AttemptResult> {
        let mut steps = Vec::new();
        loop {
            let AttemptEnd { step, after, old_alias, .. } = self.attempt(backend, 0, 1);
            steps.push(step);
            if step == AttemptResult::Migrated {
                return steps;
            }
            assert!(self.is_open(), "after {steps:?} nobody may have to wait");
            // A job does this before it retries.
            for (spoilt, at, file) in [
                (old_alias == OldAlias::Torn, self.park, self.files[0]),
                (after.new_alias != NewAlias::Untouched, self.alias, self.files[1]),
            ] {
                let (len, prot) = (LEN, Prot::READ_WRITE);
                let mapping = Mapping { addr: at, len, file, offset: 0, prot, populate: true };
                // SAFETY: an alias of the fixture's own.
                spoilt.then(|| unsafe { self.model.map(&mapping) }.unwrap());
            }
        }
    }

    fn processor(&self) -> Processor<'_, 1> {
        let view = self.view.map(|view| (view, self.span));
        Processor { model: &self.model, table: &self.table, view }
    }

    /// The address of a page: that of the second one lies in the view, if there is one.
    fn page(&self, page: usize) -> usize {
        self.view.filter(|_| page == 1).unwrap_or(self.span) + page * BASE_PAGE
    }

    fn is_migrated(&self) -> bool {
        let mut all = [self.span].into_iter().chain(self.view);
        let frame = |addr, i| self.model.frame_at(addr + i * BASE_PAGE);
        all.all(|addr| (0..PAGES).all(|i| frame(addr, i) == Some((self.files[1], i))))
    }

    /// Whether every access succeeds at once.
    fn is_open(&self) -> bool {
        let mine = |i| self.model.attributes_at(self.page(i)).unwrap().0 == Prot::READ_WRITE;
        let mut all = [self.span].into_iter().chain(self.view);
        (0..PAGES).all(mine) && !all.any(|addr| self.model.holds(addr, LEN))
    }
}

#[cfg(loom)]
mod loom_tests {
    use super::*;

    fn check(test: impl Fn(By) + Copy + Sync + Send + 'static) {
        By::each().into_iter().for_each(|by| check_with(by, 3, test));
    }

    fn check_with(by: By, preemptions: usize, test: impl Fn(By) + Copy + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound =
            Some(builder.preemption_bound.map_or(preemptions, |n| n.min(preemptions)));
        builder.max_branches = 10_000;
        builder.check(move || test(by));
    }

    /// A thread that stores to both pages.
    #[test]
    fn loom_precopy_one_writer() {
        check(|by| {
            let f = Arc::new(Fixture::new(by));
            f.model.store(f.page(0), 1).unwrap();
            let writer = {
                let f = f.clone();
                thread::spawn(move || {
                    f.processor().store(f.page(0), 2);
                    f.processor().store(f.page(1), 3);
                })
            };
            assert_eq!(f.migrate(f.model.clone()), [AttemptResult::Migrated]);
            writer.join().unwrap();
            assert_eq!(
                (f.model.load(f.page(0)), f.model.load(f.page(1))),
                (Ok(2), Ok(3)),
                "LOST a write"
            );
            assert!(f.is_migrated() && f.is_open());
        });
    }

    #[test]
    fn loom_precopy_two_writers() {
        let test = |by| {
            let f = Arc::new(Fixture::new(by));
            let writers = [(0, 5), (1, 6)].map(|(page, value)| {
                let f = f.clone();
                thread::spawn(move || f.processor().store(f.page(page), value))
            });
            assert_eq!(f.migrate(f.model.clone()), [AttemptResult::Migrated]);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            assert_eq!(
                (f.model.load(f.page(0)), f.model.load(f.page(1))),
                (Ok(5), Ok(6)),
                "LOST a write"
            );
            assert!(f.is_migrated() && f.is_open());
        };
        // A fourth thread makes many more interleavings.
        By::each()
            .into_iter()
            .for_each(|by| check_with(by, if by.is_served() { 2 } else { 3 }, test));
    }

    /// The kernel may drop page-table entries at any time, and with them the record of writes.
    #[test]
    fn loom_precopy_entries_are_dropped_under_a_writer() {
        check(|by| {
            let f = Arc::new(Fixture::new(by));
            let writer = {
                let f = f.clone();
                thread::spawn(move || {
                    f.processor().store(f.page(1), 7);
                    f.model.forget(f.page(1));
                    // Also drops the entry that may have moved to the alias.
                    f.model.forget(f.park + BASE_PAGE);
                })
            };
            assert_eq!(f.migrate(f.model.clone()), [AttemptResult::Migrated]);
            writer.join().unwrap();
            assert_eq!(f.model.load(f.page(1)), Ok(7), "LOST a write");
            assert!(f.is_migrated() && f.is_open());
        });
    }

    /// Any call fails once, in any way, while a writer stores. No write is lost, and no thread
    /// sleeps for ever.
    #[test]
    fn loom_precopy_a_call_fails_under_a_writer() {
        let modes = [FailMode::Before, FailMode::After, FailMode::Partial];
        for (by, at) in By::each().into_iter().flat_map(|by| (1..=9).map(move |at| (by, at))) {
            for mode in modes {
                let mut builder = loom::model::Builder::new();
                builder.preemption_bound = Some(1);
                builder.max_branches = 10_000;
                // The standard library's atomic keeps its value over all executions.
                let struck = Arc::new(std::sync::atomic::AtomicBool::new(false));
                let seen = struck.clone();
                builder.check(move || {
                    let f = Arc::new(Fixture::new(by));
                    let failing =
                        Arc::new(FailAt::new(f.model.clone(), at, mode, Errno(libc::ENOMEM)));
                    failing.arm();
                    let writer = {
                        let f = f.clone();
                        thread::spawn(move || f.processor().store(f.page(1), 9))
                    };
                    f.migrate(failing.clone());
                    writer.join().unwrap();
                    assert_eq!(f.model.load(f.page(1)), Ok(9), "LOST a write");
                    assert!(f.is_migrated() && f.is_open());
                    seen.fetch_or(failing.struck().is_some(), std::sync::atomic::Ordering::Relaxed);
                });
                // Each way makes at least these four calls: track, mark, map or exchange, wake.
                let struck = struck.load(std::sync::atomic::Ordering::Relaxed);
                assert!(struck || at > 4, "{by:?}: call {at} was not made to fail");
            }
        }
    }

    /// A thread that has stored through the region finds that value through a view, and the other
    /// way round.
    #[test]
    fn loom_stop_copy_a_thread_uses_both_mappings() {
        let test = |by| {
            let f = Arc::new(Fixture::new(by));
            let view = f.view.unwrap();
            let writer = {
                let f = f.clone();
                thread::spawn(move || {
                    for (to, from, value) in [(f.span, view, 1), (view, f.span, 2)] {
                        f.processor().store(to, value);
                        assert_eq!(f.processor().load(from), value, "an old value");
                    }
                })
            };
            assert_eq!(f.migrate(f.model.clone()), [AttemptResult::Migrated]);
            writer.join().unwrap();
            assert_eq!(f.model.load(f.span), Ok(2), "LOST a write");
            assert!(f.is_migrated() && f.is_open());
        };
        By::each().into_iter().filter(|by| by.view).for_each(|by| check_with(by, 3, test));
    }

    /// A reader sees only the old value or a newer one.
    #[test]
    fn loom_precopy_reader() {
        check(|by| {
            let f = Arc::new(Fixture::new(by));
            f.model.store(f.page(0), 1).unwrap();
            let reader = {
                let f = f.clone();
                thread::spawn(move || assert_eq!(f.processor().load(f.page(0)), 1))
            };
            f.migrate(f.model.clone());
            reader.join().unwrap();
            assert!(f.is_migrated() && f.is_open());
        });
    }
}

#[cfg(not(loom))]
mod plain_tests {
    use super::*;

    #[test]
    fn an_undisturbed_attempt_copies_once() {
        for by in By::each() {
            let f = Fixture::new(by);
            f.model.store(f.page(1) + 8, 42).unwrap();
            let AttemptEnd { step, counters, after, old_alias, .. } = f.attempt(&*f.model, 0, 1);
            assert_eq!(step, AttemptResult::Migrated);
            let Counters { copied, counts, written, held, .. } = counters;
            let huge = by.page.is_hugetlb();
            assert_eq!((copied, after.is_exchanged(), counts.repairs), (LEN as u64, !huge, 0));
            // If writers were held, no engine knows which pages they would have dirtied, so all
            // pages count.
            assert_eq!(written, if by.hold { PAGES as u64 } else { 0 });
            let left = match by.engine.follows() {
                _ if huge || by.is_served() => OldAlias::Untouched,
                true => OldAlias::HasTables(Entries::Marked),
                false => OldAlias::HasTables(Entries::Apart),
            };
            assert_eq!(old_alias, left);
            assert_eq!(held, by.hold);
            assert_eq!(f.model.load(f.page(1) + 8), Ok(42));
            assert!(f.is_migrated() && f.is_open());
        }
    }

    #[test]
    fn whatever_fails_leaves_the_area_whole() {
        for by in By::each() {
            let counting = {
                let f = Arc::new(Fixture::new(by));
                let counting = Arc::new(FailAt::never(f.model.clone()));
                counting.arm();
                f.migrate(counting.clone());
                counting.seen()
            };
            assert!(counting >= 4, "{counting} calls");
            for at in 1..=counting {
                for mode in [FailMode::Before, FailMode::After, FailMode::Partial] {
                    for errno in [libc::ENOMEM, libc::EINVAL] {
                        let f = Arc::new(Fixture::new(by));
                        f.model.store(f.page(0), 11).unwrap();
                        let failing =
                            Arc::new(FailAt::new(f.model.clone(), at, mode, Errno(errno)));
                        failing.arm();
                        let steps = f.migrate(failing.clone());
                        assert!(failing.struck().is_some());
                        assert_eq!(
                            f.model.load(f.page(0)),
                            Ok(11),
                            "{by:?}: call {at} failed {mode:?}: {steps:?}"
                        );
                        assert!(
                            f.is_migrated() && f.is_open(),
                            "{by:?}: call {at} failed {mode:?}: {steps:?}"
                        );
                    }
                }
            }
        }
    }

    /// Uses real threads, for behaviour that a checker's threads cannot show.
    #[test]
    fn writers_and_migrator_run_against_each_other() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let moves = if cfg!(miri) { 5 } else { 5_000 };
        for by in [By::each(), By::each()].concat() {
            let (f, stop) = (Arc::new(Fixture::new(by)), Arc::new(AtomicBool::new(false)));
            let writers: Vec<_> = (0..2)
                .map(|w| {
                    let (f, stop) = (f.clone(), stop.clone());
                    thread::spawn(move || {
                        let running = (1u64..).take_while(|_| !stop.load(Ordering::Relaxed));
                        running
                            .inspect(|value| f.processor().store(f.page(w), *value))
                            .last()
                            .unwrap_or(0)
                    })
                })
                .collect();
            f.served(f.model.clone(), || {
                let (mut here, mut there) = ((f.files[0], f.park), (f.files[1], f.alias));
                for _ in 0..moves {
                    let ended = f.attempt_to(&*f.model, here, there, 0, 2);
                    assert_eq!(ended.step, AttemptResult::Migrated);
                    // A job does this when it recycles the frames.
                    // SAFETY: the alias of frames that nobody uses.
                    unsafe {
                        f.model.untrack(f.tracker, here.1, LEN).unwrap();
                        f.model.protect(here.1, LEN, Prot::READ_WRITE).unwrap();
                    }
                    std::mem::swap(&mut here, &mut there);
                }
            });
            stop.store(true, Ordering::Relaxed);
            for (w, writer) in writers.into_iter().enumerate() {
                let last = writer.join().unwrap();
                assert_eq!(f.model.load(f.page(w)), Ok(last), "LOST a write");
            }
        }
    }
}
