//! Pools: memory of nodes, faulted in before regions use it.

use std::ffi::c_void;

use pageleap::{NodeId, Pool};

use crate::boundary::{bad, flag, free, give, handle, list, nothing_yet, read, value};
use crate::page_size::{number, page_size};
use crate::placement::{pageleap_placement, pageleap_verification, placement, write_verification};
use crate::status::pageleap_status;

/// Memory of one or several nodes: faulted in, verified, and free to be used by regions.
///
/// The memory goes back to the system when the pool has been freed and no region has frames of
/// it any more.
pub struct pageleap_pool(pub(crate) Pool);

/// How a pool is made. If all fields but size are 0, the pool has 4 KB pages and is not locked.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_pool_options {
    /// sizeof(pageleap_pool_options).
    pub size: usize,
    /// The size of its pages, one of pageleap_page_size.
    pub page_size: u32,
    /// Whether the pool is locked, so that it is never swapped out. Locked memory counts against
    /// RLIMIT_MEMLOCK. hugetlb pages are never swapped out in any case.
    pub is_locked: flag,
    /// How many threads fault the memory in, at most one for each 32 MB; 0: one for each CPU of
    /// a node, at most 8.
    pub threads: usize,
    /// A callback for progress, called about every 32 MB with the bytes done and the bytes to do;
    /// NULL: none. The threads that fault the memory in call it, possibly several at once. It must
    /// not call functions of this library, throw or longjmp.
    pub progress: Option<unsafe extern "C" fn(data: *mut c_void, done: u64, total: u64)>,
    /// Passed to the callback as it is.
    pub progress_data: *mut c_void,
}
grows!(pageleap_pool_options, 40, progress_data);

/// A callback with its data. The program promises that both may be used from other threads
/// during the call.
struct Report(unsafe extern "C" fn(*mut c_void, u64, u64), *mut c_void);
// SAFETY: the documentation of `progress` says that other threads call it.
unsafe impl Send for Report {}
// SAFETY: as above.
unsafe impl Sync for Report {}

impl Report {
    fn tell(&self, done: u64, total: u64) {
        // SAFETY: the program's function, called as documented.
        unsafe { (self.0)(self.1, done, total) }
    }
}

/// Makes a pool: takes `bytes` bytes (at most 2^46, rounded up to whole pages) of the nodes of a
/// placement, and faults them in. Then it asks the kernel whether they lie on their nodes, in pages
/// of the size asked for. `options` may be NULL. The call takes some 100 ms per GB of 4 KB pages.
/// If it fails, everything has been given back.
///
/// The pool is freed with pageleap_pool_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_new(
    place: *const pageleap_placement,
    bytes: u64,
    options: *const pageleap_pool_options,
    pool: *mut *mut pageleap_pool,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(pool) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let placement = unsafe { placement(place) }?;
        let placement =
            placement.ok_or_else(|| bad("placement", "it is NULL", "name at least one node"))?;
        let mut builder = Pool::builder(placement, bytes);
        // SAFETY: forwarded to the caller.
        if let Some(options) = unsafe { read(options) }? {
            builder =
                builder.page_size(page_size(options.page_size)?).locked(options.is_locked != 0);
            if options.threads > 0 {
                builder = builder.threads(options.threads);
            }
            if let Some(callback) = options.progress {
                let report = Report(callback, options.progress_data);
                builder = builder.progress(move |done, total| report.tell(done, total));
            }
        }
        // SAFETY: forwarded to the caller.
        unsafe { give(pool, "pool", || Ok(pageleap_pool(builder.build()?))) }
    })
}

/// Frees a pool; NULL is allowed. Jobs and regions that have frames of the pool go on, and its
/// memory goes back to the system after the last of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_free(pool: *mut pageleap_pool) {
    // SAFETY: forwarded to the caller.
    unsafe { free(pool) };
}

/// The size of a pool's pages, one of pageleap_page_size. 0, which is also PAGELEAP_PAGE_4K, for
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_page_size(pool: *const pageleap_pool) -> u32 {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(number(unsafe { handle(pool, "pool") }?.0.page_size())))
}

/// The size of a pool in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_bytes(pool: *const pageleap_pool) -> u64 {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(pool, "pool") }?.0.bytes()))
}

/// The free bytes of a pool; 0 for NULL. Frames that a job is recycling do not count as free,
/// but a call that needs them gets them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_free_bytes(pool: *const pageleap_pool) -> u64 {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(pool, "pool") }?.0.free_bytes()))
}

/// The free bytes of a pool on one node; 0 for a node that is not one of the pool's, and for
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_free_bytes_on(pool: *const pageleap_pool, node: u32) -> u64 {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(pool, "pool") }?.0.free_bytes_on(NodeId(node))))
}

/// The nodes of a pool: writes the first `capacity` of them to `nodes`, and their number to
/// `count`, which may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_nodes(
    pool: *const pageleap_pool,
    nodes: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let all: Vec<u32> =
            unsafe { handle(pool, "pool") }?.0.nodes().iter().map(|node| node.0).collect();
        // SAFETY: forwarded to the caller.
        unsafe { list(&all, nodes, capacity, count, "nodes") }
    })
}

/// Asks the kernel where all frames of a pool lie, free or not. It takes some 60 ms per GB of 4
/// KB pages; jobs may go on meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_pool_verify(
    pool: *const pageleap_pool,
    verification: *mut pageleap_verification,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        unsafe { write_verification(verification, &handle(pool, "pool")?.0.verify()?) }
    })
}
