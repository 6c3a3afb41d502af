//! Properties of this process and its threads: privileges, seccomp filters, resource limits, memory
//! policy and scheduling.

use std::ops::Range;
use std::slice;

use crate::errno::{Errno, check};
use crate::mempolicy::MAX_NODES;

/// Numbers of the capabilities that matter here (`include/uapi/linux/capability.h`). They are bit
/// numbers of the mask that [`effective_capabilities`] returns.
pub mod capability {
    /// Lock memory beyond RLIMIT_MEMLOCK.
    pub const IPC_LOCK: u32 = 14;
    /// Inspect other processes. Let userfaultfd handle faults of the kernel.
    pub const SYS_PTRACE: u32 = 19;
    /// Move pages that several processes map; change memory policies and priorities.
    pub const SYS_NICE: u32 = 23;
    /// Read frame numbers in pagemap, and very much else.
    pub const SYS_ADMIN: u32 = 21;
}

/// The effective capabilities of the calling thread, as a mask (`capget(2)`). Bit N is capability
/// number N, see [`capability`].
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call. Without such a filter the call cannot fail.
pub fn effective_capabilities() -> Result<u64, Errno> {
    /// `_LINUX_CAPABILITY_VERSION_3` (Linux 2.6.26): 64 capabilities in two parts.
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
    // SAFETY: the call reads and writes the header, and writes the two parts. Both outlive the
    // call.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    Ok(u64::from(data[1].effective) << 32 | u64::from(data[0].effective))
}

/// Whether a seccomp filter applies to the calling thread (`PR_GET_SECCOMP` of `prctl(2)`, Linux
/// 2.6.23).
///
/// # Errors
/// EINVAL: the kernel has no seccomp.
pub fn has_seccomp_filter() -> Result<bool, Errno> {
    // SAFETY: the call takes no pointers.
    check(unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) }.into()).map(|mode| mode != 0)
}

/// Whether transparent huge pages are switched off for this process (`PR_GET_THP_DISABLE` of
/// `prctl(2)`, Linux 3.15).
///
/// # Errors
/// EINVAL: the kernel is older.
pub fn thp_disabled() -> Result<bool, Errno> {
    // SAFETY: the call takes no pointers.
    check(unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) }.into()).map(|mode| mode != 0)
}

/// Switches transparent huge pages off for this process, or lets the system's setting apply again
/// (`PR_SET_THP_DISABLE` of `prctl(2)`, Linux 3.15). Children inherit the setting, and `execve(2)`
/// keeps it.
///
/// # Errors
/// EINVAL: the kernel is older. ENOSYS or EPERM: a seccomp filter refuses the call.
pub fn set_thp_disabled(is_disabled: bool) -> Result<(), Errno> {
    let flag = libc::c_ulong::from(is_disabled);
    // SAFETY: the call takes no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, flag, 0, 0, 0) }.into()).map(drop)
}

/// A kind of resource limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of address space (RLIMIT_AS).
    AddressSpace,
    /// Bytes locked into memory (RLIMIT_MEMLOCK).
    LockedMemory,
    /// Bytes of one file, memory files included (RLIMIT_FSIZE).
    FileSize,
    /// One more than the largest number of a descriptor (RLIMIT_NOFILE).
    OpenFiles,
    /// Microseconds that a thread may run under a real-time policy without a blocking system call
    /// (RLIMIT_RTTIME, Linux 2.6.25).
    RealTime,
}

/// The two values of a resource limit. `None` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceLimit {
    /// The limit that applies.
    pub soft: Option<u64>,
    /// The value to which the process itself may raise the soft limit.
    pub hard: Option<u64>,
}

/// The limits of this process for one resource (`getrlimit(2)`). Allocates nothing.
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call. Without such a filter the call cannot fail.
pub fn resource_limit(resource: Resource) -> Result<ResourceLimit, Errno> {
    let resource = match resource {
        Resource::AddressSpace => libc::RLIMIT_AS,
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::FileSize => libc::RLIMIT_FSIZE,
        Resource::OpenFiles => libc::RLIMIT_NOFILE,
        Resource::RealTime => libc::RLIMIT_RTTIME,
    };
    // SAFETY: the call writes one struct, for which zeros are a valid value.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        check(libc::getrlimit(resource, &mut limit).into())?;
        let known = |bytes: libc::rlim_t| (bytes != libc::RLIM_INFINITY).then_some(bytes);
        Ok(ResourceLimit { soft: known(limit.rlim_cur), hard: known(limit.rlim_max) })
    }
}

/// The release of the running kernel (`uname(2)`), as `uname -r` prints it.
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call. Without such a filter the call cannot fail.
pub fn kernel_release() -> Result<String, Errno> {
    // SAFETY: the call writes one struct, for which zeros are a valid value. The kernel ends the
    // field with a zero byte.
    unsafe {
        let mut names: libc::utsname = std::mem::zeroed();
        check(libc::uname(&mut names).into())?;
        Ok(std::ffi::CStr::from_ptr(names.release.as_ptr()).to_string_lossy().into_owned())
    }
}

/// The mode of the calling thread's memory policy, an `MPOL_*` number (`get_mempolicy(2)`, Linux
/// 2.6.7).
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call, or the kernel has no memory policies.
pub fn policy_mode() -> Result<i32, Errno> {
    let mut mode: libc::c_int = 0;
    let none = std::ptr::null_mut::<libc::c_ulong>();
    // SAFETY: the call writes one number. Mask and address are null, so it touches nothing else.
    check(unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) })?;
    Ok(mode)
}

/// Whether the cpuset of the calling thread contains a node at this moment (`get_mempolicy(2)` with
/// MPOL_F_MEMS_ALLOWED, Linux 2.6.24). The answer is that of `Mems_allowed` in
/// `/proc/thread-self/status`, for the price of one system call.
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call, or the kernel has no memory policies. EINVAL:
/// the kernel is built for more than [`MAX_NODES`] nodes.
pub fn is_node_allowed(node: u32) -> Result<bool, Errno> {
    const BITS: usize = libc::c_ulong::BITS as usize;
    /// `include/uapi/linux/mempolicy.h`.
    const MPOL_F_MEMS_ALLOWED: libc::c_ulong = 4;
    let mut mask = [0 as libc::c_ulong; MAX_NODES.div_ceil(BITS)];
    let (none, nowhere) = (std::ptr::null_mut::<libc::c_int>(), 0 as libc::c_ulong);
    let (words, bits) = (mask.as_mut_ptr(), (mask.len() * BITS) as libc::c_ulong);
    // SAFETY: the call writes at most the number of bits that it gets, which is that of the mask.
    // Mode and address are null.
    check(unsafe {
        libc::syscall(libc::SYS_get_mempolicy, none, words, bits, nowhere, MPOL_F_MEMS_ALLOWED)
    })?;
    let node = node as usize;
    Ok(mask.get(node / BITS).is_some_and(|word| word >> (node % BITS) & 1 == 1))
}

/// The CPU time that the calling thread has used, in nanoseconds (CLOCK_THREAD_CPUTIME_ID of
/// `clock_gettime(2)`, Linux 2.6.12).
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses the call. Without such a filter the call cannot fail.
pub fn thread_cpu_time_ns() -> Result<u64, Errno> {
    cpu_time_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The id of the clock through which other threads read the calling thread's CPU time
/// (`pthread_getcpuclockid(3)`), for [`cpu_time_ns`].
pub fn own_cpu_clock() -> libc::clockid_t {
    let mut clock = libc::CLOCK_THREAD_CPUTIME_ID;
    // SAFETY: the call writes one number. It cannot fail for the calling thread.
    unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    clock
}

/// Reads a clock of CPU time, in nanoseconds.
///
/// # Errors
/// EINVAL: the thread of the clock has ended. ENOSYS or EPERM: a seccomp filter refuses the call.
pub fn cpu_time_ns(clock: libc::clockid_t) -> Result<u64, Errno> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one struct, which outlives it.
    check(unsafe { libc::clock_gettime(clock, &mut time) }.into())?;
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The CPU time that all threads of this process have used, and its children that have ended and
/// were waited for, in nanoseconds (CLOCK_PROCESS_CPUTIME_ID, and RUSAGE_CHILDREN of
/// `getrusage(2)`).
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses one of the calls.
pub fn process_cpu_time_ns() -> Result<u64, Errno> {
    let own_ns = cpu_time_ns(libc::CLOCK_PROCESS_CPUTIME_ID)?;
    // SAFETY: the struct is plain data, for which zeros are a valid value.
    let mut children: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one struct, which outlives it.
    check(unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut children) }.into())?;
    let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1_000;
    Ok(own_ns + ns(children.ru_utime) + ns(children.ru_stime))
}

/// The clock ticks per second in which files of `/proc` give CPU time (USER_HZ, `sysconf(3)` with
/// `_SC_CLK_TCK`). `None` if the C library does not know it.
pub fn clock_ticks_per_s() -> Option<u64> {
    // SAFETY: the call takes no pointers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).ok().filter(|ticks| *ticks > 0)
}

/// The addresses of the static variables of the program and its libraries: their writable segments
/// (`dl_iterate_phdr(3)`).
pub fn static_memory() -> Vec<Range<usize>> {
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        found: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: the C library passes a valid structure, and the vector of the caller.
        let (info, found) = unsafe { (&*info, &mut *found.cast::<Vec<Range<usize>>>()) };
        // SAFETY: the structure has this many headers.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize) };
        let loaded = |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD;
        for header in headers.iter().filter(loaded).filter(|h| h.p_flags & libc::PF_W != 0) {
            let start = (info.dlpi_addr + header.p_vaddr) as usize;
            found.push(start..start + header.p_memsz as usize);
        }
        0
    }
    let mut found: Vec<Range<usize>> = Vec::new();
    // SAFETY: the function gets the vector, and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut found).cast()) };
    found
}

/// How a thread is scheduled: its policy (`SCHED_*`) and its nice value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// Without SCHED_RESET_ON_FORK.
    pub policy: i32,
    /// For threads with a real-time policy the kernel keeps it for later.
    pub nice: i32,
    /// Whether threads and processes that the thread starts get ordinary scheduling
    /// (SCHED_RESET_ON_FORK). Without CAP_SYS_NICE the flag cannot be cleared, even where
    /// RLIMIT_RTPRIO allows the rest.
    pub resets_on_fork: bool,
}

impl Scheduling {
    /// The default scheduling of threads (SCHED_OTHER, nice 0), but with
    /// [`Scheduling::resets_on_fork`].
    pub const ORDINARY: Scheduling =
        Scheduling { policy: libc::SCHED_OTHER, nice: 0, resets_on_fork: true };

    /// SCHED_FIFO with its lowest priority: runs before all threads that are not real-time.
    pub const fn first(self) -> Scheduling {
        Scheduling { policy: libc::SCHED_FIFO, ..self }
    }

    /// Whether it is SCHED_FIFO.
    pub const fn is_first(self) -> bool {
        self.policy == libc::SCHED_FIFO
    }

    /// Whether it is no real-time policy: SCHED_OTHER, SCHED_BATCH or SCHED_IDLE.
    pub const fn is_fair(self) -> bool {
        matches!(self.policy, libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE)
    }

    /// Whether ordinary threads run before such a thread, or longer. (SCHED_BATCH waits longer for
    /// a CPU after a wake-up.)
    pub const fn is_low(self) -> bool {
        self.is_fair() && (self.policy != libc::SCHED_OTHER || self.nice > 0)
    }
}

/// How the calling thread is scheduled (`sched_getscheduler(2)`, `getpriority(2)`).
///
/// # Errors
/// EPERM or ENOSYS: a seccomp filter refuses one of the calls.
pub fn scheduling() -> Result<Scheduling, Errno> {
    // SAFETY: the calls take no pointers.
    let (policy, inverse) = unsafe {
        let policy = check(libc::sched_getscheduler(0).into())?;
        // The system call returns 20 - nice, which is never negative.
        (policy, check(libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, 0))?)
    };
    let resets_on_fork = policy as i32 & libc::SCHED_RESET_ON_FORK != 0;
    let policy = policy as i32 & !libc::SCHED_RESET_ON_FORK;
    Ok(Scheduling { policy, nice: 20 - inverse as i32, resets_on_fork })
}

/// Changes the scheduling of the calling thread from `from` to `to` (`sched_setscheduler(2)`,
/// `setpriority(2)`).
///
/// # Errors
/// EPERM: the process has neither CAP_SYS_NICE nor a sufficient RLIMIT_RTPRIO or RLIMIT_NICE. Then
/// nothing has changed.
pub fn reschedule(from: Scheduling, to: Scheduling) -> Result<(), Errno> {
    if from.policy != to.policy {
        set_policy(to)?;
    }
    if from.nice != to.nice {
        // SAFETY: the call takes no pointers. On Linux the number 0 is the calling thread.
        let set = check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, to.nice) }.into());
        if let Err(errno) = set {
            if from.policy != to.policy {
                let _ = set_policy(from);
            }
            return Err(errno);
        }
    }
    Ok(())
}

fn set_policy(to: Scheduling) -> Result<(), Errno> {
    let policy = to.policy | if to.resets_on_fork { libc::SCHED_RESET_ON_FORK } else { 0 };
    // SAFETY: the struct consists of integers. Some C libraries have fields in it besides the
    // priority.
    let mut priority: libc::sched_param = unsafe { std::mem::zeroed() };
    priority.sched_priority = i32::from(to.is_first());
    // SAFETY: the call reads the struct, which outlives it.
    check(unsafe { libc::sched_setscheduler(0, policy, &priority) }.into()).map(drop)
}

/// Asks for time slices of 0.1 ms for the calling thread, which must be an ordinary one
/// (`sched_setattr(2)`, Linux 3.14).
///
/// In exchange the scheduler runs the thread sooner after a wake-up. That holds since Linux 6.12;
/// older kernels accept the call without an effect. The thread gets no larger share of the CPU. No
/// privilege is needed.
///
/// # Errors
/// ENOSYS or EPERM: a seccomp filter refuses one of the calls.
pub fn run_shortly() -> Result<(), Errno> {
    /// `struct sched_attr` of `include/uapi/linux/sched/types.h`, first version. Times are in
    /// nanoseconds.
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
    // SAFETY: each call reads or writes one struct, of the size that it gets.
    unsafe {
        check(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, attr.size, 0))?;
        attr.runtime = 100_000;
        check(libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0)).map(drop)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_the_process_is_that_of_its_threads_and_of_children() {
        let own_ns = || cpu_time_ns(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap();
        let (own_before_ns, before_ns) = (own_ns(), process_cpu_time_ns().unwrap());
        let spin =
            || std::iter::repeat_with(|| thread_cpu_time_ns().unwrap()).find(|ns| *ns > 5_000_000);
        let spun_ns = std::thread::spawn(spin).join().unwrap().unwrap();
        assert!(process_cpu_time_ns().unwrap() - before_ns >= spun_ns);
        let count = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        let child = std::process::Command::new("sh").args(["-c", count]).status();
        assert!(child.unwrap().success());
        // The clock of the process is read first at the start and last at the end. It covers more
        // than the sum, except for the child.
        let rise_ns = process_cpu_time_ns().unwrap() - before_ns;
        assert!(rise_ns > own_ns() - own_before_ns, "{rise_ns}");
    }

    #[test]
    fn proc_counts_in_at_least_a_hundred_ticks_per_second() {
        assert!(clock_ticks_per_s().is_some_and(|ticks| ticks >= 100));
    }
}
