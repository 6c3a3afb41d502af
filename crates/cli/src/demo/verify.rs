//! Checks after the leap. Each check reads the memory or asks the kernel, and does not rely on the
//! code that moved the pages.

use std::ops::Range;

/// Mixes all words into one, so that a changed, lost or swapped word shows. It uses four lanes,
/// because one chain of multiplications would be slower than the memory.
pub fn checksum(words: &[u64]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut lanes = [1u64, 2, 3, 4];
    let mix = |lane: u64, word: u64| (lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let mut quads = words.chunks_exact(lanes.len());
    for quad in &mut quads {
        for (lane, word) in lanes.iter_mut().zip(quad) {
            *lane = mix(*lane, *word);
        }
    }
    let rest = quads.remainder().iter().fold(words.len() as u64, |sum, word| mix(sum, *word));
    lanes.into_iter().fold(rest, mix)
}

/// The frames of the region after the leap, compared with those before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frames {
    /// Share of all pages that have another frame now.
    pub changed_ratio: f64,
    /// Pages that the report calls migrated although they still have their old frame.
    pub migrated_unchanged: u64,
}

/// Compares the frame numbers before and after, one per page. `migrated` has the byte ranges that
/// were reported as migrated. A number of 0 means an unknown frame and never counts as changed.
/// Pages outside `migrated` may have new frames too, because the kernel also moves pages on its
/// own.
pub fn compare_frames(
    before: &[u64],
    after: &[u64],
    page_bytes: usize,
    migrated: impl Iterator<Item = Range<usize>>,
) -> Frames {
    let frame = |frames: &[u64], page: usize| frames.get(page).copied().filter(|frame| *frame != 0);
    let differs =
        |page| frame(before, page).zip(frame(after, page)).is_some_and(|(old, new)| old != new);
    let pages = before.len().max(after.len());
    let changed = (0..pages).filter(|page| differs(*page)).count();
    let migrated_unchanged = migrated
        .flat_map(|range| range.start / page_bytes..range.end.div_ceil(page_bytes))
        .filter(|page| !differs(*page))
        .count() as u64;
    Frames { changed_ratio: changed as f64 / pages.max(1) as f64, migrated_unchanged }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_notices_every_kind_of_damage() {
        for len in [0, 1, 3, 4, 7, 64] {
            let words: Vec<u64> = (0..len).collect();
            let sum = checksum(&words);
            assert_eq!(checksum(&words), sum);
            for at in 0..words.len() {
                let mut damaged = words.clone();
                damaged[at] ^= 1 << (at % 64);
                assert_ne!(checksum(&damaged), sum);
                let mut swapped = words.clone();
                swapped.swap(at, 0);
                assert_eq!(checksum(&swapped) == sum, at == 0);
            }
            let mut longer = words.clone();
            longer.push(0);
            assert_ne!(checksum(&longer), sum);
        }
    }

    #[test]
    fn frames_are_compared_page_by_page() {
        let page = 4096;
        let all = |pages: usize| std::iter::once(0..pages * page);
        let frames = compare_frames(&[1, 2, 3, 4], &[5, 6, 7, 8], page, all(4));
        assert_eq!(frames, Frames { changed_ratio: 1.0, migrated_unchanged: 0 });
        let frames = compare_frames(&[1, 2, 3, 4], &[5, 2, 7, 4], page, all(3));
        assert_eq!(frames, Frames { changed_ratio: 0.5, migrated_unchanged: 1 });
        let frames = compare_frames(&[1, 0, 3], &[9, 2, 0], page, all(3));
        assert_eq!(frames.migrated_unchanged, 2, "an unknown frame proves nothing");
        let frames = compare_frames(&[1, 2], &[9, 2], page, std::iter::empty());
        assert_eq!(frames, Frames { changed_ratio: 0.5, migrated_unchanged: 0 });
    }
}
