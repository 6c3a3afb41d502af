//! Staging memory of windows: populated memory of the destination for the copies, and the parking
//! places. Users may populate memory beforehand, as a [`Reserve`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use pageleap_sys::{self as sys, Advice, Errno, Policy, uffd_mode};

use super::HUGE;
use super::mapped::Mapped;
use super::pages::Pagemap;
use super::vacated::{Left, Vacated};
use super::window::Run;
use crate::backend::Linux;
use crate::error::Error;
use crate::pool::room::Room;
use crate::pool::unseen::{self, Unseen};
use crate::sync::{Mutex, lock};
use crate::topology::Topology;
use crate::units::{Call, NodeId, PageSize};

/// The most bytes that are populated before the limits of memory are read again.
const PIECE: usize = 64 << 20;

/// Memory of one node, in base pages or in transparent huge pages.
#[derive(Debug)]
struct Frames {
    mapped: Mapped,
    node: NodeId,
}

impl Frames {
    /// Maps memory that comes from this node, and from no other one.
    fn new(len: usize, node: NodeId, huge: bool) -> Result<Frames, (Call, Errno)> {
        let mapped = Mapped::new(len, HUGE)?;
        let frames = Frames { mapped, node };
        frames.prepare(0..len, huge)?;
        Ok(frames)
    }

    /// Sets the memory policy (mbind) and the page size (madvise) of a part, in bytes from the
    /// start.
    fn prepare(&self, part: Range<usize>, huge: bool) -> Result<(), (Call, Errno)> {
        // SAFETY: the mapping is this value's own.
        unsafe { sys::bind(self.start() + part.start, part.len(), Policy::Bind(self.node.0)) }
            .map_err(|errno| (Call::Bind, errno))?;
        let advice = if huge { Advice::HugePage } else { Advice::NoHugePage };
        match self.mapped.advise(part, advice) {
            // A kernel without transparent huge pages has nothing to advise on.
            Err((_, Errno(libc::EINVAL))) if !huge => Ok(()),
            other => other,
        }
    }

    /// Replaces a part by a new mapping, for huge pages. Parts of a huge page that have moved as
    /// base pages leave a page table behind, and the kernel gives a huge page only where no page
    /// table is.
    /// Before Linux 6.14, `MADV_DONTNEED` does not remove it.
    fn renew(&self, part: Range<usize>) -> Result<(), (Call, Errno)> {
        // SAFETY: nobody uses this part, because pages that leaps have taken lie elsewhere now.
        unsafe { self.mapped.renew(part.clone()) }?;
        self.prepare(part, true)
    }

    fn start(&self) -> usize {
        self.mapped.start()
    }

    /// Fills the holes of a part, in bytes from the start. The caller has checked that the node has
    /// room: without room the kernel would kill a process (OOM).
    fn populate(&self, part: Range<usize>) -> Result<(), (Call, Errno)> {
        self.mapped.advise(part, Advice::PopulateWrite)
    }
}

/// Populated memory of a node, for leaps of memory that pageleap does not own.
///
/// A leap copies into memory that is populated already. Populating 4 KB pages takes as long as five
/// copies, and a reserve spends this time before the leap. Without a reserve a job populates memory
/// piece by piece, as it needs it.
///
/// ```no_run
/// # fn main() -> Result<(), pageleap::Error> {
/// use pageleap::{MemoryMigration, NodeId, PageSize, Reserve};
/// let reserve = std::sync::Arc::new(Reserve::new(NodeId(1), 1 << 30, PageSize::Base)?);
/// # let (address, len) = (std::ptr::null_mut(), 0);
/// // SAFETY: nobody frees, unmaps, remaps, protects or advises on the memory meanwhile.
/// let migration = unsafe { MemoryMigration::new().range(address, len, NodeId(1)) };
/// let report = migration.reserve(&reserve).start()?.wait();
/// reserve.refill()?;
/// # Ok(()) }
/// ```
///
/// The memory that a leap takes becomes the program's. [`Reserve::refill`] populates as much anew.
#[derive(Debug)]
pub struct Reserve {
    frames: Frames,
    page: PageSize,
    len: usize,
    state: Mutex<Taken>,
}

/// How much of a reserve leaps have taken.
#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    /// Jobs that use the reserve.
    jobs: usize,
}

impl Reserve {
    /// Takes `bytes` bytes of a node, rounded up to 2 MB, in base pages or in transparent huge
    /// pages. Where the machine has no huge page to give, that part of the reserve is of no use.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: `bytes` is zero, or the pages are hugetlb pages.
    /// [`Error::UnknownNode`]: there is no such node. [`Error::OutOfMemory`]: a limit of the node,
    /// the machine or a cgroup leaves less. [`Error::Call`]: a limit of the process leaves less, or
    /// the cpuset does not allow the node.
    pub fn new(node: NodeId, bytes: usize, page: PageSize) -> Result<Reserve, Error> {
        if bytes == 0 || page.is_hugetlb() {
            return Err(Error::BadArgument {
                what: "reserve",
                reason: format!("it is to have {bytes} bytes in pages of {page}"),
                remedy: "take at least one byte, in pages of 4k or thp".into(),
            });
        }
        Topology::read()?.node(node)?;
        let len = bytes.next_multiple_of(HUGE);
        let room = Room::now(node)?;
        if room.free_bytes() < len as u64 {
            return Err(room.too_small_for(len as u64));
        }
        let frames = Frames::new(len, node, page == PageSize::Thp)
            .map_err(|(call, errno)| Error::call(call, 0, len, errno))?;
        let reserve = Reserve { frames, page, len, state: Mutex::default() };
        reserve.populate(0..len)?;
        Ok(reserve)
    }

    /// Populates as much memory again as leaps have taken.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: a job uses the reserve. [`Error::OutOfMemory`] and [`Error::Call`]
    /// as for [`Reserve::new`].
    pub fn refill(&self) -> Result<(), Error> {
        let mut taken = lock(&self.state);
        if !self.frames.mapped.is_here() {
            return Err(Error::BadArgument {
                what: "reserve",
                reason: "it is the parent's".into(),
                remedy: "make another one in this process".into(),
            });
        }
        if taken.jobs > 0 {
            return Err(Error::BadArgument {
                what: "reserve",
                reason: format!("{} jobs use it", taken.jobs),
                remedy: "wait until they have ended".into(),
            });
        }
        if self.page == PageSize::Thp && taken.bytes > 0 {
            // If parts of a huge page have moved, the rest keeps a new huge page from being given
            // there.
            let refused =
                |(call, errno)| Error::call(call, self.frames.start(), taken.bytes, errno);
            self.frames.renew(0..taken.bytes).map_err(refused)?;
        }
        self.populate(0..taken.bytes)?;
        taken.bytes = 0;
        Ok(())
    }

    fn populate(&self, part: Range<usize>) -> Result<(), Error> {
        let unseen = Unseen::of(&Linux, self.node())?;
        for start in part.clone().step_by(PIECE) {
            let piece = start..(start + PIECE).min(part.end);
            let room = Room::now(self.node())?;
            if room.free_bytes() < piece.len() as u64 {
                return Err(room.too_small_for((part.end - start) as u64));
            }
            let populate = || {
                self.frames.populate(piece.clone()).map_err(|(call, errno)| {
                    Error::call(call, self.frames.start() + piece.start, piece.len(), errno)
                })
            };
            match &unseen {
                Some(unseen) => unseen.step(piece.len() as u64, populate)?,
                None => populate()?,
            }
        }
        Ok(())
    }

    /// The node of the memory.
    pub fn node(&self) -> NodeId {
        self.frames.node
    }

    /// The size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.page
    }

    /// Bytes that leaps can still take.
    pub fn free_bytes(&self) -> usize {
        self.len - lock(&self.state).bytes
    }

    /// Hands out memory. It begins at a multiple of the page size.
    fn take(&self, bytes: usize) -> Option<usize> {
        let mut taken = lock(&self.state);
        let at = taken.bytes;
        let end = at.checked_add(bytes).filter(|end| *end <= self.len)?;
        taken.bytes = end;
        Some(self.frames.start() + at)
    }
}

/// A reserve that a job uses.
pub(super) struct InUse(Arc<Reserve>);

impl InUse {
    pub(super) fn new(reserve: &Arc<Reserve>) -> InUse {
        lock(&reserve.state).jobs += 1;
        InUse(reserve.clone())
    }

    /// Memory of this node in pages of this size, or `None` if the reserve has none.
    fn take(&self, node: NodeId, huge: bool, bytes: usize) -> Option<usize> {
        let is_here = self.0.frames.mapped.is_here();
        let fits = is_here && self.0.node() == node && (self.0.page == PageSize::Thp) == huge;
        fits.then(|| self.0.take(bytes)).flatten()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        lock(&self.0.state).jobs -= 1;
    }
}

/// The staging memory of a job.
pub(super) struct Stage {
    /// The parking places of base pages. They are registered in windows only. The chosen one is
    /// empty; others may contain pages that windows have left.
    parking: Vec<Mapped>,
    /// The parking place of the next window.
    chosen: usize,
    /// The parking place of huge pages. UFFDIO_MOVE moves a huge page as a whole only to a place
    /// that no page table covers.
    parking_of_huge: Mapped,
    /// Memory for copies that no reserve has memory for, by node and by whether it is of huge
    /// pages.
    frames: BTreeMap<(NodeId, bool), Frames>,
    /// Bytes of each mapping: the largest area, and the part of a huge page before it.
    len: usize,
    reserves: Vec<InUse>,
    /// Whether all mappings are locked (mlock), as the ranges of the last window were.
    locked: bool,
    /// Bytes by node that may be populated before the limits are read again.
    credit: BTreeMap<NodeId, u64>,
}

/// Why there is no place for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// The node, the machine or a cgroup leaves no room, or there is no huge page.
    NoRoom,
    Refused(Call, Errno),
}

impl Stage {
    /// `most`: the most bytes of a window. `places`: the number of parking places.
    pub(super) fn new(
        most: usize,
        places: usize,
        reserves: Vec<InUse>,
    ) -> Result<Stage, (Call, Errno)> {
        let len = most + HUGE;
        let parking = (0..places).map(|_| Mapped::new(len, HUGE)).collect::<Result<_, _>>()?;
        Ok(Stage {
            parking,
            chosen: 0,
            parking_of_huge: Mapped::new(len, HUGE)?,
            frames: BTreeMap::new(),
            len,
            reserves,
            locked: false,
            credit: BTreeMap::new(),
        })
    }

    /// Where the parking place of huge pages, or of base pages, begins.
    pub(super) fn parking(&self, huge: bool) -> usize {
        self.open_places()[usize::from(huge)].start()
    }

    /// The parking places of a window: for base pages, and for huge pages.
    fn open_places(&self) -> [&Mapped; 2] {
        [&self.parking[self.chosen], &self.parking_of_huge]
    }

    /// Chooses an empty parking place for the next window.
    pub(super) fn choose_parking(&mut self, vacated: &Vacated) {
        let (chosen, left) = vacated.place();
        // SAFETY: pages that a window has left are the library's own, and not registered.
        left.inspect(|left| unsafe { left.give_back() });
        self.chosen = chosen;
    }

    /// Locks or unlocks all mappings: UFFDIO_MOVE moves pages only between mappings that are both
    /// locked or both not.
    pub(super) fn set_locked(&mut self, locked: bool) -> Result<(), (Call, Errno)> {
        if self.locked == locked {
            return Ok(());
        }
        let places = || {
            let places = self.parking.iter().chain([&self.parking_of_huge]);
            places.chain(self.frames.values().map(|frames| &frames.mapped))
        };
        if let Err(refused) = places().try_for_each(|part| lock_mapping(part, locked)) {
            // Some are changed already. Change them back, so that all are alike.
            for part in places() {
                let _ = lock_mapping(part, self.locked);
            }
            return Err(refused);
        }
        self.locked = locked;
        Ok(())
    }

    /// Finds memory for the copy of a run, and populates it. `origin`: the address that corresponds
    /// to the start of the staging memory.
    pub(super) fn place(
        &mut self,
        run: &Run,
        origin: usize,
        node: NodeId,
        pagemap: &Pagemap,
    ) -> Result<usize, NoPlace> {
        // Where the machine had no huge page left, a reserve of huge pages consists of base pages.
        let fits = |at: &usize| !run.huge || pagemap.is_huge(*at..*at + run.len);
        let taken = |reserve: &InUse| reserve.take(node, run.huge, run.len).filter(fits);
        if let Some(at) = self.reserves.iter().filter(|_| !self.locked).find_map(taken) {
            return Ok(at);
        }
        let refused = |(call, errno)| NoPlace::Refused(call, errno);
        if let Entry::Vacant(vacant) = self.frames.entry((node, run.huge)) {
            let frames = Frames::new(self.len, node, run.huge).map_err(refused)?;
            if self.locked {
                lock_mapping(&frames.mapped, true).map_err(refused)?;
            }
            vacant.insert(frames);
        }
        let credit = self.credit.entry(node).or_default();
        if *credit < run.len as u64 {
            let found = Room::now(node);
            let room = found.as_ref().map_or(0, Room::free_bytes).min(PIECE as u64);
            let hides = found.is_ok_and(|room| room.hidden().is_some());
            if room < run.len as u64 || hides && !unseen::fits(&Linux, room as usize) {
                return Err(NoPlace::NoRoom);
            }
            *credit = room;
        }
        *credit -= run.len as u64;
        let frames = &self.frames[&(node, run.huge)];
        let part = run.at - origin..run.at - origin + run.len;
        let at = frames.start() + part.start;
        let filled = match frames.populate(part.clone()) {
            // Parts of a huge page have moved away, and base pages fill the holes.
            Ok(()) if run.huge && !pagemap.is_huge(at..at + run.len) => {
                frames.renew(part.clone()).map_err(refused)?;
                if self.locked {
                    lock_part(&frames.mapped, part.clone(), true).map_err(refused)?;
                }
                frames.populate(part)
            }
            other => other,
        };
        match filled {
            Ok(()) if run.huge && !pagemap.is_huge(at..at + run.len) => Err(NoPlace::NoRoom),
            Ok(()) => Ok(at),
            Err((_, Errno(libc::ENOMEM | libc::EFAULT))) => Err(NoPlace::NoRoom),
            Err(other) => Err(refused(other)),
        }
    }

    /// Registers the parking places of the next window, so that pages can move there. `kinds`:
    /// whether the window has base pages, and huge pages.
    pub(super) fn open_parking(
        &self,
        uffd: BorrowedFd<'_>,
        kinds: [bool; 2],
    ) -> Result<(), (Call, Errno)> {
        self.places_of(kinds).try_for_each(|place| {
            // SAFETY: nobody else knows the parking places.
            unsafe { sys::uffd_register(uffd, place.start(), place.len(), uffd_mode::MISSING) }
                .map(drop)
                .map_err(|errno| (Call::Track, errno))
        })
    }

    fn places_of(&self, kinds: [bool; 2]) -> impl Iterator<Item = &Mapped> {
        self.open_places().into_iter().zip(kinds).filter(|(_, is)| *is).map(|(place, _)| place)
    }

    /// Ends the registration of the parking places, then gives back the pages in `part` of them. In
    /// a registered range the call would wait until the attendant has read its message. Base pages
    /// are left to the watcher.
    pub(super) fn give_back(
        &mut self,
        uffd: BorrowedFd<'_>,
        part: Range<usize>,
        kinds @ [base, huge]: [bool; 2],
        vacated: &Vacated,
    ) {
        for place in self.places_of(kinds) {
            let _ = sys::uffd_unregister(uffd, place.start(), place.len());
        }
        if base {
            let start = self.parking(false);
            let pages = start + part.start..start + part.end;
            vacated.leave(Left { place: self.chosen, pages });
        }
        // Huge pages may have arrived in parts, which leaves page tables behind.
        if huge {
            // If a call is refused here, the next window is refused as well.
            let place = &self.parking_of_huge;
            // SAFETY: nobody needs the parked pages: they or their copies are in the range.
            let _ = unsafe { place.renew(0..place.len()) }.and_then(|()| match self.locked {
                true => lock_mapping(place, true),
                false => Ok(()),
            });
        }
    }
}

/// Locks a mapping without making pages present, or unlocks it.
fn lock_mapping(mapped: &Mapped, locked: bool) -> Result<(), (Call, Errno)> {
    lock_part(mapped, 0..mapped.len(), locked)
}

/// The same for a part, in bytes from the start.
fn lock_part(mapped: &Mapped, part: Range<usize>, locked: bool) -> Result<(), (Call, Errno)> {
    let start = mapped.start() + part.start;
    // SAFETY: the mapping is the library's own.
    let done = unsafe {
        match locked {
            true => sys::lock(start, part.len(), true),
            false => sys::unlock(start, part.len()),
        }
    };
    done.map_err(|errno| (Call::Lock, errno))
}
