//! Leaps of regions that have views: their engine.

use crate::engine::choice::Chosen;
use crate::engine::{Engine, EngineChoice};
use crate::error::Error;

/// Closes all views of an area before it copies the area. Engines that follow writes, or forbid them,
/// do so in one mapping only.
const ENGINE: Engine = Engine::StopCopy;

/// The engine for a job on regions with views. Refuses any other one that is asked for.
pub(super) fn engine(asked: EngineChoice) -> Result<EngineChoice, Error> {
    match asked.forced() {
        Some(engine) if engine != ENGINE => Err(Error::EngineRefused {
            engine: engine.name(),
            reason: format!("a region has views, of which the engine {engine} closes none"),
            remedy: format!("use {ENGINE} or auto, or drop the views"),
        }),
        _ => Ok(ENGINE.into()),
    }
}

/// The engine that has been found for such a job, with the reason; or why there is none.
pub(super) fn chosen<T>(found: Result<Chosen<T>, Error>) -> Result<Chosen<T>, Error> {
    match found {
        Ok(chosen) => Ok(Chosen { reason: "closes all views of an area".into(), ..chosen }),
        Err(Error::EngineRefused { engine, reason, .. }) => Err(Error::EngineRefused {
            engine,
            reason: format!("{reason}; and no other engine moves a region that has views"),
            remedy: "`pageleap doctor` tells how to allow it; or drop the views before the leap, and make \
                     them again after it"
                .into(),
        }),
        Err(other) => Err(other),
    }
}
