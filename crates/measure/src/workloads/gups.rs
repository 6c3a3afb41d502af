//! Updates of random words: RandomAccess of HPC Challenge, with a part of the table for each
//! thread.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Control, Done, Structure, choices, in_parallel, load, operate, store};

/// The updates for each one that is timed. A reading of the clock waits for all updates before it,
/// which overlap otherwise.
const SAMPLED: u64 = 256;
/// Words of a line of a cache.
const LINE: usize = 8;
/// The polynomial of RandomAccess.
const POLYNOMIAL: u64 = 7;

/// A table of words. Each thread updates its own part, so that no update is lost to a race, as
/// RandomAccess allows; every lost one is an error of the memory. Parts alternate by line, so that
/// each thread walks all page tables, however many threads there are.
pub(super) struct Gups {
    threads: usize,
    /// Words of the part of each thread.
    part: usize,
    /// For each part: the exclusive or of all its words, as the updates make it.
    sums: Vec<AtomicU64>,
}

impl Gups {
    pub(super) fn fill(words: &[AtomicU64], threads: usize) -> Gups {
        in_parallel(words.len(), threads, |place| store(words, place, place as u64));
        let part = words.len() / LINE / threads * LINE;
        let mut gups = Gups { threads, part, sums: Vec::new() };
        gups.sums = (0..threads).map(|nth| AtomicU64::new(gups.sum(words, nth))).collect();
        gups
    }

    /// The place of a word of a part in the table.
    fn place(&self, nth: usize, word: usize) -> usize {
        (word / LINE * self.threads + nth) * LINE + word % LINE
    }

    /// The exclusive or of the words of a part.
    fn sum(&self, words: &[AtomicU64], nth: usize) -> u64 {
        (0..self.part).fold(0, |sum, word| sum ^ load(words, self.place(nth, word)))
    }
}

impl Structure for Gups {
    fn work(&self, words: &[AtomicU64], nth: usize, seed: u64, control: &Control<'_>) -> Done {
        let mut choice = choices(nth, seed);
        // Not 0, which would stay 0.
        let mut random = choice.below(usize::MAX) as u64 | 1;
        let mut changed = 0;
        let done = operate(control, SAMPLED, || {
            let high = if (random as i64) < 0 { POLYNOMIAL } else { 0 };
            random = (random << 1) ^ high;
            // RandomAccess takes the lowest bits, for a table whose size is a power of two.
            let word = ((u128::from(random) * self.part as u128) >> 64) as usize;
            let word = &words[self.place(nth, word)];
            // Nobody else writes to this part.
            word.store(word.load(Ordering::Relaxed) ^ random, Ordering::Relaxed);
            changed ^= random;
            true
        });
        self.sums[nth].fetch_xor(changed, Ordering::Relaxed);
        done
    }

    fn wrong_words(&self, words: &[AtomicU64]) -> u64 {
        let parts = self.sums.iter().enumerate();
        let is_wrong = |(nth, expected): &(usize, &AtomicU64)| {
            self.sum(words, *nth) != expected.load(Ordering::Relaxed)
        };
        // The sum of a part says that some of its words are wrong, and not how many.
        parts.filter(is_wrong).count() as u64
    }
}
