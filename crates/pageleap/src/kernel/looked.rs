//! Queries where the pages of a leg lie, and decides which of them have to move.

use std::collections::BTreeSet;
use std::ops::Range;

use pageleap_sys::Errno;

use super::call::UNWRITTEN;
use super::leg::{HUGE_PAGES, Leg};
use super::target::Process;
use crate::engine::effort::Counters;
use crate::job::area::{Reason, Verdict};
use crate::units::{BASE_PAGE, Call, NodeId};

/// A page of the list of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) page: u64,
    /// Base pages that are expected to move with it: 512 if it looks like a huge page.
    pub(super) span: u64,
    pub(super) node: NodeId,
}

/// Pages of a leg: where they lie, and their destinations.
pub(super) struct Looked<'a> {
    process: &'a Process,
    leg: &'a Leg,
    pub(super) pages: Range<u64>,
    /// By unit: the node, or a negated error number.
    pub(super) status: Vec<i32>,
    /// The pages in runs with one destination.
    parts: Vec<(Range<u64>, NodeId)>,
    /// By unit: why a page has no node. Empty if all have one.
    absent: Vec<Reason>,
}

impl<'a> Looked<'a> {
    pub(super) fn at(
        process: &'a Process,
        leg: &'a Leg,
        pages: Range<u64>,
        counters: &mut Counters,
    ) -> Result<Looked<'a>, (Call, Errno)> {
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
        Ok(Looked { process, leg, pages, status, parts, absent })
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

    /// The run that a page belongs to, with its destination.
    pub(super) fn part(&self, page: u64) -> &(Range<u64>, NodeId) {
        let at = self.parts.partition_point(|(part, _)| part.end <= page);
        &self.parts[at]
    }

    /// Whether a page is present, and is not the zero page.
    fn lies_somewhere(&self, page: u64) -> bool {
        let mut status = [UNWRITTEN];
        let asked = self.process.calls.query(&[page as usize * BASE_PAGE], &mut status);
        asked.is_ok() && status[0] >= 0
    }

    /// The page as an entry of a list, or why it need not move.
    ///
    /// `from`: the nodes from which pages move; `None`: from all. `is_apart`: whether the block of
    /// a page did not move as one page. `first`: no page of the area has been tried before.
    pub(super) fn entry(
        &self,
        from: Option<&BTreeSet<NodeId>>,
        is_apart: impl Fn(u64) -> bool,
        page: u64,
        first: bool,
    ) -> Result<Entry, Verdict> {
        let unit = self.unit_of(page);
        let (part, node) = self.part(page);
        let Ok(on) = u32::try_from(self.status[unit]) else {
            return Err(match self.absent[unit] {
                // It has become present between the two queries.
                Reason::ZeroPage if self.lies_somewhere(page) => Verdict::Later(Reason::InUse),
                // Before Linux 6.12, the kernel does not find pages without access (PROT_NONE).
                Reason::ZeroPage if self.leg.has_no_access => {
                    Verdict::Left(Some(Reason::Unmovable))
                }
                // The page-table entry of a page that is being migrated looks like that of a
                // swapped page.
                Reason::SwappedOut if first => Verdict::Later(Reason::SwappedOut),
                why => Verdict::Left(Some(why)),
            });
        };
        let is_elsewhere = from.is_some_and(|all| !all.contains(&NodeId(on)));
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
            && !is_apart(page);
        let status = || &self.status[unit..unit + HUGE_PAGES as usize];
        let span = match is_block && status().iter().all(|other| *other == self.status[unit]) {
            true => HUGE_PAGES,
            false => self.leg.unit,
        };
        Ok(Entry { page, span, node: *node })
    }
}
