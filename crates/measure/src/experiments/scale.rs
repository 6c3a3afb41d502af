//! Leaps by one to all threads, over the size of the memory.

use pageleap::{CopyLoop, CopyMethod, EngineChoice, MemoryEngine};

use super::About;
use super::drawing::{Drawing, Of, Over};
use super::ways::{LABELS, METRICS, Way};
use crate::rivals::calls::Call;

/// The experiment.
pub const ABOUT: About = About {
    name: "scale",
    title: "Leaps by one to all threads, over the size of the memory",
    figure: "none; the paper copies by one thread",
    needs: "three quarters of the free memory; a second node for move_pages",
    takes: "5 min for each page size and size",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 2] = [
    Drawing {
        title: "Time over the size of the memory",
        about: "Lower is better.",
        over: Over::Part("size of the memory"),
        of: Of::Metric("time"),
        split: &[],
        theirs: &[],
    },
    Drawing {
        title: "Time compared with the fastest copy by one thread, over the size of the memory",
        about: "Lower is better. Ratios are formed within a round.",
        over: Over::Part("size of the memory"),
        of: Of::Ratio,
        split: &[],
        theirs: &[],
    },
];

/// The smallest memory.
pub const SMALLEST: u64 = 64 << 20;

/// Copies by several threads, besides the library's loop.
const MEMCPY: CopyMethod = CopyMethod { by: CopyLoop::Memcpy, step_bytes: 1 << 20 };

/// Sizes of the memory: four times as much each time, and `largest` in the end.
pub fn sizes(largest: u64) -> Vec<u64> {
    let all = std::iter::successors(Some(SMALLEST), |bytes| bytes.checked_mul(4));
    all.take_while(|bytes| *bytes < largest).chain([largest]).collect()
}

/// Numbers of threads: twice as many each time, and `most` in the end.
pub fn threads(most: usize) -> Vec<usize> {
    let all = std::iter::successors(Some(1), |threads: &usize| threads.checked_mul(2));
    all.take_while(|threads| *threads < most).chain([most]).collect()
}

/// The ways that are compared: copies and leaps by each number of threads, and the kernel's calls.
/// Ratios are to the fastest copy by one thread.
pub fn ways(threads: &[usize]) -> Vec<Way> {
    let by_threads = |threads: &usize| {
        let loops = [MEMCPY, pageleap::COPY_METHODS[0]];
        let copies = loops.map(|method| Way::CopyByThreads(method, *threads));
        let (engine, area, threads) = (EngineChoice::Auto, None, Some(*threads));
        copies.into_iter().chain([Way::Leap { engine, area, threads }])
    };
    let private = [Way::Private(MemoryEngine::Kernel), Way::Call(Call::MovePages)];
    Way::copies().chain(threads.iter().flat_map(by_threads)).chain(private).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_threads_grow_up_to_the_largest() {
        assert_eq!(sizes(1 << 30), [64 << 20, 256 << 20, 1 << 30]);
        assert_eq!(sizes(300 << 20), [64 << 20, 256 << 20, 300 << 20]);
        assert_eq!(sizes(16 << 20), [16 << 20]);
        assert_eq!(threads(1), [1]);
        assert_eq!(threads(2), [1, 2]);
        assert_eq!(threads(12), [1, 2, 4, 8, 12]);
    }
}
