//! An executable invariant: every frame has one owner.

use crate::pool::{Pool, Run};
use crate::region::Region;
use crate::sync::lock;

/// Checks the books of pools and regions against each other. Each frame that a region maps must be
/// taken, by this region only, and each taken frame must be mapped by one of the regions. Frames
/// that a region withholds, because unmapping them has failed, count as mapped.
///
/// `regions` must be all regions with frames of `pools`. During the check no job may run (recycling
/// frames counts) and no call may change them. The check takes a few steps per frame. It is for
/// tests, and for services that check themselves.
///
/// # Errors
/// If the books disagree, which is a bug in this library: a sentence that names the pool and the
/// frames.
pub fn audit(pools: &[&Pool], regions: &[&Region]) -> Result<(), String> {
    for share in pools.iter().flat_map(|pool| pool.shares()) {
        let mut owned: Vec<Run> = Vec::new();
        // A region that is named twice counts once.
        let ids: std::collections::BTreeMap<_, _> =
            regions.iter().map(|region| (region.id(), region)).collect();
        for region in ids.values() {
            let extents = lock(&region.inner().extents);
            let of_pool = extents.within(0..u64::MAX).filter(|e| e.share == *share);
            owned.extend(of_pool.map(|e| e.frames()));
            owned.extend(region.inner().withheld(share));
        }
        owned.sort();
        if let Some(pair) = owned.windows(2).find(|w| w[0].end() > w[1].first) {
            return Err(format!(
                "{share:?}: frames {:?} and {:?} have two owners",
                pair[0], pair[1]
            ));
        }
        let sum: u64 = owned.iter().map(|run| run.frames).sum();
        let (taken, all_taken) = share.taken(&owned);
        if !all_taken {
            return Err(format!("{share:?}: a frame that a region maps is free"));
        }
        if taken != sum {
            return Err(format!("{share:?}: {taken} frames are taken, regions own {sum}"));
        }
    }
    Ok(())
}
