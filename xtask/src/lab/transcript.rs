//! The lines that a guest has sent, and the verdict that follows from them. All functions are pure.
//! `xtask/guest/src/main.rs` describes the lines.
//!
//! Everything that is not proven to be a pass is a failure: a test without an ending, an ending
//! without a counted test, a guest that did not repeat the nonce or did not report that it had done
//! everything, and a kernel that complained.

use std::collections::BTreeMap;

use crate::process::Ending;
use crate::tally::Skip;

/// QEMU's exit code after the guest has ended as it should. No other ending has this exit code.
pub const DONE: i32 = 129;

/// Number of console lines that are shown with a failure.
const CONSOLE_LINES: usize = 12;

/// The beginning of the reason for tests whose result is unknown, because the guest ended.
const ENDED: &str = "the guest ended";

/// Texts on the console by which the kernel reports that something is wrong.
const COMPLAINTS: [&str; 8] = [
    "Kernel panic",
    "BUG:",
    "Oops",
    "general protection fault",
    "soft lockup",
    "rcu: INFO:",
    "blocked for more than",
    "WARNING: CPU",
];

/// A test of a test binary.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TestId {
    /// Name of the test binary.
    pub binary: String,
    /// Name of the test in the binary.
    pub name: String,
}

impl std::fmt::Display for TestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}::{}", self.binary, self.name)
    }
}

/// What a guest has to report about itself, and its tests.
#[derive(Debug, Clone)]
pub struct Expected {
    /// The nonce, which no other guest has.
    pub nonce: String,
    /// The kernel's release, as `uname -r` prints it.
    pub release: String,
    /// The online nodes in the kernel's list format.
    pub nodes: String,
    /// The tests of the guest, in order.
    pub tests: Vec<TestId>,
}

/// The result of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The test ran and passed.
    Passed,
    /// The test failed, or its result is unknown. The reason, and the last lines of its output.
    Failed(String, Vec<String>),
    /// The test reported that it cannot run there, with the reason.
    Skipped(String),
}

/// One row of the results.
#[derive(Debug, Clone)]
pub struct Row {
    /// The test.
    pub test: TestId,
    /// The result of the test.
    pub outcome: Outcome,
    /// The parts of the test that were skipped, with reasons.
    pub parts: Vec<Skip>,
    /// Duration by the guest's clock, in milliseconds. It is emulated time and measures nothing.
    pub ms: u64,
}

/// The verdict on a guest.
#[derive(Debug, Clone, Default)]
pub struct Judged {
    /// One row for each test of the guest.
    pub rows: Vec<Row>,
    /// Problems of the guest itself. A guest with a problem has failed.
    pub problems: Vec<String>,
    /// The last lines of the console, if the guest has a problem.
    pub console: Vec<String>,
    /// A line of the console that shows an impossible state of the processor, which proves an error
    /// of QEMU.
    pub impossible: Option<String>,
}

impl Judged {
    /// Whether a test has failed for another reason than the end of the guest.
    pub fn has_failed_by_itself(&self) -> bool {
        let failed =
            |row: &Row| matches!(&row.outcome, Outcome::Failed(why, _) if !why.starts_with(ENDED));
        self.rows.iter().any(failed)
    }
}

/// The lines about one test.
#[derive(Debug, Default)]
struct Heard {
    begun: bool,
    skips: Vec<Skip>,
    output: Vec<String>,
    end: Option<End>,
}

#[derive(Debug)]
struct End {
    ending: String,
    passed: u64,
    ignored: u64,
    killed: u64,
    ms: u64,
}

/// All lines of a guest, sorted by what they are about. See the module.
#[derive(Debug, Default)]
pub struct Transcript {
    hello: Vec<(String, String, String)>,
    setup: Vec<String>,
    tests: BTreeMap<usize, Heard>,
    /// The exit code of the command.
    pub exit: Option<i32>,
    bye: Vec<String>,
    strange: Vec<String>,
}

/// A line that callers may show at once.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The first process of the guest runs.
    Booted,
    /// A test has ended.
    Ended(usize),
    /// A line of a command's output.
    Output(String),
}

impl Transcript {
    /// Adds one line.
    pub fn line(&mut self, line: &str) -> Option<Event> {
        if let Some(output) = line.strip_prefix('=') {
            return Some(Event::Output(output.to_owned()));
        }
        let understood = line.strip_prefix('@').map(|line| self.message(line));
        match understood {
            Some(Ok(event)) => event,
            // A line of QEMU itself, or an incomplete line.
            None | Some(Err(())) => {
                self.strange.push(line.to_owned());
                None
            }
        }
    }

    fn message(&mut self, line: &str) -> Result<Option<Event>, ()> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "beat" => return Ok(None),
            "hello" => {
                let mut words = rest.split(' ').map(str::to_owned);
                let mut next = || words.next().ok_or(());
                self.hello.push((next()?, next()?, next()?));
                return Ok(Some(Event::Booted));
            }
            "setup" => self.setup.push(rest.to_owned()),
            "exit" => self.exit = Some(rest.parse().map_err(drop)?),
            "bye" => self.bye.push(rest.to_owned()),
            "begin" | "skip" | "out" | "end" => {
                let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                let number: usize = number.parse().map_err(drop)?;
                let heard = self.tests.entry(number).or_default();
                match word {
                    "begin" => heard.begun = true,
                    "out" => heard.output.push(rest.to_owned()),
                    "skip" => heard.skips.push(Skip::parse(rest).ok_or(())?),
                    _ => {
                        let words: Vec<&str> = rest.split(' ').collect();
                        let [ending, passed, ignored, killed, ms] = words[..] else {
                            return Err(());
                        };
                        let number = |text: &str| text.parse().map_err(drop);
                        if heard.end.is_some() {
                            return Err(());
                        }
                        heard.end = Some(End {
                            ending: ending.to_owned(),
                            passed: number(passed)?,
                            ignored: number(ignored)?,
                            killed: number(killed)?,
                            ms: number(ms)?,
                        });
                    }
                }
                if word == "end" {
                    return Ok(Some(Event::Ended(number)));
                }
            }
            _ => return Err(()),
        }
        Ok(None)
    }

    /// The result of a test, as far as the lines so far tell.
    pub fn row(&self, expected: &Expected, number: usize) -> Row {
        let test = expected.tests[number].clone();
        let Some(heard) = self.tests.get(&number) else {
            let outcome = Outcome::Failed(format!("{ENDED} before the test began"), Vec::new());
            return Row { test, outcome, parts: Vec::new(), ms: 0 };
        };
        let failed = |reason: String| Outcome::Failed(reason, heard.output.clone());
        let is_whole = |skip: &&Skip| {
            skip.name == test.name || test.name.ends_with(&format!("::{}", skip.name))
        };
        let whole = heard.skips.iter().find(is_whole);
        let outcome = match &heard.end {
            None if heard.begun => failed(format!("{ENDED} while the test ran")),
            None => failed(format!("{ENDED} before the test began")),
            Some(end) if end.killed > 0 => {
                failed(format!("the kernel killed {} process(es) for memory", end.killed))
            }
            Some(end) if end.ending != "exit:0" => {
                failed(end.ending.replace('_', " ").replacen(':', " ", 1))
            }
            Some(End { passed: 0, ignored: 1, .. }) => {
                Outcome::Skipped("marked #[ignore]".to_owned())
            }
            Some(End { passed: 1, ignored: 0, .. }) => match whole {
                Some(skip) => Outcome::Skipped(skip.reason.clone()),
                None => Outcome::Passed,
            },
            Some(end) => failed(format!("the harness counted {} passed tests", end.passed)),
        };
        let parts = heard.skips.iter().filter(|skip| !is_whole(skip)).cloned().collect();
        Row { test, outcome, parts, ms: heard.end.as_ref().map_or(0, |end| end.ms) }
    }

    /// Judges the guest by its lines, by the ending of QEMU, and by the `text` of the console.
    /// `why` describes an ending that the guest itself did not cause.
    pub fn judge(&self, expected: &Expected, ending: Ending, why: &str, text: &str) -> Judged {
        let mut problems: Vec<String> =
            self.setup.iter().map(|line| format!("setting up: {line}")).collect();
        match &self.hello[..] {
            [] => problems.push("the guest never sent @hello".to_owned()),
            [(nonce, release, nodes)] => {
                let mut differ = |what: &str, said: &str, wanted: &str| {
                    if said != wanted {
                        problems.push(format!("the {what} is `{said}` instead of `{wanted}`"));
                    }
                };
                differ("nonce", nonce, &expected.nonce);
                differ("kernel", release, &expected.release);
                differ("list of online nodes", nodes, &expected.nodes);
            }
            _ => problems.push("the guest sent @hello more than once: it was rebooted".to_owned()),
        }
        if self.bye != [expected.nonce.as_str()] {
            problems.push("the guest did not report that it had done everything".to_owned());
        }
        match ending {
            Ending::Exited(status) if status.code() == Some(DONE) => {}
            Ending::Exited(status) if status.code() == Some(0) => {
                problems.push(
                    "the guest was reset: a kernel panic, or no process was left to kill"
                        .to_owned(),
                );
            }
            Ending::Exited(status) => problems.push(format!("QEMU: {status}")),
            Ending::TimedOut | Ending::Silent | Ending::Enough => problems.push(why.to_owned()),
        }
        if let Some(complaint) = text.lines().find(|line| is_complaint(line)) {
            problems.push(format!("the kernel complained: {}", complaint.trim()));
        }
        if !self.strange.is_empty() {
            let last = &self.strange[self.strange.len() - 1];
            problems.push(format!("{} unknown line(s), the last: {last}", self.strange.len()));
        }
        if let Some(number) = self.tests.keys().find(|&&number| number >= expected.tests.len()) {
            problems.push(format!("the guest reported a test {number} that it was not given"));
        }
        let rows = (0..expected.tests.len()).map(|number| self.row(expected, number)).collect();
        let console = if problems.is_empty() { Vec::new() } else { last_lines(text) };
        Judged { rows, problems, impossible: impossible(text), console }
    }
}

/// The first complaint of the kernel and the lines after it, and the last lines.
fn last_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> =
        text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let end = lines.len().saturating_sub(CONSOLE_LINES);
    let complaint = lines.iter().position(|line| is_complaint(line)).unwrap_or(end).min(end);
    let mut shown: Vec<String> =
        lines[complaint..].iter().take(CONSOLE_LINES / 2).map(|&line| line.to_owned()).collect();
    let rest = end.max(complaint + shown.len());
    if rest > complaint + shown.len() {
        shown.push("[...]".to_owned());
    }
    shown.extend(lines[rest..].iter().map(|&line| line.to_owned()));
    shown
}

/// A line of the console that shows a state of the processor which no kernel can cause. The error
/// then lies in QEMU.
///
/// In 64-bit mode EFLAGS.VM, bit 17, is always clear, whatever a program loads (AMD64 manual,
/// volume 2, 3.1.6). QEMU 7.2 has been seen to set it after an interrupted `rep stos`.
///
/// Only the first complaint of the kernel counts. After another one, the guest was in trouble
/// already.
fn impossible(console: &str) -> Option<String> {
    const VM: u32 = 1 << 17;
    /// Ends of complaints, and complaints that show no registers.
    const EARLIER: [&str; 4] = ["---[ end trace", "soft lockup", "rcu: INFO:", "blocked for more"];
    let earlier = |line: &str| EARLIER.iter().any(|text| line.contains(text));
    let first_complaint = console.lines().take_while(|line| !earlier(line));
    let mut in_kernel = false;
    first_complaint.into_iter().find_map(|line| {
        if let Some((_, place)) = line.split_once("RIP: ") {
            in_kernel = place.starts_with("0010:");
        }
        let (_, flags) = line.split_once("EFLAGS: ")?;
        let flags = u32::from_str_radix(flags.trim(), 16).ok()?;
        (in_kernel && flags & VM != 0).then(|| line.trim().to_owned())
    })
}

fn is_complaint(line: &str) -> bool {
    COMPLAINTS.iter().any(|text| line.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const HELLO: &str = "@hello n1 6.12.1 0-1";

    fn expected() -> Expected {
        let test = |name: &str| TestId { binary: "leap".to_owned(), name: name.to_owned() };
        let tests = vec![test("one"), test("m::two")];
        Expected { nonce: "n1".into(), release: "6.12.1".into(), nodes: "0-1".into(), tests }
    }

    fn exited(code: i32) -> Ending {
        Ending::Exited(ExitStatus::from_raw(code << 8))
    }

    fn judge(lines: &[&str], ending: Ending, console: &str) -> Judged {
        let mut transcript = Transcript::default();
        lines.iter().for_each(|line| drop(transcript.line(line)));
        let judged = transcript.judge(&expected(), ending, "the guest hung", console);
        assert_eq!(judged.rows.len(), 2, "each test has one row in any case");
        judged
    }

    fn failed(row: &Row) -> &str {
        match &row.outcome {
            Outcome::Failed(reason, _) => reason,
            other => panic!("{other:?}"),
        }
    }

    const FINE: [&str; 7] = [
        HELLO,
        "@begin 0",
        "@end 0 exit:0 1 0 0 5",
        "@begin 1",
        "@skip 1 two: no huge pages",
        "@end 1 exit:0 1 0 0 5",
        "@bye n1",
    ];

    #[test]
    fn a_good_run_has_no_problems() {
        let judged = judge(&FINE, exited(129), "");
        assert!(judged.problems.is_empty(), "{:?}", judged.problems);
        assert_eq!(judged.rows[0].outcome, Outcome::Passed);
        assert_eq!(judged.rows[1].outcome, Outcome::Skipped("no huge pages".into()));
    }

    #[test]
    fn every_departure_from_a_good_run_is_a_problem_of_the_guest() {
        let without = |line: usize| -> Vec<&str> {
            FINE.iter().enumerate().filter(|(i, _)| *i != line).map(|(_, line)| *line).collect()
        };
        let with = |line: usize, text: &'static str| {
            let mut lines = FINE.to_vec();
            lines[line] = text;
            lines
        };
        let cases = [
            (without(0), exited(129), "", "hello"),
            (without(6), exited(129), "", "everything"),
            (with(6, "@bye n2"), exited(129), "", "everything"),
            (with(0, "@hello n2 6.12.1 0-1"), exited(129), "", "nonce"),
            (with(0, "@hello n1 6.1.1 0-1"), exited(129), "", "kernel"),
            (with(0, "@hello n1 6.12.1 0"), exited(129), "", "nodes"),
            (with(1, HELLO), exited(129), "", "rebooted"),
            (with(1, "@begin 7"), exited(129), "", "not given"),
            (with(1, "qemu: no such device"), exited(129), "", "no such device"),
            (with(1, "@setup /x: no"), exited(129), "", "/x: no"),
            (FINE.to_vec(), exited(0), "", "reset"),
            (FINE.to_vec(), exited(131), "", "131"),
            (FINE.to_vec(), Ending::TimedOut, "", "the guest hung"),
            (FINE.to_vec(), Ending::Silent, "", "the guest hung"),
            (FINE.to_vec(), exited(129), "x\n[ 1.0] BUG: bad page", "bad page"),
        ];
        for (lines, ending, console, named) in cases {
            let judged = judge(&lines, ending, console);
            assert!(
                judged.problems.iter().any(|p| p.contains(named)),
                "{named}: {:?}",
                judged.problems
            );
        }
    }

    #[test]
    fn a_test_without_a_proof_that_it_passed_has_failed() {
        let end = |line| judge(&[HELLO, "@begin 0", line], exited(129), "").rows[0].clone();
        assert_eq!(failed(&end("@end 0 exit:101 0 0 0 5")), "exit 101");
        assert_eq!(failed(&end("@end 0 signal:9 0 0 0 5")), "signal 9");
        assert_eq!(failed(&end("@end 0 time-out:30 0 0 0 5")), "time-out 30");
        assert!(failed(&end("@end 0 exit:0 0 0 0 5")).contains("counted 0"));
        assert!(failed(&end("@end 0 exit:0 1 0 2 5")).contains("killed 2"));
        assert!(failed(&end("@end 0 exi")).contains("while the test ran"), "half a line");
        assert!(failed(&end("")).contains("while the test ran"));
        assert!(
            failed(&judge(&[HELLO], exited(129), "").rows[1]).contains("before the test began")
        );
    }

    #[test]
    fn a_test_with_a_skipped_part_can_pass() {
        let lines = [HELLO, "@begin 0", "@skip 0 one (2m pages): none", "@end 0 exit:0 1 0 0 5"];
        let row = judge(&lines, exited(129), "").rows[0].clone();
        assert_eq!(row.outcome, Outcome::Passed);
        assert_eq!(row.parts[0].to_string(), "one (2m pages): none");
    }

    #[test]
    fn the_console_is_shown_from_the_first_complaint_and_at_its_end() {
        let text = |complaint: &str| {
            (0..40)
                .map(|i| format!("{i}{}\n", if i == 5 { complaint } else { "" }))
                .collect::<String>()
        };
        let shown = last_lines(&text(" BUG: x"));
        assert_eq!(
            (shown[0].as_str(), shown[6].as_str(), shown[7].as_str()),
            ("5 BUG: x", "[...]", "28")
        );
        assert_eq!(
            (shown.len(), shown[18].as_str()),
            (CONSOLE_LINES / 2 + 1 + CONSOLE_LINES, "39")
        );
        assert_eq!(last_lines(&text("")), (28..40).map(|i| i.to_string()).collect::<Vec<_>>());
        assert_eq!(last_lines("a\nb\n"), ["a", "b"]);
    }

    #[test]
    fn output_and_exit_code_of_a_command_are_passed_on() {
        let mut transcript = Transcript::default();
        assert_eq!(transcript.line("=@bye"), Some(Event::Output("@bye".into())));
        transcript.line("@exit 3");
        assert_eq!(transcript.exit, Some(3));
        assert_eq!(transcript.line("@end 0 exit:0 1 0 0 5"), Some(Event::Ended(0)));
    }

    #[test]
    fn an_error_of_the_processor_is_told_from_an_error_of_the_kernel() {
        let oops = |place: &str, flags: &str| {
            format!(
                "[ 1.0] Oops: double fault: 0000 [#1]\n[ 1.0] RIP: {place}\n[ 1.0] Code: 90\n\
                 [ 1.0] RSP: 0018:ffa0000007363958 EFLAGS: {flags}\n[ 1.0] RAX: 0\n"
            )
        };
        let found = |place, flags| impossible(&oops(place, flags)).is_some();
        assert!(found("0010:init_multi_vma_prep+0x1c/0x70", "01720246"));
        assert!(!found("0010:init_multi_vma_prep+0x1c/0x70", "00010246"));
        // After another complaint of the kernel the guest was in trouble already.
        let second = oops("0010:init_multi_vma_prep+0x1c/0x70", "01720246");
        for first in ["WARNING: CPU: 0\n---[ end trace 0 ]---\n", "rcu: INFO: stalls\n"] {
            assert_eq!(impossible(&format!("{first}{second}")), None);
        }
        // Registers of a program prove nothing; only those of the kernel do.
        assert!(!found("0033:0x7fb54c8c7ee0", "01720246"));
        assert_eq!(impossible("EFLAGS: 01720246\nRIP: 0010:x\nEFLAGS: none"), None);
    }
}
