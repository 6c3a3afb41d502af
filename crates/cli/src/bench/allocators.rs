//! `pageleap bench allocators`: the micro-benchmark of allocators, beside the C library's malloc.
//!
//! Each measurement is a process of its own, the hidden command [`churn`], with the allocator's
//! library preloaded. Runs are interleaved: in each, all allocators get the same requests, one after
//! the other, and each run begins with another one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use pageleap_launch::{Allocator, NOT_AVAILABLE, preloaded_first, without_allocators};
use pageleap_measure::churn::{Churn, Churned};
use pageleap_measure::document::{Body, Column, Document, Section, Table, Value, column, fact};
use pageleap_measure::figures::three_digits;
use pageleap_measure::matrix::thread_counts;
use pageleap_measure::method;
use pageleap_measure::statistics::Summary;

use crate::environment::Environment;
use crate::export::Exports;
use crate::progress::Steps;
use crate::stop::{Refusal, Stop};
use crate::{bytes, export, interrupt, machine, output};

/// The hidden command of a measurement.
const CHURN: &str = "churn";
const PRELOAD: &str = "LD_PRELOAD";
/// How often a process is looked at. It measures its time itself.
const LOOK: Duration = Duration::from_millis(5);

/// Compare allocators: time, and memory for each byte that was asked for.
///
/// Threads allocate items and write them, or read items and free them, in random order; small items
/// are more frequent (16 bytes to 8 KB, section 3.1.8 of the paper that docs/run.md names). Each
/// allocator runs in a process of its own, by LD_PRELOAD; the allocators take turns in each run. The
/// ratio compares with the C library's malloc in the same run. The overhead is the resident memory
/// divided by the bytes that were asked for.
///
/// Threads are not bound to CPUs, and memory is not placed: start this command by `pageleap run`
/// with its options for that.
///
/// Exit code: 0 measured; 1 a failure; 2 a request that makes no sense, or an allocator that is not
/// there; 130 interrupted by Ctrl-C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AllocatorsArgs {
    /// Allocators, by comma: glibc, jemalloc, tcmalloc, mimalloc, tbbmalloc [default: all that are
    /// found]
    #[arg(long, value_name = "ALLOCATORS", value_delimiter = ',')]
    pub alloc: Vec<Allocator>,

    /// Numbers of threads, by comma [default: 1, 2, 4 and so on up to the number of CPUs]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = bytes::threads)]
    pub threads: Vec<usize>,

    /// Operations of each thread
    #[arg(long, value_name = "N", default_value = "2000000")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub operations: u64,

    /// Runs of each allocator with each number of threads
    #[arg(long, value_name = "N", default_value = "5")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Seed of the requests
    #[arg(long, value_name = "SEED", default_value = "1")]
    pub seed: u64,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench allocators
      all allocators that are found, with 1 thread up to one for each CPU
  pageleap bench allocators --alloc glibc,jemalloc --threads 8,64 --runs 9
      two of them, with more threads than CPUs
  pageleap run -i all pageleap bench allocators --json > allocators.json
      with interleaved memory";

/// Allocate and free memory, and print what it took as JSON.
#[derive(Args, Clone, Debug)]
pub struct ChurnArgs {
    threads: usize,
    operations: u64,
    seed: u64,
}

/// The hidden command.
pub fn churn(args: &ChurnArgs) -> Result<(), Stop> {
    let &ChurnArgs { threads, operations, seed } = args;
    let churned = Churn { threads, operations, seed }.run()?;
    let text =
        serde_json::to_string(&churned).context("the result could not be written as JSON")?;
    Ok(output::write(&(text + "\n"))?)
}

/// An allocator that is measured, with its library.
struct Candidate {
    allocator: Allocator,
    /// None for the C library's own.
    library: Option<PathBuf>,
}

/// The runs of one allocator with one number of threads.
struct Row {
    allocator: Allocator,
    threads: usize,
    operations: u64,
    churned: Vec<Churned>,
    /// The time of each run divided by that of the C library's malloc in the same run.
    ratios: Vec<f64>,
}

/// Measures, prints and exports the rows that are complete.
pub fn run(args: &AllocatorsArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let environment = Environment::start();
    let cpus = available_parallelism().map_or(1, usize::from);
    let threads = if args.threads.is_empty() { thread_counts(cpus) } else { args.threads.clone() };
    let (candidates, missing) = candidates(&args.alloc)?;
    let mut rows = Vec::new();
    let ended = measure_all(args, &threads, &candidates, &mut rows);
    let printed = match rows.is_empty() {
        true => Ok(()),
        false => {
            let document = document(args, cpus, &candidates, &rows, missing)?;
            exports.print(&environment.add_to(document), args.json)
        }
    };
    export::conclude(ended, printed)
}

/// The allocators that were asked for, or those that are found; and a sentence for each that is not.
fn candidates(asked: &[Allocator]) -> Result<(Vec<Candidate>, Vec<String>), Stop> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for allocator in Allocator::ALL {
        if !asked.is_empty() && !asked.contains(&allocator) {
            continue;
        }
        let library = allocator.library();
        if library.is_none() && allocator.package().is_some() {
            missing.push(allocator.missing());
            continue;
        }
        found.push(Candidate { allocator, library });
    }
    if !asked.is_empty() && !missing.is_empty() {
        return Err(Refusal::new(missing.join("; ")).into());
    }
    missing.extend(NOT_AVAILABLE.iter().map(|(name, why)| format!("{name}: {why}")));
    Ok((found, missing))
}

/// Measures all rows of one number of threads after the other.
fn measure_all(
    args: &AllocatorsArgs,
    threads: &[usize],
    candidates: &[Candidate],
    rows: &mut Vec<Row>,
) -> Result<(), Stop> {
    let runs = usize::from(args.runs);
    let mut steps = Steps::new("allocating", threads.len() * candidates.len(), runs);
    for threads in threads {
        let mut churned: Vec<Vec<Churned>> = candidates.iter().map(|_| Vec::new()).collect();
        for run in 0..runs {
            for at in method::order(args.seed, run, candidates.len()) {
                steps.now(format!("{}, {}", candidates[at].allocator, self::threads(*threads)));
                // All allocators get the same requests, and each run has others.
                let seed = args.seed.wrapping_add(run as u64);
                churned[at].push(measure(&candidates[at], *threads, args.operations, seed)?);
                steps.done();
            }
        }
        let base = candidates.iter().position(|one| one.allocator == Allocator::Glibc);
        let base: Vec<u64> =
            base.map_or(Vec::new(), |at| churned[at].iter().map(|run| run.time_ns).collect());
        for (candidate, churned) in candidates.iter().zip(churned) {
            let times = churned.iter().map(|run| run.time_ns as f64);
            let ratios = times.zip(&base).map(|(time, base)| time / *base as f64).collect();
            let (allocator, operations) = (candidate.allocator, args.operations);
            let row = Row { allocator, threads: *threads, operations, churned, ratios };
            steps.row_done(&row.in_short());
            rows.push(row);
        }
    }
    Ok(())
}

/// One process of one allocator.
fn measure(
    candidate: &Candidate,
    threads: usize,
    operations: u64,
    seed: u64,
) -> Result<Churned, Stop> {
    let name = candidate.allocator;
    let mut command = Command::new("/proc/self/exe");
    command.arg(CHURN).args([threads.to_string(), operations.to_string(), seed.to_string()]);
    let before: Option<OsString> = std::env::var_os(PRELOAD);
    match &candidate.library {
        Some(library) => drop(command.env(PRELOAD, preloaded_first(library, before))),
        None => drop(command.env(PRELOAD, without_allocators(&before.unwrap_or_default()))),
    }
    let output = finished(command).with_context(|| format!("the process for {name}"));
    interrupt::stop_if_received(|| "the allocators are not all measured".to_owned())?;
    let output = output?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(anyhow!("the process for {name} ended with {}: {said}", output.status).into());
    }
    let churned: Churned = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("the process for {name} printed no result"))?;
    match is_of(&churned.allocator, candidate) {
        true => Ok(churned),
        false => Err(anyhow!(
            "malloc of the process for {name} came from {}; look at LD_PRELOAD and \
             /etc/ld.so.preload",
            churned.allocator
        )
        .into()),
    }
}

/// Whether malloc came from the file that it should come from.
fn is_of(file: &str, candidate: &Candidate) -> bool {
    let name = Path::new(file).file_name().unwrap_or_default().to_string_lossy();
    match candidate.allocator {
        // The C library, or the loader of musl, which contains it.
        Allocator::Glibc => ["libc.so", "libc-", "ld-musl"].iter().any(|c| name.starts_with(c)),
        allocator => Allocator::of_library(Path::new(file)) == Some(allocator),
    }
}

/// Runs a process to its end, and kills it if a signal asks this command to end.
fn finished(mut command: Command) -> anyhow::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: the call takes no pointers. The process ends with this one, also if that is killed.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            Ok(())
        })
    };
    let mut child = command.spawn()?;
    // The child's output fits into a pipe, so nobody has to read meanwhile.
    while child.try_wait()?.is_none() {
        if interrupt::received().is_some() {
            child.kill()?;
        }
        std::thread::sleep(LOOK);
    }
    Ok(child.wait_with_output()?)
}

impl Row {
    fn time(&self) -> Option<Summary> {
        Summary::of(&self.churned.iter().map(|run| run.time_ns as f64).collect::<Vec<_>>())
    }

    fn ratio(&self) -> Option<Summary> {
        Summary::of(&self.ratios)
    }

    fn overhead(&self) -> Option<Summary> {
        Summary::of(&self.churned.iter().map(Churned::overhead).collect::<Vec<_>>())
    }

    fn in_short(&self) -> String {
        let ms = self.time().map_or(0.0, |time| time.median / 1e6);
        format!("{} with {}: {} ms", self.allocator, threads(self.threads), three_digits(ms))
    }
}

fn threads(number: usize) -> String {
    format!("{number} thread{}", if number == 1 { "" } else { "s" })
}

fn ns(value: Option<f64>) -> Value {
    value.map_or(Value::Unknown, |ns| Value::Ns(ns.round() as u64))
}

/// Two ratios as people read them.
fn span(summary: Option<Summary>) -> Value {
    summary.map_or(Value::Unknown, |of| Value::Text(format!("{:.2}-{:.2}", of.min, of.max)))
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("allocator", "allocator", "", |row: &Row| row.allocator.name().into()),
        column("threads", "threads", "", |row: &Row| Value::count(row.threads)),
        column("time_ns", "time", "all operations of all threads", |row: &Row| {
            ns(row.time().map(|time| time.median))
        }),
        column("time_min_ns", "", "", |row: &Row| ns(row.time().map(|time| time.min))),
        column("time_max_ns", "", "", |row: &Row| ns(row.time().map(|time| time.max))),
        column("operations_per_s", "ops/s", "operations per second", |row: &Row| {
            let all = row.operations as f64 * row.threads as f64;
            Value::per_second(row.time().map(|time| all * 1e9 / time.median))
        }),
        column(
            "time_to_glibc_ratio",
            "ratio",
            "time / time of glibc in the same run",
            |row: &Row| Value::ratio(row.ratio().map(|ratio| ratio.median)),
        ),
        column("", "of", "the lowest and the highest ratio of a run", |row: &Row| {
            span(row.ratio())
        }),
        column("time_to_glibc_ratio_min", "", "", |row: &Row| {
            Value::ratio(row.ratio().map(|ratio| ratio.min))
        }),
        column("time_to_glibc_ratio_max", "", "", |row: &Row| {
            Value::ratio(row.ratio().map(|ratio| ratio.max))
        }),
        column("overhead_ratio", "overhead", "resident memory / bytes asked for", |row: &Row| {
            Value::ratio(row.overhead().map(|of| of.median))
        }),
    ]
}

/// One run of a row, for programs.
struct OneRun<'a> {
    row: &'a Row,
    churned: &'a Churned,
}

fn run_columns<'a>() -> Vec<Column<OneRun<'a>>> {
    vec![
        column("allocator", "", "", |one: &OneRun| one.row.allocator.name().into()),
        column("threads", "", "", |one: &OneRun| Value::count(one.row.threads)),
        column("time_ns", "", "", |one: &OneRun| Value::Ns(one.churned.time_ns)),
        column("requested_bytes", "", "", |one: &OneRun| Value::Bytes(one.churned.requested_bytes)),
        column("resident_bytes", "", "", |one: &OneRun| Value::Bytes(one.churned.resident_bytes)),
    ]
}

fn document(
    args: &AllocatorsArgs,
    cpus: usize,
    candidates: &[Candidate],
    rows: &[Row],
    missing: Vec<String>,
) -> Result<Document, Stop> {
    let nodes = machine::nodes(pageleap::PageSize::Base)?;
    let with_memory = nodes.iter().filter(|node| node.total_bytes > 0).count();
    let libraries = candidates.iter().filter_map(|candidate| {
        let library = candidate.library.as_ref()?.display().to_string();
        Some((candidate.allocator.name().to_owned(), Value::Text(library)))
    });
    let setting = vec![
        fact("kernel", "Linux", machine::kernel_release()?.as_str()),
        fact("cpus", "CPUs", Value::count(cpus)),
        fact("nodes", "nodes with memory", Value::count(with_memory)).remark(match with_memory {
            1 => "no time here says anything about remote memory",
            _ => "",
        }),
        fact("operations", "operations of a thread", Value::Count(args.operations)),
        fact("runs", "runs", Value::count(args.runs)),
        fact("seed", "", Value::Count(args.seed)),
        fact("libraries", "", Value::Map(libraries.collect())),
    ];
    let one_run = |row| move |churned| OneRun { row, churned };
    let runs: Vec<OneRun> =
        rows.iter().flat_map(|row| row.churned.iter().map(one_run(row))).collect();
    let table = Table::of(&columns(), rows, |row| threads(row.threads));
    let each = Table::of(&run_columns(), &runs, |_| String::new());
    let title = "Allocators (medians)";
    Ok(Document {
        sections: vec![
            Section::new("setting", "Machine", Body::Facts(setting)),
            Section::new("rows", title, Body::Table(table)),
            Section::data("samples", Body::Table(each)),
            Section::new("missing", "Not measured", Body::Notes(missing)),
        ],
    })
}
