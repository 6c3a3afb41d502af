//! A thread writes while memory moves, for real.

use std::sync::atomic::Ordering;

use pageleap::topology::Topology;

use super::scene::Turn;
use super::*;
use crate::Error;
use crate::experiments::{Outcome, Scene};
use crate::memcpy::METHODS;

fn loaded(all: &[Way], rate: Rate) -> Loaded {
    loaded_for(Purpose::Migrations, all, rate)
}

fn loaded_for(purpose: Purpose, all: &[Way], rate: Rate) -> Loaded {
    let topology = Topology::read().unwrap();
    let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
    let cpu = topology.allowed_cpus()[0];
    let (page, bytes) = (PageSize::Base, 4 << 20);
    let cpus = vec![cpu];
    let ways = ways::Setting { bytes, page, from: node, to: node, cpu, cpus, seed: 5 };
    let writes = Writes { rate, rows: Rows::Uniform };
    let writer_cpu = *topology.allowed_cpus().last().unwrap();
    let setting = Setting { ways, writes, writer_cpu, local_cpu: None, purpose };
    Loaded::new(setting, all, None, || Ok::<_, Error>(())).unwrap()
}

#[test]
fn each_turn_has_its_numbers_and_loses_nothing() {
    let engines = [EngineChoice::Auto, Engine::Mprotect.into()];
    let all = ways(PageSize::Base, 4 << 20, &engines, Some(&[1 << 20]), false);
    let mut scene = loaded(&all, Rate::PerSecond(100_000));
    let mut migrations = 0;
    for case in 0..scene.cases().len() {
        for _ in 0..2 {
            let Outcome { numbers, lost } = scene.measure(case, &|| false).unwrap().unwrap();
            let [time, moved, kept, extra, copied, gaps @ .., _] =
                <[f64; 10]>::try_from(numbers).unwrap();
            assert!(time > 0.0);
            // A machine that is too busy for the writer has no gap within a copy.
            let has_none = gaps.iter().all(|ns| ns.is_nan());
            assert!(has_none || gaps.is_sorted(), "{gaps:?}");
            assert!(has_none || !matches!(scene.turns[case], Turn::AtRest(_)));
            assert_eq!(lost, 0, "{:?}", scene.turns[case]);
            let is_known = [moved, kept, extra, copied].map(f64::is_finite);
            match scene.turns[case] {
                Turn::AtRest(_) => assert_eq!(is_known, [false; 4]),
                Turn::Beside(_) => assert_eq!(is_known, [false, true, false, false]),
                Turn::Migration(_) => {
                    assert_eq!((is_known, moved), ([true; 4], 1.0));
                    assert!(copied >= 1.0 && (copied - extra - 1.0).abs() < 1e-9);
                    migrations += 1;
                }
                turn => panic!("{turn:?}"),
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

#[test]
fn a_window_goes_on_after_the_migration() {
    let window = Duration::from_millis(200);
    let leap = Way::Leap { engine: EngineChoice::Auto, area: None, threads: None };
    let mut scene = loaded_for(Purpose::Window(window), &[leap], Rate::PerSecond(100_000));
    assert!(matches!(scene.turns[..], [Turn::Stay, Turn::Migration(_)]));
    assert!(scene.cases().iter().all(|case| case.bases == [0] && case.at_rest.is_empty()));
    for case in 0..2 {
        let start = std::time::Instant::now();
        let Outcome { numbers, lost } = scene.measure(case, &|| false).unwrap().unwrap();
        assert!(start.elapsed() >= window);
        let [kept, migrated, moved, gaps @ ..] = <[f64; 7]>::try_from(numbers).unwrap();
        assert!(gaps.is_sorted() || gaps.iter().all(|ns| ns.is_nan()), "{gaps:?}");
        assert!(kept > 0.0 && lost == 0, "{kept} {lost}");
        match case {
            0 => assert!(migrated.is_nan() && moved.is_nan()),
            _ => assert!(migrated > 0.0 && moved == 1.0),
        }
    }
}
