//! Tests of [`Host`].

use super::super::trees::Tree;
use super::*;
use crate::document::Document;
use crate::export::Format;

const NODES: &str = "sys/devices/system/node";

/// A machine with two nodes of two CPUs, each core with two threads, and a third node without CPUs.
fn two_sockets() -> Tree {
    let tree = Tree::new(&[
        ("proc/cpuinfo", "model name : Xeon 8480\nmicrocode : 0x2b\nflags : fpu lm\n"),
        ("proc/self/status", "Cpus_allowed_list:\t0-2\nMems_allowed_list:\t0-2\n"),
        ("proc/sys/kernel/osrelease", "6.12.3\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("proc/loadavg", "1.25 0.50 0.10 3/900 4711\n"),
        ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", "1073741824\n"),
        ("sys/class/dmi/id/sys_vendor", "Supermicro\n"),
        ("sys/class/dmi/id/product_name", "X13\n"),
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/smt/active", "1\n"),
        ("sys/devices/system/cpu/intel_pstate/no_turbo", "0\n"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("sys/kernel/mm/transparent_hugepage/defrag", "[always] defer never\n"),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never] deny\n"),
        ("sys/devices/system/node/online", "0,2,5\n"),
    ]);
    for (cpu, siblings, governor) in [
        (0, "0-1", "powersave"),
        (1, "0-1", "performance"),
        (2, "2-3", "powersave"),
        (3, "2-3", ""),
    ] {
        tree.write(&format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list"), siblings);
        tree.write(&format!("{CPUS}/cpu{cpu}/cpufreq/scaling_governor"), governor);
    }
    for (node, cpus, mib, distances) in
        [(0, "0-1", 1024, "10 21 30"), (2, "2-3", 2048, "21 10 30"), (5, "", 4096, "30 30 10")]
    {
        tree.write(&format!("{NODES}/node{node}/cpulist"), cpus);
        tree.write(&format!("{NODES}/node{node}/distance"), distances);
        let kb = mib << 10;
        let meminfo = format!("Node {node} MemTotal: {kb} kB\nNode {node} MemFree: 1024 kB\n");
        tree.write(&format!("{NODES}/node{node}/meminfo"), &meminfo);
    }
    tree
}

#[test]
fn a_machine_is_read_with_all_its_settings() {
    let node = |id, cpus: &[usize], mib: u64, distances: [u32; 3]| HostNode {
        id,
        cpus: cpus.to_vec(),
        total_bytes: mib << 20,
        free_bytes: 1 << 20,
        distances: Some(distances.to_vec()),
    };
    let text = |text: &str| Some(text.to_owned());
    let expected = Host {
        cpu_model: text("Xeon 8480"),
        microcode: text("0x2b"),
        cpus_online: Some(vec![0, 1, 2, 3]),
        cpus_allowed: Some(vec![0, 1, 2]),
        cores: Some(2),
        smt: Some(true),
        kernel: text("6.12.3"),
        is_virtual: Some(false),
        product: text("Supermicro X13"),
        nodes: Some(vec![
            node(0, &[0, 1], 1024, [10, 21, 30]),
            node(2, &[2, 3], 2048, [21, 10, 30]),
            node(5, &[], 4096, [30, 30, 10]),
        ]),
        thp_enabled: text("madvise"),
        thp_defrag: text("always"),
        thp_shmem_enabled: text("never"),
        numa_balancing: Some(1),
        governors: Some(vec!["performance".to_owned(), "powersave".to_owned()]),
        boost: Some(true),
        load_average: Some(1.25),
        memory_limit_bytes: Some(1 << 30),
        clocksource: text("tsc"),
    };
    assert_eq!(Host::read(&two_sockets().files()), expected);
}

#[test]
fn a_missing_file_gives_no_value() {
    assert_eq!(Host::read(&Tree::new(&[]).files()), Host::default());
    // Without a status the CPUs that may be used are not known, although those online are.
    let tree = two_sockets();
    std::fs::remove_file(tree.files().root().join("proc/self/status")).unwrap();
    let host = Host::read(&tree.files());
    assert_eq!((host.cpus_online.map(|cpus| cpus.len()), host.cpus_allowed), (Some(4), None));
}

#[test]
fn odd_contents_give_no_value() {
    let tree = two_sockets();
    for (path, text) in [
        ("proc/cpuinfo", "\n\n:\n"),
        ("proc/loadavg", "NaN\n"),
        ("proc/sys/kernel/numa_balancing", "on\n"),
        ("sys/devices/system/cpu/intel_pstate/no_turbo", "2\n"),
        ("sys/devices/system/cpu/smt/active", "\n"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "madvise\n"),
        ("sys/fs/cgroup/job/memory.max", "max\n"),
        ("sys/devices/system/node/node2/distance", "10\n"),
    ] {
        tree.write(path, text);
    }
    let host = Host::read(&tree.files());
    let nodes = host.nodes.as_deref().unwrap();
    let known: Vec<bool> = nodes.iter().map(|node| node.distances.is_some()).collect();
    assert_eq!(known, [true, false, true]);
    let unknown = Host {
        cpu_model: None,
        microcode: None,
        cores: None,
        smt: None,
        is_virtual: None,
        thp_enabled: None,
        numa_balancing: None,
        boost: None,
        load_average: None,
        memory_limit_bytes: None,
        ..host.clone()
    };
    assert_eq!(host, unknown);
    for load in ["-1 0 0", "inf 0 0", "", "x"] {
        tree.write("proc/loadavg", load);
        assert_eq!(load_average(&tree.files()), None, "{load}");
    }
    // The whole tree is useless without nodes that make sense, but the rest is still read.
    tree.write("sys/devices/system/node/online", "x\n");
    let host = Host::read(&tree.files());
    assert_eq!((host.nodes, host.cpus_online, host.governors), (None, None, None));
    assert_eq!(host.kernel.as_deref(), Some("6.12.3"));
}

#[test]
fn boost_is_found_with_either_driver() {
    for (file, text, is_on) in [
        ("intel_pstate/no_turbo", "1", Some(false)),
        ("intel_pstate/no_turbo", "0", Some(true)),
        ("cpufreq/boost", "1", Some(true)),
        ("cpufreq/boost", "0", Some(false)),
        ("cpufreq/other", "0", None),
    ] {
        let path = format!("{CPUS}/{file}");
        assert_eq!(boost(&Tree::new(&[(&path, text)]).files()), is_on, "{file} {text}");
    }
}

#[test]
fn a_cpuinfo_of_many_cpus_is_read() {
    let cpuinfo = "model name : Many\n".to_owned() + &"flags : fpu lm\n".repeat(100_000);
    let host = Host::read(&Tree::new(&[("proc/cpuinfo", &cpuinfo)]).files());
    assert_eq!(host.cpu_model.as_deref(), Some("Many"));
}

#[test]
fn the_section_has_values_for_programs_and_words_for_people() {
    let section = Host::read(&two_sockets().files()).section();
    assert_eq!((section.key, section.title.as_str()), ("host", "Host"));
    let document = Document { sections: vec![section] };
    let json: serde_json::Value = serde_json::from_str(&Format::Json.write(&document)).unwrap();
    let host = &json["host"];
    assert_eq!(host["cpus_online"], "0-3");
    assert_eq!(
        host["nodes"][1],
        serde_json::json!(
            {"id": 2, "cpus": "2-3", "total_bytes": 2_147_483_648u64, "free_bytes": 1_048_576}
        )
    );
    assert_eq!(host["distances"]["2"], serde_json::json!([21, 10, 30]));
    assert_eq!(host["virtual"], false);
    assert_eq!(host["governors"], serde_json::json!(["performance", "powersave"]));
    let text = Format::WIDE.write(&document);
    for line in [
        "CPUs allowed            0-2",
        "nodes                   0: CPUs 0-1, 1 GiB, 1 MiB free / 2: CPUs 2-3, 2 GiB, 1 MiB free /",
        "5: no CPUs, 4 GiB, 1 MiB",
        "distances               0: 10 / 21 / 30, 2: 21 / 10 / 30, 5: 30 / 30 / 10",
    ] {
        assert!(text.contains(line), "{text}");
    }
    // Nothing that is unknown looks like a value.
    let document = Document { sections: vec![Host::default().section()] };
    let json: serde_json::Value = serde_json::from_str(&Format::Json.write(&document)).unwrap();
    assert!(json["host"].as_object().unwrap().values().all(|v| v.is_null()), "{json}");
}

#[test]
#[cfg(not(miri))]
fn this_machine_has_a_kernel_cpus_and_nodes() {
    let host = Host::read(&SysFiles::host());
    assert!(host.kernel.is_some());
    assert!(host.load_average.is_some());
    let online = host.cpus_online.unwrap();
    let allowed = host.cpus_allowed.unwrap();
    assert!(!allowed.is_empty() && allowed.iter().all(|cpu| online.contains(cpu)));
    assert!(host.nodes.unwrap().iter().any(|node| node.total_bytes > node.free_bytes));
}
