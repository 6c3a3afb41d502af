//! Makes one call of `move_pages`, and finds the fate of each page of its list.
//!
//! The kernel (Linux 6.1 to 6.18, `do_pages_move` in mm/migrate.c) moves neighbours of the list
//! that go to one node together, as a *batch*. A batch ends where the next page goes to another
//! node, where a page cannot be looked up, where a page lies on its node already, and at the end of
//! the list. A page that does not move does not stop the rest of its batch. But if any page of a
//! batch did not move, the kernel writes no status for that batch, and drops the rest of the list.
//! So a query asks afterwards where each page lies, and the statuses that were written tell which
//! pages the kernel has tried.

use pageleap_sys::{self as sys, Errno};

use crate::process::NumberForCalls;
use crate::units::Call;

/// The status of a page for which the kernel has written none.
pub(super) const UNWRITTEN: i32 = i32::MIN;

/// The two uses of `move_pages(2)` for one process: query and move.
pub(super) trait Calls: Send + Sync {
    /// Writes the node of each page, or a negated error number. Touches no page.
    fn query(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno>;

    /// Moves pages ([`sys::move_pages`]).
    fn move_pages(
        &self,
        pages: &[usize],
        nodes: &[i32],
        status: &mut [i32],
        shared: bool,
    ) -> Result<u64, Errno>;

    /// Whether the process of a model has ended. For a real process, [`super::target::Process`]
    /// knows.
    fn has_ended(&self) -> bool {
        false
    }
}

/// The real calls for one process.
#[derive(Debug)]
pub(super) struct Kernel(pub(super) NumberForCalls);

impl Calls for Kernel {
    fn query(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        self.0.call(|number| sys::nodes_of_pages(number, pages, status))
    }

    fn move_pages(
        &self,
        pages: &[usize],
        nodes: &[i32],
        status: &mut [i32],
        shared: bool,
    ) -> Result<u64, Errno> {
        self.0.call(|number| sys::move_pages(number, pages, nodes, status, shared))
    }
}

/// The result for a page of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It lies on its node now.
    There,
    /// The kernel has said why it stays.
    Stays(Errno),
    /// The kernel has tried to move it, and does not say why it stays.
    InUse,
    /// The call was refused when it came to the page.
    Refused(Errno),
    /// It is not present any more.
    Gone,
    /// The kernel has dropped it from the list without trying.
    NotTried,
}

/// Makes one moving call, and queries where the pages lie then. All pages of the list must be
/// present, and none on its node. The kernel has then tried at least the first one.
pub(super) fn move_once(
    calls: &dyn Calls,
    pages: &[usize],
    nodes: &[i32],
    shared: bool,
) -> Result<Vec<Fate>, (Call, Errno)> {
    let mut status = vec![UNWRITTEN; pages.len()];
    let refused = calls.move_pages(pages, nodes, &mut status, shared).err();
    let tried = tried(nodes, &status);
    let mut now = vec![UNWRITTEN; pages.len()];
    calls.query(pages, &mut now).map_err(|errno| (Call::QueryNodes, errno))?;
    let fate = |at: usize| match (now[at], status[at]) {
        (now, _) if now == nodes[at] => Fate::There,
        (now, _) if now < 0 => Fate::Gone,
        // The kernel wrote a node, and the page lies elsewhere now: it has moved twice.
        (_, 0..) => Fate::InUse,
        (_, UNWRITTEN) if at >= tried => Fate::NotTried,
        (_, UNWRITTEN) => refused.map_or(Fate::InUse, Fate::Refused),
        (_, errno) => Fate::Stays(Errno(-errno)),
    };
    Ok((0..pages.len()).map(fate).collect())
}

/// How many pages of the list the kernel has tried: all of the last batch, and all before it.
fn tried(nodes: &[i32], status: &[i32]) -> usize {
    let last_written = status.iter().rposition(|status| *status != UNWRITTEN);
    match last_written {
        // The page could not be looked up, or was on its node already. The batch before it failed.
        Some(last) if status[..last].contains(&UNWRITTEN) => last + 1,
        // The batch that failed, if one did, begins behind the last written status, and goes to one
        // node.
        _ => {
            let first = last_written.map_or(0, |last| last + 1);
            let is_same = |node: &&i32| Some(*node) == nodes.get(first);
            first + nodes[first..].iter().take_while(is_same).count()
        }
    }
}
