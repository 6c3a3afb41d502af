//! How a step went: what its own process writes down, and what the summary is made of.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Step;
use crate::tally::{Counts, Outcome, Skip};

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Everything held.
    Passed,
    /// Something did not, or could not be tried.
    Failed(String),
    /// The machine lacks something that the step needs.
    Skipped,
}

impl Verdict {
    /// The word for it in the table.
    pub fn text(&self) -> &'static str {
        match self {
            Verdict::Passed => "ok",
            Verdict::Failed(_) => "FAILED",
            Verdict::Skipped => "SKIPPED",
        }
    }
}

/// A test that a guest has passed, and the parts of it that were skipped there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedInGuest {
    /// The test, without its binary.
    pub name: String,
    /// Names of the skipped parts.
    pub skipped_parts: Vec<String>,
}

/// How a step went.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The result.
    pub verdict: Verdict,
    /// Tests by result; a step without tests counts as one.
    pub counts: Counts,
    /// What did not run, and why.
    pub skips: Vec<Skip>,
    /// Skips on this machine that another machine of the lab is for.
    pub left_to_the_lab: Vec<Skip>,
    /// Tests that failed.
    pub failed_tests: BTreeSet<String>,
    /// What the emulated machines have run, if this step has booted some.
    pub passed_in_guests: Vec<PassedInGuest>,
    /// Tests with the seconds that each took.
    pub times: Vec<(String, f64)>,
    /// CPU time of the step and of everything that it started, in seconds.
    pub cpu_seconds: f64,
}

impl Report {
    /// A report of a step that is one check.
    pub fn new(verdict: Verdict) -> Report {
        let counts = match verdict {
            Verdict::Passed => Counts { passed: 1, ..Counts::default() },
            Verdict::Failed(_) => Counts { failed: 1, ..Counts::default() },
            Verdict::Skipped => Counts { skipped: 1, ..Counts::default() },
        };
        Report {
            verdict,
            counts,
            skips: Vec::new(),
            left_to_the_lab: Vec::new(),
            failed_tests: BTreeSet::new(),
            passed_in_guests: Vec::new(),
            times: Vec::new(),
            cpu_seconds: 0.0,
        }
    }

    /// A step that cannot run here.
    pub fn skipped(step: &str, reason: String) -> Report {
        let skip = Skip { name: format!("step {step}"), reason };
        Report { skips: vec![skip], ..Report::new(Verdict::Skipped) }
    }

    /// What checks of our own have found.
    pub fn of_checks(outcome: Outcome) -> Report {
        let verdict = match outcome.counts.failed {
            0 => Verdict::Passed,
            count => Verdict::Failed(format!("{count} checks")),
        };
        Report {
            counts: outcome.counts,
            failed_tests: outcome.failed.into_iter().map(|(name, _)| name).collect(),
            skips: outcome.skips,
            times: outcome.times,
            ..Report::new(verdict)
        }
    }

    /// Whether a guest of this step has run a test, or a part of a test, that was skipped
    /// elsewhere.
    pub fn has_run(&self, skipped: &str) -> bool {
        let test = skipped.split(" (").next().unwrap_or_default();
        self.passed_in_guests.iter().any(|passed| {
            passed.name == test && !passed.skipped_parts.iter().any(|part| part == skipped)
        })
    }

    /// Reads what [`Report::write`] has written.
    pub fn read(file: &Path) -> Result<Report> {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no report", file.display()))
    }

    /// Writes the report down for the process that has started this one.
    pub fn write(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string(self).context("a report is plain data")?;
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// A step that has ended.
#[derive(Debug)]
pub struct Done {
    /// Which.
    pub step: Step,
    /// How.
    pub report: Report,
    /// Wall time.
    pub elapsed: Duration,
    /// The file with its output.
    pub log: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_report_arrives_as_it_was_written() {
        let scratch = Scratch::new("report");
        let file = scratch.path().join("result.json");
        let skip = Skip { name: "far".into(), reason: "one node".into() };
        let report = Report {
            skips: vec![skip.clone()],
            failed_tests: BTreeSet::from(["near".to_owned()]),
            times: vec![("leap::near".into(), 1.5)],
            ..Report::new(Verdict::Failed("1 test".into()))
        };
        report.write(&file).unwrap();
        let read = Report::read(&file).unwrap();
        assert_eq!((read.verdict, read.skips), (report.verdict, vec![skip]));
        assert_eq!((read.failed_tests, read.times), (report.failed_tests, report.times));
        fs::write(&file, "{").unwrap();
        assert!(Report::read(&file).is_err(), "half a report is none");
    }

    #[test]
    fn a_guest_has_run_a_test_but_not_the_parts_that_it_skipped() {
        let passed = PassedInGuest { name: "two".into(), skipped_parts: vec!["two (1g)".into()] };
        let report = Report { passed_in_guests: vec![passed], ..Report::new(Verdict::Passed) };
        let ran = ["two", "two (2m)", "two (1g)", "one"].map(|name| report.has_run(name));
        assert_eq!(ran, [true, true, false, false]);
    }
}
