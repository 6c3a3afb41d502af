//! How large areas are, and when they are frozen. Pure: no system calls, no locks, no clocks.
//!
//! What is paced is the time for which somebody may have to wait: the window of an engine that
//! follows writes, or the whole call of a mover that holds everybody up for as long as it lasts.

use std::time::Duration;

/// Pages that may be left to copy when an area is frozen, at most: some 30 us.
const MOST_LEFT: u64 = 24;

/// What was seen of an area that was moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Base pages that had been written when all had been copied once.
    pub(crate) written: u64,
    /// Base pages that were copied while everybody waited.
    pub(crate) left: u64,
    /// How long that was, in nanoseconds.
    pub(crate) window_ns: u64,
}

/// Sizes areas and freezes, from what is seen and what was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    now: u64,
    least: u64,
    most: u64,
    budget_ns: u64,
    /// What a window takes in which nothing is left to copy, lately.
    empty_ns: f64,
    /// What a page more takes, lately.
    page_ns: f64,
}

impl Pace {
    /// Weight of the latest window in the running figures.
    const WEIGHT: f64 = 1.0 / 8.0;
    /// A window counts as so many times what was expected, at most.
    const MOST: f64 = 4.0;

    /// Areas of always as many pages.
    pub(crate) fn fixed(pages: u64, budget: Duration) -> Self {
        Pace::adaptive(pages, pages, pages, budget)
    }

    /// Areas of `first` pages at first, and then of `least` to `most`.
    pub(crate) fn adaptive(first: u64, least: u64, most: u64, budget: Duration) -> Self {
        let budget_ns = u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX);
        Pace {
            now: first.clamp(least, most),
            least,
            most,
            budget_ns,
            empty_ns: 0.0,
            page_ns: 1000.0,
        }
    }

    /// How many pages the next area has.
    pub(crate) fn area_pages(&self) -> u64 {
        self.now
    }

    /// How many an area has at most.
    pub(crate) fn most_pages(&self) -> u64 {
        self.most
    }

    /// How long somebody may have to wait for a window, in nanoseconds.
    pub(crate) fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// With how many base pages left to copy an area is frozen.
    pub(crate) fn freeze_at(&self) -> u64 {
        let room = (self.budget_ns as f64 - self.empty_ns) / self.page_ns;
        (room as u64).clamp(1, MOST_LEFT)
    }

    /// Takes an area into account: large ones cost fewer calls, small ones have fewer pages
    /// written, and shorter windows.
    pub(crate) fn observe(&mut self, seen: Seen) {
        let (ns, left) = (seen.window_ns as f64, seen.left as f64);
        // Now and then somebody takes the CPU away in a window, which says nothing of the next one.
        let towards = |now: f64, seen: f64| now + (seen.min(now * Self::MOST) - now) * Self::WEIGHT;
        if self.empty_ns == 0.0 || ns < self.empty_ns {
            self.empty_ns = ns;
        } else if seen.left == 0 {
            self.empty_ns = towards(self.empty_ns, ns);
        } else {
            self.page_ns = towards(self.page_ns, ((ns - self.empty_ns) / left).max(100.0));
        }
        let limit = self.freeze_at();
        if seen.written > limit || seen.window_ns > self.budget_ns {
            self.now = (self.now / 2).max(self.least);
        } else if seen.written <= limit / 4 && seen.window_ns <= self.budget_ns / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(1);

    fn seen(written: u64, left: u64, us: u64) -> Seen {
        Seen { written, left, window_ns: us * 1000 }
    }

    #[test]
    fn areas_follow_what_is_written() {
        let mut pace = Pace::adaptive(4, 4, 32, BUDGET);
        let mut after = |written| {
            pace.observe(seen(written, 0, 100));
            pace.area_pages()
        };
        assert_eq!([0, 6, 6, 0, 7, 24].map(&mut after), [8, 16, 32, 32, 32, 32]);
        assert_eq!([25, 1000, 25, 25].map(after), [16, 8, 4, 4]);
        let mut fixed = Pace::fixed(5, BUDGET);
        [0, 1000].into_iter().for_each(|written| fixed.observe(seen(written, 3, 5000)));
        assert_eq!((fixed.area_pages(), fixed.most_pages()), (5, 5));
    }

    #[test]
    fn windows_that_are_too_long_make_smaller_areas_and_earlier_freezes() {
        let mut pace = Pace::adaptive(512, 16, 4096, BUDGET);
        assert_eq!(pace.freeze_at(), MOST_LEFT);
        (0..8).for_each(|_| pace.observe(seen(0, 0, 100)));
        assert_eq!(pace.area_pages(), 4096);
        (0..8).for_each(|_| pace.observe(seen(0, 0, 1001)));
        assert_eq!(pace.area_pages(), 16);
        assert!(pace.freeze_at() >= 1);
        // A tenth of a millisecond for each page: nine of them are what 1 ms leaves room for.
        let mut slow = Pace::adaptive(512, 16, 4096, BUDGET);
        slow.observe(seen(0, 0, 100));
        (0..100).for_each(|_| slow.observe(seen(10, 10, 1100)));
        assert_eq!(slow.freeze_at(), 9);
        let mut hopeless = Pace::fixed(512, Duration::from_nanos(1));
        hopeless.observe(seen(0, 0, 100));
        assert_eq!(hopeless.freeze_at(), 1);
    }

    #[test]
    fn one_window_that_took_long_does_not_count_for_ever() {
        for left in [0, 1, 24] {
            let mut pace = Pace::adaptive(512, 16, 4096, BUDGET);
            let steady = |pace: &mut Pace| (0..40).for_each(|_| pace.observe(seen(2, 1, 40)));
            pace.observe(seen(2, left, 5000));
            steady(&mut pace);
            assert_eq!(
                (pace.area_pages(), pace.freeze_at()),
                (4096, MOST_LEFT),
                "at first, {left} left"
            );
            pace.observe(seen(2, left, 20_000));
            assert_eq!(pace.area_pages(), 2048);
            steady(&mut pace);
            assert_eq!(
                (pace.area_pages(), pace.freeze_at()),
                (4096, MOST_LEFT),
                "later, {left} left"
            );
        }
    }
}
