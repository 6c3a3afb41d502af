//! Limits of the process that the library checks before it goes to work.

use pageleap_sys::Resource;

use crate::backend::Backend;
use crate::cgroup;
use crate::error::Error;
use crate::sync::{Fresh, monotonic_ns};
use crate::units::{BASE_PAGE, NodeId};

/// Checks RLIMIT_AS: whether `threads` more threads fit into the address space that is left, or,
/// for 0, whether the process is within its limit at all. A thread that allocates without address
/// space would end the process. A model has room for all.
pub(crate) fn check_address_space(backend: &dyn Backend, threads: usize) -> Result<(), Error> {
    /// Bytes for a thread's stack, guard page and allocator arena, generously.
    const PER_THREAD: u64 = 4 << 20;
    let needed = PER_THREAD * threads as u64;
    if backend.is_host_memory() && pageleap_sys::is_over_address_space_limit(BASE_PAGE, needed) {
        let what = match needed >> 20 {
            0 => "the process has more address space than RLIMIT_AS allows".to_owned(),
            more => format!("RLIMIT_AS leaves the process less than {more} MB of address space"),
        };
        return Err(Error::Unsupported {
            what,
            remedy: "raise the limit (ulimit -v), or unmap memory that is no longer used",
        });
    }
    Ok(())
}

/// Whether the process has more address space than RLIMIT_AS allows. Beyond the limit, a call that
/// unmaps first and then maps fails in between. If there was no limit a moment ago, nothing is
/// read.
pub(crate) fn is_over_address_space_limit() -> bool {
    static UNLIMITED: Fresh<()> = Fresh::new();
    if UNLIMITED.get(|()| ()).is_some() {
        return false;
    }
    let now_ns = monotonic_ns();
    if pageleap_sys::resource_limit(Resource::AddressSpace).is_ok_and(|limit| limit.soft.is_none())
    {
        UNLIMITED.put((), now_ns);
        return false;
    }
    pageleap_sys::is_over_address_space_limit(BASE_PAGE, 0)
}

/// Checks that memory cgroups leave room for the memory that a job of `bytes` bytes takes beside
/// its frames: stacks of `threads` threads, page tables, and the kernel's records of mappings. The
/// cgroup is charged for all of these, and if it is full, the kernel kills a process in it.
pub(crate) fn check_memory_cgroups(
    node: NodeId,
    threads: usize,
    bytes: usize,
) -> Result<(), Error> {
    /// Records of mappings, and the allocator's own memory.
    const SPARE: u64 = 1 << 20;
    /// A thread's stack in the kernel, and the touched part of its own.
    const PER_THREAD: u64 = 128 << 10;
    /// An entry of a page table has 8 bytes, for a page of 4 KB.
    const PER_ENTRY: u64 = 512;
    let needed_bytes = SPARE + PER_THREAD * threads as u64 + bytes as u64 / PER_ENTRY;
    match cgroup::memory_short_of(needed_bytes) {
        None => Ok(()),
        Some(short) => Err(Error::OutOfMemory {
            node,
            needed_bytes,
            free_bytes: short.left,
            limit: format!("/{}", short.file),
            remedy:
                "raise the limit, or free memory in the cgroup; the kernel would kill a process \
                     in it for the page tables and threads of the job"
                    .into(),
        }),
    }
}
