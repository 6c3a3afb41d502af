//! Keeps `fork` and windows apart.
//!
//! A child gets the page tables as they are. In a window the pages of an area lie elsewhere, at
//! addresses that children do not get: the child would find zeros. So `fork` of the C library waits
//! until all windows are over, and no window begins while it copies (`pthread_atfork`).
//!
//! A bare system call `clone` without CLONE_VM passes by, and so does `_Fork` of the C library,
//! which runs no handlers. The contract excludes them. `vfork`, `posix_spawn` and threads share the
//! memory, and need no care.

use std::cell::{Cell, UnsafeCell};
use std::sync::{Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pageleap_sys::Errno;

/// Windows hold it for reading, a fork for writing. It lies in static memory, and waits by futex:
/// taking it touches no heap.
static GATE: RwLock<()> = RwLock::new(());

/// The guard of the thread that forks.
struct Held(UnsafeCell<Option<RwLockWriteGuard<'static, ()>>>);

// SAFETY: only a thread that holds GATE for writing touches the cell, or its child.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

thread_local! {
    /// Whether this thread has made [`before`] run: a fork may begin before the handlers are
    /// registered, and end after.
    static FORKS: Cell<bool> = const { Cell::new(false) };
}

extern "C" fn before() {
    let guard = GATE.write().unwrap_or_else(PoisonError::into_inner);
    FORKS.set(true);
    // SAFETY: this thread holds GATE for writing.
    unsafe { *HELD.0.get() = Some(guard) };
}

extern "C" fn after() {
    if FORKS.replace(false) {
        // SAFETY: this thread holds GATE for writing, or is the copy of the thread that does.
        drop(unsafe { (*HELD.0.get()).take() });
    }
}

/// Registers the handlers, once in a process.
///
/// # Errors
/// ENOMEM: the C library has no memory for them.
pub(super) fn watch() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    static REFUSED: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);
    ONCE.call_once(|| {
        // SAFETY: the functions live as long as the process, and do what is allowed in a child of
        // a process with threads: they release a lock.
        let refused = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
        REFUSED.store(refused, std::sync::atomic::Ordering::Relaxed);
    });
    match REFUSED.load(std::sync::atomic::Ordering::Relaxed) {
        0 => Ok(()),
        errno => Err(Errno(errno)),
    }
}

/// Keeps forks away until it is dropped.
pub(super) fn keep_away() -> RwLockReadGuard<'static, ()> {
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}
