//! A thread that writes random words, each time with a value that no other write stores.
//!
//! The value is a mark and the number of the write. The writer stores the same value to the same
//! word of the shadow copy, in ordinary memory that nothing moves. When the writer has ended, each
//! word that differs from its shadow has lost its last write.
//!
//! The writer reads the clock once per batch of writes, which ends a gap. Up to
//! [`SLEEP_LIMIT_PER_S`] it sleeps between batches (for [`TICK`], or until the next write is due)
//! and does not occupy a CPU, so its ordinary gap is a tick. Above that rate it spins, and batches
//! have [`SMALL_BATCH`] writes. Writes that became due during a stall are made up at full speed,
//! but not after the end of their spell.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Beside;
use super::demand::{Rate, Rows};
use super::gaps::Gaps;
use super::spells::{Spell, Spells};
use crate::phase::{PHASES, Times};
use crate::random::SplitMix64;

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
/// Set in every value that a writer stores, and in no value that was there before.
const MARK: u64 = 1 << 63;
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
}

/// The orders of one writer.
#[derive(Debug)]
pub(super) struct Orders {
    /// How the writer writes.
    pub spells: Spells,
    /// Seed of the choice of rows.
    pub seed: u64,
    /// The number of writes before this writer, whose values it does not store again.
    pub written: u64,
    /// The most writes.
    pub total: Option<u64>,
    /// One row of this many, the last, belongs to another thread. A power of two; `None` if all
    /// rows belong to the writer.
    pub leaves_each: Option<usize>,
}

/// A number of writes, and the time that they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub writes: u64,
    /// The time.
    pub ns: u64,
}

impl Tally {
    /// Adds another tally.
    pub fn join(&mut self, other: Tally) {
        self.writes += other.writes;
        self.ns += other.ns;
    }

    /// Writes per second; `None` without time.
    pub fn per_s(self) -> Option<f64> {
        (self.ns > 0).then(|| self.writes as f64 * 1e9 / self.ns as f64)
    }
}

/// The results of one thread of a load.
#[derive(Debug)]
pub(super) struct WriteLog {
    /// The expected contents of the words.
    pub shadow: Vec<u64>,
    /// Number of writes, or of rounds.
    pub writes: u64,
    /// Gaps by phase.
    pub gaps: Times,
    /// For a changing load: its writes at full speed, by phase.
    pub full_speed: [Tally; PHASES.len()],
}

/// Writes random rows of `slots` until the stage is stopped. Adds to the completed writes of
/// `beside`.
pub(super) fn run(
    slots: &[AtomicU64],
    shadow: Vec<u64>,
    orders: Orders,
    beside: &Beside,
) -> WriteLog {
    assert_eq!(slots.len(), shadow.len());
    let Orders { mut spells, seed, written, total, leaves_each } = orders;
    let mut writer = Writer {
        slots,
        beside,
        random: SplitMix64(seed),
        left: leaves_each.map_or(usize::MAX, |each| each - 1),
        written,
        total: total.unwrap_or(u64::MAX),
        counts_full_speed: spells.change(),
        gaps: Gaps::begin(beside),
        log: WriteLog { shadow, writes: 0, gaps: Times::new(), full_speed: Default::default() },
    };
    wake_punctually();
    if spells.change() {
        // Lets waiting code see that the load has begun, even if the first spell is quiet.
        writer.write(1, Rows::Uniform);
    }
    let mut start = Instant::now();
    let mut spell = spells.next();
    loop {
        writer.go_through(spell, start);
        if beside.stage.stopped() {
            return writer.finish(spell);
        }
        start += spell.length;
        let before = std::mem::replace(&mut spell, spells.next());
        if before.is_quiet() {
            writer.gaps.resume(start, beside);
        }
    }
}

/// A writer at work.
struct Writer<'a> {
    slots: &'a [AtomicU64],
    beside: &'a Beside,
    random: SplitMix64,
    /// Rows whose lowest bits are these belong to another thread.
    left: usize,
    written: u64,
    total: u64,
    counts_full_speed: bool,
    gaps: Gaps,
    log: WriteLog,
}

impl Writer<'_> {
    /// Writes according to the spell until that is over, or the stage is stopped.
    fn go_through(&mut self, spell: Spell, start: Instant) {
        let Spell { rate, rows, length } = spell;
        let counts = self.counts_full_speed && rate == Rate::Max;
        let sleeps = rate.sleeps();
        let largest_batch = if sleeps { LARGE_BATCH } else { SMALL_BATCH };
        let mut writes = 0;
        let mut now = Instant::now();
        while now.saturating_duration_since(start) < length && !self.beside.stage.stopped() {
            let passed = now.saturating_duration_since(start);
            let left = self.total.saturating_sub(self.log.writes);
            if left == 0 {
                sleep(LONGEST_SLEEP);
                now = Instant::now();
                continue;
            }
            let batch = rate.due(passed).saturating_sub(writes).min(largest_batch).min(left);
            // A spinning writer waits until a full batch is due, so that its clock readings stay
            // cheap.
            if batch == 0 || (!sleeps && batch < SMALL_BATCH.min(left)) {
                if sleeps {
                    sleep(rate.time_of(writes + 1).min(length).saturating_sub(passed));
                } else {
                    std::hint::spin_loop();
                }
                now = Instant::now();
                continue;
            }
            self.write(batch, rows);
            writes += batch;
            let end = self.gaps.end(self.beside);
            if counts {
                let ns = u64::try_from(end.gap.as_nanos()).unwrap_or(u64::MAX);
                self.log.full_speed[end.phase as usize].join(Tally { writes: batch, ns });
            }
            now = end.now;
            if sleeps && batch < LARGE_BATCH {
                sleep(TICK);
                now = Instant::now();
            }
        }
    }

    /// Writes `batch` rows, which `rows` chooses.
    fn write(&mut self, batch: u64, rows: Rows) {
        for _ in 0..batch {
            let chosen = rows.choose(&mut self.random, self.slots.len());
            let row = if chosen & self.left == self.left { chosen - 1 } else { chosen };
            self.log.writes += 1;
            let value = MARK | (self.written + self.log.writes);
            self.slots[row].store(value, Ordering::Relaxed);
            self.log.shadow[row] = value;
        }
        self.beside.complete(batch);
    }

    /// The results of the writer. In a quiet spell it was not waiting for anything, so the open gap
    /// does not count.
    fn finish(self, last: Spell) -> WriteLog {
        let gaps = if last.is_quiet() { self.gaps.ended() } else { self.gaps.finish(self.beside) };
        WriteLog { gaps, ..self.log }
    }
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::{MEAN_SPELL, Pattern, lost_words};
    use super::*;
    use crate::phase::Phase;

    fn orders(pattern: Pattern, seed: u64) -> Orders {
        Orders {
            spells: Spells::new(pattern, seed, 0, 1),
            seed,
            written: 0,
            total: None,
            leaves_each: None,
        }
    }

    fn steady(rate: Rate, rows: Rows, seed: u64) -> Orders {
        orders(Pattern::Steady { rate, rows }, seed)
    }

    fn column(rows: usize) -> (Vec<AtomicU64>, Vec<u64>) {
        let keys: Vec<u64> = (1..=rows as u64).collect();
        (keys.iter().map(|key| AtomicU64::new(*key)).collect(), keys)
    }

    fn run_until(rate: Rate, rows: usize, enough: u64) -> (Vec<AtomicU64>, WriteLog) {
        let (slots, shadow) = column(rows);
        let beside = Beside::new();
        let orders = steady(rate, Rows::Uniform, 7);
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
    fn a_writer_with_a_total_writes_no_more() {
        let slots: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        for (rate, total) in [(Rate::Max, 1003), (Rate::PerSecond(900_000), 77)] {
            let beside = Beside::new();
            let orders = Orders { total: Some(total), ..steady(rate, Rows::Uniform, 1) };
            let log = std::thread::scope(|scope| {
                let writer = scope.spawn(|| run(&slots, vec![0; slots.len()], orders, &beside));
                while beside.completed() < total {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(20));
                beside.stage.stop();
                writer.join().unwrap()
            });
            assert_eq!((log.writes, beside.completed()), (total, total));
        }
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
    fn rows_that_are_left_to_others_are_not_written() {
        let (slots, shadow) = column(64);
        let beside = Beside::new();
        let orders = Orders { leaves_each: Some(8), ..steady(Rate::Max, Rows::Uniform, 3) };
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
        let orders = Orders { written: log.writes, ..steady(Rate::Max, Rows::Skewed, 1) };
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

    #[test]
    fn a_changing_writer_loses_nothing_and_counts_what_it_writes_at_full_speed() {
        let (slots, shadow) = column(1000);
        let beside = Beside::new();
        let log = thread::scope(|scope| {
            let writer = scope.spawn(|| run(&slots, shadow, orders(Pattern::Changing, 2), &beside));
            // Waits until it has begun, has been quiet, and has written again.
            let quiet = || {
                let before = beside.completed();
                thread::sleep(MEAN_SPELL / 10);
                before > 0 && beside.completed() == before
            };
            for again in [false, true] {
                while quiet() == again {
                    thread::yield_now();
                }
            }
            // Spells of 100,000 writes per second do not reach this number before one at full speed
            // follows.
            while beside.completed() < 500_000 {
                thread::yield_now();
            }
            beside.stage.stop();
            writer.join().unwrap()
        });
        assert_eq!(lost_words(&slots, &log.shadow), 0);
        let counted = log.full_speed[Phase::Before as usize];
        assert!(counted.writes > 0 && counted.writes < log.writes, "{counted:?}");
        assert!(counted.per_s().is_some(), "{counted:?}");
        assert_eq!(log.full_speed[Phase::During as usize].per_s(), None);
    }

    #[test]
    fn a_quiet_spell_is_no_gap() {
        let (slots, shadow) = column(100);
        let beside = Beside::new();
        let mut writer = Writer {
            slots: &slots,
            beside: &beside,
            random: SplitMix64(1),
            left: usize::MAX,
            total: u64::MAX,
            written: 0,
            counts_full_speed: true,
            gaps: Gaps::begin(&beside),
            log: WriteLog { shadow, writes: 0, gaps: Times::new(), full_speed: Default::default() },
        };
        let length = Duration::from_millis(2);
        let quiet = Spell { rate: Rate::PerSecond(0), rows: Rows::Uniform, length };
        writer.go_through(quiet, Instant::now());
        assert_eq!(writer.log.writes, 0);
        assert_eq!(writer.finish(quiet).gaps.count(Phase::Before), 0);
    }
}
