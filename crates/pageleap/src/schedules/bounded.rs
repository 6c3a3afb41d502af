//! Runs a test under each schedule that departs from a plain one a few times: no chance takes part.
//!
//! In the plain schedule a thread runs until it waits or yields; then the next one runs, in turn. A
//! departure lets another thread run instead, at any of the places where a thread can be
//! interrupted. Most defects need one or two departures (delay-bounded scheduling). With `n` places
//! and `t` threads there are about `n * t` schedules of one departure, and half of the square of
//! that of two, so that only small tests can afford two.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

use super::explore::explore;

/// Runs `body` under each schedule with at most `departures`. If threads wait for ever under one of
/// them, the test fails with the words `asleep`.
pub(crate) fn each_schedule(
    departures: usize,
    asleep: &str,
    body: impl Fn() + Send + Sync + 'static,
) {
    let run = AssertUnwindSafe(|| explore(Bounded::new(departures), body));
    if let Err(panic) = catch_unwind(run) {
        assert!(!is_deadlock(&*panic), "{asleep}");
        resume_unwind(panic);
    }
}

/// Whether shuttle has ended a schedule because all threads wait.
fn is_deadlock(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).is_some_and(|text| text.contains("deadlock!"))
}

/// Which of the threads that can run was chosen at a place.
#[derive(Clone, Copy)]
struct Choice {
    /// Counted from the plain schedule's thread.
    taken: usize,
    of: usize,
}

/// Goes through the schedules depth first: the next one differs from the last one at the latest
/// place that allows it.
struct Bounded {
    departures: usize,
    choices: Vec<Choice>,
    /// Places of this execution so far.
    place: usize,
    began: bool,
}

impl Bounded {
    fn new(departures: usize) -> Self {
        Bounded { departures, choices: Vec::new(), place: 0, began: false }
    }

    /// Prepares the next schedule. Returns whether there is one.
    fn advance(&mut self) -> bool {
        while let Some(last) = self.choices.pop() {
            let before = self.choices.iter().filter(|choice| choice.taken > 0).count();
            if before < self.departures && last.taken + 1 < last.of {
                self.choices.push(Choice { taken: last.taken + 1, ..last });
                return true;
            }
        }
        false
    }
}

impl Scheduler for Bounded {
    fn new_execution(&mut self) -> Option<Schedule> {
        let goes_on = !std::mem::replace(&mut self.began, true) || self.advance();
        self.place = 0;
        goes_on.then(|| Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let mut ids: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        ids.sort_by_key(|id| usize::from(*id));
        // The plain schedule's thread comes first, and the others in turn.
        let first = ids.iter().position(|id| match current {
            Some(current) if is_yielding => usize::from(*id) > usize::from(current),
            Some(current) => usize::from(*id) >= usize::from(current),
            None => true,
        });
        ids.rotate_left(first.unwrap_or(0));
        if self.place == self.choices.len() {
            self.choices.push(Choice { taken: 0, of: ids.len() });
        }
        let choice = self.choices[self.place];
        assert_eq!(choice.of, ids.len(), "the test does not depend on the schedule alone");
        self.place += 1;
        Some(ids[choice.taken])
    }

    /// Random numbers are no part of the schedule: nothing that has odds comes true.
    fn next_u64(&mut self) -> u64 {
        u64::MAX
    }
}
