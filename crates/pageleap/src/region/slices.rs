//! Parts of a region as slices of atomics or of plain values.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use super::{Region, RegionInner};
use crate::error::Error;
use crate::sync::{Ordering, lock};

/// Types for which every bit pattern is a value, so that bytes of a region can be read as values.
///
/// # Safety
/// Only for types without padding, invalid bit patterns, pointers or interior mutability.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($t:ty),*) => { $(
        // SAFETY: integers and floats accept all bit patterns and have no padding.
        unsafe impl Plain for $t {}
    )* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, u128, i128, f32, f64);
// SAFETY: an array has no padding beyond its elements'.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

impl Region {
    /// A part of the region as 64-bit words, which several threads may read and write.
    pub fn atomics_u64(&self, range: Range<usize>) -> Result<&[AtomicU64], Error> {
        // SAFETY: atomics may be shared with concurrent atomic accesses.
        unsafe { self.0.slice_at(self.0.start, range) }
    }

    /// A part of the region as 32-bit words, which several threads may read and write.
    ///
    /// # Safety
    /// While the slice lives, no thread accesses the part through atomics of another size, which
    /// the language defines as a data race.
    pub unsafe fn atomics_u32(&self, range: Range<usize>) -> Result<&[AtomicU32], Error> {
        // SAFETY: atomics may be shared; the size is the caller's promise.
        unsafe { self.0.slice_at(self.0.start, range) }
    }

    /// A part of the region as bytes, which several threads may read and write.
    ///
    /// # Safety
    /// As [`Region::atomics_u32`].
    pub unsafe fn atomics_u8(&self, range: Range<usize>) -> Result<&[AtomicU8], Error> {
        // SAFETY: atomics may be shared; the size is the caller's promise.
        unsafe { self.0.slice_at(self.0.start, range) }
    }

    /// A part of the region as plain values.
    ///
    /// # Safety
    /// While the slice lives, no thread writes to the part. (Migration does not count: it never
    /// changes contents.)
    pub unsafe fn slice<T: Plain>(&self, range: Range<usize>) -> Result<&[T], Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.0.slice_at(self.0.start, range) }
    }
}

impl RegionInner {
    /// A part of the region as values, through the mapping at `start`.
    ///
    /// # Safety
    /// `T` is valid for all bit patterns, and its accesses may race only as far as `T` allows. `start`
    /// is the first address of the region or of one of its views, and the caller borrows it for `'a`.
    pub(super) unsafe fn slice_at<'a, T>(
        &self,
        start: usize,
        range: Range<usize>,
    ) -> Result<&'a [T], Error> {
        if !self.backend.is_host_memory() {
            return Err(Error::BadArgument {
                what: "region",
                reason: "its memory is a model's, not this process'".into(),
                remedy: "read and write it through the model".into(),
            });
        }
        if range.start > range.end || range.end > self.len.load(Ordering::Acquire) {
            return Err(self.bad_range(
                range,
                "not inside the region",
                "use bytes from 0 to its length",
            ));
        }
        if size_of::<T>() == 0 {
            return Err(self.bad_range(range, "elements have no size", "use a type that has one"));
        }
        if !range.start.is_multiple_of(align_of::<T>())
            || !(range.end - range.start).is_multiple_of(size_of::<T>())
        {
            return Err(self.bad_range(
                range,
                "not aligned to the element type",
                "use multiples of its size",
            ));
        }
        let page = self.page.bytes();
        let pages = (range.start / page) as u64..range.end.div_ceil(page) as u64;
        if !lock(&self.extents).backs_all(pages) {
            return Err(self.bad_range(range, "part of it is unbacked", "back it first"));
        }
        // SAFETY: the part is mapped, aligned, and stays so while it is borrowed: `discard`,
        // `drop_views` and drop need the region exclusively.
        Ok(unsafe {
            std::slice::from_raw_parts(
                (start + range.start) as *const T,
                (range.end - range.start) / size_of::<T>(),
            )
        })
    }
}
