//! The calls by which settings reach the kernel.

use pageleap_sys::{Errno, ThreadPolicy, Trial, call_apart};

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
    /// filters end the caller: then it counts as refused.
    fn make(call: &dyn Fn() -> Result<(), Errno>) -> Result<(), Errno> {
        if pageleap_sys::has_seccomp_filter().unwrap_or(false) {
            // SAFETY: each of the calls below makes one system call with arguments that were made
            // beforehand.
            let trial = unsafe { call_apart(&|| call().map(|()| 0)) };
            match trial {
                Ok(Trial::Killed(_)) => return Err(Errno(libc::EPERM)),
                Ok(Trial::Returned(result)) => result.map(drop)?,
                // No process can be made; then nothing can be started either.
                Err(errno) => return Err(errno),
            }
        }
        call()
    }
}

impl Calls for ThisThread {
    fn set_policy(&mut self, policy: &MemoryPolicy) -> Result<(), Errno> {
        let policy = policy.for_kernel()?;
        ThisThread::make(&|| policy.set())
    }

    fn policy(&self) -> Result<Option<MemoryPolicy>, Errno> {
        ThreadPolicy::own().map(|policy| MemoryPolicy::from_kernel(&policy))
    }

    fn set_cpus(&mut self, cpus: &[usize]) -> Result<(), Errno> {
        // Programs commonly make this call: no known filter ends its caller.
        pageleap_sys::set_affinity(0, cpus)
    }

    fn cpus(&self) -> Result<Vec<usize>, Errno> {
        pageleap_sys::affinity(0)
    }

    fn set_thp_disabled(&mut self, is_disabled: bool) -> Result<(), Errno> {
        pageleap_sys::set_thp_disabled(is_disabled)
    }
}
