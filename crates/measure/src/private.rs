//! Private anonymous memory for measurements: a mapping, or a block of the program's allocator. It
//! leaps in place, and is the target of memcpys.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};

use pageleap::{BASE_PAGE, NodeId, PageSize};
use pageleap_sys::{self as sys, Advice, Errno, Policy};

use crate::Error;

/// Bytes that are filled between two reports of progress.
const PIECE: usize = 16 << 20;

/// Whole pages of private anonymous memory, given back on drop.
#[derive(Debug)]
pub struct PrivateMemory {
    start: usize,
    len: usize,
    /// The layout of the allocator's block; `None` for a mapping.
    block: Option<Layout>,
}

impl PrivateMemory {
    /// Maps `len` bytes of base pages or transparent huge pages, and touches all of them. They come
    /// from `node`, as long as it has free memory.
    ///
    /// # Errors
    /// If a limit of the process or the machine leaves less.
    pub fn new(len: usize, page: PageSize, node: NodeId) -> Result<PrivateMemory, Error> {
        let memory = PrivateMemory::untouched(len, page, node)?;
        for word in memory.words().iter().step_by(BASE_PAGE / size_of::<u64>()) {
            word.store(0, Ordering::Relaxed);
        }
        Ok(memory)
    }

    /// The same without any page: the first access to each gets it.
    ///
    /// # Errors
    /// If a limit of the process or the machine leaves less.
    pub fn untouched(len: usize, page: PageSize, node: NodeId) -> Result<PrivateMemory, Error> {
        let start = sys::reserve(len, PageSize::Thp.bytes()).map_err(failed("mmap"))?;
        let memory = PrivateMemory { start, len, block: None };
        // SAFETY: the mapping is this value's own, and nobody knows it yet.
        unsafe { sys::protect(start, len, libc::PROT_READ | libc::PROT_WRITE) }
            .map_err(failed("mprotect"))?;
        memory.prepare(page, node)?;
        Ok(memory)
    }

    /// As [`PrivateMemory::new`], but from the program's allocator (`malloc`), filled with zeros: whole pages of a block.
    /// `filled` gets the number of bytes that are filled so far. The memory policy and the advice
    /// on huge pages stay with the addresses, even after the block has been freed.
    ///
    /// # Errors
    /// If the allocator, a limit of the process, or the machine leaves less.
    ///
    /// # Panics
    /// If `len` is zero or no multiple of the page size, or the pages are hugetlb pages, which no
    /// allocator gives.
    pub fn allocated(
        len: usize,
        page: PageSize,
        node: NodeId,
        mut filled: impl FnMut(usize),
    ) -> Result<PrivateMemory, Error> {
        assert!(len > 0 && len.is_multiple_of(page.bytes()) && !page.is_hugetlb());
        let no_memory = || failed("malloc")(Errno(libc::ENOMEM));
        let layout = Layout::from_size_align(len, page.bytes()).map_err(|_| no_memory())?;
        // SAFETY: the layout has a size.
        let start = unsafe { alloc(layout) }.expose_provenance();
        if start == 0 {
            return Err(no_memory());
        }
        let memory = PrivateMemory { start, len, block: Some(layout) };
        memory.prepare(page, node)?;
        for at in (0..len).step_by(PIECE) {
            let piece = PIECE.min(len - at);
            // SAFETY: the piece lies in the block, and nobody else knows the block yet.
            unsafe { memory.as_ptr().add(at).write_bytes(0, piece) };
            filled(at + piece);
        }
        Ok(memory)
    }

    /// Sets its memory policy (mbind) and page size (madvise).
    fn prepare(&self, page: PageSize, node: NodeId) -> Result<(), Error> {
        let advice = if page == PageSize::Thp { Advice::HugePage } else { Advice::NoHugePage };
        // SAFETY: whole pages of this value's own. Neither call changes contents.
        unsafe {
            sys::bind(self.start, self.len, Policy::Preferred(node.0)).map_err(failed("mbind"))?;
            match sys::set_advice(self.start, self.len, advice) {
                // A kernel without transparent huge pages has nothing to advise against.
                Err(Errno(libc::EINVAL)) if advice == Advice::NoHugePage => Ok(()),
                other => other.map_err(failed("madvise")),
            }
        }
    }

    /// Checks that all of it has transparent huge pages.
    ///
    /// # Errors
    /// [`Error::NotHuge`].
    pub fn check_huge(&self) -> Result<(), Error> {
        let ratio = pageleap::observe::mapped_pages(self.start, self.len)?.huge_mapped_ratio;
        if ratio < 1.0 { Err(Error::NotHuge { ratio }) } else { Ok(()) }
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start as *mut u8
    }

    /// The memory as words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the memory is this value's own, aligned to pages, and zero at first. All access
        // is by atomics.
        unsafe { std::slice::from_raw_parts(self.start as *const _, self.len / size_of::<u64>()) }
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        match self.block {
            // SAFETY: the block is this value's own, of this layout.
            Some(layout) => unsafe { dealloc(self.as_ptr(), layout) },
            // SAFETY: the mapping is this value's own. If the kernel refuses, address space is
            // wasted.
            None => drop(unsafe { sys::unmap(self.start, self.len) }),
        }
    }
}

/// Turns an error number of a call into an error.
fn failed(call: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Call { call, reason: std::io::Error::from_raw_os_error(errno.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_the_allocator_is_zero_and_has_whole_pages_of_the_node() {
        let node = pageleap::topology::Topology::read().unwrap();
        let node = node.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        for (page, len) in [(PageSize::Base, 3 * PIECE + BASE_PAGE), (PageSize::Base, BASE_PAGE)] {
            let mut told = Vec::new();
            let memory =
                PrivateMemory::allocated(len, page, node, |bytes| told.push(bytes)).unwrap();
            assert_eq!(memory.as_ptr().addr() % page.bytes(), 0);
            assert_eq!(size_of_val(memory.words()), len);
            assert!(memory.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
            assert_eq!(told.last(), Some(&len));
            assert_eq!(told.len(), len.div_ceil(PIECE));
        }
    }
}
