//! Buffers on the target, verified with the kernel, and threads on the CPUs of the initiator.

use std::sync::atomic::AtomicU64;
use std::thread::{Builder, Scope, ScopedJoinHandle};

use pageleap::{NodeId, PageSize, PageTables, Placement, Pool, Region};

use super::Initiator;
use crate::Error;

/// Where a buffer lay, and where its page tables were asked for.
#[derive(Clone, Debug)]
pub struct Lay {
    /// Bytes of all buffers.
    pub bytes: u64,
    /// Pages that the kernel has on the target: all of them (`move_pages(2)` without a target, or
    /// `numa_maps` where a filter refuses that).
    pub pages: u64,
    /// The node on which page tables were asked for: that of the CPUs, so that walks are local, or
    /// `None` if it has no memory. The kernel tells nobody where it has put them.
    pub page_tables: Option<NodeId>,
}

/// The memory of a measurement.
pub(crate) struct Buffers {
    chased: Region,
    traffic: Option<Region>,
    pub lay: Lay,
}

impl Buffers {
    /// Takes memory of the target: a buffer for chains of loads, and one for traffic if it is wanted.
    ///
    /// # Errors
    /// The memory cannot be had, or lies elsewhere.
    pub fn new(
        from: &Initiator,
        to: NodeId,
        page: PageSize,
        bytes: u64,
        with_traffic: bool,
    ) -> Result<Buffers, Error> {
        let buffers = if with_traffic { 2 } else { 1 };
        let page_tables = from.has_memory.then_some(from.node);
        let place = Placement::on(to);
        let place = match page_tables {
            Some(node) => place.page_tables(PageTables::Node(node)),
            None => place,
        };
        let pool = Pool::builder(place.clone(), bytes * buffers).page_size(page).build()?;
        let region = || Region::new(pool.on(place.clone()), bytes as usize);
        let (chased, traffic) = (region()?, (buffers == 2).then(region).transpose()?);
        let lay = Lay { bytes: bytes * buffers, pages: 0, page_tables };
        let mut all = Buffers { chased, traffic, lay };
        all.lay.pages = all.verify(to)?;
        Ok(all)
    }

    /// Asks the kernel where the pages lie. Returns how many there are.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] if not all of them lie on the target.
    pub fn verify(&self, to: NodeId) -> Result<u64, Error> {
        let mut pages = 0;
        for region in [Some(&self.chased), self.traffic.as_ref()].into_iter().flatten() {
            let verified = region.verify()?;
            if !verified.is_right() {
                return Err(Error::Elsewhere { node: to, verified: verified.to_string() });
            }
            pages += verified.pages;
        }
        Ok(pages)
    }

    /// The buffer for chains of loads.
    pub fn chased(&self) -> Result<&[AtomicU64], Error> {
        Ok(self.chased.atomics_u64(0..self.chased.len())?)
    }

    /// The buffer for threads that read and write; empty if there is none.
    pub fn traffic(&self) -> Result<&[AtomicU64], Error> {
        let Some(region) = &self.traffic else { return Ok(&[]) };
        Ok(region.atomics_u64(0..region.len())?)
    }
}

/// Does something in a thread that is bound to this CPU.
pub(crate) fn on_cpu<T: Send>(cpu: usize, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = start(scope, cpu, work)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Starts a thread that binds itself to this CPU. It does nothing if that is refused.
pub(crate) fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    cpu: usize,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, Result<T, Error>>, Error> {
    let bound = move || {
        pageleap_sys::set_affinity(0, &[cpu]).map_err(|errno| Error::Cpu { cpu, errno })?;
        Ok(work())
    };
    let name = "matrix";
    let thread = Builder::new().name(name.to_owned()).spawn_scoped(scope, bound);
    thread.map_err(|source| Error::Thread { name, reason: source })
}
