//! Mapping calls: memory files, shared mappings at fixed addresses, protection, advice, and moving
//! page tables from one mapping to another.
//!
//! Addresses are plain integers. Other threads read and write most of these ranges, so a Rust
//! reference or a pointer with provenance would promise too much.
//!
//! Addresses, lengths and file offsets are in bytes and are multiples of the page size of the
//! mapping. A call that gets another value fails with EINVAL.

use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::descriptor::{Kept, KeptFd};
use crate::errno::{Errno, check, check_descriptor};
use crate::process::{Resource, resource_limit};

/// The file can never be made executable (Linux 6.3). `vm.memfd_noexec=2` requires this flag.
pub const MFD_NOEXEC_SEAL: libc::c_uint = 0x0008;
const MFD_HUGE_SHIFT: u32 = 26;

/// Creates a memory file that is close-on-exec, sealable and, since Linux 6.3, never executable
/// (`memfd_create(2)`, Linux 3.17; 4.14 for huge pages).
///
/// `huge_page_bits` is the binary logarithm of the hugetlb page size in bytes (21 for 2 MB).
/// `None` asks for base pages.
///
/// # Errors
/// Those of [`memfd_create_with`].
pub fn memfd_create(name: &CStr, huge_page_bits: Option<u32>) -> Result<OwnedFd, Errno> {
    let huge = huge_page_bits.map_or(0, |bits| libc::MFD_HUGETLB | (bits << MFD_HUGE_SHIFT));
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
    match memfd_create_with(name, flags | MFD_NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno(libc::EINVAL)) => memfd_create_with(name, flags),
        other => other,
    }
}

/// Creates a memory file with exactly these flags (`MFD_*` of `memfd_create(2)`, Linux 3.17).
///
/// # Errors
/// EINVAL: the kernel does not know a flag. ENODEV: the machine has no huge pages of this size.
/// EACCES: `vm.memfd_noexec=2` is set and [`MFD_NOEXEC_SEAL`] is missing. EMFILE or ENFILE: too
/// many open files. ENOMEM: no memory for the file's description.
pub fn memfd_create_with(name: &CStr, flags: libc::c_uint) -> Result<OwnedFd, Errno> {
    // SAFETY: `name` is a C string, and the call reads no other memory. It returns a new
    // descriptor.
    unsafe { check_descriptor(libc::memfd_create(name.as_ptr(), flags).into()) }
}

/// Fixes the size of a memory file and its seals (`ftruncate(2)`; `fcntl(2)` with `F_ADD_SEALS`,
/// Linux 3.17). Another process that opens the file cannot truncate it afterwards, which would
/// turn our next access into SIGBUS.
///
/// All permission bits are removed from the file (`fchmod(2)`). Other processes of the same user
/// then do not open it through `/proc/PID/fd` by accident. They can still do so on purpose, because
/// they own the file.
///
/// # Errors
/// EFBIG: `bytes` is above RLIMIT_FSIZE. EPERM: the file is sealed already, or was made without
/// `MFD_ALLOW_SEALING`. EINVAL: the descriptor is not that of a memory file.
pub fn memfd_seal(file: BorrowedFd<'_>, bytes: usize) -> Result<(), Errno> {
    // Above RLIMIT_FSIZE, `ftruncate` would end the process by SIGXFSZ instead of failing.
    if resource_limit(Resource::FileSize).is_ok_and(|l| l.soft.is_some_and(|l| bytes as u64 > l)) {
        return Err(Errno(libc::EFBIG));
    }
    // SAFETY: the calls take no pointers; they change only the file behind the descriptor.
    unsafe {
        check(libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t).into())?;
        // A seccomp filter may refuse this call. The file then keeps the usual permissions of a
        // memory file.
        libc::fchmod(file.as_raw_fd(), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        check(libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals).into()).map(drop)
    }
}

/// Reserves `len` bytes of address space without access and without memory (`mmap(2)` with
/// PROT_NONE). The start is aligned to `align` bytes, a power of two of at least the base page
/// size.
///
/// # Errors
/// ENOMEM: above RLIMIT_AS or `vm.max_map_count`, or no gap of this size is left.
pub fn reserve(len: usize, align: usize) -> Result<usize, Errno> {
    let spare = len.checked_add(align).ok_or(Errno(libc::ENOMEM))?;
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
    let start = unsafe { map_nothing(0, spare, 0) }?;
    let aligned = start.next_multiple_of(align);
    // SAFETY: both ends lie inside the mapping made above, which no other code knows yet. If
    // trimming fails, only address space is wasted.
    unsafe {
        if aligned > start {
            let _ = unmap(start, aligned - start);
        }
        let end = aligned + len;
        if start + spare > end {
            let _ = unmap(end, start + spare - end);
        }
    }
    Ok(aligned)
}

/// Reserves address space like [`reserve`], at a random low address. It mostly lies below the
/// program and its heap, and so before them in `/proc/self/smaps`, where a reader pays for all
/// memory that is listed before. The addresses (64 GiB and up) are free in ordinary programs and
/// under the sanitizers. They avoid Java's compressed heap (below 32 GiB) and, for lengths up to
/// 176 GiB, Go's first arena (at 768 GiB). If the places that are tried are taken, the kernel
/// chooses.
///
/// # Errors
/// As [`reserve`].
pub fn reserve_low(len: usize, align: usize) -> Result<usize, Errno> {
    const LOWEST: usize = 64 << 30;
    const SPAN: usize = 448 << 30;
    const HIGHEST: usize = 1 << 46;
    const TRIES: usize = 4;
    let span = SPAN.max(len.saturating_mul(4)).min(HIGHEST);
    let places = span.saturating_sub(len) / align;
    let tries = if places > 0 { TRIES } else { 0 };
    let mut tried = (0..tries).map(|_| {
        let chance = RandomState::new().build_hasher().finish() as usize;
        LOWEST.next_multiple_of(align) + chance % places * align
    });
    match tried.find(|at| reserve_at(*at, len).is_ok()) {
        Some(at) => Ok(at),
        None => reserve(len, align),
    }
}

/// Replaces everything that is mapped in `[addr, addr + len)` by a reservation without access and
/// without memory (`mmap(2)` with PROT_NONE and MAP_FIXED). The address space stays ours.
///
/// # Errors
/// ENOMEM: above RLIMIT_AS or `vm.max_map_count`.
///
/// # Safety
/// The caller owns the range, and no thread accesses it any more.
pub unsafe fn vacate(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, and no thread accesses it.
    unsafe { map_nothing(addr, len, libc::MAP_FIXED) }.map(drop)
}

/// Maps anonymous memory without access; `fixed` is 0 or a `MAP_FIXED*` flag.
///
/// # Safety
/// With `MAP_FIXED` the caller owns the range.
unsafe fn map_nothing(addr: usize, len: usize, fixed: libc::c_int) -> Result<usize, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: only `MAP_FIXED` replaces mappings, and then the caller owns the range.
    check_mapping(unsafe { libc::mmap(addr as *mut _, len, libc::PROT_NONE, flags, -1, 0) })
}

/// Turns the result of `mmap` and `mremap` into an address.
fn check_mapping(start: *mut libc::c_void) -> Result<usize, Errno> {
    if start == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(start as usize) }
}

/// Removes all mappings from a range (`munmap(2)`).
///
/// # Errors
/// ENOMEM: the range cuts a mapping in two, and the process already has `vm.max_map_count`
/// mappings.
///
/// # Safety
/// The caller owns the range, and no thread accesses it any more.
pub unsafe fn unmap(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, and no thread accesses it.
    check(unsafe { libc::munmap(addr as *mut _, len) }.into()).map(drop)
}

/// Maps `len` bytes of `file` from `offset` on, shared, at exactly `addr` (`mmap(2)` with
/// MAP_FIXED). The new mapping replaces everything that was mapped in the range.
///
/// With `populate` the call also fills the page tables, as far as memory is available. A failure
/// to fill them is not reported.
///
/// # Errors
/// ENOMEM: above RLIMIT_AS or `vm.max_map_count`, or too few free huge pages. EAGAIN: the process
/// locks future mappings (`mlockall(2)`) and is above RLIMIT_MEMLOCK.
///
/// # Safety
/// The caller owns the range. A thread that accesses the range meanwhile sees the old or the new
/// contents. If the call fails, the thread may also meet a hole: kernels before 6.12 can fail after
/// they have removed the old mapping, and so can all kernels where the file is of huge pages
/// (hugetlb), because they reserve these last.
pub unsafe fn map_file(
    addr: usize,
    len: usize,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: libc::c_int,
    populate: bool,
) -> Result<(), Errno> {
    let populate = if populate { libc::MAP_POPULATE } else { 0 };
    // SAFETY: the caller owns the range.
    unsafe { map_shared(addr, len, file, offset, prot, libc::MAP_FIXED | populate) }.map(drop)
}

/// Like [`map_file`], but only where nothing is mapped (`mmap(2)` with MAP_FIXED_NOREPLACE, Linux
/// 4.17). The page tables stay empty.
///
/// # Errors
/// EEXIST: something is mapped in the range. ENOMEM and EAGAIN as for [`map_file`].
///
/// # Safety
/// The caller owns the range.
pub unsafe fn map_file_into_hole(
    addr: usize,
    len: usize,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: libc::c_int,
) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, and the flag keeps the kernel from replacing mappings.
    let start = unsafe { map_shared(addr, len, file, offset, prot, libc::MAP_FIXED_NOREPLACE) }?;
    if start != addr {
        // Without support for the flag the address is only a hint. Valgrind, for one, lacks it.
        // SAFETY: no other code knows this new mapping.
        unsafe { libc::munmap(start as *mut _, len) };
        return Err(Errno(libc::EEXIST));
    }
    Ok(())
}

/// Maps a file shared, with these further flags (`MAP_*`); returns the address.
///
/// # Safety
/// With `MAP_FIXED` the caller owns the range.
unsafe fn map_shared(
    addr: usize,
    len: usize,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: libc::c_int,
    flags: libc::c_int,
) -> Result<usize, Errno> {
    let flags = libc::MAP_SHARED | flags;
    let offset = offset as libc::off_t;
    // SAFETY: only `MAP_FIXED` replaces mappings, and then the caller owns the range.
    check_mapping(unsafe { libc::mmap(addr as *mut _, len, prot, flags, file.as_raw_fd(), offset) })
}

/// Whether every page of a range is mapped, with any access (`mincore(2)`, which reports ENOMEM for
/// holes). Allocates nothing.
pub fn is_mapped(addr: usize, len: usize) -> bool {
    /// Pages per call.
    const PAGES: usize = 256;
    let mut residency = [0u8; PAGES];
    (addr..addr + len).step_by(PAGES * 4096).all(|at| {
        let part = (PAGES * 4096).min(addr + len - at);
        // SAFETY: the call writes one byte per page of the part, which has at most `PAGES` pages.
        while unsafe { libc::mincore(at as *mut _, part, residency.as_mut_ptr()) } != 0 {
            // EAGAIN: the kernel had no free page for its own buffer.
            if Errno::last() != Errno(libc::EAGAIN) {
                return false;
            }
        }
        true
    })
}

/// Whether the process with `headroom` more bytes of address space would be above RLIMIT_AS.
/// Allocates nothing.
///
/// The answer comes from `getrlimit(2)` and `/proc/self/statm`; `page` is the base page size in
/// bytes. If either cannot be read, the answer is `false`. A headroom of 0 tells whether the
/// process is above the limit already. Calls that first unmap and then map would then fail halfway.
pub fn is_over_address_space_limit(page: usize, headroom: u64) -> bool {
    let Ok(Some(limit)) = resource_limit(Resource::AddressSpace).map(|limit| limit.soft) else {
        return false;
    };
    let mut text = [0u8; 64];
    let read = crate::open_own("statm").map_err(io::Error::from);
    let Ok(n) = read.and_then(|mut statm| statm.read(&mut text)) else { return false };
    let digits = text[..n].iter().take_while(|b| b.is_ascii_digit());
    let pages = digits.fold(0u64, |pages, d| pages * 10 + u64::from(d - b'0'));
    pages * page as u64 + headroom > limit
}

/// Moves the page tables of `[from, from + len)` to `[to, to + len)` (`mremap(2)` with
/// MREMAP_DONTUNMAP; for shared mappings Linux 5.13).
///
/// The call replaces everything that was mapped at `to`. `from` stays mapped to the same file, with
/// empty page tables that fill again on access.
///
/// # Errors
/// EINVAL: the kernel is too old, or the pages are hugetlb pages. ENOMEM: above RLIMIT_AS or
/// `vm.max_map_count`. EFAULT: `from` is not a single mapping.
///
/// # Safety
/// The caller owns both ranges, which do not overlap. A thread that accesses `to` meanwhile sees
/// the old or the new contents and, if the call fails, may also meet a hole.
pub unsafe fn exchange_page_tables(from: usize, to: usize, len: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let to = to as *mut libc::c_void;
    // SAFETY: the caller owns both ranges.
    check_mapping(unsafe { libc::mremap(from as *mut _, len, len, flags, to) }).map(drop)
}

/// Moves the mapping of `[from, from + len)`, with its page tables, to `[to, to + len)`, where
/// nothing is mapped (`mremap(2)`; for hugetlb pages Linux 5.16). Afterwards nothing is mapped at
/// `from`.
///
/// # Errors
/// EEXIST: something is mapped at `to`. EINVAL: the kernel moves no hugetlb pages. ENOMEM: above
/// RLIMIT_AS or `vm.max_map_count`. EFAULT: `from` is not a single mapping. In each case both ranges
/// are as they were.
///
/// # Safety
/// The caller owns both ranges, which do not overlap, and no thread accesses `from` any more.
pub unsafe fn move_mapping(from: usize, to: usize, len: usize) -> Result<(), Errno> {
    // The reservation keeps other threads from mapping something there.
    reserve_at(to, len)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller owns `from`, and `to` was reserved above.
    let moved = unsafe { libc::mremap(from as *mut _, len, len, flags, to as *mut libc::c_void) };
    check_mapping(moved).map(drop).inspect_err(|_| {
        // SAFETY: at `to` is the reservation made above, or nothing.
        let _ = unsafe { unmap(to, len) };
    })
}

/// Reserves `len` bytes below `lowest`, the address of the lowest mapping of the process. The new
/// mapping then comes first in `/proc/self/smaps`. A gap of as many bytes stays above it.
///
/// # Errors
/// EEXIST: another thread has mapped something there meanwhile. ENOMEM: `lowest` is too close to
/// address 0. Otherwise as [`reserve_at`].
pub fn reserve_below(lowest: usize, len: usize) -> Result<usize, Errno> {
    // The gap keeps the kernel from merging the two mappings.
    let at =
        lowest.checked_sub(2 * len).filter(|at| *at >= MIN_ADDRESS).ok_or(Errno(libc::ENOMEM))?;
    reserve_at(at, len).map(|()| at)
}

/// Reserves `[at, at + len)` without access and without memory (`mmap(2)` with
/// MAP_FIXED_NOREPLACE, Linux 4.17; older kernels give the same results).
///
/// # Errors
/// EEXIST: something is mapped in the range. EPERM: `at` is below `vm.mmap_min_addr`. ENOMEM: above
/// RLIMIT_AS or `vm.max_map_count`.
pub fn reserve_at(at: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the flag keeps the kernel from replacing mappings.
    let got = unsafe { map_nothing(at, len, libc::MAP_FIXED_NOREPLACE) }?;
    if got == at {
        return Ok(());
    }
    // An older kernel has taken the address as a hint. SAFETY: no other code knows this mapping.
    let _ = unsafe { unmap(got, len) };
    Err(Errno(libc::EEXIST))
}

/// The lowest address that [`reserve_below`] uses: accesses through near-null pointers must keep
/// faulting.
const MIN_ADDRESS: usize = 1 << 20;

/// Makes a second mapping of the page at `from`, at address `to` (`mremap(2)` with an old size of
/// 0; shared mappings only). `page` is the page size of the mapping in bytes.
///
/// The second mapping has the attributes of the first and empty page tables. It replaces everything
/// that was mapped at `to`.
///
/// # Errors
/// EINVAL: the mapping is private. EFAULT: nothing is mapped at `from`. ENOMEM: above RLIMIT_AS or
/// `vm.max_map_count`.
///
/// # Safety
/// The caller owns `to`, and unmaps `to` again before the first mapping changes.
pub unsafe fn duplicate_mapping(from: usize, to: usize, page: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let to = to as *mut libc::c_void;
    // SAFETY: the caller owns `to`; an old size of 0 leaves the mapping at `from` as it is.
    check_mapping(unsafe { libc::mremap(from as *mut _, 0, page, flags, to) }).map(drop)
}

/// Sets the protection of a range to `prot`, `PROT_*` flags (`mprotect(2)`). Async-signal-safe.
///
/// # Errors
/// ENOMEM: the range has a hole, or cutting a mapping would take the process above
/// `vm.max_map_count`. EACCES: the file does not allow this access.
///
/// # Safety
/// The caller owns the range. A thread whose access the new protection forbids receives SIGSEGV.
pub unsafe fn protect(addr: usize, len: usize, prot: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the caller owns the range.
    check(unsafe { libc::mprotect(addr as *mut _, len, prot) }.into()).map(drop)
}

/// Advice that does not change contents, except [`Advice::DropTables`] for private memory
/// (`madvise(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Child processes do not inherit the range (MADV_DONTFORK).
    DontFork,
    /// Undoes [`Advice::DontFork`] (MADV_DOFORK).
    DoFork,
    /// Core dumps leave the range out (MADV_DONTDUMP, Linux 3.4).
    DontDump,
    /// Undoes [`Advice::DontDump`] (MADV_DODUMP, Linux 3.4).
    DoDump,
    /// Expect random access (MADV_RANDOM).
    Random,
    /// Expect sequential access (MADV_SEQUENTIAL).
    Sequential,
    /// Expect neither random nor sequential access (MADV_NORMAL).
    Normal,
    /// The kernel may use transparent huge pages (MADV_HUGEPAGE).
    HugePage,
    /// The kernel must not use transparent huge pages (MADV_NOHUGEPAGE). Since Linux 6.12 it does
    /// not map present ones as such either.
    NoHugePage,
    /// Empties the page tables of a shared mapping (MADV_DONTNEED; of hugetlb pages Linux 5.18).
    /// When the call returns, no CPU has a translation of them. Threads that touch the range fill
    /// them again. Locked ranges are refused. Pages of a private mapping would be lost.
    DropTables,
    /// Fills the page tables with writable entries and allocates missing pages
    /// (MADV_POPULATE_WRITE, Linux 5.14).
    ///
    /// Where an access would raise SIGBUS, the call fails with EFAULT. Where the mapping forbids
    /// writing, it fails with EINVAL or EFAULT. The call therefore also tells whether an address is
    /// writable, without changing a byte.
    PopulateWrite,
    /// Fills the page tables with readable entries (MADV_POPULATE_READ, Linux 5.14).
    PopulateRead,
    /// Makes huge pages of the range now, even if they are switched off in sysfs (MADV_COLLAPSE,
    /// Linux 6.1). Each of the huge pages needs at least one present page in its range.
    Collapse,
}

/// Applies advice to a range (`madvise(2)`). Async-signal-safe.
///
/// # Errors
/// EINVAL: the kernel does not know the advice, or the advice does not fit the mapping. ENOMEM: the
/// range has a hole, or the kernel has no memory. EFAULT: see [`Advice::PopulateWrite`]. EHWPOISON:
/// a page to populate lies in broken memory. EAGAIN or EBUSY: the kernel could not collapse the
/// pages now.
///
/// # Safety
/// The caller owns the range, which is a shared mapping if the advice is
/// [`Advice::DropTables`].
pub unsafe fn set_advice(addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
    let advice = match advice {
        Advice::DontFork => libc::MADV_DONTFORK,
        Advice::DoFork => libc::MADV_DOFORK,
        Advice::DontDump => libc::MADV_DONTDUMP,
        Advice::DoDump => libc::MADV_DODUMP,
        Advice::Random => libc::MADV_RANDOM,
        Advice::Sequential => libc::MADV_SEQUENTIAL,
        Advice::Normal => libc::MADV_NORMAL,
        Advice::HugePage => libc::MADV_HUGEPAGE,
        Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
        Advice::DropTables => libc::MADV_DONTNEED,
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::Collapse => libc::MADV_COLLAPSE,
    };
    // SAFETY: the caller owns the range, and no advice of the list discards contents that it
    // shares with a file.
    check(unsafe { libc::madvise(addr as *mut _, len, advice) }.into()).map(drop)
}

/// Maps 2 MB of a new hugetlb memory file, readable and writable, without allocating or reserving a
/// huge page. Returns the address. A thread that touches the mapping allocates one, or gets SIGBUS
/// if none is free.
///
/// # Errors
/// EINVAL: the kernel has no huge pages. ENODEV: none of this size. EMFILE or ENFILE: too many open
/// files. ENOMEM: above RLIMIT_AS or `vm.max_map_count`.
pub fn map_huge_without_page() -> Result<usize, Errno> {
    let file = memfd_create(c"pageleap:probe", Some(HUGE_2M.ilog2()))?;
    memfd_seal(file.as_fd(), HUGE_2M)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
    unsafe { map_shared(0, HUGE_2M, file.as_fd(), 0, prot, libc::MAP_NORESERVE) }
}

const HUGE_2M: usize = 2 << 20;

/// Tries whether the kernel can drop the page tables of huge pages ([`Advice::DropTables`] of
/// hugetlb, Linux 5.18).
///
/// # Errors
/// EINVAL: it does not. Otherwise as [`map_huge_without_page`].
pub fn check_that_huge_tables_drop() -> Result<(), Errno> {
    let at = map_huge_without_page()?;
    // SAFETY: nobody else knows the mapping made above, and nothing is stored in it.
    unsafe {
        let dropped = set_advice(at, HUGE_2M, Advice::DropTables);
        unmap(at, HUGE_2M)?;
        dropped
    }
}

/// Gives the pages of a range back, even of a locked one (MADV_DONTNEED, or MADV_DONTNEED_LOCKED of
/// Linux 5.18). Private anonymous memory is zero afterwards.
///
/// # Errors
/// ENOMEM: the range has a hole. EINVAL: the range is locked, and the kernel older than 5.18.
///
/// # Safety
/// The caller owns the range, and nobody needs its contents.
pub unsafe fn discard(addr: usize, len: usize) -> Result<(), Errno> {
    /// `MADV_DONTNEED_LOCKED` of `include/uapi/asm-generic/mman-common.h`.
    const DONTNEED_LOCKED: libc::c_int = 24;
    // SAFETY: the caller gives the contents up.
    let advise = |advice| unsafe { check(libc::madvise(addr as *mut _, len, advice).into()) };
    match advise(libc::MADV_DONTNEED) {
        Err(Errno(libc::EINVAL)) => advise(DONTNEED_LOCKED),
        other => other,
    }
    .map(drop)
}

/// Locks a range into memory (`mlock2(2)`, Linux 4.4). With `on_fault` the call locks only the
/// pages that are present, and others as soon as they are.
///
/// # Errors
/// ENOMEM: above RLIMIT_MEMLOCK, or the range has a hole. EPERM: RLIMIT_MEMLOCK is 0. EAGAIN: some
/// pages could not be locked.
///
/// # Safety
/// The caller owns the range.
pub unsafe fn lock(addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
    let flags = if on_fault { libc::MLOCK_ONFAULT } else { 0 };
    // SAFETY: locking changes no contents.
    check(unsafe { libc::syscall(libc::SYS_mlock2, addr, len, flags) }).map(drop)
}

/// Undoes [`lock`] (`munlock(2)`).
///
/// # Errors
/// ENOMEM: the range has a hole, or cutting a mapping would take the process above
/// `vm.max_map_count`.
///
/// # Safety
/// The caller owns the range.
pub unsafe fn unlock(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: unlocking changes no contents.
    check(unsafe { libc::munlock(addr as *const _, len) }.into()).map(drop)
}

/// Reads exactly `len` bytes of a file, from `offset` on, into memory at `dst` (`pread(2)`).
///
/// # Errors
/// EIO: the file ends before `offset + len`, or the kernel could not read it.
///
/// # Safety
/// `dst` has `len` writable bytes that no other thread accesses.
pub unsafe fn read_at(
    file: BorrowedFd<'_>,
    offset: u64,
    dst: usize,
    len: usize,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let (to, at) = ((dst + done) as *mut libc::c_void, (offset + done as u64) as libc::off_t);
        // SAFETY: the call writes at most the rest of the `len` bytes that the caller vouches for.
        match check(unsafe { libc::pread(file.as_raw_fd(), to, len - done, at) } as libc::c_long)? {
            0 => return Err(Errno(libc::EIO)),
            bytes => done += bytes,
        }
    }
    Ok(())
}

/// A descriptor for `poll(2)` that becomes readable when [`Event::signal`] is called.
///
/// It is a pipe with one descriptor for both reading and writing (fifo(7)). Unlike an eventfd it
/// has an inode of its own, so it can be told from descriptors of other code.
#[derive(Debug)]
pub struct Event(KeptFd);

impl Event {
    /// Creates a descriptor that is not readable yet. It is close-on-exec and never blocks. Where
    /// `/proc` is not mounted, it is an eventfd.
    ///
    /// # Errors
    /// EMFILE or ENFILE: too many open files. ENOMEM: the kernel has no memory.
    pub fn new() -> Result<Self, Errno> {
        let mut ends = [-1; 2];
        // SAFETY: the kernel writes two new descriptors.
        check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
        // SAFETY: both are new, and nobody else has them.
        let [reads, _writes] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // A thread may have its own table of descriptors (CLONE_FILES), and /proc/self/fd shows the
        // main thread's.
        let path = format!("/proc/thread-self/fd/{}\0", reads.as_raw_fd());
        let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the path ends with NUL, and the call returns a new descriptor.
        unsafe { check_descriptor(libc::open(path.as_ptr().cast(), flags).into()) }
            .or_else(|_| {
                let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
                // SAFETY: the call takes no pointers, and returns a new descriptor.
                unsafe { check_descriptor(libc::eventfd(0, flags).into()) }
            })
            .and_then(KeptFd::new)
            .map(Event)
    }

    /// Makes the descriptor readable. It stays readable, because nothing reads it. If other code
    /// has closed it, nothing happens. Returns whether it is still this library's.
    pub fn signal(&self) -> bool {
        signal_event(self.0.kept())
    }

    /// The kept descriptor, for code that lives no longer than this value.
    pub fn kept(&self) -> Kept {
        self.0.kept()
    }

    /// Gives up the ownership: the caller closes the descriptor by [`Kept::close`].
    pub fn into_kept(self) -> Kept {
        self.0.into_kept()
    }
}

/// Signals an [`Event`] whose descriptor is kept elsewhere. Returns whether it is still this
/// library's.
pub fn signal_event(event: Kept) -> bool {
    let is_ours = event.is_ours();
    if is_ours {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the call reads the eight bytes of `one`. Its only failure, EAGAIN, means that the
        // descriptor is readable already.
        unsafe { libc::write(event.number(), one.as_ptr().cast(), one.len()) };
    }
    is_ours
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    #[test]
    fn low_addresses_lie_below_the_program_unless_they_are_too_many() {
        const ALIGN: usize = 1 << 30;
        let program =
            low_addresses_lie_below_the_program_unless_they_are_too_many as *const () as usize;
        let some: Vec<usize> = (0..8).map(|_| reserve_low(4 * ALIGN, ALIGN).unwrap()).collect();
        for at in &some {
            assert!(*at < program && at.is_multiple_of(ALIGN) && *at >= 64 << 30, "{at:#x}");
        }
        assert!(some.windows(2).any(|two| two[0] != two[1]), "the same place each time");
        for at in some {
            // SAFETY: reserved above, and used by nobody.
            unsafe { unmap(at, 4 * ALIGN) }.unwrap();
        }
        // No place is large enough, and the kernel has none either.
        assert_eq!(reserve_low(1 << 47, ALIGN), Err(Errno(libc::ENOMEM)));
    }

    #[test]
    fn an_event_is_of_the_threads_own_table() {
        let mode = std::thread::spawn(|| {
            // SAFETY: the call takes no pointers; from here on descriptors are this thread's own.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let null = std::fs::File::open("/dev/null").unwrap();
            // Take numbers that no other table has.
            let taken: Vec<_> = (0..300).map(|_| null.try_clone().unwrap()).collect();
            let event = Event::new().unwrap();
            let mut found = MaybeUninit::<libc::stat>::uninit();
            // SAFETY: the kernel fills the struct.
            let mode = unsafe {
                assert_eq!(libc::fstat(event.as_fd().as_raw_fd(), found.as_mut_ptr()), 0);
                found.assume_init().st_mode & libc::S_IFMT
            };
            drop(taken);
            mode
        });
        assert_eq!(mode.join().unwrap(), libc::S_IFIFO, "it is another file");
    }
}
