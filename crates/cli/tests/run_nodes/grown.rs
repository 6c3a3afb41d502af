//! A program that grows: its main thread touches memory, and then it has more and more threads, all
//! of which live at the same time. It is this test binary, too, but runs before the harness, whose
//! tests have no main thread. Each thread reads from the kernel itself on which CPUs it may run and
//! is: the C library's function tells all CPUs of a program instead of a pin.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write, pipe};
use std::os::unix::process::CommandExt;
use std::panic;
use std::process::{Command, exit};
use std::sync::Barrier;
use std::thread;

use pageleap::NodeId;
use serde_json::{Value, json};

use super::program::{PAGES, map, memory, reachable, touch};
use crate::common::CASE;

/// The cases.
const GROWS: &str = "grows";
const CHILD: &str = "child";
/// The environment variable with the number of threads.
const THREADS: &str = "PAGELEAP_TEST_THREADS";
/// Pages that each thread touches.
pub const PAGES_OF_THREAD: usize = 16;

/// Adds the program, with this many threads, to a command that starts another one.
pub fn under(command: &mut Command, threads: usize) -> &mut Command {
    command.arg(reachable(&std::env::current_exe().unwrap()));
    command.env(CASE, GROWS).env(THREADS, threads.to_string())
}

/// Pages on each node.
pub type Pages = BTreeMap<NodeId, usize>;

/// What the kernel has told of the program.
#[derive(Debug)]
pub struct Grown {
    /// The CPUs on which the main thread may run, in the kernel's notation.
    pub main: String,
    /// The pages that the main thread has touched.
    pub pages: Pages,
    /// The other threads, in the order in which they were started.
    pub threads: Vec<Thread>,
    /// The CPUs on which the last thread may run after it has started all children.
    pub after: String,
    /// The CPUs of the main threads of children that the last thread has started, by the way in
    /// which it did, and of the first thread of each child that is a program of its own.
    pub children: BTreeMap<String, Vec<String>>,
}

/// A thread.
#[derive(Debug)]
pub struct Thread {
    /// The CPUs on which it may run, in the kernel's notation.
    pub allowed: String,
    /// The CPU on which it was at its beginning, and the one on which it was once all threads ran.
    pub cpus: [usize; 2],
    /// The pages that it has touched.
    pub pages: Pages,
}

impl Grown {
    /// Reads the output of the program.
    #[track_caller]
    pub fn of(output: &[u8]) -> Grown {
        let told: Value = serde_json::from_slice(output)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(output)));
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let pages = |value: &Value| -> Pages {
            let pages = value.as_object().unwrap().iter();
            pages.map(|(node, pages)| (NodeId(node.parse().unwrap()), number(pages))).collect()
        };
        let thread = |value: &Value| Thread {
            allowed: text(&value["allowed"]),
            cpus: [number(&value["first"]), number(&value["later"])],
            pages: pages(&value["pages"]),
        };
        let children = told["children"].as_object().unwrap().iter();
        let lists = |lists: &Value| lists.as_array().unwrap().iter().map(text).collect();
        Grown {
            main: text(&told["main"]),
            pages: pages(&told["pages"]),
            threads: told["threads"].as_array().unwrap().iter().map(thread).collect(),
            after: text(&told["after"]),
            children: children.map(|(way, told)| (way.clone(), lists(told))).collect(),
        }
    }

    /// The CPU to which each thread has come.
    #[track_caller]
    pub fn order(&self) -> Vec<usize> {
        let one = |thread: &Thread| {
            let cpu = thread.allowed.parse().unwrap_or_else(|_| panic!("more than one: {self:?}"));
            assert_eq!(thread.cpus, [cpu; 2], "{self:?}");
            cpu
        };
        self.threads.iter().map(one).collect()
    }
}

/// The loader calls functions of this section before `main`, those of preloaded libraries first.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    let case = std::env::var(CASE).unwrap_or_default();
    if [GROWS, CHILD].contains(&case.as_str()) {
        // The other threads would wait for one that has panicked.
        panic::set_hook(Box::new(|told| {
            eprintln!("{told}");
            exit(101)
        }));
    }
    let told = match case.as_str() {
        GROWS => grow(std::env::var(THREADS).unwrap().parse().unwrap()),
        CHILD => json!([allowed(), thread::spawn(allowed).join().unwrap()]),
        _ => return,
    };
    println!("{told}");
    exit(0)
}

/// The CPUs on which the calling thread may run.
fn allowed() -> String {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let mut lines = status.lines();
    let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    allowed.trim().to_owned()
}

/// The CPU on which the calling thread is.
fn cpu() -> usize {
    let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The 39th field; the name, which is the second, may have blanks.
    let mut fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    fields.nth(36).unwrap().parse().unwrap()
}

fn grow(number: usize) -> Value {
    let own = map(PAGES);
    touch(own, 0..PAGES);
    // The main thread is one of them.
    let (started, looked) = (Barrier::new(number + 1), Barrier::new(number + 1));
    let (main, pages) = (allowed(), memory(own).1);
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=number)
            .map(|nth| {
                let (started, looked) = (&started, &looked);
                scope.spawn(move || {
                    let first = cpu();
                    let own = map(PAGES_OF_THREAD);
                    touch(own, 0..PAGES_OF_THREAD);
                    started.wait();
                    let mut told = json!({"allowed": allowed(), "first": first, "later": cpu()});
                    told["pages"] = json!(memory(own).1);
                    if nth == number {
                        told["children"] = children();
                        told["after"] = json!(allowed());
                    }
                    // None ends before the last one has begun.
                    looked.wait();
                    told
                })
            })
            .collect();
        started.wait();
        looked.wait();
        let threads: Vec<Value> = threads.into_iter().map(|one| one.join().unwrap()).collect();
        let last = threads.last().unwrap();
        let (children, after) = (&last["children"], &last["after"]);
        json!({
            "main": main, "pages": pages, "children": children, "after": after, "threads": threads,
        })
    })
}

/// Starts children in several ways, and returns what each of them tells.
fn children() -> Value {
    let program = || {
        let mut command = Command::new("/proc/self/exe");
        command.env(CASE, CHILD);
        command
    };
    let told = |mut command: Command| -> Value {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let mut forks = program();
    // SAFETY: nothing is done. But with it, the command is started by fork and exec.
    unsafe { forks.pre_exec(|| Ok(())) };
    json!({"posix_spawn": told(program()), "fork and exec": told(forks), "fork": [forked()]})
}

/// The CPUs on which a child that goes on with this program may run.
fn forked() -> String {
    let (mut reader, mut writer) = pipe().unwrap();
    // SAFETY: the child only reads a file and writes to a pipe. The C library lets it use malloc.
    match unsafe { libc::fork() } {
        0 => {
            let is_told = writer.write_all(allowed().as_bytes()).is_ok();
            // SAFETY: the call ends the process.
            unsafe { libc::_exit(i32::from(!is_told)) }
        }
        child => {
            assert!(child > 0);
            drop(writer);
            let mut told = String::new();
            reader.read_to_string(&mut told).unwrap();
            let mut status = 0;
            // SAFETY: the call writes one number.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
            told
        }
    }
}
