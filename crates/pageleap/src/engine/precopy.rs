//! The engine `precopy`: pre-copy, as in live migration. The kernel tracks dirty pages (userfaultfd
//! with asynchronous write-protection, Linux 6.7), and the area is unmapped for the window.
//!
//! No signal and no handler is involved, and the kernel's own writes are tracked like any others.
//! In the window the page tables of the span lie in the alias of the old frames, write-protect
//! marks included. A thread that touches the area then, user code or kernel, sleeps in a page fault
//! until the page tables of the new frames are mapped.
//!
//! The engine promises: system calls that read or write the area do not fail because of a leap
//! (FUTEX_WAKE_OP may); writers are neither signalled nor throttled. It needs a userfaultfd that
//! can make the kernel's own accesses wait, which takes a privilege or `/dev/userfaultfd`.

use super::commit::{AttemptResult, arrive};
use super::effort::Effort;
use super::follow::{self, Attempt, Refusal, Way};
use super::slot::Span;
use super::{Tools, Work};
use crate::backend::Call;
use crate::units::BASE_PAGE;

struct Precopy;

/// Runs one attempt.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    // SAFETY: forwarded to the caller.
    unsafe { follow::attempt(&Precopy, tools, work, effort) }
}

impl Way for Precopy {
    /// Registers the span for MINOR faults: from now on a thread that faults on a page without an
    /// entry waits. As a rule all pages have one until the span is unmapped.
    unsafe fn prepare(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = at.work.span;
        let (backend, tracker) = (at.tools.backend, at.following.tracker);
        // SAFETY: forwarded to the caller.
        unsafe {
            at.unlock(effort)?;
            effort.count(Call::Track);
            backend.track(tracker, addr, len, true).map_err(|errno| (Call::Track, errno))
        }
    }

    /// Unmaps the span by moving its page tables to the alias, copies the pages that are still
    /// dirty, and maps the page tables of the new frames.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let Work { span: Span { len, .. }, old, new, .. } = *at.work;
        let backend = at.tools.backend;
        // SAFETY: the span is published, and registered.
        unsafe { at.freeze(effort) }?;
        let (mut copied, mut reads) = (0, 0);
        // No thread can store to these frames any more, so this scan is final.
        // SAFETY: the alias holds the page tables of the frames; the new frames are ours.
        unsafe {
            at.unproven(old.alias, len, false, effort, &mut |pages| {
                // Read through the file and not through the alias. The kernel may drop an entry of
                // the alias at any time; a thread that faults there sleeps until it is woken, and
                // only this thread would wake it.
                let (offset, dst) = (old.offset + pages.start as u64, new.alias + pages.start);
                reads += 1;
                copied += pages.len() as u64;
                let read = backend.read_file(old.file, offset, dst, pages.len());
                read.map(|()| true).map_err(|errno| (Call::ReadFile, errno))
            })
        }?;
        effort.counters.copied += copied;
        effort.counters.left = copied / BASE_PAGE as u64;
        effort.counters.calls[Call::ReadFile as usize] += reads;
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them.
        unsafe { arrive(backend, &at.work.arrival(), effort) }.map_err(|errno| (Call::Map, errno))
    }
}
