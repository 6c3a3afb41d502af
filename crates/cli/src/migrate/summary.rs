//! The summary of a move: bytes by outcome and reason.

use std::collections::BTreeMap;

use anyhow::Context;
use pageleap::{BASE_PAGE, Ended, PageOutcome, PageRun, Placement, Reason, Report};
use pageleap_measure::export::Format;
use pageleap_measure::figures::{grouped, human_ns};
use serde::Serialize;

use super::plan::{self, Plan, human};
use crate::output;

/// The most ranges of staying pages that the text lists.
const MOST_SHOWN: usize = 8;
/// The note of each summary.
const POLICY: &str =
    "memory that is touched for the first time later follows the process' own policy";

/// A number of pages in words.
pub(super) fn pages(count: u64) -> String {
    match count {
        1 => "1 page of 4 KB".to_owned(),
        count => format!("{} pages of 4 KB", grouped(count)),
    }
}

/// Pages with the same outcome, for the same reason.
type Groups = BTreeMap<(u8, Option<String>), (PageOutcome, Option<Reason>, u64)>;

fn groups(report: &Report) -> Groups {
    let mut groups = Groups::new();
    for PageRun { range, outcome, reason, .. } in &report.runs {
        let place = match outcome {
            PageOutcome::Migrated => 0,
            PageOutcome::Unchanged => 1,
            PageOutcome::Busy => 2,
            PageOutcome::Failed => 3,
            PageOutcome::NotAttempted => 4,
        };
        let key = (place, reason.map(|reason| reason.to_string()));
        groups.entry(key).or_insert((*outcome, *reason, 0)).2 += range.len() as u64;
    }
    groups
}

fn word(outcome: PageOutcome, reason: Option<Reason>) -> &'static str {
    match (outcome, reason) {
        (PageOutcome::Migrated, _) => "moved",
        (PageOutcome::Unchanged, None) => "needs no move",
        (PageOutcome::Unchanged, Some(Reason::Absent | Reason::Unmapped)) => "not present",
        (PageOutcome::Unchanged, Some(Reason::ProcessEnded | Reason::Uncertain)) => "gone",
        (PageOutcome::Unchanged, Some(_)) => "stays",
        (PageOutcome::Busy, _) => "not moved yet",
        (PageOutcome::Failed, _) => "not moved",
        (PageOutcome::NotAttempted, _) => "not tried",
    }
}

/// The remedy for a reason, in the words of the command.
fn remedy(reason: Option<Reason>) -> &'static str {
    match reason {
        Some(Reason::Shared) => "--shared moves it; --mode insist waits for a forked child",
        Some(Reason::InUse) => "try again later, or --mode insist",
        Some(Reason::NoRoom) => "free memory on the node, or --fill",
        Some(Reason::NoFreeBlock) => "compact the node, or --fill splits it",
        _ => "",
    }
}

#[derive(Serialize)]
struct JsonSummary<'a> {
    processes: Vec<JsonProcess<'a>>,
    target_nodes: Vec<u32>,
    ended: &'static str,
    /// Why pages that were to move have not moved: the first reason.
    error: Option<String>,
    moved_bytes: u64,
    elapsed_ns: u64,
    bytes_per_s: u64,
    outcomes: Vec<JsonOutcome>,
    /// Ranges of pages that were to move and have not moved.
    left: Vec<JsonRun>,
    calls: BTreeMap<&'static str, u64>,
    /// The longest moving call.
    longest_call_ns: u64,
    calls_over_limit: u64,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct JsonProcess<'a> {
    pid: u32,
    name: &'a str,
}

#[derive(Serialize)]
struct JsonOutcome {
    outcome: &'static str,
    reason: Option<String>,
    bytes: u64,
    pages: u64,
}

#[derive(Serialize)]
struct JsonRun {
    pid: u64,
    start: usize,
    end: usize,
    outcome: &'static str,
    reason: Option<String>,
}

/// The summary in a format. Text is wrapped to `columns` columns; `None`: it is not wrapped.
pub(super) fn show(
    report: &Report,
    plans: &[Plan<'_>],
    to: &Placement,
    format: Format,
    columns: Option<usize>,
) -> anyhow::Result<String> {
    match format {
        Format::Json => {
            let summary = json(report, plans, to);
            let text = serde_json::to_string(&summary);
            Ok(text.context("the summary could not be written")? + "\n")
        }
        Format::Text { .. } => Ok(text(report, plans, columns)),
    }
}

/// Bytes per second of the whole move.
fn rate(moved: u64, took_ns: u64) -> u64 {
    (moved as f64 / (took_ns.max(1) as f64 / 1e9)) as u64
}

/// The first line of the text: how the move ended, its time and its rate.
fn first_line(ended: &Ended, moved: u64, took_ns: u64) -> String {
    let how = match ended {
        Ended::Cancelled => "interrupted",
        Ended::TimedOut => "the time was up",
        _ => "done",
    };
    let took = human_ns(took_ns);
    match moved {
        0 => format!("{how} after {took}\n"),
        _ => format!("{how} after {took}, {} per second\n", human(rate(moved, took_ns))),
    }
}

fn text(report: &Report, plans: &[Plan<'_>], columns: Option<usize>) -> String {
    let mut out = String::new();
    let moved = report.pages.migrated * BASE_PAGE as u64;
    out += &first_line(&report.ended, moved, report.migrate_ns);
    for plan in plans {
        out += &format!("  {} ({})\n", plan.memory.name, plan.memory.pid);
    }
    let mut rows = vec![["", "bytes", "pages of 4 KB"].map(str::to_owned).to_vec()];
    let mut whys = vec!["why".to_owned()];
    for ((_, why), (outcome, reason, bytes)) in groups(report) {
        let pages = grouped(bytes / BASE_PAGE as u64);
        rows.push(vec![word(outcome, reason).to_owned(), human(bytes), pages]);
        whys.push(match (why, remedy(reason)) {
            (Some(why), "") => why,
            (Some(why), remedy) => format!("{why} ({remedy})"),
            (None, _) => String::new(),
        });
    }
    for (row, why) in output::aligned(&rows, "  ", |column, _| column == 0).lines().zip(whys) {
        out += &output::hanging(&format!("{row}  "), &why, columns);
    }
    let staying: Vec<&PageRun> = report.runs.iter().filter(|run| is_staying(run)).collect();
    for run in staying.iter().take(MOST_SHOWN) {
        let (start, end) = (run.range.start, run.range.end);
        let why = run.reason.map_or_else(String::new, |reason| reason.to_string());
        out += &output::hanging(&format!("  {}: {start:x}-{end:x}: ", run.source), &why, columns);
    }
    if staying.len() > MOST_SHOWN {
        out += &format!("  ... and {} more ranges (--json has all)\n", staying.len() - MOST_SHOWN);
    }
    let calls = report.calls.get("move_pages").copied().unwrap_or(0);
    if calls > 0 {
        out += &format!(
            "  {} calls, the longest took {}; {} took longer than --max-call\n",
            grouped(calls),
            human_ns(report.windows.max_ns),
            report.counts.windows_over_budget
        );
    }
    for note in warnings(report, plans).into_iter().chain([POLICY.to_owned()]) {
        out += &output::hanging("note: ", &note, columns);
    }
    out
}

/// Warnings of the report, and those about each process.
fn warnings(report: &Report, plans: &[Plan<'_>]) -> Vec<String> {
    let of_processes = plans.iter().flat_map(Plan::warnings);
    report.warnings.iter().map(|warning| warning.text.clone()).chain(of_processes).collect()
}

/// Whether pages were to move and have not moved.
fn is_staying(run: &PageRun) -> bool {
    !matches!(run.outcome, PageOutcome::Migrated | PageOutcome::Unchanged)
}

fn json<'a>(report: &'a Report, plans: &'a [Plan<'_>], to: &Placement) -> JsonSummary<'a> {
    let name = |outcome| match outcome {
        PageOutcome::Migrated => "migrated",
        PageOutcome::Unchanged => "unchanged",
        PageOutcome::Busy => "busy",
        PageOutcome::Failed => "failed",
        PageOutcome::NotAttempted => "not-attempted",
    };
    let outcome = |((_, reason), (outcome, _, bytes)): (_, (PageOutcome, _, u64))| JsonOutcome {
        outcome: name(outcome),
        reason,
        bytes,
        pages: bytes / BASE_PAGE as u64,
    };
    let run = |run: &PageRun| JsonRun {
        pid: run.source.id(),
        start: run.range.start,
        end: run.range.end,
        outcome: name(run.outcome),
        reason: run.reason.map(|reason| reason.to_string()),
    };
    let process =
        |plan: &'a Plan<'_>| JsonProcess { pid: plan.memory.pid, name: &plan.memory.name };
    JsonSummary {
        processes: plans.iter().map(process).collect(),
        target_nodes: plan::shares(to).into_keys().map(|node| node.0).collect(),
        ended: match report.ended {
            Ended::Completed => "completed",
            Ended::Cancelled => "cancelled",
            Ended::TimedOut => "timed-out",
            _ => "failed",
        },
        error: match &report.ended {
            Ended::Failed(error) => Some(error.to_string()),
            _ => None,
        },
        moved_bytes: report.pages.migrated * BASE_PAGE as u64,
        elapsed_ns: report.migrate_ns,
        bytes_per_s: rate(report.pages.migrated * BASE_PAGE as u64, report.migrate_ns),
        outcomes: groups(report)
            .into_iter()
            .map(|((place, reason), group)| outcome(((place, reason), group)))
            .collect(),
        left: report.runs.iter().filter(|r| is_staying(r)).map(run).collect(),
        calls: report.calls.clone(),
        longest_call_ns: report.windows.max_ns,
        calls_over_limit: report.counts.windows_over_budget,
        warnings: warnings(report, plans),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_has_the_rate_of_the_whole_move() {
        const SECOND: u64 = 1_000_000_000;
        let line = |ended, moved| first_line(&ended, moved, 2 * SECOND);
        assert_eq!(line(Ended::Completed, 8 << 20), "done after 2.00 s, 4 MiB per second\n");
        assert_eq!(line(Ended::Cancelled, 8 << 20), "interrupted after 2.00 s, 4 MiB per second\n");
        assert_eq!(line(Ended::TimedOut, 1), "the time was up after 2.00 s, 0 bytes per second\n");
        assert_eq!(line(Ended::Completed, 0), "done after 2.00 s\n");
    }
}
