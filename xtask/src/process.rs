//! Runs child commands, each in a process group of its own, and reads what they print line by line.
//!
//! The group is what makes a time limit and an interrupt work: `cargo` starts test binaries, and
//! these start more. Killing only `cargo` would leave them running, with their memory mapped and
//! their huge pages in use.
//!
//! stdout and stderr share one pipe, so lines keep the order in which they were printed.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How often a silent child is looked at.
const POLL: Duration = Duration::from_millis(50);

/// How long output is still awaited after the child has ended while a descendant holds the pipe
/// open.
const DRAIN: Duration = Duration::from_secs(2);

/// The process groups of the running children. Taken by [`run`] around spawn and reap, and by
/// [`kill_running`].
static RUNNING: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It ended by itself.
    Exited(ExitStatus),
    /// It ran past its limit and its whole process group was killed.
    TimedOut,
    /// It printed nothing for as long as it may be silent, and its whole process group was killed.
    Silent,
    /// What it printed was enough, and its whole process group was killed.
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

    /// The exit code, if it ended by itself.
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
            Ending::Silent => "killed because it said nothing any more".to_owned(),
            Ending::Enough => "killed because it had said enough".to_owned(),
        }
    }
}

/// Runs `command` for at most `limit` and hands each line of its output, without the line end, to
/// `on_line`.
pub fn run(command: Command, limit: Duration, on_line: impl FnMut(&str)) -> Result<Ending> {
    run_watched(command, Limits { total: limit, silence: limit }, on_line)
}

/// The same, until `on_line` breaks off.
pub fn run_until(
    command: Command,
    limit: Duration,
    on_line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Ending> {
    watch(command, Limits { total: limit, silence: limit }, on_line)
}

/// Like [`run`], but for a child that is expected to print something from time to time.
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

/// How long children that are asked to end may take; without it they are not asked.
static TIME_TO_END: Mutex<Option<Duration>> = Mutex::new(None);

/// From now on an interrupt asks children to end, and kills them only if they take longer than
/// this.
pub fn ask_before_killing(patience: Duration) {
    *lock(&TIME_TO_END) = Some(patience);
}

/// Asks the running children to end, if they are the kind that is asked, and waits for them. For
/// the interrupt path.
pub fn ask_running() {
    let Some(patience) = *lock(&TIME_TO_END) else { return };
    for &group in &*lock(&RUNNING) {
        // SAFETY: kill takes no pointers; the group is that of a child which has not been reaped.
        unsafe { libc::kill(-group, libc::SIGINT) };
    }
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline && !lock(&RUNNING).is_empty() {
        thread::sleep(POLL);
    }
    // What they have said last is still being printed.
    thread::sleep(POLL * 4);
}

/// Kills the running children and their descendants, for the interrupt path. Returns the lock that
/// keeps [`run`] from starting another one; hold it until the process exits.
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
    // It must not outlive us, however we end; the thread that starts it waits for it.
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
    // `command` holds the last write ends in this process; dropping it lets the reader see the end
    // of output.
    drop(command);
    Ok((reader, child))
}

fn kill_group(group: i32) {
    // SAFETY: kill takes no pointers. The group leader is either unreaped or a member of the group
    // still holds our pipe, so the kernel cannot have given the number to a stranger.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data behind both uses is valid even if a holder panicked.
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

    /// Longer than any test waits: what has ended before has been killed.
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

    /// Limits for a child that has to say something before it is ended: the first one that leaves
    /// it the time to begin. How long a shell takes to start depends on the machine.
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
