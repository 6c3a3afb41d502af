//! The engine `wp-sync`: pages are write-protected by the tracker, writers are let in one by one,
//! and what they have written is noted by us ([`notes`](super::notes)).
//!
//! For Linux 6.6, whose kernel does not note writes by itself, and for hugetlb pages, which no
//! kernel notes more finely than by 2 MB. A thread that writes to a protected page, user code or
//! kernel, waits in its page fault until the tracker's thread has lifted the protection of that
//! page and noted it. When the notes are closed nobody is let in any more: that is the window.
//! Readers never wait. With `hold` the area is closed before it is copied.

use super::commit::{AttemptResult, arrive};
use super::effort::Effort;
use super::follow::{self, Attempt, Each, Refusal, Way};
use super::slot::Span;
use super::{Tools, Work, followed_page_bytes};
use crate::backend::Call;
use crate::units::BASE_PAGE;

/// Runs of pages that are protected one by one. One call for the whole span costs more, but once.
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

    /// Where the window is one call for one page, as it may turn out, running before others costs
    /// more than it spares: 11 us of 200 for a page of 2 MB.
    fn hurries(&self, at: &Attempt<'_>) -> bool {
        at.work.hold || followed_page_bytes(at.work.page) != at.work.span.len
    }

    unsafe fn mark(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = at.work.span;
        at.tools.slot.notes.begin(addr, len, followed_page_bytes(at.work.page));
        // SAFETY: forwarded to the caller.
        unsafe { at.mark(Call::MarkClean, effort) }
    }

    /// Shows `each` the pages that a thread was let write to. With `mark_clean` they are
    /// write-protected first, and noted no longer.
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

    /// Keeps everybody out who writes to the span, copies what has been written since it was
    /// copied, or all of it, and brings the new frames.
    unsafe fn close_and_commit(
        &self,
        at: &Attempt<'_>,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let (len, notes) = (at.work.span.len, &at.tools.slot.notes);
        effort.counters.held |= at.work.hold;
        // From now on nobody is let in.
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
            // Nobody can write to the others, so this look is the last one.
            // SAFETY: forwarded to the caller.
            unsafe { self.look(at, runs <= FEW, effort, &mut copy) }?;
        }
        effort.counters.copied += copied;
        effort.counters.left = copied / BASE_PAGE as u64;
        if at.work.hold {
            // Which of the pages would have been written nobody knows.
            effort.counters.written = effort.counters.left;
        }
        // SAFETY: the span is closed, and all its pages have been copied since the last store to
        // them. The page tables cannot go to the alias: a thread that found none in the span would
        // make new ones, of the old frames, and write.
        unsafe { arrive(at.tools.backend, at.work, effort) }.map_err(|errno| (Call::Map, errno))
    }

    fn end(&self, at: &Attempt<'_>) {
        at.tools.slot.notes.end();
    }
}

/// Write-protects `len` bytes of the span, from the byte `start` of it on.
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
