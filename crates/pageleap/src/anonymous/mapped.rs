//! The library's own mappings, made without any allocator.
//!
//! Data that a window needs lies in such mappings, because the heap may lie in the area that moves.

use std::ops::Range;

use pageleap_sys as sys;
use pageleap_sys::{Advice, Errno};

use crate::units::{Call, Prot};

/// Private anonymous memory, unmapped on drop. It is not inherited by children (MADV_DONTFORK), in
/// which other memory may lie at these addresses.
#[derive(Debug)]
pub(crate) struct Mapped {
    start: usize,
    len: usize,
    /// The process that has made the mapping.
    process: u32,
}

impl Mapped {
    /// Maps `len` bytes, which are zero. The start is a multiple of `align`.
    pub(crate) fn new(len: usize, align: usize) -> Result<Mapped, (Call, Errno)> {
        let start = sys::reserve(len, align).map_err(|errno| (Call::Reserve, errno))?;
        let mapped = Mapped { start, len, process: std::process::id() };
        mapped.open(0..len)?;
        Ok(mapped)
    }

    /// Replaces a part, in bytes from the start, by a new mapping without pages and page tables.
    ///
    /// # Safety
    /// Nobody needs the contents of the part.
    pub(super) unsafe fn renew(&self, part: Range<usize>) -> Result<(), (Call, Errno)> {
        // SAFETY: the mapping is this value's own; the rest is forwarded to the caller.
        unsafe { sys::vacate(self.start + part.start, part.len()) }
            .map_err(|errno| (Call::Reserve, errno))?;
        self.open(part)
    }

    /// Makes a part of a reservation accessible.
    fn open(&self, part: Range<usize>) -> Result<(), (Call, Errno)> {
        let start = self.start + part.start;
        // SAFETY: the mapping is this value's own, and only reserved. It is unlocked first, because
        // a process that locks future mappings (mlockall) would populate memory as soon as it
        // becomes accessible.
        unsafe {
            sys::unlock(start, part.len()).map_err(|errno| (Call::Lock, errno))?;
            sys::protect(start, part.len(), Prot::READ_WRITE.0)
        }
        .map_err(|errno| (Call::Protect, errno))?;
        self.advise(part, Advice::DontFork)
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Whether this process has made the mapping. A forked child has only the value.
    pub(super) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Applies advice to a part, in bytes from the start (`madvise(2)`).
    pub(crate) fn advise(&self, part: Range<usize>, advice: Advice) -> Result<(), (Call, Errno)> {
        let call = match advice {
            Advice::PopulateWrite => Call::Populate,
            _ => Call::Advise,
        };
        // SAFETY: a part of this mapping. None of the advice that is used discards contents.
        unsafe { sys::set_advice(self.start + part.start, part.len(), advice) }
            .map_err(|errno| (call, errno))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        // SAFETY: the mapping is this value's own. If the kernel refuses, address space is wasted.
        let _ = unsafe { sys::unmap(self.start, self.len) };
    }
}
