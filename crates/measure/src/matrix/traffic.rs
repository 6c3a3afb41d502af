//! Threads that read, write or copy memory, as fast as they can or at a pace.

use std::fmt;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use pageleap::{CopyLoop, CopyMethod};

use super::buffer::start;
use crate::Error;
use crate::memcpy::cpu_ns;

/// How long a bandwidth is measured.
const RUN: Duration = Duration::from_millis(100);
/// Words of a line.
const LINE: usize = 8;
/// Words between two looks at the flag and at the clock: 16 KB.
const STEP: usize = 2048;

/// What threads do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Loads a word of each line, which brings all of the line.
    Read,
    /// Stores all words of each line. The processor loads a line before it stores to it, unless it
    /// notices that all of the line is written.
    Write,
    /// Copies one half of the memory to the other, by the C library's memcpy in steps of 16 KB.
    Copy,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Copy];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Copy => "copy",
        })
    }
}

/// One thread on each of these CPUs.
pub(crate) struct Traffic<'a> {
    pub kind: Kind,
    pub cpus: &'a [usize],
    /// Bytes per second of all threads together; `None` for no limit.
    pub rate: Option<f64>,
}

/// The traffic of several threads, added up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    pub bytes_per_s: f64,
    /// The smallest share of its time that a thread was on its CPU; 1 if the kernel does not say.
    pub cpu_share: f64,
}

/// The counter of one thread, in a line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Bytes(AtomicU64);

impl Traffic<'_> {
    /// Lets the threads run for a while. Each has its part of the memory.
    pub fn bandwidth(&self, words: &[AtomicU64]) -> Result<Flow, Error> {
        Ok(self.beside(words, || std::thread::sleep(RUN))?.1)
    }

    /// Does something beside the threads, once all of them run. Returns the result, and what the
    /// threads did meanwhile.
    pub fn beside<T>(
        &self,
        words: &[AtomicU64],
        work: impl FnOnce() -> T,
    ) -> Result<(T, Flow), Error> {
        let stop = AtomicBool::new(false);
        let done: Vec<Bytes> = self.cpus.iter().map(|_| Bytes::default()).collect();
        let part = words.len() / self.cpus.len() / (2 * STEP) * 2 * STEP;
        assert!(part > 0, "each thread needs {} words", 2 * STEP);
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for ((cpu, words), done) in self.cpus.iter().zip(words.chunks_exact(part)).zip(&done) {
                let (stop, kind) = (&stop, self.kind);
                let rate = self.rate.map(|rate| rate / self.cpus.len() as f64);
                let thread = start(scope, *cpu, move || run(kind, words, rate, stop, &done.0));
                threads.push(thread.inspect_err(|_| stop.store(true, Ordering::Relaxed))?);
            }
            // A thread that cannot be bound ends, and its error comes below.
            let runs = |(thread, done): (&ScopedJoinHandle<'_, _>, &Bytes)| {
                done.0.load(Ordering::Relaxed) > 0 || thread.is_finished()
            };
            while !threads.iter().zip(&done).all(runs) {
                std::thread::yield_now();
            }
            let sum = || done.iter().map(|bytes| bytes.0.load(Ordering::Relaxed)).sum::<u64>();
            let (began, before) = (Instant::now(), sum());
            // The threads end, too, if `work` panics: the scope waits for them.
            let end = SetOnDrop(&stop);
            let result = work();
            let bytes_per_s = (sum() - before) as f64 / began.elapsed().as_secs_f64();
            drop(end);
            let mut cpu_share: f64 = 1.0;
            for thread in threads {
                let joined = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                cpu_share = cpu_share.min(joined?);
            }
            Ok((result, Flow { bytes_per_s, cpu_share }))
        })
    }
}

/// Sets a flag when it goes.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does it until it is stopped, and counts the bytes. Returns the share of the time that the thread
/// was on its CPU.
fn run(
    kind: Kind,
    words: &[AtomicU64],
    rate: Option<f64>,
    stop: &AtomicBool,
    done: &AtomicU64,
) -> f64 {
    let (began, cpu, mut bytes) = (Instant::now(), cpu_ns(), 0u64);
    let half = words.len() / 2;
    let (mut at, mut sum) = (0, 0u64);
    while !stop.load(Ordering::Relaxed) {
        let end = if kind == Kind::Copy { half } else { words.len() };
        let step = &words[at..at + STEP];
        match kind {
            Kind::Read => {
                step.iter().step_by(LINE).for_each(|word| {
                    sum = sum.wrapping_add(word.load(Ordering::Relaxed));
                });
            }
            Kind::Write => step.iter().for_each(|word| word.store(bytes, Ordering::Relaxed)),
            Kind::Copy => copy(&words[half + at..half + at + STEP], step),
        }
        at = if at + STEP < end { at + STEP } else { 0 };
        bytes += (STEP * size_of::<u64>()) as u64;
        done.store(bytes, Ordering::Relaxed);
        if let Some(rate) = rate {
            let due = Duration::from_secs_f64(bytes as f64 / rate);
            while began.elapsed() < due && !stop.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
    }
    black_box(sum);
    let used = cpu.zip(cpu_ns()).map(|(from, to)| (to - from) as f64);
    used.map_or(1.0, |used| used / began.elapsed().as_nanos() as f64)
}

fn copy(to: &[AtomicU64], from: &[AtomicU64]) {
    let bytes = size_of_val(from).min(size_of_val(to));
    let method = CopyMethod { by: CopyLoop::Memcpy, step_bytes: bytes };
    // SAFETY: both parts have so many bytes and do not overlap. Atomics may be written by others,
    // and the caller's thread is the only one that does.
    unsafe { pageleap_sys::copy_racing(to.as_ptr().addr(), from.as_ptr().addr(), bytes, method) };
}
