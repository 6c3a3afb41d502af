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

/// Lets a thread run on these CPUs only (`sched_setaffinity(2)`, Linux 2.5.8); 0 is the calling
/// thread. Threads and processes that it starts inherit this, and `execve(2)` keeps it.
///
/// The kernel drops CPUs that are offline or outside the cpuset without saying so: [`affinity`]
/// tells which are left.
///
/// # Errors
/// EINVAL: none of the CPUs is online and allowed by the cpuset. ESRCH: there is no such thread.
/// EPERM: the thread belongs to another user; EPERM or ENOSYS: a seccomp filter refuses the call.
pub fn set_affinity(thread: i32, cpus: &[usize]) -> Result<(), Errno> {
    let words = cpus.iter().max().map_or(1, |most| most / BITS + 1);
    let mut mask = vec![0 as libc::c_ulong; words];
    for cpu in cpus {
        mask[cpu / BITS] |= 1 << (cpu % BITS);
    }
    let bytes = words * size_of::<libc::c_ulong>();
    // SAFETY: the call reads the number of bytes that it gets.
    check(unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, bytes, mask.as_ptr()) })
        .map(drop)
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
