//! A block of the program's allocator, which leaps in place.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pageleap::observe::{self, MappedPages};
use pageleap::process::{nodes_of_pages, own_pid};
use pageleap::{
    BASE_PAGE, Error, Job, MemoryEngine, MemoryMigration, NodeId, PageRun, PageSize, Reserve,
};
use pageleap_measure::memcpy::Target;
use pageleap_measure::private::PrivateMemory;

use super::super::args::DemoArgs;
use super::{Home, NodePages, Way, Wishes};
use crate::progress;
use crate::stop::{Refusal, Stop};

/// Pages in one query to the kernel.
const BATCH: usize = 8192;

/// The block, and the reserves that its leaps copy into.
pub struct Block {
    memory: PrivateMemory,
    page: PageSize,
    from: NodeId,
    to: NodeId,
    /// Whether its pages move by `uffd-move`, so that a reserve is of use. The kernel's engine
    /// takes fresh memory itself.
    in_place: bool,
    /// The reserves, by node.
    reserves: Mutex<BTreeMap<NodeId, Arc<Reserve>>>,
}

impl Block {
    /// Takes a block of the allocator and fills it on its first node.
    pub fn take(args: &DemoArgs, bytes: usize, nodes: [u32; 2]) -> Result<Block, Stop> {
        let in_place = moves_in_place(args, nodes)?;
        let [from, to] = nodes.map(NodeId);
        let bar = progress::bytes("filling memory", bytes as u64);
        let filled = |bytes: usize| bar.set_position(bytes as u64);
        let memory = PrivateMemory::allocated(bytes, args.page_size, from, filled);
        bar.finish_and_clear();
        let page = args.page_size;
        let block = Block { memory: memory?, page, from, to, in_place, reserves: Mutex::default() };
        let huge = block.mapped_pages()?.huge_mapped_ratio;
        if page == PageSize::Thp && huge < 1.0 {
            let reason = format!(
                "--page-size thp: the machine gave transparent huge pages for {} % of the table; \
                 set /sys/kernel/mm/transparent_hugepage/enabled to madvise, free some memory, or \
                 use --page-size 4k",
                (huge * 100.0).floor()
            );
            return Err(Refusal::new(reason).into());
        }
        Ok(block)
    }

    fn start(&self) -> usize {
        self.memory.as_ptr().addr()
    }

    fn len(&self) -> usize {
        size_of_val(self.memory.words())
    }

    fn destination(&self, way: Way) -> NodeId {
        match way {
            Way::There => self.to,
            Way::Back => self.from,
        }
    }

    fn reserves(&self) -> MutexGuard<'_, BTreeMap<NodeId, Arc<Reserve>>> {
        self.reserves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Home for Block {
    fn words(&self) -> Result<&[AtomicU64], Stop> {
        Ok(self.memory.words())
    }

    /// Reports and frames of private memory count base pages.
    fn page_bytes(&self) -> usize {
        BASE_PAGE
    }

    fn placement(&self) -> Result<NodePages, Stop> {
        let pid = own_pid()?;
        let addresses = self.start()..self.start() + self.len();
        let pages: Vec<usize> = addresses.step_by(BASE_PAGE).collect();
        let mut by_node = NodePages::new();
        for batch in pages.chunks(BATCH) {
            let Ok(nodes) = nodes_of_pages(pid, batch) else {
                // Docker's default seccomp profile refuses `move_pages`.
                let bytes = observe::node_bytes(self.start(), self.len())?;
                let pages = |(node, bytes): (NodeId, u64)| (node.0, bytes / BASE_PAGE as u64);
                return Ok(bytes.into_iter().map(pages).collect());
            };
            for node in nodes.into_iter().flatten() {
                *by_node.entry(node.0).or_default() += 1;
            }
        }
        Ok(by_node)
    }

    fn frames(&self) -> Result<Option<Vec<u64>>, Stop> {
        Ok(observe::frame_numbers(self.start(), self.len(), BASE_PAGE)?)
    }

    fn mapped_pages(&self) -> Result<MappedPages, Stop> {
        Ok(observe::mapped_pages(self.start(), self.len())?)
    }

    fn mapping_count(&self) -> Result<usize, Error> {
        observe::mapping_count()
    }

    /// Reports about memory that no pool owns have addresses.
    fn bytes_of(&self, run: &PageRun) -> Range<usize> {
        run.range.start - self.start()..run.range.end - self.start()
    }

    fn memcpy_target(&self) -> Result<Target<'_>, Stop> {
        let copy = PrivateMemory::new(self.len(), self.page, self.to)?;
        Ok(Target::private(self.memory.words(), copy))
    }

    fn prepare(&self, way: Way) -> Result<Option<u64>, Stop> {
        if !self.in_place {
            return Ok(None);
        }
        let node = self.destination(way);
        let mut reserves = self.reserves();
        let began = Instant::now();
        match reserves.get(&node) {
            Some(reserve) => reserve.refill()?,
            None => {
                let reserve = Reserve::new(node, self.len(), self.page)?;
                reserves.insert(node, Arc::new(reserve));
            }
        }
        Ok(Some(began.elapsed().as_nanos() as u64))
    }

    fn left_over(&self, way: Way) -> Option<u64> {
        self.reserves().get(&self.destination(way)).map(|reserve| reserve.free_bytes() as u64)
    }

    fn leap(&self, args: &DemoArgs, wishes: Wishes) -> Result<Job, Error> {
        let node = self.destination(wishes.way);
        // SAFETY: no thread frees, unmaps, remaps or protects the block while the job moves it: the
        // demo waits for its jobs, and keeps the block until its end. The demo makes no children,
        // and threads have their stacks elsewhere.
        let migration =
            unsafe { MemoryMigration::new().range(self.memory.as_ptr(), self.len(), node) };
        let migration = migration.engine(args.engine.memory_engine()).renew(self.from == self.to);
        let timeout = args.timeout.filter(|_| wishes.may_time_out);
        let migration = timeout.into_iter().fold(migration, MemoryMigration::timeout);
        self.reserves().get(&node).into_iter().fold(migration, MemoryMigration::reserve).start()
    }
}

/// Whether the pages of a block move by `uffd-move` here, or else by the kernel's engine.
///
/// # Errors
/// If the pages would not move at all: the kernel moves pages to other nodes only.
pub fn moves_in_place(args: &DemoArgs, [from, to]: [u32; 2]) -> Result<bool, Stop> {
    let forced = args.engine.memory_engine();
    let why = match forced {
        Some(MemoryEngine::Kernel) if from != to => return Ok(false),
        Some(MemoryEngine::Kernel) => {
            format!("--engine {}: it moves pages to other nodes only", MemoryEngine::Kernel)
        }
        Some(MemoryEngine::UffdMove) | None => match why_not_in_place(NodeId(from))? {
            None => return Ok(true),
            Some(_) if forced.is_none() && from != to => return Ok(false),
            Some(why) => format!("--memory malloc: {why}"),
        },
    };
    let remedy = match from == to {
        true => "; or move to another node (--from, --to), or use --memory pool",
        false => "; or use --engine kernel, or --memory pool",
    };
    Err(Refusal::new(format!("{why}{remedy}")).into())
}

/// Why a page of the node does not move by `uffd-move`; `None` if it does.
fn why_not_in_place(node: NodeId) -> Result<Option<Error>, Stop> {
    let page = PrivateMemory::new(BASE_PAGE, PageSize::Base, node)?;
    // SAFETY: no other thread knows the page, and it is unmapped only after the job has ended.
    let migration = unsafe { MemoryMigration::new().range(page.as_ptr(), BASE_PAGE, node) };
    match migration.engine(MemoryEngine::UffdMove).renew(true).start() {
        Ok(job) => {
            job.wait();
            Ok(None)
        }
        Err(why @ Error::EngineRefused { .. }) => Ok(Some(why)),
        Err(other) => Err(other.into()),
    }
}
