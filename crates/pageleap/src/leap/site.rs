//! The legs of a job and the regions that they belong to. Nothing here changes while the job runs,
//! so all parts of the mover read it without a lock.

use std::sync::Arc;

use super::legs::{Claimed, Leg};
use crate::backend::Backend;
use crate::engine::fault::SLOTS;
use crate::engine::slot::Slot;
use crate::engine::{Frames, Tools};
use crate::job::area::Area;
use crate::pool::{self, Share};
use crate::region::RegionInner;
use crate::units::{AddressRange, PageSize};

/// The legs of a job and their regions.
pub(super) struct Site {
    pub(super) backend: Arc<dyn Backend>,
    /// The size of all its pages.
    pub(super) page: PageSize,
    pub(super) legs: Vec<Leg>,
    /// By claimed range.
    pub(super) regions: Vec<Arc<RegionInner>>,
}

/// An area with the frames that its pages leave and get.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) leg: &'a Leg,
    pub(super) region: &'a RegionInner,
    pub(super) old: pool::Run,
    pub(super) new: pool::Run,
}

impl Site {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        page: PageSize,
        legs: Vec<Leg>,
        claimed: &[Claimed],
    ) -> Site {
        let regions = claimed.iter().map(|claimed| claimed.claim.region().clone()).collect();
        Site { backend, page, legs, regions }
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The region of a claimed range.
    pub(super) fn region(&self, item: usize) -> &Arc<RegionInner> {
        &self.regions[item]
    }

    /// The bytes of a leg.
    pub(super) fn bytes_of(&self, leg: &Leg) -> usize {
        self.region(leg.item).bytes(leg.pages.end - leg.pages.start)
    }

    pub(super) fn place(&self, area: &Area) -> Place<'_> {
        let leg = &self.legs[area.leg];
        let (within, frames) = (area.pages.start - leg.pages.start, area.len());
        Place {
            leg,
            region: self.region(leg.item),
            old: pool::Run { first: leg.from_frame + within, frames },
            new: pool::Run { first: leg.to_frame + within, frames },
        }
    }

    pub(super) fn addresses(&self, area: &Area) -> AddressRange {
        let region = self.region(area.item);
        AddressRange::new(region.addr(area.pages.start), region.bytes(area.len()))
    }

    /// The tools with which a worker makes attempts in this slot.
    pub(super) fn tools(&self, slot: &'static Slot) -> Tools<'_> {
        Tools { slot, epoch: &SLOTS.epoch, backend: self.backend() }
    }
}

impl Place<'_> {
    /// The alias and the file of the frames that the pages leave.
    pub(super) fn old_frames(&self) -> Frames {
        frames_of(&self.leg.from, self.old)
    }

    /// The alias and the file of the frames that the pages get.
    pub(super) fn new_frames(&self) -> Frames {
        frames_of(&self.leg.to, self.new)
    }
}

fn frames_of(share: &Share, run: pool::Run) -> Frames {
    let (alias, offset) = (share.0.alias_of(run.first), share.0.offset_of(run.first));
    Frames { alias, file: share.0.file, offset }
}
