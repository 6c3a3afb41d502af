//! A share: the frames that a pool has on one node.
//!
//! A share is one sealed memory file, and one mapping of the whole file, the *alias*.
//! **Invariant:** a frame is either free or has one owner (a region, or a job that will hand it to
//! one). **Invariant:** the page tables of the alias are filled for every free frame, so that a
//! migration copies into the frame, and moves those page tables, without a fault.
//!
//! A migration takes the page tables from the alias of the frames that it uses, and puts the page
//! tables of the frames that it vacates into their alias. So little is left to do when frames come
//! back, and a frame keeps its page tables: in its alias while it is free, in a region while it is
//! used. Only a new mapping gets new page tables. They lie on the node that the calling thread's
//! policy says, and not where the share wants them, so the share notes their frames as *strayed*.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use super::alias::{AliasState, Aliases};
use super::frames::{FrameAllocator, FrameSet, Run};
use crate::address_ranges::{ALIASES, Listed, reserve_aligned};
use crate::backend::{Advice, Backend, Call, Errno, Mapping, MemoryFile, Policy, Prot};
use crate::error::Error;
use crate::forks;
use crate::observe::Attributes;
use crate::placement::{NodeCounts, Verification};
use crate::sync::{Condvar, Mutex, lock};
use crate::units::{NodeId, PageSize, human_bytes};

/// The attributes of an alias: neither children nor core dumps get a second copy of the data.
pub(crate) const ALIAS_ATTRIBUTES: Attributes =
    Attributes { dont_fork: true, dont_dump: true, ..Attributes::of_new_mapping(Prot::READ_WRITE) };

/// Frames of one node. Clones are the same share. Every region with frames of the share has a
/// clone, and so has every job; when the last clone is dropped, the memory goes back to the system.
#[derive(Clone)]
pub(crate) struct Share(pub(crate) Arc<ShareInner>);

pub(crate) struct ShareInner {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) file: MemoryFile,
    pub(crate) node: NodeId,
    /// The node for the page tables that map the frames; `None` if it makes no difference.
    pub(crate) tables: Option<NodeId>,
    pub(crate) page: PageSize,
    pub(crate) frames: u64,
    alias: usize,
    /// The alias in the list of this process' addresses.
    listed: Option<Listed>,
    /// A second mapping, locked and read-only, that keeps the frames from being swapped out.
    anchor: Mutex<Option<usize>>,
    /// The process that made it.
    process: u32,
    pub(super) state: Mutex<State>,
    /// Until when the alias is mapped anew without a look at its attributes, because the last look
    /// took long, by `monotonic_ns`.
    pub(super) looks_again_ns: AtomicU64,
    /// Signalled when announced frames have been given back.
    returned: Condvar,
    id: u64,
}

pub(super) struct State {
    allocator: FrameAllocator,
    /// Frames that have held data. They are zeroed before a region gets them as new memory.
    used: FrameSet,
    /// The states of aliases, which tell the repairs that frames need before they are free.
    pub(super) aliases: Aliases,
    /// Frames whose page tables may lie on another node than the share wants.
    pub(super) strayed: FrameSet,
    /// Frames whose alias could not be repaired. The repair is tried again when frames are short.
    unmapped: Vec<Run>,
    /// How many frames are about to be given back.
    announced: u64,
}

/// The bytes that one page of page table of the second level maps.
const GIGABYTE: usize = 1 << 30;

/// The page tables of an alias, and the node on which they were asked for.
#[derive(Clone, Debug)]
pub(crate) struct AliasTables {
    /// The address at which the alias begins.
    pub(crate) addr: usize,
    /// The node of the lowest level; `None` if none was asked for.
    pub(crate) node: Option<NodeId>,
    /// The parts whose lowest level may lie elsewhere, in bytes from the beginning.
    pub(crate) astray: Vec<Range<usize>>,
    /// The node of the level above.
    pub(crate) upper: Option<NodeId>,
}

/// The state of the addresses at which an alias is to be mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// Reserved address space; page tables are filled later.
    New,
    /// The alias.
    Anew,
    /// The alias or a hole.
    Torn,
}

/// The properties of a share that is to be made.
pub(super) struct Plan<'a> {
    pub(super) node: NodeId,
    pub(super) tables: Option<NodeId>,
    pub(super) page: PageSize,
    pub(super) frames: u64,
    pub(super) threads: Option<usize>,
    pub(super) locked: bool,
    pub(super) progress: Option<&'a (dyn Fn(u64) + Send + Sync)>,
}

impl Share {
    /// A share with a memory file and addresses for its alias. Nothing is mapped there yet.
    pub(super) fn unfilled(backend: Arc<dyn Backend>, plan: &Plan) -> Result<Share, Error> {
        let Plan { node, tables, page, frames, .. } = *plan;
        let bytes = frames as usize * page.bytes();
        if backend.is_host_memory() {
            forks::watch().map_err(|errno| Error::call(Call::Advise, 0, bytes, errno))?;
        }
        let alias = reserve_aligned(&*backend, bytes)?;
        let release = |error| {
            // SAFETY: nothing has been mapped there, and no other code knows the address.
            let _ = unsafe { backend.release(alias, bytes) };
            error
        };
        // `observe::POOL_FILE` finds the mappings by this name.
        let name = format!("pageleap:node{}", node.0);
        let file = backend
            .create_file(&name, page, bytes)
            .map_err(|errno| release(Error::call(Call::CreateFile, alias, bytes, errno)))?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let state = State {
            allocator: FrameAllocator::new(frames),
            used: FrameSet::new(frames),
            aliases: Aliases::new(frames),
            strayed: FrameSet::new(frames),
            unmapped: Vec::new(),
            announced: 0,
        };
        let listed = Listed::new(&ALIASES, &*backend, alias, bytes);
        // From here on, dropping the share gives everything back.
        Ok(Share(Arc::new(ShareInner {
            backend,
            file,
            node,
            tables,
            page,
            frames,
            alias,
            listed: Some(listed),
            anchor: Mutex::new(None),
            process: std::process::id(),
            state: Mutex::new(state),
            looks_again_ns: AtomicU64::new(0),
            returned: Condvar::new(),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        })))
    }

    pub(crate) fn node(&self) -> NodeId {
        self.0.node
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.0.page
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.frames * self.0.page.bytes() as u64
    }

    /// Free bytes.
    pub(crate) fn free_bytes(&self) -> u64 {
        let state = lock(&self.0.state);
        let unmapped: u64 = state.unmapped.iter().map(|run| run.frames).sum();
        (state.allocator.free_frames() + unmapped) * self.0.page.bytes() as u64
    }

    /// Queries on which node all frames lie, free and used ones.
    pub(crate) fn verify(&self) -> Result<Verification, Error> {
        self.verify_frames(Run { first: 0, frames: self.0.frames })
    }

    /// Queries on which node some frames lie. It maps them once more, because other threads may be
    /// changing their mappings.
    pub(crate) fn verify_frames(&self, run: Run) -> Result<Verification, Error> {
        let backend = &*self.0.backend;
        let mut found = NodeCounts::default();
        self.through(&self.window()?, run, Prot::READ, |addr, frames, len| {
            // SAFETY: the window is ours.
            unsafe { backend.populate(addr, len, false) }
                .map_err(|errno| Error::call(Call::Populate, addr, len, errno))?;
            found.join(&NodeCounts::of_range(backend, addr, frames, self.0.page)?);
            Ok(())
        })?;
        Ok(Verification::of(found, &[(self.0.node, run.frames)]))
    }

    /// Binds the memory file to the share's node, so that a page that was swapped out comes back to
    /// that node.
    pub(super) fn bind_file(&self, window: &Window<'_>) -> Result<(), Error> {
        let policy = Policy::Bind(self.0.node.0);
        // A mapping without access faults nothing in, not even under `mlockall(MCL_FUTURE)`.
        self.through(window, Run { first: 0, frames: self.0.frames }, Prot::NONE, |addr, _, len| {
            // SAFETY: the window is ours.
            unsafe { self.0.backend.bind(addr, len, policy) }
                .map_err(|errno| Error::call(Call::Bind, addr, len, errno))
        })
    }

    /// Reserves address space for [`Share::through`].
    pub(super) fn window(&self) -> Result<Window<'_>, Error> {
        /// Bytes mapped at a time.
        const BYTES: usize = 64 << 20;
        let inner = &*self.0;
        let len = BYTES.max(inner.page.bytes()).min(self.bytes() as usize);
        Ok(Window { backend: &*inner.backend, addr: reserve_aligned(&*inner.backend, len)?, len })
    }

    /// Maps some frames once more, part by part, and calls `look` with each part's address, number
    /// of frames, and bytes.
    fn through(
        &self,
        window: &Window<'_>,
        run: Run,
        prot: Prot,
        mut look: impl FnMut(usize, u64, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let inner = &*self.0;
        let step = window.len / inner.page.bytes();
        for first in (run.first..run.end()).step_by(step) {
            let frames = (step as u64).min(run.end() - first);
            let len = frames as usize * inner.page.bytes();
            inner.map_beside(window.addr, len, inner.offset_of(first), prot)?;
            look(window.addr, frames, len)?;
        }
        Ok(())
    }

    /// The nodes of all frames of a share that has just been filled, queried through its alias.
    pub(super) fn placement_of_all(&self) -> Result<NodeCounts, Error> {
        NodeCounts::of_range(&*self.0.backend, self.0.alias_of(0), self.0.frames, self.0.page)
    }

    /// Takes `frames` frames for the pages from `beside` on: one run if possible, else as few runs
    /// as possible, in ascending order. If it needs frames that have been announced, it waits for
    /// them.
    pub(crate) fn take(&self, frames: u64, beside: u64) -> Result<Vec<Run>, Error> {
        let page = self.0.page.bytes() as u64;
        let mut mended = false;
        let mut state = lock(&self.0.state);
        loop {
            if let Some(runs) = state.allocator.take(frames, beside) {
                return Ok(runs);
            }
            let free = state.allocator.free_frames();
            if !state.unmapped.is_empty() && !std::mem::replace(&mut mended, true) {
                // A repair that failed earlier may succeed now. The frames are announced, so that
                // other threads that need them wait.
                let unmapped = std::mem::take(&mut state.unmapped);
                state.announced += unmapped.iter().map(|run| run.frames).sum::<u64>();
                drop(state);
                unmapped.into_iter().for_each(|run| drop(self.give_back_announced(run)));
                state = lock(&self.0.state);
            } else if state.announced > 0
                && free + state.announced >= frames
                && self.is_of_this_process()
            {
                state = self.0.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                return Err(Error::PoolExhausted {
                    node: self.0.node,
                    free_bytes: free * page,
                    pool_bytes: self.bytes(),
                    needed_bytes: frames * page,
                });
            }
        }
    }

    /// A child made by `fork` has no thread that could give announced frames back.
    fn is_of_this_process(&self) -> bool {
        self.0.process == std::process::id()
    }

    /// Announces that frames will be given back, by [`Share::give_back_announced`] and without
    /// waiting for another thread.
    pub(crate) fn announce(&self, run: Run) {
        lock(&self.0.state).announced += run.frames;
    }

    /// Gives announced frames back, as [`Share::give_back`] does.
    pub(crate) fn give_back_announced(&self, run: Run) -> Result<(), Error> {
        let result = self.give_back(run);
        lock(&self.0.state).announced -= run.frames;
        self.0.returned.notify_all();
        result
    }

    /// Takes frames whose bytes are all zero, for a region that is about to map them.
    pub(crate) fn take_zeroed(&self, frames: u64, beside: u64) -> Result<Vec<Run>, Error> {
        self.check_descriptor()?;
        let runs = self.take(frames, beside)?;
        for run in &runs {
            let used = lock(&self.0.state).used.runs_in(*run);
            for run in used {
                let page = self.0.page.bytes();
                // SAFETY: the frames are taken, so that no other thread accesses them, and the
                // alias of free frames is mapped writable.
                unsafe {
                    self.0.backend.zero(self.0.alias_of(run.first), run.frames as usize * page)
                };
            }
        }
        Ok(runs)
    }

    /// Repairs the alias of frames and frees them. After an error the frames stay out of
    /// circulation until a later attempt succeeds; nothing is lost.
    pub(crate) fn give_back(&self, run: Run) -> Result<(), Error> {
        let result = self.mend_alias(run).map_err(|(call, part, errno)| {
            Error::call(
                call,
                self.0.alias_of(part.first),
                part.frames as usize * self.0.page.bytes(),
                errno,
            )
        });
        let mut state = lock(&self.0.state);
        state.used.set(run, true);
        match result {
            Ok(()) => state.allocator.give_back(run),
            Err(_) => state.unmapped.push(run),
        }
        result
    }

    /// A number that orders shares.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Notes on which node the page tables lie that map `run` now; `None` if that is not known.
    pub(crate) fn note_tables(&self, run: Run, node: Option<NodeId>) {
        lock(&self.0.state).strayed.set(run, node.is_none() || node != self.0.tables);
    }

    /// The page tables of the alias of `run`, as an exchange takes them along. `seated` is the node
    /// to which [`Share::seat_tables`] has just brought them, if it has.
    pub(crate) fn tables_of(&self, run: Run, seated: Option<NodeId>) -> AliasTables {
        let addr = self.0.alias_of(run.first);
        let Some(tables) = self.0.tables else {
            return AliasTables { addr, node: seated, astray: Vec::new(), upper: None };
        };
        let page = self.0.page.bytes();
        let state = lock(&self.0.state);
        let strayed = state.strayed.runs_in(run);
        // The threads that have filled the pool made the upper levels. Frames that have been used
        // may have others.
        let is_new = run.frames as usize * page >= GIGABYTE
            && strayed.is_empty()
            && state.used.runs_in(run).is_empty();
        let bytes = |part: Run| {
            let first = (part.first - run.first) as usize * page;
            first..first + part.frames as usize * page
        };
        let (node, astray) = match seated {
            Some(node) => (node, Vec::new()),
            None => (tables, strayed.into_iter().map(bytes).collect()),
        };
        AliasTables { addr, node: Some(node), astray, upper: is_new.then_some(tables) }
    }

    /// Whether [`Share::seat_tables`] would map a part anew.
    pub(crate) fn has_stray_tables(&self, run: Run, node: NodeId) -> bool {
        self.0.tables != Some(node) || !lock(&self.0.state).strayed.runs_in(run).is_empty()
    }

    /// The number of frames that are taken (neither free nor waiting for a repair), and whether all
    /// frames of `runs` are.
    pub(crate) fn taken(&self, runs: &[Run]) -> (u64, bool) {
        let state = lock(&self.0.state);
        let unmapped: u64 = state.unmapped.iter().map(|run| run.frames).sum();
        let mut frames = runs.iter().flat_map(|run| run.first..run.end());
        let all_taken =
            frames.all(|frame| frame < self.0.frames && !state.allocator.is_free(frame));
        (self.0.frames - state.allocator.free_frames() - unmapped, all_taken)
    }
}

impl ShareInner {
    /// The address at which the alias maps a frame.
    pub(crate) fn alias_of(&self, frame: u64) -> usize {
        self.alias + frame as usize * self.page.bytes()
    }

    /// The offset of a frame in the file.
    pub(crate) fn offset_of(&self, frame: u64) -> u64 {
        frame * self.page.bytes() as u64
    }

    /// Locks the frames into memory, by a mapping that never changes. A lock on the alias would be
    /// lost or multiplied when its page tables move.
    pub(super) fn lock_resident(&self) -> Result<(), Error> {
        let bytes = self.frames as usize * self.page.bytes();
        let addr = reserve_aligned(&*self.backend, bytes)?;
        *lock(&self.anchor) = Some(addr); // released when the share is dropped
        self.map_beside(addr, bytes, 0, Prot::READ)?;
        // SAFETY: the anchor is the share's own, and no other code knows it.
        unsafe { self.backend.lock(addr, bytes, false) }
            .map_err(|errno| Error::call(Call::Lock, addr, bytes, errno))
    }

    /// Maps a part of the file once more, at a reserved address.
    fn map_beside(&self, addr: usize, len: usize, offset: u64, prot: Prot) -> Result<(), Error> {
        let mapping = Mapping { addr, len, file: self.file, offset, prot, populate: false };
        self.look_at_descriptor().map_err(|(call, errno)| Error::call(call, addr, len, errno))?;
        // SAFETY: the range is reserved, and no other code knows it.
        let mapped = forks::while_mapping(|| unsafe {
            self.backend.map(&mapping).map_err(|errno| (Call::Map, errno))?;
            self.hide(addr, len).map_err(|errno| (Call::Advise, errno))
        });
        mapped.map_err(|(call, errno)| Error::call(call, addr, len, errno))
    }

    /// Keeps a mapping of frames from children and core dumps, which would get the data twice.
    ///
    /// # Safety
    /// The mapping is the share's own.
    pub(super) unsafe fn hide(&self, addr: usize, len: usize) -> Result<(), Errno> {
        [Advice::DontFork, Advice::DontDump, Advice::Normal].into_iter().try_for_each(|advice| {
            // SAFETY: forwarded to the caller.
            unsafe { self.backend.advise(addr, len, advice) }
        })
    }
}

impl Drop for ShareInner {
    fn drop(&mut self) {
        // SAFETY: no region and no job has frames of this share, because each would hold a clone of
        // it. The mapping keeps no reference to the descriptor.
        unsafe {
            // A child made by `fork` has the books, but not the memory, and may have mapped other
            // memory there.
            if self.process == std::process::id() {
                let bytes = |frames: u64| frames as usize * self.page.bytes();
                let anchor = self.anchor.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
                if let Some(anchor) = anchor.take() {
                    let _ = self.backend.release(anchor, bytes(self.frames));
                }
                drop(self.listed.take());
                let all = Run { first: 0, frames: self.frames };
                let torn = lock(&self.state).aliases.runs_in(all, AliasState::Torn);
                let mut theirs = FrameSet::new(self.frames);
                for frame in torn.into_iter().flat_map(|run| run.pieces(1)) {
                    // Another thread may have mapped memory into a hole. A frame that is refused
                    // for another reason is the share's own.
                    let found = self.map_alias(frame, Fill::Torn);
                    let foreign = matches!(
                        found,
                        Err((_, Errno(libc::EEXIST | libc::EMFILE | libc::ENFILE | libc::EBADF)))
                    );
                    theirs.set(frame, foreign);
                }
                for part in theirs.runs_not_in(all) {
                    let _ = self.backend.release(self.alias_of(part.first), bytes(part.frames));
                }
            }
            self.backend.close_file(self.file);
        }
    }
}

/// Address space at which frames are mapped once more for a moment. Dropping it releases it.
pub(super) struct Window<'a> {
    backend: &'a dyn Backend,
    addr: usize,
    len: usize,
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        // A mapping that is left over would keep the memory of the whole share. The call fails when
        // other threads use up the mappings of the process, so that the next try may succeed.
        const TRIES: usize = 3;
        // SAFETY: the range was reserved for this window, which is no longer used.
        let mut tries = (0..TRIES).map(|_| unsafe { self.backend.release(self.addr, self.len) });
        let _ = tries.any(|released| released.is_ok());
    }
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "share {} ({} of {} pages on {}, {} free)",
            self.0.id,
            human_bytes(self.bytes()),
            self.0.page,
            self.0.node,
            human_bytes(self.free_bytes())
        )
    }
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
