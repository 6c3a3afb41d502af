//! The engine that moves areas which the job's own engine cannot move, or must not while a debugger
//! traces the job ([`choice::stand_in`]). Its tracker is opened when the first area needs it. From
//! then on a thread reads the tracker's messages, until no area is left.

use super::mover::{FrameMover, Worker};
use super::tracker::OpenTracker;
use crate::backend::{Call, Errno, Tracker};
use crate::engine::choice::{self, AreaEngine, Situation, Why};
use crate::engine::{Engine, Messages};
use crate::job::area::Reason;
use crate::job::books::Books;
use crate::sync::{Mutex, lock};

/// What a job has of its stand-in.
#[derive(Default)]
pub(super) struct StandIn(Mutex<Option<Result<OpenTracker, (Call, Errno)>>>);

impl FrameMover {
    /// Which engine moves an area, and with which tracker, or why the area stays.
    pub(super) fn engine_for(
        &self,
        worker: &Worker,
        situation: Situation,
        books: Books<'_>,
    ) -> Result<(AreaEngine, Option<Tracker>), (AreaEngine, Reason)> {
        let stand_in = choice::stand_in(situation.engine);
        let (by, tracker) = self.unless_traced(Situation { stand_in, ..situation }, books);
        match worker.tracer.filter(|_| by.engine.readers_wait()) {
            Some(tracer) => match self.choose_while_traced(tracer, books) {
                Ok((by, tracker)) => Ok((by, Some(tracker))),
                Err(why) => Err((by, why)),
            },
            None => Ok((by, tracker)),
        }
    }

    fn unless_traced(
        &self,
        situation: Situation,
        books: Books<'_>,
    ) -> (AreaEngine, Option<Tracker>) {
        let by = choice::for_area(&situation);
        let is_other = by.why == Why::NotFollowed && Some(by.engine) == situation.stand_in;
        if is_other && by.engine.needs().is_some() {
            return match self.tracker_of_stand_in(by.engine) {
                Ok(tracker) => (by, Some(tracker)),
                Err(_) => self.unless_traced(Situation { stand_in: None, ..situation }, books),
            };
        }
        let tracker = self.tracker_of(by.engine, books);
        if tracker.is_none() && situation.has_tracker && by.engine == situation.engine {
            // Its messages cannot be read, as it has turned out now.
            return self.unless_traced(Situation { has_tracker: false, ..situation }, books);
        }
        (by, tracker)
    }

    /// The tracker of an engine of the job.
    fn tracker_of(&self, engine: Engine, books: Books<'_>) -> Option<Tracker> {
        match &self.terrain.while_few_wait {
            Some((other, open)) if *other == engine => open.as_ref().map(OpenTracker::tracker),
            _ if engine == self.terrain.engine && self.has_tracker() => self.serve(books),
            _ => None,
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
        served.as_ref().map(OpenTracker::tracker).map_err(|refused| *refused)
    }

    fn serve_stand_in(&self, engine: Engine) -> Result<OpenTracker, (Call, Errno)> {
        let need = engine.profile().tracker.expect("only engines with a tracker come here");
        debug_assert_eq!(need.messages, Messages::Writers);
        let open = OpenTracker::new(&self.terrain.backend, need.ability)?;
        open.serve(self.slot_mask()).map_err(|errno| (Call::OpenTracker, errno))?;
        Ok(open)
    }

    /// Ends the thread of the stand-in, if there is one. Nobody moves an area any more.
    pub(super) fn end_stand_in(&self, books: Books<'_>) {
        if let Some(Ok(open)) = lock(&self.stand_in.0).take() {
            open.end(books);
        }
    }
}
