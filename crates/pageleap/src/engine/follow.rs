//! The engines that follow writes: copy while writers write, copy again what they have written, and
//! hold everybody up only for the last few pages.
//!
//! With `precopy` the kernel notes which pages are written (userfaultfd with asynchronous
//! write-protection, Linux 6.7): no signal, no handler, and its own writes are noted like any
//! others. To close the gap between the last copy and the new frames, the page tables of the area
//! are moved away, marks included; whoever touches the area then, user code or kernel, sleeps in a
//! page fault until the page tables of the new frames have arrived. Steps and argument:
//! `docs/protocol.md`, sections 3.2 to 3.4.
//!
//! What it promises beyond the engine `mprotect`: system calls that read or write the area do not
//! fail because of a leap (but FUTEX_WAKE_OP may); writers are neither signalled nor throttled.
//! What it asks for: a userfaultfd that holds up the kernel's accesses, which takes a privilege or
//! `/dev/userfaultfd`.
//!
//! `precopy-protect` closes the gap by protection instead, without privilege; with `wp-sync`
//! writers are let in one by one and noted by us ([`notes`]). `docs/adr/0011` compares them.
//!
//! One attempt to migrate one area: mark, copy, copy again, freeze, look once more, commit.
//!
//! Between the freeze and the end nothing allocates, logs, calls back or touches the area, except
//! that what is left is copied from it where readers do not wait: the allocator of the process may
//! live there, and whoever comes in the way of a freeze sleeps until we are done.

use std::ops::Range;

use crate::backend::{Backend, Call, Errno, MemoryFile, PageRegion, Tracker, page_is};
use crate::engine::commit::{
    Effort, Parked, Step, Target, arrive, change_places, erase, give_access_back, persist,
};
use crate::engine::notes::WriteNotes;
use crate::engine::slot::{Slot, Span};
use crate::sync::{AtomicU64, monotonic_ns};
use crate::units::BASE_PAGE;

/// Entries of a scan: some 3 KB of stack.
const ENTRIES: usize = 128;

/// More further copies than that are not made, whatever was asked for: they would only follow a
/// writer who is faster.
const MOST_ROUNDS: u32 = 16;

/// How everybody is kept from an area between the last look and the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freeze {
    /// Its page tables are taken away: whoever touches it waits in a page fault, the kernel
    /// included. They go to this alias of the current frames, whose place in their file it is.
    Absence { park: usize, file: MemoryFile, offset: u64 },
    /// It is read-only: whoever writes to it waits in the signal handler, and the kernel's writes
    /// fail. The page tables go to this alias when those of the target come, if that is possible.
    Protection { park: Option<usize> },
    /// Its pages are write-protected by the tracker, which notes nothing by itself: whoever writes
    /// to it waits in a page fault, the kernel included. With `hold` so it is from the beginning.
    Barrier { page_bytes: usize, hold: bool },
}

/// What to migrate in one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) span: Span,
    /// Where the current frames can be read while the span is accessible.
    pub(crate) source: usize,
    pub(crate) freeze: Freeze,
    pub(crate) target: Target,
    pub(crate) tracker: Tracker,
    /// Whether pages are marked by UFFDIO_WRITEPROTECT, by which transparent huge pages are
    /// followed by base pages, and not by the faster PAGEMAP_SCAN, which knows no pages of 1 GB,
    /// and can wait for itself where hugetlb pages have no page tables (Linux 6.7 to 6.18.41).
    pub(crate) split: bool,
    /// Whether the span is locked: the lock must not go along.
    pub(crate) locked: bool,
    /// The area is frozen when at most so many pages have been written since they were copied last.
    pub(crate) freeze_at: u64,
    /// After so many further copies it is frozen anyway.
    pub(crate) max_rounds: u32,
    /// Whether this thread may be put before others while they wait for it.
    pub(crate) hurry: bool,
}

/// A call that refused.
type Refusal = (Call, Errno);

/// Runs one attempt. Whatever happens, the span is accessible at the end, and nobody waits for it.
///
/// # Safety
/// The span belongs to a region whose pages in it nobody else migrates, grows or discards
/// meanwhile, and its user may write it; source, file and park are those of its frames; the
/// target's frames belong to the job and nobody else accesses them; `backend` is valid during the
/// call, and another thread serves the tracker.
pub(crate) unsafe fn attempt(
    slot: &Slot,
    epoch: &AtomicU64,
    backend: &dyn Backend,
    task: &Task,
    effort: &mut Effort,
) -> Step {
    let Span { addr, len, .. } = task.span;
    effort.count(Call::Track);
    // SAFETY: the span is ours to follow.
    if let Err(errno) = unsafe { backend.track(task.tracker, addr, len, false) } {
        // Part of it may be registered, and whoever moves that by another engine would wait for our
        // thread. What is somebody else's is not ours to undo.
        if errno != Errno(libc::EBUSY) {
            // SAFETY: the span maps its old frames.
            unsafe { let_go(backend, task, effort) };
        }
        return Step::Refused(Call::Track, errno);
    }
    let held = matches!(task.freeze, Freeze::Barrier { hold: true, .. });
    // SAFETY: forwarded to the caller.
    let copied = if held { Ok(()) } else { unsafe { copy(slot, backend, task, effort) } };
    // SAFETY: forwarded to the caller.
    let ready = copied.and_then(|()| unsafe { prepare(backend, task, effort) });
    if let Err((call, errno)) = ready {
        slot.notes.end();
        // SAFETY: nothing has been closed; the span maps its old frames.
        unsafe { let_go(backend, task, effort) };
        return Step::Refused(call, errno);
    }
    // If a call that replaces a mapping fails half-way, threads that meet the hole wait for this.
    // SAFETY: `backend` outlives this function, which retires the slot on every path.
    unsafe { slot.publish(epoch, &task.span, erase(backend)) };
    // Where the window is one call for one page, as it may turn out, to go first costs more than it
    // spares: 11 us of 200 for a page of 2 MB.
    let short = matches!(task.freeze, Freeze::Barrier { page_bytes, hold: false } if page_bytes == task.span.len);
    if !short {
        hurry(backend, task, effort);
    }
    let closed_at = monotonic_ns();
    // SAFETY: the span is published; the rest is forwarded to the caller.
    let frozen = unsafe {
        match task.freeze {
            Freeze::Absence { park, file, offset } => {
                take_away_and_commit(backend, task, park, (file, offset), effort)
            }
            Freeze::Protection { park } => protect_and_commit(slot, backend, task, park, effort),
            Freeze::Barrier { hold, .. } => hold_and_commit(slot, backend, task, hold, effort),
        }
    };
    slot.notes.end();
    let step = match frozen {
        Ok(()) => {
            wake(backend, task, effort);
            Step::Migrated
        }
        Err((call, errno)) => {
            if let Freeze::Protection { .. } = task.freeze {
                // SAFETY: it maps its old frames, and writers wait. The call may have had its
                // effect, in whole or in part.
                unsafe {
                    give_access_back(
                        backend,
                        &task.span,
                        (call == Call::Protect).then_some(errno),
                        effort,
                    );
                }
            }
            // What has moved to the alias is still registered, and whoever read it would wait.
            if effort.parked != Parked::No {
                effort.parked = Parked::Failed;
            }
            // SAFETY: the span maps its old frames, with or without page tables.
            unsafe { let_go(backend, task, effort) };
            Step::Refused(call, errno)
        }
    };
    effort.held |= held;
    effort.window_ns = monotonic_ns().saturating_sub(closed_at).max(1);
    slot.retire();
    if effort.hurried {
        backend.hurry(false);
    }
    step
}

/// Puts this thread before others, if that is allowed and not done.
fn hurry(backend: &dyn Backend, task: &Task, effort: &mut Effort) {
    if task.hurry && !effort.hurried {
        effort.hurried = backend.hurry(true);
    }
}

/// Copies the area while it is written to, until little is left to copy.
///
/// # Safety
/// As [`attempt`]; writes to the span are followed.
unsafe fn copy(
    slot: &Slot,
    backend: &dyn Backend,
    task: &Task,
    effort: &mut Effort,
) -> Result<(), Refusal> {
    let Span { addr, len, .. } = task.span;
    let Task { tracker, target, .. } = *task;
    let notes = &slot.notes;
    if let Freeze::Barrier { page_bytes, .. } = task.freeze {
        notes.begin(addr, len, page_bytes);
    }
    let look = |mark_clean, effort: &mut Effort, each: &mut Each<'_>| match task.freeze {
        // SAFETY: as below.
        Freeze::Barrier { .. } => unsafe { noted(notes, backend, task, mark_clean, effort, each) },
        // SAFETY: as below.
        _ => unsafe { unproven(backend, tracker, addr, len, mark_clean, effort, each) },
    };
    // SAFETY: the span is ours to follow; source and target are the caller's promise.
    unsafe {
        // Before the copy: a store that the copy misses has to leave its mark.
        let scans = !task.split && !matches!(task.freeze, Freeze::Barrier { .. });
        let call = if scans { Call::Scan } else { Call::MarkClean };
        effort.count(call);
        backend.mark_clean(tracker, addr, len, task.split).map_err(|errno| (call, errno))?;
        slot.crew.copy(backend, target.alias, task.source, len, false);
        effort.copied += len as u64;
        for round in 0.. {
            let mut written = 0;
            look(false, effort, &mut |pages| {
                written += pages.len() as u64 / BASE_PAGE as u64;
                Ok(written <= task.freeze_at)
            })?;
            if round == 0 {
                effort.written = written;
            }
            if written <= task.freeze_at {
                break;
            }
            if round >= task.max_rounds.min(MOST_ROUNDS) {
                effort.held = true;
                break;
            }
            let mut copied = 0;
            look(true, effort, &mut |pages| {
                backend.copy(target.alias + pages.start, task.source + pages.start, pages.len());
                copied += pages.len() as u64;
                Ok(true)
            })?;
            effort.copied += copied;
        }
    }
    Ok(())
}

/// Has the area ready to be frozen.
///
/// # Safety
/// As [`attempt`].
unsafe fn prepare(backend: &dyn Backend, task: &Task, effort: &mut Effort) -> Result<(), Refusal> {
    let Span { addr, len, .. } = task.span;
    // SAFETY: forwarded to the caller.
    unsafe {
        // From now on whoever finds a page without an entry waits. Pages have one, as a rule, until
        // the freeze.
        if let Freeze::Absence { .. } = task.freeze {
            effort.count(Call::Track);
            backend.track(task.tracker, addr, len, true).map_err(|errno| (Call::Track, errno))?;
        }
        if task.locked {
            effort.count(Call::Lock);
            backend.unlock(addr, len).map_err(|errno| (Call::Lock, errno))?;
        }
    }
    Ok(())
}

/// Moves the page tables of the span to the alias, copies what its last stores have left to copy,
/// and brings those of the new frames.
///
/// # Safety
/// As [`attempt`], after [`copy`], with the slot published.
unsafe fn take_away_and_commit(
    backend: &dyn Backend,
    task: &Task,
    park: usize,
    (file, offset): (MemoryFile, u64),
    effort: &mut Effort,
) -> Result<(), Refusal> {
    let Span { addr, len, .. } = task.span;
    let Task { tracker, target, .. } = *task;
    effort.count(Call::Exchange);
    effort.parked = Parked::Failed;
    // SAFETY: the span is the job's; whoever touches it from now on waits. The alias is that of its
    // own frames.
    unsafe { backend.exchange(addr, park, len) }.map_err(|errno| {
        effort.exchange_unsupported |= errno == Errno(libc::EINVAL);
        (Call::Exchange, errno)
    })?;
    effort.parked = Parked::Yes;
    let (mut copied, mut read) = (0, 0);
    // Nobody can store to these frames any more, so this look is the last one.
    // SAFETY: the alias holds the page tables of the frames; the target's frames are ours.
    unsafe {
        unproven(backend, tracker, park, len, false, effort, &mut |pages| {
            // Not through the alias: the kernel may drop an entry of it at any time, and whoever
            // finds none there sleeps until we wake him.
            let (offset, dst) = (offset + pages.start as u64, target.alias + pages.start);
            read += 1;
            copied += pages.len() as u64;
            let read = backend.read_file(file, offset, dst, pages.len());
            read.map(|()| true).map_err(|errno| (Call::ReadFile, errno))
        })
    }?;
    effort.copied += copied;
    effort.left = copied / BASE_PAGE as u64;
    effort.calls[Call::ReadFile as usize] += read;
    // SAFETY: the span is closed, and all its pages have been copied since the last store to them.
    unsafe { arrive(backend, &task.span, &target, effort) }.map_err(|errno| (Call::Map, errno))
}

/// Makes the span read-only, copies what its last stores have left to copy, and brings the new
/// frames.
///
/// # Safety
/// As [`attempt`], after [`prepare`], with the slot published.
unsafe fn protect_and_commit(
    slot: &Slot,
    backend: &dyn Backend,
    task: &Task,
    park: Option<usize>,
    effort: &mut Effort,
) -> Result<(), Refusal> {
    let Span { addr, len, prot } = task.span;
    let target = task.target;
    effort.count(Call::Protect);
    // SAFETY: the span is the job's; whoever faults waits for the slot.
    unsafe { backend.protect(addr, len, prot.without_write()) }
        .map_err(|errno| (Call::Protect, errno))?;
    let mut copied = 0;
    // Nobody can store to these frames any more, so this look is the last one.
    // SAFETY: the source is readable; the target's frames are ours.
    unsafe {
        unproven(backend, task.tracker, addr, len, false, effort, &mut |pages| {
            let (dst, src) = (target.alias + pages.start, task.source + pages.start);
            slot.crew.copy(backend, dst, src, pages.len(), task.hurry);
            copied += pages.len() as u64;
            Ok(true)
        })
    }?;
    effort.copied += copied;
    effort.left = copied / BASE_PAGE as u64;
    // SAFETY: the span is closed, and all its pages have been copied since the last store to them.
    unsafe { change_places(backend, &task.span, &target, park, effort) }
        .map_err(|errno| (Call::Map, errno))
}

/// Has everybody wait who writes to the span, copies what has been written since it was copied, or
/// all of it, and brings the new frames.
///
/// # Safety
/// As [`attempt`], after [`prepare`], with the slot published.
unsafe fn hold_and_commit(
    slot: &Slot,
    backend: &dyn Backend,
    task: &Task,
    all: bool,
    effort: &mut Effort,
) -> Result<(), Refusal> {
    let Span { addr, len, .. } = task.span;
    let (target, notes) = (task.target, &slot.notes);
    // From now on nobody is let in.
    notes.close();
    let mut copied = 0;
    let mut copy = |pages: Range<usize>| {
        let (dst, src) = (target.alias + pages.start, task.source + pages.start);
        // SAFETY: the source is readable; the target's frames are ours.
        unsafe { slot.crew.copy(backend, dst, src, pages.len(), task.hurry) };
        copied += pages.len() as u64;
        Ok(true)
    };
    if all {
        effort.count(Call::MarkClean);
        // SAFETY: the span is ours to follow.
        unsafe { backend.mark_clean(task.tracker, addr, len, true) }
            .map_err(|errno| (Call::MarkClean, errno))?;
        copy(0..len)?;
    } else {
        /// Runs of pages that are protected one by one. One call for the whole span costs more, but
        /// once.
        const FEW: usize = 16;
        let mut runs = 0;
        notes.written::<Refusal>(false, &mut |_| {
            runs += 1;
            Ok(runs <= FEW)
        })?;
        if runs > FEW {
            effort.count(Call::MarkClean);
            // SAFETY: the span is ours to follow.
            unsafe { backend.mark_clean(task.tracker, addr, len, true) }
                .map_err(|errno| (Call::MarkClean, errno))?;
        }
        if runs > 0 {
            hurry(backend, task, effort);
        }
        // Nobody can write to the others, so this look is the last one.
        // SAFETY: forwarded to the caller.
        unsafe { noted(notes, backend, task, runs <= FEW, effort, &mut copy) }?;
    }
    effort.copied += copied;
    effort.left = copied / BASE_PAGE as u64;
    // SAFETY: the span is closed, and all its pages have been copied since the last store to them.
    // The page tables cannot go to the alias: whoever found none in the span would make new ones,
    // of the old frames, and write.
    unsafe { arrive(backend, &task.span, &target, effort) }.map_err(|errno| (Call::Map, errno))
}

/// What is done with pages that have been written, as bytes from the start of the area. It says
/// whether to go on.
type Each<'a> = dyn FnMut(Range<usize>) -> Result<bool, Refusal> + 'a;

/// Shows `each` the pages that somebody was let write to, until it says that this is enough. With
/// `mark_clean` they are write-protected first, and noted no longer.
///
/// # Safety
/// As [`attempt`].
unsafe fn noted(
    notes: &WriteNotes,
    backend: &dyn Backend,
    task: &Task,
    mark_clean: bool,
    effort: &mut Effort,
    each: &mut Each<'_>,
) -> Result<(), Refusal> {
    notes.written(mark_clean, &mut |pages| {
        if mark_clean {
            effort.count(Call::MarkClean);
            // SAFETY: forwarded to the caller.
            unsafe {
                backend.mark_clean(task.tracker, task.span.addr + pages.start, pages.len(), true)
            }
            .map_err(|errno| (Call::MarkClean, errno))?;
        }
        each(pages)
    })
}

/// Shows `each` the pages of `[addr, addr + len)` of which the kernel does not know that they are
/// clean, as bytes from `addr` on, until it says that this is enough. With `mark_clean` those that
/// are written count as clean from the same moment.
///
/// # Safety
/// As [`attempt`].
unsafe fn unproven(
    backend: &dyn Backend,
    tracker: Tracker,
    addr: usize,
    len: usize,
    mark_clean: bool,
    effort: &mut Effort,
    each: &mut Each<'_>,
) -> Result<(), Refusal> {
    let mut found = [PageRegion::default(); ENTRIES];
    let mut seen = 0;
    while seen < len {
        effort.count(Call::Scan);
        // SAFETY: forwarded to the caller.
        let (entries, walked) =
            unsafe { backend.scan(tracker, addr + seen, len - seen, mark_clean, &mut found) }
                .map_err(|errno| (Call::Scan, errno))?;
        for run in &found[..entries] {
            let pages = run.start as usize - addr..run.end as usize - addr;
            // Without an entry, but with a marker: it was clean when the entry went.
            let clean = run.categories & (page_is::SWAPPED | page_is::WRITTEN) == page_is::SWAPPED;
            if !clean && !each(pages)? {
                return Ok(());
            }
        }
        let walked = walked.saturating_sub(addr).min(len);
        if walked <= seen {
            // It gets nowhere: nothing is known of the rest.
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
unsafe fn let_go(backend: &dyn Backend, task: &Task, effort: &mut Effort) {
    let Span { addr, len, .. } = task.span;
    effort.count(Call::Untrack);
    // SAFETY: forwarded to the caller.
    persist(effort, |refusals| match unsafe { backend.untrack(task.tracker, addr, len) } {
        Ok(()) => Some(()),
        // The kernel does not say so for want of anything: there is nothing registered.
        Err(Errno(libc::EINVAL)) if refusals > 8 => Some(()),
        Err(_) => None,
    });
    wake(backend, task, effort);
}

fn wake(backend: &dyn Backend, task: &Task, effort: &mut Effort) {
    effort.count(Call::Wake);
    persist(effort, |_| backend.wake(task.tracker, task.span.addr, task.span.len).ok());
}
