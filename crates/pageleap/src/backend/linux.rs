//! The kernel: each operation is one system call.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use pageleap_sys as sys;

use super::{Advice, Backend, Errno, Mapping, MemoryFile, Policy, Prot};
use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::PageSize;

/// The memory of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Linux;

impl Linux {
    /// Borrows the descriptor behind a file of ours.
    fn borrow(file: MemoryFile) -> BorrowedFd<'static> {
        // SAFETY: a `MemoryFile` is a descriptor that `create_file` made and the owning pool closes last, after the last use.
        unsafe { BorrowedFd::borrow_raw(file.0) }
    }
}

// SAFETY of the blocks in methods marked `unsafe`: they forward their caller's promise about the same ranges.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Backend for Linux {
    fn is_host_memory(&self) -> bool {
        true
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        let name = CString::new(name).map_err(|_| Errno(libc::EINVAL))?;
        let file = sys::memfd_create(&name, page.huge_bits())?;
        sys::memfd_seal(file.as_fd(), bytes)?;
        Ok(MemoryFile(file.into_raw_fd()))
    }
    fn close_file(&self, file: MemoryFile) {
        // SAFETY: the pool that owns the file calls this once and uses it no more.
        drop(unsafe { OwnedFd::from_raw_fd(file.0) });
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        sys::reserve(len, align)
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::unmap(addr, len) }
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::vacate(addr, len) }
    }
    unsafe fn map(&self, m: &Mapping) -> Result<(), Errno> {
        unsafe { sys::map_file(m.addr, m.len, Self::borrow(m.file), m.offset, m.prot.0, m.populate) }
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::exchange_page_tables(from, to, len) }
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
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        unsafe { sys::lock(addr, len, on_fault) }
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { sys::unlock(addr, len) }
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        unsafe { sys::bind(addr, len, policy) }
    }
    fn attributes(&self, addr: usize, len: usize) -> Result<Vec<AttributeRun>, Error> {
        super::attribute_probe::attributes(addr, len)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        sys::nodes_of_pages(pages, status)
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize) {
        unsafe { sys::copy_racing(dst, src, len) }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        unsafe { sys::zero(addr, len) }
    }
}
