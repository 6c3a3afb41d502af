//! Leaps of memory that no pool owns: memory of malloc() and mmap(), with reserves that make such
//! leaps fast.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use pageleap::{MemoryMigration, NodeId, Reserve};

use crate::boundary::{array, bad, each, flag, free, give, handle, nothing_yet, read, value};
use crate::job::pageleap_job;
use crate::migration::{memory_engine, unless_0};
use crate::placement::{pageleap_placement, placement};
use crate::status::pageleap_status;

/// A reserve: populated memory of a node, for leaps of memory that no pool owns. A leap copies into
/// populated memory, and populating 4 KB pages takes the time of five copies. A program that wants
/// fast leaps makes a reserve beforehand. The memory that a leap takes from it becomes the
/// program's.
pub struct pageleap_reserve(Arc<Reserve>);

/// Takes `bytes` bytes of a node, rounded up to 2 MB, in pages of PAGELEAP_PAGE_4K or
/// PAGELEAP_PAGE_THP. The reserve is freed with pageleap_reserve_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_reserve_new(
    node: u32,
    bytes: usize,
    page_size: u32,
    reserve: *mut *mut pageleap_reserve,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(reserve) };
    boundary!({
        let page = crate::page_size::page_size(page_size)?;
        let make = || Ok(pageleap_reserve(Arc::new(Reserve::new(NodeId(node), bytes, page)?)));
        // SAFETY: forwarded to the caller.
        unsafe { give(reserve, "reserve", make) }
    })
}

/// The bytes of a reserve that leaps can still take; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_reserve_free_bytes(reserve: *const pageleap_reserve) -> usize {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(reserve, "reserve") }?.0.free_bytes()))
}

/// Populates as much memory as leaps have taken from the reserve. No job may use it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_reserve_refill(
    reserve: *const pageleap_reserve,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    boundary!({ unsafe { handle(reserve, "reserve") }?.0.refill() })
}

/// Frees a reserve; NULL is allowed. Jobs that use it go on, and keep the memory that they have
/// taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_reserve_free(reserve: *mut pageleap_reserve) {
    // SAFETY: forwarded to the caller.
    unsafe { free(reserve) };
}

/// A range of memory of this process, and where its pages are to lie.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_memory_range {
    /// sizeof(pageleap_memory_range), the same in all elements of an array.
    pub size: usize,
    /// Its first byte.
    pub address: *mut c_void,
    /// How many bytes. The whole pages among them move.
    pub length: usize,
    /// The nodes that the pages go to.
    pub place: *const pageleap_placement,
}
grows!(pageleap_memory_range, 32, place);

/// How a job moves memory that no pool owns. If all fields but size are 0, the library chooses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_memory_options {
    /// sizeof(pageleap_memory_options).
    pub size: usize,
    /// The engine. PAGELEAP_ENGINE_UFFD_MOVE: only this one; memory that it cannot move is refused,
    /// and pages that it leaves stay where they are. PAGELEAP_ENGINE_KERNEL: the kernel moves
    /// everything. PAGELEAP_ENGINE_AUTO: uffd-move where it works, and the kernel for the rest.
    pub engine: u32,
    /// Whether pages that already lie on the right node move, too, to other frames of that node:
    /// for measurements on machines with one node.
    pub renew: flag,
    /// Reserves from which copies take their memory, as long as a reserve of the right node and
    /// page size has some. The array is not needed after the call.
    pub reserves: *const *const pageleap_reserve,
    /// How many reserves there are.
    pub reserve_count: usize,
    /// Nanoseconds after which the job moves no more pages; 0: no limit.
    pub timeout_ns: u64,
    /// The longest time, in nanoseconds, for which a thread of the program should have to wait for
    /// the job; 0: half a millisecond. A target, not a limit.
    pub wait_budget_ns: u64,
    /// The most bytes that the job copies per second; 0: no limit.
    pub rate_limit_bytes_per_s: u64,
}
grows!(pageleap_memory_options, 56, rate_limit_bytes_per_s);

/// Starts a job that moves memory that no pool owns: memory of malloc() and mmap(). The addresses
/// stay, and the program goes on. The call returns at once. `options` may be NULL. If the call
/// fails, no page has moved. The job is freed with pageleap_job_free().
///
/// Private anonymous memory moves in place by the engine uffd-move (Linux 6.8, and a userfaultfd
/// as for the engine precopy). Everything else in the ranges, and all of it where that engine does
/// not work, moves by the kernel (move_pages(2)): files, shared memory, hugetlb pages, memory that
/// cannot be written.
///
/// The program promises, until the job has ended: no thread frees, reallocates, unmaps, remaps or
/// protects the ranges, and none makes a child by the bare system call (fork(), vfork() and
/// posix_spawn() may be used). Ranges contain allocations of the program only; other allocations of
/// the same heap may come and go. The ranges have no mutexes with priority inheritance, no word for
/// FUTEX_WAKE_OP, and no memory of the library such as a reserve, and no O_DIRECT read of a network
/// file system into them is under way. Everything else is allowed: loads, stores, system calls that
/// read and write the memory, madvise(MADV_DONTNEED), threads that begin and end. Pages that are
/// pinned for I/O stay where they are, and so do pages that a child shares. A thread whose stack,
/// thread-local memory or held robust mutexes lie in the ranges must not end.
///
/// The job's threads have ordinary priority even if the calling thread has a lower one, as far as
/// the process may raise it, because threads of the program wait for their calls. Everything else
/// they inherit as the threads of pageleap_job_start() do. Threads that move pages in place run on
/// CPUs of the destination's node.
///
/// PAGELEAP_BAD_ARGUMENT: a range has no whole page, a hole, a stack, memory of a region, or memory
/// that the allocator hands out to others; or ranges overlap. PAGELEAP_ENGINE_REFUSED: the engine
/// that was asked for does not work here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_leap_memory(
    ranges: *const pageleap_memory_range,
    range_count: usize,
    options: *const pageleap_memory_options,
    job: *mut *mut pageleap_job,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(job) };
    boundary!({
        let mut migration = MemoryMigration::new();
        let add = |range: &pageleap_memory_range| {
            // SAFETY: forwarded to the caller.
            let to = unsafe { placement(range.place) }?;
            let to = to.ok_or_else(|| bad("place", "it is NULL", "name at least one node"))?;
            let before = std::mem::take(&mut migration);
            // SAFETY: forwarded to the caller.
            migration = unsafe { before.range(range.address.cast(), range.length, to) };
            Ok(())
        };
        // SAFETY: forwarded to the caller.
        unsafe { each(ranges, range_count, "ranges", add) }?;
        // SAFETY: forwarded to the caller.
        if let Some(options) = unsafe { read(options) }? {
            // SAFETY: forwarded to the caller.
            migration = unsafe { with_options(migration, &options) }?;
        }
        // SAFETY: forwarded to the caller.
        unsafe { give(job, "job", || Ok(pageleap_job(migration.start()?))) }
    })
}

/// # Safety
/// The reserves are handles that nobody has freed.
unsafe fn with_options(
    migration: MemoryMigration,
    options: &pageleap_memory_options,
) -> Result<MemoryMigration, pageleap::Error> {
    let mut migration = migration.engine(memory_engine(options.engine)?).renew(options.renew != 0);
    // SAFETY: forwarded to the caller.
    for reserve in unsafe { array(options.reserves, options.reserve_count, "reserves") }? {
        // SAFETY: forwarded to the caller.
        migration = migration.reserve(&unsafe { handle(*reserve, "reserve") }?.0);
    }
    if let Some(ns) = unless_0(options.timeout_ns) {
        migration = migration.timeout(Duration::from_nanos(ns));
    }
    if let Some(ns) = unless_0(options.wait_budget_ns) {
        migration = migration.wait_budget(Duration::from_nanos(ns));
    }
    if let Some(rate) = unless_0(options.rate_limit_bytes_per_s) {
        migration = migration.rate_limit(rate);
    }
    Ok(migration)
}
