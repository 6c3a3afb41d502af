//! Facts and tables as HTML tables.

use std::fmt::Write;

use super::super::text::text;
use super::escaped;
use crate::document::{Fact, Head, Table, Value};

/// Texts that are longer than this may be broken.
const LONG: usize = 40;

/// A table inside an element that scrolls sideways, which the keyboard reaches.
fn scrolling(name: &str, table: &str) -> String {
    let name = escaped(name);
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{name}\">\n{table}</div>\n"
    )
}

/// Facts for people.
pub(super) fn facts(facts: &[Fact], title: &str) -> String {
    let mut out = String::from("<table class=\"facts\">\n");
    let _ = writeln!(out, "<caption class=\"hidden\">{}</caption>\n<tbody>", escaped(title));
    for fact in facts.iter().filter(|fact| !fact.label.is_empty()) {
        let value = text(&fact.value);
        let class = if value.chars().count() > LONG { " class=\"long\"" } else { "" };
        let [label, value, remark] = [fact.label, &value, &fact.remark].map(escaped);
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\">{label}</th><td{class}>{value}</td><td class=\"remark\">{remark}</td></tr>"
        );
    }
    out + "</tbody>\n</table>\n"
}

/// The columns of a table that people see.
pub(super) fn table(of: &Table, title: &str) -> String {
    let shown: Vec<usize> =
        (0..of.heads.len()).filter(|at| !of.heads[*at].head.is_empty()).collect();
    let name = |head: &Head| head.head.to_owned();
    scrolling(title, &rows(of, &shown, title, name, &|value| text(value)))
}

/// The columns of a table that programs see, by their keys.
pub(super) fn data_table(of: &Table, title: &str) -> String {
    let shown: Vec<usize> =
        (0..of.heads.len()).filter(|at| !of.heads[*at].key.is_empty()).collect();
    let name = |head: &Head| head.key.to_string();
    scrolling(title, &rows(of, &shown, title, name, &plain))
}

fn rows(
    of: &Table,
    shown: &[usize],
    title: &str,
    name: impl Fn(&Head) -> String,
    cell: &dyn Fn(&Value) -> String,
) -> String {
    let is_text = |at: &usize| of.rows.iter().all(|row| matches!(row[*at], Value::Text(_)));
    let is_text: Vec<bool> = shown.iter().map(is_text).collect();
    let mut out = String::from("<table>\n");
    let _ = writeln!(out, "<caption class=\"hidden\">{}</caption>\n<thead><tr>", escaped(title));
    for (at, is_text) in shown.iter().zip(&is_text) {
        let class = if *is_text { " class=\"text\"" } else { "" };
        let _ = write!(out, "<th scope=\"col\"{class}>{}</th>", escaped(&name(&of.heads[*at])));
    }
    out += "</tr></thead>\n<tbody>\n";
    let mut group = "";
    for (row, own) in of.rows.iter().zip(&of.groups) {
        if group != own {
            group = own;
            let (own, wide) = (escaped(own), shown.len());
            let _ = writeln!(
                out,
                "</tbody>\n<tbody>\n<tr><th scope=\"rowgroup\" colspan=\"{wide}\">{own}</th></tr>"
            );
        }
        out += "<tr>";
        for (nth, (at, is_text)) in shown.iter().zip(&is_text).enumerate() {
            let text = escaped(&cell(&row[*at]));
            let _ = match (nth, is_text) {
                (0, _) => write!(out, "<th scope=\"row\">{text}</th>"),
                (_, true) => write!(out, "<td class=\"text\">{text}</td>"),
                (_, false) => write!(out, "<td>{text}</td>"),
            };
        }
        out += "</tr>\n";
    }
    out + "</tbody>\n</table>\n"
}

/// The meanings of heads that need one.
pub(super) fn legend(of: &Table) -> String {
    let explained =
        of.heads.iter().filter(|head| !head.head.is_empty() && !head.meaning.is_empty());
    let lines: String = explained
        .map(|Head { head, meaning, .. }| {
            let [head, meaning] = [*head, *meaning].map(escaped);
            format!("<div><dt>{head}:</dt> <dd>{meaning}</dd></div>\n")
        })
        .collect();
    if lines.is_empty() { lines } else { format!("<dl class=\"legend\">\n{lines}</dl>\n") }
}

/// A value as JSON has it, without quotes.
fn plain(value: &Value) -> String {
    match value {
        Value::Unknown => String::new(),
        Value::Flag(flag) => flag.to_string(),
        Value::Count(number)
        | Value::Ns(number)
        | Value::ShortNs(number)
        | Value::Bytes(number) => number.to_string(),
        Value::SignedNs(number) => number.to_string(),
        Value::FineNs(number)
        | Value::PerSecond(number)
        | Value::Ratio(number)
        | Value::Share(number) => number.to_string(),
        Value::Text(_) | Value::List(_) | Value::Map(_) => text(value),
    }
}
