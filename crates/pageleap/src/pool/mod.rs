//! Pools: pre-faulted memory of one or several nodes, from which regions take their frames and to
//! which migrations return them.
//!
//! A pool has a *share* of frames on each of its nodes; everything that happens to frames happens
//! in a share.

mod alias;
mod fill;
mod frames;
mod needs;
mod reserve;
mod share;

use std::fmt;
use std::sync::Arc;

pub(crate) use frames::Run;
pub(crate) use needs::Needs;
pub use reserve::HugePageReservation;
pub(crate) use share::{ALIAS_ATTRIBUTES, Share};

use crate::address_ranges::is_of_pool_or_region;
use crate::backend::{Backend, Call, Linux};
use crate::error::Error;
use crate::placement::{Layout, PageTables, Placement, Verification};
use crate::topology::Topology;
use crate::units::{BASE_PAGE, NodeId, PageSize, human_bytes};

/// Pre-faulted memory of one or several nodes. Clones are the same pool; the memory goes back to
/// the system when the last clone and the last region with frames of it are gone.
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
    /// The size of its pages; [`PageSize::Base`] if not said.
    pub fn page_size(mut self, page: PageSize) -> Self {
        self.page = page;
        self
    }

    /// How many threads fault the memory in; if not said, one for each CPU of a node, at most 8.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Locks the memory, so that it is never swapped out: faulted in is not yet resident for good.
    /// Counts once against `RLIMIT_MEMLOCK`, and once more, like each mapping of the memory, in
    /// what tools show as the process' resident size. hugetlb pages are never swapped out anyway.
    #[doc(alias = "mlock")]
    pub fn locked(mut self, locked: bool) -> Self {
        self.locked = locked;
        self
    }

    /// Called with the bytes done and the bytes to do, from the filling threads, about every 32 MB.
    pub fn progress(mut self, report: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(report));
        self
    }

    /// Uses another backend than the kernel: for tests.
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = backend;
        self
    }

    /// Takes the memory, faults it in, and verifies with the kernel that it lies where it should,
    /// in pages of the size asked for.
    ///
    /// # Errors
    /// With too little free memory or too few huge pages, or on a node that the process' cpuset
    /// does not allow, an error that says how much there is and what to do; whatever had been taken
    /// is given back.
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
        // What a region of the pool's size would have on each node, so that there is room for one;
        // and at least a page.
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

/// The node on which the page tables of a share on `node` belong; `None` where there is no choice.
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
    /// Starts to describe a pool of `bytes` bytes (rounded up to whole pages): on a node, or as a
    /// [`Placement`] says. Each node's share is what a region of that size would have there, so
    /// that one fits in.
    pub fn builder(placement: impl Into<Placement>, bytes: u64) -> PoolBuilder {
        let backend: Arc<dyn Backend> = Arc::new(Linux);
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

    /// The nodes whose memory it is.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.shares().iter().map(Share::node).collect()
    }

    /// The size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.0.page
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.shares().iter().map(Share::bytes).sum()
    }

    /// What is free of it, in bytes. Frames that a job is recycling are not, although whoever needs
    /// them gets them.
    pub fn free_bytes(&self) -> u64 {
        self.shares().iter().map(Share::free_bytes).sum()
    }

    /// What is free of it on one node, in bytes; 0 for a node that is none of its.
    pub fn free_bytes_on(&self, node: NodeId) -> u64 {
        self.shares().iter().filter(|share| share.node() == node).map(Share::free_bytes).sum()
    }

    /// The pool as a destination with another placement than its own: `pool.on(NodeId(1))`.
    pub fn on(&self, placement: impl Into<Placement>) -> Destination {
        Destination { pool: self.clone(), placement: placement.into() }
    }

    /// Asks the kernel where all its frames lie, whoever uses them. Maps each of them once more for
    /// a moment: takes some 60 ms per GB of base pages. Leaps may go on meanwhile.
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

/// Where pages go: a pool, and a placement on nodes that it has. A pool alone means its own
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
    /// By the layout's numbers.
    pub(crate) shares: Vec<Share>,
    page_tables: PageTables,
}

impl Destination {
    /// The size of the pool's pages.
    pub fn page_size(&self) -> PageSize {
        self.pool.page_size()
    }

    /// What the pool has free, in bytes, on the nodes of the placement.
    pub fn free_bytes(&self) -> u64 {
        let named = |share: &&Share| self.placement.nodes().any(|node| node == share.node());
        self.pool.shares().iter().filter(named).map(Share::free_bytes).sum()
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Finds the shares for the pages of a range of at most `capacity` bytes.
    pub(crate) fn resolve(&self, capacity: usize, page: PageSize) -> Result<Target, Error> {
        let layout = self.placement.layout(capacity, page)?;
        let find = |(node, _): (NodeId, u32)| {
            let share = self.pool.shares().iter().find(|share| share.node() == node);
            share.cloned().ok_or_else(|| Error::BadArgument {
                what: "placement",
                reason: format!(
                    "{node} is none of the pool's, which are {}",
                    nodes_text(&self.pool.nodes())
                ),
                remedy: "name nodes on which the pool has memory".into(),
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
    /// Cuts pages of the region into parts by the share that they belong to.
    pub(crate) fn parts(
        &self,
        pages: std::ops::Range<u64>,
    ) -> impl Iterator<Item = (std::ops::Range<u64>, &Share)> {
        self.layout.parts(pages).into_iter().map(|(part, share)| (part, &self.shares[share]))
    }

    /// Where the page tables belong of pages in frames of a share; `None` if it makes no
    /// difference.
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

/// Reserves address space so that whole page-table pages can later move between two such ranges:
/// aligned to 1 GB if it is that large, else to 2 MB.
pub(crate) fn reserve_aligned(backend: &dyn Backend, bytes: usize) -> Result<usize, Error> {
    const ALIGN_SMALL: usize = 2 << 20;
    const ALIGN_LARGE: usize = 1 << 30;
    if backend.is_host_memory() {
        // SAFETY: reads a constant of the system.
        let base = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if base != BASE_PAGE as libc::c_long {
            return Err(Error::Unsupported {
                what: format!(
                    "this kernel's base pages have {base} bytes, and pageleap knows {BASE_PAGE} only"
                ),
                remedy: "use a kernel with 4 KB pages",
            });
        }
    }
    let align = if bytes >= ALIGN_LARGE { ALIGN_LARGE } else { ALIGN_SMALL };
    let mut holes = Vec::new();
    let reserved = loop {
        match backend.reserve(bytes, align) {
            // A call has left a hole in what is ours. Its repair could not tell whose mapping lies
            // there.
            Ok(addr) if backend.is_host_memory() && is_of_pool_or_region(addr, bytes) => {
                holes.push(addr)
            }
            other => break other,
        }
    };
    for addr in holes {
        // SAFETY: just reserved, and nobody knows it.
        let _ = unsafe { backend.release(addr, bytes) };
    }
    reserved.map_err(|errno| Error::call(Call::Reserve, 0, bytes, errno))
}

/// The command that adds huge pages to a node, on top of those that it has.
pub fn reserve_command(node: NodeId, page: PageSize, more: u64) -> String {
    let file = crate::topology::huge_page_directory(node, page.bytes() as u64).join("nr_hugepages");
    let total = crate::topology::read_count(&file).unwrap_or(0) + more;
    format!("echo {total} > {}", file.display())
}
