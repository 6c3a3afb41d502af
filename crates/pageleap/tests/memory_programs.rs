//! Memory in place in programs that do more with it than to store and load: collectors of garbage
//! that protect it, tables that grow and fork, memory that the kernel merges.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use common::{
    End, Random, StopOnDrop, case, in_lab, nodes as two_nodes, own_mappings, rest, run_case, skip,
    soon, status_kb, turn,
};
use in_place::{KINDS, memory, migration, moved, oracle_time, pages_of, why_not};
use machine_settings::Merging;
use mapping::{Mapping, nodes_of, on_node};
use nodes::{bytes_on_nodes, lab_machine};
use pageleap::process::own_pid;
use pageleap::{BASE_PAGE, Ended, MemoryMigration, NodeId, PageSize, Reason, Report};
use pageleap_sys::{UffdMessage, uffd_mode};

const READ: i32 = libc::PROT_READ;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Skips a test where pages stay where they are: the kernel alone moves them between nodes only.
fn can_move(test: &str) -> bool {
    let [a, b] = two_nodes();
    let why_not = if a == b { why_not() } else { None };
    why_not.inspect(|error| skip(test, error)).is_none()
}

/// Leaps a mapping to the second node, and the next time to the first one. On a machine with one
/// node, pages get other frames of it.
fn to_other_node(mapping: &Mapping, leaps: usize) -> Report {
    let [a, b] = two_nodes();
    let to = if leaps.is_multiple_of(2) { b } else { a };
    migration(mapping, to).renew(a == b).start().unwrap().wait()
}

// Collectors
// ------------------------------------------------------------------------------------------------

/// Where the collector's heap lies, for the signal handler.
static HEAP: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Accesses that met a protected page.
static BARRIERS: AtomicU64 = AtomicU64::new(0);

/// The collector's barrier: lets a thread at the page that it has touched.
extern "C" fn barrier(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel has filled the structure.
    let at = unsafe { (*info).si_addr() } as usize;
    let page = at / BASE_PAGE * BASE_PAGE;
    let [start, end] = HEAP.each_ref().map(|place| place.load(Relaxed));
    // SAFETY: the calls are safe in a handler. The page is the collector's.
    unsafe {
        if !(start..end).contains(&at) {
            // The access is repeated, and ends the process.
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        } else if libc::mprotect(page as *mut _, BASE_PAGE, READ_WRITE) != 0 {
            libc::abort();
        }
    }
    BARRIERS.fetch_add(1, Relaxed);
}

/// Makes [`barrier`] work on this heap. For a process of its own.
fn set_barrier(heap: &Mapping) {
    HEAP[0].store(heap.start, Relaxed);
    HEAP[1].store(heap.start + heap.len, Relaxed);
    // SAFETY: a zeroed structure is valid, and the handler does what handlers may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = barrier as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Protects runs of pages, as a collector does to learn who writes to them, or who touches them.
fn collector(heap: &Mapping, access: i32, stop: &AtomicBool) {
    let mut random = Random::new(5);
    let pages = (heap.len / BASE_PAGE) as u64;
    while !stop.load(Relaxed) {
        let first = random.below(pages);
        let count = (random.below(64) + 1).min(pages - first);
        let at = heap.start + first as usize * BASE_PAGE;
        // SAFETY: the heap is the collector's. Who touches the pages comes to the barrier.
        let refused =
            unsafe { libc::mprotect(at as *mut _, count as usize * BASE_PAGE, access) != 0 };
        assert!(!refused, "{}", std::io::Error::last_os_error());
        rest();
    }
}

/// Stores rising values in words of its own, each second one, and returns the last ones.
fn mutator(words: &[AtomicU64], owner: usize, stop: &AtomicBool) -> Vec<u64> {
    let (mut random, mut last) = (Random::new(owner as u64 + 1), vec![0; words.len() / 2]);
    let mut value = 0;
    while !stop.load(Relaxed) {
        for _ in 0..64 {
            let mine = random.below(last.len() as u64) as usize;
            let word = &words[2 * mine + owner];
            let kept = word.load(Relaxed);
            assert_eq!(kept, last[mine], "LOST: word {}", 2 * mine + owner);
            value += 1;
            word.store(value, Relaxed);
            last[mine] = value;
        }
        rest();
    }
    last
}

/// Leaps `leaping` again and again while a collector protects parts of `heap`, which may be the
/// same, and two threads use it.
fn collect(heap: &Mapping, leaping: &Mapping, access: i32) {
    set_barrier(heap);
    let words = heap.words();
    words.iter().for_each(|word| word.store(0, Relaxed));
    let stop = AtomicBool::new(false);
    let (mut leaps, mut pages, mut stayed) = (0, 0, 0);
    let barriers = BARRIERS.load(Relaxed);
    let last = std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || collector(heap, access, stop));
        let mutators = [0, 1].map(|owner| scope.spawn(move || mutator(words, owner, stop)));
        let end = StopOnDrop(stop);
        let began = Instant::now();
        let met = |pages| pages > 0 && BARRIERS.load(Relaxed) > barriers;
        while began.elapsed() < oracle_time() || leaps < 2 || !met(pages) {
            let report = to_other_node(leaping, leaps);
            assert!(matches!(report.ended, Ended::Completed | Ended::Failed(_)), "{report}");
            let gone = pages_of(&report, |_, reason| reason == Some(Reason::Unmapped));
            assert_eq!(gone, 0, "{report}");
            let all = pages_of(&report, |_, _| true);
            assert_eq!(all, (leaping.len / BASE_PAGE) as u64, "{report}");
            leaps += 1;
            pages += moved(&report);
            stayed += all - moved(&report);
        }
        drop(end);
        mutators.map(|mutator| mutator.join().unwrap())
    });
    for (at, word) in words.iter().enumerate() {
        assert_eq!(word.load(Relaxed), last[at % 2][at / 2], "LOST: word {at}");
    }
    let barriers = BARRIERS.load(Relaxed) - barriers;
    println!("{leaps} leaps moved {pages} pages, {stayed} stayed; {barriers} barriers, 0 lost");
}

/// The contract excludes it: pages of protected mappings stay, or move by the kernel. Nothing is
/// lost.
#[test]
fn a_collector_that_protects_its_heap_loses_nothing() {
    const NAME: &str = "a_collector_that_protects_its_heap_loses_nothing";
    if case().is_none() {
        let _turn = turn();
        if can_move(NAME) {
            let (end, output) = run_case(NAME, "alone");
            println!("{output}");
            assert_eq!(end, End::Exited(0), "{output}");
        }
        return;
    }
    for page in KINDS {
        for access in [READ, libc::PROT_NONE] {
            let heap = memory(4 << 20, page);
            println!("{page} pages, access {access}:");
            collect(&heap, &heap, access);
        }
    }
}

/// Gives pages of a mapping back and reads them again, and they come from the program's own
/// userfaultfd. Returns how often they came.
fn served_by_the_program(mapping: &Mapping, stop: &AtomicBool) -> u64 {
    let own = pageleap_sys::userfaultfd(false).unwrap();
    pageleap_sys::uffd_handshake(own.as_fd(), 0).unwrap();
    // SAFETY: the thread below serves the range.
    unsafe {
        pageleap_sys::uffd_register(own.as_fd(), mapping.start, mapping.len, uffd_mode::MISSING)
    }
    .unwrap();
    let (over, own) = (AtomicBool::new(false), own.as_fd());
    std::thread::scope(|scope| {
        let over = &over;
        let server = scope.spawn(move || {
            let mut served = 0;
            let handle = &mut |message| {
                let UffdMessage::Fault(at) = message else { return };
                let page = at / BASE_PAGE * BASE_PAGE;
                let contents = [page; BASE_PAGE / size_of::<usize>()];
                let from = contents.as_ptr() as usize;
                // SAFETY: a hole of the mapping, filled from a variable.
                let filled = unsafe { pageleap_sys::uffd_copy(own, page, from, BASE_PAGE) };
                assert_eq!(filled, (BASE_PAGE, None));
                pageleap_sys::uffd_wake(own, page, BASE_PAGE).unwrap();
                served += 1;
            };
            while !over.load(Relaxed) {
                if !pageleap_sys::uffd_read(own, handle) {
                    rest();
                }
            }
            served
        });
        let end = StopOnDrop(over);
        let mut random = Random::new(3);
        loop {
            let page = mapping.start + random.below(256) as usize * BASE_PAGE;
            // SAFETY: a page of the mapping.
            let value = unsafe {
                libc::madvise(page as *mut _, BASE_PAGE, libc::MADV_DONTNEED);
                (page as *const usize).add(511).read_volatile()
            };
            assert_eq!(value, page, "LOST: the program's page did not come");
            if stop.load(Relaxed) {
                break;
            }
        }
        drop(end);
        server.join().unwrap()
    })
}

/// One that protects, and one that serves missing pages by a userfaultfd.
#[test]
fn collectors_elsewhere_are_not_disturbed() {
    const NAME: &str = "collectors_elsewhere_are_not_disturbed";
    if case().is_none() {
        let _turn = turn();
        if can_move(NAME) {
            let (end, output) = run_case(NAME, "alone");
            println!("{output}");
            assert_eq!(end, End::Exited(0), "{output}");
        }
        return;
    }
    let (heap, served) = (memory(4 << 20, PageSize::Base), memory(1 << 20, PageSize::Base));
    let leaping = memory(16 << 20, PageSize::Base);
    leaping.fill(two_nodes()[0]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| served_by_the_program(&served, &stop));
        let end = StopOnDrop(&stop);
        collect(&heap, &leaping, READ);
        drop(end);
        let times = server.join().unwrap();
        println!("{times} pages came from the program's userfaultfd");
        assert!(times > 0);
    });
    leaping.check();
}

// What the kernel does with pages
// ------------------------------------------------------------------------------------------------

#[test]
fn merged_pages_stay_until_they_are_written() {
    const NAME: &str = "merged_pages_stay_until_they_are_written";
    let _turn = turn();
    if lab_machine(NAME).is_none() || !can_move(NAME) {
        return;
    }
    let mapping = memory(1 << 20, PageSize::Base);
    let (words, half) = (mapping.words(), mapping.len / BASE_PAGE / 2);
    let first_word = |page: usize| &words[page * BASE_PAGE / 8];
    // Pages of the first half differ, and those of the second half are alike.
    let value = |page: usize| page.min(half) as u64 + 1;
    on_node(two_nodes()[0], || {
        (0..2 * half).for_each(|page| first_word(page).store(value(page), Relaxed));
    });
    let merging = match Merging::start() {
        Ok(merging) => merging,
        Err(error) => return skip(NAME, &error),
    };
    mapping.advise(libc::MADV_MERGEABLE);
    assert!(soon(|| Merging::pages() == half), "{} of {half} pages are merged", Merging::pages());
    let report = to_other_node(&mapping, 0);
    let shared = pages_of(&report, |_, reason| reason == Some(Reason::Shared));
    assert_eq!((shared, moved(&report)), (half as u64, half as u64), "{report}");
    for page in 0..2 * half {
        assert_eq!(first_word(page).load(Relaxed), value(page), "LOST: page {page}");
    }
    assert_eq!(Merging::pages(), half, "merged pages have become copies");
    drop(merging);
    (half..2 * half).for_each(|page| first_word(page).store(page as u64 + 1, Relaxed));
    let report = to_other_node(&mapping, 1);
    assert_eq!(moved(&report), 2 * half as u64, "{report}");
    for page in 0..2 * half {
        assert_eq!(first_word(page).load(Relaxed), page as u64 + 1, "LOST: page {page}");
    }
}

// A table
// ------------------------------------------------------------------------------------------------

/// The table of a program, in parts, each behind a lock.
struct Table(Vec<RwLock<HashMap<u64, Vec<u64>>>>);

const PARTS: u64 = 16;
const KEYS: u64 = 20_000;
const WRITERS: u64 = 2;
const READERS: u64 = 2;

impl Table {
    fn new() -> Table {
        let values = |key| (key, values_of(key, 0, key % 40));
        let part = |part| (part..KEYS).step_by(PARTS as usize).map(values).collect();
        Table((0..PARTS).map(|number| RwLock::new(part(number))).collect())
    }

    fn part_of(&self, key: u64) -> &RwLock<HashMap<u64, Vec<u64>>> {
        &self.0[(key % PARTS) as usize]
    }

    /// Whether what a part has is whole. Allocates nothing: children of a process with threads
    /// must not.
    fn is_whole(part: &HashMap<u64, Vec<u64>>, number: u64) -> bool {
        (number..KEYS).step_by(PARTS as usize).all(|key| match part.get(&key) {
            Some(values) => is_values_of(key, values),
            None => comes_and_goes(key),
        })
    }

    /// How many parts are whole that nobody holds; `None` if one is not whole.
    fn count_whole(&self) -> Option<u64> {
        let mut count = 0;
        for (part, number) in self.0.iter().zip(0..) {
            let Ok(part) = part.try_read() else { continue };
            if !Table::is_whole(&part, number) {
                return None;
            }
            count += 1;
        }
        Some(count)
    }

    /// The mappings in which the table's elements and their values lie.
    fn mappings(&self) -> Vec<Range<usize>> {
        let mut addresses = Vec::new();
        for part in &self.0 {
            for (key, values) in part.read().unwrap().iter() {
                addresses.extend([(&raw const *key).addr(), values.as_ptr().addr()]);
            }
        }
        addresses.sort_unstable();
        let has_some = |range: &Range<usize>| {
            let first = addresses.partition_point(|address| *address < range.start);
            addresses.get(first).is_some_and(|address| range.contains(address))
        };
        own_mappings().into_iter().filter(has_some).collect()
    }
}

/// The key, then some times the same number.
fn values_of(key: u64, version: u64, count: u64) -> Vec<u64> {
    let mut values = vec![version; count as usize + 2];
    values[0] = key;
    values
}

fn is_values_of(key: u64, values: &[u64]) -> bool {
    values[0] == key && values[1..].iter().all(|value| *value == values[1])
}

/// Whether writers remove this key sometimes.
fn comes_and_goes(key: u64) -> bool {
    key % 16 >= 14
}

/// Changes, replaces, removes and inserts values of its own keys. Returns for each the version that
/// it has now.
fn table_writer(table: &Table, number: u64, stop: &AtomicBool) -> HashMap<u64, u64> {
    let mut random = Random::new(number + 1);
    let mut versions = HashMap::new();
    let mut version = 0;
    while !stop.load(Relaxed) {
        for _ in 0..100 {
            let key = random.below(KEYS / WRITERS) * WRITERS + number;
            version += 1;
            let mut part = table.part_of(key).write().unwrap();
            match random.below(4) {
                0 if comes_and_goes(key) => {
                    part.remove(&key);
                    versions.remove(&key);
                    continue;
                }
                // Longer or shorter, in other memory.
                1 => drop(part.insert(key, values_of(key, version, random.below(400)))),
                2 => {
                    let values = part.entry(key).or_insert_with(|| values_of(key, version, 0));
                    values[1..].fill(version);
                    values.push(version);
                }
                _ => match part.get_mut(&key) {
                    Some(values) => values[1..].fill(version),
                    None => continue,
                },
            }
            versions.insert(key, version);
        }
        rest();
    }
    versions
}

fn table_reader(table: &Table, number: u64, stop: &AtomicBool) -> u64 {
    let (mut random, mut reads) = (Random::new(50 + number), 0);
    while reads == 0 || !stop.load(Relaxed) {
        let part = random.below(PARTS);
        assert!(Table::is_whole(&table.0[part as usize].read().unwrap(), part), "LOST: {part}");
        reads += 1;
        rest();
    }
    reads
}

/// Forks children that verify all parts that no thread held at that moment.
fn table_forker(table: &Table, stop: &AtomicBool) -> u64 {
    let mut children = 0;
    while children == 0 || !stop.load(Relaxed) {
        // SAFETY: the child reads memory, and ends by a system call.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            let whole = table.count_whole().unwrap_or(0);
            // SAFETY: ends the child.
            unsafe { libc::_exit(whole as i32) };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "a child was killed: {status:#x}");
        // A thread holds one part at most.
        let whole = libc::WEXITSTATUS(status) as u64;
        assert!(whole >= PARTS - WRITERS - READERS, "LOST: a child has seen {whole} parts");
        children += 1;
        // Pages that a child shares do not move.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    children
}

/// Leaps the mappings of a table, by all engines.
fn leap_table(mappings: &[Range<usize>], to: NodeId) -> Report {
    let all = mappings.iter().fold(MemoryMigration::new(), |all, range| {
        // SAFETY: what lives in a heap stays where it is, and the test waits for the job.
        unsafe { all.range(range.start as *mut u8, range.len(), to) }
    });
    let [a, b] = two_nodes();
    all.renew(a == b).start().unwrap().wait()
}

/// A program whose table leaps with all else that the allocator has, and what the library itself
/// takes from it.
#[test]
fn a_table_leaps_while_threads_use_it_and_fork() {
    const NAME: &str = "a_table_leaps_while_threads_use_it_and_fork";
    const LEAPS: usize = 20;
    let _turn = turn();
    if !can_move(NAME) {
        return;
    }
    let [a, b] = two_nodes();
    let mut table = None;
    on_node(a, || table = Some(Table::new()));
    let table = table.unwrap();
    let stop = AtomicBool::new(false);
    let (mut pages, mut children, mut reads) = (0, 0, 0);
    let mut versions = HashMap::new();
    std::thread::scope(|scope| {
        let (table, stop) = (&table, &stop);
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| scope.spawn(move || table_writer(table, number, stop)))
            .collect();
        let readers: Vec<_> = (0..READERS)
            .map(|number| scope.spawn(move || table_reader(table, number, stop)))
            .collect();
        let forker = scope.spawn(move || table_forker(table, stop));
        let end = StopOnDrop(stop);
        let mut leaps = 0;
        // Pages that a child shares stay.
        while leaps < LEAPS || pages == 0 {
            let report = leap_table(&table.mappings(), [b, a][leaps % 2]);
            assert!(matches!(report.ended, Ended::Completed | Ended::Failed(_)), "{report}");
            pages += moved(&report);
            leaps += 1;
        }
        drop(end);
        for writer in writers {
            versions.extend(writer.join().unwrap());
        }
        reads = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        children = forker.join().unwrap();
    });
    let check = || {
        assert_eq!(table.count_whole(), Some(PARTS), "LOST");
        for key in 0..KEYS {
            let part = table.part_of(key).read().unwrap();
            let found = part.get(&key).map(|values| values[1]);
            let gone = comes_and_goes(key) && !versions.contains_key(&key);
            let expected = versions.get(&key).copied().or_else(|| (!gone).then_some(0));
            assert!(found == expected || gone && found == Some(0), "LOST: {key}");
        }
    };
    check();
    println!("{LEAPS} leaps moved {pages} pages; {children} children, {reads} reads, 0 lost");
    quiet_leaps(&table.mappings());
    check();
}

/// Nobody else uses the mappings: all their pages move, and page tables do not grow.
fn quiet_leaps(mappings: &[Range<usize>]) {
    const LEAPS: usize = 40;
    let [a, b] = two_nodes();
    let report = leap_table(mappings, b);
    assert!(report.ended.is_completed(), "{report}");
    if a != b {
        let pages = mappings.iter().flat_map(|range| range.clone().step_by(BASE_PAGE)).collect();
        let mut on = nodes_of(own_pid().unwrap(), pages);
        on.remove(&None);
        assert_eq!(on.keys().collect::<Vec<_>>(), [&Some(b)], "by move_pages: {on:?} {report}");
        for range in mappings {
            let bytes = bytes_on_nodes(range);
            assert!(bytes.keys().all(|node| *node == b), "by numa_maps: {bytes:?} {report}");
        }
    }
    let before = page_table_pages();
    for leaps in 0..LEAPS {
        leap_table(mappings, [a, b][leaps % 2]);
    }
    let after = page_table_pages();
    println!("pages of page tables: {before:?}, after {LEAPS} leaps {after:?}");
    // A leap that left one page table behind would leave this many.
    assert!(after.iter().all(|(of, pages)| *pages < before[of] + LEAPS), "{before:?} {after:?}");
}

/// Pages of page tables: of this process, and in the lab, where nothing else runs, of each node.
fn page_table_pages() -> BTreeMap<String, usize> {
    let pages = |kb: usize| kb * 1024 / BASE_PAGE;
    let mut found = BTreeMap::from([("this process".to_owned(), pages(status_kb("VmPTE")))]);
    if in_lab() {
        // The kernel adds up what each CPU has counted.
        let _ = fs::read("/proc/sys/vm/stat_refresh");
        for node in nodes::with_memory() {
            let path = format!("/sys/devices/system/node/node{}/meminfo", node.0);
            let text = fs::read_to_string(path).unwrap();
            let kb = text.lines().find_map(|line| line.split_once("PageTables:")).unwrap().1;
            let kb = kb.split_whitespace().next().unwrap().parse().unwrap();
            found.insert(node.to_string(), pages(kb));
        }
    }
    found
}
