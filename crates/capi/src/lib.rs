//! The C interface. `cargo xtask header` makes `include/pageleap.h` of the comments and items of
//! these modules, in the order that `xtask/src/header.rs` gives; what holds for all functions
//! stands in `opening.h`.
//!
//! Every function catches panics, checks its pointers for NULL, and leaves the text of an error
//! with the thread. Numbers that stand for names (engines, page sizes) are plain integers here,
//! because a C program may pass any.

#![allow(non_camel_case_types)]
// The comments are written for C: `# Safety` of a function is what its comment, and that of the
// header, ask for.
#![allow(clippy::missing_safety_doc)]

#[macro_use]
mod boundary;
pub mod guard;
pub mod job;
pub mod migration;
pub mod page_size;
pub mod placement;
pub mod pool;
pub mod probe;
pub mod region;
pub mod report;
pub mod status;
pub mod topology;

/// All functions may be called from any thread, several at a time, also on the same handle.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<topology::pageleap_topology>();
    any_thread::<probe::pageleap_capabilities>();
    any_thread::<pool::pageleap_pool>();
    any_thread::<region::pageleap_region>();
    any_thread::<guard::pageleap_guard>();
    any_thread::<job::pageleap_job>();
    any_thread::<report::pageleap_report>();
};
