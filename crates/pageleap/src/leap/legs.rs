//! Cuts ranges into legs: consecutive pages that move to consecutive frames, with equal attributes.
//! Such pages can form one mapping before the move and one after it, so an engine moves any part of
//! a leg by few calls.
//!
//! For example, pages 0 to 4 lie in frames 0 to 4, pages 5 to 9 in frames 20 to 24, and all get
//! frames 40 to 49. That makes two legs, or four if page 7 alone is locked: 0 to 4, 5 to 6, 7, and
//! 8 to 9.
//!
//! [`Claimed::claim`] claims a range, [`Claimed::plan`] takes frames and cuts the legs, and
//! [`lend_aliases`] prepares the exchange of page tables.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::backend::{Errno, Prot, attributes};
use crate::error::Error;
use crate::job::plan;
use crate::observe::{self, AttributeRun, Attributes};
use crate::pool::{ALIAS_ATTRIBUTES, Destination, Needs, Run, Share, Target};
use crate::region::{Claim, Extent, Region};
use crate::sync::lock;
use crate::units::NodeId;

/// Consecutive pages that move from consecutive frames to consecutive frames.
pub(crate) struct Leg {
    /// Index of the claimed range it belongs to.
    pub(crate) item: usize,
    /// Pages of the region.
    pub(crate) pages: Range<u64>,
    /// The share whose frames they leave.
    pub(crate) from: Share,
    /// The frame that the first page leaves.
    pub(crate) from_frame: u64,
    /// The share whose frames they get.
    pub(crate) to: Share,
    /// The destination's frame for the first page.
    pub(crate) to_frame: u64,
    /// The node to which the page tables belong that map them then; `None` if it makes no
    /// difference.
    pub(crate) tables: Option<NodeId>,
    /// The attributes that the user has set on them.
    pub(crate) attributes: Attributes,
    /// Whether page tables can be exchanged: the alias has been given the attributes.
    pub(crate) exchange: bool,
}

impl Leg {
    /// The destination's frames of all its pages.
    pub(crate) fn frames(&self) -> Run {
        self.frames_of(&self.pages)
    }

    /// The destination's frames of some of its pages.
    pub(crate) fn frames_of(&self, pages: &Range<u64>) -> Run {
        let first = self.to_frame + (pages.start - self.pages.start);
        Run { first, frames: pages.end - pages.start }
    }

    /// Whether the alias of the destination's frames may get the attributes of the pages.
    fn may_exchange(&self) -> bool {
        // No `madvise` takes advice on huge pages back, and the alias must not keep it. Nor must
        // the alias lose its access for good: pages that their user may not read are read through
        // it.
        self.attributes.huge_pages.is_none() && self.attributes.prot.readable()
    }

    /// Gives the alias of some of the frames the attributes of the pages. Its access stays until
    /// the commit, because the copy needs it.
    pub(crate) fn lend_attributes(&self, run: Run) -> Result<(), Errno> {
        let (addr, len) =
            (self.to.0.alias_of(run.first), run.frames as usize * self.to.page_size().bytes());
        self.to.mark_borrowed(run);
        let wanted = Attributes { prot: Prot::READ_WRITE, ..self.attributes };
        // `mlockall` may have locked it, and an exchange takes that along.
        // SAFETY: the alias of frames that this job has taken.
        let _ = unsafe { self.to.0.backend.unlock(addr, len) };
        // SAFETY: the alias of frames that this job has taken.
        unsafe { attributes::advise(&*self.to.0.backend, addr, len, &ALIAS_ATTRIBUTES, &wanted) }
    }
}

/// Refuses if the descriptor of a share that pages leave or reach has been closed.
pub(crate) fn check_descriptors(claimed: &[Claimed]) -> Result<(), Error> {
    // Many ranges have frames of few shares.
    let mut shares: BTreeMap<u64, Share> = BTreeMap::new();
    for (moving, to, _) in claimed.iter().flat_map(Claimed::parts) {
        if !moving.is_empty() {
            shares.entry(to.id()).or_insert(to);
        }
        for Extent { share, .. } in moving {
            shares.entry(share.id()).or_insert(share);
        }
    }
    shares.values().try_for_each(Share::check_descriptor)
}

/// Lends the aliases of all legs' frames the attributes of their pages, and notes for which legs
/// page tables can be exchanged. One call serves neighbouring frames of several legs.
pub(crate) fn lend_aliases(claimed: &mut [Claimed]) {
    let mut legs: Vec<&mut Leg> = claimed.iter_mut().flat_map(|one| &mut one.legs).collect();
    legs.retain(|leg| leg.may_exchange());
    legs.sort_by_key(|leg| (leg.to.id(), leg.to_frame));
    let lie_together = |one: &&mut Leg, next: &&mut Leg| {
        one.to == next.to
            && one.frames().end() == next.to_frame
            && one.attributes == next.attributes
    };
    for alike in legs.chunk_by_mut(lie_together) {
        let frames = alike.iter().map(|leg| leg.frames().frames).sum();
        let lent = alike[0].lend_attributes(Run { frames, ..alike[0].frames() }).is_ok();
        alike.iter_mut().for_each(|leg| leg.exchange = lent);
    }
}

/// One range of a job: its claim, its legs, and the frames that they get.
pub(crate) struct Claimed {
    pub(crate) claim: Claim,
    to: Target,
    pub(crate) legs: Vec<Leg>,
    /// Frames taken from the destination that no page maps yet, by their share's id and the first
    /// frame.
    unused: BTreeMap<(u64, u64), (Share, Run)>,
}

impl Claimed {
    /// Claims a range.
    pub(crate) fn claim(
        region: &Region,
        bytes: Range<usize>,
        to: &Destination,
    ) -> Result<Claimed, Error> {
        let inner = region.inner();
        let to = to.resolve(inner.capacity(), inner.page)?;
        inner.check_range(bytes.clone(), region.len())?;
        let claim = inner.claim(bytes)?;
        Ok(Claimed { claim, to, legs: Vec::new(), unused: BTreeMap::new() })
    }

    /// The extents that have to move, with the share whose frames they get and the node to which
    /// their page tables belong then.
    fn parts(&self) -> Vec<(Vec<Extent<Share>>, Share, Option<NodeId>)> {
        let pages = self.claim.region().pages(&self.claim.range());
        let extents = lock(&self.claim.region().extents);
        let parts = self.to.parts(pages).map(|(part, to)| {
            let moving: Vec<_> = extents.within(part).filter(|e| e.share != *to).collect();
            (moving, to.clone(), self.to.tables(to))
        });
        parts.collect()
    }

    /// Adds the number of frames that the range takes.
    pub(crate) fn add_needs(&self, needs: &mut Needs) {
        for (moving, to, _) in self.parts() {
            moving.iter().for_each(|extent| needs.add(&to, extent.pages.end - extent.pages.start));
        }
    }

    /// Takes frames for the pages that have to move, and makes the legs. `attributes` cover at
    /// least this range.
    pub(crate) fn plan(
        &mut self,
        attributes: &[AttributeRun],
        needs: &mut Needs,
    ) -> Result<(), Error> {
        self.check_whole_pages(attributes)?;
        for (moving, to, tables) in self.parts() {
            for span in plan::joined(moving.iter().map(|e| e.pages.clone())) {
                let frames = span.end - span.start;
                // Dropping this gives the frames back.
                let runs = needs.taken(&to, frames, to.take(frames, span.start))?;
                self.unused.extend(runs.iter().map(|run| unused(&to, *run)));
                let mut page = span.start;
                for run in runs {
                    let pages = page..page + run.frames;
                    page = pages.end;
                    let sources = overlapping(&moving, &pages, |e| e.pages.clone());
                    let to = NewFrames { share: &to, first: run.first, tables };
                    self.add_legs(&pages, sources, &to, attributes)?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a range whose attributes change within a page. The kernel allows that for
    /// transparent huge pages, but a leap moves whole pages.
    fn check_whole_pages(&self, attributes: &[AttributeRun]) -> Result<(), Error> {
        let (inner, range) = (self.claim.region(), self.claim.range());
        let inside = inner.start + range.start + 1..inner.start + range.end;
        let mut edges = attributes.iter().flat_map(|a| [a.start, a.end]);
        let within = |edge: &usize| {
            inside.contains(edge) && !(edge - inner.start).is_multiple_of(inner.page.bytes())
        };
        let Some(edge) = edges.find(within) else { return Ok(()) };
        let bytes = inner.page.bytes();
        let remedy =
            format!("set them for whole pages of {bytes} bytes; there is a boundary at {edge:#x}");
        Err(inner.bad_range(range, "access, lock or advice change within a page", remedy))
    }

    /// Adds the legs of consecutive pages that get consecutive frames.
    fn add_legs(
        &mut self,
        pages: &Range<u64>,
        sources: &[Extent<Share>],
        to: &NewFrames<'_>,
        attributes: &[AttributeRun],
    ) -> Result<(), Error> {
        let inner = self.claim.region();
        let page_of = |addr: usize| ((addr - inner.start) / inner.page.bytes()) as u64;
        let pages_of = |a: &AttributeRun| page_of(a.start)..page_of(a.end);
        let attributes = overlapping(attributes, pages, pages_of);
        let edges = attributes.iter().flat_map(|a| [page_of(a.start), page_of(a.end)]);
        let boundaries = sources.iter().map(|e| e.pages.start).chain(edges);
        for part in plan::cut(pages.clone(), boundaries) {
            let set = overlapping(attributes, &part, pages_of);
            let Some(attributes) = set.first().map(|run| run.attributes) else {
                let len = inner.bytes(part.end - part.start);
                return Err(observe::not_shown(inner.addr(part.start), len));
            };
            let source = overlapping(sources, &part, |e| e.pages.clone()).first();
            let source = source.expect("the spans are made of them");
            self.legs.push(Leg {
                item: 0,
                from: source.share.clone(),
                from_frame: source.first_frame + (part.start - source.pages.start),
                to: to.share.clone(),
                to_frame: to.first + (part.start - pages.start),
                tables: to.tables,
                pages: part,
                attributes,
                exchange: false,
            });
        }
        Ok(())
    }

    /// The nodes of its destination.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.to.shares.iter().map(Share::node)
    }

    /// How many pages have to move.
    pub(crate) fn moving_pages(&self) -> u64 {
        self.legs.iter().map(|leg| leg.pages.end - leg.pages.start).sum()
    }

    pub(crate) fn leg_count(&self) -> usize {
        self.legs.len()
    }

    /// Gives back the frames that no page maps.
    pub(crate) fn give_back_unused(&mut self) {
        // After a failure the frames stay out of circulation until the pool tries again. There is
        // nobody to report it to.
        let mut runs: Vec<(Share, Run)> = Vec::new();
        for (share, run) in std::mem::take(&mut self.unused).into_values() {
            match runs.last_mut() {
                Some((last, before)) if *last == share && before.end() == run.first => {
                    before.frames += run.frames
                }
                _ => runs.push((share, run)),
            }
        }
        runs.into_iter().for_each(|(share, run)| drop(share.give_back(run)));
    }

    /// Notes that pages now map these frames of a share.
    pub(crate) fn mark_used(&mut self, share: &Share, used: Run) {
        let before = self.unused.range(..=(share.id(), used.first)).next_back();
        let key = *before.expect("frames of this range").0;
        let (share, whole) = self.unused.remove(&key).expect("it was found there");
        assert!(share.id() == key.0 && used.end() <= whole.end(), "{used:?} are not of this range");
        let rest = [
            Run { first: whole.first, frames: used.first - whole.first },
            Run { first: used.end(), frames: whole.end() - used.end() },
        ];
        self.unused
            .extend(rest.into_iter().filter(|r| r.frames > 0).map(|run| unused(&share, run)));
    }
}

/// The frames that consecutive pages get.
struct NewFrames<'a> {
    share: &'a Share,
    first: u64,
    /// The node to which the page tables belong that map them then.
    tables: Option<NodeId>,
}

fn unused(share: &Share, run: Run) -> ((u64, u64), (Share, Run)) {
    ((share.id(), run.first), (share.clone(), run))
}

/// The elements of `all`, which are in order and disjoint, that overlap `pages`.
fn overlapping<'a, T>(
    all: &'a [T],
    pages: &Range<u64>,
    pages_of: impl Fn(&T) -> Range<u64>,
) -> &'a [T] {
    let first = all.partition_point(|one| pages_of(one).end <= pages.start);
    let end = all.partition_point(|one| pages_of(one).start < pages.end);
    &all[first..end.max(first)]
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.give_back_unused();
    }
}
