//! Chooses the node of the page tables that a worker's calls allocate, and notes it in the region's
//! account. The kernel allocates page tables by the memory policy of the calling thread.

use super::legs::Leg;
use super::site::Place;
use crate::backend::{Backend, Call};
use crate::engine::commit::AttemptResult;
use crate::engine::effort::NewAlias;
use crate::engine::{AttemptEnd, OldAlias, Work};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::pool::Run;
use crate::region::PageTableLevel;
use crate::sync::{AtomicU64, Ordering, lock};
use crate::units::{BASE_PAGE, NodeId};

/// The bytes that one page of page table maps: 2 MB.
const PAGE_TABLE_SPAN: usize = 512 * BASE_PAGE;

/// The memory policy of one worker, which only matters for page tables.
#[derive(Clone, Copy, Default)]
pub(super) struct TablePolicy {
    /// The preferred node, if one has been set.
    preferred: Option<NodeId>,
    /// A node that could not be set.
    refused: Option<NodeId>,
}

impl TablePolicy {
    pub(super) fn preferred(&self) -> Option<NodeId> {
        self.preferred
    }

    /// Prefers the node on which a leg wants its page tables, if it wants them on one. `has_warned`
    /// is 1 once a worker of the job has warned that this was refused.
    pub(super) fn prefer(
        &mut self,
        wanted: Option<NodeId>,
        backend: &dyn Backend,
        has_warned: &AtomicU64,
        books: Books<'_>,
    ) {
        let Some(node) = wanted.filter(|node| self.preferred != Some(*node)) else { return };
        let call = Call::PreferTables;
        books.count(call, 1);
        match backend.prefer_tables_on(Some(node.0)) {
            Ok(()) => self.preferred = Some(node),
            Err(errno) => {
                if has_warned.swap(1, Ordering::Relaxed) == 0 {
                    let text =
                        format!("page tables go where the workers run: {call} failed with {errno}");
                    books.warn(Warning::of(WarningKind::PageTables, text, call, errno));
                }
            }
        }
    }

    /// Prefers the node to which the page tables of the old frames' alias belong. If that is
    /// refused (the node has left the cpuset, say), nothing needs to be reported: page tables on
    /// another node are noted (`aliases::settle`) and made anew before they are used.
    pub(super) fn prefer_source(&mut self, leg: &Leg, backend: &dyn Backend, books: Books<'_>) {
        let wanted = leg.from.0.tables.filter(|node| self.preferred != Some(*node));
        let Some(node) = wanted.filter(|node| self.refused != Some(*node)) else { return };
        books.count(Call::PreferTables, 1);
        match backend.prefer_tables_on(Some(node.0)) {
            Ok(()) => self.preferred = Some(node),
            Err(_) => self.refused = Some(node),
        }
    }
}

/// Notes in the region's account which page tables an attempt has given to its span. `seated` is
/// the node to which those of the new frames' alias were brought before, and `preferred` the one
/// from which this worker's come.
pub(super) fn note(
    place: &Place<'_>,
    work: &Work,
    ended: &AttemptEnd,
    seated: Option<NodeId>,
    preferred: Option<NodeId>,
) {
    let Place { leg, region, old, new } = *place;
    let range = work.span.addr..work.span.addr + work.span.len;
    let has_parked = ended.old_alias != OldAlias::Untouched;
    let tables = leg.from.0.tables.filter(|_| has_parked);
    if let Some(tables) = tables.filter(|_| is_congruent(work.old.alias, work.span.addr)) {
        // The alias of the old frames has the page tables of the span now, so it must not count as
        // one whose page tables lie where its share wants them.
        let account = lock(&region.tables);
        let page = leg.from.page_size().bytes();
        let all = account.asked(PageTableLevel::Pte, &range);
        for (part, node) in all.filter(|(_, node)| *node != Some(tables)) {
            let first = old.first + ((part.start - range.start) / page) as u64;
            leg.from.note_tables(Run { first, frames: (part.len() / page) as u64 }, node);
        }
    }
    let first = work.span.addr - region.start;
    region.note_views(&(first..first + work.span.len), &ended.after);
    let has_moved = ended.step == AttemptResult::Migrated;
    match ended.after.new_alias {
        NewAlias::Exchanged | NewAlias::Moved if has_moved => {
            let brought = leg.to.tables_of(new, seated);
            lock(&region.tables).exchanged(&range, &brought, preferred);
        }
        _ if has_moved => {
            lock(&region.tables).mapped(&range, preferred, work.span.prot.readable());
        }
        _ if has_parked => lock(&region.tables).parked(&range),
        _ => {}
    }
}

/// Whether whole pages of page table can move between two addresses.
pub(super) fn is_congruent(one: usize, other: usize) -> bool {
    (one ^ other).is_multiple_of(PAGE_TABLE_SPAN)
}
