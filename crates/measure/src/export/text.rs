//! A document as aligned text for people.
//!
//! Facts stand below their section's title, one in a line, with their remark. Where the remark
//! would get too narrow, it stands below the value. A table has a head, a line for each group of
//! rows, and a legend that explains its heads.

use std::fmt::Write;

use crate::document::{Body, Document, Fact, Head, Section, Table, Value};
use crate::figures::{grouped, human_bytes, human_ns, percent, short, three_digits};

/// Least width of labels, so that values start in one column through most sections.
const LABEL_WIDTH: usize = 22;
/// Values that are wider than this move their remark to the right.
const VALUE_WIDTH: usize = 12;
/// Remarks that would be narrower than this stand below their value.
const NARROWEST_REMARK: usize = 30;
/// Width of the heads in a legend.
const LEGEND_WIDTH: usize = 10;

/// Writes all sections that have a title, an empty line between two. Lines of words fit `width`
/// columns, as long as no single word is longer.
pub(super) fn write(document: &Document, width: usize) -> String {
    let mut out = String::new();
    let is_shown =
        |section: &&Section| !section.title.is_empty() && !matches!(section.body, Body::Plots(_));
    for section in document.sections.iter().filter(is_shown) {
        if !out.is_empty() {
            out.push('\n');
        }
        wrapped(&mut out, width, "", "", &section.title);
        match &section.body {
            Body::Facts(facts) => write_facts(&mut out, facts, width),
            Body::Table(table) => write_table(&mut out, table, width),
            Body::Notes(notes) => {
                notes.iter().for_each(|note| wrapped(&mut out, width, "  ", "  ", note));
            }
            Body::Documents(documents) => {
                for document in documents {
                    out.push('\n');
                    out += &self::write(document, width);
                }
            }
            Body::Plots(_) => {}
        }
    }
    out
}

fn write_facts(out: &mut String, facts: &[Fact], width: usize) {
    let shown: Vec<&Fact> = facts.iter().filter(|fact| !fact.label.is_empty()).collect();
    let widest = shown.iter().map(|fact| fact.label.chars().count()).max().unwrap_or(0);
    let label_width = widest.max(LABEL_WIDTH);
    let value_column = label_width + 4;
    let remark_column = value_column + VALUE_WIDTH + 2;
    for fact in shown {
        let value = text(&fact.value);
        let begin = format!("  {:label_width$}  ", fact.label);
        let below_value = " ".repeat(value_column);
        if fact.remark.is_empty() {
            wrapped(out, width, &begin, &below_value, &value);
        } else if remark_column + NARROWEST_REMARK > width {
            wrapped(out, width, &begin, &below_value, &value);
            wrapped(out, width, &below_value, &below_value, &fact.remark);
        } else {
            let begin = format!("{begin}{value:VALUE_WIDTH$}  ");
            wrapped(out, width, &begin, &" ".repeat(remark_column), &fact.remark);
        }
    }
}

fn write_table(out: &mut String, table: &Table, line_width: usize) {
    let shown: Vec<usize> =
        (0..table.heads.len()).filter(|at| !table.heads[*at].head.is_empty()).collect();
    let heads: Vec<String> = shown.iter().map(|at| table.heads[*at].head.to_owned()).collect();
    let cells = |row: &Vec<Value>| shown.iter().map(|at| tight(&row[*at])).collect();
    let rows: Vec<Vec<String>> = table.rows.iter().map(cells).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&heads]).map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..shown.len()).map(width).collect();
    let is_text: Vec<bool> = shown
        .iter()
        .map(|at| table.rows.iter().all(|row| matches!(row[*at], Value::Text(_))))
        .collect();
    let line = |cells: &[String]| {
        let mut line = String::from(" ");
        for ((cell, width), is_text) in cells.iter().zip(&widths).zip(&is_text) {
            // Writing to a String cannot fail.
            let _ = match is_text {
                true => write!(line, " {cell:<width$} "),
                false => write!(line, " {cell:>width$} "),
            };
        }
        format!("{}\n", line.trim_end())
    };
    *out += &line(&heads);
    let mut group = "";
    for (row, name) in rows.iter().zip(&table.groups) {
        if group != name {
            group = name;
            let _ = writeln!(out, " {name}");
        }
        *out += &line(row);
    }
    legend(out, &table.heads, line_width);
}

fn legend(out: &mut String, heads: &[Head], width: usize) {
    let explained = heads.iter().filter(|head| !head.head.is_empty() && !head.meaning.is_empty());
    for (at, Head { head, meaning, .. }) in explained.enumerate() {
        if at == 0 {
            out.push('\n');
        }
        let begin = format!("  {head:LEGEND_WIDTH$}");
        wrapped(out, width, &begin, &" ".repeat(LEGEND_WIDTH + 2), meaning);
    }
}

/// Writes `begin` and the text, broken at spaces before `width`. Later lines begin with `indent`.
fn wrapped(out: &mut String, width: usize, begin: &str, indent: &str, text: &str) {
    let mut line = begin.to_owned();
    let mut empty = true;
    for word in text.split(' ') {
        if !empty && line.chars().count() + 1 + word.chars().count() > width {
            *out += line.trim_end();
            out.push('\n');
            line = indent.to_owned();
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    *out += line.trim_end();
    out.push('\n');
}

/// A value as people read it.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Unknown => "-".to_owned(),
        Value::Text(text) => text.clone(),
        Value::Flag(flag) => if *flag { "yes" } else { "no" }.to_owned(),
        Value::Count(count) => grouped(*count),
        Value::Ns(ns) => human_ns(*ns),
        Value::ShortNs(ns) => three_digits(*ns as f64 / 1e3),
        Value::FineNs(ns) => human_ns(ns.round() as u64),
        Value::SignedNs(ns) => {
            format!("{}{}", if *ns < 0 { "-" } else { "" }, human_ns(ns.unsigned_abs()))
        }
        Value::Bytes(bytes) => human_bytes(*bytes as f64),
        Value::PerSecond(rate) if rate.is_infinite() => "max".to_owned(),
        Value::PerSecond(rate) => format!("{}/s", short(*rate)),
        Value::Ratio(ratio) => three_digits(*ratio),
        Value::Share(share) => percent(*share),
        Value::List(values) => values.iter().map(text).collect::<Vec<_>>().join(" / "),
        Value::Map(values) => {
            let entries = values.iter().map(|(name, value)| format!("{name}: {}", text(value)));
            entries.collect::<Vec<_>>().join(", ")
        }
    }
}

/// Without the spaces before units, for which tables have no room.
fn tight(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        other => text(other).replace(' ', ""),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::document;
    use super::*;

    #[test]
    fn facts_and_tables_are_aligned_and_explained() {
        let expected = "\
Machine
  Linux                   6.12

The leap
  time                    61.2 ms       from the start of the job
  moved                   50.0 %
  by node                 0: 7
  asked for               max
  job (us)                1235

Engines
  engine    ratio
 4k
  precopy    1.25
 thp
  mprotect   12.5

  ratio     time of the leap / time of a memcpy

Skipped
  no pages of 2m
";
        assert_eq!(write(&document(), 120), expected);
    }

    #[test]
    fn long_text_is_broken_at_spaces_below_its_beginning() {
        let fact = Fact {
            key: "",
            label: "label",
            value: Value::Count(1),
            remark: "word ".repeat(60).trim_end().to_owned(),
        };
        let body = Body::Facts(vec![fact]);
        let document = Document { sections: vec![Section::new("", "Title", body)] };
        let beside = 4 + LABEL_WIDTH + VALUE_WIDTH + 2;
        // On a narrow terminal the remark stands below its value.
        for (width, indent) in [(120, beside), (80, beside), (60, 4 + LABEL_WIDTH)] {
            let text = write(&document, width);
            assert!(text.lines().count() > 4, "{text}");
            for line in text.lines().skip(2) {
                let begin = format!("{}word", " ".repeat(indent));
                assert!(line.starts_with(&begin) && line.len() <= width, "{width}: {text}");
            }
            let longest = text.lines().map(str::len).max();
            assert!(longest > Some(width - 5), "{width}: {text}");
        }
    }
}
