//! Where pages of a leg lie, and whether they are to move.

use std::ops::Range;

use pageleap_sys::Errno;

use super::call::UNWRITTEN;
use super::leg::Leg;
use super::mover::{Entry, HUGE_PAGES, KernelMover, Worker};
use crate::engine::effort::Counters;
use crate::job::area::{Reason, Verdict};
use crate::units::{BASE_PAGE, Call, NodeId};

/// Where pages of a leg lie and where they are to lie.
pub(super) struct Looked<'a> {
    leg: &'a Leg,
    pub(super) pages: Range<u64>,
    /// By unit: the node, or a negated error number.
    pub(super) status: Vec<i32>,
    /// Where parts of the pages are to lie.
    parts: Vec<(Range<u64>, NodeId)>,
    /// By unit, why a page has no node; empty if all have one.
    absent: Vec<Reason>,
}

impl<'a> Looked<'a> {
    pub(super) fn at(
        mover: &KernelMover,
        leg: &'a Leg,
        pages: Range<u64>,
        counters: &mut Counters,
    ) -> Result<Looked<'a>, (Call, Errno)> {
        let process = &mover.processes[leg.process];
        let units = pages.clone().step_by(leg.unit as usize);
        let addresses: Vec<usize> = units.clone().map(|page| page as usize * BASE_PAGE).collect();
        let mut status = vec![UNWRITTEN; addresses.len()];
        counters.count(Call::QueryNodes);
        process.calls.query(&addresses, &mut status).map_err(|e| (Call::QueryNodes, e))?;
        let absent = match status.iter().any(|status| *status < 0) {
            false => Vec::new(),
            true if leg.unit == 1 => process.why_absent(pages.start, status.len()),
            true => units.map(|page| process.why_absent(page, 1)[0]).collect(),
        };
        let parts = leg.parts(pages.clone());
        Ok(Looked { leg, pages, status, parts, absent })
    }

    /// Whether no page is present, and none is swapped out.
    pub(super) fn is_empty(&self) -> bool {
        !self.absent.is_empty()
            && self.absent.iter().all(|why| *why == Reason::Absent)
            && self.status.iter().all(|status| *status < 0)
    }

    fn unit_of(&self, page: u64) -> usize {
        ((page - self.pages.start) / self.leg.unit) as usize
    }

    /// The part that a page belongs to.
    pub(super) fn part(&self, page: u64) -> &(Range<u64>, NodeId) {
        let at = self.parts.partition_point(|(part, _)| part.end <= page);
        &self.parts[at]
    }

    /// The page as an entry of a list, or why it need not move.
    /// `first`: no page of the area has been tried before.
    pub(super) fn entry(
        &self,
        mover: &KernelMover,
        worker: &Worker,
        page: u64,
        first: bool,
    ) -> Result<Entry, Verdict> {
        let unit = self.unit_of(page);
        let (part, node) = self.part(page);
        let Ok(on) = u32::try_from(self.status[unit]) else {
            return Err(match self.absent[unit] {
                // It came between the two questions.
                Reason::ZeroPage if mover.lies_somewhere(self.leg, page) => {
                    Verdict::Later(Reason::InUse)
                }
                // Before Linux 6.12, the kernel does not find pages that nobody may access.
                Reason::ZeroPage if self.leg.has_no_access => {
                    Verdict::Left(Some(Reason::Unmovable))
                }
                // An entry of a page that is on its way elsewhere looks the same.
                Reason::SwappedOut if first => Verdict::Later(Reason::SwappedOut),
                why => Verdict::Left(Some(why)),
            });
        };
        let is_elsewhere = mover.manner.from.as_ref().is_some_and(|all| !all.contains(&NodeId(on)));
        if NodeId(on) == *node {
            return Err(Verdict::Left(None));
        }
        if is_elsewhere {
            return Err(Verdict::Left(Some(Reason::OtherNode)));
        }
        let whole = page..page + HUGE_PAGES;
        let is_block = self.leg.maybe_huge
            && page.is_multiple_of(HUGE_PAGES)
            && whole.end <= self.pages.end
            && whole.end <= part.end
            && !worker.is_apart(self.leg, page);
        let status = || &self.status[unit..unit + HUGE_PAGES as usize];
        let span = match is_block && status().iter().all(|other| *other == self.status[unit]) {
            true => HUGE_PAGES,
            false => self.leg.unit,
        };
        Ok(Entry { page, span, node: *node })
    }
}
