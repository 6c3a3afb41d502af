//! An executable invariant: every frame has one owner.

use crate::pool::{Pool, Run};
use crate::region::Region;
use crate::sync::lock;

/// Checks the books of pools and regions against each other: each frame that a region maps is
/// taken, by this region only, and each taken frame is mapped by one of the regions. `regions` are
/// all regions with frames of `pools`, and no job (not even one that recycles frames) and no call
/// is changing them.
///
/// Costs a few steps per frame. For tests, and for a service that wants to know.
///
/// # Errors
/// A sentence that names the pool and the frames, if the books do not agree: a bug in this library.
pub fn audit(pools: &[&Pool], regions: &[&Region]) -> Result<(), String> {
    for share in pools.iter().flat_map(|pool| pool.shares()) {
        let mut owned: Vec<Run> = Vec::new();
        // A region named twice is one region.
        let ids: std::collections::BTreeMap<_, _> =
            regions.iter().map(|region| (region.id(), region)).collect();
        for region in ids.values() {
            let extents = lock(&region.inner().extents);
            let of_pool = extents.within(0..u64::MAX).filter(|e| e.share == *share);
            owned.extend(of_pool.map(|e| e.frames()));
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
