//! Runs the steps of a plan, two lanes side by side, each step in a process of its own.
//!
//! A step in a lane prints nothing while it runs: its output goes to `target/xtask/log/STEP.txt`.
//! When it has ended, one line tells the result. So lines of two steps never mix. The summary shows
//! the end of each failed step's log. With `--only`, a step that runs by itself shows its output at
//! once as well.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::passed::{self, Tested};
use super::report::{Done, Report, Verdict};
use super::{Place, Plan, Step, summary};
use crate::commands::{STRESS_SECONDS_VAR, Workspace};
use crate::hugepages;
use crate::process;
use crate::table::seconds;

/// After this a step hangs. Its own commands have shorter limits; this is the last resort.
const LIMIT: Duration = Duration::from_secs(3 * 60 * 60);

/// How long a step may take to end what it has started, after an interrupt.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Runs the plan, prints the summary, and returns whether all went well.
pub fn run(workspace: &Workspace, plan: &Plan) -> bool {
    let start = Instant::now();
    let tested = Tested::now(&workspace.root);
    let names: Vec<_> = plan.steps.iter().map(|step| step.name()).collect();
    println!(
        "==> {}; a line when each has ended, its output in target/xtask/log",
        names.join(", ")
    );
    process::ask_before_killing(END_LIMIT);
    let wanted = plan.steps.iter().any(|step| step.wants_huge_pages());
    let huge_pages = wanted.then(hugepages::Guard::reserve);

    let at = |place| plan.steps.iter().copied().filter(move |step| step.place() == place);
    let (first, second): (Vec<_>, Vec<_>) =
        (at(Place::First).collect(), at(Place::Second).collect());
    let single = !plan.is_whole && (first.is_empty() || second.is_empty());
    let run = Run { workspace, plan, show: single, ended: Mutex::new(Vec::new()) };
    thread::scope(|scope| {
        scope.spawn(|| second.iter().for_each(|&step| run.step(step)));
        first.iter().for_each(|&step| run.step(step));
    });
    let alone = Run { show: !plan.is_whole, ..run };
    at(Place::Alone).for_each(|step| alone.step(step));
    drop(huge_pages);

    let mut done = alone.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|done| done.step);
    let whole = summary::Whole::of(plan, done);
    if whole.is_good() && plan.is_whole {
        let file = tested.and_then(|before| {
            passed::write(&workspace.root, &workspace.target, &before, &whole.not_run())
        });
        if let Err(error) = file {
            println!("xtask: it is not written down that this commit has passed: {error:#}");
        }
    }
    whole.print(start.elapsed());
    whole.is_good()
}

/// What the lanes share.
struct Run<'a> {
    workspace: &'a Workspace,
    plan: &'a Plan,
    /// Whether output is shown while it comes.
    show: bool,
    /// Also what keeps the lines of two lanes apart.
    ended: Mutex<Vec<Done>>,
}

impl Run<'_> {
    fn step(&self, step: Step) {
        if process::is_ending() {
            return;
        }
        let name = step.name();
        if self.show {
            println!("==> {name}: {}", step.about());
        }
        let start = Instant::now();
        let (report, log) = self.in_a_process(step).unwrap_or_else(|error| {
            (Report::new(Verdict::Failed(format!("{error:#}"))), PathBuf::new())
        });
        let elapsed = start.elapsed();
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        println!(
            "==> {}/{} {name}: {}, {} s ({} s of CPU)",
            ended.len() + 1,
            self.plan.steps.len(),
            report.verdict.text(),
            seconds(elapsed),
            seconds(Duration::from_secs_f64(report.cpu_seconds)),
        );
        ended.push(Done { step, report, elapsed, log });
    }

    /// Starts this program again for one step. Returns the report and the file with its output.
    fn in_a_process(&self, step: Step) -> Result<(Report, PathBuf)> {
        let folder = self.workspace.target.join("xtask").join("log");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let folder = folder.canonicalize()?;
        let log = folder.join(format!("{}.txt", step.name()));
        let result = folder.join(format!("{}.json", step.name()));
        // The result of an earlier run must not be taken for that of this one.
        if result.exists() {
            fs::remove_file(&result)
                .with_context(|| format!("cannot remove {}", result.display()))?;
        }
        // By this name it is found even if cargo has written the file anew meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.args(["step", step.name(), "--result"]).arg(&result);
        if let Some(seconds) = self.plan.stress_seconds {
            command.env(STRESS_SECONDS_VAR, seconds.to_string());
        }
        let mut file = BufWriter::new(
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?,
        );
        let mut written = Ok(());
        let ending = process::run(command, LIMIT, |line| {
            if self.show {
                println!("{line}");
            }
            if written.is_ok() {
                written = writeln!(file, "{line}").and_then(|()| file.flush());
            }
        })?;
        written.with_context(|| format!("cannot write {}", log.display()))?;
        if !ending.success() {
            let why = anyhow!("its process ended badly: {}", ending.reason(LIMIT));
            return Ok((Report::new(Verdict::Failed(format!("{why:#}"))), log));
        }
        Ok((Report::read(&result)?, log))
    }
}
