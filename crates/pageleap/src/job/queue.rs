//! The queue of a job: which area is next, and which areas are kept in place for now. Pure: no
//! system calls, no locks.

use std::collections::VecDeque;
use std::time::Duration;

use super::area::Area;

/// The next step of a worker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Try this area.
    Area(Area),
    /// Wait: no area is queued, but other workers are moving areas that may come back.
    Wait,
    /// Only kept areas are left: check whether one can be tried ([`Queue::retry_kept`]).
    Kept,
    /// No work is left.
    Nothing,
}

/// The areas of a job that are not dealt with yet.
pub(super) struct Queue {
    areas: VecDeque<Area>,
    /// Areas that are kept in place (by guards, for example).
    kept: Vec<Area>,
    /// Since when kept areas have been the only work, measured from the start of the job. Starts
    /// again whenever an area moves.
    kept_since: Option<Duration>,
    /// Whether the kept areas have been checked once more after the patience was over.
    last_look: bool,
    /// Areas that workers have taken and not yet dealt with.
    in_flight: usize,
}

impl Queue {
    pub(super) fn new(areas: impl IntoIterator<Item = Area>) -> Self {
        Queue {
            areas: areas.into_iter().collect(),
            kept: Vec::new(),
            kept_since: None,
            last_look: false,
            in_flight: 0,
        }
    }

    /// Whether areas are left that no worker has taken.
    pub(super) fn has_any(&self) -> bool {
        !(self.areas.is_empty() && self.kept.is_empty())
    }

    /// Takes the next area. An untried area is cut to the number of pages that `pages` returns.
    pub(super) fn next(&mut self, pages: impl FnOnce(&Area) -> u64) -> Next {
        let Some(mut area) = self.areas.pop_front() else {
            return match (self.in_flight, self.kept.is_empty()) {
                (0, true) => Next::Nothing,
                (0, false) => Next::Kept,
                _ => Next::Wait,
            };
        };
        self.in_flight += 1;
        if area.is_new() {
            let front = area.take_front(pages(&area));
            if !area.pages.is_empty() {
                self.areas.push_front(area);
            }
            area = front;
        }
        Next::Area(area)
    }

    /// Notes that an area that was taken has been dealt with, or queued again.
    pub(super) fn done(&mut self) {
        self.in_flight -= 1;
    }

    /// Puts an area back that was taken and not tried.
    pub(super) fn put_back(&mut self, area: Area) {
        self.areas.push_front(area);
        self.in_flight -= 1;
    }

    /// Queues an area before all others.
    pub(super) fn push_first(&mut self, area: Area) {
        self.areas.push_front(area);
    }

    /// Queues an area after all others.
    pub(super) fn push_last(&mut self, area: Area) {
        self.areas.push_back(area);
    }

    /// Queues an area after all others. If the last area of the queue lies before it and was
    /// refused as often, the two become one area, and the pages between them are retried as well.
    pub(super) fn push_together(&mut self, area: Area) {
        match self.areas.back_mut() {
            Some(last)
                if (last.item, last.leg, last.disturbed, last.refused)
                    == (area.item, area.leg, area.disturbed, area.refused)
                    && last.pages.end <= area.pages.start =>
            {
                last.pages.end = area.pages.end;
            }
            _ => self.areas.push_back(area),
        }
    }

    /// Sets an area aside, because it is kept in place.
    pub(super) fn keep(&mut self, area: Area) {
        self.kept.push(area);
    }

    /// Number of areas that are set aside.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Notes that an area has moved: the patience for kept areas starts again.
    pub(super) fn moved(&mut self) {
        (self.kept_since, self.last_look) = (None, false);
    }

    /// Queues the kept areas that are free now (`is_kept` returns `false`). Returns whether some
    /// are queued, and whether there is still time to wait for others. The areas are checked once
    /// more after the time is over, because a guard may happen to exist at each check although it
    /// comes and goes.
    pub(super) fn retry_kept(
        &mut self,
        now: Duration,
        patience: Duration,
        is_kept: impl Fn(&Area) -> bool,
    ) -> (bool, bool) {
        let since = *self.kept_since.get_or_insert(now);
        let patient = now.saturating_sub(since) < patience;
        let look = patient || !std::mem::replace(&mut self.last_look, true);
        let before = self.areas.len();
        if look {
            self.areas.extend(self.kept.extract_if(.., |area| !is_kept(area)));
        }
        (self.areas.len() > before, patient)
    }

    /// Takes the kept areas, which stay where they are.
    pub(super) fn take_kept(&mut self) -> Vec<Area> {
        std::mem::take(&mut self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn new_areas_come_in_pieces_and_others_as_they_are() {
        let mut queue = Queue::new([Area::new(0, 0, 3..20)]);
        let Next::Area(first) = queue.next(|_| 8) else { panic!() };
        assert_eq!(first.pages, 3..8);
        queue.push_first(Area { disturbed: 1, ..Area::new(0, 0, 0..100) });
        let Next::Area(again) = queue.next(|_| 8) else { panic!() };
        assert_eq!(again.pages, 0..100);
        let Next::Area(second) = queue.next(|_| 100) else { panic!() };
        assert_eq!(second.pages, 8..20);
        assert_eq!(queue.next(|_| 8), Next::Wait);
        (0..3).for_each(|_| queue.done());
        assert_eq!(queue.next(|_| 8), Next::Nothing);
    }

    #[test]
    fn kept_areas_are_looked_at_until_the_time_is_over_and_once_more() {
        let mut queue = Queue::new([]);
        queue.keep(Area::new(0, 0, 0..1));
        queue.keep(Area::new(0, 0, 5..6));
        assert_eq!(queue.next(|_| 8), Next::Kept);
        assert_eq!(queue.retry_kept(MS, 5 * MS, |_| true), (false, true));
        assert_eq!(queue.retry_kept(2 * MS, 5 * MS, |area| area.pages.start > 0), (true, true));
        assert!(matches!(queue.next(|_| 8), Next::Area(_)));
        queue.moved();
        queue.done();
        // The time begins again.
        assert_eq!(queue.retry_kept(8 * MS, 5 * MS, |_| true), (false, true));
        assert_eq!(queue.retry_kept(13 * MS, 5 * MS, |_| true), (false, false));
        assert_eq!(queue.retry_kept(14 * MS, 5 * MS, |_| false), (false, false));
        assert_eq!(queue.take_kept().len(), 1);
    }
}
