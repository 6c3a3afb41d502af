//! Memory policies and placement queries: `mbind(2)`, `set_mempolicy(2)`, `move_pages(2)`.

use crate::errno::{Errno, check};

/// Node ids that fit into the masks used here. Linux allows 1024 (`CONFIG_NODES_SHIFT` = 10).
pub const MAX_NODES: usize = 1024;

const MASK_WORDS: usize = MAX_NODES / 64;
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_BIND: libc::c_int = 2;
/// Node ids mean physical ids and stay so when the cpuset changes (Linux 2.6.26).
const MPOL_F_STATIC_NODES: libc::c_int = 1 << 15;

/// Where the kernel takes new frames of a mapping from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// From this node while it has any, else from the nearest that has.
    Preferred(u32),
    /// From this node only. A node that runs full then means the OOM killer (base pages) or SIGBUS
    /// (hugetlb pages).
    Bind(u32),
    /// As the faulting thread's own policy says, which is what a new mapping has.
    Default,
}

/// Sets the policy of the mapping `[addr, addr + len)`. On a shared mapping of a memory file with
/// base pages it is set for the mapping *and* for that part of the file (Linux, mm/mempolicy.c,
/// `vma_replace_policy`); on hugetlb for the mapping only. The kernel does not join neighbouring
/// mappings with different policies.
///
/// # Safety
/// The range must be mapped by the caller and stay so during the call. Contents and addresses do
/// not change.
pub unsafe fn bind(addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
    let (mode, node) = match policy {
        Policy::Preferred(n) => (MPOL_PREFERRED, Some(n)),
        Policy::Bind(n) => (MPOL_BIND, Some(n)),
        Policy::Default => (MPOL_DEFAULT, None),
    };
    let mask = mask_of(node)?;
    let (mode, nodes, bits) = arguments(mode, &mask);
    // SAFETY: the mask outlives the call.
    check(unsafe { libc::syscall(libc::SYS_mbind, addr, len, mode, nodes, bits, 0) }).map(drop)
}

/// Sets where the calling thread's own allocations come from, page tables among them (they follow
/// the thread's policy, not the mapping's): preferably from `node`, or, with `None`, from where the
/// thread runs.
pub fn prefer_node(node: Option<u32>) -> Result<(), Errno> {
    let mask = mask_of(node)?;
    let (mode, nodes, bits) =
        arguments(if node.is_some() { MPOL_PREFERRED } else { MPOL_DEFAULT }, &mask);
    // SAFETY: the mask outlives the call; the policy changes where memory comes from, not what it
    // contains.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits) }).map(drop)
}

/// A set of at most one node.
fn mask_of(node: Option<u32>) -> Result<[u64; MASK_WORDS], Errno> {
    let mut mask = [0u64; MASK_WORDS];
    if let Some(node) = node {
        *mask.get_mut(node as usize / 64).ok_or(Errno(libc::EINVAL))? |= 1 << (node % 64);
    }
    Ok(mask)
}

/// Mode, nodes and their number as the kernel wants them: it counts one bit more than the mask has,
/// and takes no nodes with the default.
fn arguments(mode: libc::c_int, mask: &[u64; MASK_WORDS]) -> (libc::c_int, *const u64, usize) {
    if mode == MPOL_DEFAULT {
        (mode, std::ptr::null(), 0)
    } else {
        (mode | MPOL_F_STATIC_NODES, mask.as_ptr(), MAX_NODES + 1)
    }
}

/// Asks on which node each page lies: `status[i]` becomes the node of the page at `pages[i]`, or a
/// negated error number (`-ENOENT`, on older kernels `-EFAULT`, for a page that is not present).
pub fn nodes_of_pages(pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
    assert_eq!(pages.len(), status.len());
    // SAFETY: a null node list makes `move_pages` a query; both arrays hold `pages.len()` entries.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            status.as_mut_ptr(),
            0,
        )
    };
    check(rc).map(drop)
}
