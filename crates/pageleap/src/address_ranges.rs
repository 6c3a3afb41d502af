//! The address ranges of this process that belong to pools and to regions.
//!
//! The fault handler asks whether a faulting address lies in a region. [`reserve_aligned`] asks
//! whether the kernel has given it a hole in memory that the library owns already. A signal handler
//! reads the lists, so reading takes no lock and allocates nothing. A model's addresses are in no
//! list, because they mean nothing in this process.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::backend::{Backend, Call, Errno};
use crate::error::Error;
use crate::units::{BASE_PAGE, PageSize};

/// The address ranges of all regions.
pub(crate) static REGIONS: AddressRanges = AddressRanges::new();

/// The address ranges of all aliases, in which pools map their frames.
pub(crate) static ALIASES: AddressRanges = AddressRanges::new();

/// Whether `[addr, addr + len)` overlaps a region or an alias of this process.
fn is_of_pool_or_region(addr: usize, len: usize) -> bool {
    ALIASES.overlaps(addr, len) || REGIONS.overlaps(addr, len)
}

/// Reserves address space, aligned to 1 GB if it is that large, else to 2 MB: whole page-table
/// pages can move between two such ranges.
pub(crate) fn reserve_aligned(backend: &dyn Backend, bytes: usize) -> Result<usize, Error> {
    reserve_by(backend, bytes, |align| backend.reserve(bytes, align))
}

/// Reserves address space for a region of `page` pages. Regions of hugetlb pages lie at low
/// addresses: their mappings cannot be duplicated, so their attributes are read in smaps, for which
/// the kernel visits all pages at lower addresses.
pub(crate) fn reserve_for_region(
    backend: &dyn Backend,
    bytes: usize,
    page: PageSize,
) -> Result<usize, Error> {
    if !page.is_hugetlb() {
        return reserve_aligned(backend, bytes);
    }
    reserve_by(backend, bytes, |align| backend.reserve_low(bytes, align))
}

fn reserve_by(
    backend: &dyn Backend,
    bytes: usize,
    reserve: impl Fn(usize) -> Result<usize, Errno>,
) -> Result<usize, Error> {
    const ALIGN_SMALL: usize = 2 << 20;
    const ALIGN_LARGE: usize = 1 << 30;
    let host = backend.is_host_memory();
    if host {
        check_base_page()?;
    }
    let align = if bytes >= ALIGN_LARGE { ALIGN_LARGE } else { ALIGN_SMALL };
    let mut holes = Vec::new();
    let reserved = loop {
        match reserve(align) {
            // This is a hole that a failed call has left in a pool or a region. The repair of the
            // hole could not tell whose mapping lies there.
            Ok(addr) if host && is_of_pool_or_region(addr, bytes) => holes.push(addr),
            other => break other,
        }
    };
    for addr in holes {
        // SAFETY: just reserved, and no other code knows the address.
        let _ = unsafe { backend.release(addr, bytes) };
    }
    reserved.map_err(|errno| Error::call(Call::Reserve, 0, bytes, errno))
}

/// Refuses a kernel with base pages of another size.
fn check_base_page() -> Result<(), Error> {
    // SAFETY: reads a constant of the system.
    let base = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if base == BASE_PAGE as libc::c_long {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!(
            "the base pages of this kernel have {base} bytes, and pageleap supports {BASE_PAGE} only"
        ),
        remedy: "use a kernel with 4 KB pages",
    })
}

/// A range that is in a list until this is dropped. Drop it before the addresses are released,
/// because another thread may get them then. A model's range is in no list.
pub(crate) struct Listed {
    list: Option<&'static AddressRanges>,
    start: usize,
    /// A child made by `fork` has the list, but not the memory.
    process: u32,
}

impl Listed {
    /// Adds a range of a backend to a list.
    pub(crate) fn new(
        list: &'static AddressRanges,
        backend: &dyn Backend,
        start: usize,
        len: usize,
    ) -> Self {
        Listed::view(list, backend, start, len, start)
    }

    /// Adds a range that maps the same memory as the range at `home`.
    pub(crate) fn view(
        list: &'static AddressRanges,
        backend: &dyn Backend,
        start: usize,
        len: usize,
        home: usize,
    ) -> Self {
        let list = backend.is_host_memory().then_some(list);
        if let Some(list) = list {
            list.add(start, len, home);
        }
        Listed { list, start, process: std::process::id() }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(list) = self.list
            && self.process == std::process::id()
        {
            list.remove(self.start);
        }
    }
}

/// Entries of a block.
const BLOCK: usize = 256;

struct Block {
    start: [AtomicUsize; BLOCK],
    /// 0 marks a free entry. Written last by `add`, first by `remove`.
    end: [AtomicUsize; BLOCK],
    /// The process that added the entry: a child made by `fork` has the list, but not the memory.
    process: [AtomicU32; BLOCK],
    /// The first address of the region, if the range is a view of it; else the range's own.
    home: [AtomicUsize; BLOCK],
    /// Counts the changes of the entry, before and after each: it is odd while one is under way.
    changes: [AtomicUsize; BLOCK],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Block {
            start: [const { AtomicUsize::new(0) }; BLOCK],
            end: [const { AtomicUsize::new(0) }; BLOCK],
            process: [const { AtomicU32::new(0) }; BLOCK],
            home: [const { AtomicUsize::new(0) }; BLOCK],
            changes: [const { AtomicUsize::new(0) }; BLOCK],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Makes the count of an entry odd. A reader that sees a value stored later sees that, too.
    /// Returns the count after the change. The number may be odd already in a child, whose parent
    /// was at a change.
    fn begin_change(&self, i: usize) -> usize {
        let odd = (self.changes[i].load(Ordering::Relaxed) + 1) | 1;
        self.changes[i].store(odd, Ordering::Relaxed);
        odd + 1
    }

    fn set(&self, i: usize, start: usize, len: usize, home: usize) {
        let changed = self.begin_change(i);
        self.start[i].store(start, Ordering::Release);
        self.home[i].store(home, Ordering::Release);
        self.process[i].store(std::process::id(), Ordering::Release);
        self.end[i].store(start + len, Ordering::Release);
        self.changes[i].store(changed, Ordering::Release);
    }
}

/// A list of address ranges that a signal handler can read. It grows by blocks that are never
/// freed.
pub(crate) struct AddressRanges {
    first: Block,
    changes: Mutex<()>,
}

impl AddressRanges {
    const fn new() -> Self {
        AddressRanges { first: Block::new(), changes: Mutex::new(()) }
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        std::iter::successors(Some(&self.first), |block| {
            let next = block.next.load(Ordering::Acquire);
            // SAFETY: null, or a block leaked by `add` and published with release order.
            unsafe { next.as_ref() }
        })
    }

    /// Adds a range of this process.
    fn add(&self, start: usize, len: usize, home: usize) {
        let _changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last = &self.first;
        for block in self.blocks() {
            last = block;
            if let Some(i) = block.end.iter().position(|end| end.load(Ordering::Relaxed) == 0) {
                block.set(i, start, len, home);
                return;
            }
        }
        let block = Block::new();
        block.set(0, start, len, home);
        last.next.store(Box::leak(Box::new(block)), Ordering::Release);
    }

    /// Removes the range that this process has added at `start`.
    fn remove(&self, start: usize) {
        let _changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        let is_it = |block: &Block, i: usize| {
            let [first, end] = [&block.start, &block.end].map(|all| all[i].load(Ordering::Relaxed));
            first == start && end != 0 && block.process[i].load(Ordering::Relaxed) == process
        };
        let mut entries = self.blocks().flat_map(|block| (0..BLOCK).map(move |i| (block, i)));
        if let Some((block, i)) = entries.find(|(block, i)| is_it(block, *i)) {
            let changed = block.begin_change(i);
            block.end[i].store(0, Ordering::Release);
            block.changes[i].store(changed, Ordering::Release);
        }
    }

    /// The address in a region that maps the same byte as `addr`, which may lie in the region or in
    /// a view of it; `None` if `addr` lies in none of the ranges. Async-signal-safe. The answer is
    /// right for a range that is in the list during the whole call.
    pub(crate) fn home_of(&self, addr: usize) -> Option<usize> {
        let process = std::process::id();
        let mut of_parent = None;
        for (block, i) in self.overlapping(addr, 1) {
            let before = block.changes[i].load(Ordering::Acquire);
            let [start, end, home] =
                [&block.start, &block.end, &block.home].map(|all| all[i].load(Ordering::Acquire));
            let is_own = block.process[i].load(Ordering::Acquire) == process;
            let is_in = start <= addr && addr < end;
            // An entry that another thread is changing was not in the list during the whole call.
            if !is_in || before % 2 == 1 || block.changes[i].load(Ordering::Relaxed) != before {
                continue;
            }
            let home = home.wrapping_add(addr - start);
            if is_own {
                return Some(home);
            }
            // A child made by `fork` may have memory of its own there.
            of_parent = Some(home);
        }
        of_parent
    }

    /// Whether `[addr, addr + len)` overlaps a range of this process.
    fn overlaps(&self, addr: usize, len: usize) -> bool {
        let process = std::process::id();
        self.overlapping(addr, len)
            .any(|(block, i)| block.process[i].load(Ordering::Relaxed) == process)
    }

    /// The entries that `[addr, addr + len)` overlaps.
    fn overlapping(&self, addr: usize, len: usize) -> impl Iterator<Item = (&Block, usize)> {
        let meets = move |block: &Block, i: usize| {
            let end = block.end[i].load(Ordering::Acquire);
            addr < end && block.start[i].load(Ordering::Relaxed) < addr.saturating_add(len)
        };
        let of = move |block| (0..BLOCK).filter(move |i| meets(block, *i)).map(move |i| (block, i));
        self.blocks().flat_map(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(any(loom, shuttle, miri)))]
    fn regions_of_hugetlb_pages_come_before_the_program() {
        use crate::backend::Linux;
        let program = reserve_for_region as *const () as usize;
        for (page, is_low) in [(PageSize::Huge2M, true), (PageSize::Base, false)] {
            let at = reserve_for_region(&Linux, 2 << 20, page).unwrap();
            assert_eq!(at < program, is_low, "{page:?}: {at:#x}");
            // SAFETY: reserved above, and used by nobody.
            unsafe { Linux.release(at, 2 << 20) }.unwrap();
        }
    }

    #[test]
    fn region_ranges_are_found_until_removed_beyond_one_block() {
        static RANGES: AddressRanges = AddressRanges::new();
        let ranges = &RANGES;
        let contains = |addr| ranges.home_of(addr) == Some(addr);
        let home = |addr| ranges.home_of(addr);
        for i in 1..=3 * BLOCK {
            ranges.add(i * 0x10000, 0x1000, i * 0x10000);
        }
        assert!(contains(0x10000) && contains(3 * BLOCK * 0x10000 + 0xfff));
        assert!(!contains(0x10000 - 1) && !contains(0x11000));
        ranges.remove(2 * BLOCK * 0x10000);
        assert!(!contains(2 * BLOCK * 0x10000));
        ranges.add(0x5000_0000, 0x1000, 0x5000_0000);
        assert!(contains(0x5000_0fff), "a freed entry is used again");
        assert_eq!(ranges.blocks().count(), 3);
        assert!(ranges.overlaps(0x5000_0fff, 0x10000) && ranges.overlaps(0x4fff_f000, 0x1001));
        assert!(!ranges.overlaps(0x4fff_f000, 0x1000) && !ranges.overlaps(0x5000_1000, usize::MAX));
        // An entry as a forked child has it from its parent.
        let (block, i) = ranges.overlapping(0x5000_0000, 1).next().unwrap();
        block.process[i].store(0, Ordering::Relaxed);
        assert!(!ranges.overlaps(0x5000_0000, 1) && contains(0x5000_0000));
        ranges.remove(0x5000_0000);
        assert!(contains(0x5000_0000), "another process' entry was removed");
        ranges.add(0x7000_0000, 0x1000, 0x6000_0000);
        assert_eq!((home(0x7000_0123), home(0x7000_1000)), (Some(0x6000_0123), None));
    }
}
