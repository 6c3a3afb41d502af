//! Runs programs under `pageleap run`, as a shell would. The kernel's own files tell what was set:
//! programs print their `/proc/self`.

#[path = "common/command.rs"]
mod command;
#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/filter.rs"]
mod filter;
#[path = "run/job.rs"]
mod job;

use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use command::{check_code, failure, stderr, stdout, text};
use common::skip;
use filter::{Action, install_filter};
use job::{Job, soon};
use serde_json::{Value, json};

fn pageleap(flags: &[&str]) -> Command {
    command::pageleap("run", flags)
}

fn output(flags: &[&str]) -> Output {
    pageleap(flags).output().expect("pageleap starts")
}

/// The standard output of a run that succeeds and says nothing of its own.
#[track_caller]
fn silent(flags: &[&str]) -> String {
    text(pageleap(flags))
}

/// The error of a run that starts nothing.
#[track_caller]
fn refused(flags: &[&str], code: i32) -> String {
    failure(pageleap(flags), code)
}

/// The first node that this process may use, and the CPUs on which it may run.
fn machine() -> (String, Vec<usize>) {
    let output = Command::new(env!("CARGO_BIN_EXE_pageleap")).args(["topology", "--json"]).output();
    let machine: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let cpus = machine["allowed_cpus"].as_array().unwrap().iter();
    let cpus = cpus.map(|cpu| cpu.as_u64().unwrap() as usize).collect();
    (machine["allowed_nodes"][0].to_string(), cpus)
}

const POLICY: [&str; 3] = ["grep", "stack", "/proc/self/numa_maps"];
const CPUS: [&str; 3] = ["grep", "Cpus_allowed_list", "/proc/self/status"];

/// The policy of the stack of a program, as numa_maps has it.
#[track_caller]
fn policy(flags: &[&str]) -> String {
    let line = silent(&[flags, &POLICY].concat());
    // The kernel's name of a policy may have a blank: `prefer (many):0`.
    let words = line.split(" stack").next().unwrap();
    words.split_once(' ').unwrap().1.to_owned()
}

#[test]
fn the_program_has_the_policy_of_each_letter() {
    let (node, _) = machine();
    let node = node.as_str();
    for (flags, policy_of) in [
        (&[][..], "default".to_owned()),
        (&["-i", node], format!("interleave:{node}")),
        (&["-m", node], format!("bind:{node}")),
        (&["-p", node], format!("prefer:{node}")),
        (&["-P", node], format!("prefer (many):{node}")),
        (&["-l"], "local".to_owned()),
        (&["--interleave", "all", "--thp", "off"], "interleave:".to_owned()),
        (&["-N", node, "-m", "same"], format!("bind:{node}")),
        (&["-am+0"], format!("bind:{node}")),
        (&["--balancing", "off"], "local".to_owned()),
        (&["--balancing=off", "-i", node], format!("interleave:{node}")),
    ] {
        let found = policy(flags);
        assert!(found.starts_with(&policy_of), "{flags:?}: {found}");
    }
}

#[test]
fn the_program_agrees_with_numactl_on_every_letter() {
    const NAME: &str = "the_program_agrees_with_numactl_on_every_letter";
    if Command::new("numactl").arg("--version").output().is_err() {
        return skip(NAME, &"numactl is not installed");
    }
    let (node, cpus) = machine();
    let (node, cpu) = (node.as_str(), cpus.last().unwrap().to_string());
    for flags in [
        &["-i", node][..],
        &["-m", node],
        &["-p", node],
        &["-P", node],
        &["-l"],
        &["-N", node],
        &["-C", &cpu],
        &["-C", "+0"],
        &["-C", &format!("!{cpu}")],
        &["-N", node, "-C", &cpu],
        &["-C", &cpu, "-N", node],
        &["-a", "-C", &cpu],
        &["-a", "-N", node, "-m", "same"],
        &[&format!("-i{node}")],
        &[&format!("--membind={node}")],
        &["--membind", "all", "--physcpubind", "all"],
        &["-c", node],
        &["--physcpub", &cpu],
        &["--mem", node, "--cpun", node],
        &["-N", node, "-N", node, "-b", "-b"],
        &["-C", "+0", "-C", &cpu],
    ] {
        for program in [POLICY, CPUS] {
            let theirs = Command::new("numactl").args(flags).args(program).output().unwrap();
            if !theirs.status.success() && flags == ["-C", &format!("!{cpu}")] {
                continue; // A machine with one CPU has no others.
            }
            let said = stderr(&theirs);
            // numactl 2.0.15 brought `-P`.
            if said.contains("invalid option") || said.contains("without kernel support") {
                continue;
            }
            let ours = output(&[flags, &program].concat());
            let words = |output: &Output| -> Vec<String> {
                let text = stdout(output);
                let words = text.split_whitespace();
                // Addresses and counts of pages differ from run to run.
                let kept = words.filter(|word| {
                    let head = word.split('=').next().unwrap();
                    !["anon", "dirty", "active", "mapped"].contains(&head)
                        && u64::from_str_radix(word, 16).map_or(true, |id| id < 1 << 16)
                        && !head.starts_with('N')
                });
                kept.map(str::to_owned).collect()
            };
            assert_eq!(words(&ours), words(&theirs), "{flags:?}: {}", stderr(&ours));
            assert_eq!(ours.status.code(), theirs.status.code(), "{flags:?}");
        }
    }
}

#[test]
fn the_program_runs_on_the_cpus_that_were_named() {
    let (node, cpus) = machine();
    let last = cpus.last().unwrap().to_string();
    let listed = |flags: &[&str]| {
        let line = silent(&[flags, &CPUS].concat());
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(listed(&["-C", &last]), last);
    assert_eq!(listed(&["-C", "+0"]), cpus[0].to_string());
    assert_eq!(listed(&["-N", &node, "-C", &last]), last, "the last one counts, as in numactl");
    // The CPUs of a node are all of them, whatever the affinity of the shell is.
    let mut bound = Command::new("taskset");
    bound.args(["-c", &last, env!("CARGO_BIN_EXE_pageleap"), "run", "-N", &node]);
    let bound = stdout(&bound.args(CPUS).output().unwrap());
    assert_eq!(bound, silent(&[&["-N", &node], &CPUS[..]].concat()));
    // Without -a a CPU outside of the affinity of the shell is none.
    if cpus.len() > 1 {
        let mut bound = Command::new("taskset");
        bound.args(["-c", &last, env!("CARGO_BIN_EXE_pageleap"), "run"]);
        let first = cpus[0].to_string();
        let output = bound.args(["-C", &first, "true"]).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.contains("outside the cpuset or the affinity"), "{said}");
        let mut bound = Command::new("taskset");
        bound.args(["-c", &last, env!("CARGO_BIN_EXE_pageleap"), "run", "-a", "-C", &first]);
        let output = bound.args(CPUS).output().unwrap();
        assert!(stdout(&output).trim_end().ends_with(&first), "{output:?}");
    }
}

#[test]
fn huge_pages_are_off_or_asked_for() {
    let of = |flags: &[&str]| {
        let output =
            output(&[flags, &["sh", "-c", "grep THP_enabled /proc/self/status; env"]].concat());
        check_code(&output, 0);
        (stdout(&output), stderr(&output))
    };
    let (off, said) = of(&["--thp", "off"]);
    assert_eq!((off.lines().next(), said.as_str()), (Some("THP_enabled:\t0"), ""));
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    // A run below another one that has switched them off.
    let below = [env!("CARGO_BIN_EXE_pageleap"), "run", "--thp", "on"];
    let (on, said) = of(&[&["--thp", "off"][..], &below].concat());
    let value = enabled.unwrap_or_default();
    let is_asked = on.contains("GLIBC_TUNABLES=glibc.malloc.hugetlb=1")
        && on.contains("MALLOC_CONF=thp:always");
    match value.split(['[', ']']).nth(1) {
        Some("always") => {
            assert!(on.starts_with("THP_enabled:\t1") && !is_asked && said.is_empty())
        }
        Some("madvise") => {
            assert!(on.starts_with("THP_enabled:\t1") && is_asked, "{on}");
            assert!(said.contains("GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (glibc"), "{said}");
        }
        _ => assert!(said.contains("gets no huge pages"), "{said}"),
    }
}

#[test]
fn the_exit_code_is_the_programs_or_tells_why_there_is_none() {
    for stays in [&[][..], &["-v"]] {
        let code = |rest: &[&str]| output(&[stays, rest].concat()).status;
        assert_eq!(code(&["sh", "-c", "exit 7"]).code(), Some(7));
        assert_eq!(code(&["--", "sh", "-c", "exit 0"]).code(), Some(0));
        assert_eq!(code(&["sh", "-c", "kill -TERM $$"]).signal(), Some(libc::SIGTERM));
        assert_eq!(code(&["sh", "-c", "kill -SEGV $$"]).signal(), Some(libc::SIGSEGV));
        let missing = refused(&[stays, &["no-such-program"]].concat(), 127);
        assert!(
            missing.contains("no-such-program: there is no such program in the folders of PATH")
        );
        let file = refused(&[stays, &["/proc/self/status"]].concat(), 126);
        assert!(file.contains("cannot be executed: EACCES"), "{file}");
    }
    let script = std::env::temp_dir().join(format!("pageleap-run-{}", std::process::id()));
    let path = script.to_str().unwrap();
    for (text, code, said) in
        [("exit 9", 9, ""), ("#!/no/such/shell\n", 126, "its interpreter does not exist")]
    {
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let output = output(&[path]);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    fs::remove_file(script).unwrap();
}

#[test]
fn a_wrong_request_names_the_word_and_starts_nothing() {
    let (node, _) = machine();
    for (flags, parts) in [
        (&["-m", "1023", "true"][..], &["--membind", "node 1023 does not exist", "may use"][..]),
        (&["-N", "1023", "true"], &["--cpunodebind", "node 1023 does not exist"]),
        (&["-C", "8000", "true"], &["--physcpubind", "CPU 8000 does not exist", "may run on"]),
        (&["-C", "x", "true"], &["`x` is not a CPU"]),
        (&["-m", "netdev:lo", "true"], &["netdev:lo: it is no device of a bus"]),
        (&["-N", "block:no-such", "true"], &["block:no-such: there is no such device"]),
        (&["-m", "ip:localhost", "true"], &["ip route get"]),
        (&["-m", "same", "true"], &["no set of nodes was given before"]),
        (&["-m", &node, "-i", &node, "true"], &["cannot be used with"]),
        (&["-i", &node, "-b", "true"], &["never balances pages of MPOL_INTERLEAVE"]),
        (&["-l", "--balancing", "on", "true"], &["MPOL_LOCAL"]),
        (&["--shm", "key", "-m", &node], &["--shm (-S) is an option of numactl only"]),
        (&["-s"], &["--show (-s)", "pageleap status"]),
        (&["-t", "true"], &["--strict (-t)", "--no-fallback"]),
        (&["-V", "true"], &["--verify (-V)"]),
        (&["-m", "same:membind", "true"], &["`same:membind` is not a node"]),
        (&["--membnd", "0", "true"], &["--membnd"]),
        (&["-Z", "true"], &["-Z"]),
        (&["--json", "true"], &["--dry-run"]),
        (&[], &["no command"]),
        (&["-m", &node], &["no command"]),
        (&["--report-file", "/no/such/folder/x", "true"], &["--report-file /no/such/folder/x"]),
    ] {
        let said = refused(flags, 125);
        assert!(parts.iter().all(|part| said.contains(part)), "{flags:?}: {said}");
    }
    assert_eq!(output(&["--help"]).status.code(), Some(0));
}

#[test]
fn a_trial_prints_the_commands_and_starts_nothing() {
    let (node, cpus) = machine();
    let first = cpus[0].to_string();
    let shown = silent(&["--dry-run", "-m", &node, "-C", &first, "no-such-program", "a b", "'"]);
    let expected =
        format!("numactl --membind={node} --physcpubind={first} no-such-program 'a b' \"'\"\n");
    assert_eq!(shown, expected);
    assert_eq!(silent(&["--dry-run", "true"]), "true\n");
    let object = silent(&["--dry-run", "--json", "--thp", "off", "-i", &node, "ls", "-l"]);
    let object: Value = serde_json::from_str(&object).unwrap();
    let node: u32 = node.parse().unwrap();
    assert_eq!(
        object["memory"],
        json!({"mode": "MPOL_INTERLEAVE", "nodes": [node], "is_balanced": false})
    );
    assert_eq!((&object["cpus"], &object["thp_disabled"]), (&Value::Null, &json!(true)));
    assert_eq!((&object["command"], &object["notes"]), (&json!(["ls", "-l"]), &json!([])));
    // The line that is printed does the same.
    if Command::new("numactl").arg("--version").output().is_ok() {
        let line = silent(&[&["--dry-run", "-m", &node.to_string()], &POLICY[..]].concat());
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert!(stdout(&output).contains(&format!("bind:{node}")), "{output:?}");
    }
}

/// The calls that Docker's default profile refuses without CAP_SYS_NICE.
const OF_CONTAINERS: [i64; 3] = [libc::SYS_set_mempolicy, libc::SYS_get_mempolicy, libc::SYS_mbind];

#[test]
fn where_a_filter_refuses_a_policy_one_line_says_what_stands_in() {
    let (node, cpus) = machine();
    for action in [Action::Errno(libc::EPERM), Action::Errno(libc::ENOSYS), Action::Kill] {
        let filtered = |flags: &[&str], program: &[&str]| {
            let mut command = pageleap(flags);
            // SAFETY: the filter is installed by system calls alone.
            unsafe {
                command.args(program).pre_exec(move || install_filter(action, &OF_CONTAINERS))
            };
            command.output().unwrap()
        };
        let bound = filtered(&["-m", &node], &CPUS);
        let said = stderr(&bound);
        assert_eq!(bound.status.code(), Some(0), "{action:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("filter of the container refuses it"), "{said}");
        assert!(said.contains(&format!("of node {node} instead")), "{said}");
        let spread = filtered(&["-i", &node], &["true"]);
        let said = stderr(&spread);
        assert_eq!((spread.status.code(), said.lines().count()), (Some(0), 1), "{said}");
        assert!(said.contains("The policy stays as it was"), "{said}");
        let strict = filtered(&["--no-fallback", "-m", &node], &["true"]);
        assert_eq!(strict.status.code(), Some(125));
        assert!(stderr(&strict).contains("--cap-add SYS_NICE"), "{}", stderr(&strict));
        for (call, flags) in
            [(libc::SYS_sched_setaffinity, &["-C", "+0"][..]), (libc::SYS_prctl, &["--thp", "off"])]
        {
            let mut command = pageleap(flags);
            // SAFETY: the filter is installed by system calls alone.
            unsafe { command.arg("true").pre_exec(move || install_filter(action, &[call])) };
            let output = command.output().unwrap();
            let said = stderr(&output);
            // Whether a filter applies is asked by the call that the last one refuses.
            if call == libc::SYS_prctl && action == Action::Kill {
                continue;
            }
            assert_eq!(
                (output.status.code(), said.lines().count()),
                (Some(0), 1),
                "{call}: {said}"
            );
        }
        // Without a policy nothing is asked for, and nothing said.
        let plain = filtered(&["-C", &cpus[0].to_string()], &["true"]);
        assert_eq!((plain.status.code(), stderr(&plain).as_str()), (Some(0), ""));
    }
}

#[test]
fn the_program_inherits_what_the_launcher_has_inherited() {
    let shown = [
        "sh",
        "-c",
        "grep -E 'Sig(Ign|Blk|Pnd)' /proc/self/status; ls /proc/self/fd; env | sort | grep -v ^_=",
    ];
    for ignored in [false, true] {
        let run = |mut command: Command| {
            // SAFETY: neither call takes a pointer to more than its own variables.
            unsafe {
                command.pre_exec(move || {
                    let handler = if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
                    for signal in [libc::SIGPIPE, libc::SIGCHLD, libc::SIGHUP] {
                        libc::signal(signal, handler);
                    }
                    let mut blocked: libc::sigset_t = std::mem::zeroed();
                    libc::sigaddset(&mut blocked, libc::SIGUSR1);
                    libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, std::ptr::null_mut());
                    Ok(())
                })
            };
            stdout(&command.stderr(Stdio::null()).output().unwrap())
        };
        let mut alone = Command::new(shown[0]);
        alone.args(&shown[1..]);
        let alone = run(alone);
        assert_eq!(run(pageleap(&shown)), alone, "SIGPIPE and others ignored: {ignored}");
        assert_eq!(run(pageleap(&[&["-v"], &shown[..]].concat())), alone, "{ignored}");
    }
}

#[test]
fn its_own_words_go_to_standard_error_or_to_a_file() {
    let said = stderr(&output(&["-v", "-l", "echo", "hello"]));
    assert!(said.contains("pageleap run: memory policy: MPOL_LOCAL\n"), "{said}");
    assert!(said.contains("exit status 0 after"), "{said}");
    let file = std::env::temp_dir().join(format!("pageleap-words-{}", std::process::id()));
    let name = file.to_str().unwrap();
    let all =
        output(&["-v", "-l", "--report-file", name, "sh", "-c", "echo hello; echo other >&2"]);
    assert_eq!((stdout(&all).as_str(), stderr(&all).as_str()), ("hello\n", "other\n"));
    let words = fs::read_to_string(&file).unwrap();
    assert!(words.contains("MPOL_LOCAL") && words.contains("exit status 0"), "{words}");
    fs::remove_file(file).unwrap();
}

#[test]
fn closed_files_are_closed_for_the_program() {
    for closed in [">&-", "<&-", "2>&-", "<&- >&- 2>&-"] {
        let line = |run: &str| format!("{run} sh -c 'echo hello || exit 9; read line' {closed}");
        let code =
            |run: &str| Command::new("sh").args(["-c", &line(run)]).output().unwrap().status.code();
        let ours = format!("{} run", env!("CARGO_BIN_EXE_pageleap"));
        assert_eq!(code(&ours), code(""), "{closed}");
    }
}

#[test]
fn the_parent_keeps_no_file_of_the_program() {
    // The program closes its output and goes on: the reader comes to the end.
    let mut job =
        Job::start(pageleap(&["-v", "sh", "-c", "echo $$; exec >&- 2>&-; exec sleep 1000"]));
    job.read_to_end();
    assert!(job::state_of(job.program).is_some_and(|state| state != 'Z'));
    job.signal(libc::SIGTERM);
    assert_eq!(job.end(), (None, Some(libc::SIGTERM)));
}

/// A program that runs until SIGTERM, and then exits with 5. It starts no other: a shell that does so
/// by vfork(2) cannot be stopped until the other one has begun, and that may be stopped before. It
/// waits for nothing: a shell acts on a signal between two commands, and one that comes just before
/// `read` blocks would wait for input.
const ENDLESS: &str = "trap 'exit 5' TERM; echo $$; while :; do :; done";

#[test]
fn a_parent_passes_on_signals_and_ends_as_the_program_has() {
    let mut job = Job::start(pageleap(&["-v", "sh", "-c", ENDLESS]));
    job.signal(libc::SIGTERM);
    assert_eq!(job.end(), (Some(5), None));
    // A timer that was set before is the program's.
    let mut command = pageleap(&["-v", "sh", "-c", "echo $$; exec sleep 1000"]);
    // SAFETY: the call reads one structure.
    unsafe {
        command.pre_exec(|| {
            let mut timer: libc::itimerval = std::mem::zeroed();
            timer.it_value.tv_usec = 400_000;
            libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
            Ok(())
        })
    };
    assert_eq!(Job::start(command).end(), (None, Some(libc::SIGALRM)));
}

#[test]
fn a_parent_stops_and_goes_on_with_the_program() {
    // A stop of the program is seen in the parent, and SIGCONT lets both go on.
    let mut job = Job::start(pageleap(&["-v", "sh", "-c", "echo $$; kill -STOP $$; exit 6"]));
    assert_eq!(job.stopped(), libc::SIGSTOP);
    assert_eq!(job.program_state(), 'T');
    job.signal(libc::SIGCONT);
    assert_eq!(job.end(), (Some(6), None));

    // A stop that is asked of the parent is the program's.
    let mut job = Job::start(pageleap(&["-v", "sh", "-c", ENDLESS]));
    job.signal(libc::SIGTSTP);
    assert_eq!(job.stopped(), libc::SIGTSTP);
    assert_eq!(job.program_state(), 'T');
    job.signal(libc::SIGCONT);
    soon(|| job.program_state() != 'T');
    job.signal(libc::SIGTERM);
    assert_eq!(job.end(), (Some(5), None));

    // So is a stop of the whole group, as by Ctrl-Z, and it is one. Each job is stopped once, because
    // nothing tells when a parent is done with the signal that has continued it.
    for _ in 0..3 {
        let mut job = Job::start(pageleap(&["-v", "sh", "-c", ENDLESS]));
        job.signal_group(libc::SIGTSTP);
        assert_eq!(job.stopped(), libc::SIGTSTP);
        soon(|| job.program_state() == 'T');
        job.signal_group(libc::SIGCONT);
        soon(|| job.parent_state() != 'T' && job.program_state() != 'T');
        job.signal(libc::SIGTERM);
        assert_eq!(job.end(), (Some(5), None));
    }

    // If somebody continues the program alone, the parent goes on as well.
    for _ in 0..3 {
        let mut job = Job::start(pageleap(&["-v", "sh", "-c", ENDLESS]));
        job.signal_program(libc::SIGSTOP);
        assert_eq!(job.stopped(), libc::SIGSTOP);
        job.signal_program(libc::SIGCONT);
        soon(|| job.parent_state() != 'T');
        job.signal_program(libc::SIGTERM);
        assert_eq!(job.end(), (Some(5), None));
    }
}

#[test]
fn a_closed_terminal_ends_the_program_under_a_parent() {
    let (mut job, terminal) =
        Job::on_terminal(pageleap(&["-v", "sh", "-c", "echo $$; exec sleep 1000"]));
    drop(terminal);
    let program = job.program;
    assert_eq!(job.end(), (None, Some(libc::SIGHUP)));
    soon(|| job::state_of(program).is_none());
}

#[test]
fn the_program_ends_with_a_parent_that_is_killed() {
    let mut job = Job::start(pageleap(&["-v", "sh", "-c", "echo $$; read line"]));
    let program = job.program;
    job.signal(libc::SIGKILL);
    assert_eq!(job.end(), (None, Some(libc::SIGKILL)));
    soon(|| job::state_of(program).is_none_or(|state| state == 'Z'));
}

/// A command on a terminal of its own, with what it shows; `None` if script(1) is missing. No shell
/// stays between script(1) and the command: Ctrl-C would end a dash, whatever the command does.
fn on_terminal(test: &str, line: &str) -> Option<(Child, ChildStdin, job::Shown)> {
    if Command::new("script").arg("--version").output().is_err() {
        skip(test, &"there is no script(1)");
        return None;
    }
    let mut script = Command::new("script");
    script.arg("-qec").arg(format!("exec {line}")).arg("/dev/null");
    script.env("SHELL", "/bin/sh").stdin(Stdio::piped()).stdout(Stdio::piped());
    // A shell starts what runs in its background with SIGINT ignored.
    // SAFETY: the calls take no pointers.
    unsafe {
        script.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    let mut child = script.spawn().unwrap();
    let typed = child.stdin.take().unwrap();
    let shown = job::Shown::of(child.stdout.take().unwrap());
    Some((child, typed, shown))
}

/// A program that counts SIGINT until its input ends. Its handler takes so long that a second signal
/// finds it there, and does not become one with the first.
#[test]
fn counting() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    extern "C" fn count(_: libc::c_int) {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the call reads the bytes; it is one that a handler may make.
        unsafe { libc::write(1, c"interrupted".as_ptr().cast(), 11) };
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    if std::env::var_os("PAGELEAP_COUNTS").is_none() {
        return;
    }
    // SAFETY: the handler updates an atomic and sleeps.
    unsafe { libc::signal(libc::SIGINT, count as *const () as libc::sighandler_t) };
    println!("ready");
    let mut line = String::new();
    while !line.contains("end") {
        line.clear();
        if std::io::stdin().read_line(&mut line).is_ok() {
            println!("got {} after {}", line.trim(), COUNT.load(Ordering::Relaxed));
        }
    }
}

#[test]
fn the_terminal_is_the_programs() {
    let program = std::env::current_exe().unwrap();
    for stays in ["", "-v "] {
        let line = format!(
            "env PAGELEAP_COUNTS=1 {} run {stays}{} --exact counting --nocapture --test-threads=1",
            env!("CARGO_BIN_EXE_pageleap"),
            program.display()
        );
        let terminal = on_terminal("the_terminal_is_the_programs", &line);
        let Some((mut child, mut typed, mut shown)) = terminal else { return };
        let mut type_in = |text: &[u8]| typed.write_all(text).unwrap();
        shown.wait_for("ready");
        type_in(b"word\n");
        shown.wait_for("got word after 0");
        // Ctrl-C reaches the program once: there is time for a second one to come. The terminal
        // forgets what was typed before it.
        type_in(b"\x03");
        shown.wait_for("interrupted");
        std::thread::sleep(std::time::Duration::from_millis(300));
        type_in(b"end\n");
        shown.wait_for("got end after 1");
        assert_eq!(child.wait().unwrap().code(), Some(0), "{stays}{}", shown.text());
    }
}

#[test]
fn a_shell_stops_and_continues_the_program() {
    const NAME: &str = "a_shell_stops_and_continues_the_program";
    if Command::new("bash").arg("--version").output().is_err() {
        return skip(NAME, &"there is no bash");
    }
    for stays in ["", "-v "] {
        let Some((mut child, mut typed, mut shown)) =
            on_terminal(NAME, "bash --norc --noprofile -i")
        else {
            return;
        };
        let mut type_in = |text: String| typed.write_all(text.as_bytes()).unwrap();
        let run = format!("{} run {stays}", env!("CARGO_BIN_EXE_pageleap"));
        type_in(format!(
            "PS1='at ''shell> '; {run} sh -c 'echo be''gun $PPID o''k; while read a; do echo got $a; done'\n"
        ));
        shown.wait_for(" ok\r\n");
        let text = shown.text();
        let parent = text.split("begun ").nth(1).and_then(|rest| rest.split(' ').next());
        let parent: i32 = parent.unwrap().parse().unwrap();
        for round in 0..3 {
            type_in("\x1a".to_owned());
            shown.wait_for_times("at shell> ", round + 1);
            type_in("fg\n".to_owned());
            type_in(format!("word{round}\n"));
            shown.wait_for(&format!("got word{round}"));
            // A Ctrl-Z before would stop the parent first, and the program could take the next word
            // from the shell.
            soon(|| stays.is_empty() || job::has_gone_on(parent));
        }
        // Ctrl-C ends the program, and the shell goes on.
        type_in("\x03".to_owned());
        shown.wait_for_times("at shell> ", 4);
        type_in("echo code=$?; exit 4\n".to_owned());
        shown.wait_for("code=130");
        assert_eq!(child.wait().unwrap().code(), Some(4), "{stays}{}", shown.text());
        assert_eq!(shown.text().matches("Stopped").count(), 3, "{stays}{}", shown.text());
    }
}
