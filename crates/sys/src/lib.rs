//! Kernel interfaces that `libc` lacks or wraps too loosely for pageleap: memory policies, memory-file flags, futexes,
//! files below a folder, and copies of memory that other threads may be writing.
//!
//! Nothing here decides anything. Each function is one system call (or one loop of machine instructions), returns the
//! kernel's error number unchanged, and says which kernel brought it.

#![cfg(target_os = "linux")]

mod copy;
mod errno;
mod files;
mod futex;
mod memory;
mod mempolicy;

pub use copy::{copy_racing, zero};
pub use errno::Errno;
pub use files::{Entries, link_target, open_beneath, open_entry};
pub use futex::{futex_wait, futex_wake_all};
pub use memory::{
    Advice, EventFd, duplicate_mapping, exchange_page_tables, is_mapped, is_over_address_space_limit, lock,
    map_file, map_file_into_hole, memfd_create, memfd_seal, protect, reserve, reserve_below, set_advice,
    unlock, unmap, vacate,
};
pub use mempolicy::{MAX_NODES, Policy, bind, nodes_of_pages, prefer_node};
