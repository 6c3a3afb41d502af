//! Single values in files of the kernel.

use pageleap::topology::{SysFiles, escaped};

/// Most characters of a value. The longest names, of CPUs and products, have some 60.
const MAX_CHARS: usize = 200;

/// The first line of a file, fit to be shown. `None` if the file is missing or the line is empty.
pub(super) fn line(files: &SysFiles, path: &str) -> Option<String> {
    shown(files.text_if_there(path).ok()??.lines().next()?)
}

/// The choice in brackets of a file such as `always [madvise] never`.
pub(super) fn choice(files: &SysFiles, path: &str) -> Option<String> {
    let line = line(files, path)?;
    let (_, rest) = line.split_once('[')?;
    shown(rest.split_once(']')?.0)
}

/// A switch that is 1 or 0.
pub(super) fn switch(files: &SysFiles, path: &str) -> Option<bool> {
    match files.number(path).ok()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// Text of a file without spaces around it, and with control characters escaped. `None` if nothing
/// is left.
pub(super) fn shown(text: &str) -> Option<String> {
    let text: String = text.trim().chars().take(MAX_CHARS).collect();
    (!text.is_empty()).then(|| escaped(&text))
}

#[cfg(test)]
mod tests {
    use super::super::trees::Tree;
    use super::*;

    #[test]
    fn values_are_single_lines_choices_and_switches() {
        let tree = Tree::new(&[
            ("line", " one \u{1b}[2J\ntwo\n"),
            ("empty", "\n"),
            ("choice", "always [madvise] never\n"),
            ("unclosed", "always [madvise never\n"),
            ("nothing", "always [] never\n"),
            ("on", "1\n"),
            ("off", "0\n"),
            ("seven", "7\n"),
        ]);
        let files = tree.files();
        assert_eq!(line(&files, "line").as_deref(), Some("one \\u{1b}[2J"));
        assert_eq!(choice(&files, "choice").as_deref(), Some("madvise"));
        assert_eq!([switch(&files, "on"), switch(&files, "off")], [Some(true), Some(false)]);
        for path in ["empty", "missing"] {
            assert_eq!(line(&files, path), None, "{path}");
        }
        for path in ["on", "unclosed", "nothing", "missing"] {
            assert_eq!(choice(&files, path), None, "{path}");
        }
        for path in ["line", "seven", "missing"] {
            assert_eq!(switch(&files, path), None, "{path}");
        }
    }
}
