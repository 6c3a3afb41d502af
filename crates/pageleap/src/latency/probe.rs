//! One look at the latency of a buffer's memory: short, and without a trace in the caches of others.

use std::sync::atomic::AtomicU64;

use fastrand::Rng;
use pageleap_sys::{flush_line, wait_for_flushes};

use super::chain::{LINES, Link, PAIR, WORDS, chase};
use crate::units::BASE_PAGE;

/// Pages whose lines a probe loads, as many as a block of a chain has.
const PAGES: usize = 64;
/// Loads between two readings of the clock.
const BATCH: usize = 256;

/// Measures the latency of memory by about 2000 loads, in some 0.5 ms and in the calling thread: one
/// line of each pair in 64 random pages. They are linked in random order, and flushed from all caches
/// before. On a processor without an instruction for that (neither x86-64 nor arm64) the result is
/// the latency of a cache.
///
/// ```
/// use std::sync::atomic::AtomicU64;
/// use pageleap::latency::Probe;
///
/// let buffer: Vec<AtomicU64> = (0..1 << 18).map(|_| AtomicU64::new(0)).collect();
/// let ns_per_load = Probe::new(1).run(&buffer);
/// # assert!(ns_per_load > 0.0);
/// ```
#[derive(Debug)]
pub struct Probe {
    rng: Rng,
    lines: Vec<usize>,
    /// Nanoseconds of a load, by batch.
    batches: Vec<f64>,
}

impl Probe {
    /// A probe whose choices come from this seed.
    pub fn new(seed: u64) -> Probe {
        Probe { rng: Rng::with_seed(seed), lines: Vec::new(), batches: Vec::new() }
    }

    /// Nanoseconds of a load: the median over batches of 256, so that it does not matter if another
    /// thread gets the CPU in between. It overwrites a word of each line that it loads.
    ///
    /// # Panics
    /// If the buffer has fewer than 8 pages (32 KB).
    pub fn run(&mut self, words: &[AtomicU64]) -> f64 {
        let pages = size_of_val(words) / BASE_PAGE;
        assert!(pages * LINES / PAIR >= BATCH, "a probe needs a buffer of 32 KB");
        self.choose(pages);
        let mut link = Link::new(words);
        self.lines.iter().for_each(|line| link.line(*line));
        let first = link.close();
        self.lines.iter().for_each(|line| flush_line(&words[line * WORDS]));
        wait_for_flushes();
        self.batches.clear();
        let mut at = first;
        for _ in 0..self.lines.len() / BATCH {
            let (next, took) = chase(words, at, BATCH);
            self.batches.push(took.as_nanos() as f64 / BATCH as f64);
            at = next;
        }
        self.batches.sort_unstable_by(f64::total_cmp);
        self.batches.get(self.batches.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn choose(&mut self, pages: usize) {
        self.lines.clear();
        for page in self.rng.choose_multiple(0..pages, PAGES) {
            let of_pair = self.rng.usize(..PAIR);
            let lines = (0..LINES / PAIR).map(|line| page * LINES + line * PAIR + of_pair);
            self.lines.extend(lines);
        }
        self.rng.shuffle(&mut self.lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_loads_one_line_of_each_pair_in_distinct_pages() {
        let mut probe = Probe::new(3);
        for pages in [8, 64, 1000] {
            probe.choose(pages);
            let mut pairs: Vec<usize> = probe.lines.iter().map(|line| line / PAIR).collect();
            pairs.sort_unstable();
            pairs.dedup();
            assert_eq!(pairs.len(), probe.lines.len());
            assert_eq!(pairs.len(), pages.min(PAGES) * LINES / PAIR);
            let of_page = LINES / PAIR;
            assert!(
                pairs.chunks(of_page).all(|of| of[0] % of_page == 0 && of[0] / of_page < pages)
            );
        }
    }

    #[test]
    fn all_lines_of_a_probe_are_one_cycle() {
        let words: Vec<AtomicU64> = (0..1 << 15).map(|_| AtomicU64::new(u64::MAX)).collect();
        let mut probe = Probe::new(3);
        assert!(probe.run(&words) > 0.0);
        let first = probe.lines[0] * WORDS;
        let next =
            |at: &usize| Some(words[*at].load(std::sync::atomic::Ordering::Relaxed) as usize);
        let cycle: Vec<usize> =
            std::iter::successors(Some(first), next).take(probe.lines.len() + 1).collect();
        assert!(cycle.iter().zip(&probe.lines).all(|(word, line)| *word == line * WORDS));
        assert_eq!(cycle.last(), Some(&first));
    }

    #[test]
    #[should_panic(expected = "32 KB")]
    fn a_buffer_that_is_too_small_is_refused() {
        Probe::new(1).run(&[const { AtomicU64::new(0) }; 512]);
    }
}
