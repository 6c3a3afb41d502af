//! Leaps of frames of regions: what to move where, and the job that does it.
//!
//! [`Migration::start`] checks what was asked for ([`check`]), claims the ranges and takes the
//! destination's frames ([`legs`]), chooses the engine, and starts a job with a mover of frames
//! ([`mover`]). At the end vacated frames are recycled ([`recycle`]).

mod attributes;
mod check;
mod join;
mod legs;
mod mover;
mod recycle;
mod slots;
mod tracker;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use join::mappings_apart;

use crate::backend::Backend;
use crate::engine::choice::{self, Chosen};
use crate::engine::fault;
use crate::engine::{Areas, Engine, EngineChoice};
use crate::error::Error;
use crate::job::area::Area;
use crate::job::handle::{Job, JobShared};
use crate::job::outcomes::Item;
use crate::job::pace::Pace;
use crate::job::plan::RetryPolicy;
use crate::job::rate;
use crate::job::report::SYSTEM_CALLS_MAY_FAIL;
use crate::job::run::{Run, Settings};
use crate::job::source::Source;
use crate::limits::check_address_space;
use crate::pool::{Destination, Needs};
use crate::region::Region;
use crate::sync::{Instant, lock};
use crate::topology::Topology;
use crate::units::{NodeId, PageSize};
use legs::{Claimed, Leg};
use mover::{FrameMover, Terrain};
use slots::ClaimedSlot;
use tracker::OpenTracker;

/// The size of an area while nobody disturbs it, in bytes: 2 MB. The paper of page_leap recommends
/// 16 MB (section 6); `docs/adr/0003` has the measurements that speak for less. The engine
/// `precopy` begins with it.
pub const DEFAULT_AREA_BYTES: usize = 2 << 20;

/// What areas of the engine `precopy` grow to while few of their pages are written: larger ones
/// only lengthen the freeze.
const LARGEST_AREA_BYTES: usize = 16 << 20;

/// Describes a migration, then starts it. All ranges given are one job.
#[derive(Debug)]
pub struct Migration<'a> {
    ranges: Vec<(&'a Region, Range<usize>, Destination)>,
    engine: EngineChoice,
    area_bytes: Option<usize>,
    reduction_factor: u64,
    max_disturbed: Option<u32>,
    threads: Option<usize>,
    timeout: Option<Duration>,
    pin_patience: Duration,
    wait_budget: Duration,
    rate_limit: Option<u64>,
}

impl Default for Migration<'_> {
    fn default() -> Self {
        Migration::new()
    }
}

impl<'a> Migration<'a> {
    /// Nothing to move yet.
    pub fn new() -> Self {
        Migration {
            ranges: Vec::new(),
            engine: EngineChoice::Auto,
            area_bytes: None,
            reduction_factor: 2,
            max_disturbed: None,
            threads: None,
            timeout: None,
            pin_patience: Duration::from_secs(1),
            wait_budget: Duration::from_millis(1),
            rate_limit: None,
        }
    }

    /// Adds bytes of a region, in whole pages, and where they go: `&pool` means as the pool itself
    /// is placed, `pool.on(placement)` another placement on its nodes. Pages that lie in frames of
    /// the right pool and node already, and unbacked ones, are left as they are.
    pub fn range(
        mut self,
        region: &'a Region,
        bytes: Range<usize>,
        to: impl Into<Destination>,
    ) -> Self {
        self.ranges.push((region, bytes, to.into()));
        self
    }

    /// Which engine to use; [`EngineChoice::Auto`] if not said.
    pub fn engine(mut self, engine: impl Into<EngineChoice>) -> Self {
        self.engine = engine.into();
        self
    }

    /// The initial size of an area, a multiple of the page size; if not said,
    /// [`DEFAULT_AREA_BYTES`], but at least one page, and for engines that follow writes up to 16
    /// MB, as few or many pages are written (hugetlb pages one by one). [`Engine::WpSync`] makes it
    /// at most 4096 pages.
    pub fn area_bytes(mut self, bytes: usize) -> Self {
        self.area_bytes = Some(bytes);
        self
    }

    /// Into how many parts a disturbed area is split ([`Engine::Mprotect`]); 2 if not said, 1 means
    /// that it is not.
    pub fn reduction_factor(mut self, parts: u64) -> Self {
        self.reduction_factor = parts;
        self
    }

    /// After how many disturbed copies the writers of an area are held back until it has been
    /// moved; 3 if not said, and with 0 they are from the start. [`Engine::Precopy`] copies so many
    /// times more what was written meanwhile, 4 if not said, before it holds up everybody for the
    /// rest.
    pub fn max_disturbed_copies(mut self, copies: u32) -> Self {
        self.max_disturbed = Some(copies);
        self
    }

    /// How many threads copy, at most; if not said, one for each four CPUs of the destination node,
    /// at least 1 and at most 8, so that the application keeps its CPUs. hugetlb pages are copied
    /// by all of them together, one after the other: their writers wait less the more there are.
    /// Jobs that take long try now and then whether fewer are as fast
    /// ([`Report::threads_settled`](crate::Report::threads_settled)).
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The time after which no new area is begun, from when [`Migration::start`] returns.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long the job waits for guards ([`Region::pin`]) once everything else has moved, and none
    /// of them goes; one second if not said. What is still guarded then is reported as
    /// [`PageOutcome::Busy`](crate::PageOutcome::Busy) and stays where it is. Each piece that
    /// guards keep behind costs some mappings; where the process has too few of them to spare,
    /// pages between guards stay too.
    pub fn pin_patience(mut self, patience: Duration) -> Self {
        self.pin_patience = patience;
        self
    }

    /// The longest time for which a thread of the process should have to wait for the job; one
    /// millisecond if not said. Engines that follow writes size areas and the rest that is left to
    /// copy in a window accordingly, from what it sees. It is no promise: every page is moved,
    /// always, threads may have to wait for a CPU, and
    /// [`Report::windows_over_budget`](crate::Report::windows_over_budget) says how often it was
    /// exceeded.
    pub fn wait_budget(mut self, budget: Duration) -> Self {
        self.wait_budget = budget;
        self
    }

    /// How many bytes per second the job copies at most, all its threads and repeated copies
    /// together; no limit if not said. Each thread may be ahead by an attempt on an area, which is
    /// as large as [`Migration::area_bytes`] says, else 2 MB, a page, or what the rate copies in 10
    /// ms, whichever is most. Time in which nothing could be copied is not made up for.
    pub fn rate_limit(mut self, bytes_per_s: u64) -> Self {
        self.rate_limit = Some(bytes_per_s);
        self
    }

    /// Checks everything, takes the destination's frames, and starts the job. Returns at once,
    /// unless it needs frames that another job is just recycling
    /// ([`Phase::Recycling`](crate::Phase::Recycling)): these it waits for, some 50 ms per GB.
    ///
    /// # Errors
    /// If an argument makes no sense, ranges overlap each other or a running job's, a destination
    /// has too few free frames, or the engine cannot work here. Nothing has changed then.
    pub fn start(self) -> Result<Job, Error> {
        let began = Instant::now();
        let (backend, page) = self.check_arguments()?;
        if backend.is_host_memory() {
            fault::ensure_installed()?;
        }
        let claim = |(region, range, to): &(&Region, Range<usize>, Destination)| {
            Claimed::claim(region, range.clone(), to)
        };
        let mut claimed: Vec<Claimed> = self.ranges.iter().map(claim).collect::<Result<_, _>>()?;
        let nodes: BTreeSet<NodeId> = claimed.iter().flat_map(Claimed::nodes).collect();
        if let Some(node) = nodes.iter().find(|node| !backend.allows_node(node.0)) {
            return Err(Error::NodeNotAllowed { node: *node });
        }
        let mut warnings = Vec::new();
        let cpus = cpus_of(&*backend, &nodes, &mut warnings)?;
        let threads = self.threads.unwrap_or((cpus.len() / 4).clamp(1, 8));
        let writable = take_frames(&mut claimed, page)?;
        let mut most_pieces = usize::MAX;
        if backend.is_host_memory() {
            most_pieces = check::mapping_headroom(&claimed, threads, page)?;
            // One more may serve the tracker.
            check_address_space(&*backend, threads + 1)?;
        }
        let open = |ability| OpenTracker::new(&backend, ability);
        let Chosen { engine, reason, tracker } = choice::for_job(self.engine, page, open)?;
        if engine.signals() {
            if backend.is_host_memory() {
                fault::check_no_thread_blocks_sigsegv()?;
            }
            if self.engine == EngineChoice::Auto && writable {
                warnings.push(format!("{SYSTEM_CALLS_MAY_FAIL} ({reason})"));
            }
        }
        // A page of reserved huge memory keeps its writers waiting for as long as its copy takes.
        let together = threads > 1 && page.is_hugetlb();
        let slots = ClaimedSlot::claim(if together { 1 } else { threads }, threads)?;
        let settings = Settings {
            policy: RetryPolicy {
                reduction_factor: self.reduction_factor,
                max_disturbed: self.max_disturbed.unwrap_or(3),
                max_refused: 4,
            },
            pace: self.pace(engine, page),
            rate_limit: self.rate_limit,
            patience: self.pin_patience,
            most_pieces,
            page_bytes: page.bytes(),
            threads,
            together,
            // A time-out beyond what the clock can show is none.
            deadline: self.timeout.and_then(|t| Instant::now().checked_add(t)),
            engine,
            engine_reason: reason,
        };
        let terrain = Terrain {
            backend,
            engine,
            may_fall_back: self.engine == EngineChoice::Auto,
            max_rounds: self.max_disturbed.unwrap_or(4),
            page,
            cpus,
            nodes,
            tracker,
            began,
        };
        let (items, legs, areas) = items_and_legs(&mut claimed);
        let mover = FrameMover::new(terrain, claimed, legs, slots);
        let run = Run::new(mover, items, areas, settings, warnings, began)?;
        let shared = run.shared().clone();
        self.tell_regions(&shared);
        run.spawn()?;
        Ok(Job::new(shared))
    }

    /// How large the areas of a job are.
    fn pace(&self, engine: Engine, page: PageSize) -> Pace {
        let pages = |bytes: usize| (bytes / page.bytes()).max(1) as u64;
        let first = self.first_area_bytes(page).min(engine.most_area_bytes(page));
        let adaptive = engine.profile().areas == Areas::Adaptive && !page.is_hugetlb();
        if self.area_bytes.is_some() || !adaptive {
            return Pace::fixed(pages(first), self.wait_budget);
        }
        let limit = self.rate_limit.map_or(u64::MAX, rate::area_bytes_at);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let most = LARGEST_AREA_BYTES.min(limit).max(first);
        Pace::adaptive(pages(first), pages(first), pages(most), self.wait_budget)
    }

    /// The size of an area that has not been tried, as asked for.
    fn first_area_bytes(&self, page: PageSize) -> usize {
        self.area_bytes.unwrap_or(DEFAULT_AREA_BYTES.max(page.bytes()))
    }

    /// Lets the regions know of the job, so that dropping one ends it.
    fn tell_regions(&self, shared: &Arc<JobShared>) {
        for (region, ..) in &self.ranges {
            let mut jobs = lock(&region.inner().jobs);
            jobs.retain(|job| job.strong_count() > 0);
            jobs.push(Arc::downgrade(shared));
        }
    }
}

/// The CPUs of the destinations.
fn cpus_of(
    backend: &dyn Backend,
    nodes: &BTreeSet<NodeId>,
    warnings: &mut Vec<String>,
) -> Result<Vec<usize>, Error> {
    let mut cpus = Vec::new();
    if !backend.is_host_memory() {
        return Ok(cpus);
    }
    for node in nodes {
        cpus.extend(Topology::node_now(*node)?.cpus);
    }
    if cpus.is_empty() {
        let names: Vec<String> = nodes.iter().map(NodeId::to_string).collect();
        let names = names.join(", ");
        warnings
            .push(format!("{names} has no CPUs: the workers run where the scheduler puts them"));
    }
    Ok(cpus)
}

/// Takes the frames for all pages that have to move. Returns whether somebody may write to one of
/// the ranges.
fn take_frames(claimed: &mut [Claimed], page: PageSize) -> Result<bool, Error> {
    let attributes = check::attributes_of(claimed)?;
    let mut needs = Needs::default();
    claimed.iter().for_each(|one| one.add_needs(&mut needs));
    for one in claimed {
        one.plan(&attributes[&one.claim.region().id], !page.is_hugetlb(), &mut needs)?;
    }
    Ok(attributes.values().flatten().any(|run| run.attributes.prot.writable()))
}

/// What the job and its mover get of claimed ranges.
fn items_and_legs(claimed: &mut [Claimed]) -> (Vec<Item>, Vec<Leg>, Vec<Area>) {
    let item = |one: &Claimed| {
        let region = one.claim.region();
        let pages = region.pages(&one.claim.range());
        Item { source: Source::Region(region.id), pages, page_bytes: region.page.bytes() }
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
