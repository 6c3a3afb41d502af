//! Shared by all engines: how an attempt ends, how the span comes to map the new frames, and calls
//! that are repeated until they succeed.
//!
//! Nothing here allocates, logs, calls back or touches the span, because the process's allocator
//! may live there.

use std::time::Duration;

#[cfg(not(loom))]
use super::Tools;
#[cfg(not(loom))]
use super::effort::Counters;
use super::effort::{Effort, NewAlias, Parked};
use super::slot::Span;
use super::{Frames, Work};
#[cfg(not(loom))]
use crate::backend::Haste;
use crate::backend::{Advice, Backend, Call, Errno, Mapping, MemoryFile, Prot, Tracker};
use crate::sync::thread;
use crate::units::BASE_PAGE;

/// How an attempt ended. In each case the span has the access that the user set, and the slot is
/// idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptResult {
    /// The span maps the new frames.
    Migrated,
    /// A writer dirtied the area during the copy; the span maps its old frames.
    Dirty,
    /// A system call failed; the span maps its old frames.
    Refused(Call, Errno),
}

/// The error of `mremap` (EFAULT) if the range is several mappings or has no mapping. The kernel
/// has not changed its page tables.
pub(crate) const SPLIT: Errno = Errno(libc::EFAULT);

/// Gives a span the user's access again. `first` is the error of the `mprotect` that was to take
/// access away, or `None` if that call succeeded.
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
    // SAFETY: forwarded to the caller. This call joins mappings that were split, for which the
    // kernel needs no new mapping, so it succeeds where splitting failed. The exception: the kernel
    // has joined the span with that of another worker, which is closed, too.
    persist(effort, |refusals| match unsafe { backend.protect(span.addr, span.len, span.prot) } {
        Ok(()) => Some(()),
        // The kernel forbids any protection change here (sealed memory, a security module), so the
        // first change had no effect either.
        Err(errno)
            if first == Some(errno)
                && matches!(errno.0, libc::EPERM | libc::EACCES)
                && refusals > 0 =>
        {
            Some(())
        }
        // The program has unmapped part of the span, against the contract. The rest gets its access
        // page by page.
        Err(Errno(libc::ENOMEM)) if refusals > 0 && !backend.is_mapped(span.addr, span.len) => {
            for addr in (span.addr..span.addr + span.len).step_by(BASE_PAGE) {
                // SAFETY: forwarded to the caller.
                let _ = unsafe { backend.protect(addr, BASE_PAGE, span.prot) };
            }
            Some(())
        }
        Err(_) => None,
    });
}

/// Makes a span that is closed by `mprotect` map the new frames. With `park`, the span's page
/// tables first move to the alias of the old frames, if page tables may be exchanged. It gives up
/// where [`arrive`] does, and also if the span is no longer one mapping: part of it then has
/// attributes that the new mapping would lack.
///
/// # Safety
/// As [`arrive`].
pub(super) unsafe fn change_places(
    backend: &dyn Backend,
    work: &Work,
    park: bool,
    effort: &mut Effort,
) -> Result<(), (Call, Errno)> {
    if park && work.may_exchange {
        // `mremap(DONTUNMAP)` leaves the span mapped, read-only, with empty page tables. Readers
        // meanwhile fault in the old frames, which have the same contents. If this call fails, the
        // next call drops the old page tables instead.
        effort.count(Call::Exchange);
        // SAFETY: forwarded to the caller; the alias is that of the frames which the span maps.
        let moved = unsafe { backend.exchange(work.span.addr, work.old.alias, work.span.len) };
        effort.after.parked = if moved.is_ok() { Parked::Yes } else { Parked::Failed };
        if moved == Err(SPLIT) {
            return Err((Call::Exchange, SPLIT));
        }
    }
    // SAFETY: forwarded to the caller.
    unsafe { arrive(backend, &work.arrival(), effort) }.map_err(|errno| (Call::Map, errno))
}

/// The frames that a span maps, and those that it is to map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) span: Span,
    pub(super) old: Frames,
    pub(super) new: Frames,
    /// As in [`Work`].
    pub(super) may_exchange: bool,
    /// Whether the alias of the new frames has the span's access already.
    pub(super) has_access: bool,
}

/// Erases the lifetime of a backend, for a slot that is retired before that lifetime ends.
pub(super) fn erase(backend: &dyn Backend) -> *const (dyn Backend + 'static) {
    // SAFETY: only the lifetime changes. The contract of `publish` makes later use sound.
    unsafe {
        std::mem::transmute::<*const (dyn Backend + '_), *const (dyn Backend + 'static)>(backend)
    }
}

/// Makes a closed span map the new frames: by moving the page tables of their alias (`mremap`) if
/// page tables may be exchanged, else by mapping their file. It gives up only while the span has
/// its previous mapping. After any other failure the span may be a hole for which threads wait, so
/// the call is repeated until it succeeds.
///
/// # Safety
/// As [`attempt`](super::attempt). The area is closed, and the new frames hold its contents.
pub(super) unsafe fn arrive(
    backend: &dyn Backend,
    arrival: &Arrival,
    effort: &mut Effort,
) -> Result<(), Errno> {
    let Arrival { span, old, new, may_exchange, has_access } = *arrival;
    let Span { addr, len, prot } = span;
    if may_exchange {
        effort.after.new_alias = NewAlias::Refused;
        // SAFETY: both ranges are the job's; threads that fault in the span wait for the slot. The
        // alias gets the user's protection first, because page tables keep their protection when
        // they move.
        let exchanged = unsafe {
            let same = has_access || prot == Prot::READ_WRITE;
            effort.counters.calls[Call::Protect as usize] += u32::from(!same);
            effort.count(Call::Exchange);
            (if same { Ok(()) } else { backend.protect(new.alias, len, prot) })
                .and_then(|()| backend.exchange(new.alias, addr, len))
        };
        match exchanged {
            Ok(()) => {
                effort.after.new_alias = NewAlias::Exchanged;
                return Ok(());
            }
            Err(Errno(libc::EINVAL)) => effort.after.exchange_unsupported = true,
            Err(_) => {}
        }
    }
    let mapping = Mapping { addr, len, file: new.file, offset: new.offset, prot, populate: true };
    effort.count(Call::Map);
    // SAFETY: as above. After a failure the range may be a hole that another thread has filled, so
    // repeated calls are `map_own`, which checks the owner.
    let map =
        |torn| unsafe { if torn { backend.map_own(&mapping) } else { backend.map(&mapping) } };
    let arrived = persist(effort, |refusals| match map(may_exchange || refusals > 0) {
        Ok(()) => Some(Ok(Source::File)),
        Err(errno @ Errno(libc::EEXIST)) if refusals > FOREIGN_LOOKS => end_process(errno),
        // Another owner's mapping lies there for now, or the check of its owner failed.
        Err(Errno(libc::EEXIST | libc::EMFILE | libc::ENFILE)) => None,
        // The kernel forbids the mapping, or lacks a resource that others may keep for good (the
        // number of mappings). While the span maps its old frames, threads go on there, so the
        // attempt may give up; only a hole must be filled. The kernel checks sealed memory, a
        // security module, a seccomp filter and a full RLIMIT_MEMLOCK under mlockall before it
        // changes anything.
        Err(errno)
            if refusals > 0
                && still_maps(backend, &span, (old.file, old.offset), || {
                    matches!(errno.0, libc::EPERM | libc::EACCES | libc::EAGAIN)
                }) =>
        {
            Some(Err(errno))
        }
        Err(errno) if refusals > 0 && !backend.has_file(mapping.file) => {
            // SAFETY: as above; nobody uses the alias of the new frames but this attempt.
            unsafe { without_file(backend, &mapping, new.alias, refusals, errno) }
        }
        Err(_) => None,
    });
    if arrived == Ok(Source::Alias) {
        effort.after.new_alias = NewAlias::Moved;
    }
    arrived.map(drop)
}

/// Whether a span still maps `file` from `offset` on, after a call that was to replace its mapping
/// has failed. If `/proc` can never be opened (`chroot`, Landlock), this cannot be seen; then the
/// answer is `unless_told()`, provided that every page of the span is mapped.
pub(super) fn still_maps(
    backend: &dyn Backend,
    span: &Span,
    (file, offset): (MemoryFile, u64),
    unless_told: impl FnOnce() -> bool,
) -> bool {
    match backend.maps(span.addr, span.len, file, offset) {
        Ok(same) => same,
        // The next try may succeed, because other threads close descriptors.
        Err(Errno(libc::EMFILE | libc::ENFILE)) => false,
        Err(_) => unless_told() && backend.is_mapped(span.addr, span.len),
    }
}

/// The origin of a span's new mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The file was mapped.
    File,
    /// The mapping of the alias was moved to the span, so the alias is a hole now.
    Alias,
}

/// Decides how to go on when `mmap` needs a file whose descriptor other code has closed. Returns
/// `None` if the call has to be repeated.
///
/// If the number is unused, or a pipe or a directory now, the kernel fails before it changes
/// anything, so the span keeps its mapping. If the number is a socket now, the kernel fails only
/// after it has unmapped the span. Then the mapping of `alias`, which maps the same frames, is
/// moved into the hole: that takes no descriptor.
///
/// # Safety
/// As [`arrive`]. Nobody uses `alias`.
unsafe fn without_file(
    backend: &dyn Backend,
    mapping: &Mapping,
    alias: usize,
    refusals: u64,
    why: Errno,
) -> Option<Result<Source, Errno>> {
    let Mapping { addr, len, prot, .. } = *mapping;
    if backend.is_mapped(addr, len) {
        return Some(Err(why));
    }
    // The alias gets the attributes of a new mapping. If one of these calls fails, an attribute
    // differs from the user's, but the contents are whole.
    // SAFETY: forwarded to the caller.
    let moved = unsafe {
        for advice in [Advice::DoFork, Advice::DoDump, Advice::Normal] {
            let _ = backend.advise(alias, len, advice);
        }
        backend.protect(alias, len, prot).and_then(|()| backend.move_mapping(alias, addr, len))
    };
    match moved {
        Ok(()) => Some(Ok(Source::Alias)),
        Err(Errno(libc::ENOMEM)) => None,
        Err(errno) if refusals > FOREIGN_LOOKS => end_process(errno),
        Err(_) => None,
    }
}

/// Maps frames again over a span that already maps them, so that the span's many mappings become
/// one. `restore` sets the span's attributes again. Threads that touch the span meanwhile wait for
/// this thread, whose priority is raised as `haste` says. `alias` maps the same frames.
///
/// # Safety
/// The span belongs to a region and maps exactly what `mapping` says. Nobody migrates, grows or
/// discards it meanwhile, or uses the alias of its frames.
#[cfg(not(loom))]
pub(crate) unsafe fn map_again<T>(
    tools: &Tools<'_>,
    span: &Span,
    (mapping, alias): (&Mapping, usize),
    haste: Option<Haste>,
    counters: &mut Counters,
    restore: impl FnOnce() -> T,
) -> (Result<Source, Errno>, T) {
    let Tools { slot, epoch, backend } = *tools;
    if !backend.has_file(mapping.file) {
        // The span stays as it is.
        return (Err(Errno(libc::EBADF)), restore());
    }
    let effort = &mut Effort::counting_on(*counters);
    effort.hurry(backend, haste);
    // SAFETY: `backend` outlives this function, which retires the slot.
    unsafe { slot.publish(epoch, span, erase(backend)) };
    effort.count(Call::Map);
    let joined = persist(effort, |refusals| {
        // SAFETY: forwarded to the caller; threads that fault wait for the slot.
        match unsafe { if refusals == 0 { backend.map(mapping) } else { backend.map_own(mapping) } }
        {
            Ok(()) => Some(Ok(Source::File)),
            Err(errno @ Errno(libc::EEXIST)) if refusals > FOREIGN_LOOKS => end_process(errno),
            // Another owner's mapping lies there for now, or the check of its owner failed.
            Err(Errno(libc::EEXIST | libc::EMFILE | libc::ENFILE)) => None,
            // The span maps the same frames before and after, so only a hole must be filled. The
            // first refused call may have left one; the second call, `map_own`, checks whether
            // somebody has filled it.
            Err(errno)
                if refusals > 0
                    && still_maps(backend, span, (mapping.file, mapping.offset), || true) =>
            {
                Some(Err(errno))
            }
            Err(errno) if refusals > 0 && !backend.has_file(mapping.file) => {
                // SAFETY: forwarded to the caller.
                unsafe { without_file(backend, mapping, alias, refusals, errno) }
            }
            Err(_) => None,
        }
    });
    let restored = restore();
    slot.retire();
    effort.slow_down(backend);
    *counters = effort.counters;
    (joined, restored)
}

/// How often another owner's mapping may be found in a hole of a region before the process is
/// ended: 100 times, which takes about a second. The kernel may have given the addresses to a
/// thread that is making a pool or a region, and that thread unmaps them again.
const FOREIGN_LOOKS: u64 = 100;

/// Whether the calls have been refused for long enough to conclude that another owner's mapping
/// stays in a hole, or that
/// the kernel forbids the call.
pub(super) fn is_foreign_for_long(refusals: u64) -> bool {
    refusals > FOREIGN_LOOKS
}

/// Ends the process, because a failed call has left a hole in a region that cannot be filled. With
/// EEXIST another thread has mapped memory there, and both would write to the same addresses. With
/// EPERM or EACCES the kernel forbids the mapping of a view, after the region has got other frames.
/// Otherwise the file's descriptor has been closed, and the kernel refuses to move the alias's
/// mapping, or a view needs the file.
pub(super) fn end_process(errno: Errno) -> ! {
    let words: &[u8] = match errno {
        Errno(libc::EEXIST) => b"pageleap: another thread has mapped memory into a region while a system call had failed there; ending the process\n",
        Errno(libc::EPERM | libc::EACCES) => b"pageleap: the kernel forbids to map a view of a region whose pages have moved; ending the process\n",
        _ => b"pageleap: other code has closed a descriptor of pageleap's while a system call had failed in a region; ending the process\n",
    };
    // SAFETY: plain system calls on a constant.
    unsafe {
        libc::write(2, words.as_ptr().cast(), words.len());
        libc::abort()
    }
}

/// Repeats a call, with pauses that double from 1 µs to 10 ms, until `call` returns a result.
/// `call` gets the number of refusals so far. These calls fail for a shortage (of mappings, address
/// space or kernel memory) that other threads cause and end. Giving up would leave threads waiting,
/// or a hole.
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
        effort.counters.counts.repairs += 1;
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
    }
}

/// Ends the registration of a range that keeps its frames, and wakes all threads that wait for it.
pub(super) fn let_go(
    backend: &dyn Backend,
    tracker: Tracker,
    (addr, len): (usize, usize),
    effort: &mut Effort,
) {
    effort.count(Call::Untrack);
    // SAFETY: the range is the job's, and ending a registration changes no mapping's contents.
    persist(effort, |refusals| match unsafe { backend.untrack(tracker, addr, len) } {
        Ok(()) => Some(()),
        // EINVAL is no shortage, so it will not go away: nothing is registered.
        Err(Errno(libc::EINVAL)) if refusals > 8 => Some(()),
        // Other code has closed the userfaultfd, which ended its registrations.
        Err(_) if !tracker.has_faults() => Some(()),
        Err(_) => None,
    });
    wake(backend, tracker, (addr, len), effort);
}

/// Wakes all threads that wait for a range.
pub(super) fn wake(
    backend: &dyn Backend,
    tracker: Tracker,
    (addr, len): (usize, usize),
    effort: &mut Effort,
) {
    effort.count(Call::Wake);
    // Closing the userfaultfd has woken all threads.
    persist(effort, |_| {
        let woken = backend.wake(tracker, addr, len);
        (woken.is_ok() || !tracker.has_faults()).then_some(())
    });
}
