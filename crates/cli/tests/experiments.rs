//! Runs the experiments of `pageleap bench` as a user would, on little memory. Times are never
//! judged.

mod common;

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use common::interrupted;
use serde_json::Value;

fn bench(flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.arg("bench").args(flags).output().expect("pageleap starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The object that a run prints, which must succeed.
fn object(flags: &[&str]) -> Value {
    let output = bench(&[flags, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The number of a row or sample that counts.
fn number(of: &Value) -> f64 {
    let counting = ["time_ns", "kept_ratio", "fifth_ns", "query_ns"];
    counting.iter().find_map(|key| of[key].as_f64()).unwrap()
}

/// The least or the most of that number.
fn extreme(row: &Value, which: &str) -> f64 {
    let keys = [("time", "ns"), ("kept", "ratio"), ("fifth", "ns"), ("query", "ns")];
    let all = keys.map(|(key, unit)| row[format!("{key}_{which}_{unit}")].as_f64());
    all.into_iter().find_map(|number| number).unwrap()
}

/// Checks that rows follow from the samples, and that each round has each row once.
fn check(object: &Value, rounds: u64) {
    let (rows, samples) =
        (object["rows"].as_array().unwrap(), object["samples"].as_array().unwrap());
    assert!(!rows.is_empty());
    assert_eq!(samples.len() as u64, rows.len() as u64 * rounds);
    let time = |row: u64, round: u64| {
        let is_it = |of: &&Value| of["row"] == row && of["round"] == round;
        let found: Vec<&Value> = samples.iter().filter(is_it).collect();
        assert_eq!(found.len(), 1, "row {row}, round {round}");
        number(found[0])
    };
    for (nth, row) in rows.iter().enumerate() {
        assert_eq!((&row["row"], &row["rounds"]), (&nth.into(), &rounds.into()));
        let times: Vec<f64> = (0..rounds).map(|round| time(nth as u64, round)).collect();
        assert!(times.iter().all(|ns| *ns > 0.0), "{row}");
        let [least, most] = ["min", "max"].map(|which| extreme(row, which));
        assert!(times.iter().all(|ns| (least..=most).contains(ns)), "{row} {times:?}");
        let median = number(row);
        assert!((least..=most).contains(&median), "{row}");
        let Some(base) = row["base_row"].as_u64() else {
            assert_eq!(row["ratio"], Value::Null);
            continue;
        };
        for round in 0..rounds {
            let [ns, base] = [times[round as usize], time(base, round)];
            let [least, most] = ["ratio_min", "ratio_max"].map(|key| row[key].as_f64().unwrap());
            // Times of queries are a few hundred nanoseconds, which samples round to whole ones.
            let is_time = row["kept_ratio"].is_null();
            let slack = if is_time { 0.001 + 0.5 / ns + 0.5 / base } else { 0.001 };
            let range = least * (1.0 - slack)..=most * (1.0 + slack);
            assert!(range.contains(&(ns / base)), "{row} {ns} {base}");
        }
    }
}

/// Checks that the rows of a part have other places in the second round: the reverse.
fn check_mirrored(object: &Value) {
    let mut places: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for sample in object["samples"].as_array().unwrap() {
        let row = sample["row"].as_u64().unwrap();
        places.entry(row).or_default().push(sample["place"].as_u64().unwrap());
    }
    let sums: Vec<u64> = places.values().map(|places| places[0] + places[1]).collect();
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{places:?}");
}

fn check_environment(object: &Value) {
    let host = &object["host"];
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(host["kernel"], kernel.trim());
    assert!(!host["nodes"].as_array().unwrap().is_empty());
    assert!(object["noise"]["elapsed_ns"].as_u64().unwrap() > 0);
    assert!(object["warnings"].is_array());
}

#[test]
fn access_has_a_row_for_each_pattern_and_page_size() {
    let object = object(&["access", "--size", "4m", "--page-size", "4k,4k", "--runs", "2"]);
    check(&object, 2);
    check_mirrored(&object);
    check_environment(&object);
    let patterns: Vec<&str> = object["rows"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["memory"] == "local")
        .map(|row| row["pattern"].as_str().unwrap())
        .collect();
    assert_eq!(patterns, ["read in order", "write in order", "read at random", "write at random"]);
    assert_eq!((&object["experiment"], &object["bytes"]), (&"access".into(), &(4 << 20).into()));
}

#[test]
fn copies_are_compared_with_a_leap_and_fresh_memory() {
    let flags = ["copy", "--size", "4m", "--page-size", "4k", "--runs", "2", "--warmup", "0"];
    let object = object(&flags);
    check(&object, 2);
    check_mirrored(&object);
    check_environment(&object);
    let rows = object["rows"].as_array().unwrap();
    let ways: Vec<&str> = rows.iter().map(|row| row["way"].as_str().unwrap()).collect();
    for way in ["memcpy", "memcpy, fresh", "auto"] {
        assert!(ways.contains(&way), "{ways:?}");
    }
    // The base is a copy into mapped memory.
    assert_eq!(object["method"]["middle"], "median");
    for base in rows.iter().filter_map(|row| row["base_row"].as_u64()) {
        assert!(!ways[base as usize].contains("fresh") && ways[base as usize] != "auto");
    }
}

#[test]
fn quiet_has_engines_over_sizes_of_areas() {
    let flags = ["quiet", "--size", "4m", "--page-size", "4k", "--runs", "2", "--warmup", "0"];
    let object = object(&[&flags[..], &["--engine", "mprotect,auto", "--area", "64k,1m"]].concat());
    check(&object, 2);
    let rows = object["rows"].as_array().unwrap();
    let areas = |way: &str| -> Vec<Option<u64>> {
        let of_way = rows.iter().filter(|row| row["way"] == way);
        of_way.map(|row| row["area_bytes"].as_u64()).collect()
    };
    assert_eq!(areas("mprotect"), [None, Some(64 << 10), Some(1 << 20)]);
    assert_eq!(areas("auto"), [None]);
    assert!(areas("precopy").is_empty());
}

#[test]
fn writes_have_ratios_to_copies_beside_the_load_and_at_rest() {
    let flags = ["writes", "--size", "4m", "--page-size", "4k", "--runs", "2", "--warmup", "0"];
    let loads = ["--rates", "10k", "--skewed", "100k", "--engine", "auto"];
    let object = object(&[&flags[..], &loads].concat());
    check(&object, 2);
    let rows = object["rows"].as_array().unwrap();
    let way = |number: &Value| rows[number.as_u64().unwrap() as usize]["way"].as_str().unwrap();
    let leaps: Vec<&Value> = rows.iter().filter(|row| row["way"] == "auto").collect();
    // One for each load.
    assert_eq!(leaps.len(), 2);
    for row in leaps {
        assert!(way(&row["base_row"]).ends_with(", beside"), "{row}");
        assert!(way(&row["at_rest_row"]).ends_with(", at rest"), "{row}");
        assert!(row["ratio_at_rest"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["moved_ratio"], 1.0);
        assert!(row["kept_ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn the_overhead_is_measured_over_sizes_of_areas() {
    let flags = ["overhead", "--size", "4m", "--page-size", "4k", "--runs", "1", "--warmup", "0"];
    let object = object(&[&flags[..], &["--area", "4k,1m"]].concat());
    check(&object, 1);
    let rows = object["rows"].as_array().unwrap().iter();
    let of_mprotect: Vec<&Value> = rows.filter(|row| row["way"] == "mprotect").collect();
    let areas: Vec<Option<u64>> =
        of_mprotect.iter().map(|row| row["area_bytes"].as_u64()).collect();
    assert_eq!(areas, [None, Some(4096), Some(1 << 20)]);
    for row in of_mprotect {
        assert!(row["extra_copied_ratio"].as_f64().unwrap() >= 0.0, "{row}");
        assert!(row["beyond_memcpy_ratio"].is_number(), "{row}");
    }
}

#[test]
fn leaps_scale_over_threads_and_sizes() {
    let flags = ["scale", "--size", "80m", "--page-size", "4k", "--runs", "1", "--warmup", "0"];
    let object = object(&[&flags[..], &["--threads", "1,2"]].concat());
    check(&object, 1);
    let rows = object["rows"].as_array().unwrap();
    let threads = |way: &str| -> Vec<Option<u64>> {
        let of_way = rows.iter().filter(|row| row["way"] == way);
        of_way.map(|row| row["threads"].as_u64()).collect()
    };
    // 64 MB, and all of it.
    assert_eq!(threads("auto"), [Some(1), Some(2), Some(1), Some(2)]);
    assert_eq!(threads("memcpy").iter().filter(|of| **of == Some(2)).count(), 2);
}

#[test]
fn writes_of_a_window_are_compared_with_memory_that_stays() {
    let flags = ["sustained", "--size", "4m", "--page-size", "4k", "--runs", "1", "--warmup", "0"];
    let object = object(&[&flags[..], &["--rates", "10k,1m", "--window", "100ms"]].concat());
    let rows = object["rows"].as_array().unwrap();
    for row in rows {
        assert!(row["kept_ratio"].as_f64().unwrap() > 0.0, "{row}");
        let base = row["base_row"].as_u64().map(|base| &rows[base as usize]["way"]);
        assert_eq!(base.is_none(), row["way"] == "none", "{row}");
        assert!(base.is_none_or(|base| base == "none"), "{row}");
    }
    assert_eq!(rows.iter().filter(|row| row["way"] == "none").count(), 2);
}

#[test]
fn queries_run_over_a_table_that_moves() {
    let flags = ["tpch", "--size", "2m", "--page-size", "4k", "--runs", "1", "--warmup", "0"];
    let object = object(&flags);
    let rows = object["rows"].as_array().unwrap();
    for (query, writes) in [("Q1", "none"), ("Q1", "10m"), ("Q6", "none"), ("Q6", "10m")] {
        let of = |way: &str| {
            let is_it = |row: &&Value| {
                row["query"] == query && row["writes"] == writes && row["way"] == way
            };
            rows.iter().find(is_it).unwrap_or_else(|| panic!("{query} {writes} {way}"))
        };
        assert_eq!(of("auto")["moved_ratio"], 1.0);
        assert_eq!(of("auto")["base_row"], of("none")["row"]);
        assert!(of("none")["first_ns"].as_u64() <= of("none")["fifth_ns"].as_u64());
    }
}

#[test]
fn queries_run_on_a_tree_whose_leaves_move() {
    let flags = ["btree", "--size", "4m", "--runs", "2", "--warmup", "0", "--window", "30ms"];
    let object = object(&[&flags[..], &["--engine", "auto,wp-sync"]].concat());
    check(&object, 2);
    check_mirrored(&object);
    check_environment(&object);
    let rows = object["rows"].as_array().unwrap();
    // Three mixes, each with three shares of migrations.
    let bases: Vec<&Value> = rows.iter().filter(|row| row["way"] == "none").collect();
    assert_eq!(bases.len(), 9, "{}", object["notes"]);
    for base in &bases {
        assert!(base["queries_per_s"].as_f64().unwrap() > 0.0, "{base}");
        assert_eq!([&base["pages_per_s"], &base["moved_ratio"]], [&Value::Null; 2]);
    }
    for leaves in ["beside", "apart"] {
        let is_it = |row: &&Value| row["way"] == "auto" && row["leaves"] == leaves;
        for row in rows.iter().filter(is_it) {
            let base = &rows[row["base_row"].as_u64().unwrap() as usize];
            assert_eq!((&base["way"], &base["part"]), (&"none".into(), &row["part"]));
            assert!(row["queries_per_s"].as_f64().unwrap() > 0.0, "{row}");
            // With one migration in 10,000 queries there may be none.
            if row["part"].as_str().unwrap().ends_with("50/50") {
                assert_eq!(row["moved_ratio"], 1.0, "{row}");
                assert!(row["pages_per_s"].as_f64().unwrap() > 0.0, "{row}");
                assert!(row["migration_ns"].as_u64().unwrap() > 0, "{row}");
            }
        }
        assert_eq!(rows.iter().filter(is_it).count(), 9);
    }
}

#[test]
fn all_experiments_are_in_one_result_and_in_the_list() {
    let output = bench(&["--list", "--json"]);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names = |of: &Value| -> Vec<String> {
        let all = of["experiments"].as_array().unwrap().iter();
        all.map(|one| one["experiment"].as_str().unwrap().to_owned()).collect()
    };
    let listed = names(&list);
    assert_eq!(listed.len(), 9);
    for name in &listed {
        let help = bench(&[name, "--help"]);
        assert_eq!(help.status.code(), Some(0), "{name}");
    }
    let flags = ["all", "--smoke", "--size", "2m", "--page-size", "4k"];
    let object = object(&flags);
    assert_eq!(names(&object), listed, "{}", object["left_out"]);
    check_environment(&object);
    for one in object["experiments"].as_array().unwrap() {
        check(one, 1);
    }
    let text = bench(&["--list"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("Table 2"));
}

#[test]
fn text_names_the_machine_and_a_part_without_memory() {
    let flags = ["copy", "--smoke", "--size", "4m", "--page-size", "4k,2m"];
    let output = bench(&flags);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["Figure 2", "ratios to: ", "\nHost\n", "\nNoise\n", "clocksource"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Either there are huge pages, or the note says that there are too few.
    let too_few = "left out: pages of 2m: needs 4 free huge pages of 2 MiB";
    assert!(text.contains(too_few) || text.contains("pages of 2m: 1 round"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 130), "{text}");
    let said = stderr(&output);
    assert!(said.contains("copy, pages of 4k: 1 round, ratios "), "{said}");
}

#[test]
fn an_interrupted_run_keeps_its_whole_rounds() {
    let file = std::env::temp_dir().join(format!("pageleap-rounds-{}.json", std::process::id()));
    let export = ["--export-json", file.to_str().unwrap()];
    let flags = ["--size", "2m", "--page-size", "4k", "--engine", "auto", "--warmup", "0"];
    let endless = ["--max-runs", "60000", "--precision", "0.000001", "--time-limit", "3600s"];
    let flags = [&["bench", "quiet"], &flags[..], &endless, &export].concat();
    let output = interrupted(&flags, Duration::from_secs(1));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    let rounds = said.split("interrupted: ").nth(1).and_then(|text| text.split(' ').next());
    let rounds: u64 = rounds.unwrap().parse().unwrap();
    // A machine that is too slow for one round has no result.
    if rounds > 0 {
        let object: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        check(&object, rounds);
        assert_eq!(object["method"]["ended"][0].as_str().unwrap().matches("early").count(), 1);
    }
    let _ = std::fs::remove_file(&file);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    for (flags, word) in [
        (&["quiet", "--precision", "0"][..], "percentage"),
        (&["quiet", "--runs", "3", "--max-runs", "5"], "cannot be used with"),
        (&["copy", "--size", "60000g"], "use --size"),
        (&["access", "--from", "99"], "node 99 does not exist"),
        (&["quiet", "--engine", "warp"], "warp"),
        (&["copy", "--smoke", "--quick"], "cannot be used with"),
        (&["writes", "--skewed", "some"], "expected a number"),
        (&["access", "--page-size", "1g"], "4k, thp and 2m"),
        (&["access", "--paper", "--quick"], "cannot be used with"),
        (&["sustained", "--rates", "max"], "above 0"),
        (&["btree", "--page-size", "thp,2m"], "--page-size 4k"),
        (&["btree", "--migrations", "0"], "percentage"),
        (&["btree", "--mixes", "b"], "expected a, c or e"),
        (&["btree", "--size", "2m", "--threads", "64"], "--threads 64"),
        (&["btree", "--size", "60000g"], "use --size"),
        (&["all", "--size", "60000g", "--page-size", "4k"], "use --size"),
        (&["quiet", "--size", "4m", "--area", "64k,16m"], "--area 16777216"),
    ] {
        let output = bench(flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(stderr(&output).contains(word), "{flags:?}: {}", stderr(&output));
    }
}
