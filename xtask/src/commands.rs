//! The cargo commands that more than one entry point runs, and where they build.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::mutants::Checker;

/// Environment variable with the seconds per case of the stress oracle.
pub const STRESS_SECONDS_VAR: &str = "PAGELEAP_STRESS_SECONDS";

/// Seconds per case of the stress oracle unless the variable or a flag says otherwise.
pub const STRESS_SECONDS: u64 = 5;

/// The same in the default test command.
const STRESS_SECONDS_SHORT: u64 = 1;

/// Environment variable with loom's exploration bound.
const LOOM_BOUND_VAR: &str = "LOOM_MAX_PREEMPTIONS";

/// Preemptions per execution that loom explores. Its authors find that 2 or 3 show nearly all
/// defects; without a bound the larger tests do not end.
const LOOM_BOUND: u64 = 3;

/// The same in the default test command.
const LOOM_BOUND_SHORT: u64 = 2;

/// Environment variable with the number of schedules that each shuttle test runs.
const SHUTTLE_SCHEDULES_VAR: &str = "PAGELEAP_SHUTTLE_ITERATIONS";

/// Schedules per test.
const SHUTTLE_SCHEDULES: u64 = 10_000;

/// The same in the default test command.
const SHUTTLE_SCHEDULES_SHORT: u64 = 1_000;

/// How much of a checker is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// As in the default test command: most defects show in a short time.
    Short,
    /// As in the deep steps.
    Full,
}

/// The source tree and its target directory.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// Directory of the workspace manifest.
    pub root: PathBuf,
    /// Cargo's target directory for it.
    pub target: PathBuf,
}

impl Workspace {
    /// The workspace that this binary was started for.
    pub fn locate() -> Result<Workspace> {
        // cargo sets the variable for `cargo run`. A binary that is started directly takes the
        // value that was compiled in.
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root =
            Path::new(&manifest).parent().context("xtask lies inside the workspace")?.to_owned();
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |dir| root.join(dir));
        Ok(Workspace { root, target })
    }

    /// A cargo command that runs in the root.
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        // Not $CARGO: only the rustup proxy in PATH understands `+nightly`.
        let mut command = Command::new("cargo");
        command.args(arguments).current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// The same workspace with the target directory of lints and documentation. In the directory of
    /// the tests they would wait until cargo has built these.
    pub fn for_lints(&self) -> Workspace {
        Workspace { target: self.target.join("lint"), ..self.clone() }
    }

    /// The same workspace with the target directory of a checker. Loom and shuttle need compiler
    /// flags of their own, and cargo would build all crates again at each change of flags.
    pub fn for_checker(&self, checker: Checker) -> Workspace {
        match checker {
            Checker::Loom | Checker::Shuttle | Checker::Directed => {
                Workspace { target: self.target.join(checker.name()), ..self.clone() }
            }
            Checker::Unit | Checker::Windows | Checker::Stress => self.clone(),
        }
    }

    /// The command that runs the tests of a checker. With `build_only` it compiles them only.
    ///
    /// A short run takes the profile of the tests, which compiles faster. A full run takes the
    /// release profile.
    pub fn checker(&self, checker: Checker, effort: Effort, build_only: bool) -> Command {
        let mut arguments = vec!["test"];
        match (checker, effort) {
            // The tests were built with the features of the whole workspace.
            (Checker::Stress, Effort::Short) => arguments.push("--workspace"),
            _ => arguments.extend(["-p", "pageleap"]),
        }
        let explores = matches!(checker, Checker::Loom | Checker::Shuttle | Checker::Stress);
        if effort == Effort::Full && explores {
            arguments.push("--release");
        }
        match checker {
            Checker::Loom | Checker::Shuttle | Checker::Directed => arguments.push("--lib"),
            Checker::Unit => {
                arguments.push("--lib");
                for test in ["attributes", "auto", "changing", "placement", "traced_model", "views"]
                {
                    arguments.extend(["--test", test]);
                }
            }
            Checker::Windows => arguments.extend(["--test", "windows"]),
            Checker::Stress => arguments.extend(["--test", "stress"]),
        }
        if build_only {
            arguments.push("--no-run");
        }
        match checker {
            Checker::Loom => arguments.push("loom_"),
            // Not captured: the failed schedule must be printed even if the process crashes.
            Checker::Shuttle => arguments.extend(["shuttle_", "--", "--nocapture"]),
            Checker::Directed => arguments.extend(["shuttle_directed_", "--", "--nocapture"]),
            Checker::Unit | Checker::Windows => {}
            Checker::Stress => arguments.extend(["--", "--nocapture"]),
        }
        let mut command = self.cargo(&arguments);
        let mut set = |variable, full: u64, short: u64| {
            let default = if effort == Effort::Full { full } else { short };
            command.env(variable, or_default(variable, &default.to_string()));
        };
        match checker {
            Checker::Loom => set(LOOM_BOUND_VAR, LOOM_BOUND, LOOM_BOUND_SHORT),
            Checker::Shuttle => {
                set(SHUTTLE_SCHEDULES_VAR, SHUTTLE_SCHEDULES, SHUTTLE_SCHEDULES_SHORT);
            }
            Checker::Directed | Checker::Unit | Checker::Windows => {}
            Checker::Stress => set(STRESS_SECONDS_VAR, STRESS_SECONDS, STRESS_SECONDS_SHORT),
        }
        match checker {
            Checker::Loom => command.env("RUSTFLAGS", with_cfg("loom")),
            Checker::Shuttle | Checker::Directed => command.env("RUSTFLAGS", with_cfg("shuttle")),
            Checker::Unit | Checker::Windows | Checker::Stress => &mut command,
        };
        command
    }
}

/// The compiler flags of the environment, and `--cfg` with a name.
fn with_cfg(name: &str) -> OsString {
    let mut flags = env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(format!(" --cfg {name}"));
    flags
}

/// The variable's value, or `default` where it is not set.
pub fn or_default(variable: &str, default: &str) -> OsString {
    env::var_os(variable).unwrap_or_else(|| default.into())
}

/// Runs a command that must succeed.
pub fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// What a command prints that must succeed, without the white space around it.
pub fn output(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
