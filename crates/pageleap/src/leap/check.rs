//! Checks before a job starts: arguments, attributes, and room for mappings.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Migration;
use super::join::mappings_apart;
use super::legs::{Claimed, Leg};
use crate::backend::{Backend, MOST_DUPLICATES};
use crate::engine::fault::MAX_THREADS;
use crate::error::Error;
use crate::observe::{self, AttributeRun};
use crate::region::{RegionInner, check_same_backend};
use crate::sync::{Fresh, monotonic_ns};
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

/// Reads the attributes of all ranges of each region.
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

/// How many mappings a job may make the process have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Headroom {
    /// The most pieces of pages that may stay behind.
    pub(super) most_pieces: usize,
    /// The most pieces of vacated frames that may wait for the end of the job.
    pub(super) most_vacated: usize,
}

impl Headroom {
    pub(super) const UNLIMITED: Headroom =
        Headroom { most_pieces: usize::MAX, most_vacated: usize::MAX };
}

/// The mappings that a job needs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Demand {
    /// Those that are needed in any case: for areas under way, looks at attributes and joined
    /// blocks.
    always: usize,
    /// The number of legs.
    legs: usize,
    /// The least that legs need if vacated frames are given back again and again: for the alias of
    /// the new frames, and for pieces of the region beyond those that it has. `None`: the job
    /// cannot do this.
    in_parts: Option<usize>,
}

/// The fewest vacated pieces that are given back at a time. Fewer would not be worth while.
const LEAST_VACATED: usize = 16;

/// How many of the `left` mappings a job may use, or `None` if they are too few. A job that moves
/// many pieces needs fewer if it gives vacated frames back in parts. By then the kernel has joined
/// mappings: of pages that have moved to neighbouring frames, and of the alias over frames that are
/// free again.
fn headroom(left: usize, demand: Demand) -> Option<Headroom> {
    let Demand { always, legs, in_parts } = demand;
    // A piece that stays behind makes three mappings of one in the region: before it, of it and
    // behind it. Both aliases are cut in the same way. Half of the rest is for other code.
    let most_pieces = |used: usize| Some((left.checked_sub(used)?) / 2 / 6);
    // Each leg splits a mapping of the alias that gets its page tables.
    if let Some(most_pieces) = most_pieces(always + 2 * legs) {
        return Some(Headroom { most_pieces, ..Headroom::UNLIMITED });
    }
    let room = left.checked_sub(always + in_parts?)?;
    // A vacated piece makes three mappings of one in the alias. While one worker gives pieces back,
    // the others vacate as many again. Half of the rest is for other code.
    let most_vacated = room / 2 / 2 / 2;
    (most_vacated >= LEAST_VACATED).then_some(Headroom { most_pieces: room / 4 / 6, most_vacated })
}

/// How many runs of legs there are, if a leg that `follows` the one before it belongs to the same
/// run.
fn breaks(legs: &[Leg], follows: impl Fn(&Leg, &Leg) -> bool) -> usize {
    legs.windows(2).filter(|two| !follows(&two[0], &two[1])).count() + usize::from(!legs.is_empty())
}

/// The mappings of the process, and how many it may have.
#[derive(Clone, Copy, Debug)]
struct MappingCount {
    in_use: usize,
    limit: usize,
    /// Whether `in_use` is an upper estimate.
    is_estimate: bool,
}

/// The last count, with the limit of that moment.
static COUNTED: Fresh<MappingCount> = Fresh::new();

/// The number of mappings of the process, or an upper estimate. Counting them takes about a
/// millisecond per thousand, so a count serves again for a while. `None`: the limit is not known.
fn mappings_soon() -> Result<Option<MappingCount>, Error> {
    /// How many mappings other threads may have made since the count. Calls that map exclude each
    /// other in the kernel and take about a microsecond, and few of them make more than two.
    const SINCE: usize = 2 * Fresh::<MappingCount>::NS as usize / 1000;
    let estimate = |last: &MappingCount| MappingCount {
        in_use: last.in_use + SINCE,
        is_estimate: true,
        ..*last
    };
    match COUNTED.get(estimate) {
        Some(count) => Ok(Some(count)),
        None => count_mappings(),
    }
}

fn count_mappings() -> Result<Option<MappingCount>, Error> {
    let Some(limit) = observe::max_mapping_count() else { return Ok(None) };
    let at_ns = monotonic_ns();
    let count = MappingCount { in_use: observe::mapping_count()?, limit, is_estimate: false };
    COUNTED.put(count, at_ns);
    Ok(Some(count))
}

/// The room for mappings that a job has. Refuses a job that would begin within a few mappings of
/// the process' limit, because it would fail page by page.
pub(super) fn mapping_headroom(
    claimed: &[Claimed],
    threads: usize,
    page: PageSize,
) -> Result<Headroom, Error> {
    // Each area under way splits a mapping of the region into three. Hugetlb pages keep mappings of
    // their own for a while.
    let mut demand = Demand {
        always: 2 * threads + 16,
        legs: claimed.iter().map(Claimed::leg_count).sum(),
        in_parts: None,
    };
    // Views are cut in the same way as the region.
    let views = |one: &Claimed| one.claim.region().view_count();
    let most_views = claimed.iter().map(views).max().unwrap_or(0);
    // A worker's standby of each view is up to three mappings.
    demand.always += (2 + 3) * threads * most_views;
    demand.legs += claimed.iter().map(|one| one.leg_count() * views(one)).sum::<usize>();
    // A look at attributes duplicates so many mappings at most, for a moment. One of them is among
    // those counted already.
    demand.always += demand.legs.min(MOST_DUPLICATES).saturating_sub(1);
    if page.is_hugetlb() {
        let pages: Vec<u64> = claimed.iter().map(Claimed::moving_pages).collect();
        // Regions that have leapt before have these mappings already.
        let (blocks, apart) = mappings_apart(&pages);
        demand.always +=
            (blocks as usize * (1 + most_views)).saturating_sub(observe::pool_mapping_count()?);
        demand.always += apart as usize * (1 + most_views);
    } else {
        let parts = claimed.iter().map(|one| {
            let end = |leg: &Leg| leg.to_frame + (leg.pages.end - leg.pages.start);
            let arrive = breaks(&one.legs, |a, b| {
                (&a.to, end(a), a.attributes) == (&b.to, b.to_frame, b.attributes)
            });
            let end = |leg: &Leg| leg.from_frame + (leg.pages.end - leg.pages.start);
            let lie = breaks(&one.legs, |a, b| {
                (&a.from, end(a), a.attributes) == (&b.from, b.from_frame, b.attributes)
                    && a.pages.end == b.pages.start
            });
            2 * arrive + (1 + views(one)) * arrive.saturating_sub(lie)
        });
        demand.in_parts = Some(parts.sum());
    }
    room_for(demand)
}

fn room_for(demand: Demand) -> Result<Headroom, Error> {
    let room = |count: MappingCount| headroom(count.limit.saturating_sub(count.in_use), demand);
    let Some(mut count) = mappings_soon()? else { return Ok(Headroom::UNLIMITED) };
    if count.is_estimate {
        if let Some(found) = room(count).filter(|found| found.most_vacated == usize::MAX) {
            return Ok(found);
        }
        // The limit may have been raised since, perhaps because of this error.
        let Some(exact) = count_mappings()? else { return Ok(Headroom::UNLIMITED) };
        count = exact;
    }
    room(count).ok_or(Error::Limit {
        what: "memory mappings of this process (vm.max_map_count)",
        limit: count.limit,
        in_use: count.in_use,
        needed: demand.always + 2 * demand.legs,
        remedy: "raise it (sysctl -w vm.max_map_count=262144), unmap what is no longer used, or \
                 move fewer pieces at once",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(any(loom, shuttle, miri)))]
    fn a_limit_that_was_raised_since_the_last_count_serves_at_once() {
        // The count of a job that was refused under a lower limit.
        let refused = MappingCount { in_use: 50, limit: 70, is_estimate: false };
        COUNTED.put(refused, monotonic_ns());
        let found = room_for(Demand { always: 20, legs: 1, in_parts: None }).unwrap();
        assert_eq!(found.most_vacated, usize::MAX);
    }

    #[test]
    fn many_pieces_are_moved_in_parts() {
        let demand = Demand { always: 20, legs: 1000, in_parts: Some(2) };
        // All at once, as long as there is room.
        let all = headroom(2020 + 120, demand).unwrap();
        assert_eq!(all, Headroom { most_pieces: 10, most_vacated: usize::MAX });
        assert!(headroom(2020, demand).is_some_and(|room| room.most_vacated == usize::MAX));
        let parts = headroom(2019, demand).unwrap();
        assert_eq!(parts, Headroom { most_pieces: 1997 / 24, most_vacated: 1997 / 8 });
        // Both generations of vacated pieces, and all pieces left behind, take at most half.
        for left in 0..2020 {
            let Some(Headroom { most_pieces, most_vacated }) = headroom(left, demand) else {
                assert!(left < 22 + 8 * LEAST_VACATED, "{left}");
                continue;
            };
            assert!(22 + 2 * 2 * most_vacated + 6 * most_pieces <= left, "{left}");
        }
        assert_eq!(headroom(2019, Demand { in_parts: None, ..demand }), None);
        assert_eq!(headroom(2019, Demand { in_parts: Some(1990), ..demand }), None);
    }
}
