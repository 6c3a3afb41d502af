//! Loom's primitives. Time does not pass.

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// The functions of threads that the protocol uses.
pub(crate) mod thread {
    /// Takes no time.
    pub(crate) fn sleep(_: std::time::Duration) {}
}

/// Replaces the kernel's half of a futex.
pub(super) struct Kernel {
    lock: Mutex<()>,
    woken: Condvar,
}

impl Kernel {
    pub(super) fn new() -> Self {
        Kernel { lock: Mutex::new(()), woken: Condvar::new() }
    }

    /// Compares and sleeps in one step with respect to [`Kernel::wake_all`].
    pub(super) fn wait(&self, word: &AtomicU32, expected: u32) {
        let mut lock = super::lock(&self.lock);
        while word.load(Ordering::Relaxed) == expected {
            lock = self.woken.wait(lock).unwrap();
        }
    }

    pub(super) fn wake_all(&self, _word: &AtomicU32) {
        let _lock = super::lock(&self.lock);
        self.woken.notify_all();
    }
}

/// Always the same moment.
pub(crate) fn monotonic_ns() -> u64 {
    0
}
