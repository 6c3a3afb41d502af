//! The home of a program, on recorded machines and with recorded loads.

#[path = "../../pageleap/tests/common/tree.rs"]
mod tree;

use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology};
use pageleap_launch::{NodeLoad, Snapshot, choose_home, growth};
use tree::{NODE, Tree};

const GB: u64 = 1 << 30;

fn machine(name: &str) -> Topology {
    Topology::read_from(&SysFiles::at(Tree::recorded(name).root())).unwrap()
}

/// Loads of nodes: traffic in MB/s, idle cores, and free gigabytes.
fn loads(of: &[(u32, Option<u64>, f64, u64)]) -> Vec<NodeLoad> {
    let load = |&(node, mb_per_s, idle_cores, free): &(u32, Option<u64>, f64, u64)| NodeLoad {
        node: NodeId(node),
        bytes_per_s: mb_per_s.map(|mb| mb * 1_000_000),
        idle_cores,
        free_bytes: free * GB,
    };
    of.iter().map(load).collect()
}

fn numbers(nodes: &[NodeId]) -> Vec<u32> {
    nodes.iter().map(|node| node.0).collect()
}

#[test]
fn bandwidth_comes_before_idle_cores() {
    let two = machine("two");
    let home = |loads: &[NodeLoad]| choose_home(&two, loads, GB).unwrap();
    // Node 1 moves fewer bytes, though it has fewer idle cores.
    let busy = home(&loads(&[(0, Some(9_000), 20.0, 8), (1, Some(1_000), 3.0, 8)]));
    assert_eq!(numbers(&busy.nodes), [1, 0]);
    assert_eq!(
        busy.reason,
        "the home is node 1: its CPUs move 1000 MB/s, and 3.0 of its cores are idle"
    );
    // Nearly the same traffic: the idle cores decide.
    let even = home(&loads(&[(0, Some(9_000), 3.0, 8), (1, Some(9_500), 20.0, 8)]));
    assert_eq!(numbers(&even.nodes), [1, 0]);
    // Traffic of one node only cannot be compared.
    let half = home(&loads(&[(0, Some(9_000), 20.0, 8), (1, None, 3.0, 8)]));
    assert_eq!(numbers(&half.nodes), [0, 1]);
    assert!(half.reason.contains("resctrl is not mounted"), "{}", half.reason);
    // A fraction of a core is no difference.
    let idle = home(&loads(&[(0, None, 15.7, 8), (1, None, 16.0, 8)]));
    assert_eq!(numbers(&idle.nodes), [0, 1]);
}

#[test]
fn nodes_without_room_are_passed_over() {
    let two = machine("two");
    let full = loads(&[(0, None, 20.0, 2), (1, None, 1.0, 8)]);
    let home = choose_home(&two, &full, 4 * GB).unwrap();
    assert_eq!(numbers(&home.nodes), [1, 0], "it grows over the other one all the same");
    assert_eq!(
        home.passed_over,
        ["node 0 is passed over: 2048 MiB of its memory are free, and 4096 are needed"]
    );
    assert_eq!(numbers(&choose_home(&two, &full, GB).unwrap().nodes), [0, 1]);
    let error = choose_home(&two, &full, 16 * GB).unwrap_err().to_string();
    assert!(error.contains("node 0 is passed over") && error.contains("node 1 is"), "{error}");
    // Without a size, a node that is all but full is no home.
    let nearly = loads(&[(0, None, 20.0, 0), (1, None, 1.0, 8)]);
    assert_eq!(numbers(&choose_home(&two, &nearly, 0).unwrap().nodes), [1, 0]);
}

#[test]
fn a_program_grows_by_distance() {
    let eight = machine("eight");
    let ids: Vec<u32> = eight.nodes().iter().map(|node| node.id.0).collect();
    let even: Vec<_> = ids.iter().map(|id| (*id, None, 8.0, 8)).collect();
    for home in &ids {
        let order = growth(&eight, &loads(&even), NodeId(*home));
        assert_eq!((order[0], order.len()), (NodeId(*home), ids.len()));
        let far = |node: &NodeId| eight.distance(NodeId(*home), *node).unwrap();
        assert!(order.is_sorted_by_key(far), "{home}: {order:?}");
    }
    // Among nodes at the same distance the idler one comes first.
    let four = machine("four");
    let order = growth(
        &four,
        &loads(&[(0, None, 8.0, 8), (1, None, 1.0, 8), (2, None, 4.0, 8), (3, None, 9.0, 8)]),
        NodeId(0),
    );
    let far = |node: &NodeId| four.distance(NodeId(0), *node).unwrap();
    let idle = |node: &NodeId| [8.0, 1.0, 4.0, 9.0][node.0 as usize];
    let is_ordered =
        |a: &NodeId, b: &NodeId| far(a) < far(b) || far(a) == far(b) && idle(a) >= idle(b);
    assert!(order[1..].is_sorted_by(is_ordered), "{order:?}");
}

#[test]
fn a_node_without_memory_is_no_home() {
    let sparse = machine("sparse");
    let with_cpus = sparse.nodes().iter().filter(|node| !node.cpus.is_empty());
    let all: Vec<_> = with_cpus.map(|node| (node.id.0, None, 1.0, 1 << 20)).collect();
    let home = choose_home(&sparse, &loads(&all), 0).unwrap();
    assert!(sparse.node(home.nodes[0]).is_ok(), "{home:?}");
    let barren: Vec<_> =
        all.into_iter().filter(|one| sparse.node(NodeId(one.0)).is_err()).collect();
    let error = choose_home(&sparse, &loads(&barren), 0).unwrap_err().to_string();
    assert!(error.contains("no node can be the home"), "{error}");
}

#[test]
fn loads_are_differences_of_counters() {
    let tree = Tree::empty();
    let put = |path: &str, text: &str| tree.put(path, text);
    for (id, cpus) in [(0, "0-3\n"), (1, "4-5\n")] {
        put(&format!("{NODE}/node{id}/cpulist"), cpus);
        let memory = format!("Node {id} MemTotal: 2048 kB\nNode {id} MemFree: 1024 kB\n");
        put(&format!("{NODE}/node{id}/meminfo"), &memory);
        put(&format!("{NODE}/node{id}/distance"), "10 20\n");
    }
    for name in ["online", "possible", "has_cpu", "has_memory"] {
        put(&format!("{NODE}/{name}"), "0-1\n");
    }
    for cpu in 0..6 {
        // On node 0, the CPUs 0 and 2 are siblings, and so are 1 and 3.
        let siblings = ["0,2\n", "1,3\n", "0,2\n", "1,3\n", "4\n", "5\n"][cpu];
        let folder = format!("sys/devices/system/cpu/cpu{cpu}");
        put(&format!("{folder}/topology/thread_siblings_list"), siblings);
        put(&format!("{folder}/cache/index3/id"), if cpu < 4 { "0\n" } else { "7\n" });
    }
    let stat = |idle: [u64; 6]| {
        let line = |(cpu, idle): (usize, u64)| {
            format!("cpu{cpu} {} 0 0 {idle} 0 0 0 0 0 0\n", 1000 - idle)
        };
        let lines: String = idle.into_iter().enumerate().map(line).collect();
        format!("cpu  1 2 3 4 5 6 7 8 9 10\n{lines}intr 5\n")
    };
    let files = SysFiles::at(tree.root());
    let topology = Topology::read_from(&files).unwrap();
    put(
        "proc/stat",
        "cpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0\ncpu2 0 0 0 0\ncpu3 0 0 0 0\ncpu4 0 0 0 0\n",
    );
    put("sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "1000\n");
    put("sys/fs/resctrl/mon_data/mon_L3_07/mbm_total_bytes", "Unavailable\n");
    put("sys/fs/resctrl/mon_groups/one/mon_data/mon_L3_00/mbm_total_bytes", "500\n");
    let before = Snapshot::read(&files);
    put("proc/stat", &stat([1000, 500, 250, 500, 750, 1000]));
    put("sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "900001000\n");
    let loads = Snapshot::read(&files).loads_since(&before, &topology, &files);
    // Core 0 is as idle as CPU 2, its busier thread. CPU 5 had no counters before: it counts as busy.
    assert_eq!(loads.iter().map(|load| load.idle_cores).collect::<Vec<_>>(), [0.75, 0.75]);
    assert!(loads[0].bytes_per_s.is_some_and(|bytes| bytes > 0), "{loads:?}");
    assert_eq!(loads[1].bytes_per_s, None);
    assert_eq!(loads[0].free_bytes, 1024 << 10);
}
