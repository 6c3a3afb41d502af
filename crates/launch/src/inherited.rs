//! What the process was started with, and Rust's runtime has changed since.
//!
//! The runtime ignores SIGPIPE before `main`, and `execve(2)` keeps ignored signals. A program
//! started so would go on after its reader has gone, instead of ending. To give back the default
//! would be as wrong: systemd starts services with SIGPIPE ignored, and they count on it. So the
//! value is read before the runtime changes it.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored when the process was started.
static IGNORED_SIGPIPE: AtomicBool = AtomicBool::new(false);

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
}

/// Handles SIGPIPE as the process was told to when it was started.
pub(crate) fn give_back_sigpipe() {
    let ignored = IGNORED_SIGPIPE.load(Ordering::Relaxed);
    // SAFETY: neither of the two is a function.
    unsafe { libc::signal(libc::SIGPIPE, if ignored { libc::SIG_IGN } else { libc::SIG_DFL }) };
}
