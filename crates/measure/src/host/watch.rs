//! Reads the kernel's counters before and after a measurement.

use std::time::{Duration, Instant};

use pageleap::topology::SysFiles;

use super::cgroup::{Throttled, throttled};
use super::counters::{CpuTicks, ThermalCounts, thermal_counts, thermal_events};
use super::noise::Noise;

/// The shortest time in which ticks can be judged. Counters of a CPU are exact to one tick of 10
/// ms, which is 2 % of this time, and so less than half of the bound on the CPU time of others.
const SHORTEST: Duration = Duration::from_millis(500);
/// The fewest ticks of all CPUs together that can be judged: one tick is then half of the bound on
/// steal.
const LEAST_TICKS: u64 = 200;

/// A measurement that is being watched. Between [`start`](Watch::start) and
/// [`so_far`](Watch::so_far) nothing is read, and no thread runs.
#[derive(Clone, Debug)]
pub struct Watch {
    files: SysFiles,
    start: Times,
    throttled: Option<Throttled>,
    thermal: ThermalCounts,
}

impl Watch {
    /// Reads the counters for the first time. They are those of `files`, but this process's own CPU
    /// time is that of the machine that it runs on.
    pub fn start(files: &SysFiles) -> Watch {
        // The fields are read from top to bottom, so that the slow files are read before the time
        // is taken.
        Watch {
            throttled: throttled(files),
            thermal: thermal_counts(files),
            files: files.clone(),
            start: Times::read(files),
        }
    }

    /// Reads the counters again. It may be called several times: each result is about all of the
    /// time since the start.
    pub fn so_far(&self) -> Noise {
        let end = Times::read(&self.files);
        let ticks_per_s = pageleap_sys::clock_ticks_per_s();
        let (steal, others) = end.shares(&self.start, ticks_per_s);
        Noise {
            elapsed_ns: end.at.duration_since(self.start.at).as_nanos() as u64,
            steal,
            others,
            throttled: self
                .throttled
                .and_then(|before| Some(throttled(&self.files)?.since(before))),
            thermal_events: thermal_events(&self.thermal, &thermal_counts(&self.files)),
        }
    }
}

/// The times at one moment.
#[derive(Clone, Copy, Debug)]
struct Times {
    at: Instant,
    /// CPU time of this process and its children that have ended.
    own_ns: Option<u64>,
    /// CPU time of all CPUs.
    ticks: Option<CpuTicks>,
}

impl Times {
    fn read(files: &SysFiles) -> Times {
        Times {
            ticks: CpuTicks::read(files),
            own_ns: pageleap_sys::process_cpu_time_ns().ok(),
            at: Instant::now(),
        }
    }

    /// The shares of steal and of others since `start`. `None` if the time was too short, or if a
    /// counter is missing.
    fn shares(&self, start: &Times, ticks_per_s: Option<u64>) -> (Option<f64>, Option<f64>) {
        let rise = || Some(self.ticks?.since(start.ticks?));
        let is_long = self.at.duration_since(start.at) >= SHORTEST;
        let Some(rise) = rise().filter(|rise| is_long && rise.total() >= LEAST_TICKS) else {
            return (None, None);
        };
        let total = rise.total() as f64;
        let others = || {
            let own_s = self.own_ns?.saturating_sub(start.own_ns?) as f64 / 1e9;
            let others = rise.busy() as f64 - own_s * ticks_per_s? as f64;
            // Ticks are coarser than the process's own clock, so the difference can be negative.
            Some(others.max(0.0) / total)
        };
        (Some(rise.steal() as f64 / total), others())
    }
}

#[cfg(test)]
mod tests {
    use super::super::trees::Tree;
    use super::*;

    /// user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice.
    const START: &str = "cpu  1000 100 500 9000 50 10 20 30 7 0\nintr 5\n";
    /// 400 ticks more: 100 user, 20 nice, 40 system, 160 idle, 10 iowait, 4 irq, 6 softirq, 60
    /// steal. 170 of them are busy.
    const END: &str = "cpu  1100 120 540 9160 60 14 26 90 9 0\nintr 6\n";

    /// The times of a machine with this `/proc/stat`, `ms` after the base.
    fn times(base: Instant, stat: &str, ms: u64, own_ms: u64) -> Times {
        let tree = Tree::new(&[("proc/stat", stat)]);
        Times {
            at: base + Duration::from_millis(ms),
            own_ns: Some(own_ms * 1_000_000),
            ..Times::read(&tree.files())
        }
    }

    fn shares(start: &str, end: &str, ms: u64, own_ms: u64) -> (Option<f64>, Option<f64>) {
        let base = Instant::now();
        times(base, end, ms, 5_000 + own_ms).shares(&times(base, start, 0, 5_000), Some(100))
    }

    #[test]
    fn a_pair_of_readings_has_known_shares() {
        // Own CPU time of 1.3 s is 130 ticks, so that others have 40 of 400.
        assert_eq!(shares(START, END, 2_000, 1_300), (Some(0.15), Some(0.1)));
        assert_eq!(shares(START, END, 2_000, 0).1, Some(170.0 / 400.0));
        // Own CPU time beyond the busy ticks leaves nothing for others.
        assert_eq!(shares(START, END, 2_000, 3_000).1, Some(0.0));
    }

    #[test]
    fn a_short_time_and_few_ticks_are_not_judged() {
        assert_eq!(shares(START, END, 499, 0), (None, None));
        assert!(shares(START, END, 500, 0).0.is_some());
        let few = |idle: u64| format!("cpu  1000 100 500 {idle} 50 10 20 30 7 0\n");
        assert_eq!(shares(START, &few(9_199), 2_000, 0), (None, None));
        assert_eq!(shares(START, &few(9_200), 2_000, 0), (Some(0.0), Some(0.0)));
        // Some sandboxes write zeros.
        let zeros = "cpu  0 0 0 0 0 0 0 0 0 0\n";
        assert_eq!(shares(zeros, zeros, 2_000, 0), (None, None));
    }

    #[test]
    fn a_missing_counter_leaves_only_its_own_figures_unknown() {
        assert_eq!(shares("", END, 2_000, 0), (None, None));
        assert_eq!(shares(START, "cpu  x\n", 2_000, 0), (None, None));
        let base = Instant::now();
        let [start, end] = [times(base, START, 0, 0), times(base, END, 2_000, 0)];
        assert_eq!(end.shares(&start, None), (Some(0.15), None));
        let blind = Times { own_ns: None, ..start };
        assert_eq!(end.shares(&blind, Some(100)), (Some(0.15), None));
    }

    #[test]
    fn counters_of_heat_and_of_the_cgroup_are_compared_with_the_start() {
        const THERMAL: &str = "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count";
        const STAT: &str = "sys/fs/cgroup/job/cpu.stat";
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/job\n"),
            (STAT, "nr_throttled 3\nthrottled_usec 100\n"),
            (THERMAL, "4\n"),
        ]);
        let watch = Watch::start(&tree.files());
        let quiet = watch.so_far();
        assert_eq!((quiet.thermal_events, quiet.throttled), (Some(0), Some(Throttled::default())));
        tree.write(STAT, "nr_throttled 5\nthrottled_usec 107\n");
        tree.write(THERMAL, "6\n");
        let noise = watch.so_far();
        assert_eq!(noise.throttled, Some(Throttled { periods: 2, ns: 7_000 }));
        assert_eq!(noise.thermal_events, Some(2));
        assert_eq!((noise.steal, noise.others), (None, None));
        assert!(noise.elapsed_ns > quiet.elapsed_ns);
        assert_eq!(noise.warnings().len(), 2);
        // Nothing is known about a machine without these files.
        let none = Watch::start(&Tree::new(&[]).files()).so_far();
        assert_eq!((none.throttled, none.thermal_events), (None, None));
    }

    #[test]
    #[cfg(not(miri))]
    fn this_machine_counts_its_cpu_time() {
        let watch = Watch::start(&SysFiles::host());
        let start = watch.start;
        assert!(start.ticks.is_some_and(|ticks| ticks.total() > 0));
        // One thread works until the machine has counted enough, and the shares are known.
        let noise = std::iter::repeat_with(|| watch.so_far()).find(|noise| noise.steal.is_some());
        let others = noise.and_then(|noise| noise.others).unwrap();
        let end = Times::read(&SysFiles::host());
        assert!((0.0..=1.0).contains(&others), "{others}");
        assert!(end.own_ns > start.own_ns && end.at > start.at);
    }
}
