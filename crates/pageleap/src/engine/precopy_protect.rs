//! The engine `precopy-protect`: the kernel tracks dirty pages, as for `precopy`, and the area is
//! made read-only by `mprotect` for the window.
//!
//! A thread that writes to the area in the window waits in the signal handler, as with the engine
//! `mprotect`; readers never wait. A system call that writes into the area in the window fails with
//! EFAULT. The engine takes no privilege. Hugetlb pages that are dirtied faster than they can be
//! copied are moved by the engine `mprotect`. `docs/adr/0011` compares the engines.

use super::commit::{AttemptResult, change_places, give_access_back};
use super::effort::Effort;
use super::follow::{self, Attempt, Refusal, Way};
use super::slot::Span;
use super::{Tools, Work};
use crate::backend::Call;
use crate::units::BASE_PAGE;

struct PrecopyProtect;

/// Runs one attempt.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    // SAFETY: forwarded to the caller.
    unsafe { follow::attempt(&PrecopyProtect, tools, work, effort) }
}

impl Way for PrecopyProtect {
    unsafe fn prepare(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        // SAFETY: forwarded to the caller.
        unsafe { at.unlock(effort) }
    }

    /// Makes the span read-only, copies the pages that are still dirty, and maps the new frames.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let Span { addr, len, prot } = at.work.span;
        let backend = at.tools.backend;
        effort.count(Call::Protect);
        // SAFETY: the span is the job's; threads that fault wait for the slot.
        unsafe { backend.protect(addr, len, prot.without_write()) }
            .map_err(|errno| (Call::Protect, errno))?;
        let mut copied = 0;
        // No thread can store to these frames any more, so this scan is final.
        // SAFETY: the source is readable; the new frames are ours.
        unsafe {
            at.unproven(addr, len, false, effort, &mut |pages| {
                copied += pages.len() as u64;
                at.copy_closed(pages);
                Ok(true)
            })
        }?;
        effort.counters.copied += copied;
        effort.counters.left = copied / BASE_PAGE as u64;
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them.
        unsafe { change_places(backend, at.work, true, effort) }
    }

    unsafe fn reopen(&self, at: &Attempt<'_>, (call, errno): Refusal, effort: &mut Effort) {
        let first = (call == Call::Protect).then_some(errno);
        // SAFETY: the span maps its old frames, and writers wait. The call may have had its effect,
        // in whole or in part.
        unsafe { give_access_back(at.tools.backend, &at.work.span, first, effort) };
    }
}
