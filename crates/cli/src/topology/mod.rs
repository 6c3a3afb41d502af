//! `pageleap topology`: shows memory nodes as the kernel reports them: a table and a picture of the
//! distances, or JSON.
//!
//! The files may be hostile, because `--sysroot` names any folder. So the command prints only
//! numbers and the library's errors, which leave out control characters.
//!
//! With `--measure`, `measure` measures each pair of nodes, and `measured` makes text and JSON of it.

mod json;
mod measure;
mod measured;
mod text;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use pageleap::topology::{Node, SysFiles, Topology};
use pageleap_measure::export::Format;

use crate::export::Exports;
use crate::stop::Stop;
use crate::{bytes, export, output, sysroot};

/// Show memory nodes: CPUs, free memory, huge pages, distances, and which nodes this process may
/// use.
///
/// The command reads sysfs and procfs, changes nothing, and needs no privilege.
///
/// With --measure it also measures, from the CPUs of each node to the memory of each node: the
/// latency of a load (by pointer chasing), alone and beside threads that read; and the bandwidth of
/// reads, writes and copies. A pair takes 10 to 20 seconds, and memory on the target: four times all
/// caches of the CPUs, and 128m at least. Other load on the machine shows in the figures.
///
/// Exit code: 0 shown; 1 nodes, CPUs or memory cannot be read, or no pair could be measured; 2
/// nodes that do not exist, or a folder that cannot be entered; 130 interrupted by Ctrl-C: pairs that
/// were measured by then are shown.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TopologyArgs {
    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,

    /// Read sys and proc below this folder instead of /, such as a container's or a recorded
    /// machine's
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder)]
    pub sysroot: Option<PathBuf>,

    /// Show only these online nodes, in numactl's notation: 0,2-3 or !1 or all or +0-1 (the first
    /// two online nodes)
    #[arg(long, value_name = "NODES", allow_hyphen_values = true)]
    pub nodes: Option<String>,

    /// Measure latency and bandwidth from the CPUs of each of these nodes to the memory of each
    #[arg(long, conflicts_with = "sysroot")]
    pub measure: bool,

    /// Runs of each figure; the median counts
    #[arg(long, value_name = "N", default_value = "5", requires = "measure")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Bytes of a buffer, two of which are taken on the target [default: twice all caches of the
    /// CPUs, and 64m at least]
    #[arg(long, value_name = "SIZE", requires = "measure", value_parser = buffer)]
    pub buffer: Option<u64>,
}

const EXAMPLES: &str = "\
Examples:
  pageleap topology
      nodes, CPUs, memory, distances
  pageleap topology --measure
      how long loads take, and how much goes through, from each node to each node
  pageleap topology --measure --nodes 0,2 --runs 9 --json > measured.json
      two nodes only, with more runs";

/// Parses the bytes of a buffer: whole huge pages.
fn buffer(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 2 << 20;
    let bytes = bytes::region_size(text)?;
    match bytes < LEAST {
        true => Err("a buffer has 2m at least".to_owned()),
        false => Ok(bytes.next_multiple_of(LEAST)),
    }
}

/// Reads the machine, prints it and exports it.
pub fn run(args: &TopologyArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    let files = args.sysroot.as_ref().map_or_else(SysFiles::host, SysFiles::at);
    let topology = Topology::read_from(&files)?;
    let shown = match &args.nodes {
        Some(text) => topology.parse_online_nodes(text, None)?,
        None => topology.nodes().iter().map(|node| node.id).collect(),
    };
    let shown: Vec<&Node> =
        topology.nodes().iter().filter(|node| shown.contains(&node.id)).collect();
    let (measured, ended) = match args.measure {
        true => {
            let (measured, ended) = measure::measure(args, &topology, &shown)?;
            (Some(measured), ended)
        }
        false => (None, Ok(())),
    };
    if measured.as_ref().is_some_and(|measured| measured.pairs.is_empty()) {
        return ended;
    }
    let result = |format| -> anyhow::Result<String> {
        match format {
            Format::Json => {
                let machine = json::Machine::of(&topology, &shown, measured.as_ref());
                let text = serde_json::to_string(&machine);
                Ok(text.context("the result could not be written as JSON")? + "\n")
            }
            Format::Text { .. } => {
                let text = text::text(&topology, &shown, args.sysroot.is_none());
                let tables = measured.as_ref().map(|measured| measured::text(measured, &topology));
                Ok(text + &tables.unwrap_or_default())
            }
        }
    };
    let printed = output::write(&result(output::format(args.json))?);
    export::conclude(ended, exports.write(printed, result))
}
