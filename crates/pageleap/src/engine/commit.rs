//! What attempts of all engines have in common: how they end, how new frames come into place, and
//! calls that must not be given up.
//!
//! Nothing here allocates, logs, calls back or touches the span: the allocator of the process may
//! live there.

use std::time::Duration;

#[cfg(not(loom))]
use super::Tools;
use super::Work;
use super::slot::Span;
use crate::backend::{Backend, Call, Errno, Mapping, Prot};
use crate::sync::thread;

/// How an attempt ended. In each case the span is accessible as the user set it, and the slot is
/// idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The span maps the new frames.
    Migrated,
    /// A writer interrupted; the span maps its old frames.
    Dirty,
    /// A system call refused to help; the span maps its old frames.
    Refused(Call, Errno),
}

/// Whether the alias of the old frames received the page tables of the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Parked {
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
    /// Calls that had to be repeated until they succeeded, because giving up would have left the
    /// span inaccessible.
    pub(crate) repairs: u64,
    /// An exchange was tried, so that the alias of the new frames may be empty, or have lost
    /// access.
    pub(crate) exchanged: bool,
    /// The exchange put the frames in place, so that the span has the attributes of the alias.
    pub(crate) by_exchange: bool,
    /// What became of the alias of the old frames.
    pub(super) parked: Parked,
    /// The span may have lost its lock (`mlock`), which has to be set again.
    pub(crate) unlocked: bool,
    /// Writers were held back for this attempt: by plan, because letting one in failed, or because
    /// they wrote faster than the copies.
    pub(crate) held: bool,
    /// Nanoseconds from closing the area to opening it, if it was closed.
    pub(crate) window_ns: u64,
    /// Whether this thread ran before others meanwhile.
    pub(crate) hurried: bool,
    /// Base pages that were found written after the whole area had been copied for the first time.
    pub(crate) written: u64,
    /// Base pages that were copied while everybody waited.
    pub(crate) left: u64,
    /// Calls made, by the number of their kind. The counters lie on the worker's stack, because the
    /// heap may lie in the area.
    pub(crate) calls: [u32; Call::ALL.len()],
}

impl Effort {
    pub(super) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
    }
}

/// Gives a span the user's access again. `first`: why the call failed that was to take it away, or
/// `None` if one has succeeded.
///
/// # Safety
/// The span is the job's, closed, and maps its old frames.
pub(super) unsafe fn give_access_back(
    backend: &dyn Backend,
    span: &Span,
    first: Option<Errno>,
    effort: &mut Effort,
) {
    effort.count(Call::Protect);
    // SAFETY: forwarded to the caller. Joining mappings that were split needs no new one, so this
    // succeeds where splitting failed.
    persist(effort, |refusals| match unsafe { backend.protect(span.addr, span.len, span.prot) } {
        Ok(()) => Some(()),
        // Protection changes are forbidden here as such (sealed memory, a security module): so the
        // first one had no effect either.
        Err(errno)
            if first == Some(errno)
                && matches!(errno.0, libc::EPERM | libc::EACCES)
                && refusals > 0 =>
        {
            Some(())
        }
        Err(_) => None,
    });
}

/// Makes a span that is closed by protection map the new frames. With `park` its page tables go to
/// the alias of the old frames, if page tables may be exchanged. Gives up where [`arrive`] does.
///
/// # Safety
/// As [`arrive`].
pub(super) unsafe fn change_places(
    backend: &dyn Backend,
    work: &Work,
    park: bool,
    effort: &mut Effort,
) -> Result<(), Errno> {
    if park && work.may_exchange {
        // What is mapped stays mapped, read-only, with empty page tables: readers fault on the old
        // frames meanwhile, which have the same contents. If this fails, the next call drops the
        // old page tables instead.
        effort.count(Call::Exchange);
        // SAFETY: forwarded to the caller; the alias is that of the frames which the span maps.
        let moved = unsafe { backend.exchange(work.span.addr, work.old.alias, work.span.len) };
        effort.parked = if moved.is_ok() { Parked::Yes } else { Parked::Failed };
    }
    // SAFETY: forwarded to the caller.
    unsafe { arrive(backend, work, effort) }
}

/// Forgets the lifetime of a backend for the slot, which is retired before it ends.
pub(super) fn erase(backend: &dyn Backend) -> *const (dyn Backend + 'static) {
    // SAFETY: only the lifetime changes; `publish` demands of its caller what makes later use
    // sound.
    unsafe {
        std::mem::transmute::<*const (dyn Backend + '_), *const (dyn Backend + 'static)>(backend)
    }
}

/// Makes a closed span map the new frames: by the page tables of their alias if these may be
/// exchanged, else by mapping their file. Gives up only where the kernel forbids the change as
/// such, and so has not begun it. Otherwise the span may be a hole for which threads wait, and the
/// call is repeated until it succeeds.
///
/// # Safety
/// As [`attempt`](super::attempt). The area is closed, and the new frames hold its contents.
pub(super) unsafe fn arrive(
    backend: &dyn Backend,
    work: &Work,
    effort: &mut Effort,
) -> Result<(), Errno> {
    let Span { addr, len, prot } = work.span;
    if work.may_exchange {
        effort.exchanged = true;
        // SAFETY: both ranges are the job's; threads that fault in the span wait for the slot. The
        // alias gets the user's protection first, because the page tables bring it along.
        let exchanged = unsafe {
            let same = prot == Prot::READ_WRITE;
            effort.calls[Call::Protect as usize] += u32::from(!same);
            effort.count(Call::Exchange);
            (if same { Ok(()) } else { backend.protect(work.new.alias, len, prot) })
                .and_then(|()| backend.exchange(work.new.alias, addr, len))
        };
        match exchanged {
            Ok(()) => {
                effort.by_exchange = true;
                return Ok(());
            }
            Err(Errno(libc::EINVAL)) => effort.exchange_unsupported = true,
            Err(_) => {}
        }
    }
    let mapping =
        Mapping { addr, len, file: work.new.file, offset: work.new.offset, prot, populate: true };
    effort.count(Call::Map);
    // SAFETY: as above. After a failure the range may be a hole, which another thread may have
    // filled.
    let map =
        |torn| unsafe { if torn { backend.map_own(&mapping) } else { backend.map(&mapping) } };
    persist(effort, |refusals| match map(work.may_exchange || refusals > 0) {
        Ok(()) => Some(Ok(())),
        // Sealed memory, a security module, a seccomp filter, a full RLIMIT_MEMLOCK under mlockall:
        // the kernel looks at these before it changes anything. What is mapped then is what was
        // mapped before.
        Err(errno @ Errno(libc::EPERM | libc::EACCES | libc::EAGAIN))
            if refusals > 0 && backend.is_mapped(addr, len) =>
        {
            Some(Err(errno))
        }
        Err(Errno(libc::EEXIST)) if refusals > FOREIGN_LOOKS => end_process(),
        Err(_) => None,
    })
}

/// Maps frames again over a span that maps them already, so that its many mappings become one.
/// `restore` sets its attributes again.
///
/// # Safety
/// The span belongs to a region, nobody migrates, grows or discards it meanwhile, and it maps
/// exactly what `mapping` says.
#[cfg(not(loom))]
pub(crate) unsafe fn map_again<T>(
    tools: &Tools<'_>,
    span: &Span,
    mapping: &Mapping,
    effort: &mut Effort,
    restore: impl FnOnce() -> T,
) -> (Result<(), Errno>, T) {
    let Tools { slot, epoch, backend } = *tools;
    // SAFETY: `backend` outlives this function, which retires the slot.
    unsafe { slot.publish(epoch, span, erase(backend)) };
    effort.count(Call::Map);
    let joined = persist(effort, |refusals| {
        // SAFETY: forwarded to the caller; threads that fault wait for the slot.
        match unsafe { if refusals == 0 { backend.map(mapping) } else { backend.map_own(mapping) } }
        {
            Err(Errno(libc::EEXIST)) if refusals > FOREIGN_LOOKS => end_process(),
            // Another owner's mapping for now, or the question whose it is has failed.
            Err(Errno(libc::EEXIST | libc::EMFILE | libc::ENFILE)) => None,
            // The same frames are mapped either way: only a hole must be filled.
            Err(errno) if backend.is_mapped(span.addr, span.len) => Some(Err(errno)),
            Err(_) => None,
            Ok(()) => Some(Ok(())),
        }
    });
    let restored = restore();
    slot.retire();
    (joined, restored)
}

/// How often memory of another owner may be found in a hole of a region, in about a second. A
/// thread that makes a pool or a region may have been given the addresses, and gives them back.
const FOREIGN_LOOKS: u64 = 100;

/// Ends the process: another thread has mapped memory where a call had left a hole in a region, and
/// both would write to the same addresses.
fn end_process() -> ! {
    let words = b"pageleap: another thread has mapped memory into a region while a system call had failed there; ending the process\n";
    // SAFETY: plain system calls on a constant.
    unsafe {
        libc::write(2, words.as_ptr().cast(), words.len());
        libc::abort()
    }
}

/// Repeats a call until it says how it ended, after pauses that grow. `call` is told how often it
/// has been refused. These calls fail for a shortage (of mappings, address space or kernel memory)
/// that other threads cause and end. Giving up would leave threads waiting, or a hole.
pub(super) fn persist<T>(effort: &mut Effort, mut call: impl FnMut(u64) -> Option<T>) -> T {
    /// The longest pause between two tries.
    const LONGEST: Duration = Duration::from_millis(10);
    let mut pause = Duration::from_micros(1);
    let mut refusals = 0;
    loop {
        if let Some(end) = call(refusals) {
            return end;
        }
        refusals += 1;
        effort.repairs += 1;
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
    }
}
