//! The kernel's counters of CPU time and of heat.

use std::collections::BTreeMap;

use pageleap::topology::SysFiles;

/// The CPU time of all CPUs together since the machine started, in clock ticks: the line `cpu` of
/// `/proc/stat` (proc_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuTicks {
    /// user, nice, system, idle, iowait, irq, softirq, steal. The later columns, of guests, are a
    /// part of user and nice.
    columns: [u64; 8],
}

impl CpuTicks {
    /// Reads the counters; `None` if one of them is missing or is no number.
    pub(super) fn read(files: &SysFiles) -> Option<CpuTicks> {
        let stat = files.text_by_cpu("proc/stat").ok()?;
        let mut values =
            stat.lines().find_map(|line| line.strip_prefix("cpu "))?.split_whitespace();
        let mut columns = [0; 8];
        for column in &mut columns {
            *column = values.next()?.parse().ok()?;
        }
        Some(CpuTicks { columns })
    }

    /// The rise since an earlier reading. Some counters of the kernel can fall, such as iowait;
    /// those count as not risen.
    pub(super) fn since(self, earlier: CpuTicks) -> CpuTicks {
        let mut columns = self.columns;
        columns
            .iter_mut()
            .zip(earlier.columns)
            .for_each(|(to, from)| *to = to.saturating_sub(from));
        CpuTicks { columns }
    }

    /// All ticks: those of the CPUs times the time that went by.
    pub(super) fn total(self) -> u64 {
        self.columns.iter().fold(0, |sum, ticks| sum.saturating_add(*ticks))
    }

    /// The ticks in which the hypervisor ran something else.
    pub(super) fn steal(self) -> u64 {
        self.columns[7]
    }

    /// The ticks in which CPUs ran anything. A CPU is idle during iowait.
    pub(super) fn busy(self) -> u64 {
        let [_, _, _, idle, iowait, _, _, steal] = self.columns;
        let idle = idle.saturating_add(iowait).saturating_add(steal);
        self.total().saturating_sub(idle)
    }
}

/// Counts of thermal events by file: one for each CPU's core, and one for its package.
pub(super) type ThermalCounts = BTreeMap<String, u64>;

/// Reads the counts of all CPUs. Empty without such files, as on virtual machines.
pub(super) fn thermal_counts(files: &SysFiles) -> ThermalCounts {
    const CPUS: &str = "sys/devices/system/cpu";
    let cpus = files.names(CPUS).unwrap_or_default();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let cpus = cpus.into_iter().filter(|name| name.strip_prefix("cpu").is_some_and(is_number));
    let paths = cpus.flat_map(|cpu| {
        ["core", "package"].map(|of| format!("{CPUS}/{cpu}/thermal_throttle/{of}_throttle_count"))
    });
    paths.filter_map(|path| files.number(&path).ok().map(|count| (path, count))).collect()
}

/// The rise of the count that rose most; `None` if no file is in both readings.
pub(super) fn thermal_events(before: &ThermalCounts, after: &ThermalCounts) -> Option<u64> {
    let rise = |(path, count): (&String, &u64)| Some(count.saturating_sub(*before.get(path)?));
    after.iter().filter_map(rise).max()
}

#[cfg(test)]
mod tests {
    use super::super::trees::Tree;
    use super::*;

    fn ticks(stat: &str) -> Option<CpuTicks> {
        CpuTicks::read(&Tree::new(&[("proc/stat", stat)]).files())
    }

    #[test]
    fn columns_of_guests_count_only_once() {
        let ticks = ticks("cpu  1 2 4 8 16 32 64 128 1 2\ncpu0 9 9 9 9 9 9 9 9 9 9\n").unwrap();
        assert_eq!(ticks.total(), 255);
        assert_eq!(ticks.steal(), 128);
        assert_eq!(ticks.busy(), 1 + 2 + 4 + 32 + 64);
    }

    #[test]
    fn counters_that_fall_count_as_not_risen() {
        let [before, after] =
            ["cpu  1 1 1 9 9 1 1 1\n", "cpu  2 1 1 11 4 1 1 1\n"].map(|stat| ticks(stat).unwrap());
        assert_eq!((after.since(before).total(), after.since(before).busy()), (3, 1));
    }

    #[test]
    fn a_stat_without_all_columns_says_nothing() {
        for stat in [
            "",
            "cpu\n",
            "cpu  1 2 3 4 5 6 7\n",
            "cpu  1 2 3 4 x 6 7 8\n",
            "cpu  1 2 3 -4 5 6 7 8\n",
            "cpu0 1 2 3 4 5 6 7 8\n",
        ] {
            assert_eq!(ticks(stat), None, "{stat}");
        }
        let most = u64::MAX;
        let ticks = ticks(&format!("cpu  {most} {most} 0 {most} 0 0 0 1\n")).unwrap();
        assert_eq!((ticks.total(), ticks.busy()), (most, 0));
    }

    #[test]
    fn an_event_of_a_package_counts_once() {
        let counts = |core0: &str, package: &str| {
            let cpus = "sys/devices/system/cpu";
            let tree = Tree::new(&[]);
            tree.write(&format!("{cpus}/cpu0/thermal_throttle/core_throttle_count"), core0);
            for cpu in ["cpu0", "cpu1", "cpufreq", "cpu"] {
                let path = format!("{cpus}/{cpu}/thermal_throttle/package_throttle_count");
                tree.write(&path, package);
            }
            thermal_counts(&tree.files())
        };
        let before = counts("5", "7");
        assert_eq!(before.len(), 3);
        assert_eq!(thermal_events(&before, &counts("5", "7")), Some(0));
        assert_eq!(thermal_events(&before, &counts("5", "9")), Some(2));
        assert_eq!(thermal_events(&before, &counts("8", "9")), Some(3));
        // A count that is no number is left out, and one that fell has not risen.
        assert_eq!(thermal_events(&before, &counts("x", "6")), Some(0));
        assert_eq!(thermal_events(&ThermalCounts::new(), &before), None);
        assert_eq!(thermal_events(&before, &ThermalCounts::new()), None);
    }
}
