//! Limits of cgroups (versions 1 and 2) on memory and on hugetlb pages, and how many bytes they
//! leave to the process.

mod groups;

use std::fs;
use std::sync::{Mutex, PoisonError};

use groups::{Groups, Version, groups};

use crate::sync::{Fresh, monotonic_ns};
use crate::topology::SysFiles;

/// One limit that applies to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The file with the limit, relative to the root directory.
    pub file: String,
    /// The limit in bytes.
    pub max: u64,
    /// Bytes that the process may still allocate under the limit.
    pub left: u64,
}

/// The limits that apply to the process, as far as it can see them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Those that it can see.
    pub seen: Vec<Limit>,
    /// Why further limits may apply.
    pub hidden: Option<String>,
}

/// Version 1 writes "no limit" as the largest number of pages.
const NO_LIMIT: u64 = i64::MAX as u64 - 65_535;

/// All memory limits. File pages that the kernel can drop count as left.
pub fn memory(files: &SysFiles) -> Limits {
    let groups = groups(files, "memory");
    let [limit, usage, cached] = memory_files(groups.version);
    // Names in `memory.stat` of the file pages that the kernel can drop.
    let droppable = |directory: &str| {
        let stat = files.text_if_there(&format!("{directory}/memory.stat")).ok().flatten();
        let value = |name: &&str| {
            let wanted = format!("{cached}{name} ");
            let text = stat.as_deref().unwrap_or_default();
            text.lines().find_map(|line| line.strip_prefix(&*wanted))?.trim().parse::<u64>().ok()
        };
        ["active_file", "inactive_file"].iter().filter_map(value).fold(0, u64::saturating_add)
    };
    limits(files, &groups, limit, usage, &droppable)
}

/// The memory limit of a visible group that leaves less than `needed` bytes, or `None`. For callers
/// that ask often: it reads the limit and the usage of each group, further files only where a group
/// is nearly full, and nothing where much was left a moment ago. Free swap counts as left, because
/// the kernel can make room by it.
pub(crate) fn memory_short_of(needed: u64) -> Option<Limit> {
    /// Bytes left in the fullest group.
    static LEFT: Fresh<u64> = Fresh::new();
    /// The most that all threads of a machine take in the meantime: they fault in some GB per
    /// second.
    const SINCE: u64 = 512 << 20;
    let is_plenty = |left: &u64| *left >= needed.saturating_add(SINCE);
    if LEFT.get(is_plenty) == Some(true) {
        return None;
    }
    let now_ns = monotonic_ns();
    let left = least_left()?;
    LEFT.put(left, now_ns);
    if left >= needed {
        return None;
    }
    let files = SysFiles::host();
    let short = memory(&files).seen.into_iter().filter(|limit| limit.left < needed);
    let short = short.min_by_key(|limit| limit.left)?;
    (short.left.saturating_add(free_swap(&files, &short)) < needed).then_some(short)
}

/// The bytes up to the nearest limit of all visible groups, not counting file pages that the kernel
/// can drop. `None` if the groups are not known.
fn least_left() -> Option<u64> {
    /// The limit and usage file of each group, and the text of `/proc/self/cgroup` for which they
    /// were found.
    type Found = (Vec<u8>, Vec<[String; 2]>);
    static FOUND: Mutex<Option<Found>> = Mutex::new(None);
    let memberships = pageleap_sys::read_own("cgroup").ok()?;
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if found.as_ref().is_none_or(|(of, _)| *of != memberships) {
        let groups = groups(&SysFiles::host(), "memory");
        let [limit, usage, _] = memory_files(groups.version);
        let paths = groups.directories.iter();
        let paths = paths.map(|group| [limit, usage].map(|file| format!("/{group}/{file}")));
        *found = Some((memberships, paths.collect()));
    }
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let left = |[limit, usage]: &[String; 2]| {
        let max = number(limit).filter(|max| *max < NO_LIMIT);
        max.and_then(|max| Some(max.saturating_sub(number(usage)?))).unwrap_or(u64::MAX)
    };
    Some(found.as_ref()?.1.iter().map(left).min().unwrap_or(u64::MAX))
}

/// Bytes of swap that the machine, and the group of a limit, have left.
fn free_swap(files: &SysFiles, limit: &Limit) -> u64 {
    let meminfo = files.text("proc/meminfo").unwrap_or_default();
    let kilobytes =
        |line: &str| line.strip_prefix("SwapFree:")?.split_whitespace().next()?.parse().ok();
    let machine = meminfo.lines().find_map(kilobytes).unwrap_or(0u64) << 10;
    let directory = limit.file.rsplit_once('/').map_or("", |(directory, _)| directory);
    let number = |file: &str| files.number(&format!("{directory}/{file}")).ok();
    let group = number("memory.swap.max")
        .map(|max| max.saturating_sub(number("memory.swap.current").unwrap_or(0)));
    machine.min(group.unwrap_or(u64::MAX))
}

/// Names of the limit file and the usage file, and the prefix of names in `memory.stat`.
fn memory_files(version: Version) -> [&'static str; 3] {
    match version {
        Version::V1 => ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_"],
        Version::V2 => ["memory.max", "memory.current", ""],
    }
}

/// All limits on huge pages of hugetlb: those on pages in use, and those on pages that mappings
/// have reserved (`rsvd`, Linux 5.7).
pub fn huge_pages(files: &SysFiles, page_bytes: u64) -> Limits {
    let groups = groups(files, "hugetlb");
    let size = match page_bytes.trailing_zeros() {
        shift @ 30.. => format!("{}GB", 1u64 << (shift - 30)),
        shift @ 20.. => format!("{}MB", 1u64 << (shift - 20)),
        shift => format!("{}KB", (1u64 << shift) >> 10),
    };
    let [limit, usage] = match groups.version {
        Version::V1 => ["limit_in_bytes", "usage_in_bytes"],
        Version::V2 => ["max", "current"],
    };
    let of_kind = |kind: &str| {
        let [limit, usage] = [limit, usage].map(|file| format!("hugetlb.{size}.{kind}{file}"));
        limits(files, &groups, &limit, &usage, &|_| 0)
    };
    let [mut used, reserved] = ["", "rsvd."].map(of_kind);
    used.seen.extend(reserved.seen);
    used.hidden = used.hidden.or(reserved.hidden);
    used
}

/// The contents of the groups' files.
fn limits(
    files: &SysFiles,
    groups: &Groups,
    limit: &str,
    usage: &str,
    droppable: &dyn Fn(&str) -> u64,
) -> Limits {
    let mut found = Limits { seen: Vec::new(), hidden: groups.hidden.clone() };
    for directory in &groups.directories {
        let file = format!("{directory}/{limit}");
        let max = match files.text_if_there(&file) {
            Ok(Some(text)) => text.trim().parse().unwrap_or(u64::MAX),
            // The controller is not enabled in this group, so the groups above count its pages.
            Ok(None) => continue,
            Err(_) => {
                found.hidden = Some(format!("/{file} cannot be read"));
                continue;
            }
        };
        // "max", which is no number, and the number of version 1 for it.
        if max >= NO_LIMIT {
            continue;
        }
        match files.number(&format!("{directory}/{usage}")) {
            Ok(used) => {
                let left = max.saturating_sub(used.saturating_sub(droppable(directory)));
                found.seen.push(Limit { file, max, left });
            }
            Err(_) => found.hidden = Some(format!("/{directory}/{usage} cannot be read")),
        }
    }
    found
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    /// Files of a made-up machine, until it is dropped.
    pub(super) struct Tree(PathBuf);

    impl Tree {
        pub(super) fn new(files: &[(&str, &str)]) -> Tree {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Relaxed);
            let name = format!("pageleap-cgroup-{}-{number}", std::process::id());
            let tree = Tree(std::env::temp_dir().join(name));
            fs::create_dir_all(&tree.0).unwrap();
            for (path, text) in files {
                let path = tree.0.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            tree
        }

        pub(super) fn files(&self) -> SysFiles {
            SysFiles::at(&self.0)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn seen(limits: &Limits) -> Vec<(&str, u64, u64)> {
        limits.seen.iter().map(|limit| (&*limit.file, limit.max, limit.left)).collect()
    }

    #[test]
    fn limits_of_both_versions_are_found_and_droppable_file_pages_count_as_left() {
        // The second line `0::` is ignored, because a process is in only one group of a hierarchy.
        let v2 = Tree::new(&[
            ("proc/self/cgroup", "9:cpu:/x\n0::/a/b\n0::/b\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "5\n"),
            ("sys/fs/cgroup/a/b/memory.max", "1000000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "900000\n"),
            ("sys/fs/cgroup/a/b/memory.stat", "anon 1\ninactive_file 50000\nactive_file 1000\n"),
            ("sys/fs/cgroup/b/memory.max", "1\n"),
            ("sys/fs/cgroup/b/memory.current", "1\n"),
        ]);
        let expected = [("sys/fs/cgroup/a/b/memory.max", 1_000_000, 151_000)];
        assert_eq!(seen(&memory(&v2.files())), expected);
        let stat = "inactive_file 7\ntotal_inactive_file 30\ntotal_active_file 5\n";
        let v1 = Tree::new(&[
            ("proc/self/cgroup", "9:cpu:/x\n4:memory:/c\n0::/a/b\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
            ("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "100\n"),
            ("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "90\n"),
            ("sys/fs/cgroup/memory/c/memory.stat", stat),
            ("sys/fs/cgroup/a/b/memory.max", "1\n"),
        ]);
        let expected = [("sys/fs/cgroup/memory/c/memory.limit_in_bytes", 100, 45)];
        assert_eq!(seen(&memory(&v1.files())), expected);
    }

    #[test]
    fn limits_on_huge_pages_are_those_of_their_size_in_use_and_reserved() {
        let v2 = Tree::new(&[
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/hugetlb.2MB.max", "8388608\n"),
            ("sys/fs/cgroup/a/hugetlb.2MB.current", "2097152\n"),
            ("sys/fs/cgroup/a/hugetlb.2MB.rsvd.max", "4194304\n"),
            ("sys/fs/cgroup/a/hugetlb.2MB.rsvd.current", "4194304\n"),
            ("sys/fs/cgroup/a/hugetlb.1GB.max", "0\n"),
            ("sys/fs/cgroup/a/hugetlb.1GB.current", "0\n"),
        ]);
        let expected = [
            ("sys/fs/cgroup/a/hugetlb.2MB.max", 8 << 20, 6 << 20),
            ("sys/fs/cgroup/a/hugetlb.2MB.rsvd.max", 4 << 20, 0),
        ];
        assert_eq!(seen(&huge_pages(&v2.files(), 2 << 20)), expected);
        let expected = [("sys/fs/cgroup/a/hugetlb.1GB.max", 0, 0)];
        assert_eq!(seen(&huge_pages(&v2.files(), 1 << 30)), expected);
        let v1 = Tree::new(&[
            ("proc/self/cgroup", "7:hugetlb:/b\n0::/a\n"),
            ("sys/fs/cgroup/hugetlb/b/hugetlb.2MB.limit_in_bytes", "4194304\n"),
            ("sys/fs/cgroup/hugetlb/b/hugetlb.2MB.usage_in_bytes", "2097152\n"),
        ]);
        let expected = [("sys/fs/cgroup/hugetlb/b/hugetlb.2MB.limit_in_bytes", 4 << 20, 2 << 20)];
        assert_eq!(seen(&huge_pages(&v1.files(), 2 << 20)), expected);
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_hidden() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "8388608\n"),
            ("sys/fs/cgroup/a/memory.current", "many\n"),
        ]);
        let limits = memory(&tree.files());
        assert_eq!(seen(&limits), []);
        assert!(limits.hidden.unwrap().contains("memory.current"));
    }
}
