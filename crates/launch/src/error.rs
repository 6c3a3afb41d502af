//! Why a program was not started.

use std::ffi::OsString;

use pageleap::topology::escaped;
use pageleap_sys::Errno;

/// Why a program was not started. Nothing is left changed, except in the calling thread.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refuses a setting, and nothing stands in for it, or nothing may.
    #[error("{call}: {errno}: {reason}; {remedy}")]
    Refused {
        /// The system call with its arguments in words.
        call: String,
        /// The kernel's error.
        errno: Errno,
        /// The likely reason.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// The kernel has dropped nodes or CPUs of a request, and a part is not enough.
    #[error("{dropped}; name others, or let the rest do (without --no-fallback)")]
    Dropped {
        /// A sentence that names them, with the reason.
        dropped: String,
    },
    /// Two parts of a request exclude each other.
    #[error("{reason}; {remedy}")]
    Conflict {
        /// Why.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// The node of a device is not known.
    #[error("{text}: {reason}; {remedy}")]
    Device {
        /// The text of the request, with control characters escaped.
        text: String,
        /// Why.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// There is no such program.
    #[error("{}: there is no such program{whither}", escaped(&.program.to_string_lossy()))]
    NotFound {
        /// The name or the path.
        program: OsString,
        /// Where it was looked for, as the end of a sentence.
        whither: &'static str,
    },
    /// There is such a program, but it cannot be executed.
    #[error("{}: cannot be executed: {reason}", escaped(&.program.to_string_lossy()))]
    NotExecutable {
        /// The name or the path.
        program: OsString,
        /// Why.
        reason: String,
    },
    /// A process for the program could not be made, or not be waited for.
    #[error("{call}: {errno}; {remedy}")]
    Process {
        /// The system call.
        call: &'static str,
        /// The kernel's error.
        errno: Errno,
        /// How to fix it.
        remedy: &'static str,
    },
    /// No folder can have the file of the library that places threads.
    #[error(
        "the library that places threads cannot be written: {reasons}; make one of these folders \
         yours (mode 700), on a file system without noexec"
    )]
    Library {
        /// The folders, each with its reason.
        reasons: String,
    },
}

impl Error {
    /// The exit code by which commands that start another one report this: 127 and 126 as in a
    /// shell (POSIX, Shell Command Language 2.8.2), and 125 as in env(1), nice(1) and timeout(1) if
    /// the launcher itself has failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::NotFound { .. } => 127,
            Error::NotExecutable { .. } => 126,
            _ => 125,
        }
    }
}
