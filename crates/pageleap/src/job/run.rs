//! A running job: its workers take areas from the queue, have the mover move them, and act on the
//! verdicts.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::area::{Area, AreaOutcome, By, Reason, Runs, Verdict};
use super::books::Books;
use super::contention::ContentionPolicy;
use super::handle::{Job, JobShared, Stop};
use super::lasting::LastingThreads;
use super::outcomes::{Item, PageOutcome, PageOutcomes};
use super::pace::{Pace, Seen};
use super::plan::{Pressure, RetryPolicy};
use super::queue::{Next, Queue};
use super::rate::Rate;
use super::report::{Report, Warning, WarningKind};
use super::state::{State, is_late};
use super::tally::Tally;
use super::threads::ThreadCount;
use super::{Mover, Terms};
use crate::engine::choice::Why;
use crate::error::Error;
use crate::priority::no_thread;
use crate::sync::{Condvar, Instant, Mutex, MutexGuard, lock, thread};
use crate::units::EngineName;

/// The settings of a job, checked and with all defaults filled in.
pub(crate) struct Settings {
    pub(crate) policy: RetryPolicy,
    /// The most pages of an area whose writers may be held because copies of *other* areas were
    /// disturbed. For the area's own disturbed copies there is no such limit.
    pub(crate) most_held_early: u64,
    pub(crate) pace: Pace,
    /// The sizes of areas that are closed before they are copied; `None` if the mover never does
    /// that.
    pub(crate) low_contention_pace: Option<Pace>,
    /// Bytes per second.
    pub(crate) rate_limit: Option<u64>,
    /// How long the job waits for areas that are kept in place (by guards, for example), when no
    /// other work is left.
    pub(crate) patience: Duration,
    /// Most pieces that may stay behind because they are kept in place.
    pub(crate) most_pieces: usize,
    pub(crate) page_bytes: usize,
    pub(crate) threads: usize,
    pub(crate) deadline: Option<Instant>,
    pub(crate) engine: EngineName,
    pub(crate) engine_reason: String,
}

/// A job before and while it runs.
pub(crate) struct Running<M> {
    pub(super) mover: M,
    pub(super) items: Vec<Item>,
    pub(super) settings: Settings,
    pub(super) state: Mutex<State>,
    /// Notified when areas are queued again, and when the last one has been dealt with.
    changed: Condvar,
    /// Notified when more threads are to copy, and when the job is over.
    more: Condvar,
    pub(super) shared: Arc<JobShared>,
    pub(super) began: Instant,
}

impl<M: Mover> Running<M> {
    /// A job that moves `areas` of `items`. All other pages of the items stay as they are.
    pub(crate) fn new(
        mover: M,
        items: Vec<Item>,
        areas: Vec<Area>,
        settings: Settings,
        warnings: Vec<Warning>,
        began: Instant,
    ) -> Running<M> {
        let bytes = |area: &Area| area.len() * items[area.item].page_bytes as u64;
        let bytes_total = areas.iter().map(bytes).sum();
        let mut outcomes: Vec<PageOutcomes> = items.iter().map(PageOutcomes::new).collect();
        for area in &areas {
            let stopped = Some(Reason::Stopped);
            outcomes[area.item].set(&area.pages, PageOutcome::NotAttempted, stopped);
        }
        let state = State {
            queue: Queue::new(areas),
            outcomes,
            pressure: Pressure::default(),
            pace: settings.pace,
            contention: settings
                .low_contention_pace
                .map(|pace| ContentionPolicy::new(pace, items.len())),
            rate: settings.rate_limit.map(Rate::new),
            threads: ThreadCount::new(settings.threads),
            over: false,
            tally: Tally { warnings, ..Tally::default() },
        };
        Running {
            mover,
            items,
            settings,
            state: Mutex::new(state),
            changed: Condvar::new(),
            more: Condvar::new(),
            shared: Arc::new(JobShared::new(bytes_total)),
            began,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<JobShared> {
        &self.shared
    }

    pub(crate) fn mover(&self) -> &M {
        &self.mover
    }

    pub(super) fn books(&self) -> Books<'_> {
        let Running { state, shared, settings, .. } = self;
        Books { state, shared, deadline: settings.deadline }
    }

    // Threads
    // ---------------------------------------------------------------------------------------------

    /// Starts the job in a thread: one of `lasting` if given, or a new one.
    pub(crate) fn start(self, lasting: Option<&LastingThreads>) -> Result<Job, Error> {
        Job::started(self.shared.clone(), || {
            let started = match lasting {
                Some(threads) => threads.run(move || self.run(thread_cpu_ns())),
                None => thread::start(c"pageleap", move || self.run(Some(0))),
            };
            started.map_err(|e| no_thread("a thread for the job", e))
        })
    }

    /// Runs the job in the calling thread, until it has ended.
    pub(crate) fn run_here(self) -> Result<Report, Error> {
        let shared = self.shared.clone();
        pageleap_sys::as_own_thread(move || self.run(thread_cpu_ns()))
            .map_err(|e| no_thread("a key for the calling thread", e))?;
        Ok(shared.take_report())
    }

    /// Runs the job from beginning to end in its first thread. `from_cpu_ns` is the CPU time that
    /// the thread had used before.
    fn run(self, from_cpu_ns: Option<u64>) {
        let bomb = AbortOnUnwind;
        self.mover.surround(self.books(), &|| self.work_together());
        self.conclude(from_cpu_ns);
        std::mem::forget(bomb);
    }

    /// Starts the other threads, works in this one too, and waits until all have ended.
    fn work_together(&self) {
        let team = self.mover.team();
        if let Some(team) = team {
            team.crew.begin(self.settings.threads - 1);
        }
        thread::scope(|scope| {
            for worker in 1..self.settings.threads {
                if let Err(e) = scope.start(c"pageleap", move || self.work_beside(worker)) {
                    let why = no_thread("a thread that copies", e);
                    self.books().warn(Warning::because(
                        WarningKind::Threads,
                        "fewer threads than asked for",
                        &why,
                    ));
                }
            }
            self.work(0);
            if let Some(team) = team {
                team.crew.end();
            }
        });
    }

    /// Runs one of the other threads: as a worker, or as a helper of the crew.
    fn work_beside(&self, worker: usize) {
        match self.mover.team() {
            None => self.work(worker),
            Some(team) => {
                let bomb = AbortOnUnwind;
                team.help(worker - 1);
                std::mem::forget(bomb);
            }
        }
        self.books().count_cpu_time();
    }

    /// Runs a worker: moves areas until none is left.
    fn work(&self, number: usize) {
        // After a panic writers might sleep for ever on an area that nobody opens again, which
        // would look like a hang. So a panic ends the process with a message.
        let bomb = AbortOnUnwind;
        let mut worker = self.mover.worker(number, self.books());
        while let Some((area, low_contention)) = self.next(number) {
            let Some(area) = self.keep_rate(area) else { break };
            self.look_around();
            let terms = self.terms(&area, low_contention);
            let outcome = self.mover.attempt(&mut worker, &area, &terms);
            if self.record(&area, outcome) {
                // A refused call is often short of mappings. They join again as neighbouring areas
                // are done, so give those, or other threads, the time.
                thread::sleep(Duration::from_millis(1));
            }
            lock(&self.state).queue.done();
            self.mover.after(&mut worker, self.books());
            // Also when the queue is empty: the last area may be what others wait for.
            self.changed.notify_all();
        }
        lock(&self.state).over = true;
        self.more.notify_all();
        std::mem::forget(bomb);
    }

    // Which area is next, and when
    // ---------------------------------------------------------------------------------------------

    /// The next area for a worker, and whether it is to be closed before it is copied. `None` when
    /// no work is left, or the job is to stop.
    fn next(&self, worker: usize) -> Option<(Area, bool)> {
        let mut state = lock(&self.state);
        loop {
            // The first worker is always active.
            while worker >= state.threads.active() && !state.over {
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if self.is_late() && state.queue.has_any() {
                self.shared.ask_to_stop(Stop::TimedOut);
            }
            if self.shared.stop().is_some() {
                return None;
            }
            let State { queue, pace, contention, .. } = &mut *state;
            let mut low_pages = None;
            let next = queue.next(|area| {
                if let Some(pages) = self.mover.area_pages(area) {
                    return pages;
                }
                low_pages =
                    contention.as_ref().and_then(|contention| contention.area_pages(area.item));
                low_pages.unwrap_or_else(|| pace.area_pages())
            });
            match next {
                Next::Area(area) => return Some((area, low_pages.is_some())),
                Next::Wait => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Next::Kept => state = self.wait_for_kept(state)?,
                Next::Nothing => return None,
            }
        }
    }

    /// Queues kept areas again as soon as they are free to move. Returns `None` when the others are
    /// given up.
    fn wait_for_kept<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Option<MutexGuard<'a, State>> {
        const PAUSE: Duration = Duration::from_millis(1);
        let (elapsed, patience) = (self.began.elapsed(), self.settings.patience);
        let is_kept = |area: &Area| self.mover.is_kept(area);
        match state.queue.retry_kept(elapsed, patience, is_kept) {
            (true, _) => Some(state),
            (false, true) => {
                drop(state);
                thread::sleep(PAUSE);
                Some(lock(&self.state))
            }
            (false, false) => {
                self.leave_kept(&mut state);
                None
            }
        }
    }

    /// Gives up the areas that are still kept in place.
    fn leave_kept(&self, state: &mut State) {
        let whole = state.queue.kept() < self.settings.most_pieces;
        for area in state.queue.take_kept() {
            let error = || self.mover.error(&area, Reason::Guarded);
            state.tally.first_failure.get_or_insert_with(error);
        }
        if !whole {
            let text = "more guards than mappings to spare (vm.max_map_count): pages between them have \
                        stayed too";
            state.tally.warnings.push(Warning::new(WarningKind::Guards, text));
        }
    }

    fn is_late(&self) -> bool {
        is_late(self.settings.deadline)
    }

    /// Asks the mover whether the job may go on, and stops the job if not.
    fn look_around(&self) {
        if let Err(stop) = self.mover.may_go_on(self.books()) {
            self.shared.ask_to_stop(stop);
        }
    }

    /// Pauses to keep to the rate limit. If the job is to stop meanwhile, puts the area back and
    /// returns `None`.
    fn keep_rate(&self, area: Area) -> Option<Area> {
        /// The longest delay until a cancelled job is noticed.
        const STEP: Duration = Duration::from_millis(5);
        if self.settings.rate_limit.is_none() {
            return Some(area);
        }
        loop {
            let mut state = lock(&self.state);
            let elapsed = self.began.elapsed();
            let pause = state.rate.as_mut().map_or(Duration::ZERO, |rate| rate.pause(elapsed));
            if pause.is_zero() {
                return Some(area);
            }
            if self.is_late() {
                self.shared.ask_to_stop(Stop::TimedOut);
            }
            if self.shared.stop().is_some() {
                state.queue.put_back(area);
                self.changed.notify_all();
                return None;
            }
            drop(state);
            thread::sleep(pause.min(STEP));
            self.look_around();
        }
    }

    // The consequences of an attempt
    // ---------------------------------------------------------------------------------------------

    fn terms(&self, area: &Area, low_contention: bool) -> Terms<'_> {
        let early = area.is_new() && area.len() <= self.settings.most_held_early;
        let mut state = lock(&self.state);
        let hold = self.settings.policy.holds(area) || early && state.pressure.holds_next();
        Terms { hold, low_contention, freeze_at: state.pace.freeze_at(), books: self.books() }
    }

    /// Acts on the outcome of an attempt: updates statistics, notes verdicts, queues retries.
    /// Returns whether the worker should pause before its next area, because a call was refused.
    fn record(&self, area: &Area, outcome: AreaOutcome) -> bool {
        let AreaOutcome { runs, by, counters, seen, disturbed } = outcome;
        let in_run = |(run, verdict): &(Range<u64>, Verdict)| match verdict {
            Verdict::Moved => run.end - run.start,
            _ => 0,
        };
        let moved: u64 = runs.iter().map(in_run).sum();
        self.shared.count(counters.copied, moved * self.items[area.item].page_bytes as u64);
        let state = &mut *lock(&self.state);
        if let Some(seen) = seen {
            self.learn(state, area, by.why, seen, counters.waiters);
        }
        if let Some(disturbed) = disturbed.filter(|_| area.is_new()) {
            state.pressure.observe(disturbed);
        }
        if let Some(rate) = &mut state.rate {
            rate.charge(counters.copied);
        }
        self.count_threads(state);
        let budget_ns = state.pace.budget_ns();
        state.tally.add(&counters, budget_ns);
        if moved > 0 {
            *state.tally.moved.entry((area.item, by)).or_default() += moved;
        }
        // Pages without a verdict were not tried: they are queued first.
        let mut untried = Vec::new();
        let (mut again, mut rest) = (false, area.pages.start);
        let mut later: Option<Range<u64>> = None;
        for (run, verdict) in self.widened(state, area, runs) {
            untried.push(rest..run.start);
            rest = run.end;
            if let Verdict::Later(_) = verdict {
                later = Some(later.map_or(run.start, |all| all.start)..run.end);
            }
            again |= self.follow_up(state, &area.with_pages(run), verdict, by);
        }
        if let Some(pages) = later {
            let refused = area.refused + 1;
            state.queue.push_together(Area { refused, ..area.with_pages(pages) });
        }
        untried.push(rest..area.pages.end);
        for pages in untried.into_iter().rev().filter(|pages| !pages.is_empty()) {
            state.queue.push_first(area.with_pages(pages));
        }
        again
    }

    /// Adjusts the sizes of the next areas, and whether they are closed first.
    fn learn(&self, state: &mut State, area: &Area, why: Why, seen: Seen, waiters: u64) {
        let State { pace, contention, .. } = state;
        match contention {
            Some(contention) if why == Why::LowContention => {
                contention.closed(area.item, seen, waiters)
            }
            Some(contention) if why == Why::Contended => {
                pace.observe(seen);
                contention.followed(area.item, area.len(), seen.written);
            }
            _ => pace.observe(seen),
        }
    }

    /// Verdicts for an area that is kept in place, widened to the whole area when many are kept.
    /// Each piece that stays behind costs mappings, of which a process has only so many.
    fn widened(&self, state: &State, area: &Area, runs: Runs) -> Runs {
        let crowded = state.queue.kept() >= self.settings.most_pieces;
        match runs[..] {
            [(_, verdict @ Verdict::Kept(_))] if crowded => vec![(area.pages.clone(), verdict)],
            _ => runs,
        }
    }

    /// Changes the number of threads that copy, if a trial says so.
    fn count_threads(&self, state: &mut State) {
        let moved = self.shared.bytes_migrated();
        // Under a rate limit, pauses hide how much each thread adds.
        if state.rate.is_some() || !state.threads.observe(self.began.elapsed(), moved) {
            return;
        }
        match self.mover.team() {
            None => self.more.notify_all(),
            Some(team) => team.crew.set_helpers(state.threads.active() - 1),
        }
    }

    /// Notes the verdict on some pages, and queues them again if they are to be retried. Returns
    /// whether the worker should pause before its next area.
    fn follow_up(&self, state: &mut State, area: &Area, verdict: Verdict, by: By) -> bool {
        let State { queue, outcomes, tally, contention, .. } = &mut *state;
        let mut note = |outcome, why| outcomes[area.item].set(&area.pages, outcome, why);
        match verdict {
            Verdict::Moved => {
                note(PageOutcome::Migrated, None);
                queue.moved();
            }
            Verdict::Disturbed => {
                let parts = self.settings.policy.after_disturbance(area);
                tally.counts.disturbed_copies += 1;
                tally.counts.splits += u64::from(parts.len() > 1);
                note(PageOutcome::Busy, Some(Reason::Written));
                parts.into_iter().for_each(|part| queue.push_last(part));
            }
            Verdict::Kept(why) => {
                note(PageOutcome::Busy, Some(why));
                queue.keep(Area { kept: true, ..area.clone() });
            }
            Verdict::Refused(why) => {
                if let Some(again) = self.settings.policy.after_refusal(area, why) {
                    if let Some(contention) =
                        contention.as_mut().filter(|_| by.why == Why::LowContention)
                    {
                        contention.give_way(area.item);
                    }
                    note(PageOutcome::Busy, Some(why));
                    queue.push_last(again);
                    return true;
                }
                self.give_up(state, area, why);
            }
            Verdict::Changed(why) => {
                note(PageOutcome::Busy, Some(area.cause_or(why)));
                let again = self.settings.policy.after_change(area, why);
                if again.is_empty() {
                    self.stays(state, area, why);
                    return false;
                }
                again.into_iter().for_each(|part| queue.push_last(part));
                return true;
            }
            Verdict::GivenUp(why) => self.give_up(state, area, why),
            Verdict::Left(why) => {
                let (arrived, fewer) = outcomes[area.item].leave(&area.pages, why);
                let page_bytes = self.items[area.item].page_bytes as u64;
                self.shared.count(0, arrived * page_bytes);
                self.shared.expect_less(fewer * page_bytes);
                if arrived > 0 {
                    *tally.moved.entry((area.item, by)).or_default() += arrived;
                }
            }
            Verdict::Later(why) => note(PageOutcome::Busy, Some(why)),
            Verdict::AsBefore => {}
        }
        false
    }

    fn give_up(&self, state: &mut State, area: &Area, why: Reason) {
        let cause = area.cause_or(why);
        state.outcomes[area.item].set(&area.pages, PageOutcome::Failed, Some(cause));
        self.stays(state, area, why);
    }

    /// Records that an area stays and is not tried again. If its last attempt failed for another
    /// reason than its first one, a warning says so.
    fn stays(&self, state: &mut State, area: &Area, why: Reason) {
        let cause = area.cause_or(why);
        if cause != why {
            let text = format!("pages that stay ({cause}) were tried again, in vain: {why}");
            let words = Warning::new(WarningKind::LaterReason, text);
            if !state.tally.warnings.contains(&words) {
                state.tally.warnings.push(words);
            }
        }
        state.tally.first_failure.get_or_insert_with(|| self.mover.error(area, cause));
        self.mover.given_up(area);
    }
}

fn thread_cpu_ns() -> Option<u64> {
    pageleap_sys::thread_cpu_time_ns().ok()
}

/// Ends the process if its thread panics, because threads may wait for this one that nobody else
/// would wake.
pub(crate) struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        // The model checker ends the test instead, and reports the schedule.
        if cfg!(shuttle) {
            return;
        }
        eprintln!(
            "pageleap: a migrating thread panicked; ending the process, because writers may wait for it for ever"
        );
        std::process::abort();
    }
}
