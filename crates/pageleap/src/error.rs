//! Errors that carry evidence: which call, which error number, which range, the likely reason, and
//! what to do.

use std::str::FromStr;

use pageleap_sys::Errno;

use crate::units::{AddressRange, Call, NodeId, PageSize, human_bytes};

/// Why something could not be done. Nothing is lost with any of them: each page of each region is
/// still readable and writable at its address.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument makes no sense; nothing was attempted.
    #[error("bad {what}: {reason}; {remedy}")]
    BadArgument {
        /// Which argument.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
        /// What to pass instead.
        remedy: String,
    },
    /// A byte range is not inside the region, not aligned to its pages, empty, or partly without
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
        /// What is wrong with it.
        reason: &'static str,
        /// What to pass instead.
        remedy: String,
    },
    /// The machine has no such node, or it is offline.
    #[error("there is no {node} here; the nodes with memory are {known}")]
    UnknownNode {
        /// The node that was asked for.
        node: NodeId,
        /// Those that there are.
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
    /// The kernel did not make pages of the size asked for.
    #[error("{range} on {node}: {} of {} are in {page} pages: {reason}; {remedy}", human_bytes(*.huge_bytes), human_bytes(.range.0.len() as u64))]
    NotHuge {
        /// The node.
        node: NodeId,
        /// The size asked for.
        page: PageSize,
        /// Where.
        range: AddressRange,
        /// How much of it is in such pages.
        huge_bytes: u64,
        /// Why, as far as the kernel says.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Another job works on part of the range.
    #[error(
        "bytes {start:#x}..{end:#x} of the region are in use by a running job or call, or named twice; wait for the job or cancel it first"
    )]
    RangeBusy {
        /// First byte of the range asked for, relative to the region.
        start: usize,
        /// One past its last byte.
        end: usize,
    },
    /// A guard keeps pages where they are.
    #[error(
        "{range} is kept in its frames by a guard; drop it once the I/O there has completed, and try again"
    )]
    Pinned {
        /// Which part.
        range: AddressRange,
    },
    /// The pool has fewer free frames than needed.
    #[error(
        "the pool on {node} has {} free of {}, and {} are needed; make the pool larger, discard what is no longer \
         used, or move less at once",
        human_bytes(*.free_bytes), human_bytes(*.pool_bytes), human_bytes(*.needed_bytes)
    )]
    PoolExhausted {
        /// The pool's node.
        node: NodeId,
        /// Free frames, in bytes.
        free_bytes: u64,
        /// All frames, in bytes.
        pool_bytes: u64,
        /// What the whole call needs of it.
        needed_bytes: u64,
    },
    /// The machine, the node or the memory cgroup has too little free memory.
    #[error(
        "{} more are needed on {node}, and {limit} leaves {}; {remedy}",
        human_bytes(*.needed_bytes), human_bytes(*.free_bytes)
    )]
    OutOfMemory {
        /// The node.
        node: NodeId,
        /// What was still to be taken.
        needed_bytes: u64,
        /// What is free under the limit that bites.
        free_bytes: u64,
        /// Which limit: the node, the machine, or a cgroup file.
        limit: String,
        /// What to do, as a command where one exists.
        remedy: String,
    },
    /// Pages are not where the pool was asked to put them.
    #[error("{misplaced} of {pages} pages of the pool are not on {node} ({found}); {remedy}")]
    Misplaced {
        /// The node that was asked for.
        node: NodeId,
        /// Pages elsewhere or not present.
        misplaced: u64,
        /// All pages.
        pages: u64,
        /// Counts per node, as the kernel reports them.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// An engine cannot work here.
    #[error("engine `{engine}` cannot be used: {reason}; {remedy}")]
    EngineRefused {
        /// Its name.
        engine: &'static str,
        /// Why.
        reason: String,
        /// What would make it work.
        remedy: String,
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
        /// What is likely to help.
        remedy: &'static str,
    },
    /// A file of `/proc` or `/sys` could not be read or made no sense.
    #[error("{path}: {reason}; {remedy}")]
    SystemFile {
        /// Which file.
        path: String,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The machine is not one that this library can work on.
    #[error("{what}; {remedy}")]
    Unsupported {
        /// What is missing or different.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A fixed limit of this library was reached.
    #[error("{what}: at most {limit} at a time, {in_use} in use, {needed} needed; {remedy}")]
    Limit {
        /// What ran out.
        what: &'static str,
        /// The limit.
        limit: usize,
        /// How many are in use.
        in_use: usize,
        /// How many more are needed.
        needed: usize,
        /// What to do.
        remedy: &'static str,
    },
}

impl Error {
    /// Whether the caller asked for something that makes no sense (as opposed to something that did
    /// not work).
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

    /// Describes a failed system call with the remedy that fits its error number.
    pub(crate) fn call(call: Call, addr: usize, len: usize, errno: Errno) -> Self {
        Error::Call {
            call,
            range: AddressRange::new(addr, len),
            errno,
            remedy: remedy(call, errno),
        }
    }
}

/// What is likely to help, by call and error number.
fn remedy(call: Call, errno: Errno) -> &'static str {
    match (call, errno.0) {
        (Call::Protect | Call::Map | Call::Exchange | Call::Advise, libc::ENOMEM) => {
            "the process probably has as many mappings as vm.max_map_count allows, or reached RLIMIT_AS: raise \
             vm.max_map_count (sysctl -w vm.max_map_count=262144) or the limit; with huge pages, others may have reserved those \
             that were free"
        }
        (Call::Populate, libc::EINVAL) => {
            "MADV_POPULATE_WRITE needs Linux 5.14: use a newer kernel"
        }
        (Call::Populate, libc::EFAULT | libc::ENOMEM) => {
            "the node, the memory cgroup or, with vm.overcommit_memory=2, CommitLimit ran out of pages: make the pool smaller or free memory"
        }
        (Call::Reserve | Call::Vacate | Call::Release, libc::ENOMEM) => {
            "free memory, raise RLIMIT_AS, or raise vm.max_map_count (sysctl -w vm.max_map_count=262144)"
        }
        (Call::CreateFile, libc::EFBIG) => {
            "raise RLIMIT_FSIZE (ulimit -f), which also limits memory files"
        }
        (Call::Lock, _) => "raise RLIMIT_MEMLOCK (ulimit -l) or grant CAP_IPC_LOCK",
        (_, libc::EPERM | libc::ENOSYS | libc::EACCES) => {
            "a seccomp filter or a missing capability refuses the call (in a container: allow it, or grant CAP_SYS_NICE)"
        }
        (Call::CreateFile, libc::EMFILE | libc::ENFILE) => {
            "raise the limit of open files (ulimit -n)"
        }
        (_, libc::ENOMEM) => "free memory or raise RLIMIT_AS",
        _ => "this is unexpected: please report it with the kernel version",
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
                reason: format!("`{s}` is none"),
                remedy: "use 4k, thp, 2m or 1g".into(),
            }),
        }
    }
}
