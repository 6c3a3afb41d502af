//! What a job of regions does while another process traces its threads
//! ([`tracer`](crate::tracer)): the [stand-in](super::stand_in), in whose windows readers go on,
//! moves the areas, or they stay.

use super::mover::{FrameMover, Worker};
use crate::backend::Tracker;
use crate::engine::Engine;
use crate::engine::choice::{self, AreaEngine, Why};
use crate::error::Error;
use crate::job::area::{Area, Reason};
use crate::job::books::Books;
use crate::sync::monotonic_ns;
use crate::units::AddressRange;

impl FrameMover {
    /// Looks whether the calling worker is traced, and returns as much of the area as the engine
    /// takes that moves it then. Between areas only: in a window it would be too late.
    pub(super) fn look_for_tracer(&self, worker: &mut Worker, area: &Area) -> Area {
        let terrain = &self.terrain;
        let few_wait = terrain.while_few_wait.as_ref().map(|(engine, _)| *engine);
        let mut engines = [Some(terrain.engine), few_wait].into_iter().flatten();
        if !engines.any(Engine::readers_wait) {
            return area.clone();
        }
        worker.tracer = worker.watch.tracer(monotonic_ns(), || self.backend().tracer());
        let Some(engine) = worker.tracer.and_then(|_| self.engine_while_traced()) else {
            return area.clone();
        };
        let most = engine.most_area_bytes(terrain.page) / terrain.page.bytes();
        let end = area.pages.end.min(area.pages.start.saturating_add(most as u64));
        area.with_pages(area.pages.start..end)
    }

    /// The engine of this job in whose windows readers go on: the job's own, or its stand-in. System
    /// calls that the job's engine keeps whole stay whole, so there may be none.
    fn engine_while_traced(&self) -> Option<Engine> {
        let own = self.terrain.engine;
        if !own.readers_wait() {
            // Only the one that it takes along while few threads wait has readers wait.
            return Some(own);
        }
        let stand_in = choice::stand_in(self.terrain.engine);
        stand_in.filter(|engine| self.terrain.may_fall_back && !engine.readers_wait())
    }

    /// The engine for an area of a worker that this process traces, with its tracker, or why the
    /// area stays.
    pub(super) fn choose_while_traced(
        &self,
        tracer: u32,
        books: Books<'_>,
    ) -> Result<(AreaEngine, Tracker), Reason> {
        let engine = self.engine_while_traced().ok_or(Reason::Traced)?;
        let by = AreaEngine { engine, why: Why::Traced };
        if engine == self.terrain.engine {
            let tracker = if self.has_tracker() { self.serve(books) } else { None };
            return tracker.map(|tracker| (by, tracker)).ok_or(Reason::Traced);
        }
        let tracker = self.tracker_of_stand_in(engine).map_err(|(call, errno)| {
            let warn = || {
                books.warn(format!(
                    "pages stay while process {tracer} traces the job: the engine {engine} needs \
                     a tracker, and {call} failed with {errno}"
                ));
            };
            self.warned_of_tracer.get_or_init(warn);
            Reason::Traced
        })?;
        Ok((by, tracker))
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
