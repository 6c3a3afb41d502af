//! The manifest of the machine that stands beside results.

use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology, id_list};

use super::cgroup;
use super::lines::{choice, line, switch};
use super::processor::{Processor, is_virtual};
use crate::document::{Body, Fact, Section, Value, fact};
use crate::figures::human_bytes;

/// The directory of the CPUs.
const CPUS: &str = "sys/devices/system/cpu";
/// The directory of the settings of transparent huge pages.
const THP: &str = "sys/kernel/mm/transparent_hugepage";

/// A machine with the settings that change results. `None`: the kernel does not say, or the machine
/// has no such part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// The model of the first CPU.
    pub cpu_model: Option<String>,
    /// The version of its microcode.
    pub microcode: Option<String>,
    /// The CPUs that are online.
    pub cpus_online: Option<Vec<usize>>,
    /// The CPUs that this process may use: its cpuset and its affinity.
    pub cpus_allowed: Option<Vec<usize>>,
    /// Cores of the CPUs that are online.
    pub cores: Option<usize>,
    /// Whether cores run several threads at once (simultaneous multithreading).
    pub smt: Option<bool>,
    /// The kernel's release, as `uname -r` prints it.
    pub kernel: Option<String>,
    /// Whether the machine is a virtual one.
    pub is_virtual: Option<bool>,
    /// Vendor and product of the machine (DMI). Those of a virtual machine name the hypervisor.
    pub product: Option<String>,
    /// The online memory nodes.
    pub nodes: Option<Vec<HostNode>>,
    /// `enabled` of transparent huge pages: private memory that gets them.
    pub thp_enabled: Option<String>,
    /// `defrag` of transparent huge pages: how hard the kernel tries to get one at a fault.
    pub thp_defrag: Option<String>,
    /// `shmem_enabled` of transparent huge pages: shared memory that gets them. Pools are such.
    pub thp_shmem_enabled: Option<String>,
    /// `kernel.numa_balancing`: 0 off, 1 the kernel moves pages to their accessors, 2 it moves them
    /// between tiers. `None` for a kernel without it.
    pub numa_balancing: Option<u64>,
    /// The distinct cpufreq governors of all online CPUs, sorted. `None` without cpufreq.
    pub governors: Option<Vec<String>>,
    /// Whether CPUs may exceed their base frequency.
    pub boost: Option<bool>,
    /// The load average of the last minute.
    pub load_average: Option<f64>,
    /// The lowest memory limit of the cgroups of this process.
    pub memory_limit_bytes: Option<u64>,
    /// The clocksource. Some, such as `hpet`, make each reading of the time a slow call.
    pub clocksource: Option<String>,
}

/// A memory node of a [`Host`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNode {
    /// The number of the node.
    pub id: u32,
    /// Its online CPUs.
    pub cpus: Vec<usize>,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes that can be allocated without swapping, clean file pages included.
    pub free_bytes: u64,
    /// The distances from this node to each node, in the order of [`Host::nodes`].
    pub distances: Option<Vec<u32>>,
}

impl Host {
    /// Reads the files of a machine. A file that is missing or damaged leaves its parts `None`.
    pub fn read(files: &SysFiles) -> Host {
        let processor = Processor::of(&files.text_by_cpu("proc/cpuinfo").unwrap_or_default());
        let topology = Topology::read_from(files).ok();
        let cpus_online = topology.as_ref().map(Topology::online_cpus);
        let online = cpus_online.as_deref().unwrap_or_default();
        let product = product(files);
        let hypervisor = line(files, "sys/hypervisor/type");
        Host {
            cores: cores(files, online),
            smt: switch(files, &format!("{CPUS}/smt/active")),
            kernel: line(files, "proc/sys/kernel/osrelease"),
            is_virtual: is_virtual(
                processor.has_hypervisor,
                hypervisor.as_deref(),
                product.as_deref(),
            ),
            cpus_allowed: topology
                .as_ref()
                .filter(|topology| topology.knows_allowed_cpus())
                .map(Topology::allowed_cpus),
            nodes: topology.as_ref().map(nodes),
            thp_enabled: choice(files, &format!("{THP}/enabled")),
            thp_defrag: choice(files, &format!("{THP}/defrag")),
            thp_shmem_enabled: choice(files, &format!("{THP}/shmem_enabled")),
            numa_balancing: files.number("proc/sys/kernel/numa_balancing").ok(),
            governors: governors(files, online),
            boost: boost(files),
            load_average: load_average(files),
            memory_limit_bytes: cgroup::memory_limit(files),
            clocksource: line(
                files,
                "sys/devices/system/clocksource/clocksource0/current_clocksource",
            ),
            cpu_model: processor.model,
            microcode: processor.microcode,
            cpus_online,
            product,
        }
    }

    /// The manifest as a section of a result. Lists of CPUs have the kernel's format, such as
    /// `0-3,8`.
    pub fn section(&self) -> Section {
        let list = |cpus: &Option<Vec<usize>>| cpus.clone().map(id_list);
        let texts = |texts: &Option<Vec<String>>| {
            let texts = texts.clone().map(|texts| texts.into_iter().map(Value::Text).collect());
            texts.map_or(Value::Unknown, Value::List)
        };
        let mut facts = vec![
            fact("cpu_model", "CPU", self.cpu_model.clone()),
            fact("microcode", "microcode", self.microcode.clone()),
            fact("cpus_online", "CPUs online", list(&self.cpus_online)),
            fact("cpus_allowed", "CPUs allowed", list(&self.cpus_allowed)),
            fact("cores", "cores online", self.cores.map_or(Value::Unknown, Value::count)),
            fact("smt", "SMT", self.smt),
            fact("kernel", "kernel", self.kernel.clone()),
            fact("virtual", "virtual machine", self.is_virtual),
            fact("product", "product", self.product.clone()),
        ];
        facts.extend(self.node_facts());
        facts.extend([
            fact("thp_enabled", "THP", self.thp_enabled.clone()),
            fact("thp_defrag", "THP defrag", self.thp_defrag.clone()),
            fact("thp_shmem_enabled", "THP of shared memory", self.thp_shmem_enabled.clone()),
            fact(
                "numa_balancing",
                "NUMA balancing",
                self.numa_balancing.map_or(Value::Unknown, Value::Count),
            ),
            fact("governors", "governors", texts(&self.governors)),
            fact("boost", "boost", self.boost),
            fact("load_average", "load average", Value::ratio(self.load_average))
                .remark("tasks that ran or waited, in the last minute"),
            fact("memory_limit_bytes", "memory limit", Value::bytes(self.memory_limit_bytes))
                .remark("of the cgroup"),
            fact("clocksource", "clocksource", self.clocksource.clone()),
        ]);
        Section::new("host", "Host", Body::Facts(facts))
    }

    /// The nodes for programs as maps, and for people in words; the distances for both.
    fn node_facts(&self) -> [Fact; 3] {
        let all = |value: fn(&HostNode) -> Value| {
            let nodes = self.nodes.as_ref();
            nodes.map_or(Value::Unknown, |nodes| Value::List(nodes.iter().map(value).collect()))
        };
        let map = |node: &HostNode| {
            Value::Map(vec![
                ("id".to_owned(), Value::count(node.id)),
                ("cpus".to_owned(), id_list(node.cpus.iter().copied()).into()),
                ("total_bytes".to_owned(), Value::Bytes(node.total_bytes)),
                ("free_bytes".to_owned(), Value::Bytes(node.free_bytes)),
            ])
        };
        let distances = self.nodes.iter().flatten().map(|node| {
            let row = node.distances.as_ref()?.iter().map(|distance| Value::count(*distance));
            Some((node.id.to_string(), Value::List(row.collect())))
        });
        let distances = distances.collect::<Option<Vec<_>>>().filter(|rows| !rows.is_empty());
        [
            fact("nodes", "", all(map)),
            fact("", "nodes", all(|node| node.words().into())),
            fact("distances", "distances", distances.map_or(Value::Unknown, Value::Map)),
        ]
    }
}

impl HostNode {
    fn words(&self) -> String {
        let cpus = if self.cpus.is_empty() {
            "no CPUs".to_owned()
        } else {
            format!("CPUs {}", id_list(self.cpus.iter().copied()))
        };
        let [total, free] = [self.total_bytes, self.free_bytes].map(|b| human_bytes(b as f64));
        format!("{}: {cpus}, {total}, {free} free", self.id)
    }
}

fn nodes(topology: &Topology) -> Vec<HostNode> {
    let distances = |from: NodeId| {
        topology.nodes().iter().map(|to| topology.distance(from, to.id)).collect::<Option<_>>()
    };
    let node = |node: &pageleap::topology::Node| HostNode {
        id: node.id.0,
        cpus: node.cpus.clone(),
        total_bytes: node.total_bytes,
        free_bytes: node.free_bytes,
        distances: distances(node.id),
    };
    topology.nodes().iter().map(node).collect()
}

/// The number of cores: distinct sets of sibling threads. `None` if one is not known, or there are
/// no CPUs.
fn cores(files: &SysFiles, online: &[usize]) -> Option<usize> {
    let siblings =
        |cpu: &usize| line(files, &format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list"));
    distinct(online.iter().map(siblings).collect::<Option<Vec<_>>>()?).map(|cores| cores.len())
}

/// The distinct governors of these CPUs; `None` if none of them has one.
fn governors(files: &SysFiles, online: &[usize]) -> Option<Vec<String>> {
    let governor = |cpu: &usize| line(files, &format!("{CPUS}/cpu{cpu}/cpufreq/scaling_governor"));
    distinct(online.iter().filter_map(governor).collect())
}

/// The texts, sorted and each once; `None` without texts.
fn distinct(mut texts: Vec<String>) -> Option<Vec<String>> {
    texts.sort_unstable();
    texts.dedup();
    (!texts.is_empty()).then_some(texts)
}

fn boost(files: &SysFiles) -> Option<bool> {
    let is_off = switch(files, &format!("{CPUS}/intel_pstate/no_turbo"));
    is_off.map(|is_off| !is_off).or_else(|| switch(files, &format!("{CPUS}/cpufreq/boost")))
}

fn product(files: &SysFiles) -> Option<String> {
    let names = ["sys_vendor", "product_name"];
    let names = names.iter().filter_map(|name| line(files, &format!("sys/class/dmi/id/{name}")));
    Some(names.collect::<Vec<_>>().join(" ")).filter(|product| !product.is_empty())
}

fn load_average(files: &SysFiles) -> Option<f64> {
    let line = line(files, "proc/loadavg")?;
    let load: f64 = line.split_whitespace().next()?.parse().ok()?;
    (load.is_finite() && load >= 0.0).then_some(load)
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
