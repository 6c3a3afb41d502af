//! The CPUs on which threads may run (`sched_setaffinity(2)`), for machines of any size.

use crate::errno::{Errno, check};

const BITS: usize = libc::c_ulong::BITS as usize;
/// CPUs that the first mask has; also the kernel's number on most distributions.
const FIRST_CPUS: usize = 8192;
/// CPUs of the largest mask that is tried. Linux knows at most 8192 (`CONFIG_NR_CPUS`), or 16384 on
/// some architectures.
const MOST_CPUS: usize = 1 << 17;

/// The CPUs on which a thread may run, in ascending order (`sched_getaffinity(2)`, Linux 2.5.8); 0
/// is the calling thread.
///
/// # Errors
/// ESRCH: there is no such thread. ENOSYS or EPERM: a seccomp filter refuses the call.
pub fn affinity(thread: i32) -> Result<Vec<usize>, Errno> {
    let mut cpus = FIRST_CPUS;
    loop {
        let mut mask = vec![0 as libc::c_ulong; cpus / BITS];
        let bytes = mask.len() * size_of::<libc::c_ulong>();
        // SAFETY: the call writes at most the number of bytes that it gets.
        let got = check(unsafe {
            libc::syscall(libc::SYS_sched_getaffinity, thread, bytes, mask.as_mut_ptr())
        });
        match got {
            Ok(_) => {
                let is_in = |cpu: &usize| mask[cpu / BITS] >> (cpu % BITS) & 1 == 1;
                return Ok((0..cpus).filter(is_in).collect());
            }
            // The kernel's mask has more CPUs than this one.
            Err(Errno(libc::EINVAL)) if cpus < MOST_CPUS => cpus *= 2,
            Err(errno) => return Err(errno),
        }
    }
}

/// Lets a thread run on these CPUs only: [`CpuMask::set`].
///
/// # Errors
/// As for [`CpuMask::set`].
pub fn set_affinity(thread: i32, cpus: &[usize]) -> Result<(), Errno> {
    CpuMask::of(cpus).set(thread)
}

/// CPUs in the form that the kernel takes.
#[derive(Clone, Debug)]
pub struct CpuMask(Vec<libc::c_ulong>);

impl CpuMask {
    /// The mask of these CPUs.
    pub fn of(cpus: &[usize]) -> CpuMask {
        let mut mask = vec![0; cpus.iter().max().map_or(1, |most| most / BITS + 1)];
        for cpu in cpus {
            mask[cpu / BITS] |= 1 << (cpu % BITS);
        }
        CpuMask(mask)
    }

    /// Lets a thread run on these CPUs only (`sched_setaffinity(2)`, Linux 2.5.8); 0 is the calling
    /// thread. Threads and processes that it starts inherit this, and `execve(2)` keeps it.
    /// Allocates nothing.
    ///
    /// The kernel drops CPUs that are offline or outside the cpuset without saying so: [`affinity`]
    /// tells which are left.
    ///
    /// # Errors
    /// EINVAL: none of the CPUs is online and allowed by the cpuset. ESRCH: there is no such thread.
    /// EPERM: the thread belongs to another user; EPERM or ENOSYS: a seccomp filter refuses the
    /// call.
    pub fn set(&self, thread: i32) -> Result<(), Errno> {
        let bytes = self.0.len() * size_of::<libc::c_ulong>();
        // SAFETY: the call reads the number of bytes that it gets.
        let set =
            unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, bytes, self.0.as_ptr()) };
        check(set).map(drop)
    }
}

/// Makes the call of [`affinity`] without a mask, to find out whether a seccomp filter ends its
/// caller. Allocates nothing.
///
/// # Errors
/// EINVAL if no filter refuses the call.
pub fn try_affinity() -> Result<usize, Errno> {
    // SAFETY: the call writes no bytes.
    check(unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, 0, 0, std::ptr::null_mut::<libc::c_ulong>())
    })
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_runs_where_it_is_told() {
        let test = || {
            let before = affinity(0).unwrap();
            let last = *before.last().unwrap();
            set_affinity(0, &[last]).unwrap();
            assert_eq!(affinity(0), Ok(vec![last]));
            // Dropped in silence: no machine has this CPU.
            set_affinity(0, &[before[0], 8000]).unwrap();
            assert_eq!(affinity(0), Ok(vec![before[0]]));
            assert_eq!(set_affinity(0, &[8000]), Err(Errno(libc::EINVAL)));
            assert_eq!(set_affinity(0, &[]), Err(Errno(libc::EINVAL)));
            set_affinity(0, &before).unwrap();
            assert_eq!(affinity(0), Ok(before));
        };
        // An affinity belongs to a thread.
        std::thread::spawn(test).join().unwrap();
    }
}
