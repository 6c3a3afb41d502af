//! What outlives a job, if the user wants that: threads and trackers. And what a job changes of a
//! thread that is not its own.

use std::fmt;
use std::sync::{Arc, PoisonError};

use pageleap_sys::ThreadPolicy;

use super::legs::{Claimed, Leg};
use super::mover::Terrain;
use super::tracker::OpenTracker;
use crate::affinity::Affinity;
use crate::backend::{Ability, Backend, Call, Errno};
use crate::job::lasting::LastingThreads;
use crate::priority::{self, Raised};
use crate::sync::{Mutex, lock};

/// Keeps what jobs need beside their frames for the next one: their threads, and the descriptors
/// through which the kernel tells of writes and holds threads up (userfaultfd). Many small jobs, one
/// after the other, then take microseconds each. Without one, each job makes its own, and the process
/// has no thread and no descriptor of the library between two jobs.
///
/// Nothing is made before the first job needs it. Then there are about as many threads as jobs have
/// run at the same time, and up to three more that read the kernel's messages, and at most ten
/// descriptors. Between jobs the threads sleep. Jobs of several threads may use it at the same time.
/// Dropping it does not wait for running jobs; what they use goes when they end.
///
/// A job that a kept thread runs inherits scheduling policy, nice value, memory policy and cgroup from
/// the thread that started the job for which the kept thread was made, and not from the thread that
/// starts this job; of the affinity the same is true. In a child made by `fork` it keeps nothing: each
/// job makes its own, and dropping the context there ends nothing of the parent.
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
            // At the time of the `fork` another thread was changing the list: it may be half-changed.
            // The descriptors close with the child.
            let trackers = self.trackers.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(trackers));
        }
    }
}

impl MigrationContext {
    /// Makes one that keeps nothing yet.
    pub fn new() -> MigrationContext {
        MigrationContext { threads: LastingThreads::default(), trackers: Mutex::default() }
    }

    /// Whether this is the process that made it, whose threads and trackers it keeps.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.threads.are_of_this_process()
    }

    pub(super) fn threads(&self) -> &LastingThreads {
        &self.threads
    }

    /// A kept tracker of an ability, or a new one, which is kept then. One whose descriptors other
    /// code has closed is not kept any longer.
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

/// Which thread is a job's first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunsOn {
    /// One of its own, which ends with it.
    Own,
    /// One that is kept for further jobs.
    Kept,
    /// The thread that has called [`Migration::run`](super::Migration::run).
    Caller,
}

impl RunsOn {
    /// What to give back at the end of a job to the calling thread, which runs it.
    pub(super) fn lend(self, terrain: &Terrain, legs: &[Leg]) -> Lent {
        let lasts = self != RunsOn::Own && terrain.backend.is_host_memory();
        let has_tables = |leg: &Leg| leg.tables.is_some() || leg.from.0.tables.is_some();
        let changes_policy = lasts && legs.iter().any(has_tables);
        let policy = changes_policy.then(|| ThreadPolicy::own().ok()).flatten();
        let is_moved = lasts && self == RunsOn::Kept;
        Lent { policy, affinity: is_moved.then(Affinity::own).flatten() }
    }
}

/// What a thread gets back that outlives the job.
pub(super) struct Lent {
    policy: Option<ThreadPolicy>,
    affinity: Option<Affinity>,
}

impl Lent {
    /// Gives it back, to the thread that has lent itself.
    pub(super) fn give_back(self, raised: Option<&Raised>) {
        if let Some(policy) = self.policy {
            // It is refused if the cpuset no longer allows a node of the policy; the kernel has
            // replaced such a policy itself.
            let _ = policy.set();
        }
        if let Some(affinity) = self.affinity {
            affinity.restore();
            if let Some(raised) = raised {
                raised.undo();
            }
        }
    }
}

/// Whether a job of so many threads may run in the calling thread: if what it would change of it can
/// be given back, and the thread needs none of the pages while they are closed.
pub(super) fn may_run_here(claimed: &[Claimed], threads: usize, is_host_memory: bool) -> bool {
    let mut here = 0u8;
    // SAFETY: the C library's variable of the calling thread.
    let thread_local = unsafe { libc::__errno_location() }.addr();
    let own = [(&raw mut here).addr(), thread_local];
    let holds = |one: &Claimed| {
        let (region, range) = (one.claim.region(), one.claim.range());
        // The stack grows, and is more than the page of one variable.
        const AROUND: usize = 1 << 20;
        let first = (region.start + range.start).saturating_sub(AROUND);
        let near = first..region.start + range.end + AROUND;
        own.iter().any(|addr| near.contains(addr))
    };
    let lends_itself = !is_host_memory || priority::lends_itself();
    threads == 1 && lends_itself && !claimed.iter().any(holds) && !pageleap_sys::is_own_thread()
}
