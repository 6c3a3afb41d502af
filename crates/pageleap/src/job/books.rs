//! The books of a job: the part of the job's state that its mover reads and writes.

use std::ops::Range;

use super::area::{By, Reason};
use super::handle::JobShared;
use super::outcomes::{PageOutcome, State as Became};
use super::report::{CopyUse, Warning};
use super::state::{State, is_late};
use crate::backend::Call;
use crate::engine::effort::Counters;
use crate::engine::waits::Waits;
use crate::error::Error;
use crate::sync::{Instant, Mutex, lock};

/// The books of a job, for its mover.
#[derive(Clone, Copy)]
pub(crate) struct Books<'a> {
    pub(super) state: &'a Mutex<State>,
    pub(super) shared: &'a JobShared,
    pub(super) deadline: Option<Instant>,
}

impl Books<'_> {
    /// Whether somebody has asked the job to stop, or its time is up.
    pub(crate) fn is_to_stop(self) -> bool {
        self.shared.stop().is_some() || is_late(self.deadline)
    }

    /// Adds a warning.
    pub(crate) fn warn(self, warning: Warning) {
        lock(self.state).tally.warnings.push(warning);
    }

    /// Adds a warning, unless the same one exists.
    pub(crate) fn warn_once(self, warning: Warning) {
        let warnings = &mut lock(self.state).tally.warnings;
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    /// Records the error for which the job cannot go on. The first one counts.
    pub(crate) fn fail(self, error: Error) {
        lock(self.state).tally.first_failure.get_or_insert(error);
    }

    /// The outcomes of some pages of an item, in runs.
    pub(crate) fn outcomes(self, item: usize, pages: &Range<u64>) -> Vec<(Range<u64>, Became)> {
        lock(self.state).outcomes[item].within(pages)
    }

    /// Records that pages of an item which counted as not moved have arrived after all.
    pub(crate) fn arrived(self, item: usize, run: &Range<u64>, by: By) {
        let state = &mut *lock(self.state);
        state.outcomes[item].set(run, PageOutcome::Migrated, None);
        *state.tally.moved.entry((item, by)).or_default() += run.end - run.start;
    }

    /// Records that pages of an item which had arrived, or lay on their node, lie elsewhere in the
    /// end.
    pub(crate) fn moved_on(self, item: usize, run: &Range<u64>, before: PageOutcome, by: By) {
        let state = &mut *lock(self.state);
        state.outcomes[item].set(run, PageOutcome::Failed, Some(Reason::MovedOn));
        if before == PageOutcome::Migrated {
            let moved = state.tally.moved.entry((item, by)).or_default();
            *moved = moved.saturating_sub(run.end - run.start);
        }
    }

    /// Sets the outcome of some pages, with the reason for it.
    pub(crate) fn explain(self, item: usize, run: &Range<u64>, outcome: PageOutcome, why: Reason) {
        lock(self.state).outcomes[item].set(run, outcome, Some(why));
    }

    /// Replaces the job's first error by the one of the first page that has not moved in the end.
    pub(crate) fn failed_first(self, error: Option<Error>) {
        lock(self.state).tally.first_failure = error;
    }

    /// Records why writes cannot be tracked. The first reason counts.
    pub(crate) fn not_followed(self, why: String) {
        lock(self.state).tally.not_followed_why.get_or_insert(why);
    }

    /// Sets the copy methods for the report.
    pub(crate) fn copied_by(self, uses: Vec<CopyUse>) {
        lock(self.state).tally.copies = uses;
    }

    /// Counts system calls.
    pub(crate) fn count(self, call: Call, times: u64) {
        lock(self.state).tally.calls[call as usize] += times;
    }

    /// Adds the counters of a window that was no attempt, such as joining mappings.
    pub(crate) fn add(self, counters: &Counters) {
        let state = &mut *lock(self.state);
        let budget_ns = state.pace.budget_ns();
        state.tally.add(counters, budget_ns);
    }

    /// Changes the statistics of threads that waited.
    pub(crate) fn with_waits(self, change: impl FnOnce(&mut Waits)) {
        change(&mut lock(self.state).tally.waits);
    }

    /// Adds the CPU time of the calling thread, which is about to end, to that of the job.
    pub(crate) fn count_cpu_time(self) {
        self.add_cpu_time(pageleap_sys::thread_cpu_time_ns().ok());
    }

    /// Adds the CPU time of threads that have ended; `None` if it is unknown.
    pub(crate) fn add_cpu_time(self, used_ns: Option<u64>) {
        let cpu = &mut lock(self.state).tally.cpu;
        match used_ns {
            Some(ns) => cpu.ns += ns,
            None => cpu.unknown = true,
        }
    }
}
