//! A program gets SIGPIPE and closed standard files as this process was started with them, although
//! Rust's runtime changes both before `main`:
//!
//! * **SIGPIPE.** The runtime ignores it, and `execve(2)` keeps ignored signals. A program started so
//!   would go on after its reader has gone, instead of ending. To give back the default would be as
//!   wrong: systemd starts services with SIGPIPE ignored, and they count on it.
//! * **Closed files.** The runtime opens /dev/null for standard input, output and error that are
//!   closed. A program started so would not notice that nobody gets its output.
//!
//! So both are read before the runtime changes them.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored when the process was started.
static IGNORED_SIGPIPE: AtomicBool = AtomicBool::new(false);
/// Whether standard input, output and error were closed.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// The loader calls functions of this section before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    // SAFETY: zeros are a valid `sigaction`, and the call writes one.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action);
        action
    };
    IGNORED_SIGPIPE.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    for (number, closed) in (0..).zip(&CLOSED) {
        // SAFETY: the call only asks about a number.
        closed.store(unsafe { libc::fcntl(number, libc::F_GETFD) } < 0, Ordering::Relaxed);
    }
}

/// Gives SIGPIPE and standard files the state that they had when the process was started. Standard
/// error stays open until the program starts, for the message if it does not start.
pub(crate) fn give_back() {
    let ignored = IGNORED_SIGPIPE.load(Ordering::Relaxed);
    // SAFETY: neither of the two is a function.
    unsafe { libc::signal(libc::SIGPIPE, if ignored { libc::SIG_IGN } else { libc::SIG_DFL }) };
    for (number, closed) in (0..).zip(&CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // SAFETY: the runtime has opened the file, which the caller of this process wanted to be
            // closed. The execve(2) that follows closes it.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}
