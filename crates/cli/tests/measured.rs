//! Runs `pageleap topology --measure` as a user would. Which figures there are, and where the memory
//! lay, is checked; the figures themselves are never judged.

#[path = "common/command.rs"]
mod command;

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use command::{check_code, failure, stderr, stdout};
use serde_json::{Value, json};

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;

/// A measurement with small buffers.
fn pageleap(flags: &[&str]) -> Command {
    let mut command = command::pageleap("topology", &["--measure", "--buffer", "4m"]);
    command.args(flags);
    command
}

/// The object that a measurement prints. It reports progress on standard error.
fn measured(mut command: Command) -> Value {
    let output = command.arg("--json").output().expect("pageleap starts");
    check_code(&output, 0);
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn each_pair_of_nodes_has_its_figures() {
    let machine = measured(pageleap(&["--runs", "2"]));
    let nodes = machine["nodes"].as_array().unwrap();
    let ids = |is: &dyn Fn(&Value) -> bool| -> Vec<&Value> {
        nodes.iter().filter(|node| is(node)).map(|node| &node["id"]).collect()
    };
    let allowed = machine["allowed_cpus"].as_array().unwrap();
    let may_run =
        |node: &Value| node["cpus"].as_array().unwrap().iter().any(|cpu| allowed.contains(cpu));
    let initiators = ids(&may_run);
    let targets = ids(&|node| node["total_bytes"] != 0 && node["in_cpuset"] != false);
    let pairs = machine["measured"]["pairs"].as_array().unwrap();
    let names: Vec<_> = pairs.iter().map(|pair| (&pair["from"], &pair["to"])).collect();
    let all = initiators.iter().flat_map(|from| targets.iter().map(move |to| (*from, *to)));
    assert_eq!(names, all.collect::<Vec<_>>(), "{}", machine["measured"]["left_out"]);
    for pair in pairs {
        // The firmware's figures stand beside those of the pairs that it knows.
        let target = nodes.iter().find(|node| node["id"] == pair["to"]).unwrap();
        let access = target["access"].as_array().unwrap().iter();
        let of_pair =
            |access: &&Value| access["initiators"].as_array().unwrap().contains(&pair["from"]);
        let told: Vec<_> =
            access.filter(of_pair).map(|access| &access["read_latency_ns"]).collect();
        let shown = &pair["firmware"];
        assert_eq!(shown.is_null(), told.is_empty(), "{pair}");
        assert!(shown.is_null() || told.contains(&&shown["read_latency_ns"]), "{pair}");
        let figures = |key: &str, figure: &str| {
            let rows = pair[key].as_array().unwrap().iter();
            let ordered = |figure: &Value| {
                let value = |key: &str| figure[key].as_f64().unwrap();
                0.0 < value("min")
                    && value("min") <= value("median")
                    && value("median") <= value("max")
            };
            assert!(rows.clone().all(|row| ordered(&row[figure])), "{pair}");
            rows.len()
        };
        assert!(figures("idle", "ns") >= 2);
        assert!(figures("bandwidth", "bytes_per_s") >= 3);
        let curve = figures("loaded", "ns");
        assert_eq!(curve, figures("loaded", "bytes_per_s"));
        assert_eq!(curve == 0, pair["injectors"] == 0);
        for buffers in pair["buffers"].as_array().unwrap() {
            let from = nodes.iter().find(|node| node["id"] == pair["from"]).unwrap();
            let asked = (from["total_bytes"] != 0).then_some(&pair["from"]);
            assert_eq!(&buffers["page_tables_asked"], asked.unwrap_or(&Value::Null));
            let bytes = buffers["bytes"].as_u64().unwrap();
            assert!(bytes >= 4 << 20 && buffers["pages"].as_u64().unwrap() >= bytes >> 21);
        }
    }
}

#[test]
fn text_begins_with_matrices_and_other_users_may_measure() {
    let mut command = pageleap(&["--runs", "1"]);
    // SAFETY: geteuid has no arguments.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
    }
    let output = command.output().expect("pageleap starts");
    check_code(&output, 0);
    let text = stdout(&output);
    for part in [
        "\nLatency of a load (ns), 4k pages; random within 256 KB",
        "\nBandwidth (GB/s), read by a thread on each CPU of the row\nnode ",
        "The kernel says of each page that it lay on the node of the column.",
        "the caches of the CPUs have",
    ] {
        let no_caches = fs::metadata("/sys/devices/system/cpu/cpu0/cache/index0").is_err();
        assert!(text.contains(part) || part.contains("caches of") && no_caches, "{part}: {text}");
    }
    let progress = stderr(&output);
    assert!(progress.starts_with("row 1 of ") && progress.contains(" GB/s read\n"), "{progress}");
}

#[test]
fn one_cpu_measures_no_latency_under_load() {
    let machine = command::json(command::pageleap("topology", &["--json"]));
    let first = machine["allowed_cpus"][0].to_string();
    let bin = env!("CARGO_BIN_EXE_pageleap");
    let mut bound = command::pageleap("run", &["-C", &first, bin, "topology", "--measure"]);
    bound.args(["--buffer", "4m", "--runs", "1"]);
    let measured = measured(bound);
    let measured = &measured["measured"];
    let pairs = measured["pairs"].as_array().unwrap();
    assert!(!pairs.is_empty() && pairs.iter().all(|pair| pair["loaded"] == json!([])));
    let left_out = measured["left_out"].as_array().unwrap();
    assert!(
        left_out.iter().any(|line| line["reason"].as_str().unwrap().contains("one core")),
        "{left_out:?}"
    );
}

#[test]
fn an_interrupted_measurement_ends_at_once() {
    let mut command = pageleap(&["--runs", "65535"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It measures: a thread of a step runs. Each step takes an hour.
    let tasks = format!("/proc/{}/task", child.id());
    let measures = || {
        let threads = fs::read_dir(&tasks).unwrap().filter_map(Result::ok);
        let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm"));
        threads.filter_map(|thread| name(thread).ok()).any(|name| name.trim() == "matrix")
    };
    while !measures() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: the call takes no pointers, and the child has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    check_code(&output, 128 + libc::SIGINT);
    assert!(stderr(&output).contains("0 of "), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
}

#[test]
fn a_wrong_request_is_refused_and_memory_that_is_not_there_is_named() {
    for (flags, words) in [
        (&["--runs", "3"][..], "--measure"),
        (&["--buffer", "4m"], "--measure"),
        (&["--measure", "--sysroot", "/"], "cannot be used with"),
        (&["--measure", "--buffer", "1m"], "2m at least"),
        (&["--measure", "--runs", "0"], "--runs"),
        (&["--measure", "--nodes", "1000"], "1000"),
    ] {
        let error = failure(command::pageleap("topology", flags), 2);
        assert!(error.contains(words), "{flags:?}: {error}");
    }
    let error = failure(command::pageleap("topology", &["--measure", "--buffer", "32t"]), 1);
    assert!(error.contains("node") && error.contains("64 TiB more are needed"), "{error}");
}
