//! Look-ups in a B+-tree whose nodes take eight lines, so that a page has eight of them and each
//! level costs a walk.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Control, Done, Structure, choices, in_parallel, load, operate, store};
use crate::random::scattered;

/// The look-ups for each one that is timed.
const SAMPLED: u64 = 32;
/// Words of a node: their number, the keys, and for each key its value, or the number of the node
/// below whose keys begin there.
const NODE: usize = 64;
/// The most keys of a node.
const FANOUT: usize = 31;
/// The place of the first value.
const VALUES: usize = 1 + FANOUT;
/// Every third number is a key: two of three look-ups find none.
const STEP: u64 = 3;

/// A tree that was loaded in the order of its keys: all nodes are full, except the last of each
/// level.
pub(super) struct Tree {
    keys: usize,
    /// The numbers of the first nodes of all levels, the leaves' first.
    levels: Vec<usize>,
}

/// The key at a place in the order of all keys.
fn key(place: usize) -> u64 {
    place as u64 * STEP + 1
}

fn value(key: u64) -> u64 {
    scattered(key)
}

/// The number of nodes of each level of a tree with `keys` keys, leaves first.
fn nodes_of_levels(keys: usize) -> Vec<usize> {
    let above = |below: &usize| (*below > 1).then(|| below.div_ceil(FANOUT));
    std::iter::successors(Some(keys.div_ceil(FANOUT)), above).collect()
}

impl Tree {
    /// As many keys as fit.
    pub(super) fn fill(words: &[AtomicU64], threads: usize) -> Tree {
        let fits = |keys: usize| nodes_of_levels(keys).iter().sum::<usize>() * NODE <= words.len();
        // Each level has a part of 1/FANOUT of the one below, so this is nearly all of it.
        let mut keys = words.len() / NODE * (FANOUT - 1);
        while !fits(keys) {
            keys -= keys.div_ceil(64);
        }
        let (nodes, mut levels) = (nodes_of_levels(keys), Vec::new());
        // The place of the first key below an entry, divided by the number of the entry.
        let (mut first, mut below, mut entries, mut keys_of_entry) = (0, None, keys, 1);
        for of_level in nodes {
            levels.push(first);
            in_parallel(of_level, threads, |nth| {
                let node = (first + nth) * NODE;
                let own = nth * FANOUT..entries.min((nth + 1) * FANOUT);
                store(words, node, own.len() as u64);
                for (at, entry) in own.enumerate() {
                    let key = key(entry * keys_of_entry);
                    let value =
                        below.map_or_else(|| value(key), |below: usize| (below + entry) as u64);
                    store(words, node + 1 + at, key);
                    store(words, node + VALUES + at, value);
                }
            });
            (below, entries) = (Some(first), of_level);
            (first, keys_of_entry) = (first + of_level, keys_of_entry * FANOUT);
        }
        Tree { keys, levels }
    }

    /// The value of a key. Nodes that are not as they were written lead to no value, or to a wrong
    /// one.
    fn find(&self, words: &[AtomicU64], wanted: u64) -> Option<u64> {
        let mut number = *self.levels.last()?;
        for level in (0..self.levels.len()).rev() {
            let node = words.get(number.checked_mul(NODE)?..)?.get(..NODE)?;
            let keys = node.get(1..1 + load(node, 0) as usize)?;
            let not_larger = |word: &AtomicU64| word.load(Ordering::Relaxed) <= wanted;
            let at = keys.partition_point(not_larger).checked_sub(1)?;
            let value = node.get(VALUES + at)?.load(Ordering::Relaxed);
            if level == 0 {
                return (load(keys, at) == wanted).then_some(value);
            }
            number = value as usize;
        }
        None
    }
}

impl Structure for Tree {
    fn work(&self, words: &[AtomicU64], nth: usize, seed: u64, control: &Control<'_>) -> Done {
        let mut choice = choices(nth, seed);
        let end = key(self.keys) as usize;
        operate(control, SAMPLED, || {
            let wanted = choice.below(end) as u64;
            let is_key = wanted % STEP == 1;
            self.find(words, wanted) == is_key.then(|| value(wanted))
        })
    }
}
