//! The doctor's report. The verdict comes first, then one line for each thing that works. The rest
//! follows with reasons and remedies.

use std::collections::HashMap;
use std::fmt::Write;

use pageleap_probe::{FEATURES, Finding, Need, State, Topic, Way};
use serde::Serialize;

use super::Diagnosis;

/// Width at which prose is broken. Lines for the user to type are never broken.
const WIDTH: usize = 118;
/// Column in which the text of a finding begins.
const INDENT: usize = 24;
/// Column in which the details of a finding begin.
const DETAIL: usize = 35;

/// The report as an object. The JSON text has the fields in this order.
#[derive(Serialize)]
pub struct Report<'a> {
    /// Whether the requested leap is possible: a leap of a few pages succeeded, and no limit
    /// prevents one of the requested size.
    leap_possible: bool,
    /// The leap that was asked for.
    demand: DemandJson,
    /// The user for whom the report holds.
    user: &'a str,
    /// The folder whose `/proc` and `/sys` were read; null for those of this machine.
    sysroot: Option<String>,
    /// Whether the doctor tried calls.
    calls_tried: bool,
    /// The `id`s of the findings that make the leap impossible.
    blockers: Vec<&'static str>,
    /// All findings.
    findings: Vec<FindingJson<'a>>,
    /// Each feature of userfaultfd, for each way to open it; null if the doctor tried no calls.
    userfaultfd: Option<Vec<FeatureJson>>,
    #[serde(skip)]
    diagnosis: &'a Diagnosis,
}

#[derive(Serialize)]
struct DemandJson {
    /// Bytes of the region; null means a few pages.
    bytes: Option<u64>,
    /// `4k`, `thp`, `2m` or `1g`.
    page_size: String,
    /// The page size in bytes.
    page_bytes: usize,
}

#[derive(Serialize)]
struct FindingJson<'a> {
    id: &'static str,
    group: &'static str,
    /// `works`, `limited`, `missing` or `unknown`.
    state: &'static str,
    summary: &'a str,
    /// Calls with their results, and files with their contents.
    observed: &'a [String],
    /// Why the state is not `works`; null if no reason is needed.
    reason: Option<&'a str>,
    remedies: Vec<RemedyJson<'a>>,
    /// The function of pageleap that depends on this finding.
    needed_by: &'static str,
}

#[derive(Serialize)]
struct RemedyJson<'a> {
    who: &'static str,
    /// The line to type or to add.
    line: &'a str,
    /// What else the remedy grants, or what it takes away.
    grants: &'a str,
}

#[derive(Serialize)]
struct FeatureJson {
    name: &'static str,
    /// The Linux version that introduced the feature.
    since: &'static str,
    /// Whether the system call offers it.
    call: bool,
    /// Whether `/dev/userfaultfd` offers it.
    device: bool,
    /// Whether the system call with `UFFD_USER_MODE_ONLY` offers it.
    user_mode_only: bool,
}

impl<'a> Report<'a> {
    /// Makes the report of a diagnosis.
    pub fn of(diagnosis: &'a Diagnosis) -> Report<'a> {
        let capabilities = &diagnosis.capabilities;
        let has = |way: Way, bit: u64| {
            capabilities
                .userfaultfd()
                .iter()
                .any(|found| found.way == way && found.features & bit != 0)
        };
        let features = FEATURES.iter().map(|feature| FeatureJson {
            name: feature.name,
            since: feature.since,
            call: has(Way::Call, feature.bit),
            device: has(Way::Device, feature.bit),
            user_mode_only: has(Way::UserMode, feature.bit),
        });
        Report {
            leap_possible: diagnosis.leap_possible(),
            demand: DemandJson {
                bytes: diagnosis.demand.bytes,
                page_size: diagnosis.demand.page.to_string(),
                page_bytes: diagnosis.demand.page.bytes(),
            },
            user: capabilities.user(),
            sysroot: diagnosis.sysroot.as_ref().map(|root| root.display().to_string()),
            calls_tried: capabilities.is_live(),
            blockers: diagnosis.blockers().iter().map(|finding| finding.topic.id()).collect(),
            findings: std::iter::once(&diagnosis.trial)
                .chain(capabilities.findings())
                .map(FindingJson::of)
                .collect(),
            userfaultfd: capabilities.is_live().then(|| features.collect()),
            diagnosis,
        }
    }

    /// The report as one JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings, numbers and lists are JSON")
    }

    /// The report as text for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut told = HashMap::new();
        let blockers = self.diagnosis.blockers();
        let verdict = match (self.leap_possible, self.calls_tried) {
            (true, _) => "yes",
            (false, true) => "no",
            (false, false) => "not tried",
        };
        let demand = self.diagnosis.demand.to_string();
        let demand = demand.strip_prefix('a').unwrap_or(&demand);
        let _ = writeln!(out, "A{demand} is possible here: {verdict}");
        prose(&mut out, "  leap", &self.diagnosis.trial.summary, INDENT);
        prose(&mut out, "  user", self.user, INDENT);
        if let Some(root) = &self.sysroot {
            let calls = if self.calls_tried {
                ""
            } else {
                "; no call was tried, because they may be another machine's"
            };
            prose(&mut out, "  files", &format!("those below {root}{calls}"), INDENT);
        }
        if !blockers.is_empty() {
            let _ = writeln!(out, "\nin the way of it");
            blockers.iter().for_each(|finding| detailed(&mut out, finding, &mut told));
        }
        let rest = |state: State| {
            let blockers = &blockers;
            let findings = self.diagnosis.capabilities.findings().iter();
            findings
                .filter(move |f| f.state == state && !blockers.iter().any(|b| b.topic == f.topic))
        };
        for (state, heading) in [
            (State::Works, "works"),
            (State::Limited, "works with a restriction"),
            (State::Missing, "does not work"),
            (State::Unknown, "not known"),
        ] {
            let mut findings = rest(state).peekable();
            if findings.peek().is_none() {
                continue;
            }
            let _ = writeln!(out, "\n{heading}");
            for finding in findings {
                if state == State::Works {
                    prose(&mut out, &format!("  {}", finding.topic.id()), &finding.summary, INDENT);
                } else {
                    detailed(&mut out, finding, &mut told);
                }
            }
        }
        if let Some(features) = self.userfaultfd.as_ref().filter(|_| self.any_way_opens()) {
            matrix(&mut out, features);
        }
        out
    }

    fn any_way_opens(&self) -> bool {
        self.diagnosis.capabilities.userfaultfd().iter().any(|found| found.opens())
    }
}

impl<'a> FindingJson<'a> {
    fn of(finding: &'a Finding) -> FindingJson<'a> {
        FindingJson {
            id: finding.topic.id(),
            group: finding.topic.group(),
            state: finding.state.text(),
            summary: &finding.summary,
            observed: &finding.observed,
            reason: Some(finding.reason.as_str()).filter(|reason| !reason.is_empty()),
            remedies: finding
                .remedies
                .iter()
                .map(|remedy| RemedyJson {
                    who: remedy.who.text(),
                    line: &remedy.line,
                    grants: &remedy.grants,
                })
                .collect(),
            needed_by: finding.topic.needed_by().text(),
        }
    }
}

/// Writes a finding with all its details. `told` maps each remedy's line that was printed before to
/// the finding above it, so that no line is printed twice.
fn detailed<'a>(out: &mut String, finding: &'a Finding, told: &mut HashMap<&'a str, &'static str>) {
    prose(out, &format!("  {}", finding.topic.id()), &finding.summary, INDENT);
    let pad = " ".repeat(INDENT);
    let mut detail = |label: &str, text: &str| prose(out, &format!("{pad}{label}"), text, DETAIL);
    if !finding.reason.is_empty() {
        detail("why", &finding.reason);
    }
    finding.observed.iter().for_each(|seen| detail("seen", seen));
    let need = finding.topic.needed_by();
    if need != Need::Nothing && finding.topic != Topic::Leap {
        detail("needed by", need.text());
    }
    let mut referred = None;
    for remedy in &finding.remedies {
        let place = *told.entry(&remedy.line).or_insert(finding.topic.id());
        if place != finding.topic.id() {
            if referred.replace(place) != Some(place) {
                let _ = writeln!(out, "{:DETAIL$}as for {place}, above", format!("{pad}remedy"));
            }
            continue;
        }
        let _ = writeln!(out, "{:DETAIL$}{}", format!("{pad}remedy"), remedy.line);
        let mut price = format!("by {}", remedy.who.text());
        if !remedy.grants.is_empty() {
            price += ": ";
            price += &remedy.grants;
        }
        prose(out, "", &price, DETAIL + 2);
    }
}

/// Writes a label, and then text that begins in column `column` and breaks at spaces.
fn prose(out: &mut String, label: &str, text: &str, column: usize) {
    let mut line = format!("{label:column$}");
    if label.chars().count() >= column {
        line.push(' ');
    }
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            line = " ".repeat(column);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

fn matrix(out: &mut String, features: &[FeatureJson]) {
    let mark = |has: bool| if has { "yes" } else { "-" };
    let _ = writeln!(
        out,
        "\n{:24}{:9}{:8}{:18}user mode only",
        "userfaultfd features", "since", "call", "/dev/userfaultfd"
    );
    for feature in features {
        let _ = writeln!(
            out,
            "  {:22}{:9}{:8}{:18}{}",
            feature.name,
            feature.since,
            mark(feature.call),
            mark(feature.device),
            mark(feature.user_mode_only)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_broken_at_spaces_and_keeps_its_column() {
        let mut out = String::new();
        prose(&mut out, "  label", &"word ".repeat(60), 24);
        assert!(out.lines().count() == 4 && out.lines().all(|line| line.len() <= WIDTH), "{out}");
        assert!(
            out.lines().skip(1).all(|line| line.starts_with(&format!("{}word", " ".repeat(24)))),
            "{out}"
        );
        let mut long = String::new();
        prose(&mut long, "", &"x".repeat(300), 24);
        assert_eq!(long.lines().count(), 1);
    }
}
