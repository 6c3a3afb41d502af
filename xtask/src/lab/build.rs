//! Static builds of the programs that run in a guest: the test binaries, the first process, and the
//! `pageleap` command.
//!
//! They are compiled for the target of the host, without shared libraries. The host can therefore
//! run them too, and asks the test binaries for the names of their tests.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::built::{Programs, executables};
use crate::commands::Workspace;
use crate::soak;

/// The only target on which the kernels of the lab boot.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The test binaries of the library whose results depend on the kernel or the machine. `topology`
/// reads recorded machines only. `joining` takes more huge pages than machines of the lab have.
pub const TEST_BINARIES: [&str; 19] = [
    "attributes",
    "bad_input",
    "contract",
    "fault_injection",
    "heap",
    "leap",
    "limits",
    "model_and_kernel",
    "nodes",
    "nodes_adverse",
    "pace",
    "pins",
    "placement",
    "several",
    "signal_threads",
    "signals",
    "soak",
    "stress",
    "system_calls",
];

/// The test binaries of the command. They start the command from the path where cargo has put it.
const COMMAND_TEST_BINARIES: [&str; 2] = ["demo", "doctor"];

/// A test of a test binary.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TestId {
    /// Name of the test binary.
    pub binary: String,
    /// Name of the test in the binary.
    pub name: String,
}

impl std::fmt::Display for TestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}::{}", self.binary, self.name)
    }
}

/// The test binaries, and the command that some of them start.
#[derive(Debug)]
pub struct Tests {
    /// The test binaries, by name.
    pub binaries: Programs,
    /// The `pageleap` command, at the path where its tests expect it.
    pub command: PathBuf,
}

impl Tests {
    /// Whether the tests of this binary start the command.
    pub fn starts_command(binary: &str) -> bool {
        COMMAND_TEST_BINARIES.contains(&binary)
    }
}

/// Builds the test binaries.
pub fn tests(workspace: &Workspace) -> Result<Tests> {
    let mut arguments = vec!["test", "-p", "pageleap", "-p", "pageleap-cli", "--no-run"];
    let names = TEST_BINARIES.iter().chain(&COMMAND_TEST_BINARIES);
    names.for_each(|name| arguments.extend(["--test", name]));
    let mut binaries = build(workspace, &arguments)?;
    let command = binaries.remove("pageleap").context("cargo has built no pageleap")?;
    Ok(Tests { binaries, command })
}

/// Builds the soak test.
pub fn soak(workspace: &Workspace) -> Result<PathBuf> {
    let mut programs =
        build(workspace, &["test", "-p", "pageleap", "--no-run", "--test", soak::TEST])?;
    programs.remove(soak::TEST).context("cargo has built no soak")
}

/// Builds the first process of the guests.
pub fn guest(workspace: &Workspace) -> Result<PathBuf> {
    let mut programs = build(workspace, &["build", "-p", "lab-guest"])?;
    programs.remove("lab-guest").context("cargo has built no lab-guest")
}

/// Builds the `pageleap` command.
pub fn pageleap(workspace: &Workspace) -> Result<PathBuf> {
    let mut programs = build(workspace, &["build", "--release", "-p", "pageleap-cli"])?;
    programs.remove("pageleap").context("cargo has built no pageleap")
}

fn build(workspace: &Workspace, arguments: &[&str]) -> Result<Programs> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "the lab boots x86-64 kernels, so it needs an x86-64 machine"
    );
    // A target directory of its own. These compiler flags differ from those of the other steps, and
    // one directory would be rebuilt at each change.
    let own = Workspace { target: workspace.target.join("lab").join("build"), ..workspace.clone() };
    let mut command = own.cargo(arguments);
    let mut flags = env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" -C target-feature=+crt-static -C strip=debuginfo");
    command.args(["--target", TARGET]).env("RUSTFLAGS", flags);
    executables(command)
}

/// The tests of these binaries. Each binary lists its own tests.
pub fn list(programs: &Programs) -> Result<Vec<TestId>> {
    let mut tests = Vec::new();
    for (binary, path) in programs {
        let output = Command::new(path)
            .args(["--list", "--format", "terse"])
            .output()
            .with_context(|| format!("cannot start {}", path.display()))?;
        ensure!(output.status.success(), "{} --list failed: {}", path.display(), output.status);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.extend(names.map(|name| TestId { binary: binary.clone(), name: name.to_owned() }));
    }
    ensure!(!tests.is_empty(), "the test binaries list no tests");
    // The names must be unique, because skips outside the lab have only the name of the test.
    let mut names = BTreeMap::new();
    for test in &tests {
        if let Some(other) = names.insert(&test.name, test) {
            bail!("{test} and {other} have the same name");
        }
    }
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_binary_is_in_a_list_or_left_out_here() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (folder, known) in [
            ("crates/pageleap/tests", [&TEST_BINARIES[..], &["joining", "topology"]].concat()),
            ("crates/cli/tests", [&COMMAND_TEST_BINARIES[..], &["bench", "topology"]].concat()),
        ] {
            for entry in std::fs::read_dir(root.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                if let Some(name) = name.strip_suffix(".rs") {
                    assert!(
                        known.contains(&name),
                        "{folder}/{name}.rs is neither run in the lab nor left out here"
                    );
                }
            }
        }
    }
}
