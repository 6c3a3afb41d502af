//! Runs commands with `--export-json FILE` and `--export-text FILE` as a user would.

mod common;
#[path = "../../pageleap/tests/common/tree.rs"]
mod tree;

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use common::interrupted_when;
use serde_json::Value;
use tree::Tree;

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;
/// A benchmark with one row.
const BENCH: [&str; 10] = [
    "bench",
    "engines",
    "--size=1m",
    "--runs=1",
    "--page-size=4k",
    "--load=quiet",
    "--engine",
    "mprotect",
    "--seed",
    "1",
];

fn pageleap(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.args(arguments);
    command
}

/// Shows a recorded machine, which looks the same in each run.
fn topology(machine: &Tree, arguments: &[&str]) -> Command {
    let mut command = pageleap(&["topology"]);
    command.arg("--sysroot").arg(machine.root()).args(arguments);
    command
}

fn run(mut command: Command) -> Output {
    command.output().expect("pageleap starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The standard output of a run that must succeed.
fn text(command: Command) -> String {
    let output = run(command);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// A folder for results.
struct Folder(Tree);

impl Folder {
    fn new() -> Folder {
        Folder(Tree::empty())
    }

    fn path(&self) -> PathBuf {
        self.0.root()
    }

    /// The path of a file in the folder.
    fn at(&self, name: &str) -> String {
        self.path().join(name).into_os_string().into_string().unwrap()
    }

    fn read(&self, name: &str) -> String {
        read(&self.path().join(name))
    }
}

#[test]
fn several_files_get_the_result_beside_standard_output() {
    let (machine, folder) = (Tree::recorded("tiers"), Folder::new());
    let shown = text(topology(&machine, &[]));
    let object = text(topology(&machine, &["--json"]));
    let [first, second, third] = ["first.json", "second.json", "third.txt"].map(|n| folder.at(n));
    let exports = ["--export-json", &first, "--export-text", &third, "--export-json", &second];
    for (printed, flags) in [(&shown, &[][..]), (&object, &["--json"])] {
        assert_eq!(&text(topology(&machine, &[&exports[..], flags].concat())), printed);
        assert_eq!(names(&folder.path()), ["first.json", "second.json", "third.txt"]);
        assert_eq!(folder.read("first.json"), object);
        assert_eq!(folder.read("second.json"), object);
        assert_eq!(folder.read("third.txt"), shown);
        fs::remove_file(&first).unwrap();
        // A longer file is replaced whole.
        fs::write(&second, "x".repeat(2 * object.len())).unwrap();
    }
}

#[test]
fn each_command_writes_what_it_prints() {
    let folder = Folder::new();
    let machine = Tree::recorded("one");
    let root = machine.root().into_os_string().into_string().unwrap();
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let process = other.id().to_string();
    // The doctor finds no leap possible where it may try none: exit code 1, with a result.
    for arguments in [
        &["doctor", "--sysroot", &root][..],
        &["status", &process],
        &["move", &process, "--to", "all"],
        &["move", &process, "--to", "all", "--dry-run"],
        &BENCH,
    ] {
        for (name, flag, format) in
            [("object", "--export-json", &["--json"][..]), ("text", "--export-text", &[])]
        {
            let path = folder.at(name);
            let output = run(pageleap(&[arguments, &[flag, &path], format].concat()));
            assert!(!output.stdout.is_empty(), "{arguments:?}: {}", stderr(&output));
            assert_eq!(folder.read(name), String::from_utf8_lossy(&output.stdout), "{arguments:?}");
            assert!(!stderr(&output).contains("--export"), "{}", stderr(&output));
        }
        serde_json::from_str::<Value>(&folder.read("object")).unwrap();
    }
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn an_experiment_writes_its_samples_and_a_page() {
    let folder = Folder::new();
    let [samples, first, second] = ["samples.csv", "one.html", "two.html"].map(|n| folder.at(n));
    let flags = ["--export-csv", &samples, "--report", &first, "--report", &second, "--json"];
    let quiet = ["bench", "quiet", "--size=4m", "--page-size=4k", "--runs=2", "--warmup=0"];
    let engines = ["--engine", "auto,mprotect", "--area", "64k,1m"];
    let object = text(pageleap(&[&quiet[..], &engines, &flags].concat()));
    let object: Value = serde_json::from_str(&object).unwrap();
    let page = folder.read("one.html");
    assert_eq!(folder.read("two.html"), page);
    // The page has the same result.
    assert_eq!(script(&page, "result"), object);
    let mut reader = csv::Reader::from_path(&samples).unwrap();
    let heads = reader.headers().unwrap().clone();
    let at = |key: &str| heads.iter().position(|head| head == key).unwrap();
    let lines: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let expected = object["samples"].as_array().unwrap();
    assert_eq!(lines.len(), expected.len());
    for (line, sample) in lines.iter().zip(expected) {
        assert_eq!(&line[at("experiment")], "quiet");
        let row = &object["rows"][sample["row"].as_u64().unwrap() as usize];
        for (key, value) in ["part", "way", "area_bytes", "threads"].map(|key| (key, &row[key])) {
            assert_eq!(line[at(key)], plain(value), "{key}");
        }
        for (key, value) in sample.as_object().unwrap() {
            assert_eq!(line[at(key)], plain(value), "{key}");
        }
    }
    check_plots(&page, &object);
}

/// A value of JSON as CSV has it.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        // Whole numbers have no decimals.
        other => other.as_f64().unwrap().to_string(),
    }
}

/// The JSON in a script element of a page.
fn script(page: &str, id: &str) -> Value {
    let begin = format!("<script type=\"application/json\" id=\"{id}\">");
    let text = &page[page.find(&begin).unwrap() + begin.len()..];
    serde_json::from_str(&text[..text.find("</script>").unwrap()]).unwrap()
}

/// Checks that each row that people see has its point, with all samples.
fn check_plots(page: &str, object: &Value) {
    let plots = script(page, "plots");
    let [times, ratios] = [0, 1].map(|plot| plots[plot]["lines"].as_array().unwrap());
    let points = times.iter().flat_map(|line| line["points"].as_array().unwrap());
    let mut rows = 0;
    for point in points {
        let row = &point["from"][0];
        let of_row = |sample: &&Value| sample["row"] == *row;
        let samples = object["samples"].as_array().unwrap().iter().filter(of_row);
        let samples: Vec<f64> = samples.map(|of| of["time_ns"].as_f64().unwrap()).collect();
        let drawn = point["samples"].as_array().unwrap();
        assert_eq!(drawn.len(), samples.len());
        for (one, other) in drawn.iter().zip(&samples) {
            // Nanoseconds are whole in samples.
            assert!((one.as_f64().unwrap() - other).abs() <= 0.5, "{point}");
        }
        rows += 1;
    }
    // The fastest copy, `auto`, `mprotect` by default and with two sizes, and ways that depend on
    // the machine.
    assert!(rows >= 5, "{rows}");
    let theirs = |line: &&Value| line["theirs"] == true;
    assert_eq!(times.iter().filter(theirs).count(), 0);
    let published: Vec<&Value> = ratios.iter().filter(theirs).collect();
    assert_eq!(published.len(), 1);
    assert!(published[0]["name"].as_str().unwrap().contains("their machine"));
    assert_eq!(published[0]["points"][0]["y"], 1.82);
}

#[test]
fn a_demo_writes_a_page_with_its_timeline() {
    let folder = Folder::new();
    let page = folder.at("demo.html");
    let demo = ["demo", "--scale-factor", "0.001", "--json", "--report", &page];
    let object: Value = serde_json::from_str(&text(pageleap(&demo))).unwrap();
    let plots = script(&folder.read("demo.html"), "plots");
    let plots = plots.as_array().unwrap();
    assert_eq!(plots.len(), 2);
    let looks = object["timeline"].as_array().unwrap();
    assert!(looks.len() > 1, "{}", looks.len());
    let bytes = object["bytes"].as_f64().unwrap();
    let moved = plots[1]["lines"][0]["points"].as_array().unwrap();
    assert_eq!(moved.len(), looks.len());
    for (point, look) in moved.iter().zip(looks) {
        assert_eq!(point["x"], look["at_ns"].as_f64().unwrap());
        assert_eq!(point["y"], look["moved_bytes"].as_f64().unwrap() / bytes);
    }
    assert_eq!(moved.last().unwrap()["y"], 1.0);
    let names: Vec<&Value> =
        plots[0]["spans"].as_array().unwrap().iter().map(|span| &span["name"]).collect();
    // Both may be too short for a look.
    assert!(names.iter().all(|name| *name == "memcpy" || *name == "leap"), "{names:?}");
}

#[test]
fn a_demo_writes_both_formats() {
    let folder = Folder::new();
    let [object, shown] = ["object", "text"].map(|name| folder.at(name));
    let exports = ["--export-json", &object, "--export-text", &shown];
    let demo = ["demo", "--scale-factor", "0.001", "--json"];
    let printed = text(pageleap(&[&demo[..], &exports].concat()));
    assert_eq!(folder.read("object"), printed);
    assert!(folder.read("text").contains("every write present"), "{}", folder.read("text"));
}

#[test]
fn one_look_has_text_for_a_file_and_json_for_standard_output() {
    let folder = Folder::new();
    let path = folder.at("text");
    let object = text(pageleap(&["status", "self", "--json", "--export-text", &path]));
    let object: Value = serde_json::from_str(&object).unwrap();
    let pid = object["processes"][0]["pid"].as_u64().unwrap();
    let shown = folder.read("text");
    assert!(shown.starts_with(&format!("pageleap (process {pid})\n")), "{shown}");
    // The table of the largest mappings is for text only.
    assert!(shown.contains("[stack]"), "{shown}");
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = Folder::new();
    fs::write(folder.at("old"), "old").unwrap();
    fs::create_dir(folder.at("inner")).unwrap();
    symlink(folder.at("none"), folder.at("link")).unwrap();
    let inner = fs::canonicalize(folder.at("inner")).unwrap().join("twice");
    let twice = [folder.at("inner/twice"), folder.at("inner/../inner/twice")];
    for (paths, why, remedy) in [
        (&[folder.at("none/x")][..], "there is no folder", "make it (mkdir -p)"),
        (&[folder.at("inner")], "it is a folder", "name a file in it"),
        (&[folder.at("new/")], "it is the name of a folder", "name a file"),
        (&[folder.at("old/x")], "a part of it is a file", "name another file"),
        (&[folder.at("link")], "a link to a file that does not exist", "name that file"),
        (&[folder.at(&"x".repeat(300))], "File name too long", "name another file"),
        (&["/proc/x".to_owned()], "no file can be made in /proc", "name another file"),
        (&twice, "another result goes to the same file", "name another one"),
        (&["-".to_owned()], "standard output has the result anyway", "--json"),
    ] {
        let exports: Vec<&str> = paths.iter().flat_map(|path| ["--export-json", path]).collect();
        let output = run(pageleap(&[&BENCH[..], &exports].concat()));
        let said = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{paths:?}: {said}");
        let path = paths.last().unwrap();
        for part in [why, remedy, "--export-json", path] {
            assert!(said.contains(part), "{part}: {said}");
        }
        // No row was measured, and clap alone has more than one line.
        assert!(!said.contains("row ") && (path == "-" || said.lines().count() == 1), "{said}");
    }
    assert!(!inner.exists());
    assert_eq!(names(&folder.path()), ["inner", "link", "old"]);
    assert_eq!(folder.read("old"), "old");
    let watched = run(pageleap(&["status", "self", "--watch", "--export-json", &folder.at("x")]));
    assert_eq!(watched.status.code(), Some(2));
    assert!(stderr(&watched).contains("cannot be used with"), "{}", stderr(&watched));
}

/// As a user who is not root.
fn as_nobody(mut command: Command) -> Command {
    // SAFETY: the call takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

#[test]
fn what_a_user_may_not_write_is_refused_and_what_he_may_is_written() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let object = text(topology(&machine, &["--json"]));
    for (name, mode) in [("shut", 0o444), ("open", 0o666)] {
        fs::write(folder.at(name), "x".repeat(2 * object.len())).unwrap();
        fs::set_permissions(folder.at(name), Permissions::from_mode(mode)).unwrap();
    }
    let permit = |mode| fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
    permit(0o555);
    let export = |name: &str| {
        let path = folder.at(name);
        run(as_nobody(topology(&machine, &["--export-json", &path])))
    };
    let outputs = ["shut", "new", "open"].map(export);
    permit(0o755);
    for output in &outputs[..2] {
        let said = stderr(output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
        assert!(said.contains("permission denied; name a file that you may write"), "{said}");
    }
    // No other file can take its place, so it is emptied.
    assert_eq!(outputs[2].status.code(), Some(0), "{}", stderr(&outputs[2]));
    assert_eq!(folder.read("open"), object);
    assert_eq!(names(&folder.path()), ["open", "shut"]);
    assert_eq!(folder.read("shut"), "x".repeat(2 * object.len()));
}

#[test]
fn a_run_without_a_result_leaves_the_file() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let (old, new) = (folder.at("old"), folder.at("new"));
    fs::write(&old, "old").unwrap();
    let exports = ["--export-json", &old, "--export-json", &new];
    let missing = run(topology(&machine, &[&exports[..], &["--nodes", "77"]].concat()));
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
    assert_eq!((folder.read("old").as_str(), names(&folder.path())), ("old", vec!["old".into()]));
}

#[test]
fn a_disk_that_is_full_at_the_end_leaves_the_file_and_the_printed_result() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let shown = text(topology(&machine, &[]));
    let old = folder.at("old");
    fs::write(&old, "old").unwrap();
    let mut command = topology(&machine, &["--export-json", &old]);
    // A file of 16 bytes is as large as files may be.
    let limited = || {
        let limit = libc::rlimit { rlim_cur: 16, rlim_max: 16 };
        // SAFETY: the calls read one structure, and set no handler.
        match unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::setrlimit(libc::RLIMIT_FSIZE, &limit)
        } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: `limited` makes system calls only.
    unsafe { command.pre_exec(limited) };
    let output = run(command);
    let said = stderr(&output);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&format!("--export-json {old}: the result was not written: ")), "{said}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), shown);
    assert_eq!((folder.read("old").as_str(), names(&folder.path())), ("old", vec!["old".into()]));

    // One file that cannot be written keeps no other one from being written.
    let (good, full) = (folder.at("good"), "/dev/full");
    let output = run(topology(&machine, &["--export-json", full, "--export-text", &good]));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("--export-json /dev/full: ") && said.contains("No space left"), "{said}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), shown);
    assert_eq!(folder.read("good"), shown);
}

#[test]
fn a_reader_who_has_gone_does_not_keep_the_file_from_being_written() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let shown = text(topology(&machine, &[]));
    let mut command = topology(&machine, &["--export-text", &folder.at("text")]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(writer);
    let output = run(command);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("standard output: "), "{}", stderr(&output));
    assert_eq!(folder.read("text"), shown);
}

#[test]
fn a_replaced_file_keeps_its_mode_and_the_links_to_it() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let object = text(topology(&machine, &["--json"]));
    fs::create_dir(folder.at("inner")).unwrap();
    fs::write(folder.at("inner/old"), "old").unwrap();
    fs::set_permissions(folder.at("inner/old"), Permissions::from_mode(0o640)).unwrap();
    symlink("inner/old", folder.at("link")).unwrap();
    text(topology(&machine, &["--export-json", &folder.at("link")]));
    assert_eq!(fs::read_link(folder.at("link")).unwrap(), Path::new("inner/old"));
    assert_eq!(folder.read("inner/old"), object);
    let mode = fs::metadata(folder.at("inner/old")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    // A name without a folder is one of the working directory.
    let mut command = topology(&machine, &["--export-json", "here"]);
    command.current_dir(folder.path());
    text(command);
    assert_eq!(folder.read("here"), object);
}

#[test]
fn pipes_and_standard_output_get_the_result() {
    let (machine, folder) = (Tree::recorded("two"), Folder::new());
    let (shown, object) = (text(topology(&machine, &[])), text(topology(&machine, &["--json"])));
    let pipe = folder.at("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || {
            let mut got = String::new();
            File::open(pipe).unwrap().read_to_string(&mut got).unwrap();
            got
        }
    });
    assert_eq!(text(topology(&machine, &["--export-json", &pipe])), shown);
    assert_eq!(reader.join().unwrap(), object);
    assert_eq!(names(&folder.path()), ["pipe"]);

    // A pipe here, and a file there: nothing printed is lost.
    let both = format!("{shown}{object}");
    assert_eq!(text(topology(&machine, &["--export-json", "/dev/stdout"])), both);
    let path = folder.at("printed");
    for name in ["/dev/stdout", &path] {
        let mut command = topology(&machine, &["--export-json", name]);
        command.stdout(File::create(&path).unwrap());
        text(command);
        assert_eq!(folder.read("printed"), both, "{name}");
    }
}

/// Waits until the command has said something on standard error.
fn has_said_something(child: &Child) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let stderr = child.stderr.as_ref().unwrap().as_raw_fd();
    let mut bytes: libc::c_int = 0;
    while bytes == 0 {
        assert!(Instant::now() < deadline, "it says nothing");
        std::thread::sleep(Duration::from_millis(5));
        // SAFETY: the call writes one number.
        assert_eq!(unsafe { libc::ioctl(stderr, libc::FIONREAD, &mut bytes) }, 0);
    }
}

#[test]
fn an_interrupted_benchmark_writes_the_rows_that_are_complete() {
    let folder = Folder::new();
    let path = folder.at("rows.json");
    // The row of `uniform` takes 50 ms a run: ten seconds more than that of `quiet`.
    let arguments = [
        "bench",
        "engines",
        "--size=1m",
        "--runs=200",
        "--page-size=4k",
        "--load=quiet,uniform",
        "--engine=mprotect",
        "--export-json",
        &path,
    ];
    let output = interrupted_when(&arguments, has_said_something);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted: 1 rows were measured; "), "{said}");
    let object: Value = serde_json::from_str(&read(Path::new(&path))).unwrap();
    let rows = object["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[0]["load"]), (1, &"quiet".into()), "{object}");
}
