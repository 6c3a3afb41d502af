//! How frames of pools come to the addresses of a region, and leave them: for growing, `back` and
//! `discard`. Leaps exchange frames by their engines.

use std::ops::Range;

use super::{Extent, RegionInner};
use crate::backend::{Advice, Call, Mapping, Prot};
use crate::error::Error;
use crate::forks;
use crate::limits::check_address_space;
use crate::pool::{Run, Share, Target};
use crate::sync::{lock, thread};
use crate::units::NodeId;

impl RegionInner {
    /// Maps frames that the region has taken. An error comes with the pages of the extent that
    /// failed; the extents behind it have not been touched.
    pub(super) fn map_all_new(
        &self,
        new: &[Extent<Share>],
        target: &Target,
    ) -> Result<(), (Error, Range<u64>)> {
        // As a rule the page tables of a free frame's alias lie where its share wants them.
        let strayed = |extent: &Extent<Share>| {
            let tables = target.tables(&extent.share).filter(|_| !self.page.is_hugetlb());
            tables.filter(|node| extent.share.has_stray_tables(extent.frames(), *node))
        };
        let map = |extent: &Extent<Share>, seat: bool| {
            let run = extent.frames();
            let preferred = strayed(extent)
                .filter(|node| seat && self.backend.prefer_tables_on(Some(node.0)).is_ok());
            let seated =
                preferred.map_or(Ok(()), |node| extent.share.seat_tables(run, node, |_| Ok(())));
            let alias = extent.share.0.alias_of(run.first);
            seated
                .map_err(|(call, errno)| Error::call(call, alias, self.bytes(run.frames), errno))
                .and_then(|()| self.map_new(extent.pages.start, run, &extent.share, preferred))
                .map_err(|error| (error, extent.pages.clone()))
        };
        let map_all = |seat| new.iter().try_for_each(|extent| map(extent, seat));
        let stray = new.iter().any(|extent| strayed(extent).is_some());
        if !stray || check_address_space(&*self.backend, 1).is_err() {
            return map_all(false);
        }
        // A thread of our own, because the policy of the caller's thread must not change. If no
        // thread can be started, the page tables stay where they are.
        let mut mapped = None;
        thread::scope(|scope| {
            let on_a_thread = || mapped = Some(map_all(true));
            let _ = scope.start(c"pageleap", on_a_thread);
        });
        mapped.unwrap_or_else(|| map_all(false))
    }

    /// Maps frames that the region has taken, with the attributes of a new region. `preferred` is
    /// the node from which the page tables of this thread and of the frames' alias come; `None` if
    /// the thread is the user's.
    fn map_new(
        &self,
        page: u64,
        run: Run,
        pool: &Share,
        preferred: Option<NodeId>,
    ) -> Result<(), Error> {
        let (addr, len) = (self.addr(page), self.bytes(run.frames));
        let range = addr..addr + len;
        let alias = pool.0.alias_of(run.first);
        // SAFETY: the range is reserved, unbacked and claimed; the alias is that of frames which
        // this region has taken.
        unsafe {
            if !self.page.is_hugetlb() {
                // The page tables of the alias are filled already, so they are moved.
                // `mlockall` may have locked the alias, and an exchange takes the lock along.
                let _ = self.backend.unlock(alias, len);
                let dumped = self.backend.advise(alias, len, Advice::DoDump);
                let exchanged = dumped.and_then(|()| self.backend.exchange(alias, addr, len));
                pool.mark_hollow(run);
                let _ = pool.0.advise_alias(run);
                if exchanged.is_ok() {
                    let brought = pool.tables_of(run, preferred);
                    lock(&self.tables).exchanged(&range, &brought, preferred);
                    return Ok(());
                }
            }
            let offset = pool.0.offset_of(run.first);
            let mapping = Mapping {
                addr,
                len,
                file: pool.0.file,
                offset,
                prot: Prot::READ_WRITE,
                populate: true,
            };
            let mapped = forks::while_mapping(|| {
                self.backend.map(&mapping).map_err(|errno| (Call::Map, errno))?;
                lock(&self.tables).mapped(&range, preferred, true);
                self.backend
                    .advise(addr, len, Advice::DontFork)
                    .map_err(|errno| (Call::Advise, errno))
            });
            mapped.map_err(|(call, errno)| Error::call(call, addr, len, errno))
        }
    }

    /// Unmaps backed pages and gives their frames back.
    pub(super) fn unback(&self, pages: Range<u64>) -> Result<(), Error> {
        let extents = lock(&self.extents).remove(pages.clone());
        if extents.is_empty() && !lock(&self.limbo).is_empty() {
            // Views may still map these pages since an earlier call.
            return self.vacate_views(&pages);
        }
        let mut failure = None;
        for extent in extents {
            let (addr, len) = (self.addr(extent.pages.start), self.bytes(extent.frames().frames));
            // SAFETY: the caller of `discard` has exclusive access to the region.
            match unsafe { self.backend.vacate(addr, len) } {
                Ok(()) => {
                    lock(&self.tables).unmapped(&(addr..addr + len));
                    match self.vacate_views(&extent.pages) {
                        Ok(()) => drop(extent.share.give_back(extent.frames())),
                        Err(error) => {
                            // The pages are unbacked. A view may still map the frames.
                            lock(&self.limbo).push((extent.share.clone(), extent.frames()));
                            failure.get_or_insert(error);
                        }
                    }
                }
                Err(errno) => {
                    lock(&self.extents).replace(extent);
                    failure.get_or_insert(Error::call(Call::Vacate, addr, len, errno));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}
