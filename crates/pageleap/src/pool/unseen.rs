//! Finds out whether memory fits under limits that this process cannot see: those of memory cgroups
//! outside of its namespace.
//!
//! If a page of 4 KB does not fit under the limit of a memory cgroup, the kernel kills a process in
//! it. A page of 2 MB it refuses instead (`mem_cgroup_oom` in mm/memcontrol.c looks at requests of
//! at most eight pages). `madvise(MADV_COLLAPSE)` (Linux 6.1) asks for such a page and reports
//! EBUSY if the cgroup refuses it. So before each step of a pool, huge pages of as many bytes are
//! taken and given back. If memory is too fragmented for that, or the kernel is older, the room
//! stays unknown.

use super::room::{MARGIN, Room};
use crate::address_ranges::reserve_aligned;
use crate::backend::{Backend, Errno, Prot};
use crate::error::Error;
use crate::sync::{Mutex, lock, thread};
use crate::units::{BASE_PAGE, NodeId, PageSize};

/// The limits that a pool cannot see while it is filled.
pub(crate) struct Unseen<'a> {
    backend: &'a dyn Backend,
    node: NodeId,
    why: String,
    /// Memory that stays free for others, held while the pool is filled.
    _margin: Option<Held<'a>>,
    /// Only one thread tries at a time, because the huge pages of another would look like a lack of
    /// room.
    turn: Mutex<()>,
}

/// Whether a number of bytes fits.
enum Fits<'a> {
    Yes(Held<'a>),
    No,
    Unknown,
}

/// Memory that is given back when the value is dropped.
struct Held<'a> {
    backend: &'a dyn Backend,
    addr: usize,
    len: usize,
}

impl<'a> Unseen<'a> {
    /// The limits that may be hidden from this process; `None` if all groups are seen.
    ///
    /// # Errors
    /// There is not even room for the memory that has to stay free ([`MARGIN`]).
    pub(crate) fn of(backend: &'a dyn Backend, node: NodeId) -> Result<Option<Self>, Error> {
        let room = Room::now(node)?;
        let Some(why) = room.hidden().map(str::to_owned) else { return Ok(None) };
        let margin = match Held::take(backend, MARGIN as usize) {
            Fits::Yes(margin) => Some(margin),
            Fits::No => return Err(no_room(node, &why, MARGIN)),
            Fits::Unknown => None,
        };
        Ok(Some(Unseen { backend, node, why, _margin: margin, turn: Mutex::new(()) }))
    }

    /// Takes a step by `take`, if it fits.
    pub(crate) fn step(
        &self,
        bytes: u64,
        take: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _turn = lock(&self.turn);
        let len = (bytes as usize).next_multiple_of(PageSize::Thp.bytes());
        match Held::take(self.backend, len) {
            Fits::No => Err(no_room(self.node, &self.why, bytes)),
            Fits::Yes(held) => {
                drop(held);
                take()
            }
            Fits::Unknown => take(),
        }
    }
}

/// Whether bytes fit under limits that this process cannot see, as far as that can be known.
pub(crate) fn fits(backend: &dyn Backend, bytes: usize) -> bool {
    !matches!(Held::take(backend, bytes.next_multiple_of(PageSize::Thp.bytes())), Fits::No)
}

fn no_room(node: NodeId, why: &str, needed_bytes: u64) -> Error {
    Error::OutOfMemory {
        node,
        needed_bytes,
        free_bytes: 0,
        limit: format!("a memory cgroup that this process cannot see ({why})"),
        remedy: "take less, or raise the limit of the container or of the groups around it".into(),
    }
}

impl<'a> Held<'a> {
    /// Takes huge pages of `len` bytes together.
    fn take(backend: &'a dyn Backend, len: usize) -> Fits<'a> {
        /// Tries for each page: it may be locked or isolated for a moment.
        const TRIES: u32 = 20;
        let Ok(addr) = reserve_aligned(backend, len) else { return Fits::Unknown };
        let held = Held { backend, addr, len };
        // SAFETY: the range has just been reserved, and only `held` knows it.
        if unsafe { backend.protect(addr, len, Prot::READ_WRITE) }.is_err() {
            return Fits::Unknown;
        }
        for at in (addr..addr + len).step_by(PageSize::Thp.bytes()) {
            // The call needs one present page. SAFETY: as above.
            if unsafe { backend.populate(at, BASE_PAGE, true) }.is_err() {
                return Fits::Unknown;
            }
            let mut tries = 0;
            // SAFETY: as above.
            while let Err(errno) = unsafe { backend.collapse(at, PageSize::Thp.bytes()) } {
                tries += 1;
                match errno {
                    Errno(libc::EBUSY) => return Fits::No,
                    Errno(libc::EAGAIN) if tries < TRIES => {
                        thread::sleep(std::time::Duration::from_millis(1));
                    }
                    _ => return Fits::Unknown,
                }
            }
        }
        Fits::Yes(held)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own.
        let _ = unsafe { self.backend.release(self.addr, self.len) };
    }
}
