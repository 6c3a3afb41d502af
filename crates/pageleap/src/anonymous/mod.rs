//! Leaps of memory that pageleap does not own: private anonymous memory of this process, as
//! `malloc` and `mmap` give it, moves in place.
//!
//! UFFDIO_MOVE (Linux 6.8) moves pages from one address to another without a copy. Here it takes
//! pages out of the range to a parking place, they are copied, and it brings the copies into the
//! range. The mapping itself is never replaced, and the kernel refuses pages that are pinned or
//! shared. The range is registered with a userfaultfd for missing pages meanwhile, so that a thread
//! that touches an area in its window sleeps until the copies have come.
//!
//! * [`window`]: the window, and the thread that attends to messages.
//! * [`stage`]: memory of the destination for the copies, and the parking places.
//! * [`ranges`]: splits ranges into memory that can move in place and memory that the kernel has to
//!   move.
//! * [`pages`]: finds the present pages of a range in `/proc/self/pagemap`.
//! * [`frames`]: the node of a page frame.
//! * [`vacated`]: hands parked pages to another thread, which gives them back beside the worker.
//! * [`forks`](crate::forks): keeps `fork` and windows apart.
//! * [`mapped`]: mappings that no allocator knows.
//! * [`yard`]: the registered ranges, and the threads beside the job's worker.
//! * [`mover`]: the job's mover.
//!
//! While ranges are registered, a thread that touches a missing page needs the job's threads. So if
//! another process traces these threads ([`tracer`](crate::tracer)), the job ends the registration,
//! and leaves the rest to the kernel.

mod engine;
mod frames;
mod mapped;
#[cfg(all(test, shuttle))]
mod model;
mod mover;
mod pages;
mod ranges;
mod stage;
#[cfg(test)]
mod tests;
mod vacated;
mod window;
mod yard;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pageleap_sys::Errno;

use crate::backend::{CopyMethod, uffd};
use crate::error::{Error, closed_pagemap};
use crate::forks;
use crate::job::area::Area;
use crate::job::handle::Job;
use crate::job::pace::{Pace, Unit};
use crate::job::plan::RetryPolicy;
use crate::job::report::{Warning, WarningKind};
use crate::job::run::{Running, Settings};
use crate::kernel::{KernelMigration, Plan};
use crate::limits::check_memory_cgroups;
use crate::placement::{PageTables, Placement};
use crate::sync::{Instant, Mutex};
use crate::topology::Topology;
use crate::tracer::{self, Watch};
use crate::units::{BASE_PAGE, Call, PageSize};
pub use engine::MemoryEngine;
use frames::FrameNodes;
use mover::{Leg, MemoryMover};
use pages::Pagemap;
use ranges::RangeMemory;
pub use stage::Reserve;
use stage::{InUse, Stage};
use yard::Yard;

/// Bytes of a transparent huge page.
const HUGE: usize = PageSize::Thp.bytes();
/// Bytes of an area: the first, the smallest and the largest. A window takes two calls and a copy,
/// for example 0.1 ms for 1 MB of base pages on a host that copies 17 GB/s.
const FIRST: usize = 1 << 20;
const LEAST: usize = 128 << 10;
const MOST: usize = 4 << 20;

/// Describes a migration of memory of this process that no pool owns, then starts it. All its
/// ranges form one job.
///
/// Private anonymous memory, as `malloc` and `mmap` give it, moves in place by
/// [`MemoryEngine::UffdMove`] where that engine works. [`MemoryEngine::Kernel`] moves everything
/// else in the ranges (files, shared memory, hugetlb pages, memory that cannot be written), and all
/// of them where the first engine does not work.
///
/// # The contract
/// From the start to the end of the job nobody frees, reallocates, unmaps, remaps or protects the
/// ranges, and nobody forks by the bare system call (the C library's `fork` may be used). Ranges
/// are allocations or mappings of the caller; other allocations in the same arena may come and go.
/// Threads and system calls may use the memory meanwhile, and `madvise(MADV_DONTNEED)` is allowed.
/// Pages that are pinned for I/O stay where they are.
///
/// If the contract is broken, contents of the ranges may be lost. Memory of others is not: pages
/// come only into mappings that this job has registered.
///
/// No thread may end meanwhile if its stack, thread-local memory or held robust mutexes lie in the
/// ranges, because the kernel does not wait for a missing page on behalf of an ending thread.
///
/// The ranges contain no priority-inheritance mutexes, and no word that FUTEX_WAKE_OP is used on:
/// the kernel writes such words itself, and does not wait for a missing page. They contain no
/// memory of the library, such as a [`Reserve`]. No O_DIRECT read of a network file system into
/// them is under way, because such file systems hold pages without pinning them.
#[derive(Debug)]
#[must_use = "a migration does nothing until it is started"]
pub struct MemoryMigration {
    ranges: Vec<(Range<usize>, Placement)>,
    reserves: Vec<Arc<Reserve>>,
    renews: bool,
    /// `None`: the library chooses.
    engine: Option<MemoryEngine>,
    #[cfg(test)]
    refuse: Option<tests::Plan>,
    /// Returns the process that traces the calling thread; tests replace it.
    tracer: fn() -> Option<u32>,
    timeout: Option<Duration>,
    wait_budget: Duration,
    rate_limit: Option<u64>,
}

impl Default for MemoryMigration {
    fn default() -> Self {
        MemoryMigration::new()
    }
}

/// Starts the leap of `len` bytes of private anonymous memory to a placement, with the default
/// settings. See [`MemoryMigration`].
///
/// # Errors
/// As for [`MemoryMigration::start`].
///
/// # Safety
/// The caller keeps the [contract](MemoryMigration#the-contract) until the job has ended.
pub unsafe fn leap_memory(
    address: *mut u8,
    len: usize,
    to: impl Into<Placement>,
) -> Result<Job, Error> {
    // SAFETY: forwarded to the caller.
    unsafe { MemoryMigration::new().range(address, len, to) }.start()
}

impl MemoryMigration {
    /// A migration without ranges, with the default settings.
    pub fn new() -> Self {
        MemoryMigration {
            ranges: Vec::new(),
            reserves: Vec::new(),
            renews: false,
            engine: None,
            #[cfg(test)]
            refuse: None,
            tracer: tracer::of_this_thread,
            timeout: None,
            wait_budget: Duration::from_micros(500),
            rate_limit: None,
        }
    }

    /// Adds a range of bytes, and the placement of its pages. Only the whole pages among the bytes
    /// move, because the rest of the first and of the last page may belong to other data. The
    /// memory policy of these pages becomes that of the placement, so that later first touches
    /// follow it. Page tables stay where they are.
    ///
    /// # Safety
    /// The caller keeps the [contract](MemoryMigration#the-contract) from the start of the job to
    /// its end.
    pub unsafe fn range(mut self, address: *mut u8, len: usize, to: impl Into<Placement>) -> Self {
        let end = address.addr().saturating_add(len) / BASE_PAGE * BASE_PAGE;
        let start = address.addr().checked_next_multiple_of(BASE_PAGE).unwrap_or(end);
        self.ranges.push((start..end.max(start), to.into()));
        self
    }

    /// Copies into memory of a reserve where it fits: the same node and page size, and while some
    /// is left. May be called several times.
    pub fn reserve(mut self, reserve: &Arc<Reserve>) -> Self {
        self.reserves.push(reserve.clone());
        self
    }

    /// Also moves pages that are on the right node already: they get other frames of that node. For
    /// measurements on machines with one node. Default: no.
    pub fn renew(mut self, renew: bool) -> Self {
        self.renews = renew;
        self
    }

    /// Sets the engine. [`MemoryEngine::UffdMove`]: this one alone; memory that it cannot move is
    /// refused by [`start`](Self::start), and pages that it leaves stay. [`MemoryEngine::Kernel`]:
    /// the kernel moves all of it. Default: `None`: the first one where it works, and the kernel
    /// for the rest.
    pub fn engine(mut self, engine: impl Into<Option<MemoryEngine>>) -> Self {
        self.engine = engine.into();
        self
    }

    /// Sets the time after which the job begins no new window, counted from the return of
    /// [`start`](Self::start).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long a thread should have to wait for a window, at most. Default: 0.5 ms. It is a
    /// target: an area has at least 128 KB, or one transparent huge page.
    pub fn wait_budget(mut self, budget: Duration) -> Self {
        self.wait_budget = budget;
        self
    }

    /// Sets the most bytes that the job copies per second. Default: no limit.
    pub fn rate_limit(mut self, bytes_per_s: u64) -> Self {
        self.rate_limit = Some(bytes_per_s);
        self
    }

    /// Starts the job. It has one thread that moves pages (the worker), one that serves threads
    /// that touch missing pages, and one that gives vacated pages back.
    ///
    /// The job's threads get ordinary priority even if the calling thread has a lower one, as far
    /// as the process may raise them, because threads of the program wait for them. They keep the
    /// calling thread's cgroup, and a real-time policy if it has one. They run on those of its CPUs
    /// that belong to the destination's nodes.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: there is no range, a range has no whole page, is not mapped, has
    /// a stack or memory that the allocator hands out to the library, belongs to a region, overlaps
    /// another range, cannot move by the engine that was asked for, or a setting is zero.
    /// [`Error::UnknownNode`]: there is no such node. [`Error::EngineRefused`]: the engine that was
    /// asked for does not work here. [`Error::Call`]: a range is
    /// registered already, by another job or by the program itself (EBUSY), or a limit of the
    /// process is in the way.
    pub fn start(self) -> Result<Job, Error> {
        let began = Instant::now();
        let topology = Topology::read()?;
        self.check(&topology)?;
        if let Some(node) = self.ranges.iter().find_map(|(_, to)| to.nodes().next()) {
            // Three threads: the worker, the attendant and the watcher.
            let bytes = self.ranges.iter().map(|(range, _)| range.len()).sum();
            check_memory_cgroups(node, 3, bytes)?;
        }
        let ranges: Vec<Range<usize>> =
            self.ranges.iter().map(|(range, _)| range.clone()).collect();
        let forced = self.engine;
        let only_in_place = match forced {
            Some(MemoryEngine::UffdMove) => true,
            Some(MemoryEngine::Kernel) | None => false,
        };
        let mut memory = RangeMemory::read(&ranges, only_in_place)?;
        let kernel = match (forced, memory.in_place.is_empty()) {
            (Some(MemoryEngine::Kernel), _) => Err("asked for".into()),
            (Some(MemoryEngine::UffdMove) | None, true) => {
                Err("the ranges have no private anonymous memory that can be written".into())
            }
            (Some(MemoryEngine::UffdMove), false) => Ok(open()?),
            (None, false) => open().map_err(|error| match error {
                Error::EngineRefused { reason, .. } => reason,
                other => other.to_string(),
            }),
        };
        match kernel {
            Ok(kernel) => self.start_in_place(memory, kernel, &topology, began),
            Err(why) => {
                memory.look_for_huge_in_smaps()?;
                self.set_policies(&memory)?;
                self.by_kernel(&memory).because(why, self.warnings()).start()
            }
        }
    }

    /// The migration of all ranges by the kernel's engine.
    fn by_kernel<'a>(&self, memory: &'a RangeMemory) -> KernelMigration<'a> {
        let all = KernelMigration::new().least_stripe(HUGE).max_call(self.wait_budget);
        let all = self
            .ranges
            .iter()
            .fold(all, |all, (range, to)| all.range(&memory.process, range.clone(), to.clone()));
        let all = self.rate_limit.into_iter().fold(all, KernelMigration::rate_limit);
        self.timeout.into_iter().fold(all, KernelMigration::timeout)
    }

    fn start_in_place(
        self,
        mut memory: RangeMemory,
        (uffd, pagemap): (OwnedFd, Pagemap),
        topology: &Topology,
        began: Instant,
    ) -> Result<Job, Error> {
        let first = &memory.in_place[0];
        let at = first.start..first.end;
        let refused = |(call, errno)| Error::call(call, at.start, at.len(), errno);
        forks::watch().map_err(|errno| refused((Call::Advise, errno)))?;
        let reserves = self.reserves.iter().map(InUse::new).collect();
        let has_huge = memory.look_for_huge(&pagemap);
        let yard = Yard::new(&memory.in_place, uffd, pagemap)?;
        let stage = Stage::new(MOST, yard.vacated().places(), reserves).map_err(refused)?;
        let Plan { mover: kernel, items, areas: stretches } = self.by_kernel(&memory).plan()?;
        let (mut legs, mut areas) = (Vec::new(), Vec::new());
        // Legs in place get numbers after the kernel's, which keep theirs.
        let kernel_legs = stretches.len();
        for stretch in stretches {
            if !memory.is_in_place(stretch.pages.start as usize * BASE_PAGE) {
                areas.push(stretch);
                continue;
            }
            for (part, node) in kernel.parts(stretch.leg) {
                areas.push(Area::new(stretch.item, kernel_legs + legs.len(), part));
                let locked = AtomicBool::new(false);
                legs.push(Leg { node, locked, kernel: stretch.leg });
            }
        }
        #[cfg(test)]
        if let Some(plan) = self.refuse {
            yard.ground().shared.refuse.set(plan);
        }
        let settings = self.settings(has_huge);
        let in_place = !yard.was_traced();
        if in_place {
            // SAFETY: the caller keeps the contract.
            unsafe { yard.hold() }?;
        }
        self.set_policies(&memory)?;
        let mover = MemoryMover {
            yard,
            legs,
            kernel,
            kernel_legs,
            stage: Mutex::new(stage),
            frames: FrameNodes::read(),
            cpus: self.cpus(topology),
            method: CopyMethod::DEFAULT,
            renews: self.renews,
            may_leave: self.engine.is_none() && !self.renews,
            in_place: AtomicBool::new(in_place),
            tracer: self.tracer,
            watch: Mutex::new(Watch::default()),
        };
        Running::new(mover, items, areas, settings, self.warnings(), began).start(None)
    }

    /// Sets the memory policy of each range to that of its placement (mbind).
    fn set_policies(&self, memory: &RangeMemory) -> Result<(), Error> {
        self.ranges.iter().try_for_each(|(range, to)| memory.set_policy(range, to))
    }

    /// Warnings about requests that cannot be fulfilled.
    fn warnings(&self) -> Vec<Warning> {
        let asked = self.ranges.iter().any(|(_, to)| to.page_tables != PageTables::Auto);
        let warning = "page tables stay on the node where they are: only pages move in place";
        if asked { vec![Warning::new(WarningKind::PageTables, warning)] } else { Vec::new() }
    }

    /// `has_huge`: no area is to end within a huge page.
    fn settings(&self, has_huge: bool) -> Settings {
        let pages = |bytes: usize| (bytes / BASE_PAGE) as u64;
        let unit = Unit { pages: pages(HUGE), base_pages: 1 };
        let [first, least] = if has_huge { [HUGE; 2] } else { [FIRST, LEAST] };
        Settings {
            // The mover decides about retries itself.
            policy: RetryPolicy { reduction_factor: 1, max_disturbed: u32::MAX, max_refused: 1 },
            most_held_early: 0,
            pace: Pace::budgeted(pages(first), pages(least), pages(MOST), unit, self.wait_budget),
            low_contention_pace: None,
            rate_limit: self.rate_limit,
            patience: Duration::ZERO,
            most_pieces: usize::MAX,
            page_bytes: BASE_PAGE,
            threads: 1,
            deadline: self.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            engine: MemoryEngine::UffdMove.into(),
            engine_reason: "no pool owns the memory, and its mapping stays".into(),
        }
    }

    fn check(&self, topology: &Topology) -> Result<(), Error> {
        let bad = |what, reason: String, remedy: &str| {
            Err(Error::BadArgument { what, reason, remedy: remedy.into() })
        };
        if self.ranges.is_empty() {
            return bad("migration", "it has no range".into(), "name at least one");
        }
        if self.rate_limit == Some(0) || self.wait_budget.is_zero() {
            return bad(
                "setting",
                "a rate or a time is zero".into(),
                "use at least 1, or leave it out",
            );
        }
        let mut sorted: Vec<&Range<usize>> = Vec::new();
        for (range, to) in &self.ranges {
            if range.is_empty() {
                let reason = format!("no whole page lies in a range at {:#x}", range.start);
                return bad("range", reason, "leave out what is smaller than a page");
            }
            to.weights()?;
            for node in to.nodes() {
                topology.node(node)?;
            }
            sorted.push(range);
        }
        sorted.sort_by_key(|range| range.start);
        if let Some(pair) = sorted.windows(2).find(|pair| pair[1].start < pair[0].end) {
            return bad(
                "range",
                format!("{:#x}-{:#x} overlaps another one", pair[1].start, pair[1].end),
                "name each page once",
            );
        }
        Ok(())
    }

    /// The CPUs of all destinations.
    fn cpus(&self, topology: &Topology) -> Vec<usize> {
        let nodes = self.ranges.iter().flat_map(|(_, to)| to.nodes());
        let mut cpus: Vec<usize> = nodes
            .filter_map(|node| topology.node(node).ok())
            .flat_map(|n| n.cpus.clone())
            .collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }
}

/// The descriptors that the engine needs: a userfaultfd that also handles faults of the kernel, and
/// a pagemap.
fn open() -> Result<(OwnedFd, Pagemap), Error> {
    let refused = |reason, remedy: &str| Error::EngineRefused {
        engine: MemoryEngine::UffdMove.name(),
        reason,
        remedy: remedy.into(),
    };
    let uffd = uffd::privileged(uffd::MOVE_IN_PLACE).map_err(|errno| match errno {
        Errno(libc::EINVAL) => refused(
            "the kernel has no UFFDIO_MOVE, which came with Linux 6.8".into(),
            "use a newer kernel, or KernelMigration, which moves such memory by the kernel",
        ),
        errno => refused(
            format!("a userfaultfd that holds up the kernel was refused: {errno}"),
            "grant CAP_SYS_PTRACE or access to /dev/userfaultfd, or set \
             vm.unprivileged_userfaultfd to 1",
        ),
    })?;
    let pagemap = Pagemap::open().map_err(|(call, errno)| {
        let reason = format!("{call} does not tell which pages are there: {errno}");
        match closed_pagemap(call, errno) {
            Some((why, remedy)) => refused(format!("{reason}: {why}"), remedy),
            None => refused(
                reason,
                "see the finding pagemap-scan of `pageleap doctor`, or use KernelMigration",
            ),
        }
    })?;
    Ok((uffd, pagemap))
}
