//! The base line that leaps are compared with: one thread copies the same bytes with the C
//! library's memcpy.
//!
//! The size of the steps changes the time by up to a third, and which size is fastest differs from
//! machine to machine. So each run times every size of [`STEPS`], and the base line is the size
//! whose median over all runs is the lowest. A leap is compared with the copy of its own run in
//! steps of that size.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pageleap::{BASE_PAGE, Pool, Region};

use crate::Error;
use crate::statistics::median;

/// Bytes that one call of memcpy copies.
pub const STEPS: [usize; 5] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

/// What one copy took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// By the clock on the wall.
    pub ns: u64,
    /// CPU time of the copying thread; `None` if the kernel does not say.
    pub cpu_ns: Option<u64>,
}

/// The copies of one run, one for each of [`STEPS`].
pub type Copies = [Copy; STEPS.len()];

/// Which step size is the base line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseLine(usize);

impl BaseLine {
    /// The step size with the lowest median; `None` without runs.
    pub fn of(runs: &[Copies]) -> Option<BaseLine> {
        let median_ns = |step: usize| {
            median(&runs.iter().map(|copies| copies[step].ns as f64).collect::<Vec<_>>())
        };
        let fastest = (0..STEPS.len())
            .filter_map(|step| Some((step, median_ns(step)?)))
            .min_by(|(_, one), (_, other)| one.total_cmp(other))?;
        Some(BaseLine(fastest.0))
    }

    /// Bytes of a step.
    pub fn step_bytes(self) -> usize {
        STEPS[self.0]
    }

    /// The copy of a run that leaps of that run are compared with.
    pub fn copy_in(self, run: &Copies) -> Copy {
        run[self.0]
    }
}

/// Memory of a pool that copies go to. Gives its frames back to the pool on drop.
pub struct Target<'a> {
    region: &'a Region,
    copy: Region,
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
        Ok(Target { region, copy })
    }

    /// Copies the whole region in steps of `step` bytes. Other threads may write to the region
    /// meanwhile.
    pub fn copy(&self, step: usize) -> Copy {
        let (start, cpu_start) = (Instant::now(), cpu_ns());
        // SAFETY: both regions have this many bytes and do not overlap; no other thread knows the
        // copy, and nobody looks at its contents.
        unsafe { copy_in_steps(self.copy.as_ptr(), self.region.as_ptr(), self.region.len(), step) };
        let ns = start.elapsed().as_nanos() as u64;
        Copy { ns, cpu_ns: cpu_start.zip(cpu_ns()).map(|(from, to)| to - from) }
    }

    /// Copies once in each of [`STEPS`], starting with another size in each run; `None` as soon as
    /// `stopped` says so.
    pub fn copy_in_all_steps(&self, run: usize, stopped: &dyn Fn() -> bool) -> Option<Copies> {
        // The first copy finds the caches as something else has left them.
        self.copy(STEPS[0]);
        let mut copies = [Copy { ns: 0, cpu_ns: None }; STEPS.len()];
        for turn in 0..STEPS.len() {
            if stopped() {
                return None;
            }
            let step = (run + turn) % STEPS.len();
            copies[step] = self.copy(STEPS[step]);
        }
        Some(copies)
    }
}

/// CPU time of the calling thread; `None` if the kernel does not say.
pub(crate) fn cpu_ns() -> Option<u64> {
    pageleap_sys::thread_cpu_time_ns().ok()
}

/// # Safety
/// Both ranges have `len` mapped bytes and do not overlap. No other thread uses `to`. If other
/// threads write to `from` meanwhile, the copy must not be looked at.
unsafe fn copy_in_steps(to: NonNull<u8>, from: NonNull<u8>, len: usize, step: usize) {
    for at in (0..len).step_by(step) {
        let bytes = step.min(len - at);
        // SAFETY: the caller's promise. The compiler does not look into the C library's function,
        // so that a race cannot mislead it.
        unsafe { libc::memcpy(to.as_ptr().add(at).cast(), from.as_ptr().add(at).cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(ns: [u64; STEPS.len()]) -> Copies {
        ns.map(|ns| Copy { ns, cpu_ns: Some(ns) })
    }

    #[test]
    fn the_base_line_is_the_step_size_with_the_lowest_median() {
        // The third size has the fastest copy of all, the second one the lowest median.
        let runs = [run([9, 5, 8, 9, 9]), run([9, 6, 1, 9, 9]), run([9, 5, 8, 9, 4])];
        let line = BaseLine::of(&runs).unwrap();
        assert_eq!(line.step_bytes(), 256 << 10);
        assert_eq!(line.copy_in(&runs[1]), Copy { ns: 6, cpu_ns: Some(6) });
        assert_eq!(BaseLine::of(&[]), None);
    }

    #[test]
    fn every_byte_is_copied_in_steps_of_any_size() {
        let from: Vec<u8> = (0..10_000u32).map(|at| at as u8).collect();
        for step in [1, 64, 4096, 9_999, 10_000, 1 << 20] {
            let mut to = vec![0u8; from.len()];
            let [target, source] = [to.as_mut_ptr(), from.as_ptr().cast_mut()];
            let [target, source] = [target, source].map(|at| NonNull::new(at).unwrap());
            // SAFETY: two vectors of that length, which no other thread knows.
            unsafe { copy_in_steps(target, source, from.len(), step) };
            assert_eq!(to, from, "{step}");
        }
    }
}
