//! The job's mover for ranges of processes. An attempt queries an area until it has enough pages
//! for one call, makes the call, and queries where the pages lie then.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use pageleap_sys::Errno;

use super::AREA_PAGES;
use super::batch::Batch;
use super::call::{Fate, move_once};
use super::leg::{HUGE_PAGES, Leg};
use super::looked::{Entry, Looked};
use super::room::Rooms;
use super::target::Process;
use crate::engine::choice::Why;
use crate::engine::effort::Counters;
use crate::error::Error;
use crate::job::area::{self, Area, AreaOutcome, By, Reason, Runs, Verdict};
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::job::{Mover, Terms};
use crate::priority::Raised;
use crate::sync::{Instant, thread};
use crate::units::{AddressRange, BASE_PAGE, Call, EngineName, NodeId};

/// Pages of one query. The kernel copies the lists, and this size keeps the copies small.
pub(super) const QUERY: u64 = 1024;
/// The pauses before a page is tried again: the first one, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(64)];

/// The fewest tries under [`Persistence::Without`].
const LEAST_TRIES: u32 = 4;

/// The engine's name in options and reports, and its number in C.
pub(crate) const ENGINE: EngineName = EngineName::new("kernel", 6);

/// The engine that has moved pages, for reports.
pub(super) const BY: By = By { engine: ENGINE, why: Why::AsChosen };

/// How often a page is tried.
#[derive(Clone, Copy, Debug)]
pub(super) enum Persistence {
    /// This many times.
    Tries(u32),
    /// Until no page has moved for this long.
    Without(Duration),
}

/// Settings of a job.
pub(super) struct Manner {
    /// The nodes from which pages move; `None`: all nodes.
    pub(super) from: Option<BTreeSet<NodeId>>,
    /// Whether pages move that are mapped more than once.
    pub(super) shared: bool,
    pub(super) rooms: Rooms,
    pub(super) persistence: Persistence,
    pub(super) batch: Batch,
    /// The most base pages of a call.
    pub(super) most_pages: usize,
    /// Whether the job has several processes, some of which may end.
    pub(super) several: bool,
}

/// Moves pages of processes through the kernel.
pub(crate) struct KernelMover {
    pub(super) processes: Vec<Process>,
    pub(super) legs: Vec<Leg>,
    pub(super) manner: Manner,
}

/// State of the worker between attempts.
pub(crate) struct Worker {
    batch: Batch,
    /// Blocks of 2 MB, by process and number, that did not move as one page. They are tried page by
    /// page.
    apart: BTreeSet<(usize, u64)>,
    /// When a page moved last.
    moved: Instant,
    /// The leg that was tried again last, and how often it had been refused.
    again: (usize, u32),
    /// Pages that are to be tried again: the end of each run, by leg and first page. Pages between
    /// the runs are not queried again, because they may be far more, and others may have moved them
    /// since.
    late: BTreeMap<(usize, u64), u64>,
    /// The parts of the area that this attempt tries.
    tried: Vec<Range<u64>>,
}

/// Findings of an attempt.
#[derive(Default)]
struct Found {
    /// The pages to move, ascending.
    list: Vec<Entry>,
    /// Verdicts on pages that need not move, and on pages that were tried.
    verdicts: Runs,
    counters: Counters,
    /// Pages behind the last one of the list that may belong to its folio: the number of the first,
    /// and the status of each before the call.
    behind: (u64, Vec<i32>),
}

impl Found {
    fn say(&mut self, pages: Range<u64>, verdict: Verdict) {
        match self.verdicts.last_mut() {
            _ if pages.is_empty() => {}
            Some((last, same)) if last.end == pages.start && *same == verdict => {
                last.end = pages.end;
            }
            _ => self.verdicts.push((pages, verdict)),
        }
    }

    fn outcome(self) -> AreaOutcome {
        let runs = area::joined(self.verdicts);
        AreaOutcome { runs, by: BY, counters: self.counters, seen: None, disturbed: None }
    }
}

impl KernelMover {
    pub(super) fn new(processes: Vec<Process>, legs: Vec<Leg>, manner: Manner) -> Self {
        KernelMover { processes, legs, manner }
    }

    /// The runs of a leg with one destination.
    pub(crate) fn parts(&self, leg: usize) -> Vec<(Range<u64>, NodeId)> {
        let leg = &self.legs[leg];
        leg.parts(leg.pages.clone())
    }

    /// Finds pages for one call among `tried`, the parts of an area that are to be tried. Returns
    /// `Err` if a query fails.
    fn gather(
        &self,
        worker: &Worker,
        area: &Area,
        tried: &[Range<u64>],
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        let most = worker.batch.pages().min(self.manner.most_pages) as u64;
        let (mut wanted, mut at) = (0, area.pages.start);
        for part in tried {
            if wanted >= most {
                return Ok(());
            }
            found.say(at..part.start, Verdict::AsBefore);
            // One attempt looks at no more than `AREA_PAGES`, so that a job that is to stop is
            // noticed soon.
            let end = part.end.min(area.pages.start.saturating_add(AREA_PAGES));
            at = part.start.max(end);
            self.gather_part(worker, area, part.start..at, (&mut wanted, most), found)?;
            if at < part.end {
                return Ok(());
            }
        }
        if wanted < most {
            found.say(at..area.pages.end, Verdict::AsBefore);
        }
        Ok(())
    }

    /// Finds pages in one part until `most` are found.
    fn gather_part(
        &self,
        worker: &Worker,
        area: &Area,
        part: Range<u64>,
        (wanted, most): (&mut u64, u64),
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        let leg = &self.legs[area.leg];
        let process = &self.processes[leg.process];
        let from = self.manner.from.as_ref();
        let is_apart = |page| worker.is_apart(leg, page);
        let mut at = part.start;
        while at < part.end && *wanted < most {
            let step = QUERY * leg.unit;
            let chunk = at..((at / step + 1) * step).min(part.end);
            let looked = Looked::at(process, leg, chunk, &mut found.counters)?;
            if leg.unit == 1 && looked.is_empty() {
                // Skip reserved addresses at once: processes may have terabytes of them.
                let end = process.skip_absent(looked.pages.end, part.end);
                found.say(at..end, Verdict::Left(Some(Reason::Absent)));
                at = end;
                continue;
            }
            while at < looked.pages.end && *wanted < most {
                let entry = looked.entry(from, is_apart, at, area.refused == 0);
                match entry {
                    Ok(entry) => {
                        *wanted += entry.span;
                        found.list.push(entry);
                        at += entry.span;
                    }
                    Err(verdict) => {
                        found.say(at..at + leg.unit, verdict);
                        at += leg.unit;
                    }
                }
                // A block that is tried page by page is not divided between two calls.
                let within = leg.maybe_huge && !at.is_multiple_of(HUGE_PAGES);
                if *wanted >= most && within && is_apart(at) && at < looked.pages.end {
                    *wanted = most - 1;
                }
            }
            if leg.may_have_folios {
                let end = at.next_multiple_of(HUGE_PAGES).min(looked.pages.end);
                let unit = |page: u64| (page - looked.pages.start) as usize;
                found.behind = (at, looked.status[unit(at)..unit(end)].to_vec());
            }
        }
        Ok(())
    }

    /// Removes pages from the list for which their node has no room.
    fn fit(&self, worker: &Worker, area: &Area, found: &mut Found) {
        let leg = &self.legs[area.leg];
        let rooms = &self.manner.rooms;
        let now = |node| match leg.is_hugetlb {
            true => {
                let page_bytes = leg.unit * BASE_PAGE as u64;
                (rooms.hugetlb_now(node, page_bytes).saturating_mul(page_bytes), u64::MAX)
            }
            false => (rooms.now(node), if leg.maybe_huge { rooms.blocks_now(node) } else { 0 }),
        };
        let mut left: BTreeMap<NodeId, (u64, u64)> = BTreeMap::new();
        let process = &self.processes[leg.process];
        // The last block of 2 MB, and whether its pages have to stay.
        let (mut last, mut stays) = (None, false);
        for entry in std::mem::take(&mut found.list) {
            let needs = entry.span * BASE_PAGE as u64;
            let (bytes, blocks) = left.entry(entry.node).or_insert_with(|| now(entry.node));
            let block = entry.page / HUGE_PAGES;
            if last.replace(block) != Some(block) {
                // If the kernel cannot tell whether a page is huge, it counts as huge.
                let is_huge = leg.maybe_huge
                    && !worker.is_apart(leg, entry.page)
                    && (*blocks > 0 || process.is_huge(entry.page) != Some(false));
                stays = is_huge && *blocks == 0;
                *blocks = blocks.saturating_sub(u64::from(is_huge));
            }
            let verdict = match bytes.checked_sub(needs) {
                None => Verdict::GivenUp(Reason::NoRoom),
                Some(_) if stays => self.once_more(worker, area, Reason::NoFreeBlock),
                Some(less) => {
                    *bytes = less;
                    found.list.push(entry);
                    continue;
                }
            };
            found.say(entry.page..entry.page + entry.span, verdict);
        }
    }

    /// Makes the moving call for the list.
    fn move_list(
        &self,
        worker: &mut Worker,
        area: &Area,
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        let leg = &self.legs[area.leg];
        let process = &self.processes[leg.process];
        let mut list = std::mem::take(&mut found.list);
        // Neighbours of the list that go to one node form a batch of the kernel, so sorting by node
        // makes large batches. Where there may be folios, the list stays ascending: then a folio
        // with parts for two nodes ends up on the later one, which differs from folio to folio.
        if !leg.may_have_folios {
            list.sort_by_key(|entry| (entry.node, entry.page));
        }
        let addresses: Vec<usize> = list.iter().map(|e| e.page as usize * BASE_PAGE).collect();
        let nodes: Vec<i32> = list.iter().map(|entry| entry.node.0 as i32).collect();
        if self.forget_if_gone(worker, process, found) {
            return Ok(());
        }
        let began = Instant::now();
        found.counters.count(Call::MovePages);
        found.counters.count(Call::QueryNodes);
        let fates = move_once(&*process.calls, &addresses, &nodes, self.manner.shared);
        let took = began.elapsed();
        found.counters.window_ns = took.as_nanos() as u64;
        if process.is_gone() {
            let each = list.iter().map(|entry| entry.page..entry.page + entry.span);
            each.for_each(|pages| found.say(pages, self.gone(Reason::Uncertain)));
            return Ok(());
        }
        let (mut stuck, mut moved) = (None, 0);
        for (entry, fate) in list.iter().zip(fates?) {
            let block = entry.page / HUGE_PAGES;
            let apart = leg.maybe_huge && worker.apart.contains(&(leg.process, block));
            let verdict = match fate {
                Fate::There => {
                    moved += self.arrived(worker, leg, entry, found)?;
                    continue;
                }
                // The kernel has just isolated and put back the huge page that this is a part of.
                Fate::NotTried | Fate::Stays(Errno(libc::EBUSY))
                    if apart && stuck == Some(block) =>
                {
                    self.once_more(worker, area, Reason::InUse)
                }
                Fate::NotTried => continue,
                fate => {
                    stuck = (fate == Fate::InUse).then_some(block);
                    self.verdict(worker, area, process, entry, fate)
                }
            };
            if entry.span == HUGE_PAGES && leg.unit == 1 {
                worker.apart.insert((leg.process, block));
                found.say(entry.page..entry.page + 1, verdict);
            } else {
                found.say(entry.page..entry.page + entry.span, verdict);
            }
        }
        if moved > 0 {
            worker.moved = Instant::now();
        }
        // Pages that stay take time, too. If most pages stay, all tried ones count.
        let tried: u64 = list.iter().map(|entry| entry.span).sum();
        let counted = if moved * 2 >= tried { moved } else { tried };
        moved += self.came_along(leg, found)?;
        worker.batch.observe(counted.max(moved) as usize, took);
        found.counters.copied = moved * BASE_PAGE as u64;
        Ok(())
    }

    /// If the process has ended or runs another program, the findings may be about that program, so
    /// all pages that were to be tried get the verdict of an ended process. Returns whether that is
    /// so.
    fn forget_if_gone(&self, worker: &Worker, process: &Process, found: &mut Found) -> bool {
        let is_gone = process.is_gone();
        if is_gone {
            found.verdicts.clear();
            let all = worker.tried.iter().cloned();
            all.for_each(|pages| found.say(pages, self.gone(Reason::ProcessEnded)));
        }
        is_gone
    }

    /// Called when an entry has arrived on its node. Checks whether the whole span of the entry
    /// has, and returns how many pages did.
    fn arrived(
        &self,
        worker: &mut Worker,
        leg: &Leg,
        entry: &Entry,
        found: &mut Found,
    ) -> Result<u64, (Call, Errno)> {
        let mut span = entry.span;
        if leg.unit == 1 && span > 1 {
            let all = entry.page..entry.page + span;
            let looked = Looked::at(&self.processes[leg.process], leg, all, &mut found.counters)?;
            if looked.status.iter().any(|status| *status != entry.node.0 as i32) {
                // It was no huge page.
                worker.apart.insert((leg.process, entry.page / HUGE_PAGES));
                span = 1;
            }
        }
        found.say(entry.page..entry.page + span, Verdict::Moved);
        Ok(span)
    }

    /// Counts pages behind the last one of the list that have moved with it as part of its folio,
    /// because they count for a rate limit. Returns how many.
    fn came_along(&self, leg: &Leg, found: &mut Found) -> Result<u64, (Call, Errno)> {
        let (first, before) = std::mem::take(&mut found.behind);
        let pages = first..first + before.len() as u64;
        if pages.is_empty() {
            return Ok(0);
        }
        let now =
            Looked::at(&self.processes[leg.process], leg, pages.clone(), &mut found.counters)?;
        let mut came = 0;
        for ((page, before), status) in pages.zip(before).zip(&now.status) {
            let is_there = u32::try_from(*status).is_ok_and(|on| NodeId(on) == now.part(page).1);
            if before >= 0 && before != *status && is_there {
                found.say(page..page + 1, Verdict::Moved);
                came += 1;
            }
        }
        Ok(came)
    }

    /// The verdict on a page that was tried and did not move.
    fn verdict(
        &self,
        worker: &Worker,
        area: &Area,
        process: &Process,
        entry: &Entry,
        fate: Fate,
    ) -> Verdict {
        match fate {
            Fate::Stays(Errno(libc::EACCES)) if !self.manner.shared => {
                // A forked child shares all memory until it ends, or writes to it.
                let may_end = matches!(self.manner.persistence, Persistence::Without(_));
                match self.once_more(worker, area, Reason::Shared) {
                    later @ Verdict::Later(_) if may_end && self.legs[area.leg].is_own => later,
                    _ => Verdict::Left(Some(Reason::Shared)),
                }
            }
            Fate::Gone => match process.why_absent(entry.page, 1)[0] {
                // Otherwise it may be present again, or is being migrated.
                Reason::Absent => Verdict::Left(Some(Reason::Absent)),
                _ if area.refused == 0 => Verdict::Later(Reason::InUse),
                why => Verdict::Left(Some(why)),
            },
            // The page is present, and the kernel moves nothing of its mapping. On Linux 6.1,
            // EFAULT may also mean that it was absent during the call.
            Fate::Stays(Errno(libc::EFAULT)) => match area.refused {
                0 => Verdict::Later(Reason::Unmovable),
                _ => Verdict::Left(Some(Reason::Unmovable)),
            },
            Fate::Stays(Errno(libc::EBUSY | libc::ENOENT)) | Fate::InUse => {
                self.once_more(worker, area, Reason::InUse)
            }
            Fate::Refused(errno @ Errno(libc::ENOMEM)) | Fate::Stays(errno) => {
                self.once_more(worker, area, Reason::Refused(Call::MovePages, errno))
            }
            Fate::Refused(errno) => Verdict::GivenUp(Reason::Refused(Call::MovePages, errno)),
            Fate::There | Fate::NotTried => unreachable!("dealt with by the caller"),
        }
    }

    /// The verdict on pages whose process has ended. Among several processes that is no failure,
    /// because the memory of the ended one needs no move any more.
    fn gone(&self, why: Reason) -> Verdict {
        match self.manner.several {
            true => Verdict::Left(Some(why)),
            false => Verdict::GivenUp(why),
        }
    }

    /// Tries a page again, unless it has been tried often enough.
    fn once_more(&self, worker: &Worker, area: &Area, why: Reason) -> Verdict {
        let goes_on = match self.manner.persistence {
            Persistence::Tries(tries) => area.refused + 1 < tries,
            // Queries and pauses for a rate limit take time, too, so a page gets a few tries in any
            // case.
            Persistence::Without(patience) => {
                area.refused + 1 < LEAST_TRIES || worker.moved.elapsed() < patience
            }
        };
        if goes_on { Verdict::Later(why) } else { Verdict::GivenUp(why) }
    }

    pub(super) fn not_moved(&self, leg: &Leg, pages: &Range<u64>, why: Reason) -> Error {
        let bytes = |page: u64| page as usize * BASE_PAGE;
        Error::NotMoved {
            pid: self.processes[leg.process].pid,
            range: AddressRange(bytes(pages.start)..bytes(pages.end)),
            reason: why.to_string(),
            remedy: remedy(why),
        }
    }

    fn try_area(
        &self,
        worker: &mut Worker,
        area: &Area,
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        let tried = std::mem::take(&mut worker.tried);
        let gathered = self.gather(worker, area, &tried, found);
        worker.tried = tried;
        gathered?;
        self.fit(worker, area, found);
        if found.list.is_empty() {
            // If the process runs another program by now (`execve`), the answers may be about its
            // memory.
            self.forget_if_gone(worker, &self.processes[self.legs[area.leg].process], found);
            return Ok(());
        }
        self.move_list(worker, area, found)
    }
}

impl Worker {
    /// Removes and returns the parts of an area that are to be tried again.
    fn take_late(&mut self, area: &Area) -> Vec<Range<u64>> {
        let Range { start, end } = area.pages;
        let inside = self.late.range((area.leg, start)..(area.leg, end));
        let keys: Vec<(usize, u64)> = inside.map(|(key, _)| *key).collect();
        let take = |key| self.late.remove(&key).map(|end| key.1..end);
        keys.into_iter().filter_map(take).collect()
    }

    /// Notes the pages to try again: those whose verdict says so, and those that were to be tried
    /// again and were not reached.
    fn note_late(&mut self, area: &Area, runs: &Runs) {
        let later = runs.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Later(_)));
        for (pages, _) in later {
            self.late.insert((area.leg, pages.start), pages.end);
        }
        if area.refused == 0 {
            return;
        }
        for part in &self.tried {
            let mut at = part.start;
            let inside =
                runs.iter().filter(|(run, _)| run.end > part.start && run.start < part.end);
            for (run, _) in inside {
                if at < run.start {
                    self.late.insert((area.leg, at), run.start);
                }
                at = run.end;
            }
            if at < part.end {
                self.late.insert((area.leg, at), part.end);
            }
        }
    }

    fn is_apart(&self, leg: &Leg, page: u64) -> bool {
        self.apart.contains(&(leg.process, page / HUGE_PAGES))
    }

    /// Pauses before pages are tried again: once for each round, which may take several attempts.
    fn pause_before(&mut self, area: &Area) {
        let [first, longest] = PAUSES;
        let round = (area.leg, area.refused);
        if area.refused > 0 && std::mem::replace(&mut self.again, round) != round {
            let times = 4u32.saturating_pow(area.refused - 1);
            thread::sleep(first.saturating_mul(times).min(longest));
        }
    }
}

impl Mover for KernelMover {
    type Worker = Worker;

    fn worker(&self, _number: usize, books: Books<'_>) -> Worker {
        // Threads that touch a page wait while a call moves it.
        Raised::this_thread(|low| books.warn_once(Warning::new(WarningKind::Priority, low)));
        let batch = self.manner.batch.clone();
        Worker {
            batch,
            apart: BTreeSet::new(),
            moved: Instant::now(),
            again: (0, 0),
            late: BTreeMap::new(),
            tried: Vec::new(),
        }
    }

    fn attempt(&self, worker: &mut Worker, area: &Area, _terms: &Terms<'_>) -> AreaOutcome {
        let process = &self.processes[self.legs[area.leg].process];
        let mut found = Found::default();
        worker.pause_before(area);
        worker.tried = match area.refused {
            0 => vec![area.pages.clone()],
            _ => worker.take_late(area),
        };
        if let Err((call, errno)) = self.try_area(worker, area, &mut found) {
            let refused = Reason::Refused(call, errno);
            let verdict = match errno {
                _ if process.is_gone() => self.gone(Reason::ProcessEnded),
                // The main thread has given up the memory. Either the process is about to end, and
                // has ended by the next try, or its other threads go on without the main thread.
                Errno(libc::EINVAL) => self.once_more(worker, area, refused),
                _ => Verdict::GivenUp(refused),
            };
            // Nothing is known of pages that have moved before the refused query, so all tried
            // pages get this verdict.
            let all = worker.tried.iter().cloned();
            found.verdicts = all.map(|pages| (pages, verdict)).collect();
        }
        let outcome = found.outcome();
        worker.note_late(area, &outcome.runs);
        outcome
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        self.not_moved(&self.legs[area.leg], &area.pages, why)
    }

    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        self.settle(books, |_| true);
        moved();
    }
}

/// The remedy for a reason.
fn remedy(why: Reason) -> &'static str {
    match why {
        Reason::InUse => "try again later, when its I/O has ended",
        Reason::NoRoom => "free memory on the node, move less, or fill the node in spite of it",
        Reason::NoFreeBlock => {
            "compact the node (write 1 to /sys/devices/system/node/nodeN/compact), or fill the node \
             in spite of it"
        }
        Reason::Refused(_, Errno(libc::ENOMEM)) => "free memory on the node, or move less",
        Reason::ProcessEnded | Reason::Uncertain => "read its memory again, if it still runs",
        _ => "look at the reason",
    }
}

// No chunk ends within a huge page.
const _: () = assert!(AREA_PAGES.is_multiple_of(QUERY) && QUERY.is_multiple_of(HUGE_PAGES));
