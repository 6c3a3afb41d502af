//! Waiting for other threads, and stopping them.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long [`soon`] waits: far longer than anything takes that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until another thread has made the condition true. Returns false after [`PATIENCE`].
pub fn soon(mut condition: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !condition() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        rest();
    }
    true
}

/// Sleeps between two polls. Where CPUs are emulated, a thread that polls without a pause keeps the
/// others from running.
pub fn rest() {
    std::thread::sleep(Duration::from_micros(50));
}

/// Sets the flag when dropped. Threads that poll the flag end even if a check fails.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
