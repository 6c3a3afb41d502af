//! Lines of memory in the caches of the processor.

use std::sync::atomic::AtomicU64;

/// Bytes of a line on processors for which [`flush_line`] has an instruction. Some of arm64 have
/// lines of 128 bytes; they then flush one line twice.
pub const LINE_BYTES: usize = 64;

/// Whether [`flush_line`] flushes anything: on x86-64 and arm64.
pub const CAN_FLUSH_LINES: bool =
    cfg!(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)));

/// Writes the line of this word back to memory if it has been written, and removes it from all
/// caches of all CPUs: `clflush` of x86-64, `dc civac` of arm64, which Linux allows to programs.
/// The contents stay. Where [`CAN_FLUSH_LINES`] is false, it does nothing.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// let word = AtomicU64::new(7);
/// pageleap_sys::flush_line(&word);
/// pageleap_sys::wait_for_flushes();
/// assert_eq!(word.load(Ordering::Relaxed), 7); // from memory
/// ```
pub fn flush_line(word: &AtomicU64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instruction changes no contents, and the address can be read.
    unsafe {
        std::arch::asm!("clflush [{}]", in(reg) word.as_ptr(), options(nostack, preserves_flags));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("dc civac, {}", in(reg) word.as_ptr(), options(nostack, preserves_flags));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    let _ = word;
}

/// Waits until the lines that this thread has flushed are out of the caches. Later loads do not
/// begin before (`mfence`, `dsb ish`).
pub fn wait_for_flushes() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: fences have no operands.
    unsafe {
        // An `lfence` keeps later loads from starting before the `mfence` is complete.
        std::arch::asm!("mfence", "lfence", options(nostack, preserves_flags));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("dsb ish", "isb", options(nostack, preserves_flags));
    }
}
