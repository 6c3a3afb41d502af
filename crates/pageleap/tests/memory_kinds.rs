//! Memory in place beside memory of other kinds, and what programs do to their memory.

mod common;
#[path = "common/filter.rs"]
mod filter;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/mapping.rs"]
mod mapping;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::{
    End, case, in_lab, limit_address_space, nodes, own_mappings, run_case, skip, soon, turn,
};
use filter::{Action, check, install_filter};
use in_place::{KINDS, leap, memory, migration, moved, pages_of, why_not, works};
use io_uring::IoUring;
use machine_settings::{CommitLimit, Cpuset, MappingLimit};
use mapping::{Mapping, nodes_of, on_node};
use pageleap::{
    BASE_PAGE, EngineName, Error, MemoryEngine, MemoryMigration, NodeId, PageOutcome, PageSize,
    PageTables, Placement, Reason, Report, Source, WarningKind,
};
use pageleap_probe::{Capabilities, State, Topic};

const PART: usize = 2 << 20;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Maps a part of a mapping anew.
fn map_at(start: usize, len: usize, access: i32, flags: i32, file: Option<&File>) {
    let fd = file.map_or(-1, |file| file.as_raw_fd());
    let flags = flags | libc::MAP_FIXED;
    // SAFETY: replaces a part of a mapping of this test.
    let new = unsafe { libc::mmap(start as *mut _, len, access, flags, fd, 0) };
    assert_eq!(new as usize, start, "{}", std::io::Error::last_os_error());
}

fn protect(start: usize, len: usize, access: i32) {
    // SAFETY: memory of this test.
    assert_eq!(unsafe { libc::mprotect(start as *mut _, len, access) }, 0);
}

/// Pages that moved, by engine.
fn by_engine(report: &Report) -> BTreeMap<EngineName, u64> {
    let mut pages = BTreeMap::new();
    for share in report.by_engine() {
        *pages.entry(share.engine).or_default() += share.pages;
    }
    pages
}

/// A file that has no name any more. Its pages are on a node.
fn file(bytes: usize, node: NodeId) -> File {
    let path = std::env::temp_dir().join(format!("pageleap-kinds-{}", std::process::id()));
    on_node(node, || std::fs::write(&path, vec![7; bytes]).unwrap());
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

#[test]
fn each_part_of_a_mixed_range_moves_by_what_can_move_it() {
    const NAME: &str = "each_part_of_a_mixed_range_moves_by_what_can_move_it";
    let _turn = turn();
    let [a, b] = nodes();
    let (written, shared) = (file(PART, a), file(PART, a));
    // Anonymous, a private file, shared, read-only, nothing, anonymous in huge pages.
    let whole = memory(6 * PART, PageSize::Base);
    let at = |part: usize| whole.start + part * PART;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    map_at(at(1), PART, rw, libc::MAP_PRIVATE, Some(&written));
    map_at(at(2), PART, rw, libc::MAP_SHARED, Some(&shared));
    map_at(at(4), PART, libc::PROT_NONE, ANONYMOUS, None);
    let last = Mapping { start: at(5), len: PART };
    last.advise(libc::MADV_HUGEPAGE);
    std::mem::forget(last);
    let touched = || whole.pages().filter(|page| !(at(4)..at(5)).contains(page));
    on_node(a, || {
        for page in touched() {
            // SAFETY: a word of the mapping.
            unsafe { (page as *mut u64).write_volatile(page as u64) };
        }
    });
    protect(at(3), PART, libc::PROT_READ);
    let flags = || common::vm_flags(whole.start, whole.len);
    let before = flags();
    // SAFETY: the test waits for the job.
    let all = || unsafe { MemoryMigration::new().range(whole.start as *mut u8, whole.len, b) };
    let report = all().start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(flags(), before, "{report}");
    for page in touched() {
        // SAFETY: as above.
        assert_eq!(unsafe { (page as *const u64).read_volatile() }, page as u64, "LOST");
    }
    let left = |why| pages_of(&report, |_, reason| reason == Some(why));
    assert_eq!(left(Reason::Absent), (PART / BASE_PAGE) as u64, "{report}");
    let refused = all().engine(MemoryEngine::UffdMove).start().unwrap_err();
    assert!(refused.is_usage() || matches!(refused, Error::EngineRefused { .. }), "{refused}");
    if a == b {
        return skip(NAME, &"memory moves between nodes only (see `cargo xtask lab`)");
    }
    let here = nodes_of(std::process::id(), touched().collect());
    assert_eq!(here, [(Some(b), 5 * PART / BASE_PAGE)].into(), "{report}");
    let part = (PART / BASE_PAGE) as u64;
    let expected = match why_not().is_none() {
        true => {
            [(MemoryEngine::UffdMove.into(), 2 * part), (MemoryEngine::Kernel.into(), 3 * part)]
                .into()
        }
        false => [(MemoryEngine::Kernel.into(), 5 * part)].into(),
    };
    assert_eq!(by_engine(&report), expected, "{report}");
}

/// UFFDIO_MOVE moves no page of a huge page that was shared with a child and has been written in
/// part since. What stays after some tries is left to the kernel. A pinned page stays there, too.
#[test]
fn what_does_not_move_in_place_is_left_to_the_kernel() {
    const NAME: &str = "what_does_not_move_in_place_is_left_to_the_kernel";
    let _turn = turn();
    let [a, b] = nodes();
    if a == b {
        return skip(NAME, &"memory moves between nodes only (see `cargo xtask lab`)");
    }
    if !works(NAME) {
        return;
    }
    let mapping = memory(4 << 20, PageSize::Thp);
    mapping.fill(a);
    let child = Child::fork();
    on_node(a, || mapping.words()[0].store(0, Relaxed));
    drop(child);
    // SAFETY: the test waits for the jobs.
    let to = |node| unsafe {
        MemoryMigration::new().range(mapping.start as *mut u8, mapping.len, node).start().unwrap()
    };
    let report = to(b).wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(mapping.on_nodes(), [(Some(b), 1024)].into(), "{report}");
    mapping.check();
    let Ok(ring) = IoUring::new(2) else { return skip(NAME, &"io_uring is refused") };
    let at = mapping.start + 1000 * BASE_PAGE;
    let buffer = libc::iovec { iov_base: at as *mut _, iov_len: BASE_PAGE };
    // SAFETY: the mapping outlives the registration.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let report = to(a).wait();
    let in_use = |_, reason| reason == Some(Reason::InUse);
    let stay = pages_of(&report, in_use);
    assert!(stay > 0 && report.calls["move_pages"] > 0, "{report}");
    assert_eq!(moved(&report) + stay, 1024, "{report}");
    ring.submitter().unregister_buffers().unwrap();
    assert!(to(a).wait().ended.is_completed());
    assert_eq!(mapping.on_nodes(), [(Some(a), 1024)].into(), "{report}");
    mapping.check();
}

/// Some kernels ask themselves for ever whether a huge page can be split that is pinned.
#[test]
fn a_part_of_a_pinned_huge_page_stays() {
    const NAME: &str = "a_part_of_a_pinned_huge_page_stays";
    if case().is_none() {
        let _turn = turn();
        if works(NAME) {
            let (end, output) = run_case(NAME, "alone");
            assert_eq!(end, End::Exited(0), "{output}");
        }
        return;
    }
    let mapping = memory(4 << 20, PageSize::Thp);
    mapping.fill(nodes()[0]);
    let Ok(ring) = IoUring::new(2) else { return skip(NAME, &"io_uring is refused") };
    let at = mapping.start + 100 * BASE_PAGE;
    let buffer = libc::iovec { iov_base: at as *mut _, iov_len: BASE_PAGE };
    // SAFETY: the mapping outlives the registration.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let half = Mapping { start: mapping.start + (1 << 20), len: 2 << 20 };
    let report = leap(&half, nodes()[0]).unwrap().wait();
    std::mem::forget(half);
    println!("{report}");
    mapping.check();
}

#[test]
fn an_engine_may_be_asked_for() {
    let _turn = turn();
    let mapping = memory(1 << 20, PageSize::Base);
    mapping.fill(nodes()[0]);
    let job = migration(&mapping, nodes()[1]).engine(MemoryEngine::Kernel);
    let report = job.start().unwrap().wait();
    assert_eq!((report.engine, &*report.engine_reason), (MemoryEngine::Kernel.into(), "asked for"));
    assert!(report.ended.is_completed(), "{report}");
    mapping.check();
    // What cannot be as asked for is told.
    let to = Placement::on(nodes()[0]).page_tables(PageTables::Node(nodes()[0]));
    let report = migration(&mapping, to).start().unwrap().wait();
    assert!(
        report.warnings.iter().any(|warning| warning.kind == WarningKind::PageTables),
        "{report}"
    );
    let source = Source::Process(pageleap::process::own_pid().unwrap());
    assert!(report.runs.iter().all(|run| run.source == source), "{report}");
}

#[test]
fn the_doctor_says_which_engine_moves_memory() {
    const NAME: &str = "the_doctor_says_which_engine_moves_memory";
    const REFUSED: [(&str, &[libc::c_long]); 5] = [
        ("nothing", &[]),
        ("userfaultfd", &[libc::SYS_userfaultfd]),
        ("userfaultfd and its device", &[libc::SYS_userfaultfd, libc::SYS_ioctl]),
        ("move_pages", &[libc::SYS_move_pages]),
        ("mbind", &[libc::SYS_mbind]),
    ];
    /// An empty file is mounted there, for this thread.
    const PAGEMAP: &str = "pagemap";
    let _turn = turn();
    let Some(wanted) = case() else {
        for name in REFUSED.iter().map(|(name, _)| *name).chain([PAGEMAP]) {
            let (end, text) = run_case(NAME, name);
            assert_eq!(end, End::Exited(0), "{name}: {text}");
        }
        return;
    };
    let mapping = memory(1 << 20, PageSize::Base);
    mapping.fill(nodes()[0]);
    let to = nodes()[1];
    match REFUSED.iter().find(|(name, _)| *name == wanted) {
        Some((_, calls)) => install_filter(Action::Errno(libc::EPERM), calls).unwrap(),
        None => {
            if let Err(error) = mask_pagemap() {
                return skip(&format!("{NAME} (pagemap)"), &error);
            }
        }
    }
    let capabilities = Capabilities::probe();
    let finding = capabilities.get(Topic::MemoryInPlace).unwrap();
    let moves = |engine: Option<MemoryEngine>| match migration(&mapping, to).engine(engine).start()
    {
        Ok(job) => {
            let report = job.wait();
            println!("{report}");
            report.ended.is_completed() && report.pages.failed == 0
        }
        Err(error) => {
            println!("{error}");
            false
        }
    };
    assert_eq!(moves(MemoryEngine::UffdMove.into()), finding.state == State::Works, "{finding}");
    let by_kernel = finding.summary.contains("the engine kernel moves it");
    assert_eq!(moves(None), finding.state == State::Works || by_kernel, "{finding}");
    mapping.check();
}

/// Mounts an empty file over the pagemap of this process, for the calling thread.
fn mask_pagemap() -> std::io::Result<()> {
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: constant paths.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS).into())?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        check(libc::mount(none, c"/".as_ptr(), none, private, none.cast()).into())?;
        let empty = c"/dev/null".as_ptr();
        [c"/proc/self/pagemap", c"/proc/thread-self/pagemap"].into_iter().try_for_each(|pagemap| {
            check(libc::mount(empty, pagemap.as_ptr(), none, libc::MS_BIND, none.cast()).into())
        })
    }
}

#[test]
fn guards_growing_and_sealed_memory_move() {
    const NAME: &str = "guards_growing_and_sealed_memory_move";
    const MADV_GUARD_INSTALL: i32 = 102;
    const SYS_MSEAL: i64 = 462;
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(1 << 20, PageSize::Base);
    let quarter = mapping.len / 4;
    let part = |number: usize| mapping.start + number * quarter;
    // The kernel would put a gap before it: memory that grows down, as a stack does.
    map_at(part(0), quarter, 3, ANONYMOUS | libc::MAP_GROWSDOWN, None);
    mapping.fill(nodes()[0]);
    let guard = |number: usize| {
        let at = (part(number) + BASE_PAGE) as *mut libc::c_void;
        // SAFETY: a page of this test.
        unsafe { libc::madvise(at, BASE_PAGE, MADV_GUARD_INSTALL) == 0 }
    };
    let guards = u64::from(guard(2));
    // SAFETY: memory of this test. Sealed memory cannot be unmapped any more.
    let is_sealed = unsafe { libc::syscall(SYS_MSEAL, part(3), quarter, 0) == 0 };
    println!("guards: {guards}, sealed: {is_sealed}");
    let before = common::vm_flags(mapping.start, mapping.len);
    let report = leap(&mapping, nodes()[0]).unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(moved(&report), 256 - guards, "{report}");
    assert_eq!(common::vm_flags(mapping.start, mapping.len), before);
    for (number, page) in mapping.pages().enumerate() {
        if guards > 0 && page == part(2) + BASE_PAGE {
            continue;
        }
        // SAFETY: a word of the mapping.
        let value = unsafe { (page as *const u64).read_volatile() };
        assert_eq!(value, number as u64, "LOST: page {number}");
    }
    if guards > 0 {
        // The kernel finds it as a thread does.
        let [_, to] = in_place::pipe();
        let at = (part(2) + BASE_PAGE) as *const libc::c_void;
        // SAFETY: the kernel answers with EFAULT where nothing can be read.
        let put = unsafe { libc::write(to.as_raw_fd(), at, 8) };
        assert_eq!(put, -1, "a guard page is gone");
    }
    if is_sealed {
        std::mem::forget(mapping);
    }
}

#[test]
fn a_userfaultfd_of_the_program_is_respected() {
    const NAME: &str = "a_userfaultfd_of_the_program_is_respected";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(1 << 20, PageSize::Base);
    mapping.fill(nodes()[0]);
    let Ok(own) = pageleap_sys::userfaultfd(false) else {
        return skip(NAME, &"userfaultfd is refused here");
    };
    pageleap_sys::uffd_handshake(own.as_fd(), 0).unwrap();
    let half = mapping.len / 2;
    let missing = pageleap_sys::uffd_mode::MISSING;
    // SAFETY: all pages are present, so that nobody waits.
    unsafe { pageleap_sys::uffd_register(own.as_fd(), mapping.start + half, half, missing) }
        .unwrap();
    let error = leap(&mapping, nodes()[0]).unwrap_err();
    assert!(error.to_string().contains("EBUSY"), "{error}");
    mapping.check();
    // The rest is nobody's, and the program's own is still registered.
    let rest = Mapping { start: mapping.start, len: half };
    let report = leap(&rest, nodes()[0]).unwrap().wait();
    assert_eq!(moved(&report), 128, "{report}");
    rest.check();
    std::mem::forget(rest);
    pageleap_sys::uffd_unregister(own.as_fd(), mapping.start + half, half).unwrap();
    drop(own);
    let report = leap(&mapping, nodes()[0]).unwrap().wait();
    assert_eq!(moved(&report), 256, "{report}");
    mapping.check();
}

/// A child that sleeps. It is killed when the value is dropped.
struct Child(libc::pid_t);

impl Child {
    fn fork() -> Child {
        // SAFETY: the child sleeps, and ends by a signal.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: only waits.
                unsafe { libc::pause() };
            }
        }
        Child(child)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child is this value's.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// The mapping from which an allocation comes.
fn mapping_of(address: usize) -> Range<usize> {
    own_mappings().into_iter().find(|range| range.contains(&address)).unwrap()
}

/// A part of the range becomes a file's while the job works. The rest is not registered for ever.
#[test]
fn a_file_that_replaces_a_part_leaves_no_registration() {
    const NAME: &str = "a_file_that_replaces_a_part_leaves_no_registration";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(4 << 20, PageSize::Base);
    mapping.fill(nodes()[0]);
    let replacing = file(BASE_PAGE, nodes()[0]);
    let job = migration(&mapping, nodes()[0]).rate_limit(16 << 20).start().unwrap();
    // It has the job's descriptors, too.
    let _child = Child::fork();
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    map_at(mapping.start + (3 << 20), BASE_PAGE, rw, libc::MAP_PRIVATE, Some(&replacing));
    job.wait();
    let flags = common::vm_flags(mapping.start, mapping.len);
    assert!(flags.iter().all(|(_, flags)| !flags.split(' ').any(|flag| flag == "um")), "{flags:?}");
}

/// Windows need static variables of the library.
#[test]
fn static_variables_move_by_the_kernel() {
    static VARIABLES: [AtomicU64; 64 << 10] = [const { AtomicU64::new(0) }; 64 << 10];
    const NAME: &str = "static_variables_move_by_the_kernel";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    VARIABLES.iter().zip(0..).for_each(|(variable, value)| variable.store(value, Relaxed));
    let statics = mapping_of(VARIABLES[32 << 10].as_ptr().addr());
    // SAFETY: nobody frees, unmaps or protects static variables.
    let all = || unsafe {
        MemoryMigration::new().range(statics.start as *mut u8, statics.len(), nodes()[1])
    };
    assert!(all().engine(MemoryEngine::UffdMove).start().unwrap_err().is_usage());
    for _ in 0..4 {
        let report = all().renew(true).start().unwrap().wait();
        assert_eq!(report.engine, MemoryEngine::Kernel, "{report}");
    }
    let wrong =
        VARIABLES.iter().zip(0..).filter(|(variable, value)| variable.load(Relaxed) != *value);
    assert_eq!(wrong.count(), 0, "LOST");
}

#[test]
fn stacks_are_refused() {
    let _turn = turn();
    // The stack of a thread that waits.
    let (tell, told) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let waiting = std::thread::spawn(move || {
        tell.send(pageleap_sys::own_stack().unwrap()).unwrap();
        let _ = ended.recv();
    });
    let stack = told.recv().unwrap();
    let blocked = || {
        // SAFETY: nothing is started.
        let it =
            unsafe { MemoryMigration::new().range(stack.start as *mut u8, stack.len(), NodeId(0)) };
        match it.start() {
            Err(error) => error.to_string().contains("stack"),
            Ok(job) => {
                job.wait();
                false
            }
        }
    };
    let refused = soon(blocked);
    drop(end);
    waiting.join().unwrap();
    assert!(refused, "the stack was moved");
}

/// In a process of its own: leaps under a limit, with which all of it moves or not. Without the
/// limit all moves.
fn under_a_limit(moves_all: bool, limit: impl Fn() -> bool, lift: impl FnOnce()) {
    let mappings = KINDS.map(|page| memory(64 << 20, page));
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let idle = threads();
    // A thread that still ends has mappings, and the next one cannot use its stack.
    let settle = || assert!(soon(|| threads() == idle), "{} threads, {idle} before", threads());
    for mapping in &mappings {
        mapping.fill(nodes()[0]);
        // A first leap, so that all is there that later ones use again.
        leap(mapping, nodes()[0]).unwrap().wait();
        settle();
    }
    let state = || (own_mappings().len(), common::own_descriptors().len());
    let before = state();
    let mut partial = 0;
    for mapping in mappings.iter().cycle().take(6) {
        assert!(limit(), "the limit is refused");
        match leap(mapping, nodes()[0]) {
            Err(error) => {
                println!("{error}");
                partial += 1;
            }
            Ok(job) => {
                let report = job.wait();
                check_report(&report);
                partial += u32::from(moved(&report) < 16_384);
            }
        }
        settle();
        mapping.check();
    }
    assert_eq!(partial == 0, moves_all, "{partial} of 6 leaps were incomplete");
    let after = state();
    assert!(after.0 <= before.0 + 2 && after.1 == before.1, "{before:?} {after:?}");
    lift();
    for mapping in &mappings {
        let report = leap(mapping, nodes()[0]).unwrap().wait();
        assert_eq!(moved(&report), 16_384, "{report}");
        mapping.check();
    }
}

/// Each page has an outcome, and a reason that a limit explains.
fn check_report(report: &Report) {
    println!("{report}");
    assert_eq!(pages_of(report, |_, _| true), 16_384, "{report}");
    let odd = pages_of(report, |outcome, reason| {
        let known = [Some(Reason::NoRoom), Some(Reason::InUse)].contains(&reason);
        let refused = matches!(reason, Some(Reason::Refused(..)));
        outcome == PageOutcome::Failed && !known && !refused
    });
    assert_eq!(odd, 0, "{report}");
}

#[test]
fn limits_end_in_an_error_or_a_partial_result() {
    const NAME: &str = "limits_end_in_an_error_or_a_partial_result";
    match case().as_deref() {
        None => {
            let _turn = turn();
            if !works(NAME) {
                return;
            }
            let mut cases = vec!["address space", "locked mappings"];
            if in_lab() {
                // Settings of a machine.
                cases.extend(["mappings", "memory cgroup", "promised memory"]);
            }
            for name in cases {
                let (end, output) = run_case(NAME, name);
                println!("{name}: {output}");
                assert_eq!(end, End::Exited(0), "{name}: {output}");
            }
        }
        // What is mapped later is locked, and populated at once.
        Some("locked mappings") => {
            let lock = || {
                // SAFETY: the call changes no memory.
                let _ = unsafe { libc::mlockall(libc::MCL_FUTURE) };
                true
            };
            under_a_limit(true, lock, || ());
        }
        // Staging memory, then the stacks of threads.
        Some("address space") => {
            let more = Cell::new(0);
            let lower = || {
                limit_address_space(Some(more.replace(more.get() + (3 << 20))));
                true
            };
            under_a_limit(false, lower, || limit_address_space(None));
        }
        Some("promised memory") => {
            let (more, limit) = (Cell::new(0), RefCell::new(None));
            let lower = || {
                drop(limit.take());
                let bytes = more.replace(more.get() + (3 << 20));
                limit.replace(Some(CommitLimit::leave(bytes)));
                true
            };
            under_a_limit(false, lower, || drop(limit.take()));
        }
        Some("mappings") => {
            let (more, limit) = (Cell::new(0), RefCell::new(None));
            let lower = || {
                drop(limit.take());
                let count = own_mappings().len() + more.replace(more.get() + 1);
                limit.replace(Some(MappingLimit::lower_to(count)));
                true
            };
            under_a_limit(false, lower, || drop(limit.take()));
        }
        Some("memory cgroup") => {
            let [a, b] = nodes();
            let Ok(group) = Cpuset::new("kinds", &format!("{a},{b}")) else {
                println!("there are no cgroups here");
                return;
            };
            group.enter();
            let lower = || {
                group.write("memory.max", "max").unwrap();
                let used = group.read("memory.current").unwrap();
                let most = used.trim().parse::<u64>().unwrap() + (1 << 20);
                group.write("memory.max", &most.to_string()).is_ok()
            };
            under_a_limit(false, lower, || group.write("memory.max", "max").unwrap());
        }
        other => panic!("{other:?}"),
    }
}
