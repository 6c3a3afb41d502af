//! Warns of ranges that end within transparent huge pages.
//!
//! The kernel moves a transparent huge page as a whole, so more pages may move than the range has.
//! This module does not query which pages are huge, because that changes all the time. It uses the
//! kernel's count of huge pages in a mapping, and their alignment.

use super::{HUGE, Part};
use crate::job::report::{Warning, WarningKind};
use crate::process::MappingMemory;
use crate::units::BASE_PAGE;

/// The warning of a report about ends of ranges within huge pages, if there are any.
pub(super) fn warning(parts: &[Part<'_>]) -> Option<Warning> {
    let mut ends = Vec::new();
    for Part { memory, addresses, .. } in parts {
        let splits = |at: &usize| {
            let next = memory.mappings.partition_point(|mapping| mapping.end <= *at);
            memory.mappings.get(next).is_some_and(|mapping| may_split_huge_page(mapping, *at))
        };
        ends.extend([addresses.start, addresses.end].into_iter().filter(splits));
    }
    let which = match &ends[..] {
        [] => return None,
        [end] => format!("the end {end:#x} of a range"),
        [first, ..] => format!("{} ends of ranges, such as {first:#x},", ends.len()),
    };
    let text = format!(
        "{which} may lie within transparent huge pages: each of them moves as a whole, so up to 2 \
         MB beyond a range move with it, which are not counted"
    );
    Some(Warning::new(WarningKind::Edges, text))
}

/// Whether the pages before and behind an address may be parts of one huge page.
fn may_split_huge_page(mapping: &MappingMemory, at: usize) -> bool {
    let block = at & !(HUGE - 1);
    at != block
        && mapping.page_bytes == BASE_PAGE as u64
        && mapping.huge_bytes > 0
        && mapping.start <= block
        && block + HUGE <= mapping.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessMemory;
    use crate::units::NodeId;

    /// The warning about a range of a mapping.
    fn about(mapped: [usize; 2], huge_bytes: u64, range: [usize; 2]) -> Option<String> {
        let mut memory = ProcessMemory::modelled(mapped[0]..mapped[1]);
        memory.mappings[0].huge_bytes = huge_bytes;
        let part = Part { memory: &memory, addresses: range[0]..range[1], to: NodeId(0).into() };
        warning(&[part]).map(|warning| warning.text)
    }

    #[test]
    fn only_ends_within_whole_huge_pages_are_told() {
        let mapped = [HUGE / 2, 4 * HUGE + HUGE / 2];
        let told = |huge_bytes, range| about(mapped, huge_bytes, range);
        let page = HUGE as u64;
        let one = told(page, [HUGE, HUGE + BASE_PAGE]).unwrap();
        assert!(one.starts_with("the end 0x201000 of a range may lie"), "{one}");
        let both = told(page, [2 * HUGE + BASE_PAGE, 4 * HUGE - BASE_PAGE]).unwrap();
        assert!(both.starts_with("2 ends of ranges, such as 0x401000, may lie"), "{both}");
        // Nothing is huge; ends of huge pages; ends of the mapping, where no huge page fits.
        assert_eq!(told(0, [HUGE, HUGE + BASE_PAGE]), None);
        assert_eq!(told(page, [HUGE, 4 * HUGE]), None);
        assert_eq!(told(page, mapped), None);
        assert_eq!(told(page, [mapped[0] + BASE_PAGE, mapped[1] - BASE_PAGE]), None);
    }
}
