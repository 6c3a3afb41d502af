//! Page tables go to the node of most of their entries: Auto-PTM.

use std::collections::BTreeMap;

use crate::region::PageTableLevel;
use crate::units::NodeId;

/// A page of page table, as a scan has found it. Levels above [`PageTableLevel::Pud`] (P4D, PGD) are
/// not described, so they stay: they are nearly always in a cache (*Phoenix*, section 5.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePage {
    /// Its level.
    pub level: PageTableLevel,
    /// The first address that it maps, by which [`TableMove`] names it.
    pub address: usize,
    /// The node on which it lies.
    pub node: NodeId,
    /// Its entries that point to data, by the node of the data. A page of the second level has such
    /// entries for huge pages; all of them count, also those outside the mapping that is scanned
    /// (*Latency-aware page-table migration*, section 4.1.5).
    pub data: BTreeMap<NodeId, u64>,
    /// The pages of page table of the next lower level to which its other entries point.
    pub tables: Vec<TablePage>,
}

/// A page of page table that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableMove {
    /// The level of the page.
    pub level: PageTableLevel,
    /// The first address that it maps.
    pub address: usize,
    /// The node on which it lies.
    pub from: NodeId,
    /// The node to which it is to move.
    pub to: NodeId,
    /// Why, in one line.
    pub reason: String,
}

/// The moves of Auto-PTM (*Latency-aware page-table migration*, section 3.3; the paper's `-m`): each
/// page of page table goes to the node to which most of its entries point. Pages of PTEs come first,
/// then PMDs, then PUDs, and each level counts where the level below will lie after its moves.
///
/// Of several nodes with the most entries, the one where the page lies wins, because a move would gain
/// nothing; otherwise the lowest number wins. The paper does not say.
///
/// ```
/// use std::collections::BTreeMap;
/// use pageleap::{NodeId, PageTableLevel};
/// use pageleap::decisions::{TablePage, auto_ptm};
///
/// // Figure 7 of the paper: two of three pages of data lie on node 1.
/// let page = TablePage {
///     level: PageTableLevel::Pte,
///     address: 0x4000_0000,
///     node: NodeId(0),
///     data: BTreeMap::from([(NodeId(0), 1), (NodeId(1), 2)]),
///     tables: Vec::new(),
/// };
/// let moves = auto_ptm(&[page]);
/// assert_eq!(moves[0].to, NodeId(1));
/// assert_eq!(moves[0].reason, "2 of 3 entries point to node 1");
/// ```
pub fn auto_ptm(pages: &[TablePage]) -> Vec<TableMove> {
    moves(pages, &|_, most| Some((most.node, most.to_string())))
}

/// The node to which most entries of a page point.
pub(super) struct Most {
    pub(super) node: NodeId,
    entries: u64,
    of: u64,
}

impl std::fmt::Display for Most {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} entries point to {}", self.entries, self.of, self.node)
    }
}

/// The node for a page of page table and the reason; `None` if it is to stay.
type Place<'a> = &'a dyn Fn(&TablePage, &Most) -> Option<(NodeId, String)>;

/// The moves of all pages, bottom-up, by a rule for each page with entries.
pub(super) fn moves(pages: &[TablePage], place: Place<'_>) -> Vec<TableMove> {
    let mut moves = Vec::new();
    for page in pages {
        visit(page, place, &mut moves);
    }
    // Levels one after the other, as the paper scans them.
    moves.sort_by_key(|one| one.level);
    moves
}

/// Decides for the pages below a page, then for the page. Returns the node on which it will lie.
fn visit(page: &TablePage, place: Place<'_>, moves: &mut Vec<TableMove>) -> NodeId {
    let mut entries = page.data.clone();
    for below in &page.tables {
        *entries.entry(visit(below, place, moves)).or_default() += 1;
    }
    let Some(most) = most(&entries, page.node) else { return page.node };
    match place(page, &most) {
        Some((to, reason)) if to != page.node => {
            let (level, address, from) = (page.level, page.address, page.node);
            moves.push(TableMove { level, address, from, to, reason });
            to
        }
        _ => page.node,
    }
}

fn most(entries: &BTreeMap<NodeId, u64>, own: NodeId) -> Option<Most> {
    let by_number = |node: NodeId| (node == own, std::cmp::Reverse(node));
    let (node, entries_there) = entries
        .iter()
        .filter(|(_, entries)| **entries > 0)
        .max_by_key(|(node, entries)| (**entries, by_number(**node)))?;
    Some(Most { node: *node, entries: *entries_there, of: entries.values().sum() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    fn table(
        level: PageTableLevel,
        address: usize,
        node: u32,
        tables: Vec<TablePage>,
    ) -> TablePage {
        TablePage { level, address, node: NodeId(node), data: BTreeMap::new(), tables }
    }

    fn pte(address: usize, node: u32, data: &[(u32, u64)]) -> TablePage {
        let data = data.iter().map(|(node, pages)| (NodeId(*node), *pages)).collect();
        TablePage { data, ..table(PageTableLevel::Pte, address, node, Vec::new()) }
    }

    fn told(moves: &[TableMove]) -> Vec<(PageTableLevel, usize, u32)> {
        moves.iter().map(|one| (one.level, one.address / (2 * MB), one.to.0)).collect()
    }

    #[test]
    fn upper_levels_count_where_the_lower_ones_will_lie() {
        use PageTableLevel::{Pmd, Pte, Pud};
        let ptes = vec![
            pte(0, 0, &[(2, 512)]),
            pte(2 * MB, 0, &[(2, 300), (0, 212)]),
            pte(4 * MB, 0, &[(0, 512)]),
        ];
        let tree = table(Pud, 0, 0, vec![table(Pmd, 0, 0, ptes)]);
        let moves = auto_ptm(&[tree]);
        // By where the PTEs lie now, PMD and PUD would stay on node 0.
        assert_eq!(told(&moves), [(Pte, 0, 2), (Pte, 1, 2), (Pmd, 0, 2), (Pud, 0, 2)]);
        assert_eq!(moves[1].reason, "300 of 512 entries point to node 2");
        assert_eq!(moves[2].reason, "2 of 3 entries point to node 2");
    }

    #[test]
    fn ties_and_empty_pages_stay() {
        assert_eq!(auto_ptm(&[pte(0, 1, &[(0, 256), (1, 256)])]), []);
        assert_eq!(auto_ptm(&[pte(0, 1, &[])]), []);
        assert_eq!(auto_ptm(&[pte(0, 1, &[(0, 0)])]), []);
        let elsewhere = auto_ptm(&[pte(0, 3, &[(2, 256), (1, 256)])]);
        assert_eq!(elsewhere[0].to, NodeId(1));
    }

    #[test]
    fn entries_of_huge_pages_count_beside_pages_of_ptes() {
        let mut pmd = table(PageTableLevel::Pmd, 0, 0, vec![pte(0, 0, &[(0, 512)])]);
        pmd.data.insert(NodeId(1), 2);
        let moves = auto_ptm(&[pmd]);
        assert_eq!(told(&moves), [(PageTableLevel::Pmd, 0, 1)]);
    }
}
