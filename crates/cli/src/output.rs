//! Results on standard output.

use std::io::{self, Write};

use anyhow::Context;
use pageleap_measure::document::Document;
use pageleap_measure::export::Format;

/// Prints a result as text, or as one JSON object.
pub fn print(document: &Document, json: bool) -> anyhow::Result<()> {
    let format = if json { Format::Json } else { Format::Text };
    write(&format.write(document))
}

/// Writes text to standard output.
pub fn write(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}
