//! Becoming another program, and looking at one that is a child.

use std::ffi::{CStr, CString};

use crate::errno::{Errno, check};

/// Becomes the program in the file `path` (`execve(2)`): the process keeps its number, memory
/// policy, affinity, signal mask, ignored signals and open files without close-on-exec. Returns only
/// if that fails.
///
/// `arguments` begin with the name by which the program was called. Entries of `environment` are
/// `NAME=value`.
///
/// # Errors
/// ENOENT: there is no such file, or its interpreter does not exist. EACCES: it cannot be executed.
/// ENOEXEC: it has no known format; shells run such a file as a script. E2BIG: arguments and
/// environment are too long.
pub fn exec(path: &CStr, arguments: &[CString], environment: &[CString]) -> Errno {
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both lists end with a null pointer, and their strings outlive the call.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    Errno::last()
}

/// Makes a copy of this process (`fork(2)`). Returns the number of the copy, and in the copy `None`.
///
/// # Errors
/// EAGAIN: no process can be made, because of `pids.max` or `ulimit -u`. ENOMEM: no memory for a
/// process.
///
/// # Safety
/// The process has one thread: in the copy of a process with several, locks that other threads held
/// stay locked.
pub unsafe fn fork() -> Result<Option<i32>, Errno> {
    // SAFETY: forwarded to the caller.
    let pid = check(unsafe { libc::fork() }.into())? as i32;
    Ok((pid != 0).then_some(pid))
}

/// How a child has changed, as its parent sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildState {
    /// It has returned this status.
    Exited(i32),
    /// This signal has ended it.
    Killed(i32),
    /// This signal has stopped it, and it may go on.
    Stopped(i32),
    /// SIGCONT has continued it.
    Continued,
}

/// Asks whether a child has ended, stopped or gone on since the last call (`waitpid(2)` with WNOHANG,
/// WUNTRACED and WCONTINUED), and does not wait. Of several changes the kernel tells the last one. It
/// forgets a child whose end it has told.
///
/// # Errors
/// ECHILD: there is no such child, or this process ignores SIGCHLD and so has none to wait for.
pub fn poll_child(child: i32) -> Result<Option<ChildState>, Errno> {
    let mut status = 0;
    let flags = libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED;
    // SAFETY: the call writes one number.
    if check(unsafe { libc::waitpid(child, &mut status, flags) }.into())? == 0 {
        return Ok(None);
    }
    Ok(Some(if libc::WIFSTOPPED(status) {
        ChildState::Stopped(libc::WSTOPSIG(status))
    } else if libc::WIFCONTINUED(status) {
        ChildState::Continued
    } else if libc::WIFSIGNALED(status) {
        ChildState::Killed(libc::WTERMSIG(status))
    } else {
        ChildState::Exited(libc::WEXITSTATUS(status))
    }))
}
