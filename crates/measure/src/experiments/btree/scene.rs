//! Trees in all memory that moves, and turns of their ways.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pageleap::process::{ProcessMemory, own_pid};
use pageleap::{BASE_PAGE, MigrationContext, NodeId, PageSize, move_pages};

use super::super::memory::Pools;
use super::super::ways::with_lost;
use super::super::{Case, Outcome, Scene};
use super::METRICS;
use super::queries::{self, Mix, Orders, Share, Worked};
use super::shelf::{Leaves, Shelf};
use super::verify::lost;
use super::ways::{Memory, Moved, Mover, Taken, Way, words_of};
use crate::Error;
use crate::matrix::start;
use crate::olc::{Roots, Tree};
use crate::phase::{Phase, Stage, StopOnDrop, Times};
use crate::private::PrivateMemory;

/// How long calls that withdraw pages wait for a job that ends.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks of the calling thread at the window and at signals.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The setting of a scene.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Bytes of the tree: whole pages.
    pub bytes: u64,
    /// Its node.
    pub from: NodeId,
    /// The node to which leaves move.
    pub to: NodeId,
    /// The CPU of each thread that queries. Not empty.
    pub cpus: Vec<usize>,
    /// The queries.
    pub mix: Mix,
    /// The share of migrations among them.
    pub share: Share,
    /// The leaves of a migration. Fewer if the tree has too few.
    pub pages: usize,
    /// How long the threads run in each turn.
    pub window: Duration,
    /// Of choices and places.
    pub seed: u64,
    /// Why the kernel cannot move pages from one node to the other here, if so
    /// ([`can_move`](crate::rivals::can_move)).
    pub can_move: Result<(), String>,
}

impl Setting {
    fn shelf(&self) -> Shelf {
        Shelf::new(self.bytes / BASE_PAGE as u64, self.pages, self.cpus.len(), self.seed)
    }

    /// The leaves of a migration.
    pub fn migration_pages(&self) -> u64 {
        self.shelf().set_pages()
    }

    /// Entries that the tree has at first.
    pub fn entries(&self) -> u64 {
        self.shelf().keys()
    }

    /// Bytes of the pool to which leaves of a region move: twice as many as are away.
    fn away_bytes(&self) -> u64 {
        let bytes = 2 * self.cpus.len() as u64 * self.migration_pages() * BASE_PAGE as u64;
        bytes.next_multiple_of(PageSize::Thp.bytes() as u64)
    }

    /// Bytes on the source and on the destination.
    pub fn needs(&self) -> [u64; 2] {
        let private = u64::from(self.can_move.is_ok());
        [(1 + private) * self.bytes, (1 + private) * self.away_bytes()]
    }
}

/// A tree in private memory.
struct Private {
    memory: PrivateMemory,
    roots: Roots,
    /// Its mappings, which jobs of the kernel's engine need.
    process: ProcessMemory,
}

/// A tree in each memory that moves.
pub struct Trees {
    pub(super) setting: Setting,
    shelf: Shelf,
    pub(super) pools: Pools,
    roots: Roots,
    private: Option<Private>,
    context: MigrationContext,
    ways: Vec<Way>,
    cases: Vec<Case>,
    left_out: Vec<String>,
}

impl Trees {
    /// Takes the memory, and loads the trees. Leaves out the ways that this machine cannot take.
    ///
    /// # Errors
    /// Those of `go_on`, which is asked between long steps and while a tree is loaded; and if there
    /// is too little memory.
    pub fn new<E: From<Error>>(
        setting: Setting,
        ways: &[Way],
        go_on: impl Fn() -> Result<(), E>,
    ) -> Result<Trees, E> {
        let Setting { bytes, from, to, .. } = setting;
        let shelf = setting.shelf();
        let pools =
            Pools::build([bytes, setting.away_bytes()], PageSize::Base, [from, to], &go_on)?;
        let roots = shelf.load(words_of(&pools.region)?, &go_on)?;
        let private = match setting.can_move {
            Ok(()) => Some(Private::new(&setting, &shelf, &go_on)?),
            Err(_) => None,
        };
        let (mut fit, mut left_out) = (Vec::new(), Vec::new());
        for way in ways {
            let why = match (way, &setting.can_move) {
                (Way::Leap(engine, _), _) => pools.unfit(*engine).map_err(Error::from)?,
                // The base of private memory alone says nothing.
                (Way::Stay { private: true }, Err(_)) => continue,
                (way, Err(why)) if way.is_private() => Some(why.clone()),
                (Way::Kernel { batch: Some(batch), .. }, _)
                    if *batch as u64 > shelf.set_pages() =>
                {
                    Some(format!("a migration has {} leaves", shelf.set_pages()))
                }
                _ => None,
            };
            match why {
                None => fit.push(*way),
                Some(why) => {
                    let what = format!("{}: {why}", way.name());
                    left_out.extend((!left_out.contains(&what)).then_some(what));
                }
            }
        }
        let cases = cases(&fit);
        let context = MigrationContext::new();
        Ok(Trees { setting, shelf, pools, roots, private, context, ways: fit, cases, left_out })
    }

    fn private(&self) -> &Private {
        self.private.as_ref().expect("ways of private memory are left out without any")
    }

    pub(super) fn words(&self, private: bool) -> Result<&[AtomicU64], Error> {
        if private { Ok(self.private().memory.words()) } else { words_of(&self.pools.region) }
    }

    fn tree(&self, private: bool) -> Result<Tree<'_>, Error> {
        let roots = if private { &self.private().roots } else { &self.roots };
        Ok(Tree::new(self.words(private)?, roots))
    }

    fn memory(&self, private: bool) -> Memory<'_> {
        if !private {
            return Memory::Region(&self.pools, &self.context);
        }
        let Private { memory, process, .. } = self.private();
        let nodes = [self.setting.from, self.setting.to];
        Memory::Private(memory.as_ptr().addr(), process, nodes)
    }

    /// Runs queries for a window. If a thread fails, all of them end.
    fn run(&self, way: Way, stopped: &dyn Fn() -> bool) -> Result<Vec<Worked>, Error> {
        let Setting { mix, share, seed, window, .. } = self.setting;
        let tree = self.tree(way.is_private())?;
        let taken = way.leaves().map(|leaves| Taken::none(self.shelf.count(leaves)));
        let mover = || {
            let (leaves, taken) = way.leaves().zip(taken.as_ref())?;
            let memory = self.memory(way.is_private());
            Some(Mover { way, leaves, memory, shelf: &self.shelf, taken, away: None })
        };
        let stage = Stage::new();
        std::thread::scope(|scope| {
            let on_drop = StopOnDrop(&stage);
            let (keys, threads) = (self.shelf.keys(), self.setting.cpus.len());
            let begin = |(nth, cpu): (usize, &usize)| {
                let (mover, stage) = (mover(), &stage);
                let orders = Orders { tree, keys, mix, share, mover, nth, threads, seed, stage };
                start(scope, *cpu, move || queries::run(orders))
            };
            let running = self.setting.cpus.iter().enumerate().map(begin);
            let running: Vec<_> = running.collect::<Result<_, Error>>()?;
            let began = Instant::now();
            let is_over = || stage.stopped() || began.elapsed() >= window || stopped();
            while !is_over() {
                std::thread::sleep(LOOK_EVERY.min(window));
            }
            drop(on_drop);
            let ended = running.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ended.collect()
        })
    }

    /// Brings all leaves back to the source.
    fn bring_back(&self, way: Way) -> Result<(), Error> {
        let Setting { from, to, .. } = self.setting;
        match way {
            Way::Stay { .. } => Ok(()),
            Way::Leap(..) => {
                let report = self.pools.migration(&self.pools.source).run()?;
                match report.ended.is_completed() {
                    true => Ok(()),
                    false => {
                        let pages = report.pages.total();
                        Err(Error::Incomplete { pages, report: report.into() })
                    }
                }
            }
            _ if from == to => Ok(()),
            _ => {
                let memory = &self.private().memory;
                let start = memory.as_ptr().addr();
                let pages: Vec<usize> = (start..start + memory.len()).step_by(BASE_PAGE).collect();
                let status = move_pages(0, &pages, Some(&vec![from; pages.len()]), false)?;
                let stayed = status.iter().filter(|page| page.node != Some(from)).count();
                match stayed {
                    0 => Ok(()),
                    stayed => Err(Error::Stayed { stayed, pages: pages.len() }),
                }
            }
        }
    }

    /// Gives all frames of the region back and takes them again, in order: leaves that were apart
    /// have come back to other frames, and each has kept mappings of its own.
    fn lay_out_again(&mut self) -> Result<(), Error> {
        let Pools { region, source, .. } = &mut self.pools;
        let all = 0..region.len();
        region.discard_within(all.clone(), PATIENCE)?;
        region.back_within(all, &*source, PATIENCE)?;
        Ok(())
    }

    /// Loads a tree anew.
    fn load_again(&mut self, private: bool) -> Result<(), Error> {
        let roots = self.shelf.load(self.words(private)?, &|| Ok::<(), Error>(()))?;
        match &mut self.private {
            Some(of_private) if private => of_private.roots = roots,
            _ => self.roots = roots,
        }
        Ok(())
    }
}

impl Private {
    fn new<E: From<Error>>(
        setting: &Setting,
        shelf: &Shelf,
        go_on: &impl Fn() -> Result<(), E>,
    ) -> Result<Private, E> {
        go_on()?;
        let memory = PrivateMemory::new(setting.bytes as usize, PageSize::Base, setting.from)?;
        let roots = shelf.load(memory.words(), go_on)?;
        go_on()?;
        let process = own_pid().and_then(ProcessMemory::read).map_err(Error::from)?;
        Ok(Private { memory, roots, process })
    }
}

/// The cases of ways. The base of each is the tree that stays in the same memory.
fn cases(ways: &[Way]) -> Vec<Case> {
    let case = |way: &Way| {
        let base = Way::Stay { private: way.is_private() };
        let bases = ways.iter().position(|other| *other == base).into_iter().collect();
        Case { labels: way.labels(), bases, at_rest: Vec::new() }
    };
    ways.iter().map(case).collect()
}

/// With fewer times of queries there is no quantile: of 100 one is longer than p99.
const LEAST_TIMES: u64 = 100;

/// The numbers of all threads together, in the order of the metrics.
fn numbers(all: &[Worked], moves: bool) -> Vec<f64> {
    let rate = |number: &dyn Fn(&Worked) -> u64| {
        all.iter().map(|one| number(one) as f64 / one.elapsed.as_secs_f64()).sum::<f64>()
    };
    let queries = rate(&|one| one.queries);
    let (mut times, mut moved) = (Times::new(), Moved::default());
    for one in all {
        times.join(&one.times);
        moved.add(one.moved);
    }
    let has_enough = times.count(Phase::During) >= LEAST_TIMES;
    let quantile = |share| match times.quantile_ns(Phase::During, share) {
        Some(ns) if has_enough => ns as f64,
        _ => f64::NAN,
    };
    let migrations = all.iter().map(|one| one.migrations).sum::<u64>() as f64;
    let of_moves = [
        rate(&|one| one.moved.moved),
        moved.moved as f64 / moved.wanted as f64,
        moved.time.as_nanos() as f64 / migrations,
    ];
    let of_moves = if moves { of_moves } else { [f64::NAN; 3] };
    let numbers =
        [&[1e9 / queries, queries], &of_moves[..], &[quantile(0.5), quantile(0.99)]].concat();
    debug_assert_eq!(numbers.len(), METRICS.len());
    numbers
}

impl Scene for Trees {
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
        let way = self.ways[case];
        let mut ran = self.run(way, stopped);
        let back = self.bring_back(way);
        let private = way.is_private();
        let (mut updated, mut inserted, mut wrong) = (Vec::new(), Vec::new(), 0);
        for one in ran.iter_mut().flatten() {
            updated.append(&mut one.updated);
            inserted.append(&mut one.inserted);
            wrong += one.wrong;
        }
        let lost = match ran {
            Ok(_) => wrong + lost(self.tree(private)?, self.shelf.keys(), updated, inserted),
            // The records of the threads are gone, if one of them could not be started.
            Err(_) => 0,
        };
        // After a signal there is no further turn.
        let scattered = matches!(way, Way::Leap(_, Leaves::Apart)) && back.is_ok() && !stopped();
        if scattered {
            self.lay_out_again()?;
        }
        if scattered || lost > 0 || ran.is_err() || self.setting.mix.writes() && !stopped() {
            self.load_again(private)?;
        }
        let mut all = ran?;
        if let Some(error) = all.iter_mut().find_map(|one| one.failed.take()) {
            return Err(error.with_lost(lost));
        }
        let moves = way.leaves().is_some();
        let outcome = with_lost(Outcome { numbers: numbers(&all, moves), lost }, back)?;
        Ok((!stopped() || lost > 0).then_some(outcome))
    }
}
