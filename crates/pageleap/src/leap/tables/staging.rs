//! Address space beside the region, where entries wait between two calls.

use std::sync::Arc;

use crate::address_ranges::{ALIASES, Listed, reserve_aligned};
use crate::backend::{Advice, Backend, Errno, Mapping, Prot};
use crate::engine::Frames;
use crate::error::Error;
use crate::forks;
use crate::pool::Share;
use crate::region::PageTableLevel;
use crate::units::BASE_PAGE;

use super::plan::area_bytes;

/// Address space for one area, whose addresses agree with those of regions as
/// [`engine::tables`](crate::engine::tables) demands: modulo the reach of the level below, and not
/// modulo that of the level itself.
pub(super) struct Staging {
    backend: Arc<dyn Backend>,
    level: PageTableLevel,
    start: usize,
    /// In the list of aliases, so that the repair of a hole in here can tell whose mapping it finds:
    /// neither a pool nor a region takes addresses from it.
    listed: Option<Listed>,
    /// How many bytes of it map frames, and no longer nothing.
    ready: usize,
    /// The first bytes may be a hole since a call failed, and could not be mapped again yet: the
    /// frames that they are to map, and how many bytes.
    hole: Option<(Frames, usize)>,
    /// Whether another thread has mapped memory into such a hole.
    is_lost: bool,
}

impl Staging {
    /// Reserves the address space.
    pub(super) fn new(backend: &Arc<dyn Backend>, level: PageTableLevel) -> Result<Staging, Error> {
        // Aligned to 1 GB, or to 2 MB if it is smaller than that.
        let bytes = bytes(level);
        let start = reserve_aligned(&**backend, bytes)?;
        let listed = Some(Listed::new(&ALIASES, &**backend, start, bytes));
        Ok(Staging {
            backend: backend.clone(),
            level,
            start,
            listed,
            ready: 0,
            hole: None,
            is_lost: false,
        })
    }

    /// Where the entries of an area wait.
    pub(super) fn addr(&self) -> usize {
        self.start + skew(self.level)
    }

    /// Whether it can no longer be used.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Makes it ready to take the entries of an area of `len` bytes: maps frames of a share there,
    /// without access and page tables, unless an earlier area has. By that mapping a look tells that
    /// the range is the library's, should the next call leave a hole.
    pub(super) fn make_ready(&mut self, share: &Share, len: usize) -> Result<(), Errno> {
        if let Some((frames, len)) = self.hole {
            self.mend(&frames, len);
        }
        if self.hole.is_some() || self.is_lost {
            return Err(Errno(libc::ENOMEM));
        }
        if len <= self.ready {
            return Ok(());
        }
        let all = share.0.frames as usize * share.page_size().bytes();
        let len = area_bytes(self.level).min(all);
        let frames = Frames { alias: self.addr(), file: share.0.file, offset: 0 };
        // SAFETY: the range was reserved by `new`, and nobody else uses it.
        let mapped = self.map(&frames, len, |backend, m| unsafe { backend.map(m) });
        self.ready = if mapped.is_ok() { len } else { 0 };
        // Only a call that has got far leaves a hole.
        if mapped.is_err() && !self.backend.is_mapped(self.addr(), len) {
            self.lose(len);
        }
        mapped
    }

    /// Maps frames again after a failed call that may have left a hole. Another thread's mapping in
    /// the hole is left alone, and the range is given up.
    pub(super) fn mend(&mut self, frames: &Frames, len: usize) {
        // SAFETY: as above; a mapping that is not a pool's is not replaced.
        self.hole = match self.map(frames, len, |backend, m| unsafe { backend.map_own(m) }) {
            Ok(()) => None,
            Err(Errno(libc::EEXIST)) => {
                self.lose(len);
                None
            }
            // Tried again before the next use: there is no descriptor now with which to look, or
            // no room for a mapping.
            Err(_) => Some((*frames, len)),
        };
    }

    /// Keeps the frames from children. The staging has got the attributes of a span.
    pub(super) fn hide(&self, len: usize) {
        // SAFETY: the range is the staging's own.
        let _ = unsafe { self.backend.advise(self.addr(), len, Advice::DontFork) };
    }

    /// Gives up the first `len` bytes, in which there is a hole, and releases the others.
    fn lose(&mut self, len: usize) {
        drop(self.listed.take());
        self.is_lost = true;
        let (addr, end) = (self.addr(), self.addr() + len);
        self.release(self.start, addr - self.start);
        self.release(end, self.start + bytes(self.level) - end);
    }

    fn release(&self, addr: usize, len: usize) {
        // A mapping that is left may keep the frames of a pool. A shortage may be over soon.
        const TRIES: usize = 3;
        // SAFETY: reserved by `new`, and nobody uses it any more.
        let release = || unsafe { self.backend.release(addr, len) };
        let _ = (0..TRIES).find(|_| release().is_ok());
    }

    fn map(
        &self,
        frames: &Frames,
        len: usize,
        map: impl FnOnce(&dyn Backend, &Mapping) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let Frames { file, offset, .. } = *frames;
        let (addr, backend) = (self.addr(), &*self.backend);
        let mapping = Mapping { addr, len, file, offset, prot: Prot::NONE, populate: false };
        forks::while_mapping(|| {
            map(backend, &mapping)?;
            // A child that gets this mapping keeps the frames, and has no use for it. If the call is
            // refused, nothing is lost. SAFETY: the range is the staging's own.
            let _ = unsafe { backend.advise(addr, len, Advice::DontFork) };
            Ok(())
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some((frames, len)) = self.hole {
            self.mend(&frames, len);
        }
        if let Some((Frames { file, offset, .. }, len)) = self.hole
            && self.backend.maps(self.addr(), len, file, offset) != Ok(true)
        {
            self.lose(len);
        }
        if !self.is_lost {
            drop(self.listed.take());
            self.release(self.start, bytes(self.level));
        }
    }
}

/// How far the addresses of a staging are off those of a region, modulo the reach of a level: the
/// reach of the level below.
fn skew(level: PageTableLevel) -> usize {
    let below = PageTableLevel::ALL.into_iter().rfind(|below| *below < level);
    below.map_or(BASE_PAGE, PageTableLevel::reach_bytes)
}

fn bytes(level: PageTableLevel) -> usize {
    (area_bytes(level) + skew(level)).next_multiple_of(2 << 20)
}
