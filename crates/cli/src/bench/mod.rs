//! `pageleap bench engines`: the cost of each engine, compared with a memcpy of the same bytes.
//!
//! For each page size ([`args`]) two pools and a region are made, or private memory ([`place`]).
//! For each load, memcpys and the leaps of all engines take turns ([`run`]). The runs become rows
//! ([`rows`]), and the rows a document ([`document`], [`columns`], [`gaps`]). Short jobs have
//! regions and tables of their own ([`jobs`], [`job_rows`]).

mod allocators;
mod args;
mod columns;
mod command;
mod compare;
mod document;
mod experiments;
mod gaps;
mod job_rows;
mod jobs;
mod memory;
mod page_tables;
mod place;
mod prober;
mod rows;
mod run;
mod scenarios;
mod summaries;
mod views;

use std::thread::available_parallelism;

use anyhow::anyhow;
use pageleap::PageSize;

pub use allocators::{ChurnArgs, churn};
use args::{EngineRow, EnginesArgs, Kind, NamedLoad};
pub use command::BenchArgs;
use command::BenchCommand;
use place::Place;
use rows::{Bench, Case, Group, Setting};

use crate::environment::Environment;
use crate::machine;
use crate::progress::Steps;
use crate::stop::{Refusal, Stop};
use crate::{export, interrupt};

/// Runs the measurement that the arguments name.
pub fn run(args: &BenchArgs) -> Result<(), Stop> {
    let Some(command) = &args.command else { return experiments::list(args.json) };
    match command {
        BenchCommand::All(args) => experiments::run_all(args),
        BenchCommand::Allocators(args) => allocators::run(args),
        BenchCommand::Compare(args) => compare::run(args),
        BenchCommand::Engines(args) => engines(args),
        BenchCommand::Experiment(command) => experiments::run(command),
        BenchCommand::PageTables(args) => page_tables::run(args),
        BenchCommand::Prober(args) => prober::run(args),
    }
}

/// Measures, prints and exports the complete rows, and returns the error or the mismatch, if there
/// is one.
fn engines(args: &EnginesArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let environment = Environment::start();
    let nodes = machine::nodes(PageSize::Base)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let size = (!args.loads(args.size).is_empty()).then_some(args.size);
    if size.is_some() {
        place::check_memory(args, &args.kinds(), &nodes, from, to)?;
    }
    if let (false, Some(other)) = (args.jobs().is_empty(), args.other_starter()) {
        let why = "small and scattered measure jobs of an ordinary thread; name other loads";
        return Err(Refusal::new(format!("--starter {other}: {why}")).into());
    }
    let mut bench = Bench {
        setting: Setting {
            kernel: machine::kernel_release()?,
            cpus: available_parallelism().map_or(1, usize::from),
            nodes: nodes.iter().filter(|node| node.total_bytes > 0).count(),
            // SAFETY: the call takes nothing and cannot fail.
            uid: unsafe { libc::geteuid() },
            from,
            to,
            size,
            threads: args.threads,
            wait_budget: args.wait_budget,
            load_threads: args.load_threads(),
            runs: args.runs(),
            job_runs: args.job_runs(),
            seed: args.seed,
        },
        groups: Vec::new(),
        jobs: Vec::new(),
        skipped: Vec::new(),
    };
    let ended = measure_all(args, &mut bench).and_then(|()| jobs::measure_all(args, &mut bench));
    let printed = match bench.rows() {
        0 => Ok(()),
        _ => exports.print(&environment.add_to(bench.document()), args.json),
    };
    export::conclude(conclude(&bench, ended), printed)
}

/// Turns a measurement that has been printed into its exit code.
fn conclude(bench: &Bench, ended: Result<(), Stop>) -> Result<(), Stop> {
    // Lost writes decide the exit code, even if the measurement also ended for another reason,
    // because they are worse.
    let lost = bench.lost();
    if lost > 0 {
        return Err(anyhow!("{}", run::mismatch(lost)).into());
    }
    if let Err(Stop::Interrupted { signal, found }) = ended {
        let found = format!("{} rows were measured; {found}", bench.rows());
        return Err(Stop::Interrupted { signal, found });
    }
    ended?;
    if bench.rows() == 0 {
        let why = format!("nothing was measured: {}", bench.skipped.join("; "));
        return Err(Refusal::new(why).into());
    }
    Ok(())
}

/// Measures all page sizes, loads and engines.
fn measure_all(args: &EnginesArgs, bench: &mut Bench) -> Result<(), Stop> {
    let kinds = args.kinds();
    let loads = args.loads(args.size).len();
    if loads == 0 {
        return Ok(());
    }
    let rows: usize = kinds.iter().map(|kind| args.rows_of(*kind).len()).sum();
    let mut steps = Steps::new("leaping", loads * rows, args.runs());
    for kind in kinds {
        let rows = args.rows_of(kind);
        steps.now(format!("{kind}, filling memory"));
        let Some(mut place) = place_for(args, kind, bench, &steps)? else {
            steps.leave_out(loads * rows.len());
            continue;
        };
        let engines = fit_engines(&rows, &place, kind, bench, &steps)?;
        steps.leave_out(loads * (rows.len() - engines.len()));
        for load in args.loads(args.region_bytes(kind.page)) {
            let group = measure_load(args, kind, load, &mut place, &engines, &mut steps)?;
            bench.groups.push(group);
        }
    }
    Ok(())
}

/// Measures all engines beside one load.
fn measure_load(
    args: &EnginesArgs,
    kind: Kind,
    load: NamedLoad,
    place: &mut Place,
    engines: &[EngineRow],
    steps: &mut Steps,
) -> Result<Group, Stop> {
    steps.now(format!("{kind}, {}", load.kind));
    let case = |engine: &EngineRow| Case { engine: *engine, kind, load };
    let cases: Vec<Case> = engines.iter().map(case).collect();
    let runs = run::measure(args, place, load.work, engines, &|| steps.done())?;
    // Only here: a signal during the last run still discards all rows of this load.
    for (at, case) in cases.iter().enumerate() {
        steps.row_done(&rows::in_short(case, at, &runs));
    }
    Ok(Group { cases, runs })
}

/// The memory that leaps; `None`, and a note, if memory of this kind cannot be measured. For pages
/// of 4 KB that is an error.
fn place_for(
    args: &EnginesArgs,
    kind: Kind,
    bench: &mut Bench,
    steps: &Steps,
) -> Result<Option<Place>, Stop> {
    let (from, to) = (bench.setting.from, bench.setting.to);
    let page = kind.page;
    let bytes = args.region_bytes(page);
    let nodes = machine::nodes(page)?;
    let why = match memory::missing_huge_pages(bytes, page, &nodes, from, to) {
        Some(why) => why,
        None => match Place::build(bytes, kind, from, to) {
            Ok(place) => return Ok(Some(place)),
            Err(Stop::Refused(why) | Stop::Failed(why)) if page != PageSize::Base => {
                format!("{why:#}")
            }
            Err(stop) => return Err(stop),
        },
    };
    skip(bench, steps, format!("--page-size {kind}: {why}"));
    Ok(None)
}

/// The rows that can be measured with memory of this kind. For each other row a note says why it
/// cannot.
fn fit_engines(
    rows: &[EngineRow],
    place: &Place,
    kind: Kind,
    bench: &mut Bench,
    steps: &Steps,
) -> Result<Vec<EngineRow>, Stop> {
    let mut fit = Vec::new();
    for row in rows {
        let why = match place::unfit_area(row.area, kind.page) {
            Some(why) => Some(why),
            None => place.memory.unfit(row)?,
        };
        match why {
            None => fit.push(*row),
            Some(why) => {
                skip(bench, steps, format!("{} with --page-size {kind}: {why}", row.choice))
            }
        }
    }
    Ok(fit)
}

fn skip(bench: &mut Bench, steps: &Steps, what: String) {
    steps.line(&format!("skipped: {what}"));
    bench.skipped.push(what);
}
