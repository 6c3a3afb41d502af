//! Counts the results of test binaries, from their output and from the log of skips.
//!
//! A test that cannot run here (no huge pages, an old kernel) returns early, and the test harness
//! prints `ok`. Such a test reports its skip in two ways. It prints a line `SKIP name: reason`,
//! which the harness shows in some runs only. It also appends a line `name: reason` to the file
//! that [`SKIP_LOG_VAR`] names. A skip that arrives both ways counts once. A skipped test does not
//! count as passed.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::AddAssign;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Environment variable with the file to which tests append their skips.
pub const SKIP_LOG_VAR: &str = "PAGELEAP_SKIP_LOG";

/// A test or a step that did not run, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Skip {
    /// Name of the test, or of the step.
    pub name: String,
    /// The reason.
    pub reason: String,
}

impl Skip {
    /// Reads `name: reason`. The name may contain `::`, as the paths of tests do.
    pub fn parse(text: &str) -> Option<Skip> {
        let (name, reason) = text.trim().split_once(": ")?;
        let (name, reason) = (name.trim(), reason.trim());
        let complete = !name.is_empty() && !reason.is_empty();
        complete.then(|| Skip { name: name.to_owned(), reason: reason.to_owned() })
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

/// Numbers of passed, failed and skipped tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Tests that ran and passed.
    pub passed: usize,
    /// Tests that failed, or could not be started.
    pub failed: usize,
    /// Tests that did not run, with a stated reason.
    pub skipped: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// The results of the test binaries of one step so far.
#[derive(Debug, Default)]
pub struct Tally {
    harness: Counts,
    names: BTreeSet<String>,
    failed: BTreeSet<String>,
    skips: BTreeSet<Skip>,
    times: Vec<(String, f64)>,
    binary: String,
    why: Why,
}

/// The lines of the output that say why something failed.
#[derive(Debug, Default)]
struct Why {
    lines: Vec<String>,
    /// How many of the next lines belong to them.
    next: usize,
}

impl Why {
    /// Lines that are kept of one failure: the panic, its message, and some of the backtrace.
    const OF_ONE: usize = 12;
    /// Lines that are kept of all. The summary shows the last 60 lines of a failed step.
    const OF_ALL: usize = 54;
    /// Characters that are kept of a line: failed schedules and structures are long.
    const WIDTH: usize = 300;

    fn line(&mut self, line: &str) {
        let begins = line.contains("panicked at")
            || line.contains("has overflowed its stack")
            || line.starts_with("error") && !line.contains("to rerun pass");
        if begins {
            self.next = Why::OF_ONE;
        } else if line.starts_with("test ") || line.starts_with("---- ") {
            self.next = 0;
        }
        if self.next > 0 && self.lines.len() < Why::OF_ALL {
            self.next -= 1;
            self.lines.push(line.chars().take(Why::WIDTH).collect());
        }
    }
}

impl Tally {
    /// Reads one line of output.
    pub fn line(&mut self, line: &str) {
        let line = strip_escapes(line);
        self.why.line(&line);
        if let Some(binary) = binary_of(&line) {
            self.binary = binary;
        } else if let Some(totals) = line.split("test result: ").nth(1) {
            self.harness += parse_totals(totals);
        } else if let Some((name, outcome)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
        {
            // With `--nocapture` the output of the test stands here, and the outcome comes later.
            self.names.insert(name.to_owned());
            let (outcome, time) = split_time(outcome);
            self.times.extend(time.map(|time| (format!("{}::{name}", self.binary), time)));
            if outcome == "FAILED" {
                self.failed.insert(name.to_owned());
            } else if let Some(reason) = outcome.strip_prefix("ignored") {
                let reason = reason.trim_start_matches(", ");
                let reason = if reason.is_empty() { "marked #[ignore]" } else { reason };
                self.skips.insert(Skip { name: name.to_owned(), reason: reason.to_owned() });
            }
        }
        // Not an else: with `--nocapture` the output of a test begins on the line with its name.
        if let Some((before, skip)) = line.split_once("SKIP ")
            && (before.is_empty() || before.ends_with(" ... "))
        {
            self.skips.extend(Skip::parse(skip));
        }
    }

    /// Reads the text of a log of skips.
    pub fn skip_log(&mut self, text: &str) {
        self.skips.extend(text.lines().filter_map(Skip::parse));
    }

    /// The totals. A test that reported its skip does not count as passed.
    pub fn counts(&self) -> Counts {
        let announced = |name: &str| {
            self.skips.iter().any(|skip| {
                name == skip.name
                    || name.strip_suffix(&skip.name).is_some_and(|path| path.ends_with("::"))
            })
        };
        let not_passed = self.names.difference(&self.failed).filter(|name| announced(name)).count();
        // The harness has already left the ignored ones out of `passed`.
        let not_passed = not_passed.saturating_sub(self.harness.skipped);
        Counts {
            passed: self.harness.passed.saturating_sub(not_passed),
            failed: self.harness.failed,
            skipped: self.skips.len().max(self.harness.skipped),
        }
    }

    /// The number of tests that the harness has started, with those that skipped themselves.
    pub fn started(&self) -> usize {
        self.harness.passed + self.harness.failed
    }

    /// Every skip, once.
    pub fn skips(&self) -> impl Iterator<Item = &Skip> {
        self.skips.iter()
    }

    /// Tests with the seconds that each took, as the harness reports them.
    pub fn times(&self) -> &[(String, f64)] {
        &self.times
    }

    /// Why tests failed, or did not compile, in the words of the output.
    pub fn why(&self) -> &[String] {
        &self.why.lines
    }

    /// Names of the failed tests, as far as the output has them.
    pub fn failed_names(&self) -> impl Iterator<Item = &str> {
        self.failed.iter().map(String::as_str)
    }
}

/// The name of the test binary that cargo is about to run: `Running tests/leap.rs (…/leap-0a1b)`.
fn binary_of(line: &str) -> Option<String> {
    let (_, path) =
        line.trim_start().strip_prefix("Running ")?.strip_suffix(')')?.split_once('(')?;
    let file = path.rsplit('/').next()?;
    Some(file.rsplit_once('-').map_or(file, |(name, _)| name).to_owned())
}

/// Splits `ok <1.234s>` into the outcome and the seconds.
fn split_time(outcome: &str) -> (&str, Option<f64>) {
    let parts = outcome.strip_suffix("s>").and_then(|rest| rest.rsplit_once(" <"));
    match parts.and_then(|(outcome, time)| Some((outcome, time.parse().ok()?))) {
        Some((outcome, time)) => (outcome, Some(time)),
        None => (outcome, None),
    }
}

/// Reads `ok. 5 passed; 0 failed; 1 ignored; 0 measured; …`.
fn parse_totals(text: &str) -> Counts {
    let mut counts = Counts::default();
    let after_verdict = text.split_once(". ").map_or(text, |(_, rest)| rest);
    for part in after_verdict.split(';') {
        let mut words = part.split_whitespace();
        let (Some(Ok(number)), Some(kind)) = (words.next().map(str::parse::<usize>), words.next())
        else {
            continue;
        };
        match kind {
            "passed" => counts.passed += number,
            "failed" => counts.failed += number,
            "ignored" => counts.skipped += number,
            _ => {}
        }
    }
    counts
}

/// Removes colour sequences (`ESC [ … letter`).
fn strip_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            characters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
}

/// Results of checks that are no tests of the harness.
#[derive(Debug)]
pub struct Outcome {
    /// By result.
    pub counts: Counts,
    /// Failed checks, each with the reason.
    pub failed: Vec<(String, String)>,
    /// Checks that did not run.
    pub skips: Vec<Skip>,
    /// Checks with the seconds that each took.
    pub times: Vec<(String, f64)>,
    /// When the last check ended.
    last: Instant,
}

impl Default for Outcome {
    fn default() -> Outcome {
        Outcome {
            counts: Counts::default(),
            failed: Vec::new(),
            skips: Vec::new(),
            times: Vec::new(),
            last: Instant::now(),
        }
    }
}

impl Outcome {
    /// Counts a check: passed, skipped with a reason, or failed. Its time is the time since the
    /// check before it.
    pub fn add(&mut self, name: &str, result: anyhow::Result<Option<String>>) {
        self.times.push((name.to_owned(), self.last.elapsed().as_secs_f64()));
        self.last = Instant::now();
        match result {
            Ok(None) => {
                println!("test {name} ... ok");
                self.counts.passed += 1;
            }
            Ok(Some(reason)) => {
                println!("SKIP {name}: {reason}");
                self.counts.skipped += 1;
                self.skips.push(Skip { name: name.to_owned(), reason });
            }
            Err(error) => {
                println!("test {name} ... FAILED\n{error:#}");
                self.counts.failed += 1;
                self.failed.push((name.to_owned(), format!("{error:#}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(lines: &[&str]) -> Tally {
        let mut tally = Tally::default();
        lines.iter().for_each(|line| tally.line(line));
        tally
    }

    #[test]
    fn totals_of_several_binaries_add_up() {
        let tally = tally(&[
            "test a ... ok",
            "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s",
            "test m::b ... FAILED",
            "test result: \u{1b}[31mFAILED\u{1b}[m. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!(tally.counts(), Counts { passed: 8, failed: 2, skipped: 1 });
        assert_eq!(tally.started(), 10);
        assert_eq!(tally.failed_names().collect::<Vec<_>>(), ["m::b"]);
    }

    #[test]
    fn times_are_told_with_the_binary_and_change_no_outcome() {
        let tally = tally(&[
            "     Running tests/leap.rs (target/debug/deps/leap-672a8c477f8257a9)",
            "test a ... ok <0.250s>",
            "     Running unittests src/lib.rs (target/debug/deps/pageleap_sys-0626026d2b09275e)",
            "test m::b ... FAILED <1.500s>",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!(tally.failed_names().collect::<Vec<_>>(), ["m::b"]);
        let wanted = [("leap::a".to_owned(), 0.25), ("pageleap_sys::m::b".to_owned(), 1.5)];
        assert_eq!(tally.times(), wanted);
    }

    #[test]
    fn the_reasons_of_failures_are_kept_and_bounded() {
        let mut tally = tally(&[
            "test a ... FAILED",
            "---- a stdout ----",
            "thread 'a' (7) panicked at src/lib.rs:1:2:",
            "left is not right",
            "---- b stdout ----",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "error: test failed, to rerun pass `-p a`",
            "error[E0308]: mismatched types",
        ]);
        let panic = "thread 'a' (7) panicked at src/lib.rs:1:2:";
        assert_eq!(tally.why(), [panic, "left is not right", "error[E0308]: mismatched types"]);
        (0..100).for_each(|_| tally.line(&format!("error: {}", "x".repeat(10_000))));
        assert_eq!(tally.why().len(), Why::OF_ALL);
        assert!(tally.why().iter().all(|line| line.len() <= Why::WIDTH));
    }

    #[test]
    fn announced_skip_is_not_a_pass_and_counts_once() {
        let mut tally = tally(&[
            "test pool::tests::huge ... SKIP huge: no free 2 MB pages",
            "ok",
            "test pool::tests::plain ... ok",
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ]);
        tally.skip_log("huge: no free 2 MB pages\n\n");
        assert_eq!(tally.counts(), Counts { passed: 1, failed: 0, skipped: 1 });
        assert_eq!(
            tally.skips().map(Skip::to_string).collect::<Vec<_>>(),
            ["huge: no free 2 MB pages"]
        );
    }

    #[test]
    fn skip_of_a_row_inside_a_test_leaves_the_test_passed() {
        let mut tally =
            tally(&["test table ... ok", "test result: ok. 1 passed; 0 failed; 0 ignored"]);
        tally.skip_log("table/hugetlb: no free 2 MB pages");
        assert_eq!(tally.counts(), Counts { passed: 1, failed: 0, skipped: 1 });
    }

    #[test]
    fn ignored_tests_are_listed_with_their_reason() {
        let tally = tally(&[
            "test slow ... ignored, takes an hour",
            "test old ... ignored",
            "test result: ok. 4 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ]);
        assert_eq!(tally.counts(), Counts { passed: 4, failed: 0, skipped: 2 });
        let skips: Vec<_> = tally.skips().map(Skip::to_string).collect();
        assert_eq!(skips, ["old: marked #[ignore]", "slow: takes an hour"]);
    }

    #[test]
    fn skip_names_may_be_paths_and_prose_is_no_skip() {
        assert_eq!(
            Skip::parse("engine::tests::thp: shmem_enabled: never"),
            Some(Skip { name: "engine::tests::thp".into(), reason: "shmem_enabled: never".into() })
        );
        assert_eq!(Skip::parse("nothing here"), None);
        assert_eq!(tally(&["we SKIP this: really"]).counts(), Counts::default());
    }
}
