//! Memory that moves while a thread writes to it.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pageleap::CopyMethod;

use super::balancing::{Balancing, Switch};
use super::{BESIDE_TIME, LIMIT, Purpose, Setting, Writes};
use crate::Error;
use crate::document::Value;
use crate::experiments::ways::{Prepared, Way, Ways, with_lost};
use crate::experiments::{Case, Outcome, Scene};
use crate::leap::{Watched, Wish, watch};
use crate::load::{Beside, Load, Log, Shadow, Work, Writing, run_beside};
use crate::matrix::on_cpu;
use crate::memcpy::METHODS;
use crate::phase::{Phase, Spread};
use crate::rivals::calls::Call;

/// How often it is looked whether to stop, while nothing else happens.
const LOOK: Duration = Duration::from_millis(10);

/// A turn of a case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// A copy while nothing else runs.
    AtRest(CopyMethod),
    /// A copy beside the load.
    Beside(CopyMethod),
    /// The load alone: the memory stays.
    Stay,
    /// A way to move the memory.
    Migration(Way),
    /// Automatic NUMA balancing.
    Balancing,
}

impl Turn {
    fn labels(self) -> Vec<Value> {
        let (way, when) = match self {
            Turn::AtRest(method) => (Way::Copy(method), ", at rest"),
            Turn::Beside(method) => (Way::Copy(method), ", beside"),
            Turn::Migration(way) => (way, ""),
            Turn::Stay => return vec!["none".into(), Value::Unknown, Value::Unknown],
            Turn::Balancing => {
                return vec![Balancing::NAME.into(), Value::Unknown, Value::Unknown];
            }
        };
        let mut labels = way.labels();
        labels[0] = format!("{}{when}", way.name()).into();
        labels
    }
}

/// The numbers of a turn; NaN is an unknown one. Times are in nanoseconds.
pub(super) struct Numbers {
    pub ns: f64,
    /// The share of pages that moved.
    pub moved: f64,
    /// The share of the requested writes that were done.
    pub kept: f64,
    /// Bytes copied again / all bytes.
    pub extra: f64,
    /// Bytes copied, retries included / all bytes.
    pub copied: f64,
    /// Gaps of the writer.
    pub gaps: Option<Spread>,
    /// The time to populate a reserve.
    pub populate_ns: f64,
}

impl Numbers {
    const NONE: Numbers = Numbers {
        ns: f64::NAN,
        moved: f64::NAN,
        kept: f64::NAN,
        extra: f64::NAN,
        copied: f64::NAN,
        gaps: None,
        populate_ns: f64::NAN,
    };
}

/// Memory that moves while a thread writes to it.
pub struct Loaded {
    pub(super) ways: Ways,
    writes: Writes,
    load: Load,
    /// The load beside automatic balancing.
    local_load: Load,
    cpu: usize,
    purpose: Purpose,
    /// The expected words of the region, and of the private memory.
    shadows: [Option<Shadow>; 2],
    balancing: Option<Balancing>,
    left_out: Vec<String>,
    pub(super) turns: Vec<Turn>,
    cases: Vec<Case>,
}

/// The work of a load beside something, and the result of that.
struct Done<T> {
    of: T,
    took: Duration,
    written: u64,
    log: Log,
}

impl Loaded {
    /// Bytes on the source and on the destination that these ways need, with a shadow copy of each
    /// memory, and with memory that is balanced.
    pub fn needs(bytes: u64, ways: &[Way], is_balanced: bool) -> [u64; 2] {
        let [from, to] = Ways::needs(bytes, ways);
        let balanced = if is_balanced { bytes } else { 0 };
        // The writer's node is the destination.
        [from + balanced, to + balanced + Loaded::shadows(bytes, ways, is_balanced)]
    }

    /// Bytes of the shadow copies.
    pub fn shadows(bytes: u64, ways: &[Way], is_balanced: bool) -> u64 {
        let [from, _] = Ways::needs(bytes, ways);
        from + if is_balanced { bytes } else { 0 }
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
        let Setting { ways, writes, writer_cpu, local_cpu, purpose } = setting;
        on_cpu(writer_cpu, || ())?;
        let (bytes, page, nodes) = (ways.bytes as usize, ways.page, [ways.from, ways.to]);
        let (cpu, seed) = (ways.cpu, ways.seed);
        let ways = Ways::new(ways, all, &go_on)?;
        let mut left_out = ways.left_out().to_vec();
        go_on()?;
        let balancing = switch.and_then(|switch| {
            let balancing = Balancing::new(bytes, page, nodes, switch);
            let why = |why| format!("{page}, {}: {why}", Balancing::NAME);
            balancing.map_err(|error| left_out.push(why(error))).ok()
        });
        let mut turns: Vec<Turn> = match purpose {
            Purpose::Migrations => {
                METHODS.map(Turn::AtRest).into_iter().chain(METHODS.map(Turn::Beside)).collect()
            }
            Purpose::Window(_) => vec![Turn::Stay],
        };
        turns.extend(ways.ways().iter().copied().map(Turn::Migration));
        turns.extend(balancing.is_some().then_some(Turn::Balancing));
        let copies = METHODS.len();
        let (bases, at_rest) = match purpose {
            Purpose::Migrations => ((copies..2 * copies).collect(), (0..copies).collect()),
            Purpose::Window(_) => (vec![0], Vec::new()),
        };
        let case = |turn: &Turn| Case {
            labels: turn.labels(),
            bases: Vec::clone(&bases),
            at_rest: Vec::clone(&at_rest),
        };
        let cases = turns.iter().map(case).collect();
        Ok(Loaded {
            ways,
            writes,
            load: writes.load(writer_cpu, seed),
            local_load: writes.load(local_cpu.unwrap_or(writer_cpu), seed),
            cpu,
            purpose,
            shadows: [None, None],
            balancing,
            left_out,
            turns,
            cases,
        })
    }

    fn kept<T>(&self, done: &Done<T>) -> f64 {
        let requested = self.writes.requested(done.took);
        requested.map_or(f64::NAN, |requested| done.written as f64 / requested)
    }

    fn outcome(&self, numbers: &Numbers, lost: u64) -> Outcome {
        Outcome { numbers: self.purpose.numbers(numbers), lost }
    }

    fn at_rest(&self, method: CopyMethod) -> Result<Outcome, Error> {
        let ns = self.ways.copy(method)?.numbers[0];
        Ok(self.outcome(&Numbers { ns, ..Numbers::NONE }, 0))
    }

    fn beside(&mut self, method: CopyMethod) -> Result<Outcome, Error> {
        let cpu = self.cpu;
        let target = self.ways.target()?;
        let words = self.ways.words(Way::Copy(method))?;
        let shadow = &mut self.shadows[0];
        let (done, lost) = run(&self.load, words, shadow, Phase::Memcpy, |_, start| {
            on_cpu(cpu, || {
                let mut copies = 0;
                while copies == 0 || start.elapsed() < BESIDE_TIME {
                    target.copy(method);
                    copies += 1;
                }
                copies
            })
        })?;
        let ns = done.took.as_nanos() as f64 / f64::from(done.of);
        let (kept, gaps) = (self.kept(&done), done.log.gaps.spread(Phase::Memcpy));
        Ok(self.outcome(&Numbers { ns, kept, gaps, ..Numbers::NONE }, lost))
    }

    /// The load alone.
    fn stay(&mut self, window: Duration, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let words = self.ways.words(Way::Copy(METHODS[0]))?;
        let shadow = &mut self.shadows[0];
        let (done, lost) = run(&self.load, words, shadow, Phase::During, |_, start| {
            rest(start, window, stopped);
            Ok(())
        })?;
        let (kept, gaps) = (self.kept(&done), done.log.gaps.spread(Phase::During));
        Ok(self.outcome(&Numbers { kept, gaps, ..Numbers::NONE }, lost))
    }

    /// Waits until automatic NUMA balancing has moved all pages, or until the time-out.
    fn balance(&mut self, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let window = self.purpose.window();
        let mut balancing = self.balancing.take().expect("only then it has a turn");
        let on = balancing.on()?;
        let mut shadow = balancing.shadow.take();
        let ran =
            run(&self.local_load, balancing.words(), &mut shadow, Phase::During, |_, start| {
                let balanced = balancing.wait(window.unwrap_or(LIMIT), stopped)?;
                let took = start.elapsed();
                window.inspect(|window| rest(start, *window, stopped));
                Ok((balanced, took))
            });
        drop(on);
        balancing.shadow = shadow;
        let back = balancing.bring_back();
        self.balancing = Some(balancing);
        let (done, lost) = ran?;
        let (balanced, took) = &done.of;
        let ns = balanced.ns.unwrap_or(took.as_nanos() as u64) as f64;
        let moved = balanced.placement.on_target as f64 / balanced.placement.pages() as f64;
        let (kept, gaps) = (self.kept(&done), done.log.gaps.spread(Phase::During));
        // The kernel does not tell how often it copied a page, and waits for accesses.
        with_lost(self.outcome(&Numbers { ns, moved, kept, gaps, ..Numbers::NONE }, lost), back)
    }

    fn call(&mut self, call: Call, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let (cpu, window) = (self.cpu, self.purpose.window());
        let words = self.ways.words(Way::Call(call))?;
        let mut trip = self.ways.trip(call)?;
        let shadow = &mut self.shadows[1];
        let (done, lost) = run(&self.load, words, shadow, Phase::During, |_, start| {
            let called = on_cpu(cpu, || trip.call())??;
            window.inspect(|window| rest(start, *window, stopped));
            Ok(called)
        })?;
        let placed = trip.moved(done.of);
        let back = trip.bring_back();
        drop(trip);
        let ns = done.of.ns as f64;
        let placed = placed.map_err(|error| error.with_lost(lost))?;
        let moved = placed.on_target as f64 / placed.pages as f64;
        let (kept, gaps) = (self.kept(&done), done.log.gaps.spread(Phase::During));
        // The kernel does not tell how often it copied a page: at least once, if it moved.
        let copied = moved;
        let numbers = Numbers { ns, moved, kept, copied, gaps, ..Numbers::NONE };
        with_lost(self.outcome(&numbers, lost), back)
    }

    fn migration(&mut self, way: Way, stopped: &dyn Fn() -> bool) -> Result<Outcome, Error> {
        let window = self.purpose.window();
        let words = self.ways.words(way)?;
        let Prepared { start: begin, pages, populate_ns } = self.ways.prepare(way, Some(LIMIT))?;
        let shadow = &mut self.shadows[usize::from(way.is_private())];
        let (mut done, lost) = run(&self.load, words, shadow, Phase::Before, |beside, start| {
            let look = |_: &_| if stopped() { Wish::Cancel } else { Wish::GoOn };
            let leap = watch(begin, beside, look)?;
            window.inspect(|window| rest(start, *window, stopped));
            Ok(leap)
        })?;
        let back = self.ways.bring_back(way);
        if window.is_none() {
            // Watching took time before and after the leap, too.
            (done.took, done.written) = (done.of.elapsed, done.of.writes);
        }
        let Watched { report, elapsed, .. } = &done.of;
        let is_complete = report.ended.is_completed() && report.pages.migrated == pages;
        let ns = if is_complete { report.migrate_ns } else { elapsed.as_nanos() as u64 } as f64;
        let bytes = self.ways.bytes() as f64;
        let numbers = Numbers {
            ns,
            moved: report.pages.migrated as f64 / pages as f64,
            kept: self.kept(&done),
            extra: report.bytes_recopied as f64 / bytes,
            copied: report.bytes_copied as f64 / bytes,
            gaps: match window {
                // All of the window, as for the others.
                Some(_) => done.log.gaps.spread_of_all(&[Phase::During, Phase::After]),
                None => done.log.gaps.spread(Phase::During),
            },
            populate_ns: if populate_ns > 0.0 { populate_ns } else { f64::NAN },
        };
        with_lost(self.outcome(&numbers, lost), back)
    }
}

/// Runs `body` beside the load, in `phase`. Returns the result of both, and the words that do not
/// have the last value that was written to them. Expects their present values from then on, so that
/// the next turn is not blamed for them.
fn run<T>(
    load: &Load,
    words: &[AtomicU64],
    shadow: &mut Option<Shadow>,
    phase: Phase,
    body: impl FnOnce(&Beside, Instant) -> Result<T, Error>,
) -> Result<(Done<T>, u64), Error> {
    let shadow = match shadow {
        Some(shadow) => shadow,
        // On the node of the writer, for all ways alike.
        None => shadow.insert(shadow_for(load, words)?),
    };
    let ran = run_beside(load, words, shadow, |beside| {
        beside.stage.enter(phase);
        let (start, before) = (Instant::now(), beside.completed());
        let of = body(beside, start)?;
        let (took, written) = (start.elapsed(), beside.completed() - before);
        beside.stage.enter(Phase::After);
        Ok::<_, Error>((of, took, written))
    });
    let lost = shadow.lost(words);
    if lost > 0 {
        shadow.accept(words);
    }
    let ((of, took, written), log) = ran.map_err(|error| error.with_lost(lost))?;
    Ok((Done { of, took, written, log }, lost))
}

/// A shadow of the words on the node of the writer, or anywhere if it may run on any CPU.
fn shadow_for(load: &Load, words: &[AtomicU64]) -> Result<Shadow, Error> {
    match load.work {
        Work::Write(Writing { writer_cpu: Some(cpu), .. }) => on_cpu(cpu, || Shadow::of(words)),
        _ => Ok(Shadow::of(words)),
    }
}

/// Sleeps until the window that began at `start` is over, or `stopped` is true.
fn rest(start: Instant, window: Duration, stopped: &dyn Fn() -> bool) {
    while let Some(left) = window.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
        if stopped() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
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
        let outcome = match (self.turns[case], self.purpose.window()) {
            (Turn::AtRest(method), _) => self.at_rest(method),
            (Turn::Beside(method), _) => self.beside(method),
            (Turn::Stay, window) => self.stay(window.unwrap_or_default(), stopped),
            (Turn::Balancing, _) => self.balance(stopped),
            (Turn::Migration(Way::Call(call)), _) => self.call(call, stopped),
            (Turn::Migration(way), _) => self.migration(way, stopped),
        }?;
        // A turn that a signal has cut short says nothing, except about lost words.
        Ok((!stopped() || outcome.lost > 0).then_some(outcome))
    }
}
