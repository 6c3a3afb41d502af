//! What the workers of a job share.

use super::contention::Closing;
use super::outcomes::Outcomes;
use super::pace::Pace;
use super::plan::Pressure;
use super::queue::Queue;
use super::rate::Rate;
use super::tally::Tally;
use super::threads::ThreadCount;
use crate::sync::Instant;

/// What the workers of a job share.
pub(crate) struct State {
    pub(super) queue: Queue,
    /// By item.
    pub(super) outcomes: Vec<Outcomes>,
    pub(super) pressure: Pressure,
    pub(super) pace: Pace,
    pub(super) closing: Option<Closing>,
    pub(super) rate: Option<Rate>,
    pub(super) threads: ThreadCount,
    /// Nothing is left to do, or the job is to stop.
    pub(super) over: bool,
    pub(super) tally: Tally,
}

/// Whether the time of a job is up.
pub(super) fn is_late(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}
