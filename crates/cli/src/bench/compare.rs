//! `pageleap bench compare`: two results of the same experiments, and whether a difference is more
//! than noise.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueHint};
use pageleap_measure::compare::{Comparison, Recorded};

use super::experiments::ABOUTS;
use crate::export::Exports;
use crate::stop::{Refusal, Stop};

/// Compare results before and after a change: the changes, and whether they are more than noise.
///
/// Takes files of `bench EXPERIMENT --export-json FILE` or of `bench all`. Each row is compared by
/// its first column of figures: by the ratio to copies of the same bytes in the same round, so a
/// machine that copies more slowly today raises no alarm. A row is called slower or faster if its
/// change is surely more than the margin. Rivals count, too; --engine of the measurement chooses.
///
/// A machine drifts over minutes, so two runs of one program differ by more than the noise within
/// them. With six or more runs of each side, each run is one value, and all intervals together
/// hold with 95 %. Measure both sides in turns. The column *visible* has the least slowdown that
/// would be called one; the text says how many runs show 10 % in nearly all cases.
///
/// Exit code: 0 compared; 1 with --fail-if-slower: a row of the first side is slower in the second
/// one, lost words or moved fewer pages there, or cannot be compared; 2 files without a row that
/// can be compared.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// Runs before the change, by comma
    #[arg(value_name = "FIRST", value_hint = ValueHint::FilePath, value_delimiter = ',')]
    #[arg(required = true, num_args = 1)]
    pub first: Vec<PathBuf>,

    /// Runs after it, by comma
    #[arg(value_name = "SECOND", value_hint = ValueHint::FilePath, value_delimiter = ',')]
    #[arg(required = true, num_args = 1)]
    pub second: Vec<PathBuf>,

    /// Never call a change of this percentage or less slower or faster [default: 1 with six runs of
    /// each side, else 10, because two runs of one program differ, too]
    #[arg(long, value_name = "PERCENT", value_parser = margin)]
    pub margin: Option<f64>,

    /// Exit with 1 if a row of the first side is slower in the second one, lost words or moved
    /// fewer pages there, or cannot be compared, because a file lacks it or has too few rounds
    #[arg(long)]
    pub fail_if_slower: bool,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench compare before.json after.json
      one run of each: changes of more than 10 %
  for i in 1 2 3 4 5 6; do
      ./before bench quiet --quick --export-json before-$i.json
      ./after bench quiet --quick --export-json after-$i.json
  done
  pageleap bench compare before-1.json,before-2.json,... after-1.json,after-2.json,...
      two versions of the program in turns, six runs of each: smaller changes
  pageleap bench compare before.json after.json --fail-if-slower --json
      for a script: the exit code is 1 if a row became slower";

fn margin(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').unwrap_or(text).parse::<f64>() {
        Ok(percent) if (0.0..100.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err("expected a percentage from 0 to below 100".to_owned()),
    }
}

/// Reads both files, prints and exports the comparison.
pub fn run(args: &CompareArgs) -> Result<(), Stop> {
    let (first, second) = (read_all(&args.first)?, read_all(&args.second)?);
    refuse_twice(&args.first, &first)?;
    refuse_twice(&args.second, &second)?;
    let exports = args.exports.open()?;
    let comparison = Comparison::of(&first, &second, args.margin);
    if comparison.count() == 0 {
        let reasons = match comparison.left_out().as_slice() {
            [] => "it has none with a base".to_owned(),
            reasons => reasons.join("; "),
        };
        let why = format!("{}: no row can be compared: {reasons}", args.first[0].display());
        return Err(Refusal::new(why).into());
    }
    let names = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect();
    let names: [Vec<String>; 2] = [names(&args.first), names(&args.second)];
    let document = comparison.document([&names[0], &names[1]]);
    exports.print(&document, args.json)?;
    let worse = comparison.objections();
    if args.fail_if_slower && !worse.is_empty() {
        return Err(anyhow!("{}", worse.join("; ")).into());
    }
    Ok(())
}

/// Refuses a run that a side has twice: it would count as two that agree, and nothing agrees so
/// well.
fn refuse_twice(paths: &[PathBuf], runs: &[Recorded]) -> Result<(), Refusal> {
    for (at, run) in runs.iter().enumerate() {
        if let Some(other) = runs[..at].iter().position(|other| other.is_same_run(run)) {
            let [one, other] = [&paths[other], &paths[at]].map(|path| path.display());
            let why = "both are the same run; measure again for a further one";
            return Err(Refusal::new(format!("{one} and {other}: {why}")));
        }
    }
    Ok(())
}

fn read_all(paths: &[PathBuf]) -> Result<Vec<Recorded>, Refusal> {
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Result<Recorded, Refusal> {
    let named = |why: &dyn std::fmt::Display| Refusal::new(format!("{}: {why}", path.display()));
    let json = fs::read_to_string(path).map_err(|why| named(&why))?;
    Recorded::read(&json, &ABOUTS).map_err(|why| named(&why))
}
