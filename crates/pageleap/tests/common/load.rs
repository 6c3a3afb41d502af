//! What threads do while regions leap, and what must be true of the frames afterwards.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::common::Random;

/// One of the words that belong to `owner`, the one of `owners` that has every `owners`-th word
/// from its own number on. `skew` percent of them lie in the first 3.125 % of all words.
pub fn word_of(random: &mut Random, words: usize, owners: usize, owner: usize, skew: u64) -> usize {
    let span = if random.below(100) < skew { words / 32 } else { words };
    random.below((span / owners) as u64) as usize * owners + owner
}

/// Maps, faults and unmaps memory that has nothing to do with any region, once. Shows it with
/// `round` in it to nobody.
pub fn use_other_memory(round: u64) {
    let mut pages = vec![0u8; 256 << 10];
    pages.iter_mut().step_by(4096).for_each(|b| *b = round as u8);
    assert!(pages.iter().step_by(4096).all(|b| *b == round as u8));
}

/// Does that until stopped. Returns how often.
pub fn bystander(stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Relaxed) {
        use_other_memory(rounds);
        rounds += 1;
        std::thread::sleep(Duration::from_micros(200));
    }
    rounds
}

/// Expects that no frame is mapped twice. Pages that are not present have no number.
pub fn each_frame_once(frames: &[u64]) {
    let mut sorted: Vec<u64> = frames.iter().copied().filter(|frame| *frame != 0).collect();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[0] != pair[1]), "a frame is mapped twice");
}
