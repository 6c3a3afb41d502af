//! The topology read from recorded machines, and from trees that are damaged or hostile.

#[path = "topology/strange.rs"]
mod strange;
#[path = "common/tree.rs"]
mod tree;

use pageleap::topology::{Access, Cache, HugePages, Node, SysFiles, Topology, data_caches};
use pageleap::{Error, NodeId};
use tree::{NODE, RECORDED, Tree};

fn read(tree: &Tree) -> Result<Topology, Error> {
    Topology::read_from(&SysFiles::at(tree.root()))
}

fn recorded(name: &str) -> Topology {
    read(&Tree::recorded(name)).unwrap()
}

/// The numbers of nodes.
fn numbers(nodes: impl IntoIterator<Item = NodeId>) -> Vec<u32> {
    nodes.into_iter().map(|node| node.0).collect()
}

/// What `what` returns for each node.
fn each<T>(topology: &Topology, what: impl Fn(&Node) -> T) -> Vec<T> {
    topology.nodes().iter().map(what).collect()
}

/// The error for a tree that must be refused. It names a file of the tree.
fn refusal(tree: &Tree) -> String {
    match read(tree) {
        Err(Error::SystemFile { path, reason, remedy }) => {
            assert!(path.starts_with(tree.root().to_str().unwrap()), "{path}");
            format!("{path}: {reason}; {remedy}")
        }
        other => panic!("{other:?}"),
    }
}

/// The topology of a tree that must be accepted with one warning, and the warning.
fn warned(tree: &Tree) -> (Topology, String) {
    let topology = read(tree).unwrap();
    let [warning] = topology.warnings() else { panic!("{:?}", topology.warnings()) };
    let warning = warning.clone();
    (topology, warning)
}

#[test]
fn recorded_machines_are_read_without_warnings() {
    for (name, _) in RECORDED {
        let topology = recorded(name);
        assert!(topology.warnings().is_empty(), "{name}: {:?}", topology.warnings());
        assert!(topology.nodes().is_sorted_by_key(|node| node.id));
        for node in topology.nodes() {
            assert_eq!(topology.distance(node.id, node.id), Some(10), "{name}");
            assert!(
                node.free_bytes <= node.total_bytes
                    && (node.total_bytes == 0 || node.free_bytes > 0),
                "{name}"
            );
            let sizes: Vec<u64> = node.huge_pages.iter().map(|pages| pages.page_bytes).collect();
            assert_eq!(sizes, [2 << 20, 1 << 30], "{name}");
            assert_eq!(topology.node(node.id).is_ok(), node.total_bytes > 0, "{name}");
            let nearest = topology.nearest_with_cpus(node.id);
            assert!(
                topology.nodes().iter().any(|node| node.id == nearest && !node.cpus.is_empty()),
                "{name}"
            );
        }
        assert_eq!(topology.parse_nodes("all", None).unwrap(), topology.allowed_nodes(), "{name}");
    }
}

#[test]
fn a_machine_with_one_node_is_read() {
    let topology = recorded("one");
    assert_eq!(each(&topology, |node| node.cpus.clone()), [[0, 1]]);
    assert_eq!(
        topology.nodes()[0].huge_pages[0],
        HugePages { page_bytes: 2 << 20, total: 96, free: 96, surplus: 0 }
    );
    assert_eq!(topology.nodes()[0].tier, Some(4));
    assert_eq!(numbers(topology.possible_nodes().iter().copied()), [0]);
}

#[test]
fn a_machine_with_two_nodes_is_read() {
    let topology = recorded("two");
    assert_eq!(each(&topology, |node| node.cpus.clone()), [[0, 1], [2, 3]]);
    assert_eq!(topology.distance(NodeId(0), NodeId(1)), Some(21));
    assert_eq!(each(&topology, |node| node.free_huge(2 << 20)), [0, 20]);
    assert_eq!(each(&topology, |node| node.free_huge(4 << 20)), [0, 0], "no such size");
    assert!(topology.nodes()[0].access.is_empty());
}

#[test]
fn a_cpuset_limits_the_nodes_of_a_machine() {
    let topology = recorded("four");
    assert_eq!(
        each(&topology, |node| node.cpus.clone()),
        [vec![0, 1], vec![2, 3], vec![4, 5], vec![6]]
    );
    assert_eq!(numbers(topology.allowed_nodes()), [1, 2]);
    assert_eq!(topology.allowed_cpus(), [2, 3, 4]);
    let row = |from| [0, 1, 2, 3].map(|to| topology.distance(NodeId(from), NodeId(to)).unwrap());
    assert_eq!([row(0), row(2)], [[10, 16, 22, 16], [22, 16, 10, 16]]);
    let parsed = |text| topology.parse_nodes(text, None).map(numbers);
    assert_eq!(parsed("+0").unwrap(), [1]);
    assert_eq!(parsed("!1").unwrap(), [2]);
    let error = parsed("0").unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("outside the cpuset"), "{error}");
}

#[test]
fn distances_of_eight_nodes_are_read() {
    let topology = recorded("eight");
    assert_eq!(
        each(&topology, |node| node.cpus.clone()),
        [0, 1, 2, 3, 4, 5, 6, 7].map(|cpu| vec![cpu])
    );
    let distance = |from, to| topology.distance(NodeId(from), NodeId(to)).unwrap();
    assert_eq!([distance(0, 3), distance(3, 4), distance(7, 5)], [12, 32, 12]);
}

#[test]
fn node_ids_may_have_gaps() {
    let topology = recorded("sparse");
    assert_eq!(numbers(each(&topology, |node| node.id)), [0, 2, 4]);
    assert_eq!(numbers(topology.possible_nodes().iter().copied()), [0, 1, 2, 3, 4]);
    let distance = |from, to| topology.distance(NodeId(from), NodeId(to));
    assert_eq!([distance(0, 4), distance(2, 4), distance(4, 0)], [Some(30), Some(20), Some(30)]);
    assert_eq!([distance(0, 1), distance(3, 0)], [None, None]);
    let error = topology.node(NodeId(1)).unwrap_err().to_string();
    assert!(error.contains("no node 1") && error.contains("0, 2, 4"), "{error}");
    assert_eq!(numbers(topology.parse_nodes("+1-2", None).unwrap()), [2, 4]);
    assert_eq!(numbers(topology.parse_nodes("0-4", None).unwrap()), [0, 2, 4]);
    assert!(topology.parse_nodes("0-3", None).is_err());
}

#[test]
fn a_slower_tier_may_have_no_cpus() {
    let topology = recorded("tiers");
    assert_eq!(each(&topology, |node| node.tier), [Some(4), Some(4), Some(60)]);
    assert!(topology.nodes()[2].cpus.is_empty());
    assert_eq!([0, 1, 2].map(|node| topology.nearest_with_cpus(NodeId(node)).0), [0, 1, 0]);
    let access = |class, initiator, bandwidth, latency| Access {
        class,
        initiators: vec![NodeId(initiator)],
        read_bandwidth_mb_per_s: Some(bandwidth),
        write_bandwidth_mb_per_s: Some(bandwidth),
        read_latency_ns: Some(latency),
        write_latency_ns: Some(latency),
    };
    let both = |initiator, bandwidth, latency| {
        [0, 1].map(|class| access(class, initiator, bandwidth, latency))
    };
    let expected = [both(0, 20_000, 90), both(1, 20_000, 90), both(0, 5_000, 300)];
    assert_eq!(each(&topology, |node| node.access.clone()), expected);
}

#[test]
fn nodes_with_cpus_may_have_no_memory() {
    let topology = recorded("apart");
    assert_eq!(
        each(&topology, |node| (node.cpus.len(), node.total_bytes > 0)),
        [(2, false), (0, true)]
    );
    assert_eq!(numbers(topology.allowed_nodes()), [1]);
    assert_eq!(topology.nearest_with_cpus(NodeId(1)), NodeId(0));
    assert!(topology.node(NodeId(0)).unwrap_err().is_usage());
    assert!(topology.parse_nodes("0", None).unwrap_err().to_string().contains("no memory"));
}

#[test]
fn a_kernel_without_numa_is_one_node() {
    let tree = Tree::recorded("one");
    let with_numa = read(&tree).unwrap();
    tree.remove(NODE);
    let topology = read(&tree).unwrap();
    assert_eq!(each(&topology, |node| (node.id, node.cpus.clone())), [(NodeId(0), vec![0, 1])]);
    assert_eq!(topology.nodes()[0].huge_pages, with_numa.nodes()[0].huge_pages);
    assert!(topology.node(NodeId(0)).unwrap().free_bytes > 0);
    assert_eq!(numbers(topology.possible_nodes().iter().copied()), [0]);
    assert_eq!(topology.distance(NodeId(0), NodeId(0)), None);
    assert!(topology.warnings().is_empty(), "{:?}", topology.warnings());
}

#[test]
fn older_kernels_lack_files_and_that_is_no_reason_for_a_warning() {
    let tree = Tree::recorded("tiers");
    for path in ["sys/devices/virtual", "proc/self", "sys/devices/system/cpu/online"] {
        tree.remove(path);
    }
    for node in 0..3 {
        for file in ["distance", "access0", "access1", "hugepages"] {
            tree.remove(&format!("{NODE}/node{node}/{file}"));
        }
    }
    tree.remove(&format!("{NODE}/possible"));
    let topology = read(&tree).unwrap();
    assert!(topology.warnings().is_empty(), "{:?}", topology.warnings());
    assert_eq!(
        each(&topology, |node| (node.tier, node.access.len(), node.huge_pages.len())),
        [(None, 0, 0); 3]
    );
    assert_eq!(numbers(topology.allowed_nodes()), [0, 1, 2]);
    assert_eq!(topology.allowed_cpus(), [0, 1]);
    assert_eq!(numbers(topology.possible_nodes().iter().copied()), [0, 1, 2]);
    assert_eq!(topology.distance(NodeId(0), NodeId(2)), None);
    assert_eq!(topology.nearest_with_cpus(NodeId(2)), NodeId(0));
}

#[test]
fn offline_cpus_are_left_out() {
    let tree = Tree::recorded("two");
    tree.put("sys/devices/system/cpu/online", "0-2\n");
    assert_eq!(each(&read(&tree).unwrap(), |node| node.cpus.clone()), [vec![0, 1], vec![2]]);
}

#[test]
fn damaged_details_are_left_out_and_named() {
    let cases: [(&str, &[u8]); 11] = [
        ("node/node1/distance", b"10\n"),
        ("node/node1/distance", b"21 10 10\n"),
        ("node/node1/distance", b"far near\n"),
        ("node/node1/distance", b"\xff\xfe\n"),
        ("node/possible", b"0-99999999\n"),
        ("node/node0/hugepages/hugepages-2048kB/free_hugepages", b"-1\n"),
        ("node/node0/hugepages/hugepages-2048kB/nr_hugepages", b"18446744073709551615\n"),
        ("node/node0/access0/initiators/read_latency", b"fast\n"),
        ("../virtual/memory_tiering/memory_tier4/nodelist", b"1-0\n"),
        ("cpu/online", b"0-\n"),
        ("../../../proc/self/status", b"Name:\tx\nMems_allowed_list:\t0-99999999\n"),
    ];
    for (path, text) in cases {
        let tree = Tree::recorded("two");
        tree.put(&format!("sys/devices/system/{path}"), text);
        let (topology, warning) = warned(&tree);
        assert!(warning.contains(path.rsplit('/').next().unwrap()), "{path}: {warning}");
        assert_eq!(topology.nodes().len(), 2);
        assert_eq!(topology.distance(NodeId(0), NodeId(1)), Some(21), "{path}");
    }
}

#[test]
fn damaged_nodes_are_refused_with_the_file_that_is_at_fault() {
    let long = "1,".repeat(1 << 20);
    let huge = format!("{}\n", "0".repeat(2 << 20));
    let cases: [(&str, &[u8], &str); 14] = [
        ("online", b"", "no node is online"),
        ("online", b"0-99999999\n", "`99999999` is not an id below 1024"),
        ("online", b"0-1023\n", "node2/cpulist"),
        ("online", b"-1\n", "`` is not an id"),
        ("online", b"1,0\n", "`0` is out of order"),
        ("online", b"0-1-2\n", "`1-2` is not an id"),
        ("online", b"zero\n", "`zero` is not an id"),
        ("online", b"\xff\n", "not UTF-8 text"),
        ("online", long.as_bytes(), "more than 1024 KB"),
        ("online", huge.as_bytes(), "more than 1024 KB"),
        ("node0/cpulist", b"0-99999999\n", "`99999999` is not an id below 8192"),
        ("node0/cpulist", b"3-1\n", "`3-1` runs backwards"),
        ("node1/cpulist", b"\x1b[31m\n", "\\u{1b}[31m"),
        ("node1/meminfo", b"\xc3\x28\n", "not UTF-8 text"),
    ];
    for (path, text, reason) in cases {
        let tree = Tree::recorded("two");
        tree.put(&format!("{NODE}/{path}"), text);
        let refusal = refusal(&tree);
        assert!(refusal.contains(reason) && refusal.contains(NODE), "{path}: {refusal}");
        assert!(refusal.len() < 500 && !refusal.contains('\x1b'), "{refusal}");
    }
    let tree = Tree::recorded("two");
    tree.remove(&format!("{NODE}/node1"));
    assert!(refusal(&tree).contains("node1/cpulist"));
}

#[test]
fn nothing_outside_the_tree_is_read_and_nothing_waited_for() {
    let online = format!("{NODE}/online");
    // A list outside the tree, which would be accepted if it were read.
    let outside = Tree::empty();
    outside.put("online", "0-1\n");
    let climb = format!("{}{}", "../".repeat(64), outside.root().join("online").to_str().unwrap());
    let absolute = outside.root().join("online");
    for target in [
        absolute.to_str().unwrap(),
        climb.as_str(),
        "/etc/passwd",
        "../../../../../../../../../../etc/passwd",
    ] {
        let tree = Tree::recorded("two");
        tree.link(&online, target);
        assert!(refusal(&tree).contains("a symbolic link leads out of the directory"), "{target}");
    }
    let tree = Tree::recorded("two");
    tree.link(&online, "online");
    assert!(refusal(&tree).contains("too many symbolic links"));
    tree.fifo(&online);
    assert!(refusal(&tree).contains("a FIFO"));
    tree.remove(&online);
    tree.put(&format!("{online}/x"), "");
    assert!(refusal(&tree).contains("a directory"));
    // For a file that may be missing, the link is a warning. For a node's directory, it is a
    // refusal.
    let tree = Tree::recorded("two");
    tree.link("proc/self/status", "/proc/self/status");
    let (topology, warning) = warned(&tree);
    assert!(warning.contains("proc/self/status: a symbolic link leads out"), "{warning}");
    assert_eq!(numbers(topology.allowed_nodes()), [0, 1]);
    tree.link(&format!("{NODE}/node1"), "/sys/devices/system/node/node0");
    assert!(refusal(&tree).contains("a symbolic link leads out"));
}

#[test]
fn links_inside_the_tree_are_followed() {
    let tree = Tree::recorded("two");
    tree.remove("proc/self/status");
    tree.put("proc/42/status", "Mems_allowed_list:\t1\n");
    tree.remove("proc/self");
    tree.link("proc/self", "42");
    assert_eq!(numbers(read(&tree).unwrap().allowed_nodes()), [1]);
}

#[test]
fn thousands_of_entries_and_warnings_stay_bounded() {
    let tree = Tree::recorded("two");
    for tier in 0..1000 {
        tree.put(&format!("sys/devices/virtual/memory_tiering/memory_tier{tier}/nodelist"), "x");
    }
    for tier in 0..2000 {
        tree.put(&format!("{NODE}/node{}/cpulist", tier + 2), "0");
        tree.put(&format!("{NODE}/node0/access0/initiators/node{tier}"), "");
        tree.put(&format!("{NODE}/node0/hugepages/hugepages-{}kB/x", tier + 1), "");
    }
    let topology = read(&tree).unwrap();
    assert_eq!(topology.nodes().len(), 2);
    let node = &topology.nodes()[0];
    assert!(
        node.access.is_empty() && node.huge_pages.is_empty(),
        "directories that no kernel makes are left out"
    );
    let warnings = topology.warnings();
    assert!(warnings.len() == 17 && warnings[16].contains("more"), "{warnings:?}");
}

#[test]
fn a_missing_root_directory_is_an_error() {
    let files = SysFiles::at("/nonexistent/directory");
    let error = Topology::read_from(&files).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/directory:"), "{error}");
    assert!(
        refusal(&Tree::empty()).contains("sys/devices/system/cpu/online"),
        "neither nodes nor CPUs"
    );
}

#[test]
fn caches_that_cpus_share_count_once() {
    let tree = Tree::empty();
    let small = [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1024K")];
    for (cpu, sharing) in [(0, "0-1"), (1, "0-1"), (2, "2")] {
        let all = small.iter().chain([&("3", "Unified", "4096K")]);
        for (index, (level, kind, size)) in all.enumerate() {
            let shared = if *level == "3" { sharing.to_owned() } else { cpu.to_string() };
            let values =
                [("level", *level), ("type", kind), ("size", size), ("shared_cpu_list", &shared)];
            for (name, value) in values {
                let folder = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
                tree.put(&format!("{folder}/{name}"), format!("{value}\n"));
            }
        }
    }
    let caches = |cpus: &[usize]| data_caches(&SysFiles::at(tree.root()), cpus);
    let levels = |counts: [usize; 3]| {
        let all = [(1, 32 << 10), (2, 1 << 20), (3, 4 << 20)].into_iter().zip(counts);
        all.flat_map(|((level, bytes), count)| vec![Cache { level, bytes }; count]).collect()
    };
    assert_eq!(caches(&[0]), Some(levels([1, 1, 1])));
    assert_eq!(caches(&[0, 1]), Some(levels([2, 2, 1])));
    assert_eq!(caches(&[0, 1, 2]), Some(levels([3, 3, 2])));
    // The kernel says nothing about CPU 3, and damaged files say nothing either.
    assert_eq!(caches(&[0, 3]), None);
    assert_eq!(caches(&[]), Some(Vec::new()));
    for (name, value) in [("size", "4 MB"), ("shared_cpu_list", "x"), ("level", "")] {
        tree.put(&format!("sys/devices/system/cpu/cpu2/cache/index3/{name}"), value);
        assert_eq!(caches(&[2]), None, "{name}");
    }
}
