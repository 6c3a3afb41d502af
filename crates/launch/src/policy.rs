//! The memory policy of a program: its mode, its nodes, and the policy that stands in for it where
//! the kernel does not know the mode.

use std::fmt;

use pageleap::NodeId;
use pageleap::topology::id_list;
use pageleap_sys::{Errno, ThreadPolicy, mpol};

/// Where a program's memory comes from (`set_mempolicy(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No policy (`MPOL_DEFAULT`): from the node of the CPU that first touches a page. Automatic
    /// balancing may move the page later.
    Default,
    /// As [`Mode::Default`], but as an explicit policy, which automatic balancing leaves alone
    /// (`MPOL_LOCAL`).
    Local,
    /// From one node while it has free memory, else from the nearest other one (`MPOL_PREFERRED`).
    Preferred,
    /// From these nodes while they have free memory, the nearest first (`MPOL_PREFERRED_MANY`,
    /// Linux 5.15).
    PreferredMany,
    /// From these nodes only (`MPOL_BIND`). If they are full, the kernel ends a process.
    Bind,
    /// From these nodes in turn (`MPOL_INTERLEAVE`).
    Interleave,
    /// From these nodes in turn, more often from those with a larger weight
    /// (`MPOL_WEIGHTED_INTERLEAVE`, Linux 6.9).
    WeightedInterleave,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 7] = [
        Mode::Default,
        Mode::Local,
        Mode::Preferred,
        Mode::PreferredMany,
        Mode::Bind,
        Mode::Interleave,
        Mode::WeightedInterleave,
    ];

    /// The number of the mode, without flags.
    fn number(self) -> i32 {
        match self {
            Mode::Default => mpol::DEFAULT,
            Mode::Local => mpol::LOCAL,
            Mode::Preferred => mpol::PREFERRED,
            Mode::PreferredMany => mpol::PREFERRED_MANY,
            Mode::Bind => mpol::BIND,
            Mode::Interleave => mpol::INTERLEAVE,
            Mode::WeightedInterleave => mpol::WEIGHTED_INTERLEAVE,
        }
    }

    /// The name of the kernel's constant.
    pub fn constant(self) -> &'static str {
        match self {
            Mode::Default => "MPOL_DEFAULT",
            Mode::Local => "MPOL_LOCAL",
            Mode::Preferred => "MPOL_PREFERRED",
            Mode::PreferredMany => "MPOL_PREFERRED_MANY",
            Mode::Bind => "MPOL_BIND",
            Mode::Interleave => "MPOL_INTERLEAVE",
            Mode::WeightedInterleave => "MPOL_WEIGHTED_INTERLEAVE",
        }
    }

    /// The long option of numactl, without dashes; `None` for the default policy.
    pub fn option(self) -> Option<&'static str> {
        Some(match self {
            Mode::Default => return None,
            Mode::Local => "localalloc",
            Mode::Preferred => "preferred",
            Mode::PreferredMany => "preferred-many",
            Mode::Bind => "membind",
            Mode::Interleave => "interleave",
            Mode::WeightedInterleave => "weighted-interleave",
        })
    }

    /// The release of Linux that brought the mode, if a kernel in use may be older.
    pub fn since(self) -> Option<&'static str> {
        match self {
            Mode::PreferredMany => Some("5.15"),
            Mode::WeightedInterleave => Some("6.9"),
            _ => None,
        }
    }

    /// Whether automatic balancing may be asked for together with this mode.
    pub fn can_be_balanced(self) -> bool {
        matches!(self, Mode::Default | Mode::Bind | Mode::PreferredMany)
    }
}

/// A memory policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// Where memory comes from.
    pub mode: Mode,
    /// The nodes, in ascending order: one for [`Mode::Preferred`], none for [`Mode::Default`] and
    /// [`Mode::Local`].
    pub nodes: Vec<NodeId>,
    /// Whether automatic balancing may move pages among the nodes (`MPOL_F_NUMA_BALANCING`, Linux
    /// 5.12 for [`Mode::Bind`], 6.10 for [`Mode::PreferredMany`]).
    pub is_balanced: bool,
}

impl MemoryPolicy {
    /// A policy without automatic balancing.
    pub fn new(mode: Mode, nodes: Vec<NodeId>) -> MemoryPolicy {
        MemoryPolicy { mode, nodes, is_balanced: false }
    }

    /// In the form that the kernel takes.
    ///
    /// # Errors
    /// EINVAL: a node has a number that no kernel knows.
    pub(crate) fn for_kernel(&self) -> Result<ThreadPolicy, Errno> {
        let flag = if self.is_balanced { mpol::NUMA_BALANCING } else { 0 };
        ThreadPolicy::new(self.mode.number() | flag, self.nodes.iter().map(|node| node.0))
    }

    /// A policy as the kernel tells it, if it is one of these.
    pub(crate) fn from_kernel(policy: &ThreadPolicy) -> Option<MemoryPolicy> {
        let flags = mpol::NUMA_BALANCING | mpol::STATIC_NODES | mpol::RELATIVE_NODES;
        let number = policy.mode() & !flags;
        let mode = Mode::ALL.into_iter().find(|mode| mode.number() == number)?;
        let nodes: Vec<NodeId> = policy.nodes().into_iter().map(NodeId).collect();
        // Before Linux 5.14, MPOL_LOCAL was MPOL_PREFERRED without a node.
        let mode = if mode == Mode::Preferred && nodes.is_empty() { Mode::Local } else { mode };
        Some(MemoryPolicy { mode, nodes, is_balanced: policy.mode() & mpol::NUMA_BALANCING != 0 })
    }

    /// The policy that comes nearest to this one on a kernel that does not know this one, and the
    /// reason why it does not; `None` if every kernel knows it.
    pub(crate) fn for_an_older_kernel(&self) -> Option<(MemoryPolicy, String)> {
        let older = |mode, nodes: &[NodeId]| MemoryPolicy::new(mode, nodes.to_vec());
        if self.is_balanced && self.mode != Mode::Default {
            let since = if self.mode == Mode::PreferredMany { "6.10" } else { "5.12" };
            let reason = format!("balancing within {} needs Linux {since}", self.mode.constant());
            return Some((older(self.mode, &self.nodes), reason));
        }
        let reason = format!("{} needs Linux {}", self.mode.constant(), self.mode.since()?);
        let nearest = match self.mode {
            Mode::WeightedInterleave => older(Mode::Interleave, &self.nodes),
            _ => older(Mode::Preferred, self.nodes.get(..1)?),
        };
        Some((nearest, reason))
    }

    /// The nodes in numactl's notation.
    pub fn node_list(&self) -> String {
        node_list(&self.nodes)
    }
}

/// Nodes in numactl's notation.
pub(crate) fn node_list(nodes: &[NodeId]) -> String {
    id_list(nodes.iter().map(|node| node.0 as usize))
}

/// The kernel's name with the nodes: `MPOL_BIND of nodes 0-1`.
impl fmt::Display for MemoryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.mode.constant())?;
        if self.is_balanced && self.mode != Mode::Default {
            f.write_str(" | MPOL_F_NUMA_BALANCING")?;
        }
        match self.nodes.len() {
            0 => Ok(()),
            1 => write!(f, " of node {}", self.node_list()),
            _ => write!(f, " of nodes {}", self.node_list()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(mode: Mode, nodes: &[u32]) -> MemoryPolicy {
        MemoryPolicy::new(mode, nodes.iter().copied().map(NodeId).collect())
    }

    #[test]
    fn a_policy_is_the_same_after_a_visit_to_the_kernel() {
        for mode in Mode::ALL {
            let nodes: &[u32] = match mode {
                Mode::Default | Mode::Local => &[],
                Mode::Preferred => &[3],
                _ => &[0, 3],
            };
            for is_balanced in [false, true] {
                let policy = MemoryPolicy { is_balanced, ..policy(mode, nodes) };
                let told = MemoryPolicy::from_kernel(&policy.for_kernel().unwrap());
                assert_eq!(told, Some(policy));
            }
        }
        let old = ThreadPolicy::new(mpol::PREFERRED, []).unwrap();
        assert_eq!(MemoryPolicy::from_kernel(&old), Some(policy(Mode::Local, &[])));
        let set = ThreadPolicy::new(mpol::BIND | mpol::STATIC_NODES, [1]).unwrap();
        assert_eq!(MemoryPolicy::from_kernel(&set), Some(policy(Mode::Bind, &[1])));
        assert_eq!(MemoryPolicy::from_kernel(&ThreadPolicy::new(99, []).unwrap()), None);
    }

    #[test]
    fn older_kernels_get_the_nearest_policy() {
        let nearest = |policy: &MemoryPolicy| policy.for_an_older_kernel();
        let weighted = policy(Mode::WeightedInterleave, &[0, 2]);
        let reason = "MPOL_WEIGHTED_INTERLEAVE needs Linux 6.9".to_owned();
        assert_eq!(nearest(&weighted), Some((policy(Mode::Interleave, &[0, 2]), reason)));
        let many = policy(Mode::PreferredMany, &[1, 2]);
        let reason = "MPOL_PREFERRED_MANY needs Linux 5.15".to_owned();
        assert_eq!(nearest(&many), Some((policy(Mode::Preferred, &[1]), reason)));
        let balanced = MemoryPolicy { is_balanced: true, ..policy(Mode::Bind, &[1]) };
        let reason = "balancing within MPOL_BIND needs Linux 5.12".to_owned();
        assert_eq!(nearest(&balanced), Some((policy(Mode::Bind, &[1]), reason)));
        assert_eq!(nearest(&policy(Mode::Bind, &[1])), None);
        assert_eq!(nearest(&policy(Mode::Interleave, &[0, 1])), None);
    }
}
