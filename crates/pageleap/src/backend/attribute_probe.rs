//! Reads the attributes of mappings without a walk over their page tables.
//!
//! Only `/proc/self/smaps` tells whether a mapping is locked, or left out of children and core
//! dumps (VmFlags). To print one entry of smaps, the kernel visits every page of the mapping: 30 ms
//! per GB, a quarter of the time that copying the GB takes. So one page of the mapping is
//! duplicated (`mremap` with an old size of 0). The duplicate has the same attributes and no page
//! tables, and it lies below all other mappings, so its entry is the first of the file. Several
//! mappings are duplicated side by side and read at once, because opening the file and removing the
//! duplicates takes longer than reading an entry. The bounds of mappings come from
//! `/proc/self/maps`, which needs no walk; from Linux 6.11 on, a call returns those of one mapping
//! (PROCMAP_QUERY).
//!
//! If this is not possible (on an old kernel, with hugetlb, without a free page at the bottom),
//! smaps is read as it is. Regions of hugetlb pages lie at low addresses, where that is cheap (ADR
//! 27). smaps is also read if `/proc/self/maps` shows a gap or an overlap in a range: Linux 6.17
//! and later print that file without the lock on the address space, while another thread may be
//! moving a neighbour. For smaps the kernel takes the lock.

use std::io::Read;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use pageleap_sys as sys;

use super::Errno;
use crate::error::Error;
use crate::observe::{self, AttributeRun, Attributes};
use crate::sync::{Mutex, lock};
use crate::units::BASE_PAGE;

/// The most mappings that are probed, at some 5 to 20 us each. If there are more, smaps is read as
/// it is.
const MAX_PROBES: usize = 4096;

/// The most duplicates at a time.
pub(crate) const MOST_DUPLICATES: usize = 64;

/// The pages that are reserved for duplicates, if some are. The lock also keeps two probes apart.
static PROBE: Mutex<Option<Range<usize>>> = Mutex::new(None);

/// The process that has reserved these pages: a child made by `fork` may have holes there.
static RESERVED_BY: AtomicU32 = AtomicU32::new(0);

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

/// The mappings of this process, by either way to find their bounds.
enum Mappings {
    /// Each by a call (PROCMAP_QUERY).
    Asked(sys::KeptFd),
    /// All of them, read at once from `/proc/self/maps`.
    Read(Vec<Range<usize>>),
}

impl Mappings {
    fn open() -> std::io::Result<Mappings> {
        let file = sys::open_own("maps")?;
        if sys::mapping_at(file.as_fd(), 0).is_ok() {
            return Ok(Mappings::Asked(file));
        }
        let text = sys::read_own("maps")?;
        let lines = text.split(|byte| *byte == b'\n');
        let ranges = lines.filter_map(|line| range_of(&String::from_utf8_lossy(line)));
        Ok(Mappings::Read(ranges.collect()))
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
    let room = room_below(&mut reserved, mappings.at(0)?.start)?;
    // Parts of ranges, and whether each lies in the same mapping as the one before it.
    let (mut parts, mut joined): (Vec<Range<usize>>, Vec<bool>) = Default::default();
    let (mut last, mut probes) = (None, 0);
    for range in ranges {
        let (seen, mut at) = (parts.len(), range.start);
        while at < range.end {
            // Many small ranges lie in one mapping.
            let known = last.clone().filter(|last: &Range<usize>| last.contains(&at));
            let Some(mapping) = known.or_else(|| mappings.at(at)) else { break };
            let Some(part) = overlap(mapping.clone(), range) else { break };
            at = part.end;
            parts.push(part);
            let is_same = last.replace(mapping.clone()) == Some(mapping);
            joined.push(is_same);
            probes += usize::from(!is_same);
            if probes > MAX_PROBES {
                return None;
            }
        }
        if !covers(&parts[seen..], range) {
            return None;
        }
    }
    // One page of each mapping that is to be read. It has to be one of the caller's pages, because
    // other parts of the mapping may be changing.
    let first = parts.iter().zip(&joined).filter(|(_, joined)| !**joined);
    let pages: Vec<usize> = first.map(|(part, _)| part.start).collect();
    let mut found = Vec::new();
    while found.len() < pages.len() {
        let some = &pages[found.len()..];
        let (attributes, is_ours) = probe(&room, &some[..some.len().min(room.len() / BASE_PAGE)]);
        if !is_ours {
            *reserved = None;
            return None;
        }
        found.extend(attributes.filter(|some| !some.is_empty())?);
    }
    let mut found = found.into_iter();
    let mut runs: Vec<AttributeRun> = Vec::new();
    for (part, joined) in parts.into_iter().zip(joined) {
        let attributes = match runs.last() {
            Some(last) if joined => last.attributes,
            _ => found.next()?,
        };
        runs.push(AttributeRun { start: part.start, end: part.end, attributes });
    }
    Some(observe::joined(runs.into_iter()))
}

/// The reserved pages. If a lower mapping has come since, such as a region of hugetlb pages, its
/// entries would be read before those of duplicates, so other pages are reserved below it.
fn room_below(reserved: &mut Option<Range<usize>>, lowest: usize) -> Option<Range<usize>> {
    let process = std::process::id();
    let own = reserved.clone().filter(|_| RESERVED_BY.load(Relaxed) == process);
    if own.as_ref().is_some_and(|room| room.start <= lowest) {
        return own;
    }
    let Some(room) = reserve_room(lowest) else { return own };
    if let Some(old) = own {
        // SAFETY: reserved by this process, and nobody else uses the pages.
        let _ = unsafe { sys::unmap(old.start, old.len()) };
    }
    RESERVED_BY.store(process, Relaxed);
    Some(reserved.insert(room).clone())
}

/// Reserves pages below the lowest mapping.
fn reserve_room(lowest: usize) -> Option<Range<usize>> {
    let lens = [MOST_DUPLICATES * BASE_PAGE, BASE_PAGE];
    let mut reserved = lens.iter().filter_map(|len| {
        let start = sys::reserve_below(lowest, *len).ok()?;
        Some(start..start + len)
    });
    reserved.next()
}

/// Duplicates mappings to the reserved pages, reads the first entries of smaps, and removes the
/// duplicates. Returns the attributes of as many mappings as could be duplicated, since the limits
/// on mappings and on locked memory may leave room for a few only. Also returns whether the pages
/// are still reserved.
fn probe(room: &Range<usize>, from: &[usize]) -> (Option<Vec<Attributes>>, bool) {
    let places = || room.clone().step_by(BASE_PAGE).zip(from);
    let duplicated = |(place, from): &(usize, &usize)| {
        // SAFETY: the page is ours; the duplicate is gone before this function returns, and the
        // caller's claim keeps `from` as it is.
        unsafe { sys::duplicate_mapping(**from, *place, BASE_PAGE) }.is_ok()
    };
    let made = places().take_while(duplicated).count();
    // The call that failed may have left a hole.
    let is_whole = made == from.len() || {
        let reserved = sys::reserve_at(room.start + made * BASE_PAGE, BASE_PAGE);
        matches!(reserved, Ok(()) | Err(Errno(libc::EEXIST)))
    };
    if made == 0 {
        return (None, is_whole);
    }
    let used = room.start..room.start + made * BASE_PAGE;
    let runs = read_first_entries(&used);
    let of = |place: usize| {
        runs.iter().find(|run| (run.start..run.end).contains(&place)).map(|run| run.attributes)
    };
    let found = places().take(made).map(|(place, _)| of(place)).collect();
    // SAFETY: the pages are ours.
    let vacated = unsafe { sys::vacate(used.start, used.len()) }.is_ok();
    if !vacated {
        // SAFETY: as above. The rest of the reservation goes too: it is made anew.
        let _ = unsafe { sys::unmap(room.start, room.len()) };
    }
    (found, is_whole && vacated)
}

/// The attributes of `range`, whose entries are the first of smaps.
fn read_first_entries(range: &Range<usize>) -> Vec<AttributeRun> {
    /// One read returns as many entries as fit into the buffer. Half a kilobyte is less than one
    /// entry.
    const PART: usize = 512;
    let Ok(mut file) = sys::open_own("smaps") else { return Vec::new() };
    let (mut text, mut buffer) = (Vec::new(), [0u8; 8 * PART]);
    // The end of the range whose entry is being read, and the length of the text that has been
    // parsed.
    let (mut entry_end, mut looked) = (range.start, 0);
    // When the last line of the last entry is complete, reading ends: each further byte may cost a
    // walk over page tables. Duplicates of neighbouring bytes are one entry.
    let mut is_read = false;
    while !is_read {
        let many = range.end.saturating_sub(entry_end) > 8 * BASE_PAGE;
        let part = &mut buffer[..if many { 8 * PART } else { PART }];
        let Some(n) = file.read(part).ok().filter(|n| *n > 0) else { break };
        text.extend_from_slice(&part[..n]);
        while let Some(len) = text[looked..].iter().position(|byte| *byte == b'\n') {
            let line = &text[looked..looked + len];
            looked += len + 1;
            if let Some(entry) = std::str::from_utf8(line).ok().and_then(range_of) {
                entry_end = entry.end;
            }
            is_read |= line.starts_with(b"VmFlags:") && entry_end >= range.end;
        }
    }
    if !is_read {
        return Vec::new();
    }
    observe::attributes_in(&text, range.start, range.len())
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
    fn duplicates_come_before_mappings_that_have_come_since() {
        let linux = Linux;
        let file = linux.create_file("probe", PageSize::Base, BASE_PAGE).unwrap();
        let addr = linux.reserve(BASE_PAGE, BASE_PAGE).unwrap();
        let prot = Prot::READ_WRITE;
        let mapping = Mapping { addr, len: BASE_PAGE, file, offset: 0, prot, populate: true };
        // SAFETY: the range was reserved above, and nobody else knows it.
        unsafe { linux.map(&mapping) }.unwrap();
        let range = addr..addr + BASE_PAGE;
        let look = || {
            let runs = probe_all(std::slice::from_ref(&range));
            assert_eq!(runs, Some(observe::attributes(addr, BASE_PAGE).unwrap()));
            lock(&PROBE).clone().unwrap()
        };
        let before = look();
        let low = sys::reserve_below(before.start, BASE_PAGE).unwrap();
        let since = look();
        assert!(since.end <= low, "{since:x?} and {low:x}");
        // SAFETY: the ranges are ours, and nothing uses the file any more.
        unsafe {
            linux.release(low, BASE_PAGE).unwrap();
            linux.release(addr, BASE_PAGE).unwrap();
            linux.close_file(file);
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
        // Both ways to find the bounds of mappings agree.
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
