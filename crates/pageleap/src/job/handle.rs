//! The handle on a running migration.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use pageleap_sys::Event;

use super::outcomes::migrated_bytes;
use super::report::{Ended, Report};
use crate::backend::Call;
use crate::error::Error;
use crate::sync::{AtomicU8, AtomicU64, Condvar, Mutex, Ordering, lock};

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Moving pages.
    Migrating,
    /// The job has stopped moving pages, and other jobs may move them again. It makes the vacated
    /// frames usable again.
    Recycling,
    /// The job has ended; the report is available.
    Finished,
}

/// The progress of a job.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The job's phase.
    pub phase: Phase,
    /// Bytes that have to move. In memory that no pool owns the number falls as the job finds pages
    /// that are not present, lie on their node already, or are not to move.
    pub bytes_total: u64,
    /// Bytes that have moved, as far as is known. For a finished job it is the number of the
    /// report. It may fall at the end: the kernel moves pages together with others of their folio,
    /// and the job learns that only then.
    pub bytes_migrated: u64,
    /// Bytes copied so far, including those of disturbed copies.
    pub bytes_copied: u64,
}

/// The reason why a job has to stop. The first one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stop {
    No = 0,
    Cancelled = 1,
    TimedOut = 2,
    RegionDropped = 3,
    CpusetChanged = 4,
}

/// The state of a job that is shared by its handle, its workers and its regions.
#[derive(Debug)]
pub(crate) struct JobShared {
    stop: AtomicU8,
    phase: AtomicU8,
    bytes_total: AtomicU64,
    bytes_migrated: AtomicU64,
    bytes_copied: AtomicU64,
    end: Mutex<End>,
    /// Notified when the next phase begins.
    changed: Condvar,
    /// The process that started the job.
    process: u32,
}

/// The results that the end of a job leaves for its handle.
#[derive(Debug)]
struct End {
    report: Option<Report>,
    /// Signalled at the end, if the job has a handle. Then it is removed here, so that the
    /// descriptor is closed with the handle.
    event: Option<Arc<Event>>,
}

impl JobShared {
    pub(crate) fn new(bytes_total: u64) -> Self {
        JobShared {
            stop: AtomicU8::new(Stop::No as u8),
            phase: AtomicU8::new(Phase::Migrating as u8),
            bytes_total: AtomicU64::new(bytes_total),
            bytes_migrated: AtomicU64::new(0),
            bytes_copied: AtomicU64::new(0),
            end: Mutex::new(End { report: None, event: None }),
            changed: Condvar::new(),
            process: std::process::id(),
        }
    }

    /// Takes the report of a job that has ended.
    pub(crate) fn take_report(&self) -> Report {
        lock(&self.end).report.take().expect("a job that has ended has a report, taken once")
    }

    pub(crate) fn ask_to_stop(&self, why: Stop) {
        let _ = self.stop.compare_exchange(
            Stop::No as u8,
            why as u8,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }

    pub(crate) fn stop_for_dropped_region(&self) {
        self.ask_to_stop(Stop::RegionDropped);
    }

    pub(crate) fn stop(&self) -> Option<Ended> {
        match self.stop.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Ended::Cancelled),
            2 => Some(Ended::TimedOut),
            4 => Some(Ended::CpusetChanged),
            _ => Some(Ended::RegionDropped),
        }
    }

    pub(crate) fn count(&self, copied: u64, migrated: u64) {
        self.bytes_copied.fetch_add(copied, Ordering::Relaxed);
        self.bytes_migrated.fetch_add(migrated, Ordering::Relaxed);
    }

    /// Subtracts bytes that were expected to move and will not.
    pub(crate) fn expect_less(&self, bytes: u64) {
        // A page may be found to be exempt twice, if somebody else has moved it away meanwhile.
        let less = |total: u64| Some(total.saturating_sub(bytes));
        let _ = self.bytes_total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    pub(crate) fn bytes_migrated(&self) -> u64 {
        self.bytes_migrated.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes_copied(&self) -> u64 {
        self.bytes_copied.load(Ordering::Relaxed)
    }

    /// Announces that this job moves no more pages, so that other jobs may move them.
    pub(crate) fn start_recycling(&self) {
        self.enter(Phase::Recycling, None);
    }

    /// Delivers the report, as the job's last step: its claims and frames have been given back. The
    /// final progress agrees with the report.
    pub(crate) fn finish(&self, report: Report) {
        let migrated = migrated_bytes(&report.runs);
        self.bytes_migrated.store(migrated, Ordering::Relaxed);
        self.bytes_total.fetch_max(migrated, Ordering::Relaxed);
        self.enter(Phase::Finished, Some(report));
    }

    fn enter(&self, phase: Phase, report: Option<Report>) {
        let mut end = lock(&self.end);
        end.report = report;
        let event = end.event.take_if(|_| phase == Phase::Finished);
        // Under the lock: a waiter must not read the phase before this store and go to sleep after
        // the notification below.
        self.phase.store(phase as u8, Ordering::Release);
        // Also under the lock: a thread that has waited for the end finds the descriptor readable.
        // A thread that finds the descriptor readable finds the job finished.
        if let Some(event) = event {
            event.signal();
        }
        drop(end);
        self.changed.notify_all();
    }

    pub(crate) fn wait_until_whole(&self) {
        self.wait_until(|phase| phase == Phase::Finished);
    }

    fn wait_until(&self, reached: impl Fn(Phase) -> bool) {
        let mut end = lock(&self.end);
        while !reached(self.phase()) {
            end = self.changed.wait(end).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Migrating,
            1 => Phase::Recycling,
            _ => Phase::Finished,
        }
    }
}

/// A running migration. Dropping the handle cancels the job and waits until it has ended.
///
/// ```
/// use std::time::Duration;
///
/// use pageleap::{Migration, NodeId, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// # let from = Pool::builder(NodeId(0), 1 << 20).build()?;
/// # let to = Pool::builder(NodeId(0), 1 << 20).build()?;
/// # let region = Region::new(&from, 1 << 20)?;
/// let job = Migration::new().range(&region, 0..region.len(), &to).start()?;
/// while !job.is_finished() {
///     let progress = job.progress();
///     println!("{} of {} bytes", progress.bytes_migrated, progress.bytes_total);
///     std::thread::sleep(Duration::from_millis(10)); // `job.cancel()` would end it here
/// }
/// assert!(job.wait().ended.is_completed());
/// # Ok(()) }
/// ```
#[must_use = "dropping a job cancels it"]
pub struct Job {
    shared: Arc<JobShared>,
    event: Arc<Event>,
}

impl Job {
    /// Starts a job by `start`, and returns its handle.
    ///
    /// # Errors
    /// Those of `start`, and a failure to create the eventfd.
    pub(crate) fn started(
        shared: Arc<JobShared>,
        start: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let event = Event::new().map_err(|errno| Error::call(Call::CreateFile, 0, 0, errno))?;
        let event = Arc::new(event);
        lock(&shared.end).event = Some(event.clone());
        start()?;
        Ok(Job { shared, event })
    }

    /// The progress of the job.
    pub fn progress(&self) -> Progress {
        Progress {
            phase: self.shared.phase(),
            bytes_total: self.shared.bytes_total.load(Ordering::Relaxed),
            bytes_migrated: self.shared.bytes_migrated(),
            bytes_copied: self.shared.bytes_copied(),
        }
    }

    /// Asks the job to stop after the areas under way. Pages that have moved stay moved; the others
    /// stay where they are.
    pub fn cancel(&self) {
        self.shared.ask_to_stop(Stop::Cancelled);
    }

    /// Whether the job has ended, so that [`Job::wait`] would return at once.
    pub fn is_finished(&self) -> bool {
        self.shared.phase() == Phase::Finished
    }

    /// Waits until the job moves no more pages. From then on the pages may be moved again,
    /// discarded or dropped. Meanwhile the job makes its vacated frames usable again; a caller that
    /// needs these frames waits for them.
    pub fn wait_until_moved(&self) {
        self.shared.wait_until(|phase| phase != Phase::Migrating);
    }

    /// Waits until the job has ended.
    pub fn wait_until_finished(&self) {
        self.shared.wait_until_whole();
    }

    /// The report of the job; `None` while it runs.
    pub fn report(&self) -> Option<Report> {
        lock(&self.shared.end).report.clone()
    }

    /// Waits until the job has ended, and returns its report.
    pub fn wait(self) -> Report {
        self.wait_until_finished();
        // This consumes the only handle.
        self.shared.take_report()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.shared.process != std::process::id() {
            return; // a child made by `fork`: the job's threads are not here
        }
        self.cancel();
        self.shared.wait_until_whole();
    }
}

impl AsFd for Job {
    /// A descriptor that becomes readable once the job has ended, for `poll`, `epoll` and io_uring.
    /// Do not read from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job {:?}", self.progress())
    }
}

#[cfg(all(test, shuttle))]
mod tests {
    use std::sync::Arc;

    use super::{JobShared, Phase};
    use crate::schedules::bounded::each_schedule;
    use crate::sync::thread;

    #[test]
    fn shuttle_directed_who_waits_for_a_phase_learns_of_it() {
        each_schedule(2, "a thread waits for a phase that has begun", || {
            let shared = Arc::new(JobShared::new(0));
            let seen = shared.clone();
            let waiting = thread::spawn(move || seen.wait_until(|phase| phase != Phase::Migrating));
            shared.start_recycling();
            waiting.join().unwrap();
        });
    }
}
