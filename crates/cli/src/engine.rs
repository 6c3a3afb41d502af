//! The value of `--engine`, for regions and for memory that no pool owns.

use std::fmt;

use pageleap::{Engine, EngineChoice, MemoryEngine};

/// An engine that is asked for by name, or the library's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The library chooses.
    Auto,
    /// For memory of a region.
    Region(Engine),
    /// For memory that no pool owns.
    Memory(MemoryEngine),
}

impl Asked {
    /// All values for a region.
    pub fn of_region() -> impl Iterator<Item = Asked> {
        EngineChoice::ALL.into_iter().map(Asked::from)
    }

    /// All values for memory that no pool owns.
    pub fn of_memory() -> impl Iterator<Item = Asked> {
        [Asked::Auto].into_iter().chain(MemoryEngine::ALL.map(Asked::Memory))
    }

    /// Parses the name of an engine of either kind.
    pub fn named(text: &str) -> Result<Asked, String> {
        let of_memory = Asked::of_memory().find(|asked| asked.to_string() == text);
        let of_region = || text.parse().map(EngineChoice::into);
        of_memory.map_or_else(of_region, Ok).map_err(|error: pageleap::Error| error.to_string())
    }

    /// The choice for a region; `None` if this engine does not move regions.
    pub fn for_region(self) -> Option<EngineChoice> {
        match self {
            Asked::Auto => Some(EngineChoice::Auto),
            Asked::Region(engine) => Some(engine.into()),
            Asked::Memory(_) => None,
        }
    }

    /// Whether pages that are on the right node already stay there, so that on a machine with one
    /// node nothing moves.
    pub fn moves_to_other_nodes_only(self) -> bool {
        match self {
            Asked::Memory(MemoryEngine::Kernel) => true,
            Asked::Memory(MemoryEngine::UffdMove) | Asked::Region(_) | Asked::Auto => false,
        }
    }

    /// The engine for memory that no pool owns, if one is asked for.
    pub fn memory_engine(self) -> Option<MemoryEngine> {
        match self {
            Asked::Memory(engine) => Some(engine),
            Asked::Auto | Asked::Region(_) => None,
        }
    }
}

impl From<EngineChoice> for Asked {
    fn from(choice: EngineChoice) -> Asked {
        choice.forced().map_or(Asked::Auto, Asked::Region)
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::Auto => EngineChoice::Auto.fmt(f),
            Asked::Region(engine) => engine.fmt(f),
            Asked::Memory(engine) => engine.fmt(f),
        }
    }
}

/// The names, separated by commas.
pub fn names(asked: impl IntoIterator<Item = Asked>) -> String {
    asked.into_iter().map(|asked| asked.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_of_one_kind() {
        for asked in Asked::of_region().chain(Asked::of_memory()) {
            assert_eq!(Asked::named(&asked.to_string()), Ok(asked));
            let kinds = (asked.for_region().is_some(), asked.memory_engine().is_some());
            assert!(kinds.0 != kinds.1, "{asked}");
        }
        assert!(Asked::named("fast").unwrap_err().contains("fast"));
    }
}
