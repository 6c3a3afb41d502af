//! Runs `pageleap bench engines` as a user would, on small regions. Times are never judged.

mod common;

use std::process::{Command, Output};
use std::time::Duration;

use common::interrupted;
use serde_json::Value;

const KEYS: [&str; 32] = [
    "area_bytes",
    "copy_threads",
    "copy_threads_settled",
    "efault_count",
    "engine",
    "extra_copied_ratio",
    "first_touch_ns",
    "load",
    "lost",
    "mappings_after",
    "mappings_before",
    "mappings_peak",
    "max_gap_ns",
    "migrate_ns",
    "overhead_bytes",
    "p999_gap_ns",
    "page_size",
    "ratio_to_memcpy",
    "ratio_to_memcpy_max",
    "ratio_to_memcpy_min",
    "readers",
    "recycle_cpu_ns",
    "requested_engine",
    "uid",
    "window_max_ns",
    "window_p50_ns",
    "window_p99_ns",
    "windows_first_ratio",
    "writers",
    "writes_beside_memcpy_per_s",
    "writes_kept_ratio",
    "writes_per_s",
];

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pageleap"))
        .args(["bench", "engines"])
        .args(flags)
        .output()
        .expect("pageleap starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Rows of a benchmark that must succeed, and what it said on standard error.
fn rows(flags: &[&str]) -> (Vec<Value>, String) {
    let output = bench(&[&["--size", "16m", "--runs", "2", "--json"], flags].concat());
    assert_eq!(output.status.code(), Some(0), "{flags:?}: {}", stderr(&output));
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)));
    rows.iter().for_each(check);
    (rows, stderr(&output))
}

/// The engines that follow writes, as they come in tables.
const FOLLOW: [&str; 3] = ["precopy", "wp-sync", "precopy-protect"];

/// Which of them were measured, by what was said of rows that were skipped.
fn measured(said: &str) -> Vec<&'static str> {
    let skips = |engine: &str| said.contains(&format!("skipped: {engine} with --page-size 4k: "));
    let measured: Vec<_> = FOLLOW.into_iter().filter(|engine| !skips(engine)).collect();
    assert_eq!(said.matches("skipped: ").count(), FOLLOW.len() - measured.len(), "{said}");
    measured
}

fn check(row: &Value) {
    let number =
        |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row} is no number"));
    assert_eq!(row.as_object().unwrap().keys().collect::<Vec<_>>(), KEYS);
    let (used, asked) =
        (row["engine"].as_str().unwrap(), row["requested_engine"].as_str().unwrap());
    let known = used == "mprotect" || FOLLOW.contains(&used);
    assert!(known && (asked == "auto" || asked == used), "{row}");
    for key in ["migrate_ns", "ratio_to_memcpy_min", "area_bytes", "copy_threads", "window_max_ns"]
    {
        assert!(number(key) > 0.0, "{key} of {row}");
    }
    assert!(number("ratio_to_memcpy_min") <= number("ratio_to_memcpy"), "{row}");
    assert!(number("ratio_to_memcpy") <= number("ratio_to_memcpy_max"), "{row}");
    assert!(number("extra_copied_ratio") >= 0.0 && row["first_touch_ns"].is_i64(), "{row}");
    assert!(row["recycle_cpu_ns"].is_u64() && row["uid"].is_u64(), "{row}");
    let mappings = ["mappings_before", "mappings_peak", "mappings_after"].map(number);
    assert!(mappings[0] > 0.0 && mappings[1] >= mappings[0] && mappings[1] >= mappings[2], "{row}");
    assert!(row["overhead_bytes"].is_null() || row["overhead_bytes"].is_u64(), "{row}");
    assert_eq!(row["lost"], 0);
    let windows = ["window_p50_ns", "window_p99_ns", "window_max_ns"].map(number);
    assert!(windows.is_sorted() && windows[0] > 0.0, "{row}");
    let kernel_writes = ["uniform", "skewed"].contains(&row["load"].as_str().unwrap());
    assert_eq!(row["efault_count"].is_u64(), kernel_writes, "{row}");
    // The kernel waits as others do.
    assert!(
        !["precopy", "wp-sync"].contains(&used) || !kernel_writes || row["efault_count"] == 0,
        "{row}"
    );
    if row["load"] == "quiet" {
        assert_eq!(row["writes_per_s"], 0);
        assert_eq!(number("extra_copied_ratio"), 0.0);
        for key in ["writes_kept_ratio", "writes_beside_memcpy_per_s", "max_gap_ns", "p999_gap_ns"]
        {
            assert!(row[key].is_null(), "{key} of {row}");
        }
    } else {
        // Null or 0 where the writer did not get a CPU during a leap of a few milliseconds.
        assert!(row["writes_kept_ratio"].is_null() || number("writes_kept_ratio") >= 0.0, "{row}");
        assert!(number("writes_beside_memcpy_per_s") >= 0.0, "{row}");
        assert!(
            row["max_gap_ns"].is_null() || number("max_gap_ns") >= number("p999_gap_ns"),
            "{row}"
        );
    }
}

#[test]
fn every_load_has_a_row_of_each_engine_and_loses_nothing() {
    let (rows, said) = rows(&["--page-size", "4k"]);
    let measured = measured(&said);
    let name = |row: &Value| {
        let rate = row["writes_per_s"].as_u64().unwrap();
        (row["load"].as_str().unwrap().to_owned(), rate, row["area_bytes"].as_u64().unwrap())
    };
    let mut expected = Vec::new();
    for (load, rate) in [
        ("quiet", 0),
        ("uniform", 100_000),
        ("uniform", 10_000_000),
        ("skewed", 100_000),
        ("skewed", 10_000_000),
    ] {
        let mut areas =
            if measured.is_empty() { vec![2 << 20] } else { vec![16 << 20; 1 + measured.len()] };
        areas.extend([512 << 10, 16 << 20]);
        expected.extend(areas.into_iter().map(|area| (load.to_owned(), rate, area)));
    }
    assert_eq!(rows.iter().map(name).collect::<Vec<_>>(), expected);
    let asked: Vec<&Value> =
        rows.iter().map(|row| &row["requested_engine"]).take(3 + measured.len()).collect();
    assert_eq!(asked, [&["auto"], &measured[..], &["mprotect"; 2]].concat());
}

#[test]
fn a_writer_without_a_limit_loses_nothing() {
    let flags = [
        "--page-size",
        "4k",
        "--load",
        "uniform,skewed",
        "--rates",
        "max",
        "--threads",
        "2",
        "--seed",
        "7",
    ];
    let (rows, said) = rows(&flags);
    assert_eq!(rows.len(), 2 * (3 + measured(&said).len()));
    for row in &rows {
        assert!(row["writes_per_s"].is_null(), "{row}");
        assert_eq!(row["copy_threads"], 2);
    }
}

#[test]
fn several_writers_and_readers_lose_nothing() {
    let load = ["--load", "uniform,quiet", "--rates", "1m", "--writers", "3", "--readers", "2"];
    let (rows, _) = rows(&[&["--page-size", "4k"], &load[..]].concat());
    for row in &rows {
        let writes = row["load"] == "uniform";
        let (writers, readers) = if writes { (3, 2) } else { (0, 0) };
        assert_eq!((&row["writers"], &row["readers"]), (&writers.into(), &readers.into()), "{row}");
        assert_eq!(row["writes_beside_memcpy_per_s"].as_f64() > Some(0.0), writes, "{row}");
    }
}

#[test]
fn a_bystander_is_measured_as_a_writer_is() {
    let (rows, _) = rows(&["--page-size", "4k", "--load", "bystander"]);
    assert!(rows.len() >= 3);
    for row in &rows {
        assert!(
            row["writes_per_s"].is_null() && row["writes_beside_memcpy_per_s"].as_f64() > Some(0.0),
            "{row}"
        );
        assert_eq!(row["extra_copied_ratio"], 0.0, "{row}");
    }
}

#[test]
fn what_cannot_be_measured_is_skipped_with_its_reason() {
    // Areas of 512 KB hold no page of 2 MB. Where even the kernel makes no such pages, it says why.
    let (rows, said) = rows(&["--page-size", "4k,thp", "--load", "quiet"]);
    assert!(said.starts_with("skipped: "), "{said}");
    let count = |page: &str| rows.iter().filter(|row| row["page_size"] == page).count();
    assert!((3..=3 + FOLLOW.len()).contains(&count("4k")));
    match count("thp") {
        0 => assert!(said.contains("--page-size thp: "), "{said}"),
        measured => {
            assert_eq!(measured, count("4k") - 1);
            assert!(said.contains("an area consists of whole pages"), "{said}");
        }
    }
}

#[test]
fn missing_huge_pages_are_named_with_a_remedy() {
    // Enough ordinary memory for the shadow copy, and more pages of 1 GB than a test machine has
    // reserved: it has none.
    let output = bench(&["--page-size", "1g", "--size", "1m", "--load", "quiet", "--runs", "1"]);
    if output.status.code() == Some(0) {
        return; // this machine has some
    }
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stderr(&output);
    let named =
        text.contains("nothing was measured: --page-size 1g: needs") && text.contains("huge pages");
    assert!(named || text.contains("--size 1048576: needs"), "{text}");
    assert!(output.stdout.is_empty());
}

#[test]
fn text_fits_and_names_the_machine() {
    let output = bench(&[
        "--size",
        "1m",
        "--runs",
        "1",
        "--page-size",
        "4k",
        "--load",
        "quiet,uniform",
        "--rates",
        "100k",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("machine   Linux "), "{text}");
    for head in ["ratio", "again", "kept", "touch", "recycle", "lost"] {
        assert!(text.contains(head), "{head}: {text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 160, "{line}");
    }
}

#[test]
fn bad_input_is_refused_by_name() {
    for (flags, named) in [
        (vec!["--size", "0"], "--size"),
        (vec!["--size", "60t"], "use --size "),
        (vec!["--page-size", "3k"], "--page-size"),
        (vec!["--page-size", "4k,"], "--page-size"),
        (vec!["--load", "loud"], "--load"),
        (vec!["--rates", "0"], "--load quiet"),
        (vec!["--rates", "fast"], "--rates"),
        (vec!["--runs", "0"], "--runs"),
        (vec!["--threads", "0"], "--threads"),
        (vec!["--from", "4000"], "node 4000 does not exist; nodes with memory: "),
        (vec!["--to", "4000"], "node 4000 does not exist; nodes with memory: "),
        (vec!["--no-such-flag"], "--no-such-flag"),
    ] {
        let output = bench(&flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{flags:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{flags:?}");
    }
}

#[test]
fn an_interrupted_run_ends_cleanly() {
    let arguments = ["bench", "engines", "--size", "16m", "--runs", "1000", "--page-size", "4k"];
    let output = interrupted(&arguments, Duration::from_millis(500));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("interrupted: 0 rows were measured; "), "{text}");
}

#[test]
fn help_of_both_levels() {
    for (flags, part) in [
        (["bench", "--help"].as_slice(), "memcpy"),
        (&["bench", "engines", "--help"], "Exit code: 0 measured"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_pageleap")).args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{flags:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains(part), "{flags:?}");
    }
}
