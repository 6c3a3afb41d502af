//! `pageleap run --place`: programs in C print on which CPUs the kernel lets their threads run. On
//! one node sparse and dense are the same order; unit tests of `pageleap-launch` have machines with
//! several.

#[path = "../../pageleap/tests/common/filter.rs"]
mod filter;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use filter::{Action, install_filter};
use serde_json::Value;

fn pageleap(flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.arg("run").args(flags);
    // What the environment of the tests says of threads is not theirs.
    for name in ["LD_PRELOAD", "PAGELEAP_PLACES", "OMP_PLACES", "OMP_PROC_BIND"] {
        command.env_remove(name);
    }
    command
}

#[track_caller]
fn ran(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// The standard output of a run that succeeds and says nothing of its own.
#[track_caller]
fn silent(command: &mut Command) -> String {
    let output = ran(command);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Lines of a program: words, and CPUs.
fn lines(text: &str) -> Vec<(&str, &str)> {
    text.lines().map(|line| line.rsplit_once(char::is_whitespace).unwrap()).collect()
}

/// The CPUs on which threads come, in their order, and the object of the trial that tells them.
fn trial(flags: &[&str]) -> (Vec<String>, Value) {
    let all = [flags, &["--dry-run", "--json", "true"]].concat();
    let object: Value = serde_json::from_str(&silent(&mut pageleap(&all))).unwrap();
    let places = object["places"].as_array().expect("places").iter().map(Value::to_string);
    (places.collect(), object)
}

fn places() -> Vec<String> {
    trial(&["--place", "sparse"]).0
}

/// The CPUs of a program that nobody places, as the kernel lists them.
fn all_cpus() -> String {
    let shown = ["sed", "-n", "s/^Cpus_allowed_list:\t//p", "/proc/self/status"];
    silent(&mut pageleap(&shown)).trim().to_owned()
}

/// A program that was compiled, or why it was not.
type Compiled = Result<PathBuf, String>;

fn compiled(source: &str, name: &str, options: &[&str]) -> Compiled {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("place-{name}"));
    // Another run of these tests may compile it, or run it, at the same time.
    let new = folder.join(format!("place-{name}.{}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/place").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&new).arg(&source).args(options);
    match cc.output() {
        Err(error) => Err(format!("cc: {error}")),
        Ok(output) if output.status.success() => {
            fs::rename(new, &path).unwrap();
            Ok(path)
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // Libraries that are not installed are a reason; mistakes of the program are not.
            let is_missing = said.contains("cannot find") || said.contains("No such file");
            assert!(is_missing, "{said}");
            Err(format!("cc {options:?}: a library or a header is missing"))
        }
    }
}

/// The program of threads, which loads libraries.
fn threads() -> Compiled {
    static THREADS: OnceLock<Compiled> = OnceLock::new();
    THREADS.get_or_init(|| compiled("threads.c", "threads", &["-pthread"])).clone()
}

/// The program, or the end of a test that needs it.
macro_rules! program {
    ($compiled:expr, $test:literal) => {
        match $compiled {
            Ok(path) => path.into_os_string().into_string().unwrap(),
            Err(reason) => {
                eprintln!("skipped: {}: {reason}", $test);
                return;
            }
        }
    };
}

#[test]
fn a_thousand_short_threads_use_all_places_equally() {
    let program = program!(threads(), "a_thousand_short_threads_use_all_places_equally");
    for order in ["sparse", "dense"] {
        let (places, _) = trial(&["--place", order]);
        let shown = silent(&mut pageleap(&["--place", order, &program, "many"]));
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, cpus) in lines(&shown) {
            *counts.entry(cpus).or_default() += 1;
        }
        // A batch finds no living thread, and none of its threads ends before the last one has
        // begun. So its threads come to the places in turn, beginning with the first.
        let batches = [64; 15].into_iter().chain([40]);
        let number = places.len();
        for (nth, place) in places.iter().enumerate() {
            let of_batch = |batch: usize| batch / number + usize::from(nth < batch % number);
            let expected: usize = batches.clone().map(of_batch).sum();
            assert_eq!(counts.remove(&**place).unwrap_or(0), expected, "CPU {place}: {shown}");
        }
        assert!(counts.is_empty(), "each thread has one CPU of the places: {counts:?}");
    }
}

#[test]
fn threads_that_choose_cpus_keep_them() {
    let program = program!(threads(), "threads_that_choose_cpus_keep_them");
    let (places, all) = (places(), all_cpus());
    let shown = silent(&mut pageleap(&["--place", "dense", &program, "choices"]));
    let mut sorted: Vec<usize> = places.iter().map(|cpu| cpu.parse().unwrap()).collect();
    sorted.sort_unstable();
    let last = sorted.last().unwrap().to_string();
    let expected = [
        ("main", &all),
        ("plain", &places[0]),
        ("attribute", &all),
        ("call", &all),
        ("inherited", &last),
    ];
    assert_eq!(lines(&shown), expected.map(|(word, cpus)| (word, &**cpus)));
    // A tool that binds the program has chosen for all of its threads.
    let bound = ["--place", "dense", "taskset", "-c", &last, &program, "choices"];
    let shown = silent(&mut pageleap(&bound));
    assert!(lines(&shown).iter().all(|(_, cpus)| **cpus == last), "{shown}");
}

/// The lines of threads that have one CPU by their own choice, or by that of the main thread.
fn alone(cpu: &str) -> Vec<(&str, &str)> {
    [[("own", cpu); 3], [("inherited", cpu); 3]].concat()
}

#[test]
fn choices_that_come_later_stand() {
    let program = program!(threads(), "choices_that_come_later_stand");
    let (places, all) = (places(), all_cpus());
    let last = places.iter().max_by_key(|cpu| cpu.parse::<usize>().unwrap()).unwrap();
    let shown = silent(&mut pageleap(&["--place", "sparse", &program, "later"]));
    let mut expected = vec![("creator", &**last); 20];
    // The child of a thread that has chosen its own CPU inherits that.
    expected.extend([("same", &*places[0]), ("told", "1"), ("outside", last)]);
    assert_eq!(lines(&shown), expected);
    // More CPUs than those of the start are a choice, too.
    let shown = silent(&mut pageleap(&["-C", &places[0], "--place", "sparse", &program, "wider"]));
    assert_eq!(lines(&shown), [("thread", &*all)]);
    let shown = silent(&mut pageleap(&["--place", "sparse", &program, "alone"]));
    assert_eq!(lines(&shown), alone(last));
}

#[test]
fn a_child_with_a_small_stack_can_start_a_program() {
    let program = program!(threads(), "a_child_with_a_small_stack_can_start_a_program");
    let shown = silent(&mut pageleap(&["--place", "sparse", &program, "small stack"]));
    assert_eq!(shown, "status 0\n");
}

#[test]
fn a_place_is_free_again_however_its_thread_ends() {
    let program = program!(threads(), "a_place_is_free_again_however_its_thread_ends");
    let shown = silent(&mut pageleap(&["--place", "sparse", &program, "ends"]));
    assert_eq!(shown.matches("cleaned up").count(), 3, "cancellation unwinds: {shown}");
    let first = &places()[0];
    let words = ["exit", "cancel", "c11"].map(|word| [(word, &**first); 3]).concat();
    let mut shown = lines(&shown);
    shown.retain(|line| *line != ("cleaned", "up"));
    assert_eq!(shown, words);
}

#[test]
fn children_of_a_pinned_thread_are_free_and_it_counts_all_cpus() {
    let program =
        program!(threads(), "children_of_a_pinned_thread_are_free_and_it_counts_all_cpus");
    let (places, all) = (places(), all_cpus());
    let shown = silent(&mut pageleap(&["--place", "sparse", &program, "children"]));
    let number = places.len().to_string();
    // The first thread of a forked child finds the first place free, which its parent has.
    let expected = [
        ("told", &number),
        ("told", &number),
        ("before", &places[0]),
        ("spawn", &all),
        ("system", &all),
        ("popen", &all),
        ("exec", &all),
        ("fork", &all),
        ("thread of fork", &places[0]),
        ("after", &places[0]),
    ];
    assert_eq!(lines(&shown), expected.map(|(word, cpus)| (word, &**cpus)));
}

#[test]
fn libraries_that_the_user_preloads_are_kept() {
    let own = program!(
        compiled("threads.c", "own.so", &["-pthread", "-shared", "-fPIC"]),
        "libraries_that_the_user_preloads_are_kept"
    );
    let mut command = pageleap(&["--place", "sparse", "sh", "-c"]);
    let shown = silent(
        command.arg("echo $LD_PRELOAD; sed -n 's/.* //p' /proc/self/maps").env("LD_PRELOAD", &own),
    );
    let first = shown.lines().next().unwrap();
    let (before, ours) = first.split_once(':').unwrap();
    assert_eq!(before, own);
    assert!(ours.contains("libpageleap-place-"), "{first}");
    assert!(shown.lines().skip(1).any(|line| line == own), "{shown}");
    assert!(shown.lines().skip(1).any(|line| line == ours), "{shown}");
    // Nobody but this user can change what programs load.
    let mode = fs::metadata(ours).unwrap().permissions().mode();
    assert_eq!(mode & 0o022, 0, "{ours}: {mode:o}");
}

#[test]
fn threads_of_openmp_come_to_the_places_and_its_main_thread_is_free() {
    let program = program!(
        compiled("openmp.c", "openmp", &["-fopenmp"]),
        "threads_of_openmp_come_to_the_places_and_its_main_thread_is_free"
    );
    let (places, all) = (places(), all_cpus());
    let number = (places.len() + 1).to_string();
    let run = |flags: &[&str]| {
        let mut command = pageleap(&[flags, &[&program]].concat());
        command.env("OMP_NUM_THREADS", &number).env_remove("OMP_DYNAMIC");
        command
    };
    let shown = silent(&mut run(&["--place", "sparse"]));
    let mut shown: Vec<(isize, &str)> =
        lines(&shown).into_iter().map(|(id, cpus)| (id.parse().unwrap(), cpus)).collect();
    shown.sort_unstable();
    let expected = [&all, &all].into_iter().chain(&places).map(|cpus| &**cpus);
    assert_eq!(shown, (-1..).zip(expected).collect::<Vec<_>>());
    // The user's own choice: the first place for all.
    let own = format!("{{{}}}", places[0]);
    let shown = silent(run(&["--place", "sparse"]).env("OMP_PLACES", own));
    assert!(lines(&shown).iter().all(|(_, cpus)| **cpus == places[0]), "{shown}");
}

/// A program whose threads wait for their pin, one for each place.
#[track_caller]
fn is_pinned_from_outside(program: &str, reason: &str) {
    let (mut places, all) = (places(), all_cpus());
    let number = places.len().to_string();
    let output = ran(&mut pageleap(&["--place", "sparse", program, "waiting", &number]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains(reason) && said.contains("up to 50 ms"), "{said}");
    let shown = String::from_utf8(output.stdout).unwrap();
    let mut shown = lines(&shown);
    assert_eq!(shown.pop(), Some(("main", &*all)));
    let mut shown: Vec<String> = shown.iter().map(|(_, cpus)| (*cpus).to_owned()).collect();
    shown.sort();
    places.sort();
    assert_eq!(shown, places);
}

#[test]
fn threads_of_a_static_program_are_pinned_from_outside() {
    let program = program!(
        compiled("threads.c", "static", &["-pthread", "-static"]),
        "threads_of_a_static_program_are_pinned_from_outside"
    );
    is_pinned_from_outside(&program, "is linked statically");
    // A thread that has chosen one CPU, or whose creator has, stays there.
    let output = ran(&mut pageleap(&["--place", "sparse", &program, "alone"]));
    let places = places();
    let last = places.iter().max_by_key(|cpu| cpu.parse::<usize>().unwrap()).unwrap();
    assert_eq!(lines(&String::from_utf8_lossy(&output.stdout)), alone(last));
    // Also by way of a script, and the exit status is the program's.
    let script = format!("{program}.{}", std::process::id());
    fs::write(&script, format!("#!{program} waiting\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let output = pageleap(&["--place", "dense", &script]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("is linked statically"), "{output:?}");
    let output = pageleap(&["--place", "dense", &program, "no such name"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    fs::remove_file(script).unwrap();
}

#[test]
fn threads_of_a_program_with_address_sanitizer_are_pinned_from_outside() {
    let program = program!(
        compiled("threads.c", "asan", &["-pthread", "-fsanitize=address"]),
        "threads_of_a_program_with_address_sanitizer_are_pinned_from_outside"
    );
    is_pinned_from_outside(&program, "loads AddressSanitizer");
}

#[test]
fn threads_of_a_program_with_rights_of_another_are_pinned_from_outside() {
    const TEST: &str = "threads_of_a_program_with_rights_of_another_are_pinned_from_outside";
    let program =
        program!(threads(), "threads_of_a_program_with_rights_of_another_are_pinned_from_outside");
    // SAFETY: the call takes no pointers.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: {TEST}: only root can give a file away");
        return;
    }
    let path = std::env::temp_dir().join(format!("pageleap-place-{}", std::process::id()));
    fs::copy(program, &path).unwrap();
    std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    let name = path.to_str().unwrap();
    let output = pageleap(&["--place", "sparse", name, "no such name"]).output().unwrap();
    if output.stderr.is_empty() {
        eprintln!("skipped: {TEST}: the folder of temporary files is mounted with nosuid");
    } else {
        is_pinned_from_outside(name, "has rights of its own");
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn places_are_the_cpus_that_are_left_and_can_be_shown() {
    let all = places();
    let (one, object) = trial(&["--place", "dense", "-C", all.last().unwrap()]);
    assert_eq!(one, all[all.len() - 1..]);
    let environment = object["environment"].as_object().unwrap();
    let value = |name: &str| environment[name].as_str().unwrap();
    assert_eq!(value("PAGELEAP_PLACES"), one[0]);
    assert!(!environment.keys().any(|name| name.starts_with("OMP_")), "{object}");
    // The line of the trial does the same.
    let shown = silent(&mut pageleap(&["--place", "sparse", "--dry-run", "env"]));
    let output = ran(Command::new("sh").args(["-c", &shown]));
    let listed = format!("PAGELEAP_PLACES={}\n", all.join(","));
    assert!(String::from_utf8_lossy(&output.stdout).contains(&listed), "{output:?}");
    let output = ran(&mut pageleap(&["--place", "sparse", "-v", "true"]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("threads come to these CPUs: {}", all.join(","))), "{said}");
    let output = pageleap(&["--place", "here", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(silent(&mut pageleap(&["--help"])).contains("within 50 ms"));
}

#[test]
fn none_takes_back_what_an_outer_run_has_set() {
    let inner = [env!("CARGO_BIN_EXE_pageleap"), "run", "--place", "none", "env"];
    let shown = silent(&mut pageleap(&[&["--place", "sparse"], &inner[..]].concat()));
    for name in ["LD_PRELOAD", "PAGELEAP_PLACES"] {
        assert!(!shown.lines().any(|line| line.starts_with(name)), "{shown}");
    }
    let plain = silent(&mut pageleap(&["--place", "none", "--dry-run", "true"]));
    assert_eq!(plain, "true\n");
}

#[test]
fn where_a_filter_refuses_pins_threads_run_anywhere_and_one_line_says_so() {
    for action in [Action::Errno(libc::EPERM), Action::Errno(libc::ENOSYS)] {
        let filtered = |flags: &[&str]| {
            let mut command = pageleap(flags);
            // SAFETY: the filter is installed by system calls alone.
            unsafe {
                command.pre_exec(move || install_filter(action, &[libc::SYS_sched_setaffinity]))
            };
            command.output().unwrap()
        };
        let output = filtered(&["--place", "sparse", "sh", "-c", "echo $LD_PRELOAD"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"\n"[..]), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("a filter of the container refuses it"), "{said}");
        let strict = filtered(&["--no-fallback", "--place", "sparse", "true"]);
        assert_eq!(strict.status.code(), Some(125), "{strict:?}");
    }
}
