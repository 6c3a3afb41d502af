//! Address space in which page tables of views are made before they are needed.

use std::sync::Arc;

use crate::address_ranges::{ALIASES, Listed, reserve_aligned};
use crate::backend::Backend;
use crate::engine::views::Views;
use crate::error::Error;

/// The unit in which page tables move: the addresses of a standby and of a view agree modulo this.
const ALIGN: usize = 2 << 20;

/// The standbys of one worker: address space for an area of each view.
pub(super) struct Standbys {
    backend: Arc<dyn Backend>,
    /// The most bytes of an area.
    most: usize,
    all: Vec<Standby>,
}

struct Standby {
    start: usize,
    bytes: usize,
    /// In the list of aliases, so that neither a pool nor a region takes addresses from it.
    listed: Option<Listed>,
    /// A part that is a hole since a call failed. Other code may map memory there.
    torn: Option<(usize, usize)>,
}

impl Standbys {
    /// Reserves standbys for so many views, and for areas of `most` bytes.
    pub(super) fn new(
        backend: &Arc<dyn Backend>,
        views: usize,
        most: usize,
    ) -> Result<Standbys, Error> {
        let mut standbys = Standbys { backend: backend.clone(), most, all: Vec::new() };
        for _ in 0..views {
            let standby = standbys.reserve()?;
            standbys.all.push(standby);
        }
        Ok(standbys)
    }

    fn reserve(&self) -> Result<Standby, Error> {
        let bytes = self.most.next_multiple_of(ALIGN) + ALIGN;
        let start = reserve_aligned(&*self.backend, bytes)?;
        // After `mlockall(MCL_FUTURE)` it would count against RLIMIT_MEMLOCK.
        // SAFETY: the range was just reserved.
        let _ = unsafe { self.backend.unlock(start, bytes) };
        let listed = Some(Listed::new(&ALIASES, &*self.backend, start, bytes));
        Ok(Standby { start, bytes, listed, torn: None })
    }

    /// Gives each of the views its standby.
    pub(super) fn stand_by(&self, views: &mut Views) {
        views.stand_by(|number, addr| self.addr(number, addr));
    }

    /// The part of a standby for an area at `addr` of the view.
    fn addr(&self, number: usize, addr: usize) -> usize {
        self.all[number].start + addr % ALIGN
    }

    /// Replaces a standby in which a failed call has left a hole of `len` bytes, for an area at `addr`. If
    /// that is refused, areas fail until it succeeds.
    pub(super) fn replace_torn(&mut self, number: usize, addr: usize, len: usize) {
        let at = self.addr(number, addr);
        // Only a call that has got far leaves a hole.
        if self.backend.is_mapped(at, len) {
            return;
        }
        if let Ok(fresh) = self.reserve() {
            let mut torn = std::mem::replace(&mut self.all[number], fresh);
            torn.torn = Some((at, len));
            torn.release(&*self.backend);
        }
    }
}

impl Standby {
    fn release(&mut self, backend: &dyn Backend) {
        drop(self.listed.take());
        let (start, end) = (self.start, self.start + self.bytes);
        let parts = match self.torn {
            Some((torn, len)) => [(start, torn - start), (torn + len, end - (torn + len))],
            None => [(start, self.bytes), (end, 0)],
        };
        // A shortage may be over soon.
        const TRIES: usize = 3;
        for (addr, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            // SAFETY: reserved by `reserve`, and used by nobody any more.
            let _ = (0..TRIES).find(|_| unsafe { backend.release(addr, len) }.is_ok());
        }
    }
}

impl Drop for Standbys {
    fn drop(&mut self) {
        let Standbys { backend, all, .. } = self;
        all.iter_mut().for_each(|standby| standby.release(&**backend));
    }
}
