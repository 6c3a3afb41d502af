//! The `pageleap` command.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
// `eprintln!` panics if standard error cannot be written; `output::note` does not.
#![cfg_attr(not(test), warn(clippy::print_stderr))]

mod advise;
mod bench;
mod bytes;
mod demo;
mod doctor;
mod engine;
mod environment;
mod export;
mod generate;
mod interrupt;
mod kernel_memory;
mod machine;
mod migrate;
mod output;
mod progress;
mod restore;
mod run;
mod selection;
mod settings;
mod status;
mod stop;
mod sysroot;
mod times;
mod topology;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use stop::Stop;

/// Moves memory between nodes while threads keep reading and writing it.
#[derive(Parser)]
#[command(name = "pageleap", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Advise(advise::AdviseArgs),
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    Churn(bench::ChurnArgs),
    Demo(Box<demo::DemoArgs>),
    Doctor(doctor::DoctorArgs),
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
    #[command(hide = true)]
    KeepSettings(settings::KeeperArgs),
    Move(Box<migrate::MoveArgs>),
    Restore(restore::RestoreArgs),
    Run(Box<run::RunArgs>),
    Status(status::StatusArgs),
    Topology(topology::TopologyArgs),
}

/// Exit code for a request that the command refuses. clap uses the same code for flags that it
/// refuses.
const USAGE: u8 = 2;
/// Exit code for a failure or a mismatch.
const FAILED: u8 = 1;
/// The base of the exit code after a signal: shells report this number plus that of the signal.
const SIGNALLED: u8 = 128;

fn main() -> ExitCode {
    let command = run::parse::<Cli>().command;
    // These settle themselves, or change nothing and wait for nobody.
    let is_apart = matches!(
        command,
        Command::Churn(_) | Command::KeepSettings(_) | Command::Restore(_) | Command::Run(_)
    );
    if !is_apart {
        settings::settle();
    }
    let result = match command {
        Command::Advise(args) => advise::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Churn(args) => bench::churn(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(code) => return code,
            Err(stop) => Err(stop),
        },
        Command::Generate(args) => generate::run(&args, Cli::command()),
        Command::KeepSettings(args) => settings::keep(&args),
        Command::Move(args) => migrate::run(&args),
        Command::Restore(args) => restore::run(&args),
        Command::Run(args) => return run::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Topology(args) => topology::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stop::Refused(error)) => {
            output::note(&format!("error: {error:#}"));
            ExitCode::from(USAGE)
        }
        Err(Stop::Failed(error)) => {
            output::note(&format!("error: {error:#}"));
            ExitCode::from(FAILED)
        }
        Err(Stop::Interrupted { signal, found }) => {
            output::note(&format!("interrupted: {found}"));
            ExitCode::from(SIGNALLED.wrapping_add(signal as u8))
        }
    }
}
