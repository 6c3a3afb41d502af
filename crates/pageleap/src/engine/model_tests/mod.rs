//! The protocol against a modelled machine.

mod follow;
mod mprotect;
