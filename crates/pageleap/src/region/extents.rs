//! The frames that back the pages of a region. Pure bookkeeping.
//!
//! An extent is a run of consecutive pages backed by consecutive frames of one share. Neighbours
//! that continue each other are one extent; pages in no extent are unbacked.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::pool::Run;

/// Consecutive pages over consecutive frames of the share `P`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent<P> {
    /// Pages, counted from the start of the region.
    pub(crate) pages: Range<u64>,
    pub(crate) share: P,
    /// The frame behind the first page.
    pub(crate) first_frame: u64,
}

impl<P> Extent<P> {
    /// The frames behind its pages.
    pub(crate) fn frames(&self) -> Run {
        Run { first: self.first_frame, frames: self.pages.end - self.pages.start }
    }
}

impl<P: Clone + PartialEq> Extent<P> {
    fn clip(&self, pages: &Range<u64>) -> Extent<P> {
        let start = self.pages.start.max(pages.start);
        let end = self.pages.end.min(pages.end);
        Extent {
            pages: start..end,
            share: self.share.clone(),
            first_frame: self.first_frame + (start - self.pages.start),
        }
    }

    fn continues(&self, before: &Extent<P>) -> bool {
        before.pages.end == self.pages.start
            && before.share == self.share
            && before.frames().end() == self.first_frame
    }
}

/// The page table of a region, as the library keeps it.
#[derive(Debug)]
pub(crate) struct ExtentMap<P> {
    by_start: BTreeMap<u64, Extent<P>>,
}

impl<P: Clone + PartialEq> ExtentMap<P> {
    pub(crate) fn new() -> Self {
        ExtentMap { by_start: BTreeMap::new() }
    }

    /// The extents within `pages`, cut to it, in order.
    pub(crate) fn within(&self, pages: Range<u64>) -> impl Iterator<Item = Extent<P>> {
        let first = self
            .by_start
            .range(..=pages.start)
            .next_back()
            .map_or(pages.start, |(start, _)| *start);
        let clip = pages.clone();
        self.by_start
            .range(first.min(pages.end)..pages.end)
            .map(move |(_, extent)| extent.clip(&clip))
            .filter(|extent| !extent.pages.is_empty())
    }

    /// Whether every page of `pages` has a frame.
    pub(crate) fn backs_all(&self, pages: Range<u64>) -> bool {
        let backed: u64 = self.within(pages.clone()).map(|e| e.pages.end - e.pages.start).sum();
        backed == pages.end - pages.start
    }

    /// Removes `pages` and returns the extents that backed them.
    pub(crate) fn remove(&mut self, pages: Range<u64>) -> Vec<Extent<P>> {
        let removed: Vec<Extent<P>> = self.within(pages.clone()).collect();
        for extent in &removed {
            let (&start, _) =
                self.by_start.range(..=extent.pages.start).next_back().expect("it was found there");
            let whole = self.by_start.remove(&start).expect("it was found there");
            for rest in [whole.pages.start..extent.pages.start, extent.pages.end..whole.pages.end] {
                if !rest.is_empty() {
                    self.by_start.insert(rest.start, whole.clip(&rest));
                }
            }
        }
        removed
    }

    /// Backs the pages of `extent` by its frames, and returns the extents that backed them before.
    pub(crate) fn replace(&mut self, extent: Extent<P>) -> Vec<Extent<P>> {
        let replaced = self.remove(extent.pages.clone());
        let mut merged = extent;
        if let Some((&start, before)) = self.by_start.range(..merged.pages.start).next_back()
            && merged.continues(before)
        {
            merged.first_frame = before.first_frame;
            merged.pages.start = start;
            self.by_start.remove(&start);
        }
        if let Some(after) = self.by_start.get(&merged.pages.end)
            && after.continues(&merged)
        {
            let end = after.pages.end;
            self.by_start.remove(&merged.pages.end);
            merged.pages.end = end;
        }
        self.by_start.insert(merged.pages.start, merged);
        replaced
    }

    /// How many extents there are.
    pub(crate) fn len(&self) -> usize {
        self.by_start.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;
    use proptest::prelude::*;

    #[test]
    fn pieces_that_continue_each_other_become_one() {
        let mut map = ExtentMap::new();
        for (pages, first_frame) in [(4..8, 14), (0..4, 10), (8..9, 18)] {
            assert!(map.replace(Extent { pages, share: 1, first_frame }).is_empty());
        }
        assert_eq!(
            map.within(0..9).collect::<Vec<_>>(),
            [Extent { pages: 0..9, share: 1, first_frame: 10 }]
        );
        let replaced = map.replace(Extent { pages: 3..5, share: 2, first_frame: 0 });
        assert_eq!(replaced, [Extent { pages: 3..5, share: 1, first_frame: 13 }]);
        assert_eq!(map.len(), 3);
        assert!(map.backs_all(0..9) && !map.backs_all(0..10));
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Compares with one `Option` per page.
        #[test]
        fn agrees_with_a_page_array(steps in prop::collection::vec((0u64..32, 1u64..12, 0u8..3, 0u64..64, any::<bool>()), 1..40)) {
            let mut map = ExtentMap::new();
            let mut pages: Vec<Option<(u8, u64)>> = vec![None; 48];
            for (start, len, pool, frame, insert) in steps {
                let range = start..start + len;
                let slots = &mut pages[start as usize..(start + len) as usize];
                let before: Vec<(u8, u64)> = slots.iter().flatten().copied().collect();
                let removed = if insert {
                    slots.iter_mut().enumerate().for_each(|(i, p)| *p = Some((pool, frame + i as u64)));
                    map.replace(Extent { pages: range, share: pool, first_frame: frame })
                } else {
                    slots.fill(None);
                    map.remove(range)
                };
                let removed: Vec<(u8, u64)> =
                    removed.iter().flat_map(|e| (0..e.pages.end - e.pages.start).map(|i| (e.share, e.first_frame + i))).collect();
                prop_assert_eq!(removed, before);
                let mut seen: Vec<Option<(u8, u64)>> = vec![None; 48];
                for e in map.within(0..48) {
                    for (i, p) in (e.pages.start..e.pages.end).enumerate() {
                        seen[p as usize] = Some((e.share, e.first_frame + i as u64));
                    }
                }
                prop_assert_eq!(&seen, &pages);
                prop_assert!(map.within(0..48).collect::<Vec<_>>().windows(2).all(|w| !w[1].continues(&w[0])), "not merged");
            }
        }
    }
}
