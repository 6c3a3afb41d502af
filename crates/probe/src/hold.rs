//! Whether accesses to a range can be held back until it has moved, the kernel's own accesses
//! included.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use pageleap::BASE_PAGE;
use pageleap::for_probe::{BARRIER, EXCHANGE, HOLD, HOLD_HUGETLB};
use pageleap_sys::{self as sys, Errno, Thread, uffd_mode};

use crate::finding::{Finding, Topic};
use crate::scratch::{Failed, Scratch};
use crate::userfaultfd::{Way, WayFound};

/// A way to hold accesses back.
struct Hold {
    topic: Topic,
    features: u64,
    /// Whether it is for hugetlb pages.
    hugetlb: bool,
    mode: u64,
    /// Bits of the requests that a registered range must allow.
    requests: u64,
    works: &'static str,
    fails: &'static str,
}

/// `_UFFDIO_WAKE`.
const WAKE: u64 = 1 << 2;
/// `_UFFDIO_WRITEPROTECT`.
const WRITE_PROTECT: u64 = 1 << 6;
/// `_UFFDIO_CONTINUE`.
const CONTINUE: u64 = 1 << 7;

const HOLDS: [Hold; 4] = [
    Hold {
        topic: Topic::WriteBarrier,
        features: BARRIER,
        hugetlb: false,
        mode: uffd_mode::WP,
        requests: WAKE | WRITE_PROTECT,
        works: "writers can be held back, the kernel's writes included",
        fails: "writers cannot be held back together with the kernel's writes",
    },
    Hold {
        topic: Topic::Freeze,
        features: EXCHANGE,
        hugetlb: false,
        mode: uffd_mode::WP | uffd_mode::MINOR,
        requests: WAKE | CONTINUE,
        works: "a range can be held against user code and kernel",
        fails: "a range cannot be held against user code and kernel at once",
    },
    Hold {
        topic: Topic::Hold,
        features: HOLD,
        hugetlb: false,
        mode: uffd_mode::MISSING | uffd_mode::MINOR,
        requests: WAKE | CONTINUE,
        works: "pages that are taken away can be held against user code and kernel",
        fails: "pages that are taken away cannot be held against user code and kernel at once",
    },
    Hold {
        topic: Topic::HoldHugetlb,
        features: HOLD_HUGETLB,
        hugetlb: true,
        mode: uffd_mode::MISSING | uffd_mode::MINOR,
        requests: WAKE | CONTINUE,
        works: "hugetlb pages that are taken away can be held against user code and kernel",
        fails: "hugetlb pages that are taken away cannot be held against user code and kernel",
    },
];

/// The finding about each way.
pub(crate) fn findings(ways: &[WayFound]) -> impl Iterator<Item = Finding> {
    HOLDS.iter().map(|hold| judge(hold, ways, attempt(ways, hold)))
}

/// The outcome of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// A call that wrote there waited until it was let go.
    Waited,
    /// It did not wait.
    WentOn,
    /// It could not be tried, but all requests that it needs are allowed.
    Possible,
    /// A request that it needs is missing.
    Lacks,
}

/// Holds a page of a memory file in that way. `None` if no way to userfaultfd has the features.
fn attempt(ways: &[WayFound], hold: &Hold) -> Option<(Way, Result<Seen, Failed>)> {
    let way = ways.iter().find(|found| found.way != Way::UserMode && found.has(hold.features))?.way;
    let try_it = || -> Result<Seen, Failed> {
        let uffd = way.open_with(hold.features)?;
        let zeros = file_of_zeros()?;
        // A page of hugetlb is not taken: what is not there is held as well.
        let scratch = match hold.hugetlb {
            true => Scratch::huge_without_page()?,
            false => Scratch::populated(BASE_PAGE, BASE_PAGE)?,
        };
        let (start, len) = (scratch.span.start, scratch.span.len);
        // SAFETY: the range is the probe's own, and no thread touches it before it is held.
        let possible = unsafe { sys::uffd_register(uffd.as_fd(), start, len, hold.mode) }
            .map_err(Failed::at("ioctl(UFFDIO_REGISTER) of a memory file"))?;
        if possible & hold.requests != hold.requests {
            return Ok(Seen::Lacks);
        }
        if hold.mode & uffd_mode::MINOR == 0 {
            // SAFETY: as above.
            unsafe { sys::uffd_write_protect(uffd.as_fd(), start, len) }
                .map_err(Failed::at("ioctl(UFFDIO_WRITEPROTECT)"))?;
        } else {
            scratch.span.forget().map_err(Failed::at("madvise(MADV_DONTNEED)"))?;
        }
        let seen = waits(uffd, zeros, start..start + len, |_| {
            // Otherwise the call would take a page in the end.
            let _ = if hold.hugetlb { scratch.span.vacate() } else { Ok(()) };
        });
        Ok(seen)
    };
    Some((way, try_it()))
}

/// A memory file that [`waits`] reads from.
pub(crate) fn file_of_zeros() -> Result<OwnedFd, Failed> {
    let file = sys::memfd_create(c"pageleap:probe", None).map_err(Failed::at("memfd_create"))?;
    sys::memfd_seal(file.as_fd(), BASE_PAGE)
        .map_err(Failed::at("ftruncate and seals of a memory file"))?;
    Ok(file)
}

/// Whether the kernel waits when it writes a byte to the start of a held range for a thread. Does
/// something before it lets go of the range. When this function returns, no thread waits, and the
/// range is not registered.
pub(crate) fn waits(
    uffd: OwnedFd,
    zeros: OwnedFd,
    held: Range<usize>,
    before_the_end: impl FnOnce(BorrowedFd<'_>),
) -> Seen {
    /// What the thread's call did, beside 0: it is under way, or waits.
    const WENT_ON: u8 = 1;
    const REFUSED: u8 = 2;
    let did = Arc::new(AtomicU8::new(0));
    let (start, tell) = (held.start, did.clone());
    let thread = Thread::start(c"pageleap-probe", move || {
        // SAFETY: the call writes one byte into the range, which lives until this thread has been
        // joined, or fails.
        let read = unsafe { libc::pread(zeros.as_raw_fd(), start as *mut libc::c_void, 1, 0) };
        // A call that must not wait gets EFAULT; other errors have other causes.
        let went_on = read == 1 || Errno::last() == Errno(libc::EFAULT);
        tell.store(if went_on { WENT_ON } else { REFUSED }, Ordering::Release);
    });
    let mut message = libc::pollfd { fd: uffd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // One of the two comes, unless the thread gets no CPU.
    let patience = Instant::now() + Duration::from_secs(10);
    let is_quiet = |message: &libc::pollfd| {
        message.revents == 0 && did.load(Ordering::Acquire) == 0 && Instant::now() < patience
    };
    while thread.is_ok() && is_quiet(&message) {
        const MS: libc::c_int = 1;
        // SAFETY: one structure, which outlives the call.
        if unsafe { libc::poll(&mut message, 1, MS) } < 0 && Errno::last() != Errno(libc::EINTR) {
            break;
        }
    }
    let seen = match (message.revents & libc::POLLIN != 0, did.load(Ordering::Acquire)) {
        (true, _) => Seen::Waited,
        (false, WENT_ON) => Seen::WentOn,
        _ => Seen::Possible,
    };
    before_the_end(uffd.as_fd());
    let _ = sys::uffd_unregister(uffd.as_fd(), held.start, held.len());
    let _ = sys::uffd_wake(uffd.as_fd(), held.start, held.len());
    // If these requests are refused, closing the descriptor wakes the thread.
    drop(uffd);
    if let Ok(thread) = thread {
        thread.join();
    }
    seen
}

fn judge(hold: &Hold, ways: &[WayFound], tried: Option<(Way, Result<Seen, Failed>)>) -> Finding {
    let works = |way: Way, saw: &str| {
        Finding::works(hold.topic, hold.works).saw(format!("{}: {saw}", way.text()))
    };
    match tried {
        Some((way, Ok(Seen::Waited))) => {
            works(way, "a call that wrote to a page waited until it was let go")
        }
        Some((way, Ok(Seen::Possible))) => works(way, "a memory file can be registered for it"),
        Some((_, Ok(Seen::WentOn))) => {
            Finding::missing(hold.topic, hold.fails, "a call that wrote to a page did not wait")
        }
        Some((_, Ok(Seen::Lacks))) => {
            Finding::missing(hold.topic, hold.fails, "memory files lack requests that it takes")
        }
        Some((_, Err(failed))) => {
            Finding::missing(hold.topic, hold.fails, "a call that it takes fails")
                .saw(failed.seen())
        }
        None => {
            let any = ways.iter().any(|found| found.way != Way::UserMode && found.opens());
            let reason = if any {
                "this kernel lacks features: see userfaultfd"
            } else {
                "faults of the kernel cannot be held: system calls that touch the range would fail \
                 with EFAULT. Remedies are under userfaultfd-device"
            };
            Finding::missing(hold.topic, hold.fails, reason)
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use pageleap::topology::SysFiles;

    use super::*;
    use crate::around::Around;
    use crate::finding::State;
    use crate::userfaultfd;

    #[test]
    fn only_what_waits_works() {
        let state = |hold, seen| judge(hold, &[], Some((Way::ALL[0], Ok(seen)))).state;
        for hold in &HOLDS {
            assert_eq!(state(hold, Seen::Waited), State::Works);
            assert_eq!(state(hold, Seen::WentOn), State::Missing);
            assert_eq!(state(hold, Seen::Lacks), State::Missing);
        }
    }

    /// Where the kernel says that it can, it does: whatever is skipped because of this probe is
    /// skipped rightly.
    #[test]
    fn pages_are_held_where_the_kernel_offers_it() {
        let (ways, _) = userfaultfd::findings(&Around::read(&SysFiles::host()));
        for hold in &HOLDS {
            match attempt(&ways, hold) {
                Some((way, seen)) => {
                    assert_eq!(seen, Ok(Seen::Waited), "{way:?}, {:?}", hold.topic)
                }
                None => eprintln!("SKIP {:?}: no userfaultfd that may hold the kernel", hold.topic),
            }
        }
    }

    #[test]
    fn a_page_that_nobody_holds_is_written_at_once() {
        // Stands in for a userfaultfd that holds nothing: it has no messages either.
        let silent = sys::Event::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        let scratch = Scratch::populated(BASE_PAGE, BASE_PAGE).unwrap();
        scratch.span.write(0, 7);
        let start = scratch.span.start;
        let mut ended = false;
        let seen =
            waits(silent, file_of_zeros().unwrap(), start..start + BASE_PAGE, |_| ended = true);
        assert_eq!((seen, ended), (Seen::WentOn, true));
        assert_eq!(scratch.span.read(0), 0, "the call has written");
    }
}
