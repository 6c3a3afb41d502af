//! `--measure`: latency and bandwidth of each pair of nodes.

use pageleap::NodeId;
use pageleap::latency::Order;
use pageleap::topology::{Node, SysFiles, Topology, data_caches};
use pageleap_measure::Error;
use pageleap_measure::figures::human_bytes;
use pageleap_measure::matrix::{
    self, Initiator, Kind, LEAST_BYTES, Pair, Plan, Watch, buffer_bytes,
};

use super::TopologyArgs;
use crate::interrupt;
use crate::machine::initiator;
use crate::progress::Steps;
use crate::stop::{Refusal, Stop};

/// Bytes of a huge page, of which buffers are made.
const HUGE: u64 = 2 << 20;
/// The share of the free memory of a node that both buffers together may take.
const OF_FREE: u64 = 2;

/// The pairs that were measured until the end, or until a signal.
#[derive(Debug, Default)]
pub struct Measured {
    /// The pairs, by initiator and target.
    pub pairs: Vec<Pair>,
    /// Runs of each figure.
    pub runs: usize,
    /// Sentences on what was not measured, or not as it should be, each with its pairs.
    pub left_out: Vec<(String, Vec<String>)>,
}

/// Measures the pairs of the nodes that are shown. Returns how that ended as well, because the pairs
/// until then are worth showing.
pub fn measure(
    args: &TopologyArgs,
    topology: &Topology,
    shown: &[&Node],
) -> Result<(Measured, Result<(), Stop>), Stop> {
    let initiators: Vec<Initiator> =
        shown.iter().filter_map(|node| initiator(topology, node)).collect();
    let targets: Vec<&Node> = shown
        .iter()
        .filter(|node| node.total_bytes > 0 && topology.is_allowed(node.id))
        .copied()
        .collect();
    if initiators.is_empty() || targets.is_empty() {
        let why = match targets.is_empty() {
            true => "this process may use the memory of none of these nodes",
            false => "this process may use the CPUs of none of these nodes",
        };
        return Err(
            Refusal::new(format!("--measure: {why}; `pageleap topology` shows which")).into()
        );
    }
    interrupt::install();
    let mut measured = Measured { runs: usize::from(args.runs), ..Measured::default() };
    let ended = measure_all(args, &initiators, &targets, &mut measured);
    Ok((measured, ended))
}

fn measure_all(
    args: &TopologyArgs,
    initiators: &[Initiator],
    targets: &[&Node],
    measured: &mut Measured,
) -> Result<(), Stop> {
    let most_cpus = initiators.iter().map(|from| from.cpus.len()).max().unwrap_or(1);
    let pairs = initiators.len() * targets.len();
    let mut progress = Progress(Steps::new("measuring", pairs, matrix::steps(most_cpus)), false);
    let mut failed = None;
    for from in initiators {
        let caches = data_caches(&SysFiles::host(), &from.cpus);
        let caches = caches.map(|all| all.iter().map(|cache| cache.bytes).sum());
        for to in targets {
            let name = format!("{} to {}", from.node, to.id);
            let bytes = bytes(args, caches, to);
            let remarks = remarks(bytes, caches, to);
            remarks.into_iter().for_each(|remark| measured.leave_out(remark, &name));
            let plan = Plan { runs: usize::from(args.runs), buffer_bytes: bytes };
            match Pair::measure(from, to.id, plan, &mut progress) {
                Ok(Some(pair)) => {
                    progress.0.row_done(&in_short(&pair));
                    pair.left_out.iter().for_each(|line| measured.leave_out(line.clone(), &name));
                    measured.pairs.push(pair);
                }
                Ok(None) => {}
                // The others can be measured all the same.
                Err(error) => {
                    progress.0.row_done(&format!("{name}: {error}"));
                    let less = match &error {
                        Error::Leap(pageleap::Error::OutOfMemory { .. }) => "; --buffer takes less",
                        _ => "",
                    };
                    measured.leave_out(format!("{error}{less}"), &name);
                    failed.get_or_insert(error);
                }
            }
            let found = || format!("{} of {pairs} pairs were measured", measured.pairs.len());
            interrupt::stop_if_received(found)?;
        }
    }
    match failed {
        Some(error) if measured.pairs.is_empty() => Err(error.into()),
        _ => Ok(()),
    }
}

/// Bytes of a buffer on this node.
fn bytes(args: &TopologyArgs, caches: Option<u64>, to: &Node) -> u64 {
    let room = to.free_bytes / OF_FREE / 2 / HUGE * HUGE;
    args.buffer.unwrap_or_else(|| buffer_bytes(caches).min(room).max(LEAST_BYTES))
}

/// Why figures of buffers of this size may not be those of the node's memory.
fn remarks(bytes: u64, caches: Option<u64>, to: &Node) -> Vec<String> {
    let [size, of_caches] = [bytes, caches.unwrap_or(0)].map(|bytes| human_bytes(bytes as f64));
    let mut remarks = Vec::new();
    if caches.is_none() {
        remarks.push(format!(
            "the kernel does not tell the sizes of the caches; if they have more than half of a buffer \
             ({size}), latencies are too low, and bandwidths too high"
        ));
    } else if bytes < buffer_bytes(caches) {
        remarks.push(format!(
            "a buffer has {size}, and the caches of the CPUs have {of_caches}: they may hold a part of \
             it, which makes latencies too low, and bandwidths too high"
        ));
    }
    if let Some(cache) = to.side_caches.first() {
        remarks.push(format!(
            "the memory has a cache of {} in front of it: figures may be those of that cache",
            human_bytes(cache.bytes as f64)
        ));
    }
    remarks
}

fn in_short(pair: &Pair) -> String {
    let ns = pair.idle_ns(pair.page, Order::Blocks).map_or(0.0, |ns| ns.median);
    let read = pair.most(Kind::Read).map_or(0.0, |most| most.bytes_per_s.median / 1e9);
    format!("{} to {}: {ns:.0} ns, {read:.1} GB/s read", pair.from, pair.to)
}

/// Steps of a pair, the last of which is under way.
struct Progress(Steps, bool);

impl Watch for Progress {
    fn step(&mut self, what: String) {
        if std::mem::replace(&mut self.1, true) {
            self.0.done();
        }
        self.0.now(what);
    }

    fn is_stopped(&self) -> bool {
        interrupt::received().is_some()
    }
}

impl Measured {
    /// Notes a sentence for a pair. Pairs with the same sentence share it.
    fn leave_out(&mut self, sentence: String, pair: &str) {
        match self.left_out.iter_mut().find(|(same, _)| *same == sentence) {
            Some((_, pairs)) => pairs.push(pair.to_owned()),
            None => self.left_out.push((sentence, vec![pair.to_owned()])),
        }
    }

    /// The pair of these nodes.
    pub fn pair(&self, from: NodeId, to: NodeId) -> Option<&Pair> {
        self.pairs.iter().find(|pair| pair.from == from && pair.to == to)
    }
}
