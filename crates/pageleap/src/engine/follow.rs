//! Pre-copy, shared by all engines that have a tracker: track writes, copy while threads write,
//! copy dirty pages again, and close the area only for the last few. `stop-copy` also runs here,
//! but closes the area before it copies ([`Way::copies_beside`]).
//!
//! ```text
//! track ─► mark ─► copy ─► look ─► few written? ─► prepare ─► publish ─► close, look, copy, commit
//!                    ▲               │ no                                (the engine's own)
//!                    └─ mark, copy ──┘ at most max_rounds times
//! ```
//!
//! The engines differ in how they write-protect pages, find dirty pages and close the area: each
//! implements [`Way`]. Steps and argument: `docs/protocol.md`, sections 3.2 to 3.5.
//!
//! Compared with `mprotect`, writers wait for a window and not for a copy (unless the area is held,
//! or closed before it is copied).

use std::ops::Range;

use super::commit::{AttemptResult, erase, let_go, wake};
use super::effort::{Effort, Parked};
use super::slot::Span;
use super::{Following, Tools, Work};
use crate::backend::{Advice, Call, Errno, Haste, PageRegion, page_is};
use crate::sync::monotonic_ns;
use crate::units::{BASE_PAGE, PageSize};

/// Entries of one PAGEMAP_SCAN: some 3 KB of stack.
const ENTRIES: usize = 128;

/// The most further copies, even if the caller asks for more: if a writer is faster than 16 copies,
/// another copy will not catch up either.
const MOST_ROUNDS: u32 = 16;

/// A system call that failed, and its error.
pub(super) type Refusal = (Call, Errno);

/// Callback for dirty pages, given as bytes from the start of the area. It returns whether to
/// continue.
pub(super) type Each<'a> = dyn FnMut(Range<usize>) -> Result<bool, Refusal> + 'a;

/// One attempt of an engine that has a tracker.
pub(super) struct Attempt<'a> {
    pub(super) tools: Tools<'a>,
    pub(super) work: &'a Work,
    pub(super) following: Following,
}

/// The steps in which engines differ. The contract of each method is that of
/// [`attempt`](super::attempt); `look`, `close_and_commit` and `reopen` come after `mark`.
pub(super) trait Way {
    /// Whether the area is copied while threads write to it. If not, it is copied after it is
    /// closed.
    fn copies_beside(&self, _at: &Attempt<'_>) -> bool {
        true
    }

    /// Whether this thread is raised (SCHED_FIFO, if allowed) when the area is closed. If a thread
    /// of low priority has started the job, it is raised in any case.
    fn hurries(&self, _at: &Attempt<'_>) -> bool {
        true
    }

    /// Whether waiting threads are counted by the tracker's messages, which no other thread reads
    /// then.
    fn counts_waiters(&self, _at: &Attempt<'_>) -> bool {
        false
    }

    /// Write-protects all pages, so that they count as clean until they are written. By default the
    /// protection is asynchronous: the kernel lifts it at the first write.
    unsafe fn mark(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        // SAFETY: forwarded to the caller.
        unsafe { at.mark_by_scan(effort) }
    }

    /// Scans for dirty pages and calls `each` for the pages that are not known to be clean, until
    /// it returns `false`. With `mark_clean`, dirty pages are write-protected again in the same
    /// step.
    unsafe fn look(
        &self,
        at: &Attempt<'_>,
        mark_clean: bool,
        effort: &mut Effort,
        each: &mut Each<'_>,
    ) -> Result<(), Refusal> {
        let Span { addr, len, .. } = at.work.span;
        // SAFETY: forwarded to the caller.
        unsafe { at.unproven(addr, len, mark_clean, effort, each) }
    }

    /// Steps that must come before the span is registered.
    unsafe fn before(&self, _at: &Attempt<'_>, _effort: &mut Effort) -> Result<(), Refusal> {
        Ok(())
    }

    /// Makes the area ready to be closed.
    unsafe fn prepare(&self, _at: &Attempt<'_>, _effort: &mut Effort) -> Result<(), Refusal> {
        Ok(())
    }

    /// Closes the area, so that no thread can store to it, copies the pages that are still dirty,
    /// and maps the new frames. The slot is published.
    unsafe fn close_and_commit(&self, at: &Attempt<'_>, effort: &mut Effort)
    -> Result<(), Refusal>;

    /// After a refusal in `close_and_commit`: undoes the changes that ending the registration does
    /// not undo.
    unsafe fn reopen(&self, _at: &Attempt<'_>, _why: Refusal, _effort: &mut Effort) {}

    /// Ends the attempt's own bookkeeping (the notes of `wp-sync`); called on every path.
    fn end(&self, _at: &Attempt<'_>) {}
}

impl Attempt<'_> {
    /// The address through which the old frames are read while the span is accessible. Transparent
    /// huge pages are read through the alias, because the span maps them by base pages while they
    /// are tracked, with a minor fault for each.
    pub(super) fn source(&self) -> usize {
        let in_place = self.work.span.prot.readable() && self.work.page != PageSize::Thp;
        if in_place { self.work.span.addr } else { self.work.old.alias }
    }

    /// Raises this thread's priority, if that is allowed and not yet done.
    pub(super) fn hurry(&self, effort: &mut Effort) {
        effort.hurry(self.tools.backend, self.work.haste);
    }

    /// Write-protects the whole span. `call` names the call for counters and errors: PAGEMAP_SCAN,
    /// which is faster, or UFFDIO_WRITEPROTECT. The latter is used by `wp-sync`, whose tracker has
    /// no pagemap, and for transparent huge pages, which it tracks by base pages. It is also used
    /// for hugetlb pages, because PAGEMAP_SCAN knows none of 1 GB, and can wait for itself where
    /// hugetlb pages have no page tables (Linux 6.7 to 6.18.41).
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn mark(&self, call: Call, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = self.work.span;
        let by_base_pages = self.work.page != PageSize::Base;
        // SAFETY: forwarded to the caller.
        unsafe { self.split(effort) };
        effort.count(call);
        // SAFETY: the span is ours to follow.
        unsafe { self.tools.backend.mark_clean(self.following.tracker, addr, len, by_base_pages) }
            .map_err(|errno| (call, errno))?;
        // SAFETY: forwarded to the caller.
        unsafe { self.outwait_remote_writes(effort) }
    }

    /// Waits for each write through `/proc/PID/mem` or `ptrace(2)` that began before pages of the
    /// span were unmapped or write-protected.
    ///
    /// Such a write looks the page up, then stores to it without using the page-table entry.
    /// Meanwhile the kernel holds the address-space lock (mmap_lock) for reading
    /// (`__access_remote_vm`, Linux 6.18). MADV_DONTNEED, UFFDIO_WRITEPROTECT and PAGEMAP_SCAN hold
    /// it for reading, too, so a copy after these calls could precede the store. UFFDIO_REGISTER
    /// holds it for writing, and changes nothing if the range is registered already, so it is
    /// called once more.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt). The span is registered, as by [`attempt`] itself.
    pub(super) unsafe fn outwait_remote_writes(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = self.work.span;
        effort.count(Call::Track);
        // SAFETY: forwarded to the caller.
        unsafe { self.tools.backend.track(self.following.tracker, addr, len, false) }
            .map_err(|errno| (Call::Track, errno))
    }

    /// Makes all mappings of the span's transparent huge pages use base pages, until the span is
    /// mapped anew.
    ///
    /// The kernel splits a huge entry of a file by removing it. Until base pages are
    /// write-protected, a thread that stores there faults the huge entry in again, and so on.
    /// Without this function, one store and one write-protect took up to 20 ms (Linux 6.18).
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn split(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        if self.work.page != PageSize::Thp {
            return;
        }
        effort.after.split = true;
        // MADV_DONTNEED drops all huge entries at once, so other CPUs are interrupted once (one TLB
        // shootdown).
        for advice in [Advice::NoHugePage, Advice::DropTables] {
            effort.count(Call::Advise);
            // If a call is refused, huge entries are split one by one instead.
            // SAFETY: the span is ours, and maps a file.
            let _ = unsafe { self.tools.backend.advise(addr, len, advice) };
        }
    }

    /// Write-protects the span by PAGEMAP_SCAN if its pages allow it, else by UFFDIO_WRITEPROTECT.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn mark_by_scan(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let scans = self.work.page == PageSize::Base;
        // SAFETY: forwarded to the caller.
        unsafe { self.mark(if scans { Call::Scan } else { Call::MarkClean }, effort) }
    }

    /// Unlocks the span (`munlock`) if the user has locked it, because the lock must not move to
    /// the alias.
    ///
    /// The call must come before the registration that makes threads wait for absent pages (MINOR).
    /// Reading a mapping's attributes duplicates a page of it; of a locked mapping the kernel
    /// populates the duplicate, and a thread that waits there would never be woken.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn unlock(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = self.work.span;
        if self.work.locked {
            effort.count(Call::Lock);
            effort.after.unlocked = true;
            // SAFETY: forwarded to the caller.
            unsafe { self.tools.backend.unlock(addr, len) }.map_err(|errno| (Call::Lock, errno))?;
        }
        Ok(())
    }

    /// Unmaps the span: moves its page tables to the alias of its frames (`mremap(DONTUNMAP)`).
    /// Threads that touch the span from then on wait in a page fault.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt). The slot is published, and the tracker holds the span.
    pub(super) unsafe fn freeze(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let Work { span: Span { addr, len, .. }, old, .. } = *self.work;
        effort.count(Call::Exchange);
        effort.after.parked = Parked::Failed;
        // SAFETY: the span is the job's, and the alias is that of its own frames.
        unsafe { self.tools.backend.exchange(addr, old.alias, len) }.map_err(|errno| {
            effort.after.exchange_unsupported |= errno == Errno(libc::EINVAL);
            (Call::Exchange, errno)
        })?;
        effort.after.parked = Parked::Yes;
        Ok(())
    }

    /// Unmaps hugetlb pages by dropping their page tables (MADV_DONTNEED), because `mremap` cannot
    /// move them alone. Threads that touch the span from then on wait in a page fault.
    ///
    /// # Safety
    /// As [`Attempt::freeze`].
    pub(super) unsafe fn drop_tables(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = self.work.span;
        effort.count(Call::Advise);
        // SAFETY: the span is the job's, and maps a file.
        unsafe { self.tools.backend.advise(addr, len, Advice::DropTables) }.map_err(|errno| {
            // Before Linux 5.18 the kernel refuses MADV_DONTNEED for hugetlb pages.
            effort.after.exchange_unsupported |= errno == Errno(libc::EINVAL);
            (Call::Advise, errno)
        })?;
        // SAFETY: forwarded to the caller.
        unsafe { self.outwait_remote_writes(effort) }
    }

    /// Copies pages of the closed area, together with the crew.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt); the source is readable.
    pub(super) unsafe fn copy_closed(&self, pages: Range<usize>) {
        let Tools { slot, backend, .. } = self.tools;
        let piece = self.work.piece(self.source(), pages);
        let urgent = self.work.haste.is_some_and(Haste::is_first);
        // SAFETY: forwarded to the caller.
        unsafe { slot.crew.copy(backend, piece, urgent) };
    }

    /// Scans `[addr, addr + len)` and calls `each` for the pages that the kernel does not know to
    /// be clean, as bytes from `addr`, until it returns `false`. With `mark_clean`, dirty pages are
    /// write-protected again in the same step.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn unproven(
        &self,
        addr: usize,
        len: usize,
        mark_clean: bool,
        effort: &mut Effort,
        each: &mut Each<'_>,
    ) -> Result<(), Refusal> {
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        let mut found = [PageRegion::default(); ENTRIES];
        let mut seen = 0;
        while seen < len {
            effort.count(Call::Scan);
            // SAFETY: forwarded to the caller.
            let (entries, walked) =
                unsafe { backend.scan(tracker, addr + seen, len - seen, mark_clean, &mut found) }
                    .map_err(|errno| (Call::Scan, errno))?;
            if mark_clean && entries > 0 {
                // SAFETY: forwarded to the caller.
                unsafe { self.outwait_remote_writes(effort) }?;
            }
            for run in &found[..entries] {
                let pages = run.start as usize - addr..run.end as usize - addr;
                // No entry, but a marker: the page was clean when the kernel dropped its entry.
                let clean =
                    run.categories & (page_is::SWAPPED | page_is::WRITTEN) == page_is::SWAPPED;
                if !clean && !each(pages)? {
                    return Ok(());
                }
            }
            let walked = walked.saturating_sub(addr).min(len);
            if walked <= seen {
                // The scan makes no progress, so the rest counts as dirty.
                return each(seen..len).map(drop);
            }
            seen = walked;
        }
        Ok(())
    }

    /// Unregisters a span that keeps its old frames, and wakes all threads that wait for it.
    ///
    /// # Safety
    /// The span maps its old frames, with or without page tables.
    unsafe fn let_go(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        let_go(self.tools.backend, self.following.tracker, (addr, len), effort);
    }

    fn wake(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        wake(self.tools.backend, self.following.tracker, (addr, len), effort);
    }
}

/// Runs one attempt. Whatever happens, the span is accessible at the end, and nobody waits for it.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(
    way: &impl Way,
    tools: &Tools<'_>,
    work: &Work,
    effort: &mut Effort,
) -> AttemptResult {
    let Span { addr, len, .. } = work.span;
    let Some(following) = work.following else {
        return AttemptResult::Refused(Call::OpenTracker, Errno(libc::EBADF));
    };
    let at = &Attempt { tools: *tools, work, following };
    let Tools { slot, epoch, backend } = *tools;
    // SAFETY: forwarded to the caller.
    if let Err((call, errno)) = unsafe { way.before(at, effort) } {
        return AttemptResult::Refused(call, errno);
    }
    effort.count(Call::Track);
    // SAFETY: the span is ours to follow.
    if let Err(errno) = unsafe { backend.track(following.tracker, addr, len, false) } {
        // A part of the span may be registered. A thread that later waits there, while another
        // engine moves the area, would wait for us, so the part is unregistered. A registration by
        // another owner (EBUSY) is not ours to undo.
        if errno != Errno(libc::EBUSY) {
            // SAFETY: the span maps its old frames.
            unsafe { at.let_go(effort) };
        }
        return AttemptResult::Refused(Call::Track, errno);
    }
    // SAFETY: forwarded to the caller.
    if let Err((call, errno)) = unsafe { at.track_views(effort) } {
        way.end(at);
        // SAFETY: nothing has been closed; the span maps its old frames.
        unsafe { at.let_go(effort) };
        return AttemptResult::Refused(call, errno);
    }
    // SAFETY: forwarded to the caller.
    let copied = if way.copies_beside(at) { unsafe { copy(way, at, effort) } } else { Ok(()) };
    // SAFETY: forwarded to the caller.
    let ready = copied.and_then(|()| unsafe { way.prepare(at, effort) });
    if let Err((call, errno)) = ready {
        way.end(at);
        // SAFETY: nothing has been closed; the span maps its old frames.
        unsafe {
            at.let_go(effort);
            at.reopen_views(effort);
        }
        return AttemptResult::Refused(call, errno);
    }
    // If a call that replaces a mapping fails half-way, threads that fault in the hole wait for the
    // slot.
    // SAFETY: `backend` outlives this function, which retires the slot on every path.
    unsafe { slot.publish(epoch, &work.span, erase(backend)) };
    if way.hurries(at) || work.starter_is_low() {
        at.hurry(effort);
    }
    let closed_at = monotonic_ns();
    // SAFETY: the span is published; the rest is forwarded to the caller.
    let committed = unsafe { way.close_and_commit(at, effort) };
    way.end(at);
    let step = match committed {
        Ok(()) => {
            if way.counts_waiters(at) {
                effort.counters.waiters = backend.count_waiting(following.tracker);
            }
            at.wake(effort);
            // SAFETY: the engine has closed the views, and the span maps the new frames.
            unsafe { at.open_views(effort) };
            AttemptResult::Migrated
        }
        Err((call, errno)) => {
            // SAFETY: the span maps its old frames.
            unsafe { way.reopen(at, (call, errno), effort) };
            // The page tables in the alias may still be registered, so a thread that reads the
            // alias would wait: it has to be mapped anew.
            if effort.after.parked != Parked::No {
                effort.after.parked = Parked::Failed;
            }
            // SAFETY: the span maps its old frames, with or without page tables, and so do the
            // views.
            unsafe {
                at.let_go(effort);
                at.reopen_views(effort);
            }
            AttemptResult::Refused(call, errno)
        }
    };
    effort.counters.window_ns = monotonic_ns().saturating_sub(closed_at).max(1);
    slot.retire();
    effort.slow_down(backend);
    step
}

/// Pre-copies the area: copies it while threads write to it, then dirty pages again, until few are
/// left.
///
/// # Safety
/// As [`attempt`]; writes to the span are followed.
unsafe fn copy(way: &impl Way, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
    let Tools { slot, backend, .. } = at.tools;
    let (len, source) = (at.work.span.len, at.source());
    let Following { freeze_at, max_rounds, .. } = at.following;
    // A hugetlb page is dirty as soon as one byte of it is written, so a further copy gains
    // nothing.
    let max_rounds = if at.work.page.is_hugetlb() { 0 } else { max_rounds.min(MOST_ROUNDS) };
    // SAFETY: the span is ours to follow; source and new frames are the caller's promise.
    unsafe {
        // Write-protect before the copy, so that a store which the copy misses makes its page
        // dirty.
        way.mark(at, effort)?;
        let all = at.work.piece(source, 0..len);
        at.work.copy_beside(backend, || slot.crew.copy(backend, all, false));
        effort.counters.copied += len as u64;
        for round in 0.. {
            let mut written = 0;
            way.look(at, false, effort, &mut |pages| {
                written += pages.len() as u64 / BASE_PAGE as u64;
                Ok(written <= freeze_at)
            })?;
            if round == 0 {
                effort.counters.written = written;
            }
            if written <= freeze_at {
                break;
            }
            if round >= max_rounds {
                effort.counters.held = true;
                break;
            }
            let mut copied = 0;
            way.look(at, true, effort, &mut |pages| {
                copied += pages.len() as u64;
                at.work.piece(source, pages).copy(backend);
                Ok(true)
            })?;
            effort.counters.copied += copied;
            if round == 0 {
                // The scan before has stopped counting at `freeze_at`.
                effort.counters.written = effort.counters.written.max(copied / BASE_PAGE as u64);
            }
        }
    }
    Ok(())
}
