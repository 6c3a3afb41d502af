//! A thread that writes random words, each with a value that no other write stores.
//!
//! The value is a mark and the number of the write. The writer stores the same value to the same
//! word of the shadow copy, in ordinary memory that nothing moves. When the writer has ended, each
//! word that differs from its shadow has lost its last write.
//!
//! A *gap* is the time from the end of one batch of writes to the end of the next batch. The writer
//! reads the clock once per batch. Up to [`SLEEP_LIMIT_PER_S`] the writer sleeps between batches
//! (for [`TICK`], or until the next write is due) and does not occupy a CPU, so that its ordinary
//! gap is a tick. Above that rate, batches have [`SMALL_BATCH`] writes, and the writer spins.
//! Writes that became due during a stall follow at full speed.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Beside;
use crate::phase::{Phase, Times};

/// Rates up to this are paced by sleeping.
const SLEEP_LIMIT_PER_S: u64 = 1_000_000;
/// How long the writer sleeps if writes are due after each tick.
const TICK: Duration = Duration::from_micros(50);
/// Longest sleep, so that a slow writer notices the end of the run.
const LONGEST_SLEEP: Duration = Duration::from_millis(5);
/// Writes per reading of the clock where the writer spins.
const SMALL_BATCH: u64 = 16;
/// Most writes per reading of the clock where the writer sleeps; reached only after a stall.
const LARGE_BATCH: u64 = 1024;
/// The hot part of skewed writes is one part of this many: 3.125 %.
const HOT_PART: usize = 32;
/// Set in every value that a writer stores, and in no value that was there before.
const MARK: u64 = 1 << 63;
/// Highest rate that can be asked for by number.
const HIGHEST_PER_S: u64 = 1_000_000_000;

/// How many writes per second the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// This many; 0 means no writer.
    PerSecond(u64),
    /// As many as it can.
    Max,
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        if text.eq_ignore_ascii_case("max") {
            return Ok(Rate::Max);
        }
        let expected = "expected a number such as 0, 500, 100k or 10m, or max";
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'k' | 'K')) => (&text[..at], 1e3),
            Some((at, 'm' | 'M')) => (&text[..at], 1e6),
            _ => (text, 1.0),
        };
        if !digits.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
            return Err(expected.to_owned());
        }
        let rate = digits.parse::<f64>().map_err(|_| expected.to_owned())? * unit;
        if rate > HIGHEST_PER_S as f64 {
            return Err(format!(
                "no writer reaches more than {HIGHEST_PER_S} writes per second; use max"
            ));
        }
        if rate.fract() != 0.0 {
            return Err(format!("{rate} is not a whole number of writes per second"));
        }
        Ok(Rate::PerSecond(rate as u64))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Rate::Max => f.write_str("max"),
            Rate::PerSecond(rate) => rate.fmt(f),
        }
    }
}

impl Rate {
    /// Whether a writer at this rate sleeps between batches.
    fn sleeps(self) -> bool {
        matches!(self, Rate::PerSecond(rate) if rate <= SLEEP_LIMIT_PER_S)
    }

    /// Writes that are due after this time.
    fn due(self, since_start: Duration) -> u64 {
        match self {
            Rate::Max => u64::MAX,
            Rate::PerSecond(rate) => (since_start.as_nanos() as f64 * rate as f64 / 1e9) as u64,
        }
    }

    /// When a write is due, as time since the start.
    fn time_of(self, write: u64) -> Duration {
        match self {
            Rate::Max => Duration::ZERO,
            Rate::PerSecond(rate) => Duration::from_secs_f64(write as f64 / rate.max(1) as f64),
        }
    }

    /// The rate of one of `writers` writers that reach this rate together.
    pub fn part(self, writer: usize, writers: usize) -> Rate {
        let until = |rate: u64, writer: usize| rate * writer as u64 / writers as u64;
        match self {
            Rate::PerSecond(rate) => Rate::PerSecond(until(rate, writer + 1) - until(rate, writer)),
            Rate::Max => Rate::Max,
        }
    }
}

/// How writes spread over the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Each row is written equally often.
    Uniform,
    /// 3 of 4 writes go to the first of 32 parts, the others to the rest of the rows.
    Skewed,
}

impl Rows {
    /// The row of the next write.
    fn choose(self, random: &mut SplitMix64, rows: usize) -> usize {
        let hot = rows / HOT_PART;
        match self {
            // Fewer than 32 rows have no first part.
            _ if hot == 0 => random.below(rows),
            Rows::Uniform => random.below(rows),
            Rows::Skewed if random.below(4) < 3 => random.below(hot),
            Rows::Skewed => hot + random.below(rows - hot),
        }
    }
}

/// What one writer does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Orders {
    /// Writes per second.
    pub rate: Rate,
    /// Which rows.
    pub rows: Rows,
    /// Seed of the choice of rows.
    pub seed: u64,
    /// Writes of earlier writers, whose values this writer does not store again.
    pub written: u64,
    /// The last of this many rows, a power of two, belongs to another thread; `None` if all rows
    /// belong to the writer.
    pub leaves_each: Option<usize>,
}

/// What one thread of a load leaves behind.
#[derive(Debug)]
pub(super) struct WriteLog {
    /// What the words must contain now.
    pub shadow: Vec<u64>,
    /// Number of writes, or of rounds.
    pub writes: u64,
    /// Gaps by phase.
    pub gaps: Times,
}

/// Gaps between batches.
pub(super) struct Gaps {
    times: Times,
    last_end: Instant,
    last_phase: Phase,
}

impl Gaps {
    /// Starts the first gap now.
    pub fn begin(beside: &Beside) -> Gaps {
        let (last_end, last_phase) = (Instant::now(), beside.stage.phase());
        Gaps { times: Times::new(), last_end, last_phase }
    }

    /// Ends a gap and starts the next one. Returns the time.
    pub fn end(&mut self, beside: &Beside) -> Instant {
        let (now, phase) = (Instant::now(), beside.stage.phase());
        self.times.add(Phase::of_interval(self.last_phase, phase), now - self.last_end);
        (self.last_end, self.last_phase) = (now, phase);
        now
    }

    /// All gaps.
    pub fn times(self) -> Times {
        self.times
    }
}

/// Writes random rows of `slots` until the stage says stop. Adds to the completed writes of
/// `beside`.
pub(super) fn run(
    slots: &[AtomicU64],
    mut shadow: Vec<u64>,
    orders: Orders,
    beside: &Beside,
) -> WriteLog {
    assert_eq!(slots.len(), shadow.len());
    let Orders { rate, rows, seed, written, leaves_each } = orders;
    let left = leaves_each.map_or(usize::MAX, |each| each - 1);
    let mut random = SplitMix64(seed);
    let mut writes = 0u64;
    let sleeps = rate.sleeps();
    let largest_batch = if sleeps { LARGE_BATCH } else { SMALL_BATCH };
    if sleeps {
        wake_punctually();
    }

    let mut gaps = Gaps::begin(beside);
    let start = Instant::now();
    let mut now = start;
    while !beside.stage.stopped() {
        let batch = rate.due(now - start).saturating_sub(writes).min(largest_batch);
        // A spinning writer waits until a full batch is due, so that its clock readings stay cheap.
        if batch == 0 || (!sleeps && batch < SMALL_BATCH) {
            if sleeps {
                sleep(rate.time_of(writes + 1).saturating_sub(now - start));
            } else {
                std::hint::spin_loop();
            }
            now = Instant::now();
            continue;
        }
        for _ in 0..batch {
            let chosen = rows.choose(&mut random, slots.len());
            let row = if chosen & left == left { chosen - 1 } else { chosen };
            writes += 1;
            let value = MARK | (written + writes);
            slots[row].store(value, Ordering::Relaxed);
            shadow[row] = value;
        }
        beside.complete(batch);
        now = gaps.end(beside);
        if sleeps && batch < LARGE_BATCH {
            sleep(TICK);
            now = Instant::now();
        }
    }
    WriteLog { shadow, writes, gaps: gaps.times() }
}

/// Keeps the kernel from rounding up this thread's sleeps by its default of 50 us, which is a whole
/// tick.
fn wake_punctually() {
    // SAFETY: PR_SET_TIMERSLACK takes one integer and changes this thread only. Failure leaves
    // coarser sleeps.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong, 0, 0, 0) };
}

fn sleep(time: Duration) {
    let time = time.clamp(TICK, LONGEST_SLEEP);
    let time = libc::timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
    // SAFETY: `time` is a valid time below one second (`LONGEST_SLEEP`); a null remainder is
    // allowed. An early return through a signal only makes the next batch smaller.
    unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &time, std::ptr::null_mut()) };
}

/// Sebastiano Vigna's SplitMix64: a few instructions, so that the writes determine the writer's
/// speed.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, uniform to one part in 2^64 / `end`.
    fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::lost_words;
    use super::*;

    #[test]
    fn rates_parse() {
        for (text, rate) in [
            ("0", Rate::PerSecond(0)),
            ("500", Rate::PerSecond(500)),
            ("100k", Rate::PerSecond(100_000)),
            ("1.5M", Rate::PerSecond(1_500_000)),
            ("10m", Rate::PerSecond(10_000_000)),
            ("max", Rate::Max),
            ("MAX", Rate::Max),
        ] {
            assert_eq!(text.parse(), Ok(rate), "{text}");
        }
        for text in
            ["", "k", "-1", "+1", "nan", "inf", "1g", "ten", "0.5", "2000m", "1e400", "1 k", "١"]
        {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    fn column(rows: usize) -> (Vec<AtomicU64>, Vec<u64>) {
        let keys: Vec<u64> = (1..=rows as u64).collect();
        (keys.iter().map(|key| AtomicU64::new(*key)).collect(), keys)
    }

    fn run_until(rate: Rate, rows: usize, enough: u64) -> (Vec<AtomicU64>, WriteLog) {
        let (slots, shadow) = column(rows);
        let beside = Beside::new();
        let orders = Orders { rate, rows: Rows::Uniform, seed: 7, written: 0, leaves_each: None };
        let log = thread::scope(|scope| {
            let writer = scope.spawn(|| run(&slots, shadow, orders, &beside));
            while beside.completed() < enough {
                thread::yield_now();
            }
            beside.stage.stop();
            writer.join().unwrap()
        });
        (slots, log)
    }

    #[test]
    fn the_shadow_follows_every_write_and_shows_each_lost_one() {
        for rate in [Rate::PerSecond(200_000), Rate::PerSecond(3_000_000), Rate::Max] {
            let (slots, log) = run_until(rate, 1000, 20_000);
            assert_eq!(lost_words(&slots, &log.shadow), 0);
            assert!(log.writes >= 20_000);
            assert!(log.gaps.count(Phase::Before) > 0);
            assert_eq!(log.gaps.count(Phase::During), 0);
            slots[3].store(4, Ordering::Relaxed);
            slots[999].store(1000, Ordering::Relaxed);
            assert_eq!(lost_words(&slots, &log.shadow), 2);
        }
    }

    #[test]
    fn values_are_marked_and_unique_and_reach_all_rows() {
        let (slots, log) = run_until(Rate::Max, 100, 100_000);
        let mut values: Vec<u64> = slots.iter().map(|slot| slot.load(Ordering::Relaxed)).collect();
        assert!(values.iter().all(|value| value & MARK != 0 && value & !MARK <= log.writes));
        values.sort_unstable();
        values.dedup();
        assert_eq!(values.len(), 100);
    }

    #[test]
    fn a_paced_writer_never_exceeds_its_rate() {
        let start = Instant::now();
        let (_, log) = run_until(Rate::PerSecond(50_000), 10, 5_000);
        assert!(log.writes as f64 <= start.elapsed().as_secs_f64() * 50_000.0 + 1.0);
    }

    #[test]
    fn the_same_seed_gives_the_same_rows() {
        let rows = |seed| {
            let mut random = SplitMix64(seed);
            (0..50).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(rows(1), rows(1));
        assert_ne!(rows(1), rows(2));
        assert!(rows(3).iter().all(|row| *row < 1000));
    }

    #[test]
    fn skewed_writes_go_to_the_first_part_three_times_in_four() {
        let mut random = SplitMix64(1);
        let (rows, tries) = (640, 100_000);
        let mut seen = vec![0u32; rows];
        for _ in 0..tries {
            seen[Rows::Skewed.choose(&mut random, rows)] += 1;
        }
        let hot = f64::from(seen[..rows / HOT_PART].iter().sum::<u32>()) / f64::from(tries);
        assert!((0.74..0.76).contains(&hot), "{hot}");
        assert!(seen.iter().all(|times| *times > 0), "every row is written");
        for rows in [1, 31] {
            assert!((0..100).all(|_| Rows::Skewed.choose(&mut random, rows) < rows));
        }
    }

    #[test]
    fn rows_that_are_left_to_others_are_not_written() {
        let (slots, shadow) = column(64);
        let beside = Beside::new();
        let orders = Orders {
            rate: Rate::Max,
            rows: Rows::Uniform,
            seed: 3,
            written: 0,
            leaves_each: Some(8),
        };
        thread::scope(|scope| {
            scope.spawn(|| run(&slots, shadow, orders, &beside));
            while beside.completed() < 10_000 {
                thread::yield_now();
            }
            beside.stage.stop();
        });
        for (at, slot) in slots.iter().enumerate() {
            assert_eq!(slot.load(Ordering::Relaxed) & MARK == 0, at % 8 == 7, "{at}");
        }
    }

    #[test]
    fn later_writers_store_other_values() {
        let (slots, log) = run_until(Rate::Max, 10, 1000);
        let beside = Beside::new();
        let orders = Orders {
            rate: Rate::Max,
            rows: Rows::Skewed,
            seed: 1,
            written: log.writes,
            leaves_each: None,
        };
        let later = thread::scope(|scope| {
            let writer = scope.spawn(|| run(&slots, log.shadow.clone(), orders, &beside));
            while beside.completed() < 1000 {
                thread::yield_now();
            }
            beside.stage.stop();
            writer.join().unwrap()
        });
        assert_eq!(lost_words(&slots, &later.shadow), 0);
        assert!(later.shadow.iter().all(|value| !log.shadow.contains(value)));
    }
}
