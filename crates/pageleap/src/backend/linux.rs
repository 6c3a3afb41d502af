//! The backend of the real kernel: nearly every operation is one system call.

use std::ffi::CString;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use pageleap_sys as sys;

use super::{
    Ability, Advice, Backend, Call, CopyMethod, Descriptor, Errno, Haste, Kept, Mapping,
    MemoryFile, PageRegion, Policy, Prot, Tracker, tracker,
};
use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::PageSize;

/// The memory of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Linux;

/// The kernel, as all pools and regions share it.
pub(crate) fn host_memory() -> Arc<dyn Backend> {
    static HOST: OnceLock<Arc<Linux>> = OnceLock::new();
    HOST.get_or_init(|| Arc::new(Linux)).clone()
}

impl Linux {
    /// Borrows the descriptor of a memory file.
    fn borrow(file: MemoryFile) -> BorrowedFd<'static> {
        // SAFETY: a `MemoryFile` is a descriptor that `create_file` made and the owning pool closes
        // last, after the last use.
        unsafe { file.0.kept().borrow() }
    }
}

/// Calls `each` with each line of `/proc/self/maps` whose mapping overlaps `[start, start + len)`, and
/// with the addresses of the mapping. Allocates nothing, because the allocator may live in the range.
fn lines_of(
    start: usize,
    len: usize,
    mut each: impl FnMut(&[u8], Range<usize>),
) -> Result<(), Errno> {
    let mut maps = sys::open_own("maps")?;
    // The longest line of a pool's file fits. The rest of longer lines (of other files) is not
    // needed.
    let (mut line, mut used) = ([0u8; 256], 0);
    let mut part = [0u8; 1024];
    loop {
        let n = maps.read(&mut part).map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
        if n == 0 {
            return Ok(());
        }
        for &byte in &part[..n] {
            if byte != b'\n' {
                if used < line.len() {
                    line[used] = byte;
                    used += 1;
                }
                continue;
            }
            let text = &line[..used];
            used = 0;
            match parse_range(text) {
                Some((from, to)) if from < start + len && to > start => each(text, from..to),
                _ => {}
            }
        }
    }
}

/// Whether all mappings in `[start, start + len)` are a pool's, by their names in
/// `/proc/self/maps`, and there is one.
fn is_ours(start: usize, len: usize) -> Result<bool, Errno> {
    let name = crate::observe::POOL_FILE.as_bytes();
    let (mut found, mut theirs) = (false, false);
    lines_of(start, len, |line, _| {
        found = true;
        theirs |= !line.windows(name.len()).any(|w| w == name);
    })?;
    // Something is mapped there, and the file does not show it.
    if found { Ok(!theirs) } else { Err(Errno(libc::EIO)) }
}

/// Offset, device and inode in a line of maps: `7f00-8000 rw-s 00001000 00:01 1234 /memfd:name`.
fn parse_file(line: &[u8]) -> Option<(u64, u64, u64)> {
    let text = std::str::from_utf8(line.get(..line.len().min(100))?).ok()?;
    let mut words = text.split_ascii_whitespace().skip(2);
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    let device = libc::makedev(number(major)?, number(minor)?);
    Some((offset, device, words.next()?.parse().ok()?))
}

/// The two hexadecimal numbers at the beginning of a line of maps.
fn parse_range(line: &[u8]) -> Option<(usize, usize)> {
    let number = |digits: &[u8]| {
        digits.iter().try_fold(0usize, |n, d| Some(n << 4 | (*d as char).to_digit(16)? as usize))
    };
    let dash = line.iter().position(|b| *b == b'-')?;
    let end = line.iter().position(|b| *b == b' ')?;
    Some((number(&line[..dash])?, number(line.get(dash + 1..end)?)?))
}

// SAFETY of the blocks in methods marked `unsafe`: they forward their caller's promise about the
// same ranges.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Backend for Linux {
    fn is_host_memory(&self) -> bool {
        true
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        let name = CString::new(name).map_err(|_| Errno(libc::EINVAL))?;
        let file = sys::memfd_create(&name, page.hugetlb_bits())?;
        sys::memfd_seal(file.as_fd(), bytes)?;
        Ok(MemoryFile(Descriptor::Kernel(Kept::new(file)?)))
    }
    unsafe fn close_file(&self, file: MemoryFile) {
        // SAFETY: the pool that owns the file calls this once and uses it no more.
        unsafe { file.0.kept().close() };
    }
    fn has_file(&self, file: MemoryFile) -> bool {
        file.0.kept().is_ours()
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        sys::reserve(len, align)
    }
    fn reserve_low(&self, len: usize, align: usize) -> Result<usize, Errno> {
        sys::reserve_low(len, align)
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::unmap(addr, len) }
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::vacate(addr, len) }
    }
    unsafe fn map(&self, m: &Mapping) -> Result<(), Errno> {
        unsafe {
            sys::map_file(m.addr, m.len, Self::borrow(m.file), m.offset, m.prot.0, m.populate)
        }
    }
    unsafe fn map_own(&self, m: &Mapping) -> Result<(), Errno> {
        let file = Self::borrow(m.file);
        // MAP_FIXED_NOREPLACE fills a hole without risk. If something is mapped there, it is
        // replaced only if it is a pool's.
        match unsafe { sys::map_file_into_hole(m.addr, m.len, file, m.offset, m.prot.0) } {
            Ok(()) if !m.populate || !m.prot.readable() => Ok(()),
            Ok(()) => unsafe { self.populate(m.addr, m.len, m.prot.writable()) }.or(Ok(())),
            Err(Errno(libc::EEXIST)) => match is_ours(m.addr, m.len) {
                Ok(true) => unsafe { self.map(m) },
                Ok(false) => Err(Errno(libc::EEXIST)),
                // Without a descriptor for maps this is decided in a later attempt.
                Err(errno) => Err(errno),
            },
            Err(errno) => Err(errno),
        }
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        sys::is_mapped(addr, len)
    }
    fn maps(&self, addr: usize, len: usize, file: MemoryFile, offset: u64) -> Result<bool, Errno> {
        let (device, inode) = file.0.kept().device_and_inode();
        // The end of the part that maps the file as asked.
        let mut end = addr;
        lines_of(addr, len, |line, mapping| {
            let is_next = mapping.start <= end && end < mapping.end;
            let is_same = parse_file(line).is_some_and(|(from, of_device, of_inode)| {
                (of_device, of_inode) == (device, inode)
                    && from + (end - mapping.start.min(end)) as u64 == offset + (end - addr) as u64
            });
            if is_next && is_same {
                end = mapping.end;
            }
        })?;
        Ok(end >= addr + len)
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::exchange_page_tables(from, to, len) }
    }
    unsafe fn move_mapping(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::move_mapping(from, to, len) }
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        unsafe { sys::protect(addr, len, prot.0) }
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        unsafe { sys::set_advice(addr, len, advice) }
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        let advice = if write { Advice::PopulateWrite } else { Advice::PopulateRead };
        unsafe { sys::set_advice(addr, len, advice) }
    }
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::set_advice(addr, len, Advice::Collapse) }
    }
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno> {
        sys::prefer_node(node)
    }
    fn allows_node(&self, node: u32) -> bool {
        crate::topology::allows_node(node)
    }
    fn tracer(&self) -> Option<u32> {
        crate::tracer::of_this_thread()
    }
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        unsafe { sys::lock(addr, len, on_fault) }
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::unlock(addr, len) }
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        unsafe { sys::bind(addr, len, policy) }
    }
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
        super::attribute_probe::attributes(ranges)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        sys::nodes_of_pages(0, pages, status)
    }
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)> {
        tracker::open(ability)
    }
    unsafe fn close_tracker(&self, tracker: Tracker) {
        unsafe { tracker::close(tracker) }
    }
    fn has_tracker(&self, tracker: Tracker) -> bool {
        tracker::is_whole(tracker)
    }
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize)) {
        tracker::serve(tracker, write);
    }
    fn end_tracker(&self, tracker: Tracker) {
        tracker::end(tracker);
    }
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno> {
        let mode = tracker.modes[usize::from(hold)];
        unsafe { sys::uffd_register(tracker::faults(tracker), addr, len, mode) }.map(drop)
    }
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        sys::uffd_unregister(tracker::faults(tracker), addr, len)
    }
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno> {
        unsafe { tracker::mark_clean(tracker, addr, len, split) }
    }
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        sys::uffd_let_write(tracker::faults(tracker), addr, len)
    }
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno> {
        unsafe { tracker::scan(tracker, addr, len, mark_clean, found) }
    }
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        sys::uffd_wake(tracker::faults(tracker), addr, len)
    }
    fn count_waiting(&self, tracker: Tracker) -> u64 {
        // If the descriptor stands for a file of the program by now, a read could block, and would
        // take data from the program.
        if tracker.has_faults() { sys::uffd_count_faults(tracker::faults(tracker)) } else { 0 }
    }
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno> {
        unsafe { sys::read_at(Self::borrow(file), offset, dst, len) }
    }
    fn hurry(&self, haste: Haste, on: bool) -> bool {
        haste.apply(on)
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize, method: CopyMethod) {
        unsafe { sys::copy_racing(dst, src, len, method) }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        unsafe { sys::zero(addr, len) }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_range_maps_a_file_where_it_maps_just_these_pages_of_it() {
        const PAGE: usize = 4096;
        let create = || Linux.create_file("pageleap:test", PageSize::Base, 8 * PAGE).unwrap();
        let (file, other) = (create(), create());
        let addr = Linux.reserve(8 * PAGE, PAGE).unwrap();
        let map = |at: usize, file, page: usize, prot| {
            let (addr, offset) = (addr + at * PAGE, (page * PAGE) as u64);
            let mapping = Mapping { addr, len: 2 * PAGE, file, offset, prot, populate: false };
            // SAFETY: address space of the test.
            unsafe { Linux.map(&mapping) }.unwrap();
        };
        let maps = |at: usize, pages: usize, file, page: usize| {
            Linux.maps(addr + at * PAGE, pages * PAGE, file, (page * PAGE) as u64).unwrap()
        };
        // Two mappings, because their access differs, and a third one after a gap.
        map(0, file, 1, Prot::READ_WRITE);
        map(2, file, 3, Prot::READ);
        map(5, file, 6, Prot::READ_WRITE);
        assert!(maps(0, 4, file, 1) && maps(1, 2, file, 2) && maps(3, 1, file, 4));
        assert!(!maps(0, 4, file, 0) && !maps(0, 4, other, 1) && !maps(1, 2, file, 1));
        assert!(!maps(0, 5, file, 1) && !maps(4, 1, file, 5) && !maps(0, 7, file, 1));
        map(1, other, 2, Prot::READ_WRITE);
        assert!(!maps(0, 4, file, 1) && maps(0, 1, file, 1) && maps(1, 2, other, 2));
        // SAFETY: nobody uses either any more.
        unsafe {
            Linux.release(addr, 8 * PAGE).unwrap();
            Linux.close_file(file);
            Linux.close_file(other);
        }
    }
}
