//! How much a node can take before the kernel reclaims memory from others.
//!
//! When the free memory of a zone falls below its *low* watermark, the kernel begins to reclaim: it
//! drops page cache and swaps, until the zone is above its *high* watermark
//! (Documentation/admin-guide/sysctl/vm.rst, `watermark_scale_factor`). So moving stops above the
//! high watermark, and leaves a reserve for allocations of others meanwhile.
//!
//! A huge page needs a free block of its size. Without one, `alloc_migration_target` of
//! mm/migrate.c reclaims and compacts memory, and splits the huge page if that does not help. A
//! hugetlb page needs a free page in the pool of the node. Without one, the kernel makes one from
//! free memory, and removes one from the pool of the old node, for good (`move_hugetlb_state` of
//! mm/hugetlb.c).

use std::collections::BTreeMap;

use super::HUGE;
use crate::error::Error;
use crate::topology::{SysFiles, Topology};
use crate::units::{BASE_PAGE, NodeId};

/// The reserve is this part of a node's memory.
const RESERVE_PART: u64 = 64;
/// But no more than this, in bytes.
const MOST_RESERVE: u64 = 1 << 30;
/// This percentage of a zone may be kept for allocations that cannot wait: it counts as free, and
/// is given to no others (`reserve_highatomic_pageblock` of mm/page_alloc.c).
const HIGHATOMIC_PERCENT: u64 = 1;

/// A block of 2 MB has 2 to the power of this many base pages.
const HUGE_ORDER: usize = (HUGE / BASE_PAGE).ilog2() as usize;

/// The memory that has to stay free, by node. A node that is not in the map may be filled.
#[derive(Debug, Default)]
pub(super) struct Rooms(BTreeMap<NodeId, Kept>);

/// The memory that has to stay free on a node.
#[derive(Debug, Default, PartialEq)]
struct Kept {
    /// In bytes.
    bytes: u64,
    /// The same by zone, in pages.
    zones: BTreeMap<String, u64>,
}

impl Rooms {
    /// Reads the watermarks of these nodes.
    ///
    /// # Errors
    /// If `/proc/zoneinfo` cannot be read.
    pub(super) fn of(nodes: impl Iterator<Item = NodeId>) -> Result<Rooms, Error> {
        let text = SysFiles::host().text_by_cpu("proc/zoneinfo")?;
        Ok(Rooms(nodes.map(|node| (node, kept(&text, node))).collect()))
    }

    /// No limits: nodes may be filled.
    pub(super) fn unlimited() -> Rooms {
        Rooms::default()
    }

    /// How many bytes may be moved to a node now. A node whose free memory cannot be read has no
    /// room.
    pub(super) fn now(&self, node: NodeId) -> u64 {
        let Some(kept) = self.0.get(&node) else { return u64::MAX };
        let path = format!("sys/devices/system/node/node{}/meminfo", node.0);
        let files = SysFiles::host();
        let text = files.text(&path).or_else(|_| files.text("proc/meminfo")).unwrap_or_default();
        free(&text).saturating_sub(kept.bytes)
    }

    /// The number of transparent huge pages for which a node has free blocks. A node whose blocks
    /// cannot be read has none.
    pub(super) fn blocks_now(&self, node: NodeId) -> u64 {
        let Some(kept) = self.0.get(&node) else { return u64::MAX };
        let text = SysFiles::host().text("proc/buddyinfo").unwrap_or_default();
        free_blocks(&text, node, &kept.zones)
    }

    /// The number of free hugetlb pages of a size on a node that no mapping has reserved.
    pub(super) fn hugetlb_now(&self, node: NodeId, page_bytes: u64) -> u64 {
        if !self.0.contains_key(&node) {
            return u64::MAX;
        }
        let of_node = Topology::node_now(node).map_or(0, |node| node.free_huge(page_bytes));
        let folder = format!("sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
        let number = |name: &str| {
            let text = SysFiles::host().text(&format!("{folder}/{name}")).ok()?;
            text.trim().parse::<u64>().ok()
        };
        match (number("free_hugepages"), number("resv_hugepages")) {
            (Some(free), Some(reserved)) => of_node.min(free.saturating_sub(reserved)),
            _ => of_node,
        }
    }
}

/// The number of huge pages of 2 MB that fit into free blocks of a node, without the pages that its
/// zones keep.
fn free_blocks(buddyinfo: &str, node: NodeId, kept: &BTreeMap<String, u64>) -> u64 {
    let head = format!("Node {}, zone", node.0);
    let of_zone = |zone: &str| {
        let mut words = zone.split_whitespace();
        let kept = words.next().and_then(|name| kept.get(name)).copied().unwrap_or(0);
        let counts: Vec<u64> = words.map(|count| count.parse().unwrap_or(0)).collect();
        let pages: u64 = counts.iter().enumerate().map(|(order, count)| count << order).sum();
        let orders = counts.iter().skip(HUGE_ORDER).enumerate();
        let blocks: u64 = orders.map(|(order, count)| count << order).sum();
        blocks.min(pages.saturating_sub(kept) >> HUGE_ORDER)
    };
    buddyinfo.lines().filter_map(|line| line.strip_prefix(&head)).map(of_zone).sum()
}

/// Free bytes, from the meminfo of a node or of the machine.
fn free(meminfo: &str) -> u64 {
    let kb = meminfo.lines().find_map(|line| {
        let (head, value) = line.split_once(':')?;
        head.ends_with("MemFree").then(|| value.split_whitespace().next()?.parse::<u64>().ok())?
    });
    kb.unwrap_or(0) << 10
}

/// The memory that has to stay free on a node: in each zone the high watermark and the pages that
/// the zone protects from allocations of higher zones (`lowmem_reserve`); the pages that may be
/// kept for allocations that cannot wait (`MIGRATE_HIGHATOMIC`); and the reserve.
fn kept(zoneinfo: &str, node: NodeId) -> Kept {
    let head = format!("Node {}, zone", node.0);
    let (mut inside, mut name, mut zone) = (false, String::new(), Zone::default());
    let (mut zones, mut managed) = (BTreeMap::new(), 0);
    let mut add = |name: String, zone: &mut Zone| {
        let zone = std::mem::take(zone);
        if !name.is_empty() {
            zones.insert(name, (zone.high + zone.protection).min(zone.managed));
            managed += zone.managed;
        }
    };
    for line in zoneinfo.lines() {
        if line.starts_with("Node ") {
            add(std::mem::take(&mut name), &mut zone);
            let rest = line.strip_prefix(&head);
            inside = rest.is_some();
            name = rest.map_or_else(String::new, |rest| rest.trim().to_owned());
            continue;
        }
        let mut words = line.split_whitespace();
        let (field, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match field {
            _ if !inside => {}
            "high" => zone.high = zone.high.max(value.parse().unwrap_or(0)),
            "managed" => zone.managed = value.parse().unwrap_or(0),
            "protection:" => zone.protection = largest(line),
            // The lines from here on are about CPUs, and use the same names.
            "pagesets" => inside = false,
            _ => {}
        }
    }
    add(name, &mut zone);
    let bytes = |pages: u64| pages.saturating_mul(BASE_PAGE as u64);
    let highatomic = bytes(managed) / 100 * HIGHATOMIC_PERCENT;
    let reserve = (bytes(managed) / RESERVE_PART).min(MOST_RESERVE);
    Kept { bytes: bytes(zones.values().sum()) + highatomic + reserve, zones }
}

/// A zone, in pages.
#[derive(Default)]
struct Zone {
    high: u64,
    managed: u64,
    protection: u64,
}

/// The largest number of a line such as `protection: (0, 2989, 7921)`.
fn largest(line: &str) -> u64 {
    let numbers = line.split(|c: char| !c.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).max().unwrap_or(0)
}

#[cfg(all(test, not(any(loom, shuttle, miri))))]
mod tests {
    use super::*;

    const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 1
  pages free     2816
        boost    0
        min      7
        low      10
        high     13
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 2989, 7921, 7921, 7921)
      nr_free_pages 2816
  pagesets
    cpu: 0
              count: 0
              high:  0
              high_min: 99999
Node 0, zone   Normal
  pages free     100000
        min      100
        low      200
        high     300
        managed  640000
        protection: (0, 0, 0, 0, 0)
Node 1, zone   Normal
  pages free     5
        high     11
        managed  6400
        protection: (0, 0, 0, 0, 0)
";

    #[test]
    fn a_node_keeps_its_watermarks_and_a_reserve() {
        let page = BASE_PAGE as u64;
        // All of the small zone is protected.
        let managed = 643_840 * page;
        let first = kept(ZONEINFO, NodeId(0));
        assert_eq!(first.bytes, (3840 + 300) * page + managed / 100 + managed / 64);
        assert_eq!(first.zones, [("DMA".into(), 3840), ("Normal".into(), 300)].into());
        assert_eq!(kept(ZONEINFO, NodeId(1)).bytes, (11 + 64 + 100) * page);
        assert_eq!(kept(ZONEINFO, NodeId(7)), Kept::default());
        assert_eq!(free("Node 1 MemTotal: 9 kB\nNode 1 MemFree:    7 kB\n"), 7 << 10);
        assert_eq!(free("MemTotal: 9 kB\nMemFree:    7 kB\n"), 7 << 10);
    }

    #[test]
    fn huge_pages_take_blocks_of_2_mb_and_more() {
        let text = "\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal  72789  28536  12400   5817   2231    818    316    107     35      9    356
Node 1, zone   Normal  72789  28536  12400   5817   2231    818    316    107     35      0      0
Node 11, zone   Normal     0      0      0      0      0      0      0      0      0      1      0      2
";
        let all = BTreeMap::from([("DMA".to_owned(), 3840)]);
        let free = |node| free_blocks(text, NodeId(node), &all);
        // The first zone has to keep all of its pages.
        assert_eq!([free(0), free(1), free(11), free(2)], [9 + 2 * 356, 0, 1 + 4 * 2, 0]);
        let most = BTreeMap::from([("Normal".to_owned(), 512 * 8 + 1)]);
        assert_eq!(free_blocks(text, NodeId(11), &most), 0);
        let less = BTreeMap::from([("Normal".to_owned(), 512 * 8)]);
        assert_eq!(free_blocks(text, NodeId(11), &less), 1);
    }

    #[test]
    fn this_machine_tells_its_room() {
        let node = crate::topology::Topology::read().unwrap().nodes()[0].id;
        let rooms = Rooms::of([node].into_iter()).unwrap();
        // Where the page cache fills the memory, no room is left, but some memory is free.
        assert!(rooms.now(node) < u64::MAX);
        let path = format!("/sys/devices/system/node/node{}/meminfo", node.0);
        let text =
            std::fs::read_to_string(path).or_else(|_| std::fs::read_to_string("/proc/meminfo"));
        assert!(free(&text.unwrap()) > 0);
        assert!(rooms.blocks_now(node) < u64::MAX);
        assert!(rooms.hugetlb_now(node, HUGE as u64) < u64::MAX);
        let unlimited = Rooms::unlimited();
        assert_eq!(unlimited.now(node), u64::MAX);
        assert_eq!(unlimited.blocks_now(node), u64::MAX);
        assert_eq!(unlimited.hugetlb_now(node, HUGE as u64), u64::MAX);
    }
}
