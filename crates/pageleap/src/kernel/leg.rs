//! A stretch of a mapping, and which of its pages are to lie where.

use std::ops::Range;

use super::HUGE;
use crate::placement::Layout;
use crate::units::{BASE_PAGE, NodeId};

/// Base pages of a transparent huge page.
pub(super) const HUGE_PAGES: u64 = (HUGE / BASE_PAGE) as u64;

/// A stretch of a mapping.
#[derive(Debug)]
pub(super) struct Leg {
    /// The range of the job that it is of.
    pub(super) item: usize,
    /// Which process.
    pub(super) process: usize,
    /// Its pages: addresses divided by 4096.
    pub(super) pages: Range<u64>,
    /// Base pages of a page.
    pub(super) unit: u64,
    /// Whether it may have transparent huge pages.
    pub(super) maybe_huge: bool,
    pub(super) is_hugetlb: bool,
    /// Whether the process may not access it (`PROT_NONE`).
    pub(super) has_no_access: bool,
    /// Whether its pages are the process' own, of no file.
    pub(super) is_own: bool,
    /// Whether it may have folios of several pages that smaps does not show.
    pub(super) may_have_folios: bool,
    /// Which page goes to which node.
    pub(super) layout: Layout,
    /// The nodes of the layout.
    pub(super) nodes: Vec<NodeId>,
    /// The page at which the layout begins.
    pub(super) origin: u64,
}

impl Leg {
    /// Where a page is to lie.
    pub(super) fn node_of(&self, page: u64) -> NodeId {
        self.nodes[self.layout.node_of(page.wrapping_sub(self.origin))]
    }

    /// Where parts of these pages are to lie.
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
