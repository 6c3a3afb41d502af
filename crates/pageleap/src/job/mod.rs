//! Jobs: many areas, moved one after the other by a few threads.
//!
//! A job knows areas, not what they are: consecutive pages of an item, by number. A [`Mover`] knows
//! what the numbers stand for (frames of a region), makes one attempt on one area, and says what
//! came of it. The job does the rest: which area is next ([`queue`]), what follows from an attempt
//! ([`plan`]), how large areas are ([`pace`]), how fast it may copy ([`rate`]), how many threads
//! copy ([`threads`]), the user's [`handle`], and the [`report`].
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

/// Whether the calling thread is one of this library's: of a job, or of a pool that is being filled.
///
/// An allocator whose memory is a region asks it, and serves such threads from elsewhere: what they
/// allocate must not lie in pages that they are moving. What the library allocates in a call of the
/// program's is allocated by the program's thread; the program knows that it is in such a call.
///
/// The answer takes no system call, no lock and no memory, so it may be asked in an allocator and in
/// a signal handler.
pub fn thread_is_ours() -> bool {
    pageleap_sys::is_own_thread()
}

/// What can move areas.
pub(crate) trait Mover: Send + Sync + Sized + 'static {
    /// What one worker has of its own.
    type Worker;

    /// Runs `work`, in which all workers work: on the right CPUs, and with the threads that the
    /// mover needs beside them. A mover that cannot go on says so in the books, and need not call
    /// `work`.
    fn surround(&self, _books: Books<'_>, work: &(dyn Fn() + Sync)) {
        work();
    }

    /// What the worker with this number needs, made by its thread.
    fn worker(&self, number: usize, books: Books<'_>) -> Self::Worker;

    /// Whether the job may go on. Asked before each attempt and in each pause.
    fn may_go_on(&self, _books: Books<'_>) -> Result<(), Stop> {
        Ok(())
    }

    /// How many pages the area has that this stretch begins with, if the mover says it and not the
    /// pace. Called with the job's lock held.
    fn area_pages(&self, _stretch: &Area) -> Option<u64> {
        None
    }

    /// Makes one attempt on an area. The job's locks are free meanwhile.
    fn attempt(&self, worker: &mut Self::Worker, area: &Area, terms: &Terms<'_>) -> AreaOutcome;

    /// Does what is due after an attempt, when the area has gone back to the queue or is dealt
    /// with.
    fn after(&self, _worker: &mut Self::Worker, _books: Books<'_>) {}

    /// Whether something still keeps an area where it is that has been [`Verdict::Kept`]. Called
    /// with the job's lock held.
    ///
    /// [`Verdict::Kept`]: area::Verdict::Kept
    fn is_kept(&self, _area: &Area) -> bool {
        false
    }

    /// An area is not tried any more, and stays where it is. Called with the job's lock held.
    fn given_up(&self, _area: &Area) {}

    /// The error for an area that stays where it is. Called with the job's lock held.
    fn error(&self, area: &Area, why: Reason) -> Error;

    /// Gives everything back. Calls `moved` as soon as others may move the pages again; what comes
    /// after that counts as recycling.
    fn finish(self, books: Books<'_>, moved: &mut dyn FnMut());

    /// The worker's helpers, if all threads copy one area after the other together. `None`: each
    /// thread is a worker with areas of its own.
    fn team(&self) -> Option<Team<'_>> {
        None
    }
}

/// On which terms an attempt is made.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    /// Whether writers are to be held back from the start.
    pub(crate) hold: bool,
    /// Whether few threads would come to wait for the area, so that it may be closed before it is
    /// copied.
    pub(crate) low_contention: bool,
    /// With how many base pages left to copy an area is frozen.
    pub(crate) freeze_at: u64,
    pub(crate) books: Books<'a>,
}
