//! How long faulting threads were held up, counted without locks from inside the fault handler.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets of the histogram: bucket `b` counts waits of `2^b <= ns < 2^(b+1)`, the last one all longer ones (over 9 minutes).
pub const WAIT_BUCKETS: usize = 40;

/// Counters of one slot. Plain statistics: they order nothing, so they need no model checker.
pub(crate) struct WaitCounters {
    total_ns: AtomicU64,
    max_ns: AtomicU64,
    histogram: [AtomicU64; WAIT_BUCKETS],
    /// Protection changes by which writers opened areas.
    openings: AtomicU64,
}

impl WaitCounters {
    pub(crate) const fn new() -> Self {
        WaitCounters {
            total_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            histogram: [const { AtomicU64::new(0) }; WAIT_BUCKETS],
            openings: AtomicU64::new(0),
        }
    }

    /// Counts one protection change by a writer. Async-signal-safe.
    pub(crate) fn count_opening(&self) {
        self.openings.fetch_add(1, Relaxed);
    }

    /// How many there were; starts again from zero.
    pub(crate) fn take_openings(&self) -> u64 {
        self.openings.swap(0, Relaxed)
    }

    /// Counts one wait. Async-signal-safe.
    pub(crate) fn record(&self, ns: u64) {
        let bucket = (ns.max(1).ilog2() as usize).min(WAIT_BUCKETS - 1);
        self.histogram[bucket].fetch_add(1, Relaxed);
        self.total_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// Adds what was counted to `waits` and starts again from zero.
    pub(crate) fn take_into(&self, waits: &mut Waits) {
        for (sum, bucket) in waits.histogram.iter_mut().zip(&self.histogram) {
            let n = bucket.swap(0, Relaxed);
            *sum += n;
            waits.count += n;
        }
        waits.total_ns += self.total_ns.swap(0, Relaxed);
        waits.max_ns = waits.max_ns.max(self.max_ns.swap(0, Relaxed));
    }
}

/// How long threads were held up because they touched an area that was being migrated: from the entry of the fault handler to its
/// return. The kernel's delivery of the signal, a few microseconds more, is not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// How many times a thread was held up.
    pub count: u64,
    /// All waits together, in nanoseconds.
    pub total_ns: u64,
    /// The longest one, in nanoseconds.
    pub max_ns: u64,
    /// Waits by length: element `b` counts those of at least `2^b` and less than `2^(b+1)` nanoseconds.
    pub histogram: [u64; WAIT_BUCKETS],
}

impl Default for Waits {
    fn default() -> Self {
        Waits { count: 0, total_ns: 0, max_ns: 0, histogram: [0; WAIT_BUCKETS] }
    }
}

impl Waits {
    /// An upper bound, in nanoseconds, of the shortest time that a share `q` (0 to 1) of the waits did not exceed; 0 without waits.
    pub fn quantile(&self, q: f64) -> u64 {
        let rank = (q.clamp(0.0, 1.0) * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (b, n) in self.histogram.iter().enumerate() {
            seen += n;
            if seen >= rank && *n > 0 {
                return (2u64 << b).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn quantiles_bound_the_waits_from_above() {
        let counters = WaitCounters::new();
        (1..=1000).for_each(|us| counters.record(us * 1000));
        let mut waits = Waits::default();
        counters.take_into(&mut waits);
        assert_eq!((waits.count, waits.max_ns, waits.total_ns), (1000, 1_000_000, 500_500_000));
        assert!(waits.quantile(0.5) >= 500_000 && waits.quantile(0.5) < 1_048_577);
        assert_eq!(waits.quantile(1.0), 1_000_000);
        let mut again = Waits::default();
        counters.take_into(&mut again);
        assert_eq!(again, Waits::default(), "taking starts from zero");
    }

    #[test]
    fn no_wait_at_all_is_zero() {
        assert_eq!(Waits::default().quantile(0.99), 0);
    }
}
