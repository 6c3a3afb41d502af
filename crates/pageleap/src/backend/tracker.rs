//! Following writes by the kernel: a userfaultfd with asynchronous write-protection, and the
//! pagemap of the process.
//!
//! Nothing here decides anything. A tracker is three numbers, because between the freeze and the
//! commit no code may touch the heap.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use pageleap_sys::{
    self as sys, Errno, EventFd, PageQuery, PageRegion, page_is, scan_flag, uffd_mode,
};

use super::uffd::{BARRIER, EXCHANGE, HOLD, HOLD_AGAINST_COLLAPSE, privileged, shake_hands};
use super::{Ability, Call, Tracker};

/// Opens the descriptors: by the system call, or else through the device.
pub(super) fn open(ability: Ability) -> Result<Tracker, (Call, Errno)> {
    let refused = |errno| (Call::OpenTracker, errno);
    let follows = [uffd_mode::WP, uffd_mode::WP | uffd_mode::MINOR];
    let (faults, modes) = match ability {
        Ability::NoteAndHold => (privileged(EXCHANGE), follows),
        // A tracker that holds up no thread can do without faults of the kernel.
        Ability::Note => (sys::userfaultfd(true).and_then(|fd| shake_hands(fd, EXCHANGE)), follows),
        Ability::HoldWriters => (privileged(BARRIER), follows),
        Ability::Hold => {
            // MISSING for pages that the file lacks: a thread that touches one waits. Otherwise the
            // kernel would give it a new page, which nobody copies.
            let (least, whole) = (uffd_mode::MINOR | uffd_mode::MISSING, HOLD_AGAINST_COLLAPSE);
            match privileged(whole) {
                Err(Errno(libc::EINVAL)) => (privileged(HOLD), [least; 2]),
                faults => (faults, [least | uffd_mode::WP; 2]),
            }
        }
    };
    let faults = faults.map_err(refused)?;
    if ability == Ability::Hold {
        return Ok(Tracker { faults: faults.into_raw_fd(), pagemap: -1, end: -1, modes });
    }
    let end = EventFd::new().map_err(|errno| (Call::OpenTracker, errno))?;
    if ability == Ability::HoldWriters {
        let [faults, end] = [faults, end.into()].map(OwnedFd::into_raw_fd);
        return Ok(Tracker { faults, pagemap: -1, end, modes });
    }
    let pagemap = File::open("/proc/self/pagemap").map_err(|e| (Call::Scan, errno_of(&e)))?;
    // An empty range only asks whether the kernel knows the request.
    // SAFETY: nothing is protected.
    unsafe { sys::pagemap_scan(pagemap.as_fd(), 0..0, 0, &NOT_CLEAN, &mut []) }
        .map_err(|errno| (Call::Scan, errno))?;
    let [faults, pagemap, end] = [faults, pagemap.into(), end.into()].map(OwnedFd::into_raw_fd);
    Ok(Tracker { faults, pagemap, end, modes })
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

/// # Safety
/// Called once, and the tracker is not used any more.
pub(super) unsafe fn close(tracker: Tracker) {
    for fd in [tracker.faults, tracker.pagemap, tracker.end].into_iter().filter(|fd| *fd >= 0) {
        // SAFETY: `open` made it, and nobody else closes it.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

fn borrow<'a>(fd: i32) -> BorrowedFd<'a> {
    // SAFETY: a tracker's descriptors are open until it is closed, after its last use.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// The userfaultfd.
pub(super) fn faults<'a>(tracker: Tracker) -> BorrowedFd<'a> {
    borrow(tracker.faults)
}

/// Reads messages until [`end`] is called. An exchange of registered memory waits until its message
/// has been read. Threads that wait for pages need nothing from here; those that wait to write can
/// be let in by `write`.
pub(super) fn serve(tracker: Tracker, write: &mut dyn FnMut(usize)) {
    // Other threads may sleep until this one has run.
    if sys::is_ordinary() {
        let _ = sys::run_first(true).or_else(|_| sys::run_shortly());
    }
    let waiting = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut descriptors = [waiting(tracker.faults), waiting(tracker.end)];
    loop {
        // SAFETY: the array outlives the call. Messages are read also after an interrupted call.
        unsafe { libc::poll(descriptors.as_mut_ptr(), descriptors.len() as libc::nfds_t, -1) };
        sys::uffd_drain(faults(tracker), write);
        if descriptors[1].revents != 0 {
            return;
        }
    }
}

/// Ends [`serve`].
pub(super) fn end(tracker: Tracker) {
    sys::signal_event(borrow(tracker.end));
}

/// # Safety
/// The range is the caller's.
pub(super) unsafe fn mark_clean(
    tracker: Tracker,
    addr: usize,
    len: usize,
    split: bool,
) -> Result<(), Errno> {
    if split || tracker.pagemap < 0 {
        loop {
            // SAFETY: forwarded to the caller.
            match unsafe { sys::uffd_write_protect(faults(tracker), addr, len) } {
                // Another worker's exchange waits until `serve` has read its message.
                Err(Errno(libc::EAGAIN)) => std::thread::yield_now(),
                other => return other,
            }
        }
    }
    let flags = scan_flag::WP_MATCHING | scan_flag::CHECK_WP_ASYNC;
    // Takes less than half the time of UFFDIO_WRITEPROTECT.
    // SAFETY: forwarded to the caller.
    unsafe {
        sys::pagemap_scan(
            borrow(tracker.pagemap),
            addr..addr + len,
            flags,
            &PageQuery::WRITTEN,
            &mut [],
        )
    }
    .map(drop)
}

/// Pages that may have been written, as far as the kernel knows. A query for written pages would
/// leave out pages that have lost their page table.
const NOT_CLEAN: PageQuery = PageQuery {
    inverted: page_is::PRESENT,
    all_of: 0,
    any_of: page_is::WRITTEN | page_is::PRESENT,
    tell: page_is::WRITTEN | page_is::PRESENT | page_is::SWAPPED,
};

/// # Safety
/// The range is the caller's.
pub(super) unsafe fn scan(
    tracker: Tracker,
    addr: usize,
    len: usize,
    mark_clean: bool,
    found: &mut [PageRegion],
) -> Result<(usize, usize), Errno> {
    let flags = if mark_clean { scan_flag::WP_MATCHING | scan_flag::CHECK_WP_ASYNC } else { 0 };
    // SAFETY: forwarded to the caller.
    unsafe {
        sys::pagemap_scan(borrow(tracker.pagemap), addr..addr + len, flags, &NOT_CLEAN, found)
    }
}
