//! The test of a comparison on recorded noise: runs of one program on one machine, resampled.
//!
//! The recordings are of `bench quiet --size 64m --page-size 4k,thp --area 512k,16m --runs 60` on a
//! virtual machine with two CPUs and one node, some minutes apart. Other tasks ran on it now and
//! then; two further recordings are left out, because compilers ran all the time. The same row
//! differs by 3 % to 9 % (standard deviation) between them.

use super::recorded::{Experiment, Row};
use super::*;
use crate::experiments::sustained;
use crate::export::Format;
use crate::random::SplitMix64;

const RUNS: [&str; 4] = [
    include_str!("recorded_noise/1.txt"),
    include_str!("recorded_noise/2.txt"),
    include_str!("recorded_noise/3.txt"),
    include_str!("recorded_noise/4.txt"),
];
/// Rounds of a run that is drawn: some twenty seconds of a recording of 60 rounds.
const ROUNDS: usize = 20;
/// Runs of a side.
const SIDE: usize = 72;

fn recordings() -> Vec<Recorded> {
    RUNS.map(recording).into()
}

/// A recording: a line for each row, with its times in microseconds, round by round.
fn recording(text: &str) -> Recorded {
    let mut rows: Vec<Row> = Vec::new();
    for line in text.lines() {
        let [part, way, area, times] = line.split(';').collect::<Vec<_>>().try_into().unwrap();
        rows.push(Row {
            part: format!("pages of {part}"),
            labels: vec![("way", way.into()), ("area_bytes", area.parse::<u64>().ok().into())],
            bases: Vec::new(),
            logs: times.split(' ').map(|time| time.parse().ok().map(f64::ln)).collect(),
            lost: 0,
            moved: Some(1.0),
        });
    }
    let is_copy = |row: &Row| row.name().starts_with("memcpy") || row.name().starts_with("copy");
    let parts: Vec<String> = rows.iter().map(|row| row.part.clone()).collect();
    let copies: Vec<usize> = (0..rows.len()).filter(|at| is_copy(&rows[*at])).collect();
    for (row, part) in rows.iter_mut().zip(&parts) {
        row.bases = copies.iter().copied().filter(|at| parts[*at] == *part).collect();
    }
    report(rows)
}

fn report(rows: Vec<Row>) -> Recorded {
    let experiment = Experiment {
        name: "quiet".to_owned(),
        more_is_better: false,
        unit: Unit::Ns,
        setting: Map::new(),
        rows,
    };
    Recorded::of(vec![experiment])
}

/// A run of rounds that follow each other in one recording. All rows are of the same time, so that
/// a drift meets all of them. Runs of different recordings differ as the recordings do.
fn drawn(recordings: &[Recorded], random: &mut SplitMix64) -> Recorded {
    let from = &recordings[random.below(recordings.len())].experiments[0].rows;
    // Pairs of rounds that mirror each other stay together.
    let first = random.below((from[0].logs.len() - ROUNDS) / 2 + 1) * 2;
    let part = |row: &Row| Row {
        part: row.part.clone(),
        labels: row.labels.clone(),
        bases: row.bases.clone(),
        logs: row.logs[first..first + ROUNDS].to_vec(),
        ..*row
    };
    report(from.iter().map(part).collect())
}

/// Two sides that are measured in turns, while rows become slower than copies by `drift` in all.
fn sides(recordings: &[Recorded], drift: f64, random: &mut SplitMix64) -> [Vec<Recorded>; 2] {
    let mut sides = [Vec::new(), Vec::new()];
    let rows = rows_with_a_base(&recordings[0]);
    for nth in 0..2 * SIDE {
        let mut run = drawn(recordings, random);
        for row in &rows {
            let slower = 1.0 + drift * nth as f64 / (2 * SIDE) as f64;
            slow_down(std::slice::from_mut(&mut run), *row, slower);
        }
        // As two programs in the order A B B A.
        sides[nth % 4 % 3 % 2].push(run);
    }
    sides
}

/// Makes a row slower by this factor in all rounds.
fn slow_down(runs: &mut [Recorded], row: usize, factor: f64) {
    for run in runs {
        for log in run.experiments[0].rows[row].logs.iter_mut().flatten() {
            *log += f64::ln(factor);
        }
    }
}

fn rows_with_a_base(of: &Recorded) -> Vec<usize> {
    let of = &of.experiments[0];
    (0..of.rows.len()).filter(|at| !of.is_machine(*at)).collect()
}

fn title(of: &Recorded, row: usize) -> String {
    let row = &of.experiments[0].rows[row];
    format!("quiet, {}, {}", row.part, row.name())
}

fn alarms(comparison: &Comparison) -> Vec<String> {
    [Verdict::Slower, Verdict::Faster].map(|verdict| comparison.with(verdict)).concat()
}

#[test]
fn a_tenth_slower_is_found_and_reports_without_a_change_raise_no_alarm() {
    let recordings = recordings();
    let mut random = SplitMix64(1);
    let rows = rows_with_a_base(&recordings[0]);
    let (mut found, mut false_alarms) = (0, 0);
    for _ in 0..1000 {
        let [before, mut after] = sides(&recordings, 0.05, &mut random);
        let unchanged = Comparison::of(&before, &after, None);
        false_alarms += usize::from(!alarms(&unchanged).is_empty());
        let slow = rows[random.below(rows.len())];
        slow_down(&mut after, slow, 1.1);
        let slower = Comparison::of(&before, &after, None).with(Verdict::Slower);
        found += usize::from(slower.contains(&title(&before[0], slow)));
    }
    assert!(found >= 950, "{found} of 1000 were found");
    assert!(false_alarms <= 50, "{false_alarms} of 1000 reports raised an alarm");
}

#[test]
fn one_run_of_each_side_raises_no_alarm_and_shows_large_changes() {
    let recordings = recordings();
    for (at, before) in recordings.iter().enumerate() {
        for after in &recordings[at + 1..] {
            let mut after = vec![after.clone()];
            let before = std::slice::from_ref(before);
            let unchanged = Comparison::of(before, &after, None);
            assert_eq!(alarms(&unchanged), [""; 0]);
            for row in rows_with_a_base(&before[0]) {
                slow_down(&mut after, row, 2.0);
                let slower = Comparison::of(before, &after, None).with(Verdict::Slower);
                assert_eq!(slower, [title(&before[0], row)]);
                slow_down(&mut after, row, 0.5);
            }
        }
    }
}

#[test]
fn a_slower_machine_is_no_alarm_and_is_told() {
    let before = recordings();
    let mut after = before.clone();
    for row in 0..after[0].experiments[0].rows.len() {
        slow_down(&mut after, row, 1.5);
    }
    let comparison = Comparison::of(&before, &after, Some(0.0));
    assert_eq!(alarms(&comparison), [""; 0]);
    assert_eq!(comparison.copies.len(), 2);
    for copies in &comparison.copies {
        assert!((copies.change.shares()[0] - 0.5).abs() < 1e-9, "{copies:?}");
        assert_eq!(copies.names.len(), 5);
    }
    let text = Format::WIDE.write(&comparison.document([&["a".to_owned()], &["b".to_owned()]]));
    assert!(text.contains("changed by up to +50.0 %"), "{text}");
}

/// Two reports of a copy and a leap over twelve rounds, the second report after a change.
fn two(change: impl Fn(&mut Recorded)) -> Comparison {
    let row = |way: &str, ns: f64| Row {
        part: "all".to_owned(),
        labels: vec![("way", way.into())],
        bases: vec![0],
        logs: (0..12).map(|round| Some((ns + f64::from(round % 3)).ln())).collect(),
        lost: 0,
        moved: Some(1.0),
    };
    let before = report(vec![row("memcpy", 100.0), row("leap", 200.0)]);
    let mut after = before.clone();
    change(&mut after);
    Comparison::of(&[before], &[after], None)
}

#[test]
fn objections_are_about_rows_that_do_less() {
    assert_eq!(two(|_| ()).objections(), [""; 0]);
    let lost = two(|after| after.experiments[0].rows[1].lost = 2);
    let said = "quiet, all, leap: words were lost: 2, by file 1 of the second side";
    assert_eq!(lost.objections(), [said]);
    let of_a_copy = two(|after| after.experiments[0].rows[0].lost = 1);
    assert_eq!(of_a_copy.objections().len(), 1);
    let moved = two(|after| after.experiments[0].rows[1].moved = Some(0.5));
    assert_eq!(
        moved.objections(),
        ["quiet, all, leap: 50.0 % of the pages moved, all of them before"]
    );
    let unknown = two(|after| after.experiments[0].rows[1].moved = None);
    assert_eq!(unknown.objections().len(), 1);
    let rarely = two(|after| after.experiments[0].rows[1].logs.extend([None; 8]));
    assert_eq!(
        rarely.objections(),
        ["quiet, all, leap: known in 60.0 % of the rounds, in 100 % before"]
    );
    let slower = two(|after| slow_down(std::slice::from_mut(after), 1, 1.5));
    assert_eq!(slower.objections(), ["slower: quiet, all, leap"]);
    let faster = two(|after| slow_down(std::slice::from_mut(after), 1, 0.5));
    assert_eq!((faster.objections().len(), faster.with(Verdict::Faster).len()), (0, 1));
}

#[test]
fn rows_that_cannot_be_compared_are_objections_too() {
    let reason = |change: fn(&mut Recorded)| {
        let comparison = two(change);
        assert_eq!(comparison.count(), 0);
        comparison.objections().join("; ")
    };
    let missing = reason(|after| after.experiments[0].rows.truncate(1));
    assert_eq!(missing, "quiet, all, leap: file 1 of the second side does not have it");
    let few = reason(|after| after.experiments[0].rows[1].logs.truncate(11));
    assert!(few.contains("too few rounds"), "{few}");
    let other = reason(|after| {
        after.experiments[0].setting.insert("bytes".to_owned(), 7.into());
    });
    assert_eq!(other, "quiet: settings differ: bytes unknown and 7");
    let base = reason(|after| after.experiments[0].rows[1].bases.clear());
    assert!(base.contains("not all files have memcpy"), "{base}");
}

#[test]
fn rows_that_cannot_be_compared_for_one_reason_are_one_sentence() {
    let before = &recordings()[..1];
    let mut after = before.to_vec();
    for row in &mut after[0].experiments[0].rows {
        row.logs.truncate(4);
    }
    let comparison = Comparison::of(before, &after, None);
    let rows = comparison.objections().len();
    assert!(rows > 1 && comparison.count() == 0);
    let said = comparison.left_out();
    assert_eq!(said.len(), 1);
    let is_said = said[0].starts_with(&format!("quiet, {rows} rows (pages of 4k, "));
    assert!(is_said && said[0].contains("; ...): too few rounds"), "{said:?}");
    let files = ["a".to_owned()];
    let text = Format::WIDE.write(&comparison.document([&files, &files]));
    assert!(text.contains(&format!("Not compared: {rows} rows; the reasons are below.")), "{text}");
}

#[test]
fn settings_are_facts_and_no_results() {
    let read = |bytes: u64, summary: &str| {
        let json = serde_json::json!({
            "experiment": "sustained", "figure": "of a paper", "bytes": bytes, "rows": [],
            "samples": [], "summary": [summary], "method": {"seed": 1},
        });
        Recorded::read(&json.to_string(), &[&sustained::ABOUT]).unwrap()
    };
    let settings = |of: &Recorded| of.experiments[0].setting.clone();
    assert_eq!(settings(&read(1, "faster")), settings(&read(1, "slower")));
    assert_ne!(settings(&read(1, "faster")), settings(&read(2, "faster")));
}

#[test]
fn a_change_of_the_librarys_own_copy_loop_is_one_of_its_row() {
    let before = recordings();
    let mut after = before.clone();
    let is_loop = |row: &Row| row.name().starts_with("copy loop") && row.part == "pages of 4k";
    let row = after[0].experiments[0].rows.iter().position(is_loop).unwrap();
    slow_down(&mut after, row, 3.0);
    assert_eq!(alarms(&Comparison::of(&before, &after, None)), [title(&before[0], row)]);
}

#[test]
fn a_row_that_another_one_is_compared_with_is_judged_if_it_has_a_base() {
    let mut before = recordings();
    let rows = rows_with_a_base(&before[0]);
    for run in &mut before {
        run.experiments[0].rows[rows[1]].bases = vec![rows[0]];
    }
    let mut after = before.clone();
    slow_down(&mut after, rows[0], 3.0);
    let comparison = Comparison::of(&before, &after, None);
    assert!(comparison.with(Verdict::Slower).contains(&title(&before[0], rows[0])));
}

#[test]
fn a_row_of_any_file_of_the_first_side_counts() {
    let mut before = recordings();
    let after = before.clone();
    let last = *rows_with_a_base(&before[0]).last().unwrap();
    before[0].experiments[0].rows.truncate(last);
    let objections = Comparison::of(&before, &after, None).objections();
    let lacks = "file 1 of the first side does not have it";
    assert_eq!(objections, [format!("{}: {lacks}", title(&after[0], last))]);
}

/// A result of `sustained` with these shares of writes that were kept beside a leap.
fn kept(shares: [f64; 12]) -> Recorded {
    let row = |row: usize, way: &str| {
        serde_json::json!({"row": row, "part": "all", "way": way, "area_bytes": null,
            "threads": null, "base_rows": [0], "lost": 0, "moved_ratio": 1.0})
    };
    let mut samples = Vec::new();
    for (round, share) in shares.iter().enumerate() {
        samples.push(serde_json::json!({"row": 0, "round": round, "kept_ratio": 1.0}));
        samples.push(serde_json::json!({"row": 1, "round": round, "kept_ratio": share}));
    }
    let rows = [row(0, "none"), row(1, "auto")];
    let json = serde_json::json!({
        "experiment": "sustained", "bytes": 1, "rows": rows, "samples": samples,
    });
    Recorded::read(&json.to_string(), &[&sustained::ABOUT]).unwrap()
}

#[test]
fn fewer_writes_that_were_kept_are_slower() {
    let shares = |of: f64| std::array::from_fn(|round| of + 0.001 * (round % 3) as f64);
    let compare =
        |first, second| Comparison::of(&[kept(shares(first))], &[kept(shares(second))], None);
    let name = "sustained, all, auto";
    assert_eq!(compare(0.9, 0.7).with(Verdict::Slower), [name]);
    assert_eq!(compare(0.7, 0.9).with(Verdict::Faster), [name]);
    // A fall of less than a tenth, and of a little more.
    assert_eq!(alarms(&compare(0.9, 0.815)), [""; 0]);
    assert_eq!(alarms(&compare(0.9, 0.8)), [name]);
    // Nothing is kept any more.
    let none = Comparison::of(&[kept(shares(0.9))], &[kept([0.0; 12])], None);
    assert_eq!(none.objections().len(), 1);
    let files = ["a".to_owned()];
    let text = Format::WIDE.write(&compare(0.9, 0.8).document([&files, &files]));
    assert!(text.contains("none") && text.contains("100%"), "{text}");
}

#[test]
fn a_file_that_has_something_twice_is_refused() {
    let about = [&sustained::ABOUT];
    let row = r#"{"part": "all", "way": "auto", "area_bytes": null, "threads": null,
                  "base_rows": [], "lost": 0}"#;
    let one =
        |rows: &str| format!(r#"{{"experiment": "sustained", "rows": [{rows}], "samples": []}}"#);
    assert!(Recorded::read(&one(row), &about).is_ok());
    let twice = Recorded::read(&one(&format!("{row}, {row}")), &about).unwrap_err();
    assert_eq!(twice.to_string(), "it has sustained, all, auto twice, so it is not from one run");
    let all = format!(r#"{{"experiments": [{}, {}]}}"#, one(row), one(row));
    assert!(Recorded::read(&all, &about).unwrap_err().to_string().contains("twice"));
}
