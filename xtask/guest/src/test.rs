//! Runs one test in a process of its own and reports how the test ended.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::Host;
use crate::plan::{Plan, Test};

/// The log to which the test writes its skips. Tests that change their user must be able to write
/// it too.
const SKIP_LOG: &str = "/tmp/skips";

/// Number of output lines that are kept for each test.
const OUTPUT_LINES: usize = 120;

/// Time between two checks whether a silent test has ended.
const POLL: Duration = Duration::from_millis(20);

/// Runs the test and reports the result to the host.
pub fn run(host: &Host, plan: &Plan, number: usize, test: &Test) {
    host.say(&format!("@begin {number}"));
    let begun = Instant::now();
    let killed_before = oom_kills();
    let _ = fs::write(SKIP_LOG, "");
    let (ending, output) =
        execute(plan, test).unwrap_or_else(|error| (format!("start:{error}"), VecDeque::new()));
    for line in fs::read_to_string(SKIP_LOG).unwrap_or_default().lines() {
        host.say(&format!("@skip {number} {line}"));
    }
    let count =
        |kind: &str| output.iter().rev().find_map(|line| harness_count(line, kind)).unwrap_or(0);
    let (passed, ignored) = (count("passed"), count("ignored"));
    if ending != "exit:0" || passed + ignored != 1 {
        output.iter().for_each(|line| host.say(&format!("@out {number} {line}")));
    }
    let killed = oom_kills() - killed_before;
    let (ending, ms) = (ending.replace(' ', "_"), begun.elapsed().as_millis());
    host.say(&format!("@end {number} {ending} {passed} {ignored} {killed} {ms}"));
}

/// Runs the test in a process group of its own. Returns how the test ended, and its last lines of
/// output. Processes that are left in the group are killed.
fn execute(plan: &Plan, test: &Test) -> std::io::Result<(String, VecDeque<String>)> {
    let (reader, writer) = std::io::pipe()?;
    let mut command = Command::new(format!("/lab/bin/{}", test.binary));
    command.args(["--exact", &test.name, "--nocapture", "--test-threads=1"]);
    command
        .env("PAGELEAP_SKIP_LOG", SKIP_LOG)
        .envs(plan.variables.iter().cloned())
        .current_dir("/tmp");
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let mut child = command.spawn()?;
    drop(command); // closes the write ends of the pipe in this process
    let group = child.id() as i32;

    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
            line.clear();
        }
    });
    let mut output = VecDeque::new();
    let mut keep = |line: String| {
        if output.len() == OUTPUT_LINES {
            output.pop_front();
        }
        output.push_back(line);
    };
    let deadline = Instant::now() + Duration::from_secs(test.seconds);
    let mut ending = None;
    while ending.is_none() {
        while let Ok(line) = lines.recv_timeout(POLL) {
            keep(line);
            if Instant::now() > deadline {
                break;
            }
        }
        ending = match child.try_wait()? {
            Some(status) => Some(describe(status)),
            None if Instant::now() > deadline => Some(format!("time-out:{}", test.seconds)),
            None => None,
        };
    }
    // SAFETY: the call takes no pointers. Child processes that the test has left behind are in its
    // group.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let _ = child.wait();
    // Reap other processes that this first process has adopted. SAFETY: the pointer for the
    // status is null, so nothing is written.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    // All processes with the write end are gone, so the pipe ends soon.
    while let Ok(line) = lines.recv_timeout(Duration::from_secs(2)) {
        keep(line);
    }
    Ok((ending.unwrap_or_default(), output))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit:{code}"),
        (None, signal) => format!("signal:{}", signal.unwrap_or(0)),
    }
}

/// The exit code that a shell would report.
pub fn shell_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The number before `kind` in a line like `test result: ok. 1 passed; 0 failed; …`.
fn harness_count(line: &str, kind: &str) -> Option<u64> {
    let totals = line.split("test result: ").nth(1)?;
    let part = totals.split(['.', ';']).find(|part| part.trim_end().ends_with(kind))?;
    part.split_whitespace().next()?.parse().ok()
}

/// Number of processes that the kernel has killed because it had no memory left.
fn oom_kills() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let value = counters.lines().find_map(|line| line.strip_prefix("oom_kill "));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_of_the_harness_are_read() {
        let line = "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 9 filtered out; finished in 0.01s";
        assert_eq!(harness_count(line, "passed"), Some(1));
        assert_eq!(harness_count(line, "ignored"), Some(2));
        assert_eq!(harness_count("test a ... ok", "passed"), None);
    }
}
