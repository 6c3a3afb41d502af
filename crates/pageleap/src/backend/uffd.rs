//! Opens userfaultfds: the features to ask for, the system call, and the device.

use std::os::fd::{AsFd, OwnedFd};

use pageleap_sys::{self as sys, Errno, uffd_feature};

/// Features for tracking writes to a memory file.
pub const TRACKING: u64 = uffd_feature::PAGEFAULT_FLAG_WP
    | uffd_feature::WP_HUGETLBFS_SHMEM
    | uffd_feature::WP_UNPOPULATED
    | uffd_feature::WP_ASYNC;
/// Features for exchanging page tables while writes are tracked.
pub const EXCHANGE: u64 = TRACKING | uffd_feature::EVENT_REMAP | uffd_feature::MINOR_SHMEM;
/// Features for holding back writers. POISON itself is not used. It stands for Linux 6.6: in
/// earlier kernels UFFDIO_WRITEPROTECT can report success and leave pages of memory files
/// unprotected (until 6.5 a huge page that is mapped again while it is split; until 6.3 where
/// memory for page tables is short).
pub const BARRIER: u64 =
    uffd_feature::PAGEFAULT_FLAG_WP | uffd_feature::WP_HUGETLBFS_SHMEM | uffd_feature::POISON;

/// Features for holding up who touches a page that has been taken away.
pub const HOLD: u64 = uffd_feature::MISSING_SHMEM | uffd_feature::MINOR_SHMEM;
/// The same with write-protection of memory files (Linux 5.19). No page is protected by it. But the
/// kernel puts no huge entry into a range that is registered for it (MADV_COLLAPSE, which came with
/// Linux 6.1, looks at nothing else), and a store through such an entry would be lost.
pub(crate) const HOLD_AGAINST_COLLAPSE: u64 =
    HOLD | uffd_feature::PAGEFAULT_FLAG_WP | uffd_feature::WP_HUGETLBFS_SHMEM;

/// Features for holding up who touches a hugetlb page that has been taken away. No huge entry comes
/// without a fault there: nothing has to be kept away as MADV_COLLAPSE is above.
pub const HOLD_HUGETLB: u64 = uffd_feature::MISSING_HUGETLBFS | uffd_feature::MINOR_HUGETLBFS;

/// Features for moving private memory in place: moving pages, and messages before pages are
/// discarded and when a range is unmapped (Linux 6.8).
pub const MOVE_IN_PLACE: u64 =
    uffd_feature::MOVE | uffd_feature::EVENT_REMOVE | uffd_feature::EVENT_UNMAP;

/// A userfaultfd that holds up the kernel's accesses too, with these features. It comes from the
/// system call, or else from the device.
pub(crate) fn privileged(features: u64) -> Result<OwnedFd, Errno> {
    let opened = sys::userfaultfd(false).or_else(|errno| from_device().map_err(|_| errno))?;
    shake_hands(opened, features)
}

/// Asks a new userfaultfd for features, and makes sure that it has them.
pub(super) fn shake_hands(faults: OwnedFd, features: u64) -> Result<OwnedFd, Errno> {
    let known = sys::uffd_handshake(faults.as_fd(), features)?;
    // Some kernels ignore features that they do not know.
    if known & features == features { Ok(faults) } else { Err(Errno(libc::EINVAL)) }
}

fn from_device() -> Result<OwnedFd, Errno> {
    sys::userfaultfd_from_device(sys::open_uffd_device()?.as_fd(), false)
}
