//! Memory limits of cgroups, versions 1 and 2, and the bytes that they leave to the process.

use crate::topology::SysFiles;

/// One memory limit that applies to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRoom {
    /// The file with the limit, relative to the root directory.
    pub(crate) file: String,
    /// The limit in bytes.
    pub(crate) max: u64,
    /// Bytes that the process may still allocate under the limit.
    pub(crate) left: u64,
}

/// The files of a version of cgroups that tell about memory.
struct Hierarchy {
    /// Directories where the hierarchy is usually mounted, relative to the root directory.
    mounts: &'static [&'static str],
    limit: &'static str,
    usage: &'static str,
    /// Names in `memory.stat` of the file pages that the kernel can drop, with the space after
    /// them.
    cached: [&'static str; 2],
}

const V1: Hierarchy = Hierarchy {
    mounts: &["sys/fs/cgroup/memory"],
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cached: ["total_active_file ", "total_inactive_file "],
};

const V2: Hierarchy = Hierarchy {
    mounts: &["sys/fs/cgroup", "sys/fs/cgroup/unified"],
    limit: "memory.max",
    usage: "memory.current",
    cached: ["active_file ", "inactive_file "],
};

/// Bytes of the longest path that the kernel writes (`PATH_MAX` without the final NUL).
const MAX_PATH: usize = 4095;

/// All memory limits that apply to the process. File pages that the kernel can drop count as left.
pub(crate) fn memory_rooms(files: &SysFiles) -> Vec<MemoryRoom> {
    let groups = files.text_if_there("proc/self/cgroup").ok().flatten().unwrap_or_default();
    let mut rooms = Vec::new();
    // A process is in one group of each hierarchy, and a path of the kernel has at most `MAX_PATH`
    // bytes. Anything beyond that does not come from a kernel and is skipped.
    let (mut seen_v1, mut seen_v2) = (false, false);
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (hierarchy, seen) = if controllers.is_empty() {
            (&V2, &mut seen_v2)
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (&V1, &mut seen_v1)
        } else {
            continue;
        };
        if std::mem::replace(seen, true) || path.len() > MAX_PATH {
            continue;
        }
        // A path with `..` leads above the cgroup namespace, where the files are not visible.
        let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
        if steps.contains(&"..") {
            continue;
        }
        for mount in hierarchy.mounts {
            // The limits of all groups above the process apply too.
            let groups = (0..=steps.len()).rev().map(|depth| [&[*mount], &steps[..depth]].concat());
            rooms.extend(groups.filter_map(|group| hierarchy.room(files, &group.join("/"))));
        }
    }
    rooms
}

impl Hierarchy {
    /// The limit of the group with this directory, or `None` if the group has no limit.
    fn room(&self, files: &SysFiles, directory: &str) -> Option<MemoryRoom> {
        let text = |path: &str| files.text_if_there(path).ok().flatten();
        let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
        let file = format!("{directory}/{}", self.limit);
        // "max" and a missing file both mean that this group has no limit.
        let max = number(&file)?;
        let current = number(&format!("{directory}/{}", self.usage))?;
        let stat = text(&format!("{directory}/memory.stat")).unwrap_or_default();
        let value = |name: &&str| {
            stat.lines().find_map(|line| line.strip_prefix(*name))?.trim().parse::<u64>().ok()
        };
        let droppable = self.cached.iter().filter_map(value).fold(0, u64::saturating_add);
        let left = max.saturating_sub(current.saturating_sub(droppable));
        Some(MemoryRoom { file, max, left })
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn limits_of_both_versions_are_found_and_droppable_file_pages_count_as_left() {
        let root = std::env::temp_dir().join(format!("pageleap-cgroup-{}", std::process::id()));
        let put = |directory: &str, files: [(&str, &str); 3]| {
            let directory = root.join(directory);
            fs::create_dir_all(&directory).unwrap();
            files.iter().for_each(|(name, text)| fs::write(directory.join(name), text).unwrap());
        };
        put(
            "sys/fs/cgroup/a",
            [("memory.max", "max\n"), ("memory.current", "5\n"), ("memory.stat", "")],
        );
        let stat = "anon 1\ninactive_file 50000\nactive_file 1000\n";
        put(
            "sys/fs/cgroup/a/b",
            [("memory.max", "1000000\n"), ("memory.current", "900000\n"), ("memory.stat", stat)],
        );
        let stat = "inactive_file 7\ntotal_inactive_file 30\ntotal_active_file 5\n";
        let files = [
            ("memory.limit_in_bytes", "100\n"),
            ("memory.usage_in_bytes", "90\n"),
            ("memory.stat", stat),
        ];
        put("sys/fs/cgroup/memory/c", files);
        // The second line `0::` is ignored, because a process is in only one group of a hierarchy.
        put(
            "sys/fs/cgroup/b",
            [("memory.max", "1\n"), ("memory.current", "1\n"), ("memory.stat", "")],
        );
        fs::create_dir_all(root.join("proc/self")).unwrap();
        fs::write(root.join("proc/self/cgroup"), "9:cpu:/x\n4:memory:/c\n0::/a/b\n0::/b\n")
            .unwrap();
        let rooms = memory_rooms(&SysFiles::at(&root));
        fs::remove_dir_all(&root).unwrap();
        let found: Vec<_> = rooms.iter().map(|room| (&*room.file, room.max, room.left)).collect();
        let expected = [
            ("sys/fs/cgroup/memory/c/memory.limit_in_bytes", 100, 45),
            ("sys/fs/cgroup/a/b/memory.max", 1_000_000, 151_000),
        ];
        assert_eq!(found, expected);
    }
}
