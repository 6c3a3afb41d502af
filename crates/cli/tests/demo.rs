//! Runs `pageleap demo` as a user would, on a small table.

mod common;
#[path = "../../pageleap/tests/common/mod.rs"]
mod library;

use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use common::{interrupted, interrupted_when};
use library::{nodes, skip};
use pageleap::{MemoryEngine, NodeId};
use serde_json::Value;

fn demo(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pageleap"))
        .arg("demo")
        .args(flags)
        .output()
        .expect("pageleap starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a small demo that must succeed, and returns its JSON object.
fn result(flags: &[&str]) -> Value {
    object(flags, demo(&[&["--scale-factor", "0.01", "--json"], flags].concat()))
}

/// The JSON object of a run that must have succeeded.
fn object(flags: &[&str], output: Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{flags:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)))
}

fn check(result: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    for key in [
        "bytes",
        "migrate_ns",
        "memcpy_ns",
        "ratio_to_memcpy",
        "memcpy_under_load_ns",
        "ratio_to_memcpy_under_load",
        "area_bytes",
        "nodes",
    ] {
        assert!(number(&result[key]) > 0.0, "{key}");
    }
    let cost = |of: &str| result[format!("{of}_load_cost_ns")].as_i64().unwrap();
    let ns = |key: &str| result[key].as_i64().unwrap();
    assert_eq!(cost("memcpy"), ns("memcpy_under_load_ns") - ns("memcpy_ns"));
    let quiet = result["quiet"]["migrate_ns"].as_i64().unwrap();
    assert_eq!(cost("leap"), ns("migrate_ns") - quiet);
    assert_eq!(result["quiet"]["samples_ns"].as_array().unwrap().len(), 4);
    for key in ["extra_copied_ratio", "max_wait_ns", "huge_mapped_ratio", "from", "to"] {
        assert!(number(&result[key]) >= 0.0, "{key}");
    }
    for key in ["engine", "engine_reason", "kernel"] {
        assert!(!result[key].as_str().unwrap().is_empty(), "{key}");
    }
    assert_eq!(result["page_size"], result["kernel_page_size"]);
    let pages = result["bytes"].as_u64().unwrap() / result["page_size"].as_u64().unwrap();
    assert_eq!(result["pages"]["migrated"], pages);
    for outcome in ["unchanged", "busy", "failed", "not_attempted"] {
        assert_eq!(result["pages"][outcome], 0, "{outcome}");
    }
    assert_eq!(result["writes"]["lost"], 0);
    for query in ["q1", "q6"] {
        assert_eq!(result["queries"][query]["equal"], true);
        for phase in ["before_ns", "after_ns"] {
            assert!(number(&result["queries"][query][phase]) > 0.0, "{query} {phase}");
        }
        // A leap of a few milliseconds may end before the query thread gets a CPU again.
        let during = &result["queries"][query]["during_ns"];
        assert!(during.is_null() || number(during) > 0.0, "{query} {during}");
    }
    // The kernel hides frames from users without CAP_SYS_ADMIN.
    let frames = &result["frames_changed_ratio"];
    assert!(frames.is_null() || number(frames) == 1.0, "{frames}");
    for (moment, node) in [("before", &result["from"]), ("after", &result["to"])] {
        assert_eq!(result["placement"][moment][node.to_string()], pages, "{moment}");
    }
    let mappings = ["before", "peak", "after"].map(|moment| number(&result["mappings"][moment]));
    assert!(mappings[0] > 0.0 && mappings[1] >= mappings[0] && mappings[1] >= mappings[2]);
}

#[test]
fn a_small_table_leaps_while_it_is_written() {
    let result = result(&[]);
    check(&result);
    assert_eq!(result["page_size"], 4096);
    assert_eq!(result["writes"]["requested_per_s"], 100_000);
    assert!(result["writes"]["achieved_ratio"].as_f64().unwrap() >= 0.0);
    // Null if the writer got no CPU during a leap of a few milliseconds.
    for key in ["max_gap_ns", "p999_gap_ns"] {
        let gap = &result["writes"][key];
        assert!(gap.is_null() || gap.as_f64().unwrap() > 0.0, "{key} {gap}");
    }
}

#[test]
fn every_rate_and_engine_keeps_all_writes() {
    let unlimited =
        result(&["--writes-per-s", "max", "--engine", "mprotect", "--area", "1m", "--seed", "7"]);
    check(&unlimited);
    assert!(unlimited["writes"]["requested_per_s"].is_null());
    assert_eq!(unlimited["area_bytes"], 1 << 20);
    let none = result(&["--writes-per-s", "0"]);
    check(&none);
    assert_eq!(none["writes"]["requested_per_s"], 0);
    for key in ["achieved_ratio", "max_gap_ns", "p999_gap_ns", "gap_beyond_memcpy_ns"] {
        assert!(none["writes"][key].is_null(), "{key}");
    }
    check(&result(&["--writes-per-s", "5m", "--threads", "2", "--timeout", "60s"]));
}

/// A run with memory of malloc. If the command refuses such memory, the reason must be that there
/// is one node and no UFFDIO_MOVE, and the test is skipped.
fn unless_refused(test: &str, output: Output) -> Option<Output> {
    let text = stderr(&output);
    if output.status.code() != Some(2) || !text.contains("`uffd-move` cannot be used") {
        return Some(output);
    }
    let [from, to] = nodes();
    assert_eq!(from, to, "{text}");
    assert!(text.contains("or use --memory pool") && output.stdout.is_empty(), "{text}");
    assert!(!can_move_in_place(), "{text}");
    skip(test, &text.trim());
    None
}

/// Runs a small demo with memory of malloc.
fn of_malloc(test: &str, flags: &[&str]) -> Option<Output> {
    let all = [&["--memory", "malloc", "--scale-factor", "0.01"], flags].concat();
    unless_refused(test, demo(&all))
}

/// Whether `uffd-move` must work: it takes Linux 6.8, and CAP_SYS_PTRACE is enough.
fn can_move_in_place() -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let effective = u64::from_str_radix(effective.trim(), 16).unwrap();
    kernel_release() >= [6, 8] && effective & 1 << CAP_SYS_PTRACE != 0
}

/// The first two numbers of the kernel's release.
fn kernel_release() -> [u32; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap());
    [numbers.next().unwrap(), numbers.next().unwrap()]
}

/// What must be true of memory of malloc beside what [`check`] says of all memory.
fn check_malloc(result: &Value) {
    check(result);
    assert_eq!(result["memory"], "malloc");
    assert_eq!(result["counted_page_size"], 4096);
    let moved_by = |engine: MemoryEngine| result["moved_by"][engine.name()].as_u64().unwrap_or(0);
    let [in_place, by_kernel] = MemoryEngine::ALL.map(moved_by);
    assert_eq!(in_place + by_kernel, result["bytes"].as_u64().unwrap());
    // What was populated beforehand is said, and only the kernel's engine needs nothing.
    let is_reserved = result["quiet"]["engine"].as_str().unwrap().contains("uffd-move");
    for reserve in [&result["reserve_ns"], &result["quiet"]["reserve_ns"]] {
        assert_eq!(reserve.as_u64().is_some_and(|ns| ns > 0), is_reserved, "{result}");
    }
    assert!(is_reserved || in_place == 0, "{result}");
    // A reserve has whole units of 2 MB. The leap has taken what else it has, except for pages that
    // could not move in place and were left to the kernel.
    let left = &result["reserve_left_bytes"];
    assert_eq!(left.is_null(), !is_reserved, "{result}");
    assert!(left.as_u64().unwrap_or(0) < (2 << 20) + by_kernel, "{result}");
}

#[test]
fn memory_of_malloc_leaps_in_place_while_it_is_written() {
    const TEST: &str = "memory_of_malloc_leaps_in_place_while_it_is_written";
    let Some(output) = of_malloc(TEST, &["--json"]) else { return };
    let default = object(&[], output);
    check_malloc(&default);
    // Where the better engine works, it is taken.
    if can_move_in_place() {
        let moved = &default["moved_by"][MemoryEngine::UffdMove.name()];
        assert!(moved.as_u64().unwrap() > 0, "{default}");
    }
}

#[test]
fn memory_of_malloc_keeps_all_writes_at_every_rate() {
    const TEST: &str = "memory_of_malloc_keeps_all_writes_at_every_rate";
    for flags in [["--writes-per-s", "max"], ["--writes-per-s", "0"]] {
        let flags = [&flags[..], &["--json", "--timeout", "60s"]].concat();
        let Some(output) = of_malloc(TEST, &flags) else { return };
        check_malloc(&object(&flags, output));
    }
    if can_move_in_place() {
        let flags = ["--engine", "uffd-move", "--json"];
        let output = of_malloc(TEST, &flags).expect("uffd-move works");
        check_malloc(&object(&flags, output));
    }
}

#[test]
fn the_kernels_engine_moves_memory_of_malloc_to_other_nodes_only() {
    let flags = ["--memory", "malloc", "--engine", "kernel"];
    let [from, to]: [NodeId; 2] = nodes();
    if from != to {
        let result = result(&flags);
        assert_eq!(result["engine"], "kernel");
        return check_malloc(&result);
    }
    let output = demo(&flags);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("--engine kernel: it moves pages to other nodes only"), "{text}");
    assert!(text.contains("or use --memory pool") && output.stdout.is_empty(), "{text}");
}

#[test]
fn huge_pages_of_malloc_stay_huge() {
    const TEST: &str = "huge_pages_of_malloc_stay_huge";
    let flags = ["--page-size", "thp", "--json"];
    let Some(output) = of_malloc(TEST, &flags) else { return };
    let text = stderr(&output);
    if output.status.code() == Some(2) && text.contains("transparent huge pages for") {
        return skip(TEST, &text.trim());
    }
    let result = object(&flags, output);
    assert_eq!(result["huge_mapped_ratio"], 1.0);
    assert_eq!(result["page_size"], 2 << 20);
    let pages = result["bytes"].as_u64().unwrap() / result["counted_page_size"].as_u64().unwrap();
    assert_eq!(result["pages"]["migrated"], pages);
    let frames = &result["frames_changed_ratio"];
    assert!(frames.is_null() || frames == 1.0, "{frames}");
}

#[test]
fn text_says_what_became_of_memory_of_malloc() {
    const TEST: &str = "text_says_what_became_of_memory_of_malloc";
    let Some(output) = of_malloc(TEST, &[]) else { return };
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("every write present (shadow copy)"), "{text}");
    assert!(!text.contains("pools") && !text.contains("region"), "{text}");
    for line in ["memory", "reserve", "moved by"] {
        assert!(text.lines().any(|l| l.trim_start().starts_with(line)), "{line}: {text}");
    }
}

#[test]
fn an_interrupted_leap_leaves_memory_of_malloc_whole() {
    const TEST: &str = "an_interrupted_leap_leaves_memory_of_malloc_whole";
    let flags = ["demo", "--memory", "malloc", "--scale-factor", "0.3"];
    let smallest = demo(&["--memory", "malloc", "--scale-factor", "0.0001"]);
    if unless_refused(TEST, smallest).is_none() {
        return;
    }
    let output = interrupted_when(&flags, wait_for_leap_beside_queries);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("pages had moved, the table is whole"), "{text}");
    assert!(text.contains("none lost"), "{text}");
}

/// Waits until a job runs beside the query thread, or the program has ended. Threads of jobs are
/// called as the program is, and so is a new thread until it has its name: the last one that has a
/// name of its own is that of the timeline. If this thread got no CPU while the job ran, the program
/// waits to print its result, and the signal comes after the leap.
fn wait_for_leap_beside_queries(child: &Child) {
    let deadline = Instant::now() + Duration::from_secs(300);
    let tasks = format!("/proc/{}/task", child.id());
    loop {
        let entries = std::fs::read_dir(&tasks).unwrap().flatten();
        let names: Vec<String> = entries
            .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect();
        // Only a program that has ended, and that nobody has waited for, has no memory.
        let status = std::fs::read_to_string(format!("/proc/{}/statm", child.id())).unwrap();
        let ended = status.starts_with("0 ");
        let jobs = names.iter().filter(|name| *name == "pageleap").count() > 1;
        let has = |wanted: &str| names.iter().any(|name| name == wanted);
        let leaps = jobs && has("queries") && has("timeline");
        if ended || leaps || Instant::now() > deadline {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn text_says_what_was_verified() {
    let output = demo(&["--scale-factor", "0.01"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("every write present (shadow copy)"), "{text}");
    assert_eq!(
        stderr(&output),
        "",
        "nothing but progress goes to standard error, and only on a terminal"
    );
}

#[test]
fn bad_input_is_refused_by_name() {
    for (flags, named) in [
        (vec!["--scale-factor", "0"], "--scale-factor"),
        (vec!["--scale-factor", "-1"], "--scale-factor"),
        (vec!["--scale-factor", "nan"], "--scale-factor"),
        (vec!["--scale-factor", "inf"], "--scale-factor"),
        (vec!["--scale-factor", "1000000"], "use --scale-factor "),
        (vec!["--from", "4000"], "node 4000 does not exist; nodes with memory: "),
        (vec!["--to", "4000"], "node 4000 does not exist; nodes with memory: "),
        (vec!["--page-size", "3k"], "--page-size"),
        (vec!["--page-size", ""], "--page-size"),
        (vec!["--reserve-huge-pages"], "--page-size 2m"),
        (vec!["--timeout", "0"], "--timeout"),
        (vec!["--timeout", "-1"], "--timeout"),
        (vec!["--threads", "0"], "--threads"),
        (vec!["--area", "0"], "--area"),
        (vec!["--area", "5000"], "multiple of 4096"),
        (vec!["--engine", "magic"], "--engine"),
        (vec!["--engine", "uffd-move"], "or --memory malloc"),
        (vec!["--memory", "disk"], "--memory"),
        (vec!["--memory", "malloc", "--page-size", "2m"], "use --page-size 4k or thp"),
        (vec!["--memory", "malloc", "--reserve-huge-pages"], "use --memory pool"),
        (vec!["--memory", "malloc", "--engine", "precopy"], "use one of auto, uffd-move, kernel"),
        (vec!["--memory", "malloc", "--threads", "2"], "leave it out, or use --memory pool"),
        (vec!["--memory", "malloc", "--area", "1m"], "leave it out, or use --memory pool"),
        (vec!["--memory", "malloc", "--scale-factor", "1000000"], "use --scale-factor "),
        (vec!["--writes-per-s", "fast"], "--writes-per-s"),
        (vec!["--no-such-flag"], "--no-such-flag"),
    ] {
        let output = demo(&flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{flags:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{flags:?}");
    }
}

#[test]
fn missing_huge_pages_are_named_with_a_remedy() {
    // More huge pages than any test machine has reserved. The check of ordinary memory still
    // passes.
    let output = demo(&["--page-size", "2m", "--scale-factor", "1000"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("free huge pages") && text.contains("--reserve-huge-pages"), "{text}");
}

#[test]
fn help_and_version() {
    for flags in [["--version"].as_slice(), &["--help"], &["demo", "--help"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_pageleap")).args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{flags:?}");
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn an_interrupted_run_ends_cleanly() {
    for wait_ms in [0, 200, 1000] {
        let output =
            interrupted(&["demo", "--scale-factor", "0.05"], Duration::from_millis(wait_ms));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "after {wait_ms} ms: {text}");
        assert!(text.contains("interrupted"), "{text}");
    }
}
