//! Moves exactly the pages that you name between memory nodes, while threads keep reading and writing them, and always finishes.
//!
//! ```no_run
//! use pageleap::{Migration, NodeId, Placement, Pool, Region};
//! # fn main() -> Result<(), pageleap::Error> {
//! let near = Pool::builder(NodeId(0), 1 << 30).build()?; // 1 GB of node 0, faulted in
//! let far = Pool::builder(NodeId(1), 1 << 30).build()?;
//!
//! let region = Region::new(&near, 512 << 20)?; // zeroed; its address never changes
//! // ... hand `region.as_ptr()` or `region.atomics_u64(..)` to as many threads as you like ...
//!
//! let job = Migration::new().range(&region, 0..region.len(), Placement::On(far.clone())).start()?;
//! // ... they go on reading and writing ...
//! let report = job.wait();
//! assert!(report.ended.is_completed());
//! # Ok(()) }
//! ```
//!
//! Data flows one way: [`topology`] → [`pool`] → [`Region`] → [`Migration`] → [`Job`] → [`Report`]. `ARCHITECTURE.md` is the map,
//! `docs/protocol.md` the argument why nothing is lost. Read [the contract of a region](Region) before you use one.

#![cfg(target_os = "linux")]
// Loom builds the protocol alone; what it leaves out uses the rest.
#![cfg_attr(loom, allow(dead_code, unused_imports))]

#[cfg(not(loom))]
mod affinity;
#[cfg(not(loom))]
mod audit;
pub mod backend;
mod engine;
mod error;
#[cfg(not(loom))]
mod migrate;
pub mod observe;
#[cfg(not(loom))]
mod placement;
#[cfg(not(loom))]
pub mod pool;
#[cfg(not(loom))]
mod region;
#[cfg(all(test, shuttle))]
mod schedules;
mod sync;
#[cfg(not(loom))]
pub mod topology;
mod units;

pub use error::Error;
pub use units::{AddressRange, BASE_PAGE, NodeId, PageSize};
#[cfg(not(loom))]
pub use {
    audit::audit,
    engine::mprotect::fault::{MAX_THREADS, install as install_fault_handler},
    migrate::{
        DEFAULT_AREA_BYTES, Ended, Engine, EngineChoice, Job, Migration, PageCounts, PageOutcome, PageRun,
        Phase, Progress, Report, WAIT_BUCKETS, Waits,
    },
    placement::{NodeCounts, Placement},
    pool::Pool,
    region::{Plain, Region, RegionId},
};
