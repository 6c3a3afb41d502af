//! Guests and tests that are broken on purpose. The lab has to notice each of them. A lab that
//! reported them as passed could not be trusted.
//!
//! Guests that panic or hang are real, because `machine` decides how they ended. So are tests that
//! misbehave, because the first process of the guest ends them and counts. What else can be wrong
//! with a guest shows in its lines: `recorded`, which only tests build, has some of real guests.

use std::time::Duration;

use anyhow::{Context, Result};

use super::kernels::Kernel;
use super::machine::{Job, Lab};
use super::topology::Topology;
use super::transcript::{Judged, Outcome, Row, TestId};
use crate::built::Programs;

/// Name of the group of these guests in the results.
pub const NAME: &str = "broken-guests";

/// A small machine, so that its memory runs out sooner.
const MACHINE: &str = "about = 'small'\n[[node]]\nid = 0\nmemory_mb = 256\ncpus = 1";

/// A guest that is broken on purpose, and what the lab has to report about it.
struct Case {
    name: &'static str,
    mode: &'static str,
    /// A text that one of the reported problems must contain.
    problem: &'static str,
    /// A text that one of the last lines of the console must contain. Empty if the console may be
    /// silent.
    console: &'static str,
    limit: Duration,
    silence: Duration,
}

const LONG: Duration = Duration::from_secs(300);
/// Longer than a boot up to the first line, which takes about 5 s, and up to a minute on a busy machine.
const SHORT: Duration = Duration::from_secs(90);

const GUESTS: [Case; 3] = [
    Case {
        name: "a_panic_is_noticed",
        mode: "broken-panic",
        problem: "was reset",
        console: "Kernel panic",
        limit: LONG,
        silence: LONG,
    },
    Case {
        name: "a_hang_is_noticed",
        mode: "broken-hang",
        problem: "silent for",
        console: "",
        limit: LONG,
        silence: SHORT,
    },
    Case {
        name: "a_time_out_is_noticed",
        mode: "broken-hang",
        problem: "killed after its limit",
        console: "",
        limit: SHORT,
        silence: LONG,
    },
];

/// The guest's one test failed while it ran.
const VERDICT: &str = "while the test ran";

/// Tests that misbehave in a guest that works, and a text that the reason of the failure must
/// contain. An empty text means that the test has to pass.
const TESTS: [(&str, &str); 5] = [
    ("passes", ""),
    ("sleeps", "time-out"),
    ("eats", "for memory"),
    ("dies", "exit 101"),
    ("nothing", "counted 0"),
];

/// Time limit of each of these tests, in seconds.
const TEST_SECONDS: u64 = 10;

/// The names of all cases.
pub fn names() -> Vec<TestId> {
    let id = |name: &str| TestId { binary: NAME.to_owned(), name: name.to_owned() };
    let tests = TESTS.iter().map(|(name, _)| id(&format!("test_that_{name}")));
    GUESTS.iter().map(|case| id(case.name)).chain(tests).collect()
}

/// Boots all broken guests, one after the other. A row passes if the lab has noticed the defect.
pub fn run(lab: &Lab, kernel: &Kernel, mut on_row: impl FnMut(&Row)) -> Result<Vec<Row>> {
    let topology = Topology::parse(NAME, MACHINE)?;
    let mut rows = Vec::new();
    let mut names = names().into_iter();
    let mut next = || names.next().context("a name for each case");
    for case in &GUESTS {
        let job = Job {
            name: format!("{NAME}-{}", case.name),
            plan: vec![format!("mode {}", case.mode)],
            tests: vec![TestId { binary: "broken".into(), name: "first".into() }],
            limit: case.limit,
            silence: case.silence,
            ..Job::new(&topology, kernel)
        };
        let judged = lab.run(&job, |_, _, _| {})?.judged;
        let row =
            Row { test: next()?, outcome: judge_guest(case, &judged), parts: Vec::new(), ms: 0 };
        on_row(&row);
        rows.push(row);
    }
    let tests: Vec<TestId> = TESTS
        .iter()
        .map(|(name, _)| TestId { binary: "broken".into(), name: (*name).to_owned() })
        .collect();
    let job = Job {
        name: format!("{NAME}-tests"),
        plan: tests
            .iter()
            .map(|test| format!("test {TEST_SECONDS} {} {}", test.binary, test.name))
            .collect(),
        programs: Programs::from([("broken".to_owned(), lab.guest.clone())]),
        tests,
        limit: LONG,
        ..Job::new(&topology, kernel)
    };
    let judged = lab.run(&job, |_, _, _| {})?.judged;
    for ((_, wanted), seen) in TESTS.iter().zip(&judged.rows) {
        // The guest itself must have no problems; only its tests misbehave.
        let outcome = match &judged.problems[..] {
            [] => judge_test(wanted, &seen.outcome),
            problems => Outcome::Failed(problems.join("; "), judged.console.clone()),
        };
        let row = Row { test: next()?, outcome, parts: Vec::new(), ms: seen.ms };
        on_row(&row);
        rows.push(row);
    }
    Ok(rows)
}

fn judge_guest(case: &Case, judged: &Judged) -> Outcome {
    let failed = |reason: String| Outcome::Failed(reason, judged.console.clone());
    if !judged.problems.iter().any(|problem| problem.contains(case.problem)) {
        return failed(format!(
            "`{}` is not among the problems of the guest: {}",
            case.problem,
            judged.problems.join("; ")
        ));
    }
    if !judged.console.iter().any(|line| line.contains(case.console)) && !case.console.is_empty() {
        return failed(format!("`{}` is not among the last lines of the console", case.console));
    }
    // A guest that never booted has problems too, but proves nothing.
    if !judged
        .rows
        .iter()
        .all(|row| matches!(&row.outcome, Outcome::Failed(why, _) if why.contains(VERDICT)))
    {
        return failed(format!(
            "the test of the guest did not fail because the guest ended {VERDICT}: {:?}",
            judged.rows
        ));
    }
    Outcome::Passed
}

fn judge_test(wanted: &str, seen: &Outcome) -> Outcome {
    match (wanted, seen) {
        ("", Outcome::Passed) => Outcome::Passed,
        (wanted, Outcome::Failed(reason, _)) if !wanted.is_empty() && reason.contains(wanted) => {
            Outcome::Passed
        }
        (wanted, seen) => {
            Outcome::Failed(format!("judged as {seen:?} instead of `{wanted}`"), Vec::new())
        }
    }
}
