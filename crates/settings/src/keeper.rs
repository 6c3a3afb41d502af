//! The keeper: a process of its own that waits for the end of a user.
//!
//! It is no child of the user. The user may execute a program that waits for all of its children,
//! and that would then find one that it has never started. So the keeper's parent, a fork of the
//! user, ends at once, and the keeper goes to init.
//!
//! It leads a session of its own: neither Ctrl-C nor the end of a terminal reaches it. It has
//! nothing of the user: standard streams lead to `/dev/null`, it works in `/`, and all other
//! descriptors are closed, also those that the user has inherited and leaves to its program. Whoever
//! reads a pipe of theirs sees the end of the program, not that of the keeper.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::user::User;

/// Signals that are sent to all processes of a service at its end. The keeper has to stay until the
/// user has ended.
const STAYS: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// How a keeper is started. The program calls [`Ledger::keep`](crate::Ledger::keep) with the pid
/// and the start time that follow these arguments.
#[derive(Clone, Debug)]
pub struct Keeper {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Keeper {
    /// This program with these arguments.
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Keeper {
        Keeper { program, arguments }
    }

    /// Starts a keeper for this user, and returns when it runs.
    pub(crate) fn start(&self, user: &User) -> Result<(), Error> {
        let mut keeper = Command::new(&self.program);
        keeper.args(&self.arguments);
        keeper.args([user.pid().to_string(), user.started().to_string()]).current_dir("/");
        keeper.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let highest = highest_descriptor();
        let leave = move || leave_parent().inspect(|()| close_at_exec(highest));
        // SAFETY: the closure only makes system calls, and neither allocates nor locks.
        unsafe { keeper.pre_exec(leave) };
        let mut parent = keeper.spawn().map_err(Error::Keeper)?;
        // Where SIGCHLD is ignored, the kernel has reaped it already.
        let _ = parent.wait();
        Ok(())
    }
}

/// Goes on in a child with a session of its own. The calling process ends.
fn leave_parent() -> io::Result<()> {
    // The system call instead of `fork(3)`, which runs the handlers of all libraries.
    // SAFETY: without flags beside the signal, the child has a copy of all memory, so it goes on
    // here, on its own copy of the stack. It makes only system calls before `execve`.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        // SAFETY: the call takes no arguments.
        0 if unsafe { libc::setsid() } >= 0 => Ok(()),
        child if child > 0 => {
            // SAFETY: ends this process without running anything of the program.
            unsafe { libc::_exit(0) }
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first descriptor that is no standard stream.
const FIRST: libc::c_int = 3;

/// The highest descriptor that is open. Those that another thread opens afterwards are
/// close-on-exec, as all of the standard library.
fn highest_descriptor() -> libc::c_int {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).max().unwrap_or(FIRST)
}

/// Lets `execve` close all descriptors but the standard streams. The one by which the standard
/// library reports a failed `execve` has to stay open until then.
fn close_at_exec(highest: libc::c_int) {
    let last = libc::c_uint::MAX;
    // SAFETY: the call takes numbers, and closes nothing by itself.
    let all =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, last, libc::CLOSE_RANGE_CLOEXEC) };
    if all == 0 {
        return;
    }
    // Before Linux 5.11, or refused by a seccomp filter.
    for descriptor in FIRST..=highest {
        // SAFETY: the call takes numbers. A descriptor that is not open is an error without effect.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Waits for the end of the user, in the keeper.
pub(crate) fn wait_for_end(user: &User) {
    for signal in STAYS {
        // SAFETY: the call sets no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    user.wait_for_end();
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_highest_descriptor_counts_all() {
        let file = fs::File::open("/proc/self/stat").unwrap();
        assert!(highest_descriptor() >= file.as_raw_fd());
    }
}
