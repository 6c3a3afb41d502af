//! The parent that stays behind with `--verbose`: it says what the kernel tells of the program.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pageleap::process::ProcessMemory;
use pageleap_launch::{Error, Outcome, Parent, Program};
use pageleap_measure::figures::human_bytes;

use super::words::Words;
use crate::output;

/// When the parent looks at the program: by then most have allocated something.
const LOOK: Duration = Duration::from_secs(1);

/// Starts the program, waits for its end, and ends as it has.
pub fn run(
    program: &Program,
    environment: &[(OsString, Option<OsString>)],
    words: &Words,
) -> Result<ExitCode, Error> {
    let started = Instant::now();
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
    words.say(&format!("process: {}", parent.child()));
    let mut looks = [Some(LOOK)].into_iter();
    let outcome = parent.wait(&mut |pid| {
        let next = looks.next();
        if next.is_none() {
            look(pid).iter().for_each(|line| words.say(line));
        }
        next.flatten()
    })?;
    words.say(&end(outcome, started.elapsed()));
    Ok(ExitCode::from(outcome.repeat()))
}

/// What the kernel tells of the program.
fn look(pid: i32) -> Vec<String> {
    let Ok(memory) = ProcessMemory::read(pid as u32) else { return Vec::new() };
    let nodes = memory.on_nodes().into_iter();
    let nodes: Vec<String> =
        nodes.map(|(node, bytes)| format!("{} on {node}", human_bytes(bytes as f64))).collect();
    let nodes = if nodes.is_empty() { "no memory".to_owned() } else { nodes.join(", ") };
    let mut lines = vec![format!("after {} s: {} has {nodes}", LOOK.as_secs(), memory.name)];
    let heap = memory.mappings.iter().find(|mapping| mapping.name == "[heap]");
    if let Some(heap) = heap {
        lines.push(format!("the policy of its heap, by numa_maps: {}", heap.policy));
    }
    lines
}

/// How the program has ended, and what it has used.
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
