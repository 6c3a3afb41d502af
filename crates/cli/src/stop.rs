//! The ways in which a command ends without success. Each has an exit code.

use std::fmt;

/// Why a command ended without success.
#[derive(Debug)]
pub enum Stop {
    /// The request makes no sense, or not on this machine; nothing was done.
    Refused(anyhow::Error),
    /// Something failed, or a check found a mismatch.
    Failed(anyhow::Error),
    /// A signal asked for the end. The work until then was checked.
    Interrupted {
        /// The number of the signal.
        signal: i32,
        /// A sentence on the work and its results until then.
        found: String,
    },
}

impl From<pageleap::Error> for Stop {
    fn from(error: pageleap::Error) -> Stop {
        if error.is_usage() { Stop::Refused(error.into()) } else { Stop::Failed(error.into()) }
    }
}

impl From<pageleap_measure::Error> for Stop {
    fn from(error: pageleap_measure::Error) -> Stop {
        match error {
            pageleap_measure::Error::Leap(error) => error.into(),
            other => Stop::Failed(other.into()),
        }
    }
}

impl From<pageleap_settings::Error> for Stop {
    fn from(error: pageleap_settings::Error) -> Stop {
        if error.is_usage() { Stop::Refused(error.into()) } else { Stop::Failed(error.into()) }
    }
}

/// Why a command refuses to start.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal(String);

impl Refusal {
    /// A refusal for this reason.
    pub fn new(reason: String) -> Refusal {
        Refusal(reason)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Stop {
        Stop::Refused(refusal.into())
    }
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Stop {
        Stop::Failed(error)
    }
}
