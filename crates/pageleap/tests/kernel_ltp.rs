//! Counterparts of the cases that the Linux Test Project has for `move_pages` and `migrate_pages`.
//! `docs/processes.md` has the table: some are tests of `kernel` and of `crates/capi/tests`.

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
use std::path::Path;

use common::{End, become_nobody, case, is_root, run_case, set_dumpable, skip, soon};
use machine_settings::Merging;
use mapping::Mapping;
use moved::{Child, all_migrated, outcomes, run};
use nodes::{lab_machine, several, with_memory};
use pageleap::process::{ProcessMemory, own_pid};
use pageleap::{
    BASE_PAGE, KernelMigration, NodeId, PageStatus, Reason, move_pages, process::nodes_of_pages,
};

const HUGE: usize = 2 << 20;

/// The statuses of a list whose pages all go to one node.
fn list_to(pid: u32, pages: &[usize], node: NodeId, shared: bool) -> Vec<PageStatus> {
    move_pages(pid, pages, Some(&vec![node; pages.len()]), shared).unwrap()
}

fn there(node: NodeId, pages: usize) -> Vec<PageStatus> {
    vec![PageStatus { node: Some(node), reason: None }; pages]
}

/// Pages of this process on `node` that are mapped more than once and stay for that reason.
fn shared(node: NodeId, pages: usize) -> Vec<PageStatus> {
    vec![PageStatus { node: Some(node), reason: Some(Reason::Shared) }; pages]
}

#[test]
fn a_list_tells_nodes_moves_and_leaves_what_is_there() {
    const NAME: &str = "a_list_tells_nodes_moves_and_leaves_what_is_there";
    let Some(nodes) = several(NAME) else { return };
    let halves = [nodes[0], nodes[1]].map(|node| {
        let half = Mapping::own(4 * BASE_PAGE);
        half.fill(node);
        half
    });
    let pages: Vec<usize> = halves.iter().flat_map(Mapping::pages).collect();
    let before = [there(nodes[0], 4), there(nodes[1], 4)].concat();
    assert_eq!(move_pages(0, &pages, None, false).unwrap(), before);
    // Twice: at the second time all are there.
    for _ in 0..2 {
        assert_eq!(list_to(0, &pages, nodes[1], false), there(nodes[1], 8));
        assert_eq!(nodes_of_pages(own_pid().unwrap(), &pages).unwrap(), [Some(nodes[1]); 8]);
    }
    halves.iter().for_each(Mapping::check);
}

#[test]
fn the_node_after_the_last_one_is_no_node() {
    let mapping = Mapping::own(2 * BASE_PAGE);
    let nodes = with_memory();
    let (first, none) = (nodes[0], NodeId(nodes[nodes.len() - 1].0 + 1));
    mapping.fill(first);
    let pages: Vec<usize> = mapping.pages().collect();
    let status = move_pages(0, &pages, Some(&[none, first]), false).unwrap();
    assert_eq!((status[0].node, status[0].code()), (Some(first), -libc::ENODEV));
    assert_eq!(status[1..], there(first, 1));
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let error = KernelMigration::new().range(&memory, mapping.range(), none).start().unwrap_err();
    assert!(error.is_usage() && error.to_string().contains(&none.0.to_string()), "{error}");
    mapping.check();
}

#[test]
fn addresses_that_no_program_has_are_told_as_such() {
    let mapping = Mapping::own(BASE_PAGE);
    let node = with_memory()[0];
    mapping.fill(node);
    // Below `vm.mmap_min_addr`, at the ends of both halves of the address space, and between them.
    let half = 1usize << 47;
    let wild = [
        0,
        1,
        half - 1,
        half,
        1 << 63,
        !half,
        usize::MAX - half + 1,
        usize::MAX - 4095,
        usize::MAX,
    ];
    let pages: Vec<usize> = wild.into_iter().chain([mapping.start]).collect();
    for nodes in [None, Some(vec![node; pages.len()])] {
        let found = move_pages(0, &pages, nodes.as_deref(), false).unwrap();
        let (last, nowhere) = found.split_last().unwrap();
        for (page, status) in pages.iter().zip(nowhere) {
            assert_eq!(status.reason, Some(Reason::Unmapped), "{page:#x}");
            assert_eq!((status.node, status.code()), (None, -libc::EFAULT), "{page:#x}");
        }
        assert_eq!([*last], there(node, 1)[..]);
    }
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    for start in [0, half, 1 << 63, usize::MAX - half + 1, usize::MAX - (2 * BASE_PAGE - 1)] {
        let range = start..start + BASE_PAGE;
        let report = run(KernelMigration::new().range(&memory, range, node));
        let unmapped = ("Unchanged".to_owned(), Some(Reason::Unmapped.to_string()));
        assert_eq!(outcomes(&report), BTreeMap::from([(unmapped, 1)]), "{start:#x}: {report}");
    }
}

#[test]
fn pages_of_two_processes_move_for_root() {
    const NAME: &str = "pages_of_two_processes_move_for_root";
    let Some(nodes) = several(NAME) else { return };
    // The child has filled it. This process maps it as well.
    let child = Child::new(4 * BASE_PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, nodes[0]);
    child.mapping.check();
    let pages: Vec<usize> = child.mapping.pages().collect();
    for pid in [0, child.pid()] {
        assert_eq!(list_to(pid, &pages, nodes[1], false), shared(nodes[0], 4));
    }
    if !is_root() {
        return skip(NAME, &"moving pages that two processes map needs CAP_SYS_NICE");
    }
    assert_eq!(list_to(0, &pages, nodes[1], true), there(nodes[1], 4));
    assert_eq!(list_to(child.pid(), &pages, nodes[0], true), there(nodes[0], 4));
    child.check();
}

#[test]
fn without_privileges_only_pages_of_one_process_of_the_same_user_move() {
    const NAME: &str = "without_privileges_only_pages_of_one_process_of_the_same_user_move";
    let Some(nodes) = several(NAME) else { return };
    if case().is_none() {
        let (end, output) = run_case(NAME, "nobody");
        assert_eq!(end, End::Exited(0), "{output}");
        return;
    }
    if is_root() {
        become_nobody();
        set_dumpable(true);
    }
    let own = Mapping::own(4 * BASE_PAGE);
    own.fill(nodes[0]);
    let pages: Vec<usize> = own.pages().collect();
    assert_eq!(list_to(0, &pages, nodes[1], false), there(nodes[1], 4));
    own.check();
    let child = Child::base(4 * BASE_PAGE, nodes[0]);
    all_migrated(&child.move_to(nodes[1]), 4);
    let pages: Vec<usize> = child.mapping.pages().collect();
    assert_eq!(list_to(child.pid(), &pages, nodes[0], false), there(nodes[0], 4));
    child.check();
    let both = Child::new(4 * BASE_PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, nodes[0]);
    both.mapping.check();
    let pages: Vec<usize> = both.mapping.pages().collect();
    assert_eq!(list_to(0, &pages, nodes[1], false), shared(nodes[0], 4));
    let error = move_pages(0, &pages, Some(&[nodes[1]; 4]), true).unwrap_err().to_string();
    assert!(error.contains("CAP_SYS_NICE"), "{error}");
    let asked = move_pages(0, &pages, None, false).unwrap();
    assert_eq!(asked, there(nodes[0], 4), "pages have moved without a privilege");
}

#[test]
fn merged_pages_move_for_root_and_stay_merged() {
    const NAME: &str = "merged_pages_move_for_root_and_stay_merged";
    const PAGES: usize = 20;
    if lab_machine(NAME).is_none() {
        return;
    }
    let Some(nodes) = several(NAME) else { return };
    if !is_root() {
        return skip(NAME, &"starting the kernel's thread that merges pages needs root");
    }
    let mapping = Mapping::own(PAGES * BASE_PAGE);
    mapping.advise(libc::MADV_MERGEABLE);
    mapping.fill(nodes[0]);
    let word = |page: usize| &mapping.words()[page * BASE_PAGE / 8];
    (0..PAGES).for_each(|page| word(page).store(7, std::sync::atomic::Ordering::Relaxed));
    let merging = match Merging::start() {
        Ok(merging) => merging,
        Err(error) => return skip(NAME, &error),
    };
    assert!(soon(|| Merging::pages() == PAGES), "{} of {PAGES} are merged", Merging::pages());
    // A page that the thread looks at is in use.
    merging.pause();
    let pages: Vec<usize> = mapping.pages().collect();
    let on = nodes_of_pages(own_pid().unwrap(), &pages).unwrap()[0].unwrap();
    let other = if on == nodes[0] { nodes[1] } else { nodes[0] };
    assert_eq!(list_to(0, &pages, other, false), shared(on, PAGES));
    for round in 0..10 {
        let to = if round % 2 == 0 { other } else { on };
        assert_eq!(list_to(0, &pages, to, true), there(to, PAGES), "round {round}");
    }
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let migration = KernelMigration::new().range(&memory, mapping.range(), other).shared(true);
    let report = run(migration);
    assert!(report.ended.is_completed() && report.pages.migrated > 0, "{report}");
    assert_eq!(mapping.on_nodes(), BTreeMap::from([(Some(other), PAGES)]), "{report}");
    assert_eq!(Merging::pages(), PAGES, "merged pages have become copies");
    for page in 0..PAGES {
        // The first one that is written is the only one that changes.
        let value = word(page).fetch_add(page as u64, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(value, 7, "LOST: page {page}");
    }
}

/// What a child does with pages of hugetlb while they move.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Against {
    Unmapping,
    /// The kernel moves their contents, and uses their frames no longer (`MADV_SOFT_OFFLINE`).
    TakingOutOfUse,
}

/// Exit codes of [`reuse`] other than 0: it has found other contents than it has written; the kernel
/// has refused what it asked for, with the error number that is added.
const LOST: i32 = 1;
const REFUSED: i32 = 2;

/// Maps pages of hugetlb, writes them, reads them and unmaps them, at one address in each round.
/// After the first round it tells `told` so and waits for `go_on`. Returns an exit code.
///
/// # Safety
/// For a child of `fork`, which may only make system calls. Nothing else is mapped in the range.
unsafe fn reuse(start: usize, len: usize, rounds: u64, against: Against, pipes: [i32; 2]) -> i32 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let flags = flags | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    for round in 0..rounds {
        let words = || (start..start + len).step_by(BASE_PAGE).map(|at| at as *mut u64);
        // SAFETY: memory of this function.
        unsafe {
            let mapped = libc::mmap(start as *mut _, len, access, flags, -1, 0);
            if mapped == libc::MAP_FAILED {
                // Pages of the round before are on their way, or it is the first one.
                if round == 0 {
                    return REFUSED + *libc::__errno_location();
                }
                continue;
            }
            words().for_each(|word| word.write_volatile(round + word as u64));
            let take_out = || {
                let kept = against == Against::Unmapping
                    || libc::madvise(start as *mut _, len, libc::MADV_SOFT_OFFLINE) == 0;
                if kept { 0 } else { *libc::__errno_location() }
            };
            if round == 0 {
                // Nothing moves them yet.
                match take_out() {
                    0 => {}
                    errno => return REFUSED + errno,
                }
                libc::write(pipes[0], b"x".as_ptr().cast(), 1);
                libc::read(pipes[1], [0u8].as_mut_ptr().cast(), 1);
            }
            match take_out() {
                // They move just now, or there is no page for their contents.
                0 | libc::EBUSY | libc::ENOMEM => {}
                errno => return REFUSED + errno,
            }
            if words().any(|word| word.read_volatile() != round + word as u64) {
                return LOST;
            }
            libc::munmap(start as *mut _, len);
        }
    }
    0
}

/// What the status of a page may say that did not move. EACCES is the answer of kernels before 6.7
/// for addresses within a page of hugetlb.
const KNOWN: [i32; 6] =
    [libc::ENOENT, libc::EFAULT, libc::EBUSY, libc::ENOMEM, libc::ESRCH, libc::EACCES];

/// Moves pages of hugetlb to and fro while a child does something else with them.
fn moves_reserved_pages(against: Against, rounds: u64) -> Result<(), String> {
    let nodes = with_memory();
    let (private, anonymous) = (libc::MAP_PRIVATE, libc::MAP_ANONYMOUS);
    // Only to have addresses that nothing else gets.
    let place = Mapping::new(2 * HUGE + HUGE, private | anonymous | libc::MAP_NORESERVE);
    let start = place.start.next_multiple_of(HUGE);
    let (mut told, mut go_on) = ([0; 2], [0; 2]);
    // SAFETY: the arrays have two descriptors. The child makes system calls only, on addresses that
    // nothing else uses, and never returns.
    let pid = unsafe {
        assert_eq!(libc::pipe2(told.as_mut_ptr(), libc::O_CLOEXEC), 0);
        assert_eq!(libc::pipe2(go_on.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let pid = libc::fork();
        if pid == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::close(told[0]);
            libc::_exit(reuse(start, 2 * HUGE, rounds, against, [told[1], go_on[0]]));
        }
        libc::close(told[1]);
        pid
    };
    let pages: Vec<usize> = (start..start + 2 * HUGE).step_by(BASE_PAGE).collect();
    let ready = || {
        // SAFETY: one byte of this function.
        let read = unsafe { libc::read(told[0], [0u8].as_mut_ptr().cast(), 1) };
        read == 1
    };
    let is_ready = ready();
    if is_ready {
        // Nothing disturbs the first move.
        let before = nodes_of_pages(pid as u32, &pages).unwrap()[0].unwrap();
        let to = *nodes.iter().find(|node| **node != before).unwrap();
        assert_eq!(list_to(pid as u32, &pages, to, true), there(to, pages.len()));
        let on = nodes_of_pages(pid as u32, &pages).unwrap();
        assert!(on.iter().all(|on| *on == Some(to)), "{on:?}");
    }
    // SAFETY: a byte of this function, and its descriptor.
    unsafe {
        libc::write(go_on[1], b"x".as_ptr().cast(), 1);
        libc::close(go_on[1]);
    }
    let (mut status, mut moves) = (0, 0);
    // SAFETY: a child that nobody else waits for.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == 0 {
        let to = nodes[moves % 2];
        let nodes = vec![to; pages.len()];
        // It may end at any time.
        let Ok(found) = move_pages(pid as u32, &pages, Some(&nodes), true) else { continue };
        moves += 1;
        for status in found {
            let code = status.code();
            assert!(code >= 0 || KNOWN.contains(&-code), "{status:?} is {code}");
            assert!(code < 0 || status.node == Some(to), "{status:?}, but it was to be on {to}");
        }
    }
    // SAFETY: descriptors of this function.
    unsafe {
        libc::close(told[0]);
        libc::close(go_on[0]);
    }
    assert!(libc::WIFEXITED(status), "{against:?}: the child was killed: {status:#x}");
    let refused = libc::WEXITSTATUS(status) - REFUSED;
    match refused {
        libc::ENOMEM if !is_ready => Err("there are too few free reserved huge pages".into()),
        1.. => panic!("{against:?}: {}", std::io::Error::from_raw_os_error(refused)),
        _ => {
            assert_eq!(status, 0, "LOST");
            Ok(())
        }
    }
}

#[test]
fn reserved_huge_pages_move_while_they_are_unmapped() {
    const NAME: &str = "reserved_huge_pages_move_while_they_are_unmapped";
    if several(NAME).is_none() {
        return;
    }
    if !is_root() {
        return skip(NAME, &"the case moves pages as those that several processes map, as root");
    }
    if let Err(why) = moves_reserved_pages(Against::Unmapping, 200) {
        skip(NAME, &why);
    }
}

#[test]
fn reserved_huge_pages_move_while_they_are_taken_out_of_use() {
    const NAME: &str = "reserved_huge_pages_move_while_they_are_taken_out_of_use";
    // The frames are lost until the machine is booted again.
    if lab_machine(NAME).is_none() || several(NAME).is_none() {
        return;
    }
    if !is_root() {
        return skip(NAME, &"taking pages out of use needs CAP_SYS_ADMIN");
    }
    if !Path::new("/proc/sys/vm/memory_failure_recovery").exists() {
        return skip(NAME, &"the kernel is built without CONFIG_MEMORY_FAILURE");
    }
    let pools = with_memory().into_iter().map(|node| {
        let page = "hugepages/hugepages-2048kB/nr_hugepages";
        let path = format!("/sys/devices/system/node/node{}/{page}", node.0);
        (fs::read_to_string(&path).unwrap(), path)
    });
    let pools: Vec<(String, String)> = pools.collect();
    let moved = moves_reserved_pages(Against::TakingOutOfUse, 20);
    // A page without a frame has left the pool.
    pools.iter().for_each(|(before, path)| fs::write(path, before.trim()).unwrap());
    if let Err(why) = moved {
        skip(NAME, &why);
    }
}
