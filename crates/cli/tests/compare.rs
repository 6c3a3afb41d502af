//! Compares results of `pageleap bench` as a user would: files of a real run, and the same files
//! with numbers that were changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn bench(flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.arg("bench").args(flags).output().expect("pageleap starts")
}

fn compare(first: &str, second: &str, flags: &[&str]) -> Output {
    bench(&[&["compare", first, second], flags].concat())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder with the result of a small run.
struct Folder(tempfile::TempDir);

impl Folder {
    fn measured() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.measure("before");
        folder
    }

    /// Measures to a file, and returns its path.
    fn measure(&self, name: &str) -> String {
        let file = text(&self.file(name)).to_owned();
        let flags = ["copy", "--size", "16m", "--page-size", "4k", "--runs", "12", "--warmup", "0"];
        let output = bench(&[&flags[..], &["--export-json", &file]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        file
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.json"))
    }

    /// Writes the result with a change to a further file.
    fn changed(&self, name: &str, change: impl Fn(&mut Value)) -> String {
        let mut json = serde_json::from_slice(&fs::read(self.file("before")).unwrap()).unwrap();
        change(&mut json);
        fs::write(self.file(name), json.to_string()).unwrap();
        text(&self.file(name)).to_owned()
    }
}

/// The number of the row of the leap.
fn leap(json: &Value) -> u64 {
    let rows = json["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["way"] == "auto");
    row.expect("a leap was measured")["row"].as_u64().unwrap()
}

/// Multiplies the times of the leap by a factor.
fn slow_down(json: &mut Value, factor: f64) {
    let row = leap(json);
    for sample in json["samples"].as_array_mut().unwrap() {
        if sample["row"] == row {
            sample["time_ns"] = ((sample["time_ns"].as_f64().unwrap() * factor) as u64).into();
        }
    }
}

#[test]
fn a_run_is_unchanged_beside_itself_and_a_slower_leap_is_told() {
    let folder = Folder::measured();
    let before = text(&folder.file("before")).to_owned();
    let same = compare(&before, &before, &["--fail-if-slower", "--json"]);
    assert_eq!(same.status.code(), Some(0), "{}", stderr(&same));
    let same: Value = serde_json::from_slice(&same.stdout).unwrap();
    let rows = same["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["labels"]["way"] == "auto"), "{rows:?}");
    for row in rows {
        assert_eq!((&row["verdict"], &row["values"]), (&"unchanged".into(), &6.into()));
        assert_eq!(row["change_ratio"], 0.0);
    }
    assert!(!same["bases"].as_array().unwrap().is_empty());

    // Six runs of each side that differ by a little: each change beyond 1 % is seen.
    let six = |name: &str, factor: f64| {
        let file = |nth: u32| {
            let jitter = 1.0 + 0.0005 * f64::from(nth % 3);
            folder.changed(&format!("{name}{nth}"), |json| {
                json["noise"]["nth"] = nth.into();
                slow_down(json, factor * jitter);
            })
        };
        (0..6).map(file).collect::<Vec<_>>().join(",")
    };
    let (before, slower) = (six("before", 1.0), six("slower", 1.05));
    let told = compare(&before, &slower, &["--json"]);
    assert_eq!(told.status.code(), Some(0), "{}", stderr(&told));
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    for row in told["rows"].as_array().unwrap() {
        let is_leap = row["labels"]["way"] == "auto";
        assert_eq!(row["verdict"], if is_leap { "slower" } else { "unchanged" }, "{row}");
    }
    let failed = compare(&before, &slower, &["--fail-if-slower"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(stderr(&failed).contains("slower: copy, pages of 4k, auto"), "{}", stderr(&failed));
    let margin = compare(&before, &slower, &["--fail-if-slower", "--margin", "6"]);
    assert_eq!(margin.status.code(), Some(0), "{}", stderr(&margin));

    let twice = compare(&format!("{before},{before}"), &slower, &[]);
    assert_eq!(twice.status.code(), Some(2));
    assert!(stderr(&twice).contains("both are the same run"), "{}", stderr(&twice));
}

#[test]
fn two_runs_of_one_program_are_compared() {
    let folder = Folder::measured();
    let (before, after) = (text(&folder.file("before")).to_owned(), folder.measure("after"));
    let output = compare(&before, &after, &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["left_out"].as_array().unwrap().len(), 0, "{}", json["left_out"]);
    let is_leap = |row: &Value| row["labels"]["way"] == "auto";
    assert!(json["rows"].as_array().unwrap().iter().any(is_leap));
}

#[test]
fn a_row_that_is_missing_is_no_success() {
    let folder = Folder::measured();
    let before = text(&folder.file("before")).to_owned();
    let other = folder.changed("other", |json| {
        let row = leap(json) as usize;
        json["rows"][row]["way"] = "another".into();
    });
    let output = compare(&before, &other, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("Rows that were not compared"), "{said}");
    let failed = compare(&before, &other, &["--fail-if-slower"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(stderr(&failed).contains("the second side does not have it"), "{}", stderr(&failed));
}

#[test]
fn files_that_cannot_be_compared_are_refused_with_the_reason() {
    let folder = Folder(tempfile::tempdir().unwrap());
    let file = text(&folder.file("other")).to_owned();
    let refused = |contents: &str| {
        fs::write(&file, contents).unwrap();
        let output = compare(&file, &file, &[]);
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert!(said.contains(&file), "{said}");
        said
    };
    assert!(refused("nothing").contains("it is no JSON"));
    assert!(refused(r#"{"engines": []}"#).contains("it has no experiment"));
    let unknown = refused(r#"{"experiment": "tomorrow", "rows": [], "samples": []}"#);
    assert!(unknown.contains("`tomorrow`, which this version does not know"), "{unknown}");
    let old = r#"{"experiment": "copy", "rows": [{"row": 0, "way": "auto", "area_bytes": null,
                  "threads": null}], "samples": []}"#;
    assert!(refused(old).contains("row 0 has no `base_rows`"));
    assert!(refused(r#"{"experiment": "copy", "samples": []}"#).contains("no `rows`"));
    assert!(refused(r#"{"experiments": []}"#).contains("no row can be compared"));
    let missing = compare("no-such-file.json", &file, &[]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("no-such-file.json"), "{}", stderr(&missing));
}
