//! TPC-H queries over a `lineitem` table that moves meanwhile (Figure 8 of the paper).
//!
//! A thread on a CPU of the destination starts a migration of the table, and then runs a query five
//! times. Does the migration pay, and from which query on? The base is the table that stays. Each
//! query runs with and without a thread that makes ten million writes in all, without delay, into
//! L_ORDERKEY, which no query reads.
//!
//! The columns lie one after the other in one region. The paper moves parts of the table
//! (*morsels*); here areas of a leap are such parts.
//!
//! Each answer is compared with that before the first migration, and the whole table with its
//! expected contents after each turn.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pageleap::{Engine, EngineChoice, MemoryEngine, PageSize};

use super::drawing::{Drawing, Of, Over};
use super::ways::{self, Prepared, Way, Ways, with_lost};
use super::writes::{Balancing, LIMIT, Switch};
use super::{About, Case, Label, Metric, Outcome, Part, Scene, label, part, quiet, share, time};
use crate::Error;
use crate::document::Value;
use crate::leap::{Wish, finish};
use crate::load::{Load, Pattern, Rate, Rows, Shadow, Work, Writing, run_beside};
use crate::matrix::on_cpu;
use crate::method::{Interval, LEAST_VALUES, Placed};
use crate::rivals::calls::{Call, Trip};
use crate::tpch::lineitem::{Generator, Layout, TEXT_POOL_BYTES, estimate_bytes, text_pool};
use crate::tpch::queries::{Columns, Q1Answer, q1, q6};
use crate::tpch::{columns, order_keys, other_columns};

/// The experiment.
pub const ABOUT: About = About {
    name: "tpch",
    title: "TPC-H queries over a table that moves meanwhile",
    figure: "Taking the Leap, Figure 8",
    needs: "6 GB; 8 GB on two nodes, which the kernel's calls and balancing need",
    takes: "15 min for each page size",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 1] = [Drawing {
    title: "Time from the start of the migration to the end of each query",
    about: "Lower is better. A migration pays from the query on at which its line crosses that of \
            the table that stays (none).",
    over: Over::Metrics(&[
        ("first", "first"),
        ("second", "second"),
        ("third", "third"),
        ("fourth", "fourth"),
        ("fifth", "fifth"),
    ]),
    of: Of::Metric("fifth"),
    split: &["query", "writes"],
    theirs: &[],
}];

const LABELS: [Label; 5] = [
    label("query", "query", ""),
    label("writes", "writes", "ten million into L_ORDERKEY meanwhile, or none"),
    ways::LABELS[0],
    ways::LABELS[1],
    ways::LABELS[2],
];

/// Runs of a query after the start of a migration.
pub const QUERIES: usize = 5;

const METRICS: [Metric; 7] = [
    time("fifth", "five", "from the start of the migration to the end of the fifth query"),
    time("first", "first", "to the end of the first query"),
    time("second", "second", "to the end of the second one, and so on"),
    time("third", "third", ""),
    time("fourth", "fourth", ""),
    time("migrate", "migrated", "until the last page had moved, or until the time-out of 10 s"),
    share("moved", "moved", "pages that moved, of all"),
];

/// Writes of the thread beside the queries, as in the paper.
const WRITES: u64 = 10_000_000;

/// A query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query {
    Q1,
    Q6,
}

/// The answer of a query.
#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Q1(Q1Answer),
    Q6(i128),
}

impl Query {
    fn name(self) -> &'static str {
        match self {
            Query::Q1 => "Q1",
            Query::Q6 => "Q6",
        }
    }

    fn answer(self, columns: Columns<'_>) -> Answer {
        match self {
            Query::Q1 => Answer::Q1(q1(columns)),
            Query::Q6 => Answer::Q6(q6(columns)),
        }
    }
}

/// How the table moves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Move {
    /// It stays.
    Stay,
    By(Way),
    Balancing,
}

/// The ways that are compared, besides the table that stays: the library's choice, the paper's
/// method at the sizes that it recommends, and the rivals.
pub fn ways(bytes: u64) -> Vec<Way> {
    let engines = [EngineChoice::Auto, Engine::Mprotect.into()];
    let sized = |engine| engine == Engine::Mprotect;
    let mut ways = quiet::leaps(PageSize::Base, bytes, &engines, Some(&quiet::BEST), sized);
    ways.extend(MemoryEngine::ALL.map(Way::Private));
    ways.push(Way::Call(Call::MovePages));
    ways
}

/// The scale factor of a table with about this number of bytes.
pub fn scale_factor(bytes: u64) -> f64 {
    bytes as f64 / estimate_bytes(1.0)
}

/// A table in each memory that moves.
pub struct Tables {
    ways: Ways,
    layout: Layout,
    balancing: Option<Balancing>,
    /// The contents at first, besides L_ORDERKEY.
    others: Vec<u64>,
    /// The expected L_ORDERKEY of the region, of the private memory, and of the balanced memory.
    shadows: [Shadow; 3],
    answers: [Answer; 2],
    load: Load,
    cpu: usize,
    cpus: Vec<usize>,
    work: Vec<(Query, bool, Move)>,
    cases: Vec<Case>,
    left_out: Vec<String>,
}

impl Tables {
    /// Makes the table, and copies it to all memory. `setting.bytes` is about its size.
    ///
    /// # Errors
    /// Those of `go_on`, which is asked between long steps and while rows are made; and if there is
    /// too little memory.
    pub fn new<E: From<Error>>(
        setting: ways::Setting,
        writer_cpu: usize,
        switch: Option<Switch>,
        go_on: impl Fn() -> Result<(), E> + Sync,
    ) -> Result<Tables, E> {
        on_cpu(writer_cpu, || ())?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let watch = |_| go_on().is_ok();
        go_on()?;
        let text = text_pool();
        let generator = Generator::size(&text, scale_factor(setting.bytes), threads, &watch);
        go_on()?;
        let generator = generator.expect("only the watch stops it");
        let layout = generator.layout();
        let bytes = (layout.bytes() as u64).next_multiple_of(PageSize::Thp.bytes() as u64);
        let setting = ways::Setting { bytes, ..setting };
        let (page, nodes, seed) = (setting.page, [setting.from, setting.to], setting.seed);
        let (cpu, cpus) = (setting.cpu, setting.cpus.clone());
        let ways = Ways::new(setting, &self::ways(bytes), &go_on)?;
        let region = ways.region_words()?;
        let start = NonNull::new(region.as_ptr().cast::<u8>().cast_mut()).expect("it is mapped");
        // SAFETY: the region starts at a page and is at least as long as the layout. It is atomics,
        // which may be written through a shared reference, and no other code uses it meanwhile.
        unsafe { generator.write(start, &watch) };
        go_on()?;
        drop(generator);
        drop(text);
        let mut left_out = ways.left_out().to_vec();
        let balancing = switch.and_then(|switch| {
            let balancing = Balancing::new(bytes as usize, page, nodes, switch);
            let why = |why| format!("{page}, {}: {why}", Balancing::NAME);
            balancing.map_err(|error| left_out.push(why(error))).ok()
        });
        let private = ways.private_words();
        let copies = private.into_iter().chain(balancing.as_ref().map(Balancing::words));
        for copy in copies {
            go_on()?;
            copy_words(region, copy);
        }
        go_on()?;
        let shadow = |words: Option<&[AtomicU64]>| match words {
            Some(words) => on_cpu(writer_cpu, || Shadow::of(order_keys(words, &layout))),
            None => Ok(Shadow::of(&[])),
        };
        let shadows = [
            shadow(Some(region))?,
            shadow(private)?,
            shadow(balancing.as_ref().map(Balancing::words))?,
        ];
        // SAFETY: no thread writes to the table now.
        let others = unsafe { other_columns(region, &layout) }.to_vec();
        // SAFETY: no thread writes to these columns, ever.
        let columns = unsafe { columns(region, &layout) };
        let answers = [Query::Q1, Query::Q6].map(|query| query.answer(columns));
        let moves: Vec<Move> = [Move::Stay]
            .into_iter()
            .chain(ways.ways().iter().copied().map(Move::By))
            .chain(balancing.is_some().then_some(Move::Balancing))
            .collect();
        let (work, cases) = all_cases(&moves);
        let load = load(writer_cpu, seed);
        Ok(Tables {
            ways,
            layout,
            balancing,
            others,
            shadows,
            answers,
            load,
            cpu,
            cpus,
            work,
            cases,
            left_out,
        })
    }

    /// Bytes on the source and on the destination, with copies to compare with.
    pub fn needs(bytes: u64, is_balanced: bool) -> [u64; 2] {
        let [from, to] = Ways::needs(bytes, &ways(bytes));
        let balanced = if is_balanced { bytes } else { 0 };
        [from + balanced, to + balanced + Tables::beside(bytes)]
    }

    /// Bytes of copies to compare with, and of the generator.
    pub fn beside(bytes: u64) -> u64 {
        bytes + bytes / 4 + TEXT_POOL_BYTES
    }
}

/// Both queries, without and with writes, by each move; and their cases.
fn all_cases(moves: &[Move]) -> (Vec<(Query, bool, Move)>, Vec<Case>) {
    let (mut work, mut cases) = (Vec::new(), Vec::new());
    for (query, writes) in
        [(Query::Q1, false), (Query::Q1, true), (Query::Q6, false), (Query::Q6, true)]
    {
        let bases = vec![cases.len()];
        for of in moves {
            let labels = labels(query, writes, *of);
            cases.push(Case { labels, bases: bases.clone(), at_rest: Vec::new() });
            work.push((query, writes, *of));
        }
    }
    (work, cases)
}

/// The thread that writes into L_ORDERKEY.
fn load(writer_cpu: usize, seed: u64) -> Load {
    let writing = Writing {
        pattern: Pattern::Steady { rate: Rate::Max, rows: Rows::Uniform },
        writers: 1,
        readers: 0,
        kernel: false,
        writer_cpu: Some(writer_cpu),
        total: Some(WRITES),
    };
    Load { work: Work::Write(writing), seed }
}

fn labels(query: Query, writes: bool, of: Move) -> Vec<Value> {
    let way = match of {
        Move::Stay => vec!["none".into(), Value::Unknown, Value::Unknown],
        Move::Balancing => vec![Balancing::NAME.into(), Value::Unknown, Value::Unknown],
        Move::By(way) => way.labels(),
    };
    let writes = if writes { "10m" } else { "none" };
    [vec![query.name().into(), writes.into()], way].concat()
}

/// From which query on each migration has paid, in sentences: the first query by whose end the
/// interval of the ratio to the table that stays is below 1. Without enough rounds for intervals,
/// one sentence says so.
pub fn pays(part: &Part) -> Vec<String> {
    if part.rounds.count() < LEAST_VALUES {
        let few =
            format!("fewer than {LEAST_VALUES} rounds do not tell from which query on it pays");
        return vec![format!("{}: {few}", part.heading)];
    }
    const FIRST_TO_FIFTH: [usize; QUERIES] = [1, 2, 3, 4, 0];
    let case = |at: usize| {
        let case = &part.cases[at];
        let base = *case.bases.first().filter(|base| **base != at)?;
        let pays = |metric: &usize| {
            let ratio = |round: &Vec<Placed<Outcome>>| {
                round[at].of.numbers[*metric] / round[base].of.numbers[*metric]
            };
            let ratios: Vec<f64> = part.rounds.whole().iter().map(ratio).collect();
            let interval = Interval::of_median(&ratios, part.rounds.method().seed);
            interval.is_some_and(|of| of.high < 1.0)
        };
        let which = FIRST_TO_FIFTH.iter().position(pays);
        let pays = which.map_or("does not pay within five queries".to_owned(), |which| {
            format!("pays from query {} on", which + 1)
        });
        Some(format!("{}, {}: {pays}", part.heading, part::name(case)))
    };
    (0..part.cases.len()).filter_map(case).collect()
}

fn copy_words(from: &[AtomicU64], to: &[AtomicU64]) {
    use std::sync::atomic::Ordering::Relaxed;
    to.iter().zip(from).for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
}

/// The end of each query since the start, and whether all answers were right.
struct Queried {
    ends_ns: [f64; QUERIES],
    wrong: u64,
}

/// A migration that is about to start.
enum Ready<'a> {
    Stay,
    Call(Trip<'a>),
    Leap(Prepared<'a>),
    /// The setting is on until the value is dropped.
    Balancing(&'a Balancing, Box<dyn Any>),
}

/// A migration that has ended, or was given up: its time, and the share of pages that moved.
struct Migrated {
    ns: f64,
    moved: f64,
}

impl Migrated {
    const NONE: Migrated = Migrated { ns: f64::NAN, moved: f64::NAN };
}

/// Runs `query` five times, after `start`.
fn queries(
    query: Query,
    table: (&[AtomicU64], &Layout),
    expected: &Answer,
    start: Instant,
) -> Queried {
    // SAFETY: the only thread that writes to the table writes L_ORDERKEY.
    let columns = unsafe { columns(table.0, table.1) };
    let mut queried = Queried { ends_ns: [f64::NAN; QUERIES], wrong: 0 };
    for end_ns in &mut queried.ends_ns {
        let answer = query.answer(columns);
        *end_ns = start.elapsed().as_nanos() as f64;
        queried.wrong += u64::from(answer != *expected);
    }
    queried
}

impl Tables {
    /// The index of a move's memory among the shadows.
    fn place(of: Move) -> usize {
        match of {
            Move::Stay => 0,
            Move::By(way) => usize::from(way.is_private()),
            Move::Balancing => 2,
        }
    }

    fn words(&self, of: Move) -> Result<&[AtomicU64], Error> {
        match of {
            Move::Stay => self.ways.region_words(),
            Move::By(way) => self.ways.words(way),
            Move::Balancing => {
                Ok(self.balancing.as_ref().expect("only then it has a turn").words())
            }
        }
    }

    /// Everything that a migration needs before it starts, so that the writer's ten million writes
    /// are still to come then.
    fn ready(&self, of: Move) -> Result<Ready<'_>, Error> {
        Ok(match of {
            Move::Stay => Ready::Stay,
            Move::By(Way::Call(call)) => Ready::Call(self.ways.trip(call)?),
            Move::By(way) => Ready::Leap(self.ways.prepare(way, Some(LIMIT))?),
            Move::Balancing => {
                let balancing = self.balancing.as_ref().expect("only then it has a turn");
                Ready::Balancing(balancing, balancing.on()?)
            }
        })
    }

    /// Starts the migration, queries, and waits for its end.
    fn run(
        &self,
        ready: Ready<'_>,
        ask: &dyn Fn(Instant) -> Result<Queried, Error>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Queried, Migrated), Error> {
        match ready {
            Ready::Stay => Ok((ask(Instant::now())?, Migrated::NONE)),
            Ready::Call(mut trip) => {
                let cpus = &self.cpus;
                let (queried, called) = std::thread::scope(|scope| {
                    let start = Instant::now();
                    let calling = scope.spawn(|| {
                        // Where it is refused, the thread calls from another CPU.
                        let _ = pageleap_sys::set_affinity(0, cpus);
                        trip.call()
                    });
                    let queried = ask(start);
                    let called = calling.join();
                    (queried, called.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                });
                let moved = trip.moved(called?)?;
                let share = moved.on_target as f64 / moved.pages as f64;
                Ok((queried?, Migrated { ns: moved.ns as f64, moved: share }))
            }
            Ready::Leap(Prepared { start: begin, pages, .. }) => {
                let start = Instant::now();
                let job = begin()?;
                let queried = ask(start);
                finish(&job, |_| if stopped() { Wish::Cancel } else { Wish::GoOn });
                let report = job.wait();
                let moved = report.pages.migrated as f64 / pages as f64;
                Ok((queried?, Migrated { ns: report.migrate_ns as f64, moved }))
            }
            Ready::Balancing(balancing, on) => {
                let queried = ask(Instant::now())?;
                // The queries are over, so nothing moves from now on.
                let balanced = balancing.wait(Duration::ZERO, stopped)?;
                drop(on);
                let moved = balanced.placement.on_target as f64 / balanced.placement.pages() as f64;
                Ok((queried, Migrated { ns: f64::NAN, moved }))
            }
        }
    }

    /// Words that are not as they must be. They get the right values.
    fn lost(&mut self, of: Move) -> Result<u64, Error> {
        use std::sync::atomic::Ordering::Relaxed;
        let place = Tables::place(of);
        let mut shadows = std::mem::replace(&mut self.shadows[place], Shadow::of(&[]));
        let words = self.words(of)?;
        let keys = order_keys(words, &self.layout);
        let mut lost = shadows.lost(keys);
        if lost > 0 {
            shadows.accept(keys);
        }
        let rest = &words[words.len() - self.others.len()..];
        for (word, value) in rest.iter().zip(&self.others) {
            if word.load(Relaxed) != *value {
                word.store(*value, Relaxed);
                lost += 1;
            }
        }
        self.shadows[place] = shadows;
        Ok(lost)
    }
}

impl Scene for Tables {
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
        let (query, writes, of) = self.work[case];
        let place = Tables::place(of);
        let mut shadow = std::mem::replace(&mut self.shadows[place], Shadow::of(&[]));
        let load = match writes {
            true => self.load,
            false => Load { work: Work::Rest, seed: self.load.seed },
        };
        let ran = (|| {
            let table = (self.words(of)?, &self.layout);
            let (cpu, expected) = (self.cpu, &self.answers[query as usize]);
            let ask = |start| on_cpu(cpu, || queries(query, table, expected, start));
            let ready = self.ready(of)?;
            let keys = order_keys(table.0, table.1);
            run_beside(&load, keys, &mut shadow, |_| self.run(ready, &ask, stopped))
        })();
        self.shadows[place] = shadow;
        let lost = self.lost(of)?;
        let back = match of {
            Move::Stay => Ok(()),
            Move::By(way) => self.ways.bring_back(way),
            Move::Balancing => {
                self.balancing.as_ref().expect("only then it has a turn").bring_back()
            }
        };
        let ((queried, migrated), _) = ran.map_err(|error: Error| error.with_lost(lost))?;
        let lost = lost + queried.wrong;
        let [first, second, third, fourth, fifth] = queried.ends_ns;
        let numbers = vec![fifth, first, second, third, fourth, migrated.ns, migrated.moved];
        let outcome = with_lost(Outcome { numbers, lost }, back)?;
        Ok((!stopped() || lost > 0).then_some(outcome))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use pageleap::topology::Topology;

    use super::*;

    fn tables() -> Tables {
        let topology = Topology::read().unwrap();
        let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        let cpus = topology.allowed_cpus().to_vec();
        let (cpu, page, bytes) = (cpus[0], PageSize::Base, 2 << 20);
        let writer_cpu = *cpus.last().unwrap();
        let setting = ways::Setting { bytes, page, from: node, to: node, cpu, cpus, seed: 5 };
        Tables::new(setting, writer_cpu, None, || Ok::<_, Error>(())).unwrap()
    }

    #[test]
    fn queries_and_writes_beside_each_move_lose_nothing() {
        let mut tables = tables();
        let moves = tables.cases.len() / 4;
        assert!(moves >= 4, "{:?}", tables.cases);
        for case in 0..tables.cases.len() {
            let Outcome { numbers, lost } = tables.measure(case, &|| false).unwrap().unwrap();
            let (_, _, of) = tables.work[case];
            assert_eq!(lost, 0, "{:?}", tables.cases[case]);
            let ends = [&numbers[1..QUERIES], &numbers[..1]].concat();
            assert!(ends.is_sorted() && ends[0] > 0.0, "{ends:?}");
            match of {
                Move::Stay => assert!(numbers[6].is_nan()),
                _ => assert_eq!(numbers[6], 1.0, "{:?}", tables.cases[case]),
            }
            // Each case is compared with the table that stays, with the same query and writes.
            let base = &tables.cases[tables.cases[case].bases[0]];
            assert_eq!(base.labels[..2], tables.cases[case].labels[..2]);
            assert_eq!(base.labels[2], "none".into());
        }
    }

    #[test]
    fn a_wrong_byte_of_any_column_is_lost_once() {
        let mut tables = tables();
        let auto = tables.work.iter().position(|(query, writes, of)| {
            let is_auto = matches!(of, Move::By(Way::Leap { area: None, .. }));
            *query == Query::Q6 && !writes && is_auto
        });
        let auto = auto.unwrap();
        let words = tables.ways.region_words().unwrap();
        // L_ORDERKEY, and the comments.
        for at in [3, tables.layout.bytes() / size_of::<u64>() - 9] {
            words[at].fetch_add(1, Ordering::Relaxed);
        }
        let mut lost = || tables.measure(auto, &|| false).unwrap().unwrap().lost;
        assert_eq!([lost(), lost()], [2, 0]);
    }

    #[test]
    fn a_migration_pays_from_the_query_whose_end_it_brings_forward() {
        let (_, cases) = all_cases(&[Move::Stay, Move::Balancing]);
        let method = crate::method::Method::exactly(6, 0, 1);
        let mut part = Part::new("all".to_owned(), cases[..2].to_vec(), method);
        assert!(pays(&part)[0].contains("fewer than 6 rounds"));
        while let Some(turn) = part.next_turn() {
            let ends = [[10.0, 20.0, 30.0, 40.0, 50.0], [15.0, 22.0, 29.0, 36.0, 43.0]];
            let [first, second, third, fourth, fifth] = ends[turn.thing];
            let numbers = vec![fifth, first, second, third, fourth, 1.0, 1.0];
            part.add(turn, Outcome { numbers, lost: 0 });
        }
        assert_eq!(pays(&part), ["all, Q1 none automatic balancing: pays from query 3 on"]);
    }
}
