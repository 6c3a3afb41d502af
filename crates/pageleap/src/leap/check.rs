//! What is checked before a job starts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Migration;
use super::join::mappings_apart;
use super::legs::Claimed;
use crate::backend::Backend;
use crate::engine::fault::MAX_THREADS;
use crate::error::Error;
use crate::observe::{self, AttributeRun};
use crate::region::{RegionInner, check_same_backend};
use crate::units::{PageSize, RegionId};

fn bad(what: &'static str, reason: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::BadArgument { what, reason: reason.into(), remedy: remedy.into() }
}

impl Migration<'_> {
    /// Refuses arguments that make no sense. Returns the backend and the page size of all ranges.
    pub(super) fn check_arguments(&self) -> Result<(Arc<dyn Backend>, PageSize), Error> {
        let Some((first, ..)) = self.ranges.first() else {
            return Err(bad("migration", "it names no range", "name at least one"));
        };
        if let Some(threads) = self.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            let remedy = format!("use 1 to {MAX_THREADS}");
            return Err(bad("number of threads", threads.to_string(), remedy));
        }
        if self.timeout == Some(Duration::ZERO) {
            let reason = "0 s leave no time for any page";
            return Err(bad("timeout", reason, "leave it out for none"));
        }
        if self.rate_limit == Some(0) {
            let reason = "with 0 bytes per second nothing moves";
            return Err(bad("rate limit", reason, "leave it out for none"));
        }
        if self.reduction_factor == 0 {
            let remedy = "use 1 (no splitting) or more";
            return Err(bad("reduction factor", "it must be at least 1", remedy));
        }
        let page = first.page_size();
        let area_bytes = self.first_area_bytes(page);
        if area_bytes == 0 || !area_bytes.is_multiple_of(page.bytes()) {
            let reason = format!("{area_bytes} bytes are no whole number of {page} pages");
            return Err(bad("area size", reason, "use a multiple of the page size"));
        }
        let backend = first.inner().backend.clone();
        for (region, range, to) in &self.ranges {
            let (from, into) = (region.page_size(), to.pool().page_size());
            if from != page || into != page {
                let reason = format!("bytes {range:?} mix page sizes: {from}, {page}, {into}");
                let remedy = "move regions and pools of one page size per job";
                return Err(bad("range", reason, remedy));
            }
            check_same_backend(&backend, to.pool().backend())?;
            check_same_backend(&region.inner().backend, to.pool().backend())?;
        }
        Ok((backend, page))
    }
}

/// The attributes of all ranges of each region.
pub(super) fn attributes_of(
    claimed: &[Claimed],
) -> Result<BTreeMap<RegionId, Vec<AttributeRun>>, Error> {
    let mut by_region: BTreeMap<RegionId, (&Arc<RegionInner>, Vec<Range<usize>>)> = BTreeMap::new();
    for one in claimed {
        let (region, range) = (one.claim.region(), one.claim.range());
        let (_, ranges) = by_region.entry(region.id).or_insert((region, Vec::new()));
        ranges.push(region.start + range.start..region.start + range.end);
    }
    let read = |(id, (region, mut ranges)): (RegionId, (&Arc<RegionInner>, Vec<Range<usize>>))| {
        ranges.sort_by_key(|range| range.start);
        Ok((id, region.backend.attributes(&ranges)?))
    };
    by_region.into_iter().map(read).collect()
}

/// Refuses a job that would begin within a few mappings of the process' limit: it would fail page
/// by page instead. Returns the most pieces that may be left behind.
pub(super) fn mapping_headroom(
    claimed: &[Claimed],
    threads: usize,
    page: PageSize,
) -> Result<usize, Error> {
    let Some(limit) = observe::max_mapping_count() else { return Ok(usize::MAX) };
    let legs: usize = claimed.iter().map(Claimed::leg_count).sum();
    // Each area under way splits a mapping of the region (two more), and each leg one of the alias.
    // Those of hugetlb pages stay apart for a while.
    let mut needed = 2 * threads + 2 * legs + 16;
    if page.is_hugetlb() {
        let pages: Vec<u64> = claimed.iter().map(Claimed::moving_pages).collect();
        // Regions that have leapt before have theirs already.
        let (blocks, apart) = mappings_apart(&pages);
        needed += (blocks as usize).saturating_sub(observe::pool_mapping_count()?) + apart as usize;
    }
    let count = observe::mapping_count()?;
    if count + needed > limit {
        return Err(Error::Limit {
            what: "memory mappings of this process (vm.max_map_count)",
            limit,
            in_use: count,
            needed,
            remedy: "raise it (sysctl -w vm.max_map_count=262144), or unmap what is no longer used",
        });
    }
    // A piece that stays behind is a mapping of its own in the region, and so is what lies behind
    // it; the same in both aliases. Half of the rest is for others.
    Ok((limit - count - needed) / 2 / 6)
}
