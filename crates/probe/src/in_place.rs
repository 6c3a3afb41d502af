//! Whether private anonymous memory moves in place, as the engine `uffd-move` moves it: one page
//! moves away and back, and a call of the kernel that writes to it meanwhile waits.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use pageleap::BASE_PAGE;
use pageleap::for_probe::MOVE_IN_PLACE;
use pageleap_sys::{self as sys, Advice, Errno, KeptFd, PageQuery, PageRegion, page_is, uffd_mode};

use crate::finding::{Finding, State, Topic, Who};
use crate::hold::{Seen, file_of_zeros, waits};
use crate::scratch::{Failed, PagemapCall, Span};
use crate::tracking::open_pagemap;
use crate::userfaultfd::{Way, WayFound};

/// What the page contains. The call that writes to it writes a zero.
const MARK: u8 = 0xa5;
/// How often a page is tried that the kernel refuses because it has it in hand itself.
const TRIES: usize = 3;

/// A window of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    /// What the call did that wrote to the page.
    call: Seen,
    /// Whether a scan showed that the page had left its place.
    left: bool,
    /// Whether the page contained in the end what it had and what the call wrote.
    whole: bool,
}

type Tried = Option<(Way, Result<Window, Failed>)>;

/// Tries it by the first way that has the features. `found` is what was found about other topics.
pub(crate) fn finding(ways: &[WayFound], found: &[Finding]) -> Finding {
    refused_to_both(found).unwrap_or_else(|| judge(ways, attempt(ways)))
}

/// The finding if a call is refused that the engine `kernel` takes as well.
fn refused_to_both(found: &[Finding]) -> Option<Finding> {
    const CALLS: [(Topic, &str); 2] =
        [(Topic::Mbind, "mbind"), (Topic::PlacementQuery, "move_pages")];
    let is_refused = |(topic, _): &&(Topic, &str)| {
        let mut found = found.iter().filter(|finding| finding.topic == *topic);
        found.any(|finding| matches!(finding.state, State::Limited | State::Missing))
    };
    let (topic, call) = CALLS.iter().find(is_refused)?;
    Some(Finding::missing(
        Topic::MemoryInPlace,
        "memory of malloc and mmap does not move, neither in place nor by the kernel",
        format!("it takes {call}: see {}", topic.id()),
    ))
}

/// `None` if no way to userfaultfd has the features.
fn attempt(ways: &[WayFound]) -> Tried {
    let way = ways.iter().find(|found| holds_kernel(found) && found.has(MOVE_IN_PLACE))?.way;
    let mut tried = open_window(way);
    for _ in 1..TRIES {
        match &tried {
            // Compaction, or balancing.
            Err(Failed { errno: Errno(libc::EAGAIN | libc::EBUSY), .. }) => {
                tried = open_window(way);
            }
            _ => break,
        }
    }
    Some((way, tried))
}

fn holds_kernel(found: &WayFound) -> bool {
    found.way != Way::UserMode && found.opens()
}

fn open_window(way: Way) -> Result<Window, Failed> {
    let uffd = way.open_with(MOVE_IN_PLACE)?;
    let pagemap = open_pagemap()?;
    // Another file may be mounted there. The scan of an empty range only asks whether the kernel
    // knows the request.
    is_empty(&pagemap, 0..0)?;
    let zeros = file_of_zeros()?;
    let mapped = || Span::private(BASE_PAGE).map_err(Failed::at("mmap of private memory"));
    let (page, parking) = (mapped()?, mapped()?);
    page.advise(Advice::PopulateWrite).map_err(Failed::at("madvise(MADV_POPULATE_WRITE)"))?;
    let (home, parked) = (page.start, parking.start);
    // SAFETY: the page is writable and present, and no other code knows its address.
    unsafe { (home as *mut u8).write_bytes(MARK, BASE_PAGE) };

    let away = leave(uffd.as_fd(), home, parked);
    // Unmapping what is registered would wait for somebody who reads messages.
    let _ = sys::uffd_unregister(uffd.as_fd(), parked, BASE_PAGE);
    if let Err(failed) = away {
        let _ = sys::uffd_unregister(uffd.as_fd(), home, BASE_PAGE);
        return Err(failed);
    }
    let (mut left, mut back) = (Ok(false), Ok(()));
    let call = waits(uffd, zeros, home..home + BASE_PAGE, |uffd| {
        left = is_empty(&pagemap, home..home + BASE_PAGE);
        back = shift(uffd, home, parked);
    });
    // The call that did not wait has filled the hole.
    if call == Seen::WentOn {
        return Ok(Window { call, left: false, whole: false });
    }
    let left = left?;
    back?;
    // SAFETY: the mapping is the probe's own and readable. The thread that wrote to it has ended,
    // and nobody waits there for a page: it is not registered any more.
    let bytes = unsafe { std::slice::from_raw_parts(home as *const u8, BASE_PAGE) };
    let written = call != Seen::Waited || bytes[0] == 0;
    let whole = written && bytes[1..].iter().all(|byte| *byte == MARK);
    Ok(Window { call, left, whole })
}

/// Whether nothing is in a range, neither present nor swapped out.
fn is_empty(pagemap: &KeptFd, range: Range<usize>) -> Result<bool, Failed> {
    let there = page_is::PRESENT | page_is::SWAPPED;
    let query = PageQuery { any_of: there, tell: there, ..PageQuery::default() };
    let mut found = [PageRegion::default()];
    // SAFETY: the scan protects nothing.
    let scanned = unsafe { sys::pagemap_scan(pagemap.as_fd(), range, 0, &query, &mut found) };
    scanned.map(|(count, _)| count == 0).map_err(PagemapCall::Scan.failed())
}

/// Registers two mappings of one page, and moves the page of the first one into the second one.
fn leave(uffd: BorrowedFd<'_>, home: usize, parked: usize) -> Result<(), Failed> {
    for at in [home, parked] {
        // SAFETY: the mapping is the probe's own, and no thread touches it before it is let go.
        unsafe { sys::uffd_register(uffd, at, BASE_PAGE, uffd_mode::MISSING) }
            .map_err(Failed::at("ioctl(UFFDIO_REGISTER) of private memory"))?;
    }
    shift(uffd, parked, home)
}

fn shift(uffd: BorrowedFd<'_>, to: usize, from: usize) -> Result<(), Failed> {
    // SAFETY: both pages are the probe's own. Nobody has a reference into them.
    let (_, refused) = unsafe { sys::uffd_move(uffd, to, from, BASE_PAGE) };
    refused.map_or(Ok(()), |errno| Err(Failed::at("ioctl(UFFDIO_MOVE)")(errno)))
}

fn judge(ways: &[WayFound], tried: Tried) -> Finding {
    const NO_MOVE: &str = "this kernel has no UFFDIO_MOVE, which came with Linux 6.8";
    const NO_HOLD: &str = "faults of the kernel cannot be held: system calls that touch memory in \
                           its window would fail with EFAULT. Remedies are under \
                           userfaultfd-device";
    let missing = |reason: &str| {
        Finding::missing(
            Topic::MemoryInPlace,
            "memory of malloc and mmap does not move in place; the engine kernel moves it",
            reason,
        )
    };
    let newer = |finding: Finding| finding.remedy(Who::Root, "boot Linux 6.8 or later", "");
    match tried {
        Some((
            way,
            Ok(Window { call: call @ (Seen::Waited | Seen::Possible), left: true, whole: true }),
        )) => {
            let saw = match call {
                Seen::Waited => "a page moved away and back, and a call that wrote to it waited",
                _ => "a page moved away and back",
            };
            Finding::works(
                Topic::MemoryInPlace,
                "memory of malloc and mmap moves in place (engine uffd-move)",
            )
            .saw(format!("{}, UFFDIO_MOVE: {saw}", way.text()))
        }
        Some((_, Ok(Window { call: Seen::WentOn, .. }))) => {
            missing("a call that wrote to a page that was away did not wait")
        }
        Some((_, Ok(window))) => {
            let left = if window.left { "had left" } else { "had not left" };
            let whole = if window.whole { "whole" } else { "not whole" };
            missing("the kernel moves pages wrongly")
                .saw(format!("a page {left} its place in its window, and was {whole} afterwards"))
        }
        Some((_, Err(failed))) if failed.pagemap.is_some() => {
            missing("it takes PAGEMAP_SCAN: see pagemap-scan").saw(failed.seen())
        }
        Some((_, Err(failed))) => missing("a call that it takes fails").saw(failed.seen()),
        None if ways.iter().any(holds_kernel) => newer(missing(NO_MOVE)),
        None if ways.iter().any(|found| found.opens() && !found.has(MOVE_IN_PLACE)) => {
            newer(missing(&format!("{NO_MOVE}; and {NO_HOLD}")))
        }
        None => missing(NO_HOLD),
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use pageleap::topology::SysFiles;
    use pageleap_sys::uffd_feature;

    use super::*;
    use crate::around::Around;
    use crate::finding::State;
    use crate::userfaultfd::{self, tests::found};

    const GOOD: Window = Window { call: Seen::Waited, left: true, whole: true };

    fn of(window: Window) -> Finding {
        judge(&[], Some((Way::Call, Ok(window))))
    }

    #[test]
    fn only_a_page_that_was_away_and_came_back_whole_works() {
        assert_eq!(of(GOOD).state, State::Works);
        assert_eq!(of(Window { call: Seen::Possible, ..GOOD }).state, State::Works);
        for wrong in [
            Window { call: Seen::WentOn, ..GOOD },
            Window { call: Seen::Lacks, ..GOOD },
            Window { left: false, ..GOOD },
            Window { whole: false, ..GOOD },
        ] {
            assert_eq!(of(wrong).state, State::Missing, "{wrong:?}");
        }
        assert!(of(Window { whole: false, ..GOOD }).observed[0].contains("not whole"));
    }

    #[test]
    fn an_old_kernel_is_told_from_a_missing_privilege() {
        const OLD: Option<u64> = Some(MOVE_IN_PLACE & !uffd_feature::MOVE);
        const NEW: Option<u64> = Some(MOVE_IN_PLACE);
        for (call, user_mode, old_kernel, refused) in [
            (OLD, OLD, true, false),
            (None, OLD, true, true),
            (None, NEW, false, true),
            (None, None, false, true),
        ] {
            let ways = [found(Way::Call, call), found(Way::UserMode, user_mode)];
            let finding = judge(&ways, None);
            assert_eq!(finding.state, State::Missing);
            assert!(finding.summary.contains("the engine kernel moves it"), "{finding}");
            assert_eq!(finding.reason.contains("6.8"), old_kernel, "{finding}");
            assert_eq!(finding.remedies.len(), usize::from(old_kernel), "{finding}");
            assert_eq!(finding.reason.contains("userfaultfd-device"), refused, "{finding}");
        }
    }

    #[test]
    fn calls_that_both_engines_take_are_named() {
        let query = Finding::limited(Topic::PlacementQuery, "", "");
        let finding = refused_to_both(std::slice::from_ref(&query)).unwrap();
        assert!(finding.reason.contains("move_pages: see placement-query"), "{finding}");
        assert!(!finding.summary.contains("the kernel moves it"), "{finding}");
        let bound = [Finding::missing(Topic::Mbind, "", ""), query];
        assert!(refused_to_both(&bound).unwrap().reason.contains("see mbind"));
        let fine = [Topic::Mbind, Topic::PlacementQuery].map(|topic| Finding::works(topic, ""));
        assert_eq!(refused_to_both(&fine), None);
    }

    /// Where the kernel says that it can, it does.
    #[test]
    fn a_page_moves_where_the_kernel_offers_it() {
        let (ways, _) = userfaultfd::findings(&Around::read(&SysFiles::host()));
        match attempt(&ways) {
            Some((way, window)) => assert_eq!(window, Ok(GOOD), "{way:?}"),
            None => eprintln!("SKIP: no userfaultfd that moves pages and may hold the kernel"),
        }
    }
}
