//! Links between the project's documents: each leads to a file that is there, and, where it names a
//! heading, to one that the file has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use crate::files::list_files;

/// Lines of a document outside of code fences, with their numbers.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((index + 1, line))
    })
}

/// What the links of a document name, with the number of the line in which each link ends.
fn targets(text: &str) -> Vec<(usize, &str)> {
    let links = prose(text).flat_map(|(number, line)| {
        line.split("](").skip(1).filter_map(move |rest| Some((number, rest.split_once(')')?.0)))
    });
    links.filter(|(_, target)| !target.contains("://")).collect()
}

/// The names by which the headings of a document are linked.
fn headings(text: &str) -> BTreeSet<String> {
    let titles = prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| line.trim_start_matches('#').trim().to_lowercase());
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    titles.map(|title| title.chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
        plain
    })
}

/// Looks at all Markdown files of the workspace; returns a line for each link that leads nowhere.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for path in list_files(root)?.into_iter().filter(|path| path.extension() == Some("md".as_ref()))
    {
        // Listed by git, yet deleted in the working tree.
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        for (line, target) in targets(&text) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => path.clone(),
                file => plain(&path.with_file_name("").join(file)),
            };
            let at = format!("{}:{line}: {target}", path.display());
            if !root.join(&file).exists() {
                problems.push(format!("{at}: there is no {}", file.display()));
            } else if !heading.is_empty()
                && !headings(&fs::read_to_string(root.join(&file))?).contains(heading)
            {
                problems.push(format!("{at}: {} has no such heading", file.display()));
            }
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let root = Scratch::new("links");
        let git = Command::new("git").args(["init", "--quiet"]).current_dir(root.path()).status();
        assert!(git.unwrap().success());
        fs::create_dir(root.path().join("docs")).unwrap();
        let write = |file: &str, text: &str| fs::write(root.path().join(file), text).unwrap();
        write("docs/b.md", "# 3.2 The `engine`, and more\n[up](../a.md) [web](https://x.org/y)\n");
        write("a.md", "[b](docs/b.md#32-the-engine-and-more), [here](#a-title)\n\n## A title\n");
        assert_eq!(check(root.path()).unwrap(), [""; 0]);

        write("a.md", "```\n[not a link](nowhere)\n```\n[c](docs/c.md)\n[b](docs/b.md#32)\n");
        assert_eq!(
            check(root.path()).unwrap(),
            [
                "a.md:4: docs/c.md: there is no docs/c.md",
                "a.md:5: docs/b.md#32: docs/b.md has no such heading"
            ]
        );
    }
}
