//! Gaps: the waits that a thread of a load notices.
//!
//! A *gap* is the time from the end of one operation of a thread to the end of its next one. An
//! operation is a batch of writes, a part of the words that is read, or a round of the bystander.
//! The thread itself reads the clock, so a gap includes everything that delays the thread: page
//! faults, windows, the scheduler. Recording allocates nothing.

use std::time::{Duration, Instant};

use super::Beside;
use crate::phase::{Phase, Times};

/// The gaps of one thread.
pub(super) struct Gaps {
    times: Times,
    last_end: Instant,
    last_phase: Phase,
}

/// The end of a gap.
pub(super) struct End {
    /// When it ended.
    pub now: Instant,
    /// How long it was.
    pub gap: Duration,
    /// The phase in which it counts.
    pub phase: Phase,
}

impl Gaps {
    /// Starts the first gap now.
    pub fn begin(beside: &Beside) -> Gaps {
        let (last_end, last_phase) = (Instant::now(), beside.stage.phase());
        Gaps { times: Times::new(), last_end, last_phase }
    }

    /// Ends a gap and starts the next one.
    pub fn end(&mut self, beside: &Beside) -> End {
        let (now, last) = (Instant::now(), beside.stage.phase());
        let phase = Phase::of_interval(self.last_phase, last);
        let gap = now - self.last_end;
        self.times.add(phase, gap);
        (self.last_end, self.last_phase) = (now, last);
        End { now, gap, phase }
    }

    /// Drops the gap that is open, and starts one at `at`, the time from which the thread has had
    /// work again. It may lie in the past.
    pub fn resume(&mut self, at: Instant, beside: &Beside) {
        self.last_end = self.last_end.max(at);
        self.last_phase = beside.stage.phase();
    }

    /// All gaps. The open gap counts as if it ended now, so that the end of the load does not hide
    /// a wait that is still going on.
    pub fn finish(mut self, beside: &Beside) -> Times {
        self.end(beside);
        self.times
    }

    /// All gaps that have ended.
    pub fn ended(self) -> Times {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::PHASES;

    #[test]
    fn a_gap_that_is_open_at_the_end_counts_where_it_began_or_ended() {
        let beside = Beside::new();
        let mut gaps = Gaps::begin(&beside);
        gaps.end(&beside);
        beside.stage.enter(Phase::During);
        let finished = gaps.finish(&beside);
        assert_eq!(PHASES.map(|phase| finished.count(phase)), [1, 0, 1, 0]);
    }

    #[test]
    fn a_pause_is_no_gap_and_what_follows_it_begins_when_it_was_over() {
        let beside = Beside::new();
        let mut gaps = Gaps::begin(&beside);
        let pause = Duration::from_secs(1000);
        // The pause began long ago.
        gaps.last_end -= pause;
        let over = Instant::now() - pause / 2;
        gaps.resume(over, &beside);
        let End { now, gap, phase } = gaps.end(&beside);
        assert_eq!((gap, phase), (now - over, Phase::Before));
        // A gap never starts before the end of the previous operation.
        gaps.resume(over, &beside);
        assert_eq!(gaps.last_end, now);
        assert_eq!(gaps.ended().count(Phase::Before), 1);
    }
}
