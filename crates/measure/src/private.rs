//! Private anonymous memory for measurements: a mapping, or a block of the program's allocator. It
//! leaps in place, is the target of memcpys, and moves by the kernel's own calls.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};

use pageleap::topology::{SysFiles, Topology, unreserved_huge_pages};
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
    page: PageSize,
    /// The layout of the allocator's block; `None` for a mapping.
    block: Option<Layout>,
}

impl PrivateMemory {
    /// Maps `len` bytes, and touches all of them. They come from `node`, as long as it has free
    /// memory.
    ///
    /// Huge pages of the hugetlb pool must be free on that node beforehand. If others take them
    /// meanwhile, pages of other nodes come instead.
    ///
    /// # Errors
    /// If a limit of the process or the machine leaves less, or the node has too few free huge
    /// pages.
    ///
    /// # Panics
    /// If the pages are hugetlb pages, and `len` is zero or no multiple of their size.
    pub fn new(len: usize, page: PageSize, node: NodeId) -> Result<PrivateMemory, Error> {
        if page.is_hugetlb() {
            return PrivateMemory::hugetlb(len, page, node);
        }
        let memory = PrivateMemory::untouched(len, page, node)?;
        memory.touch();
        Ok(memory)
    }

    /// Maps `len` bytes of base pages or transparent huge pages without a memory policy, and
    /// touches none of them. The thread that touches a page first decides on its node.
    pub(crate) fn without_policy(len: usize, page: PageSize) -> Result<PrivateMemory, Error> {
        let start = sys::reserve(len, PageSize::Thp.bytes()).map_err(failed("mmap"))?;
        let memory = PrivateMemory { start, len, page, block: None };
        // SAFETY: the mapping is this value's own, and nobody knows it yet.
        unsafe { sys::protect(start, len, libc::PROT_READ | libc::PROT_WRITE) }
            .map_err(failed("mprotect"))?;
        memory.advise()?;
        Ok(memory)
    }

    /// Maps pages of the hugetlb pool, and touches all of them.
    fn hugetlb(len: usize, page: PageSize, node: NodeId) -> Result<PrivateMemory, Error> {
        let (memory, too_few) = PrivateMemory::hugetlb_untouched(len, page, node)?;
        // SAFETY: the mapping is this value's own. The advice changes no contents.
        match unsafe { sys::set_advice(memory.start, len, Advice::PopulateWrite) } {
            // A kernel before 5.14 does not know the advice.
            Err(Errno(libc::EINVAL)) => memory.touch(),
            // A cgroup may limit huge pages. A thread that touches one gets SIGBUS then.
            Err(Errno(libc::EFAULT)) => return Err(too_few),
            populated => populated.map_err(failed("madvise"))?,
        }
        Ok(memory)
    }

    /// Maps pages of the hugetlb pool. The mapping reserves them, so no access finds the pool empty
    /// (SIGBUS), unless a cgroup limits huge pages. The error is that of too few pages.
    fn hugetlb_untouched(
        len: usize,
        page: PageSize,
        node: NodeId,
    ) -> Result<(PrivateMemory, Error), Error> {
        assert!(len > 0 && len.is_multiple_of(page.bytes()));
        let (wanted, bytes) = ((len / page.bytes()) as u64, page.bytes() as u64);
        let on_node = Topology::read()?.node(node)?.free_huge(bytes);
        let unreserved = unreserved_huge_pages(&SysFiles::host(), bytes).unwrap_or(on_node);
        let free = on_node.min(unreserved);
        let too_few = Error::HugePages { node, page, wanted, free };
        if free < wanted {
            return Err(too_few);
        }
        let start = match sys::map_private_huge(len, page.bytes().trailing_zeros()) {
            // Another process has reserved pages since they were counted.
            Err(Errno(libc::ENOMEM)) => return Err(too_few),
            mapped => mapped.map_err(failed("mmap"))?,
        };
        let memory = PrivateMemory { start, len, page, block: None };
        memory.prefer(node)?;
        Ok((memory, too_few))
    }

    /// The same without any page: the first access to each gets it.
    ///
    /// # Errors
    /// As [`PrivateMemory::new`].
    pub fn untouched(len: usize, page: PageSize, node: NodeId) -> Result<PrivateMemory, Error> {
        if page.is_hugetlb() {
            return PrivateMemory::hugetlb_untouched(len, page, node).map(|(memory, _)| memory);
        }
        let memory = PrivateMemory::without_policy(len, page)?;
        memory.prefer(node)?;
        Ok(memory)
    }

    /// As [`PrivateMemory::new`], but from the program's allocator (`malloc`), filled with zeros:
    /// whole pages of a block. `filled` gets the number of bytes that are filled so far. The memory
    /// policy and the advice on huge pages stay with the addresses, even after the block has been
    /// freed.
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
        let memory = PrivateMemory { start, len, page, block: Some(layout) };
        memory.prefer(node)?;
        memory.advise()?;
        for at in (0..len).step_by(PIECE) {
            let piece = PIECE.min(len - at);
            // SAFETY: the piece lies in the block, and nobody else knows the block yet.
            unsafe { memory.as_ptr().add(at).write_bytes(0, piece) };
            filled(at + piece);
        }
        Ok(memory)
    }

    /// Sets its memory policy (mbind).
    fn prefer(&self, node: NodeId) -> Result<(), Error> {
        // SAFETY: whole pages of this value's own. The call changes no contents.
        unsafe { sys::bind(self.start, self.len, Policy::Preferred(node.0)) }
            .map_err(failed("mbind"))
    }

    /// Asks for its page size (madvise).
    fn advise(&self) -> Result<(), Error> {
        let advice = if self.page == PageSize::Thp { Advice::HugePage } else { Advice::NoHugePage };
        // SAFETY: whole pages of this value's own. The advice changes no contents.
        match unsafe { sys::set_advice(self.start, self.len, advice) } {
            // A kernel without transparent huge pages has nothing to advise against.
            Err(Errno(libc::EINVAL)) if advice == Advice::NoHugePage => Ok(()),
            other => other.map_err(failed("madvise")),
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

    /// Writes to each base page.
    pub(crate) fn touch(&self) {
        for word in self.words().iter().step_by(BASE_PAGE / size_of::<u64>()) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// The size of its pages. Transparent huge pages are a wish, which the kernel may not fulfil.
    pub fn page(&self) -> PageSize {
        self.page
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "memory of no bytes cannot be mapped")]
    pub fn len(&self) -> usize {
        self.len
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
pub(crate) fn failed(call: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Call { call, reason: std::io::Error::from_raw_os_error(errno.0) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A node with memory.
    pub(crate) fn node() -> NodeId {
        let topology = Topology::read().unwrap();
        topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id
    }

    #[test]
    fn memory_of_the_hugetlb_pool_has_huge_pages_or_a_clear_error() {
        const PAGES: usize = 3;
        let page = PageSize::Huge2M;
        match PrivateMemory::new(PAGES * page.bytes(), page, node()) {
            Ok(memory) => {
                let (start, len) = (memory.as_ptr().addr(), memory.len());
                let mapped = pageleap::observe::mapped_pages(start, len).unwrap();
                assert_eq!(mapped.kernel_page_size, page.bytes());
                assert!(memory.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
            }
            Err(error) => {
                assert!(matches!(error, Error::HugePages { wanted: 3, .. }), "{error}");
                eprintln!(
                    "SKIP memory_of_the_hugetlb_pool_has_huge_pages_or_a_clear_error: {error}"
                );
            }
        }
        let error = PrivateMemory::new(page.bytes() << 20, page, node()).unwrap_err();
        assert!(matches!(error, Error::HugePages { wanted: 0x10_0000, .. }), "{error}");
    }

    #[test]
    fn a_block_of_the_allocator_is_zero_and_has_whole_pages_of_the_node() {
        let node = node();
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
