//! From ranges to legs: consecutive pages that move to consecutive frames, with equal attributes.

use std::ops::Range;

use super::attributes;
use super::plan;
use super::report::PageOutcome;
use crate::backend::Prot;
use crate::error::Error;
use crate::observe::{AttributeRun, Attributes};
use crate::pool::{ALIAS_ATTRIBUTES, Pool, Run};
use crate::region::{Claim, Region};
use crate::sync::lock;

/// Consecutive pages that move from consecutive frames to consecutive frames.
pub(crate) struct Leg {
    /// Index of the item it belongs to.
    pub(crate) item: usize,
    /// Pages of the region.
    pub(crate) pages: Range<u64>,
    /// Whose frames they leave.
    pub(crate) from: Pool,
    /// The frame that the first page leaves.
    pub(crate) from_frame: u64,
    /// The destination's frame for the first page.
    pub(crate) to_frame: u64,
    /// What the user has set on them.
    pub(crate) attributes: Attributes,
    /// Whether page tables can be exchanged: the alias has been given the attributes.
    pub(crate) exchange: bool,
}

/// One range of a job: its claim, its legs, and the outcome of each page so far.
pub(crate) struct Item {
    pub(crate) claim: Claim,
    pub(crate) to: Pool,
    pub(crate) legs: Vec<Leg>,
    pub(crate) outcomes: Vec<PageOutcome>,
    /// Frames taken from the destination that no page maps yet.
    unused: Vec<Run>,
}

impl Item {
    /// Claims a range.
    pub(crate) fn claim(region: &Region, bytes: Range<usize>, to: &Pool) -> Result<Item, Error> {
        let inner = region.inner();
        let claim = inner.claim(bytes.clone(), region.len())?;
        let outcomes = vec![PageOutcome::Unchanged; (bytes.end - bytes.start) / inner.page.bytes()];
        Ok(Item { claim, to: to.clone(), legs: Vec::new(), outcomes, unused: Vec::new() })
    }

    /// Takes frames for those pages that have to move, and prepares their aliases. `attributes` are those of at least this range.
    pub(crate) fn plan(&mut self, attributes: &[AttributeRun], exchange: bool) -> Result<(), Error> {
        let item = self;
        let to = item.to.clone();
        let pages = item.claim.region().pages(&item.claim.range());
        let extents: Vec<_> = lock(&item.claim.region().extents).within(pages.clone()).collect();
        let moving: Vec<_> = extents.into_iter().filter(|e| e.pool != to).collect();
        let spans = plan::joined(moving.iter().map(|e| e.pages.clone()));
        // Dropping the item gives the frames back.
        let inner = item.claim.region().clone();
        let page_of = |addr: usize| ((addr - inner.start) / inner.page.bytes()) as u64;
        for span in spans {
            let runs = to.take(span.end - span.start, span.start)?;
            item.unused.extend(&runs);
            let mut page = span.start;
            for run in runs {
                let pages = page..page + run.frames;
                page = pages.end;
                let boundaries = moving
                    .iter()
                    .map(|e| e.pages.start)
                    .chain(attributes.iter().flat_map(|a| [page_of(a.start), page_of(a.end)]));
                for part in plan::cut(pages.clone(), boundaries) {
                    let address = inner.addr(part.start);
                    let covers = |a: &&AttributeRun| (a.start..a.end).contains(&address);
                    let Some(attributes) = attributes.iter().find(covers).map(|a| a.attributes) else {
                        continue;
                    };
                    let source = moving
                        .iter()
                        .find(|e| e.pages.contains(&part.start))
                        .expect("the spans are made of them");
                    item.legs.push(Leg {
                        item: 0,
                        from: source.pool.clone(),
                        from_frame: source.first_frame + (part.start - source.pages.start),
                        to_frame: run.first + (part.start - pages.start),
                        pages: part,
                        attributes,
                        exchange,
                    });
                }
            }
        }
        if exchange {
            item.legs.iter_mut().for_each(|leg| leg.exchange = prepare_alias(&to, leg));
        }
        for leg in &item.legs {
            let at = (leg.pages.start - pages.start) as usize..(leg.pages.end - pages.start) as usize;
            item.outcomes[at].fill(PageOutcome::NotAttempted);
        }
        Ok(())
    }

    pub(crate) fn leg_count(&self) -> usize {
        self.legs.len()
    }

    /// Notes the outcome of pages of the region.
    pub(crate) fn set_outcome(&mut self, pages: &Range<u64>, outcome: PageOutcome) {
        let first = self.claim.region().pages(&self.claim.range()).start;
        self.outcomes[(pages.start - first) as usize..(pages.end - first) as usize].fill(outcome);
    }

    /// Notes that a page maps these frames now.
    pub(crate) fn mark_used(&mut self, used: Run) {
        let at = self.unused.iter().position(|r| r.first <= used.first && used.end() <= r.end());
        let whole = self.unused.swap_remove(at.expect("frames of this item"));
        let rest = [
            Run { first: whole.first, frames: used.first - whole.first },
            Run { first: used.end(), frames: whole.end() - used.end() },
        ];
        self.unused.extend(rest.into_iter().filter(|r| r.frames > 0));
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        // A failure keeps the frames out of circulation until the pool's next attempt; there is nobody to tell.
        self.unused.drain(..).for_each(|run| drop(self.to.give_back(run)));
    }
}

/// Gives the alias of a leg's frames the attributes of its pages. Access stays as it is until the commit: the copy needs it.
fn prepare_alias(pool: &Pool, leg: &Leg) -> bool {
    // There is no advice that takes this one back, and the alias must not keep it. Nor must it lose its access for good: pages that
    // their user may not read are read through it.
    if leg.attributes.huge_pages.is_some() || !leg.attributes.prot.readable() {
        return false;
    }
    let frames = leg.pages.end - leg.pages.start;
    let (addr, len) = (pool.0.alias_of(leg.to_frame), frames as usize * pool.page_size().bytes());
    pool.mark_borrowed(Run { first: leg.to_frame, frames });
    let wanted = Attributes { prot: Prot::READ_WRITE, ..leg.attributes };
    // SAFETY: the alias of frames that this job has taken.
    unsafe { attributes::advise(&*pool.0.backend, addr, len, &ALIAS_ATTRIBUTES, &wanted) }.is_ok()
}
