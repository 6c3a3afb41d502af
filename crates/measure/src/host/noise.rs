//! Noise: how much of the machine something else had while a measurement ran. Pure.

use super::cgroup::Throttled;
use crate::document::{Body, Section, Value, fact};
use crate::figures::{human_ns, percent};

/// The most steal, as a share of CPU time. The hypervisor takes a CPU away for milliseconds at
/// once, so even a small share decides the longest waits, although medians hardly change. A share
/// of 1 % is 10 ms in each second of a CPU: longer than most short jobs.
pub const MOST_STEAL: f64 = 0.01;
/// The most CPU time of others, as a share of the capacity. Where a load uses all CPUs, others take
/// as large a share of its time, and results compare engines that differ by a few percent. Others
/// use caches and bandwidth besides.
pub const MOST_OTHERS: f64 = 0.05;

/// The difference between two readings of the kernel's counters. `None`: the kernel does not count
/// it, or the time was too short for its ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// The time between the readings.
    pub elapsed_ns: u64,
    /// Steal: the share of the CPU time that the hypervisor gave to other machines. A guest whose
    /// hypervisor does not tell counts 0.
    pub steal: Option<f64>,
    /// The share of the capacity of all CPUs that was neither idle nor used by this process or its
    /// children. Threads of the kernel and interrupts are in it, also those that work for this
    /// process. Steal is not in it. A kernel without CONFIG_PARAVIRT_TIME_ACCOUNTING adds steal to
    /// the time of the process that it interrupts; there the share can be too low by that of steal.
    pub others: Option<f64>,
    /// CPU quotas that stopped threads in the cgroups of this process.
    pub throttled: Option<Throttled>,
    /// How often heat slowed CPUs down: the rise of the counter that rose most. A sum over CPUs
    /// would count an event of a whole processor once for each CPU.
    pub thermal_events: Option<u64>,
}

impl Noise {
    /// One sentence for each figure beyond its bound: the figure, the bound and the remedy.
    pub fn warnings(&self) -> Vec<String> {
        let steal = self.steal.filter(|share| *share > MOST_STEAL).map(|share| {
            format!(
                "the hypervisor gave {} of the CPU time to other machines (steal; bound {}); \
                 repeat when the host is quiet, or on a dedicated host",
                percent(share),
                percent(MOST_STEAL)
            )
        });
        let others = self.others.filter(|share| *share > MOST_OTHERS).map(|share| {
            format!(
                "other processes and the kernel used {} of the capacity of all CPUs (bound {}); \
                 stop the processes that `top` shows beside this one, and repeat",
                percent(share),
                percent(MOST_OTHERS)
            )
        });
        let throttled = self.throttled.filter(|found| *found != Throttled::default()).map(|found| {
            format!(
                "the CPU quota of the cgroup stopped threads in {}, for {} summed over CPUs (bound \
                 0); raise the quota (cpu.max), or measure outside of the group",
                times(found.periods, "period"),
                human_ns(found.ns)
            )
        });
        let thermal = self.thermal_events.filter(|events| *events > 0).map(|events| {
            format!(
                "heat slowed CPUs down: {} (bound 0); cool the machine, or lower its frequency, \
                 and repeat",
                times(events, "thermal event")
            )
        });
        [steal, others, throttled, thermal].into_iter().flatten().collect()
    }

    /// The noise as a section of a result.
    pub fn section(&self) -> Section {
        let throttled =
            |value: fn(Throttled) -> Value| self.throttled.map_or(Value::Unknown, value);
        let facts = vec![
            fact("elapsed_ns", "watched for", Value::Ns(self.elapsed_ns)),
            fact("steal_ratio", "steal", Value::share(self.steal))
                .remark("of the CPU time, for other machines of the host"),
            fact("others_ratio", "others", Value::share(self.others))
                .remark("of the capacity of all CPUs, for other processes and the kernel"),
            fact(
                "throttled_periods",
                "throttled periods",
                throttled(|found| Value::Count(found.periods)),
            )
            .remark("in which the CPU quota of the cgroup was used up"),
            fact("throttled_ns", "throttled for", throttled(|found| Value::Ns(found.ns)))
                .remark("summed over CPUs"),
            fact(
                "thermal_events",
                "thermal events",
                self.thermal_events.map_or(Value::Unknown, Value::Count),
            ),
        ];
        Section::new("noise", "Noise", Body::Facts(facts))
    }
}

/// `1 period`, `2 periods`.
fn times(count: u64, name: &str) -> String {
    format!("{count} {name}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;
    use crate::export::Format;

    const QUIET: Noise = Noise {
        elapsed_ns: 2_000_000_000,
        steal: Some(MOST_STEAL),
        others: Some(MOST_OTHERS),
        throttled: Some(Throttled { periods: 0, ns: 0 }),
        thermal_events: Some(0),
    };
    const UNKNOWN: Noise =
        Noise { elapsed_ns: 1, steal: None, others: None, throttled: None, thermal_events: None };

    #[test]
    fn figures_at_their_bounds_and_unknown_ones_cause_no_warning() {
        assert_eq!(QUIET.warnings(), [""; 0]);
        assert_eq!(UNKNOWN.warnings(), [""; 0]);
    }

    #[test]
    fn each_figure_beyond_its_bound_is_named_with_bound_and_remedy() {
        let throttled = |periods, ns| Noise { throttled: Some(Throttled { periods, ns }), ..QUIET };
        for (noise, parts) in [
            (Noise { steal: Some(0.0101), ..QUIET }, ["1.0 % of", "bound 1.0 %", "dedicated"]),
            (Noise { others: Some(0.25), ..QUIET }, ["25.0 % of", "bound 5.0 %", "`top`"]),
            (throttled(0, 7_000), ["0 periods, for 7.00 us", "bound 0", "cpu.max"]),
            (throttled(1, 0), ["1 period, for 0 ns", "bound 0", "cpu.max"]),
            (Noise { thermal_events: Some(3), ..QUIET }, ["3 thermal events", "bound 0", "cool"]),
        ] {
            let warnings = noise.warnings();
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(parts.iter().all(|part| warnings[0].contains(part)), "{warnings:?}");
        }
        let all = Noise { steal: Some(1.0), others: Some(1.0), thermal_events: Some(1), ..QUIET };
        assert_eq!(all.warnings().len(), 3);
    }

    #[test]
    fn the_section_has_units_and_unknown_figures_are_null() {
        let json = |noise: Noise| -> serde_json::Value {
            let document = Document { sections: vec![noise.section()] };
            serde_json::from_str(&Format::Json.write(&document)).unwrap()
        };
        let known = Noise { throttled: Some(Throttled { periods: 2, ns: 9 }), ..QUIET };
        assert_eq!(
            json(known)["noise"],
            serde_json::json!({
                "elapsed_ns": 2_000_000_000u64, "steal_ratio": 0.01, "others_ratio": 0.05,
                "throttled_periods": 2, "throttled_ns": 9, "thermal_events": 0
            })
        );
        let unknown = json(UNKNOWN);
        let facts = unknown["noise"].as_object().unwrap();
        assert_eq!(facts.values().filter(|value| value.is_null()).count(), 5, "{unknown}");
    }
}
