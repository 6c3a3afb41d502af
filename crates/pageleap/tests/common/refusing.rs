//! A backend that refuses those calls that a test's rule names.

#![allow(dead_code)] // each test binary uses a part of it

use std::ops::Range;
use std::sync::Arc;

use pageleap::backend::{
    Ability, Advice, Backend, Call, Errno, Mapping, MemoryFile, PageRegion, Policy, Prot, Tracker,
};
use pageleap::observe::AttributeRun;
use pageleap::{Error, PageSize};

/// A call that is about to be made.
pub struct Request {
    pub call: Call,
    /// The address, or 0 for calls without one.
    pub addr: usize,
    pub prot: Option<Prot>,
    pub advice: Option<Advice>,
}

type Rule = dyn Fn(&Request) -> Option<Errno> + Send + Sync;

/// Asks a rule before each mapping call. A refused call has no effect. The rule may run in a signal
/// handler, so it uses atomics only.
pub struct Refusing {
    inner: Arc<dyn Backend>,
    rule: Box<Rule>,
}

impl Refusing {
    pub fn new(
        inner: Arc<dyn Backend>,
        rule: impl Fn(&Request) -> Option<Errno> + Send + Sync + 'static,
    ) -> Self {
        Refusing { inner, rule: Box::new(rule) }
    }

    fn ask(
        &self,
        call: Call,
        addr: usize,
        prot: Option<Prot>,
        advice: Option<Advice>,
    ) -> Result<&dyn Backend, Errno> {
        let refused = (self.rule)(&Request { call, addr, prot, advice });
        refused.map_or(Ok(&*self.inner), Err)
    }

    fn at(&self, call: Call, addr: usize) -> Result<&dyn Backend, Errno> {
        self.ask(call, addr, None, None)
    }
}

// SAFETY: every call is either forwarded unchanged to a backend that keeps the trait's promises, or
// refused without effect. All blocks below forward the caller's promise about the same ranges.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Backend for Refusing {
    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        self.at(Call::CreateFile, 0)?.create_file(name, page, bytes)
    }
    unsafe fn close_file(&self, file: MemoryFile) {
        unsafe { self.inner.close_file(file) };
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        self.at(Call::Reserve, 0)?.reserve(len, align)
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Release, addr)?.release(addr, len) }
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Vacate, addr)?.vacate(addr, len) }
    }
    unsafe fn map(&self, mapping: &Mapping) -> Result<(), Errno> {
        unsafe { self.ask(Call::Map, mapping.addr, Some(mapping.prot), None)?.map(mapping) }
    }
    unsafe fn map_own(&self, mapping: &Mapping) -> Result<(), Errno> {
        unsafe { self.ask(Call::Map, mapping.addr, Some(mapping.prot), None)?.map_own(mapping) }
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        self.inner.is_mapped(addr, len)
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Exchange, to)?.exchange(from, to, len) }
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        unsafe { self.ask(Call::Protect, addr, Some(prot), None)?.protect(addr, len, prot) }
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        unsafe { self.ask(Call::Advise, addr, None, Some(advice))?.advise(addr, len, advice) }
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        unsafe { self.at(Call::Populate, addr)?.populate(addr, len, write) }
    }
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Collapse, addr)?.collapse(addr, len) }
    }
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno> {
        self.at(Call::PreferTables, 0)?.prefer_tables_on(node)
    }
    fn allows_node(&self, node: u32) -> bool {
        self.inner.allows_node(node)
    }
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        unsafe { self.at(Call::Lock, addr)?.lock(addr, len, on_fault) }
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Lock, addr)?.unlock(addr, len) }
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        unsafe { self.at(Call::Bind, addr)?.bind(addr, len, policy) }
    }
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
        self.inner.attributes(ranges)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        self.at(Call::QueryNodes, 0)?.nodes_of(pages, status)
    }
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)> {
        let call = Call::OpenTracker;
        self.at(call, 0).map_err(|errno| (call, errno))?.open_tracker(ability)
    }
    unsafe fn close_tracker(&self, tracker: Tracker) {
        unsafe { self.inner.close_tracker(tracker) };
    }
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize)) {
        self.inner.serve_tracker(tracker, write);
    }
    fn end_tracker(&self, tracker: Tracker) {
        self.inner.end_tracker(tracker);
    }
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno> {
        unsafe { self.at(Call::Track, addr)?.track(tracker, addr, len, hold) }
    }
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::Untrack, addr)?.untrack(tracker, addr, len) }
    }
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno> {
        unsafe { self.at(Call::MarkClean, addr)?.mark_clean(tracker, addr, len, split) }
    }
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        unsafe { self.at(Call::LetWrite, addr)?.let_write(tracker, addr, len) }
    }
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno> {
        unsafe { self.at(Call::Scan, addr)?.scan(tracker, addr, len, mark_clean, found) }
    }
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.at(Call::Wake, addr)?.wake(tracker, addr, len)
    }
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno> {
        unsafe { self.at(Call::ReadFile, dst)?.read_file(file, offset, dst, len) }
    }
    fn hurry(&self, on: bool) -> bool {
        self.inner.hurry(on)
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize) {
        unsafe { self.inner.copy(dst, src, len) }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        unsafe { self.inner.zero(addr, len) }
    }
}
