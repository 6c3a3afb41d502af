//! Tests on several memory nodes: pages, and the page tables that map them, lie on the nodes that
//! were asked for. `cargo xtask lab` runs these tests on emulated machines. On a machine with one
//! node each test is skipped.
//!
//! Where pages lie is read from the kernel's counts in `numa_maps` and in the nodes' `meminfo`, not
//! by `move_pages`, because that is what the library itself asks. Shortages and refusals are tested
//! in `nodes_adverse.rs`.

mod common;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/nodes.rs"]
mod on_nodes;
#[path = "nodes/page_tables.rs"]
mod page_tables;
#[path = "nodes/views.rs"]
mod views;

use std::fs;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::{
    End, address, become_nobody, case, check_stamp, is_root, leap, run_case, set_dumpable, skip,
    skip_page_size, soon, stamp, turn,
};
use machine_settings::Cpuset;
use on_nodes::{
    check_bound, check_on, for_page_sizes, go, go_part, lab_machine, numa_maps, pools_on, several,
};
use page_tables::{AUTO, WIDE, Way, each_meminfo, page_tables, to_and_fro};
use pageleap::topology::{Access, Topology};
use pageleap::{
    Ended, Engine, Error, Migration, NodeId, PageSize, PageTables, Placement, Pool, Region, audit,
    observe,
};

const MB: usize = 1 << 20;
const GB: usize = 1 << 30;

/// Bytes of most regions of these tests.
const BYTES: usize = 16 * MB;

/// [`each_meminfo`] once it no longer changes: memory of processes that have ended may be freed a
/// little later.
fn settled(nodes: &[NodeId], field: &str) -> Vec<usize> {
    let mut last = each_meminfo(nodes, field);
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(30));
        let now = each_meminfo(nodes, field);
        if std::mem::replace(&mut last, now.clone()) == now {
            break;
        }
    }
    last
}

/// How many processes the kernel has killed because it was out of memory.
fn oom_kills() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap().trim().parse().unwrap()
}

/// If QEMU emulated another machine than the lab asked for, other tests could pass for the wrong
/// reason.
#[test]
fn the_machine_is_the_one_that_was_ordered() {
    const NAME: &str = "the_machine_is_the_one_that_was_ordered";
    let Some(machine) = lab_machine(NAME) else { return };
    let topology = Topology::read().unwrap();
    let mut nodes = 0;
    for fact in machine.split(", ") {
        let mut words = fact.split(' ');
        let kind = words.next().unwrap();
        let [a, b, c] = [(); 3].map(|()| words.next().unwrap().parse::<u32>().unwrap());
        match kind {
            "node" => {
                nodes += 1;
                let node = topology.node(NodeId(a)).unwrap();
                assert_eq!(node.cpus.len(), b as usize, "{fact}: {node:?}");
                // The kernel keeps some memory for itself.
                let ordered = u64::from(c) << 20;
                assert!(
                    (ordered * 3 / 4..=ordered).contains(&node.total_bytes),
                    "{fact}: {node:?}"
                );
            }
            "distance" => assert_eq!(topology.distance(NodeId(a), NodeId(b)), Some(c), "{fact}"),
            "latency" => {
                let node = topology.node(NodeId(b)).unwrap();
                let says_so = |access: &Access| {
                    access.initiators == [NodeId(a)] && access.read_latency_ns == Some(u64::from(c))
                };
                assert!(node.access.iter().any(says_so), "{fact}: {node:?}");
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(topology.nodes().len(), nodes, "{machine}");
}

#[test]
fn pools_lie_on_their_nodes() {
    const NAME: &str = "pools_lie_on_their_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    for page in common::PAGE_SIZES {
        for (i, node) in nodes.iter().enumerate() {
            let field = if page.is_hugetlb() { "MemUsed" } else { "Shmem" };
            let free_huge = || {
                Topology::read()
                    .unwrap()
                    .nodes()
                    .iter()
                    .map(|n| n.free_huge(2 << 20))
                    .collect::<Vec<_>>()
            };
            let (before, huge_before) = (settled(&nodes, field), free_huge());
            let pool = match Pool::builder(*node, BYTES as u64).page_size(page).build() {
                Ok(pool) => pool,
                Err(error) => {
                    skip_page_size(&format!("{NAME} ({node})"), page, error);
                    continue;
                }
            };
            let (after, huge_after) = (settled(&nodes, field), free_huge());
            for j in 0..nodes.len() {
                if page.is_hugetlb() {
                    let taken = huge_before[j] - huge_after[j];
                    let wanted = if i == j { (BYTES / page.bytes()) as u64 } else { 0 };
                    assert_eq!(taken, wanted, "{page} pages of {} for a pool on {node}", nodes[j]);
                } else {
                    // Memory of others may be freed meanwhile, a process' that has ended, say.
                    // Where each page lies is looked at below.
                    let grown = after[j].saturating_sub(before[j]);
                    let right = if i == j { grown > BYTES / 4 * 3 } else { grown < BYTES / 4 };
                    assert!(right, "{grown} bytes on {} for a pool on {node}", nodes[j]);
                }
            }
            let verified = pool.verify().unwrap();
            assert!(
                verified.is_right() && verified.pages as usize == BYTES / page.bytes(),
                "{verified}"
            );
            let region = Region::new(&pool, BYTES).unwrap();
            check_on(&region, *node);
            check_bound(&region, *node);
        }
    }
}

#[test]
fn regions_leap_between_all_nodes() {
    const NAME: &str = "regions_leap_between_all_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    for_page_sizes(NAME, &nodes, BYTES, |page, pools| {
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        check_on(&region, nodes[0]);
        for from in 0..nodes.len() {
            for to in (0..nodes.len()).filter(|to| *to != from) {
                go(&region, &pools[from]);
                check_on(&region, nodes[from]);
                let report = go(&region, &pools[to]);
                assert_eq!(report.pages.migrated as usize, BYTES / page.bytes(), "{report}");
                check_on(&region, nodes[to]);
                check_bound(&region, nodes[to]);
                check_stamp(&region, 0..BYTES, 1);
            }
        }
        for pool in &pools {
            assert!(pool.verify().unwrap().is_right());
        }
        let all: Vec<&Pool> = pools.iter().collect();
        audit(&all, &[&region]).unwrap();
    });
}

/// The kernel joins neighbouring mappings only if their memory policies are equal. A region that
/// consists of several mappings cannot leap by exchanging page tables.
#[test]
fn mappings_are_joined_again_whatever_the_pools_were_bound_to() {
    const NAME: &str = "mappings_are_joined_again_whatever_the_pools_were_bound_to";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let last = *nodes.last().unwrap();
    for_page_sizes(NAME, &[nodes[0], last], BYTES, |page, pools| {
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        let middle = BYTES / 4..BYTES / 2;
        // Page tables on another node: the alias of these frames is mapped anew.
        let astray = pools[1].on(Placement::on(last).page_tables(PageTables::Node(nodes[0])));
        for (range, to) in [
            (middle.clone(), astray),
            (0..BYTES, (&pools[1]).into()),
            (middle, (&pools[0]).into()),
            (0..BYTES, (&pools[0]).into()),
        ] {
            go_part(&region, range, to);
        }
        check_stamp(&region, 0..BYTES, 1);
        assert_eq!(common::region_flags(&region).len(), 1, "mappings of the region, {page} pages");
        drop(region);
        assert_eq!(
            observe::pool_mapping_count().unwrap(),
            pools.len(),
            "mappings of pools, {page} pages"
        );
    });
}

#[test]
fn gigabyte_pages_leap_between_nodes() {
    const NAME: &str = "gigabyte_pages_leap_between_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let topology = Topology::read().unwrap();
    let has_one = |node: &NodeId| topology.node(*node).unwrap().free_huge(GB as u64) > 0;
    let (with, without): (Vec<NodeId>, Vec<NodeId>) = nodes.iter().partition(|node| has_one(node));
    if with.is_empty() {
        return skip(NAME, &"no node has free huge pages of 1 GB");
    }
    let pools = pools_on(&with, PageSize::Huge1G, GB).unwrap();
    for node in without {
        let error = Pool::builder(node, GB as u64).page_size(PageSize::Huge1G).build().unwrap_err();
        assert!(
            matches!(&error, Error::OutOfMemory { node: named, .. } if *named == node),
            "{error}"
        );
        assert!(error.to_string().contains("hugepages-1048576kB"), "a remedy: {error}");
    }
    let region = Region::new(&pools[0], GB).unwrap();
    check_on(&region, with[0]);
    let stamped = [0..64 * MB, GB - MB..GB];
    stamped.iter().for_each(|part| stamp(&region, part.clone(), 1));
    for (pool, node) in pools.iter().zip(&with).cycle().skip(1).take(2 * (with.len() - 1)) {
        go(&region, pool);
        check_on(&region, *node);
        stamped.iter().for_each(|part| check_stamp(&region, part.clone(), 1));
    }
    if with.len() == 1 {
        skip(&format!("{NAME} (leaps)"), &"only one node has huge pages of 1 GB");
    }
}

#[test]
fn placements_spread_pages_as_they_say() {
    const NAME: &str = "placements_spread_pages_as_they_say";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let last = *nodes.last().unwrap();
    for page in common::PAGE_SIZES {
        // The share of each node has room for a whole region.
        let everywhere = Placement::interleave(nodes.clone());
        let pool = match Pool::builder(everywhere.clone(), (nodes.len() * BYTES) as u64)
            .page_size(page)
            .build()
        {
            Ok(pool) => pool,
            Err(error) => {
                skip_page_size(NAME, page, error);
                continue;
            }
        };
        let region = Region::new(pool.on(nodes[0]), BYTES).unwrap();
        stamp(&region, 0..BYTES, 2);
        check_on(&region, nodes[0]);
        let stripe = 64 << 10;
        let stripe = stripe.max(page.bytes());
        let check = |placement: Placement, shares: &[(NodeId, usize)]| {
            go(&region, pool.on(placement));
            let seen = numa_maps(&region);
            let parts: usize = shares.iter().map(|(_, weight)| weight).sum();
            for (node, weight) in shares {
                let wanted = BYTES * weight / parts;
                let bytes = seen.get(node).copied().unwrap_or(0);
                assert!(
                    bytes.abs_diff(wanted) <= stripe,
                    "{node}: {bytes} of {wanted} bytes: {seen:?}"
                );
            }
            assert_eq!(seen.values().sum::<usize>(), BYTES, "{seen:?}");
            assert!(region.verify().unwrap().is_right());
            check_stamp(&region, 0..BYTES, 2);
        };
        let equal: Vec<(NodeId, usize)> = nodes.iter().map(|node| (*node, 1)).collect();
        check(everywhere.stripe_bytes(stripe), &equal);
        let weighted = Placement::weighted([(nodes[0], 3), (last, 1)]).stripe_bytes(stripe);
        check(weighted, &[(nodes[0], 3), (last, 1)]);
        check(Placement::on(last), &[(last, 1)]);
        check(
            Placement::interleave([last, nodes[0]]).stripe_bytes(stripe),
            &[(last, 1), (nodes[0], 1)],
        );
        audit(&[&pool], &[&region]).unwrap();
    }
}

#[test]
fn page_tables_move_with_the_data() {
    page_tables("page_tables_move_with_the_data", AUTO, |last| {
        let on = |node| (node, None);
        let all_around = (0..=last).chain([0]).map(on).collect();
        let mut legs = vec![vec![on(0)], vec![on(last)], vec![on(0), on(last), on(0)], all_around];
        legs.extend((1..=last).map(|node| vec![on(0), on(node)]));
        legs
    });
}

/// The kernel makes page tables for what it takes away, and those go with the frames.
#[test]
fn page_tables_move_by_stop_and_copy() {
    let way = Way { engine: Engine::StopCopy.into(), shifted: false };
    page_tables("page_tables_move_by_stop_and_copy", way, to_and_fro);
}

/// While nobody uses the memory, `auto` does without this engine.
#[test]
fn page_tables_move_by_precopy() {
    let way = Way { engine: Engine::Precopy.into(), shifted: false };
    page_tables("page_tables_move_by_precopy", way, to_and_fro);
}

/// Where page tables cannot move as wholes, the kernel makes new ones, for the region too.
#[test]
fn page_tables_that_are_made_by_stop_and_copy_lie_with_the_data() {
    let way = Way { engine: Engine::StopCopy.into(), shifted: true };
    page_tables("page_tables_that_are_made_by_stop_and_copy_lie_with_the_data", way, |last| {
        vec![[0, last].map(|node| (node, None)).to_vec(), vec![(0, None), (last, None), (0, None)]]
    });
}

#[test]
fn page_tables_go_where_they_are_told() {
    page_tables("page_tables_go_where_they_are_told", AUTO, |last| {
        let told = |data, tables| (data, Some(tables));
        let swapped = vec![told(0, last), told(last, 0), told(0, 0), told(last, last)];
        vec![
            vec![told(0, last)],
            vec![(0, None), told(last, 0)],
            swapped,
            // An earlier leap leaves page tables on another node with the pool's frames. The next
            // leap must not get them.
            vec![told(0, last), (last, None), (0, None)],
        ]
    });
}

#[test]
fn a_node_without_room_is_an_error_and_nobody_is_killed() {
    const NAME: &str = "a_node_without_room_is_an_error_and_nobody_is_killed";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let killed = oom_kills();
    for node in &nodes {
        let free = Topology::read().unwrap().node(*node).unwrap().free_bytes;
        let before: Vec<u64> =
            Topology::read().unwrap().nodes().iter().map(|n| n.free_bytes).collect();
        for page in [PageSize::Base, PageSize::Thp] {
            let error =
                Pool::builder(*node, free + (64 << 20)).page_size(page).build().unwrap_err();
            let Error::OutOfMemory { node: named, needed_bytes, free_bytes, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(*named, *node);
            assert!(*needed_bytes > *free_bytes, "{error}");
        }
        let free_huge = || {
            Topology::read()
                .unwrap()
                .nodes()
                .iter()
                .map(|n| n.free_huge(2 << 20))
                .collect::<Vec<_>>()
        };
        let huge_before = free_huge();
        let here = Topology::read().unwrap().node(*node).unwrap().free_huge(2 << 20);
        let error = Pool::builder(*node, (here + 1) * (2 << 20))
            .page_size(PageSize::Huge2M)
            .build()
            .unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(&error, Error::OutOfMemory { node: named, .. } if named == node),
            "{text}"
        );
        assert!(
            text.contains(&format!("node{}/hugepages/hugepages-2048kB", node.0)),
            "a remedy: {text}"
        );
        assert_eq!(free_huge(), huge_before, "huge pages of other nodes are not taken");
        for (node, before) in Topology::read().unwrap().nodes().iter().zip(before) {
            assert!(
                node.free_bytes + (64 << 20) > before,
                "memory of {} was not given back",
                node.id
            );
        }
        // Memory that is free can still be had.
        drop(Pool::builder(*node, BYTES as u64).build().unwrap());
    }
    assert_eq!(oom_kills(), killed, "the kernel has killed somebody");
}

fn ids(nodes: &[NodeId]) -> String {
    nodes.iter().map(|node| node.0.to_string()).collect::<Vec<_>>().join(",")
}

#[test]
fn a_cpuset_that_excludes_a_node_is_respected() {
    const NAME: &str = "a_cpuset_that_excludes_a_node_is_respected";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if lab_machine(NAME).is_none() {
        return;
    }
    let (allowed, forbidden) = nodes.split_at(nodes.len() - 1);
    if case().is_some() {
        let set = Cpuset::new("few", &ids(allowed)).unwrap();
        set.enter();
        let error = Pool::builder(forbidden[0], BYTES as u64).build().unwrap_err();
        assert!(matches!(error, Error::NodeNotAllowed { node } if node == forbidden[0]), "{error}");
        let both = Placement::interleave([allowed[0], forbidden[0]]);
        let error = Pool::builder(both, BYTES as u64).build().unwrap_err();
        assert!(matches!(error, Error::NodeNotAllowed { node } if node == forbidden[0]), "{error}");
        let pools = [(); 2].map(|()| Pool::builder(allowed[0], BYTES as u64).build().unwrap());
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        leap(&region, 0..BYTES, &pools[1]);
        check_on(&region, allowed[0]);
        check_stamp(&region, 0..BYTES, 1);
        return;
    }
    if let Err(error) = Cpuset::new("probe", &ids(allowed)) {
        return skip(NAME, &error);
    }
    let (end, text) = run_case(NAME, "inside");
    assert_eq!(end, End::Exited(0), "{text}");
}

#[test]
fn a_cpuset_that_changes_ends_a_job_between_nodes() {
    const NAME: &str = "a_cpuset_that_changes_ends_a_job_between_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if lab_machine(NAME).is_none() {
        return;
    }
    let last = *nodes.last().unwrap();
    if case().is_some() {
        let set = Cpuset::new("changing", &ids(&nodes)).unwrap();
        set.enter();
        let [near, far] =
            [nodes[0], last].map(|node| Pool::builder(node, WIDE as u64).build().unwrap());
        let region = Region::new(&near, WIDE).unwrap();
        stamp(&region, 0..WIDE, 1);
        // At a byte per second the job pauses for more than an hour after its first page. It reads
        // its cpuset during pauses too. The timeout ends a job that does not.
        let job = Migration::new().range(&region, 0..WIDE, &far).area_bytes(4096).threads(1);
        let job = job.rate_limit(1).timeout(Duration::from_secs(60)).start().unwrap();
        assert!(soon(|| job.progress().bytes_migrated > 0));
        set.write("cpuset.mems", &nodes[0].0.to_string()).unwrap();
        let report = job.wait();
        assert!(matches!(report.ended, Ended::CpusetChanged), "{report}");
        assert!(
            report.warnings.iter().any(|warning| warning.contains(&last.to_string())),
            "{report}"
        );
        assert!(report.pages.migrated > 0 && report.pages.not_attempted > 0, "{report}");
        assert_eq!(report.pages.total() as usize, WIDE / 4096, "{report}");
        check_stamp(&region, 0..WIDE, 1);
        audit(&[&near, &far], &[&region]).unwrap();
        let again = Migration::new().range(&region, 0..WIDE, &far).start().map(drop);
        assert!(matches!(again, Err(Error::NodeNotAllowed { node }) if node == last));
        // With the old cpuset all pages can go back. Meanwhile the kernel may have moved pages of
        // the other node.
        set.write("cpuset.mems", &ids(&nodes)).unwrap();
        go(&region, &near);
        check_stamp(&region, 0..WIDE, 1);
        audit(&[&near, &far], &[&region]).unwrap();
        return;
    }
    if let Err(error) = Cpuset::new("probe", &ids(&nodes)) {
        return skip(NAME, &error);
    }
    let (end, text) = run_case(NAME, "inside");
    assert_eq!(end, End::Exited(0), "{text}");
}

#[test]
fn an_unprivileged_user_leaps_between_nodes() {
    const NAME: &str = "an_unprivileged_user_leaps_between_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    let last = *nodes.last().unwrap();
    let scene = || {
        let pools = pools_on(&[nodes[0], last], PageSize::Base, BYTES).unwrap();
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        for (pool, node) in [(&pools[1], last), (&pools[0], nodes[0])] {
            go(&region, pool);
            check_on(&region, node);
            check_stamp(&region, 0..BYTES, 1);
        }
    };
    if !is_root() {
        return scene();
    }
    if case().is_some() {
        become_nobody();
        set_dumpable(true);
        assert!(!is_root());
        return scene();
    }
    let (end, text) = run_case(NAME, "inside");
    assert_eq!(end, End::Exited(0), "{text}");
}

#[test]
fn verification_notices_what_the_kernel_has_moved() {
    const NAME: &str = "verification_notices_what_the_kernel_has_moved";
    /// Moves pages that are mapped several times, too (include/uapi/linux/mempolicy.h).
    const MPOL_MF_MOVE_ALL: libc::c_int = 4;
    /// Pages that the system call moves.
    const MOVED: usize = 7;
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if !is_root() {
        return skip(NAME, &"only root may move pages that are mapped more than once");
    }
    let last = *nodes.last().unwrap();
    let pools = pools_on(&[nodes[0], last], PageSize::Base, BYTES).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    check_on(&region, nodes[0]);
    let addresses: Vec<usize> = (0..MOVED).map(|i| address(&region) + i * 11 * 4096).collect();
    let mut status = [-1i32; MOVED];
    let targets = [last.0 as i32; MOVED];
    // The kernel does not move a page while it is in use elsewhere in the kernel.
    let all_moved = soon(|| {
        // SAFETY: each list has `MOVED` entries. Pages keep their addresses and contents.
        let left = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                MOVED,
                addresses.as_ptr(),
                targets.as_ptr(),
                status.as_mut_ptr(),
                MPOL_MF_MOVE_ALL,
            )
        };
        left == 0 && status == [last.0 as i32; MOVED]
    });
    assert!(all_moved, "{status:?}, {}", std::io::Error::last_os_error());
    assert_eq!(numa_maps(&region)[&last], MOVED * 4096);
    for verified in [region.verify().unwrap(), pools[0].verify().unwrap()] {
        assert_eq!(
            (verified.misplaced, verified.found.on(last)),
            (MOVED as u64, MOVED as u64),
            "{verified}"
        );
        assert!(!verified.is_right());
    }
    check_stamp(&region, 0..BYTES, 1);
    // A leap puts all pages where they belong. The vacated frames stay where the kernel has moved
    // them, and verification of the pool notices it.
    go(&region, &pools[1]);
    check_on(&region, last);
    assert_eq!(pools[0].verify().unwrap().misplaced, MOVED as u64);
    assert!(pools[1].verify().unwrap().is_right());
    check_stamp(&region, 0..BYTES, 1);
}

#[test]
fn numa_balancing_leaves_pages_where_they_were_put() {
    const NAME: &str = "numa_balancing_leaves_pages_where_they_were_put";
    const SWITCH: &str = "/proc/sys/kernel/numa_balancing";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    if lab_machine(NAME).is_none() {
        return;
    }
    let before = fs::read_to_string(SWITCH).unwrap();
    /// Sets the switch back when dropped, also when a check fails.
    struct Back(String);
    impl Drop for Back {
        fn drop(&mut self) {
            let _ = fs::write(SWITCH, self.0.trim());
        }
    }
    let _back = Back(before);
    fs::write(SWITCH, "1").unwrap();
    let last = *nodes.last().unwrap();
    let pools = pools_on(&[nodes[0], last], PageSize::Base, BYTES).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    let words = region.atomics_u64(0..BYTES).unwrap();
    let mut round = 0;
    for to in [1, 0, 1, 0] {
        go(&region, &pools[to]);
        // Long enough for balancing to act: the kernel scans a process about once a second.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(1500) {
            round += 1;
            words.iter().step_by(512).for_each(|word| word.store(round, Relaxed));
            assert!(
                words.iter().step_by(512).all(|word| word.load(Relaxed) == round),
                "LOST a write"
            );
        }
        check_on(&region, [nodes[0], last][to]);
    }
    for pool in &pools {
        assert!(pool.verify().unwrap().is_right());
    }
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}
