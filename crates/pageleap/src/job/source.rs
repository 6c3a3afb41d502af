//! Whose pages a job moves.

use std::fmt;

use crate::units::RegionId;

/// Whose pages a job moves. Ranges in reports are bytes of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Source {
    /// Memory of a region: bytes from its start.
    Region(RegionId),
    /// Memory of a process, by its number: addresses.
    Process(u32),
}

impl Source {
    /// The region, if it is one.
    pub fn region(self) -> Option<RegionId> {
        match self {
            Source::Region(id) => Some(id),
            Source::Process(_) => None,
        }
    }

    /// What kind of source it is, as JSON and the command line call it.
    pub fn kind(self) -> &'static str {
        match self {
            Source::Region(_) => "region",
            Source::Process(_) => "process",
        }
    }

    /// Which one of its kind.
    pub fn id(self) -> u64 {
        match self {
            Source::Region(id) => id.0,
            Source::Process(pid) => pid.into(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.id())
    }
}
