//! Settings of the whole machine. Only tests on machines of the lab change them.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs;

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

    /// Moves this process into the cgroup.
    pub fn enter(&self) {
        self.write("cgroup.procs", "0").unwrap();
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = fs::write("/sys/fs/cgroup/cgroup.procs", "0");
        let _ = fs::remove_dir(&self.0);
    }
}
