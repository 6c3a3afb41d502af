//! The base line for leaps: one thread copies the same bytes.
//!
//! The C library's memcpy is not always the fastest copy, its step size changes the time by up to a
//! third, and the fastest method differs between machines. So each run times all [`METHODS`], and
//! the base line is the method with the lowest median over all runs. A leap is compared with the
//! copy by that method in its own run.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pageleap::{BASE_PAGE, CopyLoop, CopyMethod, Pool, Region};

use crate::Error;
use crate::method;
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

/// The times of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Wall-clock time.
    pub ns: u64,
    /// CPU time of the copying thread; `None` if the kernel does not say.
    pub cpu_ns: Option<u64>,
}

/// The copies of one run, one for each of [`METHODS`].
pub type Copies = [Copy; METHODS.len()];

/// The method that is the base line.
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

    /// The copy of a run with which leaps of that run are compared.
    pub fn copy_in(self, run: &Copies) -> Copy {
        run[self.0]
    }
}

/// Memory for copies. Frames of a pool are given back to it on drop.
pub struct Target<'a> {
    from: &'a [AtomicU64],
    /// The parts that are copied. In the copy they follow each other without gaps.
    parts: Vec<Range<usize>>,
    copy: Held,
}

/// The memory of a target.
enum Held {
    Region(Region),
    Private(PrivateMemory),
}

impl<'a> Target<'a> {
    /// Takes as much memory from `pool` as `region` has, and touches all of it, so that copies meet
    /// no page faults.
    ///
    /// # Errors
    /// If the pool has too few free frames.
    pub fn new(region: &'a Region, pool: &Pool) -> Result<Target<'a>, Error> {
        Target::of_parts(region, std::iter::once(0..region.len()).collect(), pool)
    }

    /// The same for parts of `region`, each of which is copied by a call of its own.
    ///
    /// # Errors
    /// If the pool has too few free frames, or a part lies outside of the region.
    pub fn of_parts(
        region: &'a Region,
        parts: Vec<Range<usize>>,
        pool: &Pool,
    ) -> Result<Target<'a>, Error> {
        parts.iter().try_for_each(|part| region.atomics_u64(part.clone()).map(drop))?;
        let copy = Region::new(pool, parts.iter().map(Range::len).sum())?;
        let words = copy.atomics_u64(0..copy.len())?;
        for word in words.iter().step_by(BASE_PAGE / size_of::<u64>()) {
            word.store(0, Ordering::Relaxed);
        }
        let from = region.atomics_u64(0..region.len())?;
        Ok(Target { from, parts, copy: Held::Region(copy) })
    }

    /// Takes `copy` for copies of `from`.
    ///
    /// # Panics
    /// If `copy` is smaller.
    pub fn private(from: &'a [AtomicU64], copy: PrivateMemory) -> Target<'a> {
        assert!(copy.words().len() >= from.len(), "the target of a memcpy is too small");
        let parts = std::iter::once(0..size_of_val(from)).collect();
        Target { from, parts, copy: Held::Private(copy) }
    }

    /// Copies all of it. Other threads may write to the source meanwhile.
    pub fn copy(&self, method: CopyMethod) -> Copy {
        let to = match &self.copy {
            Held::Region(region) => region.as_ptr().as_ptr(),
            Held::Private(memory) => memory.as_ptr(),
        };
        let (mut to, from) = (to.addr(), self.from.as_ptr().addr());
        // Reading a thread's CPU time takes a system call, which would show in the time of a
        // one-page copy.
        let (cpu_start, start) = (cpu_ns(), Instant::now());
        for part in &self.parts {
            // SAFETY: the part lies in the source, and the copy has room for all parts. They do not
            // overlap; no other thread knows the copy, and nobody reads its contents.
            unsafe { pageleap_sys::copy_racing(to, from + part.start, part.len(), method) };
            to += part.len();
        }
        let ns = start.elapsed().as_nanos() as u64;
        Copy { ns, cpu_ns: cpu_start.zip(cpu_ns()).map(|(from, to)| to - from) }
    }

    /// Copies once by each of [`METHODS`], in the order of the run ([`method::order`]). Returns
    /// `None` if `stopped` is true before one of these copies.
    pub fn copy_by_all_methods(&self, run: usize, stopped: &dyn Fn() -> bool) -> Option<Copies> {
        // A warm-up: the first copy finds other data in the caches.
        self.copy(METHODS[0]);
        let mut copies = [Copy { ns: 0, cpu_ns: None }; METHODS.len()];
        for at in method::order(0, run, METHODS.len()) {
            if stopped() {
                return None;
            }
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
    fn parts_are_copied_one_behind_the_other() {
        let topology = pageleap::topology::Topology::read().unwrap();
        let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        let pool = Pool::builder(node, 8 * BASE_PAGE as u64).build().unwrap();
        let region = Region::new(&pool, 5 * BASE_PAGE).unwrap();
        let words = region.atomics_u64(0..region.len()).unwrap();
        words.iter().zip(1..).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        let parts = vec![BASE_PAGE..2 * BASE_PAGE, 3 * BASE_PAGE..5 * BASE_PAGE];
        let target = Target::of_parts(&region, parts, &pool).unwrap();
        let Held::Region(copy) = &target.copy else { panic!("it is of the pool") };
        for method in METHODS {
            let copied = copy.atomics_u64(0..copy.len()).unwrap();
            copied.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            target.copy(method);
            let page = BASE_PAGE / size_of::<u64>();
            let expected = words[page..2 * page].iter().chain(&words[3 * page..]);
            let value = |word: &AtomicU64| word.load(Ordering::Relaxed);
            assert!(copied.iter().map(value).eq(expected.map(value)), "{method}");
        }
        let outside = std::iter::once(0..6 * BASE_PAGE).collect();
        assert!(Target::of_parts(&region, outside, &pool).is_err());
    }

    #[test]
    fn what_leaps_may_copy_by_is_in_the_base_line() {
        assert!(pageleap::COPY_METHODS.iter().all(|method| METHODS.contains(method)));
        let others = |at: usize| METHODS.iter().skip(at + 1);
        assert!((0..METHODS.len()).all(|at| others(at).all(|other| *other != METHODS[at])));
    }
}
