//! A chain of loads, each of which needs the result of the one before.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use pageleap_sys::LINE_BYTES;

use crate::units::BASE_PAGE;

/// Words of a line.
pub(super) const WORDS: usize = LINE_BYTES / size_of::<u64>();
/// Lines of a base page.
pub(super) const LINES: usize = BASE_PAGE / LINE_BYTES;
/// Bytes of a block. The translations of 64 pages fit the first-level TLB of many processors (64
/// entries and more on those of Intel and AMD), and the second level of all. Intel's Memory Latency
/// Checker has blocks of this size, too.
const BLOCK_BYTES: usize = 64 * BASE_PAGE;
/// Lines that a processor may fetch together: a pair (the spatial prefetcher of Intel's
/// processors). One of each pair is visited in the first half of the chain, the other in the second.
pub(super) const PAIR: usize = 2;

/// In which order the loads of a [`Chain`] visit the lines of a buffer. Each is random, so that no
/// prefetcher can foresee it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Within a block of 256 KB, then in another block: nearly all loads find their translation in
    /// the TLB, so their time is that of the memory.
    Blocks,
    /// In another page each time: nearly all loads walk page tables first, if the buffer has many
    /// more pages than the TLB has entries (some thousand).
    Pages,
}

/// Lines of a buffer, each of which holds the place of the next, in one cycle: a load cannot start
/// before the one before has ended, so the time of many loads divided by their number is the latency
/// of one (pointer chasing, as lmbench's `lat_mem_rd` does).
///
/// ```
/// use std::sync::atomic::AtomicU64;
/// use pageleap::latency::{Chain, Order};
///
/// let buffer: Vec<AtomicU64> = (0..1 << 18).map(|_| AtomicU64::new(0)).collect();
/// let mut chain = Chain::over(&buffer, Order::Blocks, 1);
/// let ns_per_load = chain.chase(10_000).as_nanos() as f64 / 10_000.0;
/// # assert!(ns_per_load > 0.0);
/// // 2 MB are in a cache: a latency of memory needs a buffer that is larger than all of them.
/// ```
#[derive(Debug)]
pub struct Chain<'a> {
    words: &'a [AtomicU64],
    at: usize,
}

impl<'a> Chain<'a> {
    /// Links all whole blocks (256 KB) of a buffer, which overwrites one word of each line. `seed`
    /// decides on the order.
    ///
    /// # Panics
    /// If the buffer has no whole block.
    pub fn over(words: &'a [AtomicU64], order: Order, seed: u64) -> Chain<'a> {
        let blocks = size_of_val(words) / BLOCK_BYTES;
        assert!(blocks > 0, "a chain needs a buffer of {BLOCK_BYTES} bytes");
        let mut link = Link::new(words);
        let mut rng = Rng::with_seed(seed);
        match order {
            Order::Blocks => link_blocks(&mut link, blocks, &mut rng),
            Order::Pages => link_pages(&mut link, blocks * BLOCK_BYTES / BASE_PAGE, &mut rng),
        }
        Chain { words, at: link.close() }
    }

    /// Loads so many lines, one after the other, and returns the time that this took. The next call
    /// goes on where this one has ended.
    pub fn chase(&mut self, loads: usize) -> Duration {
        let (end, took) = chase(self.words, self.at, loads);
        self.at = end;
        took
    }
}

/// Follows the links. Returns the place at the end.
pub(super) fn chase(words: &[AtomicU64], from: usize, loads: usize) -> (usize, Duration) {
    let mut at = from;
    let start = Instant::now();
    for _ in 0..loads {
        // Whoever overwrites a link only spoils the result.
        at = words.get(at).map_or(0, |word| word.load(Ordering::Relaxed) as usize);
    }
    let at = black_box(at);
    (at, start.elapsed())
}

/// Links lines one by one.
pub(super) struct Link<'a> {
    words: &'a [AtomicU64],
    first_and_last: Option<(usize, usize)>,
}

impl<'a> Link<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Link<'a> {
        Link { words, first_and_last: None }
    }

    /// Makes this line the next one.
    pub(super) fn line(&mut self, line: usize) {
        let word = line * WORDS;
        let first = match self.first_and_last {
            Some((first, last)) => {
                self.words[last].store(word as u64, Ordering::Relaxed);
                first
            }
            None => word,
        };
        self.first_and_last = Some((first, word));
    }

    /// Makes a cycle of them. Returns the word of the first line.
    pub(super) fn close(self) -> usize {
        let Some((first, last)) = self.first_and_last else { return 0 };
        self.words[last].store(first as u64, Ordering::Relaxed);
        first
    }
}

fn link_blocks(link: &mut Link<'_>, blocks: usize, rng: &mut Rng) {
    const LINES_OF_BLOCK: usize = BLOCK_BYTES / LINE_BYTES;
    let mut order: Vec<usize> = (0..blocks).collect();
    let mut lines: Vec<usize> = (0..LINES_OF_BLOCK / PAIR).collect();
    for of_pair in 0..PAIR {
        rng.shuffle(&mut order);
        for block in &order {
            rng.shuffle(&mut lines);
            lines.iter().for_each(|line| {
                link.line(block * LINES_OF_BLOCK + line * PAIR + of_pair);
            });
        }
    }
}

fn link_pages(link: &mut Link<'_>, pages: usize, rng: &mut Rng) {
    const TURNS: usize = LINES / PAIR;
    let mut order: Vec<usize> = (0..pages).collect();
    // Each page begins with another of its lines, so that the lines of one turn fall into all sets
    // of the caches.
    let shifts: Vec<usize> = (0..pages).map(|_| rng.usize(..TURNS)).collect();
    for of_pair in 0..PAIR {
        for turn in 0..TURNS {
            rng.shuffle(&mut order);
            for &page in &order {
                link.line(page * LINES + (turn + shifts[page]) % TURNS * PAIR + of_pair);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines in the order of the chain, once around.
    fn lines(words: &[AtomicU64], order: Order) -> Vec<usize> {
        let chain = Chain::over(words, order, 5);
        let next = |at: &usize| Some(words[*at].load(Ordering::Relaxed) as usize);
        let all = std::iter::successors(Some(chain.at), next);
        all.take(words.len() / WORDS).map(|word| word / WORDS).collect()
    }

    #[test]
    fn a_chain_visits_each_line_once() {
        let words: Vec<AtomicU64> = (0..3 * BLOCK_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        for order in [Order::Blocks, Order::Pages] {
            let visited = lines(&words, order);
            let mut sorted = visited.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..words.len() / WORDS), "{order:?}");
            // No line follows the other of its pair.
            assert!(visited.windows(2).all(|two| two[0] / PAIR != two[1] / PAIR), "{order:?}");
            let mut chain = Chain::over(&words, order, 5);
            let first = chain.at;
            chain.chase(visited.len() - 1);
            assert_ne!(chain.at, first);
            chain.chase(1);
            assert_eq!(chain.at, first, "one cycle");
        }
    }

    #[test]
    fn orders_stay_within_a_block_or_leave_the_page() {
        let words: Vec<AtomicU64> = (0..4 * BLOCK_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let changes = |order, lines_of_unit: usize| {
            let visited = lines(&words, order);
            visited
                .windows(2)
                .filter(|two| two[0] / lines_of_unit != two[1] / lines_of_unit)
                .count()
        };
        // Two halves of four blocks each.
        assert!(changes(Order::Blocks, BLOCK_BYTES / LINE_BYTES) <= 7);
        let all = words.len() / WORDS;
        // At the end of a turn the next may begin with the same page.
        assert!(changes(Order::Pages, LINES) >= all - 1 - LINES);
    }

    #[test]
    fn a_chain_that_others_overwrite_ends_nowhere_else() {
        let words: Vec<AtomicU64> = (0..BLOCK_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let mut chain = Chain::over(&words, Order::Blocks, 1);
        words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        chain.chase(10);
    }
}
