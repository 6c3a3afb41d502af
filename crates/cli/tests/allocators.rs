//! Runs the benchmarks of allocators, of page tables and of the prober. Times are never judged.

mod common;

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use common::interrupted;
use serde_json::Value;

/// Debian's packages of the allocators that have one.
const PACKAGES: [(&str, &str); 4] = [
    ("jemalloc", "libjemalloc2"),
    ("tcmalloc", "libtcmalloc-minimal4"),
    ("mimalloc", "libmimalloc2.0"),
    ("tbbmalloc", "libtbbmalloc2"),
];

fn pageleap(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.args(arguments).output().expect("pageleap starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn bench(flags: &[&str]) -> Value {
    let output = pageleap(&[&["bench", "allocators", "--json"], flags].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn all_allocators_get_the_same_requests_and_the_same_runs() {
    let result = bench(&["--threads", "1,3", "--operations", "20000", "--runs", "2"]);
    let libraries = result["setting"]["libraries"].as_object().unwrap();
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * (1 + libraries.len()), "glibc and those with a library: {rows:?}");
    let samples = result["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 2 * rows.len());
    let mut requested: BTreeMap<u64, BTreeMap<String, Vec<u64>>> = BTreeMap::new();
    for sample in samples {
        let of = |key: &str| sample[key].as_u64().unwrap();
        assert!(of("time_ns") > 0 && of("resident_bytes") > 0, "{sample}");
        let name = sample["allocator"].as_str().unwrap().to_owned();
        let of_threads = requested.entry(of("threads")).or_default();
        of_threads.entry(name).or_default().push(of("requested_bytes"));
    }
    for (threads, by_allocator) in requested {
        let glibc = &by_allocator["glibc"];
        assert_eq!(glibc.len(), 2);
        assert_ne!(glibc[0], glibc[1], "each run has other requests");
        assert!(by_allocator.values().all(|of| of == glibc), "{threads}: {by_allocator:?}");
    }
    for row in rows {
        // The median of two quotients of times of the same runs.
        let times = |name: &Value| -> Vec<f64> {
            let of_row = |sample: &&Value| {
                sample["allocator"] == *name && sample["threads"] == row["threads"]
            };
            let samples = samples.iter().filter(of_row);
            samples.map(|sample| sample["time_ns"].as_f64().unwrap()).collect()
        };
        let (own, glibc) = (times(&row["allocator"]), times(&"glibc".into()));
        let ratio = own.iter().zip(&glibc).map(|(own, glibc)| own / glibc).sum::<f64>() / 2.0;
        assert!((row["time_to_glibc_ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-6, "{row}");
        let order = ["time_min_ns", "time_ns", "time_max_ns"].map(|key| row[key].as_u64().unwrap());
        assert!(order.is_sorted(), "{row}");
        assert!(row["overhead_ratio"].as_f64().unwrap() > 0.5, "{row}");
    }
    let missing = result["missing"].to_string();
    for name in ["hoard", "supermalloc", "mcmalloc"] {
        assert!(missing.contains(name), "{missing}");
    }
    for (name, package) in PACKAGES {
        assert_ne!(libraries.contains_key(name), missing.contains(package), "{name}: {missing}");
    }
}

#[test]
fn allocators_that_are_not_there_are_refused_with_the_way_to_get_them() {
    let refused = |name: &str| {
        let output = pageleap(&["bench", "allocators", "--alloc", name]);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", stderr(&output));
        stderr(&output)
    };
    assert!(refused("hoard").contains("hoard is not available"));
    assert!(refused("malloc").contains("known are glibc, jemalloc"));
    let found = bench(&["--threads", "1", "--operations", "1", "--runs", "1"]);
    for (name, package) in PACKAGES {
        if found["setting"]["libraries"].get(name).is_none() {
            assert!(refused(name).contains(&format!("apt-get install {package}")));
        }
    }
}

#[test]
fn an_interrupted_comparison_ends_at_once() {
    let flags = ["bench", "allocators", "--operations", "4000000000", "--threads", "1"];
    let output = interrupted(&flags, Duration::from_millis(300));
    assert_eq!(output.status.code(), Some(128 + libc::SIGINT), "{}", stderr(&output));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
}

#[test]
fn moves_of_page_tables_stand_beside_leaps() {
    let flags =
        ["bench", "page-tables", "--only", "costs", "--size", "8m", "--runs", "2", "--json"];
    let output = pageleap(&flags);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&object["runs"], &object["size_bytes"]), (&2.into(), &(8 << 20).into()));
    assert!(["stop-copy", "mprotect"].contains(&object["engine"].as_str().unwrap()));
    let rows = object["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["beside"].as_str().unwrap()).collect();
    assert_eq!(names, ["rest", "one writer"]);
    for row in rows {
        for of in ["memcpy", "leap", "tables"] {
            assert!(row[format!("{of}_ns_per_gb")].as_u64().unwrap() > 0, "{row}");
        }
        for to in ["leap", "memcpy"] {
            let value = |end: &str| row[format!("tables_to_{to}_ratio{end}")].as_f64().unwrap();
            assert!([value("_min"), value(""), value("_max")].is_sorted(), "{row}");
        }
    }
    let flags = ["bench", "page-tables", "--size", "8m", "--runs", "60000"];
    let output = interrupted(&flags, Duration::from_millis(500));
    assert_eq!(output.status.code(), Some(128 + libc::SIGINT), "{}", stderr(&output));
    let refused = pageleap(&["bench", "page-tables", "--size", "64t"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("use --size"), "{}", stderr(&refused));
}

#[test]
fn views_are_measured_against_their_number() {
    let part = ["bench", "page-tables", "--only", "views"];
    let flags = [&part[..], &["--size", "8m", "--runs", "2", "--views", "3"]].concat();
    let output = pageleap(&[&flags[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&object["part_bytes"], &object["views_at_most"]), (&(2 << 20).into(), &3.into()));
    let numbers = |table: &str, key: &str, name: &str, number: &str| -> Vec<u64> {
        let rows = object[table].as_array().unwrap();
        let of_name = rows.iter().filter(|row| row[key] == name);
        of_name.map(|row| row[number].as_u64().unwrap()).collect()
    };
    for step in ["leap", "discard", "back", "grow"] {
        assert_eq!(numbers("views", "step", step, "views"), [0, 1, 2, 3]);
        let tables = numbers("views", "step", step, "page_table_bytes");
        assert!(tables[0] == 0 && tables.is_sorted(), "{tables:?}");
        // A page of PTEs for each 2 MB of each view.
        assert!(tables[3] >= 3 * 4 * 4096, "{tables:?}");
    }
    assert_eq!(numbers("views", "step", "replicate", "views"), [1, 2, 3]);
    for call in ["mmap", "mprotect", "mremap", "munmap"] {
        assert_eq!(numbers("mapping_calls", "call", call, "mappings"), [1, 2, 3, 4]);
    }
    let notes = object["views_notes"].to_string();
    let is_refused = notes.contains("leap: not measured");
    let ratios = [("views", "to_no_views_ratio"), ("mapping_calls", "to_one_mapping_ratio")];
    for (table, ratio) in ratios {
        for row in object[table].as_array().unwrap() {
            let value = |end: &str| row[format!("{ratio}{end}")].as_f64();
            let ordered = [value("_min"), value(""), value("_max")];
            let has_none = row["step"] == "replicate" || row["step"] == "leap" && is_refused;
            assert!(has_none || ordered[0].is_some() && ordered.is_sorted(), "{row}");
        }
    }
    assert!(notes.contains("Phoenix (Siavashi et al.)"), "{notes}");

    let text = pageleap(&flags);
    let text = String::from_utf8_lossy(&text.stdout);
    for part in ["Views, by their number", "Calls on plain mappings", " replicate", " munmap"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let part = ["bench", "page-tables", "--only", "costs,views", "--views", "0"];
    let without = pageleap(&[&part[..], &["--size", "8m", "--runs", "1"]].concat());
    assert!(!String::from_utf8_lossy(&without.stdout).contains("mmap"));
    let refused = pageleap(&["bench", "page-tables", "--views", "17"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
}

#[test]
fn scenarios_are_measured_with_each_policy() {
    let part = ["bench", "page-tables", "--only", "scenarios", "--size", "4m"];
    let output = pageleap(&[&part[..], &["--runs", "1", "--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = object["scenarios"].as_array().unwrap();
    for workload in ["gups", "join", "xsbench", "btree"] {
        let base = |row: &&Value| row["workload"] == workload && row["scenario"] == "LPLD";
        let policies: Vec<_> =
            rows.iter().filter(base).map(|row| row["policy"].as_str().unwrap()).collect();
        assert_eq!(policies, ["off", "auto-ptm", "algorithm-1", "latency-aware", "views"]);
    }
    for row in rows {
        assert!(row["per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p50_ns"].as_u64().unwrap() <= row["p99_ns"].as_u64().unwrap(), "{row}");
        assert!(row["to_lpld_ratio"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["table_nodes"].as_array().unwrap().len(), 1, "{row}");
    }
    // Costs and views were not asked for.
    assert_eq!((&object["rows"], &object["views"]), (&Value::Null, &Value::Null));

    let flags = [&part[..], &["--workloads", "btree", "--runs", "60000"]].concat();
    let output = interrupted(&flags, Duration::from_millis(500));
    assert_eq!(output.status.code(), Some(128 + libc::SIGINT), "{}", stderr(&output));
    let refused = pageleap(&[&part[..], &["--workloads", "stream"]].concat());
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
}

#[test]
fn probes_stand_beside_sweeps() {
    let flags = ["bench", "prober", "--runs", "2", "--buffer", "4m", "--json"];
    let bin = env!("CARGO_BIN_EXE_pageleap");
    let output = Command::new(bin).args(flags).output().expect("pageleap starts");
    let error = String::from_utf8_lossy(&output.stderr);
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        assert_eq!(output.status.code(), Some(2), "{error}");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{error}");
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&object["runs"], &object["sweep_bytes"]), (&2.into(), &(64 << 20).into()));
    let rows = object["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let all = ["latency, alone", "latency, beside readers", "CPU time", "lost by a bystander"];
    assert_eq!(names, all);
    for row in &rows[..3] {
        for of in ["probe", "sweep"] {
            let value = |end: &str| row[format!("{of}_{end}")].as_i64().unwrap();
            let ordered = [value("min_ns"), value("ns"), value("max_ns")];
            assert!(ordered[0] > 0 && ordered.is_sorted(), "{row}");
        }
        assert!(row["probe_to_sweep_ratio"].as_f64().unwrap() > 0.0);
    }
    // One CPU has no bystander.
    let first = pageleap::topology::Topology::read().unwrap().allowed_cpus()[0].to_string();
    let mut bound = Command::new(bin);
    bound.args(["run", "-C", &first, bin]).args(flags);
    let output = bound.output().expect("pageleap starts");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}
