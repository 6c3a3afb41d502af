//! The end of `cargo xtask test`: a table of the steps, what failed, what was skipped, which tests
//! took longest, and what was not run.

use std::fs;
use std::time::Duration;

use super::report::{Done, Verdict};
use super::{Plan, Step};
use crate::table::{Table, seconds};
use crate::tally::Counts;

/// How many of the slowest tests are named.
const SLOWEST: usize = 10;

/// How many lines at the end of a failed step's log are shown.
const LAST_LINES: usize = 60;

/// All steps of a run, after the last of them has ended.
#[derive(Debug)]
pub struct Whole<'a> {
    plan: &'a Plan,
    done: Vec<Done>,
    totals: Counts,
    /// Tests that were skipped on this machine, and have run in a guest.
    in_guests: usize,
}

impl<'a> Whole<'a> {
    /// Adds up the steps.
    pub fn of(plan: &'a Plan, mut done: Vec<Done>) -> Whole<'a> {
        let in_guests = take_out_what_a_guest_has_run(&mut done);
        let mut totals = Counts::default();
        done.iter().for_each(|done| totals += done.report.counts);
        if plan.deny_skip {
            totals = Counts { failed: totals.failed + totals.skipped, skipped: 0, ..totals };
        }
        Whole { plan, done, totals, in_guests }
    }

    /// Whether everything that ran has passed, and skips were not denied.
    pub fn is_good(&self) -> bool {
        self.totals.failed == 0
    }

    /// Everything that this run leaves out: skips, tests for the lab, deep steps. A line each.
    pub fn not_run(&self) -> Vec<String> {
        let skips = self.done.iter().flat_map(|done| {
            let name = done.step.name();
            let all = done.report.skips.iter().chain(&done.report.left_to_the_lab);
            all.map(move |skip| format!("[{name}] {skip}"))
        });
        let deep = self.plan.left_out().into_iter().map(|step| format!("step {}", step.name()));
        skips.chain(deep).collect()
    }

    /// Prints everything. What has to be read is on the last screen: the totals, and after failures
    /// the ends of the failed steps' logs, and last the names of these steps.
    pub fn print(&self, elapsed: Duration) {
        print!("\n{}", table(&self.done));
        println!(
            "({} s in all; steps without tests count as one, mutants as one each)",
            seconds(elapsed)
        );
        print_slowest(&self.done);
        if self.in_guests > 0 {
            println!(
                "\n{} tests were skipped on this machine, and have run in a guest",
                self.in_guests
            );
        }
        print_skips(&self.done, self.plan.deny_skip);
        print_not_run(self.plan, &self.done);
        print_failures(&self.done);
        println!("\n{}", self.totals);
        print_ends_of_logs(&self.done);
    }
}

/// A test that this machine cannot run is no gap if an emulated machine has run it. Returns how
/// many those are. Other steps run the same tests for longer, and at full speed: for these an
/// emulated machine is no substitute.
fn take_out_what_a_guest_has_run(done: &mut [Done]) -> usize {
    let guests: Vec<_> = done.iter().map(|done| done.report.clone()).collect();
    let has_run = |name: &str| guests.iter().any(|report| report.has_run(name));
    let mut total = 0;
    for Done { report, .. } in done.iter_mut().filter(|done| done.step == Step::Tests) {
        let before = report.skips.len();
        report.skips.retain(|skip| !has_run(&skip.name));
        let taken = before - report.skips.len();
        report.counts.skipped = report.counts.skipped.saturating_sub(taken);
        let left = report.left_to_the_lab.len();
        report.left_to_the_lab.retain(|skip| !has_run(&skip.name));
        total += taken + left - report.left_to_the_lab.len();
    }
    total
}

fn table(done: &[Done]) -> Table {
    let heads = ["step", "result", "seconds", "CPU", "passed", "failed", "skipped", ""];
    let mut table = Table::new(&heads);
    for Done { step, report, elapsed, .. } in done {
        let Counts { passed, failed, skipped } = report.counts;
        let note = match &report.verdict {
            Verdict::Failed(reason) => reason.lines().next().unwrap_or_default(),
            Verdict::Passed | Verdict::Skipped => "",
        };
        let [passed, failed, skipped] = [passed, failed, skipped].map(|n| n.to_string());
        table.row(&[
            step.name(),
            report.verdict.text(),
            &seconds(*elapsed),
            &seconds(Duration::from_secs_f64(report.cpu_seconds)),
            &passed,
            &failed,
            &skipped,
            note,
        ]);
    }
    table
}

fn print_slowest(done: &[Done]) {
    let mut times: Vec<(f64, &str, &str)> = Vec::new();
    for Done { step, report, .. } in done {
        times.extend(report.times.iter().map(|(name, time)| (*time, step.name(), name.as_str())));
    }
    if times.is_empty() {
        return;
    }
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("\nslowest tests:");
    for (time, step, name) in times.into_iter().take(SLOWEST) {
        println!("    {time:6.1} s  [{step}] {name}");
    }
}

fn print_failures(done: &[Done]) {
    for Done { step, report, .. } in done {
        if let Verdict::Failed(reason) = &report.verdict {
            println!("\n{} FAILED: {reason}", step.name());
        }
        report.failed_tests.iter().for_each(|name| println!("    {name}"));
    }
}

fn print_ends_of_logs(done: &[Done]) {
    let mut failed = Vec::new();
    for Done { step, report, log, .. } in done {
        if !matches!(report.verdict, Verdict::Failed(_)) {
            continue;
        }
        failed.push(step.name());
        let text = fs::read_to_string(log).unwrap_or_default();
        println!("\n---- the end of {}, all of which is in {}:", step.name(), log.display());
        last_lines(&text, LAST_LINES).for_each(|line| println!("{line}"));
    }
    if !failed.is_empty() {
        println!("\nfailed: {}", failed.join(", "));
    }
}

fn last_lines(text: &str, count: usize) -> impl Iterator<Item = &str> {
    let lines = text.lines().count();
    text.lines().skip(lines.saturating_sub(count))
}

fn print_skips(done: &[Done], deny_skip: bool) {
    let skipped: usize = done.iter().map(|done| done.report.counts.skipped).sum();
    if skipped == 0 {
        return;
    }
    let denied = if deny_skip { ", which --deny-skip counts as failures" } else { "" };
    println!("\n{skipped} skipped{denied}:");
    for Done { step, report, .. } in done {
        report.skips.iter().for_each(|skip| println!("    [{}] {skip}", step.name()));
    }
}

/// What this run leaves out, and the command that runs it.
fn print_not_run(plan: &Plan, done: &[Done]) {
    let left = done.iter().flat_map(|done| &done.report.left_to_the_lab);
    let left: Vec<String> = left.map(|skip| format!("    {skip}")).collect();
    if !left.is_empty() {
        println!("\nnot run, because another machine or run of the lab is for it");
        println!("  (cargo xtask test --only {}):", Step::Lab.name());
        left.iter().for_each(|line| println!("{line}"));
    }
    let deep: Vec<&str> = plan.left_out().into_iter().map(Step::name).collect();
    if plan.is_whole && !deep.is_empty() {
        println!("\nnot run, because they are deep steps (cargo xtask test --all):");
        println!("    {}", deep.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::steps::report::{PassedInGuest, Report};
    use crate::tally::Skip;

    fn skip(name: &str) -> Skip {
        Skip { name: name.to_owned(), reason: "one node".to_owned() }
    }

    fn done(step: Step, report: Report) -> Done {
        Done { step, report, elapsed: Duration::ZERO, log: PathBuf::new() }
    }

    fn with_skips(names: &[&str]) -> Report {
        let counts = Counts { passed: 2, failed: 0, skipped: names.len() };
        let skips = names.iter().map(|name| skip(name)).collect();
        Report { counts, skips, ..Report::new(Verdict::Passed) }
    }

    #[test]
    fn denied_skips_fail_the_run() {
        let tests = || vec![done(Step::Tests, with_skips(&["huge"]))];
        let plan = Plan::only(vec![Step::Tests]);
        let whole = Whole::of(&plan, tests());
        assert!(whole.is_good());
        assert_eq!(whole.not_run()[0], "[tests] huge: one node");
        assert!(!Whole::of(&Plan { deny_skip: true, ..plan.clone() }, tests()).is_good());
    }

    #[test]
    fn a_failed_step_fails_the_run() {
        let failed = Report::new(Verdict::Failed("1 test".into()));
        let plan = Plan::only(vec![Step::Tests]);
        assert!(!Whole::of(&plan, vec![done(Step::Tests, failed)]).is_good());
    }

    #[test]
    fn what_the_default_command_leaves_out_is_named() {
        let plan = Plan::usual(false);
        let not_run = Whole::of(&plan, Vec::new()).not_run();
        assert!(not_run.contains(&"step miri".to_owned()), "{not_run:?}");
    }

    #[test]
    fn the_last_lines_of_a_log_are_shown() {
        assert_eq!(last_lines("a\nb\nc\n", 2).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(last_lines("a\n", 2).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn what_a_guest_has_run_is_no_gap() {
        let far = PassedInGuest { name: "far".into(), skipped_parts: Vec::new() };
        let own = Report { passed_in_guests: vec![far], ..with_skips(&["tier/6.1 leap::far"]) };
        let mut both = [done(Step::Tests, with_skips(&["far", "near"])), done(Step::Nodes, own)];
        assert_eq!(take_out_what_a_guest_has_run(&mut both), 1);
        let [tests, nodes] = &both;
        assert_eq!(tests.report.counts, Counts { passed: 2, failed: 0, skipped: 1 });
        assert_eq!(tests.report.skips[0].name, "near");
        assert_eq!(nodes.report.counts.skipped, 1, "what the guest itself has skipped stays");
        let mut tests = [done(Step::Tests, with_skips(&["far"]))];
        assert_eq!(take_out_what_a_guest_has_run(&mut tests), 0, "no guest, no substitute");
    }
}
