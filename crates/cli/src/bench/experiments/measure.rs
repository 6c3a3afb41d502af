//! Measures the scenes of a plan, with progress.

use std::time::{Duration, Instant};

use pageleap_measure::experiments::{Part, Results, Scene};

use super::plans::Planned;
use crate::interrupt;
use crate::progress::{Steps, clock};
use crate::stop::Stop;

/// Between two lines about progress where no terminal shows a bar.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Measures all scenes. One that fails keeps its whole rounds, and does not end the others; the
/// first failure is the result then.
pub fn measure_all(results: &mut Results, scenes: Vec<Planned>) -> Result<(), Stop> {
    let mut failed = Ok(());
    for scene in scenes {
        let heading = scene.heading.clone();
        match measure(results, scene) {
            Err(Stop::Failed(why)) => {
                results.notes.push(format!("ended early: {heading}: {why:#}"));
                failed = failed.and(Err(Stop::Failed(why.context(heading))));
            }
            ended => ended?,
        }
    }
    failed
}

/// Adds the rounds of a scene to the results: all of them, or those before a signal or an error.
fn measure(results: &mut Results, scene: Planned) -> Result<(), Stop> {
    let Planned { heading, may_lack, position, build, .. } = scene;
    let name = results.about.name;
    let mut scene = match build() {
        Ok(scene) => scene,
        Err(Stop::Failed(why) | Stop::Refused(why)) if may_lack => {
            results.notes.push(format!("left out: {heading}: {why:#}"));
            return Ok(());
        }
        Err(stop) => return Err(stop),
    };
    note_left_out(results, scene.as_ref());
    let part = Part::new(heading, scene.cases().to_vec(), results.method);
    results.parts.push(part.at(position));
    let part = results.parts.last_mut().expect("it was added just now");
    let ended = measure_part(part, scene.as_mut(), name);
    note_left_out(results, scene.as_ref());
    interrupt::stop_if_received(|| format!("{} rounds were measured", results.rounds()))?;
    ended
}

/// Gives all cases their turns until there are enough rounds, or a signal arrives.
fn measure_part(part: &mut Part, scene: &mut dyn Scene, name: &str) -> Result<(), Stop> {
    let steps = Steps::new(name, 1, part.rounds.at_most());
    let mut told = Instant::now();
    while let Some(turn) = part.next_turn() {
        let left = part.rounds.left();
        let left = left.map_or(String::new(), |left| format!(", {} left at most", clock(left)));
        let round = turn.round.map_or("warm-up".to_owned(), |round| format!("round {}", round + 1));
        let now = format!("{}, {round}{left}", part.heading);
        if told.elapsed() >= LINE_EVERY {
            told = Instant::now();
            steps.line(&format!("{name}, {now}"));
        }
        steps.now(now);
        match scene.measure(turn.thing, &|| interrupt::received().is_some())? {
            Some(outcome) => part.add(turn, outcome),
            None => break,
        }
        steps.done();
        if interrupt::received().is_some() {
            break;
        }
    }
    steps.line(&format!("{name}, {}", part.in_short()));
    Ok(())
}

/// Notes the cases that a scene has left out until now, each once.
fn note_left_out(results: &mut Results, scene: &dyn Scene) {
    for what in scene.left_out() {
        let note = format!("left out: {what}");
        if !results.notes.contains(&note) {
            results.notes.push(note);
        }
    }
}
