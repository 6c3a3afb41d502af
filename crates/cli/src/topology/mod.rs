//! `pageleap topology`: shows memory nodes as the kernel reports them: a table and a picture of the
//! distances, or JSON.
//!
//! The files may be hostile, because `--sysroot` names any folder. So the command prints only
//! numbers and the library's errors, which leave out control characters.

mod json;
mod text;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use pageleap::topology::{Node, SysFiles, Topology};
use pageleap_measure::export::Format;

use crate::export::Exports;
use crate::output;
use crate::stop::Stop;
use crate::sysroot;

/// Show memory nodes: CPUs, free memory, huge pages, distances, and which nodes this process may
/// use.
///
/// The command reads sysfs and procfs, changes nothing, and needs no privilege.
///
/// Exit code: 0 shown; 1 nodes, CPUs or memory cannot be read; 2 nodes that do not exist, or a
/// folder that cannot be entered.
#[derive(Args, Clone, Debug)]
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
    let result = |format| -> anyhow::Result<String> {
        match format {
            Format::Json => {
                let machine = json::Machine::of(&topology, &shown);
                let text = serde_json::to_string(&machine);
                Ok(text.context("the result could not be written as JSON")? + "\n")
            }
            Format::Text { .. } => Ok(text::text(&topology, &shown, args.sysroot.is_none())),
        }
    };
    let printed = output::write(&result(output::format(args.json))?);
    Ok(exports.write(printed, result)?)
}
