//! The job's mover for private anonymous memory of this process. An attempt finds the present pages
//! of an area, prepares memory for their copies, runs one window, and turns the fates of the pages
//! into verdicts. Pages that cannot move in place go to the mover of [`kernel`](crate::kernel).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use pageleap_sys::{self as sys, Advice, CopyMethod, Errno, PageRegion, page_is};

use super::engine::MemoryEngine;
use super::frames::FrameNodes;
use super::pages::Entry;
use super::stage::{NoPlace, Stage};
use super::window::{Fate, MOST_RUNS, Run, Told};
use super::yard::Yard;
use super::{HUGE, MOST};
use crate::affinity;
use crate::engine::choice::Why;
use crate::engine::effort::Counters;
use crate::error::Error;
use crate::job::area::{self, Area, AreaOutcome, By, Reason, Runs, Verdict};
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::pace::Seen;
use crate::job::report::Warning;
use crate::job::run::AbortOnUnwind;
use crate::job::{Mover, Terms};
use crate::kernel::{self, KernelMover};
use crate::priority;
use crate::sync::{Mutex, lock, monotonic_ns, thread};
use crate::tracer::Watch;
use crate::units::{AddressRange, BASE_PAGE, Call, NodeId};

/// Why the kernel moves a part of a range from the start.
const OTHER_MEMORY: Why = Why::Because("it is not private, anonymous and writable memory");
/// Why the kernel moves pages that another engine has tried.
const REMAINDER: Why = Why::Because("the job's engine could not move it");

/// How often a page is tried that a call has refused.
const TRIES: u32 = 4;
/// The same for EAGAIN (mappings are changing), if no other engine can move the page.
const TRIES_IN_CHANGE: u32 = 32;
/// The pause before a page is tried again. It grows fourfold each time.
const PAUSE: Duration = Duration::from_millis(1);

/// A run of pages that go to one node.
pub(super) struct Leg {
    pub(super) node: NodeId,
    /// The leg of the kernel's mover with the same pages, and perhaps others.
    pub(super) kernel: usize,
    /// Whether its mapping is locked, as far as is known.
    pub(super) locked: AtomicBool,
}

/// Moves private anonymous memory.
pub(super) struct MemoryMover {
    pub(super) yard: Yard,
    /// The legs in place. Their numbers follow those of the kernel's legs.
    pub(super) legs: Vec<Leg>,
    /// Moves memory that cannot move in place, and pages that did not.
    pub(super) kernel: KernelMover,
    /// The number of legs of the kernel's mover.
    pub(super) kernel_legs: usize,
    pub(super) stage: Mutex<Stage>,
    pub(super) frames: FrameNodes,
    /// The CPUs of the destinations.
    pub(super) cpus: Vec<usize>,
    pub(super) method: CopyMethod,
    /// Whether pages that lie on the right node get other frames of it.
    pub(super) renews: bool,
    /// Whether pages that did not move in place are left to the kernel.
    pub(super) may_leave: bool,
    /// Whether pages move in place. Becomes false for good when another process traces the job.
    pub(super) in_place: AtomicBool,
    /// Returns the process that traces the calling thread.
    pub(super) tracer: fn() -> Option<u32>,
    /// The result of the last look for a tracer of the worker. It stands for all threads of the
    /// job.
    pub(super) watch: Mutex<Watch>,
}

/// State of the worker between attempts.
pub(super) struct Worker {
    kernel: kernel::Worker,
    /// The leg that was tried again last, and how often it had been refused.
    again: (usize, u32),
    /// Blocks of 2 MB, by number, at whose pages a call was stuck.
    stuck: BTreeSet<usize>,
}

/// Findings and results of an attempt.
struct Found {
    verdicts: Runs,
    counters: Counters,
    runs: Vec<Run>,
    /// Whether the staging memory was locked (mlock).
    locked: bool,
    /// [`Worker::stuck`].
    stuck: BTreeSet<usize>,
}

impl Found {
    fn say(&mut self, range: Range<usize>, verdict: Verdict) {
        let page = |at: usize| (at / BASE_PAGE) as u64;
        self.verdicts.push((page(range.start)..page(range.end), verdict));
    }
}

impl MemoryMover {
    fn leg(&self, area: &Area) -> &Leg {
        &self.legs[area.leg - self.kernel_legs]
    }

    /// The area as the kernel's mover knows it, and why the kernel is to move it; `None` if it
    /// moves in place.
    fn kernels(&self, area: &Area) -> Option<(Area, Why)> {
        if area.leg < self.kernel_legs {
            return Some((area.clone(), OTHER_MEMORY));
        }
        let (refused, why) = match self.in_place.load(Relaxed) {
            true => (area.refused.checked_sub(TRIES), REMAINDER),
            // The attempts in place do not count against the kernel.
            false => (Some(area.refused.saturating_sub(TRIES)), Why::Traced),
        };
        let refused = refused.filter(|_| self.may_leave)?;
        Some((Area { leg: self.leg(area).kernel, refused, ..area.clone() }, why))
    }

    /// Stops moving in place if another process traces the worker. A tracer may stop the threads
    /// that serve the ranges, and then a thread that touches a missing page would wait for ever.
    /// The kernel moves the rest, even if the tracer goes away again.
    fn look_for_tracer(&self) {
        let in_place = self.in_place.load(Relaxed);
        if in_place && lock(&self.watch).tracer(monotonic_ns(), self.tracer).is_some() {
            self.yard.let_go();
            self.in_place.store(false, Relaxed);
        }
    }

    /// The verdict on pages that did not move: try again, leave them to the kernel, or give them up
    /// after enough tries.
    fn once_more(&self, area: &Area, why: Reason) -> Verdict {
        let tries = match why {
            Reason::Refused(_, Errno(libc::EAGAIN)) => TRIES_IN_CHANGE,
            _ => TRIES,
        };
        match area.refused + 1 < tries || self.may_leave {
            true => Verdict::Later(why),
            false => Verdict::GivenUp(why),
        }
    }

    /// Finds the pages of an area that are to move, up to the size of one window.
    fn look(
        &self,
        area: &Area,
        range: Range<usize>,
        found: &mut Found,
    ) -> Result<(), (Call, Errno)> {
        found.counters.count(Call::Scan);
        let (regions, seen) = self.yard.pagemap().scan(range.clone())?;
        let mut at = range.start;
        for PageRegion { start, end, categories } in regions {
            let (start, end) = (start as usize, end as usize);
            if at < start {
                found.say(at..start, Verdict::Left(Some(Reason::Absent)));
            }
            at = end;
            let is = |category| categories & category != 0;
            if is(page_is::SWAPPED) {
                found.say(start..end, Verdict::Left(Some(Reason::SwappedOut)));
            } else if is(page_is::ZERO) {
                found.say(start..end, Verdict::Left(Some(Reason::ZeroPage)));
            } else if !self.add(area, start..end, is(page_is::HUGE), found)? {
                return Ok(());
            }
        }
        // Pages for which the scan had no room go back to the queue.
        let end = if seen < range.end { at } else { range.end };
        if at < end {
            found.say(at..end, Verdict::Left(Some(Reason::Absent)));
        }
        Ok(())
    }

    /// Adds the pages of `range` that are not on their node yet. Returns whether there was room.
    fn add(
        &self,
        area: &Area,
        range: Range<usize>,
        is_huge: bool,
        found: &mut Found,
    ) -> Result<bool, (Call, Errno)> {
        let leg = self.leg(area);
        // The parts of a huge page that do not lie whole in the range move as base pages.
        let inner = range.start.next_multiple_of(HUGE)..range.end / HUGE * HUGE;
        let parts = match is_huge && inner.start < inner.end {
            true => [
                (range.start..inner.start, false),
                (inner.clone(), true),
                (inner.end..range.end, false),
            ],
            false => [(range, false), (0..0, false), (0..0, false)],
        };
        for (part, huge) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
            let step = if huge { HUGE } else { BASE_PAGE };
            let pages: Vec<usize> = part.clone().step_by(step).collect();
            let entries = match huge {
                true => pages.iter().flat_map(|at| self.entries(*at, BASE_PAGE)).collect(),
                false => self.entries(part.start, part.len()),
            };
            let nodes = self.nodes(&pages, &entries, found)?;
            for ((at, entry), node) in pages.into_iter().zip(entries).zip(nodes) {
                if !huge && found.stuck.contains(&(at / HUGE)) {
                    found.say(at..at + step, self.once_more(area, Reason::InUse));
                    continue;
                }
                if !entry.is_exclusive() {
                    found.say(at..at + step, Verdict::Left(Some(entry.why_not())));
                    continue;
                }
                if node == leg.node.0 as i32 && !self.renews {
                    found.say(at..at + step, Verdict::Left(None));
                    continue;
                }
                let runs = &mut found.runs;
                let full = runs.len() == MOST_RUNS;
                match runs.last_mut() {
                    Some(run) if run.at + run.len == at && run.huge == huge => run.len += step,
                    _ if full => return Ok(false),
                    _ => runs.push(Run { at, len: step, huge, ..Run::default() }),
                }
            }
        }
        Ok(true)
    }

    fn entries(&self, at: usize, len: usize) -> Vec<Entry> {
        self.yard.pagemap().entries(&(at..at + len))
    }

    /// The node of each page, or a negated error number, as in `move_pages(2)`.
    fn nodes(
        &self,
        pages: &[usize],
        entries: &[Entry],
        found: &mut Found,
    ) -> Result<Vec<i32>, (Call, Errno)> {
        let known = entries.iter().map(|entry| self.frames.node(entry.frame()?)).collect();
        if let Some(nodes) = known {
            return Ok(nodes);
        }
        let mut nodes = vec![0; pages.len()];
        found.counters.count(Call::QueryNodes);
        sys::nodes_of_pages(0, pages, &mut nodes).map_err(|e| (Call::QueryNodes, e))?;
        Ok(nodes)
    }

    /// Finds places for the copies. Runs without a place do not move.
    fn place(&self, stage: &mut Stage, origin: usize, leg: &Leg, area: &Area, found: &mut Found) {
        for mut run in std::mem::take(&mut found.runs) {
            found.counters.count(Call::Populate);
            let range = run.at..run.at + run.len;
            match stage.place(&run, origin, leg.node, self.yard.pagemap()) {
                Ok(copy) => {
                    (run.parked, run.copy) = (stage.parking(run.huge) + (run.at - origin), copy);
                    found.runs.push(run);
                }
                Err(NoPlace::NoRoom) => {
                    found.say(range, Verdict::GivenUp(Reason::NoRoom));
                }
                Err(NoPlace::Refused(call, errno)) => {
                    found.say(range, self.once_more(area, Reason::Refused(call, errno)));
                }
            }
        }
    }

    fn try_area(&self, area: &Area, found: &mut Found) -> Result<(), (Call, Errno)> {
        let leg = self.leg(area);
        let mut range = addresses(&area.pages);
        let origin = range.start / HUGE * HUGE;
        // All pages that are tried again form one area, which may be larger than a window.
        range.end = range.end.min(origin + MOST);
        self.look(area, range.clone(), found)?;
        if found.runs.is_empty() {
            return Ok(());
        }
        let stage = &mut *lock(&self.stage);
        found.locked = leg.locked.load(Relaxed);
        stage.set_locked(found.locked)?;
        stage.choose_parking(self.yard.vacated());
        self.place(stage, origin, leg, area, found);
        let Some(last) = found.runs.last() else { return Ok(()) };
        let parked = found.runs[0].at - origin..last.at + last.len - origin;
        found.counters.count(Call::Track);
        let is_huge = |huge| found.runs.iter().any(|run| run.huge == huge);
        let kinds = [false, true].map(is_huge);
        stage.open_parking(self.yard.uffd(), kinds)?;
        let mut runs = [Run::default(); MOST_RUNS];
        runs[..found.runs.len()].copy_from_slice(&found.runs);
        let mut counters = found.counters;
        let bomb = AbortOnUnwind;
        // SAFETY: the job's caller keeps the contract, the range is registered until the job ends,
        // and the stage is this attempt's.
        let fates = unsafe {
            let runs = &runs[..found.runs.len()];
            self.yard.ground().pass(range, runs, self.method, &mut counters)
        };
        std::mem::forget(bomb);
        found.counters = counters;
        stage.give_back(self.yard.uffd(), parked, kinds, self.yard.vacated());
        found.counters.count(Call::Untrack);
        found.counters.count(Call::Discard);
        for Told { at, len, fate } in fates.as_slice() {
            self.judge(*at..*at + *len, *fate, area, found);
        }
        Ok(())
    }

    /// Makes the present anonymous pages of a range exclusive to this process, by a write fault
    /// that changes no byte (MADV_POPULATE_WRITE).
    fn make_own(&self, range: Range<usize>, found: &mut Found) {
        found.counters.count(Call::Scan);
        let Ok((regions, _)) = self.yard.pagemap().anonymous(range) else { return };
        for PageRegion { start, end, .. } in regions {
            let (start, len) = (start as usize, (end - start) as usize);
            found.counters.count(Call::Populate);
            // SAFETY: the caller of the library vouches for the range. Nobody waits for the worker
            // any more.
            let _ = unsafe { sys::set_advice(start, len, Advice::PopulateWrite) };
        }
    }

    /// Turns the fate of pages into a verdict.
    fn judge(&self, range: Range<usize>, fate: Fate, area: &Area, found: &mut Found) {
        let verdict = match fate {
            Fate::Moved => Verdict::Moved,
            Fate::Discarded | Fate::Stayed(Call::TakePages, Errno(libc::ENOENT)) => {
                Verdict::Left(Some(Reason::Absent))
            }
            Fate::Gone => Verdict::Left(Some(Reason::Unmapped)),
            Fate::Stayed(Call::TakePages, Errno(libc::EBUSY)) => {
                // The page is pinned; or it was shared with a forked child that has ended, and
                // nobody has written to it since. In the second case a write fault makes it
                // exclusive, so that the next try succeeds.
                self.make_own(range.clone(), found);
                self.once_more(area, Reason::InUse)
            }
            Fate::Stayed(Call::TakePages, Errno(libc::EEXIST)) => {
                // EEXIST: the call was stuck, and the watcher has ended it.
                found.stuck.insert(range.start / HUGE);
                self.once_more(area, Reason::InUse)
            }
            Fate::Stayed(Call::TakePages, Errno(libc::EINVAL)) => {
                // EINVAL may mean that the mapping was locked or unlocked (mlock), so try the other
                // state next time.
                let why = Reason::Refused(Call::TakePages, Errno(libc::EINVAL));
                self.leg(area).locked.store(!found.locked, Relaxed);
                self.once_more(area, why)
            }
            Fate::Stayed(call, errno) => self.once_more(area, Reason::Refused(call, errno)),
        };
        found.say(range, verdict);
    }
}

fn addresses(pages: &Range<u64>) -> Range<usize> {
    pages.start as usize * BASE_PAGE..pages.end as usize * BASE_PAGE
}

impl Mover for MemoryMover {
    type Worker = Worker;

    fn surround(&self, books: Books<'_>, work: &(dyn Fn() + Sync)) {
        if !affinity::run_on(&self.cpus) {
            books.warn(Warning::not_on_cpus());
        }
        work();
        books.count(Call::Untrack, self.yard.registered() as u64);
        books.add_cpu_time(self.yard.close());
    }

    fn worker(&self, number: usize, books: Books<'_>) -> Worker {
        // The kernel's mover also raises this thread's priority.
        let kernel = self.kernel.worker(number, books);
        priority::run_shortly();
        Worker { kernel, again: (0, 0), stuck: BTreeSet::new() }
    }

    /// A job goes on in any case, but perhaps not in place. This is also asked in pauses, in which
    /// a thread that touches a missing page needs the attendant.
    fn may_go_on(&self, _books: Books<'_>) -> Result<(), Stop> {
        self.look_for_tracer();
        Ok(())
    }

    fn area_pages(&self, stretch: &Area) -> Option<u64> {
        (stretch.leg < self.kernel_legs).then_some(kernel::AREA_PAGES)
    }

    fn attempt(&self, worker: &mut Worker, area: &Area, terms: &Terms<'_>) -> AreaOutcome {
        if let Some((theirs, why)) = self.kernels(area) {
            let outcome = self.kernel.attempt(&mut worker.kernel, &theirs, terms);
            return AreaOutcome { by: By { why, ..outcome.by }, ..outcome };
        }
        let by = By { engine: MemoryEngine::UffdMove.into(), why: Why::AsChosen };
        if !self.in_place.load(Relaxed) {
            debug_assert_eq!(self.yard.registered(), 0, "who touches a page needs this job");
            return AreaOutcome::given_up(by, area, Reason::Traced);
        }
        let round = (area.leg, area.refused);
        if area.refused > 0 && std::mem::replace(&mut worker.again, round) != round {
            thread::sleep(PAUSE * 4u32.pow(area.refused.min(TRIES) - 1));
        }
        let mut found = Found {
            verdicts: Vec::new(),
            counters: Counters::default(),
            runs: Vec::new(),
            locked: false,
            stuck: std::mem::take(&mut worker.stuck),
        };
        if !self.yard.has_descriptors() {
            // Descriptors are checked outside of windows only: losing one in a window may cost the
            // pages of that window.
            found.verdicts = vec![(area.pages.clone(), Verdict::GivenUp(Reason::DescriptorLost))];
        } else if let Err((call, errno)) = self.try_area(area, &mut found) {
            found.verdicts =
                vec![(area.pages.clone(), self.once_more(area, Reason::Refused(call, errno)))];
        }
        worker.stuck = found.stuck;
        let Counters { window_ns, left, copy_ns, .. } = found.counters;
        let seen = (left > 0).then_some(Seen { written: 0, left, window_ns, copy_ns });
        let runs = area::joined(found.verdicts);
        AreaOutcome { runs, by, counters: found.counters, seen, disturbed: None }
    }

    fn error(&self, area: &Area, why: Reason) -> Error {
        if let (Reason::DescriptorLost, Some((descriptor, is_reused))) = (why, self.yard.lost()) {
            let what = "a job that moves memory in place".into();
            return Error::DescriptorLost { what, descriptor, is_reused };
        }
        Error::NotMoved {
            pid: std::process::id(),
            range: AddressRange(addresses(&area.pages)),
            reason: why.to_string(),
            remedy: match why {
                Reason::InUse => "try again later, when its I/O has ended",
                Reason::NoRoom => "free memory on the node, or move less",
                Reason::Traced => "end the tracer, or let the kernel move the memory",
                _ => "look at the reason",
            },
        }
    }

    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        // Pages that moved in place may have other frames of the same node.
        let in_place: BTreeSet<usize> = self.legs.iter().map(|leg| leg.kernel).collect();
        self.kernel.settle(books, |leg| !in_place.contains(&leg));
        drop(self.yard);
        moved();
    }
}
