//! `pageleap status --page-tables` finds page tables by node and level in the memory of the kernel.
//! Each test needs a kernel that offers its memory (`/proc/kcore`) to root.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/nodes.rs"]
mod nodes;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::{End, StopOnDrop, case, run_case, skip};
use nodes::several;
use pageleap::{PageTableLevel, PageTables, Placement, Pool, Region};
use serde_json::Value;

const MB: usize = 1 << 20;

/// Walks while page tables come and go.
const ROUNDS: usize = 4;

/// The inode of the first pid namespace.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// Whether the kernel shows its memory and its symbols to this process. If it does, the command has
/// to find page tables there.
fn is_shown(test: &str) -> bool {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap();
    match File::open("/proc/kcore") {
        Err(error) => skip(test, &format!("/proc/kcore: {error}")),
        Ok(file) if file.metadata().unwrap().len() == 0 => skip(test, &"/proc/kcore is empty"),
        Ok(_) if namespace.to_str() != Some(FIRST_NAMESPACE) => skip(test, &"in a pid namespace"),
        Ok(_) if !Path::new("/sys/kernel/btf/vmlinux").exists() => skip(test, &"without BTF"),
        Ok(_) => match fs::read_to_string("/proc/sys/kernel/kptr_restrict").unwrap().trim() {
            "2" => skip(test, &"addresses of symbols are hidden"),
            _ => return true,
        },
    }
    false
}

/// The page tables of this process as the command shows them.
fn walked() -> Value {
    let pid = std::process::id().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    let output = command.args(["status", "--json", "--page-tables", &pid]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let process = object["processes"][0].clone();
    assert_eq!(process["by_node_unknown"], Value::Null, "{process}");
    process
}

/// The pages of a level on a node, or on all nodes.
fn pages(process: &Value, level: &str, node: Option<u32>) -> u64 {
    let rows = process["by_node"].as_array().unwrap().iter();
    let rows = rows.filter(|row| node.is_none_or(|node| row["node"] == node));
    rows.map(|row| row[level].as_u64().unwrap()).sum()
}

/// Pages that the kernel sets aside, one for each transparent huge page of this process.
fn set_aside() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap();
    let kb: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kb / 2048
}

/// All levels are there, and their sum is that of the kernel. The process must not change its
/// mappings meanwhile.
fn agrees_with_the_kernel(process: &Value) {
    assert_eq!(process["is_complete"], true, "{process}");
    let sum: u64 = ["pte", "pmd", "pud"].map(|level| pages(process, level, None)).iter().sum();
    let counted = process["page_table_bytes"].as_u64().unwrap();
    assert_eq!(counted, (sum + set_aside()) * 4096, "{process}");
    assert_eq!(process["not_linked_bytes"], set_aside() * 4096, "{process}");
    assert_eq!(pages(process, "pgd", None), 1, "{process}");
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap();
    // The kernel clears the flag if it uses four levels on a CPU with five.
    let is_five = cpu.split_whitespace().any(|flag| flag == "la57");
    assert_eq!(process["levels"], if is_five { 5 } else { 4 });
    assert_eq!(pages(process, "p4d", None) > 0, is_five, "{process}");
    assert!(process["by_node"].as_array().unwrap().iter().all(|row| row["node"].is_u64()));
}

#[test]
fn page_tables_are_found_where_they_were_asked_for() {
    const NAME: &str = "page_tables_are_found_where_they_were_asked_for";
    // Other tests of this process would change its page tables.
    if case().as_deref() != Some(NAME) {
        if is_shown(NAME) && several(NAME).is_some() {
            let (end, output) = run_case(NAME, NAME);
            assert_eq!(end, End::Exited(0), "{output}");
        }
        return;
    }
    let nodes = several(NAME).unwrap();
    let (first, last) = (nodes[0], *nodes.last().unwrap());
    let before = walked();
    agrees_with_the_kernel(&before);
    let pool = Pool::builder(first, 64 * MB as u64).build().unwrap();
    let at = Placement::on(first).page_tables(PageTables::Node(last));
    let region = Region::new(pool.on(at), 64 * MB).unwrap();
    let mut shown = Vec::new();
    for node in [last, first, last] {
        region.move_page_tables(0..64 * MB, node).unwrap().wait();
        let asked = region.page_tables().asked_on(PageTableLevel::Pte, node);
        assert_eq!(asked, 32);
        let now = walked();
        agrees_with_the_kernel(&now);
        let more = pages(&now, "pte", Some(node.0)) as i64;
        shown.push(more - pages(&before, "pte", Some(node.0)) as i64);
    }
    // The library and the harness of the tests may have made a few of their own meanwhile.
    assert!(shown.iter().all(|more| (30..=36).contains(more)), "{shown:?}");
}

#[test]
fn page_tables_that_come_and_go_are_walked() {
    const NAME: &str = "page_tables_that_come_and_go_are_walked";
    if !is_shown(NAME) {
        return;
    }
    let stop = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let _end = StopOnDrop(&stop);
        let mapper = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Relaxed) {
                map_and_unmap();
                rounds += 1;
            }
            rounds
        });
        // Processes come and go, too.
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                Command::new("/proc/self/exe").arg("--list").output().unwrap();
            }
        });
        for _ in 0..ROUNDS {
            let process = walked();
            // The mapper has 32 pages of PTEs at most.
            let found = pages(&process, "pte", None);
            assert!((1..2000).contains(&found), "{process}");
            assert_eq!(pages(&process, "pgd", None), 1);
        }
        stop.store(true, Relaxed);
        mapper.join().unwrap()
    });
    assert!(rounds > 0);
}

/// Maps 64 MB at a hint of its own in a part of the addresses that nothing else uses, touches each
/// page of PTEs, and unmaps all.
fn map_and_unmap() {
    const BYTES: usize = 64 * MB;
    // SAFETY: new memory, which only this function knows.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let at =
            libc::mmap(ptr::without_provenance_mut(0x1000_0000_0000), BYTES, access, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        libc::madvise(at, BYTES, libc::MADV_NOHUGEPAGE);
        for offset in (0..BYTES).step_by(2 * MB) {
            at.cast::<u8>().add(offset).write_volatile(1);
        }
        assert_eq!(libc::munmap(at, BYTES), 0);
    }
}
