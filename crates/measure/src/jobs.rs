//! Times short jobs at rest, beside copies of the same bytes: the time until the start returned,
//! and the time of the whole job.
//!
//! A job of a few pages takes far longer than copying them, and its time depends more on the number
//! of its ranges than on their bytes. So a [`Shape`] has both. [`Scene::sample`] times one job of a
//! shape, directly after copies of the same ranges. [`KernelScene`] times the kernel's `move_pages`
//! with the same pages of private memory.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pageleap::{
    BASE_PAGE, EngineName, Migration, MigrationContext, NodeId, PageSize, Pool, Region, Report,
    move_pages,
};

use crate::Error;
use crate::leap::check_complete;
use crate::memcpy::{BaseLine, Copies, Target};
use crate::private::PrivateMemory;

/// Base pages between two ranges. They do not move.
const GAP_PAGES: usize = 13;

/// How many ranges a job has, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranges, which do not touch each other.
    pub ranges: usize,
    /// Base pages of each range.
    pub range_pages: usize,
}

/// One range of 4 KB to 16 MB.
pub const SMALL: [Shape; 6] =
    [shape(1, 1), shape(1, 16), shape(1, 64), shape(1, 256), shape(1, 1024), shape(1, 4096)];
/// Many ranges of one page, as the leaves of a B+-tree, and of 16 pages.
pub const SCATTERED: [Shape; 4] = [shape(128, 1), shape(512, 1), shape(2048, 1), shape(512, 16)];

const fn shape(ranges: usize, range_pages: usize) -> Shape {
    Shape { ranges, range_pages }
}

impl Shape {
    /// Base pages of all ranges.
    pub fn pages(self) -> usize {
        self.ranges * self.range_pages
    }

    /// Bytes of all ranges.
    pub fn bytes(self) -> usize {
        self.pages() * BASE_PAGE
    }

    /// Bytes from the first range to the last one, with the gaps between them.
    pub fn span_bytes(self) -> usize {
        self.parts().last().map_or(0, |last| last.end)
    }

    /// The ranges, in bytes.
    pub fn parts(self) -> Vec<Range<usize>> {
        let part = |at| {
            let start = at * (self.range_pages + GAP_PAGES) * BASE_PAGE;
            start..start + self.range_pages * BASE_PAGE
        };
        (0..self.ranges).map(part).collect()
    }
}

/// How a program waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By `Migration::start` and `Job::wait`, without a context.
    Start,
    /// By `Migration::run` with a `MigrationContext`.
    Run,
}

impl Way {
    /// Its name for programs.
    pub fn name(self) -> &'static str {
        match self {
            Way::Start => "start",
            Way::Run => "run",
        }
    }
}

/// One job, and the copies of the same bytes before it.
#[derive(Clone, Debug)]
pub struct JobSample {
    /// How the program waited for it.
    pub way: Way,
    /// Time until `Migration::start` returned; `None` for [`Way::Run`].
    pub start_ns: Option<u64>,
    /// Time from the start until the report was there.
    pub whole_ns: u64,
    /// The copies.
    pub copies: Copies,
    /// The job's engine.
    pub engine: EngineName,
    /// The number of pages that each engine has moved.
    pub moved_by: Vec<(EngineName, u64)>,
    /// Words with a wrong value after the job, or after the way back.
    pub lost: u64,
}

impl JobSample {
    /// Time of the whole job / time of the copy.
    pub fn ratio_to(&self, base_line: BaseLine) -> f64 {
        // A copy that is shorter than the clock's steps counts as one of them.
        self.whole_ns as f64 / base_line.copy_in(&self.copies).ns.max(1) as f64
    }
}

/// Ranges of a region that move to another pool and back, and a copy of them.
pub struct Scene<'a> {
    region: &'a Region,
    pools: [&'a Pool; 2],
    contents: Contents,
    target: Target<'a>,
    context: MigrationContext,
}

impl<'a> Scene<'a> {
    /// Touches all pages, and takes memory for the copy from the destination. `pools`: the
    /// region's, and the destination.
    ///
    /// # Errors
    /// If the region is too small for the shape, or the destination for the copy.
    pub fn new(region: &'a Region, pools: [&'a Pool; 2], shape: Shape) -> Result<Scene<'a>, Error> {
        let target = Target::of_parts(region, shape.parts(), pools[1])?;
        let contents = Contents::new(shape, region.atomics_u64(0..region.len())?);
        Ok(Scene { region, pools, contents, target, context: MigrationContext::new() })
    }

    /// Writes to the ranges, copies them, and then moves them to the destination by one job. The
    /// way back is not measured. `asks` sets the options of the job. Returns `None` if
    /// `stopped` is true before one of the copies; a job that has started is not stopped.
    ///
    /// # Errors
    /// If a job cannot be started, or ended early.
    pub fn sample(
        &self,
        run: usize,
        way: Way,
        asks: &dyn Fn(Migration<'_>) -> Migration<'_>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<JobSample>, Error> {
        self.contents.renew(self.words()?);
        let Some(copies) = self.target.copy_by_all_methods(run, stopped) else { return Ok(None) };
        let job = asks(self.migration(self.pools[1]));
        let (start_ns, whole_ns, report) = match way {
            Way::Start => start_and_wait(job)?,
            Way::Run => run_with(job.context(&self.context))?,
        };
        self.check(&report)?;
        let mut lost = self.contents.lost(self.words()?);
        if lost > 0 {
            // The words are renewed, so that the check of the way back does not count them again.
            self.contents.renew(self.words()?);
        }
        self.check(&self.migration(self.pools[0]).context(&self.context).run()?)?;
        lost += self.contents.lost(self.words()?);
        let moved_by = report.by_engine().iter().map(|part| (part.engine, part.pages)).collect();
        let engine = report.engine;
        Ok(Some(JobSample { way, start_ns, whole_ns, copies, engine, moved_by, lost }))
    }

    fn words(&self) -> Result<&[AtomicU64], Error> {
        Ok(self.region.atomics_u64(0..self.region.len())?)
    }

    fn migration(&self, to: &'a Pool) -> Migration<'a> {
        let add =
            |job: Migration<'a>, part: &Range<usize>| job.range(self.region, part.clone(), to);
        self.contents.parts.iter().fold(Migration::new(), add)
    }

    fn check(&self, report: &Report) -> Result<(), Error> {
        let bytes: usize = self.contents.parts.iter().map(Range::len).sum();
        check_complete(report, (bytes / BASE_PAGE) as u64)
    }
}

/// Time until the start returned, time of the whole job, and its report.
type Timed = (Option<u64>, u64, Report);

fn start_and_wait(job: Migration) -> Result<Timed, Error> {
    let start = Instant::now();
    let job = job.start()?;
    let start_ns = start.elapsed().as_nanos() as u64;
    let report = job.wait();
    Ok((Some(start_ns), start.elapsed().as_nanos() as u64, report))
}

fn run_with(job: Migration) -> Result<Timed, Error> {
    let start = Instant::now();
    let report = job.run()?;
    Ok((None, start.elapsed().as_nanos() as u64, report))
}

/// The values that the words of the ranges and of the gaps between them must have. All values
/// differ, and none is zero, so a page that is empty or in the place of another one is found.
struct Contents {
    parts: Vec<Range<usize>>,
    gaps: Vec<Range<usize>>,
    /// How often the ranges got new values. All words of a page differ from those of its older
    /// copies.
    round: Cell<u64>,
}

impl Contents {
    /// Fills `words`, which reach from the first range to the last one.
    fn new(shape: Shape, words: &[AtomicU64]) -> Contents {
        let parts = shape.parts();
        let gaps: Vec<_> = parts.windows(2).map(|pair| pair[0].end..pair[1].start).collect();
        fill(words, &gaps, 0);
        fill(words, &parts, 0);
        Contents { parts, gaps, round: Cell::new(0) }
    }

    /// Gives the ranges new values, and brings them into the caches.
    fn renew(&self, words: &[AtomicU64]) {
        self.round.set(self.round.get() + 1);
        fill(words, &self.parts, self.round.get());
    }

    /// How many words differ from their expected values.
    fn lost(&self, words: &[AtomicU64]) -> u64 {
        let differs = |(word, value): &(&AtomicU64, u64)| word.load(Ordering::Relaxed) != *value;
        let parts = expected(words, &self.parts, self.round.get());
        parts.chain(expected(words, &self.gaps, 0)).filter(differs).count() as u64
    }
}

fn expected<'a>(
    words: &'a [AtomicU64],
    parts: &'a [Range<usize>],
    round: u64,
) -> impl Iterator<Item = (&'a AtomicU64, u64)> {
    let of = |part: &Range<usize>| part.start / size_of::<u64>()..part.end / size_of::<u64>();
    let first = move |part: &Range<usize>| (round << 32) + of(part).start as u64 + 1;
    parts.iter().flat_map(move |part| words[of(part)].iter().zip(first(part)..))
}

fn fill(words: &[AtomicU64], parts: &[Range<usize>], round: u64) {
    expected(words, parts, round).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
}

/// The same ranges of private memory, which the kernel moves to another node and back.
pub struct KernelScene {
    memory: PrivateMemory,
    contents: Contents,
    pages: Vec<usize>,
    home: NodeId,
    away: NodeId,
}

impl KernelScene {
    /// Takes the memory on the first of the two nodes, and touches all of it. The pages move to the
    /// second one.
    ///
    /// # Errors
    /// If a limit of the process or the machine leaves less, on that node or at all.
    pub fn new(shape: Shape, [home, away]: [NodeId; 2]) -> Result<KernelScene, Error> {
        let memory = PrivateMemory::new(shape.span_bytes(), PageSize::Base, home)?;
        let contents = Contents::new(shape, memory.words());
        let start = memory.as_ptr().addr();
        let pages = contents.parts.iter().cloned().flat_map(|part| part.step_by(BASE_PAGE));
        let pages = pages.map(|at| start + at).collect();
        let scene = KernelScene { memory, contents, pages, home, away };
        // The first node may have been full. A page that lies at its destination already would cost
        // nothing.
        scene.go_home()?;
        Ok(scene)
    }

    /// Writes to the ranges, then times one system call `move_pages` that moves all their pages to
    /// the second node. The way back is not measured.
    ///
    /// # Errors
    /// If the kernel refuses the list, or leaves pages where they are.
    pub fn sample(&self) -> Result<KernelSample, Error> {
        self.contents.renew(self.memory.words());
        let nodes = vec![self.away.0 as i32; self.pages.len()];
        let mut status = vec![0; self.pages.len()];
        let start = Instant::now();
        let moved = pageleap_sys::move_pages(0, &self.pages, &nodes, &mut status, false);
        let ns = start.elapsed().as_nanos() as u64;
        moved.map_err(|errno| Error::Call {
            call: "move_pages",
            reason: std::io::Error::from_raw_os_error(errno.0),
        })?;
        // The kernel writes no status for pages that it has not tried, so this queries all of them.
        self.all_are_on(self.away)?;
        let lost = self.contents.lost(self.memory.words());
        self.go_home()?;
        Ok(KernelSample { ns, lost })
    }

    fn go_home(&self) -> Result<(), Error> {
        move_pages(0, &self.pages, Some(&vec![self.home; self.pages.len()]), false)?;
        self.all_are_on(self.home)
    }

    fn all_are_on(&self, node: NodeId) -> Result<(), Error> {
        let status = move_pages(0, &self.pages, None, false)?;
        match status.iter().filter(|page| page.node != Some(node)).count() {
            0 => Ok(()),
            stayed => Err(Error::Stayed { stayed, pages: self.pages.len() }),
        }
    }
}

/// One list of pages that the kernel has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSample {
    /// The time of the call.
    pub ns: u64,
    /// Words with a wrong value after the call.
    pub lost: u64,
}

#[cfg(test)]
mod tests {
    use pageleap::Engine;
    use pageleap::topology::Topology;

    use super::*;

    fn node() -> NodeId {
        let topology = Topology::read().unwrap();
        topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id
    }

    #[test]
    fn ranges_have_their_pages_and_do_not_touch_each_other() {
        for shape in SMALL.into_iter().chain(SCATTERED) {
            let parts = shape.parts();
            assert_eq!(parts.len(), shape.ranges);
            assert_eq!(parts.iter().map(Range::len).sum::<usize>(), shape.bytes());
            assert!(parts.windows(2).all(|pair| pair[0].end < pair[1].start));
            assert!(parts.iter().all(|part| part.start.is_multiple_of(BASE_PAGE)));
        }
        assert_eq!(
            SMALL.map(Shape::bytes).map(|bytes| bytes >> 10),
            [4, 64, 256, 1024, 4096, 16384]
        );
        assert_eq!(SMALL.map(Shape::span_bytes), SMALL.map(Shape::bytes));
        assert_eq!(SCATTERED.map(Shape::pages), [128, 512, 2048, 8192]);
    }

    #[test]
    fn a_word_that_is_not_as_before_is_lost_wherever_it_is() {
        let shape = shape(3, 1);
        let (parts, all) = (shape.parts(), shape.span_bytes() / size_of::<u64>());
        let words: Vec<AtomicU64> = (0..all).map(|_| AtomicU64::new(0)).collect();
        let contents = Contents::new(shape, &words);
        assert_eq!(contents.lost(&words), 0);
        let page = BASE_PAGE / size_of::<u64>();
        let load = |at: usize| words[at].load(Ordering::Relaxed);
        let old: Vec<u64> = (0..page).map(load).collect();
        contents.renew(&words);
        assert_eq!(contents.lost(&words), 0);
        // The last word of a range, and the first one of the gap behind it.
        for at in [parts[1].end / size_of::<u64>() - 1, parts[1].end / size_of::<u64>()] {
            let value = load(at);
            words[at].store(7, Ordering::Relaxed);
            assert_eq!(contents.lost(&words), 1);
            words[at].store(value, Ordering::Relaxed);
        }
        // The page as it was before the job, as an old frame has it, and a page without contents.
        for value in [&old, &vec![0; page]] {
            (0..page).for_each(|at| words[at].store(value[at], Ordering::Relaxed));
            assert_eq!(contents.lost(&words), page as u64);
        }
    }

    #[test]
    fn both_ways_move_all_pages_and_have_their_times() {
        let shape = shape(3, 2);
        let pool = |bytes: usize| Pool::builder(node(), bytes as u64).build().unwrap();
        let (from, to) = (pool(shape.span_bytes()), pool(2 * shape.bytes()));
        let region = Region::new(&from, shape.span_bytes()).unwrap();
        let scene = Scene::new(&region, [&from, &to], shape).unwrap();
        for (run, way) in [Way::Start, Way::Run, Way::Start].into_iter().enumerate() {
            let sample = scene.sample(run, way, &|job| job.engine(Engine::Mprotect), &|| false);
            let sample = sample.unwrap().unwrap();
            assert_eq!((sample.way, sample.lost, sample.engine), (way, 0, Engine::Mprotect.into()));
            assert_eq!(sample.moved_by, [(Engine::Mprotect.into(), shape.pages() as u64)]);
            assert_eq!(sample.start_ns.is_some(), way == Way::Start);
            assert!(sample.start_ns.unwrap_or(1) <= sample.whole_ns && sample.whole_ns > 0);
            let line = BaseLine::of(&[sample.copies]).unwrap();
            let copy_ns = line.copy_in(&sample.copies).ns;
            let ratio = sample.whole_ns as f64 / copy_ns as f64;
            assert!((sample.ratio_to(line) / ratio - 1.0).abs() < 1e-9);
        }
        assert!(scene.sample(0, Way::Run, &|job| job, &|| true).unwrap().is_none());
    }

    #[test]
    fn pages_that_the_kernel_leaves_are_counted() {
        // Moving pages to the node where they lie is no work, and possible on every machine.
        let shape = shape(4, 2);
        let scene = KernelScene::new(shape, [node(); 2]).unwrap();
        let sample = scene.sample().unwrap();
        assert!(sample.ns > 0 && sample.lost == 0);
        let error = scene.all_are_on(NodeId(1023)).unwrap_err();
        assert!(matches!(error, Error::Stayed { stayed: 8, pages: 8 }), "{error}");
        let nowhere = KernelScene::new(shape, [node(), NodeId(1023)]).unwrap();
        let error = nowhere.sample().unwrap_err();
        assert!(matches!(error, Error::Call { call: "move_pages", .. }), "{error}");
    }
}
