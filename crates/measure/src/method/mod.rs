//! The method by which things are compared: rounds in one process, in which each thing has a turn.
//!
//! * **Interleaved.** A round measures each thing once. Rounds come in pairs: the first has a
//!   random order, the second the reverse. For two things this is ABBA. A machine that becomes
//!   slower or faster at a steady pace meets all things alike within a pair, and no thing always
//!   follows the same other one.
//! * **Warmed up.** The results of the first rounds are dropped: they meet cold caches, page
//!   faults, and clocks that still rise.
//! * **Repeated** until the interval of each median is narrow ([`Interval`]), or a bound is hit:
//!   rounds, or time. [`Enough`] says which.
//! * **Whole rounds only.** After an error or a signal the rounds that are whole stay, because a
//!   thing is compared with others of its own round.
//!
//! [`Rounds`] tells the caller whose turn it is, and keeps the results. It draws and writes
//! nothing.

mod interval;

use std::time::{Duration, Instant};

pub use self::interval::{CONFIDENCE, Interval, LEAST_VALUES};
use crate::random::SplitMix64;

/// How often things are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Method {
    /// Rounds whose results are dropped.
    pub warmups: usize,
    /// The fewest rounds that count.
    pub least: usize,
    /// The most.
    pub most: usize,
    /// A median is known well enough if half of its interval's width is at most this share of it.
    pub precision: f64,
    /// No round begins that would probably end after this time, warm-up included; `None`: no bound.
    /// The first round that counts is always measured.
    pub limit: Option<Duration>,
    /// Of orders and intervals.
    pub seed: u64,
    /// Whether results have means instead of medians.
    pub means: bool,
}

impl Method {
    /// A fixed number of rounds.
    pub fn exactly(rounds: usize, warmups: usize, seed: u64) -> Method {
        let (least, most) = (rounds, rounds);
        Method { warmups, least, most, precision: 0.0, limit: None, seed, means: false }
    }

    /// The order of the things in a round, which is counted from 0.
    pub fn order(&self, round: usize, things: usize) -> Vec<usize> {
        order(self.seed, round, things)
    }
}

/// The order of `things` in a round: random in even rounds, and its reverse in odd ones. For
/// measurements that count their rounds themselves.
pub fn order(seed: u64, round: usize, things: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..things).collect();
    // Seeds that follow each other give unrelated numbers.
    let mut random = SplitMix64(seed.wrapping_add(round as u64 / 2));
    for last in (1..things).rev() {
        order.swap(last, random.below(last + 1));
    }
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Why no further round is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enough {
    /// All intervals are narrow.
    Precise,
    /// The most rounds have been measured.
    Rounds,
    /// A further round would exceed the time.
    Time,
}

impl Enough {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Enough::Precise => "all intervals are narrow enough",
            Enough::Rounds => "the most rounds were measured",
            Enough::Time => "a further round would have exceeded the time",
        }
    }
}

/// One measurement that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The round, from 0, if it counts; `None` in a warm-up.
    pub round: Option<usize>,
    /// The thing.
    pub thing: usize,
    /// Its place in the round, from 0.
    pub place: usize,
}

/// A result with its place in the round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed<R> {
    /// The place, from 0.
    pub place: usize,
    /// The result.
    pub of: R,
}

/// Rounds of a comparison.
#[derive(Debug)]
pub struct Rounds<R> {
    method: Method,
    things: usize,
    /// Warm-ups that are whole.
    warmed_up: usize,
    /// Results of whole rounds, by round and thing.
    whole: Vec<Vec<Placed<R>>>,
    order: Vec<usize>,
    /// Results of the round that is under way, in its order.
    current: Vec<R>,
    enough: Option<Enough>,
    began: Instant,
}

impl<R> Rounds<R> {
    /// No rounds yet. The time of [`Method::limit`] begins now.
    pub fn new(method: Method, things: usize) -> Rounds<R> {
        Rounds {
            method,
            things,
            warmed_up: 0,
            whole: Vec::new(),
            order: Vec::new(),
            current: Vec::new(),
            enough: None,
            began: Instant::now(),
        }
    }

    /// Whose turn it is; `None` if there are enough rounds. `widest` gets the whole rounds when a
    /// pair is complete. It returns the widest interval, as half of its width by its median, or
    /// `None` if that is not known.
    pub fn next(&mut self, widest: impl FnOnce(&Rounds<R>) -> Option<f64>) -> Option<Turn> {
        self.next_after(self.began.elapsed(), widest)
    }

    fn next_after(
        &mut self,
        elapsed: Duration,
        widest: impl FnOnce(&Rounds<R>) -> Option<f64>,
    ) -> Option<Turn> {
        if self.current.is_empty() && self.enough.is_none() {
            self.enough = self.judge(elapsed, widest);
            // Orders of warm-ups and of counted rounds both begin with round 0.
            let round = if self.is_warm() { self.whole.len() } else { self.warmed_up };
            self.order = self.method.order(round, self.things);
        }
        if self.enough.is_some() || self.things == 0 {
            return None;
        }
        let place = self.current.len();
        let round = self.is_warm().then_some(self.whole.len());
        Some(Turn { round, thing: self.order[place], place })
    }

    /// Adds the result of the turn.
    ///
    /// # Panics
    /// If it was nobody's turn.
    pub fn add(&mut self, result: R) {
        assert!(self.current.len() < self.order.len(), "it is nobody's turn");
        self.current.push(result);
        if self.current.len() < self.things {
            return;
        }
        let results = std::mem::take(&mut self.current);
        if !self.is_warm() {
            self.warmed_up += 1;
            return;
        }
        let mut by_thing: Vec<(usize, Placed<R>)> = (self.order.iter().copied())
            .zip(results.into_iter().enumerate().map(|(place, of)| Placed { place, of }))
            .collect();
        by_thing.sort_unstable_by_key(|(thing, _)| *thing);
        self.whole.push(by_thing.into_iter().map(|(_, result)| result).collect());
    }

    fn is_warm(&self) -> bool {
        self.warmed_up >= self.method.warmups
    }

    fn judge(
        &self,
        elapsed: Duration,
        widest: impl FnOnce(&Rounds<R>) -> Option<f64>,
    ) -> Option<Enough> {
        let Method { least, most, precision, limit, .. } = self.method;
        let rounds = self.whole.len();
        if rounds >= most {
            return Some(Enough::Rounds);
        }
        if rounds == 0 {
            return None;
        }
        let of_each = elapsed / (self.warmed_up + rounds) as u32;
        if limit.is_some_and(|limit| elapsed + of_each > limit) {
            return Some(Enough::Time);
        }
        // The reverse of the order is still missing after an odd number of rounds.
        let may_end = rounds >= least && rounds.is_multiple_of(2);
        let is_precise = may_end && widest(self).is_some_and(|widest| widest <= precision);
        is_precise.then_some(Enough::Precise)
    }

    /// Results of the whole rounds that count, by round and thing.
    pub fn whole(&self) -> &[Vec<Placed<R>>] {
        &self.whole
    }

    /// How many whole rounds count.
    pub fn count(&self) -> usize {
        self.whole.len()
    }

    /// Why no further round is measured; `None` while there are turns, and if they were left.
    pub fn enough(&self) -> Option<Enough> {
        self.enough
    }

    /// The method.
    pub fn method(&self) -> Method {
        self.method
    }

    /// How many turns have been taken, warm-ups included.
    pub fn taken(&self) -> usize {
        (self.warmed_up + self.whole.len()) * self.things + self.current.len()
    }

    /// How many turns there are at most.
    pub fn at_most(&self) -> usize {
        (self.method.warmups + self.method.most) * self.things
    }

    /// The time that the remaining turns take at most, if they take as long as those before;
    /// `None` before the first turn.
    pub fn left(&self) -> Option<Duration> {
        self.left_after(self.began.elapsed())
    }

    fn left_after(&self, elapsed: Duration) -> Option<Duration> {
        let taken = self.taken();
        if taken == 0 {
            return None;
        }
        let turns = self.at_most() - taken;
        let left = elapsed.mul_f64(turns as f64 / taken as f64);
        Some(match self.method.limit {
            Some(limit) => left.min(limit.saturating_sub(elapsed)),
            None => left,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHOD: Method = Method {
        warmups: 1,
        least: 2,
        most: 10,
        precision: 0.02,
        limit: None,
        seed: 7,
        means: false,
    };

    /// Measures until there is enough; each result is the thing's number plus a hundred rounds.
    fn measured(method: Method, things: usize, widest: f64) -> Rounds<usize> {
        let mut rounds = Rounds::new(method, things);
        while let Some(turn) = rounds.next(|_| Some(widest)) {
            rounds.add(turn.thing + 100 * turn.round.unwrap_or(9));
        }
        rounds
    }

    #[test]
    fn pairs_of_rounds_mirror_each_other_and_differ_from_other_pairs() {
        for things in [1, 2, 3, 9] {
            for pair in 0..20 {
                let [first, mut second] =
                    [2 * pair, 2 * pair + 1].map(|round| METHOD.order(round, things));
                let mut all = first.clone();
                all.sort_unstable();
                assert_eq!(all, (0..things).collect::<Vec<_>>());
                second.reverse();
                assert_eq!(first, second);
            }
        }
        let firsts: Vec<usize> = (0..20).map(|pair| METHOD.order(2 * pair, 9)[0]).collect();
        assert!(firsts.iter().any(|first| *first != firsts[0]), "{firsts:?}");
        // Two things: ABBA or BAAB.
        let first_two = [METHOD.order(0, 2), METHOD.order(1, 2)].concat();
        assert!([[0, 1, 1, 0], [1, 0, 0, 1]].contains(&<[usize; 4]>::try_from(first_two).unwrap()));
    }

    #[test]
    fn no_thing_always_follows_the_same_one_or_has_a_place_of_its_own() {
        let orders: Vec<Vec<usize>> = (0..7).map(|round| order(0, round, 10)).collect();
        for thing in 0..10 {
            let place = |of: &Vec<usize>| of.iter().position(|one| *one == thing).unwrap();
            let before = |of: &Vec<usize>| place(of).checked_sub(1).map(|at| of[at]);
            let differ = |all: Vec<Option<usize>>| all.iter().any(|one| *one != all[0]);
            assert!(differ(orders.iter().map(before).collect()), "{orders:?}");
            assert!(differ(orders.iter().map(place).map(Some).collect()), "{orders:?}");
        }
    }

    #[test]
    fn a_steady_drift_meets_all_things_of_a_pair_alike() {
        let places = |round| {
            let order = METHOD.order(round, 5);
            (0..5).map(move |thing| order.iter().position(|of| *of == thing).unwrap())
        };
        let sums: Vec<usize> = places(4).zip(places(5)).map(|(one, other)| one + other).collect();
        assert_eq!(sums, [4; 5]);
    }

    #[test]
    fn rounds_end_when_intervals_are_narrow_or_at_the_bound() {
        let narrow = measured(METHOD, 3, 0.01);
        assert_eq!((narrow.count(), narrow.enough()), (2, Some(Enough::Precise)));
        let wide = measured(METHOD, 3, 0.5);
        assert_eq!((wide.count(), wide.enough()), (10, Some(Enough::Rounds)));
        // An odd number of rounds is no place to end by precision.
        let odd = measured(Method { least: 3, ..METHOD }, 3, 0.01);
        assert_eq!(odd.count(), 4);
        let exact = measured(Method::exactly(3, 0, 1), 2, 0.0);
        assert_eq!((exact.count(), exact.enough()), (3, Some(Enough::Rounds)));
        assert_eq!(measured(METHOD, 0, 0.5).count(), 0);
    }

    #[test]
    fn results_are_by_thing_and_warm_ups_are_dropped() {
        let rounds = measured(METHOD, 4, 0.5);
        for (round, results) in rounds.whole().iter().enumerate() {
            for (thing, Placed { place, of }) in results.iter().enumerate() {
                assert_eq!(*of, thing + 100 * round);
                assert_eq!(METHOD.order(round, 4)[*place], thing);
            }
        }
        assert_eq!((rounds.taken(), rounds.at_most()), (44, 44));
    }

    #[test]
    fn an_unfinished_round_is_not_among_the_whole_ones() {
        let mut rounds = Rounds::new(Method::exactly(5, 0, 1), 3);
        for _ in 0..7 {
            let turn = rounds.next(|_| None).unwrap();
            rounds.add(turn.thing);
        }
        assert_eq!((rounds.count(), rounds.enough(), rounds.taken()), (2, None, 7));
    }

    #[test]
    fn no_round_begins_that_would_exceed_the_time() {
        let method = Method { limit: Some(Duration::from_secs(10)), warmups: 0, ..METHOD };
        let mut rounds = Rounds::new(method, 2);
        assert_eq!(rounds.left_after(Duration::ZERO), None);
        let mut seconds = 0;
        while rounds.next_after(Duration::from_secs(seconds), |_| None).is_some() {
            rounds.add(());
            // A turn takes two seconds.
            seconds += 2;
            if seconds == 4 {
                // 18 turns of two seconds are left, and six seconds of the ten.
                let left = rounds.left_after(Duration::from_secs(seconds));
                assert_eq!(left, Some(Duration::from_secs(6)));
            }
        }
        assert_eq!((rounds.count(), rounds.enough()), (2, Some(Enough::Time)));
        // The first round is measured however short the time is.
        let method = Method { limit: Some(Duration::ZERO), ..METHOD };
        assert_eq!(measured(method, 2, 0.5).count(), 1);
    }
}
