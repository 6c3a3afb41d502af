//! Shuttle's primitives, and a clock that advances with each reading, so that a schedule repeats
//! with all its time-outs.

use std::cell::Cell;
use std::ops::Add;
use std::time::Duration;

pub(crate) use shuttle::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use shuttle::sync::{Barrier, Condvar, Mutex, MutexGuard};

/// Shuttle's threads, with the interface of ours. They always start.
pub(crate) mod thread {
    use std::ffi::CStr;

    use pageleap_sys::Errno;

    pub(crate) use shuttle::thread::{spawn, yield_now};

    /// Lets the others go on, also under a scheduler that would let this thread go on for ever.
    pub(crate) fn sleep(_: std::time::Duration) {
        yield_now();
    }

    pub(crate) struct Scope<'scope, 'env: 'scope>(&'scope shuttle::thread::Scope<'scope, 'env>);

    impl<'scope> Scope<'scope, '_> {
        pub(crate) fn start(
            &self,
            _: &'static CStr,
            body: impl FnOnce() + Send + 'scope,
        ) -> Result<(), Errno> {
            drop(self.0.spawn(body));
            Ok(())
        }
    }

    /// Shuttle's scope wakes the thread that has opened it when the last of the others ends, even
    /// if it waits for something else. So that thread does nothing but wait, and one more thread
    /// runs the body.
    pub(crate) fn scope<'env>(body: impl for<'scope> FnOnce(&Scope<'scope, 'env>) + Send + 'env) {
        shuttle::thread::scope(|scope| drop(scope.spawn(|| body(&Scope(scope)))));
    }

    pub(crate) fn start(
        _: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), Errno> {
        drop(spawn(body));
        Ok(())
    }
}

/// A static that lives as long as one execution of a test.
macro_rules! process_wide {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $new:expr) => {
        shuttle::lazy_static! { $(#[$attribute])* pub(crate) static ref $name: $type = $new; }
    };
}
pub(crate) use process_wide;

/// Stands in for the kernel's half of a futex.
pub(super) struct Kernel {
    lock: Mutex<()>,
    woken: Condvar,
}

impl Kernel {
    pub(super) const fn new() -> Self {
        Kernel { lock: Mutex::new(()), woken: Condvar::new() }
    }

    /// Compares and sleeps in one step with respect to [`Kernel::wake_all`].
    pub(super) fn wait(&self, word: &AtomicU32, expected: u32) {
        let lock = super::lock(&self.lock);
        if word.load(Ordering::SeqCst) == expected {
            drop(self.woken.wait(lock));
        }
    }

    pub(super) fn wake_all(&self, _word: &AtomicU32) {
        let _lock = super::lock(&self.lock);
        self.woken.notify_all();
    }
}

/// A moment of a clock that advances by a millisecond with each reading. It belongs to the
/// operating system's thread, on which shuttle runs all threads of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub(crate) fn now() -> Self {
        thread_local!(static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) });
        CLOCK.set(CLOCK.get() + Duration::from_millis(1));
        Instant(CLOCK.get())
    }

    pub(crate) fn elapsed(self) -> Duration {
        Instant::now().0.saturating_sub(self.0)
    }

    pub(crate) fn checked_add(self, more: Duration) -> Option<Self> {
        self.0.checked_add(more).map(Instant)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, more: Duration) -> Self {
        Instant(self.0 + more)
    }
}

/// Nanoseconds of that clock.
pub(crate) fn monotonic_ns() -> u64 {
    Instant::now().0.as_nanos() as u64
}
