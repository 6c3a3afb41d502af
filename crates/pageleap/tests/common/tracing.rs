//! A process that traces a program of a test as `strace -f` does: it stops each thread at each
//! system call, and reads the program's memory then. And what jobs report that are traced.

#![allow(dead_code)] // each test binary uses a part of it

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pageleap::{BASE_PAGE, Ended, EngineName, EngineUse, Error, PageRun, Reason, Report};

use crate::common::{rest, soon};

/// How often a job looks at most whether it is traced.
pub const LOOK: Duration = Duration::from_millis(100);

/// How many pages have moved by an engine because of a tracer.
pub fn moved_for_tracer(report: &Report, engine: impl Into<EngineName>) -> u64 {
    let engine = engine.into();
    let because = |part: &&EngineUse| part.why.contains("traced");
    let parts = report.engines.iter().filter(|part| part.engine == engine);
    parts.filter(because).map(|part| part.pages).sum()
}

pub fn warns_of(report: &Report, words: &str) -> bool {
    report.warnings.iter().any(|warning| warning.contains(words))
}

/// All pages have stayed because of the tracer, and the remedy is named.
pub fn check_stayed(report: &Report, remedy: &str) {
    let stays = |run: &PageRun| run.reason == Some(Reason::Traced);
    assert!(report.runs.iter().all(stays), "{report}");
    assert_eq!(report.pages.failed, report.pages.total(), "{report}");
    let Ended::Failed(error @ Error::NotMoved { .. }) = &report.ended else { panic!("{report}") };
    assert!(error.to_string().contains(remedy), "{error}");
}

/// How long a program may run: far longer than any takes, also where CPUs are emulated.
const PATIENCE: Duration = Duration::from_secs(300);

/// A program that a test runs, and talks to: it says a line that begins with `ready`, and goes on
/// when it gets a line. It has a process group of its own, with the command that runs it. When the
/// value is dropped, all of the group ends, because a program that a failed test has left would
/// take the CPUs from other tests.
pub struct Program {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    readers: Vec<JoinHandle<String>>,
    killed: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Program {
    /// Runs a test of this binary in a process of its own, in which the variable `case` is set.
    pub fn start(test: &str, case: &str) -> Program {
        Self::start_under(&[], test, case)
    }

    /// The same, by a command that runs what follows it.
    pub fn start_under(command: &[&str], test: &str, case: &str) -> Program {
        let own = std::env::current_exe().unwrap();
        let mut words = command.iter().map(OsStr::new).chain([own.as_os_str()]);
        let mut child = Command::new(words.next().expect("there is one"))
            .args(words)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env("PAGELEAP_TEST_CASE", case)
            .env("RUST_BACKTRACE", "0")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, lines) = channel();
        let stdin = child.stdin.take().expect("it was piped");
        let mut stdout = child.stdout.take().expect("it was piped");
        let stderr = child.stderr.take().expect("it was piped");
        let readers = vec![
            std::thread::spawn(move || {
                let mut text = String::new();
                stdout.read_to_string(&mut text).unwrap();
                text
            }),
            std::thread::spawn(move || {
                let mut text = String::new();
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    text += &format!("{line}\n");
                    // Who hears it may have gone.
                    let _ = line.starts_with("ready").then(|| say.send(line));
                }
                text
            }),
        ];
        let [killed, over] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (group, kills, ended) = (child.id() as i32, killed.clone(), over.clone());
        // A tracer that waits for ever ends with its program.
        std::thread::spawn(move || {
            let began = Instant::now();
            while !ended.load(SeqCst) {
                if began.elapsed() > PATIENCE {
                    kills.store(true, SeqCst);
                    return kill_group(group);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Program { child, stdin, lines, readers, killed, over }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until the program is ready, and returns the numbers that it says then. If it ends
    /// before, its output is in the message.
    pub fn wait_until_ready(&mut self) -> Vec<usize> {
        let Ok(line) = self.lines.recv() else {
            let (status, output) = self.end();
            let why = if self.killed.load(SeqCst) { "HUNG" } else { "the program has ended" };
            panic!("{why} ({status}): {output}");
        };
        line.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect()
    }

    pub fn go_on(&mut self) {
        writeln!(self.stdin).unwrap();
    }

    fn end(&mut self) -> (ExitStatus, String) {
        let output = self.readers.drain(..).map(|reader| reader.join().unwrap()).collect();
        let status = self.child.wait().unwrap();
        self.over.store(true, SeqCst);
        (status, output)
    }

    pub fn kill(mut self) {
        kill_group(self.pid());
        self.end();
    }

    /// Waits for the end of a program that is to succeed.
    pub fn succeed(mut self) {
        let (status, output) = self.end();
        assert!(!self.killed.load(SeqCst), "HUNG: {output}");
        assert!(status.success() && output.contains("running 1 test"), "{status}: {output}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.over.swap(true, SeqCst) {
            kill_group(self.pid());
            let _ = self.child.wait();
        }
    }
}

/// Ends a process that has not been waited for, and all others of its group.
fn kill_group(leader: i32) {
    // SAFETY: the group has the number of its leader, a child that is still there.
    unsafe { libc::kill(-leader, libc::SIGKILL) };
}

/// What a program says: numbers for the test. Returns when it may go on.
pub fn ready(numbers: &[usize]) {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    // In one call, and at the beginning of a line.
    eprintln!("\nready {}", numbers.join(" "));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "nobody says that it goes on");
}

/// A thread that traces all threads of a program and reads pages of its memory at each stop.
pub struct Tracer {
    thread: JoinHandle<()>,
    shared: Arc<Shared>,
    pid: i32,
}

#[derive(Default)]
struct Shared {
    attached: AtomicBool,
    refused: AtomicI32,
    leave: AtomicBool,
    stops: AtomicU64,
    wrong: AtomicU64,
}

/// What a tracer has met.
#[derive(Clone, Copy, Debug)]
pub struct Met {
    pub stops: u64,
    /// At how many stops a page was not what the caller expects, or could not be read.
    pub wrong: u64,
}

impl Tracer {
    /// Attaches to all threads of a program, and to those that they start. `watched` are addresses
    /// of base pages, each with what it has all the time. The error number says why the kernel
    /// refuses.
    pub fn attach(pid: i32, watched: Vec<(usize, Vec<u8>)>) -> Result<Tracer, i32> {
        let shared = Arc::new(Shared::default());
        let shares = shared.clone();
        let thread = std::thread::spawn(move || trace(pid, &watched, &shares));
        let ready = || shared.attached.load(SeqCst) || shared.refused.load(SeqCst) != 0;
        assert!(soon(ready), "no tracer");
        match shared.refused.load(SeqCst) {
            0 => Ok(Tracer { thread, shared, pid }),
            errno => Err(errno),
        }
    }

    /// Lets the program go, if it has not ended, and returns when nobody traces it any more.
    pub fn leave(self) -> Met {
        self.shared.leave.store(true, SeqCst);
        self.thread.join().unwrap();
        // A thread that ends lets go after it can be joined.
        let traced = || {
            tasks(self.pid).into_iter().any(|task| {
                let path = format!("/proc/{}/task/{task}/status", self.pid);
                fs::read_to_string(path).is_ok_and(|text| !text.contains("TracerPid:\t0\n"))
            })
        };
        assert!(soon(|| !traced()), "the tracer does not let go");
        Met { stops: self.shared.stops.load(SeqCst), wrong: self.shared.wrong.load(SeqCst) }
    }
}

fn tasks(pid: i32) -> BTreeSet<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return BTreeSet::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

fn request(request: libc::c_uint, task: i32, data: usize) -> Result<(), i32> {
    // SAFETY: none of the requests that are made writes memory of this process.
    match unsafe { libc::ptrace(request, task, 0usize, data) } {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        _ => Ok(()),
    }
}

fn trace(pid: i32, watched: &[(usize, Vec<u8>)], shared: &Shared) {
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
    let mut seized = BTreeSet::new();
    // A thread may start others until it is traced.
    loop {
        let new: Vec<i32> = tasks(pid).difference(&seized).copied().collect();
        if new.is_empty() {
            break;
        }
        for task in new {
            seized.insert(task);
            match request(libc::PTRACE_SEIZE, task, options as usize) {
                Ok(()) => _ = request(libc::PTRACE_INTERRUPT, task, 0),
                // It has ended, or was traced as it began.
                Err(libc::ESRCH | libc::EPERM) if seized.len() > 1 => {}
                Err(errno) => return shared.refused.store(errno, SeqCst),
            }
        }
    }
    shared.attached.store(true, SeqCst);
    let is_as_before = |(at, expected): &(usize, Vec<u8>)| {
        read_page(pid, *at).is_none_or(|seen| seen == *expected)
    };
    while !shared.leave.load(SeqCst) {
        let task = match next_event() {
            Some((0, _)) => {
                rest();
                continue;
            }
            // Its exit status is for who has started it.
            Some((task, has_ended)) if task != pid || !has_ended => task,
            // No thread is left.
            _ => return,
        };
        let mut status = 0;
        // SAFETY: the call writes one number.
        unsafe { libc::waitpid(task, &mut status, libc::__WALL) };
        match task {
            task if libc::WIFSTOPPED(status) => {
                shared.stops.fetch_add(1, SeqCst);
                if !watched.iter().all(is_as_before) {
                    shared.wrong.fetch_add(1, SeqCst);
                }
                let signal = libc::WSTOPSIG(status);
                let is_stop = status >> 16 != 0 || signal == libc::SIGTRAP | 0x80;
                let pass = if is_stop { 0 } else { signal as usize };
                // A thread that has been killed meanwhile has gone.
                let _ = request(libc::PTRACE_SYSCALL, task, pass);
            }
            _ => {}
        }
    }
}

/// The thread with an event, and whether the event is its end; 0 if no thread has one. `None` if no
/// thread is left. Not for children of other threads, which run other tests.
fn next_event() -> Option<(i32, bool)> {
    let events = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT;
    let flags = events | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
    // SAFETY: zeroes are a valid value, of which the call writes one. The number is valid with
    // every event, and with none.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let asked = libc::waitid(libc::P_ALL, 0, &mut info, flags);
        let ends = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
        (asked == 0).then(|| (info.si_pid(), ends.contains(&info.si_code)))
    }
}

/// Reads a page of the program as strace reads a buffer. Of a program that has ended there is
/// nothing to read.
fn read_page(pid: i32, at: usize) -> Option<Vec<u8>> {
    let mut page = vec![0; BASE_PAGE];
    let local = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: page.len() };
    // SAFETY: the call writes to the page only.
    let read = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    let gone = || std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    if read < 0 && gone() {
        return None;
    }
    page.truncate(read.max(0) as usize);
    Some(page)
}
