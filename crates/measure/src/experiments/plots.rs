//! Plots of an experiment, from its parts and its drawings.

use super::drawing::{Drawing, Of, Over, Published, Theirs};
use super::part::{COPIED, Estimate, Part, View, is_copy};
use super::{About, Case, Unit};
use crate::document::Value;
use crate::figures::{human_bytes, plural};
use crate::plot::{self, Axis, Line, Plot, Point, Shape};

/// With more lines than this, a plot shows only some of them at first.
const MOST_SHOWN: usize = 8;
/// Lines that are shown first, by the beginning of their name: the library's choice, the paper's
/// method, the kernel's ways, and memory that stays.
const SHOWN_FIRST: [&str; 5] = ["auto", "mprotect", "one ", "kernel, ", "none"];

/// The line of copies in a plot over several parts.
const FASTEST: &str = "the fastest copy";

/// The beginning of the name of the level of the base.
const BASE: &str = "the base";

/// A part, with the number of its first row.
#[derive(Clone, Copy)]
struct Numbered<'a> {
    part: &'a Part,
    first: usize,
}

/// All plots of an experiment. Those without points are left out.
pub(super) fn plots(about: &About, parts: &[Part]) -> Vec<Plot> {
    let mut numbered = Vec::new();
    let mut first = 0;
    for part in parts.iter().filter(|part| part.rounds.count() > 0) {
        numbered.push(Numbered { part, first });
        first += part.cases.len();
    }
    let all = about.plots.iter().flat_map(|drawing| {
        let pen = Pen { about, drawing };
        match drawing.over {
            Over::Part(_) => pen.over_parts(&numbered),
            _ => numbered.iter().flat_map(|part| pen.of_part(*part)).collect(),
        }
    });
    all.filter(|plot| plot.lines.iter().any(|line| !line.is_theirs)).collect()
}

/// Draws one drawing of an experiment.
struct Pen<'a> {
    about: &'a About,
    drawing: &'a Drawing,
}

impl Pen<'_> {
    fn metric(&self, key: &str) -> Option<usize> {
        self.about.metrics.iter().position(|metric| metric.key == key)
    }

    /// The unit of the vertical axis, and its name.
    fn quantity(&self) -> (plot::Unit, String) {
        match self.drawing.of {
            Of::Ratio => (plot::Unit::Ratio, "ratio to the base".to_owned()),
            Of::Beyond => (plot::Unit::Share, "time beyond a memcpy".to_owned()),
            Of::Metric(key) => {
                let metric = self.metric(key).map(|at| self.about.metrics[at]);
                let unit = match metric.map(|metric| metric.unit) {
                    Some(Unit::Share) => plot::Unit::Share,
                    Some(Unit::PerSecond) => plot::Unit::PerSecond,
                    _ => plot::Unit::Ns,
                };
                let name = metric.map_or(key, |of| if of.head.is_empty() { key } else { of.head });
                (unit, if unit == plot::Unit::Ns { "time" } else { name }.to_owned())
            }
        }
    }

    /// The point of a case: its numbers of each round, and their middle.
    fn point(&self, of: Numbered<'_>, case: usize, kind: Of, x: Option<f64>) -> Option<Point> {
        let view = of.part.view();
        let (samples, key) = match kind {
            Of::Metric(key) => {
                let metric = self.metric(key)?;
                let column = format!("{key}{}", self.about.metrics[metric].unit.suffix());
                (view.numbers(case, metric), column)
            }
            Of::Ratio => {
                let base = view.base(case).filter(|base| *base != case)?;
                (view.ratios(case, base), "ratio".to_owned())
            }
            Of::Beyond => {
                let copied = self.metric(COPIED)?;
                (view.all_beyond(case, copied)?, "beyond_memcpy_ratio".to_owned())
            }
        };
        let Estimate { middle, interval, .. } = view.estimate(samples.iter().copied())?;
        let samples = samples.into_iter().filter(|sample| sample.is_finite()).collect();
        let interval = interval.map(|of| [of.low, of.high]);
        Some(Point { x, y: middle, interval, samples, from: Some((of.first + case, key)) })
    }

    /// The plots of a part: one, or one for each value of the labels by which they are split.
    fn of_part(&self, of: Numbered<'_>) -> Vec<Plot> {
        let view = of.part.view();
        let shown = (0..view.cases.len()).filter(|case| view.is_shown(*case));
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for case in shown {
            let name = self.words(&view.cases[case], |key| self.drawing.split.contains(&key));
            match groups.iter_mut().find(|(of, _)| *of == name) {
                Some((_, cases)) => cases.push(case),
                None => groups.push((name, vec![case])),
            }
        }
        let plot = |(name, cases): (String, Vec<usize>)| {
            let heading = match name.is_empty() {
                true => of.part.heading.clone(),
                false => format!("{}, {name}", of.part.heading),
            };
            self.plot(of, &cases, &heading)
        };
        groups.into_iter().map(plot).collect()
    }

    /// A plot of some cases of a part.
    fn plot(&self, of: Numbered<'_>, cases: &[usize], heading: &str) -> Plot {
        let (mut lines, x) = match self.drawing.over {
            Over::Label(key) => self.over_label(of, cases, key),
            Over::Metrics(metrics) => self.over_metrics(of, cases, metrics),
            Over::Rows | Over::Part(_) => self.over_rows(of, cases),
        };
        if self.drawing.of == Of::Ratio {
            lines.extend(base_level(&of.part.view(), cases));
        }
        self.finished(lines, x, heading, of.part.position.page.as_deref())
    }

    fn over_label(&self, of: Numbered<'_>, cases: &[usize], key: &str) -> (Vec<Line>, Axis) {
        let view = of.part.view();
        let at = self.about.labels.iter().position(|label| label.key == key);
        let (mut curves, mut levels): (Vec<Line>, Vec<Line>) = (Vec::new(), Vec::new());
        for case in cases {
            let labels = &view.cases[*case].labels;
            let bytes = at.and_then(|at| match labels[at] {
                Value::Bytes(bytes) if !view.is_candidate(*case) => Some(bytes as f64),
                _ => None,
            });
            let Some(point) = self.point(of, *case, self.drawing.of, bytes) else { continue };
            let name = |all: bool| self.words(&view.cases[*case], |of| all || of != key);
            match bytes {
                None => levels.push(line(name(true), Shape::Level, vec![point])),
                Some(_) => add(&mut curves, name(false), point),
            }
        }
        for level in &mut levels {
            if curves.iter().any(|curve| curve.name == level.name) {
                level.name += ", default areas";
            }
        }
        curves.iter_mut().for_each(sort);
        let places = places(&curves);
        let label = at.map_or(key, |at| self.about.labels[at].meaning);
        // Sizes are powers of two: factors count, however few they are.
        let label = label.split(',').next().unwrap_or(label);
        let mut x = Axis::of(label, plot::Unit::Bytes, places.into_iter());
        x.is_log = true;
        curves.extend(levels);
        (curves, x)
    }

    fn over_metrics(
        &self,
        of: Numbered<'_>,
        cases: &[usize],
        metrics: &'static [(&'static str, &'static str)],
    ) -> (Vec<Line>, Axis) {
        let view = of.part.view();
        let curve = |case: &usize| {
            let at = metrics.iter().enumerate();
            let point = |(at, (key, _)): (usize, &(&'static str, &str))| {
                self.point(of, *case, Of::Metric(key), Some(at as f64))
            };
            let points: Vec<Point> = at.filter_map(point).collect();
            let name = self.words(&view.cases[*case], |key| !self.drawing.split.contains(&key));
            (!points.is_empty()).then(|| line(name, Shape::Curve, points))
        };
        let names = metrics.iter().map(|(_, name)| (*name).to_owned()).collect();
        (cases.iter().filter_map(curve).collect(), Axis::named("", names))
    }

    fn over_rows(&self, of: Numbered<'_>, cases: &[usize]) -> (Vec<Line>, Axis) {
        let view = of.part.view();
        let mut lines = Vec::new();
        for case in cases {
            let at = lines.len();
            let Some(point) = self.point(of, *case, self.drawing.of, Some(at as f64)) else {
                continue;
            };
            let name = self.words(&view.cases[*case], |key| !self.drawing.split.contains(&key));
            lines.push(line(format!("{}: {name}", at + 1), Shape::Curve, vec![point]));
        }
        let numbers = (1..=lines.len()).map(|number| number.to_string()).collect();
        (lines, Axis::named("row, by its number in the legend", numbers))
    }

    /// Plots over the positions of parts: one for each page size.
    fn over_parts(&self, parts: &[Numbered<'_>]) -> Vec<Plot> {
        let Over::Part(label) = self.drawing.over else { return Vec::new() };
        let mut pages: Vec<&Option<String>> = Vec::new();
        for of in parts {
            if !pages.contains(&&of.part.position.page) {
                pages.push(&of.part.position.page);
            }
        }
        let plot = |page: &Option<String>| {
            let mut lines: Vec<Line> = Vec::new();
            let of_page = parts.iter().filter(|of| of.part.position.page == *page);
            for of in of_page {
                let Some(at) = of.part.position.at else { continue };
                let view = of.part.view();
                for case in (0..view.cases.len()).filter(|case| view.is_shown(*case)) {
                    let point = self.point(*of, case, self.drawing.of, Some(at));
                    // Which of several copies is the fastest may differ from part to part.
                    let name = match view.is_candidate(case) {
                        true => FASTEST.to_owned(),
                        false => self.words(&view.cases[case], |_| true),
                    };
                    point.into_iter().for_each(|point| add(&mut lines, name.clone(), point));
                }
            }
            lines.iter_mut().for_each(sort);
            let unit = match label {
                "size of the memory" => plot::Unit::Bytes,
                _ => plot::Unit::PerSecond,
            };
            let x = Axis::of(label, unit, places(&lines).into_iter());
            let heading = page.as_ref().map_or(String::new(), |page| format!("pages of {page}"));
            self.finished(lines, x, &heading, page.as_deref())
        };
        pages.into_iter().map(plot).collect()
    }

    /// The plot of these lines, with the published numbers about such pages.
    fn finished(&self, mut lines: Vec<Line>, x: Axis, heading: &str, page: Option<&str>) -> Plot {
        let is_long = lines.len() > MOST_SHOWN && self.drawing.over != Over::Rows;
        for line in &mut lines {
            let begins = |first: &&str| line.name.starts_with(first);
            let is_base = [FASTEST, BASE].iter().any(|base| line.name.starts_with(base));
            let is_copy = is_copy(&line.name) || is_base;
            line.is_shown = !is_long || is_copy || SHOWN_FIRST.iter().any(begins);
        }
        let theirs = self.drawing.theirs.iter();
        let theirs = theirs.filter(|of| page.is_some_and(|page| of.pages.include(page)));
        lines.extend(theirs.map(published));
        let (unit, label) = self.quantity();
        let numbers = lines.iter().flat_map(|line| &line.points);
        let numbers = numbers.flat_map(|point| point.samples.iter().copied().chain([point.y]));
        Plot {
            title: format!("{}: {heading}", self.drawing.title),
            about: self.drawing.about.to_owned(),
            y: Axis::of(label, unit, numbers),
            x,
            lines,
            spans: Vec::new(),
        }
    }

    /// The labels of a case whose key `has`, in words.
    fn words(&self, case: &Case, has: impl Fn(&str) -> bool) -> String {
        let pairs = self.about.labels.iter().zip(&case.labels);
        let word = |(label, value): (&super::Label, &Value)| match value {
            _ if !has(label.key) => None,
            Value::Text(text) if label.key == "writes" => Some(format!("writes: {text}")),
            Value::Text(text) if !text.is_empty() => Some(text.clone()),
            Value::Bytes(bytes) => Some(human_bytes(*bytes as f64)),
            Value::Count(count) => Some(plural(*count as usize, label.head.trim_end_matches('s'))),
            _ => None,
        };
        pairs.filter_map(word).collect::<Vec<_>>().join(", ")
    }
}

fn line(name: String, shape: Shape, points: Vec<Point>) -> Line {
    Line { name, shape, is_theirs: false, is_shown: true, points }
}

/// Adds a point to the line of this name.
fn add(lines: &mut Vec<Line>, name: String, point: Point) {
    match lines.iter_mut().find(|line| line.name == name) {
        Some(line) => line.points.push(point),
        None => lines.push(line(name, Shape::Curve, vec![point])),
    }
}

fn sort(line: &mut Line) {
    let place = |point: &Point| point.x.unwrap_or(f64::NAN);
    line.points.sort_by(|one, other| place(one).total_cmp(&place(other)));
}

/// The places of all points on the horizontal axis.
fn places(lines: &[Line]) -> Vec<f64> {
    lines.iter().flat_map(|line| &line.points).filter_map(|point| point.x).collect()
}

/// The level of the base, whose ratio to itself is 1.
fn base_level(view: &View<'_>, cases: &[usize]) -> Option<Line> {
    let base = view.base(*cases.first()?)?;
    let is_common = cases.iter().all(|case| view.base(*case) == Some(base));
    let name = match is_common {
        true => format!("{BASE}: {}", super::part::name(&view.cases[base])),
        false => format!("{BASE} of each row"),
    };
    Some(line(name, Shape::Level, vec![Point { y: 1.0, ..Point::default() }]))
}

/// Published numbers as a line.
fn published(theirs: &Theirs) -> Line {
    let point = |x, y| Point { x, y, ..Point::default() };
    let (shape, points) = match theirs.numbers {
        Published::Level(level) => (Shape::Level, vec![point(None, level)]),
        Published::At(points) => {
            (Shape::Curve, points.iter().map(|(x, y)| point(Some(*x), *y)).collect())
        }
    };
    Line { name: theirs.words(), shape, is_theirs: true, is_shown: true, points }
}
