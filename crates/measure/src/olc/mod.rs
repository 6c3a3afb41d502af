//! A B+-tree with optimistic lock coupling, whose nodes have 4 KB (Leis, Haubenschild and Neumann,
//! *Optimistic Lock Coupling*, IEEE Data Engineering Bulletin 42(1), 2019). A node is a page, so
//! that a program can move nodes.
//!
//! Each node has a *latch*: a version, whose lowest bit is set while a thread writes to the node.
//!
//! * **A reader** takes no latch. It notes the version of a node, reads, and compares the version
//!   afterwards. If that has changed, it begins again at the root. It trusts nothing that it has
//!   read before the comparison: least of all the number of a child.
//! * **Coupling**: the version of a child is noted before the version of its parent is compared. So
//!   the child was the right one when its version was noted.
//! * **A writer** descends as a reader, and latches the leaf if its version is still the one that
//!   it noted. Full nodes are split on the way down, together with their parent, which therefore
//!   has room. No thread waits for a latch while it holds one.
//! * Nodes are never merged or given back. A leaf knows its right neighbour, so that a scan goes on
//!   there: entries leave a leaf to the right only.
//!
//! The tree lies in words that the caller owns, and nodes are named by number: the words may be a
//! region or private memory. All words are atomics. Contents are read and written relaxed; the
//! fences in [`node`] order them against the latch (Boehm, *Can seqlocks get along with programming
//! language memory models?*, MSPC 2012).
//!
//! [`crate::workloads`] has a B+-tree, too: it is loaded once, only read, and has nodes of 512
//! bytes.

mod node;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use node::{CAPACITY, NODE_WORDS};
use node::{NONE, Node, Patience};

/// A node cannot be as it was written: a child that does not exist or is not one level lower, or a
/// latch that nobody gives back. Words of the tree are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// The outcome of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The key is new.
    New,
    /// The key was there, and keeps its value.
    Exists,
    /// No node is left. Nothing has changed.
    Full,
}

/// The parts of a tree that do not lie in its words.
#[derive(Debug)]
pub(crate) struct Roots {
    /// The number of the root.
    root: AtomicU64,
    /// How many nodes are taken, from the first one on.
    taken: AtomicU64,
}

/// A tree in words. It has whole nodes; further words are not used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tree<'a> {
    words: &'a [AtomicU64],
    roots: &'a Roots,
}

/// A node with the version at which it was found.
type At<'a> = (Node<'a>, u64);

/// An attempt that is worthless, because another thread has written meanwhile.
const AGAIN: Option<Inserted> = None;

impl Roots {
    /// A tree without keys: the first node becomes its root.
    #[cfg(test)]
    pub(crate) fn empty(words: &[AtomicU64]) -> Roots {
        let root = Node::numbered(words, 0).expect("the words have a node");
        root.make(0);
        Roots::of(0, 1)
    }

    /// A tree that was loaded with this root into the first `taken` nodes.
    pub(crate) fn of(root: u64, taken: u64) -> Roots {
        Roots { root: AtomicU64::new(root), taken: AtomicU64::new(taken) }
    }
}

/// Writes a leaf that no other thread knows yet. `next`: the number of its right neighbour.
pub(crate) fn load_leaf(
    words: &[AtomicU64],
    number: u64,
    entries: impl Iterator<Item = (u64, u64)>,
    next: Option<u64>,
) {
    let leaf = Node::numbered(words, number).expect("the caller has the node");
    leaf.make(0);
    leaf.set_next(next.unwrap_or(NONE));
    let mut count = 0;
    for (at, (key, value)) in entries.enumerate() {
        leaf.set(at, key, value);
        count = at + 1;
    }
    leaf.set_count(count);
}

/// Writes an inner node that no other thread knows yet: its first child, and further ones with the
/// least key below each. `level`: 1 above leaves.
pub(crate) fn load_inner(
    words: &[AtomicU64],
    number: u64,
    level: u64,
    first: u64,
    others: impl Iterator<Item = (u64, u64)>,
) {
    let inner = Node::numbered(words, number).expect("the caller has the node");
    inner.make(level);
    inner.set_child(0, first);
    let mut count = 0;
    for (at, (key, child)) in others.enumerate() {
        inner.set_key(at, key);
        inner.set_child(at + 1, child);
        count = at + 1;
    }
    inner.set_count(count);
}

impl<'a> Tree<'a> {
    pub(crate) fn new(words: &'a [AtomicU64], roots: &'a Roots) -> Tree<'a> {
        Tree { words, roots }
    }

    /// The value of a key.
    pub(crate) fn get(&self, key: u64) -> Result<Option<u64>, Broken> {
        retry(|patience| {
            let Some((leaf, version)) = self.leaf(key, patience)? else { return Ok(None) };
            let found = leaf.find(key).map(|at| leaf.value(at));
            Ok(leaf.is_unchanged(version).then_some(found))
        })
    }

    /// Replaces the value of a key by a function of it, and returns the value before.
    pub(crate) fn update(
        &self,
        key: u64,
        change: impl Fn(u64) -> u64,
    ) -> Result<Option<u64>, Broken> {
        retry(|patience| {
            let Some((leaf, version)) = self.leaf(key, patience)? else { return Ok(None) };
            let Some(latched) = leaf.latch(version) else { return Ok(None) };
            let found = leaf.find(key).map(|at| {
                let before = leaf.value(at);
                leaf.set(at, key, change(before));
                before
            });
            drop(latched);
            Ok(Some(found))
        })
    }

    /// Adds a key, unless it is there.
    pub(crate) fn insert(&self, key: u64, value: u64) -> Result<Inserted, Broken> {
        retry(|patience| self.try_insert(key, value, patience))
    }

    /// Appends up to `most` entries from `first` on to `found`, in the order of their keys. Each
    /// leaf is read as a whole; two leaves may be read at different times.
    pub(crate) fn scan(
        &self,
        first: u64,
        most: usize,
        found: &mut Vec<(u64, u64)>,
    ) -> Result<(), Broken> {
        let end = found.len() + most;
        let mut next = retry(|patience| {
            let Some((leaf, version)) = self.leaf(first, patience)? else { return Ok(None) };
            Ok(leaf.read(version, first, end, found))
        })?;
        while next != NONE && found.len() < end {
            next = self.read_leaf(next, first, end, found)?;
        }
        Ok(())
    }

    /// Calls a function with the number and the entries of each leaf, from left to right.
    pub(crate) fn each_leaf(&self, mut each: impl FnMut(u64, &[(u64, u64)])) -> Result<(), Broken> {
        let mut entries = Vec::with_capacity(CAPACITY);
        let mut next = self.leaf_of(0)?;
        // A damaged chain must not be a circle without an end.
        for _ in 0..self.words.len() / NODE_WORDS {
            if next == NONE {
                return Ok(());
            }
            let number = next;
            entries.clear();
            next = self.read_leaf(number, 0, usize::MAX, &mut entries)?;
            each(number, &entries);
        }
        if next == NONE { Ok(()) } else { Err(Broken) }
    }

    /// The number of the leaf that has a key, or would have it.
    pub(crate) fn leaf_of(&self, key: u64) -> Result<u64, Broken> {
        retry(|patience| Ok(self.leaf(key, patience)?.map(|(leaf, _)| leaf.number())))
    }

    /// Appends the entries of a leaf from `first` on, until there are `end`, and returns the number
    /// of its right neighbour.
    fn read_leaf(
        &self,
        number: u64,
        first: u64,
        end: usize,
        found: &mut Vec<(u64, u64)>,
    ) -> Result<u64, Broken> {
        let leaf = self.node(number)?;
        if !leaf.is_leaf() {
            return Err(Broken);
        }
        retry(|patience| {
            let version = leaf.version(patience)?;
            Ok(leaf.read(version, first, end, found))
        })
    }

    fn node(&self, number: u64) -> Result<Node<'a>, Broken> {
        Node::numbered(self.words, number).ok_or(Broken)
    }

    fn root(&self, patience: &mut Patience) -> Result<Option<At<'a>>, Broken> {
        let number = self.roots.root.load(Ordering::Acquire);
        let root = self.node(number)?;
        let version = root.version(patience)?;
        // If it was split before its version was noted, there is a new root.
        let is_root = self.roots.root.load(Ordering::Acquire) == number;
        Ok(is_root.then_some((root, version)))
    }

    /// The child of a node for a key; `None` if the node has changed.
    fn child(
        &self,
        (node, version): At<'a>,
        key: u64,
        patience: &mut Patience,
    ) -> Result<Option<At<'a>>, Broken> {
        let number = node.child_for(key);
        if !node.is_unchanged(version) {
            return Ok(None);
        }
        let child = self.node(number)?;
        if child.level().checked_add(1) != Some(node.level()) {
            return Err(Broken);
        }
        let of_child = child.version(patience)?;
        Ok(node.is_unchanged(version).then_some((child, of_child)))
    }

    /// The leaf for a key; `None` if a node on the way has changed.
    fn leaf(&self, key: u64, patience: &mut Patience) -> Result<Option<At<'a>>, Broken> {
        let mut at = self.root(patience)?;
        while let Some(node) = at.filter(|(node, _)| !node.is_leaf()) {
            at = self.child(node, key, patience)?;
        }
        Ok(at)
    }

    fn try_insert(
        &self,
        key: u64,
        value: u64,
        patience: &mut Patience,
    ) -> Result<Option<Inserted>, Broken> {
        let Some(mut at) = self.root(patience)? else { return Ok(AGAIN) };
        let mut parent = None;
        loop {
            if at.0.is_full() {
                return self.split(parent, at);
            }
            if at.0.is_leaf() {
                break;
            }
            parent = Some(at);
            let Some(child) = self.child(at, key, patience)? else { return Ok(AGAIN) };
            at = child;
        }
        let (leaf, version) = at;
        let Some(latched) = leaf.latch(version) else { return Ok(AGAIN) };
        let inserted = leaf.insert(key, value);
        drop(latched);
        Ok(Some(if inserted { Inserted::New } else { Inserted::Exists }))
    }

    /// Splits a full node, if neither it nor its parent has changed. The insertion begins again
    /// then. Without a parent it was the root.
    fn split(
        &self,
        parent: Option<At<'a>>,
        (node, version): At<'a>,
    ) -> Result<Option<Inserted>, Broken> {
        let of_parent = match parent {
            Some((parent, version)) => match parent.latch(version) {
                Some(latched) => Some((parent, latched)),
                None => return Ok(AGAIN),
            },
            None => None,
        };
        let Some(latched) = node.latch(version) else { return Ok(AGAIN) };
        let wanted = if of_parent.is_some() { 1 } else { 2 };
        let Some(first) = self.take(wanted) else { return Ok(Some(Inserted::Full)) };
        let right = self.node(first)?;
        right.make(node.level());
        let least = node.move_upper_half(right);
        match &of_parent {
            Some((parent, _)) => parent.insert_child(least, right.number()),
            None => {
                let root = self.node(first + 1)?;
                root.make(node.level() + 1);
                root.set_child(0, node.number());
                root.insert_child(least, right.number());
                // The latch of the former root keeps other threads from doing the same.
                self.roots.root.store(root.number(), Ordering::Release);
            }
        }
        drop((latched, of_parent));
        Ok(AGAIN)
    }

    /// Takes nodes that follow each other. Returns the number of the first one.
    fn take(&self, nodes: u64) -> Option<u64> {
        let all = (self.words.len() / NODE_WORDS) as u64;
        let more = |taken: u64| Some(taken + nodes).filter(|taken| *taken <= all);
        self.roots.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
    }
}

/// Tries until an attempt was undisturbed.
fn retry<T>(
    mut attempt: impl FnMut(&mut Patience) -> Result<Option<T>, Broken>,
) -> Result<T, Broken> {
    let mut patience = Patience::new();
    loop {
        if let Some(done) = attempt(&mut patience)? {
            return Ok(done);
        }
        patience.wait()?;
    }
}
