//! The threads of a job: where they run, how the kernel schedules them, and what a job gives back
//! that runs in a thread which is not its own.

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

/// The threads of one job.
pub(super) struct Threads {
    pub(super) runs_on: RunsOn,
    /// The CPUs of the destinations.
    cpus: Vec<usize>,
    /// How the threads were scheduled by their starter.
    raised: OnceLock<Raised>,
}

impl Threads {
    pub(super) fn new(runs_on: RunsOn, cpus: Vec<usize>) -> Threads {
        Threads { runs_on, cpus, raised: OnceLock::new() }
    }

    /// Runs `work` in the job's first thread, where the destination is. Threads that `work` starts
    /// inherit that. Afterwards a thread that outlives the job is as it was.
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

    /// What to give back to the thread that runs the job.
    fn lend(&self, backend: &dyn Backend, legs: &[Leg]) -> Lent {
        let lasts = self.runs_on != RunsOn::Own && backend.is_host_memory();
        let has_tables = |leg: &Leg| leg.tables.is_some() || leg.from.0.tables.is_some();
        let changes_policy = lasts && legs.iter().any(has_tables);
        let policy = changes_policy.then(|| ThreadPolicy::own().ok()).flatten();
        let is_moved = lasts && self.runs_on == RunsOn::Kept;
        Lent { policy, affinity: is_moved.then(Affinity::own).flatten() }
    }

    /// How the calling thread may run before others while they wait for it, if it may.
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

    /// How a thread of the job copies for which nobody waits, if not as usual.
    pub(super) fn copying(&self) -> Option<Haste> {
        self.raised.get().and_then(|raised| raised.copying())
    }

    /// How to look who traces the calling thread.
    pub(super) fn watch(&self) -> Watch {
        match self.runs_on {
            RunsOn::Own => Watch::default(),
            RunsOn::Kept | RunsOn::Caller => Watch::of_lasting_thread(monotonic_ns()),
        }
    }
}

/// What a thread gets back that outlives the job.
struct Lent {
    policy: Option<ThreadPolicy>,
    affinity: Option<Affinity>,
}

impl Lent {
    /// Gives it back, to the thread that has lent itself.
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

/// How one worker may run before other threads while they wait for it (`SCHED_FIFO`).
pub(super) struct Precedence {
    first: Option<Haste>,
    /// Bounds windows that contain a copy.
    share: FirstShare,
}

impl Precedence {
    pub(super) fn new(first: Option<Haste>) -> Precedence {
        Precedence { first, share: FirstShare::new(monotonic_ns()) }
    }

    /// How to run in the windows of an attempt, if not as usual. Before a window that contains the
    /// copy of the area, the CPU may be offered to others.
    pub(super) fn in_windows(&mut self, closes_for_copy: bool) -> Option<Haste> {
        let first = self.first?;
        let admitted = !closes_for_copy || self.share.admits(monotonic_ns, thread::yield_now);
        admitted.then_some(first)
    }

    /// A window with a copy in it has taken this long.
    pub(super) fn spend(&mut self, window_ns: u64) {
        self.share.spend(window_ns);
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
