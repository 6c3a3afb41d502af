//! [`MigrationContext`] keeps threads and trackers between jobs, if the user wants that.

use std::fmt;
use std::sync::{Arc, PoisonError};

use super::tracker::OpenTracker;
use crate::backend::{Ability, Backend, Call, Errno};
use crate::job::lasting::LastingThreads;
use crate::sync::{Mutex, lock};

/// Keeps threads and descriptors of one job for the next, so that many small jobs, one after the
/// other, take microseconds each. The descriptors are userfaultfds with their companions, through
/// which the kernel reports writes and blocks threads. Without a context each job makes its own,
/// and between two jobs the process has no thread and no descriptor of the library.
///
/// Nothing is made before the first job needs it. Then there are about as many threads as jobs have
/// run at the same time, up to three more that read the kernel's messages, and at most ten
/// descriptors. Between jobs the threads sleep. Jobs of several threads may use it at the same
/// time. Dropping it does not wait for running jobs; their threads and descriptors go when they
/// end.
///
/// A kept thread keeps the scheduling policy, nice value, affinity, memory policy and cgroup that
/// it inherited when it was made, from the thread that started the job then. So a later job runs
/// with these, and not with those of the thread that starts it. In a child made by `fork` the
/// context keeps nothing: each job makes its own, and dropping the context there ends nothing of
/// the parent.
///
/// ```no_run
/// # use pageleap::{Migration, MigrationContext, Pool, Region};
/// # fn leaves(region: &Region, pool: &Pool, leaves: &[usize]) -> Result<(), pageleap::Error> {
/// let context = MigrationContext::new();
/// for batch in leaves.chunks(64) {
///     let mut migration = Migration::new().context(&context);
///     for leaf in batch {
///         migration = migration.range(region, *leaf..*leaf + 4096, pool);
///     }
///     let report = migration.run()?;
///     assert!(report.ended.is_completed());
/// }
/// # Ok(()) }
/// ```
pub struct MigrationContext {
    threads: LastingThreads,
    trackers: Mutex<Vec<Kept>>,
}

/// An open tracker that is kept.
struct Kept {
    ability: Ability,
    backend: Arc<dyn Backend>,
    open: OpenTracker,
}

impl Default for MigrationContext {
    fn default() -> Self {
        MigrationContext::new()
    }
}

impl fmt::Debug for MigrationContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("MigrationContext");
        if let Ok(trackers) = self.trackers.try_lock() {
            text.field("trackers", &trackers.len());
        }
        text.finish_non_exhaustive()
    }
}

impl Drop for MigrationContext {
    fn drop(&mut self) {
        if !self.is_of_this_process() && self.trackers.try_lock().is_err() {
            // Another thread was changing the list at the time of the `fork`, so it may be
            // half-changed. Its descriptors close with the child.
            let trackers = self.trackers.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(trackers));
        }
    }
}

impl MigrationContext {
    /// Makes a context that keeps nothing yet.
    pub fn new() -> MigrationContext {
        MigrationContext { threads: LastingThreads::default(), trackers: Mutex::default() }
    }

    /// Whether this process made the context, and not a parent of it.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.threads.are_of_this_process()
    }

    pub(super) fn threads(&self) -> &LastingThreads {
        &self.threads
    }

    /// Returns a tracker of this ability: a kept one, or a new one, which is kept from then on. A
    /// tracker whose descriptors other code has closed is no longer kept.
    pub(super) fn tracker(
        &self,
        backend: &Arc<dyn Backend>,
        ability: Ability,
    ) -> Result<OpenTracker, (Call, Errno)> {
        let trackers = &mut *lock(&self.trackers);
        let is_wanted =
            |kept: &Kept| kept.ability == ability && Arc::ptr_eq(&kept.backend, backend);
        trackers.retain(|kept| !is_wanted(kept) || kept.open.is_whole());
        if let Some(kept) = trackers.iter().find(|kept| is_wanted(kept)) {
            return Ok(kept.open.clone());
        }
        let open = OpenTracker::lasting(backend, ability)?;
        trackers.push(Kept { ability, backend: backend.clone(), open: open.clone() });
        Ok(open)
    }
}
