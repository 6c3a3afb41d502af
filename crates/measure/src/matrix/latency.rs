//! Chains of loads.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pageleap::latency::{Chain, Order};

use crate::statistics::median;

/// Loads between two readings of the clock.
const BATCH: usize = 512;
/// How long a run lasts at least.
const RUN: Duration = Duration::from_millis(60);
/// Decides on the order of loads: each measurement has the same.
const SEED: u64 = 1;

/// Nanoseconds of a load, by run.
pub(super) fn idle(words: &[AtomicU64], order: Order, runs: usize) -> Vec<f64> {
    let mut chain = Chain::over(words, order, SEED);
    (0..runs).map(|_| ns(&mut chain)).collect()
}

/// The median of one run.
fn ns(chain: &mut Chain<'_>) -> f64 {
    let (start, mut batches) = (Instant::now(), Vec::new());
    while start.elapsed() < RUN {
        batches.push(chain.chase(BATCH).as_nanos() as f64 / BATCH as f64);
    }
    median(&batches).unwrap_or(f64::NAN)
}

/// A chain that is measured again and again, beside different loads.
pub(super) struct Loaded<'a>(Mutex<Chain<'a>>);

impl Loaded<'_> {
    pub fn over(words: &[AtomicU64]) -> Loaded<'_> {
        Loaded(Mutex::new(Chain::over(words, Order::Blocks, SEED)))
    }

    /// The median of one run.
    pub fn ns(&self) -> f64 {
        ns(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
