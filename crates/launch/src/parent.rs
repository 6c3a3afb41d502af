//! A parent that stays behind while a program runs, and that nobody should notice.
//!
//! The program is a child in the process group of its parent, so that the terminal is as much the
//! program's as if it had been started alone: it reads from it in the foreground, and Ctrl-C and
//! Ctrl-Z reach it. The parent only waits:
//!
//! * **Signals** of another process, such as SIGTERM of a service manager, are passed on, and so are
//!   those of timers that the parent has inherited. Signals that the terminal has sent to the whole
//!   group (Ctrl-C, a changed window) have reached the program, and are not passed on, unless the
//!   program has left the group. Neither are those that the program or the parent itself has sent.
//!   A signal that another process sends to the whole group arrives twice: nothing tells it apart
//!   from one to the parent alone.
//! * **Stops.** If the program stops (Ctrl-Z, or reading from the terminal in the background), the
//!   parent stops by the same signal, and the shell sees a stopped job. SIGCONT is passed on, unless
//!   the program has gone on since it stopped: SIGCONT to the whole group has reached both, and passed
//!   on late it would undo the next stop. A *waker*, a process that lives only while the parent is
//!   stopped, continues the parent if somebody continues the program alone. SIGSTOP to the parent
//!   stops the parent alone, because no process can catch it. One race is left: a Ctrl-Z in the moment
//!   in which the parent itself goes on stops it at once, perhaps before the program has stopped.
//! * **The end.** The parent ends as the program has: with its exit status, or by the same signal.
//!   If the parent is killed, the kernel kills the program (PR_SET_PDEATHSIG), because whoever kills
//!   the number that the shell tells wants to end the program. That does not hold for programs that
//!   gain privileges by execve(2) or change their user, and not for the program's own children.
//! * **Files.** The parent lets go of the program's files, so that the end of a pipe is the end of
//!   the program's. It keeps standard error.

use std::time::{Duration, Instant};

use pageleap_sys::{ChildState, Errno};

use crate::error::Error;

/// Signals of faults: they end a process at once, and nobody sends them to another.
const FAULTS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Signals that the terminal's driver sends to the foreground group.
const OF_TERMINALS: [i32; 7] = [
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGWINCH,
    libc::SIGCONT,
];
/// How often a waker looks whether the program goes on.
const LOOK: Duration = Duration::from_millis(20);

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
    /// Whether the child has stopped and not gone on, as far as it was asked.
    is_stopped: bool,
    /// How often the child has stopped.
    stops: u64,
}

impl Parent {
    /// Runs `child` in a copy of this process. It becomes the program, or returns the exit status
    /// with which the copy ends. The files that this process has inherited are the child's alone
    /// afterwards, except standard error.
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
            Ok(Some(child)) => {
                let_go_of_files();
                Ok(Parent { child, signals, is_stopped: false, stops: 0 })
            }
            Ok(None) => {
                end_with(parent);
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
    pub fn wait(mut self, look: &mut dyn FnMut(i32) -> Option<Duration>) -> Result<Outcome, Error> {
        let mut next = look(self.child).map(|pause| Instant::now() + pause);
        loop {
            let pause = next.map(|at| at.saturating_duration_since(Instant::now()));
            match next_of(&self.signals, pause) {
                None => next = look(self.child).map(|pause| Instant::now() + pause),
                Some((libc::SIGCHLD, _)) => {
                    if let Some(outcome) = self.child_has_changed()? {
                        return Ok(outcome);
                    }
                }
                // The kernel itself sends it only to a group whose shell has ended.
                Some((libc::SIGCONT, info)) if info.si_code != libc::SI_KERNEL => {
                    if let Some(outcome) = self.continue_child(&info)? {
                        return Ok(outcome);
                    }
                }
                Some((signal, info)) if self.is_for_child(signal, &info) => {
                    self.pass_on(signal, &info);
                }
                Some(_) => {}
            }
        }
    }

    /// Whether the child should get a signal that this process has got.
    fn is_for_child(&self, signal: i32, info: &libc::siginfo_t) -> bool {
        // SAFETY: the calls take no pointers.
        let (own, own_group, of_child, session) = unsafe {
            (libc::getpid(), libc::getpgid(0), libc::getpgid(self.child), libc::getsid(0))
        };
        if info.si_code == libc::SI_KERNEL {
            // A closed terminal is told to the leader of its session alone, or to a whole group.
            let to_group =
                OF_TERMINALS.contains(&signal) || signal == libc::SIGHUP && session != own;
            return !to_group || of_child != own_group;
        }
        // SAFETY: a signal of a process has its number.
        let sender = unsafe { info.si_pid() };
        let is_of_process = matches!(info.si_code, libc::SI_USER | libc::SI_TKILL);
        !(is_of_process && (sender == self.child || sender == own))
    }

    /// Sends the child a signal, with the value of sigqueue(3) if it has one.
    fn pass_on(&self, signal: i32, info: &libc::siginfo_t) {
        // SAFETY: the calls read the information. The child has not been waited for, so its number
        // is still its own.
        unsafe {
            let info: *const libc::siginfo_t = info;
            if (*info).si_code != libc::SI_QUEUE
                || libc::syscall(libc::SYS_rt_sigqueueinfo, self.child, signal, info) != 0
            {
                libc::kill(self.child, signal);
            }
        }
    }

    /// Passes on a SIGCONT that a process has sent, if the child is still in the stop in which it was
    /// when the signal came. Returns the end of the child, if that has come.
    ///
    /// One to the whole group, or of the waker, has continued the child already. It may have stopped
    /// again since, and the signal, passed on, would undo that stop.
    fn continue_child(&mut self, info: &libc::siginfo_t) -> Result<Option<Outcome>, Error> {
        let stops = self.stops;
        if let Some(outcome) = self.child_has_changed()? {
            return Ok(Some(outcome));
        }
        if self.is_stopped && self.stops == stops {
            self.pass_on(libc::SIGCONT, info);
            // A Ctrl-Z that came since the child was asked has reached both, and the SIGCONT may have
            // undone it. Repeated to a child that has stopped, it has no effect: the kernel drops it
            // with the next SIGCONT.
            if let Some((signal, info)) = next_of(&only(libc::SIGTSTP), Some(Duration::ZERO)) {
                self.pass_on(signal, &info);
            }
        }
        Ok(None)
    }

    /// Asks how the child has changed, and stops if it has stopped.
    fn child_has_changed(&mut self) -> Result<Option<Outcome>, Error> {
        loop {
            let state = match pageleap_sys::poll_child(self.child) {
                Ok(Some(state)) => state,
                Ok(None) => {
                    bury_others(self.child);
                    return Ok(None);
                }
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => {
                    let remedy = "the exit status of the program is lost";
                    return Err(Error::Process { call: "waitpid", errno, remedy });
                }
            };
            match state {
                ChildState::Exited(status) => return Ok(Some(Outcome::Exited(status as u8))),
                ChildState::Killed(signal) => return Ok(Some(Outcome::Killed(signal))),
                ChildState::Stopped(signal) => {
                    self.is_stopped = true;
                    self.stops += 1;
                    self.stop_by(signal);
                }
                ChildState::Continued => self.is_stopped = false,
            }
        }
    }

    /// Stops this process by the signal that has stopped the child, until somebody continues one of
    /// them.
    fn stop_by(&self, signal: i32) {
        // SAFETY: this process has one thread, as `start` demands.
        let waker = unsafe { pageleap_sys::fork() }
            .ok()
            .map(|waker| waker.unwrap_or_else(|| wake_when_continued(self.child)));
        // Blocked, so that one stop is made of it and of the same signal to the group, which may be
        // waiting already. It stops this process when it is let through.
        // SAFETY: the calls take no pointers.
        unsafe { libc::raise(signal) };
        if signal != libc::SIGSTOP {
            Signals::unblock(signal).restore();
        }
        if let Some(waker) = waker {
            // SAFETY: the calls take no pointers that are used. The waker is a child that has not
            // been waited for.
            unsafe {
                libc::kill(waker, libc::SIGKILL);
                libc::waitpid(waker, std::ptr::null_mut(), 0);
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
        // SAFETY: the structure lives until the calls are over. SIG_DFL is no function; the signal's
        // default action ends this process.
        unsafe {
            let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &no_core);
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
            Signals::unblock(signal);
        }
        128u8.wrapping_add(signal as u8)
    }
}

/// Lets the kernel kill the calling process when its parent ends, also if that has ended already.
fn end_with(parent: i32) {
    // SAFETY: the calls take no pointers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        // A parent in another pid namespace has the number 0.
        let now = libc::getppid();
        if now != parent && now != 0 {
            libc::_exit(128 + libc::SIGKILL);
        }
    }
}

/// The waker: continues its parent while the child of the parent is not stopped. The parent kills it
/// when it goes on.
fn wake_when_continued(child: i32) -> ! {
    // SAFETY: the call takes no pointers.
    let parent = unsafe { libc::getppid() };
    end_with(parent);
    loop {
        // Without /proc nothing tells, and the parent waits for a SIGCONT of its own.
        if is_stopped(child) != Some(true) && is_stopped(parent) == Some(true) {
            // SAFETY: the call takes no pointers.
            unsafe { libc::kill(parent, libc::SIGCONT) };
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether a process is stopped, if /proc tells it.
fn is_stopped(pid: i32) -> Option<bool> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    Some(matches!(state, 'T' | 't'))
}

/// Waits for children that are not the program's parent's own: the first process of a pid namespace
/// gets those whose parents have ended.
fn bury_others(child: i32) {
    // SAFETY: the call takes no pointers.
    if unsafe { libc::getpid() } != 1 {
        return;
    }
    loop {
        // SAFETY: zeros are a valid `siginfo_t`, and the call writes one. It leaves the child as it
        // is.
        let ended = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_ALL, 0, &mut info, flags);
            info.si_pid()
        };
        if ended == 0 || ended == child {
            return;
        }
        // SAFETY: the call takes no pointer that is used.
        unsafe { libc::waitpid(ended, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// Lets go of files that the program has inherited, except standard error. Files of this process
/// itself are close-on-exec, and stay.
fn let_go_of_files() {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let numbers: Vec<i32> = numbers.filter(|number| *number > 2).collect();
    // SAFETY: the first call asks about a number, and the second closes files that no code of this
    // process has opened, because its own are close-on-exec.
    unsafe {
        for number in numbers {
            let flags = libc::fcntl(number, libc::F_GETFD);
            if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
                libc::close(number);
            }
        }
    }
    let Ok(nothing) = std::fs::File::options().read(true).write(true).open("/dev/null") else {
        return;
    };
    for number in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: the call replaces a file by another one.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&nothing), number) };
    }
}

/// The next signal of a set whose signals are blocked, or `None` when the time is over.
fn next_of(signals: &libc::sigset_t, pause: Option<Duration>) -> Option<(i32, libc::siginfo_t)> {
    let pause = pause.map(|pause| libc::timespec {
        tv_sec: pause.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: pause.subsec_nanos().into(),
    });
    let time = pause.as_ref().map_or(std::ptr::null(), |time| time as *const libc::timespec);
    loop {
        // SAFETY: zeros are a valid `siginfo_t`. The call reads the set and the time, and writes the
        // information.
        let (signal, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (libc::sigtimedwait(signals, &mut info, time), info)
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

/// A set of one signal.
fn only(signal: i32) -> libc::sigset_t {
    // SAFETY: the calls write one set, for which zeros are valid.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        set
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

/// The signals that a process blocked and ignored before both were changed.
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
        // SAFETY: the call reads one set and writes one.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &only(signal), &mut mask);
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
