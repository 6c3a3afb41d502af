//! `pageleap bench access`, `copy`, `quiet` and the like: experiments of *Taking the Leap*.
//!
//! A [`Plan`] is a list of scenes. The scenes are measured one after the other, the cases of each
//! in turns ([`pageleap_measure::method`]). Nothing is drawn or written while a case is measured.
//!
//! * [`args`]: the flags.
//! * [`nodes`]: nodes, CPUs, and memory.
//! * [`plans`]: the scenes of each experiment.
//! * [`measure`]: turns and progress.

mod args;
mod measure;
mod nodes;
mod plans;

use anyhow::anyhow;
use pageleap_measure::document::{Body, Document, Section, Table, Value, column, fact};
use pageleap_measure::experiments::{About, Results, tpch};

pub use args::{ABOUTS, AllArgs, ExperimentCommand};
use nodes::Nodes;
use plans::Plan;

use crate::environment::Environment;
use crate::stop::{Refusal, Stop};
use crate::{export, interrupt, output};

/// Runs an experiment: measures, prints and exports the whole rounds.
pub fn run(command: &ExperimentCommand) -> Result<(), Stop> {
    let args = command.common();
    let exports = args.exports.open()?;
    interrupt::install();
    let nodes = Nodes::choose(args)?;
    let plan = plans::plan(command, &nodes)?;
    let environment = Environment::start();
    let (results, measured) = execute(plan, &nodes);
    let printed = match is_worth_it(&results) {
        false => Ok(()),
        true => exports.print(&environment.add_to(results.document()), args.json),
    };
    export::conclude(conclude(&[results], Vec::new(), measured), printed)
}

/// Runs all experiments, one after the other. One that this machine cannot take is noted.
pub fn run_all(args: &AllArgs) -> Result<(), Stop> {
    let args = &args.common;
    let exports = args.exports.open()?;
    interrupt::install();
    let environment = Environment::start();
    let (mut all, mut notes, mut ended) = (Vec::new(), Vec::new(), Ok(()));
    let commands = ExperimentCommand::all(args);
    for (nth, command) in (1..).zip(&commands) {
        let name = command.name();
        output::note(&format!("experiment {nth} of {}: {name}", commands.len()));
        // The memory of one experiment is free for the next one.
        let planned = Nodes::choose(args)
            .and_then(|nodes| plans::plan(command, &nodes).map(|plan| (plan, nodes)));
        match planned {
            Err(Stop::Refused(why)) => notes.push(format!("left out: {name}: {why:#}")),
            Err(stop) => ended = later(ended, Err(stop)),
            Ok((plan, nodes)) => {
                let (results, measured) = execute(plan, &nodes);
                all.push(results);
                ended = later(ended, measured);
            }
        }
        if interrupt::received().is_some() {
            let rounds: usize = all.iter().map(Results::rounds).sum();
            let found = || format!("{rounds} rounds of {} experiments were measured", all.len());
            ended = later(ended, interrupt::stop_if_received(found));
            break;
        }
    }
    let printed = match all.iter().any(is_worth_it) {
        false => Ok(()),
        true => exports.print(&environment.add_to(document(&all, &notes)), args.json),
    };
    export::conclude(conclude(&all, notes, ended), printed)
}

/// How a series ends that had ended in one way before: a signal counts most, then the first failure.
fn later(before: Result<(), Stop>, now: Result<(), Stop>) -> Result<(), Stop> {
    match now {
        Err(Stop::Interrupted { .. }) => now,
        now => before.and(now),
    }
}

/// Whether a result says anything.
fn is_worth_it(results: &Results) -> bool {
    results.rounds() > 0 || results.lost() > 0
}

fn document(all: &[Results], notes: &[String]) -> Document {
    let (worth_it, empty): (Vec<&Results>, Vec<&Results>) =
        all.iter().partition(|results| is_worth_it(results));
    let of_empty = |results: &&Results| {
        let name = results.about.name;
        results.notes.iter().map(move |note| format!("{name}: {note}")).collect::<Vec<_>>()
    };
    let notes: Vec<String> = notes.iter().cloned().chain(empty.iter().flat_map(of_empty)).collect();
    let documents = Body::Documents(worth_it.into_iter().map(Results::document).collect());
    let title = if notes.is_empty() { "" } else { "Experiments that were left out" };
    let sections = vec![
        Section::new("experiments", "All experiments", documents),
        Section::new("left_out", title, Body::Notes(notes)),
    ];
    Document { sections }
}

/// Prints which experiments there are.
pub fn list(json: bool) -> Result<(), Stop> {
    let columns = [
        column("experiment", "experiment", "", |about: &&About| about.name.into()),
        column("figure", "figure", "", |about: &&About| about.figure.into()),
        column("needs", "needs", "", |about: &&About| about.needs.into()),
        column(
            "takes",
            "takes",
            "at most, as a default; --quick takes some 20 s where this has 5 min",
            |about: &&About| about.takes.into(),
        ),
        column("title", "", "", |about: &&About| about.title.into()),
    ];
    let table = Table::of(&columns, &ABOUTS, |_| String::new());
    let sections = vec![Section::new("experiments", "Experiments", Body::Table(table))];
    output::print(&Document { sections }, json)?;
    Ok(())
}

/// Measures all scenes of a plan: until the end, a signal, or an error. Whole rounds stay.
fn execute(plan: Plan, nodes: &Nodes) -> (Results, Result<(), Stop>) {
    let Plan { about, args, scenes, notes, facts } = plan;
    let mut setting = vec![
        fact("bytes", "bytes", Value::Bytes(args.bytes())),
        fact("from", "from node", Value::count(nodes.from.0)),
        fact("to", "to node", Value::count(nodes.to.0)).remark(nodes.remark()),
        fact("cpu", "copies on CPU", Value::count(nodes.cpu())),
        fact("writer_cpu", "writer on CPU", Value::count(nodes.writer_cpu)),
    ];
    setting.extend(facts);
    let method = args.method();
    let mut results = Results { about, setting, method, parts: Vec::new(), notes };
    let measured = measure::measure_all(&mut results, scenes);
    // On one node no migration can pay.
    if about.name == tpch::ABOUT.name && nodes.from != nodes.to {
        let parts = results.parts.iter().filter(|part| part.rounds.count() > 0);
        results.notes.extend(parts.flat_map(tpch::pays).collect::<Vec<String>>());
    }
    (results, measured)
}

/// Turns a measurement that has been printed into its exit code.
fn conclude(
    results: &[Results],
    mut notes: Vec<String>,
    ended: Result<(), Stop>,
) -> Result<(), Stop> {
    // Lost words decide the exit code, because they are worse than any other end.
    let lost: u64 = results.iter().map(Results::lost).sum();
    if lost > 0 {
        return Err(anyhow!("mismatch: {lost} words had a wrong value after a migration").into());
    }
    ended?;
    if results.iter().map(Results::rounds).sum::<usize>() == 0 {
        notes.extend(results.iter().flat_map(|of| of.notes.iter().cloned()));
        let why = format!("nothing was measured: {}", notes.join("; "));
        return Err(Refusal::new(why).into());
    }
    Ok(())
}
