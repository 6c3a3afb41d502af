//! Moves page tables: one attempt on one area.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::cpuset::CpusetWatch;
use super::super::present::{restore_attributes, tell_lost};
use super::super::slots::ClaimedSlot;
use super::super::threads::{Precedence, Threads};
use super::super::under_way::withdrawn;
use super::plan::{HIGHEST, Plan, Stretch, pieces};
use super::staging::Staging;
use crate::backend::{Backend, Call, Errno};
use crate::engine::choice::Why;
use crate::engine::commit::{AttemptResult, SPLIT};
use crate::engine::effort::Effort;
use crate::engine::fault::SLOTS;
use crate::engine::slot::{Slot, Span};
use crate::engine::{Frames, Tools, tables};
use crate::error::Error;
use crate::forks;
use crate::job::area::{Area, AreaOutcome, By, Reason, Runs, Verdict};
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::report::{Warning, WarningKind};
use crate::job::{Mover, Terms};
use crate::limits::is_over_address_space_limit;
use crate::observe::{AttributeRun, Attributes};
use crate::region::{Claim, PageTableLevel, RegionInner};
use crate::sync::{Instant, Mutex, lock};
use crate::units::{EngineName, NodeId};

/// The name in reports.
pub(super) const ENGINE: EngineName = EngineName::new("page-tables", 8);

const BY: By = By { engine: ENGINE, why: Why::AsChosen };

/// Moves the page tables of one range of a region.
pub(super) struct TableMover {
    claim: Claim,
    plan: Plan,
    /// The destination.
    nodes: BTreeSet<NodeId>,
    to: NodeId,
    threads: Threads,
    slots: Vec<ClaimedSlot>,
    cpuset: CpusetWatch,
    /// For the worker, which takes them: one for each level that moves.
    stagings: Mutex<Vec<(PageTableLevel, Staging)>>,
}

/// The worker's own state.
pub(super) struct Worker {
    slot: &'static Slot,
    precedence: Precedence,
    stagings: Vec<(PageTableLevel, Staging)>,
}

impl TableMover {
    /// May leave page tables of the second level out of the plan, with a warning.
    pub(super) fn new(
        claim: Claim,
        mut plan: Plan,
        to: NodeId,
        (threads, slots): (Threads, Vec<ClaimedSlot>),
        began: Instant,
        warnings: &mut Vec<Warning>,
    ) -> Result<TableMover, Error> {
        let backend = &claim.region().backend;
        let mut stagings = Vec::new();
        for level in plan.levels() {
            match Staging::new(backend, level) {
                Ok(staging) => stagings.push((level, staging)),
                // Most of the page tables can do without so much address space.
                Err(error) if level == HIGHEST && !stagings.is_empty() => {
                    plan.leave_upper();
                    let text = "the page tables of the second level stay where they are";
                    warnings.push(Warning::because(WarningKind::PageTables, text, &error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(TableMover {
            stagings: Mutex::new(stagings),
            nodes: BTreeSet::from([to]),
            cpuset: CpusetWatch::new(began),
            claim,
            plan,
            to,
            threads,
            slots,
        })
    }

    /// The areas of the job: a leg each, which it cuts.
    pub(super) fn areas(&self) -> Vec<Area> {
        let legs = self.plan.legs.iter().enumerate();
        legs.map(|(leg, part)| Area::new(0, leg, part.stretch.pages.clone())).collect()
    }

    fn region(&self) -> &Arc<RegionInner> {
        self.claim.region()
    }

    fn backend(&self) -> &dyn Backend {
        &*self.region().backend
    }

    /// Moves the page of the second level that maps an area, if it is to move and has not been tried.
    /// There are few of them, so a refusal costs little, and a warning tells of it.
    fn move_upper(&self, worker: &mut Worker, area: &Area, books: Books<'_>) {
        let holds = |stretch: &Stretch| stretch.pages.contains(&area.pages.start);
        let mut uppers = self.plan.uppers.iter();
        let Some(upper) = uppers.find(|upper| holds(&upper.stretch)) else { return };
        let pages = &upper.stretch.pages;
        if upper.is_tried.swap(true, Ordering::Relaxed) {
            return;
        }
        // Otherwise the program has just changed the mapping.
        let under_way = self.region().begin(self.claim.owner(), pages);
        let moved = under_way.is_ok_and(|_under_way| {
            let mut effort = Effort::default();
            let leg = (HIGHEST, &upper.stretch, false);
            let runs = self.move_pages(worker, leg, pages, &mut effort, books);
            books.add(&effort.counters);
            runs.iter().all(|(_, verdict)| *verdict == Verdict::Moved)
        });
        if !moved {
            let text = "some pages of page table of the second level stay where they are, because \
                        they also map other mappings, or a call was refused";
            books.warn_once(Warning::new(WarningKind::PageTables, text.to_owned()));
        }
    }

    /// Gives pages that are under way new page tables of a level: those in whole reaches with equal
    /// attributes. Verdicts come in the order of pages.
    fn move_pages(
        &self,
        worker: &mut Worker,
        (level, stretch, is_unknown): (PageTableLevel, &Stretch, bool),
        pages: &Range<u64>,
        effort: &mut Effort,
        books: Books<'_>,
    ) -> Runs {
        let region = self.region();
        let addresses = region.addr(pages.start)..region.addr(pages.end);
        // Read now, because the program may have changed attributes since the job began.
        let runs = region.backend.attributes(std::slice::from_ref(&addresses));
        let runs = runs.unwrap_or_else(|_| {
            let attributes = stretch.attributes;
            vec![AttributeRun { start: addresses.start, end: addresses.end, attributes }]
        });
        let mut verdicts = Vec::new();
        for (pages, attributes) in pieces(region, level, pages, &runs) {
            let Some(attributes) = attributes else {
                verdicts.push((pages, Verdict::Left(Some(Reason::SharedTable))));
                continue;
            };
            let piece = Stretch { attributes, ..stretch.part(&pages) };
            let step = self.renew(worker, (level, is_unknown), &piece, effort, books);
            let reach = (level.reach_bytes() / region.page.bytes()) as u64;
            if step == AttemptResult::Refused(Call::Exchange, SPLIT)
                && pages.end - pages.start > reach
            {
                // Several mappings, for a reason that attributes do not show (`mbind`).
                let reaches = (pages.start..pages.end).step_by(reach as usize);
                verdicts.extend(reaches.map(|first| {
                    let piece = piece.part(&(first..first + reach));
                    let step = self.renew(worker, (level, is_unknown), &piece, effort, books);
                    (piece.pages, verdict(step))
                }));
                continue;
            }
            verdicts.push((pages, verdict(step)));
        }
        verdicts
    }

    /// Gives pages new page tables of a level, and notes it in the region's account. The pages are
    /// whole reaches, and their attributes are the present ones.
    fn renew(
        &self,
        worker: &mut Worker,
        (level, is_unknown): (PageTableLevel, bool),
        stretch: &Stretch,
        effort: &mut Effort,
        books: Books<'_>,
    ) -> AttemptResult {
        let (region, backend) = (self.region(), self.backend());
        let Stretch { pages, share, first_frame, attributes } = stretch;
        let (addr, len) = (region.addr(pages.start), region.bytes(pages.end - pages.start));
        let tools = Tools { slot: worker.slot, epoch: &SLOTS.epoch, backend };
        let haste = worker.precedence.in_windows(false);
        let staging = match worker.staging(level, region) {
            Ok(staging) => staging,
            Err(_) => return AttemptResult::Refused(Call::Reserve, Errno(libc::ENOMEM)),
        };
        if let Err(errno) = staging.make_ready(share, len) {
            return AttemptResult::Refused(Call::Map, errno);
        }
        let offset = share.0.offset_of(*first_frame);
        let frames = Frames { alias: staging.addr(), file: share.0.file, offset };
        let reach = level.reach_bytes();
        let agree = (addr ^ frames.alias).is_multiple_of(reach);
        assert!(addr.is_multiple_of(reach) && !agree, "page tables would move as they are");
        let span = Span { addr, len, prot: attributes.prot };
        // A child would get the staging, with the access that it has from the region.
        let no_fork = (!attributes.dont_fork).then(forks::keep_away);
        if let Err(errno) = self.take_lock_off(&span, attributes, effort, books) {
            return AttemptResult::Refused(Call::Lock, errno);
        }
        let mut lost = Vec::new();
        // Other threads may wait for this window, so the job's state is not touched in it.
        let restore = |step, left| match left {
            tables::Staging::Full if step == AttemptResult::Migrated => {
                self.restore_from(&frames, &span, attributes, &mut lost);
            }
            _ => {
                let is_anew = step == AttemptResult::Migrated && left == tables::Staging::Torn;
                lost.push(restore_attributes(backend, attributes, &span, !is_anew));
            }
        };
        // SAFETY: the job's claim keeps everybody else from migrating, discarding or growing these
        // pages, the staging is this worker's, and the backend lives as long as the region. A lock
        // was taken off above.
        let (step, left) = unsafe { tables::renew(&tools, &span, &frames, haste, effort, restore) };
        // The program may have allowed children the region in the last moment.
        staging.hide(len);
        drop(no_fork);
        for error in lost.into_iter().filter_map(Result::err) {
            let text = "an attribute of a part of the region is lost";
            books.warn_once(Warning::because(WarningKind::Attributes, text, &error));
        }
        if left == tables::Staging::Torn {
            staging.mend(&frames, len);
        }
        self.note(level, (step, left), &span, effort, is_unknown);
        step
    }

    /// Notes in the region's account which page tables a span has got.
    fn note(
        &self,
        level: PageTableLevel,
        (step, left): (AttemptResult, tables::Staging),
        span: &Span,
        effort: &mut Effort,
        is_unknown: bool,
    ) {
        let region = self.region();
        let range = span.addr..span.addr + span.len;
        let readable = span.prot.readable();
        match (step, left) {
            // The file has been mapped, and this thread has filled all page tables.
            (AttemptResult::Migrated, tables::Staging::Full) => {
                lock(&region.tables).mapped(&range, Some(self.to), readable);
            }
            (AttemptResult::Migrated, _) => {
                let mut fill = || {
                    effort.count(Call::Populate);
                    // SAFETY: the pages are under way.
                    unsafe { region.backend.populate(span.addr, span.len, false) }.is_ok()
                };
                // Entries that were not there have not come back.
                let is_filled = !is_unknown || readable && fill();
                let tables = &mut *lock(&region.tables);
                match is_filled {
                    true => tables.renewed(level, &range, self.to),
                    false => tables.mapped(&range, None, false),
                }
            }
            // Threads that touch the pages make new page tables.
            (_, tables::Staging::Full) => lock(&region.tables).mapped(&range, None, readable),
            _ => {}
        }
    }

    /// Unlocks a span that is locked, if the process may lock it again.
    fn take_lock_off(
        &self,
        span: &Span,
        attributes: &Attributes,
        effort: &mut Effort,
        books: Books<'_>,
    ) -> Result<(), Errno> {
        if !attributes.locked {
            return Ok(());
        }
        let backend = self.backend();
        effort.counters.calls[Call::Lock as usize] += 2;
        // The kernel checks the same limit and privilege for pages that are locked already.
        // SAFETY: the pages are under way, and stay locked.
        unsafe { backend.lock(span.addr, span.len, attributes.lock_on_fault) }?;
        // SAFETY: as above; they get their lock again.
        unsafe { backend.unlock(span.addr, span.len) }.inspect_err(|_| {
            tell_lost(books, restore_attributes(backend, attributes, span, true));
        })
    }

    /// Gives a span that was mapped anew the attributes that its entries in the staging have. The
    /// program may have changed them since they were read.
    fn restore_from(
        &self,
        staging: &Frames,
        span: &Span,
        known: &Attributes,
        lost: &mut Vec<Result<(), Error>>,
    ) {
        let backend = self.backend();
        let waiting = staging.alias..staging.alias + span.len;
        let runs = backend.attributes(std::slice::from_ref(&waiting)).unwrap_or_else(|_| {
            vec![AttributeRun { start: waiting.start, end: waiting.end, attributes: *known }]
        });
        for AttributeRun { start, end, attributes } in runs {
            let addr = span.addr + (start - waiting.start);
            let part = Span { addr, len: end - start, prot: attributes.prot };
            let Attributes { locked, lock_on_fault, .. } = *known;
            let wanted = Attributes { locked, lock_on_fault, ..attributes };
            if part.prot != span.prot {
                // SAFETY: the pages are under way.
                let given = unsafe { backend.protect(part.addr, part.len, part.prot) };
                let error = |errno| Error::call(Call::Protect, part.addr, part.len, errno);
                lost.push(given.map_err(error));
            }
            lost.push(restore_attributes(backend, &wanted, &part, false));
        }
    }
}

impl Worker {
    /// The staging for a level, made anew if the last one was lost.
    fn staging(
        &mut self,
        level: PageTableLevel,
        region: &RegionInner,
    ) -> Result<&mut Staging, Error> {
        let at = self.stagings.iter().position(|(of, _)| *of == level).expect("each level has one");
        if self.stagings[at].1.is_lost() {
            self.stagings[at].1 = Staging::new(&region.backend, level)?;
        }
        Ok(&mut self.stagings[at].1)
    }
}

impl Mover for TableMover {
    type Worker = Worker;

    fn surround(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        let backend = self.backend();
        self.threads.surround(backend, &[], books, || {
            books.count(Call::PreferTables, 1);
            match backend.prefer_tables_on(Some(self.to.0)) {
                Ok(()) => {
                    self.claim.set_open(true);
                    work();
                    self.claim.set_open(false);
                }
                Err(errno) => {
                    let range = self.claim.range();
                    let addr = self.region().start + range.start;
                    books.fail(Error::call(Call::PreferTables, addr, range.len(), errno));
                }
            }
        });
    }

    fn worker(&self, _number: usize, _books: Books<'_>) -> Worker {
        Worker {
            slot: self.slots[0].slot(),
            precedence: Precedence::new(self.threads.first(self.backend())),
            stagings: std::mem::take(&mut lock(&self.stagings)),
        }
    }

    fn may_go_on(&self, books: Books<'_>) -> Result<(), Stop> {
        self.cpuset.still_allows(&self.nodes, self.backend(), books)
    }

    fn area_pages(&self, stretch: &Area) -> Option<u64> {
        Some(self.plan.legs[stretch.leg].area_pages(self.region().page))
    }

    fn attempt(&self, worker: &mut Worker, area: &Area, terms: &Terms<'_>) -> AreaOutcome {
        let leg = &self.plan.legs[area.leg];
        if !leg.stretch.share.has_descriptor() {
            return AreaOutcome::given_up(BY, area, Reason::DescriptorLost);
        }
        let backend = self.backend();
        if backend.is_host_memory() && is_over_address_space_limit() {
            let why = Reason::Refused(Call::Map, Errno(libc::ENOMEM));
            return AreaOutcome::not_made(BY, area.pages.clone(), Verdict::Refused(why));
        }
        self.move_upper(worker, area, terms.books);
        let _under_way = match self.region().begin(self.claim.owner(), &area.pages) {
            Ok(under_way) => under_way,
            Err(gone) => return withdrawn(BY, gone),
        };
        let mut effort = Effort::default();
        let what = (leg.level, &leg.stretch, leg.is_unknown);
        let runs = self.move_pages(worker, what, &area.pages, &mut effort, terms.books);
        AreaOutcome { runs, by: BY, counters: effort.counters, seen: None, disturbed: None }
    }

    fn is_kept(&self, area: &Area) -> bool {
        self.region().is_waited_for(&area.pages)
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        let (region, len) = (self.region(), self.region().bytes(area.len()));
        let addr = region.addr(area.pages.start);
        match why {
            Reason::Refused(call, errno) => Error::call(call, addr, len, errno),
            _ => {
                let shares = [&self.plan.legs[area.leg].stretch.share];
                let lost = shares.iter().find_map(|share| share.check_descriptor().err());
                lost.unwrap_or_else(|| Error::call(Call::Exchange, addr, len, Errno(libc::EINVAL)))
            }
        }
    }

    fn finish(self, _books: Books<'_>, moved: &mut dyn FnMut()) {
        let TableMover { claim, slots, .. } = self;
        drop(slots);
        drop(claim);
        moved();
    }
}

/// The verdict on pages whose page tables were to move.
fn verdict(step: AttemptResult) -> Verdict {
    match step {
        AttemptResult::Migrated => Verdict::Moved,
        // One reach is several mappings.
        AttemptResult::Refused(Call::Exchange, SPLIT) => Verdict::Left(Some(Reason::SharedTable)),
        // Repeating is in vain: the kernel moves no page tables, or a security module forbids it.
        AttemptResult::Refused(call, errno @ Errno(libc::EINVAL | libc::EPERM)) => {
            Verdict::GivenUp(Reason::Refused(call, errno))
        }
        // The pages are locked, and the process may not lock so much any more.
        AttemptResult::Refused(call @ Call::Lock, errno) => {
            Verdict::GivenUp(Reason::Refused(call, errno))
        }
        AttemptResult::Refused(call, errno) => Verdict::Refused(Reason::Refused(call, errno)),
        AttemptResult::Dirty => unreachable!("nothing is copied"),
    }
}
