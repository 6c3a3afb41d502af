//! Kernel interfaces that `libc` lacks or wraps too loosely for pageleap: memory policies, flags of
//! memory files, futexes, threads, signals, cache lines, files below a directory, and copies of memory that other
//! threads may be writing.
//!
//! This crate decides nothing. Each function is one system call, or one loop of machine
//! instructions. Some functions add a second attempt for older kernels. Errors are the kernel's
//! error numbers, unchanged. The documentation of each function names the call and the kernel
//! version that brought it.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![cfg(target_os = "linux")]

mod affinity;
mod apart;
mod cache;
mod copy;
mod descriptor;
mod errno;
mod exec;
mod files;
mod futex;
mod hugetlb;
mod memory;
mod mempolicy;
mod own;
mod pagemap;
mod process;
mod signals;
mod threads;
mod uffd;
mod wait;

pub use affinity::{CpuMask, affinity, set_affinity, try_affinity};
pub use apart::{Trial, call_apart};
pub use cache::{CAN_FLUSH_LINES, LINE_BYTES, flush_line, wait_for_flushes};
pub use copy::{CopyLoop, CopyMethod, copy_racing, memcpy_is_watched, zero};
pub use descriptor::{FileIdentity, Kept, KeptFd, PidFd, out_of_the_way};
pub use errno::Errno;
pub use exec::{ChildState, exec, fork, poll_child};
pub use files::{Entries, link_target, open_beneath, open_entry};
pub use futex::{futex_wait, futex_wake_all};
pub use hugetlb::map_private_huge;
pub use memory::{
    Advice, Event, MFD_NOEXEC_SEAL, check_that_huge_tables_drop, discard, duplicate_mapping,
    exchange_page_tables, is_mapped, is_over_address_space_limit, lock, map_file,
    map_file_into_hole, map_huge_without_page, memfd_create, memfd_create_with, memfd_seal,
    move_mapping, protect, read_at, reserve, reserve_at, reserve_below, reserve_low, set_advice,
    signal_event, unlock, unmap, vacate,
};
pub use mempolicy::{
    MAX_NODES, MappingPolicy, Policy, ThreadPolicy, bind, bind_and_move, interleave, move_pages,
    mpol, nodes_of_pages, prefer_node,
};
pub use own::{open_own, read_own};
pub use pagemap::{PageQuery, PageRegion, mapping_at, page_is, pagemap_scan, scan_flag};
pub use process::{
    Resource, ResourceLimit, Scheduling, capability, clock_ticks_per_s, cpu_time_ns,
    effective_capabilities, has_seccomp_filter, is_node_allowed, kernel_release, own_cpu_clock,
    policy_mode, process_cpu_time_ns, reschedule, resource_limit, run_shortly, scheduling,
    set_thp_disabled, static_memory, thp_disabled, thread_cpu_time_ns,
};
pub use signals::without_file_size_signal;
pub use threads::{Thread, as_own_thread, is_own_thread, own_stack};
pub use uffd::{
    UFFD_DEVICE, UffdMessage, open_uffd_device, uffd_copy, uffd_count_faults, uffd_feature,
    uffd_handshake, uffd_let_write, uffd_mode, uffd_move, uffd_read, uffd_register,
    uffd_serve_some, uffd_unregister, uffd_wake, uffd_write_protect, uffd_zeropage, userfaultfd,
    userfaultfd_from_device,
};
pub use wait::wait_readable;
