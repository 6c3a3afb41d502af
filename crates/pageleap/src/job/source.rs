//! The memory that a job moves: a region, or a process.

use std::fmt;

use crate::units::RegionId;

/// The memory whose pages a job moves. Ranges in reports are bytes of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Source {
    /// Memory of a region; ranges begin at its start.
    Region(RegionId),
    /// Memory of a process, given by its process id; ranges are addresses.
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

    /// The kind of source, as named in JSON and on the command line.
    pub fn kind(self) -> &'static str {
        match self {
            Source::Region(_) => "region",
            Source::Process(_) => "process",
        }
    }

    /// The number of the region, or the process id.
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
