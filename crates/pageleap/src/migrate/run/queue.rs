//! The queue of a job: which area is next, when, and which have to wait for guards.

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use super::{Run, State};
use crate::error::Error;
use crate::migrate::job::Stop;
use crate::migrate::pace;
use crate::migrate::plan::Area;
use crate::migrate::report::PageOutcome;
use crate::sync::{Instant, lock, thread};
use crate::units::AddressRange;

impl Run {
    /// Pauses as long as it takes to keep to the rate limit, or until the job is to stop.
    pub(super) fn keep_rate(&self) {
        /// So soon a cancelled job is noticed.
        const STEP: Duration = Duration::from_millis(5);
        let Some(rate) = self.settings.rate_limit else { return };
        loop {
            let pause = pace::pause(rate, self.shared.bytes_copied(), self.began.elapsed());
            let late = self.settings.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if pause.is_zero() || late || self.shared.stop().is_some() {
                return;
            }
            thread::sleep(pause.min(STEP));
        }
    }

    /// The next area, or `None` when there will be none or the job is to stop.
    pub(super) fn next(&self) -> Option<Area> {
        let mut state = lock(&self.state);
        loop {
            if self.settings.deadline.is_some_and(|deadline| Instant::now() >= deadline)
                && !(state.queue.is_empty() && state.guarded.is_empty())
            {
                self.shared.ask_to_stop(Stop::TimedOut);
            }
            if self.shared.stop().is_some() {
                return None;
            }
            if let Some(mut area) = state.queue.pop_front() {
                state.in_flight += 1;
                if area.disturbed == 0 && area.refused == 0 {
                    let front = area.take_front(state.pace.area_pages());
                    if !area.pages.is_empty() {
                        state.queue.push_front(area);
                    }
                    area = front;
                }
                return Some(area);
            }
            if state.in_flight == 0 {
                if state.guarded.is_empty() || !self.waits_for_guards(&mut state) {
                    return None;
                }
                drop(state);
                thread::sleep(Duration::from_millis(1));
                state = lock(&self.state);
                let State { queue, guarded, .. } = &mut *state;
                queue.extend(guarded.drain(..));
                continue;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether it is worth waiting for the guards on what is left. If not, it is left where it is.
    fn waits_for_guards(&self, state: &mut State) -> bool {
        let since = *state.guarded_since.get_or_insert_with(Instant::now);
        if since.elapsed() < self.settings.pin_patience {
            return true;
        }
        for area in std::mem::take(&mut state.guarded) {
            let leg = &self.legs[area.leg];
            let region = state.items[leg.item].claim.region();
            let range = AddressRange::new(
                region.addr(area.pages.start),
                region.bytes(area.pages.end - area.pages.start),
            );
            state.tally.first_failure.get_or_insert(Error::Pinned { range });
        }
        false
    }

    /// Puts an area aside of which a guard keeps some pages where they are, and queues the others again.
    pub(super) fn put_aside(&self, area: Area, kept: Range<u64>) {
        let state = &mut *lock(&self.state);
        state.items[self.legs[area.leg].item].set_outcome(&kept, PageOutcome::Busy);
        for rest in [kept.end..area.pages.end, area.pages.start..kept.start] {
            if !rest.is_empty() {
                state.queue.push_front(Area { pages: rest, ..area.clone() });
            }
        }
        state.guarded.push(Area { pages: kept, ..area });
    }
}
