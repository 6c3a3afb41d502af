//! Trees as kernels write them that nobody here has: old ones, emulated nodes, memory behind
//! caches, cpusets of all kinds, and files that lie.

use super::*;

/// The whole topology, to compare two of them.
fn whole(tree: &Tree) -> String {
    format!("{:#?}", read(tree).unwrap())
}

fn cpus(topology: &Topology) -> Vec<Vec<usize>> {
    each(topology, |node| node.cpus.clone())
}

/// The paths of all files below a directory.
fn files_below(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.symlink_metadata().unwrap() {
            about if about.is_dir() => found.extend(files_below(&path)),
            about if about.is_file() => found.push(path),
            _ => {}
        }
    }
    found
}

#[test]
fn zeros_at_the_end_of_files_change_nothing() {
    for name in ["two", "four", "tiers"] {
        let tree = Tree::recorded(name);
        let before = whole(&tree);
        for path in files_below(&tree.root()) {
            let text = std::fs::read(&path).unwrap();
            std::fs::write(&path, [&text, &b"\0"[..]].concat()).unwrap();
        }
        assert_eq!(whole(&tree), before, "{name}");
        // A zero elsewhere is no end.
        tree.put(&format!("{NODE}/online"), "0\0\n");
        assert!(refusal(&tree).contains("`0\\u{0}` is not an id"));
    }
}

#[test]
fn nodes_without_a_list_of_them_are_those_with_a_directory() {
    for (name, _) in RECORDED {
        let tree = Tree::recorded(name);
        let before = whole(&tree);
        tree.remove(&format!("{NODE}/online"));
        assert_eq!(whole(&tree), before, "{name}");
    }
    let tree = Tree::recorded("sparse");
    tree.remove(&format!("{NODE}/online"));
    tree.put(&format!("{NODE}/node1024/cpulist"), "9\n");
    assert!(refusal(&tree).contains("`node1024` is not `node` with a number below 1024"));
}

#[test]
fn a_kernel_with_maps_instead_of_lists_is_read() {
    let tree = Tree::recorded("four");
    let before = whole(&tree);
    for (node, map) in [(0, "00000003\n"), (1, "0000000c\n"), (2, "30\n"), (3, "0,000000c0\n")] {
        tree.remove(&format!("{NODE}/node{node}/cpulist"));
        tree.put(&format!("{NODE}/node{node}/cpumap"), map);
    }
    tree.put("proc/self/status", "Cpus_allowed:\t0000001c\nMems_allowed:\t00000000,00000006\n");
    // CPU 7 is offline, and the first CPU has no file that says so.
    tree.remove("sys/devices/system/cpu/online");
    for cpu in 0..8 {
        let file = if cpu == 0 { "uevent" } else { "online" };
        let text = if cpu == 7 { "0\n" } else { "1\n" };
        tree.put(&format!("sys/devices/system/cpu/cpu{cpu}/{file}"), text);
    }
    tree.put("sys/devices/system/cpu/cpufreq/policy0", "");
    assert_eq!(whole(&tree), before);
    // A CPU whose file is damaged counts as online, and the others are as they were.
    tree.put("sys/devices/system/cpu/cpu1/online", "\n");
    let (topology, warning) = warned(&tree);
    assert!(warning.contains("cpu1/online"), "{warning}");
    assert_eq!(cpus(&topology), [vec![0, 1], vec![2, 3], vec![4, 5], vec![6]]);
    tree.put("sys/devices/system/cpu/cpu1/online", "1\n");
    tree.put(&format!("{NODE}/node3/cpumap"), "c0,0\n");
    assert!(refusal(&tree).contains("node3/cpumap: `c0,0` is not a map"));
    tree.remove(&format!("{NODE}/node3/cpumap"));
    assert!(refusal(&tree).contains("node3/cpulist"));
    // The CPUs are all that a kernel without nodes shows.
    tree.remove(NODE);
    tree.put("proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n");
    assert_eq!(cpus(&read(&tree).unwrap()), [[0, 1, 2, 3, 4, 5, 6]]);
}

#[test]
fn nodes_that_are_hidden_are_not_taken_for_one_node_without_a_word() {
    let tree = Tree::recorded("two");
    tree.remove(NODE);
    let (topology, warning) = warned(&tree);
    assert_eq!(numbers(each(&topology, |node| node.id)), [0]);
    assert!(warning.contains(NODE) && warning.contains("the nodes 0-1"), "{warning}");
}

#[test]
fn damaged_memory_is_not_taken_for_a_node_without_memory() {
    for (text, reason) in [
        ("", "it has no MemTotal"),
        ("\n", "it has no MemTotal"),
        ("Node 1 MemTotal: 8 kB\n", "it has no MemFree"),
        ("Node 1 MemTotal: many kB\nNode 1 MemFree: 4 kB\n", "`many kB` of MemTotal"),
        ("Node 1 MemTotal: 8 kB\nNode 1 MemFree: -4 kB\n", "`-4 kB` of MemFree"),
        (
            "Node 1 MemTotal: 8 kB\nNode 1 MemFree: 4 kB\nNode 1 Active(file): x kB\n",
            "`x kB` of Active(file)",
        ),
    ] {
        let tree = Tree::recorded("two");
        tree.put(&format!("{NODE}/node1/meminfo"), text);
        let error = refusal(&tree);
        assert!(error.contains("node1/meminfo") && error.contains(reason), "{text}: {error}");
        let tree = Tree::recorded("one");
        tree.remove(NODE);
        tree.put("proc/meminfo", text.replace("Node 1 ", ""));
        let error = refusal(&tree);
        assert!(error.contains("proc/meminfo") && error.contains(reason), "{text}: {error}");
    }
    let tree = Tree::recorded("two");
    tree.put(&format!("{NODE}/node1/meminfo"), "Node 1 MemTotal: 0 kB\nNode 1 MemFree: 0 kB\n");
    assert_eq!(read(&tree).unwrap().nodes()[1].total_bytes, 0, "such nodes exist");
}

#[test]
fn lists_that_cannot_be_empty_are_damaged_if_they_are() {
    for (path, text, named) in [
        ("sys/devices/system/cpu/online", "\n", "no CPU is online"),
        ("sys/devices/system/cpu/online", "", "no CPU is online"),
        ("sys/devices/system/cpu/online", "8-9\n", "no node has a CPU that is online"),
        ("sys/devices/system/node/possible", "\n", "it lacks node 0, which is online"),
        ("sys/devices/system/node/possible", "0\n", "it lacks node 1, which is online"),
        ("proc/self/status", "Mems_allowed_list:\t\nCpus_allowed_list:\t0-3\n", "it is empty"),
        ("proc/self/status", "Mems_allowed_list:\t0-1\nCpus_allowed_list:\t\n", "it is empty"),
    ] {
        let tree = Tree::recorded("two");
        tree.put(path, text);
        let (topology, warning) = warned(&tree);
        assert!(warning.contains(named), "{path}: {warning}");
        assert_eq!(numbers(topology.possible_nodes().iter().copied()), [0, 1]);
        if !named.starts_with("no node") {
            assert_eq!(cpus(&topology), [[0, 1], [2, 3]], "{path}");
        }
    }
    // Without nodes it is the only place that names the CPUs.
    let tree = Tree::recorded("one");
    tree.remove(NODE);
    tree.put("sys/devices/system/cpu/online", "\n");
    assert!(refusal(&tree).contains("no CPU is online"));
}

#[test]
fn what_the_process_may_use_is_unknown_if_nothing_says_so() {
    let known = |tree: &Tree| {
        let topology = read(tree).unwrap();
        [topology.knows_allowed_nodes(), topology.knows_allowed_cpus()]
    };
    let tree = Tree::recorded("four");
    assert_eq!(known(&tree), [true, true]);
    tree.put("proc/self/status", "Name:\tx\nMems_allowed_list:\tall\nCpus_allowed_list:\t0-3\n");
    assert_eq!(known(&tree), [false, true]);
    // A kernel without cpusets.
    tree.put("proc/self/status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n");
    assert_eq!(known(&tree), [true, true]);
    for text in ["", "Name:\tx\n"] {
        tree.put("proc/self/status", text);
        assert_eq!(known(&tree), [false, false]);
    }
    tree.remove("proc/self");
    assert_eq!(known(&tree), [false, false]);
    let topology = read(&tree).unwrap();
    assert_eq!(numbers(topology.allowed_nodes()), [0, 1, 2, 3]);
    assert!(topology.is_allowed(NodeId(0)) && topology.warnings().is_empty());
}

#[test]
fn cpusets_of_all_kinds_are_read_where_the_status_is_missing() {
    const UNIFIED: &str = "30 24 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n";
    const V1: &str = "36 33 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
    const OF_DOCKER: &str = "36 33 0:31 /docker/a /cpusets ro - cgroup cgroup rw,cpuset\n";
    const BARE: &str = "cpuset /dev/cpuset cgroup rw,relatime,cpuset,noprefix 0 0\n";
    let group = "9:cpu:/x\n4:cpuset:/a/b\n0::/c/d\n";
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [u32], &'a [usize]);
    let cases: [Case; 6] = [
        // The group has no files of its own: what holds is in the group above.
        (
            "version 2",
            &[
                ("proc/self/mountinfo", UNIFIED),
                ("proc/self/cgroup", group),
                ("sys/fs/cgroup/cpuset.mems.effective", "0-3\n"),
                ("sys/fs/cgroup/c/d/cgroup.procs", "7\n"),
                ("sys/fs/cgroup/c/cpuset.mems", "\n"),
                ("sys/fs/cgroup/c/cpuset.mems.effective", "1-2\n"),
                ("sys/fs/cgroup/c/cpuset.cpus.effective", "2-4\n"),
            ],
            &[1, 2],
            &[2, 3, 4],
        ),
        (
            "version 1",
            &[
                ("proc/self/mountinfo", &format!("{UNIFIED}{V1}")),
                ("proc/self/cgroup", group),
                ("sys/fs/cgroup/cpuset/cpuset.mems", "0-3\n"),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.mems", "2\n"),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.cpus", "4-5\n"),
                ("sys/fs/cgroup/cpuset.mems.effective", "0\n"),
            ],
            &[2],
            &[4, 5],
        ),
        (
            "version 1, with what a hotplug left of it",
            &[
                ("proc/self/mountinfo", V1),
                ("proc/self/cgroup", group),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.mems", "2-3\n"),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.effective_mems", "3\n"),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.cpus", "4-6\n"),
                ("sys/fs/cgroup/cpuset/a/b/cpuset.effective_cpus", "6\n"),
            ],
            &[3],
            &[6],
        ),
        (
            "a mount that shows a part of the groups",
            &[
                ("proc/self/mountinfo", OF_DOCKER),
                ("proc/self/cgroup", "4:cpuset:/docker/a/job\n"),
                ("cpusets/job/cpuset.mems", "0\n"),
                ("cpusets/job/cpuset.cpus", "0-1\n"),
            ],
            &[0],
            &[0, 1],
        ),
        (
            "names without a prefix",
            &[
                ("proc/mounts", BARE),
                ("proc/self/cpuset", "/batch/7\n"),
                ("dev/cpuset/batch/7/mems", "1,3\n"),
                ("dev/cpuset/batch/7/cpus", "2,6\n"),
            ],
            &[1, 3],
            &[2, 6],
        ),
        (
            "a process in the top group",
            &[
                ("proc/self/mounts", "none /dev/cpuset cpuset rw 0 0\n"),
                ("proc/self/cpuset", "/\n"),
                ("dev/cpuset/mems", "0-3\n"),
                ("dev/cpuset/cpus", "0-6\n"),
            ],
            &[0, 1, 2, 3],
            &[0, 1, 2, 3, 4, 5, 6],
        ),
    ];
    for (what, files, nodes, cpus) in cases {
        let tree = Tree::recorded("four");
        tree.remove("proc/self/status");
        files.iter().for_each(|(path, text)| tree.put(path, text));
        let topology = read(&tree).unwrap();
        assert!(topology.knows_allowed_nodes() && topology.knows_allowed_cpus(), "{what}");
        assert_eq!(numbers(topology.allowed_nodes()), nodes, "{what}");
        assert_eq!(topology.allowed_cpus(), cpus, "{what}");
        assert!(topology.warnings().is_empty(), "{what}: {:?}", topology.warnings());
        // The status has what the kernel itself goes by.
        tree.put("proc/self/status", "Cpus_allowed_list:\t3\nMems_allowed_list:\t1\n");
        assert_eq!(numbers(read(&tree).unwrap().allowed_nodes()), [1], "{what}");
    }
}

#[test]
fn cpusets_that_are_not_shown_or_damaged_stay_unknown() {
    let mount = "36 33 0:31 /docker/a /cpusets ro - cgroup cgroup rw,cpuset\n";
    for (groups, text, warnings) in [
        ("4:cpuset:/docker/b\n", "0\n", 0),
        ("4:cpuset:/docker/ab\n", "0\n", 0),
        ("4:cpuset:/docker/a/elsewhere\n", "0\n", 0),
        ("4:cpuset:/docker/a/../b\n", "0\n", 0),
        ("4:memory:/docker/a\n", "0\n", 0),
        ("4:cpuset:/docker/a\n", "3-0\n", 1),
        ("4:cpuset:/docker/a\n", "\n", 1),
    ] {
        let tree = Tree::recorded("four");
        tree.remove("proc/self/status");
        tree.put("proc/self/mountinfo", mount);
        tree.put("proc/self/cgroup", groups);
        tree.put("cpusets/cpuset.mems", text);
        tree.put("cpusets/b/cpuset.mems", text);
        let topology = read(&tree).unwrap();
        assert!(!topology.knows_allowed_nodes(), "{groups}{text}");
        assert_eq!(topology.warnings().len(), warnings, "{:?}", topology.warnings());
    }
}

/// `numa=fake=4` on a machine with two nodes: the halves of a node have its CPUs.
#[test]
fn emulated_nodes_share_their_cpus() {
    let tree = Tree::recorded("four");
    tree.put("proc/self/status", "Cpus_allowed_list:\t0-6\nMems_allowed_list:\t0-3\n");
    for (node, list) in [(0, "0-3\n"), (1, "0-3\n"), (2, "4-7\n"), (3, "4-7\n")] {
        tree.put(&format!("{NODE}/node{node}/cpulist"), list);
    }
    let topology = read(&tree).unwrap();
    assert_eq!(cpus(&topology), [vec![0, 1, 2, 3], vec![0, 1, 2, 3], vec![4, 5, 6], vec![4, 5, 6]]);
    assert_eq!([0, 1, 2, 3].map(|node| topology.nearest_with_cpus(NodeId(node)).0), [0, 1, 2, 3]);
    assert_eq!(topology.online_cpus(), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(topology.allowed_cpus(), [0, 1, 2, 3, 4, 5, 6]);
    assert!(topology.warnings().is_empty(), "{:?}", topology.warnings());
}

/// Firmware that knows no distances writes 20 everywhere.
#[test]
fn the_initiator_that_the_firmware_names_is_nearest_where_all_distances_are_equal() {
    let tree = Tree::recorded("tiers");
    for (node, row) in [(0, "10 20 20\n"), (1, "20 10 20\n"), (2, "20 20 10\n")] {
        tree.put(&format!("{NODE}/node{node}/distance"), row);
    }
    for class in 0..2 {
        tree.remove(&format!("{NODE}/node2/access{class}/initiators/node0"));
        tree.link(&format!("{NODE}/node2/access{class}/initiators/node1"), "../../../node1");
    }
    assert_eq!(read(&tree).unwrap().nearest_with_cpus(NodeId(2)), NodeId(1));
    for class in 0..2 {
        tree.remove(&format!("{NODE}/node2/access{class}"));
    }
    assert_eq!(read(&tree).unwrap().nearest_with_cpus(NodeId(2)), NodeId(0));
}

#[test]
fn caches_in_front_of_memory_are_read() {
    let tree = Tree::recorded("two");
    let put = |index: &str, file: &str, text: &str| {
        tree.put(&format!("{NODE}/node1/memory_side_cache/{index}/{file}"), text);
    };
    for (file, text) in [
        ("size", "103079215104\n"),
        ("line_size", "64\n"),
        ("indexing", "0\n"),
        ("write_policy", "0\n"),
    ] {
        put("index1", file, text);
    }
    for (file, text) in
        [("size", "1048576\n"), ("line_size", "0\n"), ("indexing", "1\n"), ("write_policy", "1\n")]
    {
        put("index2", file, text);
    }
    put("index3", "size", "8\n");
    put("index3", "write_policy", "2\n");
    let topology = read(&tree).unwrap();
    assert!(topology.nodes()[0].side_caches.is_empty());
    let found: Vec<_> = topology.nodes()[1]
        .side_caches
        .iter()
        .map(|c| (c.level, c.bytes, c.line_bytes, c.is_direct_mapped, c.writes_back))
        .collect();
    let expected = [
        (1, 103_079_215_104, Some(64), Some(true), Some(true)),
        (2, 1 << 20, None, Some(false), Some(false)),
        (3, 8, None, None, None),
    ];
    assert_eq!(found, expected);
    assert!(topology.warnings().is_empty(), "{:?}", topology.warnings());
    put("index2", "size", "large\n");
    let (topology, warning) = warned(&tree);
    assert!(warning.contains("index2/size"), "{warning}");
    assert_eq!(topology.nodes()[1].side_caches.len(), 2);
}

#[test]
fn one_damaged_size_of_huge_pages_leaves_the_others() {
    let cases: [(&str, &str, &str); 5] = [
        ("hugepages-1048576kB/free_hugepages", "none\n", "`none` is not a number"),
        ("hugepages-1048576kB/nr_hugepages", "99999999999999999\n", "are impossible"),
        ("hugepages-64kB/nr_hugepages", "4\n", "hugepages-64kB/free_hugepages"),
        ("hugepages-3kB/nr_hugepages", "4\n", "`hugepages-3kB` is not a size"),
        ("hugepages-kB/nr_hugepages", "4\n", "`hugepages-kB` is not a size"),
    ];
    for (path, text, named) in cases {
        let tree = Tree::recorded("two");
        tree.put(&format!("{NODE}/node1/hugepages/{path}"), text);
        let (topology, warning) = warned(&tree);
        assert!(warning.contains(named), "{path}: {warning}");
        let node = &topology.nodes()[1];
        assert_eq!(node.free_huge(2 << 20), 20, "{path}");
        assert_eq!(node.huge_pages.len(), if path.contains("1048576") { 1 } else { 2 }, "{path}");
    }
}

#[test]
fn every_tier_counts_and_what_is_left_out_is_named() {
    let tiers = "sys/devices/virtual/memory_tiering";
    let tree = Tree::recorded("two");
    tree.remove(tiers);
    for tier in 1..200 {
        let nodes = if tier == 199 { "0-1\n" } else { "5\n" };
        tree.put(&format!("{tiers}/memory_tier{tier}/nodelist"), nodes);
    }
    let topology = read(&tree).unwrap();
    assert_eq!(each(&topology, |node| node.tier), [Some(199), Some(199)]);
    assert!(topology.warnings().is_empty(), "{:?}", topology.warnings());
    for name in ["memory_tier99999999999", "memory_tier1x"] {
        let tree = Tree::recorded("two");
        tree.put(&format!("{tiers}/{name}/nodelist"), "0\n");
        assert!(warned(&tree).1.contains(name));
    }
    let tree = Tree::recorded("tiers");
    tree.put(&format!("{NODE}/node0/access0/initiators/node4096"), "");
    assert!(warned(&tree).1.contains("node4096"));
}

/// Each file alone is within its limits.
#[test]
fn all_files_together_are_bounded() {
    // Long links: each leads through thousands of steps to the file itself.
    let tree = Tree::recorded("two");
    let steps = "./".repeat(2000);
    let count = format!("{NODE}/node0/hugepages/hugepages-2048kB/nr_hugepages");
    tree.put(&format!("{NODE}/node0/hugepages/hugepages-2048kB/number"), "7\n");
    tree.link(&count, format!("{steps}number"));
    let topology = read(&tree).unwrap();
    assert_eq!(topology.nodes()[0].huge_pages[0].total, 7, "one such link is followed");
    for kb in 0..40 {
        let directory = format!("{NODE}/node0/hugepages/hugepages-{}kB", 1u64 << (kb + 12));
        tree.put(&format!("{directory}/number"), "7\n");
        for name in ["nr_hugepages", "free_hugepages", "surplus_hugepages"] {
            tree.link(&format!("{directory}/{name}"), format!("{steps}number"));
        }
    }
    let warnings = read(&tree).unwrap().warnings().to_vec();
    let is_too_much = |warning: &String| warning.contains("more than any machine has");
    assert!(warnings.iter().any(is_too_much), "{warnings:#?}");
    // Large files: a count has a few digits, and lists are at most 1 MB.
    let tree = Tree::recorded("two");
    tree.put(&count, "0".repeat(1 << 20));
    assert!(warned(&tree).1.contains("more than 4 KB"));
    let zeros = format!("0{}\n", ",".repeat((1 << 20) - 2));
    let online: Vec<String> = (0..200).map(|node| node.to_string()).collect();
    tree.put(&format!("{NODE}/online"), online.join(","));
    tree.put(&format!("{NODE}/list"), zeros);
    for node in 0..200 {
        tree.put(
            &format!("{NODE}/node{node}/meminfo"),
            "Node 0 MemTotal: 4 kB\nNode 0 MemFree: 4 kB\n",
        );
        tree.link(&format!("{NODE}/node{node}/cpulist"), "../list");
    }
    assert!(refusal(&tree).contains("more than any machine has"));
}

#[test]
fn remedies_for_another_directory_do_not_speak_of_this_machine() {
    let machine = || Tree::recorded("two");
    let file = format!("{NODE}/node1/cpulist");
    let missing = machine();
    missing.remove(&file);
    assert!(refusal(&missing).contains("add the file to the directory, or name another directory"));
    let outside = machine();
    outside.link(&file, "/etc/passwd");
    assert!(refusal(&outside).contains("remove it, or name another directory"));
    let damaged = machine();
    damaged.put(&file, "x");
    assert!(refusal(&damaged).contains("record the file again"));
    for tree in [missing, outside, damaged, Tree::empty()] {
        let remedy = refusal(&tree);
        assert!(!remedy.contains("this container") && !remedy.contains("this process"), "{remedy}");
    }
    let elsewhere = read_error("/nonexistent/directory");
    assert!(elsewhere.ends_with("name a directory that exists"), "{elsewhere}");
    // For this machine they do.
    let host = SysFiles::host().text("proc/self/nonexistent").unwrap_err().to_string();
    assert!(host.ends_with("mount procfs and sysfs in this container"), "{host}");
}

fn read_error(root: &str) -> String {
    Topology::read_from(&SysFiles::at(root)).unwrap_err().to_string()
}
