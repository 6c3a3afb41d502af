//! Pools: pre-faulted memory of one node, from which regions take their frames and to which migrations return them.
//!
//! A pool is one sealed memory file, and one mapping of all of it, the *alias*. **Invariant:** a frame is either free or has one owner (a
//! region, or a job that will hand it to one). **Invariant:** the page tables of the alias are filled for every free frame, so that a
//! migration copies into it, and moves those page tables, without a fault. A migration takes the page tables of the alias of the frames that
//! it uses, and puts those of the frames that it vacates back into theirs, so that little is left to do when frames come back.

mod fill;
mod frames;
mod reserve;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) use frames::Run;
use frames::{FrameAllocator, FrameSet};
pub use reserve::HugePageReservation;

use crate::backend::{Advice, Backend, Call, Errno, Linux, Mapping, MemoryFile, Prot};
use crate::error::Error;
use crate::observe::Attributes;
use crate::placement::NodeCounts;
use crate::sync::lock;
use crate::units::{BASE_PAGE, NodeId, PageSize, human_bytes};

/// The attributes of an alias: neither children nor core dumps get a second copy of the data.
pub(crate) const ALIAS_ATTRIBUTES: Attributes =
    Attributes { dont_fork: true, dont_dump: true, ..Attributes::of_new_mapping(Prot::READ_WRITE) };

/// Pre-faulted memory of one node. Clones are the same pool; the memory goes back to the system when the last clone and the last region
/// with frames of it are gone.
#[derive(Clone)]
pub struct Pool(pub(crate) Arc<PoolInner>);

pub(crate) struct PoolInner {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) file: MemoryFile,
    node: NodeId,
    page: PageSize,
    frames: u64,
    alias: usize,
    /// The process that made it.
    process: u32,
    state: Mutex<State>,
    id: u64,
}

struct State {
    allocator: FrameAllocator,
    /// Frames that have held data: to be zeroed before a region gets them as new memory.
    used: FrameSet,
    /// Frames whose alias is mapped, but has lost its page tables: to be mapped again before they are free.
    hollow: FrameSet,
    /// Frames whose alias may be a hole, because a call failed there: to be mapped again with care (`Backend::map_own`).
    torn: FrameSet,
    /// Frames whose alias is filled, but with the access and the attributes of a region.
    borrowed: FrameSet,
    /// Frames whose alias could not be mapped again; tried again when frames are short.
    unmapped: Vec<Run>,
}

/// What is where an alias is to be mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    /// Reserved address space; page tables are filled later.
    New,
    /// The alias, without page tables.
    Hollow,
    /// The alias or a hole.
    Torn,
}

/// Makes a [`Pool`].
pub struct PoolBuilder {
    node: NodeId,
    bytes: u64,
    page: PageSize,
    threads: Option<usize>,
    progress: Option<Box<dyn Fn(u64, u64) + Send + Sync>>,
    backend: Arc<dyn Backend>,
}

impl PoolBuilder {
    /// The size of its pages; [`PageSize::Base`] if not said.
    pub fn page_size(mut self, page: PageSize) -> Self {
        self.page = page;
        self
    }

    /// How many threads fault the memory in; if not said, one for each CPU of the node, at most 8.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Called with the bytes done and the bytes to do, from the filling threads, about every 32 MB.
    pub fn progress(mut self, report: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(report));
        self
    }

    /// Uses another backend than the kernel: for tests.
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = backend;
        self
    }

    /// Takes the memory, faults it in, and verifies with the kernel that it lies on the node.
    ///
    /// # Errors
    /// With too little free memory or too few huge pages, an error that says how much there is and what to do; whatever had been taken is
    /// given back.
    pub fn build(self) -> Result<Pool, Error> {
        let page_bytes = self.page.bytes() as u64;
        if self.bytes == 0 || self.bytes > 1 << 46 {
            return Err(Error::BadArgument {
                what: "pool size",
                reason: format!("{} bytes", self.bytes),
                remedy: format!("use 1 to 2^46 bytes; the size is rounded up to pages of {page_bytes} bytes"),
            });
        }
        if self.threads == Some(0) {
            return Err(Error::BadArgument {
                what: "number of threads",
                reason: "0 threads fill no memory".into(),
                remedy: "use at least 1".into(),
            });
        }
        let frames = self.bytes.div_ceil(page_bytes);
        let bytes = (frames * page_bytes) as usize;
        fill::check_node(&*self.backend, self.node, self.page, bytes as u64)?;
        let alias = reserve_aligned(&*self.backend, bytes)?;
        let release = |error| {
            // SAFETY: nothing has been mapped there, and nobody knows the address.
            let _ = unsafe { self.backend.release(alias, bytes) };
            error
        };
        // `observe::POOL_FILE` finds the mappings by it.
        let name = format!("pageleap:node{}", self.node.0);
        let file = self
            .backend
            .create_file(&name, self.page, bytes)
            .map_err(|errno| release(Error::call(Call::CreateFile, alias, bytes, errno)))?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let state = State {
            allocator: FrameAllocator::new(frames),
            used: FrameSet::new(frames),
            hollow: FrameSet::new(frames),
            torn: FrameSet::new(frames),
            borrowed: FrameSet::new(frames),
            unmapped: Vec::new(),
        };
        // From here on dropping the pool gives everything back.
        let pool = Pool(Arc::new(PoolInner {
            backend: self.backend,
            file,
            node: self.node,
            page: self.page,
            frames,
            alias,
            process: std::process::id(),
            state: Mutex::new(state),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        }));
        let all = Run { first: 0, frames };
        pool.0.map_alias(all, Fill::New).map_err(|(call, errno)| Error::call(call, alias, bytes, errno))?;
        fill::fill(&pool, self.threads, self.progress.as_deref())?;
        Ok(pool)
    }
}

impl Pool {
    /// Starts to describe a pool of `bytes` bytes (rounded up to whole pages) on a node.
    pub fn builder(node: NodeId, bytes: u64) -> PoolBuilder {
        let backend: Arc<dyn Backend> = Arc::new(Linux);
        PoolBuilder { node, bytes, page: PageSize::Base, threads: None, progress: None, backend }
    }

    /// The node whose memory it is.
    pub fn node(&self) -> NodeId {
        self.0.node
    }

    /// The size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.0.page
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.frames * self.0.page.bytes() as u64
    }

    /// What is free of it, in bytes.
    pub fn free_bytes(&self) -> u64 {
        let state = lock(&self.0.state);
        let unmapped: u64 = state.unmapped.iter().map(|run| run.frames).sum();
        (state.allocator.free_frames() + unmapped) * self.0.page.bytes() as u64
    }

    /// Asks the kernel where the free frames of the pool lie. (Those that a region uses, [`Region::placement`](crate::Region::placement)
    /// asks for.)
    pub fn verify(&self) -> Result<NodeCounts, Error> {
        let free: Vec<u64> = {
            let state = lock(&self.0.state);
            (0..self.0.frames).filter(|frame| state.allocator.is_free(*frame)).collect()
        };
        NodeCounts::of_pages(&*self.0.backend, free.into_iter().map(|frame| self.0.alias_of(frame)))
    }

    /// Takes `frames` frames for pages from `beside` on, contiguous if there is such a run, else as few runs as possible in ascending order.
    pub(crate) fn take(&self, frames: u64, beside: u64) -> Result<Vec<Run>, Error> {
        self.take_at_once(frames, beside).or_else(|error| {
            // What could not be mapped again earlier may be possible now.
            let unmapped = std::mem::take(&mut lock(&self.0.state).unmapped);
            if unmapped.is_empty() {
                return Err(error);
            }
            unmapped.into_iter().for_each(|run| drop(self.give_back(run)));
            self.take_at_once(frames, beside)
        })
    }

    fn take_at_once(&self, frames: u64, beside: u64) -> Result<Vec<Run>, Error> {
        let page = self.0.page.bytes() as u64;
        let mut state = lock(&self.0.state);
        let free = state.allocator.free_frames();
        state.allocator.take(frames, beside).ok_or(Error::PoolExhausted {
            node: self.0.node,
            free_bytes: free * page,
            pool_bytes: self.bytes(),
            needed_bytes: frames * page,
        })
    }

    /// Takes frames whose bytes are all zero.
    pub(crate) fn take_zeroed(&self, frames: u64, beside: u64) -> Result<Vec<Run>, Error> {
        let runs = self.take(frames, beside)?;
        for run in &runs {
            let used = lock(&self.0.state).used.runs_in(*run);
            for run in used {
                let page = self.0.page.bytes();
                // SAFETY: the frames are taken, so nobody else accesses them, and the alias of free frames is mapped writable.
                unsafe { self.0.backend.zero(self.0.alias_of(run.first), run.frames as usize * page) };
            }
        }
        Ok(runs)
    }

    /// Frees frames, after mapping the alias again where a migration left it hollow. On an error the frames stay out of circulation until
    /// a later attempt succeeds; nothing is lost.
    pub(crate) fn give_back(&self, run: Run) -> Result<(), Error> {
        let result = self.mend_alias(run).map_err(|(call, part, errno)| {
            Error::call(call, self.0.alias_of(part.first), part.frames as usize * self.0.page.bytes(), errno)
        });
        let mut state = lock(&self.0.state);
        state.used.set(run, true);
        match result {
            Ok(()) => state.allocator.give_back(run),
            Err(_) => state.unmapped.push(run),
        }
        result
    }

    /// Orders pools.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Makes the alias of `run` as it is for free frames: filled, writable, with [`ALIAS_ATTRIBUTES`].
    fn mend_alias(&self, run: Run) -> Result<(), (Call, Run, Errno)> {
        let borrowed = lock(&self.0.state).borrowed.runs_in(run);
        for part in borrowed {
            // If that fails, a new mapping does what is wanted too.
            let hollow = self.0.reclaim_alias(part).is_err();
            let mut state = lock(&self.0.state);
            state.borrowed.set(part, false);
            if hollow {
                state.hollow.set(part, true);
            }
        }
        let hollow = lock(&self.0.state).hollow.runs_in(run);
        for part in hollow {
            let mapped = self.0.map_alias(part, Fill::Hollow);
            let mut state = lock(&self.0.state);
            state.hollow.set(part, false);
            state.torn.set(part, mapped.is_err());
        }
        let torn = lock(&self.0.state).torn.runs_in(run);
        for part in torn {
            self.0.map_alias(part, Fill::Torn).map_err(|(call, errno)| (call, part, errno))?;
            lock(&self.0.state).torn.set(part, false);
        }
        Ok(())
    }

    /// Counts the frames that are neither free nor waiting to be, and says whether `run` is wholly among them.
    pub(crate) fn taken(&self, runs: &[Run]) -> (u64, bool) {
        let state = lock(&self.0.state);
        let unmapped: u64 = state.unmapped.iter().map(|run| run.frames).sum();
        let mut frames = runs.iter().flat_map(|run| run.first..run.end());
        let all_taken = frames.all(|frame| frame < self.0.frames && !state.allocator.is_free(frame));
        (self.0.frames - state.allocator.free_frames() - unmapped, all_taken)
    }

    /// Notes that the alias of `run` is filled, but as a region had or will have it.
    pub(crate) fn mark_borrowed(&self, run: Run) {
        let mut state = lock(&self.0.state);
        state.borrowed.set(run, true);
        state.hollow.set(run, false);
    }

    /// Maps the alias of `run` again, where a call has failed that may have left a hole.
    pub(crate) fn mend_hole(&self, run: Run) {
        let torn = self.0.map_alias(run, Fill::Torn).is_err();
        let mut state = lock(&self.0.state);
        state.torn.set(run, torn);
        state.borrowed.set(run, false);
        state.hollow.set(run, false);
    }

    /// Notes that the alias of `run` must be mapped again before the frames can be free.
    pub(crate) fn mark_hollow(&self, run: Run) {
        let mut state = lock(&self.0.state);
        state.hollow.set(run, true);
        state.borrowed.set(run, false);
    }
}

impl PoolInner {
    /// Where the alias maps a frame.
    pub(crate) fn alias_of(&self, frame: u64) -> usize {
        self.alias + frame as usize * self.page.bytes()
    }

    /// Where in the file a frame begins.
    pub(crate) fn offset_of(&self, frame: u64) -> u64 {
        frame * self.page.bytes() as u64
    }

    /// Maps the alias of `run`.
    fn map_alias(&self, run: Run, fill: Fill) -> Result<(), (Call, Errno)> {
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        let offset = self.offset_of(run.first);
        let populate = fill != Fill::New;
        let mapping = Mapping { addr, len, file: self.file, offset, prot: Prot::READ_WRITE, populate };
        // SAFETY: the alias is ours, and the frames have no user. What another thread may have mapped into a hole there is not replaced.
        unsafe {
            if fill == Fill::Torn { self.backend.map_own(&mapping) } else { self.backend.map(&mapping) }
                .map_err(|errno| (Call::Map, errno))?;
            // Under `mlockall(MCL_FUTURE)` it is locked now, and its lock would be left behind by an exchange.
            self.backend.unlock(addr, len).map_err(|errno| (Call::Lock, errno))?;
        }
        self.advise_alias(run).map_err(|errno| (Call::Advise, errno))
    }

    /// Takes the alias of `run` back from the access and the attributes of a region. Its page tables stay, and become writable again.
    fn reclaim_alias(&self, run: Run) -> Result<(), Errno> {
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        // SAFETY: the alias is ours, and the frames have no user.
        unsafe {
            self.backend.protect(addr, len, Prot::READ_WRITE)?;
        }
        self.advise_alias(run)
    }

    /// Gives the alias of `run` the advice of all aliases: neither children nor core dumps get it.
    pub(crate) fn advise_alias(&self, run: Run) -> Result<(), Errno> {
        let (addr, len) = (self.alias_of(run.first), run.frames as usize * self.page.bytes());
        [Advice::DontFork, Advice::DontDump, Advice::Normal].into_iter().try_for_each(|advice| {
            // SAFETY: the alias is ours, and the frames have no user.
            unsafe { self.backend.advise(addr, len, advice) }
        })
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        // SAFETY: no region and no job has frames of this pool any more: each would hold a clone of it. The mapping keeps no reference
        // to the descriptor.
        unsafe {
            // A child made by `fork` has the books, but not the memory; something else may be mapped there.
            if self.process == std::process::id() {
                let _ = self.backend.release(self.alias, self.frames as usize * self.page.bytes());
            }
            self.backend.close_file(self.file);
        }
    }
}

impl PartialEq for Pool {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pool {} ({} of {} pages on {}, {} free)",
            self.0.id,
            human_bytes(self.bytes()),
            self.0.page,
            self.0.node,
            human_bytes(self.free_bytes())
        )
    }
}

/// Reserves address space so that whole page-table pages can later move between two such ranges: aligned to 1 GB if it is that large, else
/// to 2 MB.
pub(crate) fn reserve_aligned(backend: &dyn Backend, bytes: usize) -> Result<usize, Error> {
    const ALIGN_SMALL: usize = 2 << 20;
    const ALIGN_LARGE: usize = 1 << 30;
    if backend.is_host_memory() {
        // SAFETY: reads a constant of the system.
        let base = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if base != BASE_PAGE as libc::c_long {
            return Err(Error::Unsupported {
                what: format!(
                    "this kernel's base pages have {base} bytes, and pageleap knows {BASE_PAGE} only"
                ),
                remedy: "use a kernel with 4 KB pages",
            });
        }
    }
    let align = if bytes >= ALIGN_LARGE { ALIGN_LARGE } else { ALIGN_SMALL };
    backend.reserve(bytes, align).map_err(|errno| Error::call(Call::Reserve, 0, bytes, errno))
}

/// The command that adds huge pages of 2 MB to a node.
fn huge_page_line(node: NodeId, more: u64) -> String {
    let file = crate::topology::huge_folder(node, PageSize::Huge2M.bytes() as u64).join("nr_hugepages");
    let total = crate::topology::read_count(&file).unwrap_or(0) + more;
    format!("echo {total} > {}", file.display())
}
