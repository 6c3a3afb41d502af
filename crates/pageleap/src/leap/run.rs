//! The job's threads: they take areas from a queue, run attempts, and plan what was disturbed
//! again.

mod conclude;
mod join;
mod queue;
mod workers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::attributes;
use super::legs::{Item, Leg};
use crate::backend::{Ability, Backend, Call, Errno, Prot, Tracker};
use crate::engine::choice::{self, AreaEngine, Situation, Why};
use crate::engine::commit::{Effort, Step};
use crate::engine::fault::{self, MAX_THREADS, SLOTS};
use crate::engine::slot::{Slot, Span};
use crate::engine::{self, Ended, Engine, Following, Frames, OldAlias, Tools, Work};
use crate::error::Error;
use crate::job::handle::{JobShared, Stop};
use crate::job::pace::{Pace, Rate, Seen};
use crate::job::plan::{Area, Pressure, RetryPolicy};
use crate::job::report::{PageOutcome, Waits};
use crate::job::threads::ThreadCount;
use crate::observe::Attributes;
use crate::pool::{self, Share};
use crate::region::Extent;
use crate::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering, lock, thread};
use crate::units::{BASE_PAGE, NodeId};
use conclude::Vacated;
use join::Unjoined;
pub(crate) use join::mappings_apart;

/// What one page of page table maps in base pages: 2 MB.
const PAGE_TABLE_SPAN: usize = 512 * BASE_PAGE;

/// What was asked of a job, checked and completed.
pub(crate) struct Settings {
    pub(crate) policy: RetryPolicy,
    pub(crate) pace: Pace,
    /// Bytes per second.
    pub(crate) rate_limit: Option<u64>,
    /// After how many further copies an area is frozen anyway.
    pub(crate) max_rounds: u32,
    /// How long guards are waited for when nothing else is left to do.
    pub(crate) pin_patience: Duration,
    /// How many pieces may stay behind on their account.
    pub(crate) most_pieces: usize,
    pub(crate) page_bytes: usize,
    pub(crate) threads: usize,
    /// Whether they copy one area after the other together, and not each its own.
    pub(crate) together: bool,
    pub(crate) cpus: Vec<usize>,
    /// The nodes of the destinations.
    pub(crate) nodes: BTreeSet<NodeId>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) engine: Engine,
    /// Whether areas that the engine cannot move may be moved by the last resort.
    pub(crate) may_fall_back: bool,
    pub(crate) engine_reason: String,
    /// If the engine follows writes.
    pub(crate) tracker: Option<OpenTracker>,
}

/// A tracker of this job, closed on drop.
pub(crate) struct OpenTracker {
    backend: Arc<dyn Backend>,
    tracker: Tracker,
}

impl OpenTracker {
    pub(crate) fn new(backend: &Arc<dyn Backend>, ability: Ability) -> Result<Self, (Call, Errno)> {
        Ok(OpenTracker { backend: backend.clone(), tracker: backend.open_tracker(ability)? })
    }
}

impl Drop for OpenTracker {
    fn drop(&mut self) {
        // SAFETY: it is closed here only, and the job that used it is over or has never begun.
        unsafe { self.backend.close_tracker(self.tracker) };
    }
}

/// A slot of the process' table, given back on drop.
struct ClaimedSlot(usize);

impl ClaimedSlot {
    fn slot(&self) -> &'static Slot {
        &SLOTS.slots[self.0]
    }
}

impl Drop for ClaimedSlot {
    fn drop(&mut self) {
        SLOTS.release(self.0);
    }
}

/// What the workers of a job share.
struct State {
    queue: VecDeque<Area>,
    /// Areas of pages that a guard keeps where they are.
    guarded: Vec<Area>,
    /// Since when there is nothing else to do, and none of them has moved.
    guarded_since: Option<Instant>,
    /// Whether they have been tried since that has lasted long enough.
    last_look: bool,
    /// Areas that workers have taken and not yet dealt with.
    in_flight: usize,
    /// Of hugetlb pages.
    unjoined: Unjoined,
    items: Vec<Item>,
    /// Frames that pages have left, to be given back when all is done.
    vacated: Vec<Vacated>,
    pressure: Pressure,
    pace: Pace,
    rate: Option<Rate>,
    threads: ThreadCount,
    /// Nothing is left to do, or the job is to stop.
    over: bool,
    tally: Tally,
}

/// What a worker needs that follows writes.
#[derive(Clone, Copy)]
struct Follow {
    tracker: Tracker,
    /// Whether this worker may run before others while they wait for it.
    hurry: bool,
}

/// Sums for the report.
#[derive(Default)]
struct Tally {
    disturbed_copies: u64,
    splits: u64,
    holds: u64,
    repairs: u64,
    windows: Waits,
    windows_over_budget: u64,
    windows_first: u64,
    /// Pages that have moved, by range (its item's index) and by engine.
    moved: BTreeMap<(usize, AreaEngine), u64>,
    /// CPU time of the threads that have ended, in nanoseconds.
    cpu_ns: u64,
    /// The kernel did not tell the CPU time of a thread.
    cpu_unknown: bool,
    /// Why writes could not be followed, the first time.
    not_followed_why: Option<String>,
    /// Whether a worker may be put before others in its windows.
    hurries: bool,
    exchange_unsupported: bool,
    /// A worker could not say where its page tables are to come from.
    policy_refused: bool,
    first_failure: Option<Error>,
    /// By the number of their kind.
    calls: [u64; Call::ALL.len()],
    warnings: Vec<String>,
}

impl Tally {
    /// Takes a window into account, if there was one.
    fn record_window(&mut self, ns: u64, hurried: bool, pace: &Pace) {
        if ns > 0 {
            self.windows_first += u64::from(hurried);
            self.windows.record(ns);
            self.windows_over_budget += u64::from(ns > pace.budget_ns());
        }
    }

    fn count(&mut self, effort: &Effort) {
        self.calls.iter_mut().zip(effort.calls).for_each(|(sum, calls)| *sum += u64::from(calls));
    }
}

/// A job before and while it runs.
pub(crate) struct Run {
    backend: Arc<dyn Backend>,
    legs: Vec<Leg>,
    state: Mutex<State>,
    /// Signalled when areas are queued again, and when the last one has been dealt with.
    changed: Condvar,
    /// Signalled when more threads are to copy, and when the job is over.
    more: Condvar,
    settings: Settings,
    slots: Vec<ClaimedSlot>,
    shared: Arc<JobShared>,
    began: Instant,
    /// Why areas cannot be moved by the engine `mprotect`, if that has been looked at and is so.
    deaf: OnceLock<Option<Error>>,
    /// When a worker last looked at the cpuset, in nanoseconds since the job began.
    cpuset_seen_ns: AtomicU64,
}

impl Run {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        mut items: Vec<Item>,
        settings: Settings,
        warnings: Vec<String>,
        began: Instant,
    ) -> Result<Run, Error> {
        let mut slots = Vec::new();
        for _ in 0..if settings.together { 1 } else { settings.threads } {
            slots.push(SLOTS.claim().map(ClaimedSlot).ok_or(Error::Limit {
                what: "migrating threads of this process",
                limit: MAX_THREADS,
                in_use: MAX_THREADS,
                needed: settings.threads,
                remedy: "wait for running jobs, or use fewer threads",
            })?);
        }
        let mut legs = Vec::new();
        for (index, item) in items.iter_mut().enumerate() {
            legs.extend(item.legs.drain(..).map(|leg| Leg { item: index, ..leg }));
        }
        let region_of = |leg: &Leg| items[leg.item].claim.region();
        let bytes_total = legs
            .iter()
            .map(|leg| region_of(leg).bytes(leg.pages.end - leg.pages.start) as u64)
            .sum();
        let queue =
            legs.iter().enumerate().map(|(i, leg)| Area::new(i, leg.pages.clone())).collect();
        let hugetlb = items.iter().any(|item| item.claim.region().page.is_hugetlb());
        let apart = legs.iter().filter(|_| hugetlb).map(|leg| (leg.item, leg.pages.clone()));
        let unjoined = Unjoined::new(apart);
        let tally = Tally { warnings, ..Tally::default() };
        Ok(Run {
            backend,
            legs,
            state: Mutex::new(State {
                queue,
                guarded: Vec::new(),
                guarded_since: None,
                last_look: false,
                in_flight: 0,
                unjoined,
                items,
                vacated: Vec::new(),
                pressure: Pressure::default(),
                pace: settings.pace,
                rate: settings.rate_limit.map(Rate::new),
                threads: ThreadCount::new(settings.threads),
                over: false,
                tally,
            }),
            changed: Condvar::new(),
            more: Condvar::new(),
            settings,
            slots,
            shared: Arc::new(JobShared::new(bytes_total)?),
            began,
            deaf: OnceLock::new(),
            cpuset_seen_ns: AtomicU64::new(0),
        })
    }

    pub(crate) fn shared(&self) -> &Arc<JobShared> {
        &self.shared
    }

    /// Migrates areas until there are none.
    fn take_areas(&self, worker: usize, follow: Option<Follow>) {
        let slot = self.slots[worker].slot();
        let mut preferred = None;
        while let Some(area) = self.next(worker).and_then(|area| self.keep_rate(area)) {
            self.look_at_cpuset();
            self.prefer_tables(area.leg, &mut preferred);
            let region = lock(&self.state).items[self.legs[area.leg].item].claim.region().clone();
            let completed = match region.pins.start_moving(&area.pages) {
                Ok(_moving) => self.handle(slot, area, preferred, follow),
                Err(kept) => {
                    self.put_aside(area, kept);
                    Vec::new()
                }
            };
            lock(&self.state).in_flight -= 1;
            self.join_blocks(slot, &completed);
            // Also when the queue is empty: the last area may be what others wait for.
            self.changed.notify_all();
        }
        lock(&self.state).over = true;
        self.more.notify_all();
    }

    /// Stops the job if the cpuset no longer allows one of the nodes to which it moves pages:
    /// whoever changed it wants this process off that node. The pages that have moved are the
    /// kernel's to move on.
    fn look_at_cpuset(&self) {
        /// The look takes some 30 us.
        const EVERY_NS: u64 = 25_000_000;
        let now = self.began.elapsed().as_nanos() as u64;
        let seen = self.cpuset_seen_ns.load(Ordering::Relaxed);
        let mine = now >= seen + EVERY_NS
            && self
                .cpuset_seen_ns
                .compare_exchange(seen, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if !mine {
            return;
        }
        if let Some(node) =
            self.settings.nodes.iter().find(|node| !self.backend.allows_node(node.0))
        {
            self.shared.ask_to_stop(Stop::CpusetChanged);
            lock(&self.state)
                .tally
                .warnings
                .push(Error::NodeNotAllowed { node: *node }.to_string());
        }
    }

    /// Makes new page tables of this worker's calls come from where a leg wants them. `now` is
    /// where they come from, if that has been said.
    fn prefer_tables(&self, leg: usize, now: &mut Option<NodeId>) {
        let wanted = self.legs[leg].tables;
        if wanted == *now || wanted.is_none() {
            return;
        }
        let preferred = self.backend.prefer_tables_on(wanted.map(|node| node.0));
        let tally = &mut lock(&self.state).tally;
        tally.calls[Call::PreferTables as usize] += 1;
        match preferred {
            Ok(()) => *now = wanted,
            Err(errno) if !std::mem::replace(&mut tally.policy_refused, true) => {
                tally.warnings.push(format!(
                    "page tables go where the workers run: {} failed with {errno}",
                    Call::PreferTables
                ))
            }
            Err(_) => {}
        }
    }

    /// Sees to it that the alias of the frames can be copied to, and, if the commit will switch in
    /// its page tables, has them where the leg wants them. `preferred` is where this worker's page
    /// tables come from.
    fn prepare_frames(
        &self,
        leg: &Leg,
        frames: pool::Run,
        exchange: bool,
        preferred: Option<NodeId>,
    ) -> Result<(), (Call, Errno)> {
        match leg.tables.filter(|_| exchange && leg.tables == preferred) {
            Some(node) => leg.to.seat_tables(frames, node, |part| leg.lend_attributes(part)),
            None => leg.to.mend_torn(frames),
        }
    }

    /// One attempt on one area, and what follows from it. Returns blocks that are to be joined now.
    fn handle(
        &self,
        slot: &Slot,
        area: Area,
        preferred: Option<NodeId>,
        follow: Option<Follow>,
    ) -> Vec<(usize, u64)> {
        let leg = &self.legs[area.leg];
        let first_try = area.disturbed == 0 && area.refused == 0;
        let count = area.pages.end - area.pages.start;
        let (region, exchange_unsupported, hold, freeze_at) = {
            let mut state = lock(&self.state);
            let early = first_try && self.settings.engine.holds_early(count);
            let hold = self.settings.policy.holds(&area) || early && state.pressure.holds_next();
            let region = state.items[leg.item].claim.region().clone();
            (region, state.tally.exchange_unsupported, hold, state.pace.freeze_at())
        };
        let by = choice::for_area(&Situation {
            engine: self.settings.engine,
            may_fall_back: self.settings.may_fall_back,
            has_tracker: follow.is_some(),
            exchange_unsupported,
            refused: area.refused,
            writable: leg.attributes.prot.writable(),
            page: region.page,
            hold,
        });
        let within = area.pages.start - leg.pages.start;
        let frames = pool::Run { first: leg.to_frame + within, frames: count };
        let vacated = pool::Run { first: leg.from_frame + within, ..frames };
        let len = region.bytes(count);
        let span = Span { addr: region.addr(area.pages.start), len, prot: leg.attributes.prot };
        let work = Work {
            span,
            old: frames_of(&leg.from, vacated),
            new: frames_of(&leg.to, frames),
            page: region.page,
            locked: leg.attributes.locked,
            may_exchange: leg.exchange && !exchange_unsupported,
            hold,
            following: follow.map(|Follow { tracker, hurry }| Following {
                tracker,
                freeze_at,
                max_rounds: self.settings.max_rounds,
                hurry,
            }),
        };
        let ended = match self.prepare(leg, &work, by, (vacated, frames), preferred) {
            // SAFETY: the job's claim keeps everybody else from migrating, discarding or growing
            // these pages; the frames are the job's until a page maps them; the backend lives as
            // long as the job; `work` has started a thread that serves the tracker.
            Ok(()) => unsafe { engine::attempt(by.engine, &self.tools(slot), &work) },
            Err((call, errno)) => Ended::refused(by.engine, &work, call, errno),
        };
        let mut area = area;
        if !self.settle_aliases(leg, &work, &ended, (vacated, frames), preferred) {
            area.refused = self.settings.policy.max_refused;
        }
        let Ended { step, effort, followed, disturbed, .. } = ended;
        let migrated = if step == Step::Migrated { len as u64 } else { 0 };
        self.shared.count(effort.copied, migrated);
        let restored = match step {
            Step::Migrated => self.restore_attributes(leg, &span, effort.by_exchange),
            _ if effort.unlocked => self.restore_attributes(leg, &span, true),
            _ => Ok(()),
        };

        let mut state = lock(&self.state);
        if followed && step == Step::Migrated {
            let Effort { written, left, window_ns, .. } = effort;
            state.pace.observe(Seen { written, left, window_ns });
        }
        if let Some(disturbed) = disturbed.filter(|_| first_try) {
            state.pressure.observe(disturbed);
        }
        if let Some(rate) = &mut state.rate {
            rate.charge(effort.copied);
        }
        let moved = self.shared.bytes_migrated();
        // Where pauses keep to a rate, threads do not show what they add.
        if state.rate.is_none() && state.threads.observe(self.began.elapsed(), moved) {
            if self.settings.together {
                slot.crew.set_helpers(state.threads.active() - 1);
            } else {
                self.more.notify_all();
            }
        }
        let tally = &mut state.tally;
        tally.record_window(effort.window_ns, effort.hurried, &self.settings.pace);
        tally.repairs += effort.repairs;
        tally.holds += u64::from(effort.held);
        tally.count(&effort);
        tally.exchange_unsupported |= effort.exchange_unsupported;
        tally.warnings.extend(restored.err().map(attribute_lost));
        match step {
            Step::Migrated => {
                *tally.moved.entry((leg.item, by)).or_default() += count;
                let extent = Extent {
                    pages: area.pages.clone(),
                    share: leg.to.clone(),
                    first_frame: frames.first,
                };
                let replaced = lock(&region.extents).replace(extent);
                debug_assert!(replaced.iter().all(|e| e.share == leg.from));
                let marked = ended.old_alias == OldAlias::HasTables { marked: true };
                let vacated = Vacated { share: leg.from.clone(), run: vacated, marked };
                state.vacated.push(vacated);
                (state.guarded_since, state.last_look) = (None, false);
                let item = &mut state.items[leg.item];
                item.mark_used(&leg.to, frames);
                item.set_outcome(&area.pages, PageOutcome::Migrated);
                return state.unjoined.dealt_with(leg.item, &area.pages, true);
            }
            Step::Dirty => {
                let parts = self.settings.policy.after_disturbance(&area);
                tally.disturbed_copies += 1;
                tally.splits += u64::from(parts.len() > 1);
                state.items[leg.item].set_outcome(&area.pages, PageOutcome::Busy);
                state.queue.extend(parts);
            }
            Step::Refused(call, errno) => match self.settings.policy.after_refusal(&area) {
                Some(again) => {
                    if followed {
                        tally.not_followed_why.get_or_insert(format!("{call} failed with {errno}"));
                    }
                    state.items[leg.item].set_outcome(&area.pages, PageOutcome::Busy);
                    state.queue.push_back(again);
                    drop(state);
                    // Mappings join again as neighbours are done; give them, or other threads, the
                    // time.
                    thread::sleep(Duration::from_millis(1));
                }
                None => {
                    let error = Error::call(call, span.addr, len, errno);
                    tally.first_failure.get_or_insert(error);
                    state.items[leg.item].set_outcome(&area.pages, PageOutcome::Failed);
                    return state.unjoined.dealt_with(leg.item, &area.pages, false);
                }
            },
        }
        Vec::new()
    }

    /// Makes everything ready for an attempt on these frames, or says why it cannot be made.
    fn prepare(
        &self,
        leg: &Leg,
        work: &Work,
        by: AreaEngine,
        (vacated, frames): (pool::Run, pool::Run),
        preferred: Option<NodeId>,
    ) -> Result<(), (Call, Errno)> {
        self.prepare_frames(leg, frames, work.may_exchange, preferred)?;
        // The alias of the old frames is read, or gets their page tables: what a failed attempt has
        // left there must not be in the way.
        leg.from.mend_torn(vacated)?;
        if by.why == Why::NotFollowed && self.signals_are_blocked() {
            // A writer that blocks the signal would be killed.
            return Err((Call::Protect, Errno(libc::EDEADLK)));
        }
        // Beyond this limit a call that unmaps first and maps then would fail in between.
        if self.backend.is_host_memory() && pageleap_sys::is_over_address_space_limit(BASE_PAGE, 0)
        {
            return Err((Call::Map, Errno(libc::ENOMEM)));
        }
        Ok(())
    }

    /// Notes what an attempt has left of both aliases, and makes them usable for the next attempt.
    /// Returns whether there can be one.
    fn settle_aliases(
        &self,
        leg: &Leg,
        work: &Work,
        ended: &Ended,
        (vacated, frames): (pool::Run, pool::Run),
        preferred: Option<NodeId>,
    ) -> bool {
        let Effort { exchanged, by_exchange, .. } = ended.effort;
        if exchanged {
            leg.to.mark_hollow(frames);
        }
        match ended.old_alias {
            OldAlias::Untouched => {}
            OldAlias::Spoilt => leg.from.mark_spoilt(vacated),
            OldAlias::HasTables { .. } => {
                leg.from.mark_borrowed(vacated);
                // Where whole page-table pages could not move, the kernel has made new ones, under
                // this worker's policy.
                let congruent = (work.old.alias ^ work.span.addr).is_multiple_of(PAGE_TABLE_SPAN);
                if !congruent && leg.from.0.tables != preferred {
                    leg.from.note_tables(vacated, None);
                }
            }
            // Perhaps a hole, where another thread's next mapping could land: fill it at once.
            OldAlias::Torn => leg.from.mend_hole(vacated),
        }
        if ended.step == Step::Migrated {
            if !by_exchange && leg.tables.is_some() {
                // `mmap` has filled new page tables, under this worker's policy.
                leg.to.note_tables(frames, preferred);
            }
        } else if exchanged && work.span.prot != Prot::READ_WRITE {
            // A refused commit leaves the destination's alias with the user's access, and the next
            // copy goes through it.
            let (alias, len) = (work.new.alias, work.span.len);
            // SAFETY: the alias of frames that are the job's.
            return unsafe { self.backend.protect(alias, len, Prot::READ_WRITE) }.is_ok();
        }
        true
    }

    fn tools<'a>(&'a self, slot: &'a Slot) -> Tools<'a> {
        Tools { slot, epoch: &SLOTS.epoch, backend: &*self.backend }
    }

    /// Whether some thread would be killed by the signal that the engine `mprotect` needs. Found
    /// out when this job needs to know for the first time.
    fn signals_are_blocked(&self) -> bool {
        let error = self.deaf.get_or_init(|| {
            self.backend
                .is_host_memory()
                .then(fault::check_no_thread_blocks_sigsegv)
                .and_then(Result::err)
        });
        if let Some(error) = error {
            lock(&self.state).tally.first_failure.get_or_insert(error.clone());
        }
        error.is_some()
    }

    /// Sets again what a new mapping does not have. Allocates nothing.
    fn restore_attributes(&self, leg: &Leg, span: &Span, by_exchange: bool) -> Result<(), Error> {
        let (addr, len, wanted) = (span.addr, span.len, &leg.attributes);
        // An exchange brings all but the lock along.
        let now = if by_exchange { *wanted } else { Attributes::of_new_mapping(wanted.prot) };
        // SAFETY: the span is claimed by this job.
        let advise = || unsafe { attributes::advise(&*self.backend, addr, len, &now, wanted) };
        // Once more, because a shortage may be over, and advice for a part of a huge page keeps it
        // from being moved again.
        let advised = advise().or_else(|_| advise());
        // SAFETY: as above.
        advised
            .map_err(|errno| Error::call(Call::Advise, addr, len, errno))
            .and_then(|()| unsafe { attributes::relock(&*self.backend, addr, len, wanted) })
    }
}

/// Where frames of a share lie.
fn frames_of(share: &Share, run: pool::Run) -> Frames {
    let (alias, offset) = (share.0.alias_of(run.first), share.0.offset_of(run.first));
    Frames { alias, file: share.0.file, offset }
}

fn attribute_lost(error: Error) -> String {
    format!("an attribute of the range is lost: {error}")
}
