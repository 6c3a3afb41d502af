//! Finds the groups of a cgroup hierarchy that this process is in, and which of them it can see.
//!
//! `/proc/self/cgroup` names the group of the process. `/proc/self/mountinfo` tells where a
//! hierarchy is mounted, and which group its top directory is (cgroups(7), cgroup_namespaces(7)).
//! Groups can be hidden by a cgroup namespace, by a mount of only a part, and by a mount over a
//! directory. Their limits apply all the same.

use crate::topology::{MountLine, SysFiles, unescaped};

/// A version of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

/// The groups that limit the process by one controller.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Groups {
    pub(super) version: Version,
    /// Their directories relative to the root directory, from the process's own group up.
    pub(super) directories: Vec<String>,
    /// Why there may be further groups.
    pub(super) hidden: Option<String>,
}

/// A mounted hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group of its top directory.
    group: String,
    /// The top directory relative to the root directory.
    directory: String,
}

/// Bytes of the longest path that the kernel writes (`PATH_MAX` without the final NUL).
const MAX_PATH: usize = 4095;

/// The groups of the process that the controller may limit. A controller belongs to one hierarchy:
/// the one of version 1 that lists it, otherwise that of version 2.
pub(super) fn groups(files: &SysFiles, controller: &str) -> Groups {
    let none = |version, hidden: &str| Groups {
        version,
        directories: Vec::new(),
        hidden: Some(hidden.into()),
    };
    let Ok(Some(memberships)) = files.text_if_there("proc/self/cgroup") else {
        return none(Version::V2, "/proc/self/cgroup cannot be read");
    };
    let Some((version, path)) = membership(&memberships, controller) else {
        return none(Version::V2, "/proc/self/cgroup names no group");
    };
    let steps = steps(path);
    if path.len() > MAX_PATH || steps.contains(&"..") {
        return none(version, "the group lies outside of the cgroup namespace");
    }
    let Ok(Some(table)) = files.text_if_there("proc/self/mountinfo") else {
        return by_custom(files, version, &steps, controller);
    };
    let mounts: Vec<Mount> = table.lines().filter_map(|line| mount(line, controller)).collect();
    let found = mounts.iter().filter(|mount| mount.version == version);
    found.filter_map(|mount| visible(files, mount, &steps)).next().unwrap_or_else(|| {
        none(version, "no mounted cgroup file system shows the group of this process")
    })
}

/// The version and the group in which a controller counts the process.
fn membership<'a>(memberships: &'a str, controller: &str) -> Option<(Version, &'a str)> {
    let groups = || {
        memberships.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?))
        })
    };
    let listed = |names: &str| names.split(',').any(|name| name == controller);
    let v1 = groups().find(|(names, _)| listed(names)).map(|(_, path)| (Version::V1, path));
    v1.or_else(|| groups().find(|(names, _)| names.is_empty()).map(|(_, path)| (Version::V2, path)))
}

fn steps(path: &str) -> Vec<&str> {
    path.split('/').filter(|step| !step.is_empty()).collect()
}

/// Parses a line of mountinfo: a hierarchy with this controller, or of version 2.
fn mount(line: &str, controller: &str) -> Option<Mount> {
    let line = MountLine::parse(line)?;
    let version = match line.filesystem {
        "cgroup2" => Version::V2,
        "cgroup" if line.options.split(',').any(|name| name == controller) => Version::V1,
        _ => return None,
    };
    let directory = unescaped(line.place).trim_start_matches('/').to_owned();
    Some(Mount { version, group: unescaped(line.top), directory })
}

/// The groups of the process that a mount shows; `None` if it does not show the process's own.
fn visible(files: &SysFiles, mount: &Mount, own: &[&str]) -> Option<Groups> {
    let below = own.strip_prefix(&*steps(&mount.group))?;
    let directories = directories(&mount.directory, below);
    let has = |directory: &str, file: &str| {
        matches!(files.text_if_there(&format!("{directory}/{file}")), Ok(Some(_)))
    };
    // If another file system is mounted over it, the group's files are missing.
    let sign = match mount.version {
        Version::V1 => "notify_on_release",
        Version::V2 => "cgroup.controllers",
    };
    if !has(&directories[0], sign) {
        return None;
    }
    // The topmost group of a hierarchy has (v1) and lacks (v2, Linux 4.14) a file.
    let is_top = match mount.version {
        Version::V1 => has(&mount.directory, "release_agent"),
        Version::V2 => !has(&mount.directory, "cgroup.type"),
    };
    let hidden = (!is_top)
        .then(|| format!("groups above that of /{} cannot be seen from here", mount.directory));
    Some(Groups { version: mount.version, directories, hidden })
}

/// The directories from a group up to the mount.
fn directories(mount: &str, below: &[&str]) -> Vec<String> {
    let depths = (0..=below.len()).rev();
    depths.map(|depth| [&[mount], &below[..depth]].concat().join("/")).collect()
}

/// The groups at the usual mount points, for recordings without mountinfo.
fn by_custom(files: &SysFiles, version: Version, steps: &[&str], controller: &str) -> Groups {
    let mounts = match version {
        Version::V1 => vec![format!("sys/fs/cgroup/{controller}")],
        Version::V2 => vec!["sys/fs/cgroup".to_owned(), "sys/fs/cgroup/unified".to_owned()],
    };
    let is_there = |mount: &String| files.names(mount).is_ok();
    let mounts: Vec<String> = mounts.into_iter().filter(is_there).collect();
    let hidden =
        mounts.is_empty().then(|| "no cgroup file system is mounted at /sys/fs/cgroup".into());
    let directories = mounts.iter().flat_map(|mount| directories(mount, steps)).collect();
    Groups { version, directories, hidden }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::cgroup::tests::Tree;

    const MOUNT: &str = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    fn found(files: &[(&str, &str)]) -> Groups {
        groups(&Tree::new(files).files(), "memory")
    }

    #[test]
    fn all_groups_up_to_the_top_are_found_where_they_are_mounted() {
        let v2 = found(&[
            ("proc/self/cgroup", "1:cpu,memorylike:/x\n0::/a/b\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /mnt/the\\040groups rw - cgroup2 none rw\n"),
            ("mnt/the groups/a/b/cgroup.controllers", "memory\n"),
            ("mnt/the groups/cgroup.controllers", "memory\n"),
        ]);
        let directories = ["mnt/the groups/a/b", "mnt/the groups/a", "mnt/the groups"];
        assert_eq!((v2.version, v2.hidden), (Version::V2, None));
        assert_eq!(v2.directories, directories);
        let v1 = found(&[
            ("proc/self/cgroup", "4:cpu,memory:/c\n0::/a/b\n"),
            (
                "proc/self/mountinfo",
                "30 23 0:9 / /g/cpu rw shared:9 - cgroup cgroup rw,cpuset\n\
                 32 23 0:29 / /g/memory rw shared:9 - cgroup cgroup rw,cpu,memory\n",
            ),
            ("g/memory/c/notify_on_release", "0\n"),
            ("g/memory/release_agent", "\n"),
        ]);
        assert_eq!((v1.version, v1.hidden), (Version::V1, None));
        assert_eq!(v1.directories, ["g/memory/c", "g/memory"]);
    }

    #[test]
    fn a_mount_of_a_part_shows_the_groups_below() {
        let part = found(&[
            ("proc/self/cgroup", "0::/pod/box/job\n"),
            ("proc/self/mountinfo", "31 23 0:28 /pod/box /sys/fs/cgroup rw - cgroup2 none rw\n"),
            ("sys/fs/cgroup/cgroup.type", "domain\n"),
            ("sys/fs/cgroup/job/cgroup.controllers", "memory\n"),
        ]);
        assert_eq!(part.directories, ["sys/fs/cgroup/job", "sys/fs/cgroup"]);
        assert!(part.hidden.unwrap().contains("groups above"));
    }

    #[test]
    fn hidden_groups_are_told() {
        let hidden = |files: &[(&str, &str)]| {
            let found = found(files);
            assert_eq!(found.directories, [""; 0], "{files:?}");
            found.hidden.unwrap()
        };
        let own = ("proc/self/cgroup", "0::/\n");
        // A namespace whose top is another group.
        let below = found(&[
            own,
            ("proc/self/mountinfo", MOUNT),
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/cgroup.type", "domain\n"),
        ]);
        assert!(below.hidden.unwrap().contains("groups above"));
        assert!(hidden(&[]).contains("/proc/self/cgroup"));
        assert!(hidden(&[("proc/self/cgroup", "1:cpu:/\n")]).contains("names no group"));
        let outside = [("proc/self/cgroup", "0::/../other\n"), ("proc/self/mountinfo", MOUNT)];
        assert!(hidden(&outside).contains("namespace"));
        let nowhere = "no mounted cgroup file system";
        assert!(hidden(&[own, ("proc/self/mountinfo", "")]).contains(nowhere));
        // Another file system is mounted over it.
        assert!(hidden(&[own, ("proc/self/mountinfo", MOUNT)]).contains(nowhere));
        // A mount that was made outside of the namespace shows its own top, and not which of its
        // groups is the process's.
        let outer = "31 23 0:28 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let files =
            [own, ("proc/self/mountinfo", outer), ("sys/fs/cgroup/cgroup.controllers", "memory\n")];
        assert!(hidden(&files).contains(nowhere));
        // The hierarchy of another controller.
        let other = "31 23 0:28 / /sys/fs/cgroup rw - cgroup cgroup rw,memorylike\n";
        let files = [("proc/self/cgroup", "3:memory:/\n"), ("proc/self/mountinfo", other)];
        assert!(hidden(&files).contains(nowhere));
    }
}
