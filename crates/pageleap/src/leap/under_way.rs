//! Checks right before an attempt: whether its pages are still the job's, and its descriptors still
//! the library's.

use std::ops::Range;
use std::sync::OnceLock;

use super::legs::Leg;
use crate::backend::Backend;
use crate::engine::Work;
use crate::engine::effort::Counters;
use crate::error::Error;
use crate::job::area::{AreaOutcome, By, Reason, Verdict};
use crate::pool::Share;
use crate::region::Gone;

/// The outcome for an area if calls (`discard`, `back`) have withdrawn pages of it, or wait for
/// pages. The other pages have not been tried.
pub(super) fn withdrawn(by: impl Into<By>, gone: Gone) -> AreaOutcome {
    let left = |pages| (pages, Verdict::Left(Some(Reason::Discarded)));
    let kept = |pages| (pages, Verdict::Kept(Reason::Discarded));
    let Gone { withdrawn, waited_for } = gone;
    let mut runs: Vec<_> = withdrawn.into_iter().map(left).collect();
    runs.extend(waited_for.into_iter().map(kept));
    runs.sort_by_key(|(pages, _): &(Range<u64>, _)| pages.start);
    AreaOutcome { runs, by: by.into(), counters: Counters::default(), seen: None, disturbed: None }
}

/// The descriptors of a job that other code has closed.
#[derive(Default)]
pub(super) struct Descriptors {
    /// The number of a tracker's descriptor, of the job's own tracker or another engine's, and
    /// whether it stands for another file now.
    lost_tracker: OnceLock<(i32, bool)>,
}

impl Descriptors {
    /// Whether all descriptors that an attempt uses are still this library's. Checked before each
    /// attempt, and not inside its window. If other code closes a descriptor in between, calls
    /// fail. Only if its number is also reused by then, another file may be mapped.
    pub(super) fn are_whole(&self, leg: &Leg, work: &Work, backend: &dyn Backend) -> bool {
        let tracker = work.following.map(|following| following.tracker);
        let lost = tracker.filter(|tracker| !backend.has_tracker(*tracker));
        if let Some(tracker) = lost {
            self.lost_tracker.get_or_init(|| tracker.state());
        }
        lost.is_none() && [&leg.from, &leg.to].into_iter().all(Share::has_descriptor)
    }

    /// The error for a descriptor that other code has closed.
    pub(super) fn error(&self, leg: &Leg) -> Error {
        let shares = [&leg.from, &leg.to];
        let of_share = shares.into_iter().find_map(|share| share.check_descriptor().err());
        of_share.unwrap_or_else(|| {
            let (descriptor, is_reused) = self.lost_tracker.get().copied().unwrap_or((-1, false));
            Error::DescriptorLost { what: "a job that moves memory".into(), descriptor, is_reused }
        })
    }
}
