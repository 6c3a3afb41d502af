//! Results of experiments, read back from the JSON of `bench EXPERIMENT --json` or `bench all`.

use serde_json::{Map, Value as Json};

use crate::experiments::{About, Unit, ways};
use crate::figures::human_bytes;

/// Facts of an experiment that are no part of its setting: its name, and the text on the paper. All
/// other facts are settings. Lists and objects are results, or describe how they came about.
const NO_SETTING: [&str; 2] = ["experiment", "figure"];

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It is no JSON.
    #[error("it is no JSON: {0}")]
    NoJson(#[from] serde_json::Error),
    /// It is JSON of something else.
    #[error(
        "it has no experiment; compare takes files of `bench EXPERIMENT --export-json FILE` or \
         `bench all --export-json FILE`"
    )]
    NoExperiment,
    /// This version knows no such experiment.
    #[error("it has an experiment `{0}`, which this version does not know")]
    Unknown(String),
    /// It has something twice.
    #[error("it has {0} twice, so it is not from one run")]
    Twice(String),
    /// Something is missing.
    #[error(
        "{experiment}: {lacks}; the file is damaged, or of another version: measure again with \
         this one"
    )]
    Lacks {
        /// The experiment.
        experiment: String,
        /// The key, and where it is missing.
        lacks: String,
    },
}

/// A file: results of one experiment, or of several.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub(super) experiments: Vec<Experiment>,
    /// The text that it was read from; empty in tests.
    text: String,
    /// The machine: facts that say whether results are of the same one.
    pub(super) host: Map<String, Json>,
    /// Warnings about the machine.
    pub(super) warnings: Vec<String>,
}

/// Results of an experiment.
#[derive(Clone, Debug)]
pub(super) struct Experiment {
    pub name: String,
    /// Whether more of its first metric is better.
    pub more_is_better: bool,
    /// The unit of that metric.
    pub unit: Unit,
    /// The bytes, the nodes, and the like.
    pub setting: Map<String, Json>,
    pub rows: Vec<Row>,
}

/// A compared thing.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// The heading of its part, such as the page size.
    pub part: String,
    /// Its labels, which tell it from others of its part.
    pub labels: Vec<(&'static str, Json)>,
    /// The rows that it is compared with, by number.
    pub bases: Vec<usize>,
    /// The logarithm of the first metric by round; `None` where it is unknown.
    pub logs: Vec<Option<f64>>,
    /// Words with a wrong value.
    pub lost: u64,
    /// The share of pages that moved, where the experiment has it.
    pub moved: Option<f64>,
}

impl Row {
    /// Its labels, in short.
    pub fn name(&self) -> String {
        let word = |(key, value): &(&str, Json)| match value {
            Json::String(text) if text.is_empty() => None,
            Json::String(text) => Some(text.clone()),
            Json::Number(number) if key.ends_with("_bytes") => number.as_f64().map(human_bytes),
            Json::Number(number) => Some(format!("{key} {number}")),
            _ => None,
        };
        self.labels.iter().filter_map(word).collect::<Vec<_>>().join(" ")
    }

    /// Whether it is a copy loop of the library, whose speed may change with the library.
    pub fn is_of_the_library(&self) -> bool {
        self.way().is_some_and(|way| way.starts_with(ways::COPY_LOOP))
    }

    /// Whether it is a copy of the C library.
    pub fn is_memcpy(&self) -> bool {
        self.way().is_some_and(|way| way.starts_with(ways::MEMCPY))
    }

    fn way(&self) -> Option<&str> {
        self.labels.iter().find(|(key, _)| *key == "way").and_then(|(_, way)| way.as_str())
    }

    /// Whether it is the same thing as a row of another file.
    pub fn is_same(&self, other: &Row) -> bool {
        self.part == other.part && self.labels == other.labels
    }
}

impl Recorded {
    /// Reads the JSON of a run.
    ///
    /// # Errors
    /// It is no such JSON.
    pub fn read(json: &str, abouts: &[&About]) -> Result<Recorded, Unreadable> {
        let text = json.to_owned();
        let json: Json = serde_json::from_str(json)?;
        let mut experiments: Vec<Experiment> = Vec::new();
        match (&json["experiments"], &json["experiment"]) {
            (Json::Array(all), _) => {
                for one in all {
                    experiments.push(Experiment::read(one, abouts)?);
                }
            }
            (_, Json::String(_)) => experiments.push(Experiment::read(&json, abouts)?),
            _ => return Err(Unreadable::NoExperiment),
        }
        for (at, one) in experiments.iter().enumerate() {
            if experiments[..at].iter().any(|other| other.name == one.name) {
                return Err(Unreadable::Twice(format!("the experiment {}", one.name)));
            }
        }
        let warnings = json["warnings"].as_array().into_iter().flatten();
        Ok(Recorded {
            experiments,
            text,
            host: json["host"].as_object().cloned().unwrap_or_default(),
            warnings: warnings.filter_map(|of| of.as_str().map(str::to_owned)).collect(),
        })
    }
}

impl Recorded {
    /// Whether both are the same run, by their text.
    pub fn is_same_run(&self, other: &Recorded) -> bool {
        !self.text.is_empty() && self.text == other.text
    }

    /// Without text, for tests.
    #[cfg(test)]
    pub(super) fn of(experiments: Vec<Experiment>) -> Recorded {
        let (text, host, warnings) = (String::new(), Map::new(), Vec::new());
        Recorded { experiments, text, host, warnings }
    }
}

impl Experiment {
    fn read(json: &Json, abouts: &[&About]) -> Result<Experiment, Unreadable> {
        let name = json["experiment"].as_str().ok_or(Unreadable::NoExperiment)?.to_owned();
        let about = abouts.iter().find(|about| about.name == name);
        let about = about.ok_or_else(|| Unreadable::Unknown(name.clone()))?;
        let lacks = |lacks: String| Unreadable::Lacks { experiment: name.clone(), lacks };
        let array = |key: &str| json[key].as_array().ok_or_else(|| lacks(format!("no `{key}`")));
        let mut rows: Vec<Row> = Vec::new();
        for (at, row) in array("rows")?.iter().enumerate() {
            let of_row = |key: &str| lacks(format!("row {at} has no `{key}`"));
            let mut labels = Vec::new();
            for label in about.labels {
                let value = row.get(label.key).ok_or_else(|| of_row(label.key))?;
                labels.push((label.key, value.clone()));
            }
            let bases = row["base_rows"].as_array().ok_or_else(|| of_row("base_rows"))?;
            let number = |base: &Json| base.as_u64().map(|base| base as usize);
            let bases: Option<Vec<usize>> = bases.iter().map(number).collect();
            rows.push(Row {
                part: row["part"].as_str().ok_or_else(|| of_row("part"))?.to_owned(),
                labels,
                bases: bases.ok_or_else(|| of_row("base_rows"))?,
                logs: Vec::new(),
                lost: row["lost"].as_u64().ok_or_else(|| of_row("lost"))?,
                moved: row["moved_ratio"].as_f64(),
            });
        }
        let metric = about.metrics.first().ok_or_else(|| lacks("no metric".to_owned()))?;
        let key = format!("{}{}", metric.key, metric.unit.suffix());
        for (at, sample) in array("samples")?.iter().enumerate() {
            let number = |key: &str| sample[key].as_u64().map(|number| number as usize);
            let (row, round) = number("row")
                .zip(number("round"))
                .ok_or_else(|| lacks(format!("sample {at} has no `row` or no `round`")))?;
            let row = rows
                .get_mut(row)
                .ok_or_else(|| lacks(format!("sample {at} is of row {row}, which is missing")))?;
            let value = sample.get(&key);
            let value = value.ok_or_else(|| lacks(format!("sample {at} has no `{key}`")))?;
            // Rounds are in order, so a file cannot ask for memory that it does not fill.
            if round != row.logs.len() {
                return Err(lacks(format!("sample {at} is not of the next round of its row")));
            }
            row.logs.push(value.as_f64().filter(|number| *number > 0.0).map(f64::ln));
        }
        let count = rows.len();
        if rows.iter().any(|row| row.bases.iter().any(|base| *base >= count)) {
            return Err(lacks("a row that others are compared with is missing".to_owned()));
        }
        let setting = json.as_object().into_iter().flatten();
        let setting = setting.filter(|(key, value)| {
            !NO_SETTING.contains(&key.as_str()) && !value.is_array() && !value.is_object()
        });
        let setting = setting.map(|(key, value)| (key.clone(), value.clone())).collect();
        for (at, row) in rows.iter().enumerate() {
            if rows[..at].iter().any(|other| other.is_same(row)) {
                return Err(Unreadable::Twice(format!("{name}, {}, {}", row.part, row.name())));
            }
        }
        let (more_is_better, unit) = (about.more_is_better(), metric.unit);
        Ok(Experiment { name, more_is_better, unit, setting, rows })
    }
}
