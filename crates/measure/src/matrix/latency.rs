//! Chains of loads.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pageleap::latency::{Chain, Order};

use crate::statistics::median;

/// Loads between two readings of the clock.
const BATCH: usize = 512;
/// How long a run lasts.
const RUN: Duration = Duration::from_millis(60);
/// Decides on the order of loads: each measurement has the same.
const SEED: u64 = 1;

/// A chain over a buffer.
pub(super) fn chain(words: &[AtomicU64], order: Order) -> Chain<'_> {
    Chain::over(words, order, SEED)
}

/// Nanoseconds of a load in one run: the median over batches.
pub(super) fn ns(chain: &mut Chain<'_>) -> f64 {
    let (start, mut batches) = (Instant::now(), Vec::new());
    while batches.is_empty() || start.elapsed() < RUN {
        batches.push(chain.chase(BATCH).as_nanos() as f64 / BATCH as f64);
    }
    median(&batches).expect("there is a batch")
}
