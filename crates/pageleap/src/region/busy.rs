//! The bytes of a region that a job or a call is changing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::RegionInner;
use crate::sync::lock;

/// Disjoint byte ranges.
#[derive(Debug, Default)]
pub(crate) struct BusyRanges(BTreeMap<usize, usize>);

impl BusyRanges {
    /// Adds a range, unless it overlaps another, and returns whether it was added.
    pub(crate) fn insert(&mut self, range: Range<usize>) -> bool {
        let overlaps =
            self.0.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start);
        if !overlaps {
            self.0.insert(range.start, range.end);
        }
        !overlaps
    }

    fn remove(&mut self, start: usize) {
        self.0.remove(&start);
    }
}

/// A byte range that is busy until the claim is dropped. A claim keeps the region mapped.
pub(crate) struct Claim {
    region: Arc<RegionInner>,
    range: Range<usize>,
}

impl Claim {
    /// For a range that has just been inserted.
    pub(super) fn new(region: Arc<RegionInner>, range: Range<usize>) -> Self {
        Claim { region, range }
    }

    pub(crate) fn region(&self) -> &Arc<RegionInner> {
        &self.region
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(self.region.busy()).remove(self.range.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let mut busy = BusyRanges::default();
        assert!(busy.insert(4..8));
        for range in [4..8, 0..5, 7..9, 5..6, 0..100] {
            assert!(!busy.insert(range.clone()), "{range:?}");
        }
        assert!(busy.insert(0..4) && busy.insert(8..9));
        busy.remove(4);
        assert!(busy.insert(5..7));
    }
}
