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

/// All memory limits that apply to the process. File pages that the kernel can drop count as left.
pub(crate) fn memory_rooms(files: &SysFiles) -> Vec<MemoryRoom> {
    const V2: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
    const V1: [&str; 1] = ["sys/fs/cgroup/memory"];
    let text = |path: &str| files.text_if_there(path).ok().flatten();
    let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
    let mut rooms = Vec::new();
    // A process is in one group of each hierarchy, and a path of the kernel has at most 4095 bytes.
    // Anything beyond that does not come from a kernel and is skipped.
    let (mut seen_v1, mut seen_v2) = (false, false);
    for line in text("proc/self/cgroup").unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mounts, max, current, cached): (&[&str], _, _, [&str; 2]) = if controllers.is_empty() {
            (&V2, "memory.max", "memory.current", ["active_file ", "inactive_file "])
        } else if controllers.split(',').any(|c| c == "memory") {
            (
                &V1,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_active_file ", "total_inactive_file "],
            )
        } else {
            continue;
        };
        let seen = if controllers.is_empty() { &mut seen_v2 } else { &mut seen_v1 };
        if std::mem::replace(seen, true) || path.len() > 4095 {
            continue;
        }
        // A path with `..` leads above the cgroup namespace, where the files are not visible.
        let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
        if steps.contains(&"..") {
            continue;
        }
        for mount in mounts {
            for depth in (0..=steps.len()).rev() {
                let directory = [&[*mount], &steps[..depth]].concat().join("/");
                let file = format!("{directory}/{max}");
                // "max" and a missing file both mean that this group has no limit.
                let Some((max, current)) =
                    number(&file).zip(number(&format!("{directory}/{current}")))
                else {
                    continue;
                };
                let stat = text(&format!("{directory}/memory.stat")).unwrap_or_default();
                let value = |name: &&str| {
                    stat.lines().find_map(|l| l.strip_prefix(*name))?.trim().parse::<u64>().ok()
                };
                let droppable = cached.iter().filter_map(value).fold(0, u64::saturating_add);
                let left = max.saturating_sub(current.saturating_sub(droppable));
                rooms.push(MemoryRoom { file, max, left });
            }
        }
    }
    rooms
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
