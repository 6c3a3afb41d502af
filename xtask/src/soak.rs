//! `cargo xtask soak`: all features at once, for a chosen time, from a seed
//! (`crates/pageleap/tests/soak.rs`).

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::built::{self, Kind};
use crate::commands::Workspace;
use crate::hugepages;
use crate::process;

/// The test binary.
pub const TEST: &str = "soak";

/// How long the last round may take to check and to clean up after the time is over.
const ROUND_LIMIT: Duration = Duration::from_secs(10 * 60);

/// How long the soak may take to end after an interrupt.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The flags of `cargo xtask soak`.
#[derive(Debug, Clone, Args)]
pub struct Flags {
    #[command(flatten)]
    course: Course,
    /// Run under a sanitizer; needs the nightly toolchain with rust-src
    #[arg(long, value_name = "NAME")]
    sanitizer: Option<Sanitizer>,
}

/// How long the soak runs, and from which seed.
#[derive(Debug, Clone, Args)]
pub struct Course {
    /// How many minutes it runs
    #[arg(long, default_value_t = 20.0, value_parser = minutes)]
    minutes: f64,
    /// The seed that an earlier run has printed; by default each run takes another one
    #[arg(long)]
    seed: Option<u64>,
    /// The number of the first round
    #[arg(long, default_value_t = 0)]
    round: u64,
    /// Repeat the first round instead of going on to the next
    #[arg(long)]
    again: bool,
}

/// A sanitizer of the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sanitizer {
    /// Finds accesses to memory that is not allocated
    Address,
    /// Finds data races
    Thread,
}

impl Sanitizer {
    /// The compiler's name for it.
    fn name(self) -> &'static str {
        match self {
            Sanitizer::Address => "address",
            Sanitizer::Thread => "thread",
        }
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.01..=100_000.0).contains(number));
    number.ok_or_else(|| "give a number of minutes, at least 0.01".to_owned())
}

impl Course {
    /// How long the soak runs.
    pub fn length(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    /// Environment variables that the test reads.
    pub fn variables(&self) -> [(&'static str, String); 4] {
        let clock =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_secs());
        [
            ("PAGELEAP_SOAK_SECONDS", self.length().as_secs().max(1).to_string()),
            ("PAGELEAP_SOAK_SEED", self.seed.unwrap_or_else(clock).to_string()),
            ("PAGELEAP_SOAK_ROUND", self.round.to_string()),
            ("PAGELEAP_SOAK_AGAIN", u8::from(self.again).to_string()),
        ]
    }

    /// The time after which the soak counts as hung.
    pub fn limit(&self) -> Duration {
        self.length() + ROUND_LIMIT
    }
}

/// Arguments with which the test binary shows its progress.
pub const ARGUMENTS: [&str; 2] = ["--nocapture", "--test-threads=1"];

/// Runs the soak. Returns whether it passed.
pub fn run(workspace: &Workspace, flags: &Flags) -> Result<bool> {
    let _huge_pages = hugepages::Guard::reserve();
    let program = build(workspace, flags.sanitizer)?;
    let mut command = Command::new(program);
    command.args(ARGUMENTS).envs(flags.course.variables()).current_dir(&workspace.root);
    if let Some(sanitizer) = flags.sanitizer {
        command.env("PAGELEAP_SOAK_SANITIZER", sanitizer.name());
    }
    if flags.sanitizer == Some(Sanitizer::Thread) {
        let list = workspace.root.join("crates/pageleap/tests/soak/thread-sanitizer.txt");
        let given = std::env::var("TSAN_OPTIONS").unwrap_or_default();
        command.env("TSAN_OPTIONS", format!("suppressions={} {given}", list.display()));
    }
    process::ask_before_killing(END_LIMIT);
    let ending = process::run(command, flags.course.limit(), |line| println!("{line}"))?;
    if !ending.success() {
        println!("xtask: the soak has FAILED: {}", ending.reason(flags.course.limit()));
    }
    Ok(ending.success())
}

/// Builds the test in release mode. For a sanitizer it builds the standard library too, in a
/// directory of its own.
fn build(workspace: &Workspace, sanitizer: Option<Sanitizer>) -> Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let mut arguments = vec!["test", "-p", "pageleap", "--release", "--no-run", "--test", TEST];
    let command = match sanitizer {
        None => workspace.cargo(&arguments),
        Some(sanitizer) => {
            ensure!(cfg!(target_arch = "x86_64"), "sanitizers are supported on x86-64 only");
            let name = sanitizer.name();
            let own = workspace.target.join(format!("soak-{name}"));
            let own = Workspace { target: own, ..workspace.clone() };
            arguments.insert(0, "+nightly");
            arguments.extend(["-Zbuild-std", "--target", TARGET]);
            let mut command = own.cargo(&arguments);
            let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
            flags.push(format!(" -Zsanitizer={name}"));
            command.env("RUSTFLAGS", flags);
            command
        }
    };
    built::one(&built::executables(command)?, Kind::IntegrationTest, TEST)
}
