//! `pageleap advise`: says what to set for a program on this machine, as lines to type.
//!
//! The rules and the facts are those of `pageleap_launch::advice`. The files may be hostile, because
//! `--sysroot` names any folder: of their text only the kernel's release is printed, escaped.

mod json;
mod text;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use pageleap::topology::{SysFiles, Topology};
use pageleap_launch::advice::{Advice, Facts, Pattern, Workload, advise, combined};
use pageleap_measure::export::Format;

use crate::export::Exports;
use crate::stop::{Refusal, Stop};
use crate::{output, sysroot};

/// Say what to set for a program on this machine: balancing, huge pages, memory policy, CPUs and
/// allocator, as lines to type.
///
/// The rules are those of a paper (Memarzia, Ray, Bhavsar: The Art of Efficient In-memory Query
/// Processing on NUMA Systems, 2019), with the facts of this machine. Each piece of advice has its
/// source, its price, and the measurements of pageleap that differ from the paper. The last line is
/// all of it as one command.
///
/// Options say what you know of the program. Without them, advice has its condition in words. The
/// command sets nothing, measures nothing, and needs no privilege: only your program tells whether
/// advice helps.
///
/// Exit code: 0 shown; 1 nodes, CPUs or memory cannot be read; 2 a request that makes no sense.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AdviseArgs {
    /// Threads of the program that work at the same time
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Whether several threads allocate memory at the same time
    #[arg(long, value_name = "often|rarely|unknown", hide_possible_values = true)]
    #[arg(default_value = "unknown", hide_default_value = true)]
    pub allocates: Frequency,

    /// Whether threads use memory that other threads have written first, such as a common hash
    /// table; no: each uses its own part
    #[arg(long, value_name = "yes|no|unknown", hide_possible_values = true)]
    #[arg(default_value = "unknown", hide_default_value = true)]
    pub shares: Known,

    /// How the program goes through its memory: random, as in hash tables and indexes, or
    /// sequential, as in scans
    #[arg(long, value_name = "random|sequential|unknown", hide_possible_values = true)]
    #[arg(default_value = "unknown", hide_default_value = true)]
    pub access: Access,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,

    /// Read sys and proc below this folder instead of /, such as those of a recorded machine;
    /// nothing is then known of allocators and privileges
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder)]
    pub sysroot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  pageleap advise                                          all advice, with its conditions
  pageleap advise --threads 8 --shares yes --access random a hash join with 8 threads
  pageleap advise --allocates often                        a program that lives in malloc
  pageleap advise --json | jq -r .command                  the command alone";

/// How often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Frequency {
    /// Often.
    Often,
    /// Rarely, or never.
    Rarely,
    /// Not known.
    Unknown,
}

/// Whether.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Known {
    /// It is so.
    Yes,
    /// It is not so.
    No,
    /// Not known.
    Unknown,
}

/// How memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Access {
    /// In no order.
    Random,
    /// One after the other.
    Sequential,
    /// Not known.
    Unknown,
}

/// The advice, with the facts and the traits on which it depends.
struct Advised {
    facts: Facts,
    workload: Workload,
    advice: Vec<Advice>,
    /// All advice in one command.
    command: Option<String>,
    /// Facts of the machine that are damaged or cannot be read.
    warnings: Vec<String>,
}

/// Advice on programs that run already: only their memory can still be moved.
const RUNNING: &str = "A program that runs already keeps its policy and its allocator, but its memory \
                       can be moved: `pageleap status PROCESS` shows where it lies, and `pageleap move \
                       PROCESS --to NODES` moves it.";

/// Reads the machine, and prints and exports the advice.
pub fn run(args: &AdviseArgs) -> Result<(), Stop> {
    if args.threads == Some(0) {
        return Err(Refusal::new("--threads 0: a program has a thread at least".into()).into());
    }
    let exports = args.exports.open()?;
    let files = args.sysroot.as_ref().map_or_else(SysFiles::host, SysFiles::at);
    let topology = Topology::read_from(&files)?;
    let facts = Facts::read(&files, &topology);
    let workload = args.workload();
    let advice = advise(&facts, &workload);
    let command = combined(&advice);
    let warnings = topology.warnings().to_vec();
    let advised = Advised { facts, workload, advice, command, warnings };
    let result = |format| -> anyhow::Result<String> {
        match format {
            Format::Json => {
                let text = serde_json::to_string(&json::Object::of(&advised));
                Ok(text.context("the result could not be written as JSON")? + "\n")
            }
            Format::Text { width } => Ok(text::text(&advised, width)),
        }
    };
    let printed = output::write(&result(output::format(args.json))?);
    Ok(exports.write(printed, result)?)
}

impl AdviseArgs {
    fn workload(&self) -> Workload {
        Workload {
            threads: self.threads,
            allocates_often: match self.allocates {
                Frequency::Often => Some(true),
                Frequency::Rarely => Some(false),
                Frequency::Unknown => None,
            },
            shares_data: match self.shares {
                Known::Yes => Some(true),
                Known::No => Some(false),
                Known::Unknown => None,
            },
            pattern: match self.access {
                Access::Random => Some(Pattern::Random),
                Access::Sequential => Some(Pattern::Sequential),
                Access::Unknown => None,
            },
        }
    }
}
