//! Keeps the attributes that a user has set on a range across a change of its frames.
//!
//! A mapping that replaces another starts with default attributes. An engine that exchanges page
//! tables gives the alias the range's attributes first, and they arrive in the same instant. An
//! engine that maps a file sets the attributes again right after.

use super::{Advice, Backend, Call, Errno};
use crate::error::Error;
use crate::observe::Attributes;

/// Changes the advice of a range from `now` to `wanted`. Access and locks are not touched.
///
/// # Safety
/// The range belongs to the caller.
pub(crate) unsafe fn advise(
    backend: &dyn Backend,
    addr: usize,
    len: usize,
    now: &Attributes,
    wanted: &Attributes,
) -> Result<(), Errno> {
    let pattern = |a: &Attributes| {
        if a.random {
            Advice::Random
        } else if a.sequential {
            Advice::Sequential
        } else {
            Advice::Normal
        }
    };
    let huge = |wanted: bool| if wanted { Advice::HugePage } else { Advice::NoHugePage };
    let fork = if wanted.dont_fork { Advice::DontFork } else { Advice::DoFork };
    let dump = if wanted.dont_dump { Advice::DontDump } else { Advice::DoDump };
    let changes = [
        (now.dont_fork != wanted.dont_fork).then_some(fork),
        (now.dont_dump != wanted.dont_dump).then_some(dump),
        (pattern(now) != pattern(wanted)).then_some(pattern(wanted)),
        wanted.huge_pages.filter(|_| now.huge_pages != wanted.huge_pages).map(huge),
    ];
    changes.into_iter().flatten().try_for_each(|advice| {
        // SAFETY: forwarded to the caller.
        unsafe { backend.advise(addr, len, advice) }
    })
}

/// Locks a range if it was locked before.
///
/// # Safety
/// The range belongs to the caller.
pub(crate) unsafe fn relock(
    backend: &dyn Backend,
    addr: usize,
    len: usize,
    wanted: &Attributes,
) -> Result<(), Error> {
    if !wanted.locked {
        return Ok(());
    }
    // SAFETY: forwarded to the caller.
    match unsafe { backend.lock(addr, len, wanted.lock_on_fault) } {
        // The lock is set. Only the faulting-in failed, because the range may not be accessed.
        Err(Errno(libc::ENOMEM)) if !wanted.prot.readable() => Ok(()),
        other => other.map_err(|errno| Error::call(Call::Lock, addr, len, errno)),
    }
}
