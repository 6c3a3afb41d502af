//! Runs `pageleap move` as a user would. What needs several nodes runs in the lab.

#[path = "common/command.rs"]
mod command;
#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/nodes.rs"]
mod nodes;
#[path = "../../pageleap/tests/common/two_threads.rs"]
mod two_threads;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};

use command::{check_code, stderr};
use common::skip;
use nodes::several;
use pageleap::process::{MappingKind, ProcessMemory};
use serde_json::Value;
use two_threads::TwoThreads;

/// Bytes that the holder has on its heap, at least.
const BYTES: u64 = 8 << 20;

fn pageleap(arguments: &[&str]) -> Command {
    command::pageleap("move", arguments)
}

fn run(arguments: &[&str]) -> Output {
    pageleap(arguments).output().expect("pageleap starts")
}

/// Its messages besides those of progress, which it writes while a long move is under way.
fn complaints(output: &Output) -> String {
    let said = stderr(output);
    said.lines().filter(|line| !line.starts_with("moved ")).collect()
}

/// The standard output of a run that must succeed.
fn text(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!((output.status.code(), complaints(&output).as_str()), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(&[arguments, &["--json"]].concat())).unwrap()
}

/// The error message of a run that must fail with `code` and print no result.
#[track_caller]
fn failure(arguments: &[&str], code: i32) -> String {
    command::failure(pageleap(arguments), code)
}

/// A shell with a large variable. It answers each line with the length of the variable, and takes
/// its memory from the first node.
struct Holder(Child, u64);

impl Holder {
    fn start() -> Holder {
        Holder::named("holder", BYTES)
    }

    /// The name may have 15 bytes. The variable has `bytes` bytes.
    fn named(name: &str, bytes: u64) -> Holder {
        let script = "printf %s $0 > /proc/$$/comm\n\
                      x=$(head -c $1 /dev/zero | tr '\\0' a)\n\
                      while echo ${#x} && read line; do :; done";
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script, name, &bytes.to_string()]).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        // Base pages stay base pages: khugepaged would move some by itself, on other nodes.
        // SAFETY: prctl is safe to call after fork.
        unsafe {
            shell.pre_exec(|| match libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        nodes::allocate_on(&mut shell, nodes::with_memory()[0]);
        let mut holder = Holder(shell.spawn().unwrap(), bytes);
        holder.check_answer();
        holder
    }

    fn check_answer(&mut self) {
        let mut line = String::new();
        BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), self.1.to_string());
        // It touches and frees memory until it waits for the next line.
        let stat = format!("/proc/{}/stat", self.0.id());
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Whether it is alive and has its memory.
    fn check(&mut self) {
        std::io::Write::write_all(self.0.stdin.as_mut().unwrap(), b"\n").unwrap();
        self.check_answer();
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Waits until so much of its memory lies on a node, while `child` works on it.
    fn wait_for(&self, child: &mut Child, node: u32, bytes: u64) {
        while self.on(node) < bytes {
            assert!(child.try_wait().unwrap().is_none(), "it has ended too early");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Bytes of its own memory on a node.
    fn on(&self, node: u32) -> u64 {
        let memory = ProcessMemory::read(self.0.id()).unwrap();
        let own = memory.on_nodes_of(|m| {
            matches!(m.kind, MappingKind::Heap | MappingKind::Anonymous | MappingKind::Stack)
        });
        own.get(&pageleap::NodeId(node)).copied().unwrap_or(0)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SAFETY: the shell has a process group of its own.
        unsafe { libc::kill(-(self.0.id() as i32), libc::SIGKILL) };
        let _ = self.0.wait();
    }
}

#[test]
fn wrong_requests_are_refused() {
    let holder = Holder::start();
    let pid = holder.pid();
    assert!(failure(&[&pid], 2).contains("--to"));
    assert!(failure(&["--to", "0"], 2).contains("PROCESS"));
    assert!(failure(&[&pid, "--to", "777"], 2).contains("777"));
    assert!(
        failure(&[&pid, "--to", "all", "--weights", "1,2,3,4,5,6,7,8,9"], 2).contains("shares")
    );
    for spread in [&["--interleave"][..], &["--weights", "1"]] {
        let why = failure(&[&[&pid, "--to", "0"], spread].concat(), 2);
        assert!(why.contains("--to names one"), "{why}");
    }
    assert!(failure(&[&pid, "--to", "all", "--mapping", "special"], 2).contains("heap"));
    assert!(failure(&[&pid, "--to", "all", "--range", "1-2"], 2).contains("hexadecimal"));
    assert!(failure(&[&pid, "--to", "all", "--range", "1000-2000"], 2).contains("nothing"));
    assert!(failure(&[&pid, "--to", "all", "--mode", "hard"], 2).contains("insist"));
    assert!(failure(&[&pid, "--to", "all", "--rate", "0"], 2).contains("rate"));
    assert!(failure(&["4194305", "--to", "all"], 2).contains("no process"));
    assert!(failure(&["no such name", "--to", "all"], 2).contains("no process"));
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        assert!(failure(&["2", "--to", "all"], 2).contains("thread of the kernel"));
    }
}

#[test]
fn a_name_of_several_processes_is_not_enough() {
    let name = format!("plm-{}", std::process::id());
    let holders = [(); 2].map(|()| Holder::named(&name, BYTES));
    let error = failure(&[&name, "--to", "all"], 2);
    assert!(error.contains("--all"), "{error}");
    assert!(holders.iter().all(|holder| error.contains(&holder.pid())), "{error}");
    let range = failure(&[&name, "--to", "all", "--all", "--range", "1000-2000"], 2);
    assert!(range.contains("2 are selected"), "{range}");
    let all = json(&[&name, "--to", "all", "--all"]);
    assert_eq!(all["processes"].as_array().unwrap().len(), 2, "{all}");
}

#[test]
fn a_process_whose_main_thread_has_ended_is_one_of_several() {
    let name = format!("plt-{}", std::process::id());
    let mut holder = Holder::named(&name, BYTES);
    let process = TwoThreads::without_main_thread(&name);
    let all = json(&[&name, "--to", "all", "--all"]);
    assert_eq!(all["processes"].as_array().unwrap().len(), 2, "{all}");
    let pid = process.pid.to_string();
    let alone = json(&[&pid, "--to", "all"]);
    let outcomes = alone["outcomes"].as_array().unwrap().iter();
    let present = outcomes.filter(|outcome| outcome["reason"].is_null());
    let present: u64 = present.map(|outcome| outcome["bytes"].as_u64().unwrap()).sum();
    assert!(present >= two_threads::BYTES as u64, "{alone}");
    let warnings = alone["warnings"].as_array().unwrap();
    let told = |note: &Value| note.as_str().unwrap().contains("its main thread has ended");
    assert!(warnings.iter().any(told), "{alone}");
    holder.check();
}

/// A process that has ended, and that nobody has waited for, has no memory.
#[test]
fn processes_that_have_ended_are_told() {
    let name = format!("plz-{}", std::process::id());
    let mut shell = Command::new("/bin/sh");
    let mut zombie = shell.args(["-c", "printf %s $0 > /proc/$$/comm", &name]).spawn().unwrap();
    let stat = format!("/proc/{}/stat", zombie.id());
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::yield_now();
    }
    let pid = zombie.id().to_string();
    let alone = failure(&[&pid, "--to", "all"], 2);
    assert!(alone.contains("nothing to move: it has ended, and its parent"), "{alone}");
    let mut holder = Holder::named(&name, BYTES);
    let output = run(&[&name, "--to", "all", "--all"]);
    let note = format!("nothing to move in process {pid}: it has ended");
    check_code(&output, 0);
    assert!(stderr(&output).contains(&note), "{}", stderr(&output));
    zombie.wait().unwrap();
    holder.check();
}

#[test]
fn a_dry_run_moves_nothing() {
    let mut holder = Holder::start();
    let plan = text(&[&holder.pid(), "--to", "all", "--dry-run"]);
    assert!(plan.starts_with("Nothing is moved") && plan.contains("heap"), "{plan}");
    let plan = json(&[&holder.pid(), "--to", "all", "--dry-run"]);
    let kinds = plan["processes"][0]["kinds"].as_object().unwrap();
    let resident: u64 = kinds.values().map(|kind| kind["resident_bytes"].as_u64().unwrap()).sum();
    assert!(resident >= BYTES, "{plan}");
    holder.check();
}

#[test]
fn processes_may_be_more_than_the_usual_limit_of_open_files() {
    const FILES: libc::rlim_t = 32;
    let script = format!("for i in $(seq {FILES}); do sleep 1000 & done; echo; wait");
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &script]).stdout(Stdio::piped()).process_group(0);
    let mut parent = shell.spawn().unwrap();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let mut command = pageleap(&[&parent.id().to_string(), "--tree", "--to", "all", "--json"]);
    // SAFETY: the calls are safe to call after fork, and change the child only.
    unsafe {
        command.pre_exec(|| {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
            limit.rlim_cur = FILES;
            match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let output = command.output().unwrap();
    // SAFETY: the group of a child that nobody has waited for.
    unsafe { libc::kill(-(parent.id() as i32), libc::SIGKILL) };
    parent.wait().unwrap();
    check_code(&output, 0);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(all["processes"].as_array().unwrap().len() > FILES as usize, "{all}");
}

#[test]
fn what_need_not_move_is_told_apart() {
    let mut holder = Holder::start();
    let all = json(&[&holder.pid(), "--to", "all"]);
    assert_eq!(all["ended"], "completed", "{all}");
    let outcomes = all["outcomes"].as_array().unwrap();
    assert!(outcomes.iter().any(|o| o["reason"] == "no page is present"), "{all}");
    assert!(all["left"].as_array().unwrap().is_empty(), "{all}");
    let summary = text(&[&holder.pid(), "--to", "all"]);
    assert!(summary.starts_with("done after") && summary.contains("own policy"), "{summary}");
    holder.check();
}

#[test]
fn ranges_are_moved_once_and_holes_in_them_are_told() {
    let mut holder = Holder::start();
    let memory = ProcessMemory::read(holder.0.id()).unwrap();
    let heap = memory.mappings.iter().find(|m| m.kind == MappingKind::Heap).unwrap();
    let range = |start: usize, end: usize| format!("{start:x}-{end:x}");
    let (pid, whole) = (holder.pid(), range(heap.start, heap.end));
    let plan = |ranges: &[&str]| {
        let named = ranges.iter().flat_map(|range| ["--range", range]);
        let all: Vec<&str> = [&pid, "--to", "all", "--dry-run"].into_iter().chain(named).collect();
        json(&all)["processes"][0]["kinds"]["heap"].clone()
    };
    assert_eq!(plan(&[&whole, &whole]), plan(&[&whole]));
    // Page 1 is never mapped.
    let output = run(&[&pid, "--to", "all", "--range", &whole, "--range", "1000-2000"]);
    check_code(&output, 1);
    let summary = String::from_utf8_lossy(&output.stdout);
    assert!(summary.contains("nothing is mapped there"), "{summary}");
    let why = failure(&[&pid, "--to", "all", "--range", "1000-2000"], 2);
    assert!(why.contains("nothing is selected"), "{why}");
    holder.check();
}

#[test]
fn nobody_has_to_read_what_it_says() {
    let mut holder = Holder::start();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let code = |arguments: &[&str]| {
        let mut command = pageleap(arguments);
        command.stdout(Stdio::null()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(code(&["nonesuch-process", "--to", "all"]), Some(2));
    assert_eq!(code(&[&holder.pid(), "--to", "all"]), Some(0));
    // A reader who has gone.
    let mut child = pageleap(&[&holder.pid(), "--to", "all"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), complaints(&output).as_str()), (Some(0), ""));
    holder.check();
}

#[test]
fn a_process_moves_between_nodes() {
    const NAME: &str = "a_process_moves_between_nodes";
    let Some(nodes) = several(NAME) else { return };
    let [a, b] = [nodes[0].0, nodes[1].0];
    let mut holder = Holder::start();
    let pid = holder.pid();
    let before = [a, b].map(|node| holder.on(node));
    for to in [a, b] {
        json(&[&pid, "--to", &to.to_string(), "--dry-run"]);
        assert_eq!([a, b].map(|node| holder.on(node)), before, "a dry run has moved pages");
    }
    for (to, from) in [(a, b), (b, a), (a, b)] {
        let all = json(&[&pid, "--to", &to.to_string(), "--mapping", "heap,anonymous,stack"]);
        assert_eq!((&all["ended"], holder.on(from)), (&"completed".into(), 0), "{all}");
        assert!(holder.on(to) >= BYTES, "{all}");
        holder.check();
    }
    // Everything that is mapped once, with a bound on calls and a rate.
    let to = b.to_string();
    let all = json(&[&pid, "--to", &to, "--rate", "100m", "--max-call", "5ms", "--batch", "256"]);
    assert!(all["moved_bytes"].as_u64().unwrap() >= BYTES, "{all}");
    assert!(all["calls"]["move_pages"].as_u64().unwrap() >= BYTES / 4096 / 256, "{all}");
    // Half of it back, by weights.
    let both = format!("{a},{b}");
    text(&[&pid, "--to", &both, "--weights", "1,1", "--mapping", "heap,anonymous"]);
    assert!(holder.on(a).abs_diff(holder.on(b)) < BYTES / 10, "{} {}", holder.on(a), holder.on(b));
    holder.check();
}

#[test]
fn an_interrupt_ends_it_with_a_summary() {
    const NAME: &str = "an_interrupt_ends_it_with_a_summary";
    let Some(nodes) = several(NAME) else { return };
    let mut holder = Holder::start();
    let to = nodes[1].0;
    // At a page per second, its heap takes more than half an hour.
    let (pid, node, before) = (holder.pid(), to.to_string(), holder.on(to));
    let slow = [&*pid, "--to", &*node, "--rate", "4k", "--mapping", "heap,anonymous"];
    let mut child = pageleap(&[&slow[..], &["--json"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    holder.wait_for(&mut child, to, before + 1);
    // Without a terminal, a line says from time to time how far it is.
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let told = told.find(|line| line.starts_with("moved ")).unwrap();
    assert!(told.contains(" per second, ") && told.ends_with(" left"), "{told}");
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let mut summary = String::new();
    child.stdout.take().unwrap().read_to_string(&mut summary).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["ended"], "cancelled");
    assert!(summary["moved_bytes"].as_u64().unwrap() > 0, "{summary}");
    assert!(!summary["left"].as_array().unwrap().is_empty(), "{summary}");
    holder.check();
    // A process that ends half-way: an error, and no hang.
    let before = holder.on(to);
    let mut child = pageleap(&slow).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    holder.wait_for(&mut child, to, before + 1);
    drop(holder);
    let output = child.wait_with_output().unwrap();
    check_code(&output, 1);
    let summary = String::from_utf8_lossy(&output.stdout);
    assert!(summary.contains("has ended"), "{summary}");
}

#[test]
fn of_several_processes_one_may_end_meanwhile() {
    const NAME: &str = "of_several_processes_one_may_end_meanwhile";
    let Some(nodes) = several(NAME) else { return };
    let name = format!("ple-{}", std::process::id());
    let [ends, mut stays] = [8 * BYTES, BYTES].map(|bytes| Holder::named(&name, bytes));
    let to = nodes[1].0;
    // The first would take half a minute, the other one takes four seconds.
    let arguments = [&name, "--all", "--to", &to.to_string(), "--rate", "2m", "--json"];
    let mut child = pageleap(&[&arguments[..], &["--mapping", "heap,anonymous"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    ends.wait_for(&mut child, to, 1);
    drop(ends);
    let output = child.wait_with_output().unwrap();
    let summary = String::from_utf8_lossy(&output.stdout);
    assert_eq!((output.status.code(), complaints(&output).as_str()), (Some(0), ""), "{summary}");
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["ended"], "completed", "{summary}");
    assert!(summary["left"].as_array().unwrap().is_empty(), "{summary}");
    let outcomes = summary["outcomes"].as_array().unwrap();
    let gone = |outcome: &Value| outcome["reason"].as_str().is_some_and(|w| w.contains("ended"));
    assert!(outcomes.iter().any(gone), "{summary}");
    assert!(stays.on(to) >= BYTES, "{summary}");
    stays.check();
}

#[test]
fn another_user_is_told_what_is_missing() {
    const NAME: &str = "another_user_is_told_what_is_missing";
    if !common::is_root() {
        return skip(NAME, &"only root can make a process that another user may not move");
    }
    let mut holder = Holder::start();
    let mut command = pageleap(&[&holder.pid(), "--to", "all"]);
    let output = command.uid(65_534).gid(65_534).output().unwrap();
    check_code(&output, 1);
    assert!(stderr(&output).contains("CAP_SYS_PTRACE"), "{}", stderr(&output));
    holder.check();
}
