//! Mapping calls: memory files, fixed shared mappings, protection, advice, and the exchange of page
//! tables.
//!
//! Addresses are plain integers: most of them belong to ranges in which other threads read and
//! write, so that a Rust reference or a pointer with provenance would promise too much.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::errno::{Errno, check};

/// Refuse to make the file executable (Linux 6.3; `vm.memfd_noexec=2` demands it).
pub const MFD_NOEXEC_SEAL: libc::c_uint = 0x0008;
const MFD_HUGE_SHIFT: u32 = 26;

/// Creates a memory file that children do not inherit across `exec`, sealable and never executable.
/// `huge_page_bits` is the binary logarithm of the hugetlb page size (21 for 2 MB), or `None` for
/// base pages.
pub fn memfd_create(name: &CStr, huge_page_bits: Option<u32>) -> Result<OwnedFd, Errno> {
    let huge = huge_page_bits.map_or(0, |bits| libc::MFD_HUGETLB | (bits << MFD_HUGE_SHIFT));
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
    match memfd_create_with(name, flags | MFD_NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno(libc::EINVAL)) => memfd_create_with(name, flags),
        other => other,
    }
}

/// The same with these flags (`MFD_*`) and no others.
pub fn memfd_create_with(name: &CStr, flags: libc::c_uint) -> Result<OwnedFd, Errno> {
    // SAFETY: `name` is a C string; the call touches no other memory.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), flags) }.into())?;
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Fixes size and seals of a memory file: nobody who opens it can truncate it under us, which would
/// turn our next access into SIGBUS. Takes all permissions off it, so that other processes of the
/// user do not open it through `/proc/PID/fd` by accident (they can still do so on purpose: the
/// file is theirs as well).
pub fn memfd_seal(file: BorrowedFd<'_>, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the first call writes one struct; the others change only the file behind the
    // descriptor.
    unsafe {
        // A file larger than RLIMIT_FSIZE would not be refused, but end the process by SIGXFSZ.
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) == 0 && bytes as u64 > limit.rlim_cur {
            return Err(Errno(libc::EFBIG));
        }
        check(libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t).into())?;
        // A filter that refuses this leaves the file as other memory files are.
        libc::fchmod(file.as_raw_fd(), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        check(libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals).into()).map(drop)
    }
}

/// Reserves address space: no access, no memory, aligned to `align` (a power of two, at least the
/// base page).
pub fn reserve(len: usize, align: usize) -> Result<usize, Errno> {
    let spare = len.checked_add(align).ok_or(Errno(libc::ENOMEM))?;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { map_nothing(0, spare, 0) }?;
    let aligned = start.next_multiple_of(align);
    // SAFETY: both ends lie inside the mapping made above, which nobody else knows yet. A failing
    // trim only wastes address space.
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

/// Maps `[addr, addr + len)` to nothing (no access, no memory), in place of whatever is there; the
/// address space stays ours.
///
/// # Safety
/// The caller owns the range and nobody accesses it any more.
pub unsafe fn vacate(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller.
    unsafe { map_nothing(addr, len, libc::MAP_FIXED) }.map(drop)
}

/// # Safety
/// With `MAP_FIXED` the caller owns the range.
unsafe fn map_nothing(addr: usize, len: usize, fixed: libc::c_int) -> Result<usize, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: forwarded to the caller.
    let p = unsafe { libc::mmap(addr as *mut _, len, libc::PROT_NONE, flags, -1, 0) };
    if p == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(p as usize) }
}

/// Gives a range back to the kernel.
///
/// # Safety
/// The caller owns the range and nobody accesses it any more.
pub unsafe fn unmap(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::munmap(addr as *mut _, len) }.into()).map(drop)
}

/// Maps `len` bytes of `file` from `offset` on, shared, at exactly `addr`, in place of whatever is
/// there. With `populate` the page tables are filled before the call returns, as far as memory is
/// there (a failure to fill is not reported).
///
/// # Safety
/// The caller owns the range. Threads that access it meanwhile must expect the old or the new
/// contents, and, when the call fails, a hole (kernels before 6.12 can fail after they have
/// unmapped the old mapping).
pub unsafe fn map_file(
    addr: usize,
    len: usize,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: libc::c_int,
    populate: bool,
) -> Result<(), Errno> {
    let populate = if populate { libc::MAP_POPULATE } else { 0 };
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | populate;
    // SAFETY: forwarded to the caller.
    let p = unsafe {
        libc::mmap(addr as *mut _, len, prot, flags, file.as_raw_fd(), offset as libc::off_t)
    };
    if p == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// The same, but only where nothing is mapped: EEXIST otherwise (`MAP_FIXED_NOREPLACE`, Linux
/// 4.17). Page tables stay empty.
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
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: forwarded to the caller; nothing is replaced.
    let p = unsafe {
        libc::mmap(addr as *mut _, len, prot, flags, file.as_raw_fd(), offset as libc::off_t)
    };
    if p == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    if p as usize != addr {
        // Who does not know the flag takes the address for a wish: valgrind does, for one.
        // SAFETY: nobody else knows this mapping.
        unsafe { libc::munmap(p, len) };
        return Err(Errno(libc::EEXIST));
    }
    Ok(())
}

/// Whether every page of a range is mapped, whatever its access (`mincore(2)` reports ENOMEM for
/// holes). Allocates nothing.
pub fn is_mapped(addr: usize, len: usize) -> bool {
    /// Pages asked for at a time.
    const PAGES: usize = 256;
    let mut residency = [0u8; PAGES];
    (addr..addr + len).step_by(PAGES * 4096).all(|at| {
        let part = (PAGES * 4096).min(addr + len - at);
        // SAFETY: writes one byte per page of the part.
        while unsafe { libc::mincore(at as *mut _, part, residency.as_mut_ptr()) } != 0 {
            // It wants a page for itself.
            if Errno::last() != Errno(libc::EAGAIN) {
                return false;
            }
        }
        true
    })
}

/// Whether `headroom` more bytes would take the process over the address space that `RLIMIT_AS`
/// allows. With 0: whether it is over it, so that calls which unmap first and map then would fail
/// in between. Allocates nothing.
pub fn is_over_address_space_limit(page: usize, headroom: u64) -> bool {
    // SAFETY: writes one struct.
    let limit = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_AS, &mut limit) != 0
            || limit.rlim_cur == libc::RLIM_INFINITY
        {
            return false;
        }
        limit.rlim_cur
    };
    let mut text = [0u8; 64];
    // SAFETY: reads into a buffer of this function through a descriptor of its own.
    let n = unsafe {
        let fd = libc::open(c"/proc/self/statm".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return false;
        }
        let n = libc::read(fd, text.as_mut_ptr().cast(), text.len());
        libc::close(fd);
        n.max(0) as usize
    };
    let digits = text[..n].iter().take_while(|b| b.is_ascii_digit());
    let pages = digits.fold(0u64, |pages, d| pages * 10 + u64::from(d - b'0'));
    pages * page as u64 + headroom > limit
}

/// Moves the page tables of `[from, from + len)` to `[to, to + len)`, in place of whatever is
/// mapped there. `from` stays mapped to the same file, with empty page tables that fill again on
/// access (`mremap(2)` with `MREMAP_DONTUNMAP`: Linux 5.13 for shared mappings; EINVAL for
/// hugetlb).
///
/// # Safety
/// The caller owns both ranges, which do not overlap. Threads that access `to` meanwhile must
/// expect the old or the new contents, and, when the call fails, a hole.
pub unsafe fn exchange_page_tables(from: usize, to: usize, len: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: forwarded to the caller.
    let p = unsafe { libc::mremap(from as *mut _, len, len, flags, to as *mut libc::c_void) };
    if p == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// Reserves one base page just below the lowest mapping of the process, so that it comes first in
/// `/proc/self/smaps`. `lowest` is the address of that mapping. Fails with EEXIST if another thread
/// was faster.
pub fn reserve_below(lowest: usize, page: usize) -> Result<usize, Errno> {
    // A page apart, so that the two are never joined.
    let at =
        lowest.checked_sub(2 * page).filter(|at| *at >= MIN_ADDRESS).ok_or(Errno(libc::ENOMEM))?;
    reserve_at(at, page).map(|()| at)
}

/// Reserves `[at, at + len)`. EEXIST if something is mapped there (`MAP_FIXED_NOREPLACE`, Linux
/// 4.17).
pub fn reserve_at(at: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the flag keeps the kernel from replacing anything.
    let got = unsafe { map_nothing(at, len, libc::MAP_FIXED_NOREPLACE) }?;
    if got == at {
        return Ok(());
    }
    // An older kernel took the address as a hint.
    // SAFETY: the mapping that was just made, known to nobody.
    let _ = unsafe { unmap(got, len) };
    Err(Errno(libc::EEXIST))
}

/// Nothing is placed below: near-null pointers must keep faulting.
const MIN_ADDRESS: usize = 1 << 20;

/// Makes a second mapping of the page at `from`, with the attributes of the first and empty page
/// tables, at `to`, in place of what is mapped there (`mremap(2)` with an old size of 0: shared
/// mappings only).
///
/// # Safety
/// The caller owns `to`, and unmaps it again before the first mapping changes.
pub unsafe fn duplicate_mapping(from: usize, to: usize, page: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: forwarded to the caller; with an old size of 0 `from` stays as it is.
    let p = unsafe { libc::mremap(from as *mut _, 0, page, flags, to as *mut libc::c_void) };
    if p == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// Changes the protection of a range. Async-signal-safe.
///
/// # Safety
/// The caller owns the range; threads that access it against the new protection receive SIGSEGV.
pub unsafe fn protect(addr: usize, len: usize, prot: libc::c_int) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::mprotect(addr as *mut _, len, prot) }.into()).map(drop)
}

/// Advice that does not change contents (`madvise(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Children made by `fork` do not get the range.
    DontFork,
    /// Undoes [`Advice::DontFork`].
    DoFork,
    /// Core dumps leave the range out.
    DontDump,
    /// Undoes [`Advice::DontDump`].
    DoDump,
    /// Expect random access.
    Random,
    /// Expect sequential access.
    Sequential,
    /// Neither random nor sequential.
    Normal,
    /// Huge pages are welcome.
    HugePage,
    /// Huge pages are not.
    NoHugePage,
    /// Fill the page tables with writable entries, allocating what is missing (Linux 5.14). Fails
    /// with EFAULT instead of raising SIGBUS, and with EINVAL or EFAULT where the mapping does not
    /// allow writing: so it also tells whether an address is writable, without changing a byte.
    PopulateWrite,
    /// The same for reading (Linux 5.14).
    PopulateRead,
    /// Make huge pages of the range now, whatever the switches in sysfs say (Linux 6.1). Needs at
    /// least one page in each of them.
    Collapse,
}

/// Applies one piece of advice to a range. Async-signal-safe.
///
/// # Safety
/// The caller owns the range.
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
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::Collapse => libc::MADV_COLLAPSE,
    };
    // SAFETY: none of these discards contents; the rest is forwarded to the caller.
    check(unsafe { libc::madvise(addr as *mut _, len, advice) }.into()).map(drop)
}

/// Locks a range into memory; with `on_fault` only pages that are (or become) present (`mlock2(2)`,
/// Linux 4.4).
///
/// # Safety
/// The caller owns the range.
pub unsafe fn lock(addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
    let flags = if on_fault { libc::MLOCK_ONFAULT } else { 0 };
    // SAFETY: locking changes no contents.
    check(unsafe { libc::syscall(libc::SYS_mlock2, addr, len, flags) }).map(drop)
}

/// Undoes [`lock`].
///
/// # Safety
/// The caller owns the range.
pub unsafe fn unlock(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: unlocking changes no contents.
    check(unsafe { libc::munlock(addr as *const _, len) }.into()).map(drop)
}

/// Reads `len` bytes of a file from `offset` on into memory, all of them (`pread(2)`). EIO where
/// the file ends earlier.
///
/// # Safety
/// `dst` has `len` bytes that nobody else accesses.
pub unsafe fn read_at(
    file: BorrowedFd<'_>,
    offset: u64,
    dst: usize,
    len: usize,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let (to, at) = ((dst + done) as *mut libc::c_void, (offset + done as u64) as libc::off_t);
        // SAFETY: forwarded to the caller.
        match check(unsafe { libc::pread(file.as_raw_fd(), to, len - done, at) } as libc::c_long)? {
            0 => return Err(Errno(libc::EIO)),
            bytes => done += bytes,
        }
    }
    Ok(())
}

/// A counter that can be polled: readable once [`EventFd::signal`] has been called.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates one, closed on `exec`.
    pub fn new() -> Result<Self, Errno> {
        // SAFETY: the call touches no memory.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.into())?;
        // SAFETY: a fresh descriptor that nobody else knows.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Makes the descriptor readable; it stays so.
    pub fn signal(&self) {
        signal_event(self.0.as_fd());
    }
}

/// [`EventFd::signal`] of a borrowed descriptor.
pub fn signal_event(event: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight readable bytes. The only failure, EAGAIN, means that it is readable already.
    unsafe { libc::write(event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> OwnedFd {
        event.0
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
