//! Jobs: what is to be done in which order, how fast, by how many threads, and what came of it.

pub(crate) mod handle;
pub(crate) mod pace;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod threads;
