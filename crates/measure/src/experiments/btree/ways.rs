//! The ways to move leaves: leaps of a region, and calls of the kernel for private memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pageleap::process::ProcessMemory;
use pageleap::{
    BASE_PAGE, EngineChoice, KernelMigration, Migration, MigrationContext, Mode, NodeId, Region,
    move_pages,
};
use pageleap_sys::{self as sys, Errno};

use super::super::memory::Pools;
use super::shelf::{Leaves, Shelf};
use crate::Error;
use crate::document::Value;
use crate::private::failed;
use crate::random::SplitMix64;

/// The most pages of a call of the kernel, as in Figure 6.
pub const BATCHES: [usize; 6] = [32, 64, 128, 256, 512, 1024];
/// The best one of the paper on two sockets.
const BEST_BATCH: usize = 128;

/// A way to move leaves, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// Nothing moves. In a region, or in private memory.
    Stay {
        /// Whether the tree lies in private memory.
        private: bool,
    },
    /// A leap of a region, a job for each migration, run by the thread itself.
    Leap(EngineChoice, Leaves),
    /// One call of `move_pages(2)` for each migration, as it is.
    Call(Leaves),
    /// A job of the engine `kernel` for each migration.
    Kernel {
        /// How often pages are tried.
        mode: Mode,
        /// Pages of a call; `None`: the library decides.
        batch: Option<usize>,
    },
    /// One call of the library's `move_pages` for each migration: the engine `kernel` for lists of
    /// pages.
    List,
}

/// The ways that are compared. `few`: one of each kind.
pub fn ways(engines: &[EngineChoice], few: bool) -> Vec<Way> {
    let leaps = engines.iter().flat_map(|engine| Leaves::ALL.map(|of| Way::Leap(*engine, of)));
    let modes: &[Mode] = if few { &[Mode::Retry] } else { &Mode::ALL };
    let batches: &[usize] = if few { &[BEST_BATCH] } else { &BATCHES };
    let modes = modes.iter().map(|mode| Way::Kernel { mode: *mode, batch: None });
    let of_batch = |batch: &usize| Way::Kernel { mode: Mode::Retry, batch: Some(*batch) };
    let mut ways = vec![Way::Stay { private: false }];
    ways.extend(leaps);
    ways.push(Way::Stay { private: true });
    ways.extend(Leaves::ALL.map(Way::Call));
    ways.extend(modes.chain(batches.iter().map(of_batch)));
    ways.push(Way::List);
    ways
}

impl Way {
    /// Whether the tree lies in private memory.
    pub(super) fn is_private(self) -> bool {
        !matches!(self, Way::Stay { private: false } | Way::Leap(..))
    }

    /// The leaves that move; `None` if none do.
    pub(super) fn leaves(self) -> Option<Leaves> {
        match self {
            Way::Stay { .. } => None,
            Way::Leap(_, leaves) | Way::Call(leaves) => Some(leaves),
            Way::Kernel { .. } => Some(Leaves::Beside),
            Way::List => Some(Leaves::Apart),
        }
    }

    /// Its name, in which the size of batches tells ways apart, too.
    pub fn name(self) -> String {
        match self {
            Way::Stay { private: false } => "none".to_owned(),
            Way::Stay { private: true } => "none, private".to_owned(),
            Way::Leap(engine, _) => engine.to_string(),
            Way::Call(_) => "one move_pages, private".to_owned(),
            Way::Kernel { mode, batch: None } => format!("kernel {mode}, private"),
            Way::Kernel { mode, batch: Some(batch) } => format!("kernel {mode} {batch}, private"),
            Way::List => "kernel list, private".to_owned(),
        }
    }

    /// Its properties, for the labels of the experiment.
    pub(super) fn labels(self) -> Vec<Value> {
        let batch = match self {
            Way::Kernel { batch, .. } => batch,
            _ => None,
        };
        let leaves = self.leaves().map_or(Value::Unknown, |leaves| leaves.name().into());
        vec![self.name().into(), leaves, batch.map_or(Value::Unknown, Value::count)]
    }
}

/// Pages that moved, those that were to move, and the time of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub moved: u64,
    pub wanted: u64,
    pub time: Duration,
}

impl Moved {
    pub(super) fn add(&mut self, other: Moved) {
        self.moved += other.moved;
        self.wanted += other.wanted;
        self.time += other.time;
    }
}

/// The memory of a tree, as far as it moves.
#[derive(Clone, Copy)]
pub(super) enum Memory<'a> {
    /// A region, and the threads and descriptors that jobs keep.
    Region(&'a Pools, &'a MigrationContext),
    /// Private memory from this address on, and its home and the other node.
    Private(usize, &'a ProcessMemory, [NodeId; 2]),
}

/// Sets of leaves that threads have taken.
pub(super) struct Taken(Vec<AtomicBool>);

impl Taken {
    pub(super) fn none(sets: usize) -> Taken {
        Taken((0..sets).map(|_| AtomicBool::new(false)).collect())
    }

    /// Takes a set. There are more than threads, and each thread has at most one.
    fn any(&self, random: &mut SplitMix64) -> usize {
        let first = random.below(self.0.len());
        let sets = (first..self.0.len()).chain(0..first);
        let is_free = |set: &usize| !self.0[*set].swap(true, Ordering::Relaxed);
        sets.cycle().find(is_free).expect("some set is free")
    }

    fn give_back(&self, set: usize) {
        self.0[set].store(false, Ordering::Relaxed);
    }
}

/// The code by which a thread migrates: a set to the other node, and back by the next migration.
pub(super) struct Mover<'a> {
    pub way: Way,
    pub leaves: Leaves,
    pub memory: Memory<'a>,
    pub shelf: &'a Shelf,
    pub taken: &'a Taken,
    /// The set that is away, and its nodes.
    pub away: Option<(usize, Vec<u64>)>,
}

impl<'a> Mover<'a> {
    /// A migration query.
    pub(super) fn migrate(&mut self, random: &mut SplitMix64) -> Result<Moved, Error> {
        if let Some((set, nodes)) = self.away.take() {
            let (moved, _) = self.move_nodes(&nodes, true)?;
            self.taken.give_back(set);
            return Ok(moved);
        }
        let set = self.taken.any(random);
        let nodes = self.shelf.nodes(self.leaves, set);
        let (moved, away) = self.move_nodes(&nodes, false)?;
        self.away = Some((set, away));
        Ok(moved)
    }

    /// Moves nodes, and says which of them are there then.
    fn move_nodes(&self, nodes: &[u64], home: bool) -> Result<(Moved, Vec<u64>), Error> {
        match (self.memory, self.way) {
            (Memory::Region(pools, context), Way::Leap(engine, _)) => {
                let began = Instant::now();
                let pool = if home { &pools.source } else { &pools.destination };
                let job = Migration::new().engine(engine).context(context).threads(1);
                let add = |job: Migration<'a>, (first, end)| {
                    job.range(&pools.region, first * BASE_PAGE..end * BASE_PAGE, pool)
                };
                let moved = runs(nodes).into_iter().fold(job, add).run()?.pages.migrated;
                let wanted = nodes.len() as u64;
                Ok((Moved { moved, wanted, time: began.elapsed() }, nodes.to_vec()))
            }
            (Memory::Private(start, process, [from, to]), way) => {
                let to = if home { from } else { to };
                let before = are_on(start, nodes, to)?;
                let began = Instant::now();
                move_private(way, start, nodes, process, to)?;
                let time = began.elapsed();
                let after = are_on(start, nodes, to)?;
                Ok(counted(nodes, &before, &after, time))
            }
            _ => unreachable!("a region moves by leaps"),
        }
    }
}

/// Counts pages that have come to a node, by whether each was there before and is there after, and
/// lists those that are there. A call that gives up half-way, or a page that it found there, makes
/// no difference to it: the places of pages count, and not what a call says.
fn counted(nodes: &[u64], before: &[bool], after: &[bool], time: Duration) -> (Moved, Vec<u64>) {
    let wanted = before.iter().filter(|was| !**was).count() as u64;
    let moved = before.iter().zip(after).filter(|(was, is)| !**was && **is).count() as u64;
    let there = nodes.iter().zip(after).filter(|(_, is)| **is).map(|(node, _)| *node).collect();
    (Moved { moved, wanted, time }, there)
}

/// For each node of private memory, whether its page is on a node of the machine.
fn are_on(start: usize, nodes: &[u64], on: NodeId) -> Result<Vec<bool>, Error> {
    let mut status = vec![i32::MIN; nodes.len()];
    sys::nodes_of_pages(0, &addresses(start, nodes), &mut status).map_err(failed("move_pages"))?;
    Ok(status.into_iter().map(|node| node == on.0 as i32).collect())
}

fn addresses(start: usize, nodes: &[u64]) -> Vec<usize> {
    nodes.iter().map(|node| start + *node as usize * BASE_PAGE).collect()
}

/// Ascending numbers as runs without gaps: the first number, and the one behind the last.
fn runs(nodes: &[u64]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for node in nodes.iter().map(|node| *node as usize) {
        match runs.last_mut() {
            Some((_, end)) if *end == node => *end += 1,
            _ => runs.push((node, node + 1)),
        }
    }
    runs
}

/// Moves nodes of private memory, as far as the way does.
fn move_private<'a>(
    way: Way,
    start: usize,
    nodes: &[u64],
    process: &'a ProcessMemory,
    to: NodeId,
) -> Result<(), Error> {
    match way {
        Way::Call(_) => call(&addresses(start, nodes), to),
        Way::Kernel { mode, batch } => {
            let job = KernelMigration::new().mode(mode);
            let job = batch.into_iter().fold(job, KernelMigration::batch_pages);
            let address = |node: usize| start + node * BASE_PAGE;
            let add = |job: KernelMigration<'a>, (first, end)| {
                job.range(process, address(first)..address(end), to)
            };
            runs(nodes).into_iter().fold(job, add).start()?.wait();
            Ok(())
        }
        Way::List => {
            move_pages(0, &addresses(start, nodes), Some(&vec![to; nodes.len()]), false)?;
            Ok(())
        }
        Way::Stay { .. } | Way::Leap(..) => unreachable!("no call moves this way"),
    }
}

/// Moves pages by one call of the kernel, which may give up half-way.
fn call(pages: &[usize], to: NodeId) -> Result<(), Error> {
    let mut status = vec![i32::MIN; pages.len()];
    match sys::move_pages(0, pages, &vec![to.0 as i32; pages.len()], &mut status, false) {
        Ok(_) | Err(Errno(libc::ENOMEM)) => Ok(()),
        Err(errno) => Err(failed("move_pages")(errno)),
    }
}

/// The words of a region.
pub(super) fn words_of(region: &Region) -> Result<&[AtomicU64], Error> {
    Ok(region.atomics_u64(0..region.len())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_by_their_places() {
        // Of four pages one was there, two have come, and one has stayed.
        let (before, after) = ([true, false, false, false], [true, true, false, true]);
        let (moved, there) = counted(&[7, 8, 9, 11], &before, &after, Duration::ZERO);
        assert_eq!(moved, Moved { moved: 2, wanted: 3, time: Duration::ZERO });
        // The page that has stayed does not go home.
        assert_eq!(there, [7, 8, 11]);
        let home = counted(&there, &[false; 3], &[true; 3], Duration::ZERO).0;
        assert_eq!((home.moved, home.wanted), (3, 3));
    }

    #[test]
    fn runs_have_no_gaps() {
        assert_eq!(runs(&[3, 4, 5, 9, 11, 12]), [(3, 6), (9, 10), (11, 13)]);
        assert_eq!(runs(&[]), []);
    }
}
