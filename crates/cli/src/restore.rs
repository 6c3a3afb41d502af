//! `pageleap restore`: puts back settings of the machine that ended processes have left.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use pageleap_measure::export::Format;
use pageleap_settings::{Entry, Life, Listed, Settled, UserEntry};
use serde::Serialize;

use crate::export::Exports;
use crate::stop::Stop;
use crate::{output, settings, sysroot};

/// Put back settings of the whole machine that pageleap has changed for processes that have ended.
///
/// Commands that change a setting of the machine (a sysctl, a file of /sys, reserved huge pages)
/// note it in /run/pageleap/settings before. A second process puts it back when the last process
/// that uses it has ended, also after SIGKILL. If that one was killed, too, the next command of
/// pageleap does it, or this one. A value that somebody else has written meanwhile stays.
///
/// The command then shows the settings that are still borrowed, and by whom. For a service of
/// systemd, which kills all of its processes: ExecStopPost=pageleap restore.
///
/// Examples: `pageleap restore`; `pageleap restore --list`; `pageleap restore --force`; `pageleap
/// restore --json`.
///
/// Exit code: 0 everything that ended processes had left is back, or is shown (--list); 1 a setting
/// could not be put back, may have been left by a process in a container that is not seen from here,
/// a note is damaged, or the ledger cannot be read; 2 a request that makes no
/// sense.
#[derive(Args, Clone, Debug)]
pub struct RestoreArgs {
    /// Show what is borrowed and by whom, and change nothing
    #[arg(long, conflicts_with = "force")]
    pub list: bool,

    /// Also put back settings whose processes live, remove damaged notes, and notes about settings
    /// that are gone; huge pages of living processes stay
    #[arg(long)]
    pub force: bool,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,

    /// The ledger and the settings of the files below this folder; for tests
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder, hide = true)]
    pub sysroot: Option<PathBuf>,
}

/// The settings that were put back, and those that are borrowed afterwards.
struct Outcome {
    settled: Vec<Settled>,
    listed: Listed,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Object<'a> {
    /// Settings that were put back, changed by others, or could not be put back.
    settled: &'a [Settled],
    /// Settings that are borrowed now.
    borrowed: &'a [Entry],
    /// Notes that make no sense, each as a sentence.
    damaged: Vec<String>,
}

/// Puts settings back, and prints and exports the outcome.
pub fn run(args: &RestoreArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    let ledger = settings::ledger(args.sysroot.as_ref());
    let settled = if args.list { Vec::new() } else { ledger.restore(args.force)? };
    let outcome = Outcome { settled, listed: ledger.list()? };
    let shown = |format| match format {
        Format::Json => object(&outcome),
        Format::Text { .. } => Ok(text(&outcome)),
    };
    let printed = shown(output::format(args.json)).and_then(|text| output::write(&text));
    exports.write(printed, shown)?;
    if args.list {
        return Ok(());
    }
    let stay = outcome.settled.iter().filter(|one| !one.is_settled()).count();
    match stay + outcome.listed.damaged.len() {
        0 => check_users(&outcome.listed.borrowed),
        bad => Err(Stop::Failed(anyhow!("settings that are not as they were: {bad}"))),
    }
}

/// Fails if a setting has another value than before, and nobody is known to need it.
fn check_users(borrowed: &[Entry]) -> Result<(), Stop> {
    let is_changed = |entry: &Entry| entry.now.as_ref().is_some_and(|now| *now != entry.before);
    let is_unknown = |entry: &Entry| {
        let is = |life| entry.users.iter().any(|one| one.life == life);
        is(Life::Unknown) && !is(Life::Lives)
    };
    let left = borrowed.iter().filter(|entry| is_changed(entry) && is_unknown(entry));
    let left: Vec<&str> = left.map(|entry| entry.setting.as_str()).collect();
    match left.is_empty() {
        true => Ok(()),
        false => Err(Stop::Failed(anyhow!(
            "changed for processes in containers that are not seen from here: {}; if they have \
             ended, type: pageleap restore --force",
            left.join(" and ")
        ))),
    }
}

/// The object of `--json`, on one line.
fn object(outcome: &Outcome) -> anyhow::Result<String> {
    let object = Object {
        settled: &outcome.settled,
        borrowed: &outcome.listed.borrowed,
        damaged: outcome.listed.damaged.iter().map(ToString::to_string).collect(),
    };
    Ok(serde_json::to_string(&object).context("the result could not be written as JSON")? + "\n")
}

fn text(outcome: &Outcome) -> String {
    let mut text = String::new();
    outcome.settled.iter().for_each(|one| text += &format!("{one}\n"));
    outcome.listed.damaged.iter().for_each(|one| text += &format!("{one}\n"));
    if outcome.listed.borrowed.is_empty() {
        return text + "nothing is borrowed\n";
    }
    let head = ["setting", "borrowed", "before", "now", "process", "for"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for entry in &outcome.listed.borrowed {
        rows.extend(entry.users.iter().map(|one| row(entry, one)));
    }
    text + &output::aligned(&rows, "", |_, _| true)
}

fn row(entry: &Entry, one: &UserEntry) -> Vec<String> {
    let life = match one.life {
        Life::Lives => "",
        Life::Ended => ", ended",
        Life::Unknown => ", in a container that is not seen from here",
    };
    let now = entry.now.as_deref().unwrap_or("-");
    let cells = [entry.setting.as_str(), &entry.value, &entry.before, now];
    let cells = cells.into_iter().map(str::to_owned);
    cells.chain([format!("{}{life}", one.user), one.why.clone()]).collect()
}
