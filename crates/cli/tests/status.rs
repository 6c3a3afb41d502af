//! Runs `pageleap status` as a user would.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/two_threads.rs"]
mod two_threads;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use common::skip;
use serde_json::Value;
use two_threads::TwoThreads;

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;

fn pageleap(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.arg("status").args(arguments);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The standard output of a run that must succeed.
fn text(arguments: &[&str]) -> String {
    let output = pageleap(arguments).output().expect("pageleap starts");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}

/// The processes of a run with `--json`.
fn processes(arguments: &[&str]) -> Vec<Value> {
    let all: Value = serde_json::from_str(&text(&[arguments, &["--json"]].concat())).unwrap();
    all["processes"].as_array().unwrap().clone()
}

/// The error message of a run that must fail with `code` and write nothing else.
fn failure(mut command: Command, code: i32) -> String {
    let output = command.output().expect("pageleap starts");
    assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
    stderr(&output)
}

/// A shell that runs a script up to its `echo ready`, and then waits.
struct Shell(Child);

impl Shell {
    fn run(script: &str) -> Shell {
        let mut child = Command::new("/bin/sh")
            .args(["-c", &format!("{script}\necho ready\nread line")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Shell(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // SAFETY: the shell has a process group of its own, with its children.
        unsafe { libc::kill(-(self.0.id() as i32), libc::SIGKILL) };
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_is_shown_by_kind_node_and_mapping() {
    let shell = Shell::run(":");
    let text = text(&[&shell.pid(), "--all"]);
    for part in ["resident", "page tables", "Memory by kind and node", "pages lie on", "[stack]"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let found = processes(&[&shell.pid()]);
    let [process] = &found[..] else { panic!("{found:?}") };
    assert_eq!(process["pid"], shell.0.id());
    let bytes = |value: &Value| value.as_u64().unwrap();
    let mappings = process["mappings"].as_array().unwrap();
    let resident: u64 = mappings.iter().map(|m| bytes(&m["resident_bytes"])).sum();
    assert_eq!(bytes(&process["resident_bytes"]), resident);
    assert!(resident > 0 && mappings.iter().any(|m| m["movable"] == "kernel"), "{process}");
}

#[test]
fn a_process_is_found_by_its_name_and_with_its_children() {
    let name = format!("pl-{}", std::process::id());
    // The child has its name from before the shell gets another one.
    let shell = Shell::run(&format!("sleep 1000 >/dev/null & printf {name} > /proc/$$/comm"));
    let found = processes(&[&name]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["pid"], &found[0]["name"]), (&shell.0.id().into(), &name.into()));
    let tree = processes(&[&shell.pid(), "--tree"]);
    assert_eq!(tree.len(), 2, "{tree:?}");
    let text = text(&[&shell.pid(), "--tree"]);
    assert!(text.contains("2 processes; shared memory counts in each"), "{text}");
}

#[test]
fn a_process_whose_main_thread_has_ended_is_shown() {
    let process = TwoThreads::without_main_thread("main has ended");
    let pid = process.pid.to_string();
    let text = text(&[&pid]);
    let note = format!(
        "note: its main thread has ended: its memory is read, and moves, by its thread {}",
        process.other
    );
    assert!(text.contains(&note) && text.contains("anonymous"), "{text}");
    let bytes = processes(&[&pid])[0]["resident_bytes"].as_u64().unwrap();
    assert!(bytes >= two_threads::BYTES as u64, "{bytes}");
}

#[test]
fn hostile_names_are_harmless() {
    let shell = Shell::run(r"printf 'a\033[2J\nb' > /proc/$$/comm");
    let text = text(&[&shell.pid()]);
    assert!(!text.contains('\u{1b}'), "{text:?}");
    assert!(text.starts_with("a\\u{1b}[2J"), "{text:?}");
    let all = processes(&[&shell.pid()]);
    assert!(!all[0]["name"].as_str().unwrap().chars().any(char::is_control));
}

#[test]
fn it_is_shown_again_and_again() {
    let shell = Shell::run(":");
    let mut child =
        pageleap(&[&shell.pid(), "--json", "--watch=0.1"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.take(3) {
        let all: Value = serde_json::from_str(&line.unwrap()).unwrap();
        assert_eq!(all["processes"][0]["pid"], shell.0.id());
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The object of `--page-tables --json`.
fn page_tables(process: &str) -> Value {
    serde_json::from_str(&text(&["--page-tables", process, "--json"])).unwrap()
}

#[test]
fn page_tables_are_shown_by_process_and_by_node() {
    let shell = Shell::run(":");
    // The shell sleeps, so its page tables stay as they are.
    let status = fs::read_to_string(format!("/proc/{}/status", shell.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    let kb: u64 = line.split_whitespace().next().unwrap().parse().unwrap();
    let found = page_tables(&shell.pid());
    let process = &found["processes"][0];
    assert_eq!(process["pid"], shell.0.id());
    assert_eq!(process["page_table_bytes"], kb << 10);
    // Known for root where the kernel shows its memory (crates/cli/tests/kernel_memory.rs).
    assert_eq!(process["by_node"].is_null(), process["by_node_unknown"].is_string(), "{process}");
    // All processes together have at least those of the shell.
    let bytes = |node: &Value| node["page_table_bytes"].as_u64().unwrap();
    let all: u64 = found["nodes"].as_array().unwrap().iter().map(bytes).sum();
    assert!(all >= kb << 10, "{found}");
    let text = text(&["--page-tables", &shell.pid()]);
    for part in ["VmPTE", "by node and level", "PageTables", "SecPageTables", "node 0"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(!text.contains("Memory by kind"), "{text}");
}

#[test]
fn a_process_without_memory_has_no_page_tables() {
    let mut ended = Command::new("true").spawn().unwrap();
    let pid = ended.id().to_string();
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") Z ") {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(page_tables(&pid)["processes"][0]["page_table_bytes"], Value::Null);
    assert!(text(&["--page-tables", &pid]).contains("no memory of its own"));
    ended.wait().unwrap();
    assert!(failure(pageleap(&["--page-tables", "2147483647"]), 2).contains("no process"));
    assert!(failure(pageleap(&["--page-tables", "self", "--all"]), 2).contains("--all"));
    // Its other thread has the memory.
    let process = TwoThreads::without_main_thread("main has ended");
    let found = page_tables(&process.pid.to_string());
    assert!(found["processes"][0]["page_table_bytes"].as_u64().unwrap() > 0, "{found}");
}

#[test]
fn page_tables_of_other_users_are_shown() {
    const NAME: &str = "page_tables_of_other_users_are_shown";
    // SAFETY: the call cannot fail.
    if unsafe { libc::getuid() } != 0 {
        return skip(NAME, &"needs root");
    }
    let shell = Shell::run(":");
    let mut command = pageleap(&["--page-tables", &shell.pid()]);
    command.uid(NOBODY).gid(NOBODY);
    match command.output() {
        Err(error) => skip(NAME, &error), // nobody may not reach the program
        Ok(output) => {
            assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains("KiB") && text.contains("unknown"), "{text}");
        }
    }
}

/// Two cgroups of this test, one in the other, that end with it.
struct Cgroups(PathBuf);

impl Cgroups {
    fn new() -> Option<Cgroups> {
        let mounts = ["", "/unified", "/systemd", "/freezer"];
        let mounts = mounts.iter().map(|mount| PathBuf::from(format!("/sys/fs/cgroup{mount}")));
        mounts.filter(|mount| mount.join("cgroup.procs").is_file()).find_map(|mount| {
            let outer = mount.join(format!("pageleap-status-{}", std::process::id()));
            fs::create_dir(&outer).ok()?;
            let found = Cgroups(outer);
            fs::create_dir(found.inner()).ok()?;
            Some(found)
        })
    }

    fn inner(&self) -> PathBuf {
        self.0.join("inner")
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.inner());
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn all_processes_of_a_cgroup_are_shown() {
    let Some(cgroups) = Cgroups::new() else {
        return skip("all_processes_of_a_cgroup_are_shown", &"no cgroup can be made here");
    };
    let shell = Shell::run(":");
    fs::write(cgroups.inner().join("cgroup.procs"), shell.pid()).unwrap();
    let found = processes(&["--cgroup", cgroups.0.to_str().unwrap()]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["pid"], shell.0.id());
    drop(shell);
    // A cgroup that nobody is in.
    let command = pageleap(&["--cgroup", cgroups.0.to_str().unwrap()]);
    assert!(failure(command, 2).contains("no process of"));
}

/// Files of a directory that looks like a cgroup name no process, wherever the command runs.
#[test]
fn a_directory_elsewhere_is_no_cgroup() {
    let shell = Shell::run(":");
    let name = format!("pageleap-no-cgroup-{}", std::process::id());
    let directory = std::env::temp_dir().join(&name);
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("cgroup.procs"), shell.pid()).unwrap();
    let up = format!("/../../../../..{}", directory.display());
    for path in [&name, directory.to_str().unwrap(), &up] {
        let mut command = pageleap(&["--cgroup", path]);
        command.current_dir(std::env::temp_dir());
        assert!(failure(command, 2).contains("no cgroup"), "{path}");
    }
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn bad_requests_are_refused_with_a_reason() {
    let refused = |arguments: &[&str]| failure(pageleap(arguments), 2);
    assert!(refused(&["2147483647"]).contains("there is no process 2147483647"));
    assert!(refused(&["no such process"]).contains("no process is called"));
    assert!(refused(&["--unit", "no-such-unit"]).contains("no-such-unit.service"));
    assert!(refused(&["--cgroup", "/no/such"]).contains("no cgroup"));
    assert!(refused(&[]).contains("<PROCESS>"));
    assert!(refused(&["self", "--watch=0"]).contains("0.1 to 86400"));
    // SAFETY: the call cannot fail.
    if unsafe { libc::getuid() } != 0 {
        return skip("processes of others", &"needs root");
    }
    let mut command = pageleap(&["1"]);
    command.uid(NOBODY).gid(NOBODY);
    if let Err(error) = command.output() {
        return skip("processes of others", &error); // nobody may not reach the program
    }
    let message = failure(command, 1);
    assert!(message.contains("/proc/1/") && message.contains("CAP_SYS_PTRACE"), "{message}");
}
