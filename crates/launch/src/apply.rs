//! Gives settings to the calling thread, and reads them back.
//!
//! A part that the kernel refuses has a *fallback*, which comes nearest to it. Each fallback is a
//! note, and `is_strict` turns it into an error:
//!
//! | refused | by | fallback |
//! |---|---|---|
//! | balancing within a policy | a kernel before 5.12 or 6.10 (EINVAL) | the policy without balancing |
//! | `MPOL_WEIGHTED_INTERLEAVE` | a kernel before 6.9 (EINVAL) | `MPOL_INTERLEAVE` of the same nodes |
//! | `MPOL_PREFERRED_MANY` | a kernel before 5.15 (EINVAL) | `MPOL_PREFERRED` of the first node |
//! | every policy of nodes to prefer or bind | a seccomp filter (EPERM, ENOSYS, SIGSYS) | threads run on CPUs of these nodes, where first touch places their memory |
//! | every other policy | the same | the policy that the program inherits |
//! | CPUs, huge pages off | the same | as the program inherits it |
//!
//! Nothing stands in for nodes and CPUs that are all forbidden: that is always an error.

use pageleap::NodeId;
use pageleap::topology::{Topology, id_list};
use pageleap_sys::Errno;

use crate::calls::Calls;
use crate::error::Error;
use crate::policy::{MemoryPolicy, Mode, node_list};
use crate::settings::Settings;

/// The result of [`apply`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The settings in force, as the kernel has told them afterwards. Settings that were not asked
    /// for are `None`.
    pub settings: Settings,
    /// A sentence for each setting that is not as it was asked for, with the reason.
    pub notes: Vec<String>,
}

/// Gives the thread of `calls` these settings, and reads them back. The program that the thread
/// becomes inherits them.
///
/// `topology` is the machine as the thread sees it; without it errors list no nodes, and no CPUs
/// stand in for nodes. With `is_strict` nothing stands in for a setting
/// that the kernel refuses, and no node or CPU of a request may be dropped.
///
/// # Errors
/// [`Error::Refused`] and [`Error::Dropped`]. Some settings of the thread may have changed by then.
pub fn apply(
    settings: &Settings,
    topology: Option<&Topology>,
    calls: &mut dyn Calls,
    is_strict: bool,
) -> Result<Applied, Error> {
    let mut work = Work { topology, calls, is_strict, applied: Applied::default() };
    if let Some(cpus) = &settings.cpus {
        work.set_cpus(cpus)?;
    }
    if let Some(policy) = &settings.memory {
        work.set_policy(policy, settings.cpus.is_some())?;
    }
    if let Some(is_disabled) = settings.is_thp_disabled {
        work.set_thp_disabled(is_disabled)?;
    }
    Ok(work.applied)
}

struct Work<'a> {
    topology: Option<&'a Topology>,
    calls: &'a mut dyn Calls,
    is_strict: bool,
    applied: Applied,
}

impl Work<'_> {
    fn set_cpus(&mut self, cpus: &[usize]) -> Result<(), Error> {
        let call = format!("sched_setaffinity(CPUs {})", id_list(cpus.iter().copied()));
        match self.calls.set_cpus(cpus) {
            Ok(()) => {}
            Err(errno) if is_filtered(errno) => {
                let note = "threads run where they would run without it";
                return self.fall_back(filtered(call, errno), note);
            }
            Err(errno) => {
                let may = self.topology.map(|topology| id_list(topology.allowed_cpus()));
                let may = may.map_or(String::new(), |may| format!("; allowed are {may}"));
                let reason = format!("none of them is online and in the cpuset{may}");
                let remedy = "name other CPUs, or widen cpuset.cpus of the cgroup";
                return Err(Error::Refused { call, errno, reason, remedy });
            }
        }
        let Ok(told) = self.calls.cpus() else {
            self.applied.notes.push(format!("{call}: the kernel does not tell the result"));
            self.applied.settings.cpus = Some(cpus.to_vec());
            return Ok(());
        };
        let left_out = cpus.iter().copied().filter(|cpu| !told.contains(cpu));
        self.dropped("CPUs", id_list(left_out), "they are offline or outside the cpuset")?;
        self.applied.settings.cpus = Some(told);
        Ok(())
    }

    fn set_policy(&mut self, asked: &MemoryPolicy, has_cpus: bool) -> Result<(), Error> {
        let mut policy = asked.clone();
        // Noted only once the kernel takes one of them: EINVAL also means that no node of the
        // request is left, and then a newer kernel would refuse it, too.
        let mut older_ones: Vec<(Error, String)> = Vec::new();
        loop {
            let call = format!("set_mempolicy({policy})");
            match self.calls.set_policy(&policy) {
                Ok(()) => {
                    for (error, instead) in older_ones {
                        self.fall_back(error, &instead)?;
                    }
                    return self.read_back(policy);
                }
                Err(errno) if is_filtered(errno) => {
                    let error = filtered(call, errno);
                    return self.without_policy(error, &policy, has_cpus);
                }
                Err(errno) => {
                    let older = policy.for_an_older_kernel().filter(|_| errno.0 == libc::EINVAL);
                    let Some((older, reason)) = older else {
                        return Err(self.refused(format!("set_mempolicy({asked})"), errno));
                    };
                    let remedy = "use a newer kernel, or ask for the other policy";
                    let error = Error::Refused { call, errno, reason, remedy };
                    older_ones.push((error, format!("{older} instead")));
                    policy = older;
                }
            }
        }
    }

    /// Compares the policy that was set with the one that the kernel tells.
    fn read_back(&mut self, set: MemoryPolicy) -> Result<(), Error> {
        let told = match self.calls.policy() {
            Ok(told) => told,
            Err(errno) => {
                let note =
                    format!("set_mempolicy({set}): done, but it cannot be read back: {errno}");
                self.applied.notes.push(note);
                self.applied.settings.memory = Some(set);
                return Ok(());
            }
        };
        let has_other_mode = |told: &MemoryPolicy| told.mode != set.mode;
        if told.as_ref().is_none_or(has_other_mode) {
            let told = told.map_or("another policy".to_owned(), |told| told.to_string());
            let call = format!("set_mempolicy({set})");
            let reason = format!("the kernel tells {told} afterwards");
            let remedy = "look for a tool that changes system calls, such as a sandbox";
            return Err(Error::Refused { call, errno: Errno(0), reason, remedy });
        }
        let told = told.unwrap_or(set.clone());
        let left_out = set.nodes.iter().copied().filter(|node| !told.nodes.contains(node));
        let left_out: Vec<NodeId> = left_out.collect();
        let reason = "they have no memory, or the cpuset does not allow them";
        self.dropped("nodes", node_list(&left_out), reason)?;
        self.applied.settings.memory = Some(told);
        Ok(())
    }

    /// The fallback where no policy can be set.
    fn without_policy(
        &mut self,
        error: Error,
        policy: &MemoryPolicy,
        has_cpus: bool,
    ) -> Result<(), Error> {
        let near = matches!(policy.mode, Mode::Bind | Mode::Preferred | Mode::PreferredMany);
        let cpus = if near && !has_cpus { self.cpus_of(&policy.nodes) } else { Vec::new() };
        if cpus.is_empty() || self.is_strict || self.calls.set_cpus(&cpus).is_err() {
            return self.fall_back(error, "the policy stays as it was");
        }
        let note = format!(
            "threads run on the CPUs {} of {} {} instead, where first touch places their memory",
            id_list(cpus.iter().copied()),
            if policy.nodes.len() == 1 { "node" } else { "nodes" },
            node_list(&policy.nodes)
        );
        self.applied.settings.cpus = Some(cpus);
        self.fall_back(error, &note)
    }

    /// The CPUs of these nodes on which the thread may run.
    fn cpus_of(&self, nodes: &[NodeId]) -> Vec<usize> {
        let Some(topology) = self.topology else { return Vec::new() };
        let of_nodes = topology.nodes().iter().filter(|node| nodes.contains(&node.id));
        let of_nodes: Vec<usize> = of_nodes.flat_map(|node| node.cpus.clone()).collect();
        let mut cpus = topology.allowed_cpus();
        cpus.retain(|cpu| of_nodes.contains(cpu));
        cpus
    }

    fn set_thp_disabled(&mut self, is_disabled: bool) -> Result<(), Error> {
        match self.calls.set_thp_disabled(is_disabled) {
            Ok(()) => self.applied.settings.is_thp_disabled = Some(is_disabled),
            Err(errno) => {
                let call = format!("prctl(PR_SET_THP_DISABLE, {})", u8::from(is_disabled));
                return self.fall_back(filtered(call, errno), "huge pages stay as they were");
            }
        }
        Ok(())
    }

    /// Notes the fallback of a refused call, or returns the error if nothing may stand in.
    fn fall_back(&mut self, error: Error, instead: &str) -> Result<(), Error> {
        if self.is_strict {
            return Err(error);
        }
        self.applied.notes.push(format!("{error}. {}", capitalized(instead)));
        Ok(())
    }

    fn dropped(&mut self, what: &str, list: String, reason: &str) -> Result<(), Error> {
        if list.is_empty() {
            return Ok(());
        }
        let dropped = format!("the kernel has dropped the {what} {list}: {reason}");
        if self.is_strict {
            return Err(Error::Dropped { dropped });
        }
        self.applied.notes.push(dropped);
        Ok(())
    }

    /// Why the kernel refuses a policy that it knows.
    fn refused(&self, call: String, errno: Errno) -> Error {
        let (reason, remedy) = match errno.0 {
            libc::EINVAL => {
                let may = self.topology.map(|topology| node_list(&topology.allowed_nodes()));
                let may = may.map_or(String::new(), |may| format!("; allowed are {may}"));
                let reason = format!(
                    "none of the nodes has memory and is in the cpuset, or one of them does not \
                     exist{may}; or a filter of the container refuses the call"
                );
                (reason, "name other nodes, or widen cpuset.mems of the cgroup")
            }
            libc::ENOMEM => ("the kernel has no memory left".to_owned(), "free some memory"),
            _ => ("the kernel gives no reason".to_owned(), "see set_mempolicy(2)"),
        };
        Error::Refused { call, errno, reason, remedy }
    }
}

/// Whether an error means that the call itself is refused, whatever its arguments are.
fn is_filtered(errno: Errno) -> bool {
    matches!(errno.0, libc::EPERM | libc::ENOSYS)
}

fn filtered(call: String, errno: Errno) -> Error {
    let reason = match errno.0 {
        libc::ENOSYS => {
            "the kernel has no memory policies, or a filter of the container refuses it"
        }
        libc::EPERM => "a filter of the container refuses it",
        _ => "this kernel does not know it",
    };
    let remedy = "grant CAP_SYS_NICE (docker run --cap-add SYS_NICE), or allow the call in the \
                  seccomp profile";
    Error::Refused { call, errno, reason: reason.to_owned(), remedy }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests;
