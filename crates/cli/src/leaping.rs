//! Waiting for a job, and the memcpy that jobs are compared with.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::time::Duration;

use pageleap::Job;

/// Steps of the memcpy that migrations are compared with.
const MEMCPY_STEP: usize = 16 << 20;

/// Waits for the job for at most `time`.
pub fn finished_within(job: &Job, time: Duration) -> bool {
    let mut poll = libc::pollfd { fd: job.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd, whose descriptor is open as long as the job is borrowed. On any
    // error the job itself is asked.
    unsafe { libc::poll(&mut poll, 1, time.as_millis() as libc::c_int) };
    job.is_finished()
}

/// Copies `len` bytes in one thread, in steps of 16 MB.
///
/// # Safety
/// Both ranges have `len` mapped bytes and do not overlap. Nobody else uses `to`. Where others
/// write to `from` meanwhile, the copy must not be looked at.
pub unsafe fn memcpy(to: NonNull<u8>, from: NonNull<u8>, len: usize) {
    for at in (0..len).step_by(MEMCPY_STEP) {
        let step = MEMCPY_STEP.min(len - at);
        // SAFETY: the caller's promise; the C library's function is no code that the compiler
        // reasons about.
        unsafe { libc::memcpy(to.as_ptr().add(at).cast(), from.as_ptr().add(at).cast(), step) };
    }
}
