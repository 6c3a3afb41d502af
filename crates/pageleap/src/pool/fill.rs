//! Faulting a pool in: step by step, each step only if there is memory for it, on the right node, and verified afterwards.
//!
//! A pool that is bound strictly and filled by touching meets the OOM killer when its node runs full, and SIGBUS on hugetlb. So base pages are
//! *preferred* on the node and bound only once the kernel has confirmed where they are; hugetlb pages are populated by a call that
//! reports an error instead of raising a signal; and every step looks at the limits first.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Pool, huge_page_line};
use crate::affinity;
use crate::backend::{Backend, Call, Policy};
use crate::error::Error;
use crate::sync::lock;
use crate::topology::{Topology, meminfo};
use crate::units::{NodeId, PageSize};

/// Bytes populated between two looks at the limits.
const STEP: u64 = 32 << 20;
/// What a step leaves to everybody else.
const MARGIN: u64 = 64 << 20;
/// More threads do not fault faster: the kernel's allocator is the limit.
const MAX_THREADS: usize = 8;

/// Checks that the node exists and has room for the whole pool.
pub(super) fn check_node(
    backend: &dyn Backend,
    node: NodeId,
    page: PageSize,
    bytes: u64,
) -> Result<(), Error> {
    if !backend.is_host_memory() {
        return Ok(());
    }
    check_room(node, page, bytes)
}

/// Checks that `bytes` more can be taken without driving the node, the machine or a memory cgroup out of memory.
fn check_room(node: NodeId, page: PageSize, bytes: u64) -> Result<(), Error> {
    let topology = Topology::read()?;
    let n = topology.node(node)?;
    let short = |free_bytes: u64, limit: String, remedy: String| {
        if free_bytes >= bytes {
            Ok(())
        } else {
            Err(Error::OutOfMemory { node, needed_bytes: bytes, free_bytes, limit, remedy })
        }
    };
    if page == PageSize::Huge2M {
        let page_bytes = page.bytes() as u64;
        let missing = (bytes / page_bytes).saturating_sub(n.free_huge_2m);
        return short(
            n.free_huge_2m * page_bytes,
            "the number of free 2 MB huge pages".into(),
            format!("reserve {missing} more: {}", huge_page_line(node, missing)),
        );
    }
    let remedy = "make the pool smaller, or free memory there";
    short(n.free_bytes.saturating_sub(MARGIN), format!("the free memory of {node}"), remedy.into())?;
    for (limit, free) in cgroup_limits(Path::new("/sys/fs/cgroup"), &own_cgroup()) {
        let remedy = format!("make the pool smaller, or raise the limit in {limit}");
        short(free.saturating_sub(MARGIN), limit, remedy)?;
    }
    Ok(())
}

/// The path of this process in the unified cgroup hierarchy, without the leading slash.
fn own_cgroup() -> PathBuf {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = text.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    PathBuf::from(path)
}

/// For each memory limit that applies to the cgroup: its file, and the bytes left under it. File pages that can be dropped count as left.
fn cgroup_limits(root: &Path, own: &Path) -> Vec<(String, u64)> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    own.ancestors()
        .filter_map(|path| {
            let folder = root.join(path);
            // "max" and a missing file both mean: no limit here.
            let max = number(folder.join("memory.max"))?;
            let current = number(folder.join("memory.current"))?;
            let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let file: u64 = ["active_file ", "inactive_file "]
                .iter()
                .filter_map(|name| {
                    stat.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok()
                })
                .sum();
            let limit = folder.join("memory.max").display().to_string();
            Some((limit, max.saturating_sub(current.saturating_sub(file))))
        })
        .collect()
}

/// Faults the whole pool in and verifies where it is.
pub(super) fn fill(
    pool: &Pool,
    threads: Option<usize>,
    progress: Option<&(dyn Fn(u64, u64) + Send + Sync)>,
) -> Result<(), Error> {
    let inner = &*pool.0;
    let backend = &*inner.backend;
    let (start, bytes) = (inner.alias_of(0), pool.bytes());
    let node = inner.node;
    // hugetlb takes huge pages of other nodes under a preference; under a binding it reports an error.
    let policy = match inner.page {
        PageSize::Base => Policy::Preferred(node.0),
        PageSize::Huge2M => Policy::Bind(node.0),
    };
    // Where a seccomp filter refuses `mbind`, the threads that fault the memory in are on the node's CPUs, and the kernel's default is to
    // take memory where the CPU is. Either way the result is verified.
    // SAFETY: the alias is the pool's own.
    let bound = unsafe { backend.bind(start, bytes as usize, policy) };

    let cpus = if backend.is_host_memory() { Topology::read()?.node(node)?.cpus.clone() } else { Vec::new() };
    let threads = threads.unwrap_or(cpus.len().clamp(1, MAX_THREADS)).min(bytes.div_ceil(STEP) as usize);
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        affinity::run_on(&cpus);
        loop {
            let at = next.fetch_add(STEP, Relaxed);
            if at >= bytes || lock(&failure).is_some() {
                return;
            }
            let step = STEP.min(bytes - at);
            if let Err(error) = fill_step(pool, at, step) {
                *lock(&failure) = Some(error);
                return;
            }
            let done = done.fetch_add(step, Relaxed) + step;
            if let Some(report) = progress {
                report(done, bytes);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }

    let found = pool.verify()?;
    let right = found.on(node);
    if right < inner.frames {
        return Err(Error::Misplaced {
            node,
            misplaced: inner.frames - right,
            pages: inner.frames,
            found: found.to_string(),
            remedy: match bound {
                Ok(()) => "free memory on the node: the kernel went elsewhere".into(),
                Err(errno) => format!(
                    "allow mbind, which failed with {errno} (in a container: CAP_SYS_NICE or its seccomp profile)"
                ),
            },
        });
    }
    if bound.is_ok() && inner.page == PageSize::Base {
        // A page that is swapped out and in again must come back to this node.
        // SAFETY: as above.
        unsafe { backend.bind(start, bytes as usize, Policy::Bind(node.0)) }
            .map_err(|errno| Error::call(Call::Bind, start, bytes as usize, errno))?;
    }
    Ok(())
}

fn fill_step(pool: &Pool, at: u64, step: u64) -> Result<(), Error> {
    let inner = &*pool.0;
    if inner.backend.is_host_memory() && inner.page == PageSize::Base {
        let (_, machine_free) = meminfo(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
        if machine_free < step + MARGIN {
            return Err(Error::OutOfMemory {
                node: inner.node,
                needed_bytes: pool.bytes() - at,
                free_bytes: machine_free,
                limit: "the machine".into(),
                remedy: "make the pool smaller, or free memory".into(),
            });
        }
        check_room(inner.node, inner.page, step)?;
    }
    let addr = inner.alias_of(0) + at as usize;
    // SAFETY: the alias is the pool's own.
    unsafe { inner.backend.populate(addr, step as usize, true) }
        .map_err(|errno| Error::call(Call::Populate, addr, step as usize, errno))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_cgroup_limit_is_found_and_droppable_file_pages_count_as_free() {
        let root = std::env::temp_dir().join(format!("pageleap-cgroup-{}", std::process::id()));
        let child = root.join("a/b");
        fs::create_dir_all(&child).unwrap();
        let put = |folder: &Path, name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        put(&child, "memory.max", "1000000\n");
        put(&child, "memory.current", "900000\n");
        put(&child, "memory.stat", "anon 1\ninactive_file 50000\nactive_file 1000\n");
        put(&root.join("a"), "memory.max", "max\n");
        put(&root.join("a"), "memory.current", "5\n");
        let limits = cgroup_limits(&root, Path::new("a/b"));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(limits.len(), 1);
        assert_eq!(limits[0].1, 151_000);
        assert!(limits[0].0.ends_with("a/b/memory.max"));
    }
}
