//! Why a setting could not be borrowed. Nothing has changed then, except as the error says.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::user::{NoUser, User};

/// Why a setting could not be borrowed or given back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is no setting of the whole machine; nothing was attempted.
    #[error(
        "{file} is no setting that can be borrowed: {reason}; name a setting of the whole machine, \
         below /sys or /proc/sys"
    )]
    NoSetting {
        /// As the wish names it.
        file: PathBuf,
        /// Why it cannot be borrowed.
        reason: String,
    },
    /// A living process needs another value.
    #[error(
        "{file} cannot become {wanted}: {} needs {value}; wait for the end of that process, or \
         type: pageleap restore --force", named(.users)
    )]
    Conflict {
        /// The setting.
        file: String,
        /// The value that was asked for.
        wanted: String,
        /// The value that the other processes need.
        value: String,
        /// They live, or belong to a container in which this cannot be told.
        users: Vec<User>,
    },
    /// A call on the file of a setting failed.
    #[error("{call} {file}: {reason}; {}{}", remedy(.reason), not_undone(.left))]
    Setting {
        /// The call, such as `write`.
        call: &'static str,
        /// The setting.
        file: String,
        /// The kernel's error.
        reason: io::Error,
        /// Earlier wishes of the same call that could not be undone. They stay noted, so they are
        /// put back later.
        left: Vec<String>,
    },
    /// The kernel took the value and made another one of it.
    #[error("{file} becomes {kept} when {value} is written: ask for a value that stays{}", not_undone(.left))]
    NotKept {
        /// The setting.
        file: String,
        /// The value that was written.
        value: String,
        /// The value that the file had afterwards.
        kept: String,
        /// As in [`Error::Setting`].
        left: Vec<String>,
    },
    /// A call on the ledger failed, without which a setting would not come back.
    #[error(
        "{call} {}: {reason}; settings of the machine are changed only if they can be noted there \
         first: run as root, with a /run that can be written", path.display()
    )]
    Ledger {
        /// The call.
        call: &'static str,
        /// The file or folder of the ledger.
        path: PathBuf,
        /// The kernel's error.
        reason: io::Error,
    },
    /// Another process held the lock of the ledger for the whole time. It does so for milliseconds
    /// as a rule.
    #[error(
        "{}: {holder} has held this lock for {} s: if that process is stopped, continue it \
         (kill -CONT); if it is stuck, end it", path.display(), limit.as_secs()
    )]
    Busy {
        /// The file of the lock.
        path: PathBuf,
        /// How long this process has waited.
        limit: Duration,
        /// The process that holds it, if `/proc/locks` tells.
        holder: String,
    },
    /// A note of the ledger cannot be read, so the value before is not known.
    #[error(
        "the note {} makes no sense ({reason}): the setting may still have a borrowed value; set it \
         by hand, then type: pageleap restore --force", path.display()
    )]
    Damaged {
        /// The note.
        path: PathBuf,
        /// Why it makes no sense.
        reason: String,
    },
    /// The process that puts settings back could not be started.
    #[error("cannot start a second process, which puts settings back if this one is killed: {0}")]
    Keeper(io::Error),
    /// The user of the setting is no process that can be followed.
    #[error(transparent)]
    User(#[from] NoUser),
    /// Huge pages could not be reserved or taken back.
    #[error(transparent)]
    HugePages(#[from] pageleap::Error),
}

impl Error {
    /// Whether the request was wrong, or at odds with another process: nothing was attempted.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::NoSetting { .. } | Error::Conflict { .. } => true,
            Error::HugePages(error) => error.is_usage(),
            _ => false,
        }
    }

    /// Adds settings that could not be undone.
    pub(crate) fn with_left(mut self, settings: Vec<String>) -> Error {
        if let Error::Setting { left, .. } | Error::NotKept { left, .. } = &mut self {
            *left = settings;
        }
        self
    }
}

fn named(users: &[User]) -> String {
    users.iter().map(User::to_string).collect::<Vec<_>>().join(" and ")
}

fn not_undone(settings: &[String]) -> String {
    match settings {
        [] => String::new(),
        left => format!("; {} could not be undone yet: type pageleap restore", left.join(" and ")),
    }
}

fn remedy(reason: &io::Error) -> &'static str {
    match reason.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "run as root, on the host or in a privileged container; some settings cannot be written \
             at all"
        }
        Some(libc::EROFS) => {
            "it is mounted read-only here, as in most containers: set it on the host, or start the \
             container privileged"
        }
        Some(libc::ENOENT) => "this kernel has no such setting, or it is not mounted here",
        Some(libc::EINVAL) => "the kernel knows no such value: read the file for those it has",
        _ => "set it by hand",
    }
}
