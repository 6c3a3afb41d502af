//! Trying a system call in a process of its own. Everything that the call changes in that process
//! (policies, descriptors) ends with it. A seccomp filter that kills the caller kills only that
//! process.

use crate::errno::{Errno, check};
use crate::threads::{all_signals, with_signal_mask};
use std::mem::MaybeUninit;

/// Bytes of the stack of the trial's process. System calls need little.
const STACK: usize = 64 << 10;

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// The trial returned this result.
    Returned(Result<usize, Errno>),
    /// This signal ended the trial's process. A seccomp filter kills with 31 (SIGSYS).
    Killed(i32),
}

/// Runs `trial` in a new process that shares the memory of this one and nothing else (`clone(2)`
/// with CLONE_VM and CLONE_VFORK). The calling thread waits until the process has ended.
///
/// The rest of the program does not notice that process: it sends no SIGCHLD, and `wait(2)` without
/// `__WALL` does not see it.
///
/// # Errors
/// EAGAIN: no process can be made, because of `pids.max` or `ulimit -u`. ENOMEM: no memory for a
/// process. Errors of `trial` itself are in [`Trial::Returned`].
///
/// # Safety
/// `trial` only makes system calls. It allocates nothing, takes no lock, does not panic, and
/// changes no memory except its own stack.
pub unsafe fn call_apart(trial: &dyn Fn() -> Result<usize, Errno>) -> Result<Trial, Errno> {
    struct Job<'a> {
        trial: &'a dyn Fn() -> Result<usize, Errno>,
        returned: Option<Result<usize, Errno>>,
    }
    extern "C" fn run(job: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the job outlives this process, because the thread that owns the job is suspended
        // until this process ends.
        let job = unsafe { &mut *job.cast::<Job<'_>>() };
        job.returned = Some((job.trial)());
        // SAFETY: the call ends this process and runs no code of the program, such as `atexit`
        // functions.
        unsafe { libc::_exit(0) }
    }
    let mut job = Job { trial, returned: None };
    let mut stack: Box<[MaybeUninit<u128>]> = Box::new_uninit_slice(STACK / size_of::<u128>());
    // SAFETY: `clone` returns when the process has ended, or could not be made. The stack and the
    // job outlive it for that reason. All signals are blocked meanwhile, so that no handler of the
    // program runs in the process. `waitpid` reaps exactly this process.
    let ended = unsafe {
        with_signal_mask(&all_signals(), || {
            let top = stack.as_mut_ptr_range().end;
            let flags = libc::CLONE_VM | libc::CLONE_VFORK;
            let pid = check(libc::clone(run, top.cast(), flags, (&raw mut job).cast()).into())?;
            let mut status = 0;
            loop {
                match check(libc::waitpid(pid as libc::pid_t, &mut status, libc::__WALL).into()) {
                    Err(Errno(libc::EINTR)) => {}
                    other => return other.map(|_| status),
                }
            }
        })
    };
    let status = match ended {
        // The process has ended, but another thread that waits for any child has reaped it.
        Err(Errno(libc::ECHILD)) => 0,
        other => other?,
    };
    if libc::WIFSIGNALED(status) {
        return Ok(Trial::Killed(libc::WTERMSIG(status)));
    }
    // SAFETY: `job` is a variable of this function. The other process has written to it behind the
    // compiler's back, so the read must be volatile.
    let returned = unsafe { std::ptr::read_volatile(&raw const job.returned) };
    returned.map(Trial::Returned).ok_or(Errno(libc::ECHILD))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_trial_reports_its_result_or_the_signal_that_ended_it() {
        fn fine() -> Result<usize, Errno> {
            // SAFETY: the call takes no pointers.
            check(unsafe { libc::syscall(libc::SYS_getpid) })
        }
        fn refused() -> Result<usize, Errno> {
            // SAFETY: no file has descriptor -1, so nothing is closed.
            check(unsafe { libc::close(-1) }.into())
        }
        fn ended() -> Result<usize, Errno> {
            // SAFETY: the call ends only the process of the trial.
            check(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }.into())
        }
        // SAFETY: each trial makes only system calls.
        unsafe {
            let Trial::Returned(Ok(pid)) = call_apart(&fine).unwrap() else {
                panic!("the trial did not return")
            };
            assert_ne!(pid as u32, std::process::id());
            assert_eq!(call_apart(&refused), Ok(Trial::Returned(Err(Errno(libc::EBADF)))));
            assert_eq!(call_apart(&ended), Ok(Trial::Killed(libc::SIGKILL)));
        }
    }

    #[test]
    fn policies_and_descriptors_of_a_trial_end_with_it() {
        fn bind() -> Result<usize, Errno> {
            crate::prefer_node(Some(0)).map(|()| 0)
        }
        fn open() -> Result<usize, Errno> {
            // SAFETY: the call makes a descriptor and closes none.
            check(unsafe { libc::dup(2) }.into())
        }
        let before = crate::policy_mode();
        // SAFETY: each trial makes only system calls.
        let (bound, opened) = unsafe { (call_apart(&bind), call_apart(&open)) };
        assert!(matches!(bound, Ok(Trial::Returned(_))), "{bound:?}");
        assert_eq!(crate::policy_mode(), before);
        let Ok(Trial::Returned(Ok(fd))) = opened else { panic!("{opened:?}") };
        // SAFETY: the call only asks about a number.
        let flags = unsafe { libc::fcntl(fd as i32, libc::F_GETFD) };
        // Another test may have opened the same number meanwhile. Then the number is not a
        // duplicate of descriptor 2.
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        assert!(
            flags < 0 || link.ok() != std::fs::read_link("/proc/self/fd/2").ok(),
            "descriptor {fd} is still open"
        );
    }
}
