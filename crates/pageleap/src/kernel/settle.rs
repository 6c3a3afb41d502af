//! Queries once more, at the end of a job, where its pages lie, and corrects their outcomes.
//!
//! This is needed because the kernel moves folios as a whole, and not all folios are visible
//! beforehand. A call may move pages along that already had an outcome, and may report pages as in
//! use that did move along.

use std::collections::BTreeSet;
use std::ops::Range;

use super::call::UNWRITTEN;
use super::leg::Leg;
use super::mover::{BY, KernelMover, QUERY};
use crate::error::Error;
use crate::job::area::Reason;
use crate::job::books::Books;
use crate::job::outcomes::{PageOutcome, State};
use crate::job::report::{Warning, WarningKind};
use crate::units::{BASE_PAGE, Call, NodeId};

/// The most pages that a job queries at its end if it was told to stop: those of 4 GB, which takes
/// less than a second. (Unit tests have fewer, so that they reach the bound.)
const MOST_WHEN_STOPPED: usize = if cfg!(test) { 4096 } else { 1 << 20 };

/// An answer that contradicts the noted outcome of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Now {
    /// A page that failed, or was in use, lies on its node now.
    Arrived,
    /// A page that had moved, or had its node from the start, lies elsewhere now.
    MovedOn,
}

impl KernelMover {
    /// Queries on which nodes pages lie, and corrects outcomes that the answers contradict. It
    /// queries pages that have moved, that failed, or that were in use. In a job with several
    /// destinations it also queries pages that had the right node from the start, because a call
    /// may have moved them along with a part of their folio that has another destination. Pages of
    /// a process that has ended keep their outcome.
    ///
    /// For a page that lies elsewhere now, the outcome depends on the number of destinations. With
    /// one, the page counts as moved, because only another process, or the kernel, can have moved it
    /// on. With several, it counts as failed, because this job may have moved it along with its
    /// folio.
    ///
    /// A job that was told to stop queries at most [`MOST_WHEN_STOPPED`] pages. The others keep the
    /// outcome of their last call, of which the report warns.
    ///
    /// `is_ours`: whether this mover has moved the pages of a leg.
    pub(crate) fn settle(&self, books: Books<'_>, is_ours: impl Fn(usize) -> bool) {
        let targets: BTreeSet<NodeId> =
            self.legs.iter().flat_map(|leg| leg.nodes.clone()).collect();
        let has_one_target = targets.len() == 1;
        let (mut is_changed, mut left) = (false, MOST_WHEN_STOPPED);
        let legs = self.legs.iter().enumerate().filter(|(number, _)| is_ours(*number));
        'legs: for (_, leg) in legs {
            let runs = books.outcomes(leg.item, &leg.pages).into_iter();
            let runs = runs.filter(|(_, state)| may_have_changed(*state, has_one_target));
            let pages = runs.flat_map(|(run, (outcome, _))| {
                run.step_by(leg.unit as usize).map(move |page| (page, outcome))
            });
            let mut pages = pages.peekable();
            while pages.peek().is_some() {
                let some: Vec<_> = pages.by_ref().take(QUERY as usize).collect();
                if !may_ask(some.len(), &mut left, books) {
                    break 'legs;
                }
                is_changed |= self.settle_pages(leg, &some, has_one_target, books);
            }
        }
        if is_changed {
            books.failed_first(self.first_that_failed(books));
        }
    }

    /// Returns whether an outcome was corrected.
    fn settle_pages(
        &self,
        leg: &Leg,
        pages: &[(u64, PageOutcome)],
        has_one_target: bool,
        books: Books<'_>,
    ) -> bool {
        let process = &self.processes[leg.process];
        if process.is_gone() {
            return false;
        }
        let addresses: Vec<usize> =
            pages.iter().map(|(page, _)| *page as usize * BASE_PAGE).collect();
        let mut status = vec![UNWRITTEN; pages.len()];
        let asked = process.calls.query(&addresses, &mut status);
        if process.is_gone() {
            return false;
        }
        if let Err(errno) = asked {
            let text =
                format!("where pages lie at the end is not known: move_pages failed with {errno}");
            books.warn_once(Warning::of(WarningKind::Places, text, Call::QueryNodes, errno));
            return false;
        }
        let found = changed(leg, pages, &status);
        for (run, before, now) in &found {
            match now {
                Now::Arrived => books.arrived(leg.item, run, BY),
                Now::MovedOn if has_one_target => {
                    books.explain(leg.item, run, *before, Reason::MovedOn);
                }
                Now::MovedOn => books.moved_on(leg.item, run, *before, BY),
            }
        }
        !found.is_empty()
    }

    fn first_that_failed(&self, books: Books<'_>) -> Option<Error> {
        self.legs.iter().find_map(|leg| {
            let mut runs = books.outcomes(leg.item, &leg.pages).into_iter();
            runs.find_map(|(pages, state)| match state {
                (PageOutcome::Failed, Some(why)) => Some(self.not_moved(leg, &pages, why)),
                _ => None,
            })
        })
    }
}

/// Whether this many pages may be queried. `left`: how many a job that was told to stop may still
/// query.
fn may_ask(pages: usize, left: &mut usize, books: Books<'_>) -> bool {
    if !books.is_to_stop() {
        return true;
    }
    let less = left.checked_sub(pages);
    match less {
        Some(less) => *left = less,
        None => books.warn(Warning::new(
            WarningKind::Places,
            "the job was to stop, so some of its pages were not asked about once more at its end: \
             their outcome is that of their last call",
        )),
    }
    less.is_some()
}

/// Whether pages with this outcome may have moved because of the job since, or have been moved on.
fn may_have_changed(state: State, has_one_target: bool) -> bool {
    match state {
        (PageOutcome::Migrated | PageOutcome::Failed | PageOutcome::Busy, _) => true,
        (PageOutcome::Unchanged, None) => !has_one_target,
        _ => false,
    }
}

/// The pages whose noted outcome is wrong, in runs.
fn changed(
    leg: &Leg,
    pages: &[(u64, PageOutcome)],
    status: &[i32],
) -> Vec<(Range<u64>, PageOutcome, Now)> {
    let mut runs: Vec<(Range<u64>, PageOutcome, Now)> = Vec::new();
    for ((page, before), status) in pages.iter().zip(status) {
        // A page that is absent now may have moved before.
        let Ok(on) = u32::try_from(*status) else { continue };
        let is_there = leg.node_of(*page) == NodeId(on);
        let was_tried = matches!(before, PageOutcome::Failed | PageOutcome::Busy);
        let now = match (is_there, was_tried) {
            (true, true) => Now::Arrived,
            (false, false) => Now::MovedOn,
            _ => continue,
        };
        let whole = *page..page + leg.unit;
        match runs.last_mut() {
            Some((last, same, then)) if last.end == *page && (*same, *then) == (*before, now) => {
                last.end = whole.end;
            }
            _ => runs.push((whole, *before, now)),
        }
    }
    runs
}
