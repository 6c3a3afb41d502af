//! Results on standard output.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use pageleap_measure::document::Document;
use pageleap_measure::export::{Format, WIDEST};

/// Terminals that are narrower get lines of this width all the same.
const NARROWEST: usize = 44;

/// Prints a result as text, or as one JSON object.
pub fn print(document: &Document, json: bool) -> anyhow::Result<()> {
    write(&format(json).write(document))
}

/// The format of standard output: one JSON object, or text that fits the width of the terminal, if
/// standard output is one.
pub fn format(json: bool) -> Format {
    match (json, terminal_columns()) {
        (true, _) => Format::Json,
        (false, None) => Format::WIDE,
        (false, Some(columns)) => Format::Text { width: columns.clamp(NARROWEST, WIDEST) },
    }
}

/// Columns of the terminal; `None` if standard output is something else.
pub fn terminal_columns() -> Option<usize> {
    terminal_size().map(|(_, columns)| columns)
}

/// Rows and columns of the terminal; `None` if standard output is something else.
pub fn terminal_size() -> Option<(usize, usize)> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes one `winsize`, or fails.
    let asked = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    let is_told = asked == 0 && size.ws_row > 0 && size.ws_col > 0;
    is_told.then(|| (usize::from(size.ws_row), usize::from(size.ws_col)))
}

/// Writes text to standard output.
pub fn write(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}

/// Writes a line to standard error. If nobody reads it, nothing happens, because the outcome of a
/// command does not depend on that.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether the error is EPIPE: the reader of standard output has gone, because it has seen enough.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Text behind a head. On a narrower terminal it is wrapped, and indented to the column in which it
/// begins.
pub fn hanging(head: &str, text: &str, columns: Option<usize>) -> String {
    let margin = head.lines().last().unwrap_or_default().chars().count();
    let room = columns.map_or(usize::MAX, |columns| columns.saturating_sub(margin));
    let (mut out, mut used) = (head.to_owned(), 0);
    for word in text.split(' ') {
        let length = word.chars().count();
        if used > 0 && length >= room.saturating_sub(used) {
            out += &format!("\n{:margin$}", "");
            used = 0;
        } else if used > 0 {
            out.push(' ');
            used += 1;
        }
        out += word;
        used += length;
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// A table with a head. Each column is as wide as its widest cell. `is_left` says, by the number
/// and head of a column, whether it is left-aligned.
pub fn aligned(
    rows: &[Vec<String>],
    margin: &str,
    is_left: impl Fn(usize, &str) -> bool,
) -> String {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells =
            row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                match is_left(column, &rows[0][column]) {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                }
            });
        out += format!("{margin}{}", cells.collect::<Vec<_>>().join("  ")).trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::hanging;

    #[test]
    fn text_goes_on_below_its_beginning() {
        let text = "one two three";
        assert_eq!(hanging("a: ", text, None), "a: one two three\n");
        assert_eq!(hanging("a: ", text, Some(16)), "a: one two three\n");
        assert_eq!(hanging("a: ", text, Some(15)), "a: one two\n   three\n");
        assert_eq!(hanging("a: ", text, Some(2)), "a: one\n   two\n   three\n");
        assert_eq!(hanging("\na: ", text, Some(15)), "\na: one two\n   three\n");
        assert_eq!(hanging("a  ", "", Some(9)), "a\n");
    }
}
