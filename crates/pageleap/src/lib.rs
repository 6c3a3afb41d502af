//! Moves exactly the pages that you name between NUMA nodes, while threads keep reading and writing
//! them, and always finishes.
//!
//! ```no_run
//! use pageleap::{Migration, NodeId, Placement, Pool, Region};
//! # fn main() -> Result<(), pageleap::Error> {
//! let nodes = Placement::interleave([NodeId(0), NodeId(1)]);
//! let pool = Pool::builder(nodes, 2 << 30).build()?; // 1 GB of each node, faulted in
//!
//! let region = Region::new(pool.on(NodeId(0)), 512 << 20)?; // zeroed; its address never changes
//! // ... hand `region.as_ptr()` or `region.atomics_u64(..)` to as many threads as you like ...
//!
//! let job = Migration::new().range(&region, 0..region.len(), pool.on(NodeId(1))).start()?;
//! // ... they go on reading and writing ...
//! let report = job.wait();
//! assert!(report.ended.is_completed());
//! # Ok(()) }
//! ```
//!
//! Data flows one way: [`topology`] → [`pool`] → [`Region`] → [`Migration`] → [`Job`] → [`Report`].
//! `ARCHITECTURE.md` is the map, `docs/protocol.md` the argument why nothing is lost. Read [the
//! contract of a region](Region) before you use one.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![cfg(target_os = "linux")]
// Loom builds the engines' protocol only. Most users of the remaining code are left out there.
#![cfg_attr(loom, allow(dead_code, unused_imports))]

#[cfg(not(loom))]
mod address_ranges;
#[cfg(not(loom))]
mod affinity;
#[cfg(not(loom))]
mod anonymous;
#[cfg(not(loom))]
mod audit;
#[cfg(feature = "testing")]
pub mod backend;
#[cfg(not(feature = "testing"))]
mod backend;
#[cfg(all(test, not(loom)))]
mod cases;
#[cfg(not(loom))]
mod cgroup;
#[cfg(not(loom))]
pub mod decisions;
mod engine;
mod error;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod for_probe;
#[cfg(not(loom))]
mod forks;
#[cfg(not(loom))]
mod job;
#[cfg(not(loom))]
mod kernel;
#[cfg(not(loom))]
pub mod latency;
#[cfg(not(loom))]
mod latency_follower;
#[cfg(not(loom))]
mod leap;
#[cfg(not(loom))]
mod limits;
pub mod observe;
#[cfg(not(loom))]
mod placement;
#[cfg(not(loom))]
pub mod pool;
mod priority;
#[cfg(not(loom))]
pub mod process;
#[cfg(not(loom))]
mod region;
#[cfg(all(test, shuttle))]
mod schedules;
mod sync;
#[cfg(not(loom))]
pub mod topology;
mod tracer;
mod units;

pub use error::Error;
pub use units::{AddressRange, BASE_PAGE, Call, EngineName, NodeId, PageSize, Prot, RegionId};
#[cfg(not(loom))]
pub use {
    anonymous::{MemoryEngine, MemoryMigration, Reserve, leap_memory},
    audit::audit,
    backend::{Ability, CopyLoop, CopyMethod, Errno},
    engine::fault::{MAX_THREADS, install as install_fault_handler},
    engine::{Engine, EngineChoice, effort::JobCounts, waits::Waits},
    job::{
        area::Reason,
        handle::{Job, Phase, Progress},
        outcomes::{PageCounts, PageOutcome, PageRun},
        report::{CopyUse, Ended, EngineShare, EngineUse, Report, Warning, WarningKind},
        source::Source,
        thread_is_ours,
    },
    kernel::{
        KernelMigration, Mode,
        list::{PageStatus, move_pages},
    },
    latency_follower::{
        FollowDecision, FollowPolicy, FollowStatus, LatencyFollower, LatencySource,
    },
    leap::{COPY_METHODS, DEFAULT_AREA_BYTES, Migration, MigrationContext, PageTableMigration},
    placement::{NodeCounts, PageTables, Placement, Spread, Verification},
    pool::{Destination, Pool},
    region::{PageTableCounts, PageTableLevel, PinGuard, Plain, Region, View},
};
