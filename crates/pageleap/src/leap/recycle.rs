//! The end of a mover: frames and claims go back, and vacated frames are made ready for use again.
//!
//! Other jobs may claim the pages before the vacated frames are ready, so that they need not wait
//! for that. The frames are *announced* by then: a call that needs them waits instead of failing
//! ([`Share::announce`](pool::Share)).

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use super::legs::{Claimed, Leg};
use super::site::Site;
use super::slots::ClaimedSlot;
use super::trackers::Trackers;
use crate::backend::{Backend, Call, Tracker};
use crate::engine::slot::Slot;
use crate::engine::waits::Waits;
use crate::job::books::Books;
use crate::job::report::{Warning, WarningKind};
use crate::pool::{self, Share};
use crate::sync::{Instant, Mutex, lock, thread};

/// How many bytes of vacated frames are made ready at a time.
const PIECE_BYTES: usize = 16 << 20;

/// Frames that pages have left.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Vacated {
    pub(super) share: Share,
    pub(super) run: pool::Run,
    /// Whether the alias of the frames is still registered with the tracker, so that its page table
    /// entries are write-protected.
    pub(super) marked: bool,
}

impl Vacated {
    /// Cuts the frames into pieces, because a thread that waits for frames waits for a whole piece,
    /// and because some calls keep all other threads of the process from mapping while they last.
    fn pieces(self) -> impl Iterator<Item = Vacated> {
        let pieces = self.run.pieces(PIECE_BYTES / self.share.page_size().bytes());
        pieces.map(move |run| Vacated { run, ..self.clone() })
    }
}

/// Frames that pages have left, and that wait to be given back.
pub(super) struct VacatedFrames {
    waiting: Mutex<Vec<Vacated>>,
    /// How many pieces of them may wait for the end of a job.
    most: usize,
    /// Held by the worker that gives pieces back. Workers that also find too many pieces wait for
    /// it, so there are never more than twice as many.
    turn: Mutex<()>,
}

impl VacatedFrames {
    /// Makes the list of a job of which at most `most` pieces may wait for its end.
    pub(super) fn new(most: usize) -> VacatedFrames {
        VacatedFrames { waiting: Mutex::default(), most, turn: Mutex::new(()) }
    }

    pub(super) fn add(&self, vacated: Vacated) {
        lock(&self.waiting).push(vacated);
    }

    /// Gives the frames back if more pieces wait than the process has mappings for. Then their
    /// alias is one mapping again with its neighbours.
    pub(super) fn give_back_in_parts(
        &self,
        backend: &dyn Backend,
        tracker: Option<Tracker>,
        books: Books<'_>,
    ) {
        let crowded = || lock(&self.waiting).len() > self.most;
        if !crowded() {
            return;
        }
        let _turn = lock(&self.turn);
        if crowded() {
            let vacated = merged(std::mem::take(&mut lock(&self.waiting)));
            vacated.iter().for_each(|vacated| vacated.share.announce(vacated.run));
            Recycler { backend, tracker, books }.recycle(vacated);
        }
    }
}

/// The resources that a job gives back at its end.
pub(super) struct Remains {
    pub(super) site: Site,
    pub(super) claimed: Vec<Claimed>,
    pub(super) vacated: VacatedFrames,
    pub(super) slots: Vec<ClaimedSlot>,
    pub(super) trackers: Trackers,
}

impl Remains {
    /// Gives everything back. `moved` is called when others may move the pages again.
    pub(super) fn give_back(self, books: Books<'_>, moved: &mut dyn FnMut()) {
        let Remains { site, mut claimed, vacated, slots, trackers } = self;
        for slot in &slots {
            books.with_waits(|waits| drain(slot.slot(), waits));
            books.count(Call::Protect, slot.slot().waits.take_openings());
            books.count(Call::LetWrite, slot.slot().notes.take_lettings());
        }
        drop(slots);
        give_aliases_back(&site, &claimed, books);
        // From here on other jobs may move these pages again. They may need the frames that the
        // pages have left, so they are admitted only after all frames are free or announced.
        let waiting = vacated.waiting.into_inner();
        let vacated = merged(waiting.unwrap_or_else(PoisonError::into_inner));
        vacated.iter().for_each(|vacated| vacated.share.announce(vacated.run));
        claimed.iter_mut().for_each(Claimed::give_back_unused);
        drop(claimed);
        let Site { backend, legs, .. } = site;
        drop(legs);
        moved();
        Recycler { backend: &*backend, tracker: trackers.own(), books }.recycle(vacated);
    }
}

/// Restores the aliases of the old and the new frames of each leg, as far as the job or a failed
/// attempt has changed them.
fn give_aliases_back(site: &Site, claimed: &[Claimed], books: Books<'_>) {
    // Frames that pages have left may belong to others by now, and so may those of withdrawn pages.
    let left: Vec<_> = claimed.iter().map(|one| one.claim.pages_left()).collect();
    let parts = |leg: &Leg| {
        let all = leg.pages.clone();
        let inside = left[leg.item].iter().map(move |part| common(part, &all));
        inside.filter(|part| !part.is_empty()).collect::<Vec<_>>()
    };
    let mut lent = Vec::new();
    for (leg, part) in
        site.legs.iter().flat_map(|leg| parts(leg).into_iter().map(move |part| (leg, part)))
    {
        // Where pages have stayed, the alias of their frames must not stay a hole after a failed
        // attempt. If it cannot be filled, the next leap of these pages begins with that.
        let stayed: Vec<_> = {
            let extents = lock(&site.region(leg.item).extents);
            extents.within(part.clone()).filter(|e| e.share == leg.from).collect()
        };
        stayed.iter().for_each(|extent| _ = leg.from.mend_torn(extent.frames()));
        if leg.exchange {
            let (share, run) = (leg.to.clone(), leg.frames_of(&part));
            lent.push(Vacated { share, run, marked: false });
        }
    }
    for Vacated { share, run, .. } in merged(lent) {
        if let Err(errno) = share.0.advise_alias(run) {
            let text =
                format!("core dumps may contain the data twice: madvise failed with {errno}");
            books.warn(Warning::of(WarningKind::CoreDumps, text, Call::Advise, errno));
        }
    }
}

/// Makes vacated frames ready for use again.
struct Recycler<'a> {
    backend: &'a dyn Backend,
    /// The tracker of the job's engine, with which the aliases may still be registered.
    tracker: Option<Tracker>,
    books: Books<'a>,
}

impl Recycler<'_> {
    /// Recycles frames that have been announced.
    fn recycle(&self, vacated: Vec<Vacated>) {
        let pieces: Vec<_> = vacated.into_iter().flat_map(Vacated::pieces).collect();
        for alike in pieces.chunk_by(|one, other| one.share == other.share) {
            for batch in batches(alike) {
                self.recycle_batch(batch);
            }
        }
    }

    /// Recycles pieces of one share.
    fn recycle_batch(&self, batch: &[Vacated]) {
        let share = &batch[0].share;
        for Vacated { run, .. } in batch.iter().filter(|piece| piece.marked) {
            share.take_marks(*run, |addr, len| match self.tracker {
                // SAFETY: the alias of frames that nobody uses.
                Some(tracker) => unsafe { self.backend.untrack(tracker, addr, len) },
                None => Ok(()),
            });
        }
        // Reclaimed mappings merge with their neighbours, so that one look covers many.
        batch.iter().for_each(|piece| share.reclaim(piece.run));
        share.look_at_reclaimed(&batch.iter().map(|piece| piece.run).collect::<Vec<_>>());
        for piece in batch {
            if let Err(error) = share.give_back_announced(piece.run) {
                let what = "vacated frames are out of circulation for now";
                self.books.warn(Warning::because(WarningKind::Recycling, what, &error));
            }
        }
    }
}

/// Cuts pieces of one share into batches of few pieces and few bytes.
fn batches(mut pieces: &[Vacated]) -> impl Iterator<Item = &[Vacated]> {
    const MOST: usize = 128;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |piece: &&Vacated| {
            bytes += piece.run.frames as usize * piece.share.page_size().bytes();
            bytes <= PIECE_BYTES
        };
        let fitting = pieces.iter().take(MOST).take_while(fits).count();
        let (batch, rest) = pieces.split_at(fitting.max(1).min(pieces.len()));
        pieces = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

fn common(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    one.start.max(other.start)..one.end.min(other.end)
}

/// Joins neighbouring runs of each share, so that few calls map their alias again.
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

/// Collects the counts of a slot, after giving threads that were just woken the time to count their
/// wait. A thread that does not run for so long (one that a debugger holds, say) is missing from
/// the report.
fn drain(slot: &Slot, waits: &mut Waits) {
    const PATIENCE: Duration = Duration::from_millis(10);
    let give_up = Instant::now() + PATIENCE;
    while slot.sleepers() > 0 && Instant::now() < give_up {
        thread::yield_now();
    }
    slot.waits.take_into(waits);
}
