//! `pageleap run` with settings of the whole machine, with other allocators, and with a home.

#[path = "common/command.rs"]
mod command;
#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "run/job.rs"]
mod job;

use std::fs;
use std::process::{Command, Output};

use command::{failure, stderr, stdout};
use common::{is_root, skip};
use job::{Job, soon};
use serde_json::Value;

/// A setting that changes nothing on a machine with one node, and little on others.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";

fn pageleap(flags: &[&str]) -> Command {
    command::pageleap("run", flags)
}

fn output(flags: &[&str]) -> Output {
    pageleap(flags).output().expect("pageleap starts")
}

#[track_caller]
fn refused(flags: &[&str]) -> String {
    failure(pageleap(flags), 125)
}

fn balancing() -> String {
    fs::read_to_string(BALANCING).unwrap().trim().to_owned()
}

/// One after the other: all of them change the same setting.
#[test]
fn settings_of_the_machine_are_put_back_however_the_runs_end() {
    const NAME: &str = "settings_of_the_machine_are_put_back_however_the_runs_end";
    if !is_root() || fs::write(BALANCING, balancing_or_nothing()).is_err() {
        return skip(NAME, &"kernel.numa_balancing cannot be written here");
    }
    let before = balancing();
    let (other, switch, opposite) =
        if before == "0" { ("1", "on", "off") } else { ("0", "off", "on") };
    let flags = ["--system", "--balancing", switch];
    let run = |program: &[&str]| output(&[&flags[..], program].concat());
    let is_back = || balancing() == before;

    let shown = run(&["cat", BALANCING]);
    assert_eq!((shown.status.code(), stdout(&shown).trim()), (Some(0), other), "{shown:?}");
    assert!(is_back(), "put back before the command has ended");
    // The exit code is the program's, and so is a signal; a program that is not there changes
    // nothing.
    assert_eq!(run(&["sh", "-c", "exit 3"]).status.code(), Some(3));
    assert_eq!(run(&["no-such-program"]).status.code(), Some(127));
    let signal = std::os::unix::process::ExitStatusExt::signal;
    assert_eq!(signal(&run(&["sh", "-c", "kill -TERM $$"]).status), Some(libc::SIGTERM));
    assert!(is_back());
    // A trial changes nothing.
    let trial = run(&["--dry-run", "true"]);
    let line = format!("echo {other} > {BALANCING}   # until it has ended\ntrue\n");
    assert!(stdout(&trial).ends_with(&line), "{trial:?}");
    assert!(is_back());

    let start = || {
        let job =
            Job::start(pageleap(&[&flags[..], &["sh", "-c", "echo $$; exec sleep 1000"]].concat()));
        assert_eq!(balancing(), other);
        job
    };
    for second_ends_first in [false, true] {
        let (mut first, mut second) = (start(), start());
        // Who wants something else is refused, and told by whom.
        let conflict = refused(&["--system", "--balancing", opposite, "true"]);
        assert!(conflict.contains(BALANCING) && conflict.contains("sh"), "{conflict}");
        let (early, late) =
            if second_ends_first { (&mut second, &mut first) } else { (&mut first, &mut second) };
        let program = early.program;
        early.signal(libc::SIGKILL);
        assert_eq!(early.end(), (None, Some(libc::SIGKILL)));
        soon(|| job::state_of(program).is_none_or(|state| state == 'Z'));
        assert_eq!(balancing(), other, "the other one still wants it");
        late.signal(libc::SIGKILL);
        assert_eq!(late.end(), (None, Some(libc::SIGKILL)));
        soon(is_back);
    }
    // A program that has changed its user outlives a killed parent, and keeps the value.
    let line = "exec setpriv --reuid 65534 --clear-groups sh -c 'echo $$; exec sleep 1000'";
    let mut job = Job::start(pageleap(&[&flags[..], &["sh", "-c", line]].concat()));
    let program = job.program;
    let list = || {
        let restore =
            Command::new(env!("CARGO_BIN_EXE_pageleap")).args(["restore", "--list"]).output();
        stdout(&restore.unwrap())
    };
    let row = || {
        let text = list();
        text.lines().find(|line| line.contains(BALANCING)).map(str::to_owned)
    };
    // The parent notes the program as a user of the value after it has started it.
    let its_name = format!("sh ({program})");
    soon(|| list().contains(&its_name));
    job.signal(libc::SIGKILL);
    assert_eq!(job.end(), (None, Some(libc::SIGKILL)));
    // The keeper of the parent has dropped the parent.
    soon(|| row().is_some_and(|row| !row.contains("ended")));
    assert!(row().unwrap().contains(&its_name));
    assert_eq!(balancing(), other);
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { libc::kill(program, libc::SIGKILL) }, 0);
    soon(is_back);
    // Where the note cannot be written, nothing is changed, and nothing is left.
    let bin = env!("CARGO_BIN_EXE_pageleap");
    let line = format!("ulimit -f 0; exec {bin} run --system --balancing {switch} true");
    let limited = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!(limited.status.code(), Some(125), "{limited:?}");
    assert!(stderr(&limited).contains("File too large"), "{limited:?}");
    assert!(is_back() && row().is_none());
    // A value of somebody else stays.
    let mut job = start();
    fs::write(BALANCING, "2").unwrap();
    job.signal(libc::SIGTERM);
    assert_eq!(job.end(), (None, Some(libc::SIGTERM)));
    assert_eq!(balancing(), "2");
    fs::write(BALANCING, &before).unwrap();
    assert!(row().is_none());
}

/// The value that the setting has, to find out whether it can be written.
fn balancing_or_nothing() -> String {
    fs::read_to_string(BALANCING).unwrap_or_default()
}

#[test]
fn a_wrong_request_for_the_machine_is_refused() {
    assert!(refused(&["--system", "true"]).contains("--system goes with --thp or --balancing"));
}

/// The library of an allocator that is installed.
fn installed() -> Option<(String, String)> {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    bench.args(["bench", "allocators", "--json", "--runs", "1", "--threads", "1"]);
    let output = bench.args(["--operations", "1"]).output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let libraries = result["setting"]["libraries"].as_object().unwrap();
    let (name, library) = libraries.iter().next()?;
    Some((name.clone(), library.as_str().unwrap().to_owned()))
}

#[test]
fn the_program_gets_the_allocator_that_was_named() {
    const NAME: &str = "the_program_gets_the_allocator_that_was_named";
    let Some((name, library)) = installed() else {
        return skip(NAME, &"no other allocator is installed");
    };
    let file = library.rsplit('/').next().unwrap();
    let stem = file.split(".so").next().unwrap();
    let mapped = |flags: &[&str]| {
        let output = output(&[flags, &["grep", "-c", stem, "/proc/self/maps"]].concat());
        let text = stdout(&output);
        text.trim().parse::<u32>().unwrap() > 0
    };
    assert!(!mapped(&["--alloc", "glibc"]));
    assert!(mapped(&["--alloc", &name]));
    assert!(mapped(&["--alloc", &library]));
    // Libraries that the user preloads are kept, behind it.
    let mut kept = pageleap(&["--alloc", &name, "sh", "-c", "echo $LD_PRELOAD"]);
    let kept = stdout(&kept.env("LD_PRELOAD", "/lib/kept.so").output().unwrap());
    assert_eq!(kept.trim(), format!("{library}:/lib/kept.so"));
    let other =
        pageleap(&["--alloc", "glibc", "true"]).env("LD_PRELOAD", &library).output().unwrap();
    assert_eq!(other.status.code(), Some(125), "glibc's malloc would not be the program's");
    assert!(stderr(&other).contains("LD_PRELOAD of this shell"), "{}", stderr(&other));
    let verbose = output(&["-v", "--alloc", &name, "sleep", "0.5"]);
    assert!(stderr(&verbose).contains(&format!("mapped: {name} (")), "{}", stderr(&verbose));
}

#[test]
fn programs_that_preload_nothing_get_no_allocator() {
    const NAME: &str = "programs_that_preload_nothing_get_no_allocator";
    let Some((name, _)) = installed() else {
        let none = refused(&["--alloc", "mimalloc", "true"]);
        assert!(none.contains("apt-get install libmimalloc2.0"), "{none}");
        return;
    };
    for (alloc, part) in [
        ("hoard", "hoard is not available"),
        ("malloc", "known are glibc, jemalloc"),
        ("/no/such/library.so", "No such file"),
        ("/etc/passwd", "it is no library of this machine"),
    ] {
        let why = refused(&["--alloc", alloc, "true"]);
        assert!(why.contains(part), "{alloc}: {why}");
    }
    if !is_root() {
        return skip(NAME, &"only root can make a program of another user");
    }
    // A program with the rights of another user, as passwd has them of root.
    let program = std::env::temp_dir().join(format!("pageleap-rights-{}", std::process::id()));
    fs::copy("/bin/true", &program).unwrap();
    std::os::unix::fs::chown(&program, Some(65_534), None).unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    let why = refused(&["--alloc", &name, program.to_str().unwrap()]);
    fs::remove_file(program).unwrap();
    assert!(why.contains("has rights of its own"), "{why}");
}

#[test]
fn a_program_starts_at_home_and_knows_where_it_grows() {
    let machine =
        Command::new(env!("CARGO_BIN_EXE_pageleap")).args(["topology", "--json"]).output();
    let machine: Value = serde_json::from_slice(&machine.unwrap().stdout).unwrap();
    let node = machine["allowed_nodes"][0].to_string();
    let shown = ["sh", "-c", "grep Cpus_allowed_list /proc/self/status; env"];
    for home in ["auto", &node] {
        let plan = output(&["--home", home, "--dry-run", "--json", "true"]);
        let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
        let (cpus, places) = (plan["cpus"].as_array().unwrap(), plan["places"].as_array().unwrap());
        assert!(!cpus.is_empty() && cpus.len() <= places.len(), "{plan}");
        assert!(cpus.iter().all(|cpu| places.contains(cpu)), "{plan}");
        assert_eq!(plan["environment"]["OMP_PROC_BIND"], Value::Null, "{plan}");
        let run = stdout(&output(&[&["--home", home], &shown[..]].concat()));
        assert!(run.contains("PAGELEAP_HOME=") && run.contains("PAGELEAP_PLACES="), "{run}");
        // Without places the program stays on its home.
        let none = stdout(&output(&[&["--home", home, "--place", "none"], &shown[..]].concat()));
        assert_eq!(none.lines().next(), run.lines().next());
        let has = |name: &str| none.contains(&format!("PAGELEAP_{name}="));
        assert!(!has("PLACES") && !has("HOME"), "{none}");
    }
    for (flags, part) in [
        (&["--home", "auto", "--size", "60000g", "true"][..], "are free, and"),
        (&["--home", "1023", "true"], "node 1023 does not exist"),
        (&["--home", "auto", "--place", "dense", "true"], "an order of its own"),
        (&["--home", "auto", "-N", &node, "true"], "cannot be used with"),
        (&["--size", "1g", "true"], "--home"),
    ] {
        let why = refused(flags);
        assert!(why.contains(part), "{flags:?}: {why}");
    }
    let verbose = stderr(&output(&["-v", "--home", "auto", "true"]));
    assert!(verbose.contains("of its cores are idle"), "{verbose}");
}
