//! The nodes and CPUs of an experiment, and the memory that nodes have.

use pageleap::topology::{SysFiles, Topology};
use pageleap::{NodeId, PageSize};
use pageleap_measure::experiments::ways;
use pageleap_measure::figures::human_bytes;
use pageleap_measure::host::memory_limit;

use super::super::memory::{USABLE_SHARE, once_each};
use super::args::ExperimentArgs;
use crate::machine::{self, NodeMemory, choose_nodes};
use crate::stop::{Refusal, Stop};

/// The nodes of an experiment, and a CPU.
pub struct Nodes {
    pub all: Vec<NodeMemory>,
    pub from: NodeId,
    pub to: NodeId,
    /// Of the destination, or of all nodes if that has none for this process. Not empty.
    pub cpus: Vec<usize>,
    /// Another CPU than the first of these, of the destination if possible; the same one if there
    /// is no other.
    pub writer_cpu: usize,
    /// The CPU of a writer towards which automatic balancing moves pages: of the destination. `None`
    /// if that has none for this process.
    pub local_cpu: Option<usize>,
}

impl Nodes {
    pub fn choose(args: &ExperimentArgs) -> Result<Nodes, Stop> {
        let all = machine::nodes(PageSize::Huge2M)?;
        let (from, to) = choose_nodes(&all, args.from, args.to)?;
        let topology = Topology::read()?;
        // Sibling hyper-threads last: a writer must not share the core of the thread that copies.
        let of_node = |id| {
            let node = topology.node(id).ok().and_then(|node| machine::initiator(&topology, node));
            node.map_or(Vec::new(), |node| [&node.cpus[..1], &node.injectors, &node.cpus].concat())
        };
        let (from, to) = (NodeId(from), NodeId(to));
        let mut cpus = once_each(&of_node(to));
        let of_destination = cpus.clone();
        cpus.extend(topology.nodes().iter().flat_map(|node| of_node(node.id)));
        let Some(cpu) = cpus.first().copied() else {
            return Err(Refusal::new("the kernel names no CPU for this process".to_owned()).into());
        };
        let writer_cpu = cpus.iter().copied().find(|other| *other != cpu).unwrap_or(cpu);
        // The only CPU of a destination is that of copies, too, but nothing is copied meanwhile.
        let is_there = of_destination.contains(&writer_cpu);
        let local_cpu = if is_there { Some(writer_cpu) } else { of_destination.first().copied() };
        let cpus = if of_destination.is_empty() { cpus } else { of_destination };
        Ok(Nodes { all, from, to, cpus, writer_cpu, local_cpu })
    }

    /// The CPU of a thread that copies or calls the kernel.
    pub fn cpu(&self) -> usize {
        self.cpus[0]
    }

    /// Whether automatic balancing is measured. It waits for the time-out of 10 s in most rounds.
    pub fn is_balanced(&self, args: &ExperimentArgs) -> bool {
        self.from != self.to && self.local_cpu.is_some() && !args.quick
    }

    pub fn setting(&self, args: &ExperimentArgs, page: PageSize) -> ways::Setting {
        let Nodes { from, to, .. } = *self;
        let (cpu, cpus) = (self.cpu(), self.cpus.clone());
        ways::Setting { bytes: args.bytes(), page, from, to, cpu, cpus, seed: args.seed }
    }

    /// The most bytes whose needs take at most a share of the free memory of each node, rounded down
    /// to one of few sizes: two runs on one machine should measure the same one.
    pub fn fitting(&self, needs: &dyn Fn(u64) -> [u64; 2], share: f64) -> u64 {
        const UNIT: u64 = PageSize::Thp.bytes() as u64;
        let free = |node: NodeId| {
            let found = self.all.iter().find(|of| of.id == node.0);
            found.map_or(0, |of| of.free_bytes) as f64 * share
        };
        let [from, to] = needs(UNIT).map(|bytes| bytes as f64 / UNIT as f64);
        let fits = match self.from == self.to {
            true => free(self.from) / (from + to),
            false => (free(self.from) / from).min(free(self.to) / to),
        };
        let limit = memory_limit(&SysFiles::host()).map_or(f64::INFINITY, |limit| limit as f64);
        let fits = fits.min(limit * share / (from + to));
        coarse(fits as u64 / UNIT * UNIT).max(UNIT)
    }

    /// Refuses memory that a node or the cgroup does not have. `needs`: bytes on the source and the
    /// destination.
    pub fn check(&self, args: &ExperimentArgs, needs: [u64; 2]) -> Result<(), Refusal> {
        let all = (needs[0] + needs[1]) as f64;
        let limit = memory_limit(&SysFiles::host()).map(|limit| limit as f64 * USABLE_SHARE);
        if let Some(limit) = limit.filter(|limit| all > *limit) {
            let fits = (limit * args.bytes() as f64 / all) as u64 >> 20;
            return Err(Refusal::new(format!(
                "--size {}: needs {}, and the memory cgroup of this process allows {}; use --size \
                 {fits}m or less",
                args.bytes(),
                human_bytes(all),
                human_bytes(limit),
            )));
        }
        let demands = match self.from == self.to {
            true => vec![(self.from, needs[0] + needs[1])],
            false => vec![(self.from, needs[0]), (self.to, needs[1])],
        };
        for (node, needed) in demands {
            let free = self.all.iter().find(|of| of.id == node.0).map_or(0, |of| of.free_bytes);
            let usable = free as f64 * USABLE_SHARE;
            if needed as f64 > usable {
                let fits = (usable * args.bytes() as f64 / needed as f64) as u64 >> 20;
                return Err(Refusal::new(format!(
                    "--size {}: needs {} on {node}, which has {} free; use --size {fits}m or less",
                    args.bytes(),
                    human_bytes(needed as f64),
                    human_bytes(free as f64),
                )));
            }
        }
        Ok(())
    }

    pub fn remark(&self) -> &'static str {
        match self.from == self.to {
            true => "the only node that takes part: no time here is a NUMA speed-up",
            false => "",
        }
    }
}
/// Rounds down to a power of two, or to 1.25, 1.5 or 1.75 times one.
fn coarse(bytes: u64) -> u64 {
    let step = (bytes.checked_ilog2().map_or(1, |log| 1 << log) / 4).max(1);
    bytes / step * step
}
