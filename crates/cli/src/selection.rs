//! The processes that a command works on: by number, name, cgroup or unit.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::Args;
use pageleap::process;

use crate::stop::Stop;

/// Where cgroups are mounted (version 2, or the systemd hierarchy of version 1).
const CGROUPS: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];

/// Options that name processes.
#[derive(Args, Clone, Debug)]
pub struct Selection {
    /// Process: its number, its name as in /proc/PID/comm, or self
    #[arg(required_unless_present_any = ["cgroup", "unit"])]
    pub process: Option<String>,

    /// Take the descendants of the process as well
    #[arg(long, requires = "process")]
    pub tree: bool,

    /// Take all processes of a cgroup and of those below it: a path such as
    /// /sys/fs/cgroup/system.slice, or below that mount
    #[arg(long, value_name = "PATH", conflicts_with_all = ["process", "unit"])]
    pub cgroup: Option<PathBuf>,

    /// Take all processes of a unit of systemd, such as postgresql or user.slice
    #[arg(long, value_name = "NAME", conflicts_with = "process")]
    pub unit: Option<String>,
}

impl Selection {
    /// The numbers of the processes.
    pub fn pids(&self) -> Result<Vec<u32>, Stop> {
        if let Some(path) = &self.cgroup {
            return members(&cgroup(path)?);
        }
        if let Some(unit) = &self.unit {
            return members(&unit_directory(unit)?);
        }
        let found = self.named()?;
        if !self.tree {
            return Ok(found);
        }
        let mut all = Vec::new();
        for root in found {
            all.extend(process::descendants(root)?);
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// The processes of the name or number, without their descendants. None if a cgroup or a unit
    /// was named.
    pub fn named(&self) -> Result<Vec<u32>, Stop> {
        let Some(name) = self.process.as_deref() else { return Ok(Vec::new()) };
        let found = if name == "self" {
            vec![process::own_pid()?]
        } else if let Ok(pid) = name.parse::<u32>() {
            vec![pid]
        } else {
            // The kernel keeps 15 bytes of a name.
            let kept = String::from_utf8_lossy(&name.as_bytes()[..name.len().min(15)]);
            let is_it = |comm: &str| comm == name || comm == kept;
            let all = process::processes()?.into_iter();
            all.filter(|(_, comm)| is_it(comm)).map(|(pid, _)| pid).collect()
        };
        if found.is_empty() {
            return Err(Stop::Refused(anyhow!(
                "no process is called {name:?}; `ps -e` shows names and numbers"
            )));
        }
        Ok(found)
    }
}

/// The directory of a cgroup, given by its path or by its path below the mount.
fn cgroup(path: &Path) -> Result<PathBuf, Stop> {
    let below = path.strip_prefix("/").unwrap_or(path);
    // A path is never relative to the working directory.
    let itself = path.is_absolute().then(|| path.to_owned());
    let mut candidates =
        itself.into_iter().chain(CGROUPS.iter().map(|root| Path::new(root).join(below)));
    candidates.find(|directory| is_cgroup(directory)).ok_or_else(|| {
        Stop::Refused(anyhow!("{path:?} is no cgroup; /proc/PID/cgroup has that of a process"))
    })
}

/// Whether a directory is a cgroup: whether it lies on a mount of cgroups, of version 1 or 2. A
/// file `cgroup.procs` is no proof, because anybody can make one elsewhere.
fn is_cgroup(directory: &Path) -> bool {
    let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else { return false };
    // SAFETY: the structure has integers only, for which zeros are valid. The call writes it, and
    // reads a string that ends with zero.
    let (result, about) = unsafe {
        let mut about: libc::statfs = std::mem::zeroed();
        (libc::statfs(path.as_ptr(), &mut about), about)
    };
    let kinds = [libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC];
    result == 0 && kinds.contains(&about.f_type) && directory.join("cgroup.procs").is_file()
}

/// The directory of the cgroup of a unit. Units of the system come first, because users and
/// containers may have units of the same name.
fn unit_directory(unit: &str) -> Result<PathBuf, Stop> {
    let is_whole = [".service", ".slice", ".scope"].iter().any(|suffix| unit.ends_with(suffix));
    let wanted = if is_whole { unit.to_owned() } else { format!("{unit}.service") };
    let mut found: Vec<PathBuf> = CGROUPS
        .iter()
        .flat_map(|root| tree(Path::new(root)))
        .filter(|path| path.file_name().is_some_and(|name| name == wanted.as_str()))
        .filter(|path| is_cgroup(path))
        .collect();
    let depth = |path: &PathBuf| path.components().count();
    found.sort_by_key(|path| (depth(path), path.clone()));
    match &found[..] {
        [] => Err(Stop::Refused(anyhow!(
            "no unit {wanted:?} runs here; `systemctl list-units` shows those that do"
        ))),
        [first, second, ..] if depth(first) == depth(second) => Err(Stop::Refused(anyhow!(
            "several units are called {wanted:?}; name one with --cgroup: {found:?}"
        ))),
        [first, ..] => Ok(first.clone()),
    }
}

/// A directory and all directories below it. One that goes away meanwhile has none.
fn tree(root: &Path) -> Vec<PathBuf> {
    let (mut all, mut left) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = left.pop() {
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        left.extend(
            entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()),
        );
        all.push(directory);
    }
    all
}

/// The processes of a cgroup and of all cgroups below it.
fn members(directory: &Path) -> Result<Vec<u32>, Stop> {
    let mut pids = Vec::new();
    for directory in tree(directory) {
        match std::fs::read_to_string(directory.join("cgroup.procs")) {
            // The number 0 stands for a process of another pid namespace.
            Ok(text) => {
                pids.extend(text.lines().flat_map(str::parse::<u32>).filter(|pid| *pid > 0))
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                return Err(Stop::Failed(anyhow!("{directory:?}: {error}")));
            }
            // A threaded cgroup has no list of processes (EOPNOTSUPP), and a cgroup may be removed
            // meanwhile.
            Err(_) => {}
        }
    }
    pids.sort_unstable();
    pids.dedup();
    match pids.is_empty() {
        true => Err(Stop::Refused(anyhow!("no process of {directory:?} is visible here"))),
        false => Ok(pids),
    }
}
