//! A guest with the `pageleap` command: for a shell, for one command, or for a soak.

use anyhow::{Context, Result, bail, ensure};

use super::build;
use super::kernels::{self, Kernel};
use super::machine::{Done, Job, Lab};
use super::topology::Topology;
use super::transcript::{DONE, Event};
use super::{
    Flags, USUAL_SERIES, USUAL_TOPOLOGY, chosen_series, chosen_topologies, kernel_folder, lab,
};
use crate::built::Programs;
use crate::commands::Workspace;
use crate::soak;

/// The users that may run a command in a guest, as `xtask/guest/src/plan.rs` parses them.
pub const WHO: [&str; 3] = ["root", "nobody", "container"];

/// The one machine and the one kernel that the flags choose, or the usual ones.
fn single(workspace: &Workspace, flags: &Flags) -> Result<(Topology, Kernel)> {
    let name = match &flags.topology[..] {
        [] => USUAL_TOPOLOGY,
        [name] => name,
        _ => bail!("name only one topology"),
    };
    let series = match (&flags.kernel[..], &chosen_series(flags)?[..]) {
        ([], _) => USUAL_SERIES,
        (_, [series]) => series,
        _ => bail!("name only one kernel"),
    };
    let topologies = chosen_topologies(workspace, flags)?;
    let topology = topologies.into_iter().find(|topology| topology.name == name);
    let topology = topology.with_context(|| format!("unknown topology {name}"))?;
    Ok((topology, kernels::get(&kernel_folder(workspace), series)?))
}

/// A job for a guest with the `pageleap` command.
fn with_pageleap<'a>(
    workspace: &Workspace,
    topology: &'a Topology,
    kernel: &'a Kernel,
) -> Result<Job<'a>> {
    let mut job = Job::new(topology, kernel);
    job.programs = Programs::from([("pageleap".to_owned(), build::pageleap(workspace)?)]);
    job.plan.push("env PATH=/lab/bin:/bin".to_owned());
    job.plan.push("env HOME=/tmp".to_owned());
    Ok(job)
}

/// Runs an interactive shell on this terminal.
pub fn shell(workspace: &Workspace, flags: &Flags) -> Result<u8> {
    let (topology, kernel) = single(workspace, flags)?;
    let lab = lab(workspace, flags)?;
    ensure!(lab.busybox.is_some(), "a shell needs busybox: apt-get install busybox-static");
    let mut job = with_pageleap(workspace, &topology, &kernel)?;
    job.name += "-shell";
    job.plan.push("mode shell".to_owned());
    println!("lab: {}, Linux {}; leave with `exit` or Ctrl-A X", topology.about, kernel.release);
    println!("lab: software emulation: times mean nothing here");
    let ended = lab.interactive(&job)?;
    ensure!(
        ended.code() == Some(DONE) || ended.code() == Some(0),
        "the guest did not end as expected: {ended}"
    );
    Ok(0)
}

/// Runs a command in a guest, passes its output on, and returns its exit code.
pub fn run(workspace: &Workspace, flags: &Flags, who: &str, command: &[String]) -> Result<u8> {
    let done = in_guest(workspace, flags, who, command, |line| println!("{line}"))?;
    Ok(exit_code(&done))
}

/// Prints the problems of the guest, and returns the exit code of its command.
fn exit_code(done: &Done) -> u8 {
    /// The exit code of a shell for a command that could not be run.
    const NOT_RUN: u8 = 126;
    done.judged.problems.iter().for_each(|problem| eprintln!("lab: {problem}"));
    done.judged.console.iter().for_each(|line| eprintln!("lab:     {line}"));
    match done.exit {
        Some(code) if done.judged.problems.is_empty() => u8::try_from(code).unwrap_or(NOT_RUN),
        _ => NOT_RUN,
    }
}

/// Boots a guest, runs a command in it as user `who`, and passes each line of output to `on_line`.
pub fn in_guest(
    workspace: &Workspace,
    flags: &Flags,
    who: &str,
    command: &[String],
    on_line: impl FnMut(&str),
) -> Result<Done> {
    let (topology, kernel) = single(workspace, flags)?;
    let lab = lab(workspace, flags)?;
    let mut job = with_pageleap(workspace, &topology, &kernel)?;
    job.name += "-command";
    run_job(&lab, job, who, command, on_line)
}

/// Runs the soak test on each chosen kernel, one after the other, with sizes for emulated machines.
/// Returns the highest exit code.
pub fn soak(workspace: &Workspace, flags: &Flags, course: &soak::Course) -> Result<u8> {
    let lab = lab(workspace, flags)?;
    let program = build::soak(workspace)?;
    let mut worst = 0;
    for series in chosen_series(flags)? {
        let (topology, kernel) =
            single(workspace, &Flags { kernel: vec![series.to_owned()], ..flags.clone() })?;
        let mut job = Job::new(&topology, &kernel);
        job.name += "-soak";
        job.programs = Programs::from([(soak::TEST.to_owned(), program.clone())]);
        job.limit = course.limit() + job.limit;
        job.plan.push("env PATH=/lab/bin:/bin".to_owned());
        job.plan.push(format!("env PAGELEAP_LAB={}", topology.description()));
        job.plan
            .extend(course.variables().iter().map(|(name, value)| format!("env {name}={value}")));
        let words = [soak::TEST].into_iter().chain(soak::ARGUMENTS);
        let command: Vec<String> = words.map(str::to_owned).collect();
        let done = run_job(&lab, job, WHO[0], &command, |line| println!("{line}"))?;
        worst = worst.max(exit_code(&done));
    }
    Ok(worst)
}

/// Runs a command as user `who` in the guest of a job.
fn run_job(
    lab: &Lab,
    mut job: Job<'_>,
    who: &str,
    command: &[String],
    mut on_line: impl FnMut(&str),
) -> Result<Done> {
    job.plan.push("mode command".to_owned());
    job.plan.push(format!("as {who}"));
    job.plan.extend(command.iter().map(|argument| format!("arg {argument}")));
    eprintln!(
        "lab: {}, Linux {}; software emulation: times mean nothing here",
        job.topology.about, job.kernel.release
    );
    lab.run(&job, |_, _, event| {
        if let Event::Output(line) = event {
            on_line(&line);
        }
    })
}
