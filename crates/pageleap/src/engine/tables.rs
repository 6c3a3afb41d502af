//! Gives a span new pages of page table. Its frames stay, so nothing is copied, and this is no
//! engine.
//!
//! The kernel allocates pages of page table by the memory policy of the calling thread. Two calls
//! (`mremap` with DONTUNMAP) take the entries of a span out of its page tables and bring them back
//! into new ones:
//!
//! ```text
//!               span                                staging
//!   before      page tables, old node ─► frames
//!   taken out   none; faults make some              the entries ─► frames
//!   brought     page tables, new node ─► frames     none
//! ```
//!
//! The span stays mapped between both calls. A thread that touches it then has a page fault, and
//! the kernel enters the same frame again. So there is one frame of each page at any time, no thread
//! waits for the job, and no write can be lost. The second call unmaps the span before it brings the
//! entries, and with the mapping go the page tables that such faults have made.
//!
//! The kernel moves a page of page table as it is, with all its entries, if both addresses agree
//! modulo its reach. Then it would stay on its node. So the address of the staging agrees with that
//! of the span modulo the reach of the level *below* only. For entries of the lowest level that is
//! a base page, for those of the second level 2 MB: pages of PTEs keep their place there, and so do
//! huge pages.

use super::commit::{Arrival, AttemptResult, arrive, erase};
use super::effort::{Effort, NewAlias};
use super::slot::Span;
use super::{Frames, Tools};
use crate::backend::{Call, Errno, Haste};
use crate::sync::monotonic_ns;

/// The state in which [`renew`] leaves the staging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Staging {
    /// As it was before.
    Untouched,
    /// It maps the frames with the attributes of the span, and has no page tables.
    Empty,
    /// The same, with all entries. If the span has been mapped anew, it lacks its attributes.
    Full,
    /// It may be a hole.
    Torn,
}

/// Gives a span new page tables. `frames` are those that it maps, with the address of the staging in
/// place of their alias. `restore` gives the span its attributes back, before any thread that meets a
/// missing access is told that it is its own.
///
/// The result is [`AttemptResult::Migrated`], or the refused call. In the latter case the span maps
/// its frames, in its old page tables or, if the second call was refused, in some that faults make.
///
/// # Safety
/// The span belongs to a region and maps these frames. Nobody migrates, grows or discards it
/// meanwhile, and it is not locked (`mlock`): the first call would take the lock off the whole mapping,
/// and leave it in the kernel's count. The staging is mapped address space of the caller's, which
/// nobody else accesses. The backend is valid during the call.
pub(crate) unsafe fn renew(
    tools: &Tools<'_>,
    span: &Span,
    frames: &Frames,
    haste: Option<Haste>,
    effort: &mut Effort,
    restore: impl FnOnce(AttemptResult, Staging),
) -> (AttemptResult, Staging) {
    let Tools { slot, epoch, backend } = *tools;
    if !backend.has_file(frames.file) {
        // After a failed second call the file would have to be mapped.
        let refused = AttemptResult::Refused(Call::Map, Errno(libc::EBADF));
        restore(refused, Staging::Untouched);
        return (refused, Staging::Untouched);
    }
    effort.hurry(backend, haste);
    // A thread that meets a hole, which only a failed second call leaves, waits for this slot.
    // SAFETY: `backend` outlives this function, which retires the slot.
    unsafe { slot.publish(epoch, span, erase(backend)) };
    let from = monotonic_ns();
    effort.count(Call::Exchange);
    // SAFETY: forwarded to the caller.
    let ended = match unsafe { backend.exchange(span.addr, frames.alias, span.len) } {
        Err(errno) => (AttemptResult::Refused(Call::Exchange, errno), Staging::Torn),
        Ok(()) => {
            // The entries bring their access along, which the program may have changed by now.
            let arrival = Arrival {
                span: *span,
                old: *frames,
                new: *frames,
                may_exchange: true,
                has_access: true,
            };
            // SAFETY: the staging has the entries of the span, which maps the same frames.
            let arrived = unsafe { arrive(backend, &arrival, effort) };
            let left = match effort.after.new_alias {
                NewAlias::Exchanged => Staging::Empty,
                NewAlias::Moved => Staging::Torn,
                NewAlias::Untouched | NewAlias::Refused => Staging::Full,
            };
            let refused = |errno| AttemptResult::Refused(Call::Map, errno);
            (arrived.map_or_else(refused, |()| AttemptResult::Migrated), left)
        }
    };
    effort.counters.window_ns = monotonic_ns().saturating_sub(from).max(1);
    restore(ended.0, ended.1);
    slot.retire();
    effort.slow_down(backend);
    ended
}
