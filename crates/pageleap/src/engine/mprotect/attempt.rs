//! One attempt to migrate one area: protect, copy, close, commit. The migrator's half of the protocol.
//!
//! The commit, and with it everything between [`Slot::close`] and [`Slot::retire`], is the window in which writers wait. Nothing in
//! it allocates, logs, calls back or touches the area: the allocator of the process may live there.

use std::time::Duration;

use crate::backend::{Backend, Call, Errno, Mapping, MemoryFile};
use crate::sync::AtomicU64;

use super::slot::{Close, Slot, Span};

/// Bytes copied between two looks at whether a writer has interrupted. 64 KB take about 10 us.
#[cfg(not(loom))]
const COPY_STEP: usize = 64 << 10;
#[cfg(loom)]
const COPY_STEP: usize = crate::units::BASE_PAGE;

/// The frames an area moves to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Where the destination pool's alias maps them.
    pub(crate) alias: usize,
    pub(crate) file: MemoryFile,
    pub(crate) offset: u64,
    /// Whether to commit by exchanging page tables (else by mapping the file).
    pub(crate) exchange: bool,
}

/// What to migrate in one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) span: Span,
    /// Where the current frames can be read: the span itself, or their pool's alias if the span may not be read.
    pub(crate) source: usize,
    pub(crate) target: Target,
    /// Where the page tables of the current frames go when those of the target come: their pool's alias.
    pub(crate) park: Option<usize>,
    /// Writers are held back from the start, so that the attempt cannot be disturbed.
    pub(crate) hold: bool,
}

/// How an attempt ended. In each case the span is accessible as the user set it, and the slot is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The span maps the target's frames.
    Migrated,
    /// A writer interrupted; the span maps its old frames.
    Dirty,
    /// A system call refused to help; the span maps its old frames.
    Refused(Call, Errno),
}

/// Whether the alias of the frames that an attempt has vacated received their page tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Parked {
    /// It was not touched.
    #[default]
    No,
    /// It has them, with the access and the attributes of the span.
    Yes,
    /// It may be a hole.
    Failed,
}

/// What an attempt did, besides its end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Effort {
    /// Bytes copied, worthless ones included.
    pub(crate) copied: u64,
    /// The exchange was refused without side effect and will be refused again: map from now on.
    pub(crate) exchange_unsupported: bool,
    /// Calls that had to be repeated until they succeeded, because giving up would have left the span inaccessible.
    pub(crate) repairs: u64,
    /// An exchange was tried, so that the alias of the target's frames may be empty, or have lost access.
    pub(crate) exchanged: bool,
    /// The exchange was what put the frames in place, so that the span has the attributes of the alias.
    pub(crate) by_exchange: bool,
    /// What became of the alias of the vacated frames.
    pub(crate) parked: Parked,
    /// Writers were held back for this attempt, by plan or because letting one in failed.
    pub(crate) held: bool,
    /// Nanoseconds from closing the area to opening it.
    pub(crate) window_ns: u64,
}

/// Runs one attempt.
///
/// # Safety
/// The span belongs to a region whose pages in it nobody else migrates, grows or discards meanwhile; the target's frames belong to
/// the job and nobody else accesses them; `backend` is valid during the call.
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
    // SAFETY: `backend` outlives this function, which retires the slot on every path.
    unsafe { slot.publish(epoch, &task.span, erase(backend)) };
    loop {
        let mut closed_at = crate::sync::monotonic_ns();
        if trackable {
            // SAFETY: the span is ours to migrate; whoever faults waits for the slot, which has been published.
            if let Err(errno) = unsafe { backend.protect(addr, len, prot.without_write()) } {
                // SAFETY: as above. The call may have had its effect, in whole or in part.
                unsafe { give_access_back(backend, &task.span, effort) };
                slot.retire();
                return Step::Refused(Call::Protect, errno);
            }
            if !hold {
                slot.track();
            }
        }
        // SAFETY: the source is readable and the target's frames are ours (see this function's contract).
        let complete = unsafe { copy(slot, backend, task, effort) };
        if trackable && !hold {
            closed_at = crate::sync::monotonic_ns();
            match slot.close() {
                Close::Closed => debug_assert!(complete),
                Close::Opened => {
                    slot.retire();
                    return Step::Dirty;
                }
                // The area may be writable although the writer was told that it is not: protect and copy again.
                Close::HandedOver => {
                    hold = true;
                    continue;
                }
            }
        }
        // SAFETY: the area is closed and the copy is complete.
        unsafe { commit(backend, task, effort) };
        effort.held = hold && trackable;
        effort.window_ns = crate::sync::monotonic_ns().saturating_sub(closed_at);
        slot.retire();
        return Step::Migrated;
    }
}

/// Forgets the lifetime of a backend for the slot, which is retired before it ends.
fn erase(backend: &dyn Backend) -> *const (dyn Backend + 'static) {
    // SAFETY: only the lifetime changes; `publish` demands of its caller what makes later use sound.
    unsafe { std::mem::transmute::<*const (dyn Backend + '_), *const (dyn Backend + 'static)>(backend) }
}

/// Copies the area in steps, until done or disturbed. Returns whether it was all copied.
///
/// # Safety
/// As [`attempt`].
unsafe fn copy(slot: &Slot, backend: &dyn Backend, task: &Task, effort: &mut Effort) -> bool {
    let len = task.span.len;
    let mut done = 0;
    while done < len {
        if !slot.is_undisturbed() {
            return false;
        }
        let step = COPY_STEP.min(len - done);
        // SAFETY: both ranges lie inside the source and the target that the caller vouches for.
        unsafe { backend.copy(task.target.alias + done, task.source + done, step) };
        effort.copied += step as u64;
        done += step;
    }
    true
}

/// Makes the span map the target's frames. Cannot give up: when the first call fails the span may be a hole, and threads wait for it.
///
/// # Safety
/// The area is closed, and the target's frames hold its contents.
unsafe fn commit(backend: &dyn Backend, task: &Task, effort: &mut Effort) {
    let Span { addr, len, prot } = task.span;
    let target = &task.target;
    if target.exchange {
        effort.exchanged = true;
        if let Some(park) = task.park {
            // What is mapped stays mapped, read-only, with empty page tables: readers fault on the old frames meanwhile, which have
            // the same contents. If this fails, the next call drops the old page tables instead.
            // SAFETY: the span is the job's and closed; the alias is that of its own frames.
            let moved = unsafe { backend.exchange(addr, park, len) };
            effort.parked = if moved.is_ok() { Parked::Yes } else { Parked::Failed };
        }
        // SAFETY: both ranges are the job's; whoever faults in the span waits for the slot. The alias gets the user's
        // protection first, because the page tables bring it along.
        let exchanged = unsafe {
            (if prot == crate::backend::Prot::READ_WRITE {
                Ok(())
            } else {
                backend.protect(target.alias, len, prot)
            })
            .and_then(|()| backend.exchange(target.alias, addr, len))
        };
        match exchanged {
            Ok(()) => {
                effort.by_exchange = true;
                return;
            }
            Err(Errno(libc::EINVAL)) => effort.exchange_unsupported = true,
            Err(_) => {}
        }
    }
    let mapping = Mapping { addr, len, file: target.file, offset: target.offset, prot, populate: true };
    // SAFETY: as above.
    persist(effort, || unsafe { backend.map(&mapping) });
}

/// Maps frames again over a span that maps them already, so that its many mappings become one, and sets the attributes again.
///
/// # Safety
/// The span belongs to a region, nobody migrates, grows or discards it meanwhile, and it maps exactly what `mapping` says.
#[cfg(not(loom))]
pub(crate) unsafe fn map_again(
    slot: &Slot,
    epoch: &AtomicU64,
    backend: &dyn Backend,
    span: &Span,
    mapping: &Mapping,
    restore: impl FnOnce(),
) -> u64 {
    let mut effort = Effort::default();
    // SAFETY: `backend` outlives this function, which retires the slot.
    unsafe { slot.publish(epoch, span, erase(backend)) };
    // SAFETY: forwarded to the caller; whoever faults waits for the slot.
    persist(&mut effort, || unsafe { backend.map(mapping) });
    restore();
    slot.retire();
    effort.repairs
}

/// Gives the span the user's access again after a failed protection change.
///
/// # Safety
/// The span is the job's, closed, and maps its old frames.
pub(crate) unsafe fn give_access_back(backend: &dyn Backend, span: &Span, effort: &mut Effort) {
    // SAFETY: forwarded to the caller. Joining mappings that were split needs no new one, so this succeeds where splitting failed.
    persist(effort, || unsafe { backend.protect(span.addr, span.len, span.prot) });
}

/// Repeats a call until it succeeds, less and less often. What makes these calls fail is a shortage (of mappings, address space or
/// kernel memory) that other threads cause and end; giving up instead would leave threads waiting, or with a hole.
pub(crate) fn persist(effort: &mut Effort, mut call: impl FnMut() -> Result<(), Errno>) {
    /// The longest pause between two tries.
    const LONGEST: Duration = Duration::from_millis(10);
    let mut pause = Duration::from_micros(1);
    while call().is_err() {
        effort.repairs += 1;
        #[cfg(not(loom))]
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
    }
}
