//! The calls by which settings reach the kernel.

use pageleap_sys::{CpuMask, Errno, ThreadPolicy, Trial, call_apart};

use crate::policy::MemoryPolicy;

/// The system calls that [`apply`](crate::apply) makes. Tests have a kernel of their own.
pub trait Calls {
    /// Gives the thread this memory policy (`set_mempolicy(2)`).
    ///
    /// # Errors
    /// The kernel's error number.
    fn set_policy(&mut self, policy: &MemoryPolicy) -> Result<(), Errno>;

    /// The memory policy of the thread (`get_mempolicy(2)`); `None` for one that [`MemoryPolicy`]
    /// does not know.
    ///
    /// # Errors
    /// The kernel's error number.
    fn policy(&self) -> Result<Option<MemoryPolicy>, Errno>;

    /// Lets the thread run on these CPUs only (`sched_setaffinity(2)`).
    ///
    /// # Errors
    /// The kernel's error number.
    fn set_cpus(&mut self, cpus: &[usize]) -> Result<(), Errno>;

    /// The CPUs on which the thread may run (`sched_getaffinity(2)`).
    ///
    /// # Errors
    /// The kernel's error number.
    fn cpus(&self) -> Result<Vec<usize>, Errno>;

    /// Switches transparent huge pages off for the process, or lets the system's setting apply
    /// again (`prctl(2)` with PR_SET_THP_DISABLE).
    ///
    /// # Errors
    /// The kernel's error number.
    fn set_thp_disabled(&mut self, is_disabled: bool) -> Result<(), Errno>;
}

/// The thread that makes the calls, which is to become the program.
#[derive(Clone, Copy, Debug)]
pub struct ThisThread;

impl ThisThread {
    /// Makes a call. If a seccomp filter applies, it is first tried in a process apart, because some
    /// filters end the caller: then it counts as refused. So does every error but that of wrong
    /// arguments, because a filter may return any number.
    ///
    /// # Safety
    /// `call` makes system calls and nothing else.
    unsafe fn make(call: &dyn Fn() -> Result<(), Errno>) -> Result<(), Errno> {
        if !pageleap_sys::has_seccomp_filter().unwrap_or(false) {
            return call();
        }
        // SAFETY: forwarded to the caller.
        match unsafe { call_apart(&|| call().map(|()| 0)) } {
            Ok(Trial::Killed(_)) => Err(Errno(libc::EPERM)),
            Ok(Trial::Returned(Err(errno))) if errno.0 != libc::EINVAL => Err(Errno(libc::EPERM)),
            Ok(Trial::Returned(Err(errno))) => Err(errno),
            // Without a trial the call itself has to tell. No process is needed to go on.
            Ok(Trial::Returned(Ok(_))) | Err(_) => call(),
        }
    }
}

impl Calls for ThisThread {
    fn set_policy(&mut self, policy: &MemoryPolicy) -> Result<(), Errno> {
        let policy = policy.for_kernel()?;
        // SAFETY: one system call.
        unsafe { ThisThread::make(&|| policy.set()) }
    }

    fn policy(&self) -> Result<Option<MemoryPolicy>, Errno> {
        // SAFETY: one system call.
        unsafe { ThisThread::make(&|| ThreadPolicy::own().map(drop)) }?;
        ThreadPolicy::own().map(|policy| MemoryPolicy::from_kernel(&policy))
    }

    fn set_cpus(&mut self, cpus: &[usize]) -> Result<(), Errno> {
        let mask = CpuMask::of(cpus);
        // SAFETY: one system call.
        unsafe { ThisThread::make(&|| mask.set(0)) }
    }

    fn cpus(&self) -> Result<Vec<usize>, Errno> {
        // SAFETY: one system call. Without a mask it is refused for that reason.
        match unsafe { ThisThread::make(&|| pageleap_sys::try_affinity().map(drop)) } {
            Ok(()) | Err(Errno(libc::EINVAL)) => pageleap_sys::affinity(0),
            Err(errno) => Err(errno),
        }
    }

    fn set_thp_disabled(&mut self, is_disabled: bool) -> Result<(), Errno> {
        // SAFETY: one system call. The process apart shares its memory with this one, and so the
        // switch, which is to be set anyway.
        unsafe { ThisThread::make(&|| pageleap_sys::set_thp_disabled(is_disabled)) }
    }
}
