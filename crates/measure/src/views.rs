//! Times the cost of views of a region against their number, and of as many plain mappings of one
//! file.
//!
//! Each number of views goes through the same steps:
//!
//! ```text
//! replicate ──► leap, compare ──► leap home ──► discard a part ──► back it, fill it, compare
//!     │          │                                │                 │
//!     └──────────┴──────── timed ─────────────────┴─────────────────┘
//! ```
//!
//! The plain mappings show what the kernel's calls cost that views repeat. They lie outside of any
//! region, and nothing but this module uses them.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use pageleap::{
    BASE_PAGE, Engine, EngineChoice, Error as LeapError, Migration, NodeId, PageSize,
    PageTableCounts, PageTableLevel, Region,
};
use pageleap_sys::{self as sys, Errno};

use crate::Error;
use crate::leap::{Wish, check_complete, finish};
use crate::method;
use crate::statistics::median;
use crate::tables::Scene;

/// The most bytes of the part that is discarded and backed again, and of the file with plain
/// mappings.
const MOST_PART_BYTES: u64 = 64 << 20;
/// Rounds of calls on plain mappings in each run. The median of each call counts.
const ROUNDS: usize = 5;
/// Alignment of plain mappings in bytes: the reach of a page of PTEs, so that `mremap` can move
/// whole pages of page table. Views have it, too.
const ALIGN: usize = 2 << 20;

/// A step that changes the views of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes the views, page tables included.
    Replicate,
    /// Moves the whole region by stop-and-copy, without load.
    Leap,
    /// Gives a part of the region back to its pool, which maps the frames for itself again.
    Discard,
    /// Backs that part again, with zeroed frames.
    Back,
    /// Grows an empty region, which has as many views, by as many bytes.
    Grow,
}

impl Step {
    /// All of them, in the order of [`Figures::steps_ns`].
    pub const ALL: [Step; 5] = [Step::Replicate, Step::Leap, Step::Discard, Step::Back, Step::Grow];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Step::Replicate => "replicate",
            Step::Leap => "leap",
            Step::Discard => "discard",
            Step::Back => "back",
            Step::Grow => "grow",
        }
    }
}

/// A call on plain mappings of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingCall {
    /// `mmap` with MAP_POPULATE, over a reservation of addresses. The kernel fills a shared mapping
    /// as reads would, up to 16 pages at a fault.
    Mmap,
    /// Two calls of `mprotect`: read-only, and back.
    Mprotect,
    /// Two calls of `mremap`, each to other addresses.
    Mremap,
    /// `munmap`, with filled page tables.
    Munmap,
}

impl MappingCall {
    /// All of them, in the order of [`Figures::calls_ns`].
    pub const ALL: [MappingCall; 4] =
        [MappingCall::Mmap, MappingCall::Mprotect, MappingCall::Mremap, MappingCall::Munmap];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            MappingCall::Mmap => "mmap",
            MappingCall::Mprotect => "mprotect",
            MappingCall::Mremap => "mremap",
            MappingCall::Munmap => "munmap",
        }
    }
}

/// The times of one run with one number of views.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// How many views the region has.
    pub views: usize,
    /// By [`Step::ALL`]. `None`: the step does not apply, or the engine of the leap was refused.
    pub steps_ns: [Option<u64>; Step::ALL.len()],
    /// By [`MappingCall::ALL`]: each call on `1 + views` mappings, one after the other.
    pub calls_ns: [u64; MappingCall::ALL.len()],
    /// Page tables of all views, in bytes.
    pub table_bytes: u64,
}

/// One run: all numbers of views.
#[derive(Debug)]
pub struct Run {
    /// By number of views, ascending. The first one has none.
    pub figures: Vec<Figures>,
    /// Why leaps could not be measured; `None` if all were.
    pub refused: Option<String>,
    /// Words that did not contain the last value written to them, through any mapping.
    pub lost: u64,
}

/// The numbers of views that are measured: 0, the powers of two below `most`, and `most`.
pub fn numbers(most: usize) -> Vec<usize> {
    let mut numbers = vec![0];
    numbers.extend(std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < most));
    numbers.extend((most > 0).then_some(most));
    numbers
}

/// Bytes of the part that is discarded and backed again, and of the file with plain mappings.
pub fn part_bytes(region: u64) -> u64 {
    let quarter = (region / 4) / BASE_PAGE as u64 * BASE_PAGE as u64;
    quarter.min(MOST_PART_BYTES)
}

/// Bytes that the measurement takes beside the scene: page tables of views and of plain mappings,
/// the file of these, and a copy of the part.
pub fn bytes_beside(region: u64, most: usize) -> u64 {
    let (part, most) = (part_bytes(region), most as u64);
    let tables = (region * most + part * (1 + most)) / 512;
    if most == 0 { 0 } else { tables + 2 * part }
}

/// A region whose views are counted and timed.
pub struct Bench<'a> {
    scene: &'a mut Scene,
    /// The nodes of the views.
    nodes: &'a [NodeId],
    part: Range<usize>,
    plain: PlainFile,
}

impl<'a> Bench<'a> {
    /// Prepares measurements with up to as many views as there are `nodes`. A node may be named
    /// several times.
    ///
    /// # Errors
    /// If there is too little memory for the file of plain mappings.
    pub fn new(scene: &'a mut Scene, nodes: &'a [NodeId]) -> Result<Bench<'a>, Error> {
        let part = 0..part_bytes(scene.region.len() as u64) as usize;
        let plain = PlainFile::new(part.len())?;
        Ok(Bench { scene, nodes, part, plain })
    }

    /// Measures all numbers of views, in the order of the run ([`method::order`]). `None`: `stopped` was
    /// true in the middle of it. The region has no views afterwards.
    ///
    /// # Errors
    /// If views cannot be made, a call fails, or a leap leaves pages where they are.
    pub fn run(&mut self, nth: usize, stopped: &dyn Fn() -> bool) -> Result<Option<Run>, Error> {
        let numbers = numbers(self.nodes.len());
        let mut run = Run { figures: Vec::new(), refused: None, lost: 0 };
        for at in method::order(0, nth, numbers.len()) {
            let views = numbers[at];
            let measured = self.measure(views, &mut run, stopped);
            self.scene.region.drop_views(self.nodes.iter().copied())?;
            let Some(figures) = measured? else { return Ok(None) };
            run.figures.push(figures);
        }
        run.figures.sort_by_key(|figures| figures.views);
        Ok(Some(run))
    }

    fn measure(
        &mut self,
        views: usize,
        run: &mut Run,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Figures>, Error> {
        let nodes = &self.nodes[..views];
        let (made, replicate) = timed(|| self.scene.region.replicate(nodes.iter().copied()));
        made?;
        let table_bytes =
            self.scene.region.views().iter().map(|view| bytes(&view.page_tables())).sum();
        if stopped() {
            return Ok(None);
        }
        let leap = match self.leap(run, stopped) {
            Err(Error::Leap(LeapError::EngineRefused { reason, .. })) => {
                run.refused = Some(reason);
                None
            }
            other => Some(other?),
        };
        if stopped() {
            return Ok(None);
        }
        let [discard, back] = self.discard_and_back(run)?;
        if stopped() {
            return Ok(None);
        }
        let grow = self.grow(views)?;
        let calls_ns = self.plain.measure(1 + views)?;
        let replicate = (views > 0).then_some(replicate);
        Ok(Some(Figures {
            views,
            steps_ns: [replicate, leap, Some(discard), Some(back), Some(grow)],
            calls_ns,
            table_bytes,
        }))
    }

    /// Leaps to the other pool and back again. Returns the time of the way there.
    fn leap(&self, run: &mut Run, stopped: &dyn Fn() -> bool) -> Result<u64, Error> {
        let Scene { region, pools, .. } = &*self.scene;
        let to = |pool| {
            let only = EngineChoice::Only(Engine::StopCopy);
            Migration::new().engine(only).threads(1).range(region, 0..region.len(), pool).start()
        };
        let job = to(&pools[1])?;
        finish(&job, |_| if stopped() { Wish::Cancel } else { Wish::GoOn });
        let report = job.wait();
        if stopped() {
            return Ok(0);
        }
        check_complete(&report, report.pages.total())?;
        run.lost += self.scene.shadow.lost(region.atomics_u64(0..region.len())?);
        for view in region.views() {
            run.lost += self.scene.shadow.lost(view.atomics_u64(0..view.len())?);
        }
        let home = to(&pools[0])?.wait();
        check_complete(&home, home.pages.total())?;
        Ok(report.migrate_ns)
    }

    /// Grows an empty region with views by the bytes of the part.
    fn grow(&self, views: usize) -> Result<u64, Error> {
        let region = Region::reserve(self.part.len(), PageSize::Base)?;
        region.replicate(self.nodes[..views].iter().copied())?;
        // The other pool is free between leaps.
        let (grown, time) = timed(|| region.grow(self.part.len(), &self.scene.pools[1]));
        grown?;
        Ok(time)
    }

    /// Discards the part and backs it again. Fills it through the region, and compares the contents
    /// through the last view.
    fn discard_and_back(&mut self, run: &mut Run) -> Result<[u64; 2], Error> {
        let Scene { region, pools, shadow, .. } = &mut *self.scene;
        let words = region.atomics_u64(self.part.clone())?;
        let kept: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
        let (discarded, discard) = timed(|| region.discard(self.part.clone()));
        discarded?;
        let (backed, back) = timed(|| region.back(self.part.clone(), &pools[0]));
        backed?;
        let words = region.atomics_u64(self.part.clone())?;
        words.iter().zip(kept).for_each(|(word, value)| word.store(value, Relaxed));
        run.lost += match region.views().last() {
            Some(view) => shadow.lost(view.atomics_u64(0..view.len())?),
            None => shadow.lost(region.atomics_u64(0..region.len())?),
        };
        Ok([discard, back])
    }
}

/// Bytes of all pages of page table of a view. Pages at its ends count whole, though they may map
/// other memory, too.
fn bytes(tables: &PageTableCounts) -> u64 {
    let pages = |level: &PageTableLevel| tables.total(*level) + tables.in_part(*level);
    PageTableLevel::ALL.iter().map(pages).sum::<u64>() * BASE_PAGE as u64
}

/// The result of `work`, and its time in nanoseconds.
fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let began = Instant::now();
    let result = work();
    (result, nanoseconds(began.elapsed()))
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// A memory file with all of its pages. They are base pages, unless
/// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `always`.
struct PlainFile {
    file: OwnedFd,
    len: usize,
}

impl PlainFile {
    fn new(len: usize) -> Result<PlainFile, Error> {
        let file = sys::memfd_create(c"pageleap-measure", None).map_err(failed("memfd_create"))?;
        let file = File::from(file);
        file.set_len(len as u64).map_err(|reason| Error::Call { call: "ftruncate", reason })?;
        let plain = PlainFile { file: file.into(), len };
        // The kernel allocates the pages now, and not in the first measurement.
        Held::reserve(len)?.map(&plain)?;
        Ok(plain)
    }

    /// The times of [`MappingCall::ALL`] on `mappings` mappings, in nanoseconds.
    fn measure(&self, mappings: usize) -> Result<[u64; MappingCall::ALL.len()], Error> {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push(self.round(mappings)?);
        }
        let middle =
            |call| median(&rounds.iter().map(|round| round[call] as f64).collect::<Vec<_>>());
        Ok(std::array::from_fn(|call| middle(call).unwrap_or(0.0) as u64))
    }

    fn round(&self, mappings: usize) -> Result<[u64; MappingCall::ALL.len()], Error> {
        let reserve =
            || (0..mappings).map(|_| Held::reserve(self.len)).collect::<Result<Vec<_>, _>>();
        // Reserved before anything is timed.
        let (first, second, third) = (reserve()?, reserve()?, reserve()?);
        let (mapped, mmap) = timed(|| first.iter().try_for_each(|held| held.map(self)));
        mapped?;
        let (protected, mprotect) = timed(|| {
            let read_write = libc::PROT_READ | libc::PROT_WRITE;
            first.iter().try_for_each(|held| held.protect(libc::PROT_READ))?;
            first.iter().try_for_each(|held| held.protect(read_write))
        });
        protected?;
        let (moved, mremap) = timed(|| move_all(move_all(first, second)?, third));
        let moved = moved?;
        let (unmapped, munmap) = timed(|| moved.into_iter().try_for_each(Held::unmap));
        unmapped?;
        Ok([mmap, mprotect, mremap, munmap])
    }
}

fn move_all(from: Vec<Held>, to: Vec<Held>) -> Result<Vec<Held>, Error> {
    from.into_iter().zip(to).map(|(from, to)| from.move_to(to)).collect()
}

/// A range of addresses that belongs to this value alone, reserved or mapped. No thread ever
/// accesses it. Unmapped on drop.
struct Held {
    at: usize,
    len: usize,
}

impl Held {
    fn reserve(len: usize) -> Result<Held, Error> {
        let at = sys::reserve(len, ALIGN).map_err(failed("mmap"))?;
        Ok(Held { at, len })
    }

    fn map(&self, plain: &PlainFile) -> Result<(), Error> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is this value's own, so nothing else is replaced.
        unsafe { sys::map_file(self.at, self.len, plain.file.as_fd(), 0, prot, true) }
            .map_err(failed("mmap"))
    }

    fn protect(&self, prot: libc::c_int) -> Result<(), Error> {
        // SAFETY: the range is this value's own, and no thread accesses it.
        unsafe { sys::protect(self.at, self.len, prot) }.map_err(failed("mprotect"))
    }

    /// Moves the mapping to the addresses of `to`. Its own addresses belong to nobody afterwards.
    fn move_to(self, to: Held) -> Result<Held, Error> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let [at, target] = [self.at, to.at].map(|at| at as *mut libc::c_void);
        // SAFETY: both ranges are values' own, of one length and apart, and no thread accesses
        // them. So the call replaces nothing but the reservation of `to`.
        match unsafe { libc::mremap(at, self.len, self.len, flags, target) } {
            libc::MAP_FAILED => Err(failed("mremap")(Errno::last())),
            _ => {
                // Another thread may map something there by now.
                let _gone = ManuallyDrop::new(self);
                Ok(to)
            }
        }
    }

    fn unmap(self) -> Result<(), Error> {
        let held = ManuallyDrop::new(self);
        // SAFETY: the range is this value's own, and no thread accesses it.
        unsafe { sys::unmap(held.at, held.len) }.map_err(failed("munmap"))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and no thread accesses it. If the kernel refuses,
        // address space is wasted.
        let _ = unsafe { sys::unmap(self.at, self.len) };
    }
}

/// Turns an error number of a call into an error.
fn failed(call: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Call { call, reason: std::io::Error::from_raw_os_error(errno.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_none_the_powers_of_two_and_the_most() {
        assert_eq!(numbers(0), [0]);
        assert_eq!(numbers(1), [0, 1]);
        assert_eq!(numbers(3), [0, 1, 2, 3]);
        assert_eq!(numbers(4), [0, 1, 2, 4]);
        assert_eq!(numbers(16), [0, 1, 2, 4, 8, 16]);
    }

    #[test]
    fn a_part_is_a_quarter_in_whole_pages_and_64_mb_at_most() {
        assert_eq!(part_bytes(2 << 20), 512 << 10);
        assert_eq!(part_bytes((2 << 20) + 4096), 512 << 10);
        assert_eq!(part_bytes(1 << 40), 64 << 20);
        assert_eq!(bytes_beside(1 << 30, 0), 0);
        // Two views of 2 MB each, three mappings with 128 KB each, the file and the copy.
        assert_eq!(bytes_beside(1 << 30, 2), (4 << 20) + (384 << 10) + (128 << 20));
    }

    #[test]
    fn calls_on_plain_mappings_take_time_and_leave_no_mapping() {
        let of_file = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("memfd:pageleap-measure")).count()
        };
        let plain = PlainFile::new(4 << 20).unwrap();
        for mappings in [1, 3] {
            assert!(plain.measure(mappings).unwrap().iter().all(|ns| *ns > 0));
            assert_eq!(of_file(), 0);
        }
    }
}
