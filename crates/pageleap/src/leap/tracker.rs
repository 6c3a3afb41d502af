//! Trackers, and the threads that a mover needs beside the workers: some read the messages of
//! trackers, others help a worker to copy.
//!
//! A tracker gets its thread when the first area needs it. A small job beside a program at rest
//! never does.

use std::sync::{Arc, OnceLock};

use super::context::RunsOn;
use super::mover::FrameMover;
use crate::affinity;
use crate::backend::{Ability, Backend, Call, Errno, Haste, Tracker};
use crate::engine::crew::Crew;
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::{Engine, Messages};
use crate::job::books::Books;
use crate::job::run::AbortOnUnwind;
use crate::priority::{self, Raised, no_thread};
use crate::sync::{Barrier, Condvar, Mutex, lock, thread};

/// An open tracker. The last owner ends its thread and closes it.
#[derive(Clone)]
pub(super) struct OpenTracker(Arc<Inner>);

struct Inner {
    backend: Arc<dyn Backend>,
    tracker: Tracker,
    /// The thread that reads its messages, if one has been started.
    reader: Mutex<Option<Reader>>,
    /// Whether it outlives the jobs that use it.
    lasts: bool,
    /// The process whose memory it follows.
    process: u32,
}

/// A thread that reads messages.
struct Reader {
    ended: Arc<Ended>,
    /// The part of its CPU time that is in the books of a job.
    booked_ns: u64,
}

/// The end of a reader, with the CPU time that it has used.
#[derive(Default)]
struct Ended {
    cpu_ns: Mutex<Option<Option<u64>>>,
    changed: Condvar,
    clock: OnceLock<libc::clockid_t>,
}

impl OpenTracker {
    /// Opens a tracker for one job.
    pub(super) fn new(backend: &Arc<dyn Backend>, ability: Ability) -> Result<Self, (Call, Errno)> {
        OpenTracker::open(backend, ability, false)
    }

    /// Opens a tracker for one job after the other, or several at a time.
    pub(super) fn lasting(
        backend: &Arc<dyn Backend>,
        ability: Ability,
    ) -> Result<Self, (Call, Errno)> {
        OpenTracker::open(backend, ability, true)
    }

    fn open(
        backend: &Arc<dyn Backend>,
        ability: Ability,
        lasts: bool,
    ) -> Result<Self, (Call, Errno)> {
        let tracker = backend.open_tracker(ability)?;
        let (backend, reader, process) = (backend.clone(), Mutex::new(None), std::process::id());
        Ok(OpenTracker(Arc::new(Inner { backend, tracker, reader, lasts, process })))
    }

    pub(super) fn tracker(&self) -> Tracker {
        self.0.tracker
    }

    /// Whether its descriptors are still this library's.
    pub(super) fn is_whole(&self) -> bool {
        self.0.backend.has_tracker(self.0.tracker)
    }

    /// Has a thread read the messages of the tracker from now on, for the workers whose slots have
    /// their bits set in `slots`; if it outlives a job, for all workers.
    pub(super) fn serve(&self, slots: u64) -> Result<(), Errno> {
        let reader = &mut *lock(&self.0.reader);
        if reader.is_none() {
            let ended = self.start_reader(if self.0.lasts { u64::MAX } else { slots })?;
            *reader = Some(Reader { ended, booked_ns: 0 });
        }
        Ok(())
    }

    fn start_reader(&self, slots: u64) -> Result<Arc<Ended>, Errno> {
        let (ready, ended) = (Arc::new(Barrier::new(2)), Arc::new(Ended::default()));
        let (backend, tracker) = (self.0.backend.clone(), self.0.tracker);
        let (begun, over) = (ready.clone(), ended.clone());
        let serves = move || {
            over.clock.get_or_init(pageleap_sys::own_cpu_clock);
            serve(&*backend, tracker, slots, &|| _ = begun.wait());
            // No area is under way: the heap may be touched again.
            drop((backend, begun));
            *lock(&over.cpu_ns) = Some(pageleap_sys::thread_cpu_time_ns().ok());
            over.changed.notify_all();
        };
        thread::start(c"pageleap-events", serves)?;
        ready.wait();
        Ok(ended)
    }

    /// A job moves no more areas by this tracker. Its thread ends, unless it outlives the job, and
    /// its CPU time goes into the books of the job.
    pub(super) fn end(&self, books: Books<'_>) {
        if !self.0.lasts {
            if let Some(cpu_ns) = self.0.end() {
                books.add_cpu_time(cpu_ns);
            }
            return;
        }
        if let Some(Reader { ended, booked_ns }) = &mut *lock(&self.0.reader) {
            let clock = ended.clock.get().expect("it is set before the thread serves");
            let now_ns = pageleap_sys::cpu_time_ns(*clock).ok();
            let before_ns = std::mem::replace(booked_ns, now_ns.unwrap_or(*booked_ns));
            books.add_cpu_time(now_ns.map(|now_ns| now_ns.saturating_sub(before_ns)));
        }
    }
}

impl Inner {
    /// Ends the thread. Returns its CPU time, if there was one.
    fn end(&self) -> Option<Option<u64>> {
        let Reader { ended, .. } = lock(&self.reader).take()?;
        self.backend.end_tracker(self.tracker);
        let mut cpu_ns = lock(&ended.cpu_ns);
        while cpu_ns.is_none() {
            cpu_ns = ended.changed.wait(cpu_ns).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        *cpu_ns
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a child made by `fork` there is no thread, and what ends it would end the parent's.
        if self.process == std::process::id() {
            self.end();
        }
        // SAFETY: it is closed here only, and the jobs that used it are over or have never begun.
        unsafe { self.backend.close_tracker(self.tracker) };
    }
}

impl FrameMover {
    /// Runs `work` where the destination is.
    pub(super) fn run_there(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        if self.backend().is_host_memory() && self.terrain.runs_on != RunsOn::Caller {
            // Before other threads are started, which inherit all of it.
            if !affinity::run_on(&self.terrain.cpus) {
                books.warn("the workers may not run on the destination node's CPUs");
            }
            self.raised.get_or_init(|| Raised::this_thread(|warning| books.warn(warning)));
        }
        let Some(open) = &self.terrain.tracker else { return work() };
        if self.terrain.may_fall_back || self.serve(books).is_some() {
            work();
        }
        open.end(books);
    }

    /// Whether the job's engine has a tracker, whose messages can be read as far as is known.
    pub(super) fn has_tracker(&self) -> bool {
        self.terrain.tracker.is_some() && self.unserved.get().is_none()
    }

    /// The tracker of the job's engine, with a thread that reads its messages if they have to be
    /// read. `None` if the engine has none, or no thread could be started. What follows from that is
    /// noted.
    pub(super) fn serve(&self, books: Books<'_>) -> Option<Tracker> {
        let Some(open) = &self.terrain.tracker else { return None };
        if !self.is_served(self.terrain.engine) {
            return Some(open.tracker());
        }
        match open.serve(self.slot_mask()) {
            Ok(()) => Some(open.tracker()),
            Err(why) => {
                self.unserved.get_or_init(|| why);
                let error = no_thread("a thread that reads the tracker's messages", why);
                match self.terrain.may_fall_back {
                    true => books.not_followed(error.to_string()),
                    false => books.fail(error),
                }
                None
            }
        }
    }

    /// A bit for the number of each worker's slot.
    pub(super) fn slot_mask(&self) -> u64 {
        self.slots.iter().fold(0, |mask, slot| mask | 1 << slot.number())
    }

    /// Whether a thread has to read the messages of an engine's tracker.
    fn is_served(&self, engine: Engine) -> bool {
        engine.profile().tracker.is_some_and(|need| match need.messages {
            Messages::Writers => true,
            Messages::Exchanges => self.backend().is_host_memory(),
            Messages::None => false,
        })
    }

    /// How the calling thread may run before others while they wait for it, if it may.
    pub(super) fn first(&self) -> Option<Haste> {
        if !self.backend().is_host_memory() {
            return None;
        }
        if self.terrain.runs_on == RunsOn::Caller {
            return priority::first_of_lent_thread();
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
fn serve(backend: &dyn Backend, tracker: Tracker, slots: u64, ready: &dyn Fn()) {
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
