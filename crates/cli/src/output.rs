//! Results on standard output.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use pageleap_measure::document::Document;
use pageleap_measure::export::{Format, WIDEST};

/// Terminals that are narrower get lines of this width all the same.
const NARROWEST: usize = 44;

/// Prints a result as text, or as one JSON object. Text fits the terminal, if that is what standard
/// output is.
pub fn print(document: &Document, json: bool) -> anyhow::Result<()> {
    let format = match (json, terminal_columns()) {
        (true, _) => Format::Json,
        (false, None) => Format::WIDE,
        (false, Some(columns)) => Format::Text { width: columns.clamp(NARROWEST, WIDEST) },
    };
    write(&format.write(document))
}

/// Columns of the terminal; `None` if standard output is something else.
fn terminal_columns() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes one `winsize`, or fails.
    let asked = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (asked == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// Writes text to standard output.
pub fn write(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}
