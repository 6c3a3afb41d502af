//! Tracking writes: scans of the pagemap, and userfaultfd's asynchronous write-protection.

use std::os::fd::AsFd;

use pageleap::BASE_PAGE;
use pageleap::for_probe::TRACKING;
use pageleap_sys::{self as sys, PageQuery, PageRegion, page_is, scan_flag, uffd_mode};

use crate::around::Around;
use crate::finding::{Finding, Remedy, Topic, Who};
use crate::memory::could_not_try;
use crate::scratch::{Failed, PagemapCall, Scratch};
use crate::userfaultfd::{Way, WayFound};

/// Tries scans, and tracking by a way that has the features.
pub(crate) fn findings(around: &Around, ways: &[WayFound]) -> [Finding; 2] {
    [judge_scan(around, pagemap_scan()), judge_tracking(try_tracking(ways))]
}

/// Scans one page of our own.
fn pagemap_scan() -> Result<bool, Failed> {
    let pagemap = open_pagemap()?;
    let scratch = Scratch::populated(BASE_PAGE, BASE_PAGE)?;
    let mut found = [PageRegion::default(); 2];
    let (start, end) = (scratch.span.start, scratch.span.start + BASE_PAGE);
    let wanted = page_is::PRESENT | page_is::FILE;
    let query = PageQuery { all_of: page_is::PRESENT, tell: wanted, ..PageQuery::default() };
    // SAFETY: nothing is protected.
    let count = unsafe { sys::pagemap_scan(pagemap.as_fd(), start..end, 0, &query, &mut found) };
    let (count, _) = count.map_err(PagemapCall::Scan.failed())?;
    Ok(count == 1
        && found[0] == PageRegion { start: start as u64, end: end as u64, categories: wanted })
}

pub(crate) fn open_pagemap() -> Result<sys::KeptFd, Failed> {
    sys::open_own("pagemap").map_err(PagemapCall::Open.failed())
}

fn judge_scan(around: &Around, tried: Result<bool, Failed>) -> Finding {
    const CALL: &str = PagemapCall::Scan.text();
    let topic = Topic::PagemapScan;
    match tried {
        Ok(true) => Finding::works(topic, "pages can be scanned for writes")
            .saw(format!("{CALL} of a page of ours: right")),
        Ok(false) => Finding::missing(
            topic,
            "the scan does not see a page that is there",
            "the kernel answers PAGEMAP_SCAN wrongly",
        )
        .saw(format!("{CALL} of a page of ours: wrong")),
        Err(failed) if failed.pagemap == Some(PagemapCall::Open) => {
            let finding = match failed.errno.0 {
                libc::ENOENT => Finding::missing(
                    topic,
                    "no pagemap",
                    "/proc is not mounted, or the \
                 kernel has no CONFIG_PROC_PAGE_MONITOR",
                )
                .remedies([mount_proc()]),
                libc::EACCES => Finding::missing(
                    topic,
                    "pagemap cannot be opened",
                    "/proc/self belongs to root because this process is not dumpable: it is a program \
                     with capabilities or set-user-id, or one that its user cannot read; or it has \
                     changed its user or group, or called prctl(PR_SET_DUMPABLE, 0)",
                )
                .remedies([
                    Remedy::new(
                        Who::Root,
                        "setcap -r <PROGRAM>",
                        "takes the program's capabilities away; \
                         chmod a+r <PROGRAM> if it is only unreadable",
                    ),
                    Remedy::new(
                        Who::You,
                        "prctl(PR_SET_DUMPABLE, 1)",
                        "in the program, before it starts a job; it may be taken back when the job has \
                         started",
                    ),
                ]),
                _ => Finding::missing(
                    topic,
                    "pagemap cannot be \
                 opened",
                    around.refusal(PagemapCall::Open.text(), failed.errno),
                ),
            };
            finding.saw(failed.seen())
        }
        Err(failed) if failed.pagemap == Some(PagemapCall::Scan) => {
            let finding = match failed.errno.0 {
                libc::ENOTTY => Finding::missing(
                    topic,
                    "pages cannot be scanned",
                    "PAGEMAP_SCAN came with Linux 6.7",
                )
                .remedy(Who::Root, "boot Linux 6.7 or later", ""),
                _ => Finding::missing(
                    topic,
                    "pages cannot be scanned",
                    around.refusal(CALL, failed.errno),
                ),
            };
            finding.saw(failed.seen())
        }
        Err(failed) => could_not_try(topic, &failed),
    }
}

/// How `/proc` is mounted.
pub(crate) fn mount_proc() -> Remedy {
    Remedy::new(
        Who::Root,
        "mount -t proc proc /proc",
        "programs there see the processes of their pid namespace and the settings of the kernel",
    )
}

/// Why a use of userfaultfd was not tried, or what came of it.
type Tried = Result<bool, Failed>;

/// Writes to a memory file, seen by asynchronous write-protection and scans. `None` if no way has
/// the features.
fn try_tracking(ways: &[WayFound]) -> Option<(Way, Tried)> {
    let way = ways.iter().find(|found| found.has(TRACKING))?.way;
    let attempt = || -> Tried {
        let uffd = way.open_with(TRACKING)?;
        let pagemap = open_pagemap()?;
        let scratch = Scratch::populated(2 * BASE_PAGE, BASE_PAGE)?;
        let (start, len) = (scratch.span.start, scratch.span.len);
        // SAFETY: the range is the probe's own; with asynchronous protection no thread waits.
        unsafe { sys::uffd_register(uffd.as_fd(), start, len, uffd_mode::WP) }
            .map_err(Failed::at("ioctl(UFFDIO_REGISTER, WP) of a memory file"))?;
        let mut found = [PageRegion::default(); 4];
        let mut scan = |flags| {
            // SAFETY: the range is ours.
            unsafe {
                sys::pagemap_scan(
                    pagemap.as_fd(),
                    start..start + len,
                    flags,
                    &PageQuery::WRITTEN,
                    &mut found,
                )
            }
            .map(|(count, _)| (count, found[0]))
            .map_err(PagemapCall::Scan.failed())
        };
        scan(scan_flag::WP_MATCHING | scan_flag::CHECK_WP_ASYNC)?;
        let (quiet, _) = scan(0)?;
        scratch.span.write(BASE_PAGE, 1);
        let (count, written) = scan(0)?;
        let _ = sys::uffd_unregister(uffd.as_fd(), start, len);
        Ok(quiet == 0 && count == 1 && written.start == (start + BASE_PAGE) as u64)
    };
    Some((way, attempt()))
}

fn judge_tracking(tried: Option<(Way, Tried)>) -> Finding {
    let topic = Topic::WriteTracking;
    match tried {
        None => Finding::missing(
            topic,
            "writes cannot be tracked without a fault handler",
            "no way to userfaultfd works that has WP_ASYNC, WP_UNPOPULATED and WP_HUGETLBFS_SHMEM: \
             see userfaultfd-user-mode, which needs no privilege",
        ),
        Some((way, Ok(true))) => Finding::works(
            topic,
            "writes to memory files can be tracked without a fault handler",
        )
        .saw(format!(
            "{}: one of two write-protected pages was written, and the scan showed that one",
            way.text()
        )),
        Some((way, Ok(false))) => Finding::missing(
            topic,
            "tracking shows the wrong pages",
            "the kernel tracks writes to memory files wrongly",
        )
        .saw(format!(
            "{}: one of two write-protected pages was written, and the scan showed something else",
            way.text()
        )),
        Some((_, Err(failed))) if failed.pagemap.is_some() => Finding::missing(
            topic,
            "writes cannot be tracked",
            "it takes PAGEMAP_SCAN: see pagemap-scan",
        )
        .saw(failed.seen()),
        Some((_, Err(failed))) => {
            Finding::missing(topic, "writes cannot be tracked", "a call that tracking takes fails")
                .saw(failed.seen())
        }
    }
}
