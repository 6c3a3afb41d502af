//! The probe side of a hash join: a table of keys with open addressing, half full.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Control, Done, Structure, choices, in_parallel, load, operate, store};
use crate::random::scattered;

/// The probes for each one that is timed.
const SAMPLED: u64 = 32;
/// Words of a slot: a key, and what belongs to it.
const SLOT: usize = 2;
/// Slots for each tuple of the build side.
const SLOTS_OF_TUPLE: usize = 2;
/// Tuples of the probe side that are tried for each tuple of the build side: every second one finds
/// a match.
const PROBED: usize = 2;

/// A hash table with linear probing. A key is never 0, which marks free slots.
pub(super) struct HashTable {
    slots: usize,
    tuples: usize,
}

/// The key of a tuple, different for each.
fn key(tuple: usize) -> u64 {
    scattered(tuple as u64 + 1)
}

fn payload(key: u64) -> u64 {
    key.rotate_left(23) ^ 0x5bd1_e995
}

impl HashTable {
    pub(super) fn fill(words: &[AtomicU64], threads: usize) -> HashTable {
        let slots = words.len() / SLOT;
        let table = HashTable { slots, tuples: slots / SLOTS_OF_TUPLE };
        in_parallel(words.len(), threads, |place| store(words, place, 0));
        in_parallel(table.tuples, threads, |tuple| table.insert(words, key(tuple)));
        table
    }

    /// The first slot in which to look for a key.
    fn home(&self, key: u64) -> usize {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.slots as u128) >> 64) as usize
    }

    fn next(&self, slot: usize) -> usize {
        if slot + 1 == self.slots { 0 } else { slot + 1 }
    }

    fn insert(&self, words: &[AtomicU64], key: u64) {
        let mut slot = self.home(key);
        let take = |slot: usize| {
            words[slot * SLOT].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed)
        };
        while take(slot).is_err() {
            slot = self.next(slot);
        }
        store(words, slot * SLOT + 1, payload(key));
    }

    /// The payload of a key.
    fn probe(&self, words: &[AtomicU64], key: u64) -> Option<u64> {
        let mut slot = self.home(key);
        // Half of the slots are free, unless memory has lost something.
        for _ in 0..self.slots {
            match load(words, slot * SLOT) {
                0 => return None,
                found if found == key => return Some(load(words, slot * SLOT + 1)),
                _ => slot = self.next(slot),
            }
        }
        None
    }
}

impl Structure for HashTable {
    fn work(&self, words: &[AtomicU64], nth: usize, seed: u64, control: &Control<'_>) -> Done {
        let mut choice = choices(nth, seed);
        operate(control, SAMPLED, || {
            let tuple = choice.below(self.tuples * PROBED);
            let key = key(tuple);
            self.probe(words, key) == (tuple < self.tuples).then(|| payload(key))
        })
    }
}
