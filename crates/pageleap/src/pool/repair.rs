//! Repairs the aliases of frames, before a frame may be free and before a migration may copy into
//! it.
//!
//! A migration may leave an alias without page tables, with the attributes of a region, or as a
//! hole ([`AliasState`]). There are four repairs, from the cheapest to the most thorough:
//!
//! * give the alias its access and advice back;
//! * fill its page tables (MADV_POPULATE_READ);
//! * map it anew;
//! * map it only if a hole or a pool's own mapping is there.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::alias::{AliasEvent, AliasState};
use super::descriptor::LOST;
use super::frames::Run;
use super::share::{ALIAS_ATTRIBUTES, Fill, Share, ShareInner, State};
use crate::backend::{Advice, Call, Errno, Mapping, Prot, attributes};
use crate::forks;
use crate::observe::{AttributeRun, Attributes};
use crate::sync::{lock, monotonic_ns};
use crate::units::{NodeId, PageSize};

/// A look at the attributes of an alias is slow if it takes longer than this: a new mapping of 16
/// MB takes less.
const SLOW_NS: u64 = 2_000_000;

/// For how long after a slow look aliases are mapped anew without a look. A look may have been slow
/// only because another thread had the CPU, so this does not last.
const LOOKS_AGAIN_NS: u64 = 100_000_000;

impl Share {
    /// Repairs the alias of `run`, so that it is filled and writable, with [`ALIAS_ATTRIBUTES`].
    pub(super) fn mend_alias(&self, run: Run) -> Result<(), (Call, Run, Errno)> {
        // After a failure the next, stronger kind of repair does the work.
        let outcome = |repaired: &Result<(), Errno>| match repaired {
            Ok(()) => AliasEvent::Mended,
            Err(_) => AliasEvent::Spoilt,
        };
        self.reclaim(run);
        let hollow = self.alias_runs(run, AliasState::Hollow);
        for part in hollow.into_iter().flat_map(|run| self.0.steps(run)) {
            let filled = self.0.refill_alias(part);
            let mut state = lock(&self.0.state);
            state.aliases.note(part, outcome(&filled));
            if filled.is_ok() {
                state.strayed.set(part, true);
            }
        }
        self.look_at_reclaimed(&[run]);
        let spoilt = self.alias_runs(run, AliasState::Spoilt);
        for part in spoilt.into_iter().flat_map(|run| self.0.steps(run)) {
            let mapped = self.0.map_alias(part, Fill::Anew);
            lock(&self.0.state).mapped_anew(part, mapped);
            if let Err(LOST) = mapped {
                return Err((LOST.0, part, LOST.1));
            }
        }
        for part in self.alias_runs(run, AliasState::Torn) {
            self.0.map_alias(part, Fill::Torn).map_err(|(call, errno)| (call, part, errno))?;
            lock(&self.0.state).mapped_anew(part, Ok(()));
        }
        Ok(())
    }

    /// The parts of `run` whose alias is in that state.
    fn alias_runs(&self, run: Run, alias: AliasState) -> Vec<Run> {
        lock(&self.0.state).aliases.runs_in(run, alias)
    }

    /// Removes a tracker's marks (write-protection) from the alias of vacated frames. `untrack`
    /// ends the tracking of an address range. The page tables stay.
    pub(crate) fn take_marks(&self, run: Run, untrack: impl Fn(usize, usize) -> Result<(), Errno>) {
        for part in self.0.steps(run) {
            let (addr, len) =
                (self.0.alias_of(part.first), part.frames as usize * self.0.page.bytes());
            // Write-protection has left page table entries that do not allow writing. Taking the
            // permission away and giving it again restores the entries, in a fraction of the time
            // of a fault for each.
            // SAFETY: the alias is the share's own, and the frames have no user.
            let healed = untrack(addr, len).and_then(|()| unsafe {
                self.0.backend.protect(addr, len, Prot::READ)?;
                self.0.backend.protect(addr, len, Prot::READ_WRITE)
            });
            if healed.is_err() {
                self.mark_spoilt(part);
            }
        }
    }

    /// Brings the page tables of the alias of frames, which the caller has taken, to `node`. A part
    /// whose page tables may lie elsewhere is mapped anew, with the attributes of an alias, and
    /// then passed to `finish`. A part that fails is mapped anew again the next time.
    ///
    /// New page tables lie where the calling thread's policy says, which has to be `node`.
    pub(crate) fn seat_tables(
        &self,
        run: Run,
        node: NodeId,
        finish: impl Fn(Run) -> Result<(), Errno>,
    ) -> Result<(), (Call, Errno)> {
        let wanted = self.0.tables == Some(node);
        let parts = if wanted { lock(&self.0.state).strayed.runs_in(run) } else { vec![run] };
        for part in parts {
            let torn = !self.alias_runs(part, AliasState::Torn).is_empty();
            let mapped = self.0.map_alias(part, if torn { Fill::Torn } else { Fill::Anew });
            lock(&self.0.state).mapped_anew(part, mapped);
            mapped?;
            finish(part).map_err(|errno| (Call::Advise, errno))?;
            lock(&self.0.state).strayed.set(part, !wanted);
        }
        Ok(())
    }

    /// Maps the alias of frames, which the caller has taken, where it may be a hole.
    pub(crate) fn mend_torn(&self, run: Run) -> Result<(), (Call, Errno)> {
        self.alias_runs(run, AliasState::Torn).into_iter().try_for_each(|part| {
            self.0.map_alias(part, Fill::Torn)?;
            lock(&self.0.state).mapped_anew(part, Ok(()));
            Ok(())
        })
    }

    /// Notes that the alias of `run` is filled, with the access and the attributes of a region.
    pub(crate) fn mark_borrowed(&self, run: Run) {
        lock(&self.0.state).aliases.note(run, AliasEvent::Lent);
    }

    /// Gives the borrowed alias of frames its own access and attributes again, before the frames
    /// are free. Nobody uses the frames. If that fails, the alias is mapped anew later.
    pub(crate) fn reclaim(&self, run: Run) {
        for part in self.alias_runs(run, AliasState::Borrowed) {
            let event = match self.0.reclaim_alias(part) {
                Ok(()) => AliasEvent::Reclaimed,
                Err(_) => AliasEvent::Spoilt,
            };
            lock(&self.0.state).aliases.note(part, event);
        }
    }

    /// Reclaims an alias that has got the attributes `lent`, by the fewest calls, and joins it with
    /// its neighbours. Any further attributes are found by a later look.
    pub(crate) fn reclaim_from(&self, run: Run, lent: &Attributes) {
        let inner = &*self.0;
        let own = Attributes { huge_pages: lent.huge_pages, ..ALIAS_ATTRIBUTES };
        let Range { start, end } = inner.alias_range(run);
        let (addr, len) = (start, end - start);
        let is_changed = (lent.dont_fork, lent.dont_dump) != (own.dont_fork, own.dont_dump);
        // SAFETY: the alias is the share's own, and the frames have no user.
        let reclaimed = unsafe {
            let access = match lent.prot == own.prot {
                true => Ok(()),
                false => inner.backend.protect(addr, len, own.prot),
            };
            if lent.locked {
                let _ = inner.backend.unlock(addr, len);
            }
            access.and_then(|()| attributes::advise(&*inner.backend, addr, len, lent, &own))
        };
        // The kernel joins mappings when a call changes their attributes.
        if !is_changed {
            self.rejoin(run);
        }
        let event = match reclaimed {
            Ok(()) => AliasEvent::Reclaimed,
            Err(_) => AliasEvent::Spoilt,
        };
        lock(&inner.state).aliases.note(run, event);
    }

    /// Checks whether the reclaimed alias of unused frames has its own attributes. The program may
    /// have set others on a span right before the span's page tables went to the alias, and no call
    /// takes back advice on huge pages. Such an alias is mapped anew later, because the next region
    /// would get the attributes with the page tables. One call of this function for many runs costs
    /// less than a call for each.
    pub(crate) fn look_at_reclaimed(&self, runs: &[Run]) {
        let inner = &*self.0;
        let doubtful: Vec<Run> =
            runs.iter().flat_map(|run| self.alias_runs(*run, AliasState::Reclaimed)).collect();
        if doubtful.is_empty() {
            return;
        }
        let ranges: Vec<_> = doubtful.iter().map(|run| inner.alias_range(*run)).collect();
        let began_ns = monotonic_ns();
        // Smaps takes long where it has to be read as a whole: for hugetlb pages always.
        let is_slow =
            inner.page.is_hugetlb() || began_ns < inner.looks_again_ns.load(Ordering::Relaxed);
        let seen = if is_slow { None } else { inner.backend.attributes(&ranges).ok() };
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(began_ns) > SLOW_NS {
            inner.looks_again_ns.store(now_ns + LOOKS_AGAIN_NS, Ordering::Relaxed);
        }
        let is_clean = |range: &Range<usize>, seen: &[AttributeRun]| {
            let mut parts =
                seen.iter().filter(|part| part.start < range.end && part.end > range.start);
            let first = parts.clone().next();
            first.is_some_and(|first| first.start <= range.start)
                && parts.all(|part| part.attributes == ALIAS_ATTRIBUTES)
        };
        let state = &mut *lock(&inner.state);
        for (run, range) in doubtful.into_iter().zip(&ranges) {
            let is_clean = seen.as_ref().is_some_and(|seen| is_clean(range, seen));
            let event = if is_clean { AliasEvent::Mended } else { AliasEvent::Spoilt };
            state.aliases.note(run, event);
        }
    }

    /// Makes the kernel merge the alias of unused frames with its neighbours, if it has not. The
    /// kernel tries that whenever an attribute changes, so one is changed and changed back. If it
    /// fails, the alias stays apart until the frames are free.
    pub(crate) fn rejoin(&self, run: Run) {
        let (addr, len) = (self.0.alias_of(run.first), run.frames as usize * self.0.page.bytes());
        for advice in [Advice::DoDump, Advice::DontDump] {
            // SAFETY: the alias is the share's own.
            let _ = unsafe { self.0.backend.advise(addr, len, advice) };
        }
    }

    /// Maps the alias of `run` again, after a call has failed that may have left a hole.
    pub(crate) fn mend_hole(&self, run: Run) {
        lock(&self.0.state).aliases.note(run, AliasEvent::MapFailed);
        let mapped = self.0.map_alias(run, Fill::Torn);
        lock(&self.0.state).mapped_anew(run, mapped);
    }

    /// Notes that the page tables of the alias of `run` have gone to a region.
    pub(crate) fn mark_hollow(&self, run: Run) {
        lock(&self.0.state).aliases.note(run, AliasEvent::TablesTaken);
    }

    /// Notes that the alias of `run` must be mapped anew before the frames can be free.
    pub(crate) fn mark_spoilt(&self, run: Run) {
        lock(&self.0.state).aliases.note(run, AliasEvent::Spoilt);
    }
}

impl State {
    /// Notes that the alias of `run` has been mapped anew, or that this failed and may have left a
    /// hole. If it failed for want of the descriptor, nothing has changed.
    pub(super) fn mapped_anew(&mut self, run: Run, mapped: Result<(), (Call, Errno)>) {
        let event = match mapped {
            Ok(()) => AliasEvent::Mapped,
            Err(LOST) => AliasEvent::Spoilt,
            Err(_) => AliasEvent::MapFailed,
        };
        self.aliases.note(run, event);
        self.strayed.set(run, true);
    }
}

impl ShareInner {
    /// The addresses at which the alias maps `run`.
    fn alias_range(&self, run: Run) -> Range<usize> {
        self.alias_of(run.first)..self.alias_of(run.end())
    }

    /// Maps the alias of `run`.
    pub(super) fn map_alias(&self, run: Run, fill: Fill) -> Result<(), (Call, Errno)> {
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        let offset = self.offset_of(run.first);
        let populate = fill != Fill::New;
        let mapping =
            Mapping { addr, len, file: self.file, offset, prot: Prot::READ_WRITE, populate };
        self.look_at_descriptor()?;
        forks::while_mapping(|| {
            // SAFETY: the alias is the share's own, and the frames have no user. Memory that
            // another thread has mapped into a hole is not replaced.
            unsafe {
                if fill == Fill::Torn {
                    self.backend.map_own(&mapping)
                } else {
                    self.backend.map(&mapping)
                }
                .map_err(|errno| (Call::Map, errno))?;
                // Under `mlockall(MCL_FUTURE)` the mapping is locked now, and an exchange would
                // leave the lock behind.
                self.backend.unlock(addr, len).map_err(|errno| (Call::Lock, errno))?;
            }
            self.advise_alias(run).map_err(|errno| (Call::Advise, errno))
        })
    }

    /// Gives the alias of `run` its own access and attributes again, in place of a region's. Its
    /// page tables stay, and become writable again.
    pub(super) fn reclaim_alias(&self, run: Run) -> Result<(), Errno> {
        for part in self.steps(run) {
            let (addr, len) = (self.alias_of(part.first), part.frames as usize * self.page.bytes());
            // SAFETY: the alias is ours, and the frames have no user.
            unsafe { self.backend.protect(addr, len, Prot::READ_WRITE) }?;
        }
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        // `mlockall` or the region may have locked it. A process that may not unlock memory has not
        // locked any. SAFETY: the alias is the share's own.
        let _ = unsafe { self.backend.unlock(addr, len) };
        self.advise_alias(run)
    }

    /// Fills the alias of `run` again, whose page tables have gone to a region, and gives it its
    /// own access and attributes. No mapping is made, which a child could inherit before it is
    /// hidden. Refused for huge pages: only a new mapping is sure to have no page tables for base
    /// pages.
    pub(super) fn refill_alias(&self, run: Run) -> Result<(), Errno> {
        if self.page != PageSize::Base {
            return Err(Errno(libc::EINVAL));
        }
        self.reclaim_alias(run)?;
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        // For reading, because then the kernel maps 16 pages per fault (fault-around), and pages of
        // a shared memory file are writable all the same. SAFETY: the alias is the share's own, and
        // the frames have no user.
        unsafe { self.backend.populate(addr, len, false) }
    }

    /// The parts of a run for calls that visit every page. Such a call keeps all other threads of
    /// the process from mapping and unmapping, for some 20 us per MB.
    pub(super) fn steps(&self, run: Run) -> impl Iterator<Item = Run> {
        /// Bytes of a step: one page of page table.
        const STEP: usize = 2 << 20;
        run.pieces(STEP / self.page.bytes())
    }

    /// Gives the alias of `run` the advice of all aliases, which keeps it from children and core
    /// dumps.
    pub(crate) fn advise_alias(&self, run: Run) -> Result<(), Errno> {
        // SAFETY: the alias is ours, and the frames have no user.
        unsafe { self.hide(self.alias_of(run.first), run.frames as usize * self.page.bytes()) }
    }
}
