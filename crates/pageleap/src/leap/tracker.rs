//! An open tracker, with the thread that reads its messages.
//!
//! A tracker gets its thread when the first area needs it, so a small job in an idle program never
//! starts one.

use std::sync::{Arc, OnceLock};

use crate::backend::{Ability, Backend, Call, Errno, Tracker};
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::job::books::Books;
use crate::job::run::AbortOnUnwind;
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
    ended: Arc<ReaderEnd>,
    /// The part of its CPU time that is in the books of a job.
    booked_ns: u64,
}

/// The end of a reader, with the CPU time that it has used.
#[derive(Default)]
struct ReaderEnd {
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

    fn start_reader(&self, slots: u64) -> Result<Arc<ReaderEnd>, Errno> {
        let (ready, ended) = (Arc::new(Barrier::new(2)), Arc::new(ReaderEnd::default()));
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

    /// Notes that a job moves no more areas with this tracker. The thread ends, unless it outlives
    /// the job. Its CPU time goes into the books of the job.
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
        // A child made by `fork` has no such thread, and would end the parent's by their common
        // event.
        if self.process == std::process::id() {
            self.end();
        }
        // SAFETY: it is closed here only, and the jobs that used it are over or have never begun.
        unsafe { self.backend.close_tracker(self.tracker) };
    }
}

/// Serves a tracker for the workers whose slots have their bits set in `slots`, after calling
/// `ready`. From then on nothing may be read from the heap, which may itself be frozen. So this is
/// a function of its own, without captured variables.
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
