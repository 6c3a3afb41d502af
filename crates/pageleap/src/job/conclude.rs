//! The end of a job: the mover gives all resources back, and the report is made.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::Mover;
use super::books::Books;
use super::outcomes::{PageCounts, PageRun, migrated_bytes};
use super::report::{Ended, EngineUse, Report, Warning, WarningKind};
use super::run::{Running, Settings};
use super::tally::Tally;
use crate::backend::Call;
use crate::engine::choice::Why;
use crate::sync::{Instant, lock};
use crate::units::EngineName;

/// The reason, for the report, if a tracer made the job use an engine whose readers do not wait.
const TRACED: &str = "another process traced the job's threads (strace, a debugger), and would have waited for ever for a page that the job's engine had taken away";

/// The reason, for the report, if areas were closed before they were copied.
const LOW_CONTENTION: &str =
    "few threads came to wait, so areas were closed before they were copied";

/// The reason, for the report, if writes were tracked although areas could be closed first.
const CONTENDED: &str =
    "threads would have had to wait too often, or too long, so writes were followed";

/// The duration of the two parts of a job.
struct Times {
    migrate_ns: u64,
    recycle_ns: u64,
    /// CPU time of the job's first thread until all pages had moved.
    leader_cpu_ns: Option<u64>,
    recycle_cpu_ns: Option<u64>,
}

impl<M: Mover> Running<M> {
    /// Ends the job after its last page: gives all resources back and delivers the report.
    /// `from_cpu_ns` is the CPU time that the calling thread had used before the job.
    pub(super) fn conclude(self, from_cpu_ns: Option<u64>) {
        let migrate_ns = self.began.elapsed().as_nanos() as u64;
        let Running { mover, items, settings, state, shared, .. } = self;
        warn_of_tracer(&mut lock(&state).tally);
        let mut recycling = None;
        let books = Books { state: &state, shared: &shared, deadline: settings.deadline };
        mover.finish(books, &mut || {
            shared.start_recycling();
            // The other threads have ended, and have added their own CPU time.
            recycling = Some((Instant::now(), pageleap_sys::thread_cpu_time_ns().ok()));
        });
        let (recycling, leader_cpu_ns) = recycling.expect("a mover says when pages are free");
        let times = Times {
            migrate_ns,
            recycle_ns: recycling.elapsed().as_nanos() as u64,
            leader_cpu_ns: leader_cpu_ns.zip(from_cpu_ns).map(|(to, from)| to.saturating_sub(from)),
            recycle_cpu_ns: leader_cpu_ns
                .zip(pageleap_sys::thread_cpu_time_ns().ok())
                .map(|(from, to)| to - from),
        };
        let state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let each = items.iter().zip(&state.outcomes);
        let runs: Vec<PageRun> = each.flat_map(|(item, all)| all.page_runs(item)).collect();
        let mut pages = PageCounts::default();
        for run in &runs {
            pages.add(run.outcome, (run.range.len() / settings.page_bytes) as u64);
        }
        let mut moved: Vec<_> = state.tally.moved.iter().collect();
        moved.sort_by_key(|((item, _), pages)| (*item, std::cmp::Reverse(**pages)));
        let uses = moved.into_iter().map(|((item, by), pages)| EngineUse {
            source: items[*item].source,
            range: items[*item].bytes(),
            engine: by.engine,
            pages: *pages,
            why: words(by.why, &settings, &state.tally).to_owned(),
        });
        let engines = uses.collect();
        let settled = state.threads.settled();
        let report = Figures { settings, tally: state.tally, times, runs, pages, engines, settled };
        shared.finish(report.report(shared.stop(), shared.bytes_copied()));
    }
}

/// The reason why an engine has moved pages, in words.
fn words<'a>(why: Why, settings: &'a Settings, tally: &'a Tally) -> &'a str {
    match why {
        Why::AsChosen => &settings.engine_reason,
        Why::Contended => CONTENDED,
        Why::LowContention => LOW_CONTENTION,
        Why::Traced => TRACED,
        Why::NotFollowed => tally.not_followed_why.as_deref().unwrap_or_default(),
        Why::Because(words) => words,
    }
}

/// Warns if pages were moved by another engine because of a tracer.
fn warn_of_tracer(tally: &mut Tally) {
    let mut by_engine: BTreeMap<EngineName, u64> = BTreeMap::new();
    for ((_, by), pages) in tally.moved.iter().filter(|((_, by), _)| by.why == Why::Traced) {
        *by_engine.entry(by.engine).or_default() += pages;
    }
    for (engine, pages) in by_engine {
        let warning = format!("{pages} pages were moved by the engine {engine}: {TRACED}");
        tally.warnings.push(Warning::new(WarningKind::Tracer, warning));
    }
}

/// The data of a report.
struct Figures {
    settings: Settings,
    tally: Tally,
    times: Times,
    runs: Vec<PageRun>,
    pages: PageCounts,
    engines: Vec<EngineUse>,
    /// Threads that copied at the end.
    settled: usize,
}

impl Figures {
    fn report(self, stopped: Option<Ended>, bytes_copied: u64) -> Report {
        let Figures { settings, mut tally, times, runs, pages, engines, settled } = self;
        tally.warnings.dedup();
        let page_bytes = settings.page_bytes as u64;
        let ended = match (stopped, tally.first_failure) {
            (Some(stopped), _) if pages.busy + pages.not_attempted > 0 => stopped,
            (_, Some(error)) => Ended::Failed(error),
            _ => Ended::Completed,
        };
        let migrated_bytes = migrated_bytes(&runs);
        let calls = Call::ALL.into_iter().map(|call| (call.name(), tally.calls[call as usize]));
        Report {
            ended,
            engine: settings.engine,
            engine_reason: settings.engine_reason,
            engines,
            copies: tally.copies,
            area_bytes: settings.pace.most_pages() as usize * settings.page_bytes,
            threads: settings.threads,
            threads_settled: settled,
            runs,
            pages,
            bytes: pages.total() * page_bytes,
            bytes_copied,
            bytes_recopied: bytes_copied.saturating_sub(migrated_bytes),
            counts: tally.counts,
            waits: tally.waits,
            windows: tally.windows,
            migrate_ns: times.migrate_ns,
            recycle_ns: times.recycle_ns,
            migrate_cpu_ns: times
                .leader_cpu_ns
                .filter(|_| !tally.cpu.unknown)
                .map(|leader| leader + tally.cpu.ns),
            recycle_cpu_ns: times.recycle_cpu_ns,
            calls: calls.filter(|(_, calls)| *calls > 0).collect(),
            warnings: tally.warnings,
        }
    }
}
