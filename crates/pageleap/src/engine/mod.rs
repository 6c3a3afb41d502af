//! Engines: how one area moves to other frames while threads read and write it.
//!
//! An engine is a row of [`ENGINES`] and a file of its own in this folder. The row has the
//! properties that choice, retries and area sizes depend on; the file has the attempt. The other
//! modules are shared:
//!
//! * [`choice`]: which engine a job gets, and which engine moves an area. Pure.
//! * [`follow`]: the pre-copy loop (write-protect, copy, copy dirty pages again) of all engines
//!   that have a tracker.
//! * [`commit`]: maps the new frames; repeats calls that must not be given up.
//! * [`tables`]: new page tables for frames that stay.
//! * [`views`]: closes and opens the further mappings of a span.
//! * [`effort`]: an attempt's counters for the job, and the after-state for the mover's repairs.
//! * [`slot`], [`fault`], [`waits`]: the state of an attempt, the SIGSEGV handler that reads it,
//!   and how long threads waited.
//! * [`notes`], [`crew`]: state that a worker shares with its tracker's thread, and with its
//!   helpers.
//!
//! In the window, from closing an area until everybody may use it again, an engine does not
//! allocate, lock, log, call back or touch the area, because the process's allocator may live
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
#[cfg(not(loom))]
pub(crate) mod tables;
pub(crate) mod views;
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
use commit::{Arrival, AttemptResult};
use crew::Piece;
use effort::{AfterState, Counters, Effort, Parked};
use slot::{Slot, Span};
use views::Views;

/// An engine: a method of moving pages of regions to other frames. Memory that no pool owns has
/// methods of its own ([`MemoryEngine`](crate::MemoryEngine)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    /// Pre-copy, as in live migration: pages are copied while threads write to them, and dirty
    /// pages are copied again. Then the page tables are unmapped until those of the new frames
    /// replace them; a thread that touches the area meanwhile waits. System calls do not fail
    /// because of it (FUTEX_WAKE_OP may).
    Precopy,
    /// Stop-and-copy: the area's page tables are unmapped, the area is copied, and the page tables
    /// of the new frames are mapped. Writes are not tracked, so this is the cheapest engine for
    /// areas that few threads touch, but those threads wait for the whole copy, readers too. For
    /// Linux 5.14 and later; hugetlb pages of 2 MB from Linux 5.18 on, and none of 1 GB. System
    /// calls do not fail because of it (FUTEX_WAKE_OP may).
    StopCopy,
    /// Pages are write-protected (userfaultfd, synchronous mode) and copied. A thread of the job
    /// unprotects each page that a writer faults on, and that page is copied again. In the window
    /// all writers wait until the new frames are mapped. For Linux 6.6, which has no asynchronous
    /// write-protection, and for hugetlb pages: while many of them are written, their writers are
    /// held until the copy is done. System calls do not fail because of it (FUTEX_WAKE_OP may).
    WpSync,
    /// As [`Engine::Precopy`], except that the window makes the area read-only by `mprotect`
    /// instead of unmapping it, so system calls that write into the area in that window fail with
    /// EFAULT. Needs no privilege.
    PrecopyProtect,
    /// The area is made read-only by `mprotect` while it is copied, and a SIGSEGV handler detects
    /// writers: the method of page_leap, made correct.
    Mprotect,
}

/// The properties of an engine on which the rest of the library depends.
pub(crate) struct Profile {
    engine: Engine,
    /// Its name in options and reports.
    name: &'static str,
    /// Its number in the C interface.
    number: u32,
    /// The tracker that it needs, if it needs one.
    pub(crate) tracker: Option<TrackerNeed>,
    /// Whether it tracks writes: pages are write-protected, and the marks move with the page
    /// tables.
    follows: bool,
    hugetlb: Hugetlb,
    /// Whether it closes an area by `mprotect`: writers get SIGSEGV, and a system call that would
    /// have to write fails with EFAULT.
    pub(crate) signals: bool,
    /// Whether a thread that reads an area may have to wait until a thread of the job has ended the
    /// window.
    readers_wait: bool,
    /// Whether it depends on the kernel to exchange page tables (`mremap`), or to drop those of
    /// hugetlb pages (`madvise(MADV_DONTNEED)`).
    needs_exchange: bool,
    /// How large its areas are, unless the user says it.
    pub(crate) areas: Areas,
    /// The largest area in pages (hugetlb pages, or base pages), if there is a limit.
    most_pages: Option<usize>,
    /// Whether it can keep writers out before it copies, if they dirty one copy after the other.
    hold: Hold,
    at_low_contention: AtLowContention,
}

/// Which hugetlb pages an engine moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hugetlb {
    None,
    /// Only those of 2 MB, because with one of 1 GB every thread would wait for the whole copy.
    Of2M,
    All,
}

/// Which engine `auto` takes in place of another one while contention is low (few threads wait in
/// windows): an engine that closes areas before it copies them.
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

/// The requirements of an engine on its tracker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackerNeed {
    pub(crate) ability: Ability,
    /// The same in words: "the engine X needs ...".
    words: &'static str,
    pub(crate) messages: Messages,
}

/// The purpose of the thread that reads the messages of a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Messages {
    /// Reads the message that each exchange of page tables (`mremap`) sends, because the kernel
    /// blocks the call until then. Modelled machines do not block it.
    Exchanges,
    /// Unprotects pages for writers that wait (`wp-sync`).
    Writers,
    /// There is no such thread: the worker wakes all waiting threads together.
    None,
}

/// How large the areas of an engine are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Areas {
    /// Always the same.
    Fixed,
    /// They grow while few pages of an area are dirtied and windows are short, and shrink again.
    /// Areas of hugetlb pages do not grow: the longer the copy of a page's neighbours takes, the
    /// more of them are dirtied meanwhile.
    Adaptive {
        /// They shrink while more base pages than this are dirtied during the copy of an area. At
        /// this number the faults and further copies of those pages cost as much as the system
        /// calls that every area needs.
        most_written: u64,
    },
    /// As large as can be copied in about a third of the wait budget.
    Budgeted,
}

/// Whether writers can be kept out of an area before it is copied, if they dirty one copy after the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// No: the number of copies is bounded, and the last one is made in the window.
    No,
    /// Yes, out of a whole area.
    Areas,
    /// Yes, but if other areas' disturbed copies are the reason, only out of a single page, so that
    /// writers wait no longer than the copy of one page takes.
    Pages,
    /// Out of hugetlb pages only, which the [last resort](Engine::LAST_RESORT) then moves.
    HugetlbByLastResort,
}

/// One row for each engine, in the order of [`Engine::ALL`].
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
        // Each dirtied page costs a writer a sleep until a thread lets it write, so fewer are
        // allowed.
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
    /// All engines for regions, in the order in which `auto` prefers them for all pages but hugetlb
    /// pages ([`Engine::preferred`] has the order for those). The last one works on every kernel.
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

    /// Whether it tracks writes: it copies pages while threads write to them, and copies dirty
    /// pages again.
    pub const fn follows(self) -> bool {
        self.profile().follows
    }

    /// All of [`Engine::ALL`] in the order in which `auto` tries them for pages of this size; it
    /// takes the first that works. For hugetlb pages, too, an engine that tracks writes precedes
    /// the engine that replaces it at low contention (`wp-sync` before `stop-copy`).
    pub fn preferred(page: PageSize) -> [Engine; Engine::ALL.len()] {
        let mut all = Engine::ALL;
        if page.is_hugetlb() {
            let place = |engine| all.iter().position(|one| *one == engine).expect("it is in there");
            let (follows, closes) = (place(Engine::WpSync), place(Engine::StopCopy));
            all.swap(follows, closes);
        }
        all
    }

    /// Its requirement on the kernel for pages other than hugetlb pages; `None` if it works
    /// everywhere.
    pub fn needs(self) -> Option<Ability> {
        self.needs_for(PageSize::Base)
    }

    /// Its requirement on the kernel for pages of this size; `None` if it works everywhere.
    pub fn needs_for(self, page: PageSize) -> Option<Ability> {
        self.profile().tracker.map(|need| match need.ability {
            Ability::Hold if page.is_hugetlb() => Ability::HoldHugetlb,
            ability => ability,
        })
    }

    /// Which engine `auto` takes in its place while contention is low (few threads wait in
    /// windows): one that closes areas before it copies them.
    pub(crate) fn at_low_contention(self, page: PageSize) -> Option<Engine> {
        let AtLowContention { hugetlb, other } = self.profile().at_low_contention;
        let engine = if page.is_hugetlb() { hugetlb } else { other };
        engine.filter(|engine| engine.moves(page))
    }

    /// Whether area sizes adapt to the writers and windows of earlier areas, unless the user gives
    /// a size.
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

    /// Whether writers may get SIGSEGV, which the library's handler deals with, and system calls
    /// that write into a moving area may fail with EFAULT.
    pub const fn signals(self) -> bool {
        self.profile().signals
    }

    /// Whether a thread that reads a moving area may have to wait until a thread of the job has
    /// ended a window. If a debugger had stopped the job's threads, it could wait for ever, so a
    /// traced job uses other engines.
    pub const fn readers_wait(self) -> bool {
        self.profile().readers_wait
    }

    /// Whether it copies all of an area while the area is closed.
    pub(crate) fn copies_in_window(self) -> bool {
        self.profile().areas == Areas::Budgeted
    }

    /// The most bytes of an area, for pages of this size.
    pub(crate) fn most_area_bytes(self, page: PageSize) -> usize {
        let Profile { most_pages, follows, .. } = *self.profile();
        let unit = if follows { followed_page_bytes(page) } else { BASE_PAGE };
        most_pages.map_or(usize::MAX, |pages| (pages * unit).max(page.bytes()))
    }

    /// Whether the kernel may move the page-table entries of a span to the alias of its frames one
    /// by one, into new page tables, instead of moving whole page-table pages. Some kernels do
    /// (Linux 6.13 and later, and stable ones) if the userfaultfd has not asked for messages about
    /// `mremap`.
    pub(crate) fn moves_single_entries(self) -> bool {
        self.needs() == Some(Ability::Hold)
    }

    /// The most pages of an area whose writers may be kept out because copies of *other* areas were
    /// disturbed. For the area's own disturbed copies there is no such limit.
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
    /// The engine for regions that has this name; `None` for a method that moves other memory.
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

/// The granularity in bytes at which writes to pages of this size are tracked.
pub(crate) fn followed_page_bytes(page: PageSize) -> usize {
    if page.is_hugetlb() { page.bytes() } else { BASE_PAGE }
}

/// The slot, epoch and backend with which a worker makes its attempts.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    /// The slot in which the attempt is published.
    pub(crate) slot: &'a Slot,
    /// Counts the attempts of all slots ([`slot::SlotTable::epoch`]).
    pub(crate) epoch: &'a AtomicU64,
    pub(crate) backend: &'a dyn Backend,
}

impl Work {
    fn arrival(&self) -> Arrival {
        let Work { span, old, new, may_exchange, .. } = *self;
        Arrival { span, old, new, may_exchange, has_access: false }
    }

    /// Whether a thread of low priority (idle, batch or nice) has started the job.
    fn starter_is_low(&self) -> bool {
        self.copying.is_some()
    }

    /// Copies at the low priority of the job's starter, if it has one, because no thread waits for
    /// this copy.
    fn copy_beside(&self, backend: &dyn Backend, copy: impl FnOnce()) {
        let changed = self.copying.filter(|copying| backend.hurry(*copying, true));
        copy();
        if let Some(copying) = changed {
            backend.hurry(copying, false);
        }
    }

    /// The copy of a byte range of the area. `source` is an address where the old frames can be
    /// read.
    fn piece(&self, source: usize, bytes: Range<usize>) -> Piece {
        let (dst, src) = (self.new.alias + bytes.start, source + bytes.start);
        Piece { dst, src, len: bytes.len(), method: self.method }
    }
}

/// Consecutive frames of one memory file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frames {
    /// Their address in the pool's own mapping.
    pub(crate) alias: usize,
    pub(crate) file: MemoryFile,
    pub(crate) offset: u64,
}

/// The parameters of one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// The addresses, and the access that the user has set on them.
    pub(crate) span: Span,
    /// The frames that the span maps now.
    pub(crate) old: Frames,
    /// The frames that the span is to map.
    pub(crate) new: Frames,
    /// The views of the span. Only `stop-copy` closes them.
    pub(crate) views: Views,
    pub(crate) page: PageSize,
    /// Whether the user has locked the span (`mlock`). A lock moves along with page tables, and an
    /// alias must not get it, because it would count against RLIMIT_MEMLOCK.
    pub(crate) locked: bool,
    /// Whether the page tables of the span and of the new frames' alias may be exchanged. If not,
    /// the file of the new frames is mapped.
    pub(crate) may_exchange: bool,
    /// Writers are kept out from the start, so that they cannot disturb the attempt.
    pub(crate) hold: bool,
    /// An earlier attempt may have left huge pages mapped by base pages, with MADV_NOHUGEPAGE set.
    pub(crate) maybe_split: bool,
    /// The fastest way to copy from the old frames' node to the new frames' node.
    pub(crate) method: CopyMethod,
    /// The tracker and its limits, if the job has a tracker.
    pub(crate) following: Option<Following>,
    /// The scheduling of this thread while others wait for it (for example SCHED_FIFO); `None`
    /// leaves it as it is.
    pub(crate) haste: Option<Haste>,
    /// The scheduling of this thread while it copies and nobody waits; `None` leaves it as it is.
    pub(crate) copying: Option<Haste>,
}

/// How to track the writes to an area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Following {
    pub(crate) tracker: Tracker,
    /// The area is frozen when at most this many base pages are dirty.
    pub(crate) freeze_at: u64,
    /// After this many further copies it is frozen even if more are dirty.
    pub(crate) max_rounds: u32,
}

/// The state of the alias of the vacated frames after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OldAlias {
    /// Unchanged.
    Untouched,
    /// It has the page tables of the span, with the access and the attributes of the span.
    HasTables(Entries),
    /// It must be mapped anew, because it has page tables for base pages, or attributes that no
    /// call reverts. If `apart`, the kernel has not joined its mapping with its neighbours
    /// ([`Entries::Apart`]).
    Spoilt { apart: bool },
    /// It may be a hole.
    Torn,
}

/// The state of page-table entries that moved from a span to an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entries {
    /// Ordinary entries.
    Plain,
    /// They are registered with the tracker and write-protected.
    Marked,
    /// Their mapping was registered until it moved, so the kernel has not joined it with its
    /// neighbours, and may have moved the entries into new page tables.
    Apart,
}

/// How an attempt ended, and in which state it left the span and its aliases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptEnd {
    pub(crate) step: AttemptResult,
    pub(crate) counters: Counters,
    pub(crate) after: AfterState,
    pub(crate) old_alias: OldAlias,
    /// Whether windows and dirty pages of this attempt are used to size the next area.
    pub(crate) telling: bool,
    /// Whether writers dirtied the copy that was made beside them; `None` if this attempt does not
    /// show it.
    pub(crate) disturbed: Option<bool>,
}

/// Runs one attempt by one engine. At the end the span has the user's access again, nobody waits
/// for it, and the slot is idle.
///
/// # Safety
/// Nobody else migrates, grows or discards the pages of the span meanwhile. `old` are their frames.
/// The new frames belong to the job and nobody else accesses them. The backend is valid during the
/// call. If the engine follows writes, the user may write to the span, and another thread reads the
/// messages of the tracker as far as the engine needs it.
pub(crate) unsafe fn attempt(engine: Engine, tools: &Tools<'_>, work: &Work) -> AttemptEnd {
    debug_assert!(work.views.is_empty() || engine == Engine::StopCopy, "{engine} closes no views");
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
    /// The end of an attempt that failed before it began.
    #[cfg(not(loom))]
    pub(crate) fn refused(engine: Engine, work: &Work, call: Call, errno: Errno) -> AttemptEnd {
        AttemptEnd::of(engine, work, AttemptResult::Refused(call, errno), Effort::default())
    }

    fn of(engine: Engine, work: &Work, step: AttemptResult, effort: Effort) -> AttemptEnd {
        let Effort { counters, after, .. } = effort;
        let profile = engine.profile();
        let followed = profile.follows;
        // Writes to transparent huge pages are tracked by base pages, so their page tables were
        // split.
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
        // Numbers never change, because C programs have been compiled with them.
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
