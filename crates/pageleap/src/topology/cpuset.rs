//! The nodes and the CPUs that the process may use, from its status or from the files of its
//! cpuset.
//!
//! Cgroups of version 2, cgroups of version 1 and the older file system `cpuset` show the same
//! cpuset under different file names. `mountinfo` tells where they are mounted.

use pageleap_sys::MAX_NODES;

use super::SysFiles;
use super::files::{Bounded, MAX_ENTRIES};
use super::formats::{
    MAX_CPUS, MountLine, node_ids, parse_list, parse_map, status_value, unescaped,
};
use crate::error::Error;
use crate::units::NodeId;

pub(super) const STATUS: &str = "proc/self/status";
/// The cgroups of the process, and its cpuset alone (version 1, and kernels before Linux 2.6.24).
const CGROUPS: &str = "proc/self/cgroup";
const CPUSET: &str = "proc/self/cpuset";
/// The mounts that the process sees. Recorded machines often have one of the others.
const MOUNTINFO: &str = "proc/self/mountinfo";
const MOUNTS: [&str; 2] = ["proc/self/mounts", "proc/mounts"];

/// The nodes and CPUs that the process may use. `None`: not known.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowed {
    pub(super) mems: Option<Vec<NodeId>>,
    pub(super) cpus: Option<Vec<usize>>,
    /// Whether the kernel has no cpusets: then all nodes are allowed.
    pub(super) has_no_cpusets: bool,
}

/// Reads the nodes and CPUs that the process may use. `warn` gets an error for each damaged file.
pub(super) fn allowed(files: &Bounded, warn: &mut dyn FnMut(Error)) -> Allowed {
    let status = files.text_if_there(STATUS).unwrap_or_else(|error| {
        warn(error);
        None
    });
    let tells =
        |status: &String| ["Mems_allowed", "Cpus_allowed"].iter().any(|name| status.contains(name));
    let Some(status) = status.filter(tells) else { return of_cpuset(files, warn) };
    let mut value = |name: &str, end| {
        let (list, map) = (format!("{name}_list"), name);
        let found = match status_value(&status, &list) {
            Some(text) => parse_list(text, end),
            // Before Linux 2.6.26.
            None => parse_map(status_value(&status, map)?, end),
        };
        let some = found.and_then(|ids| match ids.is_empty() {
            true => Err("it is empty".to_owned()),
            false => Ok(ids),
        });
        some.map_err(|reason| warn(files.damaged(STATUS, format!("{list}: {reason}")))).ok()
    };
    let mems = value("Mems_allowed", MAX_NODES).map(node_ids);
    let cpus = value("Cpus_allowed", MAX_CPUS);
    let has_no_cpusets = cpus.is_some() && !status.contains("Mems_allowed");
    Allowed { mems, cpus, has_no_cpusets }
}

/// The nodes and CPUs that the cpuset of the process allows. Its affinity is not known.
fn of_cpuset(files: &Bounded, warn: &mut dyn FnMut(Error)) -> Allowed {
    let found = Group::of_process(files).unwrap_or_else(|error| {
        warn(error);
        None
    });
    let Some(group) = found else { return Allowed::default() };
    let mut list = |name, end| {
        group.list(files, name, end).unwrap_or_else(|error| {
            warn(error);
            None
        })
    };
    let mems = list("mems", MAX_NODES).map(node_ids);
    Allowed { mems, cpus: list("cpus", MAX_CPUS), has_no_cpusets: false }
}

/// The file that sets the nodes of the cpuset of the process, as an absolute path below the root;
/// `None` if the mounts do not tell.
pub fn file_of_nodes(files: &SysFiles) -> Option<String> {
    let group = Group::of_process(&Bounded::new(files)).ok()??;
    Some(format!("/{}/{}mems", group.directories().next()?, group.kind.prefix()))
}

/// How a mount shows cpusets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Cgroups of version 2: `cpuset.mems.effective`.
    Unified,
    /// Cgroups of version 1: `cpuset.mems`.
    Cgroup,
    /// The file system `cpuset`, or cgroups of version 1 with `noprefix`: `mems`.
    Bare,
}

impl Kind {
    fn prefix(self) -> &'static str {
        if self == Kind::Bare { "" } else { "cpuset." }
    }

    /// How a mount with this type and these options shows cpusets, if it does.
    fn of(filesystem: &str, options: &str) -> Option<Kind> {
        let has = |option| options.split(',').any(|one| one == option);
        match filesystem {
            "cgroup2" => Some(Kind::Unified),
            "cgroup" if has("cpuset") && has("noprefix") => Some(Kind::Bare),
            "cgroup" if has("cpuset") => Some(Kind::Cgroup),
            "cpuset" => Some(Kind::Bare),
            _ => None,
        }
    }
}

/// A mount that shows cpusets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    kind: Kind,
    /// The group that it shows at its top.
    top: String,
    /// Where it is, relative to the root directory.
    place: String,
}

impl Mount {
    fn of_mountinfo(line: &str) -> Option<Mount> {
        let line = MountLine::parse(line)?;
        Mount::new(Kind::of(line.filesystem, line.options)?, line.top, line.place)
    }

    /// A line of `mounts`: `none /place cgroup rw,cpuset 0 0`.
    fn of_mounts(line: &str) -> Option<Mount> {
        let mut fields = line.split(' ').skip(1);
        let (place, name, options) = (fields.next()?, fields.next()?, fields.next()?);
        Mount::new(Kind::of(name, options)?, "/", place)
    }

    fn new(kind: Kind, top: &str, place: &str) -> Option<Mount> {
        let place = unescaped(place);
        let place = place.strip_prefix('/')?.to_owned();
        Some(Mount { kind, top: unescaped(top), place })
    }
}

/// The group that has the cpuset of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    kind: Kind,
    /// Where the mount is, relative to the root directory.
    place: String,
    /// The group, in steps from the top of the mount.
    steps: Vec<String>,
}

impl Group {
    /// Finds the group of the process among the mounts. Version 2 counts where no mount of version
    /// 1 has cpusets.
    fn of_process(files: &Bounded) -> Result<Option<Group>, Error> {
        let mut mounts = mounts(files)?;
        mounts.sort_by_key(|mount| mount.kind == Kind::Unified);
        let groups = files.text_if_there(CGROUPS)?;
        let cpuset = files.text_if_there(CPUSET)?;
        let found = mounts.into_iter().find_map(|mount| {
            let named = groups.as_deref().and_then(|groups| group_in(groups, mount.kind));
            let path = steps(named.or(cpuset.as_deref())?.trim_end_matches('\n'));
            // A group that is not below the top of the mount is not shown there.
            let below = path.strip_prefix(&*steps(&mount.top))?;
            let is_shown = !below.contains(&"..");
            let below = below.iter().map(|step| (*step).to_owned()).collect();
            is_shown.then_some(Group { kind: mount.kind, place: mount.place, steps: below })
        });
        Ok(found)
    }

    /// The directory of the group, and those above it up to the top of the mount.
    fn directories(&self) -> impl Iterator<Item = String> {
        (0..=self.steps.len()).rev().map(|depth| {
            let steps = self.steps[..depth].iter().map(String::as_str);
            std::iter::once(self.place.as_str()).chain(steps).collect::<Vec<_>>().join("/")
        })
    }

    /// The nodes (`mems`) or CPUs (`cpus`) that the group may use.
    fn list(&self, files: &Bounded, name: &str, end: usize) -> Result<Option<Vec<usize>>, Error> {
        let own = self.directories().next().unwrap_or_default();
        // Something else may be mounted where the group was.
        if files.names_if_there(&own, MAX_ENTRIES)?.is_none() {
            return Ok(None);
        }
        let prefix = self.kind.prefix();
        let (names, depth) = match self.kind {
            // A group without files of its own may use the same as the group above it.
            Kind::Unified => (vec![format!("{prefix}{name}.effective")], usize::MAX),
            _ => (vec![format!("{prefix}effective_{name}"), format!("{prefix}{name}")], 1),
        };
        for directory in self.directories().take(depth) {
            for name in &names {
                let path = format!("{directory}/{name}");
                let Some(text) = files.text_if_there(&path)? else { continue };
                let ids = parse_list(&text, end).map_err(|reason| files.damaged(&path, reason))?;
                return match ids.is_empty() {
                    true => Err(files.damaged(&path, "it is empty".into())),
                    false => Ok(Some(ids)),
                };
            }
        }
        Ok(None)
    }
}

fn steps(path: &str) -> Vec<&str> {
    path.split('/').filter(|step| !step.is_empty()).collect()
}

/// The mounts that show cpusets.
fn mounts(files: &Bounded) -> Result<Vec<Mount>, Error> {
    if let Some(text) = files.text_if_there(MOUNTINFO)? {
        return Ok(text.lines().filter_map(Mount::of_mountinfo).collect());
    }
    for path in MOUNTS {
        if let Some(text) = files.text_if_there(path)? {
            return Ok(text.lines().filter_map(Mount::of_mounts).collect());
        }
    }
    Ok(Vec::new())
}

/// The group in the hierarchy that has the cpusets, from the text of `/proc/self/cgroup`.
fn group_in(groups: &str, kind: Kind) -> Option<&str> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let is_it = match kind {
            Kind::Unified => controllers.is_empty(),
            _ => controllers.split(',').any(|controller| controller == "cpuset"),
        };
        is_it.then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: Kind, top: &str, place: &str) -> Option<Mount> {
        Some(Mount { kind, top: top.into(), place: place.into() })
    }

    #[test]
    fn mounts_of_all_three_kinds_are_found() {
        let of = Mount::of_mountinfo;
        assert_eq!(
            of("30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"),
            mount(Kind::Unified, "/", "sys/fs/cgroup")
        );
        assert_eq!(
            of("36 33 0:31 /docker/a /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset"),
            mount(Kind::Cgroup, "/docker/a", "sys/fs/cgroup/cpuset")
        );
        assert_eq!(of("36 33 0:31 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct"), None);
        assert_eq!(of("1 1 8:1 / / rw - ext4 /dev/cpuset rw,cpuset"), None);
        assert_eq!(of("- cgroup2"), None);
        let of = Mount::of_mounts;
        assert_eq!(
            of("none /dev/cpuset cgroup rw,relatime,cpuset,noprefix 0 0"),
            mount(Kind::Bare, "/", "dev/cpuset")
        );
        assert_eq!(of("none /a\\040b cpuset rw 0 0"), mount(Kind::Bare, "/", "a b"));
        assert_eq!(of("none relative cpuset rw 0 0"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn the_group_is_that_of_the_hierarchy_with_the_cpusets() {
        let groups = "9:cpu,cpuset:/a\n4:memory:/b\n0::/c:d\n";
        assert_eq!(group_in(groups, Kind::Cgroup), Some("/a"));
        assert_eq!(group_in(groups, Kind::Unified), Some("/c:d"));
        assert_eq!(group_in("4:memory:/b\n", Kind::Bare), None);
    }
}
