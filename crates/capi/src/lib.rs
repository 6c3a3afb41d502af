//! The C interface. `cargo xtask header` makes `include/pageleap.h` of the comments and items of
//! these modules, in the order that `xtask/src/header.rs` gives. `opening.h` has the text that
//! holds for all functions.
//!
//! Every function catches panics, checks its pointers for NULL, and keeps the text of an error for
//! the calling thread. Numbers that stand for names (engines, page sizes) are plain integers here,
//! because a C program may pass any number.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![allow(non_camel_case_types)]
// The comments are written for C: a function's comment and the header's first one say what a caller
// has to keep to, as `# Safety` would.
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

/// All functions may be called from any thread, several at a time, also on the same handle.
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
