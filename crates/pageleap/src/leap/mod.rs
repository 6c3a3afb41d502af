//! Migrations of regions: [`Migration`] describes one, and starting it makes a job.
//!
//! [`Migration::start`] checks the arguments ([`check`]), claims the ranges and takes frames of the
//! destination ([`legs`]). It then chooses the engine and starts a job with a mover of frames
//! ([`mover`]). At the end the job recycles the vacated frames ([`recycle`]).
//!
//! [`tables`] moves page tables alone, whose data stays.

mod aliases;
mod check;
mod context;
mod copying;
mod cpuset;
mod join;
mod legs;
mod mover;
mod page_tables;
mod present;
mod recycle;
mod signals;
mod site;
mod slots;
mod standby;
mod tables;
mod threads;
mod tracker;
mod trackers;
mod under_way;
mod views;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use join::mappings_apart;

use crate::backend::Backend;
use crate::engine::choice;
use crate::engine::fault;
use crate::engine::{Areas, Engine, EngineChoice};
use crate::error::Error;
use crate::job::area::Area;
use crate::job::handle::{Job, JobShared};
use crate::job::outcomes::Item;
use crate::job::pace::{Pace, Unit};
use crate::job::plan::RetryPolicy;
use crate::job::rate;
use crate::job::report::{Report, Warning, WarningKind};
use crate::job::run::{Running, Settings};
use crate::job::source::Source;
use crate::limits::{check_address_space, check_memory_cgroups};
use crate::pool::{Destination, Needs};
use crate::region::Region;
use crate::sync::{Instant, lock, monotonic_ns};
use crate::topology::Topology;
use crate::units::{BASE_PAGE, NodeId, PageSize};
use check::Headroom;
pub use context::MigrationContext;
pub use copying::COPY_METHODS;
use legs::{Claimed, Leg};
use mover::{FrameMover, Prepared};
use present::Look;
use site::Site;
use slots::ClaimedSlot;
pub use tables::PageTableMigration;
use threads::{RunsOn, Threads, may_run_here};
use tracker::OpenTracker;
use trackers::Trackers;

/// The size of an area while no writer disturbs it, in bytes: 2 MB. The paper of page_leap
/// recommends 16 MB (section 6); `docs/adr/0003` has the measurements that favour less. The engine
/// `precopy` begins with this size.
pub const DEFAULT_AREA_BYTES: usize = 2 << 20;

/// The largest size to which areas of the engine `precopy` grow while few of their pages are
/// written. Larger areas would only lengthen the freeze.
const LARGEST_AREA_BYTES: usize = 16 << 20;

/// The least size to which areas of the engine `stop-copy` shrink, where page tables may stay on
/// their node. In smaller areas the calls take longer than the copy.
const LEAST_AREA_BYTES: usize = 128 << 10;

/// Describes a migration, then starts it. All its ranges form one job.
///
/// ```
/// use std::time::Duration;
///
/// use pageleap::{Migration, NodeId, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let (from, to) = (Pool::builder(NodeId(0), 1 << 20), Pool::builder(NodeId(0), 1 << 20));
/// let (from, to) = (from.build()?, to.build()?);
/// let region = Region::new(&from, 1 << 20)?;
///
/// // The second quarter and the last page, in one job.
/// let job = Migration::new()
///     .range(&region, 256 << 10..512 << 10, &to)
///     .range(&region, (1 << 20) - 4096..1 << 20, &to)
///     .wait_budget(Duration::from_micros(500))
///     .start()?;
/// let report = job.wait();
/// assert!(report.ended.is_completed());
/// assert_eq!(report.pages.migrated, 65);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Migration<'a> {
    ranges: Vec<(&'a Region, Range<usize>, Destination)>,
    engine: EngineChoice,
    area_bytes: Option<usize>,
    reduction_factor: u64,
    max_disturbed: u32,
    max_rounds: u32,
    threads: Option<usize>,
    timeout: Option<Duration>,
    pin_patience: Duration,
    wait_budget: Duration,
    rate_limit: Option<u64>,
    context: Option<&'a MigrationContext>,
    /// The most pieces of vacated frames that may wait for the end of the job. Set by tests only;
    /// otherwise the number of mappings that the process can spare decides.
    most_vacated: Option<usize>,
}

impl Default for Migration<'_> {
    fn default() -> Self {
        Migration::new()
    }
}

impl<'a> Migration<'a> {
    /// A migration without ranges, with the default settings.
    pub fn new() -> Self {
        Migration {
            ranges: Vec::new(),
            engine: EngineChoice::Auto,
            area_bytes: None,
            reduction_factor: 2,
            max_disturbed: 3,
            max_rounds: 4,
            threads: None,
            timeout: None,
            pin_patience: Duration::from_secs(1),
            wait_budget: Duration::from_millis(1),
            rate_limit: None,
            context: None,
            most_vacated: None,
        }
    }

    /// Adds a range of a region, in bytes but whole pages, and its destination. `&pool` stands for
    /// the pool's own placement, `pool.on(placement)` for another placement on its nodes. The job
    /// skips unbacked pages, and pages that already lie in frames of the right pool and node.
    pub fn range(
        mut self,
        region: &'a Region,
        bytes: Range<usize>,
        to: impl Into<Destination>,
    ) -> Self {
        self.ranges.push((region, bytes, to.into()));
        self
    }

    /// Sets the engine. Default: [`EngineChoice::Auto`].
    pub fn engine(mut self, engine: impl Into<EngineChoice>) -> Self {
        self.engine = engine.into();
        self
    }

    /// Sets the initial size of an area, a multiple of the page size. Default:
    /// [`DEFAULT_AREA_BYTES`], but at least one page. Under the default, engines that follow writes
    /// enlarge areas up to 16 MB while few pages are written, and shrink them again when many are.
    /// Such engines move hugetlb pages one by one. [`Engine::WpSync`] limits an area to 4096 pages,
    /// and [`Engine::StopCopy`] to 16 MB. Without a size, areas of the latter follow from
    /// [`Migration::wait_budget`]. Areas that [`EngineChoice::Auto`] closes before it copies them
    /// are smaller than this size if the budget asks for it.
    pub fn area_bytes(mut self, bytes: usize) -> Self {
        self.area_bytes = Some(bytes);
        self
    }

    /// Sets the number of parts into which a disturbed area is split ([`Engine::Mprotect`]).
    /// Default: 2. With 1, areas are never split.
    pub fn reduction_factor(mut self, parts: u64) -> Self {
        self.reduction_factor = parts;
        self
    }

    /// Sets the number of disturbed copies after which the writers of an area are held back until
    /// it has moved. Default: 3. With 0, writers are held back from the start. For engines that can
    /// hold writers back from a whole area or from a page ([`Engine::Mprotect`],
    /// [`Engine::WpSync`], and for hugetlb pages [`Engine::PrecopyProtect`]).
    pub fn max_disturbed_copies(mut self, copies: u32) -> Self {
        self.max_disturbed = copies;
        self
    }

    /// Sets the most rounds of pre-copy after the first copy of an area. In each round an engine
    /// that follows writes ([`Engine::follows`]) copies the pages that were written since the last
    /// copy. Default: 4. After these rounds the engine closes the area and copies the rest, however
    /// much that is, so an area moves however fast threads write. With 0, it closes the area after
    /// the first copy.
    pub fn max_rounds(mut self, rounds: u32) -> Self {
        self.max_rounds = rounds;
        self
    }

    /// Sets the largest number of threads that copy. By default it is the smaller of two numbers,
    /// but at least 1 and at most 8:
    ///
    /// * one for each four CPUs of the destination node, so that the application keeps its CPUs;
    /// * one for each 2 MB of the ranges, because starting a thread takes longer than copying less.
    ///
    /// All threads copy each hugetlb page together, one page after the other: the more threads, the
    /// shorter the page's writers wait. A long job tries now and then whether fewer threads are as
    /// fast ([`Report::threads_settled`](crate::Report::threads_settled)).
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets the time after which the job begins no new area, counted from the return of
    /// [`Migration::start`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long the job waits for guards ([`Region::pin`]) to be dropped once everything else
    /// has moved. Default: one second. Pages that are still guarded then stay where they are, and
    /// are reported as [`PageOutcome::Busy`](crate::PageOutcome::Busy).
    ///
    /// Each piece that guards keep in place costs some mappings. If the process has too few
    /// mappings to spare, pages between guards stay too.
    pub fn pin_patience(mut self, patience: Duration) -> Self {
        self.pin_patience = patience;
        self
    }

    /// Sets the longest time for which a thread of the process should wait for the job. Default:
    /// one millisecond. Engines that follow writes adapt two sizes to it, from times that the job
    /// measures: the size of an area, and how many dirty pages are left to copy in the window. An
    /// area that is closed before it is copied is so large that its copy takes three tenths of the
    /// budget.
    ///
    /// Areas have at least 2 MB where page tables move along. So the least budget that `stop-copy`
    /// keeps there is some two times the time in which 2 MB are copied: 0.3 ms at 16 GB/s, 0.9 ms
    /// at 5 GB/s. Where page tables may stay (on a machine with one node, say) it is some 0.15 ms.
    ///
    /// The budget is no promise: every page is moved, always, and threads may have to wait for a
    /// CPU. [`JobCounts::windows_over_budget`](crate::JobCounts::windows_over_budget) counts the
    /// windows that exceeded it.
    pub fn wait_budget(mut self, budget: Duration) -> Self {
        self.wait_budget = budget;
        self
    }

    /// Sets the most bytes per second that the job copies, all threads and repeated copies
    /// together. Default: no limit. Each thread may be ahead of the limit by one attempt on an
    /// area. That area is as large as [`Migration::area_bytes`] says. By default, it is the largest
    /// of 2 MB, a page, and the bytes that the rate allows in 10 ms (up to 16 MB). The job does not
    /// make up for time in which it could copy nothing.
    pub fn rate_limit(mut self, bytes_per_s: u64) -> Self {
        self.rate_limit = Some(bytes_per_s);
        self
    }

    /// Has the job use the threads and descriptors that a [`MigrationContext`] keeps, and leave
    /// them there for the next job.
    pub fn context(mut self, context: &'a MigrationContext) -> Self {
        self.context = Some(context);
        self
    }

    /// Has vacated frames given back as soon as there are more pieces of them.
    #[cfg(all(test, shuttle))]
    pub(crate) fn most_vacated(mut self, pieces: usize) -> Self {
        self.most_vacated = Some(pieces);
        self
    }

    /// Checks everything, takes the destination's frames, and starts the job. The call returns at
    /// once, unless it needs frames that another job is recycling
    /// ([`Phase::Recycling`](crate::Phase::Recycling)). It waits for such frames, some 50 ms per
    /// GB.
    ///
    /// The job's threads inherit their scheduling, affinity, memory policy and cgroup from the
    /// calling thread. The library changes some of these, for its own threads only:
    ///
    /// * **Scheduling policy and nice value.** If the calling thread ranks below ordinary threads
    ///   (SCHED_IDLE, SCHED_BATCH, a nice value above 0), the job ranks as low only while it makes
    ///   copies for which nobody waits; otherwise its threads are ordinary ones. If the process may
    ///   not raise them (CAP_SYS_NICE, or an RLIMIT_NICE of 20),
    ///   [`Report::warnings`](crate::Report::warnings) says so. While threads of the program wait
    ///   for a page, the job runs under SCHED_FIFO, before ordinary threads, if it may. A real-time
    ///   policy stays. A thread with SCHED_DEADLINE starts no job unless it has
    ///   SCHED_FLAG_RESET_ON_FORK ([`Error::NoThread`]).
    /// * **Affinity.** The threads run on those CPUs of the destination's node on which the calling
    ///   thread may run. If there are none, they stay on the calling thread's CPUs, with a warning;
    ///   if the node has no CPUs, they run anywhere.
    /// * **Memory policy.** Threads get a policy of their own (`set_mempolicy`) only where their
    ///   page tables have to lie on a certain node.
    /// * **Cgroup.** Stays. A quota of CPU time (`cpu.max`) that runs out holds up the job and the
    ///   threads that wait for it, except while the job runs under SCHED_FIFO.
    ///
    /// # Errors
    /// An argument makes no sense, ranges overlap each other or a running job's, a destination has
    /// too few free frames, or the engine cannot work here. After an error nothing has changed.
    pub fn start(self) -> Result<Job, Error> {
        let context = self.kept();
        self.prepare(false)?.start(context.map(MigrationContext::threads))
    }

    /// Does the same as [`Migration::start`] followed by [`Job::wait`]. If one thread copies, the
    /// calling thread does the work itself where possible, because that saves starting and waking a
    /// thread. With a [`MigrationContext`], a job of one page takes some 0.1 ms (`docs/adr/0028`).
    ///
    /// Meanwhile the calling thread blocks the signals that programs handle (not those that faults
    /// raise), and [`thread_is_ours`](crate::thread_is_ours) is true for it. It stays on its CPUs,
    /// and gets its memory policy back at the end. A thread of the job runs it instead if the
    /// calling thread has a low priority or SCHED_DEADLINE, or if its stack lies in the pages or
    /// beside them.
    ///
    /// Hold no guard ([`Region::pin`]) on these pages: the calling thread cannot drop it meanwhile.
    /// The job would wait for [`Migration::pin_patience`] in vain, and leave the pages where they
    /// are.
    ///
    /// Nobody has a handle to cancel the job; [`Migration::timeout`] bounds it.
    ///
    /// # Errors
    /// Those of [`Migration::start`].
    pub fn run(self) -> Result<Report, Error> {
        let context = self.kept();
        let run = self.prepare(true)?;
        match run.mover().threads().runs_on {
            RunsOn::Caller => run.run_here(),
            _ => Ok(run.start(context.map(MigrationContext::threads))?.wait()),
        }
    }

    /// The context, unless it is of another process.
    fn kept(&self) -> Option<&'a MigrationContext> {
        self.context.filter(|context| context.is_of_this_process())
    }

    /// Checks everything, and makes the job ready. If the caller `waits` for the job, it may run in
    /// the calling thread.
    fn prepare(self, waits: bool) -> Result<Running<FrameMover>, Error> {
        let began = Instant::now();
        let (backend, page) = self.check_arguments()?;
        let handler = if backend.is_host_memory() { fault::ensure_installed() } else { Ok(()) };
        let mut claimed = self.claim_all()?;
        // The claims keep the views as they are.
        let has_views = claimed.iter().any(|one| one.claim.region().view_count() > 0);
        let choice = if has_views { views::engine(self.engine)? } else { self.engine };
        legs::check_descriptors(&claimed)?;
        let nodes: BTreeSet<NodeId> = claimed.iter().flat_map(Claimed::nodes).collect();
        if let Some(node) = nodes.iter().find(|node| !backend.allows_node(node.0)) {
            return Err(Error::NodeNotAllowed { node: *node });
        }
        let mut warnings = Vec::new();
        let cpus = cpus_of(&*backend, &nodes, &mut warnings)?;
        let bytes = self.ranges.iter().map(|(_, range, _)| range.len()).sum();
        let threads = self.threads.unwrap_or_else(|| usual_threads(cpus.len(), bytes));
        if let (Some(node), true) = (nodes.first(), backend.is_host_memory()) {
            check_memory_cgroups(*node, threads + 1, if page.is_hugetlb() { 0 } else { bytes })?;
        }
        let (writable, start_look) = take_frames(&mut claimed, page)?;
        let mut headroom = Headroom::UNLIMITED;
        if backend.is_host_memory() {
            headroom = check::mapping_headroom(&claimed, threads, page)?;
            // One more thread may read the tracker's messages.
            check_address_space(&*backend, threads + 1)?;
        }
        let open = |ability| match self.kept() {
            Some(context) => context.tracker(&backend, ability),
            None => OpenTracker::new(&backend, ability),
        };
        let chosen = choice::for_job(choice, page, &handler, open);
        let chosen = if has_views { views::chosen(chosen)? } else { chosen? };
        let engine = chosen.engine;
        if let (Err(error), true) = (handler, choice == EngineChoice::Auto) {
            let text = "areas that only the engine mprotect could move will stay where they are";
            warnings.push(Warning::because(WarningKind::NoFaultHandler, text, &error));
        }
        if engine.signals() && choice == EngineChoice::Auto && writable {
            warnings.push(Warning::system_calls_may_fail(&chosen.reason));
        }
        // The writers of a hugetlb page wait for as long as its copy takes, so all threads copy it.
        let together = threads > 1 && page.is_hugetlb();
        let slots = ClaimedSlot::claim(if together { 1 } else { threads }, threads)?;
        let (items, legs, areas) = items_and_legs(&mut claimed);
        let settings = self.settings(&chosen, (page, &legs), headroom.most_pieces, threads);
        let may_run_here =
            waits && !has_views && may_run_here(&claimed, threads, backend.is_host_memory());
        let runs_on = match self.kept() {
            _ if may_run_here => RunsOn::Caller,
            Some(_) => RunsOn::Kept,
            None => RunsOn::Own,
        };
        let may_fall_back = choice == EngineChoice::Auto;
        let trackers = Trackers::new(&backend, page, chosen, may_fall_back, &slots);
        let standbys = views::standbys(&backend, &claimed, (&legs, page), slots.len())?;
        let mover = FrameMover::new(Prepared {
            site: Site::new(backend, page, legs, &claimed),
            claimed,
            threads: Threads::new(runs_on, cpus, has_views),
            trackers,
            standbys,
            slots,
            copies_together: together,
            nodes,
            start_look,
            most_vacated: self.most_vacated.unwrap_or(headroom.most_vacated),
            max_rounds: self.max_rounds,
            // A trial would copy without a pause.
            may_try: self.rate_limit.is_none(),
            began,
        });
        let run = Running::new(mover, items, areas, settings, warnings, began);
        tell_regions(self.ranges.iter().map(|(region, ..)| *region), run.shared());
        Ok(run)
    }

    fn settings(
        &self,
        chosen: &choice::Chosen<OpenTracker>,
        (page, legs): (PageSize, &[Leg]),
        most_pieces: usize,
        threads: usize,
    ) -> Settings {
        let engine = chosen.engine;
        Settings {
            policy: self.retry_policy(),
            most_held_early: engine.most_held_early(),
            pace: self.pace(engine, page, legs),
            low_contention_pace: chosen
                .at_low_contention
                .as_ref()
                .map(|_| self.low_contention_pace(page, legs)),
            rate_limit: self.rate_limit,
            patience: self.pin_patience,
            most_pieces,
            page_bytes: page.bytes(),
            threads,
            // A deadline that the clock cannot represent means no deadline.
            deadline: self.timeout.and_then(|t| Instant::now().checked_add(t)),
            engine: engine.into(),
            engine_reason: chosen.reason.clone(),
        }
    }

    fn claim_all(&self) -> Result<Vec<Claimed>, Error> {
        let claim = |(region, range, to): &(&Region, Range<usize>, Destination)| {
            Claimed::claim(region, range.clone(), to)
        };
        self.ranges.iter().map(claim).collect()
    }

    fn retry_policy(&self) -> RetryPolicy {
        RetryPolicy {
            reduction_factor: self.reduction_factor,
            max_disturbed: self.max_disturbed,
            max_refused: 4,
        }
    }

    /// The sizes of a job's areas.
    fn pace(&self, engine: Engine, page: PageSize, legs: &[Leg]) -> Pace {
        let pages = |bytes: usize| (bytes / page.bytes()).max(1) as u64;
        let first = self.first_area_bytes(page).min(engine.most_area_bytes(page));
        let areas = match engine.profile().areas {
            // Engines that follow writes move hugetlb pages one by one.
            Areas::Adaptive { .. } if page.is_hugetlb() => Areas::Fixed,
            areas => areas,
        };
        match areas {
            _ if self.area_bytes.is_some() => Pace::fixed(pages(first), self.wait_budget),
            Areas::Fixed => Pace::fixed(pages(first), self.wait_budget),
            Areas::Adaptive { most_written } => {
                let most = pages(self.most_area_bytes(first));
                Pace::adaptive(pages(first), pages(first), most, most_written, self.wait_budget)
            }
            Areas::Budgeted => self.low_contention_pace(page, legs),
        }
    }

    /// The sizes of areas that are closed before they are copied.
    fn low_contention_pace(&self, page: PageSize, legs: &[Leg]) -> Pace {
        let pages = |bytes: usize| (bytes / page.bytes()).max(1) as u64;
        // Threads wait for the whole copy, so areas never get larger than the caller has set.
        let usual = DEFAULT_AREA_BYTES.max(page.bytes());
        let first = self.first_area_bytes(page).min(usual);
        let most =
            self.area_bytes.map_or(self.most_area_bytes(first), |set| set.min(LARGEST_AREA_BYTES));
        // If page tables have to lie on a node, whole page-table pages move. Each maps 2 MB.
        let tables_move = legs.iter().any(|leg| leg.tables.is_some());
        let least = if tables_move { first } else { first.min(LEAST_AREA_BYTES) };
        let base_pages = (page.bytes() / BASE_PAGE) as u64;
        let unit = Unit { pages: pages(DEFAULT_AREA_BYTES), base_pages };
        Pace::budgeted(pages(first), pages(least), pages(most), unit, self.wait_budget)
    }

    /// The most bytes of an area while no size is set.
    fn most_area_bytes(&self, first: usize) -> usize {
        let limit = self.rate_limit.map_or(u64::MAX, rate::area_bytes_at);
        LARGEST_AREA_BYTES.min(usize::try_from(limit).unwrap_or(usize::MAX)).max(first)
    }

    /// The size of an area at its first attempt, as the caller set it or by default.
    fn first_area_bytes(&self, page: PageSize) -> usize {
        self.area_bytes.unwrap_or(DEFAULT_AREA_BYTES.max(page.bytes()))
    }
}

/// Registers a job with its regions, so that dropping a region ends the job.
fn tell_regions<'a>(regions: impl IntoIterator<Item = &'a Region>, shared: &Arc<JobShared>) {
    for region in regions {
        let mut jobs = lock(&region.inner().jobs);
        jobs.retain(|job| job.strong_count() > 0);
        jobs.push(Arc::downgrade(shared));
    }
}

/// The default number of threads that copy `bytes` to nodes with `cpus` CPUs together.
fn usual_threads(cpus: usize, bytes: usize) -> usize {
    (cpus / 4).min(bytes / DEFAULT_AREA_BYTES).clamp(1, 8)
}

/// The CPUs of the destinations.
fn cpus_of(
    backend: &dyn Backend,
    nodes: &BTreeSet<NodeId>,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<usize>, Error> {
    let mut cpus = Vec::new();
    if !backend.is_host_memory() {
        return Ok(cpus);
    }
    for node in nodes {
        cpus.extend(Topology::cpus_now(*node)?);
    }
    // Emulated nodes (`numa=fake`) share CPUs.
    cpus.sort_unstable();
    cpus.dedup();
    if cpus.is_empty() {
        let names: Vec<String> = nodes.iter().map(NodeId::to_string).collect();
        let names = names.join(", ");
        let text = format!("{names} has no CPUs: the workers run where the scheduler puts them");
        warnings.push(Warning::new(WarningKind::Affinity, text));
    }
    Ok(cpus)
}

/// Takes the frames for all pages that have to move. Returns whether any of the ranges is writable,
/// and the look at their attributes (its time and duration).
fn take_frames(claimed: &mut [Claimed], page: PageSize) -> Result<(bool, Look), Error> {
    let at_ns = monotonic_ns();
    let attributes = check::attributes_of(claimed)?;
    let took_ns = monotonic_ns().saturating_sub(at_ns);
    let look = Look::at_start(at_ns, took_ns, attributes.values().map(Vec::len).sum());
    let mut needs = Needs::default();
    claimed.iter().for_each(|one| one.add_needs(&mut needs));
    for one in &mut *claimed {
        one.plan(&attributes[&one.claim.region().id], &mut needs)?;
    }
    if !page.is_hugetlb() {
        legs::lend_aliases(claimed);
    }
    Ok((attributes.values().flatten().any(|run| run.attributes.prot.writable()), look))
}

/// Splits the claimed ranges into the parts for the job (items, areas) and for its mover (legs).
fn items_and_legs(claimed: &mut [Claimed]) -> (Vec<Item>, Vec<Leg>, Vec<Area>) {
    let item = |one: &Claimed| {
        let region = one.claim.region();
        let pages = region.pages(&one.claim.range());
        Item {
            source: Source::Region(region.id),
            pages,
            page_bytes: region.page.bytes(),
            left: Vec::new(),
        }
    };
    let items = claimed.iter().map(item).collect();
    let of = |(item, one): (usize, &mut Claimed)| {
        let legs = std::mem::take(&mut one.legs);
        legs.into_iter().map(move |leg| Leg { item, ..leg })
    };
    let legs: Vec<Leg> = claimed.iter_mut().enumerate().flat_map(of).collect();
    let area = |(i, leg): (usize, &Leg)| Area::new(leg.item, i, leg.pages.clone());
    let areas = legs.iter().enumerate().map(area).collect();
    (items, legs, areas)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_one_thread_for_each_four_cpus_and_for_each_2_mb() {
        const GB: usize = 1 << 30;
        for (cpus, bytes, threads) in [
            (0, GB, 1),
            (3, GB, 1),
            (8, GB, 2),
            (64, GB, 8),
            (64, 0, 1),
            (64, 4 << 10, 1),
            (64, (4 << 20) - 1, 1),
            (64, 4 << 20, 2),
        ] {
            assert_eq!(usual_threads(cpus, bytes), threads, "{cpus} CPUs, {bytes} bytes");
        }
    }
}
