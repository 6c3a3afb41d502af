//! The phase of a run, as the threads beside the leap see it, and times by phase.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;

/// The longest time that is recorded; longer times count as this one.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Significant figures of recorded times.
const FIGURES: u8 = 3;

/// All phases, in the order of arrays that have an entry for each phase.
pub const PHASES: [Phase; 4] = [Phase::Before, Phase::Memcpy, Phase::During, Phase::After];

/// A part of the run, by the event beside the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing: the leap has not started.
    Before,
    /// A thread copies the region by memcpy, for comparison with the leap.
    Memcpy,
    /// The job is under way.
    During,
    /// The job has ended.
    After,
}

impl Phase {
    /// The phase of an interval that began in `from` and ended in `to`: an interval that overlaps
    /// the leap is `During`. Of the others, one that overlaps the memcpy is `Memcpy`.
    pub fn of_interval(from: Phase, to: Phase) -> Phase {
        match (from, to) {
            (Phase::Before, Phase::Memcpy) | (Phase::Memcpy, Phase::Before) => Phase::Memcpy,
            _ if from == to => from,
            _ => Phase::During,
        }
    }
}

/// The current phase, and whether the load's threads are to end.
///
/// All accesses are relaxed: the values order nothing. A thread that sees a new phase a little late
/// files one more result under the old one.
#[derive(Debug)]
pub struct Stage {
    phase: AtomicU8,
    stop: AtomicBool,
}

impl Default for Stage {
    fn default() -> Stage {
        Stage::new()
    }
}

impl Stage {
    /// Before the leap, not stopped.
    pub fn new() -> Stage {
        Stage { phase: AtomicU8::new(Phase::Before as u8), stop: AtomicBool::new(false) }
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Before,
            1 => Phase::Memcpy,
            2 => Phase::During,
            _ => Phase::After,
        }
    }

    /// Sets the phase.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Whether the threads are to end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Tells the threads to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Tells the threads to end when the measurement ends, even by an error, because the scope that
/// started them waits for them.
pub struct StopOnDrop<'a>(pub &'a Stage);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Times by phase.
#[derive(Debug)]
pub struct Times([Histogram<u32>; PHASES.len()]);

impl Default for Times {
    fn default() -> Times {
        Times::new()
    }
}

impl Times {
    /// No times yet.
    pub fn new() -> Times {
        Times(PHASES.map(|_| empty()))
    }

    /// Adds one time to those of `phase`.
    pub fn add(&mut self, phase: Phase, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(LONGEST_NS);
        self.0[phase as usize].saturating_record(ns);
    }

    /// Adds all of `other`.
    pub fn join(&mut self, other: &Times) {
        for (mine, others) in self.0.iter_mut().zip(&other.0) {
            mine.add(others).expect("the bounds are the same");
        }
    }

    /// How many times there are in `phase`.
    pub fn count(&self, phase: Phase) -> u64 {
        self.0[phase as usize].len()
    }

    /// The time that this share of the times of `phase` does not exceed; `None` without times.
    pub fn quantile_ns(&self, phase: Phase, share: f64) -> Option<u64> {
        let histogram = &self.0[phase as usize];
        (!histogram.is_empty()).then(|| histogram.value_at_quantile(share))
    }

    /// The times of `phase` in five numbers; `None` without times.
    pub fn spread(&self, phase: Phase) -> Option<Spread> {
        spread(&self.0[phase as usize])
    }

    /// The times of several phases together in five numbers; `None` without times.
    pub fn spread_of_all(&self, phases: &[Phase]) -> Option<Spread> {
        let mut all = empty();
        for phase in phases {
            all.add(&self.0[*phase as usize]).expect("the bounds are the same");
        }
        spread(&all)
    }

    /// The times of `phase` that occurred, each with how often, the shortest first. Times are kept
    /// to three significant figures.
    pub fn counts(&self, phase: Phase) -> impl Iterator<Item = (u64, u64)> {
        let recorded = self.0[phase as usize].iter_recorded();
        recorded.map(|step| (step.value_iterated_to(), u64::from(step.count_at_value())))
    }
}

/// A histogram without times. Its bounds are fixed, so that recording never allocates.
fn empty() -> Histogram<u32> {
    Histogram::new_with_bounds(1, LONGEST_NS, FIGURES).expect("the bounds are valid")
}

/// The times of a histogram in five numbers; `None` without times.
fn spread(of: &Histogram<u32>) -> Option<Spread> {
    (!of.is_empty()).then(|| Spread {
        count: of.len(),
        p50_ns: of.value_at_quantile(0.5),
        p99_ns: of.value_at_quantile(0.99),
        p999_ns: of.value_at_quantile(0.999),
        max_ns: of.value_at_quantile(1.0),
    })
}

/// Times in five numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// How many times there are.
    pub count: u64,
    /// Half of the times are not longer.
    pub p50_ns: u64,
    /// 99 of 100 times are not longer.
    pub p99_ns: u64,
    /// 999 of 1,000 times are not longer.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_that_overlaps_the_leap_is_during() {
        use Phase::{After, Before, During, Memcpy};
        for (from, to, phase) in [
            (Before, Before, Before),
            (Before, Memcpy, Memcpy),
            (Memcpy, Memcpy, Memcpy),
            (Memcpy, Before, Memcpy),
            (Memcpy, During, During),
            (Memcpy, After, During),
            (Before, During, During),
            (Before, After, During),
            (During, During, During),
            (During, After, During),
            (After, After, After),
        ] {
            assert_eq!(Phase::of_interval(from, to), phase);
        }
    }

    #[test]
    fn times_keep_three_figures_by_phase() {
        let mut times = Times::new();
        for ms in 1..=1000 {
            times.add(Phase::During, Duration::from_millis(ms));
        }
        times.add(Phase::After, Duration::from_secs(1_000_000));
        let close =
            |ns: Option<u64>, expected: f64| (ns.unwrap() as f64 / expected - 1.0).abs() < 0.002;
        assert!(close(times.quantile_ns(Phase::During, 0.5), 500e6));
        assert!(close(times.quantile_ns(Phase::During, 0.999), 999e6));
        assert!(close(times.quantile_ns(Phase::During, 1.0), 1000e6));
        assert!(close(times.quantile_ns(Phase::After, 1.0), LONGEST_NS as f64));
        assert_eq!(times.quantile_ns(Phase::Before, 0.5), None);
        let Spread { count, p50_ns, p99_ns, p999_ns, max_ns } =
            times.spread(Phase::During).unwrap();
        assert_eq!(count, 1000);
        for (ns, expected) in [(p50_ns, 500e6), (p99_ns, 990e6), (p999_ns, 999e6), (max_ns, 1e9)] {
            assert!(close(Some(ns), expected), "{ns} {expected}");
        }
        assert_eq!(times.spread(Phase::Before), None);
        assert_eq!(times.spread_of_all(&[Phase::Before]), None);
        let all = times.spread_of_all(&[Phase::During, Phase::After]).unwrap();
        assert_eq!(all.count, 1001);
        // The time after the leap is the longest, and only one of them.
        assert!(close(Some(all.p99_ns), 991e6) && close(Some(all.max_ns), LONGEST_NS as f64));
        assert_eq!(PHASES.map(|phase| times.count(phase)), [0, 0, 1000, 1]);
        let mut joined = Times::new();
        joined.add(Phase::Before, Duration::from_millis(1));
        joined.join(&times);
        assert_eq!(PHASES.map(|phase| joined.count(phase)), [1, 0, 1000, 1]);
        let counts: Vec<(u64, u64)> = joined.counts(Phase::During).collect();
        assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        assert!(counts.is_sorted() && close(Some(counts[0].0), 1e6));
    }

    #[test]
    fn a_stage_goes_through_its_phases() {
        let stage = Stage::new();
        assert_eq!(stage.phase(), Phase::Before);
        for phase in PHASES {
            stage.enter(phase);
            assert_eq!(stage.phase(), phase);
        }
        assert!(!stage.stopped());
        stage.stop();
        assert!(stage.stopped());
    }
}
