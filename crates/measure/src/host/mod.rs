//! The machine of a measurement: a manifest for its results, and the noise beside it.
//!
//! * [`Host`] describes the machine once: CPUs, memory nodes, and settings that change results.
//! * [`before`] warns about a machine on which figures would mislead.
//! * [`Watch`] compares the kernel's counters at the start of a measurement with those at its end,
//!   and [`Noise`] is the difference: steal, CPU time of others, throttling. No thread runs in
//!   between, so watching costs the measurement nothing.
//!
//! ```text
//! Host::read ──► before ──► warnings
//!     └────────► section ─────────────┐
//! Watch::start ─ measurement ─ so_far ┴─► Noise ──► section, warnings
//! ```
//!
//! All files are read through `SysFiles`, so a recording of another machine can take their place. A
//! file that is missing or makes no sense gives `None`, and never a default that looks like a
//! value.
//!
//! ```no_run
//! use pageleap::topology::SysFiles;
//! use pageleap_measure::host::{self, Host, Watch};
//!
//! let files = SysFiles::host();
//! let host = Host::read(&files);
//! host::before(&host).iter().for_each(|warning| eprintln!("warning: {warning}"));
//! let watch = Watch::start(&files);
//! // The measurement.
//! watch.so_far().warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
//! ```

mod advice;
mod cgroup;
mod counters;
mod lines;
mod manifest;
mod noise;
mod processor;
#[cfg(test)]
mod trees;
mod watch;

pub use advice::before;
pub use cgroup::{Throttled, memory_limit};
pub use manifest::{Host, HostNode};
pub use noise::{MOST_OTHERS, MOST_STEAL, Noise};
pub use watch::Watch;
