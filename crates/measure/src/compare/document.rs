//! A comparison as a document.

use super::{Change, Comparison, Copies, Judged, LeftOut, Verdict, WANTED};
use crate::document::{Body, Column, Document, Section, Table, Value, column, fact};
use crate::figures::{percent, plural};
use crate::method::{CONFIDENCE, LEAST_VALUES};

impl Verdict {
    fn key(self) -> &'static str {
        match self {
            Verdict::Slower => "slower",
            Verdict::Faster => "faster",
            Verdict::Unchanged => "unchanged",
        }
    }
}

/// A share with its sign.
fn signed(share: f64) -> String {
    let sign = if share < 0.0 { "-" } else { "+" };
    format!("{sign}{}", percent(share.abs()))
}

fn range(change: Change) -> String {
    let [_, low, high] = change.shares();
    format!("{} to {}", signed(low), signed(high))
}

fn names(files: &[String]) -> Value {
    Value::List(files.iter().map(|name| name.as_str().into()).collect())
}

/// A row with its verdict.
struct Shown<'a> {
    row: &'a Judged,
    verdict: Verdict,
    visible: f64,
    needed: Option<usize>,
}

fn labels(row: &Judged) -> Value {
    let value = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => Value::from(text.as_str()),
        value => value.as_u64().map_or(Value::Unknown, Value::Count),
    };
    Value::Map(row.labels.iter().map(|(key, of)| ((*key).to_owned(), value(of))).collect())
}

fn verdict_of(shown: &Shown<'_>) -> Value {
    match shown.verdict {
        Verdict::Unchanged => "".into(),
        verdict => verdict.key().into(),
    }
}

fn columns<'a>() -> Vec<Column<Shown<'a>>> {
    vec![
        column("experiment", "", "", |of| of.row.experiment.as_str().into()),
        column("part", "", "", |of| of.row.part.as_str().into()),
        column("labels", "", "", |of| labels(of.row)),
        column("", "row", "", |of| of.row.name.as_str().into()),
        column(
            "first_ratio",
            "first",
            "ratio to copies of the same bytes, or another base, in the same round",
            |of| Value::Ratio(of.row.change.first),
        ),
        column("second_ratio", "second", "the same in the second side", |of| {
            Value::Ratio(of.row.change.second)
        }),
        column("change_ratio", "", "", |of| Value::Share(of.row.change.shares()[0])),
        column("change_low_ratio", "", "", |of| Value::Share(of.row.change.shares()[1])),
        column("change_high_ratio", "", "", |of| Value::Share(of.row.change.shares()[2])),
        column("", "change", "second / first - 1", |of| signed(of.row.change.shares()[0]).into()),
        column("", "interval", "of the change; 95 % for all rows together", |of| {
            range(of.row.change).into()
        }),
        column("visible_ratio", "visible", "the least slowdown that would be called one", |of| {
            Value::Share(of.visible)
        }),
        column("time_change_ratio", "", "", |of| Value::Share(of.row.time)),
        column("values", "", "", |of| Value::count(of.row.values)),
        column("values_needed", "", "", |of| of.needed.map_or(Value::Unknown, Value::count)),
        column("first_moved_ratio", "", "", |of| Value::share(of.row.moved[0])),
        column("second_moved_ratio", "", "", |of| Value::share(of.row.moved[1])),
        column("verdict", "", "", |of| of.verdict.key().into()),
        column(
            "",
            "verdict",
            "empty: no change that is more than noise and the margin",
            verdict_of,
        ),
    ]
}

fn of_copies<'a>() -> [Column<&'a Copies>; 10] {
    [
        column("experiment", "", "", |of| of.experiment.as_str().into()),
        column("part", "", "", |of| of.part.as_str().into()),
        column("rows", "", "", |of| {
            Value::List(of.names.iter().map(|name| name.as_str().into()).collect())
        }),
        column("", "base", "", |of| match of.names.as_slice() {
            [one] => one.as_str().into(),
            several => format!("mean of {} copies", several.len()).into(),
        }),
        column("unit", "", "", |of| of.change.unit.suffix().trim_start_matches('_').into()),
        column("first", "first", "", |of| of.change.unit.value(of.change.first)),
        column("second", "second", "", |of| of.change.unit.value(of.change.second)),
        column("change_ratio", "", "", |of| Value::Share(of.change.shares()[0])),
        column("", "change", "", |of| signed(of.change.shares()[0]).into()),
        column("", "interval", "", |of| range(of.change).into()),
    ]
}

impl Comparison {
    /// The document. `files` are the names of the files of each side.
    pub fn document(&self, files: [&[String]; 2]) -> Document {
        // Intervals that lack the drift between runs promise nothing.
        let confidence = self.is_of_runs().then_some(CONFIDENCE);
        let shown: Vec<Shown<'_>> = self.rows.iter().map(|row| self.shown(row)).collect();
        let mut sections = vec![Section::new(
            "",
            "Results before and after a change",
            Body::Facts(vec![
                fact("first", "first", names(files[0])),
                fact("second", "second", names(files[1])),
                fact("margin_ratio", "margin", Value::Share(self.margin))
                    .remark("a change of this share or less is never called one"),
                fact("confidence_ratio", "confidence", Value::share(confidence))
                    .remark("of all rows together"),
            ]),
        )];
        let verdicts = self.verdicts();
        sections.push(Section::new("summary", "In short", Body::Notes(verdicts)));
        let group = |of: &Shown<'_>| format!("{}, {}", of.row.experiment, of.row.part);
        let table = Table::of(&columns(), &shown, group);
        let title = if shown.is_empty() { "" } else { "Rows" };
        sections.push(Section::new("rows", title, Body::Table(table)));
        let copies: Vec<&Copies> = self.copies.iter().collect();
        let group = |of: &&Copies| format!("{}, {}", of.experiment, of.part);
        let title = if copies.is_empty() { "" } else { "The machine: the bases of all rows" };
        sections.push(Section::new(
            "bases",
            title,
            Body::Table(Table::of(&of_copies(), &copies, group)),
        ));
        let title = if self.left_out.is_empty() { "" } else { "Rows that were not compared" };
        sections.push(Section::new("", title, Body::Notes(self.left_out())));
        let left_out = self.left_out.iter().map(LeftOut::to_string).collect();
        sections.push(Section::data("left_out", Body::Notes(left_out)));
        let title = if self.notes.is_empty() { "" } else { "Notes" };
        sections.push(Section::new("notes", title, Body::Notes(self.notes.clone())));
        Document { sections }
    }

    fn shown<'a>(&self, row: &'a Judged) -> Shown<'a> {
        Shown {
            row,
            verdict: row.change.verdict(self.margin),
            visible: row.change.visible(self.margin),
            needed: self.values_needed(row),
        }
    }

    /// The answer in sentences.
    fn verdicts(&self) -> Vec<String> {
        let compared = plural(self.count(), "row");
        let mut said = vec![match (self.with(Verdict::Slower), self.with(Verdict::Faster)) {
            (slower, faster) if slower.is_empty() && faster.is_empty() => {
                format!("{compared} compared: no change is more than noise.")
            }
            (slower, faster) => format!(
                "{compared} compared: {} slower, {} faster, by more than noise.",
                slower.len(),
                faster.len()
            ),
        }];
        let (experiments, rows): (Vec<&LeftOut>, _) =
            self.left_out.iter().partition(|of| of.row.is_empty());
        let counts = [(rows.len(), "row"), (experiments.len(), "experiment")];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let counts: Vec<String> = counts.map(|(count, thing)| plural(*count, thing)).collect();
        if !counts.is_empty() {
            said.push(format!("Not compared: {}; the reasons are below.", counts.join(" and ")));
        }
        said.extend(self.rows.iter().flat_map(Judged::does_less));
        said.extend(self.lost.iter().cloned());
        let largest = self.copies.iter().map(|of| of.change.shares()[0]);
        if let Some(largest) = largest.max_by(|one, other| one.abs().total_cmp(&other.abs())) {
            said.push(format!(
                "The machine: the bases, mostly copies of the same bytes, changed by up to {} \
                 themselves. Rows are compared with these, so this is no change of the rows.",
                signed(largest)
            ));
        }
        said.extend(self.advice());
        said
    }

    /// How smaller changes can be seen.
    fn advice(&self) -> Option<String> {
        if !self.is_of_runs() {
            return Some(format!(
                "A machine drifts over minutes, and fewer than {LEAST_VALUES} runs of each side do \
                 not show that: intervals are too narrow, and only changes of more than {} are \
                 called one. Give several runs by comma, measured in turns: FIRST,FIRST,... \
                 SECOND,SECOND,...",
                percent(self.margin)
            ));
        }
        let is_blind = |row: &&Judged| self.values_needed(row).is_some_and(|of| of > row.values);
        let blind: Vec<&Judged> = self.rows.iter().filter(is_blind).collect();
        let needed = blind.iter().filter_map(|row| self.values_needed(row)).max()?;
        Some(format!(
            "{} could become {} slower, and this number of runs would not show it in 95 % of all \
             cases; about {} of each side would.",
            plural(blind.len(), "row"),
            percent(WANTED),
            plural(needed, "run"),
        ))
    }
}
