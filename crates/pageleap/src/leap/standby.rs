//! Address space in which page tables of views are made before they are needed.

use std::sync::Arc;

use crate::address_ranges::{ALIASES, Listed, reserve_aligned};
use crate::backend::{Backend, Call, Errno};
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
    /// Reserves a standby for each of `views` views, for areas of `most` bytes.
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

    /// Gives each of the views its standby, for areas of `len` bytes. An error says why one has
    /// none.
    pub(super) fn stand_by(&mut self, views: &mut Views, len: usize) -> Result<(), (Call, Errno)> {
        for number in 0..views.as_slice().len() {
            if self.all[number].torn.is_some() {
                let fresh = self.reserve().map_err(|_| (Call::Reserve, Errno(libc::ENOMEM)))?;
                std::mem::replace(&mut self.all[number], fresh).release(&*self.backend);
            }
        }
        views.stand_by(|number, addr| {
            debug_assert!(addr % ALIGN + len <= self.all[number].bytes, "an area of {len} bytes");
            self.addr(number, addr)
        });
        Ok(())
    }

    /// The part of a standby for an area at `addr` of the view.
    fn addr(&self, number: usize, addr: usize) -> usize {
        self.all[number].start + addr % ALIGN
    }

    /// Unmaps what an attempt has left at the standbys, which would be a mapping for each place
    /// where an area has been. `torn` is the number of one where a call has failed.
    pub(super) fn clear(&mut self, views: &Views, len: usize, torn: Option<usize>) {
        for (number, view) in views.as_slice().iter().enumerate() {
            if self.all[number].torn.is_some() {
                continue; // another area has left it so, and no other address space was found
            }
            let at = self.addr(number, view.addr);
            // SAFETY: the standby is the worker's, and no area is at work.
            let cleared = torn != Some(number) && unsafe { self.backend.vacate(at, len) }.is_ok();
            // Only a call that has got far leaves a hole. It must not be mapped over, nor unmapped.
            if !cleared && !self.backend.is_mapped(at, len) {
                self.all[number].torn = Some((at, len));
            }
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
