//! What the kernel says about this process: its privileges, filters, limits and memory policy.

use crate::errno::{Errno, check};

/// Bit numbers of capabilities (`include/uapi/linux/capability.h`) that matter here.
pub mod capability {
    /// Locking memory beyond RLIMIT_MEMLOCK.
    pub const IPC_LOCK: u32 = 14;
    /// Looking into other processes; userfaultfd for faults of the kernel.
    pub const SYS_PTRACE: u32 = 19;
    /// Frame numbers in pagemap, and very much else.
    pub const SYS_ADMIN: u32 = 21;
}

/// The calling thread's effective capabilities, as a mask of [`capability`] bits (`capget(2)`).
pub fn effective_capabilities() -> Result<u64, Errno> {
    /// `_LINUX_CAPABILITY_VERSION_3`: 64 capabilities in two parts.
    const VERSION: u32 = 0x2008_0522;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let mut header = Header { version: VERSION, pid: 0 };
    let mut data = [Data::default(); 2];
    // SAFETY: the call reads and writes the header, and writes two parts; all outlive it.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    Ok(u64::from(data[1].effective) << 32 | u64::from(data[0].effective))
}

/// Whether a seccomp filter applies to the calling thread (`prctl(PR_GET_SECCOMP)`); EINVAL on
/// kernels without seccomp.
pub fn has_seccomp_filter() -> Result<bool, Errno> {
    // SAFETY: the call takes no pointer.
    check(unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) }.into()).map(|mode| mode != 0)
}

/// Whether transparent huge pages are switched off for this process (`prctl(PR_GET_THP_DISABLE)`,
/// Linux 3.15).
pub fn thp_disabled() -> Result<bool, Errno> {
    // SAFETY: the call takes no pointer.
    check(unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) }.into()).map(|mode| mode != 0)
}

/// A resource limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of address space.
    AddressSpace,
    /// Bytes locked into memory.
    LockedMemory,
    /// Bytes of one file, memory files included.
    FileSize,
    /// Microseconds that a thread may run under a real-time policy without a blocking call.
    RealTime,
}

/// A resource limit; `None` for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceLimit {
    /// The one that applies.
    pub soft: Option<u64>,
    /// How far the process may raise it itself.
    pub hard: Option<u64>,
}

/// The limits of this process (`getrlimit(2)`).
pub fn resource_limit(resource: Resource) -> Result<ResourceLimit, Errno> {
    let resource = match resource {
        Resource::AddressSpace => libc::RLIMIT_AS,
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::FileSize => libc::RLIMIT_FSIZE,
        Resource::RealTime => libc::RLIMIT_RTTIME,
    };
    // SAFETY: writes one struct, for which zeros are a value.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        check(libc::getrlimit(resource, &mut limit).into())?;
        let known = |bytes: libc::rlim_t| (bytes != libc::RLIM_INFINITY).then_some(bytes);
        Ok(ResourceLimit { soft: known(limit.rlim_cur), hard: known(limit.rlim_max) })
    }
}

/// The kernel's release as `uname -r` prints it.
pub fn kernel_release() -> Result<String, Errno> {
    // SAFETY: writes one struct, for which zeros are a value; the field ends with a zero byte.
    unsafe {
        let mut names: libc::utsname = std::mem::zeroed();
        check(libc::uname(&mut names).into())?;
        Ok(std::ffi::CStr::from_ptr(names.release.as_ptr()).to_string_lossy().into_owned())
    }
}

/// The mode of the calling thread's memory policy (`get_mempolicy(2)`).
pub fn policy_mode() -> Result<i32, Errno> {
    let mut mode: libc::c_int = 0;
    let none = std::ptr::null_mut::<libc::c_ulong>();
    // SAFETY: writes one number; without a mask and an address nothing else is touched.
    check(unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) })?;
    Ok(mode)
}

/// CPU time that the calling thread has used so far, in nanoseconds (`CLOCK_THREAD_CPUTIME_ID`).
pub fn thread_cpu_time_ns() -> Result<u64, Errno> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one struct.
    check(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }.into())?;
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Whether the calling thread runs under the ordinary policy (`SCHED_OTHER`), as most do.
pub fn is_ordinary() -> bool {
    // SAFETY: the call touches no memory.
    unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK == libc::SCHED_OTHER }
}

/// Puts the calling thread before all ordinary ones (`SCHED_FIFO`, lowest priority), or back among
/// them. Children and new threads do not inherit it. EPERM without CAP_SYS_NICE or an RLIMIT_RTPRIO
/// above 0.
pub fn run_first(first: bool) -> Result<(), Errno> {
    // The flag stays: to take it away needs CAP_SYS_NICE, even where RLIMIT_RTPRIO allows the rest.
    let policy =
        if first { libc::SCHED_FIFO } else { libc::SCHED_OTHER } | libc::SCHED_RESET_ON_FORK;
    // SAFETY: all zero bytes are a priority; the C library may have more fields in the struct than
    // the one that counts.
    let mut priority: libc::sched_param = unsafe { std::mem::zeroed() };
    priority.sched_priority = i32::from(first);
    // SAFETY: reads the struct, which outlives the call.
    check(unsafe { libc::sched_setscheduler(0, policy, &priority) }.into()).map(drop)
}

/// Has the scheduler give the calling, ordinary thread the CPU for 0.1 ms at a time: in exchange it
/// is let in sooner when it wakes (Linux 6.12; before that nothing changes). It gets no more time
/// than others. Needs no privilege.
pub fn run_shortly() -> Result<(), Errno> {
    /// `struct sched_attr` of `include/uapi/linux/sched/types.h`, first version.
    #[repr(C)]
    #[derive(Default)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let mut attr = SchedAttr { size: size_of::<SchedAttr>() as u32, ..SchedAttr::default() };
    // SAFETY: both calls read or write one struct of the size that they are told.
    unsafe {
        check(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, attr.size, 0))?;
        attr.runtime = 100_000;
        check(libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0)).map(drop)
    }
}
