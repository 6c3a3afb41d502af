//! Tests of the protocol on a modelled machine. Engines, slots and the handler's decision run
//! unchanged. One migrator runs against one or two threads, on areas of two pages.

mod follow;
mod mprotect;
