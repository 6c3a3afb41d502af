//! Cells of tables from summaries of runs, for people and for programs.

use pageleap_measure::document::Value;
use pageleap_measure::figures::three_digits;
use pageleap_measure::statistics::Summary;

/// The median, for people.
pub fn middle(of: Option<Summary>) -> Value {
    of.map_or(Value::Unknown, |of| three_digits(of.median).into())
}

/// The least and the most of any run, for people.
pub fn span(of: Option<Summary>) -> Value {
    let text = |of: Summary| format!("{} to {}", three_digits(of.min), three_digits(of.max));
    of.map_or(Value::Unknown, |of| text(of).into())
}

/// A value of a summary of ratios.
pub fn ratio(of: Option<Summary>, pick: fn(Summary) -> f64) -> Value {
    Value::ratio(of.map(pick))
}

/// A value of a summary of times whose unit has so many nanoseconds.
pub fn ns(of: Option<Summary>, unit_ns: f64, pick: fn(Summary) -> f64) -> Value {
    Value::ns(of.map(|of| (pick(of) * unit_ns) as u64))
}
