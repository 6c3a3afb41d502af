//! Automatic NUMA balancing for one program. The kernel has no switch for a process: it balances
//! pages of the default policy, and of policies with a flag, and leaves all others alone
//! (`vma_policy_mof` in Linux, mm/mempolicy.c).

use pageleap::topology::SysFiles;

use crate::error::Error;
use crate::policy::{MemoryPolicy, Mode};

/// The system's setting: a mask of 1 (balance among nodes) and 2 (promote from slower tiers, Linux
/// 5.18). The kernel has no such file without CONFIG_NUMA_BALANCING.
const SETTING: &str = "proc/sys/kernel/numa_balancing";
/// The part of the setting by which the kernel balances among nodes.
const AMONG_NODES: u64 = 1;

/// The policy by which the kernel balances a program's pages, or leaves them alone. `asked` is the
/// policy that was asked for besides. The second part is a sentence if the system's setting keeps
/// the policy from having an effect.
///
/// Without another policy, balanced is the default policy, and unbalanced is [`Mode::Local`], which
/// takes memory from the same nodes.
///
/// # Errors
/// [`Error::Conflict`] if the kernel balances no pages of this policy.
pub fn balance(
    asked: Option<MemoryPolicy>,
    is_on: bool,
    files: &SysFiles,
) -> Result<(MemoryPolicy, Option<String>), Error> {
    if !is_on {
        return Ok((asked.unwrap_or(MemoryPolicy::new(Mode::Local, Vec::new())), None));
    }
    let policy = asked.unwrap_or(MemoryPolicy::new(Mode::Default, Vec::new()));
    if !policy.mode.can_be_balanced() {
        return Err(Error::Conflict {
            reason: format!("the kernel never balances pages of {}", policy.mode.constant()),
            remedy: "balancing goes with --membind, --preferred-many, or no policy",
        });
    }
    let is_balanced = policy.mode != Mode::Default;
    Ok((MemoryPolicy { is_balanced, ..policy }, without_effect(files)))
}

/// Why the kernel balances no program at all, if that is so.
fn without_effect(files: &SysFiles) -> Option<String> {
    match files.number(SETTING) {
        Ok(setting) if setting & AMONG_NODES != 0 => None,
        Ok(setting) => Some(format!(
            "balancing has no effect now, because kernel.numa_balancing is {setting} for the whole \
             system; sysctl -w kernel.numa_balancing=1"
        )),
        Err(_) => Some(
            "balancing has no effect, because this kernel has none (CONFIG_NUMA_BALANCING)".into(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    #[test]
    fn balancing_is_a_matter_of_the_policy() {
        let on = Tree::new(&[("proc/sys/kernel/numa_balancing", "1\n")]);
        let policy = |mode| MemoryPolicy::new(mode, vec![pageleap::NodeId(1)]);
        let balance = |asked, is_on| balance(asked, is_on, &on.files());
        let plain = |mode| MemoryPolicy::new(mode, Vec::new());
        assert_eq!(balance(None, false).unwrap(), (plain(Mode::Local), None));
        assert_eq!(balance(None, true).unwrap(), (plain(Mode::Default), None));
        let bind = policy(Mode::Bind);
        assert_eq!(balance(Some(bind.clone()), false).unwrap(), (bind.clone(), None));
        let flagged = MemoryPolicy { is_balanced: true, ..bind.clone() };
        assert_eq!(balance(Some(bind), true).unwrap(), (flagged, None));
        for mode in [Mode::Interleave, Mode::WeightedInterleave, Mode::Local, Mode::Preferred] {
            let error = balance(Some(policy(mode)), true).unwrap_err();
            assert!(error.to_string().contains(mode.constant()), "{error}");
            assert!(balance(Some(policy(mode)), false).is_ok());
        }
    }

    #[test]
    fn a_system_without_balancing_is_told() {
        for (files, part) in [
            (&[("proc/sys/kernel/numa_balancing", "0\n")][..], "kernel.numa_balancing is 0"),
            (&[("proc/sys/kernel/numa_balancing", "2\n")], "kernel.numa_balancing is 2"),
            (&[], "CONFIG_NUMA_BALANCING"),
        ] {
            let tree = Tree::new(files);
            let note = balance(None, true, &tree.files()).unwrap().1.unwrap();
            assert!(note.contains(part), "{note}");
            assert_eq!(balance(None, false, &tree.files()).unwrap().1, None);
        }
    }
}
