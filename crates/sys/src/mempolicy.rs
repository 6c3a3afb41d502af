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
    /// From this node only. A node that runs full then means the OOM killer (base pages) or SIGBUS (hugetlb pages).
    Bind(u32),
}

/// Sets the policy of the mapping `[addr, addr + len)`. On a shared mapping of a memory file with base pages it sticks to
/// the file; on hugetlb it belongs to the mapping.
///
/// # Safety
/// The range must be mapped by the caller and stay so during the call. Contents and addresses do not change.
pub unsafe fn bind(addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
    let (mode, node) = match policy {
        Policy::Preferred(n) => (MPOL_PREFERRED, n),
        Policy::Bind(n) => (MPOL_BIND, n),
    };
    let mask = mask_of(node)?;
    // SAFETY: the mask outlives the call; `maxnode` counts one bit more than it has, as the kernel expects.
    let rc = unsafe {
        libc::syscall(libc::SYS_mbind, addr, len, mode | MPOL_F_STATIC_NODES, mask.as_ptr(), MAX_NODES + 1, 0)
    };
    check(rc).map(drop)
}

/// Sets where the calling thread's own allocations come from, page tables among them (they follow the thread's policy, not the mapping's):
/// preferably from `node`, or, with `None`, from where the thread runs.
pub fn prefer_node(node: Option<u32>) -> Result<(), Errno> {
    let mask = node.map_or(Ok([0; MASK_WORDS]), mask_of)?;
    let (mode, mask, bits) = match node {
        Some(_) => (MPOL_PREFERRED | MPOL_F_STATIC_NODES, mask.as_ptr(), MAX_NODES + 1),
        None => (MPOL_DEFAULT, std::ptr::null(), 0),
    };
    // SAFETY: the mask outlives the call; the policy changes where memory comes from, not what it contains.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) }).map(drop)
}

fn mask_of(node: u32) -> Result<[u64; MASK_WORDS], Errno> {
    let mut mask = [0u64; MASK_WORDS];
    *mask.get_mut(node as usize / 64).ok_or(Errno(libc::EINVAL))? |= 1 << (node % 64);
    Ok(mask)
}

/// Asks on which node each page lies: `status[i]` becomes the node of the page at `pages[i]`, or a negated error number
/// (`-ENOENT`, on older kernels `-EFAULT`, for a page that is not present).
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
