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

/// `auto`, and the engines with which no system call fails because of a leap (`Engine::signals` is
/// false), because these programs were not written for leaps.
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
    outcome.add("an unknown engine", refuses_unknown_engine(&library).map(|()| None));
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
            let result = run_leaping(&script, &name, &python, &library, engine, &alone);
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
    compile.args(["-ldl".to_owned(), format!("-Wl,-rpath,{}", prefix.join("lib").display())]);
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

/// Whether a process ends at once that is to leap by an engine that does not exist.
fn refuses_unknown_engine(library: &Path) -> Result<()> {
    let mut command = Command::new("env");
    command.arg("MALLOC_IN_REGION_ENGINE=nonsense").arg(with_name("LD_PRELOAD", library));
    let output = command.args(["echo", "a program"]).output().context("cannot run env")?;
    let (code, words) = (output.status.code(), String::from_utf8_lossy(&output.stderr));
    ensure!(code == Some(2) && output.stdout.is_empty(), "it ends with {code:?}");
    ensure!(words.contains("there is no engine nonsense"), "it says {words:?}");
    Ok(())
}

fn with_name(name: &str, value: &Path) -> String {
    format!("{name}={}", value.display())
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
        command.arg(with_name(name, value));
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
    name: &str,
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
    let processes = text.lines().map(process_of).collect::<Result<Vec<_>>>()?;
    for process in &processes {
        check(process, engine).with_context(|| format!("{process:?}"))?;
    }
    check_program(&processes, program_of(name))?;
    println!(
        "    {} processes, {} leaps of {} MB in all, {} pages busy",
        processes.len(),
        sum(&processes, "leaps"),
        sum(&processes, "moved_kb") / 1024,
        sum(&processes, "busy")
    );
    Ok(())
}

/// What a process has written when it ended.
#[derive(Debug)]
struct Process<'a> {
    program: &'a str,
    engine: &'a str,
    figures: BTreeMap<&'a str, i64>,
}

fn process_of(line: &str) -> Result<Process<'_>> {
    read_process(line).with_context(|| format!("the report of a process has the line {line:?}"))
}

/// A line is names, each with its value.
fn read_process(line: &str) -> Result<Process<'_>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["program", program, "engine", engine, ref rest @ ..] = words[..] else {
        bail!("it does not begin with the program and the engine");
    };
    let figure = |pair: &[&'_ str]| match *pair {
        [_, value] => Ok(value.parse()?),
        _ => bail!("a name has no value"),
    };
    let figures = rest.chunks(2).map(|pair| Ok((pair[0], figure(pair)?))).collect::<Result<_>>()?;
    Ok(Process { program, engine, figures })
}

impl Process<'_> {
    fn figure(&self, name: &str) -> Result<i64> {
        self.figures.get(name).copied().with_context(|| format!("the figure {name} is missing"))
    }
}

fn sum(processes: &[Process<'_>], name: &str) -> i64 {
    processes.iter().filter_map(|process| process.figures.get(name)).sum()
}

/// Whether a process leapt by the engine that was asked for, and has ended with all frames, with no
/// job failed, and with no more mappings than its last leap needs: it puts the pages of a run into
/// consecutive frames.
fn check(process: &Process<'_>, engine: &str) -> Result<()> {
    let of = |name| process.figure(name);
    ensure!(process.engine == engine, "it leapt by {}, not by {engine}", process.engine);
    ensure!(of("failed")? == 0, "a job has failed");
    ensure!(of("elsewhere")? == 0, "the region had no memory for the program");
    ensure!(of("lost_bytes")? == 0, "frames have no owner, or two");
    ensure!(of("mappings")? <= 3 * of("runs")? + 2, "the region is left in pieces");
    Ok(())
}

/// The program that a script is about.
fn program_of(script: &str) -> &str {
    match script {
        "numpy" => "python",
        "redis" => "redis-server",
        name => name,
    }
}

/// Whether the program, whose name may end with a version, has run and leapt.
fn check_program(processes: &[Process<'_>], program: &str) -> Result<()> {
    let is_version = |rest: &str| rest.chars().all(|c| c.is_ascii_digit() || c == '.');
    let of_program =
        |process: &&Process<'_>| process.program.strip_prefix(program).is_some_and(is_version);
    let moved: Result<Vec<i64>> =
        processes.iter().filter(of_program).map(|process| process.figure("moved_kb")).collect();
    let most = moved?.into_iter().max().with_context(|| format!("no {program} has a line"))?;
    ensure!(most > 0, "the memory of {program} has not leapt");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "program python3 engine auto pid 7 leaps 3 failed 0 moved_kb 5 elsewhere 0 \
                        runs 2 mappings 8 lost_bytes 0";

    #[test]
    fn a_process_that_lost_something_is_refused() {
        let verdict = |line: &str| check(&process_of(line).unwrap(), "auto").is_ok();
        assert!(verdict(GOOD));
        assert!(!verdict(&GOOD.replace("failed 0", "failed 1")));
        assert!(!verdict(&GOOD.replace("elsewhere 0", "elsewhere 1")));
        assert!(!verdict(&GOOD.replace("lost_bytes 0", "lost_bytes -65536")));
        assert!(!verdict(&GOOD.replace("mappings 8", "mappings 9")));
        assert!(!verdict(&GOOD.replace("runs 2", "")));
        assert!(!verdict(&GOOD.replace("engine auto", "engine precopy")));
        for line in ["", "pid 7", "program x engine auto pid", "program x engine auto pid y"] {
            assert!(process_of(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_program_of_a_script_must_have_leapt() {
        let verdict = |line: &str, program| check_program(&[process_of(line).unwrap()], program);
        verdict(GOOD, "python").unwrap();
        verdict(&GOOD.replace("python3", "python3.11"), "python").unwrap();
        for other in ["git", "pyth", "python4"] {
            assert!(verdict(GOOD, other).is_err(), "{other}");
        }
        assert!(verdict(&GOOD.replace("moved_kb 5", "moved_kb 0"), "python").is_err());
        assert!(check_program(&[], "python").is_err());
    }
}
