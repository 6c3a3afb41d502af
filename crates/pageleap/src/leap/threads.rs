//! The threads of a job: their CPUs and their scheduling. A thread that outlives its job (a kept
//! one, or that of the caller) gets its own settings back.

use std::sync::OnceLock;

use pageleap_sys::ThreadPolicy;

use super::legs::{Claimed, Leg};
use crate::affinity::{self, Affinity};
use crate::backend::{Backend, Haste};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::priority::{self, FirstShare, Raised};
use crate::sync::{monotonic_ns, thread};
use crate::tracer::Watch;

/// The kind of thread that is a job's first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunsOn {
    /// A thread of its own, which ends with it.
    Own,
    /// A thread that a [`MigrationContext`](super::MigrationContext) keeps for further jobs.
    Kept,
    /// The thread that has called [`Migration::run`](super::Migration::run).
    Caller,
}

/// The threads of one job.
pub(super) struct Threads {
    pub(super) runs_on: RunsOn,
    /// The CPUs of the destinations.
    cpus: Vec<usize>,
    /// Whether regions have views, whose page tables come from other nodes than the span's.
    has_views: bool,
    /// The low priority from which the threads have been raised, if they were started with one.
    raised: OnceLock<Raised>,
}

impl Threads {
    pub(super) fn new(runs_on: RunsOn, cpus: Vec<usize>, has_views: bool) -> Threads {
        Threads { runs_on, cpus, has_views, raised: OnceLock::new() }
    }

    /// Runs `work` in the job's first thread: on the destination's CPUs, and not at a low priority.
    /// Threads that `work` starts inherit both. Afterwards a thread that outlives the job gets its
    /// settings back. The caller's thread keeps its CPUs and its priority.
    pub(super) fn surround(
        &self,
        backend: &dyn Backend,
        legs: &[Leg],
        books: Books<'_>,
        work: impl FnOnce(),
    ) {
        let lent = self.lend(backend, legs);
        if backend.is_host_memory() && self.runs_on != RunsOn::Caller {
            if !affinity::run_on(&self.cpus) {
                books.warn(Warning::not_on_cpus());
            }
            self.raised.get_or_init(|| {
                Raised::this_thread(|low| books.warn(Warning::new(WarningKind::Priority, low)))
            });
        }
        work();
        lent.give_back(self.raised.get());
    }

    /// The memory policy of the calling worker before its first area, if areas change it for views.
    pub(super) fn inherited(&self, backend: &dyn Backend) -> Option<ThreadPolicy> {
        let changes = self.has_views && backend.is_host_memory();
        changes.then(|| ThreadPolicy::own().ok()).flatten()
    }

    /// Saves the settings that the thread gets back after the job.
    fn lend(&self, backend: &dyn Backend, legs: &[Leg]) -> Lent {
        let lasts = self.runs_on != RunsOn::Own && backend.is_host_memory();
        let has_tables = |leg: &Leg| leg.tables.is_some() || leg.from.0.tables.is_some();
        let changes_policy = lasts && (self.has_views || legs.iter().any(has_tables));
        let policy = changes_policy.then(|| ThreadPolicy::own().ok()).flatten();
        let is_moved = lasts && self.runs_on == RunsOn::Kept;
        Lent { policy, affinity: is_moved.then(Affinity::own).flatten() }
    }

    /// The raised priority (SCHED_FIFO) of the calling thread while others wait for it, if it may
    /// have one.
    pub(super) fn first(&self, backend: &dyn Backend) -> Option<Haste> {
        if !backend.is_host_memory() {
            return None;
        }
        if self.runs_on == RunsOn::Caller {
            return priority::first_of_lent_thread();
        }
        priority::run_shortly();
        priority::first()
    }

    /// The lowered priority of copies for which nobody waits, if the job was started with one.
    pub(super) fn copying(&self) -> Option<Haste> {
        self.raised.get().and_then(|raised| raised.copying())
    }

    /// How the calling thread finds out about its tracer.
    pub(super) fn watch(&self) -> Watch {
        match self.runs_on {
            RunsOn::Own => Watch::default(),
            RunsOn::Kept | RunsOn::Caller => Watch::of_lasting_thread(monotonic_ns()),
        }
    }
}

/// Settings of a thread that outlives the job.
struct Lent {
    policy: Option<ThreadPolicy>,
    affinity: Option<Affinity>,
}

impl Lent {
    /// Gives them back to the calling thread.
    fn give_back(self, raised: Option<&Raised>) {
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

/// The raised priority (SCHED_FIFO) of one worker while other threads wait for it.
pub(super) struct Precedence {
    first: Option<Haste>,
    /// Bounds windows that contain a copy.
    share: FirstShare,
}

impl Precedence {
    pub(super) fn new(first: Option<Haste>) -> Precedence {
        Precedence { first, share: FirstShare::new(monotonic_ns()) }
    }

    /// The raised priority for the windows of an attempt, if there is one. Before a window that
    /// contains the copy of the area, the worker may offer its CPU to others first, and go without.
    pub(super) fn in_windows(&mut self, closes_for_copy: bool) -> Option<Haste> {
        let first = self.first?;
        let admitted = !closes_for_copy || self.share.admits(monotonic_ns, thread::yield_now);
        admitted.then_some(first)
    }

    /// Notes that a window with a copy in it has taken this long.
    pub(super) fn spend(&mut self, window_ns: u64) {
        self.share.spend(window_ns);
    }
}

/// Whether a job of so many threads may run in the calling thread. The thread must be able to get
/// back the settings that the job would change. Its own memory must not lie near the pages, because
/// it would wait for itself.
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
