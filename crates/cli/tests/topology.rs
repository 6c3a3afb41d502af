//! Runs `pageleap topology` as a user would, on this machine, on recorded ones and on hostile
//! trees.

#[path = "common/command.rs"]
mod command;
#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "topology/sandbox.rs"]
mod sandbox;
#[path = "../../pageleap/tests/common/tree.rs"]
mod tree;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use command::{failure, json, text};
use serde_json::{Value, json};
use tree::{NODE, RECORDED, Tree};

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;
/// The memory of a small node.
const MEMINFO: &str = "Node 0 MemTotal: 1024 kB\nNode 0 MemFree: 512 kB\n";

fn pageleap(flags: &[&str]) -> Command {
    command::pageleap("topology", flags)
}

fn on(tree: &Tree, flags: &[&str]) -> Command {
    let mut command = pageleap(flags);
    command.arg("--sysroot").arg(tree.root());
    command
}

#[test]
fn this_machine() {
    let machine = json(pageleap(&["--json"]));
    let nodes = machine["nodes"].as_array().unwrap();
    let online = fs::read_to_string(format!("/{NODE}/online")).unwrap_or_else(|_| "0".into());
    assert!(online.trim().starts_with(&nodes[0]["id"].to_string()), "{online}");
    assert!(nodes.iter().any(|node| node["total_bytes"].as_u64() > Some(0)
        && !node["cpus"].as_array().unwrap().is_empty()));
    assert!(!machine["allowed_nodes"].as_array().unwrap().is_empty());
    let shown = text(pageleap(&[]));
    assert!(shown.contains("This process may use") && shown.contains("2m free/all"), "{shown}");
    // The cpuset and the affinity of the process count, not the machine's CPUs.
    let first = machine["allowed_cpus"][0].to_string();
    let mut bound = Command::new("taskset");
    bound.args(["-c", &first, env!("CARGO_BIN_EXE_pageleap"), "topology", "--json"]);
    assert_eq!(json(bound)["allowed_cpus"], json!([machine["allowed_cpus"][0]]));
}

#[test]
fn the_text_of_a_machine_with_tiers() {
    let expected = "\
3 nodes online, 2 CPUs, 716 MiB
The process there may use the memory of nodes 0-2, and CPUs 0-1.

node  CPUs   memory     free  2m free/all  1g free/all  tier  in cpuset
   0  0     251 MiB  238 MiB          0/0          0/0     4        yes
   1  1     215 MiB  193 MiB          0/0          0/0     4        yes
   2  -     251 MiB  228 MiB          8/8          0/0    60        yes

Distances (relative costs, not latencies), from CPUs of the row to memory of the column
node   0     1     2
   0  10 ·  21 ▒  17 ░
   1  21 ▒  10 ·  28 █
   2  17 ░  28 █  10 ·
      · 10   ░ 17   ▒ 21   █ 28

Memory seen from the nodes where it is fastest, as the firmware says (HMAT), not measured;
class 0: from anything that accesses memory, class 1: from CPUs
node  class  from  read latency  write latency  read bandwidth  write bandwidth
   0    0,1  0            90 ns          90 ns      20000 MB/s       20000 MB/s
   1    0,1  1            90 ns          90 ns      20000 MB/s       20000 MB/s
   2    0,1  0           300 ns         300 ns       5000 MB/s        5000 MB/s
";
    assert_eq!(text(on(&Tree::recorded("tiers"), &[])), expected);
}

#[test]
fn json_of_a_machine_with_tiers() {
    let machine = json(on(&Tree::recorded("tiers"), &["--json"]));
    assert_eq!(machine["possible_nodes"], json!([0, 1, 2]));
    assert_eq!(machine["allowed_cpus"], json!([0, 1]));
    assert_eq!(machine["warnings"], json!([]));
    let mut slow = machine["nodes"][2].clone();
    for bytes in ["total_bytes", "free_bytes"] {
        assert!(slow[bytes].take().as_u64() > Some(100 << 20));
    }
    let access = |class: u32| {
        json!({
            "class": class, "initiators": [0], "read_bandwidth_mb_per_s": 5000, "write_bandwidth_mb_per_s": 5000,
            "read_latency_ns": 300, "write_latency_ns": 300,
        })
    };
    let expected = json!({
        "id": 2, "cpus": [], "total_bytes": null, "free_bytes": null, "tier": 60, "in_cpuset": true, "nearest_with_cpus": 0,
        "huge_pages": [
            { "page_bytes": 2 << 20, "total": 8, "free": 8, "surplus": 0 },
            { "page_bytes": 1 << 30, "total": 0, "free": 0, "surplus": 0 },
        ],
        "distances": { "0": 17, "1": 28, "2": 10 },
        "access": [access(0), access(1)],
        "side_caches": [],
    });
    assert_eq!(slow, expected);
}

#[test]
fn every_recorded_machine_is_shown() {
    for (name, _) in RECORDED {
        let tree = Tree::recorded(name);
        let shown = text(on(&tree, &[]));
        let nodes = json(on(&tree, &["--json"]))["nodes"].as_array().unwrap().len();
        assert!(shown.starts_with(&format!("{nodes} node")), "{name}: {shown}");
        assert!(shown.lines().all(|line| line.chars().count() <= 110), "{name}: {shown}");
        assert_eq!(shown.contains("Distances"), nodes > 1, "{name}");
    }
    let four = text(on(&Tree::recorded("four"), &[]));
    assert!(four.contains("may use the memory of nodes 1-2, and CPUs 2-4"), "{four}");
    let sparse = text(on(&Tree::recorded("sparse"), &[]));
    assert!(
        sparse.contains("3 nodes online of 5 possible")
            && sparse.contains("   4  30 █  20 ▒  10 ·"),
        "{sparse}"
    );
}

#[test]
fn nodes_are_chosen_as_numactl_does() {
    let tree = Tree::recorded("sparse");
    for (nodes, ids) in [
        ("0,2-4", json!([0, 2, 4])),
        ("!2", json!([0, 4])),
        ("all", json!([0, 2, 4])),
        ("+0-1", json!([0, 2])),
    ] {
        let shown = json(on(&tree, &["--json", "--nodes", nodes]));
        let found: Vec<&Value> =
            shown["nodes"].as_array().unwrap().iter().map(|node| &node["id"]).collect();
        assert_eq!(json!(found), ids, "{nodes}");
    }
    // What is only shown need neither have memory nor be in the cpuset.
    for (name, nodes, ids) in [
        ("apart", "0", json!([0])),
        ("apart", "all", json!([0, 1])),
        ("four", "0,3", json!([0, 3])),
        ("four", "!1", json!([0, 2, 3])),
        ("four", "+0", json!([0])),
    ] {
        let shown = json(on(&Tree::recorded(name), &["--json", "--nodes", nodes]));
        let found: Vec<&Value> =
            shown["nodes"].as_array().unwrap().iter().map(|node| &node["id"]).collect();
        assert_eq!(json!(found), ids, "{name}: {nodes}");
    }
    for (nodes, named) in [
        ("1", "node 1 does not exist or is offline"),
        ("0-3", "node 3 in `0-3` does not exist or is offline"),
        ("-1", "a number is missing in `-1`"),
        ("", "a number is missing"),
        ("0-99999999", "`99999999`"),
        ("same", "no set of nodes was given before"),
        ("!all", "the set is empty"),
    ] {
        let error = failure(on(&tree, &["--nodes", nodes]), 2);
        assert!(error.contains(named) && error.contains("0,2,4"), "{nodes}: {error}");
    }
}

#[test]
fn many_nodes_are_drawn_small_or_not_at_all() {
    for (nodes, drawn) in [(40, "  39  "), (100, "too many to draw")] {
        let tree = Tree::recorded("one");
        for list in ["online", "possible"] {
            tree.put(&format!("{NODE}/{list}"), format!("0-{}", nodes - 1));
        }
        for node in 0..nodes {
            let distances: Vec<String> =
                (0..nodes).map(|to| (10 + i32::abs(node - to)).to_string()).collect();
            tree.put(&format!("{NODE}/node{node}/distance"), distances.join(" "));
            tree.put(&format!("{NODE}/node{node}/cpulist"), "");
            tree.put(&format!("{NODE}/node{node}/meminfo"), MEMINFO);
        }
        let cpus: Vec<String> = (0..4096).step_by(2).map(|cpu| cpu.to_string()).collect();
        tree.put("sys/devices/system/cpu/online", cpus.join(","));
        tree.put(&format!("{NODE}/node7/cpulist"), cpus.join(","));
        let shown = text(on(&tree, &[]));
        assert!(shown.contains(drawn), "{shown}");
        assert!(shown.contains("   7  0,2,4,6,8,10,12,14,16,... (2048)"), "{shown}");
        assert!(shown.lines().all(|line| line.chars().count() <= 110), "{shown}");
        // A few of them are drawn with their numbers.
        let few = text(on(&tree, &["--nodes", "0-1"]));
        assert!(few.contains("\nnode   0     1\n   0  10 ·  11 █\n"), "{few}");
    }
}

#[test]
fn columns_of_a_small_picture_have_numbers_too() {
    let tree = Tree::recorded("one");
    let nodes: Vec<usize> = (8..12).chain(98..102).chain(250..260).collect();
    let online: Vec<String> = nodes.iter().map(|node| node.to_string()).collect();
    tree.put(&format!("{NODE}/online"), online.join(","));
    for node in &nodes {
        let distances: Vec<&str> =
            nodes.iter().map(|to| if to == node { "10" } else { "20" }).collect();
        tree.put(&format!("{NODE}/node{node}/distance"), distances.join(" "));
        tree.put(&format!("{NODE}/node{node}/cpulist"), "0-1\n");
        tree.put(&format!("{NODE}/node{node}/meminfo"), MEMINFO);
    }
    let shown = text(on(&tree, &[]));
    let picture = "
            112222222222
        1199005555555555
      890189010123456789
   8  ·█████████████████
   9  █·████████████████
";
    assert!(shown.contains(picture), "{shown}");
}

#[test]
fn a_cpuset_that_is_not_known_is_not_shown_as_a_fact() {
    let tree = Tree::recorded("two");
    tree.remove("proc/self");
    let machine = json(on(&tree, &["--json"]));
    assert_eq!(machine["nodes"][0]["in_cpuset"], Value::Null);
    assert_eq!([&machine["allowed_nodes"], &machine["allowed_cpus"]], [&Value::Null; 2]);
    let shown = text(on(&tree, &[]));
    let line = |number: usize| shown.lines().nth(number).unwrap().to_owned();
    assert_eq!(line(1), "Which nodes and CPUs the process there may use is not known.");
    assert!(line(4).ends_with("  ?") && line(5).ends_with("  ?"), "{shown}");
    for (status, sentence) in [
        (
            "Mems_allowed_list:\t1\n",
            "The process there may use the memory of node 1; which CPUs is not known.",
        ),
        (
            "Cpus_allowed_list:\t0-1\nMems_allowed_list:\tx\n",
            "The process there may use CPUs 0-1; the memory of which nodes is not known.",
        ),
    ] {
        tree.put("proc/self/status", status);
        assert!(text(on(&tree, &[])).contains(sentence), "{sentence}");
    }
}

#[test]
fn caches_in_front_of_memory_are_shown() {
    let tree = Tree::recorded("two");
    let directory = format!("{NODE}/node1/memory_side_cache");
    for (file, text) in [
        ("index1/size", "103079215104\n"),
        ("index1/line_size", "64\n"),
        ("index1/indexing", "0\n"),
        ("index1/write_policy", "0\n"),
        ("index2/size", "1048577\n"),
    ] {
        tree.put(&format!("{directory}/{file}"), text);
    }
    let expected = "
Caches in front of memory, as the firmware says (HMAT); level 1 is nearest to the memory
node  level    size      line  places of an address  writes
   1      1  96 GiB  64 bytes                   one    back
   1      2   1 MiB         ?                     ?       ?
";
    let shown = text(on(&tree, &[]));
    assert!(shown.ends_with(expected), "{shown}");
    let caches = json(on(&tree, &["--json"]))["nodes"][1]["side_caches"].clone();
    let cache = |level: u32, bytes: u64, rest: [Value; 3]| {
        let [line_bytes, direct_mapped, write_back] = rest;
        json!({
            "level": level, "bytes": bytes, "line_bytes": line_bytes,
            "direct_mapped": direct_mapped, "write_back": write_back,
        })
    };
    assert_eq!(
        caches,
        json!([
            cache(1, 103_079_215_104, [json!(64), json!(true), json!(true)]),
            cache(2, 1_048_577, [Value::Null, Value::Null, Value::Null]),
        ])
    );
}

#[test]
fn cpus_of_emulated_nodes_are_counted_once() {
    let tree = Tree::recorded("two");
    tree.put(&format!("{NODE}/node1/cpulist"), "0-1\n");
    tree.put(
        &format!("{NODE}/node0/meminfo"),
        "Node 0 MemTotal: 8388608 kB\nNode 0 MemFree: 8 kB\n",
    );
    tree.put(
        &format!("{NODE}/node1/meminfo"),
        "Node 1 MemTotal: 8388612 kB\nNode 1 MemFree: 8 kB\n",
    );
    let shown = text(on(&tree, &[]));
    assert!(shown.starts_with("2 nodes online, 2 CPUs, 16 GiB\n"), "{shown}");
    // Sizes of one column look alike.
    assert!(
        shown.contains("\n   0  0-1    8 GiB  8 KiB ") && shown.contains("\n   1  0-1    8 GiB "),
        "{shown}"
    );
}

#[test]
fn what_cannot_be_read_ends_with_an_error_or_is_left_out_by_name() {
    let missing = failure(pageleap(&["--sysroot", "/nonexistent"]), 2);
    assert!(missing.contains("--sysroot") && missing.contains("no such folder"), "{missing}");
    failure(pageleap(&["--sysroot", "/etc/passwd"]), 2);
    let empty = failure(on(&Tree::empty(), &[]), 1);
    assert!(empty.contains("name another directory") && !empty.contains("container"), "{empty}");

    let hostile = |damage: &dyn Fn(&Tree, &str)| {
        let tree = Tree::recorded("two");
        damage(&tree, &format!("{NODE}/node1/cpulist"));
        let error = failure(on(&tree, &[]), 1);
        assert!(
            error.contains("node1/cpulist") && error.len() < 500 && !error.contains('\x1b'),
            "{error}"
        );
        error
    };
    assert!(hostile(&|tree, file| tree.link(file, "/etc/passwd")).contains("out of the directory"));
    assert!(
        hostile(&|tree, file| tree.link(file, "../../../../../../../../etc/passwd"))
            .contains("out of the directory")
    );
    assert!(hostile(&|tree, file| tree.link(file, "cpulist")).contains("too many symbolic links"));
    assert!(hostile(&|tree, file| tree.fifo(file)).contains("FIFO"));
    assert!(hostile(&|tree, file| tree.put(file, "0-99999999")).contains("99999999"));
    assert!(hostile(&|tree, file| tree.put(file, "-5")).contains("not an id"));
    assert!(
        hostile(&|tree, file| tree.put(file, "\x1b]0;owned\x07".repeat(1000))).contains("\\u{1b}")
    );

    let tree = Tree::recorded("two");
    tree.put(&format!("{NODE}/node1/distance"), "\x1b[2J");
    let shown = text(on(&tree, &[]));
    assert!(
        shown.contains("left out: ") && shown.contains("node1/distance") && !shown.contains('\x1b'),
        "{shown}"
    );
    assert!(shown.contains("   1   ?     ?"), "{shown}");
    assert_eq!(
        json(on(&tree, &["--json"]))["nodes"][1]["distances"],
        json!({ "0": null, "1": null })
    );
}

/// A copy of the command in a place where every user may run it.
struct ForAll(PathBuf);

impl ForAll {
    fn copy() -> ForAll {
        let path = std::env::temp_dir().join(format!("pageleap-for-all-{}", std::process::id()));
        // Another process copies. Otherwise a child of another test could inherit a descriptor that
        // writes to the copy, and the copy could not be run.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_pageleap")).arg(&path).status();
        assert!(copied.unwrap().success());
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        ForAll(path)
    }

    fn as_nobody(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(&self.0);
        command.arg("topology").args(flags).uid(NOBODY).gid(NOBODY);
        command
    }
}

impl Drop for ForAll {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Removes the write permission from a whole tree.
fn make_read_only(path: &Path) {
    if path.is_symlink() {
        return;
    }
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| make_read_only(&entry.unwrap().path()));
    }
    fs::set_permissions(path, Permissions::from_mode(if path.is_dir() { 0o555 } else { 0o444 }))
        .unwrap();
}

#[test]
fn nobody_sees_what_root_sees() {
    // SAFETY: geteuid takes no pointer and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return common::skip("nobody_sees_what_root_sees", &"only root can become another user");
    }
    let command = ForAll::copy();
    let fixed = |mut machine: Value| {
        for node in machine["nodes"].as_array_mut().unwrap() {
            node["free_bytes"].take();
            node["huge_pages"].take();
        }
        machine
    };
    assert_eq!(fixed(json(command.as_nobody(&["--json"]))), fixed(json(pageleap(&["--json"]))));

    let tree = Tree::recorded("tiers");
    make_read_only(&tree.root());
    let root = tree.root();
    let flags = ["--sysroot", root.to_str().unwrap()];
    assert_eq!(text(command.as_nobody(&flags)), text(on(&tree, &[])));

    let online = tree.root().join(NODE).join("online");
    fs::set_permissions(&online, Permissions::from_mode(0o400)).unwrap();
    let error = failure(command.as_nobody(&flags), 1);
    assert!(
        error.contains("node/online")
            && error.contains("Permission denied")
            && error.contains("allow"),
        "{error}"
    );
    fs::set_permissions(tree.root(), Permissions::from_mode(0o700)).unwrap();
    let error = failure(command.as_nobody(&flags), 2);
    assert!(error.contains("--sysroot") && error.contains("Permission denied"), "{error}");
}

#[test]
fn a_root_directory_that_may_be_entered_but_not_listed_changes_nothing() {
    const NAME: &str = "a_root_directory_that_may_be_entered_but_not_listed_changes_nothing";
    if !common::is_root() {
        return common::skip(NAME, &"only root can become another user");
    }
    let command = ForAll::copy();
    let tree = Tree::recorded("tiers");
    fs::set_permissions(tree.root(), Permissions::from_mode(0o711)).unwrap();
    let root = tree.root();
    let flags = ["--sysroot", root.to_str().unwrap()];
    assert_eq!(text(command.as_nobody(&flags)), text(on(&tree, &[])));
    // The doctor reads the same files.
    let mut doctor = Command::new(&command.0);
    doctor.args(["doctor", "--json"]).args(flags).uid(NOBODY).gid(NOBODY);
    let output = doctor.output().expect("pageleap starts");
    let found: Value = serde_json::from_slice(&output.stdout).expect("the doctor answers");
    let nodes = found["findings"].as_array().unwrap().iter().find(|one| one["id"] == "nodes");
    assert!(nodes.unwrap()["summary"].as_str().unwrap().contains("3 nodes"), "{found}");
}

#[test]
fn a_landlock_sandbox_that_does_not_list_the_root_directory_changes_nothing() {
    const NAME: &str = "a_landlock_sandbox_that_does_not_list_the_root_directory_changes_nothing";
    if !sandbox::has_landlock() {
        return common::skip(NAME, &"this kernel has no Landlock");
    }
    let sandboxed = |mut command: Command| {
        // SAFETY: the closure makes system calls only.
        unsafe { command.pre_exec(|| sandbox::list_only([c"/proc", c"/sys"])) };
        command
    };
    let shown = |machine: Value| {
        let nodes = machine["nodes"].as_array().unwrap().iter();
        nodes.map(|node| (node["id"].clone(), node["cpus"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(shown(json(sandboxed(pageleap(&["--json"])))), shown(json(pageleap(&["--json"]))));
    // The sandbox refuses to list what it was not given.
    let mut list = Command::new("ls");
    list.arg("/");
    assert!(!sandboxed(list).output().expect("ls starts").status.success());
}

#[test]
fn a_filter_that_refuses_openat2_changes_nothing() {
    let tree = Tree::recorded("tiers");
    let escaping = Tree::recorded("two");
    escaping.link(&format!("{NODE}/online"), "/etc/passwd");
    for errno in [libc::ENOSYS, libc::EPERM] {
        let filtered = |mut command: Command| {
            // SAFETY: the closure makes system calls only.
            unsafe { command.pre_exec(move || sandbox::refuse_openat2(errno)) };
            command
        };
        assert_eq!(text(filtered(on(&tree, &[]))), text(on(&tree, &[])));
        assert!(failure(filtered(on(&escaping, &[])), 1).contains("out of the directory"));
        assert!(text(filtered(pageleap(&[]))).contains("node"));
    }
}
