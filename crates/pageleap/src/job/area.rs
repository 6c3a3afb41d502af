//! Areas, and the result of an attempt on one.

use std::fmt;
use std::ops::Range;

use super::pace::Seen;
use crate::backend::{Call, Errno};
use crate::engine::choice::{AreaEngine, Why};
use crate::engine::effort::Counters;
use crate::units::EngineName;

/// Consecutive pages that are moved in one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    /// The item that the pages belong to.
    pub(crate) item: usize,
    /// The leg of the item: a stretch, numbered by the mover, whose ends no area crosses.
    pub(crate) leg: usize,
    /// Pages of the item's source.
    pub(crate) pages: Range<u64>,
    /// Disturbed copies so far, of this area or of areas that it was split from.
    pub(crate) disturbed: u32,
    /// Attempts that ended because a system call was refused.
    pub(crate) refused: u32,
    /// Attempts that ended because the program had changed the mapping.
    pub(crate) changed: u32,
    /// Whether it has been kept in place, by a guard for example.
    pub(crate) kept: bool,
    /// The reason of the first attempt that ended by a refusal or a changed mapping. It is reported
    /// as the cause, even if later attempts end for other reasons.
    pub(crate) cause: Option<Reason>,
}

impl Area {
    /// An area that has not been tried.
    pub(crate) fn new(item: usize, leg: usize, pages: Range<u64>) -> Self {
        Area { item, leg, pages, disturbed: 0, refused: 0, changed: 0, kept: false, cause: None }
    }

    /// Whether it has not been tried.
    pub(crate) fn is_new(&self) -> bool {
        self.disturbed == 0 && self.refused == 0 && self.changed == 0
    }

    /// The reason to report if the area stays, and its last attempt has ended for the reason `why`.
    pub(crate) fn cause_or(&self, why: Reason) -> Reason {
        match why {
            Reason::DescriptorLost => why,
            why => self.cause.unwrap_or(why),
        }
    }

    /// Number of pages.
    pub(crate) fn len(&self) -> u64 {
        self.pages.end - self.pages.start
    }

    /// An area of other pages with the same history: a part of this one, or pages beside it.
    pub(crate) fn with_pages(&self, pages: Range<u64>) -> Area {
        Area { pages, ..self.clone() }
    }

    /// Splits off the pages before the first multiple of `stride` inside the area, or all of them.
    /// For example, of pages 5..40 with a stride of 16 it takes 5..16.
    pub(crate) fn take_front(&mut self, stride: u64) -> Area {
        let at = ((self.pages.start / stride + 1) * stride).min(self.pages.end);
        let front = self.with_pages(self.pages.start..at);
        self.pages.start = at;
        front
    }
}

/// Why pages stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Writers disturbed the copy.
    Written,
    /// A guard keeps the pages in their frames ([`Region::pin`](crate::Region::pin)).
    Guarded,
    /// A system call was refused.
    Refused(Call, Errno),
    /// A thread blocks SIGSEGV. The remaining engine raises that signal, and the kernel would kill
    /// the process.
    SignalBlocked,
    /// Another SIGSEGV handler was installed over the library's, and would get the faults that the
    /// remaining engine raises.
    HandlerReplaced,
    /// The job was stopped before it tried the page; [`Report::ended`](crate::Report::ended) says
    /// why.
    Stopped,
    /// No page is present: the process has not touched it.
    Absent,
    /// The page has been swapped out.
    SwappedOut,
    /// Nothing is mapped there.
    Unmapped,
    /// It is the kernel's zero page, mapped for a page that has only been read.
    ZeroPage,
    /// The page is mapped more than once, and such pages were not asked for
    /// ([`KernelMigration::shared`](crate::KernelMigration::shared)).
    Shared,
    /// The kernel moves no pages of such mappings: memory of a device, of the kernel, or secret.
    Unmovable,
    /// The kernel refused to move the page at each try: the page is pinned for I/O, locked or being
    /// written back, or another task has isolated it.
    InUse,
    /// The destination node has too little free memory to take the page and leave its other users
    /// enough ([`KernelMigration::fill`](crate::KernelMigration::fill)).
    NoRoom,
    /// The process has ended, or runs another program now.
    ProcessEnded,
    /// The process ended, or began to run another program, during the call that was to move the
    /// page, so it is unknown whether the page moved.
    Uncertain,
    /// The page lies on a node from which no page was to move
    /// ([`KernelMigration::from_nodes`](crate::KernelMigration::from_nodes)).
    OtherNode,
    /// The page was on its destination node, and has moved on since. The kernel moves folios (a
    /// huge page, or a smaller group of pages) as a whole, and another part of its folio was to go
    /// elsewhere; or somebody else has moved it.
    MovedOn,
    /// The page belongs to a transparent huge page, and the destination node has no free block of
    /// 2 MB. The kernel would reclaim memory to make one, or split the page
    /// ([`KernelMigration::fill`](crate::KernelMigration::fill) allows that).
    NoFreeBlock,
    /// Other code of this process has closed a descriptor that the job needs
    /// ([`DescriptorLost`](crate::Error::DescriptorLost)).
    DescriptorLost,
    /// Another process traces the job's threads (`ptrace`: strace, a debugger), and would wait for
    /// ever for a page that the engine has unmapped
    /// ([`Engine::readers_wait`](crate::Engine::readers_wait)).
    Traced,
    /// The program changed the mapping (`madvise`, `mprotect`, `mlock`, `munmap`) at each try, or
    /// has set attributes on a part of the page. Contains the first call that was refused because
    /// of it, if any.
    MappingChanged(Option<(Call, Errno)>),
    /// A call has discarded the page ([`Region::discard`](crate::Region::discard)) or backed it, or
    /// was about to.
    Discarded,
    /// Only page tables were to move ([`PageTableMigration`](crate::PageTableMigration)), and the
    /// page of page table that maps this page also maps others: outside of the range, in frames that
    /// are not consecutive, with other attributes, or discarded meanwhile.
    SharedTable,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Written => f.write_str("threads wrote to it while it was copied"),
            Reason::Guarded => f.write_str("a guard keeps it in its frame"),
            Reason::Refused(call, errno) => write!(f, "{call} failed with {errno}"),
            Reason::SignalBlocked => f.write_str("a thread blocks SIGSEGV"),
            Reason::HandlerReplaced => {
                f.write_str("another SIGSEGV handler was installed over pageleap's")
            }
            Reason::Stopped => f.write_str("the job was stopped before it was tried"),
            Reason::Absent => f.write_str("no page is present"),
            Reason::SwappedOut => f.write_str("it is swapped out"),
            Reason::Unmapped => f.write_str("nothing is mapped there"),
            Reason::ZeroPage => f.write_str("it is the kernel's page of zeros"),
            Reason::Shared => f.write_str("it is mapped more than once"),
            Reason::Unmovable => f.write_str("it is memory of a device, of the kernel, or secret"),
            Reason::InUse => f.write_str("it is in use: pinned for I/O, locked, or written back"),
            Reason::NoRoom => f.write_str("the node has no room for it that leaves others theirs"),
            Reason::ProcessEnded => {
                f.write_str("the process has ended, or runs another program now")
            }
            Reason::Uncertain => {
                f.write_str("the process ended during the call: it may have moved or not")
            }
            Reason::OtherNode => f.write_str("it lies on a node from which nothing was to move"),
            Reason::DescriptorLost => {
                f.write_str("other code of this process has closed a descriptor of pageleap's")
            }
            Reason::Traced => f.write_str(
                "another process traces the job's threads, and would wait for ever for a page that \
                 is taken away",
            ),
            Reason::MappingChanged(None) => f.write_str("the program has changed its mapping"),
            Reason::MappingChanged(Some((call, errno))) => {
                write!(f, "the program has changed its mapping: {call} failed with {errno}")
            }
            Reason::Discarded => f.write_str("the program has discarded it, or was about to"),
            Reason::SharedTable => f.write_str("its page table also maps other mappings"),
            Reason::NoFreeBlock => f.write_str("the node has no free block of 2 MB"),
            Reason::MovedOn => {
                f.write_str("it has moved on, with other parts of a huge page or by somebody else")
            }
        }
    }
}

/// The result of an attempt for some pages, and how the job continues with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// They have moved.
    Moved,
    /// Writers disturbed the copy: try again, in parts.
    Disturbed,
    /// They have to stay for now ([`Mover::is_kept`](super::Mover::is_kept)): retry when they are
    /// free.
    Kept(Reason),
    /// A call was refused: try again.
    Refused(Reason),
    /// The program has changed the mapping: read its attributes again and retry, in smaller parts.
    Changed(Reason),
    /// Retrying is useless.
    GivenUp(Reason),
    /// They are not to move, because they lie on their node already, or for this reason. Pages that
    /// an earlier attempt has moved still count as moved.
    Left(Option<Reason>),
    /// Try again later, together with all other such pages of the area.
    Later(Reason),
    /// An earlier attempt has dealt with them; they only lie between pages that are retried.
    AsBefore,
}

impl Verdict {
    /// The verdict to record when no further attempt is possible.
    pub(crate) fn given_up(self) -> Verdict {
        match self {
            Verdict::Refused(why) | Verdict::Changed(why) => Verdict::GivenUp(why),
            other => other,
        }
    }
}

/// Runs of pages of an area in ascending order, each with its verdict.
pub(crate) type Runs = Vec<(Range<u64>, Verdict)>;

/// Sorts verdicts by page, and joins neighbours that are equal.
pub(crate) fn joined(mut verdicts: Runs) -> Runs {
    verdicts.sort_by_key(|(pages, _)| pages.start);
    let mut runs: Runs = Vec::new();
    for (pages, verdict) in verdicts {
        match runs.last_mut() {
            Some((last, same)) if last.end == pages.start && *same == verdict => {
                last.end = pages.end;
            }
            _ => runs.push((pages, verdict)),
        }
    }
    runs
}

/// The method that has moved pages or has tried to, and why it was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct By {
    pub(crate) engine: EngineName,
    pub(crate) why: Why,
}

impl From<AreaEngine> for By {
    fn from(AreaEngine { engine, why }: AreaEngine) -> By {
        By { engine: engine.into(), why }
    }
}

/// The result of an attempt.
#[derive(Debug)]
pub(crate) struct AreaOutcome {
    /// Verdicts on the pages of the area. Pages without a verdict were not tried.
    pub(crate) runs: Runs,
    /// The method that made the attempt.
    pub(crate) by: By,
    /// The attempt's counters.
    pub(crate) counters: Counters,
    /// Measurements from which the next area is sized, if they count.
    pub(crate) seen: Option<Seen>,
    /// Whether writers disturbed the copy, or would have; `None` if that is unknown.
    pub(crate) disturbed: Option<bool>,
}

impl AreaOutcome {
    /// No attempt was made, and none will be.
    pub(crate) fn given_up(by: impl Into<By>, area: &Area, why: Reason) -> AreaOutcome {
        AreaOutcome::not_made(by, area.pages.clone(), Verdict::GivenUp(why))
    }

    /// No attempt was made, because `pages` of the area have to stay for now. The others can be
    /// tried at once.
    pub(crate) fn kept(by: impl Into<By>, pages: Range<u64>, why: Reason) -> AreaOutcome {
        AreaOutcome::not_made(by, pages, Verdict::Kept(why))
    }

    /// No attempt was made; `verdict` says how to continue with these pages.
    pub(crate) fn not_made(by: impl Into<By>, pages: Range<u64>, verdict: Verdict) -> AreaOutcome {
        let runs = vec![(pages, verdict)];
        AreaOutcome {
            runs,
            by: by.into(),
            counters: Counters::default(),
            seen: None,
            disturbed: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_aligned_and_cover_the_leg() {
        let mut rest = Area::new(0, 0, 3..20);
        let pages = [(); 3].map(|()| rest.take_front(8).pages);
        assert_eq!(pages, [3..8, 8..16, 16..20]);
        assert!(rest.pages.is_empty());
    }

    #[test]
    fn each_reason_has_words_of_its_own() {
        let reasons = [
            Reason::Written,
            Reason::Guarded,
            Reason::Refused(Call::Protect, Errno(libc::ENOMEM)),
            Reason::SignalBlocked,
            Reason::HandlerReplaced,
            Reason::Stopped,
            Reason::Absent,
            Reason::SwappedOut,
            Reason::Unmapped,
            Reason::ZeroPage,
            Reason::Shared,
            Reason::Unmovable,
            Reason::InUse,
            Reason::NoRoom,
            Reason::ProcessEnded,
            Reason::Uncertain,
            Reason::OtherNode,
            Reason::MovedOn,
            Reason::NoFreeBlock,
            Reason::DescriptorLost,
            Reason::Traced,
            Reason::MappingChanged(None),
            Reason::MappingChanged(Some((Call::Exchange, Errno(libc::EFAULT)))),
            Reason::Discarded,
            Reason::SharedTable,
        ];
        for reason in reasons {
            let same = |other: &&Reason| other.to_string() == reason.to_string();
            assert_eq!(reasons.iter().filter(same).count(), 1, "{reason}");
        }
    }
}
