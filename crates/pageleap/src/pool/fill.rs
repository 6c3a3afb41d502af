//! Faults a pool in, step by step. Steps are taken only while the limits of [`room`](super::room)
//! leave memory for them, and the result is verified.
//!
//! If a pool were bound strictly (MPOL_BIND) and filled by touching, a full node would bring the
//! OOM killer, and hugetlb a SIGBUS. So base pages are only *preferred* on the node
//! (MPOL_PREFERRED), and bound after the kernel has confirmed where they are. hugetlb pages are
//! populated by a call that reports an error instead of raising a signal (MADV_POPULATE_WRITE).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::frames::Run;
use super::room::{Announced, IN_FLIGHT, MOST_ANNOUNCED, Room, check_node};
use super::share::{Fill, Plan, Share};
use super::unseen::Unseen;
use crate::affinity;
use crate::backend::{Backend, Call, Errno, Policy};
use crate::error::Error;
use crate::observe::{self, MappedPages};
use crate::placement::NodeCounts;
use crate::sync::{Mutex, lock, thread};
use crate::topology::Topology;
use crate::units::{AddressRange, BASE_PAGE, NodeId, PageSize};

/// How often absent pages are populated again.
const LOOKS: u32 = 8;
/// The most pages that can be absent for a moment only. If there are more, populating them again is
/// no cure.
const MOMENTARY: u64 = 64;
/// Bytes populated at once.
const STEP: u64 = 32 << 20;
/// Pages whose nodes a thread queries before it takes further ones.
const VERIFIED_AT_ONCE: u64 = 8192;
/// Most threads that fill a share: more do not fault faster, because the kernel's allocator is the
/// limit.
const MAX_THREADS: usize = 8;

impl Share {
    /// Takes the memory, faults it in, and verifies its node and page size. On an error all memory
    /// goes back.
    pub(super) fn build(backend: Arc<dyn Backend>, plan: &Plan) -> Result<Share, Error> {
        let Plan { node, page, frames, .. } = *plan;
        check_node(&*backend, node, page, frames * page.bytes() as u64)?;
        let share = Share::unfilled(backend, plan)?;
        let inner = &*share.0;
        inner.map_alias(Run { first: 0, frames }, Fill::New).map_err(|(call, errno)| {
            inner.refused(call, inner.alias_of(0), share.bytes() as usize, errno)
        })?;
        fill(&share, plan)?;
        // Huge pages of the hugetlb pool are never swapped out.
        if plan.locked && !page.is_hugetlb() {
            inner.lock_resident()?;
        }
        Ok(share)
    }
}

/// Faults a whole share in, and verifies the node and the size of its pages.
fn fill(share: &Share, plan: &Plan) -> Result<(), Error> {
    let inner = &*share.0;
    let backend = &*inner.backend;
    let (start, len) = (inner.alias_of(0), share.bytes() as usize);
    let node = inner.node;
    // Under a preference, hugetlb takes huge pages of other nodes; under a binding, it reports an
    // error.
    let policy =
        if inner.page.is_hugetlb() { Policy::Bind(node.0) } else { Policy::Preferred(node.0) };
    // A seccomp filter may refuse `mbind`. Then the threads that fault the memory in run on the
    // node's CPUs, and by default the kernel takes memory of the node of the CPU (first touch).
    // Either way the result is verified. SAFETY: the alias is the share's own.
    let bound = unsafe { backend.bind(start, len, policy) };
    // Address space that is needed at the end is reserved now, because filling a pool takes long.
    let window =
        if bound.is_ok() && !inner.page.is_hugetlb() { Some(share.window()?) } else { None };
    let fillers = Fillers::new(share, plan, bound.is_ok())?;
    fillers.fault_in(plan)?;
    if bound.is_err() && inner.tables.is_some_and(|tables| tables != node) {
        share.note_tables(Run { first: 0, frames: inner.frames }, None);
    }
    fillers.verify_node(bound)?;
    if backend.is_host_memory() {
        check_page_size(inner.page, node, start, len)?;
    }
    if bound.is_ok() {
        // A policy of the alias would move along with its page tables, and keep the kernel from
        // joining mappings with and without one. SAFETY: as above.
        unsafe { backend.bind(start, len, Policy::Default) }
            .map_err(|errno| Error::call(Call::Bind, start, len, errno))?;
        if let Some(window) = &window {
            share.bind_file(window)?;
        }
    }
    Ok(())
}

/// The threads that fill a share and verify it.
struct Fillers<'a> {
    share: &'a Share,
    /// The CPUs of the share's node. Empty if it has none.
    cpus: Vec<usize>,
    /// The node for the threads' page tables; `None` if it makes no difference.
    tables: Option<NodeId>,
    /// How many threads there are at most.
    threads: usize,
}

impl<'a> Fillers<'a> {
    /// `bound`: whether the kernel has taken a policy for the alias.
    fn new(share: &'a Share, plan: &Plan, bound: bool) -> Result<Self, Error> {
        let inner = &*share.0;
        let host = inner.backend.is_host_memory();
        let cpus = if host { Topology::node_now(inner.node)?.cpus } else { Vec::new() };
        let threads = plan.threads.unwrap_or(cpus.len().clamp(1, MAX_THREADS));
        // If the alias has no policy of its own (`bound` is false), its memory follows the thread's
        // policy, as page tables do. Memory matters more, so that policy then prefers the node of
        // the share. If it is refused too, both come from the node of the CPU, which is the share's
        // node if that has CPUs.
        let tables = inner.tables.map(|tables| if bound { tables } else { inner.node });
        Ok(Fillers { share, cpus, tables, threads })
    }

    /// Sets affinity and memory policy of one of the library's own threads, so that it takes memory
    /// of the right nodes.
    fn settle_thread(&self) {
        affinity::run_on(&self.cpus);
        if let Some(tables) = self.tables {
            let _ = self.share.0.backend.prefer_tables_on(Some(tables.0));
        }
    }

    /// Runs `work` on as many threads as there are `pieces`, at most, and waits for them.
    fn run(&self, pieces: u64, work: &(dyn Fn() + Sync)) {
        let threads = (self.threads as u64).min(pieces);
        thread::scope(|scope| {
            // If fewer threads start than were asked for, the work only takes longer.
            let start = |_| {
                let own = move || {
                    self.settle_thread();
                    work();
                };
                scope.start(c"pageleap-fill", own).ok()
            };
            if (0..threads).filter_map(start).count() == 0 {
                // The caller's own thread keeps its CPUs and its policy.
                work();
            }
        });
    }

    /// Faults the whole share in.
    fn fault_in(&self, plan: &Plan) -> Result<(), Error> {
        let inner = &*self.share.0;
        let bytes = self.share.bytes();
        let step = STEP.max(inner.page.bytes() as u64);
        let limited = inner.backend.is_host_memory() && !inner.page.is_hugetlb();
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let unseen = if limited { Unseen::of(&*inner.backend, inner.node)? } else { None };
        let fill = |at, step, announced: &mut Announced| {
            if !limited {
                return fill_step(self.share, at, step);
            }
            let wanted = (bytes - at).div_ceil(self.threads as u64).min(MOST_ANNOUNCED);
            announced.cover(step, wanted, || Room::now(inner.node))?;
            match &unseen {
                Some(unseen) => unseen.step(step, || fill_step(self.share, at, step))?,
                None => fill_step(self.share, at, step)?,
            }
            announced.take_back(step);
            Ok(())
        };
        self.run(bytes.div_ceil(step), &|| {
            let mut announced = Announced::new(&IN_FLIGHT);
            loop {
                let at = next.fetch_add(step, Relaxed);
                if at >= bytes || lock(&failure).is_some() {
                    return;
                }
                let step = step.min(bytes - at);
                if let Err(error) = fill(at, step, &mut announced) {
                    *lock(&failure) = Some(error);
                    return;
                }
                let done = done.fetch_add(step, Relaxed) + step;
                if let Some(report) = plan.progress {
                    report(done);
                }
            }
        });
        failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
    }

    /// The nodes on which the frames lie. All frames are filled before the first is queried: memory
    /// that runs short meanwhile may make the kernel move frames away again (to a slower tier,
    /// say).
    fn placement(&self) -> Result<NodeCounts, Error> {
        let inner = &*self.share.0;
        if inner.frames <= VERIFIED_AT_ONCE || self.threads == 1 {
            return self.share.placement_of_all();
        }
        let (next, refused) = (AtomicU64::new(0), AtomicBool::new(false));
        let found: Mutex<NodeCounts> = Mutex::default();
        self.run(inner.frames.div_ceil(VERIFIED_AT_ONCE), &|| {
            let mut counts = NodeCounts::default();
            while !refused.load(Relaxed) {
                let first = next.fetch_add(VERIFIED_AT_ONCE, Relaxed);
                if first >= inner.frames {
                    break;
                }
                let frames = VERIFIED_AT_ONCE.min(inner.frames - first);
                let asked = counts.ask(&*inner.backend, inner.alias_of(first), frames, inner.page);
                if asked.is_err() {
                    refused.store(true, Relaxed);
                }
            }
            lock(&found).join(&counts);
        });
        if refused.into_inner() {
            // This call has another way (`numa_maps`), or returns the refusal as an error.
            return self.share.placement_of_all();
        }
        Ok(found.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Verifies that all frames lie on the share's node. `bound`: the result of `mbind` on the
    /// alias; used for the remedy only.
    fn verify_node(&self, bound: Result<(), Errno>) -> Result<(), Error> {
        let inner = &*self.share.0;
        let mut found = self.placement()?;
        for _ in 0..LOOKS {
            if !(1..=MOMENTARY).contains(&found.absent()) {
                break;
            }
            // The kernel is moving a page at this moment (for compaction, say), or has dropped its
            // page table entry. Populating waits for the move, and restores the entry.
            let (start, len) = (inner.alias_of(0), self.share.bytes() as usize);
            // SAFETY: the alias is the share's own.
            let _ = unsafe { inner.backend.populate(start, len, true) };
            found = self.placement()?;
        }
        let right = found.on(inner.node);
        if right == inner.frames {
            return Ok(());
        }
        Err(Error::Misplaced {
            node: inner.node,
            misplaced: inner.frames - right,
            pages: inner.frames,
            found: found.to_string(),
            remedy: match bound {
                Ok(()) => "free memory on that node".into(),
                Err(errno) => format!(
                    "allow mbind, which failed with {errno} (in a container: grant CAP_SYS_NICE, \
                     or allow it in the seccomp profile)"
                ),
            },
        })
    }
}

/// Checks in smaps that a filled range is mapped by huge pages.
fn check_page_size(page: PageSize, node: NodeId, addr: usize, len: usize) -> Result<(), Error> {
    if page == PageSize::Base {
        return Ok(());
    }
    let huge_bytes = huge_bytes(&observe::mapped_pages(addr, len)?, len as u64);
    if huge_bytes == len as u64 {
        return Ok(());
    }
    Err(Error::NotHuge {
        node,
        page,
        range: AddressRange::new(addr, len),
        huge_bytes,
        reason: "smaps shows smaller pages".into(),
        remedy: "run `pageleap doctor` to see why, or use huge pages of hugetlb (2m). Linux before 6.1 \
                 makes huge pages only if /sys/kernel/mm/transparent_hugepage/shmem_enabled is \
                 `always`, later kernels unless it is `deny` or PR_SET_THP_DISABLE is set",
    })
}

/// How many bytes of a filled range of `len` bytes are in huge pages. The result is rounded down,
/// so that it is `len` only if all are.
fn huge_bytes(mapped: &MappedPages, len: u64) -> u64 {
    if mapped.huge_mapped_ratio >= 1.0 {
        return len;
    }
    ((mapped.huge_mapped_ratio * len as f64) as u64).min(len - 1)
}

/// Faults a part of a share in.
fn fill_step(share: &Share, at: u64, step: u64) -> Result<(), Error> {
    let inner = &*share.0;
    let addr = inner.alias_of(0) + at as usize;
    if inner.page == PageSize::Thp {
        join_pages(share, addr, step as usize)?;
    }
    // SAFETY: the alias is the share's own.
    unsafe { inner.backend.populate(addr, step as usize, true) }
        .map_err(|errno| inner.refused(Call::Populate, addr, step as usize, errno))
}

/// Makes transparent huge pages of a part of a share that is still empty, one after the other. Each
/// needs 2 MB of contiguous memory.
fn join_pages(share: &Share, addr: usize, len: usize) -> Result<(), Error> {
    /// Attempts for each page. The kernel gives up while a page is isolated (on its way to another
    /// list) or locked, which passes in a moment.
    const TRIES: u32 = 20;
    let backend = &*share.0.backend;
    let page = PageSize::Thp.bytes();
    for at in (addr..addr + len).step_by(page) {
        // MADV_COLLAPSE needs one present page. With `always` in sysfs this one is huge already.
        // SAFETY: the alias is the share's own.
        unsafe { backend.populate(at, BASE_PAGE, true) }
            .map_err(|errno| Error::call(Call::Populate, at, BASE_PAGE, errno))?;
        let mut tries = 0;
        // SAFETY: as above.
        while let Err(errno) = unsafe { backend.collapse(at, page) } {
            tries += 1;
            // Linux before 6.1 has no MADV_COLLAPSE. There the setting in sysfs decides, and smaps
            // tells the outcome, after the first page and at the end.
            if errno == Errno(libc::EINVAL) {
                if at == share.0.alias_of(0) && backend.is_host_memory() {
                    check_page_size(PageSize::Thp, share.node(), at, page)?;
                }
                break;
            }
            if tries == TRIES || !matches!(errno.0, libc::EAGAIN | libc::EBUSY | libc::ENOMEM) {
                return Err(Error::NotHuge {
                    node: share.node(),
                    page: PageSize::Thp,
                    range: AddressRange::new(at, page),
                    huge_bytes: 0,
                    reason: format!("{} failed with {errno}", Call::Collapse),
                    remedy: "free memory and compact it (echo 1 > /proc/sys/vm/compact_memory), or use huge pages of hugetlb",
                });
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_small_page_is_enough_not_to_be_huge() {
        let mapped =
            |huge_mapped_ratio| MappedPages { kernel_page_size: BASE_PAGE, huge_mapped_ratio };
        assert_eq!(huge_bytes(&mapped(1.0), 1 << 40), 1 << 40);
        assert!(huge_bytes(&mapped(1.0 - 1e-12), 1 << 40) < 1 << 40);
        assert_eq!(huge_bytes(&mapped(0.5), 100), 50);
        assert_eq!(huge_bytes(&mapped(0.0), 100), 0);
    }
}
