//! Engines: how an area moves while threads write to it.

pub(crate) mod mprotect;
