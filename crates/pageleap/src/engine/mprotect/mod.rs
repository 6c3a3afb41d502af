//! The engine `mprotect`: the method of page_leap (Schuhknecht and Rassau, "Taking the Leap",
//! sections 4.1 and 4.2), made correct.
//!
//! An area is made read-only and copied. A thread that writes to it meanwhile receives SIGSEGV; its
//! handler makes the area writable again and marks it, and the migrator retries it in smaller
//! parts. If nobody wrote, the area is switched to the new frames. Pages, protocol and argument:
//! `docs/protocol.md`.
//!
//! What it promises: user-mode reads never wait for a copy; user-mode writes are never lost and
//! always proceed, at the latest when the area has been moved; every page is migrated, always,
//! because after a bounded number of disturbed copies the writers of an area wait until it is done.
//! What it cannot: a system call that writes into the area for its caller (`read(2)`) fails with
//! EFAULT while the area is read-only (no signal is raised for it).

pub(crate) mod attempt;
#[cfg(not(loom))]
pub(crate) mod fault;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
pub(crate) mod processor;
pub(crate) mod slot;
pub(crate) mod waits;
