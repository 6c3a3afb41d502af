//! The test of a comparison on recorded noise: runs of one program on one machine, resampled.
//!
//! The recordings are of `bench quiet --size 64m --page-size 4k,thp --area 512k,16m --runs 60` on a
//! virtual machine with two CPUs and one node, some minutes apart. Other tasks ran on it now and
//! then. The same row differs by 3 % to 9 % (standard deviation) between them.

use super::recorded::{Experiment, Row};
use super::*;
use crate::export::Format;
use crate::random::SplitMix64;

const RUNS: [&str; 4] = [
    include_str!("recorded_noise/1.txt"),
    include_str!("recorded_noise/2.txt"),
    include_str!("recorded_noise/3.txt"),
    include_str!("recorded_noise/4.txt"),
];
/// Rounds of a recording, and of a run that is drawn from them.
const ROUNDS: usize = 60;
/// Rounds that follow each other in a run that is drawn: about twenty seconds.
const BLOCK: usize = 20;
/// Runs of a side.
const SIDE: usize = 14;

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
    let experiment =
        Experiment { name: "quiet".to_owned(), more_is_better: false, setting: Map::new(), rows };
    Recorded { experiments: vec![experiment], host: Map::new(), warnings: Vec::new() }
}

/// A run of rounds from all recordings, in blocks. All rows of a block are of the same time, so
/// that a drift meets all of them, and recordings that differ make blocks that differ.
fn drawn(recordings: &[Recorded], random: &mut SplitMix64) -> Recorded {
    let mut rows = recordings[0].experiments[0].rows.clone();
    rows.iter_mut().for_each(|row| row.logs.clear());
    while rows[0].logs.len() < ROUNDS {
        let from = &recordings[random.below(recordings.len())].experiments[0];
        // Pairs of rounds that mirror each other stay together.
        let first = random.below((from.rows[0].logs.len() - BLOCK) / 2 + 1) * 2;
        for (row, from) in rows.iter_mut().zip(&from.rows) {
            row.logs.extend(&from.logs[first..first + BLOCK]);
        }
    }
    report(rows)
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
    (0..of.rows.len()).filter(|at| !of.is_base(*at)).collect()
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
    let (mut found, mut false_alarms) = (0, 0);
    for _ in 0..1000 {
        let mut side = || (0..SIDE).map(|_| drawn(&recordings, &mut random)).collect::<Vec<_>>();
        let (before, mut after) = (side(), side());
        let unchanged = Comparison::of(&before, &after, None);
        false_alarms += usize::from(!alarms(&unchanged).is_empty());
        let rows = rows_with_a_base(&before[0]);
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
        assert_eq!(copies.names.len(), 6);
    }
    let text = Format::WIDE.write(&comparison.document([&["a".to_owned()], &["b".to_owned()]]));
    assert!(text.contains("copies of the same bytes changed by up to +50"), "{text}");
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
    assert_eq!(lost.objections(), ["quiet, all, leap: 2 words lost"]);
    let moved = two(|after| after.experiments[0].rows[1].moved = Some(0.5));
    assert_eq!(moved.objections(), ["quiet, all, leap: 50.0 % of the pages moved, 100 % before"]);
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
    assert!(base.contains("nothing in its rounds"), "{base}");
}

#[test]
fn fewer_writes_that_were_kept_are_slower() {
    let all = two(|after| slow_down(std::slice::from_mut(after), 1, 0.5));
    assert_eq!(all.with(Verdict::Slower).len(), 0);
    let mut row = all.rows.into_iter().next().unwrap();
    row.change.more_is_better = true;
    assert_eq!(row.change.verdict(0.1), Verdict::Slower);
}
