//! One of the two machines. It runs the steps of a program, and shows its pools and regions.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pageleap::backend::{Advice, Backend, Call, Errno, FailAt, Linux, Model, Prot};
use pageleap::{
    BASE_PAGE, Ended, Engine, EngineChoice, Error, Job, Migration, NodeCounts, NodeId, PageCounts,
    PageOutcome, PageSize, PageTables, Placement, Pool, Region, audit, observe, topology::Topology,
};

use crate::common::{address, can_follow, own_descriptors, pool_mappings, surprises};
use crate::program::{Attribute, End, Move, Program, Step};
use crate::{FIRST_POOLS, FIRST_REGIONS, POOLS, REGIONS, WORDS};

/// Pools and regions on one machine.
pub struct Machine {
    /// The backend for calls of the test itself.
    bare: Arc<dyn Backend>,
    /// The backend for the library, on which one call may fail.
    backend: Arc<FailAt>,
    /// The model, or `None` for the kernel.
    model: Option<Arc<Model>>,
    pools: Vec<Pool>,
    regions: Vec<Option<Region>>,
    /// Replaced pools, kept if a call may fail. A failed call may leave their files mapped, and the
    /// model does not allow such a file to be closed.
    old: Option<Vec<Pool>>,
    /// The memory files seen so far. A view numbers them by their position here.
    files: Vec<String>,
    /// Whether frames have predictable numbers. They have not after a job was stopped at some
    /// moment.
    exact: bool,
}

/// The result of a step, without addresses.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    Nothing,
    Done,
    Refused(String),
    Finished(Finished),
    /// A job was stopped at some moment, and another job has completed it.
    Stopped {
        pages: u64,
        unchanged: u64,
    },
}

/// The parts of a report that must be equal on both machines. No thread disturbs these jobs.
#[derive(Debug, PartialEq)]
pub struct Finished {
    ended: String,
    pub pages: PageCounts,
    /// Runs of pages: index of the job's range, bytes, outcome.
    runs: Vec<(usize, Range<usize>, PageOutcome)>,
    bytes: u64,
    bytes_copied: u64,
    disturbed_copies: u64,
    holds: u64,
    repairs: u64,
    calls: BTreeMap<&'static str, u64>,
    pub warnings: Vec<String>,
}

/// What a machine shows of its pools and regions.
#[derive(Debug, PartialEq)]
pub struct View {
    /// Of each pool: size, free bytes, and the nodes of its frames.
    pools: Vec<(u64, u64, String)>,
    pub regions: Vec<Option<RegionView>>,
}

impl View {
    /// The differences between this view, which is the model's, and the kernel's.
    pub fn differences(&self, kernel: &View) -> Vec<String> {
        let line = |what: String, model: &dyn Debug, kernel: &dyn Debug| {
            format!("{what}: {model:?} on the model, {kernel:?} on the kernel")
        };
        let mut found = Vec::new();
        for (i, (a, b)) in
            self.pools.iter().zip(&kernel.pools).enumerate().filter(|(_, (a, b))| a != b)
        {
            found.push(line(format!("pool {i} (size, free, nodes)"), a, b));
        }
        for (i, (a, b)) in self.regions.iter().zip(&kernel.regions).enumerate() {
            let (Some(a), Some(b)) = (a, b) else { continue };
            if (a.len, &a.placement) != (b.len, &b.placement) {
                found.push(line(
                    format!("region {i} (length, nodes)"),
                    &(a.len, &a.placement),
                    &(b.len, &b.placement),
                ));
            }
            let pages = a.pages.iter().zip(&b.pages).enumerate().filter(|(_, (a, b))| a != b);
            found.extend(
                pages.map(|(page, (a, b))| line(format!("page {page} of region {i}"), a, b)),
            );
        }
        found
    }
}

#[derive(Debug, PartialEq)]
pub struct RegionView {
    pub len: usize,
    pub pages: Vec<Page>,
    /// The nodes of its pages, if all pages may be read. For other pages the kernel tells no node.
    placement: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Page {
    /// Nothing is mapped: other mappings could come here.
    Hole,
    Unbacked,
    Backed {
        file: usize,
        /// `None` if the frame is not predictable.
        frame: Option<usize>,
        access: Prot,
        dont_fork: bool,
        dont_dump: bool,
        locked: bool,
        words: [u64; WORDS],
    },
}

/// What is mapped at a page.
struct Mapped {
    access: Prot,
    dont_fork: bool,
    dont_dump: bool,
    locked: bool,
    /// The pool's file and the page in it, if the page is backed.
    file: Option<(String, usize)>,
}

/// What the kernel lists for each page of a range. `None` stands for a hole.
fn mapped_by_kernel(addresses: Range<usize>) -> Vec<Option<Mapped>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let files: Vec<(Range<usize>, usize, String)> = maps
        .lines()
        .filter(|line| line.contains("/memfd:pageleap:"))
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (from, to) = fields[0].split_once('-').unwrap();
            // The inode number distinguishes files of the same name.
            (hex(from)..hex(to), hex(fields[2]), fields[4].to_owned())
        })
        .collect();
    let attributes = observe::attributes(addresses.start, addresses.end - addresses.start).unwrap();
    let look = |addr: usize| {
        let a = attributes.iter().find(|run| (run.start..run.end).contains(&addr))?.attributes;
        let file = files.iter().find(|(range, ..)| range.contains(&addr));
        let file = file
            .map(|(range, offset, name)| (name.clone(), (offset + addr - range.start) / BASE_PAGE));
        let (access, dont_fork, dont_dump, locked) = (a.prot, a.dont_fork, a.dont_dump, a.locked);
        Some(Mapped { access, dont_fork, dont_dump, locked, file })
    };
    addresses.step_by(BASE_PAGE).map(look).collect()
}

/// What the model has for each page of a range. `None` stands for a hole.
fn mapped_by_model(model: &Model, addresses: Range<usize>) -> Vec<Option<Mapped>> {
    let look = |addr| {
        let (access, dont_fork, dont_dump, locked) = model.attributes_at(addr)?;
        let file = model.frame_at(addr).map(|(file, frame)| (format!("{file:?}"), frame));
        Some(Mapped { access, dont_fork, dont_dump, locked, file })
    };
    addresses.step_by(BASE_PAGE).map(look).collect()
}

/// Word `i` of a page on which `value` was written. 0 stands for a page of zeros.
pub fn pattern(value: u64, i: usize) -> u64 {
    if value == 0 {
        0
    } else {
        value.rotate_left(i as u32 % 64) ^ (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

fn first_node() -> NodeId {
    let topology = Topology::read().unwrap();
    topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id
}

/// An error without addresses.
fn refusal(error: &Error) -> Outcome {
    Outcome::Refused(match error {
        Error::BadRange { start, end, reason, .. } => format!("bad range {start}..{end}: {reason}"),
        Error::Call { call, errno, .. } => format!("{call}: {errno}"),
        // Both machines would refuse alike. That would hide a resource that is never given back.
        Error::Limit { .. } => panic!("no program comes near a limit: {error}"),
        other => other.to_string(),
    })
}

/// The mappings and descriptors of pools and jobs in this process.
pub fn left_in_process() -> Vec<String> {
    pool_mappings().into_iter().chain(own_descriptors()).collect()
}

/// Counts of pages per node, or why there are none.
fn nodes(counts: Result<NodeCounts, Error>) -> String {
    counts.map_or_else(|error| format!("{:?}", refusal(&error)), |counts| counts.to_string())
}

impl Machine {
    /// A machine on the model or, with `None`, on the kernel.
    pub fn new(model: Option<Arc<Model>>, program: &Program) -> Machine {
        let bare: Arc<dyn Backend> = match &model {
            Some(model) => model.clone(),
            None => Arc::new(Linux),
        };
        let backend = Arc::new(match program.refused {
            Some((call, mode)) => FailAt::new(bare.clone(), call, mode, Errno(libc::ENOMEM)),
            None => FailAt::never(bare.clone()),
        });
        let (pools, regions) = (Vec::new(), Vec::new());
        let files = Vec::new();
        let mut machine = Machine {
            bare,
            backend,
            model,
            pools,
            regions,
            old: program.refused.map(|_| Vec::new()),
            files,
            exact: true,
        };
        machine.pools = (0..POOLS - 1).map(|_| machine.build_pool(FIRST_POOLS).unwrap()).collect();
        let region = || Some(Region::new(&machine.pools[0], FIRST_REGIONS * BASE_PAGE).unwrap());
        machine.regions = (0..REGIONS).map(|_| region()).collect();
        machine.backend.arm();
        machine
    }

    fn build_pool(&self, pages: usize) -> Result<Pool, Error> {
        let bytes = (pages * BASE_PAGE) as u64;
        // The node of the page tables is named, because the library would otherwise make fewer
        // calls on a kernel with one node.
        let node = first_node();
        let placement = Placement::on(node).page_tables(PageTables::Node(node));
        Pool::builder(placement, bytes).threads(1).backend(self.backend.clone()).build()
    }

    fn pool(&self, place: usize) -> &Pool {
        &self.pools[place % self.pools.len()]
    }

    fn mapped(&self, addresses: Range<usize>) -> Vec<Option<Mapped>> {
        match &self.model {
            Some(model) => mapped_by_model(model, addresses),
            None => mapped_by_kernel(addresses),
        }
    }

    /// The pages of a part of a region, with their addresses. `None` unless the part consists of
    /// whole, backed pages.
    fn backed(&self, region: usize, part: &Range<usize>) -> Option<Vec<(usize, Mapped)>> {
        let region = self.regions[region].as_ref()?;
        let aligned = part.start.is_multiple_of(BASE_PAGE)
            && part.start < part.end
            && part.end <= region.len();
        let start = address(region);
        let addresses = start + part.start..start + part.end;
        let pages = if aligned { self.mapped(addresses.clone()) } else { return None };
        let backed = |page: Option<Mapped>| page.filter(|page| page.file.is_some());
        addresses
            .step_by(BASE_PAGE)
            .zip(pages)
            .map(|(addr, page)| Some((addr, backed(page)?)))
            .collect()
    }

    /// The number of a file in a view.
    fn number_of(&mut self, file: String) -> usize {
        let known = self.files.iter().position(|known| *known == file);
        known.unwrap_or_else(|| {
            self.files.push(file);
            self.files.len() - 1
        })
    }

    fn write(&self, addr: usize, value: u64) {
        match &self.model {
            Some(model) => {
                (0..WORDS).for_each(|i| model.store(addr + i * 8, pattern(value, i)).unwrap())
            }
            None => {
                (0..BASE_PAGE / 8).for_each(|i| word(addr, i).store(pattern(value, i), Relaxed))
            }
        }
    }

    /// The first words of a page that may be read. On the kernel, all other words must match the
    /// first one.
    fn read(&self, addr: usize) -> [u64; WORDS] {
        match &self.model {
            Some(model) => std::array::from_fn(|i| model.load(addr + i * 8).unwrap()),
            None => {
                let first = word(addr, 0).load(Relaxed);
                let torn =
                    (0..BASE_PAGE / 8).find(|i| word(addr, *i).load(Relaxed) != pattern(first, *i));
                assert_eq!(torn, None, "LOST: a word of the page at {addr:#x}");
                std::array::from_fn(|i| word(addr, i).load(Relaxed))
            }
        }
    }

    /// Runs one step.
    pub fn run(&mut self, step: &Step) -> Outcome {
        let done = |result: Result<(), Error>| {
            result.map_or_else(|error| refusal(&error), |()| Outcome::Done)
        };
        match step {
            Step::NewPool { pool, pages } => {
                let built = match self.build_pool(*pages) {
                    Ok(built) => built,
                    Err(error) => return refusal(&error),
                };
                let replaced = match self.pools.get_mut(*pool) {
                    Some(place) => Some(std::mem::replace(place, built)),
                    None => {
                        self.pools.push(built);
                        None
                    }
                };
                if let Some(old) = &mut self.old {
                    old.extend(replaced);
                }
                Outcome::Done
            }
            Step::NewRegion { region, pool, bytes } => {
                let made = Region::new(self.pool(*pool), *bytes);
                done(made.map(|made| self.regions[*region] = Some(made)))
            }
            Step::Reserve { region, bytes } => {
                let made = Region::reserve_with(self.backend.clone(), *bytes, PageSize::Base);
                done(made.map(|made| self.regions[*region] = Some(made)))
            }
            Step::DropRegion { region } => {
                self.regions[*region] = None;
                Outcome::Done
            }
            Step::Grow { region, bytes, pool } => match &self.regions[*region] {
                Some(region) => done(region.grow(*bytes, self.pool(*pool))),
                None => Outcome::Nothing,
            },
            Step::Back { region, part, pool } => match &self.regions[*region] {
                Some(region) => done(region.back(part.clone(), self.pool(*pool))),
                None => Outcome::Nothing,
            },
            Step::Discard { region, part } => match &mut self.regions[*region] {
                Some(region) => done(region.discard(part.clone())),
                None => Outcome::Nothing,
            },
            Step::Write { region, part, value } => {
                let Some(pages) = self.backed(*region, part) else { return Outcome::Nothing };
                let writable =
                    pages.iter().enumerate().filter(|(_, (_, page))| page.access.writable());
                writable.for_each(|(i, (addr, _))| {
                    self.write(*addr, value.wrapping_add(i as u64).max(1))
                });
                Outcome::Done
            }
            Step::Set { region, part, what } => match self.backed(*region, part) {
                Some(pages) => self.set(&pages, *what),
                None => Outcome::Nothing,
            },
            Step::Migrate { moves, area_bytes, threads, hold, follow, end } => {
                let regions = &self.regions;
                let moves: Vec<_> = moves.iter().filter(|m| regions[m.region].is_some()).collect();
                match self.start(&moves, (*area_bytes, *threads, *hold, *follow)) {
                    Ok(job) => self.end(job, &moves, *end),
                    Err(error) => refusal(&error),
                }
            }
        }
    }

    fn set(&self, pages: &[(usize, Mapped)], what: Attribute) -> Outcome {
        let (addr, len) = (pages[0].0, pages.len() * BASE_PAGE);
        if matches!(what, Attribute::Lock) && !pages.iter().all(|(_, page)| page.access.readable())
        {
            // The kernel locks such pages, but returns an error because it cannot fault them in.
            return Outcome::Nothing;
        }
        // SAFETY: whole, backed pages of a region. No job moves them, and no thread uses them.
        let set = unsafe {
            match what {
                Attribute::NoAccess => self.bare.protect(addr, len, Prot::NONE),
                Attribute::ReadOnly => self.bare.protect(addr, len, Prot::READ),
                Attribute::ReadWrite => self.bare.protect(addr, len, Prot::READ_WRITE),
                Attribute::DontFork => self.bare.advise(addr, len, Advice::DontFork),
                Attribute::DoFork => self.bare.advise(addr, len, Advice::DoFork),
                Attribute::DontDump => self.bare.advise(addr, len, Advice::DontDump),
                Attribute::DoDump => self.bare.advise(addr, len, Advice::DoDump),
                Attribute::Lock => self.bare.lock(addr, len, false),
                Attribute::Unlock => self.bare.unlock(addr, len),
            }
        };
        set.map_or_else(|errno| Outcome::Refused(errno.to_string()), |()| Outcome::Done)
    }

    fn start(
        &self,
        moves: &[&Move],
        (area_bytes, threads, hold, follow): (usize, usize, bool, bool),
    ) -> Result<Job, Error> {
        // The model can always track writes, the kernel perhaps not. Both must use the same engine.
        let engine = if follow && can_follow() {
            EngineChoice::Auto
        } else {
            EngineChoice::Only(Engine::Mprotect)
        };
        let mut migration = Migration::new().area_bytes(area_bytes).threads(threads).engine(engine);
        if hold {
            migration = migration.max_disturbed_copies(0).max_rounds(0);
        }
        for m in moves {
            if let Some(region) = &self.regions[m.region] {
                migration = migration.range(region, m.part.clone(), self.pool(m.to));
            }
        }
        migration.start()
    }

    fn end(&mut self, job: Job, moves: &[&Move], end: End) -> Outcome {
        let ids: Vec<_> =
            moves.iter().map(|m| self.regions[m.region].as_ref().map(Region::id)).collect();
        let report = match end {
            End::Wait => job.wait(),
            End::Cancel => {
                job.cancel();
                job.wait()
            }
            End::DropJob => {
                drop(job);
                return self.settle(moves).map_or_else(|error| refusal(&error), |()| Outcome::Done);
            }
            End::DropRegion => {
                self.regions[moves[0].region] = None;
                assert!(job.is_finished(), "a region went while a job was at work on it");
                job.wait()
            }
        };
        let pages = report.pages;
        if end != End::Wait {
            if let Err(error) = self.settle(moves) {
                return refusal(&error);
            }
            return Outcome::Stopped { pages: pages.total(), unchanged: pages.unchanged };
        }
        let range_of = |run: &pageleap::PageRun| {
            let within = |(m, id): (&&Move, &Option<_>)| {
                *id == run.source.region()
                    && m.part.start <= run.range.start
                    && run.range.end <= m.part.end
            };
            moves
                .iter()
                .zip(&ids)
                .position(within)
                .expect("a run lies in a range that was asked for")
        };
        let warnings = surprises(&report).into_iter().map(|warning| warning.text.clone()).collect();
        Outcome::Finished(Finished {
            ended: match &report.ended {
                Ended::Failed(error) => format!("{:?}", refusal(error)),
                other => format!("{other:?}"),
            },
            pages,
            runs: report
                .runs
                .iter()
                .map(|run| (range_of(run), run.range.clone(), run.outcome))
                .collect(),
            bytes: report.bytes,
            bytes_copied: report.bytes_copied,
            disturbed_copies: report.counts.disturbed_copies,
            holds: report.counts.holds,
            repairs: report.counts.repairs,
            // Each worker that gets an area makes this call once. How many workers do is chance.
            calls: report.calls.into_iter().filter(|(name, _)| *name != "set_mempolicy").collect(),
            warnings,
        })
    }

    /// Completes a job that was stopped at some moment. Afterwards both machines have the same
    /// pages in the same pools again.
    fn settle(&mut self, moves: &[&Move]) -> Result<(), Error> {
        self.exact = false;
        let left: Vec<&Move> =
            moves.iter().filter(|m| self.regions[m.region].is_some()).copied().collect();
        if !left.is_empty() {
            let report = self.start(&left, (BASE_PAGE, 1, false, true))?.wait();
            assert!(report.ended.is_completed(), "{report}");
        }
        Ok(())
    }

    /// All that the machine shows.
    pub fn view(&mut self) -> View {
        let free = |pool: &Pool| {
            (pool.bytes(), pool.free_bytes(), nodes(pool.verify().map(|verified| verified.found)))
        };
        let pools = self.pools.iter().map(free).collect();
        let regions = (0..self.regions.len()).map(|region| self.view_of(region)).collect();
        View { pools, regions }
    }

    fn view_of(&mut self, region: usize) -> Option<RegionView> {
        let region = self.regions[region].as_ref()?;
        let (start, len) = (address(region), region.len());
        let mapped = self.mapped(start..start + len);
        let readable =
            mapped.iter().flatten().all(|page| page.file.is_none() || page.access.readable());
        let placement = readable.then(|| nodes(region.placement()));
        let addresses = (start..start + len).step_by(BASE_PAGE);
        let pages = addresses
            .zip(mapped)
            .map(|(addr, page)| page.map_or(Page::Hole, |page| self.page(addr, page)));
        Some(RegionView { len, pages: pages.collect(), placement })
    }

    fn page(&mut self, addr: usize, mapped: Mapped) -> Page {
        let Mapped { access, dont_fork, dont_dump, locked, file } = mapped;
        let Some((file, frame)) = file else { return Page::Unbacked };
        let allow = |access| {
            // SAFETY: a backed page of a region that no other thread uses.
            unsafe { self.bare.protect(addr, BASE_PAGE, access) }.unwrap()
        };
        if !access.readable() {
            allow(Prot::READ);
        }
        let words = self.read(addr);
        if !access.readable() {
            allow(access);
        }
        let (file, frame) = (self.number_of(file), self.exact.then_some(frame));
        Page::Backed { file, frame, access, dont_fork, dont_dump, locked, words }
    }

    /// The call that has failed, if any has.
    pub fn refused(&self) -> Option<Call> {
        self.backend.struck()
    }

    pub fn audit(&self) -> Result<(), String> {
        if self.refused() == Some(Call::Release) {
            return Ok(()); // mappings that could not be removed keep their frames
        }
        let regions: Vec<&Region> = self.regions.iter().flatten().collect();
        audit(&self.pools.iter().collect::<Vec<_>>(), &regions)
    }

    /// Drops everything, and returns what is left over.
    pub fn end_of_program(self, left_before: usize) -> Vec<String> {
        let refused = self.refused();
        let Machine { bare, backend, model, pools, regions, old, .. } = self;
        backend.disarm();
        drop(regions);
        if refused == Some(Call::Release) {
            // Mappings that could not be removed keep their frames.
            std::mem::forget((pools, old));
            return Vec::new();
        }
        drop(old);
        let leaked = |pool: &&Pool| pool.free_bytes() != pool.bytes();
        let mut left: Vec<String> =
            pools.iter().filter(leaked).map(|pool| format!("{pool:?}")).collect();
        drop((pools, backend, bare));
        match model {
            Some(model) if model.pages_in_use() == 0 => {}
            Some(model) => left.push(format!("{} pages of address space", model.pages_in_use())),
            None if left_in_process().len() > left_before => left.extend(left_in_process()),
            None => {}
        }
        left
    }
}

/// Word `i` of a page of a region on the kernel.
fn word(addr: usize, i: usize) -> &'static AtomicU64 {
    // SAFETY: callers pass backed pages and access them only as their protection allows. They do
    // not keep the reference, and all accesses to the page are atomic.
    unsafe { AtomicU64::from_ptr((addr as *mut u64).add(i)) }
}
