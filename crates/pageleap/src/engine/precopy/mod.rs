//! The engines that follow writes: copy while writers write, copy again what they have written, and
//! hold everybody up only for the last few pages.
//!
//! With `precopy` the kernel notes which pages are written (userfaultfd with asynchronous
//! write-protection, Linux 6.7): no signal, no handler, and its own writes are noted like any
//! others. To close the gap between the last copy and the new frames, the page tables of the area
//! are moved away, marks included; whoever touches the area then, user code or kernel, sleeps in a
//! page fault until the page tables of the new frames have arrived. Steps and argument:
//! `docs/protocol.md`, section 6.
//!
//! What it promises beyond the engine `mprotect`: system calls that read or write the area do not
//! fail because of a leap (but FUTEX_WAKE_OP may); writers are neither signalled nor throttled.
//! What it asks for: a userfaultfd that holds up the kernel's accesses, which takes a privilege or
//! `/dev/userfaultfd`.
//!
//! `precopy-protect` closes the gap by protection instead, without privilege; with `wp-sync`
//! writers are let in one by one and noted by us ([`notes`]). `docs/adr/0011` compares them.

pub(crate) mod attempt;
#[cfg(test)]
mod model_tests;
pub(crate) mod notes;
