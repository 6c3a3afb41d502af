//! Writes for some seconds at a requested rate, beside a migration that starts with them (Figure 6
//! of the paper): how many of the writes are done, of those that were requested?
//!
//! A migration costs writes while it runs, and pays afterwards, when the memory is local. So the
//! memory that stays on its node is the base: a ratio above 1 is a gain. On a machine with one node
//! a migration cannot pay, and the ratio is its cost.

use std::time::Duration;

use super::drawing::{Drawing, Of, Over, Pages, Published, Theirs, WAITS};
use super::ways::LABELS;
use super::writes::GAPS;
use super::{About, Metric, share, time};
use crate::load::Rate;

/// The experiment.
pub const ABOUT: About = About {
    name: "sustained",
    title: "Writes for some seconds, beside a migration",
    figure: "Taking the Leap, Figure 6",
    needs: "6 GB; 9 GB on two nodes, which the kernel's calls and balancing need",
    takes: "12 min for each page size and rate",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 2] = [
    Drawing {
        title: "Writes that were done, over the requested rate",
        about: "Higher is better.",
        over: Over::Part("requested writes"),
        of: Of::Metric("kept"),
        split: &[],
        theirs: &FIGURE_6,
    },
    WAITS,
];

/// At 6 million requested writes per second `page_leap` sustains all of them, and automatic NUMA
/// balancing 65 % (section 6).
const FIGURE_6: [Theirs; 2] = [
    Theirs {
        name: "page_leap()",
        source: "Fig. 6",
        pages: Pages::Small,
        numbers: Published::At(&[(6e6, 1.0)]),
    },
    Theirs {
        name: "automatic balancing",
        source: "Fig. 6",
        pages: Pages::Small,
        numbers: Published::At(&[(6e6, 0.65)]),
    },
];

const METRICS: [Metric; 7] = [
    share("kept", "kept", "writes that were done, of those that were requested"),
    time("migrate", "migrated", "until the last page had moved, or until the time-out of 10 s"),
    share("moved", "moved", "pages that moved, of all"),
    GAPS[0],
    GAPS[1],
    GAPS[2],
    GAPS[3],
];

/// How long threads write, as in the paper.
pub const WINDOW: Duration = Duration::from_secs(10);

/// Writes per second.
pub const RATES: [Rate; 6] = [
    Rate::PerSecond(1_000_000),
    Rate::PerSecond(2_000_000),
    Rate::PerSecond(4_000_000),
    Rate::PerSecond(6_000_000),
    Rate::PerSecond(8_000_000),
    Rate::PerSecond(10_000_000),
];
