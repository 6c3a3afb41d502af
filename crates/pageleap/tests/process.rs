//! What the library says about the memory of another process agrees with what the kernel says.

mod common;
#[path = "common/nodes.rs"]
mod nodes;
#[cfg(target_arch = "x86_64")]
#[path = "common/program32.rs"]
mod program32;
#[path = "common/two_threads.rs"]
mod two_threads;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use common::skip;
use nodes::several;
use pageleap::process::{MappingKind, MappingMemory, Movable, ProcessMemory, nodes_of_pages};
use pageleap::{BASE_PAGE, Job, KernelMigration, NodeId, PageSize, move_pages};
use two_threads::TwoThreads;

/// Pages of the mapping `BASE`, and how many of them are touched.
const PAGES: [usize; 2] = [128, 64];
const HUGE: usize = 2 << 20;
/// The name of a mapped file: it would clear a terminal, and end a line.
const HOSTILE: &[u8] = b"a\x1b[2J\nb \xff";

/// The mappings of a holder.
const BASE: usize = 0;
const SPREAD: usize = 1;
const TRANSPARENT: usize = 2;
const SHARED: usize = 3;
const RESERVED: usize = 4;
const FILE: usize = 5;

/// A process of its own that holds memory and sleeps. It has one thread, so that nothing of it
/// changes.
struct Holder {
    pid: libc::pid_t,
    /// Where the mappings begin; 0 for one that there is not.
    starts: [usize; 6],
}

impl Holder {
    fn start() -> Holder {
        let name = format!("pageleap-{}-{:?}", std::process::id(), std::thread::current().id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(OsStr::from_bytes(HOSTILE));
        fs::write(&path, [1; BASE_PAGE]).unwrap();
        let file = CString::new(path.as_os_str().as_bytes()).unwrap();
        let (mut pipe, mut starts) = ([0; 2], [0usize; 6]);
        // SAFETY: the child makes system calls only, on memory of its own, and never returns.
        let pid = unsafe {
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let pid = libc::fork();
            if pid == 0 {
                hold(&file, pipe[1]);
            }
            libc::close(pipe[1]);
            let size = size_of_val(&starts);
            let told = libc::read(pipe[0], starts.as_mut_ptr().cast(), size);
            libc::close(pipe[0]);
            assert_eq!(told, size as isize, "the process has ended");
            pid
        };
        fs::remove_dir_all(&directory).unwrap();
        let holder = Holder { pid, starts };
        // On its way to where it waits it may touch more.
        while !holder.file("stat").contains(") S ") {
            std::thread::yield_now();
        }
        holder
    }

    fn pid(&self) -> u32 {
        self.pid as u32
    }

    fn file(&self, name: &str) -> String {
        let bytes = fs::read(format!("/proc/{}/{name}", self.pid)).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Page faults without I/O so far.
    fn faults(&self) -> u64 {
        let stat = self.file("stat");
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    fn mapping<'a>(&self, memory: &'a ProcessMemory, which: usize) -> Option<&'a MappingMemory> {
        let start = self.starts[which];
        let found = memory.mappings.iter().find(|mapping| mapping.start == start);
        assert!(start == 0 || found.is_some(), "no mapping at {start:#x}: {memory:?}");
        found
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SAFETY: a child that nobody else has waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// Maps memory of several kinds, says where, and sleeps for ever.
///
/// # Safety
/// For a child of `fork`, which may only make system calls.
unsafe fn hold(file: &CStr, tell: i32) -> ! {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let map = |len: usize, access: i32, flags: i32, fd: i32| {
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        // Pages without access keep neighbours from becoming one mapping.
        // SAFETY: a new mapping.
        unsafe { libc::mmap(std::ptr::null_mut(), BASE_PAGE, libc::PROT_NONE, private, -1, 0) };
        if start == libc::MAP_FAILED { 0 } else { start as usize }
    };
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let touch = |start: usize, len: usize| {
        for at in (start..start + len).step_by(BASE_PAGE) {
            // SAFETY: a byte of a mapping of this function.
            unsafe { (at as *mut u8).write_volatile(1) };
        }
    };
    let len = PAGES[0] * BASE_PAGE;
    let mut starts = [0; 6];
    // SAFETY: the child ends with the test.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: whole pages of new mappings, a string, and this function's own array. On a machine
    // with one node `mbind` interleaves over that one.
    unsafe {
        starts[BASE] = map(len, both, private, -1);
        libc::madvise(starts[BASE] as *mut _, len, libc::MADV_NOHUGEPAGE);
        touch(starts[BASE], PAGES[1] * BASE_PAGE);
        starts[SPREAD] = map(len, both, private, -1);
        libc::madvise(starts[SPREAD] as *mut _, len, libc::MADV_NOHUGEPAGE);
        let nodes = 3u64;
        libc::syscall(libc::SYS_mbind, starts[SPREAD], len, libc::MPOL_INTERLEAVE, &nodes, 64, 0);
        touch(starts[SPREAD], len);
        // What is aligned of it becomes huge, if the kernel makes huge pages.
        starts[TRANSPARENT] = map(3 * HUGE, both, private, -1);
        libc::madvise(starts[TRANSPARENT] as *mut _, 3 * HUGE, libc::MADV_HUGEPAGE);
        touch(starts[TRANSPARENT], 3 * HUGE);
        let memory_file = libc::memfd_create(c"shared".as_ptr(), 0);
        libc::ftruncate(memory_file, 16 * BASE_PAGE as i64);
        starts[SHARED] = map(16 * BASE_PAGE, both, libc::MAP_SHARED, memory_file);
        touch(starts[SHARED], 4 * BASE_PAGE);
        starts[RESERVED] = map(HUGE, both, private | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB, -1);
        if starts[RESERVED] != 0 {
            touch(starts[RESERVED], BASE_PAGE);
        }
        starts[FILE] =
            map(BASE_PAGE, both, libc::MAP_PRIVATE, libc::open(file.as_ptr(), libc::O_RDWR));
        touch(starts[FILE], BASE_PAGE);
        libc::write(tell, starts.as_ptr().cast(), size_of_val(&starts));
        loop {
            libc::pause();
        }
    }
}

/// A figure in kB of a text such as smaps_rollup.
fn kb(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(&format!("{name}:")));
    line.map_or(0, |line| line.split_whitespace().nth(1).unwrap().parse().unwrap())
}

/// Bytes by node, as numa_maps counts them.
fn numa_maps(text: &str) -> BTreeMap<NodeId, u64> {
    let mut bytes = BTreeMap::new();
    for line in text.lines() {
        let fields = || line.split_whitespace().filter_map(|word| word.split_once('='));
        let page = fields().find(|(key, _)| *key == "kernelpagesize_kB");
        for (key, value) in fields() {
            let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) else {
                continue;
            };
            let page_kb: u64 = page.unwrap().1.parse().unwrap();
            *bytes.entry(NodeId(node)).or_default() +=
                value.parse::<u64>().unwrap() * page_kb * 1024;
        }
    }
    bytes
}

/// Compares with `numastat -p`, which rounds to hundredths of a MB.
fn agrees_with_numastat(test: &str, holder: &Holder, memory: &ProcessMemory) {
    let not = |why: &str| skip(&format!("{test} (numastat)"), &why);
    let mut command = Command::new("numastat");
    let output = match command.args(["-p", &holder.pid().to_string()]).output() {
        Ok(output) if output.status.success() => output,
        Ok(_) => return not("numastat fails: the kernel has no NUMA"),
        Err(_) => return not("numastat is not installed (package numactl)"),
    };
    if memory.on_nodes().len() > 4 {
        return not("its table is wrapped");
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let total = text.lines().find(|line| line.starts_with("Total")).expect(&text);
    let figures: Vec<f64> = total.split_whitespace().flat_map(str::parse).collect();
    let all: u64 = memory.on_nodes().values().sum();
    let ours = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    assert!((figures.last().unwrap() - ours(all)).abs() < 0.02, "{text} {memory:?}");
    let first = memory.on_nodes().get(&NodeId(0)).copied().unwrap_or(0);
    assert!((figures[0] - ours(first)).abs() < 0.02, "{text} {memory:?}");
}

#[test]
fn what_is_said_of_a_process_is_what_the_kernel_says() {
    const NAME: &str = "what_is_said_of_a_process_is_what_the_kernel_says";
    let holder = Holder::start();
    let faults = holder.faults();
    let memory = ProcessMemory::read(holder.pid()).unwrap();
    assert!(memory.warnings.is_empty(), "{memory:?}");
    let rollup = holder.file("smaps_rollup");
    let hugetlb_kb = kb(&rollup, "Private_Hugetlb") + kb(&rollup, "Shared_Hugetlb");
    assert_eq!(memory.resident_bytes() >> 10, kb(&rollup, "Rss") + hugetlb_kb);
    let swapped: u64 = memory.mappings.iter().map(|m| m.swapped_bytes).sum();
    assert_eq!(swapped >> 10, kb(&rollup, "Swap"));
    let huge: u64 = memory.mappings.iter().map(|m| m.huge_bytes).sum();
    let huge_kb = ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"].map(|n| kb(&rollup, n));
    assert_eq!(huge >> 10, huge_kb.iter().sum::<u64>());
    if huge == 0 {
        skip(&format!("{NAME} (transparent huge pages)"), &"the kernel made none");
    }
    assert_eq!(memory.on_nodes(), numa_maps(&holder.file("numa_maps")));
    agrees_with_numastat(NAME, &holder, &memory);
    let status = holder.file("status");
    assert_eq!(memory.page_table_bytes >> 10, kb(&status, "VmPTE"));
    assert_eq!(memory.namespace_pids, [holder.pid()]);
    assert_eq!(memory.name, holder.file("comm").trim_end());

    let find = |which| holder.mapping(&memory, which);
    let is = |which, kind, resident: usize| {
        let Some(mapping) = find(which) else { return };
        assert_eq!((mapping.kind, mapping.resident_bytes), (kind, resident as u64), "{mapping:?}");
        assert_eq!(mapping.on_nodes.values().sum::<u64>(), resident as u64, "{mapping:?}");
        assert_eq!(mapping.movable, Movable::Yes, "{mapping:?}");
    };
    is(BASE, MappingKind::Anonymous, PAGES[1] * BASE_PAGE);
    is(SPREAD, MappingKind::Anonymous, PAGES[0] * BASE_PAGE);
    is(TRANSPARENT, MappingKind::Anonymous, 3 * HUGE);
    is(SHARED, MappingKind::Shared, 4 * BASE_PAGE);
    is(RESERVED, MappingKind::Hugetlb, HUGE);
    is(FILE, MappingKind::File, BASE_PAGE);
    match find(RESERVED) {
        Some(reserved) => assert_eq!(reserved.page_bytes, PageSize::Huge2M.bytes() as u64),
        None => skip(&format!("{NAME} (2m pages)"), &"none are free"),
    }
    let file = find(FILE).unwrap();
    assert!(file.name.chars().all(|c| !c.is_control()) && file.name.contains("[2J"), "{file:?}");

    // What was not touched is not touched now.
    let start = holder.starts[BASE];
    let pages: Vec<usize> = (0..PAGES[0]).map(|page| start + page * BASE_PAGE).collect();
    match nodes_of_pages(holder.pid(), &pages) {
        Ok(nodes) => {
            let present = nodes.iter().map(Option::is_some).collect::<Vec<_>>();
            assert!((0..PAGES[0]).all(|page| present[page] == (page < PAGES[1])), "{nodes:?}");
        }
        Err(error) => skip("nodes of single pages", &error),
    }
    let present = |memory: &ProcessMemory| -> Vec<(usize, u64)> {
        memory.mappings.iter().map(|mapping| (mapping.start, mapping.resident_bytes)).collect()
    };
    assert_eq!(present(&ProcessMemory::read(holder.pid()).unwrap()), present(&memory));
    assert_eq!(holder.faults(), faults);
}

#[test]
fn memory_on_two_nodes_is_told_apart() {
    const NAME: &str = "memory_on_two_nodes_is_told_apart";
    let Some(nodes) = several(NAME) else { return };
    if nodes[..2] != [NodeId(0), NodeId(1)] {
        return skip(NAME, &"the first two nodes with memory are not 0 and 1");
    }
    let holder = Holder::start();
    let memory = ProcessMemory::read(holder.pid()).unwrap();
    let spread = holder.mapping(&memory, SPREAD).unwrap();
    let half = (PAGES[0] / 2 * BASE_PAGE) as u64;
    assert_eq!(spread.on_nodes, BTreeMap::from([(NodeId(0), half), (NodeId(1), half)]));
    assert!(spread.policy.starts_with("interleave"), "{spread:?}");
    let pages: Vec<usize> = (0..PAGES[0]).map(|page| spread.start + page * BASE_PAGE).collect();
    let told = nodes_of_pages(holder.pid(), &pages).unwrap();
    let on = |node| told.iter().filter(|told| **told == Some(node)).count();
    assert_eq!([on(NodeId(0)), on(NodeId(1))], [PAGES[0] / 2; 2]);
    assert!(told.windows(2).all(|two| two[0] != two[1]), "{told:?}");
}

#[test]
fn processes_without_memory_are_told_as_such() {
    let mut child = Command::new("/bin/true").spawn().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::yield_now();
    }
    let memory = ProcessMemory::read(child.id()).unwrap();
    assert!(memory.mappings.is_empty() && memory.warnings[0].contains("ended"), "{memory:?}");
    child.wait().unwrap();
    let error = ProcessMemory::read(child.id()).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("no process"), "{error}");
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        let memory = ProcessMemory::read(2).unwrap();
        assert!(memory.mappings.is_empty() && memory.warnings[0].contains("kernel"), "{memory:?}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_of_32_bits_is_one_like_others() {
    const NAME: &str = "a_program_of_32_bits_is_one_like_others";
    let directory = std::env::temp_dir().join(format!("pageleap-32-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let started = program32::start(&directory);
    fs::remove_dir_all(&directory).unwrap();
    let mut child = match started {
        Ok(child) => child,
        Err(error) => return skip(NAME, &format!("no program of 32 bits starts: {error}")),
    };
    let memory = ProcessMemory::read(child.id()).unwrap();
    let touched = program32::TOUCHED;
    let mapping = memory.mappings.iter().find(|m| (m.start..m.end).contains(&touched.start));
    let mapping = mapping.unwrap_or_else(|| panic!("{memory:?}"));
    assert_eq!((mapping.resident_bytes, mapping.movable), (touched.len() as u64, Movable::Yes));
    assert!(memory.mappings.iter().any(|m| m.kind == MappingKind::Stack), "{memory:?}");
    let pages: Vec<usize> = touched.clone().step_by(BASE_PAGE).collect();
    for to in common::nodes() {
        let migration = KernelMigration::new().range(&memory, touched.clone(), to);
        let report = migration.start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        let nodes = nodes_of_pages(child.id(), &pages).unwrap();
        assert!(nodes.iter().all(|node| *node == Some(to)), "{to}: {nodes:?} {report}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn memory_is_found_after_the_main_thread_has_ended() {
    let process = TwoThreads::without_main_thread("main has ended");
    let memory = ProcessMemory::read(process.pid).unwrap();
    let range = process.range();
    let mapping = memory.mappings.iter().find(|m| m.start <= range.start && m.end >= range.end);
    let mapping = mapping.unwrap_or_else(|| panic!("{range:x?} {memory:?}"));
    assert_eq!(mapping.on_nodes.values().sum::<u64>(), mapping.resident_bytes, "{mapping:?}");
    assert!(mapping.resident_bytes >= two_threads::BYTES as u64, "{mapping:?}");
    let [note] = &memory.warnings[..] else { panic!("{memory:?}") };
    assert!(note.contains(&format!("by its thread {}", process.other)), "{note}");
    assert_eq!((memory.name.as_str(), memory.pid), ("main has ended", process.pid));
    assert_eq!(memory.namespace_pids, [process.pid]);
    assert!(memory.page_table_bytes > 0, "{memory:?}");
    let pages: Vec<usize> = range.clone().step_by(BASE_PAGE).collect();
    let nodes = nodes_of_pages(process.pid, &pages).unwrap();
    assert!(nodes.iter().all(Option::is_some), "{nodes:?}");
    // As a list and as a job, also if the main thread has ended since it was read.
    let listed = move_pages(process.pid, &[range.start, 4096], None, false).unwrap();
    assert_eq!(listed[0].node, nodes[0], "{listed:?}");
    let later = TwoThreads::start("main ends later");
    let read_before = ProcessMemory::read(later.pid).unwrap();
    assert!(read_before.warnings.is_empty(), "{read_before:?}");
    later.end_main_thread();
    let [from, to] = common::nodes();
    for (memory, range) in [(&memory, range), (&read_before, later.range())] {
        for to in [from, to] {
            let migration = KernelMigration::new().range(memory, range.clone(), to);
            let report = migration.start().unwrap().wait();
            let arrived = report.runs.iter().filter(|run| run.reason.is_none());
            let arrived: usize = arrived.map(|run| run.range.len()).sum();
            assert!(report.ended.is_completed() && arrived == two_threads::BYTES, "{report}");
        }
    }
}

/// What is said of the pages' sizes is not true here, so that no huge pages have to be there.
#[test]
fn ends_within_huge_pages_are_refused_or_told_before_anything_moves() {
    let process = TwoThreads::start("huge pages");
    let mut memory = ProcessMemory::read(process.pid).unwrap();
    let node = memory.allowed_nodes[0];
    let block = process.range().start.next_multiple_of(HUGE);
    let page = block..block + BASE_PAGE;
    let this = memory.mappings.iter().position(|m| (m.start..m.end).contains(&block)).unwrap();
    assert_eq!(memory.mappings[this].huge_bytes, 0, "{memory:?}");
    let asked = |memory: &ProcessMemory| {
        let migration = || KernelMigration::new().range(memory, page.clone(), node);
        (migration().check(), migration().start().map(|job: Job| job.wait().warnings))
    };
    let (checked, told) = asked(&memory);
    assert!(checked.unwrap().is_empty() && told.unwrap().is_empty());
    memory.mappings[this].huge_bytes = HUGE as u64;
    let (checked, told) = asked(&memory);
    let (checked, told) = (checked.unwrap(), told.unwrap());
    assert!(checked == told && checked.len() == 1, "{checked:?} {told:?}");
    assert!(told[0].contains("within transparent huge pages"), "{told:?}");
    memory.mappings[this].page_bytes = HUGE as u64;
    let (checked, told) = asked(&memory);
    for error in [checked.unwrap_err(), told.unwrap_err()] {
        assert!(error.to_string().contains("within a huge page"), "{error}");
    }
}

/// At two pages a second, the job has not ended when the main thread has.
#[test]
fn a_job_goes_on_after_the_main_thread_has_ended() {
    const NAME: &str = "a_job_goes_on_after_the_main_thread_has_ended";
    let Some(nodes) = several(NAME) else { return };
    let process = TwoThreads::start("main ends");
    let pages: Vec<usize> = process.range().step_by(BASE_PAGE).collect();
    move_pages(process.pid, &pages, Some(&vec![nodes[0]; pages.len()]), false).unwrap();
    let memory = ProcessMemory::read(process.pid).unwrap();
    let end = process.range().start + 16 * BASE_PAGE;
    let migration = KernelMigration::new().range(&memory, process.range().start..end, nodes[1]);
    let job = migration.rate_limit(2 * BASE_PAGE as u64).start().unwrap();
    while job.progress().bytes_migrated == 0 {
        std::thread::yield_now();
    }
    process.end_main_thread();
    let report = job.wait();
    assert!(report.ended.is_completed() && report.pages.migrated == 16, "{report}");
    let found = nodes_of_pages(process.pid, &pages[..16]).unwrap();
    assert!(found.iter().all(|node| *node == Some(nodes[1])), "{found:?}");
}

/// What is read half before and half after a process executes another program is not shown.
#[test]
fn a_process_that_executes_another_program_is_shown_as_one_of_the_two() {
    // Each shell executes the next one, a hundred times.
    let script = "if [ $1 -gt 0 ]; then exec /bin/sh -c \"$0\" \"$0\" $(($1 - 1)); fi; read line";
    let mut child = Command::new("/bin/sh")
        .args(["-c", script, script, "100"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut read = 0;
    while read < 300 {
        match ProcessMemory::read(child.id()) {
            Ok(memory) => {
                let has = |kind| memory.mappings.iter().any(|mapping| mapping.kind == kind);
                assert!(memory.mappings.is_empty() || has(MappingKind::Stack), "{memory:?}");
            }
            Err(error) => assert!(error.to_string().contains("executed other"), "{error}"),
        }
        read += 1;
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
