//! Faulting a pool in, step by step: each step checks first that memory is free, and the result is
//! verified.
//!
//! If a pool were bound strictly and filled by touching, a full node would bring the OOM killer,
//! and hugetlb a SIGBUS. So base pages are *preferred* on the node, and bound only after the kernel
//! has confirmed where they are. hugetlb pages are populated by a call that reports an error
//! instead of raising a signal.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::frames::Run;
use super::reserve_command;
use super::share::{Plan, Share};
use crate::affinity;
use crate::backend::{Backend, Call, Errno, Policy};
use crate::cgroup;
use crate::error::Error;
use crate::observe::{self, MappedPages};
use crate::sync::{Mutex, lock, thread};
use crate::topology::{SysFiles, Topology, available};
use crate::units::{AddressRange, BASE_PAGE, NodeId, PageSize, human_bytes};

/// How often pages are populated again that the kernel shows as absent.
const LOOKS: u32 = 8;
/// Most pages that can be absent for a moment only. If more are, populating them again is no cure.
const MOMENTARY: u64 = 64;
/// Bytes populated between two checks of the limits.
const STEP: u64 = 32 << 20;
/// Bytes that a step leaves free for others.
const MARGIN: u64 = 64 << 20;
/// Most threads that fill a share: more do not fault faster, because the kernel's allocator is the
/// limit.
const MAX_THREADS: usize = 8;

/// Checks that the node exists and has room for the whole pool.
pub(super) fn check_node(
    backend: &dyn Backend,
    node: NodeId,
    page: PageSize,
    bytes: u64,
) -> Result<(), Error> {
    let host = backend.is_host_memory();
    if host {
        Topology::node_now(node)?;
    }
    if !backend.allows_node(node.0) {
        return Err(Error::NodeNotAllowed { node });
    }
    if host { check_room(node, page, bytes) } else { Ok(()) }
}

/// Bytes that threads of this process are about to take, for all pools together. The free memory
/// that a thread reads does not show what the others are about to take.
static IN_FLIGHT: AtomicU64 = AtomicU64::new(0);

/// Checks that `bytes` more can be taken without driving the node, the machine or a memory cgroup
/// out of memory.
fn check_room(node: NodeId, page: PageSize, bytes: u64) -> Result<(), Error> {
    let n = Topology::node_now(node)?;
    if page.is_hugetlb() {
        let page_bytes = page.bytes() as u64;
        let free = n.free_huge(page_bytes);
        let free_bytes = free * page_bytes;
        if free_bytes >= bytes {
            return Ok(());
        }
        let missing = bytes / page_bytes - free;
        return Err(Error::OutOfMemory {
            node,
            needed_bytes: bytes,
            free_bytes,
            limit: format!("the number of free {} huge pages", human_bytes(page_bytes)),
            remedy: format!("reserve {missing} more: {}", reserve_command(node, page, missing)),
        });
    }
    let files = SysFiles::host();
    let machine = files.text("proc/meminfo")?;
    // Memory that the kernel keeps for itself on each node.
    let reserve = files.number("proc/sys/vm/min_free_kbytes")? << 10;
    let mut limits = vec![
        (format!("the free memory of {node}"), n.free_bytes.saturating_sub(reserve)),
        ("the free memory of the machine".to_owned(), available(&machine).saturating_sub(reserve)),
    ];
    limits.extend(
        cgroup::memory_rooms(&files).into_iter().map(|room| (format!("/{}", room.file), room.left)),
    );
    for (limit, free) in limits {
        let free_bytes = free.saturating_sub(MARGIN);
        if free_bytes < bytes {
            let remedy = "make the pool smaller, free memory, or raise the limit".into();
            return Err(Error::OutOfMemory {
                node,
                needed_bytes: bytes,
                free_bytes,
                limit,
                remedy,
            });
        }
    }
    Ok(())
}

/// Faults a whole share in, and verifies on which node its pages lie and how large they are.
pub(super) fn fill(share: &Share, plan: &Plan) -> Result<(), Error> {
    let inner = &*share.0;
    let backend = &*inner.backend;
    let (start, len) = (inner.alias_of(0), share.bytes() as usize);
    let node = inner.node;
    // Under a preference, hugetlb takes huge pages of other nodes; under a binding, it reports an
    // error.
    let policy =
        if inner.page.is_hugetlb() { Policy::Bind(node.0) } else { Policy::Preferred(node.0) };
    // A seccomp filter may refuse `mbind`. Then the threads that fault the memory in run on the
    // node's CPUs, and by default the kernel takes memory of the node of the CPU. Either way the
    // result is verified. SAFETY: the alias is the share's own.
    let bound = unsafe { backend.bind(start, len, policy) };
    // Address space that is needed at the end is reserved now: filling a pool takes long.
    let window =
        if bound.is_ok() && !inner.page.is_hugetlb() { Some(share.window()?) } else { None };
    fault_in(share, plan, bound.is_ok())?;
    if bound.is_err() && inner.tables.is_some_and(|tables| tables != node) {
        share.note_tables(Run { first: 0, frames: inner.frames }, None);
    }
    verify_node(share, bound)?;
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

/// Faults a whole share in, by several threads on the CPUs of its node. `bound`: whether the kernel
/// has taken a policy for the alias.
fn fault_in(share: &Share, plan: &Plan, bound: bool) -> Result<(), Error> {
    let inner = &*share.0;
    let (backend, node, bytes) = (&*inner.backend, inner.node, share.bytes());
    let cpus = if backend.is_host_memory() { Topology::node_now(node)?.cpus } else { Vec::new() };
    let step = STEP.max(inner.page.bytes() as u64);
    let threads =
        plan.threads.unwrap_or(cpus.len().clamp(1, MAX_THREADS)).min(bytes.div_ceil(step) as usize);
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let work = |own_thread: bool| {
        if own_thread {
            affinity::run_on(&cpus);
            // Memory without a policy of its own follows the thread's policy too, and memory
            // matters more than page tables. Without any policy, both come from the node on which
            // the thread runs: this one, if it has CPUs.
            let tables = inner.tables.map(|tables| if bound { tables } else { node });
            if let Some(tables) = tables {
                let _ = backend.prefer_tables_on(Some(tables.0));
            }
        }
        loop {
            let at = next.fetch_add(step, Relaxed);
            if at >= bytes || lock(&failure).is_some() {
                return;
            }
            let step = step.min(bytes - at);
            if let Err(error) = fill_step(share, at, step) {
                *lock(&failure) = Some(error);
                return;
            }
            let done = done.fetch_add(step, Relaxed) + step;
            if let Some(report) = plan.progress {
                report(done);
            }
        }
    };
    thread::scope(|scope| {
        // If fewer threads start than were asked for, filling only takes longer.
        let work = &work;
        let start = |_| scope.start(c"pageleap-fill", move || work(true)).ok();
        if (0..threads).filter_map(start).count() == 0 {
            // The caller's own thread keeps its CPUs and its policy.
            work(false);
        }
    });
    failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
}

/// Verifies that all frames of a filled share lie on its node. `bound` is what the kernel said to
/// the policy of the alias.
fn verify_node(share: &Share, bound: Result<(), Errno>) -> Result<(), Error> {
    let inner = &*share.0;
    let mut found = share.placement_of_all()?;
    for _ in 0..LOOKS {
        if !(1..=MOMENTARY).contains(&found.absent()) {
            break;
        }
        // The kernel is moving a page at this moment (for compaction, say), or has dropped its page
        // table entry. The call waits for the one and restores the other.
        // SAFETY: the alias is the share's own.
        let _ = unsafe { inner.backend.populate(inner.alias_of(0), share.bytes() as usize, true) };
        found = share.placement_of_all()?;
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
                "allow mbind, which failed with {errno} (in a container: grant CAP_SYS_NICE, or \
                 allow it in the seccomp profile)"
            ),
        },
    })
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

/// How many bytes of a filled range of `len` bytes are in huge pages. Rounding never makes it all.
fn huge_bytes(mapped: &MappedPages, len: u64) -> u64 {
    if mapped.huge_mapped_ratio >= 1.0 {
        return len;
    }
    ((mapped.huge_mapped_ratio * len as f64) as u64).min(len - 1)
}

fn fill_step(share: &Share, at: u64, step: u64) -> Result<(), Error> {
    /// Bytes that are announced until this value is dropped.
    struct Announced(u64);
    impl Drop for Announced {
        fn drop(&mut self) {
            IN_FLIGHT.fetch_sub(self.0, Relaxed);
        }
    }
    let inner = &*share.0;
    let limited = inner.backend.is_host_memory() && !inner.page.is_hugetlb();
    let _announced = loop {
        let others = IN_FLIGHT.fetch_add(step, Relaxed);
        let announced = Announced(step);
        if !limited {
            break announced;
        }
        match check_room(inner.node, inner.page, others + step) {
            Ok(()) => break announced,
            Err(error) if others == 0 => return Err(error),
            // Memory that other threads have announced and already taken counts twice: check again
            // when they are done.
            Err(_) => drop(announced),
        }
        thread::sleep(Duration::from_millis(2));
    };
    let addr = inner.alias_of(0) + at as usize;
    if inner.page == PageSize::Thp {
        join_pages(share, addr, step as usize)?;
    }
    // SAFETY: the alias is the share's own.
    unsafe { inner.backend.populate(addr, step as usize, true) }
        .map_err(|errno| Error::call(Call::Populate, addr, step as usize, errno))
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
