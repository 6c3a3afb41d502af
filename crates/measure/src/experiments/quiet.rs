//! All ways to move memory while nothing else runs, over the size of areas (Figure 4 of the paper).

use pageleap::{Engine, EngineChoice, MemoryEngine, PageSize};

use super::About;
use super::drawing::{Drawing, MOVE_PAGES, Of, Over, TIME_OVER_AREAS};
use super::ways::{LABELS, METRICS, Way};
use crate::rivals::calls::Call;

/// The experiment.
pub const ABOUT: About = About {
    name: "quiet",
    title: "Migrations while nothing else runs",
    figure: "Taking the Leap, Figure 4",
    needs: "4 GB; a second node for the kernel's calls",
    takes: "5 min for each page size",
    labels: &LABELS,
    metrics: &METRICS,
    plots: &PLOTS,
};

const PLOTS: [Drawing; 2] = [
    TIME_OVER_AREAS,
    Drawing {
        title: "Time compared with the fastest copy, over the size of areas",
        about: "Lower is better. Ratios are formed within a round. The samples of levels are at the \
                right end.",
        over: Over::Label("area_bytes"),
        of: Of::Ratio,
        split: &[],
        theirs: &MOVE_PAGES,
    },
];

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

/// The two sizes that the paper recommends (sections 5 and 6).
pub const BEST: [usize; 2] = [512 << 10, 16 << 20];

/// Sizes of areas in Figure 4 for pages of 2 MB: eight, from 2 MB to 256 MB.
pub const HUGE: [usize; 8] =
    [2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20];

/// The least area of the figure's sizes with which engines other than the paper's are measured. With
/// areas of 4 KB they take up to 54 s for 1 GB, where a copy takes 0.12 s, so that a round of all
/// sizes could not be repeated in some minutes.
const LEAST_OF_OTHERS: usize = 1 << 20;

/// The ways that are compared: each of `engines` with areas of each size up to `bytes`, and with
/// the library's default. `areas`: the sizes, or `None` for those of the figure.
pub fn ways(
    page: PageSize,
    bytes: u64,
    engines: &[EngineChoice],
    areas: Option<&[usize]>,
) -> Vec<Way> {
    // `stop-copy` has a bound of its own.
    let leaps = leaps(page, bytes, engines, areas, |engine| engine != Engine::StopCopy);
    let private = MemoryEngine::ALL.map(Way::Private).into_iter().chain(Call::ALL.map(Way::Call));
    Way::copies().chain(leaps).chain(private).collect()
}

/// Leaps of a region: each of `engines` with the library's areas, and those that are `sized` with
/// areas of each size up to `bytes`. Of the figure's sizes, those below [`LEAST_OF_OTHERS`] are for
/// the paper's method alone.
pub(super) fn leaps(
    page: PageSize,
    bytes: u64,
    engines: &[EngineChoice],
    areas: Option<&[usize]>,
    sized: impl Fn(Engine) -> bool,
) -> Vec<Way> {
    let of_figure: &[usize] = if page == PageSize::Base { &SMALL } else { &HUGE };
    let fits = |area: &&usize| **area as u64 <= bytes;
    let sizes: Vec<usize> = areas.unwrap_or(of_figure).iter().filter(fits).copied().collect();
    let of_engine = |engine: &EngineChoice| {
        // `auto` chooses areas itself.
        let has_sizes = engine.forced().is_some_and(&sized);
        let is_of_paper = engine.forced() == Some(Engine::Mprotect);
        let is_measured = |area: &usize| {
            has_sizes && (areas.is_some() || is_of_paper || *area >= LEAST_OF_OTHERS)
        };
        let sizes: Vec<usize> = sizes.iter().copied().filter(is_measured).collect();
        let areas = [None].into_iter().chain(sizes.into_iter().map(Some));
        let engine = *engine;
        areas.map(move |area| Way::Leap { engine, area, threads: None })
    };
    engines.iter().flat_map(of_engine).collect()
}
