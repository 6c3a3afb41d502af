//! Exporters: each writes a [`Document`] in one format, in a file of its own.
//!
//! To add a format, write `export/<format>.rs` with a function from a document to a string, and add
//! a line to [`Format`] and to [`Format::write`]; or to [`DocumentFormat`], if only documents can
//! be written in it.

mod csv;
mod html;
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

/// A format for documents alone: commands whose results are no documents do not have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DocumentFormat {
    /// The raw samples, one in a line.
    Csv,
    /// A page with plots, which needs nothing besides.
    Html,
}

impl DocumentFormat {
    /// Writes the document, with a newline at the end.
    pub fn write(self, document: &Document) -> String {
        match self {
            DocumentFormat::Csv => csv::write(document),
            DocumentFormat::Html => html::write(document),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::document::{Body, Column, Document, Fact, Head, Section, Table, Value, fact};

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

    /// An experiment with two rows and a sample of each, and with texts that formats must escape.
    pub(super) fn experiment(name: &str, metric: &'static str) -> Document {
        let head = |key: &'static str| Head { key: key.into(), head: "", meaning: "" };
        let table = |keys: &[&'static str], rows: Vec<Vec<Value>>| Table {
            heads: keys.iter().copied().map(head).collect(),
            groups: vec![String::new(); rows.len()],
            rows,
        };
        let count = Value::Count;
        let (ns, bytes) = (Value::Ns(5), Value::Bytes(4096));
        let rows = vec![
            vec![
                count(0),
                "pages of 4k".into(),
                "leap, \"auto\"".into(),
                Value::Unknown,
                ns.clone(),
            ],
            vec![count(1), "pages of 4k".into(), "</script>".into(), bytes, Value::Unknown],
        ];
        let samples = vec![
            vec![count(0), count(0), count(1), ns],
            vec![count(1), count(0), count(0), Value::Unknown],
        ];
        let facts = vec![fact("experiment", "", name)];
        let rows = table(&["row", "part", "way", "area_bytes", metric], rows);
        let samples = table(&["row", "round", "place", metric], samples);
        let sections = vec![
            Section::new("", "An <experiment>", Body::Facts(facts)),
            Section::data("rows", Body::Table(rows)),
            Section::data("samples", Body::Table(samples)),
        ];
        Document { sections }
    }

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
