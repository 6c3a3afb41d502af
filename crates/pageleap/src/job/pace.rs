//! Decides how large areas are, and at how many dirty pages they are frozen. Pure: no system calls,
//! no locks, no clocks.
//!
//! The pace keeps the time for which a thread waits within the wait budget. For an engine that
//! tracks writes that time is its window. For a mover whose call blocks everybody, such as
//! `move_pages`, it is the whole call.

use std::time::Duration;

/// The most dirty pages at which an area is frozen. Their copy takes some 30 us.
const MOST_LEFT: u64 = 24;

/// Measurements of one area that moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Pages that were dirty after the first copy: base pages, or hugetlb pages.
    pub(crate) written: u64,
    /// Base pages copied in the window.
    pub(crate) left: u64,
    /// Length of the window, in nanoseconds.
    pub(crate) window_ns: u64,
    /// The part of the window that the copy took, if the whole area was copied in it; else 0.
    pub(crate) copy_ns: u64,
}

/// The rule by which areas are sized.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// By the number of dirty pages: areas shrink if it exceeds this one, or if windows exceed the
    /// budget.
    Written(u64),
    /// By the time that the copy of a page takes, because windows contain the copy.
    Copied(Unit),
}

/// The sizes between which [`Pace::budgeted`] chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// Larger areas are multiples of this number of pages. Smaller areas have a half, a quarter,
    /// and so on.
    pub(crate) pages: u64,
    /// Base pages of a page.
    pub(crate) base_pages: u64,
}

/// Sizes areas and chooses when to freeze them, from measurements and the caller's settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    rule: Rule,
    now: u64,
    least: u64,
    most: u64,
    budget_ns: u64,
    /// Running mean: nanoseconds of a window in which no page is left to copy.
    empty_ns: f64,
    /// Running mean: further nanoseconds for each base page left to copy.
    page_ns: f64,
    /// Number of windows seen that contained the copy.
    copies: u32,
}

impl Pace {
    /// Weight of the latest window in the running figures.
    const WEIGHT: f64 = 1.0 / 8.0;
    /// A window counts at most as this multiple of its expected duration.
    const MOST: f64 = 4.0;
    /// The share of the wait budget that the copy in a window may take.
    const COPY_SHARE: f64 = 0.3;

    /// All areas have `pages` pages.
    pub(crate) fn fixed(pages: u64, budget: Duration) -> Self {
        Pace::adaptive(pages, pages, pages, u64::MAX, budget)
    }

    /// The first area has `first` pages, later areas have `least` to `most`. They shrink if more
    /// than `most_written` pages are written while an area is copied.
    pub(crate) fn adaptive(
        first: u64,
        least: u64,
        most: u64,
        most_written: u64,
        budget: Duration,
    ) -> Self {
        let budget_ns = u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX);
        Pace {
            rule: Rule::Written(most_written),
            now: first.clamp(least, most),
            least,
            most,
            budget_ns,
            empty_ns: 0.0,
            page_ns: 1000.0,
            copies: 0,
        }
    }

    /// The first area has `first` pages. The copy of a later area takes
    /// [this share](Self::COPY_SHARE) of the budget. The rest is for the system calls of a window,
    /// and for hosts whose speed varies.
    pub(crate) fn budgeted(
        first: u64,
        least: u64,
        most: u64,
        unit: Unit,
        budget: Duration,
    ) -> Self {
        Pace { rule: Rule::Copied(unit), ..Pace::adaptive(first, least, most, u64::MAX, budget) }
    }

    /// Number of pages of the next area.
    pub(crate) fn area_pages(&self) -> u64 {
        self.now
    }

    /// The most pages of an area.
    pub(crate) fn most_pages(&self) -> u64 {
        self.most
    }

    /// The wait budget: how long a thread may have to wait for a window, in nanoseconds.
    pub(crate) fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// Whether the smallest area can be copied within the budget, as far as is known
    /// ([`Pace::budgeted`]).
    pub(crate) fn copies_in_budget(&self) -> bool {
        /// Fewer windows than this prove nothing.
        const TELLING: u32 = 8;
        let Rule::Copied(unit) = self.rule else { return false };
        let least_ns = self.page_ns * (self.least * unit.base_pages) as f64;
        self.copies < TELLING || least_ns <= self.budget_ns as f64
    }

    /// Forgets the measured speed of copies; the next windows measure it anew.
    pub(crate) fn forget_copies(&mut self) {
        self.copies = 0;
    }

    /// The number of dirty base pages at which an area is frozen.
    pub(crate) fn freeze_at(&self) -> u64 {
        let room = (self.budget_ns as f64 - self.empty_ns) / self.page_ns;
        (room as u64).clamp(1, MOST_LEFT)
    }

    /// Takes an area into account. Large areas cost fewer calls; small areas have fewer written
    /// pages and shorter windows.
    pub(crate) fn observe(&mut self, seen: Seen) {
        match self.rule {
            Rule::Written(most) => self.observe_writes(seen, most),
            Rule::Copied(unit) => self.observe_copy(seen, unit),
        }
    }

    /// Updates a running mean. One observation counts at most as four times the mean, because
    /// another thread may take the CPU during a window, and that says nothing about the next one.
    fn towards(now: f64, seen: f64) -> f64 {
        now + (seen.min(now * Self::MOST) - now) * Self::WEIGHT
    }

    fn observe_copy(&mut self, seen: Seen, unit: Unit) {
        if seen.left == 0 {
            return;
        }
        let page_ns = seen.copy_ns as f64 / seen.left as f64;
        self.page_ns = match self.copies {
            0 => page_ns,
            // In one of the two windows another thread may have taken the CPU, so the shorter one
            // counts.
            1 => self.page_ns.min(page_ns),
            _ => Self::towards(self.page_ns, page_ns),
        };
        self.copies = self.copies.saturating_add(1);
        self.now = self.copied_in_its_share(unit);
    }

    fn observe_writes(&mut self, seen: Seen, most_written: u64) {
        let (ns, left) = (seen.window_ns as f64, seen.left as f64);
        if self.empty_ns == 0.0 || ns < self.empty_ns {
            self.empty_ns = ns;
        } else if seen.left == 0 {
            self.empty_ns = Self::towards(self.empty_ns, ns);
        } else {
            let page_ns = ((ns - self.empty_ns) / left).max(100.0);
            self.page_ns = Self::towards(self.page_ns, page_ns);
        }
        // Twice the area has four times as many dirty pages: twice the pages, and twice the time.
        if seen.written > most_written || seen.window_ns > self.budget_ns {
            self.now = (self.now / 2).max(self.least);
        } else if seen.written <= most_written / 4 && seen.window_ns <= self.budget_ns / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }

    /// The number of pages whose copy takes the share of the budget that copies may take. For
    /// example, a budget of 1 ms and 1 us for each base page give 300 base pages; with a unit of
    /// 512 base pages the area has 256.
    fn copied_in_its_share(&self, unit: Unit) -> u64 {
        let base_pages = self.budget_ns as f64 * Self::COPY_SHARE / self.page_ns.max(1.0);
        let pages = base_pages / unit.base_pages as f64;
        let rounded = if pages < unit.pages as f64 {
            let pages = (pages as u64).max(1);
            unit.pages >> unit.pages.div_ceil(pages).next_power_of_two().ilog2()
        } else {
            // To the nearest multiple, so the copy may take somewhat more of the budget than its
            // share.
            (pages / unit.pages as f64).round() as u64 * unit.pages
        };
        rounded.clamp(self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(1);

    fn seen(written: u64, left: u64, us: u64) -> Seen {
        Seen { written, left, window_ns: us * 1000, copy_ns: 0 }
    }

    /// An area that was copied while it was closed. The calls of its window take some time too.
    fn copied(left: u64, ns_of_a_page: u64) -> Seen {
        let copy_ns = left * ns_of_a_page;
        Seen { written: 0, left, window_ns: copy_ns + 60_000, copy_ns }
    }

    #[test]
    fn areas_follow_what_is_written() {
        let mut pace = Pace::adaptive(4, 4, 32, 128, BUDGET);
        let mut after = |written| {
            pace.observe(seen(written, 0, 100));
            pace.area_pages()
        };
        assert_eq!([0, 32, 32, 0, 33, 128].map(&mut after), [8, 16, 32, 32, 32, 32]);
        assert_eq!([129, 1000, 129, 129].map(after), [16, 8, 4, 4]);
        let mut fixed = Pace::fixed(5, BUDGET);
        [0, 1000].into_iter().for_each(|written| fixed.observe(seen(written, 3, 5000)));
        assert_eq!((fixed.area_pages(), fixed.most_pages()), (5, 5));
    }

    #[test]
    fn windows_that_are_too_long_make_smaller_areas_and_earlier_freezes() {
        let mut pace = Pace::adaptive(512, 16, 4096, 128, BUDGET);
        assert_eq!(pace.freeze_at(), MOST_LEFT);
        (0..8).for_each(|_| pace.observe(seen(0, 0, 100)));
        assert_eq!(pace.area_pages(), 4096);
        (0..8).for_each(|_| pace.observe(seen(0, 0, 1001)));
        assert_eq!(pace.area_pages(), 16);
        assert!(pace.freeze_at() >= 1);
        // A page takes a tenth of a millisecond, so that 1 ms leaves room for nine pages.
        let mut slow = Pace::adaptive(512, 16, 4096, 128, BUDGET);
        slow.observe(seen(0, 0, 100));
        (0..100).for_each(|_| slow.observe(seen(10, 10, 1100)));
        assert_eq!(slow.freeze_at(), 9);
        let mut hopeless = Pace::fixed(512, Duration::from_nanos(1));
        hopeless.observe(seen(0, 0, 100));
        assert_eq!(hopeless.freeze_at(), 1);
    }

    #[test]
    fn copies_in_windows_take_their_share_of_the_budget() {
        let unit = Unit { pages: 512, base_pages: 1 };
        let after = |budget: Duration, ns_of_a_page: u64| {
            let mut pace = Pace::budgeted(512, 32, 4096, unit, budget);
            for _ in 0..4 {
                let left = pace.area_pages();
                pace.observe(copied(left, ns_of_a_page));
            }
            pace.area_pages()
        };
        // 5 us for 4 KB is 0.8 GB/s, and 100 ns are 40 GB/s.
        assert_eq!(
            [73, 80, 100, 200, 300, 585].map(|ns| after(BUDGET, ns)),
            [4096, 3584, 3072, 1536, 1024, 512]
        );
        assert_eq!([586, 1000, 5000, 100_000].map(|ns| after(BUDGET, ns)), [256, 256, 32, 32]);
        assert_eq!(after(Duration::from_micros(200), 200), 256);
        assert_eq!(after(Duration::from_secs(1), 200), 4096);
        assert_eq!(after(Duration::from_nanos(1), 200), 32);
        // Transparent huge pages: one of them is a unit.
        let huge = Unit { pages: 1, base_pages: 512 };
        let mut pace = Pace::budgeted(1, 1, 8, huge, BUDGET);
        pace.observe(copied(512, 100));
        assert_eq!(pace.area_pages(), 6);
        let slow = copied(2048, 5000);
        pace.observe(slow);
        assert_eq!(pace.area_pages(), 6, "of two windows the shorter one counts");
        pace.observe(slow);
        assert_eq!(pace.area_pages(), 4, "one slow window counts at most four times");
        (0..40).for_each(|_| pace.observe(copied(512, 5000)));
        assert_eq!(pace.area_pages(), 1);
    }

    #[test]
    fn areas_whose_least_copy_takes_longer_than_the_budget_are_told() {
        let unit = Unit { pages: 512, base_pages: 1 };
        let copies_in_budget = |least, windows, ns_of_a_page| {
            let mut pace = Pace::budgeted(512, least, 4096, unit, BUDGET);
            for _ in 0..windows {
                let left = pace.area_pages();
                pace.observe(copied(left, ns_of_a_page));
            }
            pace.copies_in_budget()
        };
        assert!(copies_in_budget(512, 100, 1900));
        assert!(!copies_in_budget(512, 100, 2000));
        assert!(copies_in_budget(32, 100, 2000));
        assert!(copies_in_budget(512, 7, 2000), "some windows may be unlucky");
        assert!(!Pace::fixed(512, BUDGET).copies_in_budget());
    }

    #[test]
    fn one_window_that_took_long_does_not_count_for_ever() {
        for left in [0, 1, 24] {
            let mut pace = Pace::adaptive(512, 16, 4096, 128, BUDGET);
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
