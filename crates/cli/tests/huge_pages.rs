//! `--reserve-huge-pages` puts huge pages back however the run ends. The tests change the number of
//! huge pages of the machine by a few, one test after the other.

#[path = "../../pageleap/tests/common/mod.rs"]
mod library;
#[path = "common/pipe.rs"]
mod pipe;

use std::fs;
use std::io::{PipeReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use library::{is_root, nodes, skip, turn};
use pipe::full_pipe;

/// Pages of 2 MB on all nodes.
const TOTAL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The total before a test. It is the total again after the test, also if the test fails.
struct Before(u64);

impl Before {
    fn of() -> Before {
        Before(total())
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        if total() != self.0 {
            let _ = fs::write(TOTAL, self.0.to_string());
        }
    }
}

fn total() -> u64 {
    fs::read_to_string(TOTAL).unwrap().trim().parse().unwrap()
}

/// A demo that has reserved huge pages, and that cannot end by itself: what it prints finds no room.
struct Run {
    child: Child,
    printed: PipeReader,
    added: u64,
}

impl Run {
    /// `None`, with the reason, if the machine has no room.
    fn start(test: &str) -> Option<Run> {
        if !is_root() {
            skip(test, &"reserving huge pages needs root");
            return None;
        }
        Run::spawn().reserved(test)
    }

    /// Two; the first one reserves first.
    fn start_two(test: &str) -> Option<[Run; 2]> {
        let first = Run::start(test)?;
        Some([first, Run::start(test)?])
    }

    fn spawn() -> Run {
        let (printed, full) = full_pipe();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
        command.args([
            "demo",
            "--page-size",
            "2m",
            "--reserve-huge-pages",
            "--scale-factor",
            "0.01",
        ]);
        // SAFETY: between fork and exec, system calls that set no handlers.
        unsafe {
            command.pre_exec(|| {
                (1..=libc::SIGRTMAX()).for_each(|signal| {
                    libc::signal(signal, libc::SIG_DFL);
                });
                Ok(())
            })
        };
        let child = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        drop(command);
        Run { child, printed, added: 0 }
    }

    /// Waits until it has reserved its pages.
    fn reserved(mut self, test: &str) -> Option<Run> {
        let [from, to] = nodes();
        let places = if from == to { 1 } else { 2 };
        let deadline = Instant::now() + Duration::from_secs(300);
        loop {
            let text = fs::read_to_string(self.note()).unwrap_or_default();
            let notes = text.lines().map(|line| serde_json::from_str(line).unwrap());
            let notes: Vec<serde_json::Value> = notes.collect();
            let done = notes.iter().filter(|note| note["is_done"] == true);
            let added: Vec<u64> = done.map(|note| note["added"].as_u64().unwrap()).collect();
            if added.len() == places {
                self.added = added.iter().sum();
                return Some(self);
            }
            if self.child.try_wait().unwrap().is_some() {
                let output = self.end();
                let text = String::from_utf8_lossy(&output.stderr);
                assert!(
                    text.contains("the kernel found memory") || text.contains("not enough"),
                    "{text}"
                );
                skip(test, &text.trim());
                return None;
            }
            assert!(Instant::now() < deadline, "no pages are noted");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Its file in the ledger.
    fn note(&self) -> String {
        format!("/run/pageleap/settings/{}-0.run", self.child.id())
    }

    fn signal(&self, signal: i32) {
        kill(self.child.id() as i32, signal);
    }

    /// Lets it print, and waits for its end and for that of its keeper, which would settle for the
    /// next run, too.
    fn end(mut self) -> Output {
        let keepers = self.keepers();
        let reader = std::thread::spawn(move || self.printed.read_to_end(&mut Vec::new()));
        let output = self.child.wait_with_output().unwrap();
        reader.join().unwrap().unwrap();
        wait_until("its keeper ends", || keepers.iter().all(|keeper| has_ended(*keeper)));
        output
    }

    /// The processes that wait for its end.
    fn keepers(&self) -> Vec<i32> {
        let pid = format!("\0{}\0", self.child.id());
        let is_keeper = |arguments: &Vec<u8>| {
            let arguments = String::from_utf8_lossy(arguments);
            arguments.contains("keep-settings") && arguments.contains(&pid)
        };
        fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter(|entry| fs::read(entry.path().join("cmdline")).is_ok_and(|a| is_keeper(&a)))
            .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
            .collect()
    }

    /// Ends it and its keeper at once: nobody is left to put the pages back.
    fn kill_all(self) {
        let keepers = self.keepers();
        assert_eq!(keepers.len(), 1, "one keeper waits for {}", self.child.id());
        kill(keepers[0], libc::SIGKILL);
        wait_until("the keeper ends", || has_ended(keepers[0]));
        self.signal(libc::SIGKILL);
        self.end();
    }
}

/// Whether a keeper has ended. Init waits for it, or nobody does, and a zombie is left.
fn has_ended(keeper: i32) -> bool {
    let memory = fs::read_to_string(format!("/proc/{keeper}/statm"));
    memory.is_ok_and(|text| text.starts_with("0 "))
        || !fs::exists(format!("/proc/{keeper}")).unwrap()
}

fn kill(process: i32, signal: i32) {
    // SAFETY: the call takes numbers only, and the process has not been waited for.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The next command, whatever it is.
fn next_command() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_pageleap")).arg("topology").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    String::from_utf8(output.stderr).unwrap()
}

/// The signals whose default action is to end a process (signal(7)), but for SIGKILL, those of
/// faults, and SIGPIPE, which programs in Rust ignore. The command has such a list, too; this one is
/// written from the manual, because a test must not take the command's word.
fn ending_signals() -> impl Iterator<Item = i32> {
    let named = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGTERM,
        libc::SIGSTKFLT,
        libc::SIGXCPU,
        libc::SIGXFSZ,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGIO,
        libc::SIGPWR,
    ];
    named.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX())
}

#[test]
fn a_run_ends_in_order_after_every_signal_that_asks_for_the_end() {
    const TEST: &str = "a_run_ends_in_order_after_every_signal_that_asks_for_the_end";
    let _turn = turn();
    let before_test = Before::of();
    let before = before_test.0;
    for signal in [libc::SIGQUIT, libc::SIGRTMAX()] {
        let Some(run) = Run::start(TEST) else { return };
        assert_eq!(total(), before + run.added);
        // What is true of two signals is true of all that are caught.
        let status = fs::read_to_string(format!("/proc/{}/status", run.child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
        let others: Vec<i32> =
            ending_signals().filter(|signal| caught & 1 << (signal - 1) == 0).collect();
        run.signal(signal);
        let output = run.end();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(128 + signal), "{}: {text}", output.status);
        assert_eq!(total(), before, "signal {signal}");
        assert_eq!(others, [0; 0], "not caught");
    }
}

#[test]
fn the_keeper_puts_pages_back_after_a_fault_and_after_sigkill() {
    const TEST: &str = "the_keeper_puts_pages_back_after_a_fault_and_after_sigkill";
    let _turn = turn();
    let before_test = Before::of();
    let before = before_test.0;
    for signal in [libc::SIGKILL, libc::SIGABRT] {
        let Some(run) = Run::start(TEST) else { return };
        let note = run.note();
        run.signal(signal);
        let output = run.end();
        assert_eq!(output.status.signal(), Some(signal), "{}", output.status);
        wait_until("the keeper removes the note", || !fs::exists(&note).unwrap());
        assert_eq!(total(), before, "signal {signal}");
    }
}

#[test]
fn the_next_command_puts_back_what_nobody_else_could() {
    const TEST: &str = "the_next_command_puts_back_what_nobody_else_could";
    let _turn = turn();
    let before_test = Before::of();
    let before = before_test.0;
    let Some([first, second]) = Run::start_two(TEST) else { return };
    let added = [first.added, second.added];
    first.kill_all();
    assert_eq!(total(), before + added[0] + added[1], "somebody else has put them back");
    let told = next_command();
    assert!(told.starts_with("put back ") && told.contains(" huge pages of 2"), "{told}");
    assert_eq!(total(), before + added[1], "the second one still needs its pages");
    second.kill_all();
    // What somebody else has reserved meanwhile stays.
    fs::write(TOTAL, (total() + 3).to_string()).unwrap();
    next_command();
    assert_eq!(total(), before + 3);
    assert_eq!(next_command(), "");
}

#[test]
fn overlapping_runs_end_in_any_order() {
    const TEST: &str = "overlapping_runs_end_in_any_order";
    let _turn = turn();
    let before_test = Before::of();
    if is_root() {
        // Free pages are those of somebody else, and stay free.
        fs::write(TOTAL, (before_test.0 + 16).to_string()).unwrap();
    }
    let before = total();
    let end = |run: Run| assert_eq!(run.end().status.code(), Some(0));
    for first_ends_first in [true, false] {
        let Some([first, second]) = Run::start_two(TEST) else { return };
        let added = [first.added, second.added];
        assert!(added.iter().all(|pages| *pages > 0), "{added:?}");
        assert_eq!(total(), before + added[0] + added[1]);
        let (one, other, others) =
            if first_ends_first { (first, second, added[1]) } else { (second, first, added[0]) };
        end(one);
        assert_eq!(total(), before + others, "the other one still needs its pages");
        end(other);
        assert_eq!(total(), before);
    }
}
