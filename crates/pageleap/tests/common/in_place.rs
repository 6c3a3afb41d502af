//! Memory that no pool owns, moved in place: what the tests of it share.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs::File;
use std::os::fd::FromRawFd;
use std::time::Duration;

use pageleap::{
    BASE_PAGE, Error, Job, MemoryEngine, MemoryMigration, NodeId, PageOutcome, PageRun, PageSize,
    Placement, Reason, Report,
};

use crate::common::skip;
use crate::mapping::Mapping;

/// Bytes of a transparent huge page.
pub const HUGE: usize = 2 << 20;
/// Both kinds of pages that private anonymous memory has.
pub const KINDS: [PageSize; 2] = [PageSize::Base, PageSize::Thp];

/// Why memory cannot move in place here, if it cannot.
pub fn why_not() -> Option<Error> {
    let one = Mapping::own(BASE_PAGE);
    match migration(&one, NodeId(0)).engine(MemoryEngine::UffdMove).start() {
        Err(error @ Error::EngineRefused { .. }) => Some(error),
        other => {
            other.unwrap().wait();
            None
        }
    }
}

/// Whether the kernel and this user allow it. If not, the test is skipped.
pub fn works(test: &str) -> bool {
    why_not().inspect(|error| skip(test, error)).is_none()
}

/// A migration of all of a mapping, which gives pages other frames of the same node if it must.
pub fn migration(mapping: &Mapping, to: impl Into<Placement>) -> MemoryMigration {
    // SAFETY: no test breaks the contract while the job runs: the mapping is unmapped when dropped,
    // and the tests wait for their jobs.
    unsafe { MemoryMigration::new().range(mapping.start as *mut u8, mapping.len, to) }.renew(true)
}

pub fn leap(mapping: &Mapping, to: NodeId) -> Result<Job, Error> {
    migration(mapping, to).start()
}

/// Private memory whose huge pages, if it has some, are whole in it.
pub fn memory(bytes: usize, page: PageSize) -> Mapping {
    let raw = Mapping::new(bytes + HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let start = raw.start.next_multiple_of(HUGE);
    let unmap = |start: usize, end: usize| {
        // SAFETY: parts of the mapping that nobody uses.
        (end > start).then(|| unsafe { libc::munmap(start as *mut _, end - start) });
    };
    unmap(raw.start, start);
    unmap(start + bytes, raw.start + raw.len);
    std::mem::forget(raw);
    let mapping = Mapping { start, len: bytes };
    mapping.advise(match page {
        PageSize::Thp => libc::MADV_HUGEPAGE,
        _ => libc::MADV_NOHUGEPAGE,
    });
    mapping
}

/// Bytes that are resident, and in huge pages.
pub fn resident(mapping: &Mapping) -> [usize; 2] {
    ["Rss:", "AnonHugePages:"].map(|field| kb_in_smaps(mapping, field) << 10)
}

/// The sum of a field of smaps over the parts of a mapping.
pub fn kb_in_smaps(mapping: &Mapping, field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in text.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((start, _)) = first.split_once('-') {
            inside = mapping.range().contains(&usize::from_str_radix(start, 16).unwrap());
        } else if inside && first == field {
            sum += line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap();
        }
    }
    sum
}

pub fn pages_of(report: &Report, is: impl Fn(PageOutcome, Option<Reason>) -> bool) -> u64 {
    let fits = |run: &&PageRun| is(run.outcome, run.reason);
    report.runs.iter().filter(fits).map(|run| run.range.len() / BASE_PAGE).sum::<usize>() as u64
}

pub fn moved(report: &Report) -> u64 {
    pages_of(report, |outcome, _| outcome == PageOutcome::Migrated)
}

pub fn pipe() -> [File; 2] {
    let mut ends = [0; 2];
    // SAFETY: the call writes two descriptors, which become files.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        ends.map(|end| File::from_raw_fd(end))
    }
}

/// How long each case under load runs: `PAGELEAP_STRESS_SECONDS`, or one second.
pub fn oracle_time() -> Duration {
    let seconds = std::env::var("PAGELEAP_STRESS_SECONDS").ok();
    Duration::from_secs(seconds.and_then(|text| text.parse().ok()).unwrap_or(1))
}
