//! The results of all guests as text: a table, the failures, the skips, and totals.

use std::fmt::Write;
use std::time::Duration;

use super::transcript::{Outcome, Row};
use crate::table::{Table, seconds};
use crate::tally::{Counts, Skip};

/// The results of one guest, or of all broken guests together.
#[derive(Debug)]
pub struct Group {
    /// Name of the topology.
    pub topology: String,
    /// Series of the kernel.
    pub kernel: String,
    /// One row for each test.
    pub rows: Vec<Row>,
    /// Problems of the guest itself.
    pub problems: Vec<String>,
    /// The last lines of the console, if the guest has a problem.
    pub console: Vec<String>,
    /// Time that the guest took. It includes software emulation, so it measures nothing else.
    pub elapsed: Duration,
    /// Skips that the topology's file expects, with the reason in that file.
    pub expected: Vec<(Skip, String)>,
    /// Other skips, of tests and of parts of tests.
    pub unexpected: Vec<Skip>,
}

impl Group {
    /// Makes a group of these rows. `expects` gives the reason for an expected skip, by name.
    pub fn new(
        topology: &str,
        kernel: &str,
        rows: Vec<Row>,
        expects: impl Fn(&str) -> Option<String>,
    ) -> Group {
        let (mut expected, mut unexpected) = (Vec::new(), Vec::new());
        for row in &rows {
            let whole = match &row.outcome {
                Outcome::Skipped(reason) => {
                    Some(Skip { name: row.test.to_string(), reason: reason.clone() })
                }
                _ => None,
            };
            let parts = row.parts.iter().map(|part| Skip {
                name: format!("{}::{}", row.test.binary, part.name),
                reason: part.reason.clone(),
            });
            for skip in whole.into_iter().chain(parts) {
                match expects(&skip.name) {
                    Some(because) => expected.push((skip, because)),
                    None => unexpected.push(skip),
                }
            }
        }
        Group {
            topology: topology.to_owned(),
            kernel: kernel.to_owned(),
            rows,
            problems: Vec::new(),
            console: Vec::new(),
            elapsed: Duration::ZERO,
            expected,
            unexpected,
        }
    }

    /// Number of tests by result. A guest with problems counts as one more failure. Skipped parts
    /// are not counted.
    pub fn counts(&self) -> Counts {
        let mut counts =
            Counts { failed: usize::from(!self.problems.is_empty()), ..Counts::default() };
        for row in &self.rows {
            match row.outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Failed(..) => counts.failed += 1,
                Outcome::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }

    fn name(&self) -> String {
        format!("{}/{}", self.topology, self.kernel)
    }
}

/// The results of all guests together.
#[derive(Debug, Default)]
pub struct Summary {
    /// All tests, and one more failure for each guest with problems.
    pub counts: Counts,
    /// Failed tests, as `topology/kernel binary::test`, and guests with problems.
    pub failed: Vec<String>,
    /// Skips that no topology expects.
    pub skips: Vec<Skip>,
    /// Tests that passed in a guest, without the names of their binaries, and the parts that the
    /// guest skipped.
    pub passed: Vec<(String, Vec<String>)>,
    /// Tests with the seconds that each took, by the clock of its guest.
    pub times: Vec<(String, f64)>,
}

impl Summary {
    /// Whether some guest has run this test, or this part of a test. Elsewhere it was skipped.
    pub fn has_run(&self, skipped: &str) -> bool {
        let test = skipped.split(" (").next().unwrap_or_default();
        self.passed
            .iter()
            .any(|(name, parts)| name == test && !parts.iter().any(|part| part == skipped))
    }
}

/// Adds up the results of all guests.
pub fn summary(groups: &[Group]) -> Summary {
    let mut summary = Summary::default();
    for group in groups {
        summary.counts += group.counts();
        let failed = group.rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed(..)));
        summary.failed.extend(failed.map(|row| format!("{} {}", group.name(), row.test)));
        if !group.problems.is_empty() {
            summary.failed.push(format!("{} (the guest)", group.name()));
        }
        let passed = group.rows.iter().filter(|row| row.outcome == Outcome::Passed);
        summary.passed.extend(passed.map(|row| {
            (row.test.name.clone(), row.parts.iter().map(|part| part.name.clone()).collect())
        }));
        let time = |row: &Row| {
            (format!("{} {}", group.name(), row.test), Duration::from_millis(row.ms).as_secs_f64())
        };
        summary.times.extend(group.rows.iter().map(time));
        let skips = group.unexpected.iter();
        summary.skips.extend(
            skips.map(|skip| Skip {
                name: format!("{} {}", group.name(), skip.name),
                ..skip.clone()
            }),
        );
    }
    summary
}

/// Makes expected skips unexpected unless another machine has run the test, or the part of the
/// test.
pub fn deny_what_nobody_has_run(groups: &mut [Group]) {
    let all = summary(groups);
    for group in groups {
        let expected = std::mem::take(&mut group.expected);
        let (right, wrong): (Vec<_>, Vec<_>) = expected.into_iter().partition(|(skip, _)| {
            let (_, name) = skip.name.split_once("::").unwrap_or_default();
            all.has_run(name)
        });
        group.expected = right;
        group.unexpected.extend(wrong.into_iter().map(|(skip, because)| Skip {
            reason: format!("no machine has run the test, although {because}"),
            ..skip
        }));
    }
}

/// The report at the end of a run.
pub fn text(groups: &[Group], deny_skip: bool) -> String {
    let mut out = String::new();
    let mut table = Table::new(&[
        "topology",
        "kernel",
        "result",
        "tests",
        "passed",
        "failed",
        "skipped",
        "parts skipped",
        "s",
    ]);
    for group in groups {
        let counts = group.counts();
        let parts: usize = group.rows.iter().map(|row| row.parts.len()).sum();
        let numbers = [group.rows.len(), counts.passed, counts.failed, counts.skipped, parts]
            .map(|n| n.to_string());
        let result = if counts.failed > 0 { "FAILED" } else { "ok" };
        let mut cells = vec![group.topology.as_str(), group.kernel.as_str(), result];
        cells.extend(numbers.iter().map(String::as_str));
        let time = seconds(group.elapsed);
        cells.push(&time);
        table.row(&cells);
    }
    // Writing to a String cannot fail.
    let _ = write!(out, "\n{table}");
    let _ = writeln!(
        out,
        "(seconds of software emulation: they say nothing about the speed of the tested code)"
    );
    let expected: Vec<_> =
        groups.iter().flat_map(|g| g.expected.iter().map(move |e| (g.name(), e))).collect();
    if !expected.is_empty() {
        let _ = writeln!(out, "\n{} skips that the topologies expect:", expected.len());
        for (name, (skip, because)) in expected {
            let _ = writeln!(out, "    [{name}] {}: {because}", skip.name);
        }
    }
    let summary = summary(groups);
    if !summary.skips.is_empty() {
        let denied = if deny_skip { " (failures because of --deny-skip)" } else { "" };
        let _ = writeln!(out, "\n{} other skips{denied}:", summary.skips.len());
        summary.skips.iter().for_each(|skip| {
            let _ = writeln!(out, "    {skip}");
        });
    }
    // Last, because a summary shows the end of a log.
    for group in groups {
        for row in &group.rows {
            if let Outcome::Failed(reason, output) = &row.outcome {
                let _ = writeln!(out, "\nFAILED {} {}: {reason}", group.name(), row.test);
                output.iter().for_each(|line| {
                    let _ = writeln!(out, "    {line}");
                });
            }
        }
        if !group.problems.is_empty() {
            let _ = writeln!(out, "\nFAILED {}: the guest:", group.name());
            group.problems.iter().for_each(|problem| {
                let _ = writeln!(out, "    {problem}");
            });
            let _ = writeln!(out, "  the last lines of its console:");
            group.console.iter().for_each(|line| {
                let _ = writeln!(out, "    {line}");
            });
        }
    }
    let listed: usize = groups.iter().map(|group| group.rows.len()).sum();
    let _ = writeln!(
        out,
        "\n{} in {} machines; {listed} tests were listed",
        summary.counts,
        groups.len()
    );
    out
}

#[cfg(test)]
mod tests {
    use super::super::transcript::TestId;
    use super::*;

    fn row(name: &str, outcome: Outcome) -> Row {
        Row {
            test: TestId { binary: "leap".into(), name: name.into() },
            outcome,
            parts: Vec::new(),
            ms: 0,
        }
    }

    fn group() -> Group {
        let mut second = row("two", Outcome::Passed);
        second.parts.push(Skip { name: "two (1g pages)".into(), reason: "none".into() });
        let rows = vec![
            row("one", Outcome::Skipped("alone".into())),
            second,
            row("three", Outcome::Failed("exit 101".into(), vec!["left != right".into()])),
        ];
        Group::new("tier", "6.1", rows, |name| {
            (name == "leap::one").then(|| "it is right".to_owned())
        })
    }

    #[test]
    fn skips_are_sorted_and_all_results_are_counted() {
        let mut groups = [group()];
        assert_eq!(groups[0].counts(), Counts { passed: 1, failed: 1, skipped: 1 });
        let total = summary(&groups);
        assert_eq!(total.failed, ["tier/6.1 leap::three"]);
        let skips: Vec<_> = total.skips.iter().map(Skip::to_string).collect();
        assert_eq!(skips, ["tier/6.1 leap::two (1g pages): none"]);
        let ran = ["two", "two (2m pages)", "two (1g pages)", "one", "three", "four"]
            .map(|name| total.has_run(name));
        assert_eq!(ran, [true, true, false, false, false, false]);
        deny_what_nobody_has_run(&mut groups);
        assert!(groups[0].expected.is_empty(), "no guest has run leap::one");
        assert!(
            groups[0]
                .unexpected
                .iter()
                .any(|skip| skip.reason.starts_with("no machine has run the test"))
        );
        groups[0].rows.push(row("one", Outcome::Passed));
        let mut again = [Group::new("tier", "6.1", groups[0].rows.clone(), |name| {
            (name == "leap::one").then(|| "it is right".to_owned())
        })];
        deny_what_nobody_has_run(&mut again);
        assert_eq!(again[0].expected.len(), 1);
        groups[0].rows.pop();
        groups[0].expected = again[0].expected.clone();
        groups[0].problems.push("it hung".into());
        groups[0].console.push("the last line".into());
        assert_eq!(summary(&groups).counts.failed, 2, "a guest with problems is one more failure");
        let text = text(&groups, true);
        for wanted in
            ["left != right", "it hung", "the last line", "it is right", "--deny-skip", "3 tests"]
        {
            assert!(text.contains(wanted), "{wanted} is not in {text}");
        }
    }
}
