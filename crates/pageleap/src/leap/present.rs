//! Attributes as they are when an area moves, and not as they were when its job began.
//!
//! The program may call `madvise`, `mprotect` and `mlock` on a region that leaps. A commit replaces
//! the mapping, so it must give the new one what the program has set by then. No call tells a
//! library of such a change, and reading the attributes of an area takes 20 to 40 us: a tenth of the
//! time that a small area takes. So what was read of a mapping counts for the rest of the mapping
//! too, for [`FRESH_NS`]. An area that met a refused call is always read anew, and so is one that
//! something has kept where it was.
//!
//! What the program changes between that look and the end of the attempt is lost for this area,
//! unless it splits the mapping: then the kernel refuses to move its page tables, and the attempt is
//! repeated with what is there now.

use std::ops::Range;

use super::attributes;
use super::legs::Leg;
use super::mover::FrameMover;
use crate::backend::{Advice, Call, Errno, Mapping};
use crate::engine::commit::{Effort, SPLIT, map_again};
use crate::engine::slot::{Slot, Span};
use crate::engine::{Frames, Work};
use crate::error::Error;
use crate::job::area::{Area, Reason, Verdict};
use crate::job::books::Books;
use crate::job::report::Warning;
use crate::observe::{AttributeRun, Attributes};
use crate::region::RegionInner;
use crate::sync::{Ordering, lock, monotonic_ns};
use crate::units::AddressRange;

/// For how long what was read counts as present.
const FRESH_NS: u64 = 2_000_000;

/// What was read counts for at least this many times as long as it took. Of hugetlb pages, and on
/// old kernels, it takes long.
const PATIENCE: u64 = 50;

/// A look that takes longer is not worth its time for each mapping.
const CHEAP_NS: u64 = 100_000;

/// How far ahead of an area its mapping is looked at, in bytes. Each mapping in there takes time.
const AHEAD: usize = 16 << 20;

/// What a worker knows of a mapping.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// Which addresses.
    range: Range<usize>,
    attributes: Attributes,
    /// When they were read, and how long that took.
    at_ns: u64,
    took_ns: u64,
}

impl Known {
    /// What the job has read of a leg before it began.
    fn at_start(leg: &Leg, region: &RegionInner, at_ns: u64) -> Known {
        let Range { start, end } = leg.pages;
        let range = region.addr(start)..region.addr(start) + region.bytes(end - start);
        Known { range, attributes: leg.attributes, at_ns, took_ns: 0 }
    }

    /// The look before the job began, which spares others if it took long: of hugetlb pages as long
    /// as a tenth of a leap, or more.
    pub(super) fn before_start(leg: &Leg, at_ns: u64, took_ns: u64) -> Known {
        Known { range: 0..0, attributes: leg.attributes, at_ns, took_ns }
    }

    /// Whether it still counts for an address at that time.
    fn tells(&self, addr: usize, now_ns: u64) -> bool {
        let lasts = FRESH_NS.max(PATIENCE * self.took_ns);
        self.range.contains(&addr) && now_ns.saturating_sub(self.at_ns) <= lasts
    }

    /// The first pages of an area, with these attributes.
    fn present(&self, area: &Area, region: &RegionInner) -> Present {
        let first = area.pages.start;
        let pages = (self.range.end - region.addr(first)) / region.page.bytes();
        let end = area.pages.end.min(first + pages as u64);
        Present { pages: first..end, attributes: self.attributes }
    }

    /// Whether another look has to wait because the last one took so long.
    fn spares(&self, now_ns: u64) -> bool {
        let since = now_ns.saturating_sub(self.at_ns);
        self.took_ns > CHEAP_NS && since <= PATIENCE * self.took_ns
    }
}

/// Why attributes are not known.
enum Unread {
    /// They could not be read.
    Refused,
    /// Nothing is mapped at the start of the range, up to this address.
    Unmapped { until: usize },
}

/// Pages that can move in one attempt, since they have the same attributes.
pub(super) struct Present {
    pub(super) pages: Range<u64>,
    pub(super) attributes: Attributes,
}

impl FrameMover {
    /// The first pages of an area that have equal attributes now, and these. An error names those
    /// that cannot move: they are not mapped, or parts of the first one have attributes of their own.
    pub(super) fn present(
        &self,
        known: &mut Option<Known>,
        leg: &Leg,
        area: &Area,
    ) -> Result<Present, (Range<u64>, Reason)> {
        let region = self.region(leg.item);
        let addr = region.addr(area.pages.start);
        let now_ns = monotonic_ns();
        let began = Known::at_start(leg, region, self.began_ns);
        let is_suspect = area.refused > 0 || area.changed > 0;
        // What nobody may write is moved without a look at writers, so it has to be so still.
        let counts = |known: &&Known| {
            !is_suspect && known.attributes.prot.writable() && known.tells(addr, now_ns)
        };
        let told = [known.as_ref(), Some(&began)].into_iter().flatten().find(counts).cloned();
        let has_changed = || self.has_changed.load(Ordering::Relaxed) > 0;
        let spares = |last: &Known| !is_suspect && !has_changed() && last.spares(now_ns);
        let told = match told {
            Some(told) => told,
            None if known.as_ref().is_some_and(spares) => began,
            None => {
                let ahead = if is_suspect { 0 } else { AHEAD };
                let end = began.range.end.min(addr + region.bytes(area.len()) + ahead);
                let run = match self.read(addr..end) {
                    Ok(run) => run,
                    // No descriptor or no memory for the look. What is known last is probably right.
                    Err(Unread::Refused) => {
                        let last = known.clone().filter(|known| known.range.contains(&addr));
                        return Ok(last.unwrap_or(began).present(area, region));
                    }
                    Err(Unread::Unmapped { until }) => {
                        let pages = (until - addr).div_ceil(region.page.bytes()) as u64;
                        let end = area.pages.end.min(area.pages.start + pages);
                        return Err((area.pages.start..end, Reason::MappingChanged(None)));
                    }
                };
                // The least of all looks, because another thread may have had the CPU meanwhile.
                let took_ns = monotonic_ns().saturating_sub(now_ns);
                let took_ns = known.as_ref().map_or(took_ns, |last| took_ns.min(last.took_ns));
                let (range, mut attributes) = (run.start..run.end, run.attributes);
                if is_suspect && self.has_advised.load(Ordering::Relaxed) > 0 {
                    attributes.huge_pages = leg.attributes.huge_pages;
                }
                // What other workers do to their areas ahead of this one is no change of the program's.
                let is_cut = range.end < end && self.slots.len() == 1;
                if is_cut || attributes != leg.attributes {
                    self.has_changed.store(1, Ordering::Relaxed);
                }
                known.insert(Known { range, attributes, at_ns: now_ns, took_ns }).clone()
            }
        };
        let present = told.present(area, region);
        let first = area.pages.start;
        match present.pages.is_empty() {
            true => Err((first..first + 1, Reason::MappingChanged(None))),
            false => Ok(present),
        }
    }

    /// The attributes at the start of a range, with how far they go.
    fn read(&self, range: Range<usize>) -> Result<AttributeRun, Unread> {
        let runs = self.backend().attributes(std::slice::from_ref(&range));
        let runs = runs.map_err(|_| Unread::Refused)?;
        match runs.into_iter().next() {
            Some(run) if run.start == range.start => Ok(run),
            Some(run) => Err(Unread::Unmapped { until: run.start }),
            None => Err(Unread::Unmapped { until: range.end }),
        }
    }

    /// What follows from a refused call: whether the program has changed the mapping meanwhile.
    pub(super) fn after_refusal(
        &self,
        work: &Work,
        present: &Present,
        split: bool,
        (call, errno): (Call, Errno),
    ) -> Verdict {
        let Span { addr, len, .. } = work.span;
        let is_split = call == Call::Exchange && errno == SPLIT;
        let same = |run: AttributeRun| {
            // Pages that could not be mapped by huge pages again have advice of the library's.
            let huge_pages =
                if split { present.attributes.huge_pages } else { run.attributes.huge_pages };
            run.end == addr + len
                && Attributes { huge_pages, ..run.attributes } == present.attributes
        };
        // A look that fails tells of no change.
        let is_other = match self.read(addr..addr + len) {
            Ok(run) => !same(run),
            Err(unread) => matches!(unread, Unread::Unmapped { .. }),
        };
        if is_split || is_other {
            self.has_changed.store(1, Ordering::Relaxed);
            return Verdict::Changed(Reason::MappingChanged(Some((call, errno))));
        }
        Verdict::Refused(Reason::Refused(call, errno))
    }

    /// Sets again what a new mapping does not have. Allocates nothing.
    pub(super) fn restore_attributes(
        &self,
        wanted: &Attributes,
        span: &Span,
        by_exchange: bool,
    ) -> Result<(), Error> {
        let (addr, len) = (span.addr, span.len);
        // An exchange brings all but the lock along.
        let now = if by_exchange { *wanted } else { Attributes::of_new_mapping(wanted.prot) };
        // SAFETY: the span is claimed by this job.
        let advise = || unsafe { attributes::advise(self.backend(), addr, len, &now, wanted) };
        // Once more, because a shortage may be over, and advice for a part of a huge page keeps it
        // from being moved again.
        let advised = advise().or_else(|_| advise());
        // SAFETY: as above.
        advised
            .map_err(|errno| Error::call(Call::Advise, addr, len, errno))
            .and_then(|()| unsafe { attributes::relock(self.backend(), addr, len, wanted) })
    }

    /// Maps pages that stay by huge pages again. No advice takes back the advice against them, but
    /// a new mapping of the same frames has none. If there can be none, the pages get the advice
    /// for huge pages, which lets the kernel make such entries by itself.
    pub(super) fn map_huge_again(
        &self,
        slot: &'static Slot,
        wanted: &Attributes,
        work: &Work,
        effort: &mut Effort,
        books: Books<'_>,
    ) -> Result<(), Error> {
        let Work { span, old, .. } = work;
        let Span { addr, len, prot } = *span;
        let Frames { file, offset, .. } = *old;
        let mapping = Mapping { addr, len, file, offset, prot, populate: true };
        if wanted.locked {
            // A mapping that replaces a locked one counts twice. SAFETY: the span is claimed by
            // this job, and its lock is set again.
            let _ = unsafe { self.backend().unlock(addr, len) };
        }
        let closed_at = monotonic_ns();
        // SAFETY: the span is claimed by this job and maps exactly these frames. The attempt on it
        // is over.
        let (mapped, restored) = unsafe {
            map_again(&self.tools(slot), span, &mapping, work.haste, effort, || {
                self.restore_attributes(wanted, span, false)
            })
        };
        // Of two windows the longer one is told.
        effort.window_ns = effort.window_ns.max(monotonic_ns().saturating_sub(closed_at));
        if let Err(errno) = mapped {
            self.has_advised.store(1, Ordering::Relaxed);
            if wanted.huge_pages.is_none() {
                // SAFETY: as above.
                let _ = unsafe { self.backend().advise(addr, len, Advice::HugePage) };
            }
            let text = format!(
                "huge pages stay mapped by base pages, perhaps with another attribute (advice on \
                 huge pages): mmap failed with {errno}"
            );
            books.warn_once(Warning::of(text, Call::Map, errno));
        }
        restored
    }

    /// The parts of a mapping that is to be joined, each with equal attributes: as they are now. If
    /// reading them took long, and the program has not been seen to change any, only now and then.
    pub(super) fn to_join(&self, leg: &Leg, mapping: &Mapping) -> Vec<(Mapping, Attributes)> {
        let range = mapping.addr..mapping.addr + mapping.len;
        let now_ns = monotonic_ns();
        let last = &mut *lock(&self.joined_look);
        let has_changed = self.has_changed.load(Ordering::Relaxed) > 0;
        if last.as_ref().is_some_and(|last| !has_changed && last.spares(now_ns)) {
            return vec![(*mapping, leg.attributes)];
        }
        let runs = self.backend().attributes(std::slice::from_ref(&range)).unwrap_or_default();
        let took_ns = monotonic_ns().saturating_sub(now_ns);
        let took_ns = last.as_ref().map_or(took_ns, |last| took_ns.min(last.took_ns));
        *last = Some(Known { range, attributes: leg.attributes, at_ns: now_ns, took_ns });
        let part = |run: AttributeRun| {
            let offset = mapping.offset + (run.start - mapping.addr) as u64;
            let (addr, len, prot) = (run.start, run.end - run.start, run.attributes.prot);
            (Mapping { addr, len, offset, prot, ..*mapping }, run.attributes)
        };
        runs.into_iter().map(part).collect()
    }

    /// Tells of attributes that could not be set again.
    pub(super) fn tell_lost(books: Books<'_>, restored: Result<(), Error>) {
        if let Err(error) = restored {
            books.warn(Warning::because("an attribute of the range is lost", &error));
        }
    }
}

/// The error for pages whose mapping the program went on changing.
pub(super) fn mapping_changed(refused: Option<(Call, Errno)>, addr: usize, len: usize) -> Error {
    let range = AddressRange::new(addr, len);
    let remedy = "leap it once more, when the program does not change its mappings (madvise, \
                  mprotect, mlock, munmap), or set attributes for whole pages";
    match refused {
        Some((call, errno)) => Error::Call { call, range, errno, remedy },
        None => {
            let what = format!("{range} stays where it is: the program has changed its mapping");
            Error::Unsupported { what, remedy }
        }
    }
}
