//! Jobs: a few threads move many areas, one after the other.
//!
//! To a job, an area is only a range of page numbers of an item. A [`Mover`] knows what the numbers
//! stand for (for example frames of a region), makes one attempt on one area, and returns a verdict
//! for each page. The job decides the rest:
//!
//! * [`queue`]: which area is next; [`plan`]: whether and how it is retried.
//! * [`contention`]: whether an area is closed before it is copied; [`pace`]: how large areas are.
//! * [`rate`]: how fast the job may copy; [`threads`]: how many threads copy.
//! * [`handle`] is the user's view of the job, and [`report`] its result.
//!
//! ```text
//!   queue ─► area ─► Mover::attempt ─► AreaOutcome: runs of pages, each with a verdict
//!     ▲                                   │
//!     └── disturbed, refused, kept ◄──────┴──► moved, given up: outcomes ─► report
//! ```

pub(crate) mod area;
pub(crate) mod books;
mod conclude;
pub(crate) mod contention;
pub(crate) mod handle;
pub(crate) mod lasting;
pub(crate) mod outcomes;
pub(crate) mod pace;
pub(crate) mod plan;
mod queue;
pub(crate) mod rate;
pub(crate) mod report;
pub(crate) mod run;
#[cfg(all(test, shuttle))]
mod run_schedules;
#[cfg(all(test, not(shuttle)))]
mod run_tests;
pub(crate) mod source;
mod state;
mod tally;
pub(crate) mod threads;

use area::{Area, AreaOutcome, Reason};
use books::Books;
use handle::Stop;

use crate::engine::crew::Team;
use crate::error::Error;

/// Whether the calling thread belongs to the library: it works for a job, or fills a pool.
///
/// For allocators whose memory lies in a region. They must serve such threads from other memory,
/// because allocations of these threads must not lie in pages that they are moving. Allocations
/// that the library makes in a call of the program are made by the program's thread, for which the
/// answer is `false`; the program knows that it is in such a call.
///
/// The function makes no system call, takes no lock and allocates nothing, so allocators and signal
/// handlers may call it.
pub fn thread_is_ours() -> bool {
    pageleap_sys::is_own_thread()
}

/// Moves areas: the interface between jobs and the memory that they move.
pub(crate) trait Mover: Send + Sync + Sized + 'static {
    /// The state of one worker.
    type Worker;

    /// Runs `work`, which runs all workers until they end, inside the environment that the mover
    /// needs: CPU affinity, and threads of its own. A mover that cannot go on records that in the
    /// books, and need not call `work`.
    fn surround(&self, _books: Books<'_>, work: &(dyn Fn() + Sync)) {
        work();
    }

    /// Makes the state of a worker. Called by the worker's own thread.
    fn worker(&self, number: usize, books: Books<'_>) -> Self::Worker;

    /// Whether the job may go on. Called before each attempt and in each pause.
    fn may_go_on(&self, _books: Books<'_>) -> Result<(), Stop> {
        Ok(())
    }

    /// The number of pages of the area at the beginning of this stretch; `None` if the pace
    /// decides. Called with the job's lock held.
    fn area_pages(&self, _stretch: &Area) -> Option<u64> {
        None
    }

    /// Makes one attempt on an area. Called without the job's locks.
    fn attempt(&self, worker: &mut Self::Worker, area: &Area, terms: &Terms<'_>) -> AreaOutcome;

    /// Work that is due after an attempt, when the area is back in the queue or dealt with.
    fn after(&self, _worker: &mut Self::Worker, _books: Books<'_>) {}

    /// Whether an area with the verdict [`Verdict::Kept`] still has to stay. Called with the job's
    /// lock held.
    ///
    /// [`Verdict::Kept`]: area::Verdict::Kept
    fn is_kept(&self, _area: &Area) -> bool {
        false
    }

    /// Told that an area is given up: it stays and is not tried again. Called with the job's lock
    /// held.
    fn given_up(&self, _area: &Area) {}

    /// The error for an area that stays. Called with the job's lock held.
    fn error(&self, area: &Area, why: Reason) -> Error;

    /// Gives all resources back. Calls `moved` as soon as other jobs may move the pages; the time
    /// after that counts as recycling.
    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut());

    /// The helpers of the only worker, if all threads copy the same area together. `None`: each
    /// thread is a worker with areas of its own.
    fn team(&self) -> Option<Team<'_>> {
        None
    }
}

/// The conditions of an attempt.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    /// Whether writers are to be held from the start.
    pub(crate) hold: bool,
    /// Whether contention for the area is low, so that it may be closed before it is copied.
    pub(crate) low_contention: bool,
    /// The number of dirty base pages at which an area is frozen.
    pub(crate) freeze_at: u64,
    pub(crate) books: Books<'a>,
}
