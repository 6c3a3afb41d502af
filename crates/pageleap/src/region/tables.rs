//! The account of the pages of page table that map a region. Pure bookkeeping.
//!
//! The kernel does not tell on which node a page table lies. It takes the page from the node that
//! the memory policy of the allocating thread names, so the library knows which node it has asked
//! for. The account has that node, or `None` where the library has asked for none.
//!
//! The *reach* of a page of page table is the address range that it maps: 2 MB at the lowest level,
//! 1 GB and 512 GB above. Each call that changes mappings of a region follows the same rules at each
//! level (`free_pgtables` and `move_page_tables` in mm/, Linux 6.1 to 6.18):
//!
//! ```text
//!                  all of a reach                       a part of a reach
//!   mremap here    the alias's page arrives, if both    the reach's page stays; if it has none,
//!                  addresses agree modulo the reach;    the calling thread makes one
//!                  else the calling thread makes one
//!   mmap here      the calling thread makes one         the same
//!   vacated        none is left                         the reach's page stays
//! ```
//!
//! For example, a region of 5 MB has two reaches of its own at the lowest level, and 1 MB of a third
//! one, which other mappings of the process may share. Only reaches that lie in the region as wholes
//! are kept in the account.

use std::collections::BTreeMap;
use std::fmt;
use std::iter::once;
use std::ops::Range;

use super::{Extent, ExtentMap};
use crate::pool::{AliasTables, Share};
use crate::units::{BASE_PAGE, NodeId, PageSize};

/// A level of page tables, by the kernel's names. Entries of the lowest level point to base pages.
///
/// Levels above these (P4D, PGD) map 256 TB and more, which no region has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PageTableLevel {
    /// The lowest level, whose entries point to base pages. One page maps 2 MB.
    Pte,
    /// The second level, whose entries point to pages of PTEs or to pages of 2 MB. One page maps
    /// 1 GB.
    Pmd,
    /// The third level, whose entries point to pages of PMDs or to pages of 1 GB. One page maps
    /// 512 GB.
    Pud,
}

impl PageTableLevel {
    /// All of them, from the lowest.
    pub const ALL: [PageTableLevel; 3] =
        [PageTableLevel::Pte, PageTableLevel::Pmd, PageTableLevel::Pud];

    /// Its name in the kernel: `PTE`, `PMD`, `PUD`.
    pub const fn name(self) -> &'static str {
        match self {
            PageTableLevel::Pte => "PTE",
            PageTableLevel::Pmd => "PMD",
            PageTableLevel::Pud => "PUD",
        }
    }

    /// The bytes that one page of page table maps. Regions have base pages of 4 KB on every
    /// architecture, so each page has 512 entries.
    pub const fn reach_bytes(self) -> usize {
        match self {
            PageTableLevel::Pte => 512 * BASE_PAGE,
            PageTableLevel::Pmd => 512 * PageTableLevel::Pte.reach_bytes(),
            PageTableLevel::Pud => 512 * PageTableLevel::Pmd.reach_bytes(),
        }
    }

    /// The levels that map pages of this size. Transparent huge pages count as mapped by huge
    /// entries, as pools make them.
    pub(crate) const fn of(page: PageSize) -> &'static [PageTableLevel] {
        match page {
            PageSize::Base => &PageTableLevel::ALL,
            PageSize::Thp | PageSize::Huge2M => &[PageTableLevel::Pmd, PageTableLevel::Pud],
            PageSize::Huge1G => &[PageTableLevel::Pud],
        }
    }
}

impl fmt::Display for PageTableLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many pages of page table map a region, by level and by the node that was asked for
/// ([`Region::page_tables`](crate::Region::page_tables)). A page of page table has 4 KB.
///
/// The source is the library's own account, not the kernel, which tells no node of a page table.
///
/// * **Asked for** is not *placed*: an allocation falls back to another node where the first one has
///   no free page. The kernel counts the page tables of all processes on each node (`PageTables:` in
///   `/sys/devices/system/node/node*/meminfo`); its difference around a leap shows where they went.
/// * **Unasked** are pages that a thread without a policy of the library made. They come from the
///   node of its CPU, or by its own policy. On a machine with one node all are unasked. So are most
///   pages of the upper levels: a thread that backs a region makes them, and leaps leave them.
/// * **In part** are pages of which the region has only a part, at its ends. Other mappings of the
///   process may need the same page.
/// * A **transparent huge page** counts as mapped by an entry of the second level. It takes a page
///   of PTEs instead if the kernel splits its mapping, under memory pressure or because an attribute
///   was set for a part of it. [`Region::mapped_pages`](crate::Region::mapped_pages) tells. For base
///   pages the reverse holds, if the kernel has joined them.
/// * For **hugetlb pages of 2 MB**, the kernel may let a region and its pool share pages of the
///   second level. The account counts the region's.
/// * Page tables that page faults of the program's threads make are not seen: in a part that nobody
///   could read when it moved, or after an `madvise` that frees page tables.
/// * If less than 2 MB of a block moves, the kernel may make a page of PTEs for the pool's own mapping
///   of these frames, which the account does not see. A region that later gets all frames of that
///   block may then have a page of PTEs on another node than the one counted.
///
/// ```
/// use pageleap::{NodeId, PageTableLevel, PageTables, Placement, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let there = Placement::on(NodeId(0)).page_tables(PageTables::Node(NodeId(0)));
/// let pool = Pool::builder(there, 8 << 20).build()?;
/// let region = Region::new(&pool, 8 << 20)?;
/// let tables = region.page_tables();
/// // Four blocks of 2 MB; a page of the second level maps 1 GB, of which the region has a part.
/// assert_eq!(tables.asked_on(PageTableLevel::Pte, NodeId(0)), 4);
/// assert_eq!(tables.unasked(PageTableLevel::Pte), 0);
/// assert_eq!(tables.total(PageTableLevel::Pmd), 0);
/// assert!(tables.in_part(PageTableLevel::Pmd) >= 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTableCounts {
    asked: BTreeMap<(PageTableLevel, NodeId), u64>,
    unasked: BTreeMap<PageTableLevel, u64>,
    in_part: BTreeMap<PageTableLevel, u64>,
}

impl PageTableCounts {
    /// Pages of this level that were asked for on `node`.
    pub fn asked_on(&self, level: PageTableLevel, node: NodeId) -> u64 {
        self.asked.get(&(level, node)).copied().unwrap_or(0)
    }

    /// Pages of this level for which the library asked for no node.
    pub fn unasked(&self, level: PageTableLevel) -> u64 {
        self.unasked.get(&level).copied().unwrap_or(0)
    }

    /// Pages of this level that map the region alone, asked for or not.
    pub fn total(&self, level: PageTableLevel) -> u64 {
        let asked = self.asked.iter().filter(|((of, _), _)| *of == level);
        asked.map(|(_, pages)| pages).sum::<u64>() + self.unasked(level)
    }

    /// Pages of this level that map a part of the region and perhaps other memory of the process,
    /// at most two. They are in no other count.
    pub fn in_part(&self, level: PageTableLevel) -> u64 {
        self.in_part.get(&level).copied().unwrap_or(0)
    }

    /// Each level and node with pages that were asked for there, and their number.
    pub fn iter(&self) -> impl Iterator<Item = (PageTableLevel, NodeId, u64)> {
        self.asked.iter().map(|((level, node), pages)| (*level, *node, *pages))
    }

    fn add(&mut self, level: PageTableLevel, node: Option<NodeId>, pages: u64) {
        match node {
            Some(node) => *self.asked.entry((level, node)).or_default() += pages,
            None => *self.unasked.entry(level).or_default() += pages,
        }
    }
}

impl fmt::Display for PageTableCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> =
            self.iter().map(|(level, node, pages)| format!("{level} on {node}: {pages}")).collect();
        for (text, counts) in [("unasked", &self.unasked), ("in part", &self.in_part)] {
            parts.extend(counts.iter().map(|(level, pages)| format!("{level} {text}: {pages}")));
        }
        f.write_str(if parts.is_empty() { "no page tables" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

/// The reaches of one level that have a page, by the node that was asked for. A run of reaches with
/// equal nodes is one extent, whose "frames" are the reaches themselves.
type Reaches = ExtentMap<Option<NodeId>>;

fn run(reaches: Range<u64>, node: Option<NodeId>) -> Extent<Option<NodeId>> {
    Extent { first_frame: reaches.start, pages: reaches, share: node }
}

/// The pages of page table of one region. Ranges are addresses.
#[derive(Debug)]
pub(crate) struct TableAccount {
    /// The region, with all addresses that it has reserved.
    region: Range<usize>,
    page: PageSize,
    levels: Vec<(PageTableLevel, Reaches)>,
}

impl TableAccount {
    /// The account of a region without memory.
    pub(super) fn new(region: Range<usize>, page: PageSize) -> TableAccount {
        let levels = PageTableLevel::of(page).iter().map(|level| (*level, Reaches::new()));
        TableAccount { region, page, levels: levels.collect() }
    }

    /// A call has unmapped a range, and nothing has been mapped there.
    pub(super) fn unmapped(&mut self, range: &Range<usize>) {
        for (level, reaches) in &mut self.levels {
            reaches.remove(whole(*level, range));
        }
    }

    /// A call has mapped a file over a range and filled its page tables, by a thread whose policy
    /// prefers `node`. `is_filled` is false if nobody may read the range.
    pub(crate) fn mapped(&mut self, range: &Range<usize>, node: Option<NodeId>, is_filled: bool) {
        self.unmapped(range);
        if is_filled {
            self.make(range, node);
        }
    }

    /// A call of a thread whose policy prefers `node` has moved the page tables of an alias to a
    /// range.
    pub(crate) fn exchanged(
        &mut self,
        range: &Range<usize>,
        brought: &AliasTables,
        node: Option<NodeId>,
    ) {
        self.unmapped(range);
        for (level, reaches) in &mut self.levels {
            let bytes = level.reach_bytes();
            let whole = whole(*level, range);
            if whole.is_empty() || !(range.start ^ brought.addr).is_multiple_of(bytes) {
                continue;
            }
            if *level != PageTableLevel::Pte {
                reaches.replace(run(whole, brought.upper));
                continue;
            }
            reaches.replace(run(whole.clone(), brought.node));
            for part in &brought.astray {
                let part = range.start + part.start..range.start + part.end;
                let astray = touched(*level, &part);
                let astray = astray.start.max(whole.start)..astray.end.min(whole.end);
                if !astray.is_empty() {
                    reaches.replace(run(astray, None));
                }
            }
        }
        self.make(range, node);
    }

    /// The page tables of a range have moved to an alias, and its pages have stayed. Threads that
    /// touch them make new page tables.
    pub(crate) fn parked(&mut self, range: &Range<usize>) {
        self.mapped(range, None, true);
    }

    /// A thread whose policy prefers `node` has taken the entries of a level out of a range and brought
    /// them back into new pages. Pages of lower levels have kept their places.
    pub(crate) fn renewed(&mut self, level: PageTableLevel, range: &Range<usize>, node: NodeId) {
        for (of, reaches) in self.levels.iter_mut().filter(|(of, _)| *of >= level) {
            reaches.remove(whole(*of, range));
        }
        self.make(range, Some(node));
    }

    /// The parts of a range that are whole reaches of a level with a page each, and the node on which
    /// that page was asked for.
    pub(crate) fn asked(
        &self,
        level: PageTableLevel,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Option<NodeId>)> {
        let of_level = self.levels.iter().filter(move |(of, _)| *of == level);
        let whole = whole(level, range);
        let reaches = of_level.flat_map(move |(_, reaches)| reaches.within(whole.clone()));
        let bytes = level.reach_bytes();
        reaches.map(move |run| {
            let Range { start, end } = run.pages;
            (start as usize * bytes..end as usize * bytes, run.share)
        })
    }

    /// The counts. `extents` are those of the region.
    pub(super) fn counts(&self, extents: &ExtentMap<Share>) -> PageTableCounts {
        let mut counts = PageTableCounts::default();
        for (level, reaches) in &self.levels {
            for run in reaches.within(0..u64::MAX) {
                counts.add(*level, run.share, run.pages.end - run.pages.start);
            }
            let in_part =
                self.in_part(*level).filter(|pages| extents.within(pages.clone()).next().is_some());
            let in_part = in_part.count() as u64;
            if in_part > 0 {
                counts.in_part.insert(*level, in_part);
            }
        }
        counts
    }

    /// The pages of the region in reaches that do not lie in the region as wholes.
    fn in_part(&self, level: PageTableLevel) -> impl Iterator<Item = Range<u64>> {
        let Range { start, end } = self.region;
        let (all, whole) = (touched(level, &self.region), whole(level, &self.region));
        let (bytes, page) = (level.reach_bytes(), self.page.bytes());
        let is_whole = move |reach: &u64| whole.contains(reach);
        let ends = [all.start, all.end - 1].into_iter().take((all.end - all.start).min(2) as usize);
        ends.filter(move |reach| !is_whole(reach)).map(move |reach| {
            let from = (reach as usize * bytes).max(start) - start;
            let to = ((reach as usize + 1) * bytes).min(end) - start;
            (from / page) as u64..(to / page) as u64
        })
    }

    /// A thread whose policy prefers `node` has filled a range: it has made the pages that reaches
    /// lacked.
    fn make(&mut self, range: &Range<usize>, node: Option<NodeId>) {
        for (level, reaches) in &mut self.levels {
            let (touched, owned) = (touched(*level, range), whole(*level, &self.region));
            let touched = touched.start.max(owned.start)..touched.end.min(owned.end);
            let mut at = touched.start;
            let present: Vec<Range<u64>> = match touched.is_empty() {
                true => continue,
                false => reaches.within(touched.clone()).map(|run| run.pages).collect(),
            };
            for next in present.into_iter().chain(once(touched.end..touched.end)) {
                if at < next.start {
                    reaches.replace(run(at..next.start, node));
                }
                at = next.end;
            }
        }
    }
}

/// The numbers of the reaches that lie in a range as wholes.
fn whole(level: PageTableLevel, range: &Range<usize>) -> Range<u64> {
    let bytes = level.reach_bytes();
    let first = range.start.div_ceil(bytes) as u64;
    first..first.max((range.end / bytes) as u64)
}

/// The numbers of the reaches that a range touches.
fn touched(level: PageTableLevel, range: &Range<usize>) -> Range<u64> {
    let bytes = level.reach_bytes();
    (range.start / bytes) as u64..range.end.div_ceil(bytes) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cases::cases;

    const MB: usize = 1 << 20;
    const GB: usize = 1 << 30;
    const PTE: PageTableLevel = PageTableLevel::Pte;
    const PMD: PageTableLevel = PageTableLevel::Pmd;
    const PUD: PageTableLevel = PageTableLevel::Pud;

    /// An alias whose page tables lie on node 1.
    fn brought(addr: usize, astray: Option<Range<usize>>, upper: Option<NodeId>) -> AliasTables {
        AliasTables { addr, node: Some(NodeId(1)), astray: astray.into_iter().collect(), upper }
    }

    /// The reaches of a level, each with the number of its node or -1, without those that have no page.
    fn reaches(account: &TableAccount, level: PageTableLevel) -> Vec<(u64, i64)> {
        let (_, reaches) = account.levels.iter().find(|(of, _)| *of == level).unwrap();
        let node = |node: Option<NodeId>| node.map_or(-1, |node| i64::from(node.0));
        let each = reaches.within(0..u64::MAX);
        each.flat_map(|run| run.pages.map(move |reach| (reach, node(run.share)))).collect()
    }

    #[test]
    fn whole_reaches_get_the_page_that_comes_and_parts_keep_theirs() {
        // The last MB is in a reach that the region does not have for itself.
        let region = 4 * GB..4 * GB + 9 * MB;
        let at = |from: usize, to: usize| region.start + from * MB..region.start + to * MB;
        let mut account = TableAccount::new(region.clone(), PageSize::Base);
        let first = (4 * GB / PTE.reach_bytes()) as u64;
        let nodes = |account: &TableAccount| {
            let all = reaches(account, PTE);
            all.into_iter().map(|(reach, node)| (reach - first, node)).collect::<Vec<_>>()
        };
        account.exchanged(&at(0, 9), &brought(8 * GB, Some(2 * MB..3 * MB), None), None);
        assert_eq!(nodes(&account), [(0, 1), (1, -1), (2, 1), (3, 1)]);
        // A part keeps the page of its reach, however it is mapped.
        account.mapped(&at(1, 5), Some(NodeId(7)), true);
        assert_eq!(nodes(&account), [(0, 1), (1, 7), (2, 1), (3, 1)]);
        account.unmapped(&at(3, 6));
        assert_eq!(nodes(&account), [(0, 1), (1, 7), (3, 1)]);
        // The alias does not agree modulo 2 MB, so the thread makes the pages.
        account.exchanged(&at(4, 8), &brought(8 * GB + MB, None, None), Some(NodeId(2)));
        assert_eq!(nodes(&account), [(0, 1), (1, 7), (2, 2), (3, 2)]);
        account.parked(&at(1, 4));
        assert_eq!(nodes(&account), [(0, 1), (1, -1), (2, 2), (3, 2)]);
        account.mapped(&at(4, 6), Some(NodeId(0)), false);
        assert_eq!(nodes(&account), [(0, 1), (1, -1), (3, 2)]);
        assert_eq!((reaches(&account, PMD), reaches(&account, PUD)), (vec![], vec![]));
        assert_eq!(
            account.asked(PTE, &at(0, 9)).collect::<Vec<_>>(),
            [(at(0, 2), Some(NodeId(1))), (at(2, 4), None), (at(6, 8), Some(NodeId(2)))]
        );
    }

    #[test]
    fn upper_levels_come_with_whole_gigabytes_only() {
        let region = 3 * GB..6 * GB + 4 * MB;
        let mut account = TableAccount::new(region.clone(), PageSize::Base);
        let upper = Some(NodeId(5));
        account.exchanged(&(3 * GB..5 * GB), &brought(9 * GB, None, upper), Some(NodeId(0)));
        account.exchanged(&(5 * GB..region.end), &brought(9 * GB + 2 * MB, None, upper), None);
        assert_eq!(reaches(&account, PMD), [(3, 5), (4, 5), (5, -1)]);
        // A leap of a part leaves it.
        account.exchanged(&(3 * GB..3 * GB + 16 * MB), &brought(GB, None, upper), None);
        assert_eq!(reaches(&account, PMD), [(3, 5), (4, 5), (5, -1)]);
        let counts = account.counts(&ExtentMap::new());
        assert_eq!((counts.total(PTE), counts.total(PMD), counts.total(PUD)), (1538, 3, 0));
        assert_eq!((counts.asked_on(PMD, NodeId(5)), counts.unasked(PMD)), (2, 1));
        assert_eq!(counts.to_string(), "PTE on node 1: 1538, PMD on node 5: 2, PMD unasked: 1",);
    }

    #[test]
    fn huge_pages_need_the_upper_levels_only() {
        let region = 0..2 * PUD.reach_bytes();
        for (page, levels) in [(PageSize::Thp, 2), (PageSize::Huge2M, 2), (PageSize::Huge1G, 1)] {
            let mut account = TableAccount::new(region.clone(), page);
            account.mapped(&(GB..2 * GB), None, true);
            let counts = account.counts(&ExtentMap::new());
            let found = PageTableLevel::ALL.map(|level| counts.unasked(level));
            assert_eq!(found, [0, levels - 1, 1], "{page}");
        }
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Compares with one node for each reach: a call changes only reaches that it covers, and those
        /// that it touches have a page afterwards unless nothing is mapped there.
        #[test]
        fn agrees_with_a_node_for_each_span(
            calls in prop::collection::vec((0usize..40, 1usize..20, 0u8..4, 0u32..3, any::<bool>()), 1..40),
        ) {
            // In MB: 20 reaches, of which the last one is the region's in part.
            let mut account = TableAccount::new(GB..GB + 39 * MB, PageSize::Base);
            let mut model: [Option<i64>; 19] = [None; 19];
            for (from, len, kind, node, congruent) in calls {
                let (from, to) = (from.min(38), (from + len).clamp(1, 39).max(from.min(38) + 1));
                let range = GB + from * MB..GB + to * MB;
                let node = Some(NodeId(node));
                let alias = 4 * GB + (from % 2) * MB + if congruent { 0 } else { MB };
                let own = |node: Option<NodeId>| node.map_or(-1, |node| i64::from(node.0));
                let (comes, made) = match kind {
                    0 => { account.unmapped(&range); (None, None) }
                    1 => { account.mapped(&range, node, true); (Some(own(node)), Some(own(node))) }
                    2 => { account.parked(&range); (Some(-1), Some(-1)) }
                    _ => {
                        account.exchanged(&range, &brought(alias, None, None), node);
                        (Some(if congruent { 1 } else { own(node) }), Some(own(node)))
                    }
                };
                for (reach, page) in model.iter_mut().enumerate() {
                    let (start, end) = (2 * reach, 2 * reach + 2);
                    if from <= start && to >= end {
                        *page = comes;
                    } else if from < end && to > start && made.is_some() {
                        *page = page.or(made);
                    }
                }
                let expected: Vec<(u64, i64)> = model.iter().enumerate()
                    .filter_map(|(reach, node)| Some((512 + reach as u64, (*node)?))).collect();
                prop_assert_eq!(reaches(&account, PTE), expected);
            }
        }
    }
}
