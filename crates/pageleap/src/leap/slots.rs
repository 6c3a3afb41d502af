//! The slots in which the workers of a job announce their attempts.

use crate::engine::fault::{MAX_THREADS, SLOTS};
use crate::engine::slot::Slot;
use crate::error::Error;

/// A slot of the process' table, given back on drop.
pub(super) struct ClaimedSlot(usize);

impl ClaimedSlot {
    /// Claims a slot for each worker of a job of so many threads.
    pub(super) fn claim(workers: usize, threads: usize) -> Result<Vec<ClaimedSlot>, Error> {
        let limit = || Error::Limit {
            what: "migrating threads of this process",
            limit: MAX_THREADS,
            in_use: MAX_THREADS,
            needed: threads,
            remedy: "wait for running jobs, or use fewer threads",
        };
        (0..workers).map(|_| SLOTS.claim().map(ClaimedSlot).ok_or_else(limit)).collect()
    }

    pub(super) fn slot(&self) -> &'static Slot {
        &SLOTS.slots[self.0]
    }

    /// A bit for the place of each of these slots in the table.
    pub(super) fn mask(slots: &[ClaimedSlot]) -> u64 {
        slots.iter().fold(0, |mask, slot| mask | 1 << slot.0)
    }
}

impl Drop for ClaimedSlot {
    fn drop(&mut self) {
        SLOTS.release(self.0);
    }
}
