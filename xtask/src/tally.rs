//! Counts what test binaries report, from their printed lines and from the log of skips.
//!
//! A test that cannot run here (no huge pages, an old kernel) returns early, and the test harness
//! prints `ok`. Such a test says so in two ways: a line `SKIP name: reason` on its output, which
//! the harness shows only for some runs, and a line `name: reason` appended to the file that
//! [`SKIP_LOG_VAR`] names. Both are read; a skip that arrives both ways counts once; and a skipped
//! test no longer counts as passed.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::AddAssign;

/// Environment variable that tells tests where to append their skips.
pub const SKIP_LOG_VAR: &str = "PAGELEAP_SKIP_LOG";

/// A test, or a whole step, that did not run, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skip {
    /// Name of the test, or of the step.
    pub name: String,
    /// Why it did not run.
    pub reason: String,
}

impl Skip {
    /// Reads `name: reason`. The name may itself hold `::`, as test paths do.
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

/// How many of something passed, failed or were skipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ran and held.
    pub passed: usize,
    /// Ran and did not hold, or could not be run.
    pub failed: usize,
    /// Did not run, for a stated reason.
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

/// What the test binaries of one step have reported so far.
#[derive(Debug, Default)]
pub struct Tally {
    harness: Counts,
    names: BTreeSet<String>,
    failed: BTreeSet<String>,
    skips: BTreeSet<Skip>,
}

impl Tally {
    /// Takes one line of output.
    pub fn line(&mut self, line: &str) {
        let line = strip_escapes(line);
        if let Some(totals) = line.split("test result: ").nth(1) {
            self.harness += parse_totals(totals);
        } else if let Some((name, outcome)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
        {
            // An outcome may be missing here: with `--nocapture` the test's own output comes in
            // between.
            self.names.insert(name.to_owned());
            if outcome == "FAILED" {
                self.failed.insert(name.to_owned());
            } else if let Some(reason) = outcome.strip_prefix("ignored") {
                let reason = reason.trim_start_matches(", ");
                let reason = if reason.is_empty() { "marked #[ignore]" } else { reason };
                self.skips.insert(Skip { name: name.to_owned(), reason: reason.to_owned() });
            }
        }
        // Not an else: with `--nocapture` the first line of a test's output follows its "test … ...
        // ".
        if let Some((before, skip)) = line.split_once("SKIP ")
            && (before.is_empty() || before.ends_with(" ... "))
        {
            self.skips.extend(Skip::parse(skip));
        }
    }

    /// Takes the text of a skip log.
    pub fn skip_log(&mut self, text: &str) {
        self.skips.extend(text.lines().filter_map(Skip::parse));
    }

    /// Totals, where a test that announced its skip is not one that passed.
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

    /// How many tests the harness has started, skipped ones that returned early included.
    pub fn started(&self) -> usize {
        self.harness.passed + self.harness.failed
    }

    /// Every skip, once.
    pub fn skips(&self) -> impl Iterator<Item = &Skip> {
        self.skips.iter()
    }

    /// Names of failed tests, where the output tells them.
    pub fn failed_names(&self) -> impl Iterator<Item = &str> {
        self.failed.iter().map(String::as_str)
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

/// Checks of our own, as they went.
#[derive(Debug, Default)]
pub struct Outcome {
    pub counts: Counts,
    pub failed: Vec<String>,
    pub skips: Vec<Skip>,
}

impl Outcome {
    /// Counts a test that has passed, was skipped for a reason, or failed.
    pub fn add(&mut self, name: &str, result: anyhow::Result<Option<String>>) {
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
                self.failed.push(name.to_owned());
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
