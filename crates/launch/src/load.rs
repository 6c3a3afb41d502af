//! How busy the nodes of the machine are: idle cores, bytes moved by their CPUs, and free memory.
//!
//! A [`Snapshot`] has counters, and the difference of two is a load:
//!
//! * **Idle cores** from `/proc/stat`. A core counts by the least idle of its sibling hyper-threads,
//!   because a second thread on it shares its units and its TLB (the Phoenix paper, section 4.5).
//! * **Bytes moved** from resctrl (`mbm_total_bytes`: memory traffic of the CPUs behind one L3 cache,
//!   Linux 4.12 on processors with RDT or PQOS), if it is mounted. Phoenix estimates the same by
//!   cache misses (section 5.2).
//! * **Free memory** from the topology.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology};

use crate::cores::cores_of;

const STAT: &str = "proc/stat";
const RESCTRL: &str = "sys/fs/resctrl";

/// The load of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLoad {
    /// The node.
    pub node: NodeId,
    /// Bytes per second between the memory and the CPUs of the node; `None` if nothing tells them.
    pub bytes_per_s: Option<u64>,
    /// How many of its cores were idle, in the mean; only those on which this process may run.
    pub idle_cores: f64,
    /// Bytes that can be allocated on it without swapping.
    pub free_bytes: u64,
}

/// Counters of the machine at one time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    at: Instant,
    /// Ticks in which each CPU was idle, and all of its ticks.
    ticks: BTreeMap<usize, (u64, u64)>,
    /// Bytes that each L3 cache has moved, by its number.
    moved: BTreeMap<u64, u64>,
}

impl Snapshot {
    /// Reads the counters. Those that cannot be read are left out.
    pub fn read(files: &SysFiles) -> Snapshot {
        let stat = files.text(STAT).unwrap_or_default();
        Snapshot {
            at: Instant::now(),
            ticks: stat.lines().filter_map(ticks).collect(),
            moved: moved(files),
        }
    }

    /// The loads of the nodes on whose CPUs this process may run, from `earlier` until this
    /// snapshot.
    pub fn loads_since(
        &self,
        earlier: &Snapshot,
        topology: &Topology,
        files: &SysFiles,
    ) -> Vec<NodeLoad> {
        let time = self.at.saturating_duration_since(earlier.at);
        let traffic = self.traffic_since(earlier, topology, files, time);
        let allowed = topology.allowed_cpus();
        let mut loads = Vec::new();
        for node in topology.nodes() {
            let cpus: Vec<usize> =
                node.cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
            if cpus.is_empty() {
                continue;
            }
            let idle_of_core = |core: Vec<usize>| {
                core.iter().map(|cpu| self.idle_since(earlier, *cpu)).fold(1.0, f64::min)
            };
            loads.push(NodeLoad {
                node: node.id,
                bytes_per_s: traffic.get(&node.id).copied(),
                idle_cores: cores_of(&cpus, files).into_iter().map(idle_of_core).sum(),
                free_bytes: node.free_bytes,
            });
        }
        loads
    }

    /// The part of the time in which a CPU was idle. A CPU without counters counts as busy.
    fn idle_since(&self, earlier: &Snapshot, cpu: usize) -> f64 {
        let (Some((idle, all)), Some((idle_before, all_before))) =
            (self.ticks.get(&cpu), earlier.ticks.get(&cpu))
        else {
            return 0.0;
        };
        // The kernel's counters of idle time may go back a little.
        let all = all.saturating_sub(*all_before);
        if all == 0 { 0.0 } else { idle.saturating_sub(*idle_before) as f64 / all as f64 }
    }

    /// Bytes per second of each node whose L3 caches are counted.
    fn traffic_since(
        &self,
        earlier: &Snapshot,
        topology: &Topology,
        files: &SysFiles,
        time: Duration,
    ) -> BTreeMap<NodeId, u64> {
        let mut traffic: BTreeMap<NodeId, f64> = BTreeMap::new();
        let nodes_of = nodes_of_caches(topology, files);
        for (cache, bytes) in &self.moved {
            let (Some(before), Some(nodes)) = (earlier.moved.get(cache), nodes_of.get(cache))
            else {
                continue;
            };
            for node in nodes {
                // A cache may serve several nodes (sub-NUMA clusters), which share its bytes.
                let share = bytes.saturating_sub(*before) as f64 / nodes.len() as f64;
                *traffic.entry(*node).or_default() += share / time.as_secs_f64().max(1e-3);
            }
        }
        traffic.into_iter().map(|(node, bytes)| (node, bytes as u64)).collect()
    }
}

/// A line of `/proc/stat`: `cpu3 user nice system idle iowait irq softirq steal guest guest_nice`.
fn ticks(line: &str) -> Option<(usize, (u64, u64))> {
    let mut words = line.strip_prefix("cpu")?.split_whitespace();
    let cpu = words.next()?.parse().ok()?;
    // Guests are counted in user and nice, too.
    let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4).unwrap_or(&0);
    Some((cpu, (idle, ticks.iter().sum())))
}

/// The bytes that each L3 cache has moved, for all groups of resctrl.
fn moved(files: &SysFiles) -> BTreeMap<u64, u64> {
    let mut moved = BTreeMap::new();
    let entries = |folder: &str| files.names(folder).unwrap_or_default();
    // The mount is a group, and so is each folder with `mon_data` in it, or in its `mon_groups`.
    let mut groups = vec![RESCTRL.to_owned()];
    groups.extend(entries(RESCTRL).into_iter().map(|name| format!("{RESCTRL}/{name}")));
    let below: Vec<String> = groups
        .iter()
        .map(|group| format!("{group}/mon_groups"))
        .flat_map(|folder| entries(&folder).into_iter().map(move |name| format!("{folder}/{name}")))
        .collect();
    groups.extend(below);
    for group in groups {
        let data = format!("{group}/mon_data");
        for domain in entries(&data) {
            let Some(cache) = domain.strip_prefix("mon_L3_").and_then(|id| id.parse().ok()) else {
                continue;
            };
            // "Unavailable" and "Error" are no numbers.
            if let Ok(bytes) = files.number(&format!("{data}/{domain}/mbm_total_bytes")) {
                *moved.entry(cache).or_default() += bytes;
            }
        }
    }
    moved
}

/// The nodes of the CPUs behind each L3 cache.
fn nodes_of_caches(topology: &Topology, files: &SysFiles) -> BTreeMap<u64, Vec<NodeId>> {
    let mut nodes: BTreeMap<u64, Vec<NodeId>> = BTreeMap::new();
    for node in topology.nodes() {
        for cpu in &node.cpus {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/id");
            let Ok(cache) = files.number(&file) else { continue };
            let of_cache = nodes.entry(cache).or_default();
            if !of_cache.contains(&node.id) {
                of_cache.push(node.id);
            }
        }
    }
    nodes
}
