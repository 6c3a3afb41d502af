//! Engines: how an area moves while threads write to it.

pub(crate) mod commit;
pub(crate) mod crew;
#[cfg(not(loom))]
pub(crate) mod fault;
pub(crate) mod follow;
#[cfg(test)]
mod model_tests;
pub(crate) mod mprotect;
pub(crate) mod notes;
#[cfg(test)]
pub(crate) mod processor;
pub(crate) mod slot;
pub(crate) mod waits;
