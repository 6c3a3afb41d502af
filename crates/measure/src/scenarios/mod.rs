//! Workloads that miss the TLB, beside threads that use up the bandwidth of memory, with page
//! tables placed by a rule: the scenarios of *Latency-aware page-table migration* (Table 3, Figures
//! 5 and 9).
//!
//! ```text
//! Scenes::run ─► for each scenario and policy, in another order in each run:
//!     page tables to the node of the scenario
//!     interference on its nodes        (matrix::Traffic: threads that copy)
//!       └► the workload's threads      (workloads), until all of them work
//!            ├► the policy decides and moves, while they work   (placing)
//!            ├► they settle, as long with each policy
//!            └► a window in which operations are counted and some of them timed
//! ```
//!
//! Threads, data and policy are those of the paper's Table 3: the workload's threads and its data
//! are on the *local* node, and only page tables and interference differ.

mod placing;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pageleap::{NodeId, PageSize, PageTableLevel, PageTables, Placement, Pool, Region};

pub use self::placing::Placed;
use crate::Error;
use crate::matrix::{Buffers, Initiator, Kind, Traffic, start};
use crate::method;
use crate::phase::{Phase, Spread, Stage, StopOnDrop, Times};
use crate::workloads::{Control, Count, Done, Structure, Workload};

/// How long operations are counted in one scenario with one policy.
const WINDOW: Duration = Duration::from_millis(200);
/// How long the threads work undisturbed before: caches, the TLB and clocks get over the change to
/// a scenario, and over what the policy did.
const SETTLING: Duration = Duration::from_millis(100);
/// How often it is looked whether to stop, and whether all threads work.
const LOOK: Duration = Duration::from_millis(1);

/// Where page tables are at the beginning, and on which nodes others use up bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// The paper's name: R remote, L local, P page tables, D data, I interference.
    pub name: &'static str,
    /// Whether page tables begin on the remote node.
    pub remote_tables: bool,
    /// Whether there is interference on the local node.
    pub local_load: bool,
    /// Whether there is interference on the remote node.
    pub remote_load: bool,
}

impl Scenario {
    /// All of them. The first is the one to which the others are compared, as in the paper.
    pub const ALL: [Scenario; 5] = [
        Scenario::new("LPLD", false, false, false),
        // Table 3 and Figure 9 call it LPLDLI.
        Scenario::new("LPLDI", false, true, false),
        Scenario::new("RPLDLI", true, true, false),
        Scenario::new("RPLDRI", true, false, true),
        Scenario::new("RPLDRILI", true, true, true),
    ];

    const fn new(
        name: &'static str,
        remote_tables: bool,
        local_load: bool,
        remote_load: bool,
    ) -> Scenario {
        Scenario { name, remote_tables, local_load, remote_load }
    }
}

/// A rule that places page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// They stay where the scenario has them.
    Off,
    /// To the node of most of their entries (the paper's `-m`).
    AutoPtm,
    /// To the node of lowest latency from there, as printed (the paper's `-w`).
    Algorithm1,
    /// To the node of lowest latency for the threads that walk, if it is lower by more than a
    /// margin: the library's own rule, and its follower.
    LatencyAware,
    /// They stay, and the threads use a view whose page tables are on their node (the place of the
    /// paper's `-f`, a replica for each node).
    Views,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 5] =
        [Policy::Off, Policy::AutoPtm, Policy::Algorithm1, Policy::LatencyAware, Policy::Views];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Off => "off",
            Policy::AutoPtm => "auto-ptm",
            Policy::Algorithm1 => "algorithm-1",
            Policy::LatencyAware => "latency-aware",
            Policy::Views => "views",
        }
    }
}

/// A node whose CPUs use up the bandwidth of its memory.
#[derive(Clone, Debug)]
pub struct Interference {
    /// The node.
    pub node: NodeId,
    /// A thread runs on each of these CPUs. Not empty.
    pub cpus: Vec<usize>,
    /// Bytes of memory in which they copy.
    pub bytes: u64,
}

/// The nodes of all scenarios, and the CPUs of their threads.
#[derive(Clone, Debug)]
pub struct Cast {
    /// The node of the threads and of the data.
    pub local: NodeId,
    /// A thread of the workload runs on each of these CPUs of the local node. Not empty.
    pub workers: Vec<usize>,
    /// Interference on the local node; `None` if it has no core beside those of the workers.
    pub local_load: Option<Interference>,
    /// The remote node; `None` on a machine with one node.
    pub remote: Option<NodeId>,
    /// Interference on the remote node; `None` if it has no CPUs.
    pub remote_load: Option<Interference>,
}

impl Cast {
    /// Whether this machine has everything for a scenario.
    pub fn can_play(&self, scenario: &Scenario) -> bool {
        (!scenario.remote_tables || self.remote.is_some())
            && (!scenario.local_load || self.local_load.is_some())
            && (!scenario.remote_load || self.remote_load.is_some())
    }

    /// Bytes that the local node has to have free, beside the region.
    pub fn local_bytes_beside(&self) -> u64 {
        self.local_load.as_ref().map_or(0, |load| load.bytes)
    }
}

/// A workload in a scenario with a policy.
#[derive(Debug)]
pub struct Cell {
    /// The scenario.
    pub scenario: Scenario,
    /// The policy.
    pub policy: Policy,
    /// Operations of all threads, for each second.
    pub per_second: f64,
    /// Times of single operations, a sample of all; `None` if the window was too short for one.
    pub times: Option<Spread>,
    /// Wrong answers.
    pub wrong: u64,
    /// The decision of the policy, and its cost.
    pub placed: Placed,
    /// The node on which most pages of PTEs that the threads walk were asked for in the window.
    pub tables: Option<NodeId>,
    /// Bytes that the interference has copied for each second, on the local node and on the remote
    /// one.
    pub load_bytes_per_s: [Option<f64>; 2],
}

/// One run of a workload: all scenarios with all policies.
#[derive(Debug)]
pub struct Run {
    /// In the order of [`Scenario::ALL`], and of [`Policy::ALL`] within each.
    pub cells: Vec<Cell>,
    /// Parts of the memory that were not what all threads had written after the run.
    pub wrong_parts: u64,
}

impl Run {
    /// Answers and words that were wrong.
    pub fn wrong(&self) -> u64 {
        self.wrong_parts + self.cells.iter().map(|cell| cell.wrong).sum::<u64>()
    }

    /// A cell, if it was measured.
    pub fn cell(&self, scenario: &Scenario, policy: Policy) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.scenario == *scenario && cell.policy == policy)
    }

    /// Time of an operation / that in the first scenario without a policy, in this run.
    pub fn to_base(&self, cell: &Cell) -> Option<f64> {
        let base = self.cell(&Scenario::ALL[0], Policy::Off)?;
        Some(base.per_second / cell.per_second)
    }
}

/// A region with a workload, on a machine with interference.
pub struct Scenes {
    cast: Cast,
    scenarios: Vec<Scenario>,
    region: Region,
    workload: Workload,
    structure: Box<dyn Structure>,
    /// Memory of the interference on both nodes.
    loads: [Option<Load>; 2],
}

struct Load {
    of: Interference,
    memory: Buffers,
}

impl Load {
    fn new(of: &Interference) -> Result<Load, Error> {
        let cpus = of.cpus.clone();
        let from = Initiator { node: of.node, injectors: cpus.clone(), cpus, has_memory: true };
        let memory = Buffers::new(&from, of.node, PageSize::Base, of.bytes, false)?;
        Ok(Load { of: of.clone(), memory })
    }
}

impl Scenes {
    /// Takes memory: a region of base pages on the local node, and that of the interference.
    /// Scenarios for which the machine lacks something are left out.
    ///
    /// # Errors
    /// A node has too little memory, or memory lies elsewhere.
    pub fn new(
        cast: Cast,
        scenarios: &[Scenario],
        bytes: u64,
        workload: Workload,
    ) -> Result<Scenes, Error> {
        let scenarios: Vec<Scenario> =
            scenarios.iter().filter(|scenario| cast.can_play(scenario)).copied().collect();
        let place = Placement::on(cast.local).page_tables(PageTables::Node(cast.local));
        let pool = Pool::builder(place.clone(), bytes).page_size(PageSize::Base).build()?;
        let region = Region::new(pool.on(place), bytes as usize)?;
        let needs = |is: fn(&Scenario) -> bool| scenarios.iter().any(is);
        let load = |is_needed: bool, of: &Option<Interference>| {
            of.as_ref().filter(|_| is_needed).map(Load::new).transpose()
        };
        let loads = [
            load(needs(|scenario| scenario.local_load), &cast.local_load)?,
            load(needs(|scenario| scenario.remote_load), &cast.remote_load)?,
        ];
        let words = region.atomics_u64(0..region.len())?;
        let structure = workload.build(words, cast.workers.len());
        Ok(Scenes { cast, scenarios, region, workload, structure, loads })
    }

    /// Fills the region with another workload.
    pub fn change_to(&mut self, workload: Workload) -> Result<(), Error> {
        if self.workload != workload {
            let words = self.region.atomics_u64(0..self.region.len())?;
            self.structure = workload.build(words, self.cast.workers.len());
            self.workload = workload;
        }
        Ok(())
    }

    /// The scenarios that are measured.
    pub fn scenarios(&self) -> &[Scenario] {
        &self.scenarios
    }

    /// Measures one run. `step` is called before each cell. `None`: `stopped` was true in the
    /// middle of it.
    ///
    /// # Errors
    /// Page tables or threads cannot be had.
    pub fn run(
        &mut self,
        nth: usize,
        step: &mut dyn FnMut(&Scenario, Policy),
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Run>, Error> {
        let scenarios = self.scenarios.clone();
        let all: Vec<(Scenario, Policy)> = scenarios
            .iter()
            .flat_map(|scenario| Policy::ALL.map(|policy| (*scenario, policy)))
            .collect();
        let mut cells: Vec<(usize, Cell)> = Vec::new();
        for at in method::order(0, nth, all.len()) {
            let (scenario, policy) = all[at];
            step(&scenario, policy);
            let seed = (nth * all.len() + at) as u64;
            match self.cell(scenario, policy, seed, stopped)? {
                Some(cell) => cells.push((at, cell)),
                None => return Ok(None),
            }
        }
        cells.sort_by_key(|(at, _)| *at);
        let words = self.region.atomics_u64(0..self.region.len())?;
        let wrong_parts = self.structure.wrong_words(words);
        let cells = cells.into_iter().map(|(_, cell)| cell).collect();
        Ok(Some(Run { cells, wrong_parts }))
    }

    fn cell(
        &mut self,
        scenario: Scenario,
        policy: Policy,
        seed: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Cell>, Error> {
        let at_first = match self.cast.remote {
            Some(remote) if scenario.remote_tables => remote,
            _ => self.cast.local,
        };
        placing::move_all(&self.region, at_first)?;
        let began = Instant::now();
        if policy == Policy::Views {
            self.region.replicate([self.cast.local])?;
        }
        let replicating = began.elapsed();
        let measured = self.beside(scenario, || self.work(policy, at_first, seed, stopped));
        self.region.drop_views([self.cast.local])?;
        let (measured, load_bytes_per_s) = measured?;
        Ok(measured.map(|(window, placed)| Cell {
            scenario,
            policy,
            placed: Placed { took: placed.took + replicating, ..placed },
            per_second: window.operations as f64 / window.took.as_secs_f64(),
            times: window.times.spread(Phase::During),
            wrong: window.wrong,
            tables: window.tables,
            load_bytes_per_s,
        }))
    }

    /// Does something beside the interference of a scenario. Also returns what that has copied.
    fn beside<T>(
        &self,
        scenario: Scenario,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<(T, [Option<f64>; 2]), Error> {
        let load = |nth: usize, is_needed: bool| self.loads[nth].as_ref().filter(|_| is_needed);
        let remote = load(1, scenario.remote_load);
        let inner = || -> Result<(T, Option<f64>), Error> {
            let Some(load) = remote else { return Ok((work()?, None)) };
            let (result, flow) = load.traffic().beside(load.memory.chased()?, work)?;
            Ok((result?, Some(flow.bytes_per_s)))
        };
        let Some(load) = load(0, scenario.local_load) else {
            let (result, remote_rate) = inner()?;
            return Ok((result, [None, remote_rate]));
        };
        let (result, flow) = load.traffic().beside(load.memory.chased()?, inner)?;
        let (result, remote_rate) = result?;
        Ok((result, [Some(flow.bytes_per_s), remote_rate]))
    }

    /// Lets the workload's threads work, applies the policy, and measures a window.
    fn work(
        &self,
        policy: Policy,
        at_first: NodeId,
        seed: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<(Window, Placed)>, Error> {
        let view = match policy {
            Policy::Views => self.region.view(self.cast.local),
            _ => None,
        };
        let words = match &view {
            Some(view) => view.atomics_u64(0..view.len())?,
            None => self.region.atomics_u64(0..self.region.len())?,
        };
        let (stage, structure) = (Stage::new(), &*self.structure);
        let counts: Vec<Count> = self.cast.workers.iter().map(|_| Count::default()).collect();
        let done = || counts.iter().map(|count| count.0.load(Ordering::Relaxed));
        std::thread::scope(|scope| {
            let stop = StopOnDrop(&stage);
            let mut threads = Vec::new();
            for (nth, (cpu, count)) in self.cast.workers.iter().zip(&counts).enumerate() {
                let control = Control { stage: &stage, count };
                let work = move || structure.work(words, nth, seed, &control);
                threads.push(start(scope, *cpu, work)?);
            }
            while done().any(|done| done == 0) && !threads.iter().any(|one| one.is_finished()) {
                std::thread::sleep(LOOK);
            }
            let placed = placing::place(&self.region, policy, &self.cast, at_first)?;
            let settled = Instant::now() + SETTLING;
            while Instant::now() < settled && !stopped() {
                std::thread::sleep(LOOK);
            }
            let (began, before) = (Instant::now(), done().sum::<u64>());
            stage.enter(Phase::During);
            while began.elapsed() < WINDOW && !stopped() {
                std::thread::sleep(LOOK.max(WINDOW / 20));
            }
            let (took, after) = (began.elapsed(), done().sum::<u64>());
            stage.enter(Phase::After);
            let counts = match &view {
                Some(view) => view.page_tables(),
                None => self.region.page_tables(),
            };
            let ptes = counts.iter().filter(|(level, ..)| *level == PageTableLevel::Pte);
            let tables = ptes.max_by_key(|(.., pages)| *pages).map(|(_, node, _)| node);
            drop(stop);
            let (mut times, mut wrong) = (Times::new(), 0);
            for thread in threads {
                let joined = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                let Done { times: its, wrong: its_wrong } = joined?;
                times.join(&its);
                wrong += its_wrong;
            }
            if stopped() {
                return Ok(None);
            }
            let operations = after - before;
            Ok(Some((Window { operations, took, times, wrong, tables }, placed)))
        })
    }
}

impl Load {
    fn traffic(&self) -> Traffic<'_> {
        Traffic { kind: Kind::Copy, cpus: &self.of.cpus, rate: None }
    }
}

/// The operations of all threads in a window.
struct Window {
    operations: u64,
    took: Duration,
    times: Times,
    wrong: u64,
    tables: Option<NodeId>,
}
