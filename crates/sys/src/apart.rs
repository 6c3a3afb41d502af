//! Trying a system call in a process of its own: what it changes there (policies, descriptors) ends
//! with it, and a filter that ends the caller ends only the trial.

use std::mem::MaybeUninit;

use crate::errno::{Errno, check};

/// Bytes of the trial's stack: system calls need little.
const STACK: usize = 64 << 10;

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// It returned.
    Returned(Result<usize, Errno>),
    /// This signal ended it: 31 (SIGSYS) is the seccomp filter's.
    Killed(i32),
}

/// Runs `trial` in a new process that shares this one's memory, and nothing else
/// (`clone(CLONE_VM|CLONE_VFORK)`); the calling thread waits. Nobody is told of that process: it
/// sends no SIGCHLD and `wait` does not see it.
///
/// # Errors
/// If the process cannot be made (EAGAIN: as many as `pids.max` or `ulimit -u` allow).
///
/// # Safety
/// `trial` only makes system calls: it allocates nothing, takes no lock, does not panic, and
/// changes no memory but its own stack.
pub unsafe fn call_apart(trial: &dyn Fn() -> Result<usize, Errno>) -> Result<Trial, Errno> {
    struct Job<'a> {
        trial: &'a dyn Fn() -> Result<usize, Errno>,
        returned: Option<Result<usize, Errno>>,
    }
    extern "C" fn run(job: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the job outlives this process: the thread that made it is suspended until the
        // end.
        let job = unsafe { &mut *job.cast::<Job<'_>>() };
        job.returned = Some((job.trial)());
        // SAFETY: ends this process without running anything of the other one's.
        unsafe { libc::_exit(0) }
    }
    let mut job = Job { trial, returned: None };
    let mut stack: Box<[MaybeUninit<u128>]> = Box::new_uninit_slice(STACK / size_of::<u128>());
    // SAFETY: the stack and the job outlive the process, which has ended, or will never begin, when
    // `clone` returns. All signals are blocked meanwhile, so that no handler of the program runs in
    // it. The wait reaps that very process.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let top = stack.as_mut_ptr_range().end;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK;
        let pid = check(libc::clone(run, top.cast(), flags, (&raw mut job).cast()).into());
        let ended = pid.and_then(|pid| {
            let mut status = 0;
            loop {
                match check(libc::waitpid(pid as libc::pid_t, &mut status, libc::__WALL).into()) {
                    Err(Errno(libc::EINTR)) => {}
                    other => return other.map(|_| status),
                }
            }
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        // It has ended in any case; another thread that waits for everything may have been told
        // instead.
        let status = match ended {
            Err(Errno(libc::ECHILD)) => 0,
            other => other?,
        };
        if libc::WIFSIGNALED(status) {
            return Ok(Trial::Killed(libc::WTERMSIG(status)));
        }
        // The other process has written it: read it anew.
        let returned = std::ptr::read_volatile(&raw const job.returned);
        returned.map(Trial::Returned).ok_or(Errno(libc::ECHILD))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn what_a_trial_returns_and_how_it_ends_is_known() {
        fn fine() -> Result<usize, Errno> {
            // SAFETY: no pointers.
            check(unsafe { libc::syscall(libc::SYS_getpid) })
        }
        fn refused() -> Result<usize, Errno> {
            // SAFETY: a bad descriptor touches nothing.
            check(unsafe { libc::close(-1) }.into())
        }
        fn ended() -> Result<usize, Errno> {
            // SAFETY: ends the trial's own process.
            check(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }.into())
        }
        // SAFETY: each makes one system call.
        unsafe {
            let Trial::Returned(Ok(pid)) = call_apart(&fine).unwrap() else {
                panic!("it did not return")
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
            // SAFETY: makes a descriptor.
            check(unsafe { libc::dup(2) }.into())
        }
        let before = crate::policy_mode();
        // SAFETY: each makes one system call.
        let (bound, opened) = unsafe { (call_apart(&bind), call_apart(&open)) };
        assert!(matches!(bound, Ok(Trial::Returned(_))), "{bound:?}");
        assert_eq!(crate::policy_mode(), before);
        let Ok(Trial::Returned(Ok(fd))) = opened else { panic!("{opened:?}") };
        // SAFETY: asks about a number.
        let flags = unsafe { libc::fcntl(fd as i32, libc::F_GETFD) };
        // Another test may have opened the same number since: then it is not a duplicate of
        // descriptor 2 that we see.
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        assert!(
            flags < 0 || link.ok() != std::fs::read_link("/proc/self/fd/2").ok(),
            "descriptor {fd} was left"
        );
    }
}
