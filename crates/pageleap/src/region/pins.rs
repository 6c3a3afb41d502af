//! Guards that keep pages where they are while a device, or the kernel for it, has their frames.
//!
//! A frame that is pinned is written to and read from by its number, whatever is mapped at the address, and no system call tells. So an attempt
//! and a guard exclude each other: pages under a guard are not moved, and a guard is only given once the attempts are over that were moving
//! its pages. Then no frame is ever vacated under a guard, and none needs to be kept from its next owner for one.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use super::RegionInner;
use crate::sync::{Condvar, Mutex, lock};

/// Who keeps which pages of a region where they are, and which are being moved.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    state: Mutex<State>,
    /// Signalled when pages have been moved, and when a guard has gone.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    guarded: Vec<Range<u64>>,
    moving: Vec<Range<u64>>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn remove(ranges: &mut Vec<Range<u64>>, range: &Range<u64>) {
    let at = ranges.iter().position(|one| one == range).expect("it was put there");
    ranges.swap_remove(at);
}

impl Pins {
    /// Marks pages as being moved, or says which of them are under a guard: the first ones, in one piece.
    pub(crate) fn start_moving(&self, pages: &Range<u64>) -> Result<Moving<'_>, Range<u64>> {
        let mut state = lock(&self.state);
        let guards = state.guarded.iter().filter(|guard| overlap(guard, pages));
        if let Some(first) = guards.min_by_key(|guard| guard.start) {
            return Err(first.start.max(pages.start)..first.end.min(pages.end));
        }
        state.moving.push(pages.clone());
        Ok(Moving { pins: self, pages: pages.clone() })
    }

    /// Keeps pages where they are, once they are not being moved any more.
    fn guard(&self, pages: Range<u64>) {
        let mut state = lock(&self.state);
        state.guarded.push(pages.clone());
        while state.moving.iter().any(|moving| overlap(moving, &pages)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether any of the pages is under a guard.
    pub(crate) fn any(&self, pages: &Range<u64>) -> bool {
        lock(&self.state).guarded.iter().any(|guard| overlap(guard, pages))
    }
}

/// Pages that are being moved, until this is dropped.
pub(crate) struct Moving<'a> {
    pins: &'a Pins,
    pages: Range<u64>,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        remove(&mut lock(&self.pins.state).moving, &self.pages);
        self.pins.changed.notify_all();
    }
}

/// Keeps pages of a region in their frames until it is dropped: see [`Region::pin`](super::Region::pin).
#[must_use = "dropping a guard lets the pages move"]
pub struct PinGuard {
    region: Arc<RegionInner>,
    pages: Range<u64>,
}

impl PinGuard {
    pub(super) fn new(region: &Arc<RegionInner>, pages: Range<u64>) -> Self {
        region.pins.guard(pages.clone());
        PinGuard { region: region.clone(), pages }
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if self.region.process != std::process::id() {
            return; // a child made by `fork`: who held the lock is not here
        }
        remove(&mut lock(&self.region.pins.state).guarded, &self.pages);
        self.region.pins.changed.notify_all();
    }
}
