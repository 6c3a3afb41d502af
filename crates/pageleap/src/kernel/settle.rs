//! Where the pages of a job lie at its end.
//!
//! The kernel moves folios as a whole, and not all of them are seen beforehand. A call may take pages
//! along that had been dealt with, and says of others that they are in use although they come along.
//! So the last word is that of a query at the end.

use std::collections::BTreeSet;
use std::ops::Range;

use super::call::UNWRITTEN;
use super::leg::Leg;
use super::mover::{BY, KernelMover, QUERY};
use crate::error::Error;
use crate::job::area::Reason;
use crate::job::books::Books;
use crate::job::outcomes::{PageOutcome, State};
use crate::units::{BASE_PAGE, NodeId};

/// What a query says of a page of which something else is noted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Now {
    Arrived,
    MovedOn,
}

impl KernelMover {
    /// Asks where all pages lie that have moved, needed no move, or were tried in vain, and corrects
    /// what is noted of them. What a process had that has ended since stays as noted.
    ///
    /// A page that has left its node again has moved, if all pages have the same target: somebody
    /// else has moved it on. If there are several, another part of its folio may have been for
    /// another one, and the page has not come where it belongs.
    ///
    /// `is_ours`: whether this mover has moved the pages of a leg.
    pub(crate) fn settle(&self, books: Books<'_>, is_ours: impl Fn(usize) -> bool) {
        let targets: BTreeSet<NodeId> =
            self.legs.iter().flat_map(|leg| leg.nodes.clone()).collect();
        let mut is_changed = false;
        for (_, leg) in self.legs.iter().enumerate().filter(|(number, _)| is_ours(*number)) {
            let runs = books.outcomes(leg.item, &leg.pages).into_iter().filter(is_known);
            let pages = runs.flat_map(|(run, (outcome, _))| {
                run.step_by(leg.unit as usize).map(move |page| (page, outcome))
            });
            let mut pages = pages.peekable();
            while pages.peek().is_some() {
                let some: Vec<_> = pages.by_ref().take(QUERY as usize).collect();
                is_changed |= self.settle_pages(leg, &some, targets.len(), books);
            }
        }
        if is_changed {
            books.failed_first(self.first_that_failed(books));
        }
    }

    /// Returns whether something else was noted.
    fn settle_pages(
        &self,
        leg: &Leg,
        pages: &[(u64, PageOutcome)],
        targets: usize,
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
            books.warn_once(format!(
                "where pages lie at the end is not known: move_pages failed with {errno}"
            ));
            return false;
        }
        let found = changed(leg, pages, &status);
        for (run, before, now) in &found {
            match now {
                Now::Arrived => books.arrived(leg.item, run, BY),
                Now::MovedOn if targets == 1 => {
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

/// Whether pages have moved, needed no move, or were tried in vain.
fn is_known((_, state): &(Range<u64>, State)) -> bool {
    match state {
        (PageOutcome::Migrated | PageOutcome::Failed | PageOutcome::Busy, _) => true,
        state => *state == (PageOutcome::Unchanged, None),
    }
}

/// The pages of which something else is true than is noted, in runs.
fn changed(
    leg: &Leg,
    pages: &[(u64, PageOutcome)],
    status: &[i32],
) -> Vec<(Range<u64>, PageOutcome, Now)> {
    let mut runs: Vec<(Range<u64>, PageOutcome, Now)> = Vec::new();
    for ((page, before), status) in pages.iter().zip(status) {
        // A page that is absent now may have moved, and gone since.
        let Ok(on) = u32::try_from(*status) else { continue };
        let whole = *page..page + leg.unit;
        let is_there = leg.parts(whole.clone())[0].1 == NodeId(on);
        let was_tried = matches!(before, PageOutcome::Failed | PageOutcome::Busy);
        let now = match (is_there, was_tried) {
            (true, true) => Now::Arrived,
            (false, false) => Now::MovedOn,
            _ => continue,
        };
        match runs.last_mut() {
            Some((last, same, then)) if last.end == *page && (*same, *then) == (*before, now) => {
                last.end = whole.end;
            }
            _ => runs.push((whole, *before, now)),
        }
    }
    runs
}
