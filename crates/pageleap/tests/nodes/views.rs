//! On which node the page tables of views lie, by the kernel's counters.

use super::*;
use crate::common::works;
use crate::on_nodes::go_by;

/// Bytes of page tables of a region or view of [`WIDE`] bytes.
const TABLES: isize = WIDE as isize / 512;

/// Bytes of other page tables that may come or go meanwhile.
const STRAY: usize = 24 << 10;

/// How a region with views comes to its last state.
const CASES: &[(&str, bool, bool)] =
    &[("made", false, false), ("leapt", true, false), ("grown and backed", false, true)];

/// A region with a view for each node with CPUs. Unmaps the views without the library, one after
/// the other: the kernel's counters tell on which node their page tables were freed. Ends the
/// process.
fn check_views(nodes: &[NodeId], leaps: bool, changes: bool) -> ! {
    let topology = Topology::read().unwrap();
    let with_cpus: Vec<NodeId> =
        nodes.iter().copied().filter(|n| !topology.node(*n).unwrap().cpus.is_empty()).collect();
    let pools = pools_on(nodes, PageSize::Base, WIDE + 4096).unwrap();
    let mut region = Region::reserve(WIDE, PageSize::Base).unwrap();
    region.grow(if changes { WIDE / 2 } else { WIDE }, &pools[0]).unwrap();
    region.replicate(with_cpus.iter().copied()).unwrap();
    if changes {
        region.grow(WIDE, &pools[0]).unwrap();
        region.discard(16 * MB..48 * MB).unwrap();
        region.back(16 * MB..48 * MB, &pools[nodes.len() - 1]).unwrap();
    }
    stamp(&region, 0..WIDE, 1);
    if leaps {
        for to in pools.iter().rev().chain(&pools[..1]) {
            let report = go_by(Engine::StopCopy.into(), &region, to);
            let surprising = common::surprises(&report);
            let others = surprising.into_iter().filter(|w| !w.contains("has no CPUs"));
            assert_eq!(others.count(), 0, "{report}");
            check_stamp(&region, 0..WIDE, 1);
        }
    }
    for view in region.views() {
        let counted = view.page_tables();
        let asked = counted.asked_on(pageleap::PageTableLevel::Pte, view.node());
        assert_eq!(asked, (WIDE / (2 * MB)) as u64, "{counted}");
        let before = each_meminfo(nodes, "PageTables");
        // SAFETY: nothing accesses the view. The process ends below without dropping the region.
        assert_eq!(unsafe { libc::munmap(view.as_ptr().as_ptr().cast(), WIDE) }, 0);
        let after = each_meminfo(nodes, "PageTables");
        for (i, node) in nodes.iter().enumerate() {
            let wanted = if *node == view.node() { TABLES } else { 0 };
            let gone = before[i] as isize - after[i] as isize;
            assert!(
                gone.abs_diff(wanted) <= STRAY,
                "{gone} bytes of the page tables of {view:?} were on {node} instead of {wanted}"
            );
        }
    }
    // SAFETY: the call takes a number, and ends the process at once.
    unsafe { libc::_exit(0) }
}

#[test]
fn page_tables_of_views_lie_on_their_nodes() {
    const NAME: &str = "views::page_tables_of_views_lie_on_their_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if !is_root() {
        return skip(NAME, &"only root can make the kernel's counters exact");
    }
    if let Some(name) = case() {
        let (_, leaps, changes) = CASES.iter().find(|(other, ..)| *other == name).unwrap();
        check_views(&nodes, *leaps, *changes);
    }
    for (name, leaps, _) in CASES {
        if *leaps && !works(Engine::StopCopy.into()) {
            skip(&format!("{NAME} ({name})"), &"the engine stop-copy does not work here");
            continue;
        }
        let (end, text) = run_case(NAME, name);
        assert_eq!(end, End::Exited(0), "{name}: {text}");
    }
}

/// A node on which no thread can run gets no view.
#[test]
fn nodes_that_cannot_have_a_view_are_named() {
    const NAME: &str = "views::nodes_that_cannot_have_a_view_are_named";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let topology = Topology::read().unwrap();
    let pools = pools_on(&nodes[..1], PageSize::Base, 4 * MB).unwrap();
    let region = Region::new(&pools[0], 4 * MB).unwrap();
    for node in &nodes {
        let made = region.replicate([*node]);
        match topology.node(*node).unwrap().cpus.is_empty() {
            true => assert!(made.unwrap_err().to_string().contains("has no CPUs")),
            false => made.unwrap(),
        }
    }
    let with_cpus = nodes.iter().filter(|n| !topology.node(**n).unwrap().cpus.is_empty());
    assert_eq!(region.views().len(), with_cpus.count());
}
