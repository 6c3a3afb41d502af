//! Unmodified programs of others whose memory leaps: `examples/malloc_in_region.c` is preloaded, and
//! what they print must equal what they print without it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::programs::{LIMIT, SKIPPED, pkg_config};
use super::{Layout, install};
use crate::commands::{Workspace, run};
use crate::files::{make_folder, read, with_extension};
use crate::process;
use crate::scratch::Scratch;
use crate::tally::Outcome;

/// The engines that keep system calls of a program whole, which nobody has written for leaps.
const ENGINES: [&str; 4] = ["auto", "precopy", "stop-copy", "wp-sync"];

/// Megabytes of each of the two pools of a process.
const POOL_MB: &str = "256";

/// Builds the library and the example, and runs each script of `crates/capi/tests/programs` without
/// it and with it, by each engine.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let prefix = workspace.target.join("capi");
    install(workspace, &Layout::movable(&prefix))?;
    let folder = workspace.target.join("programs");
    make_folder(&folder)?;
    let library = build(workspace, &prefix, &folder)?;
    let python = python_with_numpy(&folder);
    let scripts = with_extension(&workspace.root.join("crates/capi/tests/programs"), "sh")?;
    ensure!(!scripts.is_empty(), "there are no programs to run");
    let mut outcome = Outcome::default();
    for script in scripts {
        let name = script.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let alone = match run_script(&script, &python, &[]) {
            Ok(Printed::Lines(lines)) => lines,
            Ok(Printed::Skipped(reason)) => {
                outcome.add(&name, Ok(Some(reason)));
                continue;
            }
            Err(error) => {
                outcome.add(&name, Err(error.context("without leaps")));
                continue;
            }
        };
        for engine in ENGINES {
            let result = run_leaping(&script, &python, &library, engine, &alone);
            outcome.add(&format!("{name} ({engine})"), result.map(|()| None));
        }
    }
    Ok(outcome)
}

/// Builds the example as a library to preload.
fn build(workspace: &Workspace, prefix: &Path, folder: &Path) -> Result<PathBuf> {
    let library = folder.join("malloc_in_region.so");
    let mut compile = Command::new("gcc");
    compile.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]);
    compile.args(["-g", "-O2", "-shared", "-fPIC", "-pthread", "-o"]).arg(&library);
    compile.arg(workspace.root.join("crates/capi/examples/malloc_in_region.c"));
    compile.args(pkg_config(prefix, "pageleap", &["--cflags", "--libs"])?);
    compile.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    run(compile)?;
    Ok(library)
}

/// A Python with numpy: the system's, or one of the folder, which gets numpy from PyPI.
fn python_with_numpy(folder: &Path) -> PathBuf {
    let has_numpy = |python: &Path| {
        let imported = Command::new(python).args(["-c", "import numpy"]).output();
        imported.is_ok_and(|output| output.status.success())
    };
    let (system, own) = (PathBuf::from("python3"), folder.join("python/bin/python"));
    if has_numpy(&system) || has_numpy(&own) {
        return if has_numpy(&system) { system } else { own };
    }
    let mut make = Command::new(&system);
    make.args(["-m", "venv"]).arg(folder.join("python"));
    let mut fill = Command::new(&own);
    fill.args(["-m", "pip", "install", "--quiet", "numpy"]);
    match run(make).and_then(|()| run(fill)) {
        Ok(()) => own,
        Err(_) => system,
    }
}

/// What a script has printed.
enum Printed {
    Lines(Vec<String>),
    Skipped(String),
}

/// Runs a script in a folder of its own.
fn run_script(script: &Path, python: &Path, variables: &[(&str, &Path)]) -> Result<Printed> {
    let scratch = Scratch::new("programs");
    let mut command = Command::new("env");
    for (name, value) in variables {
        command.arg(format!("{name}={}", value.display()));
    }
    command.args(["sh", "-eu"]).arg(script).current_dir(scratch.path()).env("PYTHON", python);
    let mut lines = Vec::new();
    let ending = process::run(command, LIMIT, |line| lines.push(line.to_owned()))?;
    if ending.code() == Some(SKIPPED) {
        return Ok(Printed::Skipped(lines.pop().unwrap_or_default()));
    }
    ensure!(ending.success(), "{}\n{}", ending.reason(LIMIT), lines.join("\n"));
    Ok(Printed::Lines(lines))
}

/// Runs a script while the memory of all its programs leaps, and compares what it prints.
fn run_leaping(
    script: &Path,
    python: &Path,
    library: &Path,
    engine: &str,
    alone: &[String],
) -> Result<()> {
    let scratch = Scratch::new("programs-report");
    let report = scratch.path().join("report");
    let variables = [
        ("MALLOC_IN_REGION_REPORT", report.as_path()),
        ("MALLOC_IN_REGION_ENGINE", Path::new(engine)),
        ("MALLOC_IN_REGION_MB", Path::new(POOL_MB)),
        ("LD_PRELOAD", library),
    ];
    match run_script(script, python, &variables)? {
        Printed::Lines(lines) if lines == alone => {}
        Printed::Lines(lines) => bail!("it prints {lines:#?}, but without leaps {alone:#?}"),
        Printed::Skipped(reason) => bail!("it runs without leaps only: {reason}"),
    }
    let text = read(&report).context("no process has written its report")?;
    let mut sums = BTreeMap::new();
    for line in text.lines() {
        let process = figures(line)?;
        check(&process).with_context(|| line.to_owned())?;
        for (name, value) in process {
            *sums.entry(name).or_insert(0) += value;
        }
    }
    let of = |name| sums.get(name).copied().unwrap_or_default();
    ensure!(of("leaps") > 0 && of("moved_mb") > 0, "nothing has leapt");
    println!(
        "    {} processes, {} leaps of {} MB in all, {} pages busy",
        text.lines().count(),
        of("leaps"),
        of("moved_mb"),
        of("busy")
    );
    Ok(())
}

/// The figures of a process: names, each with its value.
fn figures(line: &str) -> Result<BTreeMap<&str, i64>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    words
        .chunks(2)
        .map(|pair| match pair {
            [name, value] => Ok((*name, value.parse()?)),
            _ => bail!("a name has no value"),
        })
        .collect::<Result<_>>()
        .with_context(|| format!("the report of a process has the line {line:?}"))
}

/// Whether a process has ended with all frames, with no job failed, and with no more mappings than
/// its last leap needs: it puts the pages of a run into consecutive frames.
fn check(process: &BTreeMap<&str, i64>) -> Result<()> {
    let of = |name: &str| process.get(name).copied().context("a figure is missing");
    ensure!(of("failed")? == 0, "a job has failed");
    ensure!(of("lost_bytes")? == 0, "frames have no owner, or two");
    ensure!(of("mappings")? <= 3 * of("runs")? + 2, "the region is left in pieces");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "pid 7 leaps 3 failed 0 runs 2 mappings 8 lost_bytes 0";

    #[test]
    fn a_process_that_lost_something_is_refused() {
        let verdict = |line: &str| check(&figures(line).unwrap()).is_ok();
        assert!(verdict(GOOD));
        assert!(!verdict(&GOOD.replace("failed 0", "failed 1")));
        assert!(!verdict(&GOOD.replace("lost_bytes 0", "lost_bytes -65536")));
        assert!(!verdict(&GOOD.replace("mappings 8", "mappings 9")));
        assert!(!verdict(&GOOD.replace("runs 2", "")));
        assert!(figures("pid 7 leaps").is_err() && figures("pid x").is_err());
    }
}
