//! Checks of memory before it is taken, and the end by a signal meanwhile.

use pageleap::pool::reserve_command;
use pageleap::{NodeId, PageSize};
use pageleap_measure::figures::human_bytes;

use crate::interrupt;
use crate::machine::NodeMemory;
use crate::stop::Stop;

/// Largest share of the free memory that is taken; the rest is for page tables and other programs.
pub const USABLE_SHARE: f64 = 0.95;

/// Why pages of this size cannot be measured here: too few huge pages are reserved and free.
pub fn missing_huge_pages(
    bytes: u64,
    page: PageSize,
    nodes: &[NodeMemory],
    from: u32,
    to: u32,
) -> Option<String> {
    if !page.is_hugetlb() {
        return None;
    }
    let pages = bytes / page.bytes() as u64;
    let demands =
        if from == to { vec![(from, 2 * pages)] } else { vec![(from, pages), (to, pages)] };
    demands.into_iter().find_map(|(id, needed)| {
        let free = nodes.iter().find(|node| node.id == id).map_or(0, |node| node.free_huge_pages);
        (free < needed).then(|| {
            format!(
                "needs {needed} free huge pages of {} on node {id}, which has {free}; as root: {}",
                human_bytes(page.bytes() as f64),
                reserve_command(NodeId(id), page, needed - free),
            )
        })
    })
}

/// Ends the command if a signal has arrived, while memory is taken.
pub fn stop_between_leaps() -> Result<(), Stop> {
    interrupt::stop_if_received(|| "no leap was under way".to_owned())
}

/// The items, each once.
pub fn once_each<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut kept = Vec::new();
    for item in items {
        if !kept.contains(item) {
            kept.push(*item);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, free_huge_pages: u64) -> NodeMemory {
        NodeMemory { id, total_bytes: 8 << 30, free_bytes: 1 << 30, free_huge_pages }
    }

    #[test]
    fn missing_huge_pages_are_counted_on_both_nodes() {
        let page = PageSize::Huge2M;
        let nodes = [node(0, 8), node(1, 3)];
        assert_eq!(missing_huge_pages(8 << 20, page, &nodes, 0, 0), None);
        let why = missing_huge_pages(8 << 20, page, &nodes, 0, 1).unwrap();
        assert!(why.contains("needs 4 free huge pages of 2 MiB on node 1, which has 3"), "{why}");
        assert_eq!(missing_huge_pages(1 << 40, PageSize::Thp, &nodes, 0, 1), None);
    }
}
