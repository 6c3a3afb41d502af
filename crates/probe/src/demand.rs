//! The leap that a machine is asked about: its bytes, and the size of its pages.

use std::fmt;

use pageleap::for_probe::human_bytes;
use pageleap::{BASE_PAGE, PageSize};

use crate::finding::{Finding, Need, State};

/// The need that pages of a size add to those of every leap.
const fn need_of(page: PageSize) -> Need {
    match page {
        PageSize::Base => Need::Leap,
        PageSize::Thp => Need::Thp,
        PageSize::Huge2M => Need::Huge2M,
        PageSize::Huge1G => Need::Huge1G,
    }
}

/// A leap that the machine is asked about: a region that moves from one pool into another of the
/// same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Bytes of the region; `None` if only the few pages of a trial are meant.
    pub bytes: Option<u64>,
    /// The size of its pages.
    pub page: PageSize,
}

impl Default for Demand {
    fn default() -> Self {
        Demand { bytes: None, page: PageSize::Base }
    }
}

impl Demand {
    /// Base pages that a trial moves.
    const TRIAL_PAGES: usize = 16;

    /// Bytes of a trial's region.
    pub const fn trial_bytes(&self) -> usize {
        match self.page {
            PageSize::Base => Demand::TRIAL_PAGES * BASE_PAGE,
            other => other.bytes(),
        }
    }

    /// Bytes of each pool, and of the region: whole pages.
    pub fn pool_bytes(&self) -> u64 {
        let page = self.page.bytes() as u64;
        let bytes = self.bytes.unwrap_or(self.trial_bytes() as u64).max(1);
        bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX / page * page)
    }

    /// Whether a finding makes the leap impossible.
    pub fn is_blocked_by(&self, finding: &Finding) -> bool {
        let need = finding.topic.needed_by();
        finding.state == State::Missing && (need == Need::Leap || need == need_of(self.page))
    }
}

impl fmt::Display for Demand {
    /// As in "too little memory for a leap of 64 GB in pages of 4k".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            Some(bytes) => write!(f, "a leap of {} in pages of {}", human_bytes(bytes), self.page),
            None => write!(f, "a leap of a few pages of {}", self.page),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Topic;

    #[test]
    fn sizes_are_whole_pages_and_never_overflow() {
        let of = |bytes, page| Demand { bytes, page }.pool_bytes();
        assert_eq!(of(None, PageSize::Base), 65536);
        assert_eq!(of(None, PageSize::Huge1G), 1 << 30);
        assert_eq!(of(Some(1), PageSize::Huge2M), 2 << 20);
        assert_eq!(of(Some(0), PageSize::Base), 4096);
        assert_eq!(of(Some(u64::MAX), PageSize::Base) % 4096, 0);
    }

    #[test]
    fn what_blocks_a_leap_depends_on_its_pages() {
        let missing = Finding::missing(Topic::Hugetlb2M, "", "");
        assert!(!Demand::default().is_blocked_by(&missing));
        assert!(Demand { bytes: None, page: PageSize::Huge2M }.is_blocked_by(&missing));
        assert!(Demand::default().is_blocked_by(&Finding::missing(Topic::PlacementQuery, "", "")));
        assert!(!Demand::default().is_blocked_by(&Finding::limited(Topic::Mappings, "", "")));
    }
}
