//! A leg: a part of a mapping, and the destination of each of its pages.

use std::ops::Range;

use super::HUGE;
use crate::placement::Layout;
use crate::units::{BASE_PAGE, NodeId};

/// Base pages of a transparent huge page.
pub(super) const HUGE_PAGES: u64 = (HUGE / BASE_PAGE) as u64;

/// A part of a mapping.
#[derive(Debug)]
pub(super) struct Leg {
    /// The index of the job's range that it belongs to.
    pub(super) item: usize,
    /// The index of its process.
    pub(super) process: usize,
    /// Its pages: addresses divided by 4096.
    pub(super) pages: Range<u64>,
    /// Base pages in one page of the mapping.
    pub(super) unit: u64,
    /// Whether it may have transparent huge pages.
    pub(super) maybe_huge: bool,
    pub(super) is_hugetlb: bool,
    /// Whether the process may not access it (`PROT_NONE`).
    pub(super) has_no_access: bool,
    /// Whether no file backs it, so that its pages are the process' own.
    pub(super) is_own: bool,
    /// Whether it may have folios of several pages that smaps does not show.
    pub(super) may_have_folios: bool,
    /// Maps each page to an index into `nodes`.
    pub(super) layout: Layout,
    /// The nodes of the layout.
    pub(super) nodes: Vec<NodeId>,
    /// The page at which the layout begins.
    pub(super) origin: u64,
}

impl Leg {
    /// The destination of a page.
    pub(super) fn node_of(&self, page: u64) -> NodeId {
        self.nodes[self.layout.node_of(page.wrapping_sub(self.origin))]
    }

    /// Splits pages into runs with one destination.
    pub(super) fn parts(&self, pages: Range<u64>) -> Vec<(Range<u64>, NodeId)> {
        let shift = |page: u64| page.wrapping_sub(self.origin);
        let back = |page: u64| page.wrapping_add(self.origin);
        let part = |(part, node): (Range<u64>, usize)| {
            (back(part.start)..back(part.end), self.nodes[node])
        };
        let parts = self.layout.parts(shift(pages.start)..shift(pages.end));
        parts.into_iter().map(part).collect()
    }
}
