//! Compares a tree with the records of the threads that have worked on it.

use super::keys::{loaded_key, value};
use crate::olc::Tree;

/// The entries that a tree must have, in the order of keys.
struct Expected<'a> {
    /// The place of the next key that was loaded, and how many there are.
    loaded: u64,
    keys: u64,
    /// Places of keys, once for each update. Ascending.
    updated: &'a [u64],
    /// Keys that were inserted. Ascending.
    inserted: &'a [u64],
}

impl Iterator for Expected<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let loaded = (self.loaded < self.keys).then(|| loaded_key(self.loaded));
        if let Some(key) = self.inserted.first().copied()
            && loaded.is_none_or(|loaded| key < loaded)
        {
            self.inserted = &self.inserted[1..];
            return Some((key, value(key, 0)));
        }
        let place = self.loaded;
        self.loaded += 1;
        let times = self.updated.iter().take_while(|of| **of == place).count();
        self.updated = &self.updated[times..];
        loaded.map(|key| (key, value(key, times as u64)))
    }
}

/// Counts the entries that a tree has lost, has with another value, or has beyond those that it
/// must have: `keys` that were loaded, updates of those at the places `updated`, and `inserted`. A
/// leaf that no descent finds, and a tree that is broken, count as one more.
pub(super) fn lost(
    tree: Tree<'_>,
    keys: u64,
    mut updated: Vec<u64>,
    mut inserted: Vec<u64>,
) -> u64 {
    updated.sort_unstable();
    inserted.sort_unstable();
    let (updated, inserted) = (&updated, &inserted);
    let mut expected = Expected { loaded: 0, keys, updated, inserted }.peekable();
    let mut lost = 0;
    let walked = tree.each_leaf(|number, entries| {
        // A separator may be too low or too high.
        let ends = entries.first().into_iter().chain(entries.last());
        let is_elsewhere = ends.filter(|(key, _)| tree.leaf_of(*key) != Ok(number)).count() > 0;
        lost += u64::from(is_elsewhere);
        for entry in entries {
            while expected.next_if(|(key, _)| *key < entry.0).is_some() {
                lost += 1;
            }
            let found = expected.next_if(|(key, _)| *key == entry.0);
            lost += u64::from(found != Some(*entry));
        }
    });
    lost += expected.count() as u64;
    lost + u64::from(walked.is_err())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::shelf::Shelf;
    use super::*;
    use crate::olc::NODE_WORDS;

    #[test]
    fn updates_and_insertions_that_nobody_recorded_or_made_are_lost() {
        const NODES: u64 = 512;
        let words: Vec<AtomicU64> = (0..NODES * NODE_WORDS as u64).map(AtomicU64::new).collect();
        let shelf = Shelf::new(NODES, 1, 1, 3);
        let roots = shelf.load(&words, &|| Ok::<_, ()>(())).unwrap();
        let tree = Tree::new(&words, &roots);
        let new = |place| loaded_key(place) + 9;
        for place in [0, 700, 7, 700] {
            tree.update(loaded_key(place), |value| value.wrapping_add(1)).unwrap();
        }
        for place in [shelf.keys() - 1, 50] {
            tree.insert(new(place), value(new(place), 0)).unwrap();
        }
        let (last, keys) = (shelf.keys() - 1, shelf.keys());
        let lost = |updated: &[u64], inserted: &[u64]| {
            let inserted = inserted.iter().map(|place| new(*place)).collect();
            lost(tree, keys, updated.to_vec(), inserted)
        };
        assert_eq!(lost(&[700, 0, 7, 700], &[last, 50]), 0);
        // An update that left no trace, and one without a record.
        assert_eq!(lost(&[700, 0, 7, 700, 7], &[50, last]), 1);
        assert_eq!(lost(&[0, 7, 700], &[50, last]), 1);
        // Insertions: one that is missing at the end and in the midst, and one without a record.
        assert_eq!(lost(&[700, 0, 7, 700], &[50, last, last + 1]), 1);
        assert_eq!(lost(&[700, 0, 7, 700], &[50, 51, last]), 1);
        assert_eq!(lost(&[700, 0, 7, 700], &[last]), 1);
        assert_eq!(lost(&[700, 0, 7, 700], &[50]), 1);
    }
}
