//! Runs `pageleap advise` as a user would, on this machine and on recorded ones.

#[path = "common/command.rs"]
mod command;
#[path = "../../pageleap/tests/common/tree.rs"]
mod tree;

use std::process::Command;

use command::{json, pageleap, stderr, text};
use serde_json::{Value, json};
use tree::{RECORDED, Tree};

fn advise(flags: &[&str]) -> Command {
    pageleap("advise", flags)
}

fn on(tree: &Tree, flags: &[&str]) -> Command {
    let mut command = advise(flags);
    command.arg("--sysroot").arg(tree.root());
    command
}

/// The advice on a topic.
fn topic<'a>(advised: &'a Value, name: &str) -> &'a Value {
    let all = advised["advice"].as_array().unwrap();
    all.iter().find(|one| one["topic"] == name).unwrap()
}

/// Checks that `pageleap run` accepts the options of a line with its command still to be filled in.
#[track_caller]
fn check_accepted(line: &str) {
    let options = line.strip_prefix("pageleap run ").and_then(|rest| rest.strip_suffix("COMMAND"));
    let options = options.unwrap_or_else(|| panic!("{line}")).split_whitespace();
    let words: Vec<&str> = ["--dry-run"].into_iter().chain(options).chain(["/bin/true"]).collect();
    let output = pageleap("run", &words).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{line}: {}", stderr(&output));
}

/// A recorded machine with balancing and huge pages on, as distributions have them.
fn busy(name: &str, release: &str) -> Tree {
    let tree = Tree::recorded(name);
    tree.put("proc/sys/kernel/osrelease", format!("{release}\n"));
    tree.put("proc/sys/kernel/numa_balancing", "1\n");
    tree.put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
    tree
}

#[test]
fn the_command_is_accepted_by_pageleap_run_on_this_machine() {
    for flags in [
        &["--json"][..],
        &["--json", "--threads", "2", "--shares", "yes", "--access", "random"],
        &["--json", "--allocates", "often", "--access", "sequential"],
        &["--json", "--shares", "no", "--allocates", "rarely", "--threads", "1"],
    ] {
        let advised = json(advise(flags));
        let Some(line) = advised["command"].as_str() else { continue };
        check_accepted(line);
    }
}

#[test]
fn each_recorded_machine_gets_options_that_exist() {
    for (name, _) in RECORDED {
        let tree = busy(name, "6.12.1");
        let advised = json(on(&tree, &["--json"]));
        let line = advised["command"].as_str().unwrap();
        // The nodes of that machine may not exist here, and its allocators may not be installed.
        let here = line.replace("-i 0-1", "-i all").replace(" --alloc tbbmalloc", "");
        check_accepted(&here);
    }
}

#[test]
fn machines_get_the_advice_of_their_facts() {
    let two = busy("two", "6.12.1");
    let advised = json(on(&two, &["--json"]));
    assert_eq!(
        advised["command"],
        "pageleap run --balancing off --thp off -i all --place sparse --alloc tbbmalloc COMMAND"
    );
    assert_eq!(topic(&advised, "balancing")["verdict"], "do");
    assert_eq!(advised["machine"]["distances"], json!([21, 21]));
    // Not known of another machine.
    for fact in ["allocators", "can_set_policy", "is_root"] {
        assert_eq!(advised["machine"][fact], Value::Null, "{fact}");
    }

    let one = json(on(&busy("one", "6.12.1"), &["--json"]));
    for name in ["balancing", "policy"] {
        assert_eq!(topic(&one, name)["verdict"], "means nothing here");
    }
    assert!(topic(&one, "placement")["why"].as_str().unwrap().contains("Sparse and dense mean"));

    // Two of its four nodes are in the cpuset.
    let four = json(on(&busy("four", "6.12.1"), &["--json"]));
    assert_eq!(four["machine"]["nodes_with_memory"], 4);
    assert_eq!(four["machine"]["memory_nodes"].as_array().unwrap().len(), 2);
    assert!(topic(&four, "policy")["costs"].as_str().unwrap().contains("50 %"));

    let eight = json(on(&busy("eight", "6.12.1"), &["--json"]));
    assert_eq!(eight["machine"]["distances"], json!([12, 32]));
    assert!(topic(&eight, "policy")["costs"].as_str().unwrap().contains("88 %"));

    // Its third node is slower.
    let tiers = |release: &str| json(on(&busy("tiers", release), &["--json"]));
    assert_eq!(topic(&tiers("6.12.1"), "policy")["options"], json!(["-w all"]));
    assert_eq!(topic(&tiers("6.1.0-37-amd64"), "policy")["options"], json!(["-i 0-1"]));

    // The CPUs are on a node without memory.
    let apart = json(on(&busy("apart", "6.12.1"), &["--json"]));
    assert_eq!(topic(&apart, "policy")["verdict"], "means nothing here");
}

#[test]
fn what_is_known_of_the_program_decides() {
    let two = busy("two", "6.12.1");
    let known = ["--json", "--threads", "2", "--shares", "no", "--allocates", "rarely"];
    let advised = json(on(&two, &[&known[..], &["--access", "sequential"]].concat()));
    assert_eq!(advised["command"], "pageleap run --balancing off -l --place sparse COMMAND");
    let program = json!({
        "threads": 2, "allocates_often": false, "shares_data": false, "access": "sequential",
    });
    assert_eq!(advised["program"], program);
    let conditions = advised["advice"].as_array().unwrap().iter().map(|one| &one["condition"]);
    assert!(conditions.into_iter().all(Value::is_null), "{advised}");
    let many = json(on(&two, &["--json", "--threads", "5"]));
    assert_eq!(topic(&many, "placement")["verdict"], "do not");
}

#[test]
fn the_object_has_its_keys() {
    let advised = json(advise(&["--json"]));
    let keys =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let sorted = |mut keys: Vec<String>| {
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(sorted(keys(&advised)), "advice command machine paper program running warnings");
    assert_eq!(
        sorted(keys(&advised["machine"])),
        "allocators balancing can_set_policy cores cpus distances has_weights huge_pages is_root \
         kernel memory_nodes nodes_with_cpus nodes_with_memory"
    );
    for one in advised["advice"].as_array().unwrap() {
        assert_eq!(
            sorted(keys(one)),
            "condition costs differs line options source summary topic verdict why"
        );
    }
    assert!(advised["running"].as_str().unwrap().contains("pageleap move"));
}

#[test]
fn the_text_has_the_same_and_lines_to_type_are_whole() {
    let two = busy("two", "6.12.1");
    let advised = json(on(&two, &["--json"]));
    let shown = text(on(&two, &[]));
    let command = advised["command"].as_str().unwrap();
    assert!(shown.lines().any(|line| line.trim() == command), "{shown}");
    for one in advised["advice"].as_array().unwrap() {
        if let Some(line) = one["line"].as_str() {
            assert!(shown.lines().any(|shown| shown == format!("  type        {line}")), "{shown}");
        }
        assert!(shown.contains(one["summary"].as_str().unwrap()), "{shown}");
    }
    assert!(shown.contains("Linux       6.12.1"), "{shown}");
    assert!(shown.contains("2 nodes with memory that may be used: 0-1, at distance 21"), "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= 120), "{shown}");

    let folder = std::env::temp_dir().join(format!("pageleap-advise-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (as_json, as_text) = (folder.join("a.json"), folder.join("a.txt"));
    let mut command = on(&two, &[]);
    command.arg("--export-json").arg(&as_json).arg("--export-text").arg(&as_text);
    assert_eq!(text(command), shown);
    let read = |path| std::fs::read_to_string(path).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&read(&as_json)).unwrap(), advised);
    assert_eq!(read(&as_text), shown);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn hostile_files_reach_no_terminal() {
    let tree = busy("two", "6.1\u{1b}[2J");
    let shown = text(on(&tree, &[]));
    assert!(!shown.contains('\u{1b}') && shown.contains("6.1"), "{shown}");
}

#[test]
fn requests_without_sense_are_refused() {
    let code = |flags: &[&str]| advise(flags).output().unwrap().status.code();
    assert_eq!(code(&["--threads", "0"]), Some(2));
    assert_eq!(code(&["--threads", "few"]), Some(2));
    assert_eq!(code(&["--allocates", "always"]), Some(2));
    assert_eq!(code(&["--sysroot", "/nowhere"]), Some(2));
    let empty = Tree::empty();
    assert_eq!(on(&empty, &[]).output().unwrap().status.code(), Some(1));
}
