//! The synchronisation primitives that the library uses, in one place, so that a checker can
//! replace them.
//!
//! * **loom** (`--cfg loom`) runs a test of the protocol under all interleavings up to a bound
//!   (`LOOM_MAX_PREEMPTIONS`). Loom also checks memory orderings, with one exception: its `SeqCst`
//!   is only acquire-release, so that under loom a change always wakes all sleepers.
//! * **shuttle** (`--cfg shuttle`) runs whole jobs under long random schedules. All its accesses
//!   are sequentially consistent. Unlike loom, shuttle can show that [`WaitWord::set_and_wake`]
//!   overlooks no sleeper.
//!
//! Claims that neither can show rest on the argument in the code, and on the stress oracle.

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

/// A `const fn`. Under loom it is not `const`, because loom's primitives cannot be made at compile
/// time.
macro_rules! const_unless_loom {
    ($(#[$attribute:meta])* $visibility:vis fn $($function:tt)*) => {
        #[cfg(not(loom))]
        $(#[$attribute])* $visibility const fn $($function)*
        #[cfg(loom)]
        $(#[$attribute])* $visibility fn $($function)*
    };
}
pub(crate) use const_unless_loom;

/// An array whose elements are made one by one: at compile time, except under loom.
macro_rules! array_of {
    ($value:expr; $len:ident) => {{
        #[cfg(not(loom))]
        let array = [const { $value }; $len];
        #[cfg(loom)]
        let array = std::array::from_fn::<_, $len, _>(|_| $value);
        array
    }};
}
pub(crate) use array_of;

/// A cell whose accesses the caller orders. Loom's cell, with the same interface, checks that the
/// caller does.
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

/// Takes a lock, also a poisoned one. No panic can leave the data under the locks of this library
/// half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A value that was found a moment ago. It answers questions that many jobs ask one after the
/// other.
///
/// It never blocks: while another thread uses it, it counts as empty. In a child that was forked at
/// such a moment it stays empty.
pub(crate) struct Fresh<T>(std::sync::Mutex<Option<(T, u64)>>);

impl<T> Fresh<T> {
    /// For how long a value counts, in nanoseconds.
    pub(crate) const NS: u64 = 10_000_000;

    pub(crate) const fn new() -> Self {
        Fresh(std::sync::Mutex::new(None))
    }

    /// The result of `of` for the last value, unless that is too old by now.
    pub(crate) fn get<U>(&self, of: impl FnOnce(&T) -> U) -> Option<U> {
        let last = self.0.try_lock().ok()?;
        let (value, at_ns) = last.as_ref()?;
        (monotonic_ns().saturating_sub(*at_ns) < Self::NS).then(|| of(value))
    }

    /// Stores a value that was found at `at_ns`, or later.
    pub(crate) fn put(&self, value: T, at_ns: u64) {
        if let Ok(mut last) = self.0.try_lock() {
            *last = Some((value, at_ns));
        }
    }
}

/// A word on which threads sleep until it changes: a futex with 64 bits, so that values need not
/// repeat. The kernel compares 32 bits, which count the changes. In a checker a condition variable
/// replaces the kernel, so that a lost wake-up is found as a deadlock.
pub(crate) struct WaitWord {
    word: AtomicU64,
    /// Counts changes, modulo 2^32.
    changes: AtomicU32,
    /// Threads that sleep, or are about to sleep.
    sleepers: AtomicU32,
    kernel: Kernel,
}

impl WaitWord {
    const_unless_loom! {
        pub(crate) fn new(value: u64) -> Self {
            WaitWord {
                word: AtomicU64::new(value),
                changes: AtomicU32::new(0),
                sleepers: AtomicU32::new(0),
                kernel: Kernel::new(),
            }
        }
    }

    /// Makes the word as new. For a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.store(0, Ordering::Relaxed);
        self.sleepers.store(0, Ordering::Relaxed);
    }

    /// Reads the word, with acquire order.
    pub(crate) fn load(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// Replaces `from` by `to`, with release order, and returns whether the word was `from`. Wakes
    /// no sleeper. Acquires nothing: a caller that needs to see the writes before `from` has loaded
    /// it, and values do not repeat.
    pub(crate) fn exchange(&self, from: u64, to: u64) -> bool {
        self.word.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Replaces the value, with release order, and wakes all sleepers. Async-signal-safe.
    pub(crate) fn set_and_wake(&self, to: u64) {
        self.word.swap(to, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes all sleepers, after a change. Async-signal-safe.
    ///
    /// SeqCst, like the announcement of a sleeper. One thread changes the word and then looks for
    /// sleepers; the other announces itself and then looks at the word. At least one of them sees
    /// the other's first step.
    pub(crate) fn wake(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        // Under loom's `SeqCst` the announcement may be overlooked.
        if cfg!(loom) || self.sleepers() > 0 {
            self.kernel.wake_all(&self.changes);
        }
    }

    /// Sleeps while the word is `seen`; may return early. Async-signal-safe.
    pub(crate) fn wait_while(&self, seen: u64) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // The count is read before the word: if the word changes afterwards, the kernel finds
        // another count and does not let the thread sleep.
        let changes = self.changes.load(Ordering::SeqCst);
        if self.word.load(Ordering::SeqCst) == seen {
            self.kernel.wait(&self.changes, changes);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Threads that sleep on the word, are about to, or have just woken.
    pub(crate) fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod fresh_tests {
    use super::*;

    #[test]
    fn a_value_counts_for_a_moment() {
        let fresh = Fresh::new();
        assert_eq!(fresh.get(|seen: &u8| *seen), None);
        let now_ns = monotonic_ns() + Fresh::<u8>::NS;
        fresh.put(1, now_ns);
        assert_eq!(fresh.get(|seen| *seen), Some(1));
        fresh.put(2, now_ns - 2 * Fresh::<u8>::NS);
        assert_eq!(fresh.get(|seen| *seen), None);
    }
}

#[cfg(all(test, shuttle))]
mod tests {
    use std::sync::Arc;

    use super::{WaitWord, thread};
    use crate::schedules::bounded::each_schedule;

    #[test]
    fn shuttle_directed_who_sleeps_on_a_word_wakes_when_it_changes() {
        each_schedule(2, "a thread sleeps on a word that has changed", || {
            let word = Arc::new(WaitWord::new(0));
            let seen = word.clone();
            let sleeper = thread::spawn(move || {
                while seen.load() == 0 {
                    seen.wait_while(0);
                }
            });
            word.set_and_wake(1);
            sleeper.join().unwrap();
        });
    }
}
