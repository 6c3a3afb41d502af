//! What `pageleap bench engines` measures on several nodes only. Times are never judged.

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
