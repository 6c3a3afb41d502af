//! `pageleap bench prober`: a probe of the latency of memory beside the sweep that it replaces.

use clap::Args;
use pageleap::NodeId;
use pageleap::topology::{Cache, SysFiles, Topology, data_caches};
use pageleap_measure::document::{Body, Column, Document, Section, Table, Value, column, fact};
use pageleap_measure::figures::{percent, three_digits};
use pageleap_measure::matrix::buffer_bytes;
use pageleap_measure::probing::{Both, Probing, Run, SWEEP_BYTES};
use pageleap_measure::statistics::{Summary, median};

use crate::environment::Environment;
use crate::export::Exports;
use crate::machine::{self, initiator};
use crate::progress::Steps;
use crate::stop::{Refusal, Stop};
use crate::{bytes, export, interrupt};

/// Compare a probe of the latency of memory with the sweep that it replaces.
///
/// The prober of the library looks every 10 s how long a load takes from each node to each node: it
/// flushes about 2000 lines from the caches and loads them. The paper that it follows sweeps 64 MB.
/// This command measures both in turns, on one node: the latency that each finds, alone and beside
/// threads that read on all other cores; the CPU time of each; and how much of its time a bystander
/// on another CPU loses, whose data is in a cache.
///
/// Exit code: 0 measured; 1 a failure; 2 a request that makes no sense, or a node without two cores
/// for this process; 130 interrupted by Ctrl-C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ProberArgs {
    /// The node [default: the first with two cores]
    #[arg(long, value_name = "NODE")]
    pub node: Option<u32>,

    /// Runs; the medians count
    #[arg(long, value_name = "N", default_value = "15")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Bytes of the bystander's data, which should fit a cache that CPUs share [default: twice the
    /// second-level cache of a CPU, or 4m]
    #[arg(long, value_name = "SIZE", value_parser = bystander)]
    pub bystander: Option<u64>,

    /// Bytes of the buffer in which loads are swept, and of that of the readers [default: twice all
    /// caches of the CPUs, and some 70m at least]
    #[arg(long, value_name = "SIZE", value_parser = bytes::region_size)]
    pub buffer: Option<u64>,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

/// Buffers are multiples of it, whatever their pages.
const HUGE: u64 = 2 << 20;

const EXAMPLES: &str = "\
Examples:
  pageleap bench prober
      the first node with two cores
  pageleap bench prober --node 1 --bystander 16m --runs 31 --json > prober.json
      another node; the data of the bystander is in the last-level cache";

/// Parses the bytes of the bystander's data.
fn bystander(text: &str) -> Result<u64, String> {
    match bytes::region_size(text)? {
        bytes if bytes < 256 << 10 => Err("the data has 256k at least".to_owned()),
        bytes if bytes > 1 << 30 => Err("data of more than 1g fits no cache".to_owned()),
        bytes => Ok(bytes.next_multiple_of(256 << 10)),
    }
}

/// Data that does not fit the caches of one CPU, and so lies in one that CPUs share, if there is one.
fn shared(caches: &[Cache]) -> u64 {
    const UNKNOWN: u64 = 4 << 20;
    let second = caches.iter().filter(|cache| cache.level == 2).map(|cache| cache.bytes).max();
    second.map_or(UNKNOWN, |bytes| (2 * bytes).clamp(1 << 20, 1 << 30).next_multiple_of(256 << 10))
}

/// Measures, prints and exports the runs that are complete.
pub fn run(args: &ProberArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let environment = Environment::start();
    let topology = Topology::read()?;
    let nodes = topology.nodes().iter().filter(|node| args.node.is_none_or(|id| id == node.id.0));
    let mut initiators = nodes.filter_map(|node| initiator(&topology, node));
    let Some(from) = initiators.find(|from| !from.injectors.is_empty()) else {
        let which =
            args.node.map_or("no node has".to_owned(), |id| format!("node {id} does not have"));
        let why =
            format!("{which} two cores that this process may use, for a probe and a bystander");
        return Err(Refusal::new(why).into());
    };
    let caches = data_caches(&SysFiles::host(), &from.cpus);
    let all = caches.as_ref().map(|all| all.iter().map(|cache| cache.bytes).sum());
    let bystander = args.bystander.unwrap_or_else(|| shared(&caches.unwrap_or_default()));
    let mut runs = Vec::new();
    let measured = (|| {
        let buffer = args.buffer.unwrap_or_else(|| buffer_bytes(all)).next_multiple_of(HUGE);
        let probing = Probing::new(&from, buffer, bystander as usize)?;
        let mut steps = Steps::new("probing", usize::from(args.runs), 1);
        for nth in 0..usize::from(args.runs) {
            steps.now("latency, CPU time, bystander".to_owned());
            let run = probing.run(nth)?;
            steps.done();
            steps.row_done(&format!(
                "probe {:.0} ns, sweep {:.0} ns",
                run.idle_ns.probe, run.idle_ns.sweep
            ));
            runs.push(run);
            interrupt::stop_if_received(|| format!("{} runs were measured", runs.len()))?;
        }
        Ok(())
    })();
    let printed = match runs.is_empty() {
        true => Ok(()),
        false => {
            let document = document(from.node, bystander, &runs)?;
            exports.print(&environment.add_to(document), args.json)
        }
    };
    export::conclude(measured, printed)
}

/// One property of both.
struct Row {
    what: &'static str,
    probe: Option<Summary>,
    sweep: Option<Summary>,
    ratio: Option<Summary>,
}

fn row(what: &'static str, runs: &[Run], of: impl Fn(&Run) -> Option<Both>) -> Row {
    let both: Vec<Both> = runs.iter().filter_map(of).collect();
    let summary = |of: &dyn Fn(&Both) -> f64| Summary::of(&both.iter().map(of).collect::<Vec<_>>());
    Row {
        what,
        probe: summary(&|both| both.probe),
        sweep: summary(&|both| both.sweep),
        ratio: summary(&|both| both.ratio()),
    }
}

fn rows(runs: &[Run]) -> Vec<Row> {
    vec![
        row("latency, alone", runs, |run| Some(run.idle_ns)),
        row("latency, beside readers", runs, |run| Some(run.loaded_ns)),
        row("CPU time", runs, |run| run.cpu_ns),
        row("lost by a bystander", runs, |run| Some(run.lost_ns)),
    ]
}

fn ns(value: Option<f64>) -> Value {
    value.map_or(Value::Unknown, |ns| Value::SignedNs(ns.round() as i64))
}

fn median_ns(summary: Option<Summary>) -> Value {
    ns(summary.map(|of| of.median))
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("what", "ns", "", |row: &Row| row.what.into()),
        column("probe_ns", "probe", "a probe of about 2000 lines", |row: &Row| {
            median_ns(row.probe)
        }),
        column("probe_min_ns", "", "", |row: &Row| ns(row.probe.map(|of| of.min))),
        column("probe_max_ns", "", "", |row: &Row| ns(row.probe.map(|of| of.max))),
        column(
            "sweep_ns",
            "sweep",
            "latency: loads over a buffer that no cache holds; else a sweep of 64 MB",
            |row: &Row| median_ns(row.sweep),
        ),
        column("sweep_min_ns", "", "", |row: &Row| ns(row.sweep.map(|of| of.min))),
        column("sweep_max_ns", "", "", |row: &Row| ns(row.sweep.map(|of| of.max))),
        column("", "share", "probe / sweep in the same run", |row: &Row| {
            row.ratio.map_or(Value::Unknown, |of| percent(of.median).into())
        }),
        column("", "of", "the lowest and the highest of a run", |row: &Row| {
            let span = |of: Summary| format!("{} to {}", percent(of.min), percent(of.max));
            row.ratio.map_or(Value::Unknown, |of| span(of).into())
        }),
        column("probe_to_sweep_ratio", "", "", |row: &Row| {
            Value::ratio(row.ratio.map(|of| of.median))
        }),
        column("probe_to_sweep_ratio_min", "", "", |row: &Row| {
            Value::ratio(row.ratio.map(|of| of.min))
        }),
        column("probe_to_sweep_ratio_max", "", "", |row: &Row| {
            Value::ratio(row.ratio.map(|of| of.max))
        }),
    ]
}

fn document(node: NodeId, bystander: u64, runs: &[Run]) -> Result<Document, Stop> {
    let rate = median(&runs.iter().map(|run| run.load_bytes_per_s).collect::<Vec<_>>());
    let facts = vec![
        fact("kernel", "Linux", machine::kernel_release()?),
        fact("node", "node", Value::count(node.0)),
        fact("runs", "runs", Value::count(runs.len())),
        fact("sweep_bytes", "sweep", Value::Bytes(SWEEP_BYTES as u64)),
        fact("bystander_bytes", "data of the bystander", Value::Bytes(bystander)),
        fact(
            "",
            "readers",
            Value::from(rate.map(|rate| format!("{} GB/s", three_digits(rate / 1e9)))),
        ),
        fact("load_bytes_per_s", "", Value::per_second(rate)),
    ];
    let table = Table::of(&columns(), &rows(runs), |_| String::new());
    let notes = vec![
        "A bystander loses the time by which it would have to run longer for as many loads. Below 0 it \
         was faster: the range between the lowest and the highest is what this command cannot tell apart."
            .to_owned(),
    ];
    Ok(Document {
        sections: vec![
            Section::new("", "Machine", Body::Facts(facts)),
            Section::new("rows", "A probe and a sweep (medians)", Body::Table(table)),
            Section::new("notes", "Notes", Body::Notes(notes)),
        ],
    })
}
