//! The raw samples of a document as CSV: a line for each sample of each experiment.
//!
//! A line has the experiment, the part and the labels of its row, the round, its place in the
//! round, and all metrics, as plain numbers with the unit in the name of the column. Experiments
//! have different labels and metrics: a document with several has the columns of all of them, each
//! once, and a cell without a meaning is empty. So is an unknown value.

use csv::Writer;

use crate::document::{Body, Document, Section, Table, Value};

/// Columns before the metrics that every sample has.
const PLACES: [&str; 3] = ["row", "round", "place"];

/// The samples of one experiment.
struct Samples<'a> {
    experiment: String,
    rows: &'a Table,
    samples: &'a Table,
}

/// Writes a line of heads, and a line for each sample. Documents without samples have heads only.
pub(super) fn write(document: &Document) -> String {
    let all = samples(document);
    let mut heads = vec!["experiment"];
    for of in &all {
        of.labels().for_each(|(_, key)| once(&mut heads, key));
    }
    PLACES.iter().for_each(|key| once(&mut heads, key));
    for of in &all {
        of.samples.heads.iter().for_each(|head| once(&mut heads, &head.key));
    }
    let mut writer = Writer::from_writer(Vec::new());
    let mut line = |cells: &[String]| writer.write_record(cells).expect("memory takes every line");
    line(&heads.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>());
    for of in &all {
        of.lines(&heads).for_each(|cells| line(&cells));
    }
    let bytes = writer.into_inner().expect("memory takes every line");
    String::from_utf8(bytes).expect("cells are text")
}

fn once<'a>(heads: &mut Vec<&'a str>, key: &'a str) {
    if !heads.contains(&key) {
        heads.push(key);
    }
}

/// The samples of all experiments of a document.
fn samples(document: &Document) -> Vec<Samples<'_>> {
    let table = |key: &str| {
        document.sections.iter().find_map(|section| match section {
            Section { key: of, body: Body::Table(table), .. } if *of == key => Some(table),
            _ => None,
        })
    };
    let mut all = Vec::new();
    if let (Some(rows), Some(samples)) = (table("rows"), table("samples")) {
        all.push(Samples { experiment: experiment(document), rows, samples });
    }
    for section in &document.sections {
        if let Body::Documents(documents) = &section.body {
            all.extend(documents.iter().flat_map(samples));
        }
    }
    all
}

/// The name of the experiment of a document.
fn experiment(document: &Document) -> String {
    let facts = document.sections.iter().filter_map(|section| match &section.body {
        Body::Facts(facts) if section.key.is_empty() => Some(facts),
        _ => None,
    });
    let fact = facts.flatten().find(|fact| fact.key == "experiment");
    fact.map_or(String::new(), |fact| cell(&fact.value))
}

impl<'a> Samples<'a> {
    /// The labels of rows: their columns between the number and the first metric.
    fn labels(&self) -> impl Iterator<Item = (usize, &'a str)> + use<'a> {
        let is_metric = |key: &str| {
            !PLACES.contains(&key) && self.samples.heads.iter().any(|head| head.key == key)
        };
        let heads = &self.rows.heads;
        let first = heads.iter().position(|head| is_metric(&head.key)).unwrap_or(heads.len());
        let all = heads[..first].iter().enumerate();
        all.map(|(at, head)| (at, &*head.key)).filter(|(_, key)| !PLACES.contains(key))
    }

    /// The lines, with a cell for each of the heads.
    fn lines<'b>(&'b self, heads: &'b [&str]) -> impl Iterator<Item = Vec<String>> + 'b {
        let place = |table: &Table, key: &str| table.heads.iter().position(|of| of.key == key);
        let labels: Vec<(usize, &str)> = self.labels().collect();
        let number = place(self.samples, "row");
        self.samples.rows.iter().map(move |sample| {
            let row = number.and_then(|at| match sample[at] {
                Value::Count(row) => self.rows.rows.get(row as usize),
                _ => None,
            });
            let of = |head: &&str| {
                if *head == "experiment" {
                    return self.experiment.clone();
                }
                let label = labels.iter().find(|(_, key)| key == head);
                let value = match label {
                    Some((at, _)) => row.map(|row| &row[*at]),
                    None => place(self.samples, head).map(|at| &sample[at]),
                };
                value.map_or(String::new(), cell)
            };
            heads.iter().map(of).collect()
        })
    }
}

/// A value as a plain number or text.
fn cell(value: &Value) -> String {
    match value {
        Value::Unknown | Value::List(_) | Value::Map(_) => String::new(),
        Value::Text(text) => text.clone(),
        Value::Flag(flag) => flag.to_string(),
        Value::Count(number)
        | Value::Ns(number)
        | Value::ShortNs(number)
        | Value::Bytes(number) => number.to_string(),
        Value::SignedNs(number) => number.to_string(),
        Value::FineNs(number)
        | Value::PerSecond(number)
        | Value::Ratio(number)
        | Value::Share(number) => {
            if number.is_finite() {
                number.to_string()
            } else {
                String::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::experiment as made_up;
    use super::*;

    fn lines(document: &Document) -> Vec<Vec<String>> {
        let text = write(document);
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let heads = reader.headers().unwrap().iter().map(str::to_owned).collect();
        let rest = reader.records().map(|line| line.unwrap().iter().map(str::to_owned).collect());
        std::iter::once(heads).chain(rest).collect()
    }

    #[test]
    fn a_sample_has_the_labels_of_its_row() {
        let lines = lines(&made_up("one", "time_ns"));
        let head = ["experiment", "part", "way", "area_bytes", "row", "round", "place", "time_ns"];
        assert_eq!(lines[0], head);
        assert_eq!(lines[1], ["one", "pages of 4k", "leap, \"auto\"", "", "0", "0", "1", "5"]);
        assert_eq!(lines[2], ["one", "pages of 4k", "</script>", "4096", "1", "0", "0", ""]);
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn several_experiments_have_the_columns_of_all() {
        let documents = vec![made_up("one", "time_ns"), made_up("two", "kept_ratio")];
        let sections = vec![Section::new("experiments", "All", Body::Documents(documents))];
        let lines = lines(&Document { sections });
        assert_eq!(lines[0][7..], ["time_ns", "kept_ratio"]);
        assert_eq!(
            (&lines[1][0], &lines[1][7..]),
            (&"one".to_owned(), &["5", ""].map(str::to_owned)[..])
        );
        assert_eq!(
            (&lines[3][0], &lines[3][7..]),
            (&"two".to_owned(), &["", "5"].map(str::to_owned)[..])
        );
    }

    #[test]
    fn a_document_without_samples_has_heads_only() {
        assert_eq!(lines(&Document::default()), [["experiment", "row", "round", "place"]]);
    }
}
