//! The state of a job that its workers share.

use super::contention::ContentionPolicy;
use super::outcomes::PageOutcomes;
use super::pace::Pace;
use super::plan::Pressure;
use super::queue::Queue;
use super::rate::Rate;
use super::tally::Tally;
use super::threads::ThreadCount;
use crate::sync::Instant;

/// The state of a job that its workers share, behind one lock.
pub(crate) struct State {
    pub(super) queue: Queue,
    /// By item.
    pub(super) outcomes: Vec<PageOutcomes>,
    pub(super) pressure: Pressure,
    pub(super) pace: Pace,
    pub(super) contention: Option<ContentionPolicy>,
    pub(super) rate: Option<Rate>,
    pub(super) threads: ThreadCount,
    /// Whether no work is left, or the job is to stop.
    pub(super) over: bool,
    pub(super) tally: Tally,
}

/// Whether the time of a job is up.
pub(super) fn is_late(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}
