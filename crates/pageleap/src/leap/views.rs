//! Leaps of regions that have views: their engine, and the address space that they need.

use std::sync::Arc;

use super::legs::{Claimed, Leg};
use super::standby::Standbys;
use crate::backend::Backend;
use crate::engine::choice::Chosen;
use crate::engine::{Engine, EngineChoice};
use crate::error::Error;
use crate::units::PageSize;

/// Closes all views of an area before it copies the area. Engines that follow writes, or forbid
/// them, do so in one mapping only.
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

/// Gives the engine of such a job its reason, and an error that refuses it its remedy.
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

/// The standbys of each worker, for the region with the most views.
pub(super) fn standbys(
    backend: &Arc<dyn Backend>,
    claimed: &[Claimed],
    (legs, page): (&[Leg], PageSize),
    workers: usize,
) -> Result<Vec<Standbys>, Error> {
    let views = claimed.iter().map(|one| one.claim.region().view_count()).max().unwrap_or(0);
    // Hugetlb pages are mapped in the window.
    let views = if page.is_hugetlb() { 0 } else { views };
    let pages = legs.iter().map(|leg| leg.pages.end - leg.pages.start).max().unwrap_or(0);
    let most = ENGINE.most_area_bytes(page).min(pages as usize * page.bytes());
    (0..workers).map(|_| Standbys::new(backend, views, most)).collect()
}
