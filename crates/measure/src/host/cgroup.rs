//! The cgroups of this process, as far as they change a measurement: the memory limit, and the
//! times at which the CPU quota stopped the process.
//!
//! The groups are looked for at the usual mount points. In a container whose `/proc/self/cgroup`
//! names groups of the host, the top of the mount is the process's own group; there the directories
//! below are missing, and only the top is read.

use pageleap::topology::SysFiles;

/// Version 1 writes "no limit" as the largest number of pages.
const NO_LIMIT: u64 = i64::MAX as u64 - 65_535;

/// How often and for how long CPU quotas stopped threads. Quotas of groups above the process count,
/// and so do other processes of these groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Periods of a quota that were used up (`nr_throttled`).
    pub periods: u64,
    /// The time for which threads were stopped, summed over CPUs (`throttled_usec`).
    pub ns: u64,
}

impl Throttled {
    /// The rise since an earlier count.
    pub(super) fn since(self, earlier: Throttled) -> Throttled {
        Throttled {
            periods: self.periods.saturating_sub(earlier.periods),
            ns: self.ns.saturating_sub(earlier.ns),
        }
    }
}

/// The counts of all visible groups; `None` if none of them can have a quota.
pub(super) fn throttled(files: &SysFiles) -> Option<Throttled> {
    let groups = directories(files, "cpu").into_iter();
    let counts = groups.filter_map(|group| {
        throttled_in(&files.text_if_there(&format!("{group}/cpu.stat")).ok()??)
    });
    counts.reduce(|one, other| Throttled {
        periods: one.periods.saturating_add(other.periods),
        ns: one.ns.saturating_add(other.ns),
    })
}

/// Parses `cpu.stat`. Version 2 counts microseconds, version 1 nanoseconds. A group without the
/// controller has neither.
fn throttled_in(stat: &str) -> Option<Throttled> {
    let value = |name: &str| {
        stat.lines().find_map(|line| {
            let (key, value) = line.split_once(' ')?;
            (key == name).then(|| value.trim().parse::<u64>().ok())?
        })
    };
    let microseconds = value("throttled_usec").map(|us| us.saturating_mul(1_000));
    let ns = microseconds.or_else(|| value("throttled_time"))?;
    Some(Throttled { periods: value("nr_throttled")?, ns })
}

/// The lowest memory limit of all visible groups; `None` without a limit.
pub fn memory_limit(files: &SysFiles) -> Option<u64> {
    let limit = |group: String| {
        let number = |name: &str| files.number(&format!("{group}/{name}")).ok();
        // Version 2 writes `max` for no limit.
        number("memory.max")
            .or_else(|| number("memory.limit_in_bytes").filter(|max| *max < NO_LIMIT))
    };
    directories(files, "memory").into_iter().filter_map(limit).min()
}

/// The directories of the process's group for a controller and of the groups above it, the lowest
/// first. Some may not exist.
fn directories(files: &SysFiles, controller: &str) -> Vec<String> {
    let memberships = files.text_if_there("proc/self/cgroup").ok().flatten().unwrap_or_default();
    let groups = || {
        memberships.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?))
        })
    };
    // A controller belongs to one hierarchy: one of version 1 lists it, otherwise it is that of
    // version 2.
    let v1 = groups().find(|(names, _)| names.split(',').any(|name| name == controller));
    let (mounts, path) = match (v1, groups().find(|(names, _)| names.is_empty())) {
        (Some((_, path)), _) => (vec![format!("sys/fs/cgroup/{controller}")], path),
        (None, Some((_, path))) => {
            (vec!["sys/fs/cgroup".to_owned(), "sys/fs/cgroup/unified".to_owned()], path)
        }
        (None, None) => return Vec::new(),
    };
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    // `/..`: the group lies outside of the cgroup namespace.
    if steps.contains(&"..") {
        return Vec::new();
    }
    let depths = || (0..=steps.len()).rev();
    let below = |mount: String| {
        let steps = &steps;
        depths().map(move |depth| [&[mount.as_str()], &steps[..depth]].concat().join("/"))
    };
    mounts.into_iter().flat_map(below).collect()
}

#[cfg(test)]
mod tests {
    use super::super::trees::Tree;
    use super::*;

    #[test]
    fn the_lowest_memory_limit_of_all_groups_counts() {
        let own = ("proc/self/cgroup", "0::/box/job\n");
        let tree = Tree::new(&[
            own,
            ("sys/fs/cgroup/box/job/memory.max", "max\n"),
            ("sys/fs/cgroup/box/memory.max", "4096\n"),
            ("sys/fs/cgroup/memory.max", "8192\n"),
        ]);
        assert_eq!(memory_limit(&tree.files()), Some(4096));
        for (own, lowest) in [("16384\n", 4096), ("1024\n", 1024)] {
            tree.write("sys/fs/cgroup/box/job/memory.max", own);
            assert_eq!(memory_limit(&tree.files()), Some(lowest));
        }
        let v1 = Tree::new(&[
            ("proc/self/cgroup", "4:hugetlb,memory:/job\n0::/\n"),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "65536\n"),
            ("sys/fs/cgroup/memory.max", "1\n"),
        ]);
        assert_eq!(memory_limit(&v1.files()), Some(65536));
        let unlimited = [
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        for files in
            [&[][..], &unlimited, &[own], &[own, ("sys/fs/cgroup/box/memory.max", "max\n")]]
        {
            assert_eq!(memory_limit(&Tree::new(files).files()), None, "{files:?}");
        }
        let outside = [("proc/self/cgroup", "0::/..\n"), ("sys/fs/cgroup/memory.max", "1\n")];
        assert_eq!(memory_limit(&Tree::new(&outside).files()), None);
    }

    #[test]
    fn throttling_of_all_groups_is_added_up_in_nanoseconds() {
        let v2 = Tree::new(&[
            ("proc/self/cgroup", "0::/box/job\n"),
            ("sys/fs/cgroup/box/job/cpu.stat", "usage_usec 9\nnr_throttled 2\nthrottled_usec 30\n"),
            ("sys/fs/cgroup/box/cpu.stat", "nr_periods 8\nnr_throttled 1\nthrottled_usec 4\n"),
            ("sys/fs/cgroup/cpu.stat", "usage_usec 9\n"),
        ]);
        assert_eq!(throttled(&v2.files()), Some(Throttled { periods: 3, ns: 34_000 }));
        let v1 = Tree::new(&[
            ("proc/self/cgroup", "2:cpu,cpuacct:/\n0::/other\n"),
            ("sys/fs/cgroup/cpu/cpu.stat", "nr_periods 8\nnr_throttled 5\nthrottled_time 77\n"),
        ]);
        assert_eq!(throttled(&v1.files()), Some(Throttled { periods: 5, ns: 77 }));
    }

    #[test]
    fn a_group_without_quota_counts_nothing() {
        for stat in ["", "usage_usec 9\n", "nr_throttled x\nthrottled_usec 1\n", "throttled_usec 1"]
        {
            let tree =
                Tree::new(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.stat", stat)]);
            assert_eq!(throttled(&tree.files()), None, "{stat}");
        }
        assert_eq!(throttled(&Tree::new(&[]).files()), None);
    }
}
