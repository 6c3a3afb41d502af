//! Runs `pageleap bench engines` as a user would, on small regions. Times are never judged.

mod common;

use std::process::{Command, Output};
use std::time::Duration;

use common::interrupted;
use pageleap::Engine;
use serde_json::Value;

/// The keys of a row.
const KEYS: [&str; 44] = [
    "area_bytes",
    "copy_loop",
    "copy_threads",
    "copy_threads_settled",
    "cpu_to_memcpy_ratio",
    "efault_count",
    "engine",
    "engine_moved_ratio",
    "extra_copied_ratio",
    "first_touch_ns",
    "gap_beyond_memcpy_ns",
    "load",
    "lost",
    "mappings_after",
    "mappings_before",
    "mappings_peak",
    "max_gap_ns",
    "memcpy_cpu_ns",
    "memcpy_loop",
    "memcpy_ns",
    "memcpy_step_bytes",
    "migrate_cpu_ns",
    "migrate_ns",
    "overhead_bytes",
    "p999_gap_ns",
    "page_size",
    "populate_ns",
    "ratio_to_memcpy",
    "ratio_to_memcpy_max",
    "ratio_to_memcpy_min",
    "readers",
    "recycle_cpu_ns",
    "requested_engine",
    "row",
    "runs",
    "starter",
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

/// Runs a benchmark that must succeed. Returns its JSON object and its standard error.
fn object(flags: &[&str]) -> (Value, String) {
    let output = bench(&[&["--size", "16m", "--runs", "2", "--json"], flags].concat());
    assert_eq!(output.status.code(), Some(0), "{flags:?}: {}", stderr(&output));
    let object: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)));
    check_samples(&object);
    check_gaps(&object);
    (object, stderr(&output))
}

/// Checks that each row with a load has the gaps of all its threads, beside a memcpy as well, and
/// that the gaps of all runs follow from those of each run.
fn check_gaps(object: &Value) {
    let list = |key: &str| object[key].as_array().unwrap_or_else(|| panic!("{key} is no list"));
    for row in list("rows") {
        let expected: Vec<&str> = match row["load"].as_str().unwrap() {
            "quiet" => vec![],
            "bystander" => vec!["writers"],
            _ if row["readers"] == 0 => vec!["writers", "kernel"],
            _ => vec!["writers", "readers", "kernel"],
        };
        let group = |other: &&Value| {
            ["page_size", "load", "writes_per_s"].into_iter().all(|key| other[key] == row[key])
        };
        let gaps: Vec<&Value> = list("gaps").iter().filter(group).collect();
        let leaps: Vec<&&Value> = gaps.iter().filter(|gap| gap["row"] == row["row"]).collect();
        let memcpys: Vec<&&Value> = gaps.iter().filter(|gap| gap["beside"] == "memcpy").collect();
        assert_eq!((leaps.len(), memcpys.len()), (expected.len(), expected.len()), "{row}");
        for (leap, memcpy) in leaps.into_iter().zip(memcpys) {
            assert_eq!((&leap["threads"], &leap["beside"]), (&memcpy["threads"], &"leap".into()));
            [leap, memcpy].into_iter().for_each(|gap| check_spread(gap, object));
        }
        let writers = gaps.iter().find(|gap| gap["row"] == row["row"]);
        let beyond = writers.map_or(&Value::Null, |gap| &gap["beyond_memcpy_ns"]);
        assert_eq!(beyond, &row["gap_beyond_memcpy_ns"], "{row}");
    }
}

/// Checks one distribution of gaps, and that it is that of its two runs.
fn check_spread(gap: &Value, object: &Value) {
    let same = |other: &&Value| {
        ["page_size", "load", "writes_per_s", "threads", "beside", "row"]
            .into_iter()
            .all(|key| other[key] == gap[key])
    };
    let runs: Vec<&Value> = object["gap_samples"].as_array().unwrap().iter().filter(same).collect();
    assert_eq!(runs.len(), 2, "{gap}");
    let of = |key: &str| runs.iter().map(|run| run[key].as_u64()).collect::<Vec<_>>();
    // A load that is quiet throughout a leap of a few milliseconds has no gap.
    assert_eq!(of("count").iter().flatten().sum::<u64>(), gap["count"].as_u64().unwrap_or(0));
    assert_eq!(of("max_ns").into_iter().flatten().max(), gap["max_ns"].as_u64(), "{gap}");
    let quantiles = ["p50_ns", "p99_ns", "p999_ns", "max_ns"].map(|key| gap[key].as_u64());
    assert!(quantiles.is_sorted(), "{gap}");
}

/// Runs a benchmark that must succeed. Returns its checked rows and its standard error.
fn rows(flags: &[&str]) -> (Vec<Value>, String) {
    let (object, said) = object(flags);
    let rows = object["rows"].as_array().unwrap().clone();
    rows.iter().for_each(check);
    (rows, said)
}

/// Checks that the figures of each run are present and that the rows follow from them.
fn check_samples(object: &Value) {
    let list = |key: &str| object[key].as_array().unwrap_or_else(|| panic!("{key} is no list"));
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or_else(|| panic!("{key}: {of}"));
    for row in list("rows") {
        let same = |other: &&Value| {
            ["page_size", "load", "writes_per_s"].into_iter().all(|key| other[key] == row[key])
        };
        let samples: Vec<&Value> =
            list("samples").iter().filter(|sample| sample["row"] == row["row"]).collect();
        assert_eq!((samples.len(), &row["runs"]), (2, &Value::from(2)), "{row}");
        let copies: Vec<&Value> = list("memcpy_samples").iter().filter(same).collect();
        let of_method = |by: &Value, step: &Value| -> f64 {
            let same = |copy: &&&Value| copy["loop"] == *by && copy["step_bytes"] == *step;
            copies.iter().filter(same).map(|copy| number(copy, "ns")).sum()
        };
        // The median of two times is half of their sum.
        let base_line = of_method(&row["memcpy_loop"], &row["memcpy_step_bytes"]);
        let slower = |copy: &&Value| base_line <= of_method(&copy["loop"], &copy["step_bytes"]);
        assert!(copies.iter().all(slower), "{row}");
        assert!((number(row, "memcpy_ns") - base_line / 2.0).abs() <= 1.0, "{row}");
        let mean = |key: &str| samples.iter().map(|sample| number(sample, key)).sum::<f64>() / 2.0;
        for key in ["migrate_ns", "ratio_to_memcpy", "cpu_to_memcpy_ratio", "migrate_cpu_ns"] {
            let (row, mean) = (number(row, key), mean(key));
            assert!((row - mean).abs() <= 1.0_f64.min(mean / 1e3), "{key}: {row}, {mean}");
        }
        for sample in samples {
            assert!(same(&sample), "{sample}");
            let parts = number(sample, "migrate_cpu_ns") + number(sample, "recycle_cpu_ns");
            let cpu = parts / number(sample, "memcpy_cpu_ns");
            assert!(cpu > 0.0, "{sample}");
            assert!((cpu / number(sample, "cpu_to_memcpy_ratio") - 1.0).abs() < 1e-9, "{sample}");
            let ratio = number(sample, "migrate_ns") / number(sample, "memcpy_ns");
            assert!((ratio / number(sample, "ratio_to_memcpy") - 1.0).abs() < 1e-9, "{sample}");
        }
    }
}

/// The engines that need a kernel feature, in the order of the tables.
fn demanding() -> Vec<Engine> {
    Engine::ALL.into_iter().filter(|engine| engine.needs().is_some()).collect()
}

/// The engines that work everywhere.
fn modest() -> Vec<Engine> {
    Engine::ALL.into_iter().filter(|engine| engine.needs().is_none()).collect()
}

/// The demanding engines that were measured, concluded from the messages about skipped rows.
fn measured(said: &str) -> Vec<Engine> {
    let skips =
        |engine: &Engine| said.contains(&format!("skipped: {engine} with --page-size 4k: "));
    let measured: Vec<_> = demanding().into_iter().filter(|engine| !skips(engine)).collect();
    assert_eq!(said.matches("skipped: ").count(), demanding().len() - measured.len(), "{said}");
    assert_lines(said);
    measured
}

/// Checks that each row has a numbered line, and that the last number is the number of rows.
fn assert_lines(said: &str) {
    let rows: Vec<&str> = said.lines().filter(|line| line.starts_with("row ")).collect();
    for (line, number) in rows.iter().zip(1..) {
        let begin = format!("row {number} of ");
        assert!(line.starts_with(&begin) && line.contains(" times a memcpy ("), "{said}");
    }
    let all = format!("row {0} of {0}: ", rows.len());
    assert!(rows.last().is_some_and(|line| line.starts_with(&all)), "{said}");
}

fn check(row: &Value) {
    let number =
        |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row} is no number"));
    assert_eq!(row.as_object().unwrap().keys().collect::<Vec<_>>(), KEYS);
    let (used, asked) =
        (row["engine"].as_str().unwrap(), row["requested_engine"].as_str().unwrap());
    let engine = Engine::ALL.into_iter().find(|engine| engine.name() == used);
    let engine = engine.unwrap_or_else(|| panic!("{used} is no engine: {row}"));
    assert!(asked == "auto" || asked == used, "{row}");
    for key in [
        "migrate_ns",
        "ratio_to_memcpy_min",
        "cpu_to_memcpy_ratio",
        "area_bytes",
        "copy_threads",
        "window_max_ns",
    ] {
        assert!(number(key) > 0.0, "{key} of {row}");
    }
    assert!(number("ratio_to_memcpy_min") <= number("ratio_to_memcpy"), "{row}");
    assert!(number("ratio_to_memcpy") <= number("ratio_to_memcpy_max"), "{row}");
    assert!(number("extra_copied_ratio") >= 0.0 && row["first_touch_ns"].is_i64(), "{row}");
    assert!(row["recycle_cpu_ns"].is_u64(), "{row}");
    let mappings = ["mappings_before", "mappings_peak", "mappings_after"].map(number);
    assert!(mappings[0] > 0.0 && mappings[1] >= mappings[0] && mappings[1] >= mappings[2], "{row}");
    assert!(row["overhead_bytes"].is_null() || row["overhead_bytes"].is_u64(), "{row}");
    assert_eq!(row["lost"], 0);
    let windows = ["window_p50_ns", "window_p99_ns", "window_max_ns"].map(number);
    assert!(windows.is_sorted() && windows[0] > 0.0, "{row}");
    let kernel_writes = ["uniform", "skewed", "changing"].contains(&row["load"].as_str().unwrap());
    assert_eq!(row["efault_count"].is_u64(), kernel_writes, "{row}");
    // An engine without signals makes the kernel wait like other writers, so no call fails.
    assert!(engine.signals() || !kernel_writes || row["efault_count"] == 0, "{row}");
    if row["load"] == "quiet" {
        assert_eq!(row["writes_per_s"], 0);
        assert_eq!(number("extra_copied_ratio"), 0.0);
        for key in [
            "writes_kept_ratio",
            "writes_beside_memcpy_per_s",
            "max_gap_ns",
            "p999_gap_ns",
            "gap_beyond_memcpy_ns",
        ] {
            assert!(row[key].is_null(), "{key} of {row}");
        }
    } else {
        // Null or 0 if the writer got no CPU during a leap of a few milliseconds.
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
    let (rows, said) = rows(&["--all", "--page-size", "4k"]);
    let measured = measured(&said);
    let name = |row: &Value| {
        // A changing load has no rate.
        let rate = row["writes_per_s"].as_u64().unwrap_or(0);
        (row["load"].as_str().unwrap().to_owned(), rate, row["area_bytes"].as_u64().unwrap())
    };
    let grown = |engine: &Engine| if engine.areas_grow() { 16 << 20 } else { 2 << 20 };
    // `auto` takes the first engine that works.
    let mut asked = vec!["auto".to_owned()];
    let mut areas = vec![grown(measured.first().unwrap_or(&modest()[0]))];
    for engine in measured.iter().copied().chain(modest()) {
        asked.push(engine.to_string());
        areas.push(grown(&engine));
        if !engine.areas_grow() {
            asked.extend([engine.to_string(), engine.to_string()]);
            areas.extend([512 << 10, 16 << 20]);
        }
    }
    let mut expected = Vec::new();
    for (load, rate) in [
        ("quiet", 0),
        ("uniform", 100_000),
        ("uniform", 10_000_000),
        ("skewed", 100_000),
        ("skewed", 10_000_000),
        ("changing", 0),
    ] {
        expected.extend(areas.iter().map(|area| (load.to_owned(), rate, *area)));
    }
    assert_eq!(rows.iter().map(name).collect::<Vec<_>>(), expected);
    for (row, asked) in rows.iter().zip(asked.iter().cycle()) {
        assert_eq!(row["requested_engine"], **asked, "{row}");
    }
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
    assert_eq!(rows.len(), 2 * (1 + modest().len() + measured(&said).len()));
    for row in &rows {
        assert!(row["writes_per_s"].is_null(), "{row}");
        assert_eq!(row["copy_threads"], 2);
    }
}

#[test]
fn each_starter_has_a_row_of_each_engine() {
    let starters = ["ordinary", "batch", "nice19", "idle"];
    let list = starters.join(",");
    let flags = ["--page-size", "4k", "--load", "uniform", "--engine", "auto,mprotect"];
    let (object, _) = object(&[&flags[..], &["--starter", &list]].concat());
    let rows = object["rows"].as_array().unwrap();
    rows.iter().for_each(check);
    let started = |of: &Value| of["starter"].as_str().map(str::to_owned);
    let expected: Vec<_> = starters.iter().map(|name| Some((*name).to_owned())).collect();
    let twice = [&expected[..], &expected[..]].concat();
    assert_eq!(rows.iter().map(started).collect::<Vec<_>>(), twice);
    // The longest store of each starter stands beside that of the memcpy, which nobody starts.
    let gaps = object["gaps"].as_array().unwrap().iter();
    let of_writers: Vec<_> = gaps.filter(|gap| gap["threads"] == "writers").map(started).collect();
    assert_eq!(of_writers, [&[None], &twice[..]].concat());
}

#[test]
fn several_writers_and_readers_lose_nothing() {
    let load = ["--load", "uniform,quiet", "--rates", "1m", "--writers", "3", "--readers", "2"];
    let (rows, _) = rows(&[&["--page-size", "4k"], &load[..]].concat());
    for row in &rows {
        let writes = row["load"] == "uniform";
        let (writers, readers) = if writes { (3, 2) } else { (0, 0) };
        assert_eq!((&row["writers"], &row["readers"]), (&writers.into(), &readers.into()), "{row}");
        // How many it is depends on when the writers get a CPU.
        assert_eq!(row["writes_beside_memcpy_per_s"].is_number(), writes, "{row}");
    }
}

#[test]
fn a_bystander_is_measured_as_a_writer_is() {
    let (rows, _) = rows(&["--page-size", "4k", "--load", "bystander"]);
    assert!(rows.len() > modest().len());
    for row in &rows {
        assert!(row["writes_per_s"].is_null(), "{row}");
        assert!(row["writes_beside_memcpy_per_s"].is_number(), "{row}");
        assert_eq!(row["extra_copied_ratio"], 0.0, "{row}");
    }
}

#[test]
fn private_memory_has_rows_and_fresh_memory_a_column() {
    let sizes = "anon-4k,anon-thp";
    let (object, said) = object(&["--page-size", sizes, "--load", "quiet,uniform"]);
    for size in sizes.split(',') {
        let rows = object["rows"].as_array().unwrap();
        let rows = rows.iter().filter(|row| row["page_size"] == size && row["engine"] != "kernel");
        let rows: Vec<&Value> = rows.collect();
        if rows.is_empty() {
            assert!(said.contains(&format!("--page-size {size}: ")), "{said}");
        }
        for row in rows {
            assert_eq!((&row["engine"], &row["lost"]), (&"uffd-move".into(), &0.into()), "{row}");
            for key in ["migrate_ns", "populate_ns", "memcpy_ns", "window_p99_ns"] {
                assert!(row[key].as_u64().unwrap() > 0, "{key} of {row}");
            }
        }
    }
}

#[test]
fn what_cannot_be_measured_is_skipped_with_its_reason() {
    // Areas of 512 KB hold no page of 2 MB. If the kernel itself makes no such pages, the command
    // says why.
    let (object, said) = object(&["--all", "--page-size", "4k,thp", "--load", "quiet"]);
    assert!(said.contains("skipped: "), "{said}");
    for skipped in object["skipped"].as_array().unwrap() {
        assert!(said.contains(&format!("skipped: {}\n", skipped.as_str().unwrap())), "{said}");
    }
    let rows = object["rows"].as_array().unwrap();
    let count = |page: &str| rows.iter().filter(|row| row["page_size"] == page).count();
    assert!((4..=4 + demanding().len()).contains(&count("4k")));
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
    // The shadow copy fits into ordinary memory. The pools need pages of 1 GB, which a test machine
    // has not reserved.
    let output = bench(&["--page-size", "1g", "--size", "1m", "--load", "quiet", "--runs", "1"]);
    if output.status.code() == Some(0) {
        return; // this machine has reserved pages of 1 GB
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
    assert!(text.starts_with("Machine and leap\n  Linux "), "{text}");
    for head in ["ratio", "CPU", "again", "kept", "touch", "recycle", "lost", "fastest"] {
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
        (vec!["--load", "small", "--page-size", "thp"], "small: jobs have base pages of a region"),
        (vec!["--load", "small", "--starter", "batch"], "--starter batch: small and scattered"),
        (vec!["--engine", "magic"], "--engine"),
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
fn engines_can_be_chosen_and_each_row_has_a_line_of_progress() {
    let flags = ["--page-size", "4k", "--engine", "mprotect,auto", "--load", "quiet,bystander"];
    let (rows, said) = rows(&flags);
    let asked: Vec<&Value> = rows.iter().map(|row| &row["requested_engine"]).collect();
    assert_eq!(asked, ["mprotect", "auto", "mprotect", "auto"]);
    assert_lines(&said);
    // Standard error has only the lines of the rows, each with its load and its engine.
    let mut lines = said.lines();
    for load in ["4k, quiet: ", "4k, bystander: "] {
        let both = [lines.next().unwrap(), lines.next().unwrap()].concat();
        assert_eq!(both.matches(load).count(), 2, "{said}");
        assert!(both.contains("mprotect took ") && both.contains("auto took "), "{said}");
    }
    assert_eq!(lines.next(), None, "{said}");
}

/// The keys of a row of short jobs. One of `scattered` has [`EACH_KEYS`] in addition.
const JOB_KEYS: [&str; 30] = [
    "bytes",
    "engine",
    "kernel_max_ns",
    "kernel_min_ns",
    "kernel_ns",
    "lost",
    "memcpy_loop",
    "memcpy_max_ns",
    "memcpy_min_ns",
    "memcpy_ns",
    "memcpy_step_bytes",
    "range_pages",
    "ranges",
    "requested_engine",
    "run_max_ns",
    "run_min_ns",
    "run_ns",
    "run_ratio_to_memcpy",
    "run_ratio_to_memcpy_max",
    "run_ratio_to_memcpy_min",
    "runs",
    "start_max_ns",
    "start_min_ns",
    "start_ns",
    "start_wait_max_ns",
    "start_wait_min_ns",
    "start_wait_ns",
    "start_wait_ratio_to_memcpy",
    "start_wait_ratio_to_memcpy_max",
    "start_wait_ratio_to_memcpy_min",
];
const EACH_KEYS: [&str; 7] = [
    "kernel_per_page_ns",
    "memcpy_per_page_ns",
    "run_per_page_ns",
    "run_per_range_ns",
    "start_per_range_ns",
    "start_wait_per_page_ns",
    "start_wait_per_range_ns",
];

/// Checks a figure of a row: it is the median of its two samples, between the lowest and the highest.
fn check_figure(row: &Value, keys: [&str; 3], samples: &[f64]) {
    let [median, least, most] =
        keys.map(|key| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row} is no number")));
    assert_eq!(samples.len(), 2, "{row}");
    let expected = [(samples[0] + samples[1]) / 2.0, samples[0].min(samples[1])];
    for (found, expected) in [median, least].into_iter().zip(expected) {
        assert!(expected > 0.0 && (found / expected - 1.0).abs() < 0.01, "{keys:?}: {row}");
    }
    assert!(least <= median && median <= most, "{keys:?}: {row}");
}

/// Checks a row of short jobs, and that it follows from its samples.
fn check_jobs(row: &Value, load: &str, object: &Value) {
    let each = if load == "scattered" { &EACH_KEYS[..] } else { &[] };
    let mut known = [&JOB_KEYS[..], each].concat();
    known.sort_unstable();
    let mut keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, known);
    let samples = |way: &str, key: &str| -> Vec<f64> {
        let is_of_row = |sample: &&Value| {
            let same = ["ranges", "range_pages", "requested_engine"];
            sample["load"] == load
                && sample["way"] == way
                && same.into_iter().all(|key| sample[key] == row[key])
        };
        let of_row = object["job_samples"].as_array().unwrap().iter().filter(is_of_row);
        of_row.map(|sample| sample[key].as_f64().unwrap()).collect()
    };
    let figure = |name: &str| ["", "_min", "_max"].map(|part| format!("{name}{part}_ns"));
    for (name, way, key) in [
        ("start", "start", "start_ns"),
        ("start_wait", "start", "whole_ns"),
        ("run", "run", "whole_ns"),
    ] {
        let keys = figure(name);
        check_figure(row, [&keys[0], &keys[1], &keys[2]], &samples(way, key));
    }
    for (name, way) in [("start_wait", "start"), ("run", "run")] {
        let keys = ["", "_min", "_max"].map(|part| format!("{name}_ratio_to_memcpy{part}"));
        let ratios = samples(way, "ratio_to_memcpy");
        check_figure(row, [&keys[0], &keys[1], &keys[2]], &ratios);
        let pairs = samples(way, "whole_ns").into_iter().zip(samples(way, "memcpy_ns"));
        for ((whole, memcpy), ratio) in pairs.zip(ratios) {
            assert!((whole / memcpy / ratio - 1.0).abs() < 1e-9, "{row}");
        }
    }
    let number = |key: &str| row[key].as_f64().unwrap();
    assert!(number("start_ns") < number("start_wait_ns") && number("memcpy_ns") > 0.0, "{row}");
    assert_eq!((&row["lost"], &row["runs"]), (&0.into(), &2.into()), "{row}");
    assert_eq!(number("bytes"), number("ranges") * number("range_pages") * 4096.0);
}

#[test]
fn short_jobs_have_rows_that_follow_from_their_samples() {
    let flags = ["--page-size", "4k", "--load", "quiet,scattered,small", "--engine", "mprotect"];
    let (object, said) = object(&flags);
    assert_eq!(object["rows"].as_array().unwrap().len(), 1);
    let shapes = |load: &str| -> Vec<(u64, u64)> {
        let rows = object[load].as_array().unwrap();
        rows.iter().for_each(|row| check_jobs(row, load, &object));
        let shape = |key: &str, row: &Value| row[key].as_u64().unwrap();
        rows.iter().map(|row| (shape("ranges", row), shape("range_pages", row))).collect()
    };
    assert_eq!(shapes("small"), [1, 16, 64, 256, 1024, 4096].map(|pages| (1, pages)));
    assert_eq!(shapes("scattered"), [(128, 1), (512, 1), (2048, 1), (512, 16)]);
    for row in object["scattered"].as_array().unwrap() {
        let [ranges, pages] = ["ranges", "range_pages"].map(|key| row[key].as_f64().unwrap());
        for (whole, part, parts) in [
            ("start_ns", "start_per_range_ns", ranges),
            ("start_wait_ns", "start_wait_per_range_ns", ranges),
            ("run_ns", "run_per_page_ns", ranges * pages),
        ] {
            let [whole, part] = [whole, part].map(|key| row[key].as_f64().unwrap());
            // Both are rounded to nanoseconds.
            assert!((whole / parts - part).abs() <= 1.0, "{row}");
        }
    }
    // Without another node the kernel has nothing to do. Wherever it has no time, there is a reason.
    let missing = object["kernel_missing"].as_array().unwrap();
    let rows = ["small", "scattered"].into_iter().flat_map(|load| object[load].as_array().unwrap());
    let (times, none): (Vec<&Value>, Vec<&Value>) =
        rows.map(|row| &row["kernel_ns"]).partition(|ns| ns.as_u64().is_some_and(|ns| ns > 0));
    assert!(none.iter().all(|ns| ns.is_null()) && none.is_empty() == missing.is_empty());
    if object["setting"]["nodes"] == 1 {
        assert!(times.is_empty() && missing.len() == 1, "{missing:?}");
        assert!(missing[0].as_str().unwrap().starts_with("one memory node: "), "{missing:?}");
    }
    let lines = |load: &str| said.lines().filter(|line| line.contains(load)).count();
    assert_eq!([lines("4k, quiet: "), lines(": small, "), lines(": scattered, ")], [1, 6, 4]);
}

#[test]
fn short_jobs_alone_have_no_table_of_leaps() {
    // The size is for leaps of all of a region, which are not asked for: this one fits nowhere.
    let flags = ["--load", "small", "--engine", "mprotect", "--runs", "1", "--size", "60t"];
    let output = bench(&flags);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Jobs of one range, at rest: microseconds"), "{text}");
    for absent in ["Leaps, compared", "64KiB", "bytes that leap", "do not touch each other"] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    for size in ["4 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"] {
        assert!(text.contains(&format!("\n small, {size}\n  mprotect ")), "{size}: {text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 160, "{line}");
    }
}

#[test]
fn an_interrupted_run_ends_cleanly() {
    // A run measures a load for 50 ms beside a memcpy, so no row is whole before a minute.
    let size = ["bench", "engines", "--size", "16m", "--page-size", "4k"];
    let arguments = [&size[..], &["--runs", "1000", "--load", "uniform"]].concat();
    let output = interrupted(&arguments, Duration::from_millis(500));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("interrupted: 0 rows were measured; "), "{text}");
}

#[test]
fn interrupted_short_jobs_end_cleanly() {
    let arguments = ["bench", "engines", "--load", "scattered", "--runs", "1000"];
    let output = interrupted(&arguments, Duration::from_millis(500));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("interrupted: 0 rows were measured; no "), "{text}");
}

#[test]
fn help_of_both_levels() {
    for (flags, part) in [
        (["bench", "--help"].as_slice(), "memcpy"),
        (&["bench", "engines", "--help"], "Exit code: 0 measured"),
        (&["bench", "engines", "--help"], "Examples:"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_pageleap")).args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{flags:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains(part), "{flags:?}");
    }
}
