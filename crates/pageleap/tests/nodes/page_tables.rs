//! On which node page tables lie. The kernel tells no node of a page table, but it counts the bytes of
//! page tables on each node.

use std::fs;

use pageleap::topology::Topology;
use pageleap::{Engine, EngineChoice, NodeId, PageSize, PageTables, Placement, Pool, Region};

use crate::MB;
use crate::common::{
    End, can_follow, case, check_stamp, is_root, run_case, skip, stamp, surprises, turn, works,
};
use crate::on_nodes::{check_on, go_by, pools_on, several};

/// A field of a node's `meminfo`, in bytes. For root the value is exact.
fn meminfo(node: NodeId, field: &str) -> usize {
    if is_root() {
        // Adds up the counts that each CPU keeps for itself.
        fs::write("/proc/sys/vm/stat_refresh", "1").unwrap();
    }
    let text =
        fs::read_to_string(format!("/sys/devices/system/node/node{}/meminfo", node.0)).unwrap();
    let line = text.lines().find_map(|line| line.split_once(&format!(" {field}:"))).unwrap().1;
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

/// A field of the nodes' `meminfo`. Each CPU counts for itself first: its counts are added to the
/// whole once a second, or when `stat_refresh` is read.
pub fn each_meminfo(nodes: &[NodeId], field: &str) -> Vec<usize> {
    let _ = fs::read("/proc/sys/vm/stat_refresh");
    nodes.iter().map(|node| meminfo(*node, field)).collect()
}

/// Bytes of wide regions: they need 32 pages of page table.
pub const WIDE: usize = 64 * MB;

/// Bytes of their page tables: 4 KB for each 2 MB.
const TABLES: isize = WIDE as isize / 512;

/// Bytes of other page tables, of stacks and of the heap, that may come or go meanwhile.
const STRAY: usize = 24 << 10;

/// The node for the data of a region, and the node that is asked for its page tables, if any. Nodes
/// are numbered in their order.
pub type Leg = (usize, Option<usize>);

/// Makes a region as the first leg says, and moves it as the others say. Then unmaps the region
/// without the library. The kernel's counters tell on which node its page tables were freed. Page
/// tables of pools, which come and go with leaps, are not in that difference. Ends the process.
fn check_page_tables(nodes: &[NodeId], way: Way, legs: &[Leg]) -> ! {
    let Way { engine, shifted } = way;
    // Room for one page more: the frames of a region begin behind it, or where it would lie.
    let pools = pools_on(nodes, PageSize::Base, WIDE + 4096).unwrap();
    let taken = |pool: &Pool| Region::new(pool, 4096).unwrap();
    let _shifts: Vec<Region> = pools[1..].iter().filter(|_| shifted).map(taken).collect();
    let place = |(data, tables): Leg| match tables {
        None => pools[data].on(nodes[data]),
        Some(tables) => {
            pools[data].on(Placement::on(nodes[data]).page_tables(PageTables::Node(nodes[tables])))
        }
    };
    let region = Region::new(place(legs[0]), WIDE).unwrap();
    stamp(&region, 0..WIDE, 1);
    for leg in &legs[1..] {
        let report = go_by(engine, &region, place(*leg));
        // The kernels of the lab lead to different engines.
        let auto = engine == EngineChoice::Auto;
        assert!(!auto || (report.engine == Engine::Precopy) == can_follow(), "{report}");
        let surprising =
            surprises(&report).into_iter().filter(|warning| !warning.contains("has no CPUs"));
        assert_eq!(surprising.count(), 0, "{report}");
        check_stamp(&region, 0..WIDE, 1);
    }
    let (data, tables) = legs[legs.len() - 1];
    check_on(&region, nodes[data]);
    let at = tables
        .map_or_else(|| Topology::read().unwrap().nearest_with_cpus(nodes[data]), |i| nodes[i]);
    let before = each_meminfo(nodes, "PageTables");
    // SAFETY: nothing accesses the region any more. The process ends below without dropping it.
    assert_eq!(unsafe { libc::munmap(region.as_ptr().as_ptr().cast(), WIDE) }, 0);
    let after = each_meminfo(nodes, "PageTables");
    for (i, node) in nodes.iter().enumerate() {
        let wanted = if *node == at { TABLES } else { 0 };
        let gone = before[i] as isize - after[i] as isize;
        assert!(
            gone.abs_diff(wanted) <= STRAY,
            "{gone} bytes of its page tables were on {node} instead of {wanted}; \
             all: {before:?}, then {after:?}"
        );
    }
    // SAFETY: the call takes a number. It ends the process at once, without dropping the region
    // that is no longer mapped.
    unsafe { libc::_exit(0) }
}

/// How the regions move.
#[derive(Clone, Copy)]
pub struct Way {
    pub engine: EngineChoice,
    /// Whether the addresses of the region and of the pools' frames do not agree modulo 2 MB, so
    /// that page tables cannot move as wholes.
    pub shifted: bool,
}

pub const AUTO: Way = Way { engine: EngineChoice::Auto, shifted: false };

/// Runs [`check_page_tables`] for each list of legs, each in a process of its own. `legs_of` gets
/// the number of the last node.
pub fn page_tables(test: &str, way: Way, legs_of: impl Fn(usize) -> Vec<Vec<Leg>>) {
    let _turn = turn();
    if !works(way.engine) {
        return skip(test, &format!("the engine {} does not work here", way.engine));
    }
    let Some(nodes) = several(test) else { return };
    if !is_root() {
        return skip(test, &"only root can make the kernel's counters exact");
    }
    let all = legs_of(nodes.len() - 1);
    if let Some(number) = case() {
        check_page_tables(&nodes, way, &all[number.parse::<usize>().unwrap()]);
    }
    for (number, legs) in all.iter().enumerate() {
        let (end, text) = run_case(test, &number.to_string());
        assert_eq!(end, End::Exited(0), "legs {legs:?} of nodes {nodes:?}: {text}");
    }
}

/// Page tables to and fro, and from where they were told to lie.
pub fn to_and_fro(last: usize) -> Vec<Vec<Leg>> {
    vec![
        [0, last, 0].map(|node| (node, None)).to_vec(),
        [0, last, 0, last].map(|node| (node, None)).to_vec(),
        vec![(0, Some(last)), (last, None), (0, None)],
    ]
}
