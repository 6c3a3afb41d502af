//! Single cases of memory that no pool owns, moved by the kernel: what becomes of a call during
//! which the process ends, calls that take too long, kinds of mappings, and a 32-bit program.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/moved.rs"]
mod moved;
#[path = "common/nodes.rs"]
mod nodes;
#[path = "common/supervisor.rs"]
mod supervisor;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::Duration;

use common::{End, case, run_case, skip};
use mapping::{Mapping, nodes_of, on_node};
use moved::{Child, all_migrated, outcomes, run};
use nodes::{allocate_on, several};
use pageleap::process::{ProcessMemory, own_pid};
use pageleap::{BASE_PAGE, Ended, KernelMigration, NodeId, Reason, move_pages};
use supervisor::{Calls, hand_over, supervise};

const PAGES: usize = 16;

/// Ends a process when its first pages are about to move: the call has been made, and the kernel has
/// not come to it. Calls of `move_pages` go on.
fn end_in_the_first_move(
    pid: libc::pid_t,
    has_ended: &AtomicBool,
    call: &libc::seccomp_data,
) -> i32 {
    // The list of nodes. A query has none.
    if call.args[3] != 0 && !has_ended.swap(true, SeqCst) {
        // SAFETY: a child that nobody has waited for, and which stays so. Zeroes are a value of the
        // structure that the kernel writes.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOWAIT;
            assert_eq!(libc::waitid(libc::P_PID, pid as u32, &raw mut info, how), 0);
        }
    }
    0
}

#[test]
fn pages_of_a_call_during_which_the_process_ends_are_uncertain() {
    const NAME: &str = "pages_of_a_call_during_which_the_process_ends_are_uncertain";
    let Some(nodes) = several(NAME) else { return };
    let Some(case) = case() else {
        // A filter stays as long as its thread.
        for case in ["job", "list"] {
            let (end, output) = run_case(NAME, case);
            assert_eq!(end, End::Exited(0), "{case}: {output}");
        }
        return;
    };
    // The first call of a list has 128 pages.
    let (all, first) = if case == "job" { (4 * PAGES, PAGES) } else { (256, 128) };
    let child = Child::base(all * BASE_PAGE, nodes[0]);
    let (pid, memory) = (child.pid, child.memory());
    let pages: Vec<usize> = child.mapping.pages().collect();
    static LISTENER: AtomicI32 = AtomicI32::new(-1);
    static HAS_ENDED: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(move || {
        supervise(&LISTENER, |call| end_in_the_first_move(pid, &HAS_ENDED, call));
    });
    LISTENER.store(hand_over(&Calls::Only(&[libc::SYS_move_pages])).unwrap(), SeqCst);
    if case == "job" {
        let migration = KernelMigration::new().range(&memory, child.mapping.range(), nodes[1]);
        let report = run(migration.batch_pages(first));
        let failed = |why: Reason| ("Failed".to_owned(), Some(why.to_string()));
        let wanted = BTreeMap::from([
            (failed(Reason::Uncertain), first),
            (failed(Reason::ProcessEnded), all - first),
        ]);
        assert_eq!(outcomes(&report), wanted, "{report}");
        assert!(matches!(report.ended, Ended::Failed(_)), "{report}");
    } else {
        let found = move_pages(pid as u32, &pages, Some(&vec![nodes[1]; all]), false).unwrap();
        for (at, status) in found.iter().enumerate() {
            let why = if at < first { Reason::Uncertain } else { Reason::ProcessEnded };
            assert_eq!((status.reason, status.code()), (Some(why), -libc::ESRCH), "page {at}");
        }
    }
    assert!(HAS_ENDED.load(SeqCst), "no call has moved anything");
}

#[test]
fn calls_that_take_longer_than_asked_are_counted() {
    const NAME: &str = "calls_that_take_longer_than_asked_are_counted";
    let Some(nodes) = several(NAME) else { return };
    let child = Child::base(16 * PAGES * BASE_PAGE, nodes[0]);
    // Each call takes longer than the first of the limits, and none as long as the second one.
    let limits = [(Duration::from_nanos(1), true), (Duration::from_secs(3600), false)];
    for ((limit, is_over), to) in limits.into_iter().zip([nodes[1], nodes[0]]) {
        let memory = child.memory();
        let migration = KernelMigration::new().range(&memory, child.mapping.range(), to);
        let report = run(migration.max_call(limit));
        all_migrated(&report, 16 * PAGES);
        let calls = report.calls["move_pages"];
        assert!(calls > 0 && report.windows.count == calls, "{report}");
        assert_eq!(report.counts.windows_over_budget, if is_over { calls } else { 0 }, "{report}");
    }
    child.check();
}

/// Makes a mapping on a node. Its pages have their numbers in them.
type Make = fn(NodeId) -> Mapping;

fn with_access(node: NodeId, access: i32) -> Mapping {
    let mapping = Mapping::own(PAGES * BASE_PAGE);
    mapping.fill(node);
    protect(&mapping, access);
    mapping
}

fn protect(mapping: &Mapping, access: i32) {
    // SAFETY: the mapping's own range.
    assert_eq!(unsafe { libc::mprotect(mapping.start as *mut _, mapping.len, access) }, 0);
}

/// Pages of a file, which `access` allows to read.
fn of_file(node: NodeId, access: i32, flags: i32) -> Mapping {
    let name = format!("pageleap-kinds-{}-{access}-{flags}", std::process::id());
    let path = std::env::temp_dir().join(name);
    on_node(node, || {
        let pages = (0..PAGES as u64).flat_map(|page| {
            let mut bytes = [0; BASE_PAGE];
            bytes[..8].copy_from_slice(&page.to_ne_bytes());
            bytes
        });
        fs::write(&path, pages.collect::<Vec<u8>>()).unwrap();
    });
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // No page of it is being written back.
    file.sync_all().unwrap();
    let len = PAGES * BASE_PAGE;
    // SAFETY: a new mapping.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file.as_raw_fd(), 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    let mapping = Mapping { start: start as usize, len };
    mapping.check();
    mapping
}

#[test]
fn mappings_of_each_kind_move() {
    const NAME: &str = "mappings_of_each_kind_move";
    let Some(nodes) = several(NAME) else { return };
    let kinds: [(&str, Make); 7] = [
        ("read-only", |node| with_access(node, libc::PROT_READ)),
        ("executable", |node| with_access(node, libc::PROT_READ | libc::PROT_EXEC)),
        ("no access", |node| with_access(node, libc::PROT_NONE)),
        ("locked", |node| {
            let mapping = with_access(node, libc::PROT_READ | libc::PROT_WRITE);
            // SAFETY: the mapping's own range.
            assert_eq!(unsafe { libc::mlock(mapping.start as *const _, mapping.len) }, 0);
            mapping
        }),
        ("file, shared", |node| of_file(node, libc::PROT_READ, libc::MAP_SHARED)),
        ("file, private", |node| of_file(node, libc::PROT_READ, libc::MAP_PRIVATE)),
        ("file, written", |node| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let mapping = of_file(node, access, libc::MAP_PRIVATE);
            mapping.fill(node);
            mapping
        }),
    ];
    for (kind, make) in kinds {
        let mapping = make(nodes[0]);
        let on = |node| BTreeMap::from([(Some(node), PAGES)]);
        if kind == "no access" && mapping.on_nodes() == BTreeMap::from([(None, PAGES)]) {
            skip(&format!("{NAME} (no access)"), &"this kernel tells no node of such pages");
            continue;
        }
        assert_eq!(mapping.on_nodes(), on(nodes[0]), "{kind}");
        let memory = ProcessMemory::read(own_pid().unwrap()).unwrap();
        let report = run(KernelMigration::new().range(&memory, mapping.range(), nodes[1]));
        assert_eq!(report.pages.migrated as usize, PAGES, "{kind}: {report}");
        assert_eq!(mapping.on_nodes(), on(nodes[1]), "{kind}");
        let pages: Vec<usize> = mapping.pages().collect();
        let found = move_pages(0, &pages, Some(&[nodes[0]; PAGES]), false).unwrap();
        assert!(found.iter().all(|status| status.reason.is_none()), "{kind}: {found:?}");
        assert_eq!(mapping.on_nodes(), on(nodes[0]), "{kind}");
        if kind == "no access" {
            protect(&mapping, libc::PROT_READ);
        }
        mapping.check();
    }
}

/// Where the program below has its code and its memory.
const CODE: u32 = 0x0804_8000;
const MEMORY: u32 = 0x0810_0000;

/// A program for 32-bit x86. It counts down in the first words of its pages, writes a byte to its
/// output, and waits.
fn program_of_32_bits() -> Vec<u8> {
    let entry = CODE + 52 + 2 * 32;
    let parts: [&[u8]; 9] = [
        &[0xbf], // mov edi, MEMORY
        &MEMORY.to_le_bytes(),
        &[0xb9], // mov ecx, PAGES
        &(PAGES as u32).to_le_bytes(),
        &[0x89, 0x0f, 0x81, 0xc7, 0, 0x10, 0, 0, 0x49, 0x75, 0xf5], // mov [edi], ecx; next page
        &[0xb8, 4, 0, 0, 0, 0xbb, 1, 0, 0, 0, 0xb9],                // write(1, CODE, 1)
        &CODE.to_le_bytes(),
        &[0xba, 1, 0, 0, 0, 0xcd, 0x80],
        &[0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7], // pause()
    ];
    let code = parts.concat();
    let file_len = 52 + 2 * 32 + code.len() as u32;
    let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let shorts = |file: &mut Vec<u8>, all: &[u16]| {
        all.iter().for_each(|n| file.extend(n.to_le_bytes()));
    };
    let words = |file: &mut Vec<u8>, all: &[u32]| {
        all.iter().for_each(|n| file.extend(n.to_le_bytes()));
    };
    // An executable (2) for the i386 (3), with two segments (PT_LOAD is 1).
    shorts(&mut file, &[2, 3]);
    words(&mut file, &[1, entry, 52, 0, 0]);
    shorts(&mut file, &[52, 32, 2, 0, 0, 0]);
    words(&mut file, &[1, 0, CODE, CODE, file_len, file_len, 5, 0x1000]);
    let len = (PAGES * BASE_PAGE) as u32;
    words(&mut file, &[1, 0, MEMORY, MEMORY, 0, len, 6, 0x1000]);
    file.extend(code);
    file
}

#[test]
fn memory_of_a_32_bit_program_moves() {
    const NAME: &str = "memory_of_a_32_bit_program_moves";
    let Some(nodes) = several(NAME) else { return };
    let path = std::env::temp_dir().join(format!("pageleap-32-bit-{}", std::process::id()));
    fs::write(&path, program_of_32_bits()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(&path);
    allocate_on(command.stdout(Stdio::piped()), nodes[0]);
    let started = command.spawn();
    fs::remove_file(&path).unwrap();
    let mut program = match started {
        Ok(program) => program,
        Err(error) => return skip(NAME, &format!("no 32-bit program runs here: {error}")),
    };
    program.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let memory = ProcessMemory::read(program.id()).unwrap();
    let range = MEMORY as usize..MEMORY as usize + PAGES * BASE_PAGE;
    let report = run(KernelMigration::new().range(&memory, range.clone(), nodes[1]));
    all_migrated(&report, PAGES);
    let pages: Vec<usize> = range.step_by(BASE_PAGE).collect();
    assert_eq!(nodes_of(program.id(), pages.clone()), BTreeMap::from([(Some(nodes[1]), PAGES)]));
    let contents = fs::File::open(format!("/proc/{}/mem", program.id())).unwrap();
    for (at, page) in pages.iter().enumerate() {
        let mut word = [0; 4];
        contents.read_exact_at(&mut word, *page as u64).unwrap();
        assert_eq!(u32::from_le_bytes(word), (PAGES - at) as u32, "LOST: page {at}");
    }
    program.kill().unwrap();
    program.wait().unwrap();
}
