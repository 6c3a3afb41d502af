//! A thread that reads all words again and again.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Beside;

/// Words between two looks at the stage.
const LOOK_EVERY: usize = 4096;

/// Reads all words until the stage says stop.
pub(super) fn run(words: &[AtomicU64], beside: &Beside) {
    while !beside.stage.stopped() {
        for part in words.chunks(LOOK_EVERY).take_while(|_| !beside.stage.stopped()) {
            let sum = part.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed));
            std::hint::black_box(sum);
        }
    }
}
