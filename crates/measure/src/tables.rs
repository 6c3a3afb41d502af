//! Times moves of page tables alone, beside leaps of the same pages and copies of the same bytes.

use pageleap::{
    Engine, EngineChoice, EngineName, Error as LeapError, Migration, NodeId, PageSize,
    PageTableMigration, Pool, Region,
};

use crate::Error;
use crate::leap::{Wish, check_complete};
use crate::load::{Load, Pattern, Rate, Rows, Shadow, Work, Writing};
use crate::memcpy::{Copies, Target};
use crate::sample::Sample;

/// The load beside the moves of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Nothing.
    Rest,
    /// One thread writes to random words at full speed.
    Writer,
}

impl Beside {
    /// Both of them.
    pub const ALL: [Beside; 2] = [Beside::Rest, Beside::Writer];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Beside::Rest => "rest",
            Beside::Writer => "one writer",
        }
    }

    fn work(self) -> Work {
        let pattern = Pattern::Steady { rate: Rate::Max, rows: Rows::Uniform };
        match self {
            Beside::Rest => Work::Rest,
            Beside::Writer => Work::Write(Writing {
                pattern,
                writers: 1,
                readers: 0,
                kernel: false,
                writer_cpu: None,
                total: None,
            }),
        }
    }
}

/// A move of page tables and a leap of the same pages, beside the same load.
#[derive(Debug)]
pub struct Pair {
    /// Page tables to the other node, without the data.
    pub tables: Sample,
    /// The leap.
    pub leap: Sample,
}

impl Pair {
    /// Time of the move / time of the leap.
    pub fn ratio(&self) -> f64 {
        self.tables.leap.report.migrate_ns as f64 / self.leap.leap.report.migrate_ns.max(1) as f64
    }

    /// Words that do not contain the last value written to them.
    pub fn lost(&self) -> u64 {
        self.tables.lost + self.leap.lost
    }
}

/// One run: copies, and then a pair beside each of [`Beside::ALL`].
#[derive(Debug)]
pub struct Run {
    /// The copies, without load.
    pub copies: Copies,
    /// By load.
    pub pairs: [Pair; Beside::ALL.len()],
}

/// A region whose page tables move, and two pools on the node of its data.
pub struct Scene {
    pub(crate) region: Region,
    /// The region lies in the first one, except while a leap is measured.
    pub(crate) pools: [Pool; 2],
    /// The contents of the region, except while a load runs.
    pub(crate) shadow: Shadow,
    /// The node where page tables are at home, and the node to which they move.
    tables: [NodeId; 2],
    engine: Engine,
}

impl Scene {
    /// Makes a region of base pages on a node. `engine` moves its data; if it does not work here,
    /// the last one does.
    ///
    /// # Errors
    /// If the node has too little memory.
    pub fn new(bytes: u64, data: NodeId, tables: [NodeId; 2]) -> Result<Scene, Error> {
        let pool = || Pool::builder(data, bytes).page_size(PageSize::Base).build();
        let pools = [pool()?, pool()?];
        let region = Region::new(&pools[0], bytes as usize)?;
        let shadow = Shadow::fill(region.atomics_u64(0..region.len())?);
        let mut scene = Scene { region, pools, shadow, tables, engine: Engine::StopCopy };
        match scene.leap_to(1) {
            Err(LeapError::EngineRefused { .. }) => scene.engine = Engine::Mprotect,
            other => {
                other?;
                scene.leap_to(0)?;
            }
        }
        Ok(scene)
    }

    /// The engine of the leaps: stop-and-copy, if it works here.
    pub fn engine(&self) -> EngineName {
        self.engine.into()
    }

    fn migration(&self, to: usize) -> Migration<'_> {
        let range = 0..self.region.len();
        let engine = EngineChoice::Only(self.engine);
        Migration::new().engine(engine).threads(1).range(&self.region, range, &self.pools[to])
    }

    fn leap_to(&self, to: usize) -> Result<(), LeapError> {
        self.migration(to).start()?.wait();
        Ok(())
    }

    /// Measures one run. `None`: `stopped` was true in the middle of it.
    ///
    /// # Errors
    /// If a job cannot be started, or leaves pages where they are.
    pub fn run(&mut self, nth: usize, stopped: &dyn Fn() -> bool) -> Result<Option<Run>, Error> {
        let copies = Target::new(&self.region, &self.pools[1])?.copy_by_all_methods(nth, stopped);
        let Some(copies) = copies else { return Ok(None) };
        let mut pairs = Vec::new();
        for beside in Beside::ALL {
            let load = Load { work: beside.work(), seed: nth as u64 };
            let (mut tables, mut leap) = (None, None);
            for turn in 0..2 {
                if stopped() {
                    return Ok(None);
                }
                match (nth + turn) % 2 {
                    0 => tables = Some(self.move_tables(&load, stopped)?),
                    _ => leap = Some(self.leap(&load, stopped)?),
                }
            }
            let (Some(tables), Some(leap)) = (tables, leap) else { return Ok(None) };
            pairs.push(Pair { tables, leap });
        }
        Ok(pairs.try_into().ok().map(|pairs| Run { copies, pairs }))
    }

    fn move_tables(&mut self, load: &Load, stopped: &dyn Fn() -> bool) -> Result<Sample, Error> {
        let [home, away] = self.tables;
        let migration = |to| PageTableMigration::new(&self.region, 0..self.region.len(), to).anew();
        let start = || migration(away).allow_node_without_cpus().start();
        let words = self.region.atomics_u64(0..self.region.len())?;
        let sample = Sample::take(words, start, load, &mut self.shadow, wish(stopped))?;
        // The pages at both ends of the region may have page tables that map other memory.
        let report = &sample.leap.report;
        if !stopped() && !report.ended.is_completed() {
            check_complete(report, report.pages.total())?;
        }
        migration(home).allow_node_without_cpus().run()?;
        Ok(sample)
    }

    fn leap(&mut self, load: &Load, stopped: &dyn Fn() -> bool) -> Result<Sample, Error> {
        let Scene { region, pools, shadow, engine, .. } = self;
        let range = 0..region.len();
        let only = EngineChoice::Only(*engine);
        let start =
            || Migration::new().engine(only).threads(1).range(region, range, &pools[1]).start();
        let words = region.atomics_u64(0..region.len())?;
        let sample = Sample::take(words, start, load, shadow, wish(stopped))?;
        if !stopped() {
            check_complete(&sample.leap.report, sample.leap.report.pages.total())?;
        }
        self.leap_to(0)?;
        Ok(sample)
    }
}

fn wish(stopped: &dyn Fn() -> bool) -> impl FnMut(&pageleap::Job) -> Wish {
    move |_| if stopped() { Wish::Cancel } else { Wish::GoOn }
}
