//! What an attempt needs to have before it begins: pages that are still the job's, and descriptors
//! that are still the library's.

use std::ops::Range;

use super::mover::{FrameMover, Place};
use crate::engine::Work;
use crate::engine::choice::AreaEngine;
use crate::engine::commit::Effort;
use crate::error::Error;
use crate::job::area::{Area, Outcome, Reason, Verdict};
use crate::pool::Share;
use crate::region::Gone;
use crate::sync::lock;

/// The outcome where calls have withdrawn pages of an area, or wait for them. The others have not
/// been tried.
pub(super) fn withdrawn(by: AreaEngine, gone: Gone) -> Outcome {
    let left = |pages| (pages, Verdict::Left(Some(Reason::Discarded)));
    let kept = |pages| (pages, Verdict::Kept(Reason::Discarded));
    let Gone { withdrawn, waited_for } = gone;
    let mut runs: Vec<_> = withdrawn.into_iter().map(left).collect();
    runs.extend(waited_for.into_iter().map(kept));
    runs.sort_by_key(|(pages, _): &(Range<u64>, _)| pages.start);
    Outcome { runs, by, effort: Effort::default(), seen: None, disturbed: None }
}

impl FrameMover {
    /// Lets calls withdraw pages that are not under way, or no longer. hugetlb pages that have moved
    /// are mapped once more when their mappings are joined, so theirs are never withdrawn.
    pub(super) fn set_open(&self, open: bool) {
        if !self.terrain.page.is_hugetlb() {
            lock(&self.ledger).claimed.iter().for_each(|one| one.claim.set_open(open));
        }
    }
}

impl FrameMover {
    /// Whether all descriptors are still this library's that an attempt uses. A look before each
    /// window, and none inside of it: what is closed between the two makes calls fail. Only if the
    /// number also stands for another file by then, that file may be mapped.
    pub(super) fn has_descriptors(&self, place: &Place<'_>, work: &Work) -> bool {
        let shares = [&place.leg.from, &place.leg.to];
        let tracker = work.following.map(|following| following.tracker);
        let lost = tracker.filter(|tracker| !self.backend().has_tracker(*tracker));
        if let Some(tracker) = lost {
            self.lost_tracker.get_or_init(|| tracker.state());
        }
        lost.is_none() && shares.into_iter().all(Share::has_descriptor)
    }

    /// What to say of a descriptor that is gone.
    pub(super) fn lost_descriptor(&self, area: &Area) -> Error {
        let leg = &self.legs[area.leg];
        let shares = [&leg.from, &leg.to];
        let of_share = shares.into_iter().find_map(|share| share.check_descriptor().err());
        of_share.unwrap_or_else(|| {
            let (descriptor, is_reused) = self.lost_tracker.get().copied().unwrap_or((-1, false));
            Error::DescriptorLost { what: "a job that moves memory".into(), descriptor, is_reused }
        })
    }
}
