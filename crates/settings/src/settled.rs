//! How loans of settings have ended, as values for a caller to print.

use std::fmt;

use serde::Serialize;

use crate::user::User;

/// A setting whose users have ended, and the outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Settled {
    /// The file, or `huge pages of 2m on node 0`.
    pub setting: String,
    /// Whether the setting was put back, or why not.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// The processes that had borrowed it.
    pub users: Vec<User>,
}

/// How the loan of a setting has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// It has the value from before again.
    PutBack {
        /// The borrowed value.
        from: String,
        /// The value before.
        to: String,
    },
    /// Huge pages were taken back.
    PagesPutBack {
        /// How many.
        pages: u64,
    },
    /// Somebody has written another value since, which stays.
    ChangedSince {
        /// The value now.
        now: String,
        /// The borrowed value.
        set: String,
        /// The value before.
        before: String,
    },
    /// It could not be put back, and stays noted.
    Stays {
        /// The error.
        why: String,
    },
    /// A note that made no sense was removed on demand.
    NoteRemoved {
        /// Why it made no sense.
        why: String,
    },
}

impl Settled {
    /// Whether it needs nobody any more.
    pub fn is_settled(&self) -> bool {
        !matches!(self.outcome, Outcome::Stays { .. })
    }
}

/// A sentence.
impl fmt::Display for Settled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (setting, users) = (&self.setting, names(&self.users));
        match &self.outcome {
            Outcome::PutBack { from, to } => {
                write!(f, "put back {setting}: {to}, which {users} had set to {from}")
            }
            Outcome::PagesPutBack { pages } => {
                write!(f, "put back {pages} {setting}, which {users} had left reserved")
            }
            Outcome::ChangedSince { now, set, before } => write!(
                f,
                "left {setting} as it is: {now}, which somebody has written since {users} had set it \
                 to {set} (before: {before})"
            ),
            Outcome::Stays { why } => {
                write!(f, "{setting} could not be put back, which {users} had changed: {why}")
            }
            Outcome::NoteRemoved { why } => write!(f, "removed the note {setting}: {why}"),
        }
    }
}

fn names(users: &[User]) -> String {
    match users {
        [] => "a process".into(),
        users => users.iter().map(User::to_string).collect::<Vec<_>>().join(" and "),
    }
}
