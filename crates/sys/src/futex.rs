//! Process-private futexes: how a writer sleeps while its area is closed (`futex(2)`).

use std::sync::atomic::AtomicU32;

/// Sleeps while `word` is `expected`, until woken. Returns at once when it is not, and may return
/// without reason: the caller looks again. Async-signal-safe; leaves `errno` changed.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: FUTEX_WAIT only reads the word, which the borrow keeps alive.
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

/// Wakes every thread that sleeps in [`futex_wait`] on `word`. Async-signal-safe; leaves `errno`
/// changed.
pub fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses the address as a key only.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        );
    }
}
