//! Judges which nodes memory and page tables come from, and whether the process may choose those
//! nodes.

use pageleap::topology::{self, Topology};
use pageleap::{BASE_PAGE, NodeId};
use pageleap_sys::{self as sys, Advice, Errno, Policy, Trial, call_apart};

use crate::around::{Around, Killed, typed};
use crate::finding::{Finding, State, Topic, Who};
use crate::memory::could_not_try;
use crate::scratch::{Failed, Scratch};

/// The outcome of a call that a seccomp filter may refuse.
#[derive(Clone, Debug)]
enum Attempt<T> {
    Done(T),
    Refused(Errno),
    Killed(Killed),
    NotTried(Failed),
}

/// The nodes that the process may use, and all nodes with memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Allowed {
    pub(crate) with_memory: Vec<NodeId>,
    pub(crate) allowed: Vec<NodeId>,
    seen: String,
    known: bool,
}

impl Allowed {
    pub(crate) fn read(around: &Around, topology: Option<&Topology>) -> Allowed {
        const FILE: &str = "proc/self/status";
        let nodes = topology.map_or(&[][..], Topology::nodes);
        let with_memory: Vec<NodeId> =
            nodes.iter().filter(|n| n.total_bytes > 0).map(|n| n.id).collect();
        let status = around.files.text_if_there(FILE).ok().flatten().unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        let list = list.map(str::trim);
        let seen = match list {
            Some(list) => format!("{}: Mems_allowed_list: {list}", around.shown(FILE)),
            None => format!("{}: no Mems_allowed_list", around.shown(FILE)),
        };
        let allowed = topology.map_or(Vec::new(), Topology::allowed_nodes);
        let known = topology.map_or(list.is_some(), Topology::knows_allowed_nodes);
        Allowed { allowed, with_memory, seen, known }
    }
}

pub(crate) fn findings_from_files(around: &Around, allowed: &Allowed) -> Vec<Finding> {
    vec![nodes(allowed), cpuset(around, allowed)]
}

/// The findings that need calls. Whether memory can be bound decides what AutoNUMA may do, so the
/// trial of mbind comes first.
pub(crate) fn findings(around: &Around, allowed: &Allowed) -> Vec<Finding> {
    let mbind = judge_mbind(around, try_mbind(around, allowed));
    let autonuma = autonuma(around, allowed, Some(mbind.state == State::Works));
    vec![
        mbind,
        judge_tables(around, try_set_mempolicy(allowed)),
        judge_query(around, try_query(around)),
        autonuma,
    ]
}

fn nodes(allowed: &Allowed) -> Finding {
    let topic = Topic::Nodes;
    let list =
        |ids: &[NodeId]| ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(", ");
    match allowed.with_memory.len() {
        0 => Finding::unknown(
            topic,
            "the nodes are not known",
            "sysfs does not tell them: see sysfs",
        ),
        1 => Finding::limited(
            topic,
            format!("one memory node: {}", list(&allowed.with_memory)),
            "a leap gets new frames and page tables here, but the machine has no other node",
        ),
        n => {
            Finding::works(topic, format!("{n} nodes with memory: {}", list(&allowed.with_memory)))
        }
    }
}

fn cpuset(around: &Around, allowed: &Allowed) -> Finding {
    let topic = Topic::Cpuset;
    let outside: Vec<String> = allowed
        .with_memory
        .iter()
        .filter(|id| !allowed.allowed.contains(id))
        .map(|id| id.0.to_string())
        .collect();
    let all: Vec<String> = allowed.with_memory.iter().map(|id| id.0.to_string()).collect();
    let all = all.join(",");
    let finding = if !allowed.known {
        let reason = "neither /proc/self/status nor the files of a cpuset tell them";
        Finding::unknown(topic, "the allowed nodes are not known", reason)
    } else if allowed.with_memory.is_empty() {
        let reason = "the nodes are not known: see sysfs";
        Finding::unknown(topic, "whether all nodes are allowed is not known", reason)
    } else if outside.is_empty() {
        Finding::works(topic, "memory may come from every node")
    } else {
        let file = topology::file_of_nodes(&around.files);
        let file = file.as_deref().and_then(typed).unwrap_or("/sys/fs/cgroup/<CGROUP>/cpuset.mems");
        let grants = "the processes in it may take memory of all nodes, which may have been set aside for others";
        Finding::limited(
            topic,
            format!("node {} may not be used", outside.join(", ")),
            "the cpuset of this process leaves them out",
        )
        .remedy(Who::Starter, format!("docker run --cpuset-mems {all} <IMAGE>"), grants)
        .remedy(
            Who::Starter,
            format!(
                "systemctl set-property <UNIT> AllowedMemoryNodes=\"{}\"",
                all.replace(',', " ")
            ),
            grants,
        )
        .remedy(
            Who::Root,
            format!("echo {all} > {file}"),
            format!("{grants}; the parents must allow them too"),
        )
    };
    finding.saw(allowed.seen.clone())
}

/// Binds a page to each node in turn. Returns the node on which the kernel put each page, if the
/// kernel tells it.
fn try_mbind(around: &Around, allowed: &Allowed) -> Attempt<Vec<(u32, Option<i32>)>> {
    let nodes: Vec<u32> = if allowed.allowed.is_empty() {
        vec![0]
    } else {
        allowed.allowed.iter().map(|id| id.0).collect()
    };
    let first = nodes[0];
    // SAFETY: the range is empty.
    let nothing = || unsafe { sys::bind(0, 0, Policy::Preferred(first)) }.map(|()| 0);
    if let Err(killed) = around.survives("mbind", &nothing) {
        return Attempt::Killed(killed);
    }
    let can_ask =
        around.survives("move_pages", &|| sys::nodes_of_pages(0, &[], &mut []).map(|()| 0)).is_ok();
    let mut found = Vec::new();
    for node in nodes {
        let scratch = match Scratch::new(BASE_PAGE, BASE_PAGE, None) {
            Ok(scratch) => scratch,
            Err(failed) => return Attempt::NotTried(failed),
        };
        let span = &scratch.span;
        for policy in [Policy::Preferred(node), Policy::Bind(node)] {
            // SAFETY: the range belongs to `scratch`, and nothing else uses it.
            if let Err(errno) = unsafe { sys::bind(span.start, span.len, policy) } {
                return Attempt::Refused(errno);
            }
            // Populates under the preference: then a full node leads to another node, not to the
            // OOM killer.
            if let (Policy::Preferred(_), Err(errno)) = (policy, span.advise(Advice::PopulateWrite))
            {
                return Attempt::NotTried(Failed::at("madvise(MADV_POPULATE_WRITE)")(errno));
            }
        }
        let mut status = [-1];
        let asked = can_ask && sys::nodes_of_pages(0, &[span.start], &mut status).is_ok();
        found.push((node, asked.then_some(status[0])));
    }
    Attempt::Done(found)
}

fn judge_mbind(around: &Around, tried: Attempt<Vec<(u32, Option<i32>)>>) -> Finding {
    let topic = Topic::Mbind;
    const WITHOUT: &str = "pools are filled by threads on the node's CPUs and verified, so leaps still work; nodes without CPUs \
                           are out of reach, and a page that was swapped out may come back elsewhere";
    match tried {
        Attempt::NotTried(failed) => could_not_try(topic, &failed),
        Attempt::Killed(killed) => {
            killed.finding(topic, "memory cannot be bound to a node").filtered("mbind")
        }
        Attempt::Refused(errno) => {
            let seen = format!("mbind of a memory file: {errno}");
            let no_numa = errno.0 == libc::ENOSYS && !has_node_folder(around);
            if no_numa {
                let reason = "the kernel was built without CONFIG_NUMA: all memory is one node";
                return Finding::limited(topic, "nothing to bind to", reason).saw(seen);
            }
            let reason = match errno.0 {
                libc::EINVAL => {
                    "the kernel accepts no node of those that it allows: it may be emulated"
                        .to_owned()
                }
                _ => format!("{}. {WITHOUT}", around.refusal("mbind", errno)),
            };
            Finding::missing(topic, "memory cannot be bound to a node", reason)
                .saw(seen)
                .filtered("mbind")
        }
        Attempt::Done(nodes) => {
            let elsewhere =
                nodes.iter().any(|(node, found)| found.is_some_and(|found| found != *node as i32));
            let finding = if elsewhere {
                Finding::limited(
                    topic,
                    "memory is bound, and some came from elsewhere",
                    "the kernel took a page of another node: that node is full",
                )
            } else {
                Finding::works(topic, "memory can be bound to each allowed node")
            };
            let seen = nodes.iter().map(|(node, found)| match found {
                Some(found) => format!("mbind to node {node}: works, the page is on node {found}"),
                None => format!("mbind to node {node}: works; where the page is cannot be asked"),
            });
            seen.fold(finding, Finding::saw)
        }
    }
}

fn has_node_folder(around: &Around) -> bool {
    topology::has_nodes(&around.files)
}

/// Sets the policy in a separate process, so that no thread of this process keeps the policy.
fn try_set_mempolicy(allowed: &Allowed) -> Attempt<()> {
    let node = allowed.allowed.first().map_or(0, |id| id.0);
    // SAFETY: one system call, which reads a mask on the stack.
    match unsafe { call_apart(&|| sys::prefer_node(Some(node)).map(|()| 0)) } {
        Ok(Trial::Returned(Ok(_))) => Attempt::Done(()),
        Ok(Trial::Returned(Err(errno))) => Attempt::Refused(errno),
        Ok(Trial::Killed(signal)) => Attempt::Killed(Killed::new("set_mempolicy", signal)),
        Err(errno) => Attempt::NotTried(Failed::at("clone of a process to try it in")(errno)),
    }
}

fn judge_tables(around: &Around, tried: Attempt<()>) -> Finding {
    let topic = Topic::PageTablePlacement;
    let summary = "page tables cannot be placed: they come from the node whose CPU fills them";
    match tried {
        Attempt::Done(()) => {
            Finding::works(topic, "page tables can be placed (they follow the thread's policy)")
                .saw("set_mempolicy(MPOL_PREFERRED): works")
        }
        Attempt::NotTried(failed) => could_not_try(topic, &failed),
        Attempt::Killed(killed) => killed.finding(topic, summary).filtered("set_mempolicy"),
        Attempt::Refused(errno) if errno.0 == libc::ENOSYS && !has_node_folder(around) => {
            Finding::limited(
                topic,
                "nothing to choose from",
                "the kernel was built without CONFIG_NUMA: all memory is one node",
            )
            .saw(format!("set_mempolicy(MPOL_PREFERRED): {errno}"))
        }
        Attempt::Refused(errno) => {
            Finding::missing(topic, summary, around.refusal("set_mempolicy", errno))
                .saw(format!("set_mempolicy(MPOL_PREFERRED): {errno}"))
                .filtered("set_mempolicy")
        }
    }
}

fn try_query(around: &Around) -> Attempt<i32> {
    if let Err(killed) =
        around.survives("move_pages", &|| sys::nodes_of_pages(0, &[], &mut []).map(|()| 0))
    {
        return Attempt::Killed(killed);
    }
    let scratch = match Scratch::populated(BASE_PAGE, BASE_PAGE) {
        Ok(scratch) => scratch,
        Err(failed) => return Attempt::NotTried(failed),
    };
    let mut status = [i32::MIN];
    match sys::nodes_of_pages(0, &[scratch.span.start], &mut status) {
        Ok(()) => Attempt::Done(status[0]),
        Err(errno) => Attempt::Refused(errno),
    }
}

fn judge_query(around: &Around, tried: Attempt<i32>) -> Finding {
    const CALL: &str = "move_pages(nodes = NULL)";
    let topic = Topic::PlacementQuery;
    let summary = "the kernel does not tell on which node a page lies, and a pool is never trusted unverified";
    match tried {
        Attempt::Done(node) if node >= 0 => {
            Finding::works(topic, "the kernel tells on which node each page lies")
                .saw(format!("{CALL} of a page of ours: node {node}"))
        }
        Attempt::Done(status) => {
            let reason =
                format!("it answers {} for a page that is there", Errno(status.saturating_neg()));
            Finding::missing(topic, summary, reason)
                .saw(format!("{CALL} of a page of ours: status {status}"))
        }
        Attempt::NotTried(failed) => could_not_try(topic, &failed),
        Attempt::Killed(killed) => killed.finding(topic, summary).filtered("move_pages"),
        Attempt::Refused(errno) if errno.0 == libc::ENOSYS && !has_node_folder(around) => {
            Finding::missing(
                topic,
                summary,
                "the kernel was built without CONFIG_NUMA or CONFIG_MIGRATION",
            )
            .saw(format!("{CALL}: {errno}"))
        }
        Attempt::Refused(errno) => {
            let reason = around.refusal("move_pages", errno);
            let (maps, seen) = around.read_line("proc/self/numa_maps");
            let finding = match maps {
                Some(_) => Finding::limited(
                    topic,
                    "the kernel tells where memory lies for whole mappings only (/proc/self/numa_maps)",
                    reason,
                ),
                None => Finding::missing(topic, summary, reason).saw(seen),
            };
            finding.saw(format!("{CALL}: {errno}")).filtered("move_pages")
        }
    }
}

/// `bound`: whether pools can be bound; `None` if that was not tried.
pub(crate) fn autonuma(around: &Around, allowed: &Allowed, bound: Option<bool>) -> Finding {
    const FILE: &str = "proc/sys/kernel/numa_balancing";
    let topic = Topic::AutoNuma;
    let (mode, seen) = around.read_number(FILE);
    let one = allowed.with_memory.len() == 1;
    let finding = match mode {
        None if around.read_line("proc/sys/kernel/osrelease").0.is_none() => Finding::unknown(
            topic,
            "whether the kernel moves pages on its own is not \
             known",
            "/proc/sys cannot be read",
        ),
        None => {
            Finding::works(topic, "the kernel does not move pages on its own (no such setting)")
        }
        Some(0) => Finding::works(topic, "the kernel does not move pages on its own"),
        Some(_) if one => Finding::works(
            topic,
            "the kernel would move pages on its own, but has one \
         node only",
        ),
        Some(_) if bound == Some(true) => Finding::works(
            topic,
            "the kernel moves pages on its own, but leaves pools alone, because \
             they are bound to their nodes",
        ),
        Some(mode) => Finding::limited(
            topic,
            "the kernel may move pages of pools away again",
            format!(
                "kernel.numa_balancing={mode}{}, and pools that are not bound count as any memory; \
                 its scans also cost page faults",
                if mode & 2 != 0 { " (between memory tiers)" } else { "" }
            ),
        )
        .remedy(
            Who::Root,
            "sysctl -w kernel.numa_balancing=0",
            "nothing; no program of the machine has its pages moved to its threads any more",
        ),
    };
    let finding = finding.saw(seen);
    // Binding the pools would be enough, so a filter that refuses mbind counts as a cause.
    if finding.state == State::Limited && bound == Some(false) {
        finding.filtered("mbind")
    } else {
        finding
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::tests::around;

    fn allowed(with_memory: &[u32], allowed: &[u32]) -> Allowed {
        let ids = |ids: &[u32]| ids.iter().map(|id| NodeId(*id)).collect();
        Allowed {
            with_memory: ids(with_memory),
            allowed: ids(allowed),
            seen: String::new(),
            known: true,
        }
    }

    #[test]
    fn nodes_outside_the_cpuset_are_named_with_lines_for_each_starter() {
        let cgroup2 = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let files = [
            ("proc/self/cgroup", "0::/system.slice/x.service\n"),
            ("proc/self/mountinfo", cgroup2),
        ];
        let around = around(&files, None);
        let finding = cpuset(&around, &allowed(&[0, 1, 4], &[0, 1]));
        assert_eq!(finding.state, State::Limited);
        assert!(finding.summary.contains("node 4"), "{finding}");
        let lines: Vec<&str> = finding.remedies.iter().map(|r| r.line.as_str()).collect();
        assert!(lines.contains(&"docker run --cpuset-mems 0,1,4 <IMAGE>"), "{lines:?}");
        assert!(
            lines.contains(&"echo 0,1,4 > /sys/fs/cgroup/system.slice/x.service/cpuset.mems"),
            "{lines:?}"
        );
        assert_eq!(cpuset(&around, &allowed(&[0, 1], &[0, 1])).state, State::Works);
    }

    #[test]
    fn the_file_of_the_cpuset_is_where_it_is_mounted() {
        let line = |files: &[(&str, &str)]| {
            let finding = cpuset(&around(files, None), &allowed(&[0, 1], &[0]));
            finding.remedies.last().unwrap().line.clone()
        };
        let bare = "none /dev/cpuset cgroup rw,cpuset,noprefix 0 0\n";
        assert_eq!(
            line(&[("proc/self/cpuset", "/batch/7\n"), ("proc/mounts", bare)]),
            "echo 0,1 > /dev/cpuset/batch/7/mems"
        );
        let v1 = "36 33 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        let groups = "9:cpuset:/a\n0::/b\n";
        assert_eq!(
            line(&[("proc/self/cgroup", groups), ("proc/self/mountinfo", v1)]),
            "echo 0,1 > /sys/fs/cgroup/cpuset/a/cpuset.mems"
        );
        assert_eq!(line(&[]), "echo 0,1 > /sys/fs/cgroup/<CGROUP>/cpuset.mems");
        let hostile = [("proc/self/cpuset", "/a;id>b\n"), ("proc/mounts", bare)];
        assert_eq!(line(&hostile), "echo 0,1 > /sys/fs/cgroup/<CGROUP>/cpuset.mems");
    }

    #[test]
    fn autonuma_matters_only_with_several_nodes_and_unbound_pools() {
        let on = around(&[("proc/sys/kernel/numa_balancing", "1\n")], None);
        let two = allowed(&[0, 1], &[0, 1]);
        assert_eq!(autonuma(&on, &two, Some(true)).state, State::Works);
        assert_eq!(autonuma(&on, &allowed(&[0], &[0]), Some(false)).state, State::Works);
        let finding = autonuma(&on, &two, Some(false));
        assert_eq!(finding.state, State::Limited);
        assert!(finding.remedies.last().unwrap().line.contains("numa_balancing=0"));
        let off = around(&[("proc/sys/kernel/numa_balancing", "0\n")], None);
        assert_eq!(autonuma(&off, &two, Some(false)).state, State::Works);
    }

    #[test]
    fn a_kernel_without_numa_is_told_from_a_filter() {
        let without = around(&[], None);
        let finding = judge_mbind(&without, Attempt::Refused(Errno(libc::ENOSYS)));
        assert!(finding.reason.contains("CONFIG_NUMA") && finding.remedies.is_empty(), "{finding}");
        let mut with = around(&[("sys/devices/system/node/online", "0\n")], None);
        with.filtered = Some(true);
        for errno in [libc::ENOSYS, libc::EPERM] {
            let finding = judge_mbind(&with, Attempt::Refused(Errno(errno)));
            assert!(finding.reason.contains("seccomp filter"), "{finding}");
            assert_eq!(finding.filtered, Some("mbind"));
            let query = judge_query(&with, Attempt::Refused(Errno(errno)));
            assert_eq!(query.state, State::Missing);
            assert_eq!(query.filtered, Some("move_pages"));
        }
        with.filtered = Some(false);
        assert!(
            !judge_mbind(&with, Attempt::Refused(Errno(libc::EPERM)))
                .reason
                .contains("the seccomp filter of")
        );
    }
}
