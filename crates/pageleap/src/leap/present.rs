//! Attributes as they are when an area moves, and not as they were when its job began.
//!
//! The program may call `madvise`, `mprotect` and `mlock` on a region that leaps. A commit replaces
//! the mapping, so it must give the new one what the program has set by then. No call tells a
//! library of such a change, and reading the attributes of an area takes 20 to 40 us: a tenth of the
//! time that a small area takes, and several times that of one page. So a look goes ahead, to the
//! rest of the mapping and to the ranges that follow, and counts for [`FRESH_NS`]. An area that met a refused call is always read anew, and so is one that something
//! has kept where it was.
//!
//! What the program changes between that look and the end of the attempt is lost for this area,
//! unless it splits the mapping: then the kernel refuses to move its page tables, and the attempt is
//! repeated with what is there now.

use std::ops::Range;
use std::sync::Arc;

use super::legs::Leg;
use super::site::{Place, Site};
use crate::backend::{Advice, Backend, Call, Errno, Mapping, attributes};
use crate::engine::commit::{SPLIT, Source, map_again};
use crate::engine::effort::Counters;
use crate::engine::slot::{Slot, Span};
use crate::engine::{Frames, Work};
use crate::error::Error;
use crate::job::area::{Area, Reason, Verdict};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::observe::{AttributeRun, Attributes};
use crate::region::RegionInner;
use crate::sync::{AtomicU64, Mutex, Ordering, lock, monotonic_ns};
use crate::units::AddressRange;

/// For how long what was read counts as present.
const FRESH_NS: u64 = 2_000_000;

/// What was read counts for at least this many times as long as it took. Of hugetlb pages, and on
/// old kernels, it takes long.
const PATIENCE: u64 = 50;

/// A look at one area that takes longer is not worth its time.
const CHEAP_NS: u64 = 100_000;

/// How far ahead of an area mappings are looked at, in bytes. Each mapping in there takes time.
const AHEAD: usize = 16 << 20;

/// What a worker knows of mappings.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// In ascending order.
    runs: Vec<AttributeRun>,
    /// When they were read, and how long that took.
    look: Look,
}

/// A look at attributes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    at_ns: u64,
    took_ns: u64,
    /// Whether it was at one area only.
    is_narrow: bool,
}

impl Look {
    /// The look at all ranges before a job begins, which found that many runs of equal attributes.
    pub(super) fn at_start(at_ns: u64, took_ns: u64, runs: usize) -> Look {
        Look { at_ns, took_ns: took_ns / runs.max(1) as u64, is_narrow: true }
    }

    /// However long it took, the look before a job counts for 10 ms at most.
    fn counts_at_start(&self, now_ns: u64) -> bool {
        let took_ns = self.took_ns.min(5 * FRESH_NS / PATIENCE);
        Look { took_ns, ..*self }.counts(now_ns)
    }

    /// This look, with at most twice the time of the last one: another thread may have had the CPU
    /// meanwhile. The more parts a region is in, the longer its looks take.
    fn after(self, last: Look) -> Look {
        Look { took_ns: self.took_ns.min(2 * last.took_ns), ..self }
    }

    /// Whether what was read then still counts.
    fn counts(&self, now_ns: u64) -> bool {
        let lasts = FRESH_NS.max(PATIENCE * self.took_ns);
        now_ns.saturating_sub(self.at_ns) <= lasts
    }

    /// Whether another look has to wait because the last one took so long, although it was at one
    /// area only.
    fn spares(&self, now_ns: u64) -> bool {
        let since = now_ns.saturating_sub(self.at_ns);
        self.is_narrow && self.took_ns > CHEAP_NS && since <= PATIENCE * self.took_ns
    }
}

impl Known {
    /// Nothing but how long the look before the job took. Of hugetlb pages that is a tenth of the
    /// time of a leap, or more, and the next look waits as it does after any other of that length.
    pub(super) fn at_start(look: Look) -> Known {
        Known { runs: Vec::new(), look }
    }

    /// What is known of an address, up to the next change of attributes.
    fn at(&self, addr: usize) -> Option<&AttributeRun> {
        let run = self.runs.get(self.runs.partition_point(|run| run.end <= addr))?;
        (run.start <= addr).then_some(run)
    }
}

/// What the job has read of a leg before it began.
fn at_start(leg: &Leg, region: &RegionInner) -> AttributeRun {
    let Range { start, end } = leg.pages;
    let (start, len) = (region.addr(start), region.bytes(end - start));
    AttributeRun { start, end: start + len, attributes: leg.attributes }
}

/// The first pages of an area, with the attributes of the run in which it begins.
fn present(run: &AttributeRun, area: &Area, region: &RegionInner) -> Present {
    let first = area.pages.start;
    let pages = run.end.saturating_sub(region.addr(first)) / region.page.bytes();
    let end = area.pages.end.min(first + pages as u64);
    Present { pages: first..end, attributes: run.attributes }
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

/// The looks of a job at attributes.
pub(super) struct Looks {
    /// The one at all legs before the job began.
    start: Look,
    /// Whether several workers move areas, each of its own.
    many_workers: bool,
    /// 1 if the program has changed a mapping since the job began.
    has_changed: AtomicU64,
    /// 1 if pages have stayed with advice on huge pages that their user has not given.
    has_advised: AtomicU64,
    /// The last look at mappings that were to be joined.
    joined: Mutex<Option<Look>>,
}

impl Looks {
    pub(super) fn new(start: Look, many_workers: bool) -> Looks {
        let (has_changed, has_advised) = (AtomicU64::new(0), AtomicU64::new(0));
        Looks { start, many_workers, has_changed, has_advised, joined: Mutex::new(None) }
    }

    /// What a worker knows when it begins.
    pub(super) fn known_at_start(&self) -> Known {
        Known::at_start(self.start)
    }

    /// The first pages of an area that have equal attributes now, and these. An error names those
    /// that cannot move: they are not mapped, or parts of the first one have attributes of their own.
    pub(super) fn present(
        &self,
        site: &Site,
        known: &mut Option<Known>,
        area: &Area,
    ) -> Result<Present, (Range<u64>, Reason)> {
        let leg = &site.legs[area.leg];
        let region = site.region(leg.item);
        let addr = region.addr(area.pages.start);
        let now_ns = monotonic_ns();
        let began = at_start(leg, region);
        let is_suspect = area.refused > 0 || area.changed > 0;
        // What nobody may write is moved without a look at writers, so it has to be so still.
        let may_count =
            |run: &&AttributeRun| !is_suspect && !area.kept && run.attributes.prot.writable();
        let last = known.as_ref().filter(|known| known.look.counts(now_ns));
        let last = last.and_then(|known| known.at(addr)).filter(may_count);
        let first = Some(&began).filter(may_count).filter(|_| self.start.counts_at_start(now_ns));
        let has_changed = || self.has_changed.load(Ordering::Relaxed) > 0;
        let spares =
            |last: &Known| !is_suspect && !area.kept && !has_changed() && last.look.spares(now_ns);
        let told = match last.or(first) {
            Some(told) => told.clone(),
            None if known.as_ref().is_some_and(spares) => began,
            None => {
                // After a look that took long the next one is narrow, which tells whether looks do.
                let was_long = known.as_ref().is_some_and(|last| last.look.took_ns > CHEAP_NS);
                let is_narrow = is_suspect || was_long;
                let ranges = self.ahead(site, area, if is_narrow { 0 } else { AHEAD });
                let end = ranges[0].end;
                let runs = match read(site.backend(), &ranges) {
                    Ok(runs) => runs,
                    // No descriptor or no memory for the look. What is known last is probably right.
                    Err(Unread::Refused) => {
                        let last = known.as_ref().and_then(|known| known.at(addr));
                        return Ok(present(last.unwrap_or(&began), area, region));
                    }
                    Err(Unread::Unmapped { until }) => {
                        let pages = (until - addr).div_ceil(region.page.bytes()) as u64;
                        let end = area.pages.end.min(area.pages.start + pages);
                        return Err((area.pages.start..end, Reason::MappingChanged(None)));
                    }
                };
                let took_ns = monotonic_ns().saturating_sub(now_ns);
                let look = Look { at_ns: now_ns, took_ns, is_narrow };
                let look = known.as_ref().map_or(look, |last| look.after(last.look));
                let mut run = runs[0].clone();
                if is_suspect && self.has_advised.load(Ordering::Relaxed) > 0 {
                    run.attributes.huge_pages = leg.attributes.huge_pages;
                }
                // What other workers do to their areas ahead of this one is no change of the program's.
                if run.end < end && !self.many_workers {
                    self.has_changed.store(1, Ordering::Relaxed);
                }
                let runs = if self.many_workers { vec![run.clone()] } else { runs };
                *known = Some(Known { runs, look });
                run
            }
        };
        if told.attributes != leg.attributes {
            self.has_changed.store(1, Ordering::Relaxed);
        }
        let present = present(&told, area, region);
        let first = area.pages.start;
        match present.pages.is_empty() {
            true => Err((first..first + 1, Reason::MappingChanged(None))),
            false => Ok(present),
        }
    }

    /// The addresses to look at for an area: the rest of its leg, as far as that many bytes behind
    /// the area, and the legs that follow it. In ascending order; the area lies in the first one.
    ///
    /// Beside other workers only its own leg, and of that counts the mapping in which the area lies:
    /// they may be moving pages ahead, whose attributes are not those of their user meanwhile.
    fn ahead(&self, site: &Site, area: &Area, bytes: usize) -> Vec<Range<usize>> {
        /// Each may be a mapping of its own.
        const MOST: usize = 64;
        let leg = &site.legs[area.leg];
        let region = site.region(leg.item);
        let addr = region.addr(area.pages.start);
        let limit = addr + region.bytes(area.len()) + bytes;
        let addresses = |leg: &Leg| region.addr(leg.pages.start)..region.addr(leg.pages.end);
        let own = addr..addresses(leg).end.min(limit);
        let mut ranges = Vec::from([own]);
        if bytes == 0 || self.many_workers {
            return ranges;
        }
        let extents = lock(&region.extents);
        let others = site.legs[area.leg + 1..].iter().take(MOST);
        for other in others.take_while(|other| Arc::ptr_eq(site.region(other.item), region)) {
            let Range { start, end } = addresses(other);
            if start < ranges[ranges.len() - 1].end || start >= limit {
                break;
            }
            // Pages that a call has discarded meanwhile have no attributes.
            if extents.backs_all(other.pages.clone()) {
                ranges.push(start..end.min(limit));
            }
        }
        ranges
    }

    /// What follows from a refused call: whether the program has changed the mapping meanwhile.
    pub(super) fn after_refusal(
        &self,
        backend: &dyn Backend,
        work: &Work,
        present: &Present,
        split: bool,
        (call, errno): (Call, Errno),
    ) -> Verdict {
        let Span { addr, len, .. } = work.span;
        let is_split = call == Call::Exchange && errno == SPLIT;
        let same = |run: &AttributeRun| {
            // Pages that could not be mapped by huge pages again have advice of the library's.
            let huge_pages =
                if split { present.attributes.huge_pages } else { run.attributes.huge_pages };
            run.end == addr + len
                && Attributes { huge_pages, ..run.attributes } == present.attributes
        };
        // A look that fails tells of no change.
        let is_other = match read(backend, std::slice::from_ref(&(addr..addr + len))) {
            Ok(runs) => !same(&runs[0]),
            Err(unread) => matches!(unread, Unread::Unmapped { .. }),
        };
        if is_split || is_other {
            self.has_changed.store(1, Ordering::Relaxed);
            return Verdict::Changed(Reason::MappingChanged(Some((call, errno))));
        }
        Verdict::Refused(Reason::Refused(call, errno))
    }

    /// Maps pages that stay by huge pages again. No advice takes back the advice against them, but
    /// a new mapping of the same frames has none. If there can be none, the pages get the advice
    /// for huge pages, which lets the kernel make such entries by itself.
    pub(super) fn map_huge_again(
        &self,
        (site, slot): (&Site, &'static Slot),
        wanted: &Attributes,
        (place, work): (&Place<'_>, &Work),
        counters: &mut Counters,
        books: Books<'_>,
    ) -> Result<(), Error> {
        let backend = site.backend();
        let Work { span, old, .. } = work;
        let Span { addr, len, prot } = *span;
        let Frames { file, offset, alias } = *old;
        let mapping = Mapping { addr, len, file, offset, prot, populate: true };
        if wanted.locked {
            // A mapping that replaces a locked one counts twice. SAFETY: the span is claimed by
            // this job, and its lock is set again.
            let _ = unsafe { backend.unlock(addr, len) };
        }
        let closed_at = monotonic_ns();
        // SAFETY: the span is claimed by this job and maps exactly these frames. The attempt on it
        // is over.
        let (mapped, restored) = unsafe {
            map_again(&site.tools(slot), span, (&mapping, alias), work.haste, counters, || {
                restore_attributes(backend, wanted, span, false)
            })
        };
        // Of two windows the longer one is told.
        counters.window_ns = counters.window_ns.max(monotonic_ns().saturating_sub(closed_at));
        if mapped == Ok(Source::Alias) {
            place.leg.from.mend_hole(place.old);
        }
        if let Err(errno) = mapped {
            self.has_advised.store(1, Ordering::Relaxed);
            if wanted.huge_pages.is_none() {
                // SAFETY: as above.
                let _ = unsafe { backend.advise(addr, len, Advice::HugePage) };
            }
            let text = format!(
                "huge pages stay mapped by base pages, perhaps with another attribute (advice on \
                 huge pages): mmap failed with {errno}"
            );
            books.warn_once(Warning::of(WarningKind::Attributes, text, Call::Map, errno));
        }
        restored
    }

    /// The parts of a mapping that is to be joined, each with equal attributes: as they are now. If
    /// reading them took long, and the program has not been seen to change any, only now and then.
    pub(super) fn to_join(
        &self,
        backend: &dyn Backend,
        leg: &Leg,
        mapping: &Mapping,
    ) -> Vec<(Mapping, Attributes)> {
        let range = mapping.addr..mapping.addr + mapping.len;
        let now_ns = monotonic_ns();
        let last = &mut *lock(&self.joined);
        let has_changed = self.has_changed.load(Ordering::Relaxed) > 0;
        if last.is_some_and(|last| !has_changed && last.spares(now_ns)) {
            return vec![(*mapping, leg.attributes)];
        }
        let runs = backend.attributes(std::slice::from_ref(&range)).unwrap_or_default();
        let took_ns = monotonic_ns().saturating_sub(now_ns);
        let look = Look { at_ns: now_ns, took_ns, is_narrow: true };
        *last = Some(last.map_or(look, |last| look.after(last)));
        let part = |run: AttributeRun| {
            let offset = mapping.offset + (run.start - mapping.addr) as u64;
            let (addr, len, prot) = (run.start, run.end - run.start, run.attributes.prot);
            (Mapping { addr, len, offset, prot, ..*mapping }, run.attributes)
        };
        runs.into_iter().map(part).collect()
    }
}

/// The attributes of ranges, which are in ascending order, beginning at the start of the first.
fn read(backend: &dyn Backend, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Unread> {
    let runs = backend.attributes(ranges).map_err(|_| Unread::Refused)?;
    match runs.first() {
        Some(run) if run.start == ranges[0].start => Ok(runs),
        Some(run) => Err(Unread::Unmapped { until: run.start.min(ranges[0].end) }),
        None => Err(Unread::Unmapped { until: ranges[0].end }),
    }
}

/// Sets again what a new mapping does not have. The span is claimed by the caller's job. Allocates
/// nothing.
pub(super) fn restore_attributes(
    backend: &dyn Backend,
    wanted: &Attributes,
    span: &Span,
    by_exchange: bool,
) -> Result<(), Error> {
    let (addr, len) = (span.addr, span.len);
    // An exchange brings all but the lock along.
    let now = if by_exchange { *wanted } else { Attributes::of_new_mapping(wanted.prot) };
    // SAFETY: the span is claimed by this job.
    let advise = || unsafe { attributes::advise(backend, addr, len, &now, wanted) };
    // Once more, because a shortage may be over, and advice for a part of a huge page keeps it from
    // being moved again.
    let advised = advise().or_else(|_| advise());
    // SAFETY: as above.
    advised
        .map_err(|errno| Error::call(Call::Advise, addr, len, errno))
        .and_then(|()| unsafe { attributes::relock(backend, addr, len, wanted) })
}

/// Tells of attributes that could not be set again.
pub(super) fn tell_lost(books: Books<'_>, restored: Result<(), Error>) {
    if let Err(error) = restored {
        books.warn(Warning::because(
            WarningKind::Attributes,
            "an attribute of the range is lost",
            &error,
        ));
    }
}

/// The error for pages whose mapping the program went on changing.
pub(super) fn mapping_changed(refused: Option<(Call, Errno)>, range: AddressRange) -> Error {
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
