//! Memory policies (`mbind(2)`, `set_mempolicy(2)`), and the nodes of pages (`move_pages(2)`).

use crate::errno::{Errno, check};

/// Node ids below this number fit into the masks of this module. Linux allows at most 1024
/// (`CONFIG_NODES_SHIFT` = 10).
pub const MAX_NODES: usize = 1024;

const MASK_WORDS: usize = MAX_NODES / 64;
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_BIND: libc::c_int = 2;
const MPOL_INTERLEAVE: libc::c_int = 3;
/// Move pages that only the named process maps (Linux 2.6.18).
const MPOL_MF_MOVE: libc::c_int = 1 << 1;
/// Move pages that other processes map, too.
const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;
/// Ask for the policy of an address, not of the thread (Linux 2.6.7).
const MPOL_F_ADDR: libc::c_int = 1 << 1;
/// Node ids are physical ids, and stay so when the cpuset changes (Linux 2.6.26).
const MPOL_F_STATIC_NODES: libc::c_int = 1 << 15;

/// Modes of memory policies and their flags (`include/uapi/linux/mempolicy.h`), as
/// `set_mempolicy(2)` and [`ThreadPolicy::new`] take them.
pub mod mpol {
    /// No policy: memory comes from the node of the CPU that first touches it, and automatic
    /// balancing may move it.
    pub const DEFAULT: i32 = super::MPOL_DEFAULT;
    /// From one node while it has free memory.
    pub const PREFERRED: i32 = super::MPOL_PREFERRED;
    /// From these nodes only.
    pub const BIND: i32 = super::MPOL_BIND;
    /// From these nodes in turn.
    pub const INTERLEAVE: i32 = super::MPOL_INTERLEAVE;
    /// As [`DEFAULT`], but as an explicit policy, which automatic balancing leaves alone (Linux
    /// 3.8).
    pub const LOCAL: i32 = 4;
    /// From these nodes while they have free memory, the nearest first (Linux 5.15).
    pub const PREFERRED_MANY: i32 = 5;
    /// From these nodes in turn, by the weights of `/sys/kernel/mm/mempolicy/weighted_interleave`
    /// (Linux 6.9).
    pub const WEIGHTED_INTERLEAVE: i32 = 6;
    /// Flag: automatic balancing may move pages among the nodes of a [`BIND`] policy (Linux 5.12),
    /// or of a [`PREFERRED_MANY`] policy (Linux 6.10).
    pub const NUMA_BALANCING: i32 = 1 << 13;
    /// Flag: the nodes are physical ids, and stay so when the cpuset changes (Linux 2.6.26).
    pub const STATIC_NODES: i32 = super::MPOL_F_STATIC_NODES;
    /// Flag: the nodes are positions among those of the cpuset (Linux 2.6.26).
    pub const RELATIVE_NODES: i32 = 1 << 14;
}

/// The node from which the kernel takes new frames for a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// From this node while it has free frames, else from the nearest node that has some
    /// (`MPOL_PREFERRED`).
    Preferred(u32),
    /// From this node only (`MPOL_BIND`). When the node is full, base pages call the OOM killer,
    /// and hugetlb pages raise SIGBUS.
    Bind(u32),
    /// The policy of the faulting thread applies (`MPOL_DEFAULT`). New mappings have this policy.
    Default,
}

/// Sets the memory policy of the mapping `[addr, addr + len)`, in bytes (`mbind(2)`, Linux 2.6.7).
///
/// For a shared mapping of a memory file with base pages, the kernel sets the policy for the
/// mapping *and* for this part of the file (`vma_replace_policy` in Linux, mm/mempolicy.c). For
/// hugetlb pages it sets the policy of the mapping only. The kernel does not merge neighbouring
/// mappings with different policies.
///
/// # Errors
/// EINVAL: the node does not exist, is not allowed by the cpuset, or is [`MAX_NODES`] or above.
/// EFAULT: the range has a hole. ENOMEM: the kernel has no memory. ENOSYS or EPERM: a seccomp
/// filter refuses the call, or the kernel has no memory policies.
///
/// # Safety
/// The caller has mapped the range and keeps it mapped during the call. Contents and addresses do
/// not change.
pub unsafe fn bind(addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
    let (mode, node) = match policy {
        Policy::Preferred(n) => (MPOL_PREFERRED, Some(n)),
        Policy::Bind(n) => (MPOL_BIND, Some(n)),
        Policy::Default => (MPOL_DEFAULT, None),
    };
    // SAFETY: forwarded to the caller.
    unsafe { set_policy(addr, len, mode, &mask_of(node)?, 0) }
}

/// Binds the mapping `[addr, addr + len)` to one node, and moves its present pages there (`mbind(2)`
/// with MPOL_BIND and MPOL_MF_MOVE, Linux 2.6.16). Pages that other processes map as well stay.
///
/// The call succeeds even if pages stay where they are. (MPOL_MF_STRICT would make it fail with EIO
/// then, without saying which pages.) The new policy stays with the addresses.
///
/// # Errors
/// As for [`bind`].
///
/// # Safety
/// As for [`bind`].
pub unsafe fn bind_and_move(addr: usize, len: usize, node: u32) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller.
    unsafe { set_policy(addr, len, MPOL_BIND, &mask_of([node])?, MPOL_MF_MOVE) }
}

/// Sets the memory policy of a mapping so that its pages come from these nodes in turn
/// (`MPOL_INTERLEAVE`). See [`bind`].
///
/// # Errors
/// As for [`bind`].
///
/// # Safety
/// As for [`bind`].
pub unsafe fn interleave(addr: usize, len: usize, nodes: &[u32]) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller.
    unsafe { set_policy(addr, len, MPOL_INTERLEAVE, &mask_of(nodes.iter().copied())?, 0) }
}

/// # Safety
/// As for [`bind`].
unsafe fn set_policy(
    addr: usize,
    len: usize,
    mode: libc::c_int,
    mask: &[u64; MASK_WORDS],
    flags: libc::c_int,
) -> Result<(), Errno> {
    let (mode, nodes, bits) = arguments(mode, mask);
    // SAFETY: the mask outlives the call. Neither the policy nor a move changes contents.
    check(unsafe { libc::syscall(libc::SYS_mbind, addr, len, mode, nodes, bits, flags) }).map(drop)
}

/// Sets the node from which the calling thread's own allocations come (`set_mempolicy(2)`, Linux
/// 2.6.7). With `None` they come from the node on which the thread runs.
///
/// `node` is a preference: when it is full, the kernel uses the nearest other node. Page tables
/// follow this policy, and ignore the policy of the mapping.
///
/// # Errors
/// As for [`bind`], without EFAULT.
pub fn prefer_node(node: Option<u32>) -> Result<(), Errno> {
    let mask = mask_of(node)?;
    let (mode, nodes, bits) =
        arguments(if node.is_some() { MPOL_PREFERRED } else { MPOL_DEFAULT }, &mask);
    // SAFETY: the mask outlives the call, and the policy changes no contents.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits) }).map(drop)
}

/// The memory policy of a thread, as the kernel keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadPolicy {
    /// With the flags of the mode.
    mode: libc::c_int,
    mask: [u64; MASK_WORDS],
}

impl ThreadPolicy {
    /// A policy of this mode, with its flags ([`mpol`]), over these nodes.
    ///
    /// # Errors
    /// EINVAL: a node is [`MAX_NODES`] or above.
    pub fn new(mode: i32, nodes: impl IntoIterator<Item = u32>) -> Result<ThreadPolicy, Errno> {
        Ok(ThreadPolicy { mode, mask: mask_of(nodes)? })
    }

    /// The mode with its flags ([`mpol`]).
    pub fn mode(&self) -> i32 {
        self.mode
    }

    /// The nodes, in ascending order. None for modes without nodes.
    pub fn nodes(&self) -> Vec<u32> {
        let is_in = |node: &u32| self.mask[*node as usize / 64] >> (node % 64) & 1 == 1;
        (0..MAX_NODES as u32).filter(is_in).collect()
    }

    /// The policy of the calling thread (`get_mempolicy(2)`, Linux 2.6.7).
    ///
    /// # Errors
    /// ENOSYS or EPERM: a seccomp filter refuses the call, or the kernel has no memory policies.
    pub fn own() -> Result<ThreadPolicy, Errno> {
        ThreadPolicy::read(0, 0)
    }

    /// Reads the policy of the thread, or with [`MPOL_F_ADDR`] that of an address.
    fn read(addr: usize, flags: libc::c_int) -> Result<ThreadPolicy, Errno> {
        let (mut mode, mut mask) = (0 as libc::c_int, [0u64; MASK_WORDS]);
        // SAFETY: the kernel writes one number and at most as many bits as the mask has. It reads
        // and writes nothing at the address.
        check(unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                MAX_NODES,
                addr,
                flags,
            )
        })?;
        Ok(ThreadPolicy { mode, mask })
    }

    /// Gives the calling thread this policy (`set_mempolicy(2)`). Threads and processes that it
    /// starts inherit the policy, and `execve(2)` keeps it. Allocates nothing.
    ///
    /// The kernel drops nodes that the cpuset does not allow without saying so:
    /// [`ThreadPolicy::own`] tells which are left, unless the mode has [`mpol::STATIC_NODES`].
    ///
    /// # Errors
    /// EINVAL: the kernel does not know the mode or one of its flags, a node does not exist, or no
    /// node has memory and is allowed by the cpuset. Otherwise as for [`ThreadPolicy::own`].
    pub fn set(&self) -> Result<(), Errno> {
        let has_mask = self.mask.iter().any(|word| *word != 0);
        let mask = if has_mask { self.mask.as_ptr() } else { std::ptr::null() };
        let bits = if has_mask { MAX_NODES + 1 } else { 0 };
        // SAFETY: the mask outlives the call, and the policy changes no contents.
        check(unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, mask, bits) }).map(drop)
    }
}

/// The memory policy of a mapping, as the kernel keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingPolicy(ThreadPolicy);

impl MappingPolicy {
    /// The policy of the mapping at an address (`get_mempolicy(2)` with MPOL_F_ADDR, Linux 2.6.7).
    /// A mapping without a policy has the mode [`mpol::DEFAULT`], whatever the thread's policy is.
    ///
    /// # Errors
    /// EFAULT: nothing is mapped there. Otherwise as for [`ThreadPolicy::own`].
    pub fn at(addr: usize) -> Result<MappingPolicy, Errno> {
        ThreadPolicy::read(addr, MPOL_F_ADDR).map(MappingPolicy)
    }

    /// The mode with its flags ([`mpol`]).
    pub fn mode(&self) -> i32 {
        self.0.mode
    }

    /// The nodes, in ascending order. None for modes without nodes.
    pub fn nodes(&self) -> Vec<u32> {
        self.0.nodes()
    }

    /// Gives the mapping `[addr, addr + len)` this policy (`mbind(2)`). Its pages stay where they
    /// are.
    ///
    /// # Errors
    /// As for [`bind`].
    ///
    /// # Safety
    /// As for [`bind`].
    pub unsafe fn set(&self, addr: usize, len: usize) -> Result<(), Errno> {
        let has_mask = self.0.mask.iter().any(|word| *word != 0);
        let mask = if has_mask { self.0.mask.as_ptr() } else { std::ptr::null() };
        let bits = if has_mask { MAX_NODES + 1 } else { 0 };
        // SAFETY: the mask outlives the call, and the policy changes no contents.
        check(unsafe { libc::syscall(libc::SYS_mbind, addr, len, self.0.mode, mask, bits, 0) })
            .map(drop)
    }
}

/// A mask with the bits of these nodes set. EINVAL for [`MAX_NODES`] and above.
fn mask_of(nodes: impl IntoIterator<Item = u32>) -> Result<[u64; MASK_WORDS], Errno> {
    let mut mask = [0u64; MASK_WORDS];
    for node in nodes {
        *mask.get_mut(node as usize / 64).ok_or(Errno(libc::EINVAL))? |= 1 << (node % 64);
    }
    Ok(mask)
}

/// Mode, mask and number of bits in the form that the kernel takes: it counts one bit more than the
/// mask has, and the default policy takes no mask.
fn arguments(mode: libc::c_int, mask: &[u64; MASK_WORDS]) -> (libc::c_int, *const u64, usize) {
    if mode == MPOL_DEFAULT {
        (mode, std::ptr::null(), 0)
    } else {
        (mode | MPOL_F_STATIC_NODES, mask.as_ptr(), MAX_NODES + 1)
    }
}

/// Queries the node of each page of a process (`move_pages(2)` without nodes, Linux 2.6.18); 0 is
/// the calling process. No page is touched.
///
/// `status[i]` becomes the node of the page at address `pages[i]`, or a negated error number. The
/// number is `-ENOENT`, on older kernels `-EFAULT`, for a page that is not present.
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call, or the kernel cannot migrate pages; EPERM
/// also if the process may not be looked at. ESRCH: there is no such process. ENOMEM: the kernel
/// has no memory.
///
/// # Panics
/// If the two slices differ in length.
pub fn nodes_of_pages(pid: i32, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
    assert_eq!(pages.len(), status.len());
    // SAFETY: a null list of nodes makes the call a query. Both arrays hold `pages.len()` entries.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            status.as_mut_ptr(),
            0,
        )
    };
    check(rc).map(drop)
}

/// Moves pages of a process to other nodes (`move_pages(2)`, Linux 2.6.18); 0 is the calling
/// process. With `shared`, pages that are mapped more than once move as well (`MPOL_MF_MOVE_ALL`,
/// which needs CAP_SYS_NICE).
///
/// `pages[i]` is to move to `nodes[i]`. Returns the number of pages that did not move, by the
/// kernel's count. The kernel may give up half-way: entries of `status` that it has not written
/// keep their values, and do not tell whether their page has moved. Neighbours of the list that go
/// to one node are moved together.
///
/// # Errors
/// EACCES: the target's cpuset does not allow a node. ENODEV: there is no such node, or it has no
/// memory. ENOMEM: the kernel has no memory, or the node has none. EPERM: the process may not be
/// changed by this one, `shared` lacks its privilege, or a seccomp filter refuses the call. ESRCH:
/// there is no such process. EINVAL: the process has no memory. Some pages may have moved before
/// the error.
///
/// # Panics
/// If the slices differ in length.
pub fn move_pages(
    pid: i32,
    pages: &[usize],
    nodes: &[i32],
    status: &mut [i32],
    shared: bool,
) -> Result<u64, Errno> {
    assert!(pages.len() == status.len() && pages.len() == nodes.len());
    let flags = if shared { MPOL_MF_MOVE_ALL } else { MPOL_MF_MOVE };
    // SAFETY: the three arrays hold `pages.len()` entries each and outlive the call. Contents and
    // addresses of the pages do not change.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            pages.len(),
            pages.as_ptr(),
            nodes.as_ptr(),
            status.as_mut_ptr(),
            flags,
        )
    };
    check(rc).map(|left| left as u64)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_policy_has_the_nodes_that_it_was_made_of() {
        let policy = ThreadPolicy::new(mpol::BIND, [1023, 64, 0, 64]).unwrap();
        assert_eq!((policy.mode(), policy.nodes()), (mpol::BIND, vec![0, 64, 1023]));
        assert_eq!(ThreadPolicy::new(mpol::BIND, [1024]), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn a_mapping_gets_its_policy_back() {
        let len = 2 << 20;
        let start = crate::reserve(len, len).unwrap();
        // SAFETY: the mapping is this test's own.
        unsafe {
            if bind(start, len, Policy::Preferred(0)).is_err() {
                return crate::unmap(start, len).unwrap();
            }
            let preferred = MappingPolicy::at(start + len / 2).unwrap();
            assert_eq!(preferred.mode(), mpol::PREFERRED | mpol::STATIC_NODES);
            bind_and_move(start, len, 0).unwrap();
            let bound = MappingPolicy::at(start).unwrap();
            assert_eq!(bound.mode(), mpol::BIND | mpol::STATIC_NODES);
            assert_eq!((bound.nodes(), preferred.nodes()), (vec![0], vec![0]));
            preferred.set(start, len).unwrap();
            assert_eq!(MappingPolicy::at(start), Ok(preferred));
            bind(start, len, Policy::Default).unwrap();
            let none = MappingPolicy::at(start).unwrap();
            assert_eq!((none.mode(), none.nodes()), (mpol::DEFAULT, vec![]));
            preferred.set(start, len).unwrap();
            none.set(start, len).unwrap();
            assert_eq!(MappingPolicy::at(start), Ok(none));
            crate::unmap(start, len).unwrap();
        }
    }

    #[test]
    fn a_thread_gets_its_policy_back() {
        let test = || {
            let Ok(before) = ThreadPolicy::own() else { return };
            for changed in [Some(0), None] {
                prefer_node(changed).unwrap();
                let policy = ThreadPolicy::own().unwrap();
                assert_eq!(policy != before, changed.is_some());
                prefer_node(None).unwrap();
                policy.set().unwrap();
                assert_eq!(ThreadPolicy::own(), Ok(policy));
            }
            before.set().unwrap();
            assert_eq!(ThreadPolicy::own(), Ok(before));
        };
        // A policy belongs to a thread.
        std::thread::spawn(test).join().unwrap();
    }
}
