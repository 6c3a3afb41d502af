//! Reading the attributes of a mapping without a walk over its page tables.
//!
//! Only smaps tells whether a mapping is locked, or kept from children and core dumps. To print one
//! entry of smaps, the kernel visits every page of the mapping: 30 ms per GB, a quarter of the time
//! that copying the GB takes. So one page of the mapping is duplicated. The duplicate has the same
//! attributes and no page tables, and it lies below all other mappings, so that its entry is the
//! first of the file. `/proc/self/maps` tells the bounds and the access of mappings without a walk,
//! and from Linux 6.11 on those of one mapping (PROCMAP_QUERY).
//!
//! If this is not possible (on an old kernel, with hugetlb, without a free page at the bottom),
//! smaps is read as it is. The same happens if `/proc/self/maps` shows a gap or an overlap in a
//! range. Linux 6.17 and later print that file without the lock on the address space, while another
//! thread may be moving a neighbour. For smaps the kernel takes the lock.

use std::io::Read;
use std::ops::Range;
use std::os::fd::AsFd;

use pageleap_sys as sys;

use super::Errno;
use crate::error::Error;
use crate::observe::{self, AttributeRun};
use crate::sync::{Mutex, lock};
use crate::units::BASE_PAGE;

/// Most mappings that are probed, at some 20 us each. Of more, smaps is read as it is.
const MAX_PROBES: usize = 256;

/// The page that is reserved for duplicates, if one is. The lock also keeps two probes apart.
static PROBE: Mutex<Option<usize>> = Mutex::new(None);

/// The attributes of ranges; see [`super::Backend::attributes`].
pub(super) fn attributes(ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
    if let Some(runs) = probe_all(ranges) {
        return Ok(runs);
    }
    let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(Vec::new()) };
    let runs = observe::attributes(first.start, last.end - first.start)?;
    let within = |r: &Range<usize>| {
        let r = r.clone();
        let parts = runs
            .iter()
            .filter_map(move |run| overlap(run.start..run.end, &r).map(|p| (p, run.attributes)));
        parts
            .map(|(part, attributes)| AttributeRun { start: part.start, end: part.end, attributes })
            .collect::<Vec<_>>()
    };
    Ok(observe::joined(ranges.iter().flat_map(within)))
}

fn overlap(a: Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

/// Whether the parts of a range follow each other without gap or overlap.
fn covers(parts: &[Range<usize>], range: &Range<usize>) -> bool {
    let end =
        parts.iter().try_fold(range.start, |end, part| (part.start == end).then_some(part.end));
    end == Some(range.end)
}

/// The mappings of this process, as they are asked about.
enum Mappings {
    /// Each by a call.
    Asked(sys::KeptFd),
    /// All of them, read at once.
    Read(Vec<Range<usize>>),
}

impl Mappings {
    fn open() -> std::io::Result<Mappings> {
        let mut file = sys::open_own("maps")?;
        if sys::mapping_at(file.as_fd(), 0).is_ok() {
            return Ok(Mappings::Asked(file));
        }
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        Ok(Mappings::Read(text.lines().filter_map(range_of).collect()))
    }

    /// The mapping at an address, or the next one.
    fn at(&self, addr: usize) -> Option<Range<usize>> {
        match self {
            Mappings::Asked(file) => sys::mapping_at(file.as_fd(), addr).ok(),
            Mappings::Read(all) => all.get(all.partition_point(|m| m.end <= addr)).cloned(),
        }
    }
}

fn probe_all(ranges: &[Range<usize>]) -> Option<Vec<AttributeRun>> {
    let mappings = Mappings::open().ok()?;
    let mut reserved = lock(&PROBE);
    let page = match *reserved {
        Some(page) => page,
        None => *reserved.insert(sys::reserve_below(mappings.at(0)?.start, BASE_PAGE).ok()?),
    };
    let mut parts: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        let (seen, mut at) = (parts.len(), range.start);
        while let Some(mapping) = mappings.at(at).filter(|_| at < range.end) {
            let Some(part) = overlap(mapping, range) else { break };
            at = part.end;
            parts.push(part);
            if parts.len() > MAX_PROBES {
                return None;
            }
        }
        if !covers(&parts[seen..], range) {
            return None;
        }
    }
    let mut runs = Vec::new();
    for part in parts {
        // The page is the part's own: other parts of the mapping may be changing.
        let (run, is_ours) = probe(page, part.start);
        if !is_ours {
            *reserved = None;
        }
        let run = run?;
        runs.push(AttributeRun { start: part.start, end: part.end, ..run });
    }
    Some(observe::joined(runs.into_iter()))
}

/// Duplicates the mapping at `from` to the reserved page, reads the first entry of smaps, and
/// removes the duplicate. Also returns whether the page is still reserved.
fn probe(page: usize, from: usize) -> (Option<AttributeRun>, bool) {
    // SAFETY: the page is ours; the duplicate is gone before this function returns, and the
    // caller's claim keeps `from` as it is.
    if unsafe { sys::duplicate_mapping(from, page, BASE_PAGE) }.is_err() {
        // The call may have left a hole.
        let reserved = sys::reserve_at(page, BASE_PAGE);
        return (None, matches!(reserved, Ok(()) | Err(Errno(libc::EEXIST))));
    }
    let mut file = sys::open_own("smaps").ok();
    // The kernel makes as many entries as fit into the buffer; half a kilobyte is less than one.
    let mut text = Vec::new();
    let mut part = [0u8; 512];
    while let Some(n) = file.as_mut().and_then(|f| f.read(&mut part).ok()).filter(|n| *n > 0) {
        text.extend_from_slice(&part[..n]);
        // When the last line of the first entry is complete, reading ends: each further byte may
        // cost a walk over page tables.
        let flags = text.windows(8).position(|w| w == b"VmFlags:");
        if flags.is_some_and(|at| text[at..].contains(&b'\n')) {
            break;
        }
    }
    let run = observe::attributes_in(&text, page, BASE_PAGE).pop().filter(|run| run.start == page);
    // SAFETY: the page is ours.
    let vacated = unsafe { sys::vacate(page, BASE_PAGE) }.is_ok();
    if !vacated {
        // SAFETY: as above.
        let _ = unsafe { sys::unmap(page, BASE_PAGE) };
    }
    (run, vacated)
}

fn range_of(line: &str) -> Option<Range<usize>> {
    let (from, rest) = line.split_once('-')?;
    let (to, _) = rest.split_once(' ')?;
    Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::backend::{Advice, Backend, Linux, Mapping, Prot};
    use crate::units::PageSize;

    #[test]
    fn a_gap_or_an_overlap_in_a_range_is_seen() {
        let range = 10..20;
        let whole = |cuts: &[(usize, usize)]| {
            let parts: Vec<_> = cuts.iter().map(|(start, end)| *start..*end).collect();
            covers(&parts, &range)
        };
        assert!(whole(&[(10, 20)]) && whole(&[(10, 14), (14, 20)]));
        for parts in
            [&[][..], &[(12, 20)], &[(10, 18)], &[(10, 14), (15, 20)], &[(10, 14), (10, 20)]]
        {
            assert!(!whole(parts), "{parts:?}");
        }
    }

    #[test]
    fn the_probe_and_smaps_agree() {
        let linux = Linux;
        let len = 8 * BASE_PAGE;
        let file = linux.create_file("probe", PageSize::Base, len).unwrap();
        let addr = linux.reserve(len, BASE_PAGE).unwrap();
        let mapping =
            Mapping { addr, len, file, offset: 0, prot: Prot::READ_WRITE, populate: true };
        let page = |i: usize| addr + i * BASE_PAGE;
        // SAFETY: the range was reserved above, and nobody else knows it.
        unsafe {
            linux.map(&mapping).unwrap();
            linux.advise(page(1), 2 * BASE_PAGE, Advice::DontFork).unwrap();
            linux.advise(page(2), 2 * BASE_PAGE, Advice::DontDump).unwrap();
            linux.advise(page(5), BASE_PAGE, Advice::Random).unwrap();
            linux.lock(page(4), BASE_PAGE, false).unwrap();
            linux.protect(page(6), BASE_PAGE, Prot::READ).unwrap();
            linux.protect(page(7), BASE_PAGE, Prot::NONE).unwrap();
        }
        let all = addr..addr + len;
        let probed = probe_all(std::slice::from_ref(&all))
            .expect("this kernel can duplicate a shared mapping");
        assert_eq!(probed, observe::attributes(addr, len).unwrap());
        assert_eq!(probed.len(), 8, "{probed:?}");
        // However the bounds of mappings are told.
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let read = Mappings::Read(text.lines().filter_map(range_of).collect());
        let asked = Mappings::open().unwrap();
        for at in [page(0), page(1) + 5, page(3), page(7)] {
            assert_eq!(asked.at(at), read.at(at), "{at:#x}");
        }
        let inner = probe_all(&[page(1)..page(2), page(2)..page(3), page(7)..page(8)]).unwrap();
        let bounds: Vec<_> = inner.iter().map(|r| (r.start, r.end)).collect();
        assert_eq!(bounds, [(page(1), page(2)), (page(2), page(3)), (page(7), page(8))]);
        // SAFETY: the range is ours.
        unsafe { linux.release(addr, len) }.unwrap();
        // SAFETY: nothing uses it any more.
        unsafe { linux.close_file(file) };
    }
}
