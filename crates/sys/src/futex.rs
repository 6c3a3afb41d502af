//! Process-private futexes: how a writer sleeps while its area is closed (`futex(2)`).

use std::sync::atomic::AtomicU64;

/// The half of a 64-bit word that the kernel compares: the least significant 32 bits.
fn low_half(word: &AtomicU64) -> *const u32 {
    let p = word.as_ptr().cast::<u32>().cast_const();
    // SAFETY: both halves lie inside the eight bytes of `word`.
    if cfg!(target_endian = "little") { p } else { unsafe { p.add(1) } }
}

/// Sleeps while the low 32 bits of `word` equal those of `expected`, until woken. Returns at once when they differ, and
/// may return without reason: the caller re-reads the word. Async-signal-safe; leaves `errno` changed.
pub fn futex_wait(word: &AtomicU64, expected: u64) {
    // SAFETY: FUTEX_WAIT only reads the word, which the borrow keeps alive, and the time-out is null (wait for ever).
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            low_half(word),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected as u32,
            std::ptr::null::<libc::timespec>(),
        );
    }
}

/// Wakes every thread that sleeps in [`futex_wait`] on `word`. Async-signal-safe; leaves `errno` changed.
pub fn futex_wake_all(word: &AtomicU64) {
    // SAFETY: FUTEX_WAKE uses the address as a key only.
    unsafe {
        libc::syscall(libc::SYS_futex, low_half(word), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}
