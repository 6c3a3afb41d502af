//! The synchronisation primitives that the library uses, in one place, so that a checker can stand
//! in for them.
//!
//! * **loom** (`--cfg loom`) runs a test of the protocol under all interleavings up to a bound
//!   (`LOOM_MAX_PREEMPTIONS`). It also checks memory orderings, with one exception: its `SeqCst` is
//!   only acquire-release, so there everybody is woken always.
//! * **shuttle** (`--cfg shuttle`) runs whole jobs under long random schedules. All its accesses
//!   are sequentially consistent; that nobody is overlooked in [`WaitWord::set_and_wake`] is what
//!   it can show and loom cannot.
//!
//! What neither can show rests on the argument that the code gives, and on the stress oracle.

#[cfg(not(any(loom, shuttle)))]
mod real;
#[cfg(loom)]
mod with_loom;
#[cfg(shuttle)]
mod with_shuttle;

#[cfg(not(any(loom, shuttle)))]
use real as primitives;
#[cfg(loom)]
use with_loom as primitives;
#[cfg(shuttle)]
use with_shuttle as primitives;

use primitives::Kernel;
pub(crate) use primitives::*;

/// A cell whose accesses the caller orders, with the interface of loom's, which checks that it
/// does.
#[cfg(not(loom))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// Locks, also when another thread panicked while it held the lock: what the locks here protect is
/// updated by steps that cannot leave it half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A word on which threads can sleep until it changes: a futex with 64 bits, so that values need
/// not repeat. The kernel compares 32, which count the changes. In a checker a condition variable
/// stands in for the kernel, so that a sleeper whom nobody wakes is found as a deadlock.
pub(crate) struct WaitWord {
    word: AtomicU64,
    /// Counts changes, modulo 2^32.
    changes: AtomicU32,
    /// Threads that sleep, or are about to.
    sleepers: AtomicU32,
    kernel: Kernel,
}

impl WaitWord {
    #[cfg(not(loom))]
    pub(crate) const fn new(value: u64) -> Self {
        WaitWord {
            word: AtomicU64::new(value),
            changes: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            kernel: Kernel::new(),
        }
    }

    #[cfg(loom)]
    pub(crate) fn new(value: u64) -> Self {
        WaitWord {
            word: AtomicU64::new(value),
            changes: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            kernel: Kernel::new(),
        }
    }

    /// As new, for a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.store(0, Ordering::Relaxed);
        self.sleepers.store(0, Ordering::Relaxed);
    }

    /// Reads it, with acquire order.
    pub(crate) fn load(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// Replaces `from` by `to`, releasing what came before, and says whether it was `from`. Wakes
    /// nobody. Acquires nothing: a caller that needs to see what came before `from` has loaded it,
    /// and values do not repeat.
    pub(crate) fn exchange(&self, from: u64, to: u64) -> bool {
        self.word.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Replaces the value, releasing what came before, and wakes all sleepers. Async-signal-safe.
    pub(crate) fn set_and_wake(&self, to: u64) {
        self.word.swap(to, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes all sleepers, after a change. SeqCst, like the sleeper's announcement: of "changed the
    /// word, then looked for sleepers" and "announced itself, then looked at the word" at least one
    /// sees the other. Async-signal-safe.
    pub(crate) fn wake(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        // Loom's `SeqCst` may overlook them.
        if cfg!(loom) || self.sleepers() > 0 {
            self.kernel.wake_all(&self.changes);
        }
    }

    /// Sleeps until the word is (or may be) no longer `seen`; may return early. Async-signal-safe.
    pub(crate) fn wait_while(&self, seen: u64) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Before the word: if it changes after that, the kernel finds another count and does not
        // sleep.
        let changes = self.changes.load(Ordering::SeqCst);
        if self.word.load(Ordering::SeqCst) == seen {
            self.kernel.wait(&self.changes, changes);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Threads asleep on it, or just about to be, or just awake.
    pub(crate) fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::SeqCst)
    }
}
