//! What the engines share that have a tracker. Those that follow writes copy while writers write,
//! copy again what they have written, and close the area only for the last few pages. The others
//! close it first ([`Way::copies_beside`]).
//!
//! ```text
//! track ─► mark ─► copy ─► look ─► few written? ─► prepare ─► publish ─► close, look, copy, commit
//!                    ▲               │ no                                (the engine's own)
//!                    └─ mark, copy ──┘ at most max_rounds times
//! ```
//!
//! Each engine has its own [`Way`] to mark pages, to look which were written, and to close the last
//! gap. Steps and argument: `docs/protocol.md`, sections 3.2 to 3.4.
//!
//! What these engines promise beyond `mprotect`: a writer waits for a window, not for a copy.

use std::ops::Range;

use super::commit::{AttemptResult, erase, persist};
use super::effort::{Effort, Parked};
use super::slot::Span;
use super::{Following, Tools, Work};
use crate::backend::{Advice, Call, Errno, Haste, PageRegion, page_is};
use crate::sync::monotonic_ns;
use crate::units::{BASE_PAGE, PageSize};

/// Entries of a scan: some 3 KB of stack.
const ENTRIES: usize = 128;

/// The most further copies that are made, whatever was asked for: more would only follow a writer
/// who is faster.
const MOST_ROUNDS: u32 = 16;

/// A call that refused.
pub(super) type Refusal = (Call, Errno);

/// What is done with pages that have been written, as bytes from the start of the area. It says
/// whether to go on.
pub(super) type Each<'a> = dyn FnMut(Range<usize>) -> Result<bool, Refusal> + 'a;

/// One attempt of an engine that has a tracker.
pub(super) struct Attempt<'a> {
    pub(super) tools: Tools<'a>,
    pub(super) work: &'a Work,
    pub(super) following: Following,
}

/// What each engine does in its own way. The contract of each method is that of
/// [`attempt`](super::attempt); `look`, `close_and_commit` and `reopen` come after `mark`.
pub(super) trait Way {
    /// Whether the area is copied while writers write. If not, it is copied when it is closed.
    fn copies_beside(&self, _at: &Attempt<'_>) -> bool {
        true
    }

    /// Whether this thread is to run before others from the moment when the area is closed, also if
    /// an ordinary one has started the job.
    fn hurries(&self, _at: &Attempt<'_>) -> bool {
        true
    }

    /// Whether the messages of the tracker tell who has come to wait, and nobody else reads them.
    fn counts_waiters(&self, _at: &Attempt<'_>) -> bool {
        false
    }

    /// Makes all pages count as clean until they are written. Unless the engine has its own way,
    /// the kernel notes the writes.
    unsafe fn mark(&self, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
        // SAFETY: forwarded to the caller.
        unsafe { at.mark_by_scan(effort) }
    }

    /// Shows `each` the pages that are not known to be clean, until it says that this is enough.
    /// With `mark_clean` those that are written count as clean from the same moment.
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

    /// Does what has to come before the span is registered.
    unsafe fn before(&self, _at: &Attempt<'_>, _effort: &mut Effort) -> Result<(), Refusal> {
        Ok(())
    }

    /// Makes the area ready to be closed.
    unsafe fn prepare(&self, _at: &Attempt<'_>, _effort: &mut Effort) -> Result<(), Refusal> {
        Ok(())
    }

    /// Keeps everybody from storing to the area, copies what the last stores have left to copy, and
    /// brings the new frames. The slot is published.
    unsafe fn close_and_commit(&self, at: &Attempt<'_>, effort: &mut Effort)
    -> Result<(), Refusal>;

    /// After a refusal in `close_and_commit`: undoes what the end of tracking does not undo.
    unsafe fn reopen(&self, _at: &Attempt<'_>, _why: Refusal, _effort: &mut Effort) {}

    /// Ends the attempt, in whatever state it is.
    fn end(&self, _at: &Attempt<'_>) {}
}

impl Attempt<'_> {
    /// Where the old frames can be read while the span is accessible. Through the span a huge page
    /// that is followed would be read by base pages, with a fault for each.
    pub(super) fn source(&self) -> usize {
        let in_place = self.work.span.prot.readable() && self.work.page != PageSize::Thp;
        if in_place { self.work.span.addr } else { self.work.old.alias }
    }

    /// Raises this thread, if that is allowed and not done.
    pub(super) fn hurry(&self, effort: &mut Effort) {
        effort.hurry(self.tools.backend, self.work.haste);
    }

    /// Marks the whole span. Transparent huge pages are followed by base pages
    /// (UFFDIO_WRITEPROTECT). So are hugetlb pages, because PAGEMAP_SCAN, which is faster, knows no
    /// pages of 1 GB, and can wait for itself where hugetlb pages have no page tables (Linux 6.7 to
    /// 6.18.41).
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

    /// Waits for each write by way of `/proc/PID/mem` or `ptrace(2)` that began before pages of the
    /// span lost their entries, or the permission to be written.
    ///
    /// Such a write looks the page up, and stores to it afterwards, without an entry. Meanwhile the
    /// kernel holds the lock of the address space for reading (`__access_remote_vm`, Linux 6.18).
    /// MADV_DONTNEED, UFFDIO_WRITEPROTECT and PAGEMAP_SCAN hold it for reading, too, so a copy that
    /// follows them could be made before the store. UFFDIO_REGISTER holds it for writing, and changes
    /// nothing where the range is registered.
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

    /// Makes everybody map transparent huge pages of the span by base pages, until the span is
    /// mapped anew.
    ///
    /// The kernel splits a huge entry of a file by removing it. A thread that stores there brings
    /// the huge entry back before base pages can be marked, and so on: without this, one store and
    /// one mark took up to 20 ms (Linux 6.18).
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn split(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        if self.work.page != PageSize::Thp {
            return;
        }
        effort.after.split = true;
        // All huge entries go at once, so that other CPUs are interrupted once.
        for advice in [Advice::NoHugePage, Advice::DropTables] {
            effort.count(Call::Advise);
            // If it is refused, huge entries are split one by one. SAFETY: the span is ours, and
            // maps a file.
            let _ = unsafe { self.tools.backend.advise(addr, len, advice) };
        }
    }

    /// Marks the span by the faster of the two calls that can.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn mark_by_scan(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let scans = self.work.page == PageSize::Base;
        // SAFETY: forwarded to the caller.
        unsafe { self.mark(if scans { Call::Scan } else { Call::MarkClean }, effort) }
    }

    /// Takes the lock of the span away, if it has one: it must not go along to the alias. Before the
    /// span is registered so that threads wait for absent pages: a look at attributes duplicates a
    /// page of a mapping, of a locked one the kernel fills the duplicate, and nobody would wake that.
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

    /// Moves the page tables of the span to the alias of its frames. Threads that touch the span
    /// from then on wait.
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

    /// Drops the page tables of hugetlb pages, which cannot move. Threads that touch the span from
    /// then on wait.
    ///
    /// # Safety
    /// As [`Attempt::freeze`].
    pub(super) unsafe fn drop_tables(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let Span { addr, len, .. } = self.work.span;
        effort.count(Call::Advise);
        // SAFETY: the span is the job's, and maps a file.
        unsafe { self.tools.backend.advise(addr, len, Advice::DropTables) }.map_err(|errno| {
            // The kernel does not know this for hugetlb pages.
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

    /// Shows `each` the pages of `[addr, addr + len)` of which the kernel does not know that they
    /// are clean, as bytes from `addr` on, until it says that this is enough. With `mark_clean`
    /// those that are written count as clean from the same moment.
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
                // Without an entry, but with a marker: it was clean when the entry went.
                let clean =
                    run.categories & (page_is::SWAPPED | page_is::WRITTEN) == page_is::SWAPPED;
                if !clean && !each(pages)? {
                    return Ok(());
                }
            }
            let walked = walked.saturating_sub(addr).min(len);
            if walked <= seen {
                // The kernel gets nowhere: nothing is known of the rest.
                return each(seen..len).map(drop);
            }
            seen = walked;
        }
        Ok(())
    }

    /// Ends the tracking of a span that stays where it is, and lets everybody go on.
    ///
    /// # Safety
    /// The span maps its old frames, with or without page tables.
    unsafe fn let_go(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        effort.count(Call::Untrack);
        // SAFETY: forwarded to the caller.
        persist(effort, |refusals| match unsafe { backend.untrack(tracker, addr, len) } {
            Ok(()) => Some(()),
            // The kernel does not say so for want of anything: nothing is registered.
            Err(Errno(libc::EINVAL)) if refusals > 8 => Some(()),
            // The end of the userfaultfd has ended its registrations.
            Err(_) if !tracker.has_faults() => Some(()),
            Err(_) => None,
        });
        self.wake(effort);
    }

    fn wake(&self, effort: &mut Effort) {
        let Span { addr, len, .. } = self.work.span;
        effort.count(Call::Wake);
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        // The end of the userfaultfd has let everybody go on.
        persist(effort, |_| {
            let woken = backend.wake(tracker, addr, len);
            (woken.is_ok() || !tracker.has_faults()).then_some(())
        });
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
        // Part of it may be registered, and a thread that moves that by another engine would wait
        // for our thread. What another owner has registered is not ours to undo.
        if errno != Errno(libc::EBUSY) {
            // SAFETY: the span maps its old frames.
            unsafe { at.let_go(effort) };
        }
        return AttemptResult::Refused(Call::Track, errno);
    }
    // SAFETY: forwarded to the caller.
    let copied = if way.copies_beside(at) { unsafe { copy(way, at, effort) } } else { Ok(()) };
    // SAFETY: forwarded to the caller.
    let ready = copied.and_then(|()| unsafe { way.prepare(at, effort) });
    if let Err((call, errno)) = ready {
        way.end(at);
        // SAFETY: nothing has been closed; the span maps its old frames.
        unsafe { at.let_go(effort) };
        return AttemptResult::Refused(call, errno);
    }
    // If a call that replaces a mapping fails half-way, threads that meet the hole wait for this.
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
            AttemptResult::Migrated
        }
        Err((call, errno)) => {
            // SAFETY: the span maps its old frames.
            unsafe { way.reopen(at, (call, errno), effort) };
            // What has moved to the alias may still be registered, and a thread that reads it would
            // wait.
            if effort.after.parked != Parked::No {
                effort.after.parked = Parked::Failed;
            }
            // SAFETY: the span maps its old frames, with or without page tables.
            unsafe { at.let_go(effort) };
            AttemptResult::Refused(call, errno)
        }
    };
    effort.counters.window_ns = monotonic_ns().saturating_sub(closed_at).max(1);
    slot.retire();
    effort.slow_down(backend);
    step
}

/// Copies the area while it is written to, until little is left to copy.
///
/// # Safety
/// As [`attempt`]; writes to the span are followed.
unsafe fn copy(way: &impl Way, at: &Attempt<'_>, effort: &mut Effort) -> Result<(), Refusal> {
    let Tools { slot, backend, .. } = at.tools;
    let (len, source) = (at.work.span.len, at.source());
    let Following { freeze_at, max_rounds, .. } = at.following;
    // A hugetlb page is written as soon as one byte of it is: a further copy gains nothing.
    let max_rounds = if at.work.page.is_hugetlb() { 0 } else { max_rounds.min(MOST_ROUNDS) };
    // SAFETY: the span is ours to follow; source and new frames are the caller's promise.
    unsafe {
        // Before the copy: a store that the copy misses has to leave its mark.
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
                // The look before stopped counting.
                effort.counters.written = effort.counters.written.max(copied / BASE_PAGE as u64);
            }
        }
    }
    Ok(())
}
