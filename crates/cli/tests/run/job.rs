//! A program under a parent that stays behind, and what became of both.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something holds.
#[track_caller]
pub fn soon(mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The state of a process, as `/proc/PID/stat` has it; `None` if it has gone.
pub fn state_of(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a parent that was stopped has gone on so far that SIGTSTP no longer stops it before its
/// program. It lets that signal through to stop, and nothing else; it waits for all signals otherwise.
pub fn has_gone_on(parent: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{parent}/status")).unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    let blocked = u64::from_str_radix(field("SigBlk:"), 16).unwrap();
    let blocks = |signal: i32| blocked & 1 << (signal - 1) != 0;
    !field("State:").starts_with('T') && (blocks(libc::SIGTSTP) || !blocks(libc::SIGTERM))
}

/// A parent and its program, whose first line of output is its number. Both end with the value.
pub struct Job {
    parent: Child,
    pub program: i32,
    output: BufReader<ChildStdout>,
    /// Open, so that reading waits.
    _input: ChildStdin,
}

impl Job {
    pub fn start(mut command: Command) -> Job {
        // A process group of its own, as a shell with job control makes one. Signals have their
        // default actions, whatever the test was started with.
        // SAFETY: the calls take no pointers.
        unsafe {
            command.process_group(0).pre_exec(|| {
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGTSTP, libc::SIGCONT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            })
        };
        Job::begin(command)
    }

    /// Starts a parent as the first process of a session on a terminal of its own. The terminal is
    /// closed by dropping the second value.
    pub fn on_terminal(mut command: Command) -> (Job, OwnedFd) {
        // SAFETY: the calls make and name a terminal; the descriptor is new.
        let (terminal, name) = unsafe {
            let terminal = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
            assert!(terminal >= 0 && libc::grantpt(terminal) == 0 && libc::unlockpt(terminal) == 0);
            let name = std::ffi::CStr::from_ptr(libc::ptsname(terminal)).to_owned();
            (OwnedFd::from_raw_fd(terminal), name)
        };
        // SAFETY: the calls take one string.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGHUP, libc::SIG_DFL);
                // The first terminal that the first process of a session opens is that of the session.
                if libc::setsid() < 0 || libc::open(name.as_ptr(), libc::O_RDWR) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
        (Job::begin(command), terminal)
    }

    fn begin(mut command: Command) -> Job {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut parent = command.spawn().unwrap();
        let input = parent.stdin.take().unwrap();
        let mut output = BufReader::new(parent.stdout.take().unwrap());
        // With it the parent's end of the pipe.
        drop(command);
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let program = line.trim().parse().unwrap_or_else(|_| panic!("no number: {line:?}"));
        Job { parent, program, output, _input: input }
    }

    /// Reads what the program writes until nobody can write any more.
    pub fn read_to_end(&mut self) {
        self.output.read_to_end(&mut Vec::new()).unwrap();
    }

    fn pid(&self) -> i32 {
        self.parent.id() as i32
    }

    /// Sends a signal to the parent alone.
    pub fn signal(&self, signal: i32) {
        // SAFETY: the call takes no pointers; the process has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Sends a signal to the program alone.
    pub fn signal_program(&self, signal: i32) {
        // SAFETY: the call takes no pointers; the parent, which waits for the program, still runs.
        assert_eq!(unsafe { libc::kill(self.program, signal) }, 0);
    }

    /// Sends a signal to the group of the parent and the program.
    pub fn signal_group(&self, signal: i32) {
        // SAFETY: the call takes no pointers; the process has not been waited for.
        assert_eq!(unsafe { libc::killpg(self.pid(), signal) }, 0);
    }

    /// Waits until the parent stops, and returns the signal.
    #[track_caller]
    pub fn stopped(&self) -> i32 {
        let mut signal = None;
        soon(|| {
            let mut status = 0;
            let flags = libc::WUNTRACED | libc::WNOHANG;
            // SAFETY: the call writes one number.
            let changed = unsafe { libc::waitpid(self.pid(), &mut status, flags) };
            signal = (changed > 0).then_some(status);
            signal.is_some()
        });
        let status = signal.unwrap();
        assert!(libc::WIFSTOPPED(status), "it has ended: {status:#x}");
        libc::WSTOPSIG(status)
    }

    /// Waits for the end of the parent: its exit code, or the signal that ended it.
    pub fn end(&mut self) -> (Option<i32>, Option<i32>) {
        use std::os::unix::process::ExitStatusExt;
        let mut status = None;
        soon(|| {
            status = self.parent.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        (status.code(), status.signal())
    }

    pub fn parent_state(&self) -> char {
        state_of(self.pid()).unwrap_or('X')
    }

    pub fn program_state(&self) -> char {
        state_of(self.program).unwrap_or('X')
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

/// What a terminal shows, as it comes.
pub struct Shown {
    from: ChildStdout,
    text: Vec<u8>,
}

impl Shown {
    pub fn of(from: ChildStdout) -> Shown {
        Shown { from, text: Vec::new() }
    }

    /// Reads until the text is there. Reading ends with the program, and when nothing has come for far
    /// longer than anything here takes.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        self.wait_for_times(text, 1);
    }

    /// The same, for a text that comes several times.
    #[track_caller]
    pub fn wait_for_times(&mut self, text: &str, times: usize) {
        let mut buffer = [0; 256];
        while self.text().matches(text).count() < times {
            let mut from =
                libc::pollfd { fd: self.from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the call reads and writes one structure.
            let ready = unsafe { libc::poll(&mut from, 1, PATIENCE.as_millis() as i32) };
            let read = if ready == 1 { self.from.read(&mut buffer).unwrap() } else { 0 };
            assert!(read > 0, "{text:?} does not come: {}", self.text());
            self.text.extend(&buffer[..read]);
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }
}
