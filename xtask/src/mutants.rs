//! The mutation list of the protocol: each row breaks one rule on purpose, and some checker must
//! notice.
//!
//! The list is part of the argument in `docs/protocol.md`: a rule without a row is a claim, a rule
//! with a surviving row is not tested. `cargo xtask mutants` applies the rows one by one to a copy
//! of the workspace; see `mutation`.
//!
//! To add a row, append to one of the parts of [`TABLE`] and type `cargo xtask mutants
//! --write`, which writes the table of `docs/protocol.md`. `find` must occur exactly once in the
//! file, so take enough of the line, or several lines. A row whose text is gone fails the run: a
//! stale list must not pass. Nor must a numbered claim pass that no row names, unless the document
//! says why ([`claims`]).

mod claims;
mod engines;
mod foreign;
mod jobs;
mod page_tables;
mod views;

use std::fmt::Write;

use anyhow::Result;

use crate::marked;

/// The document that has the list as a table, from the workspace root.
pub const DOCUMENT: &str = "docs/protocol.md";

/// The command that writes that table, as the document's markers name it.
pub const COMMAND: &str = "cargo xtask mutants --write";

/// What must notice a mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Checker {
    /// The model checker: loom tests of the library.
    Loom,
    /// Whole jobs under long random schedules: shuttle tests of the library. No row rests on them,
    /// because chance decides what they meet.
    Shuttle,
    /// Those of the shuttle tests that try each schedule of a small scene.
    Directed,
    /// The library's unit tests, and the tests of attributes, placements, views and of `auto`.
    Unit,
    /// The tests that store at the edges of windows, on the kernel.
    Windows,
    /// The stress oracle, which must report lost writes: another failure is not the one that was
    /// predicted. No row rests on it, because chance decides what it meets.
    Stress,
}

impl Checker {
    /// All of them, cheapest first.
    pub const ALL: [Checker; 6] = [
        Checker::Windows,
        Checker::Unit,
        Checker::Loom,
        Checker::Directed,
        Checker::Shuttle,
        Checker::Stress,
    ];

    /// Its name in tables and paths.
    pub fn name(self) -> &'static str {
        match self {
            Checker::Loom => "loom",
            Checker::Shuttle => "shuttle",
            Checker::Directed => "directed",
            Checker::Unit => "unit",
            Checker::Windows => "windows",
            Checker::Stress => "stress",
        }
    }

    /// The checker in whose target directory it builds, because both are built alike.
    pub fn builds_with(self) -> Checker {
        if self == Checker::Windows { Checker::Unit } else { self }
    }

    /// What its output must contain for any failure to count as a catch. In capitals, since the
    /// names of tests and their ordinary reports ("0 lost") must not look like it.
    fn evidence(self) -> Option<&'static str> {
        match self {
            Checker::Stress => Some("LOST"),
            _ => None,
        }
    }

    /// Any failure of it counts.
    pub const fn fails(self) -> Catch {
        Catch { checker: self, words: None }
    }

    /// Only the assertion with these words counts. For mutants with one bad interleaving, and a
    /// test that forces it.
    pub const fn says(self, words: &'static str) -> Catch {
        Catch { checker: self, words: Some(words) }
    }
}

/// Who must notice a mutant, and what counts as noticing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Catch {
    /// Whose tests run.
    pub checker: Checker,
    words: Option<&'static str>,
}

impl Catch {
    /// What the output must contain.
    pub fn evidence(self) -> Option<&'static str> {
        self.words.or(self.checker.evidence())
    }

    /// Whether a checker that does not end has noticed. A row that names an assertion wants to read
    /// it.
    pub fn may_hang(self) -> bool {
        self.words.is_none()
    }
}

/// One deliberate defect.
#[derive(Debug, Clone, Copy)]
pub struct Mutant {
    /// Short name in kebab case.
    pub name: &'static str,
    /// File from the workspace root.
    pub file: &'static str,
    /// Text that occurs exactly once in `file`.
    pub find: &'static str,
    /// Text to put in its place; it must still compile.
    pub replace: &'static str,
    /// What the change takes away, in one sentence.
    pub why: &'static str,
    /// The numbered claims of [`DOCUMENT`] that the change breaks, such as "P3". None if the rule
    /// that it breaks has no number.
    pub claims: &'static [&'static str],
    /// Who must notice.
    pub caught_by: Catch,
}

/// Where the parts of the list are, from the workspace root.
const PARTS: [&str; 5] = [
    "xtask/src/mutants/engines.rs",
    "xtask/src/mutants/jobs.rs",
    "xtask/src/mutants/foreign.rs",
    "xtask/src/mutants/page_tables.rs",
    "xtask/src/mutants/views.rs",
];

/// The list.
pub const TABLE: &[Mutant] = &joined::<{ rows_of(ROWS) }>(ROWS);

/// The rows of each of [`PARTS`].
const ROWS: [&[Mutant]; PARTS.len()] =
    [engines::ROWS, jobs::ROWS, foreign::ROWS, page_tables::ROWS, views::ROWS];

const fn rows_of(parts: [&[Mutant]; PARTS.len()]) -> usize {
    let (mut rows, mut part) = (0, 0);
    while part < parts.len() {
        rows += parts[part].len();
        part += 1;
    }
    rows
}

/// Puts parts of the list one behind the other. `N`: rows of all parts.
const fn joined<const N: usize>(parts: [&[Mutant]; PARTS.len()]) -> [Mutant; N] {
    let mut all = [parts[0][0]; N];
    let (mut at, mut part, mut row) = (0, 0, 0);
    while at < N {
        if row == parts[part].len() {
            (part, row) = (part + 1, 0);
        }
        all[at] = parts[part][row];
        (at, row) = (at + 1, row + 1);
    }
    all
}

/// The list as a markdown table.
fn markdown(table: &[Mutant]) -> String {
    let cell =
        |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    let head = "| mutant | file | what is changed | breaks | caught by |\n|---|---|---|---|---|\n";
    let mut text = String::from(head);
    for mutant in table {
        let (name, file, checker) = (mutant.name, mutant.file, mutant.caught_by.checker.name());
        let (why, claims) = (cell(mutant.why), mutant.claims.join(", "));
        writeln!(text, "| `{name}` | `{file}` | {why} | {claims} | {checker} |")
            .expect("a String grows");
    }
    text
}

/// The document with the table of this list.
pub fn with_table(document: &str, table: &[Mutant]) -> Result<String> {
    marked::replace(document, COMMAND, &markdown(table))
}

/// Everything that is wrong with the list itself. `read` gives the text of a file from the
/// workspace root.
pub fn problems(
    table: &[Mutant],
    document: &str,
    read: impl Fn(&str) -> std::io::Result<String>,
) -> Vec<String> {
    let mut problems = Vec::new();
    for (index, mutant) in table.iter().enumerate() {
        let name = mutant.name;
        if table[..index].iter().any(|earlier| earlier.name == name) {
            problems.push(format!("{name}: the name is used twice"));
        }
        match read(mutant.file) {
            Ok(text) => problems.extend(mutate(mutant, &text).err()),
            Err(error) => problems.push(format!("{name}: cannot read {}: {error}", mutant.file)),
        }
    }
    match with_table(document, table) {
        Err(error) => problems.push(format!("{DOCUMENT}: {error:#}")),
        Ok(current) if current != document => {
            problems.push(format!("{DOCUMENT}: its table is not this list; type `{COMMAND}`"));
        }
        Ok(_) => {}
    }
    problems.extend(claims::problems(table, document, |mutant| place(mutant, &read)));
    problems
}

/// Where a row stands: file and line.
fn place(mutant: &Mutant, read: impl Fn(&str) -> std::io::Result<String>) -> String {
    let head = format!("name: \"{}\",", mutant.name);
    let found = PARTS.iter().find_map(|part| {
        let at = read(part).ok()?.lines().position(|line| line.trim() == head)?;
        Some(format!("{part}:{}", at + 1))
    });
    found.unwrap_or_else(|| PARTS.join(" or "))
}

/// The text of the mutated file, or why the row does not fit the file.
pub fn mutate(mutant: &Mutant, text: &str) -> Result<String, String> {
    let Mutant { name, file, find, replace, .. } = mutant;
    if find.is_empty() || find == replace {
        return Err(format!("{name}: the replacement changes nothing"));
    }
    match text.matches(find).count() {
        1 => Ok(text.replacen(find, replace, 1)),
        0 => Err(format!("{name}: stale, {file} no longer contains {find:?}")),
        count => Err(format!("{name}: ambiguous, {file} contains {find:?} {count} times")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: Mutant = Mutant {
        name: "weak-cas",
        file: "src/state.rs",
        find: "Ordering::AcqRel",
        replace: "Ordering::Relaxed",
        why: "the freeze is not ordered\n before the copy | at all",
        claims: &[],
        caught_by: Checker::Loom.fails(),
    };

    #[test]
    fn exactly_one_occurrence_is_replaced() {
        assert_eq!(mutate(&ROW, "cas(Ordering::AcqRel);").unwrap(), "cas(Ordering::Relaxed);");
        assert!(mutate(&ROW, "cas();").unwrap_err().contains("stale"));
        assert!(mutate(&ROW, "Ordering::AcqRel Ordering::AcqRel").unwrap_err().contains("2 times"));
        let idle = Mutant { replace: ROW.find, ..ROW };
        assert!(mutate(&idle, ROW.find).unwrap_err().contains("changes nothing"));
    }

    #[test]
    fn each_defect_of_the_list_is_named() {
        let text = |_: &str| Ok(ROW.find.to_owned());
        let empty = format!("{}\n<!-- end -->\n", marked::begin(COMMAND));
        let document = |table: &[Mutant]| with_table(&empty, table).unwrap();
        assert!(problems(&[ROW], &document(&[ROW]), text).is_empty());
        assert_eq!(problems(&[ROW], &empty, text).len(), 1);
        assert_eq!(problems(&[ROW], "", text).len(), 1);
        assert_eq!(problems(&[ROW, ROW], &document(&[ROW, ROW]), text).len(), 1);
        let gone = |_: &str| Err(std::io::ErrorKind::NotFound.into());
        assert!(problems(&[ROW], &document(&[ROW]), gone)[0].contains("src/state.rs"));
    }

    #[test]
    fn a_claim_that_is_not_there_is_named_with_the_line_of_its_row() {
        let row = Mutant { claims: &["S1"], find: "a(", replace: "b(", ..ROW };
        let rows = "    Mutant {\n        name: \"weak-cas\",\n        find: \"a(\",\n";
        let document = format!("{}\n<!-- end -->\n", marked::begin(COMMAND));
        let document = with_table(&document, &[row]).unwrap();
        let last = PARTS[1];
        let read = |file: &str| Ok(if file == PARTS[0] { "a(" } else { rows }.to_owned());
        let place = format!("{last}:2: weak-cas: {DOCUMENT} has no claim S1");
        assert_eq!(problems(&[row], &document, read), [place]);
    }

    #[test]
    fn markdown_keeps_one_row_per_line() {
        let text = markdown(&[Mutant { claims: &["S1", "P3"], ..ROW }]);
        let row = text.lines().nth(2).unwrap();
        assert_eq!(
            row,
            "| `weak-cas` | `src/state.rs` | the freeze is not ordered before the copy \\| at all | S1, P3 | loom |"
        );
        assert_eq!(text.lines().count(), 3);
    }
}
