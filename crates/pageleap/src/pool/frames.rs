//! The free frames of a pool. Pure bookkeeping: no system calls, no locks.
//!
//! Frames are handed out in runs, contiguous if possible and always in ascending order. If
//! neighbouring pages of a region have neighbouring frames, they share one mapping. Scattered
//! frames would need a mapping each, and `vm.max_map_count` limits mappings.

use std::collections::BTreeMap;

/// Base pages that one page-table page maps.
const PAGES_PER_TABLE: u64 = 512;

/// Consecutive frames of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    /// The index of the first frame.
    pub(crate) first: u64,
    /// The number of frames.
    pub(crate) frames: u64,
}

impl Run {
    /// The run in pieces of `frames` frames; 0 counts as 1.
    pub(crate) fn pieces(self, frames: usize) -> impl Iterator<Item = Run> {
        let frames = frames.max(1);
        let piece = move |first| Run { first, frames: (frames as u64).min(self.end() - first) };
        (self.first..self.end()).step_by(frames).map(piece)
    }

    pub(crate) fn end(self) -> u64 {
        self.first + self.frames
    }
}

/// The free frames of a pool as disjoint, never adjacent runs.
#[derive(Debug)]
pub(crate) struct FrameAllocator {
    total: u64,
    free: BTreeMap<u64, u64>,
    free_frames: u64,
}

impl FrameAllocator {
    pub(crate) fn new(total: u64) -> Self {
        let free = if total > 0 { BTreeMap::from([(0, total)]) } else { BTreeMap::new() };
        FrameAllocator { total, free, free_frames: total }
    }

    pub(crate) fn free_frames(&self) -> u64 {
        self.free_frames
    }

    /// Takes `frames` frames: from the smallest run that holds them all, else from the largest
    /// runs, in ascending order. `None`, and nothing taken, if there are not enough.
    ///
    /// If they fill a page-table page, the first one has, where possible, the same place within its
    /// page-table page as `beside` within its own. Then whole page-table pages can move between the
    /// two.
    pub(crate) fn take(&mut self, frames: u64, beside: u64) -> Option<Vec<Run>> {
        if frames > self.free_frames {
            return None;
        }
        if frames == 0 {
            return Some(Vec::new());
        }
        let mut runs: Vec<Run> =
            self.free.iter().map(|(&first, &frames)| Run { first, frames }).collect();
        let skip = |run: &Run| {
            let table = PAGES_PER_TABLE;
            if frames >= table { (beside % table + table - run.first % table) % table } else { 0 }
        };
        let aligned = runs
            .iter()
            .filter(|r| r.frames >= skip(r) + frames)
            .min_by_key(|r| (r.frames, r.first));
        let whole = runs.iter().filter(|r| r.frames >= frames).min_by_key(|r| (r.frames, r.first));
        let mut taken = Vec::new();
        if let Some(run) = aligned {
            taken.push(Run { first: run.first + skip(run), frames });
        } else if let Some(run) = whole {
            taken.push(Run { first: run.first, frames });
        } else {
            runs.sort_by_key(|r| (std::cmp::Reverse(r.frames), r.first));
            let mut missing = frames;
            for run in runs {
                let frames = run.frames.min(missing);
                taken.push(Run { first: run.first, frames });
                missing -= frames;
                if missing == 0 {
                    break;
                }
            }
            taken.sort();
        }
        taken.iter().for_each(|run| self.remove(*run));
        Some(taken)
    }

    /// Takes `run` out of the free run that contains it.
    fn remove(&mut self, run: Run) {
        let (&first, &frames) =
            self.free.range(..=run.first).next_back().expect("part of a free run");
        let whole = Run { first, frames };
        assert!(run.end() <= whole.end(), "{run:?} is not all free");
        self.free.remove(&first);
        let before = Run { first, frames: run.first - first };
        let after = Run { first: run.end(), frames: whole.end() - run.end() };
        for rest in [before, after].into_iter().filter(|r| r.frames > 0) {
            self.free.insert(rest.first, rest.frames);
        }
        self.free_frames -= run.frames;
    }

    /// Takes frames back. Panics if one of them is free already or does not exist: two owners would
    /// write into the same frame, and the damage would show elsewhere and later.
    pub(crate) fn give_back(&mut self, run: Run) {
        if run.frames == 0 {
            return;
        }
        assert!(run.end() <= self.total, "frames {run:?} are not of this pool");
        let before =
            self.free.range(..=run.first).next_back().map(|(&f, &n)| Run { first: f, frames: n });
        let after = self.free.range(run.first..).next().map(|(&f, &n)| Run { first: f, frames: n });
        assert!(
            before.is_none_or(|b| b.end() <= run.first),
            "frames {run:?} given back twice ({before:?})"
        );
        assert!(
            after.is_none_or(|a| run.end() <= a.first),
            "frames {run:?} given back twice ({after:?})"
        );
        let mut merged = run;
        if let Some(b) = before.filter(|b| b.end() == run.first) {
            self.free.remove(&b.first);
            merged = Run { first: b.first, frames: b.frames + merged.frames };
        }
        if let Some(a) = after.filter(|a| run.end() == a.first) {
            self.free.remove(&a.first);
            merged.frames += a.frames;
        }
        self.free.insert(merged.first, merged.frames);
        self.free_frames += run.frames;
    }

    /// Whether frame `index` is free.
    pub(crate) fn is_free(&self, index: u64) -> bool {
        self.free.range(..=index).next_back().is_some_and(|(first, len)| index < first + len)
    }
}

/// One bit per frame.
#[derive(Debug)]
pub(crate) struct FrameSet(Vec<u64>);

impl FrameSet {
    pub(crate) fn new(total: u64) -> Self {
        FrameSet(vec![0; total.div_ceil(64) as usize])
    }

    pub(crate) fn contains(&self, frame: u64) -> bool {
        self.0[frame as usize / 64] & 1 << (frame % 64) != 0
    }

    pub(crate) fn set(&mut self, run: Run, value: bool) {
        for frame in run.first..run.end() {
            let (word, bit) = (&mut self.0[frame as usize / 64], 1 << (frame % 64));
            if value { *word |= bit } else { *word &= !bit }
        }
    }

    /// The parts of `run` whose bits are set, as runs.
    pub(crate) fn runs_in(&self, run: Run) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut frame = run.first;
        while frame < run.end() {
            if frame.is_multiple_of(64) && self.0[frame as usize / 64] == 0 {
                frame += 64;
                continue;
            }
            if self.contains(frame) {
                match runs.last_mut() {
                    Some(last) if last.end() == frame => last.frames += 1,
                    _ => runs.push(Run { first: frame, frames: 1 }),
                }
            }
            frame += 1;
        }
        runs
    }

    /// The parts of `run` whose bits are not set, as runs.
    pub(crate) fn runs_not_in(&self, run: Run) -> Vec<Run> {
        let mut first = run.first;
        let mut runs = Vec::new();
        for end in self.runs_in(run).into_iter().chain([Run { first: run.end(), frames: 0 }]) {
            if end.first > first {
                runs.push(Run { first, frames: end.first - first });
            }
            first = end.end();
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;
    use proptest::prelude::*;

    fn run(first: u64, frames: u64) -> Run {
        Run { first, frames }
    }

    #[test]
    fn a_fitting_run_is_taken_whole_and_the_smallest_is_preferred() {
        let mut a = FrameAllocator::new(100);
        assert_eq!(a.take(100, 0).unwrap(), [run(0, 100)]);
        a.give_back(run(10, 5));
        a.give_back(run(40, 20));
        assert_eq!(a.take(4, 0).unwrap(), [run(10, 4)]);
        assert_eq!(
            a.take(21, 0).unwrap(),
            [run(14, 1), run(40, 20)],
            "ascending when one run does not do"
        );
        assert_eq!(a.take(1, 0), None);
    }

    #[test]
    fn long_runs_begin_where_their_pages_begin_in_a_page_table() {
        let mut a = FrameAllocator::new(4000);
        assert_eq!(a.take(512, 5 * 512 + 7).unwrap(), [run(7, 512)]);
        assert_eq!(a.take(3, 9).unwrap(), [run(0, 3)], "short ones do not care");
        assert_eq!(a.take(3400, 0).unwrap(), [run(519, 3400)], "any place is better than two runs");
    }

    #[test]
    fn runs_of_a_set_and_those_between_them() {
        let mut set = FrameSet::new(500);
        for part in [run(0, 3), run(64, 1), run(120, 20), run(320, 64), run(499, 1)] {
            set.set(part, true);
        }
        assert_eq!(set.runs_in(run(1, 129)), [run(1, 2), run(64, 1), run(120, 10)]);
        assert_eq!(set.runs_not_in(run(1, 129)), [run(3, 61), run(65, 55)]);
        assert_eq!(set.runs_in(run(140, 360)), [run(320, 64), run(499, 1)]);
        assert_eq!(set.runs_not_in(run(140, 360)), [run(140, 180), run(384, 115)]);
        assert_eq!(
            (set.runs_in(run(200, 70)), set.runs_not_in(run(200, 70))),
            (vec![], vec![run(200, 70)])
        );
        assert_eq!(set.runs_not_in(run(320, 64)), []);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_caught() {
        let mut a = FrameAllocator::new(8);
        a.take(8, 0).unwrap();
        a.give_back(run(2, 3));
        a.give_back(run(4, 1));
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Against a plain vector of booleans: no frame has two owners, none is lost, runs are
        /// merged.
        #[test]
        fn agrees_with_a_vector_of_booleans(steps in prop::collection::vec((0u64..40, any::<prop::sample::Index>()), 1..60)) {
            let mut a = FrameAllocator::new(64);
            let mut owned: Vec<Run> = Vec::new();
            let mut free = [true; 64];
            for (want, pick) in steps {
                if want % 3 == 0 && !owned.is_empty() {
                    let run = owned.swap_remove(pick.index(owned.len()));
                    a.give_back(run);
                    free[run.first as usize..run.end() as usize].fill(true);
                } else {
                    let count = free.iter().filter(|f| **f).count() as u64;
                    let taken = a.take(want, 0);
                    prop_assert_eq!(taken.is_some(), want <= count);
                    for run in taken.unwrap_or_default() {
                        for f in run.first..run.end() {
                            prop_assert!(std::mem::replace(&mut free[f as usize], false), "frame {} had an owner", f);
                        }
                        owned.push(run);
                    }
                }
                for f in 0..64 {
                    prop_assert_eq!(a.is_free(f), free[f as usize]);
                }
                prop_assert_eq!(a.free_frames(), free.iter().filter(|f| **f).count() as u64);
                let runs: Vec<_> = a.free.iter().collect();
                prop_assert!(runs.windows(2).all(|w| w[0].0 + w[0].1 < *w[1].0), "adjacent runs are merged: {:?}", runs);
            }
        }
    }
}
