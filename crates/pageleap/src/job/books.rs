//! What a job keeps books of, for its report.

use std::collections::BTreeMap;
use std::ops::Range;

use super::area::Reason;
use super::handle::JobShared;
use super::outcomes::{PageOutcome, State as Became};
use super::report::{CopyUse, Warning};
use super::run::{State, is_late};
use crate::backend::Call;
use crate::engine::choice::AreaEngine;
use crate::engine::commit::Effort;
use crate::engine::waits::Waits;
use crate::error::Error;
use crate::sync::{Instant, Mutex, lock};

/// How long areas were closed.
#[derive(Default)]
pub(crate) struct Windows {
    pub(crate) times: Waits,
    pub(crate) over_budget: u64,
    /// In how many of them the worker ran before other threads.
    pub(crate) first: u64,
}

/// CPU time of the threads that have ended.
#[derive(Default)]
pub(crate) struct CpuTime {
    pub(crate) ns: u64,
    /// The kernel did not tell the CPU time of a thread.
    pub(crate) unknown: bool,
}

/// Sums for the report.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) disturbed_copies: u64,
    pub(crate) splits: u64,
    pub(crate) holds: u64,
    pub(crate) repairs: u64,
    pub(crate) extents: i64,
    pub(crate) windows: Windows,
    /// How long threads were held up in the fault handler.
    pub(crate) waits: Waits,
    /// Pages that have moved, by item and by engine.
    pub(crate) moved: BTreeMap<(usize, AreaEngine), u64>,
    /// Why writes could not be followed, the first time.
    pub(crate) not_followed_why: Option<String>,
    /// How pages are copied, by pair of nodes.
    pub(crate) copies: Vec<CopyUse>,
    pub(crate) first_failure: Option<Error>,
    /// By the number of their kind.
    pub(crate) calls: [u64; Call::ALL.len()],
    pub(crate) cpu: CpuTime,
    pub(crate) warnings: Vec<Warning>,
}

impl Tally {
    /// Takes into account what an attempt, or a window of another kind, took.
    pub(super) fn add(&mut self, effort: &Effort, budget_ns: u64) {
        let Effort { window_ns, hurried, repairs, held, extents, calls, .. } = *effort;
        if window_ns > 0 {
            self.windows.first += u64::from(hurried);
            self.windows.times.record(window_ns);
            self.windows.over_budget += u64::from(window_ns > budget_ns);
        }
        self.repairs += repairs;
        self.extents += extents;
        self.holds += u64::from(held);
        self.calls.iter_mut().zip(calls).for_each(|(sum, calls)| *sum += u64::from(calls));
    }
}

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
    pub(crate) fn warn(self, warning: impl Into<Warning>) {
        lock(self.state).tally.warnings.push(warning.into());
    }

    /// The same, which is said once however often it happens.
    pub(crate) fn warn_once(self, warning: impl Into<Warning>) {
        let warning = warning.into();
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
    pub(crate) fn arrived(self, item: usize, run: &Range<u64>, by: AreaEngine) {
        let state = &mut *lock(self.state);
        state.outcomes[item].set(run, PageOutcome::Migrated, None);
        *state.tally.moved.entry((item, by)).or_default() += run.end - run.start;
    }

    /// Some pages of an item, which had arrived or lay where they should, lie elsewhere in the end.
    pub(crate) fn moved_on(
        self,
        item: usize,
        run: &Range<u64>,
        before: PageOutcome,
        by: AreaEngine,
    ) {
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
    pub(crate) fn add(self, effort: &Effort) {
        let state = &mut *lock(self.state);
        let budget_ns = state.pace.budget_ns();
        state.tally.add(effort, budget_ns);
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
