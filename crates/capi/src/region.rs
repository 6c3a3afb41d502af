//! Regions: making, growing, discarding and backing them.

use std::ffi::c_void;
use std::ops::Range;
use std::time::Duration;

use pageleap::{Error, Region};

use crate::boundary::{bad, free, give, handle, nothing_yet, put, value, write};
use crate::page_size::{number, page_size};
use crate::placement::{
    destination, list_counts, pageleap_node_pages, pageleap_placement, pageleap_verification,
    write_verification,
};
use crate::pool::pageleap_pool;
use crate::status::pageleap_status;

/// A range of addresses that stays where it is for as long as the region lives, while its pages
/// change their frames.
///
/// Threads of this process may read and write the range at any time, also while it moves, with
/// ordinary loads, stores and atomic operations; nothing is lost. In return the program keeps to
/// these rules:
///
/// - System calls that write into a part that is moving (read, recv, io_uring) may fail with
///   EFAULT, or end early with a short count, with the engines mprotect and precopy-protect.
///   They can be repeated where a failed call consumes nothing (files, pipes, stream sockets),
///   but not with datagrams and eventfds.
/// - No device, nor the kernel for one, may use its pages without a guard (pageleap_region_pin),
///   because a device goes on using the old frames, and its writes are lost: O_DIRECT, RDMA,
///   registered io_uring buffers, vmsplice, process_vm_writev, MSG_ZEROCOPY.
/// - No process-shared, priority-inheriting or robust mutexes, semaphores or condition variables
///   in it. Ordinary private ones are fine.
/// - No stacks and no thread-local storage in it.
/// - No allocations of this library in it: a malloc() that takes memory from regions must serve
///   threads of the library (pageleap_thread_is_ours) and calls of the library from elsewhere.
/// - No userfaultfd and no protection keys on it, and nothing else mapped into its range.
/// - Children made by fork do not get it, and must not touch it.
/// - With the engines mprotect and precopy-protect, no thread may write into it while that
///   thread blocks SIGSEGV.
/// - mlock and madvise may be used on any part of it at any time, and their effects survive moves.
///   The exception is MADV_REMOVE, which takes the memory away. mprotect may be used, too, with two
///   rules: pages that a job is to move must stay readable until it has ended, and pages that
///   nobody could write must not become writable while they move. The effect of a call that comes
///   some milliseconds before pages move may be lost for them.
pub struct pageleap_region(pub(crate) Region);

/// The address, size and identity of a region.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_region_info {
    /// sizeof(pageleap_region_info).
    pub size: usize,
    /// The first byte, which never changes.
    pub start: *mut c_void,
    /// The length in bytes.
    pub length: usize,
    /// The identity of the region in reports.
    pub id: u64,
    /// The size of the pages, one of pageleap_page_size.
    pub page_size: u32,
    /// Set to 0.
    pub reserved: u32,
}
grows!(pageleap_region_info, 40, reserved);

/// The bytes of a region from `offset` on.
pub(crate) fn bytes(of: &Region, offset: usize, length: usize) -> Result<Range<usize>, Error> {
    let end = offset.checked_add(length).ok_or_else(|| Error::BadRange {
        start: offset,
        end: usize::MAX,
        region_start: of.as_ptr().as_ptr() as usize,
        region_len: of.len(),
        reason: "its end is beyond all addresses",
        remedy: "use offsets in the region".into(),
    })?;
    Ok(offset..end)
}

/// Makes a region of `length` bytes (rounded up to whole pages), all zero, of frames of a pool.
/// `place` names nodes of the pool; NULL: the placement of the pool. If the region needs frames
/// that a job is still recycling, the call waits for them. The region cannot grow. It is freed with
/// pageleap_region_free(), and does not need the pool's handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_new(
    pool: *const pageleap_pool,
    place: *const pageleap_placement,
    length: usize,
    region: *mut *mut pageleap_region,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(region) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let place = unsafe { destination(&handle(pool, "pool")?.0, place) }?;
        // SAFETY: forwarded to the caller.
        unsafe { give(region, "region", || Ok(pageleap_region(Region::new(place, length)?))) }
    })
}

/// Makes a region of no bytes, which can grow to `capacity` bytes (rounded up to whole pages) at
/// the same address: pageleap_region_grow(). `page` is the size of its pages, one of
/// pageleap_page_size. The region takes address space only, and is freed with
/// pageleap_region_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_reserve(
    capacity: usize,
    page: u32,
    region: *mut *mut pageleap_region,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(region) };
    boundary!({
        let page = page_size(page)?;
        // SAFETY: forwarded to the caller.
        unsafe { give(region, "region", || Ok(pageleap_region(Region::reserve(capacity, page)?))) }
    })
}

/// Frees a region; NULL is allowed. The call cancels the jobs that work on the region, waits for
/// them, unmaps the region, and gives its frames back to their pools. From the call on no thread
/// may touch the memory or use the handle. While a guard is left, the whole region stays mapped and
/// keeps its frames, so that devices can finish; dropping the last guard gives them back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_free(region: *mut pageleap_region) {
    // SAFETY: forwarded to the caller.
    unsafe { free(region) };
}

/// The first byte of a region, which never changes; NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_start(region: *const pageleap_region) -> *mut c_void {
    value(std::ptr::null_mut(), || {
        // SAFETY: forwarded to the caller.
        Ok(unsafe { handle(region, "region") }?.0.as_ptr().as_ptr().cast())
    })
}

/// The length of a region in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_length(region: *const pageleap_region) -> usize {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(region, "region") }?.0.len()))
}

/// Fills in `info` with a region's figures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_describe(
    region: *const pageleap_region,
    info: *mut pageleap_region_info,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        let shown = pageleap_region_info {
            size: 0,
            start: region.as_ptr().as_ptr().cast(),
            length: region.len(),
            id: region.id().0,
            page_size: number(region.page_size()),
            reserved: 0,
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(info, shown) }
    })
}

/// Gives the address of a part of a region, after checking that the part is inside the region
/// and has memory everywhere. The part may be any bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_view(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
    address: *mut *mut c_void,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(address) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        // SAFETY: nothing is accessed through the slice.
        let view = unsafe { region.atomics_u8(bytes(region, offset, length)?) }?;
        // SAFETY: forwarded to the caller.
        unsafe { put(address, view.as_ptr().cast::<c_void>().cast_mut(), "address") }
    })
}

/// Extends a region to `length` bytes (rounded up to whole pages); nothing changes if it is that
/// long already, or longer. The new part is zero; addresses do not change. More than the
/// capacity gives PAGELEAP_BAD_RANGE. `place` may be NULL, as for pageleap_region_new(). If
/// `pool` is NULL, `place` must be NULL, too: the new part then has no memory, and must not be
/// touched before pageleap_region_back().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_grow(
    region: *const pageleap_region,
    length: usize,
    pool: *const pageleap_pool,
    place: *const pageleap_placement,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        match (pool.is_null(), place.is_null()) {
            (true, true) => return region.extend(length),
            (true, false) => {
                return Err(bad("placement", "there is no pool to place", "pass a pool, or NULL"));
            }
            (false, _) => {}
        }
        // SAFETY: forwarded to the caller.
        region.grow(length, unsafe { destination(&handle(pool, "pool")?.0, place) }?)
    })
}

/// Gives the frames of a part, whole pages, back to their pools. The contents are gone, and
/// touching the part raises SIGSEGV until pageleap_region_back(), so no thread may use the part
/// during and after the call. Pages without memory stay as they are.
///
/// The part may belong to the range of a running job, which leaves the pages then
/// (PAGELEAP_REASON_DISCARDED). The call gives PAGELEAP_RANGE_BUSY while the job is moving pages of
/// the part, while it begins or ends, and as long as it lasts if it moves hugetlb pages;
/// pageleap_region_discard_within() waits instead. A guard on the part gives PAGELEAP_PINNED. If
/// the call fails, no page has changed, unless the limit of mappings (vm.max_map_count) was reached
/// on the way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_discard(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        // SAFETY: the program promises that no thread uses the part.
        unsafe { region.discard_shared(bytes(region, offset, length)?) }
    })
}

/// As pageleap_region_discard(), but waits for at most `timeout_ns` nanoseconds (UINT64_MAX: as
/// long as it takes) until no job is moving pages of the part, and no other call works on it.
/// Meanwhile jobs try no pages of the part, and no new job gets it (PAGELEAP_RANGE_BUSY). So the
/// call waits for one attempt of a job, some milliseconds; with hugetlb pages it waits for the end
/// of the job. Signal handlers of the program run meanwhile, and do not end the wait. A program
/// that may want to end it makes several calls with short times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_discard_within(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
    timeout_ns: u64,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        let (part, patience) = (bytes(region, offset, length)?, patience(timeout_ns));
        // SAFETY: the program promises that no thread uses the part.
        unsafe { region.discard_shared_within(part, patience) }
    })
}

/// The time for which a call waits; UINT64_MAX stands for no limit.
fn patience(timeout_ns: u64) -> Duration {
    match timeout_ns {
        u64::MAX => Duration::MAX,
        ns => Duration::from_nanos(ns),
    }
}

/// Gives zeroed frames of a pool to a part, whole pages, that has no memory. If some of it has
/// memory, the call gives PAGELEAP_BAD_RANGE. `place` may be NULL, as for pageleap_region_new(). The
/// part may belong to the range of a running job, as for pageleap_region_discard().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_back(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
    pool: *const pageleap_pool,
    place: *const pageleap_placement,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let (region, pool) = unsafe { (handle(region, "region")?, handle(pool, "pool")?) };
        // SAFETY: forwarded to the caller.
        region.0.back(bytes(&region.0, offset, length)?, unsafe { destination(&pool.0, place) }?)
    })
}

/// As pageleap_region_back(), but waits as pageleap_region_discard_within() does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_back_within(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
    pool: *const pageleap_pool,
    place: *const pageleap_placement,
    timeout_ns: u64,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let (region, pool) = unsafe { (handle(region, "region")?, handle(pool, "pool")?) };
        // SAFETY: forwarded to the caller.
        let place = unsafe { destination(&pool.0, place) }?;
        region.0.back_within(bytes(&region.0, offset, length)?, place, patience(timeout_ns))
    })
}

/// Asks the kernel whether each page of a region that has memory is present, on the node that
/// the page was placed on. Jobs may go on meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_verify(
    region: *const pageleap_region,
    verification: *mut pageleap_verification,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { write_verification(verification, &handle(region, "region")?.0.verify()?) }
    })
}

/// The nodes on which the pages of a region lie, as the kernel says, with the number of pages:
/// writes the first `capacity` nodes to `nodes`, and their number to `count`, which may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_placement(
    region: *const pageleap_region,
    nodes: *mut pageleap_node_pages,
    capacity: usize,
    count: *mut usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { list_counts(&handle(region, "region")?.0.placement()?, nodes, capacity, count) }
    })
}
