//! `pageleap bench engines`: what each engine costs, beside a memcpy of the same bytes.
//!
//! For each page size ([`args`]) two pools and a region are made ([`place`]); for each load, memcpy
//! and the leaps of all engines take turns ([`measure`], with [`beside`]); the runs become rows
//! ([`statistics`], [`report`]).

mod args;
mod beside;
mod measure;
mod place;
mod report;
mod statistics;

use std::io::Write;
use std::thread::available_parallelism;

use anyhow::{Context, anyhow};
use pageleap::PageSize;

pub use args::BenchArgs;
use args::{BenchCommand, EnginesArgs, engine_rows};
use place::Place;
use report::{Bench, Row, Setting};

use crate::interrupt;
use crate::machine::{self, Refusal};
use crate::progress::Steps;
use crate::stop::Stop;

/// Runs what was asked for.
pub fn run(args: &BenchArgs) -> Result<(), Stop> {
    match &args.command {
        BenchCommand::Engines(args) => engines(args),
    }
}

/// Measures, prints what is complete, and tells what went wrong.
fn engines(args: &EnginesArgs) -> Result<(), Stop> {
    interrupt::install();
    let pages = args.page_sizes();
    let nodes = machine::nodes(PageSize::Base)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    place::check_memory(args, &pages, &nodes, from, to)?;
    let mut bench = Bench {
        setting: Setting {
            kernel: machine::kernel_release()?,
            cpus: available_parallelism().map_or(1, usize::from),
            nodes: nodes.iter().filter(|node| node.total_bytes > 0).count(),
            from,
            to,
            size: args.size,
            threads: args.threads,
            load_threads: args.load_threads(),
            runs: args.runs,
            seed: args.seed,
        },
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let ended = measure_all(args, &pages, &mut bench);
    print(args, &bench)?;
    // A lost write is worse than whatever ended the measurement.
    let lost: u64 = bench.rows.iter().map(|row| row.lost).sum();
    if lost > 0 {
        return Err(anyhow!("{}", measure::mismatch(lost)).into());
    }
    if let Err(Stop::Interrupted { signal, found }) = ended {
        let found = format!("{} rows were measured; {found}", bench.rows.len());
        return Err(Stop::Interrupted { signal, found });
    }
    ended?;
    if bench.rows.is_empty() {
        return Err(
            Refusal::new(format!("nothing was measured: {}", bench.skipped.join("; "))).into()
        );
    }
    Ok(())
}

fn measure_all(args: &EnginesArgs, pages: &[PageSize], bench: &mut Bench) -> Result<(), Stop> {
    let loads = args.loads();
    let leaps = |engines: usize| (loads.len() * engines * args.runs) as u64;
    let steps = Steps::new("leaping", leaps(engine_rows().len()) * pages.len() as u64);
    for page in pages.iter().copied() {
        steps.now(format!("{page}, filling pools"));
        let mut place = match place_for(args, page, bench) {
            Ok(Ok(place)) => place,
            Ok(Err(why)) => {
                bench.skipped.push(format!("--page-size {page}: {why}"));
                steps.leave_out(leaps(engine_rows().len()));
                continue;
            }
            Err(stop) => return Err(stop),
        };
        let mut engines = Vec::new();
        for engine in engine_rows() {
            match place::unfit_area(engine.area, page)
                .map_or_else(|| place.unfit(&engine), |why| Ok(Some(why)))?
            {
                None => engines.push(engine),
                Some(why) => {
                    bench.skipped.push(format!("{} with --page-size {page}: {why}", engine.choice));
                    steps.leave_out(leaps(1));
                }
            }
        }
        for load in &loads {
            steps.now(format!("{page}, {}", load.kind));
            let measured = measure::measure(args, &mut place, *load, &engines, &steps)?;
            let rows = engines.iter().zip(&measured);
            bench.rows.extend(rows.filter_map(|(engine, leaps)| {
                Row::of(args, engine, &page.to_string(), *load, leaps)
            }));
        }
    }
    Ok(())
}

/// Region and pools, or why there are none for pages of this size. Pages of 4 KB are no reason to
/// go on without them.
fn place_for(
    args: &EnginesArgs,
    page: PageSize,
    bench: &Bench,
) -> Result<Result<Place, String>, Stop> {
    let (from, to) = (bench.setting.from, bench.setting.to);
    let bytes = args.region_bytes(page);
    let nodes = machine::nodes(page)?;
    if let Some(why) = place::missing_huge_pages(bytes, page, &nodes, from, to) {
        return Ok(Err(why));
    }
    match Place::build(bytes, page, from, to) {
        Ok(place) => Ok(Ok(place)),
        Err(Stop::Refused(why) | Stop::Failed(why)) if page != PageSize::Base => {
            Ok(Err(format!("{why:#}")))
        }
        Err(stop) => Err(stop),
    }
}

/// Rows go to standard output; what was skipped too, except beside JSON.
fn print(args: &EnginesArgs, bench: &Bench) -> Result<(), Stop> {
    if bench.rows.is_empty() {
        return Ok(());
    }
    let text = if args.json {
        for skipped in &bench.skipped {
            eprintln!("skipped: {skipped}");
        }
        bench.json().context("the result could not be written as JSON")? + "\n"
    } else {
        bench.text()
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")?;
    Ok(())
}
