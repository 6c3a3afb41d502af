//! Errors with their evidence: the call, the error number, the address range, the likely reason,
//! and the remedy.

use std::str::FromStr;

use pageleap_sys::Errno;

use crate::units::{AddressRange, Call, NodeId, PageSize, human_bytes};

/// Why an operation failed. After any error, each page of each region is still readable and
/// writable at its address, and nothing in it is lost.
///
/// Which operation can fail with which errors:
///
/// | operation | errors |
/// |---|---|
/// | [`Topology::read`](crate::topology::Topology::read) | `SystemFile`; looking up a node: `UnknownNode` |
/// | [`PoolBuilder::build`](crate::pool::PoolBuilder::build) | `BadArgument`, `UnknownNode`, `NodeNotAllowed`, `OutOfMemory`, `NotHuge`, `Misplaced`, `Call`, `NoThread`, `SystemFile`, `Unsupported` |
/// | [`Region::new`](crate::Region::new), growing, `back`, `discard` | `BadArgument`, `BadRange`, `PoolExhausted`, `RangeBusy`, `Pinned`, `DescriptorLost`, `Call`, `Unsupported` |
/// | [`Region::pin`](crate::Region::pin), views of a region | `BadRange`, `BadArgument` |
/// | [`Region::follow_latency`](crate::Region::follow_latency) | `NoThread`, `Unsupported`; later failures are in its status |
/// | [`Migration::start`](crate::Migration::start), [`run`](crate::Migration::run) | `BadArgument`, `BadRange`, `RangeBusy`, `NodeNotAllowed`, `PoolExhausted`, `OutOfMemory`, `EngineRefused`, `DescriptorLost`, `Limit`, `NoThread`, `SystemFile`, `Call`, `Unsupported` |
/// | [`PageTableMigration::start`](crate::PageTableMigration::start) | `BadArgument`, `BadRange`, `UnknownNode`, `NodeNotAllowed`, `RangeBusy`, `DescriptorLost`, `Limit`, `NoThread`, `SystemFile`, `Call`, `EngineRefused`, `Unsupported` |
/// | a job that has ended ([`Ended::Failed`](crate::Ended::Failed)) | `Pinned`, `Call`, `NotMoved`, `DescriptorLost`, `NoThread`; `Unsupported`: the program has changed a mapping; `EngineRefused`, `SystemFile`: a signal could not be used |
/// | [`MemoryMigration::start`](crate::MemoryMigration::start), [`KernelMigration::start`](crate::KernelMigration::start) | `BadArgument`, `UnknownNode`, `EngineRefused`, `OutOfMemory`, `NoThread`, `SystemFile`, `Call`, `Unsupported` |
/// | reading a process or its places | `BadArgument`, `SystemFile`, `Call` |
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is not valid; nothing was attempted.
    #[error("bad {what}: {reason}; {remedy}")]
    BadArgument {
        /// The argument.
        what: &'static str,
        /// Why it is not valid.
        reason: String,
        /// A value to pass instead.
        remedy: String,
    },
    /// A byte range is empty, not inside the region, not aligned to its pages, or partly without
    /// memory.
    #[error(
        "bad range {start:#x}..{end:#x} of a region of {region_len:#x} bytes at {region_start:#x}: {reason}; {remedy}"
    )]
    BadRange {
        /// First byte, relative to the region.
        start: usize,
        /// One past the last byte, relative to the region.
        end: usize,
        /// Address of the region.
        region_start: usize,
        /// Length of the region in bytes.
        region_len: usize,
        /// Why it is not valid.
        reason: &'static str,
        /// A range to pass instead.
        remedy: String,
    },
    /// The machine has no such node, or the node is offline.
    #[error("this machine has no {node}; use one of the nodes with memory: {known}")]
    UnknownNode {
        /// The requested node.
        node: NodeId,
        /// The nodes with memory.
        known: String,
    },
    /// The cpuset of the process does not allow memory of the node.
    #[error(
        "the cpuset of this process does not allow memory of {node} (Mems_allowed_list in /proc/self/status); add the node to \
         cpuset.mems of its cgroup (in a container: --cpuset-mems), or use a node that is in it"
    )]
    NodeNotAllowed {
        /// The node.
        node: NodeId,
    },
    /// The kernel did not make pages of the requested size.
    #[error("{range} on {node}: {} of {} are in {page} pages: {reason}; {remedy}", human_bytes(*.huge_bytes), human_bytes(.range.0.len() as u64))]
    NotHuge {
        /// The node.
        node: NodeId,
        /// The requested size.
        page: PageSize,
        /// Where.
        range: AddressRange,
        /// How many bytes of the range are in such pages.
        huge_bytes: u64,
        /// Why, as far as the kernel says.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// Another job or call works on part of the range.
    #[error(
        "bytes {start:#x}..{end:#x} of the region are in use by a running job or call, or named twice; \
         wait for the job or cancel it (to discard or back them, wait for a moment: discard_within, \
         back_within)"
    )]
    RangeBusy {
        /// First byte of the requested range, relative to the region.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// A guard keeps pages where they are.
    #[error(
        "a guard keeps {range} in its frames; drop the guard when its I/O has completed, and try again"
    )]
    Pinned {
        /// The part under a guard.
        range: AddressRange,
    },
    /// The pool has fewer free frames than needed.
    #[error(
        "the pool on {node} has {} free of {}, and {} are needed; make the pool larger, discard what \
         is no longer used, or move less at once",
        human_bytes(*.free_bytes), human_bytes(*.pool_bytes), human_bytes(*.needed_bytes)
    )]
    PoolExhausted {
        /// The pool's node.
        node: NodeId,
        /// Free frames, in bytes.
        free_bytes: u64,
        /// All frames, in bytes.
        pool_bytes: u64,
        /// Bytes that the whole call needs of the pool.
        needed_bytes: u64,
    },
    /// The machine, the node or the memory cgroup has too little free memory.
    #[error(
        "{node}: {} more are needed, and {limit} leaves {}; {remedy}",
        human_bytes(*.needed_bytes), human_bytes(*.free_bytes)
    )]
    OutOfMemory {
        /// The node.
        node: NodeId,
        /// Bytes that were still to be taken.
        needed_bytes: u64,
        /// Bytes that the limit leaves.
        free_bytes: u64,
        /// The limit: of the node, the machine, or a cgroup's file.
        limit: String,
        /// How to fix it, as a command where one exists.
        remedy: String,
    },
    /// Pages of a pool do not lie on the requested node.
    #[error("{misplaced} of {pages} pages of the pool are not on {node} ({found}); {remedy}")]
    Misplaced {
        /// The requested node.
        node: NodeId,
        /// Pages elsewhere or not present.
        misplaced: u64,
        /// All pages.
        pages: u64,
        /// Counts per node, as the kernel reports them.
        found: String,
        /// How to fix it.
        remedy: String,
    },
    /// An engine cannot be used on this machine or with this memory.
    #[error("engine `{engine}` cannot be used: {reason}; {remedy}")]
    EngineRefused {
        /// Its name.
        engine: &'static str,
        /// Why.
        reason: String,
        /// How to make it usable.
        remedy: String,
    },
    /// Pages that were to move stay where they are.
    #[error("{range} of process {pid} stays where it is: {reason}; {remedy}")]
    NotMoved {
        /// The process.
        pid: u32,
        /// Which pages; others may have stayed as well.
        range: AddressRange,
        /// Why.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// A system call failed.
    #[error("{call} of {range} failed with {errno}; {remedy}")]
    Call {
        /// Which one.
        call: Call,
        /// On which addresses.
        range: AddressRange,
        /// With which error number.
        errno: Errno,
        /// How to fix it, probably.
        remedy: &'static str,
    },
    /// A file of `/proc` or `/sys` could not be read, or its content is not known.
    #[error("{path}: {reason}; {remedy}")]
    SystemFile {
        /// Which file.
        path: String,
        /// Why it cannot be used.
        reason: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// A thread that the work needs could not be started. With EAGAIN another thread of the process
    /// may be in `execve`: as long as that takes, the kernel starts no thread, and if it fails, the
    /// next call succeeds.
    #[error("{what} could not be started: pthread_create failed with {errno}; {remedy}")]
    NoThread {
        /// The purpose of the thread.
        what: &'static str,
        /// With which error number.
        errno: Errno,
        /// How to fix it.
        remedy: &'static str,
    },
    /// Other code of this process has closed a descriptor of the library's. Its number may stand
    /// for another file now, which is not touched.
    #[error(
        "{what}: its descriptor {descriptor} has been closed by other code of this process{}; do not \
         close descriptors that the program has not opened. Regions keep their memory, and can no \
         longer move it",
        if *.is_reused { ", and the number stands for another file" } else { "" }
    )]
    DescriptorLost {
        /// The owner of the descriptor.
        what: String,
        /// Its number.
        descriptor: i32,
        /// Whether the number stands for another file now.
        is_reused: bool,
    },
    /// The library does not support this machine, or the process is at one of its limits.
    #[error("{what}; {remedy}")]
    Unsupported {
        /// The missing or different feature.
        what: String,
        /// How to fix it.
        remedy: &'static str,
    },
    /// A fixed limit of this library was reached.
    #[error("{what}: at most {limit} at a time, {in_use} in use, {needed} needed; {remedy}")]
    Limit {
        /// The resource that ran out.
        what: &'static str,
        /// The limit.
        limit: usize,
        /// How many are in use.
        in_use: usize,
        /// How many more are needed.
        needed: usize,
        /// How to fix it.
        remedy: &'static str,
    },
}

impl Error {
    /// Whether an argument of the caller is at fault, rather than the machine or its state.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Error::BadArgument { .. } | Error::BadRange { .. } | Error::UnknownNode { .. }
        )
    }

    /// Describes a file of `/proc` or `/sys` that could not be read.
    pub(crate) fn system_file(path: &str, error: &std::io::Error) -> Self {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOENT) => "mount procfs and sysfs in this container",
            Some(libc::EMFILE | libc::ENFILE) => {
                "raise the limit of open files (ulimit -n), or close some"
            }
            _ => "allow this process to read it",
        };
        Error::SystemFile { path: path.into(), reason: error.to_string(), remedy }
    }

    /// Describes a failed system call, with the remedy for its error number.
    pub(crate) fn call(call: Call, addr: usize, len: usize, errno: Errno) -> Self {
        Error::Call {
            call,
            range: AddressRange::new(addr, len),
            errno,
            remedy: remedy(call, errno),
        }
    }
}

/// Why the pagemap cannot be opened although `/proc` has it, and the remedy.
pub(crate) fn closed_pagemap(call: Call, errno: Errno) -> Option<(&'static str, &'static str)> {
    (call == Call::OpenPagemap && errno.0 == libc::EACCES).then_some((
        "/proc/self belongs to root while a process is not dumpable (after a change of its user or \
         group, after prctl(PR_SET_DUMPABLE, 0), or if its program has capabilities or set-user-id)",
        "call prctl(PR_SET_DUMPABLE, 1) before a job starts, and take it back when `start` has \
         returned; or grant CAP_DAC_READ_SEARCH",
    ))
}

/// The remedy for a call and its error number.
fn remedy(call: Call, errno: Errno) -> &'static str {
    match (call, errno.0) {
        (Call::Protect | Call::Map | Call::Exchange | Call::Advise, libc::ENOMEM) => {
            "raise vm.max_map_count (sysctl -w vm.max_map_count=262144) or RLIMIT_AS (ulimit -v): the \
             process probably has as many mappings or as much address space as it may; or free huge \
             pages, if others have reserved those that were free"
        }
        (Call::Populate, libc::EINVAL) => {
            "use a newer kernel: MADV_POPULATE_WRITE came with Linux 5.14"
        }
        (Call::Populate, libc::EFAULT | libc::ENOMEM) => {
            "make the pool smaller, or free memory: the node, the memory cgroup or, with \
             vm.overcommit_memory=2, CommitLimit ran out of pages"
        }
        (Call::Reserve | Call::Vacate | Call::Release, libc::ENOMEM) => {
            "free memory, raise RLIMIT_AS, or raise vm.max_map_count (sysctl -w vm.max_map_count=262144)"
        }
        (Call::CreateFile, libc::EFBIG) => {
            "raise RLIMIT_FSIZE (ulimit -f), which also limits memory files"
        }
        (Call::Reserve | Call::Map, libc::EAGAIN) => {
            "raise RLIMIT_MEMLOCK (ulimit -l) or grant CAP_IPC_LOCK: after mlockall(MCL_FUTURE) each \
             mapping counts against it, at least for a moment"
        }
        (Call::Lock, _) => "raise RLIMIT_MEMLOCK (ulimit -l) or grant CAP_IPC_LOCK",
        (_, libc::EPERM | libc::ENOSYS | libc::EACCES) => {
            "allow the call in the seccomp profile, or grant CAP_SYS_NICE (in a container: docker run \
             --cap-add SYS_NICE)"
        }
        (Call::CreateFile, libc::EMFILE | libc::ENFILE) => {
            "raise the limit of open files (ulimit -n)"
        }
        (_, libc::ENOMEM) => "free memory or raise RLIMIT_AS",
        _ => "no remedy is known: please report the error with the version of the kernel",
    }
}

impl FromStr for PageSize {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s.to_ascii_lowercase().as_str() {
            "4k" => Ok(PageSize::Base),
            "thp" => Ok(PageSize::Thp),
            "2m" => Ok(PageSize::Huge2M),
            "1g" => Ok(PageSize::Huge1G),
            _ => Err(Error::BadArgument {
                what: "page size",
                reason: format!("`{s}` is not a page size"),
                remedy: "use 4k, thp, 2m or 1g".into(),
            }),
        }
    }
}
