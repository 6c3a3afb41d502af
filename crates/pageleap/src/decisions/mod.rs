//! Decisions about the node of page tables: pure functions of samples, each with its reason in one
//! line.
//!
//! | | decides | from |
//! |---|---|---|
//! | [`auto_ptm`] | for each page of page table: the node of most of its entries | the entries |
//! | [`algorithm_1`] | the same, then the node of lowest latency as seen from there | entries, latencies |
//! | [`LatencyAware`] | the node of lowest latency for the threads that walk; the default | threads, data, latencies |
//! | [`BackOff`] | which triggers to skip while nothing moves | the scans before |
//! | [`Phoenix`] | migrate, replicate, or neither | cycles in page walks, threads, traffic, mapping calls |
//!
//! The first two and [`BackOff`] are those of *Latency-aware page-table migration* (sections 3.3 and
//! 4.1), [`Phoenix`] is that of the paper of this name (sections 4.2 to 5.1). Rules that are not in
//! a paper are called *ours* where they stand. `docs/page-table-decisions.md` compares the decisions
//! with the papers' scenarios in a model of a machine, and `docs/adr/0037` has the reason why the
//! default is not Algorithm 1.
//!
//! Nothing here reads a file, makes a call, or keeps time.
//! [`Region::follow_latency`](crate::Region::follow_latency) applies [`LatencyAware`] to a region.

mod auto_ptm;
mod backoff;
mod latency_aware;
mod phoenix;

pub use auto_ptm::{TableMove, TablePage, auto_ptm};
pub use backoff::BackOff;
pub use latency_aware::{LatencyAware, NodeFacts, TableDecision, TableSample, algorithm_1};
pub use phoenix::{BandwidthUse, Phoenix, PhoenixAction, PhoenixDecision, PhoenixSample};
