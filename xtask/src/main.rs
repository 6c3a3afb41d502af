//! Developer entry points of pageleap, behind `cargo xtask …`.

mod built;
mod capi;
mod commands;
mod crates;
mod dist;
mod files;
mod header;
mod hugepages;
mod lab;
mod layers;
mod manual;
mod marked;
mod mutants;
mod mutation;
mod notices;
mod process;
#[cfg(test)]
mod scratch;
mod soak;
mod steps;
mod table;
mod tally;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};

use commands::{STRESS_SECONDS, Workspace};
use hugepages::Guard;
use mutants::TABLE;
use steps::{Plan, Step};

/// Exit code after an interrupt, as a shell gives for SIGINT.
const INTERRUPTED: i32 = 130;

/// Developer entry points of pageleap.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct CommandLine {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Runs every check of the project and prints a summary
    Test(TestFlags),
    /// Runs only the stress oracle, for longer
    Stress {
        /// Seconds per case
        #[arg(long, default_value_t = STRESS_SECONDS)]
        seconds: u64,
        /// Count skipped tests as failures
        #[arg(long)]
        deny_skip: bool,
    },
    /// Everything at once for as long as you like: engines, page sizes, faults, guards, children,
    /// signals, from a seed
    Soak(soak::Flags),
    /// Breaks the protocol on purpose, row by row, and expects each defect to be caught
    Mutants(MutantFlags),
    /// Runs the tests in emulated machines with several memory nodes, on several kernels
    Lab(lab::Flags),
    /// Builds the C library, and puts it with header and pkg-config file into a folder
    Capi {
        /// The folder; target/capi if not said
        #[arg(long, value_name = "DIR")]
        prefix: Option<PathBuf>,
    },
    /// Makes the packages: a .deb for this Debian, and a tarball, in target/dist
    Dist,
    /// Makes crates/capi/include/pageleap.h anew, from the comments and items of the crate
    Header {
        /// Only say whether it is as it should be
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Args)]
struct TestFlags {
    /// Leave out the slow steps (packages, crates, miri, mutants, lab)
    #[arg(long)]
    skip_slow: bool,
    /// Run only these steps
    #[arg(long, value_name = "STEP", value_delimiter = ',', value_parser = parse_step)]
    only: Vec<Step>,
    /// List the steps and run nothing
    #[arg(long)]
    list: bool,
    /// Count skipped tests and steps as failures
    #[arg(long)]
    deny_skip: bool,
}

#[derive(Debug, Args)]
struct MutantFlags {
    /// Only mutants whose name contains this text
    #[arg(long, default_value = "")]
    filter: String,
    /// Seconds that a checker may run on a mutant before it counts as hung
    #[arg(long, default_value_t = mutation::RUN_LIMIT.as_secs())]
    limit: u64,
    /// Write the list into docs/protocol.md and run nothing
    #[arg(long)]
    write: bool,
}

fn parse_step(text: &str) -> Result<Step, String> {
    let names = || Step::ALL.map(Step::name).join(", ");
    Step::ALL
        .into_iter()
        .find(|step| step.name() == text)
        .ok_or_else(|| format!("the steps are {}", names()))
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    match run(line.task) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does the task; returns the exit code: 0 if all that it checked is good.
fn run(task: Task) -> Result<u8> {
    ctrlc::set_handler(on_interrupt).context("cannot install the interrupt handler")?;
    let workspace = Workspace::locate()?;
    let good = match task {
        Task::Test(flags) => test(&workspace, &flags),
        Task::Stress { seconds, deny_skip } => {
            let steps = vec![Step::Stress];
            let plan =
                Plan { steps, left_out: Vec::new(), deny_skip, stress_seconds: Some(seconds) };
            steps::run(&workspace, &plan)
        }
        Task::Soak(flags) => soak::run(&workspace, &flags)?,
        Task::Mutants(flags) => run_mutants(&workspace, &flags)?,
        Task::Lab(flags) => return lab::command(&workspace, &flags),
        Task::Capi { prefix } => {
            let prefix = prefix.unwrap_or_else(|| workspace.target.join("capi"));
            capi::install(&workspace, &capi::Layout::movable(&prefix))?;
            println!("PKG_CONFIG_PATH={}", prefix.join("lib/pkgconfig").display());
            true
        }
        Task::Dist => {
            let dist::Packages { deb, tarball } = dist::make(&workspace)?;
            println!("{}\n{}", deb.display(), tarball.display());
            true
        }
        Task::Header { check } => header::run(&workspace, check)?,
    };
    Ok(u8::from(!good))
}

fn test(workspace: &Workspace, flags: &TestFlags) -> bool {
    if flags.list {
        let mut list = table::Table::new(&["step", "", "what it does"]);
        for step in Step::ALL {
            list.row(&[step.name(), if step.is_slow() { "slow" } else { "" }, step.about()]);
        }
        print!("{list}");
        return true;
    }
    let chosen = |step: &Step| flags.only.is_empty() || flags.only.contains(step);
    let (left_out, steps) =
        Step::ALL.into_iter().filter(chosen).partition(|step| flags.skip_slow && step.is_slow());
    steps::run(
        workspace,
        &Plan { steps, left_out, deny_skip: flags.deny_skip, stress_seconds: None },
    )
}

fn run_mutants(workspace: &Workspace, flags: &MutantFlags) -> Result<bool> {
    if flags.write {
        mutation::write_list(&workspace.root, TABLE)?;
        return Ok(true);
    }
    ensure!(!TABLE.is_empty(), "the mutation list is empty: add rows to xtask/src/mutants.rs");
    let _huge_pages = Guard::reserve();
    let outcome = mutation::run(workspace, TABLE, &flags.filter, Duration::from_secs(flags.limit))?;
    Ok(outcome.counts.failed == 0)
}

/// Runs on the thread of the ctrlc crate, not in signal context, for SIGINT, SIGTERM and SIGHUP.
fn on_interrupt() {
    process::ask_running();
    // Children first: huge pages that they use do not go back before they are gone.
    let _no_more_children = process::kill_running();
    hugepages::restore();
    std::process::exit(INTERRUPTED);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        <CommandLine as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn steps_are_chosen_by_name() {
        let line = CommandLine::try_parse_from(["xtask", "test", "--only", "fmt,docs"]).unwrap();
        assert!(matches!(line.task, Task::Test(flags) if flags.only == [Step::Fmt, Step::Docs]));
        assert!(CommandLine::try_parse_from(["xtask", "test", "--only", "nothing"]).is_err());
    }
}
