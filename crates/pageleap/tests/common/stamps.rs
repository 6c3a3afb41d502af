//! Known contents of a region: words that depend on a seed and on their place.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pageleap::Region;

/// One word in so many is stamped: some in each page, at a different offset in each.
const STAMP_STRIDE: usize = 61;

fn stamped(seed: u64, word: usize) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word as u64 | 1
}

/// The stamped words of a range, with their numbers and expected values.
fn stamps(
    region: &Region,
    range: Range<usize>,
    seed: u64,
) -> impl Iterator<Item = (usize, &AtomicU64, u64)> {
    let first = range.start / 8;
    let words = region.atomics_u64(range).unwrap().iter().enumerate();
    let chosen =
        words.map(move |(i, word)| (first + i, word)).filter(|(i, _)| i % STAMP_STRIDE == 0);
    chosen.map(move |(i, word)| (i, word, stamped(seed, i)))
}

/// Stamps a range of a region.
pub fn stamp(region: &Region, range: Range<usize>, seed: u64) {
    stamps(region, range, seed).for_each(|(_, word, value)| word.store(value, Relaxed));
}

/// Checks the stamps of a range. [`stamp`] has written this range or a larger one.
pub fn check_stamp(region: &Region, range: Range<usize>, seed: u64) {
    for (i, word, value) in stamps(region, range, seed) {
        assert_eq!(word.load(Relaxed), value, "LOST: word {i} of {region:?}");
    }
}

/// Whether every byte of a range is zero.
pub fn is_zero(region: &Region, range: Range<usize>) -> bool {
    region.atomics_u64(range).unwrap().iter().all(|word| word.load(Relaxed) == 0)
}
