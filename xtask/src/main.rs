//! Developer entry points of pageleap, behind `cargo xtask …`.

mod api;
mod browser;
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
mod links;
mod marked;
mod mutants;
mod mutation;
mod notices;
mod process;
mod scratch;
mod soak;
mod steps;
mod syntax;
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
use steps::{Plan, Step, lanes};

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
    /// Runs the checks that a commit needs, and says what it did not run
    Test(TestFlags),
    /// Does one step of `test` in a process of its own
    #[command(hide = true)]
    Step {
        #[arg(value_parser = Step::parse)]
        step: Step,
        /// Where the report goes
        #[arg(long)]
        result: PathBuf,
    },
    /// Runs only the stress oracle, for longer
    Stress {
        /// Seconds per case
        #[arg(long, default_value_t = STRESS_SECONDS)]
        seconds: u64,
        /// Count skipped tests as failures
        #[arg(long)]
        deny_skip: bool,
    },
    /// Runs engines, page sizes, faults, guards, children and signals all at once, from a seed
    Soak(soak::Flags),
    /// Plants defects in the protocol, one after the other, and checks that each is caught
    Mutants(MutantFlags),
    /// Runs the tests on emulated machines with several memory nodes, on several kernels
    Lab(lab::Flags),
    /// Builds the C library and installs it in a directory, with its headers
    Capi {
        /// The directory; by default target/capi
        #[arg(long, value_name = "DIR")]
        prefix: Option<PathBuf>,
    },
    /// Makes a .deb for this Debian, and a tarball, in target/dist
    Dist,
    /// Lists the public interface of the libraries in public-api.txt beside each
    Api {
        /// Only say whether the lists are current
        #[arg(long)]
        check: bool,
    },
    /// Generates crates/capi/include/pageleap.h from the items of the crate and their comments
    Header {
        /// Only check that the file is current
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Args)]
struct TestFlags {
    /// Run the full variant of each step, and the deep steps
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// Run only these steps
    #[arg(long, value_name = "STEP", value_delimiter = ',', value_parser = Step::parse)]
    only: Vec<Step>,
    /// List the steps that would run, and run nothing
    #[arg(long)]
    list: bool,
    /// Count skipped tests and steps as failures
    #[arg(long)]
    deny_skip: bool,
}

#[derive(Debug, Args)]
struct MutantFlags {
    /// Only mutants whose name contains this text, or one of several with commas between them
    #[arg(long, default_value = "")]
    filter: String,
    /// Seconds after which a checker counts as hung
    #[arg(long, default_value_t = mutation::RUN_LIMIT.as_secs())]
    limit: u64,
    /// Write the list into docs/protocol.md and run nothing
    #[arg(long)]
    write: bool,
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

/// Runs the task. Returns the exit code: 0 if every check passed.
fn run(task: Task) -> Result<u8> {
    ctrlc::set_handler(on_interrupt).context("cannot install the interrupt handler")?;
    let workspace = Workspace::locate()?;
    let good = match task {
        Task::Test(flags) => test(&workspace, &flags)?,
        Task::Step { step, result } => {
            steps::work::run(&workspace, step).write(&result)?;
            true
        }
        Task::Stress { seconds, deny_skip } => {
            let plan = Plan::only(vec![Step::StressFull]);
            lanes::run(&workspace, &Plan { deny_skip, stress_seconds: Some(seconds), ..plan })
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
        Task::Api { check } => {
            let problems = api::run(&workspace, check)?;
            problems.iter().for_each(|problem| println!("{problem}"));
            problems.is_empty()
        }
    };
    Ok(u8::from(!good))
}

fn test(workspace: &Workspace, flags: &TestFlags) -> Result<bool> {
    let plan = match flags.only.is_empty() {
        true => Plan::usual(flags.all),
        false => Plan::only(flags.only.clone()),
    };
    if flags.list {
        list(&plan);
        return Ok(true);
    }
    Ok(lanes::run(workspace, &Plan { deny_skip: flags.deny_skip, ..plan }))
}

/// Prints all steps. Those that would run come first.
fn list(plan: &Plan) {
    let mut table = table::Table::new(&["step", "runs", "what it does"]);
    let (run, rest): (Vec<Step>, Vec<Step>) =
        Step::all().partition(|step| plan.steps.contains(step));
    for (steps, runs) in [(run, "yes"), (rest, "no")] {
        steps.iter().for_each(|step| table.row(&[step.name(), runs, step.about()]));
    }
    print!("{table}");
}

fn run_mutants(workspace: &Workspace, flags: &MutantFlags) -> Result<bool> {
    if flags.write {
        mutation::write_list(&workspace.root, TABLE)?;
        return Ok(true);
    }
    ensure!(!TABLE.is_empty(), "the mutation list is empty: add rows to xtask/src/mutants/");
    let _huge_pages = Guard::reserve();
    let wanted = |name: &str| flags.filter.split(',').any(|text| name.contains(text));
    let outcome = mutation::run(workspace, TABLE, wanted, Duration::from_secs(flags.limit))?;
    Ok(outcome.counts.failed == 0)
}

/// Runs on the thread of the ctrlc crate, not in signal context, for SIGINT, SIGTERM and SIGHUP.
fn on_interrupt() {
    process::ask_running();
    // Children first: the kernel keeps the huge pages that they use until they have ended.
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
        assert!(CommandLine::try_parse_from(["xtask", "test", "--only", "fmt", "--all"]).is_err());
    }
}
