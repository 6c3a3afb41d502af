//! Regions: stable virtual ranges whose pages change their frames while threads use them.
//!
//! A region owns its address space and every mapping in it, until it is dropped. Each page is
//! either backed by a frame of a pool, or unbacked: an access to an unbacked page raises SIGSEGV,
//! as to any unmapped address. [`extents`] has the frame of each page, [`busy`] the claims of jobs
//! and calls, and [`pins`] the guards. [`mapping`] maps and unmaps frames, [`tables`] counts
//! page tables, [`slices`] makes slices, [`replicas`] has further mappings of the same frames, and
//! [`dependents`] are threads that end with the region.
//!
//! **Invariant:** outside a running migration, the mappings of a region are those of its
//! [`ExtentMap`]. **Invariant:** bytes that a job or a call is changing are *busy*, and no other
//! job or call changes them meanwhile.

mod busy;
mod dependents;
mod extents;
mod mapping;
mod pins;
mod replicas;
mod slices;
mod tables;

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use busy::BusyRanges;
pub(crate) use busy::{Claim, Gone, Owner};
use dependents::Dependents;
pub(crate) use dependents::{Dependent, RegionRef};
pub(crate) use extents::{Extent, ExtentMap};
pub use pins::PinGuard;
use pins::Pins;
pub(crate) use replicas::HUGETLB_BLOCK;
use replicas::Replica;
pub use replicas::View;
pub use slices::Plain;
use tables::TableAccount;
pub use tables::{PageTableCounts, PageTableLevel};

use crate::address_ranges::{Listed, REGIONS, reserve_for_region};
use crate::backend::{Backend, host_memory};
use crate::error::Error;
use crate::job::handle::JobShared;
use crate::limits::check_address_space;
use crate::observe::{self, MappedPages};
use crate::placement::{NodeCounts, Verification};
use crate::pool::{Destination, Needs, Run, Share};
use crate::sync::{AtomicUsize, Mutex, Ordering, lock};
use crate::units::{AddressRange, PageSize, RegionId};

/// A stable virtual range over frames of one or several pools.
///
/// # The user's contract
/// Threads of this process may read and write the region at any time, also while it is being
/// migrated, with ordinary loads, stores and atomic operations; nothing is lost. In return the
/// program keeps these rules (`docs/protocol.md`, "The user's contract", has the reasons):
///
/// * **System calls that write into a part** that is being migrated (`read`, `recv`, io_uring) may
///   fail with EFAULT, or end early with a short count, with the engines `mprotect` and
///   `precopy-protect`. Repeat such a call, unless it consumes its data before it copies them, as
///   with datagrams and eventfds.
/// * **No pinned pages without a guard**: no O_DIRECT, RDMA, registered io_uring buffers,
///   `vmsplice`, `process_vm_writev` or MSG_ZEROCOPY in flight on a part that is being migrated,
///   except under [`Region::pin`]. The device would go on using the old frame.
/// * **No process-shared, priority-inheriting or robust mutexes**, semaphores or condition
///   variables inside. Ordinary private ones are fine.
/// * **No stacks and no thread-local storage** inside.
/// * **Nothing that this library allocates** inside: the global allocator, and `malloc` under it,
///   must not take their memory from a region.
/// * **No userfaultfd of your own** on it, and no protection keys.
/// * **No other mapping** of the same memory file but its [views](View), and no use by other
///   processes. Children made by `fork` do not get the region (`MADV_DONTFORK` is set); a child
///   must not touch it.
/// * **No thread that blocks SIGSEGV writes into the region** while the engine `mprotect` or
///   `precopy-protect` moves it. A signal handler whose mask contains SIGSEGV blocks it.
/// * **No seccomp filter kills a thread** for the system calls of the fault handler, if the thread
///   writes into the region while the engine `mprotect` moves it.
/// * Attributes (`mlock`, `madvise`, `mprotect`) may be set on any part of the region at any time,
///   and survive migration. Pages that a job is to move stay readable until it has ended. Give
///   write access to read-only pages before they move, or after. A call that comes some
///   milliseconds before pages move may be lost for them. Nothing else may be mapped into the
///   region's range.
///
/// Dropping the region cancels the jobs that work on it, waits for them, and unmaps it.
/// Followers ([`Region::follow_latency`]) end, too. Pointers into the region dangle then.
///
/// ```
/// use std::sync::atomic::Ordering::Relaxed;
///
/// use pageleap::{Migration, NodeId, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let here = Pool::builder(NodeId(0), 1 << 20).build()?;
/// let there = Pool::builder(NodeId(0), 1 << 20).build()?;
/// let region = Region::new(&here, 1 << 20)?; // zeroed
/// let words = region.atomics_u64(0..region.len())?;
///
/// let job = Migration::new().range(&region, 0..region.len(), &there).start()?;
/// words[7].store(42, Relaxed); // while it moves, from any thread
/// assert!(job.wait().ended.is_completed());
/// assert_eq!(words[7].load(Relaxed), 42); // at the same address, in a frame of `there`
/// # Ok(()) }
/// ```
pub struct Region(Arc<RegionInner>);

pub(crate) struct RegionInner {
    pub(crate) id: RegionId,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) start: usize,
    /// The region in the list of this process' addresses.
    listed: Option<Listed>,
    capacity: usize,
    pub(crate) page: PageSize,
    len: AtomicUsize,
    /// Held while the region is made longer.
    growing: Mutex<()>,
    pub(crate) extents: Mutex<ExtentMap<Share>>,
    /// Changed when a call has changed the mappings. Whoever locks both locks the extents first.
    pub(crate) tables: Mutex<TableAccount>,
    busy: BusyRanges,
    pub(crate) pins: Pins,
    /// Frames that may still be mapped, although no extent says so, because unmapping them failed.
    /// No other region gets them before this one is dropped.
    limbo: Mutex<Vec<(Share, Run)>>,
    /// The process that made it.
    process: u32,
    /// Jobs that work, or have worked, on this region.
    pub(crate) jobs: Mutex<Vec<Weak<JobShared>>>,
    /// Threads that start jobs on it.
    dependents: Dependents,
    /// Its further mappings. Changed under a claim of all its bytes.
    views: Mutex<Vec<Arc<Replica>>>,
    /// Views that could not be unmapped after a call had failed.
    lost_views: Mutex<Vec<Arc<Replica>>>,
}

impl Region {
    /// A region of `bytes` bytes (rounded up to whole pages), all zero, backed by frames of a pool.
    /// `&pool` stands for the pool's own placement, `pool.on(placement)` for another placement on
    /// its nodes. If frames are needed that a job is recycling, the call waits for them. Read [the
    /// contract](Region).
    ///
    /// # Errors
    /// If the pool has too few free frames, or the mapping fails. All frames are given back.
    pub fn new(place: impl Into<Destination>, bytes: usize) -> Result<Region, Error> {
        let place = place.into();
        let region =
            Region::reserve_over(place.pool().backend().clone(), bytes, place.pool().page_size())?;
        region.grow(bytes, place)?;
        Ok(region)
    }

    /// An empty region that can grow to `capacity` bytes at the same address. Read [the
    /// contract](Region).
    pub fn reserve(capacity: usize, page: PageSize) -> Result<Region, Error> {
        Region::reserve_over(host_memory(), capacity, page)
    }

    /// Like [`Region::reserve`], over a backend other than the kernel, for tests (feature
    /// `testing`).
    #[cfg(feature = "testing")]
    pub fn reserve_with(
        backend: Arc<dyn Backend>,
        capacity: usize,
        page: PageSize,
    ) -> Result<Region, Error> {
        Region::reserve_over(backend, capacity, page)
    }

    fn reserve_over(
        backend: Arc<dyn Backend>,
        capacity: usize,
        page: PageSize,
    ) -> Result<Region, Error> {
        if capacity == 0 || capacity > 1 << 46 {
            return Err(Error::BadArgument {
                what: "region size",
                reason: format!("{capacity} bytes"),
                remedy: "use 1 to 2^46 bytes".into(),
            });
        }
        let capacity = capacity.next_multiple_of(page.bytes());
        let start = reserve_for_region(&*backend, capacity, page)?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let listed = Listed::new(&REGIONS, &*backend, start, capacity);
        Ok(Region(Arc::new(RegionInner {
            id: RegionId(NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            backend,
            start,
            listed: Some(listed),
            capacity,
            page,
            len: AtomicUsize::new(0),
            growing: Mutex::new(()),
            extents: Mutex::new(ExtentMap::new()),
            tables: Mutex::new(TableAccount::new(start..start + capacity, page)),
            busy: BusyRanges::default(),
            pins: Pins::default(),
            limbo: Mutex::new(Vec::new()),
            process: std::process::id(),
            jobs: Mutex::new(Vec::new()),
            dependents: Dependents::default(),
            views: Mutex::new(Vec::new()),
            lost_views: Mutex::new(Vec::new()),
        })))
    }

    /// Extends the region to `len` bytes (rounded up to whole pages). The new part is zero and
    /// backed by frames of a pool. Addresses do not change. A region that is as long already does
    /// not change. If several threads call this, one call runs after the other.
    pub fn grow(&self, len: usize, place: impl Into<Destination>) -> Result<(), Error> {
        let _growing = lock(&self.0.growing);
        let Some(new) = self.new_part(len)? else { return Ok(()) };
        self.back_up_to(self.0.capacity, new.clone(), &place.into(), Duration::ZERO)?;
        self.0.len.fetch_max(new.end, Ordering::AcqRel);
        Ok(())
    }

    /// Extends the region to `len` bytes (rounded up to whole pages), without memory: an access to
    /// the new part raises SIGSEGV until the part is backed ([`Region::back`]). For buffer pools,
    /// which have an address for each page of a file, and memory for some of the pages.
    pub fn extend(&self, len: usize) -> Result<(), Error> {
        let _growing = lock(&self.0.growing);
        let Some(new) = self.new_part(len)? else { return Ok(()) };
        self.0.len.fetch_max(new.end, Ordering::AcqRel);
        Ok(())
    }

    /// The bytes that are new if the region grows to `len` bytes, in whole pages.
    fn new_part(&self, len: usize) -> Result<Option<Range<usize>>, Error> {
        let inner = &*self.0;
        let len = len.checked_next_multiple_of(inner.page.bytes()).unwrap_or(usize::MAX);
        let old = self.len();
        if len > inner.capacity {
            return Err(inner.bad_range(
                old..len,
                "beyond the region's capacity",
                "reserve a larger region",
            ));
        }
        Ok((len > old).then_some(old..len))
    }

    /// Backs an unbacked part, which [`Region::discard`] or [`Region::extend`] has left, with
    /// zeroed frames of a pool. As [`Region::discard`], the call does not wait for jobs.
    pub fn back(&self, range: Range<usize>, place: impl Into<Destination>) -> Result<(), Error> {
        self.back_within(range, place, Duration::ZERO)
    }

    /// Like [`Region::back`], but waits as [`Region::discard_within`] does.
    pub fn back_within(
        &self,
        range: Range<usize>,
        place: impl Into<Destination>,
        patience: Duration,
    ) -> Result<(), Error> {
        self.back_up_to(self.len(), range, &place.into(), patience)
    }

    fn back_up_to(
        &self,
        limit: usize,
        range: Range<usize>,
        place: &Destination,
        patience: Duration,
    ) -> Result<(), Error> {
        let inner = &self.0;
        let pool = place.pool();
        check_same_backend(&inner.backend, pool.backend())?;
        if pool.page_size() != inner.page {
            return Err(Error::BadArgument {
                what: "pool",
                reason: format!(
                    "its pages have the size {}, and those of the region {}",
                    pool.page_size(),
                    inner.page
                ),
                remedy: "use a pool with pages of the region's size".into(),
            });
        }
        inner.check_range(range.clone(), limit)?;
        let pages = inner.pages(&range);
        let check_unbacked = || match lock(&inner.extents).within(pages.clone()).next() {
            None => Ok(()),
            Some(_) => Err(inner.bad_range(
                range.clone(),
                "part of it has memory already",
                "name unbacked pages only",
            )),
        };
        // Checked before the wait too, so that a call which cannot succeed does not wait.
        check_unbacked()?;
        let (_claim, ()) = inner.withdraw(range.clone(), patience, check_unbacked)?;
        // Beyond the limit of address space an exchange would leave a hole, into which another
        // thread could map memory.
        check_address_space(&*inner.backend, 0)?;
        let target = place.resolve(inner.capacity, inner.page)?;
        let mut new: Vec<Extent<Share>> = Vec::new();
        let give_back =
            |new: &[Extent<Share>]| new.iter().for_each(|e| drop(e.share.give_back(e.frames())));
        let mut needs = Needs::default();
        target
            .parts(pages.clone())
            .for_each(|(part, share)| needs.add(share, part.end - part.start));
        for (part, share) in target.parts(pages.clone()) {
            let frames = part.end - part.start;
            let runs = needs.taken(share, frames, share.take_zeroed(frames, part.start));
            let runs = runs.inspect_err(|_| give_back(&new))?;
            let mut page = part.start;
            for run in runs {
                new.push(Extent {
                    pages: page..page + run.frames,
                    share: share.clone(),
                    first_frame: run.first,
                });
                page += run.frames;
            }
        }
        let mut left_views = Ok(());
        let mapped = inner.map_all_new(&new, &target).and_then(|()| {
            inner.map_in_views(&new).map_err(|error| {
                left_views = inner.vacate_views(&pages);
                (error, pages.clone())
            })
        });
        if let Err((error, mapped)) = mapped {
            let (part, len) = (inner.addr(pages.start), inner.bytes(mapped.end - pages.start));
            // SAFETY: the part was unbacked before, and no other code knows of its new frames.
            let vacated = unsafe { inner.backend.vacate(part, len) };
            if vacated.is_ok() {
                lock(&inner.tables).unmapped(&(part..part + len));
            }
            if vacated.is_ok() && left_views.is_ok() {
                give_back(&new);
            } else {
                lock(&inner.limbo).extend(new.iter().map(|e| (e.share.clone(), e.frames())));
            }
            return Err(error);
        }
        // All extents at once: no view of the part may be handed out while the rest can still fail.
        let mut extents = lock(&inner.extents);
        new.into_iter().for_each(|extent| drop(extents.replace(extent)));
        Ok(())
    }

    /// Gives the frames of a part back to their pools. An access to the part raises SIGSEGV until
    /// it is backed again; its contents are lost. Takes `&mut self`, because references into the
    /// part would dangle.
    ///
    /// The part may belong to a job's range, as long as the job is not moving pages of it at this
    /// moment: the job leaves discarded pages out ([`Reason::Discarded`](crate::Reason)).
    ///
    /// # Errors
    /// [`Error::RangeBusy`]: another call works on the part, or a job is moving pages of it, or a
    /// job lets no call withdraw pages. A job does so while it begins and ends, and as long as it
    /// moves hugetlb pages, whose mappings it joins later. [`Region::discard_within`] waits.
    /// [`Error::Pinned`]: a guard is on the part ([`Region::pin`]). [`Error::Call`]: the process
    /// has as many mappings as it may have; some pages of the part may still be backed then, with
    /// their contents. If the region has views, others may be unbacked while their memory returns to
    /// the pool only at the end of the region.
    pub fn discard(&mut self, range: Range<usize>) -> Result<(), Error> {
        self.discard_within(range, Duration::ZERO)
    }

    /// Like [`Region::discard`], but waits for at most `patience` until no job is moving pages of
    /// the part, and no other call works on it. Meanwhile jobs begin no attempt on the part, and no
    /// new job gets it. So the wait takes as long as one attempt, some milliseconds; with hugetlb
    /// pages it takes as long as the job. Signals are handled meanwhile.
    ///
    /// # Errors
    /// As [`Region::discard`].
    pub fn discard_within(&mut self, range: Range<usize>, patience: Duration) -> Result<(), Error> {
        // SAFETY: no other reference to the region exists, so that no reference into it lives.
        unsafe { self.discard_shared_within(range, patience) }
    }

    /// [`Region::discard`], for callers whose language has no exclusive references.
    ///
    /// # Safety
    /// From this call on until the part is backed again, no thread accesses the part or keeps a
    /// reference into it.
    ///
    /// # Errors
    /// As [`Region::discard`].
    pub unsafe fn discard_shared(&self, range: Range<usize>) -> Result<(), Error> {
        // SAFETY: forwarded to the caller.
        unsafe { self.discard_shared_within(range, Duration::ZERO) }
    }

    /// [`Region::discard_within`], for callers whose language has no exclusive references.
    ///
    /// # Safety
    /// As [`Region::discard_shared`].
    ///
    /// # Errors
    /// As [`Region::discard`].
    pub unsafe fn discard_shared_within(
        &self,
        range: Range<usize>,
        patience: Duration,
    ) -> Result<(), Error> {
        self.0.check_range(range.clone(), self.len())?;
        let pages = self.0.pages(&range);
        let pinned =
            || Error::Pinned { range: AddressRange::new(self.0.addr(pages.start), range.len()) };
        // Checked before the wait too, so that a call which cannot succeed does not wait.
        if self.0.pins.any(&pages) {
            return Err(pinned());
        }
        // A call that asks for a guard meanwhile waits, and finds the part unbacked.
        let start_moving = || self.0.pins.start_moving(&pages).map_err(|_| pinned());
        let (_claim, _moving) = self.0.withdraw(range.clone(), patience, start_moving)?;
        self.0.unback(pages.clone())
    }

    /// Keeps the pages of a part in their frames until the guard is dropped.
    ///
    /// Hold a guard as long as a device, or the kernel for it, may use the frames, in either
    /// direction:
    ///
    /// * for O_DIRECT, RDMA, MSG_ZEROCOPY, `vmsplice` or `process_vm_writev`, from before the
    ///   submission until after the completion;
    /// * for an io_uring buffer, from before its registration until after its unregistration.
    ///
    /// Returns when no attempt is under way that moves one of the pages; an attempt takes
    /// milliseconds. Jobs move all other pages meanwhile, and wait for guards as
    /// [`Migration::pin_patience`](crate::Migration::pin_patience) says.
    ///
    /// The guard keeps the region mapped, also after the region itself has been dropped.
    ///
    /// # Errors
    /// If the part is empty, not inside the region, or unbacked somewhere.
    pub fn pin(&self, range: Range<usize>) -> Result<PinGuard, Error> {
        let inner = &self.0;
        if range.start >= range.end || range.end > self.len() {
            return Err(inner.bad_range(
                range,
                "not inside the region, or empty",
                "use a part of it",
            ));
        }
        let page = inner.page.bytes();
        let pages = (range.start / page) as u64..range.end.div_ceil(page) as u64;
        let guard = PinGuard::new(inner, pages.clone());
        // From here on the pages cannot be discarded, because a guard excludes that.
        if !lock(&inner.extents).backs_all(pages) {
            return Err(inner.bad_range(range, "part of it is unbacked", "back it first"));
        }
        Ok(guard)
    }

    /// The address of the first byte, which never changes.
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(self.0.start as *mut u8).expect("the kernel maps nothing at 0")
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len.load(Ordering::Acquire)
    }

    /// Whether the region has no bytes yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The size of the region's pages.
    pub fn page_size(&self) -> PageSize {
        self.0.page
    }

    /// The region's identity in reports.
    pub fn id(&self) -> RegionId {
        self.0.id
    }

    /// The nodes on which the backed pages lie, according to the kernel.
    pub fn placement(&self) -> Result<NodeCounts, Error> {
        let inner = &*self.0;
        let extents: Vec<Extent<Share>> = lock(&inner.extents).within(0..u64::MAX).collect();
        let mut counts = NodeCounts::default();
        for extent in extents {
            counts.join(&inner.nodes_of(&extent)?);
        }
        Ok(counts)
    }

    /// Asks the kernel whether each backed page is present and lies on the node from which its
    /// frame was taken. Leaps may go on meanwhile.
    pub fn verify(&self) -> Result<Verification, Error> {
        let inner = &*self.0;
        let now =
            |pages: Range<u64>| lock(&inner.extents).within(pages).collect::<Vec<Extent<Share>>>();
        let mut all = Verification::default();
        for extent in now(0..u64::MAX) {
            let expected = [(extent.share.node(), extent.frames().frames)];
            let look = inner.nodes_of(&extent).map(|found| Verification::of(found, &expected));
            if let Ok(look) = look
                && look.is_right()
            {
                all.join(look);
                continue;
            }
            // Pages that are leaping are absent for a moment, or have left meanwhile. Their frames
            // can be verified at any time.
            for part in now(extent.pages) {
                all.join(part.share.verify_frames(part.frames())?);
            }
        }
        Ok(all)
    }

    /// The physical frame number of each page, `None` if the kernel hides them (it shows them to
    /// CAP_SYS_ADMIN only).
    pub fn frame_numbers(&self) -> Result<Option<Vec<u64>>, Error> {
        observe::frame_numbers(self.0.start, self.len(), self.0.page.bytes())
    }

    /// The real size of the pages with which the region is mapped.
    pub fn mapped_pages(&self) -> Result<MappedPages, Error> {
        observe::mapped_pages(self.0.start, self.len())
    }

    /// How many pages of page table map the region, by level and by the node that was asked for.
    /// The kernel is not asked: this is the library's own account, and [`PageTableCounts`] says
    /// what it means. Leaps may go on meanwhile; an area that is moving counts as before the move,
    /// or as after it.
    pub fn page_tables(&self) -> PageTableCounts {
        let extents = lock(&self.0.extents);
        lock(&self.0.tables).counts(&extents)
    }

    pub(crate) fn inner(&self) -> &Arc<RegionInner> {
        &self.0
    }
}

impl RegionInner {
    /// The bytes to which the region can grow.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The address of a page.
    pub(crate) fn addr(&self, page: u64) -> usize {
        self.start + self.bytes(page)
    }

    /// The bytes of that many pages.
    pub(crate) fn bytes(&self, pages: u64) -> usize {
        pages as usize * self.page.bytes()
    }

    /// The pages of an aligned byte range.
    pub(crate) fn pages(&self, range: &Range<usize>) -> Range<u64> {
        (range.start / self.page.bytes()) as u64..(range.end / self.page.bytes()) as u64
    }

    /// The frames of a share that may still be mapped, although no extent says so.
    pub(crate) fn withheld(&self, share: &Share) -> Vec<Run> {
        let limbo = lock(&self.limbo);
        limbo.iter().filter(|(of, _)| of == share).map(|(_, run)| *run).collect()
    }

    /// The nodes on which the pages of an extent lie, according to the kernel.
    fn nodes_of(&self, extent: &Extent<Share>) -> Result<NodeCounts, Error> {
        let start = self.addr(extent.pages.start);
        NodeCounts::of_range(&*self.backend, start, extent.frames().frames, self.page)
    }

    pub(crate) fn bad_range(
        &self,
        range: Range<usize>,
        reason: &'static str,
        remedy: impl Into<String>,
    ) -> Error {
        Error::BadRange {
            start: range.start,
            end: range.end,
            region_start: self.start,
            region_len: self.len.load(Ordering::Acquire),
            reason,
            remedy: remedy.into(),
        }
    }

    /// Checks that a byte range is whole pages before `limit`.
    pub(crate) fn check_range(&self, range: Range<usize>, limit: usize) -> Result<(), Error> {
        let page = self.page.bytes();
        if range.start >= range.end {
            return Err(self.bad_range(range, "it is empty", "use at least one page"));
        }
        if !range.start.is_multiple_of(page) || !range.end.is_multiple_of(page) {
            return Err(self.bad_range(
                range,
                "it is not aligned to the pages",
                format!("use multiples of {page} bytes"),
            ));
        }
        if range.end > limit {
            return Err(self.bad_range(
                range,
                "not inside the region",
                "use bytes from 0 to its length",
            ));
        }
        Ok(())
    }
}

/// Refuses to mix memory of this process with memory of a model.
pub(crate) fn check_same_backend(
    backend: &Arc<dyn Backend>,
    other: &Arc<dyn Backend>,
) -> Result<(), Error> {
    if Arc::ptr_eq(backend, other) || backend.is_host_memory() && other.is_host_memory() {
        return Ok(());
    }
    Err(Error::BadArgument {
        what: "pool",
        reason: "its backend is not the region's".into(),
        remedy: "use one backend for both".into(),
    })
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.0.process != std::process::id() {
            return; // a child made by `fork` has no threads of jobs
        }
        // First, because they would start further jobs.
        self.0.dependents.end();
        let jobs: Vec<_> = lock(&self.0.jobs).iter().filter_map(Weak::upgrade).collect();
        jobs.iter().for_each(|job| job.stop_for_dropped_region());
        jobs.iter().for_each(|job| job.wait_until_whole());
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child made by `fork` has the books, but not the memory, and may have mapped other
            // memory there.
            return;
        }
        let all = 0..(self.capacity / self.page.bytes()) as u64;
        drop(self.listed.take());
        let views_are_gone = self.release_views();
        let extents =
            self.extents.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(all);
        // SAFETY: no handle and no job is left. References into the region ended with the handle.
        if unsafe { self.backend.release(self.start, self.capacity) }.is_ok() && views_are_gone {
            extents.into_iter().for_each(|extent| drop(extent.share.give_back(extent.frames())));
            let limbo = self.limbo.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            limbo.drain(..).for_each(|(pool, run)| drop(pool.give_back(run)));
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region {} ({:#x}, {} bytes)", self.0.id.0, self.0.start, self.len())
    }
}
