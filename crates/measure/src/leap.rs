//! Runs one job, and watches it from outside.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pageleap::{BASE_PAGE, Job, Report, observe};

use crate::Error;
use crate::load::Beside;
use crate::memcpy::cpu_ns;
use crate::phase::Phase;
use crate::timeline;

/// The time between two looks of the calling thread at a running job. It is long, because reading
/// the list of mappings blocks threads that change mappings (mmap lock).
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The decision of the caller after a look at a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Go on.
    GoOn,
    /// Cancel the job. It ends when the areas that are under way have been completed.
    Cancel,
}

/// The observations of one leap.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The library's report.
    pub report: Report,
    /// From the call that started the job to its end, recycling included.
    pub elapsed: Duration,
    /// Writes that the load completed in this time.
    pub writes: u64,
    /// CPU time of the leap: of the calling thread for starting the job, and of the job's threads
    /// until the last page had moved. `None` if the kernel does not say.
    pub migrate_cpu_ns: Option<u64>,
    /// Mappings before the leap, of regions and pools, or those that the caller of
    /// [`watch_counting`] counts.
    pub mappings_before: usize,
    /// The most mappings at any look.
    pub mappings_peak: usize,
    /// Mappings after it.
    pub mappings_after: usize,
    /// The most anonymous memory at any look, minus the amount before; `None` if the leap was over
    /// before the first look.
    pub overhead_bytes: Option<u64>,
}

impl Watched {
    /// CPU time of leap and recycling together; `None` if a part is unknown.
    pub fn cpu_ns(&self) -> Option<u64> {
        Some(self.migrate_cpu_ns? + self.report.recycle_cpu_ns?)
    }

    /// Writes per second from the start of the job to its end.
    pub fn writes_per_s(&self) -> f64 {
        self.writes as f64 / self.elapsed.as_secs_f64()
    }
}

/// Starts a job by `start`, watches it until it ends, and tells the load's threads when it begins
/// and ends. Calls `look` every 50 ms, which may cancel the job.
///
/// # Errors
/// If the job cannot be started.
pub fn watch(
    start: impl FnOnce() -> Result<Job, pageleap::Error>,
    beside: &Beside,
    look: impl FnMut(&Job) -> Wish,
) -> Result<Watched, Error> {
    watch_counting(observe::pool_mapping_count, start, beside, look)
}

/// As [`watch`], but counts mappings by `mappings` instead of those of regions and pools.
///
/// # Errors
/// If the job cannot be started, or mappings cannot be counted.
pub fn watch_counting(
    mappings: impl Fn() -> Result<usize, pageleap::Error>,
    start: impl FnOnce() -> Result<Job, pageleap::Error>,
    beside: &Beside,
    mut look: impl FnMut(&Job) -> Wish,
) -> Result<Watched, Error> {
    let mappings_before = mappings()?;
    let mut mappings_peak = mappings_before;
    let (anonymous_before, mut anonymous_peak) = (anonymous_bytes(), None);
    let writes_before = beside.completed();
    beside.stage.enter(Phase::During);
    let (began, cpu_start) = (Instant::now(), cpu_ns());
    let job = start()?;
    let start_cpu_ns = cpu_start.zip(cpu_ns()).map(|(from, to)| to - from);
    let mut failed = None;
    let every = if beside.is_recorded() { timeline::EVERY } else { LOOK_EVERY };
    let mut looked = began;
    wait(&job, every, |job| {
        beside.note_moved(job.progress().bytes_migrated);
        if looked.elapsed() < LOOK_EVERY {
            return Wish::GoOn;
        }
        looked = Instant::now();
        match mappings() {
            Ok(count) => mappings_peak = mappings_peak.max(count),
            Err(error) => failed = Some(error),
        }
        anonymous_peak = anonymous_peak.max(anonymous_bytes());
        look(job)
    });
    let elapsed = began.elapsed();
    beside.note_moved(job.progress().bytes_migrated);
    beside.stage.enter(Phase::After);
    let writes = beside.completed() - writes_before;
    let report = job.wait();
    if let Some(error) = failed {
        return Err(error.into());
    }
    let mappings_after = mappings()?;
    Ok(Watched {
        migrate_cpu_ns: start_cpu_ns.zip(report.migrate_cpu_ns).map(|(start, job)| start + job),
        report,
        elapsed,
        writes,
        mappings_before,
        mappings_peak: mappings_peak.max(mappings_after),
        mappings_after,
        overhead_bytes: anonymous_peak
            .zip(anonymous_before)
            .map(|(peak, before)| peak.saturating_sub(before)),
    })
}

/// Waits until the job ends. Calls `look` every 50 ms, which may cancel the job.
pub fn finish(job: &Job, look: impl FnMut(&Job) -> Wish) {
    wait(job, LOOK_EVERY, look);
}

/// Waits until the job ends. Calls `look` after each `every`, which may cancel the job.
fn wait(job: &Job, every: Duration, mut look: impl FnMut(&Job) -> Wish) {
    while !finished_within(job, every) {
        if look(job) == Wish::Cancel {
            job.cancel();
        }
    }
}

/// Waits for the job for at most `time`.
fn finished_within(job: &Job, time: Duration) -> bool {
    pageleap_sys::wait_readable([job.as_fd().as_raw_fd()], time.as_millis() as i32);
    job.is_finished()
}

/// Refuses a report with fewer than `pages` moved pages, because its time is meaningless then.
///
/// # Errors
/// [`Error::Incomplete`].
pub fn check_complete(report: &Report, pages: u64) -> Result<(), Error> {
    if report.ended.is_completed() && report.pages.migrated == pages {
        return Ok(());
    }
    Err(Error::Incomplete { pages, report: Box::new(report.clone()) })
}

/// The cost of first touches that a leap leaves behind: the time to write the first word of each
/// base page, minus the time to do so again. It shows, for example, a huge page that is mapped in
/// pieces. The words keep their values; no other thread may write to them meanwhile.
pub fn first_touch_ns(words: &[AtomicU64]) -> i64 {
    let first = touch_ns(words);
    first - touch_ns(words)
}

fn touch_ns(words: &[AtomicU64]) -> i64 {
    use std::sync::atomic::Ordering::Relaxed;
    let start = Instant::now();
    for word in words.iter().step_by(BASE_PAGE / size_of::<u64>()) {
        word.store(std::hint::black_box(word.load(Relaxed)), Relaxed);
    }
    start.elapsed().as_nanos() as i64
}

/// Anonymous memory of the process (RssAnon), which does not include regions and pools; `None` if
/// the kernel hides it.
fn anonymous_bytes() -> Option<u64> {
    rss_anon(&std::io::read_to_string(pageleap_sys::open_own("status").ok()?).ok()?)
}

fn rss_anon(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_one_line_of_many() {
        let status = "VmRSS:\t 2048 kB\nRssAnon:\t     132 kB\nRssFile:\t    1900 kB\n";
        assert_eq!(rss_anon(status), Some(132 << 10));
        for status in ["", "RssAnon:\n", "RssAnon: many kB", "RssAnon: 5", "VmRSS: 5 kB"] {
            assert_eq!(rss_anon(status), None, "{status}");
        }
        assert!(anonymous_bytes().unwrap() > 0);
    }
}
