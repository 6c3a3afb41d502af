//! The one boundary to the operating system's memory: every call that changes a mapping goes
//! through [`Backend`].
//!
//! Two backends exist: [`Linux`] makes the system calls, and [`Model`] is a deterministic address
//! space in ordinary memory, small enough for a model checker. An [`Interposer`] wraps a backend
//! and decides about each call; [`FailAt`] is one that makes the Nth call fail, before its side
//! effect, after it, or half-way.
//!
//! A new operation is written in four places: the trait, `linux`, `model`, and `interpose`, which
//! forwards it for all wrappers. If it can fail, it has a line in [`Call`]'s list as well.
//!
//! **Invariant:** no other module issues memory-mapping calls. **Invariant:** a method either has
//! the effect that is documented here, or returns the error number. The failure table of
//! `docs/protocol.md` lists the states that are possible after an error.

#[cfg(not(loom))]
mod attribute_probe;
pub(crate) mod attributes;
#[cfg(feature = "testing")]
mod fail_at;
#[cfg(feature = "testing")]
mod interpose;
#[cfg(not(loom))]
mod linux;
#[cfg(feature = "testing")]
mod model;
#[cfg(feature = "testing")]
mod model_state;
#[cfg(not(loom))]
mod tracker;
#[cfg(not(loom))]
pub(crate) mod uffd;

use std::ops::Range;

#[cfg(not(loom))]
pub(crate) use attribute_probe::MOST_DUPLICATES;
#[cfg(feature = "testing")]
pub use fail_at::{FailAt, FailMode};
#[cfg(feature = "testing")]
pub use interpose::{Interposer, Part, Request};
#[cfg(not(loom))]
pub use linux::Linux;
#[cfg(not(loom))]
pub(crate) use linux::host_memory;
#[cfg(feature = "testing")]
pub use model::{Model, ModelFault};
pub(crate) use pageleap_sys::Kept;
pub use pageleap_sys::{Advice, CopyLoop, CopyMethod, Errno, PageRegion, Policy, page_is};

use crate::error::Error;
use crate::observe::AttributeRun;
pub use crate::priority::Haste;
use crate::units::PageSize;
pub use crate::units::{Call, Prot};

/// A memory file that a backend has created. The pool that owns it closes it, exactly once, by
/// [`Backend::close_file`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryFile(pub(crate) Descriptor);

impl MemoryFile {
    /// The number of its descriptor, and whether that stands for another file now.
    pub(crate) fn state(self) -> (i32, bool) {
        match self.0 {
            Descriptor::Kernel(kept) => (kept.number(), !kept.is_ours() && kept.is_open()),
            #[cfg(feature = "testing")]
            Descriptor::Model(number) => (number, false),
        }
    }
}

/// A descriptor of a backend's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Descriptor {
    /// A number in the process' table of descriptors, and the file for which it stood at first.
    Kernel(Kept),
    /// A number of a model.
    #[cfg(feature = "testing")]
    Model(i32),
}

impl Descriptor {
    /// The kernel's descriptor; panics for a model's.
    pub(crate) fn kept(self) -> Kept {
        match self {
            Descriptor::Kernel(kept) => kept,
            #[cfg(feature = "testing")]
            Descriptor::Model(number) => unreachable!("descriptor {number} of a model"),
        }
    }

    /// The model's number; panics for a descriptor of the kernel.
    #[cfg(feature = "testing")]
    pub(crate) fn modelled(self) -> i32 {
        match self {
            Descriptor::Model(number) => number,
            Descriptor::Kernel(kept) => unreachable!("{kept:?} in a model"),
        }
    }
}

/// The abilities of a tracker (a userfaultfd). They act on accesses by user code and by the kernel
/// alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ability {
    /// It notes writes (asynchronous write-protection), and blocks threads that touch a page whose
    /// page table entry has been taken away (minor faults). Needs a privilege or
    /// `/dev/userfaultfd`.
    NoteAndHold,
    /// It notes writes, and blocks no thread. Needs no privilege.
    Note,
    /// It notes nothing, and blocks threads that touch a page whose page table entry has been taken
    /// away. An exchange ends the registration of the mapping that moves, and waits for no message.
    /// Needs the same privilege as `NoteAndHold`, but works since Linux 5.14.
    Hold,
    /// The same for hugetlb pages of 2 MB, whose page tables [`Advice::DropTables`] takes away,
    /// because they cannot be exchanged. Needs the same privilege, and Linux 5.18.
    HoldHugetlb,
    /// It notes nothing, and blocks threads that write to a page that is marked clean (synchronous
    /// write-protection), until `Backend::let_write` or `Backend::wake`. Needs the same privilege
    /// as `NoteAndHold`, but works on older kernels.
    HoldWriters,
}

impl Ability {
    /// Whether a tracker does nothing but block threads that touch a page without a page table
    /// entry.
    pub(crate) const fn only_holds(self) -> bool {
        matches!(self, Ability::Hold | Ability::HoldHugetlb)
    }
}

/// A userfaultfd with its companions, which follows writes or blocks threads for all workers of a
/// job. It is closed exactly once, by [`Backend::close_tracker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracker {
    /// The userfaultfd.
    pub(crate) faults: Descriptor,
    /// The pagemap of the process. A tracker that notes nothing has none.
    pub(crate) pagemap: Option<Kept>,
    /// An event that ends [`Backend::serve_tracker`]. A tracker that needs no service has none.
    pub(crate) end: Option<Kept>,
    /// The modes with which [`Backend::track`] registers a range: without `hold`, and with it.
    pub(crate) modes: [u64; 2],
}

impl Tracker {
    /// Whether the number of the userfaultfd still stands for this userfaultfd. Allocates nothing.
    pub(crate) fn has_faults(&self) -> bool {
        match self.faults {
            Descriptor::Kernel(faults) => faults.is_ours(),
            #[cfg(feature = "testing")]
            Descriptor::Model(_) => true,
        }
    }

    /// The number of the descriptor that has been closed, or of its userfaultfd, and whether the
    /// number stands for another file now.
    pub(crate) fn state(&self) -> (i32, bool) {
        #[cfg(feature = "testing")]
        if let Descriptor::Model(_) = self.faults {
            return (-1, false);
        }
        let faults = self.faults.kept();
        let all = [Some(faults), self.pagemap];
        let lost = all.into_iter().flatten().find(|kept| !kept.is_ours()).unwrap_or(faults);
        (lost.number(), !lost.is_ours() && lost.is_open())
    }
}

/// A fixed mapping of part of a memory file.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// The first address.
    pub addr: usize,
    /// Its length in bytes. Like `addr` and `offset`, a multiple of the file's page size.
    pub len: usize,
    /// The file.
    pub file: MemoryFile,
    /// The first byte of the file that is mapped.
    pub offset: u64,
    /// The access.
    pub prot: Prot,
    /// Whether the call fills the page tables before it returns.
    pub populate: bool,
}

/// The operating system's memory, as the engines see it. Addresses and lengths are in bytes,
/// aligned to the page size of the range.
///
/// Several threads may call the methods at a time. [`Backend::protect`] and [`Backend::populate`]
/// are also called from a signal handler, so they neither allocate nor lock.
///
/// # Safety
/// If [`Backend::is_host_memory`] returns `true`, the methods have their documented effects on the
/// memory of this process, and hand out address space that no other code has. Other backends hand
/// out addresses that mean nothing in this process.
///
/// # Safety of the `unsafe` methods
/// They replace or forbid access to memory. The caller owns the ranges it names: it reserved them
/// here, and no Rust reference to them relies on contents or access that the call changes. Threads
/// that access them are prepared for the outcome that the method states.
#[allow(clippy::missing_safety_doc)] // stated once, above, for all methods
pub unsafe trait Backend: Send + Sync {
    /// Whether the addresses of this backend are addresses of this process, so that the library may
    /// hand out pointers to them.
    fn is_host_memory(&self) -> bool;

    /// Creates a memory file of `bytes` bytes. No child inherits it, and it cannot be resized.
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno>;
    /// Closes a memory file, for the pool that owns it and no longer uses it. Mappings stay. A
    /// descriptor that no longer stands for the file ([`Backend::has_file`]) is left alone.
    unsafe fn close_file(&self, file: MemoryFile);
    /// Whether the descriptor of a memory file still stands for it. Other code of the process may
    /// have closed it, and then its number may stand for another file, which must not be mapped,
    /// read or closed. Allocates nothing.
    fn has_file(&self, file: MemoryFile) -> bool;
    /// Reserves address space without access.
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno>;
    /// Reserves address space low, where attributes can be read cheaply: see
    /// [`pageleap_sys::reserve_low`].
    fn reserve_low(&self, len: usize, align: usize) -> Result<usize, Errno> {
        self.reserve(len, align)
    }
    /// Unmaps a range and returns its address space.
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Unmaps a range, but keeps its address space.
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Maps part of a file, and replaces earlier mappings of the range. On failure it may be a
    /// hole.
    unsafe fn map(&self, mapping: &Mapping) -> Result<(), Errno>;
    /// Maps part of a file where an earlier call may have failed and left a hole. Memory that
    /// another thread has mapped into the hole meanwhile is not replaced: then the result is
    /// EEXIST, which only [`Backend::move_mapping`] also returns. Allocates nothing.
    unsafe fn map_own(&self, mapping: &Mapping) -> Result<(), Errno>;
    /// Whether every page of a range is mapped, whatever its access. Allocates nothing.
    fn is_mapped(&self, addr: usize, len: usize) -> bool;
    /// Whether a range maps the pages of a file from `offset` on, whatever its access and in however
    /// many mappings. The error says why that cannot be found out. Allocates nothing.
    fn maps(&self, addr: usize, len: usize, file: MemoryFile, offset: u64) -> Result<bool, Errno>;
    /// Moves the page tables of `[from, from + len)` to `[to, to + len)` (`mremap` with DONTUNMAP),
    /// and replaces any mapping there. `from` stays mapped, with empty page tables. On failure `to`
    /// may be a hole. EINVAL, without side effect, if the kernel or the page size does not allow
    /// it.
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno>;
    /// Moves the mapping of `[from, from + len)`, with its page tables, to `[to, to + len)`, where
    /// nothing is mapped; `from` is a hole then. If it fails, both are as they were. EEXIST: something
    /// is mapped at `to`. Allocates nothing.
    unsafe fn move_mapping(&self, from: usize, to: usize, len: usize) -> Result<(), Errno>;
    /// Changes access (`mprotect`). When it returns, no CPU holds a translation that allows more.
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno>;
    /// Gives advice that changes no contents. After [`Advice::DropTables`] no page of the range has
    /// a page table entry, and no CPU a translation.
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno>;
    /// Fills page tables, for writing if `write` is set, else for reading. Where the mapping does
    /// not allow that, it fails, and raises no signal.
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno>;
    /// Makes huge pages of 2 MB of the pages of a shared mapping. In each 2 MB at least one page
    /// has to be present.
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Sets the node from which the calling thread preferably allocates page tables. `None`: the
    /// node on which it runs.
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno>;
    /// Whether the cpuset of the calling thread allows memory of a node. A cpuset that cannot be
    /// read allows all nodes.
    fn allows_node(&self, node: u32) -> bool;
    /// The process that traces the calling thread (`ptrace(2)`), by its number; `None` if there is
    /// none, as far as can be seen. Not a mapping call.
    fn tracer(&self) -> Option<u32>;
    /// Locks pages into memory; with `on_fault`, only those that are present or become present.
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno>;
    /// Unlocks pages.
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Sets the nodes from which new frames of a range come.
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno>;
    /// The present attributes of address ranges, which are given in ascending order. Parts that are
    /// not mapped are left out. Memory between the ranges plays no part: other threads may be
    /// changing it.
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error>;
    /// Asks the kernel for the node of each page. A negative status is a negated error number.
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno>;
    /// Opens a tracker with that ability, if the kernel allows one.
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)>;
    /// Closes a tracker, for the job that opened it and no longer uses it. Ranges that it still
    /// follows are no longer followed, and the call does not wait for anything.
    unsafe fn close_tracker(&self, tracker: Tracker);
    /// Whether the descriptors of a tracker that attempts use still stand for it, as
    /// [`Backend::has_file`] tells of a file.
    fn has_tracker(&self, tracker: Tracker) -> bool;
    /// Reads a tracker's messages until [`Backend::end_tracker`] is called: an exchange of followed
    /// pages waits until its message has been read. With [`Ability::HoldWriters`] it calls `write`
    /// with the address of each waiting write. Allocates nothing.
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize));
    /// Makes [`Backend::serve_tracker`] return.
    fn end_tracker(&self, tracker: Tracker);
    /// Registers a mapped range, to follow the writes to it (UFFDIO_REGISTER). Each page counts as
    /// written until [`Backend::mark_clean`]. With `hold`, a thread that touches a page without a
    /// page table entry waits until [`Backend::wake`], in user code and in the kernel; an exchange
    /// leaves such pages behind. A second call changes `hold`. A tracker with [`Ability::Hold`] or
    /// [`Ability::HoldHugetlb`] always holds.
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno>;
    /// Stops following a range (UFFDIO_UNREGISTER). Threads that wait go on waiting.
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// Marks all pages of a range as clean, until they are written to, by write-protection. When it
    /// returns, no CPU can write unseen. Huge pages are followed as such or, with `split`, as base
    /// pages.
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno>;
    /// Marks pages of a range as written, and wakes threads that wait to write to them
    /// ([`Ability::HoldWriters`]). Allocates nothing.
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// Finds the pages of a range that are not known to be clean by their page table entries, and
    /// their categories ([`page_is`]), by PAGEMAP_SCAN. The entries of `found` are in ascending
    /// order, one for neighbours of one category, until `found` is full. Returns the number of
    /// entries, and the address up to which it has looked.
    ///
    /// A page that is `SWAPPED` and not `WRITTEN` has no page table entry, but is known to be
    /// clean. With `mark_clean`, pages that are reported as written count as clean from the same
    /// moment.
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno>;
    /// Wakes the threads that wait for a page of a range (UFFDIO_WAKE). They repeat their access.
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// How many threads have begun to wait for pages of a tracker's ranges since the last call
    /// ([`Ability::Hold`], [`Ability::HoldHugetlb`]); of many threads it counts only some. Waits
    /// for nothing, allocates nothing. Not a mapping call.
    fn count_waiting(&self, tracker: Tracker) -> u64;
    /// Copies frames from their file to `dst`, which no other thread accesses.
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno>;
    /// Raises the calling thread's priority while other threads wait for it, or puts it back.
    /// Returns whether that worked. Not a mapping call.
    fn hurry(&self, haste: Haste, on: bool) -> bool;
    /// Copies bytes that other threads may be writing, so that the copy may be torn. Not a mapping
    /// call: it cannot fail. `method` changes only how long it takes.
    unsafe fn copy(&self, dst: usize, src: usize, len: usize, method: CopyMethod);
    /// Zeroes bytes that nobody else accesses. Not a mapping call: it cannot fail.
    unsafe fn zero(&self, addr: usize, len: usize);
}
