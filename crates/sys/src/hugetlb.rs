//! Private anonymous memory of the hugetlb pool.

use crate::errno::Errno;

/// Maps `len` bytes of private anonymous memory, readable and writable, in hugetlb pages of
/// 2^`page_bits` bytes (`mmap(2)` with MAP_HUGETLB, Linux 2.6.32; the size of the page 3.8).
/// Returns the address. `len` is a multiple of the page.
///
/// The kernel reserves the pages on the whole machine, not on a node, and takes them when they are
/// touched. So a policy that allows one node only ([`Policy::Bind`](crate::Policy::Bind)) may raise
/// SIGBUS where the pool of that node is empty.
///
/// # Errors
/// ENOMEM: too few huge pages of this size are free and not reserved, or above RLIMIT_AS or
/// `vm.max_map_count`. EINVAL: the kernel has no huge pages of this size, or `len` is no multiple
/// of it.
pub fn map_private_huge(len: usize, page_bits: u32) -> Result<usize, Errno> {
    let size = (page_bits as libc::c_int) << libc::MAP_HUGE_SHIFT;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(start.expose_provenance()) }
}
