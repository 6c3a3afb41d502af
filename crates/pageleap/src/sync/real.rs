//! The primitives of the standard library and the kernel.

pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Barrier, Mutex, MutexGuard};
use std::sync::{LockResult, WaitTimeoutResult};
use std::time::Duration;
pub(crate) use std::time::Instant;

/// A condition variable of the standard library that makes no system call while nobody waits. The
/// awaited condition has to change under the mutex that the waiting threads pass.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    inner: std::sync::Condvar,
    /// Threads that wait, or have just woken. It grows under the mutex. So a thread that has held
    /// the mutex for its change sees every thread that has not seen the change.
    waiting: AtomicUsize,
}

impl Condvar {
    pub(crate) const fn new() -> Condvar {
        Condvar { inner: std::sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.inner.wait(guard);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let waited = self.inner.wait_timeout(guard, time);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        waited
    }

    pub(crate) fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_all();
        }
    }
}

/// Threads that can start when memory is short (see [`pageleap_sys::Thread`]), and the functions of
/// the standard library that the library uses.
pub(crate) mod thread {
    use std::ffi::CStr;
    use std::marker::PhantomData;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use pageleap_sys::{Errno, Thread};

    pub(crate) use std::thread::{sleep, yield_now};

    /// Starts a detached thread. `body` must not unwind.
    pub(crate) fn start(
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), Errno> {
        Thread::start(name, body).map(Thread::detach)
    }

    /// Threads that may borrow values which outlive `'scope`, because [`scope`] waits for the end
    /// of all threads.
    pub(crate) struct Scope<'scope, 'env: 'scope> {
        threads: Mutex<Vec<Thread>>,
        panicked: Arc<AtomicBool>,
        // Invariant in both lifetimes, like the standard library's scope.
        scope: PhantomData<&'scope mut &'scope ()>,
        env: PhantomData<&'env mut &'env ()>,
    }

    impl<'scope> Scope<'scope, '_> {
        pub(crate) fn start(
            &'scope self,
            name: &'static CStr,
            body: impl FnOnce() + Send + 'scope,
        ) -> Result<(), Errno> {
            let panicked = self.panicked.clone();
            let body = move || {
                if catch_unwind(AssertUnwindSafe(body)).is_err() {
                    panicked.store(true, Ordering::Relaxed);
                }
            };
            let mut threads = super::super::lock(&self.threads);
            // The list gets room first, because a thread that runs has to be in it.
            threads.reserve(1);
            let body: Box<dyn FnOnce() + Send + 'scope> = Box::new(body);
            // SAFETY: only the lifetime changes. The thread is joined before `scope` returns or
            // unwinds, so before `'scope` ends, and by then it has dropped what it borrowed.
            let body: Box<dyn FnOnce() + Send> = unsafe { std::mem::transmute(body) };
            threads.push(Thread::start(name, body)?);
            Ok(())
        }
    }

    impl Scope<'_, '_> {
        fn join_all(&self) {
            // One at a time, because a thread may start others.
            while let Some(thread) = { super::super::lock(&self.threads).pop() } {
                thread.join();
            }
        }
    }

    /// Runs `body`, then waits for all threads that were started in the scope.
    ///
    /// # Panics
    /// If `body` or one of the threads has panicked.
    pub(crate) fn scope<'env, F>(body: F)
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>),
    {
        let scope = Scope {
            threads: Mutex::default(),
            panicked: Arc::default(),
            scope: PhantomData,
            env: PhantomData,
        };
        let ended = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        scope.join_all();
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
        assert!(!scope.panicked.load(Ordering::Relaxed), "a thread has panicked");
    }
}

/// A static that the whole process shares. A checker makes a new one for each execution of a test.
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

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::thread;

    #[test]
    fn a_scope_waits_for_its_threads_and_passes_panics_on() {
        let count = AtomicU32::new(0);
        let slowly = || {
            thread::sleep(Duration::from_millis(5));
            count.fetch_add(1, Ordering::Relaxed);
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                // From a thread as well.
                scope.start(c"outer", || scope.start(c"inner", slowly).unwrap()).unwrap();
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 3);

        let of_the_body = AssertUnwindSafe(|| {
            thread::scope(|scope| {
                scope.start(c"slow", slowly).unwrap();
                resume_unwind(Box::new("the body has panicked"));
            })
        });
        assert!(catch_unwind(of_the_body).is_err());
        assert_eq!(count.load(Ordering::Relaxed), 4, "it has not waited");
        let of_a_thread = AssertUnwindSafe(|| {
            thread::scope(|scope| {
                scope.start(c"one", || resume_unwind(Box::new("a thread"))).unwrap()
            })
        });
        assert!(catch_unwind(of_a_thread).is_err());
    }
}
