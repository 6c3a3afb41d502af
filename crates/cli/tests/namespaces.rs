//! Runs `pageleap status` and `pageleap move` as another user, and in namespaces of their own.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/two_threads.rs"]
mod two_threads;

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::ptr;

use common::{is_root, skip};
use serde_json::Value;
use two_threads::TwoThreads;

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;
/// What `status` says where the kernel does not tell the nodes of pages that have one.
const UNTOLD: &str = "note: where single pages lie is not told: ";

/// The command. By its descriptor, users can execute it who may not reach its directory.
fn pageleap(arguments: &[&str]) -> Command {
    let program = Box::leak(Box::new(File::open(env!("CARGO_BIN_EXE_pageleap")).unwrap()));
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.args(arguments);
    command
}

fn as_nobody(arguments: &[&str]) -> Output {
    pageleap(arguments).uid(NOBODY).gid(NOBODY).output().expect("pageleap starts")
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

/// A shell of a user that waits for a line.
struct Shell(Child);

impl Shell {
    fn of(user: u32, name: &str) -> Shell {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "printf %s $0 > /proc/$$/comm; echo ready; read line", name]);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).uid(user).gid(user);
        let mut child = shell.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        // On its way to where it waits it may touch more.
        while !std::fs::read_to_string(format!("/proc/{}/stat", child.id()))
            .unwrap()
            .contains(") S ")
        {
            std::thread::yield_now();
        }
        Shell(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nobody_moves_what_is_its_own() {
    const NAME: &str = "nobody_moves_what_is_its_own";
    if !is_root() {
        return skip(NAME, &"only root can become another user");
    }
    let name = format!("pln-{}", std::process::id());
    let [own, of_root] = [NOBODY, 0].map(|user| Shell::of(user, &name));
    let shown = as_nobody(&["status", &own.pid()]);
    check_code(&shown, 0);
    assert!(stdout(&shown).contains("[stack]"), "{}", stdout(&shown));
    assert!(!stdout(&shown).contains(UNTOLD), "{}", stdout(&shown));
    let moved = as_nobody(&["move", &own.pid(), "--to", "all", "--json"]);
    check_code(&moved, 0);
    let moved: Value = serde_json::from_str(&stdout(&moved)).unwrap();
    assert_eq!(moved["ended"], "completed", "{moved}");
    let shared = as_nobody(&["move", &own.pid(), "--to", "all", "--shared"]);
    check_code(&shared, 1);
    assert!(stderr(&shared).contains("CAP_SYS_NICE"), "{}", stderr(&shared));
    // Of two processes, that of another user is left out, and the other one moves.
    for arguments in [&["status", &name][..], &["move", &name, "--to", "all", "--all"]] {
        let both = as_nobody(arguments);
        check_code(&both, 1);
        let (out, why) = (stdout(&both), stderr(&both));
        assert!(out.contains(&own.pid()) && !out.contains(&of_root.pid()), "{out}");
        let path = format!("/proc/{}/", of_root.pid());
        assert!(why.contains(&path) && why.contains("CAP_SYS_PTRACE"), "{why}");
        assert!(why.contains("processes that are left out: 1"), "{why}");
    }
}

/// A namespace of process numbers for a command, in which it is the second process.
#[derive(Clone, Copy)]
enum Namespace {
    /// With a user namespace, in which it is root, and with a `/proc` of its own.
    Container,
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
        let kinds = match self {
            Namespace::Container => libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID,
            Namespace::WithoutProc | Namespace::Twin => libc::CLONE_NEWPID,
        };
        // SAFETY: it takes no pointers.
        checked(unsafe { libc::unshare(kinds) }.into())?;
        if let Namespace::Container = self {
            std::fs::write("/proc/self/setgroups", "deny")?;
            std::fs::write("/proc/self/uid_map", "0 0 1")?;
            std::fs::write("/proc/self/gid_map", "0 0 1")?;
        }
        // SAFETY: the child makes system calls only.
        wait_for(unsafe { libc::fork() }.into())?;
        if let Namespace::Container = self {
            let (proc, flags) = (c"proc".as_ptr(), libc::MS_REC | libc::MS_PRIVATE);
            // SAFETY: strings that end with zero.
            unsafe {
                checked(
                    libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()).into(),
                )?;
                checked(libc::mount(proc, c"/proc".as_ptr(), proc, 0, ptr::null()).into())?;
            }
        }
        match self {
            Namespace::Twin => wait_for(twin()),
            // SAFETY: as above.
            _ => wait_for(unsafe { libc::fork() }.into()),
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

#[test]
fn a_container_moves_what_is_its_own() {
    const NAME: &str = "a_container_moves_what_is_its_own";
    if !is_root() {
        return skip(NAME, &"only root makes namespaces on any machine");
    }
    // The process is the shell that waits for the command. It is told apart from those outside by
    // its number, which is a small one here.
    let run = |what: &str| {
        let script = format!("{} {what}; exit $?", env!("CARGO_BIN_EXE_pageleap"));
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &script.replace("PID", "$$")]);
        Namespace::Container.run(shell, NAME)
    };
    let Some(shown) = run("status PID --json") else { return };
    check_code(&shown, 0);
    let shown: Value = serde_json::from_str(&stdout(&shown)).unwrap();
    let process = &shown["processes"][0];
    assert!(process["pid"].as_u64().unwrap() < 10, "{process}");
    assert!(process["resident_bytes"].as_u64().unwrap() > 0, "{process}");
    let text = run("status PID").unwrap();
    check_code(&text, 0);
    assert!(!stdout(&text).contains(UNTOLD), "{}", stdout(&text));
    let moved = run("move PID --to all --json").unwrap();
    check_code(&moved, 0);
    let moved: Value = serde_json::from_str(&stdout(&moved)).unwrap();
    assert_eq!(moved["ended"], "completed", "{moved}");
    // Root of a user namespace has CAP_SYS_NICE there, which does not count for the kernel.
    let shared = run("move PID --to all --shared").unwrap();
    check_code(&shared, 1);
    assert!(stderr(&shared).contains("CAP_SYS_NICE"), "{}", stderr(&shared));
    // The first process outside is another one here, and so are all others.
    let other = run(&format!("move {} --to all", std::process::id())).unwrap();
    check_code(&other, 2);
    assert!(stderr(&other).contains("there is no process"), "{}", stderr(&other));
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
        assert!(text.contains(UNTOLD) && text.contains("4 MiB"), "{text}");
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
        assert!(!stdout(&own).contains(UNTOLD), "{}", stdout(&own));
    }
}
