//! Decides whether an area is closed before it is copied (stop-and-copy), or copied while its
//! writes are tracked (pre-copy). Pure: no system calls, no locks, no clocks.
//!
//! Closing an area first costs the job least, but each thread that touches the area waits for its
//! copy. Pre-copy costs the job more, and threads hardly wait. So areas are closed first while few
//! threads wait for them, and pre-copied while many would.
//!
//! While areas are closed first, waiting threads are counted, writers and readers. While areas are
//! pre-copied, no thread waits for a copy, so the number is estimated from the dirty pages. That
//! estimate misses readers, and how long a copy takes inside a window. So a return to closing first
//! is a trial: each trial that fails doubles the time until the next one.

use super::pace::{Pace, Seen};

/// Decides for each item of a job whether contention for its areas is low, so that the next area
/// may be closed before it is copied.
pub(crate) struct ContentionPolicy {
    pace: Pace,
    /// By item; `None` until an area of it has moved.
    items: Vec<Option<Contention>>,
    /// The contention of the last area that has moved.
    latest: Contention,
}

impl ContentionPolicy {
    /// For a job with `items` items.
    pub(crate) fn new(pace: Pace, items: usize) -> ContentionPolicy {
        ContentionPolicy { pace, items: vec![None; items], latest: Contention::default() }
    }

    /// The number of pages of the item's next area if it is to be closed first, else `None`.
    pub(crate) fn area_pages(&self, item: usize) -> Option<u64> {
        self.of(item).is_low.then(|| self.pace.area_pages())
    }

    /// Takes an area into account that was closed first; `waiters` threads waited for it.
    pub(crate) fn closed(&mut self, item: usize, seen: Seen, waiters: u64) {
        self.pace.observe(seen);
        // A thread that waits for one long window waits as long as others do for many short ones.
        let planned_ns = (self.pace.budget_ns() / 2).max(1);
        let areas = seen.window_ns as f64 / planned_ns as f64;
        self.change(item, |contention| contention.closed(waiters, areas));
        if !self.pace.copies_in_budget() {
            self.give_way(item);
        }
    }

    /// Stops closing areas of the item first for now, because the copy takes too long, or a call
    /// was refused.
    pub(crate) fn give_way(&mut self, item: usize) {
        self.change(item, Contention::give_way);
        // The next trial measures anew.
        self.pace.forget_copies();
    }

    /// Takes an area of `pages` pages into account that was pre-copied. `written` of its pages, in
    /// the unit in which writes are tracked, were dirtied while it was copied.
    pub(crate) fn followed(&mut self, item: usize, pages: u64, written: u64) {
        let closed_pages = self.pace.area_pages();
        let seen = Followed { written, pages, closed_pages };
        self.change(item, |contention| contention.followed(seen));
    }

    fn of(&self, item: usize) -> Contention {
        // A new item starts from the contention of the last one. Otherwise small items would learn
        // nothing.
        self.items[item].unwrap_or(self.latest)
    }

    fn change(&mut self, item: usize, change: impl FnOnce(&mut Contention)) {
        let mut contention = self.of(item);
        change(&mut contention);
        (self.items[item], self.latest) = (Some(contention), contention);
    }
}

/// How often threads touch one item's areas while these are closed, of late.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Contention {
    is_low: bool,
    /// Running mean of the threads for each closed area that waited, or would have waited.
    waiters: f64,
    /// How long the present choice has lasted, in areas that are closed first (or as much memory).
    lasted: f64,
    /// The shortest time for which areas are pre-copied, in the same unit.
    patience: f64,
}

/// Measurements of an area that was pre-copied.
#[derive(Clone, Copy, Debug)]
struct Followed {
    /// Pages that were dirtied while it was copied, in the unit in which writes are tracked: base
    /// or hugetlb pages.
    written: u64,
    /// Its pages.
    pages: u64,
    /// Pages of an area that is closed first.
    closed_pages: u64,
}

impl Default for Contention {
    fn default() -> Self {
        Contention { is_low: true, waiters: 0.0, lasted: 0.0, patience: Self::PATIENCE }
    }
}

impl Contention {
    /// Weight of one closed area in the running mean.
    const WEIGHT: f64 = 1.0 / 16.0;
    /// Above this mean, areas are pre-copied: a thread waits for every second area.
    const MANY: f64 = 0.5;
    /// Below this mean, areas are closed first again.
    const FEW: f64 = 0.4;
    /// The mean at the beginning of a trial. It is so close to `MANY` that a few areas that meet
    /// threads end the trial.
    const WARY: f64 = 0.25;
    /// The most waiting threads that one area counts for.
    const MOST: f64 = 4.0;
    /// The shortest time for which areas are pre-copied, in closed areas.
    const PATIENCE: f64 = 16.0;
    /// The same after many failed trials.
    const MOST_PATIENCE: f64 = 512.0;
    /// A trial that has lasted for this many closed areas has succeeded.
    const PASSED: f64 = 64.0;

    /// Takes an area into account that was closed first; `waiters` threads waited for it. Its
    /// window took as long as those of `areas` areas.
    fn closed(&mut self, waiters: u64, areas: f64) {
        self.observe(waiters as f64, areas);
        if self.is_low && self.lasted >= Self::PASSED {
            self.patience = Self::PATIENCE;
        }
        if self.is_low && self.waiters > Self::MANY {
            self.give_way();
        }
    }

    /// Pre-copies areas from now on.
    fn give_way(&mut self) {
        if self.is_low {
            (self.is_low, self.waiters, self.lasted) = (false, 1.0, 0.0);
        }
    }

    /// Takes an area into account that was pre-copied.
    fn followed(&mut self, seen: Followed) {
        let Followed { written, pages, closed_pages } = seen;
        let part = closed_pages as f64 / pages.max(1) as f64;
        // A smaller area has fewer of the pages that are dirtied, and a shorter copy in which they
        // are: half the area, a quarter of the dirty pages.
        self.observe(written as f64 * part * part, 1.0 / part);
        if !self.is_low && self.waiters < Self::FEW && self.lasted >= self.patience {
            let patience = (self.patience * 2.0).min(Self::MOST_PATIENCE);
            *self = Contention { is_low: true, waiters: Self::WARY, lasted: 0.0, patience };
        }
    }

    fn observe(&mut self, waiters: f64, areas: f64) {
        let areas = areas.clamp(1.0, 1.0 / Self::WEIGHT);
        let kept = (1.0 - Self::WEIGHT).powf(areas);
        self.waiters = self.waiters * kept + waiters.min(Self::MOST) * (1.0 - kept);
        self.lasted += areas;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::job::pace::Unit;

    /// Base pages of an area that is closed first, and of one that is followed.
    const CLOSED: u64 = 512;
    const FOLLOWED: u64 = 2048;

    /// A generator of values from 0 to 1.
    struct Chance(u64);

    impl Chance {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }

        /// A number with a Poisson distribution of this mean.
        fn times(&mut self, mean: f64) -> u64 {
            let (limit, mut product, mut times) = ((-mean).exp(), self.next(), 0);
            while product > limit {
                product *= self.next();
                times += 1;
            }
            times
        }
    }

    /// A load: how often writers and readers touch an area while its copy closes it.
    #[derive(Clone, Copy)]
    struct Load {
        writes: f64,
        reads: f64,
    }

    const QUIET: Load = Load { writes: 0.0, reads: 0.0 };
    const BUSY: Load = Load { writes: 40.0, reads: 0.0 };

    /// Moves an area, as a job would whose load is of two threads. Returns whether it was closed
    /// first.
    fn step(contention: &mut Contention, chance: &mut Chance, load: Load) -> bool {
        let first = contention.is_low;
        if first {
            let came = |touches: f64, chance: &mut Chance| chance.times(touches).min(1);
            let waiters = came(load.writes, chance) + came(load.reads, chance);
            contention.closed(waiters, 1.0);
        } else {
            let longer = (FOLLOWED / CLOSED) as f64;
            let written = chance.times(load.writes * longer * longer).min(FOLLOWED);
            contention.followed(Followed { written, pages: FOLLOWED, closed_pages: CLOSED });
        }
        first
    }

    /// Moves `n` areas. Returns how many were closed first, and how often that changed.
    fn areas(
        contention: &mut Contention,
        n: usize,
        load: impl Fn(usize) -> Load,
    ) -> (usize, usize) {
        let mut chance = Chance(7);
        let choices: Vec<bool> = (0..n).map(|i| step(contention, &mut chance, load(i))).collect();
        let changes = choices.windows(2).filter(|two| two[0] != two[1]).count();
        (choices.into_iter().filter(|first| *first).count(), changes)
    }

    fn from_start(n: usize, load: impl Fn(usize) -> Load) -> (usize, usize) {
        areas(&mut Contention::default(), n, load)
    }

    #[test]
    fn steady_loads_get_one_choice() {
        assert_eq!(from_start(1000, |_| QUIET), (1000, 0));
        let (first, changes) = from_start(1000, |_| BUSY);
        assert!(first < 16 && changes == 1, "{first}, {changes}");
        let (first, changes) = from_start(1000, |_| Load { writes: 0.1, reads: 0.1 });
        assert_eq!((first, changes), (1000, 0));
        // One thread in three areas is few, and one in most of them is many.
        let (first, changes) = from_start(1000, |_| Load { writes: 0.4, reads: 0.0 });
        assert!(first > 900 && changes < 10, "{first}, {changes}");
        let (first, changes) = from_start(1000, |_| Load { writes: 1.5, reads: 0.0 });
        assert!(first < 64 && changes <= 5, "{first}, {changes}");
    }

    #[test]
    fn readers_that_only_a_closed_area_shows_are_tried_ever_less_often() {
        let readers = |_| Load { writes: 0.0, reads: 40.0 };
        let mut contention = Contention::default();
        let (first, changes) = areas(&mut contention, 1000, readers);
        assert!(first < 100 && changes < 30, "{first}, {changes}");
        let (first, changes) = areas(&mut contention, 4000, readers);
        assert!(first < 250 && changes < 70, "{first}, {changes}");
        // The readers have gone.
        let (first, _) = areas(&mut contention, 1000, |_| QUIET);
        assert!(first > 800, "{first}");
        assert_eq!(contention.patience, Contention::PATIENCE);
    }

    #[test]
    fn a_burst_is_no_phase() {
        // One area in fifty meets both threads, and then four areas in a row do.
        let (first, changes) = from_start(1000, |i| if i % 50 == 0 { BUSY } else { QUIET });
        assert_eq!((first, changes), (1000, 0));
        let (first, changes) = from_start(1000, |i| if i % 100 < 4 { BUSY } else { QUIET });
        assert_eq!((first, changes), (1000, 0));
    }

    #[test]
    fn skew_leaves_most_areas_closed_first() {
        // All writes go to one part in sixteen of the memory.
        let hot = |i| Load { writes: if i % 256 < 16 { 600.0 } else { 0.0 }, reads: 0.0 };
        let (first, changes) = from_start(1024, hot);
        assert!(first > 800 && changes <= 8, "{first}, {changes}");
    }

    #[test]
    fn phases_are_followed_and_left() {
        let mut contention = Contention::default();
        for _ in 0..20 {
            let (first, changes) = areas(&mut contention, 200, |_| BUSY);
            assert!(first < 16 && changes <= 1, "{first}, {changes}");
            let (first, changes) = areas(&mut contention, 200, |_| QUIET);
            assert!(first > 190 && changes <= 1, "{first}, {changes}");
        }
    }

    #[test]
    fn larger_followed_areas_say_more() {
        let calm = |pages| {
            let mut contention = Contention::default();
            areas(&mut contention, 50, |_| BUSY);
            let mut areas = 0;
            while !contention.is_low {
                contention.followed(Followed { written: 0, pages, closed_pages: CLOSED });
                areas += 1;
            }
            areas
        };
        assert!(calm(CLOSED) > 2 * calm(4 * CLOSED));
        // An area of the size of a closed one or less counts as one.
        assert_eq!(calm(CLOSED), calm(CLOSED / 4));
    }

    const BUDGET: Duration = Duration::from_millis(1);

    /// For `items` items. Areas have 1 to 8 times 512 pages.
    fn new_policy(items: usize) -> ContentionPolicy {
        let unit = Unit { pages: CLOSED, base_pages: 1 };
        ContentionPolicy::new(Pace::budgeted(CLOSED, CLOSED, 8 * CLOSED, unit, BUDGET), items)
    }

    /// The window of an area.
    fn window(pages: u64, time: Duration) -> Seen {
        let window_ns = time.as_nanos() as u64;
        Seen { written: 0, left: pages, window_ns, copy_ns: window_ns }
    }

    #[test]
    fn a_thread_that_waits_long_counts_for_many() {
        let areas_until_followed = |time| {
            let mut policy = new_policy(1);
            let mut areas = 0;
            while let Some(pages) = policy.area_pages(0) {
                policy.closed(0, window(pages, time), 1);
                areas += 1;
            }
            areas
        };
        let half = BUDGET / 2;
        assert_eq!([1, 4, 16, 100].map(|n| areas_until_followed(half * n)), [11, 3, 1, 1]);
    }

    #[test]
    fn copies_that_take_too_long_are_tried_again() {
        let mut policy = new_policy(1);
        let mut trials = 0;
        let mut areas = |policy: &mut ContentionPolicy, time: Duration| {
            let mut first = 0;
            for _ in 0..1000 {
                match policy.area_pages(0) {
                    Some(pages) => {
                        policy.closed(0, window(pages, time), 0);
                        first += 1;
                    }
                    None => {
                        trials += usize::from(first > 0);
                        policy.followed(0, FOLLOWED, 0);
                    }
                }
            }
            first
        };
        let slow = areas(&mut policy, 2 * BUDGET);
        assert!((8..100).contains(&slow), "{slow}");
        // The host was busy, and is no longer.
        let fast = areas(&mut policy, BUDGET / 4);
        assert!(fast > 800, "{fast}");
        assert!(trials > 0);
    }

    #[test]
    fn what_was_refused_is_followed_for_some_time() {
        let mut policy = new_policy(1);
        policy.give_way(0);
        let mut followed = 0;
        while policy.area_pages(0).is_none() {
            policy.followed(0, CLOSED, 0);
            followed += 1;
        }
        assert!(followed >= Contention::PATIENCE as u32, "{followed}");
    }

    #[test]
    fn items_begin_as_the_last_one_ended() {
        const ITEMS: usize = 200;
        let mut policy = new_policy(ITEMS);
        // Three areas of each item. The first ten items are busy.
        let mut first = [0; 2];
        for item in 0..ITEMS {
            let busy = item < 10;
            for _ in 0..3 {
                match policy.area_pages(item) {
                    Some(pages) => {
                        policy.closed(item, window(pages, BUDGET / 2), u64::from(busy));
                        first[usize::from(busy)] += 1;
                    }
                    None => policy.followed(item, CLOSED, if busy { CLOSED } else { 0 }),
                }
            }
        }
        assert!(first[1] < 15 && first[0] > 500, "{first:?}");
    }
}
