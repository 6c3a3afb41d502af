//! Loads that run beside a leap: threads that write, read or map memory.
//!
//! [`run_beside`] starts the threads of a [`Load`], runs the measured code, and joins the threads.
//! A [`Shadow`] knows the words that the region must contain after all loads so far.

mod bystander;
mod demand;
mod gaps;
mod kernel;
mod reader;
mod spells;
mod writer;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

pub use demand::{Rate, Rows};
use kernel::{KernelLog, WORDS_PER_PAGE};
use spells::Spells;
pub use spells::{MEAN_SPELL, Pattern};
pub use writer::Tally;
use writer::WriteLog;

use crate::Error;
use crate::phase::{PHASES, Phase, Stage, StopOnDrop, Times};

/// The load runs at least this long before anything is measured beside it.
const WARM_UP: Duration = Duration::from_millis(10);
/// The longest wait for the first write of a slow writer.
const LONGEST_WARM_UP: Duration = Duration::from_millis(200);
/// The lowest bit of a writer's number in the values that it writes. The bits below count its
/// writes, and those above are marks.
const WRITER_SHIFT: u32 = 54;

/// The work of threads beside a leap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing.
    Rest,
    /// Threads write to the region.
    Write(Writing),
    /// A thread maps and faults memory that has nothing to do with the region.
    Map,
}

/// How threads write to the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writing {
    /// How often, and which words.
    pub pattern: Pattern,
    /// Threads that write, each to its own part of the words.
    pub writers: usize,
    /// Threads that read all words meanwhile.
    pub readers: usize,
    /// Whether the kernel writes a word of each base page, too. The region must then consist of
    /// whole pages.
    pub kernel: bool,
    /// The CPU on which the writers run; `None`: any.
    pub writer_cpu: Option<usize>,
    /// The most writes of each writer; `None`: as many as it can until the end.
    pub total: Option<u64>,
}

/// Work, and the seed of its choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The work.
    pub work: Work,
    /// Seed of the writers' choice of words, and of the spells of a changing load. All loads of one
    /// seed have the same spells.
    pub seed: u64,
}

/// The expected words of a region.
#[derive(Debug)]
pub struct Shadow {
    words: Vec<u64>,
    /// Writes of all loads so far.
    written: u64,
    /// Calls so far by which the kernel wrote.
    kernel_calls: u64,
}

impl Shadow {
    /// Expects the present contents of the words.
    pub fn of(words: &[AtomicU64]) -> Shadow {
        Shadow { words: contents(words), written: 0, kernel_calls: 0 }
    }

    /// Fills the words, so that no two of them are equal.
    pub fn fill(words: &[AtomicU64]) -> Shadow {
        words.iter().zip(0..).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        Shadow::of(words)
    }

    /// Number of words that do not contain the last value written to them.
    pub fn lost(&self, words: &[AtomicU64]) -> u64 {
        lost_words(words, &self.words)
    }

    /// Expects the present contents from now on, so that words lost so far do not count for a later
    /// leap.
    pub fn accept(&mut self, words: &[AtomicU64]) {
        self.words = contents(words);
    }
}

fn contents(words: &[AtomicU64]) -> Vec<u64> {
    words.iter().map(|word| word.load(Ordering::Relaxed)).collect()
}

fn lost_words(words: &[AtomicU64], shadow: &[u64]) -> u64 {
    let differs = |(word, value): &(&AtomicU64, &u64)| word.load(Ordering::Relaxed) != **value;
    words.iter().zip(shadow).filter(differs).count() as u64
}

/// State that the threads of a load share with the code that measures beside them.
#[derive(Debug, Default)]
pub struct Beside {
    /// The phase, and whether the threads are to end.
    pub stage: Stage,
    completed: AtomicU64,
    /// Bytes that a job beside the load has moved.
    moved_bytes: AtomicU64,
    is_recorded: AtomicBool,
}

impl Beside {
    /// Before the leap; nothing is completed.
    pub fn new() -> Beside {
        Beside::default()
    }

    /// Writes, or rounds, that the load has completed.
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Bytes that a job beside the load has moved, by the last note of the thread that watches the
    /// job. From the first call of this function on, that thread notes them often.
    pub fn moved_bytes(&self) -> u64 {
        self.is_recorded.store(true, Ordering::Relaxed);
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// Whether somebody has asked for [`Beside::moved_bytes`].
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded.load(Ordering::Relaxed)
    }

    /// Notes the bytes that a job has moved.
    pub(crate) fn note_moved(&self, bytes: u64) {
        self.moved_bytes.store(bytes, Ordering::Relaxed);
    }

    fn complete(&self, writes: u64) {
        self.completed.fetch_add(writes, Ordering::Relaxed);
    }
}

/// The results of a load.
#[derive(Debug, Default)]
pub struct Log {
    /// Writes, or rounds.
    pub writes: u64,
    /// Gaps of the threads that write, or of the bystander.
    pub gaps: Times,
    /// Gaps of the threads that read; `None` without readers.
    pub reader_gaps: Option<Times>,
    /// How long the thread waited for calls by which the kernel writes; `None` if it writes
    /// nothing.
    pub kernel_waits: Option<Times>,
    /// For a changing load: the writes of all writers at full speed, by phase. The time is the sum
    /// over the writers.
    pub full_speed: [Tally; PHASES.len()],
    /// Calls by which the kernel writes and that failed with EFAULT or stopped short; `None` if the
    /// kernel writes nothing.
    pub efaults: Option<u64>,
}

/// Threads of a load whose gaps are kept together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noticing {
    /// The threads that write, or the bystander.
    Writers,
    /// The threads that read.
    Readers,
    /// The thread that lets the kernel write. Its gaps are waits for calls, without the pauses
    /// between.
    Kernel,
}

impl Noticing {
    /// All of them.
    pub const ALL: [Noticing; 3] = [Noticing::Writers, Noticing::Readers, Noticing::Kernel];
}

impl Log {
    /// The gaps of these threads; `None` if the load has none of them.
    pub fn gaps_of(&self, threads: Noticing) -> Option<&Times> {
        match threads {
            Noticing::Writers => Some(&self.gaps),
            Noticing::Readers => self.reader_gaps.as_ref(),
            Noticing::Kernel => self.kernel_waits.as_ref(),
        }
    }

    /// The longest gap during the leap, minus the longest gap beside a memcpy. `memcpy`: the log of
    /// the load beside that memcpy. Negative if the memcpy delayed the threads longer. `None`
    /// without gaps.
    pub fn beyond_memcpy_ns(&self, memcpy: &Log, threads: Noticing) -> Option<i64> {
        let longest = |log: &Log, phase| log.gaps_of(threads)?.quantile_ns(phase, 1.0);
        let [leap, memcpy] = [longest(self, Phase::During)?, longest(memcpy, Phase::Memcpy)?];
        Some(i64::try_from(leap).ok()? - i64::try_from(memcpy).ok()?)
    }
}

/// Runs `body` beside a load. The load's threads have ended when it returns.
///
/// # Errors
/// If a thread cannot be started, or the kernel refuses to write; and the errors of `body`.
pub fn run_beside<T, E: From<Error>>(
    load: &Load,
    words: &[AtomicU64],
    shadow: &mut Shadow,
    body: impl FnOnce(&Beside) -> Result<T, E>,
) -> Result<(T, Log), E> {
    let beside = Beside::new();
    if load.work == Work::Rest {
        return Ok((body(&beside)?, Log::default()));
    }
    let (result, Ended { written, reader_gaps, kernel }) = thread::scope(|scope| {
        let stop = StopOnDrop(&beside.stage);
        let threads = Threads::start(scope, load, words, shadow, &beside)?;
        warm_up(&beside);
        let result = body(&beside);
        drop(stop);
        Ok::<_, Error>((result, threads.join()?))
    })?;
    shadow.words = written.shadow;
    if let Some(KernelLog { last, calls, .. }) = &kernel {
        for (page, value) in last.iter().enumerate().filter(|(_, value)| **value != 0) {
            shadow.words[page * WORDS_PER_PAGE + WORDS_PER_PAGE - 1] = *value;
        }
        shadow.kernel_calls += calls;
    }
    if matches!(load.work, Work::Write(_)) {
        shadow.written += written.writes;
    }
    let log = Log {
        writes: written.writes,
        gaps: written.gaps,
        reader_gaps,
        full_speed: written.full_speed,
        efaults: kernel.as_ref().map(|log| log.efaults),
        kernel_waits: kernel.map(|log| log.waits),
    };
    Ok((result?, log))
}

/// Waits until the load has begun.
fn warm_up(beside: &Beside) {
    let start = Instant::now();
    let begun = || beside.completed() > 0 || start.elapsed() >= LONGEST_WARM_UP;
    while start.elapsed() < WARM_UP || !begun() {
        thread::sleep(WARM_UP / 10);
    }
}

/// The running threads of a load.
struct Threads<'scope> {
    /// Writers, in the order of their parts, or the bystander.
    workers: Vec<ScopedJoinHandle<'scope, WriteLog>>,
    readers: Vec<ScopedJoinHandle<'scope, Times>>,
    kernel: Option<ScopedJoinHandle<'scope, Result<KernelLog, Error>>>,
}

impl<'scope> Threads<'scope> {
    /// Starts all threads. They take the words out of the shadow, and return them at their end.
    fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        load: &Load,
        words: &'env [AtomicU64],
        shadow: &mut Shadow,
        beside: &'env Beside,
    ) -> Result<Threads<'scope>, Error> {
        let mine = std::mem::take(&mut shadow.words);
        let mut threads = Threads { workers: Vec::new(), readers: Vec::new(), kernel: None };
        let Work::Write(writing) = load.work else {
            let bystander = move || bystander::run(mine, beside);
            threads.workers.push(spawn(scope, "bystander", bystander)?);
            return Ok(threads);
        };
        for part in parts(words, mine, &writing, load.seed, shadow.written) {
            let Part { words, shadow, orders } = part;
            let work = move || {
                if let Some(cpu) = writing.writer_cpu {
                    // A CPU that has gone offline leaves the thread where it is.
                    let _ = pageleap_sys::set_affinity(0, &[cpu]);
                }
                writer::run(words, shadow, orders, beside)
            };
            threads.workers.push(spawn(scope, "writer", work)?);
        }
        for _ in 0..writing.readers {
            threads.readers.push(spawn(scope, "reader", move || reader::run(words, beside))?);
        }
        if writing.kernel {
            let calls = shadow.kernel_calls;
            let work = move || kernel::run(words, calls, beside);
            threads.kernel = Some(spawn(scope, "kernel-writer", work)?);
        }
        Ok(threads)
    }

    /// Waits for the end of all threads.
    fn join(self) -> Result<Ended, Error> {
        let logs = self.workers.into_iter().map(joined);
        let written = logs.reduce(|mut sum, part| {
            sum.shadow.extend(part.shadow);
            sum.writes += part.writes;
            sum.gaps.join(&part.gaps);
            sum.full_speed.iter_mut().zip(part.full_speed).for_each(|(sum, part)| sum.join(part));
            sum
        });
        let reader_gaps = self.readers.into_iter().map(joined).reduce(|mut sum, part| {
            sum.join(&part);
            sum
        });
        let kernel = self.kernel.map(joined).transpose()?;
        Ok(Ended { written: written.expect("each load has a worker"), reader_gaps, kernel })
    }
}

/// The results of all threads of a load.
struct Ended {
    written: WriteLog,
    reader_gaps: Option<Times>,
    kernel: Option<KernelLog>,
}

/// The part of one writer.
struct Part<'a> {
    words: &'a [AtomicU64],
    shadow: Vec<u64>,
    orders: writer::Orders,
}

/// Divides the words among the writers. Each base page belongs to one writer. The choice of words
/// also depends on `written`, so that two leaps do not meet the same writes.
fn parts<'a>(
    words: &'a [AtomicU64],
    mut shadow: Vec<u64>,
    writing: &Writing,
    seed: u64,
    written: u64,
) -> Vec<Part<'a>> {
    let writers = writing.writers;
    let pages = words.len() / WORDS_PER_PAGE;
    let mut parts = Vec::with_capacity(writers);
    let mut first = 0;
    for writer in 0..writers {
        let last = writer + 1 == writers;
        let end = if last { words.len() } else { pages * (writer + 1) / writers * WORDS_PER_PAGE };
        let rest = shadow.split_off(end - first);
        let orders = writer::Orders {
            spells: Spells::new(writing.pattern, seed, writer, writers),
            seed: seed.wrapping_add(written).wrapping_add(writer as u64),
            // No two writers store the same value.
            written: written | (writer as u64) << WRITER_SHIFT,
            total: writing.total,
            leaves_each: writing.kernel.then_some(WORDS_PER_PAGE),
        };
        let shadow = std::mem::replace(&mut shadow, rest);
        parts.push(Part { words: &words[first..end], shadow, orders });
        first = end;
    }
    parts
}

fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &'static str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, Error> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn_scoped(scope, work).map_err(|source| Error::Thread { name, reason: source })
}

fn joined<T>(thread: ScopedJoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one thread of a load until there is enough.
    pub(super) fn while_running<T: Send>(
        run: impl FnOnce(&Beside) -> T + Send,
        enough: impl Fn(&Beside) -> bool,
    ) -> T {
        let beside = Beside::new();
        thread::scope(|scope| {
            let running = scope.spawn(|| run(&beside));
            while !enough(&beside) && !running.is_finished() {
                thread::yield_now();
            }
            beside.stage.stop();
            running.join().unwrap()
        })
    }

    fn words(number: usize) -> Vec<AtomicU64> {
        (0..number).map(|_| AtomicU64::new(0)).collect()
    }

    const FAST: Pattern = Pattern::Steady { rate: Rate::Max, rows: Rows::Uniform };

    fn writing(pattern: Pattern, writers: usize, readers: usize, kernel: bool) -> Load {
        let writing = Writing { pattern, writers, readers, kernel, writer_cpu: None, total: None };
        Load { work: Work::Write(writing), seed: 5 }
    }

    #[test]
    fn all_loads_together_lose_nothing_and_each_lost_word_shows() {
        let words = words(40 * WORDS_PER_PAGE);
        let mut shadow = Shadow::fill(&words);
        for (load, kernel) in [
            (writing(FAST, 3, 1, true), true),
            (writing(Pattern::Changing, 2, 2, true), true),
            (Load { work: Work::Map, seed: 1 }, false),
            (Load { work: Work::Rest, seed: 1 }, false),
            (writing(FAST, 1, 0, false), false),
        ] {
            let ended = run_beside(&load, &words, &mut shadow, |beside| {
                while load.work != Work::Rest && beside.completed() < 1000 {
                    thread::yield_now();
                }
                Ok::<_, Error>(beside.completed())
            });
            let (seen, log) = ended.unwrap();
            assert!(log.writes >= seen);
            assert_eq!(log.efaults, kernel.then_some(0));
            let times = |times: &Option<Times>| {
                times.as_ref().is_some_and(|times| times.count(Phase::Before) > 0)
            };
            // The loads with a kernel writer have readers.
            assert_eq!([&log.kernel_waits, &log.reader_gaps].map(times), [kernel; 2]);
            assert_eq!(log.gaps.count(Phase::Before) > 0, log.writes > 0);
            assert_eq!(shadow.lost(&words), 0, "{load:?}");
        }
        assert!(shadow.written > 0 && shadow.kernel_calls > 0);
        words[7].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(shadow.lost(&words), 1);
        shadow.accept(&words);
        assert_eq!(shadow.lost(&words), 0);
    }

    #[test]
    fn the_gap_beyond_the_memcpy_is_a_difference_of_the_longest() {
        let log = |phase, times_ms: &[u64]| {
            let mut log = Log::default();
            times_ms.iter().for_each(|ms| log.gaps.add(phase, Duration::from_millis(*ms)));
            log
        };
        let leap = log(Phase::During, &[2, 7, 1]);
        let beyond = |memcpy: &Log| leap.beyond_memcpy_ns(memcpy, Noticing::Writers);
        let close = |ns: Option<i64>, ms: f64| (ns.unwrap() as f64 / 1e6 - ms).abs() < 0.02;
        assert!(close(beyond(&log(Phase::Memcpy, &[3, 1])), 4.0));
        assert!(close(beyond(&log(Phase::Memcpy, &[9])), -2.0));
        assert_eq!(beyond(&log(Phase::Before, &[9])), None);
        assert_eq!(leap.beyond_memcpy_ns(&leap, Noticing::Readers), None);
    }

    #[test]
    fn an_error_of_the_body_ends_the_threads_and_keeps_the_shadow() {
        let words = words(2 * WORDS_PER_PAGE);
        let mut shadow = Shadow::fill(&words);
        let failed = run_beside(&writing(FAST, 2, 1, true), &words, &mut shadow, |_| {
            let source = std::io::Error::other("on purpose");
            Err::<(), _>(Error::Call { call: "none", reason: source })
        });
        assert!(failed.unwrap_err().to_string().contains("on purpose"));
        assert_eq!(shadow.lost(&words), 0);
    }

    #[test]
    fn every_word_has_one_writer() {
        let words = words(7 * WORDS_PER_PAGE + 3);
        let Work::Write(writing) = writing(FAST, 3, 0, false).work else { unreachable!() };
        let parts = parts(&words, (0..words.len() as u64).collect(), &writing, 1, 0);
        let shadow: Vec<u64> = parts.iter().flat_map(|part| part.shadow.clone()).collect();
        assert_eq!(shadow, (0..words.len() as u64).collect::<Vec<_>>());
        for part in &parts {
            assert_eq!(part.words.len(), part.shadow.len());
        }
        assert!(parts[0].words.len().is_multiple_of(WORDS_PER_PAGE) && parts.len() == 3);
    }
}
