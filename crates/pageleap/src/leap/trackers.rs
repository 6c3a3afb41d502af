//! Chooses the engine that moves an area, and its tracker: the job's own engine, the one that
//! `auto` takes at low contention, or the stand-in.
//!
//! The stand-in ([`choice::stand_in`]) moves areas that the job's own engine cannot move. It also
//! moves areas while another process traces the job's threads ([`tracer`](crate::tracer)), because
//! readers do not wait in its windows. Its tracker is opened when the first area needs it. From
//! then on a thread reads the tracker's messages, until no area is left.

use std::sync::{Arc, OnceLock};

use super::slots::ClaimedSlot;
use super::tracker::OpenTracker;
use crate::backend::{Backend, Call, Errno, Tracker};
use crate::engine::choice::{self, AreaEngine, Chosen, Situation, Why};
use crate::engine::{Engine, Messages};
use crate::error::Error;
use crate::job::Terms;
use crate::job::area::{Area, Reason};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::priority::no_thread;
use crate::sync::{Mutex, lock, monotonic_ns};
use crate::tracer::Watch;
use crate::units::{AddressRange, PageSize};

/// The engines of a job, with their trackers.
pub(super) struct Trackers {
    backend: Arc<dyn Backend>,
    page: PageSize,
    chosen: Chosen<OpenTracker>,
    may_fall_back: bool,
    /// A bit for the number of each worker's slot.
    slots: u64,
    stand_in: Mutex<Option<Result<OpenTracker, (Call, Errno)>>>,
    /// Why the thread that reads the messages of the job's own tracker could not be started.
    unserved: OnceLock<Errno>,
    /// Set once a warning tells why pages stay while the job is traced.
    warned_of_tracer: OnceLock<()>,
}

/// The tracer of a worker.
#[derive(Default)]
pub(super) struct Traced {
    watch: Watch,
    /// The process that traces it, as of the last look.
    by: Option<u32>,
}

impl Traced {
    pub(super) fn new(watch: Watch) -> Traced {
        Traced { watch, by: None }
    }
}

impl Trackers {
    /// The trackers of a job for pages of this size, whose workers have these slots.
    /// `may_fall_back`: whether areas that the chosen engine cannot move may be moved by another
    /// one.
    pub(super) fn new(
        backend: &Arc<dyn Backend>,
        page: PageSize,
        chosen: Chosen<OpenTracker>,
        may_fall_back: bool,
        slots: &[ClaimedSlot],
    ) -> Trackers {
        Trackers {
            backend: backend.clone(),
            page,
            chosen,
            may_fall_back,
            slots: ClaimedSlot::mask(slots),
            stand_in: Mutex::default(),
            unserved: OnceLock::new(),
            warned_of_tracer: OnceLock::new(),
        }
    }

    /// The engine of the job.
    pub(super) fn engine(&self) -> Engine {
        self.chosen.engine
    }

    /// The engine for areas with low contention, if it is another one.
    fn engine_at_low_contention(&self) -> Option<Engine> {
        self.chosen.at_low_contention.as_ref().map(|(engine, _)| *engine)
    }

    /// Runs `work`, in which areas are moved, and then ends all trackers. If the messages of the
    /// job's tracker cannot be read and no other engine may be taken, the job fails and `work` does
    /// not run.
    pub(super) fn surround(&self, books: Books<'_>, work: impl FnOnce()) {
        if self.chosen.tracker.is_none() || self.may_fall_back || self.serve(books).is_some() {
            work();
        }
        if let Some(own) = &self.chosen.tracker {
            own.end(books);
        }
        if let Some(Ok(open)) = lock(&self.stand_in).take() {
            open.end(books);
        }
    }

    /// The tracker of the job's own engine, whether or not its messages are read.
    pub(super) fn own(&self) -> Option<Tracker> {
        self.chosen.tracker.as_ref().map(OpenTracker::tracker)
    }

    /// Whether the job's engine has a tracker whose messages can be read, as far as is known.
    pub(super) fn has_own(&self) -> bool {
        self.chosen.tracker.is_some() && self.unserved.get().is_none()
    }

    /// Why an attempt lacks the tracker that its engine needs.
    pub(super) fn why_none(&self) -> (Call, Errno) {
        let errno = self.unserved.get().copied().unwrap_or(Errno(libc::EBADF));
        (Call::OpenTracker, errno)
    }

    // Which engine
    // ---------------------------------------------------------------------------------------------

    /// Chooses the engine and the tracker for an area of a worker; an error says why the area
    /// stays. `writable`: whether its pages can be written; `exchange_unsupported`: whether the
    /// kernel has refused to exchange page tables.
    pub(super) fn engine_for(
        &self,
        traced: &Traced,
        area: &Area,
        (writable, exchange_unsupported): (bool, bool),
        terms: &Terms<'_>,
    ) -> Result<(AreaEngine, Option<Tracker>), (AreaEngine, Reason)> {
        let (engine, books) = (self.engine(), terms.books);
        let situation = Situation {
            engine,
            may_fall_back: self.may_fall_back,
            stand_in: choice::stand_in(engine),
            has_tracker: self.has_own(),
            exchange_unsupported,
            refused: area.refused,
            writable,
            page: self.page,
            hold: terms.hold,
            at_low_contention: self.engine_at_low_contention(),
            low_contention: terms.low_contention,
        };
        let (by, tracker) = self.unless_traced(situation, books);
        match traced.by.filter(|_| by.engine.readers_wait()) {
            Some(tracer) => match self.while_traced(tracer, books) {
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
            return match self.of_stand_in(by.engine) {
                Ok(tracker) => (by, Some(tracker)),
                Err(_) => self.unless_traced(Situation { stand_in: None, ..situation }, books),
            };
        }
        let tracker = self.of(by.engine, books);
        if tracker.is_none() && situation.has_tracker && by.engine == situation.engine {
            // It has just turned out that its messages cannot be read.
            return self.unless_traced(Situation { has_tracker: false, ..situation }, books);
        }
        (by, tracker)
    }

    /// Looks for a process that traces the calling worker, and returns the part of the area that
    /// one attempt may take then. Called between areas only, because in a window it would be too
    /// late.
    pub(super) fn look_for_tracer(&self, traced: &mut Traced, area: &Area) -> Area {
        let mut engines =
            [Some(self.engine()), self.engine_at_low_contention()].into_iter().flatten();
        if !engines.any(Engine::readers_wait) {
            return area.clone();
        }
        traced.by = traced.watch.tracer(monotonic_ns(), || self.backend.tracer());
        let Some(engine) = traced.by.and_then(|_| self.engine_while_traced()) else {
            return area.clone();
        };
        let most = engine.most_area_bytes(self.page) / self.page.bytes();
        let end = area.pages.end.min(area.pages.start.saturating_add(most as u64));
        area.with_pages(area.pages.start..end)
    }

    /// The engine of this job in whose windows readers go on: the job's own, or its stand-in. There
    /// may be none, because the stand-in must not make system calls fail if the job's engine does
    /// not.
    fn engine_while_traced(&self) -> Option<Engine> {
        if !self.engine().readers_wait() {
            // Only its engine for low contention makes readers wait.
            return Some(self.engine());
        }
        let stand_in = choice::stand_in(self.engine());
        stand_in.filter(|engine| self.may_fall_back && !engine.readers_wait())
    }

    /// The engine and the tracker for an area of a worker that the process `tracer` traces, or why
    /// the area stays.
    fn while_traced(&self, tracer: u32, books: Books<'_>) -> Result<(AreaEngine, Tracker), Reason> {
        let engine = self.engine_while_traced().ok_or(Reason::Traced)?;
        let by = AreaEngine { engine, why: Why::Traced };
        if engine == self.engine() {
            let tracker = if self.has_own() { self.serve(books) } else { None };
            return tracker.map(|tracker| (by, tracker)).ok_or(Reason::Traced);
        }
        let tracker = self.of_stand_in(engine).map_err(|(call, errno)| {
            let warn = || {
                let text = format!(
                    "pages stay while process {tracer} traces the job: the engine {engine} needs \
                     a tracker, and {call} failed with {errno}"
                );
                books.warn(Warning::of(WarningKind::Tracer, text, call, errno));
            };
            self.warned_of_tracer.get_or_init(warn);
            Reason::Traced
        })?;
        Ok((by, tracker))
    }

    /// The error for pages that stay because of a tracer.
    pub(super) fn stays_traced(&self, range: AddressRange) -> Error {
        let remedy = match self.may_fall_back {
            false => {
                "end the tracer, or let the engine be chosen (auto), which takes one that can do it"
            }
            true => "end the tracer, and start the job again",
        };
        let reason = Reason::Traced.to_string();
        Error::NotMoved { pid: std::process::id(), range, reason, remedy }
    }

    // Which tracker
    // ---------------------------------------------------------------------------------------------

    /// The tracker of an engine of the job.
    fn of(&self, engine: Engine, books: Books<'_>) -> Option<Tracker> {
        match &self.chosen.at_low_contention {
            Some((other, open)) if *other == engine => open.as_ref().map(OpenTracker::tracker),
            _ if engine == self.engine() && self.has_own() => self.serve(books),
            _ => None,
        }
    }

    /// The tracker of the job's engine, with a thread that reads its messages if they have to be
    /// read. `None` if the engine has no tracker, or if no thread could be started. In that case
    /// the job falls back to another engine, or fails.
    fn serve(&self, books: Books<'_>) -> Option<Tracker> {
        let Some(open) = &self.chosen.tracker else { return None };
        if !self.is_served() {
            return Some(open.tracker());
        }
        match open.serve(self.slots) {
            Ok(()) => Some(open.tracker()),
            Err(why) => {
                self.unserved.get_or_init(|| why);
                let error = no_thread("a thread that reads the tracker's messages", why);
                match self.may_fall_back {
                    true => books.not_followed(error.to_string()),
                    false => books.fail(error),
                }
                None
            }
        }
    }

    /// Whether a thread has to read the messages of the job's own tracker.
    fn is_served(&self) -> bool {
        self.engine().profile().tracker.is_some_and(|need| match need.messages {
            Messages::Writers => true,
            Messages::Exchanges => self.backend.is_host_memory(),
            Messages::None => false,
        })
    }

    /// The tracker of the stand-in, opened and served. A refusal holds for the rest of the job,
    /// unless it is a shortage, which may be over when the next area comes.
    fn of_stand_in(&self, engine: Engine) -> Result<Tracker, (Call, Errno)> {
        let served = &mut *lock(&self.stand_in);
        if matches!(served, Some(Err((_, errno))) if choice::is_shortage(*errno)) {
            *served = None;
        }
        let served = served.get_or_insert_with(|| self.serve_stand_in(engine));
        served.as_ref().map(OpenTracker::tracker).map_err(|refused| *refused)
    }

    fn serve_stand_in(&self, engine: Engine) -> Result<OpenTracker, (Call, Errno)> {
        let need = engine.profile().tracker.expect("only engines with a tracker come here");
        debug_assert_eq!(need.messages, Messages::Writers);
        let open = OpenTracker::new(&self.backend, need.ability)?;
        open.serve(self.slots).map_err(|errno| (Call::OpenTracker, errno))?;
        Ok(open)
    }
}
