//! Engines: how an area moves while threads write to it.

pub(crate) mod commit;
pub(crate) mod crew;
pub(crate) mod mprotect;
pub(crate) mod precopy;
