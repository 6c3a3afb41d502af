//! `/proc/self/pagemap`: finds written (dirty) pages, and write-protects them again in the same
//! step (`PAGEMAP_SCAN`, Linux 6.7). `/proc/self/maps`: finds one mapping (`PROCMAP_QUERY`, Linux
//! 6.11).
//!
//! Structures and numbers are those of `include/uapi/linux/fs.h`, Linux 6.18.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::errno::{Errno, check};

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
/// Without a mapping at the address, the kernel returns the next one.
const COVERING_OR_NEXT: u64 = 0x10;

/// Categories of pages (`PAGE_IS_*`). The bits can be combined.
pub mod page_is {
    /// The page lies in a range that is registered for asynchronous write-protection.
    pub const WP_ALLOWED: u64 = 1 << 0;
    /// The page was written since it was last write-protected, or was never protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// A file backs the page.
    pub const FILE: u64 = 1 << 2;
    /// The page is in memory.
    pub const PRESENT: u64 = 1 << 3;
    /// The page is swapped out.
    pub const SWAPPED: u64 = 1 << 4;
    /// The kernel's shared page of zeros.
    pub const ZERO: u64 = 1 << 5;
    /// A huge page maps the page.
    pub const HUGE: u64 = 1 << 6;
}

/// Effects of a scan besides reporting (`PM_SCAN_*`). The bits can be combined.
pub mod scan_flag {
    /// Write-protects the reported pages.
    pub const WP_MATCHING: u64 = 1 << 0;
    /// Fails with EPERM if part of the range is not registered for asynchronous write-protection.
    pub const CHECK_WP_ASYNC: u64 = 1 << 1;
}

/// Consecutive pages of the same categories (`struct page_region`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRegion {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// Categories of the pages, out of the bits in [`PageQuery::tell`].
    pub categories: u64,
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct procmap_query`, without names and build ids.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    /// Access, page size, offset, inode, device, and buffers for a name and a build id.
    rest: [u64; 8],
}

/// The mapping at an address, or the next one behind it (`PROCMAP_QUERY` of `ioctl(2)`, Linux 6.11).
/// `maps` is `/proc/PID/maps`.
///
/// # Errors
/// ENOTTY: the kernel is older. ENOENT: there is no such mapping.
pub fn mapping_at(maps: BorrowedFd<'_>, addr: usize) -> Result<Range<usize>, Errno> {
    let size = size_of::<ProcmapQuery>() as u64;
    let mut query =
        ProcmapQuery { size, flags: COVERING_OR_NEXT, addr: addr as u64, ..Default::default() };
    // SAFETY: the kernel reads and writes the structure, whose size is part of the request.
    check(unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query).into() })?;
    Ok(query.start as usize..query.end as usize)
}

/// The conditions for the pages that a scan reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageQuery {
    /// Bits of [`page_is`] that are inverted before `all_of` and `any_of` are compared.
    pub inverted: u64,
    /// A reported page has all of these bits.
    pub all_of: u64,
    /// A reported page has at least one of these bits. 0 asks for none.
    pub any_of: u64,
    /// The bits to report in [`PageRegion::categories`].
    pub tell: u64,
}

impl PageQuery {
    /// Written pages.
    pub const WRITTEN: PageQuery =
        PageQuery { inverted: 0, all_of: page_is::WRITTEN, any_of: 0, tell: page_is::WRITTEN };
}

/// Scans the addresses of `range` for the pages that `query` asks for (`PAGEMAP_SCAN` of
/// `ioctl(2)`, Linux 6.7).
///
/// The call fills `found` and returns the number of entries filled, and the address at which the
/// scan stopped. That address is the end of the range, unless `found` became full. `flags` are
/// those of [`scan_flag`].
///
/// With an empty `found`, [`PageQuery::WRITTEN`] and [`scan_flag::WP_MATCHING`], the scan reports
/// nothing and protects every page of the range that has a page table. The kernel has no faster way
/// to do so.
///
/// # Errors
/// ENOTTY: the kernel is older than 6.7. EPERM: see [`scan_flag::CHECK_WP_ASYNC`]. EINVAL: the
/// kernel does not know a bit, or the range is not page-aligned. ENOMEM: the kernel has no memory.
/// EINTR: a fatal signal is pending.
///
/// # Safety
/// With [`scan_flag::WP_MATCHING`] the caller owns the range.
pub unsafe fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    range: Range<usize>,
    flags: u64,
    query: &PageQuery,
    found: &mut [PageRegion],
) -> Result<(usize, usize), Errno> {
    let mut arg = PmScanArg {
        size: size_of::<PmScanArg>() as u64,
        flags,
        start: range.start as u64,
        end: range.end as u64,
        walk_end: 0,
        vec: if found.is_empty() { 0 } else { found.as_mut_ptr() as u64 },
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: query.inverted,
        category_mask: query.all_of,
        category_anyof_mask: query.any_of,
        return_mask: query.tell,
    };
    // SAFETY: the kernel reads and writes `arg` and at most `vec_len` entries of `found`. Both
    // outlive the call.
    let entries =
        check(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &mut arg).into() })?;
    Ok((entries, arg.walk_end as usize))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;
    use linux_raw_sys::general as uapi;

    #[test]
    fn layouts_and_numbers_are_the_kernels() {
        assert_eq!(size_of::<PmScanArg>(), size_of::<uapi::pm_scan_arg>());
        assert_eq!(size_of::<PageRegion>(), size_of::<uapi::page_region>());
        assert_eq!(size_of::<ProcmapQuery>(), size_of::<uapi::procmap_query>());
        for (ours, theirs) in [
            (offset_of!(PmScanArg, walk_end), offset_of!(uapi::pm_scan_arg, walk_end)),
            (offset_of!(PmScanArg, vec_len), offset_of!(uapi::pm_scan_arg, vec_len)),
            (offset_of!(PmScanArg, category_mask), offset_of!(uapi::pm_scan_arg, category_mask)),
            (offset_of!(PmScanArg, return_mask), offset_of!(uapi::pm_scan_arg, return_mask)),
            (offset_of!(PageRegion, categories), offset_of!(uapi::page_region, categories)),
            (offset_of!(ProcmapQuery, addr), offset_of!(uapi::procmap_query, query_addr)),
            (offset_of!(ProcmapQuery, end), offset_of!(uapi::procmap_query, vma_end)),
        ] {
            assert_eq!(ours, theirs);
        }
        assert_eq!(
            PAGEMAP_SCAN,
            (3 << 30 | size_of::<PmScanArg>() << 16 | usize::from(b'f') << 8 | 16) as libc::c_ulong
        );
        assert_eq!(
            PROCMAP_QUERY,
            (3 << 30 | size_of::<ProcmapQuery>() << 16 | usize::from(b'f') << 8 | 17)
                as libc::c_ulong
        );
        assert_eq!(scan_flag::WP_MATCHING, u64::from(uapi::PM_SCAN_WP_MATCHING));
        assert_eq!(scan_flag::CHECK_WP_ASYNC, u64::from(uapi::PM_SCAN_CHECK_WPASYNC));
    }
}
