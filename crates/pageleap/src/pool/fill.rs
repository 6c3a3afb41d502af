//! Faulting a pool in: step by step, each step only if there is memory for it, on the right node, and verified afterwards.
//!
//! A pool that is bound strictly and filled by touching meets the OOM killer when its node runs full, and SIGBUS on hugetlb. So base pages are
//! *preferred* on the node and bound only once the kernel has confirmed where they are; hugetlb pages are populated by a call that
//! reports an error instead of raising a signal; and every step looks at the limits first.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::{Pool, huge_page_line};
use crate::affinity;
use crate::backend::{Backend, Call, Policy};
use crate::error::Error;
use crate::sync::lock;
use crate::topology::{Topology, available};
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

/// Bytes that threads of this process are about to take, all pools together: each sees the free memory of before.
static IN_FLIGHT: AtomicU64 = AtomicU64::new(0);

/// Checks that `bytes` more can be taken without driving the node, the machine or a memory cgroup out of memory.
fn check_room(node: NodeId, page: PageSize, bytes: u64) -> Result<(), Error> {
    let n = Topology::node_now(node)?;
    if page == PageSize::Huge2M {
        let page_bytes = page.bytes() as u64;
        let free_bytes = n.free_huge(page_bytes) * page_bytes;
        if free_bytes >= bytes {
            return Ok(());
        }
        let missing = bytes / page_bytes - n.free_huge(page_bytes);
        return Err(Error::OutOfMemory {
            node,
            needed_bytes: bytes,
            free_bytes,
            limit: "the number of free 2 MB huge pages".into(),
            remedy: format!("reserve {missing} more: {}", huge_page_line(node, missing)),
        });
    }
    let text = |path: &str| fs::read_to_string(path).map_err(|e| Error::system_file(path, &e));
    let (machine, cgroups) = (text("/proc/meminfo")?, text("/proc/self/cgroup")?);
    // The kernel keeps so much for itself on each node.
    let reserve = text("/proc/sys/vm/min_free_kbytes")?.trim().parse::<u64>().unwrap_or(0) << 10;
    let mut limits = vec![
        (format!("the free memory of {node}"), n.free_bytes.saturating_sub(reserve)),
        ("the free memory of the machine".to_owned(), available(&machine).saturating_sub(reserve)),
    ];
    limits.extend(cgroup_limits(Path::new("/sys/fs/cgroup"), &cgroups));
    for (limit, free) in limits {
        let free_bytes = free.saturating_sub(MARGIN);
        if free_bytes < bytes {
            let remedy = "make the pool smaller, free memory, or raise the limit".into();
            return Err(Error::OutOfMemory { node, needed_bytes: bytes, free_bytes, limit, remedy });
        }
    }
    Ok(())
}

/// For each memory limit that applies to the process: its file, and the bytes left under it. File pages that can be dropped count as left.
/// `membership` is the text of `/proc/self/cgroup`, `root` where cgroups are mounted: version 2 there or in `unified`, version 1 in `memory`.
fn cgroup_limits(root: &Path, membership: &str) -> Vec<(String, u64)> {
    struct Names {
        max: &'static str,
        current: &'static str,
        file: [&'static str; 2],
    }
    const V1: Names = Names {
        max: "memory.limit_in_bytes",
        current: "memory.usage_in_bytes",
        file: ["total_active_file ", "total_inactive_file "],
    };
    const V2: Names =
        Names { max: "memory.max", current: "memory.current", file: ["active_file ", "inactive_file "] };
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let mut limits = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (names, mounts) = match controllers {
            "" => (V2, vec![root.to_owned(), root.join("unified")]),
            list if list.split(',').any(|c| c == "memory") => (V1, vec![root.join("memory")]),
            _ => continue,
        };
        for mount in mounts {
            for folder in Path::new(path.trim_start_matches('/')).ancestors().map(|path| mount.join(path)) {
                // "max" and a missing file both mean: no limit here.
                let limit = number(folder.join(names.max)).zip(number(folder.join(names.current)));
                let Some((max, current)) = limit else { continue };
                let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
                let value = |name: &&str| {
                    stat.lines().find_map(|l| l.strip_prefix(*name))?.trim().parse::<u64>().ok()
                };
                let file: u64 = names.file.iter().filter_map(value).sum();
                let left = max.saturating_sub(current.saturating_sub(file));
                limits.push((folder.join(names.max).display().to_string(), left));
            }
        }
    }
    limits
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
    let work = |own_thread: bool| {
        if own_thread {
            affinity::run_on(&cpus);
        }
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
        // With fewer threads than asked for, or none, it only takes longer.
        let work = &work;
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, move || work(true)).ok();
        if (0..threads).filter_map(spawn).count() == 0 {
            // The caller's own thread keeps the CPUs that it has.
            work(false);
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
    /// Bytes announced until this is dropped.
    struct Announced(u64);
    impl Drop for Announced {
        fn drop(&mut self) {
            IN_FLIGHT.fetch_sub(self.0, Relaxed);
        }
    }
    let inner = &*pool.0;
    let limited = inner.backend.is_host_memory() && inner.page == PageSize::Base;
    let _announced = loop {
        let others = IN_FLIGHT.fetch_add(step, Relaxed);
        let announced = Announced(step);
        if !limited {
            break announced;
        }
        match check_room(inner.node, inner.page, others + step) {
            Ok(()) => break announced,
            Err(error) if others == 0 => return Err(error),
            // What others have announced and taken already counts twice: look again when they are done.
            Err(_) => drop(announced),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let addr = inner.alias_of(0) + at as usize;
    // SAFETY: the alias is the pool's own.
    unsafe { inner.backend.populate(addr, step as usize, true) }
        .map_err(|errno| Error::call(Call::Populate, addr, step as usize, errno))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn limits_of_both_cgroup_versions_are_found_and_droppable_file_pages_count_as_free() {
        let root = std::env::temp_dir().join(format!("pageleap-cgroup-{}", std::process::id()));
        let put = |folder: &str, files: [(&str, &str); 3]| {
            fs::create_dir_all(root.join(folder)).unwrap();
            files.iter().for_each(|(name, text)| fs::write(root.join(folder).join(name), text).unwrap());
        };
        put("a", [("memory.max", "max\n"), ("memory.current", "5\n"), ("memory.stat", "")]);
        let stat = "anon 1\ninactive_file 50000\nactive_file 1000\n";
        put("a/b", [("memory.max", "1000000\n"), ("memory.current", "900000\n"), ("memory.stat", stat)]);
        let stat = "inactive_file 7\ntotal_inactive_file 30\ntotal_active_file 5\n";
        let files =
            [("memory.limit_in_bytes", "100\n"), ("memory.usage_in_bytes", "90\n"), ("memory.stat", stat)];
        put("memory/c", files);
        let limits = cgroup_limits(&root, "9:cpu:/x\n4:memory:/c\n0::/a/b\n");
        fs::remove_dir_all(&root).unwrap();
        let found: Vec<_> = limits
            .iter()
            .map(|(file, left)| (file.strip_prefix(root.to_str().unwrap()).unwrap(), *left))
            .collect();
        assert_eq!(found, [("/memory/c/memory.limit_in_bytes", 45), ("/a/b/memory.max", 151_000)]);
    }
}
