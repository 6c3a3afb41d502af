//! Keeps the two aliases of an area usable: before an attempt they are repaired, and after it their
//! state is repaired or noted.
//!
//! Each run of frames has an alias, a second mapping through which the job reaches the frames. An
//! attempt copies from the alias of the old frames to the alias of the new ones, and then gives the
//! span the page tables of the second alias:
//!
//! ```text
//!                      alias of the new frames        span         alias of the old frames
//!   before             new frames                     old frames   old frames
//!
//!   exchanged          empty             ── tables ─► new frames
//!   page tables parked                                   └──────── tables ─► old frames,
//!                                                                  with the span's attributes
//!   mapped by file     new frames                     new frames   old frames
//!   mapping moved      a hole            ── mapping ► new frames   old frames
//!   refused            perhaps empty, with the        old frames   old frames, or a hole
//!                      access of the span
//! ```
//!
//! Shares keep account of the state of each alias (`pool/alias.rs`), and repair it before its
//! frames are used again.

use super::page_tables::is_congruent;
use super::site::Place;
use crate::backend::{Backend, Call, Errno, Prot};
use crate::engine::commit::AttemptResult;
use crate::engine::effort::NewAlias;
use crate::engine::{AttemptEnd, Entries, OldAlias, Work};
use crate::observe::Attributes;
use crate::units::NodeId;

/// Makes both aliases usable for an attempt. `preferred` is the node from which this worker's page
/// tables come. Returns the node to which it has brought the page tables of the new frames' alias,
/// if it has.
pub(super) fn prepare(
    place: &Place<'_>,
    work: &Work,
    preferred: Option<NodeId>,
) -> Result<Option<NodeId>, (Call, Errno)> {
    let Place { leg, old, new, .. } = *place;
    // The copy writes to the alias of the new frames, so it must be mapped. If the commit will
    // exchange page tables, those of this alias must lie on the node that the leg wants.
    let seat = leg.tables.filter(|_| work.may_exchange && leg.tables == preferred);
    match seat {
        Some(node) => leg.to.seat_tables(new, node, |part| leg.lend_attributes(part))?,
        None => leg.to.mend_torn(new)?,
    }
    // The copy reads the alias of the old frames, or their page tables are parked there, so a hole
    // that a failed attempt has left is filled first.
    leg.from.mend_torn(old)?;
    Ok(seat)
}

/// Notes in which state an attempt has left both aliases, and makes them usable for the next
/// attempt. `lent` are the attributes that the span had. Returns whether another attempt is
/// possible.
pub(super) fn settle(
    place: &Place<'_>,
    work: &Work,
    lent: &Attributes,
    ended: &AttemptEnd,
    preferred: Option<NodeId>,
    backend: &dyn Backend,
) -> bool {
    fill_or_note_new(place, ended.after.new_alias);
    settle_old(place, work, lent, ended.old_alias, preferred);
    settle_new(place, work, ended, preferred, backend)
}

/// Fills a hole at once, in which another thread's next mapping could land, or notes what is missing.
fn fill_or_note_new(Place { leg, new, .. }: &Place<'_>, new_alias: NewAlias) {
    match new_alias {
        NewAlias::Untouched => {}
        NewAlias::Exchanged | NewAlias::Refused => leg.to.mark_hollow(*new),
        NewAlias::Moved => leg.to.mend_hole(*new),
    }
}

/// What is left to do for the alias of the new frames, once no alias is a hole.
fn settle_new(
    place: &Place<'_>,
    work: &Work,
    ended: &AttemptEnd,
    preferred: Option<NodeId>,
    backend: &dyn Backend,
) -> bool {
    let Place { leg, new, .. } = *place;
    let new_alias = ended.after.new_alias;
    if ended.step == AttemptResult::Migrated {
        if new_alias != NewAlias::Exchanged && leg.tables.is_some() {
            // `mmap` has filled new page tables of the span, under this worker's policy.
            leg.to.note_tables(new, preferred);
        }
        return true;
    }
    if new_alias != NewAlias::Refused || work.span.prot == Prot::READ_WRITE {
        return true;
    }
    // The next copy goes through this alias. SAFETY: the alias of frames that are the job's.
    unsafe { backend.protect(work.new.alias, work.span.len, Prot::READ_WRITE) }.is_ok()
}

fn settle_old(
    place: &Place<'_>,
    work: &Work,
    lent: &Attributes,
    left: OldAlias,
    preferred: Option<NodeId>,
) {
    let Place { leg, old, .. } = *place;
    match left {
        OldAlias::Untouched => {}
        OldAlias::Spoilt { apart } => {
            if apart {
                leg.from.rejoin(old);
            }
            leg.from.mark_spoilt(old);
        }
        OldAlias::HasTables(entries) => {
            leg.from.mark_borrowed(old);
            // Where whole page-table pages could not move, the kernel has made new ones, under this
            // worker's memory policy.
            let moved_whole =
                is_congruent(work.old.alias, work.span.addr) && entries != Entries::Apart;
            if !moved_whole && leg.from.0.tables != preferred {
                leg.from.note_tables(old, None);
            }
            if entries == Entries::Apart {
                leg.from.reclaim_from(old, lent);
            }
        }
        // Perhaps a hole, where another thread's next mapping could land: fill it at once.
        OldAlias::Torn => leg.from.mend_hole(old),
    }
}
