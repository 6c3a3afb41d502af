//! The facts of a machine on which the advice depends.

use std::path::Path;

use pageleap::NodeId;
use pageleap::topology::{Node, SysFiles, Topology};

use crate::allocators::Allocator;
use crate::calls::{Calls, ThisThread};
use crate::cores::cores_of;

const BALANCING: &str = "proc/sys/kernel/numa_balancing";
const HUGE_PAGES: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const RELEASE: &str = "proc/sys/kernel/osrelease";
const WEIGHTS: &str = "sys/kernel/mm/mempolicy/weighted_interleave";
/// The release of Linux that brought weighted interleaving.
const WEIGHTED_SINCE: (u32, u32) = (6, 9);

/// The system's setting of automatic NUMA balancing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balancing {
    /// The kernel balances among nodes.
    On,
    /// It does not, though it may promote pages from slower tiers.
    Off,
    /// The kernel was built without it.
    NotBuilt,
    /// The setting cannot be read.
    Unknown,
}

/// The system's setting of transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePageSetting {
    /// Wherever the kernel can make them.
    Always,
    /// Where a program asks for them.
    Madvise,
    /// Nowhere.
    Never,
    /// The kernel has none.
    NotBuilt,
    /// The setting cannot be read.
    Unknown,
}

/// How fast the memory of a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// The node.
    pub node: NodeId,
    /// Its tier (smaller is faster), if the kernel has tiers.
    pub tier: Option<u32>,
    /// Its read bandwidth by the firmware, if that has figures.
    pub mb_per_s: Option<u64>,
    /// Its weight for weighted interleaving, if the kernel has weights.
    pub weight: Option<u64>,
}

/// A machine, as a process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Nodes from which memory may be taken.
    pub memory: Vec<Speed>,
    /// Nodes with memory that the machine has, whether they may be used or not.
    pub nodes_with_memory: usize,
    /// Nodes that have CPUs which may be used.
    pub nodes_with_cpus: usize,
    /// The smallest and the largest distance between CPUs and memory of different nodes that may be
    /// used. 10 is the distance of a node to itself.
    pub distances: Option<(u32, u32)>,
    /// CPUs that may be used.
    pub cpus: usize,
    /// Their cores.
    pub cores: usize,
    /// Automatic NUMA balancing.
    pub balancing: Balancing,
    /// Transparent huge pages.
    pub huge_pages: HugePageSetting,
    /// Allocators that are installed; `None` for another machine.
    pub allocators: Option<Vec<Allocator>>,
    /// The kernel's release.
    pub kernel: Option<String>,
    /// Whether this process may set memory policies; `None` if that was not tried.
    pub can_set_policy: Option<bool>,
    /// Whether this user is root; `None` for another machine.
    pub is_root: Option<bool>,
    /// Whether the kernel interleaves by weights.
    pub has_weights: Option<bool>,
}

impl Facts {
    /// Reads the facts. Files of another machine tell nothing of allocators and of what a process
    /// may do there. On this machine the calling thread is given the memory policy that it has, to see
    /// whether a filter refuses that.
    pub fn read(files: &SysFiles, topology: &Topology) -> Facts {
        let is_here = files.root() == Path::new("/");
        let kernel = files.text(RELEASE).ok().map(|text| text.trim().to_owned());
        let cpus = topology.allowed_cpus();
        let (memory, nodes_with_cpus) = nodes(files, topology, &cpus);
        let by_release = kernel.as_deref().and_then(release).map(|of| of >= WEIGHTED_SINCE);
        let has_weights = if files.names(WEIGHTS).is_ok() { Some(true) } else { by_release };
        let installed = || Allocator::ALL.into_iter().filter(|one| one.library().is_some());
        Facts {
            distances: distances(topology, &memory, &nodes_with_cpus),
            memory,
            nodes_with_memory: topology.nodes().iter().filter(|n| n.total_bytes > 0).count(),
            nodes_with_cpus: nodes_with_cpus.len(),
            cores: cores_of(&cpus, files).len(),
            cpus: cpus.len(),
            balancing: balancing(files, kernel.is_some()),
            huge_pages: huge_pages(files, kernel.is_some()),
            allocators: is_here.then(|| installed().collect()),
            can_set_policy: is_here.then(|| may_set_policy(&mut ThisThread)).flatten(),
            // SAFETY: the call reads the credentials of this thread.
            is_root: is_here.then(|| unsafe { libc::geteuid() } == 0),
            has_weights,
            kernel,
        }
    }

    /// The nodes of the fastest memory, and whether there are slower ones: by tiers, or by the
    /// firmware's bandwidths where all nodes have one.
    pub(super) fn fastest(&self) -> (Vec<NodeId>, bool) {
        let best_tier = self.memory.iter().filter_map(|node| node.tier).min();
        let all_have = self.memory.iter().all(|node| node.mb_per_s.is_some());
        let best_speed = self.memory.iter().filter_map(|node| node.mb_per_s).max();
        let is_fast = |node: &&Speed| {
            let is_slow = all_have && node.mb_per_s < best_speed;
            (node.tier.is_none() || node.tier == best_tier) && !is_slow
        };
        let fast: Vec<NodeId> = self.memory.iter().filter(is_fast).map(|node| node.node).collect();
        let has_slower = fast.len() < self.memory.len();
        (fast, has_slower)
    }
}

/// Nodes whose memory may be used, with its speed, and nodes whose CPUs may be used.
fn nodes(files: &SysFiles, topology: &Topology, cpus: &[usize]) -> (Vec<Speed>, Vec<NodeId>) {
    let allowed = topology.allowed_nodes();
    let of_memory = topology.nodes().iter().filter(|node| allowed.contains(&node.id));
    let speed = |node: &Node| Speed {
        node: node.id,
        tier: node.tier,
        mb_per_s: node.access.iter().filter_map(|access| access.read_bandwidth_mb_per_s).max(),
        weight: files.number(&format!("{WEIGHTS}/node{}", node.id.0)).ok(),
    };
    let memory = of_memory.map(speed).collect();
    let may_run = |node: &&Node| node.cpus.iter().any(|cpu| cpus.contains(cpu));
    let of_cpus = topology.nodes().iter().filter(may_run).map(|node| node.id);
    (memory, of_cpus.collect())
}

fn distances(topology: &Topology, memory: &[Speed], cpus: &[NodeId]) -> Option<(u32, u32)> {
    let pairs = cpus.iter().flat_map(|from| memory.iter().map(|to| (*from, to.node)));
    let apart = pairs.filter(|(from, to)| from != to);
    let all: Vec<u32> = apart.filter_map(|(from, to)| topology.distance(from, to)).collect();
    Some((*all.iter().min()?, *all.iter().max()?))
}

/// `is_known` says that files of the kernel can be read, so that a missing one tells something.
fn balancing(files: &SysFiles, is_known: bool) -> Balancing {
    match files.number(BALANCING) {
        // Bit 0: among nodes; bit 1: promotion from slower tiers.
        Ok(mask) if mask & 1 != 0 => Balancing::On,
        Ok(_) => Balancing::Off,
        Err(_) if is_known => Balancing::NotBuilt,
        Err(_) => Balancing::Unknown,
    }
}

fn huge_pages(files: &SysFiles, is_known: bool) -> HugePageSetting {
    let text = files.text(HUGE_PAGES).unwrap_or_default();
    let value = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    match value {
        Some("always") => HugePageSetting::Always,
        Some("madvise") => HugePageSetting::Madvise,
        Some("never") => HugePageSetting::Never,
        _ if is_known && files.names("sys/kernel/mm").is_ok() => HugePageSetting::NotBuilt,
        _ => HugePageSetting::Unknown,
    }
}

/// Major and minor number of a release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Whether a policy can be set: tried with the policy that the thread has. `None` if it has one that
/// could not be set again.
fn may_set_policy(calls: &mut impl Calls) -> Option<bool> {
    match calls.policy() {
        Ok(Some(policy)) => Some(calls.set_policy(&policy).is_ok()),
        Ok(None) => None,
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use pageleap_sys::Errno;

    use super::*;
    use crate::policy::{MemoryPolicy, Mode};
    use crate::trees::Tree;

    /// A kernel that tells this policy, and takes a policy or refuses it.
    struct Kernel(Result<Option<MemoryPolicy>, Errno>, Result<(), Errno>);

    impl Calls for Kernel {
        fn set_policy(&mut self, policy: &MemoryPolicy) -> Result<(), Errno> {
            assert_eq!(Ok(Some(policy)), self.0.as_ref().map(Option::as_ref), "it stays as it was");
            self.1
        }

        fn policy(&self) -> Result<Option<MemoryPolicy>, Errno> {
            self.0.clone()
        }

        fn set_cpus(&mut self, _: &[usize]) -> Result<(), Errno> {
            unreachable!()
        }

        fn cpus(&self) -> Result<Vec<usize>, Errno> {
            unreachable!()
        }

        fn set_thp_disabled(&mut self, _: bool) -> Result<(), Errno> {
            unreachable!()
        }
    }

    #[test]
    fn a_filter_is_found_by_setting_the_policy_that_is_set() {
        let own = MemoryPolicy::new(Mode::Interleave, vec![NodeId(0)]);
        let refused = Errno(libc::EPERM);
        let may = |policy, set| may_set_policy(&mut Kernel(policy, set));
        assert_eq!(may(Ok(Some(own.clone())), Ok(())), Some(true));
        assert_eq!(may(Ok(Some(own)), Err(refused)), Some(false));
        assert_eq!(may(Err(refused), Ok(())), Some(false));
        // A policy that could not be set again is left alone.
        assert_eq!(may(Ok(None), Ok(())), None);
    }

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(release("6.18.44-fc"), Some((6, 18)));
        assert_eq!(release("6.9-rc1"), Some((6, 9)));
        assert!(release("6.18.0").unwrap() >= WEIGHTED_SINCE);
        assert!(release("6.1.0-37-amd64").unwrap() < WEIGHTED_SINCE);
        assert_eq!(release("linux"), None);
    }

    #[test]
    fn settings_that_cannot_be_read_are_not_known() {
        for (mask, expected) in
            [("0\n", Balancing::Off), ("1\n", Balancing::On), ("2\n", Balancing::Off)]
        {
            let tree = Tree::new(&[(BALANCING, mask)]);
            assert_eq!(balancing(&tree.files(), true), expected);
        }
        let none = Tree::new(&[("sys/kernel/mm/x", "")]);
        assert_eq!(balancing(&none.files(), true), Balancing::NotBuilt);
        assert_eq!(balancing(&none.files(), false), Balancing::Unknown);
        assert_eq!(huge_pages(&none.files(), true), HugePageSetting::NotBuilt);
        assert_eq!(huge_pages(&none.files(), false), HugePageSetting::Unknown);
        for (text, expected) in [
            ("[always] madvise never", HugePageSetting::Always),
            ("always [madvise] never", HugePageSetting::Madvise),
            ("always madvise [never]", HugePageSetting::Never),
        ] {
            let tree = Tree::new(&[(HUGE_PAGES, text)]);
            assert_eq!(huge_pages(&tree.files(), true), expected);
        }
    }
}
