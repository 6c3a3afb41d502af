//! What each step does. It runs in a process of its own, which [`super::lanes`] starts.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Step;
use super::report::{PassedInGuest, Report, Verdict};
use crate::api;
use crate::browser;
use crate::capi::{self, preloaded};
use crate::commands::{Effort, STRESS_SECONDS_VAR, Workspace, or_default, output};
use crate::crates;
use crate::dist::clean_root;
use crate::lab;
use crate::layers::{self, Found};
use crate::links;
use crate::mutants::{Checker, TABLE};
use crate::mutation;
use crate::process;
use crate::tally::{Outcome, SKIP_LOG_VAR, Tally};

/// How long the commands of a step may take; generous, it only has to end a deadlock before the
/// patience of a CI service does.
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Cases of the stress oracle that [`LIMIT`] is extended for, each by the seconds that it runs.
const STRESS_CASES_MAX: u32 = 64;

/// Has cargo run each test binary with the variable that lets the stable harness tell times. Cargo
/// itself must not see the variable: build scripts look at it, and everything would be compiled
/// again.
const WITH_TIMES: &str = "target.'cfg(all())'.runner=['env','RUSTC_BOOTSTRAP=1']";

/// The harness' options that tell times.
const TELL_TIMES: [&str; 2] = ["-Zunstable-options", "--report-time"];

/// Does a step; an error is a failure of the step.
pub fn run(workspace: &Workspace, step: Step) -> Report {
    let mut report = perform(workspace, step).unwrap_or_else(|error| {
        println!("{error:#}");
        Report::new(Verdict::Failed(format!("{error:#}")))
    });
    report.cpu_seconds = cpu_seconds();
    report
}

fn perform(workspace: &Workspace, step: Step) -> Result<Report> {
    match step {
        Step::Fmt => run_check(workspace.cargo(&["fmt", "--all", "--check"])),
        Step::Clippy => {
            let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
            run_check(workspace.for_lints().cargo(&arguments))
        }
        Step::Layers => layers(workspace),
        Step::Docs => {
            let mut command = workspace.for_lints().cargo(&["doc", "--workspace", "--no-deps"]);
            command.env("RUSTDOCFLAGS", "-D warnings");
            let report = run_check(command)?;
            Ok(with_problems(report, &links::check(&workspace.root)?))
        }
        Step::MutantList => {
            let report = Report::new(Verdict::Passed);
            Ok(with_problems(report, &mutation::check_list(&workspace.root, TABLE)))
        }
        Step::Tests => tests(workspace),
        Step::C => Ok(of_checks(capi::test(workspace, Effort::Short)?)),
        Step::CFull => Ok(of_checks(capi::test(workspace, Effort::Full)?)),
        Step::Programs => Ok(of_checks(preloaded::test(workspace)?)),
        Step::Crates => Ok(of_checks(crates::test(workspace)?)),
        Step::Api => public_api(workspace),
        Step::Deny => deny(workspace),
        Step::Report => reports(workspace),
        Step::Faults => faults(workspace),
        Step::Packages => Ok(of_checks(clean_root::test(workspace)?)),
        Step::Stress => run_checker(workspace, step, Checker::Stress, Effort::Short),
        Step::StressFull => run_checker(workspace, step, Checker::Stress, Effort::Full),
        Step::Loom => run_checker(workspace, step, Checker::Loom, Effort::Short),
        Step::LoomFull => run_checker(workspace, step, Checker::Loom, Effort::Full),
        Step::Shuttle => run_checker(workspace, step, Checker::Shuttle, Effort::Short),
        Step::ShuttleFull => run_checker(workspace, step, Checker::Shuttle, Effort::Full),
        Step::Miri => miri(workspace),
        Step::Mutants => {
            Ok(of_checks(mutation::run(workspace, TABLE, |_| true, mutation::RUN_LIMIT)?))
        }
        Step::Nodes => in_guests(workspace, step, lab::Extent::SeveralNodes),
        Step::Lab => in_guests(workspace, step, lab::Extent::Usual),
    }
}

/// Refuses what imports upward or in a circle, each with its line.
fn layers(workspace: &Workspace) -> Result<Report> {
    let found = layers::check(&workspace.root)?;
    found.refusals.iter().for_each(|refusal| println!("{refusal}"));
    let Found { imports, siblings, dependencies, .. } = &found;
    println!("{imports} imports, {siblings} between siblings, {dependencies} dependencies");
    Ok(Report::new(match found.refusals.len() {
        0 => Verdict::Passed,
        count => Verdict::Failed(format!("{count} refused")),
    }))
}

/// All tests of the workspace except those that have steps of their own: the stress oracle, sweeps
/// of faults on the kernel, and the soak.
fn tests(workspace: &Workspace) -> Result<Report> {
    let build = workspace.cargo(&["test", "--workspace", "--no-run"]);
    let mut run = workspace.cargo(&["test", "--workspace", "--no-fail-fast", "--all-targets"]);
    run.args(["--config", WITH_TIMES, "--"]).args(TELL_TIMES);
    for tests in [STRESS_TESTS].iter().chain(&SWEEPS) {
        run.args(["--skip", tests]);
    }
    run.env(SWEEP_STEP_VAR, SWEEP_STEP);
    let docs = workspace.cargo(&["test", "--workspace", "--no-fail-fast", "--doc"]);
    let mut report = run_tests(workspace, Step::Tests, [build, run, docs], LIMIT)?;
    // The doctor of this machine names what it lacks; what the machines of the lab have is no gap.
    let elsewhere = lab::skips_left_to_other_machines(workspace)?;
    let (left, skips): (Vec<_>, Vec<_>) =
        report.skips.into_iter().partition(|skip| elsewhere.includes(&skip.name));
    report.counts.skipped = report.counts.skipped.saturating_sub(left.len());
    report.skips = skips;
    report.left_to_the_lab = left;
    Ok(report)
}

/// How the names of the tests begin that only `faults` runs: in the first two, each call of jobs
/// on the kernel fails under load; in the third a limit of the process falls, which whatever else
/// it allocates meets as well; the fourth has all features at once, with random seeds; the last runs
/// debuggers, which attach at moments of their own.
const SWEEPS: [&str; 5] = [
    "on_the_kernel_any_call_may_fail",
    "each_call_of_a_job_in_place_fails_once",
    "a_limit_that_falls_under_a_running_job",
    "everything_at_once_loses_nothing",
    "real_tracers_",
];

/// Environment variable with the distance between two cases of a sweep of faults on the model, and
/// that of the default test command: a third of the cases. Where a sweep has three modes, each call
/// fails once.
const SWEEP_STEP_VAR: &str = "PAGELEAP_SWEEP_STEP";
const SWEEP_STEP: &str = "3";

/// Programs of the comparison of model and kernel, so many that they must meet rare cases
/// (`tests/model_and_kernel.rs`).
const PROGRAMS_VAR: &str = "PROPTEST_CASES";
const PROGRAMS: &str = "512";

/// The tests of faults, with every call failing in every mode, limits that fall, many programs on
/// model and kernel, and the soak for its usual seconds.
fn faults(workspace: &Workspace) -> Result<Report> {
    let mut run = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    for test in ["fault_injection", "limits", "memory_calls", "model_and_kernel", "soak", "traced"]
    {
        run.args(["--test", test]);
    }
    run.env(PROGRAMS_VAR, or_default(PROGRAMS_VAR, PROGRAMS));
    run.args(["--config", WITH_TIMES, "--"]).args(TELL_TIMES);
    run_tests(workspace, Step::Faults, [run], LIMIT)
}

/// How the names of the stress oracle's tests begin, and of no others.
const STRESS_TESTS: &str = "no_write_is_lost";

/// The lists of public items, as the compiler sees these.
fn public_api(workspace: &Workspace) -> Result<Report> {
    if !api::is_possible() {
        return Ok(skipped(Step::Api, "cargo-public-api or a nightly is missing", api::REMEDY));
    }
    Ok(with_problems(Report::new(Verdict::Passed), &api::run(workspace, true)?))
}

/// Whether the crates of others are ones that `deny.toml` allows. Asks nothing of the network: what
/// the workspace is built from lies here.
fn deny(workspace: &Workspace) -> Result<Report> {
    if output(workspace.cargo(&["deny", "--version"])).is_err() {
        let remedy = "cargo install --locked cargo-deny";
        return Ok(skipped(Step::Deny, "cargo-deny is missing", remedy));
    }
    run_check(workspace.cargo(&["deny", "--offline", "check", "bans", "licenses"]))
}

/// Whether the plots of a report have the measured points in a browser.
fn reports(workspace: &Workspace) -> Result<Report> {
    match browser::find() {
        Some(browser) => Ok(of_checks(browser::test(workspace, &browser)?)),
        None => Ok(skipped(Step::Report, "Chromium is missing", "apt-get install chromium")),
    }
}

fn miri(workspace: &Workspace) -> Result<Report> {
    match nightly_with_miri() {
        Ok(version) => println!("{version}"),
        Err(reason) => return Ok(skipped(Step::Miri, reason, MIRI_REMEDY)),
    }
    let mut command = workspace.cargo(&["+nightly", "miri", "test", "--lib"]);
    command.args(["-p", "pageleap", "-p", "pageleap-probe"]);
    let mut flags = env::var_os("MIRIFLAGS").unwrap_or_default();
    flags.push(" -Zmiri-disable-isolation");
    command.env("MIRIFLAGS", flags);
    run_tests(workspace, Step::Miri, [command], LIMIT)
}

/// Tests on emulated machines.
fn in_guests(workspace: &Workspace, step: Step, extent: lab::Extent) -> Result<Report> {
    if let Some(lab::Missing { what, remedy }) = lab::missing_for(workspace, extent) {
        return Ok(skipped(step, &what, &remedy));
    }
    let lab::Summary { counts, failed, skips, passed, times } = lab::step(workspace, extent)?;
    let verdict = match counts.failed {
        0 => Verdict::Passed,
        count => Verdict::Failed(format!("{count} tests or machines")),
    };
    let in_guest = |(name, skipped_parts)| PassedInGuest { name, skipped_parts };
    Ok(Report {
        // A skip that a topology expects is no gap in what was tested.
        counts: crate::tally::Counts { skipped: skips.len(), ..counts },
        failed_tests: failed.into_iter().collect(),
        skips,
        passed_in_guests: passed.into_iter().map(in_guest).collect(),
        times,
        ..Report::new(verdict)
    })
}

/// Says loudly what does not run because this machine lacks something, and how to get that.
fn skipped(step: Step, reason: &str, remedy: &str) -> Report {
    println!("xtask: !!! NOT RUN: {}, because {reason}", step.about());
    println!("xtask: !!! to run it, type: {remedy}");
    Report::skipped(step.name(), format!("{reason}; get it by: {remedy}"))
}

/// Runs a command that holds or does not, and counts as one.
fn run_check(command: Command) -> Result<Report> {
    let ending = stream(command, LIMIT, |_| {})?;
    Ok(Report::new(match ending.success() {
        true => Verdict::Passed,
        false => Verdict::Failed(ending.reason(LIMIT)),
    }))
}

/// What checks of our own have found. The reasons of failures are printed once more, because the
/// summary shows only the end of the log.
fn of_checks(outcome: Outcome) -> Report {
    if !outcome.failed.is_empty() {
        println!("\n---- why checks failed:");
        outcome.failed.iter().for_each(|(name, why)| println!("{name}: {why}"));
    }
    Report::of_checks(outcome)
}

/// Prints what a check of our own has found: a report that had passed fails by it.
fn with_problems(report: Report, problems: &[String]) -> Report {
    problems.iter().for_each(|problem| println!("{problem}"));
    match (&report.verdict, problems.len()) {
        (Verdict::Passed, count @ 1..) => Report::new(Verdict::Failed(format!("{count} problems"))),
        _ => report,
    }
}

fn run_checker(
    workspace: &Workspace,
    step: Step,
    checker: Checker,
    effort: Effort,
) -> Result<Report> {
    let own = workspace.for_checker(checker);
    let command = own.checker(checker, effort, false);
    let seconds = env::var(STRESS_SECONDS_VAR).ok().and_then(|text| text.parse().ok());
    let cases = Duration::from_secs(seconds.unwrap_or_default()) * STRESS_CASES_MAX;
    run_tests(workspace, step, [command], LIMIT + cases)
}

/// Runs commands that print test results, one after the other, and counts these. A command that
/// ends badly does not stop those after it, but is a failure.
fn run_tests<const N: usize>(
    workspace: &Workspace,
    step: Step,
    commands: [Command; N],
    limit: Duration,
) -> Result<Report> {
    let log = fresh_skip_log(&workspace.target, step)?;
    let mut tally = Tally::default();
    let mut reasons = BTreeSet::new();
    for mut command in commands {
        command.env(SKIP_LOG_VAR, &log);
        let ending = stream(command, limit, |line| tally.line(line))?;
        if !ending.success() {
            reasons.insert(ending.reason(limit));
        }
    }
    tally.skip_log(&fs::read_to_string(&log).unwrap_or_default());
    if !reasons.is_empty() && !tally.why().is_empty() {
        println!("\n---- why tests failed:");
        tally.why().iter().for_each(|line| println!("{line}"));
    }

    let mut counts = tally.counts();
    let verdict = if !reasons.is_empty() {
        // Without a failed test it did not compile, or crashed, or hung.
        counts.failed = counts.failed.max(1);
        Verdict::Failed(reasons.into_iter().collect::<Vec<_>>().join(", "))
    } else if tally.started() == 0 {
        counts.failed += 1;
        Verdict::Failed("no test ran".to_owned())
    } else {
        Verdict::Passed
    };
    Ok(Report {
        counts,
        skips: tally.skips().cloned().collect(),
        failed_tests: tally.failed_names().map(str::to_owned).collect(),
        times: tally.times().to_vec(),
        ..Report::new(verdict)
    })
}

/// Makes sure that the log of skips holds only those of this run.
fn fresh_skip_log(target: &Path, step: Step) -> Result<PathBuf> {
    let directory = target.join("xtask");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    // Tests run in other directories, so the path must be absolute.
    let log = directory.canonicalize()?.join(format!("skips-{}.log", step.name()));
    fs::write(&log, "").with_context(|| format!("cannot write {}", log.display()))?;
    Ok(log)
}

/// Runs a command and shows its output while it comes.
fn stream(
    mut command: Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<process::Ending> {
    if io::stdout().is_terminal() {
        command.env("CARGO_TERM_COLOR", or_default("CARGO_TERM_COLOR", "always"));
    }
    process::run(command, limit, |line| {
        println!("{line}");
        on_line(line);
    })
}

/// CPU time of this process and of all that it has waited for, in seconds.
fn cpu_seconds() -> f64 {
    let of = |who| {
        // SAFETY: zeros are a value of the structure.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one structure of ours. Both arguments are right, so the call
        // cannot fail.
        unsafe { libc::getrusage(who, &mut usage) };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    };
    of(libc::RUSAGE_SELF) + of(libc::RUSAGE_CHILDREN)
}

/// How to get what the Miri step needs.
const MIRI_REMEDY: &str = "rustup toolchain install nightly --profile minimal && \
                           rustup +nightly component add miri rust-src";

/// The nightly toolchain that is installed, with its date, or why Miri cannot run with it. Nothing
/// is installed or updated.
fn nightly_with_miri() -> std::result::Result<String, &'static str> {
    let said = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments);
        output(command).ok()
    };
    let version =
        said("rustc", &["+nightly", "--version"]).ok_or("there is no nightly toolchain")?;
    said("cargo", &["+nightly", "miri", "--version"])
        .ok_or("the nightly toolchain lacks the component miri")?;
    let sysroot = said("rustc", &["+nightly", "--print", "sysroot"]).unwrap_or_default();
    match Path::new(&sysroot).join("lib/rustlib/src/rust/library").is_dir() {
        true => Ok(version),
        false => Err("the nightly toolchain lacks the component rust-src"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Counts;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn tests_of(script: &str) -> Report {
        let target = crate::scratch::Scratch::new("steps");
        let workspace =
            Workspace { root: target.path().to_owned(), target: target.path().to_owned() };
        run_tests(&workspace, Step::Tests, [shell(script)], Duration::from_secs(30)).unwrap()
    }

    const TWO_PASSED: &str =
        "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'";

    #[test]
    fn skips_arrive_through_the_log() {
        let report =
            tests_of(&format!("echo 'huge: none reserved' >> \"${SKIP_LOG_VAR}\"; {TWO_PASSED}"));
        assert_eq!(report.verdict, Verdict::Passed);
        assert_eq!(report.counts, Counts { passed: 2, failed: 0, skipped: 1 });
    }

    #[test]
    fn run_without_tests_is_a_failure() {
        let report =
            tests_of("echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 9 filtered out'");
        assert!(matches!(report.verdict, Verdict::Failed(_)));
        assert_eq!(report.counts.failed, 1);
    }

    #[test]
    fn crash_counts_even_if_no_test_failed() {
        let report = tests_of(&format!("{TWO_PASSED}; kill -SEGV $$"));
        assert!(matches!(report.verdict, Verdict::Failed(_)));
        assert_eq!(report.counts, Counts { passed: 2, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_command_that_fails_fails_the_step_and_stops_nothing() {
        let target = crate::scratch::Scratch::new("steps");
        let workspace =
            Workspace { root: target.path().to_owned(), target: target.path().to_owned() };
        let commands = [shell("exit 3"), shell(TWO_PASSED)];
        let report = run_tests(&workspace, Step::Tests, commands, Duration::from_secs(30)).unwrap();
        assert!(matches!(report.verdict, Verdict::Failed(_)));
        assert_eq!(report.counts, Counts { passed: 2, failed: 1, skipped: 0 });
    }
}
