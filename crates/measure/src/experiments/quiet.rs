//! All ways to move memory while nothing else runs, over the size of areas (Figure 4 of the paper).

use pageleap::{Engine, EngineChoice, MemoryEngine, PageSize};

use super::About;
use super::ways::{LABELS, METRICS, Way};

/// The experiment.
pub const ABOUT: About = About {
    name: "quiet",
    title: "Migrations while nothing else runs",
    figure: "000, Figure 4",
    labels: &LABELS,
    metrics: &METRICS,
};

/// Sizes of areas in Figure 4 for pages of 4 KB: eleven, from 4 KB to 256 MB. The text names 4 KB,
/// 64 KB, 512 KB, 16 MB and 256 MB; the others are steps between them.
pub const SMALL: [usize; 11] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
];

/// Sizes of areas in Figure 4 for pages of 2 MB: eight, from 2 MB to 256 MB.
pub const HUGE: [usize; 8] =
    [2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20];

/// The ways that are compared: each of `engines` with areas of each size up to `bytes`, and with
/// the library's default. `areas`: the sizes, or `None` for those of the figure.
pub fn ways(
    page: PageSize,
    bytes: u64,
    engines: &[EngineChoice],
    areas: Option<&[usize]>,
) -> Vec<Way> {
    let of_figure: &[usize] = if page == PageSize::Base { &SMALL } else { &HUGE };
    let fits = |area: &&usize| **area as u64 <= bytes;
    let sizes: Vec<usize> = areas.unwrap_or(of_figure).iter().filter(fits).copied().collect();
    let leaps = engines.iter().flat_map(|engine| {
        // `auto` chooses areas itself, and `stop-copy` has a bound.
        let has_sizes = match engine.forced() {
            None => false,
            Some(engine) => engine != Engine::StopCopy,
        };
        let sizes = if has_sizes { sizes.as_slice() } else { &[] };
        let areas = [None].into_iter().chain(sizes.iter().copied().map(Some));
        areas.map(|area| Way::Leap { engine: *engine, area })
    });
    Way::copies().chain(leaps).chain(MemoryEngine::ALL.map(Way::Private)).collect()
}
