//! The records of an attempt: [`Counters`], for the report of the job, and [`AfterState`], for the
//! mover, which repairs the aliases afterwards.
//!
//! Both lie on the worker's stack, because the heap may lie in the area, which an engine must not
//! touch while the area is closed.

use crate::backend::{Backend, Call, Haste};

/// Events that a job counts. [`Report::counts`](crate::Report::counts) has them, and the JSON of
/// the C interface has each under the name of its field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobCounts {
    /// Copies that a writer disturbed ([`Engine::Mprotect`](crate::Engine::Mprotect)).
    pub disturbed_copies: u64,
    /// Areas that were split because a writer disturbed their copy.
    pub splits: u64,
    /// Areas whose writers waited for a copy of many pages: because the attempt was held, or
    /// because its writers were faster than its copies. Areas that were closed first because
    /// contention was low are not among them.
    pub holds: u64,
    /// Calls that were repeated because giving up would have left part of a region inaccessible.
    pub repairs: u64,
    /// The change of the number of mappings (VMAs) of the regions; negative if there are fewer.
    /// Pages over consecutive frames of a pool are one mapping, and moving a page out of their
    /// middle adds two. A process may have 65,530 by default (`vm.max_map_count`). For many
    /// isolated pages, the engine `kernel` may serve better (`docs/memory.md`, "Small and scattered
    /// ranges"). 0 for memory that is no region.
    pub mappings_added: i64,
    /// Windows that were longer than the wait budget.
    pub windows_over_budget: u64,
    /// Windows in which the thread that kept the area closed ran at a real-time priority
    /// (SCHED_FIFO; takes CAP_SYS_NICE or RLIMIT_RTPRIO). A short window of `mprotect`, or one that
    /// is one call for one page, is not worth it, unless a thread of low priority has started the
    /// job. Windows that contain the copy of an area are raised for at most about half of the time.
    /// Windows that are not raised may last until the thread gets a CPU again.
    pub windows_first: u64,
}

impl JobCounts {
    /// All counts with their names, in the order of the fields.
    pub fn named(&self) -> [(&'static str, i64); 7] {
        let JobCounts { disturbed_copies, splits, holds, repairs, mappings_added, .. } = *self;
        let JobCounts { windows_over_budget, windows_first, .. } = *self;
        [
            ("disturbed_copies", disturbed_copies as i64),
            ("splits", splits as i64),
            ("holds", holds as i64),
            ("repairs", repairs as i64),
            ("mappings_added", mappings_added),
            ("windows_over_budget", windows_over_budget as i64),
            ("windows_first", windows_first as i64),
        ]
    }

    /// Adds the counts of an attempt.
    #[cfg(not(loom))]
    pub(crate) fn add(&mut self, other: &JobCounts) {
        self.disturbed_copies += other.disturbed_copies;
        self.splits += other.splits;
        self.holds += other.holds;
        self.repairs += other.repairs;
        self.mappings_added += other.mappings_added;
        self.windows_over_budget += other.windows_over_budget;
        self.windows_first += other.windows_first;
    }
}

/// Counts and durations of an attempt, or of another window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Bytes copied, including copies that were dirtied and thrown away.
    pub(crate) copied: u64,
    /// Events that the report shows unchanged.
    pub(crate) counts: JobCounts,
    /// Whether writers waited for a copy of many pages in this attempt. Either it was held, or the
    /// call that should have opened the area for a writer failed, or writers were faster than the
    /// copies.
    pub(crate) held: bool,
    /// Nanoseconds from closing the area to opening it, if it was closed.
    pub(crate) window_ns: u64,
    /// Whether this thread ran at a real-time priority (SCHED_FIFO) during the attempt.
    pub(crate) hurried: bool,
    /// Base pages that were dirty after the first copy of the whole area.
    pub(crate) written: u64,
    /// Base pages copied while the area was closed.
    pub(crate) left: u64,
    /// Nanoseconds that the copy of the whole area took inside the window; 0 if it was copied
    /// before.
    pub(crate) copy_ns: u64,
    /// Threads that waited in the window, if they can be counted.
    pub(crate) waiters: u64,
    /// Number of calls, indexed by `Call as usize`.
    pub(crate) calls: [u32; Call::ALL.len()],
}

impl Counters {
    pub(crate) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
    }
}

/// The state of the alias of the new frames, whose page tables move to the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NewAlias {
    /// The attempt has copied through it, and changed nothing else.
    #[default]
    Untouched,
    /// An exchange was refused. The alias may have no page tables, and has the access of the span.
    Refused,
    /// Its page tables are those of the span now.
    Exchanged,
    /// Its mapping has moved into the span, because the descriptor of the file was gone. The alias
    /// is a hole.
    Moved,
}

/// Whether the page tables of the span were moved (parked) to the alias of the old frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Parked {
    /// The alias was not touched.
    #[default]
    No,
    /// The alias has the page tables, with the access and the attributes of the span.
    Yes,
    /// The alias may be a hole.
    Failed,
}

/// The state in which an attempt leaves the views of the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ViewsLeft {
    /// Their page tables are as before.
    #[default]
    Untouched,
    /// They map the old frames. Their page tables were dropped, and filled again.
    Dropped,
    /// They map the new frames.
    Mapped,
}

/// The state in which an attempt leaves the span and the two aliases.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AfterState {
    pub(crate) new_alias: NewAlias,
    pub(super) parked: Parked,
    /// The kernel refused the exchange without side effect, and will refuse it again, so later
    /// attempts map the file instead.
    pub(crate) exchange_unsupported: bool,
    pub(crate) views: ViewsLeft,
    /// A bit for each view whose page tables have perhaps not come from its node.
    pub(crate) unasked_views: u64,
    /// The number of a view whose standby may be a hole.
    pub(crate) torn_standby: Option<usize>,
    /// The span may have lost its lock (`mlock`), and the caller has to set the lock again.
    pub(crate) unlocked: bool,
    /// Unless it is mapped anew, the span may have MADV_NOHUGEPAGE, which its user did not set, and
    /// base pages in place of huge ones.
    pub(crate) split: bool,
}

impl AfterState {
    /// Whether the exchange put the new frames in place. The span then has the attributes of the
    /// alias, and otherwise those of a new mapping.
    pub(crate) fn is_exchanged(&self) -> bool {
        self.new_alias == NewAlias::Exchanged
    }
}

/// All records of an attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Effort {
    pub(crate) counters: Counters,
    pub(crate) after: AfterState,
    /// How this thread has been raised; `None` after its priority is restored.
    raised: Option<Haste>,
}

impl Effort {
    /// Continues from the values of `counters`.
    #[cfg(not(loom))]
    pub(super) fn counting_on(counters: Counters) -> Effort {
        Effort { counters, ..Effort::default() }
    }

    pub(crate) fn count(&mut self, call: Call) {
        self.counters.count(call);
    }

    /// Raises this thread's priority as `haste` says, unless it is raised already.
    pub(super) fn hurry(&mut self, backend: &dyn Backend, haste: Option<Haste>) {
        let Some(haste) = haste.filter(|_| self.raised.is_none()) else { return };
        if backend.hurry(haste, true) {
            self.raised = Some(haste);
            self.counters.hurried |= haste.is_first();
        }
    }

    /// Restores this thread's priority.
    pub(super) fn slow_down(&mut self, backend: &dyn Backend) {
        if let Some(haste) = self.raised.take() {
            backend.hurry(haste, false);
        }
    }
}
