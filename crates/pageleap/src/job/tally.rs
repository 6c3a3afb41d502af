//! Sums that a job keeps for its report.

use std::collections::BTreeMap;

use super::area::By;
use super::report::{CopyUse, Warning};
use crate::backend::Call;
use crate::engine::effort::{Counters, JobCounts};
use crate::engine::waits::Waits;
use crate::error::Error;

/// CPU time of the job's threads that have ended.
#[derive(Default)]
pub(crate) struct CpuTime {
    pub(crate) ns: u64,
    /// Whether the kernel did not report the CPU time of a thread.
    pub(crate) unknown: bool,
}

/// Sums that a job keeps for its report.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) counts: JobCounts,
    /// Statistics of windows.
    pub(crate) windows: Waits,
    /// Statistics of waits in the SIGSEGV handler.
    pub(crate) waits: Waits,
    /// Pages that have moved, by item and by engine.
    pub(crate) moved: BTreeMap<(usize, By), u64>,
    /// The first reason why writes could not be tracked.
    pub(crate) not_followed_why: Option<String>,
    /// Copy methods, by pair of nodes.
    pub(crate) copies: Vec<CopyUse>,
    pub(crate) first_failure: Option<Error>,
    /// Number of calls, indexed by `Call as usize`.
    pub(crate) calls: [u64; Call::ALL.len()],
    pub(crate) cpu: CpuTime,
    pub(crate) warnings: Vec<Warning>,
}

impl Tally {
    /// Adds the counters of an attempt, or of another window.
    pub(super) fn add(&mut self, counters: &Counters, budget_ns: u64) {
        let Counters { window_ns, hurried, held, counts, calls, .. } = *counters;
        self.counts.add(&counts);
        self.counts.holds += u64::from(held);
        if window_ns > 0 {
            self.counts.windows_first += u64::from(hurried);
            self.counts.windows_over_budget += u64::from(window_ns > budget_ns);
            self.windows.record(window_ns);
        }
        self.calls.iter_mut().zip(calls).for_each(|(sum, calls)| *sum += u64::from(calls));
    }
}
