//! What memory cgroups leave to the process, of both versions.

use crate::topology::SysFiles;

/// What a memory cgroup leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRoom {
    /// The file with the limit, relative to the root.
    pub(crate) file: String,
    /// The limit in bytes.
    pub(crate) max: u64,
    /// Bytes left under it.
    pub(crate) left: u64,
}

/// For each memory limit that applies to the process: its file, and the bytes left under it. File
/// pages that can be dropped count as left.
pub(crate) fn memory_rooms(files: &SysFiles) -> Vec<MemoryRoom> {
    const V2: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
    const V1: [&str; 1] = ["sys/fs/cgroup/memory"];
    let text = |path: &str| files.text_if_there(path).ok().flatten();
    let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
    let mut rooms = Vec::new();
    // A process is in one group of each hierarchy, and the kernel's paths have at most 4095 bytes:
    // more of either is no kernel's doing.
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
        // A path with `..` is one above the cgroup namespace: its files are not to be seen.
        let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
        if steps.contains(&"..") {
            continue;
        }
        for mount in mounts {
            for depth in (0..=steps.len()).rev() {
                let folder = [&[*mount], &steps[..depth]].concat().join("/");
                let file = format!("{folder}/{max}");
                // "max" and a missing file both mean: no limit here.
                let Some((max, current)) =
                    number(&file).zip(number(&format!("{folder}/{current}")))
                else {
                    continue;
                };
                let stat = text(&format!("{folder}/memory.stat")).unwrap_or_default();
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
    fn limits_of_both_cgroup_versions_are_found_and_droppable_file_pages_count_as_free() {
        let root = std::env::temp_dir().join(format!("pageleap-cgroup-{}", std::process::id()));
        let put = |folder: &str, files: [(&str, &str); 3]| {
            fs::create_dir_all(root.join(folder)).unwrap();
            files
                .iter()
                .for_each(|(name, text)| fs::write(root.join(folder).join(name), text).unwrap());
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
        // A process is in one group only.
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
