//! Trackers of the real kernel: a userfaultfd, the pagemap of the process, and an event.
//!
//! Trackers that note writes do so by asynchronous write-protection. Nothing here decides anything.
//! A tracker is up to three descriptors without a destructor, because between the freeze and the
//! commit no code may touch the heap.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use pageleap_sys::{
    self as sys, Errno, Event, Kept, KeptFd, PageQuery, PageRegion, page_is, scan_flag, uffd_mode,
};

use super::uffd::{
    BARRIER, EXCHANGE, HOLD, HOLD_AGAINST_COLLAPSE, HOLD_HUGETLB, privileged, shake_hands,
};
use super::{Ability, Call, Descriptor, Tracker};
use crate::priority;

/// Opens the descriptors: by the system call, or else through the device.
pub(super) fn open(ability: Ability) -> Result<Tracker, (Call, Errno)> {
    let refused = |errno| (Call::OpenTracker, errno);
    let follows = [uffd_mode::WP, uffd_mode::WP | uffd_mode::MINOR];
    // MISSING makes a thread wait that touches a page which the file lacks. Otherwise the kernel
    // would give it a new page, which nobody copies.
    let holds = uffd_mode::MINOR | uffd_mode::MISSING;
    let (faults, modes) = match ability {
        Ability::NoteAndHold => (privileged(EXCHANGE), follows),
        // A tracker that blocks no thread can do without the kernel's faults (UFFD_USER_MODE_ONLY).
        Ability::Note => (sys::userfaultfd(true).and_then(|fd| shake_hands(fd, EXCHANGE)), follows),
        Ability::HoldWriters => (privileged(BARRIER), follows),
        Ability::Hold => match privileged(HOLD_AGAINST_COLLAPSE) {
            Err(Errno(libc::EINVAL)) => (privileged(HOLD), [holds; 2]),
            faults => (faults, [holds | uffd_mode::WP; 2]),
        },
        Ability::HoldHugetlb => {
            let drops = sys::check_that_huge_tables_drop();
            (drops.and_then(|()| privileged(HOLD_HUGETLB)), [holds; 2])
        }
    };
    let faults = faults.map_err(refused)?;
    let faults = KeptFd::new(faults).map_err(refused)?;
    let whole = |faults: KeptFd, end: Option<Event>, pagemap: Option<KeptFd>| Tracker {
        faults: Descriptor::Kernel(faults.into_kept()),
        pagemap: pagemap.map(KeptFd::into_kept),
        end: end.map(Event::into_kept),
        modes,
    };
    if ability.only_holds() {
        return Ok(whole(faults, None, None));
    }
    let end = Event::new().map_err(|errno| (Call::OpenTracker, errno))?;
    if ability == Ability::HoldWriters {
        return Ok(whole(faults, Some(end), None));
    }
    let pagemap = sys::open_own("pagemap").map_err(|errno| (Call::OpenPagemap, errno))?;
    // The query of an empty range tells whether the kernel knows the request.
    // SAFETY: nothing is protected.
    unsafe { sys::pagemap_scan(pagemap.as_fd(), 0..0, 0, &NOT_CLEAN, &mut []) }
        .map_err(|errno| (Call::Scan, errno))?;
    Ok(whole(faults, Some(end), Some(pagemap)))
}

/// # Safety
/// Called once, and the tracker is not used any more.
pub(super) unsafe fn close(tracker: Tracker) {
    // SAFETY: `open` made them, and the tracker is used no more.
    all(tracker).for_each(|kept| _ = unsafe { kept.close() });
}

fn all(tracker: Tracker) -> impl Iterator<Item = Kept> {
    [Some(tracker.faults.kept()), tracker.pagemap, tracker.end].into_iter().flatten()
}

/// Whether the userfaultfd and the pagemap, which attempts use, are still the tracker's. If only
/// the event is lost, [`serve`] goes on, and [`end`] finds another way.
pub(super) fn is_whole(tracker: Tracker) -> bool {
    tracker.has_faults() && tracker.pagemap.is_none_or(|pagemap| pagemap.is_ours())
}

fn borrow<'a>(kept: Kept) -> BorrowedFd<'a> {
    // SAFETY: a tracker's descriptors are open until it is closed, after its last use.
    unsafe { kept.borrow() }
}

/// The pagemap, for calls on trackers that have one.
fn pagemap<'a>(tracker: Tracker) -> Result<BorrowedFd<'a>, Errno> {
    tracker.pagemap.map(borrow).ok_or(Errno(libc::EBADF))
}

/// The userfaultfd.
pub(super) fn faults<'a>(tracker: Tracker) -> BorrowedFd<'a> {
    borrow(tracker.faults.kept())
}

/// Reads messages until [`end`] is called. An exchange of registered memory waits until its message
/// has been read. Threads that wait for a page do so without a message; for each thread that waits
/// to write, `write` is called and may let it go on.
pub(super) fn serve(tracker: Tracker, write: &mut dyn FnMut(usize)) {
    // Other threads may sleep until this one has run.
    priority::serve_others();
    /// How soon the loss of a descriptor is noticed, after which nothing would end the wait.
    const LOOK_MS: i32 = 500;
    let mut waits = [Some(tracker.faults.kept()), tracker.end].map(number);
    loop {
        // Messages are read also after an interrupted call.
        let [_, is_over] = sys::wait_readable(waits, LOOK_MS);
        if !tracker.has_faults() {
            // Closing the userfaultfd has woken all threads that waited for it.
            return;
        }
        let were_any = sys::uffd_serve_some(faults(tracker), write);
        // Without the event the loop goes on, because exchanges still wait for their messages to be
        // read.
        let ends = tracker.end.is_some_and(|end| end.is_ours());
        if ends && is_over && !were_any {
            return;
        }
        if !ends {
            waits[1] = -1;
        }
    }
}

/// The number of a descriptor, or that of none.
fn number(kept: Option<Kept>) -> RawFd {
    kept.map_or(-1, |kept| kept.number())
}

/// Ends [`serve`].
pub(super) fn end(tracker: Tracker) {
    if !tracker.end.is_some_and(sys::signal_event) {
        // Other code has closed the event. The thread ends when the userfaultfd has gone.
        // SAFETY: the job has no window any more, and `close` finds that it is not the tracker's.
        unsafe { tracker.faults.kept().close() };
    }
}

/// # Safety
/// The range is the caller's.
pub(super) unsafe fn mark_clean(
    tracker: Tracker,
    addr: usize,
    len: usize,
    split: bool,
) -> Result<(), Errno> {
    if split || tracker.pagemap.is_none() {
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
    // PAGEMAP_SCAN takes less than half the time of UFFDIO_WRITEPROTECT.
    // SAFETY: forwarded to the caller.
    unsafe {
        sys::pagemap_scan(pagemap(tracker)?, addr..addr + len, flags, &PageQuery::WRITTEN, &mut [])
    }
    .map(drop)
}

/// The query for pages that may have been written, as far as the kernel knows. A query for WRITTEN
/// pages alone would leave out pages that have lost their page table.
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
    unsafe { sys::pagemap_scan(pagemap(tracker)?, addr..addr + len, flags, &NOT_CLEAN, found) }
}
