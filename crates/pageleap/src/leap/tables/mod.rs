//! Moves page tables to another node, and leaves the data where it is: [`PageTableMigration`]
//! describes such a move, and starting it makes a job.
//!
//! Page tables stay behind when threads move to another node, and a walk that fetches entries from
//! there takes as long as any remote access (seed: "Phoenix", section 3; seed: "Latency-aware
//! page-table migration", section 3). Both papers change the kernel. On a vanilla kernel page
//! tables follow the memory policy of the thread that makes them, so a thread of the job makes them
//! anew ([`engine::tables`](crate::engine::tables) has the two calls). [`plan`] decides which of
//! them can move, [`mover`] moves them, and [`staging`] is the address space where entries wait.

mod mover;
mod plan;
mod staging;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use super::slots::ClaimedSlot;
use super::threads::{RunsOn, Threads};
use super::{cpus_of, tell_regions};
use crate::backend::{Backend, Call};
use crate::engine::fault;
use crate::error::Error;
use crate::forks;
use crate::job::handle::Job;
use crate::job::outcomes::Item;
use crate::job::pace::Pace;
use crate::job::plan::RetryPolicy;
use crate::job::report::Report;
use crate::job::run::{Running, Settings};
use crate::job::source::Source;
use crate::limits::check_address_space;
use crate::region::Region;
use crate::sync::Instant;
use crate::topology::Topology;
use crate::units::NodeId;
use mover::{ENGINE, TableMover};
use plan::Plan;

/// Describes a move of page tables without the data, then starts it as a job.
///
/// Threads may read and write the range meanwhile. Each page keeps its frame and its contents;
/// guards ([`Region::pin`]) do not hold the job up. Attributes stay, except that a change which the
/// program makes in the moment in which an area moves may be lost for that area. Do not lock pages
/// of the region (`mlock`) meanwhile: the kernel takes a lock that comes in that moment off the
/// pages around the area, too, and leaves it in its count. Locks from before are taken off and set
/// again; if the process may not lock so much any more, such an area fails as it is. No thread
/// waits for the job. One that touches an area while its page tables are being made has a page
/// fault, and a thread that faults or maps memory elsewhere may wait for the kernel's two calls for
/// an area (0.1 to 0.3 ms each for 16 MB of base pages).
///
/// # Which page tables move
/// * Pages of **PTEs** of base pages, each of which maps 2 MB, and pages of **PMDs**, each of which
///   maps 1 GB. A page of page table moves if all that it maps are pages of the region in the
///   range, in consecutive frames and with equal attributes. For the others, [`Report::runs`] has
///   [`Reason::SharedTable`](crate::Reason::SharedTable); a [`Migration`](crate::Migration) brings
///   their data into consecutive frames.
/// * **Transparent huge pages** have no PTEs, so theirs move by whole GB only.
/// * Pages of the third level (512 GB each) and above stay. So few of them exist that they stay in
///   caches.
/// * **hugetlb pages**: not offered ([`Error::Unsupported`]), because the kernel does not take
///   their entries apart from the mapping (EINVAL). A leap to a placement whose
///   [`page_tables`](crate::Placement::page_tables) name the node moves them with the data.
///
/// [`Region::page_tables`] has the nodes that were asked for afterwards. The kernel falls back to
/// another node if the one asked for has no free page. A later leap of the data puts page tables
/// where its destination says.
///
/// ```
/// use pageleap::{NodeId, PageTableLevel, PageTableMigration, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let pool = Pool::builder(NodeId(0), 8 << 20).build()?;
/// let region = Region::new(&pool, 8 << 20)?;
/// let report = PageTableMigration::new(&region, 0..region.len(), NodeId(0)).run()?;
/// assert!(report.ended.is_completed());
/// // 8 MB of base pages have 4 pages of PTEs.
/// assert_eq!(region.page_tables().asked_on(PageTableLevel::Pte, NodeId(0)), 4);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct PageTableMigration<'a> {
    region: &'a Region,
    range: Range<usize>,
    to: NodeId,
    allow_node_without_cpus: bool,
    anew: bool,
    timeout: Option<Duration>,
}

impl Region {
    /// Moves the page tables of a part to a node, and leaves the data where it is. The short form
    /// of [`PageTableMigration::start`], which says more.
    ///
    /// # Errors
    /// Those of [`PageTableMigration::start`].
    pub fn move_page_tables(&self, range: Range<usize>, node: NodeId) -> Result<Job, Error> {
        PageTableMigration::new(self, range, node).start()
    }
}

impl<'a> PageTableMigration<'a> {
    /// A move of the page tables of a range, in bytes but whole pages, to a node.
    pub fn new(region: &'a Region, range: Range<usize>, to: NodeId) -> Self {
        let (allow_node_without_cpus, anew, timeout) = (false, false, None);
        PageTableMigration { region, range, to, allow_node_without_cpus, anew, timeout }
    }

    /// Allows a node that has memory and no CPUs. By default such a node is refused, because every
    /// walk would fetch entries from remote memory.
    pub fn allow_node_without_cpus(mut self) -> Self {
        self.allow_node_without_cpus = true;
        self
    }

    /// Also makes those pages of page table anew that were asked for on this node before. The
    /// kernel may have taken them from another node when this one had no free page.
    pub fn anew(mut self) -> Self {
        self.anew = true;
        self
    }

    /// Sets the time after which the job begins no new area, counted from the return of
    /// [`PageTableMigration::start`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Checks everything, and starts the job. In its report, pages count as migrated if their page
    /// tables have been made anew, and no byte is copied.
    ///
    /// # Errors
    /// An argument makes no sense, the node is unknown, has no CPUs or is not in the cpuset, the
    /// range overlaps a running job's, or a limit (RLIMIT_AS) leaves no room for the address space
    /// that the job needs beside the region: 18 MB, and 1 GB if page tables of the second level
    /// move. After an error nothing has changed.
    pub fn start(self) -> Result<Job, Error> {
        self.prepare()?.start(None)
    }

    /// Does the same as [`PageTableMigration::start`] followed by [`Job::wait`].
    ///
    /// # Errors
    /// Those of [`PageTableMigration::start`].
    pub fn run(self) -> Result<Report, Error> {
        Ok(self.start()?.wait())
    }

    fn prepare(&self) -> Result<Running<TableMover>, Error> {
        let began = Instant::now();
        let inner = self.region.inner();
        let backend = inner.backend.clone();
        self.check_request(&*backend)?;
        if backend.is_host_memory() {
            fault::ensure_installed()?;
            forks::watch().map_err(|errno| Error::call(Call::Advise, 0, 0, errno))?;
            // An exchange needs as much address space as the area has.
            check_address_space(&*backend, 1)?;
        }
        let claim = inner.claim(self.range.clone())?;
        let addresses = inner.start + self.range.start..inner.start + self.range.end;
        let attributes = backend.attributes(std::slice::from_ref(&addresses))?;
        let plan = Plan::new(inner, inner.pages(&self.range), &attributes, self.to, self.anew);
        plan.check_descriptors()?;
        let nodes = BTreeSet::from([self.to]);
        let mut warnings = Vec::new();
        let cpus = cpus_of(&*backend, &nodes, &mut warnings)?;
        let slots = ClaimedSlot::claim(1, 1)?;
        let items = vec![Item {
            source: Source::Region(inner.id),
            pages: inner.pages(&self.range),
            page_bytes: inner.page.bytes(),
            left: plan.left.clone(),
        }];
        let threads = Threads::new(RunsOn::Own, cpus, false);
        let with = (threads, slots);
        let mover = TableMover::new(claim, plan, self.to, with, began, &mut warnings)?;
        let areas = mover.areas();
        let run = Running::new(mover, items, areas, self.settings(), warnings, began);
        tell_regions([self.region], run.shared());
        Ok(run)
    }

    fn settings(&self) -> Settings {
        let page = self.region.page_size();
        Settings {
            policy: RetryPolicy { reduction_factor: 1, max_disturbed: u32::MAX, max_refused: 4 },
            most_held_early: 0,
            pace: Pace::fixed(plan::area_pages(page), Duration::from_millis(1)),
            low_contention_pace: None,
            rate_limit: None,
            patience: Duration::from_secs(1),
            most_pieces: usize::MAX,
            page_bytes: page.bytes(),
            threads: 1,
            deadline: self.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            engine: ENGINE,
            engine_reason: "only page tables move".into(),
        }
    }

    fn check_request(&self, backend: &dyn Backend) -> Result<(), Error> {
        let (inner, node) = (self.region.inner(), self.to);
        let bad = |what, reason: String, remedy: &str| {
            Err(Error::BadArgument { what, reason, remedy: remedy.into() })
        };
        if self.timeout == Some(Duration::ZERO) {
            return bad(
                "timeout",
                "0 s leave no time for any page".into(),
                "leave it out for none",
            );
        }
        if inner.page.is_hugetlb() {
            return Err(Error::Unsupported {
                what: format!(
                    "page tables of {} pages cannot move without the data: the kernel does not \
                     exchange them (EINVAL from mremap with MREMAP_DONTUNMAP)",
                    inner.page
                ),
                remedy: "leap the data to a placement whose page_tables name the node",
            });
        }
        inner.check_range(self.range.clone(), self.region.len())?;
        if !backend.is_host_memory() {
            return Ok(());
        }
        let topology = Topology::read()?;
        if topology.node(node)?.cpus.is_empty() && !self.allow_node_without_cpus {
            let near = topology.nearest_with_cpus(node);
            let remedy = format!("use {near}, or allow nodes without CPUs");
            let reason = format!("{node} has no CPUs, so every page-table walk would be remote");
            return bad("node", reason, &remedy);
        }
        if !backend.allows_node(node.0) {
            return Err(Error::NodeNotAllowed { node });
        }
        Ok(())
    }
}
