//! The one boundary to the operating system's memory: every call that changes a mapping goes
//! through [`Backend`].
//!
//! Three things live behind it: [`Linux`], which makes the system calls; [`Model`], a deterministic
//! address space in ordinary memory, small enough for a model checker; and [`FailAt`], which wraps
//! either and makes the Nth call fail before its side effect, after it, or in the middle of it.
//!
//! **Invariant:** no other module issues memory-mapping calls. **Invariant:** a method either does
//! what it says, or returns the error number; what can be true after an error is in the failure
//! table of `docs/protocol.md`.

#[cfg(not(loom))]
mod attribute_probe;
mod fail_at;
mod interpose;
#[cfg(not(loom))]
mod linux;
mod model;
#[cfg(not(loom))]
mod tracker;
#[cfg(not(loom))]
pub(crate) mod uffd;

use std::ops::Range;

pub use fail_at::{FailAt, FailMode};
pub use interpose::{Interposer, Part, Request};
#[cfg(not(loom))]
pub use linux::Linux;
pub use model::{Model, ModelFault};
pub use pageleap_sys::{Advice, Errno, PageRegion, Policy, page_is};

use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::PageSize;
pub use crate::units::{Call, Prot};

/// A memory file that a backend has created. Closed by [`Backend::close_file`], exactly once, by
/// the pool that owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryFile(pub(crate) i32);

/// What a tracker can do. The kernel's own accesses are included always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ability {
    /// It notes writes, and holds up whoever touches pages that have been taken away. Takes a
    /// privilege or `/dev/userfaultfd`.
    NoteAndHold,
    /// It notes writes, and holds up nobody. Takes neither.
    Note,
    /// It holds up whoever writes to a page that is marked clean, until [`Backend::let_write`] or
    /// [`Backend::wake`], and notes nothing. Takes the same as the first, and is had from older
    /// kernels.
    HoldWriters,
}

/// What follows writes to pages, for one worker. Closed by [`Backend::close_tracker`], exactly
/// once, by the job that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracker {
    /// The userfaultfd.
    pub(crate) faults: i32,
    /// The process' pagemap; none (-1) if it notes nothing.
    pub(crate) pagemap: i32,
    /// An eventfd that ends [`Backend::serve_tracker`].
    pub(crate) end: i32,
}

/// A fixed mapping of part of a memory file.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Where.
    pub addr: usize,
    /// How many bytes; a multiple of the file's page size, as are `addr` and `offset`.
    pub len: usize,
    /// Of which file.
    pub file: MemoryFile,
    /// From which byte of it on.
    pub offset: u64,
    /// With which access.
    pub prot: Prot,
    /// Whether page tables are filled before the call returns.
    pub populate: bool,
}

/// The operating system's memory, as the engines see it. Addresses and lengths are bytes, aligned
/// to the page size of the range.
///
/// All methods may be called from several threads at a time. [`Backend::protect`] and
/// [`Backend::populate`] are also called from a signal handler, so they neither allocate nor lock.
///
/// # Safety
/// An implementation that says [`Backend::is_host_memory`] does to this process' memory what its
/// methods say, and hands out address space that nobody else has. Others keep their addresses to
/// themselves.
///
/// # Safety of the `unsafe` methods
/// They replace or forbid access to memory. The caller owns the ranges it names: it reserved them
/// here, no Rust reference to them assumes what the call is about to change, and threads that
/// access them are prepared for the outcome that the method states.
#[allow(clippy::missing_safety_doc)] // stated once, above, for all methods
pub unsafe trait Backend: Send + Sync {
    /// Whether addresses of this backend are addresses of this process, so that pointers to them
    /// may be handed out.
    fn is_host_memory(&self) -> bool;

    /// Creates a memory file of `bytes` bytes that no child inherits and nobody can resize.
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno>;
    /// Closes it, for the pool that owns it, which uses it no more. Mappings stay.
    unsafe fn close_file(&self, file: MemoryFile);
    /// Reserves address space without access.
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno>;
    /// Returns address space; what was mapped there is unmapped.
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Unmaps, but keeps the address space.
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Maps part of a file in place of what is there. On failure the range may be a hole.
    unsafe fn map(&self, mapping: &Mapping) -> Result<(), Errno>;
    /// The same, where an earlier call may have failed and left a hole: what another thread has
    /// mapped into such a hole meanwhile is not replaced, and EEXIST returned, which no other call
    /// here returns. Allocates nothing.
    unsafe fn map_own(&self, mapping: &Mapping) -> Result<(), Errno>;
    /// Whether every page of a range is mapped, whatever its access. Allocates nothing.
    fn is_mapped(&self, addr: usize, len: usize) -> bool;
    /// Moves the page tables of `[from, from + len)` to `[to, to + len)`, in place of what is
    /// there. `from` stays mapped with empty page tables. On failure `to` may be a hole. EINVAL,
    /// without side effect, where the kernel or the page size does not allow it.
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno>;
    /// Changes access. When it returns, no CPU holds a translation that allows more.
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno>;
    /// Gives advice that changes no contents.
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno>;
    /// Fills page tables for writing (or reading); fails where the mapping does not allow it,
    /// without raising a signal.
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno>;
    /// Makes huge pages of 2 MB of the pages of a shared mapping, at least one of which is present
    /// in each 2 MB.
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Sets from which node the page tables preferably come that calls of this thread allocate;
    /// `None`: from where it runs.
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno>;
    /// Whether the cpuset of the calling thread lets it have memory of a node. A set that cannot be
    /// read allows everything.
    fn allows_node(&self, node: u32) -> bool;
    /// Locks into memory.
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno>;
    /// Unlocks.
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Sets where new frames come from.
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno>;
    /// The attributes of address ranges, which come in ascending order, as they are now; parts that
    /// are not mapped are left out. What lies between the ranges is neither looked at nor relied
    /// on: others may be changing it.
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error>;
    /// Asks the kernel for the node of each address; negative numbers are negated error numbers.
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno>;
    /// Opens a tracker, if the kernel allows one that can do this.
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)>;
    /// Closes it, for the job that opened it, which uses it no more. What it still follows it
    /// follows no longer, and nobody waits for that.
    unsafe fn close_tracker(&self, tracker: Tracker);
    /// Does what exchanges of pages that are followed wait for, and tells the address for which
    /// somebody waits who wants to write ([`Ability::HoldWriters`]), until [`Backend::end_tracker`]
    /// is called. Allocates nothing.
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize));
    /// Has [`Backend::serve_tracker`] return.
    fn end_tracker(&self, tracker: Tracker);
    /// Follows the writes to a mapped range: each page counts as written until
    /// [`Backend::mark_clean`]. With `hold`, whoever touches a page that has no page table entry
    /// waits until [`Backend::wake`], user code and kernel alike; an exchange leaves such pages
    /// behind. May be called again to change that.
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno>;
    /// Follows them no longer. Whoever waits goes on waiting.
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// Has all pages of a range count as clean until they are written to. When it returns, no CPU
    /// can write without that being seen. Huge pages are followed as such, or, with `split`, by
    /// base pages.
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno>;
    /// Has pages of a range count as written, and everybody go on who waits to write to them
    /// ([`Ability::HoldWriters`]). Allocates nothing.
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// Finds the pages of a range of which the kernel does not know by their page table entries
    /// that they are clean, in ascending order, neighbours of one kind together, until `found` is
    /// full, and what they are ([`page_is`]); returns how many entries that makes, and up to which
    /// address it has looked. A page that is `SWAPPED` and not `WRITTEN` has no entry, but is known
    /// to be clean. With `mark_clean`, those that it calls written count as clean from the same
    /// moment.
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno>;
    /// Has everybody go on who waits for a page of a range; they repeat their access.
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno>;
    /// Copies frames from their file to `dst`, which nobody else accesses.
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno>;
    /// Puts the calling thread before others while they wait for it, if it may, or back; says
    /// whether it worked. Not a mapping call.
    fn hurry(&self, on: bool) -> bool;
    /// Copies bytes that other threads may be writing; the result may be torn. Not a mapping call:
    /// it cannot fail.
    unsafe fn copy(&self, dst: usize, src: usize, len: usize);
    /// Zeroes bytes that nobody else accesses. Not a mapping call: it cannot fail.
    unsafe fn zero(&self, addr: usize, len: usize);
}
