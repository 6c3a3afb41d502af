//! Ways to move memory from one node to another, and copies of the same bytes: leaps of a region,
//! and of private memory, and the kernel's calls.
//!
//! Memory rests while it is moved. Threads that copy or call the kernel run on a CPU of the
//! destination, as in the paper. A leap has its own threads.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

use pageleap::topology::{SysFiles, Topology};
use pageleap::{
    BASE_PAGE, CopyLoop, CopyMethod, EngineChoice, Job, MemoryEngine, MemoryMigration, Migration,
    NodeId, PageSize, Reserve,
};

use super::memory::{Pools, fill, private, refused, wrong};
use super::{Case, Label, Metric, Outcome, Scene, label, share, time};
use crate::Error;
use crate::document::Value;
use crate::figures::percent;
use crate::host::memory_limit;
use crate::leap::{Wish, finish};
use crate::matrix::on_cpu;
use crate::memcpy::{Copy, METHODS, Target, cpu_ns};
use crate::private::PrivateMemory;
use crate::rivals::calls::{Call, Trip};
use crate::rivals::can_move;
use crate::rivals::compaction::{self, can_compact, compact};

/// The properties of a way.
pub const LABELS: [Label; 3] = [
    label("way", "way", ""),
    label("area_bytes", "area", "size of areas, or of the steps of a copy"),
    label("threads", "threads", "threads that copy"),
];

/// The times of a way.
pub const METRICS: [Metric; 4] = [
    time("time", "time", "until the last page had moved"),
    time(
        "whole",
        "whole",
        "with the recycling of vacated frames, and with populating the reserve of private memory, \
         which a program may do long before",
    ),
    time("cpu", "CPU", "CPU time of all threads for the whole"),
    share("moved", "moved", "pages that moved, of all; of a compaction, its own pages"),
];

/// Begins the name of a copy by the C library.
pub const MEMCPY: &str = "memcpy";
/// Begins the name of a copy by a loop of the library.
pub const COPY_LOOP: &str = "copy loop";
/// The index of the share of pages that moved.
const MOVED: usize = 3;
/// Memory that is compacted. With less, much of the time is that of the search.
const COMPACTED_BYTES: usize = 8 << 30;
/// The least share of pages of this memory among those that a compaction moves. Large pages of
/// others count as the base pages that they have, and cost less.
const LEAST_OWN: f64 = 0.9;
/// The most of the free memory that is taken for it.
const COMPACTED_SHARE: f64 = 0.7;

/// A way to move memory, or a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// A copy into memory that is mapped already.
    Copy(CopyMethod),
    /// A copy into memory that is mapped meanwhile, page by page.
    FreshCopy(CopyMethod),
    /// A copy into memory that is mapped already, by this many threads, each a part of it.
    CopyByThreads(CopyMethod, usize),
    /// A leap of a region.
    Leap {
        /// The engine.
        engine: EngineChoice,
        /// Bytes of an area; `None`: the library's default.
        area: Option<usize>,
        /// Threads that copy; `None`: one, as in all other ways.
        threads: Option<usize>,
    },
    /// A leap of private memory.
    Private(MemoryEngine),
    /// One call of the kernel for all of the private memory.
    Call(Call),
    /// The kernel's own migration of base pages, by compaction of other memory: an upper bound for
    /// the cost of `migrate_pages()` where one node cannot show it. Its time is that of as many
    /// pages as the memory has.
    Compaction,
}

impl Way {
    /// All copies into memory that is mapped.
    pub fn copies() -> impl Iterator<Item = Way> {
        METHODS.into_iter().map(Way::Copy)
    }

    /// Its name.
    pub fn name(self) -> String {
        let copy = |method: CopyMethod, into: &str| match method.by {
            CopyLoop::Memcpy => format!("{MEMCPY}{into}"),
            other => format!("{COPY_LOOP} {other}{into}"),
        };
        match self {
            Way::Copy(method) | Way::CopyByThreads(method, _) => copy(method, ""),
            Way::FreshCopy(method) => copy(method, ", fresh"),
            Way::Leap { engine, .. } => engine.to_string(),
            Way::Private(engine) => format!("{engine}, private"),
            Way::Call(call) => format!("one {}, private", call.name()),
            Way::Compaction => "compaction, upper bound".to_owned(),
        }
    }

    /// Its name and its area, for [`LABELS`].
    pub(super) fn labels(self) -> Vec<Value> {
        let threads = match self {
            Way::CopyByThreads(_, threads) => Some(threads),
            Way::Leap { threads, .. } => threads,
            _ => None,
        };
        let threads = threads.map_or(Value::Unknown, Value::count);
        vec![self.name().into(), self.area(), threads]
    }

    fn area(self) -> Value {
        match self {
            Way::Copy(method) | Way::CopyByThreads(method, _) | Way::FreshCopy(method) => {
                Value::Bytes(method.step_bytes as u64)
            }
            Way::Leap { area, .. } => Value::bytes(area.map(|area| area as u64)),
            Way::Private(_) | Way::Call(_) | Way::Compaction => Value::Unknown,
        }
    }

    pub(super) fn is_private(self) -> bool {
        matches!(self, Way::Private(_) | Way::FreshCopy(_) | Way::Call(_))
    }
}

/// The setting of experiments with ways.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Bytes that move: whole pages.
    pub bytes: u64,
    /// The size of the pages.
    pub page: PageSize,
    /// Their node.
    pub from: NodeId,
    /// The node to which they move.
    pub to: NodeId,
    /// The CPU of a thread that copies or calls the kernel: of the destination, or of any node if
    /// that has none.
    pub cpu: usize,
    /// CPUs of threads that copy together. Not empty.
    pub cpus: Vec<usize>,
    /// Of the contents.
    pub seed: u64,
}

/// Memory that moves in several ways.
pub struct Ways {
    setting: Setting,
    pools: Pools,
    /// The memory, or the reason for its absence.
    private: Result<PrivateMemory, String>,
    ways: Vec<Way>,
    cases: Vec<Case>,
    left_out: Vec<String>,
}

impl Ways {
    /// Takes and fills the memory that `ways` need, and leaves out those that this machine cannot
    /// take. Each case is compared with the fastest copy into mapped memory.
    ///
    /// # Errors
    /// Those of `go_on`, which is asked between long steps; and if there is too little memory.
    pub fn new<E: From<Error>>(
        setting: Setting,
        ways: &[Way],
        go_on: impl Fn() -> Result<(), E>,
    ) -> Result<Ways, E> {
        let Setting { bytes, page, from, to, seed, .. } = setting;
        let pools = Pools::build([bytes; 2], page, [from, to], &go_on)?;
        fill(words_of(&pools)?, seed);
        let mut all = Ways {
            pools,
            private: Err("no way needs private memory".into()),
            ways: Vec::new(),
            cases: Vec::new(),
            left_out: Vec::new(),
            setting,
        };
        if ways.iter().any(|way| way.is_private()) {
            go_on()?;
            all.private = private(bytes, page, from, seed).map_err(|error| error.to_string());
        }
        for way in ways {
            go_on()?;
            match all.unfit(*way)? {
                None => all.ways.push(*way),
                Some(why) => all.left_out.push(format!("{page}, {}: {why}", way.name())),
            }
        }
        let is_copy = |(_, way): &(usize, &Way)| matches!(way, Way::Copy(_));
        let bases: Vec<usize> =
            all.ways.iter().enumerate().filter(is_copy).map(|(at, _)| at).collect();
        let case =
            |way: &Way| Case { labels: way.labels(), bases: bases.clone(), at_rest: Vec::new() };
        all.cases = all.ways.iter().map(case).collect();
        Ok(all)
    }

    /// Bytes on the source and on the destination that these ways need.
    pub fn needs(bytes: u64, ways: &[Way]) -> [u64; 2] {
        let private = u64::from(ways.iter().any(|way| way.is_private()));
        [(1 + private) * bytes; 2]
    }

    /// Why a way cannot be measured here; `None` if it can.
    fn unfit(&self, way: Way) -> Result<Option<String>, Error> {
        let Setting { page, from, to, .. } = self.setting;
        if let (true, Err(why)) = (way.is_private(), &self.private) {
            return Ok(Some(why.clone()));
        }
        match way {
            Way::FreshCopy(_) => {
                let fresh = PrivateMemory::untouched(self.setting.bytes as usize, page, to);
                Ok(fresh.err().map(|error| error.to_string()))
            }
            Way::Copy(_) | Way::CopyByThreads(..) => Ok(None),
            Way::Call(_) => Ok(can_move(from, to).err()),
            Way::Compaction if page != PageSize::Base => Ok(Some("it moves pages of 4 KB".into())),
            Way::Compaction => Ok(can_compact(from).err().map(|error| error.to_string())),
            Way::Leap { area: Some(area), .. } if !area.is_multiple_of(page.bytes()) => {
                Ok(Some("an area has whole pages".into()))
            }
            Way::Leap { engine, .. } => Ok(self.pools.unfit(engine)?),
            Way::Private(MemoryEngine::UffdMove) if page.is_hugetlb() => {
                Ok(Some("UFFDIO_MOVE takes no pages of the hugetlb pool".into()))
            }
            Way::Private(MemoryEngine::Kernel) if from == to => {
                Ok(Some("it moves pages to other nodes only".into()))
            }
            Way::Private(engine) => {
                let to_and_fro = |node| self.private_leap(page.bytes(), node, engine).start();
                Ok(refused(to_and_fro(to), || to_and_fro(from))?)
            }
        }
    }

    fn memory(&self) -> &PrivateMemory {
        self.private.as_ref().expect("ways of private memory are left out without any")
    }

    fn private_leap(&self, bytes: usize, to: NodeId, engine: MemoryEngine) -> MemoryMigration {
        let memory = self.memory();
        // SAFETY: no thread unmaps, remaps or protects the memory. Each job is waited for, or
        // dropped, before the memory is unmapped.
        let migration = unsafe { MemoryMigration::new().range(memory.as_ptr(), bytes, to) };
        migration.engine(engine).renew(self.setting.from == self.setting.to)
    }

    /// The ways that this machine can take.
    pub(super) fn ways(&self) -> &[Way] {
        &self.ways
    }

    /// Bytes that move.
    pub(super) fn bytes(&self) -> u64 {
        self.setting.bytes
    }

    /// Memory of the destination for copies of the region.
    pub(super) fn target(&self) -> Result<Target<'_>, Error> {
        Target::new(&self.pools.region, &self.pools.destination)
    }

    /// Copies the region once.
    pub(super) fn copy(&self, method: CopyMethod) -> Result<Outcome, Error> {
        let target = self.target()?;
        let copy = on_cpu(self.setting.cpu, || target.copy(method))?;
        Ok(outcome(copy.ns, 0, copy.cpu_ns))
    }

    /// Copies the region once by several threads on CPUs of the destination.
    fn copy_by_threads(&self, method: CopyMethod, threads: usize) -> Result<Outcome, Error> {
        let Pools { region, destination, .. } = &self.pools;
        let (page, pages) = (self.setting.page.bytes(), region.len() / self.setting.page.bytes());
        let threads = threads.min(pages);
        let ends: Vec<usize> = (0..=threads).map(|nth| pages * nth / threads * page).collect();
        let part = |ends: &[usize]| {
            let part = std::iter::once(ends[0]..ends[1]).collect();
            Target::of_parts(region, part, destination)
        };
        let parts: Vec<Target> = ends.windows(2).map(part).collect::<Result<_, Error>>()?;
        let (gate, waiting) = (RwLock::new(()), AtomicUsize::new(0));
        let timed = |part: &Target, cpu: usize| {
            let bound = pageleap_sys::set_affinity(0, &[cpu]);
            waiting.fetch_add(1, Ordering::Relaxed);
            // It opens when all threads wait, or when one could not be started.
            drop(gate.read());
            bound.map_err(|errno| Error::Cpu { cpu, errno })?;
            let start = Instant::now();
            Ok((part.copy(method), start, Instant::now()))
        };
        let copies: Result<Vec<(Copy, Instant, Instant)>, Error> = std::thread::scope(|scope| {
            let timed = &timed;
            let closed = gate.write();
            let cpus = self.setting.cpus.iter().copied().cycle();
            let copy = |(part, cpu)| {
                let thread = Builder::new().spawn_scoped(scope, move || timed(part, cpu));
                thread.map_err(|reason| Error::Thread { name: "copy", reason })
            };
            let copying: Vec<_> = parts.iter().zip(cpus).map(copy).collect::<Result<_, _>>()?;
            while waiting.load(Ordering::Relaxed) < threads {
                std::thread::yield_now();
            }
            drop(closed);
            let join = |thread: ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            copying.into_iter().map(join).collect()
        });
        let copies = copies?;
        // From the first start to the last end.
        let start = copies.iter().map(|(_, start, _)| *start).min();
        let end = copies.iter().map(|(_, _, end)| *end).max();
        let took = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
        let cpu_ns = copies.iter().map(|(copy, ..)| copy.cpu_ns).sum();
        Ok(outcome(took.as_nanos() as u64, 0, cpu_ns))
    }

    fn fresh_copy(&self, method: CopyMethod) -> Result<Outcome, Error> {
        let Setting { bytes, page, to, cpu, .. } = self.setting;
        let memory = self.memory();
        let target = PrivateMemory::untouched(bytes as usize, page, to)?;
        let target = Target::private(memory.words(), target);
        let copy = on_cpu(cpu, || target.copy(method))?;
        Ok(outcome(copy.ns, 0, copy.cpu_ns))
    }

    /// A leap of this way, ready to be started.
    ///
    /// # Panics
    /// If the way is a copy.
    pub(super) fn prepare(&self, way: Way, limit: Option<Duration>) -> Result<Prepared<'_>, Error> {
        let Setting { bytes, page, to, .. } = self.setting;
        match way {
            Way::Leap { engine, area, threads } => {
                let leap = self.pools.migration(&self.pools.destination).engine(engine);
                let leap = area.into_iter().fold(leap, Migration::area_bytes);
                let leap = leap.threads(threads.unwrap_or(1));
                let leap = limit.into_iter().fold(leap, Migration::timeout);
                let pages = bytes / page.bytes() as u64;
                Ok(Prepared { start: Box::new(|| leap.start()), pages, populate_ns: 0.0 })
            }
            Way::Private(engine) => {
                let began = Instant::now();
                let reserve = match engine {
                    // The kernel takes fresh memory itself.
                    MemoryEngine::Kernel => None,
                    MemoryEngine::UffdMove => {
                        Some(Arc::new(Reserve::new(to, bytes as usize, page)?))
                    }
                };
                let taken = began.elapsed().as_nanos() as f64;
                let populate_ns = if reserve.is_some() { taken } else { 0.0 };
                let leap = self.private_leap(bytes as usize, to, engine);
                let leap = reserve.iter().fold(leap, MemoryMigration::reserve);
                let leap = limit.into_iter().fold(leap, MemoryMigration::timeout);
                let pages = bytes / BASE_PAGE as u64;
                Ok(Prepared { start: Box::new(|| leap.start()), pages, populate_ns })
            }
            _ => panic!("no leap moves this way"),
        }
    }

    /// Moves the memory of a way back to the source, while no thread writes to it.
    pub(super) fn bring_back(&self, way: Way) -> Result<(), Error> {
        let Setting { bytes, from, to, .. } = self.setting;
        let report = match way {
            Way::Copy(_) | Way::CopyByThreads(..) | Way::FreshCopy(_) | Way::Compaction => {
                return Ok(());
            }
            Way::Call(call) => return self.trip(call).map(drop),
            // Private memory that moved within a node is there already.
            Way::Private(_) if from == to => return Ok(()),
            Way::Leap { .. } => self.pools.migration(&self.pools.source).run()?,
            Way::Private(engine) => self.private_leap(bytes as usize, from, engine).start()?.wait(),
        };
        match report.ended.is_completed() {
            true => Ok(()),
            false => Err(Error::Incomplete { pages: report.pages.total(), report: report.into() }),
        }
    }

    /// The words that a way moves.
    pub(super) fn words(&self, way: Way) -> Result<&[AtomicU64], Error> {
        match way.is_private() {
            true => Ok(self.memory().words()),
            false => words_of(&self.pools),
        }
    }

    /// The words of the region.
    pub(super) fn region_words(&self) -> Result<&[AtomicU64], Error> {
        words_of(&self.pools)
    }

    /// The words of the private memory, if there is any.
    pub(super) fn private_words(&self) -> Option<&[AtomicU64]> {
        self.private.as_ref().ok().map(PrivateMemory::words)
    }

    /// A call that moves the private memory, with the memory on the source.
    pub(super) fn trip(&self, call: Call) -> Result<Trip<'_>, Error> {
        Trip::new(call, self.memory(), [self.setting.from, self.setting.to])
    }

    fn call(&self, call: Call) -> Result<Outcome, Error> {
        let mut trip = self.trip(call)?;
        let moved = on_cpu(self.setting.cpu, || trip.go())??;
        let mut outcome = outcome(moved.ns, 0, moved.cpu_ns);
        outcome.numbers[MOVED] = moved.on_target as f64 / moved.pages as f64;
        outcome.lost = self.lost(self.memory().words());
        with_lost(outcome, trip.bring_back())
    }

    /// Compacts other memory of the source.
    fn compact(&self, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let node = self.setting.from;
        let free = Topology::read()?.node(node)?.free_bytes as f64 * COMPACTED_SHARE;
        // A cgroup kills a process that takes more.
        let limit = memory_limit(&SysFiles::host()).unwrap_or(u64::MAX) as f64 * COMPACTED_SHARE;
        let room = limit - 2.0 * self.setting.bytes as f64;
        let bytes = COMPACTED_BYTES.min(free as usize).min(room as usize);
        let bytes = bytes / PageSize::Thp.bytes() * PageSize::Thp.bytes();
        if bytes == 0 {
            let reason = "no memory is left for it".to_owned();
            return Err(Error::Rival { rival: compaction::NAME, reason });
        }
        let compacted = compact(node, bytes, stopped)?;
        let pages = (self.setting.bytes / BASE_PAGE as u64) as f64;
        let of_all = |ns: u64| ns as f64 / compacted.migrated as f64 * pages;
        let ns = of_all(compacted.ns);
        let own = compacted.own.map_or(f64::NAN, |own| own as f64 / compacted.migrated as f64);
        if own < LEAST_OWN {
            let reason = format!(
                "only {} of the pages that moved were this memory's, so its time is no upper bound",
                percent(own)
            );
            return Err(Error::Rival { rival: compaction::NAME, reason });
        }
        let cpu = compacted.cpu_ns.map_or(f64::NAN, of_all);
        Ok(Outcome { numbers: vec![ns, ns, cpu, own], lost: compacted.lost })
    }

    fn leap(&self, way: Way, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let Prepared { start, pages, populate_ns } = self.prepare(way, None)?;
        let mut outcome = timed(start, pages, stopped)?;
        outcome.numbers[1] += populate_ns;
        outcome.lost = self.lost(self.words(way)?);
        with_lost(outcome, self.bring_back(way))
    }

    /// Words with a wrong value. They get the right one, so that the next turn is not blamed.
    fn lost(&self, words: &[AtomicU64]) -> u64 {
        let lost = wrong(words, self.setting.seed);
        if lost > 0 {
            fill(words, self.setting.seed);
        }
        lost
    }
}

/// A leap that has not begun.
pub(super) struct Prepared<'a> {
    /// Starts it.
    pub start: Box<dyn FnOnce() -> Result<Job, pageleap::Error> + 'a>,
    /// Pages that move, as reports count them.
    pub pages: u64,
    /// The time to take and populate a reserve, in nanoseconds.
    pub populate_ns: f64,
}

impl Scene for Ways {
    fn cases(&self) -> &[Case] {
        &self.cases
    }

    fn left_out(&self) -> &[String] {
        &self.left_out
    }

    fn measure(
        &mut self,
        case: usize,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Outcome>, Error> {
        let outcome = match self.ways[case] {
            Way::Copy(method) => self.copy(method),
            Way::CopyByThreads(method, threads) => self.copy_by_threads(method, threads),
            Way::FreshCopy(method) => self.fresh_copy(method),
            Way::Call(call) => self.call(call),
            Way::Compaction => match self.compact(stopped) {
                // It moved too few pages, so that there is no time.
                Err(why @ Error::Rival { .. }) => {
                    let why = format!("a {}: {why}", Way::Compaction.name());
                    self.left_out.extend((!self.left_out.contains(&why)).then_some(why));
                    Ok(Outcome { numbers: vec![f64::NAN; METRICS.len()], lost: 0 })
                }
                compacted => compacted,
            },
            way @ (Way::Leap { .. } | Way::Private(_)) => self.leap(way, stopped),
        }?;
        // A turn that a signal has cut short says nothing, except about lost words.
        Ok((!stopped() || outcome.lost > 0).then_some(outcome))
    }
}

/// The outcome, or why the memory did not come back. That must not hide lost words.
pub(super) fn with_lost(outcome: Outcome, back: Result<(), Error>) -> Result<Outcome, Error> {
    match back {
        Ok(()) => Ok(outcome),
        Err(error) => Err(error.with_lost(outcome.lost)),
    }
}

/// Times a job from its start. It may leave pages where they are, or be cancelled by `stopped`.
fn timed(
    start: impl FnOnce() -> Result<Job, pageleap::Error>,
    pages: u64,
    stopped: &dyn Fn() -> bool,
) -> Result<Outcome, Error> {
    let (began, cpu) = (Instant::now(), cpu_ns());
    let job = start()?;
    let start_cpu = cpu.zip(cpu_ns()).map(|(from, to)| to - from);
    finish(&job, |_| if stopped() { Wish::Cancel } else { Wish::GoOn });
    let whole = began.elapsed().as_nanos() as u64;
    let report = job.wait();
    let of_job = report.migrate_cpu_ns.zip(report.recycle_cpu_ns).map(|(one, other)| one + other);
    let cpu = start_cpu.zip(of_job).map(|(start, job)| start + job);
    let is_complete = report.ended.is_completed() && report.pages.migrated == pages;
    let ns = if is_complete { report.migrate_ns } else { whole };
    let mut outcome = outcome(ns, whole - ns.min(whole), cpu);
    outcome.numbers[MOVED] = report.pages.migrated as f64 / pages as f64;
    Ok(outcome)
}

fn outcome(ns: u64, more: u64, cpu_ns: Option<u64>) -> Outcome {
    let cpu = cpu_ns.map_or(f64::NAN, |ns| ns as f64);
    Outcome { numbers: vec![ns as f64, (ns + more) as f64, cpu, f64::NAN], lost: 0 }
}

fn words_of(pools: &Pools) -> Result<&[AtomicU64], Error> {
    Ok(pools.region.atomics_u64(0..pools.region.len())?)
}

#[cfg(test)]
mod tests {
    use pageleap::topology::Topology;

    use super::super::{copy, quiet, scale};
    use super::*;

    const SEED: u64 = 5;

    fn ways(page: PageSize, ways: &[Way]) -> Ways {
        let topology = Topology::read().unwrap();
        let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        let cpu = topology.allowed_cpus()[0];
        let (bytes, cpus) = (4 << 20, topology.allowed_cpus().to_vec());
        let setting = Setting { bytes, page, from: node, to: node, cpu, cpus, seed: SEED };
        Ways::new(setting, ways, || Ok::<_, Error>(())).unwrap()
    }

    #[test]
    fn each_way_takes_time_and_leaves_the_contents_on_the_source() {
        let few = quiet::ways(PageSize::Base, 4 << 20, &EngineChoice::ALL, Some(&[1 << 20]));
        let all = [few, copy::ways(), scale::ways(&[1, 3])].concat();
        let mut scene = ways(PageSize::Base, &all);
        let source = scene.pools.source.free_bytes();
        for case in 0..scene.cases().len() {
            for _ in 0..2 {
                let Outcome { numbers, lost } = scene.measure(case, &|| false).unwrap().unwrap();
                let labels = &scene.cases()[case].labels;
                let moves = matches!(scene.ways[case], Way::Leap { .. } | Way::Private(_));
                assert!(if moves { numbers[MOVED] == 1.0 } else { numbers[MOVED].is_nan() });
                assert!(numbers[0] > 0.0 && numbers[1] >= numbers[0], "{labels:?} {numbers:?}");
                assert_eq!(lost, 0, "{labels:?}");
                assert_eq!(scene.pools.source.free_bytes(), source, "{labels:?}");
            }
        }
        assert_eq!(wrong(words_of(&scene.pools).unwrap(), SEED), 0);
        assert_eq!(wrong(scene.memory().words(), SEED), 0);
    }

    #[test]
    fn a_wrong_word_is_lost() {
        let leap = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
        let mut scene = ways(PageSize::Base, &[leap]);
        words_of(&scene.pools).unwrap()[99].store(0, Ordering::Relaxed);
        let mut lost = || scene.measure(0, &|| false).unwrap().unwrap().lost;
        assert_eq!([lost(), lost()], [1, 0]);
        words_of(&scene.pools).unwrap()[98].store(0, Ordering::Relaxed);
        // Not even a signal hides it.
        assert_eq!(scene.measure(0, &|| true).unwrap().unwrap().lost, 1);
    }

    #[test]
    fn a_stopped_leap_has_no_outcome_and_loses_nothing() {
        let leap = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
        let mut scene = ways(PageSize::Base, &[leap]);
        assert_eq!(scene.measure(0, &|| true).unwrap(), None);
        assert_eq!(wrong(words_of(&scene.pools).unwrap(), SEED), 0);
    }

    #[test]
    fn ways_that_do_not_fit_are_left_out_with_the_reason() {
        let small = Way::Leap { engine: EngineChoice::Auto, area: Some(64 << 10), threads: None };
        let scene = ways(PageSize::Thp, &[small, Way::Private(MemoryEngine::Kernel)]);
        assert!(scene.cases().is_empty());
        let left_out = scene.left_out();
        assert!(left_out[0].contains("whole pages"), "{left_out:?}");
        assert!(left_out[1].contains("other nodes only"), "{left_out:?}");
    }

    #[test]
    fn sizes_of_areas_are_those_of_the_figure_that_fit() {
        let mprotect = [pageleap::Engine::Mprotect.into()];
        let areas = |page, bytes| quiet::ways(page, bytes, &mprotect, None);
        let leaps = |ways: Vec<Way>| {
            ways.iter().filter(|way| matches!(way, Way::Leap { area: Some(_), .. })).count()
        };
        assert_eq!(leaps(areas(PageSize::Base, 1 << 30)), 11);
        assert_eq!(leaps(areas(PageSize::Huge2M, 1 << 30)), 8);
        assert_eq!(leaps(areas(PageSize::Base, 16 << 20)), 9);
        let auto = quiet::ways(PageSize::Base, 1 << 30, &[EngineChoice::Auto], None);
        assert_eq!(leaps(auto), 0);
        // Other engines have no areas below 1 MB, unless these are asked for.
        let precopy = [pageleap::Engine::Precopy.into()];
        assert_eq!(leaps(quiet::ways(PageSize::Base, 1 << 30, &precopy, None)), 6);
        assert_eq!(leaps(quiet::ways(PageSize::Huge2M, 1 << 30, &precopy, None)), 8);
        assert_eq!(leaps(quiet::ways(PageSize::Base, 1 << 30, &precopy, Some(&[4096]))), 1);
    }
}
