//! The primitives of the standard library and the kernel.

pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;
pub(crate) use std::time::Instant;

/// A static that the whole process shares; a checker makes a new one for each execution of a test.
macro_rules! process_wide {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $new:expr) => {
        $(#[$attribute])* pub(crate) static $name: $type = $new;
    };
}
pub(crate) use process_wide;

/// The kernel's half of a futex.
pub(super) struct Kernel;

impl Kernel {
    pub(super) const fn new() -> Self {
        Kernel
    }

    /// Sleeps until woken, unless the word is no longer as expected. May return early.
    pub(super) fn wait(&self, word: &AtomicU32, expected: u32) {
        pageleap_sys::futex_wait(word, expected);
    }

    pub(super) fn wake_all(&self, word: &AtomicU32) {
        pageleap_sys::futex_wake_all(word);
    }
}

/// Nanoseconds of the monotonic clock. Async-signal-safe (a vDSO read).
pub(crate) fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel (or the vDSO) writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
