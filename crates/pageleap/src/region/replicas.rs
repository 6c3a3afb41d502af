//! Views: further mappings of a region's frames, each for the threads of one node.
//!
//! The kernel takes a page of page table from the node that the memory policy of the calling thread
//! names. So a thread of the library fills the page tables of a view under a policy for the view's
//! node, and the node's threads walk tables of their own node. This replicates page tables for the
//! memory of a region, which Mitosis and Phoenix do for whole processes in a changed kernel.
//!
//! **Invariant:** outside a running attempt, each view maps the frames of the region's extents, at
//! the same offsets. `grow` and `back` map both, `discard` unmaps both, and a leap closes both
//! ([`engine::views`](crate::engine::views)).

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use super::{Extent, PageTableCounts, Plain, Region, RegionInner, TableAccount};
use crate::address_ranges::{Listed, REGIONS, reserve_aligned};
use crate::backend::{Advice, Call, Errno, Mapping, Prot};
use crate::engine::effort::{AfterState, ViewsLeft};
use crate::engine::views::{MOST_VIEWS, ViewSpan, Views};
use crate::error::Error;
use crate::forks;
use crate::limits::{check_address_space, check_memory_cgroups};
use crate::observe::{self, MappedPages};
use crate::pool::Share;
use crate::sync::{Mutex, lock, thread};
use crate::topology::Topology;
use crate::units::{NodeId, PageSize};

/// A mapping of a view covers at most so many hugetlb pages, and no multiple of it inside. 128
/// pages of 2 MB are 256 MB, so a TB takes 4096 mappings of the 65,530 that a process has by
/// default (`vm.max_map_count`).
///
/// In views it has a second reason: two mappings of a file share pages of PMDs where both cover a
/// whole GB and agree modulo 1 GB (`huge_pmd_share` in mm/hugetlb.c). Then a view would have the
/// page tables of another node. The kernel does not merge mappings of hugetlb pages, so a view
/// never covers one GB by one mapping.
pub(crate) const HUGETLB_BLOCK: u64 = 128;

/// A view's mapping.
pub(super) struct Replica {
    node: NodeId,
    start: usize,
    /// Its place in the list of this process' addresses, until it is unmapped.
    listed: Mutex<Option<Listed>>,
    tables: Mutex<TableAccount>,
}

/// A mapping of a region's memory for the threads of one node: the same frames at other addresses,
/// with page tables on that node ([`Region::replicate`]).
///
/// A load whose translation is not in the TLB walks page tables. Where these lie on another node,
/// each walk fetches its entries from there. Threads that use the view of their own node walk local
/// tables, while the data are shared.
///
/// # What changes for the program
/// * **Offsets instead of addresses.** Byte `n` of a view is byte `n` of the region. A pointer that
///   is stored inside is an address of one mapping: a thread that follows it leaves its view. So
///   structures inside store offsets.
/// * **Locks that sleep** (mutexes, condition variables, semaphores; all that use a private futex)
///   are used through *one* mapping, say the region's. The kernel knows such a lock by its address,
///   so a thread that sleeps at one address does not notice a wake at another. Atomics and spin
///   locks work through all mappings together.
/// * **Attributes** (`mprotect`, `madvise`, `mlock`) are set on the region. A view is readable and
///   writable, also where the region has been made read-only, and loses other attributes when its
///   pages move. Children do not get it, and core dumps contain the region only.
/// * **Leaps** of a region that has views go by [`Engine::StopCopy`](crate::Engine::StopCopy),
///   which closes all of them before it copies, and so needs a userfaultfd that holds up the
///   kernel's own accesses. Each view makes the window longer.
///
/// The other rules of [the contract](Region) hold for accesses through views, too. A guard
/// ([`Region::pin`]) holds for all views.
///
/// ```
/// use std::sync::atomic::Ordering::Relaxed;
///
/// use pageleap::{NodeId, PageTableLevel, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let pool = Pool::builder(NodeId(0), 4 << 20).build()?;
/// let region = Region::new(&pool, 4 << 20)?;
/// region.replicate([NodeId(0)])?;
/// let view = region.view(NodeId(0)).expect("it was made");
/// region.atomics_u64(0..8)?[0].store(7, Relaxed);
/// assert_eq!(view.atomics_u64(0..8)?[0].load(Relaxed), 7);
/// assert_ne!(view.as_ptr(), region.as_ptr());
/// assert_eq!(view.page_tables().asked_on(PageTableLevel::Pte, NodeId(0)), 2);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct View<'a> {
    region: &'a Region,
    replica: Arc<Replica>,
}

impl<'a> View<'a> {
    /// The node whose threads it is for.
    pub fn node(&self) -> NodeId {
        self.replica.node
    }

    /// The address of its first byte, which never changes.
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(self.replica.start as *mut u8).expect("the kernel maps nothing at 0")
    }

    /// The length of the region in bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether the region has no bytes yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As [`Region::atomics_u64`].
    pub fn atomics_u64(&self, range: Range<usize>) -> Result<&'a [AtomicU64], Error> {
        // SAFETY: atomics may be shared with concurrent atomic accesses, also through other
        // mappings.
        unsafe { self.slice_of(range) }
    }

    /// As [`Region::atomics_u32`].
    ///
    /// # Safety
    /// As [`Region::atomics_u32`], through all mappings.
    pub unsafe fn atomics_u32(&self, range: Range<usize>) -> Result<&'a [AtomicU32], Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.slice_of(range) }
    }

    /// As [`Region::atomics_u8`].
    ///
    /// # Safety
    /// As [`Region::atomics_u8`], through all mappings.
    pub unsafe fn atomics_u8(&self, range: Range<usize>) -> Result<&'a [AtomicU8], Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.slice_of(range) }
    }

    /// As [`Region::slice`].
    ///
    /// # Safety
    /// While the slice lives, no thread writes to the part, through any mapping.
    pub unsafe fn slice<T: Plain>(&self, range: Range<usize>) -> Result<&'a [T], Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.slice_of(range) }
    }

    /// # Safety
    /// As `RegionInner::slice_at`; the region, and so the view, is borrowed for `'a`.
    unsafe fn slice_of<T>(&self, range: Range<usize>) -> Result<&'a [T], Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.region.0.slice_at(self.replica.start, range) }
    }

    /// How many pages of page table map it, as [`Region::page_tables`] tells for the region.
    pub fn page_tables(&self) -> PageTableCounts {
        let extents = lock(&self.region.0.extents);
        lock(&self.replica.tables).counts(&extents)
    }

    /// The real size of the pages with which it is mapped.
    pub fn mapped_pages(&self) -> Result<MappedPages, Error> {
        observe::mapped_pages(self.replica.start, self.len())
    }

    /// As [`Region::frame_numbers`]. While nothing leaps, both give the same numbers.
    pub fn frame_numbers(&self) -> Result<Option<Vec<u64>>, Error> {
        observe::frame_numbers(self.replica.start, self.len(), self.region.0.page.bytes())
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Replica { node, start, .. } = *self.replica;
        write!(f, "View of {:?} for {node} ({start:#x})", self.region)
    }
}

impl Region {
    /// Gives each of these nodes a [view](View) of the region, unless it has one. Threads use the
    /// view of the node on which they run; [`View`] says what that asks of the program.
    ///
    /// A view takes address space for the region's capacity, and page tables: 1/512 of the memory
    /// in base pages. Making one took some 50 ms for each GB of base pages on a virtual machine.
    /// From then on `grow`, `back`, `discard` and leaps change all views along with the region.
    ///
    /// A node may be named several times, and then has as many views. That serves to test and
    /// measure on a machine with one node.
    ///
    /// # Errors
    /// * [`Error::UnknownNode`], [`Error::NodeNotAllowed`]: the node has no memory or is offline,
    ///   or the cpuset excludes it. [`Error::BadArgument`]: it has no CPUs, so no thread would use
    ///   the view; or there would be more than 64 views.
    /// * [`Error::RangeBusy`]: a job or a call works on the region. Wait for it.
    /// * [`Error::Limit`]: the views would need more mappings than the process may have.
    ///   [`Error::OutOfMemory`]: a memory cgroup has no room for the page tables.
    /// * [`Error::Unsupported`]: the region has pages of 1 GB. One page of page table maps 512 of
    ///   them, so there is nothing to replicate.
    /// * [`Error::NoThread`]: the thread that fills the page tables cannot be started.
    /// * [`Error::Call`]: the kernel refuses a call.
    ///
    /// After an error the region has the views that it had before.
    pub fn replicate(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), Error> {
        let inner = &self.0;
        let mut wanted: BTreeMap<NodeId, usize> = BTreeMap::new();
        nodes.into_iter().for_each(|node| *wanted.entry(node).or_default() += 1);
        // So that `grow` adds no extents meanwhile.
        let _growing = lock(&inner.growing);
        let present = inner.views();
        for view in &present {
            wanted.entry(view.node).and_modify(|views| *views = views.saturating_sub(1));
        }
        let missing: Vec<NodeId> =
            wanted.into_iter().flat_map(|(node, views)| std::iter::repeat_n(node, views)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        inner.check_views(&missing, present.len())?;
        // Jobs and calls know which views there are, so none may work meanwhile.
        let _claim = inner.claim(0..inner.capacity)?;
        let extents: Vec<Extent<Share>> = lock(&inner.extents).within(0..u64::MAX).collect();
        inner.check_room_for_views(&extents, missing.len())?;
        let mut made = Vec::new();
        let mut done = missing.iter().try_for_each(|node| {
            made.push(inner.reserve_view(*node)?);
            Ok(())
        });
        if done.is_ok() {
            done = inner.map_in(&made, &extents, true);
        }
        if let Err(error) = done {
            // Views that cannot be unmapped now are unmapped with the region.
            made.retain(|view| inner.release_view(view).is_err());
            lock(&inner.lost_views).extend(made);
            return Err(error);
        }
        lock(&inner.views).extend(made);
        Ok(())
    }

    /// The view for threads of a node; `None` if it has none.
    pub fn view(&self, node: NodeId) -> Option<View<'_>> {
        self.views().into_iter().find(|view| view.node() == node)
    }

    /// All views, in the order in which they were made.
    pub fn views(&self) -> Vec<View<'_>> {
        let view = |replica| View { region: self, replica };
        self.0.views().into_iter().map(view).collect()
    }

    /// Unmaps all views of these nodes. The region and its contents stay. Takes `&mut self`,
    /// because references into a view would dangle.
    ///
    /// # Errors
    /// [`Error::RangeBusy`]: a job or a call works on the region. [`Error::Call`]: the kernel refuses to
    /// unmap a view; that one and those that were made after it stay.
    pub fn drop_views(&mut self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), Error> {
        // SAFETY: no other reference to the region exists, so that no reference into a view lives.
        unsafe { self.drop_views_shared(nodes) }
    }

    /// [`Region::drop_views`], for callers whose language has no exclusive references.
    ///
    /// # Safety
    /// From this call on no thread accesses these views or keeps a reference into one.
    ///
    /// # Errors
    /// As [`Region::drop_views`].
    pub unsafe fn drop_views_shared(
        &self,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> Result<(), Error> {
        let inner = &self.0;
        let nodes: Vec<NodeId> = nodes.into_iter().collect();
        let _growing = lock(&inner.growing);
        let _claim = inner.claim(0..inner.capacity)?;
        for view in inner.views().into_iter().filter(|view| nodes.contains(&view.node)) {
            inner.release_view(&view)?;
            lock(&inner.views).retain(|other| !Arc::ptr_eq(other, &view));
        }
        Ok(())
    }
}

impl Replica {
    /// The addresses of pages of the region.
    fn range(&self, region: &RegionInner, pages: &Range<u64>) -> Range<usize> {
        self.start + region.bytes(pages.start)..self.start + region.bytes(pages.end)
    }
}

impl RegionInner {
    /// The views that there are now. Whoever has a claim of the region finds the same until it
    /// ends.
    fn views(&self) -> Vec<Arc<Replica>> {
        lock(&self.views).clone()
    }

    /// How many views there are.
    pub(crate) fn view_count(&self) -> usize {
        lock(&self.views).len()
    }

    /// The views' parts that map the same pages as a part of the region, by its first byte.
    pub(crate) fn views_at(&self, first: usize) -> Views {
        let mut spans = Views::NONE;
        for view in &*lock(&self.views) {
            spans.push(ViewSpan { addr: view.start + first, node: view.node, standby: 0 });
        }
        spans
    }

    /// Notes in the views' accounts which page tables an attempt on a part has left.
    pub(crate) fn note_views(&self, range: &Range<usize>, after: &AfterState) {
        for (number, view) in self.views().iter().enumerate() {
            let is_asked = after.unasked_views & 1 << number == 0;
            let part = view.start + range.start..view.start + range.end;
            let mut tables = lock(&view.tables);
            match after.views {
                ViewsLeft::Mapped => {
                    tables.mapped(&part, Some(view.node).filter(|_| is_asked), true);
                }
                ViewsLeft::Dropped if !is_asked => tables.mapped(&part, None, true),
                // Filled again from the node from which they were before.
                ViewsLeft::Dropped | ViewsLeft::Untouched => {}
            }
        }
    }

    fn check_views(&self, nodes: &[NodeId], present: usize) -> Result<(), Error> {
        let bad =
            |what, reason: String, remedy: String| Err(Error::BadArgument { what, reason, remedy });
        if self.page == PageSize::Huge1G {
            return Err(Error::Unsupported {
                what: "views of a region with pages of 1 GB: one page of page table maps 512 of them, so \
                       there is nothing to replicate"
                    .into(),
                remedy: "use the region itself on all nodes",
            });
        }
        if present + nodes.len() > MOST_VIEWS {
            let reason = format!("the region would have {} views", present + nodes.len());
            return bad("nodes", reason, format!("a region has {MOST_VIEWS} views at most"));
        }
        let topology = if self.backend.is_host_memory() { Some(Topology::read()?) } else { None };
        for node in nodes {
            if let Some(topology) = &topology
                && topology.node(*node)?.cpus.is_empty()
            {
                let near = topology.nearest_with_cpus(*node);
                let reason = format!("{node} has no CPUs, so no thread would use its view");
                return bad("node", reason, format!("use {near}, whose threads are nearest"));
            }
            if !self.backend.allows_node(node.0) {
                return Err(Error::NodeNotAllowed { node: *node });
            }
        }
        Ok(())
    }

    /// Refuses if views would need more mappings or memory than the process may have.
    fn check_room_for_views(&self, extents: &[Extent<Share>], views: usize) -> Result<(), Error> {
        if !self.backend.is_host_memory() {
            return Ok(());
        }
        // A thread makes the calls.
        check_address_space(&*self.backend, 1)?;
        let bytes: usize = extents.iter().map(|e| self.bytes(e.frames().frames)).sum();
        let entries = if self.page == PageSize::Base { bytes * views } else { 0 };
        if let Some(extent) = extents.first() {
            check_memory_cgroups(extent.share.node(), 1, entries)?;
        }
        // Beside its frames, a view has mappings of address space without memory between and behind
        // them.
        let each = extents.iter().map(|e| 1 + self.pieces(e).count()).sum::<usize>() + 1;
        let needed = each * views;
        let Some(limit) = observe::max_mapping_count() else { return Ok(()) };
        let in_use = observe::mapping_count()?;
        if limit.saturating_sub(in_use) < needed {
            return Err(Error::Limit {
                what: "memory mappings of this process (vm.max_map_count)",
                limit,
                in_use,
                needed,
                remedy: "raise it (sysctl -w vm.max_map_count=262144), make fewer views, or leap the region \
                         into consecutive frames of a pool first, which joins its mappings",
            });
        }
        Ok(())
    }

    fn reserve_view(&self, node: NodeId) -> Result<Arc<Replica>, Error> {
        let start = reserve_aligned(&*self.backend, self.capacity)?;
        let listed = Listed::view(&REGIONS, &*self.backend, start, self.capacity, self.start);
        let tables = TableAccount::new(start..start + self.capacity, self.page);
        let (listed, tables) = (Mutex::new(Some(listed)), Mutex::new(tables));
        Ok(Arc::new(Replica { node, start, listed, tables }))
    }

    /// Unmaps a view that no thread uses any more.
    fn release_view(&self, view: &Replica) -> Result<(), Error> {
        let listed = lock(&view.listed).take();
        // Before the addresses are free for others.
        drop(listed);
        // SAFETY: the view is the region's, and nobody uses it.
        unsafe { self.backend.release(view.start, self.capacity) }.map_err(|errno| {
            let again =
                Listed::view(&REGIONS, &*self.backend, view.start, self.capacity, self.start);
            *lock(&view.listed) = Some(again);
            Error::call(Call::Release, view.start, self.capacity, errno)
        })
    }

    /// Unmaps all views at the end of the region. Returns whether the frames may go to others.
    pub(super) fn release_views(&self) -> bool {
        let mut views = std::mem::take(&mut *lock(&self.views));
        views.append(&mut lock(&self.lost_views));
        // All of them, also if one is refused.
        views.iter().filter(|view| self.release_view(view).is_err()).count() == 0
    }

    /// The parts of an extent that views map by one call each.
    fn pieces(&self, extent: &Extent<Share>) -> impl Iterator<Item = Extent<Share>> {
        let Range { start, end } = extent.pages;
        let block = if self.page.is_hugetlb() { HUGETLB_BLOCK } else { u64::MAX };
        (start / block..end.div_ceil(block)).map(move |number| {
            let first = start.max(number * block);
            let last = end.min((number + 1).saturating_mul(block));
            Extent {
                pages: first..last,
                share: extent.share.clone(),
                first_frame: extent.first_frame + (first - start),
            }
        })
    }

    /// Maps frames that the region has just been given in all views.
    pub(super) fn map_in_views(&self, new: &[Extent<Share>]) -> Result<(), Error> {
        match self.views() {
            views if views.is_empty() => Ok(()),
            views => self.map_in(&views, new, false),
        }
    }

    /// Maps frames in views, by a thread of our own, because the memory policy of the caller's must
    /// not change. `must_ask`: a node that the kernel refuses is an error.
    fn map_in(
        &self,
        views: &[Arc<Replica>],
        new: &[Extent<Share>],
        must_ask: bool,
    ) -> Result<(), Error> {
        let map_all = |may_ask: bool| {
            views.iter().try_for_each(|view| {
                // Only a thread of our own may get another policy.
                let asked = may_ask.then(|| self.backend.prefer_tables_on(Some(view.node.0)));
                let asked = match asked {
                    Some(Err(errno)) if must_ask => {
                        return Err(Error::call(Call::PreferTables, 0, 0, errno));
                    }
                    asked => asked.and_then(Result::ok).map(|()| view.node),
                };
                let mut pieces = new.iter().flat_map(|extent| self.pieces(extent));
                pieces.try_for_each(|piece| self.map_in_view(view, &piece, asked))
            })
        };
        let (mut mapped, mut started) = (None, Ok(()));
        thread::scope(|scope| {
            let on_a_thread = || mapped = Some(map_all(true));
            started = scope.start(c"pageleap", on_a_thread);
        });
        match (mapped, started) {
            (Some(mapped), _) => mapped,
            (None, Err(errno)) if must_ask => Err(crate::priority::no_thread(
                "a thread that fills the page tables of views",
                errno,
            )),
            // The page tables lie where the caller runs.
            (None, _) => map_all(false),
        }
    }

    fn map_in_view(
        &self,
        view: &Replica,
        extent: &Extent<Share>,
        asked: Option<NodeId>,
    ) -> Result<(), Error> {
        let (backend, share) = (&*self.backend, &extent.share.0);
        let range = view.range(self, &extent.pages);
        let (addr, len) = (range.start, range.len());
        let mapping = Mapping {
            addr,
            len,
            file: share.file,
            offset: share.offset_of(extent.first_frame),
            prot: Prot::READ_WRITE,
            populate: false,
        };
        // SAFETY: the part of the view is reserved, and no thread uses it yet.
        let mapped = forks::while_mapping(|| unsafe {
            backend.map(&mapping).map_err(|errno| (Call::Map, errno))?;
            backend.advise(addr, len, Advice::DontFork).map_err(|errno| (Call::Advise, errno))
        });
        let filled = mapped.and_then(|()| {
            // Entries of a shared file are writable, also if they are made for reading, and those
            // are made sixteen at a time (`do_fault_around` in mm/memory.c).
            // SAFETY: as above. If the advice is refused, core dumps are larger.
            unsafe {
                let _ = backend.advise(addr, len, Advice::DontDump);
                backend.populate(addr, len, false).map_err(|errno| (Call::Populate, errno))
            }
        });
        if filled.is_ok() {
            lock(&view.tables).mapped(&range, asked, true);
        }
        filled.map_err(|(call, errno): (Call, Errno)| Error::call(call, addr, len, errno))
    }

    /// Unmaps pages in all views. After an error a view may still map some of them.
    pub(super) fn vacate_views(&self, pages: &Range<u64>) -> Result<(), Error> {
        let mut failure = Ok(());
        for view in self.views() {
            let range = view.range(self, pages);
            // SAFETY: the pages are the caller's, and no thread uses them.
            match unsafe { self.backend.vacate(range.start, range.len()) } {
                Ok(()) => lock(&view.tables).unmapped(&range),
                Err(errno) => {
                    failure = Err(Error::call(Call::Vacate, range.start, range.len(), errno));
                }
            }
        }
        failure
    }
}
