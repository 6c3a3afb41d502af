//! What `pageleap bench` measures on several nodes only. Times are never judged.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/nodes.rs"]
mod nodes;

use std::process::Command;

use nodes::several;
use serde_json::Value;

#[test]
fn the_kernel_moves_as_many_pages_as_each_short_job() {
    let Some(nodes) = several("the_kernel_moves_as_many_pages_as_each_short_job") else { return };
    let flags = ["--load", "small", "--engine", "mprotect", "--runs", "2", "--json"];
    let [from, to] = [nodes[1], nodes[0]].map(|node| node.0.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.args(["bench", "engines", "--from", &from, "--to", &to]).args(flags);
    let output = command.output().expect("pageleap starts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["kernel_missing"], Value::Array(vec![]));
    let rows = object["small"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let is_of_row = |sample: &&Value| {
            sample["way"] == "kernel" && sample["range_pages"] == row["range_pages"]
        };
        let samples = object["job_samples"].as_array().unwrap().iter().filter(is_of_row);
        let times: Vec<u64> = samples
            .map(|sample| {
                assert_eq!((&sample["engine"], &sample["lost"]), (&"kernel".into(), &0.into()));
                sample["whole_ns"].as_u64().unwrap()
            })
            .collect();
        let [least, most] = ["kernel_min_ns", "kernel_max_ns"].map(|key| row[key].as_u64());
        assert_eq!(times.len(), 2, "{row}");
        assert!(times.iter().all(|ns| *ns > 0), "{times:?}");
        assert_eq!([times.iter().min(), times.iter().max()], [least.as_ref(), most.as_ref()]);
    }
}

/// The rows of a table of the object with this scenario and policy.
fn rows<'a>(object: &'a Value, table: &str, scenario: &str, policy: &str) -> Vec<&'a Value> {
    let all = object[table].as_array().unwrap().iter();
    all.filter(|row| row["scenario"] == scenario && row["policy"] == policy).collect()
}

#[test]
fn scenarios_have_page_tables_where_the_policies_say() {
    let Some(nodes) = several("scenarios_have_page_tables_where_the_policies_say") else { return };
    let [local, remote] = [nodes[0], nodes[1]].map(|node| node.0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.args(["bench", "page-tables", "--only", "scenarios", "--workloads", "btree,gups"]);
    command.args(["--size", "8m", "--runs", "1", "--json"]);
    command.args(["--from", &local.to_string(), "--to", &remote.to_string()]);
    let output = command.output().expect("pageleap starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let setting = &object["setting"];
    assert_eq!((&setting["local_node"], &setting["remote_node"]), (&local.into(), &remote.into()));
    let (mut played, has) = (0, |load: &str| setting[load].as_u64().unwrap() > 0);
    for (scenario, begins, loads) in [
        ("LPLD", local, &[][..]),
        ("LPLDI", local, &["local_load"]),
        ("RPLDLI", remote, &["local_load"]),
        ("RPLDRI", remote, &["remote_load"]),
        ("RPLDRILI", remote, &["local_load", "remote_load"]),
    ] {
        let can_play = loads.iter().all(|load| has(&format!("{load}_threads")));
        for policy in ["off", "auto-ptm", "algorithm-1", "latency-aware", "views"] {
            let found = rows(&object, "scenarios", scenario, policy);
            assert_eq!(found.len(), if can_play { 2 } else { 0 }, "{scenario} {policy}: {errors}");
            for row in &found {
                assert!(row["per_s"].as_f64().unwrap() > 0.0, "{row}");
                for load in ["local_load", "remote_load"] {
                    let rate = row[format!("{load}_bytes_per_s")].as_f64();
                    assert_eq!(rate.is_some(), loads.contains(&load), "{row}");
                }
            }
            // Where latencies decide, the decision says where page tables are: that of the first
            // workload, GUPS.
            let decided = rows(&object, "decisions", scenario, policy);
            let to = match policy {
                "off" => begins,
                "auto-ptm" | "views" => local,
                _ => match decided.first().map(|row| row["to_node"].as_u64()) {
                    Some(Some(to)) => to as u32,
                    _ => begins,
                },
            };
            for row in found.iter().filter(|row| row["workload"] == "gups" || decided.is_empty()) {
                assert_eq!(row["table_nodes"], Value::from(vec![to]), "{row}");
            }
        }
        played += usize::from(can_play);
    }
    let notes = object["scenarios_notes"].to_string();
    assert_eq!(notes.contains("Not measured"), played < 5, "{notes}");
}

/// The result of an experiment that measures each case once, from the first node to the second.
fn smoke(experiment: &str, nodes: [u32; 2], flags: &[&str]) -> Value {
    let [from, to] = nodes.map(|node| node.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.args(["bench", experiment, "--smoke", "--json", "--from", &from, "--to", &to]);
    let output = command.args(flags).output().expect("pageleap starts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The rows of a way, each of which must have a time.
fn of_way<'a>(object: &'a Value, way: &str) -> Vec<&'a Value> {
    let rows = object["rows"].as_array().unwrap().iter();
    let rows: Vec<&Value> = rows.filter(|row| row["way"] == way).collect();
    let time = |row: &Value| row["time_ns"].as_u64().or(row["migrate_ns"].as_u64());
    assert!(rows.iter().all(|row| time(row).unwrap() > 0), "{rows:?}");
    rows
}

#[test]
fn experiments_have_the_rivals_that_need_two_nodes() {
    const TEST: &str = "experiments_have_the_rivals_that_need_two_nodes";
    let Some(nodes) = several(TEST) else { return };
    let nodes = [nodes[0].0, nodes[1].0];
    let access = smoke("access", nodes, &["--size", "4m", "--page-size", "4k"]);
    let rows = access["rows"].as_array().unwrap();
    let remote: Vec<&Value> = rows.iter().filter(|row| row["memory"] == "remote").collect();
    assert_eq!(remote.len(), 4);
    for row in remote {
        let base = &rows[row["base_row"].as_u64().unwrap() as usize];
        assert_eq!((&base["memory"], &base["pattern"]), (&"local".into(), &row["pattern"]));
    }
    let setting = "/proc/sys/kernel/numa_balancing";
    let balancing = || std::fs::read_to_string(setting).ok();
    let before = balancing();
    for (experiment, flags) in [
        ("copy", &[][..]),
        ("quiet", &["--engine", "auto", "--area", "1m"]),
        ("writes", &["--engine", "auto", "--rates", "100k", "--skewed", "none"]),
        ("sustained", &["--engine", "auto", "--rates", "100k"]),
    ] {
        let flags = [&["--size", "4m", "--page-size", "4k,thp"][..], flags].concat();
        let object = smoke(experiment, nodes, &flags);
        for way in ["one move_pages, private", "one mbind, private", "kernel, private", "auto"] {
            let rows = of_way(&object, way);
            assert_eq!(rows.len(), 2, "{experiment}, {way}: {}", object["notes"]);
            assert!(rows.iter().all(|row| row["moved_ratio"] == 1.0), "{rows:?}");
        }
        let has_load = ["writes", "sustained"].contains(&experiment);
        if has_load && before.is_some() {
            let rows = of_way(&object, "automatic balancing");
            assert_eq!(rows.len(), 2, "{}", object["notes"]);
            assert!(rows.iter().all(|row| row["moved_ratio"].is_number()), "{rows:?}");
        }
    }
    assert_eq!(balancing(), before);
    let tpch = smoke("tpch", nodes, &["--size", "2m", "--page-size", "4k"]);
    let rows = tpch["rows"].as_array().unwrap();
    for way in ["none", "auto", "kernel, private", "one move_pages, private"] {
        // Q1 and Q6, with and without writes.
        assert_eq!(rows.iter().filter(|row| row["way"] == way).count(), 4, "{}", tpch["notes"]);
    }
    let btree = smoke("btree", nodes, &["--size", "8m"]);
    let rows = btree["rows"].as_array().unwrap();
    for way in ["none, private", "one move_pages, private", "kernel retry, private"] {
        let of_way: Vec<&Value> = rows.iter().filter(|row| row["way"] == way).collect();
        // Three mixes. The call moves leaves beside and apart.
        let expected = if way.starts_with("one") { 6 } else { 3 };
        assert_eq!(of_way.len(), expected, "{}", btree["notes"]);
        for row in of_way.iter().filter(|_| !way.starts_with("none")) {
            assert!(row["pages_per_s"].as_f64().unwrap() > 0.0, "{row}");
            assert!(row["moved_ratio"].as_f64().unwrap() > 0.5, "{row}");
            assert_eq!(rows[row["base_row"].as_u64().unwrap() as usize]["way"], "none, private");
        }
    }
    assert_eq!(balancing(), before);
}
