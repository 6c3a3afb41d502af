//! Moves frames of regions: what a job's areas stand for here, and one attempt on one of them.
//!
//! An area is pages of one leg: consecutive pages of a region that move from consecutive frames of
//! one share to consecutive frames of another. Locks: a job's state, then the [`Ledger`], then a
//! region's extents, then a share's state. None is held during an attempt.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use super::context::RunsOn;
use super::join::{Block, Unjoined};
use super::legs::{Claimed, Leg};
use super::present::{Known, Look, Present, mapping_changed};
use super::recycle::{Parts, Vacated};
use super::slots::ClaimedSlot;
use super::stand_in::StandIn;
use super::tracker::OpenTracker;
use super::under_way::withdrawn;
use crate::backend::{Backend, Call, CopyMethod, Errno, Haste, Prot};
use crate::engine::choice::{AreaEngine, Situation, Why};
use crate::engine::commit::{Effort, Step};
use crate::engine::fault::{self, SLOTS};
use crate::engine::slot::{Slot, Span};
use crate::engine::{
    self, Ended, Engine, Entries, Following, Frames, OldAlias, Tools, Work, followed_page_bytes,
};
use crate::error::Error;
use crate::job::area::{Area, Outcome, Reason, Verdict};
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::pace::Seen;
use crate::job::report::Warning;
use crate::job::{Mover, Terms};
use crate::limits::is_over_address_space_limit;
use crate::observe::Attributes;
use crate::pool::{self, Share};
use crate::priority::{FirstShare, Raised};
use crate::region::{Extent, Owner, RegionInner};
use crate::sync::{AtomicU64, Instant, Mutex, Ordering, lock, monotonic_ns, thread};
use crate::tracer::Watch;
use crate::units::{AddressRange, BASE_PAGE, NodeId, PageSize};

/// What one page of page table maps in base pages: 2 MB.
const PAGE_TABLE_SPAN: usize = 512 * BASE_PAGE;

/// How frames of regions are to be moved.
pub(super) struct Terrain {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) engine: Engine,
    /// Whether areas that the engine cannot move may be moved by another one.
    pub(super) may_fall_back: bool,
    /// After this many further copies of an area it is frozen anyway.
    pub(super) max_rounds: u32,
    pub(super) page: PageSize,
    /// The CPUs of the destinations.
    pub(super) cpus: Vec<usize>,
    /// The nodes of the destinations.
    pub(super) nodes: BTreeSet<NodeId>,
    /// If the engine needs one.
    pub(super) tracker: Option<OpenTracker>,
    /// The engine for areas for which few threads come to wait, with its tracker if it needs one.
    pub(super) while_few_wait: Option<(Engine, Option<OpenTracker>)>,
    /// Whether a trial may find the fastest way to copy.
    pub(super) may_try: bool,
    pub(super) parts: Parts,
    /// Which thread is the job's first one.
    pub(super) runs_on: RunsOn,
    pub(super) began: Instant,
}

/// Moves frames of regions.
pub(super) struct FrameMover {
    pub(super) terrain: Terrain,
    pub(super) legs: Vec<Leg>,
    /// The region of each claimed range.
    pub(super) regions: Vec<Arc<RegionInner>>,
    /// Whose claim each of them is.
    pub(super) owners: Vec<Owner>,
    pub(super) ledger: Mutex<Ledger>,
    /// One for each worker.
    pub(super) slots: Vec<ClaimedSlot>,
    /// Why the thread that reads the tracker's messages could not be started.
    pub(super) unserved: OnceLock<Errno>,
    /// How workers run before others in windows in which mappings are joined, if they do.
    pub(super) hurries: OnceLock<Haste>,
    /// How the job's threads were scheduled by their starter.
    pub(super) raised: OnceLock<Raised>,
    /// Why areas cannot be moved by an engine that signals, if that has been looked at and is so.
    deaf: OnceLock<Option<Error>>,
    /// What is wrong with the SIGSEGV handler, once an area has stayed because of it.
    handler_gone: OnceLock<Error>,
    /// The number of a tracker's descriptor that other code has closed, of the job's own tracker or
    /// another engine's, and whether it stands for another file.
    pub(super) lost_tracker: OnceLock<(i32, bool)>,
    /// How each leg is copied, from the moment when that is known.
    pub(super) methods: OnceLock<Vec<CopyMethod>>,
    /// Set once a warning tells why pages stay while the job is traced.
    pub(super) warned_of_tracer: OnceLock<()>,
    /// When a worker last looked at the cpuset, in nanoseconds since the job began.
    cpuset_seen_ns: AtomicU64,
    /// For areas that the job's engine cannot move.
    pub(super) stand_in: StandIn,
    /// The look at the attributes of all legs before the job began.
    pub(super) start_look: Look,
    /// 1 if the program has changed a mapping since the job began.
    pub(super) has_changed: AtomicU64,
    /// The last look at mappings that were to be joined.
    pub(super) joined_look: Mutex<Option<Look>>,
    /// 1 if pages have stayed with advice on huge pages that their user has not given.
    pub(super) has_advised: AtomicU64,
}

/// Which frames belong to whom, while a job runs.
pub(super) struct Ledger {
    pub(super) claimed: Vec<Claimed>,
    /// Frames that pages have left, to be given back when all is done.
    pub(super) vacated: Vec<Vacated>,
    /// Mappings of hugetlb pages.
    pub(super) unjoined: Unjoined,
    /// Blocks that are to be joined now.
    pub(super) due: Vec<Block>,
    exchange_unsupported: bool,
    /// A worker could not say where its page tables are to come from.
    policy_refused: bool,
}

/// What a worker has of its own.
pub(super) struct Worker {
    pub(super) slot: &'static Slot,
    /// Where the page tables come from that calls of this thread allocate, if that has been said.
    preferred: Option<NodeId>,
    /// From where they cannot come.
    refused: Option<NodeId>,
    /// Who traces this thread, as of the last look.
    pub(super) watch: Watch,
    pub(super) tracer: Option<u32>,
    /// How it may run before others in windows, if it may.
    first: Option<Haste>,
    /// What bounds windows that contain a copy.
    share: FirstShare,
    /// What it has read of a mapping, unless that is too old by now.
    known: Option<Known>,
}

impl Worker {
    /// How to run before others in the windows of an attempt, if at all. Before one that closes the
    /// area for its copy, the CPU may be offered to others.
    fn haste(&mut self, closes_for_copy: bool) -> Option<Haste> {
        let first = self.first?;
        let admitted = !closes_for_copy || self.share.admits(monotonic_ns, thread::yield_now);
        admitted.then_some(first)
    }
}

/// An area with its frames.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) leg: &'a Leg,
    region: &'a RegionInner,
    pub(super) old: pool::Run,
    new: pool::Run,
}

impl FrameMover {
    pub(super) fn new(
        terrain: Terrain,
        claimed: Vec<Claimed>,
        legs: Vec<Leg>,
        slots: Vec<ClaimedSlot>,
        start_look: Look,
    ) -> FrameMover {
        let hugetlb = terrain.page.is_hugetlb();
        let apart = legs.iter().filter(|_| hugetlb).map(|leg| (leg.item, leg.pages.clone()));
        let unjoined = Unjoined::new(apart);
        FrameMover {
            terrain,
            legs,
            regions: claimed.iter().map(|claimed| claimed.claim.region().clone()).collect(),
            owners: claimed.iter().map(|claimed| claimed.claim.owner()).collect(),
            ledger: Mutex::new(Ledger {
                claimed,
                vacated: Vec::new(),
                unjoined,
                due: Vec::new(),
                exchange_unsupported: false,
                policy_refused: false,
            }),
            slots,
            unserved: OnceLock::new(),
            hurries: OnceLock::new(),
            raised: OnceLock::new(),
            deaf: OnceLock::new(),
            handler_gone: OnceLock::new(),
            lost_tracker: OnceLock::new(),
            methods: OnceLock::new(),
            warned_of_tracer: OnceLock::new(),
            cpuset_seen_ns: AtomicU64::new(0),
            stand_in: StandIn::default(),
            start_look,
            has_changed: AtomicU64::new(0),
            joined_look: Mutex::new(None),
            has_advised: AtomicU64::new(0),
        }
    }

    /// Which thread is the job's first one.
    pub(super) fn runs_on(&self) -> RunsOn {
        self.terrain.runs_on
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.terrain.backend
    }

    pub(super) fn tools(&self, slot: &'static Slot) -> Tools<'_> {
        Tools { slot, epoch: &SLOTS.epoch, backend: self.backend() }
    }

    /// The region of a claimed range.
    pub(super) fn region(&self, item: usize) -> &Arc<RegionInner> {
        &self.regions[item]
    }

    fn place(&self, area: &Area) -> Place<'_> {
        let leg = &self.legs[area.leg];
        let (within, frames) = (area.pages.start - leg.pages.start, area.len());
        Place {
            leg,
            region: &self.regions[leg.item],
            old: pool::Run { first: leg.from_frame + within, frames },
            new: pool::Run { first: leg.to_frame + within, frames },
        }
    }

    /// How a leg is copied.
    fn method_of(&self, leg: usize) -> CopyMethod {
        self.methods.get().and_then(|all| all.get(leg)).copied().unwrap_or_default()
    }

    /// Makes new page tables of this worker's calls come from that node, if one is wanted.
    fn prefer_tables(&self, wanted: Option<NodeId>, now: &mut Option<NodeId>, books: Books<'_>) {
        if wanted == *now || wanted.is_none() {
            return;
        }
        let preferred = self.backend().prefer_tables_on(wanted.map(|node| node.0));
        books.count(Call::PreferTables, 1);
        match preferred {
            Ok(()) => *now = wanted,
            Err(errno) => {
                if !std::mem::replace(&mut lock(&self.ledger).policy_refused, true) {
                    let call = Call::PreferTables;
                    let text =
                        format!("page tables go where the workers run: {call} failed with {errno}");
                    books.warn(Warning::of(text, call, errno));
                }
            }
        }
    }

    /// Makes new page tables of this worker's calls come from where those of the old frames' alias
    /// belong. Page tables that lie elsewhere are noted (`settle_aliases`) and mapped anew before
    /// they are used. So a refusal (the node has left the cpuset, say) is no news.
    fn prefer_source_tables(&self, leg: &Leg, worker: &mut Worker, books: Books<'_>) {
        let wanted = leg.from.0.tables.filter(|node| worker.preferred != Some(*node));
        let Some(node) = wanted.filter(|node| worker.refused != Some(*node)) else { return };
        books.count(Call::PreferTables, 1);
        match self.backend().prefer_tables_on(Some(node.0)) {
            Ok(()) => worker.preferred = Some(node),
            Err(_) => worker.refused = Some(node),
        }
    }

    /// Which engine moves an area, and what the attempt gets; or why the area stays.
    fn plan(
        &self,
        worker: &Worker,
        place: &Place<'_>,
        area: &Area,
        present: &Present,
        terms: &Terms<'_>,
    ) -> Result<(AreaEngine, Work), (AreaEngine, Reason)> {
        let Terrain { engine, may_fall_back, page, max_rounds, .. } = self.terrain;
        let Place { leg, region, old, new } = *place;
        let exchange_unsupported = lock(&self.ledger).exchange_unsupported;
        let (addr, len) = (region.addr(area.pages.start), region.bytes(area.len()));
        let attributes = &present.attributes;
        let span = Span { addr, len, prot: attributes.prot };
        let situation = Situation {
            engine,
            may_fall_back,
            stand_in: None,
            has_tracker: self.has_tracker(),
            exchange_unsupported,
            refused: area.refused,
            writable: span.prot.writable(),
            page,
            hold: terms.hold,
            while_few_wait: self.terrain.while_few_wait.as_ref().map(|(engine, _)| *engine),
            few_wait: terms.few_wait,
        };
        let (by, tracker) = self.engine_for(worker, situation, terms.books)?;
        let work = Work {
            span,
            old: frames_of(&leg.from, old),
            new: frames_of(&leg.to, new),
            page,
            locked: attributes.locked,
            // The alias has the attributes with which the job began.
            may_exchange: leg.exchange && !exchange_unsupported && *attributes == leg.attributes,
            hold: terms.hold || by.why == Why::FewWait,
            maybe_split: page == PageSize::Thp && area.refused + area.changed > 0,
            method: self.method_of(area.leg),
            following: tracker.map(|tracker| Following {
                tracker,
                freeze_at: terms.freeze_at,
                max_rounds,
            }),
            haste: None,
            copying: self.raised.get().and_then(|raised| raised.copying()),
        };
        Ok((by, work))
    }

    /// Makes everything ready for an attempt, or says why it cannot be made.
    fn prepare(
        &self,
        place: &Place<'_>,
        work: &Work,
        by: AreaEngine,
        preferred: Option<NodeId>,
    ) -> Result<(), (Call, Errno)> {
        let Place { leg, old, new, .. } = *place;
        // The alias of the new frames must be there to be copied to. If the commit will switch in
        // its page tables, they must lie where the leg wants them.
        match leg.tables.filter(|_| work.may_exchange && leg.tables == preferred) {
            Some(node) => leg.to.seat_tables(new, node, |part| leg.lend_attributes(part))?,
            None => leg.to.mend_torn(new)?,
        }
        if by.engine.needs().is_some() && work.following.is_none() {
            // No thread could be started that reads the messages.
            return Err((
                Call::OpenTracker,
                self.unserved.get().copied().unwrap_or(Errno(libc::EBADF)),
            ));
        }
        // The alias of the old frames is read, or gets their page tables: what a failed attempt has
        // left there must not be in the way.
        leg.from.mend_torn(old)?;
        let signals = by.engine.signals() && by.why != Why::ReadOnly;
        if signals && (self.handler_is_gone() || self.deaf().is_some()) {
            // A writer whose signal is blocked would be killed, and another handler would end the
            // process.
            return Err((Call::Protect, Errno(libc::EDEADLK)));
        }
        if self.backend().is_host_memory() && is_over_address_space_limit() {
            return Err((Call::Map, Errno(libc::ENOMEM)));
        }
        Ok(())
    }

    /// Whether writers' signals would reach another handler than the library's. Looked at each time,
    /// because the program may install one at any moment.
    fn handler_is_gone(&self) -> bool {
        let host = self.backend().is_host_memory();
        let Err(error) = (if host { fault::is_in_place() } else { Ok(()) }) else { return false };
        self.handler_gone.get_or_init(|| error);
        true
    }

    /// Why some thread would be killed by a signal that an engine raises. Found out when this job
    /// needs to know for the first time, and not at its start: a second passes before a thread that
    /// blocks the signal is known to go on blocking it.
    fn deaf(&self) -> Option<&Error> {
        let look = || {
            let host = self.backend().is_host_memory();
            host.then(fault::check_no_thread_blocks_sigsegv).and_then(Result::err)
        };
        self.deaf.get_or_init(look).as_ref()
    }

    /// Why an attempt by an engine that raises signals was not made.
    fn why_no_signals(&self, call: Call) -> Reason {
        match self.deaf.get() {
            _ if self.handler_gone.get().is_some() => Reason::HandlerReplaced,
            Some(Some(_)) => Reason::SignalBlocked,
            _ => Reason::Refused(call, Errno(libc::EDEADLK)),
        }
    }

    /// Notes what an attempt has left of both aliases, and makes them usable for the next attempt.
    /// `lent` are the attributes that the span had. Returns whether there can be a next attempt.
    fn settle_aliases(
        &self,
        place: &Place<'_>,
        work: &Work,
        lent: &Attributes,
        ended: &Ended,
        preferred: Option<NodeId>,
    ) -> bool {
        let Place { leg, old, new, .. } = *place;
        let Effort { exchanged, by_exchange, by_alias, .. } = ended.effort;
        if exchanged {
            leg.to.mark_hollow(new);
        }
        if by_alias {
            leg.to.mend_hole(new);
        }
        match ended.old_alias {
            OldAlias::Untouched => {}
            OldAlias::Spoilt { apart } => {
                if apart {
                    leg.from.rejoin(old);
                }
                leg.from.mark_spoilt(old);
            }
            OldAlias::HasTables(entries) => {
                leg.from.mark_borrowed(old);
                // Where whole page-table pages could not move, the kernel has made new ones, under
                // this worker's policy.
                let congruent = is_congruent(work.old.alias, work.span.addr);
                let moved_whole = congruent && entries != Entries::Apart;
                if !moved_whole && leg.from.0.tables != preferred {
                    leg.from.note_tables(old, None);
                }
                if entries == Entries::Apart {
                    leg.from.reclaim_from(old, lent);
                }
            }
            // Perhaps a hole, where another thread's next mapping could land: fill it at once.
            OldAlias::Torn => leg.from.mend_hole(old),
        }
        if ended.step == Step::Migrated {
            if !by_exchange && leg.tables.is_some() {
                // `mmap` has filled new page tables, under this worker's policy.
                leg.to.note_tables(new, preferred);
            }
        } else if exchanged && work.span.prot != Prot::READ_WRITE {
            // A refused commit leaves the destination's alias with the user's access, and the next
            // copy goes through it.
            let (alias, len) = (work.new.alias, work.span.len);
            // SAFETY: the alias of frames that are the job's.
            return unsafe { self.backend().protect(alias, len, Prot::READ_WRITE) }.is_ok();
        }
        true
    }

    /// Pages have moved: who owns which frames now. Returns how many more extents the region has.
    fn note_moved(&self, place: &Place<'_>, area: &Area, old_alias: OldAlias) -> i64 {
        let Place { leg, region, old, new } = *place;
        let ledger = &mut *lock(&self.ledger);
        let extent =
            Extent { pages: area.pages.clone(), share: leg.to.clone(), first_frame: new.first };
        let extents = &mut *lock(&region.extents);
        let before = extents.len() as i64;
        let replaced = extents.replace(extent);
        debug_assert!(replaced.iter().all(|e| e.share == leg.from));
        let marked = old_alias == OldAlias::HasTables(Entries::Marked);
        ledger.vacated.push(Vacated { share: leg.from.clone(), run: old, marked });
        ledger.claimed[leg.item].mark_used(&leg.to, new);
        let joined = ledger.unjoined.dealt_with(leg.item, &area.pages, true);
        ledger.due.extend(joined);
        extents.len() as i64 - before
    }
}

impl Mover for FrameMover {
    type Worker = Worker;

    fn surround(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        let lent = self.terrain.runs_on.lend(&self.terrain, &self.legs);
        self.run_there(books, &|| {
            let (methods, uses) = self.choose_methods();
            self.methods.get_or_init(|| methods);
            books.copied_by(uses);
            // The trial reads pages of any leg.
            self.set_open(true);
            work();
        });
        self.end_stand_in(books);
        self.join_the_rest(self.slots[0].slot(), books);
        lent.give_back(self.raised.get());
    }

    fn worker(&self, number: usize, _books: Books<'_>) -> Worker {
        let first = self.first();
        if let Some(haste) = first.filter(|_| self.has_tracker()) {
            self.hurries.get_or_init(|| haste);
        }
        Worker {
            slot: self.slots[number].slot(),
            preferred: None,
            refused: None,
            watch: match self.terrain.runs_on {
                RunsOn::Own => Watch::default(),
                _ => Watch::of_lasting_thread(monotonic_ns()),
            },
            tracer: None,
            first,
            share: FirstShare::new(monotonic_ns()),
            known: Some(Known::at_start(self.start_look)),
        }
    }

    /// Stops the job if the cpuset no longer allows one of the nodes to which it moves pages. An
    /// administrator who changes the cpuset wants this process off that node. The kernel moves the
    /// pages on that have moved already.
    fn may_go_on(&self, books: Books<'_>) -> Result<(), Stop> {
        /// Where a seccomp filter refuses the cheap call, a look takes some 80 us.
        const EVERY_NS: u64 = 25_000_000;
        let now = self.terrain.began.elapsed().as_nanos() as u64;
        let seen = self.cpuset_seen_ns.load(Ordering::Relaxed);
        let (word, relaxed) = (&self.cpuset_seen_ns, Ordering::Relaxed);
        let mine =
            now >= seen + EVERY_NS && word.compare_exchange(seen, now, relaxed, relaxed).is_ok();
        if !mine {
            return Ok(());
        }
        let mut nodes = self.terrain.nodes.iter();
        match nodes.find(|node| !self.backend().allows_node(node.0)) {
            None => Ok(()),
            Some(node) => {
                books.warn(Error::NodeNotAllowed { node: *node }.to_string());
                Err(Stop::CpusetChanged)
            }
        }
    }

    fn holds_early(&self, area: &Area) -> bool {
        self.terrain.engine.holds_early(area.len())
    }

    fn attempt(&self, worker: &mut Worker, area: &Area, terms: &Terms<'_>) -> Outcome {
        let area = &self.look_for_tracer(worker, area);
        let by = AreaEngine { engine: self.terrain.engine, why: Why::AsChosen };
        let region = self.place(area).region;
        // The first look takes a second, in which these pages must not be busy.
        let _ = self.terrain.engine.signals() && self.deaf().is_some();
        let _under_way = match region.begin(self.owners[area.item], &area.pages) {
            Ok(under_way) => under_way,
            Err(gone) => return withdrawn(by, gone),
        };
        let _moving = match region.pins.start_moving(&area.pages) {
            Ok(moving) => moving,
            Err(kept) => return Outcome::kept(by, kept, Reason::Guarded),
        };
        // After the guards, for the same reason.
        let present = match self.present(&mut worker.known, &self.legs[area.leg], area) {
            Ok(present) => present,
            Err((pages, why)) => return Outcome::not_made(by, pages, Verdict::Changed(why)),
        };
        // Those behind them are tried next.
        let area = &area.with_pages(present.pages.clone());
        let place = self.place(area);
        self.prefer_tables(place.leg.tables, &mut worker.preferred, terms.books);
        let (by, mut work) = match self.plan(worker, &place, area, &present, terms) {
            Ok(planned) => planned,
            Err((by, why)) => return Outcome::given_up(by, area, why),
        };
        let closes_for_copy = work.hold || by.engine == Engine::StopCopy;
        work.haste = worker.haste(closes_for_copy);
        if !self.has_descriptors(&place, &work) {
            return Outcome::given_up(by, area, Reason::DescriptorLost);
        }
        let prepared = self.prepare(&place, &work, by, worker.preferred);
        let congruent = is_congruent(work.new.alias, work.span.addr);
        if by.engine.moves_single_entries() && work.may_exchange && congruent {
            // The kernel makes page tables for the alias of the old frames, and none for the span.
            self.prefer_source_tables(place.leg, worker, terms.books);
        }
        let preferred = worker.preferred;
        let ended = match prepared {
            // SAFETY: the job's claim keeps everybody else from migrating, discarding or growing
            // these pages; the frames are the job's until a page maps them; the backend lives as
            // long as the job; the tracker is served while workers work.
            Ok(()) => unsafe { engine::attempt(by.engine, &self.tools(worker.slot), &work) },
            Err((call, errno)) => Ended::refused(by.engine, &work, call, errno),
        };
        // A writer may have had an area closed for its copy that was not to be.
        if ended.effort.hurried && (closes_for_copy || ended.effort.held) {
            worker.share.spend(ended.effort.window_ns);
        }
        let usable = self.settle_aliases(&place, &work, &present.attributes, &ended, preferred);
        let Ended { step, mut effort, mut telling, disturbed, old_alias } = ended;
        if by.why == Why::FewWait {
            // By choice, and not because writers were too fast. Its copy is what the pace is about.
            (effort.held, telling) = (false, step == Step::Migrated);
        }
        // Nobody knows how many of those who waited would have written.
        telling &= !(by.why == Why::ManyWait && work.hold);
        let (split, attributes) = (effort.split || work.maybe_split, &present.attributes);
        let restored = match step {
            Step::Migrated => self.restore_attributes(attributes, &work.span, effort.by_exchange),
            _ if split => {
                let at = (&place, &work);
                self.map_huge_again(worker.slot, attributes, at, &mut effort, terms.books)
            }
            _ if effort.unlocked => self.restore_attributes(attributes, &work.span, true),
            _ => Ok(()),
        };
        FrameMover::tell_lost(terms.books, restored);
        let verdict = match step {
            Step::Migrated => Verdict::Moved,
            Step::Dirty => Verdict::Disturbed,
            Step::Refused(call, errno) => {
                let refused = match errno {
                    Errno(libc::EDEADLK) => Verdict::Refused(self.why_no_signals(call)),
                    _ => self.after_refusal(&work, &present, split, (call, errno)),
                };
                if usable { refused } else { refused.given_up() }
            }
        };
        // What the kernel refuses of another mapping says nothing of ours.
        effort.exchange_unsupported &= !matches!(verdict, Verdict::Changed(_));
        if effort.exchange_unsupported {
            lock(&self.ledger).exchange_unsupported = true;
        }
        if step == Step::Migrated {
            effort.extents += self.note_moved(&place, area, old_alias);
        }
        let seen = telling.then(|| seen(&effort, work.page));
        Outcome { runs: vec![(area.pages.clone(), verdict)], by, effort, seen, disturbed }
    }

    fn after(&self, worker: &mut Worker, books: Books<'_>) {
        let due = std::mem::take(&mut lock(&self.ledger).due);
        self.join_blocks(worker.slot, &due, books);
        self.give_back_in_parts(books);
    }

    fn is_kept(&self, area: &Area) -> bool {
        let region = &self.regions[area.item];
        region.pins.any(&area.pages) || region.is_waited_for(&area.pages)
    }

    fn given_up(&self, area: &Area) {
        let ledger = &mut *lock(&self.ledger);
        let joined = ledger.unjoined.dealt_with(area.item, &area.pages, false);
        ledger.due.extend(joined);
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        let region = &self.regions[area.item];
        let (addr, len) = (region.addr(area.pages.start), region.bytes(area.len()));
        match (why, self.deaf.get()) {
            (Reason::MappingChanged(refused), _) => mapping_changed(refused, addr, len),
            (Reason::HandlerReplaced, _) => {
                self.handler_gone.get().cloned().expect("it is set before pages stay for it")
            }
            (Reason::SignalBlocked, Some(Some(error))) => error.clone(),
            (Reason::Refused(call, errno), _) => Error::call(call, addr, len, errno),
            (Reason::DescriptorLost, _) => self.lost_descriptor(area),
            (Reason::Traced, _) => self.stays_traced(AddressRange::new(addr, len)),
            _ => Error::Pinned { range: AddressRange::new(addr, len) },
        }
    }

    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        self.give_back(books, moved);
    }

    fn gather_helpers(&self, helpers: usize) {
        self.slots[0].slot().crew.begin(helpers);
    }

    fn help(&self, helper: usize) {
        self.help_worker(helper);
    }

    fn set_helpers(&self, helpers: usize) {
        self.slots[0].slot().crew.set_helpers(helpers);
    }

    fn dismiss_helpers(&self) {
        self.slots[0].slot().crew.end();
    }
}

/// What an attempt tells of the next areas.
fn seen(effort: &Effort, page: PageSize) -> Seen {
    let Effort { written, left, window_ns, copy_ns, .. } = *effort;
    let written = written / (followed_page_bytes(page) / BASE_PAGE) as u64;
    Seen { written, left, window_ns, copy_ns }
}

/// Whether whole pages of page table can move between two addresses.
fn is_congruent(one: usize, other: usize) -> bool {
    (one ^ other).is_multiple_of(PAGE_TABLE_SPAN)
}

/// Where frames of a share lie.
fn frames_of(share: &Share, run: pool::Run) -> Frames {
    let (alias, offset) = (share.0.alias_of(run.first), share.0.offset_of(run.first));
    Frames { alias, file: share.0.file, offset }
}
