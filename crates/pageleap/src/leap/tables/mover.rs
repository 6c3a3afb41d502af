//! Moves page tables: one attempt on one area.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::cpuset::CpusetWatch;
use super::super::present::{restore_attributes, tell_lost};
use super::super::slots::ClaimedSlot;
use super::super::threads::{Precedence, Threads};
use super::super::under_way::withdrawn;
use super::plan::{Leg, Plan, Stretch, upper_level};
use super::staging::Staging;
use crate::backend::{Backend, Call, Errno, Haste};
use crate::engine::choice::Why;
use crate::engine::commit::{AttemptResult, SPLIT};
use crate::engine::effort::{Counters, Effort};
use crate::engine::fault::SLOTS;
use crate::engine::slot::{Slot, Span};
use crate::engine::{Frames, Tools, tables};
use crate::error::Error;
use crate::job::area::{Area, AreaOutcome, By, Reason, Runs, Verdict};
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::{Mover, Terms};
use crate::limits::is_over_address_space_limit;
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
    pub(super) fn new(
        claim: Claim,
        plan: Plan,
        to: NodeId,
        threads: Threads,
        slots: Vec<ClaimedSlot>,
        began: Instant,
    ) -> Result<TableMover, Error> {
        let backend = &claim.region().backend;
        let staging = |level| Ok((level, Staging::new(backend, level)?));
        let stagings = plan.levels().into_iter().map(staging).collect::<Result<_, Error>>()?;
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

    fn region(&self) -> &Arc<RegionInner> {
        self.claim.region()
    }

    fn backend(&self) -> &dyn Backend {
        &*self.region().backend
    }

    /// Moves the pages of the second level that map an area, if they are to move and have not been
    /// tried. They are few, so a refusal costs little, and only the account tells of it.
    fn move_uppers(&self, worker: &mut Worker, area: &Area, books: Books<'_>) {
        let holds = |stretch: &Stretch| stretch.pages.contains(&area.pages.start);
        let mut uppers = self.plan.uppers.iter();
        let Some(upper) = uppers.find(|upper| holds(&upper.stretch)) else { return };
        if upper.is_tried.swap(true, Ordering::Relaxed) {
            return;
        }
        let Ok(_under_way) = self.region().begin(self.claim.owner(), &upper.stretch.pages) else {
            return;
        };
        let mut effort = Effort::default();
        self.renew(worker, upper_level(), &upper.stretch, &mut effort, books);
        books.add(&effort.counters);
    }

    /// Gives pages new page tables of a level, and notes it in the region's account.
    fn renew(
        &self,
        worker: &mut Worker,
        level: PageTableLevel,
        stretch: &Stretch,
        effort: &mut Effort,
        books: Books<'_>,
    ) -> AttemptResult {
        let (region, backend) = (self.region(), self.backend());
        let Stretch { pages, share, first_frame, attributes } = stretch;
        let (addr, len) = (region.addr(pages.start), region.bytes(pages.end - pages.start));
        let staging = match worker.staging(level, region) {
            Ok(staging) => staging,
            Err(_) => return AttemptResult::Refused(Call::Reserve, Errno(libc::ENOMEM)),
        };
        let offset = share.0.offset_of(*first_frame);
        let frames = Frames { alias: staging.addr(), file: share.0.file, offset };
        if let Err(errno) = staging.make_ready(share, len) {
            return AttemptResult::Refused(Call::Map, errno);
        }
        let span = Span { addr, len, prot: attributes.prot };
        let tools = Tools { slot: worker.slot, epoch: &SLOTS.epoch, backend };
        let haste: Option<Haste> = worker.precedence.in_windows(false);
        // SAFETY: the job's claim keeps everybody else from migrating, discarding or growing these
        // pages, the staging is this worker's, and the backend lives as long as the region.
        let (step, left) = unsafe { tables::renew(&tools, &span, &frames, haste, effort) };
        let range = addr..addr + len;
        match step {
            AttemptResult::Migrated => lock(&region.tables).renewed(level, &range, self.to),
            // Threads that touch the pages make new page tables.
            _ if left == tables::Staging::Full => {
                lock(&region.tables).mapped(&range, None, attributes.prot.readable());
            }
            _ => {}
        }
        let staging = worker.staging(level, region).expect("it is there");
        match left {
            tables::Staging::Untouched | tables::Staging::Empty => {}
            tables::Staging::Torn => staging.mend(&frames, len),
            tables::Staging::Full => {
                // The program may have changed attributes since the job began, and the entries have
                // taken the present ones along.
                let waiting = frames.alias..frames.alias + len;
                let runs = backend.attributes(std::slice::from_ref(&waiting)).unwrap_or_default();
                let now = runs.first().map_or(*attributes, |run| run.attributes);
                let has_stayed = step != AttemptResult::Migrated;
                tell_lost(books, restore_attributes(backend, &now, &span, has_stayed));
                staging.mend(&frames, len);
            }
        }
        if left == tables::Staging::Torn && step == AttemptResult::Migrated {
            // The mapping of the staging has moved into the span.
            tell_lost(books, restore_attributes(backend, attributes, &span, false));
        }
        step
    }

    /// Moves an area: as a whole, or reach by reach where the program has split the mapping.
    fn move_area(
        &self,
        worker: &mut Worker,
        leg: &Leg,
        area: &Area,
        books: Books<'_>,
    ) -> (Runs, Counters) {
        let mut effort = Effort::default();
        let stretch = leg.stretch.part(&area.pages);
        let step = self.renew(worker, leg.level, &stretch, &mut effort, books);
        let reach = (leg.level.reach_bytes() / self.region().page.bytes()) as u64;
        let is_split = step == AttemptResult::Refused(Call::Exchange, SPLIT);
        if !is_split || area.len() <= reach {
            return (vec![(area.pages.clone(), verdict(step))], effort.counters);
        }
        let reaches = (area.pages.start..area.pages.end).step_by(reach as usize);
        let each = |first: u64| {
            let pages = first..first + reach;
            let part = leg.stretch.part(&pages);
            (pages, verdict(self.renew(worker, leg.level, &part, &mut effort, books)))
        };
        let runs = reaches.map(each).collect();
        (runs, effort.counters)
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
        self.move_uppers(worker, area, terms.books);
        let _under_way = match self.region().begin(self.claim.owner(), &area.pages) {
            Ok(under_way) => under_way,
            Err(gone) => return withdrawn(BY, gone),
        };
        let (runs, counters) = self.move_area(worker, leg, area, terms.books);
        AreaOutcome { runs, by: BY, counters, seen: None, disturbed: None }
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
        // One reach is several mappings: the program has changed attributes since the job began.
        AttemptResult::Refused(Call::Exchange, SPLIT) => Verdict::Left(Some(Reason::SharedTable)),
        // The kernel moves no page tables, or its security module forbids it, now and later.
        AttemptResult::Refused(call, errno @ Errno(libc::EINVAL | libc::EPERM)) => {
            Verdict::GivenUp(Reason::Refused(call, errno))
        }
        AttemptResult::Refused(call, errno) => Verdict::Refused(Reason::Refused(call, errno)),
        AttemptResult::Dirty => unreachable!("nothing is copied"),
    }
}
