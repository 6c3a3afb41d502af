//! A few pages of a memory file on which probes try calls. Dropping them unmaps them.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use pageleap::{BASE_PAGE, PageSize};
use pageleap_sys::{self as sys, Advice, Errno};

/// Readable and writable.
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// What the memory files are called in `/proc/self/maps`.
const NAME: &CStr = c"pageleap:probe";

/// Address space that belongs to a probe until it is dropped.
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Span {
    pub(crate) fn reserve(len: usize, align: usize) -> Result<Span, Errno> {
        Ok(Span { start: sys::reserve(len, align)?, len })
    }

    /// Private memory of whole base pages, writable and without pages, which children do not get.
    pub(crate) fn private(len: usize) -> Result<Span, Errno> {
        let span = Span::reserve(len, BASE_PAGE)?;
        // SAFETY: the range is the probe's own, and only reserved. If the process locks future
        // mappings, memory that becomes accessible would be populated at once.
        unsafe {
            sys::unlock(span.start, len)?;
            sys::protect(span.start, len, READ_WRITE)?;
        }
        span.advise(Advice::DontFork)?;
        Ok(span)
    }

    /// Maps all of it to the beginning of a file.
    pub(crate) fn map(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        // SAFETY: the range is the probe's own, and no other code knows its address.
        unsafe { sys::map_file(self.start, self.len, file, 0, READ_WRITE, false) }
    }

    /// Takes all access away. The address space stays the probe's.
    pub(crate) fn vacate(&self) -> Result<(), Errno> {
        // SAFETY: as above.
        unsafe { sys::vacate(self.start, self.len) }
    }

    pub(crate) fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: as above.
        unsafe { sys::set_advice(self.start, self.len, advice) }
    }

    /// Drops the page table entries; the pages stay in the file.
    pub(crate) fn forget(&self) -> Result<(), Errno> {
        // As it is under `mlockall(MCL_FUTURE)`: locked memory keeps its entries.
        // SAFETY: as above.
        unsafe { libc::munlock(self.start as *const libc::c_void, self.len) };
        // SAFETY: as above. A shared mapping loses no contents by it.
        let done = unsafe {
            libc::madvise(self.start as *mut libc::c_void, self.len, libc::MADV_DONTNEED)
        };
        if done == 0 {
            Ok(())
        } else {
            Err(Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)))
        }
    }

    /// Writes one byte into the page at `offset`. The page must be mapped writable, and be present
    /// or have memory.
    pub(crate) fn write(&self, offset: usize, value: u8) {
        assert!(offset < self.len);
        // SAFETY: inside a range that is ours; the callers have populated it.
        unsafe { std::ptr::write_volatile((self.start + offset) as *mut u8, value) }
    }

    pub(crate) fn read(&self, offset: usize) -> u8 {
        assert!(offset < self.len);
        // SAFETY: as above.
        unsafe { std::ptr::read_volatile((self.start + offset) as *const u8) }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: the range is ours; probes keep no reference into it.
        let _ = unsafe { sys::unmap(self.start, self.len) };
    }
}

/// A memory file that only its mapping keeps alive.
pub(crate) struct Scratch {
    pub(crate) span: Span,
}

impl Scratch {
    /// `len` bytes, not populated. `huge_page_bits` as for `memfd_create`.
    pub(crate) fn new(
        len: usize,
        align: usize,
        huge_page_bits: Option<u32>,
    ) -> Result<Scratch, Failed> {
        let file = sys::memfd_create(NAME, huge_page_bits).map_err(Failed::at("memfd_create"))?;
        sys::memfd_seal(file.as_fd(), len)
            .map_err(Failed::at("ftruncate and seals of a memory file"))?;
        let span = Span::reserve(len, align).map_err(Failed::at("mmap(PROT_NONE)"))?;
        span.map(file.as_fd()).map_err(Failed::at("mmap of a memory file"))?;
        Ok(Scratch { span })
    }

    /// A hugetlb page of 2 MB, which is neither taken nor reserved.
    pub(crate) fn huge_without_page() -> Result<Scratch, Failed> {
        let start = sys::map_huge_without_page()
            .map_err(Failed::at("mmap of a memory file of huge pages"))?;
        Ok(Scratch { span: Span { start, len: PageSize::Huge2M.bytes() } })
    }

    /// As [`Scratch::new`], with all pages present.
    pub(crate) fn populated(len: usize, align: usize) -> Result<Scratch, Failed> {
        let scratch = Scratch::new(len, align, None)?;
        scratch
            .span
            .advise(Advice::PopulateWrite)
            .map_err(Failed::at("madvise(MADV_POPULATE_WRITE)"))?;
        Ok(scratch)
    }
}

/// A call that failed while something else was to be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) call: String,
    pub(crate) errno: Errno,
    /// `None` if the call does not concern the pagemap.
    pub(crate) pagemap: Option<PagemapCall>,
}

/// A call on the pagemap of this process. Findings tell its failure apart, because it has a topic of
/// its own ([`Topic::PagemapScan`](crate::Topic::PagemapScan)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagemapCall {
    Open,
    Scan,
}

impl PagemapCall {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            PagemapCall::Open => "open(/proc/self/pagemap)",
            PagemapCall::Scan => "ioctl(/proc/self/pagemap, PAGEMAP_SCAN)",
        }
    }

    /// Makes a failure of an error number.
    pub(crate) fn failed(self) -> impl FnOnce(Errno) -> Failed {
        move |errno| Failed { call: self.text().to_owned(), errno, pagemap: Some(self) }
    }
}

impl Failed {
    /// Makes one of an error number.
    pub(crate) fn at(call: impl Into<String>) -> impl FnOnce(Errno) -> Failed {
        let call = call.into();
        move |errno| Failed { call, errno, pagemap: None }
    }

    pub(crate) fn seen(&self) -> String {
        format!("{}: {}", self.call, self.errno)
    }
}
