//! The engine `mprotect`: the method of page_leap (Schuhknecht and Rassau, "Taking the Leap",
//! sections 4.1 and 4.2), made correct: protect, copy, close, commit.
//!
//! The area is made read-only by `mprotect` and copied. A thread that writes to it meanwhile gets
//! SIGSEGV. Its handler makes the area writable again and sets the slot's phase to Open, so the
//! migrator throws the copy away, and the job retries the area in smaller parts. If no thread
//! wrote, the new frames are mapped. `docs/protocol.md`, sections 2 and 3.1, has the states and the
//! argument.
//!
//! The engine promises: user-mode reads never wait for a copy. User-mode writes are never lost and
//! always proceed, at the latest when the area has been moved. Every page is migrated, because
//! after a bounded number of disturbed copies the writers of an area wait until it is done. It
//! cannot serve a system call that writes into the area for its caller (`read(2)`): such a call
//! fails with EFAULT while the area is read-only, and raises no signal.
//!
//! The window in which writers wait is everything between [`Slot::close`] and [`Slot::retire`].

use super::commit::{AttemptResult, change_places, erase, give_access_back};
use super::effort::Effort;
use super::slot::{Close, Slot, Span};
use super::{Tools, Work};
use crate::backend::{Backend, Call};
use crate::sync::monotonic_ns;
use crate::units::BASE_PAGE;

/// Bytes that each thread copies between two checks for a writer. 64 KB take about 10 us.
#[cfg(not(any(loom, shuttle)))]
const COPY_STEP: usize = 64 << 10;
#[cfg(any(loom, shuttle))]
const COPY_STEP: usize = crate::units::BASE_PAGE;

/// Runs one attempt.
///
/// # Safety
/// As [`attempt`](super::attempt).
pub(super) unsafe fn attempt(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    // SAFETY: forwarded to the caller.
    let step = unsafe { move_area(tools, work, effort) };
    effort.slow_down(tools.backend);
    step
}

/// Runs the attempt; may return with the thread's priority raised. It is raised if the area is
/// held, or if the thread has just copied at a low priority. Other windows are so short that
/// raising it would cost more than it saves.
///
/// # Safety
/// As [`attempt`].
unsafe fn move_area(tools: &Tools<'_>, work: &Work, effort: &mut Effort) -> AttemptResult {
    let Tools { slot, epoch, backend } = *tools;
    let Span { addr, len, prot } = work.span;
    // A span that the user may not write cannot be disturbed: nothing to track, nothing to protect.
    let trackable = prot.writable();
    let mut hold = work.hold;
    // Whether a call of ours has made the span read-only.
    let mut protected = false;
    slot.waits.take_waiters();
    // SAFETY: `backend` outlives this function, which retires the slot on every path.
    unsafe { slot.publish(epoch, &work.span, erase(backend)) };
    loop {
        if trackable && hold {
            effort.hurry(backend, work.haste);
        }
        let mut closed_at = monotonic_ns();
        if trackable {
            effort.count(Call::Protect);
            // SAFETY: the span is ours to migrate; threads that fault wait for the slot, which has
            // been published.
            if let Err(errno) = unsafe { backend.protect(addr, len, prot.without_write()) } {
                // SAFETY: as above. The call may have had its effect, in whole or in part.
                unsafe {
                    give_access_back(backend, &work.span, (!protected).then_some(errno), effort)
                };
                slot.retire();
                return AttemptResult::Refused(Call::Protect, errno);
            }
            protected = true;
            if !hold {
                slot.track();
            }
        }
        let from = monotonic_ns();
        // SAFETY: the source is readable and the new frames are ours (see this function's
        // contract).
        let complete = unsafe { copy(slot, backend, work, trackable && !hold, effort) };
        let copy_ns = monotonic_ns().saturating_sub(from);
        if work.starter_is_low() {
            effort.hurry(backend, work.haste);
        }
        if trackable && !hold {
            closed_at = monotonic_ns();
            match slot.close() {
                Close::Closed => debug_assert!(complete),
                Close::Opened => {
                    slot.retire();
                    return AttemptResult::Dirty;
                }
                // The area may be writable, although the call that should have made it so reported
                // a failure: protect and copy again.
                Close::HandedOver => {
                    hold = true;
                    continue;
                }
            }
        }
        if !trackable {
            // Read-only areas are closed only now.
            closed_at = monotonic_ns();
        }
        // SAFETY: the area is closed and the copy is complete.
        let changed = unsafe { change_places(backend, work, !work.locked, effort) };
        if let Err((call, errno)) = changed {
            if trackable {
                // SAFETY: the area is closed and maps its old frames.
                unsafe { give_access_back(backend, &work.span, None, effort) };
            }
            slot.retire();
            return AttemptResult::Refused(call, errno);
        }
        effort.counters.held = hold && trackable;
        if hold {
            effort.counters.left = (len / BASE_PAGE) as u64;
            effort.counters.copy_ns = copy_ns;
        }
        effort.counters.waiters = slot.waits.take_waiters();
        effort.counters.window_ns = monotonic_ns().saturating_sub(closed_at).max(1);
        slot.retire();
        return AttemptResult::Migrated;
    }
}

/// Copies the area; if writers may interrupt, in steps of [`COPY_STEP`] for each thread, until a
/// writer interrupts. Returns whether all of it was copied.
///
/// # Safety
/// As [`attempt`].
unsafe fn copy(
    slot: &Slot,
    backend: &dyn Backend,
    work: &Work,
    interruptible: bool,
    effort: &mut Effort,
) -> bool {
    let Span { addr, len, prot } = work.span;
    let source = if prot.readable() { addr } else { work.old.alias };
    let step = if interruptible { COPY_STEP * slot.crew.members() } else { len };
    let mut done = 0;
    while done < len {
        if !slot.is_undisturbed() {
            return false;
        }
        let step = step.min(len - done);
        // SAFETY: both ranges lie inside the source and the new frames that the caller vouches for.
        let copy =
            || unsafe { slot.crew.copy(backend, work.piece(source, done..done + step), false) };
        if interruptible {
            work.copy_beside(backend, copy)
        } else {
            copy()
        }
        effort.counters.copied += step as u64;
        done += step;
    }
    true
}
