//! Counts the calls that one job makes, by kind, also those made for it in the fault handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Advice, Backend, Call, Errno, Mapping, MemoryFile, Policy, Prot};
use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::PageSize;

/// A backend whose calls are counted.
pub struct Counted {
    inner: Arc<dyn Backend>,
    counts: [AtomicU64; Call::ALL.len()],
}

impl Counted {
    /// Wraps a backend; all counts are zero.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Counted { inner, counts: Default::default() }
    }

    /// The calls made so far, by name, those with at least one call only.
    pub fn calls(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Call::ALL
            .into_iter()
            .map(|c| (c.name(), self.counts[c as usize].load(Relaxed)))
            .filter(|&(_, n)| n > 0)
    }

    fn count(&self, call: Call) -> &dyn Backend {
        self.counts[call as usize].fetch_add(1, Relaxed);
        &*self.inner
    }
}

// SAFETY of all blocks below: each method forwards its caller's promise about the same ranges.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Backend for Counted {
    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        self.count(Call::CreateFile).create_file(name, page, bytes)
    }
    fn close_file(&self, file: MemoryFile) {
        self.inner.close_file(file);
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        self.count(Call::Reserve).reserve(len, align)
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.count(Call::Release).release(addr, len) }
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.count(Call::Vacate).vacate(addr, len) }
    }
    unsafe fn map(&self, mapping: &Mapping) -> Result<(), Errno> {
        unsafe { self.count(Call::Map).map(mapping) }
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.count(Call::Exchange).exchange(from, to, len) }
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        unsafe { self.count(Call::Protect).protect(addr, len, prot) }
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        unsafe { self.count(Call::Advise).advise(addr, len, advice) }
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        unsafe { self.count(Call::Populate).populate(addr, len, write) }
    }
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        unsafe { self.count(Call::Lock).lock(addr, len, on_fault) }
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.count(Call::Lock).unlock(addr, len) }
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        unsafe { self.count(Call::Bind).bind(addr, len, policy) }
    }
    fn attributes(&self, addr: usize, len: usize) -> Result<Vec<AttributeRun>, Error> {
        self.inner.attributes(addr, len)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        self.count(Call::QueryNodes).nodes_of(pages, status)
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize) {
        unsafe { self.inner.copy(dst, src, len) }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        unsafe { self.inner.zero(addr, len) }
    }
}
