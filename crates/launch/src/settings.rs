//! The settings that a program starts with.

use crate::policy::{MemoryPolicy, Mode};

/// Settings for a program. `None` leaves a setting as the program would inherit it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The memory policy of its first thread, which all others inherit.
    pub memory: Option<MemoryPolicy>,
    /// The CPUs on which its threads may run, in ascending order.
    pub cpus: Option<Vec<usize>>,
    /// Whether transparent huge pages are off for the program, whatever the system's setting is.
    pub is_thp_disabled: Option<bool>,
}

impl Settings {
    /// The settings as words of a command that a person can type: numactl for the policy and for
    /// the CPUs. Empty if there is nothing to set.
    ///
    /// The numactl of a distribution may be too old for some options: 2.0.15 brought
    /// `--preferred-many`, and 2.0.19 `--weighted-interleave`.
    pub fn numactl(&self) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(policy) = &self.memory {
            // numactl wants this option before --membind.
            if policy.is_balanced && policy.mode != Mode::Default {
                words.push("--balancing".to_owned());
            }
            words.extend(policy.mode.option().map(|option| match policy.nodes.is_empty() {
                true => format!("--{option}"),
                false => format!("--{option}={}", policy.node_list()),
            }));
        }
        if let Some(cpus) = &self.cpus {
            let list = pageleap::topology::id_list(cpus.iter().copied());
            words.push(format!("--physcpubind={list}"));
        }
        if !words.is_empty() {
            words.insert(0, "numactl".to_owned());
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use pageleap::NodeId;

    use super::*;

    #[test]
    fn settings_can_be_typed() {
        let typed = |settings: Settings| settings.numactl().join(" ");
        assert_eq!(typed(Settings::default()), "");
        let mut policy = MemoryPolicy::new(Mode::Bind, vec![NodeId(0), NodeId(1), NodeId(3)]);
        policy.is_balanced = true;
        let cpus = Some(vec![0, 1, 2, 8]);
        let settings = Settings { memory: Some(policy), cpus, ..Settings::default() };
        assert_eq!(typed(settings), "numactl --balancing --membind=0-1,3 --physcpubind=0-2,8");
        let local = Some(MemoryPolicy::new(Mode::Local, Vec::new()));
        assert_eq!(
            typed(Settings { memory: local, ..Settings::default() }),
            "numactl --localalloc"
        );
        let default = Some(MemoryPolicy::new(Mode::Default, Vec::new()));
        assert_eq!(typed(Settings { memory: default, ..Settings::default() }), "");
    }
}
