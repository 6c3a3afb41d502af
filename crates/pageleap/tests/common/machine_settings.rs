//! Settings of the whole machine. Only tests on machines of the lab change them.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The kernel's limit on mappings of a process. It is set back when the value is dropped.
pub struct MappingLimit(String);

impl MappingLimit {
    const FILE: &str = "/proc/sys/vm/max_map_count";

    pub fn lower_to(count: usize) -> MappingLimit {
        let before = fs::read_to_string(Self::FILE).unwrap();
        fs::write(Self::FILE, count.to_string()).unwrap();
        MappingLimit(before)
    }
}

impl Drop for MappingLimit {
    fn drop(&mut self) {
        fs::write(Self::FILE, self.0.trim()).unwrap();
    }
}

/// A limit on the memory that the kernel promises to all processes (`vm.overcommit_memory=2`). All
/// is set back when the value is dropped.
pub struct CommitLimit([(&'static str, String); 3]);

impl CommitLimit {
    /// Leaves this many bytes beside what is promised already.
    pub fn leave(bytes: u64) -> CommitLimit {
        // Writing one of the last two makes the other one zero, and the kernel counts by that which
        // is not.
        let files = ["overcommit_memory", "overcommit_ratio", "overcommit_kbytes"];
        let read = |name| (name, fs::read_to_string(format!("/proc/sys/vm/{name}")).unwrap());
        let limit = CommitLimit(files.map(read));
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let promised = meminfo.lines().find_map(|line| line.strip_prefix("Committed_AS:")).unwrap();
        let kb: u64 = promised.trim().trim_end_matches(" kB").parse().unwrap();
        write("overcommit_kbytes", &(kb + (bytes >> 10)).to_string());
        write("overcommit_memory", "2");
        limit
    }
}

fn write(name: &str, value: &str) {
    fs::write(format!("/proc/sys/vm/{name}"), value.trim()).unwrap();
}

impl Drop for CommitLimit {
    fn drop(&mut self) {
        let [memory, others @ ..] = &self.0;
        write(memory.0, &memory.1);
        for (name, value) in others.iter().filter(|(_, value)| value.trim() != "0") {
            write(name, value);
        }
    }
}

/// A setting of the kernel, as long as the value lives.
pub struct Setting(PathBuf, String);

impl Setting {
    pub fn new(path: impl Into<PathBuf>, value: &str) -> Setting {
        let path = path.into();
        let before = fs::read_to_string(&path).unwrap();
        fs::write(&path, value).unwrap();
        Setting(path, before)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        fs::write(&self.0, self.1.trim()).unwrap();
    }
}

/// The kernel thread that merges equal pages, at work. Its settings are set back when the value is
/// dropped.
pub struct Merging(Vec<(&'static str, String)>);

impl Merging {
    const FOLDER: &str = "/sys/kernel/mm/ksm";
    const SETTINGS: [(&str, &str); 3] =
        [("pages_to_scan", "10000"), ("sleep_millisecs", "1"), ("run", "1")];

    /// Lets it look at all memory that may be merged, again and again.
    pub fn start() -> Result<Merging, String> {
        let mut merging = Merging(Vec::new());
        for (name, value) in Self::SETTINGS {
            let path = format!("{}/{name}", Self::FOLDER);
            let before = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
            fs::write(&path, value).map_err(|error| format!("{path}: {error}"))?;
            merging.0.push((name, before));
        }
        Ok(merging)
    }

    /// Lets it rest. What is merged stays so.
    pub fn pause(&self) {
        fs::write(format!("{}/run", Self::FOLDER), "0").unwrap();
    }

    /// How many pages of this process are merged with others.
    pub fn pages() -> usize {
        fs::read_to_string("/proc/self/ksm_merging_pages").unwrap().trim().parse().unwrap()
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for (name, value) in self.0.iter().rev() {
            fs::write(format!("{}/{name}", Self::FOLDER), value.trim()).unwrap();
        }
    }
}

/// A cgroup (version 2) with a cpuset of its own. It is removed when the value is dropped.
pub struct Cpuset(String);

impl Cpuset {
    /// Makes a cgroup whose cpuset allows the nodes `mems`.
    pub fn new(name: &str, mems: &str) -> Result<Cpuset, String> {
        let set = Cpuset(format!("/sys/fs/cgroup/pageleap-{name}-{}", std::process::id()));
        fs::create_dir(&set.0).map_err(|error| format!("{}: {error}", set.0))?;
        set.write("cpuset.mems", mems)?;
        Ok(set)
    }

    /// Writes to a file of the cgroup.
    pub fn write(&self, file: &str, text: &str) -> Result<(), String> {
        let path = format!("{}/{file}", self.0);
        fs::write(&path, text).map_err(|error| format!("{path}: {error}"))
    }

    pub fn read(&self, file: &str) -> Result<String, String> {
        let path = format!("{}/{file}", self.0);
        fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))
    }

    /// Moves this process into the cgroup.
    pub fn enter(&self) {
        self.write("cgroup.procs", "0").unwrap();
    }

    /// The program will be in the cgroup from its start.
    pub fn take_in(&self, command: &mut Command) {
        let path = format!("{}/cgroup.procs", self.0);
        let file = fs::File::options().write(true).open(path).unwrap();
        // SAFETY: the child makes one system call, which reads one byte.
        unsafe {
            command.pre_exec(move || match libc::write(file.as_raw_fd(), c"0".as_ptr().cast(), 1) {
                1 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = fs::write("/sys/fs/cgroup/cgroup.procs", "0");
        let _ = fs::remove_dir(&self.0);
    }
}
