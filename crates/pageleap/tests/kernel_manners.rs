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

use common::skip;
use machine_settings::Cpuset;
use mapping::Mapping;
use moved::{Child, outcomes};
use nodes::several;
use pageleap::{BASE_PAGE, Ended, KernelMigration, NodeId, PageOutcome, Reason, move_pages};

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

/// Counts of the kernel of all nodes.
fn reclaimed() -> BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let words = text.lines().filter_map(|line| line.split_once(' '));
    let wanted = |name: &str| ["pswpout", "pgsteal_kswapd", "pgsteal_direct"].contains(&name);
    words
        .filter(|(name, _)| wanted(name))
        .map(|(n, v)| (n.to_owned(), v.parse().unwrap()))
        .collect()
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
    let Some(nodes) = several(NAME) else { return };
    if free(nodes[1]) > 4 << 30 {
        return skip(NAME, &"filling the second node would take long");
    }
    // Leaves 200 MB on the second node, of which watermarks take some 100. Huge pages are filled
    // faster.
    let fill = free(nodes[1]).saturating_sub(200 << 20) / HUGE * HUGE;
    let hog = Mapping::new(fill, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    hog.advise(libc::MADV_HUGEPAGE);
    hog.advise(libc::MADV_DONTFORK);
    hog.fill(nodes[1]);
    let child = Child::base(57_600 * BASE_PAGE, nodes[0]);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
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
    drop(hog);
    let report = child.move_to(nodes[1]);
    assert!(report.ended.is_completed(), "{report}");
}
