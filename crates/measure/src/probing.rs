//! What a probe of the latency of memory is worth, beside the sweep that it replaces: its result, its
//! cost, and what it takes from a bystander.
//!
//! *Latency-aware page-table migration* (section 4.1.1) sweeps 64 MB for each pair of nodes. The
//! prober of this project loads about 2000 lines, which it flushes before
//! ([`pageleap::latency::Probe`]). Both are measured here in turns, in one run:
//!
//! * the latency that each finds, alone and beside threads that read as fast as they can;
//! * the CPU time of each;
//! * a bystander on another CPU, whose data is in a cache: how much of its time each one costs it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pageleap::latency::{Chain, Order, Probe};

use crate::Error;
use crate::matrix::{Buffers, Initiator, Kind, Traffic, on_cpu, start};
use crate::memcpy::cpu_ns;
use crate::statistics::median;

/// Bytes of the sweep of the paper, whose loads are all of its lines.
pub const SWEEP_BYTES: usize = 64 << 20;
/// Loads between two readings of the clock.
const BATCH: usize = 512;
/// Loads by which the latency of the large buffer is found.
const LOADS: usize = 1 << 17;
/// How long the bystander works in each condition.
const SLICE: Duration = Duration::from_millis(200);
/// Bytes of a buffer for probes, as a prober has it.
const PROBED_BYTES: usize = 4 << 20;
/// Bytes of a line.
const LINE: usize = 64;

/// A probe and a sweep under the same conditions, in one run.
#[derive(Clone, Copy, Debug)]
pub struct Both {
    /// That of a probe.
    pub probe: f64,
    /// That of a sweep.
    pub sweep: f64,
}

impl Both {
    /// That of the probe divided by that of the sweep.
    pub fn ratio(self) -> f64 {
        self.probe / self.sweep
    }
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Nanoseconds of a load.
    pub idle_ns: Both,
    /// The same beside threads that read on all other CPUs of the node.
    pub loaded_ns: Both,
    /// What these threads read, in bytes per second.
    pub load_bytes_per_s: f64,
    /// CPU time; `None` if the kernel does not say.
    pub cpu_ns: Option<Both>,
    /// The time that a bystander on another CPU loses by one probe, and by one sweep of
    /// [`SWEEP_BYTES`].
    pub lost_ns: Both,
}

/// The memory of the measurement, and the CPUs.
pub struct Probing<'a> {
    initiator: &'a Initiator,
    buffers: Buffers,
    bystander_bytes: usize,
}

impl<'a> Probing<'a> {
    /// Takes memory of the initiator's own node: `buffer_bytes` for the loads, which have to exceed
    /// the caches, and as much for threads that read. The data of the bystander has
    /// `bystander_bytes`, which have to fit a cache.
    ///
    /// # Errors
    /// The memory cannot be had.
    ///
    /// # Panics
    /// If the initiator has one core only.
    pub fn new(
        initiator: &'a Initiator,
        buffer_bytes: u64,
        bystander_bytes: usize,
    ) -> Result<Probing<'a>, Error> {
        assert!(!initiator.injectors.is_empty(), "a bystander needs a core");
        let node = initiator.node;
        let least = (SWEEP_BYTES + PROBED_BYTES + bystander_bytes).next_multiple_of(2 << 20);
        let bytes = buffer_bytes.max(least as u64);
        let buffers = Buffers::new(initiator, node, pageleap::PageSize::Base, bytes, true)?;
        Ok(Probing { initiator, buffers, bystander_bytes })
    }

    /// Measures once. `nth` decides whether the probe or the sweep is first.
    ///
    /// # Errors
    /// Threads cannot be started or bound.
    pub fn run(&self, nth: usize) -> Result<Run, Error> {
        let (chased, traffic) = (self.buffers.chased()?, self.buffers.traffic()?);
        let own = &self.initiator.cpus[0];
        let mut chain = Chain::over(chased, Order::Blocks, nth as u64);
        let mut probe = Probe::new(nth as u64);
        let probed = &traffic[..PROBED_BYTES / size_of::<u64>()];
        let idle_ns = on_cpu(*own, || latencies(&mut chain, &mut probe, probed, nth))?;
        let readers = Traffic { kind: Kind::Read, cpus: &self.initiator.injectors, rate: None };
        let (of_readers, of_probe) = traffic.split_at(traffic.len() / 2);
        let (loaded, flow) = readers.beside(of_readers, || {
            on_cpu(*own, || latencies(&mut chain, &mut probe, of_probe, nth))
        })?;
        let (cpu_ns, lost_ns) = self.costs(&mut probe, nth)?;
        Ok(Run { idle_ns, loaded_ns: loaded?, load_bytes_per_s: flow.bytes_per_s, cpu_ns, lost_ns })
    }

    /// The CPU time of each, and the time that a bystander loses by each.
    fn costs(&self, probe: &mut Probe, nth: usize) -> Result<(Option<Both>, Both), Error> {
        let words = self.buffers.traffic()?;
        let (data, rest) = words.split_at(self.bystander_bytes / size_of::<u64>());
        let (probed, rest) = rest.split_at(PROBED_BYTES / size_of::<u64>());
        let mut sweep =
            Chain::over(&rest[..SWEEP_BYTES / size_of::<u64>()], Order::Blocks, nth as u64);
        let (own, other) = (self.initiator.cpus[0], self.initiator.injectors[0]);
        let bystander = Bystander { data, cpu: other };
        // The other CPU is as busy as beside probes, but loads nothing.
        let alone = bystander.beside(own, || repeat(std::hint::spin_loop))?;
        let mut by_probes = || bystander.beside(own, || repeat(|| _ = probe.run(probed)));
        let mut by_sweeps =
            || bystander.beside(own, || repeat(|| _ = sweep.chase(SWEEP_BYTES / LINE)));
        let (probes, sweeps) = match nth % 2 {
            0 => (by_probes()?, by_sweeps()?),
            _ => {
                let sweeps = by_sweeps()?;
                (by_probes()?, sweeps)
            }
        };
        let lost_ns = Both { probe: probes.lost_ns(&alone), sweep: sweeps.lost_ns(&alone) };
        let cpu = probes.work.cpu_ns.zip(sweeps.work.cpu_ns);
        Ok((cpu.map(|(probe, sweep)| Both { probe, sweep }), lost_ns))
    }
}

/// The latency that each finds, the one after the other.
fn latencies(chain: &mut Chain<'_>, probe: &mut Probe, probed: &[AtomicU64], nth: usize) -> Both {
    let mut sweep = || {
        let batches =
            (0..LOADS / BATCH).map(|_| chain.chase(BATCH).as_nanos() as f64 / BATCH as f64);
        median(&batches.collect::<Vec<_>>()).unwrap_or(f64::NAN)
    };
    match nth % 2 {
        0 => {
            let found = probe.run(probed);
            Both { probe: found, sweep: sweep() }
        }
        _ => {
            let found = sweep();
            Both { probe: probe.run(probed), sweep: found }
        }
    }
}

/// The work beside the bystander.
struct Work {
    times: u64,
    /// CPU time of each.
    cpu_ns: Option<f64>,
}

/// Does something again and again for a slice of time.
fn repeat(mut work: impl FnMut()) -> Work {
    let (began, before, mut times) = (Instant::now(), cpu_ns(), 0);
    while began.elapsed() < SLICE {
        work();
        times += 1;
    }
    let cpu = before.zip(cpu_ns()).map(|(from, to)| (to - from) as f64 / times as f64);
    Work { times, cpu_ns: cpu }
}

/// A thread whose data is in a cache, and which loads it all the time.
struct Bystander<'a> {
    data: &'a [AtomicU64],
    cpu: usize,
}

/// How fast the bystander was beside some work.
struct Beside {
    loads_per_ns: f64,
    took: Duration,
    work: Work,
}

impl Bystander<'_> {
    fn beside(&self, own: usize, work: impl FnOnce() -> Work + Send) -> Result<Beside, Error> {
        let (stop, loads) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let mut chain = Chain::over(self.data, Order::Blocks, 1);
            // Once around, so that the data is in the cache.
            chain.chase(size_of_val(self.data) / LINE);
            let (stop, loads) = (&stop, &loads);
            let thread = start(scope, self.cpu, move || {
                while !stop.load(Ordering::Relaxed) {
                    chain.chase(BATCH);
                    loads.fetch_add(BATCH as u64, Ordering::Relaxed);
                }
            })?;
            // Until it runs.
            while loads.load(Ordering::Relaxed) == 0 && !thread.is_finished() {
                std::thread::yield_now();
            }
            let measured = on_cpu(own, || {
                let (began, before) = (Instant::now(), loads.load(Ordering::Relaxed));
                let work = work();
                let (took, after) = (began.elapsed(), loads.load(Ordering::Relaxed));
                Beside {
                    loads_per_ns: (after - before) as f64 / took.as_nanos() as f64,
                    took,
                    work,
                }
            });
            stop.store(true, Ordering::Relaxed);
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            measured
        })
    }
}

impl Beside {
    /// The time that the bystander has lost by each repetition of the work, in nanoseconds: how much
    /// longer it would have to run for as many loads. Below zero if it was faster, by chance.
    fn lost_ns(&self, alone: &Beside) -> f64 {
        let lost = 1.0 - self.loads_per_ns / alone.loads_per_ns;
        lost * self.took.as_nanos() as f64 / self.work.times as f64
    }
}

#[cfg(test)]
mod tests {
    use pageleap::topology::Topology;

    use super::*;

    #[test]
    fn a_run_has_all_figures() {
        let topology = Topology::read().unwrap();
        let allowed = topology.allowed_cpus();
        let of_node = |node: &pageleap::topology::Node| {
            let cpus = node.cpus.iter().copied().filter(|cpu| allowed.contains(cpu));
            let cpus: Vec<usize> = cpus.collect();
            let injectors = cpus.iter().skip(1).copied().collect();
            Initiator { node: node.id, cpus, injectors, has_memory: node.total_bytes > 0 }
        };
        let mut initiators = topology.nodes().iter().map(of_node);
        // A machine with one CPU has no bystanders.
        let Some(initiator) = initiators.find(|one| one.cpus.len() > 1) else { return };
        let probing = Probing::new(&initiator, 0, 1 << 20).unwrap();
        for nth in 0..2 {
            let run = probing.run(nth).unwrap();
            for both in [run.idle_ns, run.loaded_ns] {
                assert!(both.probe > 0.0 && both.sweep > 0.0 && both.ratio() > 0.0, "{run:?}");
            }
            assert!(run.load_bytes_per_s > 0.0);
            let cpu = run.cpu_ns.unwrap();
            assert!(cpu.probe > 0.0 && cpu.sweep > 0.0, "{run:?}");
            assert!(run.lost_ns.probe.is_finite() && run.lost_ns.sweep.is_finite());
        }
    }

    #[test]
    fn lost_time_is_the_share_that_was_lost_for_each_repetition() {
        let beside = |loads_per_ns, times| Beside {
            loads_per_ns,
            took: Duration::from_micros(100),
            work: Work { times, cpu_ns: None },
        };
        let (alone, half) = (beside(2.0, 1), beside(1.0, 10));
        assert!((half.lost_ns(&alone) - 5000.0).abs() < 1e-6);
        assert!(beside(2.0, 3).lost_ns(&alone).abs() < 1e-6);
    }
}
