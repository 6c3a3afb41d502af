//! The kernel: each operation is one system call.

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

/// Whether all mappings in `[start, start + len)` are a pool's, by their names in
/// `/proc/self/maps`, and there is one. Allocates nothing, because the allocator may live in the
/// range.
fn is_ours(start: usize, len: usize) -> Result<bool, Errno> {
    let name = crate::observe::POOL_FILE.as_bytes();
    let mut maps = sys::open_own("maps")?;
    // The longest line of a pool's file fits. Of longer lines (of other files) the rest is not
    // needed.
    let (mut line, mut used, mut found, mut theirs) = ([0u8; 256], 0, false, false);
    let mut part = [0u8; 1024];
    loop {
        let n = maps.read(&mut part).map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
        if n == 0 {
            break;
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
            let overlaps =
                parse_range(text).is_some_and(|(from, to)| from < start + len && to > start);
            found |= overlaps;
            theirs |= overlaps && !text.windows(name.len()).any(|w| w == name);
            used = 0;
        }
    }
    // Something is mapped there, and the file does not show it.
    if found { Ok(!theirs) } else { Err(Errno(libc::EIO)) }
}

/// Whether a mapped range counts as a pool's. `look` is the result of [`is_ours`] for it.
fn counts_as_ours(look: Result<bool, Errno>) -> bool {
    match look {
        Ok(ours) => ours,
        // The next look may succeed: others give descriptors back, or have just changed mappings.
        Err(Errno(libc::EMFILE | libc::ENFILE | libc::EIO)) => false,
        // No look will ever succeed: `/proc` cannot be opened (`chroot`, Landlock, a seccomp filter).
        // The mapping is another thread's only if it came into a hole since the refused call.
        Err(_) => true,
    }
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
        // A hole is filled without risk, and a mapping of a pool is replaced.
        match unsafe { sys::map_file_into_hole(m.addr, m.len, file, m.offset, m.prot.0) } {
            Ok(()) if !m.populate || !m.prot.readable() => Ok(()),
            Ok(()) => unsafe { self.populate(m.addr, m.len, m.prot.writable()) }.or(Ok(())),
            Err(Errno(libc::EEXIST)) => match is_ours(m.addr, m.len) {
                Ok(true) => unsafe { self.map(m) },
                Ok(false) => Err(Errno(libc::EEXIST)),
                // Without a descriptor for maps the question stays open until a later attempt.
                Err(errno) => Err(errno),
            },
            Err(errno) => Err(errno),
        }
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        sys::is_mapped(addr, len)
    }
    fn is_own(&self, addr: usize, len: usize) -> bool {
        self.is_mapped(addr, len) && counts_as_ours(is_ours(addr, len))
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
        // A read of a file of the program's could wait, and would take what is the program's.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_counts_as_ours_unless_the_next_look_may_tell() {
        assert!(counts_as_ours(Ok(true)) && !counts_as_ours(Ok(false)));
        for errno in [libc::EMFILE, libc::ENFILE, libc::EIO] {
            assert!(!counts_as_ours(Err(Errno(errno))));
        }
        for errno in [libc::ENOENT, libc::EACCES, libc::EPERM] {
            assert!(counts_as_ours(Err(Errno(errno))));
        }
    }
}
