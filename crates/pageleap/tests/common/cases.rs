//! Cases that run in a child process, which a test starts from its own binary.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The environment variable with the name of the case that a child runs.
pub const CASE: &str = "PAGELEAP_TEST_CASE";

/// How long a child may run: far longer than any case takes, also where CPUs are emulated.
const PATIENCE: Duration = Duration::from_secs(240);

/// The case that this process has to run, if [`run_case`] has started it.
pub fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// The arguments with which a test binary runs one of its tests alone, and shows what it prints.
pub fn alone(test: &str) -> [&str; 4] {
    ["--exact", test, "--nocapture", "--test-threads=1"]
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exited(i32),
    Killed(i32),
    /// The child still ran after [`PATIENCE`], and was killed.
    Hung,
}

/// Runs `test` of this binary in a child process, in which [`case`] returns `case`. Returns how the
/// child ended, and its output.
pub fn run_case(test: &str, case: &str) -> (End, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(alone(test))
        .env(CASE, case)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // One thread for each pipe: a child whose output nobody reads waits once the pipe is full.
    let readers = [
        read_all(child.stdout.take().expect("it was piped")),
        read_all(child.stderr.take().expect("it was piped")),
    ];
    let began = Instant::now();
    let mut hung = false;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > PATIENCE && !hung => {
                hung = true;
                child.kill().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let end = match (status.code(), status.signal()) {
        _ if hung => End::Hung,
        (Some(code), _) => End::Exited(code),
        (None, signal) => End::Killed(signal.unwrap_or(0)),
    };
    let output = readers.map(|reader| reader.join().unwrap()).concat();
    // A harness that finds no test of that name exits with 0.
    assert!(
        end != End::Exited(0) || output.contains("running 1 test"),
        "there is no test {test}: {output}"
    );
    (end, output)
}

/// Reads a pipe to its end, in a thread of its own.
fn read_all(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Limits core dumps to nothing, for processes that are meant to die.
pub fn no_core_dump() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call reads one structure.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
}
