//! Statistics of waiting times. The fault handler records into them without locks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Leading bits of a time that select its bucket. A bucket is at most 1/16 of its times wide.
const PRECISION: u32 = 4;
const STEPS: usize = 1 << PRECISION;
/// Number of buckets of a histogram. The buckets reach up to 18 minutes; the last one holds all
/// longer times.
const BUCKETS: usize = (40 - PRECISION as usize + 1) * STEPS;

/// The bucket of a time. The first buckets are a nanosecond wide. After them each doubling of the
/// time has [`STEPS`] buckets: the bucket of 1000 ns is 32 ns wide.
fn bucket(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - PRECISION;
    let bucket = (shift as usize + 1) * STEPS + (ns >> shift) as usize % STEPS;
    bucket.min(BUCKETS - 1)
}

/// The longest time of a bucket, except for the last bucket.
fn longest(bucket: usize) -> u64 {
    let next = bucket + 1;
    if next < STEPS {
        bucket as u64
    } else {
        (((next % STEPS + STEPS) as u64) << (next / STEPS - 1)) - 1
    }
}

/// Counters of one slot. They are plain statistics that order no other access, so they need no
/// model checker.
pub(crate) struct WaitCounters {
    total_ns: AtomicU64,
    max_ns: AtomicU64,
    histogram: [AtomicU64; BUCKETS],
    /// `mprotect` calls by which writers opened areas.
    openings: AtomicU64,
    /// Threads that began to wait.
    waiters: AtomicU64,
}

impl WaitCounters {
    pub(crate) const fn new() -> Self {
        WaitCounters {
            total_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            histogram: [const { AtomicU64::new(0) }; BUCKETS],
            openings: AtomicU64::new(0),
            waiters: AtomicU64::new(0),
        }
    }

    /// Counts one `mprotect` call of a writer that opens an area. Async-signal-safe.
    pub(crate) fn count_opening(&self) {
        self.openings.fetch_add(1, Relaxed);
    }

    /// Returns how many openings were counted, and starts again from zero.
    pub(crate) fn take_openings(&self) -> u64 {
        self.openings.swap(0, Relaxed)
    }

    /// Counts a thread that is about to wait. Async-signal-safe.
    pub(crate) fn count_waiter(&self) {
        self.waiters.fetch_add(1, Relaxed);
    }

    /// Returns how many threads began to wait, and starts again from zero.
    pub(crate) fn take_waiters(&self) -> u64 {
        self.waiters.swap(0, Relaxed)
    }

    /// Counts one wait. Async-signal-safe.
    pub(crate) fn record(&self, ns: u64) {
        self.histogram[bucket(ns)].fetch_add(1, Relaxed);
        self.total_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// Adds the counts to `waits` and starts again from zero.
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

/// Statistics of the times for which threads waited, or areas were closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// Number of times.
    pub count: u64,
    /// Sum of all times, in nanoseconds.
    pub total_ns: u64,
    /// The longest time, in nanoseconds.
    pub max_ns: u64,
    histogram: Vec<u64>,
}

impl Default for Waits {
    fn default() -> Self {
        Waits { count: 0, total_ns: 0, max_ns: 0, histogram: vec![0; BUCKETS] }
    }
}

impl Waits {
    /// Adds all times of `other`.
    pub fn join(&mut self, other: &Waits) {
        self.count += other.count;
        self.total_ns += other.total_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
        self.histogram.iter_mut().zip(&other.histogram).for_each(|(sum, n)| *sum += n);
    }

    /// Counts one more time.
    pub(crate) fn record(&mut self, ns: u64) {
        self.count += 1;
        self.total_ns += ns;
        self.max_ns = self.max_ns.max(ns);
        self.histogram[bucket(ns)] += 1;
    }

    /// The shortest time, in nanoseconds, that a share `q` (0 to 1) of the times did not exceed.
    /// The result is at most 7 % too high, and 0 if no time was counted.
    pub fn quantile(&self, q: f64) -> u64 {
        let rank = (q.clamp(0.0, 1.0) * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (b, n) in self.histogram.iter().enumerate() {
            seen += n;
            if seen >= rank && *n > 0 {
                return longest(b).min(self.max_ns);
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
        assert!((500_000..535_000).contains(&waits.quantile(0.5)), "{}", waits.quantile(0.5));
        assert_eq!(waits.quantile(1.0), 1_000_000);
        let mut again = Waits::default();
        counters.take_into(&mut again);
        assert_eq!(again, Waits::default(), "taking starts from zero");
    }

    #[test]
    fn buckets_are_narrow_and_without_gaps() {
        for at in 0..BUCKETS - 1 {
            assert_eq!((bucket(longest(at)), bucket(longest(at) + 1)), (at, at + 1));
        }
        for ns in [0, 1, 15, 16, 17, 31, 32, 1000, 123_456, 1 << 39] {
            assert!(
                (ns..=ns + ns / 15).contains(&longest(bucket(ns))),
                "{ns}: {}",
                longest(bucket(ns))
            );
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn times_are_joined() {
        let mut all = Waits::default();
        for times in [[10, 20], [5, 4000]] {
            let mut some = Waits::default();
            times.into_iter().for_each(|ns| some.record(ns));
            all.join(&some);
        }
        assert_eq!((all.count, all.total_ns, all.max_ns), (4, 4035, 4000));
        assert_eq!((all.quantile(0.25), all.quantile(1.0)), (5, 4000));
    }

    #[test]
    fn no_wait_at_all_is_zero() {
        assert_eq!(Waits::default().quantile(0.99), 0);
    }
}
