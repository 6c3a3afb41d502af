//! The features of userfaultfd.

use pageleap_sys::uffd_feature;

/// A feature of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name, that of the kernel's constant without `UFFD_FEATURE_`.
    pub name: &'static str,
    /// Its bit.
    pub bit: u64,
    /// The Linux version that brought it.
    pub since: &'static str,
}

const fn feature(name: &'static str, bit: u64, since: &'static str) -> Feature {
    Feature { name, bit, since }
}

/// All features that Linux 6.18 has, by their bits.
pub const FEATURES: [Feature; 17] = [
    feature("PAGEFAULT_FLAG_WP", uffd_feature::PAGEFAULT_FLAG_WP, "5.7"),
    feature("EVENT_FORK", uffd_feature::EVENT_FORK, "4.11"),
    feature("EVENT_REMAP", uffd_feature::EVENT_REMAP, "4.11"),
    feature("EVENT_REMOVE", uffd_feature::EVENT_REMOVE, "4.11"),
    feature("MISSING_HUGETLBFS", uffd_feature::MISSING_HUGETLBFS, "4.11"),
    feature("MISSING_SHMEM", uffd_feature::MISSING_SHMEM, "4.11"),
    feature("EVENT_UNMAP", uffd_feature::EVENT_UNMAP, "4.11"),
    feature("SIGBUS", uffd_feature::SIGBUS, "4.14"),
    feature("THREAD_ID", uffd_feature::THREAD_ID, "4.14"),
    feature("MINOR_HUGETLBFS", uffd_feature::MINOR_HUGETLBFS, "5.13"),
    feature("MINOR_SHMEM", uffd_feature::MINOR_SHMEM, "5.14"),
    feature("EXACT_ADDRESS", uffd_feature::EXACT_ADDRESS, "5.18"),
    feature("WP_HUGETLBFS_SHMEM", uffd_feature::WP_HUGETLBFS_SHMEM, "5.19"),
    feature("WP_UNPOPULATED", uffd_feature::WP_UNPOPULATED, "6.4"),
    feature("POISON", uffd_feature::POISON, "6.6"),
    feature("WP_ASYNC", uffd_feature::WP_ASYNC, "6.7"),
    feature("MOVE", uffd_feature::MOVE, "6.8"),
];
