//! Which part of which pool's memory file each page of a region maps.
//!
//! The kernel migrates pages by itself (compaction, for example when huge pages are reserved), so
//! that physical frame numbers change at any time. The file offset behind an address changes only
//! if somebody maps something else there.

use std::ops::Range;

use pageleap::Region;

use super::process::address;

/// A page of a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Major and minor number of the device, and the inode: names of files may be equal.
    file: (u32, u32, u64),
    /// Offset in the file.
    offset: usize,
}

/// The place of each page of a region.
pub fn places(region: &Region) -> Vec<Option<Place>> {
    places_in(address(region)..address(region) + region.len(), region.page_size().bytes())
}

/// The place of each page of an address range; `None` for a page that maps no file of a pool.
///
/// Other threads may map and unmap memory meanwhile, because the kernel lists every mapping that
/// nobody changes. A mapping that grows may be listed twice, and both lines are right.
pub fn places_in(addresses: Range<usize>, page: usize) -> Vec<Option<Place>> {
    let mut places = vec![None; addresses.len() / page];
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains("/memfd:pageleap:")) {
        let (mapped, first) = parse(line).expect("a line of maps");
        let from = mapped.start.max(addresses.start);
        for at in (from..mapped.end.min(addresses.end)).step_by(page) {
            let offset = first.offset + (at - mapped.start);
            places[(at - addresses.start) / page] = Some(Place { offset, ..first });
        }
    }
    places
}

/// The addresses of a mapping, and what the first of them maps, by a line such as
/// `7f0000000000-7f0000010000 rw-s 00002000 00:01 1027    /memfd:pageleap:node0 (deleted)`.
fn parse(line: &str) -> Option<(Range<usize>, Place)> {
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let mut words = line.split_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let offset = hex(words.nth(1)?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = [major, minor].map(|number| u32::from_str_radix(number, 16).ok());
    let file = (device[0]?, device[1]?, words.next()?.parse().ok()?);
    Some((hex(from)?..hex(to)?, Place { file, offset }))
}

/// Checks that no place is mapped twice.
pub fn each_place_once(places: &[Option<Place>]) {
    let mut sorted: Vec<Place> = places.iter().copied().flatten().collect();
    sorted.sort_unstable();
    let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]);
    assert_eq!(twice, None, "a frame is mapped twice");
}

/// The places of a region's pages, and their physical frame numbers if the kernel shows them.
pub struct Kept {
    places: Vec<Option<Place>>,
    frames: Option<Vec<u64>>,
}

impl Kept {
    pub fn of(region: &Region) -> Kept {
        Kept { places: places(region), frames: region.frame_numbers().unwrap() }
    }

    /// Checks that the data has stayed where it was. Compaction may have changed some physical frames,
    /// but not most of them.
    pub fn check(&self, region: &Region) {
        let now = Kept::of(region);
        let mut pages = self.places.iter().zip(&now.places).enumerate();
        let moved = pages.find(|(_, (then, now))| now.is_some() && then != now);
        assert_eq!(moved, None, "a page has another frame");
        let (Some(then), Some(now)) = (&self.frames, &now.frames) else { return };
        // The number of a page without an entry is 0.
        let shown = then.iter().zip(now).filter(|(then, now)| **then != 0 && **now != 0);
        let (same, other): (Vec<_>, Vec<_>) = shown.partition(|(then, now)| then == now);
        let (same, other) = (same.len(), other.len());
        assert!(same > other, "{other} pages have been copied, {same} have not");
    }
}
