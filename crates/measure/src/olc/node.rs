//! A node: 4 KB of atomics, and the latch over them.
//!
//! ```text
//! word  0       1       2       3                   4 ...        258 ...
//!       latch   level   count   right neighbour     254 keys     254 values, or children
//! ```
//!
//! An inner node with n keys has n + 1 children. Child i + 1 has keys from key i on.
//!
//! **Order.** A writer latches, stores contents relaxed, and gives the latch back with a new
//! version. The release fence after latching keeps a store of contents from being seen by a thread
//! that does not see the latch afterwards. A reader loads the version (acquire), then contents
//! relaxed. The acquire fence before it compares the version keeps these loads from being performed
//! after the comparison. So a reader that sees one new word sees that the version has changed.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use pageleap::BASE_PAGE;

use super::Broken;

/// Words of a node.
pub(crate) const NODE_WORDS: usize = BASE_PAGE / size_of::<u64>();
const LATCH: usize = 0;
const LEVEL: usize = 1;
const COUNT: usize = 2;
const NEXT: usize = 3;
const KEYS: usize = 4;
/// The most entries of a leaf, and the most children of an inner node.
pub(crate) const CAPACITY: usize = (NODE_WORDS - KEYS) / 2;
const VALUES: usize = KEYS + CAPACITY;
const _: () = assert!(VALUES + CAPACITY == NODE_WORDS);

/// No neighbour.
pub(super) const NONE: u64 = u64::MAX;
/// The bit of a version that is set while a thread writes.
const LATCHED: u64 = 1;

/// A thread waits at most this long for other threads before it takes the tree for damaged. A leap
/// holds up a thread for far shorter.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// Waits before a thread lets others have its CPU.
const SPINS: u32 = 64;

/// How long a thread has waited for others.
pub(super) struct Patience {
    waits: u32,
    since: Option<Instant>,
}

impl Patience {
    pub(super) fn new() -> Patience {
        Patience { waits: 0, since: None }
    }

    /// Waits a moment.
    pub(super) fn wait(&mut self) -> Result<(), Broken> {
        self.waits = self.waits.saturating_add(1);
        if self.waits < SPINS {
            std::hint::spin_loop();
            return Ok(());
        }
        std::thread::yield_now();
        let since = self.since.get_or_insert_with(Instant::now);
        if since.elapsed() < LONGEST_WAIT { Ok(()) } else { Err(Broken) }
    }
}

/// A node in the words of a tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a> {
    number: u64,
    words: &'a [AtomicU64; NODE_WORDS],
}

/// A latched node. Dropping it gives the latch back, with a new version.
#[must_use]
pub(super) struct Latched<'a> {
    latch: &'a AtomicU64,
    version: u64,
}

impl Drop for Latched<'_> {
    fn drop(&mut self) {
        self.latch.store(self.version.wrapping_add(2), Ordering::Release);
    }
}

impl<'a> Node<'a> {
    /// The node of this number; `None` if it does not exist.
    pub(super) fn numbered(words: &'a [AtomicU64], number: u64) -> Option<Node<'a>> {
        let at = usize::try_from(number).ok()?.checked_mul(NODE_WORDS)?;
        let words = words.get(at..)?.first_chunk()?;
        Some(Node { number, words })
    }

    pub(super) fn number(self) -> u64 {
        self.number
    }

    fn load(self, at: usize) -> u64 {
        self.words[at].load(Ordering::Relaxed)
    }

    fn store(self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::Relaxed);
    }

    /// The version, as soon as nobody writes.
    pub(super) fn version(self, patience: &mut Patience) -> Result<u64, Broken> {
        loop {
            let version = self.words[LATCH].load(Ordering::Acquire);
            if version & LATCHED == 0 {
                return Ok(version);
            }
            patience.wait()?;
        }
    }

    /// Whether all that was read since this version was noted is of this version.
    pub(super) fn is_unchanged(self, version: u64) -> bool {
        fence(Ordering::Acquire);
        self.load(LATCH) == version
    }

    /// Latches the node, if it still has this version.
    pub(super) fn latch(self, version: u64) -> Option<Latched<'a>> {
        let latch = &self.words[LATCH];
        let latched = version | LATCHED;
        latch.compare_exchange(version, latched, Ordering::Acquire, Ordering::Relaxed).ok()?;
        fence(Ordering::Release);
        Some(Latched { latch, version })
    }

    /// Makes it an empty node, while no other thread knows it. A level of 0 makes a leaf.
    pub(super) fn make(self, level: u64) {
        self.store(LATCH, 0);
        self.store(LEVEL, level);
        self.store(COUNT, 0);
        self.store(NEXT, NONE);
    }

    /// It never changes once the node is part of a tree.
    pub(super) fn level(self) -> u64 {
        self.load(LEVEL)
    }

    pub(super) fn is_leaf(self) -> bool {
        self.level() == 0
    }

    /// The number of keys. A reader may see another node's word, so it is bounded.
    fn count(self) -> usize {
        self.load(COUNT).min(CAPACITY as u64) as usize
    }

    pub(super) fn set_count(self, count: usize) {
        self.store(COUNT, count as u64);
    }

    pub(super) fn is_full(self) -> bool {
        let most = if self.is_leaf() { CAPACITY } else { CAPACITY - 1 };
        self.count() >= most
    }

    pub(super) fn set_next(self, next: u64) {
        self.store(NEXT, next);
    }

    fn key(self, at: usize) -> u64 {
        self.load(KEYS + at)
    }

    pub(super) fn set_key(self, at: usize, key: u64) {
        self.store(KEYS + at, key);
    }

    pub(super) fn value(self, at: usize) -> u64 {
        self.load(VALUES + at)
    }

    pub(super) fn set(self, at: usize, key: u64, value: u64) {
        self.set_key(at, key);
        self.store(VALUES + at, value);
    }

    pub(super) fn set_child(self, at: usize, child: u64) {
        self.store(VALUES + at, child);
    }

    /// How many keys are below a bound.
    fn keys_below(self, is_below: impl Fn(u64) -> bool) -> usize {
        let keys = &self.words[KEYS..KEYS + self.count()];
        keys.partition_point(|word| is_below(word.load(Ordering::Relaxed)))
    }

    /// The place of a key of a leaf.
    pub(super) fn find(self, key: u64) -> Option<usize> {
        let at = self.keys_below(|other| other < key);
        (at < self.count() && self.key(at) == key).then_some(at)
    }

    /// The number of the child for a key. It means nothing if the node has changed.
    pub(super) fn child_for(self, key: u64) -> u64 {
        // An inner node has fewer keys than children. Another count was read in the midst of a
        // change.
        self.value(self.keys_below(|other| other <= key).min(CAPACITY - 1))
    }

    /// Appends the entries of a leaf from `first` on, until there are `end`. Returns the number of
    /// the right neighbour, or, if the leaf has changed, appends nothing and returns `None`.
    pub(super) fn read(
        self,
        version: u64,
        first: u64,
        end: usize,
        found: &mut Vec<(u64, u64)>,
    ) -> Option<u64> {
        let before = found.len();
        let from = self.keys_below(|other| other < first);
        let until = self.count().min(from.saturating_add(end - before));
        found.extend((from..until).map(|at| (self.key(at), self.value(at))));
        let next = self.load(NEXT);
        if self.is_unchanged(version) {
            return Some(next);
        }
        found.truncate(before);
        None
    }

    /// Adds an entry to a latched leaf with room. Returns whether the key is new.
    pub(super) fn insert(self, key: u64, value: u64) -> bool {
        let at = self.keys_below(|other| other < key);
        let count = self.count();
        if at < count && self.key(at) == key {
            return false;
        }
        for place in (at..count).rev() {
            self.set(place + 1, self.key(place), self.value(place));
        }
        self.set(at, key, value);
        self.set_count(count + 1);
        true
    }

    /// Adds a child to a latched inner node with room. `key`: the least key below it.
    pub(super) fn insert_child(self, key: u64, child: u64) {
        let at = self.keys_below(|other| other < key);
        let count = self.count();
        for place in (at..count).rev() {
            self.set_key(place + 1, self.key(place));
            self.set_child(place + 2, self.value(place + 1));
        }
        self.set_key(at, key);
        self.set_child(at + 1, child);
        self.set_count(count + 1);
    }

    /// Moves the upper half of a latched node to an empty one of the same level, which becomes its
    /// right neighbour. Returns the least key there.
    pub(super) fn move_upper_half(self, right: Node<'_>) -> u64 {
        let count = self.count();
        let half = count / 2;
        if self.is_leaf() {
            (half..count).for_each(|at| right.set(at - half, self.key(at), self.value(at)));
            right.set_count(count - half);
            right.set_next(self.load(NEXT));
            self.set_next(right.number);
            self.set_count(half);
            return right.key(0);
        }
        // The key in the middle goes up. Its child becomes the first one on the right.
        right.set_child(0, self.value(half + 1));
        for at in half + 1..count {
            right.set_key(at - half - 1, self.key(at));
            right.set_child(at - half, self.value(at + 1));
        }
        right.set_count(count - half - 1);
        let least = self.key(half);
        self.set_count(half);
        least
    }
}
