//! A model of the operating system's memory: files of pages, and an address space that maps
//! addresses to them.
//!
//! Each call is one step under one lock, as the kernel's calls are under the lock of the address
//! space. A load or store checks and acts in one step, as the hardware does after `mprotect` has
//! flushed the translations. A copy takes one step per page, so that writers get between its pages.
//! Misuse panics: copying from a hole or from pages that are held, mapping past the end of a file.

use std::cell::Cell;
use std::ops::Range;

use super::model_state::{Entry, NOTHING, State, WORDS, pages, word};
use super::{
    Ability, Advice, Backend, Call, CopyMethod, Descriptor, Errno, Haste, Mapping, MemoryFile,
    PageRegion, Policy, Prot, Tracker, page_is,
};
use crate::error::Error;
use crate::observe::{AttributeRun, Attributes};
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use crate::units::{BASE_PAGE, PageSize};

/// An access that the address space does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFault {
    /// The address.
    pub addr: usize,
    /// Whether it was a store.
    pub write: bool,
}

std::thread_local! {
    /// The node of the page tables that this thread's calls make.
    static TABLES: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The modelled machine. Pages lie on the node that they were bound to, or on node 0.
pub struct Model {
    state: Mutex<State>,
    woken: Condvar,
}

impl Default for Model {
    fn default() -> Self {
        Model::new()
    }
}

impl Model {
    /// An empty address space.
    pub fn new() -> Self {
        let state = Mutex::new(State { next: 0x10_0000, ..State::default() });
        Model { state, woken: Condvar::new() }
    }

    /// A machine with hugetlb pages of 2 MB. A copy of one takes a few steps.
    pub fn with_hugetlb() -> Self {
        let model = Model::new();
        model.state().has_hugetlb = true;
        model
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Makes an access as a CPU or the kernel does: waits while it has to, finds the frame, makes a
    /// page table entry, and notes a write.
    fn access(
        &self,
        addr: usize,
        write: bool,
    ) -> Result<(MutexGuard<'_, State>, (usize, usize)), ModelFault> {
        let mut state = self.state();
        let allows = if write { Prot::writable } else { Prot::readable };
        loop {
            let frame = state.translate(addr, allows).ok_or(ModelFault { addr, write })?;
            let State { space, trackers, .. } = &mut *state;
            let entry = space.get_mut(&(addr / BASE_PAGE)).expect("it was found there");
            // A page without an entry counts too: a marker has taken the entry's place.
            let barrier = entry.tracked.filter(|_| write && entry.clean);
            let barrier = barrier.filter(|tracker| trackers[tracker] == Ability::HoldWriters);
            let tracker = entry.tracked;
            if !(entry.absent && entry.held) && barrier.is_none() {
                entry.absent = false;
                entry.clean &= !write;
                return Ok((state, frame));
            }
            state.waits += 1;
            let ticket = state.waits;
            state.waiting.insert(ticket, addr);
            if let Some(tracker) = tracker {
                *state.came.entry(tracker).or_default() += 1;
            }
            if let Some(tracker) = barrier {
                state.messages.push_back((tracker, addr));
                self.woken.notify_all();
            }
            while state.waiting.contains_key(&ticket) {
                state = self.woken.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
    }

    /// Drops the page table entry of a page, as the kernel may at any time. A page that was clean
    /// is still known to be clean. A page that was written is no longer known to be written.
    pub fn forget(&self, addr: usize) {
        let mut state = self.state();
        state.space.get_mut(&(addr / BASE_PAGE)).expect("a page to forget").absent = true;
    }

    /// How many trackers are open.
    pub fn trackers_open(&self) -> usize {
        self.state().trackers.len()
    }

    /// Whether a thread has to wait if it finds a page of the range without an entry, or writes to
    /// the range.
    pub fn holds(&self, addr: usize, len: usize) -> bool {
        let state = self.state();
        let barrier = |e: &Entry| {
            e.clean
                && e.tracked.is_some_and(|tracker| state.trackers[&tracker] == Ability::HoldWriters)
        };
        state.space.range(pages(addr, len)).any(|(_, e)| e.held || barrier(e))
    }

    /// How many accesses wait for pages that are held.
    pub fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Loads the word at `addr`, as a CPU would.
    pub fn load(&self, addr: usize) -> Result<u64, ModelFault> {
        let (state, (file, page)) = self.access(addr, false)?;
        Ok(state.files[file][page][word(addr)])
    }

    /// Stores the word at `addr`, as a CPU would.
    pub fn store(&self, addr: usize, value: u64) -> Result<(), ModelFault> {
        let (mut state, (file, page)) = self.access(addr, true)?;
        state.files[file][page][word(addr)] = value;
        Ok(())
    }

    /// Closes the descriptor of a file, as other code of the process may do.
    pub fn lose(&self, file: MemoryFile) {
        self.state().lost.insert(file.0.modelled());
    }

    /// Which page of which file is mapped at `addr`.
    pub fn frame_at(&self, addr: usize) -> Option<(MemoryFile, usize)> {
        let state = self.state();
        state
            .space
            .get(&(addr / BASE_PAGE))
            .and_then(|e| e.frame)
            .map(|(f, p)| (MemoryFile(Descriptor::Model(f as i32)), p))
    }

    /// Access, and whether children and core dumps leave the page out, and whether it is locked.
    pub fn attributes_at(&self, addr: usize) -> Option<(Prot, bool, bool, bool)> {
        let state = self.state();
        state.space.get(&(addr / BASE_PAGE)).map(|e| (e.prot, e.dont_fork, e.dont_dump, e.locked))
    }

    /// The node of the page tables that map `addr`: the one that the mapping thread preferred, if
    /// any.
    pub fn tables_at(&self, addr: usize) -> Option<u32> {
        self.state().space.get(&(addr / BASE_PAGE)).and_then(|e| e.tables)
    }

    /// Moves the page at `addr` to another node, as the kernel may at any time.
    pub fn displace(&self, addr: usize, node: u32) {
        let mut state = self.state();
        let frame = state.space.get(&(addr / BASE_PAGE)).and_then(|e| e.frame);
        let (file, page) = frame.expect("a page to displace");
        state.nodes[file][page] = node;
    }

    /// Takes a node out of the cpuset.
    pub fn forbid_node(&self, node: u32) {
        self.state().forbidden.insert(node);
    }

    /// Has a process trace all threads from now on; with `None`, no process traces them.
    pub fn set_tracer(&self, tracer: Option<u32>) {
        self.state().tracer = tracer;
    }

    /// How many pages of address space are in use: a leak shows here.
    pub fn pages_in_use(&self) -> usize {
        self.state().space.len()
    }
}

// SAFETY: its addresses are its own, and it says so.
unsafe impl Backend for Model {
    fn is_host_memory(&self) -> bool {
        false
    }
    fn create_file(&self, _name: &str, page: PageSize, bytes: usize) -> Result<MemoryFile, Errno> {
        let mut state = self.state();
        let exists = page == PageSize::Base || page == PageSize::Huge2M && state.has_hugetlb;
        if !exists {
            return Err(Errno(libc::ENOMEM));
        }
        let number = state.files.len();
        page.is_hugetlb().then(|| state.hugetlb.insert(number));
        state.files.push(vec![[0; WORDS]; bytes / BASE_PAGE]);
        state.nodes.push(vec![0; bytes / BASE_PAGE]);
        Ok(MemoryFile(Descriptor::Model(number as i32)))
    }
    unsafe fn close_file(&self, file: MemoryFile) {
        let mut state = self.state();
        let used = state
            .space
            .values()
            .any(|e| matches!(e.frame, Some((f, _)) if f == file.0.modelled() as usize));
        assert!(!used, "file {} closed while mapped", file.0.modelled());
        state.files[file.0.modelled() as usize].clear();
    }
    fn has_file(&self, file: MemoryFile) -> bool {
        !self.state().lost.contains(&file.0.modelled())
    }
    fn reserve(&self, len: usize, align: usize) -> Result<usize, Errno> {
        let mut state = self.state();
        let addr = state.next.next_multiple_of(align);
        state.next = addr + len + BASE_PAGE;
        state.put(addr, len, |_| NOTHING);
        Ok(addr)
    }
    unsafe fn release(&self, addr: usize, len: usize) -> Result<(), Errno> {
        let mut state = self.state();
        for page in pages(addr, len) {
            state.space.remove(&page);
        }
        Ok(())
    }
    unsafe fn vacate(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.state().put(addr, len, |_| NOTHING);
        Ok(())
    }
    unsafe fn map(&self, m: &Mapping) -> Result<(), Errno> {
        let mut state = self.state();
        let (file, first) = (m.file.0.modelled() as usize, m.offset as usize / BASE_PAGE);
        if state.lost.contains(&m.file.0.modelled()) {
            return Err(Errno(libc::EBADF));
        }
        assert!(
            first + m.len / BASE_PAGE <= state.files[file].len(),
            "mapped past the end of the file"
        );
        let tables = if m.populate { TABLES.get() } else { None };
        state.put(m.addr, m.len, |i| Entry {
            frame: Some((file, first + i)),
            prot: m.prot,
            tables,
            ..NOTHING
        });
        Ok(())
    }
    unsafe fn map_own(&self, m: &Mapping) -> Result<(), Errno> {
        // SAFETY: forwarded to the caller; nobody else takes the model's holes.
        unsafe { self.map(m) }
    }
    fn is_mapped(&self, addr: usize, len: usize) -> bool {
        let state = self.state();
        pages(addr, len).all(|page| state.space.contains_key(&page))
    }
    fn maps(&self, addr: usize, len: usize, file: MemoryFile, offset: u64) -> Result<bool, Errno> {
        let state = self.state();
        let (file, first) = (file.0.modelled() as usize, offset as usize / BASE_PAGE);
        let frame = |page| state.space.get(&page).and_then(|entry| entry.frame);
        Ok(pages(addr, len).zip(first..).all(|(page, of)| frame(page) == Some((file, of))))
    }
    unsafe fn exchange(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        let mut state = self.state();
        let source: Vec<Entry> = pages(from, len).map(|page| state.space[&page]).collect();
        assert!(
            source.iter().all(|e| e.frame.is_some()),
            "page tables of a hole were to be exchanged"
        );
        if source.iter().any(|e| e.frame.is_some_and(|(file, _)| state.hugetlb.contains(&file))) {
            return Err(Errno(libc::EINVAL));
        }
        let of = |e: &Entry| (e.prot, e.dont_fork, e.dont_dump, e.locked, e.tracked);
        if source.iter().any(|e| of(e) != of(&source[0])) {
            // More than one mapping. The kernel has unmapped the target by then.
            pages(to, len).for_each(|page| _ = state.space.remove(&page));
            return Err(Errno(libc::EFAULT));
        }
        let State { trackers, .. } = &*state;
        let ends = |e: &Entry| e.tracked.is_some_and(|by| trackers[&by].only_holds());
        // As on the kernel: whole pages of page table move if the addresses agree. Otherwise the
        // calling thread makes new ones for the entries.
        let agree = (from ^ to).is_multiple_of(512 * BASE_PAGE);
        let tables = |e: &Entry| if agree { e.tables } else { TABLES.get() };
        let moved: Vec<Entry> = source
            .iter()
            .map(|e| Entry { tables: tables(e), ..if ends(e) { e.untracked() } else { *e } })
            .collect();
        state.put(to, len, |i| moved[i]);
        // The kernel takes the lock off the whole mapping of which a part was moved.
        if source[0].locked {
            state.unlock_mapping(from, of);
        }
        state.each(from, len, |e| {
            e.absent = true;
            e.clean = false;
            e.tables = None;
        })
    }
    unsafe fn move_mapping(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        let mut state = self.state();
        if pages(to, len).any(|page| state.space.contains_key(&page)) {
            return Err(Errno(libc::EEXIST));
        }
        let moved: Option<Vec<Entry>> =
            pages(from, len).map(|page| state.space.get(&page).copied()).collect();
        let moved = moved.ok_or(Errno(libc::EFAULT))?;
        pages(from, len).for_each(|page| _ = state.space.remove(&page));
        state.put(to, len, |i| moved[i]);
        Ok(())
    }
    unsafe fn protect(&self, addr: usize, len: usize, prot: Prot) -> Result<(), Errno> {
        self.state().each(addr, len, |e| e.prot = prot)
    }
    unsafe fn advise(&self, addr: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        self.state().each(addr, len, |e| match advice {
            Advice::DontFork => e.dont_fork = true,
            Advice::DoFork => e.dont_fork = false,
            Advice::DontDump => e.dont_dump = true,
            Advice::DoDump => e.dont_dump = false,
            // As after `forget`, pages that were clean are still known to be clean.
            Advice::DropTables => e.absent = true,
            _ => {}
        })
    }
    unsafe fn populate(&self, addr: usize, len: usize, write: bool) -> Result<(), Errno> {
        let tables = TABLES.get();
        for page in pages(addr, len) {
            let (mut state, _) =
                self.access(page * BASE_PAGE, write).map_err(|_| Errno(libc::EFAULT))?;
            let entry = state.space.get_mut(&page).expect("it was just accessed");
            entry.tables = entry.tables.or(tables);
        }
        Ok(())
    }
    unsafe fn collapse(&self, _addr: usize, _len: usize) -> Result<(), Errno> {
        Err(Errno(libc::EINVAL)) // a machine without huge pages
    }
    fn prefer_tables_on(&self, node: Option<u32>) -> Result<(), Errno> {
        TABLES.set(node);
        Ok(())
    }
    fn allows_node(&self, node: u32) -> bool {
        !self.state().forbidden.contains(&node)
    }
    fn tracer(&self) -> Option<u32> {
        self.state().tracer
    }
    unsafe fn lock(&self, addr: usize, len: usize, _on_fault: bool) -> Result<(), Errno> {
        self.state().each(addr, len, |e| e.locked = true)
    }
    unsafe fn unlock(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.state().each(addr, len, |e| e.locked = false)
    }
    unsafe fn bind(&self, addr: usize, len: usize, policy: Policy) -> Result<(), Errno> {
        let (Policy::Preferred(node) | Policy::Bind(node)) = policy else { return Ok(()) };
        let mut state = self.state();
        let frames: Vec<(usize, usize)> =
            state.space.range(pages(addr, len)).filter_map(|(_, e)| e.frame).collect();
        for (file, page) in frames {
            state.nodes[file][page] = node;
        }
        Ok(())
    }
    fn attributes(&self, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Error> {
        let state = self.state();
        let entries =
            ranges.iter().flat_map(|r| state.space.range(pages(r.start, r.end - r.start)));
        let runs = entries.map(|(page, e)| {
            let new = Attributes::of_new_mapping(e.prot);
            let attributes = Attributes {
                dont_fork: e.dont_fork,
                dont_dump: e.dont_dump,
                locked: e.locked,
                ..new
            };
            AttributeRun { start: page * BASE_PAGE, end: (page + 1) * BASE_PAGE, attributes }
        });
        Ok(crate::observe::joined(runs))
    }
    fn nodes_of(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        let state = self.state();
        for (addr, node) in pages.iter().zip(status) {
            let frame = state.space.get(&(addr / BASE_PAGE)).and_then(|e| e.frame);
            *node = frame.map_or(-libc::ENOENT, |(file, page)| state.nodes[file][page] as i32);
        }
        Ok(())
    }
    fn open_tracker(&self, ability: Ability) -> Result<Tracker, (Call, Errno)> {
        let mut state = self.state();
        state.next_tracker += 1;
        let faults = state.next_tracker;
        state.trackers.insert(faults, ability);
        Ok(Tracker { faults: Descriptor::Model(faults), pagemap: None, end: None, modes: [0; 2] })
    }
    unsafe fn close_tracker(&self, tracker: Tracker) {
        let mut state = self.state();
        assert!(
            state.trackers.remove(&tracker.faults.modelled()).is_some(),
            "a tracker was closed twice"
        );
        let State { space, waiting, .. } = &mut *state;
        for (page, entry) in
            space.iter_mut().filter(|(_, e)| e.tracked == Some(tracker.faults.modelled()))
        {
            entry.untrack();
            waiting.retain(|_, addr| *addr / BASE_PAGE != *page);
        }
        self.woken.notify_all();
    }
    fn has_tracker(&self, tracker: Tracker) -> bool {
        self.state().trackers.contains_key(&tracker.faults.modelled())
    }
    fn serve_tracker(&self, tracker: Tracker, write: &mut dyn FnMut(usize)) {
        let mut state = self.state();
        loop {
            if let Some(next) =
                state.messages.iter().position(|(of, _)| *of == tracker.faults.modelled())
            {
                let message = state.messages.remove(next);
                drop(state);
                message.into_iter().for_each(|(_, addr)| write(addr));
                state = self.state();
            } else if state.ended.contains(&tracker.faults.modelled()) {
                return;
            } else {
                state = self.woken.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
    }
    fn end_tracker(&self, tracker: Tracker) {
        self.state().ended.insert(tracker.faults.modelled());
        self.woken.notify_all();
    }
    unsafe fn track(
        &self,
        tracker: Tracker,
        addr: usize,
        len: usize,
        hold: bool,
    ) -> Result<(), Errno> {
        let (mut state, tracker) = (self.state(), Some(tracker.faults.modelled()));
        let hold = hold || tracker.is_some_and(|by| state.trackers[&by].only_holds());
        let tracked = |page| state.space.get(&page).and_then(|e| e.tracked);
        if pages(addr, len).any(|page| tracked(page).is_some() && tracked(page) != tracker) {
            return Err(Errno(libc::EBUSY));
        }
        state.each(addr, len, |e| (e.tracked, e.held) = (tracker, hold))
    }
    unsafe fn untrack(&self, _tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        self.state().each(addr, len, Entry::untrack)
    }
    unsafe fn mark_clean(
        &self,
        _tracker: Tracker,
        addr: usize,
        len: usize,
        _split: bool,
    ) -> Result<(), Errno> {
        self.state().each(addr, len, |e| {
            assert!(e.tracked.is_some(), "marked although nobody follows the writes");
            e.clean = true;
        })
    }
    unsafe fn let_write(&self, tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        let mut state = self.state();
        let followed = |page| {
            state.space.get(&page).is_some_and(|e| e.tracked == Some(tracker.faults.modelled()))
        };
        if !pages(addr, len).all(followed) {
            return Err(Errno(libc::ENOENT));
        }
        state.each(addr, len, |e| e.clean = false)?;
        drop(state);
        self.wake(tracker, addr, len)
    }
    unsafe fn scan(
        &self,
        _tracker: Tracker,
        addr: usize,
        len: usize,
        mark_clean: bool,
        found: &mut [PageRegion],
    ) -> Result<(usize, usize), Errno> {
        let mut state = self.state();
        let mut entries = 0usize;
        for page in pages(addr, len) {
            let e = state.space.get_mut(&page).ok_or(Errno(libc::EFAULT))?;
            let is = match (e.absent, e.clean) {
                (false, true) => page_is::PRESENT,
                (false, false) => page_is::PRESENT | page_is::WRITTEN,
                (true, true) => page_is::SWAPPED,
                (true, false) => 0,
            };
            let (start, end) = ((page * BASE_PAGE) as u64, ((page + 1) * BASE_PAGE) as u64);
            let last = entries.checked_sub(1).map(|last| found[last]);
            if is == page_is::PRESENT {
                continue;
            }
            if last.is_some_and(|last| last.end == start && last.categories == is) {
                found[entries - 1].end = end;
            } else if entries == found.len() {
                return Ok((entries, start as usize));
            } else {
                found[entries] = PageRegion { start, end, categories: is };
                entries += 1;
            }
            e.clean |= mark_clean && is & page_is::WRITTEN != 0;
        }
        Ok((entries, addr + len))
    }
    fn wake(&self, _tracker: Tracker, addr: usize, len: usize) -> Result<(), Errno> {
        let mut state = self.state();
        state.waiting.retain(|_, waits_for| !(addr..addr + len).contains(waits_for));
        self.woken.notify_all();
        Ok(())
    }
    fn count_waiting(&self, tracker: Tracker) -> u64 {
        self.state().came.remove(&tracker.faults.modelled()).unwrap_or(0)
    }
    unsafe fn read_file(
        &self,
        file: MemoryFile,
        offset: u64,
        dst: usize,
        len: usize,
    ) -> Result<(), Errno> {
        for at in (0..len).step_by(BASE_PAGE) {
            let mut state = self.state();
            if state.lost.contains(&file.0.modelled()) {
                return Err(Errno(libc::EBADF));
            }
            let words = state.files[file.0.modelled() as usize][(offset as usize + at) / BASE_PAGE];
            let (file, page) = state.own(dst + at, Prot::writable);
            state.files[file][page] = words;
        }
        Ok(())
    }
    fn hurry(&self, _haste: Haste, _on: bool) -> bool {
        false
    }
    unsafe fn copy(&self, dst: usize, src: usize, len: usize, _method: CopyMethod) {
        let step = self.state().step(src);
        for part in (0..len).step_by(step) {
            let mut state = self.state();
            for at in (part..len.min(part + step)).step_by(BASE_PAGE) {
                let (file, page) = state.own(src + at, Prot::readable);
                let words = state.files[file][page];
                let (file, page) = state.own(dst + at, Prot::writable);
                state.files[file][page] = words;
            }
        }
    }
    unsafe fn zero(&self, addr: usize, len: usize) {
        let mut state = self.state();
        for page in pages(addr, len) {
            let (file, page) = state.own(page * BASE_PAGE, Prot::writable);
            state.files[file][page] = [0; WORDS];
        }
    }
}
