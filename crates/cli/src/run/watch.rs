//! The parent that stays behind: with `--verbose` it shows the kernel's view of the program, and
//! with `--place` it pins threads of programs that preload nothing.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use pageleap::process::ProcessMemory;
use pageleap_launch::{Error, HostTasks, Outcome, Parent, Poller, Program};
use pageleap_measure::figures::human_bytes;

use super::alloc;
use super::words::Words;
use crate::output;

/// When the parent looks at the libraries of the program: by then most have loaded them.
const FIRST: Duration = Duration::from_millis(100);
/// When the parent looks at its memory: by then most have allocated something.
const SECOND: Duration = Duration::from_secs(1);

/// The parent while the program runs: it tells about the program, pins its threads, or both.
pub struct Watch<'a> {
    words: &'a Words,
    is_verbose: bool,
    poller: Option<Poller<HostTasks>>,
    /// The library of the allocator that was asked for.
    library: Option<&'a Path>,
    started: Instant,
    /// The looks that are still to come, the last one first.
    looks: Vec<Duration>,
}

impl<'a> Watch<'a> {
    /// A parent that speaks, pins threads, or both.
    pub fn new(
        words: &'a Words,
        is_verbose: bool,
        poller: Option<Poller<HostTasks>>,
        library: Option<&'a Path>,
    ) -> Watch<'a> {
        let looks = if is_verbose { vec![SECOND, FIRST] } else { Vec::new() };
        Watch { words, is_verbose, poller, library, started: Instant::now(), looks }
    }

    /// Starts the program, and waits for its end. `started` gets its number.
    pub fn run(
        mut self,
        program: &Program,
        environment: &[(OsString, Option<OsString>)],
        started: impl FnOnce(i32),
    ) -> Result<Outcome, Error> {
        // systemd names the process that gets its sockets (sd_listen_fds(3)).
        const FOR_PROCESS: &str = "LISTEN_PID";
        let own = std::process::id().to_string();
        let is_own = std::env::var_os(FOR_PROCESS).is_some_and(|pid| pid == own.as_str());
        let become_program = || {
            let mut environment = environment.to_vec();
            if is_own {
                let child = std::process::id().to_string();
                environment.push((FOR_PROCESS.into(), Some(child.into())));
            }
            let error = program.exec(&environment);
            output::note(&format!("error: {error}"));
            error.exit_code()
        };
        // SAFETY: this command has started no thread.
        let parent = unsafe { Parent::start(become_program) }?;
        started(parent.child());
        if self.is_verbose {
            self.words.say(&format!("process: {}", parent.child()));
        }
        let outcome = parent.wait(&mut |pid| self.look(pid))?;
        if self.is_verbose {
            self.words.say(&end(outcome, self.started.elapsed()));
        }
        Ok(outcome)
    }

    /// Looks at the program, and returns the time until the next look.
    fn look(&mut self, pid: i32) -> Option<Duration> {
        let now = self.started.elapsed();
        if let Some(at) = self.looks.pop_if(|at| *at <= now) {
            let lines = seen(pid, at, self.library);
            lines.iter().for_each(|line| self.words.say(line));
        }
        let until_look = self.looks.last().map(|at| at.saturating_sub(now));
        let Some(poller) = &mut self.poller else { return until_look };
        if let Some(line) = poller.look(pid) {
            self.words.say(&line);
        }
        Some(until_look.unwrap_or(Duration::MAX).min(Poller::<HostTasks>::EVERY))
    }
}

/// The kernel's view of the program at one of the looks.
fn seen(pid: i32, at: Duration, library: Option<&Path>) -> Vec<String> {
    let Ok(memory) = ProcessMemory::read(pid as u32) else { return Vec::new() };
    if at == FIRST {
        return vec![alloc::mapped(&memory, library)];
    }
    let nodes = memory.on_nodes().into_iter();
    let nodes: Vec<String> =
        nodes.map(|(node, bytes)| format!("{} on {node}", human_bytes(bytes as f64))).collect();
    let nodes = if nodes.is_empty() { "no memory".to_owned() } else { nodes.join(", ") };
    let mut lines = vec![format!("after {} s: {} has {nodes}", at.as_secs(), memory.name)];
    let heap = memory.mappings.iter().find(|mapping| mapping.name == "[heap]");
    if let Some(heap) = heap {
        lines.push(format!("the policy of its heap, by numa_maps: {}", heap.policy));
    }
    lines
}

/// How the program has ended, with its CPU time and its memory.
fn end(outcome: Outcome, time: Duration) -> String {
    let how = match outcome {
        Outcome::Exited(status) => format!("exit status {status}"),
        Outcome::Killed(signal) => format!("ended by signal {signal}"),
    };
    // SAFETY: zeros are a valid `rusage`, and the call writes one.
    let used = unsafe {
        let mut used: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut used);
        used
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    format!(
        "{how} after {:.1} s; CPU time {:.1} s user, {:.1} s system; at most {} resident",
        time.as_secs_f64(),
        seconds(used.ru_utime),
        seconds(used.ru_stime),
        human_bytes(used.ru_maxrss as f64 * 1024.0)
    )
}
