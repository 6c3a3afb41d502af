//! The page tables of one process, counted from the highest one down.
//!
//! The process goes on meanwhile, and the kernel frees and makes page tables. A page of page table
//! is read and afterwards the entry that points to it is read again: if it still points there, the
//! page was a page table while it was read. Otherwise the walk leaves out what it found below.
//! Pages of PTEs, which are most of them, are not read at all: the entries that point to them tell
//! where they lie.

use std::collections::BTreeMap;

use pageleap::{BASE_PAGE, NodeId};

use super::Reason;
use super::core::{Core, KernelAddress};
use super::nodes::NodesOfMemory;

/// The levels by the kernel's names, from the lowest.
pub const LEVELS: [&str; 5] = ["PTE", "PMD", "PUD", "P4D", "PGD"];

/// The place of PMDs, PUDs, P4Ds and the PGD in [`LEVELS`].
const PMD: usize = 1;
const PUD: usize = 2;
const P4D: usize = 3;
const PGD: usize = 4;

/// The entries of the highest page table that map user space: its lower half.
const USER_ENTRIES: usize = 256;

/// The most reads of pages of page table in one walk: as many as all 128 TB of user space need with
/// four levels, 2^17 pages of PMDs, and 256 of PUDs and one above them, which are read twice.
const MOST_READS: usize = (1 << 17) + 2 * (256 + 1);

/// Bits of an entry (`arch/x86/include/asm/pgtable_types.h`): it is present, and it maps memory
/// itself instead of a page of page table.
const PRESENT: u64 = 1;
const MAPS_MEMORY: u64 = 1 << 7;

/// The physical address in an entry.
const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;

/// Pages of page table by node and level: an array with the levels of [`LEVELS`] for each node.
/// `None` stands for memory whose node the kernel does not tell.
pub type ByNode = BTreeMap<Option<NodeId>, [u64; 5]>;

/// The page tables that a walk has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TablesOfProcess {
    /// The pages.
    pub by_node: ByNode,
    /// Parts that changed while they were read and are left out.
    pub changed: u64,
    /// Whether there were more pages than a walk reads.
    pub is_cut_off: bool,
    /// Whether there are five levels and not four.
    pub has_five_levels: bool,
}

impl TablesOfProcess {
    /// The bytes that the kernel counts as `VmPTE`: PTEs, PMDs and PUDs.
    pub fn counted_bytes(&self) -> u64 {
        let pages: u64 = self.by_node.values().flat_map(|levels| &levels[..=PUD]).sum();
        pages * BASE_PAGE as u64
    }
}

/// An entry of a page of page table, the page that it pointed to, and what was found below that.
type Part = (usize, u64, ByNode);

struct Walk<'a> {
    core: &'a Core,
    nodes: &'a NodesOfMemory,
    reads_left: usize,
    found: TablesOfProcess,
}

/// Counts the page tables below the highest one.
pub(super) fn count(
    core: &Core,
    nodes: &NodesOfMemory,
    root: KernelAddress,
) -> Result<TablesOfProcess, Reason> {
    count_with(core, nodes, root, MOST_READS)
}

/// The same with another limit of reads. Second reads of pages above PMDs go beyond it.
pub(super) fn count_with(
    core: &Core,
    nodes: &NodesOfMemory,
    root: KernelAddress,
    reads: usize,
) -> Result<TablesOfProcess, Reason> {
    let gone = || Reason::new("its highest page table is not in memory any more".to_owned());
    let physical = core.physical(root).ok_or_else(gone)?;
    let mut walk = Walk {
        core,
        nodes,
        reads_left: reads,
        found: TablesOfProcess { has_five_levels: core.has_five_levels, ..Default::default() },
    };
    let mut by_node = walk.below(physical, PGD).ok_or_else(gone)?;
    by_node.entry(nodes.of(physical)).or_default()[PGD] += 1;
    walk.found.by_node = by_node;
    Ok(walk.found)
}

impl Walk<'_> {
    /// Counts what is below a page of page table of this level. `None`: there is no such memory.
    fn below(&mut self, page: u64, level: usize) -> Option<ByNode> {
        let lower = match level {
            PGD if !self.core.has_five_levels => PUD,
            PGD => P4D,
            _ => level - 1,
        };
        let pages = self.entries(page, level)?;
        if level == PMD {
            let mut all = ByNode::new();
            for table in pages.into_iter().flatten() {
                match self.core.page(table) {
                    Some(_) => all.entry(self.nodes.of(table)).or_default()[lower] += 1,
                    None => self.found.changed += 1,
                }
            }
            return Some(all);
        }
        let mut parts: Vec<Part> = Vec::new();
        for (index, table) in pages.into_iter().enumerate() {
            let Some(table) = table else { continue };
            if self.reads_left == 0 {
                self.found.is_cut_off = true;
                break;
            }
            match self.below(table, lower) {
                Some(part) => parts.push((index, table, part)),
                None => self.found.changed += 1,
            }
        }
        let now = self.entries(page, level)?;
        let (all, changed) = still_linked(parts, &now, lower, self.nodes);
        self.found.changed += changed;
        Some(all)
    }

    /// Reads a page of page table: the physical address of the next lower page for each entry that
    /// has one.
    fn entries(&mut self, page: u64, level: usize) -> Option<Vec<Option<u64>>> {
        self.reads_left = self.reads_left.saturating_sub(1);
        let mut bytes = [0; BASE_PAGE];
        self.core.read(self.core.page(page)?, &mut bytes)?;
        let entries = bytes.chunks_exact(8).map(|entry| {
            let entry = u64::from_le_bytes(entry.try_into().expect("eight bytes"));
            let is_table = entry & (PRESENT | MAPS_MEMORY) == PRESENT;
            is_table.then_some(entry & ADDRESS & !self.core.encryption_bits)
        });
        let most = if level == PGD { USER_ENTRIES } else { usize::MAX };
        Some(entries.take(most).collect())
    }
}

/// Adds up parts, and the pages of this level at their heads, if the entries still point to them.
/// The second part is the number of the others.
pub(super) fn still_linked(
    parts: Vec<Part>,
    now: &[Option<u64>],
    level: usize,
    nodes: &NodesOfMemory,
) -> (ByNode, u64) {
    let (mut all, mut changed) = (ByNode::new(), 0);
    for (index, table, part) in parts {
        if now[index] != Some(table) {
            changed += 1;
            continue;
        }
        all.entry(nodes.of(table)).or_default()[level] += 1;
        for (node, levels) in part {
            let sums = all.entry(node).or_default();
            sums.iter_mut().zip(levels).for_each(|(sum, pages)| *sum += pages);
        }
    }
    (all, changed)
}
