//! The engine `mprotect`: the method of page_leap (Schuhknecht and Rassau, "Taking the Leap",
//! sections 4.1 and 4.2), made correct.
//!
//! An area is made read-only and copied. A thread that writes to it meanwhile receives SIGSEGV; its
//! handler makes the area writable again and marks it, and the migrator retries it in smaller
//! parts. If nobody wrote, the area is switched to the new frames. Pages, protocol and argument:
//! `docs/protocol.md`.
//!
//! What it promises: user-mode reads never wait for a copy; user-mode writes are never lost and
//! always proceed, at the latest when the area has been moved; every page is migrated, always,
//! because after a bounded number of disturbed copies the writers of an area wait until it is done.
//! What it cannot: a system call that writes into the area for its caller (`read(2)`) fails with
//! EFAULT while the area is read-only (no signal is raised for it).
//!
//! One attempt to migrate one area: protect, copy, close, commit. The migrator's half of the
//! protocol.
//!
//! The commit, and with it everything between [`Slot::close`] and [`Slot::retire`], is the window
//! in which writers wait. Nothing in it allocates, logs, calls back or touches the area: the
//! allocator of the process may live there.

use crate::backend::{Backend, Call};
use crate::engine::commit::{Effort, Step, Target, change_places, erase, give_access_back};
use crate::sync::AtomicU64;

use super::slot::{Close, Slot, Span};

/// Bytes that each thread copies between two looks at whether a writer has interrupted. 64 KB take
/// about 10 us.
#[cfg(not(any(loom, shuttle)))]
const COPY_STEP: usize = 64 << 10;
#[cfg(any(loom, shuttle))]
const COPY_STEP: usize = crate::units::BASE_PAGE;

/// What to migrate in one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) span: Span,
    /// Where the current frames can be read: the span itself, or their pool's alias if the span may
    /// not be read.
    pub(crate) source: usize,
    pub(crate) target: Target,
    /// Where the page tables of the current frames go when those of the target come: their pool's
    /// alias.
    pub(crate) park: Option<usize>,
    /// Writers are held back from the start, so that the attempt cannot be disturbed.
    pub(crate) hold: bool,
}

/// Runs one attempt.
///
/// # Safety
/// The span belongs to a region whose pages in it nobody else migrates, grows or discards
/// meanwhile; the target's frames belong to the job and nobody else accesses them; `backend` is
/// valid during the call.
pub(crate) unsafe fn attempt(
    slot: &Slot,
    epoch: &AtomicU64,
    backend: &dyn Backend,
    task: &Task,
    effort: &mut Effort,
) -> Step {
    let Span { addr, len, prot } = task.span;
    // A span that the user may not write cannot be disturbed: nothing to track, nothing to protect.
    let trackable = prot.writable();
    let mut hold = task.hold;
    // Whether a call of ours has taken access away.
    let mut protected = false;
    // SAFETY: `backend` outlives this function, which retires the slot on every path.
    unsafe { slot.publish(epoch, &task.span, erase(backend)) };
    loop {
        let mut closed_at = crate::sync::monotonic_ns();
        if trackable {
            effort.count(Call::Protect);
            // SAFETY: the span is ours to migrate; whoever faults waits for the slot, which has
            // been published.
            if let Err(errno) = unsafe { backend.protect(addr, len, prot.without_write()) } {
                // SAFETY: as above. The call may have had its effect, in whole or in part.
                unsafe {
                    give_access_back(backend, &task.span, (!protected).then_some(errno), effort)
                };
                slot.retire();
                return Step::Refused(Call::Protect, errno);
            }
            protected = true;
            if !hold {
                slot.track();
            }
        }
        // SAFETY: the source is readable and the target's frames are ours (see this function's
        // contract).
        let complete = unsafe { copy(slot, backend, task, trackable && !hold, effort) };
        if trackable && !hold {
            closed_at = crate::sync::monotonic_ns();
            match slot.close() {
                Close::Closed => debug_assert!(complete),
                Close::Opened => {
                    slot.retire();
                    return Step::Dirty;
                }
                // The area may be writable although the writer was told that it is not: protect and
                // copy again.
                Close::HandedOver => {
                    hold = true;
                    continue;
                }
            }
        }
        if !trackable {
            // Until now nobody had to wait.
            closed_at = crate::sync::monotonic_ns();
        }
        // SAFETY: the area is closed and the copy is complete.
        let changed =
            unsafe { change_places(backend, &task.span, &task.target, task.park, effort) };
        if let Err(errno) = changed {
            if trackable {
                // SAFETY: the area is closed and maps its old frames.
                unsafe { give_access_back(backend, &task.span, None, effort) };
            }
            slot.retire();
            return Step::Refused(Call::Map, errno);
        }
        effort.held = hold && trackable;
        effort.window_ns = crate::sync::monotonic_ns().saturating_sub(closed_at).max(1);
        slot.retire();
        return Step::Migrated;
    }
}

/// Copies the area, in steps if writers may interrupt, until done or disturbed. Returns whether it
/// was all copied.
///
/// # Safety
/// As [`attempt`].
unsafe fn copy(
    slot: &Slot,
    backend: &dyn Backend,
    task: &Task,
    interruptible: bool,
    effort: &mut Effort,
) -> bool {
    let len = task.span.len;
    let step = if interruptible { COPY_STEP * slot.crew.members() } else { len };
    let mut done = 0;
    while done < len {
        if !slot.is_undisturbed() {
            return false;
        }
        let step = step.min(len - done);
        // SAFETY: both ranges lie inside the source and the target that the caller vouches for.
        unsafe {
            slot.crew.copy(backend, task.target.alias + done, task.source + done, step, false)
        };
        effort.copied += step as u64;
        done += step;
    }
    true
}
