//! Parts of a document that a command writes: whatever stands between two marker lines.

use anyhow::{Context, Result};

/// The line before a part, which names the command that writes it.
pub fn begin(command: &str) -> String {
    format!("<!-- begin: written by `{command}` -->")
}

/// The line after a part.
const END: &str = "<!-- end -->";

/// The document with `text` between the markers of `command`. `text` ends with a newline.
pub fn replace(document: &str, command: &str, text: &str) -> Result<String> {
    let begin = begin(command);
    let (before, rest) = document
        .split_once(&begin)
        .with_context(|| format!("the document lacks the line {begin}"))?;
    let (_, after) =
        rest.split_once(END).with_context(|| format!("the document lacks the line {END}"))?;
    Ok(format!("{before}{begin}\n{text}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_part_of_the_command_is_replaced() {
        let (first, second) = (begin("make first"), begin("make second"));
        let document = |text: &str| format!("a\n{first}\nx\n{END}\nb\n{second}\n{text}{END}\nc\n");
        assert_eq!(replace(&document("old\n"), "make second", "new\n").unwrap(), document("new\n"));
        assert!(replace("a", "make first", "new\n").is_err());
        assert!(replace(&first, "make first", "new\n").is_err());
    }
}
