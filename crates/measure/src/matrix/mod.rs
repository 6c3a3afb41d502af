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

use pageleap::latency::Order;
use pageleap::{NodeId, PageSize};

pub use self::buffer::Lay;
pub(crate) use self::buffer::{Buffers, on_cpu, start};
pub use self::traffic::Kind;
pub(crate) use self::traffic::Traffic;
use crate::Error;
use crate::statistics::{extremes, median};

/// Bytes of a buffer at least, whatever the caches are.
pub const LEAST_BYTES: u64 = 64 << 20;
/// Bytes of a buffer for each byte of the last-level caches of the initiator's CPUs. A chain of
/// random loads over twice the cache finds little of it there, because each line comes again only
/// after all others.
pub const OF_CACHE: u64 = 2;
/// The bandwidths beside which latency is measured, as shares of that of all injecting threads.
const SHARES: [f64; 6] = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0];

/// The kinds of pages, the better first: memory is measured with the first that there is.
pub const PAGES: [PageSize; 2] = [PageSize::Thp, PageSize::Base];

/// What is measured for each pair.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How often each figure is measured; the median counts.
    pub runs: usize,
    /// Bytes of each of the two buffers: see [`buffer_bytes`].
    pub buffer_bytes: u64,
}

/// Bytes of a buffer that no cache of the initiator holds. `cache_bytes` are its last-level caches,
/// if they are known.
pub fn buffer_bytes(cache_bytes: Option<u64>) -> u64 {
    const BLOCK: u64 = 2 << 20;
    cache_bytes
        .map_or(0, |bytes| bytes.saturating_mul(OF_CACHE))
        .max(LEAST_BYTES)
        .next_multiple_of(BLOCK)
}

/// A node whose CPUs access memory.
#[derive(Clone, Debug)]
pub struct Initiator {
    /// The node.
    pub node: NodeId,
    /// Its CPUs that this process may use, in the order in which threads take them. Not empty.
    pub cpus: Vec<usize>,
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
    /// What they do.
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
    /// What they were asked to read, as a share of the most that they can.
    pub share: f64,
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
    /// By bandwidth; empty if the initiator has one CPU, which the loads need.
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
    PAGES.len() * 2 + Kind::ALL.len() * thread_counts(cpus).len() + SHARES.len()
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
            injectors: from.cpus.len() - 1,
            page: PageSize::Base,
            left_out: Vec::new(),
        };
        let mut is_first = true;
        for page in PAGES {
            // The memory of one kind is given back before the other is taken.
            let buffers = match Buffers::new(from, to, page, plan.buffer_bytes, is_first) {
                Ok(buffers) => buffers,
                Err(Error::Leap(error)) if page != PageSize::Base => {
                    pair.left_out.push(format!("{page} pages: {error}"));
                    continue;
                }
                Err(error) => return Err(error),
            };
            pair.lay.push((page, buffers.lay.clone()));
            let at = Measuring { from, to, plan, buffers: &buffers };
            let whole = at.idle(page, &mut pair, watch)?
                && (!is_first || at.rest(page, &mut pair, watch)?);
            if !whole {
                return Ok(None);
            }
            is_first = false;
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
}

impl Measuring<'_> {
    fn step(&self, what: &str, watch: &mut dyn Watch) -> bool {
        watch.step(format!("{} to {}, {what}", self.from.node, self.to));
        !watch.is_stopped()
    }

    fn idle(&self, page: PageSize, pair: &mut Pair, watch: &mut dyn Watch) -> Result<bool, Error> {
        for order in [Order::Blocks, Order::Pages] {
            if !self.step(&format!("latency, {page} pages"), watch) {
                return Ok(false);
            }
            let chased = self.buffers.chased()?;
            let values =
                on_cpu(self.from.cpus[0], || latency::idle(chased, order, self.plan.runs))?;
            pair.idle.extend(Figure::of(&values).map(|ns| Idle { page, order, ns }));
        }
        Ok(true)
    }

    /// Bandwidths, and latency beside them.
    fn rest(&self, page: PageSize, pair: &mut Pair, watch: &mut dyn Watch) -> Result<bool, Error> {
        pair.page = page;
        let traffic = self.buffers.traffic()?;
        for kind in Kind::ALL {
            for threads in thread_counts(self.from.cpus.len()) {
                if !self.step(&format!("{kind} by {threads} threads"), watch) {
                    return Ok(false);
                }
                let cpus = &self.from.cpus[..threads];
                let run = |_| Traffic { kind, cpus, rate: None }.bandwidth(traffic);
                let rates: Result<Vec<f64>, Error> = (0..self.plan.runs).map(run).collect();
                pair.bandwidth.extend(Figure::of(&rates?).map(|bytes_per_s| Bandwidth {
                    kind,
                    threads,
                    bytes_per_s,
                }));
            }
        }
        self.loaded(pair, watch)
    }

    fn loaded(&self, pair: &mut Pair, watch: &mut dyn Watch) -> Result<bool, Error> {
        let (own, cpus) = self.from.cpus.split_first().expect("an initiator has a CPU");
        if cpus.is_empty() {
            let one =
                "latency under load: the node has one CPU for this process, which the loads need";
            pair.left_out.push(one.to_owned());
            return Ok(true);
        }
        let (chased, traffic) = (self.buffers.chased()?, self.buffers.traffic()?);
        let most = Traffic { kind: Kind::Read, cpus, rate: None }.bandwidth(traffic)?;
        let chain = on_cpu(*own, || latency::Loaded::over(chased))?;
        for share in SHARES {
            if !self.step(&format!("latency at {:.0} % of the bandwidth", share * 100.0), watch) {
                return Ok(false);
            }
            // All of it is no pace at all.
            let rate = (share < 1.0).then_some(most * share);
            let injectors = Traffic { kind: Kind::Read, cpus, rate };
            let (mut all_ns, mut rates) = (Vec::new(), Vec::new());
            for _ in 0..self.plan.runs {
                let (ns, rate) = injectors.beside(traffic, || on_cpu(*own, || chain.ns()))?;
                all_ns.push(ns?);
                rates.push(rate);
            }
            let figures = Figure::of(&rates).zip(Figure::of(&all_ns));
            pair.loaded.extend(figures.map(|(bytes_per_s, ns)| Loaded { share, bytes_per_s, ns }));
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
