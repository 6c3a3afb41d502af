//! The steps of `cargo xtask test`: what they are called, what each proves, and which of them the
//! default command runs.
//!
//! * This file has the list of the steps; [`work`] does one of them, in a process of its own.
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
    /// Programs of others, with an allocator whose memory leaps.
    Programs,
    /// The unit tests under Miri.
    Miri,
    /// The packages in a Debian of their own.
    Packages,
    /// The crates for a registry.
    Crates,
    /// The lists of public items.
    Api,
    /// The crates of others and their licences.
    Deny,
    /// Reports in a browser.
    Report,
    /// All emulated machines and kernels.
    Lab,
    /// The mutation list itself.
    Mutants,
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

/// What there is to know of a step, besides how it is done.
struct Row {
    step: Step,
    /// The name that `--only` takes.
    name: &'static str,
    place: Place,
    wants_huge_pages: bool,
    /// What it does, for `--list` and the headers.
    about: &'static str,
}

const fn row(step: Step, name: &'static str, place: Place, about: &'static str) -> Row {
    use Step::{Faults, Mutants, Stress, StressFull, Tests};
    let wants_huge_pages = matches!(step, Tests | Stress | Faults | StressFull | Mutants);
    Row { step, name, place, wants_huge_pages, about }
}

/// All steps, in the order in which each lane runs them.
#[rustfmt::skip]
const ROWS: [Row; 25] = {
    use Place::*;
    use Step::*;
    [
        row(Fmt, "fmt", Second, "cargo fmt --all --check"),
        row(Layers, "layers", Second, "nothing imports upward (crates/layers.toml) or in a circle"),
        row(MutantList, "mutant-list", Second, "each mutant fits its file once, protocol.md has the list, and each claim a mutant or a reason"),
        row(Clippy, "clippy", Second, "cargo clippy --workspace --all-targets -- -D warnings"),
        row(Docs, "docs", Second, "cargo doc --workspace --no-deps without warnings; links between documents"),
        row(Tests, "tests", First, "all tests of the workspace, with huge pages if they can be reserved"),
        row(Stress, "stress", First, "the stress oracle: writers against migrations, a second per case"),
        row(C, "c", First, "programs in C and C++: gcc, clang, address and undefined sanitizer"),
        row(Loom, "loom", Second, "loom tests of the library, all interleavings with 2 preemptions"),
        row(Shuttle, "shuttle", Second, "shuttle tests of the library: 1,000 random schedules each"),
        // It has the tests' build folder, but comes last in its lane: the tests are built then.
        row(Nodes, "nodes", Second, "tests of several nodes on an emulated machine, Linux 6.12"),
        row(Faults, "faults", First, "each call of a job fails in each way, on the kernel too; everything at once"),
        row(StressFull, "stress-full", First, "the stress oracle, optimised, five seconds per case"),
        row(LoomFull, "loom-full", Second, "loom tests of the library, all interleavings with 3 preemptions"),
        row(ShuttleFull, "shuttle-full", Second, "shuttle tests of the library: 10,000 random schedules each"),
        row(CFull, "c-full", First, "programs in C and C++, also static, under valgrind, and in a JVM"),
        row(Programs, "programs", First, "programs of others print the same while all their memory leaps"),
        row(Miri, "miri", Second, "unit tests of the library under Miri (needs a nightly toolchain)"),
        row(Packages, "packages", First, "the .deb and the tarball, used in a fresh Debian (needs root)"),
        row(Crates, "crates", First, "cargo package: each published crate builds from its archive"),
        row(Api, "api", Second, "public-api.txt is current (needs cargo-public-api)"),
        row(Deny, "deny", Second, "cargo deny check bans licenses (needs cargo-deny)"),
        row(Report, "report", First, "plots of reports, read back from a browser (needs Chromium)"),
        row(Lab, "lab", First, "the tests on all emulated machines and kernels, and broken machines"),
        row(Mutants, "mutants", Alone, "each mutant of the protocol is caught by its checker"),
    ]
};

/// The steps of `cargo xtask test`.
const USUAL: [Step; 11] = {
    use Step::*;
    [Fmt, Layers, MutantList, Clippy, Docs, Tests, Stress, C, Loom, Shuttle, Nodes]
};

/// The steps of `cargo xtask test --all`: the full variant of each, and those that have no other.
const FULL: [Step; 20] = {
    use Step::*;
    [
        Fmt,
        Layers,
        MutantList,
        Clippy,
        Docs,
        Tests,
        StressFull,
        CFull,
        Programs,
        LoomFull,
        ShuttleFull,
        Report,
        Lab,
        Faults,
        Miri,
        Packages,
        Crates,
        Api,
        Deny,
        Mutants,
    ]
};

impl Step {
    /// All steps, in the order in which each lane runs them.
    pub fn all() -> impl Iterator<Item = Step> {
        ROWS.iter().map(|row| row.step)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// The name that `--only` takes.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The step that has this name.
    pub fn parse(text: &str) -> Result<Step, String> {
        let names = || ROWS.map(|row| row.name).join(", ");
        Step::all()
            .find(|step| step.name() == text)
            .ok_or_else(|| format!("the steps are {}", names()))
    }

    /// What it does, for `--list` and the headers.
    pub fn about(self) -> &'static str {
        self.row().about
    }

    /// With which other steps it may share the machine.
    pub fn place(self) -> Place {
        self.row().place
    }

    fn wants_huge_pages(self) -> bool {
        self.row().wants_huge_pages
    }
}

/// What to run and how strictly.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// Whether these are all steps that a command has, so that a commit can pass by them.
    pub is_whole: bool,
    /// Skips count as failures.
    pub deny_skip: bool,
    /// Seconds per case of the stress oracle; else the environment's or the step's own.
    pub stress_seconds: Option<u64>,
}

impl Plan {
    /// `cargo xtask test`, or with `all` the full variant of each step and the deep ones.
    pub fn usual(all: bool) -> Plan {
        let steps = if all { FULL.to_vec() } else { USUAL.to_vec() };
        Plan { steps, is_whole: true, ..Plan::default() }
    }

    /// Just these steps.
    pub fn only(steps: Vec<Step>) -> Plan {
        Plan { steps, ..Plan::default() }
    }

    /// The steps of `--all` that this plan has not.
    pub fn left_out(&self) -> Vec<Step> {
        FULL.into_iter().filter(|step| !self.steps.contains(step)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_step_has_its_row_and_a_name_of_its_own() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.step as usize, index, "{} stands in another place", row.name);
        }
        let names: BTreeSet<_> = Step::all().map(Step::name).collect();
        assert_eq!(names.len(), ROWS.len());
    }

    #[test]
    fn every_step_is_run_by_a_command() {
        for step in Step::all() {
            let name = step.name();
            assert!(USUAL.contains(&step) || FULL.contains(&step), "nothing runs {name}");
            if USUAL.contains(&step) && !FULL.contains(&step) {
                let full = ["lab".to_owned(), format!("{name}-full")];
                assert!(FULL.iter().any(|other| full.contains(&other.name().to_owned())), "{name}");
            }
        }
        assert!(Plan::usual(false).left_out().contains(&Step::Miri));
        assert!(Plan::usual(true).left_out().is_empty());
        assert!(Plan::usual(true).is_whole && !Plan::only(vec![Step::Fmt]).is_whole);
    }
}
