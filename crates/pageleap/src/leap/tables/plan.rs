//! Decides which pages of page table of a range can move, and by which steps. No calls.
//!
//! A page of page table moves with all the entries in its reach, by calls that take one mapping each
//! ([`engine::tables`](crate::engine::tables)). So its reach must lie in one *stretch*: pages of the
//! region in consecutive frames and with equal attributes, which the kernel keeps as one mapping. In
//! this example of base pages, 10 of 13 MB have new pages of PTEs afterwards, and a reach is 2 MB:
//!
//! ```text
//!   MB           0   1   2   3   4   5   6   7   8   9  10  11  12  13
//!   stretches    [ first            ][ second                        ]
//!   legs         [ first         ]       [ second                ]
//!   left                         [  stay ]                       [ s ]
//! ```
//!
//! Base pages have two levels to move. Pages of PMDs come first, for whole GB of a stretch, and then
//! the pages of PTEs, area by area.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use crate::error::Error;
use crate::job::area::Reason;
use crate::job::plan;
use crate::observe::{AttributeRun, Attributes};
use crate::pool::Share;
use crate::region::{Extent, PageTableLevel, RegionInner};
use crate::sync::lock;
use crate::units::{NodeId, PageSize};

/// The highest level whose pages move. A page of the next one maps 512 GB, and few mappings have so
/// many consecutive frames.
pub(super) const HIGHEST: PageTableLevel = PageTableLevel::Pmd;

/// The bytes of an area of base pages. Taking their entries out and bringing them back takes some
/// 0.1 to 0.3 ms each, in which the kernel lets no other thread of the process change mappings.
const AREA_BYTES: usize = 16 << 20;

/// Pages of a region in consecutive frames and with equal attributes.
#[derive(Clone)]
pub(super) struct Stretch {
    pub(super) pages: Range<u64>,
    pub(super) share: Share,
    /// The frame of the first page.
    pub(super) first_frame: u64,
    pub(super) attributes: Attributes,
}

impl Stretch {
    /// A part of it.
    pub(super) fn part(&self, pages: &Range<u64>) -> Stretch {
        assert!(self.pages.start <= pages.start && pages.end <= self.pages.end, "{pages:?}");
        let first_frame = self.first_frame + (pages.start - self.pages.start);
        Stretch { pages: pages.clone(), first_frame, ..self.clone() }
    }
}

/// Pages whose page tables of one level move, area by area.
pub(super) struct Leg {
    pub(super) level: PageTableLevel,
    pub(super) stretch: Stretch,
    /// Whether the account knows of no page of page table there: nobody could read the pages when
    /// they were mapped, and later faults may have made some or not.
    pub(super) is_unknown: bool,
}

impl Leg {
    /// The pages of an area.
    pub(super) fn area_pages(&self, page: PageSize) -> u64 {
        (area_bytes(self.level) / page.bytes()) as u64
    }
}

/// The pages of an area of a region with pages of this size.
pub(super) fn area_pages(page: PageSize) -> u64 {
    (area_bytes(PageTableLevel::of(page)[0]) / page.bytes()) as u64
}

/// The bytes of an area in which pages of page table of a level move.
pub(super) fn area_bytes(level: PageTableLevel) -> usize {
    AREA_BYTES.max(level.reach_bytes())
}

/// A page of the second level over base pages that is to move before the pages of PTEs that it
/// points to.
pub(super) struct Upper {
    pub(super) stretch: Stretch,
    pub(super) is_tried: AtomicBool,
}

/// The page tables that move, and the pages whose page tables stay.
pub(super) struct Plan {
    pub(super) legs: Vec<Leg>,
    pub(super) uppers: Vec<Upper>,
    /// Pages that stay, and why.
    pub(super) left: Vec<(Range<u64>, Reason)>,
}

impl Plan {
    /// Plans the move of all page tables of some pages to a node. With `anew`, pages of page table
    /// that were asked for there are made anew.
    pub(super) fn new(
        region: &RegionInner,
        pages: Range<u64>,
        attributes: &[AttributeRun],
        to: NodeId,
        anew: bool,
    ) -> Plan {
        // Extents before the account, as everywhere.
        let extents: Vec<_> = lock(&region.extents).within(pages).collect();
        let account = &*lock(&region.tables);
        let pages_of = |part: &Range<usize>| {
            region.pages(&(part.start - region.start..part.end - region.start))
        };
        let joined = |parts: Vec<Range<usize>>, stretch: &Stretch| -> Vec<Stretch> {
            let parts = plan::joined(parts.iter().map(pages_of));
            parts.iter().map(|pages| stretch.part(pages)).collect()
        };
        let range_of =
            |stretch: &Stretch| region.addr(stretch.pages.start)..region.addr(stretch.pages.end);
        let to_move = |level: PageTableLevel, stretch: &Stretch| {
            let range = range_of(stretch);
            let asked = account.asked(level, &range);
            let parts = asked.filter(|(_, node)| anew || *node != Some(to));
            joined(parts.map(|(part, _)| part).collect(), stretch)
        };
        let unknown = |level: PageTableLevel, stretch: &Stretch| {
            let whole = whole(level, &range_of(stretch));
            let (mut at, mut parts) = (whole.start, Vec::new());
            let known = account.asked(level, &whole).map(|(part, _)| part);
            for part in known.chain(std::iter::once(whole.end..whole.end)) {
                parts.extend((at < part.start).then_some(at..part.start));
                at = part.end;
            }
            // Pages that nobody can read have no page tables, or some that nobody walks.
            parts.retain(|_| stretch.attributes.prot.readable());
            joined(parts, stretch)
        };
        let lowest = PageTableLevel::of(region.page)[0];
        let mut plan = Plan { legs: Vec::new(), uppers: Vec::new(), left: Vec::new() };
        for extent in &extents {
            let mut at = extent.pages.start;
            for stretch in stretches(region, extent, attributes) {
                let inner = pages_of(&whole(lowest, &range_of(&stretch)));
                if inner.is_empty() {
                    continue;
                }
                plan.leave(at..inner.start);
                at = inner.end;
                let leg = |stretch, is_unknown| Leg { level: lowest, stretch, is_unknown };
                let known = to_move(lowest, &stretch).into_iter().map(|part| leg(part, false));
                let unknown = unknown(lowest, &stretch).into_iter().map(|part| leg(part, true));
                plan.add(known.chain(unknown).collect(), to_move(HIGHEST, &stretch), region);
            }
            plan.leave(at..extent.pages.end);
        }
        plan
    }

    fn leave(&mut self, pages: Range<u64>) {
        if !pages.is_empty() {
            self.left.push((pages, Reason::SharedTable));
        }
    }

    /// Adds the legs of a stretch. `upper` are its parts whose pages of the highest level move.
    pub(super) fn add(&mut self, lower: Vec<Leg>, upper: Vec<Stretch>, region: &RegionInner) {
        if PageTableLevel::of(region.page)[0] < HIGHEST {
            for upper in upper.iter().flat_map(|part| each(part, region)) {
                let meets = |leg: &Leg| {
                    leg.stretch.pages.start < upper.pages.end
                        && upper.pages.start < leg.stretch.pages.end
                };
                match lower.iter().any(meets) {
                    true => {
                        self.uppers.push(Upper { stretch: upper, is_tried: AtomicBool::new(false) })
                    }
                    false => {
                        self.legs.push(Leg { level: HIGHEST, stretch: upper, is_unknown: false })
                    }
                }
            }
        }
        self.legs.extend(lower);
    }

    /// Refuses if the descriptor of a share of the pages has been closed.
    pub(super) fn check_descriptors(&self) -> Result<(), Error> {
        self.legs.iter().try_for_each(|leg| leg.stretch.share.check_descriptor())
    }

    /// Leaves out the pages of the highest level.
    pub(super) fn leave_upper(&mut self) {
        self.uppers.clear();
        self.legs.retain(|leg| leg.level < HIGHEST);
    }

    /// The levels whose pages move.
    pub(super) fn levels(&self) -> Vec<PageTableLevel> {
        let mut levels: Vec<_> = self.legs.iter().map(|leg| leg.level).collect();
        levels.extend(self.uppers.iter().map(|_| HIGHEST));
        levels.sort_unstable();
        levels.dedup();
        levels
    }
}

/// The parts of an extent with equal attributes.
fn stretches(
    region: &RegionInner,
    extent: &Extent<Share>,
    attributes: &[AttributeRun],
) -> Vec<Stretch> {
    let page = region.page.bytes();
    // The attributes of a huge page may change within it. Such a page is in no stretch.
    let pages_of = |run: &AttributeRun| {
        let first = run.start.saturating_sub(region.start).div_ceil(page) as u64;
        let end = (run.end.saturating_sub(region.start) / page) as u64;
        first.max(extent.pages.start)..end.min(extent.pages.end)
    };
    let of = |run: &AttributeRun| Stretch {
        pages: pages_of(run),
        share: extent.share.clone(),
        first_frame: extent.first_frame + pages_of(run).start.saturating_sub(extent.pages.start),
        attributes: run.attributes,
    };
    attributes.iter().map(of).filter(|stretch| !stretch.pages.is_empty()).collect()
}

/// The parts of a stretch of whole reaches of the highest level, one for each.
fn each(stretch: &Stretch, region: &RegionInner) -> Vec<Stretch> {
    let reach = (HIGHEST.reach_bytes() / region.page.bytes()) as u64;
    let Range { start, end } = stretch.pages;
    let first = (start..end).step_by(reach as usize);
    first.map(|first| stretch.part(&(first..first + reach))).collect()
}

/// The parts of some pages that one call each can take, and what to do with them: pages of whole
/// reaches with equal attributes, as the kernel shows them now, and between these pages that stay.
/// `runs` are those of the pages' addresses.
pub(super) fn pieces(
    region: &RegionInner,
    level: PageTableLevel,
    pages: &Range<u64>,
    runs: &[AttributeRun],
) -> Vec<(Range<u64>, Option<Attributes>)> {
    let addresses = region.addr(pages.start)..region.addr(pages.end);
    let mut pieces: Vec<(Range<u64>, Option<Attributes>)> = Vec::new();
    let mut at = pages.start;
    for run in runs {
        let common = run.start.max(addresses.start)..run.end.min(addresses.end);
        let whole = whole(level, &common);
        if common.is_empty() || whole.is_empty() {
            continue;
        }
        let part = region.pages(&(whole.start - region.start..whole.end - region.start));
        pieces.extend((at < part.start).then_some((at..part.start, None)));
        at = part.end;
        pieces.push((part, Some(run.attributes)));
    }
    pieces.extend((at < pages.end).then_some((at..pages.end, None)));
    pieces
}

/// The part of a range that is whole reaches of a level.
fn whole(level: PageTableLevel, range: &Range<usize>) -> Range<usize> {
    let bytes = level.reach_bytes();
    let start = range.start.next_multiple_of(bytes);
    start..start.max(range.end / bytes * bytes)
}
