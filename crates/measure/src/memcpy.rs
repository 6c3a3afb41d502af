//! The base line that leaps are compared with: one thread copies the same bytes.
//!
//! The C library's memcpy is not always the fastest copy, and the size of its steps changes the
//! time by up to a third. Which method is fastest differs from machine to machine. So each run
//! times all [`METHODS`], and the base line is the method whose median over all runs is the lowest.
//! A leap is compared with the copy of its own run by that method.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pageleap::{BASE_PAGE, CopyLoop, CopyMethod, Pool, Region};

use crate::Error;
use crate::private::PrivateMemory;
use crate::statistics::median;

/// The C library's memcpy in steps of 64 KiB to 16 MiB, and all other methods by which a leap may
/// copy ([`pageleap::COPY_METHODS`]).
pub const METHODS: [CopyMethod; 6] = [
    memcpy(64 << 10),
    memcpy(256 << 10),
    memcpy(1 << 20),
    memcpy(4 << 20),
    memcpy(16 << 20),
    pageleap::COPY_METHODS[0],
];

const fn memcpy(step_bytes: usize) -> CopyMethod {
    CopyMethod { by: CopyLoop::Memcpy, step_bytes }
}

/// What one copy took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// By the clock on the wall.
    pub ns: u64,
    /// CPU time of the copying thread; `None` if the kernel does not say.
    pub cpu_ns: Option<u64>,
}

/// The copies of one run, one for each of [`METHODS`].
pub type Copies = [Copy; METHODS.len()];

/// Which method is the base line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseLine(usize);

impl BaseLine {
    /// The method with the lowest median; `None` without runs.
    pub fn of(runs: &[Copies]) -> Option<BaseLine> {
        let median_ns =
            |at: usize| median(&runs.iter().map(|copies| copies[at].ns as f64).collect::<Vec<_>>());
        let fastest = (0..METHODS.len())
            .filter_map(|at| Some((at, median_ns(at)?)))
            .min_by(|(_, one), (_, other)| one.total_cmp(other))?;
        Some(BaseLine(fastest.0))
    }

    /// The method.
    pub fn method(self) -> CopyMethod {
        METHODS[self.0]
    }

    /// The copy of a run that leaps of that run are compared with.
    pub fn copy_in(self, run: &Copies) -> Copy {
        run[self.0]
    }
}

/// Memory that copies go to. If a pool has it, its frames are given back to the pool on drop.
pub struct Target<'a> {
    from: &'a [AtomicU64],
    copy: Held,
}

/// What a target holds.
enum Held {
    Region(Region),
    Private(PrivateMemory),
}

impl<'a> Target<'a> {
    /// Takes as much memory from `pool` as `region` has, and touches all of it, so that no copy
    /// meets page faults.
    ///
    /// # Errors
    /// If the pool has too few free frames.
    pub fn new(region: &'a Region, pool: &Pool) -> Result<Target<'a>, Error> {
        let copy = Region::new(pool, region.len())?;
        let words = copy.atomics_u64(0..copy.len())?;
        for word in words.iter().step_by(BASE_PAGE / size_of::<u64>()) {
            word.store(0, Ordering::Relaxed);
        }
        Ok(Target { from: region.atomics_u64(0..region.len())?, copy: Held::Region(copy) })
    }

    /// Takes `copy` for copies of `from`.
    ///
    /// # Panics
    /// If `copy` is smaller.
    pub fn private(from: &'a [AtomicU64], copy: PrivateMemory) -> Target<'a> {
        assert!(copy.words().len() >= from.len(), "the target of a memcpy is too small");
        Target { from, copy: Held::Private(copy) }
    }

    /// Copies all of it. Other threads may write to what is copied meanwhile.
    pub fn copy(&self, method: CopyMethod) -> Copy {
        let to = match &self.copy {
            Held::Region(region) => region.as_ptr().as_ptr(),
            Held::Private(memory) => memory.as_ptr(),
        };
        let (to, from) = (to.addr(), self.from.as_ptr().addr());
        let (start, cpu_start) = (Instant::now(), cpu_ns());
        // SAFETY: both have this many bytes and do not overlap; no other thread knows the copy, and
        // nobody looks at its contents.
        unsafe { pageleap_sys::copy_racing(to, from, size_of_val(self.from), method) };
        let ns = start.elapsed().as_nanos() as u64;
        Copy { ns, cpu_ns: cpu_start.zip(cpu_ns()).map(|(from, to)| to - from) }
    }

    /// Copies once by each of [`METHODS`], starting with another one in each run; `None` as soon as
    /// `stopped` says so.
    pub fn copy_by_all_methods(&self, run: usize, stopped: &dyn Fn() -> bool) -> Option<Copies> {
        // The first copy finds the caches as something else has left them.
        self.copy(METHODS[0]);
        let mut copies = [Copy { ns: 0, cpu_ns: None }; METHODS.len()];
        for turn in 0..METHODS.len() {
            if stopped() {
                return None;
            }
            let at = (run + turn) % METHODS.len();
            copies[at] = self.copy(METHODS[at]);
        }
        Some(copies)
    }
}

/// CPU time of the calling thread; `None` if the kernel does not say.
pub(crate) fn cpu_ns() -> Option<u64> {
    pageleap_sys::thread_cpu_time_ns().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(ns: [u64; METHODS.len()]) -> Copies {
        ns.map(|ns| Copy { ns, cpu_ns: Some(ns) })
    }

    #[test]
    fn the_base_line_is_the_method_with_the_lowest_median() {
        // The third method has the fastest copy of all, the second one the lowest median.
        let runs = [run([9, 5, 8, 9, 9, 9]), run([9, 6, 1, 9, 9, 9]), run([9, 5, 8, 9, 4, 9])];
        let line = BaseLine::of(&runs).unwrap();
        assert_eq!(line.method(), memcpy(256 << 10));
        assert_eq!(line.copy_in(&runs[1]), Copy { ns: 6, cpu_ns: Some(6) });
        assert_eq!(BaseLine::of(&[]), None);
    }

    #[test]
    fn what_leaps_may_copy_by_is_in_the_base_line() {
        assert!(pageleap::COPY_METHODS.iter().all(|method| METHODS.contains(method)));
        let others = |at: usize| METHODS.iter().skip(at + 1);
        assert!((0..METHODS.len()).all(|at| others(at).all(|other| *other != METHODS[at])));
    }
}
