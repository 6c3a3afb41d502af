//! Applies the rows of the mutation list to a copy of the workspace and runs their checkers.
//!
//! Layout below the target directory: `mutants/tree` is the copy. All mutants of a checker share
//! `mutants/build-<checker>`, so that only the mutated crate is compiled again. `mutants/log` holds
//! the output of each run.
//!
//! A mutant is caught only if three things hold: its checker passes without the mutant, the mutant
//! compiles, and the checker then fails or hangs. If the row names an assertion, only its words
//! count. A checker is stopped at its first failed test that counts.
//! The working tree itself is never written.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::commands::{Effort, Workspace};
use crate::files::list_files;
use crate::mutants::{self, Catch, Checker, Mutant, mutate, problems};
use crate::process::{self, Ending};
use crate::table::{Table, seconds};
use crate::tally::{Outcome, Tally};

/// How long a checker may run on a mutant, unless `--limit` says otherwise.
pub const RUN_LIMIT: Duration = Duration::from_secs(40);

/// A checker that is slow without a mutant may take this many times as long with one. A slow
/// checker is then not taken for a hung one.
const SLOW_FACTOR: u32 = 3;

/// How long compiling may take. The first build of a checker compiles its dependencies.
const BUILD_LIMIT: Duration = Duration::from_secs(900);

/// Lines of a failed build or run that are shown. The log has all lines.
const TAIL_LINES: usize = 25;

/// What became of a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Caught,
    CaughtByHang,
    Survived,
    /// The mutant did not compile, or its checker failed in another way than predicted.
    Invalid(String),
}

/// Checks the list against the files and against its table in the document. Returns the problems.
pub fn check_list(root: &Path, table: &[Mutant]) -> Vec<String> {
    let document = fs::read_to_string(root.join(mutants::DOCUMENT)).unwrap_or_default();
    problems(table, &document, |file| fs::read_to_string(root.join(file)))
}

/// Writes the table of the list into the document.
pub fn write_list(root: &Path, table: &[Mutant]) -> Result<()> {
    let path = root.join(mutants::DOCUMENT);
    let document =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    fs::write(&path, mutants::with_table(&document, table)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the rows whose names are wanted. Caught ones count as passed, all others as failed.
pub fn run(
    workspace: &Workspace,
    table: &[Mutant],
    wanted: impl Fn(&str) -> bool,
    limit: Duration,
) -> Result<Outcome> {
    let problems = check_list(&workspace.root, table);
    ensure!(problems.is_empty(), "the mutation list is not true:\n  {}", problems.join("\n  "));
    let rows: Vec<&Mutant> = table.iter().filter(|mutant| wanted(mutant.name)).collect();
    ensure!(!rows.is_empty(), "none of the {} mutants has such a name", table.len());

    let home = workspace.target.join("mutants");
    let tree = home.join("tree");
    let copied = sync(&workspace.root, &tree)?;
    println!(
        "mutants: {} rows on a copy in {} ({copied} files updated)",
        rows.len(),
        tree.display()
    );

    let mut outcome = Outcome::default();
    let mut results = Table::new(&["mutant", "checker", "result", "seconds"]);
    for checker in Checker::ALL {
        let rows: Vec<&Mutant> =
            rows.iter().copied().filter(|row| row.caught_by.checker == checker).collect();
        if rows.is_empty() {
            continue;
        }
        let build = home.join(format!("build-{}", checker.builds_with().name()));
        let bench = Bench {
            workspace: Workspace { root: tree.clone(), target: build },
            checker,
            home: &home,
        };
        let limit = limit.max(bench.baseline()? * SLOW_FACTOR);
        for mutant in rows {
            let start = Instant::now();
            let verdict = bench.try_mutant(mutant, limit)?;
            let text = match &verdict {
                Verdict::Caught => "caught".to_owned(),
                Verdict::CaughtByHang => "caught (hang)".to_owned(),
                Verdict::Survived => "SURVIVED".to_owned(),
                Verdict::Invalid(reason) => format!("INVALID: {reason}"),
            };
            println!("mutants: {}: {text}", mutant.name);
            match verdict {
                Verdict::Caught | Verdict::CaughtByHang => outcome.counts.passed += 1,
                Verdict::Survived | Verdict::Invalid(_) => {
                    outcome.counts.failed += 1;
                    outcome.failed.push((mutant.name.to_owned(), text.clone()));
                }
            }
            results.row(&[mutant.name, checker.name(), &text, &seconds(start.elapsed())]);
        }
    }
    print!("\n{results}");
    println!(
        "mutants: {} caught, {} not; logs in {}",
        outcome.counts.passed,
        outcome.counts.failed,
        home.join("log").display()
    );
    Ok(outcome)
}

/// One checker on the copied tree.
#[derive(Debug)]
struct Bench<'a> {
    workspace: Workspace,
    checker: Checker,
    home: &'a Path,
}

/// What a checker did.
#[derive(Debug)]
struct Observation {
    ending: Ending,
    output: Vec<String>,
    elapsed: Duration,
}

impl Observation {
    fn tail(&self) -> String {
        self.output[self.output.len().saturating_sub(TAIL_LINES)..].join("\n    ")
    }

    fn tests_started(&self) -> usize {
        let mut tally = Tally::default();
        self.output.iter().for_each(|line| tally.line(line));
        tally.counts().passed + tally.counts().failed
    }
}

impl Bench<'_> {
    /// Runs the checker without a mutant and returns the time that it took. The checker must pass,
    /// and must have run tests.
    fn baseline(&self) -> Result<Duration> {
        let name = self.checker.name();
        println!("mutants: {name}: first without a mutant");
        let log = format!("baseline-{name}");
        let any = self.checker.fails();
        let built = self.observe(&log, any, true, BUILD_LIMIT)?;
        ensure!(
            built.ending.success(),
            "{name} does not compile even without a mutant:\n    {}",
            built.tail()
        );
        let run = self.observe(&log, any, false, BUILD_LIMIT)?;
        ensure!(run.ending.success(), "{name} fails even without a mutant:\n    {}", run.tail());
        ensure!(
            run.tests_started() > 0,
            "{name} ran no test, so it can catch nothing (all skipped?):\n    {}",
            run.tail()
        );
        Ok(run.elapsed)
    }

    fn try_mutant(&self, mutant: &Mutant, limit: Duration) -> Result<Verdict> {
        let applied = Applied::new(&self.workspace.root, mutant)?;
        let verdict = self.judge(mutant, limit);
        applied.restore()?;
        verdict
    }

    fn judge(&self, mutant: &Mutant, limit: Duration) -> Result<Verdict> {
        let built = self.observe(mutant.name, mutant.caught_by, true, BUILD_LIMIT)?;
        if !built.ending.success() {
            println!("    {}", built.tail());
            return Ok(Verdict::Invalid("does not compile".to_owned()));
        }
        let run = self.observe(mutant.name, mutant.caught_by, false, limit)?;
        Ok(verdict(mutant.caught_by, run.ending, &run.output))
    }

    /// Builds or runs the checker and writes its output to the log.
    fn observe(
        &self,
        log: &str,
        by: Catch,
        build_only: bool,
        limit: Duration,
    ) -> Result<Observation> {
        let mut watch = Watch::new(by);
        let start = Instant::now();
        let command = self.workspace.checker(self.checker, Effort::Full, build_only);
        let ending = process::run_until(command, limit, |line| watch.line(line))?;
        let output = watch.output;
        let directory = self.home.join("log");
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        let file = directory.join(format!("{log}.txt"));
        fs::write(&file, output.join("\n") + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Observation { ending, output, elapsed: start.elapsed() })
    }
}

/// The output of a checker, and whether the checker has failed as predicted. It may then stop.
#[derive(Debug)]
struct Watch {
    evidence: Option<&'static str>,
    output: Vec<String>,
}

impl Watch {
    fn new(by: Catch) -> Watch {
        Watch { evidence: by.evidence(), output: Vec::new() }
    }

    fn line(&mut self, line: &str) -> ControlFlow<()> {
        if self.evidence.is_some_and(|word| line.contains(word)) {
            self.evidence = None;
        }
        self.output.push(line.to_owned());
        // Output that is not captured stands between the name of a test and its result.
        let failed = line == "FAILED" || line.starts_with("test ") && line.ends_with(" ... FAILED");
        if failed && self.evidence.is_none() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }
}

/// Whether an ending is a catch.
fn verdict(by: Catch, ending: Ending, output: &[String]) -> Verdict {
    let name = by.checker.name();
    match ending {
        Ending::TimedOut | Ending::Silent if by.may_hang() => Verdict::CaughtByHang,
        Ending::TimedOut | Ending::Silent => Verdict::Invalid(format!("{name} did not end")),
        _ if ending.success() => Verdict::Survived,
        Ending::Exited(_) | Ending::Enough => match by.evidence() {
            Some(word) if !output.iter().any(|line| line.contains(word)) => {
                Verdict::Invalid(format!("{name} failed without reporting {word:?}"))
            }
            _ => Verdict::Caught,
        },
    }
}

/// A mutated file. Dropping it restores the text, also after an error.
#[derive(Debug)]
struct Applied {
    file: PathBuf,
    original: Option<String>,
}

impl Applied {
    fn new(root: &Path, mutant: &Mutant) -> Result<Applied> {
        let file = root.join(mutant.file);
        let original =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let mutated = mutate(mutant, &original).map_err(anyhow::Error::msg)?;
        fs::write(&file, mutated).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Applied { file, original: Some(original) })
    }

    fn restore(mut self) -> Result<()> {
        self.write_back().with_context(|| format!("cannot restore {}", self.file.display()))
    }

    fn write_back(&mut self) -> io::Result<()> {
        self.original.take().map_or(Ok(()), |text| fs::write(&self.file, text))
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        if let Err(error) = self.write_back() {
            // The next run compares the whole tree with the workspace, so this one file cannot
            // mislead it.
            eprintln!("mutants: cannot restore {}: {error}", self.file.display());
        }
    }
}

/// Copies the tracked files of `root`, and the untracked ones that git does not ignore, to `tree`.
/// Returns the number of written files. Equal files keep their times, so that cargo does not
/// compile them again.
fn sync(root: &Path, tree: &Path) -> Result<usize> {
    let listed = list_files(root)?;
    fs::create_dir_all(tree).with_context(|| format!("cannot make {}", tree.display()))?;
    let mut written = 0;
    let mut wanted = BTreeSet::new();
    for path in listed {
        let (from, to) = (root.join(&path), tree.join(&path));
        // Deleted in the working tree although git lists it, or the directory of a submodule.
        let Ok(kind) = from.symlink_metadata() else { continue };
        if kind.is_dir() {
            continue;
        }
        let copied = copy_changed(&from, &to, kind.is_symlink());
        written += usize::from(copied.with_context(|| format!("cannot copy {}", from.display()))?);
        wanted.insert(to);
    }
    remove_others(tree, &wanted).with_context(|| format!("cannot clean {}", tree.display()))?;
    Ok(written)
}

/// Copies one file unless the copy is equal already. Returns whether it wrote the copy.
fn copy_changed(from: &Path, to: &Path, is_link: bool) -> io::Result<bool> {
    let equal = if is_link {
        fs::read_link(to).is_ok_and(|old| fs::read_link(from).is_ok_and(|new| old == new))
    } else {
        let plain = to.symlink_metadata().is_ok_and(|kind| kind.is_file());
        plain && fs::read(to).is_ok_and(|old| fs::read(from).is_ok_and(|new| old == new))
    };
    if equal {
        return Ok(false);
    }
    remove_any(to)?;
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    if is_link {
        std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
    } else {
        fs::copy(from, to)?;
    }
    Ok(true)
}

fn remove_any(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(kind) if kind.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

/// Removes every file below `directory` that is not in `wanted`.
fn remove_others(directory: &Path, wanted: &BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path)
            && path.file_name().is_some_and(|name| name != "Cargo.lock")
        {
            // If the workspace has no Cargo.lock, cargo has written one into the copy. It may stay.
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use anyhow::bail;

    use super::*;
    use crate::marked;
    use crate::scratch::Scratch;

    const ROW: Mutant = Mutant {
        name: "drop-check",
        file: "src/lib.rs",
        find: "assert!(ready);",
        replace: "",
        why: "the check is gone",
        claims: &[],
        caught_by: Checker::Unit.fails(),
    };
    const TEXT: &str = "fn f() {\n    assert!(ready);\n}\n";

    fn tree_with(text: &str) -> Scratch {
        let root = Scratch::new("mutation");
        fs::create_dir(root.path().join("src")).unwrap();
        fs::write(root.path().join("src/lib.rs"), text).unwrap();
        root
    }

    fn source(root: &Scratch) -> String {
        fs::read_to_string(root.path().join("src/lib.rs")).unwrap()
    }

    fn shell_ending(script: &str) -> Ending {
        Ending::Exited(Command::new("sh").args(["-c", script]).status().unwrap())
    }

    #[test]
    fn applied_row_is_restored() {
        let root = tree_with(TEXT);
        let applied = Applied::new(root.path(), &ROW).unwrap();
        assert_eq!(source(&root), "fn f() {\n    \n}\n");
        applied.restore().unwrap();
        assert_eq!(source(&root), TEXT);
    }

    #[test]
    fn applied_row_is_restored_on_the_error_path() {
        let root = tree_with(TEXT);
        let failed: Result<()> = (|| {
            let _applied = Applied::new(root.path(), &ROW)?;
            bail!("the checker cannot start")
        })();
        assert!(failed.is_err());
        assert_eq!(source(&root), TEXT);
    }

    #[test]
    fn stale_or_ambiguous_row_leaves_the_file_alone() {
        for text in ["fn f() {}\n".to_owned(), TEXT.repeat(2)] {
            let root = tree_with(&text);
            let error = Applied::new(root.path(), &ROW).unwrap_err().to_string();
            assert!(error.contains("drop-check"), "{error}");
            assert_eq!(source(&root), text);
        }
    }

    #[test]
    fn list_is_checked_against_files_and_the_document() {
        let root = tree_with(TEXT);
        let missing = check_list(root.path(), &[ROW]);
        assert!(missing.len() == 1 && missing[0].contains("lacks the line"), "{missing:?}");
        assert!(write_list(root.path(), &[ROW]).is_err());

        let document = root.path().join(mutants::DOCUMENT);
        fs::create_dir(document.parent().unwrap()).unwrap();
        fs::write(&document, format!("a\n{}\n<!-- end -->\nb\n", marked::begin(mutants::COMMAND)))
            .unwrap();
        let empty = check_list(root.path(), &[ROW]);
        assert!(empty.len() == 1 && empty[0].contains(mutants::COMMAND), "{empty:?}");
        write_list(root.path(), &[ROW]).unwrap();
        assert!(check_list(root.path(), &[ROW]).is_empty());
        assert!(fs::read_to_string(&document).unwrap().contains("| `drop-check` | `src/lib.rs` |"));

        // The row has changed, or the list has one more.
        let changed = Mutant { why: "the check is weaker", ..ROW };
        assert_eq!(check_list(root.path(), &[changed]), empty);
        let more = Mutant { name: "drop-all", ..ROW };
        assert_eq!(check_list(root.path(), &[ROW, more]), empty);
    }

    #[test]
    fn copy_follows_the_workspace_and_keeps_times_of_equal_files() {
        let root = tree_with(TEXT);
        let git = |arguments: &[&str]| {
            assert!(
                Command::new("git")
                    .args(arguments)
                    .current_dir(root.path())
                    .status()
                    .unwrap()
                    .success()
            );
        };
        git(&["init", "--quiet"]);
        fs::write(root.path().join(".gitignore"), "/target\n").unwrap();
        fs::write(root.path().join("extra.txt"), "extra").unwrap();
        let tree = root.path().join("target/mutants/tree");
        assert_eq!(sync(root.path(), &tree).unwrap(), 3);
        let copy = tree.join("src/lib.rs");
        let before = fs::metadata(&copy).unwrap().modified().unwrap();
        assert_eq!(sync(root.path(), &tree).unwrap(), 0);
        assert_eq!(fs::metadata(&copy).unwrap().modified().unwrap(), before);

        // An interrupted run left a mutant behind, and a file of the workspace was removed.
        fs::write(&copy, "mutated").unwrap();
        fs::remove_file(root.path().join("extra.txt")).unwrap();
        assert_eq!(sync(root.path(), &tree).unwrap(), 1);
        assert_eq!(fs::read_to_string(&copy).unwrap(), TEXT);
        assert!(!tree.join("extra.txt").exists());
    }

    #[test]
    fn a_checker_goes_on_until_a_test_has_failed_as_predicted() {
        let stops = |by, lines: &[&str]| {
            let mut watch = Watch::new(by);
            lines.iter().position(|line| watch.line(line).is_break())
        };
        let lines = [
            "test loom_a ... ok",
            "panicked: LOST",
            "test loom_b ... FAILED",
            "test loom_c ... ok",
        ];
        assert_eq!(stops(Checker::Loom.fails(), &lines), Some(2));
        assert_eq!(stops(Checker::Loom.says("woken twice"), &lines), None);
        assert_eq!(
            stops(
                Checker::Stress.fails(),
                &["test a ... FAILED", "LOST", "test b ... ", "FAILED", ""]
            ),
            Some(3)
        );
        assert_eq!(
            stops(Checker::Stress.fails(), &["test a ... FAILED", "test result: FAILED. 1 passed"]),
            None
        );
    }

    #[test]
    fn only_the_predicted_failure_is_a_catch() {
        let lost = ["panicked: 3 writes LOST".to_owned()];
        assert_eq!(verdict(Checker::Unit.fails(), shell_ending("exit 101"), &[]), Verdict::Caught);
        assert_eq!(verdict(Checker::Loom.fails(), shell_ending("exit 0"), &[]), Verdict::Survived);
        assert_eq!(verdict(Checker::Unit.fails(), Ending::TimedOut, &[]), Verdict::CaughtByHang);
        let directed = Checker::Directed.says("3 writes");
        assert_eq!(verdict(directed, shell_ending("exit 101"), &lost), Verdict::Caught);
        for (ending, output) in
            [(Ending::TimedOut, &lost[..]), (shell_ending("exit 101"), &["a bug".to_owned()])]
        {
            assert!(matches!(verdict(directed, ending, output), Verdict::Invalid(_)));
        }
        assert_eq!(
            verdict(Checker::Stress.fails(), shell_ending("exit 101"), &lost),
            Verdict::Caught
        );
        let named = ["test no_write_is_lost ... FAILED".to_owned()];
        assert!(matches!(
            verdict(Checker::Stress.fails(), shell_ending("exit 101"), &named),
            Verdict::Invalid(_)
        ));
        assert_eq!(verdict(Checker::Loom.fails(), Ending::Enough, &named), Verdict::Caught);
        assert_eq!(
            verdict(Checker::Stress.fails(), shell_ending("exit 0"), &lost),
            Verdict::Survived
        );
    }
}
