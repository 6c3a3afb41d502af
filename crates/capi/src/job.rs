//! Jobs: starting, waiting, progress, cancelling.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use pageleap::{Error, Job, Migration, Phase};

use crate::boundary::{each, free, give, handle, nothing_yet, read, value, write};
use crate::migration::{pageleap_job_options, pageleap_range, with_options};
use crate::placement::destination;
use crate::region::bytes;
use crate::report::pageleap_report;
use crate::status::pageleap_status;

/// A job that moves pages, or has ended.
pub struct pageleap_job(pub(crate) Job);

/// Starts a job that moves all these ranges while the program goes on. The call returns at once,
/// unless the job needs frames that another job is still recycling. `options` may be NULL. If
/// the call fails, nothing has changed.
///
/// At least one range is needed. All regions and pools must have the same page size (else
/// PAGELEAP_BAD_ARGUMENT). Ranges must not overlap each other or those of another job that still
/// moves them (PAGELEAP_RANGE_BUSY), nor be empty (PAGELEAP_BAD_RANGE).
///
/// The job's threads inherit scheduling policy, nice value, affinity, memory policy and cgroup from
/// the calling thread, as all threads do. The library changes some of these, for its own threads
/// only. They run on those CPUs of the destination's node on which the calling thread may run; if
/// there are none, they stay on the calling thread's CPUs, and the report has a warning. They have
/// a memory policy of their own only where page tables are to lie on a node. Their cgroup stays, so
/// a quota of CPU time (cpu.max) that runs out holds up the job, and with it the threads that wait
/// for the job.
///
/// If the calling thread ranks below ordinary threads (SCHED_IDLE, SCHED_BATCH or a nice value
/// above 0), only copies for which no thread waits are made at that low priority. The job does
/// everything else at ordinary priority, because the threads of the program that wait for it would
/// otherwise wait behind others. If the process may not raise its threads (CAP_SYS_NICE, or an
/// RLIMIT_NICE of 20), the report has a warning (pageleap_report_warning()), and waits may take as
/// long as others keep the job from the CPU.
///
/// While threads wait for a page, the job runs before ordinary threads (SCHED_FIFO) if it may
/// (CAP_SYS_NICE or RLIMIT_RTPRIO); where an area is copied meanwhile, for at most about half of
/// the time. A real-time policy of the calling thread stays as it is. A thread with SCHED_DEADLINE
/// starts no job unless it has SCHED_FLAG_RESET_ON_FORK (PAGELEAP_NO_THREAD).
///
/// Pools may be freed while the job runs; freeing a region ends the job. The job is freed with
/// pageleap_job_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_start(
    ranges: *const pageleap_range,
    range_count: usize,
    options: *const pageleap_job_options,
    job: *mut *mut pageleap_job,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(job) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let migration = unsafe { migration(ranges, range_count, options) }?;
        // SAFETY: forwarded to the caller.
        unsafe { give(job, "job", || Ok(pageleap_job(migration.start()?))) }
    })
}

/// Moves all these ranges in the calling thread, and gives the report, which the caller frees with
/// pageleap_report_free(). The call does what pageleap_job_start(), pageleap_job_wait() and
/// pageleap_job_free() do, but it starts no thread for the job and waits for none, which saves a
/// good part of the time of a small job. Arguments and errors are those of pageleap_job_start().
/// `report` may be NULL. If the job was stopped, or could not move some pages, the call succeeds
/// and the report says so.
///
/// While the calling thread runs the job, all signals but those of faults are blocked in it,
/// because a handler that touches a closed page would wait for the thread in which it runs.
/// pageleap_thread_is_ours() is true for the thread meanwhile. The thread stays on its CPUs. When
/// the call returns, its signal mask, its priority and its memory policy are as before.
///
/// In three cases the library starts a thread that runs the job, and the calling thread only waits:
///
/// - Several threads copy. The field threads of pageleap_job_options says how many. 0 means several
///   if the destination has eight CPUs or more and the ranges have 4 MB or more.
/// - The calling thread ranks below ordinary threads (SCHED_IDLE, SCHED_BATCH or a nice value above
///   0), so that the job would have to raise it; or it has SCHED_DEADLINE.
/// - The stack of the calling thread lies within 1 MB of the pages, because the thread needs its stack
///   while pages are closed.
///
/// Nobody has a handle to cancel the job; timeout_ns bounds it. The job waits for guards as long as
/// pin_patience_ns says; it does so in vain for a guard that only the calling thread would drop.
/// Until the call returns, no thread may free the regions, pools and context that it was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_run(
    ranges: *const pageleap_range,
    range_count: usize,
    options: *const pageleap_job_options,
    report: *mut *mut pageleap_report,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(report) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let done = unsafe { migration(ranges, range_count, options) }?.run()?;
        if report.is_null() {
            return Ok(());
        }
        // SAFETY: forwarded to the caller.
        unsafe { give(report, "report", || Ok(pageleap_report::new(done))) }
    })
}

/// The migration that the options and ranges of a C program describe.
///
/// # Safety
/// The pointers are those of [`pageleap_job_start`], and their handles are not freed while the
/// migration is used.
unsafe fn migration<'a>(
    ranges: *const pageleap_range,
    range_count: usize,
    options: *const pageleap_job_options,
) -> Result<Migration<'a>, Error> {
    let mut migration = Migration::new();
    let add = |range: &pageleap_range| {
        // SAFETY: forwarded to the caller.
        let (region, pool) =
            unsafe { (&handle(range.region, "region")?.0, &handle(range.pool, "pool")?.0) };
        let length = match (range.offset, range.length) {
            (0, 0) => region.len(),
            (_, length) => length,
        };
        // SAFETY: forwarded to the caller.
        let to = unsafe { destination(pool, range.place) }?;
        let before = std::mem::take(&mut migration);
        migration = before.range(region, bytes(region, range.offset, length)?, to);
        Ok(())
    };
    // SAFETY: forwarded to the caller.
    unsafe { each(ranges, range_count, "ranges", add) }?;
    // SAFETY: forwarded to the caller.
    match unsafe { read(options) }? {
        // SAFETY: forwarded to the caller.
        Some(options) => unsafe { with_options(migration, &options) },
        None => Ok(migration),
    }
}

/// Whether the calling thread works for a job or fills a pool: it is a thread of the library, or a
/// thread of the program that runs a job at the moment (pageleap_job_run()).
///
/// An allocator whose memory is a region asks this, and gives such threads memory from elsewhere,
/// because their allocations must not lie in pages that they are moving. Other calls allocate in
/// the program's thread, for which this is false: the program itself knows that it is in such a
/// call.
///
/// The function takes no lock and no memory, makes no system call, and leaves the thread's last error
/// as it is: it may be called from malloc() and from a signal handler.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_thread_is_ours() -> bool {
    pageleap::thread_is_ours()
}

/// The phase of a job.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_phase {
    /// The job moves pages.
    PAGELEAP_MIGRATING = 0,
    /// Pages have moved, and may be moved again or discarded. The job makes vacated frames, which
    /// the pages have left, ready for use again.
    PAGELEAP_RECYCLING = 1,
    /// The job has ended, and has its report.
    PAGELEAP_FINISHED = 2,
}

/// How far a job is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_progress {
    /// sizeof(pageleap_progress).
    pub size: usize,
    /// The phase.
    pub phase: pageleap_phase,
    /// Bytes that have to move.
    pub bytes_total: u64,
    /// Bytes that have moved.
    pub bytes_migrated: u64,
    /// Bytes copied so far, including copies that are worthless because the bytes were written
    /// meanwhile.
    pub bytes_copied: u64,
}
grows!(pageleap_progress, 40, bytes_copied);

fn progress_of(job: &Job) -> pageleap_progress {
    let now = job.progress();
    pageleap_progress {
        size: size_of::<pageleap_progress>(),
        phase: match now.phase {
            Phase::Migrating => pageleap_phase::PAGELEAP_MIGRATING,
            Phase::Recycling => pageleap_phase::PAGELEAP_RECYCLING,
            Phase::Finished => pageleap_phase::PAGELEAP_FINISHED,
        },
        bytes_total: now.bytes_total,
        bytes_migrated: now.bytes_migrated,
        bytes_copied: now.bytes_copied,
    }
}

/// Fills in how far a job is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_progress(
    job: *const pageleap_job,
    progress: *mut pageleap_progress,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { write(progress, progress_of(&handle(job, "job")?.0)) }
    })
}

/// Asks a job to stop once the areas under way have moved, and returns at once. Moved pages keep
/// their new frames, all others their old ones, and all are whole.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_cancel(job: *const pageleap_job) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { handle(job, "job") }?.0.cancel();
        Ok(())
    })
}

/// Whether a job has ended, so that pageleap_job_wait() returns at once. False for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_is_finished(job: *const pageleap_job) -> bool {
    // SAFETY: forwarded to the caller.
    value(false, || Ok(unsafe { handle(job, "job") }?.0.is_finished()))
}

/// A descriptor that becomes readable when the job has ended: for poll, epoll, io_uring. It
/// belongs to the job: do not read from it, and do not close it. -1 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_fd(job: *const pageleap_job) -> c_int {
    // SAFETY: forwarded to the caller.
    value(-1, || Ok(unsafe { handle(job, "job") }?.0.as_fd().as_raw_fd()))
}

/// Waits until a job moves no more pages. From then on they may be moved again, discarded or
/// freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_wait_until_moved(
    job: *const pageleap_job,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { handle(job, "job") }?.0.wait_until_moved();
        Ok(())
    })
}

/// Waits until a job has ended, and gives its report, which the caller frees with
/// pageleap_report_free(). `report` may be NULL. If the job was stopped, or could not move some
/// pages, the call succeeds and the report says so. Any number of threads may wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_wait(
    job: *const pageleap_job,
    report: *mut *mut pageleap_report,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(report) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let job = &unsafe { handle(job, "job") }?.0;
        job.wait_until_finished();
        if report.is_null() {
            return Ok(());
        }
        let make = || Ok(pageleap_report::new(job.report().expect("a finished job has a report")));
        // SAFETY: forwarded to the caller.
        unsafe { give(report, "report", make) }
    })
}

/// Waits as pageleap_job_wait() does, and calls `callback` with the progress from this thread:
/// at once, every `interval_ms` milliseconds (at least 1), and at the end. If the callback
/// returns anything but 0, the job is cancelled. It may call this library, but must not free the
/// job, throw or longjmp. `callback` may be NULL. The structure that the callback gets is as
/// large as its size says, which may be less than in a newer header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_wait_with_progress(
    job: *const pageleap_job,
    interval_ms: u32,
    callback: Option<
        unsafe extern "C" fn(data: *mut c_void, progress: *const pageleap_progress) -> c_int,
    >,
    data: *mut c_void,
    report: *mut *mut pageleap_report,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(report) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let of = &unsafe { handle(job, "job") }?.0;
        loop {
            let finished = of.is_finished();
            // SAFETY: the program's function, called as documented.
            let asks_to_stop =
                callback.is_some_and(|callback| unsafe { callback(data, &progress_of(of)) } != 0);
            if asks_to_stop {
                of.cancel();
            }
            if finished {
                break;
            }
            let mut wanted =
                libc::pollfd { fd: of.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let interval_ms = interval_ms.clamp(1, i32::MAX as u32);
            // A signal ends `poll` early (EINTR), which only makes the next call of the callback
            // come early. SAFETY: the array has one element.
            let woken = unsafe { libc::poll(&mut wanted, 1, interval_ms as c_int) };
            let refused = std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
            if woken > 0 || woken < 0 && refused {
                look_now_and_then(of, interval_ms);
            }
        }
        Ok(())
    })
    .and_then(|| {
        // SAFETY: forwarded to the caller.
        unsafe { pageleap_job_wait(job, report) }
    })
}

/// Waits for `ms` milliseconds, or until the job has ended, without its descriptor. `poll` fails if
/// the process may open no file at all (RLIMIT_NOFILE), and is of no use if other code has closed
/// the descriptor.
fn look_now_and_then(job: &Job, ms: u32) {
    let end = Instant::now() + Duration::from_millis(ms.into());
    while !job.is_finished() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl pageleap_status {
    /// Calls `next` if this is PAGELEAP_OK.
    fn and_then(self, next: impl FnOnce() -> pageleap_status) -> pageleap_status {
        if self == pageleap_status::PAGELEAP_OK { next() } else { self }
    }
}

/// Frees a job; NULL is allowed. If the job has not ended, it is cancelled, and the call waits
/// until its ranges are whole. From the call on no thread may use the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_job_free(job: *mut pageleap_job) {
    // SAFETY: forwarded to the caller.
    unsafe { free(job) };
}
