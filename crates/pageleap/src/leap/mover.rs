//! Moves frames of regions: one attempt on one area of a job.
//!
//! An area is pages of one leg: consecutive pages of a region that move from consecutive frames of
//! one share to consecutive frames of another. [`FrameMover::attempt`] goes through these steps,
//! each in a module of its own that knows no mover:
//!
//! ```text
//!   look for a tracer   trackers        the area shrinks to a part that a traced worker may move
//!   hold pages          region          calls and guards wait, or the area does
//!   read attributes     present         the area shrinks to pages with equal attributes
//!   choose an engine    trackers        with its tracker
//!   make aliases usable aliases
//!   attempt             engine
//!   repair aliases      aliases
//!   restore attributes  present
//!   note what moved     join, recycle   mappings to join, frames to give back
//! ```
//!
//! Locks: a job's state, then the claimed ranges, then a region's extents, then a share's state.
//! The locks of [`join`](super::join) and [`recycle`](super::recycle) are leaves. None is held
//! during an attempt.

use std::collections::BTreeSet;
use std::sync::{OnceLock, PoisonError};

use pageleap_sys::ThreadPolicy;

use super::aliases;
use super::copying::choose_methods;
use super::cpuset::CpusetWatch;
use super::join::{Joiner, Joining};
use super::legs::Claimed;
use super::page_tables::{self, TablePolicy, is_congruent};
use super::present::{Known, Look, Looks, Present, mapping_changed, restore_attributes, tell_lost};
use super::recycle::{Remains, Vacated, VacatedFrames};
use super::signals::Signals;
use super::site::{Place, Site};
use super::slots::ClaimedSlot;
use super::standby::Standbys;
use super::threads::{Precedence, Threads};
use super::trackers::{Traced, Trackers};
use super::under_way::{Descriptors, withdrawn};
use crate::backend::{Backend, Call, CopyMethod, Errno};
use crate::engine::choice::{AreaEngine, Why};
use crate::engine::commit::AttemptResult;
use crate::engine::crew::Team;
use crate::engine::effort::Counters;
use crate::engine::slot::{Slot, Span};
use crate::engine::{
    self, AttemptEnd, Engine, Entries, Following, OldAlias, Work, followed_page_bytes,
};
use crate::error::Error;
use crate::job::area::{Area, AreaOutcome, Reason, Verdict};
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::pace::Seen;
use crate::job::{Mover, Terms};
use crate::limits::is_over_address_space_limit;
use crate::observe::Attributes;
use crate::region::{Extent, Owner};
use crate::sync::{AtomicU64, Instant, Mutex, Ordering, lock};
use crate::units::{BASE_PAGE, NodeId, PageSize};

/// The results of a [`Migration`](super::Migration)'s checks, from which its mover is made.
pub(super) struct Prepared {
    pub(super) site: Site,
    pub(super) claimed: Vec<Claimed>,
    pub(super) threads: Threads,
    pub(super) trackers: Trackers,
    /// Those of each worker.
    pub(super) standbys: Vec<Standbys>,
    /// One for each worker.
    pub(super) slots: Vec<ClaimedSlot>,
    /// Whether all threads copy one area after the other together, as helpers of one worker.
    pub(super) copies_together: bool,
    /// The nodes of the destinations.
    pub(super) nodes: BTreeSet<NodeId>,
    /// The reading of the attributes of all legs.
    pub(super) start_look: Look,
    /// How many pieces of vacated frames may wait for the end of the job.
    pub(super) most_vacated: usize,
    /// The most rounds of pre-copy of an area; after them it is frozen, however many pages are
    /// dirty.
    pub(super) max_rounds: u32,
    /// Whether a trial may measure which copy method is fastest.
    pub(super) may_try: bool,
    pub(super) began: Instant,
}

/// Moves frames of regions.
pub(super) struct FrameMover {
    site: Site,
    claimed: Mutex<Vec<Claimed>>,
    /// By claimed range: the owner under whose name its pages are held while they move.
    owners: Vec<Owner>,
    threads: Threads,
    trackers: Trackers,
    /// For the workers, each of which takes its own.
    standbys: Mutex<Vec<Standbys>>,
    slots: Vec<ClaimedSlot>,
    copies_together: bool,
    nodes: BTreeSet<NodeId>,
    looks: Looks,
    joiner: Joiner,
    vacated: VacatedFrames,
    signals: Signals,
    descriptors: Descriptors,
    /// The copy method of each leg, set before the first attempt.
    methods: OnceLock<Vec<CopyMethod>>,
    max_rounds: u32,
    may_try: bool,
    cpuset: CpusetWatch,
    /// 1 once the kernel has refused to exchange page tables, which it will refuse again.
    exchange_unsupported: AtomicU64,
    /// 1 once a warning tells that page tables do not lie where they should.
    warned_of_tables: AtomicU64,
}

/// A worker's own state.
pub(super) struct Worker {
    slot: &'static Slot,
    tables: TablePolicy,
    traced: Traced,
    precedence: Precedence,
    standbys: Option<Standbys>,
    /// The memory policy with which it began, if regions have views.
    inherited: Option<ThreadPolicy>,
    /// The attributes that it has read last, with their time.
    known: Option<Known>,
}

impl Worker {
    /// Puts back what views have changed beside the frames: the standbys, and the memory policy
    /// that this thread has inherited. `torn` is the number of a standby where a call has failed.
    fn leave_views(&mut self, work: &Work, torn: Option<usize>) {
        let Work { views, page, span, .. } = work;
        if views.is_empty() {
            return;
        }
        if let Some(standbys) = self.standbys.as_mut().filter(|_| !page.is_hugetlb()) {
            standbys.clear(views, span.len, torn);
        }
        if let Some(policy) = self.inherited.as_ref().filter(|_| views.of_span.is_none()) {
            // It is refused if the cpuset no longer allows a node of it; the kernel has replaced
            // such a policy itself.
            let _ = policy.set();
        }
    }
}

impl FrameMover {
    pub(super) fn new(prepared: Prepared) -> FrameMover {
        let Prepared { site, claimed, threads, trackers, slots, nodes, copies_together, .. } =
            prepared;
        let standbys = Mutex::new(prepared.standbys);
        let Prepared { start_look, most_vacated, max_rounds, may_try, began, .. } = prepared;
        FrameMover {
            owners: claimed.iter().map(|claimed| claimed.claim.owner()).collect(),
            looks: Looks::new(start_look, slots.len() > 1),
            joiner: Joiner::new(&site.legs, site.page.is_hugetlb()),
            vacated: VacatedFrames::new(most_vacated),
            signals: Signals::default(),
            descriptors: Descriptors::default(),
            methods: OnceLock::new(),
            exchange_unsupported: AtomicU64::new(0),
            warned_of_tables: AtomicU64::new(0),
            site,
            claimed: Mutex::new(claimed),
            threads,
            trackers,
            standbys,
            slots,
            copies_together,
            nodes,
            max_rounds,
            may_try,
            cpuset: CpusetWatch::new(began),
        }
    }

    pub(super) fn threads(&self) -> &Threads {
        &self.threads
    }

    fn backend(&self) -> &dyn Backend {
        self.site.backend()
    }

    fn joining<'a>(
        &'a self,
        slot: &'static Slot,
        preferred: Option<NodeId>,
        books: Books<'a>,
    ) -> Joining<'a> {
        Joining { site: &self.site, looks: &self.looks, slot, preferred, books }
    }

    /// Allows or forbids calls to withdraw pages that are not under way. Pages of hugetlb memory
    /// are never withdrawn, because pages that have moved are mapped once more when their mappings
    /// are joined.
    fn set_open(&self, open: bool) {
        if !self.site.page.is_hugetlb() {
            lock(&self.claimed).iter().for_each(|one| one.claim.set_open(open));
        }
    }

    /// The copy method of a leg.
    fn method_of(&self, leg: usize) -> CopyMethod {
        self.methods.get().and_then(|all| all.get(leg)).copied().unwrap_or_default()
    }

    /// Chooses the engine for an area, and makes the input of the attempt. An error says why the
    /// area stays.
    fn plan(
        &self,
        traced: &Traced,
        place: &Place<'_>,
        area: &Area,
        present: &Present,
        terms: &Terms<'_>,
    ) -> Result<(AreaEngine, Work), (AreaEngine, Reason)> {
        let leg = place.leg;
        let exchange_unsupported = self.exchange_unsupported.load(Ordering::Relaxed) > 0;
        let addresses = self.site.addresses(area);
        let attributes = &present.attributes;
        let span = Span { addr: addresses.0.start, len: addresses.0.len(), prot: attributes.prot };
        let page = self.site.page;
        let views = place.region.views_at(span.addr - place.region.start);
        // Threads may write through a view where the region itself is read-only.
        let state = (span.prot.writable() || !views.is_empty(), exchange_unsupported);
        let (by, tracker) = self.trackers.engine_for(traced, area, state, terms)?;
        let work = Work {
            span,
            old: place.old_frames(),
            new: place.new_frames(),
            views,
            page,
            locked: attributes.locked,
            // The alias has the attributes with which the job began.
            may_exchange: leg.exchange && !exchange_unsupported && *attributes == leg.attributes,
            hold: terms.hold || by.why == Why::LowContention,
            maybe_split: page == PageSize::Thp && area.refused + area.changed > 0,
            method: self.method_of(area.leg),
            following: tracker.map(|tracker| Following {
                tracker,
                freeze_at: terms.freeze_at,
                max_rounds: self.max_rounds,
            }),
            haste: None,
            copying: self.threads.copying(),
        };
        Ok((by, work))
    }

    /// Makes everything ready for an attempt, or says why it cannot be made. Returns what
    /// [`aliases::prepare`] does.
    fn prepare(
        &self,
        place: &Place<'_>,
        work: &Work,
        by: AreaEngine,
        tables: TablePolicy,
    ) -> Result<Option<NodeId>, (Call, Errno)> {
        if by.engine.needs().is_some() && work.following.is_none() {
            // No tracker: the thread that reads its messages could not be started.
            return Err(self.trackers.why_none());
        }
        let seated = aliases::prepare(place, work, tables.preferred())?;
        let signals = by.engine.signals() && by.why != Why::READ_ONLY;
        if signals && !self.signals.may_be_raised(self.backend()) {
            return Err((Call::Protect, Errno(libc::EDEADLK)));
        }
        if self.backend().is_host_memory() && is_over_address_space_limit() {
            return Err((Call::Map, Errno(libc::ENOMEM)));
        }
        Ok(seated)
    }

    /// Restores the attributes of the span that the attempt has changed. If the attempt has split
    /// huge mappings of pages that stay, these are mapped by huge entries again.
    fn restore(
        &self,
        slot: &'static Slot,
        (place, work): (&Place<'_>, &Work),
        attributes: &Attributes,
        ended: &mut AttemptEnd,
        books: Books<'_>,
    ) {
        let (after, backend) = (ended.after, self.backend());
        let restored = match ended.step {
            AttemptResult::Migrated => {
                restore_attributes(backend, attributes, &work.span, after.is_exchanged())
            }
            _ if after.split => {
                let (at, what) = ((&self.site, slot), (place, work));
                self.looks.map_huge_again(at, attributes, what, &mut ended.counters, books)
            }
            _ if after.unlocked => restore_attributes(backend, attributes, &work.span, true),
            _ => Ok(()),
        };
        tell_lost(books, restored);
    }

    /// The verdict on the pages of an area. `usable`: whether another attempt is possible.
    fn verdict(&self, ended: &AttemptEnd, work: &Work, present: &Present, usable: bool) -> Verdict {
        let refused = match ended.step {
            AttemptResult::Migrated => return Verdict::Moved,
            AttemptResult::Dirty => return Verdict::Disturbed,
            AttemptResult::Refused(call, Errno(libc::EDEADLK)) => {
                Verdict::Refused(self.signals.why_not(call))
            }
            AttemptResult::Refused(call, errno) => {
                let split = ended.after.split;
                self.looks.after_refusal(self.backend(), work, present, split, (call, errno))
            }
        };
        if usable { refused } else { refused.given_up() }
    }

    /// Records that an area's pages have moved: its new frames belong to the region, and its old
    /// frames are vacated. Returns by how many extents the region has grown.
    fn note_moved(&self, place: &Place<'_>, area: &Area, old_alias: OldAlias) -> i64 {
        let Place { leg, region, old, new } = *place;
        let claimed = &mut *lock(&self.claimed);
        let extent =
            Extent { pages: area.pages.clone(), share: leg.to.clone(), first_frame: new.first };
        let extents = &mut *lock(&region.extents);
        let before = extents.len() as i64;
        let replaced = extents.replace(extent);
        debug_assert!(replaced.iter().all(|e| e.share == leg.from));
        let marked = old_alias == OldAlias::HasTables(Entries::Marked);
        self.vacated.add(Vacated { share: leg.from.clone(), run: old, marked });
        claimed[leg.item].mark_used(&leg.to, new);
        extents.len() as i64 - before
    }
}

impl Mover for FrameMover {
    type Worker = Worker;

    fn surround(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        self.threads.surround(self.backend(), &self.site.legs, books, || {
            self.trackers.surround(books, || {
                let (methods, uses) = choose_methods(&self.site, self.may_try);
                self.methods.get_or_init(|| methods);
                books.copied_by(uses);
                // Only after the trial, which reads pages of any leg.
                self.set_open(true);
                work();
            });
            self.joiner.join_rest(self.joining(self.slots[0].slot(), None, books));
        });
    }

    fn worker(&self, number: usize, _books: Books<'_>) -> Worker {
        let first = self.threads.first(self.backend());
        if let Some(haste) = first.filter(|_| self.trackers.has_own()) {
            self.joiner.hurry(haste);
        }
        Worker {
            slot: self.slots[number].slot(),
            tables: TablePolicy::default(),
            traced: Traced::new(self.threads.watch()),
            precedence: Precedence::new(first),
            standbys: lock(&self.standbys).pop(),
            inherited: self.threads.inherited(self.backend()),
            known: Some(self.looks.known_at_start()),
        }
    }

    fn may_go_on(&self, books: Books<'_>) -> Result<(), Stop> {
        self.cpuset.still_allows(&self.nodes, self.backend(), books)
    }

    fn attempt(&self, worker: &mut Worker, area: &Area, terms: &Terms<'_>) -> AreaOutcome {
        let by = AreaEngine { engine: self.trackers.engine(), why: Why::AsChosen };
        let area = &self.trackers.look_for_tracer(&mut worker.traced, area);
        let region = self.site.region(area.item);
        // Made before these pages count as busy, because the first check takes a second.
        if by.engine.signals() {
            self.signals.look_for_threads_that_block(self.backend());
        }
        let _under_way = match region.begin(self.owners[area.item], &area.pages) {
            Ok(under_way) => under_way,
            Err(gone) => return withdrawn(by, gone),
        };
        let _moving = match region.pins.start_moving(&area.pages) {
            Ok(moving) => moving,
            Err(kept) => return AreaOutcome::kept(by, kept, Reason::Guarded),
        };
        // After the guards, because pages that stay need no attributes.
        let present = match self.looks.present(&self.site, &mut worker.known, area) {
            Ok(present) => present,
            Err((pages, why)) => return AreaOutcome::not_made(by, pages, Verdict::Changed(why)),
        };
        // The pages behind these are tried next.
        let area = &area.with_pages(present.pages.clone());
        let place = self.site.place(area);
        let (wanted, warned) = (place.leg.tables, &self.warned_of_tables);
        worker.tables.prefer(wanted, self.backend(), warned, terms.books);
        let (by, mut work) = match self.plan(&worker.traced, &place, area, &present, terms) {
            Ok(planned) => planned,
            Err((by, why)) => return AreaOutcome::given_up(by, area, why),
        };
        let closes_for_copy = work.hold || by.engine.copies_in_window();
        work.haste = worker.precedence.in_windows(closes_for_copy);
        if !self.descriptors.are_whole(place.leg, &work, self.backend()) {
            return AreaOutcome::given_up(by, area, Reason::DescriptorLost);
        }
        let prepared = self.prepare(&place, &work, by, worker.tables);
        let congruent = is_congruent(work.new.alias, work.span.addr);
        if by.engine.moves_single_entries() && work.may_exchange && congruent {
            // The kernel makes page tables for the alias of the old frames, and none for the span.
            worker.tables.prefer_source(place.leg, self.backend(), terms.books);
        }
        work.views.of_span = worker.tables.preferred();
        let len = work.span.len;
        let standbys = worker.standbys.as_mut().filter(|_| !self.site.page.is_hugetlb());
        let has_standbys = standbys.map_or(Ok(()), |all| all.stand_by(&mut work.views, len));
        let prepared = prepared.and_then(|seated| has_standbys.map(|()| seated));
        let mut ended = match prepared {
            // SAFETY: the job's claim keeps everybody else from migrating, discarding or growing
            // these pages; the new frames are the job's until the commit maps them; the backend
            // lives as long as the job; a thread reads the tracker's messages while workers work.
            Ok(_) => unsafe { engine::attempt(by.engine, &self.site.tools(worker.slot), &work) },
            Err((call, errno)) => AttemptEnd::refused(by.engine, &work, call, errno),
        };
        worker.leave_views(&work, ended.after.torn_standby);
        ended.after.split |= work.maybe_split;
        // A writer may have made the engine close an area for its copy, although that was not
        // planned.
        if ended.counters.hurried && (closes_for_copy || ended.counters.held) {
            worker.precedence.spend(ended.counters.window_ns);
        }
        let (attributes, preferred) = (&present.attributes, worker.tables.preferred());
        page_tables::note(&place, &work, &ended, prepared.unwrap_or(None), preferred);
        let usable = aliases::settle(&place, &work, attributes, &ended, preferred, self.backend());
        self.restore(worker.slot, (&place, &work), attributes, &mut ended, terms.books);
        let verdict = self.verdict(&ended, &work, &present, usable);
        if let Verdict::Refused(why) = verdict
            && by.engine != Engine::LAST_RESORT
        {
            // Also if another engine than the job's was refused: it may be the same call.
            terms.books.not_followed(why.to_string());
        }
        // If the program has changed the mapping, a refusal says nothing about exchanges in
        // general.
        if ended.after.exchange_unsupported && !matches!(verdict, Verdict::Changed(_)) {
            self.exchange_unsupported.store(1, Ordering::Relaxed);
        }
        if verdict == Verdict::Moved {
            ended.counters.counts.mappings_added += self.note_moved(&place, area, ended.old_alias);
            self.joiner.dealt_with(area.item, &area.pages, true);
        }
        outcome(area, verdict, by, &work, ended)
    }

    fn after(&self, worker: &mut Worker, books: Books<'_>) {
        let preferred = worker.tables.preferred();
        self.joiner.join_due(self.joining(worker.slot, preferred, books));
        self.vacated.give_back_in_parts(self.backend(), self.trackers.own(), books);
    }

    fn is_kept(&self, area: &Area) -> bool {
        let region = self.site.region(area.item);
        region.pins.any(&area.pages) || region.is_waited_for(&area.pages)
    }

    fn given_up(&self, area: &Area) {
        self.joiner.dealt_with(area.item, &area.pages, false);
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        let range = self.site.addresses(area);
        if let Some(error) = self.signals.error(why) {
            return error;
        }
        match why {
            Reason::MappingChanged(refused) => mapping_changed(refused, range),
            Reason::Refused(call, errno) => Error::call(call, range.0.start, range.0.len(), errno),
            Reason::DescriptorLost => self.descriptors.error(&self.site.legs[area.leg]),
            Reason::Traced => self.trackers.stays_traced(range),
            _ => Error::Pinned { range },
        }
    }

    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        // From here on no call can withdraw pages.
        self.set_open(false);
        let FrameMover { site, claimed, vacated, slots, trackers, .. } = self;
        let claimed = claimed.into_inner().unwrap_or_else(PoisonError::into_inner);
        Remains { site, claimed, vacated, slots, trackers }.give_back(books, moved);
    }

    fn team(&self) -> Option<Team<'_>> {
        let crew = &self.slots[0].slot().crew;
        self.copies_together.then(|| Team { crew, backend: self.backend() })
    }
}

/// The outcome of an attempt, as its job gets it.
fn outcome(
    area: &Area,
    verdict: Verdict,
    by: AreaEngine,
    work: &Work,
    ended: AttemptEnd,
) -> AreaOutcome {
    let AttemptEnd { mut counters, telling, disturbed, .. } = ended;
    let has_moved = verdict == Verdict::Moved;
    let telling = match by.why {
        // The pace of such areas depends on their copies, so an attempt tells only if it has moved.
        Why::LowContention => has_moved,
        // It is not known how many of the threads that waited would have written.
        Why::Contended => telling && !work.hold,
        _ => telling,
    };
    // If the engine closed the area by choice, the writers were not too fast.
    counters.held &= by.why != Why::LowContention;
    let seen = telling.then(|| seen(&counters, work.page));
    let runs = vec![(area.pages.clone(), verdict)];
    AreaOutcome { runs, by: by.into(), counters, seen, disturbed }
}

/// The measurements of an attempt that set the pace of the next areas.
fn seen(counters: &Counters, page: PageSize) -> Seen {
    let Counters { written, left, window_ns, copy_ns, .. } = *counters;
    let written = written / (followed_page_bytes(page) / BASE_PAGE) as u64;
    Seen { written, left, window_ns, copy_ns }
}
