//! Whether the descriptors that attempts use are still the library's (docs/protocol.md, 9.6).

use super::mover::FrameMover;
use crate::engine::Work;
use crate::error::Error;
use crate::job::area::Area;
use crate::pool::Share;

impl FrameMover {
    /// Whether all descriptors are still this library's that an attempt uses. A look before each
    /// window, and none inside of it: what is closed between the two makes calls fail. Only if the
    /// number also stands for another file by then, that file may be mapped.
    pub(super) fn has_descriptors(&self, shares: [&Share; 2], work: &Work) -> bool {
        let tracker = work.following.map(|following| following.tracker);
        shares.into_iter().all(Share::has_descriptor)
            && tracker.is_none_or(|tracker| self.backend().has_tracker(tracker))
    }

    /// What to say of a descriptor that is gone.
    pub(super) fn lost_descriptor(&self, area: &Area) -> Error {
        let leg = &self.legs[area.leg];
        let shares = [&leg.from, &leg.to];
        let of_share = shares.into_iter().find_map(|share| share.check_descriptor().err());
        of_share.unwrap_or_else(|| {
            let tracker = self.terrain.tracker.as_ref().map(|open| open.tracker().state());
            let (descriptor, is_reused) = tracker.unwrap_or((-1, false));
            Error::DescriptorLost { what: "a job that moves memory".into(), descriptor, is_reused }
        })
    }
}
