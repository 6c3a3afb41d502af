//! What the kernel moves as a whole: huge pages that smaps does not show, huge pages for which a
//! node has no free block, and the pools of hugetlb.

mod common;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;

use common::{in_lab, skip};
use machine_settings::Setting;
use mapping::{Mapping, nodes_of};
use nodes::several;
use pageleap::process::{ProcessMemory, own_pid};
use pageleap::{BASE_PAGE, KernelMigration, NodeId, Placement, Reason, Report};

const HUGE: usize = 2 << 20;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Memory in transparent huge pages on a node, each of them whole.
struct HugePages {
    mapping: Mapping,
    /// The part that is whole huge pages.
    range: Range<usize>,
}

impl HugePages {
    /// `None`: the kernel gave other pages.
    fn new(count: usize, node: NodeId) -> Option<HugePages> {
        let mapping = Mapping::new((count + 1) * HUGE, PRIVATE);
        mapping.advise(libc::MADV_HUGEPAGE);
        mapping.advise(libc::MADV_DONTFORK);
        mapping.fill(node);
        let start = mapping.start.next_multiple_of(HUGE);
        let found = HugePages { mapping, range: start..start + count * HUGE };
        (found.huge_bytes() >= count * HUGE).then_some(found)
    }

    /// Bytes that are mapped by huge pages, of the whole mapping.
    fn huge_bytes(&self) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut inside, mut kb) = (false, 0);
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((start, _)) = first.split_once('-') {
                let start = usize::from_str_radix(start, 16).unwrap();
                inside = self.mapping.range().contains(&start);
            } else if inside && first == "AnonHugePages:" {
                kb += words.next().unwrap().parse::<usize>().unwrap();
            }
        }
        kb << 10
    }

    /// Maps them by base pages. They stay what they are.
    fn map_by_base_pages(&self) {
        let first = self.mapping.start / HUGE * HUGE;
        for block in (first..self.mapping.range().end).step_by(HUGE) {
            let block = block.max(self.mapping.start);
            for access in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
                // SAFETY: a page of the mapping, to which nobody writes meanwhile.
                assert_eq!(unsafe { libc::mprotect(block as *mut _, BASE_PAGE, access) }, 0);
            }
        }
    }

    fn on(&self, node: NodeId) -> usize {
        let pages = self.range.clone().step_by(BASE_PAGE).collect();
        nodes_of(own_pid().unwrap(), pages).get(&Some(node)).copied().unwrap_or(0)
    }

    fn move_to(&self, to: impl Into<Placement>, fill: bool) -> Report {
        let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
        let migration = KernelMigration::new().range(&memory, self.range.clone(), to).fill(fill);
        migration.start().unwrap().wait()
    }
}

/// Pages of a report that have this reason.
fn with_reason(report: &Report, reason: Reason) -> usize {
    let runs = report.runs.iter().filter(|run| run.reason == Some(reason));
    runs.map(|run| run.range.len() / BASE_PAGE).sum()
}

#[test]
fn huge_pages_that_are_mapped_by_base_pages_are_spread_evenly() {
    const NAME: &str = "huge_pages_that_are_mapped_by_base_pages_are_spread_evenly";
    let Some(nodes) = several(NAME) else { return };
    for heavy in [1, 3] {
        let Some(memory) = HugePages::new(16, nodes[0]) else {
            return skip(NAME, &"the kernel gave no huge pages");
        };
        memory.map_by_base_pages();
        assert_eq!(memory.huge_bytes(), 0);
        let to = Placement::weighted([(nodes[0], heavy), (nodes[1], 1)]);
        let report = memory.move_to(to, false);
        assert!(report.ended.is_completed(), "{report}");
        let pages = memory.range.len() / BASE_PAGE;
        let (on, wanted) = (memory.on(nodes[1]), pages / (heavy as usize + 1));
        // How the blocks lie to the round of the stripes is chance: one more or less.
        assert!(on.abs_diff(wanted) <= 512, "{heavy}:1: {on} instead of {wanted}: {report}");
        assert_eq!(memory.on(nodes[0]) + on, pages);
        assert_eq!(with_reason(&report, Reason::MovedOn), 0, "{report}");
        assert_eq!(report.pages.migrated as usize, on, "{report}");
        memory.mapping.check();
    }
}

/// Counts of the kernel that say how hard it was to find memory.
fn troubles() -> BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let is_trouble = |name: &str| {
        name.starts_with("allocstall") || ["compact_stall", "thp_split_page"].contains(&name)
    };
    let words = text.lines().filter_map(|line| line.split_once(' '));
    let words = words.filter(|(name, _)| is_trouble(name));
    words.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// How many huge pages the free blocks of a node can be.
fn free_blocks(node: NodeId) -> u64 {
    let text = fs::read_to_string("/proc/buddyinfo").unwrap();
    let head = format!("Node {}, zone", node.0);
    let zones = text.lines().filter_map(|line| line.strip_prefix(&head));
    let blocks = zones.flat_map(|zone| zone.split_whitespace().skip(1 + 9).enumerate());
    blocks.map(|(order, count)| count.parse::<u64>().unwrap() << order).sum()
}

/// Takes all memory of a node that it gives, and gives each fourth page back. It locks the other
/// ones, so that compaction does not make blocks of what is free.
fn in_pieces(node: NodeId) -> Mapping {
    // Pages of files could be dropped or moved.
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    let file = format!("/sys/devices/system/node/node{}/meminfo", node.0);
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
    let free = line.split_whitespace().nth(3).unwrap().parse::<usize>().unwrap() << 10;
    let hog = Mapping::own(free);
    let mask = 1u64 << node.0;
    // Beyond its watermarks, pages come from other nodes.
    let mode = libc::MPOL_PREFERRED;
    // SAFETY: the mapping's own range, and a mask of one word.
    let bound = unsafe {
        libc::syscall(libc::SYS_mbind, hog.start, hog.len, mode, &raw const mask, 64usize, 0)
    };
    assert_eq!(bound, 0);
    for page in hog.pages() {
        // SAFETY: a word of the mapping.
        unsafe { (page as *mut u64).write_volatile(1) };
    }
    for page in hog.pages().step_by(4) {
        // SAFETY: a page of the mapping whose contents nobody needs.
        assert_eq!(unsafe { libc::madvise(page as *mut _, BASE_PAGE, libc::MADV_DONTNEED) }, 0);
    }
    // SAFETY: the mapping's own range.
    assert_eq!(unsafe { libc::mlock2(hog.start as *const _, hog.len, libc::MLOCK_ONFAULT) }, 0);
    hog
}

#[test]
fn a_huge_page_without_a_free_block_stays_whole() {
    const NAME: &str = "a_huge_page_without_a_free_block_stays_whole";
    let Some(nodes) = several(NAME) else { return };
    if !in_lab() {
        return skip(NAME, &"taking a node's memory is for machines of the lab");
    }
    const PAGES: usize = 96;
    let Some(memory) = HugePages::new(PAGES, nodes[0]) else {
        return skip(NAME, &"the kernel gave no huge pages");
    };
    let _locked_pages_stay = Setting::new("/proc/sys/vm/compact_unevictable_allowed", "0");
    let hog = in_pieces(nodes[1]);
    assert!(free_blocks(nodes[1]) < PAGES as u64 / 2, "{}", free_blocks(nodes[1]));
    let (before, huge) = (troubles(), memory.huge_bytes());
    let report = memory.move_to(nodes[1], false);
    assert_eq!(troubles(), before, "{report}");
    assert_eq!(memory.huge_bytes(), huge, "{report}");
    // How many blocks the node still has is chance: some of them are in no list of free blocks,
    // because each CPU keeps a few.
    let left = with_reason(&report, Reason::NoFreeBlock);
    assert!(left > 0, "{report}");
    assert_eq!(left as u64, report.pages.failed, "{report}");
    // Where that is allowed, the kernel splits pages, and the rest moves.
    let report = memory.move_to(nodes[1], true);
    assert!(report.ended.is_completed(), "{report}");
    memory.mapping.check();
    drop(hog);
}

/// The pool of 2 MB pages of a node. It is as large as before when the value is dropped.
struct HugetlbPool {
    file: String,
    before: u64,
}

impl HugetlbPool {
    fn of(node: NodeId) -> HugetlbPool {
        let folder = format!("/sys/devices/system/node/node{}/hugepages", node.0);
        let file = format!("{folder}/hugepages-2048kB/nr_hugepages");
        let before = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        HugetlbPool { file, before }
    }

    fn pages(&self) -> u64 {
        fs::read_to_string(&self.file).unwrap().trim().parse().unwrap()
    }

    fn set(&self, pages: u64) {
        fs::write(&self.file, pages.to_string()).unwrap();
    }
}

impl Drop for HugetlbPool {
    fn drop(&mut self) {
        self.set(self.before);
    }
}

#[test]
fn pools_of_reserved_huge_pages_stay_as_large_as_they_are() {
    const NAME: &str = "pools_of_reserved_huge_pages_stay_as_large_as_they_are";
    let Some(nodes) = several(NAME) else { return };
    if !in_lab() {
        return skip(NAME, &"pools of huge pages are changed on machines of the lab only");
    }
    let pools = [HugetlbPool::of(nodes[0]), HugetlbPool::of(nodes[1])];
    let sizes = || [pools[0].pages(), pools[1].pages()];
    pools.iter().for_each(|pool| pool.set(16));
    assert_eq!(sizes(), [16, 16], "the pools could not be set");
    let mapping = Mapping::new(8 * HUGE, PRIVATE | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB);
    mapping.fill(nodes[0]);
    let move_to = |node, fill| {
        let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
        let migration = KernelMigration::new().range(&memory, mapping.range(), node).fill(fill);
        migration.start().unwrap().wait()
    };
    // With free pages there, and back.
    for node in [nodes[1], nodes[0]] {
        let report = move_to(node, false);
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(mapping.on_nodes(), BTreeMap::from([(Some(node), 8 * 512)]));
        assert_eq!(sizes(), [16, 16], "{report}");
    }
    // With five of them.
    pools[1].set(5);
    assert_eq!(sizes(), [16, 5]);
    let report = move_to(nodes[1], false);
    assert_eq!(with_reason(&report, Reason::NoRoom), 3 * 512, "{report}");
    assert_eq!(report.pages.migrated, 5 * 512, "{report}");
    assert_eq!(sizes(), [16, 5], "{report}");
    let report = move_to(nodes[1], true);
    assert!(report.ended.is_completed(), "{report}");
    assert_ne!(sizes(), [16, 5], "{report}");
    mapping.check();
}
