//! Tests of the engine `mprotect` on a modelled machine.
//!
//! The `loom_` tests run the real attempt and the real [`SlotTable::resolve`] under loom. Loom
//! tries all interleavings of a migrator and writers up to `LOOM_MAX_PREEMPTIONS` forced switches
//! (3 by default: seconds; 4: minutes). The other tests check single paths with plain threads, so
//! that they run under Miri too.

use std::sync::Arc;

use crate::backend::{Backend, CopyMethod, Errno, FailAt, FailMode, Mapping, Model, Prot};
use crate::engine::commit::AttemptResult;
use crate::engine::processor::Processor;
use crate::engine::slot::{Slot, SlotTable, Span};
use crate::engine::views::Views;
use crate::engine::{AttemptEnd, Engine, Frames, Tools, Work, attempt};
use crate::units::{BASE_PAGE, PageSize};

const PAGES: usize = 2;
const LEN: usize = PAGES * BASE_PAGE;

/// A region of two pages over one file, and the aliases of this file and of another.
struct Fixture {
    model: Arc<Model>,
    table: SlotTable<1>,
    view: usize,
    /// The view's first mapping.
    source: Mapping,
    old: Frames,
    new: Frames,
    exchange: bool,
}

impl Fixture {
    fn new(exchange: bool) -> Self {
        let model = Arc::new(Model::new());
        let files =
            ["old", "new"].map(|name| model.create_file(name, PageSize::Base, LEN).unwrap());
        let [view, new, old] = [(); 3].map(|()| model.reserve(LEN, BASE_PAGE).unwrap());
        let mapping = |addr, file| Mapping {
            addr,
            len: LEN,
            file,
            offset: 0,
            prot: Prot::READ_WRITE,
            populate: true,
        };
        let source = mapping(view, files[0]);
        // SAFETY: the ranges were reserved above.
        unsafe {
            model.map(&source).unwrap();
            model.map(&mapping(new, files[1])).unwrap();
            model.map(&mapping(old, files[0])).unwrap();
        }
        let table = SlotTable::new();
        assert_eq!(table.claim(), Some(0));
        let old = Frames { alias: old, file: files[0], offset: 0 };
        let new = Frames { alias: new, file: files[1], offset: 0 };
        Fixture { model, table, view, source, old, new, exchange }
    }

    fn slot(&self) -> &Slot {
        &self.table.slots[0]
    }

    fn work(&self, hold: bool) -> Work {
        Work {
            span: Span { addr: self.view, len: LEN, prot: Prot::READ_WRITE },
            old: self.old,
            new: self.new,
            views: Views::NONE,
            page: PageSize::Base,
            locked: false,
            may_exchange: self.exchange,
            hold,
            maybe_split: false,
            method: CopyMethod::DEFAULT,
            following: None,
            haste: None,
            copying: None,
        }
    }

    fn attempt_work(&self, backend: &dyn Backend, work: &Work) -> AttemptEnd {
        let tools = Tools { slot: self.slot(), epoch: &self.table.epoch, backend };
        // SAFETY: the fixture's span and frames are used by this migrator only.
        unsafe { attempt(Engine::Mprotect, &tools, work) }
    }

    fn attempt(&self, backend: &dyn Backend, hold: bool) -> (AttemptResult, AttemptEnd) {
        let ended = self.attempt_work(backend, &self.work(hold));
        (ended.step, ended)
    }

    /// One attempt on one page.
    #[cfg(loom)]
    fn attempt_page(&self, page: usize, hold: bool) -> AttemptResult {
        let offset = page * BASE_PAGE;
        let mut work = self.work(hold);
        work.span = Span { addr: self.view + offset, len: BASE_PAGE, ..work.span };
        for frames in [&mut work.old, &mut work.new] {
            frames.alias += offset;
            frames.offset = offset as u64;
        }
        self.attempt_work(&*self.model, &work).step
    }

    /// Repeats attempts until the area has moved, as a job does: the first is tracked, the others
    /// are held.
    fn migrate(&self, backend: &dyn Backend) -> Vec<AttemptResult> {
        let mut steps = vec![self.attempt(backend, false).0];
        while *steps.last().unwrap() != AttemptResult::Migrated {
            assert!(self.is_accessible(), "after {steps:?} the area must be as its user set it");
            steps.push(self.attempt(backend, true).0);
        }
        steps
    }

    fn processor(&self) -> Processor<'_, 1> {
        Processor { model: &self.model, table: &self.table, view: None }
    }

    fn store(&self, addr: usize, value: u64) {
        self.processor().store(addr, value);
    }

    fn load(&self, addr: usize) -> u64 {
        self.processor().load(addr)
    }

    fn is_migrated(&self) -> bool {
        (0..PAGES)
            .all(|i| self.model.frame_at(self.view + i * BASE_PAGE) == Some((self.new.file, i)))
    }

    fn is_accessible(&self) -> bool {
        (0..PAGES).all(|i| {
            self.model.attributes_at(self.view + i * BASE_PAGE).unwrap().0 == Prot::READ_WRITE
        })
    }
}

#[cfg(loom)]
mod loom_tests {
    use super::*;
    use loom::thread;

    fn check(test: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(3));
        builder.max_branches = 10_000;
        builder.check(test);
    }

    /// One writer runs against a migrator that retries: the writes survive in any order.
    fn one_writer(exchange: bool) {
        check(move || {
            let f = Arc::new(Fixture::new(exchange));
            let addr = f.view;
            f.model.store(addr, 1).unwrap();
            let writer = {
                let f = f.clone();
                thread::spawn(move || {
                    f.store(addr, 2);
                    f.store(addr + BASE_PAGE, 3);
                })
            };
            f.migrate(&*f.model);
            writer.join().unwrap();
            assert_eq!((f.load(addr), f.load(addr + BASE_PAGE)), (2, 3), "LOST a write");
            assert!(f.is_migrated() && f.is_accessible());
        });
    }

    #[test]
    fn loom_one_writer_exchange() {
        one_writer(true);
    }

    #[test]
    fn loom_one_writer_map() {
        one_writer(false);
    }

    /// Two writers to the same area: one opens it while the other waits or comes late.
    #[test]
    fn loom_two_writers() {
        check(|| {
            let f = Arc::new(Fixture::new(true));
            let addr = f.view;
            let writers = [(addr, 5), (addr + BASE_PAGE, 6)].map(|(addr, value)| {
                let f = f.clone();
                thread::spawn(move || f.store(addr, value))
            });
            f.migrate(&*f.model);
            for writer in writers {
                writer.join().unwrap();
            }
            assert_eq!((f.load(addr), f.load(addr + BASE_PAGE)), (5, 6), "LOST a write");
            assert!(f.is_migrated() && f.is_accessible());
        });
    }

    /// A writer that was held up in one attempt must not act on the next attempt. The first two
    /// attempts track writes.
    #[test]
    fn loom_late_writer_meets_the_next_attempt() {
        check(|| {
            let f = Arc::new(Fixture::new(true));
            let addr = f.view;
            let writer = {
                let f = f.clone();
                thread::spawn(move || f.store(addr, 7))
            };
            let mut steps = 0;
            while f.attempt(&*f.model, steps >= 2).0 != AttemptResult::Migrated {
                assert!(f.is_accessible(), "after a disturbed attempt the area must be writable");
                steps += 1;
            }
            writer.join().unwrap();
            assert_eq!(f.load(addr), 7, "LOST a write");
            assert!(f.is_accessible());
        });
    }

    /// Pages move one after the other through the same slot. A writer stores to the page that moves
    /// next, or to the one that moved before. So the slot is reused while the writer may still look
    /// at it.
    #[test]
    fn loom_a_slot_is_reused_for_the_next_area() {
        check(|| {
            let f = Arc::new(Fixture::new(true));
            let (first, second) = (f.view, f.view + BASE_PAGE);
            let writer = {
                let f = f.clone();
                thread::spawn(move || {
                    f.store(second, 3);
                    f.store(first, 4);
                })
            };
            for page in 0..PAGES {
                let mut hold = false;
                while f.attempt_page(page, hold) != AttemptResult::Migrated {
                    hold = true;
                }
            }
            writer.join().unwrap();
            assert_eq!((f.load(first), f.load(second)), (4, 3), "LOST a write");
            assert!(f.is_migrated() && f.is_accessible());
        });
    }

    /// A thread enters the handler for a fault whose cause is over, just as the next attempt
    /// begins.
    #[test]
    fn loom_a_left_over_fault_is_not_foreign() {
        check(|| {
            let f = Arc::new(Fixture::new(true));
            let late = {
                let f = f.clone();
                thread::spawn(move || f.processor().fault(f.view, true))
            };
            f.migrate(&*f.model);
            late.join().unwrap();
            assert!(f.is_migrated() && f.is_accessible());
        });
    }

    /// The `mprotect` that opens the area for a writer fails: before, after or in the middle of its
    /// effect.
    #[test]
    fn loom_writer_cannot_open() {
        for mode in [FailMode::Before, FailMode::After, FailMode::Partial] {
            check(move || {
                let f = Arc::new(Fixture::new(true));
                // The first protection change is the migrator's. The second, if it happens, is the
                // writer's.
                let failing = Arc::new(FailAt::new(f.model.clone(), 2, mode, Errno(libc::ENOMEM)));
                failing.arm();
                let addr = f.view + BASE_PAGE;
                let writer = {
                    let f = f.clone();
                    thread::spawn(move || f.store(addr, 9))
                };
                f.migrate(&*failing);
                writer.join().unwrap();
                assert_eq!(f.load(addr), 9, "LOST a write");
                assert!(f.is_accessible());
            });
        }
    }

    /// A reader sees only the old value or a newer one, even through holes (the commit fails
    /// half-way).
    #[test]
    fn loom_reader_and_a_commit_that_fails_half_way() {
        check(|| {
            let f = Arc::new(Fixture::new(true));
            let addr = f.view;
            f.model.store(addr, 1).unwrap();
            // Call 1 protects, call 2 parks the old page tables, call 3 brings the new ones.
            let failing =
                Arc::new(FailAt::new(f.model.clone(), 3, FailMode::Partial, Errno(libc::ENOMEM)));
            failing.arm();
            let reader = {
                let f = f.clone();
                thread::spawn(move || assert_eq!(f.load(addr), 1))
            };
            f.migrate(&*failing);
            reader.join().unwrap();
            assert!(f.is_migrated() && f.is_accessible());
        });
    }
}

#[cfg(not(loom))]
mod plain_tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::engine::slot::FaultVerdict;

    #[test]
    fn an_undisturbed_attempt_moves_contents_and_access() {
        for exchange in [true, false] {
            let f = Fixture::new(exchange);
            f.model.store(f.view + 8, 42).unwrap();
            let (step, ended) = f.attempt(&*f.model, false);
            assert_eq!(step, AttemptResult::Migrated);
            assert_eq!(
                (ended.counters.copied, ended.after.is_exchanged(), ended.counters.counts.repairs),
                (LEN as u64, exchange, 0)
            );
            assert_eq!(f.load(f.view + 8), 42);
            assert!(f.is_migrated() && f.is_accessible());
        }
    }

    #[test]
    fn an_unsupported_exchange_is_mapped_instead_and_remembered() {
        let f = Fixture::new(true);
        let failing = FailAt::new(f.model.clone(), 3, FailMode::Before, Errno(libc::EINVAL));
        failing.arm();
        let (step, ended) = f.attempt(&failing, false);
        assert_eq!(step, AttemptResult::Migrated);
        assert!(ended.after.exchange_unsupported && !ended.after.is_exchanged() && f.is_migrated());
    }

    #[test]
    fn whatever_fails_leaves_the_area_whole() {
        for exchange in [true, false] {
            let counting = {
                let f = Fixture::new(exchange);
                let counting = FailAt::never(f.model.clone());
                counting.arm();
                f.migrate(&counting);
                counting.seen()
            };
            for at in 1..=counting {
                for mode in [FailMode::Before, FailMode::After, FailMode::Partial] {
                    let f = Fixture::new(exchange);
                    f.model.store(f.view, 11).unwrap();
                    let failing = FailAt::new(f.model.clone(), at, mode, Errno(libc::ENOMEM));
                    failing.arm();
                    let steps = f.migrate(&failing);
                    assert!(failing.struck().is_some());
                    assert_eq!(f.load(f.view), 11, "call {at} failed {mode:?}: {steps:?}");
                    assert!(
                        f.is_migrated() && f.is_accessible(),
                        "call {at} failed {mode:?}: {steps:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_fault_without_a_migration_is_foreign_unless_the_access_is_allowed() {
        let f = Fixture::new(true);
        assert_eq!(
            f.table.resolve(f.view, &|| true, &mut |_| {}),
            FaultVerdict::Retry,
            "left over from an attempt"
        );
        assert_eq!(f.table.resolve(f.view, &|| false, &mut |_| {}), FaultVerdict::Foreign);
    }

    #[test]
    fn a_thread_held_up_by_one_attempt_does_not_wait_for_the_next() {
        let f = Fixture::new(true);
        let backend: *const dyn Backend = &raw const *f.model;
        let publish = || {
            // SAFETY: the model outlives both attempts.
            unsafe { f.slot().publish(&f.table.epoch, &f.work(true).span, backend) }
        };
        publish();
        let seen = f.slot().covering(f.view).expect("the attempt covers the view");
        f.slot().retire();
        publish();
        f.slot().sleep(seen); // returns
        f.slot().retire();
    }

    #[test]
    fn a_read_only_span_is_moved_without_tracking_and_stays_read_only() {
        let f = Fixture::new(true);
        // SAFETY: the fixture's own mapping.
        unsafe { f.model.protect(f.view, LEN, Prot::READ) }.unwrap();
        let mut work = f.work(false);
        work.span.prot = Prot::READ;
        let counting = FailAt::never(f.model.clone());
        counting.arm();
        assert_eq!(f.attempt_work(&counting, &work).step, AttemptResult::Migrated);
        assert!(f.is_migrated());
        assert_eq!(f.model.attributes_at(f.view).unwrap().0, Prot::READ);
        assert_eq!(counting.seen(), 3, "one protection change of the alias and two exchanges");
    }

    /// As the model checker's tests, but with real threads and real futexes: a checker's futex
    /// cannot show all that a real one does.
    #[test]
    fn writers_and_migrator_run_against_each_other() {
        let moves = if cfg!(miri) { 5 } else { 20_000 };
        let stop = Arc::new(AtomicBool::new(false));
        let f = Arc::new(Fixture::new(false));
        let other = f.source;
        let writers: Vec<_> = (0..2)
            .map(|w| {
                let (f, stop) = (f.clone(), stop.clone());
                // Returns the last value that this thread has written.
                std::thread::spawn(move || {
                    let running = (1u64..).take_while(|_| !stop.load(Ordering::Relaxed));
                    running
                        .inspect(|value| f.store(f.view + w * BASE_PAGE, *value))
                        .last()
                        .unwrap_or(0)
                })
            })
            .collect();
        for _ in 0..moves {
            f.migrate(&*f.model);
            // Moves the area back by a held attempt, whose slot is closed. First the alias is
            // mapped by hand to the file that receives the copy.
            let mut work = f.work(true);
            work.new = Frames { file: other.file, ..f.new };
            // SAFETY: the alias is the fixture's.
            unsafe { f.model.map(&Mapping { addr: f.new.alias, ..other }) }.unwrap();
            assert_eq!(f.attempt_work(&*f.model, &work).step, AttemptResult::Migrated);
            let restored = Mapping { addr: f.new.alias, file: f.new.file, ..other };
            // SAFETY: as above.
            unsafe { f.model.map(&restored) }.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        for (w, writer) in writers.into_iter().enumerate() {
            let last = writer.join().unwrap();
            assert_eq!(f.load(f.view + w * BASE_PAGE), last, "LOST a write");
        }
    }
}
