//! Runs `pageleap demo` as a user would, on a small table.

mod common;

use std::process::{Command, Output};
use std::time::Duration;

use common::interrupted;
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
    let output = demo(&[&["--scale-factor", "0.01", "--json"], flags].concat());
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
