//! The steps of `cargo xtask test`, what each runs, and the summary at the end.
//!
//! A step never stops the ones after it: one run tells everything that is wrong. A step that needs
//! tests and finds none fails, because an empty run proves nothing.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::capi;
use crate::commands::{STRESS_SECONDS, STRESS_SECONDS_VAR, Workspace, or_default};
use crate::crates;
use crate::dist::clean_root;
use crate::hugepages;
use crate::lab;
use crate::layers;
use crate::mutants::{Checker, TABLE};
use crate::mutation;
use crate::process;
use crate::table::{Table, seconds};
use crate::tally::{Counts, Outcome, SKIP_LOG_VAR, Skip, Tally};

/// How long a step may take; generous, it only has to end a deadlock before the patience of a CI
/// service does.
const STEP_LIMIT: Duration = Duration::from_secs(40 * 60);

/// Cases of the stress oracle that [`STEP_LIMIT`] is extended for, each by the seconds that it
/// runs.
const STRESS_CASES_MAX: u32 = 64;

/// Seconds per case where the oracle runs among all other tests, since it has a step of its own.
const STRESS_SECONDS_IN_TESTS: &str = "1";

/// One step of `cargo xtask test`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Formatting.
    Fmt,
    /// Lints of all targets.
    Clippy,
    /// Imports between modules and crates.
    Layers,
    /// All tests of the workspace.
    Tests,
    /// Programs in C against the library.
    C,
    /// The packages in a Debian of their own.
    Packages,
    /// The crates for a registry.
    Crates,
    /// The stress oracle, optimised.
    Stress,
    /// The model checker.
    Loom,
    /// Whole jobs under random schedules.
    Shuttle,
    /// The unit tests under Miri.
    Miri,
    /// Whether the mutation list fits the sources and the document.
    MutantList,
    /// The mutation list itself.
    Mutants,
    /// Documentation builds without warnings.
    Docs,
    /// The tests on emulated machines with several memory nodes.
    Lab,
}

impl Step {
    /// In the order in which they run.
    pub const ALL: [Step; 15] = [
        Step::Fmt,
        Step::Clippy,
        Step::Layers,
        Step::Tests,
        Step::C,
        Step::Packages,
        Step::Crates,
        Step::Stress,
        Step::Loom,
        Step::Shuttle,
        Step::Miri,
        Step::MutantList,
        Step::Mutants,
        Step::Docs,
        Step::Lab,
    ];

    /// The name that `--only` takes.
    pub fn name(self) -> &'static str {
        match self {
            Step::Fmt => "fmt",
            Step::Clippy => "clippy",
            Step::Layers => "layers",
            Step::Tests => "tests",
            Step::C => "c",
            Step::Packages => "packages",
            Step::Crates => "crates",
            Step::Stress => "stress",
            Step::Loom => "loom",
            Step::Shuttle => "shuttle",
            Step::Miri => "miri",
            Step::MutantList => "mutant-list",
            Step::Mutants => "mutants",
            Step::Docs => "docs",
            Step::Lab => "lab",
        }
    }

    /// What it does, for `--list` and the headers.
    pub fn about(self) -> &'static str {
        match self {
            Step::Fmt => "cargo fmt --all --check",
            Step::Clippy => "cargo clippy --workspace --all-targets -- -D warnings",
            Step::Layers => "no module and no crate imports upward: crates/layers.toml",
            Step::Tests => "cargo test --workspace, with huge pages where they can be reserved",
            Step::C => {
                "programs in C and C++ against the library, by gcc and clang, shared, static, under sanitizers and valgrind; a JVM; examples"
            }
            Step::Packages => {
                "the .deb and the tarball, installed and used in a Debian that was just made (needs root)"
            }
            Step::Crates => {
                "cargo package: each published crate is described and builds from its archive"
            }
            Step::Stress => "the stress oracle in release mode: writers against migrations",
            Step::Loom => "loom tests of the library, all interleavings up to a bound",
            Step::Shuttle => "shuttle tests of the library: whole jobs under long random schedules",
            Step::Miri => "unit tests of the library under Miri (needs the nightly toolchain)",
            Step::MutantList => {
                "each mutant fits its file exactly once, and docs/protocol.md has the list as it is"
            }
            Step::Mutants => "each mutant of the protocol is caught by its checker",
            Step::Docs => "cargo doc --workspace --no-deps without warnings",
            Step::Lab => "the tests on several memory nodes and kernels, in emulated machines",
        }
    }

    /// Left out by `--skip-slow`.
    pub fn is_slow(self) -> bool {
        matches!(self, Step::Packages | Step::Crates | Step::Miri | Step::Mutants | Step::Lab)
    }

    fn wants_huge_pages(self) -> bool {
        matches!(self, Step::Tests | Step::Stress | Step::Mutants)
    }
}

/// What to run and how strictly.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Steps that were asked not to run; the table shows them.
    pub left_out: Vec<Step>,
    /// Skips count as failures.
    pub deny_skip: bool,
    /// Seconds per case of the stress oracle; else the environment's or the default.
    pub stress_seconds: Option<u64>,
}

/// How a step went.
#[derive(Debug)]
struct Report {
    step: Step,
    verdict: Verdict,
    elapsed: Duration,
    counts: Counts,
    skips: Vec<Skip>,
    failed_tests: BTreeSet<String>,
    /// What the lab has run, if this was its step.
    lab: Option<lab::Summary>,
}

#[derive(Debug)]
enum Verdict {
    Passed,
    Failed(String),
    Skipped,
    LeftOut,
}

impl Report {
    fn new(step: Step, verdict: Verdict) -> Report {
        let counts = match verdict {
            Verdict::Passed => Counts { passed: 1, ..Counts::default() },
            Verdict::Failed(_) => Counts { failed: 1, ..Counts::default() },
            Verdict::Skipped => Counts { skipped: 1, ..Counts::default() },
            Verdict::LeftOut => Counts::default(),
        };
        Report {
            step,
            verdict,
            elapsed: Duration::ZERO,
            counts,
            skips: Vec::new(),
            failed_tests: BTreeSet::new(),
            lab: None,
        }
    }

    fn skipped(step: Step, reason: String) -> Report {
        let skip = Skip { name: format!("step {}", step.name()), reason };
        Report { skips: vec![skip], ..Report::new(step, Verdict::Skipped) }
    }
}

/// Runs the plan, prints the summary, and returns whether all went well.
pub fn run(workspace: &Workspace, plan: &Plan) -> bool {
    let start = Instant::now();
    let mut huge_pages = None;
    let mut reports = Vec::new();
    for (index, &step) in plan.steps.iter().enumerate() {
        if step.wants_huge_pages() {
            huge_pages.get_or_insert_with(hugepages::Guard::reserve);
        }
        println!("\n==> [{}/{}] {}: {}", index + 1, plan.steps.len(), step.name(), step.about());
        let step_start = Instant::now();
        let mut report = run_step(workspace, step, plan.stress_seconds)
            .unwrap_or_else(|error| Report::new(step, Verdict::Failed(format!("{error:#}"))));
        report.elapsed = step_start.elapsed();
        println!(
            "==> {}: {}, {} s",
            step.name(),
            result_text(&report.verdict),
            seconds(report.elapsed)
        );
        reports.push(report);
    }
    drop(huge_pages);
    reports.extend(plan.left_out.iter().map(|&step| Report::new(step, Verdict::LeftOut)));
    reports.sort_by_key(|report| report.step);
    let elsewhere = take_out_what_the_lab_has_run(&mut reports);
    if elsewhere > 0 {
        println!(
            "\n{elsewhere} tests, or parts of tests, were skipped on this machine, but have run in the lab"
        );
    }
    summarize(&reports, plan.deny_skip, start.elapsed())
}

/// A test that this machine cannot run is no gap if a machine of the lab has run it. Returns how
/// many those are. Other steps run the same tests for longer, and at full speed: for these the lab
/// is no substitute.
fn take_out_what_the_lab_has_run(reports: &mut [Report]) -> usize {
    let Some(lab) = reports.iter_mut().find_map(|report| report.lab.take()) else { return 0 };
    let mut total = 0;
    for report in reports.iter_mut().filter(|report| report.step == Step::Tests) {
        let before = report.skips.len();
        report.skips.retain(|skip| !lab.has_run(&skip.name));
        let taken = before - report.skips.len();
        report.counts.skipped -= taken;
        total += taken;
    }
    total
}

fn result_text(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "ok",
        Verdict::Failed(_) => "FAILED",
        Verdict::Skipped => "SKIPPED",
        Verdict::LeftOut => "left out",
    }
}

fn run_step(workspace: &Workspace, step: Step, stress_seconds: Option<u64>) -> Result<Report> {
    match step {
        Step::Fmt => run_check(step, workspace.cargo(&["fmt", "--all", "--check"])),
        Step::Clippy => {
            let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
            run_check(step, workspace.cargo(&arguments))
        }
        Step::Layers => check_layers(workspace),
        Step::Docs => {
            let mut command = workspace.cargo(&["doc", "--workspace", "--no-deps"]);
            command.env("RUSTDOCFLAGS", "-D warnings");
            run_check(step, command)
        }
        Step::Tests => {
            let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
            command
                .env(STRESS_SECONDS_VAR, or_default(STRESS_SECONDS_VAR, STRESS_SECONDS_IN_TESTS));
            run_tests(workspace, step, command, STEP_LIMIT)
        }
        Step::C => Ok(of_checks(step, capi::test(workspace)?)),
        Step::Packages => Ok(of_checks(step, clean_root::test(workspace)?)),
        Step::Crates => Ok(of_checks(step, crates::test(workspace)?)),
        Step::Stress => {
            let mut command = workspace.checker(Checker::Stress, false);
            if let Some(seconds) = stress_seconds {
                command.env(STRESS_SECONDS_VAR, seconds.to_string());
            }
            let per_case = Duration::from_secs(stress_seconds.unwrap_or(STRESS_SECONDS));
            run_tests(workspace, step, command, STEP_LIMIT + per_case * STRESS_CASES_MAX)
        }
        Step::Loom => run_checker(workspace, step, Checker::Loom),
        Step::Shuttle => run_checker(workspace, step, Checker::Shuttle),
        Step::Miri => match miri_missing() {
            Some(reason) => {
                println!("xtask: !!! NOT RUN: the unit tests under Miri, because {reason}");
                println!("xtask: !!! to run them, type: {MIRI_REMEDY}");
                Ok(Report::skipped(step, format!("{reason}; get it by: {MIRI_REMEDY}")))
            }
            None => {
                let mut command =
                    workspace.cargo(&["+nightly", "miri", "test", "-p", "pageleap", "--lib"]);
                let mut flags = env::var_os("MIRIFLAGS").unwrap_or_default();
                flags.push(" -Zmiri-disable-isolation");
                command.env("MIRIFLAGS", flags);
                run_tests(workspace, step, command, STEP_LIMIT)
            }
        },
        Step::MutantList => {
            let problems = mutation::check_list(&workspace.root, TABLE);
            problems.iter().for_each(|problem| println!("{problem}"));
            let verdict = match problems.len() {
                0 => Verdict::Passed,
                count => Verdict::Failed(format!("{count} problems")),
            };
            Ok(Report::new(step, verdict))
        }
        Step::Mutants if TABLE.is_empty() => {
            Ok(Report::skipped(step, "the mutation list is empty".to_owned()))
        }
        Step::Mutants => {
            Ok(of_checks(step, mutation::run(workspace, TABLE, "", mutation::RUN_LIMIT)?))
        }
        Step::Lab => match lab::missing(&lab::kernel_folder(workspace)) {
            Some(lab::Missing { what, remedy }) => {
                println!(
                    "xtask: !!! NOT RUN: the tests on several memory nodes, because {what}; to run them, type: {remedy}"
                );
                Ok(Report::skipped(step, format!("{what}; get it by: {remedy}")))
            }
            None => {
                let summary = lab::step(workspace)?;
                // A skip that a topology expects is no gap in what was tested.
                let counts = Counts { skipped: summary.skips.len(), ..summary.counts };
                let verdict = match counts.failed {
                    0 => Verdict::Passed,
                    count => Verdict::Failed(format!("{count} tests or machines")),
                };
                let (failed_tests, skips) =
                    (summary.failed.iter().cloned().collect(), summary.skips.clone());
                Ok(Report {
                    counts,
                    failed_tests,
                    skips,
                    lab: Some(summary),
                    ..Report::new(step, verdict)
                })
            }
        },
    }
}

/// Refuses what imports upward, each with its line.
fn check_layers(workspace: &Workspace) -> Result<Report> {
    let found = layers::check(&workspace.root)?;
    found.refusals.iter().for_each(|refusal| println!("{refusal}"));
    println!("{} imports, {} dependencies", found.imports, found.dependencies);
    let verdict = match found.refusals.len() {
        0 => Verdict::Passed,
        count => Verdict::Failed(format!("{count} refused")),
    };
    Ok(Report::new(Step::Layers, verdict))
}

/// Runs a command that holds or does not, and counts as one.
fn run_check(step: Step, command: Command) -> Result<Report> {
    let ending = stream(command, STEP_LIMIT, |_| {})?;
    let verdict =
        if ending.success() { Verdict::Passed } else { Verdict::Failed(ending.reason(STEP_LIMIT)) };
    Ok(Report::new(step, verdict))
}

/// What checks of our own have found.
fn of_checks(step: Step, outcome: Outcome) -> Report {
    let Outcome { counts, failed, skips } = outcome;
    let verdict = match counts.failed {
        0 => Verdict::Passed,
        count => Verdict::Failed(format!("{count} checks")),
    };
    Report {
        counts,
        failed_tests: failed.into_iter().collect(),
        skips,
        ..Report::new(step, verdict)
    }
}

/// Runs a checker that needs compiler flags of its own, and so a target directory of its own.
fn run_checker(workspace: &Workspace, step: Step, checker: Checker) -> Result<Report> {
    let own = Workspace { target: workspace.target.join(checker.name()), ..workspace.clone() };
    run_tests(workspace, step, own.checker(checker, false), STEP_LIMIT)
}

/// Runs a command that prints test results, and counts these.
fn run_tests(
    workspace: &Workspace,
    step: Step,
    mut command: Command,
    limit: Duration,
) -> Result<Report> {
    let log = fresh_skip_log(workspace, step)?;
    command.env(SKIP_LOG_VAR, &log);
    let mut tally = Tally::default();
    let ending = stream(command, limit, |line| tally.line(line))?;
    tally.skip_log(&fs::read_to_string(&log).unwrap_or_default());

    let mut counts = tally.counts();
    let verdict = if !ending.success() {
        // Without a failed test it did not compile, or crashed, or hung.
        counts.failed = counts.failed.max(1);
        Verdict::Failed(ending.reason(limit))
    } else if tally.started() == 0 {
        counts.failed += 1;
        Verdict::Failed("no test ran".to_owned())
    } else {
        Verdict::Passed
    };
    let skips = tally.skips().cloned().collect();
    let failed_tests = tally.failed_names().map(str::to_owned).collect();
    Ok(Report { counts, skips, failed_tests, ..Report::new(step, verdict) })
}

/// Makes sure that the log of skips holds only those of this run.
fn fresh_skip_log(workspace: &Workspace, step: Step) -> Result<PathBuf> {
    let directory = workspace.target.join("xtask");
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

/// How to get what the Miri step needs.
const MIRI_REMEDY: &str = "rustup toolchain install nightly --profile minimal && rustup +nightly component add miri rust-src";

/// Why Miri cannot run here, if it cannot.
fn miri_missing() -> Option<String> {
    let output = |program: &str, arguments: &[&str]| -> Result<String> {
        let output = Command::new(program).args(arguments).output()?;
        output
            .status
            .success()
            .then_some(())
            .ok_or_else(|| anyhow!("{program} {arguments:?} failed"))?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Ok(sysroot) = output("rustc", &["+nightly", "--print", "sysroot"]) else {
        return Some("there is no nightly toolchain".to_owned());
    };
    if output("cargo", &["+nightly", "miri", "--version"]).is_err() {
        return Some("the nightly toolchain lacks the component miri".to_owned());
    }
    let source = PathBuf::from(sysroot).join("lib/rustlib/src/rust/library");
    (!source.is_dir()).then(|| "the nightly toolchain lacks the component rust-src".to_owned())
}

/// Prints table, failures, skips and totals; the very last line is the totals alone.
fn summarize(reports: &[Report], deny_skip: bool, elapsed: Duration) -> bool {
    let mut table = Table::new(&["step", "result", "seconds", "passed", "failed", "skipped", ""]);
    let mut totals = Counts::default();
    for report in reports {
        let Counts { passed, failed, skipped } = report.counts;
        let note = match &report.verdict {
            Verdict::Failed(reason) => reason.lines().next().unwrap_or_default(),
            Verdict::LeftOut => "--skip-slow",
            Verdict::Passed | Verdict::Skipped => "",
        };
        let numbers = [passed, failed, skipped].map(|number| number.to_string());
        table.row(&[
            report.step.name(),
            result_text(&report.verdict),
            &seconds(report.elapsed),
            &numbers[0],
            &numbers[1],
            &numbers[2],
            note,
        ]);
        totals += report.counts;
    }
    print!("\n{table}");
    println!(
        "({} s in all; steps without tests count as one, mutants as one each)",
        seconds(elapsed)
    );

    for report in reports {
        if let Verdict::Failed(reason) = &report.verdict
            && (reason.contains('\n') || !report.failed_tests.is_empty())
        {
            println!("\n{} FAILED: {reason}", report.step.name());
        }
        for name in &report.failed_tests {
            println!("    {name}");
        }
    }
    if totals.skipped > 0 {
        let denied = if deny_skip { ", which --deny-skip counts as failures" } else { "" };
        println!("\n{} skipped{denied}:", totals.skipped);
        for report in reports {
            for skip in &report.skips {
                println!("    [{}] {skip}", report.step.name());
            }
        }
    }
    if deny_skip {
        totals = Counts { failed: totals.failed + totals.skipped, skipped: 0, ..totals };
    }
    println!("\n{totals}");
    totals.failed == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn tests_of(script: &str) -> Report {
        let target = crate::scratch::Scratch::new("steps");
        let workspace =
            Workspace { root: target.path().to_owned(), target: target.path().to_owned() };
        run_tests(&workspace, Step::Tests, shell(script), Duration::from_secs(30)).unwrap()
    }

    const TWO_PASSED: &str =
        "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'";

    #[test]
    fn step_names_are_unique_and_in_order() {
        let names: BTreeSet<_> = Step::ALL.iter().map(|step| step.name()).collect();
        assert_eq!(names.len(), Step::ALL.len());
        assert!(Step::ALL.is_sorted());
    }

    #[test]
    fn skips_arrive_through_the_log() {
        let report =
            tests_of(&format!("echo 'huge: none reserved' >> \"${SKIP_LOG_VAR}\"; {TWO_PASSED}"));
        assert!(matches!(report.verdict, Verdict::Passed));
        assert_eq!(report.counts, Counts { passed: 2, failed: 0, skipped: 1 });
        assert!(summarize(&[report], false, Duration::ZERO));
    }

    #[test]
    fn denied_skips_fail_the_run() {
        let report = tests_of(&format!("echo 'SKIP huge: none reserved'; {TWO_PASSED}"));
        assert!(!summarize(&[report], true, Duration::ZERO));
    }

    #[test]
    fn what_the_lab_has_run_is_no_gap() {
        let log = format!(
            "echo 'far: one node' >> \"${SKIP_LOG_VAR}\"; echo 'near: asleep' >> \"${SKIP_LOG_VAR}\""
        );
        let tests = tests_of(&format!("{log}; {TWO_PASSED}"));
        let summary =
            lab::Summary { passed: vec![("far".into(), Vec::new())], ..Default::default() };
        let missed = vec![Skip { name: "tier/6.1 leap::far".into(), reason: "tired".into() }];
        let counts = Counts { skipped: 1, ..Counts::default() };
        let own = Report {
            lab: Some(summary),
            skips: missed,
            counts,
            ..Report::new(Step::Lab, Verdict::Passed)
        };
        let mut reports = [tests, own];
        assert_eq!(take_out_what_the_lab_has_run(&mut reports), 1);
        assert_eq!(reports[0].counts, Counts { passed: 2, failed: 0, skipped: 1 });
        assert_eq!(reports[0].skips[0].name, "near");
        assert_eq!(reports[1].counts.skipped, 1, "what the lab itself has skipped stays");
        assert_eq!(
            take_out_what_the_lab_has_run(&mut reports[..1]),
            0,
            "without the lab nothing is taken out"
        );
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
    fn step_that_did_not_run_is_a_skip_with_its_reason() {
        let report = Report::skipped(Step::Miri, "no nightly".to_owned());
        assert_eq!(report.counts.skipped, 1);
        assert_eq!(report.skips[0].to_string(), "step miri: no nightly");
        assert!(summarize(&[report], false, Duration::ZERO));
    }
}
