//! A thread that reads all words again and again.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Beside;
use super::gaps::Gaps;
use crate::phase::Times;

/// Words that are read between two checks of the stage and the clock.
const LOOK_EVERY: usize = 4096;

/// Reads all words again and again until the stage is stopped. Returns the gaps, each of which is
/// the time for one part of the words.
pub(super) fn run(words: &[AtomicU64], beside: &Beside) -> Times {
    let mut gaps = Gaps::begin(beside);
    while !beside.stage.stopped() {
        for part in words.chunks(LOOK_EVERY).take_while(|_| !beside.stage.stopped()) {
            let sum = part.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed));
            std::hint::black_box(sum);
            gaps.end(beside);
        }
    }
    gaps.finish(beside)
}

#[cfg(test)]
mod tests {
    use super::super::tests::while_running;
    use super::*;
    use crate::phase::Phase;

    #[test]
    fn every_part_that_is_read_ends_a_gap() {
        let words: Vec<AtomicU64> = (0..LOOK_EVERY + 1).map(|_| AtomicU64::new(0)).collect();
        let looks = std::cell::Cell::new(0);
        let gaps = while_running(
            |beside| run(&words, beside),
            |_| {
                looks.set(looks.get() + 1);
                looks.get() > 100
            },
        );
        assert!(gaps.count(Phase::Before) > 0);
        let whole = gaps.quantile_ns(Phase::Before, 1.0).unwrap();
        assert!(whole > 0 && gaps.count(Phase::During) == 0);
    }
}
