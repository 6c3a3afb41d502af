//! The C interface of pageleap. `cargo xtask header` makes `include/pageleap.h` of the items of
//! these modules and their doc comments, in the order that `xtask/src/header.rs` gives. `opening.h`
//! is the head of that header: its first comment has the rules that hold for all functions.
//!
//! Each function calls one function of the library. On the way it catches panics, checks pointers
//! for NULL, and keeps the text of an error for the calling thread (`boundary`). A C program may
//! pass any number for an engine or a page size, and a Rust enumeration of a number without a
//! variant is undefined behaviour. So these arguments are plain integers here.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![allow(non_camel_case_types)]
// The doc comments are written for C programmers. They and the first comment of the header state
// the rules for callers, so there are no `# Safety` sections.
#![allow(clippy::missing_safety_doc)]

#[macro_use]
mod boundary;
pub mod context;
pub mod guard;
pub mod job;
pub mod last_error;
pub mod memory;
pub mod migration;
pub mod move_pages;
pub mod page_size;
pub mod placement;
pub mod pool;
pub mod probe;
pub mod region;
pub mod report;
pub mod status;
pub mod topology;
pub mod warning;

/// Asserts that all handles are `Send` and `Sync`, because any thread may call any function,
/// several at a time, also on the same handle.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<topology::pageleap_topology>();
    any_thread::<probe::pageleap_capabilities>();
    any_thread::<pool::pageleap_pool>();
    any_thread::<region::pageleap_region>();
    any_thread::<guard::pageleap_guard>();
    any_thread::<context::pageleap_migration_context>();
    any_thread::<job::pageleap_job>();
    any_thread::<memory::pageleap_reserve>();
    any_thread::<report::pageleap_report>();
};
