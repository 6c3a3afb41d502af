//! Whether somebody can be held back from a range until it has moved, the kernel's own accesses included.

use std::os::fd::AsFd;

use pageleap_sys::{self as sys, Errno, uffd_mode};

use super::features::{BARRIER, EXCHANGE};
use super::finding::{Finding, Topic};
use super::scratch::{Failed, Scratch};
use super::userfaultfd::{Way, WayFound};
use crate::units::BASE_PAGE;

/// How somebody is held back.
struct Hold {
    topic: Topic,
    features: u64,
    mode: u64,
    /// Bits of what must be possible on a registered range.
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

const HOLDS: [Hold; 2] = [
    Hold {
        topic: Topic::WriteBarrier,
        features: BARRIER,
        mode: uffd_mode::WP,
        requests: WAKE | WRITE_PROTECT,
        works: "writers can be held back, the kernel's writes included",
        fails: "writers cannot be held back together with the kernel's writes",
    },
    Hold {
        topic: Topic::Freeze,
        features: EXCHANGE,
        mode: uffd_mode::WP | uffd_mode::MINOR,
        requests: WAKE | CONTINUE,
        works: "a range can be held against user code and kernel",
        fails: "a range cannot be held against user code and kernel at once",
    },
];

/// What was found of each.
pub(super) fn findings(ways: &[WayFound]) -> impl Iterator<Item = Finding> {
    HOLDS.iter().map(|hold| judge(hold, ways, attempt(ways, hold)))
}

/// Registers a memory file in such a way. `None` if no way has the features.
fn attempt(ways: &[WayFound], hold: &Hold) -> Option<(Way, Result<bool, Failed>)> {
    let way = ways.iter().find(|found| found.way != Way::UserMode && found.has(hold.features))?.way;
    let register = || -> Result<bool, Failed> {
        let uffd = way.open().map_err(|r| Failed::at(way.text())(r.errno().unwrap_or(Errno(0))))?;
        sys::uffd_handshake(uffd.as_fd(), hold.features).map_err(Failed::at("ioctl(UFFDIO_API)"))?;
        let scratch = Scratch::new(BASE_PAGE, BASE_PAGE, None)?;
        let (start, len) = (scratch.span.start, scratch.span.len);
        // SAFETY: the range is ours, and nobody touches it while it is registered.
        let possible = unsafe { sys::uffd_register(uffd.as_fd(), start, len, hold.mode) }
            .map_err(Failed::at("ioctl(UFFDIO_REGISTER) of a memory file"))?;
        let _ = sys::uffd_unregister(uffd.as_fd(), start, len);
        Ok(possible & hold.requests == hold.requests)
    };
    Some((way, register()))
}

fn judge(hold: &Hold, ways: &[WayFound], tried: Option<(Way, Result<bool, Failed>)>) -> Finding {
    match tried {
        Some((way, Ok(true))) => Finding::works(hold.topic, hold.works)
            .saw(format!("{}: a memory file can be registered for it", way.text())),
        Some((_, Ok(false))) => {
            Finding::missing(hold.topic, hold.fails, "memory files lack requests that it takes")
        }
        Some((_, Err(failed))) => {
            Finding::missing(hold.topic, hold.fails, "a call that it takes fails").saw(failed.seen())
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
