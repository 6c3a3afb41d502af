//! The policies: each decides where page tables go, and moves them while threads walk them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pageleap::decisions::{TableMove, TablePage, algorithm_1, auto_ptm};
use pageleap::latency::{Latencies, Prober};
use pageleap::{FollowPolicy, NodeId, PageTableLevel, PageTableMigration, Region};

use super::{Cast, Policy};
use crate::Error;
use crate::leap::check_complete;

/// Bytes that a page of PTEs maps.
const OF_PTES: usize = 2 << 20;
/// Entries of a page of PTEs.
const ENTRIES: u64 = 512;
/// The longest wait for a round of probes, or for a scan of the follower. A round takes some
/// milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The decision of a policy, and its cost.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Its reason, in one line.
    pub reason: String,
    /// The node to which page tables were moved; `None` if they stay.
    pub to: Option<NodeId>,
    /// From the start of a prober to the end of the moves: probes, the scan, the decision and the
    /// moves; for views the making of the view. A program keeps its prober, and pays for its start
    /// once.
    pub took: Duration,
}

/// Makes all page tables of a region anew on a node.
pub(super) fn move_all(region: &Region, to: NodeId) -> Result<(), Error> {
    let all = PageTableMigration::new(region, 0..region.len(), to).anew();
    run(all)
}

fn run(migration: PageTableMigration<'_>) -> Result<(), Error> {
    let report = migration.allow_node_without_cpus().run()?;
    // Pages at the ends of a region may have page tables that map other memory, too.
    match report.ended.is_completed() {
        true => Ok(()),
        false => check_complete(&report, report.pages.total()),
    }
}

/// Applies a policy to a region whose page tables were asked for on `tables`.
pub(super) fn place(
    region: &Region,
    policy: Policy,
    cast: &Cast,
    tables: NodeId,
) -> Result<Placed, Error> {
    let began = Instant::now();
    let (reason, to) = match policy {
        Policy::Off => ("page tables stay where they are".to_owned(), None),
        Policy::Views => {
            (format!("the threads use the view of {}, and the region's own stay", cast.local), None)
        }
        Policy::AutoPtm => follow_moves(region, auto_ptm(&scan(region, cast.local, tables)?))?,
        Policy::Algorithm1 => {
            let latencies = probe(cast.local)?;
            match latencies.lowest(cast.local) {
                Some(_) => follow_moves(
                    region,
                    algorithm_1(&scan(region, cast.local, tables)?, &latencies),
                )?,
                None => (no_latency(cast.local, &latencies), None),
            }
        }
        Policy::LatencyAware => follow_latency(region, cast.local)?,
    };
    Ok(Placed { reason, to, took: began.elapsed() })
}

/// The latencies from the CPUs of a node to all nodes now.
fn probe(from: NodeId) -> Result<Latencies, Error> {
    let prober = Prober::builder().initiators([from]).start()?;
    Ok(prober.wait_for(1, PATIENCE).unwrap_or_default())
}

/// Why there was no probe to decide by.
fn no_latency(from: NodeId, latencies: &Latencies) -> String {
    let why = latencies.unknown().next().map_or("no probe in time", |(_, why)| why);
    format!("undecided: no latency from {from} is known: {why}")
}

/// The pages of PTEs of a region, with the nodes of their data as the kernel tells them.
fn scan(region: &Region, data: NodeId, tables: NodeId) -> Result<Vec<TablePage>, Error> {
    let verified = region.verify()?;
    if !verified.is_right() {
        return Err(Error::Elsewhere { node: data, verified: verified.to_string() });
    }
    let base = region.as_ptr().addr().get();
    let page = |at: usize| TablePage {
        level: PageTableLevel::Pte,
        address: base + at,
        node: tables,
        data: BTreeMap::from([(data, ENTRIES)]),
        tables: Vec::new(),
    };
    Ok((0..region.len()).step_by(OF_PTES).map(page).collect())
}

/// Moves the page tables that are to move, neighbours together.
fn follow_moves(region: &Region, moves: Vec<TableMove>) -> Result<(String, Option<NodeId>), Error> {
    let base = region.as_ptr().addr().get();
    let mut rest = moves.as_slice();
    while let Some(first) = rest.first() {
        let together = rest.iter().enumerate().take_while(|(nth, one)| {
            one.to == first.to && one.address == first.address + nth * OF_PTES
        });
        let count = together.count();
        let start = first.address - base;
        let end = region.len().min(start + count * OF_PTES);
        run(PageTableMigration::new(region, start..end, first.to))?;
        rest = &rest[count..];
    }
    Ok(match moves.into_iter().next() {
        Some(first) => (first.reason, Some(first.to)),
        None => ("no page of page table is better off elsewhere".to_owned(), None),
    })
}

/// Lets the library's follower decide and move once, as it does in a program.
fn follow_latency(region: &Region, from: NodeId) -> Result<(String, Option<NodeId>), Error> {
    let prober = Prober::builder().initiators([from]).start()?;
    let latencies = prober.wait_for(1, PATIENCE).unwrap_or_default();
    if latencies.lowest(from).is_none() {
        return Ok((no_latency(from, &latencies), None));
    }
    let follower = region.follow_latency(prober, FollowPolicy::new().walks_from([from]))?;
    let Some(status) = follower.wait_for(1, PATIENCE) else {
        return Ok(("undecided: the follower has not decided in time".to_owned(), None));
    };
    if let Some(failure) = status.last_failure {
        return Err(failure.into());
    }
    let decision = status.decisions.into_iter().next().map(|one| one.decision);
    Ok(decision.map_or_else(
        || ("there was nothing to decide".to_owned(), None),
        |decision| (decision.reason, decision.to),
    ))
}
