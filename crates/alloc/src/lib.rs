//! An allocator over a region of [`pageleap`], for containers that take one by `allocator-api2`:
//! hashbrown's maps, that crate's own `Vec` and `Box`, and others. Their contents lie in the
//! region, at addresses that never change, and leap with it while threads use them.
//!
//! ```no_run
//! use hashbrown::HashMap;
//! use pageleap::{NodeId, Pool};
//! use pageleap_alloc::RegionAllocator;
//! # fn main() -> Result<(), pageleap::Error> {
//! let near = Pool::builder(NodeId(0), 1 << 30).build()?;
//! let far = Pool::builder(NodeId(1), 1 << 30).build()?;
//!
//! let memory = RegionAllocator::new(8 << 30, [&near])?; // addresses for 8 GB, not yet frames
//! let mut map = HashMap::new_in(memory.clone());
//! map.insert(1, "one");
//!
//! let report = memory.migration(&far).start()?.wait(); // threads may go on using the map
//! # let _ = (report, map);
//! # Ok(()) }
//! ```
//!
//! [talc](https://docs.rs/talc) manages the places of a region. Its notes on free places lie
//! between them, and leap along.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use allocator_api2::alloc::{AllocError, Allocator};
use pageleap::{Destination, Error, Migration, Region};
use talc::base::Talc;
use talc::base::binning::{Binning, linear_extent_then_linearly_divided_exponential_binning};
use talc::base::bitfield::BitField;
use talc::source::Manual;

/// Bytes by which the region grows, unless a place needs more or less is left.
const STEP: usize = 16 << 20;

/// An allocator that hands out places of a region. The region grows over pools as needed, and does
/// not shrink. Clones are the same allocator. The region is freed when the last clone and the last
/// container with one are gone.
///
/// Several threads may use it. Places that containers have freed are used again. While the region
/// grows other threads wait: some 50 ms per GB where its frames are still being recycled.
#[derive(Clone)]
pub struct RegionAllocator(Arc<Inner>);

struct Inner {
    // Dropped before the region, which has its notes.
    state: Mutex<State>,
    region: Region,
    capacity: usize,
}

/// Lists of free places by size, more of them than talc has by default: the default finds no place
/// for a size just above the smallest of its last but one list, which is 832 MB.
struct Lists;

impl Binning for Lists {
    type AvailabilityBitField = [usize; 4];
    const BIN_COUNT: u32 = <[usize; 4]>::BITS - 1;

    fn size_to_bin(size: usize) -> u32 {
        linear_extent_then_linearly_divided_exponential_binning::<8, 4>(size)
    }
}

struct State {
    places: Talc<Manual, Lists>,
    /// The end of the places; `None` while the region is empty.
    end: Option<NonNull<u8>>,
    pools: Vec<Destination>,
}

// SAFETY: the pointer is an address in the region, which all threads may use, and it is used only
// under the lock.
unsafe impl Send for State {}

impl RegionAllocator {
    /// An allocator with addresses for `capacity` bytes. It takes frames of these pools as it
    /// needs them: of the first pool that has enough. All pools have pages of one size.
    ///
    /// # Errors
    /// If no pool is named, or the address space is not available.
    pub fn new<D: Into<Destination>>(
        capacity: usize,
        pools: impl IntoIterator<Item = D>,
    ) -> Result<Self, Error> {
        let pools: Vec<Destination> = pools.into_iter().map(Into::into).collect();
        let first = pools.first().ok_or_else(|| Error::BadArgument {
            what: "pools",
            reason: "no pool is named".into(),
            remedy: "name at least one pool".into(),
        })?;
        let region = Region::reserve(capacity, first.page_size())?;
        let capacity = capacity.next_multiple_of(region.page_size().bytes());
        let state = Mutex::new(State { places: Talc::new(Manual), end: None, pools });
        Ok(RegionAllocator(Arc::new(Inner { state, region, capacity })))
    }

    /// A migration of all bytes that the region has now; the caller starts it. Bytes by which the
    /// region grows during the job are not part of it.
    pub fn migration(&self, to: impl Into<Destination>) -> Migration<'_> {
        let region = &self.0.region;
        Migration::new().range(region, 0..region.len(), to)
    }

    /// The start of the region and its length, which grows.
    pub fn place(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.0.region.as_ptr(), self.0.region.len())
    }

    /// The region.
    ///
    /// # Safety
    /// The caller does not extend it, discard or back parts of it, or access its bytes through
    /// views: the bytes belong to the allocator and to containers.
    pub unsafe fn region(&self) -> &Region {
        &self.0.region
    }

    /// Sets the pools from which the region grows from now on. After a leap, name the pools that
    /// the data is in.
    pub fn grow_from<D: Into<Destination>>(&self, pools: impl IntoIterator<Item = D>) {
        self.state().pools = pools.into_iter().map(Into::into).collect();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Extends the region so that it has a place of this layout.
    fn grow(&self, state: &mut State, layout: Layout) -> Result<(), AllocError> {
        let region = &self.0.region;
        let old = region.len();
        // The first place holds talc's notes, and each place a few words.
        let notes = if state.end.is_none() { talc::min_first_heap_size::<Lists>() } else { 64 };
        // Free bytes at the end of the region become part of the new place. SAFETY: the end is the
        // latest one of talc.
        let free = state.end.map_or(0, |end| unsafe {
            end.as_ptr().addr() - state.places.reserved(end).up_to.as_ptr().addr()
        });
        let least =
            layout.size().checked_add(layout.align()).and_then(|bytes| bytes.checked_add(notes));
        let least = least.map(|bytes| bytes.saturating_sub(free).max(1));
        let left = self.0.capacity - old;
        let page = region.page_size().bytes();
        let least = least.and_then(|bytes| bytes.checked_next_multiple_of(page));
        let least = least.filter(|bytes| *bytes <= left).ok_or(AllocError)?;
        let most = least.max(STEP.next_multiple_of(page)).min(left);
        let grown = state.pools.iter().any(|pool| {
            let bytes =
                most.min(usize::try_from(pool.free_bytes()).unwrap_or(usize::MAX) / page * page);
            // Free frames may be taken by now, or lie on nodes that the placement does not name.
            let grows =
                |bytes: usize| bytes >= least && region.grow(old + bytes, pool.clone()).is_ok();
            grows(bytes) || bytes > least && grows(least)
        });
        if !grown {
            return Err(AllocError);
        }
        let start = region.as_ptr().as_ptr();
        let (new, end) = (start.wrapping_add(old), start.wrapping_add(region.len()));
        state.end = match state.end {
            // SAFETY: the new part is backed, adjoins the places that there are, and is nobody
            // else's.
            Some(before) => Some(unsafe { state.places.extend(before, end) }),
            // SAFETY: the new part is backed, and nobody else's.
            None => unsafe { state.places.claim(new, region.len() - old) },
        };
        state.end.map(drop).ok_or(AllocError)
    }
}

// SAFETY: a place is valid memory of the region until it is given back, because the region lives as
// long as the last clone; clones are one allocator, and moving one moves no place.
unsafe impl Allocator for RegionAllocator {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = std::ptr::without_provenance_mut(layout.align());
            return NonNull::new(std::ptr::slice_from_raw_parts_mut(dangling, 0)).ok_or(AllocError);
        }
        let state = &mut *self.state();
        // SAFETY: the size is not 0.
        let mut place = unsafe { state.places.allocate(layout) };
        if place.is_none() {
            self.grow(state, layout)?;
            // SAFETY: as above.
            place = unsafe { state.places.allocate(layout) };
        }
        Ok(NonNull::slice_from_raw_parts(place.ok_or(AllocError)?, layout.size()))
    }

    unsafe fn deallocate(&self, place: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            // SAFETY: the caller's promise: it was allocated here, with this layout.
            unsafe { self.state().places.deallocate(place.as_ptr(), layout) };
        }
    }

    unsafe fn shrink(
        &self,
        place: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if new.size() > 0 && place.as_ptr().addr().is_multiple_of(new.align()) {
            // SAFETY: the caller's promise: it was allocated here, with the old layout, and the new
            // size is not larger.
            unsafe { self.state().places.shrink(place.as_ptr(), old, new.size()) };
            return Ok(NonNull::slice_from_raw_parts(place, new.size()));
        }
        let moved = self.allocate(new)?;
        // SAFETY: both are at least as large as the new size, and are two places; the old one is
        // given back once.
        unsafe {
            place.copy_to_nonoverlapping(moved.cast(), new.size());
            self.deallocate(place, old);
        }
        Ok(moved)
    }

    unsafe fn grow(
        &self,
        place: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() > 0 && old.align() == new.align() {
            // SAFETY: the caller's promise: it was allocated here, with the old layout, and the new
            // size is not smaller.
            let grown =
                unsafe { self.state().places.try_grow_in_place(place.as_ptr(), old, new.size()) };
            if grown {
                return Ok(NonNull::slice_from_raw_parts(place, new.size()));
            }
        }
        let moved = self.allocate(new)?;
        // SAFETY: both are at least as large as the old size, and are two places; the old one is
        // given back once.
        unsafe {
            place.copy_to_nonoverlapping(moved.cast(), old.size());
            self.deallocate(place, old);
        }
        Ok(moved)
    }
}

impl fmt::Debug for RegionAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RegionAllocator in {:?}, which may grow to {} bytes",
            self.0.region, self.0.capacity
        )
    }
}
