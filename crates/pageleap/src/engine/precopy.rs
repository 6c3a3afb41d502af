//! The engine `precopy`: the kernel notes which pages are written (userfaultfd with asynchronous
//! write-protection, Linux 6.7), and the page tables of the area are taken away for the window.
//!
//! No signal, no handler: the kernel's own writes are noted like any others. In the window the page
//! tables of the span lie in the alias of the old frames, marks included. A thread that touches the
//! area then, user code or kernel, sleeps in a page fault until the page tables of the new frames
//! have arrived.
//!
//! The engine promises: system calls that read or write the area do not fail because of a leap
//! (FUTEX_WAKE_OP may); writers are neither signalled nor throttled. It needs a userfaultfd that
//! holds up the kernel's accesses, which takes a privilege or `/dev/userfaultfd`.

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
    /// From now on a thread that finds a page without an entry waits. Pages have one, as a rule,
    /// until the page tables are taken away.
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

    /// Moves the page tables of the span to the alias, copies what the last stores have left to
    /// copy, and brings the page tables of the new frames.
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
        // Nobody can store to these frames any more, so this look is the last one.
        // SAFETY: the alias holds the page tables of the frames; the new frames are ours.
        unsafe {
            at.unproven(old.alias, len, false, effort, &mut |pages| {
                // Not through the alias: the kernel may drop an entry of it at any time, and a
                // thread that finds none there sleeps until it is woken, which would be by us.
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
        unsafe { arrive(backend, at.work, effort) }.map_err(|errno| (Call::Map, errno))
    }
}
