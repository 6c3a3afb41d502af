//! A stretch of a mapping, and which of its pages are to lie where.

use std::ops::Range;

use super::mover::HUGE_PAGES;
use crate::placement::Layout;
use crate::sync::{AtomicU64, Ordering};
use crate::units::NodeId;

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
    pub(super) way: Way,
}

/// Which pages of a leg go to which node.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) layout: Layout,
    /// The nodes of the layout.
    pub(super) nodes: Vec<NodeId>,
    /// The page at which the layout begins.
    pub(super) origin: u64,
    /// The same in stripes of 2 MB, for pages that the kernel turns out to keep together. `None`
    /// where stripes are as large already.
    pub(super) blocks: Option<Layout>,
    /// From this page on, `blocks` holds.
    pub(super) blocks_from: AtomicU64,
    /// Pages before this one have been looked at, and may have been dealt with.
    pub(super) looked_to: AtomicU64,
}

impl Leg {
    /// Where parts of these pages are to lie.
    pub(super) fn parts(&self, pages: Range<u64>) -> Vec<(Range<u64>, NodeId)> {
        let way = &self.way;
        let from = way.blocks_from.load(Ordering::Relaxed).clamp(pages.start, pages.end);
        let mut parts = way.parts_by(&way.layout, pages.start..from);
        if let Some(blocks) = &way.blocks {
            parts.extend(way.parts_by(blocks, from..pages.end));
        }
        parts
    }

    /// Whether pages that the kernel keeps together may be wanted on several nodes, as far as is
    /// known.
    pub(super) fn may_part_folios(&self) -> bool {
        self.way.blocks.is_some() && self.way.blocks_from.load(Ordering::Relaxed) == u64::MAX
    }

    /// The first page that has not been looked at.
    pub(super) fn looked_to(&self) -> u64 {
        self.way.looked_to.load(Ordering::Relaxed)
    }

    /// Pages before this one have been looked at.
    pub(super) fn have_looked_to(&self, page: u64) {
        self.way.looked_to.fetch_max(page, Ordering::Relaxed);
    }

    /// From this page on, pages go by 2 MB.
    pub(super) fn go_by_blocks_from(&self, page: u64) {
        self.way.blocks_from.store(page, Ordering::Relaxed);
    }

    /// The first page of the stripe of 2 MB that a page belongs to.
    pub(super) fn block_start(&self, page: u64) -> u64 {
        page - page.wrapping_sub(self.way.origin) % HUGE_PAGES
    }
}

impl Way {
    fn parts_by(&self, layout: &Layout, pages: Range<u64>) -> Vec<(Range<u64>, NodeId)> {
        if pages.is_empty() {
            return Vec::new();
        }
        let shift = |page: u64| page.wrapping_sub(self.origin);
        let back = |page: u64| page.wrapping_add(self.origin);
        let part = |(part, node): (Range<u64>, usize)| {
            (back(part.start)..back(part.end), self.nodes[node])
        };
        layout.parts(shift(pages.start)..shift(pages.end)).into_iter().map(part).collect()
    }
}
