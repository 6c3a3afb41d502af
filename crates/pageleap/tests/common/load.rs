//! The load on regions while they leap.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::common::Random;

/// A random word of an owner. There are `owners` owners, and each has every `owners`-th word, from
/// its own number on. `skew` percent of the choices fall on the first 3.125 % of all words.
pub fn word_of(random: &mut Random, words: usize, owners: usize, owner: usize, skew: u64) -> usize {
    let span = if random.below(100) < skew { words / 32 } else { words };
    random.below((span / owners) as u64) as usize * owners + owner
}

/// Maps, writes, checks and unmaps memory outside all regions, once. `round` is what is written.
pub fn use_other_memory(round: u64) {
    let mut pages = vec![0u8; 256 << 10];
    pages.iter_mut().step_by(4096).for_each(|b| *b = round as u8);
    assert!(pages.iter().step_by(4096).all(|b| *b == round as u8));
}

/// Calls [`use_other_memory`] until stopped. Returns the number of calls.
pub fn bystander(stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Relaxed) {
        use_other_memory(rounds);
        rounds += 1;
        std::thread::sleep(Duration::from_micros(200));
    }
    rounds
}
