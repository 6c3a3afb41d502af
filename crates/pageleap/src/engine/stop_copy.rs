//! The engine `stop-copy`: the page tables of the area are taken away, the area is copied, and the
//! page tables of the new frames come. The word is live migration's: stop-and-copy.
//!
//! Nothing is followed, so nothing is marked, looked at or copied again. A thread that touches the
//! area in the window, reading or writing, user code or kernel, sleeps in a page fault until the
//! new frames have come. The window contains the copy. So the engine is for areas that few threads
//! touch meanwhile, and how long these may wait decides how large areas are (`job/pace.rs`). The
//! worker is raised in the window, but before ordinary threads only as long as its share of real
//! time lasts: copies at a real-time priority would keep a CPU from everybody else for the length
//! of a job (`priority.rs`).
//!
//! The kernel sends no message for an exchange of page tables here, and forgets the registration of
//! what was exchanged (`mremap` without UFFD_FEATURE_EVENT_REMAP). So no thread has to read
//! messages, and the alias of the old frames can be read: nobody waits for a page of it. It is
//! complete and writable, and needs nothing before its frames can be used again.
//!
//! The kernel exchanges no page tables of hugetlb pages. There the page tables of the area are
//! dropped (MADV_DONTNEED, Linux 5.18), and a new mapping brings those of the new frames. What is
//! in the file keeps its contents, and whoever touches it waits as above. The alias of the old
//! frames keeps page tables of its own.
//!
//! The engine promises: system calls that read or write the area do not fail because of a leap
//! (FUTEX_WAKE_OP may). It needs Linux 5.14, and a userfaultfd that holds up the kernel's accesses.

use super::commit::{AttemptResult, arrive};
use super::effort::Effort;
use super::follow::{self, Attempt, Refusal, Way};
use super::slot::Span;
use super::{Tools, Work};
use crate::backend::Call;
use crate::sync::monotonic_ns;
use crate::units::BASE_PAGE;

struct StopCopy;

/// Runs one attempt.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    // SAFETY: forwarded to the caller.
    unsafe { follow::attempt(&StopCopy, tools, work, effort) }
}

impl Way for StopCopy {
    fn copies_beside(&self, _at: &Attempt<'_>) -> bool {
        false
    }

    fn counts_waiters(&self, _at: &Attempt<'_>) -> bool {
        true
    }

    unsafe fn before(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        // SAFETY: forwarded to the caller.
        unsafe { at.unlock(effort) }
    }

    /// Takes the page tables of the span away, copies the frames, and brings the page tables of the
    /// new ones.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let Work { span: Span { len, prot, .. }, old, new, .. } = *at.work;
        let backend = at.tools.backend;
        // SAFETY: the span is published, and registered.
        unsafe {
            if at.work.page.is_hugetlb() { at.drop_tables(effort) } else { at.freeze(effort) }
        }?;
        let from = monotonic_ns();
        // Nobody can store to the old frames any more, so this copy is the last one.
        if prot.readable() {
            // SAFETY: the alias maps the old frames and holds up nobody; the new frames are ours.
            unsafe { at.tools.slot.crew.copy(backend, at.work.piece(old.alias, 0..len), false) };
        } else {
            effort.count(Call::ReadFile);
            // The alias has the access of the span. SAFETY: the new frames are ours.
            unsafe { backend.read_file(old.file, old.offset, new.alias, len) }
                .map_err(|errno| (Call::ReadFile, errno))?;
        }
        effort.counters.copy_ns = monotonic_ns().saturating_sub(from);
        effort.counters.copied += len as u64;
        effort.counters.left = (len / BASE_PAGE) as u64;
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them.
        unsafe { arrive(backend, at.work, effort) }.map_err(|errno| (Call::Map, errno))
    }
}
