//! Copies of memory that other threads may be writing at the same time.
//!
//! With `ptr::copy_nonoverlapping` such a copy would be a data race, and the compiler may assume
//! that programs have no data race. So the loops here are assembly, or a function of the C library behind a
//! pointer; the compiler cannot see into either. A copy may be torn, which means that it mixes old
//! and new bytes. That is harmless, because the protocol discards every copy during which a write
//! was possible, before any thread can see it (`docs/protocol.md`, section 2.4).
//!
//! The fastest loop depends on the machine, and so does the best size of a step for the C library's
//! memcpy. So there are several [`CopyMethod`]s, and the caller chooses.

use std::fmt;
use std::hint::black_box;

/// Bytes of one page of the four-page loop.
const PAGE: usize = 4096;
/// Bytes of a cache line, which one round of a loop copies from each page.
const LINE: usize = 64;

/// A loop that copies memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CopyLoop {
    /// Reads four pages in turns and writes them with streaming (non-temporal) stores. Four DRAM
    /// rows are open instead of one, and the destination is not read for ownership. Only x86-64 has
    /// this loop; elsewhere it is [`CopyLoop::Words`].
    FourPages,
    /// `memcpy` of the C library.
    Memcpy,
    /// One word after the other, by relaxed atomic accesses. Slow, but defined in Rust's memory
    /// model.
    Words,
}

/// A loop, and the number of bytes that it copies at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyMethod {
    /// The loop.
    pub by: CopyLoop,
    /// Bytes of a step, at least 1.
    pub step_bytes: usize,
}

impl CopyMethod {
    /// The method to use before any has been timed.
    pub const DEFAULT: CopyMethod = if cfg!(miri) {
        CopyMethod { by: CopyLoop::Words, step_bytes: 1 << 20 }
    } else if cfg!(target_arch = "x86_64") {
        CopyMethod { by: CopyLoop::FourPages, step_bytes: 1 << 20 }
    } else {
        CopyMethod { by: CopyLoop::Memcpy, step_bytes: 256 << 10 }
    };

    /// The method as one number, for words that threads share.
    pub const fn to_bits(self) -> usize {
        self.step_bytes << 2 | self.by as usize
    }

    /// The inverse of [`CopyMethod::to_bits`].
    pub const fn from_bits(bits: usize) -> CopyMethod {
        let by = match bits & 3 {
            0 => CopyLoop::FourPages,
            1 => CopyLoop::Memcpy,
            _ => CopyLoop::Words,
        };
        CopyMethod { by, step_bytes: bits >> 2 }
    }
}

impl Default for CopyMethod {
    fn default() -> Self {
        CopyMethod::DEFAULT
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in steps of {} KB", self.by, self.step_bytes >> 10)
    }
}

impl CopyLoop {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            CopyLoop::FourPages => "four-pages",
            CopyLoop::Memcpy => "memcpy",
            CopyLoop::Words => "words",
        }
    }
}

impl fmt::Display for CopyLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Copies `len` bytes from address `src` to address `dst`.
///
/// # Safety
/// `src` is readable and `dst` is writable for `len` bytes, and the two ranges do not overlap.
/// Other threads may write to `src` meanwhile. No other thread accesses `dst`.
pub unsafe fn copy_racing(dst: usize, src: usize, len: usize, method: CopyMethod) {
    let mut done = 0;
    while done < len {
        let step = method.step_bytes.clamp(1, len - done);
        // SAFETY: the step lies inside ranges that the caller vouches for.
        unsafe { copy_step(dst + done, src + done, step, method.by) };
        done += step;
    }
}

/// # Safety
/// As [`copy_racing`].
unsafe fn copy_step(dst: usize, src: usize, len: usize, by: CopyLoop) {
    // SAFETY: the caller vouches for both ranges, and the parts add up to `len`.
    unsafe {
        match by {
            CopyLoop::Memcpy => memcpy(dst, src, len),
            CopyLoop::FourPages if dst.is_multiple_of(LINE) && src.is_multiple_of(LINE) => {
                let four = len / (4 * PAGE) * (4 * PAGE);
                let lines = (len - four) / LINE * LINE;
                imp::copy_four_pages(dst, src, four);
                imp::copy_lines(dst + four, src + four, lines);
                imp::finish();
                let done = four + lines;
                copy_words(dst + done, src + done, len - done);
            }
            CopyLoop::FourPages | CopyLoop::Words => copy_words(dst, src, len),
        }
    }
}

/// Copies by the C library.
///
/// # Safety
/// As [`copy_racing`].
unsafe fn memcpy(dst: usize, src: usize, len: usize) {
    type Memcpy =
        unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;
    // The compiler knows the effects of a function named memcpy. A pointer that it cannot see into
    // hides the name, so that it cannot draw wrong conclusions from a race.
    let memcpy: Memcpy = black_box(libc::memcpy);
    // SAFETY: the caller vouches for both ranges.
    unsafe { memcpy(dst as *mut _, src as *const _, len) };
}

/// Copies by relaxed atomic words, and bytes at both ends. Such accesses may race in Rust's memory
/// model.
///
/// # Safety
/// As [`copy_racing`].
unsafe fn copy_words(dst: usize, src: usize, len: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let aligned = dst.is_multiple_of(8) && src.is_multiple_of(8);
    let words = if aligned { len / 8 * 8 } else { 0 };
    for at in (0..words).step_by(8) {
        // SAFETY: the eight bytes are aligned and lie inside ranges that the caller vouches for.
        unsafe {
            let word = (*((src + at) as *const AtomicU64)).load(Relaxed);
            (*((dst + at) as *const AtomicU64)).store(word, Relaxed);
        }
    }
    for at in words..len {
        // SAFETY: the byte lies inside ranges that the caller vouches for.
        unsafe {
            let byte = (*((src + at) as *const AtomicU8)).load(Relaxed);
            (*((dst + at) as *const AtomicU8)).store(byte, Relaxed);
        }
    }
}

/// Whether ThreadSanitizer intercepts `memcpy`. It would report a racing copy as a data race.
pub fn memcpy_is_watched() -> bool {
    // SAFETY: the name is a C string; the result is only compared.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__tsan_init".as_ptr()) }.is_null()
}

/// Fills `len` bytes at address `dst` with zeros. Both are multiples of 64.
///
/// # Safety
/// `dst` is writable for `len` bytes, and no other thread accesses them.
pub unsafe fn zero(dst: usize, len: usize) {
    debug_assert!(dst.is_multiple_of(LINE) && len.is_multiple_of(LINE));
    // SAFETY: no other thread accesses the bytes, so an ordinary write is sound.
    unsafe { std::ptr::write_bytes(dst as *mut u8, 0, len) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use super::PAGE;
    use std::arch::asm;

    /// Copies groups of four pages. SSE2 is part of every x86-64.
    ///
    /// # Safety
    /// As [`super::copy_racing`]. `len` is a multiple of four pages.
    pub unsafe fn copy_four_pages(mut dst: usize, mut src: usize, len: usize) {
        let end = src + len;
        while src < end {
            // SAFETY: each round reads and writes one line in each of the four pages at `src` and
            // `dst`, and the caller vouches for both. Prefetching past their end cannot fault. All
            // changed registers are declared, and the flags count as changed by default.
            unsafe {
                asm!(
                    "2:",
                    "prefetcht0 [{s} + 512]",
                    "prefetcht0 [{s} + 4096 + 512]",
                    "prefetcht0 [{s} + 8192 + 512]",
                    "prefetcht0 [{s} + 12288 + 512]",
                    "movdqa {a}, [{s}]",
                    "movdqa {b}, [{s} + 16]",
                    "movdqa {c}, [{s} + 32]",
                    "movdqa {d}, [{s} + 48]",
                    "movntdq [{t}], {a}",
                    "movntdq [{t} + 16], {b}",
                    "movntdq [{t} + 32], {c}",
                    "movntdq [{t} + 48], {d}",
                    "movdqa {a}, [{s} + 4096]",
                    "movdqa {b}, [{s} + 4096 + 16]",
                    "movdqa {c}, [{s} + 4096 + 32]",
                    "movdqa {d}, [{s} + 4096 + 48]",
                    "movntdq [{t} + 4096], {a}",
                    "movntdq [{t} + 4096 + 16], {b}",
                    "movntdq [{t} + 4096 + 32], {c}",
                    "movntdq [{t} + 4096 + 48], {d}",
                    "movdqa {a}, [{s} + 8192]",
                    "movdqa {b}, [{s} + 8192 + 16]",
                    "movdqa {c}, [{s} + 8192 + 32]",
                    "movdqa {d}, [{s} + 8192 + 48]",
                    "movntdq [{t} + 8192], {a}",
                    "movntdq [{t} + 8192 + 16], {b}",
                    "movntdq [{t} + 8192 + 32], {c}",
                    "movntdq [{t} + 8192 + 48], {d}",
                    "movdqa {a}, [{s} + 12288]",
                    "movdqa {b}, [{s} + 12288 + 16]",
                    "movdqa {c}, [{s} + 12288 + 32]",
                    "movdqa {d}, [{s} + 12288 + 48]",
                    "movntdq [{t} + 12288], {a}",
                    "movntdq [{t} + 12288 + 16], {b}",
                    "movntdq [{t} + 12288 + 32], {c}",
                    "movntdq [{t} + 12288 + 48], {d}",
                    "add {s}, 64",
                    "add {t}, 64",
                    "sub {n}, 64",
                    "jnz 2b",
                    s = inout(reg) src => _,
                    t = inout(reg) dst => _,
                    n = inout(reg) PAGE => _,
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack),
                );
            }
            src += 4 * PAGE;
            dst += 4 * PAGE;
        }
    }

    /// Copies the rest line by line.
    ///
    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_lines(dst: usize, src: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: the loop reads and writes exactly `len` bytes, and the caller vouches for both
        // ranges.
        unsafe {
            asm!(
                "2:",
                "prefetcht0 [{s} + 512]",
                "movdqa {a}, [{s}]",
                "movdqa {b}, [{s} + 16]",
                "movdqa {c}, [{s} + 32]",
                "movdqa {d}, [{s} + 48]",
                "movntdq [{t}], {a}",
                "movntdq [{t} + 16], {b}",
                "movntdq [{t} + 32], {c}",
                "movntdq [{t} + 48], {d}",
                "add {s}, 64",
                "add {t}, 64",
                "sub {n}, 64",
                "jnz 2b",
                s = inout(reg) src => _,
                t = inout(reg) dst => _,
                n = inout(reg) len => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack),
            );
        }
    }

    /// Makes all streaming stores visible before any later store (sfence). They are weakly ordered
    /// otherwise, and the commit that follows shows the destination to other CPUs.
    pub fn finish() {
        // SAFETY: a fence has no operands.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) }
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
mod imp {
    /// Copies the whole range; only x86-64 has a loop for four pages.
    ///
    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_four_pages(dst: usize, src: usize, len: usize) {
        // SAFETY: the caller vouches for both ranges.
        unsafe { copy_lines(dst, src, len) }
    }

    /// Copies by words.
    ///
    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_lines(dst: usize, src: usize, len: usize) {
        // SAFETY: the caller vouches for both ranges.
        unsafe { super::copy_words(dst, src, len) }
    }

    /// Does nothing. Ordinary stores need no extra order, because the system call that commits is a
    /// full barrier.
    pub fn finish() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Pages([u8; 9 * PAGE]);

    #[test]
    #[cfg(not(miri))]
    fn every_method_copies_exactly_its_bytes_at_any_length_and_alignment() {
        let mut src = Box::new(Pages(std::array::from_fn(|i| (i * 31 + i / 4096) as u8)));
        let mut dst = Box::new(Pages([0xee; 9 * PAGE]));
        let lens = [
            0,
            1,
            7,
            8,
            63,
            64,
            65,
            4095,
            4096,
            3 * PAGE,
            4 * PAGE - 1,
            4 * PAGE,
            4 * PAGE + 1,
            4 * PAGE + 64,
            8 * PAGE,
            9 * PAGE - 200,
        ];
        let loops = [CopyLoop::FourPages, CopyLoop::Memcpy, CopyLoop::Words];
        for (&by, step_bytes) in loops
            .iter()
            .flat_map(|by| [1, 100, 4096, 4 * PAGE, 5 * PAGE + 8, 1 << 20].map(|s| (by, s)))
        {
            for (&len, (to, from)) in lens.iter().flat_map(|len| {
                [(0, 0), (64, 0), (0, 8), (1, 0), (3, 5), (63, 64)].map(|a| (len, a))
            }) {
                dst.0.fill(0xee);
                let method = CopyMethod { by, step_bytes };
                let [target, source] =
                    [&mut dst, &mut src].map(|pages| pages.0.as_mut_ptr() as usize);
                // SAFETY: both buffers hold nine pages, the longest copy at the largest offset fits
                // in, and no other thread knows them.
                unsafe { copy_racing(target + to, source + from, len, method) };
                let what = format!("{method:?}, {len} bytes from +{from} to +{to}");
                assert_eq!(dst.0[to..to + len], src.0[from..from + len], "{what}");
                let around = dst.0[..to].iter().chain(&dst.0[to + len..]);
                assert!(around.into_iter().all(|&byte| byte == 0xee), "{what} wrote elsewhere");
            }
        }
    }

    #[test]
    fn a_number_stands_for_each_method() {
        for by in [CopyLoop::FourPages, CopyLoop::Memcpy, CopyLoop::Words] {
            for step_bytes in [1, 64 << 10, 1 << 30] {
                let method = CopyMethod { by, step_bytes };
                assert_eq!(CopyMethod::from_bits(method.to_bits()), method);
            }
        }
    }

    #[test]
    fn zero_clears_exactly_its_bytes() {
        let mut dst = Box::new(Pages([0xee; 9 * PAGE]));
        // SAFETY: the buffer holds nine aligned pages, and no other thread knows it.
        unsafe { zero(dst.0.as_mut_ptr() as usize, 2 * PAGE) };
        assert!(dst.0[..2 * PAGE].iter().all(|&b| b == 0));
        assert!(dst.0[2 * PAGE..].iter().all(|&b| b == 0xee));
    }
}
