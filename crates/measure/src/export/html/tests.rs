use serde_json::Value as Json;

use super::super::tests::{document, experiment};
use super::*;
use crate::document::Section;
use crate::plot::{self, Axis, Line, Plot, Point, Shape, Span};

/// Elements without an end.
const VOID: [&str; 4] = ["meta", "line", "br", "!doctype"];

/// An element of a page: its name, its attributes, and the text until the next tag.
struct Element {
    name: String,
    attributes: String,
    text: String,
}

/// The elements of a page in the order of their beginnings. Each must end where it should.
fn elements(page: &str) -> Vec<Element> {
    let (mut all, mut open): (Vec<Element>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        let tag = &rest[at + 1..];
        let end = tag.find('>').expect("a tag ends");
        let (tag, after) = (&tag[..end], &tag[end + 1..]);
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(
                open.pop().as_deref(),
                Some(name),
                "before: {}",
                &after[..after.len().min(80)]
            );
            continue;
        }
        let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        if ["script", "style"].contains(&name) {
            // Its text has no tags.
            let end = rest.find(&format!("</{name}")).expect("it ends");
            all.push(element(name, attributes, &rest[..end]));
            rest = &rest[end + name.len() + 3..];
            continue;
        }
        let text = rest.split('<').next().unwrap_or_default();
        all.push(element(name, attributes, text));
        if !VOID.contains(&name) {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty(), "{open:?} have no end");
    all
}

fn element(name: &str, attributes: &str, text: &str) -> Element {
    let [name, attributes, text] = [name, attributes, text].map(str::to_owned);
    Element { name, attributes, text }
}

/// The JSON of the script element with this id.
fn json(page: &str, id: &str) -> Json {
    let is_it = |of: &&Element| of.attributes.contains(&format!("id=\"{id}\""));
    serde_json::from_str(&elements(page).iter().find(is_it).expect("it is there").text).unwrap()
}

fn plot() -> Plot {
    let point = Point {
        x: Some(65536.0),
        y: 2.0,
        interval: Some([1.5, 2.5]),
        samples: vec![1.0, 2.0, 3.0],
        from: Some((7, "time_ns".to_owned())),
    };
    let line = |name: &str, shape, is_theirs, point| Line {
        name: name.to_owned(),
        shape,
        is_theirs,
        is_shown: true,
        points: vec![point],
    };
    let level = Point { y: 1.82, ..Point::default() };
    Plot {
        title: "Time </script><script>alert(1)</script>".to_owned(),
        about: String::new(),
        x: Axis::of("size", plot::Unit::Bytes, [65536.0].into_iter()),
        y: Axis::of("time", plot::Unit::Ratio, [1.0, 3.0].into_iter()),
        lines: vec![
            line("a leap & more", Shape::Curve, false, point),
            line("move_pages(), paper, Fig. 2", Shape::Level, true, level),
        ],
        spans: vec![Span { range: [0.0, 1.0], name: "leap".to_owned() }],
    }
}

fn with_plot() -> Document {
    let mut document = experiment("one", "time_ns");
    document.sections.push(Section::data("", Body::Plots(vec![plot()])));
    document
}

#[test]
fn pages_are_well_formed_and_headed() {
    let documents = Body::Documents(vec![with_plot(), with_plot()]);
    let several = Document { sections: vec![Section::new("experiments", "All", documents)] };
    for (document, headings) in [(document(), 1), (with_plot(), 1), (several, 1)] {
        let page = write(&document);
        let all = elements(&page);
        let count = |name: &str| all.iter().filter(|of| of.name == name).count();
        assert_eq!(count("h1"), headings);
        assert_eq!((count("main"), count("title")), (1, 1));
        assert_eq!(count("table"), count("caption"));
        assert!(all.iter().filter(|of| of.name == "th").all(|of| of.attributes.contains("scope=")));
        assert!(page.starts_with("<!doctype html>") && page.contains("lang=\"en\""));
    }
}

#[test]
fn several_results_in_short_stand_first_and_common_sentences_once() {
    let with_summary = |own: &str| {
        let mut document = with_plot();
        let notes = vec!["one node".to_owned(), own.to_owned()];
        document.sections.push(Section::data("summary", Body::Notes(notes)));
        document
    };
    let documents = Body::Documents(vec![with_summary("lost 1"), with_summary("lost 2")]);
    let page = write(&Document { sections: vec![Section::new("experiments", "All", documents)] });
    let all = elements(&page);
    let end = all.iter().position(|of| of.name == "section").unwrap();
    let first: Vec<&str> = all[..end].iter().map(|of| of.text.trim()).collect();
    for sentence in ["one node", "lost 1", "lost 2"] {
        assert_eq!(first.iter().filter(|text| **text == sentence).count(), 1, "{sentence}");
    }
    let links = all.iter().filter(|of| of.attributes.contains("href=\"#part-"));
    assert_eq!(links.count(), 2);
}

#[test]
fn nothing_is_loaded_from_elsewhere() {
    let page = write(&with_plot());
    assert!(page.contains("default-src 'none'"));
    for of in elements(&page) {
        let loads = ["src=", "srcset=", "href=\"h", "href=\"/"];
        assert!(!loads.iter().any(|load| of.attributes.contains(load)), "{}", of.attributes);
        assert!(!["link", "img", "iframe", "base", "object"].contains(&&*of.name), "{}", of.name);
        if ["style", "script"].contains(&&*of.name) {
            let loads = ["url(", "@import", "fetch(", "XMLHttpRequest", "import("];
            assert!(!loads.iter().any(|load| of.text.contains(load)), "{}", of.name);
        }
    }
}

#[test]
fn text_is_never_markup() {
    let page = write(&with_plot());
    assert!(!page.contains("alert(1)</script>") && !page.contains("An <experiment>"));
    assert!(page.contains("An &lt;experiment&gt;") && page.contains("&lt;/script&gt;"));
    // The data still has the texts as they are.
    assert_eq!(json(&page, "result")["rows"][1]["way"], "</script>");
    assert_eq!(json(&page, "plots")[0]["title"], plot().title);
}

#[test]
fn the_page_has_the_whole_result() {
    for document in [document(), with_plot()] {
        let page = write(&document);
        let result: Json = serde_json::from_str(&json::write(&document)).unwrap();
        assert_eq!(json(&page, "result"), result);
    }
    // Each row is in a table, too.
    let page = write(&with_plot());
    let rows = elements(&page).iter().filter(|of| of.text == "pages of 4k").count();
    assert_eq!(rows, 2);
}

#[test]
fn plots_stand_above_a_table_of_their_numbers() {
    let page = write(&with_plot());
    let all = elements(&page);
    let at = |is_it: &dyn Fn(&Element) -> bool| all.iter().position(is_it).unwrap();
    let figure = at(&|of| of.name == "figure");
    let canvas = at(&|of| of.attributes.contains("class=\"canvas\""));
    assert!(figure < canvas && all[canvas].attributes.contains("tabindex=\"0\""));
    assert!(all.iter().any(|of| of.attributes.contains("aria-live")));
    let row = at(&|of| of.text == "a leap &amp; more");
    let cells: Vec<&str> = all[row + 1..row + 7].iter().map(|of| &*of.text).collect();
    assert_eq!(cells, ["64 KiB", "2.00", "1.50 to 2.50", "1.00", "3.00", "3"]);
    let theirs = at(&|of| of.text.starts_with("move_pages()"));
    assert_eq!((&*all[theirs + 1].text, &*all[theirs + 6].text), ("all", "published"));
    let data = json(&page, "plots");
    let point = &data[0]["lines"][0]["points"][0];
    assert_eq!(
        (&point["x"], &point["y"], &point["from"][0]),
        (&65536.0.into(), &2.0.into(), &7.into())
    );
    assert_eq!(point["samples"], serde_json::json!([1.0, 2.0, 3.0]));
    assert_eq!(
        (&data[0]["lines"][1]["theirs"], &data[0]["lines"][1]["level"]),
        (&true.into(), &true.into())
    );
}

#[test]
fn the_version_of_uplot_is_that_of_its_file() {
    assert!(UPLOT_SCRIPT.contains(&format!("(v{UPLOT_VERSION})")));
    assert!(write(&document()).contains("Leon Sorokin"));
}
