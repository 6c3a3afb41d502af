//! The engine `stop-copy`: stop-and-copy, as in live migration. The page tables of the area are
//! unmapped, the area is copied, and the page tables of the new frames are mapped.
//!
//! No thread can write while it copies, so the engine neither write-protects nor scans, and copies
//! each page once. A thread that touches the area in the window, reading or writing, user code or
//! kernel, sleeps in a page fault until the new frames are mapped. The window contains the copy, so
//! the engine is for areas that few threads touch meanwhile, and the wait budget decides how large
//! areas are (`job/pace.rs`). In the window the worker runs at a real-time priority (SCHED_FIFO),
//! but only for a share of the time (`priority.rs`). Otherwise its copies would keep a CPU from all
//! other threads for the length of a job.
//!
//! `mremap` sends no message here (the userfaultfd has no UFFD_FEATURE_EVENT_REMAP), so no thread
//! has to read any. It also ends the registration of the page tables that it moves. So a read
//! through the alias of the old frames never waits, and the alias is complete and writable. Before
//! its frames are used again, only its attributes have to be restored (step 7 of section 3.5).
//!
//! For hugetlb pages `mremap` cannot move page tables. Instead, MADV_DONTNEED drops those of the
//! area (Linux 5.18), and `mmap` of the new frames' file brings the new ones. The file keeps its
//! contents, and a thread that touches the area waits as above. The alias of the old frames keeps
//! page tables of its own.
//!
//! A region may have *views*, further mappings of its frames. This engine closes them before the
//! span, so it is the only one that moves such regions ([`views`](super::views)).
//!
//! The engine promises: system calls that read or write the area do not fail because of a leap
//! (FUTEX_WAKE_OP may). It needs Linux 5.14, and a userfaultfd that can make the kernel's own
//! accesses wait.

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
        unsafe {
            at.unlock(effort)?;
            at.prepare_views(effort)
        }
    }

    /// Unmaps the page tables of the span, copies the frames, and maps the page tables of the new
    /// ones.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let Work { span: Span { len, prot, .. }, old, new, .. } = *at.work;
        let backend = at.tools.backend;
        // SAFETY: the span is published, and registered, as its views are.
        unsafe {
            at.close_views(effort)?;
            if at.work.page.is_hugetlb() { at.drop_tables(effort) } else { at.freeze(effort) }
        }?;
        let from = monotonic_ns();
        // No thread can store to the old frames any more, so this copy is final.
        if prot.readable() {
            // SAFETY: the alias maps the old frames and no read of it waits; the new frames are
            // ours.
            unsafe { at.tools.slot.crew.copy(backend, at.work.piece(old.alias, 0..len), false) };
        } else {
            effort.count(Call::ReadFile);
            // The alias has the access of the span, so it cannot be read: the file is read.
            // SAFETY: the new frames are ours.
            unsafe { backend.read_file(old.file, old.offset, new.alias, len) }
                .map_err(|errno| (Call::ReadFile, errno))?;
        }
        effort.counters.copy_ns = monotonic_ns().saturating_sub(from);
        effort.counters.copied += len as u64;
        effort.counters.left = (len / BASE_PAGE) as u64;
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them.
        unsafe { arrive(backend, &at.work.arrival(), effort) }.map_err(|errno| (Call::Map, errno))
    }
}
