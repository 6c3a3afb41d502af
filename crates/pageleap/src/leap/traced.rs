//! What a job of regions does while another process traces its threads
//! ([`tracer`](crate::tracer)): areas move by an engine in whose windows readers go on, or stay.
//!
//! That engine's tracker of writes (the word has nothing to do with ptrace) is opened when it is
//! needed for the first time, so that jobs that nobody traces do not pay for it. The thread that
//! reads its messages is started then, by the worker that needs it.

use std::sync::Arc;

use super::mover::{FrameMover, Worker};
use super::tracker::{OpenTracker, serve};
use crate::backend::{Errno, Tracker};
use crate::engine::Engine;
use crate::engine::choice::{AreaEngine, Why};
use crate::engine::traced::engine_for;
use crate::error::Error;
use crate::job::area::{Area, Reason};
use crate::job::books::Books;
use crate::sync::{AtomicU64, Ordering, lock, thread};
use crate::units::AddressRange;

/// The engine for areas that move while the job is traced.
#[derive(Default)]
pub(super) enum WhileTraced {
    /// Nobody has needed it.
    #[default]
    Unknown,
    Opened(Opened),
    /// There is none.
    Missing,
}

pub(super) struct Opened {
    engine: Engine,
    tracker: Option<OpenTracker>,
    /// Reads the messages of the tracker, if that is needed.
    server: Option<Server>,
}

/// A thread that reads messages.
struct Server {
    thread: thread::Thread,
    told: Arc<Told>,
}

/// What such a thread says of itself.
struct Told {
    /// 1 as soon as it needs nothing of the heap any more.
    ready: AtomicU64,
    /// The CPU time that it has used, at its end.
    cpu_ns: AtomicU64,
}

const UNKNOWN: u64 = u64::MAX;

/// What moves the areas of a worker that is traced.
#[derive(Clone, Copy)]
pub(super) struct Instead {
    /// None if the pages stay.
    engine: Option<Engine>,
    pub(super) tracker: Option<Tracker>,
}

impl Worker {
    /// The engine for an area for which `by` was chosen, or why it stays.
    pub(super) fn unless_traced(&self, by: AreaEngine) -> Result<AreaEngine, Reason> {
        match self.instead {
            Some(Instead { engine, .. }) if by.engine.readers_wait() => {
                let engine = engine.ok_or(Reason::Traced)?;
                Ok(AreaEngine { engine, why: Why::Traced })
            }
            _ => Ok(by),
        }
    }
}

impl FrameMover {
    /// Looks whether the calling worker is traced, and returns as much of the area as the engine
    /// takes that moves it then. Between areas only: in a window it would be too late.
    pub(super) fn look_for_tracer(
        &self,
        worker: &mut Worker,
        area: &Area,
        books: Books<'_>,
    ) -> Area {
        let terrain = &self.terrain;
        let few_wait = terrain.while_few_wait.as_ref().map(|(engine, _)| *engine);
        let mut engines = [Some(terrain.engine), few_wait].into_iter().flatten();
        if !engines.any(Engine::readers_wait) {
            return area.clone();
        }
        let now_ns = terrain.began.elapsed().as_nanos() as u64;
        let tracer = worker.watch.tracer(now_ns, || self.backend().tracer());
        worker.instead = tracer.map(|tracer| self.instead(tracer, books));
        let Some(engine) = worker.instead.and_then(|instead| instead.engine) else {
            return area.clone();
        };
        let most = engine.most_area_bytes(terrain.page) / terrain.page.bytes();
        let end = area.pages.end.min(area.pages.start.saturating_add(most as u64));
        area.with_pages(area.pages.start..end)
    }

    /// What moves the areas of workers that this process traces. Opens it, if nobody has.
    fn instead(&self, tracer: u32, books: Books<'_>) -> Instead {
        if !self.terrain.may_fall_back {
            return Instead { engine: None, tracker: None };
        }
        let mut why_not = None;
        let mut traced = lock(&self.traced);
        if let WhileTraced::Unknown = *traced {
            *traced = self.open_instead().map_or_else(
                |why| {
                    why_not = Some(why);
                    WhileTraced::Missing
                },
                WhileTraced::Opened,
            );
        }
        let instead = match &*traced {
            WhileTraced::Opened(Opened { engine, tracker, .. }) => Instead {
                engine: Some(*engine),
                tracker: tracker.as_ref().map(OpenTracker::tracker),
            },
            WhileTraced::Unknown | WhileTraced::Missing => Instead { engine: None, tracker: None },
        };
        drop(traced);
        if let Some(why) = why_not {
            books.warn(format!("pages stay while process {tracer} traces the job: {why}"));
        }
        instead
    }

    fn open_instead(&self) -> Result<Opened, String> {
        let terrain = &self.terrain;
        let open = |ability| OpenTracker::new(&terrain.backend, ability);
        let (engine, tracker) = engine_for(terrain.engine, terrain.page, open)?;
        let served = tracker.as_ref().filter(|_| self.is_served(engine));
        let server = served.map(|open| self.serve_apart(open.tracker())).transpose();
        let server = server.map_err(|errno| format!("a thread could not be started: {errno}"))?;
        Ok(Opened { engine, tracker, server })
    }

    /// Has a thread read a tracker's messages until [`FrameMover::end_instead`].
    fn serve_apart(&self, tracker: Tracker) -> Result<Server, Errno> {
        let told = Arc::new(Told { ready: AtomicU64::new(0), cpu_ns: AtomicU64::new(UNKNOWN) });
        let (backend, slots, tells) =
            (self.terrain.backend.clone(), self.slot_mask(), told.clone());
        let thread = thread::Thread::start(c"pageleap-events", move || {
            // After that it reads nothing that was captured: the heap may be what is frozen.
            serve(&*backend, tracker, slots, &|| tells.ready.store(1, Ordering::Release));
            if let Ok(ns) = pageleap_sys::thread_cpu_time_ns() {
                tells.cpu_ns.store(ns, Ordering::Relaxed);
            }
        })?;
        while told.ready.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        Ok(Server { thread, told })
    }

    /// Ends what has been opened because of a tracer, when all areas have been dealt with.
    pub(super) fn end_instead(&self, books: Books<'_>) {
        let opened = std::mem::take(&mut *lock(&self.traced));
        let WhileTraced::Opened(Opened { tracker: Some(open), server: Some(server), .. }) = opened
        else {
            return;
        };
        self.backend().end_tracker(open.tracker());
        server.thread.join();
        let used_ns = server.told.cpu_ns.load(Ordering::Relaxed);
        books.add_cpu_time(Some(used_ns).filter(|ns| *ns != UNKNOWN));
    }

    /// The error for pages that stay because of a tracer.
    pub(super) fn stays_traced(&self, range: AddressRange) -> Error {
        let remedy = match self.terrain.may_fall_back {
            false => {
                "end the tracer, or let the engine be chosen (auto), which takes one that can do it"
            }
            true => "end the tracer, and start the job again",
        };
        let reason = Reason::Traced.to_string();
        Error::NotMoved { pid: std::process::id(), range, reason, remedy }
    }
}
