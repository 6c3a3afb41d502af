//! Fault injection: makes the Nth mapping call fail, before its side effect, after it, or half-way.
//!
//! The calls are numbered from 1 in the order in which they arrive, from all threads and from the
//! fault handler. Tests first run a job with [`FailAt::never`] to learn how many calls it makes,
//! and then once for each number and each mode.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::{
    Ability, Advice, Backend, Call, Errno, Mapping, MemoryFile, PageRegion, Policy, Prot, Tracker,
};
use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::PageSize;

/// When the chosen call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailMode {
    /// It does nothing and reports an error.
    Before,
    /// It does its work and then reports an error.
    After,
    /// It does part of its work and then reports an error: a replacing call has already unmapped
    /// its target, any other has done the first half of the range.
    Partial,
}

/// A backend whose Nth counted call fails.
pub struct FailAt {
    inner: Arc<dyn Backend>,
    /// The number of the call that fails; 0 for none.
    at: AtomicU64,
    mode: FailMode,
    errno: Errno,
    seen: AtomicU64,
    armed: AtomicBool,
    struck: AtomicU64,
}

impl FailAt {
    /// Fails the `at`-th call after [`FailAt::arm`].
    pub fn new(inner: Arc<dyn Backend>, at: u64, mode: FailMode, errno: Errno) -> Self {
        let (at, seen, struck) = (AtomicU64::new(at), AtomicU64::new(0), AtomicU64::new(0));
        FailAt { inner, at, mode, errno, seen, armed: AtomicBool::new(false), struck }
    }

    /// Fails none, and counts.
    pub fn never(inner: Arc<dyn Backend>) -> Self {
        FailAt::new(inner, 0, FailMode::Before, Errno(libc::ENOMEM))
    }

    /// Starts to count: what came before (creating pools and regions) is not numbered.
    pub fn arm(&self) {
        self.seen.store(0, Relaxed);
        self.armed.store(true, Relaxed);
    }

    /// Stops counting and failing.
    pub fn disarm(&self) {
        self.armed.store(false, Relaxed);
    }

    /// How many calls came since [`FailAt::arm`].
    pub fn seen(&self) -> u64 {
        self.seen.load(Relaxed)
    }

    /// Which call failed, if any has.
    pub fn struck(&self) -> Option<Call> {
        match self.struck.load(Relaxed) {
            0 => None,
            n => Some(Call::ALL[n as usize - 1]),
        }
    }

    fn strikes(&self, call: Call) -> bool {
        if !self.armed.load(Relaxed) {
            return false;
        }
        let number = self.seen.fetch_add(1, Relaxed) + 1;
        let strikes = number == self.at.load(Relaxed);
        if strikes {
            self.struck.store(call as u64 + 1, Relaxed);
        }
        strikes
    }

    /// Runs one call on `[addr, addr + len)`, or makes it fail. `partial` does part of its work.
    fn run<T>(
        &self,
        call: Call,
        whole: impl FnOnce() -> Result<T, Errno>,
        partial: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<T, Errno> {
        if !self.strikes(call) {
            return whole();
        }
        match self.mode {
            FailMode::Before => {}
            FailMode::After => {
                whole()?;
            }
            FailMode::Partial => {
                let _ = partial();
            }
        }
        Err(self.errno)
    }
}

/// The first half of a range, in whole base pages. (On hugetlb it may be no whole page: then the
/// partial call does nothing.)
fn half(len: usize) -> usize {
    (len / 2).next_multiple_of(crate::units::BASE_PAGE).min(len)
}

// SAFETY of all blocks below: each method forwards its caller's promise about the same ranges or
// parts of them. A hole where `map` or `exchange` failed is an outcome that their contract states.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Backend for FailAt {
    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        if self.strikes(Call::CreateFile) {
            // A file that was created and could not be sealed is closed again before the error is
            // reported.
            return Err(self.errno);
        }
        self.inner.create_file(name, page, bytes)
    }
    unsafe fn close_file(&self, file: MemoryFile) {
        unsafe { self.inner.close_file(file) };
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        if self.strikes(Call::Reserve) { Err(self.errno) } else { self.inner.reserve(len, align) }
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Release,
            || unsafe { self.inner.release(addr, len) },
            || unsafe { self.inner.release(addr, half(len)) },
        )
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Vacate,
            || unsafe { self.inner.vacate(addr, len) },
            || unsafe { self.inner.vacate(addr, half(len)) },
        )
    }
    unsafe fn map(&self, m: &Mapping) -> Result<(), Errno> {
        self.run(
            Call::Map,
            || unsafe { self.inner.map(m) },
            || unsafe { self.inner.release(m.addr, m.len) },
        )
    }
    unsafe fn map_own(&self, m: &Mapping) -> Result<(), Errno> {
        self.run(
            Call::Map,
            || unsafe { self.inner.map_own(m) },
            || unsafe { self.inner.release(m.addr, m.len) },
        )
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        self.inner.is_mapped(addr, len)
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Exchange,
            || unsafe { self.inner.exchange(from, to, len) },
            || unsafe { self.inner.release(to, len) },
        )
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        self.run(
            Call::Protect,
            || unsafe { self.inner.protect(addr, len, prot) },
            || unsafe { self.inner.protect(addr, half(len), prot) },
        )
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        self.run(
            Call::Advise,
            || unsafe { self.inner.advise(addr, len, advice) },
            || unsafe { self.inner.advise(addr, half(len), advice) },
        )
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        self.run(
            Call::Populate,
            || unsafe { self.inner.populate(addr, len, write) },
            || unsafe { self.inner.populate(addr, half(len), write) },
        )
    }
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Collapse,
            || unsafe { self.inner.collapse(addr, len) },
            || unsafe { self.inner.collapse(addr, half(len)) },
        )
    }
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno> {
        self.run(Call::PreferTables, || self.inner.prefer_tables_on(node), || Ok(()))
    }
    fn allows_node(&self, node: u32) -> bool {
        self.inner.allows_node(node)
    }
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        self.run(
            Call::Lock,
            || unsafe { self.inner.lock(addr, len, on_fault) },
            || unsafe { self.inner.lock(addr, half(len), on_fault) },
        )
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Lock,
            || unsafe { self.inner.unlock(addr, len) },
            || unsafe { self.inner.unlock(addr, half(len)) },
        )
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        self.run(
            Call::Bind,
            || unsafe { self.inner.bind(addr, len, policy) },
            || unsafe { self.inner.bind(addr, half(len), policy) },
        )
    }
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
        self.inner.attributes(ranges)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        if self.strikes(Call::QueryNodes) {
            Err(self.errno)
        } else {
            self.inner.nodes_of(pages, status)
        }
    }
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)> {
        if self.strikes(Call::OpenTracker) {
            // One that was opened is closed again before the error is reported.
            return Err((Call::OpenTracker, self.errno));
        }
        self.inner.open_tracker(ability)
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
        self.run(
            Call::Track,
            || unsafe { self.inner.track(tracker, addr, len, hold) },
            || unsafe { self.inner.track(tracker, addr, half(len), hold) },
        )
    }
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Untrack,
            || unsafe { self.inner.untrack(tracker, addr, len) },
            || unsafe { self.inner.untrack(tracker, addr, half(len)) },
        )
    }
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno> {
        self.run(
            Call::MarkClean,
            || unsafe { self.inner.mark_clean(tracker, addr, len, split) },
            || unsafe { self.inner.mark_clean(tracker, addr, half(len), split) },
        )
    }
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::LetWrite,
            || unsafe { self.inner.let_write(tracker, addr, len) },
            || unsafe { self.inner.let_write(tracker, addr, half(len)) },
        )
    }
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno> {
        // What has been found is lost, and what has been marked stays so.
        let strikes = self.strikes(Call::Scan);
        let part = match self.mode {
            _ if !strikes => len,
            FailMode::Before => return Err(self.errno),
            FailMode::After => len,
            FailMode::Partial => half(len),
        };
        let answer = unsafe { self.inner.scan(tracker, addr, part, mark_clean, found) };
        if strikes { Err(self.errno) } else { answer }
    }
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.run(
            Call::Wake,
            || self.inner.wake(tracker, addr, len),
            || self.inner.wake(tracker, addr, half(len)),
        )
    }
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno> {
        self.run(
            Call::ReadFile,
            || unsafe { self.inner.read_file(file, offset, dst, len) },
            || unsafe { self.inner.read_file(file, offset, dst, half(len)) },
        )
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
