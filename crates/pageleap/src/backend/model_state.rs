//! The state of a modelled machine: files of pages, an address space that maps addresses to them, and
//! the accesses that wait.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use super::{Ability, Errno, Prot};
use crate::units::{BASE_PAGE, PageSize};

/// Words of a model page that hold data; the rest of the page is not modelled. Small, so that a
/// model checker copies little.
pub(super) const WORDS: usize = 4;

/// A page of the address space.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// File and page in it; `None` for reserved address space.
    pub(super) frame: Option<(usize, usize)>,
    pub(super) prot: Prot,
    pub(super) dont_fork: bool,
    pub(super) dont_dump: bool,
    pub(super) locked: bool,
    /// The node of the page tables that map it.
    pub(super) tables: Option<u32>,
    /// Whether there is no page table entry: the next access makes one.
    pub(super) absent: bool,
    /// The tracker that follows the writes to it.
    pub(super) tracked: Option<i32>,
    /// Whether it has not been written to since it was marked. A page without an entry keeps this
    /// too.
    pub(super) clean: bool,
    /// Whether a thread that finds no page table entry waits.
    pub(super) held: bool,
}

/// Address space that is reserved only.
pub(super) const NOTHING: Entry = Entry {
    frame: None,
    prot: Prot::NONE,
    dont_fork: false,
    dont_dump: false,
    locked: false,
    tables: None,
    absent: false,
    tracked: None,
    clean: false,
    held: false,
};

impl Entry {
    pub(super) fn untrack(&mut self) {
        *self = self.untracked();
    }

    pub(super) fn untracked(self) -> Entry {
        Entry { tracked: None, held: false, clean: false, ..self }
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) files: Vec<Vec<[u64; WORDS]>>,
    /// The files of hugetlb pages. Such a page is as many base pages here as on a real machine.
    pub(super) hugetlb: BTreeSet<usize>,
    /// Whether the machine has hugetlb pages.
    pub(super) has_hugetlb: bool,
    /// The node of each page of each file.
    pub(super) nodes: Vec<Vec<u32>>,
    /// The address space, by page.
    pub(super) space: BTreeMap<usize, Entry>,
    /// The first address that was never reserved.
    pub(super) next: usize,
    pub(super) forbidden: BTreeSet<u32>,
    /// The process that traces all threads.
    pub(super) tracer: Option<u32>,
    /// The accesses that wait, and their addresses.
    pub(super) waiting: BTreeMap<u64, usize>,
    /// How many accesses have waited so far.
    pub(super) waits: u64,
    /// How many accesses have begun to wait for each tracker since they were last counted.
    pub(super) came: BTreeMap<i32, u64>,
    /// The open trackers, and the ability of each.
    pub(super) trackers: BTreeMap<i32, Ability>,
    pub(super) next_tracker: i32,
    /// Messages that no server has read: a tracker, and the address to which an access waits to
    /// write.
    pub(super) messages: VecDeque<(i32, usize)>,
    /// Trackers whose server has to return.
    pub(super) ended: BTreeSet<i32>,
    /// Files whose descriptors other code has closed.
    pub(super) lost: BTreeSet<i32>,
}

pub(super) fn word(addr: usize) -> usize {
    assert_eq!(addr % 8, 0, "the model knows aligned words only");
    let word = addr % BASE_PAGE / 8;
    assert!(word < WORDS, "the model keeps the first {WORDS} words of a page only");
    word
}

pub(super) fn pages(addr: usize, len: usize) -> Range<usize> {
    assert!(
        addr.is_multiple_of(BASE_PAGE) && len.is_multiple_of(BASE_PAGE) && len > 0,
        "{addr:#x} + {len:#x}"
    );
    addr / BASE_PAGE..(addr + len) / BASE_PAGE
}

impl State {
    pub(super) fn translate(
        &self,
        addr: usize,
        allows: fn(Prot) -> bool,
    ) -> Option<(usize, usize)> {
        self.space.get(&(addr / BASE_PAGE)).filter(|e| allows(e.prot)).and_then(|e| e.frame)
    }

    /// The number of bytes at an address that are copied in one step.
    pub(super) fn step(&self, addr: usize) -> usize {
        let frame = self.space.get(&(addr / BASE_PAGE)).and_then(|e| e.frame);
        let is_hugetlb = frame.is_some_and(|(file, _)| self.hugetlb.contains(&file));
        if is_hugetlb { PageSize::Huge2M.bytes() / 4 } else { BASE_PAGE }
    }

    /// The frame at an address of the caller's own. Panics if the caller would have to wait for it.
    pub(super) fn own(&mut self, addr: usize, allows: fn(Prot) -> bool) -> (usize, usize) {
        let frame = self.translate(addr, allows).expect("a hole was to be copied");
        let entry = self.space.get_mut(&(addr / BASE_PAGE)).expect("it was found there");
        assert!(!(entry.absent && entry.held), "the migrator waits for itself");
        entry.absent = false;
        frame
    }

    /// Changes each page of a range; ENOMEM, without side effect, if it has a hole.
    pub(super) fn each(
        &mut self,
        addr: usize,
        len: usize,
        mut change: impl FnMut(&mut Entry),
    ) -> Result<(), Errno> {
        let range = pages(addr, len);
        if self.space.range(range.clone()).count() != range.len() {
            return Err(Errno(libc::ENOMEM));
        }
        self.space.range_mut(range).for_each(|(_, e)| change(e));
        Ok(())
    }

    /// Unlocks all pages of the mapping at an address: its neighbours with the same attributes, as
    /// `of` shows them, over consecutive pages of one file.
    pub(super) fn unlock_mapping<T: PartialEq>(&mut self, addr: usize, of: impl Fn(&Entry) -> T) {
        let at = addr / BASE_PAGE;
        let first = self.space[&at];
        let belongs = |page: &usize, entry: &Entry| {
            let frame = first.frame.map(|(file, of)| (file, (of + page).wrapping_sub(at)));
            of(entry) == of(&first) && entry.frame == frame
        };
        let before = self.space.range(..at).rev().take_while(|(page, entry)| belongs(page, entry));
        let start = at - before.count();
        let behind = self.space.range(at..).take_while(|(page, entry)| belongs(page, entry));
        let end = at + behind.count();
        self.space.range_mut(start..end).for_each(|(_, entry)| entry.locked = false);
    }

    pub(super) fn put(&mut self, addr: usize, len: usize, entry: impl Fn(usize) -> Entry) {
        for (i, page) in pages(addr, len).enumerate() {
            self.space.insert(page, entry(i));
        }
    }
}
