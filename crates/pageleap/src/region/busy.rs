//! The bytes of a region that a job or a call is changing.
//!
//! A job *claims* its ranges whole, from its start until it moves no more pages. Within them it
//! works on a few pages at a time, which are *under way*. While a claim is *open*, a call that
//! discards or backs pages may *withdraw* any others. These belong to the call, and afterwards to
//! nobody, and the job leaves them as they are. So a call waits for one attempt at most, and an
//! attempt never meets pages that a call is changing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::RegionInner;
use crate::error::Error;
use crate::sync::{Condvar, Instant, Mutex, lock};

/// A job or a call that claims bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u64);

/// Claimed bytes, up to `end`.
#[derive(Clone, Copy, Debug)]
struct Part {
    end: usize,
    owner: Owner,
    /// Whether calls may withdraw it.
    open: bool,
}

/// The claimed bytes, and the calls that wait for some. Pure bookkeeping.
#[derive(Debug, Default)]
struct Claims {
    /// Disjoint, by their first byte.
    parts: BTreeMap<usize, Part>,
    /// Bytes that attempts are moving.
    under_way: Vec<Range<usize>>,
    /// Calls that wait, in the order of their arrival. No attempt begins on bytes that they wait
    /// for.
    waiting: Vec<(Owner, Range<usize>)>,
    /// How many owners there have been.
    owners: u64,
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    one.start.max(other.start)..one.end.min(other.end)
}

impl Claims {
    fn new_owner(&mut self) -> Owner {
        self.owners += 1;
        Owner(self.owners)
    }

    /// The parts that overlap a range, the last one first.
    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Part)> {
        let start = range.start;
        let parts = self.parts.range(..range.end).rev().map(|(start, part)| (*start, *part));
        parts.take_while(move |(_, part)| part.end > start)
    }

    fn put(&mut self, range: Range<usize>, owner: Owner, open: bool) {
        if !range.is_empty() {
            self.parts.insert(range.start, Part { end: range.end, owner, open });
        }
    }

    /// Claims a range for a job, unless part of it is claimed, or a call waits for part of it.
    fn claim(&mut self, range: &Range<usize>) -> Option<Owner> {
        let is_free = self.overlapping(range).next().is_none()
            && !self.waiting.iter().any(|(_, other)| overlap(range, other));
        is_free.then(|| {
            let owner = self.new_owner();
            self.put(range.clone(), owner, false);
            owner
        })
    }

    /// Whether a call may withdraw a range from jobs. It may not if part of the range is under way,
    /// or claimed and not open, or if an earlier call waits for it. `waits` is the call itself, if
    /// it waits.
    fn may_withdraw(&self, range: &Range<usize>, waits: Option<Owner>) -> bool {
        let mut before = self.waiting.iter().take_while(|(call, _)| Some(*call) != waits);
        !before.any(|(_, other)| overlap(range, other))
            && !self.under_way.iter().any(|other| overlap(range, other))
            && self.overlapping(range).all(|(_, part)| part.open)
    }

    /// Claims a range for a call, and withdraws it from jobs, if it may be withdrawn and `admit`
    /// does not refuse. `None`: it may not be withdrawn. After a refusal jobs keep the range.
    fn withdraw<T, E>(
        &mut self,
        range: &Range<usize>,
        waits: Option<Owner>,
        admit: impl FnOnce() -> Result<T, E>,
    ) -> Option<Result<(Owner, T), E>> {
        if !self.may_withdraw(range, waits) {
            return None;
        }
        let admitted = match admit() {
            Ok(admitted) => admitted,
            Err(error) => return Some(Err(error)),
        };
        let open: Vec<_> = self.overlapping(range).collect();
        for (start, Part { end, owner, open }) in open {
            self.parts.remove(&start);
            self.put(start..range.start, owner, open);
            self.put(range.end..end, owner, open);
        }
        let owner = self.new_owner();
        self.put(range.clone(), owner, false);
        Some(Ok((owner, admitted)))
    }

    /// Marks bytes as under way. If some are no longer the owner's, or are open and a call waits
    /// for them, returns those instead.
    fn begin(&mut self, owner: Owner, range: &Range<usize>) -> Result<(), Vec<Range<usize>>> {
        let mut gone: Vec<Range<usize>> = Vec::new();
        let mut rest = range.end;
        for (start, part) in self.overlapping(range).filter(|(_, part)| part.owner == owner) {
            let own = common(range, &(start..part.end));
            // A call that waits for bytes which are not open waits in vain until the job is over.
            let waiting = self.waiting.iter().filter(|_| part.open);
            gone.extend(waiting.map(|(_, other)| common(&own, other)));
            gone.push(own.end..rest);
            rest = own.start;
        }
        gone.push(range.start..rest);
        gone.retain(|part| !part.is_empty());
        if gone.is_empty() {
            self.under_way.push(range.clone());
            return Ok(());
        }
        gone.sort_by_key(|part| part.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for part in gone {
            match joined.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => joined.push(part),
            }
        }
        Err(joined)
    }

    /// Sorts the result of [`Claims::begin`]: first the bytes that are still the owner's, because a
    /// call only waits for them, then the others.
    fn sort(&self, owner: Owner, gone: &[Range<usize>]) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for range in gone {
            let mut rest = range.end;
            for (start, part) in self.overlapping(range).filter(|(_, part)| part.owner == owner) {
                let common = common(range, &(start..part.end));
                others.push(common.end..rest);
                rest = common.start;
                own.push(common);
            }
            others.push(range.start..rest);
        }
        others.retain(|part| !part.is_empty());
        (own, others)
    }

    fn end(&mut self, range: &Range<usize>) {
        let at = self.under_way.iter().position(|other| other == range);
        self.under_way.swap_remove(at.expect("it was put there"));
    }

    /// The parts of a claimed range that its owner still has, in order.
    fn left_of<'a>(
        &'a mut self,
        owner: Owner,
        claimed: &Range<usize>,
    ) -> impl Iterator<Item = (usize, &'a mut Part)> {
        let parts = self.parts.range_mut(claimed.clone()).map(|(start, part)| (*start, part));
        parts.filter(move |(_, part)| part.owner == owner)
    }
}

/// The claims of a region.
#[derive(Default)]
pub(super) struct BusyRanges {
    claims: Mutex<Claims>,
    /// Signalled when bytes are no longer claimed or under way, or a call no longer waits.
    freed: Condvar,
}

/// Bytes that nobody else changes until the claim is dropped, unless a call withdraws them. A claim
/// keeps the region mapped.
pub(crate) struct Claim {
    region: Arc<RegionInner>,
    range: Range<usize>,
    owner: Owner,
}

impl Claim {
    pub(crate) fn region(&self) -> &Arc<RegionInner> {
        &self.region
    }

    /// The range as it was claimed.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Allows or forbids calls to withdraw bytes that are not under way.
    pub(crate) fn set_open(&self, open: bool) {
        let mut claims = lock(&self.region.busy.claims);
        claims.left_of(self.owner, &self.range).for_each(|(_, part)| part.open = open);
        self.region.busy.freed.notify_all();
    }

    /// The pages of it that have not been withdrawn.
    pub(crate) fn pages_left(&self) -> Vec<Range<u64>> {
        let mut claims = lock(&self.region.busy.claims);
        let left = claims.left_of(self.owner, &self.range);
        left.map(|(start, part)| self.region.pages(&(start..part.end))).collect()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let busy = &self.region.busy;
        let mut claims = lock(&busy.claims);
        let left: Vec<usize> =
            claims.left_of(self.owner, &self.range).map(|(start, _)| start).collect();
        left.iter().for_each(|start| _ = claims.parts.remove(start));
        busy.freed.notify_all();
    }
}

/// Pages with which an attempt cannot begin.
pub(crate) struct Gone {
    /// Pages that are no longer the job's.
    pub(crate) withdrawn: Vec<Range<u64>>,
    /// Pages for which a call waits, which may yet withdraw them, or fail.
    pub(crate) waited_for: Vec<Range<u64>>,
}

/// Pages that an attempt is moving, until the value is dropped.
pub(crate) struct UnderWay<'a> {
    region: &'a RegionInner,
    bytes: Range<usize>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut claims = lock(&self.region.busy.claims);
        claims.end(&self.bytes);
        // Checked first, because waking takes a system call.
        if !claims.waiting.is_empty() {
            self.region.busy.freed.notify_all();
        }
    }
}

impl RegionInner {
    /// Claims a byte range for a job.
    pub(crate) fn claim(self: &Arc<Self>, range: Range<usize>) -> Result<Claim, Error> {
        match lock(&self.busy.claims).claim(&range) {
            Some(owner) => Ok(Claim { region: self.clone(), range, owner }),
            None => Err(Error::RangeBusy { start: range.start, end: range.end }),
        }
    }

    /// Claims a byte range for a call, which waits up to `patience` for attempts of jobs and for
    /// other calls. Meanwhile no attempt begins on it. When the range may be withdrawn, `admit` has
    /// the last word. After an error jobs keep the range. `admit` takes no lock of a job or of
    /// claims.
    pub(super) fn withdraw<T>(
        self: &Arc<Self>,
        range: Range<usize>,
        patience: Duration,
        mut admit: impl FnMut() -> Result<T, Error>,
    ) -> Result<(Claim, T), Error> {
        let BusyRanges { claims, freed } = &self.busy;
        let mut claims = lock(claims);
        let busy = || Err(Error::RangeBusy { start: range.start, end: range.end });
        let withdrawn = if patience.is_zero() {
            claims.withdraw(&range, None, admit).unwrap_or_else(busy)
        } else {
            let began = Instant::now();
            let call = claims.new_owner();
            claims.waiting.push((call, range.clone()));
            let withdrawn = loop {
                if let Some(withdrawn) = claims.withdraw(&range, Some(call), &mut admit) {
                    break withdrawn;
                }
                let left = patience.saturating_sub(began.elapsed());
                if left.is_zero() {
                    break busy();
                }
                claims = freed.wait_timeout(claims, left).unwrap_or_else(PoisonError::into_inner).0;
            };
            claims.waiting.retain(|(other, _)| *other != call);
            // Other calls may have waited for this one.
            freed.notify_all();
            withdrawn
        };
        let (owner, admitted) = withdrawn?;
        Ok((Claim { region: self.clone(), range, owner }, admitted))
    }

    /// Marks pages of a job as under way. If some have been withdrawn, or a call waits for them,
    /// returns those.
    pub(crate) fn begin(&self, owner: Owner, pages: &Range<u64>) -> Result<UnderWay<'_>, Gone> {
        let bytes = self.bytes(pages.start)..self.bytes(pages.end);
        let claims = &mut *lock(&self.busy.claims);
        match claims.begin(owner, &bytes) {
            Ok(()) => Ok(UnderWay { region: self, bytes }),
            Err(gone) => {
                let (waited_for, withdrawn) = claims.sort(owner, &gone);
                let pages = |parts: Vec<_>| parts.iter().map(|bytes| self.pages(bytes)).collect();
                Err(Gone { withdrawn: pages(withdrawn), waited_for: pages(waited_for) })
            }
        }
    }

    /// Whether a call waits for some of these pages.
    pub(crate) fn is_waited_for(&self, pages: &Range<u64>) -> bool {
        let bytes = self.bytes(pages.start)..self.bytes(pages.end);
        lock(&self.busy.claims).waiting.iter().any(|(_, other)| overlap(&bytes, other))
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges are what is compared
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cases::cases;
    use crate::units::AddressRange;

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let mut claims = Claims::default();
        let four = claims.claim(&(4..8)).unwrap();
        for range in [4..8, 0..5, 7..9, 5..6, 0..100] {
            assert_eq!(claims.claim(&range), None, "{range:?}");
            assert_eq!(
                withdraw(&mut claims, &range, None),
                None,
                "{range:?} of a claim that is not open"
            );
        }
        assert!(claims.claim(&(0..4)).is_some() && claims.claim(&(8..9)).is_some());
        let left: Vec<usize> = claims.left_of(four, &(4..8)).map(|(start, _)| start).collect();
        assert_eq!(left, [4]);
    }

    fn withdraw(claims: &mut Claims, range: &Range<usize>, waits: Option<Owner>) -> Option<Owner> {
        let withdrawn = claims.withdraw(range, waits, || Ok::<_, std::convert::Infallible>(()));
        withdrawn.map(|Ok((owner, ()))| owner)
    }

    fn open(claims: &mut Claims, range: &Range<usize>) -> Owner {
        let owner = claims.claim(range).unwrap();
        claims.left_of(owner, range).for_each(|(_, part)| part.open = true);
        owner
    }

    #[test]
    fn what_is_under_way_cannot_be_withdrawn_and_what_is_withdrawn_does_not_get_under_way() {
        let mut claims = Claims::default();
        let job = open(&mut claims, &(0..8));
        assert_eq!(claims.begin(job, &(2..4)), Ok(()));
        assert_eq!(withdraw(&mut claims, &(3..5), None), None, "a call takes what is under way");
        let call = withdraw(&mut claims, &(4..6), None).unwrap();
        assert_ne!(call, job);
        assert_eq!(
            claims.begin(job, &(4..8)),
            Err(vec![4..6]),
            "a job moves what a call has taken"
        );
        assert_eq!(claims.sort(job, &[4..6]), (vec![], vec![4..6]));
        assert_eq!(claims.sort(job, &[3..7]), (vec![6..7, 3..4], vec![4..6]));
        assert_eq!(claims.begin(job, &(0..8)), Err(vec![4..6]));
        assert_eq!(claims.begin(job, &(6..8)), Ok(()));
        claims.end(&(2..4));
        assert!(withdraw(&mut claims, &(2..4), None).is_some());
        assert_eq!(claims.begin(job, &(0..8)), Err(vec![2..6]));
    }

    /// A guard that comes while a call waits keeps the pages where they are, and the job moves them
    /// when the guard has gone.
    #[test]
    fn pages_of_a_call_that_is_refused_stay_with_their_job() {
        use crate::backend::Model;
        use crate::{BASE_PAGE, NodeId, Pool, Region};
        let pool = Pool::builder(NodeId(0), 4 * BASE_PAGE as u64).threads(1);
        let pool = pool.backend(Arc::new(Model::new())).build().unwrap();
        let region = Region::new(&pool, 4 * BASE_PAGE).unwrap();
        let inner = region.inner();
        let (all, part) = (0..4 * BASE_PAGE, BASE_PAGE..3 * BASE_PAGE);
        let claim = inner.claim(all).unwrap();
        claim.set_open(true);
        let Ok(under_way) = inner.begin(claim.owner(), &(0..2)) else { panic!("nothing is gone") };
        std::thread::scope(|scope| {
            let call = scope.spawn(|| {
                inner.withdraw(part.clone(), Duration::from_secs(3600), || {
                    let pinned = AddressRange::new(0, BASE_PAGE);
                    let moving = inner.pins.start_moving(&(1..3));
                    moving.map(drop).map_err(|_| Error::Pinned { range: pinned })
                })
            });
            while !inner.is_waited_for(&(1..3)) && !call.is_finished() {
                std::thread::yield_now();
            }
            let guard = region.pin(2 * BASE_PAGE..3 * BASE_PAGE).unwrap();
            drop(under_way);
            let refused = call.join().unwrap().map(drop);
            assert!(matches!(refused, Err(Error::Pinned { .. })), "{refused:?}");
            drop(guard);
        });
        assert_eq!(
            claim.pages_left(),
            [0..4],
            "a call that took nothing has taken pages from a job"
        );
        assert!(!inner.is_waited_for(&(0..4)));
    }

    #[test]
    fn no_attempt_begins_on_what_a_call_waits_for() {
        let mut claims = Claims::default();
        let job = open(&mut claims, &(0..8));
        assert_eq!(claims.begin(job, &(0..2)), Ok(()));
        let [first, second] = [claims.new_owner(), claims.new_owner()];
        claims.waiting = vec![(first, 1..4), (second, 3..5)];
        assert_eq!(claims.begin(job, &(2..6)), Err(vec![2..5]));
        assert_eq!(claims.sort(job, &[2..5]), (vec![2..5], vec![]), "a call may yet give up");
        assert_eq!(claims.claim(&(4..9)), None, "a new job gets what a call waits for");
        // Waiting calls come in order, and before calls that do not wait.
        assert_eq!(withdraw(&mut claims, &(1..4), Some(first)), None, "it is under way");
        assert_eq!(withdraw(&mut claims, &(3..5), Some(second)), None, "it is not its turn");
        assert_eq!(withdraw(&mut claims, &(4..6), None), None, "it is not its turn");
        claims.left_of(job, &(0..8)).for_each(|(_, part)| part.open = false);
        assert_eq!(claims.begin(job, &(2..6)), Ok(()), "a job waits for a call that waits for it");
        claims.end(&(2..6));
        claims.left_of(job, &(0..8)).for_each(|(_, part)| part.open = true);
        claims.end(&(0..2));
        assert!(withdraw(&mut claims, &(1..4), Some(first)).is_some());
        claims.waiting.remove(0);
        assert_eq!(withdraw(&mut claims, &(3..5), Some(second)), None, "a call has part of it");
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Compares with a list of the owner of each byte.
        #[test]
        fn agrees_with_a_list_of_bytes(steps in prop::collection::vec((0usize..40, 1usize..12, 0u8..4, any::<prop::sample::Index>()), 1..60)) {
            let mut claims = Claims::default();
            let mut bytes = [None; 52];
            let mut jobs: Vec<(Owner, Range<usize>)> = Vec::new();
            for (start, len, what, pick) in steps {
                let range = start..start + len;
                let slots = &mut bytes[range.clone()];
                let is_job = |owner: &Owner| jobs.iter().any(|(job, _)| job == owner);
                match what {
                    0 => {
                        let free = slots.iter().all(|owner| owner.is_none());
                        let claimed = claims.claim(&range);
                        prop_assert_eq!(claimed.is_some(), free);
                        if let Some(owner) = claimed {
                            slots.fill(Some(owner));
                            claims.left_of(owner, &range).for_each(|(_, part)| part.open = true);
                            jobs.push((owner, range));
                        }
                    }
                    1 => {
                        let allowed = slots.iter().flatten().all(is_job);
                        let owner = withdraw(&mut claims, &range, None);
                        prop_assert_eq!(owner.is_some(), allowed);
                        if let Some(owner) = owner {
                            slots.fill(Some(owner));
                        }
                    }
                    2 if !jobs.is_empty() => {
                        let (job, _) = jobs[pick.index(jobs.len())];
                        let begun = claims.begin(job, &range);
                        if begun.is_ok() {
                            claims.end(&range);
                        }
                        let gone: Vec<usize> = begun.err().into_iter().flatten().flatten().collect();
                        let expected: Vec<usize> =
                            range.filter(|byte| bytes[*byte] != Some(job)).collect();
                        prop_assert_eq!(gone, expected);
                    }
                    _ if !jobs.is_empty() => {
                        let (job, claimed) = jobs.swap_remove(pick.index(jobs.len()));
                        let left: Vec<usize> = claims.left_of(job, &claimed).map(|(start, _)| start).collect();
                        left.iter().for_each(|start| _ = claims.parts.remove(start));
                        bytes.iter_mut().filter(|owner| **owner == Some(job)).for_each(|owner| *owner = None);
                    }
                    _ => {}
                }
                let mut seen = [None; 52];
                for (start, part) in &claims.parts {
                    prop_assert!(seen[*start..part.end].iter().all(|owner| owner.is_none()));
                    seen[*start..part.end].fill(Some(part.owner));
                }
                prop_assert_eq!(seen, bytes);
            }
        }
    }
}
