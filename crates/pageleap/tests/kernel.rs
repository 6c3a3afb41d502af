//! Memory that no pool owns, moved by the kernel: of this process, and of others.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/moved.rs"]
mod moved;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{End, become_nobody, case, in_lab, is_root, run_case, set_dumpable, skip};
use io_uring::IoUring;
use mapping::{Mapping, nodes_of, on_node};
use moved::{Child, all_migrated, outcomes, run};
use nodes::several;
use pageleap::process::{MappingKind, MappingMemory, ProcessMemory, own_pid};
use pageleap::{
    BASE_PAGE, Ended, Error, KernelMigration, Mode, NodeId, PageOutcome, PageRun, PageStatus,
    Placement, Reason, move_pages,
};

const HUGE: usize = 2 << 20;
const MS: Duration = Duration::from_millis(1);

/// What the system call itself says, without the library.
fn raw(pages: &[usize], nodes: &[i32]) -> Vec<i32> {
    let mut status = vec![-1000; pages.len()];
    // SAFETY: all arrays have the length that the call is told.
    unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            nodes.as_ptr(),
            status.as_mut_ptr(),
            2,
        )
    };
    status
}

/// A list of which every tenth page refuses: pinned by io_uring, shared with a child, absent, the
/// page of zeros, or sent to a node that there is not.
struct Tenth {
    pages: Vec<usize>,
    nodes: Vec<NodeId>,
    _kept: [Mapping; 4],
    ring: Option<IoUring>,
    /// Its pages are shared with a child.
    child: libc::pid_t,
    _shared: Mapping,
}

const LIST: usize = 1000;
const KINDS: usize = 5;

impl Tenth {
    fn new(from: NodeId, to: NodeId) -> Tenth {
        let part = LIST / 10 / KINDS * BASE_PAGE;
        let movable = Mapping::own(LIST * BASE_PAGE);
        movable.fill(from);
        let [pinned, absent, zero] = [0; 3].map(|_| Mapping::own(part));
        pinned.fill(from);
        for page in zero.pages() {
            // SAFETY: a word of the mapping. Only reading it maps the page of zeros.
            assert_eq!(unsafe { (page as *const u64).read_volatile() }, 0);
        }
        let shared = Mapping::new(part, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        shared.advise(libc::MADV_NOHUGEPAGE);
        shared.fill(from);
        let ring = IoUring::new(2).ok().filter(|ring| {
            let buffer = libc::iovec { iov_base: pinned.start as *mut _, iov_len: pinned.len };
            // SAFETY: the mapping lives as long as the ring, in one structure.
            unsafe { ring.submitter().register_buffers(&[buffer]) }.is_ok()
        });
        // SAFETY: the child makes system calls only.
        let child = unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
            pid
        };
        let (mut pages, mut nodes) = (Vec::new(), Vec::new());
        for at in 0..LIST {
            let of = |mapping: &Mapping, at: usize| mapping.start + at * BASE_PAGE;
            let nth = at / 10 / KINDS;
            nodes.push(to);
            pages.push(match (at % 10, at / 10 % KINDS) {
                (1.., _) => of(&movable, at),
                (_, 0) => of(&pinned, nth),
                (_, 1) => of(&shared, nth),
                (_, 2) => of(&absent, nth),
                (_, 3) => of(&zero, nth),
                _ => {
                    nodes[at] = NodeId(777);
                    of(&movable, at)
                }
            });
        }
        let _kept = [movable, pinned, absent, zero];
        Tenth { pages, nodes, _kept, ring, child, _shared: shared }
    }

    /// What must become of a page.
    fn wanted(&self, at: usize, from: NodeId, to: NodeId) -> PageStatus {
        let is = |node, reason| PageStatus { node, reason };
        match (at % 10, at / 10 % KINDS) {
            (1.., _) => is(Some(to), None),
            (_, 0) if self.ring.is_none() => is(Some(to), None),
            (_, 0) => is(Some(from), Some(Reason::InUse)),
            (_, 1) => is(Some(from), Some(Reason::Shared)),
            (_, 2) => is(None, Some(Reason::Absent)),
            (_, 3) => is(None, Some(Reason::ZeroPage)),
            _ => {
                let call = pageleap::backend::Call::MovePages;
                let errno = pageleap::backend::Errno(libc::ENODEV);
                is(Some(from), Some(Reason::Refused(call, errno)))
            }
        }
    }
}

impl Drop for Tenth {
    fn drop(&mut self) {
        // SAFETY: a child of this test that nobody has waited for.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, std::ptr::null_mut(), 0);
        }
    }
}

#[test]
fn exactly_those_pages_of_a_list_stay_that_refuse() {
    const NAME: &str = "exactly_those_pages_of_a_list_stay_that_refuse";
    let Some(nodes) = several(NAME) else { return };
    let [from, to] = [nodes[0], nodes[1]];
    let list = Tenth::new(from, to);
    let found = move_pages(0, &list.pages, Some(&list.nodes), false).unwrap();
    for (at, status) in found.iter().enumerate() {
        assert_eq!(*status, list.wanted(at, from, to), "page {at}");
    }
    // The same as `move_pages` tells it, but for all pages.
    let codes: Vec<i32> = found.iter().map(|status| status.code()).collect();
    let (to_code, busy) =
        (to.0 as i32, if list.ring.is_some() { -libc::EBUSY } else { to.0 as i32 });
    assert_eq!(codes[0..2], [busy, to_code]);
    assert_eq!(codes[10], -libc::EACCES);
    assert_eq!(codes[20], -libc::ENOENT);
    assert_eq!(codes[30], -libc::EFAULT);
    assert_eq!(codes[40], -libc::ENODEV);
    // Where they lie is what the kernel says when it is asked.
    let looked = move_pages(0, &list.pages, None, false).unwrap();
    assert!(looked.iter().zip(&found).all(|(looked, found)| looked.node == found.node));

    // The system call leaves most of such a list.
    let list = Tenth::new(from, to);
    let numbers: Vec<i32> = list.nodes.iter().map(|node| node.0 as i32).collect();
    let told = raw(&list.pages, &numbers).iter().filter(|status| **status != -1000).count();
    let moved = nodes_of(own_pid().unwrap(), list.pages.clone())[&Some(to)];
    assert!(moved < LIST / 10 && told < LIST / 10, "{moved} moved, {told} statuses");
}

#[test]
fn lists_are_checked_and_addresses_may_be_anywhere_in_a_page() {
    let mapping = Mapping::own(4 * BASE_PAGE);
    let node = ProcessMemory::read(own_pid().unwrap()).unwrap().allowed_nodes[0];
    on_node(node, || {
        // SAFETY: a word of the mapping.
        unsafe { (mapping.start as *mut u64).write_volatile(1) }
    });
    let found = move_pages(0, &[mapping.start + 77, 0x1000], Some(&[node, node]), false).unwrap();
    assert_eq!(found[0], PageStatus { node: Some(node), reason: None });
    assert_eq!(found[1], PageStatus { node: None, reason: Some(Reason::Unmapped) });
    assert_eq!(found[1].code(), -libc::EFAULT);
    assert!(move_pages(0, &[], None, false).unwrap().is_empty());
    let error = move_pages(0, &[0x1000], Some(&[]), false).unwrap_err();
    assert!(error.is_usage(), "{error}");
    let error = move_pages(u32::MAX >> 1, &[0x1000], None, false).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("no process"), "{error}");
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let node = memory.allowed_nodes[0];
    let refused = |migration: KernelMigration<'_>, part: &str| {
        let error = migration.start().unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(part), "{error}");
    };
    let stack = memory.mappings.iter().find(|m| m.kind == MappingKind::Stack).unwrap();
    let stack = stack.start..stack.end;
    let new = KernelMigration::new;
    refused(new(), "no range");
    refused(new().range(&memory, 1..BASE_PAGE, node), "whole pages");
    refused(new().range(&memory, 0..0, node), "whole pages");
    refused(new().range(&memory, stack.clone(), NodeId(777)), "777");
    refused(new().range(&memory, stack.clone(), Placement::interleave([])), "no node");
    refused(new().range(&memory, stack.clone(), node).batch_pages(0), "zero");
    refused(new().range(&memory, stack.clone(), node).rate_limit(0), "zero");
    refused(new().range(&memory, stack, node).max_call(Duration::ZERO), "zero");
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        let kernel = ProcessMemory::read(2).unwrap();
        refused(new().range(&kernel, 0..BASE_PAGE, node), "thread of the kernel");
    }
    // An engine of regions is something else.
    let error = "kernel".parse::<pageleap::EngineChoice>().unwrap_err();
    assert!(error.is_usage(), "{error}");
}

#[test]
fn what_cannot_move_is_told_by_page() {
    const NAME: &str = "what_cannot_move_is_told_by_page";
    if case().is_none() {
        // Other tests pin pages of this process.
        let (end, output) = run_case(NAME, "alone");
        assert_eq!(end, End::Exited(0), "{output}");
        return;
    }
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let node = memory.allowed_nodes[0];
    // All of the lower half of the address space: nearly all of it is not mapped.
    let report = run(KernelMigration::new().range(&memory, 0..1 << 47, node));
    assert_eq!(report.pages.total(), 1 << 35);
    assert_eq!(report.pages.busy + report.pages.failed + report.pages.not_attempted, 0);
    let reasons = outcomes(&report);
    let has = |reason: Reason| {
        reasons.keys().any(|(_, why)| why.as_deref() == Some(&*reason.to_string()))
    };
    assert!(has(Reason::Unmapped) && has(Reason::Unmovable) && has(Reason::Absent), "{reasons:?}");
}

#[test]
fn a_process_that_has_ended_is_an_error() {
    let node = ProcessMemory::read(own_pid().unwrap()).unwrap().allowed_nodes[0];
    let child = Child::base(BASE_PAGE, node);
    let memory = child.memory();
    let range = child.mapping.range();
    drop(child);
    let error = KernelMigration::new().range(&memory, range, node).start().unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
}

#[test]
fn another_user_needs_a_privilege_which_the_error_names() {
    const NAME: &str = "another_user_needs_a_privilege_which_the_error_names";
    if let Some(case) = case() {
        let pid: u32 = case.parse().unwrap();
        let memory = ProcessMemory::read(pid).unwrap();
        become_nobody();
        set_dumpable(true);
        let node = memory.allowed_nodes[0];
        let mapping = memory.mappings.iter().find(|m| m.kind == MappingKind::Stack).unwrap();
        let move_it = |shared| {
            let range = mapping.start..mapping.end;
            KernelMigration::new().range(&memory, range, node).shared(shared).start().map(drop)
        };
        let error = move_it(false).unwrap_err().to_string();
        assert!(error.contains("CAP_SYS_PTRACE"), "{error}");
        let error = move_it(true).unwrap_err().to_string();
        assert!(error.contains("CAP_SYS_NICE"), "{error}");
        let error = move_pages(pid, &[mapping.start], None, false).unwrap_err().to_string();
        assert!(error.contains("CAP_SYS_PTRACE"), "{error}");
        return;
    }
    if !is_root() {
        return skip(NAME, &"only root can make a process that another user may not change");
    }
    let mut child = Command::new("/bin/sleep").arg("1000").spawn().unwrap();
    let (end, output) = run_case(NAME, &child.id().to_string());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(end, End::Exited(0), "{output}");
}

#[test]
fn memory_of_another_process_moves_and_keeps_its_contents() {
    const NAME: &str = "memory_of_another_process_moves_and_keeps_its_contents";
    let Some(nodes) = several(NAME) else { return };
    let (private, anonymous) = (libc::MAP_PRIVATE, libc::MAP_ANONYMOUS);
    let hugetlb = libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    let cases = [
        ("base pages", private | anonymous, libc::MADV_NOHUGEPAGE),
        ("huge pages", private | anonymous, libc::MADV_HUGEPAGE),
        ("shared memory", libc::MAP_SHARED | anonymous, -1),
        ("reserved huge pages", private | anonymous | hugetlb, -1),
    ];
    for (what, flags, advice) in cases {
        let child = Child::new(8 * HUGE, flags, advice, nodes[0]);
        let pages = child.mapping.len / BASE_PAGE;
        for to in [nodes[1], nodes[0]] {
            let report = child.move_to(to);
            all_migrated(&report, pages);
            assert_eq!(child.on_nodes(), BTreeMap::from([(Some(to), pages)]), "{what}");
            child.check();
        }
        let report = child.move_to(nodes[0]);
        assert_eq!(report.pages.unchanged as usize, pages, "{what}: {report}");
        assert_eq!(report.calls.get("move_pages"), None, "{what}: {report}");
    }
}

#[test]
fn nothing_is_lost_that_threads_write_meanwhile() {
    const NAME: &str = "nothing_is_lost_that_threads_write_meanwhile";
    let Some(nodes) = several(NAME) else { return };
    let mapping = Mapping::new(16 * HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    mapping.advise(libc::MADV_HUGEPAGE);
    on_node(nodes[0], || {
        mapping.words().iter().step_by(512).for_each(|w| w.store(0, Ordering::Relaxed))
    });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let words = mapping.words();
            let (mut at, mut rounds) = (0, 0u64);
            while !stop.load(Ordering::Relaxed) {
                // Every 67th word: all pages in turns.
                at = (at + 67) % words.len();
                rounds += u64::from(at < 67);
                words[at].fetch_add(1, Ordering::Relaxed);
            }
            (at, rounds)
        });
        for leap in 0..6 {
            let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
            let to = nodes[(leap + 1) % 2];
            let report = run(KernelMigration::new().range(&memory, mapping.range(), to));
            assert!(report.ended.is_completed(), "{report}");
            assert!(report.pages.migrated > 0, "{report}");
            assert_eq!(mapping.on_nodes().keys().copied().collect::<Vec<_>>(), [Some(to)]);
        }
        stop.store(true, Ordering::Relaxed);
        let (end, _) = writer.join().unwrap();
        // The writer has gone round the same way: two neighbours on its way differ by one at most.
        let words = mapping.words();
        let order = (1..=words.len()).map(|step| (step * 67) % words.len());
        let counts: Vec<u64> = order.map(|at| words[at].load(Ordering::Relaxed)).collect();
        let falls = counts.windows(2).filter(|two| two[0] != two[1]).count();
        assert!(falls <= 1, "LOST: {falls} steps in the counts, the writer stopped at {end}");
    });
}

#[test]
fn pages_are_interleaved_and_weighted() {
    const NAME: &str = "pages_are_interleaved_and_weighted";
    let Some(nodes) = several(NAME) else { return };
    let [a, b] = [nodes[0], nodes[1]];
    let child = Child::base(512 * BASE_PAGE, a);
    let report = child.move_to(Placement::interleave([a, b]));
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(child.on_nodes(), BTreeMap::from([(Some(a), 256), (Some(b), 256)]));
    let report = child.move_to(Placement::weighted([(a, 1), (b, 3)]));
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(child.on_nodes(), BTreeMap::from([(Some(a), 128), (Some(b), 384)]));
    // Back from one node only.
    let memory = child.memory();
    let half = child.mapping.start..child.mapping.start + child.mapping.len / 2;
    run(KernelMigration::new().range(&memory, half, a).from_nodes([b]));
    assert_eq!(child.on_nodes(), BTreeMap::from([(Some(a), 320), (Some(b), 192)]));
    let report =
        run(KernelMigration::new().range(&memory, child.mapping.range(), a).from_nodes([a]));
    assert_eq!(report.pages.migrated, 0, "{report}");
    child.check();
    // Huge pages stay whole.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let child = Child::new(9 * HUGE, flags, libc::MADV_HUGEPAGE, a);
    let huge = |child: &Child| -> u64 {
        child.memory().mappings.iter().map(|mapping| mapping.huge_bytes).sum()
    };
    let before = huge(&child);
    let report = child.move_to(Placement::interleave([a, b]));
    assert!(report.ended.is_completed() && before > 0, "{before} {report}");
    assert_eq!(huge(&child), before);
    child.check();
}

#[test]
fn a_job_is_as_short_as_asked_and_can_be_cancelled() {
    const NAME: &str = "a_job_is_as_short_as_asked_and_can_be_cancelled";
    let Some(nodes) = several(NAME) else { return };
    let child = Child::base(4096 * BASE_PAGE, nodes[0]);
    let memory = child.memory();
    let all = || KernelMigration::new().range(&memory, child.mapping.range(), nodes[1]);
    // At this rate it takes half an hour.
    let slow = || all().rate_limit(8 << 10).batch_pages(16);
    let job = slow().start().unwrap();
    while job.progress().bytes_migrated == 0 {
        std::thread::sleep(MS);
    }
    job.cancel();
    let report = job.wait();
    assert!(matches!(report.ended, Ended::Cancelled), "{report}");
    assert!(report.pages.migrated > 0 && report.pages.not_attempted > 0, "{report}");
    let on = child.on_nodes();
    assert_eq!(on[&Some(nodes[1])] as u64, report.pages.migrated);
    assert!(report.pages.migrated <= 16 * report.calls["move_pages"], "{report}");
    let job = slow().timeout(20 * MS).start().unwrap();
    let report = job.wait();
    assert!(matches!(report.ended, Ended::TimedOut), "{report}");
    let report = run(all());
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated + report.pages.unchanged, 4096, "{report}");
    child.check();
}

#[test]
fn a_process_that_ends_half_way_ends_the_job() {
    const NAME: &str = "a_process_that_ends_half_way_ends_the_job";
    let Some(nodes) = several(NAME) else { return };
    let child = Child::base(4096 * BASE_PAGE, nodes[0]);
    let memory = child.memory();
    let migration = KernelMigration::new().range(&memory, child.mapping.range(), nodes[1]);
    // At this rate it would take four minutes.
    let job = migration.rate_limit(64 << 10).mode(Mode::Insist).start().unwrap();
    while job.progress().bytes_migrated == 0 {
        std::thread::sleep(MS);
    }
    child.kill();
    let report = job.wait();
    let Ended::Failed(Error::NotMoved { pid, .. }) = &report.ended else { panic!("{report}") };
    assert_eq!(*pid, child.pid());
    let gone = report.runs.iter().filter(|run| run.outcome == PageOutcome::Failed);
    let reasons: Vec<Reason> = gone.filter_map(|run| run.reason).collect();
    assert!(reasons.contains(&Reason::ProcessEnded), "{report}");
    let allowed = [Reason::ProcessEnded, Reason::Uncertain];
    assert!(reasons.iter().all(|reason| allowed.contains(reason)), "{report}");
}

/// A shell that executes the same program with a command line of the same length when it is told
/// to. Without randomisation, the kernel puts code and stack of both at the same addresses.
/// Its memory is on one node: at 64 KB/s the job would need two minutes for the value of `x`.
#[test]
fn a_process_that_executes_another_program_is_another_one() {
    const NAME: &str = "a_process_that_executes_another_program_is_another_one";
    let Some(nodes) = several(NAME) else { return };
    // The new program's memory lies at the same addresses, and at others.
    [false, true].into_iter().for_each(|random| executes_another_program(&nodes, random));
}

fn executes_another_program(nodes: &[NodeId], random: bool) {
    let script = "case $1 in\n\
                  0) exec /bin/sh $0 1;;\n\
                  1) x=$(head -c 8000000 /dev/zero | tr '\\0' a); echo ready; read line\n\
                     exec /bin/sh $0 2;;\n\
                  2) while :; do sleep 1; done;;\n\
                  esac";
    let file = std::env::temp_dir().join(format!("pageleap-exec-{}", std::process::id()));
    fs::write(&file, script).unwrap();
    let mut command = Command::new("/bin/sh");
    command.arg(&file).arg("0");
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    nodes::allocate_on(&mut command, nodes[0]);
    // SAFETY: the call is safe after fork, and changes the child only.
    unsafe {
        let manner = if random { 0 } else { libc::ADDR_NO_RANDOMIZE };
        command.pre_exec(move || match libc::personality(manner as _) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        })
    };
    let mut child = command.spawn().unwrap();
    let mut ready = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let memory = ProcessMemory::read(child.id()).unwrap();
    let mut migration = KernelMigration::new().rate_limit(64 << 10);
    for mapping in memory.mappings.iter().filter(|m| m.kind != MappingKind::Special) {
        migration = migration.range(&memory, mapping.start..mapping.end, nodes[1]);
    }
    let job = migration.start().unwrap();
    while job.progress().bytes_migrated == 0 {
        std::thread::sleep(MS);
    }
    drop(child.stdin.take());
    let report = job.wait();
    let why = report.runs.iter().filter_map(|run| run.reason);
    assert!(why.clone().any(|why| why == Reason::ProcessEnded), "{report}");
    // Pages that the first program had are not absent, even where the second one has none.
    let own = |m: &&MappingMemory| matches!(m.kind, MappingKind::Heap | MappingKind::Anonymous);
    for mapping in memory.mappings.iter().filter(own) {
        let inside = |run: &&PageRun| {
            (mapping.start..mapping.end).contains(&run.range.start)
                && run.reason == Some(Reason::Absent)
        };
        let absent: usize = report.runs.iter().filter(inside).map(|run| run.range.len()).sum();
        let most = mapping.end - mapping.start - mapping.resident_bytes as usize;
        assert!(absent <= most, "random addresses: {random}; {absent} of {most}: {report}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_file(file).unwrap();
}

#[test]
fn of_several_processes_one_may_have_ended() {
    let node = common::nodes()[1];
    let [ended, other] = [0; 2].map(|_| Child::base(16 * BASE_PAGE, common::nodes()[0]));
    let memories = [ended.memory(), other.memory()];
    let parts = [&ended, &other].map(|child| child.mapping.range());
    let alone = KernelMigration::new().range(&memories[0], parts[0].clone(), node);
    drop(ended);
    assert!(alone.check().unwrap_err().is_usage());
    let [first, second] = parts;
    let both = KernelMigration::new().range(&memories[0], first, node);
    let report = run(both.range(&memories[1], second, node));
    assert!(report.ended.is_completed(), "{report}");
    let gone = report.runs.iter().filter(|run| run.reason == Some(Reason::ProcessEnded));
    assert_eq!(gone.map(|run| run.range.len()).sum::<usize>(), 16 * BASE_PAGE, "{report}");
    assert_eq!(other.on_nodes(), BTreeMap::from([(Some(node), 16)]));
    other.check();
}

#[test]
fn of_several_processes_one_may_end_half_way() {
    const NAME: &str = "of_several_processes_one_may_end_half_way";
    let Some(nodes) = several(NAME) else { return };
    let (large, small) = (4096 * BASE_PAGE, 64 * BASE_PAGE);
    let [ends, stays] = [large, small].map(|bytes| Child::base(bytes, nodes[0]));
    let memories = [ends.memory(), stays.memory()];
    let migration = KernelMigration::new()
        .range(&memories[0], ends.mapping.range(), nodes[1])
        .range(&memories[1], stays.mapping.range(), nodes[1]);
    // The first of them would take a minute.
    let job = migration.rate_limit(256 << 10).start().unwrap();
    while job.progress().bytes_migrated == 0 {
        std::thread::sleep(MS);
    }
    ends.kill();
    let report = job.wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated + report.pages.unchanged, report.pages.total(), "{report}");
    let reason = |why| report.runs.iter().filter(move |run| run.reason == Some(why));
    assert!(reason(Reason::ProcessEnded).count() > 0, "{report}");
    let gone = reason(Reason::ProcessEnded).chain(reason(Reason::Uncertain));
    let gone: usize = gone.map(|run| run.range.len()).sum();
    assert_eq!(report.pages.unchanged as usize * BASE_PAGE, gone, "{report}");
    assert_eq!(stays.on_nodes(), BTreeMap::from([(Some(nodes[1]), 64)]));
    stays.check();
}

#[test]
fn reserved_addresses_without_memory_cost_little() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mapping = Mapping::new(64 << 30, flags);
    mapping.advise(libc::MADV_NOHUGEPAGE);
    for at in [1, 63] {
        mapping.words()[(at << 30) / 8].store(at as u64, Ordering::Relaxed);
    }
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let node = common::nodes()[1];
    let report = run(KernelMigration::new().range(&memory, mapping.range(), node));
    assert!(report.ended.is_completed(), "{report}");
    let there = report.runs.iter().filter(|run| run.reason.is_none());
    assert_eq!(there.map(|run| run.range.len()).sum::<usize>(), 2 * BASE_PAGE, "{report}");
    // An answer for each page would take 16,384 questions.
    assert!(report.calls["move_pages(query)"] < 1000, "{report}");
}

#[test]
fn a_segment_of_two_processes_moves_when_that_is_asked_for() {
    const NAME: &str = "a_segment_of_two_processes_moves_when_that_is_asked_for";
    let Some(nodes) = several(NAME) else { return };
    if !is_root() {
        return skip(NAME, &"moving pages that two processes map needs CAP_SYS_NICE");
    }
    // The child has filled it. This process maps it as well.
    let child = Child::new(64 * BASE_PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, nodes[0]);
    child.mapping.check();
    let own = ProcessMemory::read(own_pid().unwrap()).unwrap();
    let memory = child.memory();
    let both = |shared| {
        let migration = KernelMigration::new().shared(shared);
        let migration = migration.range(&memory, child.mapping.range(), nodes[1]);
        run(migration.range(&own, child.mapping.range(), nodes[1]))
    };
    let report = both(false);
    let shared = ("Unchanged".to_owned(), Some(Reason::Shared.to_string()));
    assert_eq!(outcomes(&report), BTreeMap::from([(shared, 128)]), "{report}");
    assert!(report.ended.is_completed(), "{report}");
    // Once, although two processes have it.
    let report = both(true);
    assert_eq!((report.pages.migrated, report.pages.unchanged), (64, 64), "{report}");
    assert_eq!(child.on_nodes(), BTreeMap::from([(Some(nodes[1]), 64)]));
    child.check();
}

#[test]
fn pages_that_are_pinned_stay_and_move_later() {
    const NAME: &str = "pages_that_are_pinned_stay_and_move_later";
    let Some(nodes) = several(NAME) else { return };
    let mapping = Mapping::own(64 * BASE_PAGE);
    mapping.fill(nodes[0]);
    let Ok(ring) = IoUring::new(2) else { return skip(NAME, &"io_uring is refused") };
    assert!(ring.as_raw_fd() > 0);
    let buffer =
        libc::iovec { iov_base: (mapping.start + 8 * BASE_PAGE) as *mut _, iov_len: 4 * BASE_PAGE };
    // SAFETY: the mapping outlives the registration.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    // Locked pages move: they only stay in memory.
    // SAFETY: the mapping's own range.
    assert_eq!(unsafe { libc::mlock(mapping.start as *const _, 4 * BASE_PAGE) }, 0);
    let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
    for mode in Mode::ALL.into_iter().filter(|mode| *mode != Mode::Insist) {
        let migration = KernelMigration::new().range(&memory, mapping.range(), nodes[1]);
        let report = run(migration.mode(mode));
        let failed = report.runs.iter().filter(|run| run.outcome == PageOutcome::Failed);
        let failed: Vec<_> = failed.map(|run| (run.range.clone(), run.reason)).collect();
        let pinned = mapping.start + 8 * BASE_PAGE..mapping.start + 12 * BASE_PAGE;
        assert_eq!(failed, [(pinned, Some(Reason::InUse))], "{mode}: {report}");
        assert_eq!(report.pages.migrated + report.pages.unchanged, 60, "{report}");
    }
    ring.submitter().unregister_buffers().unwrap();
    let report =
        run(KernelMigration::new().range(&memory, mapping.range(), nodes[1]).mode(Mode::Insist));
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(mapping.on_nodes(), BTreeMap::from([(Some(nodes[1]), 64)]));
    mapping.check();
}

/// What is one's own, and what one's children have, moves without any privilege: these tests pass
/// for the user nobody as well.
#[test]
fn no_privilege_is_needed_for_what_is_ones_own() {
    const NAME: &str = "no_privilege_is_needed_for_what_is_ones_own";
    const TESTS: [&str; 5] = [
        "a_process_that_ends_half_way_ends_the_job",
        "exactly_those_pages_of_a_list_stay_that_refuse",
        "lists_are_checked_and_addresses_may_be_anywhere_in_a_page",
        "pages_are_interleaved_and_weighted",
        "what_cannot_move_is_told_by_page",
    ];
    if !in_lab() || !is_root() {
        return skip(NAME, &"the lab has tests that every user may run");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(TESTS).args(["--exact", "--test-threads=1"]).uid(65534).gid(65534);
    let output = command.env_remove("PAGELEAP_SKIP_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let all = format!("{} passed", TESTS.len());
    assert!(output.status.success() && text.contains(&all), "{text}");
}
