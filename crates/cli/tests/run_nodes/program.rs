//! The program that the tests start: this test binary, with a case. It touches memory in several
//! threads, and prints what the kernel tells of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hint::spin_loop;
use std::io::Read;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;

use pageleap::{BASE_PAGE, NodeId};
use serde_json::{Value, json};

use crate::common::{CASE, StopOnDrop, alone, rest};

/// The test that runs the program if it has a case.
pub const TEST: &str = "memory_and_threads_are_on_the_nodes_that_were_named";
/// The cases.
pub const TELLS: &str = "tells";
const WAITS: &str = "waits";

/// Pages of its memory.
pub const PAGES: usize = 4096;
/// The threads that it starts, each of which touches a part of the memory.
pub const THREADS: usize = 4;
/// How often it asks on which CPU each thread is.
const LOOKS: usize = 8;
/// The line of its output that has the result begins so.
const RESULT: &str = "the kernel tells: ";

/// What the program does.
#[derive(Clone, Copy)]
pub enum Program {
    /// It prints what the kernel tells.
    Tells,
    /// It does the same, and waits until its standard input ends.
    Waits,
}

impl Program {
    /// Adds the program to a command that starts another one.
    pub fn under(self, command: &mut Command) -> &mut Command {
        let case = match self {
            Program::Tells => TELLS,
            Program::Waits => WAITS,
        };
        command.arg(reachable(&std::env::current_exe().unwrap())).args(alone(TEST)).env(CASE, case)
    }
}

/// A path of a file that every user can execute, also one who may not reach its folder: a
/// descriptor, which all programs inherit.
pub fn reachable(path: &Path) -> String {
    let file = File::open(path).unwrap().into_raw_fd();
    // SAFETY: the descriptor was opened above, and stays open.
    assert_eq!(unsafe { libc::fcntl(file, libc::F_SETFD, 0) }, 0);
    format!("/proc/self/fd/{file}")
}

/// What the kernel has told of the program.
#[derive(Debug)]
pub struct Seen {
    /// The policy of its memory, as `numa_maps` has it.
    pub policy: String,
    /// Pages of its memory on each node.
    pub pages: BTreeMap<NodeId, usize>,
    /// All of its threads.
    pub threads: Vec<Thread>,
}

/// A thread.
#[derive(Debug)]
pub struct Thread {
    /// The CPUs on which it may run, in the kernel's notation.
    pub allowed: String,
    /// The CPUs on which it was.
    pub cpus: BTreeSet<usize>,
}

impl Seen {
    /// Reads the output of the program.
    #[track_caller]
    pub fn of(output: &[u8]) -> Seen {
        let text = String::from_utf8_lossy(output);
        let result = text.lines().find_map(|line| line.split_once(RESULT)).expect(&text).1;
        let told: Value = serde_json::from_str(result).unwrap();
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let pages = told["pages"].as_object().unwrap().iter();
        let thread = |thread: &Value| Thread {
            allowed: thread["allowed"].as_str().unwrap().to_owned(),
            cpus: thread["cpus"].as_array().unwrap().iter().map(number).collect(),
        };
        Seen {
            policy: told["policy"].as_str().unwrap().to_owned(),
            pages: pages
                .map(|(node, pages)| (NodeId(node.parse().unwrap()), number(pages)))
                .collect(),
            threads: told["threads"].as_array().unwrap().iter().map(thread).collect(),
        }
    }
}

/// The program.
pub fn run(case: &str) {
    let start = map(PAGES);
    let (touched, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        for part in 0..THREADS {
            let (touched, stop) = (&touched, &stop);
            scope.spawn(move || {
                touch(start, (0..PAGES).filter(|page| page * THREADS / PAGES == part));
                touched.fetch_add(1, Relaxed);
                while !stop.load(Relaxed) {
                    // Some work, so that the scheduler has to find a CPU for it.
                    (0..10_000).for_each(|_| spin_loop());
                    thread::yield_now();
                }
            });
        }
        while touched.load(Relaxed) < THREADS {
            rest();
        }
        let (policy, pages) = memory(start);
        println!("{RESULT}{}", json!({"policy": policy, "pages": pages, "threads": threads()}));
    });
    if case == WAITS {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
}

/// Writes to pages of a mapping that no other thread touches.
pub fn touch(start: usize, pages: impl Iterator<Item = usize>) {
    for page in pages {
        // SAFETY: the mapping has this page, and no other thread touches it.
        unsafe { ((start + page * BASE_PAGE) as *mut u8).write(1) };
    }
}

/// Maps memory, without huge pages, and without a neighbour that the kernel would merge with it.
pub fn map(pages: usize) -> usize {
    let (none, both) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, and calls that change only this one.
    unsafe {
        let whole = libc::mmap(ptr::null_mut(), (pages + 2) * BASE_PAGE, none, flags, -1, 0);
        assert_ne!(whole, libc::MAP_FAILED);
        let memory = whole.byte_add(BASE_PAGE);
        assert_eq!(libc::mprotect(memory, pages * BASE_PAGE, both), 0);
        // Fails on a kernel without huge pages, which has none to avoid.
        libc::madvise(memory, pages * BASE_PAGE, libc::MADV_NOHUGEPAGE);
        memory.addr()
    }
}

/// The policy of the mapping, and its pages on each node.
pub fn memory(start: usize) -> (String, BTreeMap<String, usize>) {
    let text = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let begin = format!("{start:08x} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&begin)).expect(&text);
    // The name of a policy may have a blank, and some have a `=`: `bind=static:0`.
    let (policy, counts) = line.split_at(line.find(" anon=").expect(line));
    let counts = counts.split_whitespace().filter_map(|word| word.split_once('='));
    let pages = counts.filter_map(|(key, pages)| Some((key.strip_prefix('N')?, pages)));
    let pages = pages.map(|(node, pages)| (node.to_owned(), pages.parse().unwrap())).collect();
    (policy.to_owned(), pages)
}

/// All threads, with the CPUs on which they may run and were.
fn threads() -> Vec<Value> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let tasks = tasks.collect::<Vec<_>>();
    let mut cpus = vec![BTreeSet::new(); tasks.len()];
    for _ in 0..LOOKS {
        for (task, cpus) in tasks.iter().zip(&mut cpus) {
            let stat = fs::read_to_string(task.join("stat")).unwrap();
            // The 39th field; the name, which is the second, may have blanks.
            let mut fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
            cpus.insert(fields.nth(36).unwrap().parse::<usize>().unwrap());
        }
        rest();
    }
    let told = |(task, cpus): (&std::path::PathBuf, BTreeSet<usize>)| {
        let status = fs::read_to_string(task.join("status")).unwrap();
        let mut lines = status.lines();
        let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        json!({"allowed": allowed.trim(), "cpus": cpus})
    };
    tasks.iter().zip(cpus).map(told).collect()
}
