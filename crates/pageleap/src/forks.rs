//! Makes `fork` and windows wait for each other (`pthread_atfork`), so that no child finds memory
//! half moved.
//!
//! A child gets the page tables as they are. In a window on memory that no pool owns, the pages of
//! an area lie elsewhere, at addresses that children do not get, so the child would find zeros.
//! Therefore `fork` of the C library waits until all windows are over, and no window begins while
//! it copies.
//!
//! A new mapping of a pool's frames is hidden from children by a second call ([`while_mapping`]).
//! `fork` waits for that call, and no such mapping is made while it copies. Both wait for a bounded
//! time only: a thread that maps memory may not run for a while, or may hold a lock that another
//! handler of the fork needs. Nothing is lost if a child does get such a mapping.
//!
//! The handlers do not run for a bare system call `clone` without CLONE_VM, nor for `_Fork` of the
//! C library. The contract excludes both. `vfork`, `posix_spawn` and threads share the memory, and
//! need no care.

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use pageleap_sys::Errno;

/// Windows hold it for reading, a fork for writing. Taking it touches no heap, because it lies in
/// static memory and waits by futex.
static GATE: RwLock<()> = RwLock::new(());

/// Whether a thread is in `fork`.
static FORKING: AtomicBool = AtomicBool::new(false);

/// How many threads make mappings that are not hidden yet.
static MAPPING: AtomicU32 = AtomicU32::new(0);

/// How long a fork waits for threads that make mappings. These need a few milliseconds.
const FORK_PATIENCE: Duration = Duration::from_secs(1);

/// How long a mapping waits for a fork. While the kernel copies, it keeps mappings away by itself.
const MAPPING_PATIENCE: Duration = Duration::from_millis(100);

/// The guard of the thread in `fork`.
struct Held(UnsafeCell<Option<RwLockWriteGuard<'static, ()>>>);

// SAFETY: only a thread that holds GATE for writing touches the cell, or its child.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

thread_local! {
    /// How many calls of [`before`] by this thread have no call of [`after`] yet. A fork may begin
    /// before the handlers are registered, and end after. A signal handler that interrupts a fork
    /// may fork, too.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

extern "C" fn before() {
    let forks = FORKS.get() + 1;
    FORKS.set(forks);
    if forks > 1 {
        return;
    }
    let guard = GATE.write().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: this thread holds GATE for writing.
    unsafe { *HELD.0.get() = Some(guard) };
    FORKING.store(true, Ordering::SeqCst);
    wait_for(FORK_PATIENCE, || (MAPPING.load(Ordering::SeqCst) == 0).then_some(()));
}

extern "C" fn after() {
    let forks = FORKS.get();
    FORKS.set(forks.saturating_sub(1));
    if forks == 1 {
        FORKING.store(false, Ordering::SeqCst);
        // SAFETY: this thread holds GATE for writing, or is the copy of the thread that does.
        drop(unsafe { (*HELD.0.get()).take() });
    }
}

extern "C" fn after_in_child() {
    // The child has no other thread.
    MAPPING.store(0, Ordering::SeqCst);
    after();
}

/// Repeats `look` until it returns something, for a bounded time.
fn wait_for<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    const LONGEST: Duration = Duration::from_millis(1);
    if let Some(found) = look() {
        return Some(found);
    }
    let (began, mut pause) = (Instant::now(), Duration::from_micros(10));
    while began.elapsed() < patience {
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
        if let Some(found) = look() {
            return Some(found);
        }
    }
    None
}

/// Registers the handlers, once in a process.
///
/// # Errors
/// ENOMEM: the C library has no memory for them.
pub(crate) fn watch() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    static REFUSED: AtomicI32 = AtomicI32::new(0);
    ONCE.call_once(|| {
        // SAFETY: the functions live as long as the process, and do what is allowed in a child of
        // a process with threads: they release a lock.
        let refused =
            unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after_in_child)) };
        REFUSED.store(refused, Ordering::Relaxed);
    });
    match REFUSED.load(Ordering::Relaxed) {
        0 => Ok(()),
        errno => Err(Errno(errno)),
    }
}

/// Keeps forks away until it is dropped.
pub(crate) fn keep_away() -> RwLockReadGuard<'static, ()> {
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that is counted in MAPPING.
struct Counted;

impl Counted {
    fn new() -> Counted {
        MAPPING.fetch_add(1, Ordering::SeqCst);
        Counted
    }

    /// Counts this thread, unless another forks. Count and flag are sequentially consistent, so
    /// either the fork finds this thread counted, or this thread sees the fork.
    fn unless_forking() -> Option<Counted> {
        let counted = Counted::new();
        (!FORKING.load(Ordering::SeqCst)).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // A child that a signal handler has forked meanwhile counts from 0.
        let less = |threads: u32| threads.checked_sub(1);
        let _ = MAPPING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Lets `map` make a mapping and hide it from children, while no thread forks. `map` allocates
/// nothing, because the allocator may be locked for a fork.
pub(crate) fn while_mapping<T>(map: impl FnOnce() -> T) -> T {
    // If a fork takes too long, the mapping is made, and still counts for the next fork.
    let _counted = wait_for(MAPPING_PATIENCE, Counted::unless_forking).unwrap_or_else(Counted::new);
    map()
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::*;

    /// A thread that is about to map memory may hold a lock that another library's handler needs.
    #[test]
    fn a_mapping_waits_for_a_fork_but_not_for_ever() {
        let forking = Instant::now();
        before();
        // A signal handler forks, too.
        before();
        after();
        thread::scope(|scope| {
            let mapping = scope.spawn(|| while_mapping(Instant::now));
            thread::sleep(MAPPING_PATIENCE / 4);
            let ends = Instant::now();
            after();
            let mapped = mapping.join().unwrap();
            // Where threads have waited for a CPU, its patience may have ended first.
            assert!(mapped >= ends || mapped - forking > MAPPING_PATIENCE, "it has not waited");
            before();
            scope.spawn(|| while_mapping(|| ())).join().unwrap();
            after();
        });
        // Nor does a fork that a signal handler makes in the middle of a mapping.
        while_mapping(|| {
            before();
            after();
        });
    }
}
