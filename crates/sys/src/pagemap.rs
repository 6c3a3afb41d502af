//! `/proc/self/pagemap`: which pages have been written, and write-protecting them again in the same
//! step (`PAGEMAP_SCAN`, Linux 6.7).
//!
//! Structures and numbers are those of `include/uapi/linux/fs.h`, Linux 6.18.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::errno::{Errno, check};

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// What a page can be (`PAGE_IS_*`); bits that may be joined.
pub mod page_is {
    /// In a range registered for asynchronous write-protection.
    pub const WP_ALLOWED: u64 = 1 << 0;
    /// Written since it was last write-protected, or never protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// Backed by a file.
    pub const FILE: u64 = 1 << 2;
    /// In memory.
    pub const PRESENT: u64 = 1 << 3;
    /// Swapped out.
    pub const SWAPPED: u64 = 1 << 4;
    /// The shared page of zeros.
    pub const ZERO: u64 = 1 << 5;
    /// Mapped by a huge page.
    pub const HUGE: u64 = 1 << 6;
}

/// What a scan does besides looking (`PM_SCAN_*`); bits that may be joined.
pub mod scan_flag {
    /// Write-protects the pages that it reports.
    pub const WP_MATCHING: u64 = 1 << 0;
    /// Fails with EPERM where a range is not registered for asynchronous write-protection.
    pub const CHECK_WP_ASYNC: u64 = 1 << 1;
}

/// Consecutive pages of one kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// What they are, of the bits in `return_mask`.
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

/// Which pages a scan is to report.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageQuery {
    /// Bits of [`page_is`] that are turned round before the next two are looked at.
    pub inverted: u64,
    /// A page must be all of this.
    pub all_of: u64,
    /// And, unless it is 0, one of this.
    pub any_of: u64,
    /// What is to be told of it.
    pub tell: u64,
}

impl PageQuery {
    /// Pages that have been written.
    pub const WRITTEN: PageQuery =
        PageQuery { inverted: 0, all_of: page_is::WRITTEN, any_of: 0, tell: page_is::WRITTEN };
}

/// Fills `found` with the pages of `[start, end)` that `query` asks for; returns how many entries
/// were filled, and the address up to which it has looked: `end`, unless `found` was full. `flags`
/// are those of [`scan_flag`]. With [`PageQuery::WRITTEN`], an empty `found` and
/// [`scan_flag::WP_MATCHING`] all pages of the range are protected that have a page table, in the
/// quickest way there is. ENOTTY before Linux 6.7.
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
    // SAFETY: the kernel reads and writes `arg` and at most `vec_len` entries of `found`; both
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
        for (ours, theirs) in [
            (offset_of!(PmScanArg, walk_end), offset_of!(uapi::pm_scan_arg, walk_end)),
            (offset_of!(PmScanArg, vec_len), offset_of!(uapi::pm_scan_arg, vec_len)),
            (offset_of!(PmScanArg, category_mask), offset_of!(uapi::pm_scan_arg, category_mask)),
            (offset_of!(PmScanArg, return_mask), offset_of!(uapi::pm_scan_arg, return_mask)),
            (offset_of!(PageRegion, categories), offset_of!(uapi::page_region, categories)),
        ] {
            assert_eq!(ours, theirs);
        }
        assert_eq!(
            PAGEMAP_SCAN,
            (3 << 30 | size_of::<PmScanArg>() << 16 | usize::from(b'f') << 8 | 16) as libc::c_ulong
        );
        assert_eq!(scan_flag::WP_MATCHING, u64::from(uapi::PM_SCAN_WP_MATCHING));
        assert_eq!(scan_flag::CHECK_WP_ASYNC, u64::from(uapi::PM_SCAN_CHECK_WPASYNC));
    }
}
