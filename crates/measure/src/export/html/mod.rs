//! A document as one page of HTML, with all that it needs inside: style, script, plots, and the
//! result as JSON. It opens from a disk without a network, and its policy forbids the browser every
//! request.
//!
//! Everything is a real table or list first, so that the page can be read without a script and by a
//! screen reader. The script draws the plots ([`plots`]) above their tables.

mod body;
mod plots;
mod tables;

use self::body::{Level, contents};
use super::json;
use crate::document::{Body, Document, Section, Value};

const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");
const UPLOT_STYLE: &str = include_str!("uplot/uPlot.min.css");
const UPLOT_SCRIPT: &str = include_str!("uplot/uPlot.iife.min.js");
const UPLOT_LICENCE: &str = include_str!("uplot/LICENSE");
/// The version of the library that draws the plots.
pub const UPLOT_VERSION: &str = "1.6.32";

/// Nothing but the contents of the page. The script gives the result as a file by an address of
/// its own memory (`blob:`), which is no request.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      base-uri 'none'; form-action 'none'";

/// Writes the page.
pub(super) fn write(document: &Document) -> String {
    let title = title(document);
    let mut drawn = Vec::new();
    let main = contents(document, Level::Page, &mut drawn);
    let plots = serde_json::Value::from(drawn).to_string();
    let [title, machine] = [title, machine(document)].map(|text| escaped(&text));
    format!(
        "<!doctype html>\n<html lang=\"en\" class=\"no-script\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <title>{title} - pageleap</title>\n<style>{UPLOT_STYLE}</style>\n<style>{STYLE}</style>\n\
         </head>\n<body>\n<header>\n<p class=\"kicker\">pageleap</p>\n<h1>{title}</h1>\n\
         <p class=\"machine\">{machine}</p>\n</header>\n<main>\n{main}</main>\n\
         <footer>\n<p>Written by pageleap {version}. The page has the whole result, with all \
         samples. <button class=\"button\" id=\"save\" hidden>Save the result as JSON</button></p>\n\
         <details><summary>Plots by uPlot {UPLOT_VERSION}: its licence</summary>\
         <pre>{licence}</pre></details>\n</footer>\n\
         <script type=\"application/json\" id=\"result\">{result}</script>\n\
         <script type=\"application/json\" id=\"plots\">{plots}</script>\n\
         <script>{UPLOT_SCRIPT}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        version = env!("CARGO_PKG_VERSION"),
        licence = escaped(UPLOT_LICENCE),
        result = for_script(json::write(document).trim_end()),
        plots = for_script(&plots),
    )
}

/// The title of a document: the fact `title`, or the title of the first section that has one.
fn title(document: &Document) -> String {
    let facts = document.sections.iter().filter_map(|section| match &section.body {
        Body::Facts(facts) if section.key.is_empty() => Some(facts),
        _ => None,
    });
    if let Some(fact) = facts.flatten().find(|fact| fact.key == "title") {
        return super::text::text(&fact.value);
    }
    let titles = document.sections.iter().map(|section| &section.title);
    titles.into_iter().find(|title| !title.is_empty()).cloned().unwrap_or_default()
}

/// The machine in one line.
fn machine(document: &Document) -> String {
    let host = document.sections.iter().find_map(|section| match section {
        Section { key: "host", body: Body::Facts(facts), .. } => Some(facts),
        _ => None,
    });
    let Some(host) = host else { return String::new() };
    let value = |key: &str| host.iter().find(|fact| fact.key == key).map(|fact| &fact.value);
    let text = |key: &str, before: &str| match value(key) {
        None | Some(Value::Unknown) => None,
        Some(value) => Some(format!("{before}{}", super::text::text(value))),
    };
    let nodes = match value("nodes") {
        Some(Value::List(nodes)) if nodes.len() == 1 => Some("one memory node".to_owned()),
        Some(Value::List(nodes)) => Some(format!("{} memory nodes", nodes.len())),
        _ => None,
    };
    let is_virtual = matches!(value("virtual"), Some(Value::Flag(true)));
    let parts = [
        text("cpu_model", ""),
        text("cpus_online", "CPUs "),
        nodes,
        text("kernel", "Linux "),
        is_virtual.then(|| "a virtual machine".to_owned()),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" \u{b7} ")
}

/// Text between tags and in attributes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            other => out.push(other),
        }
    }
    out
}

/// JSON inside a script element, which the first `</script` would end. In JSON, `<` occurs in
/// strings only.
fn for_script(json: &str) -> String {
    json.replace('<', "\\u003c")
}

#[cfg(test)]
mod tests;
