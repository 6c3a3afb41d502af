//! The sections of a document as HTML, the most important ones first.

use std::fmt::Write;

use super::escaped;
use super::plots::figure;
use super::tables::{data_table, facts, legend, table};
use crate::document::{Body, Document, Section};

/// Tables for programs with more rows than this are in the data of the page only.
const MOST_ROWS: usize = 400;

/// Where a document stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// It is the page.
    Page,
    /// It is one of several in the page.
    Part,
}

impl Level {
    /// The headings of its sections.
    fn heading(self) -> &'static str {
        match self {
            Level::Page => "h2",
            Level::Part => "h3",
        }
    }
}

/// The contents of a document: warnings, the results in short, plots, and the rest. Plots are added
/// to `drawn`, for the script.
pub(super) fn contents(
    document: &Document,
    level: Level,
    drawn: &mut Vec<serde_json::Value>,
) -> String {
    let mut out = String::new();
    let first = |section: &&Section| rank(section) < REST;
    let mut all: Vec<&Section> = document.sections.iter().filter(first).collect();
    all.sort_by_key(|section| rank(section));
    all.extend(document.sections.iter().filter(|section| !first(section)));
    let title = super::title(document);
    for section in all {
        if let Body::Documents(documents) = &section.body {
            out += &overview(documents);
        }
        // The title of the document stands above already.
        let is_title = !title.is_empty() && section.title == title;
        let heading = if is_title { "Setting" } else { &section.title };
        out += &one(section, heading, level, drawn);
    }
    out
}

/// The rank of all sections without a place of their own.
const REST: usize = 4;

/// The order of sections.
fn rank(section: &Section) -> usize {
    match (section.key, &section.body) {
        ("losers", _) => 0,
        ("summary", _) => 1,
        ("warnings", _) => 2,
        (_, Body::Plots(_)) => 3,
        _ => REST,
    }
}

fn one(section: &Section, title: &str, level: Level, drawn: &mut Vec<serde_json::Value>) -> String {
    let heading = level.heading();
    let title = escaped(title);
    let mut out = String::new();
    match &section.body {
        Body::Notes(notes) if notes.is_empty() => {}
        Body::Notes(notes) => {
            let (class, title) = match section.key {
                "losers" => ("box bad", "Lost words".to_owned()),
                "warnings" => ("box warn", "Warnings about this machine".to_owned()),
                "summary" => ("box short", "In short".to_owned()),
                _ if title.is_empty() => return out,
                _ => ("", title),
            };
            let class =
                if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
            let _ = writeln!(out, "<section{class}>\n<{heading}>{title}</{heading}>\n<ul>");
            notes.iter().for_each(|note| {
                let _ = writeln!(out, "<li>{}</li>", escaped(note));
            });
            out += "</ul>\n</section>\n";
        }
        Body::Facts(list) if !title.is_empty() => {
            let _ = writeln!(out, "<section>\n<{heading}>{title}</{heading}>");
            out += &facts(list, &section.title);
            out += "</section>\n";
        }
        Body::Facts(_) => {}
        Body::Table(of) if !title.is_empty() => {
            let _ = writeln!(out, "<section>\n<{heading}>{title}</{heading}>");
            out += &table(of, &section.title);
            out += &legend(of);
            out += "</section>\n";
        }
        Body::Table(of) if section.key.is_empty() || of.rows.is_empty() => {}
        Body::Table(of) if of.rows.len() <= MOST_ROWS => {
            let key = escaped(section.key);
            let _ = writeln!(out, "<details>\n<summary>All numbers: {key}</summary>");
            out += &data_table(of, section.key);
            out += "</details>\n";
        }
        Body::Table(of) => {
            let (key, count) = (escaped(section.key), of.rows.len());
            let _ = writeln!(
                out,
                "<p class=\"remark\">{count} lines of {key} are in the data of this page, which the \
                 button at its end saves.</p>"
            );
        }
        Body::Plots(plots) => {
            for plot in plots {
                out += &figure(plot, drawn.len());
                drawn.push(super::plots::data(plot));
            }
        }
        Body::Documents(documents) => out += &several(documents, drawn),
    }
    out
}

/// Several documents.
fn several(documents: &[Document], drawn: &mut Vec<serde_json::Value>) -> String {
    let mut out = String::new();
    for (nth, document) in documents.iter().enumerate() {
        let title = escaped(&super::title(document));
        let _ = writeln!(out, "<section id=\"part-{nth}\">\n<h2>{title}</h2>");
        out += &contents(document, Level::Part, drawn);
        out += "</section>\n";
    }
    out
}

/// Links to several documents, each with its results in short. Sentences that all of them have
/// stand above, once.
fn overview(documents: &[Document]) -> String {
    let all: Vec<Vec<&String>> = documents.iter().map(summary).collect();
    let is_common = |sentence: &&&String| all.iter().all(|of| of.contains(*sentence));
    let common: Vec<&String> =
        all.first().into_iter().flatten().filter(is_common).copied().collect();
    let mut out = String::from("<nav class=\"box short\" aria-label=\"Results in short\">\n");
    out += "<h2>In short</h2>\n<ul>\n";
    for sentence in &common {
        let _ = writeln!(out, "<li>{}</li>", escaped(sentence));
    }
    for (nth, (document, sentences)) in documents.iter().zip(&all).enumerate() {
        let title = escaped(&super::title(document));
        let _ = write!(out, "<li><a href=\"#part-{nth}\">{title}</a>");
        let own = sentences.iter().filter(|sentence| !common.contains(sentence));
        let own: String = own.map(|of| format!("<li>{}</li>\n", escaped(of))).collect();
        if !own.is_empty() {
            let _ = write!(out, "\n<ul>\n{own}</ul>\n");
        }
        out += "</li>\n";
    }
    out + "</ul>\n</nav>\n"
}

/// The results of a document in short.
fn summary(document: &Document) -> Vec<&String> {
    let notes = document.sections.iter().filter_map(|section| match section {
        Section { key: "summary", body: Body::Notes(notes), .. } => Some(notes),
        _ => None,
    });
    notes.flatten().collect()
}
