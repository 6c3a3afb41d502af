//! Small workloads whose random accesses miss the TLB: threads that update or search a data
//! structure in shared memory.
//!
//! They stand for those of *Latency-aware page-table migration* (Table 2), written anew and as
//! threads of one process:
//!
//! | | one operation |
//! |---|---|
//! | [`Workload::Gups`] | read, change and write a random word (HPC Challenge RandomAccess) |
//! | [`Workload::Join`] | probe a hash table with a key |
//! | [`Workload::XsBench`] | look up the cross sections of a material at an energy |
//! | [`Workload::Btree`] | look up a key in a B+-tree |
//!
//! A data structure names its parts by their place in the memory, not by address, so that threads
//! may reach it through any mapping. Each answer is checked; what GUPS has written is checked at
//! the end of a run.

mod btree;
mod gups;
mod join;
mod xsbench;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::phase::{Phase, Stage, Times};
use crate::random::SplitMix64;

/// Operations between two looks at the flag to stop, and between two reports of a thread's count.
const BATCH: u64 = 64;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Updates of random words.
    Gups,
    /// Probes of a hash join.
    Join,
    /// Look-ups of cross sections.
    XsBench,
    /// Look-ups in a B+-tree.
    Btree,
}

impl Workload {
    /// All of them, in the order of their measurement.
    pub const ALL: [Workload; 4] =
        [Workload::Gups, Workload::Join, Workload::XsBench, Workload::Btree];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Gups => "gups",
            Workload::Join => "join",
            Workload::XsBench => "xsbench",
            Workload::Btree => "btree",
        }
    }

    /// Fills the words with its data structure, by `threads` threads.
    ///
    /// # Panics
    /// With fewer than [`LEAST_BYTES`].
    pub(crate) fn build(self, words: &[AtomicU64], threads: usize) -> Box<dyn Structure> {
        assert!(size_of_val(words) >= LEAST_BYTES, "a workload needs {LEAST_BYTES} bytes");
        match self {
            Workload::Gups => Box::new(gups::Gups::fill(words, threads)),
            Workload::Join => Box::new(join::HashTable::fill(words, threads)),
            Workload::XsBench => Box::new(xsbench::Grids::fill(words)),
            Workload::Btree => Box::new(btree::Tree::fill(words, threads)),
        }
    }
}

/// The least memory of a workload.
pub const LEAST_BYTES: usize = 1 << 20;

/// The count of operations of one thread, in a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Count(pub AtomicU64);

/// State that a thread shares with the code that measures it.
#[derive(Debug)]
pub(crate) struct Control<'a> {
    /// The phase, and whether to stop.
    pub stage: &'a Stage,
    /// The count of this thread.
    pub count: &'a Count,
}

/// The results of one thread.
#[derive(Debug)]
pub(crate) struct Done {
    /// Times of single operations, a sample of all.
    pub times: Times,
    /// Answers that were wrong.
    pub wrong: u64,
}

/// A data structure, in the words that it was built in or in another mapping of them.
pub(crate) trait Structure: Send + Sync {
    /// Works until it is stopped. `nth` is the number of the calling thread, below the number of
    /// threads with which the structure was built.
    fn work(&self, words: &[AtomicU64], nth: usize, seed: u64, control: &Control<'_>) -> Done;

    /// Words that are not what all threads have written. The threads have ended.
    fn wrong_words(&self, words: &[AtomicU64]) -> u64 {
        let _ = words;
        0
    }
}

/// Does operations until they are stopped, and times one of `sampled`. `operation` returns whether
/// its answer was right.
fn operate(control: &Control<'_>, sampled: u64, mut operation: impl FnMut() -> bool) -> Done {
    let (mut times, mut done, mut wrong) = (Times::new(), 0u64, 0);
    while !control.stage.stopped() {
        for _ in 0..BATCH {
            done += 1;
            if done.is_multiple_of(sampled) {
                let (phase, began) = (control.stage.phase(), Instant::now());
                wrong += u64::from(!operation());
                let took = began.elapsed();
                let phase = Phase::of_interval(phase, control.stage.phase());
                times.add(phase, took);
            } else {
                wrong += u64::from(!operation());
            }
        }
        control.count.0.store(done, Ordering::Relaxed);
    }
    Done { times, wrong }
}

/// Calls a function with each number below `end`, in `threads` threads.
fn in_parallel(end: usize, threads: usize, each: impl Fn(usize) + Sync) {
    let part = end.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for first in (0..end).step_by(part) {
            let each = &each;
            scope.spawn(move || (first..end.min(first + part)).for_each(each));
        }
    });
}

/// The choices of a thread.
fn choices(nth: usize, seed: u64) -> SplitMix64 {
    SplitMix64(seed.wrapping_add(nth as u64).wrapping_mul(0xd1b5_4a32_d192_ed03))
}

fn load(words: &[AtomicU64], place: usize) -> u64 {
    words[place].load(Ordering::Relaxed)
}

fn store(words: &[AtomicU64], place: usize, value: u64) {
    words[place].store(value, Ordering::Relaxed);
}

#[cfg(test)]
mod tests;
