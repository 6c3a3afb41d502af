//! Folios whose pages are wanted on several nodes.
//!
//! The kernel moves folios as a whole, and nothing tells on all kernels how large one is: smaps shows
//! those of 2 MB that are mapped as such, but none of 16 KB to 1 MB (Linux 6.8), and none that is
//! mapped page by page. So it is seen by what calls do: a page that was left alone, or had arrived,
//! lies on another node afterwards. From there on, stripes have 2 MB, the largest folio of a mapping.

use std::ops::Range;

use pageleap_sys::Errno;

use super::mover::{Found, HUGE_PAGES, KernelMover, Looked, Worker};
use crate::job::area::{Area, Reason, Verdict};
use crate::units::{Call, NodeId};

/// Pages of a leg that the last calls were about, by runs, and where they lay after them.
#[derive(Default)]
pub(super) struct Lately {
    leg: usize,
    lay: Vec<(u64, Vec<i32>)>,
}

impl Lately {
    /// The last runs of the leg, as many as may share a folio with what comes next.
    fn take(&mut self, leg: usize) -> Vec<(u64, Vec<i32>)> {
        if self.leg != leg {
            return Vec::new();
        }
        let mut pages = 0;
        let is_near = |(_, status): &&(u64, Vec<i32>)| {
            let before = pages;
            pages += status.len() as u64;
            before < HUGE_PAGES
        };
        let kept = self.lay.iter().rev().take_while(is_near).count();
        self.lay.split_off(self.lay.len() - kept)
    }
}

impl KernelMover {
    /// Looks whether the call has taken pages along that are to lie elsewhere. If so, the leg goes
    /// by stripes of 2 MB from there on, beginning with the pages that are new in this attempt. Not
    /// when pages are tried again: the rest of the leg has been dealt with by then.
    pub(super) fn notice_folios(
        &self,
        worker: &mut Worker,
        area: &Area,
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        let leg = &self.legs[area.leg];
        if area.refused > 0 || !leg.may_part_folios() {
            return Ok(());
        }
        let runs = |(start, status): &(u64, Vec<i32>)| *start..*start + status.len() as u64;
        let tried: Vec<Range<u64>> = found.lay.iter().map(runs).collect();
        let mut lay = worker.lately.take(area.leg);
        lay.append(&mut found.lay);
        let mut along: Option<u64> = None;
        for (start, before) in &mut lay {
            let pages = *start..*start + before.len() as u64;
            let now = Looked::at(self, leg, pages.clone(), &mut found.effort)?;
            for ((page, before), status) in pages.zip(&*before).zip(&now.status) {
                let is_wanted =
                    u32::try_from(*status).is_ok_and(|on| NodeId(on) == now.part(page).1);
                if *before >= 0 && *status >= 0 && status != before && !is_wanted {
                    along = Some(along.map_or(page, |first| first.min(page)));
                }
            }
            *before = now.status;
        }
        worker.lately = Lately { leg: area.leg, lay };
        let (Some(along), Some(first)) = (along, tried.first()) else { return Ok(()) };
        let again = self.once_more(worker, area, Reason::MovedOn);
        if !matches!(again, Verdict::Later(_)) {
            // What lies elsewhere stays there. The rest of the leg fares better.
            let end = tried.last().map_or(first.end, |run| run.end);
            leg.go_by_blocks_from(end.max(found.looked_to));
            return Ok(());
        }
        let from = leg.block_start(along).max(first.start).max(found.looked_to);
        leg.go_by_blocks_from(from);
        let again_by_blocks = tried.into_iter().map(|run| run.start.max(from)..run.end);
        found.replace(again_by_blocks.filter(|run| !run.is_empty()), again);
        Ok(())
    }
}
