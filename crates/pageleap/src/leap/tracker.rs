//! The tracker of a job, and the threads that its mover needs beside the workers: one reads the
//! messages of the tracker, others help a worker to copy.

use std::sync::Arc;

use super::mover::FrameMover;
use crate::affinity;
use crate::backend::{Ability, Backend, Call, Errno, Haste, Tracker};
use crate::engine::crew::Crew;
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::{Engine, Messages};
use crate::job::books::Books;
use crate::job::run::AbortOnUnwind;
use crate::priority::{self, Raised, no_thread};
use crate::sync::{Barrier, thread};

/// A tracker of this job, closed on drop.
pub(super) struct OpenTracker {
    backend: Arc<dyn Backend>,
    tracker: Tracker,
}

impl OpenTracker {
    pub(super) fn new(backend: &Arc<dyn Backend>, ability: Ability) -> Result<Self, (Call, Errno)> {
        Ok(OpenTracker { backend: backend.clone(), tracker: backend.open_tracker(ability)? })
    }

    pub(super) fn tracker(&self) -> Tracker {
        self.tracker
    }
}

impl Drop for OpenTracker {
    fn drop(&mut self) {
        // SAFETY: it is closed here only, and the job that used it is over or has never begun.
        unsafe { self.backend.close_tracker(self.tracker) };
    }
}

impl FrameMover {
    /// Runs `work` where the destination is, with a thread that reads the messages of the tracker,
    /// if that is needed.
    pub(super) fn serve_while(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        // Before the other threads are started, which inherit all of it.
        if self.backend().is_host_memory() && !affinity::run_on(&self.terrain.cpus) {
            books.warn("the workers may not run on the destination node's CPUs");
        }
        if self.backend().is_host_memory() {
            self.raised.get_or_init(|| Raised::this_thread(|warning| books.warn(warning)));
        }
        let served = self.is_served(self.terrain.engine);
        let Some(open) = self.terrain.tracker.as_ref().filter(|_| served) else {
            return work();
        };
        let ready = Barrier::new(2);
        let (backend, tracker, ready) = (self.backend(), open.tracker, &ready);
        let slots = self.slot_mask();
        thread::scope(|scope| {
            let serve = move || {
                serve(backend, tracker, slots, &|| _ = ready.wait());
                // All areas have been dealt with: the heap may be touched again.
                books.count_cpu_time();
            };
            match scope.start(c"pageleap-events", serve) {
                Ok(()) => {
                    ready.wait();
                    work();
                    backend.end_tracker(tracker);
                }
                Err(e) => self.work_unserved(e, books, work),
            }
        });
    }

    /// Whether a thread has to read the messages of an engine's tracker.
    fn is_served(&self, engine: Engine) -> bool {
        engine.profile().tracker.is_some_and(|need| match need.messages {
            Messages::Writers => true,
            Messages::Exchanges => self.backend().is_host_memory(),
            Messages::None => false,
        })
    }

    /// A bit for the number of each worker's slot.
    pub(super) fn slot_mask(&self) -> u64 {
        self.slots.iter().fold(0, |mask, slot| mask | 1 << slot.number())
    }

    /// Does what can be done without a thread that reads the messages of the tracker.
    fn work_unserved(&self, why: Errno, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        if self.terrain.may_fall_back {
            let error = no_thread("a thread that reads the tracker's messages", why);
            books.not_followed(error.to_string());
            self.unserved.get_or_init(|| why);
            return work();
        }
        books.fail(no_thread("a thread that reads the tracker's messages", why));
    }

    /// How the calling thread may run before others while they wait for it, if it may.
    pub(super) fn first(&self) -> Option<Haste> {
        if !self.backend().is_host_memory() {
            return None;
        }
        priority::run_shortly();
        priority::first()
    }

    /// Helps the one worker to copy, until all helpers are dismissed.
    pub(super) fn help_worker(&self, helper: usize) {
        help(self.backend(), &self.slots[0].slot().crew, helper, self.first());
    }
}

/// Serves a tracker for the workers whose slots have their bits set in `slots`, after telling them
/// by `ready` that it begins. A function of its own: from then on nothing may be read from the
/// heap, where captured variables and the job lie, because the heap may be what is frozen.
#[inline(never)]
pub(super) fn serve(backend: &dyn Backend, tracker: Tracker, slots: u64, ready: &dyn Fn()) {
    const _: () = assert!(MAX_THREADS <= u64::BITS as usize);
    let bomb = AbortOnUnwind;
    ready();
    backend.serve_tracker(tracker, &mut |addr| {
        for slot in SLOTS
            .slots
            .iter()
            .enumerate()
            .filter_map(|(i, slot)| (slots >> i & 1 != 0).then_some(slot))
        {
            slot.notes.wanted(addr, |page, len| {
                // If it is refused, the writer waits until the attempt is over. SAFETY: a page
                // of the area that this slot's worker has registered with the tracker and is
                // migrating.
                let _ = unsafe { backend.let_write(tracker, page, len) };
            });
        }
    });
    std::mem::forget(bomb);
}

/// Helps a worker to copy. A function of its own, for the same reason as [`serve`].
#[inline(never)]
fn help(backend: &dyn Backend, crew: &'static Crew, number: usize, haste: Option<Haste>) {
    let bomb = AbortOnUnwind;
    // SAFETY: the backend of the job.
    unsafe { crew.help(backend, number, haste) };
    std::mem::forget(bomb);
}
