//! The main results of an experiment in sentences, the losses included.
//!
//! The subject is `auto`, a leap as the library does it by default. It loses to another way if the
//! interval of the ratio of both, formed within each round, lies on the wrong side of 1.

use super::part::{Estimate, Part, View, is_copy, words};
use super::{About, Case};
use crate::document::{Fact, Value};
use crate::figures::{plural, three_digits};

/// With more findings than this there is one sentence for each page size.
const MOST_SENTENCES: usize = 6;
/// Losses that are named; of the others only the number is.
const MOST_LOSSES: usize = 3;
/// A way that is better by a smaller part of the time, or of the writes, is no loss.
const LEAST_LOSS: f64 = 0.005;
/// Labels that tell ways apart. Cases that differ in others are not compared.
const OF_WAYS: [&str; 4] = ["way", "area_bytes", "threads", "batch_pages"];
/// The way of the sentences.
const AUTO: &str = "auto";

/// The base of experiments in which memory stays.
const STAYS: &str = "none";

/// A result of `auto` among the ways of a part.
struct Finding<'a> {
    part: &'a Part,
    /// Labels that tell it from other findings of the part. May be empty.
    which: String,
    /// Its ratio to the base.
    ratio: Estimate,
    base: String,
    /// Ways that were better, the best one first, each with the ratio of `auto` to it.
    losses: Vec<(String, Estimate)>,
    has_intervals: bool,
}

/// The sentences of a result: of an experiment with this setting and these parts.
pub(super) fn sentences(about: &About, setting: &[Fact], parts: &[Part]) -> Vec<String> {
    let mut all = Vec::new();
    let node = |key: &str| setting.iter().find(|fact| fact.key == key).map(|of| &of.value);
    if let (Some(from), Some(to)) = (node("from"), node("to"))
        && from == to
    {
        all.push(
            "One memory node takes part: leaps go to new frames of the same node, so no time here \
             is a NUMA speed-up."
                .to_owned(),
        );
    }
    let parts = || parts.iter().filter(|part| part.rounds.count() > 0);
    let findings: Vec<Finding<'_>> = parts().flat_map(|part| findings(about, part)).collect();
    let is_more_better = about.more_is_better();
    match findings.len() {
        0 => all.extend(parts().filter_map(|part| extremes(part, is_more_better))),
        1..=MOST_SENTENCES => {
            all.extend(findings.iter().map(|finding| sentence(finding, is_more_better)));
        }
        _ => all.extend(by_pages(&findings, is_more_better)),
    }
    let early = parts().filter(|part| part.rounds.enough().is_none());
    all.extend(early.map(|part| {
        let rounds = plural(part.rounds.count(), "round");
        format!("{}: this was ended early, after {rounds}.", part.heading)
    }));
    all
}

fn text_of<'a>(about: &About, case: &'a Case, key: &str) -> Option<&'a str> {
    let at = about.labels.iter().position(|label| label.key == key)?;
    match &case.labels[at] {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

/// The way of a case, in words.
fn way(about: &About, case: &Case) -> String {
    let pairs = about.labels.iter().zip(&case.labels);
    words(pairs.filter(|(label, _)| OF_WAYS.contains(&label.key)).map(|(_, value)| value))
}

/// The labels that do not tell ways apart.
fn circumstances<'a>(about: &About, case: &'a Case) -> Vec<(&'static str, &'a Value)> {
    let pairs = about.labels.iter().zip(&case.labels);
    let others = pairs.filter(|(label, _)| !OF_WAYS.contains(&label.key));
    others.map(|(label, value)| (label.head, value)).collect()
}

fn findings<'a>(about: &About, part: &'a Part) -> Vec<Finding<'a>> {
    let view = part.view();
    let is_auto = |case: &usize| text_of(about, &view.cases[*case], "way") == Some(AUTO);
    let finding = |case: usize| {
        let base = view.base(case).filter(|base| *base != case)?;
        let ratio = view.ratio(case, base)?;
        let own = circumstances(about, &view.cases[case]);
        let texts = own.iter().filter_map(|(head, value)| match value {
            Value::Text(text) => Some(format!(", {head} {text}")),
            _ => None,
        });
        let threads = view.cases[case].labels.iter().find_map(|label| match label {
            Value::Count(threads) => Some(format!(", {}", plural(*threads as usize, "thread"))),
            _ => None,
        });
        Some(Finding {
            part,
            which: texts.chain(threads).collect(),
            ratio,
            base: way(about, &view.cases[base]),
            losses: losses(about, &view, case, base),
            has_intervals: ratio.interval.is_some(),
        })
    };
    (0..view.cases.len()).filter(is_auto).filter_map(finding).collect()
}

/// Ways under the same circumstances that were better than `case`, with the ratio of `case` to
/// each.
fn losses(about: &About, view: &View<'_>, case: usize, base: usize) -> Vec<(String, Estimate)> {
    let own = circumstances(about, &view.cases[case]);
    let is_more_better = about.more_is_better();
    let is_rival = |other: &usize| {
        let of = &view.cases[*other];
        *other != case
            && *other != base
            && !view.is_candidate(*other)
            && text_of(about, of, "way") != Some(AUTO)
            && !text_of(about, of, "way").is_some_and(is_copy)
            && circumstances(about, of) == own
    };
    let loss = |other: usize| {
        let ratio = view.ratio(case, other)?;
        let is_loss = match (ratio.interval, is_more_better) {
            (Some(interval), false) => interval.low > 1.0,
            (Some(interval), true) => interval.high < 1.0,
            (None, false) => ratio.min > 1.0,
            (None, true) => ratio.max < 1.0,
        };
        let counts = (ratio.middle - 1.0).abs() >= LEAST_LOSS;
        (is_loss && counts).then(|| (way(about, &view.cases[other]), ratio))
    };
    let mut all: Vec<(String, Estimate)> =
        (0..view.cases.len()).filter(is_rival).filter_map(loss).collect();
    all.sort_by(|(_, one), (_, other)| other.middle.total_cmp(&one.middle));
    if is_more_better {
        all.reverse();
    }
    all
}

/// A ratio with its interval.
fn with_interval(of: Estimate) -> String {
    let middle = three_digits(of.middle);
    match of.interval {
        Some(interval) => {
            let [low, high] = [interval.low, interval.high].map(three_digits);
            format!("{middle} ({low} to {high})")
        }
        None => middle,
    }
}

fn sentence(of: &Finding<'_>, is_more_better: bool) -> String {
    let Finding { part, which, ratio, base, losses, has_intervals } = of;
    let heading = format!("{}{which}", part.heading);
    let ratio = with_interval(*ratio);
    let first = match (is_more_better, base.as_str()) {
        (false, STAYS) => {
            format!("{heading}: with a leap by auto it takes {ratio} times as long as without.")
        }
        (false, base) => {
            format!("{heading}: a leap by auto takes {ratio} times as long as {base}.")
        }
        (true, _) => {
            format!("{heading}: with a leap by auto, {ratio} times as much is done as without.")
        }
    };
    let mut named: Vec<String> = losses
        .iter()
        .take(MOST_LOSSES)
        .map(|(name, ratio)| format!("{name}, by a factor of {}", with_interval(*ratio)))
        .collect();
    if losses.len() > MOST_LOSSES {
        named.push(format!("{} more", losses.len() - MOST_LOSSES));
    }
    match (named.is_empty(), has_intervals) {
        (false, true) => format!("{first} It loses to {}.", named.join("; ")),
        (false, false) => format!(
            "{first} It was behind {}, in fewer rounds than an interval needs.",
            named.join("; ")
        ),
        (true, true) => format!("{first} No other way here was better by more than noise."),
        (true, false) => format!("{first} There are fewer rounds than an interval needs."),
    }
}

/// One sentence for each page size.
fn by_pages(findings: &[Finding<'_>], is_more_better: bool) -> Vec<String> {
    let mut pages: Vec<&Option<String>> = Vec::new();
    for finding in findings {
        if !pages.contains(&&finding.part.position.page) {
            pages.push(&finding.part.position.page);
        }
    }
    let of_pages = |page: &Option<String>| {
        let of: Vec<&Finding<'_>> =
            findings.iter().filter(|finding| finding.part.position.page == *page).collect();
        let ratios = of.iter().map(|finding| finding.ratio.middle);
        let least = ratios.clone().fold(f64::INFINITY, f64::min);
        let most = ratios.fold(f64::NEG_INFINITY, f64::max);
        let [least, most] = [least, most].map(three_digits);
        let heading = page.as_ref().map_or(String::new(), |page| format!("pages of {page}: "));
        let count = of.len();
        let is_common = of.iter().all(|finding| finding.base == of[0].base);
        let base = if is_common { of[0].base.as_str() } else { "its base" };
        let than = if is_more_better { "as much is done" } else { "as long" };
        let lost: Vec<&&Finding<'_>> = of.iter().filter(|of| !of.losses.is_empty()).collect();
        let worst = lost.iter().map(|of| (&of.losses[0], of)).max_by(|(one, _), (other, _)| {
            let order = one.1.middle.total_cmp(&other.1.middle);
            if is_more_better { order.reverse() } else { order }
        });
        let few = match of.iter().filter(|finding| !finding.has_intervals).count() {
            0 => "",
            some if some == count => " All cases have fewer rounds than an interval needs.",
            _ => " Some cases have fewer rounds than an interval needs.",
        };
        let losses = worst.map_or(
            match of.iter().all(|finding| finding.has_intervals) {
                true => "No other way was better by more than noise.".to_owned(),
                false => "No other way was ahead in each round.".to_owned(),
            },
            |((name, ratio), of)| {
                format!(
                    "It was behind in {} of them, most to {name} ({}{}), by a factor of {}.",
                    lost.len(),
                    of.part.heading,
                    of.which,
                    with_interval(*ratio)
                )
            },
        );
        format!(
            "{heading}a leap by auto compared with {base}: {least} to {most} times {than}, in \
             {count} cases. {losses}{few}"
        )
    };
    pages.into_iter().map(of_pages).collect()
}

/// The least and the most ratio of a part without `auto`.
fn extremes(part: &Part, is_more_better: bool) -> Option<String> {
    let view = part.view();
    let ratio = |case: usize| {
        let base = view.base(case).filter(|base| *base != case)?;
        let name = |case: usize| super::part::name(&view.cases[case]);
        Some((view.ratio(case, base)?, name(case), name(base)))
    };
    let all: Vec<(Estimate, String, String)> = (0..view.cases.len()).filter_map(ratio).collect();
    let by = |one: &&(Estimate, String, String), other: &&(Estimate, String, String)| {
        one.0.middle.total_cmp(&other.0.middle)
    };
    let (least, most) = (all.iter().min_by(by)?, all.iter().max_by(by)?);
    let heading = &part.heading;
    let one = |(ratio, name, base): &(Estimate, String, String)| {
        let ratio = with_interval(*ratio);
        match is_more_better {
            true => format!("{name} does {ratio} times as much as {base}"),
            false => format!("{name} takes {ratio} times as long as {base}"),
        }
    };
    Some(match all.len() {
        1 => format!("{heading}: {}.", one(most)),
        _ => format!("{heading}: {}, and {}.", one(least), one(most)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::{Outcome, btree, sustained};
    use crate::method::Method;

    /// The sentences on cases with these numbers in all rounds; the first case is the base.
    fn said(about: &About, cases: Vec<(Vec<Value>, f64)>) -> String {
        let (labels, numbers): (Vec<Vec<Value>>, Vec<f64>) = cases.into_iter().unzip();
        let case = |labels| Case { labels, bases: vec![0], at_rest: Vec::new() };
        let cases = labels.into_iter().map(case).collect();
        let mut part = Part::new("all".to_owned(), cases, Method::exactly(6, 0, 1));
        while let Some(turn) = part.next_turn() {
            let mut of = vec![f64::NAN; about.metrics.len()];
            of[0] = numbers[turn.thing];
            part.add(turn, Outcome { numbers: of, lost: 0 });
        }
        sentences(about, &[], &[part]).join(" ")
    }

    fn named(way: &str) -> Vec<Value> {
        vec![way.into(), Value::Unknown, Value::Unknown]
    }

    #[test]
    fn fewer_writes_are_no_shorter_time() {
        let cases = vec![(named("none"), 1.0), (named("mprotect"), 0.74)];
        let said = said(&sustained::ABOUT, cases);
        assert!(said.contains("mprotect does 0.74"), "{said}");
        assert!(said.contains("times as much as none") && !said.contains("long"), "{said}");
    }

    #[test]
    fn a_rival_with_a_size_of_batches_is_one() {
        let rival = vec!["kernel retry, private".into(), Value::Unknown, Value::Count(128)];
        let cases = vec![(named("none"), 10.0), (named("auto"), 30.0), (rival, 20.0)];
        let said = said(&btree::ABOUT, cases);
        assert!(said.contains("It loses to kernel retry, private"), "{said}");
        assert!(said.contains("1.50"), "{said}");
    }
}
