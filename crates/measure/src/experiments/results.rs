//! The results of an experiment: a row for each case, and all samples.
//!
//! A row has the median of each metric, with the least, the most, and the bootstrap interval of the
//! first one. If a case has a base, the row has the ratio of the first metric to that of the base
//! **in the same round**, as the median over the rounds: a round in which the machine is slow
//! makes both slow.

use super::part::{COPIED, Estimate, Part, View, difference};
use super::{About, Metric, Unit, plots, summary};
use crate::document::{Body, Document, Fact, Head, Section, Table, Value, fact};
use crate::figures::{human_ns, percent, plural, short, three_digits};
use crate::method::{CONFIDENCE, Enough, Interval, Method, Placed};

const BEYOND: &str = "time beyond a memcpy at rest of all bytes that were copied, retries included, \
                      in the same round, as a share of its time";

/// All results of an experiment.
#[derive(Debug)]
pub struct Results {
    /// Its properties.
    pub about: &'static About,
    /// Its setting on this machine: bytes, nodes, and the like.
    pub setting: Vec<Fact>,
    /// How often things were to be measured.
    pub method: Method,
    /// The scenes that have at least one whole round.
    pub parts: Vec<Part>,
    /// Cases and scenes that were left out, with reasons, and other remarks.
    pub notes: Vec<String>,
}

/// A row of the table: a case of a part.
struct Row<'a> {
    number: usize,
    /// The heading of its part, such as the page size.
    part: &'a str,
    /// That heading with the base.
    title: String,
    case: usize,
    view: View<'a>,
    /// The number of the first row of its part.
    first: usize,
    lost: u64,
}

impl Results {
    /// How many rounds there are, over all parts.
    pub fn rounds(&self) -> usize {
        self.parts.iter().map(|part| part.rounds.count()).sum()
    }

    /// Words with a wrong value after any measurement.
    pub fn lost(&self) -> u64 {
        self.parts.iter().map(Part::lost).sum()
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        for part in self.parts.iter().filter(|part| part.rounds.count() > 0) {
            let first = rows.len();
            rows.extend((0..part.cases.len()).map(|case| Row {
                number: first + case,
                part: &part.heading,
                title: part.title(),
                case,
                view: part.view(),
                first,
                lost: part.lost[case],
            }));
        }
        rows
    }

    /// The document.
    pub fn document(&self) -> Document {
        let rows = self.rows();
        let mut setting = vec![
            fact("experiment", "", self.about.name),
            fact("figure", "in the paper", self.about.figure),
        ];
        setting.extend(self.setting.iter().cloned());
        let mut sections = vec![Section::new("", self.about.title, Body::Facts(setting))];
        let table = self.table(&rows);
        let mut shown = table.clone();
        // People see no column without any known value.
        for (at, head) in shown.heads.iter_mut().enumerate() {
            if table.rows.iter().all(|row| row[at] == Value::Unknown) {
                head.head = "";
            }
        }
        let mut is_shown = rows.iter().map(|row| row.view.is_shown(row.case));
        shown.rows.retain(|_| is_shown.next() == Some(true));
        let mut is_shown = rows.iter().map(|row| row.view.is_shown(row.case));
        shown.groups.retain(|_| is_shown.next() == Some(true));
        let title = match (rows.is_empty(), self.method.means) {
            (true, _) => "",
            (false, true) => "Means of all rounds, as in the paper",
            (false, false) => "Medians of all rounds",
        };
        sections.push(Section::new("", title, Body::Table(shown)));
        let summary = summary::sentences(self.about, &self.setting, &self.parts);
        sections.push(Section::data("summary", Body::Notes(summary)));
        sections.push(Section::data("", Body::Plots(plots::plots(self.about, &self.parts))));
        sections.push(Section::data("rows", Body::Table(table)));
        sections.push(self.method_section());
        sections.push(Section::data("samples", Body::Table(self.samples(&rows))));
        let losers: Vec<String> = self.parts.iter().flat_map(Part::losers).collect();
        let title = if losers.is_empty() { "" } else { "Lost words" };
        sections.push(Section::new("losers", title, Body::Notes(losers)));
        let title = if self.notes.is_empty() { "" } else { "Notes" };
        sections.push(Section::new("notes", title, Body::Notes(self.notes.clone())));
        Document { sections }
    }

    fn table(&self, rows: &[Row<'_>]) -> Table {
        let mut heads = ["row", "part"].map(data).to_vec();
        let labels = self.about.labels.iter();
        heads.extend(labels.map(|label| shown(label.key, label.head, label.meaning)));
        for (at, metric) in self.about.metrics.iter().enumerate() {
            let key = |of: &str| format!("{}{of}{}", metric.key, metric.unit.suffix());
            heads.push(shown(key(""), metric.head, metric.meaning));
            heads.extend(["_min", "_max", "_low", "_high"].map(|of| data(key(of))));
            if at == 0 {
                heads.push(shown("", "range", "the least and the most of all rounds"));
            }
        }
        // One base of all rows of a part stands in the heading.
        let several = self.parts.iter().any(|part| part.common_base().is_none());
        let of = if several { "of" } else { "" };
        heads.push(shown("", of, "the row that it is compared with"));
        heads.extend(["base_row", "base_rows"].map(data));
        let ratio = "number in the first column of figures / that of the compared row, in the same \
                     round";
        heads.push(shown("ratio", "ratio", ratio));
        heads.extend(["ratio_min", "ratio_max", "ratio_low", "ratio_high"].map(data));
        heads.push(shown(
            "",
            "interval",
            "bootstrap interval of the median ratio (95 %), from six rounds on",
        ));
        if self.parts.iter().flat_map(|part| &part.cases).any(|case| !case.at_rest.is_empty()) {
            heads.push(data("at_rest_row"));
            heads.push(shown("ratio_at_rest", "at-rest", "ratio to the fastest memcpy at rest"));
            let keys = ["min", "max", "low", "high"].map(|of| data(format!("ratio_at_rest_{of}")));
            heads.extend(keys);
        }
        if self.copied().is_some() {
            let key = |of: &str| format!("beyond_memcpy{of}_ratio");
            heads.push(shown(key(""), "beyond", BEYOND));
            heads.extend(["_min", "_max", "_low", "_high"].map(|of| data(key(of))));
        }
        heads.push(data("lost"));
        heads.push(data("rounds"));
        Table {
            heads,
            rows: rows.iter().map(|row| self.cells(row)).collect(),
            groups: rows.iter().map(|row| row.title.clone()).collect(),
        }
    }

    /// The metric that says how often all bytes were copied.
    fn copied(&self) -> Option<usize> {
        self.about.metrics.iter().position(|metric| metric.key == COPIED)
    }

    fn cells(&self, row: &Row<'_>) -> Vec<Value> {
        let view = &row.view;
        let mut cells = vec![Value::count(row.number), row.part.into()];
        cells.extend(view.cases[row.case].labels.iter().cloned());
        for (at, metric) in self.about.metrics.iter().enumerate() {
            let of = view.metric(row.case, at);
            cells.extend(five(of).map(|number| in_unit(number, *metric)));
            if at == 0 {
                cells.push(of.map_or(Value::Unknown, |of| range(of, metric.unit)));
            }
        }
        let base = view.base(row.case).filter(|base| *base != row.case);
        let ratio = base.and_then(|base| view.ratio(row.case, base));
        let cases = view.cases;
        let name = |base: usize| difference(&cases[base], &cases[row.case]);
        cells.push(base.map_or(Value::from(""), |base| name(base).into()));
        cells.push(base.map_or(Value::Unknown, |base| Value::count(row.first + base)));
        let candidates = cases[row.case].bases.iter().map(|base| Value::count(row.first + base));
        cells.push(Value::List(candidates.collect()));
        cells.extend(five(ratio).map(Value::ratio));
        let interval = ratio.and_then(|of| of.interval);
        let text = |of: Interval| format!("{} to {}", three_digits(of.low), three_digits(of.high));
        cells.push(interval.map_or(Value::from(""), |of| text(of).into()));
        if !cases[row.case].at_rest.is_empty() {
            let base = view.at_rest(row.case).filter(|base| *base != row.case);
            let ratio = base.and_then(|base| view.ratio(row.case, base));
            cells.push(base.map_or(Value::Unknown, |base| Value::count(row.first + base)));
            cells.extend(five(ratio).map(Value::ratio));
        }
        if let Some(copied) = self.copied() {
            cells.extend(five(view.beyond(row.case, copied)).map(Value::share));
        }
        cells.push(Value::count(row.lost));
        cells.push(Value::count(view.known(row.case)));
        cells
    }

    fn samples(&self, rows: &[Row<'_>]) -> Table {
        let mut heads: Vec<Head> = ["row", "round", "place"].map(data).into();
        let key = |of: &Metric| format!("{}{}", of.key, of.unit.suffix());
        heads.extend(self.about.metrics.iter().map(|metric| data(key(metric))));
        let mut cells = Vec::new();
        for row in rows {
            for (round, results) in row.view.rounds.whole().iter().enumerate() {
                let Placed { place, of } = &results[row.case];
                let mut line = [row.number, round, *place].map(Value::count).to_vec();
                let numbers = of.numbers.iter().zip(self.about.metrics);
                line.extend(numbers.map(|(number, metric)| metric.unit.value(*number)));
                cells.push(line);
            }
        }
        Table { heads, groups: vec![String::new(); cells.len()], rows: cells }
    }

    fn method_section(&self) -> Section {
        let method = self.method;
        let ended = |part: &Part| {
            let why = part.rounds.enough().map_or("it was ended early", Enough::text);
            let rounds = plural(part.rounds.count(), "round");
            format!("{}: {rounds}; {why}", part.heading)
        };
        let precision = if method.precision > 0.0 { "precision" } else { "" };
        let mut facts = vec![
            fact("middle", "", if method.means { "mean" } else { "median" }),
            fact("warmups", "warm-up rounds", Value::count(method.warmups)),
            fact("least_rounds", "", Value::count(method.least)),
            fact("most_rounds", "", Value::count(method.most)),
            fact("precision_ratio", precision, Value::Share(method.precision)).remark(
                "rounds end when half of each interval is at most this share of its median",
            ),
            fact("limit_ns", "", Value::ns(method.limit.map(|limit| limit.as_nanos() as u64))),
            fact("confidence_ratio", "", Value::Share(CONFIDENCE)),
            fact("seed", "", Value::count(method.seed)),
        ];
        let ended: Vec<Value> = self.parts.iter().map(|part| ended(part).into()).collect();
        facts.push(fact("ended", "", Value::List(ended.clone())));
        facts.extend(ended.into_iter().map(|ended| fact("", "rounds", ended)));
        Section::new("method", "Method", Body::Facts(facts))
    }
}

/// Median, least, most, and both ends of the interval.
fn five(of: Option<Estimate>) -> [Option<f64>; 5] {
    let interval = of.and_then(|of| of.interval);
    [
        of.map(|of| of.middle),
        of.map(|of| of.min),
        of.map(|of| of.max),
        interval.map(|of| of.low),
        interval.map(|of| of.high),
    ]
}

fn in_unit(number: Option<f64>, metric: Metric) -> Value {
    number.map_or(Value::Unknown, |number| metric.unit.value(number))
}

fn range(of: Estimate, unit: Unit) -> Value {
    let text = |number: f64| match unit {
        Unit::Ns | Unit::FineNs => human_ns(number as u64),
        Unit::Share => percent(number),
        Unit::PerSecond => format!("{}/s", short(number)),
    };
    format!("{} to {}", text(of.min), text(of.max)).into()
}

/// A column for programs only.
fn data(key: impl Into<std::borrow::Cow<'static, str>>) -> Head {
    shown(key, "", "")
}

fn shown(
    key: impl Into<std::borrow::Cow<'static, str>>,
    head: &'static str,
    meaning: &'static str,
) -> Head {
    Head { key: key.into(), head, meaning }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::experiments::drawing::TIME_OVER_AREAS;
    use crate::experiments::{Case, Outcome, label, time};
    use crate::export::Format;

    const ABOUT: About = About {
        name: "made-up",
        title: "A made-up experiment",
        figure: "none",
        needs: "nothing",
        takes: "no time",
        labels: &[label("way", "way", ""), label("area_bytes", "area", "")],
        metrics: &[time("time", "time", ""), time("cpu", "CPU", "")],
        plots: &[TIME_OVER_AREAS],
    };

    /// Three cases: two candidates for the base, and one that takes twice as long as the second in
    /// every round, while the machine becomes slower from round to round.
    fn results(rounds: usize, bases: [&[usize]; 3]) -> Results {
        let case = |way: &str, area: Value, bases: &[usize]| Case {
            labels: vec![way.into(), area],
            bases: bases.to_vec(),
            at_rest: Vec::new(),
        };
        let cases = vec![
            case("copy", Value::Bytes(65536), bases[0]),
            case("copy", Value::Bytes(1 << 20), bases[1]),
            case("leap", Value::Unknown, bases[2]),
        ];
        let method = Method::exactly(rounds, 0, 1);
        let mut part = Part::new("pages of 4k".to_owned(), cases, method);
        while let Some(turn) = part.next_turn() {
            let slow = 1.0 + turn.round.unwrap() as f64;
            let ns = slow * [1500.0, 1000.0, 2000.0][turn.thing];
            let lost = u64::from(turn.thing == 2 && turn.round == Some(1));
            part.add(turn, Outcome { numbers: vec![ns, f64::NAN], lost });
        }
        Results {
            about: &ABOUT,
            setting: vec![fact("bytes", "bytes", Value::Bytes(4096))],
            method,
            parts: vec![part],
            notes: vec!["left out: nothing".to_owned()],
        }
    }

    fn json(results: &Results) -> Json {
        serde_json::from_str(&Format::Json.write(&results.document())).unwrap()
    }

    #[test]
    fn ratios_are_to_the_fastest_candidate_in_the_same_round() {
        let results = results(6, [&[0, 1]; 3]);
        let json = json(&results);
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3);
        let leap = &rows[2];
        assert_eq!((leap["way"].as_str(), leap["base_row"].as_u64()), (Some("leap"), Some(1)));
        assert_eq!(
            (&leap["part"], &leap["base_rows"]),
            (&"pages of 4k".into(), &vec![0, 1].into())
        );
        // The times differ by six; no ratio does.
        for key in ["ratio", "ratio_min", "ratio_max", "ratio_low", "ratio_high"] {
            assert_eq!(leap[key], 2.0, "{key}");
        }
        assert_eq!(leap["time_ns"], 7000);
        assert_eq!([&leap["time_min_ns"], &leap["time_max_ns"]], [2000, 12000]);
        assert!(leap["time_low_ns"].as_u64() < leap["time_high_ns"].as_u64());
        assert_eq!((&rows[0]["ratio"], &rows[1]["ratio"]), (&1.5.into(), &Json::Null));
        assert_eq!((&rows[1]["cpu_ns"], &rows[0]["rounds"]), (&Json::Null, &6.into()));
        let part = &results.parts[0];
        assert_eq!(part.in_short(), "pages of 4k: 6 rounds, ratios 1.50 to 2.00");
        let text = Format::WIDE.write(&results.document());
        assert!(text.contains("pages of 4k; ratios to: copy 1 MiB"), "{text}");
        assert!(!text.contains("  of  "), "{text}");
        // People see no candidate that is slower than the base.
        assert!(text.contains(" 1MiB ") && !text.contains(" 64KiB "), "{text}");
    }

    #[test]
    fn plots_have_the_samples_of_their_rows_and_sentences_the_losses() {
        let label = |way: &str, area| vec![way.into(), area];
        let case = |way: &str, area: Value, bases: &[usize]| Case {
            labels: label(way, area),
            bases: bases.to_vec(),
            at_rest: Vec::new(),
        };
        let cases = vec![
            case("memcpy", Value::Bytes(65536), &[0, 1]),
            case("memcpy", Value::Bytes(1 << 20), &[0, 1]),
            case("auto", Value::Unknown, &[0, 1]),
            case("mprotect", Value::Bytes(1 << 20), &[0, 1]),
            case("mprotect", Value::Bytes(65536), &[0, 1]),
            case("precopy", Value::Unknown, &[0, 1]),
            case("memcpy, fresh", Value::Bytes(1 << 20), &[0, 1]),
        ];
        let method = Method::exactly(6, 0, 1);
        let mut part = Part::new("pages of 4k".to_owned(), cases, method);
        while let Some(turn) = part.next_turn() {
            let ns = [1500.0, 1000.0, 2000.0, 1600.0, 3000.0, 1800.0, 900.0][turn.thing];
            part.add(turn, Outcome { numbers: vec![ns, 1.0], lost: 0 });
        }
        let results = Results { parts: vec![part], ..results(0, [&[]; 3]) };
        let plots = plots::plots(results.about, &results.parts);
        assert_eq!(plots.len(), 1);
        let line = |name: &str| plots[0].lines.iter().find(|line| line.name == name).unwrap();
        let places: Vec<Option<f64>> = line("mprotect").points.iter().map(|of| of.x).collect();
        assert_eq!(places, [Some(65536.0), Some(1048576.0)]);
        let point = &line("mprotect").points[1];
        assert_eq!((point.y, &point.samples), (1600.0, &vec![1600.0; 6]));
        assert_eq!(point.from, Some((3, "time_ns".to_owned())));
        // Of the copies only the fastest one is there, and `auto` has no size of its own.
        assert_eq!(line("memcpy, 1 MiB").points[0].x, None);
        assert_eq!(line("auto").points[0].x, None);
        assert_eq!(plots[0].lines.len(), 5);
        let summary = json(&results)["summary"].clone();
        let summary = summary[0].as_str().unwrap();
        assert!(summary.contains("auto takes 2.00 (2.00 to 2.00) times as long"), "{summary}");
        // A copy is no loss, and neither is a slower way.
        let losses = "It loses to mprotect 1 MiB, by a factor of 1.25 (1.25 to 1.25); precopy, by a \
                      factor of 1.11 (1.11 to 1.11).";
        assert!(summary.ends_with(losses), "{summary}");
    }

    #[test]
    fn different_bases_are_named_by_their_difference() {
        let results = results(2, [&[], &[0], &[1]]);
        let text = Format::WIDE.write(&results.document());
        let row = |way: &str| text.lines().find(|line| line.contains(way)).unwrap();
        assert!(row("1MiB").contains(" 64 KiB "), "{text}");
        assert!(row("leap").contains(" copy 1 MiB "), "{text}");
        assert_eq!(json(&results)["rows"][0]["base_row"], Json::Null);
    }

    #[test]
    fn every_sample_is_there_with_its_place_in_the_round() {
        let results = results(4, [&[1]; 3]);
        let samples = json(&results)["samples"].as_array().unwrap().clone();
        assert_eq!(samples.len(), 12);
        for round in 0..4 {
            let of_round = samples.iter().filter(|sample| sample["round"] == round);
            let mut places: Vec<u64> =
                of_round.map(|sample| sample["place"].as_u64().unwrap()).collect();
            places.sort_unstable();
            assert_eq!(places, [0, 1, 2]);
        }
        let last = samples.iter().find(|of| of["row"] == 2 && of["round"] == 3).unwrap();
        assert_eq!((&last["time_ns"], &last["cpu_ns"]), (&8000.into(), &Json::Null));
        assert_eq!((results.rounds(), results.lost()), (4, 1));
        assert_eq!(json(&results)["rows"][2]["lost"], 1);
        assert_eq!(json(&results)["losers"][0], "pages of 4k, leap: 1 words lost");
    }

    #[test]
    fn words_lost_in_a_warm_up_or_an_unfinished_round_count() {
        let labels = vec!["leap".into(), Value::Unknown];
        let case = Case { labels, bases: vec![], at_rest: vec![] };
        let method = Method::exactly(2, 1, 1);
        let mut part = Part::new("all".to_owned(), vec![case.clone(), case], method);
        for lost in [1, 10, 100] {
            let turn = part.next_turn().unwrap();
            part.add(turn, Outcome { numbers: vec![1.0, 1.0], lost });
        }
        assert_eq!((part.rounds.count(), part.lost()), (0, 111));
    }

    #[test]
    fn means_take_the_place_of_medians_if_asked_for() {
        let mut results = results(0, [&[]; 3]);
        let method = Method { means: true, ..Method::exactly(3, 0, 1) };
        let cases = results.parts[0].cases.clone();
        let mut part = Part::new("all".to_owned(), cases, method);
        while let Some(turn) = part.next_turn() {
            let ns = [10.0, 20.0, 90.0][turn.round.unwrap()];
            part.add(turn, Outcome { numbers: vec![ns, 1.0], lost: 0 });
        }
        (results.parts, results.method) = (vec![part], method);
        let json = json(&results);
        assert_eq!(
            (&json["rows"][0]["time_ns"], &json["method"]["middle"]),
            (&40.into(), &"mean".into())
        );
        assert!(Format::WIDE.write(&results.document()).contains("Means of all rounds"));
    }

    #[test]
    fn an_unknown_round_leaves_the_others() {
        let mut results = results(0, [&[]; 3]);
        let cases = results.parts[0].cases.clone();
        let mut part = Part::new("all".to_owned(), cases, Method::exactly(3, 0, 1));
        while let Some(turn) = part.next_turn() {
            let ns = if turn.round == Some(1) && turn.thing == 0 { f64::NAN } else { 5.0 };
            part.add(turn, Outcome { numbers: vec![ns, 1.0], lost: 0 });
        }
        results.parts = vec![part];
        let rows = json(&results)["rows"].clone();
        assert_eq!((&rows[0]["time_ns"], &rows[0]["rounds"]), (&5.into(), &2.into()));
        assert_eq!(rows[1]["rounds"], 3);
    }

    #[test]
    fn the_widest_interval_is_that_of_ratios_where_there_are_any() {
        let widest = |results: &Results| {
            let part = &results.parts[0];
            Part::widest(&part.cases, &part.rounds)
        };
        // The base itself has its time alone, which differs by six.
        assert!(widest(&results(6, [&[1]; 3])).unwrap() > 0.3);
        assert_eq!(widest(&results(5, [&[1]; 3])), None);
        assert_eq!(widest(&results(0, [&[1]; 3])), None);
    }
}
