//! Chooses the node of the page tables that a worker's calls allocate. The kernel allocates them by
//! the memory policy of the calling thread.

use super::legs::Leg;
use crate::backend::{Backend, Call};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::sync::{AtomicU64, Ordering};
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

/// Whether whole pages of page table can move between two addresses.
pub(super) fn is_congruent(one: usize, other: usize) -> bool {
    (one ^ other).is_multiple_of(PAGE_TABLE_SPAN)
}
