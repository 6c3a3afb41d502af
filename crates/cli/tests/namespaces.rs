//! Runs `pageleap status` and `pageleap move` in namespaces of their own.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/two_threads.rs"]
mod two_threads;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use common::{is_root, skip};
use two_threads::TwoThreads;

/// The command. By its descriptor, users can execute it who may not reach its directory.
fn pageleap(arguments: &[&str]) -> Command {
    let program = Box::leak(Box::new(File::open(env!("CARGO_BIN_EXE_pageleap")).unwrap()));
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.args(arguments);
    command
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks the exit code, and shows what was printed if it is another one.
#[track_caller]
fn check_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}{}", stdout(output), stderr(output));
}

/// A namespace of process numbers for a command, in which it is the second process.
#[derive(Clone, Copy)]
enum Namespace {
    /// With the `/proc` of the machine.
    WithoutProc,
    /// The same, and the command has the same number in both namespaces.
    Twin,
}

impl Namespace {
    /// Runs a command in it. `None`: this machine makes no such namespace.
    fn run(self, mut command: Command, test: &str) -> Option<Output> {
        // SAFETY: the function makes system calls only.
        unsafe { command.pre_exec(move || self.enter()) };
        match command.output() {
            Ok(output) => Some(output),
            Err(error) => {
                skip(test, &format!("no namespace can be made here: {error}"));
                None
            }
        }
    }

    /// Becomes a process of a new namespace. The processes between it and the caller wait for it,
    /// and end as it does.
    fn enter(self) -> io::Result<()> {
        // SAFETY: it takes no pointers.
        checked(unsafe { libc::unshare(libc::CLONE_NEWPID) }.into())?;
        // SAFETY: the child makes system calls only.
        wait_for(unsafe { libc::fork() }.into())?;
        match self {
            Namespace::Twin => wait_for(twin()),
            // SAFETY: as above.
            Namespace::WithoutProc => wait_for(unsafe { libc::fork() }.into()),
        }
    }
}

/// Forks a child that has the same number in this pid namespace and in the one above.
fn twin() -> libc::c_long {
    let mut made = -1;
    for number in (20_000..30_000 as libc::pid_t).rev() {
        let numbers = [number; 2];
        // SAFETY: integers, for which zeros are valid.
        let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
        how.exit_signal = libc::SIGCHLD as u64;
        how.set_tid = numbers.as_ptr() as u64;
        how.set_tid_size = numbers.len() as u64;
        // SAFETY: without a stack this is a fork.
        made = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of_val(&how)) };
        if made >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EEXIST) {
            break;
        }
    }
    made
}

/// In the parent, waits for the child and ends as it does. In the child, returns.
fn wait_for(forked: libc::c_long) -> io::Result<()> {
    let child = checked(forked)?;
    if child == 0 {
        return Ok(());
    }
    let mut status = 0;
    // SAFETY: the parent closes what the child's caller waits for, waits, and ends.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        libc::waitpid(child as i32, &mut status, 0);
        let code = libc::WEXITSTATUS(status);
        libc::_exit(if libc::WIFEXITED(status) { code } else { 128 + libc::WTERMSIG(status) })
    }
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Numbers of the `/proc` of another namespace are not those that the kernel takes.
#[test]
fn a_proc_of_another_namespace_names_nobody() {
    const NAME: &str = "a_proc_of_another_namespace_names_nobody";
    if !is_root() {
        return skip(NAME, &"only root makes namespaces on any machine");
    }
    let name = format!("plo-{}", std::process::id());
    let processes = [(); 2].map(|()| TwoThreads::start(&name));
    let pid = processes[0].pid.to_string();
    for namespace in [Namespace::WithoutProc, Namespace::Twin] {
        let run = |arguments: &[&str]| namespace.run(pageleap(arguments), NAME);
        let Some(shown) = run(&["status", &pid]) else { return };
        check_code(&shown, 0);
        let text = stdout(&shown);
        assert!(text.contains("not told") && text.contains("2 MiB"), "{text}");
        assert!(text.contains("note: where single pages lie is not told: "), "{text}");
        assert!(text.contains("/proc is that of another pid namespace"), "{text}");
        for selected in [&[&*pid][..], &[&name, "--all"]] {
            let moved = run(&[&["move", "--to", "all"], selected].concat()).unwrap();
            check_code(&moved, 1);
            assert!(moved.stdout.is_empty(), "{}", stdout(&moved));
            let why = stderr(&moved);
            assert!(why.contains("/proc is that of another pid namespace"), "{why}");
        }
        // The command itself is known, whatever its number.
        let own = run(&["status", "self"]).unwrap();
        check_code(&own, 0);
        assert!(!stdout(&own).contains("not told"), "{}", stdout(&own));
    }
}
