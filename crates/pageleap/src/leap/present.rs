//! Reads the attributes of an area (protection, `madvise` advice, `mlock`) when it moves, and not
//! only when its job begins.
//!
//! The program may call `madvise`, `mprotect` and `mlock` on a region that leaps. A commit replaces
//! the mapping, so the new mapping has to get the attributes that the program has set by then. No
//! call tells a library of such a change, and reading the attributes of an area takes 20 to 40 us:
//! a tenth of the time that a small area takes, and several times that of one page. So one reading
//! (a *look*) also covers the rest of the mapping and the ranges that follow, and it counts as
//! current for [`FRESH_NS`]. Attributes are always read anew for an area that met a refused call or
//! was kept where it was.
//!
//! A change between that look and the end of the attempt is lost for this area, unless it splits
//! the mapping. Then the kernel refuses to move the page tables (EFAULT from `mremap`), and the
//! attempt is repeated with the attributes that are there now.

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

/// How long a look counts as current, at least.
const FRESH_NS: u64 = 2_000_000;

/// A look counts as current for this many times its own duration, if that is longer than
/// [`FRESH_NS`]. Looks at hugetlb pages, and on old kernels, take long.
const PATIENCE: u64 = 50;

/// If a look at one area takes longer than this, the next looks are left out for some time
/// ([`Look::spares`]).
const CHEAP_NS: u64 = 100_000;

/// How far ahead of an area attributes are read, in bytes. Each mapping in there takes time.
const AHEAD: usize = 16 << 20;

/// The attributes that a worker has read last.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// In ascending order.
    runs: Vec<AttributeRun>,
    /// When they were read, and how long that took.
    look: Look,
}

/// A reading of attributes: its time, its duration and its extent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    at_ns: u64,
    took_ns: u64,
    /// Whether it covered one area only.
    is_narrow: bool,
}

impl Look {
    /// The look at all ranges before a job begins. Its duration is divided by the number of `runs`
    /// (parts with equal attributes) that it found, so that it compares with a look at one area.
    pub(super) fn at_start(at_ns: u64, took_ns: u64, runs: usize) -> Look {
        Look { at_ns, took_ns: took_ns / runs.max(1) as u64, is_narrow: true }
    }

    /// A look counts for 50 times its duration, but the look before a job for 10 ms at most.
    fn counts_at_start(&self, now_ns: u64) -> bool {
        let took_ns = self.took_ns.min(5 * FRESH_NS / PATIENCE);
        Look { took_ns, ..*self }.counts(now_ns)
    }

    /// This look, with its duration limited to twice that of the last one, because this thread may
    /// have lost the CPU meanwhile. When a region gets more parts, durations do grow, over several
    /// looks.
    fn after(self, last: Look) -> Look {
        Look { took_ns: self.took_ns.min(2 * last.took_ns), ..self }
    }

    /// Whether the attributes read then still count as current.
    fn counts(&self, now_ns: u64) -> bool {
        let lasts = FRESH_NS.max(PATIENCE * self.took_ns);
        now_ns.saturating_sub(self.at_ns) <= lasts
    }

    /// Whether to do without another look for now, because this one took long although it covered
    /// one area only.
    fn spares(&self, now_ns: u64) -> bool {
        let since = now_ns.saturating_sub(self.at_ns);
        self.is_narrow && self.took_ns > CHEAP_NS && since <= PATIENCE * self.took_ns
    }
}

impl Known {
    /// Has no attributes, only the duration of the look before the job. For hugetlb pages that is a
    /// tenth of the time of a leap, or more, so the next look waits as after any other look of that
    /// duration.
    pub(super) fn at_start(look: Look) -> Known {
        Known { runs: Vec::new(), look }
    }

    /// The run of equal attributes that contains an address, if it has been read.
    fn at(&self, addr: usize) -> Option<&AttributeRun> {
        let run = self.runs.get(self.runs.partition_point(|run| run.end <= addr))?;
        (run.start <= addr).then_some(run)
    }
}

/// The attributes of a leg as they were read before the job began.
fn at_start(leg: &Leg, region: &RegionInner) -> AttributeRun {
    let Range { start, end } = leg.pages;
    let (start, len) = (region.addr(start), region.bytes(end - start));
    AttributeRun { start, end: start + len, attributes: leg.attributes }
}

/// The first pages of an area, with the attributes of the run in which it begins. No pages, if not
/// even one whole page has equal attributes.
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

/// How a job reads attributes, and the observations that all its workers share.
pub(super) struct Looks {
    /// The look at all legs before the job began.
    start: Look,
    /// Whether several workers move areas, each of its own.
    many_workers: bool,
    /// 1 if the program has changed a mapping since the job began.
    has_changed: AtomicU64,
    /// 1 if pages have stayed with advice on huge pages (MADV_NOHUGEPAGE, MADV_HUGEPAGE) of the
    /// library's.
    has_advised: AtomicU64,
    /// The last look at a mapping that was to be joined.
    joined: Mutex<Option<Look>>,
}

impl Looks {
    pub(super) fn new(start: Look, many_workers: bool) -> Looks {
        let (has_changed, has_advised) = (AtomicU64::new(0), AtomicU64::new(0));
        Looks { start, many_workers, has_changed, has_advised, joined: Mutex::new(None) }
    }

    /// The state with which a worker begins.
    pub(super) fn known_at_start(&self) -> Known {
        Known::at_start(self.start)
    }

    /// The first pages of an area that have equal attributes now, with these attributes. An error
    /// names pages that cannot move: they are not mapped, or parts of the first page have
    /// attributes of their own.
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
        // Engines do not follow writes to read-only pages. So the attributes of such pages are read
        // anew each time, in case the program has made them writable.
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
                // After a long look the next one covers this area only, which tells whether even
                // such looks are long.
                let was_long = known.as_ref().is_some_and(|last| last.look.took_ns > CHEAP_NS);
                let is_narrow = is_suspect || was_long;
                let ranges = self.ahead(site, area, if is_narrow { 0 } else { AHEAD });
                let end = ranges[0].end;
                let runs = match read(site.backend(), &ranges) {
                    Ok(runs) => runs,
                    // No descriptor or no memory for the look. The last known attributes are
                    // probably right.
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
                // With several workers, other attributes further on may come from another worker's
                // attempt, and need not be a change by the program.
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

    /// The addresses to look at for an area, in ascending order: the rest of its leg, beginning
    /// with the area, and the legs that follow. They end at most `bytes` behind the area.
    ///
    /// With several workers only the area's own leg is read, and only the run in which the area
    /// lies is used. Other workers may be moving pages ahead, whose attributes differ meanwhile.
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

    /// The verdict after a refused call: has the program changed the mapping meanwhile?
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
            // Pages that could not be mapped by huge entries again keep advice of the library's.
            let huge_pages =
                if split { present.attributes.huge_pages } else { run.attributes.huge_pages };
            run.end == addr + len
                && Attributes { huge_pages, ..run.attributes } == present.attributes
        };
        // If the look fails, no change is assumed.
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

    /// Maps pages that stay by huge entries again. No `madvise` takes MADV_NOHUGEPAGE back, but a
    /// new mapping of the same frames begins without it. If the mapping fails, the pages get
    /// MADV_HUGEPAGE, which lets the kernel make such entries by itself.
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
        // Of two windows the longer one is reported.
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

    /// The parts of a mapping that is to be joined, each with its present attributes. If the last
    /// look took long and the program has not been seen to change any attribute, those from before
    /// the job are used for some time.
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

/// Reads the attributes of ranges in ascending order. The runs begin at the start of the first
/// range.
fn read(backend: &dyn Backend, ranges: &[Range<usize>]) -> Result<Vec<AttributeRun>, Unread> {
    let runs = backend.attributes(ranges).map_err(|_| Unread::Refused)?;
    match runs.first() {
        Some(run) if run.start == ranges[0].start => Ok(runs),
        Some(run) => Err(Unread::Unmapped { until: run.start.min(ranges[0].end) }),
        None => Err(Unread::Unmapped { until: ranges[0].end }),
    }
}

/// Sets the attributes again that a new mapping lacks. Allocates nothing.
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
    // Tried twice, because a shortage may be over by then. If only a part of a huge page got the
    // advice, the page could not be moved again.
    let advised = advise().or_else(|_| advise());
    // SAFETY: as above.
    advised
        .map_err(|errno| Error::call(Call::Advise, addr, len, errno))
        .and_then(|()| unsafe { attributes::relock(backend, addr, len, wanted) })
}

/// Warns of attributes that could not be set again.
pub(super) fn tell_lost(books: Books<'_>, restored: Result<(), Error>) {
    if let Err(error) = restored {
        books.warn(Warning::because(
            WarningKind::Attributes,
            "an attribute of the range is lost",
            &error,
        ));
    }
}

/// The error for pages that stay because the program changes their mapping.
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
