//! Decides how many pages one call moves. Pure: no system calls, no locks, no clocks.
//!
//! Each moving call has a fixed cost: on all CPUs it drains the lists of pages that are about to be
//! put on LRU lists (`lru_cache_disable`). That asks for large calls. But threads that touch pages
//! of a batch wait for its copy, which asks for small ones. So a call is only as large as the fixed
//! cost asks for, and never longer than the caller allows. Origin of the first sizes: the best
//! batches of move_pages2 have 128 pages on two sockets and 256 on chiplets (section 5 of its
//! paper), where the kernel takes 512 together.

use std::time::Duration;

/// Pages of the first call.
const FIRST: f64 = 128.0;
/// The fewest pages of a call, however slow calls are.
const LEAST: f64 = 16.0;
/// The most pages of a call, however cheap calls are: 64 MB.
const MOST: f64 = 16_384.0;
/// The fixed cost may take this share of a call, if the bound leaves room for such large calls.
const FIXED_SHARE: f64 = 0.05;
/// Calls aim at this share of the bound, because the speed of hosts varies.
const BOUND_SHARE: f64 = 0.5;
/// Weight that older calls keep when a new one is seen.
const KEEP: f64 = 0.9;
/// One of this many calls is half as large. With two sizes, the fixed cost and the cost of each
/// page can be told apart.
const PROBE_EVERY: u32 = 8;

/// Decides the size of calls from the times of earlier ones.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    set: Option<usize>,
    bound_ns: f64,
    now: f64,
    calls: u32,
    /// Decayed sums of 1, n, t, n*n, n*t.
    sums: [f64; 5],
}

impl Batch {
    /// With `set`, all calls have this many pages.
    pub(super) fn new(set: Option<usize>, bound: Duration) -> Batch {
        Batch { set, bound_ns: bound.as_nanos() as f64, now: FIRST, calls: 0, sums: [0.0; 5] }
    }

    /// How many base pages the next call should move. Never 0.
    pub(super) fn pages(&self) -> usize {
        let probe = self.calls % PROBE_EVERY == PROBE_EVERY - 1;
        self.set.unwrap_or(if probe { self.now / 2.0 } else { self.now } as usize).max(1)
    }

    /// Notes how long a call for this many base pages took.
    pub(super) fn observe(&mut self, pages: usize, took: Duration) {
        if pages == 0 {
            return;
        }
        let (n, t) = (pages as f64, took.as_nanos() as f64);
        let new = [1.0, n, t, n * n, n * t];
        self.sums.iter_mut().zip(new).for_each(|(sum, new)| *sum = *sum * KEEP + new);
        self.calls += 1;
        let (fixed, each) = self.costs();
        let most = (self.bound_ns * BOUND_SHARE - fixed).max(0.0) / each;
        let wanted = (fixed / each / FIXED_SHARE).max(FIRST).min(most);
        let mut next = wanted.min(self.now * 2.0);
        if t > self.bound_ns {
            next = next.min(n / 2.0);
        }
        self.now = next.clamp(LEAST, MOST);
    }

    /// The fixed cost of a call and the cost of each page, in nanoseconds: a least-squares line
    /// through the calls so far. If all calls were of one size, the fixed cost counts as 0.
    fn costs(&self) -> (f64, f64) {
        let [count, n, t, nn, nt] = self.sums;
        let spread = count * nn - n * n;
        let each = (count * nt - n * t) / spread;
        let known = spread > count * nn * 0.01 && each > 0.0;
        let (fixed, each) = if known { ((t - each * n) / count, each) } else { (0.0, t / n) };
        // A line with a negative cost is noise.
        if fixed < 0.0 { (0.0, t / n) } else { (fixed, each.max(1.0)) }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The sizes and durations of calls on a machine with these costs in microseconds.
    fn run(batch: &mut Batch, calls: u32, fixed_us: f64, page_us: f64) -> Vec<(usize, Duration)> {
        let call = |_| {
            let pages = batch.pages();
            let took = Duration::from_secs_f64((fixed_us + page_us * pages as f64) / 1e6);
            batch.observe(pages, took);
            (pages, took)
        };
        (0..calls).map(call).collect()
    }

    #[test]
    fn calls_are_as_large_as_their_fixed_cost_asks_for() {
        for (fixed_us, page_us) in [(50.0, 2.0), (500.0, 1.0), (5.0, 0.5), (1000.0, 3.0)] {
            let mut batch = Batch::new(None, 200 * MS);
            let seen = run(&mut batch, 60, fixed_us, page_us);
            let wanted = f64::max(fixed_us / page_us / FIXED_SHARE, FIRST).min(MOST);
            let (pages, _) = seen[seen.len() - 2];
            let ratio = pages as f64 / wanted;
            assert!((0.8..1.25).contains(&ratio), "{fixed_us} {page_us}: {pages} of {wanted}");
        }
    }

    #[test]
    fn no_call_takes_longer_than_the_bound_once_its_cost_is_known() {
        for (fixed_us, page_us) in [(0.0, 100.0), (2000.0, 20.0), (9000.0, 5.0), (100.0, 600.0)] {
            let mut batch = Batch::new(None, 20 * MS);
            let seen = run(&mut batch, 80, fixed_us, page_us);
            let late = seen[10..].iter().filter(|(_, took)| *took > 20 * MS).count();
            assert_eq!(late, 0, "{fixed_us} {page_us}: {seen:?}");
        }
        // A machine that becomes slow is noticed at once.
        let mut batch = Batch::new(None, 20 * MS);
        run(&mut batch, 40, 500.0, 1.0);
        let seen = run(&mut batch, 40, 500.0, 50.0);
        assert!(seen[10..].iter().all(|(_, took)| *took <= 20 * MS), "{seen:?}");
        let seen = run(&mut batch, 80, 500.0, 1.0);
        assert!(seen[78].0 > 4000, "{seen:?}");
    }

    #[test]
    fn a_size_that_is_set_stays() {
        let mut batch = Batch::new(Some(256), MS);
        assert!(run(&mut batch, 20, 1e6, 1e6).iter().all(|(pages, _)| *pages == 256));
    }
}
