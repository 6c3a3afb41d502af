//! Lines of comments and Markdown have at most [`MOST`] characters, so that they can be read beside
//! each other in a diff. (Code is wrapped by rustfmt.)
//!
//! A wider line is right in four cases:
//!
//! * it is a row of a table: it begins with `|`;
//! * it stands between code fences: output, commands and pictures are shown as they are;
//! * it has a character that draws lines (U+2500 to U+257F), and so is part of a picture;
//! * it has an address (`://`), which cannot be broken.
//!
//! Characters are counted, not bytes.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::mutation::list_files;

/// The most characters of a line.
const MOST: usize = 100;

/// How the lines of a file are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Every line counts.
    Markdown,
    /// Lines count that begin with one of these marks.
    Commented(&'static [&'static str]),
}

impl Kind {
    /// By the file's name, and, where that has no ending, by its first line.
    fn of(path: &Path, text: &str) -> Option<Kind> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("md") => Some(Kind::Markdown),
            Some("rs") => Some(Kind::Commented(&["//"])),
            Some("c" | "h" | "cpp" | "hpp" | "java" | "map") => {
                Some(Kind::Commented(&["//", "/*", "*"]))
            }
            Some("toml" | "sh" | "yml" | "cmake") => Some(Kind::Commented(&["#"])),
            None if text.starts_with("#!") => Some(Kind::Commented(&["#"])),
            _ => None,
        }
    }

    /// What a line says, without the mark before it; `None` if the line does not count.
    fn words(self, line: &str) -> Option<&str> {
        let line = line.trim_start();
        match self {
            Kind::Markdown => Some(line),
            Kind::Commented(marks) => marks
                .iter()
                .find_map(|mark| line.strip_prefix(mark))
                .map(|rest| rest.trim_start_matches(['/', '!', '*']).trim_start()),
        }
    }
}

/// The lines of a text that are too wide: their numbers, from 1, and their widths.
fn wide_lines(kind: Kind, text: &str) -> Vec<(usize, usize)> {
    let mut fenced = false;
    let mut wide = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(words) = kind.words(line) else {
            fenced = false; // A fence ends with the comment that it stands in.
            continue;
        };
        if words.starts_with("```") {
            fenced = !fenced;
        }
        let width = line.chars().count();
        let draws = |c: char| ('\u{2500}'..='\u{257f}').contains(&c);
        let excepted = fenced || words.starts_with('|') || words.contains("://");
        if width > MOST && !excepted && !words.contains(draws) {
            wide.push((index + 1, width));
        }
    }
    wide
}

/// Looks at all files of the workspace; returns a line for each place that is too wide.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for path in list_files(root)? {
        // Listed by git, yet deleted in the working tree; or not text.
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        let Some(kind) = Kind::of(&path, &text) else { continue };
        let wide = wide_lines(kind, &text).into_iter();
        problems.extend(wide.map(|(line, width)| {
            format!("{}:{line}: {width} characters, at most {MOST}", path.display())
        }));
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUST: Kind = Kind::Commented(&["//"]);

    fn wide(kind: Kind, lines: &[String]) -> Vec<(usize, usize)> {
        wide_lines(kind, &lines.join("\n"))
    }

    #[test]
    fn characters_count_not_bytes() {
        let umlauts = "ü".repeat(MOST);
        let one_more = format!("{umlauts}ü");
        assert_eq!(wide(Kind::Markdown, &[umlauts, one_more]), [(2, MOST + 1)]);
    }

    #[test]
    fn comments_count_and_code_does_not() {
        let long = "x".repeat(MOST);
        let lines = [
            format!("let text = \"{long}\";"),
            format!("    // {long}"),
            format!("//! {long}"),
            format!("/* {long}"),
        ];
        assert_eq!(wide(RUST, &lines), [(2, MOST + 7), (3, MOST + 4)]);
        let in_c = Kind::of(Path::new("a.h"), "").unwrap();
        assert_eq!(wide(in_c, &[format!("/* {long}"), format!(" * {long}"), long]).len(), 2);
    }

    #[test]
    fn tables_fences_pictures_and_addresses_are_excepted() {
        let long = "x".repeat(MOST);
        for kind in [Kind::Markdown, RUST] {
            let mark = if kind == RUST { "/// " } else { "" };
            let lines = [
                format!("{mark}| {long} |"),
                format!("{mark}```"),
                format!("{mark}{long}!"),
                format!("{mark}```"),
                format!("{mark}{long} ──▶"),
                format!("{mark}https://example.org/{long}"),
                format!("{mark}{long}."),
            ];
            assert_eq!(wide(kind, &lines).iter().map(|(line, _)| *line).collect::<Vec<_>>(), [7]);
        }
        // What is forgotten open ends with its comment.
        let lines = ["/// ```".to_owned(), "fn f() {}".to_owned(), format!("/// {long}")];
        assert_eq!(wide(RUST, &lines).len(), 1);
    }

    #[test]
    fn files_are_known_by_their_names() {
        assert_eq!(Kind::of(Path::new("docs/a.md"), ""), Some(Kind::Markdown));
        assert_eq!(Kind::of(Path::new(".ci/run"), "#!/bin/sh\n"), Some(Kind::Commented(&["#"])));
        assert_eq!(Kind::of(Path::new("data/two.tree"), ""), None);
    }
}
