//! Makes section 3 of the manual of `pageleap.h`: a page for the library, and one for each function
//! and type.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use roff::{Inline, Roff, bold, italic, roman};

/// The foot of each page.
const SOURCE: &str = concat!("pageleap ", env!("CARGO_PKG_VERSION"));

/// One function or type of the header.
#[derive(Debug)]
struct Item<'a> {
    name: &'a str,
    /// The comment before it, without the marks.
    comment: String,
    declaration: &'a str,
}

impl Item<'_> {
    fn is_function(&self) -> bool {
        !self.declaration.starts_with("typedef")
    }

    /// The beginning of its comment, as far as it fits a line.
    fn summary(&self) -> String {
        let text = self.comment.replace('\n', " ");
        let end = [". ", ": ", "; "].iter().filter_map(|stop| text.find(stop)).min();
        text[..end.unwrap_or(text.len())].trim_end_matches('.').to_owned()
    }
}

/// A part of the header, between two of its titles.
#[derive(Debug)]
struct Part<'a> {
    title: &'a str,
    items: Vec<Item<'a>>,
}

/// The pages by file name.
pub fn pages(header: &str) -> Result<BTreeMap<String, String>> {
    let (opening, parts) = parse(header)?;
    let all: Vec<&Item> = parts.iter().flat_map(|part| &part.items).collect();
    let mut pages =
        BTreeMap::from([("pageleap.3".to_owned(), overview(&opening, &macros(header), &parts))]);
    for part in &parts {
        for item in &part.items {
            pages.insert(format!("{}.3", item.name), page(item, part, &all));
        }
    }
    Ok(pages)
}

/// The first comment of the header, and what comes after it, part by part.
fn parse(header: &str) -> Result<(String, Vec<Part<'_>>)> {
    let (opening, rest) = header.split_once("*/").context("the header begins with no comment")?;
    let mut parts = Vec::new();
    for text in rest.split("\n/* ---- ").skip(1) {
        let (title, text) = text.split_once('\n').context("a title ends its line")?;
        let title = title.trim_end_matches(['-', '*', '/', ' ']);
        let text = text.split("\n#ifdef").next().unwrap_or_default();
        let mut items = Vec::new();
        for item in text.split("\n/* ").filter(|item| !item.trim().is_empty()) {
            let (comment, declaration) =
                item.split_once("*/\n").context("a comment ends its line")?;
            let declaration = declaration.trim();
            let name = name(declaration).with_context(|| format!("no name in `{declaration}`"))?;
            items.push(Item {
                name,
                comment: uncomment(comment.trim_start_matches("/* ")),
                declaration,
            });
        }
        parts.push(Part { title, items });
    }
    ensure!(!parts.is_empty(), "the header has no parts");
    Ok((uncomment(opening.trim_start_matches("/*")), parts))
}

/// The name that a declaration declares.
fn name(declaration: &str) -> Option<&str> {
    match declaration.strip_prefix("typedef") {
        Some(kind) => kind.trim_end_matches(';').rsplit([' ', '}']).next(),
        None => declaration.split_once('(')?.0.rsplit([' ', '*']).next(),
    }
}

/// A comment without the marks at the beginning of its lines.
fn uncomment(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = line.strip_prefix(" *").unwrap_or(line);
        line.strip_prefix(' ').unwrap_or(line).trim_end()
    });
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

fn title(name: &str) -> Roff {
    let mut page = Roff::new();
    page.control("TH", [name, "3", "", SOURCE, "pageleap's library"]);
    // Names are neither broken nor stretched.
    page.control("nh", []);
    page.control("ad", ["l"]);
    page
}

fn synopsis(page: &mut Roff, declaration: &str) {
    page.control("SH", ["SYNOPSIS"]);
    verbatim(page, ["#include <pageleap.h>", ""].into_iter().chain(declaration.lines()));
}

/// The macros that the header says something about, each once. A comment stands for all macros
/// that follow it without a line in between.
fn macros(header: &str) -> BTreeMap<&str, String> {
    let mut macros = BTreeMap::new();
    for text in header.split("\n/* ").skip(1) {
        let Some((comment, rest)) = text.split_once(" */\n#define ") else { continue };
        let first = rest.split("\n\n").next().unwrap_or_default();
        for definition in first.split("\n#define ") {
            let name = definition.split(|c: char| !c.is_alphanumeric() && c != '_').next();
            macros.extend(name.map(|name| (name, uncomment(comment))));
        }
    }
    macros.retain(|name, _| name.starts_with("PAGELEAP_"));
    macros
}

fn overview(opening: &str, macros: &BTreeMap<&str, String>, parts: &[Part]) -> String {
    let mut page = title("pageleap");
    page.control("SH", ["NAME"]);
    // "pageleap.h - does this. More."
    let text = opening.split_once(" - ").map_or(opening, |(_, text)| text);
    let summary = text.split(".\n").next().unwrap_or(text).replace('\n', " ");
    page.text([roman(format!("pageleap - {summary}"))]);
    synopsis(&mut page, "");
    page.control("PP", []);
    page.text([roman("Compile and link with `pkg-config --cflags --libs pageleap`.")]);
    page.control("SH", ["DESCRIPTION"]);
    prose(&mut page, &(text[..1].to_uppercase() + &text[1..]));
    page.control("SH", ["MACROS"]);
    for (name, meaning) in macros {
        page.control("TP", []);
        page.text([bold(*name)]);
        page.text(names_in_bold(meaning));
    }
    for part in parts {
        page.control("SH", [part.title.to_uppercase().as_str()]);
        for item in &part.items {
            page.control("TP", []);
            page.text([bold(item.name), roman(if item.is_function() { "(3)" } else { "" })]);
            page.text([roman(item.summary())]);
        }
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("pageleap"),
        roman("(1); the header itself, which has the same texts in one piece; "),
        italic("pageleap.hpp"),
        roman(", the same for C++17."),
    ]);
    page.render()
}

fn page(item: &Item, part: &Part, all: &[&Item]) -> String {
    let mut page = title(item.name);
    page.control("SH", ["NAME"]);
    page.text([roman(format!("{} - {}", item.name, item.summary()))]);
    synopsis(&mut page, item.declaration);
    page.control("SH", ["DESCRIPTION"]);
    prose(&mut page, &item.comment);
    if item.declaration.starts_with("pageleap_status") {
        page.control("SH", ["RETURN VALUE"]);
        prose(
            &mut page,
            "PAGELEAP_OK, or the kind of the error, of which pageleap_last_error() has the text. \
             After an error nothing has changed, unless the description says otherwise.",
        );
    }
    let taken: Vec<&Item> = match item.is_function() {
        true => {
            all.iter().copied().filter(|other| !other.is_function() && uses(item, other)).collect()
        }
        false => Vec::new(),
    };
    // Structures to set or to read. Handles have nothing to show, and pageleap_status has a page.
    let mut shown = taken
        .iter()
        .filter(|other| other.declaration.contains('{') && other.name != "pageleap_status")
        .peekable();
    if shown.peek().is_some() {
        page.control("SH", ["TYPES"]);
    }
    for other in shown {
        verbatim(&mut page, other.declaration.lines());
    }
    page.control("SH", ["SEE ALSO"]);
    let neighbours = part.items.iter().filter(|other| other.name != item.name);
    let mut names: Vec<&str> =
        neighbours.chain(taken.iter().copied()).map(|other| other.name).collect();
    names.push("pageleap");
    names.sort_unstable();
    names.dedup();
    let count = names.len();
    for (index, name) in names.into_iter().enumerate() {
        page.text([bold(name), roman(if index + 1 < count { "(3)," } else { "(3)" })]);
    }
    page.render()
}

/// Whether a declaration names another item.
fn uses(item: &Item, other: &Item) -> bool {
    item.declaration
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .any(|word| word == other.name)
}

fn verbatim<'a>(page: &mut Roff, lines: impl Iterator<Item = &'a str>) {
    page.control("PP", []);
    page.control("nf", []);
    for line in lines {
        page.text([roman(line)]);
    }
    page.control("fi", []);
}

/// Writes paragraphs, "- " lists, terms with their meanings ("Errors. Functions ...") and
/// indented code, as the header's comments have them.
fn prose(page: &mut Roff, text: &str) {
    for paragraph in text.split("\n\n") {
        let lines: Vec<&str> = paragraph.lines().collect();
        if lines.iter().all(|line| line.starts_with("    ")) {
            verbatim(page, lines.into_iter());
            continue;
        }
        let mut open = false;
        for line in lines {
            let term =
                line.split_once(".  ").filter(|(term, _)| term.chars().all(char::is_alphabetic));
            if let Some(point) = line.strip_prefix("- ") {
                page.control("IP", ["\u{2022}", "2"]);
                page.text(names_in_bold(point));
            } else if let Some((term, meaning)) = term {
                page.control("TP", []);
                page.text([bold(term)]);
                page.text(names_in_bold(meaning.trim_start()));
            } else {
                if !open {
                    page.control("PP", []);
                }
                page.text(names_in_bold(line.trim_start()));
            }
            open = true;
        }
    }
}

/// A line with functions in bold, as manual pages show them.
fn names_in_bold(line: &str) -> Vec<Inline> {
    let mut inlines = Vec::new();
    let mut rest = line;
    while let Some(start) = rest.find("pageleap_") {
        let length = rest[start..].find(|c: char| !c.is_alphanumeric() && c != '_');
        let (before, after) = rest.split_at(start);
        let (name, after) = after.split_at(length.unwrap_or(after.len()));
        inlines.extend([roman(before), bold(name)]);
        rest = after;
        if let Some(after) = rest.strip_prefix("()") {
            inlines.push(roman("(3)"));
            rest = after;
        }
    }
    inlines.push(roman(rest));
    inlines
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "/*
 * x.h - moves things
 * about.
 *
 * Errors.   Are told:
 *           by pageleap_b().
 */
#define X

/* Two. */
#define PAGELEAP_ONE 1
#define PAGELEAP_TWO \\
    2

/* All
 * of it. */
#define PAGELEAP_ALL(type) ((type){ 0 })

/* ---- First ------- */

/* A handle. It is freed. */
typedef struct pageleap_a pageleap_a;

/* Options.
 *
 * - One,
 *   and a half.
 * - Two. */
typedef struct pageleap_o {
    /* sizeof. */
    size_t size;
} pageleap_o;

/* ---- Second ---- */

/* Does it, unless it
 * cannot. See pageleap_b(). */
pageleap_status pageleap_b(const pageleap_a *a,
    const pageleap_o *o, int (*f)(void));

#ifdef __cplusplus
}
#endif
";

    #[test]
    fn items_have_their_names_and_comments() {
        let (opening, parts) = parse(HEADER).unwrap();
        assert_eq!(
            opening,
            "x.h - moves things\nabout.\n\nErrors.   Are told:\n          by pageleap_b()."
        );
        let found: Vec<_> = parts
            .iter()
            .flat_map(|part| part.items.iter().map(|item| (part.title, item.name, item.summary())))
            .collect();
        assert_eq!(
            found,
            [
                ("First", "pageleap_a", "A handle".to_owned()),
                ("First", "pageleap_o", "Options".to_owned()),
                ("Second", "pageleap_b", "Does it, unless it cannot".to_owned()),
            ]
        );
    }

    #[test]
    fn a_function_has_a_page_with_its_types() {
        let pages = pages(HEADER).unwrap();
        assert_eq!(
            pages.keys().collect::<Vec<_>>(),
            ["pageleap.3", "pageleap_a.3", "pageleap_b.3", "pageleap_o.3"]
        );
        let page = &pages["pageleap_b.3"];
        for wanted in [
            "Does it, unless it\n",
            "\\fBpageleap_b\\fR(3)",
            ".SH TYPES",
            "size_t size;",
            "\\fBpageleap_a\\fR(3),",
        ] {
            assert!(page.contains(wanted), "{wanted}: {page}");
        }
        assert!(!pages["pageleap_a.3"].contains("TYPES"));
        assert_eq!(pages["pageleap_o.3"].matches(".IP").count(), 2);
        assert!(pages["pageleap.3"].contains(".TP\n\\fBPAGELEAP_ALL\\fR\nAll\nof it."));
        assert!(pages["pageleap.3"].contains(".TP\n\\fBPAGELEAP_TWO\\fR\nTwo."));
        assert!(pages["pageleap.3"].contains(".TP\n\\fBErrors\\fR\nAre told:"));
    }

    #[test]
    fn every_item_of_the_header_has_a_page() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let header = crate::header::text(root).unwrap();
        let pages = pages(&header).unwrap();
        let functions = crate::capi::declared(&header);
        let missing: Vec<_> =
            functions.iter().filter(|name| !pages.contains_key(&format!("{name}.3"))).collect();
        assert!(!functions.is_empty() && missing.is_empty(), "{missing:?} have no page");
        let types = header.lines().filter_map(|line| line.strip_prefix("} ")?.strip_suffix(';'));
        assert!(types.clone().count() > 10);
        types.for_each(|name| {
            assert!(pages.contains_key(&format!("{name}.3")), "{name} has no page")
        });
    }
}
