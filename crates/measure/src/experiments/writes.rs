//! Migrations while a thread writes to the memory at a requested rate (Figures 5 and 7 of the
//! paper), and their overhead over a memcpy of all bytes that they copied (Table 2).
//!
//! **The ratio that counts is that to a memcpy beside the same load, in the same round**: a memcpy
//! is slowed down by a writer, too, and so is everything that copies. The ratio to the memcpy at
//! rest stands beside it. A memcpy is no migration: it loses writes.
//!
//! A migration ends after [`LIMIT`], as in the paper, even if pages are left. The writer is on a
//! CPU of the destination. All its words are compared afterwards.

use std::any::Any;
use std::time::{Duration, Instant};

use pageleap::{BASE_PAGE, CopyMethod, Engine, EngineChoice, MemoryEngine, NodeId, PageSize};

use super::quiet;
use super::ways::{self, LABELS, Prepared, Way, Ways};
use super::{About, Case, Metric, Outcome, Scene, share, time};
use crate::Error;
use crate::document::Value;
use crate::figures::short;
use crate::leap::{Watched, Wish, watch};
use crate::load::{Load, Pattern, Rate, Rows, Shadow, Work, Writing, run_beside};
use crate::matrix::on_cpu;
use crate::memcpy::METHODS;
use crate::phase::Phase;
use crate::rivals::balancing::{Unbound, await_balanced, poll};
use crate::rivals::calls::Call;
use crate::rivals::can_move;

/// The experiment with all loads.
pub const ABOUT: About = About {
    name: "writes",
    title: "Migrations while a thread writes to the memory",
    figure: "Taking the Leap, Figures 5 and 7",
    labels: &LABELS,
    metrics: &METRICS,
};

/// The experiment of Table 2.
pub const OVERHEAD: About = About {
    name: "overhead",
    title: "The overhead of migrations at 100,000 writes per second",
    figure: "Taking the Leap, Table 2",
    labels: &LABELS,
    metrics: &METRICS,
};

const METRICS: [Metric; 6] = [
    time("time", "time", "until the last page had moved, or until the time-out of 10 s"),
    share("moved", "moved", "pages that moved, of all"),
    share("kept", "kept", "writes meanwhile, of those that were requested"),
    share("extra_copied", "extra", "bytes copied again, of all bytes"),
    share(
        "beyond_memcpy",
        "beyond",
        "time beyond a memcpy at rest of all bytes that were copied, of its time",
    ),
    time("max_gap", "gap", "longest gap of the writer"),
];

const BALANCING: &str = "automatic balancing";
/// A migration ends after this time, as in the paper.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Copies beside the load go on for at least this time, so that a small memory has a time, too.
const BESIDE_TIME: Duration = Duration::from_millis(50);

/// Sizes of areas in Table 2.
pub const TABLE_2: [usize; 5] = [4 << 10, 512 << 10, 2 << 20, 16 << 20, 256 << 20];

/// Writes per second, and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writes {
    /// How many per second.
    pub rate: Rate,
    /// Which words.
    pub rows: Rows,
}

impl Writes {
    /// The loads of Figures 5 and 7: 10 K, 100 K, and 10 M writes per second (100 M for huge
    /// pages), and 100 K of which 75 % go to one part of 32.
    pub fn of_figure(page: PageSize) -> [Writes; 4] {
        let most = if page == PageSize::Base { 10_000_000 } else { 100_000_000 };
        let uniform = |rate| Writes { rate: Rate::PerSecond(rate), rows: Rows::Uniform };
        let skewed = Writes { rate: Rate::PerSecond(100_000), rows: Rows::Skewed };
        [uniform(10_000), uniform(100_000), skewed, uniform(most)]
    }

    /// In words.
    pub fn name(self) -> String {
        let rate = match self.rate {
            Rate::PerSecond(rate) => format!("{} writes/s", short(rate as f64)),
            Rate::Max => "writes without delay".to_owned(),
        };
        match self.rows {
            Rows::Uniform => rate,
            Rows::Skewed => format!("{rate}, skewed"),
        }
    }

    fn load(self, cpu: usize, seed: u64) -> Load {
        let Writes { rate, rows } = self;
        let pattern = Pattern::Steady { rate, rows };
        let writing =
            Writing { pattern, writers: 1, readers: 0, kernel: false, writer_cpu: Some(cpu) };
        Load { work: Work::Write(writing), seed }
    }

    /// Writes that are requested in this time; `None` for as many as possible.
    fn requested(self, time: Duration) -> Option<f64> {
        match self.rate {
            Rate::PerSecond(rate) => Some(rate as f64 * time.as_secs_f64()),
            Rate::Max => None,
        }
    }
}

/// The ways that are compared: each of `engines` with the library's areas, and the paper's method
/// with its sizes of areas, too; or all engines with the sizes `areas`.
pub fn ways(
    page: PageSize,
    bytes: u64,
    engines: &[EngineChoice],
    areas: Option<&[usize]>,
) -> Vec<Way> {
    let sized = |engine| areas.is_some() || engine == Engine::Mprotect;
    let mut ways = quiet::leaps(page, bytes, engines, areas, sized);
    ways.extend(MemoryEngine::ALL.map(Way::Private));
    ways.extend(Call::ALL.map(Way::Call));
    ways
}

/// The setting of a scene.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Of the memory.
    pub ways: ways::Setting,
    /// The load.
    pub writes: Writes,
    /// The CPU of the writer.
    pub writer_cpu: usize,
}

/// Turns automatic NUMA balancing on until its result is dropped, or tells why it cannot.
pub type Switch = Box<dyn Fn() -> Result<Box<dyn Any>, String>>;

/// Memory for automatic NUMA balancing, which moves pages towards the threads that access them.
struct Balancing {
    memory: Unbound,
    shadow: Shadow,
    switch: Switch,
}

/// A turn of a case.
#[derive(Clone, Copy, Debug)]
enum Turn {
    AtRest(CopyMethod),
    Beside(CopyMethod),
    Migration(Way),
    Balancing,
}

/// Memory that moves while a thread writes to it.
pub struct Loaded {
    ways: Ways,
    writes: Writes,
    load: Load,
    cpu: usize,
    /// The expected words of the region, and of the private memory.
    shadows: [Option<Shadow>; 2],
    balancing: Option<Balancing>,
    nodes: [NodeId; 2],
    left_out: Vec<String>,
    turns: Vec<Turn>,
    cases: Vec<Case>,
    /// The fastest copy at rest, in a trial before the first round.
    fastest: CopyMethod,
}

impl Loaded {
    /// Bytes on the source and on the destination that these ways need, with a shadow copy of each
    /// memory, and with memory that is balanced.
    pub fn needs(bytes: u64, ways: &[Way], is_balanced: bool) -> [u64; 2] {
        let [from, to] = Ways::needs(bytes, ways);
        let balanced = if is_balanced { bytes } else { 0 };
        [2 * (from + balanced), to + balanced]
    }

    /// Takes and fills the memory, and leaves out ways that this machine cannot take.
    ///
    /// # Errors
    /// Those of `go_on`, which is asked between long steps; if there is too little memory, or the
    /// writer cannot be bound to its CPU.
    pub fn new<E: From<Error>>(
        setting: Setting,
        all: &[Way],
        switch: Option<Switch>,
        go_on: impl Fn() -> Result<(), E>,
    ) -> Result<Loaded, E> {
        let Setting { ways, writes, writer_cpu } = setting;
        let (bytes, page, nodes) = (ways.bytes as usize, ways.page, [ways.from, ways.to]);
        on_cpu(writer_cpu, || ())?;
        let (cpu, seed) = (ways.cpu, ways.seed);
        let ways = Ways::new(ways, all, go_on)?;
        let mut left_out = ways.left_out().to_vec();
        let balancing = switch.and_then(|switch| match balancing(bytes, page, nodes, switch) {
            Ok(balancing) => Some(balancing),
            Err(why) => {
                left_out.push(format!("{page}, {BALANCING}: {why}"));
                None
            }
        });
        let mut turns: Vec<Turn> = METHODS.map(Turn::AtRest).into();
        turns.extend(METHODS.map(Turn::Beside));
        turns.extend(ways.ways().iter().copied().map(Turn::Migration));
        turns.extend(balancing.is_some().then_some(Turn::Balancing));
        let labels = |turn: &Turn| match turn {
            Turn::AtRest(method) => labels(Way::Copy(*method), ", at rest"),
            Turn::Beside(method) => labels(Way::Copy(*method), ", beside"),
            Turn::Migration(way) => labels(*way, ""),
            Turn::Balancing => vec![BALANCING.into(), Value::Unknown, Value::Unknown],
        };
        let copies = METHODS.len();
        let case = |turn: &Turn| Case {
            labels: labels(turn),
            bases: (copies..2 * copies).collect(),
            at_rest: (0..copies).collect(),
        };
        let cases = turns.iter().map(case).collect();
        let load = writes.load(writer_cpu, seed);
        let mut tried = Vec::new();
        for method in METHODS {
            tried.push((ways.copy(method)?.numbers[0], method));
        }
        let fastest = tried.into_iter().min_by(|(one, _), (other, _)| one.total_cmp(other));
        let (_, fastest) = fastest.expect("there are methods");
        Ok(Loaded {
            ways,
            writes,
            load,
            cpu,
            shadows: [None, None],
            balancing,
            nodes,
            left_out,
            turns,
            cases,
            fastest,
        })
    }

    fn beside(&mut self, method: CopyMethod) -> Result<Outcome, Error> {
        let (writes, cpu) = (self.writes, self.cpu);
        let first = Way::Copy(method);
        let target = self.ways.target()?;
        let words = self.ways.words(first)?;
        let shadow = self.shadows[0].get_or_insert_with(|| Shadow::of(words));
        let (timed, log) = run_beside(&self.load, words, shadow, |beside| {
            beside.stage.enter(Phase::Memcpy);
            let (start, before) = (Instant::now(), beside.completed());
            let copies = on_cpu(cpu, || {
                let mut copies = 0;
                while copies == 0 || start.elapsed() < BESIDE_TIME {
                    target.copy(method);
                    copies += 1;
                }
                copies
            })?;
            let took = start.elapsed();
            Ok::<_, Error>((took, f64::from(copies), beside.completed() - before))
        })?;
        let (took, copies, written) = timed;
        let kept = writes.requested(took).map_or(f64::NAN, |asked| written as f64 / asked);
        let gap = log.gaps.quantile_ns(Phase::Memcpy, 1.0).map_or(f64::NAN, |ns| ns as f64);
        let ns = took.as_nanos() as f64 / copies;
        let numbers = vec![ns, f64::NAN, kept, f64::NAN, f64::NAN, gap];
        Ok(Outcome { numbers, lost: shadow.lost(words) })
    }

    /// Waits until automatic NUMA balancing has moved all pages, or until the time-out.
    fn balance(&mut self, stopped: &dyn Fn() -> bool) -> Result<Option<Outcome>, Error> {
        let (writes, [from, to]) = (self.writes, self.nodes);
        let Some(Balancing { memory, shadow, switch }) = &mut self.balancing else {
            return Ok(None);
        };
        let words = memory.memory().words();
        let on = switch().map_err(|reason| Error::Rival { rival: BALANCING, reason })?;
        let ((balanced, took, written), log) = run_beside(&self.load, words, shadow, |beside| {
            beside.stage.enter(Phase::During);
            let (start, before) = (Instant::now(), beside.completed());
            let balanced = await_balanced(memory, to, LIMIT, stopped)?;
            let (took, written) = (start.elapsed(), beside.completed() - before);
            beside.stage.enter(Phase::After);
            Ok::<_, Error>((balanced, took, written))
        })?;
        drop(on);
        let lost = shadow.lost(words);
        if lost > 0 {
            shadow.accept(words);
        }
        bring_back(memory, from)?;
        if stopped() && lost == 0 {
            return Ok(None);
        }
        let ns = balanced.ns.unwrap_or(took.as_nanos() as u64) as f64;
        let moved = balanced.placement.on_target as f64 / balanced.placement.pages() as f64;
        let kept = writes.requested(took).map_or(f64::NAN, |asked| written as f64 / asked);
        let gap = log.gaps.quantile_ns(Phase::During, 1.0).map_or(f64::NAN, |ns| ns as f64);
        // The kernel does not tell how often it copied a page, and waits for accesses.
        Ok(Some(Outcome { numbers: vec![ns, moved, kept, f64::NAN, f64::NAN, gap], lost }))
    }

    fn call(&mut self, call: Call) -> Result<Outcome, Error> {
        let (writes, cpu) = (self.writes, self.cpu);
        let words = self.ways.words(Way::Call(call))?;
        let shadow = self.shadows[1].get_or_insert_with(|| Shadow::of(words));
        let mut trip = self.ways.trip(call)?;
        let ((moved, took, written), log) = run_beside(&self.load, words, shadow, |beside| {
            beside.stage.enter(Phase::During);
            let (start, before) = (Instant::now(), beside.completed());
            let moved = on_cpu(cpu, || trip.go())??;
            let (took, written) = (start.elapsed(), beside.completed() - before);
            beside.stage.enter(Phase::After);
            Ok::<_, Error>((moved, took, written))
        })?;
        trip.bring_back()?;
        drop(trip);
        let lost = shadow.lost(words);
        if lost > 0 {
            shadow.accept(words);
        }
        let kept = writes.requested(took).map_or(f64::NAN, |asked| written as f64 / asked);
        let (ns, share) = (moved.ns as f64, moved.on_target as f64 / moved.pages as f64);
        let gap = log.gaps.quantile_ns(Phase::During, 1.0).map_or(f64::NAN, |ns| ns as f64);
        // The kernel does not tell how often it copied a page.
        let beyond = ns / self.copied_ns(1.0)? - 1.0;
        Ok(Outcome { numbers: vec![ns, share, kept, f64::NAN, beyond, gap], lost })
    }

    /// The time of a memcpy at rest of the memory, as often as `passes` says.
    fn copied_ns(&self, passes: f64) -> Result<f64, Error> {
        let whole = passes.ceil().max(1.0);
        let mut ns = 0.0;
        for _ in 0..whole as usize {
            ns += self.ways.copy(self.fastest)?.numbers[0];
        }
        Ok(ns * passes / whole)
    }

    fn migration(
        &mut self,
        way: Way,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Outcome>, Error> {
        let words = self.ways.words(way)?;
        let shadow = &mut self.shadows[usize::from(way.is_private())];
        let shadow = shadow.get_or_insert_with(|| Shadow::of(words));
        let Prepared { start, pages, .. } = self.ways.prepare(way, Some(LIMIT))?;
        let look = |_: &_| if stopped() { Wish::Cancel } else { Wish::GoOn };
        let (leap, log) =
            run_beside(&self.load, words, shadow, |beside| watch(start, beside, look))?;
        let lost = shadow.lost(words);
        if lost > 0 {
            // So that the next turn is not blamed for them.
            shadow.accept(words);
        }
        if stopped() && lost == 0 {
            return Ok(None);
        }
        self.ways.bring_back(way)?;
        let Watched { report, elapsed, writes, .. } = leap;
        let is_complete = report.ended.is_completed() && report.pages.migrated == pages;
        let ns = if is_complete { report.migrate_ns as f64 } else { elapsed.as_nanos() as f64 };
        let requested = self.writes.requested(elapsed);
        let kept = requested.map_or(f64::NAN, |requested| writes as f64 / requested);
        let bytes = self.ways.bytes() as f64;
        let copied = self.copied_ns(report.bytes_copied as f64 / bytes)?;
        let gap = log.gaps.quantile_ns(Phase::During, 1.0).map_or(f64::NAN, |ns| ns as f64);
        let numbers = vec![
            ns,
            report.pages.migrated as f64 / pages as f64,
            kept,
            report.bytes_recopied as f64 / bytes,
            ns / copied - 1.0,
            gap,
        ];
        Ok(Some(Outcome { numbers, lost }))
    }
}

/// Memory on the first node, and a trial of the switch.
fn balancing(
    bytes: usize,
    page: PageSize,
    [from, to]: [NodeId; 2],
    switch: Switch,
) -> Result<Balancing, String> {
    can_move(from, to)?;
    drop(switch()?);
    let memory = Unbound::new(bytes, page, from).map_err(|error| error.to_string())?;
    let shadow = Shadow::fill(memory.memory().words());
    Ok(Balancing { memory, shadow, switch })
}

/// Moves the pages to a node, while no thread accesses them. The memory has no policy afterwards.
fn bring_back(memory: &Unbound, node: NodeId) -> Result<(), Error> {
    let start = memory.memory().as_ptr().addr();
    let pages: Vec<usize> = (start..start + memory.memory().len()).step_by(BASE_PAGE).collect();
    pageleap::move_pages(0, &pages, Some(&vec![node; pages.len()]), false)?;
    let placement = poll(memory, node)?;
    match placement.is_complete() {
        true => Ok(()),
        false => Err(Error::Stayed {
            stayed: placement.elsewhere + placement.absent,
            pages: placement.pages(),
        }),
    }
}

fn labels(way: Way, when: &str) -> Vec<Value> {
    let mut labels = way.labels();
    labels[0] = format!("{}{when}", way.name()).into();
    labels
}

impl Scene for Loaded {
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
        match self.turns[case] {
            Turn::AtRest(method) => {
                let ns = self.ways.copy(method)?.numbers[0];
                let numbers = [[ns].as_slice(), &[f64::NAN; METRICS.len() - 1]].concat();
                Ok(Some(Outcome { numbers, lost: 0 }))
            }
            Turn::Beside(method) => self.beside(method).map(Some),
            Turn::Balancing => self.balance(stopped),
            Turn::Migration(Way::Call(call)) => self.call(call).map(Some),
            Turn::Migration(way) => self.migration(way, stopped),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use pageleap::topology::Topology;

    use super::*;

    fn loaded(all: &[Way], rate: Rate) -> Loaded {
        let topology = Topology::read().unwrap();
        let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        let cpu = topology.allowed_cpus()[0];
        let (page, bytes) = (PageSize::Base, 4 << 20);
        let ways = ways::Setting { bytes, page, from: node, to: node, cpu, seed: 5 };
        let writes = Writes { rate, rows: Rows::Uniform };
        let setting =
            Setting { ways, writes, writer_cpu: *topology.allowed_cpus().last().unwrap() };
        Loaded::new(setting, all, None, || Ok::<_, Error>(())).unwrap()
    }

    #[test]
    fn each_turn_has_its_numbers_and_loses_nothing() {
        let engines = [EngineChoice::Auto, Engine::Mprotect.into()];
        let all = ways(PageSize::Base, 4 << 20, &engines, Some(&[1 << 20]));
        let mut scene = loaded(&all, Rate::PerSecond(100_000));
        let mut migrations = 0;
        for case in 0..scene.cases().len() {
            for _ in 0..2 {
                let Outcome { numbers, lost } = scene.measure(case, &|| false).unwrap().unwrap();
                let [time, moved, kept, extra, beyond, _] = <[f64; 6]>::try_from(numbers).unwrap();
                assert!(time > 0.0);
                assert_eq!(lost, 0, "{:?}", scene.turns[case]);
                let is_known = [moved, kept, extra, beyond].map(f64::is_finite);
                match scene.turns[case] {
                    Turn::AtRest(_) => assert_eq!(is_known, [false; 4]),
                    Turn::Beside(_) => assert_eq!(is_known, [false, true, false, false]),
                    Turn::Migration(_) => {
                        assert_eq!((is_known, moved), ([true; 4], 1.0));
                        migrations += 1;
                    }
                    Turn::Balancing => panic!("nothing is balanced here"),
                }
            }
        }
        // `auto` with and without a size is one, because it chooses areas itself.
        assert!(migrations >= 2 * 3, "{migrations}");
        let copies = METHODS.len();
        let case = scene.cases().last().unwrap();
        assert_eq!((case.at_rest.len(), case.bases.len()), (copies, copies));
        assert!(case.at_rest.iter().all(|at| matches!(scene.turns[*at], Turn::AtRest(_))));
        assert!(case.bases.iter().all(|at| matches!(scene.turns[*at], Turn::Beside(_))));
    }

    #[test]
    fn a_word_that_nobody_should_have_written_is_lost_once() {
        let leap = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
        let mut scene = loaded(&[leap], Rate::PerSecond(10));
        let case = scene.cases().len() - 1;
        let mut lost = || scene.measure(case, &|| false).unwrap().unwrap().lost;
        assert_eq!(lost(), 0);
        // The writer writes too rarely to hit this word.
        scene.ways.words(leap).unwrap()[77].fetch_add(1, Ordering::Relaxed);
        let mut lost = || scene.measure(case, &|| false).unwrap().unwrap().lost;
        assert_eq!([lost(), lost()], [1, 0]);
    }

    #[test]
    fn a_stopped_migration_has_no_outcome() {
        let leap = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
        let mut scene = loaded(&[leap], Rate::PerSecond(1000));
        let case = scene.cases().len() - 1;
        assert_eq!(scene.measure(case, &|| true).unwrap(), None);
    }

    #[test]
    fn loads_are_those_of_the_figures() {
        let names = |page| Writes::of_figure(page).map(Writes::name);
        assert_eq!(
            names(PageSize::Base),
            ["10k writes/s", "100k writes/s", "100k writes/s, skewed", "10m writes/s"]
        );
        assert_eq!(names(PageSize::Huge2M)[3], "100m writes/s");
        let max = Writes { rate: Rate::Max, rows: Rows::Skewed };
        assert_eq!(max.name(), "writes without delay, skewed");
        assert_eq!(max.requested(Duration::from_secs(1)), None);
    }
}
