//! Reports in a browser: whether the points in their plots are the samples that were measured, and
//! whether the page fits a phone. Screenshots go to `target/report`, to be looked at.
//!
//! With `#check` in its address a page writes the points that it has drawn into an element, read
//! back from their positions, with the row and the column of the result that each comes from.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::commands::{Workspace, output, run};
use crate::files::make_folder;
use crate::tally::Outcome;

/// The names of the browser.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Experiments whose reports are read back. Each has a short run, with little memory.
const EXPERIMENTS: [&str; 9] =
    ["access", "copy", "quiet", "writes", "overhead", "sustained", "tpch", "scale", "btree"];
/// Bytes of the memory of `scale`, which has no short run.
const SCALE: [&str; 2] = ["--size", "128m"];
/// The widths of a phone and of a desktop, with the heights of screenshots.
const SIZES: [(&str, u32, u32); 2] = [("phone", 390, 3000), ("desktop", 1280, 2400)];
/// The settings of the browser for a light and a dark page.
const COLOURS: [(&str, &str); 2] =
    [("light", "preferredColorScheme=1"), ("dark", "preferredColorScheme=0")];
/// A point may differ from its sample by this part: numbers make a way to pixels and back, and
/// samples are rounded to nanoseconds.
const EXACTNESS: f64 = 1e-3;

/// The browser, if there is one.
pub fn find() -> Option<String> {
    let starts = |name: &&str| output(version(name)).is_ok();
    NAMES.into_iter().find(starts).map(str::to_owned)
}

fn version(name: &str) -> Command {
    let mut command = Command::new(name);
    command.arg("--version");
    command
}

/// Makes reports, reads their plots back, and takes screenshots.
pub fn test(workspace: &Workspace, browser: &str) -> Result<Outcome> {
    let folder = workspace.target.join("report");
    make_folder(&folder)?;
    let browser = Browser { name: browser.to_owned(), profile: folder.join("profile") };
    run(workspace.cargo(&["build", "-p", "pageleap-cli"]))?;
    let command = workspace.target.join("debug/pageleap");
    let mut outcome = Outcome::default();
    for name in EXPERIMENTS {
        let mut arguments = vec!["bench", name, "--page-size", "4k", "--smoke"];
        arguments.extend(if name == "scale" { &SCALE[..] } else { &[] });
        let files = Files::make(&command, &folder, name, &arguments);
        let checked = files.and_then(|files| check_experiment(&browser, &files));
        outcome.add(&format!("the plots of {name} show its samples"), checked.map(|()| None));
    }
    let demo = ["demo", "--scale-factor", "0.1"];
    let files = Files::make(&command, &folder, "demo", &demo);
    let checked = files.and_then(|files| check_timeline(&browser, &files));
    outcome.add("the timeline of the demo shows its looks", checked.map(|()| None));
    for name in ["quiet", "demo"] {
        let page = folder.join(format!("{name}.html"));
        outcome.add(&format!("screenshots of {name}"), browser.shoot(&page).map(|()| None));
    }
    Ok(outcome)
}

/// A report, and the same result as data.
struct Files {
    page: PathBuf,
    result: Value,
}

impl Files {
    fn make(command: &Path, folder: &Path, name: &str, arguments: &[&str]) -> Result<Files> {
        let [page, data] = ["html", "json"].map(|end| folder.join(format!("{name}.{end}")));
        let mut made = Command::new(command);
        made.args(arguments).arg("--report").arg(&page).arg("--export-json").arg(&data);
        output(made)?;
        let text = std::fs::read_to_string(&data).with_context(|| data.display().to_string())?;
        Ok(Files { page, result: serde_json::from_str(&text)? })
    }
}

struct Browser {
    name: String,
    profile: PathBuf,
}

impl Browser {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.name);
        // Its sandbox refuses root. The pages are ours, and load nothing.
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        command.arg(format!("--user-data-dir={}", self.profile.display()));
        command
    }

    /// The points that the page has drawn, its width, and the room that it has.
    fn drawn(&self, page: &Path) -> Result<Value> {
        let mut command = self.command();
        // As narrow as the browser makes it, so that the style of phones holds.
        let (_, width, height) = SIZES[0];
        command.arg(format!("--window-size={width},{height}"));
        command.args(["--dump-dom", "--virtual-time-budget=5000"]);
        command.arg(format!("file://{}#check", page.display()));
        let text = output(command)?;
        let begin = "<pre id=\"check\">";
        let at = text.find(begin).context("the script of the page has failed")? + begin.len();
        let end = text[at..].find("</pre>").context("the element has no end")?;
        Ok(serde_json::from_str(&text[at..at + end].replace("&amp;", "&"))?)
    }

    /// Takes a screenshot for each size and colour.
    fn shoot(&self, page: &Path) -> Result<()> {
        for (size, width, height) in SIZES {
            for (colour, setting) in COLOURS {
                let file = page.with_extension(format!("{size}-{colour}.png"));
                let mut command = self.command();
                command.arg(format!("--window-size={width},{height}"));
                command.arg(format!("--blink-settings={setting}"));
                command.arg(format!("--screenshot={}", file.display()));
                command.arg(format!("file://{}", page.display()));
                output(command)?;
                ensure!(file.exists(), "{} was not written", file.display());
                println!("{}", file.display());
            }
        }
        Ok(())
    }
}

/// Compares all points of an experiment's plots with its samples.
fn check_experiment(browser: &Browser, files: &Files) -> Result<()> {
    let drawn = browser.drawn(&files.page)?;
    check_page(&drawn)?;
    let (mut points, mut samples) = (0, 0);
    for point in points_of(&drawn["drawn"]) {
        let (Some(row), Some(column)) = (point["from"][0].as_u64(), point["from"][1].as_str())
        else {
            continue;
        };
        let middle = files.result["rows"][row as usize][column].as_f64();
        let middle = middle.with_context(|| format!("row {row} has no {column}"))?;
        ensure!(is_close(&point["y"], middle), "row {row}, {column}: {point} is not {middle}");
        let all = point["samples"].as_array().context("a point without samples")?;
        if !all.is_empty() {
            let expected = samples_of(&files.result, row, column);
            let same = all.len() == expected.len()
                && all.iter().zip(&expected).all(|(one, other)| is_close(one, *other));
            ensure!(same, "row {row}, {column}: {point} is not of {expected:?}");
        }
        points += 1;
        samples += all.len();
    }
    println!("{}: {points} points, {samples} samples", files.page.display());
    ensure!(points > 0 && samples > 0, "no plot has points");
    Ok(())
}

/// The samples of a row that a point in this column stands for.
fn samples_of(result: &Value, row: u64, column: &str) -> Vec<f64> {
    let of_row = |row: u64, key: &str| -> Vec<f64> {
        let all = result["samples"].as_array().into_iter().flatten();
        let own = all.filter(|sample| sample["row"] == row);
        own.map(|sample| sample[key].as_f64().unwrap_or(f64::NAN)).collect()
    };
    let line = &result["rows"][row as usize];
    let counting = ["time_ns", "kept_ratio", "fifth_ns", "query_ns"];
    let counts = counting.into_iter().find(|key| line[*key].is_number()).unwrap_or_default();
    let times = |row: &Value| row.as_u64().map(|row| of_row(row, counts)).unwrap_or_default();
    let all: Vec<f64> = match column {
        "ratio" => {
            let pairs = of_row(row, counts).into_iter().zip(times(&line["base_row"]));
            pairs.map(|(own, base)| own / base).collect()
        }
        "beyond_memcpy_ratio" => {
            let base = times(&line["at_rest_row"]);
            let copied = of_row(row, "copied_ratio").into_iter().zip(base);
            let pairs = of_row(row, counts).into_iter().zip(copied);
            pairs.map(|(own, (copied, base))| own / (copied * base) - 1.0).collect()
        }
        key => of_row(row, key),
    };
    all.into_iter().filter(|sample| sample.is_finite()).collect()
}

/// Compares the points of the timeline's last plot with the looks.
fn check_timeline(browser: &Browser, files: &Files) -> Result<()> {
    let drawn = browser.drawn(&files.page)?;
    check_page(&drawn)?;
    let plots = drawn["drawn"].as_array().context("no plots")?;
    ensure!(plots.len() == 2, "{} plots", plots.len());
    let points = plots[1][0].as_array().context("no points")?;
    let looks = files.result["timeline"].as_array().context("no timeline")?;
    let bytes = files.result["bytes"].as_f64().context("no bytes")?;
    ensure!(points.len() == looks.len(), "{} points of {} looks", points.len(), looks.len());
    for (point, look) in points.iter().zip(looks) {
        let at = look["at_ns"].as_f64().context("a look without a time")?;
        let moved = look["moved_bytes"].as_f64().context("a look without bytes")? / bytes;
        ensure!(is_close(&point["x"], at) && is_close(&point["y"], moved), "{point}: {look}");
    }
    println!("{}: {} points", files.page.display(), points.len());
    Ok(())
}

/// The page fits a phone, and an arrow key has a number read aloud.
fn check_page(drawn: &Value) -> Result<()> {
    let spoken = drawn["spoken"].as_str().unwrap_or_default();
    let is_number = |text: &str| text.contains(|character: char| character.is_ascii_digit());
    ensure!(is_number(spoken), "an arrow key has {spoken:?} read aloud");
    let [wide, room] = ["wide", "room"].map(|key| drawn[key].as_f64());
    ensure!(wide.is_some() && wide <= room, "the page is {wide:?} pixels wide, and has {room:?}");
    Ok(())
}

/// The points of all lines of all plots.
fn points_of(drawn: &Value) -> Vec<&Value> {
    let inner = |value: &'_ Value| value.as_array().map(Vec::as_slice).unwrap_or_default().len();
    let mut all = Vec::new();
    for plot in 0..inner(drawn) {
        for line in 0..inner(&drawn[plot]) {
            for point in 0..inner(&drawn[plot][line]) {
                all.push(&drawn[plot][line][point]);
            }
        }
    }
    all
}

fn is_close(drawn: &Value, expected: f64) -> bool {
    drawn
        .as_f64()
        .is_some_and(|drawn| (drawn - expected).abs() <= EXACTNESS * expected.abs().max(EXACTNESS))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ratios_are_formed_from_samples_of_one_round() {
        let result = json!({
            "rows": [
                {"time_ns": 10, "base_row": null},
                {"time_ns": 20, "base_row": 0, "at_rest_row": 0},
            ],
            "samples": [
                {"row": 0, "round": 0, "place": 0, "time_ns": 10},
                {"row": 1, "round": 0, "place": 1, "time_ns": 15, "copied_ratio": 1.0},
                {"row": 0, "round": 1, "place": 1, "time_ns": 20},
                {"row": 1, "round": 1, "place": 0, "time_ns": 40, "copied_ratio": 2.0},
            ],
        });
        assert_eq!(samples_of(&result, 1, "time_ns"), [15.0, 40.0]);
        assert_eq!(samples_of(&result, 1, "ratio"), [1.5, 2.0]);
        assert_eq!(samples_of(&result, 1, "beyond_memcpy_ratio"), [0.5, 0.0]);
        assert!(is_close(&json!(1.0005), 1.0) && !is_close(&json!(1.01), 1.0));
        assert!(is_close(&json!(0.0), 0.0) && !is_close(&Value::Null, 0.0));
    }
}
