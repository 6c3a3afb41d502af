//! Runs child commands, each in a process group of its own, and reads their output line by line.
//!
//! Time limits and interrupts need the group: `cargo` starts test binaries, and these start more
//! processes. Killing only `cargo` would leave the others running, with their memory mapped and
//! their huge pages in use.
//!
//! Standard output and standard error share one pipe, so lines keep their order.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Time between two checks of a silent child.
const POLL: Duration = Duration::from_millis(50);

/// How long this process waits for more output after the child has ended, if a descendant of the
/// child holds the pipe open.
const DRAIN: Duration = Duration::from_secs(2);

/// The process groups of the running children. [`run`] locks it to start and to reap a child, and
/// [`kill_running`] to kill them.
static RUNNING: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The child ended by itself.
    Exited(ExitStatus),
    /// The child exceeded its limit, and its whole process group was killed.
    TimedOut,
    /// The child was silent for too long, and its whole process group was killed.
    Silent,
    /// The caller had read enough, and the whole process group was killed.
    Enough,
}

/// How long a child may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From its start to its end.
    pub total: Duration,
    /// Between two lines of output.
    pub silence: Duration,
}

impl Ending {
    /// True for exit status 0.
    pub fn success(self) -> bool {
        matches!(self, Ending::Exited(status) if status.success())
    }

    /// The exit code, if the child ended by itself.
    pub fn code(self) -> Option<i32> {
        match self {
            Ending::Exited(status) => status.code(),
            _ => None,
        }
    }

    /// Why this ending is not a success, for the results table.
    pub fn reason(self, limit: Duration) -> String {
        match self {
            Ending::Exited(status) => status.to_string(),
            Ending::TimedOut => format!("killed after its limit of {} s", limit.as_secs()),
            Ending::Silent => "killed because it had stopped printing".to_owned(),
            Ending::Enough => "killed because it had printed enough".to_owned(),
        }
    }
}

/// Runs `command` for at most `limit`. Passes each line of its output, without the line end, to
/// `on_line`.
pub fn run(command: Command, limit: Duration, on_line: impl FnMut(&str)) -> Result<Ending> {
    run_watched(command, Limits { total: limit, silence: limit }, on_line)
}

/// Like [`run`], but ends the command when `on_line` breaks.
pub fn run_until(
    command: Command,
    limit: Duration,
    on_line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Ending> {
    watch(command, Limits { total: limit, silence: limit }, on_line)
}

/// Like [`run`], but ends a command that is silent for too long.
pub fn run_watched(
    command: Command,
    limits: Limits,
    mut on_line: impl FnMut(&str),
) -> Result<Ending> {
    watch(command, limits, |line| {
        on_line(line);
        ControlFlow::Continue(())
    })
}

fn watch(
    command: Command,
    limits: Limits,
    mut on_line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Ending> {
    let name = command.get_program().to_string_lossy().into_owned();
    let (reader, mut child) = spawn(command).with_context(|| format!("cannot start `{name}`"))?;
    let group = child.id() as i32;

    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
            line.clear();
            if sender.send(text).is_err() {
                break;
            }
        }
    });

    let deadline = Instant::now() + limits.total;
    let mut last_line = Instant::now();
    let mut ended: Option<(Ending, Instant)> = None;
    let (mut pipe_closed, mut enough) = (false, false);
    loop {
        match lines.recv_timeout(POLL) {
            Ok(line) => {
                last_line = Instant::now();
                enough |= on_line(&line).is_break();
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                pipe_closed = true;
                if ended.is_none() {
                    thread::sleep(POLL);
                }
            }
        }
        if let Some((ending, since)) = ended {
            if pipe_closed {
                return Ok(ending);
            }
            if since.elapsed() > DRAIN {
                // A descendant outlived the child and still holds the pipe: it must not outlive the
                // step.
                kill_group(group);
                return Ok(ending);
            }
            continue;
        }
        let mut running = lock(&RUNNING);
        let now = Instant::now();
        let ending = if let Some(status) = child.try_wait().context("cannot wait for the child")? {
            Ending::Exited(status)
        } else if !enough && now < deadline && now.duration_since(last_line) < limits.silence {
            continue;
        } else {
            kill_group(group);
            child.wait().context("cannot reap the killed child")?;
            match now {
                _ if enough => Ending::Enough,
                now if now >= deadline => Ending::TimedOut,
                _ => Ending::Silent,
            }
        };
        running.retain(|&other| other != group);
        ended = Some((ending, now));
    }
}

/// How long children may take to end after a request. `None`: they are killed without a request.
static TIME_TO_END: Mutex<Option<Duration>> = Mutex::new(None);

/// Whether an interrupt is ending this process.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether an interrupt is ending this process: then nothing new is worth starting.
pub fn is_ending() -> bool {
    // Relaxed: a step that starts nevertheless is killed with the others.
    ENDING.load(Ordering::Relaxed)
}

/// From now on an interrupt asks children to end, and kills those that take longer than
/// `patience`.
pub fn ask_before_killing(patience: Duration) {
    *lock(&TIME_TO_END) = Some(patience);
}

/// Asks the running children to end, if [`ask_before_killing`] was called, and waits for them. The
/// interrupt path calls this.
pub fn ask_running() {
    ENDING.store(true, Ordering::Relaxed);
    let Some(patience) = *lock(&TIME_TO_END) else { return };
    for &group in &*lock(&RUNNING) {
        // SAFETY: kill takes no pointers; the group is that of a child which has not been reaped.
        unsafe { libc::kill(-group, libc::SIGINT) };
    }
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline && !lock(&RUNNING).is_empty() {
        thread::sleep(POLL);
    }
    // Their last lines are still being printed.
    thread::sleep(POLL * 4);
}

/// Kills the running children and their descendants. The interrupt path calls this. While the
/// caller holds the returned lock, [`run`] starts no child: hold the lock until the process exits.
pub fn kill_running() -> MutexGuard<'static, Vec<i32>> {
    let running = lock(&RUNNING);
    running.iter().for_each(|&group| kill_group(group));
    running
}

fn spawn(mut command: Command) -> Result<(std::io::PipeReader, std::process::Child)> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone().context("cannot duplicate the pipe")?)
        .stderr(writer);
    command.process_group(0);
    // The child must not outlive this process. The thread that starts the child waits for it.
    // SAFETY: one system call, of no pointers, between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    // Spawning under the lock: an interrupt either sees the new group or prevents it.
    let mut running = lock(&RUNNING);
    let child = command.spawn()?;
    running.push(child.id() as i32);
    // `command` holds the last write ends of this process. Dropping it lets the reader see the end
    // of the output.
    drop(command);
    Ok((reader, child))
}

fn kill_group(group: i32) {
    // SAFETY: kill takes no pointers. The group leader is either unreaped or a member of the group
    // still holds our pipe, so the kernel cannot have given the number to a stranger.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is valid even if a thread that held the lock has panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn shell(script: &str, limit: Duration) -> (Ending, Vec<String>) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut lines = Vec::new();
        let ending = run(command, limit, |line| lines.push(line.to_owned())).expect("sh starts");
        (ending, lines)
    }

    #[test]
    fn both_streams_arrive_in_order() {
        let (ending, lines) =
            shell("echo a; echo b >&2; printf c; exit 3", Duration::from_secs(600));
        assert_eq!(lines, ["a", "b", "c"]);
        assert!(!ending.success());
        assert!(matches!(ending, Ending::Exited(status) if status.code() == Some(3)));
    }

    /// Longer than any test waits: a process that ends earlier was killed.
    const FOR_EVER: &str = "sleep 100000";

    /// Whether the process that a line names ends. Its parent is gone, so the first process of the
    /// machine reaps it some time after its end.
    fn ends(line: &str) -> bool {
        let stat = PathBuf::from(format!("/proc/{line}/stat"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            match std::fs::read_to_string(&stat) {
                Ok(text) if !text.contains(") Z ") => thread::sleep(POLL),
                _ => return true,
            }
        }
        false
    }

    /// Tries longer limits until the child has printed something before its end. The time that a
    /// shell needs to start depends on the machine.
    fn until_it_has_begun(
        attempt: impl FnMut(Duration) -> (Ending, Vec<String>),
    ) -> (Ending, Vec<String>) {
        let limits = [1, 8, 64].map(Duration::from_secs);
        let begun = limits.into_iter().map(attempt).find(|(_, lines)| !lines.is_empty());
        begun.expect("a shell starts within a minute")
    }

    #[test]
    fn limit_kills_descendants_too() {
        let script = format!("{FOR_EVER} & echo $!; {FOR_EVER}");
        let (ending, lines) = until_it_has_begun(|limit| shell(&script, limit));
        assert_eq!((ending, lines.len()), (Ending::TimedOut, 1));
        assert!(ends(&lines[0]), "a descendant outlives the limit");
    }

    #[test]
    fn a_line_that_is_enough_ends_a_child_and_its_descendants() {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{FOR_EVER} & echo $!; echo b; {FOR_EVER}")]);
        let mut lines = Vec::new();
        let ending = run_until(command, Duration::from_secs(600), |line| {
            lines.push(line.to_owned());
            if line == "b" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!((ending.unwrap(), lines.len()), (Ending::Enough, 2));
        assert!(ends(&lines[0]), "a descendant outlives the line");
    }

    #[test]
    fn left_over_descendant_does_not_block() {
        let script = format!("{FOR_EVER} & echo $!");
        let (ending, lines) = shell(&script, Duration::from_secs(600));
        assert!(ending.success());
        assert!(ends(&lines[0]), "a descendant outlives its step");
    }

    #[test]
    fn limit_counts_for_a_child_that_closed_its_output() {
        let script = format!("exec >&- 2>&-; {FOR_EVER}");
        let (ending, _) = shell(&script, Duration::from_millis(300));
        assert_eq!(ending, Ending::TimedOut);
    }

    #[test]
    fn silence_ends_a_child_before_its_limit() {
        let (ending, lines) = until_it_has_begun(|silence| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("echo a; {FOR_EVER}")]);
            let limits = Limits { total: Duration::from_secs(600), silence };
            let mut lines = Vec::new();
            let ending = run_watched(command, limits, |line| lines.push(line.to_owned()));
            (ending.unwrap(), lines)
        });
        assert_eq!(lines, ["a"]);
        assert_eq!(ending, Ending::Silent);
    }
}
