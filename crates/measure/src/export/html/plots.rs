//! Plots: a place that the script draws in, the data for the script, and the numbers as a table.

use std::fmt::Write;

use serde_json::{Value as Json, json};

use super::super::text::text;
use super::escaped;
use crate::document::Value;
use crate::plot::{Axis, Line, Plot, Point, Unit};
use crate::statistics::{extremes, median};

/// Of lines with more points than this, the table has as many stretches, each with its least and its
/// most.
const MOST_LISTED: usize = 100;

/// The element of a plot. `nth` is its number in the data for the script.
pub(super) fn figure(plot: &Plot, nth: usize) -> String {
    let [title, about] = [&plot.title, &plot.about].map(|text| escaped(text));
    format!(
        "<figure data-plot=\"{nth}\">\n<figcaption>{title} <span class=\"about\">{about}</span>\
         </figcaption>\n\
         <div class=\"canvas\" tabindex=\"0\" role=\"group\" aria-roledescription=\"plot\" \
         aria-label=\"{title}\" aria-describedby=\"keys-{nth}\"></div>\n\
         <p class=\"hidden\" id=\"keys-{nth}\">The arrow keys go along the plot and tell its numbers. \
         A table with the same numbers follows.</p>\n\
         <p class=\"readout\" aria-hidden=\"true\">Point at the plot, or use the arrow keys in it, to read \
         its numbers.</p>\n\
         <p class=\"hidden live\" aria-live=\"polite\"></p>\n\
         <ul class=\"lines\" aria-label=\"Lines of the plot\"></ul>\n\
         <details><summary>Numbers of this plot</summary>\n{table}</details>\n</figure>\n",
        table = table(plot, &title),
    )
}

/// The data of a plot, for the script.
pub(super) fn data(plot: &Plot) -> Json {
    let axis = |axis: &Axis| {
        let Axis { label, unit, is_log, names } = axis;
        json!({ "label": label, "unit": unit.key(), "log": is_log, "names": names })
    };
    let point = |point: &Point| {
        let Point { x, y, interval, samples, from } = point;
        json!({ "x": x, "y": y, "interval": interval, "samples": samples, "from": from })
    };
    let line = |line: &Line| {
        let points: Vec<Json> = line.points.iter().map(point).collect();
        json!({
            "name": line.name,
            "level": line.shape == crate::plot::Shape::Level,
            "steps": line.shape == crate::plot::Shape::Steps,
            "theirs": line.is_theirs,
            "shown": line.is_shown,
            "points": points,
        })
    };
    let spans: Vec<Json> =
        plot.spans.iter().map(|span| json!({ "range": span.range, "name": span.name })).collect();
    json!({
        "title": plot.title,
        "x": axis(&plot.x),
        "y": axis(&plot.y),
        "lines": plot.lines.iter().map(line).collect::<Vec<Json>>(),
        "spans": spans,
    })
}

/// A number of an axis in words.
fn number(axis: &Axis, number: f64) -> String {
    let value = match axis.unit {
        Unit::Name => return axis.names.get(number as usize).cloned().unwrap_or_default(),
        Unit::Ns => Value::Ns(number.max(0.0).round() as u64),
        Unit::Bytes => Value::Bytes(number.max(0.0) as u64),
        Unit::PerSecond => Value::PerSecond(number),
        Unit::Share => Value::Share(number),
        Unit::Ratio => Value::Ratio(number),
    };
    text(&value)
}

fn table(plot: &Plot, title: &str) -> String {
    let Plot { x, y, lines, .. } = plot;
    let mut out = String::new();
    let place = if x.label.is_empty() { "at" } else { &x.label };
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Numbers: {title}\">\n<table>\n\
         <caption>{title}; {of}</caption>\n<thead><tr><th scope=\"col\">line</th>\
         <th scope=\"col\">{place}</th><th scope=\"col\">middle</th><th scope=\"col\">interval</th>\
         <th scope=\"col\">least</th><th scope=\"col\">most</th><th scope=\"col\">samples</th></tr>\
         </thead>\n<tbody>\n",
        of = escaped(&y.label),
        place = escaped(place),
    );
    for line in lines {
        if line.points.len() > MOST_LISTED {
            let stretch = line.points.len().div_ceil(MOST_LISTED);
            for points in line.points.chunks(stretch) {
                out += &row(plot, line, &summed_up(points));
            }
            continue;
        }
        for point in &line.points {
            out += &row(plot, line, point);
        }
    }
    out + "</tbody>\n</table>\n</div>\n"
}

/// A stretch of a line as one point, at its end.
fn summed_up(points: &[Point]) -> Point {
    let samples: Vec<f64> = points.iter().map(|point| point.y).collect();
    let x = points.last().and_then(|point| point.x);
    Point { x, y: median(&samples).unwrap_or(f64::NAN), samples, ..Point::default() }
}

fn row(plot: &Plot, line: &Line, point: &Point) -> String {
    let y = |of: f64| number(&plot.y, of);
    let place = point.x.map_or("all".to_owned(), |at| number(&plot.x, at));
    let interval =
        point.interval.map_or("-".to_owned(), |[low, high]| format!("{} to {}", y(low), y(high)));
    let [least, most] = match extremes(&point.samples) {
        Some((least, most)) => [y(least), y(most)],
        None => ["-", "-"].map(str::to_owned),
    };
    let count = match (line.is_theirs, point.samples.len()) {
        (true, _) => "published".to_owned(),
        (false, count) => count.to_string(),
    };
    let cells: String = [place, y(point.y), interval, least, most, count]
        .iter()
        .map(|cell| format!("<td>{}</td>", escaped(cell)))
        .collect();
    format!("<tr><th scope=\"row\">{}</th>{cells}</tr>\n", escaped(&line.name))
}
