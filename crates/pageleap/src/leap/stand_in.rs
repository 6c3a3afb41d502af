//! The engine that moves areas which the job's own engine cannot move, or must not while a debugger
//! traces the job ([`choice::stand_in`]). Its tracker is opened when the first area needs it. From
//! then on a thread reads the tracker's messages, until no area is left.

use std::sync::Arc;

use super::mover::{FrameMover, Worker};
use super::tracker::{OpenTracker, serve};
use crate::backend::{Call, Errno, Tracker};
use crate::engine::choice::{self, AreaEngine, Situation, Why};
use crate::engine::{Engine, Messages};
use crate::job::area::Reason;
use crate::job::books::Books;
use crate::sync::{Barrier, Condvar, Mutex, lock, thread};

/// What a job has of its stand-in.
#[derive(Default)]
pub(super) struct StandIn(Mutex<Option<Result<Served, (Call, Errno)>>>);

/// A tracker, and the thread that serves it.
struct Served {
    open: OpenTracker,
    thread: Arc<Ended>,
}

/// The end of the thread, with the CPU time that it has used.
#[derive(Default)]
struct Ended {
    cpu_ns: Mutex<Option<Option<u64>>>,
    changed: Condvar,
}

impl FrameMover {
    /// Which engine moves an area, and with which tracker, or why the area stays.
    pub(super) fn engine_for(
        &self,
        worker: &Worker,
        situation: Situation,
        books: Books<'_>,
    ) -> Result<(AreaEngine, Option<Tracker>), (AreaEngine, Reason)> {
        let (by, tracker) = self.unless_traced(worker, situation);
        match worker.tracer.filter(|_| by.engine.readers_wait()) {
            Some(tracer) => match self.choose_while_traced(worker, tracer, books) {
                Ok((by, tracker)) => Ok((by, Some(tracker))),
                Err(why) => Err((by, why)),
            },
            None => Ok((by, tracker)),
        }
    }

    fn unless_traced(
        &self,
        worker: &Worker,
        situation: Situation,
    ) -> (AreaEngine, Option<Tracker>) {
        let stand_in = choice::stand_in(situation.engine);
        let by = choice::for_area(&Situation { stand_in, ..situation });
        let is_other = by.why == Why::NotFollowed && Some(by.engine) == stand_in;
        if !is_other || by.engine.needs().is_none() {
            return (by, self.tracker_of(worker, by.engine));
        }
        match self.tracker_of_stand_in(by.engine) {
            Ok(tracker) => (by, Some(tracker)),
            Err(_) => {
                let by = choice::for_area(&Situation { stand_in: None, ..situation });
                (by, self.tracker_of(worker, by.engine))
            }
        }
    }

    /// The tracker of an engine of the job.
    fn tracker_of(&self, worker: &Worker, engine: Engine) -> Option<Tracker> {
        match &self.terrain.while_few_wait {
            Some((other, open)) if *other == engine => open.as_ref().map(OpenTracker::tracker),
            _ => worker.follow,
        }
    }

    /// The tracker of the stand-in, opened and served. A refusal holds for the rest of the job,
    /// unless it is a shortage, which may be over when the next area comes.
    pub(super) fn tracker_of_stand_in(&self, engine: Engine) -> Result<Tracker, (Call, Errno)> {
        let served = &mut *lock(&self.stand_in.0);
        if matches!(served, Some(Err((_, errno))) if choice::is_shortage(*errno)) {
            *served = None;
        }
        let served = served.get_or_insert_with(|| self.serve_stand_in(engine));
        served.as_ref().map(|served| served.open.tracker()).map_err(|refused| *refused)
    }

    fn serve_stand_in(&self, engine: Engine) -> Result<Served, (Call, Errno)> {
        let need = engine.profile().tracker.expect("only engines with a tracker come here");
        debug_assert_eq!(need.messages, Messages::Writers);
        let open = OpenTracker::new(&self.terrain.backend, need.ability)?;
        let (tracker, slots) = (open.tracker(), self.slot_mask());
        let (ready, ended) = (Arc::new(Barrier::new(2)), Arc::new(Ended::default()));
        let (backend, begun, over) = (self.terrain.backend.clone(), ready.clone(), ended.clone());
        let serves = move || {
            serve(&*backend, tracker, slots, &|| _ = begun.wait());
            *lock(&over.cpu_ns) = Some(pageleap_sys::thread_cpu_time_ns().ok());
            over.changed.notify_all();
        };
        thread::start(c"pageleap-events", serves).map_err(|errno| (Call::OpenTracker, errno))?;
        ready.wait();
        Ok(Served { open, thread: ended })
    }

    /// Ends the thread of the stand-in, if there is one. Nobody moves an area any more.
    pub(super) fn end_stand_in(&self, books: Books<'_>) {
        let Some(Ok(Served { open, thread })) = lock(&self.stand_in.0).take() else { return };
        self.backend().end_tracker(open.tracker());
        let mut cpu_ns = lock(&thread.cpu_ns);
        while cpu_ns.is_none() {
            cpu_ns = thread.changed.wait(cpu_ns).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        books.add_cpu_time(cpu_ns.flatten());
    }
}
