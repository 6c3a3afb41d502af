//! Threads of the library that work on a region as long as it lives, and end with it.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use super::{Region, RegionInner};
use crate::sync::{Mutex, lock};

/// A thread that works on a region.
pub(crate) trait Dependent: Send + Sync {
    /// Ends the thread, and returns when it no longer uses the region.
    fn end_with_region(&self);
}

/// The threads that work on one region.
#[derive(Default)]
pub(super) struct Dependents(Mutex<Vec<Weak<dyn Dependent>>>);

impl Dependents {
    /// Ends all of them.
    pub(super) fn end(&self) {
        let all: Vec<_> = lock(&self.0).drain(..).filter_map(|one| one.upgrade()).collect();
        all.iter().for_each(|one| one.end_with_region());
    }
}

impl RegionInner {
    /// Registers a thread. The region's end will end it.
    pub(crate) fn add_dependent(&self, dependent: Weak<dyn Dependent>) {
        let mut dependents = lock(&self.dependents.0);
        dependents.retain(|one| one.strong_count() > 0);
        dependents.push(dependent);
    }
}

/// A region for a [`Dependent`], as long as this value lives. In contrast to the user's [`Region`], its
/// end stops no job.
pub(crate) struct RegionRef(ManuallyDrop<Region>);

impl RegionRef {
    pub(crate) fn new(region: &Weak<RegionInner>) -> Option<RegionRef> {
        Some(RegionRef(ManuallyDrop::new(Region(region.upgrade()?))))
    }
}

impl Deref for RegionRef {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

impl Drop for RegionRef {
    fn drop(&mut self) {
        // SAFETY: the reference is read once, because the value that had it is not dropped and not
        // used again.
        let inner: Arc<RegionInner> = unsafe { std::ptr::read(&self.0.0) };
        drop(inner);
    }
}
