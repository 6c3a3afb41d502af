//! A region's account of its page tables agrees with the counts of the kernel.
//!
//! The kernel tells no node of a page table. So each case runs in a process of its own, which unmaps
//! its region at the end and compares what the kernel has freed with the account: the page tables of
//! the process (`VmPTE`), and for root on a machine with several nodes the page tables of each node
//! (`PageTables:` in its `meminfo`, and the flag of each page frame in `/proc/kpageflags`).

mod common;
#[path = "common/nodes.rs"]
mod on_nodes;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::{
    End, Kept, Random, StopOnDrop, address, case, check_stamp, in_lab, is_root, last_resort, pools,
    run_case, skip, skip_page_size, stamp, status_kb, turn, works,
};
use on_nodes::{go_by, go_part};
use pageleap::topology::Topology;
use pageleap::{
    Destination, Engine, EngineChoice, NodeId, PageSize, PageTableLevel, PageTableMigration,
    PageTables, Placement, Pool, Reason, Region, Report,
};

const MB: usize = 1 << 20;
/// The addresses of each region. They begin and end at a multiple of it, so that the region has the
/// page table of the second level for itself.
const CAPACITY: usize = 1 << 30;
/// The memory of most regions: 32 blocks of 2 MB.
const BYTES: usize = 64 * MB;
/// Bytes of a page of page table.
const TABLE: usize = 4096;
/// Page tables of other processes that may come or go meanwhile.
const STRAY: i64 = 3;
/// The bit of a page of page table in `/proc/kpageflags`.
const KPF_PGTABLE: u64 = 1 << 26;

/// The stage of a case: the first and the last node of the machine (twice the same on a machine
/// with one), a pool on each, and a region without memory.
struct Stage {
    nodes: [NodeId; 2],
    pools: [Pool; 2],
    region: Region,
}

impl Stage {
    /// Memory of a node, with page tables on another one.
    fn with_tables(&self, node: usize, tables: usize) -> Destination {
        let at = Placement::on(self.nodes[node]).page_tables(PageTables::Node(self.nodes[tables]));
        self.pools[node].on(at)
    }

    fn grow(&self, bytes: usize, to: impl Into<Destination>) {
        let from = self.region.len();
        self.region.grow(bytes, to).unwrap();
        stamp(&self.region, from..bytes, 1);
    }

    /// Moves the page tables of a part, and checks that the data stays.
    fn move_tables(&self, mb: Range<usize>, node: usize) {
        let kept = Kept::of(&self.region);
        let report = self.tables_to(mb, node);
        assert!(report.ended.is_completed() && report.bytes_copied == 0, "{report}");
        assert_eq!(report.pages.failed + report.pages.busy, 0, "{report}");
        check_stamp(&self.region, 0..self.region.len(), 1);
        kept.check(&self.region);
    }

    fn tables_to(&self, mb: Range<usize>, node: usize) -> Report {
        let range = mb.start * MB..mb.end * MB;
        self.region.move_page_tables(range, self.nodes[node]).unwrap().wait()
    }

    fn leap(&self, mb: Range<usize>, node: usize) {
        go_part(&self.region, mb.start * MB..mb.end * MB, &self.pools[node]);
        check_stamp(&self.region, 0..self.region.len(), 1);
    }
}

/// The steps of a case, and the pages of the lowest level that are asked for on each of its two nodes
/// then.
type Case = (&'static str, fn(&mut Stage) -> [u64; 2]);

/// Cases of base pages. The calling thread runs on the first node.
const BASE: &[Case] = &[
    ("grows on the last node", |stage| {
        stage.grow(BYTES, &stage.pools[1]);
        [0, 32]
    }),
    ("has its page tables on the other node", |stage| {
        stage.grow(BYTES, stage.with_tables(0, 1));
        [0, 32]
    }),
    ("leaps, and back, and again", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        for node in [1, 0, 1] {
            stage.leap(0..64, node);
        }
        [0, 32]
    }),
    ("leaps by the last resort", |stage| leap_by(stage, last_resort().into())),
    ("leaps by stop-and-copy", |stage| leap_by(stage, Engine::StopCopy.into())),
    ("leaps in part", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        stage.leap(16..40, 1);
        [20, 12]
    }),
    ("leaps in parts of blocks", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        // Page tables of blocks of which only a part moves stay.
        stage.leap(1..4, 1);
        stage.leap(9..10, 1);
        [31, 1]
    }),
    ("grows in parts of blocks, leaps and comes back", |stage| {
        // The calling thread makes the page tables, and nobody has asked it for a node.
        for mb in 1..=64 {
            stage.grow(mb * MB, &stage.pools[1]);
        }
        assert_eq!(stage.region.page_tables().unasked(PageTableLevel::Pte), 32);
        stage.leap(0..64, 0);
        stage.leap(0..32, 1);
        [16, 16]
    }),
    ("has frames whose addresses do not agree", |stage| {
        let _shift = Region::new(&stage.pools[1], 4096).unwrap();
        let _shift = Region::new(&stage.pools[0], 4096).unwrap();
        stage.grow(BYTES - MB, &stage.pools[0]);
        stage.leap(0..63, 1);
        [0, 31]
    }),
    ("is discarded in part, and backed", |stage| {
        stage.grow(BYTES, &stage.pools[1]);
        for mb in [16..32, 35..36, 36..37, 40..44] {
            stage.region.discard(mb.start * MB..mb.end * MB).unwrap();
        }
        // 8 and 2 blocks have gone. Of two more, half has, but not their page tables.
        let tables = stage.region.page_tables();
        assert_eq!(tables.total(PageTableLevel::Pte), 22, "{tables}");
        stage.region.back(20 * MB..24 * MB, &stage.pools[0]).unwrap();
        stage.region.back(35 * MB..37 * MB, &stage.pools[0]).unwrap();
        [2, 22]
    }),
    ("has its page tables moved alone", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        stage.move_tables(0..64, 1);
        [0, 32]
    }),
    ("has its page tables moved alone in part, and to and fro", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        // Six blocks lie in this part as wholes.
        for node in [1, 0, 1] {
            stage.move_tables(3..17, node);
        }
        [26, 6]
    }),
    ("has its page tables moved alone, leaps and comes back", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        stage.move_tables(0..64, 1);
        stage.leap(0..32, 1);
        stage.leap(0..32, 0);
        [16, 16]
    }),
    ("has frames that are not consecutive, and its page tables moved alone", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        // These pages are mappings of their own then, and so is the rest.
        stage.leap(11..12, 1);
        let page = &stage.region;
        go_part(page, 33 * MB..33 * MB + 4096, &stage.pools[1]);
        stage.move_tables(0..64, 1);
        let report = stage.tables_to(0..64, 1);
        let stay = report.runs.iter().filter(|run| run.reason == Some(Reason::SharedTable));
        let bytes: usize = stay.map(|run| run.range.len()).sum();
        assert_eq!(bytes, 2 * 2 * MB, "{report}");
        [2, 30]
    }),
    ("was not readable when it came, and has its page tables moved alone", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        let protect = |prot| {
            // SAFETY: the region, which nobody accesses meanwhile.
            unsafe { libc::mprotect(stage.region.as_ptr().as_ptr().cast(), BYTES, prot) }
        };
        assert_eq!(protect(libc::PROT_NONE), 0);
        go_part(&stage.region, 0..BYTES, &stage.pools[1]);
        assert_eq!(protect(libc::PROT_READ | libc::PROT_WRITE), 0);
        let tables = stage.region.page_tables();
        // The account sees none, and half of them are made here.
        assert_eq!(tables.total(PageTableLevel::Pte), 0, "{tables}");
        check_stamp(&stage.region, 0..BYTES / 2, 1);
        stage.move_tables(0..64, 0);
        let tables = stage.region.page_tables();
        assert_eq!(tables.asked_on(PageTableLevel::Pte, stage.nodes[0]), 32, "{tables}");
        [32, 0]
    }),
    ("is interleaved", |stage| {
        let pool = Pool::builder(placement(stage.nodes), BYTES as u64).build().unwrap();
        stage.grow(BYTES, &pool);
        [16, 16]
    }),
];

/// Cases of huge pages of 2 MB, which need no page tables of the lowest level.
const HUGE: &[Case] = &[
    ("grows", |stage| {
        stage.grow(BYTES, &stage.pools[1]);
        [0, 0]
    }),
    ("leaps, and back, and in part", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        for mb in [0..64, 16..32] {
            stage.leap(mb.clone(), 1);
            stage.leap(mb, 0);
        }
        [0, 0]
    }),
    ("is discarded in part", |stage| {
        stage.grow(BYTES, &stage.pools[0]);
        stage.region.discard(16 * MB..32 * MB).unwrap();
        [0, 0]
    }),
];

fn leap_by(stage: &Stage, engine: EngineChoice) -> [u64; 2] {
    stage.grow(BYTES, &stage.pools[0]);
    if works(engine) {
        go_by(engine, &stage.region, &stage.pools[1]);
        check_stamp(&stage.region, 0..BYTES, 1);
        return [0, 32];
    }
    [32, 0]
}

/// In stripes of one block.
fn placement(nodes: [NodeId; 2]) -> Placement {
    match nodes[0] == nodes[1] {
        true => Placement::on(nodes[0]),
        false => Placement::interleave(nodes).stripe_bytes(2 * MB),
    }
}

/// The nodes with memory and CPUs. Page tables for memory of other nodes go to a node with CPUs.
fn with_both() -> Vec<NodeId> {
    let topology = Topology::read().unwrap();
    let has_both = topology.nodes().iter().filter(|n| n.total_bytes > 0 && !n.cpus.is_empty());
    has_both.map(|node| node.id).collect()
}

/// The first one and the last one of these.
fn first_and_last() -> [NodeId; 2] {
    let all = with_both();
    [all[0], all[all.len() - 1]]
}

/// Runs each case in a process of its own.
fn run_cases(test: &str, page: PageSize, cases: &[Case]) {
    let _turn = turn();
    if let Some(name) = case() {
        let (name, steps) = cases.iter().find(|(of, _)| *of == name).unwrap();
        run(name, page, *steps);
    }
    if let Err(error) = pools(page, BYTES as u64) {
        return skip_page_size(test, page, error);
    }
    if !is_root() {
        skip(&format!("{test} (by node)"), &"only root can make the kernel's counters exact");
    } else if first_and_last()[0] == first_and_last()[1] {
        skip(&format!("{test} (by node)"), &"this machine has one node with memory and CPUs");
    }
    for (name, _) in cases {
        let (end, text) = run_case(test, name);
        assert_eq!(end, End::Exited(0), "a region that {name}, of {page} pages: {text}");
    }
}

/// Runs one case and compares. Ends the process.
fn run(name: &str, page: PageSize, steps: fn(&mut Stage) -> [u64; 2]) -> ! {
    let nodes = first_and_last();
    run_on(nodes[0]);
    let pool = |node| {
        // Room for one page more, which shifts the frames of a region.
        Pool::builder(node, (BYTES + 2 * MB) as u64).page_size(page).build().unwrap()
    };
    let mut stage =
        Stage { nodes, pools: nodes.map(pool), region: Region::reserve(CAPACITY, page).unwrap() };
    let wanted = steps(&mut stage);
    let region = stage.region;
    let (start, account) = (address(&region), region.page_tables());
    println!("a region that {name}: {account}");
    let is_one = nodes[0] == nodes[1];
    let asked = nodes.map(|node| account.asked_on(PageTableLevel::Pte, node));
    assert!(
        if is_one {
            let is_asked = name.contains("on the other") || name.contains("moved alone");
            is_asked || asked.iter().all(|pages| *pages == 0)
        } else {
            asked == wanted
        },
        "{asked:?} instead of {wanted:?}: {account}"
    );
    assert_eq!(account.total(PageTableLevel::Pmd), 1, "{account}");
    // The page of the third level also goes if nothing else needs it.
    let alone = is_alone(start, PageTableLevel::Pud);
    let whole: u64 = PageTableLevel::ALL.iter().map(|level| account.total(*level)).sum();
    let by_node = is_root() && !is_one;
    // Once before, so that memory for the texts is there.
    let before = [(); 2].map(|()| counts(by_node))[1].clone();
    // SAFETY: nothing accesses the region any more. The process ends below without dropping it.
    assert_eq!(unsafe { libc::munmap(start as *mut _, CAPACITY) }, 0);
    let after = counts(by_node);
    let freed = before.process - after.process;
    assert_eq!(freed, whole as i64 + i64::from(alone), "pages freed, {alone}: {account}");
    for (i, now) in after.by_node.iter().enumerate() {
        for (node, pages) in now {
            let freed = before.by_node[i][node] - pages;
            let asked: u64 =
                account.iter().filter(|(_, on, _)| on == node).map(|(.., pages)| pages).sum();
            let unasked: u64 =
                PageTableLevel::ALL.iter().map(|level| account.unasked(*level)).sum();
            // The calling thread has made these, on its own node.
            let made = if *node == nodes[0] { unasked } else { 0 };
            let wanted = (asked + made) as i64;
            println!("{node}, by {}: {freed} freed, {wanted} in the account", WITNESSES[i]);
            assert!(
                (freed - wanted).abs() <= STRAY,
                "{node}, by {}: {freed} pages freed instead of {wanted}: {account}",
                WITNESSES[i]
            );
        }
    }
    // SAFETY: the call takes a number. It ends the process at once, without dropping the region
    // that is no longer mapped.
    unsafe { libc::_exit(0) }
}

/// Runs this thread on the CPUs of a node.
fn run_on(node: NodeId) {
    let cpus = Topology::read().unwrap().node(node).unwrap().cpus.clone();
    // SAFETY: the set is plain data; the calls read and write it alone.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|cpu| libc::CPU_SET(*cpu, &mut set));
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

/// Whether the page of page table of this level that maps a region maps no other mapping of the
/// process.
fn is_alone(start: usize, level: PageTableLevel) -> bool {
    let bytes = level.reach_bytes();
    let reach = start / bytes * bytes..(start / bytes + 1) * bytes;
    assert!(start + CAPACITY <= reach.end);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().all(|line| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|hex| usize::from_str_radix(hex, 16).unwrap_or(usize::MAX));
        let is_region = from >= start && to <= start + CAPACITY;
        is_region || to <= reach.start || from >= reach.end
    })
}

/// Pages of page table: of this process, and of each node by each of [`WITNESSES`].
#[derive(Clone)]
struct Counts {
    process: i64,
    by_node: Vec<BTreeMap<NodeId, i64>>,
}

const WITNESSES: [&str; 2] = ["meminfo", "kpageflags"];

fn counts(by_node: bool) -> Counts {
    let process = (status_kb("VmPTE") << 10) / TABLE;
    let by_node = if by_node { vec![in_meminfo(), in_kpageflags()] } else { Vec::new() };
    Counts { process: process as i64, by_node }
}

fn in_meminfo() -> BTreeMap<NodeId, i64> {
    // Adds up the counts that each CPU keeps for itself.
    fs::write("/proc/sys/vm/stat_refresh", "1").unwrap();
    let pages = |node: &NodeId| {
        let path = format!("/sys/devices/system/node/node{}/meminfo", node.0);
        let text = fs::read_to_string(path).unwrap();
        let kb = text.lines().find_map(|line| line.split_once(" PageTables:")).unwrap().1;
        kb.split_whitespace().next().unwrap().parse::<i64>().unwrap() * 1024 / TABLE as i64
    };
    on_nodes::with_memory().iter().map(|node| (*node, pages(node))).collect()
}

/// Counts the page frames of each node that are page tables. The kernel shows a node's memory as
/// blocks of equal size.
fn in_kpageflags() -> BTreeMap<NodeId, i64> {
    let flags = File::open("/proc/kpageflags").unwrap();
    let bytes = fs::read_to_string("/sys/devices/system/memory/block_size_bytes").unwrap();
    let frames = usize::from_str_radix(bytes.trim(), 16).unwrap() / 4096;
    let mut words = vec![0; frames * 8];
    let mut pages = |node: &NodeId| {
        let folder = format!("/sys/devices/system/node/node{}", node.0);
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let blocks = names.filter_map(|name| name.to_str()?.strip_prefix("memory")?.parse().ok());
        let in_block = |block: usize| {
            let read = flags.read_at(&mut words, (block * frames * 8) as u64).unwrap();
            let words = words[..read].chunks_exact(8);
            words
                .filter(|word| u64::from_ne_bytes((*word).try_into().unwrap()) & KPF_PGTABLE != 0)
                .count()
        };
        blocks.map(in_block).sum::<usize>() as i64
    };
    let all: BTreeMap<NodeId, i64> =
        on_nodes::with_memory().iter().map(|node| (*node, pages(node))).collect();
    assert!(!in_lab() || all.values().any(|pages| *pages > 0), "{all:?}");
    all
}

#[test]
fn the_account_agrees_with_the_kernel_for_base_pages() {
    run_cases("the_account_agrees_with_the_kernel_for_base_pages", PageSize::Base, BASE);
}

#[test]
fn the_account_agrees_with_the_kernel_for_transparent_huge_pages() {
    run_cases("the_account_agrees_with_the_kernel_for_transparent_huge_pages", PageSize::Thp, HUGE);
}

/// Writes rising values to random words of its own, one in each `WRITERS`, and waits for the others
/// after the first. Returns the last ones.
fn write(region: &Region, writer: usize, begun: &Barrier, stop: &AtomicBool) -> Vec<u64> {
    let words = region.atomics_u64(0..region.len()).unwrap();
    // Touched now: page tables of this memory would count, too.
    let mut last = vec![NEVER; words.len() / WRITERS];
    let mut random = Random::new(writer as u64 + 1);
    for value in 1.. {
        if stop.load(Relaxed) {
            break;
        }
        let at = random.below(last.len() as u64) as usize;
        words[at * WRITERS + writer].store(value, Relaxed);
        last[at] = value;
        if value == 1 {
            begun.wait();
        }
    }
    last
}

const WRITERS: usize = 2;
/// In place of the last value of a word that nobody has written.
const NEVER: u64 = u64::MAX;

#[test]
fn page_tables_move_between_all_pairs_of_nodes_under_writers() {
    const NAME: &str = "page_tables_move_between_all_pairs_of_nodes_under_writers";
    let _turn = turn();
    let nodes = with_both();
    let by_node = is_root() && nodes.len() > 1;
    if !by_node {
        skip(&format!("{NAME} (by node)"), &"one node, or only root could see the counters");
    }
    let pool = Pool::builder(nodes[0], BYTES as u64).build().unwrap();
    let region = Region::new(&pool, BYTES).unwrap();
    let kept = Kept::of(&region);
    let pairs = nodes.iter().flat_map(|from| nodes.iter().map(move |to| [*from, *to]));
    let pairs: Vec<_> = pairs.filter(|[from, to]| from != to || nodes.len() == 1).collect();
    let (stop, begun) = (AtomicBool::new(false), Barrier::new(WRITERS + 1));
    let move_to = |node| {
        let report = PageTableMigration::new(&region, 0..BYTES, node).anew().run().unwrap();
        assert_eq!(report.pages.migrated, (BYTES / 4096) as u64, "{report}");
    };
    let last = std::thread::scope(|scope| {
        let stop_all = StopOnDrop(&stop);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (region, begun, stop) = (&region, &begun, &stop);
                scope.spawn(move || write(region, writer, begun, stop))
            })
            .collect();
        begun.wait();
        for [from, to] in pairs {
            move_to(from);
            let before = if by_node { in_meminfo() } else { BTreeMap::new() };
            move_to(to);
            let after = if by_node { in_meminfo() } else { BTreeMap::new() };
            for (node, pages) in before {
                let wanted = 32 * (i64::from(node == to) - i64::from(node == from));
                let found = after[&node] - pages;
                let what = format!("from {from} to {to}: {found} pages more on {node}");
                assert!((found - wanted).abs() <= 2 * STRAY, "{what} instead of {wanted}");
            }
        }
        drop(stop_all);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect::<Vec<_>>()
    });
    let words = region.atomics_u64(0..BYTES).unwrap();
    let value = |i: usize| match last[i % WRITERS][i / WRITERS] {
        NEVER => 0,
        value => value,
    };
    let lost = words.iter().enumerate().filter(|(i, word)| word.load(Relaxed) != value(*i)).count();
    let written = last.iter().flatten().filter(|value| **value != NEVER).count();
    assert_eq!(lost, 0, "LOST {lost} of {written} words");
    kept.check(&region);
}

/// A page of PMDs moves if the region has all of its GB. The kernel counts so few of them that other
/// processes could hide one, so it moves many times.
#[test]
fn the_second_level_moves_with_a_whole_gigabyte() {
    const NAME: &str = "the_second_level_moves_with_a_whole_gigabyte";
    const MOVES: i64 = 16;
    let _turn = turn();
    let nodes = first_and_last();
    let pool = match Pool::builder(nodes[1], CAPACITY as u64).page_size(PageSize::Thp).build() {
        Ok(pool) => pool,
        Err(error) => return skip_page_size(NAME, PageSize::Thp, error),
    };
    let region = Region::new(&pool, CAPACITY).unwrap();
    stamp(&region, 0..CAPACITY, 1);
    let kept = Kept::of(&region);
    let by_node = is_root() && nodes[0] != nodes[1];
    let counts = || if by_node { in_meminfo() } else { BTreeMap::new() };
    let mut moved = 0;
    for i in 0..MOVES {
        let (from, to) = (nodes[(i + 1) as usize % 2], nodes[i as usize % 2]);
        let before = counts();
        let migration = PageTableMigration::new(&region, 0..CAPACITY, to);
        let report = migration.anew().run().unwrap();
        assert_eq!((report.pages.migrated, report.bytes_copied), (512, 0), "{report}");
        let tables = region.page_tables();
        assert_eq!(tables.asked_on(PageTableLevel::Pmd, to), 1, "{tables}");
        assert_eq!(tables.total(PageTableLevel::Pmd), 1, "{tables}");
        let after = counts();
        if by_node {
            moved += (after[&to] - before[&to]) + (before[&from] - after[&from]);
        }
    }
    check_stamp(&region, 0..CAPACITY, 1);
    kept.check(&region);
    let huge = region.mapped_pages().unwrap();
    assert!(huge.huge_mapped_ratio > 0.999, "{huge:?}");
    // The first one may have come from its node before.
    println!("{moved} pages have come or gone with {MOVES} moves");
    assert!(!by_node || moved >= 2 * (MOVES - 1) - STRAY, "{moved} with {MOVES} moves");
    // Not a whole GB.
    let report = region.move_page_tables(0..CAPACITY / 2, nodes[0]).unwrap().wait();
    assert_eq!((report.pages.migrated, report.pages.unchanged), (0, 256), "{report}");
}

#[test]
fn the_account_agrees_with_the_kernel_for_hugetlb_pages() {
    run_cases("the_account_agrees_with_the_kernel_for_hugetlb_pages", PageSize::Huge2M, HUGE);
}
