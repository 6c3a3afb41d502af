//! The threads of a job: who is started, in which order, and what becomes of it if that is refused.

use super::{Follow, Run};
use crate::affinity;
use crate::backend::{Backend, Errno, Tracker};
use crate::engine::Messages;
use crate::engine::crew::Crew;
use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::error::Error;
use crate::sync::{Barrier, lock, thread};

/// Serves a tracker for the workers whose slots have their bits set in `slots`, once they know that
/// it is about to be served. A function of its own: from then on nothing may be read from the heap,
/// where captured variables and the job lie, because the heap may be what is frozen.
#[inline(never)]
fn serve(backend: &dyn Backend, tracker: Tracker, slots: u64, ready: &Barrier) {
    const _: () = assert!(MAX_THREADS <= u64::BITS as usize);
    let bomb = AbortOnUnwind;
    ready.wait();
    backend.serve_tracker(tracker, &mut |addr| {
        for slot in SLOTS
            .slots
            .iter()
            .enumerate()
            .filter_map(|(i, slot)| (slots >> i & 1 != 0).then_some(slot))
        {
            slot.notes.wanted(addr, |page, len| {
                // If it is refused, whoever waits does so until the attempt is over. SAFETY: a page
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
fn help(backend: &dyn Backend, crew: &'static Crew, number: usize, hurry: bool) {
    let bomb = AbortOnUnwind;
    // SAFETY: the backend of the job.
    unsafe { crew.help(backend, number, hurry) };
    std::mem::forget(bomb);
}

impl Run {
    /// Starts the job's thread.
    pub(crate) fn spawn(self) -> Result<(), Error> {
        let main = move || {
            let bomb = AbortOnUnwind;
            self.migrate();
            self.conclude();
            std::mem::forget(bomb);
        };
        thread::start(c"pageleap", main).map_err(|e| Error::SystemFile {
            path: "a thread for the job".into(),
            reason: e.to_string(),
            remedy: "raise the limit of threads (ulimit -u, pids.max)",
        })
    }

    /// Migrates everything, with the threads that this takes: workers, each of which deals with
    /// areas from their first mark to their commit, so that the calls of one hide behind the
    /// copying of the others; and one that serves the tracker for all of them.
    fn migrate(&self) {
        // Before the other threads are started, which inherit both.
        if !self.settle() {
            let warning = "the workers may not run on the destination node's CPUs".to_owned();
            lock(&self.state).tally.warnings.push(warning);
        }
        let tracker = self.settings.tracker.as_ref().map(|open| open.tracker);
        let need = self.settings.engine.profile().tracker;
        let served = need.is_some_and(|need| {
            need.messages == Messages::Writers || self.backend.is_host_memory()
        });
        match tracker.filter(|_| served) {
            None => self.work_together(tracker),
            Some(tracker) => {
                let slots = self.slots.iter().fold(0, |mask, slot| mask | 1 << slot.0);
                let ready = Barrier::new(2);
                let (backend, ready) = (&*self.backend, &ready);
                thread::scope(|scope| {
                    let work = move || {
                        serve(backend, tracker, slots, ready);
                        // All areas have been dealt with: the heap may be touched again.
                        self.count_cpu_time();
                    };
                    match scope.start(c"pageleap-events", work) {
                        Ok(()) => {
                            ready.wait();
                            self.work_together(Some(tracker));
                            backend.end_tracker(tracker);
                        }
                        Err(e) => self.work_unserved(&e),
                    }
                });
            }
        }
        self.join_the_rest(self.slots[0].slot());
    }

    /// Has all threads copy, this one being one of them, and waits for them.
    fn work_together(&self, tracker: Option<Tracker>) {
        let crew = self.settings.together.then_some(&self.slots[0].slot().crew);
        if let Some(crew) = crew {
            crew.begin(self.settings.threads - 1);
        }
        thread::scope(|scope| {
            for worker in 1..self.settings.threads {
                let work = move || {
                    match crew {
                        Some(crew) => {
                            help(&*self.backend, crew, worker - 1, self.may_hurry(tracker))
                        }
                        None => self.work(worker, tracker),
                    }
                    self.count_cpu_time();
                };
                if let Err(e) = scope.start(c"pageleap", work) {
                    lock(&self.state)
                        .tally
                        .warnings
                        .push(format!("fewer threads than asked for: {e}"));
                }
            }
            self.work(0, tracker);
            if let Some(crew) = crew {
                crew.end();
            }
        });
    }

    /// Adds the CPU time of the calling thread, which is about to end, to the job's.
    fn count_cpu_time(&self) {
        let used = pageleap_sys::thread_cpu_time_ns();
        let tally = &mut lock(&self.state).tally;
        match used {
            Ok(ns) => tally.cpu_ns += ns,
            Err(_) => tally.cpu_unknown = true,
        }
    }

    /// Whether the calling thread may be put before others while they wait for it.
    fn may_hurry(&self, tracker: Option<Tracker>) -> bool {
        self.backend.is_host_memory() && {
            affinity::run_shortly();
            tracker.is_some() && affinity::may_run_first()
        }
    }

    /// A worker's life.
    fn work(&self, worker: usize, tracker: Option<Tracker>) {
        // A bug here could leave writers asleep on an area that nobody opens again. Ending the
        // process says so; going on would look like a hang.
        let bomb = AbortOnUnwind;
        let hurry = self.may_hurry(tracker);
        lock(&self.state).tally.hurries |= hurry;
        self.take_areas(worker, tracker.map(|tracker| Follow { tracker, hurry }));
        std::mem::forget(bomb);
    }

    /// What is left to do without a thread that serves the tracker.
    fn work_unserved(&self, why: &Errno) {
        if self.settings.may_fall_back {
            let why = format!("a thread could not be started: {why}");
            lock(&self.state).tally.not_followed_why.get_or_insert(why);
            return self.work_together(None);
        }
        let remedy = "raise the limit of threads (ulimit -u, pids.max)";
        let path = "a thread for the tracker".into();
        let error = Error::SystemFile { path, reason: why.to_string(), remedy };
        lock(&self.state).tally.first_failure.get_or_insert(error);
    }

    /// Has the calling thread run where the destination is. Returns whether it may run there.
    fn settle(&self) -> bool {
        !self.backend.is_host_memory() || affinity::run_on(&self.settings.cpus)
    }
}

struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        // The checker ends the test instead, and says under which schedule.
        if cfg!(shuttle) {
            return;
        }
        eprintln!(
            "pageleap: a migrating thread panicked; ending the process, because writers may wait for it for ever"
        );
        std::process::abort();
    }
}
