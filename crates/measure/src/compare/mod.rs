//! Results of the same experiments, before and after a change: the changes, their sizes, and
//! whether they are more than noise.
//!
//! * **A row is compared by its ratio to copies of the same bytes in the same round**, and not by
//!   its time. A machine that copies more slowly today makes both slow, so it raises no alarm. The
//!   copies are all bases that the row had when it was measured, but no copy loop of the library:
//!   a change of the library would hide in it. They count by the mean of their logarithms, which
//!   has less noise than the fastest one. Their own time is the time of the machine. It is shown
//!   apart, and it is never an alarm. Where the base is no copy, as the memory that stays in
//!   `tpch`, it stands for the machine likewise.
//! * **Several runs of each side are compared by the means of the runs**: a machine drifts over
//!   minutes, so two runs of one program differ by more than the noise within them. On an idle
//!   virtual machine the differences of ratios were twice as large as the rounds of a run suggest.
//!   From [`LEAST_VALUES`] runs of each side on, each run is one value.
//! * **With fewer runs, two rounds that mirror each other are one value** ([`crate::method`]). A
//!   drift over more than a run is not in these intervals, so the margin is larger:
//!   [`MARGIN_OF_FEW`] instead of [`MARGIN`].
//! * **The change is a difference of means of logarithms**, with an interval (`trimmed`).
//! * **From that many runs on, all rows of a report together raise a false alarm with at most 5
//!   %** (Bonferroni: each row has its share of them). With 20 rows, intervals of 95 % for each
//!   would raise one in two of three reports.
//! * **An alarm is a change that is surely larger than the margin**: the whole interval lies
//!   beyond it.
//!
//! Nothing here measures. The same files give the same answer.

mod document;
mod recorded;
mod trimmed;

#[cfg(test)]
mod tests;

use std::fmt;

use serde_json::{Map, Value as Json};

use self::recorded::{Experiment, Row};
pub use self::recorded::{Recorded, Unreadable};
use self::trimmed::{Difference, Trimmed};
use crate::experiments::Unit;
use crate::figures::percent;
use crate::method::{CONFIDENCE, LEAST_VALUES};

/// With [`LEAST_VALUES`] runs of each side, a change of this share or less is never an alarm.
pub const MARGIN: f64 = 0.01;
/// With fewer runs. Ratios of recorded runs of one program differed by up to 10 % more than their
/// intervals allow.
pub const MARGIN_OF_FEW: f64 = 0.1;
/// A change that a run should be able to see, for the advice on the number of rounds.
pub const WANTED: f64 = 0.1;

/// An estimate lies above the true value as often as below, so a slowdown at the end of an interval
/// is an alarm in one of two runs. With room for half of an interval more it is one in 95 % of them
/// (1.64 standard errors, where half of an interval has 3.2 for 20 rows).
const NEARLY_ALWAYS: f64 = 1.5;

/// How a row changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Surely slower, by more than the margin.
    Slower,
    /// Surely faster, by more than the margin.
    Faster,
    /// Neither is sure.
    Unchanged,
}

/// The change of a number from the first file to the second.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    /// The number in the first file.
    first: f64,
    /// The number in the second file.
    second: f64,
    /// The logarithm of second / first.
    log: Difference,
    /// Whether more of it is better, as of writes that were kept.
    more_is_better: bool,
    /// The unit of the number, where it is no ratio.
    unit: Unit,
}

impl Change {
    /// From the means of both sides; `level` is the probability with which its interval misses the
    /// true change.
    fn of(means: [Trimmed; 2], level: f64, experiment: &Experiment) -> Change {
        let [first, second] = means;
        Change {
            first: first.mean.exp(),
            second: second.mean.exp(),
            log: Difference::of(first, second, level),
            more_is_better: experiment.more_is_better,
            unit: experiment.unit,
        }
    }

    /// The change as a share of the first number, with both ends of its interval.
    fn shares(self) -> [f64; 3] {
        let Difference { middle, half } = self.log;
        [middle, middle - half, middle + half].map(f64::exp_m1)
    }

    fn verdict(self, margin: f64) -> Verdict {
        let [_, low, high] = self.shares();
        match (low > margin, high < -margin) {
            (false, false) => Verdict::Unchanged,
            (more, _) if more == self.more_is_better => Verdict::Faster,
            _ => Verdict::Slower,
        }
    }

    /// The least slowdown that would have been an alarm, as the amount of its share.
    fn visible(self, margin: f64) -> f64 {
        match self.more_is_better {
            true => -((-margin).ln_1p() - self.log.half).exp_m1(),
            false => (margin.ln_1p() + self.log.half).exp_m1(),
        }
    }
}

/// A row that all files have.
#[derive(Debug)]
struct Judged {
    experiment: String,
    part: String,
    labels: Vec<(&'static str, Json)>,
    name: String,
    change: Change,
    /// The change of its time, which has that of the machine in it.
    time: f64,
    /// Runs, or pairs of rounds, of the side that has fewer.
    values: usize,
    /// The share of pages that moved, where the experiment has it: the mean of the runs.
    moved: [Option<f64>; 2],
    /// The share of rounds in which the number is known.
    known: [f64; 2],
}

/// All pages moved, if the share is this or more.
const ALL: f64 = 0.9995;

impl Judged {
    /// Its experiment, part and labels.
    fn title(&self) -> String {
        format!("{}, {}, {}", self.experiment, self.part, self.name)
    }

    /// Sentences, if it does less than before: not all pages move, or the number is unknown in more
    /// rounds.
    fn does_less(&self) -> Vec<String> {
        let mut said = Vec::new();
        let [before, after] = self.moved;
        if before.is_some_and(|share| share >= ALL) && after.is_none_or(|share| share < ALL) {
            let share = after.map_or("an unknown share".to_owned(), percent);
            said.push(format!("{}: {share} of the pages moved, all of them before", self.title()));
        }
        let [before, after] = self.known;
        if after < before {
            let shares = [after, before].map(percent);
            let [after, before] = shares;
            let title = self.title();
            said.push(format!("{title}: known in {after} of the rounds, in {before} before"));
        }
        said
    }
}

/// The copies that rows of a part are compared with.
#[derive(Debug)]
struct Copies {
    experiment: String,
    part: String,
    names: Vec<String>,
    change: Change,
}

/// A row of the first side that was not compared, or a whole experiment.
#[derive(Debug)]
struct LeftOut {
    experiment: String,
    /// Its part and name; empty for an experiment.
    row: String,
    why: String,
}

impl LeftOut {
    fn row(experiment: &Experiment, row: &Row, why: String) -> LeftOut {
        let name = format!("{}, {}", row.part, row.name());
        LeftOut { experiment: experiment.name.clone(), row: name, why }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeftOut { experiment, row, why } = self;
        match row.as_str() {
            "" => write!(out, "{experiment}: {why}"),
            row => write!(out, "{experiment}, {row}: {why}"),
        }
    }
}

/// Results before and after a change, row by row.
#[derive(Debug)]
pub struct Comparison {
    rows: Vec<Judged>,
    copies: Vec<Copies>,
    left_out: Vec<LeftOut>,
    /// Rows of the second side that lost words.
    lost: Vec<String>,
    /// Those of the second side alone, differences of machines, and warnings about them.
    notes: Vec<String>,
    margin: f64,
    /// The files of each side.
    runs: [usize; 2],
}

/// The means of the pairs of rounds in which both logarithms are known.
fn pairs(log: impl Fn(usize) -> Option<f64>, rounds: usize) -> Vec<f64> {
    let pair = |first: usize| Some((log(2 * first)? + log(2 * first + 1)?) / 2.0);
    (0..rounds / 2).filter_map(pair).collect()
}

impl Experiment {
    /// The mean logarithm of copies in a round.
    fn copies(&self, of: &[usize], round: usize) -> Option<f64> {
        let mut sum = 0.0;
        for base in of {
            sum += self.rows[*base].logs.get(round).copied()??;
        }
        (!of.is_empty()).then(|| sum / of.len() as f64)
    }

    /// The logarithms of the ratios of a row to copies.
    fn ratios(&self, row: &Row, copies: &[usize]) -> Vec<f64> {
        let ratio = |round: usize| Some(row.logs[round]? - self.copies(copies, round)?);
        pairs(ratio, row.logs.len())
    }

    fn times(&self, copies: &[usize]) -> Vec<f64> {
        let rounds = copies.iter().map(|base| self.rows[*base].logs.len()).min().unwrap_or(0);
        pairs(|round| self.copies(copies, round), rounds)
    }

    /// The number of the row that is the same thing as one of another file, where it has the number
    /// `at`; usually that is its number here, too.
    fn find(&self, row: &Row, at: usize) -> Option<usize> {
        let is_same = |at: &usize| self.rows.get(*at).is_some_and(|of| of.is_same(row));
        Some(at).filter(is_same).or_else(|| (0..self.rows.len()).find(is_same))
    }

    /// The bases of a row with which it is compared: those that are no copy loop of the library,
    /// because a change of the library would hide in them; else all.
    fn bases(&self, row: &Row) -> Vec<usize> {
        let others = row.bases.iter().copied();
        let others: Vec<usize> = others.filter(|at| !self.rows[*at].is_of_the_library()).collect();
        if others.is_empty() { row.bases.clone() } else { others }
    }

    /// Whether a row is the machine, and not judged: it is a copy by the C library, or its own
    /// base.
    fn is_machine(&self, at: usize) -> bool {
        let row = &self.rows[at];
        row.is_memcpy() || self.bases(row).contains(&at)
    }
}

/// A row in one of the files.
struct Found<'a> {
    experiment: &'a Experiment,
    row: &'a Row,
    /// The rows of the copies, by number.
    copies: Vec<usize>,
}

impl Found<'_> {
    fn ratios(&self) -> Vec<f64> {
        self.experiment.ratios(self.row, &self.copies)
    }

    fn times_of_copies(&self) -> Vec<f64> {
        self.experiment.times(&self.copies)
    }
}

/// A row in all files of both sides, with the copies that all of them have.
struct Matched<'a> {
    sides: [Vec<Found<'a>>; 2],
}

impl<'a> Matched<'a> {
    fn first(&self) -> &Found<'a> {
        &self.sides[0][0]
    }

    /// The mean of each side, with its error: over runs if there are enough, else over pairs of
    /// rounds. Also the number of values of the side that has fewer. `None`: too few.
    fn sides(&self, list: impl Fn(&Found<'a>) -> Vec<f64>) -> (Option<[Trimmed; 2]>, usize) {
        let lists = self.sides.each_ref().map(|side| side.iter().map(&list).collect::<Vec<_>>());
        if has_enough_runs(self.sides.each_ref().map(Vec::len)) {
            let of_runs = |runs: &Vec<Vec<f64>>| {
                let means: Option<Vec<f64>> =
                    runs.iter().map(|run| Some(Trimmed::of(run)?.mean)).collect();
                Trimmed::of_independent(&means?)
            };
            let means = of_runs(&lists[0]).zip(of_runs(&lists[1]));
            let runs = self.sides.each_ref().map(Vec::len);
            return (means.map(|(one, other)| [one, other]), runs[0].min(runs[1]));
        }
        let all = lists.map(|runs| runs.concat());
        let fewer = all[0].len().min(all[1].len());
        let means = Trimmed::of(&all[0]).zip(Trimmed::of(&all[1]));
        (means.map(|(one, other)| [one, other]).filter(|_| fewer >= LEAST_VALUES), fewer)
    }

    /// The change of the mean logarithm of its time, as a share.
    fn change_of_time(&self) -> f64 {
        let [first, second] = self.sides.each_ref().map(|side| {
            let known: Vec<f64> =
                side.iter().flat_map(|found| found.row.logs.iter().flatten().copied()).collect();
            known.iter().sum::<f64>() / known.len() as f64
        });
        (second - first).exp_m1()
    }

    /// Why it has no mean.
    fn too_few(&self) -> String {
        let few = "too few rounds to tell a change from noise; measure at least";
        let how = "(--min-runs, with enough --time-limit)";
        match has_enough_runs(self.sides.each_ref().map(Vec::len)) {
            true => format!("{few} 8 of them in each run {how}"),
            false => format!("{few} {} of them {how}, or six runs of each side", 2 * LEAST_VALUES),
        }
    }

    fn judged(&self, level: f64) -> Result<Judged, LeftOut> {
        let Found { experiment, row, .. } = self.first();
        let (means, values) = self.sides(Found::ratios);
        let Some(means) = means else {
            return Err(LeftOut::row(experiment, row, self.too_few()));
        };
        let moved = |side: &Vec<Found<'_>>| {
            let shares: Option<Vec<f64>> = side.iter().map(|found| found.row.moved).collect();
            shares.map(|shares| shares.iter().sum::<f64>() / shares.len() as f64)
        };
        let known = |side: &Vec<Found<'_>>| {
            let logs = || side.iter().flat_map(|found| &found.row.logs);
            logs().flatten().count() as f64 / logs().count() as f64
        };
        Ok(Judged {
            experiment: experiment.name.clone(),
            part: row.part.clone(),
            labels: row.labels.clone(),
            name: row.name(),
            change: Change::of(means, level, experiment),
            time: self.change_of_time(),
            values,
            moved: self.sides.each_ref().map(moved),
            known: self.sides.each_ref().map(known),
        })
    }
}

/// The sides, in messages.
const ORDINALS: [&str; 2] = ["first", "second"];

/// Whether each side has enough runs that a run is a value.
fn has_enough_runs(runs: [usize; 2]) -> bool {
    runs[0].min(runs[1]) >= LEAST_VALUES
}

/// Finds a row in all files, or says which one lacks it. `at` is its number in one of them.
fn find<'a>(files: [&'a [Recorded]; 2], of: &Experiment, at: usize) -> Result<Matched<'a>, String> {
    let mut sides = [Vec::new(), Vec::new()];
    for (side, (files, ordinal)) in sides.iter_mut().zip(files.into_iter().zip(ORDINALS)) {
        for (nth, file) in (1..).zip(files) {
            let experiment = file.experiments.iter().find(|other| other.name == of.name);
            let found = experiment.and_then(|has| Some((has, has.find(&of.rows[at], at)?)));
            let (experiment, row) = found
                .ok_or_else(|| format!("file {nth} of the {ordinal} side does not have it"))?;
            side.push(Found { experiment, row: &experiment.rows[row], copies: Vec::new() });
        }
    }
    for base in of.bases(&of.rows[at]) {
        let has = |found: &Found<'_>| {
            let is_it = found.experiment.find(&of.rows[base], base);
            is_it.filter(|row| found.row.bases.contains(row))
        };
        let all: Option<Vec<usize>> = sides.iter().flatten().map(has).collect();
        let all = all.ok_or_else(|| {
            let base = of.rows[base].name();
            format!("not all files have {base}, which it is compared with")
        })?;
        for (found, row) in sides.iter_mut().flatten().zip(all) {
            found.copies.push(row);
        }
    }
    match sides[0][0].copies.is_empty() {
        true => Err("it is compared with nothing in its rounds".to_owned()),
        false => Ok(Matched { sides }),
    }
}

/// The keys in which two objects differ, with both values.
fn differences(first: &Map<String, Json>, second: &Map<String, Json>) -> Vec<String> {
    let mut keys: Vec<&String> = first.keys().chain(second.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let value = |of: &Map<String, Json>, key: &str| {
        of.get(key).map_or("unknown".to_owned(), Json::to_string)
    };
    let differ = keys.into_iter().filter(|key| first.get(*key) != second.get(*key));
    differ.map(|key| format!("{key} {} and {}", value(first, key), value(second, key))).collect()
}

/// The facts of a host that make it the same machine in the same state.
const SAME_HOST: [&str; 14] = [
    "cpu_model",
    "microcode",
    "cpus_allowed",
    "cores",
    "smt",
    "kernel",
    "virtual",
    "distances",
    "thp_enabled",
    "thp_defrag",
    "boost",
    "thp_shmem_enabled",
    "numa_balancing",
    "governors",
];

fn host_facts(host: &Map<String, Json>) -> Map<String, Json> {
    let facts = host.iter().filter(|(key, _)| SAME_HOST.contains(&key.as_str()));
    facts.map(|(key, value)| (key.clone(), value.clone())).collect()
}

impl Comparison {
    /// Compares runs before a change with runs after it. `margin` is a share; `None` takes
    /// [`MARGIN`] or [`MARGIN_OF_FEW`].
    ///
    /// # Panics
    /// If a side has no run.
    pub fn of(first: &[Recorded], second: &[Recorded], margin: Option<f64>) -> Comparison {
        let files = [first, second];
        let (mut left_out, mut notes) = (Vec::new(), differences_of_hosts(files));
        let mut all: Vec<Matched<'_>> = Vec::new();
        let in_order = first
            .iter()
            .enumerate()
            .flat_map(|(nth, of)| of.experiments.iter().map(move |of| (nth, of)));
        for (nth, one) in in_order {
            let same = first.iter().chain(second).flat_map(|file| &file.experiments);
            let differ = same.filter(|other| other.name == one.name).find_map(|other| {
                let differ = differences(&one.setting, &other.setting);
                (!differ.is_empty()).then(|| differ.join("; "))
            });
            if let Some(differ) = differ {
                let is_said = |of: &LeftOut| of.experiment == one.name && of.row.is_empty();
                if !left_out.iter().any(is_said) {
                    let (experiment, row) = (one.name.clone(), String::new());
                    let why = format!("settings differ: {differ}");
                    left_out.push(LeftOut { experiment, row, why });
                }
                continue;
            }
            for (at, row) in one.rows.iter().enumerate() {
                if has(&first[..nth], one, at) || one.is_machine(at) {
                    continue;
                }
                match find(files, one, at) {
                    Ok(matched) => all.push(matched),
                    Err(why) => left_out.push(LeftOut::row(one, row, why)),
                }
            }
        }
        notes.extend(only_in_second(first, second));
        let level = (1.0 - CONFIDENCE) / all.len().max(1) as f64;
        let mut rows = Vec::new();
        for one in &all {
            match one.judged(level) {
                Ok(judged) => rows.push(judged),
                Err(why) => left_out.push(why),
            }
        }
        let runs = files.map(<[Recorded]>::len);
        let usual = if has_enough_runs(runs) { MARGIN } else { MARGIN_OF_FEW };
        let margin = margin.unwrap_or(usual);
        let lost = lost_words(second);
        Comparison { rows, copies: copies(&all), left_out, lost, notes, margin, runs }
    }

    /// How many rows were compared.
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// The names of the rows with this verdict.
    pub fn with(&self, verdict: Verdict) -> Vec<String> {
        let with = self.rows.iter().filter(|row| row.change.verdict(self.margin) == verdict);
        with.map(Judged::title).collect()
    }

    /// Rows of the first file that are slower in the second one, have lost words or moved fewer
    /// pages there, or were not compared, each with the reason.
    pub fn objections(&self) -> Vec<String> {
        let slower = self.with(Verdict::Slower).into_iter().map(|name| format!("slower: {name}"));
        let does_less = self.rows.iter().flat_map(Judged::does_less);
        slower
            .chain(self.lost.iter().cloned())
            .chain(does_less)
            .chain(self.left_out.iter().map(LeftOut::to_string))
            .collect()
    }

    /// Rows and experiments of the first side that were not compared, with reasons. Rows of one
    /// experiment that have the same reason are one sentence, with the names of the first three.
    pub fn left_out(&self) -> Vec<String> {
        let mut said: Vec<Vec<&LeftOut>> = Vec::new();
        for one in &self.left_out {
            let key = |of: &LeftOut| (of.experiment.clone(), of.why.clone());
            match said.iter_mut().find(|alike| key(alike[0]) == key(one)) {
                Some(alike) => alike.push(one),
                None => said.push(vec![one]),
            }
        }
        let sentence = |alike: Vec<&LeftOut>| match alike.as_slice() {
            [one] => one.to_string(),
            [first, ..] => {
                let names: Vec<&str> = alike.iter().take(3).map(|of| of.row.as_str()).collect();
                let more = if alike.len() > names.len() { "; ..." } else { "" };
                let (count, names) = (alike.len(), names.join("; "));
                format!("{}, {count} rows ({names}{more}): {}", first.experiment, first.why)
            }
            [] => String::new(),
        };
        said.into_iter().map(sentence).collect()
    }

    /// Whether a run is a value, and not a pair of rounds.
    fn is_of_runs(&self) -> bool {
        has_enough_runs(self.runs)
    }

    /// The values (runs, or pairs of rounds) with which a row's slowdown of [`WANTED`] is an alarm
    /// nearly always, by the noise that was found. `None` if no number suffices, because the margin
    /// is too large.
    fn values_needed(&self, row: &Judged) -> Option<usize> {
        let room = match row.change.more_is_better {
            true => (-self.margin).ln_1p() - (-WANTED).ln_1p(),
            false => WANTED.ln_1p() - self.margin.ln_1p(),
        };
        let enough = row.values as f64 * (NEARLY_ALWAYS * row.change.log.half / room).powi(2);
        (room > 0.0).then_some(enough.ceil() as usize)
    }
}

/// Each list of copies once, with the change of their time.
fn copies(all: &[Matched<'_>]) -> Vec<Copies> {
    let mut found: Vec<Copies> = Vec::new();
    for one in all {
        let Found { experiment, row, copies } = one.first();
        let names: Vec<String> = copies.iter().map(|at| experiment.rows[*at].name()).collect();
        let is_known = found.iter().any(|of| {
            (&of.experiment, &of.part, &of.names) == (&experiment.name, &row.part, &names)
        });
        if is_known {
            continue;
        }
        if let (Some(means), _) = one.sides(Found::times_of_copies) {
            found.push(Copies {
                experiment: experiment.name.clone(),
                part: row.part.clone(),
                names,
                change: Change::of(means, 1.0 - CONFIDENCE, experiment),
            });
        }
    }
    found
}

/// Differences between the machines of all files, and warnings about them.
fn differences_of_hosts(files: [&[Recorded]; 2]) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    let one = host_facts(&files[0][0].host);
    for (side, ordinal) in files.into_iter().zip(ORDINALS) {
        for (nth, file) in (1..).zip(side) {
            let differ = differences(&one, &host_facts(&file.host));
            if !differ.is_empty() {
                let differ = differ.join("; ");
                notes.push(format!(
                    "the machine of file {nth} of the {ordinal} side, or a setting of it, differs \
                     from that of the first file: {differ}"
                ));
            }
            let warnings = file.warnings.iter().filter(|warning| !notes.contains(warning));
            let warnings: Vec<String> = warnings.cloned().collect();
            notes.extend(warnings);
        }
    }
    notes
}

/// Rows that lost words in a file: any of them, also those that are not judged.
fn lost_words(files: &[Recorded]) -> Vec<String> {
    let mut said = Vec::new();
    for (nth, file) in (1..).zip(files) {
        for experiment in &file.experiments {
            for row in experiment.rows.iter().filter(|row| row.lost > 0) {
                let (name, part, lost) = (&experiment.name, &row.part, row.lost);
                let row = row.name();
                said.push(format!(
                    "{name}, {part}, {row}: words were lost: {lost}, by file {nth} of the second \
                     side"
                ));
            }
        }
    }
    said
}

/// Whether one of the files has a row of an experiment.
fn has(files: &[Recorded], of: &Experiment, at: usize) -> bool {
    let mut same =
        files.iter().flat_map(|file| &file.experiments).filter(|one| one.name == of.name);
    same.any(|one| one.find(&of.rows[at], at).is_some())
}

/// Rows that only the second side has.
fn only_in_second(first: &[Recorded], second: &[Recorded]) -> Vec<String> {
    let mut notes = Vec::new();
    for one in second.iter().flat_map(|file| &file.experiments) {
        for (_, row) in one.rows.iter().enumerate().filter(|(at, _)| !has(first, one, *at)) {
            let named = format!("{}, {}, {}", one.name, row.part, row.name());
            let note = format!("only the second side has {named}");
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
    }
    notes
}
