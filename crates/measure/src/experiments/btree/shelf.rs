//! The place of each leaf in the memory, and loading.
//!
//! ```text
//! leaves by key    | set 0 | set 1 | set 2 | ...  | last set |  rest                |
//! nodes            | set 1 | set 2 | ...          | r a r r r a r r ...  | r r | inner | free |
//!                    in blocks                      a: leaves of set 0 and a few more
//! ```
//!
//! A *set* has the leaves of one migration query, which follow each other in the order of keys. The
//! leaves of most sets lie in a block. Those of a few sets lie apart, in shuffled order, each among
//! leaves that never move. These sets are few because a leaf of a region that has left its
//! neighbours needs a mapping of its own, and a process has 65,530 of them.

use std::sync::atomic::AtomicU64;

use super::keys::{loaded_key, value};
use crate::olc::{CAPACITY, NODE_WORDS, Roots, load_inner, load_leaf};
use crate::random::SplitMix64;

/// Entries of a leaf that is loaded: 70 % of the most, as after random insertions (ln 2).
pub(super) const ENTRIES: u64 = CAPACITY as u64 * 7 / 10;
/// Children of an inner node that is loaded.
const CHILDREN: usize = ENTRIES as usize;
/// One leaf of this many lies apart, in their part of the memory.
const SPACING: u64 = 4;
/// The fewest sets whose leaves lie apart.
const LEAST_APART: u64 = 4;
/// The most leaves that lie apart: with two mappings each, and as many in both pools, a third of
/// those that a process has by default.
const MOST_APART: u64 = 8192;
/// Leaves that are loaded before the caller is asked whether to go on.
const ASK_EVERY: u64 = 1 << 13;

/// How the leaves of a migration lie in the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Side by side, in a block.
    Beside,
    /// Each apart from the others.
    Apart,
}

impl Leaves {
    /// Both.
    pub const ALL: [Leaves; 2] = [Leaves::Beside, Leaves::Apart];

    /// Its name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Leaves::Beside => "beside",
            Leaves::Apart => "apart",
        }
    }
}

/// The places of leaves.
#[derive(Debug)]
pub(super) struct Shelf {
    leaves: u64,
    /// Leaves of a set.
    set: u64,
    /// Sets, without the leaves that never move.
    sets: u64,
    /// Of these: sets whose leaves lie apart.
    apart: u64,
    /// For each leaf of a set that lies apart, its place among all of them.
    shuffled: Vec<u64>,
}

impl Shelf {
    /// Places for a tree in memory of this many nodes. A set has `asked` leaves, or fewer if that
    /// would be too large a part. Each of `threads` threads has a set that lies apart.
    pub(super) fn new(nodes: u64, asked: usize, threads: usize, seed: u64) -> Shelf {
        // The rest is for inner nodes, and for leaves that are split.
        let leaves = nodes / 8 * 7;
        let apart = LEAST_APART.max(threads as u64);
        let most = (leaves / (2 * SPACING * apart)).min(MOST_APART / apart);
        let set = (asked as u64).min(most).max(1);
        let resting = apart * (SPACING - 1);
        let sets = leaves / set - resting;
        let mut shuffled: Vec<u64> = (0..apart * set).collect();
        let mut random = SplitMix64(seed);
        for last in (1..shuffled.len()).rev() {
            shuffled.swap(last, random.below(last + 1));
        }
        Shelf { leaves, set, sets, apart, shuffled }
    }

    /// Keys that are loaded.
    pub(super) fn keys(&self) -> u64 {
        self.leaves * ENTRIES
    }

    /// Leaves of a set.
    pub(super) fn set_pages(&self) -> u64 {
        self.set
    }

    /// How many sets have their leaves there.
    pub(super) fn count(&self, leaves: Leaves) -> usize {
        match leaves {
            Leaves::Apart => self.apart as usize,
            Leaves::Beside => (self.sets - self.apart) as usize,
        }
    }

    /// Each set of this many is one whose leaves lie apart, until there are enough.
    fn stride(&self) -> u64 {
        self.sets / self.apart
    }

    /// The number of nodes in blocks.
    fn blocks(&self) -> u64 {
        (self.sets - self.apart) * self.set
    }

    /// The node of a leaf, by its place in the order of keys.
    fn node(&self, leaf: u64) -> u64 {
        let (set, within) = (leaf / self.set, leaf % self.set);
        if set >= self.sets {
            return self.blocks() + self.resting(leaf - self.sets * self.set);
        }
        let apart_before = set.div_ceil(self.stride()).min(self.apart);
        if set.is_multiple_of(self.stride()) && set / self.stride() < self.apart {
            return self.apart_node(set / self.stride(), within);
        }
        (set - apart_before) * self.set + within
    }

    /// The node of a leaf of a set whose leaves lie apart.
    fn apart_node(&self, nth: u64, within: u64) -> u64 {
        self.blocks() + self.shuffled[(nth * self.set + within) as usize] * SPACING + 1
    }

    /// The place of a leaf that never moves, behind the blocks.
    fn resting(&self, nth: u64) -> u64 {
        let each = SPACING - 1;
        if nth >= self.apart * self.set * each {
            return self.apart * self.set + nth;
        }
        let within = nth % each;
        // The second one of `SPACING` lies apart.
        nth / each * SPACING + within + u64::from(within >= 1)
    }

    /// The nodes of a set, ascending.
    pub(super) fn nodes(&self, leaves: Leaves, nth: usize) -> Vec<u64> {
        let nth = nth as u64;
        let mut nodes: Vec<u64> = match leaves {
            Leaves::Apart => (0..self.set).map(|within| self.apart_node(nth, within)).collect(),
            Leaves::Beside => (nth * self.set..(nth + 1) * self.set).collect(),
        };
        nodes.sort_unstable();
        nodes
    }

    /// Loads the tree. Asks `go_on` between parts.
    ///
    /// # Errors
    /// Those of `go_on`.
    pub(super) fn load<E>(
        &self,
        words: &[AtomicU64],
        go_on: &impl Fn() -> Result<(), E>,
    ) -> Result<Roots, E> {
        let (mut below, mut taken) = (Vec::with_capacity(self.leaves as usize), self.leaves);
        for leaf in 0..self.leaves {
            if leaf.is_multiple_of(ASK_EVERY) {
                go_on()?;
            }
            let first = leaf * ENTRIES;
            let entries = (first..first + ENTRIES).map(|place| {
                let key = loaded_key(place);
                (key, value(key, 0))
            });
            let next = (leaf + 1 < self.leaves).then(|| self.node(leaf + 1));
            let node = self.node(leaf);
            load_leaf(words, node, entries, next);
            below.push((loaded_key(first), node));
        }
        let mut level = 1;
        while below.len() > 1 {
            let parent = |children: &[(u64, u64)]| {
                let number = taken;
                taken += 1;
                load_inner(words, number, level, children[0].1, children[1..].iter().copied());
                (children[0].0, number)
            };
            below = below.chunks(CHILDREN).map(parent).collect();
            level += 1;
        }
        debug_assert!(taken * NODE_WORDS as u64 <= words.len() as u64);
        Ok(Roots::of(below[0].1, taken))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_leaf_has_a_place_of_its_own_and_sets_are_blocks_or_apart() {
        for (nodes, asked, threads) in [(512, 1024, 1), (512, 3, 2), (4096, 64, 9), (40_000, 1, 4)]
        {
            let shelf = Shelf::new(nodes, asked, threads, 7);
            let places: BTreeSet<u64> = (0..shelf.leaves).map(|leaf| shelf.node(leaf)).collect();
            assert_eq!(places, (0..shelf.leaves).collect());
            assert!(shelf.count(Leaves::Apart) >= threads && shelf.count(Leaves::Beside) > threads);
            let mut of_sets = BTreeSet::new();
            for leaves in Leaves::ALL {
                for nth in 0..shelf.count(leaves) {
                    let nodes = shelf.nodes(leaves, nth);
                    assert_eq!(nodes.len() as u64, shelf.set_pages());
                    let steps: Vec<u64> = nodes.windows(2).map(|two| two[1] - two[0]).collect();
                    match leaves {
                        Leaves::Beside => assert!(steps.iter().all(|step| *step == 1)),
                        Leaves::Apart => assert!(steps.iter().all(|step| *step >= SPACING)),
                    }
                    of_sets.extend(nodes);
                }
            }
            // The leaves of sets come first in the order of keys.
            let movable = shelf.sets * shelf.set;
            assert_eq!(of_sets, (0..movable).map(|leaf| shelf.node(leaf)).collect());
        }
    }
}
