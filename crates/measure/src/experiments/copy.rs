//! A copy into fresh and into pooled memory, beside the ways to move the same bytes (Figure 2 of
//! the paper).
//!
//! A copy is no replacement for a migration: the data has a new address afterwards, and writes
//! meanwhile are lost. It is the least that a migration has to do.

use pageleap::{COPY_METHODS, CopyLoop, CopyMethod, EngineChoice, MemoryEngine};

use super::About;
use super::drawing::{Drawing, MOVE_PAGES, Of, Over};
use super::ways::{LABELS, METRICS, Way};
use crate::rivals::calls::Call;

/// The experiment.
pub const ABOUT: About = About {
    name: "copy",
    title: "A copy into fresh and into pooled memory, and migrations of the same bytes",
    figure: "Taking the Leap, Figure 2",
    needs: "4 GB; 8 GB more for the kernel's own migration on one node; a second node for its calls",
    takes: "5 min for each page size",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 2] = [
    Drawing {
        title: "Time compared with the fastest copy into mapped memory",
        about: "Lower is better. Each dot is a round; ratios are formed within a round.",
        over: Over::Rows,
        of: Of::Ratio,
        split: &[],
        theirs: &MOVE_PAGES,
    },
    Drawing {
        title: "Time of each way",
        about: "Lower is better. Each dot is a round.",
        over: Over::Rows,
        of: Of::Metric("time"),
        split: &[],
        theirs: &[],
    },
];

/// Copies memory into fresh memory, besides the library's loop. Page faults take most of the time,
/// so that the size of the steps hardly matters.
const MEMCPY: CopyMethod = CopyMethod { by: CopyLoop::Memcpy, step_bytes: 1 << 20 };

/// The ways of the scene in which the kernel's own migration is timed on one node.
pub fn by_compaction() -> Vec<Way> {
    let auto = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
    Way::copies().chain([auto, Way::Compaction]).collect()
}

/// The ways that are compared.
pub fn ways() -> Vec<Way> {
    let auto = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
    Way::copies()
        .chain([MEMCPY, COPY_METHODS[0]].map(Way::FreshCopy))
        .chain([auto])
        .chain(MemoryEngine::ALL.map(Way::Private))
        .chain(Call::ALL.map(Way::Call))
        .collect()
}
