//! Exporters: each writes a [`Document`] in one format, in a file of its own.
//!
//! To add a format, write `export/<format>.rs` with a function from a document to a string, and add
//! a line to [`Format`] and to [`Format::write`].

mod json;
mod text;

use crate::document::Document;

/// Columns of text for files and wide terminals.
pub const WIDEST: usize = 120;

/// A format that a result can be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Aligned text for people.
    Text {
        /// Columns that lines of words fit. Tables may be wider.
        width: usize,
    },
    /// One JSON object on one line.
    Json,
}

impl Format {
    /// Text with the widest lines that are still easy to read.
    pub const WIDE: Format = Format::Text { width: WIDEST };

    /// Writes the document, with a newline at the end.
    pub fn write(self, document: &Document) -> String {
        match self {
            Format::Text { width } => text::write(document, width),
            Format::Json => json::write(document),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::document::{Body, Column, Document, Fact, Section, Table, Value, fact};

    struct Row {
        engine: &'static str,
        page: &'static str,
        ratio: f64,
        touch: i64,
    }

    const COLUMNS: [Column<Row>; 3] = [
        Column { key: "engine", head: "engine", meaning: "", cell: |row| row.engine.into() },
        Column {
            key: "ratio",
            head: "ratio",
            meaning: "time of the leap / time of a memcpy",
            cell: |row| Value::Ratio(row.ratio),
        },
        Column {
            key: "first_touch_ns",
            head: "",
            meaning: "for programs only",
            cell: |row| Value::SignedNs(row.touch),
        },
    ];

    /// One of everything.
    pub(super) fn document() -> Document {
        let rows = [
            Row { engine: "precopy", page: "4k", ratio: 1.25, touch: -5 },
            Row { engine: "mprotect", page: "thp", ratio: 12.5, touch: 7 },
        ];
        let run =
            [Column { key: "run", head: "", meaning: "", cell: |run: &u64| Value::count(*run) }];
        let facts: Vec<Fact> = vec![
            fact("migrate_ns", "time", Value::Ns(61_234_567)).remark("from the start of the job"),
            fact("moved_ratio", "moved", Value::Share(0.5)),
            fact("unknown_ns", "", Value::Unknown),
            fact("by_node", "by node", Value::Map(vec![("0".to_owned(), Value::Count(7))])),
            fact("asked_per_s", "asked for", Value::PerSecond(f64::INFINITY)),
            fact("job_ns", "job (us)", Value::ShortNs(1_234_567)),
        ];
        let sections = vec![
            Section::new("", "Machine", Body::Facts(vec![fact("kernel", "Linux", "6.12")])),
            Section::new("leap", "The leap", Body::Facts(facts)),
            Section::new(
                "rows",
                "Engines",
                Body::Table(Table::of(&COLUMNS, &rows, |row| row.page.to_owned())),
            ),
            Section::data("samples", Body::Table(Table::of(&run, &[1], |_| String::new()))),
            Section::new("skipped", "Skipped", Body::Notes(vec!["no pages of 2m".to_owned()])),
        ];
        Document { sections }
    }
}
