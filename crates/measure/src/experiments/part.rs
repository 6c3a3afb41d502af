//! The rounds of a scene, and the figures that follow from them.

use super::{Case, Outcome};
use crate::document::Value;
use crate::figures::{human_bytes, plural, three_digits};
use crate::method::{Interval, Method, Placed, Rounds, Turn};
use crate::statistics::{extremes, median};

/// The key of a metric with which results have the time beyond a memcpy of all bytes that were
/// copied: the times that all bytes were copied, retries included.
pub const COPIED: &str = "copied";

/// The rounds of a scene.
#[derive(Debug)]
pub struct Part {
    /// Its heading in tables, such as the page size. Empty: none.
    pub heading: String,
    /// Where it stands among the others, for plots over all parts.
    pub position: Position,
    /// The compared things.
    pub cases: Vec<Case>,
    /// Their results.
    pub rounds: Rounds<Outcome>,
    /// For each case, words with a wrong value after any of its measurements: warm-ups, and rounds
    /// that are not whole, too.
    pub(super) lost: Vec<u64>,
}

/// The position of a part among the others of its experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    /// The size of its pages; `None` if it has several.
    pub page: Option<String>,
    /// The number in which it differs from other parts with such pages: a rate per second, or
    /// bytes. `None` if it differs otherwise.
    pub at: Option<f64>,
}

/// A value over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The median, or the mean if the method asks for it.
    pub middle: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
    /// The interval of the median; `None` after one round.
    pub interval: Option<Interval>,
}

impl Estimate {
    fn of(values: &[f64], method: Method) -> Option<Estimate> {
        let (min, max) = extremes(values)?;
        let mean = || values.iter().sum::<f64>() / values.len() as f64;
        let middle = if method.means { mean() } else { median(values)? };
        // The interval is one of the median, and says nothing of a mean.
        let interval = if method.means { None } else { Interval::of_median(values, method.seed) };
        Some(Estimate { middle, min, max, interval })
    }

    fn half_width(self) -> Option<f64> {
        self.interval?.half_width_of(self.middle)
    }
}

impl Part {
    /// No rounds yet.
    pub fn new(heading: String, cases: Vec<Case>, method: Method) -> Part {
        let (rounds, lost) = (Rounds::new(method, cases.len()), vec![0; cases.len()]);
        Part { heading, position: Position::default(), cases, rounds, lost }
    }

    /// The same part, at this position.
    pub fn at(self, position: Position) -> Part {
        Part { position, ..self }
    }

    /// Whose turn it is; `None` if there are enough rounds.
    pub fn next_turn(&mut self) -> Option<Turn> {
        let cases = &self.cases;
        self.rounds.next(|rounds| Part::widest(cases, rounds))
    }

    /// Adds the outcome of a turn.
    pub fn add(&mut self, turn: Turn, outcome: Outcome) {
        self.lost[turn.thing] += outcome.lost;
        self.rounds.add(outcome);
    }

    /// The widest interval of the values by which cases are compared, as half of its width by its
    /// median: of the ratio of a case that has a base, else of its first metric. `None` if one is
    /// not known.
    pub(super) fn widest(cases: &[Case], rounds: &Rounds<Outcome>) -> Option<f64> {
        let view = View { cases, rounds };
        let width = |case| match view.base(case) {
            Some(base) if base != case => view.ratio(case, base)?.half_width(),
            _ => view.metric(case, 0)?.half_width(),
        };
        let widths: Option<Vec<f64>> = (0..cases.len()).map(width).collect();
        widths?.into_iter().max_by(f64::total_cmp)
    }

    pub(super) fn view(&self) -> View<'_> {
        View { cases: &self.cases, rounds: &self.rounds }
    }

    /// For each case that has lost words, its name and their number.
    pub(super) fn losers(&self) -> Vec<String> {
        let lost = self.cases.iter().zip(&self.lost).filter(|(_, lost)| **lost > 0);
        let said = |(case, lost)| format!("{}, {}: {lost} words lost", self.heading, name(case));
        lost.map(said).collect()
    }

    /// The base of all cases, if they have the same one.
    pub(super) fn common_base(&self) -> Option<usize> {
        let view = self.view();
        let first = view.base(0)?;
        (1..self.cases.len()).all(|case| view.base(case) == Some(first)).then_some(first)
    }

    /// Its heading, with the base if all cases have the same one.
    pub(super) fn title(&self) -> String {
        match self.common_base() {
            Some(base) => format!("{}; ratios to: {}", self.heading, name(&self.cases[base])),
            None => self.heading.clone(),
        }
    }

    /// Words with a wrong value after any measurement.
    pub fn lost(&self) -> u64 {
        self.lost.iter().sum()
    }

    /// How many rounds there are, and the ratios, in words.
    pub fn in_short(&self) -> String {
        let view = self.view();
        let ratio = |case: usize| {
            let base = view.base(case).filter(|base| *base != case)?;
            Some(view.ratio(case, base)?.middle)
        };
        let ratios: Vec<f64> = (0..self.cases.len()).filter_map(ratio).collect();
        let least = ratios.iter().copied().min_by(f64::total_cmp);
        let most = ratios.iter().copied().max_by(f64::total_cmp);
        let rounds = format!("{}: {}", self.heading, plural(self.rounds.count(), "round"));
        match (least, most) {
            (Some(least), Some(most)) => {
                let [least, most] = [least, most].map(three_digits);
                format!("{rounds}, ratios {least} to {most}")
            }
            _ => rounds,
        }
    }
}

/// Cases with their rounds.
pub(super) struct View<'a> {
    pub cases: &'a [Case],
    pub rounds: &'a Rounds<Outcome>,
}

impl View<'_> {
    pub fn numbers(&self, case: usize, metric: usize) -> Vec<f64> {
        let number = |round: &Vec<Placed<Outcome>>| round[case].of.numbers[metric];
        self.rounds.whole().iter().map(number).collect()
    }

    /// A metric over the rounds in which it is known; `None` if no round knows it.
    pub fn metric(&self, case: usize, metric: usize) -> Option<Estimate> {
        self.estimate(self.numbers(case, metric).into_iter())
    }

    /// The estimate of the numbers that are known.
    pub fn estimate(&self, numbers: impl Iterator<Item = f64>) -> Option<Estimate> {
        let known: Vec<f64> = numbers.filter(|number| number.is_finite()).collect();
        Estimate::of(&known, self.rounds.method())
    }

    /// In how many rounds the first metric is known.
    pub fn known(&self, case: usize) -> usize {
        self.numbers(case, 0).iter().filter(|number| number.is_finite()).count()
    }

    /// The case that a case is compared with.
    pub fn base(&self, case: usize) -> Option<usize> {
        self.fastest(&self.cases[case].bases)
    }

    /// The memcpy at rest that a case beside a load is compared with.
    pub fn at_rest(&self, case: usize) -> Option<usize> {
        self.fastest(&self.cases[case].at_rest)
    }

    fn fastest(&self, of: &[usize]) -> Option<usize> {
        let median = |at: &usize| Some((*at, self.metric(*at, 0)?.middle));
        let medians = of.iter().filter_map(median);
        medians.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(at, _)| at)
    }

    /// The ratio of the first metric to that of the base in the same round.
    pub fn ratio(&self, case: usize, base: usize) -> Option<Estimate> {
        self.estimate(self.ratios(case, base).into_iter())
    }

    /// That ratio in each round.
    pub fn ratios(&self, case: usize, base: usize) -> Vec<f64> {
        let pairs = self.numbers(case, 0).into_iter().zip(self.numbers(base, 0));
        pairs.map(|(number, base)| number / base).collect()
    }

    /// The time beyond that of the memcpy at rest in the same round, as often as the metric
    /// `copied` says, as a share of the time of that.
    pub fn beyond(&self, case: usize, copied: usize) -> Option<Estimate> {
        self.estimate(self.all_beyond(case, copied)?.into_iter())
    }

    /// That share in each round.
    pub fn all_beyond(&self, case: usize, copied: usize) -> Option<Vec<f64>> {
        let base = self.numbers(self.at_rest(case)?, 0);
        let copied = self.numbers(case, copied).into_iter().zip(base);
        let pairs = self.numbers(case, 0).into_iter().zip(copied);
        Some(pairs.map(|(time, (copied, base))| time / (copied * base) - 1.0).collect())
    }

    /// Whether people see a case: of several candidates for a base, only those that became one.
    pub fn is_shown(&self, case: usize) -> bool {
        let is_base = |of: usize| [self.base(of), self.at_rest(of)].contains(&Some(case));
        !self.is_candidate(case) || (0..self.cases.len()).any(is_base)
    }

    /// Whether a case is one of several candidates for a base.
    pub fn is_candidate(&self, case: usize) -> bool {
        let candidates = |of: &Case| {
            let mut lists = [&of.bases, &of.at_rest].into_iter();
            lists.any(|list| list.len() > 1 && list.contains(&case))
        };
        self.cases.iter().any(candidates)
    }
}

/// The labels of a case, in short.
pub(super) fn name(case: &Case) -> String {
    words(case.labels.iter())
}

/// The labels in which a case differs from another one.
pub(super) fn difference(case: &Case, other: &Case) -> String {
    let pairs = case.labels.iter().zip(&other.labels);
    words(pairs.filter(|(one, other)| one != other).map(|(label, _)| label))
}

pub(super) fn words<'a>(labels: impl Iterator<Item = &'a Value>) -> String {
    let word = |label: &Value| match label {
        Value::Text(text) if !text.is_empty() => Some(text.clone()),
        Value::Bytes(bytes) => Some(human_bytes(*bytes as f64)),
        _ => None,
    };
    labels.filter_map(word).collect::<Vec<_>>().join(" ")
}

/// Whether a way of this name copies, and moves nothing.
pub(super) fn is_copy(way: &str) -> bool {
    ["memcpy", "copy loop"].iter().any(|copy| way.starts_with(copy))
}
