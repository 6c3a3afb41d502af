//! Migration by the kernel's `move_pages(2)`, for memory that no pool owns, of this process or of
//! another one.
//!
//! The kernel's own call gives up half-way: a page that it cannot move may keep many others where
//! they are, and leaves their statuses unwritten ([`call`]). This module calls it in batches, and
//! keeps the contract of move_pages2 (seed: "Revisiting Page Migration In Main-Memory Databases For
//! Modern Hardware", section 4) on a vanilla kernel. Migration is partial: no page stays because
//! another one did. Each page gets its true status. The caller chooses a [`Mode`] and a batch size.
//!
//! * [`call`]: makes one moving call, and finds the fate of each page.
//! * [`batch`]: decides how many pages a call moves. Pure.
//! * [`edges`]: warns of ends of ranges within transparent huge pages. Pure.
//! * [`room`]: how much a node can take before the kernel reclaims memory.
//! * [`target`]: the process, and whether it still runs the same program.
//! * [`mover`]: the job's mover, which knows ranges of mappings.
//! * [`leg`]: a part of a mapping, and the destination of each of its pages.
//! * [`looked`]: queries the nodes of pages, and decides which of them have to move.
//! * [`settle`]: queries the nodes of a job's pages once more at its end.
//! * [`list`]: the same contract for a list of pages.

mod batch;
mod call;
mod edges;
mod leg;
pub(crate) mod list;
mod looked;
// Miri has nothing to find here: no code of these modules is unsafe.
#[cfg(all(test, not(any(shuttle, miri))))]
mod model;
#[cfg(all(test, not(any(shuttle, miri))))]
mod model_tests;
mod mover;
mod room;
mod settle;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use crate::error::Error;
use crate::job::area::{Area, Reason};
use crate::job::handle::Job;
use crate::job::outcomes::Item;
use crate::job::pace::Pace;
use crate::job::plan::RetryPolicy;
use crate::job::rate;
use crate::job::report::Warning;
use crate::job::run::{Running, Settings};
use crate::job::source::Source;
use crate::limits::check_memory_cgroups;
use crate::placement::Placement;
use crate::process::{MappingKind, MappingMemory, Movable, ProcessMemory};
use crate::sync::Instant;
use crate::topology::Topology;
use crate::units::{BASE_PAGE, NodeId, PageSize};
use batch::Batch;
use leg::Leg;
use mover::Persistence;
pub(crate) use mover::{ENGINE, KernelMover, Worker};
use room::Rooms;
use target::Process;

/// Bytes of a transparent huge page.
const HUGE: usize = PageSize::Thp.bytes();

/// The most base pages that one attempt queries: those of the largest page. An attempt makes one
/// moving call, and leaves the rest to the next one.
pub(crate) const AREA_PAGES: u64 = (PageSize::Huge1G.bytes() / BASE_PAGE) as u64;

/// The default of [`KernelMigration::max_call`].
pub(crate) const DEFAULT_MAX_CALL: Duration = Duration::from_millis(20);

/// How often a page is tried that the kernel did not move. (The kernel of move_pages2 distinguishes
/// MIGRATE_ASYNC, MIGRATE_SYNC_LIGHT and MIGRATE_SYNC. A vanilla kernel always uses MIGRATE_SYNC,
/// so user space can only choose how often it calls.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Each page is tried once.
    Light,
    /// Each page is tried up to four times, with pauses of 1 to 16 ms.
    #[default]
    Retry,
    /// Pages are tried until none has moved for ten seconds. That includes anonymous pages that are
    /// mapped more than once, because the forked child that shares them (a snapshot) may end.
    Insist,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 3] = [Mode::Light, Mode::Retry, Mode::Insist];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Light => "light",
            Mode::Retry => "retry",
            Mode::Insist => "insist",
        }
    }

    fn persistence(self) -> Persistence {
        match self {
            Mode::Light => Persistence::Tries(1),
            Mode::Retry => Persistence::Tries(4),
            Mode::Insist => Persistence::Without(Duration::from_secs(10)),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Mode::ALL.into_iter().find(|mode| mode.name() == s).ok_or_else(|| Error::BadArgument {
            what: "mode",
            reason: format!("no mode is called `{s}`"),
            remedy: format!("use {}", Mode::ALL.map(Mode::name).join(", ")),
        })
    }
}

/// Describes a migration of memory that no pool owns, then starts it. All its ranges form one job.
///
/// ```no_run
/// use pageleap::process::ProcessMemory;
/// use pageleap::{KernelMigration, NodeId};
/// # fn main() -> Result<(), pageleap::Error> {
/// let memory = ProcessMemory::read(4711)?;
/// let mut migration = KernelMigration::new();
/// for mapping in &memory.mappings {
///     migration = migration.range(&memory, mapping.start..mapping.end, NodeId(1));
/// }
/// let report = migration.start()?.wait();
/// println!("{report}");
/// # Ok(()) }
/// ```
///
/// Pages keep their contents and addresses, and threads may use them meanwhile: the kernel lets a
/// thread wait that touches a page while it moves. The memory policy stays as it is, so later first
/// touches follow that policy. The kernel's NUMA balancing may move pages again.
///
/// In the [`Report`](crate::Report), ranges are addresses of the process ([`Source::Process`]),
/// pages have 4 KB, and windows are moving calls.
#[derive(Debug)]
#[must_use = "a migration does nothing until it is started"]
pub struct KernelMigration<'a> {
    parts: Vec<Part<'a>>,
    from: Option<BTreeSet<NodeId>>,
    shared: bool,
    fill: bool,
    mode: Mode,
    batch_pages: Option<usize>,
    max_call: Duration,
    timeout: Option<Duration>,
    rate_limit: Option<u64>,
    /// The least bytes of a stripe, unless a placement sets the size of its stripes.
    least_stripe: usize,
    why: String,
    warnings: Vec<Warning>,
}

/// A range of a process, and its placement.
#[derive(Debug)]
struct Part<'a> {
    memory: &'a ProcessMemory,
    addresses: Range<usize>,
    to: Placement,
}

impl Default for KernelMigration<'_> {
    fn default() -> Self {
        KernelMigration::new()
    }
}

impl<'a> KernelMigration<'a> {
    /// A migration without ranges, with the default settings.
    pub fn new() -> Self {
        KernelMigration {
            parts: Vec::new(),
            from: None,
            shared: false,
            fill: false,
            mode: Mode::default(),
            batch_pages: None,
            max_call: DEFAULT_MAX_CALL,
            timeout: None,
            rate_limit: None,
            least_stripe: BASE_PAGE,
            why: "no pool owns the memory".into(),
            warnings: Vec::new(),
        }
    }

    /// Adds a range of addresses of a process, in whole pages, and the placement of its pages. Page
    /// tables stay where they are.
    ///
    /// * Parts without memory stay as they are, and the report says why. A mapping that had none
    ///   when `memory` was read counts as such, even if pages have been touched since.
    /// * A range that ends within a hugetlb page is refused.
    /// * Transparent huge pages move as a whole: if a range ends within one, up to 2 MB beyond the
    ///   range move as well, of which the report warns.
    ///
    /// Over several nodes, stripes have one page, as with the kernel's interleaving. They have 2 MB
    /// where pages may form folios, which the kernel moves as a whole: in mappings that may get
    /// huge pages ([`MappingMemory::may_be_huge`](crate::process::MappingMemory::may_be_huge)), and
    /// in mapped files. A page of a shared mapping gets its node by its place in the file, so that
    /// all processes agree.
    ///
    /// At the end the job queries once more where its pages lie. A page that has followed another
    /// part of its folio to another node has not moved ([`Reason::MovedOn`]). A job that was told
    /// to stop queries about a million pages; the others keep the outcome of their last call, of
    /// which the report warns.
    pub fn range(
        mut self,
        memory: &'a ProcessMemory,
        addresses: Range<usize>,
        to: impl Into<Placement>,
    ) -> Self {
        self.parts.push(Part { memory, addresses, to: to.into() });
        self
    }

    /// Moves only pages that lie on one of these nodes. Default: pages of all nodes.
    pub fn from_nodes(mut self, nodes: impl IntoIterator<Item = NodeId>) -> Self {
        self.from = Some(nodes.into_iter().collect());
        self
    }

    /// Also moves pages that are mapped more than once, by several processes or twice by one
    /// (`MPOL_MF_MOVE_ALL`). Needs CAP_SYS_NICE. Default: no; such pages stay as they are.
    pub fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Also moves pages to a node whose free memory is below its high watermark plus a reserve (a
    /// 64th of the node, at most 1 GB). Default: no; pages without room stay as they are
    /// ([`Reason::NoRoom`], [`Reason::NoFreeBlock`]). To make room, the kernel then
    ///
    /// * drops page cache, and swaps;
    /// * splits transparent huge pages for which the node has no free block of 2 MB;
    /// * turns free memory into hugetlb pages if the node has no free one. That shifts pages for
    ///   good from the hugetlb pool of the old node to that of the new one.
    pub fn fill(mut self, fill: bool) -> Self {
        self.fill = fill;
        self
    }

    /// Sets how often a page is tried that the kernel did not move. Default: [`Mode::Retry`].
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets how many base pages a call moves. By default the job measures its calls, and makes them
    /// large enough that their fixed cost is small, but no longer than
    /// [`max_call`](Self::max_call).
    pub fn batch_pages(mut self, pages: usize) -> Self {
        self.batch_pages = Some(pages);
        self
    }

    /// Sets how long a call should take at most, because threads that touch a page of its batch
    /// wait as long. Default: 20 ms. The job keeps this target by measuring its calls, but a call
    /// always moves at least one page, which may have 1 GB, or some 16 pages of 4 KB.
    pub fn max_call(mut self, limit: Duration) -> Self {
        self.max_call = limit;
        self
    }

    /// Sets the time after which the job begins no new moving call, counted from the return of
    /// [`start`](Self::start).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the most bytes that the job moves per second. Default: no limit. A call then moves at
    /// most as much as the rate allows in 10 ms, or one page.
    pub fn rate_limit(mut self, bytes_per_s: u64) -> Self {
        self.rate_limit = Some(bytes_per_s);
        self
    }

    /// Sets the least bytes of a stripe, for placements that do not set the size of their stripes.
    pub(crate) fn least_stripe(mut self, bytes: usize) -> Self {
        self.least_stripe = bytes;
        self
    }

    /// Sets the reason why the kernel moves the memory, and warnings for the report.
    pub(crate) fn because(mut self, why: String, warnings: Vec<Warning>) -> Self {
        (self.why, self.warnings) = (why, warnings);
        self
    }

    /// Starts the job. It has one thread.
    ///
    /// The thread gets ordinary priority even if the calling thread has a lower one, as far as the
    /// process may raise it, because threads of the program wait for its calls. It keeps the
    /// calling thread's affinity and cgroup, and a real-time policy if it has one.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: there is no range, a range is not of whole pages, a setting is zero,
    /// the cpuset of the only process does not allow a node, or the only process has ended or runs
    /// another program since its memory was read. (If there are several processes, those that have
    /// ended are left out, and the others move.) [`Error::UnknownNode`]: there is no such node.
    /// [`Error::SystemFile`]: this process may not move the pages of that one.
    /// [`Error::EngineRefused`]: [`shared`](Self::shared) needs a privilege.
    pub fn start(self) -> Result<Job, Error> {
        let began = Instant::now();
        let plan = self.plan()?;
        if let Some(node) = self.parts.iter().find_map(|part| part.to.nodes().next()) {
            check_memory_cgroups(node, 1, 0)?;
        }
        plan.start(self.settings(), self.all_warnings(), began)
    }

    /// Warnings for the report.
    fn all_warnings(&self) -> Vec<Warning> {
        self.warnings.iter().cloned().chain(edges::warning(&self.parts)).collect()
    }

    /// Checks the request, and makes its mover, which a job of another kind may have beside its
    /// own.
    pub(crate) fn plan(&self) -> Result<Plan, Error> {
        self.check_request()?;
        let (processes, members) = self.processes()?;
        let nodes: BTreeSet<NodeId> = self.parts.iter().flat_map(|part| part.to.nodes()).collect();
        let rooms = match self.fill {
            true => Rooms::unlimited(),
            false => Rooms::of(nodes.into_iter())?,
        };
        self.plan_on(processes, &members, rooms)
    }

    /// The same over these processes. `members`: the process of each part.
    fn plan_on(
        &self,
        processes: Vec<Process>,
        members: &[Option<usize>],
        rooms: Rooms,
    ) -> Result<Plan, Error> {
        let (mut items, mut legs, mut areas) = (Vec::new(), Vec::new(), Vec::new());
        for (part, process) in self.parts.iter().zip(members) {
            let (found, left) = match process {
                Some(process) => part.legs(*process, self.least_stripe)?,
                None => (Vec::new(), vec![(pages_of(&part.addresses), Reason::ProcessEnded)]),
            };
            for leg in found {
                areas.push(Area::new(items.len(), legs.len(), leg.pages.clone()));
                legs.push(Leg { item: items.len(), ..leg });
            }
            items.push(Item {
                source: Source::Process(part.memory.pid),
                pages: pages_of(&part.addresses),
                page_bytes: BASE_PAGE,
                left,
            });
        }
        let rate_pages = self.rate_limit.map(|rate| rate::area_bytes_at(rate) as usize / BASE_PAGE);
        let mover = KernelMover::new(
            processes,
            legs,
            mover::Manner {
                from: self.from.clone(),
                shared: self.shared,
                rooms,
                persistence: self.mode.persistence(),
                batch: Batch::new(self.batch_pages, self.max_call),
                most_pages: rate_pages.unwrap_or(usize::MAX).max(1),
                several: self.has_several(),
            },
        );
        Ok(Plan { mover, items, areas })
    }

    fn settings(&self) -> Settings {
        Settings {
            // The mover decides about retries itself.
            policy: RetryPolicy { reduction_factor: 1, max_disturbed: u32::MAX, max_refused: 1 },
            most_held_early: 0,
            pace: Pace::fixed(AREA_PAGES, self.max_call),
            low_contention_pace: None,
            rate_limit: self.rate_limit,
            patience: Duration::ZERO,
            most_pieces: usize::MAX,
            page_bytes: BASE_PAGE,
            threads: 1,
            deadline: self.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            engine: ENGINE,
            engine_reason: self.why.clone(),
        }
    }

    /// Checks the request as [`start`](Self::start) does, without moving anything. Returns the
    /// warnings that the report would have.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn check(&self) -> Result<Vec<Warning>, Error> {
        self.plan()?;
        Ok(self.all_warnings())
    }

    /// Whether the request is about several processes.
    fn has_several(&self) -> bool {
        self.parts.iter().any(|part| part.memory.pid != self.parts[0].memory.pid)
    }

    fn check_request(&self) -> Result<(), Error> {
        let bad = |what, reason: String, remedy: &str| Error::BadArgument {
            what,
            reason,
            remedy: remedy.into(),
        };
        if self.parts.is_empty() {
            return Err(bad("migration", "it has no range".into(), "name at least one"));
        }
        if self.batch_pages == Some(0) || self.rate_limit == Some(0) || self.max_call.is_zero() {
            return Err(bad(
                "setting",
                "a batch, a rate or a time is zero".into(),
                "use at least 1, or leave it out",
            ));
        }
        if self.shared {
            check_privilege()?;
        }
        let mut ranges: Vec<(u32, &Range<usize>)> =
            self.parts.iter().map(|part| (part.memory.pid, &part.addresses)).collect();
        ranges.sort_by_key(|(pid, range)| (*pid, range.start));
        let overlaps = |pair: &&[(u32, &Range<usize>)]| {
            pair[0].0 == pair[1].0 && pair[1].1.start < pair[0].1.end
        };
        if let Some([_, (pid, range)]) = ranges.windows(2).find(overlaps) {
            let range = format!("{:#x}-{:#x} of process {pid}", range.start, range.end);
            return Err(bad("range", format!("{range} overlaps another one"), "name pages once"));
        }
        let topology = Topology::read()?;
        for Part { memory, addresses, to } in &self.parts {
            let aligned = |at: usize| at.is_multiple_of(BASE_PAGE);
            if addresses.is_empty() || !aligned(addresses.start) || !aligned(addresses.end) {
                return Err(bad(
                    "range",
                    format!("{:#x}-{:#x} is not of whole pages", addresses.start, addresses.end),
                    "use multiples of 4096, the second one being the larger",
                ));
            }
            if memory.mappings.is_empty() {
                let why = memory.warnings.first().cloned().unwrap_or_default();
                let what = format!("process {} has no memory: {why}", memory.pid);
                return Err(bad("process", what, "name a process with memory"));
            }
            to.weights()?;
            for node in to.nodes() {
                topology.node(node)?;
                // With several processes, the kernel refuses the pages of this one, and the others
                // move.
                if !self.has_several() {
                    check_allowed(memory, node)?;
                }
            }
        }
        Ok(())
    }

    /// Each process once, and the index of each part's process. `None`: that process has ended,
    /// which does not keep other processes from moving.
    fn processes(&self) -> Result<(Vec<Process>, Vec<Option<usize>>), Error> {
        let (mut processes, mut known) = (Vec::new(), BTreeMap::new());
        let mut members = Vec::new();
        for part in &self.parts {
            let pid = part.memory.pid;
            let member = match known.get(&pid) {
                Some(member) => *member,
                None => match Process::open(part.memory) {
                    Ok(process) => {
                        let mut same = self.parts.iter().filter(|other| other.memory.pid == pid);
                        if !same.all(|other| part.memory.image.may_be(&other.memory.image)) {
                            return Err(crate::process::ended(pid));
                        }
                        processes.push(process);
                        Some(processes.len() - 1)
                    }
                    Err(error) if error.is_usage() && self.has_several() => None,
                    Err(error) => return Err(error),
                },
            };
            known.insert(pid, member);
            members.push(member);
        }
        Ok((processes, members))
    }
}

/// A checked request: its ranges, and the mover for them.
pub(crate) struct Plan {
    pub(crate) mover: KernelMover,
    /// One for each range.
    pub(crate) items: Vec<Item>,
    /// One for each mapping of a range, with a leg of its own. Ascending within a range.
    pub(crate) areas: Vec<Area>,
}

impl Plan {
    fn start(
        self,
        settings: Settings,
        warnings: Vec<Warning>,
        began: Instant,
    ) -> Result<Job, Error> {
        let Plan { mover, items, areas } = self;
        Running::new(mover, items, areas, settings, warnings, began).start(None)
    }
}

impl Part<'_> {
    /// The parts whose pages may move, as legs, and the pages that stay.
    fn legs(&self, process: usize, least_stripe: usize) -> Result<(Vec<Leg>, Left), Error> {
        let (mut legs, mut left) = (Vec::new(), Left::default());
        let mut at = self.addresses.start;
        let mappings = &self.memory.mappings;
        let first = mappings.partition_point(|mapping| mapping.end <= at);
        let inside = |mapping: &&MappingMemory| mapping.start < self.addresses.end;
        for mapping in mappings[first..].iter().take_while(inside) {
            let start = mapping.start.max(self.addresses.start);
            let end = mapping.end.min(self.addresses.end);
            left.extend((at < start).then(|| (pages_of(&(at..start)), Reason::Unmapped)));
            at = end;
            let why = match mapping.movable {
                Movable::Yes | Movable::Partly => None,
                Movable::Nothing if mapping.swapped_bytes > 0 => None,
                Movable::Nothing => Some(Reason::Absent),
                Movable::Device | Movable::Kernel | Movable::Secret => Some(Reason::Unmovable),
            };
            match why {
                Some(why) => left.push((pages_of(&(start..end)), why)),
                None => legs.push(self.leg(process, mapping, start..end, least_stripe)?),
            }
        }
        left.extend(
            (at < self.addresses.end)
                .then(|| (pages_of(&(at..self.addresses.end)), Reason::Unmapped)),
        );
        Ok((legs, left))
    }

    fn leg(
        &self,
        process: usize,
        mapping: &MappingMemory,
        addresses: Range<usize>,
        least_stripe: usize,
    ) -> Result<Leg, Error> {
        let page_bytes = (mapping.page_bytes as usize).max(BASE_PAGE);
        let inside = |at: usize| at.is_multiple_of(page_bytes);
        if !(inside(addresses.start) && inside(addresses.end)) {
            return Err(Error::BadArgument {
                what: "range",
                reason: format!(
                    "{:#x}-{:#x} ends within a huge page of {page_bytes} bytes",
                    addresses.start, addresses.end
                ),
                remedy: "use multiples of the page size of the mapping".into(),
            });
        }
        let has_file = matches!(mapping.kind, MappingKind::Shared | MappingKind::File)
            || mapping.kind == MappingKind::Hugetlb && mapping.access.ends_with('s');
        // The kernel moves a folio as a whole, so its pages cannot lie on several nodes. File
        // systems may use folios for the pages of files, too.
        let may_have_folios =
            page_bytes == BASE_PAGE && (mapping.may_be_huge || mapping.huge_bytes > 0 || has_file);
        let stripe = if may_have_folios { HUGE } else { page_bytes }.max(least_stripe);
        let to = match self.to.stripe_bytes {
            Some(_) => self.to.clone(),
            None => self.to.clone().stripe_bytes(stripe),
        };
        let first = (mapping.start / BASE_PAGE) as u64;
        let of_file = first.wrapping_sub(mapping.file_offset / BASE_PAGE as u64);
        Ok(Leg {
            item: 0,
            process,
            pages: pages_of(&addresses),
            unit: (page_bytes / BASE_PAGE) as u64,
            maybe_huge: mapping.huge_bytes > 0 && page_bytes == BASE_PAGE,
            is_hugetlb: page_bytes > BASE_PAGE,
            has_no_access: mapping.access.starts_with("---"),
            is_own: !has_file && mapping.kind != MappingKind::Hugetlb,
            may_have_folios,
            layout: to.layout(mapping.end - mapping.start, PageSize::Base)?,
            nodes: to.nodes().collect(),
            origin: if has_file { of_file } else { 0 },
        })
    }
}

/// Pages that stay, and why.
type Left = Vec<(Range<u64>, Reason)>;

/// Pages by their numbers: addresses divided by 4096.
fn pages_of(addresses: &Range<usize>) -> Range<u64> {
    (addresses.start / BASE_PAGE) as u64..(addresses.end / BASE_PAGE) as u64
}

/// Checks that this process may move pages that are mapped more than once, by a call with an empty
/// list. The kernel checks the capability first, which root of a user namespace has in name only.
fn check_privilege() -> Result<(), Error> {
    if pageleap_sys::move_pages(0, &[], &[], &mut [], true).is_ok() {
        return Ok(());
    }
    Err(Error::EngineRefused {
        engine: ENGINE.name(),
        reason: "moving pages that are mapped more than once needs CAP_SYS_NICE".into(),
        remedy: "run as root of the machine, and not of a user namespace (in a container: docker \
                 run --cap-add SYS_NICE), or leave such pages where they are"
            .into(),
    })
}

fn check_allowed(memory: &ProcessMemory, node: NodeId) -> Result<(), Error> {
    let ProcessMemory { pid, allowed_nodes, .. } = memory;
    if allowed_nodes.is_empty() || allowed_nodes.contains(&node) {
        return Ok(());
    }
    Err(Error::BadArgument {
        what: "node",
        reason: format!(
            "the cpuset of process {pid} does not allow memory of {node} (Mems_allowed_list in \
             /proc/{pid}/status)"
        ),
        remedy: "add the node to cpuset.mems of its cgroup, or use a node that is in it".into(),
    })
}
