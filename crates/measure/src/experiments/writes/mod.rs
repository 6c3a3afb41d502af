//! Migrations while a thread writes to the memory at a requested rate (Figures 5 and 7 of the
//! paper), and their overhead over a memcpy of all bytes that they copied (Table 2).
//!
//! **The ratio that counts is that to a memcpy beside the same load, in the same round**: a memcpy
//! is slowed down by a writer, too, and so is everything that copies. The ratio to the memcpy at
//! rest stands beside it. A memcpy is no migration: it loses writes.
//!
//! A migration ends after [`LIMIT`], as in the paper, even if pages are left. The writer is on a
//! CPU of the destination. All its words are compared afterwards.

mod balancing;
mod scene;
#[cfg(test)]
mod tests;

use std::time::Duration;

use pageleap::{Engine, EngineChoice, MemoryEngine, PageSize};

pub(super) use self::balancing::Balancing;
pub use self::balancing::Switch;
pub use self::scene::Loaded;
use self::scene::Numbers;
use super::drawing::{Drawing, Of, Over, Pages, Published, TIME_OVER_AREAS, Theirs, WAITS};
use super::part::COPIED;
use super::quiet;
use super::ways::{self, LABELS, Way};
use super::{About, Metric, share, time};
use crate::figures::short;
use crate::load::{Load, Pattern, Rate, Rows, Work, Writing};
use crate::rivals::calls::Call;

/// The experiment with all loads.
pub const ABOUT: About = About {
    name: "writes",
    title: "Migrations while a thread writes to the memory",
    figure: "Taking the Leap, Figures 5 and 7",
    needs: "6 GB; 9 GB on two nodes, which the kernel's calls and balancing need",
    takes: "5 min for each page size and load",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &[TIME_OVER_AREAS, KEPT, WAITS],
};

/// The experiment of Table 2.
pub const OVERHEAD: About = About {
    name: "overhead",
    title: "The overhead of migrations at 100,000 writes per second",
    figure: "Taking the Leap, Table 2",
    needs: "6 GB; 9 GB on two nodes, which the kernel's calls and balancing need",
    takes: "5 min for each page size and load",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &[BEYOND, EXTRA, TIME_OVER_AREAS, WAITS],
};

const KEPT: Drawing = Drawing {
    title: "Writes meanwhile, of those that were requested, over the size of areas",
    about: "Higher is better. The samples of levels are at the right end.",
    over: Over::Label("area_bytes"),
    of: Of::Metric("kept"),
    split: &[],
    theirs: &[],
};

const BEYOND: Drawing = Drawing {
    title: "Time beyond a memcpy of all bytes that were copied, over the size of areas",
    about: "Lower is better. The memcpy is at rest, and copies retries, too.",
    of: Of::Beyond,
    theirs: &TABLE_2_TIMES,
    ..KEPT
};

const EXTRA: Drawing = Drawing {
    title: "Bytes that were copied again, of all bytes, over the size of areas",
    about: "Lower is better.",
    of: Of::Metric("extra_copied"),
    theirs: &TABLE_2_BYTES,
    ..KEPT
};

/// Numbers of Table 2, over the sizes of areas.
const fn table_2(pages: Pages, points: &'static [(f64, f64)]) -> Theirs {
    Theirs { name: "page_leap()", source: "Table 2", pages, numbers: Published::At(points) }
}

const KB: f64 = 1024.0;
const MB: f64 = 1024.0 * KB;

const TABLE_2_TIMES: [Theirs; 2] = [
    table_2(
        Pages::Small,
        &[
            (4.0 * KB, 6.59),
            (512.0 * KB, 0.313),
            (2.0 * MB, 0.229),
            (16.0 * MB, 0.475),
            (256.0 * MB, 0.275),
        ],
    ),
    table_2(Pages::Huge, &[(2.0 * MB, 0.051), (16.0 * MB, 0.284), (256.0 * MB, 0.183)]),
];

const TABLE_2_BYTES: [Theirs; 2] = [
    table_2(
        Pages::Small,
        &[
            (4.0 * KB, 0.0),
            (512.0 * KB, 0.0013),
            (2.0 * MB, 0.0102),
            (16.0 * MB, 0.525),
            (256.0 * MB, 4.275),
        ],
    ),
    table_2(Pages::Huge, &[(2.0 * MB, 0.0161), (16.0 * MB, 0.45), (256.0 * MB, 4.2)]),
];

/// Gaps of the writer, by a histogram of each run.
pub(super) const GAPS: [Metric; 4] = [
    time("gap_p50", "", ""),
    time("gap_p99", "p99", "gap of the writer that 99 of 100 do not exceed"),
    time("gap_p999", "", ""),
    time("gap_max", "gap", "longest gap of the writer"),
];

const METRICS: [Metric; 10] = [
    time("time", "time", "until the last page had moved, or until the time-out of 10 s"),
    share("moved", "moved", "pages that moved, of all"),
    share("kept", "kept", "writes meanwhile, of those that were requested"),
    share("extra_copied", "extra", "bytes copied again, of all bytes"),
    share(COPIED, "copied", "bytes copied, retries included, of all bytes"),
    GAPS[0],
    GAPS[1],
    GAPS[2],
    GAPS[3],
    time(
        "populate",
        "reserve",
        "time to take and populate a reserve beforehand, which a program may do long before",
    ),
];

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
        let writing = Writing {
            pattern,
            writers: 1,
            readers: 0,
            kernel: false,
            writer_cpu: Some(cpu),
            total: None,
        };
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

/// The ways that are compared: each of `engines` with the library's areas, and the paper's method, or
/// `all_sized` of them, with the sizes `areas`, or those of Figure 4.
pub fn ways(
    page: PageSize,
    bytes: u64,
    engines: &[EngineChoice],
    areas: Option<&[usize]>,
    all_sized: bool,
) -> Vec<Way> {
    let sized = |engine| all_sized || engine == Engine::Mprotect;
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
    /// Its CPU beside automatic balancing, which moves pages to the node of this CPU; `None`: the
    /// same.
    pub local_cpu: Option<usize>,
    /// The purpose of the load.
    pub purpose: Purpose,
}

/// The purpose of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// As long as a migration takes ([`ABOUT`], [`OVERHEAD`]).
    Migrations,
    /// This long, whenever a migration ends ([`super::sustained`]).
    Window(Duration),
}

impl Purpose {
    fn window(self) -> Option<Duration> {
        match self {
            Purpose::Migrations => None,
            Purpose::Window(window) => Some(window),
        }
    }

    /// The numbers in the order of the metrics.
    fn numbers(self, of: &Numbers) -> Vec<f64> {
        let Numbers { ns, moved, kept, extra, copied, gaps, populate_ns } = *of;
        let gaps = gaps.map_or([f64::NAN; GAPS.len()], |of| {
            [of.p50_ns, of.p99_ns, of.p999_ns, of.max_ns].map(|ns| ns as f64)
        });
        match self {
            Purpose::Migrations => {
                [&[ns, moved, kept, extra, copied], &gaps[..], &[populate_ns]].concat()
            }
            Purpose::Window(_) => [&[kept, ns, moved], &gaps[..]].concat(),
        }
    }
}
