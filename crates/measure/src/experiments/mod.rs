//! The experiments of *Taking the Leap* on this machine, each with its rivals, and one of another
//! paper ([`btree`]).
//!
//! An experiment is a list of scenes, one after the other: memory of one page size, say. A
//! [`Scene`] has cases, such as a way to move the memory, and measures them one at a time. The
//! command gives them turns ([`crate::method`]), and [`Results`] makes a document of all rounds.
//!
//! ```text
//! Scene::cases ──► Rounds (method) ──► Scene::measure ──► Outcome ──► Results ──► Document
//! ```
//!
//! * [`access`]: local and remote access (Figure 1).
//! * [`copy`]: a copy into fresh and into pooled memory, and the kernel's calls (Figure 2).
//! * [`quiet`]: all ways to move memory while nothing else runs, over the size of areas (Figure 4).
//! * [`ways`]: the ways to move memory.
//! * [`writes`]: the same while a thread writes (Figures 5 and 7, Table 2).
//! * [`sustained`]: writes for some seconds, beside a migration (Figure 6).
//! * [`tpch`]: queries over a table that moves meanwhile (Figure 8).
//! * [`btree`]: queries on a B+-tree whose leaves move meanwhile (of *Revisiting Page Migration*).
//! * [`scale`]: the same by several threads, over the size of the memory.
//! * [`memory`]: the memory that moves, and its contents.
//! * [`drawing`]: which rows become which plot, and the published numbers beside them.
//! * [`results`]: figures of rows, and the document.
//!
//! A further experiment is a file here, and a line in the command's list.

pub mod access;
pub mod btree;
pub mod copy;
pub mod drawing;
pub mod memory;
mod part;
mod plots;
pub mod quiet;
pub mod results;
pub mod scale;
mod summary;
pub mod sustained;
pub mod tpch;
pub mod ways;
pub mod writes;

use self::drawing::Drawing;
pub use self::part::{Part, Position};
pub use self::results::Results;
use crate::Error;
use crate::document::Value;

/// The unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// The same with decimals, for an operation of some hundred.
    FineNs,
    /// A part of a whole, which may be more than 1 if the whole was exceeded.
    Share,
    /// Per second. More is better, so it is never the first metric, by which ratios are formed.
    PerSecond,
}

impl Unit {
    /// The end of names in this unit, for programs.
    pub fn suffix(self) -> &'static str {
        match self {
            Unit::Ns | Unit::FineNs => "_ns",
            Unit::Share => "_ratio",
            Unit::PerSecond => "_per_s",
        }
    }

    /// A number in this unit; unknown if it is infinite or none.
    pub fn value(self, number: f64) -> Value {
        match self {
            _ if !number.is_finite() => Value::Unknown,
            Unit::Ns => Value::Ns(number.round() as u64),
            Unit::FineNs => Value::FineNs(number),
            Unit::Share => Value::Share(number),
            Unit::PerSecond => Value::PerSecond(number),
        }
    }
}

/// A number that each case has in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name for programs, without the unit.
    pub key: &'static str,
    /// Its name for people, one word.
    pub head: &'static str,
    /// The meaning of the head. Empty if the head is clear by itself.
    pub meaning: &'static str,
    /// Its unit.
    pub unit: Unit,
}

/// A time, in short.
pub const fn time(key: &'static str, head: &'static str, meaning: &'static str) -> Metric {
    Metric { key, head, meaning, unit: Unit::Ns }
}

/// A time with decimals, in short.
pub const fn fine_time(key: &'static str, head: &'static str, meaning: &'static str) -> Metric {
    Metric { key, head, meaning, unit: Unit::FineNs }
}

/// A share, in short.
pub const fn share(key: &'static str, head: &'static str, meaning: &'static str) -> Metric {
    Metric { key, head, meaning, unit: Unit::Share }
}

/// A rate, in short.
pub const fn rate(key: &'static str, head: &'static str, meaning: &'static str) -> Metric {
    Metric { key, head, meaning, unit: Unit::PerSecond }
}

/// A property that tells cases apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Its name for programs, with the unit.
    pub key: &'static str,
    /// Its name for people, one word.
    pub head: &'static str,
    /// The meaning of the head. Empty if the head is clear by itself.
    pub meaning: &'static str,
}

/// A label, in short.
pub const fn label(key: &'static str, head: &'static str, meaning: &'static str) -> Label {
    Label { key, head, meaning }
}

/// A property of experiments that measure memory of several page sizes.
pub const PAGE: Label = label("page_size", "page", "");

/// One of the compared things.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its properties: a value for each label of the experiment.
    pub labels: Vec<Value>,
    /// The cases that it is compared with: the one of them with the lowest median is the base.
    /// Empty: with none. Beside a load these are memcpys beside the same load.
    pub bases: Vec<usize>,
    /// For a case beside a load, memcpys at rest: the one with the lowest median is its second
    /// base. Empty: it has none.
    pub at_rest: Vec<usize>,
}

/// One measurement of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// A number for each metric of the experiment. NaN is an unknown one. The first one counts.
    pub numbers: Vec<f64>,
    /// Words with a wrong value afterwards.
    pub lost: u64,
}

/// The properties of an experiment that do not depend on the machine.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Its name in commands.
    pub name: &'static str,
    /// The question that it answers, for the title of its table.
    pub title: &'static str,
    /// Figure or table of the paper.
    pub figure: &'static str,
    /// The memory and the nodes that it needs with its default size.
    pub needs: &'static str,
    /// How long it takes at most, with the default bound of time.
    pub takes: &'static str,
    /// The properties that tell cases apart, in the order of columns.
    pub labels: &'static [Label],
    /// The numbers of each case. The first one counts: ratios are between such numbers.
    pub metrics: &'static [Metric],
    /// Which rows become which plot.
    pub plots: &'static [Drawing],
}

impl About {
    /// Whether more of the first number is better: a share of requests, and no time.
    pub fn more_is_better(&self) -> bool {
        self.metrics.first().is_some_and(|metric| metric.unit == Unit::Share)
    }
}

/// Memory and threads that are ready, and the cases that they can measure.
pub trait Scene {
    /// The compared things.
    fn cases(&self) -> &[Case];

    /// Things that cannot be measured here, each with the reason.
    fn left_out(&self) -> &[String];

    /// Measures a case. Leaves the scene as it was. `stopped` tells whether a signal asks for the
    /// end; a measurement of more than a second returns `None` soon after that.
    ///
    /// # Errors
    /// The machine or the library refuses a step. The memory keeps its contents.
    fn measure(
        &mut self,
        case: usize,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Outcome>, Error>;
}
