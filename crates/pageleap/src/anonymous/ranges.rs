//! Reads the mappings of the ranges of a migration, and splits them into memory that can move in
//! place (private, anonymous and writable) and memory that the kernel has to move.

use std::ops::Range;

use pageleap_sys::{self as sys, Policy};

use super::HUGE;
use super::pages::Pagemap;
use crate::error::Error;
use crate::observe::{self, POOL_FILE, SmapsEntry};
use crate::placement::Placement;
use crate::process::{MappingKind, Movable, ProcessMemory, own_pid};
use crate::units::Call;

/// The mappings in the ranges of a migration.
pub(super) struct RangeMemory {
    /// The mappings, from the first range to the last one.
    pub(super) process: ProcessMemory,
    /// Parts of the ranges that are private, anonymous and writable, each of one mapping.
    /// Ascending.
    pub(super) in_place: Vec<Range<usize>>,
}

impl RangeMemory {
    /// Reads the mappings, and checks that they may move. `in_place_only`: refuses ranges with
    /// memory that cannot move in place.
    pub(super) fn read(ranges: &[Range<usize>], in_place_only: bool) -> Result<Self, Error> {
        let from = ranges.iter().map(|range| range.start).min().unwrap_or(0);
        let to = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        check_for_stacks(ranges)?;
        let mut mappings = observe::mappings(from, to - from)?;
        let inside = |m: &&SmapsEntry| ranges.iter().any(|r| m.start < r.end && m.end > r.start);
        let statics = sys::static_memory();
        let can_move_in_place = |mapping: &SmapsEntry| can_move_in_place(mapping, &statics);
        if !mappings.iter().filter(inside).all(can_move_in_place) {
            // Memory that cannot move in place needs the kernel's engine, which needs the
            // attributes in smaps.
            mappings = observe::smaps(from, to - from)?;
        }
        let mut in_place = Vec::new();
        for range in ranges {
            let parts = check_range(range, &mappings, can_move_in_place, in_place_only)?;
            in_place.extend(parts);
        }
        in_place.sort_by_key(|part| part.start);
        let mut process = ProcessMemory::identity(own_pid()?)?;
        process.set_mappings(&mappings);
        let movable = mappings.iter().zip(&mut process.mappings);
        for (_, known) in movable.filter(|(mapping, _)| can_move_in_place(mapping)) {
            known.movable = Movable::Yes;
        }
        Ok(RangeMemory { process, in_place })
    }

    /// Whether an address can move in place.
    pub(super) fn is_in_place(&self, address: usize) -> bool {
        let at = self.in_place.partition_point(|part| part.end <= address);
        self.in_place.get(at).is_some_and(|part| part.start <= address)
    }

    /// Notes which mappings have huge pages. Returns whether any has.
    pub(super) fn look_for_huge(&mut self, pagemap: &Pagemap) -> bool {
        let mut any = false;
        for mapping in &mut self.process.mappings {
            let parts =
                self.in_place.iter().filter(|p| (mapping.start..mapping.end).contains(&p.start));
            if parts.into_iter().any(|part| pagemap.has_huge(part.clone())) {
                mapping.huge_bytes = mapping.huge_bytes.max(HUGE as u64);
                any = true;
            }
        }
        any
    }

    /// The same by smaps, for the kernel's engine: it also works on kernels without PAGEMAP_SCAN,
    /// and counts the pages of a huge page correctly only if it knows of huge pages.
    pub(super) fn look_for_huge_in_smaps(&mut self) -> Result<(), Error> {
        let (Some(first), Some(last)) =
            (self.process.mappings.first(), self.process.mappings.last())
        else {
            return Ok(());
        };
        let entries = observe::smaps(first.start, last.end - first.start)?;
        for known in &mut self.process.mappings {
            let inside = |entry: &&SmapsEntry| entry.start < known.end && entry.end > known.start;
            let huge_kb = entries.iter().filter(inside).map(|entry| entry.kb("AnonHugePages"));
            let huge_bytes = huge_kb.sum::<usize>() << 10;
            known.huge_bytes = known.huge_bytes.max(huge_bytes as u64);
        }
        Ok(())
    }

    /// Sets the memory policy of the private memory in a range to that of its placement (mbind), so
    /// that later first touches follow it, and the kernel's NUMA balancing leaves the pages there.
    pub(super) fn set_policy(&self, range: &Range<usize>, to: &Placement) -> Result<(), Error> {
        for mapping in &self.process.mappings {
            let start = mapping.start.max(range.start);
            let len = mapping.end.min(range.end).saturating_sub(start);
            let is_private = mapping.access.ends_with('p') && mapping.kind != MappingKind::Special;
            if len == 0 || !is_private {
                continue;
            }
            let nodes: Vec<u32> = to.nodes().map(|node| node.0).collect();
            // SAFETY: the caller of the library vouches for the range. The policy changes no
            // contents.
            unsafe {
                match nodes[..] {
                    [node] => sys::bind(start, len, Policy::Preferred(node)),
                    _ => sys::interleave(start, len, &nodes),
                }
            }
            .map_err(|errno| Error::call(Call::Bind, start, len, errno))?;
        }
        Ok(())
    }
}

/// Whether memory is private, anonymous and writable, and contains no static variables: windows
/// need the library's own. Stacks have been checked for before.
fn can_move_in_place(mapping: &SmapsEntry, statics: &[Range<usize>]) -> bool {
    if statics.iter().any(|part| part.start < mapping.end && part.end > mapping.start) {
        return false;
    }
    let is_anonymous =
        mapping.name.is_empty() || ["[heap", "[anon:"].iter().any(|n| mapping.name.starts_with(n));
    // Pages of special mappings (VM_PFNMAP and the like) show in smaps only; userfaultfd refuses
    // them.
    is_anonymous && mapping.perms.starts_with("rw") && mapping.perms.ends_with('p')
}

fn bad(range: &Range<usize>, reason: &str, at: usize, remedy: &str) -> Error {
    Error::BadArgument {
        what: "range",
        reason: format!("{:#x}-{:#x}: {reason} at {at:#x}", range.start, range.end),
        remedy: remedy.into(),
    }
}

/// Checks a range, and returns the parts of it that can move in place.
fn check_range(
    range: &Range<usize>,
    mappings: &[SmapsEntry],
    can_move_in_place: impl Fn(&SmapsEntry) -> bool,
    in_place_only: bool,
) -> Result<Vec<Range<usize>>, Error> {
    let mut in_place = Vec::new();
    let mut at = range.start;
    let inside = |m: &&SmapsEntry| m.start < range.end && m.end > range.start;
    for mapping in mappings.iter().filter(inside) {
        if mapping.start > at {
            break;
        }
        let start = mapping.start.max(range.start);
        if mapping.name.starts_with("[stack") {
            return Err(bad(range, "a stack lies", start, "leave stacks where they are"));
        }
        if mapping.name.contains(POOL_FILE) {
            return Err(bad(range, "memory of a region lies", start, "use Migration for regions"));
        }
        at = mapping.end;
        if can_move_in_place(mapping) {
            in_place.push(start..at.min(range.end));
        } else if in_place_only {
            return Err(bad(
                range,
                "memory that is not private, anonymous and writable, or has static variables, lies",
                start,
                "leave it out, or let the engine be chosen (auto)",
            ));
        }
    }
    if at < range.end {
        return Err(bad(range, "nothing is mapped", at, "name mapped memory only"));
    }
    Ok(in_place)
}

/// Refuses ranges that contain the stack of a thread, as far as stacks are known.
fn check_for_stacks(ranges: &[Range<usize>]) -> Result<(), Error> {
    let stack = "the stack of a thread lies";
    let overlaps = |range: &&Range<usize>, other: &Range<usize>| {
        range.start < other.end && other.start < range.end
    };
    let one = |at: usize| at..at + 1;
    let of_others = observe::stack_pointers().into_iter().map(one);
    for part in of_others.chain(sys::own_stack()) {
        if let Some(range) = ranges.iter().find(|range| overlaps(range, &part)) {
            let at = part.start.max(range.start);
            return Err(bad(range, stack, at, "leave stacks where they are"));
        }
    }
    Ok(())
}
