//! What tests of several memory nodes need. Where pages lie is read from the kernel's counts in
//! `numa_maps`, not by `move_pages`, because that is what the library itself asks.

#![allow(dead_code)] // each test binary uses a part of it

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::common::{self, address, skip};
use pageleap::topology::Topology;
use pageleap::{
    Destination, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, Report,
};

pub fn with_memory() -> Vec<NodeId> {
    let topology = Topology::read().unwrap();
    let with_memory = topology.nodes().iter().filter(|node| node.total_bytes > 0);
    with_memory.map(|node| node.id).collect()
}

/// The nodes with memory. With only one such node the test is skipped.
pub fn several(test: &str) -> Option<Vec<NodeId>> {
    let nodes = with_memory();
    if nodes.len() < 2 {
        skip(test, &"this machine has one memory node (see `cargo xtask lab`)");
        return None;
    }
    Some(nodes)
}

/// The program will take its memory from this node alone.
pub fn allocate_on(command: &mut Command, node: NodeId) {
    let mask = 1u64 << node.0;
    // SAFETY: the call is safe after fork; it reads one word, and changes the child only.
    unsafe {
        command.pre_exec(move || {
            match libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, &raw const mask, 65) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
}

/// Bytes of a region on each node, as `numa_maps` counts them.
pub fn numa_maps(region: &Region) -> BTreeMap<NodeId, usize> {
    let start = address(region);
    bytes_on_nodes(&(start..start + region.len()))
}

/// Bytes on each node in the mappings that begin in a range, as `numa_maps` counts them.
pub fn bytes_on_nodes(range: &Range<usize>) -> BTreeMap<NodeId, usize> {
    let text = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let mut bytes = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let address = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        if !range.contains(&address) {
            continue;
        }
        let mut counts = Vec::new();
        let mut page = 0;
        for word in words {
            let Some((key, value)) = word.split_once('=') else { continue };
            if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
                counts.push((NodeId(node), value.parse::<usize>().unwrap()));
            } else if key == "kernelpagesize_kB" {
                page = value.parse::<usize>().unwrap() << 10;
            }
        }
        assert!(page > 0 || counts.is_empty(), "{line}");
        counts.iter().for_each(|(node, pages)| *bytes.entry(*node).or_default() += pages * page);
    }
    bytes
}

/// Checks that a region's memory policy names this node only. The kernel then brings swapped pages
/// back to this node, and does not move the others. Pages of hugetlb are never swapped.
pub fn check_bound(region: &Region, node: NodeId) {
    if region.page_size().is_hugetlb() {
        return;
    }
    let start = format!("{:08x} ", address(region));
    let text = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let line = text.lines().find(|line| line.starts_with(&start)).unwrap();
    let policy = line.split_whitespace().nth(1).unwrap();
    assert!(policy.starts_with("bind") && policy.ends_with(&format!(":{}", node.0)), "{line}");
}

/// The lab's description of this machine. On any other machine the test is skipped: it may change
/// settings of the whole machine.
pub fn lab_machine(test: &str) -> Option<String> {
    let machine = std::env::var("PAGELEAP_LAB").ok();
    if machine.is_none() {
        skip(
            test,
            &"only for machines of the lab, because it may change settings of the whole machine \
              (see `cargo xtask lab`)",
        );
    }
    machine
}

/// Checks that all of a region lies on one node.
pub fn check_on(region: &Region, node: NodeId) {
    assert_eq!(numa_maps(region), BTreeMap::from([(node, region.len())]), "by numa_maps");
    let verified = region.verify().unwrap();
    assert!(verified.is_right(), "{verified}");
}

/// One pool of `bytes` on each of the nodes.
pub fn pools_on(nodes: &[NodeId], page: PageSize, bytes: usize) -> Result<Vec<Pool>, Error> {
    nodes.iter().map(|node| Pool::builder(*node, bytes as u64).page_size(page).build()).collect()
}

/// Moves a whole region, and checks that the job has completed.
pub fn go(region: &Region, to: impl Into<Destination>) -> Report {
    go_part(region, 0..region.len(), to)
}

/// Moves a part of a region, and checks that the job has completed.
pub fn go_part(region: &Region, range: Range<usize>, to: impl Into<Destination>) -> Report {
    complete(Migration::new().range(region, range, to))
}

/// Moves a region by an engine, and checks that the job has completed.
pub fn go_by(engine: EngineChoice, region: &Region, to: impl Into<Destination>) -> Report {
    complete(Migration::new().engine(engine).range(region, 0..region.len(), to))
}

fn complete(migration: Migration<'_>) -> Report {
    let report = migration.start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    report
}

/// Runs `body` with a pool of `bytes` on each of the nodes, for each page size of which the machine
/// has enough.
pub fn for_page_sizes(
    test: &str,
    nodes: &[NodeId],
    bytes: usize,
    body: impl Fn(PageSize, Vec<Pool>),
) {
    for page in common::PAGE_SIZES {
        match pools_on(nodes, page, bytes) {
            Ok(pools) => body(page, pools),
            Err(error) => common::skip_page_size(test, page, error),
        }
    }
}
