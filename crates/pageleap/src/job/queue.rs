//! The queue of a job: which area is next, and which have to wait for what keeps them. Pure: no
//! system calls, no locks.

use std::collections::VecDeque;
use std::time::Duration;

use super::area::Area;

/// What a worker is to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Try this area.
    Area(Area),
    /// Wait for the areas that others are at: they may leave something behind.
    Wait,
    /// Only kept areas are left: look whether one can be tried ([`Queue::retry_kept`]).
    Kept,
    /// Nothing is left to do.
    Nothing,
}

/// The areas of a job that are not dealt with.
pub(super) struct Queue {
    areas: VecDeque<Area>,
    /// Areas of pages that something keeps where they are.
    kept: Vec<Area>,
    /// Since when nothing else is left to do, in time since the job began, and none of them has
    /// moved.
    kept_since: Option<Duration>,
    /// Whether they have been tried since that has lasted long enough.
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

    /// Whether areas are left that nobody is at.
    pub(super) fn has_any(&self) -> bool {
        !(self.areas.is_empty() && self.kept.is_empty())
    }

    /// Takes the next area. New ones come in pieces of as many pages as `pages` says.
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

    /// An area that was taken has been dealt with, or queued again.
    pub(super) fn done(&mut self) {
        self.in_flight -= 1;
    }

    /// Takes an area back that was taken and not tried.
    pub(super) fn put_back(&mut self, area: Area) {
        self.areas.push_front(area);
        self.in_flight -= 1;
    }

    /// Queues an area that is to be tried before all others.
    pub(super) fn push_first(&mut self, area: Area) {
        self.areas.push_front(area);
    }

    /// Queues an area that is to be tried after all others.
    pub(super) fn push_last(&mut self, area: Area) {
        self.areas.push_back(area);
    }

    /// Queues an area that is to be tried after all others. It becomes one with the last one of the
    /// queue, if that one lies before it and was refused as often. What is between the two is tried
    /// again as well.
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

    /// Keeps an area aside.
    pub(super) fn keep(&mut self, area: Area) {
        self.kept.push(area);
    }

    /// How many areas are kept aside.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// An area has moved: what keeps others gets all its time again.
    pub(super) fn moved(&mut self) {
        (self.kept_since, self.last_look) = (None, false);
    }

    /// Queues the kept areas again that nothing keeps any more. Returns whether some are queued,
    /// and whether there is still time to wait for others. What keeps areas may come and go, and be
    /// there whenever it is looked: they are looked at once more when the time is over.
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

    /// The kept areas, which are left where they are.
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
