//! Joins mappings of hugetlb pages. The kernel merges neighbouring mappings (VMAs) of other memory,
//! but not these, and each area leaves one behind.
//!
//! One call maps a block again, as one mapping, to the same frames. While the call lasts, threads
//! that touch the block wait: some 2 us for each of its pages.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;

use super::legs::Leg;
use super::present::{Looks, restore_attributes, tell_lost};
use super::site::Site;
use crate::backend::{Call, Errno, Haste, Mapping};
use crate::engine::commit::{Source, map_again};
use crate::engine::effort::Counters;
use crate::engine::slot::{Slot, Span};
use crate::engine::views::map_view_again;
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::observe::Attributes;
use crate::pool::{Run, Share};
use crate::region::{HUGETLB_BLOCK, RegionInner};
use crate::sync::{Mutex, lock, monotonic_ns};
use crate::units::NodeId;

/// Pages of a block, and its alignment in pages. A window takes some 250 us.
const BLOCK: u64 = HUGETLB_BLOCK;

/// The most pages that wait for their neighbours, each in a mapping of its own. Beyond that, blocks
/// are joined before they are complete.
const MOST_APART: u64 = 1024;

/// How many mappings a job makes of hugetlb pages, by the number of pages of each of its ranges.
/// The first number is of mappings that stay, one for each block. The second is of those that pages
/// have meanwhile, while they wait for their neighbours.
pub fn mappings_apart(pages: &[u64]) -> (u64, u64) {
    let blocks = pages.iter().map(|pages| pages.div_ceil(BLOCK)).sum();
    let all: u64 = pages.iter().sum();
    (blocks, all.min(MOST_APART))
}

/// A block of an item's pages: by the item's index, and counted from the region's start.
type Block = (usize, u64);

/// The blocks that are to be joined, and when. Makes no calls.
#[derive(Debug, Default)]
struct Unjoined {
    blocks: BTreeMap<Block, Left>,
    /// Sum over the blocks.
    apart: u64,
    /// Blocks for which a call was refused: tried once more at the end.
    refused: BTreeSet<Block>,
    /// Blocks that are to be joined now.
    due: Vec<Block>,
}

#[derive(Debug)]
struct Left {
    /// Pages that have neither moved nor been given up.
    pages: u64,
    /// Pages that have moved since it was joined.
    apart: u64,
    /// Indexes of legs that have pages of it.
    legs: Range<usize>,
}

impl Unjoined {
    /// Begins with all pages of some legs; for each leg, its item and its pages.
    fn new(legs: impl Iterator<Item = (usize, Range<u64>)>) -> Self {
        let mut blocks: BTreeMap<Block, Left> = BTreeMap::new();
        for (index, (item, pages)) in legs.enumerate() {
            for (block, pages) in parts(&pages) {
                let left = blocks.entry((item, block)).or_insert(Left {
                    pages: 0,
                    apart: 0,
                    legs: index..index,
                });
                left.pages += pages;
                left.legs.end = index + 1;
            }
        }
        Unjoined { blocks, ..Unjoined::default() }
    }

    /// Notes that pages of an item have moved, or will not move. Returns the blocks that are to be
    /// joined now.
    fn dealt_with(&mut self, item: usize, pages: &Range<u64>, moved: bool) -> Vec<Block> {
        let mut complete = Vec::new();
        for (block, pages) in parts(pages) {
            let Some(left) = self.blocks.get_mut(&(item, block)) else { continue };
            left.pages -= pages;
            if moved {
                left.apart += pages;
                self.apart += pages;
            }
            if left.pages == 0 && left.apart > 0 {
                self.apart -= std::mem::take(&mut left.apart);
                complete.push((item, block));
            }
        }
        if self.apart > MOST_APART { [complete, self.take_rest()].concat() } else { complete }
    }

    /// The blocks of which pages have moved since they were joined.
    fn take_rest(&mut self) -> Vec<Block> {
        self.apart = 0;
        let apart = self
            .blocks
            .iter_mut()
            .filter_map(|(block, left)| (std::mem::take(&mut left.apart) > 0).then_some(*block));
        apart.collect()
    }
}

/// The blocks of a range of pages, and how many of the pages each has.
fn parts(pages: &Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let Range { start, end } = *pages;
    (start / BLOCK..end.div_ceil(BLOCK))
        .map(move |block| (block, end.min((block + 1) * BLOCK) - start.max(block * BLOCK)))
}

/// Joins the mappings of one job.
pub(super) struct Joiner {
    unjoined: Mutex<Unjoined>,
    /// The priority of workers in windows in which mappings are joined, if it is raised.
    hurries: OnceLock<Haste>,
}

/// The resources with which a thread joins mappings.
#[derive(Clone, Copy)]
pub(super) struct Joining<'a> {
    pub(super) site: &'a Site,
    pub(super) looks: &'a Looks,
    pub(super) slot: &'static Slot,
    /// The node from which page tables of this thread come.
    pub(super) preferred: Option<NodeId>,
    pub(super) books: Books<'a>,
}

impl Joiner {
    /// Makes a joiner for the legs of a job. Only mappings of hugetlb pages have to be joined.
    pub(super) fn new(legs: &[Leg], hugetlb: bool) -> Joiner {
        let apart = legs.iter().filter(|_| hugetlb).map(|leg| (leg.item, leg.pages.clone()));
        Joiner { unjoined: Mutex::new(Unjoined::new(apart)), hurries: OnceLock::new() }
    }

    /// Raises the priority of workers while they join, from now on.
    pub(super) fn hurry(&self, haste: Haste) {
        self.hurries.get_or_init(|| haste);
    }

    /// Notes that pages of an item have moved, or will not move.
    pub(super) fn dealt_with(&self, item: usize, pages: &Range<u64>, moved: bool) {
        let unjoined = &mut *lock(&self.unjoined);
        let due = unjoined.dealt_with(item, pages, moved);
        unjoined.due.extend(due);
    }

    /// Joins blocks of which no page is being moved any more.
    pub(super) fn join_due(&self, with: Joining<'_>) {
        let due = std::mem::take(&mut lock(&self.unjoined).due);
        for block in due {
            if !self.join_block(with, block) {
                lock(&self.unjoined).refused.insert(block);
            }
        }
    }

    /// Joins the rest, when nothing is moved any more: blocks that have not been completed, and
    /// once more the blocks for which a call was refused.
    pub(super) fn join_rest(&self, with: Joining<'_>) {
        let blocks = {
            let unjoined = &mut *lock(&self.unjoined);
            let mut blocks = std::mem::take(&mut unjoined.refused);
            blocks.extend(unjoined.take_rest());
            blocks
        };
        for block in blocks {
            self.join_block(with, block);
        }
    }

    /// Makes one mapping of those mappings of a block that have consecutive frames and equal
    /// attributes. Pages that came from several runs of frames are several legs. Returns whether
    /// all calls succeeded.
    fn join_block(&self, with: Joining<'_>, (item, block): Block) -> bool {
        let Joining { site, looks, .. } = with;
        let region = site.region(item);
        let legs = {
            let blocks = &lock(&self.unjoined).blocks;
            blocks.get(&(item, block)).map_or(0..0, |left| left.legs.clone())
        };
        let block = block * BLOCK..(block + 1) * BLOCK;
        let mut joined: Vec<(&Leg, Range<u64>)> = Vec::new();
        for leg in site.legs[legs].iter().filter(|leg| leg.item == item) {
            let pages = leg.pages.start.max(block.start)..leg.pages.end.min(block.end);
            match joined.last_mut() {
                _ if pages.is_empty() => {}
                Some((first, before))
                    if (&first.to, first.attributes) == (&leg.to, leg.attributes)
                        && before.end == pages.start
                        && first.to_frame + (leg.pages.start - first.pages.start)
                            == leg.to_frame =>
                {
                    before.end = pages.end;
                }
                _ => joined.push((leg, pages)),
            }
        }
        let mut whole = true;
        for (leg, pages) in joined {
            let moved: Vec<_> = {
                let extents = lock(&region.extents);
                extents
                    .within(pages)
                    .filter(|e| e.share == leg.to && e.pages.end - e.pages.start > 1)
                    .collect()
            };
            for extent in moved {
                let mapping = Mapping {
                    addr: region.addr(extent.pages.start),
                    len: region.bytes(extent.pages.end - extent.pages.start),
                    file: leg.to.0.file,
                    offset: leg.to.0.offset_of(extent.first_frame),
                    prot: leg.attributes.prot,
                    populate: true,
                };
                for (mapping, attributes) in looks.to_join(site.backend(), leg, &mapping) {
                    whole &= self.join_mapping(with, &attributes, (&mapping, &leg.to));
                }
                whole &= join_views(with, region, &mapping);
            }
        }
        whole
    }

    fn join_mapping(
        &self,
        Joining { site, slot, books, .. }: Joining<'_>,
        attributes: &Attributes,
        (mapping, share): (&Mapping, &Share),
    ) -> bool {
        let page = share.page_size().bytes();
        let frames =
            Run { first: mapping.offset / page as u64, frames: (mapping.len / page) as u64 };
        let alias = share.0.alias_of(frames.first);
        let span = Span { addr: mapping.addr, len: mapping.len, prot: mapping.prot };
        let mut counters = Counters::default();
        let haste = self.hurries.get().copied();
        let closed_at = monotonic_ns();
        // SAFETY: the span is claimed and maps exactly these frames already, so no worker uses it
        // any more.
        let (joined, restored) = unsafe {
            map_again(&site.tools(slot), &span, (mapping, alias), haste, &mut counters, || {
                restore_attributes(site.backend(), attributes, &span, false)
            })
        };
        // As for every window: no thread waits longer than from before the first call to after the
        // last.
        counters.window_ns = monotonic_ns() - closed_at;
        books.add(&counters);
        if joined == Ok(Source::Alias) {
            share.mend_hole(frames);
        }
        if let Err(errno) = joined {
            books.warn_once(apart(errno));
        }
        tell_lost(books, restored);
        joined.is_ok()
    }
}

fn apart(errno: Errno) -> Warning {
    let text = format!("mappings stay apart: mmap failed with {errno}");
    Warning::of(WarningKind::Mappings, text, Call::Map, errno)
}

/// Makes one mapping of a block in each view. Returns whether all calls succeeded.
fn join_views(
    Joining { site, slot, preferred, books, .. }: Joining<'_>,
    region: &RegionInner,
    mapping: &Mapping,
) -> bool {
    let mut whole = true;
    let span = Span { addr: mapping.addr, len: mapping.len, prot: mapping.prot };
    let views = region.views_at(mapping.addr - region.start);
    for view in views.as_slice() {
        let mut counters = Counters::default();
        let frames = (mapping.file, mapping.offset);
        // SAFETY: the block is claimed, and the view maps exactly these frames already.
        let joined = unsafe {
            let what = (&span, *view);
            map_view_again(&site.tools(slot), what, frames, preferred, &mut counters)
        };
        books.add(&counters);
        if let Err(errno) = joined {
            whole = false;
            books.warn_once(apart(errno));
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_joined_when_the_job_is_done_with_them() {
        // Every other eighth of two and a half blocks moves, the last leg is another item's.
        let eighth = BLOCK / 8;
        let legs: Vec<_> = (0..10).map(|i| (0, 2 * i * eighth..(2 * i + 1) * eighth)).collect();
        let other = (1, 0..3);
        let mut unjoined = Unjoined::new(legs.iter().cloned().chain([other]));
        assert_eq!(unjoined.blocks[&(0, 1)].legs, 4..8);
        let done: Vec<_> =
            legs.iter().map(|(item, pages)| unjoined.dealt_with(*item, pages, true)).collect();
        let complete: Vec<_> =
            done.iter().enumerate().filter(|(_, blocks)| !blocks.is_empty()).collect();
        assert_eq!(complete, [(3, &vec![(0, 0)]), (7, &vec![(0, 1)]), (9, &vec![(0, 2)])]);
        // Pages that fail are not waited for.
        assert_eq!(unjoined.dealt_with(1, &(0..1), true), []);
        assert_eq!(unjoined.dealt_with(1, &(1..3), false), [(1, 0)]);
        assert_eq!((unjoined.take_rest(), unjoined.apart), (vec![], 0));
    }

    #[test]
    fn ranges_share_what_waits_for_neighbours() {
        assert_eq!(mappings_apart(&[1024; 64]), (64 * 8, MOST_APART));
        assert_eq!(mappings_apart(&[3, 129]), (3, 132));
    }

    #[test]
    fn what_waits_for_neighbours_is_bounded() {
        // A page of each block stays behind.
        let blocks = 2 * MOST_APART / BLOCK;
        let mut unjoined = Unjoined::new([(0, 0..blocks * BLOCK)].into_iter());
        let mut joined = Vec::new();
        for page in (0..blocks * BLOCK).filter(|page| page % BLOCK != 7) {
            joined.extend(unjoined.dealt_with(0, &(page..page + 1), true));
            assert!(unjoined.apart <= MOST_APART);
        }
        joined.extend(unjoined.take_rest());
        joined.sort_unstable();
        joined.dedup();
        assert_eq!(joined, (0..blocks).map(|block| (0, block)).collect::<Vec<_>>());
    }
}
