//! A thread that probes the latency of each pair of nodes from time to time.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use pageleap_sys::CAN_FLUSH_LINES;

use super::latencies::Latencies;
use super::probe::Probe;
use crate::error::Error;
use crate::placement::{PageTables, Placement};
use crate::pool::Pool;
use crate::priority;
use crate::region::Region;
use crate::sync::{Condvar, Instant, Mutex, lock, thread};
use crate::topology::Topology;
use crate::units::NodeId;

/// How often each pair is probed (*Latency-aware page-table migration*, section 4.1.1).
pub const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of the buffer of each pair. All loads of a probe come from memory, whatever the size,
/// because their lines are flushed; the pages of 4 MB lie in all channels and banks of a node.
const BUFFER_BYTES: usize = 4 << 20;

/// Measures the latency of a load from the CPUs of each node to the memory of each node, now and
/// again, in a thread of its own.
///
/// A node that is near can be slower than one that is far, while others use up the bandwidth of its
/// memory. A prober notices that. It follows *Latency-aware page-table migration* (section 4.1.1),
/// where each probe sweeps a buffer that is larger than all caches, and so takes the caches of its
/// neighbours. Here a probe flushes about 2000 random lines of a small buffer from the caches, and
/// loads these: less than a millisecond of CPU time, with the question to the kernel where the buffer
/// lies. `docs/latency.md` compares both.
///
/// The thread moves to the CPUs of each initiator in turn. It takes 4 MB of each target's memory for
/// each initiator, and no privilege. It ends when the value is dropped, after the probe that it is
/// at. In a child made by `fork` there is no such thread, and the latencies stay as they were.
///
/// ```
/// use std::time::Duration;
/// use pageleap::latency::Prober;
///
/// # fn main() -> Result<(), pageleap::Error> {
/// let prober = Prober::builder().every(Duration::from_secs(1)).start()?;
/// let latencies = prober.wait_for(1, Duration::from_secs(60)).expect("the first round is quick");
/// for ((from, to), ns) in latencies.iter() {
///     println!("from CPUs of {from} to memory of {to}: {ns:.0} ns");
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Prober {
    shared: Arc<Shared>,
    /// The process that owns the thread.
    process: u32,
}

/// Chooses the pairs and the interval of a [`Prober`].
#[derive(Clone, Debug)]
pub struct ProberBuilder {
    every: Duration,
    initiators: Option<Vec<NodeId>>,
    targets: Option<Vec<NodeId>>,
}

/// The probes of a [`Prober`] until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeCost {
    /// Probes of single pairs.
    pub probes: u64,
    /// CPU time of all of them.
    pub cpu: Duration,
    /// CPU time of the longest one.
    pub longest: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when a round has ended, or no more will come.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    latencies: Latencies,
    rounds: u64,
    cost: ProbeCost,
    over: bool,
}

/// A pair of nodes, with a buffer on the target.
struct Pair {
    from: NodeId,
    cpus: Vec<usize>,
    to: NodeId,
    buffer: Region,
}

impl ProberBuilder {
    /// How often each pair is probed. Without it: every 10 s.
    pub fn every(mut self, every: Duration) -> ProberBuilder {
        self.every = every;
        self
    }

    /// The nodes from which to load. Without it: all nodes with CPUs on which this process may run.
    pub fn initiators(mut self, nodes: impl IntoIterator<Item = NodeId>) -> ProberBuilder {
        self.initiators = Some(nodes.into_iter().collect());
        self
    }

    /// The nodes whose memory is loaded. Without it: all nodes whose memory this process may use.
    pub fn targets(mut self, nodes: impl IntoIterator<Item = NodeId>) -> ProberBuilder {
        self.targets = Some(nodes.into_iter().collect());
        self
    }

    /// Takes the buffers, and starts the thread. The first round begins at once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the processor has no instruction that flushes lines (it is neither
    /// an x86-64 nor an arm64), or no CPU of a named initiator may be used; [`Error::UnknownNode`] for
    /// a node that is not there; the errors of
    /// [`PoolBuilder::build`](crate::pool::PoolBuilder::build) if no target has memory for it;
    /// [`Error::NoThread`]. A pair for which only its own target has no memory stays unknown, with the
    /// reason ([`Latencies::unknown`]).
    pub fn start(self) -> Result<Prober, Error> {
        if !CAN_FLUSH_LINES {
            return Err(Error::Unsupported {
                what: "a prober needs an instruction that flushes lines from the caches".to_owned(),
                remedy: "measure with a Chain over a buffer that is larger than the caches",
            });
        }
        let (pairs, latencies) = self.pairs(&Topology::read()?)?;
        let state = State { latencies, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let of_thread = shared.clone();
        thread::start(c"pageleap-probes", move || of_thread.probe(&pairs, self.every))
            .map_err(|errno| priority::no_thread("the thread of a prober", errno))?;
        Ok(Prober { shared, process: std::process::id() })
    }

    /// The pairs with their buffers, and why those pairs are not known that have none.
    fn pairs(&self, topology: &Topology) -> Result<(Vec<Pair>, Latencies), Error> {
        let all = || topology.nodes().iter().map(|node| node.id).collect();
        let allowed = topology.allowed_cpus();
        let targets = self.targets.clone().unwrap_or_else(|| topology.allowed_nodes());
        let (mut pairs, mut unknown, mut first) = (Vec::new(), Latencies::default(), None);
        for from in self.initiators.clone().unwrap_or_else(all) {
            let node = topology.node(from)?;
            let cpus = node.cpus.iter().copied().filter(|cpu| allowed.contains(cpu));
            let cpus: Vec<usize> = cpus.collect();
            if cpus.is_empty() && self.initiators.is_none() {
                continue;
            }
            if cpus.is_empty() {
                return Err(Error::Unsupported {
                    what: format!("{from} has no CPU that this process may use"),
                    remedy: "probe from other nodes",
                });
            }
            let has_memory = node.total_bytes > 0 && topology.is_allowed(from);
            for &to in &targets {
                topology.node(to)?;
                match buffer(has_memory.then_some(from), to) {
                    Ok(buffer) => pairs.push(Pair { from, cpus: cpus.clone(), to, buffer }),
                    Err(error) => {
                        unknown.set_unknown(from, to, error.to_string());
                        first.get_or_insert(error);
                    }
                }
            }
        }
        match first {
            Some(error) if pairs.is_empty() => Err(error),
            _ => Ok((pairs, unknown)),
        }
    }
}

/// Memory on the target whose page tables lie with the initiator, if that has memory, so that walks
/// are local.
fn buffer(tables: Option<NodeId>, to: NodeId) -> Result<Region, Error> {
    let place = match tables {
        Some(node) => Placement::on(to).page_tables(PageTables::Node(node)),
        None => Placement::on(to),
    };
    let pool = Pool::builder(place.clone(), BUFFER_BYTES as u64).build()?;
    Region::new(pool.on(place), BUFFER_BYTES)
}

impl Prober {
    /// Starts with the defaults: each pair every 10 s.
    pub fn builder() -> ProberBuilder {
        ProberBuilder { every: PROBE_INTERVAL, initiators: None, targets: None }
    }

    /// The latencies as they were last seen.
    pub fn latencies(&self) -> Latencies {
        lock(&self.shared.state).latencies.clone()
    }

    /// The node whose memory has the lowest latency from the CPUs of a node now, with its
    /// nanoseconds; `None` before the first probe from that node.
    pub fn lowest(&self, from: NodeId) -> Option<(NodeId, f64)> {
        lock(&self.shared.state).latencies.lowest(from)
    }

    /// Rounds over all pairs that have ended.
    pub fn rounds(&self) -> u64 {
        lock(&self.shared.state).rounds
    }

    /// What the probes have cost until now.
    pub fn cost(&self) -> ProbeCost {
        lock(&self.shared.state).cost
    }

    /// Waits until so many rounds have ended since the start, and returns the latencies. `None` if
    /// that takes longer than `patience`.
    pub fn wait_for(&self, rounds: u64, patience: Duration) -> Option<Latencies> {
        let began = Instant::now();
        let mut state = lock(&self.shared.state);
        while state.rounds < rounds {
            let left = patience.checked_sub(began.elapsed())?;
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(state.latencies.clone())
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        // In a child made by `fork`, no thread would ever release a lock that was held at that time.
        if self.process == std::process::id() {
            lock(&self.shared.state).over = true;
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    /// Probes all pairs, round after round, until the prober is dropped.
    fn probe(&self, pairs: &[Pair], every: Duration) {
        let mut probe = Probe::new(u64::from(std::process::id()));
        loop {
            let began = Instant::now();
            for pair in pairs {
                let before = pageleap_sys::thread_cpu_time_ns();
                let seen = pair.probe(&mut probe);
                let cpu =
                    before.and_then(|before| Ok(pageleap_sys::thread_cpu_time_ns()? - before));
                let mut state = lock(&self.state);
                if state.over {
                    return;
                }
                state.cost.add(Duration::from_nanos(cpu.unwrap_or(0)));
                match seen {
                    Ok(ns) => state.latencies.set(pair.from, pair.to, ns),
                    Err(why) => state.latencies.set_unknown(pair.from, pair.to, why),
                }
            }
            let mut state = lock(&self.state);
            state.rounds += 1;
            self.changed.notify_all();
            while !state.over {
                let Some(left) = every.checked_sub(began.elapsed()).filter(|left| !left.is_zero())
                else {
                    break;
                };
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.over {
                return;
            }
        }
    }
}

impl ProbeCost {
    fn add(&mut self, cpu: Duration) {
        self.probes += 1;
        self.cpu += cpu;
        self.longest = self.longest.max(cpu);
    }
}

impl Pair {
    /// Nanoseconds of a load, or a sentence that says why that is not known now.
    fn probe(&self, probe: &mut Probe) -> Result<f64, String> {
        pageleap_sys::set_affinity(0, &self.cpus)
            .map_err(|errno| format!("no CPU of {} can be used: {errno}", self.from))?;
        let placed = self.buffer.verify().map_err(|error| error.to_string())?;
        if !placed.is_right() {
            return Err(format!(
                "the memory for the probe no longer lies on {}: {placed}",
                self.to
            ));
        }
        let words = self.buffer.atomics_u64(0..self.buffer.len());
        Ok(probe.run(words.map_err(|error| error.to_string())?))
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(120);

    #[test]
    fn each_pair_is_probed_again_and_again() {
        let prober = Prober::builder().every(Duration::from_millis(5)).start().unwrap();
        let latencies = prober.wait_for(3, PATIENCE).unwrap();
        let topology = Topology::read().unwrap();
        let targets = topology.allowed_nodes().len();
        let may_run = topology.allowed_cpus();
        let has_cpus =
            |node: &&crate::topology::Node| node.cpus.iter().any(|cpu| may_run.contains(cpu));
        let initiators: Vec<NodeId> =
            topology.nodes().iter().filter(has_cpus).map(|node| node.id).collect();
        assert_eq!(latencies.iter().count(), targets * initiators.len(), "{latencies:?}");
        assert!(latencies.iter().all(|(_, ns)| ns > 0.0));
        for from in initiators {
            assert_eq!(prober.lowest(from).map(|_| ()), Some(()));
        }
        let cost = prober.cost();
        assert!(cost.probes >= 3 && cost.longest <= cost.cpu && !cost.cpu.is_zero());
        let shared = Arc::downgrade(&prober.shared);
        drop(prober);
        while shared.strong_count() > 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_long_pause_does_not_delay_the_end() {
        let prober = Prober::builder().every(Duration::MAX).start().unwrap();
        assert!(prober.wait_for(1, PATIENCE).is_some());
        assert_eq!(prober.wait_for(2, Duration::from_millis(10)), None);
        let shared = Arc::downgrade(&prober.shared);
        drop(prober);
        while shared.strong_count() > 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn dropping_it_in_a_child_waits_for_no_lock_that_was_held_at_the_fork() {
        let prober = Prober::builder().start().unwrap();
        let shared = prober.shared.clone();
        let held = lock(&shared.state);
        // SAFETY: the child drops what has no other owner there, and ends without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above. A child that waits for the lock is killed.
            unsafe {
                libc::alarm(20);
                drop(prober);
                libc::_exit(0);
            }
        }
        let mut status = -1;
        // SAFETY: the call writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child waits for a thread that it does not have");
        drop(held);
    }

    #[test]
    fn nodes_that_are_not_there_are_refused() {
        let unknown = Prober::builder().targets([NodeId(900)]).start().unwrap_err();
        assert!(matches!(unknown, Error::UnknownNode { .. }), "{unknown}");
        let unknown = Prober::builder().initiators([NodeId(900)]).start().unwrap_err();
        assert!(matches!(unknown, Error::UnknownNode { .. }), "{unknown}");
    }
}
