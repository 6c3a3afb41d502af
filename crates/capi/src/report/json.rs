//! A report as one JSON object.

use std::collections::BTreeMap;

use pageleap::{PageOutcome, Reason, Report, Source, Waits};
use serde::Serialize;

use super::{ended, errno_of, outcome, pageleap_reason, reason, words};

/// The object as text.
pub(super) fn of(report: &Report) -> String {
    serde_json::to_string(&JsonReport::of(report)).unwrap_or_default()
}

/// The object of [`super::pageleap_report_json`].
#[derive(Serialize)]
struct JsonReport<'a> {
    ended: &'static str,
    ended_text: String,
    engine: String,
    engine_reason: &'a str,
    engines: Vec<JsonEngineUse<'a>>,
    copies: Vec<JsonCopyUse>,
    area_bytes: usize,
    threads: usize,
    threads_settled: usize,
    runs: Vec<JsonRun>,
    pages: BTreeMap<&'static str, u64>,
    bytes: u64,
    bytes_copied: u64,
    bytes_recopied: u64,
    #[serde(flatten)]
    counts: BTreeMap<&'static str, i64>,
    waits: JsonTimes,
    windows: JsonTimes,
    migrate_ns: u64,
    migrate_cpu_ns: Option<u64>,
    recycle_ns: u64,
    recycle_cpu_ns: Option<u64>,
    calls: &'a BTreeMap<&'static str, u64>,
    warnings: Vec<&'a str>,
}

#[derive(Serialize)]
struct JsonSource {
    kind: &'static str,
    id: u64,
}

impl JsonSource {
    fn of(source: Source) -> JsonSource {
        JsonSource { kind: source.kind(), id: source.id() }
    }
}

#[derive(Serialize)]
struct JsonReason {
    code: String,
    errno: Option<i32>,
    text: String,
}

impl JsonReason {
    fn of(of: Option<Reason>) -> Option<JsonReason> {
        let (code, errno, text) = (reason_name(reason(of)), errno_of(of), words(of));
        of.map(|_| JsonReason { code, errno, text })
    }
}

#[derive(Serialize)]
struct JsonEngineUse<'a> {
    source: JsonSource,
    offset: usize,
    length: usize,
    engine: String,
    pages: u64,
    why: &'a str,
}

#[derive(Serialize)]
struct JsonCopyUse {
    from_node: u32,
    to_node: u32,
    by: &'static str,
    tried: bool,
    step_bytes: usize,
}

#[derive(Serialize)]
struct JsonRun {
    source: JsonSource,
    offset: usize,
    length: usize,
    outcome: &'static str,
    reason: Option<JsonReason>,
}

#[derive(Serialize)]
struct JsonTimes {
    count: u64,
    total_ns: u64,
    p50_ns: u64,
    p99_ns: u64,
    max_ns: u64,
}

impl JsonTimes {
    fn of(times: &Waits) -> JsonTimes {
        let Waits { count, total_ns, max_ns, .. } = *times;
        JsonTimes {
            count,
            total_ns,
            p50_ns: times.quantile(0.5),
            p99_ns: times.quantile(0.99),
            max_ns,
        }
    }
}

impl<'a> JsonReport<'a> {
    fn of(report: &'a Report) -> JsonReport<'a> {
        let (_, name, words) = ended(&report.ended);
        let pages = &report.pages;
        let counts = [
            (PageOutcome::Migrated, pages.migrated),
            (PageOutcome::Unchanged, pages.unchanged),
            (PageOutcome::Busy, pages.busy),
            (PageOutcome::Failed, pages.failed),
            (PageOutcome::NotAttempted, pages.not_attempted),
        ];
        let runs = report.runs.iter().map(|run| JsonRun {
            source: JsonSource::of(run.source),
            offset: run.range.start,
            length: run.range.len(),
            outcome: outcome(run.outcome).1,
            reason: JsonReason::of(run.reason),
        });
        let engines = report.engines.iter().map(|part| JsonEngineUse {
            source: JsonSource::of(part.source),
            offset: part.range.start,
            length: part.range.len(),
            engine: part.engine.to_string(),
            pages: part.pages,
            why: &part.why,
        });
        let copies = report.copies.iter().map(|of| JsonCopyUse {
            from_node: of.from.0,
            to_node: of.to.0,
            by: of.method.by.name(),
            tried: of.tried,
            step_bytes: of.method.step_bytes,
        });
        JsonReport {
            ended: name,
            ended_text: words,
            engine: report.engine.to_string(),
            engine_reason: &report.engine_reason,
            engines: engines.collect(),
            copies: copies.collect(),
            area_bytes: report.area_bytes,
            threads: report.threads,
            threads_settled: report.threads_settled,
            runs: runs.collect(),
            pages: counts.map(|(what, count)| (outcome(what).1, count)).into(),
            bytes: report.bytes,
            bytes_copied: report.bytes_copied,
            bytes_recopied: report.bytes_recopied,
            counts: report.counts.named().into(),
            waits: JsonTimes::of(&report.waits),
            windows: JsonTimes::of(&report.windows),
            migrate_ns: report.migrate_ns,
            migrate_cpu_ns: report.migrate_cpu_ns,
            recycle_ns: report.recycle_ns,
            recycle_cpu_ns: report.recycle_cpu_ns,
            calls: &report.calls,
            warnings: report.warnings.iter().map(|warning| &*warning.text).collect(),
        }
    }
}

/// The name of a reason in JSON.
fn reason_name(code: pageleap_reason) -> String {
    let name = format!("{code:?}");
    name.trim_start_matches("PAGELEAP_REASON_").to_lowercase().replace('_', "-")
}
