//! A parent that stays behind while a program runs, and that nobody should notice.
//!
//! The program is a child in the process group of its parent, so that the terminal is as much the
//! program's as if it had been started alone: it reads from it in the foreground, and Ctrl-C and
//! Ctrl-Z reach it. The parent only waits:
//!
//! * **Signals** from another process, such as SIGTERM of a service manager, are passed on. Signals
//!   that the kernel has sent to the whole group (Ctrl-C, a changed window, a closed terminal) have
//!   reached the program, and are not, unless the program has left the group. The same holds for
//!   those that the program itself has sent.
//! * **Stops.** If the program stops (Ctrl-Z, or reading from the terminal in the background), the
//!   parent stops by the same signal, and the shell sees a stopped job. SIGCONT is passed on.
//!   SIGSTOP to the parent stops the parent alone, because no process can catch it.
//! * **The end.** The parent ends as the program has: with its exit status, or by the same signal.
//!   If the parent is killed, the kernel kills the program (PR_SET_PDEATHSIG), because whoever kills
//!   the number that the shell tells wants to end the program.

use std::time::Duration;

use pageleap_sys::{ChildState, Errno};

use crate::error::Error;

/// Signals of faults: they end a process at once, and nobody sends them to another.
const FAULTS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// How a program has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With this exit status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

/// A parent whose child is starting or running.
#[derive(Debug)]
pub struct Parent {
    child: i32,
    /// The signals that are passed on, SIGCHLD among them. They are blocked, so that each of them
    /// waits until it is looked at.
    signals: libc::sigset_t,
}

impl Parent {
    /// Runs `child` in a copy of this process. It becomes the program, or returns the exit status
    /// with which the copy ends.
    ///
    /// # Errors
    /// [`Error::Process`] if no process can be made.
    ///
    /// # Safety
    /// This process has one thread.
    pub unsafe fn start(child: impl FnOnce() -> u8) -> Result<Parent, Error> {
        let signals = passed_on();
        let before = Signals::block(&signals);
        // SAFETY: the call takes no pointers.
        let parent = unsafe { libc::getpid() };
        // SAFETY: forwarded to the caller.
        match unsafe { pageleap_sys::fork() } {
            Ok(Some(child)) => Ok(Parent { child, signals }),
            Ok(None) => {
                // SAFETY: the calls take no pointers. Without the second one a parent that has been
                // killed meanwhile would be missed.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                    if libc::getppid() != parent {
                        libc::_exit(128 + libc::SIGKILL);
                    }
                }
                before.restore();
                let status = child();
                // SAFETY: ends the copy without running code that the parent will run.
                unsafe { libc::_exit(status.into()) }
            }
            Err(errno) => {
                before.restore();
                let remedy = "end some processes, or raise pids.max or `ulimit -u`";
                Err(Error::Process { call: "fork", errno, remedy })
            }
        }
    }

    /// The number of the child, which is also that of the program.
    pub fn child(&self) -> i32 {
        self.child
    }

    /// Waits until the child has ended, and passes on signals and stops meanwhile. `look` is called
    /// with the number of the child; it returns the time until its next call, and `None` for never
    /// again.
    ///
    /// # Errors
    /// [`Error::Process`] if the child cannot be waited for.
    pub fn wait(self, look: &mut dyn FnMut(i32) -> Option<Duration>) -> Result<Outcome, Error> {
        let mut pause = look(self.child);
        loop {
            match self.next_signal(pause) {
                None => pause = look(self.child),
                Some((libc::SIGCHLD, _)) => {
                    if let Some(outcome) = self.child_has_changed()? {
                        return Ok(outcome);
                    }
                }
                Some((signal, info)) if self.is_for_child(&info) => {
                    // SAFETY: the call takes no pointers. The child has not been waited for, so its
                    // number is still its own.
                    unsafe { libc::kill(self.child, signal) };
                }
                Some(_) => {}
            }
        }
    }

    /// The next signal, or `None` when the time is over.
    fn next_signal(&self, pause: Option<Duration>) -> Option<(i32, libc::siginfo_t)> {
        let pause = pause.map(|pause| libc::timespec {
            tv_sec: pause.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: pause.subsec_nanos().into(),
        });
        let time = pause.as_ref().map_or(std::ptr::null(), |time| time as *const libc::timespec);
        loop {
            // SAFETY: zeros are a valid `siginfo_t`. The call reads the set and the time, and writes
            // the information.
            let (signal, info) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                (libc::sigtimedwait(&self.signals, &mut info, time), info)
            };
            if signal > 0 {
                return Some((signal, info));
            }
            // EINTR: the parent has been stopped and goes on, or a debugger has come.
            if Errno::last() == Errno(libc::EAGAIN) {
                return None;
            }
        }
    }

    /// Whether the child has not got a signal that this process has got.
    fn is_for_child(&self, info: &libc::siginfo_t) -> bool {
        // SAFETY: the calls take no pointers, and for a signal of another process `si_pid` is set.
        let (sender, own, of_child) =
            unsafe { (info.si_pid(), libc::getpgid(0), libc::getpgid(self.child)) };
        match info.si_code {
            libc::SI_KERNEL => of_child != own,
            _ => sender != self.child,
        }
    }

    /// Asks how the child has changed, and stops if it has stopped.
    fn child_has_changed(&self) -> Result<Option<Outcome>, Error> {
        loop {
            let state = match pageleap_sys::poll_child(self.child) {
                Ok(Some(state)) => state,
                Ok(None) => return Ok(None),
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => {
                    let remedy = "the exit status of the program is lost";
                    return Err(Error::Process { call: "waitpid", errno, remedy });
                }
            };
            match state {
                ChildState::Exited(status) => return Ok(Some(Outcome::Exited(status as u8))),
                ChildState::Killed(signal) => return Ok(Some(Outcome::Killed(signal))),
                ChildState::Stopped(signal) => stop_by(signal),
            }
        }
    }
}

impl Outcome {
    /// Ends this process by the same signal, or returns the exit status for it.
    ///
    /// A signal that would write a core file does not write one of this process.
    pub fn repeat(self) -> u8 {
        let signal = match self {
            Outcome::Exited(status) => return status,
            Outcome::Killed(signal) => signal,
        };
        // SAFETY: the structure lives until the calls are over; zeros are a valid set. The signal's
        // default action ends this process.
        unsafe {
            let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &no_core);
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::signal(signal, libc::SIG_DFL);
            Signals::unblock(signal);
            libc::raise(signal);
        }
        128u8.wrapping_add(signal as u8)
    }
}

/// The signals that a parent looks at: all but those of faults, and those that nobody can catch.
fn passed_on() -> libc::sigset_t {
    // SAFETY: the calls write one set, for which zeros are valid.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for signal in FAULTS {
            libc::sigdelset(&mut set, signal);
        }
        set
    }
}

/// Stops this process by a signal that stops by default, until SIGCONT comes.
fn stop_by(signal: i32) {
    // SAFETY: the calls take no pointers. The signal is one that the child has been stopped by.
    unsafe {
        if signal == libc::SIGSTOP {
            libc::raise(libc::SIGSTOP);
            return;
        }
        let before = Signals::unblock(signal);
        libc::raise(signal);
        before.restore();
    }
}

/// What a process does with signals, before it was changed.
struct Signals {
    mask: libc::sigset_t,
    /// Whether the end of a child was ignored. Then nobody could wait for one.
    ignored_children: bool,
}

impl Signals {
    /// Blocks signals, and lets children be waited for.
    fn block(signals: &libc::sigset_t) -> Signals {
        // SAFETY: the call reads one set and writes one. SIG_DFL is no function.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, signals, &mut mask);
            let before = libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            Signals { mask, ignored_children: before == libc::SIG_IGN }
        }
    }

    /// Lets one signal through.
    fn unblock(signal: i32) -> Signals {
        // SAFETY: the calls write and read sets that live until they are over.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, &mut mask);
            Signals { mask, ignored_children: false }
        }
    }

    fn restore(&self) {
        // SAFETY: the call reads one set. SIG_IGN is no function.
        unsafe {
            if self.ignored_children {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut());
        }
    }
}
