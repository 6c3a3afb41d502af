//! The steps of `cargo xtask test`: what they are called, what each proves, and which of them the
//! default command runs.
//!
//! * This file names the steps; [`work`] does one of them, in a process of its own.
//! * [`lanes`] starts those processes, two side by side, and keeps their output apart.
//! * [`summary`] tells the result, and [`passed`] writes down which commit has passed.
//!
//! A step never stops the ones after it: one run tells everything that is wrong. A step that needs
//! tests and finds none fails, because an empty run proves nothing.

pub mod lanes;
mod passed;
mod report;
mod summary;
pub mod work;

/// One step of `cargo xtask test`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Formatting.
    Fmt,
    /// Imports between modules and crates.
    Layers,
    /// Whether the mutation list fits the sources and the document.
    MutantList,
    /// Lints of all targets.
    Clippy,
    /// Documentation builds without warnings.
    Docs,
    /// All tests of the workspace.
    Tests,
    /// The stress oracle, for a short time.
    Stress,
    /// Programs in C and C++ against the library.
    C,
    /// The model checker, with a small bound.
    Loom,
    /// Whole jobs under random schedules, a tenth of them.
    Shuttle,
    /// The tests of several nodes, on one emulated machine.
    Nodes,
    /// Every call of a job fails in every way.
    Faults,
    /// The stress oracle, optimised, for longer.
    StressFull,
    /// The model checker, with the full bound.
    LoomFull,
    /// Whole jobs under all the random schedules.
    ShuttleFull,
    /// Programs in C and C++ in every way, and in a JVM.
    CFull,
    /// The unit tests under Miri.
    Miri,
    /// The packages in a Debian of their own.
    Packages,
    /// The crates for a registry.
    Crates,
    /// All emulated machines and kernels.
    Lab,
    /// The mutation list itself.
    Mutants,
}

/// Which command runs a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// `cargo xtask test`.
    Default,
    /// `cargo xtask test --all`, and `--only`.
    Deep,
}

/// With which other steps a step may share the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// One after the other, in the build folder of the tests.
    First,
    /// One after the other, beside the first lane, in build folders of their own, so that cargo
    /// does not wait for the tests to be built.
    Second,
    /// Alone, after both lanes: it takes a slow checker for one that hangs.
    Alone,
}

impl Step {
    /// In the order in which each lane runs them; the default ones first.
    pub const ALL: [Step; 21] = [
        Step::Fmt,
        Step::Layers,
        Step::MutantList,
        Step::Clippy,
        Step::Docs,
        Step::Tests,
        Step::Stress,
        Step::C,
        Step::Loom,
        Step::Shuttle,
        Step::Nodes,
        Step::Faults,
        Step::StressFull,
        Step::LoomFull,
        Step::ShuttleFull,
        Step::CFull,
        Step::Miri,
        Step::Packages,
        Step::Crates,
        Step::Lab,
        Step::Mutants,
    ];

    /// The name that `--only` takes.
    pub fn name(self) -> &'static str {
        match self {
            Step::Fmt => "fmt",
            Step::Layers => "layers",
            Step::MutantList => "mutant-list",
            Step::Clippy => "clippy",
            Step::Docs => "docs",
            Step::Tests => "tests",
            Step::Stress => "stress",
            Step::C => "c",
            Step::Nodes => "nodes",
            Step::Loom => "loom",
            Step::Shuttle => "shuttle",
            Step::Faults => "faults",
            Step::StressFull => "stress-full",
            Step::LoomFull => "loom-full",
            Step::ShuttleFull => "shuttle-full",
            Step::CFull => "c-full",
            Step::Miri => "miri",
            Step::Packages => "packages",
            Step::Crates => "crates",
            Step::Lab => "lab",
            Step::Mutants => "mutants",
        }
    }

    /// The step that has this name.
    pub fn parse(text: &str) -> Result<Step, String> {
        let names = || Step::ALL.map(Step::name).join(", ");
        Step::ALL
            .into_iter()
            .find(|step| step.name() == text)
            .ok_or_else(|| format!("the steps are {}", names()))
    }

    /// What it does, for `--list` and the headers.
    pub fn about(self) -> &'static str {
        match self {
            Step::Fmt => "cargo fmt --all --check",
            Step::Layers => "no module and no crate imports upward: crates/layers.toml",
            Step::MutantList => "each mutant fits its file once, and protocol.md has the list",
            Step::Clippy => "cargo clippy --workspace --all-targets -- -D warnings",
            Step::Docs => {
                "cargo doc --workspace --no-deps without warnings; links between documents"
            }
            Step::Tests => "all tests of the workspace, with huge pages if they can be reserved",
            Step::Stress => "the stress oracle: writers against migrations, a second per case",
            Step::C => "programs in C and C++: gcc, clang, address and undefined sanitizer",
            Step::Nodes => "tests of several nodes on an emulated machine, Linux 6.12",
            Step::Loom => "loom tests of the library, all interleavings with 2 preemptions",
            Step::Shuttle => "shuttle tests of the library: 1,000 random schedules each",
            Step::Faults => {
                "each call of a job fails in each way, on the kernel too; everything at once"
            }
            Step::StressFull => "the stress oracle, optimised, five seconds per case",
            Step::LoomFull => "loom tests of the library, all interleavings with 3 preemptions",
            Step::ShuttleFull => "shuttle tests of the library: 10,000 random schedules each",
            Step::CFull => "programs in C and C++, also static, under valgrind, and in a JVM",
            Step::Miri => "unit tests of the library under Miri (needs the nightly toolchain)",
            Step::Packages => "the .deb and the tarball, used in a fresh Debian (needs root)",
            Step::Crates => "cargo package: each published crate builds from its archive",
            Step::Lab => "the tests on all emulated machines and kernels, and broken machines",
            Step::Mutants => "each mutant of the protocol is caught by its checker",
        }
    }

    /// Which command runs it.
    pub fn level(self) -> Level {
        if self >= Step::Faults { Level::Deep } else { Level::Default }
    }

    /// The deep step that does all of this one and more.
    pub fn deep_twin(self) -> Option<Step> {
        match self {
            Step::Stress => Some(Step::StressFull),
            Step::Loom => Some(Step::LoomFull),
            Step::Shuttle => Some(Step::ShuttleFull),
            Step::C => Some(Step::CFull),
            Step::Nodes => Some(Step::Lab),
            _ => None,
        }
    }

    /// With which other steps it may share the machine.
    pub fn place(self) -> Place {
        match self {
            Step::Tests | Step::Stress | Step::C => Place::First,
            Step::Faults | Step::StressFull | Step::CFull => Place::First,
            Step::Packages | Step::Crates | Step::Lab => Place::First,
            Step::Fmt | Step::Layers | Step::MutantList => Place::Second,
            Step::Clippy | Step::Docs => Place::Second,
            Step::Loom | Step::Shuttle | Step::LoomFull | Step::ShuttleFull => Place::Second,
            // It has the tests' build folder, but comes last in its lane: the tests are built then.
            Step::Nodes => Place::Second,
            Step::Miri => Place::Second,
            Step::Mutants => Place::Alone,
        }
    }

    fn wants_huge_pages(self) -> bool {
        use Step::{Faults, Mutants, Stress, StressFull, Tests};
        matches!(self, Tests | Stress | Faults | StressFull | Mutants)
    }
}

/// What to run and how strictly.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// Whether these are all steps that a command has, so that a commit can pass by them.
    pub is_whole: bool,
    /// What was not asked for and is worth a line at the end, with the reason.
    pub not_run: Vec<(Step, String)>,
    /// Skips count as failures.
    pub deny_skip: bool,
    /// Seconds per case of the stress oracle; else the environment's or the step's own.
    pub stress_seconds: Option<u64>,
}

impl Plan {
    /// `cargo xtask test`, and with `all` every deep step too: in place of its shorter twin where
    /// it has one.
    pub fn usual(all: bool) -> Plan {
        let wanted = |step: &Step| match all {
            true => step.deep_twin().is_none(),
            false => step.level() == Level::Default,
        };
        let (steps, rest): (Vec<_>, Vec<_>) = Step::ALL.into_iter().partition(wanted);
        let not_run = match all {
            true => Vec::new(),
            false => rest.into_iter().map(|step| (step, "deep".to_owned())).collect(),
        };
        Plan { steps, is_whole: true, not_run, ..Plan::default() }
    }

    /// Just these steps.
    pub fn only(steps: Vec<Step>) -> Plan {
        Plan { steps, ..Plan::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn step_names_are_unique_and_in_order() {
        let names: BTreeSet<_> = Step::ALL.iter().map(|step| step.name()).collect();
        assert_eq!(names.len(), Step::ALL.len());
        assert!(Step::ALL.is_sorted());
    }

    #[test]
    fn every_step_is_run_or_replaced_by_a_deeper_one() {
        let usual = Plan::usual(false);
        let all = Plan::usual(true);
        for step in Step::ALL {
            let named = usual.not_run.iter().any(|(other, _)| *other == step);
            assert!(usual.steps.contains(&step) != named, "{} must be run or named", step.name());
            let deeper = step.deep_twin().unwrap_or(step);
            assert!(all.steps.contains(&deeper), "--all lacks {}", deeper.name());
        }
        assert!(all.not_run.is_empty());
        assert!(usual.is_whole && all.is_whole && !Plan::only(vec![Step::Fmt]).is_whole);
    }
}
