//! Files of another machine, for `--sysroot`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Files below a folder. Dropping it deletes the folder.
pub struct Tree(pub PathBuf);

impl Tree {
    pub fn new(files: &[(&str, &str)]) -> Tree {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("pageleap-doctor-tree-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let root = std::env::temp_dir().join(name);
        fs::create_dir(&root).unwrap();
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Tree(root)
    }

    pub fn flag(&self) -> String {
        format!("--sysroot={}", self.0.display())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o755));
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The files of a machine with two nodes, of which the cpuset allows one.
pub fn another_machine() -> Tree {
    let node = |id: u32, cpus: &str| {
        let folder = format!("sys/devices/system/node/node{id}");
        let meminfo = format!("Node {id} MemTotal: 67108864 kB\nNode {id} MemFree: 33554432 kB\n");
        [
            (format!("{folder}/cpulist"), format!("{cpus}\n")),
            (format!("{folder}/meminfo"), meminfo),
            (format!("{folder}/hugepages/hugepages-2048kB/nr_hugepages"), "7\n".to_owned()),
            (format!("{folder}/hugepages/hugepages-2048kB/free_hugepages"), "5\n".to_owned()),
            (format!("{folder}/hugepages/hugepages-2048kB/surplus_hugepages"), "0\n".to_owned()),
        ]
    };
    let mut files: Vec<(String, String)> = [node(0, "0-3"), node(4, "")].concat();
    let more = [
        ("sys/devices/system/node/online", "0,4\n"),
        ("proc/sys/kernel/osrelease", "5.14.0-test\n"),
        ("proc/sys/vm/max_map_count", "1000\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("proc/self/status", "Name:\tx\nMems_allowed_list:\t0\nCpus_allowed_list:\t0-3\n"),
        ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/job/memory.current", "536870912\n"),
        ("proc/swaps", "Filename Type Size Used Priority\n/dev/sdz9 partition 1 0 -2\n"),
    ];
    files.extend(more.map(|(path, text)| (path.to_owned(), text.to_owned())));
    let files: Vec<(&str, &str)> =
        files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    Tree::new(&files)
}
