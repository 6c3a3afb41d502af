//! What the tests of several commands need.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs pageleap, interrupts it as Ctrl-C does when it has run for some time, and returns what
/// became of it.
pub fn interrupted(arguments: &[&str], after: Duration) -> Output {
    interrupted_when(arguments, |_| std::thread::sleep(after))
}

/// The same, as soon as `wait` returns. The child catches the signal by then, or has ended.
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
    let child =
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_handler(&child);
    wait(&child);
    // SAFETY: kill takes no pointers; the child has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    child.wait_with_output().unwrap()
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
