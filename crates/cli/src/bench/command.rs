//! The measurements of `pageleap bench`.

use clap::{Args, Subcommand};

use super::allocators::AllocatorsArgs;
use super::args::EnginesArgs;
use super::compare::CompareArgs;
use super::experiments::{AllArgs, ExperimentCommand};
use super::page_tables::PageTablesArgs;
use super::prober::ProberArgs;

/// Measure what leaps cost on this machine, beside the other ways to move memory; compare
/// allocators, moves of page tables, and probes of latency.
#[derive(Args, Clone, Debug)]
#[command(arg_required_else_help = true, args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// Show the experiments: the figure of the paper, the nodes and the memory that each needs, and
    /// how long it takes
    #[arg(long)]
    pub list: bool,

    /// Show them as one JSON object
    #[arg(long, requires = "list")]
    pub json: bool,

    /// The measurement
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
}

/// The measurements of `pageleap bench`.
#[derive(Subcommand, Clone, Debug)]
pub enum BenchCommand {
    All(AllArgs),
    Allocators(AllocatorsArgs),
    Compare(CompareArgs),
    Engines(Box<EnginesArgs>),
    PageTables(PageTablesArgs),
    Prober(ProberArgs),
    #[command(flatten)]
    Experiment(ExperimentCommand),
}
