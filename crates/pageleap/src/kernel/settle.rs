//! Where the pages of a job lie at its end.
//!
//! A call may take pages along that had been dealt with ([`super::folios`]), and says of others that
//! they are in use although they come along. So the last word is that of a query at the end.

use std::ops::Range;

use super::call::UNWRITTEN;
use super::leg::Leg;
use super::mover::{BY, KernelMover, QUERY};
use crate::job::area::Reason;
use crate::job::books::Books;
use crate::job::outcomes::{PageOutcome, State};
use crate::units::{BASE_PAGE, NodeId};

/// What a query says of a page of which something else is noted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Now {
    AsNoted,
    Arrived,
    MovedOn,
}

impl KernelMover {
    /// Asks where all pages lie that have moved, needed no move, or were tried in vain, and corrects
    /// what is noted of them. What a process had that has ended since stays as noted.
    pub(super) fn settle(&self, books: Books<'_>) {
        let mut have_arrived = false;
        for leg in &self.legs {
            for (run, state) in books.outcomes(leg.item, &leg.pages) {
                let is_known = matches!(
                    state,
                    (PageOutcome::Migrated | PageOutcome::Failed | PageOutcome::Busy, _)
                        | (PageOutcome::Unchanged, None)
                );
                let mut at = if is_known { run.start } else { run.end };
                while at < run.end {
                    let end = (at + QUERY * leg.unit).min(run.end);
                    have_arrived |= self.settle_part(leg, at..end, state, books);
                    at = end;
                }
            }
        }
        if have_arrived {
            books.failed_first(self.first_that_failed(books));
        }
    }

    /// Returns whether pages have arrived that were to be tried again, or were given up.
    fn settle_part(&self, leg: &Leg, part: Range<u64>, state: State, books: Books<'_>) -> bool {
        let process = &self.processes[leg.process];
        if process.is_gone() {
            return false;
        }
        let found = self.now(leg, part, state.0);
        if process.is_gone() {
            return false;
        }
        let mut have_arrived = false;
        for (pages, now) in found {
            match now {
                Now::AsNoted => {}
                Now::Arrived => {
                    have_arrived = true;
                    books.arrived(leg.item, &pages, BY);
                }
                Now::MovedOn => books.explain(leg.item, &pages, state.0, Reason::MovedOn),
            }
        }
        have_arrived
    }

    /// What is true of pages of which `outcome` is noted.
    fn now(&self, leg: &Leg, pages: Range<u64>, outcome: PageOutcome) -> Vec<(Range<u64>, Now)> {
        let units: Vec<u64> = pages.clone().step_by(leg.unit as usize).collect();
        let addresses: Vec<usize> = units.iter().map(|page| *page as usize * BASE_PAGE).collect();
        let mut status = vec![UNWRITTEN; units.len()];
        if self.processes[leg.process].calls.query(&addresses, &mut status).is_err() {
            return Vec::new();
        }
        let parts = leg.parts(pages);
        let mut runs: Vec<(Range<u64>, Now)> = Vec::new();
        for (page, status) in units.into_iter().zip(status) {
            let (_, node) = &parts[parts.partition_point(|(part, _)| part.end <= page)];
            // A page that is absent now may have moved, and gone since.
            let on = u32::try_from(status).ok().map(NodeId);
            let was_tried = matches!(outcome, PageOutcome::Failed | PageOutcome::Busy);
            let now = match on.map(|on| on == *node) {
                Some(true) if was_tried => Now::Arrived,
                Some(false) if !was_tried => Now::MovedOn,
                _ => Now::AsNoted,
            };
            match runs.last_mut() {
                Some((last, same)) if *same == now => last.end = page + leg.unit,
                _ => runs.push((page..page + leg.unit, now)),
            }
        }
        runs
    }

    fn first_that_failed(&self, books: Books<'_>) -> Option<crate::error::Error> {
        self.legs.iter().find_map(|leg| {
            let mut runs = books.outcomes(leg.item, &leg.pages).into_iter();
            runs.find_map(|(pages, state)| match state {
                (PageOutcome::Failed, Some(why)) => Some(self.not_moved(leg, &pages, why)),
                _ => None,
            })
        })
    }
}
