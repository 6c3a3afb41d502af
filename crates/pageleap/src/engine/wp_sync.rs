//! The engine `wp-sync`: synchronous write-protection by userfaultfd. The tracker's thread
//! unprotects pages for writers, one page at a time, and notes each as dirty
//! ([`notes`](super::notes)).
//!
//! For Linux 6.6, which has no asynchronous write-protection, and for hugetlb pages, whose writes
//! no kernel tracks more finely than by 2 MB. A thread that writes to a protected page, user code
//! or kernel, waits in its page fault until the tracker's thread has unprotected that page and
//! noted it. The window begins when the notes are closed, because from then on no page is
//! unprotected. Readers never wait. With `hold` the area is closed before it is copied.

use super::commit::{AttemptResult, arrive};
use super::effort::Effort;
use super::follow::{self, Attempt, Each, Refusal, Way};
use super::slot::Span;
use super::{Tools, Work, followed_page_bytes};
use crate::backend::Call;
use crate::units::BASE_PAGE;

/// Up to this many runs of dirty pages are write-protected one by one. For more, one call for the
/// whole span is cheaper.
const FEW: usize = 16;

struct WpSync;

/// Runs one attempt.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    // SAFETY: forwarded to the caller.
    unsafe { follow::attempt(&WpSync, tools, work, effort) }
}

impl Way for WpSync {
    fn copies_beside(&self, at: &Attempt<'_>) -> bool {
        !at.work.hold
    }

    /// Not raised if the area is one page and not held, because the window may be one system call.
    /// Raising the thread would cost more than it saves: 11 us of 200 for a page of 2 MB.
    fn hurries(&self, at: &Attempt<'_>) -> bool {
        at.work.hold || followed_page_bytes(at.work.page) != at.work.span.len
    }

    unsafe fn mark(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = at.work.span;
        at.tools.slot.notes.begin(addr, len, followed_page_bytes(at.work.page));
        // SAFETY: forwarded to the caller.
        unsafe { at.mark(Call::MarkClean, effort) }
    }

    /// Calls `each` for the pages that are noted as dirty. With `mark_clean` they are
    /// write-protected first, and their notes erased.
    unsafe fn look(
        &self,
        at: &Attempt<'_>,
        mark_clean: bool,
        effort: &mut Effort,
        each: &mut Each<'_>,
    ) -> Result<(), Refusal> {
        at.tools.slot.notes.written(mark_clean, &mut |pages| {
            if mark_clean {
                // SAFETY: forwarded to the caller.
                unsafe { protect(at, pages.start, pages.len(), effort) }?;
            }
            each(pages)
        })
    }

    /// Closes the notes, copies the dirty pages (with `hold`, all pages), and maps the new frames.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let (len, notes) = (at.work.span.len, &at.tools.slot.notes);
        effort.counters.held |= at.work.hold;
        // From now on no page is unprotected for a writer.
        notes.close();
        let mut copied = 0;
        let mut copy = |pages: std::ops::Range<usize>| {
            copied += pages.len() as u64;
            // SAFETY: the source is readable; the new frames are ours.
            unsafe { at.copy_closed(pages) };
            Ok(true)
        };
        if at.work.hold {
            // SAFETY: the span is ours to follow.
            unsafe {
                at.split(effort);
                protect(at, 0, len, effort)
            }?;
            copy(0..len)?;
        } else {
            let mut runs = 0;
            notes.written::<Refusal>(false, &mut |_| {
                runs += 1;
                Ok(runs <= FEW)
            })?;
            if runs > FEW {
                // SAFETY: the span is ours to follow.
                unsafe { protect(at, 0, len, effort) }?;
            }
            if runs > 0 {
                at.hurry(effort);
            }
            // No thread can write to the other pages, so this scan is final.
            // SAFETY: forwarded to the caller.
            unsafe { self.look(at, runs <= FEW, effort, &mut copy) }?;
        }
        effort.counters.copied += copied;
        effort.counters.left = copied / BASE_PAGE as u64;
        if at.work.hold {
            // Nobody knows which of the pages would have been dirtied, so all count.
            effort.counters.written = effort.counters.left;
        }
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them. The page tables cannot move to the alias: a thread that found none in the span
        // would fault in new ones, of the old frames and unprotected, and write.
        unsafe { arrive(at.tools.backend, &at.work.arrival(), effort) }
            .map_err(|errno| (Call::Map, errno))
    }

    fn end(&self, at: &Attempt<'_>) {
        at.tools.slot.notes.end();
    }
}

/// Write-protects `len` bytes of the span, beginning at its byte `start`.
///
/// # Safety
/// As [`attempt`].
unsafe fn protect(
    at: &Attempt<'_>,
    start: usize,
    len: usize,
    effort: &mut Effort,
) -> Result<(), Refusal> {
    effort.count(Call::MarkClean);
    let (tracker, addr) = (at.following.tracker, at.work.span.addr + start);
    // SAFETY: forwarded to the caller.
    unsafe { at.tools.backend.mark_clean(tracker, addr, len, true) }
        .map_err(|errno| (Call::MarkClean, errno))?;
    // SAFETY: forwarded to the caller.
    unsafe { at.outwait_remote_writes(effort) }
}
