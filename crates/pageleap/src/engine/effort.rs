//! What an attempt writes down while it runs: [`Counters`] for the books of the job, [`AfterState`]
//! for whoever repairs the aliases afterwards.
//!
//! Both lie on the worker's stack. Nothing here allocates, because the heap may lie in the area.

use crate::backend::{Backend, Call, Haste};

/// Counts and durations of an attempt, or of another window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Bytes copied, including worthless copies.
    pub(crate) copied: u64,
    /// Calls that had to be repeated until they succeeded, because giving up would have left the
    /// span inaccessible.
    pub(crate) repairs: u64,
    /// Writers were held back in this attempt: by plan, because a call that lets a writer in failed,
    /// or because writers were faster than the copies.
    pub(crate) held: bool,
    /// Nanoseconds from closing the area to opening it, if it was closed.
    pub(crate) window_ns: u64,
    /// Whether this thread was scheduled before others (`SCHED_FIFO`) during the attempt.
    pub(crate) hurried: bool,
    /// Base pages found written after the first copy of the whole area.
    pub(crate) written: u64,
    /// Base pages copied while the area was closed.
    pub(crate) left: u64,
    /// How long all of the area was copied while it was closed, in nanoseconds; 0 if it was copied
    /// before.
    pub(crate) copy_ns: u64,
    /// Threads that came to wait while the area was closed, if they can be counted.
    pub(crate) waiters: u64,
    /// How many more extents the region has, or fewer if negative.
    pub(crate) extents: i64,
    /// Calls made, by the number of their kind.
    pub(crate) calls: [u32; Call::ALL.len()],
}

impl Counters {
    pub(crate) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
    }
}

/// What became of the alias of the new frames, from which the span gets its page tables.
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

/// Whether the page tables of the span went to the alias of the old frames.
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

/// What an attempt has left of the span and of the two aliases.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AfterState {
    pub(crate) new_alias: NewAlias,
    pub(super) parked: Parked,
    /// The kernel refused the exchange without side effect, and will refuse it again: map from now
    /// on.
    pub(crate) exchange_unsupported: bool,
    /// The span may have lost its lock (`mlock`), and the caller has to set the lock again.
    pub(crate) unlocked: bool,
    /// Unless it is mapped anew, the span may have advice against huge pages that its user did not
    /// give, and base pages in place of huge ones.
    pub(crate) split: bool,
}

impl AfterState {
    /// Whether the exchange put the new frames in place. The span then has the attributes of the
    /// alias, and otherwise those of a new mapping.
    pub(crate) fn is_exchanged(&self) -> bool {
        self.new_alias == NewAlias::Exchanged
    }
}

/// All that an attempt writes down.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Effort {
    pub(crate) counters: Counters,
    pub(crate) after: AfterState,
    /// How this thread has been raised, until it is put back.
    raised: Option<Haste>,
}

impl Effort {
    /// Goes on counting where `counters` ends.
    #[cfg(not(loom))]
    pub(super) fn counting_on(counters: Counters) -> Effort {
        Effort { counters, ..Effort::default() }
    }

    pub(crate) fn count(&mut self, call: Call) {
        self.counters.count(call);
    }

    /// Raises this thread as far as `haste` says, if that is not done.
    pub(super) fn hurry(&mut self, backend: &dyn Backend, haste: Option<Haste>) {
        let Some(haste) = haste.filter(|_| self.raised.is_none()) else { return };
        if backend.hurry(haste, true) {
            self.raised = Some(haste);
            self.counters.hurried |= haste.is_first();
        }
    }

    /// Puts this thread back.
    pub(super) fn slow_down(&mut self, backend: &dyn Backend) {
        if let Some(haste) = self.raised.take() {
            backend.hurry(haste, false);
        }
    }
}
