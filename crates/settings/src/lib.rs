//! Settings of the whole machine that a process borrows: sysctls, files of sysfs, and reserved huge
//! pages. They come back however the process ends.
//!
//! All commands that change such a setting do so through a [`Ledger`]. The *ledger* is a folder
//! below `/run` with a lock and a note about each borrowed setting. A setting is noted before it is
//! changed, so whoever reads the note knows what to put back. Three processes may do that, each
//! under the lock:
//!
//! 1. The process that has borrowed it, when it drops [`Borrowed`] or [`BorrowedPages`].
//! 2. The *keeper*, a process of its own for each [`Ledger::borrow`]: it waits for the end of the
//!    user, and puts back all that ended processes have left.
//! 3. The next command, if user and keeper were killed ([`Ledger::settle`]), or a person by
//!    `pageleap restore`.
//!
//! # The protocol of a value
//!
//! A note has the value *before*, the *borrowed* value, and the users. A user is a pid with its
//! start time and pid namespace ([`User`]); it may execute another program, which inherits nothing.
//!
//! ```text
//!              borrow: note, then write           another user, same wish
//!   not noted ─────────────────────────▶ borrowed ──────────────────────▶ one user more
//!       ▲                                   │  ▲                                │
//!       │  last user ended: write, then     │  └── a user ended: drop it ◀──────┘
//!       └────── remove the note ────────────┘
//! ```
//!
//! A note is written whole under another name, synchronised and renamed, so that it is never seen
//! in part. No note says whether its setting has been changed yet, because the setting says it:
//!
//! | the setting has | that is so after | at the end of the last user |
//! |---|---|---|
//! | the value before | a crash between note and change, or between putting back and removing the note | the note is removed |
//! | the borrowed value | the change, also if a crash followed | the value before is written, then the note is removed |
//! | a third value | somebody else has written it | it stays, and is reported |
//!
//! Someone who writes the borrowed value itself, during the loan, cannot be told apart from the
//! ledger: the value before is put back. If a user joins after a third value was written, that value
//! becomes the value before, because others want it when nobody borrows.
//!
//! Another wish for a borrowed setting is refused as long as one of its users lives. Several wishes
//! of one call are fulfilled all or none: all are checked before the first note is written, and if a
//! change fails after all, the ones before it are undone. A crash in between leaves notes of an
//! ended user, as at any other time.
//!
//! Notes of another boot are removed: their settings were reset. A damaged note is left alone, its
//! setting cannot be borrowed, and `pageleap restore --force` removes it.
//!
//! # Two kinds of notes
//!
//! Huge pages are numbers to which several processes add, so their notes say how many each has
//! added, and a setting has as many notes as it has users. Values exclude each other, so a setting
//! has one note with all users. In one format, each kind would have fields that mean nothing to the
//! other. Folder, lock, keeper and commands are the same.
//!
//! # Limits
//!
//! * Containers with a `/run` of their own have a ledger of their own. Conflicts with the host's
//!   ledger are not seen, and values are put back in the order of the ends.
//! * When a container ends, its processes are killed, keepers too. Without a shared `/run`, nobody
//!   knows what to put back. A user that is the container's first process is refused.
//! * Settings that change each other (`vm.dirty_ratio` and `vm.dirty_bytes`) may refuse the value
//!   before. They stay noted until somebody sets them by hand.
//! * A user in a pid namespace that cannot be seen from here counts as living.
//! * Start times are those that `/proc` shows: users, keepers and commands share a time namespace.
//! * Settings that each namespace has for itself, such as `/proc/sys/net`, are refused.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![cfg(target_os = "linux")]

mod error;
mod folder;
mod huge_pages;
mod keeper;
mod ledger;
mod setting;
mod settled;
#[cfg(test)]
mod sleeper;
mod user;
mod values;

pub use error::Error;
pub use huge_pages::BorrowedPages;
pub use keeper::Keeper;
pub use ledger::{Borrowed, Entry, Ledger, Listed, UserEntry};
pub use settled::{Outcome, Settled};
pub use user::{Life, NoUser, User, is_in_first_pid_namespace};
pub use values::Wish;
