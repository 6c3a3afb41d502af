//! What a move costs others: nothing is reclaimed for it, no cpuset is broken, and calls that take
//! too long are counted.

mod common;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/moved.rs"]
mod moved;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::BTreeMap;
use std::fs;

use common::{is_root, skip, soon};
use machine_settings::{Cpuset, Setting};
use mapping::Mapping;
use moved::{Child, outcomes, run};
use nodes::{lab_machine, several};
use pageleap::{BASE_PAGE, Ended, KernelMigration, Mode, NodeId, PageOutcome, Reason, move_pages};

const HUGE: usize = 2 << 20;

#[test]
fn a_node_that_the_cpuset_of_the_process_forbids_is_refused() {
    const NAME: &str = "a_node_that_the_cpuset_of_the_process_forbids_is_refused";
    let Some(nodes) = several(NAME) else { return };
    let child = Child::base(16 * BASE_PAGE, nodes[0]);
    let set = match Cpuset::new("kernel", &nodes[0].0.to_string()) {
        Ok(set) => set,
        Err(error) => return skip(NAME, &error),
    };
    set.write("cgroup.procs", &child.pid.to_string()).unwrap();
    let memory = child.memory();
    let migration = KernelMigration::new().range(&memory, child.mapping.range(), nodes[1]);
    let error = migration.start().unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("cpuset"), "{error}");
    let status = move_pages(child.pid(), &[child.mapping.start], Some(&[nodes[1]]), false).unwrap();
    assert_eq!(status[0].code(), -libc::EACCES);
    assert_eq!(status[0].node, Some(nodes[0]));
    drop(child);
}

/// What the kernel has done so far to make memory free, on all nodes: pages that it has looked at,
/// dropped or written to the swap, and threads that had to wait for it. What khugepaged does for its
/// huge pages is not counted.
fn reclaimed() -> BTreeMap<String, u64> {
    const NAMES: [&str; 7] = [
        "allocstall_",
        "pglazyfreed",
        "pgscan_direct",
        "pgscan_kswapd",
        "pgsteal_direct",
        "pgsteal_kswapd",
        "pswpout",
    ];
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let counts = text.lines().filter_map(|line| line.split_once(' '));
    counts
        .filter(|(name, _)| NAMES.iter().any(|wanted| name.starts_with(wanted)))
        .map(|(name, count)| (name.to_owned(), count.parse().unwrap()))
        .collect()
}

/// Memory of this process that the kernel may drop at any time (MADV_FREE): it lies on the same list
/// as page cache, and a guest has neither a disk nor a swap.
fn droppable(bytes: usize, node: NodeId) -> Mapping {
    let mapping = Mapping::own(bytes);
    mapping.fill(node);
    mapping.advise(libc::MADV_FREE);
    mapping
}

fn free(node: NodeId) -> usize {
    let text =
        fs::read_to_string(format!("/sys/devices/system/node/node{}/meminfo", node.0)).unwrap();
    let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
    line.split_whitespace().nth(3).unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn a_node_without_room_takes_what_costs_nobody_anything() {
    const NAME: &str = "a_node_without_room_takes_what_costs_nobody_anything";
    if lab_machine(NAME).is_none() {
        return;
    }
    let Some(nodes) = several(NAME) else { return };
    if !is_root() {
        return skip(NAME, &"changing settings of the kernel needs root");
    }
    // The kernel reclaims memory as well where pages of different kinds come to lie in one block.
    let _boost = Setting::new("/proc/sys/vm/watermark_boost_factor", "0");
    // Leaves 200 MB on the second node, of which watermarks take some 100. Huge pages are filled
    // faster.
    let fill = free(nodes[1]).saturating_sub(200 << 20) / HUGE * HUGE;
    let hog = Mapping::new(fill, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    hog.advise(libc::MADV_HUGEPAGE);
    hog.advise(libc::MADV_DONTFORK);
    hog.fill(nodes[1]);
    let cache = droppable(32 << 20, nodes[1]);
    let child = Child::base(57_600 * BASE_PAGE, nodes[0]);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    assert!(57_600 * BASE_PAGE > free(nodes[1]), "all of it has room");
    let before = reclaimed();
    let report = child.move_to(nodes[1]);
    assert_eq!(reclaimed(), before, "{report}");
    let full = (format!("{:?}", PageOutcome::Failed), Some(Reason::NoRoom.to_string()));
    let outcomes = outcomes(&report);
    assert!(report.pages.migrated > 0 && outcomes.contains_key(&full), "{report}");
    assert_eq!(outcomes.len(), 2, "{report}");
    let Ended::Failed(error) = &report.ended else { panic!("{report}") };
    assert!(error.to_string().contains("no room"), "{error}");
    assert_eq!(child.on_nodes()[&Some(nodes[1])] as u64, report.pages.migrated);
    // In a list too.
    let pages: Vec<usize> = child.mapping.pages().collect();
    let to = vec![nodes[1]; pages.len()];
    let found = move_pages(child.pid(), &pages, Some(&to), false).unwrap();
    assert!(found.iter().any(|status| status.code() == -libc::ENOMEM));
    assert_eq!(reclaimed(), before);
    child.check();
    // And where each address stands for a huge page.
    let huge = Child::new(128 << 20, flags, libc::MADV_HUGEPAGE, nodes[0]);
    let pages: Vec<usize> = huge.mapping.range().step_by(HUGE).collect();
    let to = vec![nodes[1]; pages.len()];
    let found = move_pages(huge.pid(), &pages, Some(&to), false).unwrap();
    assert!(found.iter().any(|status| status.code() == -libc::ENOMEM));
    assert_eq!(reclaimed(), before);
    huge.check();
    let there = BTreeMap::from([(Some(nodes[1]), cache.len / BASE_PAGE)]);
    assert_eq!(cache.on_nodes(), there);
    // What it would have cost: more is to move than the node has free.
    let memory = child.memory();
    let all = KernelMigration::new().range(&memory, child.mapping.range(), nodes[1]);
    let report = run(all.fill(true).mode(Mode::Light));
    assert!(soon(|| reclaimed() != before), "nothing was reclaimed: {report}");
    assert_ne!(cache.on_nodes(), there, "{report}");
    child.check();
    drop(hog);
    let report = child.move_to(nodes[1]);
    assert!(report.ended.is_completed(), "{report}");
}
