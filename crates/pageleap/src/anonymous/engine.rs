//! Engines for memory that no pool owns.

use std::fmt;

use crate::kernel;
use crate::units::EngineName;

/// A method of moving memory that no pool owns: an option of
/// [`MemoryMigration`](crate::MemoryMigration), which moves memory of this process.
/// [`KernelMigration`](crate::KernelMigration), which also moves memory of other processes, has no
/// such option, because [`MemoryEngine::Kernel`] is the only method for them.
///
/// Reports name the method: `report.engine == MemoryEngine::UffdMove`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryEngine {
    /// UFFDIO_MOVE, for private anonymous memory: pages leave their range, are copied, and the
    /// copies take their place. Threads that touch such a page meanwhile wait for its copy. Needs
    /// Linux 6.8.
    UffdMove,
    /// The kernel's `move_pages`, for all memory that the kernel can move, and to other nodes only.
    Kernel,
}

impl MemoryEngine {
    /// All engines, in the order in which the library prefers them: by default it uses the first
    /// one where that works, and the last one for the rest.
    pub const ALL: [MemoryEngine; 2] = [MemoryEngine::UffdMove, MemoryEngine::Kernel];

    const fn named(self) -> EngineName {
        match self {
            MemoryEngine::UffdMove => EngineName::new("uffd-move", 7),
            MemoryEngine::Kernel => kernel::ENGINE,
        }
    }

    /// Its name in options and reports.
    pub const fn name(self) -> &'static str {
        self.named().name()
    }

    /// Its number in the C interface. Numbers of [`Engine`](crate::Engine) differ.
    pub const fn number(self) -> u32 {
        self.named().number()
    }

    /// The engine with this number in the C interface.
    pub fn by_number(number: u32) -> Option<MemoryEngine> {
        MemoryEngine::ALL.into_iter().find(|engine| engine.number() == number)
    }
}

impl From<MemoryEngine> for EngineName {
    fn from(engine: MemoryEngine) -> EngineName {
        engine.named()
    }
}

impl PartialEq<MemoryEngine> for EngineName {
    fn eq(&self, other: &MemoryEngine) -> bool {
        *self == EngineName::from(*other)
    }
}

impl fmt::Display for MemoryEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;

    #[test]
    fn names_and_numbers_differ_from_those_of_engines() {
        for engine in MemoryEngine::ALL {
            assert_eq!(MemoryEngine::by_number(engine.number()), Some(engine));
            assert_eq!(Engine::by_number(engine.number()), None);
            assert!(Engine::ALL.iter().all(|other| other.name() != engine.name()));
            assert_eq!(EngineName::from(engine), engine);
        }
        assert_eq!(MemoryEngine::by_number(0), None, "the library chooses");
    }
}
