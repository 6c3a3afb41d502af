//! Decides how many of a job's threads copy. Pure: no system calls, no locks, no clocks.
//!
//! A few threads can use up the bandwidth of a node's memory, or of the path to it; more threads
//! would only take CPUs from the application. So now and then a trial compares the present number
//! of threads with one less, or one more. The two numbers alternate in turns, and the best turn of
//! each counts, because other programs use the machine too.

use std::time::Duration;

/// When the first trial begins, because a shorter job gains nothing from one. (Under shuttle jobs
/// are short, and the clock advances by a millisecond at each reading.)
const FIRST: Duration = Duration::from_millis(if cfg!(shuttle) { 5 } else { 250 });
/// Time from a trial to the next one, unless the trial's result calls for another at once.
const AGAIN: Duration = Duration::from_secs(2);
/// The shortest duration of a turn, after [`SETTLE`].
const TURN: Duration = Duration::from_millis(if cfg!(shuttle) { 5 } else { 20 });
/// How long the areas under way at the beginning of a turn may take to move. An area is about as
/// large as the memory that a thread moves in some milliseconds.
const SETTLE: Duration = Duration::from_millis(if cfg!(shuttle) { 2 } else { 10 });
/// Turns of a trial: with the last thread, without, with, without. Each kind has two turns, because
/// other programs use the machine too.
const TURNS: usize = 4;
/// The share of its ideal gain that the last thread has to add. Its ideal gain is that of a thread
/// that shares no bandwidth with the others: the second of two threads would double the speed, so
/// it has to add a quarter.
const WORTH: f64 = 0.25;

/// Decides how many threads copy, from the speed of the job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadCount {
    most: usize,
    now: usize,
    trial: Trial,
}

#[derive(Clone, Copy, Debug)]
enum Trial {
    /// The next trial begins at `at`. With `fewer` it compares with one thread less, else with one
    /// more.
    Later { at: Duration, fewer: bool },
    /// A trial compares `more` threads with one less.
    Under { more: usize, turn: usize, settled: bool, since: Duration, bytes: u64, best: [f64; 2] },
}

impl ThreadCount {
    /// Begins with all of `most` threads.
    pub(crate) fn new(most: usize) -> Self {
        ThreadCount { most, now: most, trial: Trial::Later { at: FIRST, fewer: true } }
    }

    /// How many threads copy at present, in a trial too.
    pub(crate) fn active(&self) -> usize {
        match self.trial {
            Trial::Later { .. } => self.now,
            Trial::Under { more, turn, .. } => more - turn % 2,
        }
    }

    /// How many threads copy outside trials.
    pub(crate) fn settled(&self) -> usize {
        self.now
    }

    /// Takes into account that `bytes` have moved in the `elapsed` time since the job began.
    /// Returns whether the number of active threads has changed.
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

    /// Ends a trial: `worth` says whether the last of `more` threads is to be kept.
    fn conclude(&mut self, more: usize, worth: bool, elapsed: Duration, bytes: u64) {
        let fewer = more == self.now;
        self.now = if worth { more } else { more - 1 };
        let on = if fewer { !worth && self.now > 1 } else { worth && self.now < self.most };
        if on {
            self.begin(fewer, elapsed, bytes);
        } else {
            // The next trial goes the other way, because the right number may have changed.
            self.trial = Trial::Later { at: elapsed + AGAIN, fewer: !fewer };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs for `seconds` on a machine that moves `rate(threads)` bytes per millisecond. Returns
    /// the settled number of threads at the end of each second.
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
        // Three threads use all bandwidth.
        assert_eq!(run(&mut count, 0, 6, |threads| 1000 * threads.min(3) as u64), [3; 6]);
        // Now the machine has room for five threads.
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
            // Pages of 1 GB, one after the other. More than two threads make the copy no faster.
            at += Duration::from_millis(400 / count.active().min(2) as u64);
            bytes += 1 << 30;
            count.observe(at, bytes);
        }
        assert_eq!(count.settled(), 2);
    }
}
