//! The books of a job: what its mover writes into the job's state, and reads of it.

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

    /// Something went less well than asked.
    pub(crate) fn warn(self, warning: Warning) {
        lock(self.state).tally.warnings.push(warning);
    }

    /// The same, which is said once however often it happens.
    pub(crate) fn warn_once(self, warning: Warning) {
        let warnings = &mut lock(self.state).tally.warnings;
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    /// The job cannot go on.
    pub(crate) fn fail(self, error: Error) {
        lock(self.state).tally.first_failure.get_or_insert(error);
    }

    /// What became of some pages of an item, in runs.
    pub(crate) fn outcomes(self, item: usize, pages: &Range<u64>) -> Vec<(Range<u64>, Became)> {
        lock(self.state).outcomes[item].within(pages)
    }

    /// Some pages of an item, none of which had moved, have arrived in the end.
    pub(crate) fn arrived(self, item: usize, run: &Range<u64>, by: By) {
        let state = &mut *lock(self.state);
        state.outcomes[item].set(run, PageOutcome::Migrated, None);
        *state.tally.moved.entry((item, by)).or_default() += run.end - run.start;
    }

    /// Some pages of an item, which had arrived or lay where they should, lie elsewhere in the end.
    pub(crate) fn moved_on(self, item: usize, run: &Range<u64>, before: PageOutcome, by: By) {
        let state = &mut *lock(self.state);
        state.outcomes[item].set(run, PageOutcome::Failed, Some(Reason::MovedOn));
        if before == PageOutcome::Migrated {
            let moved = state.tally.moved.entry((item, by)).or_default();
            *moved = moved.saturating_sub(run.end - run.start);
        }
    }

    /// Gives a reason for what became of some pages.
    pub(crate) fn explain(self, item: usize, run: &Range<u64>, outcome: PageOutcome, why: Reason) {
        lock(self.state).outcomes[item].set(run, outcome, Some(why));
    }

    /// The first of the pages that have not moved in the end.
    pub(crate) fn failed_first(self, error: Option<Error>) {
        lock(self.state).tally.first_failure = error;
    }

    /// Writes cannot be followed.
    pub(crate) fn not_followed(self, why: String) {
        lock(self.state).tally.not_followed_why.get_or_insert(why);
    }

    /// How pages are copied.
    pub(crate) fn copied_by(self, uses: Vec<CopyUse>) {
        lock(self.state).tally.copies = uses;
    }

    /// A call was made.
    pub(crate) fn count(self, call: Call, times: u64) {
        lock(self.state).tally.calls[call as usize] += times;
    }

    /// An area was closed for something else than an attempt.
    pub(crate) fn add(self, counters: &Counters) {
        let state = &mut *lock(self.state);
        let budget_ns = state.pace.budget_ns();
        state.tally.add(counters, budget_ns);
    }

    /// Changes how long threads were held up.
    pub(crate) fn with_waits(self, change: impl FnOnce(&mut Waits)) {
        change(&mut lock(self.state).tally.waits);
    }

    /// Adds the CPU time of the calling thread, which is about to end, to the job's.
    pub(crate) fn count_cpu_time(self) {
        self.add_cpu_time(pageleap_sys::thread_cpu_time_ns().ok());
    }

    /// Adds the CPU time of threads that have ended, if it is known.
    pub(crate) fn add_cpu_time(self, used_ns: Option<u64>) {
        let cpu = &mut lock(self.state).tally.cpu;
        match used_ns {
            Some(ns) => cpu.ns += ns,
            None => cpu.unknown = true,
        }
    }
}
