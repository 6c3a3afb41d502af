//! Latency and bandwidth of memory, from the CPUs of one node to the memory of another.
//!
//! ```text
//! Pair::measure ─► Buffers: one to chase, one for traffic, on the target, verified
//!                     ├─► latency: a chain of loads (pageleap::latency::Chain)
//!                     ├─► traffic: threads that read, write or copy, for the bandwidth
//!                     └─► both at once: latency against bandwidth
//! ```
//!
//! Each thread is bound to a CPU. Latencies are in the clock of the thread that loads: the chain is
//! timed in batches, so that a batch in which the thread has lost its CPU does not spoil the median.
//! Nothing needs a counter of the processor, or a privilege.

mod buffer;
mod latency;
mod traffic;

use pageleap::latency::{Chain, Order};
use pageleap::{NodeId, PageSize};

pub use self::buffer::Lay;
pub(crate) use self::buffer::{Buffers, on_cpu, start};
pub use self::traffic::Kind;
pub(crate) use self::traffic::Traffic;
use crate::Error;
use crate::statistics::{extremes, median};

/// Bytes of a buffer at least, whatever the caches are.
pub const LEAST_BYTES: u64 = 64 << 20;
/// Bytes of a buffer if the caches are not known. Many processors have less cache.
pub const UNKNOWN_BYTES: u64 = 256 << 20;
/// Bytes of a buffer for each byte of cache. A chain of random loads over twice the caches finds
/// little of it there, because each line comes again only after all others. And the part of one
/// thread is twice its own caches and its share of the others.
pub const OF_CACHE: u64 = 2;
/// Bytes of a buffer for each CPU at least, so that each thread has a part.
const OF_CPU: u64 = 256 << 10;
/// Buffers are multiples of it, whatever their pages.
const HUGE: u64 = 2 << 20;
/// The bandwidths beside which latency is measured, as shares of that of all injecting threads.
const SHARES: [f64; 6] = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0];
/// Below this share of the time on its CPU, a thread has not measured what the CPU can do.
const LEAST_CPU_SHARE: f64 = 0.95;

/// The kinds of pages, the better first: memory is measured with the first that there is.
pub const PAGES: [PageSize; 2] = [PageSize::Thp, PageSize::Base];

/// The extent of the measurement of each pair.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How often each figure is measured; the median counts.
    pub runs: usize,
    /// Bytes of each of the two buffers: see [`buffer_bytes`].
    pub buffer_bytes: u64,
}

/// Bytes of a buffer that the caches of the initiator do not hold. `cache_bytes` are those of all
/// levels, each cache once; `None` if they are not known.
pub fn buffer_bytes(cache_bytes: Option<u64>) -> u64 {
    let bytes = cache_bytes.map_or(UNKNOWN_BYTES, |bytes| bytes.saturating_mul(OF_CACHE));
    bytes.max(LEAST_BYTES).next_multiple_of(HUGE)
}

/// A node whose CPUs access memory.
#[derive(Clone, Debug)]
pub struct Initiator {
    /// The node.
    pub node: NodeId,
    /// Its CPUs that this process may use, in the order in which threads take them. Not empty.
    pub cpus: Vec<usize>,
    /// The CPUs that do not share a core with the first one. Threads on them inject traffic while
    /// the first one loads.
    pub injectors: Vec<usize>,
    /// Whether page tables can be asked for on the node: it has memory that this process may use.
    pub has_memory: bool,
}

/// A figure of several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// The value in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Figure {
    /// `None` without values.
    pub fn of(values: &[f64]) -> Option<Figure> {
        let (min, max) = extremes(values)?;
        Some(Figure { median: median(values)?, min, max })
    }
}

/// The latency of loads that nothing disturbs.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// The kind of pages.
    pub page: PageSize,
    /// The order of the loads.
    pub order: Order,
    /// Nanoseconds of a load.
    pub ns: Figure,
}

/// The bandwidth of some threads.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// The work of the threads.
    pub kind: Kind,
    /// How many there are.
    pub threads: usize,
    /// Bytes per second, as the program counts them: a copied byte counts once, although it is read
    /// and written.
    pub bytes_per_s: Figure,
}

/// The latency of loads beside threads that read.
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    /// The bandwidth that they were asked for, as a share of the most that they can read.
    pub share: f64,
    /// The same in bytes per second; `None` for no limit.
    pub asked_bytes_per_s: Option<f64>,
    /// What they have read, in bytes per second.
    pub bytes_per_s: Figure,
    /// Nanoseconds of a load.
    pub ns: Figure,
}

/// The figures of one pair.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The node of the CPUs.
    pub from: NodeId,
    /// The node of the memory.
    pub to: NodeId,
    /// Where the buffers lay, by kind of pages.
    pub lay: Vec<(PageSize, Lay)>,
    /// By kind of pages and order.
    pub idle: Vec<Idle>,
    /// By kind and number of threads.
    pub bandwidth: Vec<Bandwidth>,
    /// By bandwidth; empty if the initiator has one core, which the loads need.
    pub loaded: Vec<Loaded>,
    /// Threads that read while latency was measured.
    pub injectors: usize,
    /// The kind of pages for bandwidth and for latency under load.
    pub page: PageSize,
    /// Sentences on what could not be measured.
    pub left_out: Vec<String>,
}

/// Steps of the measurement of a pair, for progress: at most so many.
pub fn steps(cpus: usize) -> usize {
    PAGES.len() * 2 + Kind::ALL.len() * thread_counts(cpus).len() + 1 + SHARES.len()
}

/// 1, 2, 4 and so on, and the number itself.
pub fn thread_counts(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |power| Some(power * 2));
    powers.take_while(|power| *power < most).chain([most]).collect()
}

/// A measurement under way: what to call between its steps.
pub trait Watch {
    /// The next step begins.
    fn step(&mut self, what: String);
    /// Whether to stop.
    fn is_stopped(&self) -> bool;
}

impl Pair {
    /// Measures a pair. Returns `None` if it was stopped.
    ///
    /// # Errors
    /// The memory of the target cannot be had or is not where it should be, or threads cannot be
    /// started or bound. A kind of pages that this machine does not have is left out.
    pub fn measure(
        from: &Initiator,
        to: NodeId,
        plan: Plan,
        watch: &mut dyn Watch,
    ) -> Result<Option<Pair>, Error> {
        let mut pair = Pair {
            from: from.node,
            to,
            lay: Vec::new(),
            idle: Vec::new(),
            bandwidth: Vec::new(),
            loaded: Vec::new(),
            injectors: from.injectors.len(),
            page: PageSize::Base,
            left_out: Vec::new(),
        };
        let least = (from.cpus.len() as u64 * OF_CPU).next_multiple_of(HUGE);
        let bytes = plan.buffer_bytes.max(least);
        let mut cpu_share = 1.0;
        let mut is_first = true;
        for page in PAGES {
            // The memory of one kind is given back before the other is taken.
            let buffers = match Buffers::new(from, to, page, bytes, is_first) {
                Ok(buffers) => buffers,
                Err(Error::Leap(error)) if page != PageSize::Base => {
                    pair.left_out.push(format!("{page} pages: {error}"));
                    continue;
                }
                Err(error) => return Err(error),
            };
            pair.lay.push((page, buffers.lay.clone()));
            let mut at = Measuring { from, to, plan, buffers: &buffers, cpu_share };
            let whole = at.idle(page, &mut pair, watch)?
                && (!is_first || at.rest(page, &mut pair, watch)?);
            if !whole {
                return Ok(None);
            }
            cpu_share = at.cpu_share;
            // The cpuset may have changed meanwhile, or balancing has moved pages.
            buffers.verify(to)?;
            is_first = false;
        }
        if cpu_share < LEAST_CPU_SHARE {
            pair.left_out.push(format!(
                "bandwidths are too low: threads were on their CPUs for {:.0} % of the time only, \
                 because of other load or of a limit of CPU time (cpu.max of a cgroup)",
                cpu_share * 100.0
            ));
        }
        Ok(Some(pair))
    }

    /// The idle latency with these pages in this order.
    pub fn idle_ns(&self, page: PageSize, order: Order) -> Option<Figure> {
        self.idle.iter().find(|idle| idle.page == page && idle.order == order).map(|idle| idle.ns)
    }

    /// The bandwidth of the most threads.
    pub fn most(&self, kind: Kind) -> Option<&Bandwidth> {
        self.bandwidth.iter().rfind(|one| one.kind == kind)
    }
}

/// The parts of a measurement with one kind of pages. Each returns whether it was not stopped.
struct Measuring<'a> {
    from: &'a Initiator,
    to: NodeId,
    plan: Plan,
    buffers: &'a Buffers,
    /// The smallest share of its time that a thread was on its CPU.
    cpu_share: f64,
}

impl Measuring<'_> {
    fn step(&self, what: &str, watch: &mut dyn Watch) {
        watch.step(format!("{} to {}, {what}", self.from.node, self.to));
    }

    /// Measures a figure as often as the plan says. Returns `None` if it was stopped.
    fn runs<T>(
        &mut self,
        watch: &dyn Watch,
        mut run: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<Option<Vec<T>>, Error> {
        let mut results = Vec::new();
        for _ in 0..self.plan.runs {
            if watch.is_stopped() {
                return Ok(None);
            }
            results.push(run(self)?);
        }
        Ok(Some(results))
    }

    fn idle(
        &mut self,
        page: PageSize,
        pair: &mut Pair,
        watch: &mut dyn Watch,
    ) -> Result<bool, Error> {
        let (chased, own) = (self.buffers.chased()?, self.from.cpus[0]);
        for order in [Order::Blocks, Order::Pages] {
            self.step(&format!("latency, {page} pages"), watch);
            let mut chain = on_cpu(own, || latency::chain(chased, order))?;
            let runs = self.runs(watch, |_| on_cpu(own, || latency::ns(&mut chain)))?;
            let Some(runs) = runs else { return Ok(false) };
            pair.idle.extend(Figure::of(&runs).map(|ns| Idle { page, order, ns }));
        }
        Ok(true)
    }

    /// Bandwidths, and latency beside them.
    fn rest(
        &mut self,
        page: PageSize,
        pair: &mut Pair,
        watch: &mut dyn Watch,
    ) -> Result<bool, Error> {
        pair.page = page;
        let cpus = &self.from.cpus;
        for kind in Kind::ALL {
            for threads in thread_counts(cpus.len()) {
                let plural = if threads == 1 { "" } else { "s" };
                self.step(&format!("{kind} by {threads} thread{plural}"), watch);
                let Some(runs) = self.bandwidths(kind, &cpus[..threads], watch)? else {
                    return Ok(false);
                };
                let figure = Figure::of(&runs);
                let bandwidth = |bytes_per_s| Bandwidth { kind, threads, bytes_per_s };
                pair.bandwidth.extend(figure.map(bandwidth));
            }
        }
        self.loaded(pair, watch)
    }

    fn bandwidths(
        &mut self,
        kind: Kind,
        cpus: &[usize],
        watch: &dyn Watch,
    ) -> Result<Option<Vec<f64>>, Error> {
        let traffic = self.buffers.traffic()?;
        self.runs(watch, |at| {
            let flow = Traffic { kind, cpus, rate: None }.bandwidth(traffic)?;
            at.cpu_share = at.cpu_share.min(flow.cpu_share);
            Ok(flow.bytes_per_s)
        })
    }

    fn loaded(&mut self, pair: &mut Pair, watch: &mut dyn Watch) -> Result<bool, Error> {
        let (own, cpus) = (self.from.cpus[0], &self.from.injectors);
        if cpus.is_empty() {
            let one =
                "latency under load: the node has one core for this process, which the loads need";
            pair.left_out.push(one.to_owned());
            return Ok(true);
        }
        let (chased, traffic) = (self.buffers.chased()?, self.buffers.traffic()?);
        self.step("bandwidth of the injectors", watch);
        let Some(most) = self.bandwidths(Kind::Read, cpus, watch)? else { return Ok(false) };
        let most = median(&most).unwrap_or(0.0);
        let mut chain: Chain<'_> = on_cpu(own, || latency::chain(chased, Order::Blocks))?;
        for share in SHARES {
            self.step(&format!("latency at {:.0} % of the bandwidth", share * 100.0), watch);
            // At 100 % nothing holds them back.
            let rate = (share < 1.0).then_some(most * share);
            let runs = self.runs(watch, |_| {
                let injectors = Traffic { kind: Kind::Read, cpus, rate };
                let (ns, flow) =
                    injectors.beside(traffic, || on_cpu(own, || latency::ns(&mut chain)))?;
                Ok((ns?, flow.bytes_per_s))
            })?;
            let Some(runs) = runs else { return Ok(false) };
            let (all_ns, rates): (Vec<f64>, Vec<f64>) = runs.into_iter().unzip();
            let figures = Figure::of(&rates).zip(Figure::of(&all_ns));
            pair.loaded.extend(figures.map(|(bytes_per_s, ns)| Loaded {
                share,
                asked_bytes_per_s: rate,
                bytes_per_s,
                ns,
            }));
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
