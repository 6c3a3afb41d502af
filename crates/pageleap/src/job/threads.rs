//! How many of a job's threads copy. Pure: no system calls, no locks, no clocks.
//!
//! A few threads can take all that a node's memory, or the way to it, lets through; more of them
//! only take CPUs from the application. Now and then a thread less is tried, or one more, in turns
//! with as many as before, and the best turns of both are compared.

use std::time::Duration;

/// When it is tried for the first time: jobs that take no longer have nothing to gain. (Shuttle's
/// jobs are short, and its clock advances by a millisecond for each look.)
const FIRST: Duration = Duration::from_millis(if cfg!(shuttle) { 5 } else { 250 });
/// When again, if nothing has changed.
const AGAIN: Duration = Duration::from_secs(2);
/// How long a turn lasts, at least, once the areas that were under way when it began have moved:
/// they are as large as what a thread moves in some milliseconds.
const TURN: Duration = Duration::from_millis(if cfg!(shuttle) { 5 } else { 20 });
/// How long that takes.
const SETTLE: Duration = Duration::from_millis(if cfg!(shuttle) { 2 } else { 10 });
/// Turns of a trial, half of them with a thread more than the others: with, without, with, without.
/// Two of each, because others use the machine as well.
const TURNS: usize = 4;
/// Of what the last thread would add if nothing were shared it has to add this much.
const WORTH: f64 = 0.25;

/// Decides how many threads copy, from how fast a job gets on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadCount {
    most: usize,
    now: usize,
    trial: Trial,
}

#[derive(Clone, Copy, Debug)]
enum Trial {
    /// The next one begins at a time; whether it looks for fewer threads.
    Later { at: Duration, fewer: bool },
    /// `more` threads are compared with one less.
    Under { more: usize, turn: usize, settled: bool, since: Duration, bytes: u64, best: [f64; 2] },
}

impl ThreadCount {
    /// All of `most` at first.
    pub(crate) fn new(most: usize) -> Self {
        ThreadCount { most, now: most, trial: Trial::Later { at: FIRST, fewer: true } }
    }

    /// How many copy for now.
    pub(crate) fn active(&self) -> usize {
        match self.trial {
            Trial::Later { .. } => self.now,
            Trial::Under { more, turn, .. } => more - turn % 2,
        }
    }

    /// How many do as a rule.
    pub(crate) fn settled(&self) -> usize {
        self.now
    }

    /// Takes into account that `bytes` have moved since the job began, `elapsed` ago. Returns
    /// whether the number of active threads is another one now.
    pub(crate) fn observe(&mut self, elapsed: Duration, bytes: u64) -> bool {
        let before = self.active();
        match &mut self.trial {
            Trial::Later { at, fewer } => {
                if elapsed >= *at && self.most > 1 {
                    let fewer = *fewer && self.now > 1 || self.now == self.most;
                    self.begin(fewer, elapsed, bytes);
                }
            }
            Trial::Under { more, turn, settled, since, bytes: from, best } => {
                let took = elapsed.saturating_sub(*since);
                if !*settled && took >= SETTLE {
                    (*settled, *since, *from) = (true, elapsed, bytes);
                } else if *settled && took >= TURN {
                    let rate = bytes.saturating_sub(*from) as f64 / took.as_secs_f64();
                    best[*turn % 2] = best[*turn % 2].max(rate);
                    (*turn, *settled, *since) = (*turn + 1, false, elapsed);
                    if *turn == TURNS {
                        let (more, [with, without]) = (*more, *best);
                        self.conclude(
                            more,
                            with >= without * (1.0 + WORTH / (more - 1) as f64),
                            elapsed,
                            bytes,
                        );
                    }
                }
            }
        }
        self.active() != before
    }

    fn begin(&mut self, fewer: bool, elapsed: Duration, bytes: u64) {
        let more = if fewer { self.now } else { self.now + 1 };
        self.trial =
            Trial::Under { more, turn: 0, settled: false, since: elapsed, bytes, best: [0.0; 2] };
    }

    /// A trial has shown whether the last of `more` threads is worth having.
    fn conclude(&mut self, more: usize, worth: bool, elapsed: Duration, bytes: u64) {
        let fewer = more == self.now;
        self.now = if worth { more } else { more - 1 };
        let on = if fewer { !worth && self.now > 1 } else { worth && self.now < self.most };
        if on {
            self.begin(fewer, elapsed, bytes);
        } else {
            // The other way next time: what was right may be so no longer.
            self.trial = Trial::Later { at: elapsed + AGAIN, fewer: !fewer };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs for `seconds` on a machine that moves `rate(threads)` bytes per millisecond, and tells
    /// how many threads copied in each of them.
    fn run(
        count: &mut ThreadCount,
        from_s: u64,
        seconds: u64,
        rate: impl Fn(usize) -> u64,
    ) -> Vec<usize> {
        let mut bytes = 0;
        let mut settled = Vec::new();
        for ms in from_s * 1000..(from_s + seconds) * 1000 {
            bytes += rate(count.active());
            count.observe(Duration::from_millis(ms), bytes);
            assert!((1..=count.most).contains(&count.active()));
            if ms % 1000 == 999 {
                settled.push(count.settled());
            }
        }
        settled
    }

    #[test]
    fn threads_that_add_nothing_are_left_out() {
        let mut count = ThreadCount::new(8);
        // Three of them take all that there is.
        assert_eq!(run(&mut count, 0, 6, |threads| 1000 * threads.min(3) as u64), [3; 6]);
        // Now there is room for five.
        assert_eq!(run(&mut count, 6, 10, |threads| 1000 * threads.min(5) as u64).last(), Some(&5));
        assert_eq!(run(&mut count, 16, 10, |_| 1000).last(), Some(&1));
        assert_eq!(run(&mut count, 26, 10, |threads| 1000 * threads as u64).last(), Some(&8));
    }

    #[test]
    fn threads_that_help_are_kept_and_trials_take_little_time() {
        for most in [1, 2, 8] {
            let mut count = ThreadCount::new(most);
            let mut fewer_ms = 0;
            let mut bytes = 0;
            for ms in 0..20_000 {
                fewer_ms += usize::from(count.active() < most);
                bytes += 1000 * count.active() as u64;
                count.observe(Duration::from_millis(ms), bytes);
                assert!(ms >= 250 || count.active() == most, "at first all of them");
            }
            assert_eq!(count.settled(), most);
            assert!(fewer_ms <= 20_000 / 30, "{fewer_ms} ms of 20 s with fewer than {most}");
        }
    }

    #[test]
    fn a_slow_turn_does_not_decide() {
        let mut count = ThreadCount::new(2);
        let mut bytes = 0;
        let stall = 250..290;
        for ms in 0..2000u64 {
            bytes += if stall.contains(&ms) { 0 } else { 1000 * count.active() as u64 };
            count.observe(Duration::from_millis(ms), bytes);
        }
        assert_eq!(count.settled(), 2);
    }

    #[test]
    fn areas_that_take_longer_than_a_turn_are_compared_as_well() {
        let mut count = ThreadCount::new(4);
        let (mut at, mut bytes) = (Duration::ZERO, 0);
        for _ in 0..80 {
            // One page of 1 GB after the other, no faster with more threads than two.
            at += Duration::from_millis(400 / count.active().min(2) as u64);
            bytes += 1 << 30;
            count.observe(at, bytes);
        }
        assert_eq!(count.settled(), 2);
    }
}
