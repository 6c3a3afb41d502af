//! Interrupts pageleap as Ctrl-C does, for the tests of several commands.

#![allow(dead_code)] // each test binary uses a part of it

mod pipe;

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use pipe::full_pipe;

/// Runs pageleap, interrupts it as Ctrl-C does when it has run for some time, and returns its output.
pub fn interrupted(arguments: &[&str], after: Duration) -> Output {
    interrupted_when(arguments, |_| std::thread::sleep(after))
}

/// The same, as soon as `wait` returns. The child catches the signal by then, and cannot have ended
/// with a result: what it prints finds no room before it has got the signal.
pub fn interrupted_when(arguments: &[&str], wait: impl FnOnce(&Child)) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    // A shell starts what runs in its background with SIGINT ignored, and the command keeps to
    // that. SAFETY: between fork and exec, one system call that sets no handler.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    };
    let (mut printed, full) = full_pipe();
    let child = command.args(arguments).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    // With it the parent's end of the pipe that children write to.
    drop(command);
    wait_for_handler(&child);
    wait(&child);
    // SAFETY: kill takes no pointers; the child has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let reader = std::thread::spawn(move || printed.read_to_end(&mut Vec::new()));
    let output = child.wait_with_output().unwrap();
    reader.join().unwrap().unwrap();
    output
}

/// A process that is not ready for the signal yet dies of it, as any does.
fn wait_for_handler(child: &Child) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let catches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught =
            status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&caught, 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
    };
    while !catches() {
        assert!(Instant::now() < deadline, "it does not catch SIGINT");
        std::thread::sleep(Duration::from_millis(5));
    }
}
