//! The protocol against a modelled machine: engines, slots and the handler's decision, unchanged,
//! one migrator against one or two threads on areas of two pages.

mod follow;
mod mprotect;
