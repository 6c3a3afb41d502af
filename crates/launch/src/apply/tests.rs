//! [`apply`] on kernels that refuse, drop and do not know.

use std::cell::RefCell;

use super::*;
use crate::settings::Settings;
use crate::trees::Tree;

/// A kernel with nodes 0 and 1, and the CPUs 0 to 3, of which the cpuset may forbid some.
#[derive(Default)]
struct Kernel {
    /// Modes that it does not know, and whether it knows balancing.
    unknown: Vec<Mode>,
    knows_no_balancing: bool,
    /// The error of every call that sets something.
    filter: Option<i32>,
    forbidden_nodes: Vec<u32>,
    forbidden_cpus: Vec<usize>,
    policy: RefCell<Option<MemoryPolicy>>,
    cpus: Vec<usize>,
    calls: usize,
}

impl Kernel {
    fn call(&mut self) -> Result<(), Errno> {
        self.calls += 1;
        self.filter.map_or(Ok(()), |errno| Err(Errno(errno)))
    }
}

impl Calls for Kernel {
    fn set_policy(&mut self, policy: &MemoryPolicy) -> Result<(), Errno> {
        self.call()?;
        let unknown = self.unknown.contains(&policy.mode);
        let mut policy = policy.clone();
        let had_nodes = !policy.nodes.is_empty();
        policy.nodes.retain(|node| !self.forbidden_nodes.contains(&node.0));
        if unknown
            || policy.is_balanced && self.knows_no_balancing
            || had_nodes && policy.nodes.is_empty()
        {
            return Err(Errno(libc::EINVAL));
        }
        *self.policy.borrow_mut() = Some(policy);
        Ok(())
    }

    fn policy(&self) -> Result<Option<MemoryPolicy>, Errno> {
        Ok(self.policy.borrow().clone())
    }

    fn set_cpus(&mut self, cpus: &[usize]) -> Result<(), Errno> {
        if self.filter != Some(libc::EPERM) {
            self.call()?;
        }
        let mut cpus = cpus.to_vec();
        cpus.retain(|cpu| !self.forbidden_cpus.contains(cpu));
        if cpus.is_empty() {
            return Err(Errno(libc::EINVAL));
        }
        self.cpus = cpus;
        Ok(())
    }

    fn cpus(&self) -> Result<Vec<usize>, Errno> {
        Ok(self.cpus.clone())
    }

    fn set_thp_disabled(&mut self, _is_disabled: bool) -> Result<(), Errno> {
        self.call()
    }
}

/// A machine with two nodes of two CPUs each.
fn machine() -> Topology {
    const NODE: &str = "sys/devices/system/node";
    let memory = |id| format!("Node {id} MemTotal: 1024 kB\nNode {id} MemFree: 512 kB\n");
    let lists =
        ["online", "possible", "has_cpu", "has_memory"].map(|name| format!("{NODE}/{name}"));
    let nodes = [(0, "0-1\n"), (1, "2-3\n")].into_iter().flat_map(|(id, cpus)| {
        [("cpulist", cpus.to_owned()), ("distance", "10 20\n".to_owned()), ("meminfo", memory(id))]
            .map(|(name, text)| (format!("{NODE}/node{id}/{name}"), text))
    });
    let files: Vec<(String, String)> =
        lists.map(|list| (list, "0-1\n".to_owned())).into_iter().chain(nodes).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect();
    Topology::read_from(&Tree::new(&files).files()).unwrap()
}

fn policy(mode: Mode, nodes: &[u32]) -> MemoryPolicy {
    MemoryPolicy::new(mode, nodes.iter().copied().map(NodeId).collect())
}

fn memory(policy: MemoryPolicy) -> Settings {
    Settings { memory: Some(policy), ..Settings::default() }
}

#[test]
fn settings_that_the_kernel_takes_need_no_note() {
    let mut kernel = Kernel::default();
    let settings = Settings {
        memory: Some(policy(Mode::Bind, &[0, 1])),
        cpus: Some(vec![1, 2]),
        is_thp_disabled: Some(true),
    };
    let applied = apply(&settings, Some(&machine()), &mut kernel, true).unwrap();
    assert_eq!(applied, Applied { settings: settings.clone(), notes: vec![] });
    assert_eq!(kernel.calls, 3);
    // Nothing that was not asked for is touched.
    let applied = apply(&Settings::default(), Some(&machine()), &mut kernel, true).unwrap();
    assert_eq!((applied, kernel.calls), (Applied::default(), 3));
}

#[test]
fn an_older_kernel_gets_the_nearest_policy_step_by_step() {
    let weighted = policy(Mode::WeightedInterleave, &[0, 1]);
    let older = || Kernel {
        unknown: vec![Mode::WeightedInterleave, Mode::PreferredMany],
        knows_no_balancing: true,
        ..Kernel::default()
    };
    let applied = apply(&memory(weighted.clone()), Some(&machine()), &mut older(), false).unwrap();
    assert_eq!(applied.settings, memory(policy(Mode::Interleave, &[0, 1])));
    assert_eq!(
        applied.notes,
        ["set_mempolicy(MPOL_WEIGHTED_INTERLEAVE of nodes 0-1): EINVAL (Invalid argument): \
          MPOL_WEIGHTED_INTERLEAVE needs Linux 6.9; use a newer kernel, or ask for the other \
          policy. MPOL_INTERLEAVE of nodes 0-1 instead"]
    );
    let error = apply(&memory(weighted), Some(&machine()), &mut older(), true).unwrap_err();
    assert!(error.to_string().contains("needs Linux 6.9"), "{error}");
    // Two steps: no balancing, and one node.
    let many = MemoryPolicy { is_balanced: true, ..policy(Mode::PreferredMany, &[0, 1]) };
    let applied = apply(&memory(many), Some(&machine()), &mut older(), false).unwrap();
    assert_eq!(applied.settings, memory(policy(Mode::Preferred, &[0])));
    assert_eq!(applied.notes.len(), 2);
}

#[test]
fn dropped_nodes_and_cpus_are_named() {
    let forbidding =
        || Kernel { forbidden_nodes: vec![1], forbidden_cpus: vec![3], ..Kernel::default() };
    let nodes = memory(policy(Mode::Bind, &[0, 1]));
    let cpus = Settings { cpus: Some(vec![0, 3]), ..Settings::default() };
    for (settings, part) in [(&nodes, "dropped the nodes 1: "), (&cpus, "dropped the CPUs 3: ")] {
        let applied = apply(settings, Some(&machine()), &mut forbidding(), false).unwrap();
        assert!(applied.notes.len() == 1 && applied.notes[0].contains(part), "{applied:?}");
        let error = apply(settings, Some(&machine()), &mut forbidding(), true).unwrap_err();
        assert!(matches!(&error, Error::Dropped { dropped } if dropped.contains(part)), "{error}");
    }
    let applied = apply(&nodes, Some(&machine()), &mut forbidding(), false).unwrap();
    assert_eq!(applied.settings, memory(policy(Mode::Bind, &[0])));
}

#[test]
fn a_set_of_forbidden_ones_is_an_error_with_the_reason() {
    let mut kernel =
        Kernel { forbidden_nodes: vec![0, 1], forbidden_cpus: vec![2, 3], ..Kernel::default() };
    let nodes = memory(policy(Mode::Interleave, &[0, 1]));
    let error = apply(&nodes, Some(&machine()), &mut kernel, false).unwrap_err().to_string();
    assert!(error.contains("EINVAL") && error.contains("allowed are 0-1"), "{error}");
    // Policies for which an older kernel has another one: the nodes are the reason, not the kernel.
    let balanced = MemoryPolicy { is_balanced: true, ..policy(Mode::Bind, &[1]) };
    for asked in
        [policy(Mode::WeightedInterleave, &[0, 1]), policy(Mode::PreferredMany, &[1]), balanced]
    {
        for is_strict in [false, true] {
            let error = apply(&memory(asked.clone()), Some(&machine()), &mut kernel, is_strict);
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with(&format!("set_mempolicy({asked}): EINVAL")), "{error}");
            assert!(error.contains("allowed are 0-1"), "{error}");
        }
    }
    let cpus = Settings { cpus: Some(vec![2, 3]), ..Settings::default() };
    let error = apply(&cpus, Some(&machine()), &mut kernel, false).unwrap_err();
    assert!(error.to_string().contains("CPUs 2-3): EINVAL"), "{error}");
    assert_eq!(error.exit_code(), 125);
}

#[test]
fn where_a_filter_refuses_policies_threads_stay_near_the_nodes() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let filtering = || Kernel { filter: Some(errno), ..Kernel::default() };
        let bound = memory(policy(Mode::Bind, &[1]));
        let mut kernel = filtering();
        let applied = apply(&bound, Some(&machine()), &mut kernel, false).unwrap();
        assert_eq!(applied.notes.len(), 1);
        // The model of EPERM lets affinities through, as container runtimes do.
        let (cpus, note) = match errno {
            libc::EPERM => (Some(vec![2, 3]), "Threads run on the CPUs 2-3 of node 1 instead"),
            _ => (None, "The policy stays as it was"),
        };
        assert_eq!(applied.settings, Settings { cpus, ..Settings::default() });
        assert!(applied.notes[0].contains(note), "{applied:?}");
        // CPUs that were asked for stay; and no set of CPUs interleaves memory.
        let settings = Settings { cpus: Some(vec![0]), ..bound.clone() };
        let applied = apply(&settings, Some(&machine()), &mut filtering(), false).unwrap();
        assert!(applied.settings.cpus != Some(vec![2, 3]) && applied.settings.memory.is_none());
        let spread = memory(policy(Mode::Interleave, &[0, 1]));
        let applied = apply(&spread, Some(&machine()), &mut filtering(), false).unwrap();
        assert_eq!(applied.settings, Settings::default());
        let mut kernel = filtering();
        let error = apply(&bound, Some(&machine()), &mut kernel, true).unwrap_err();
        assert!(error.to_string().contains("CAP_SYS_NICE"), "{error}");
        assert!(kernel.cpus.is_empty());
    }
}
