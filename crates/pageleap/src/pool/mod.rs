//! Pools: pre-faulted memory of one or several nodes. Regions take their frames from pools, and
//! migrations return frames to them.
//!
//! A pool has a *share* of frames on each of its nodes: one memory file, mapped once by the pool
//! itself (the *alias*). All operations on frames are a share's.

mod alias;
mod descriptor;
mod fill;
mod frames;
mod needs;
mod repair;
mod reserve;
pub(crate) mod room;
mod share;
pub(crate) mod unseen;

use std::fmt;
use std::sync::Arc;

pub(crate) use frames::Run;
pub(crate) use needs::Needs;
pub use reserve::HugePageReservation;
pub(crate) use share::{ALIAS_ATTRIBUTES, AliasTables, Share};

use crate::backend::{Backend, host_memory};
use crate::error::Error;
use crate::placement::{Layout, PageTables, Placement, Verification};
use crate::topology::Topology;
use crate::units::{NodeId, PageSize, human_bytes};

/// Pre-faulted memory of one or several nodes. Clones are the same pool. The memory goes back to
/// the system when the last clone and the last region with frames of the pool are dropped.
///
/// ```
/// use pageleap::{NodeId, PageSize, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let pool = Pool::builder(NodeId(0), 4 << 20).page_size(PageSize::Base).build()?;
/// let region = Region::new(&pool, 1 << 20)?; // its frames come from the pool
/// assert_eq!(pool.free_bytes(), 3 << 20);
/// drop(region);
/// assert_eq!(pool.free_bytes(), 4 << 20);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Pool(Arc<PoolInner>);

struct PoolInner {
    backend: Arc<dyn Backend>,
    page: PageSize,
    placement: Placement,
    /// In the order in which the placement names their nodes.
    shares: Vec<Share>,
}

/// Makes a [`Pool`].
pub struct PoolBuilder {
    placement: Placement,
    bytes: u64,
    page: PageSize,
    threads: Option<usize>,
    locked: bool,
    progress: Option<Box<dyn Fn(u64, u64) + Send + Sync>>,
    backend: Arc<dyn Backend>,
}

impl PoolBuilder {
    /// The size of the pool's pages. Default: [`PageSize::Base`].
    pub fn page_size(mut self, page: PageSize) -> Self {
        self.page = page;
        self
    }

    /// How many threads fault the memory in. Default: one for each CPU of a node, at most 8.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Locks the memory, so that it is never swapped out. It counts once against `RLIMIT_MEMLOCK`,
    /// and once more in the resident size that tools show for the process, like each mapping of the
    /// memory. hugetlb pages are never swapped out, with or without a lock.
    #[doc(alias = "mlock")]
    pub fn locked(mut self, locked: bool) -> Self {
        self.locked = locked;
        self
    }

    /// Has the filling threads call `report` about every 32 MB, with the bytes that are done and
    /// all bytes.
    pub fn progress(mut self, report: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(report));
        self
    }

    /// Uses a backend other than the kernel, for tests (feature `testing`).
    #[cfg(feature = "testing")]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = backend;
        self
    }

    /// Takes the memory, faults it in, and verifies with the kernel that it lies on the right
    /// nodes, in pages of the requested size.
    ///
    /// # Errors
    /// If too little memory or too few huge pages are free, or the cpuset of the process does not
    /// allow a node. The error says how much is free and how to fix it. All memory is given back.
    pub fn build(self) -> Result<Pool, Error> {
        let page_bytes = self.page.bytes() as u64;
        if self.bytes == 0 || self.bytes > 1 << 46 {
            return Err(Error::BadArgument {
                what: "pool size",
                reason: format!("{} bytes", self.bytes),
                remedy: format!(
                    "use 1 to 2^46 bytes; the size is rounded up to pages of {page_bytes} bytes"
                ),
            });
        }
        if self.threads == Some(0) {
            return Err(Error::BadArgument {
                what: "number of threads",
                reason: "0 threads fill no memory".into(),
                remedy: "use at least 1".into(),
            });
        }
        let weights = self.placement.weights()?;
        // On each node as many pages as a region of the pool's size would have there, so that one
        // fits in; and at least one page.
        let pages = self.bytes.div_ceil(page_bytes);
        let layout = self.placement.layout((pages * page_bytes) as usize, self.page)?;
        let frames: Vec<u64> =
            layout.pages_by_node(pages).into_iter().map(|frames| frames.max(1)).collect();
        let all_bytes = frames.iter().sum::<u64>() * page_bytes;
        let topology = if self.backend.is_host_memory() { Some(Topology::read()?) } else { None };
        let mut shares: Vec<Share> = Vec::with_capacity(weights.len());
        for ((node, _), frames) in weights.iter().zip(frames) {
            let done = shares.iter().map(Share::bytes).sum::<u64>();
            let progress =
                |bytes| self.progress.iter().for_each(|report| report(done + bytes, all_bytes));
            let plan = share::Plan {
                node: *node,
                tables: tables_node(topology.as_ref(), self.placement.page_tables, *node)?,
                page: self.page,
                frames,
                threads: self.threads,
                locked: self.locked,
                progress: Some(&progress),
            };
            shares.push(Share::build(self.backend.clone(), &plan)?);
        }
        let Self { placement, page, backend, .. } = self;
        Ok(Pool(Arc::new(PoolInner { backend, page, placement, shares })))
    }
}

/// The node for the page tables of a share on `node`; `None` if the machine has one node only.
fn tables_node(
    topology: Option<&Topology>,
    page_tables: PageTables,
    node: NodeId,
) -> Result<Option<NodeId>, Error> {
    match (page_tables, topology) {
        (PageTables::Node(tables), Some(topology)) => Ok(Some(topology.node(tables)?.id)),
        (PageTables::Node(tables), None) => Ok(Some(tables)),
        (PageTables::Auto, Some(topology)) if topology.nodes().len() == 1 => Ok(None),
        (PageTables::Auto, Some(topology)) => Ok(Some(topology.nearest_with_cpus(node))),
        (PageTables::Auto, None) => Ok(Some(node)),
    }
}

impl Pool {
    /// Describes a pool of `bytes` bytes (rounded up to whole pages), on a node or as a
    /// [`Placement`] says. Each node's share has the size that a region of `bytes` bytes needs
    /// there.
    pub fn builder(placement: impl Into<Placement>, bytes: u64) -> PoolBuilder {
        let backend = host_memory();
        PoolBuilder {
            placement: placement.into(),
            bytes,
            page: PageSize::Base,
            threads: None,
            locked: false,
            progress: None,
            backend,
        }
    }

    /// The nodes on which the pool has memory.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.shares().iter().map(Share::node).collect()
    }

    /// The size of the pool's pages.
    pub fn page_size(&self) -> PageSize {
        self.0.page
    }

    /// The size of the pool in bytes.
    pub fn bytes(&self) -> u64 {
        self.shares().iter().map(Share::bytes).sum()
    }

    /// Free bytes. Frames that a job is recycling do not count as free, although a call that needs
    /// them gets them.
    pub fn free_bytes(&self) -> u64 {
        self.shares().iter().map(Share::free_bytes).sum()
    }

    /// Free bytes on one node; 0 for a node on which the pool has no memory.
    pub fn free_bytes_on(&self, node: NodeId) -> u64 {
        self.shares().iter().filter(|share| share.node() == node).map(Share::free_bytes).sum()
    }

    /// The pool as a destination, with a placement other than its own: `pool.on(NodeId(1))`.
    pub fn on(&self, placement: impl Into<Placement>) -> Destination {
        Destination { pool: self.clone(), placement: placement.into() }
    }

    /// Asks the kernel on which nodes all frames of the pool lie, free and used ones. Maps each
    /// frame once more for a moment, which takes some 60 ms per GB of base pages. Leaps may go on
    /// meanwhile.
    pub fn verify(&self) -> Result<Verification, Error> {
        let mut all = Verification::default();
        for share in self.shares() {
            all.join(share.verify()?);
        }
        Ok(all)
    }

    pub(crate) fn shares(&self) -> &[Share] {
        &self.0.shares
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }
}

/// Where pages go: a pool, and a placement on nodes of the pool. `&pool` alone means the pool's own
/// placement.
#[derive(Clone, Debug)]
pub struct Destination {
    pool: Pool,
    placement: Placement,
}

impl From<&Pool> for Destination {
    fn from(pool: &Pool) -> Self {
        Destination { pool: pool.clone(), placement: pool.0.placement.clone() }
    }
}

impl From<Pool> for Destination {
    fn from(pool: Pool) -> Self {
        Destination::from(&pool)
    }
}

impl From<&Destination> for Destination {
    fn from(destination: &Destination) -> Self {
        destination.clone()
    }
}

/// A destination, resolved for one region.
pub(crate) struct Target {
    layout: Layout,
    /// In the order of the layout's nodes.
    pub(crate) shares: Vec<Share>,
    page_tables: PageTables,
}

impl Destination {
    /// The size of the pool's pages.
    pub fn page_size(&self) -> PageSize {
        self.pool.page_size()
    }

    /// Bytes that the pool has free on the nodes of the placement.
    pub fn free_bytes(&self) -> u64 {
        let named = |share: &&Share| self.placement.nodes().any(|node| node == share.node());
        self.pool.shares().iter().filter(named).map(Share::free_bytes).sum()
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Finds the shares for pages of a region of that capacity and page size.
    pub(crate) fn resolve(&self, capacity: usize, page: PageSize) -> Result<Target, Error> {
        let layout = self.placement.layout(capacity, page)?;
        let find = |(node, _): (NodeId, u32)| {
            let share = self.pool.shares().iter().find(|share| share.node() == node);
            share.cloned().ok_or_else(|| Error::BadArgument {
                what: "placement",
                reason: format!("the pool has no memory on {node}"),
                remedy: format!("use nodes of the pool: {}", nodes_text(&self.pool.nodes())),
            })
        };
        let shares = self.placement.weights()?.into_iter().map(find).collect::<Result<_, _>>()?;
        if let PageTables::Node(node) = self.placement.page_tables
            && self.pool.backend().is_host_memory()
        {
            Topology::read()?.node(node)?;
        }
        Ok(Target { layout, shares, page_tables: self.placement.page_tables })
    }
}

fn nodes_text(nodes: &[NodeId]) -> String {
    let names: Vec<String> = nodes.iter().map(NodeId::to_string).collect();
    names.join(", ")
}

impl Target {
    /// Cuts pages of the region into parts, each with the share that its frames come from.
    pub(crate) fn parts(
        &self,
        pages: std::ops::Range<u64>,
    ) -> impl Iterator<Item = (std::ops::Range<u64>, &Share)> {
        self.layout.parts(pages).into_iter().map(|(part, share)| (part, &self.shares[share]))
    }

    /// The node for the page tables that map frames of a share; `None` if it makes no difference.
    pub(crate) fn tables(&self, share: &Share) -> Option<NodeId> {
        match self.page_tables {
            PageTables::Auto => share.0.tables,
            PageTables::Node(node) => Some(node),
        }
    }
}

impl PartialEq for Pool {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pool of {} in {} pages on {}, {} free",
            human_bytes(self.bytes()),
            self.0.page,
            nodes_text(&self.nodes()),
            human_bytes(self.free_bytes())
        )
    }
}

/// The command that adds huge pages to those that a node has.
pub fn reserve_command(node: NodeId, page: PageSize, more: u64) -> String {
    let file = crate::topology::huge_page_directory(node, page.bytes() as u64).join("nr_hugepages");
    let total = crate::topology::read_count(&file).unwrap_or(0) + more;
    format!("echo {total} > {}", file.display())
}
