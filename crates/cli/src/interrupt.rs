//! Ctrl-C and all other signals that would end the process: the handler only notes them, and the
//! run ends by itself. Ending the process at once would leave huge pages reserved.
//!
//! Signals of faults (SIGSEGV, SIGABRT and the like) end it at once, as SIGKILL does, because a
//! thread that has failed cannot end the run. The keeper of [`pageleap_settings`] puts pages back then.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::stop::Stop;

/// The signal that arrived first, or 0.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// The signals whose default action ends the process and that are raised by no fault of it
/// (signal(7)). The real-time signals belong to them, too.
const ENDING: [i32; 15] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
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

/// From now on, the handler only notes the first signal that would end the process. A second signal
/// of the same kind ends it. An ignored signal stays ignored, such as SIGHUP under `nohup`.
pub fn install() {
    let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
    for signal in ENDING.into_iter().chain(real_time) {
        // SAFETY: a zeroed sigaction is valid (no flags, empty mask). `note` only updates an
        // atomic, which a signal handler may do. The call touches no memory beyond the structure.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            action = std::mem::zeroed();
            action.sa_sigaction = note as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
            // The kernel repeats SIGXCPU every second, until a second limit ends the process.
            if signal != libc::SIGXCPU {
                action.sa_flags |= libc::SA_RESETHAND;
            }
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

extern "C" fn note(signal: libc::c_int) {
    // The first signal determines the exit code.
    let _ = RECEIVED.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
}

/// The signal that asked the run to end, if one has arrived.
pub fn received() -> Option<i32> {
    match RECEIVED.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(signal),
    }
}

/// Ends the run if a signal has arrived. `found` makes the sentence on the work until then.
pub fn stop_if_received(found: impl FnOnce() -> String) -> Result<(), Stop> {
    received().map_or(Ok(()), |signal| Err(Stop::Interrupted { signal, found: found() }))
}
