//! Process-private futexes (`futex(2)`): a writer sleeps on a futex while its area is closed.

use std::sync::atomic::AtomicU32;

/// Sleeps while `word` is `expected`, until [`futex_wake_all`] wakes the thread (FUTEX_WAIT, Linux
/// 2.6.22 for private futexes).
///
/// The call returns at once when `word` has another value. It may also return without a reason, so
/// the caller checks the word again; errors are not reported for the same reason.
/// Async-signal-safe. Changes `errno`.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: FUTEX_WAIT only reads the word, and the borrow keeps the word alive.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            forever,
        );
    }
}

/// Wakes every thread that sleeps in [`futex_wait`] on `word` (FUTEX_WAKE). Async-signal-safe.
/// Changes `errno`.
pub fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses the address only as a key.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        );
    }
}
