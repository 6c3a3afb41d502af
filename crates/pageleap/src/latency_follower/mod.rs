//! A thread that moves the page tables of a region to where walks are fastest, again and again.
//!
//! Each trigger takes samples, decides ([`scan`]), and moves. Three rules keep the thread harmless:
//!
//! * The region owns the thread's work, and not the reverse: between two scans the thread has only
//!   a weak reference, and the region's end ends the thread before anything is unmapped
//!   ([`Dependent`]).
//! * The caller's source of latencies runs while the thread holds neither a lock nor the region, so
//!   it may do anything, even drop the region.
//! * A job that is under way at the end is cancelled, which leaves each area before or after its
//!   move.

mod scan;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use crate::decisions::{BackOff, LatencyAware, NodeFacts, TableDecision};
use crate::error::Error;
use crate::job::handle::Job;
use crate::job::report::Ended;
use crate::latency::{Latencies, PROBE_INTERVAL, Prober};
use crate::leap::PageTableMigration;
use crate::priority;
use crate::region::{Dependent, PageTableLevel, Region, RegionInner, RegionRef};
use crate::sync::{Condvar, Instant, Mutex, lock, thread};
use crate::topology::Topology;
use crate::units::NodeId;
use scan::{Moved, Part, Samples, Scanner};

/// Says how long loads take from node to node: a [`Prober`], or a closure.
///
/// ```
/// use pageleap::{LatencySource, NodeId};
/// use pageleap::latency::Latencies;
///
/// let mut fixed = || {
///     let mut latencies = Latencies::default();
///     latencies.set(NodeId(0), NodeId(0), 100.0);
///     latencies
/// };
/// assert_eq!(LatencySource::latencies(&mut fixed).iter().count(), 1);
/// ```
pub trait LatencySource: Send + 'static {
    /// The latencies now. The follower's thread calls this once for each scan, and must not unwind;
    /// the follower's end waits for a call that is under way.
    fn latencies(&mut self) -> Latencies;
}

impl LatencySource for Prober {
    fn latencies(&mut self) -> Latencies {
        Prober::latencies(self)
    }
}

impl<F: FnMut() -> Latencies + Send + 'static> LatencySource for F {
    fn latencies(&mut self) -> Latencies {
        self()
    }
}

/// How a [`LatencyFollower`] decides, and how often.
///
/// ```
/// use std::time::Duration;
/// use pageleap::FollowPolicy;
/// use pageleap::decisions::LatencyAware;
///
/// let policy = FollowPolicy::new()
///     .rule(LatencyAware::new().margin(0.25))
///     .every(Duration::from_secs(2))
///     .longest_pause(2); // 2^2 triggers: 8 s after scans that moved nothing
/// # let _ = policy;
/// ```
#[derive(Clone, Debug)]
pub struct FollowPolicy {
    rule: LatencyAware,
    every: Duration,
    longest_pause: u32,
    walkers: Walkers,
}

/// The threads that walk the page tables.
#[derive(Clone, Debug)]
enum Walkers {
    Unknown,
    OnNodes(Vec<NodeId>),
    Threads(Vec<u32>),
}

impl FollowPolicy {
    /// The exponent of [`FollowPolicy::longest_pause`] without a call of it. It is smaller than
    /// [`BackOff::MOST`], because a scan reads the library's account, and not the page tables.
    pub const LONGEST_PAUSE: u32 = 3;

    /// A trigger every 10 s, as often as a [`Prober`] probes; [`LatencyAware::new`]; the threads
    /// that walk are not known, so the node of the data stands for theirs.
    pub fn new() -> FollowPolicy {
        FollowPolicy {
            rule: LatencyAware::new(),
            every: PROBE_INTERVAL,
            longest_pause: FollowPolicy::LONGEST_PAUSE,
            walkers: Walkers::Unknown,
        }
    }

    /// Sets the rule. It says whether nodes without CPUs are allowed, and how large the margin is.
    pub fn rule(mut self, rule: LatencyAware) -> FollowPolicy {
        self.rule = rule;
        self
    }

    /// Sets the time from one trigger to the next, 1 ms at least.
    pub fn every(mut self, every: Duration) -> FollowPolicy {
        self.every = every.max(Duration::from_millis(1));
        self
    }

    /// Sets the bound on the triggers that are skipped in a row after scans that moved nothing or
    /// failed: 2^`exponent` ([`BackOff::up_to`]).
    pub fn longest_pause(mut self, exponent: u32) -> FollowPolicy {
        self.longest_pause = exponent;
        self
    }

    /// Says that the threads which walk run on the CPUs of these nodes, the same number on each. An
    /// empty list says that they are not known.
    pub fn walks_from(mut self, nodes: impl IntoIterator<Item = NodeId>) -> FollowPolicy {
        self.walkers = Walkers::OnNodes(nodes.into_iter().collect());
        self
    }

    /// Says which threads of this process walk, by their ids in the kernel (`gettid`). Each scan
    /// asks on which CPU each of them runs, or has run last. Threads that have ended do not count;
    /// if all have, the node of the data stands for theirs.
    pub fn threads(mut self, ids: impl IntoIterator<Item = u32>) -> FollowPolicy {
        self.walkers = Walkers::Threads(ids.into_iter().collect());
        self
    }
}

impl Default for FollowPolicy {
    fn default() -> Self {
        FollowPolicy::new()
    }
}

/// A decision of a [`LatencyFollower`] about a part of its region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowDecision {
    /// The part, in bytes from the beginning of the region.
    pub range: Range<usize>,
    /// The node for its page tables, and why.
    pub decision: TableDecision,
}

/// The work of a [`LatencyFollower`] until now. Numbers count from its start.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct FollowStatus {
    /// Triggers: one at the start, and one after each interval.
    pub triggers: u64,
    /// Triggers that were not skipped, and whose scan has ended.
    pub scans: u64,
    /// Ranges whose page tables have moved, at least in part.
    pub moves: u64,
    /// Bytes of the region whose page tables have moved. A byte counts each time.
    pub bytes_moved: u64,
    /// Bytes whose page tables the last scan has left where they were, although they were to move:
    /// see [`PageTableMigration`] for the reasons, or the fields below.
    pub bytes_left: u64,
    /// Ranges (of 1 GB at most) that were not tried because a job had a part of them. The next
    /// trigger tries them again.
    pub busy: u64,
    /// Ranges whose move has failed, perhaps after a part. Triggers are skipped after such a scan.
    pub failures: u64,
    /// The latest failure.
    pub last_failure: Option<Error>,
    /// The decisions of the last scan, by their place in the region.
    pub decisions: Vec<FollowDecision>,
    /// Whether the follower has ended, because its region has.
    pub has_ended: bool,
}

/// Moves the page tables of a region to where walks are fastest, in a thread of its own
/// ([`Region::follow_latency`]).
///
/// Dropping it cancels a move that is under way, and returns when nothing moves any more; the
/// region stays whole. It also ends when the region is dropped. In a child made by `fork` there is
/// no such thread.
#[must_use = "dropping a follower ends it"]
pub struct LatencyFollower {
    shared: Arc<Shared>,
    /// The process that owns the thread.
    process: u32,
}

struct Shared {
    state: Mutex<State>,
    /// Notified when a scan has ended, when the thread is to end, and when it has ended.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    status: FollowStatus,
    /// The thread, once it runs.
    thread: Option<ThreadId>,
    /// The move that is under way.
    job: Option<Arc<Job>>,
    /// Whether the thread is to end.
    is_over: bool,
}

impl Region {
    /// Moves the region's page tables to where walks are fastest, from now on: each trigger of the
    /// policy compares the latencies of the source, decides by
    /// [`LatencyAware`](crate::decisions::LatencyAware), and moves page tables as
    /// [`Region::move_page_tables`] does. The data stays.
    ///
    /// Page tables for which no node has been asked yet
    /// ([`PageTableCounts`](crate::PageTableCounts)) move at the first scan that knows latencies. A
    /// range that a job has at that time is tried again at the next trigger. So a follower may run
    /// beside leaps, which put page tables where their placement says; while it moves a range,
    /// other jobs get [`Error::RangeBusy`] for it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pageleap::latency::Prober;
    /// use pageleap::{FollowPolicy, NodeId, Pool, Region};
    ///
    /// # fn main() -> Result<(), pageleap::Error> {
    /// let pool = Pool::builder(NodeId(0), 8 << 20).build()?;
    /// let region = Region::new(&pool, 8 << 20)?;
    /// let prober = Prober::builder().start()?;
    /// prober.wait_for(1, Duration::from_secs(60));
    /// let follower = region.follow_latency(prober, FollowPolicy::new())?;
    /// let status = follower.wait_for(1, Duration::from_secs(60)).expect("the first scan is quick");
    /// for one in &status.decisions {
    ///     println!("bytes {:?}: {}", one.range, one.decision.reason);
    /// }
    /// # assert_eq!(status.failures, 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for hugetlb pages, whose page tables do not move alone;
    /// [`Error::NoThread`]. Everything that goes wrong later is in [`LatencyFollower::status`].
    pub fn follow_latency(
        &self,
        source: impl LatencySource,
        policy: FollowPolicy,
    ) -> Result<LatencyFollower, Error> {
        let inner = self.inner();
        if inner.page.is_hugetlb() {
            return Err(Error::Unsupported {
                what: format!("page tables of {} pages cannot move without the data", inner.page),
                remedy: "leap the data to a placement whose page_tables name the node",
            });
        }
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::default() });
        let (of_thread, region) = (shared.clone(), Arc::downgrade(inner));
        // Registered first, so that the region cannot go unnoticed.
        let dependent: Weak<Shared> = Arc::downgrade(&shared);
        inner.add_dependent(dependent);
        let started = thread::start(c"pageleap-tables", move || {
            of_thread.follow(&region, source, &policy);
        });
        if let Err(errno) = started {
            // Nobody will set it: whoever waits for the end must not.
            lock(&shared.state).status.has_ended = true;
            return Err(priority::no_thread("the thread of a follower", errno));
        }
        Ok(LatencyFollower { shared, process: std::process::id() })
    }
}

impl LatencyFollower {
    /// The work until now. In a child made by `fork` there is none.
    pub fn status(&self) -> FollowStatus {
        if self.process != std::process::id() {
            return FollowStatus { has_ended: true, ..FollowStatus::default() };
        }
        lock(&self.shared.state).status.clone()
    }

    /// Waits until so many scans have ended since the start, and returns the status. `None` if that
    /// takes longer than `patience`, or the follower has ended before.
    pub fn wait_for(&self, scans: u64, patience: Duration) -> Option<FollowStatus> {
        if self.process != std::process::id() {
            return None;
        }
        let began = Instant::now();
        let mut state = lock(&self.shared.state);
        while state.status.scans < scans && !state.status.has_ended {
            let left = patience.checked_sub(began.elapsed())?;
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (state.status.scans >= scans).then(|| state.status.clone())
    }
}

impl Drop for LatencyFollower {
    fn drop(&mut self) {
        // In a child made by `fork`, no thread would ever release a lock that was held at that
        // time.
        if self.process == std::process::id() {
            self.shared.end_with_region();
        }
    }
}

impl fmt::Debug for LatencyFollower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatencyFollower").field("process", &self.process).finish_non_exhaustive()
    }
}

impl Dependent for Shared {
    fn end_with_region(&self) {
        let mut state = lock(&self.state);
        state.is_over = true;
        if let Some(job) = &state.job {
            job.cancel();
        }
        self.changed.notify_all();
        // The source may drop the region, or the follower: it runs in the thread itself.
        while !state.status.has_ended && state.thread != Some(std::thread::current().id()) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    /// The follower's thread.
    fn follow(
        &self,
        region: &Weak<RegionInner>,
        mut source: impl LatencySource,
        policy: &FollowPolicy,
    ) {
        lock(&self.state).thread = Some(std::thread::current().id());
        let mut scanner = Scanner::new(policy.rule, BackOff::up_to(policy.longest_pause));
        while self.trigger(region, &mut source, policy, &mut scanner) {}
        lock(&self.state).status.has_ended = true;
        self.changed.notify_all();
        // Only now, because it may own the region or the follower.
        drop(source);
    }

    /// Scans if that is due, then waits for the next trigger. Returns whether there is one.
    fn trigger(
        &self,
        region: &Weak<RegionInner>,
        source: &mut impl LatencySource,
        policy: &FollowPolicy,
        scanner: &mut Scanner,
    ) -> bool {
        let began = Instant::now();
        lock(&self.state).status.triggers += 1;
        if scanner.is_due() {
            let latencies = source.latencies();
            let Some(region) = self.use_region(region) else { return false };
            let before = lock(&self.state).status.clone();
            let status = match samples(&region, policy, latencies) {
                Ok(samples) => {
                    let move_to = |range, to| self.move_to(&region, policy, range, to);
                    scanner.scan(before, &samples, move_to)
                }
                Err(error) => scanner.cannot_look(before, error),
            };
            drop(region);
            lock(&self.state).status = status;
            self.changed.notify_all();
        }
        let mut state = lock(&self.state);
        while !state.is_over {
            let Some(left) =
                policy.every.checked_sub(began.elapsed()).filter(|left| !left.is_zero())
            else {
                break;
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        !state.is_over
    }

    /// The region, unless the thread is to end or the region has.
    fn use_region(&self, region: &Weak<RegionInner>) -> Option<RegionRef> {
        let region = RegionRef::new(region)?;
        (!lock(&self.state).is_over).then_some(region)
    }

    /// Moves the page tables of a range, and waits for the end of that.
    fn move_to(
        &self,
        region: &Region,
        policy: &FollowPolicy,
        range: Range<usize>,
        to: NodeId,
    ) -> Moved {
        if lock(&self.state).is_over {
            return Moved::Bytes(0);
        }
        let migration = PageTableMigration::new(region, range, to);
        let migration = match policy.rule.allows_nodes_without_cpus() {
            true => migration.allow_node_without_cpus(),
            false => migration,
        };
        let job = match migration.start() {
            Ok(job) => Arc::new(job),
            Err(Error::RangeBusy { .. }) => return Moved::Busy,
            Err(error) => return Moved::Failed(error, 0),
        };
        {
            let mut state = lock(&self.state);
            if state.is_over {
                job.cancel();
            }
            state.job = Some(job.clone());
        }
        job.wait_until_finished();
        lock(&self.state).job = None;
        let Some(report) = job.report() else { return Moved::Bytes(0) };
        let bytes = report.pages.migrated as usize * region.page_size().bytes();
        match report.ended {
            Ended::Failed(error) => Moved::Failed(error, bytes),
            Ended::CpusetChanged => Moved::Failed(Error::NodeNotAllowed { node: to }, bytes),
            _ => Moved::Bytes(bytes),
        }
    }
}

impl Scanner {
    /// Notes a scan whose samples could not be taken.
    fn cannot_look(&mut self, before: FollowStatus, error: Error) -> FollowStatus {
        let nothing = Samples {
            parts: Vec::new(),
            uppers: Vec::new(),
            threads: BTreeMap::new(),
            nodes: BTreeMap::new(),
            latencies: Latencies::default(),
        };
        let status = self.scan(before, &nothing, |_, _| Moved::Bytes(0));
        let failures = status.failures + 1;
        FollowStatus { failures, last_failure: Some(error), ..status }
    }
}

/// The samples of a scan, at this moment.
fn samples(region: &Region, policy: &FollowPolicy, latencies: Latencies) -> Result<Samples, Error> {
    let topology = Topology::read()?;
    let mut threads = BTreeMap::new();
    match &policy.walkers {
        Walkers::Unknown => {}
        Walkers::OnNodes(nodes) => threads.extend(nodes.iter().map(|node| (*node, 1))),
        Walkers::Threads(ids) => {
            let nodes = ids.iter().filter_map(|id| node_of_thread(&topology, *id));
            nodes.for_each(|node| *threads.entry(node).or_default() += 1);
        }
    }
    let nodes = NodeFacts::of(&topology);
    let (parts, uppers) = parts(region.inner());
    Ok(Samples { parts, uppers, threads, nodes, latencies })
}

/// The node of the CPU on which a thread of this process runs, or has run last.
fn node_of_thread(topology: &Topology, id: u32) -> Option<NodeId> {
    /// The place of the field `processor` in `stat` (proc(5)) behind the command, which is the
    /// second field and may contain spaces and parentheses.
    const PROCESSOR: usize = 39 - 3;
    let stat = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")).ok()?;
    let cpu = stat.rsplit_once(')')?.1.split_whitespace().nth(PROCESSOR)?.parse().ok()?;
    let nodes = topology.nodes().iter();
    nodes.filter(|node| node.cpus.contains(&cpu)).map(|node| node.id).next()
}

/// A GB of a region, and the node on which its page of the second level was asked for.
type Upper = (Range<usize>, Option<NodeId>);

/// The parts of a region whose page tables of the lowest level may move, by the node of their data
/// and of their page tables, and the GBs of base pages that have a page of the second level.
fn parts(region: &RegionInner) -> (Vec<Part>, Vec<Upper>) {
    let extents = lock(&region.extents);
    // Runs of pages whose data lies on one node: a page of page table may map several of their
    // extents.
    let mut runs: Vec<(Range<usize>, NodeId)> = Vec::new();
    for extent in extents.within(0..u64::MAX) {
        let (start, end) = (region.addr(extent.pages.start), region.addr(extent.pages.end));
        match runs.last_mut() {
            Some((run, node)) if run.end == start && *node == extent.share.node() => run.end = end,
            _ => runs.push((start..end, extent.share.node())),
        }
    }
    let Some(lowest) = PageTableLevel::of(region.page).first() else {
        return (Vec::new(), Vec::new());
    };
    let tables = lock(&region.tables);
    let mut parts = Vec::new();
    for (run, data) in &runs {
        for (range, node) in tables.asked(*lowest, run) {
            let pages = (range.len() / region.page.bytes()) as u64;
            let range = range.start - region.start..range.end - region.start;
            parts.push(Part { range, data: *data, pages, tables: node });
        }
    }
    let mut uppers = Vec::new();
    if *lowest < PageTableLevel::Pmd {
        let gb = PageTableLevel::Pmd.reach_bytes();
        let all = region.start..region.start + region.capacity();
        for (range, node) in tables.asked(PageTableLevel::Pmd, &all) {
            let starts = (range.start..range.end).step_by(gb);
            let offset = |start: usize| start - region.start..start - region.start + gb;
            uppers.extend(starts.map(|start| (offset(start), node)));
        }
    }
    (parts, uppers)
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests;
