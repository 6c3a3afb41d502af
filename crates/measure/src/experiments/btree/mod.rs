//! Queries on a B+-tree beside migrations of its leaves (section 5 of *Revisiting Page Migration In
//! Main-Memory Databases For Modern Hardware*, the paper of `move_pages2`).
//!
//! Threads run a mix of queries like that of YCSB ([`Mix`]) on a tree whose nodes have 4 KB
//! (`olc`). A share of all queries are *migration queries* ([`Share`]): the thread moves
//! some leaves to the other node by itself, and its next migration query brings them back. How many
//! queries are left, and how many pages move? The base is the same mix without migrations, on the
//! same memory.
//!
//! Where the paper is silent, this is the choice here:
//!
//! * **Keys** are Zipfian with an exponent of 0.99, as in YCSB, and hot keys are scattered over the
//!   leaves. The paper says "YCSB-like".
//! * **A migration query** moves [`PAGES`] leaves that follow each other in the order of keys. The
//!   paper moves "a set of index nodes". Inner nodes stay here: they are half a percent.
//! * **Places** ([`Leaves`]). Neighbours lie side by side, as in a region that a program fills in
//!   blocks, or apart, as from `malloc`.
//! * **Load.** The tree is loaded with leaves that are 70 % full, as after random insertions. The
//!   paper has 300 to 500 million records; here the size of the memory decides.
//!
//! Values are functions of their key and of how often it was updated. Each look-up and each entry
//! of a scan is checked at once, and after each turn all entries are compared with the records of
//! the threads (`verify`).
//!
//! * `keys`: keys and their values.
//! * `shelf`: which leaf lies where, and loading.
//! * `ways`: the ways to move leaves.
//! * `queries`: mixes, choices of keys, and the thread that runs queries.
//! * `scene`: the turns of all ways.

mod keys;
mod queries;
mod scene;
mod shelf;
#[cfg(test)]
mod tests;
mod verify;
mod ways;

use std::time::Duration;

pub use self::queries::{Mix, Share};
pub use self::scene::{Setting, Trees};
pub use self::shelf::Leaves;
pub use self::ways::{Way, ways};
use super::drawing::{Drawing, Of, Over};
use super::{About, Label, Metric, fine_time, label, rate, share, time};

/// The experiment.
pub const ABOUT: About = About {
    name: "btree",
    title: "Queries on a B+-tree beside migrations of its leaves",
    figure: "Revisiting Page Migration, Figures 3 to 6",
    needs: "1 GB; 2 GB on two nodes, which the kernel's calls need",
    takes: "5 min for each mix and share of migrations",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 2] = [
    Drawing {
        title: "Time by queries, compared with the same queries without migrations",
        about: "Lower is better. Each dot is a round.",
        over: Over::Rows,
        of: Of::Ratio,
        split: &[],
        theirs: &[],
    },
    Drawing {
        title: "Pages that moved, per second",
        about: "Higher is better. Each dot is a round.",
        over: Over::Rows,
        of: Of::Metric("pages"),
        split: &[],
        theirs: &[],
    },
];

const LABELS: [Label; 3] = [
    label("way", "way", ""),
    label("leaves", "leaves", "the leaves of a migration lie side by side, or apart"),
    label("batch_pages", "batch", "pages that a call moves, if that is set"),
];

const METRICS: [Metric; 7] = [
    fine_time(
        "query",
        "query",
        "time by queries of all threads, migrations not counted as queries",
    ),
    rate("queries", "queries", "queries per second, of all threads"),
    rate("pages", "pages", "pages that moved, per second"),
    share("moved", "moved", "pages that moved, of those that were to move"),
    time("migration", "migration", "mean time of a migration query"),
    time("query_p50", "", ""),
    time("query_p99", "p99", "time of a query that 99 of 100 do not exceed"),
];

/// The leaves of a migration query, if the tree has enough.
pub const PAGES: usize = 1024;

/// How long the threads run in each turn.
pub const WINDOW: Duration = Duration::from_secs(1);
