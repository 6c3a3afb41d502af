//! Migrations: what to move where, the job that does it, and its report.

mod attributes;
mod legs;
mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use crate::job::handle::{Job, Phase, Progress};
pub use crate::job::report::{Ended, EngineUse, PageCounts, PageOutcome, PageRun, Report, Waits};
pub(crate) use run::mappings_apart;

use crate::engine::choice::{self, Chosen};
use crate::engine::fault;
use crate::engine::{Areas, EngineChoice};
use crate::error::Error;
use crate::job::pace::{self, Pace};
use crate::job::plan::RetryPolicy;
use crate::limits::check_address_space;
use crate::observe::{self, AttributeRun};
use crate::pool::{Destination, Needs};
use crate::region::{Region, RegionInner, check_same_backend};
use crate::sync::{Instant, lock};
use crate::topology::Topology;
use crate::units::{NodeId, PageSize, RegionId};
use legs::Item;
use run::{OpenTracker, Run, Settings};

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
    /// ([`Report::threads_settled`]).
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
    /// [`PageOutcome::Busy`] and stays where it is. Each piece that guards keep behind costs some
    /// mappings; where the process has too few of them to spare, pages between guards stay too.
    pub fn pin_patience(mut self, patience: Duration) -> Self {
        self.pin_patience = patience;
        self
    }

    /// The longest time for which a thread of the process should have to wait for the job; one
    /// millisecond if not said. Engines that follow writes size areas and the rest that is left to
    /// copy in a window accordingly, from what it sees. It is no promise: every page is moved,
    /// always, threads may have to wait for a CPU, and [`Report::windows_over_budget`] says how
    /// often it was exceeded.
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
    /// unless it needs frames that another job is just recycling ([`Phase::Recycling`]): these it
    /// waits for, some 50 ms per GB.
    ///
    /// # Errors
    /// If an argument makes no sense, ranges overlap each other or a running job's, a destination
    /// has too few free frames, or the engine cannot work here. Nothing has changed then.
    pub fn start(self) -> Result<Job, Error> {
        let began = Instant::now();
        let bad = |what, reason: String, remedy: &str| Error::BadArgument {
            what,
            reason,
            remedy: remedy.into(),
        };
        let Some((first, ..)) = self.ranges.first() else {
            return Err(bad("migration", "it names no range".into(), "name at least one"));
        };
        if self.threads == Some(0) || self.threads > Some(fault::MAX_THREADS) {
            let remedy = format!("use 1 to {}", fault::MAX_THREADS);
            return Err(bad(
                "number of threads",
                format!("{:?}", self.threads.unwrap_or(0)),
                &remedy,
            ));
        }
        if self.timeout == Some(Duration::ZERO) {
            return Err(bad(
                "timeout",
                "0 s leave no time for any page".into(),
                "leave it out for none",
            ));
        }
        if self.rate_limit == Some(0) {
            return Err(bad(
                "rate limit",
                "with 0 bytes per second nothing moves".into(),
                "leave it out for none",
            ));
        }
        if self.reduction_factor == 0 {
            return Err(bad(
                "reduction factor",
                "0 parts are none".into(),
                "use 1 (no splitting) or more",
            ));
        }
        let page = first.page_size();
        let area_bytes = self.area_bytes.unwrap_or(DEFAULT_AREA_BYTES.max(page.bytes()));
        if area_bytes == 0 || !area_bytes.is_multiple_of(page.bytes()) {
            let reason = format!("{area_bytes} bytes are no whole number of {page} pages");
            return Err(bad("area size", reason, "use a multiple of the page size"));
        }
        let backend = first.inner().backend.clone();
        for (region, range, to) in &self.ranges {
            if region.page_size() != page || to.pool().page_size() != page {
                let reason = format!(
                    "bytes {range:?} mix page sizes: {}, {page}, {}",
                    region.page_size(),
                    to.pool().page_size()
                );
                return Err(bad(
                    "range",
                    reason,
                    "move regions and pools of one page size per job",
                ));
            }
            check_same_backend(&backend, to.pool().backend())?;
            check_same_backend(&region.inner().backend, to.pool().backend())?;
        }
        if backend.is_host_memory() {
            fault::ensure_installed()?;
        }
        let mut items = Vec::new();
        for (region, range, to) in &self.ranges {
            items.push(Item::claim(region, range.clone(), to)?);
        }
        let nodes: BTreeSet<NodeId> = items.iter().flat_map(Item::nodes).collect();
        if let Some(node) = nodes.iter().find(|node| !backend.allows_node(node.0)) {
            return Err(Error::NodeNotAllowed { node: *node });
        }
        let mut warnings = Vec::new();
        let mut cpus = Vec::new();
        if backend.is_host_memory() {
            for node in &nodes {
                cpus.extend(Topology::node_now(*node)?.cpus);
            }
            if cpus.is_empty() {
                let names: Vec<String> = nodes.iter().map(NodeId::to_string).collect();
                let names = names.join(", ");
                warnings.push(format!(
                    "{names} has no CPUs: the workers run where the scheduler puts them"
                ));
            }
        }
        let threads = self.threads.unwrap_or((cpus.len() / 4).clamp(1, 8));

        let attributes = attributes_of(&items)?;
        let mut needs = Needs::default();
        items.iter().for_each(|item| item.add_needs(&mut needs));
        for item in &mut items {
            item.plan(&attributes[&item.claim.region().id], !page.is_hugetlb(), &mut needs)?;
        }
        let mut most_pieces = usize::MAX;
        if backend.is_host_memory() {
            most_pieces = check_mapping_headroom(&items, threads, page)?;
            // One more may serve the tracker.
            check_address_space(&*backend, threads + 1)?;
        }
        let open = |ability| OpenTracker::new(&backend, ability);
        let Chosen { engine, reason, tracker } = choice::for_job(self.engine, page, open)?;
        if engine.signals() {
            if backend.is_host_memory() {
                fault::check_no_thread_blocks_sigsegv()?;
            }
            let writable = attributes.values().flatten().any(|run| run.attributes.prot.writable());
            if self.engine == EngineChoice::Auto && writable {
                warnings.push(format!("{SYSTEM_CALLS_MAY_FAIL} ({reason})"));
            }
        }
        let area_bytes = area_bytes.min(engine.most_area_bytes(page));
        let pages = |bytes: usize| (bytes / page.bytes()).max(1) as u64;
        let limit = self.rate_limit.map_or(u64::MAX, pace::area_bytes_at);
        let at_most = |bytes: usize| {
            pages(bytes.min(usize::try_from(limit).unwrap_or(usize::MAX)).max(area_bytes))
        };
        let pace = match self.area_bytes {
            // The longer the copy of a hugetlb page's neighbours takes, the more of them are
            // written meanwhile.
            None if engine.profile().areas == Areas::Adaptive && !page.is_hugetlb() => {
                Pace::adaptive(
                    pages(area_bytes),
                    pages(area_bytes),
                    at_most(LARGEST_AREA_BYTES),
                    self.wait_budget,
                )
            }
            _ => Pace::fixed(pages(area_bytes), self.wait_budget),
        };
        let settings = Settings {
            policy: RetryPolicy {
                reduction_factor: self.reduction_factor,
                max_disturbed: self.max_disturbed.unwrap_or(3),
                max_refused: 4,
            },
            pace,
            rate_limit: self.rate_limit,
            pin_patience: self.pin_patience,
            most_pieces,
            max_rounds: self.max_disturbed.unwrap_or(4),
            page_bytes: page.bytes(),
            threads,
            // A page of reserved huge memory keeps its writers waiting for as long as its copy
            // takes.
            together: threads > 1 && page.is_hugetlb(),
            cpus,
            nodes,
            // A time-out beyond what the clock can show is none.
            deadline: self.timeout.and_then(|t| Instant::now().checked_add(t)),
            engine,
            may_fall_back: self.engine == EngineChoice::Auto,
            engine_reason: reason,
            tracker,
        };
        let run = Run::new(backend, items, settings, warnings, began)?;
        let shared = run.shared().clone();
        for (region, ..) in &self.ranges {
            let mut jobs = lock(&region.inner().jobs);
            jobs.retain(|job| job.strong_count() > 0);
            jobs.push(Arc::downgrade(&shared));
        }
        run.spawn()?;
        Ok(Job::new(shared))
    }
}

/// What is said of a job that could not follow writes.
const SYSTEM_CALLS_MAY_FAIL: &str =
    "system calls that write into a moving area may fail with EFAULT";

/// The attributes of all ranges of each region.
fn attributes_of(items: &[Item]) -> Result<BTreeMap<RegionId, Vec<AttributeRun>>, Error> {
    let mut by_region: BTreeMap<RegionId, (&Arc<RegionInner>, Vec<Range<usize>>)> = BTreeMap::new();
    for item in items {
        let (region, range) = (item.claim.region(), item.claim.range());
        let (_, ranges) = by_region.entry(region.id).or_insert((region, Vec::new()));
        ranges.push(region.start + range.start..region.start + range.end);
    }
    let read = |(id, (region, mut ranges)): (RegionId, (&Arc<RegionInner>, Vec<Range<usize>>))| {
        ranges.sort_by_key(|range| range.start);
        Ok((id, region.backend.attributes(&ranges)?))
    };
    by_region.into_iter().map(read).collect()
}

/// Refuses a job that would begin within a few mappings of the process' limit: it would fail page
/// by page instead.
fn check_mapping_headroom(items: &[Item], threads: usize, page: PageSize) -> Result<usize, Error> {
    let Some(limit) = observe::max_mapping_count() else { return Ok(usize::MAX) };
    let legs: usize = items.iter().map(Item::leg_count).sum();
    // Each area under way splits a mapping of the region (two more), and each leg one of the alias.
    // Those of hugetlb pages stay apart for a while.
    let mut needed = 2 * threads + 2 * legs + 16;
    if page.is_hugetlb() {
        let pages: Vec<u64> = items.iter().map(Item::moving_pages).collect();
        // Regions that have leapt before have theirs already.
        let (blocks, apart) = run::mappings_apart(&pages);
        needed += (blocks as usize).saturating_sub(observe::pool_mapping_count()?) + apart as usize;
    }
    let count = observe::mapping_count()?;
    if count + needed > limit {
        return Err(Error::Limit {
            what: "memory mappings of this process (vm.max_map_count)",
            limit,
            in_use: count,
            needed,
            remedy: "raise it (sysctl -w vm.max_map_count=262144), or unmap what is no longer used",
        });
    }
    // A piece that stays behind is a mapping of its own in the region, and so is what lies behind
    // it; the same in both aliases. Half of the rest is for others.
    Ok((limit - count - needed) / 2 / 6)
}
