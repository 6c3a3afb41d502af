//! The end of a job: vacated frames are made ready for use again, everything is given back, and the
//! report is made.

use std::sync::PoisonError;
use std::time::Duration;

use super::{Run, State, Tally};
use crate::backend::Call;
use crate::engine::Engine;
use crate::engine::choice::Why;
use crate::engine::slot::Slot;
use crate::job::report::{Ended, EngineUse, PageCounts, PageOutcome, Report, Waits, runs};
use crate::leap::SYSTEM_CALLS_MAY_FAIL;
use crate::leap::legs::Item;
use crate::pool::{self, Share};
use crate::sync::{Instant, thread};

/// Why writers are held back from the start.
const HELD: &str = "writers were held back: as asked for, or because copies beside them had to be made again too often";

/// Frames that pages have left.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Vacated {
    pub(super) share: Share,
    pub(super) run: pool::Run,
    /// Whether the tracker still follows writes to their alias, whose page table entries have been
    /// marked, and do not allow writing.
    pub(super) marked: bool,
}

impl Vacated {
    /// In pieces, because who waits for frames waits for a whole one, and some calls keep all other
    /// threads of the process from mapping while they last.
    fn pieces(self) -> impl Iterator<Item = Vacated> {
        const BYTES: usize = 16 << 20;
        let pieces = self.run.pieces(BYTES / self.share.page_size().bytes());
        pieces.map(move |run| Vacated { run, ..self.clone() })
    }
}

impl Run {
    /// After the last page: give everything back and deliver the report.
    pub(super) fn conclude(self) {
        let migrate_ns = self.began.elapsed().as_nanos() as u64;
        let Run { backend, legs, state, settings, slots, shared, .. } = self;
        let state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let State { mut items, vacated, tally, threads, .. } = state;
        let Tally { mut warnings, mut calls, .. } = tally;
        let not_followed: u64 = tally
            .moved
            .iter()
            .filter(|((_, by), _)| by.why == Why::NotFollowed)
            .map(|(_, pages)| pages)
            .sum();
        let not_followed_why = tally.not_followed_why.unwrap_or_default();
        if !settings.engine.signals() && not_followed > 0 {
            warnings.push(format!(
                "{not_followed} pages were moved by the engine {}, and {SYSTEM_CALLS_MAY_FAIL}: {not_followed_why}",
                Engine::LAST_RESORT
            ));
        }
        let engines = tally.moved.iter().map(|((item, by), pages)| {
            let claim = &items[*item].claim;
            let why = match by.why {
                Why::AsChosen => settings.engine_reason.as_str(),
                Why::Held => HELD,
                Why::ReadOnly => "nobody may write there, so there is nothing to follow",
                Why::NotFollowed => not_followed_why.as_str(),
            };
            EngineUse {
                region: claim.region().id,
                range: claim.range(),
                engine: by.engine,
                pages: *pages,
                why: why.into(),
            }
        });
        let engines: Vec<_> = engines.collect();

        let mut waits = Waits::default();
        for slot in &slots {
            drain(slot.slot(), &mut waits);
            calls[Call::Protect as usize] += slot.slot().waits.take_openings();
            calls[Call::LetWrite as usize] += slot.slot().notes.take_lettings();
        }
        drop(slots);

        let mut pages = PageCounts::default();
        let mut page_runs = Vec::new();
        let (mut bytes, mut migrated_bytes) = (0, 0);
        for item in &items {
            let region = item.claim.region();
            let item_runs =
                runs(region.id, item.claim.range().start, region.page.bytes(), &item.outcomes);
            for run in &item_runs {
                let len = run.range.end - run.range.start;
                pages.add(run.outcome, (len / region.page.bytes()) as u64);
                bytes += len as u64;
                if run.outcome == PageOutcome::Migrated {
                    migrated_bytes += len as u64;
                }
            }
            page_runs.extend(item_runs);
        }
        for leg in &legs {
            // Where pages have stayed, what a failed attempt has left of the alias of their frames
            // must not stay a hole. If that fails, their next leap begins with it.
            let _ = leg.from.mend_torn(pool::Run { first: leg.from_frame, ..leg.frames() });
        }
        for leg in legs.iter().filter(|leg| leg.exchange) {
            if let Err(errno) = leg.to.0.advise_alias(leg.frames()) {
                warnings.push(format!(
                    "core dumps may contain the data twice: madvise failed with {errno}"
                ));
            }
        }
        // From here on others may move these pages again. What they need for it may be what these
        // have left, so nobody learns that they may before all frames are free or announced.
        let vacated = merged(vacated);
        vacated.iter().for_each(|vacated| vacated.share.announce(vacated.run));
        items.iter_mut().for_each(Item::give_back_unused);
        drop(items);
        drop(legs);
        shared.start_recycling();
        let recycling = Instant::now();
        // Of this thread since it began; the other threads have ended.
        let cpu_before = pageleap_sys::thread_cpu_time_ns().ok();
        let tracker = settings.tracker.as_ref().map(|open| open.tracker);
        for Vacated { share, run, marked } in vacated.into_iter().flat_map(Vacated::pieces) {
            if marked {
                share.take_marks(run, |addr, len| match tracker {
                    // SAFETY: the alias of frames that nobody uses.
                    Some(tracker) => unsafe { backend.untrack(tracker, addr, len) },
                    None => Ok(()),
                });
            }
            if let Err(error) = share.give_back_announced(run) {
                warnings.push(format!("vacated frames are out of circulation for now: {error}"));
            }
        }
        drop(settings.tracker);
        warnings.dedup();
        let ended = match (shared.stop(), tally.first_failure) {
            (Some(stopped), _) if pages.busy + pages.not_attempted > 0 => stopped,
            (_, Some(error)) => Ended::Failed(error),
            _ => Ended::Completed,
        };
        let bytes_copied = shared.bytes_copied();
        shared.finish(Report {
            ended,
            engine: settings.engine,
            engine_reason: settings.engine_reason,
            engines,
            area_bytes: settings.pace.most_pages() as usize * settings.page_bytes,
            threads: settings.threads,
            threads_settled: threads.settled(),
            runs: page_runs,
            pages,
            bytes,
            bytes_copied,
            bytes_recopied: bytes_copied - migrated_bytes,
            disturbed_copies: tally.disturbed_copies,
            splits: tally.splits,
            holds: tally.holds,
            repairs: tally.repairs,
            waits,
            windows: tally.windows,
            windows_over_budget: tally.windows_over_budget,
            windows_first: tally.windows_first,
            migrate_ns,
            recycle_ns: recycling.elapsed().as_nanos() as u64,
            migrate_cpu_ns: cpu_before
                .filter(|_| !tally.cpu_unknown)
                .map(|leader| leader + tally.cpu_ns),
            recycle_cpu_ns: cpu_before
                .zip(pageleap_sys::thread_cpu_time_ns().ok())
                .map(|(from, to)| to - from),
            calls: Call::ALL
                .into_iter()
                .map(|c| (c.name(), calls[c as usize]))
                .filter(|(_, n)| *n > 0)
                .collect(),
            warnings,
        });
    }
}

/// Joins neighbouring runs of each share, so that their alias is mapped again by few calls.
fn merged(mut vacated: Vec<Vacated>) -> Vec<Vacated> {
    vacated.sort_by_key(|v| (v.share.id(), v.run.first));
    let mut merged: Vec<Vacated> = Vec::new();
    for next in vacated {
        match merged.last_mut() {
            Some(last)
                if last.share == next.share
                    && last.marked == next.marked
                    && last.run.end() == next.run.first =>
            {
                last.run.frames += next.run.frames
            }
            _ => merged.push(next),
        }
    }
    merged
}

/// Collects what a slot has counted, after giving threads that were just woken the time to count
/// their wait. A thread that does not run for so long (one that a debugger holds, say) is missing
/// from the report.
fn drain(slot: &Slot, waits: &mut Waits) {
    const PATIENCE: Duration = Duration::from_millis(10);
    let give_up = Instant::now() + PATIENCE;
    while slot.sleepers() > 0 && Instant::now() < give_up {
        thread::yield_now();
    }
    slot.waits.take_into(waits);
}
