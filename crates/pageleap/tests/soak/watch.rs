//! The state of the soak: counts of what was done, the actors at work, and a watchdog that ends the
//! process when an actor hangs.
//!
//! An actor that hangs is a failure, whatever the others do. So each actor has a pulse of its own.

use std::fmt::Write as _;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::in_lab;

/// The things that are counted.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Count {
    Rounds,
    Leaps,
    Megabytes,
    Cancelled,
    TimedOut,
    Dropped,
    Refused,
    Failed,
    Kept,
    Faults,
    Writes,
    SystemCalls,
    Efaults,
    Guards,
    Forks,
    Programs,
    Signals,
    Tenants,
    Forgotten,
    Checks,
}

/// The names of the counts, in the order of [`Count`].
const NAMES: [&str; 20] = [
    "rounds",
    "leaps",
    "MB",
    "cancelled",
    "timed out",
    "dropped",
    "refused",
    "failed by faults",
    "kept by guards",
    "faults",
    "writes",
    "system calls",
    "EFAULT",
    "guards",
    "forks",
    "programs",
    "signals",
    "tenants",
    "forgotten entries",
    "checks",
];

const _: () = assert!(Count::Checks as usize + 1 == NAMES.len());

static COUNTS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Adds to a count.
pub fn count(what: Count, more: u64) {
    COUNTS[what as usize].fetch_add(more, Relaxed);
}

/// The value of a count.
pub fn counted(what: Count) -> u64 {
    COUNTS[what as usize].load(Relaxed)
}

/// All counts in one line.
pub fn counts() -> String {
    let all =
        NAMES.iter().zip(&COUNTS).map(|(name, count)| format!("{} {name}", count.load(Relaxed)));
    all.collect::<Vec<_>>().join(", ")
}

/// How long an actor may take for one step. This is longer than a check waits for a condition. On
/// an idle machine no step takes a hundredth of it.
fn patience() -> Duration {
    Duration::from_secs(if in_lab() { 180 } else { 80 })
}

/// The time between two lines of progress.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// What the soak does now, for messages about failures.
static NOW: Mutex<String> = Mutex::new(String::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // If a thread has panicked while it held the lock, the messages are about that panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets what the soak does now. It is printed with each failure.
pub fn now(what: String) {
    *lock(&NOW) = what;
}

struct Pulse {
    name: String,
    thread: i32,
    beats: AtomicU64,
}

static ACTORS: Mutex<Vec<Arc<Pulse>>> = Mutex::new(Vec::new());

/// The registration of an actor at work. Its thread drops it at the end.
pub struct Alive(Arc<Pulse>);

impl Alive {
    /// Registers the calling thread.
    pub fn new(name: impl Into<String>) -> Alive {
        // SAFETY: the call takes no arguments.
        let thread = unsafe { libc::gettid() };
        let pulse = Arc::new(Pulse { name: name.into(), thread, beats: AtomicU64::new(0) });
        lock(&ACTORS).push(pulse.clone());
        Alive(pulse)
    }

    /// Notes that the actor has made a step.
    pub fn beat(&self) {
        self.0.beats.fetch_add(1, Relaxed);
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        lock(&ACTORS).retain(|pulse| !Arc::ptr_eq(pulse, &self.0));
    }
}

/// Sends a signal to an actor, chosen by any number. The actor's thread still exists when the
/// signal arrives.
pub fn signal_an_actor(number: u64, signal: i32) {
    let actors = lock(&ACTORS);
    if let Some(pulse) = actors.get(number as usize % actors.len().max(1)) {
        // SAFETY: the call takes numbers only. The thread exists: it leaves the list, which is
        // locked, before it ends.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), pulse.thread, signal) };
    }
}

/// Prints progress, and ends the process when an actor hangs.
pub struct Watchdog {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub fn start() -> Watchdog {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                usual(info);
                eprintln!("soak: FAILED in {}", lock(&NOW));
            }));
        });
        let end = Arc::new(AtomicBool::new(false));
        let ended = end.clone();
        let thread = std::thread::spawn(move || watch(&ended));
        Watchdog { end, thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn watch(ended: &AtomicBool) {
    let began = Instant::now();
    let mut last_line = began;
    // The last beat of each actor, and when it was first seen.
    let mut seen: Vec<(Arc<Pulse>, u64, Instant)> = Vec::new();
    while !ended.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
        let time = Instant::now();
        let actors = lock(&ACTORS).clone();
        seen.retain(|(pulse, ..)| actors.iter().any(|actor| Arc::ptr_eq(actor, pulse)));
        for actor in actors {
            let beats = actor.beats.load(Relaxed);
            match seen.iter_mut().find(|(pulse, ..)| Arc::ptr_eq(pulse, &actor)) {
                Some((_, last, since)) if *last != beats => (*last, *since) = (beats, time),
                Some(_) => {}
                None => seen.push((actor, beats, time)),
            }
        }
        if let Some((pulse, ..)) = seen.iter().find(|(_, _, since)| since.elapsed() > patience()) {
            eprintln!("soak: HUNG: `{}` makes no step, in {}", pulse.name, lock(&NOW));
            for (pulse, beats, since) in &seen {
                let Pulse { name, thread, .. } = &**pulse;
                eprintln!(
                    "  {name} (thread {thread}): {beats} steps, the last one {:?} ago",
                    since.elapsed()
                );
            }
            eprintln!("{}soak: {}", threads_in_words(), counts());
            std::process::abort();
        }
        if last_line.elapsed() > BETWEEN_LINES {
            eprintln!("  {:>5} s: {}", began.elapsed().as_secs(), counts());
            last_line = time;
        }
    }
}

/// What each thread of the process waits for, as the kernel sees it.
fn threads_in_words() -> String {
    let mut text = String::new();
    for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let file = |name: &str| {
            let text = fs::read_to_string(task.path().join(name))
                .unwrap_or_else(|error| error.to_string());
            text.trim().replace('\n', " < ")
        };
        let [comm, waits, call, stack] = ["comm", "wchan", "syscall", "stack"].map(file);
        let _ = writeln!(
            text,
            "  {:?} {comm}: waits in {waits}, call {call}, stack {stack}",
            task.file_name()
        );
    }
    text
}

/// Whether SIGINT has asked for an early end.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Relaxed) != 0
}

static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    INTERRUPTED.store(signal, Relaxed);
}

/// While this value lives, SIGINT asks for an early end instead of ending the process. The value
/// holds the previous handler.
pub struct Interrupt(libc::sighandler_t);

impl Interrupt {
    pub fn expect() -> Interrupt {
        // SAFETY: the handler only stores to an atomic.
        Interrupt(unsafe { libc::signal(libc::SIGINT, note as *const () as libc::sighandler_t) })
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        // SAFETY: the handler is the one that was installed before.
        unsafe { libc::signal(libc::SIGINT, self.0) };
    }
}
