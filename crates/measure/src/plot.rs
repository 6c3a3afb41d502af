//! Plots without a format: lines of points, with the samples behind each point.
//!
//! A plot is a part of a [`crate::document::Document`]. The experiments say which of their rows
//! become which plot ([`crate::experiments::drawing`]); an exporter draws it, or leaves it out.

/// The unit of an axis. It decides how numbers beside the axis look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// Bytes.
    Bytes,
    /// A rate per second.
    PerSecond,
    /// A part of a whole, from 0 to 1.
    Share,
    /// A quotient.
    Ratio,
    /// The names of the axis, by their index.
    Name,
}

impl Unit {
    /// Its name in the data of a page.
    pub fn key(self) -> &'static str {
        match self {
            Unit::Ns => "ns",
            Unit::Bytes => "bytes",
            Unit::PerSecond => "per_s",
            Unit::Share => "share",
            Unit::Ratio => "ratio",
            Unit::Name => "name",
        }
    }
}

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// The quantity.
    pub label: String,
    /// Its unit.
    pub unit: Unit,
    /// Whether equal distances are equal factors.
    pub is_log: bool,
    /// The names at 0, 1, 2 and so on, for [`Unit::Name`].
    pub names: Vec<String>,
}

/// The least quotient of the largest and the smallest number for a logarithmic axis.
const LOG_FROM: f64 = 20.0;

impl Axis {
    /// An axis for these numbers: a logarithmic one if they differ by a large factor.
    pub fn of(label: impl Into<String>, unit: Unit, numbers: impl Iterator<Item = f64>) -> Axis {
        let (least, most) = numbers
            .filter(|number| number.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), number| {
                (least.min(number), most.max(number))
            });
        let is_log = unit != Unit::Name && least > 0.0 && most / least >= LOG_FROM;
        Axis { label: label.into(), unit, is_log, names: Vec::new() }
    }

    /// An axis with a name at each whole number.
    pub fn named(label: impl Into<String>, names: Vec<String>) -> Axis {
        Axis { label: label.into(), unit: Unit::Name, is_log: false, names }
    }
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// From point to point.
    Curve,
    /// The number of a point holds from the point before to it.
    Steps,
    /// One number for all of the plot. Its point has no place on the horizontal axis.
    Level,
}

/// A point, with the samples whose middle it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Point {
    /// The place on the horizontal axis; `None` for a level.
    pub x: Option<f64>,
    /// The median, or the mean.
    pub y: f64,
    /// The interval of the median.
    pub interval: Option<[f64; 2]>,
    /// The samples, in the order of rounds.
    pub samples: Vec<f64>,
    /// The row of the result's `rows` that it comes from, and the column.
    pub from: Option<(usize, String)>,
}

/// A line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// How it is drawn.
    pub shape: Shape,
    /// A published number of others, measured on another machine.
    pub is_theirs: bool,
    /// Whether it is drawn before the reader chooses lines.
    pub is_shown: bool,
    /// Its points, from left to right.
    pub points: Vec<Point>,
}

/// A stretch of the horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Its beginning and its end.
    pub range: [f64; 2],
    /// Its name.
    pub name: String,
}

/// A plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// The question that it answers.
    pub title: String,
    /// How to read it, in one or two sentences. May be empty.
    pub about: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines.
    pub lines: Vec<Line>,
    /// Stretches of the horizontal axis with names.
    pub spans: Vec<Span>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_is_logarithmic_if_its_numbers_differ_by_a_large_factor() {
        let is_log = |numbers: &[f64]| Axis::of("", Unit::Ns, numbers.iter().copied()).is_log;
        assert!(is_log(&[1.0, 20.0, f64::NAN]));
        assert!(!is_log(&[1.0, 19.0]) && !is_log(&[0.0, 1e9]) && !is_log(&[]));
        assert!(!Axis::of("", Unit::Name, [1.0, 100.0].into_iter()).is_log);
    }
}
