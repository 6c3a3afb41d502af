//! `pageleap demo`: a live table leaps, and everything that could have gone wrong is checked.
//!
//! The steps, in this order: choose nodes and check that the table fits ([`setup`]); build the
//! pools and the table ([`build`], [`lineitem`]); time a memcpy, start the query thread
//! ([`queries`]) and the writer ([`crate::writer`]), leap ([`measure`]); compare ([`verify`]);
//! print ([`report`]).

mod args;
mod build;
mod lineitem;
mod measure;
mod queries;
mod report;
mod setup;
mod verify;

use std::io::Write;
use std::sync::atomic::Ordering;
use std::thread::available_parallelism;

use anyhow::{Context, anyhow};
use pageleap::{BASE_PAGE, Ended, PageOutcome, PageSize};

use crate::phase::{PHASES, Phase};
use crate::stop::Stop;
use crate::writer::{self, Rate};
use crate::{interrupt, machine, progress};
pub use args::DemoArgs;
use build::Built;
use measure::{Leap, Measured};
use queries::{Decimal, Series};
use report::{
    Latency, Mappings, NodePages, Pages, Placements, Queries, Quiet, Summary, TextOnly, Writes,
};

/// Ends the run if a signal has asked for it while nothing was at stake yet.
fn stop_if_interrupted() -> Result<(), Stop> {
    interrupt::stop_if_received(|| {
        "the table is where it was, and nobody had written to it yet".to_owned()
    })
}

/// Runs the demo and prints its result.
pub fn run(args: &DemoArgs) -> Result<(), Stop> {
    args.check().map_err(|why| Stop::Refused(anyhow!(why)))?;
    interrupt::install();
    let built = build::build(args)?;
    let before = Observed::of(&built)?;
    let measured = measure::measure(args, &built)?;
    let lost = writer::lost(built.order_keys()?, &measured.write_log.shadow);
    let Some(leap) = &measured.leap else {
        return interrupted_before_the_leap(&measured, lost);
    };
    let checking = progress::moving_spinner("verifying");
    let after = Observed::of(&built)?;
    let summary = summarise(args, &built, &measured, leap, [&before, &after], lost)?;
    checking.finish_and_clear();

    let text = if args.json {
        summary.json().context("the result could not be written as JSON")? + "\n"
    } else {
        summary.text()
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")?;

    if !summary.text.mismatches.is_empty() {
        return Err(Stop::Failed(anyhow!("{}", summary.text.mismatches.join("\nerror: "))));
    }
    interrupt::stop_if_received(|| {
        let pages = summary.pages;
        format!(
            "{} of {} pages had moved, the region is whole, {} writes, none lost",
            pages.migrated,
            built.region.len() / args.page_size.bytes(),
            measured.write_log.writes
        )
    })
}

/// Also without a leap the shadow is compared, so that an interrupted run never hides a lost write.
fn interrupted_before_the_leap(measured: &Measured, lost: u64) -> Result<(), Stop> {
    if lost > 0 {
        return Err(Stop::Failed(anyhow!("{lost} rows lost their last write, before any leap")));
    }
    interrupt::stop_if_received(|| {
        format!("the table is where it was, {} writes, none lost", measured.write_log.writes)
    })
}

/// What can be observed of the region at one moment without asking the code that moves it.
struct Observed {
    placement: NodePages,
    frames: Option<Vec<u64>>,
    other_columns: u64,
}

impl Observed {
    fn of(built: &Built) -> Result<Observed, Stop> {
        // Reading every page first, because the kernel shows no frame for a page that has not been
        // touched since it was mapped.
        let other_columns = verify::checksum(built.other_columns()?);
        for key in built.order_keys()?.iter().step_by(PageSize::Base.bytes() / size_of::<u64>()) {
            std::hint::black_box(key.load(Ordering::Relaxed));
        }
        Ok(Observed {
            placement: built
                .region
                .placement()?
                .iter()
                .map(|(node, pages)| (node.0, pages))
                .collect(),
            frames: built.region.frame_numbers()?,
            other_columns,
        })
    }
}

fn summarise(
    args: &DemoArgs,
    built: &Built,
    measured: &Measured,
    leap: &Leap,
    [before, after]: [&Observed; 2],
    lost: u64,
) -> Result<Summary, Stop> {
    let report = &leap.report;
    let page = args.page_size.bytes();
    let mapped = built.region.mapped_pages()?;
    let frames = before.frames.as_ref().zip(after.frames.as_ref()).map(|(before, after)| {
        let migrated = report.runs.iter().filter(|run| run.outcome == PageOutcome::Migrated);
        verify::compare_frames(before, after, page, migrated.map(|run| run.range.clone()))
    });
    let log = &measured.query_log;
    let mut summary = Summary {
        bytes: built.region.len() as u64,
        page_size: page as u64,
        kernel_page_size: mapped.kernel_page_size as u64,
        huge_mapped_ratio: mapped.huge_mapped_ratio,
        from: built.from,
        to: built.to,
        engine: report.engine.to_string(),
        engine_reason: report.engine_reason.clone(),
        area_bytes: report.area_bytes as u64,
        migrate_ns: report.migrate_ns,
        memcpy_ns: measured.memcpy_ns,
        ratio_to_memcpy: report
            .ended
            .is_completed()
            .then(|| report.migrate_ns as f64 / measured.memcpy_ns as f64),
        quiet: quiet(&measured.quiet_ns, measured.memcpy_ns),
        extra_copied_ratio: report.bytes_recopied as f64 / report.bytes as f64,
        max_wait_ns: report.waits.max_ns.max(report.windows.max_ns),
        pages: Pages {
            migrated: report.pages.migrated,
            unchanged: report.pages.unchanged,
            busy: report.pages.busy,
            failed: report.pages.failed,
            not_attempted: report.pages.not_attempted,
        },
        writes: writes(args.writes_per_s, measured, leap, lost),
        queries: Queries { q1: latency(&log.q1), q6: latency(&log.q6) },
        frames_changed_ratio: frames.map(|frames| frames.changed_ratio),
        placement: Placements { before: before.placement.clone(), after: after.placement.clone() },
        mappings: Mappings {
            before: leap.mappings[0],
            peak: leap.mappings[1],
            after: leap.mappings[2],
        },
        kernel: machine::kernel_release()?,
        nodes: built.nodes,
        text: TextOnly {
            scale_factor: args.scale_factor,
            rows: built.layout.rows() as u64,
            threads: args.threads,
            cpus: available_parallelism().map_or(1, usize::from),
            published_answers: (args.scale_factor == 1.0)
                .then(|| log.q1.first().zip(log.q6.first()))
                .flatten()
                .map(|(q1, q6)| queries::is_published_sf1(q1, *q6)),
            recycle_ns: report.recycle_ns,
            q6_revenue: log.q6.first().map(|revenue| Decimal(*revenue, 4)),
            q1_runs: PHASES.map(|phase| log.q1.runs(phase)),
            q6_runs: PHASES.map(|phase| log.q6.runs(phase)),
            rate_before: measured.rate_before,
            rate_during: leap.writes as f64 / leap.elapsed.as_secs_f64(),
            max_gap_before_ns: measured.write_log.gaps.quantile_ns(Phase::Before, 1.0),
            writes: measured.write_log.writes,
            ended_early: ended_early(&report.ended),
            warnings: report.warnings.clone(),
            mismatches: Vec::new(),
        },
    };
    summary.text.mismatches = mismatches(&summary, [before, after], frames);
    Ok(summary)
}

fn writes(rate: Rate, measured: &Measured, leap: &Leap, lost: u64) -> Writes {
    let during = leap.writes as f64 / leap.elapsed.as_secs_f64();
    let gaps = &measured.write_log.gaps;
    let (requested_per_s, achieved_ratio) = match rate {
        Rate::PerSecond(0) => (Some(0), None),
        Rate::PerSecond(rate) => (Some(rate), Some(during / rate as f64)),
        Rate::Max => (None, (measured.rate_before > 0.0).then(|| during / measured.rate_before)),
    };
    Writes {
        requested_per_s,
        achieved_ratio,
        landed_during: leap.writes,
        lost,
        max_gap_ns: gaps.quantile_ns(Phase::During, 1.0),
        p999_gap_ns: gaps.quantile_ns(Phase::During, 0.999),
    }
}

fn quiet(times: &[u64], memcpy_ns: u64) -> Quiet {
    let median = times[times.len() / 2];
    Quiet {
        migrate_ns: median,
        migrate_ns_min: times[0],
        migrate_ns_max: times[times.len() - 1],
        ratio_to_memcpy: median as f64 / memcpy_ns as f64,
    }
}

fn latency<A: PartialEq>(series: &Series<A>) -> Latency {
    Latency {
        before_ns: series.median_ns(Phase::Before),
        during_ns: series.median_ns(Phase::During),
        after_ns: series.median_ns(Phase::After),
        equal: series.equal,
    }
}

fn ended_early(ended: &Ended) -> Option<String> {
    match ended {
        Ended::Completed => None,
        Ended::Cancelled => Some("cancelled".to_owned()),
        Ended::TimedOut => Some("timed out".to_owned()),
        Ended::CpusetChanged => Some("the cpuset was changed".to_owned()),
        Ended::RegionDropped => Some("the region was dropped".to_owned()),
        Ended::Failed(error) => Some(format!("failed: {error}")),
    }
}

/// What is wrong with a run, in sentences. Only a signal excuses a leap that did not end.
fn mismatches(
    summary: &Summary,
    [before, after]: [&Observed; 2],
    frames: Option<verify::Frames>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, query) in [("Q1", &summary.queries.q1), ("Q6", &summary.queries.q6)] {
        if !query.equal {
            wrong.push(format!("mismatch: {name} gave different results during the run"));
        }
    }
    if summary.writes.lost > 0 {
        wrong.push(format!(
            "mismatch: {} rows of L_ORDERKEY do not contain the last value written to them",
            summary.writes.lost
        ));
    }
    if before.other_columns != after.other_columns {
        wrong.push("mismatch: columns that nobody wrote have changed".to_owned());
    }
    if let Some(frames) = frames
        && frames.migrated_unchanged > 0
    {
        wrong.push(format!(
            "mismatch: {} pages are reported as migrated and still have their old frame",
            frames.migrated_unchanged
        ));
    }
    let arrived = summary.placement.after.get(&summary.to).copied().unwrap_or(0);
    let expected = summary.pages.migrated + summary.pages.unchanged;
    if arrived < expected {
        wrong.push(format!(
            "mismatch: {expected} pages should be on node {}, and the kernel reports {arrived} there",
            summary.to
        ));
    }
    if summary.page_size > BASE_PAGE as u64 && summary.huge_mapped_ratio < 1.0 {
        wrong.push(format!(
            "mismatch: only {} % of the region are mapped by huge pages",
            (summary.huge_mapped_ratio * 100.0).floor()
        ));
    }
    if summary.text.published_answers == Some(false) {
        wrong.push(
            "mismatch: Q1 or Q6 differs from the answer published for scale factor 1".to_owned(),
        );
    }
    let left = summary.pages.busy + summary.pages.failed + summary.pages.not_attempted;
    if interrupt::received().is_none() && (left > 0 || summary.text.ended_early.is_some()) {
        let why = summary.text.ended_early.as_deref().unwrap_or("the job ended");
        let more_time = if why == "timed out" { "; give it more time with --timeout" } else { "" };
        wrong.push(format!(
            "the leap is not complete ({why}): {left} pages were not moved{more_time}"
        ));
    }
    wrong
}
