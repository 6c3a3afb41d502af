//! The queue of a job: which area is next, when, and which have to wait for guards.

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use super::{Run, State};
use crate::error::Error;
use crate::job::handle::Stop;
use crate::job::plan::Area;
use crate::job::report::PageOutcome;
use crate::sync::{Instant, lock, thread};
use crate::units::AddressRange;

impl Run {
    /// The next area for a worker, or `None` when there will be none or the job is to stop.
    pub(super) fn next(&self, worker: usize) -> Option<Area> {
        let mut state = lock(&self.state);
        loop {
            // The first one is always active.
            while worker >= state.threads.active() && !state.over {
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if self.is_late() && !(state.queue.is_empty() && state.guarded.is_empty()) {
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
            if state.in_flight > 0 {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if state.guarded.is_empty() {
                return None;
            }
            let since = *state.guarded_since.get_or_insert_with(Instant::now);
            let patient = since.elapsed() < self.settings.pin_patience;
            // Guards that come and go may be on pages whenever these are tried: once more when the
            // time is over, and no more.
            let look = patient || !std::mem::replace(&mut state.last_look, true);
            if look && self.take_unguarded(&mut state) {
                continue;
            }
            if !patient {
                self.leave_guarded(&mut state);
                return None;
            }
            drop(state);
            thread::sleep(Duration::from_millis(1));
            state = lock(&self.state);
        }
    }

    fn is_late(&self) -> bool {
        self.settings.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Pauses as long as it takes to keep to the rate limit. If the job is to stop meanwhile, the
    /// area is left where it is, and `None` returned.
    pub(super) fn keep_rate(&self, area: Area) -> Option<Area> {
        /// So soon a cancelled job is noticed.
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
                state.queue.push_front(area);
                state.in_flight -= 1;
                self.changed.notify_all();
                return None;
            }
            drop(state);
            thread::sleep(pause.min(STEP));
            self.look_at_cpuset();
        }
    }

    /// Puts an area aside of which a guard keeps some pages where they are, and queues the others
    /// again.
    pub(super) fn put_aside(&self, area: Area, kept: Range<u64>) {
        let state = &mut *lock(&self.state);
        // Each piece that stays behind costs mappings, of which the process has only so many.
        let kept =
            if state.guarded.len() < self.settings.most_pieces { kept } else { area.pages.clone() };
        state.items[self.legs[area.leg].item].set_outcome(&kept, PageOutcome::Busy);
        for rest in [kept.end..area.pages.end, area.pages.start..kept.start] {
            if !rest.is_empty() {
                state.queue.push_front(Area { pages: rest, ..area.clone() });
            }
        }
        state.guarded.push(Area { pages: kept, ..area });
    }

    /// Queues areas again whose guards have gone. Returns whether there are any.
    fn take_unguarded(&self, state: &mut State) -> bool {
        let State { queue, guarded, items, .. } = &mut *state;
        let region = |area: &Area| items[self.legs[area.leg].item].claim.region();
        let before = queue.len();
        queue.extend(guarded.extract_if(.., |area| !region(area).pins.any(&area.pages)));
        queue.len() > before
    }

    /// Leaves what is guarded where it is.
    fn leave_guarded(&self, state: &mut State) {
        let whole = state.guarded.len() < self.settings.most_pieces;
        for area in std::mem::take(&mut state.guarded) {
            let leg = &self.legs[area.leg];
            let region = state.items[leg.item].claim.region();
            let range = AddressRange::new(
                region.addr(area.pages.start),
                region.bytes(area.pages.end - area.pages.start),
            );
            state.tally.first_failure.get_or_insert(Error::Pinned { range });
        }
        if !whole {
            state.tally.warnings.push(
                "more guards than mappings to spare (vm.max_map_count): pages between them have stayed too"
                    .into(),
            );
        }
    }
}
