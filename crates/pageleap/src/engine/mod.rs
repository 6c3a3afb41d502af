//! Engines: how one area moves while threads read and write it.
//!
//! An engine is a row of [`ENGINES`] and a file of its own in this folder. The row says what the
//! rest of the library has to know of it; its file has the attempt. All else here is shared.
//!
//! * [`choice`]: which engine a job gets, and which engine moves an area. Pure.
//! * [`follow`]: mark, copy, copy again: what engines share that follow writes.
//! * [`commit`]: how new frames come into place; calls that must not be given up.
//! * [`effort`]: what an attempt counts for the job, and what it leaves for the mover to repair.
//! * [`slot`], [`fault`], [`waits`]: where an attempt stands, and the signal handler that asks.
//! * [`notes`], [`crew`]: what a worker shares with its tracker's thread, and with its helpers.
//!
//! Between the moment at which an area is closed and the moment at which it is open again, nothing
//! allocates, locks, logs, calls back or touches the area: the allocator of the process may live
//! there.

pub(crate) mod choice;
pub(crate) mod commit;
pub(crate) mod crew;
pub(crate) mod effort;
#[cfg(not(loom))]
pub(crate) mod fault;
mod follow;
#[cfg(test)]
mod model_tests;
mod mprotect;
pub(crate) mod notes;
mod precopy;
mod precopy_protect;
#[cfg(test)]
pub(crate) mod processor;
pub(crate) mod slot;
mod stop_copy;
pub(crate) mod waits;
mod wp_sync;

use std::fmt;
use std::ops::Range;

use crate::backend::{Ability, Backend, CopyMethod, Haste, MemoryFile, Tracker};
#[cfg(not(loom))]
use crate::backend::{Call, Errno};
use crate::sync::AtomicU64;
use crate::units::{BASE_PAGE, EngineName, PageSize};
pub use choice::EngineChoice;
use commit::AttemptResult;
use crew::Piece;
use effort::{AfterState, Counters, Effort, Parked};
use slot::{Slot, Span};

/// A method by which pages of regions are moved. Memory that no pool owns has methods of its own
/// ([`MemoryEngine`](crate::MemoryEngine)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    /// Pages are copied while they are written to, and the written ones again; then the page tables
    /// are taken away until the new ones come. System calls do not fail because of it
    /// (FUTEX_WAKE_OP may).
    Precopy,
    /// The page tables of an area are taken away, the area is copied, and the page tables of the
    /// new frames come. Nothing is followed: this is the cheapest engine where few threads touch
    /// the area meanwhile, and those few wait for its copy, readers too. For Linux 5.14 and later;
    /// hugetlb pages of 2 MB from Linux 5.18 on, and none of 1 GB. System calls do not fail because
    /// of it (FUTEX_WAKE_OP may).
    StopCopy,
    /// Pages are write-protected and copied. Writers are let in one by one, page by page, and what
    /// they have written is copied again; at last everybody who writes waits until the new frames
    /// have come. For Linux 6.6, which cannot note writes by itself, and for hugetlb pages, whose
    /// writers it holds back while many write. System calls do not fail because of it
    /// (FUTEX_WAKE_OP may).
    WpSync,
    /// Pages are copied as by [`Engine::Precopy`], but then made read-only, as [`Engine::Mprotect`]
    /// does it all the time: system calls that write into an area in that window fail with EFAULT.
    /// Needs no privilege.
    PrecopyProtect,
    /// Read-only areas and a fault handler: the method of page_leap, made correct.
    Mprotect,
}

/// What the rest of the library has to know of an engine.
pub(crate) struct Profile {
    engine: Engine,
    /// Its name in options and reports.
    name: &'static str,
    /// Its number in the C interface.
    number: u32,
    /// The tracker that it needs, if it needs one.
    pub(crate) tracker: Option<TrackerNeed>,
    /// Whether it follows writes: pages are marked, and the marks go along with the page tables.
    follows: bool,
    hugetlb: Hugetlb,
    /// Whether it keeps writers away by protection: they get SIGSEGV, and a system call that would
    /// have to write fails with EFAULT.
    pub(crate) signals: bool,
    /// Whether who reads an area may have to wait until a thread of the job has ended the window.
    readers_wait: bool,
    /// Whether it cannot work where the kernel refuses to exchange page tables, or to take away
    /// those of hugetlb pages.
    needs_exchange: bool,
    /// How large its areas are, unless the user says it.
    pub(crate) areas: Areas,
    /// The most pages of an area, if that is limited: hugetlb pages, or base pages.
    most_pages: Option<usize>,
    /// How it deals with writers who spoil one copy after the other.
    hold: Hold,
    at_low_contention: AtLowContention,
}

/// Which hugetlb pages an engine moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hugetlb {
    None,
    /// Those of 2 MB: everybody would wait for the whole copy of one of 1 GB.
    Of2M,
    All,
}

/// Which engine `auto` takes in place of another one while few threads come to wait: one that closes
/// areas before it copies them.
#[derive(Clone, Copy, Debug)]
struct AtLowContention {
    /// For hugetlb pages.
    hugetlb: Option<Engine>,
    /// For all others.
    other: Option<Engine>,
}

impl AtLowContention {
    const NONE: AtLowContention = AtLowContention { hugetlb: None, other: None };
}

/// What an engine needs of its tracker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackerNeed {
    pub(crate) ability: Ability,
    /// The same in words: "the engine X needs ...".
    words: &'static str,
    pub(crate) messages: Messages,
}

/// What the thread is for that reads the messages of a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Messages {
    /// The kernel holds up each exchange of page tables until its message has been read. Modelled
    /// machines do not.
    Exchanges,
    /// It lets in those who wait to write.
    Writers,
    /// There is no such thread: threads that wait are woken together, by the worker.
    None,
}

/// How large the areas of an engine are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Areas {
    /// Always the same.
    Fixed,
    /// They grow while few pages of an area are written and windows are short, and shrink again.
    /// Areas of hugetlb pages do not: the longer the copy of a page's neighbours takes, the more of
    /// them are written meanwhile.
    Adaptive {
        /// They shrink while more base pages of an area are written during its copy. At this number
        /// the faults and further copies that these pages cost weigh as much as the calls that
        /// every area costs.
        most_written: u64,
    },
    /// As large as is copied in about a third of the time that threads may have to wait.
    Budgeted,
}

/// Whether writers can be kept out of an area before it is copied, where copies beside them are
/// made in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// No: its copies are bounded, and the last one is made in the window.
    No,
    /// Yes, out of a whole area.
    Areas,
    /// Yes; because of what other areas have met, only out of a single page: writers wait as long
    /// as the copy of one page takes.
    Pages,
    /// Out of hugetlb pages, which the [last resort](Engine::LAST_RESORT) moves then.
    HugetlbByLastResort,
}

/// In the order of [`Engine::ALL`].
const ENGINES: [Profile; Engine::ALL.len()] = [
    Profile {
        engine: Engine::Precopy,
        name: "precopy",
        number: 1,
        tracker: Some(TrackerNeed {
            ability: Ability::NoteAndHold,
            words: "writes noted and the kernel's accesses held up",
            messages: Messages::Exchanges,
        }),
        follows: true,
        hugetlb: Hugetlb::None,
        signals: false,
        readers_wait: true,
        needs_exchange: true,
        areas: Areas::Adaptive { most_written: 128 },
        most_pages: None,
        hold: Hold::No,
        at_low_contention: AtLowContention {
            other: Some(Engine::StopCopy),
            ..AtLowContention::NONE
        },
    },
    Profile {
        engine: Engine::StopCopy,
        name: "stop-copy",
        number: 5,
        tracker: Some(TrackerNeed {
            ability: Ability::Hold,
            words: "the kernel's accesses held up",
            messages: Messages::None,
        }),
        follows: false,
        hugetlb: Hugetlb::Of2M,
        signals: false,
        readers_wait: true,
        needs_exchange: true,
        areas: Areas::Budgeted,
        // 16 MB: a thread that touches an area waits for its copy.
        most_pages: Some(4096),
        hold: Hold::No,
        at_low_contention: AtLowContention::NONE,
    },
    Profile {
        engine: Engine::WpSync,
        name: "wp-sync",
        number: 2,
        tracker: Some(TrackerNeed {
            ability: Ability::HoldWriters,
            words: "the kernel's writes held up",
            messages: Messages::Writers,
        }),
        follows: true,
        hugetlb: Hugetlb::All,
        signals: false,
        readers_wait: false,
        needs_exchange: false,
        // A writer sleeps until a thread lets it write.
        areas: Areas::Adaptive { most_written: 24 },
        most_pages: Some(notes::MOST_PAGES),
        hold: Hold::Pages,
        at_low_contention: AtLowContention {
            hugetlb: Some(Engine::StopCopy),
            ..AtLowContention::NONE
        },
    },
    Profile {
        engine: Engine::PrecopyProtect,
        name: "precopy-protect",
        number: 3,
        tracker: Some(TrackerNeed {
            ability: Ability::Note,
            words: "writes noted",
            messages: Messages::Exchanges,
        }),
        follows: true,
        hugetlb: Hugetlb::All,
        signals: true,
        readers_wait: false,
        needs_exchange: false,
        areas: Areas::Adaptive { most_written: 128 },
        most_pages: None,
        hold: Hold::HugetlbByLastResort,
        at_low_contention: AtLowContention {
            other: Some(Engine::Mprotect),
            ..AtLowContention::NONE
        },
    },
    Profile {
        engine: Engine::Mprotect,
        name: "mprotect",
        number: 4,
        tracker: None,
        follows: false,
        hugetlb: Hugetlb::All,
        signals: true,
        readers_wait: false,
        needs_exchange: false,
        areas: Areas::Fixed,
        most_pages: None,
        hold: Hold::Areas,
        at_low_contention: AtLowContention::NONE,
    },
];

// A row is found by its engine's number in the enumeration.
const _: () = {
    let mut at = 0;
    while at < ENGINES.len() {
        assert!(ENGINES[at].engine as usize == at);
        assert!(Engine::ALL[at] as usize == at);
        at += 1;
    }
};

impl Engine {
    /// All that move memory of regions, the best first, for other pages than hugetlb pages
    /// ([`Engine::preferred`]). The last one works always.
    pub const ALL: [Engine; 5] = [
        Engine::Precopy,
        Engine::StopCopy,
        Engine::WpSync,
        Engine::PrecopyProtect,
        Engine::Mprotect,
    ];

    /// The engine that needs nothing: it works on every kernel, for all pages.
    pub(crate) const LAST_RESORT: Engine = Engine::ALL[Engine::ALL.len() - 1];

    pub(crate) const fn profile(self) -> &'static Profile {
        const TABLE: &[Profile; Engine::ALL.len()] = &ENGINES;
        &TABLE[self as usize]
    }

    /// Its name in options and reports.
    pub const fn name(self) -> &'static str {
        self.profile().name
    }

    /// Its number in the C interface; 0 there means that the library chooses.
    pub const fn number(self) -> u32 {
        self.profile().number
    }

    /// The engine with a number of the C interface.
    pub fn by_number(number: u32) -> Option<Engine> {
        ENGINES.iter().find(|row| row.number == number).map(|row| row.engine)
    }

    /// Whether it follows writes: copies pages while they are written, and copies again what was
    /// written.
    pub const fn follows(self) -> bool {
        self.profile().follows
    }

    /// All of [`Engine::ALL`], the best for pages of this size first: `auto` takes the first one
    /// that works. Among hugetlb pages one that follows writes comes before the one that it takes
    /// along while few threads wait, as among others.
    pub fn preferred(page: PageSize) -> [Engine; Engine::ALL.len()] {
        let mut all = Engine::ALL;
        if page.is_hugetlb() {
            let place = |engine| all.iter().position(|one| *one == engine).expect("it is in there");
            let (follows, closes) = (place(Engine::WpSync), place(Engine::StopCopy));
            all.swap(follows, closes);
        }
        all
    }

    /// What it needs of the kernel, for pages other than hugetlb pages; `None` if it works
    /// everywhere.
    pub fn needs(self) -> Option<Ability> {
        self.needs_for(PageSize::Base)
    }

    /// What it needs of the kernel for pages of this size; `None` if it works everywhere.
    pub fn needs_for(self, page: PageSize) -> Option<Ability> {
        self.profile().tracker.map(|need| match need.ability {
            Ability::Hold if page.is_hugetlb() => Ability::HoldHugetlb,
            ability => ability,
        })
    }

    /// Which engine `auto` takes in its place while few threads come to wait: one that closes areas
    /// before it copies them.
    pub(crate) fn at_low_contention(self, page: PageSize) -> Option<Engine> {
        let AtLowContention { hugetlb, other } = self.profile().at_low_contention;
        let engine = if page.is_hugetlb() { hugetlb } else { other };
        engine.filter(|engine| engine.moves(page))
    }

    /// Whether its areas grow and shrink with what is seen of writers and windows, unless the user
    /// gives a size.
    pub const fn areas_grow(self) -> bool {
        !matches!(self.profile().areas, Areas::Fixed)
    }

    /// Whether it can move pages of this size.
    pub const fn moves(self, page: PageSize) -> bool {
        match self.profile().hugetlb {
            Hugetlb::None => !page.is_hugetlb(),
            Hugetlb::Of2M => !matches!(page, PageSize::Huge1G),
            Hugetlb::All => true,
        }
    }

    /// Whether writers may get the signal SIGSEGV, which the library's handler deals with, and
    /// system calls that write into a moving area may fail with EFAULT.
    pub const fn signals(self) -> bool {
        self.profile().signals
    }

    /// Whether a thread that reads a moving area may have to wait until a thread of the job has
    /// ended a window. A debugger that has stopped the job's threads would wait for ever, so a job
    /// that is traced uses other engines.
    pub const fn readers_wait(self) -> bool {
        self.profile().readers_wait
    }

    /// The most bytes of an area, for pages of this size.
    pub(crate) fn most_area_bytes(self, page: PageSize) -> usize {
        let Profile { most_pages, follows, .. } = *self.profile();
        let unit = if follows { followed_page_bytes(page) } else { BASE_PAGE };
        most_pages.map_or(usize::MAX, |pages| (pages * unit).max(page.bytes()))
    }

    /// Whether the kernel moves the entries of a span to the alias of its frames one by one, into
    /// page tables that it makes for them. It does if the userfaultfd has not asked for messages
    /// about moved mappings, in some kernels (from Linux 6.13 on, and in stable ones).
    pub(crate) fn moves_single_entries(self) -> bool {
        self.needs() == Some(Ability::Hold)
    }

    /// The most pages of an area whose writers may be held back because of what other areas have
    /// met, and not only because of its own disturbed copies.
    pub(crate) fn most_held_early(self) -> u64 {
        if self.profile().hold == Hold::Pages { 1 } else { u64::MAX }
    }
}

impl From<Engine> for EngineName {
    fn from(engine: Engine) -> EngineName {
        EngineName::new(engine.name(), engine.number())
    }
}

impl EngineName {
    /// The engine of regions that has this name, if it is one.
    pub fn engine(self) -> Option<Engine> {
        Engine::by_number(self.number())
    }
}

impl PartialEq<Engine> for EngineName {
    fn eq(&self, other: &Engine) -> bool {
        *self == EngineName::from(*other)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The size of the pages by which writes to pages of this size are noted.
pub(crate) fn followed_page_bytes(page: PageSize) -> usize {
    if page.is_hugetlb() { page.bytes() } else { BASE_PAGE }
}

/// What a worker makes its attempts with.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    /// Where the attempt is announced.
    pub(crate) slot: &'a Slot,
    /// Counts the attempts of all slots ([`slot::SlotTable::epoch`]).
    pub(crate) epoch: &'a AtomicU64,
    pub(crate) backend: &'a dyn Backend,
}

impl Work {
    /// Whether a thread of low priority has started the job.
    fn starter_is_low(&self) -> bool {
        self.copying.is_some()
    }

    /// Copies as this thread copies what nobody waits for.
    fn copy_beside(&self, backend: &dyn Backend, copy: impl FnOnce()) {
        let changed = self.copying.filter(|copying| backend.hurry(*copying, true));
        copy();
        if let Some(copying) = changed {
            backend.hurry(copying, false);
        }
    }

    /// The copy of some bytes of the area from `source`, where the old frames can be read.
    fn piece(&self, source: usize, bytes: Range<usize>) -> Piece {
        let (dst, src) = (self.new.alias + bytes.start, source + bytes.start);
        Piece { dst, src, len: bytes.len(), method: self.method }
    }
}

/// Consecutive frames of one memory file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frames {
    /// Where the pool maps them.
    pub(crate) alias: usize,
    pub(crate) file: MemoryFile,
    pub(crate) offset: u64,
}

/// What to move in one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// The addresses, and the access that the user has given them.
    pub(crate) span: Span,
    /// The frames behind the span now.
    pub(crate) old: Frames,
    /// The frames that it gets.
    pub(crate) new: Frames,
    pub(crate) page: PageSize,
    /// Whether the user has locked the span into memory. A lock goes along with page tables, and
    /// an alias must not have it: it would take a share of RLIMIT_MEMLOCK.
    pub(crate) locked: bool,
    /// Whether the page tables of the span and of the new frames' alias may be exchanged. Otherwise
    /// the new frames are mapped by their file.
    pub(crate) may_exchange: bool,
    /// Writers are held back from the start, so that they cannot disturb the attempt.
    pub(crate) hold: bool,
    /// An earlier attempt may have left huge pages mapped by base pages, with advice against huge
    /// ones.
    pub(crate) maybe_split: bool,
    /// The fastest way to copy from the old frames' node to the new frames' node.
    pub(crate) method: CopyMethod,
    /// How to follow writes, if the job has a tracker.
    pub(crate) following: Option<Following>,
    /// How this thread is to be scheduled while others wait for it, if not as usual.
    pub(crate) haste: Option<Haste>,
    /// How it is to be scheduled while it copies what nobody waits for, if not as usual.
    pub(crate) copying: Option<Haste>,
}

/// How to follow the writes to an area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Following {
    pub(crate) tracker: Tracker,
    /// The area is frozen when at most this many base pages have been written since they were
    /// copied.
    pub(crate) freeze_at: u64,
    /// After this many further copies it is frozen anyway.
    pub(crate) max_rounds: u32,
}

/// The state of the alias of the vacated frames after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OldAlias {
    /// As it was.
    Untouched,
    /// It has the page tables of the span, with the access and the attributes of the span.
    HasTables(Entries),
    /// It must be mapped anew: it has page tables for base pages, or attributes that no call takes
    /// back. If `apart`, the kernel has not joined its mapping with its neighbours
    /// ([`Entries::Apart`]).
    Spoilt { apart: bool },
    /// It may be a hole.
    Torn,
}

/// What page table entries have brought along from a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entries {
    /// Nothing.
    Plain,
    /// They are registered with the tracker and do not allow writing.
    Marked,
    /// Their mapping was registered until it moved. So the kernel has not joined it with its
    /// neighbours, and may have moved the entries into new page tables.
    Apart,
}

/// How an attempt ended, and what it has left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptEnd {
    pub(crate) step: AttemptResult,
    pub(crate) counters: Counters,
    pub(crate) after: AfterState,
    pub(crate) old_alias: OldAlias,
    /// Whether windows and written pages say something of the next area.
    pub(crate) telling: bool,
    /// Whether writers disturbed the copy that was made beside them; `None` if no such copy tells.
    pub(crate) disturbed: Option<bool>,
}

/// Runs one attempt by one engine. At the end the span is accessible as its user set it, nobody
/// waits for it, and the slot is idle.
///
/// # Safety
/// Nobody else migrates, grows or discards the pages of the span meanwhile. `old` are their frames.
/// The new frames belong to the job and nobody else accesses them. The backend is valid during the
/// call. If the engine follows writes, the user may write to the span, and another thread reads the
/// messages of the tracker as far as the engine needs it.
pub(crate) unsafe fn attempt(engine: Engine, tools: &Tools<'_>, work: &Work) -> AttemptEnd {
    let mut effort = Effort::default();
    // SAFETY: forwarded to the caller.
    let step = unsafe {
        match engine {
            Engine::Precopy => precopy::attempt(tools, work, &mut effort),
            Engine::WpSync => wp_sync::attempt(tools, work, &mut effort),
            Engine::StopCopy => stop_copy::attempt(tools, work, &mut effort),
            Engine::PrecopyProtect => precopy_protect::attempt(tools, work, &mut effort),
            Engine::Mprotect => mprotect::attempt(tools, work, &mut effort),
        }
    };
    AttemptEnd::of(engine, work, step, effort)
}

impl AttemptEnd {
    /// An attempt that could not be begun.
    #[cfg(not(loom))]
    pub(crate) fn refused(engine: Engine, work: &Work, call: Call, errno: Errno) -> AttemptEnd {
        AttemptEnd::of(engine, work, AttemptResult::Refused(call, errno), Effort::default())
    }

    fn of(engine: Engine, work: &Work, step: AttemptResult, effort: Effort) -> AttemptEnd {
        let Effort { counters, after, .. } = effort;
        let profile = engine.profile();
        let followed = profile.follows;
        // Writes to transparent huge pages are followed by base pages.
        let split = work.maybe_split || followed && work.page == PageSize::Thp;
        let old_alias = match after.parked {
            Parked::No => OldAlias::Untouched,
            Parked::Yes if split || !work.may_exchange => {
                OldAlias::Spoilt { apart: engine.moves_single_entries() }
            }
            Parked::Yes if step != AttemptResult::Migrated || profile.tracker.is_none() => {
                OldAlias::HasTables(Entries::Plain)
            }
            Parked::Yes if followed => OldAlias::HasTables(Entries::Marked),
            Parked::Yes => OldAlias::HasTables(Entries::Apart),
            Parked::Failed => OldAlias::Torn,
        };
        let disturbed = match profile.hold {
            _ if work.hold => None,
            Hold::No => None,
            Hold::Areas => Some(step == AttemptResult::Dirty),
            _ if work.page.is_hugetlb() && step == AttemptResult::Migrated => {
                Some(counters.written > 0)
            }
            _ => None,
        };
        let telling = step == AttemptResult::Migrated && profile.areas != Areas::Fixed;
        AttemptEnd { step, counters, after, old_alias, telling, disturbed }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn each_engine_has_its_row_and_a_name_and_number_of_its_own() {
        for engine in Engine::ALL {
            assert_eq!(engine.name().parse::<EngineChoice>().unwrap(), engine.into());
            let number = |other: Engine| other.number() == engine.number();
            assert_eq!(Engine::ALL.into_iter().filter(|other| number(*other)).count(), 1);
        }
        // What C programs were compiled with never changes.
        let numbers = Engine::ALL.map(|engine| (engine.name(), engine.number()));
        let known = [
            ("precopy", 1),
            ("wp-sync", 2),
            ("precopy-protect", 3),
            ("mprotect", 4),
            ("stop-copy", 5),
        ];
        assert!(known.iter().all(|known| numbers.contains(known)), "{numbers:?}");
    }

    #[test]
    fn the_last_resort_needs_nothing() {
        let Profile { tracker, hugetlb, needs_exchange, .. } = *Engine::LAST_RESORT.profile();
        assert!(tracker.is_none() && hugetlb == Hugetlb::All && !needs_exchange);
    }
}
