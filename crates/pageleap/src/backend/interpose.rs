//! Backends that wrap another one: [`Interposer`] decides about each call, and all calls are
//! forwarded here, once for all wrappers.

use std::ops::Range;

use super::{
    Ability, Advice, Backend, Call, CopyMethod, Errno, Haste, Mapping, MemoryFile, PageRegion,
    Policy, Prot, Tracker,
};
use crate::error::Error;
use crate::observe::AttributeRun;
use crate::units::{BASE_PAGE, PageSize};

/// A call that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which one.
    pub call: Call,
    /// The address that it changes, or 0 for a call without one.
    pub addr: usize,
    /// The access that it gives, if it gives one.
    pub prot: Option<Prot>,
    /// The advice that it gives, if it gives one.
    pub advice: Option<Advice>,
}

/// How much of its work a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// The effect of a call that fails half-way: a replacing call has already unmapped its target,
    /// any other has done the first half of its range.
    Half,
}

/// A wrapper around a backend. Every `Interposer` is a [`Backend`]. Its methods may run in a signal
/// handler, so they neither allocate nor lock.
///
/// # Safety
/// [`Interposer::decide`] makes the call at most once. It returns what the whole call returned, or
/// an error.
pub unsafe trait Interposer: Send + Sync {
    /// The backend that gets the calls.
    fn inner(&self) -> &dyn Backend;

    /// Makes a call by `make`, or refuses it. Calls that cannot fail do not come here.
    fn decide<T>(
        &self,
        request: &Request,
        make: impl FnMut(Part) -> Result<T, Errno>,
    ) -> Result<T, Errno>;

    /// Called before each [`Backend::copy`], with its arguments. The copy begins when this returns, so
    /// a test may let other threads store in it: such a store comes before the copy, which sees it.
    fn before_copy(&self, _dst: usize, _src: usize, _len: usize) {}
}

impl Request {
    const fn new(call: Call, addr: usize) -> Self {
        Request { call, addr, prot: None, advice: None }
    }

    const fn of_mapping(mapping: &Mapping) -> Self {
        Request { prot: Some(mapping.prot), ..Request::new(Call::Map, mapping.addr) }
    }
}

impl Part {
    /// The length of this part of a range, in whole base pages. (A call on half of a huge page does
    /// nothing.)
    fn of(self, len: usize) -> usize {
        match self {
            Part::Whole => len,
            Part::Half => (len / 2).next_multiple_of(BASE_PAGE).min(len),
        }
    }
}

// SAFETY of all blocks below: each method forwards its caller's promise about the same range or a
// part of it. The outcomes of half a call are those that the contract of the call names: a hole
// where `map`, `map_own` or `exchange` failed.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl<I: Interposer> Backend for I {
    fn is_host_memory(&self) -> bool {
        self.inner().is_host_memory()
    }
    fn create_file(&self, name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        let request = Request::new(Call::CreateFile, 0);
        self.decide(&request, |_| self.inner().create_file(name, page, bytes))
    }
    unsafe fn close_file(&self, file: MemoryFile) {
        unsafe { self.inner().close_file(file) };
    }
    fn has_file(&self, file: MemoryFile) -> bool {
        self.inner().has_file(file)
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        self.decide(&Request::new(Call::Reserve, 0), |_| self.inner().reserve(len, align))
    }
    fn reserve_low(&self, len: usize, align: usize) -> Result<usize, Errno> {
        self.decide(&Request::new(Call::Reserve, 0), |_| self.inner().reserve_low(len, align))
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Release, addr), |part| unsafe {
            self.inner().release(addr, part.of(len))
        })
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Vacate, addr), |part| unsafe {
            self.inner().vacate(addr, part.of(len))
        })
    }
    unsafe fn map(&self, m: &Mapping) -> Result<(), Errno> {
        self.decide(&Request::of_mapping(m), |part| unsafe {
            match part {
                Part::Whole => self.inner().map(m),
                Part::Half => self.inner().release(m.addr, m.len),
            }
        })
    }
    unsafe fn map_own(&self, m: &Mapping) -> Result<(), Errno> {
        self.decide(&Request::of_mapping(m), |part| unsafe {
            match part {
                Part::Whole => self.inner().map_own(m),
                Part::Half => self.inner().release(m.addr, m.len),
            }
        })
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        self.inner().is_mapped(addr, len)
    }
    fn maps(&self, addr: usize, len: usize, file: MemoryFile, offset: u64) -> Result<bool, Errno> {
        self.inner().maps(addr, len, file, offset)
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Exchange, to), |part| unsafe {
            match part {
                Part::Whole => self.inner().exchange(from, to, len),
                Part::Half => self.inner().release(to, len),
            }
        })
    }
    unsafe fn move_mapping(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::MoveMapping, to), |part| match part {
            Part::Whole => unsafe { self.inner().move_mapping(from, to, len) },
            Part::Half => Ok(()),
        })
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        let request = Request { prot: Some(prot), ..Request::new(Call::Protect, addr) };
        self.decide(&request, |part| unsafe { self.inner().protect(addr, part.of(len), prot) })
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        let request = Request { advice: Some(advice), ..Request::new(Call::Advise, addr) };
        self.decide(&request, |part| unsafe { self.inner().advise(addr, part.of(len), advice) })
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Populate, addr), |part| unsafe {
            self.inner().populate(addr, part.of(len), write)
        })
    }
    unsafe fn collapse(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Collapse, addr), |part| unsafe {
            self.inner().collapse(addr, part.of(len))
        })
    }
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno> {
        self.decide(&Request::new(Call::PreferTables, 0), |part| match part {
            Part::Whole => self.inner().prefer_tables_on(node),
            Part::Half => Ok(()),
        })
    }
    fn allows_node(&self, node: u32) -> bool {
        self.inner().allows_node(node)
    }
    fn tracer(&self) -> Option<u32> {
        self.inner().tracer()
    }
    unsafe fn lock(&self, addr: usize, len: usize, on_fault: bool) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Lock, addr), |part| unsafe {
            self.inner().lock(addr, part.of(len), on_fault)
        })
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Lock, addr), |part| unsafe {
            self.inner().unlock(addr, part.of(len))
        })
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Bind, addr), |part| unsafe {
            self.inner().bind(addr, part.of(len), policy)
        })
    }
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
        self.inner().attributes(ranges)
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        self.decide(&Request::new(Call::QueryNodes, 0), |_| self.inner().nodes_of(pages, status))
    }
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)> {
        let request = Request::new(Call::OpenTracker, 0);
        let opened = self.decide(&request, |_| Ok(self.inner().open_tracker(ability)));
        opened.unwrap_or_else(|errno| Err((Call::OpenTracker, errno)))
    }
    unsafe fn close_tracker(&self, tracker: Tracker) {
        unsafe { self.inner().close_tracker(tracker) };
    }
    fn has_tracker(&self, tracker: Tracker) -> bool {
        self.inner().has_tracker(tracker)
    }
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize)) {
        self.inner().serve_tracker(tracker, write);
    }
    fn end_tracker(&self, tracker: Tracker) {
        self.inner().end_tracker(tracker);
    }
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Track, addr), |part| unsafe {
            self.inner().track(tracker, addr, part.of(len), hold)
        })
    }
    unsafe fn untrack(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Untrack, addr), |part| unsafe {
            self.inner().untrack(tracker, addr, part.of(len))
        })
    }
    unsafe fn mark_clean(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        split: bool,
    ) -> Result<(), Errno> {
        self.decide(&Request::new(Call::MarkClean, addr), |part| unsafe {
            self.inner().mark_clean(tracker, addr, part.of(len), split)
        })
    }
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::LetWrite, addr), |part| unsafe {
            self.inner().let_write(tracker, addr, part.of(len))
        })
    }
    unsafe fn scan(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno> {
        // If it fails after its work, its results are lost, and pages that it has marked stay
        // marked.
        self.decide(&Request::new(Call::Scan, addr), |part| unsafe {
            self.inner().scan(tracker, addr, part.of(len), mark_clean, found)
        })
    }
    fn wake(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.decide(&Request::new(Call::Wake, addr), |part| {
            self.inner().wake(tracker, addr, part.of(len))
        })
    }
    fn count_waiting(&self, tracker: Tracker) -> u64 {
        self.inner().count_waiting(tracker)
    }
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno> {
        self.decide(&Request::new(Call::ReadFile, dst), |part| unsafe {
            self.inner().read_file(file, offset, dst, part.of(len))
        })
    }
    fn hurry(&self, haste: Haste, on: bool) -> bool {
        self.inner().hurry(haste, on)
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize, method: CopyMethod) {
        self.before_copy(dst, src, len);
        unsafe { self.inner().copy(dst, src, len, method) }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        unsafe { self.inner().zero(addr, len) }
    }
}
