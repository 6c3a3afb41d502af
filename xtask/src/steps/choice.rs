//! Which deep steps a change concerns, by the paths that it touches: pure, except for the two
//! questions to git.
//!
//! A path belongs to the row of [`SUBJECTS`] with the longest matching prefix. A path without a row
//! concerns every deep step: what nobody has thought about is tried in full.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Step::{
    self, CFull, Crates, Faults, Lab, LoomFull, Miri, Mutants, Packages, ShuttleFull, StressFull,
};
use super::{FIXED_MUTANTS, Level, Plan};
use crate::mutants::Mutant;

/// Deep steps for the protocol of an attempt.
const PROTOCOL: &[Step] = &[Faults, StressFull, LoomFull, ShuttleFull, CFull, Miri, Lab];
/// Deep steps for jobs, pools and regions.
const LIBRARY: &[Step] = &[Faults, StressFull, ShuttleFull, Miri, Lab];
/// Deep steps for what asks the machine, and decides nothing about pages that move.
const MACHINE: &[Step] = &[Miri, Lab];

/// Beginnings of paths from the workspace root, and the deep steps that they concern. The fixed
/// mutants and those of changed files are tried in any case; `Mutants` here means all of them.
const SUBJECTS: &[(&str, &[Step])] = &[
    ("README.md", &[]),
    ("ARCHITECTURE.md", &[]),
    ("CHANGELOG.md", &[]),
    ("CONTRIBUTING.md", &[]),
    ("LICENSE-", &[]),
    ("docs/", &[]),
    (".gitignore", &[]),
    ("rustfmt.toml", &[]),
    (".ci/base", &[]),
    ("crates/sys/", PROTOCOL),
    ("crates/pageleap/src/", PROTOCOL),
    ("crates/pageleap/src/engine/", PROTOCOL),
    ("crates/pageleap/src/pool/", LIBRARY),
    ("crates/pageleap/src/region/", LIBRARY),
    ("crates/pageleap/src/topology/", MACHINE),
    ("crates/pageleap/src/probe/", MACHINE),
    ("crates/pageleap/tests/", &[Faults, StressFull, Lab]),
    ("crates/pageleap/public-api.txt", &[]),
    ("crates/alloc/", &[CFull]),
    ("crates/alloc/public-api.txt", &[]),
    ("crates/layers.toml", &[]),
    ("crates/capi/", &[CFull, Packages]),
    ("crates/capi/tests/ordinary_memory.cpp", &[CFull, Lab]),
    ("crates/measure/", &[Lab]),
    ("crates/cli/", &[Packages, Lab]),
    ("lab/", &[Lab]),
    ("xtask/guest/", &[Lab]),
    ("xtask/src/lab/", &[Lab]),
    ("xtask/src/api", &[]),
    ("xtask/src/capi", &[CFull, Packages, Lab]),
    ("xtask/src/crates.rs", &[Crates]),
    ("xtask/src/dist", &[Packages]),
    ("xtask/src/layers", &[]),
    ("xtask/src/files.rs", &[CFull, Packages, Crates]),
    ("xtask/src/header.rs", &[Packages]),
    ("xtask/src/manual.rs", &[Packages]),
    ("xtask/src/notices.rs", &[Packages]),
    ("xtask/src/soak.rs", &[]),
    ("xtask/src/table.rs", &[]),
    ("xtask/src/mutants", &[]),
    ("xtask/src/mutation.rs", &[Mutants]),
];

/// What has changed since a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// These paths, from the workspace root.
    Paths(Vec<String>),
    /// Nobody knows, for this reason: everything has to be tried.
    Unknown(String),
}

/// Asks git what has changed since `base`, in commits and in the working tree.
pub fn since(root: &Path, base: &str) -> Result<Change> {
    let base = base.trim();
    if base.is_empty() {
        return Ok(Change::Unknown("no commit is given".to_owned()));
    }
    ensure!(
        base.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~^".contains(c))
            && !base.starts_with('-'),
        "{base:?} is no name of a commit"
    );
    let commit = format!("{base}^{{commit}}");
    if git(root, &["rev-parse", "--verify", "--quiet", &commit]).is_err() {
        return Ok(Change::Unknown(format!("this clone lacks the commit {base}")));
    }
    // Without renames: both names of a moved file count.
    let mut paths = git(root, &["diff", "--name-only", "--no-renames", "-z", base, "--"])?;
    paths.extend(git(root, &["ls-files", "--others", "--exclude-standard", "-z"])?);
    Ok(Change::Paths(paths))
}

/// Runs git and returns the names that it prints, each ended by a NUL.
fn git(root: &Path, arguments: &[&str]) -> Result<Vec<String>> {
    // A checkout that is mounted into a container often belongs to another user.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*"])
        .args(arguments)
        .current_dir(root)
        .output()
        .context("cannot start `git`, which knows what has changed")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(output.status.success(), "git {}: {said}", arguments.join(" "));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// The deep steps for a change, and the mutants.
pub fn plan(change: &Change, table: &[Mutant]) -> Plan {
    let deep = || Step::ALL.into_iter().filter(|step| step.level() == Level::Deep);
    let paths = match change {
        Change::Paths(paths) => paths,
        Change::Unknown(_) => return Plan::only(deep().collect()),
    };
    let concerned: BTreeSet<Step> = paths.iter().flat_map(|path| concerns(path)).collect();
    let all_mutants = concerned.contains(&Mutants);
    // Some of the mutants are tried for every change.
    let runs = |step: &Step| concerned.contains(step) || *step == Mutants;
    let (steps, rest): (Vec<_>, Vec<_>) = deep().partition(runs);
    let not_run =
        rest.into_iter().map(|step| (step, "the change does not concern it".to_owned())).collect();
    let changed = |row: &&Mutant| {
        FIXED_MUTANTS.contains(&row.name) || paths.iter().any(|path| path == row.file)
    };
    let names = table.iter().filter(changed).map(|row| row.name).collect();
    Plan { steps, not_run, mutants: (!all_mutants).then_some(names), ..Plan::default() }
}

/// The deep steps that a path concerns.
fn concerns(path: &str) -> Vec<Step> {
    let rows = SUBJECTS.iter().filter(|(prefix, _)| path.starts_with(prefix));
    match rows.max_by_key(|(prefix, _)| prefix.len()) {
        Some((_, steps)) => steps.to_vec(),
        None => Step::ALL.into_iter().filter(|step| step.level() == Level::Deep).collect(),
    }
}

/// What `cargo xtask test --changed-since` says before it begins.
pub fn describe(change: &Change, plan: &Plan) -> String {
    let names: Vec<&str> = plan.steps.iter().map(|step| step.name()).collect();
    let mutants = match &plan.mutants {
        Some(names) => format!("{} mutants", names.len()),
        None => "all mutants".to_owned(),
    };
    let because = match change {
        Change::Paths(paths) => format!("{} changed files", paths.len()),
        Change::Unknown(reason) => format!("everything, because {reason}"),
    };
    format!("{because}: {}; {mutants}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::mutants::{Checker, TABLE};
    use crate::scratch::Scratch;

    fn plan_for(paths: &[&str]) -> Plan {
        plan(&Change::Paths(paths.iter().map(|&path| path.to_owned()).collect()), TABLE)
    }

    #[test]
    fn documents_concern_the_fixed_mutants_only() {
        let plan = plan_for(&["README.md", "docs/adr/0001-x.md", ".ci/base"]);
        assert_eq!(plan.steps, [Mutants]);
        assert_eq!(plan.mutants.map(|names| names.len()), Some(FIXED_MUTANTS.len()));
        assert_eq!(plan.not_run.len(), 9, "and the summary names what is not run");
    }

    #[test]
    fn the_longest_prefix_decides() {
        assert_eq!(concerns("crates/pageleap/src/probe/mod.rs"), MACHINE);
        assert_eq!(concerns("crates/pageleap/src/lib.rs"), PROTOCOL);
        assert_eq!(concerns("xtask/src/dist/clean_root.rs"), [Packages]);
    }

    #[test]
    fn an_unknown_path_concerns_everything() {
        for path in ["Cargo.lock", "xtask/src/steps.rs", "crates/new/src/lib.rs"] {
            let plan = plan_for(&["README.md", path]);
            assert_eq!(plan.mutants, None, "{path}");
            assert!(plan.not_run.is_empty(), "{path}: {:?}", plan.not_run);
        }
    }

    #[test]
    fn a_changed_file_brings_its_mutants() {
        let row = TABLE.iter().find(|row| !FIXED_MUTANTS.contains(&row.name)).unwrap();
        let names = plan_for(&[row.file]).mutants.expect("not all of them");
        assert!(names.contains(&row.name) && names.len() > FIXED_MUTANTS.len());
        for checker in Checker::ALL {
            let uses =
                |name: &&str| TABLE.iter().any(|row| row.name == *name && row.caught_by == checker);
            assert!(names.iter().any(uses), "{} has none", checker.name());
        }
    }

    #[test]
    fn an_unknown_change_concerns_everything() {
        let plan = plan(&Change::Unknown("shallow".to_owned()), TABLE);
        assert_eq!((plan.steps.len(), plan.mutants), (10, None));
    }

    #[test]
    fn the_rows_name_what_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        /// Made by a change that has not landed everywhere.
        const SOON: [&str; 3] = ["crates/measure/", "CONTRIBUTING.md", ".ci/base"];
        for (prefix, _) in SUBJECTS.iter().filter(|(prefix, _)| !SOON.contains(prefix)) {
            let (folder, begin) = prefix.rsplit_once('/').unwrap_or(("", prefix));
            let entries = fs::read_dir(root.join(folder)).map(|entries| {
                entries.flatten().any(|e| e.file_name().to_string_lossy().starts_with(begin))
            });
            assert!(entries.unwrap_or(false), "a row names {prefix}, which is not there");
        }
    }

    #[test]
    fn git_tells_commits_and_the_working_tree() {
        let scratch = Scratch::new("choice");
        let root = scratch.path();
        let git = |arguments: &[&str]| {
            let identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"];
            let mut command = Command::new("git");
            command.args(identity).args(arguments).current_dir(root);
            assert!(command.output().unwrap().status.success(), "git {arguments:?}");
        };
        git(&["init", "--quiet"]);
        for name in ["moved", "changed", "same"] {
            fs::write(root.join(name), name).unwrap();
        }
        git(&["add", "."]);
        git(&["commit", "--quiet", "-m", "one"]);
        git(&["tag", "base"]);
        git(&["mv", "moved", "there"]);
        git(&["commit", "--quiet", "-m", "two"]);
        fs::write(root.join("changed"), "anew").unwrap();
        fs::write(root.join("new"), "new").unwrap();
        let Change::Paths(mut paths) = since(root, "base\n").unwrap() else { panic!("unknown") };
        paths.sort();
        assert_eq!(paths, ["changed", "moved", "new", "there"]);
        let missing = "57cc8df000000000000000000000000000000000";
        assert!(matches!(since(root, missing).unwrap(), Change::Unknown(_)));
        assert!(matches!(since(root, "").unwrap(), Change::Unknown(_)));
        assert!(since(root, "--output=x").is_err());
    }
}
